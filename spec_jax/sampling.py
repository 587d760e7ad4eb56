"""Logits to probabilities to tokens: the only place with bias, temperature, top-k, top-p and min-p.

Plain decoding, verification and the bonus token all come through here, so that they see the same
distribution. Every draw takes one uniform number from a stream named by (sequence, round, position,
purpose), so a result does not depend on the other rows of the batch. Coupled sampling instead takes
Gumbel noise named by (sequence, absolute position) alone, which draft and target share.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.errors import UserError
from spec_jax.types import Keys

GREEDY_BELOW = 1e-5  # temperatures below this are greedy everywhere: draft, verification, bonus

# Purposes of the draws of one round; each is a stream of its own.
DRAFT, ACCEPT, RESIDUAL, BONUS = range(4)

# Folded into a row's key in front of the positions of the coupled noise; no position is as large,
# so that it meets no round's key.
_COUPLED = 2**31 - 1

_MOST_BIAS = 1e6  # float32 still tells logits apart beside it at any temperature that counts

_BLOCK = 256  # width of the second level of the inverse-CDF search


@dataclasses.dataclass(frozen=True)
class Sampling:
  """The static part of the sampling settings; the temperature is an array, one per row.

  Attributes:
    greedy: every row has a temperature below GREEDY_BELOW; logits are not turned into
      probabilities at all.
    top_p: keep the smallest set of most probable ids whose mass reaches top_p (after temperature).
    top_k: keep the k most probable ids; 0 keeps all. Ids as probable as the last one kept stay too,
      here and in top_p.
    min_p: keep the ids that are at least min_p times as probable as the most probable one, of what
      top_k and top_p left; 0 keeps all.
    bias: (id, value) pairs added to the raw logits before everything else, under greedy too; -inf
      bans an id.
    coupled: tokens are drawn as argmax(log p + Gumbel noise of their position).
  """

  greedy: bool = True
  top_p: float = 1.0
  top_k: int = 0
  min_p: float = 0.0
  bias: tuple[tuple[int, float], ...] = ()
  coupled: bool = False

  def __post_init__(self):
    if not 0 < self.top_p <= 1:
      raise UserError(f"top_p={self.top_p} must be in (0, 1]")
    if self.top_k < 0:
      raise UserError(f"top_k={self.top_k} must be >= 0")
    if not 0 <= self.min_p <= 1:
      raise UserError(f"min_p={self.min_p} must be in [0, 1]")
    for i, value in self.bias:
      if not (abs(value) <= _MOST_BIAS or value == -math.inf):
        raise UserError(f"bias of id {i} is {value}, neither within +-{_MOST_BIAS:g} nor -inf")


def biased(
    logits: Float[Array, "*n V"], sampling: Sampling, places: Int[Array, " W"] | None = None,
) -> Float[Array, "*n V"]:
  """The logits with the configured bias.

  Args:
    logits: raw.
    sampling: reads `bias`.
    places: where each id stands in the logits, V or more for one that is not there; by default an
      id is its own place.
  """
  if not sampling.bias:
    return logits
  ids = jnp.asarray([i for i, _ in sampling.bias])
  values = jnp.asarray([value for _, value in sampling.bias], logits.dtype)
  return logits.at[..., ids if places is None else places[ids]].add(values, mode="drop")


def probabilities(
    logits: Float[Array, "B *n V"], sampling: Sampling, temperature: Float[Array, " B"],
) -> Float[Array, "B *n V"]:
  """The distribution that is sampled from: bias, temperature, top-k, top-p, min-p, in that order.

  A row whose temperature is below GREEDY_BELOW gets the one-hot of its argmax (lowest id on ties).
  """
  logits = biased(logits, sampling)
  warm = temperature.reshape(-1, *[1] * (logits.ndim - 1))
  cold = warm < GREEDY_BELOW
  scores = logits.astype(jnp.float32) / jnp.where(cold, 1.0, warm)
  if 0 < sampling.top_k < logits.shape[-1]:
    kth = jax.lax.top_k(scores, sampling.top_k)[0][..., -1:]
    scores = jnp.where(scores >= kth, scores, -jnp.inf)
  probs = jax.nn.softmax(scores, axis=-1)
  if sampling.top_p < 1:
    ordered = jnp.sort(probs, axis=-1, descending=True)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    # The first always stays: a top_p below the smallest float32 is 0 here.
    within = (before < sampling.top_p) | (jnp.arange(ordered.shape[-1]) == 0)
    least = jnp.min(jnp.where(within, ordered, jnp.inf), axis=-1, keepdims=True)
    kept = jnp.where(probs >= least, probs, 0.0)
    probs = kept / jnp.sum(kept, axis=-1, keepdims=True)
  if sampling.min_p > 0:
    least = sampling.min_p * jnp.max(probs, axis=-1, keepdims=True)
    kept = jnp.where(probs >= least, probs, 0.0)
    probs = kept / jnp.sum(kept, axis=-1, keepdims=True)
  best = argmax(logits)[..., None]
  return jnp.where(cold, (jnp.arange(logits.shape[-1]) == best).astype(jnp.float32), probs)


def argmax(scores: Float[Array, "*n V"]) -> Int[Array, "*n"]:
  """Index of the largest score, the lowest on ties.

  Two plain reductions: XLA:CPU runs them several times faster than `jnp.argmax`.
  """
  top = jnp.max(scores, -1, keepdims=True)
  places = jnp.arange(scores.shape[-1], dtype=jnp.int32)
  return jnp.min(jnp.where(scores == top, places, scores.shape[-1] - 1), -1)


def log_probability(
    logits: Float[Array, "*n V"], tokens: Int[Array, "*n"]) -> Float[Array, "*n"]:
  """log softmax of the raw logits (temperature 1, nothing truncated) at the given ids."""
  at = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
  return at - jax.nn.logsumexp(logits, axis=-1)


def draw(weights: Float[Array, "*n V"], u: Float[Array, "*n"]) -> Int[Array, "*n"]:
  """Samples ids in proportion to non-negative weights by inverting the CDF at u in [0, 1).

  The weights need not sum to one. An id of weight zero is never drawn; the search runs over block
  sums first, then inside one block, so it costs one pass over V.
  """
  V = weights.shape[-1]
  blocks = -(-V // _BLOCK)
  padded = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, blocks * _BLOCK - V)])
  table = padded.reshape(*weights.shape[:-1], blocks, _BLOCK)
  block, rest = _invert(jnp.sum(table, -1), u)
  inside = jnp.take_along_axis(table, block[..., None, None], axis=-2)[..., 0, :]
  within, _ = _invert_at(inside, rest)
  return (block * _BLOCK + within).astype(jnp.int32)


def _invert(weights, u):
  """Index and the offset inside it, for a uniform number u."""
  return _invert_at(weights, u * jnp.sum(weights, -1))


def _invert_at(weights, level):
  # Accelerators sum in a tree: rounding can then make the CDF rise at an id of weight zero. Only
  # ids of positive weight count, and the level stays strictly below the highest of their sums.
  cdf = jnp.cumsum(weights, -1)
  usable = jnp.where(weights > 0, cdf, 0.0)
  top = jnp.max(usable, -1)
  level = jnp.minimum(level, jnp.nextafter(top, jnp.zeros_like(top)))
  index = jnp.argmax(usable > level[..., None], -1)
  start = jnp.take_along_axis(cdf - weights, index[..., None], -1)[..., 0]
  return index, jnp.maximum(level - start, 0.0)


def row_keys(seed: int | Array, sequence: Int[Array, " B"]) -> Array:
  """One key per sequence id."""
  return jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), i))(sequence)


def round_keys(rows: Array, start: Int[Array, " B"]) -> Keys:
  """The keys of the round that begins at absolute position `start` of each row."""
  return Keys(rows, start)


def uniforms(keys: Keys, purpose: int, count: int) -> Float[Array, "B count"]:
  """One uniform in [0, 1) per row and place of the block, from the stream of one purpose.

  The start of the round is part of the name: a position that is drafted again after a rejection
  gets new numbers (`block` is biased without that).
  """
  def row(key, start):
    stream = jax.random.fold_in(jax.random.fold_in(key, start), purpose)
    return jax.vmap(lambda j: jax.random.uniform(jax.random.fold_in(stream, j)))(jnp.arange(count))
  return jax.vmap(row)(keys.rows, keys.start)


def gumbel(keys: Keys, places: Int[Array, " n"], width: int) -> Float[Array, "B n width"]:
  """Standard Gumbel noise for each id, at places of the block counted from the round's start.

  Named by sequence and absolute position: the same for draft and target, in every round and at
  every draft length (Gumbel coupling, 2408.07978).
  """
  def row(key, start):
    stream = jax.random.fold_in(key, _COUPLED)
    # The accurate mode: the fast one never exceeds 16, so rare ids could not come out.
    at = lambda j: jax.random.gumbel(
        jax.random.fold_in(stream, start + j), (width,), jnp.float32, mode="high")
    return jax.vmap(at)(places)
  return jax.vmap(row)(keys.rows, keys.start)


def draw_coupled(
    probs: Float[Array, "*n V"], noise: Float[Array, "*n V"]) -> Int[Array, "*n"]:
  """argmax of log p + noise: a sample of p, and the same one for equal p and noise."""
  return argmax(jnp.log(probs) + noise)
