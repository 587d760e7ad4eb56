"""The scoring end that learned drafters share: a head, perhaps over a reduced draft vocabulary, and
how a token and its q come out of the logits.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from spec_jax import sampling as sampling_lib
from spec_jax.models.config import DecoderConfig
from spec_jax.models.decoder import Decoder, linear
from spec_jax.models.quant import Int8Weight
from spec_jax.sampling import Sampling
from spec_jax.types import Context, Proposal, TrainStates


def follow(
    step: Callable, carry: Any, first: Int[Array, " B"], probs: Float[Array, "B V"] | None,
    u: Float[Array, "B K"],
) -> tuple[Proposal, Any]:
  """The drafts behind the first one, each from a step of its own.

  Args:
    step: (carry, (place of the draft before, uniform draws [B])) -> (carry, (token, q)).
    carry: before the second draft.
    first, probs: the first draft and its q.
    u: the draws of the block; those of the first draft are used up.

  Returns:
    All K drafts, and the last carry.
  """
  # Unrolled: a loop within the loop of rounds copies caches in every step (XLA:CPU).
  carry, (rest, rest_probs) = jax.lax.scan(
      step, carry, (jnp.arange(u.shape[1] - 1), u[:, 1:].T), unroll=True)
  drafted = jnp.concatenate([first[:, None], rest.T], 1)
  if probs is None:
    return Proposal(drafted, None), carry
  return Proposal(
      drafted, jnp.concatenate([probs[:, None], rest_probs.transpose(1, 0, 2)], 1)), carry


class LearnedDrafter(nnx.Module):
  """What a drafter with logits of its own is made of, whatever computes its hidden states.

  Attributes:
    config: of its decoder layers; vocab_size and vocab_real are the target's.
    head: [Vd, D] own head or, with a reduced draft vocabulary, the target's rows `draft_ids`;
      absent when the target's whole head is read.
    own_head: whether `head` is the drafter's own; a copy of the target's rows is not.
    draft_ids: [Vd] ids that the drafter can propose, absent for all of them.
    draft_place: [V] place of each id among them, Vd for the others.
  """

  kind: str
  config: DecoderConfig
  depths = 1  # places of a draft that training distinguishes

  def catch_up(self, state: Any, context: Context, draft_len: int, target: Decoder) -> Any:
    """Absorbs what the last round committed where the drafts were not all this drafter's own, or
    where `propose` is not called; nothing to do when `after_round` leaves nothing open."""
    del context, draft_len, target
    return state

  def options(self) -> dict[str, Any]:
    """What the constructor needs besides config and tensors, as JSON values."""
    return {}

  def train_states(self, batch: dict[str, Array], target: Decoder, key: Array) -> TrainStates:
    """One teacher-forced pass over a batch of R rows of T tokens.

    Args:
      batch: tokens, positions, segments [R, T] (-1 for padding); place [M] flat positions whose
        next token is supervised, weight [M] 1 or 0 for padding; teacher [R, T] the row of `place`
        that a position has, -1 for none; features [R, T, F] where the drafter has taps.
      target: lends embedding and head.
      key: for what is drawn anew each step.
    """
    raise NotImplementedError

  def head_parameters(self) -> dict[str, Array]:
    """The trained arrays that `train_logits` reads, which get their gradient chunk by chunk."""
    trained = isinstance(getattr(self, "head", None), nnx.Param)
    return {"head": self.head[...]} if trained else {}

  def train_logits(
      self, hidden: Float[Array, "c E"], target: Decoder, trained: dict[str, Array],
  ) -> Float[Array, "c Vd"]:
    """Student logits of a chunk of states, with the arrays of `head_parameters`."""
    return linear(hidden, trained["head"] if "head" in trained else self.head_weight(target))

  def set_head(
      self, config: DecoderConfig, head: Array | Int8Weight | None,
      draft_ids: Array | np.ndarray | None, own: bool = False, trained: bool = False) -> None:
    """Stores the attributes above; `trained` makes the head a parameter."""
    self.config, self.own_head = config, own
    if head is not None:
      self.head = nnx.Param(head) if trained else nnx.Variable(head)
    if draft_ids is not None:
      place = np.full(config.vocab_size, len(draft_ids), np.int32)
      place[np.asarray(draft_ids)] = np.arange(len(draft_ids))
      self.draft_ids = nnx.Variable(jnp.asarray(draft_ids, jnp.int32))
      self.draft_place = nnx.Variable(jnp.asarray(place))

  @property
  def max_position(self) -> int:
    return self.config.max_position

  def head_weight(self, target: Decoder) -> Float[Array, "Vd D"] | Int8Weight:
    """The rows that score the draft vocabulary."""
    return self.head[...] if hasattr(self, "head") else target.head_weight()

  def teacher_rows(self, target: Decoder) -> Float[Array, "Vd D"]:
    """The target's rows of the draft vocabulary, also beside a head of the drafter's own."""
    if not self.own_head:
      return self.head_weight(target)
    rows = target.head_weight()
    return rows[self.draft_ids[...]] if hasattr(self, "draft_ids") else rows

  def logits(self, hidden: Float[Array, "*n D"], target: Decoder) -> Float[Array, "*n Vd"]:
    """Float32 logits over the draft vocabulary; ids that do not exist are -inf."""
    return self.masked(linear(hidden, self.head_weight(target)), target)

  def masked(self, logits: Float[Array, "*n Vd"], target: Decoder) -> Float[Array, "*n Vd"]:
    """The logits with -inf at ids that drafter or target do not have."""
    real = min(self.config.vocab_real, target.config.vocab_real)
    if not hasattr(self, "draft_ids") and real < logits.shape[-1]:
      logits = jnp.where(jnp.arange(logits.shape[-1]) < real, logits, -jnp.inf)
    return logits

  def pick(
      self, logits: Float[Array, "B Vd"], place: Int[Array, ""], u: Float[Array, " B"],
      context: Context, sampling: Sampling, width: int,
  ) -> tuple[Int[Array, " B"], Float[Array, "B V"] | None]:
    """The token of each row at a place of the block and the q it came from.

    Args:
      logits: over the draft vocabulary.
      place: 0 for the first draft; names the noise under `coupled`.
      u: uniform draws.
      context: temperatures and keys.
      sampling: the transforms.
      width: V, of the target's p; q is as wide (None where no rule asks for it).
    """
    places = self.draft_place[...] if hasattr(self, "draft_ids") else None
    logits = sampling_lib.biased(logits, sampling, places)
    sampling = dataclasses.replace(sampling, bias=())
    if sampling.greedy:
      return self.full_id(sampling_lib.argmax(logits)), None
    probs = sampling_lib.probabilities(logits, sampling, context.temperature)
    full = self.full_probs(probs, width)
    if sampling.coupled:  # with the target's own noise, id by id
      noise = sampling_lib.gumbel(context.keys, place[None], width)[:, 0]
      return sampling_lib.draw_coupled(full, noise), None
    return self.full_id(sampling_lib.draw(probs, u)), full

  def full_id(self, place: Int[Array, "*n"]) -> Int[Array, "*n"]:
    """Target ids of places in the draft vocabulary."""
    return self.draft_ids[...][place] if hasattr(self, "draft_ids") else place

  def full_probs(self, probs: Float[Array, "B Vd"], width: int) -> Float[Array, "B V"]:
    """The probabilities of the draft vocabulary by target id, `width` of them."""
    if hasattr(self, "draft_ids"):
      padded = jnp.pad(probs, ((0, 0), (0, 1)))
      return padded[:, self.draft_place[...]]
    # The padding of the two vocabularies may differ; what is cut here has probability zero.
    return jnp.pad(probs[:, :width], ((0, 0), (0, max(0, width - probs.shape[1]))))
