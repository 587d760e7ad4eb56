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
  G = k.shape[1]
  grouped = q.reshape(B, T, G, N // G, H)
  shared = jnp.einsum("btgrh,bgsh->bgrts", grouped, k, preferred_element_type=jnp.float32)
  own = jnp.einsum("btgrh,btgjh->bgrtj", grouped, own_k, preferred_element_type=jnp.float32)
  scores = jnp.concatenate([
      jnp.where(mask[:, None, None], shared * H**-0.5, _MASKED),
      jnp.where(own_mask[:, None, None], own * H**-0.5, _MASKED)], -1)
  probs = jax.nn.softmax(scores, -1).astype(v.dtype)
  S = k.shape[2]
  out = jnp.einsum("bgrts,bgsh->btgrh", probs[..., :S], v, preferred_element_type=jnp.float32)
  out += jnp.einsum(
      "bgrtj,btgjh->btgrh", probs[..., S:], own_v, preferred_element_type=jnp.float32)
  return out.astype(q.dtype).reshape(B, T, N, H)
