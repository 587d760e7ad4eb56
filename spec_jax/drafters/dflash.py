"""DFlash (2602.06036): a few layers over the target's hidden states that draft a block in one pass.

A block is the last committed token (the anchor) and masks behind it. Its slots see each other in
both directions, and the target's states of every position before the anchor. `drafters/__init__.py`
builds and loads it, `decode.py` drafts with it, `train_drafter/train.py` trains it, and `dspark.py`
puts a serial tail on it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from spec_jax import sampling as sampling_lib
from spec_jax import sharding
from spec_jax.drafters.head import LearnedDrafter
from spec_jax.errors import UserError
from spec_jax.models.attention import attend_own
from spec_jax.models.cache import init_cache, insert_rows, write_rows
from spec_jax.models.config import DecoderConfig
from spec_jax.models.decoder import (
  BLOCK_TENSORS,
  Decoder,
  block_shapes,
  embed_rows,
  linear,
  rms_norm,
  rope_inverse_frequencies,
  rope_magnitude,
  rope_tables,
  rotate,
)
from spec_jax.models.quant import Int8Weight, Weight
from spec_jax.sampling import Sampling
from spec_jax.target import Target, canonical_tensors, llama_layer
from spec_jax.types import Cache, Context, Proposal, TrainStates
from spec_jax.weights.names import HF_NAMES

LAYER_TENSORS = (*BLOCK_TENSORS, "q_norm", "k_norm")

# Canonical name -> name in a published checkpoint: a Qwen3 layer without the "model." in front.
EXPORT_NAMES = {
    "fc": "fc.weight",
    "hidden_norm": "hidden_norm.weight",
    **{name: stored.removeprefix("model.") for name, stored in HF_NAMES["llama"].items()
       if name.startswith("layers.") or name == "final_norm"},
    "layers.{i}.q_norm": "layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.k_norm": "layers.{i}.self_attn.k_norm.weight",
}


def dflash_taps(num_layers: int, count: int) -> tuple[int, ...]:
  """The tapped layers (0-based, outputs): round(1 + i (n - 4) / (N - 1)) for i in 0..N-1.

  Args:
    num_layers: n, of the target.
    count: N; a single tap is layer n // 2.

  Raises:
    UserError: these are not N different layers of the target.
  """
  if count == 1:
    taps = (num_layers // 2,)
  else:
    taps = tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
  inside = all(0 <= i < num_layers for i in taps)
  if not taps or not inside or any(a >= b for a, b in zip(taps, taps[1:], strict=False)):
    raise UserError(f"the target has {num_layers} layers, too few for {count} taps"
                    if count > 0 else f"{count} taps: a dflash drafter needs at least one")
  return taps


def default_gamma(block_size: int) -> float:
  """Decay of the loss weights: 4, 5, 7 for blocks of 8, 10, 16 (2602.06036), linear between them
  and constant beyond them."""
  return float(np.interp(block_size, (8, 10, 16), (4.0, 5.0, 7.0)))


def tensor_shapes(config: DecoderConfig, taps: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
  """Shape of every own tensor by canonical name.

  Args:
    config: of the draft layers.
    taps: target layers that are read.
  """
  D, H = config.hidden_size, config.head_dim
  layer = block_shapes(config) | {"q_norm": (H,), "k_norm": (H,)}
  shapes: dict[str, tuple[int, ...]] = {"fc": (D, len(taps) * D), "hidden_norm": (D,)}
  for i in range(config.num_layers):
    shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
  return shapes | {"final_norm": (D,)}


class BlockLayer(nnx.Module):
  """A layer whose queries are the block's and whose keys are the context's and the block's own.

  The published form is a Qwen3 layer, so every query and key head has its RMSNorm before the rotary
  embedding, also beside a target that has none.
  """

  def __init__(self, config: DecoderConfig, tensor: Callable[[str], Array]):
    self.config = config
    for name in LAYER_TENSORS:
      setattr(self, name, nnx.Param(tensor(name)))

  def _heads(self, x, w):
    return linear(x, w).reshape(*x.shape[:2], -1, self.config.head_dim)

  def keys_values(
      self, x: Float[Array, "B T D"], cos: Array, sin: Array,
  ) -> tuple[Float[Array, "B T G H"], Float[Array, "B T G H"]]:
    """Keys and values of context states or of block slots; cos and sin are [B, T, R]."""
    dtype = self.wq[...].dtype
    k = rms_norm(self._heads(x, self.wk[...]), self.k_norm[...], self.config.rms_norm_eps)
    return rotate(k, cos, sin).astype(dtype), self._heads(x, self.wv[...]).astype(dtype)

  def __call__(
      self, x: Float[Array, "B A W D"], cos: Array, sin: Array, k: Float[Array, "B G S H"],
      v: Float[Array, "B G S H"], visible: Bool[Array, "B A S"],
  ) -> Float[Array, "B A W D"]:
    """A blocks of W slots each; cos and sin [B, A * W, R] are those of the slots.

    Args:
      x: float32 residual stream.
      k, v: of the context.
      visible: the part of the context that each block sees.
    """
    B, A, W, D = x.shape
    eps = self.config.rms_norm_eps
    h = rms_norm(x, self.attn_norm[...], eps).reshape(B, A * W, D)
    q = rotate(rms_norm(self._heads(h, self.wq[...]), self.q_norm[...], eps), cos, sin)
    split = lambda y: y.reshape(B, A, W, *y.shape[2:])
    own_k, own_v = (split(y) for y in self.keys_values(h, cos, sin))
    out = _attend_blocks(split(q.astype(own_k.dtype)), k, v, visible, own_k, own_v)
    x = x + linear(out, self.wo[...])
    h = rms_norm(x, self.mlp_norm[...], eps)
    gated = jax.nn.silu(linear(h, self.w_gate[...])) * linear(h, self.w_up[...])
    return x + linear(gated, self.w_down[...])


def _attend_blocks(q, k, v, visible, own_k, own_v) -> Float[Array, "B A W O"]:
  """Each slot attends to the visible context and to its whole block.

  All slots of a block see the same keys, so they go as further query heads of one position: the
  block's keys are then held once and not once for each slot.
  """
  B, A, W, N, H = q.shape
  G = own_k.shape[3]
  folded = q.reshape(B, A, W, G, N // G, H).transpose(0, 1, 3, 4, 2, 5).reshape(B, A, N * W, H)
  own = [x.transpose(0, 1, 3, 2, 4) for x in (own_k, own_v)]
  out = attend_own(folded, k, v, visible, *own, jnp.ones((B, A, W), bool))
  out = out.reshape(B, A, G, N // G, W, H).transpose(0, 1, 4, 2, 3, 5)
  return out.reshape(B, A, W, N * H)


class DFlash(LearnedDrafter):
  """The DFlash draft model; embedding and head are the target's.

  Attributes:
    taps: target layers whose outputs are the features.
    mask_id: id of the target's vocabulary that fills the slots behind the anchor.
    block_size: slots of a block in training, the anchor's included.
    anchors: blocks trained per row and step.
    gamma: decay of the loss weights.
    embed_scale: of the embedded slots; None for the target's.
    silent: slots at the front of a block that predict nothing.
  """

  kind = "dflash"
  silent = 1

  def __init__(
      self,
      config: DecoderConfig,
      tensor: Callable[[str], Array],
      *,
      taps: tuple[int, ...],
      mask_id: int,
      block_size: int,
      head: Array | Int8Weight | None = None,
      draft_ids: Array | np.ndarray | None = None,
      rope_divisors: np.ndarray | None = None,
      anchors: int = 64,
      gamma: float | None = None,
      embed_scale: float | None = None,
      mesh: Mesh | None = None,
  ):
    """Builds the drafter from `tensor(canonical name)` (see `tensor_shapes`).

    Raises:
      UserError: a block of this size drafts nothing, or the mask is no id of the target's.
    """
    if block_size <= self.silent:
      raise UserError(f"block_size={block_size} must be at least {self.silent + 1}")
    if not 0 <= mask_id < config.vocab_size:
      raise UserError(f"mask_id={mask_id} is outside 0..{config.vocab_size - 1}")
    self.taps, self.mask_id, self.block_size = tuple(taps), mask_id, block_size
    self.anchors, self.embed_scale, self.mesh = anchors, embed_scale, mesh
    self.gamma = default_gamma(block_size) if gamma is None else gamma
    self.fc = nnx.Param(tensor("fc"))
    self.hidden_norm = nnx.Param(tensor("hidden_norm"))
    self.layers = nnx.List([
        BlockLayer(config, lambda name, i=i: tensor(f"layers.{i}.{name}"))
        for i in range(config.num_layers)])
    self.final_norm = nnx.Param(tensor("final_norm"))
    self.inverse_frequencies = tuple(rope_inverse_frequencies(config, rope_divisors).tolist())
    self.rope_divisors = None if rope_divisors is None else tuple(
        np.asarray(rope_divisors, np.float32).tolist())
    self.set_head(config, head, draft_ids)

  @property
  def depths(self) -> int:
    return self.block_size - self.silent

  def options(self) -> dict[str, Any]:
    """What the constructor needs besides config and tensors."""
    rest = {} if self.embed_scale is None else {"embed_scale": self.embed_scale}
    return {"taps": list(self.taps), "mask_id": self.mask_id, "block_size": self.block_size} | rest

  def own_tensors(self) -> dict[str, Weight]:
    """The tensors by canonical name."""
    tensors = {name: getattr(self, name)[...] for name in ("fc", "hidden_norm", "final_norm")}
    for i, layer in enumerate(self.layers):
      tensors |= {f"layers.{i}.{name}": getattr(layer, name)[...] for name in LAYER_TENSORS}
    return tensors

  # The pass that decoding and training share.

  def context(self, features: Float[Array, "B T F"], positions: Int[Array, "B T"]) -> Cache:
    """Keys and values [B, G, T, H] of the target's states at `positions`, for every layer."""
    fused = sharding.pin_states(linear(features, self.fc[...]), self.mesh)
    fused = rms_norm(fused, self.hidden_norm[...], self.config.rms_norm_eps)
    cos, sin = self._rope(positions)
    pairs = [layer.keys_values(fused, cos, sin) for layer in self.layers]
    keys, values = (tuple(x.transpose(0, 2, 1, 3) for x in part)
                    for part in zip(*pairs, strict=True))
    return Cache(keys, values)

  def block_states(
      self, anchor: Int[Array, "B A"], position: Int[Array, "B A"], width: int, context: Cache,
      visible: Bool[Array, "B A S"], target: Decoder,
  ) -> Float[Array, "B A K D"]:
    """Normed states of the slots that predict, of blocks `width` wide.

    Args:
      anchor: the token in the first slot of each block.
      position: its absolute position.
      width: W, slots of a block; K = W - silent of them predict.
      context: from `context`, or a cache of it.
      visible: where the context lies before the anchor, in its own text.
      target: lends the embedding.
    """
    B, A = anchor.shape
    masks = jnp.full((B, A, width - 1), self.mask_id, anchor.dtype)
    tokens = jnp.concatenate([anchor[..., None], masks], -1)
    embedded = (target.embedded(tokens) if self.embed_scale is None else
                embed_rows(target.embed[...], tokens, self.embed_scale))
    pin = lambda x: sharding.pin_states(x, self.mesh)
    x = pin(embedded.astype(jnp.float32))
    slots = position[..., None] + jnp.arange(width)
    cos, sin = self._rope(slots.reshape(B, A * width))
    for layer, k, v in zip(self.layers, context.k, context.v, strict=True):
      x = pin(layer(x, cos, sin, k, v, visible))
    normed = rms_norm(x[:, :, self.silent:], self.final_norm[...], self.config.rms_norm_eps)
    return normed.astype(self.layers[0].wq[...].dtype)

  def _rope(self, positions):
    magnitude = 1.0 if self.rope_divisors is not None else rope_magnitude(self.config)
    return rope_tables(positions, self.inverse_frequencies, magnitude)

  # Decoding.

  def init_state(self, rows: int, capacity: int) -> Cache:
    """An empty context: keys and values by absolute position."""
    return init_cache(self.config, rows, capacity, self.layers[0].wq[...].dtype)

  def insert(self, state: Cache, part: Cache, rows: Int[Array, " R"]) -> Cache:
    """Row refill: the first positions of other sequences into `rows`."""
    return insert_rows(state, part, rows)

  def observe(self, state, tokens, features, positions, valid, target: Decoder) -> Cache:
    """Absorbs a prompt: [B, T, F] features at [B, T] positions from 0.

    Rows shorter than T write stale entries at and behind their anchor, where no block looks before
    later calls have overwritten them.
    """
    del tokens, valid, target
    write = lambda old, new: write_rows(old, new, positions[:, 0])
    return jax.tree.map(write, state, self.context(features, positions))

  def after_round(
      self, state, tokens, features, positions, valid, target: Decoder) -> Cache:
    """Absorbs a verified block: the states of rejected drafts are stale as those of `observe`."""
    return self.observe(state, tokens, features, positions, valid, target)

  def propose(
      self, state: Cache, context: Context, draft_len: int, sampling: Sampling, target: Decoder,
  ) -> tuple[Proposal, Cache]:
    """Drafts K tokens in one pass, each slot's apart from the others.

    Raises:
      UserError: K is more than a block of the trained size drafts.
    """
    logits = self.logits(self.draft_states(state, context, draft_len, target), target)
    u = sampling_lib.uniforms(context.keys, sampling_lib.DRAFT, draft_len)
    pick = lambda logits, place, u: self.pick(
        logits, place, u, context, sampling, target.config.vocab_size)
    tokens, probs = jax.vmap(pick, (1, 0, 1), 1)(logits, jnp.arange(draft_len), u)
    return Proposal(tokens, probs), state

  def draft_states(
      self, state: Cache, context: Context, draft_len: int, target: Decoder,
  ) -> Float[Array, "B K D"]:
    """The states behind the K drafts of one round; a short K makes a narrower block.

    Raises:
      UserError: K is more than a block of the trained size drafts.
    """
    if draft_len > self.depths:
      raise UserError(f"draft_len={draft_len} is too long: a {self.kind} drafter of "
                      f"block_size={self.block_size} drafts at most {self.depths} tokens")
    last = context.length - 1
    anchor = jnp.take_along_axis(context.tokens, last[:, None], 1)
    visible = jnp.arange(state.k[0].shape[2]) < last[:, None, None]
    return self.block_states(
        anchor, last[:, None], draft_len + self.silent, state, visible, target)[:, 0]

  # Training.

  def train_states(
      self, batch: dict[str, Array], target: Decoder, key: Array | None, anchors: Any = None,
  ) -> TrainStates:
    """States of blocks at anchors that are drawn anew each step (or at `anchors`, a result of
    `draw_anchors`), all blocks of a row in one pass; ordered by row, anchor and draft.

    Loss weights are exp(-(j - 1) / gamma) at the j-th draft (2602.06036), not normalised.
    """
    place, live = anchors or self.draw_anchors(batch, key)
    return self._pack(self._train_blocks(batch, place, target), batch, place, live)

  def draw_anchors(
      self, batch: dict[str, Array], key: Array) -> tuple[Int[Array, "R A"], Bool[Array, "R A"]]:
    """Anchors by column, without replacement, and which of them are real (a row may have fewer).

    An anchor is an answered token whose next token is supervised: the prefill gives the first token
    of an answer, so drafting begins behind it.
    """
    teacher = batch["teacher"]
    before = jnp.pad(teacher[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    can = (teacher >= 0) & (before >= 0)
    priority = jnp.where(can, jax.random.uniform(key, can.shape), -1.0)
    top, place = jax.lax.top_k(priority, min(self.anchors, can.shape[1]))
    return place, top >= 0

  def _train_blocks(self, batch, place, target) -> Float[Array, "R A K D"]:
    segments, positions = batch["segments"], batch["positions"]
    own = segments[:, None] == _take(segments, place)[..., None]
    visible = own & (jnp.arange(segments.shape[1]) < place[..., None])
    return self.block_states(
        _take(batch["tokens"], place), _take(positions, place), self.block_size,
        self.context(batch["features"], positions), visible, target)

  def _columns(self, place, size) -> Int[Array, "R A K"]:
    """Columns of the token before each draft, kept inside a row of `size`."""
    return jnp.minimum(place[..., None] + jnp.arange(self.depths), size - 1)

  def _pack(self, hidden, batch, place, live) -> TrainStates:
    """The states [R, A, K, E] with what each predicts: the j-th draft is the token behind column
    anchor + j - 1, as long as all drafts up to it are answered tokens.

    The last position of a text or row has no teacher row, so such a run never leaves its text.
    """
    at = self._columns(place, batch["teacher"].shape[1])
    teacher = _take(batch["teacher"], at)
    there = jnp.cumprod((live[..., None] & (teacher >= 0)).astype(jnp.int32), -1) > 0
    depth = jnp.broadcast_to(jnp.arange(self.depths), at.shape)
    weight = jnp.where(there, jnp.exp(-depth / self.gamma), 0.0)
    block = jnp.broadcast_to(jnp.arange(live.size).reshape(*live.shape, 1), at.shape)
    return TrainStates(
        hidden.reshape(-1, 1, hidden.shape[-1]), jnp.where(there, teacher, 0).reshape(-1),
        *(x.reshape(-1, 1) for x in (weight, depth, block)), live.size)


def _take(x: Array, at: Array) -> Array:
  """x [R, T] at columns [R, ...]."""
  return jnp.take_along_axis(x, at.reshape(at.shape[0], -1), 1).reshape(at.shape)


# What a new drafter starts from.


def init_tensors(
    target: Target, layers: tuple[int, ...], taps: tuple[int, ...]) -> dict[str, Array]:
  """Tensors of copies of the target's layers that read the deepest tap.

  fc passes the deepest tap on and is zero for the others; hidden_norm is the attention norm of the
  first of the layers, whose keys and values are then those it has in the target. Query and key
  norms that the target lacks are constants: the root mean square of the projection of an input
  whose normalised components are independent, so that q.k keeps about its scale.

  Args:
    target: whose tensors are copied, as float32.
    layers: 0-based, one for each draft layer.
    taps: of the drafter, ascending.

  Raises:
    UserError: the target has no such layer.
  """
  bad = [i for i in layers if not 0 <= i < target.config.num_layers]
  if bad or not layers:
    raise UserError(f"layers={layers} must name layers 0..{target.config.num_layers - 1}")
  D, H = target.config.hidden_size, target.config.head_dim
  source = {k: jnp.asarray(v, jnp.float32) for k, v in canonical_tensors(target).items()
            if k == "final_norm" or k.startswith(tuple(f"layers.{i}." for i in layers))}
  out = {"fc": jnp.pad(jnp.eye(D), ((0, 0), ((len(taps) - 1) * D, 0))),
         "hidden_norm": source[f"layers.{layers[0]}.attn_norm"],
         "final_norm": source["final_norm"]}
  for place, i in enumerate(layers):
    layer = llama_layer(source, target.config, i)
    for norm, projection in (("q_norm", "wq"), ("k_norm", "wk")):
      power = jnp.sum((layer[projection] * layer["attn_norm"]) ** 2, -1)  # of each output
      layer[norm] = source.get(f"layers.{i}.{norm}", jnp.full((H,), jnp.sqrt(jnp.mean(power))))
    out |= {f"layers.{place}.{name}": value for name, value in layer.items()}
  return out
