"""The gradient of a step: of the mean over all supervised positions of its batches.

Called by train.py. Sums are added over the micro-batches (`train.micro_batches`) and divided once:
a mean of their means would weigh a position by how few lie beside it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from spec_jax import sharding

Sums = dict[str, Array]


def mean_gradient(
    sums_of: Callable[[Any, dict], Sums], params: Any, batches: dict | tuple[dict, ...],
    mesh: Mesh | None = None, head_dim: int = 1,
) -> tuple[Float[Array, ""], Sums, Any]:
  """The mean loss, the sums over all batches, and the gradient of the mean.

  Args:
    sums_of: (params, batch) -> sums, "loss" and its "weight" among them.
    params: what the gradient is taken of.
    batches: one, or several of equal shapes, of which one at a time is computed with.
    mesh, head_dim: where the parameters lie; the gradient lies there too.
  """
  pin = lambda grads: sharding.pin(grads, mesh, head_dim)  # each device sums its own slice
  # Weights of a block sum to less than one each: the guard is for a step without any.
  divisor = lambda sums: jnp.where(sums["weight"] > 0, sums["weight"], 1.0)
  if isinstance(batches, dict):
    def mean_loss(params):
      sums = sums_of(params, batches)
      return sums["loss"] / divisor(sums), sums

    (loss, sums), grads = jax.value_and_grad(mean_loss, has_aux=True)(params)
    return loss, sums, pin(grads)

  def loss_sum(params, batch):
    sums = sums_of(params, batch)
    return sums["loss"], sums

  def add(total, batch):
    (_, sums), grads = jax.value_and_grad(loss_sum, has_aux=True)(params, batch)
    return jax.tree.map(jnp.add, total, (sums, pin(grads))), None

  shapes = jax.eval_shape(sums_of, params, batches[0]), params
  zeros, none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  rows = jax.tree.map(lambda *x: jnp.stack(x), *batches)
  rows |= sharding.pin_chunks({name: x for name, x in rows.items() if x.ndim > 1}, mesh)
  (sums, grads), _ = jax.lax.scan(add, (zeros, pin(none)), rows)
  count = divisor(sums)
  return sums["loss"] / count, sums, jax.tree.map(lambda g: g / count, grads)


def place(batches: Sequence[dict], mesh: Mesh | None) -> dict | tuple[dict, ...]:
  """The batches of a step on the devices, as `mean_gradient` takes them."""
  placed = tuple(sharding.place_rows(batch, mesh) for batch in batches)
  return placed[0] if len(placed) == 1 else placed
