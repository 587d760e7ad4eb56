"""The config-driven decoder in flax.nnx: the target, and the body of a `small_lm` drafter.

Weights lie as [out, in] (the layout of the files, and the fast one for XLA:CPU in bfloat16).
The residual stream and every normalisation are float32; matmuls take the compute dtype and
accumulate in float32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from spec_jax import sharding
from spec_jax.models.attention import attend
from spec_jax.models.cache import write_rows
from spec_jax.models.config import DecoderConfig
from spec_jax.models.moe import experts, route
from spec_jax.types import Cache, DecoderOutput

NEG_INF = np.float32(-np.inf)  # of numpy: an array of JAX would start its backend at import


@jax.custom_vjp
def linear(x: Float[Array, "*n I"], w: Float[Array, "O I"]) -> Float[Array, "*n O"]:
  """x @ w.T in the dtype of w, accumulated in float32; the result is float32.

  A single bfloat16 row is computed as two (XLA:CPU has no fast bfloat16 matrix-vector product).
  """
  return _linear(x, w)


def _dot(a, b):
  wide = jnp.promote_types(b.dtype, jnp.float32)
  return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=wide)


def _linear(x, w):
  rows = x.reshape(-1, x.shape[-1]).astype(w.dtype)
  single = rows.shape[0] == 1 and w.dtype == jnp.bfloat16
  if single:
    rows = jnp.concatenate([rows, rows])
  out = _dot(rows, w)
  return (out[:1] if single else out).reshape(*x.shape[:-1], w.shape[0])


def _linear_fwd(x, w):
  return _linear(x, w), (x, w)


def _linear_bwd(saved, g):
  x, w = saved
  g2 = g.reshape(-1, g.shape[-1]).astype(w.dtype)
  x2 = x.reshape(-1, x.shape[-1]).astype(w.dtype)
  wide = jnp.promote_types(w.dtype, jnp.float32)
  dot = functools.partial(jax.lax.dot_general, preferred_element_type=wide)
  dx = dot(g2, w, (((1,), (0,)), ((), ())))
  dw = dot(g2, x2, (((0,), (0,)), ((), ())))
  return dx.reshape(x.shape).astype(x.dtype), dw.astype(w.dtype)


linear.defvjp(_linear_fwd, _linear_bwd)


def rms_norm(x: Float[Array, "*n D"], weight: Float[Array, " D"], eps: float) -> Array:
  """RMSNorm (Zhang & Sennrich 2019) in float32."""
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight.astype(jnp.float32)


def rope_inverse_frequencies(
    config: DecoderConfig, divisors: np.ndarray | None = None) -> np.ndarray:
  """Inverse rotary frequencies [R], with the configured scaling (Llama 3.1 rule, linear or YaRN).

  Args:
    config: reads rope_theta, rope_scaling, head_dim, partial_rotary_factor.
    divisors: [R] factors stored in a GGUF (`rope_freqs.weight`); they replace the scaling.
  """
  dim = int(config.head_dim * config.partial_rotary_factor)
  inv = 1.0 / config.rope_theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
  scaling = config.rope_scaling
  if divisors is not None:
    inv = inv / divisors
  elif scaling is not None and scaling.kind == "linear":
    inv = inv / scaling.factor
  elif scaling is not None and scaling.kind == "yarn":
    keep = 1 - _yarn_ramp(config, dim)
    inv = keep * inv + (1 - keep) * inv / scaling.factor
  elif scaling is not None:
    wavelength = 2 * np.pi / inv
    original = scaling.original_max_position
    ramp = (original / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(ramp, 0.0, 1.0)
    inv = keep * inv + (1 - keep) * inv / scaling.factor
  return inv.astype(np.float32)


def _yarn_ramp(config: DecoderConfig, dim: int) -> np.ndarray:
  """How far each channel is interpolated, 0...1 (2309.00071, section 3.2)."""
  scaling = config.rope_scaling
  turns = lambda count: dim * math.log(
      scaling.original_max_position / (count * 2 * math.pi)) / (2 * math.log(config.rope_theta))
  low, high = turns(scaling.beta_fast), turns(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, dim - 1)
  width = high - low if high != low else 0.001
  return np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)


def local_frequencies(config: DecoderConfig) -> np.ndarray:
  """Inverse rotary frequencies [R] of the local layers, where they have a base of their own."""
  return rope_inverse_frequencies(dataclasses.replace(
      config, rope_theta=config.rope_local_theta, rope_scaling=None))


def rope_tables(
    positions: Int[Array, "B T"], inverse_frequencies: Sequence[float], magnitude: float = 1.0,
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
  """cos and sin at the positions, times the magnitude that the scaling asks for."""
  table = positions[..., None].astype(jnp.float32) * jnp.asarray(inverse_frequencies)
  if magnitude == 1.0:
    return jnp.cos(table), jnp.sin(table)
  return jnp.cos(table) * magnitude, jnp.sin(table) * magnitude


def rope_magnitude(config: DecoderConfig) -> float:
  """What the configured scaling multiplies cos and sin by."""
  return 1.0 if config.rope_scaling is None else config.rope_scaling.magnitude


def rotate(x: Float[Array, "B T N H"], cos: Array, sin: Array) -> Float[Array, "B T N H"]:
  """Rotary embedding, half-split form; cos and sin are [B, T, R]; dims beyond 2R pass."""
  half = cos.shape[-1]
  cos, sin = cos[:, :, None], sin[:, :, None]
  a, b, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Block(nnx.Module):
  """One decoder layer: attention and a gated MLP (or experts), each with its norms and residual."""

  def __init__(self, config: DecoderConfig, tensor: Callable[[str], Array]):
    self.config = config
    for name in block_shapes(config):
      setattr(self, name, nnx.Param(tensor(name)))

  def __call__(self, x, cos, sin, cache, start, mask, attend_length=None):
    """x [B,T,D] f32; cache None or (k, v) [B,G,S,H]; returns x and the new (k, v)."""
    c = self.config
    B, T, _ = x.shape
    q, k, v = self._heads(rms_norm(x, self.attn_norm[...], c.rms_norm_eps))
    dtype = self.wq[...].dtype
    q = rotate(q, cos, sin).astype(dtype)
    k = rotate(k, cos, sin).astype(dtype).transpose(0, 2, 1, 3)
    v = v.astype(dtype).transpose(0, 2, 1, 3)
    if cache is not None:
      cache = (write_rows(cache[0], k, start), write_rows(cache[1], v, start))
      k, v = (part[:, :, :attend_length] for part in cache)
    out = attend(q, k, v, mask, c.query_scalar**-0.5 if c.query_scalar else None)
    out = linear(out.reshape(B, T, c.num_heads * c.head_dim), self.wo[...])
    if c.sandwich_norms:
      out = rms_norm(out, self.attn_post_norm[...], c.rms_norm_eps)
    x = x + out
    out = self._mlp(rms_norm(x, self.mlp_norm[...], c.rms_norm_eps))
    if c.sandwich_norms:
      out = rms_norm(out, self.mlp_post_norm[...], c.rms_norm_eps)
    return x + out, cache

  def _heads(self, h):
    """Queries, keys and values [B, T, heads, H] of normed states, before the rotation."""
    c = self.config
    q, k, v = linear(h, self.wq[...]), linear(h, self.wk[...]), linear(h, self.wv[...])
    if c.qkv_bias:
      q, k, v = q + self.bq[...], k + self.bk[...], v + self.bv[...]
    q, k, v = (part.reshape(*h.shape[:2], -1, c.head_dim) for part in (q, k, v))
    if c.qk_norm:
      q = rms_norm(q, self.q_norm[...], c.rms_norm_eps)
      k = rms_norm(k, self.k_norm[...], c.rms_norm_eps)
    return q, k, v

  def _mlp(self, h):
    c = self.config
    act = jax.nn.silu if c.activation == "silu" else jax.nn.gelu  # its default is the tanh form
    if not c.num_experts:
      gated = act(linear(h, self.w_gate[...])) * linear(h, self.w_up[...])
      return linear(gated, self.w_down[...])
    rows = h.reshape(-1, h.shape[-1])
    weights, chosen = route(linear(rows, self.router[...]), c.experts_per_token, c.norm_topk)
    return experts(
        rows, weights, chosen, self.experts_gate[...], self.experts_up[...],
        self.experts_down[...], act).reshape(h.shape)


# Of a Llama layer, the form that drafters reading the target's states have too.
BLOCK_TENSORS = (
    "attn_norm", "wq", "wk", "wv", "wo", "mlp_norm", "w_gate", "w_up", "w_down")


def block_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
  """Shape of each tensor of one layer, [out, in]; those of all experts lie in one array."""
  c = config
  D, H = c.hidden_size, c.head_dim
  q, kv = c.num_heads * H, c.num_kv_heads * H
  shapes: dict[str, tuple[int, ...]] = {
      "attn_norm": (D,), "wq": (q, D), "wk": (kv, D), "wv": (kv, D), "wo": (D, q),
      "mlp_norm": (D,)}
  if c.num_experts:
    E, F = c.num_experts, c.expert_size
    shapes |= {"router": (E, D), "experts_gate": (E, F, D), "experts_up": (E, F, D),
               "experts_down": (E, D, F)}
  else:
    F = c.intermediate_size
    shapes |= {"w_gate": (F, D), "w_up": (F, D), "w_down": (D, F)}
  if c.qkv_bias:
    shapes |= {"bq": (q,), "bk": (kv,), "bv": (kv,)}
  if c.qk_norm:
    shapes |= {"q_norm": (H,), "k_norm": (H,)}
  if c.sandwich_norms:
    shapes |= {"attn_post_norm": (D,), "mlp_post_norm": (D,)}
  return shapes


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
  """Shape of every tensor of a decoder by its canonical name."""
  shapes = {"embed": (config.vocab_size, config.hidden_size)}
  for i in range(config.num_layers):
    shapes |= {f"layers.{i}.{name}": shape for name, shape in block_shapes(config).items()}
  shapes["final_norm"] = (config.hidden_size,)
  if not config.tie_embeddings:
    shapes["head"] = (config.vocab_size, config.hidden_size)
  return shapes


class Stack(nnx.Module):
  """Blocks and the final norm, without embedding and head: the body of a decoder or a drafter."""

  def __init__(
      self, config: DecoderConfig, tensor: Callable[[str], Array],
      rope_divisors: np.ndarray | None = None, mesh: Mesh | None = None):
    """Builds the stack from `tensor(canonical name)`, called once for each tensor; `mesh` are the
    devices that its states are divided over."""
    self.config, self.mesh = config, mesh
    self.layers = nnx.List([
        Block(config, lambda name, i=i: tensor(f"layers.{i}.{name}"))
        for i in range(config.num_layers)])
    self.final_norm = nnx.Param(tensor("final_norm"))
    self.inverse_frequencies = tuple(rope_inverse_frequencies(config, rope_divisors).tolist())
    self.local_frequencies = (
        tuple(local_frequencies(config).tolist()) if config.rope_local_theta else None)
    # Kept, because the config does not say them: a drafter made of these layers needs them too.
    self.rope_divisors = None if rope_divisors is None else tuple(
        np.asarray(rope_divisors, np.float32).tolist())

  def __call__(
      self,
      x: Float[Array, "B T D"],
      positions: Int[Array, "B T"],
      cache: Cache | None = None,
      *,
      taps: Sequence[int] = (),
      segments: Int[Array, "B T"] | None = None,
      attend_length: int | None = None,
  ) -> DecoderOutput:
    """One pass from embeddings to the final norm.

    Args:
      x: embedded tokens.
      positions: absolute positions; with a cache each row's must be consecutive.
      cache: None for a pass over whole sequences (training); otherwise the pass writes its keys
        and values at `positions` and sees the cache at indices <= position.
      taps: layers (0-based) whose outputs are returned as features.
      segments: without a cache: positions of different segments do not see each other.
      attend_length: with a cache: only its first entries are read (all by default).
    """
    c = self.config
    # By whether the layer is local: cos, sin and what its queries see.
    magnitude = 1.0 if self.rope_divisors is not None else rope_magnitude(c)
    tables = {False: rope_tables(positions, self.inverse_frequencies, magnitude)}
    tables[True] = tables[False] if self.local_frequencies is None else rope_tables(
        positions, self.local_frequencies)
    masks = {local: _mask(positions, cache, segments, attend_length, c.sliding_window * local)
             for local in {c.is_local(i) for i in range(c.num_layers)}}
    x = sharding.pin_states(x.astype(jnp.float32), self.mesh)
    features, keys, values = [], [], []
    for i, block in enumerate(self.layers):
      layer_cache = None if cache is None else (cache.k[i], cache.v[i])
      local = c.is_local(i)
      x, layer_cache = block(
          x, *tables[local], layer_cache, positions[:, 0], masks[local], attend_length)
      x = sharding.pin_states(x, self.mesh)
      if cache is not None:
        keys.append(layer_cache[0])
        values.append(layer_cache[1])
      if i in taps:
        features.append(x)
    dtype = self.layers[0].wq[...].dtype
    hidden = rms_norm(x, self.final_norm[...], c.rms_norm_eps).astype(dtype)
    tapped = jnp.concatenate(features, -1) if features else jnp.zeros((*x.shape[:2], 0))
    return DecoderOutput(
        hidden, tapped, None if cache is None else Cache(tuple(keys), tuple(values)))


class Decoder(nnx.Module):
  """Embedding, stack and head: `target(tokens, positions, cache) -> logits, DecoderOutput`."""

  def __init__(
      self, config: DecoderConfig, tensor: Callable[[str], Array],
      rope_divisors: np.ndarray | None = None, mesh: Mesh | None = None):
    """Builds the decoder from `tensor(canonical name)`, called once for each tensor; `mesh` are the
    devices that its states are divided over."""
    self.config = config
    self.embed = nnx.Param(tensor("embed"))
    self.stack = Stack(config, tensor, rope_divisors, mesh)
    if not config.tie_embeddings:
      self.head = nnx.Param(tensor("head"))

  def head_weight(self) -> Float[Array, "V D"]:
    """The head, which is the embedding when they are tied (one array, read twice)."""
    return self.embed[...] if self.config.tie_embeddings else self.head[...]

  def embedded(self, tokens: Int[Array, "*n"]) -> Float[Array, "*n D"]:
    """What the first layer reads: rows of the embedding, scaled where the family does."""
    return embed_rows(self.embed[...], tokens, self.config.embed_scale)

  def hidden(
      self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"],
      cache: Cache | None = None, **options) -> DecoderOutput:
    """One pass up to the final norm; the arguments are those of `Stack`."""
    return self.stack(self.embedded(tokens), positions, cache, **options)

  def logits(self, hidden: Float[Array, "*n D"]) -> Float[Array, "*n V"]:
    """Float32 logits; ids that do not exist (>= vocab_real) are -inf."""
    out = linear(hidden, self.head_weight())
    if self.config.vocab_real < self.config.vocab_size:
      out = jnp.where(jnp.arange(self.config.vocab_size) < self.config.vocab_real, out, NEG_INF)
    return out

  def __call__(self, tokens, positions, cache=None, **options):
    """Logits [B, T, V] of every position, and the DecoderOutput."""
    out = self.hidden(tokens, positions, cache, **options)
    return self.logits(out.hidden), out


def embed_rows(
    table: Float[Array, "V D"], tokens: Int[Array, "*n"], scale: float) -> Float[Array, "*n D"]:
  """Rows of an embedding times a scale, which is rounded to their dtype as Gemma's is."""
  rows = table[tokens]
  return rows if scale == 1.0 else rows * jnp.asarray(scale, rows.dtype)


def _mask(positions, cache, segments, attend_length, window) -> Bool[Array, "B T S"]:
  """What each query sees; with a window (not 0) its own position and the window - 1 before it."""
  if cache is not None:
    capacity = cache.k[0].shape[2] if attend_length is None else attend_length
    at, last = jnp.arange(capacity), positions[..., None]
    return (at <= last) & (at > last - window) if window else at <= last
  T = positions.shape[1]
  at, last = jnp.arange(T), jnp.arange(T)[:, None]
  # Positions of one segment are consecutive, so distances in the row are those in its text.
  mask = (at <= last) & (at > last - window) if window else at <= last
  mask = jnp.broadcast_to(mask, (positions.shape[0], T, T))
  if segments is not None:
    mask = mask & (segments[:, :, None] == segments[:, None, :])
  return mask


def random_tensors(config: DecoderConfig, seed: int, scale: float = 0.02, dtype=jnp.float32):
  """A `tensor(name)` function of random normal weights and unit norms, for tests and controls."""
  shapes = tensor_shapes(config)
  names = {name: i for i, name in enumerate(shapes)}

  def tensor(name):
    if name.endswith("norm"):
      return jnp.ones(shapes[name], jnp.float32)
    key = jax.random.fold_in(jax.random.key(seed), names[name])
    return (scale * jax.random.normal(key, shapes[name])).astype(dtype)

  return tensor
