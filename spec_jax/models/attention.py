"""The only place where attention is called: queries against a key/value buffer under a mask."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_MASKED = -1e30  # finite, so that a row that sees nothing gives numbers and not NaN


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B G S H"],
    v: Float[Array, "B G S H"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T N H"]:
  """Scaled dot-product attention with grouped key/value heads, softmax in float32.

  On CPU an einsum with the buffer as [B, G, S, H] (a [B, S, G, H] buffer is several times slower
  there); on accelerators `jax.nn.dot_product_attention`.
  """
  if jax.default_backend() == "cpu":
    return _attend_einsum(q, k, v, mask)
  return jax.nn.dot_product_attention(
      q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), mask=mask[:, None])


def _attend_einsum(q, k, v, mask):
  B, T, N, H = q.shape
  G, S = k.shape[1:3]
  R = N // G
  grouped = q.reshape(B, T, G, R, H).transpose(0, 2, 1, 3, 4).reshape(B, G, T * R, H)
  scores = jnp.einsum("bgth,bgsh->bgts", grouped, k, preferred_element_type=jnp.float32)
  seen = jnp.broadcast_to(mask[:, None, :, None], (B, 1, T, R, S)).reshape(B, 1, T * R, S)
  probs = jax.nn.softmax(jnp.where(seen, scores * H**-0.5, _MASKED), axis=-1)
  out = jnp.einsum("bgts,bgsh->bgth", probs.astype(v.dtype), v, preferred_element_type=jnp.float32)
  return out.astype(q.dtype).reshape(B, G, T, R, H).transpose(0, 2, 1, 3, 4).reshape(B, T, N, H)
