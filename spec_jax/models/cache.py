"""A key/value cache of static shape: write at the length, rewind by the length.

Rows are addressed by absolute position and a query at position t sees the indices <= t, so a
rejected draft costs nothing: its stale rows are overwritten by the next pass. XLA clamps a write
that would run past the end (and destroys earlier rows), so callers allocate slack for a full block.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.models.config import DecoderConfig
from spec_jax.types import Cache


def init_cache(config: DecoderConfig, rows: int, capacity: int, dtype) -> Cache:
  """Zeros for `rows` sequences of at most `capacity` positions."""
  shape = (rows, config.num_kv_heads, capacity, config.head_dim)
  return Cache(
      k=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)),
      v=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)))


def write_rows(
    buffer: Float[Array, "B G S H"], new: Float[Array, "B G T H"], start: Int[Array, " B"],
) -> Float[Array, "B G S H"]:
  """Writes T consecutive positions of each row, beginning at `start[b]`."""
  new = new.astype(buffer.dtype)
  if new.shape[2] == 1 and buffer.shape[2] > 1 and jax.default_backend() == "cpu":
    # XLA:CPU copies the whole buffer to write one position and writes two in place.
    at = jnp.minimum(start, buffer.shape[2] - 2)
    take = lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, 2, 1)
    own = at[:, None] + jnp.arange(2) == start[:, None]
    new = jnp.where(own[:, None, :, None], new, jax.vmap(take)(buffer, at))
    start = at
  put = lambda row, block, at: jax.lax.dynamic_update_slice(row, block, (0, at, 0))
  return jax.vmap(put)(buffer, new, start)


def insert_rows(cache: Cache, part: Cache, rows: Int[Array, " R"]) -> Cache:
  """Puts the first positions of other sequences into rows of a cache (row refill).

  Args:
    cache: B rows, capacity S.
    part: R rows, capacity P <= S.
    rows: for each row of `part` its place in `cache`; a place >= B is dropped.
  """
  put = lambda big, small: big.at[rows, :, :small.shape[2]].set(
      small.astype(big.dtype), mode="drop")
  return jax.tree.map(put, cache, part)
