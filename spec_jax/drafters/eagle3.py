"""EAGLE-3 (2503.01840): one decoder layer over the target's hidden states, drafting token by token.

Input i of the drafter pairs the target's features at position i with the token at position i + 1;
its output predicts the token at i + 2. While drafting, the drafter's own output takes the place of
features that the target has not computed yet.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from spec_jax import sampling as sampling_lib
from spec_jax import sharding
from spec_jax.drafters.head import LearnedDrafter, follow
from spec_jax.errors import UserError
from spec_jax.models.attention import attend, attend_own, causal_blocks
from spec_jax.models.cache import write_rows
from spec_jax.models.config import DecoderConfig
from spec_jax.models.decoder import (
  Decoder,
  block_shapes,
  linear,
  rms_norm,
  rope_inverse_frequencies,
  rope_magnitude,
  rope_tables,
  rotate,
)
from spec_jax.models.quant import Int8Weight, Weight
from spec_jax.sampling import Sampling
from spec_jax.target import llama_layer
from spec_jax.types import Context, Proposal, TrainStates, pytree

_LEAST_LAYERS = 7  # of a target whose three taps are three layers in order
DECAY = 0.8  # of the loss weight by draft step (EAGLE-3 training)


def eagle3_taps(num_layers: int) -> tuple[int, int, int]:
  """The tapped layers (0-based, outputs) of an n-layer target: 1, n/2 - 1, n - 4.

  Raises:
    UserError: the target is too shallow for three different ones.
  """
  if num_layers < _LEAST_LAYERS:
    raise UserError(f"eagle3 taps layers 1, n/2 - 1 and n - 4 of the target, which needs "
                    f"{_LEAST_LAYERS} layers; this one has {num_layers}")
  return 1, num_layers // 2 - 1, num_layers - 4


def tensor_shapes(config: DecoderConfig, taps: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
  """Shape of every own tensor by canonical name; q, k and v project from twice the width."""
  D = config.hidden_size
  layer = block_shapes(config) | {"hidden_norm": (D,)}
  for name in ("wq", "wk", "wv"):
    layer[name] = (layer[name][0], 2 * D)
  return {"fc": (D, len(taps) * D), "final_norm": (D,)} | {
      f"layers.0.{name}": shape for name, shape in layer.items()}


@pytree
class Eagle3State:
  """Per row, addressed by input index i.

  Attributes:
    k, v: [B, G, S, H] keys and values of the layer.
    fused: [B, S, D] float32, fc of the target's features at position i.
  """

  k: Float[Array, "B G S H"]
  v: Float[Array, "B G S H"]
  fused: Float[Array, "B S D"]


class Eagle3(LearnedDrafter):
  """The EAGLE-3 draft model; the embedding is the target's.

  Attributes:
    taps: target layers whose outputs are the features.
    steps: J, draft steps that training simulates (training-time test).
    norm_before_residual: the residual stream starts from the normed features, as some public
      trainers have it; EAGLE-3's own starts from the un-normed ones.
  """

  kind = "eagle3"

  def __init__(
      self,
      config: DecoderConfig,
      tensor: Callable[[str], Array],
      *,
      taps: tuple[int, ...],
      steps: int = 7,
      norm_before_residual: bool = False,
      head: Array | Int8Weight | None = None,
      draft_ids: Array | np.ndarray | None = None,
      rope_divisors: np.ndarray | None = None,
      mesh: Mesh | None = None,
  ):
    """Builds the drafter from `tensor(canonical name)` (see `tensor_shapes`)."""
    self.taps, self.steps, self.mesh = tuple(taps), steps, mesh
    self.norm_before_residual = norm_before_residual
    for name in tensor_shapes(config, self.taps):
      setattr(self, name.removeprefix("layers.0."), nnx.Param(tensor(name)))
    self.inverse_frequencies = tuple(rope_inverse_frequencies(config, rope_divisors).tolist())
    self.rope_divisors = None if rope_divisors is None else tuple(
        np.asarray(rope_divisors, np.float32).tolist())
    self.set_head(config, head, draft_ids)

  @property
  def depths(self) -> int:
    return self.steps

  def options(self) -> dict[str, Any]:
    """What the constructor needs besides config and tensors."""
    rest = {"norm_before_residual": True} if self.norm_before_residual else {}
    return {"taps": list(self.taps), "steps": self.steps} | rest

  def own_tensors(self) -> dict[str, Weight]:
    """The tensors by canonical name."""
    return {name: getattr(self, name.removeprefix("layers.0."))[...]
            for name in tensor_shapes(self.config, self.taps)}

  # Decoding.

  def init_state(self, rows: int, capacity: int) -> Eagle3State:
    """Zeros for `rows` sequences of at most `capacity` positions."""
    c, dtype = self.config, self.wq[...].dtype
    # Two arrays: the buffers are donated, and one cannot be donated twice.
    k, v = (jnp.zeros((rows, c.num_kv_heads, capacity, c.head_dim), dtype) for _ in range(2))
    return Eagle3State(k, v, jnp.zeros((rows, capacity, c.hidden_size), jnp.float32))

  def insert(
      self, state: Eagle3State, part: Eagle3State, rows: Int[Array, " R"]) -> Eagle3State:
    """Row refill: the first positions of other sequences into `rows`."""
    P = part.fused.shape[1]
    put = lambda big, small: big.at[rows, :, :P].set(small, mode="drop")
    return Eagle3State(put(state.k, part.k), put(state.v, part.v),
                       state.fused.at[rows, :P].set(part.fused, mode="drop"))

  def observe(self, state, tokens, features, positions, valid, target: Decoder) -> Eagle3State:
    """Absorbs a prompt: [B, T] ids and [B, T, F] features at [B, T] positions from 0.

    The input of the last token waits for the token behind it; what is written in its place (and
    for rows shorter than T) is overwritten before it is seen.
    """
    del valid
    fused = self._fused(features)
    state = Eagle3State(state.k, state.v, state.fused.at[:, :tokens.shape[1]].set(fused))
    return self._run(state, jnp.roll(tokens, -1, 1), fused, positions, target)[1]

  def after_round(
      self, state, tokens, features, positions, valid, target: Decoder) -> Eagle3State:
    """Absorbs the features [B, W, F] of a verified block at [B, W] positions; their inputs wait for
    the next `propose` or `catch_up`."""
    del tokens, valid, target
    put = lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(row, new, at, 0)
    fused = jax.vmap(put)(state.fused, self._fused(features), positions[:, 0])
    return Eagle3State(state.k, state.v, fused)

  def catch_up(
      self, state: Eagle3State, context: Context, draft_len: int, target: Decoder) -> Eagle3State:
    """Runs the inputs of every token that the last round can have committed."""
    return self._committed(state, context, draft_len, target)[1]

  def _committed(self, state, context, draft_len, target):
    """The output [B, D] of the last committed token's input, and the state behind the inputs of the
    last K + 1 tokens, now with the target's own features."""
    W = draft_len + 1
    start = jnp.maximum(context.length - 1 - W, 0)
    at = start[:, None] + jnp.arange(W)
    tokens = jnp.take_along_axis(context.tokens, at + 1, 1)
    hidden, state = self._run(state, tokens, _rows(state.fused, at), at, target)
    return _rows(hidden, (context.length - 2 - start)[:, None]), state

  def propose(
      self, state: Eagle3State, context: Context, draft_len: int, sampling: Sampling,
      target: Decoder,
  ) -> tuple[Proposal, Eagle3State]:
    """Drafts K tokens.

    The first step is K + 1 wide: the inputs of every token that the last round can have committed.
    """
    length = context.length
    last, state = self._committed(state, context, draft_len, target)
    u = sampling_lib.uniforms(context.keys, sampling_lib.DRAFT, draft_len)
    pick = functools.partial(
        self.pick, context=context, sampling=sampling, width=target.config.vocab_size)
    first, probs = pick(self._score(last[:, 0], target), jnp.int32(0), u[:, 0])

    def step(carry, inputs):
      state, token, hidden = carry
      offset, u = inputs
      place = (length - 1 + offset)[:, None]
      hidden, state = self._run(state, token[:, None], hidden, place, target)
      token, probs = pick(self._score(hidden[:, 0], target), offset + 1, u)
      return (state, token, hidden), (token, probs)

    proposal, (state, _, _) = follow(step, (state, first, last), first, probs, u)
    return proposal, state

  def _score(self, hidden, target):
    return self.logits(self._normed(hidden), target)

  def _normed(self, hidden):
    return rms_norm(hidden, self.final_norm[...], self.config.rms_norm_eps).astype(
        self.wq[...].dtype)

  def _run(self, state, tokens, fused, positions, target):
    """[B, T, D] outputs of consecutive inputs, and the state with their keys and values."""
    q, k, v = self._project(target.embedded(tokens), fused, positions)
    start = positions[:, 0]
    keys = write_rows(state.k, k.transpose(0, 2, 1, 3), start)
    values = write_rows(state.v, v.transpose(0, 2, 1, 3), start)
    mask = jnp.arange(keys.shape[2]) <= positions[..., None]
    return self._finish(fused, attend(q, keys, values, mask)), Eagle3State(
        keys, values, state.fused)

  # The layer, in the two halves that attention divides.

  def _project(self, embedded, fused, positions):
    """Queries, keys and values [B, T, N or G, H] with rotary embedding at `positions`."""
    c = self.config
    x = jnp.concatenate([rms_norm(embedded, self.attn_norm[...], c.rms_norm_eps),
                         rms_norm(fused, self.hidden_norm[...], c.rms_norm_eps)], -1)
    magnitude = 1.0 if self.rope_divisors is not None else rope_magnitude(c)
    cos, sin = rope_tables(positions, self.inverse_frequencies, magnitude)
    dtype = self.wq[...].dtype
    heads = lambda w: linear(x, w).reshape(*x.shape[:2], -1, c.head_dim)
    q, k, v = (heads(w[...]) for w in (self.wq, self.wk, self.wv))
    if c.qk_norm:
      q, k = (rms_norm(y, w[...], c.rms_norm_eps) for y, w in ((q, self.q_norm), (k, self.k_norm)))
    return *(rotate(y, cos, sin).astype(dtype) for y in (q, k)), v.astype(dtype)

  def _finish(self, fused, attended):
    """The output of the layer: residual stream from the fused features on."""
    c = self.config
    if self.norm_before_residual:
      fused = rms_norm(fused, self.hidden_norm[...], c.rms_norm_eps)
    x = fused.astype(jnp.float32) + linear(
        attended.reshape(*attended.shape[:2], -1), self.wo[...])
    h = rms_norm(x, self.mlp_norm[...], c.rms_norm_eps)
    gated = jax.nn.silu(linear(h, self.w_gate[...])) * linear(h, self.w_up[...])
    return sharding.pin_states(x + linear(gated, self.w_down[...]), self.mesh)

  def _fused(self, features):
    """fc of the target's features [B, T, F], as the residual stream begins."""
    return sharding.pin_states(linear(features, self.fc[...]), self.mesh)

  # Training.

  def train_hidden(
      self, tokens: Int[Array, "R T"], positions: Int[Array, "R T"],
      segments: Int[Array, "R T"], features: Float[Array, "R T F"], target: Decoder,
  ) -> list[Float[Array, "R T D"]]:
    """Training-time test: the normed states of J steps at every input i.

    At step j input i reads the token at i + 1 + j and, in place of features, the state of step
    j - 1; it sees the inputs <= i of step 0 and its own steps 1...j.
    """
    T = tokens.shape[1]
    causal = jnp.arange(T) <= jnp.arange(T)[:, None]
    mask = causal & (segments[:, :, None] == segments[:, None, :])
    hidden = self._fused(features)
    out, own = [], []
    for j in range(self.steps):
      embedded = target.embedded(jnp.roll(tokens, -1 - j, 1))
      q, k, v = self._project(embedded, hidden, positions + j)
      if j == 0:
        shared = tuple(x.transpose(0, 2, 1, 3) for x in (k, v))
        attended = causal_blocks(attend, q, *shared, mask)
      else:
        own.append((k, v))
        keys, values = (jnp.stack(x, 3) for x in zip(*own, strict=True))
        seen = jnp.ones((*tokens.shape, j), bool)
        attended = causal_blocks(attend_own, q, *shared, mask, keys, values, seen)
      hidden = self._finish(hidden, attended)
      out.append(self._normed(hidden))
    return out

  def train_states(self, batch: dict[str, Array], target: Decoder, key: Array) -> TrainStates:
    """States of every step that predict a supervised token.

    The first answered token comes from the prefill and is never drafted, so step 0 begins at the
    input whose token that is; mask and labels of step j are those of step 0 moved left by j.
    """
    del key
    place, teacher, segments = batch["place"], batch["teacher"], batch["segments"]
    T = segments.shape[1]
    states = self.train_hidden(
        batch["tokens"], batch["positions"], segments, batch["features"], target)
    flat_segments, flat_teacher = segments.reshape(-1), teacher.reshape(-1)
    before = place - 1
    drafted = (batch["weight"] > 0) & (place % T > 0) & (flat_teacher[before] >= 0) & (
        flat_segments[before] == flat_segments[place])
    hidden, weights = [], []
    for j, state in enumerate(states):
      at = place - 1 - j
      there = drafted & (place % T > j) & (flat_segments[at] == flat_segments[place])
      hidden.append(state.reshape(-1, state.shape[-1])[jnp.maximum(at, 0)])
      weights.append(jnp.where(there, DECAY**j, 0.0))
    count = place.shape[0]
    depth = jnp.broadcast_to(jnp.arange(self.steps), (count, self.steps))
    return TrainStates(
        jnp.stack(hidden, 1), jnp.arange(count), jnp.stack(weights, 1), depth,
        jnp.maximum(place[:, None] - depth, 0), segments.size)


def _rows(table: Float[Array, "B S D"], at: Int[Array, "B T"]) -> Float[Array, "B T D"]:
  return jnp.take_along_axis(table, at[..., None], 1)


def init_tensors(
    tensors: dict[str, Array], config: DecoderConfig, layer: int, taps: tuple[int, ...], seed: int,
) -> dict[str, np.ndarray]:
  """A start from the target: its layer `layer` reads the deepest tap, unchanged by fc.

  Args:
    tensors: of the target, by canonical name.
    config: of the target.
    layer: 0-based.
    taps: of the drafter.
    seed: of the small random weights that read the token's embedding.
  """
  D = config.hidden_size
  rng = np.random.default_rng(seed)
  out = {"fc": np.concatenate(
      [np.zeros((D, (len(taps) - 1) * D), np.float32), np.eye(D, dtype=np.float32)], 1)}
  for name, value in llama_layer(tensors, config, layer, seed).items():
    value = sharding.fetch(value)
    if name in ("wq", "wk", "wv"):
      token = rng.normal(size=value.shape).astype(np.float32) * 0.2 * value.std()
      value = np.concatenate([token, value], 1)
    out[f"layers.0.{name}"] = value
  out["layers.0.hidden_norm"] = out["layers.0.attn_norm"]
  out["layers.0.attn_norm"] = np.ones(D, np.float32)
  out["final_norm"] = np.asarray(sharding.fetch(tensors["final_norm"]), np.float32)
  return out
