"""DSpark (2607.05147): the DFlash pass with a short serial tail, so that drafts follow each other.

The logits of a slot get a low-rank term of the token drafted before it, and q is the conditional of
that chain. The anchor's slot predicts too, so a block of K slots drafts K tokens. Built, run and
trained by the same callers as `dflash.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from spec_jax import sampling as sampling_lib
from spec_jax.drafters import dflash
from spec_jax.drafters.dflash import DFlash
from spec_jax.models.config import DecoderConfig
from spec_jax.models.decoder import Decoder, linear
from spec_jax.models.quant import Weight
from spec_jax.sampling import Sampling
from spec_jax.target import Target
from spec_jax.types import Cache, Context, Proposal, TrainStates

RANK = 256  # of the term of the previous token
GAMMA = 4.0  # decay of the loss weights, whatever the block (2607.05147)
_SPREAD = 0.02  # of the untrained rows of markov_w1

_TAIL = ("markov_w1", "markov_w2", "confidence")

# Canonical name -> name in a published checkpoint. The published projection of the confidence head
# is a matrix of one row, and its bias a tensor of its own.
EXPORT_NAMES = dflash.EXPORT_NAMES | {
    "markov_w1": "markov_head.markov_w1.weight",
    "markov_w2": "markov_head.markov_w2.weight",
    "confidence": "confidence_head.proj.weight",
}


def tensor_shapes(
    config: DecoderConfig, taps: tuple[int, ...], rank: int = RANK, draft_vocab: int = 0,
) -> dict[str, tuple[int, ...]]:
  """Shape of every own tensor by canonical name.

  Args:
    config: of the draft layers.
    taps: target layers that are read.
    rank: r, of the term of the previous token.
    draft_vocab: Vd, 0 for the whole vocabulary.
  """
  return dflash.tensor_shapes(config, taps) | {
      "markov_w1": (config.vocab_size, rank),
      "markov_w2": (draft_vocab or config.vocab_size, rank),
      "confidence": (config.hidden_size + rank + 1,)}


class DSpark(DFlash):
  """The DSpark draft model; embedding and head are the target's.

  Attributes:
    markov_w1: [V, r] what the previous token says, by its id.
    markov_w2: [Vd, r] how that moves the logits.
    confidence: [D + r + 1] weights of the chance that a draft is accepted, the bias last; for
      reports only: neither what is drafted nor what is accepted depends on it.
  """

  kind = "dspark"
  silent = 0

  def __init__(
      self, config: DecoderConfig, tensor: Callable[[str], Array], *, gamma: float = GAMMA,
      **options: Any):
    """Builds the drafter; the options are those of `DFlash`."""
    super().__init__(config, tensor, gamma=gamma, **options)
    for name in _TAIL:
      setattr(self, name, nnx.Param(tensor(name)))

  def own_tensors(self) -> dict[str, Weight]:
    """The tensors by canonical name."""
    return super().own_tensors() | {name: getattr(self, name)[...] for name in _TAIL}

  def propose(
      self, state: Cache, context: Context, draft_len: int, sampling: Sampling, target: Decoder,
  ) -> tuple[Proposal, Cache]:
    """Drafts K tokens: one pass, then K cheap steps, each given the token before it.

    Raises:
      UserError: K is more than a block of the trained size drafts.
    """
    hidden = self.draft_states(state, context, draft_len, target)
    logits = linear(hidden, self.head_weight(target)).transpose(1, 0, 2)
    u = sampling_lib.uniforms(context.keys, sampling_lib.DRAFT, draft_len)

    def step(previous, inputs):
      place, logits, u = inputs
      logits = logits + linear(self.markov_w1[...][previous], self.markov_w2[...])
      token, probs = self.pick(
          self.masked(logits, target), place, u, context, sampling, target.config.vocab_size)
      return token, (token, probs)

    anchor = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, 1)[:, 0]
    _, (tokens, probs) = jax.lax.scan(step, anchor, (jnp.arange(draft_len), logits, u.T))
    return Proposal(tokens.T, None if probs is None else probs.transpose(1, 0, 2)), state

  def train_states(
      self, batch: dict[str, Array], target: Decoder, key: Array | None, anchors: Any = None,
  ) -> TrainStates:
    """States [h_j ; W1[x_{j-1}]] of drawn blocks, x the true tokens (see `DFlash.train_states`)."""
    place, live = anchors or self.draw_anchors(batch, key)
    hidden = self._train_blocks(batch, place, target)
    at = self._columns(place, batch["tokens"].shape[1])
    previous = jnp.take_along_axis(batch["tokens"], at.reshape(at.shape[0], -1), 1)
    rows = self.markov_w1[...][previous.reshape(at.shape)]
    return self._pack(jnp.concatenate([hidden, rows], -1), batch, place, live)

  def head_parameters(self) -> dict[str, Array]:
    """The trained arrays behind the states: of the logits and of the confidence."""
    return super().head_parameters() | {
        "markov_w2": self.markov_w2[...], "confidence": self.confidence[...]}

  def train_logits(
      self, hidden: Float[Array, "c E"], target: Decoder, trained: dict[str, Array],
  ) -> Float[Array, "c Vd"]:
    """Student logits of a chunk of states [h ; W1[x]], with the arrays of `head_parameters`."""
    D = self.config.hidden_size
    return super().train_logits(hidden[:, :D], target, trained) + linear(
        hidden[:, D:], trained["markov_w2"])

  @staticmethod
  def confidence_logit(
      hidden: Float[Array, "c E"], confidence: Float[Array, " E1"]) -> Float[Array, " c"]:
    """Logit of the chance that the draft of each state [h ; W1[x]] is accepted."""
    return linear(hidden, confidence[None, :-1])[:, 0] + confidence[-1]


def init_tensors(
    target: Target, layers: tuple[int, ...], taps: tuple[int, ...], seed: int, rank: int = RANK,
    draft_vocab: int = 0,
) -> dict[str, Array]:
  """A start whose drafts are those of the backbone (`dflash.init_tensors`): markov_w2 is zero.

  Args:
    target: whose layers are copied.
    layers: 0-based, one for each draft layer.
    taps: of the drafter, ascending.
    seed: of markov_w1.
    rank: r.
    draft_vocab: Vd, 0 for the whole vocabulary.

  Raises:
    UserError: the target has no such layer.
  """
  shapes = tensor_shapes(target.config, taps, rank, draft_vocab)
  rows = np.random.default_rng(seed).normal(size=shapes["markov_w1"]) * _SPREAD
  return dflash.init_tensors(target, layers, taps) | {
      "markov_w1": jnp.asarray(rows, jnp.float32),
      "markov_w2": jnp.zeros(shapes["markov_w2"]), "confidence": jnp.zeros(shapes["confidence"])}
