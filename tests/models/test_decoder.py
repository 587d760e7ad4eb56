"""The decoder against plain numpy, with and without a cache; rotary tables; attention paths."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models import attention
from spec_jax.models.cache import init_cache, insert_rows, write_rows
from spec_jax.models.config import DecoderConfig, RopeScaling
from spec_jax.models.decoder import linear, rope_inverse_frequencies, rotate
from tests import tiny


def reference(cfg, values, ids, inv):
  """Logits of one sequence, position by position, in float64 numpy."""
  norm = lambda x, w: x / np.sqrt(np.mean(x * x) + cfg.rms_norm_eps) * w
  silu = lambda x: x / (1 + np.exp(-x))
  half = len(inv)

  def turn(x, t):  # [heads, H]
    c, s = np.cos(t * inv), np.sin(t * inv)
    a, b = x[:, :half], x[:, half:2 * half]
    return np.concatenate([a * c - b * s, b * c + a * s, x[:, 2 * half:]], 1)

  past = [([], []) for _ in range(cfg.num_layers)]
  out = []
  for t, token in enumerate(ids):
    x = values["embed"][token].astype(np.float64)
    for i in range(cfg.num_layers):
      w = lambda name, i=i: values[f"layers.{i}.{name}"].astype(np.float64)
      h = norm(x, w("attn_norm"))
      q = turn((w("wq") @ h).reshape(cfg.num_heads, -1), t)
      past[i][0].append(turn((w("wk") @ h).reshape(cfg.num_kv_heads, -1), t))
      past[i][1].append((w("wv") @ h).reshape(cfg.num_kv_heads, -1))
      k, v = np.stack(past[i][0]), np.stack(past[i][1])
      heads = []
      for n in range(cfg.num_heads):
        g = n * cfg.num_kv_heads // cfg.num_heads
        scores = k[:, g] @ q[n] / np.sqrt(cfg.head_dim)
        probs = np.exp(scores - scores.max())
        heads.append(probs @ v[:, g] / probs.sum())
      x = x + w("wo") @ np.concatenate(heads)
      h = norm(x, w("mlp_norm"))
      x = x + w("w_down") @ (silu(w("w_gate") @ h) * (w("w_up") @ h))
    head = values["embed"] if cfg.tie_embeddings else values["head"]
    out.append(head @ norm(x, values["final_norm"]))
  return np.stack(out)


def model(**changes):
  cfg = tiny.config(**changes)
  values = tiny.tensors(cfg, seed=1)
  rng = np.random.default_rng(5)
  for name in values:
    if name.endswith("norm"):  # not one: a norm that is dropped or misplaced shows
      values[name] = rng.uniform(0.5, 1.5, values[name].shape).astype(np.float32)
  return cfg, values, tiny.make(cfg, values).module


@pytest.mark.parametrize("changes", [
    {}, {"tie_embeddings": True}, {"num_kv_heads": 1}, {"num_kv_heads": 4},
    {"partial_rotary_factor": 0.5}, {"rope_scaling": RopeScaling("linear", 4.0)},
    {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 16)}])
def test_logits_against_numpy(changes):
  cfg, values, module = model(**changes)
  ids = np.random.default_rng(0).integers(0, tiny.VOCAB, 12)
  inv = rope_inverse_frequencies(cfg).astype(np.float64)
  logits, _ = module(jnp.asarray(ids[None]), jnp.arange(12)[None])
  np.testing.assert_allclose(logits[0], reference(cfg, values, ids, inv), atol=1e-4)


def test_pieces_through_the_cache_equal_one_pass():
  """Ragged rows, pieces of several widths, and rejected tokens that are overwritten."""
  cfg, _, module = model()
  rng = np.random.default_rng(0)
  ids = jnp.asarray(rng.integers(0, tiny.VOCAB, (2, 20)))
  whole, _ = module(ids, jnp.broadcast_to(jnp.arange(20), (2, 20)))
  cache = init_cache(cfg, 2, 32, jnp.float32)
  at = np.array([0, 0])
  step = jax.jit(lambda ids, positions, cache: module(ids, positions, cache))
  for width in (5, 1, 4, 1, 4):
    positions = jnp.asarray(at[:, None] + np.arange(width))
    garbage = (jnp.take_along_axis(ids, positions, 1) + 7) % tiny.VOCAB
    _, out = step(garbage, positions, cache)  # a draft that is rejected
    logits, out = step(jnp.take_along_axis(ids, positions, 1), positions, out.cache)
    cache = out.cache
    for b in range(2):
      np.testing.assert_allclose(logits[b], whole[b, at[b]:at[b] + width], atol=1e-4)
    at = at + [width, max(1, width - 1)]  # the second row falls behind


def test_attend_length_reads_only_the_beginning():
  cfg, _, module = model()
  ids = jnp.asarray(np.random.default_rng(0).integers(0, tiny.VOCAB, (1, 8)))
  places = jnp.arange(8)[None]
  cache = jax.tree.map(lambda x: x + 100.0, init_cache(cfg, 1, 24, jnp.float32))
  a, _ = module(ids, places, cache, attend_length=8)
  b, _ = module(ids, places)
  np.testing.assert_allclose(a, b, atol=1e-4)


def test_features_are_the_outputs_of_the_tapped_layers():
  cfg, values, module = model()
  ids = jnp.asarray([[5, 9, 11]])
  out = module.hidden(ids, jnp.arange(3)[None], taps=(0, 1))
  assert out.features.shape == (1, 3, 64)
  shallow = tiny.make(
      dataclasses.replace(cfg, num_layers=1), values).module.hidden(
          ids, jnp.arange(3)[None], taps=(0,))
  np.testing.assert_allclose(out.features[..., :32], shallow.features, atol=1e-5)
  last = out.features[..., 32:]
  normed = last / jnp.sqrt(jnp.mean(last**2, -1, keepdims=True) + cfg.rms_norm_eps)
  np.testing.assert_allclose(out.hidden, normed * values["final_norm"], atol=1e-4)
  assert module.hidden(ids, jnp.arange(3)[None]).features.shape == (1, 3, 0)


def test_segments_do_not_see_each_other():
  _, _, module = model()
  a, b = jnp.asarray([[5, 9, 11]]), jnp.asarray([[7, 8]])
  packed, _ = module(
      jnp.concatenate([a, b], 1), jnp.asarray([[0, 1, 2, 0, 1]]),
      segments=jnp.asarray([[1, 1, 1, 2, 2]]))
  np.testing.assert_allclose(packed[:, :3], module(a, jnp.arange(3)[None])[0], atol=1e-5)
  np.testing.assert_allclose(packed[:, 3:], module(b, jnp.arange(2)[None])[0], atol=1e-5)


def test_ids_beyond_the_real_ones_are_impossible():
  _, _, module = model(vocab_real=50)
  logits, _ = module(jnp.asarray([[5, 9]]), jnp.arange(2)[None])
  assert (logits[..., 50:] == -jnp.inf).all() and jnp.isfinite(logits[..., :50]).all()


# Cache.


def test_write_rows_at_ragged_places():
  buffer = jnp.zeros((3, 1, 8, 2))
  new = jnp.arange(1, 13, dtype=jnp.float32).reshape(3, 1, 2, 2)
  out = write_rows(buffer, new, jnp.asarray([0, 3, 6]))
  for b, at in enumerate((0, 3, 6)):
    np.testing.assert_array_equal(out[b, :, at:at + 2], new[b])
    assert np.count_nonzero(out[b]) == 4


def test_insert_rows_drops_what_has_no_place():
  cfg = tiny.config()
  cache = init_cache(cfg, 4, 8, jnp.float32)
  part = jax.tree.map(lambda x: x + 1, init_cache(cfg, 3, 5, jnp.float32))
  out = insert_rows(cache, part, jnp.asarray([2, 4, 0]))
  for leaf in jax.tree.leaves(out):
    assert leaf[:, 0, :, 0].sum(1).tolist() == [5, 0, 5, 0]
    assert (leaf[2, :, :5] == 1).all() and (leaf[2, :, 5:] == 0).all()


# Attention.


@pytest.mark.parametrize("G", [1, 2, 4])
def test_both_attention_paths_agree(monkeypatch, G):
  rng = np.random.default_rng(G)
  make = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  q, k, v = make(2, 3, 4, 8), make(2, G, 10, 8), make(2, G, 10, 8)
  mask = jnp.arange(10) <= jnp.asarray([[2, 3, 4], [6, 7, 8]])[..., None]
  ours = attention.attend(q, k, v, mask)
  monkeypatch.setattr(attention.jax, "default_backend", lambda: "gpu")
  np.testing.assert_allclose(ours, attention.attend(q, k, v, mask), atol=1e-5)


def test_a_query_that_sees_nothing_gives_numbers():
  ones = jnp.ones((1, 2, 6, 4))
  out = attention.attend(jnp.ones((1, 1, 2, 4)), ones, ones, jnp.zeros((1, 1, 6), bool))
  assert jnp.isfinite(out).all()


# Linear.


def test_linear_gradients_match_a_plain_product():
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(3, 5, 8)), jnp.float32)
  w = jnp.asarray(rng.normal(size=(6, 8)), jnp.float32)
  f = lambda product: lambda x, w: jnp.sum(jnp.sin(product(x, w)))
  ours = jax.grad(f(linear), (0, 1))(x, w)
  theirs = jax.grad(f(lambda x, w: x @ w.T), (0, 1))(x, w)
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("rows,wide", [((64,), 32), ((5, 9), 70)])
def test_gradients_of_a_bfloat16_product(rows, wide):
  """Those of the float32 product of the same numbers, rounded once; of whole tiles and of parts."""
  rng = np.random.default_rng(0)
  x, w, g = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16).astype(jnp.float32)
             for shape in ((*rows, 24), (wide, 24), (*rows, wide)))
  grads = lambda x, w, product: jax.vjp(product, x, w)[1](g)
  narrow = jax.jit(lambda x, w: grads(x, w, linear))(x, w.astype(jnp.bfloat16))
  for ours, theirs in zip(narrow, grads(x, w, lambda x, w: x @ w.T), strict=True):
    np.testing.assert_allclose(ours.astype(jnp.float32), theirs, rtol=2**-7, atol=1e-5)


def test_keys_of_its_own_are_keys_like_the_others():
  """Shared and own keys one behind the other in plain attention, query by query; and gradients."""
  rng = np.random.default_rng(0)
  B, T, N, G, S, J, H = 2, 3, 4, 2, 5, 2, 8
  make = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  arrays = (make(B, T, N, H), make(B, G, S, H), make(B, G, S, H), make(B, T, G, J, H),
            make(B, T, G, J, H))
  mask = jnp.asarray(rng.random((B, T, S)) < 0.6).at[0, 0].set(False)  # one sees its own alone
  own_mask = jnp.asarray(rng.random((B, T, J)) < 0.7).at[0, 0, 0].set(True)

  def ours(q, k, v, own_k, own_v):
    return attention.attend_own(q, k, v, mask, own_k, own_v, own_mask)

  def plain(q, k, v, own_k, own_v):
    each = []
    for t in range(T):
      joined = [jnp.concatenate([a, b[:, t]], 2) for a, b in ((k, own_k), (v, own_v))]
      seen = jnp.concatenate([mask[:, t:t + 1], own_mask[:, t:t + 1]], -1)
      each.append(attention.attend(q[:, t:t + 1], *joined, seen))
    return jnp.concatenate(each, 1)

  outs, grads = zip(*(jax.jit(lambda *a, f=f: (f(*a), jax.grad(
      lambda *a: jnp.sum(jnp.sin(f(*a))), range(5))(*a)))(*arrays) for f in (ours, plain)),
      strict=True)
  np.testing.assert_allclose(*outs, atol=1e-6)
  for a, b in zip(*grads, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
    assert np.abs(a).max() > 0.01


def test_blocks_of_queries_see_what_all_together_see(monkeypatch):
  """Five queries in blocks of two, the last one alone; documents apart; with keys of their own."""
  rng = np.random.default_rng(1)
  B, T, N, G, J, H = 2, 5, 4, 2, 3, 8
  make = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  segments = jnp.asarray([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
  mask = jnp.tril(jnp.ones((T, T), bool)) & (segments[:, :, None] == segments[:, None])
  args = make(B, T, N, H), make(B, G, T, H), make(B, G, T, H), mask
  own = make(B, T, G, J, H), make(B, T, G, J, H), jnp.ones((B, T, J), bool)
  monkeypatch.setattr(attention, "_BLOCK", 2)
  for function, more in ((attention.attend, ()), (attention.attend_own, own)):
    np.testing.assert_allclose(
        attention.causal_blocks(function, *args, *more), function(*args, *more), atol=1e-6)


def test_a_single_bfloat16_row_equals_itself_in_a_batch():
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(4, 32)), jnp.bfloat16)
  w = jnp.asarray(rng.normal(size=(16, 32)), jnp.bfloat16)
  assert linear(x[:1], w).dtype == jnp.float32
  np.testing.assert_allclose(linear(x[:1], w)[0], linear(x, w)[0], atol=0.05)


# Rotary tables (CASE 13).


def test_llama3_frequencies_by_wavelength():
  """The three regimes of the rule, frequency by frequency."""
  scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
  cfg = tiny.config(head_dim=64, rope_theta=500000.0, rope_scaling=scaling)
  plain = rope_inverse_frequencies(dataclasses.replace(cfg, rope_scaling=None)).astype(np.float64)
  scaled = rope_inverse_frequencies(cfg).astype(np.float64)
  seen = set()
  for before, after in zip(plain, scaled, strict=True):
    wavelength = 2 * np.pi / before
    if wavelength < 8192 / 4:
      expected, kind = before, "kept"
    elif wavelength > 8192:
      expected, kind = before / 8, "divided"
    else:
      smooth = (8192 / wavelength - 1) / 3
      expected, kind = (1 - smooth) * before / 8 + smooth * before, "between"
    seen.add(kind)
    assert after == pytest.approx(expected, rel=1e-5)
  assert seen == {"kept", "divided", "between"}


@pytest.mark.parametrize("scaling", [
    None, RopeScaling("linear", 4.0), RopeScaling("llama3", 8.0, 1.0, 4.0, 64)])
def test_rope_settings_written_and_read_back(scaling):
  cfg = tiny.config(
      head_dim=32, rope_scaling=scaling, partial_rotary_factor=0.25, rope_theta=1234.5)
  again = DecoderConfig.from_hf(json.loads(json.dumps(cfg.to_hf())))
  assert again.rope_scaling == scaling and again.partial_rotary_factor == 0.25
  ours, theirs = rope_inverse_frequencies(cfg), rope_inverse_frequencies(again)
  assert len(ours) == 4  # a quarter of 32, in pairs
  x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 2, 32)), jnp.float32)
  at = np.array([[0, 100, 5000]])[..., None]
  tables = [(jnp.cos(at * f), jnp.sin(at * f)) for f in (ours, theirs)]
  a, b = (rotate(x, *table) for table in tables)
  np.testing.assert_array_equal(a, b)
  np.testing.assert_array_equal(a[..., 8:], x[..., 8:])  # the rest does not turn
  np.testing.assert_array_equal(a[:, 0], x[:, 0])
  assert not np.allclose(a[:, 1, :, :8], x[:, 1, :, :8])


def test_divisors_replace_the_scaling():
  cfg = tiny.config()
  table = np.array([1.0, 2.0, 4.0, 8.0])
  np.testing.assert_allclose(
      rope_inverse_frequencies(cfg, table), rope_inverse_frequencies(cfg) / table, rtol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_are_written_where_they_begin_and_nowhere_else(count):
  """Also one position at the very end of the buffer, which is written together with the one before
  it on CPU."""
  rng = np.random.default_rng(0)
  old = rng.normal(size=(3, 2, 7, 4)).astype(np.float32)
  new = rng.normal(size=(3, 2, count, 4)).astype(np.float32)
  for start in ([0, 3, 7 - count], [7 - count, 1, 0]):
    expected = old.copy()
    for row, at in enumerate(start):
      expected[row, :, at:at + count] = new[row]
    found = jax.jit(write_rows)(old, new, jnp.asarray(start))
    np.testing.assert_array_equal(found, expected)
