"""The forms of servers: what is written for each, read back, and what each one refuses."""

import dataclasses

import numpy as np
import pytest
import safetensors.numpy

import spec_jax
from spec_jax import drafters
from spec_jax.drafters import eagle3
from spec_jax.errors import UserError
from spec_jax.weights import forms, published
from spec_jax.weights.forms import Form
from tests import families, tiny
from tests.weights.test_published import (
  KINDS,
  LAYERS,
  MASK,
  OPTIONS,
  RANK,
  REDUCED,
  build,
  config,
  fields_of,
  filled,
  target,
  tensors_of,
)


@pytest.mark.parametrize("name", forms.NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_of_a_reduced_drafter(tmp_path, kind, name):
  module = build(kind, True)
  published.write_published(tmp_path, module, target(), form=Form(name, "org/name", 3))
  found = spec_jax.load_drafter(str(tmp_path), target()).module
  keeps = forms.keeps_vocabulary(kind, name)
  assert keeps == (kind == "eagle3" or name in ("vllm", "speculators"))
  assert hasattr(found, "draft_ids") == keeps and not found.own_head
  if keeps:
    np.testing.assert_array_equal(found.draft_ids[...], REDUCED)
  for key, value in module.own_tensors().items():
    ours = found.own_tensors()[key]
    if key == "markov_w2" and not keeps:
      assert not np.delete(ours, REDUCED, 0).any()
      ours = ours[REDUCED]
    np.testing.assert_array_equal(ours, value, err_msg=key)
  assert found.config == module.config and found.options() == module.options()


def test_ids_of_a_block_drafter_are_written_ascending(tmp_path):
  """With its rows of the head and of markov_w2, which a trainer takes by the mask t2d."""
  order = np.random.default_rng(0).permutation(len(REDUCED))
  module = build("dspark", True)
  tensors = drafters.own_tensors(module)
  tensors["markov_w2"] = np.asarray(tensors["markov_w2"])[order]
  mixed = drafters.build("dspark", target(), tensors, module.config, module.options(),
                         draft_ids=REDUCED[order])
  published.write_published(tmp_path, mixed, target(), form=Form("vllm"))
  found = spec_jax.load_drafter(str(tmp_path), target()).module
  np.testing.assert_array_equal(found.draft_ids[...], REDUCED)
  np.testing.assert_array_equal(found.markov_w2[...], module.markov_w2[...])
  np.testing.assert_array_equal(tensors_of(tmp_path)["lm_head.weight"],
                                np.asarray(target().module.head_weight())[REDUCED])


def test_config_of_speculators(tmp_path):
  for kind in KINDS:
    published.write_published(
        tmp_path / kind, build(kind, True), target(), form=Form("speculators", "org/name", 3))
  one, two, three = (fields_of(tmp_path / kind) for kind in KINDS)
  for kind, fields in zip(KINDS, (one, two, three), strict=True):
    assert fields["speculators_model_type"] == kind and fields["draft_vocab_size"] == len(REDUCED)
    method = fields["speculators_config"]
    assert method["algorithm"] == kind and method["default_proposal_method"] == "greedy"
    assert method["proposal_methods"] == [{
        "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1,
        "accept_tolerance": 0.0}]
    assert method["verifier"] == {
        "name_or_path": "org/name", "architectures": ["LlamaForCausalLM"]}
    layers = fields["transformer_layer_config"]
    assert layers["vocab_size"] == tiny.VOCAB and layers["head_dim"] == 8
    assert layers["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
  # Layers are counted from one: 0-based outputs of OPTIONS.
  assert one["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
  assert two["aux_hidden_state_layer_ids"] == [2, 3, 6]
  assert three["aux_hidden_state_layer_ids"] == [1, 4, 7]
  assert [OPTIONS[kind]["taps"] for kind in KINDS] == [(1, 3, 4), (1, 2, 5), (0, 3, 6)]
  assert one["transformer_layer_config"]["model_type"] == "llama"
  assert two["transformer_layer_config"]["model_type"] == "qwen3"
  assert (two["block_size"], two["mask_token_id"], two["sample_from_anchor"]) == (5, MASK, False)
  assert (three["markov_rank"], three["sample_from_anchor"]) == (RANK, True)
  assert one["norm_before_residual"] is False  # vLLM takes an absent one for true


def test_dspark_of_the_servers(tmp_path):
  """The method at the top level; SGLang's draft model owns embedding and head."""
  for name in ("vllm", "sglang"):
    published.write_published(tmp_path / name, build("dspark"), target(), form=Form(name))
    fields = fields_of(tmp_path / name)
    assert fields["architectures"] == ["Qwen3DSparkModel"] and "dflash_config" not in fields
    assert fields.items() >= {
        "block_size": 4, "mask_token_id": MASK - 1, "target_layer_ids": [0, 3, 6],
        "markov_rank": RANK, "enable_confidence_head": True, "confidence_head_with_markov": True,
        "num_target_layers": LAYERS, "head_dim": 8}.items()
  stored = tensors_of(tmp_path / "sglang")
  np.testing.assert_array_equal(stored["embed_tokens.weight"], target().module.embed[...])
  np.testing.assert_array_equal(stored["lm_head.weight"], target().module.head_weight())
  assert not {"embed_tokens.weight", "lm_head.weight"} & set(tensors_of(tmp_path / "vllm"))


def odd_eagle3(**changes):
  """An EAGLE-3 of other trainers: normed residual stream, or norms of queries and keys."""
  normed = changes.pop("norm_before_residual", False)
  cfg = dataclasses.replace(config(), num_layers=1, **changes)
  options = OPTIONS["eagle3"] | {"norm_before_residual": normed}
  return drafters.build(
      "eagle3", target(), filled(eagle3.tensor_shapes(cfg, options["taps"])), cfg, options)


@pytest.mark.parametrize("changes, holds, match", [
    (dict(norm_before_residual=True), ("vllm", "speculators"), "norm_before_residual=True"),
    (dict(qk_norm=True), ("speculators",), "qk_norm=True")])
def test_what_a_form_cannot_hold_is_refused_by_name(tmp_path, changes, holds, match):
  module = odd_eagle3(**changes)
  for name in forms.NAMES:
    write = lambda name=name: published.write_published(
        tmp_path / name, module, target(), form=Form(name))
    if name in holds:
      write()
      found = spec_jax.load_drafter(str(tmp_path / name), target()).module
      assert found.options() == module.options() and found.config == module.config
      assert set(found.own_tensors()) == set(module.own_tensors())
    else:
      with pytest.raises(UserError, match=f"form '{name}' of eagle3 has no place for .*{match}"):
        write()
      assert not (tmp_path / name).exists()


def test_servers_take_the_raw_embedding(tmp_path):
  gemma = families.target("gemma3", num_layers=8, local_layers=(True, False) * 4)
  module = build("dflash", cfg=gemma.config.plain(2), to=gemma)
  for name in ("vllm", "sglang", "speculators"):
    with pytest.raises(UserError, match="no place for input_embedding_scale=5.65685"):
      published.write_published(tmp_path, module, gemma, form=Form(name))


def test_a_small_model_has_no_form_of_speculators():
  with pytest.raises(UserError, match="form 'speculators' of small_lm"):
    forms.refuse(tiny.weak_drafter().module, tiny.target(), "speculators")
  with pytest.raises(UserError, match="format='onnx' must be one of hf, sglang, vllm, specul"):
    Form("onnx")


def test_a_trained_head_of_a_block_drafter_is_its_own(tmp_path):
  """Copies that differ by more than rounding are kept; see test_published for far ones."""
  published.write_published(tmp_path, build("dspark"), target(), form=Form("sglang"))
  rows = np.asarray(target().module.head_weight())
  for noise, own in ((0.0, False), (0.05, True)):
    values = tensors_of(tmp_path)
    values["lm_head.weight"] = (rows * (1 + noise)).astype(np.float32)
    safetensors.numpy.save_file(values, tmp_path / "model.safetensors")
    module = spec_jax.load_drafter(str(tmp_path), target()).module
    assert module.own_head == own
    if own:  # and stays with it
      with pytest.raises(UserError, match="form .hf. of dspark has no place for a head of"):
        published.write_published(tmp_path / "again", module, target())
      published.write_published(tmp_path / "again", module, target(), form=Form("vllm"))
      again = spec_jax.load_drafter(str(tmp_path / "again"), target()).module
      np.testing.assert_array_equal(again.head[...], module.head[...])
    np.testing.assert_allclose(module.head_weight(target().module), values["lm_head.weight"])
