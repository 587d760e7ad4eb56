"""Drafters beside targets of every family: what they borrow, and what they copy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax
from spec_jax import drafters
from spec_jax.drafters import dflash
from spec_jax.target import canonical_tensors
from spec_jax.weights.safetensors import write_folder
from tests import families, tiny

PROMPTS = [[5, 9, 11, 33, 7, 8], [40, 6], [12, 50, 51, 4, 3, 22, 23, 41, 20]]
DEEP = {"num_layers": 8}


def decode(target, drafter, draft_len=4, tokens=16, **options):
  return spec_jax.generate(target, drafter, PROMPTS, draft_len=draft_len, max_new_tokens=tokens,
                           batch_size=len(PROMPTS), **options)


@pytest.mark.parametrize("family", families.CHANGES)
def test_a_copy_of_all_layers_proposes_the_targets_own_tokens(family, tmp_path):
  """Acceptance one, beyond the sliding window (CASE 12), also when saved and loaded again."""
  target = families.target(family)
  module = drafters.init_from_target(target, (0, 1))
  assert not hasattr(module, "embed")  # borrowed
  plain = decode(target, None)
  ours = decode(target, drafters.wrap("small_lm", "copy", module))
  assert ours.tokens == plain.tokens
  for row in ours.records:
    assert row.rounds and (row.accepted[:row.rounds - 1] == 4).all()
  drafters.save_drafter(tmp_path / "drafter", module, target)
  loaded = drafters.load_drafter(str(tmp_path / "drafter"), target)
  assert loaded.module.config == module.config == target.config
  again = decode(target, loaded)
  assert [r.accepted.tolist() for r in again.records] == [
      r.accepted.tolist() for r in ours.records]


def test_a_drafter_with_its_own_embedding_scales_it_itself(tmp_path):
  """A folder of the target itself, which shares nothing with it, drafts what the target says."""
  small = families.target("gemma3")
  tensors = {name: np.asarray(value) for name, value in canonical_tensors(small).items()}
  write_folder(tmp_path / "m", small.config, tensors, tiny.tokenizer())
  drafter = drafters.load_drafter(str(tmp_path / "m"), small)
  assert hasattr(drafter.module, "embed")
  for row in decode(small, drafter).records:
    assert row.rounds and (row.accepted[:row.rounds - 1] == 4).all()


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_rejected_draft_leaves_no_trace_beyond_the_window(family):
  """CASE 12: a window of eight, a prompt of six, thirty tokens, a drafter that is wrong at its
  second proposal."""
  target = families.target(family, sliding_window=8)
  plain = decode(target, None, tokens=30)
  ours = decode(target, tiny.scripted(PROMPTS, plain.tokens, [1, 1, 1]), tokens=30)
  assert ours.tokens == plain.tokens
  assert all((row.accepted[:row.rounds - 1] == 1).all() for row in ours.records)


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gemma3"])
def test_drafters_of_the_targets_states_have_llama_layers(family, kind):
  """What a family adds stays with the target; what such a layer has too is copied."""
  changes = DEEP | ({"local_layers": (True, False) * 4} if family == "gemma3" else {})
  target = families.target(family, **changes)
  module = drafters.init_learned(
      kind, target, (6,), num_taps=3, block_size=5, mask_id=63, steps=2)
  config = module.config
  assert config == target.config.plain(1) and config.architecture == "llama"
  assert config.embed_scale == 1.0 and not config.local_layers
  ours, theirs = module.own_tensors(), canonical_tensors(target)
  np.testing.assert_array_equal(ours["layers.0.wo"], theirs["layers.6.wo"])
  np.testing.assert_array_equal(ours["layers.0.mlp_norm"], theirs["layers.6.mlp_norm"])
  if kind == "dflash" and family != "qwen2":
    np.testing.assert_array_equal(ours["layers.0.q_norm"], theirs["layers.6.q_norm"])
  if family == "qwen3_moe":  # no dense MLP to copy: nothing is added, but gradients flow
    assert ours["layers.0.w_gate"].std() > 0.01 and not ours["layers.0.w_down"].any()
  if (family, kind) == ("gemma3", "eagle3"):
    plain = decode(target, None, tokens=8)
    assert decode(target, drafters.wrap(kind, kind, module), tokens=8).tokens == plain.tokens


def test_block_drafters_read_the_scaled_embedding():
  """The states of a block beside a Gemma equal those beside its unscaled twin."""
  target = families.target("gemma3", num_layers=8, local_layers=(True, False) * 4)
  scale = target.config.embed_scale
  values = {name: np.asarray(value) for name, value in canonical_tensors(target).items()}
  twin = tiny.make(
      dataclasses.replace(target.config, embed_scale=1.0, tie_embeddings=False),
      values | {"embed": values["embed"] * np.float32(scale), "head": values["embed"]})
  taps = dflash.dflash_taps(8, 3)
  module = drafters.init_learned("dflash", target, (6,), num_taps=3, block_size=5, mask_id=63)
  features = np.random.default_rng(0).normal(size=(1, 6, len(taps) * 32)).astype(np.float32)
  context = module.context(jnp.asarray(features), jnp.arange(6)[None])
  args = (jnp.asarray([[9]]), jnp.asarray([[6]]), 5, context, jnp.ones((1, 1, 6), bool))
  states = [np.asarray(module.block_states(*args, t.module)) for t in (target, twin)]
  np.testing.assert_allclose(*states, atol=1e-5)
