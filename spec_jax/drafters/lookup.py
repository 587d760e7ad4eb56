"""Prompt lookup where the row's own text has a long enough match, a learned drafter otherwise.

The choice looks at committed tokens alone, so whether a token is verified never depends on that
token, and the composition is as lossless as its parts (q is one-hot in rows that were looked up).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int

from spec_jax.drafters.ngram import NGram
from spec_jax.models.decoder import Decoder
from spec_jax.sampling import Sampling
from spec_jax.types import Context, Proposal, pytree


@pytree
class LookupState:
  """State of the learned drafter, and whether any row of the last round was looked up: what was
  verified there were not the drafts that the learned drafter has keys of."""

  learned: Any
  foreign: Bool[Array, ""]


class Lookup(nnx.Module):
  """The composition; shapes are static, and a batch whose rows all match skips the learned part.

  Attributes:
    ngram: the lookup, with the shortest suffix that counts as a match.
    learned: any other drafter.
    learned_len: how many drafts the learned part makes, 0 for all K. Where it drafts step by step
      each costs the same while ever fewer survive; lookup is free, so the rest of the block is what
      followed the text with those drafts behind it, or a guess where nothing did.
  """

  def __init__(self, ngram: NGram, learned: nnx.Module, learned_len: int = 0):
    self.ngram, self.learned, self.learned_len = ngram, learned, learned_len

  @property
  def taps(self) -> tuple[int, ...]:
    return self.learned.taps

  @property
  def max_position(self) -> int:
    return self.learned.max_position

  def init_state(self, rows: int, capacity: int) -> LookupState:
    """State for `rows` sequences of at most `capacity` positions."""
    return LookupState(self.learned.init_state(rows, capacity), jnp.asarray(False))

  def insert(self, state: LookupState, part: LookupState, rows: Int[Array, " R"]) -> LookupState:
    """Row refill."""
    return LookupState(self.learned.insert(state.learned, part.learned, rows), state.foreign)

  def observe(self, state, tokens, features, positions, valid, target: Decoder) -> LookupState:
    """Absorbs a prompt."""
    return dataclasses.replace(state, learned=self.learned.observe(
        state.learned, tokens, features, positions, valid, target))

  def after_round(
      self, state, tokens, features, positions, valid, target: Decoder) -> LookupState:
    """Absorbs a verified block."""
    return dataclasses.replace(state, learned=self.learned.after_round(
        state.learned, tokens, features, positions, valid, target))

  def propose(
      self, state: LookupState, context: Context, draft_len: int, sampling: Sampling,
      target: Decoder,
  ) -> tuple[Proposal, LookupState]:
    """K tokens per row: looked up where there is a match."""
    found, looked_up = self.ngram.lookup(context, draft_len)
    width = target.config.vocab_size
    own_len = min(self.learned_len or draft_len, draft_len)

    def learn(learned):
      proposal, learned = self.learned.propose(learned, context, own_len, sampling, target)
      tokens = jnp.concatenate(
          [proposal.tokens, self._rest(context, proposal.tokens, draft_len)], 1)
      drafted = jnp.where(found[:, None], looked_up, tokens)
      if proposal.probs is None:
        return drafted, None, learned
      certain = jax.nn.one_hot(drafted, width)
      probs = jnp.concatenate([proposal.probs, certain[:, own_len:]], 1)
      return drafted, jnp.where(found[:, None, None], certain, probs), learned

    def skip(learned):
      sure = None if deterministic else jax.nn.one_hot(looked_up, width)
      return looked_up, sure, learned

    skipped = jnp.all(found)
    learned = jax.lax.cond(
        skipped | state.foreign,
        lambda learned: self.learned.catch_up(learned, context, draft_len, target),
        lambda learned: learned, state.learned)
    drafted = jax.eval_shape(lambda learned: learn(learned)[:2], learned)
    deterministic = drafted[1] is None
    tokens, probs, learned = jax.lax.cond(skipped, skip, learn, learned)
    return Proposal(tokens, probs), LookupState(learned, jnp.any(found) | (own_len < draft_len))

  def _rest(self, context: Context, drafts: Int[Array, "B L"], draft_len: int):
    """[B, K - L] tokens that the lookup puts behind the drafts."""
    own_len = drafts.shape[1]
    if own_len == draft_len:
      return drafts[:, :0]
    put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(row, new, at, 0))
    further = dataclasses.replace(
        context, tokens=put(context.tokens, drafts, context.length),
        length=context.length + own_len)
    return NGram(self.ngram.n_max, 1).lookup(further, draft_len - own_len)[1]
