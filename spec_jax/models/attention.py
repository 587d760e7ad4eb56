"""The only place where attention is called: queries against a key/value buffer under a mask."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_MASKED = -1e30  # finite, so that a row that sees nothing gives numbers and not NaN


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B G S H"],
    v: Float[Array, "B G S H"],
    mask: Bool[Array, "B T S"],
    scale: float | None = None,
) -> Float[Array, "B T N H"]:
  """Scaled dot-product attention with grouped key/value heads, softmax in float32.

  On CPU an einsum with the buffer as [B, G, S, H] (a [B, S, G, H] buffer is several times slower
  there); on accelerators `jax.nn.dot_product_attention`. The scores are multiplied by `scale`,
  H**-0.5 by default.
  """
  if jax.default_backend() == "cpu":
    return _attend_einsum(q, k, v, mask, q.shape[-1]**-0.5 if scale is None else scale)
  return jax.nn.dot_product_attention(
      q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), mask=mask[:, None], scale=scale)


def _attend_einsum(q, k, v, mask, scale):
  B, T, N, H = q.shape
  G, S = k.shape[1:3]
  R = N // G
  grouped = q.reshape(B, T, G, R, H).transpose(0, 2, 1, 3, 4).reshape(B, G, T * R, H)
  scores = jnp.einsum("bgth,bgsh->bgts", grouped, k, preferred_element_type=jnp.float32)
  seen = jnp.broadcast_to(mask[:, None, :, None], (B, 1, T, R, S)).reshape(B, 1, T * R, S)
  probs = jax.nn.softmax(jnp.where(seen, scores * scale, _MASKED), axis=-1)
  out = jnp.einsum("bgts,bgsh->bgth", probs.astype(v.dtype), v, preferred_element_type=jnp.float32)
  return out.astype(q.dtype).reshape(B, G, T, R, H).transpose(0, 2, 1, 3, 4).reshape(B, T, N, H)


_BLOCK = 128  # queries of a causal block


def causal_blocks(
    attention: Callable[..., Float[Array, "B T N H"]], q: Float[Array, "B T N H"],
    k: Float[Array, "B G T H"], v: Float[Array, "B G T H"], mask: Bool[Array, "B T T"],
    *own: Array) -> Float[Array, "B T N H"]:
  """`attention` under a mask that is causal: on CPU some queries at a time, without the keys behind
  them. Over four blocks three eighths of the scores are never made.

  Args:
    attention: `attend` or `attend_own`.
    q, k, v, mask: its arguments.
    own: its further arguments, [B, T, ...].
  """
  T = q.shape[1]
  size = _BLOCK if jax.default_backend() == "cpu" else T
  return jnp.concatenate([
      attention(q[:, a:a + size], k[:, :, :a + size], v[:, :, :a + size],
                mask[:, a:a + size, :a + size], *(x[:, a:a + size] for x in own))
      for a in range(0, T, size)], 1)


def attend_own(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B G S H"],
    v: Float[Array, "B G S H"],
    mask: Bool[Array, "B T S"],
    own_k: Float[Array, "B T G J H"],
    own_v: Float[Array, "B T G J H"],
    own_mask: Bool[Array, "B T J"],
) -> Float[Array, "B T N H"]:
  """Attention to keys that all queries share and to J keys of each query's own, in one softmax.

  The form of drafters that continue from every position at once: the shared keys are the context,
  a query's own keys are its draft so far (or its block).
  """
  B, T, N, H = q.shape
  G, S = k.shape[1:3]
  R = N // G
  grouped = q.reshape(B, T, G, R, H).transpose(0, 2, 1, 3, 4)
  own_k, own_v = (x.transpose(0, 2, 1, 3, 4) for x in (own_k, own_v))
  # Contractions whose result keeps the order of their operands: XLA:CPU runs no others in bfloat16.
  shared = jnp.einsum(
      "bgth,bgsh->bgts", grouped.reshape(B, G, T * R, H), k, preferred_element_type=jnp.float32)
  # A product per query would be thousands of tiny matrices; these are sums that fuse.
  wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
  own = jnp.sum(wide(grouped)[:, :, :, :, None] * wide(own_k)[:, :, :, None], -1)
  shared = jnp.where(mask[:, None, :, None], shared.reshape(B, G, T, R, S) * H**-0.5, _MASKED)
  own = jnp.where(own_mask[:, None, :, None], own * H**-0.5, _MASKED)
  # One softmax in two parts: to join the scores would copy the large ones, forward and back.
  most = lambda x: jnp.max(jax.lax.stop_gradient(x), -1, keepdims=True)
  top = jnp.maximum(most(shared), most(own))
  shared, own = jnp.exp(shared - top), jnp.exp(own - top)
  total = jnp.sum(shared, -1, keepdims=True) + jnp.sum(own, -1, keepdims=True)
  out = jnp.einsum(
      "bgts,bgsh->bgth", shared.astype(v.dtype).reshape(B, G, T * R, S), v,
      preferred_element_type=jnp.float32).reshape(B, G, T, R, H)
  out = (out + jnp.sum(own[..., None] * wide(own_v)[:, :, :, None], -2)) / total
  return out.astype(q.dtype).transpose(0, 2, 1, 3, 4).reshape(B, T, N, H)
