"""int8 weights: the step of quantisation, a scale for each channel, products, memory, decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import spec_jax
from spec_jax import drafters
from spec_jax.errors import UserError
from spec_jax.models import moe, quant
from spec_jax.models.decoder import Decoder, embed_rows, linear
from spec_jax.models.quant import Int8Weight
from spec_jax.target import from_module, held, is_int8
from spec_jax.weights.safetensors import write_folder
from tests import families, tiny
from tests.weights import toy

PROMPTS = [[5, 9, 11, 33, 7, 8], [40, 6], [12, 50, 51, 4, 3, 22, 23, 41, 20]]


def uneven(rows=12, columns=64, seed=0):
  """Rows whose sizes differ by a factor of a thousand, as those of real projections may."""
  rng = np.random.default_rng(seed)
  return (rng.normal(size=(rows, columns)) * np.geomspace(1e-3, 1, rows)[:, None]).astype(
      np.float32)


def in_int8(family, **changes):
  """A tiny target of a family with int8 weights, and the float32 target of the same tensors."""
  cfg = families.config(family, **changes)
  values = families.tensors(cfg)
  module = Decoder(cfg, lambda name: held(name, values[name], "int8w", cfg.tie_embeddings))
  return (from_module(module, tokenizer=tiny.tokenizer(), dtype="int8w"),
          tiny.make(cfg, values, tiny.tokenizer()))


# The step.


def test_every_weight_is_within_half_a_step_of_its_own_row():
  """A scale for the whole matrix would be a thousand times too coarse for the first row."""
  w = uneven()
  w[3] = 0.0
  found = quant.quantised(w)
  step = np.abs(w).max(-1, keepdims=True) / 127
  assert (np.abs(np.asarray(found) - w) <= 0.5001 * step).all()
  assert found.values.dtype == jnp.int8 and np.abs(found.values).max() == 127
  assert found.scale.shape == (12,) and found.scale[3] == 1 and not found.values[3].any()
  np.testing.assert_array_equal(  # the largest of a row is exact, whatever the other rows are
      np.abs(found.values).max(-1)[[0, -1]], [127, 127])


def test_a_matrix_may_be_quantised_in_parts():
  w = uneven()
  values, scale = quant.quantise(w)
  parts = [quant.quantise(part) for part in (w[:5], w[5:])]
  np.testing.assert_array_equal(values, np.concatenate([v for v, _ in parts]))
  np.testing.assert_array_equal(scale, np.concatenate([s for _, s in parts]))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_product_is_off_by_no_more_than_its_steps(rows):
  """|x (w - w')| <= sum |x| scale / 2, and rounding x to 8 bits adds 2**-9 of sum |x| |w'|."""
  w = uneven(seed=1)
  x = np.random.default_rng(2).normal(size=(rows, 64)).astype(np.float32)
  found = quant.quantised(w)
  out = np.asarray(jax.jit(linear)(jnp.asarray(x), found), np.float64)
  size = np.abs(x).astype(np.float64)
  bound = (size.sum(-1)[:, None] * np.asarray(found.scale) / 2
           + 2.0**-8.5 * size @ np.abs(np.asarray(found, np.float64)).T)
  gap = np.abs(out - x.astype(np.float64) @ w.astype(np.float64).T)
  assert out.shape == (rows, 12) and (gap <= bound).all()
  # Relative to their own size small rows are as exact as large ones.
  assert (gap < 0.005 * np.linalg.norm(x, axis=-1)[:, None] * np.linalg.norm(w, axis=-1)).all()


def test_the_gradient_passes_through_to_the_activations():
  w, x = uneven(), jnp.ones((2, 64))
  found = quant.quantised(w)
  grad = jax.grad(lambda x: jnp.sum(linear(x, found) * jnp.arange(12.0)))(x)
  wanted = np.arange(12.0) @ np.asarray(found, np.float64)
  np.testing.assert_allclose(grad[0], wanted, rtol=0.02, atol=0.02 * np.abs(wanted).max())


def test_rows_of_an_embedding():
  table = quant.quantised(uneven())
  ids = jnp.asarray([[11, 0], [4, 4]])
  found = embed_rows(table, ids, 3.0)
  assert found.dtype == jnp.bfloat16 and found.shape == (2, 2, 64)
  wanted = np.asarray(table)[np.asarray(ids)] * 3.0
  np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=2.0**-7)


def test_every_path_through_int8_experts():
  E, K, F, D, M = 7, 2, 5, 6, 9
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  # Each expert of its own size: a scale of another expert, or of all, would show.
  weights = [quant.quantised(draw(*shape) * np.geomspace(0.01, 1, E)[:, None, None])
             for shape in ((E, F, D), (E, F, D), (E, D, F))]
  x = draw(M, D)
  share, chosen = moe.route(jnp.asarray(draw(M, E)), K, True)
  floats = [jnp.asarray(w) for w in weights]
  wanted = moe._in_turn(jnp.asarray(x), share, chosen, *floats, jax.nn.silu)
  for path in (moe._gathered, moe._distinct, moe._in_turn, moe._grouped):
    found = path(jnp.asarray(x, quant.COMPUTE), share, chosen, *weights, jax.nn.silu)
    np.testing.assert_allclose(
        found, wanted, atol=0.02 * np.abs(wanted).max(), err_msg=path.__name__)


# A model.


def test_what_is_held_as_int8():
  shapes = lambda target: {
      jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(
          target.params, is_leaf=lambda x: isinstance(x, Int8Weight))}
  tied, _ = in_int8("gemma3")
  floats = [name for name, leaf in shapes(tied).items() if not isinstance(leaf, Int8Weight)]
  assert floats and all("norm" in name for name in floats)
  mixture, _ = in_int8("qwen3_moe")
  kept = [name for name, leaf in shapes(mixture).items()
          if leaf.ndim > 1 and not isinstance(leaf, Int8Weight)]
  assert len(kept) == 3 and sum("router" in name for name in kept) == 2  # and the embedding
  assert mixture.module.embed[...].dtype == jnp.bfloat16
  assert is_int8("layers.3.experts_up", 3, "int8w") and not is_int8("layers.3.bq", 1, "int8w")
  with pytest.raises(UserError, match="dtype='int4w' is not supported .*int8w"):
    spec_jax.load_target("demo", dtype="int4w")


@pytest.mark.parametrize("family", families.CHANGES)
def test_logits_are_near(family):
  """A row of n normal weights has its largest at about 3 deviations, so its step is 3/127 of them
  and the error, evenly spread over a step, 3 / (127 sqrt(12)) = 0.7 % of each product. Rounding to
  8 bits adds 0.2 %. Fewer than 20 products follow each other in two layers, and independent errors
  add in squares: 0.73 % * sqrt(20) = 3.3 % of the logits' spread, here with a factor of 3."""
  target, plain = in_int8(family)
  ids = jnp.asarray(np.random.default_rng(0).integers(3, tiny.VOCAB, (1, 14)))
  run = jax.jit(lambda module, ids: module(ids, jnp.arange(14)[None])[0][0])
  ours, theirs = (np.asarray(run(t.module, ids)) for t in (target, plain))
  error = np.sqrt(np.mean((ours - theirs) ** 2)) / theirs.std()
  assert 1e-3 < error < 0.1, error


def folder(tmp_path, **changes):
  cfg = tiny.config(
      vocab_size=len(toy.vocabulary()), hidden_size=128, intermediate_size=256, head_dim=32,
      bos_id=0, eos_ids=(2,), **changes)
  values = tiny.tensors(cfg)
  write_folder(tmp_path / "m", cfg, values, toy.tokenizer())
  toy.write_gguf(tmp_path / "m.gguf", cfg, values)
  return cfg, values


def test_any_source_and_half_the_memory(tmp_path):
  cfg, values = folder(tmp_path, tie_embeddings=True)
  size = lambda target: sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
  ours, from_gguf = (
      spec_jax.load_target(str(tmp_path / name), "int8w") for name in ("m", "m.gguf"))
  low = spec_jax.load_target(str(tmp_path / "m"), "bfloat16")
  for a, b in zip(*(jax.tree.leaves(t.params) for t in (ours, from_gguf)), strict=True):
    np.testing.assert_array_equal(a, b)
  wanted = quant.quantised(values["layers.1.w_down"])
  found = ours.module.stack.layers[1].w_down[...]
  np.testing.assert_array_equal(found.values, wanted.values)
  np.testing.assert_array_equal(found.scale, wanted.scale)
  # A byte for two, four more for a row, and norms in float32 on both sides.
  assert 0.5 < size(ours) / size(low) < 0.5 + 2 / 128 + 0.01


# Decoding.


@functools.cache
def pair(family):
  return in_int8(family)[0]


def decode(target, drafter, **options):
  return spec_jax.generate(target, drafter, PROMPTS, draft_len=4, max_new_tokens=16,
                           batch_size=len(PROMPTS), **options)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_speculation_changes_nothing(family):
  """Against the same executable with every draft refused, bit for bit; drafts by the target itself
  are all accepted, so they come from the very same weights."""
  target = pair(family)
  own = drafters.load_drafter("self", target)
  ours, plain = decode(target, own), decode(target, own, force_reject=True)
  assert ours.tokens == plain.tokens
  for row in ours.records:
    assert row.rounds and (row.accepted[:row.rounds - 1] == 4).all()
  theirs = target.module.stack.layers[0].wq[...]
  assert own.module.stack.layers[0].wq[...].values is theirs.values  # not copied
  with pytest.raises(UserError, match="the target's dtype int8w, not bfloat16"):
    drafters.load_drafter("self", target, "bfloat16")


def test_a_drafter_in_int8(tmp_path):
  """Saved, or any small model: its matrices are int8, beside a float target too."""
  cfg, values = folder(tmp_path, tie_embeddings=True)
  target = spec_jax.load_target(str(tmp_path / "m"), "bfloat16")
  saved = drafters.init_from_target(target, (0,), draft_ids=np.arange(0, 128))
  drafters.save_drafter(tmp_path / "saved", saved, target)
  for source in ("saved", "m.gguf"):
    drafter = drafters.load_drafter(str(tmp_path / source), target, "int8w")
    module = drafter.module
    for weight in (module.stack.layers[0].w_up[...], module.head[...]):
      assert isinstance(weight, Int8Weight)
    np.testing.assert_array_equal(
        module.stack.layers[0].wk[...].values,
        quant.quantised(np.asarray(target.module.stack.layers[0].wk[...], np.float32)
                        if source == "saved" else values["layers.0.wk"]).values)
    ours, plain = decode(target, drafter), decode(target, drafter, force_reject=True)
    assert ours.tokens == plain.tokens
    accepted = sum(int(row.accepted.sum()) for row in ours.records)
    assert accepted > (20 if source == "m.gguf" else -1)
  assert module.embed[...].values is module.head[...].values  # tied: one array
  float_drafter = drafters.load_drafter(str(tmp_path / "saved"), target, "float32")
  assert float_drafter.module.head[...].dtype == jnp.float32


def test_what_an_int8_target_lends(tmp_path):
  """Its own head where the drafter computes in bfloat16 too, floats of it otherwise."""
  target = pair("qwen2")
  low = drafters.init_from_target(target, (0,), dtype="bfloat16")
  assert not hasattr(low, "head")
  assert isinstance(low.head_weight(target.module), Int8Weight)
  assert low.stack.layers[0].wq[...].dtype == jnp.bfloat16
  high = drafters.init_from_target(target, (0,), dtype="float32")
  np.testing.assert_array_equal(high.head[...], np.asarray(target.module.head_weight()))
  few = drafters.init_from_target(target, (0,), draft_ids=np.asarray([7, 3, 40]))
  np.testing.assert_array_equal(
      few.head[...].values, target.module.head_weight().values[jnp.asarray([7, 3, 40])])


def test_no_floating_copy_is_held_beside_the_weights():
  """In a loop XLA:CPU would convert all matrices once, ahead of it, and hold both."""
  target, _ = in_int8("llama_yarn", hidden_size=256, intermediate_size=512, tie_embeddings=True)
  ids = jnp.zeros((1, 3), jnp.int32)

  leaves, tree = jax.tree.flatten(target.params)

  @jax.jit
  def steps(leaves, ids):
    module = nnx.merge(target.graph, jax.tree.unflatten(tree, leaves))
    step = lambda _, x: jnp.argmax(module(x, jnp.arange(3)[None])[0], -1)
    return jax.lax.fori_loop(0, 4, step, ids)

  size = sum(leaf.nbytes for leaf in leaves)
  held = steps.lower(leaves, ids).compile().memory_analysis().temp_size_in_bytes
  assert held < 0.6 * size < 2**20  # a piece and some activations; all copies would be 2 * size
  assert [quant.pieces(shape) for shape in ((96, 8), (49152, 576), (7, 8), (97, 8))] == [
      2, 16, 7, 1]
