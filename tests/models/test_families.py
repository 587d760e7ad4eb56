"""What the families add to a Llama, each against plain numpy: windows, biases, norms, scales,
activations, YaRN, experts."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.errors import UserError
from spec_jax.models import moe
from spec_jax.models.cache import init_cache
from spec_jax.models.config import RopeScaling
from spec_jax.models.decoder import embed_rows, rope_inverse_frequencies, rope_magnitude
from tests import families, tiny

LENGTH = 14  # beyond two windows


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def act(cfg, x):
  if cfg.activation == "silu":
    return x / (1 + np.exp(-x))
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def mlp(cfg, w, h):
  """Of one token; a mixture asks one expert after the other."""
  if not cfg.num_experts:
    return w("w_down") @ (act(cfg, w("w_gate") @ h) * (w("w_up") @ h))
  probs = softmax(w("router") @ h)
  best = np.argsort(-probs)[:cfg.experts_per_token]
  total = probs[best].sum() if cfg.norm_topk else 1.0
  return sum(
      probs[e] / total * (w("experts_down")[e] @ (
          act(cfg, w("experts_gate")[e] @ h) * (w("experts_up")[e] @ h))) for e in best)


def yarn(cfg):
  """Inverse frequencies channel by channel (2309.00071, equations 18 to 23)."""
  s, H = cfg.rope_scaling, cfg.head_dim
  out = []
  at = lambda turns: H * math.log(s.original_max_position / (turns * 2 * math.pi)) / (
      2 * math.log(cfg.rope_theta))
  low, high = max(math.floor(at(32)), 0), min(math.ceil(at(1)), H - 1)
  for d in range(H // 2):
    plain = cfg.rope_theta ** (-2 * d / H)
    ramp = min(max((d - low) / (high - low), 0), 1)
    out.append((1 - ramp) * plain + ramp * plain / s.factor)
  return np.array(out), 0.1 * math.log(s.factor) + 1


def frequencies(cfg, local):
  plain = lambda base: base ** (-np.arange(0, cfg.head_dim, 2) / cfg.head_dim)
  if local and cfg.rope_local_theta:
    return plain(cfg.rope_local_theta), 1.0
  if cfg.rope_scaling is None:
    return plain(cfg.rope_theta), 1.0
  if cfg.rope_scaling.kind == "yarn":
    return yarn(cfg)
  return plain(cfg.rope_theta) / cfg.rope_scaling.factor, 1.0


def reference(cfg, values, ids):
  """Logits of one sequence, position by position and head by head, in float64."""
  norm = lambda x, w: x / np.sqrt(np.mean(x * x, -1, keepdims=True) + cfg.rms_norm_eps) * w
  N, G, H = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim

  def turn(x, t, local):
    inv, magnitude = frequencies(cfg, local)
    c, s = np.cos(t * inv) * magnitude, np.sin(t * inv) * magnitude
    a, b = x[:, :H // 2], x[:, H // 2:]
    return np.concatenate([a * c - b * s, b * c + a * s], 1)

  past = [([], []) for _ in range(cfg.num_layers)]
  out = []
  for t, token in enumerate(ids):
    x = values["embed"][token].astype(np.float64) * cfg.embed_scale
    for i in range(cfg.num_layers):
      w = lambda name, i=i: values[f"layers.{i}.{name}"].astype(np.float64)
      local = bool(cfg.local_layers) and cfg.local_layers[i]
      h = norm(x, w("attn_norm"))
      q, k, v = (w(f"w{p}") @ h + (w(f"b{p}") if cfg.qkv_bias else 0.0) for p in "qkv")
      q, k, v = (part.reshape(-1, H) for part in (q, k, v))
      if cfg.qk_norm:
        q, k = norm(q, w("q_norm")), norm(k, w("k_norm"))
      past[i][0].append(turn(k, t, local))
      past[i][1].append(v)
      first = max(0, t + 1 - cfg.sliding_window) if local else 0
      q, k, v = turn(q, t, local), *(np.stack(part[first:]) for part in past[i])
      heads = [softmax(k[:, n * G // N] @ q[n] / np.sqrt(cfg.query_scalar or H))
               @ v[:, n * G // N] for n in range(N)]
      a = w("wo") @ np.concatenate(heads)
      x = x + (norm(a, w("attn_post_norm")) if cfg.sandwich_norms else a)
      a = mlp(cfg, w, norm(x, w("mlp_norm")))
      x = x + (norm(a, w("mlp_post_norm")) if cfg.sandwich_norms else a)
    head = values["embed"] if cfg.tie_embeddings else values["head"]
    out.append(head @ norm(x, values["final_norm"]))
  return np.stack(out)


@functools.cache
def made(family):
  cfg = families.config(family)
  values = families.tensors(cfg)
  module = tiny.make(cfg, values).module
  ids = np.random.default_rng(0).integers(0, tiny.VOCAB, LENGTH)
  return cfg, module, ids, reference(cfg, values, ids)


@pytest.mark.parametrize("family", families.CHANGES)
def test_logits_against_numpy(family):
  """One pass, pieces through the cache, and two texts packed into one row."""
  cfg, module, ids, wanted = made(family)
  tokens, places = jnp.asarray(ids[None]), jnp.arange(LENGTH)[None]
  whole, out = module(tokens, places, taps=(0, 1))
  np.testing.assert_allclose(whole[0], wanted, atol=2e-4)
  cache = init_cache(cfg, 1, LENGTH + 3, jnp.float32)
  for start, stop in ((0, 8), (8, 9), (9, LENGTH)):  # several tokens, one, and a verified block
    logits, piece = module(tokens[:, start:stop], places[:, start:stop], cache, taps=(0, 1))
    cache = piece.cache
    np.testing.assert_allclose(logits[0], wanted[start:stop], atol=2e-4)
    np.testing.assert_allclose(piece.features, out.features[:, start:stop], atol=2e-4)
  packed = jnp.concatenate([tokens[:, :3], tokens], 1)
  logits, _ = module(
      packed, jnp.concatenate([places[:, :3], places], 1),
      segments=jnp.asarray([[1] * 3 + [2] * LENGTH]))
  np.testing.assert_allclose(logits[0, 3:], wanted, atol=2e-4)


def test_a_window_ends_where_it_should():
  """Of two windowed layers, position t reads t - 2 (W - 1) and nothing before it."""
  cfg, module, ids, _ = made("mistral")
  reach = 2 * (families.WINDOW - 1)
  logits = lambda ids: np.asarray(module(jnp.asarray(ids[None]), jnp.arange(LENGTH)[None])[0][0])
  changed = ids.copy()
  changed[0] = (ids[0] + 1) % tiny.VOCAB
  moved = np.abs(logits(changed) - logits(ids)).max(-1)
  assert (moved[:reach + 1] > 1e-6).all() and (moved[reach + 1:] == 0).all()


def test_the_embedding_scale_is_rounded_to_the_dtype():
  table = jnp.ones((2, 3), jnp.bfloat16)
  scaled = embed_rows(table, jnp.asarray([1]), 3072**0.5)  # 55.4256, in bfloat16 55.5
  assert scaled.dtype == jnp.bfloat16 and (scaled == 55.5).all()


# YaRN.


def test_yarn_frequencies():
  """Fast channels are kept, slow ones divided by the factor, in order between them."""
  scaling = RopeScaling("yarn", 4.0, original_max_position=32768)
  cfg = tiny.config(head_dim=128, rope_theta=1e6, rope_scaling=scaling)  # as Qwen3
  wanted, magnitude = yarn(cfg)
  found = rope_inverse_frequencies(cfg)
  np.testing.assert_allclose(found, wanted, rtol=1e-6)
  assert rope_magnitude(cfg) == pytest.approx(magnitude) == pytest.approx(1.1386294)
  plain = rope_inverse_frequencies(dataclasses.replace(cfg, rope_scaling=None))
  ratio = plain / found
  np.testing.assert_allclose(ratio[[0, 20, 45, 63]], [1, 1, 4, 4], rtol=1e-6)
  assert (np.diff(ratio) > -1e-6).all() and 1.5 < ratio[32] < 3
  whole = dataclasses.replace(scaling, truncate=False, beta_fast=16.0, attention_factor=1.5)
  other = dataclasses.replace(cfg, rope_scaling=whole)
  assert rope_magnitude(other) == 1.5
  assert not np.allclose(rope_inverse_frequencies(other), found)


# Experts.


@pytest.mark.parametrize("norm_topk", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_every_path_through_the_experts_equals_a_loop(monkeypatch, tokens, norm_topk):
  E, K, F, D = 7, 2, 5, 6
  rng = np.random.default_rng(tokens)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  x, gate, up, down = draw(tokens, D), draw(E, F, D), draw(E, F, D), draw(E, D, F)
  logits = draw(tokens, E)
  weights, chosen = moe.route(jnp.asarray(logits), K, norm_topk)
  probs, wanted = softmax(logits.astype(np.float64)), np.zeros((tokens, D))
  for m in range(tokens):
    best = np.argsort(-probs[m])[:K]
    assert chosen[m].tolist() == best.tolist()
    for e in best:
      share = probs[m, e] / (probs[m, best].sum() if norm_topk else 1.0)
      h = gate[e] @ x[m]
      wanted[m] += share * (down[e] @ (h / (1 + np.exp(-h)) * (up[e] @ x[m])))
  args = (jnp.asarray(x), weights, chosen, *map(jnp.asarray, (gate, up, down)), jax.nn.silu)
  for path in (moe._gathered, moe._distinct, moe._in_turn, moe._grouped):
    np.testing.assert_allclose(path(*args), wanted, atol=1e-5, err_msg=path.__name__)
  used = []
  for name in ("_gathered", "_distinct", "_in_turn", "_grouped"):
    monkeypatch.setattr(moe, name, lambda *args, name=name: (used.append(name), args[0])[1])
  moe.experts(*args)
  monkeypatch.setattr(moe.jax, "default_backend", lambda: "tpu")
  moe.experts(*args)
  assert used == (["_distinct", "_gathered"] if tokens * K <= E else ["_in_turn", "_grouped"])


def test_experts_have_gradients_on_every_path():
  E, K, F, D, M = 3, 2, 4, 5, 6
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  arrays = (draw(M, D), draw(M, E), draw(E, F, D), draw(E, F, D), draw(E, D, F))

  def loss(path, x, logits, *matrices):
    return jnp.sum(jnp.sin(path(x, *moe.route(logits, K, True), *matrices, jax.nn.silu)))

  grads = [jax.grad(functools.partial(loss, path), argnums=range(5))(*arrays)
           for path in (moe._gathered, moe._distinct, moe._in_turn, moe._grouped)]
  for other in grads[1:]:
    for a, b in zip(grads[0], other, strict=True):
      assert np.abs(a).max() > 1e-3
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# The config.


def test_layers_taken_from_a_target_keep_their_kind():
  cfg = families.config("gemma3", num_layers=4, local_layers=(True, True, False, True))
  assert cfg.of_layers((3, 2)).local_layers == (True, False)
  assert cfg.of_layers((2,)) == dataclasses.replace(
      cfg, num_layers=1, local_layers=(), sliding_window=0)
  plain = cfg.plain(1)
  assert plain == tiny.config(
      num_layers=1, rope_theta=5000.0, rope_scaling=cfg.rope_scaling, tie_embeddings=True)
  with pytest.raises(UserError, match="local_layers names 4 layers, num_layers=2"):
    dataclasses.replace(cfg, num_layers=2)
  with pytest.raises(UserError, match=r"sliding_window=0 .* local layers \[0, 1, 3\]"):
    dataclasses.replace(cfg, sliding_window=0)
  with pytest.raises(UserError, match="activation='relu'"):
    dataclasses.replace(cfg, activation="relu")
  with pytest.raises(UserError, match="experts_per_token=7 is not in 1..num_experts=6"):
    families.config("qwen3_moe", experts_per_token=7)
