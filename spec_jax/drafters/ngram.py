"""Prompt lookup: the draft is what followed the last earlier occurrence of the row's own suffix."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int

from spec_jax.types import Context, Proposal


class NGram(nnx.Module):
  """Longest suffix of n_max...n_min committed tokens that occurred before in the row's buffer.

  Deterministic (q is one-hot), without parameters. A continuation that runs into the end of the
  committed text goes on periodically (the text would repeat); with no match the last token is
  repeated. Saxena 2023 (prompt lookup decoding).
  """

  taps: tuple[int, ...] = ()
  max_position = 1 << 30

  def __init__(self, n_max: int = 3, n_min: int = 1):
    self.n_max, self.n_min = n_max, n_min

  def init_state(self, rows: int, capacity: int) -> tuple:
    """No state: the committed buffer is all it reads."""
    return ()

  def insert(self, state: tuple, part: tuple, rows) -> tuple:
    """Row refill; nothing to do."""
    return state

  def observe(self, state, tokens, features, positions, valid, target) -> tuple:
    """Committed tokens; nothing to absorb."""
    return state

  def after_round(self, state, tokens, features, positions, valid, target) -> tuple:
    """A verified block; nothing to absorb."""
    return state

  def propose(
      self, state: tuple, context: Context, draft_len: int, sampling: Any, target: Any,
  ) -> tuple[Proposal, tuple]:
    """K tokens per row and the unchanged state."""
    return Proposal(self.lookup(context, draft_len)[1], None), state

  def lookup(
      self, context: Context, draft_len: int) -> tuple[Bool[Array, " B"], Int[Array, "B K"]]:
    """Whether a row has a match, and its K tokens."""
    tokens, length = context.tokens, context.length
    start = length - 1  # the place before the continuation when nothing matches: repeat the last
    found = jnp.zeros(length.shape, bool)
    for n in range(self.n_max, self.n_min - 1, -1):
      after, match = _continuation(tokens, length, n)
      start = jnp.where(found | ~match, start, after)
      found = found | match
    period = length - start
    at = start[:, None] + jnp.arange(draft_len) % period[:, None]
    return found, jnp.take_along_axis(tokens, at, 1)


def _continuation(tokens: Int[Array, "B S"], length: Int[Array, " B"], n: int):
  """Index after the last earlier occurrence of the n-token suffix, and whether there is one."""
  B, S = tokens.shape
  places = jnp.arange(S)
  match = jnp.broadcast_to(places + n < length[:, None], (B, S))
  for i in range(n):
    wanted = jnp.take_along_axis(tokens, jnp.maximum(length - n + i, 0)[:, None], 1)
    match = match & (jnp.roll(tokens, -i, axis=1) == wanted)
  match = match & (length[:, None] > n)
  last = jnp.max(jnp.where(match, places, -1), 1)
  return last + n, last >= 0
