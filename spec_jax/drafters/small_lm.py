"""A small decoder of the target's own architecture, drafting K tokens autoregressively."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from spec_jax import sampling as sampling_lib
from spec_jax.models.cache import init_cache, insert_rows
from spec_jax.models.config import DecoderConfig
from spec_jax.models.decoder import Decoder, Stack, linear
from spec_jax.sampling import Sampling
from spec_jax.types import Cache, Context, Proposal


class SmallLM(nnx.Module):
  """The stack of a small Llama; embedding and head are the target's unless it has its own.

  Attributes:
    stack: the trained part, blocks and final norm.
    embed: [V, D] own embedding, absent when it is the target's.
    head: [Vd, D] own head or, with a reduced draft vocabulary, the target's rows `draft_ids`.
    draft_ids: [Vd] ids that the drafter can propose, absent for all of them.
  """

  taps: tuple[int, ...] = ()
  observes_rounds = False  # `propose` has computed every committed token's keys itself

  def __init__(
      self,
      config: DecoderConfig,
      tensor: Callable[[str], Array],
      *,
      embed: Array | None = None,
      head: Array | None = None,
      draft_ids: Array | np.ndarray | None = None,
      rope_divisors: np.ndarray | None = None,
  ):
    self.config = config
    self.stack = Stack(config, tensor, rope_divisors)
    if embed is not None:
      self.embed = nnx.Variable(embed)
    if head is not None:
      self.head = nnx.Variable(head)
    if draft_ids is not None:
      place = np.full(config.vocab_size, len(draft_ids), np.int32)
      place[np.asarray(draft_ids)] = np.arange(len(draft_ids))
      self.draft_ids = nnx.Variable(jnp.asarray(draft_ids, jnp.int32))
      self.draft_place = nnx.Variable(jnp.asarray(place))

  @property
  def max_position(self) -> int:
    return self.config.max_position

  def init_state(self, rows: int, capacity: int) -> Cache:
    """An empty key/value cache."""
    return init_cache(self.config, rows, capacity, self.stack.layers[0].wq[...].dtype)

  def insert(self, state: Cache, part: Cache, rows: Int[Array, " R"]) -> Cache:
    """Row refill: the first positions of other sequences into `rows`."""
    return insert_rows(state, part, rows)

  def observe(self, state, tokens, features, positions, valid, target: Decoder) -> Cache:
    """Absorbs a prompt: its keys and values, [B, T] ids at [B, T] positions from 0.

    Rows shorter than T write stale entries beyond their length, which later passes overwrite.
    """
    del features, valid
    return self._pass(state, tokens, positions, target, tokens.shape[1])[1]

  def propose(
      self, state: Cache, context: Context, draft_len: int, sampling: Sampling, target: Decoder,
  ) -> tuple[Proposal, Cache]:
    """Drafts K tokens.

    The first step is two wide, the last two committed tokens: after a fully accepted block the row
    of the last draft was never computed, and this writes it at no extra cost.
    """
    length = context.length
    two = jnp.maximum(length[:, None] - 2 + jnp.arange(2), 0)
    tokens = jnp.take_along_axis(context.tokens, two, 1)
    logits, state = self._pass(state, tokens, two, target)
    u = sampling_lib.uniforms(context.keys, sampling_lib.DRAFT, draft_len)
    pick = functools.partial(
        self._pick, context=context, sampling=sampling, width=target.config.vocab_size)
    first, probs = pick(logits, jnp.int32(0), u[:, 0])

    def step(carry, inputs):
      state, token = carry
      offset, u = inputs
      logits, state = self._pass(state, token[:, None], (length + offset)[:, None], target)
      token, probs = pick(logits, offset + 1, u)
      return (state, token), (token, probs)

    (state, _), (rest, rest_probs) = jax.lax.scan(
        step, (state, first), (jnp.arange(draft_len - 1), u[:, 1:].T))
    drafted = jnp.concatenate([first[:, None], rest.T], 1)
    if probs is None:
      return Proposal(drafted, None), state
    all_probs = jnp.concatenate([probs[:, None], rest_probs.transpose(1, 0, 2)], 1)
    return Proposal(drafted, all_probs), state

  def train_hidden(
      self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"],
      segments: Int[Array, "B T"] | None, target: Decoder) -> Float[Array, "B T D"]:
    """Hidden states of whole sequences, before the head."""
    return self.stack(self._embed(tokens, target), positions, segments=segments).hidden

  def head_weight(self, target: Decoder) -> Float[Array, "Vd D"]:
    """The rows that score the draft vocabulary."""
    return self.head[...] if hasattr(self, "head") else target.head_weight()

  def _embed(self, tokens, target):
    return (self.embed[...] if hasattr(self, "embed") else target.embed[...])[tokens]

  def _pass(self, state, tokens, positions, target, attend_length=None):
    """Logits [B, Vd] of the last position, and the cache."""
    out = self.stack(
        self._embed(tokens, target), positions, state, attend_length=attend_length)
    logits = linear(out.hidden[:, -1], self.head_weight(target))
    real = min(self.config.vocab_real, target.config.vocab_real)  # ids that both have
    if not hasattr(self, "draft_ids") and real < logits.shape[-1]:
      logits = jnp.where(jnp.arange(logits.shape[-1]) < real, logits, -jnp.inf)
    return logits, out.cache

  def _pick(self, logits, place, u, context: Context, sampling: Sampling, width):
    """The token per row at a place of the block and the q it came from, as wide as the target's p
    (None where no rule asks for it)."""
    places = self.draft_place[...] if hasattr(self, "draft_ids") else None
    logits = sampling_lib.biased(logits, sampling, places)
    sampling = dataclasses.replace(sampling, bias=())
    if sampling.greedy:
      return self._full_id(sampling_lib.argmax(logits)), None
    probs = sampling_lib.probabilities(logits, sampling, context.temperature)
    full = self._full_probs(probs, width)
    if sampling.coupled:  # with the target's own noise, id by id
      noise = sampling_lib.gumbel(context.keys, place[None], width)[:, 0]
      return sampling_lib.draw_coupled(full, noise), None
    return self._full_id(sampling_lib.draw(probs, u)), full

  def _full_id(self, place):
    return self.draft_ids[...][place] if hasattr(self, "draft_ids") else place

  def _full_probs(self, probs, width):
    if hasattr(self, "draft_ids"):
      padded = jnp.pad(probs, ((0, 0), (0, 1)))
      return padded[:, self.draft_place[...]]
    # The padding of the two vocabularies may differ; what is cut here has probability zero.
    return jnp.pad(probs[:, :width], ((0, 0), (0, max(0, width - probs.shape[1]))))
