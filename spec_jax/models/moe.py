"""The mixture of experts that some families have in place of an MLP. Called by decoder.py.

Dropless: every token reaches each of its experts, whatever the others do, so a token's output does
not depend on its company. All shapes are static under jit.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.models.quant import Int8Weight, parts, scaled


def route(
    logits: Float[Array, "M E"], per_token: int, norm_topk: bool,
) -> tuple[Float[Array, "M K"], Int[Array, "M K"]]:
  """Weights and ids of each token's experts: the K largest of a softmax over all of them.

  Args:
    logits: of the router.
    per_token: K.
    norm_topk: the weights are divided by their sum.
  """
  weights, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), -1), per_token)
  if norm_topk:
    weights = weights / jnp.sum(weights, -1, keepdims=True)
  return weights, chosen


def experts(
    x: Float[Array, "M D"], weights: Float[Array, "M K"], chosen: Int[Array, "M K"],
    gate: Float[Array, "E F D"] | Int8Weight, up: Float[Array, "E F D"] | Int8Weight,
    down: Float[Array, "E D F"] | Int8Weight, act,
) -> Float[Array, "M D"]:
  """The weighted sum of each token's gated MLPs, float32.

  Few tokens (decoding) read the matrices of their experts, at most as many as there are; on CPU,
  where gathering them is a copy, each once that any token asks for. Many tokens (prefill, training)
  go on accelerators through a grouped product, sorted by expert; on CPU, where XLA turns that one
  into E products of everything, through all experts in turn.
  """
  few, cpu = chosen.size <= gate.shape[0], jax.default_backend() == "cpu"
  x = x.astype(gate.dtype)
  path = (_distinct if few else _in_turn) if cpu else _gathered if few else _grouped
  return path(x, weights, chosen, gate, up, down, act)


def _wide(dtype):
  return jnp.promote_types(dtype, jnp.float32)


def _gathered(x, weights, chosen, gate, up, down, act):
  M, K = chosen.shape
  rows, ids = jnp.repeat(x, K, 0), chosen.reshape(-1)

  def product(a, w):
    w, scale = parts(w[ids])
    return scaled(jnp.einsum(
        "nd,nfd->nf", a.astype(w.dtype), w, preferred_element_type=_wide(w.dtype)), scale)

  out = product(act(product(rows, gate)) * product(rows, up), down)
  return jnp.sum(out.reshape(M, K, -1) * weights[..., None], 1)


def _product(a, w):
  """Of rows [M, D] and one expert's matrix [F, D]."""
  w, scale = parts(w)
  return scaled(jax.lax.dot_general(
      a.astype(w.dtype), w, (((1,), (1,)), ((), ())), preferred_element_type=_wide(w.dtype)), scale)


def _share(weights, chosen, i):
  """What expert i weighs in the sum of each token."""
  return jnp.sum(jnp.where(chosen == i, weights, 0.0), -1, keepdims=True)


def _distinct(x, weights, chosen, gate, up, down, act):
  if x.shape[0] == 1 and x.dtype == jnp.bfloat16:  # as `decoder.linear` does
    twice = lambda rows: jnp.concatenate([rows, rows])
    return _distinct(twice(x), twice(weights), twice(chosen), gate, up, down, act)[:1]
  ids = jnp.sort(chosen.reshape(-1))
  new = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])

  def add(total, i):
    inner = act(_product(x, gate[i])) * _product(x, up[i])
    return total + _share(weights, chosen, i) * _product(inner, down[i])

  def step(total, slot):
    i, new = slot
    return jax.lax.cond(new, add, lambda total, i: total, total, i), None

  return jax.lax.scan(step, jnp.zeros(x.shape, _wide(x.dtype)), (ids, new))[0]


def _in_turn(x, weights, chosen, gate, up, down, act):
  @jax.checkpoint  # else the gradient holds the inner states of every expert for every token
  def add(total, expert):
    i, gate, up, down = expert
    inner = act(_product(x, gate)) * _product(x, up)
    return total + _share(weights, chosen, i) * _product(inner, down), None

  zeros = jnp.zeros(x.shape, _wide(x.dtype))
  return jax.lax.scan(add, zeros, (jnp.arange(gate.shape[0]), gate, up, down))[0]


def _grouped(x, weights, chosen, gate, up, down, act):
  M, K = chosen.shape
  order = jnp.argsort(chosen.reshape(-1))
  sizes = jnp.bincount(chosen.reshape(-1), length=gate.shape[0]).astype(jnp.int32)
  dims = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
  expert = chosen.reshape(-1)[order]

  def product(a, w):
    w, scale = parts(w)
    return scaled(jax.lax.ragged_dot_general(
        a.astype(w.dtype), w, sizes, dims, preferred_element_type=_wide(w.dtype)),
        None if scale is None else scale[expert])

  rows = x[order // K]
  out = product(act(product(rows, gate)) * product(rows, up), down)
  out = out * weights.reshape(-1)[order, None]
  return jnp.zeros((M, x.shape[1]), out.dtype).at[order // K].add(out)
