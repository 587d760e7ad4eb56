"""Folders and GGUF files of every family: published configs, names, both ways, refusals."""

import dataclasses
import json

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from spec_jax.errors import UserError
from spec_jax.models.config import DecoderConfig, RopeScaling
from spec_jax.models.decoder import Decoder
from spec_jax.weights import names, open_checkpoint
from spec_jax.weights.safetensors import write_folder
from tests import families, tiny
from tests.weights import toy

# What config.json of a published model says, without the fields that every family has.
PUBLISHED = {
    "Mistral-7B-v0.1": dict(
        architectures=["MistralForCausalLM"], model_type="mistral", hidden_size=4096,
        intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, rope_theta=10000.0, sliding_window=4096, vocab_size=32000,
        max_position_embeddings=32768, tie_word_embeddings=False),
    "Mistral-7B-v0.3": dict(
        architectures=["MistralForCausalLM"], model_type="mistral", hidden_size=4096,
        intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, rope_theta=1000000.0, sliding_window=None, vocab_size=32768,
        max_position_embeddings=32768, tie_word_embeddings=False),
    "Qwen2.5-0.5B": dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=896,
        intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, rope_theta=1000000.0, sliding_window=32768, max_window_layers=24,
        use_sliding_window=False, use_mrope=False, vocab_size=151936,
        max_position_embeddings=32768, tie_word_embeddings=True),
    "Qwen3-0.6B": dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=1024, head_dim=128,
        intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, rope_theta=1000000, rope_scaling=None, sliding_window=None,
        max_window_layers=28, use_sliding_window=False, attention_bias=False, vocab_size=151936,
        max_position_embeddings=40960, tie_word_embeddings=True),
    "Qwen3-30B-A3B": dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=2048,
        head_dim=128, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, rope_theta=1000000.0, rope_scaling=None, sliding_window=None,
        use_sliding_window=False, attention_bias=False, decoder_sparse_step=1, mlp_only_layers=[],
        moe_intermediate_size=768, norm_topk_prob=True, num_experts=128, num_experts_per_tok=8,
        output_router_logits=False, router_aux_loss_coef=0.001, vocab_size=151936,
        max_position_embeddings=40960, tie_word_embeddings=False),
    "gemma-3-270m": dict(  # says nothing about the head, which is tied
        architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", hidden_size=640,
        head_dim=256, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, rope_theta=1000000.0, rope_local_base_freq=10000.0,
        rope_scaling=None, sliding_window=512, _sliding_window_pattern=6,
        layer_types=([*["sliding_attention"] * 5, "full_attention"] * 3), attention_bias=False,
        attn_logit_softcapping=None, final_logit_softcapping=None, query_pre_attn_scalar=256,
        hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=False,
        vocab_size=262144, max_position_embeddings=32768),
    "gemma-3-1b-it": dict(  # an early one: a pattern in place of a list
        architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", hidden_size=1152,
        head_dim=256, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4,
        num_key_value_heads=1, rope_theta=1000000, rope_local_base_freq=10000, rope_scaling=None,
        sliding_window=512, sliding_window_pattern=6, attention_bias=False,
        attn_logit_softcapping=None, final_logit_softcapping=None, query_pre_attn_scalar=256,
        hidden_activation="gelu_pytorch_tanh", vocab_size=262144, max_position_embeddings=32768),
}


def published(name, **changes):
  common = {"bos_token_id": 2, "eos_token_id": [1, 106], "hidden_act": "silu", "use_cache": True,
            "rms_norm_eps": 1e-6, "attention_dropout": 0.0, "initializer_range": 0.02,
            "torch_dtype": "bfloat16"}
  if name.startswith("gemma"):
    del common["hidden_act"]
  return common | PUBLISHED[name] | changes


def test_published_configs():
  read = {name: DecoderConfig.from_hf(published(name)) for name in PUBLISHED}
  old, new = read["Mistral-7B-v0.1"], read["Mistral-7B-v0.3"]
  assert old.sliding_window == 4096 and old.local_layers == (True,) * 32 and old.head_dim == 128
  assert new.sliding_window == 0 and new.local_layers == () and new.rope_theta == 1e6
  qwen2 = read["Qwen2.5-0.5B"]
  assert qwen2.qkv_bias and not qwen2.qk_norm and qwen2.tie_embeddings
  assert qwen2.sliding_window == 0 and qwen2.head_dim == 64
  qwen3 = read["Qwen3-0.6B"]
  assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_dim == 128 != 1024 // 16
  moe = read["Qwen3-30B-A3B"]
  assert (moe.num_experts, moe.experts_per_token, moe.expert_size, moe.norm_topk) == (
      128, 8, 768, True)
  for gemma, layers in ((read["gemma-3-270m"], 18), (read["gemma-3-1b-it"], 26)):
    assert gemma.local_layers == tuple((i + 1) % 6 != 0 for i in range(layers))
    assert gemma.sliding_window == 512 and gemma.query_scalar == 256 and gemma.sandwich_norms
    assert (gemma.rope_theta, gemma.rope_local_theta) == (1e6, 1e4) and gemma.tie_embeddings
    assert gemma.embed_scale == gemma.hidden_size**0.5 and gemma.activation == "gelu_tanh"
  for name, config in read.items():
    assert DecoderConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config, name


def test_what_is_left_unsaid_means_what_the_family_says():
  bare = published("Mistral-7B-v0.1")
  del bare["sliding_window"]
  assert DecoderConfig.from_hf(bare).sliding_window == 4096
  bare = published("Qwen3-0.6B")
  del bare["head_dim"]
  assert DecoderConfig.from_hf(bare).head_dim == 128
  windowed = published("Qwen2.5-0.5B", use_sliding_window=True, max_window_layers=20)
  config = DecoderConfig.from_hf(windowed)
  assert config.local_layers == (False,) * 20 + (True,) * 4 and config.sliding_window == 32768
  moe = published("Qwen3-30B-A3B", num_local_experts=64)  # as transformers 5 writes it
  del moe["num_experts"]
  assert DecoderConfig.from_hf(moe).num_experts == 64


@pytest.mark.parametrize("rope, wanted", [
    ({"type": "linear", "factor": 8.0}, RopeScaling("linear", 8.0)),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
     RopeScaling("yarn", 4.0, original_max_position=32768)),
    ({"rope_type": "yarn", "factor": 4.0},
     RopeScaling("yarn", 4.0, original_max_position=40960)),
    ({"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
      "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16},
     RopeScaling("yarn", 40.0, original_max_position=4096, beta_fast=16.0, attention_factor=1.0)),
])
def test_rope_scaling_is_read_and_written(rope, wanted):
  config = DecoderConfig.from_hf(published("Qwen3-0.6B", rope_scaling=rope))
  assert config.rope_scaling == wanted
  assert DecoderConfig.from_hf(config.to_hf()) == config
  both = {"rope_parameters": rope | {"rope_theta": 5.0}, "rope_scaling": None}
  assert DecoderConfig.from_hf(published("Qwen3-0.6B", **both)) == dataclasses.replace(
      config, rope_theta=5.0)


def test_the_rope_of_gemma_by_kind_of_layer():
  rope = {"full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
          "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
  config = DecoderConfig.from_hf(published("gemma-3-270m", rope_parameters=rope))
  assert config.rope_scaling == RopeScaling("linear", 8.0)
  assert (config.rope_theta, config.rope_local_theta) == (5e5, 300.0)
  rope["sliding_attention"]["rope_type"] = "linear"
  with pytest.raises(UserError, match="rope_parameters.sliding_attention.rope_type='linear'"):
    DecoderConfig.from_hf(published("gemma-3-270m", rope_parameters=rope))


@pytest.mark.parametrize("name, changes, match", [
    ("gemma-3-270m", dict(final_logit_softcapping=30.0), "final_logit_softcapping=30.0"),
    ("gemma-3-270m", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0"),
    ("gemma-3-270m", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True"),
    ("gemma-3-270m", dict(hidden_activation="gelu"), "hidden_activation='gelu'"),
    ("gemma-3-270m", dict(architectures=["Gemma3nForConditionalGeneration"]),
     "architectures='Gemma3nForConditionalGeneration' is not supported.*Gemma3ForCausalLM"),
    ("gemma-3-270m", dict(architectures=["Gemma3ForConditionalGeneration"]),
     "text_config=None must be an object"),
    ("gemma-3-270m", dict(layer_types=["full_attention"] * 5), "num_hidden_layers=18"),
    ("gemma-3-270m", dict(layer_types=["chunked_attention"] * 18), "chunked_attention"),
    ("Qwen3-30B-A3B", dict(decoder_sparse_step=2), "decoder_sparse_step=2"),
    ("Qwen3-30B-A3B", dict(mlp_only_layers=[0]), r"mlp_only_layers=\[0\]"),
    ("Qwen3-30B-A3B", dict(use_sliding_window=True), "use_sliding_window=True"),
    ("Qwen3-30B-A3B", dict(num_local_experts=64), "num_experts=128 and num_local_experts=64"),
    ("Qwen3-0.6B", dict(attention_bias=True), "attention_bias=True"),
    ("Qwen3-0.6B", dict(layer_types=["sliding_attention"] * 28),
     "sliding_window=None with use_sliding_window=False"),
    ("Qwen3-0.6B", dict(rope_scaling={"rope_type": "longrope", "factor": 2.0}), "'longrope'"),
    ("Qwen3-0.6B", dict(rope_scaling={"type": "default", "mrope_section": [16, 24, 24]}),
     "mrope_section"),
    ("Qwen2.5-0.5B", dict(use_mrope=True), "use_mrope=True"),
    ("Qwen2.5-0.5B", dict(hidden_act="gelu"), "hidden_act='gelu'"),
    ("Qwen2.5-0.5B", dict(quantization_config={"bits": 4}), "quantization_config"),
    ("Mistral-7B-v0.1", dict(layer_types=["full_attention"]), "layer_types"),
])
def test_what_is_not_supported_is_named(name, changes, match):
  with pytest.raises(UserError, match=match):
    DecoderConfig.from_hf(published(name, **changes))


def test_names_are_those_of_the_gguf_package():
  """Its converter's own table, from Hugging Face names, says the same."""
  kinds = gguf.MODEL_ARCH
  for family, arch in (("llama", kinds.LLAMA), ("qwen2", kinds.QWEN2), ("qwen3", kinds.QWEN3),
                       ("qwen3_moe", kinds.QWEN3MOE), ("gemma3", kinds.GEMMA3)):
    table = gguf.get_tensor_name_map(arch, 1)
    ours, hf = names.GGUF_NAMES[family], names.HF_NAMES[family]
    assert set(hf) | {"rope_freqs"} == set(ours) | {"rope_freqs"}
    for canonical, stored in hf.items():
      # The converter stacks the experts of a layer under a name without their numbers.
      stem, dot, end = stored.replace("{i}", "0").replace(".{e}", "").rpartition(".")
      assert table.get_name(stem) + dot + end == ours[canonical].replace("{i}", "0"), canonical


# Files.


def logits(checkpoint):
  model = Decoder(checkpoint.config, lambda name: jnp.asarray(checkpoint.read(name)))
  ids = np.random.default_rng(1).integers(3, tiny.VOCAB, (1, 12))
  return np.asarray(model(jnp.asarray(ids), jnp.arange(12)[None])[0])


@pytest.mark.parametrize("family", families.CHANGES)
def test_a_folder_and_back(tmp_path, family):
  cfg = families.config(family, vocab_size=len(toy.vocabulary()), bos_id=0, eos_ids=(2,), pad_id=0)
  values = families.tensors(cfg)
  write_folder(tmp_path / "m", cfg, values, toy.tokenizer())
  found = open_checkpoint(str(tmp_path / "m"))
  assert found.config == cfg and set(found.names()) == set(values)
  for name, value in values.items():
    np.testing.assert_array_equal(found.read(name), value, err_msg=name)
  stored = safetensors.numpy.load_file(tmp_path / "m" / "model.safetensors")
  norm = stored["model.layers.0.input_layernorm.weight"]
  offset = 1.0 if cfg.architecture == "gemma3" else 0.0
  np.testing.assert_array_equal(norm + np.float32(offset), values["layers.0.attn_norm"])
  if cfg.num_experts:
    key = "model.layers.1.mlp.experts.{}.down_proj.weight"
    np.testing.assert_array_equal(stored[key.format(4)], values["layers.1.experts_down"][4])
    del stored[key.format(5)]
    safetensors.numpy.save_file(stored, tmp_path / "m" / "model.safetensors")
    with pytest.raises(UserError, match=f"has no tensor {key.format(5)}"):
      open_checkpoint(str(tmp_path / "m"))


def test_another_model_type_is_refused(tmp_path):
  cfg = families.config("qwen2", vocab_size=len(toy.vocabulary()))
  write_folder(tmp_path / "m", cfg, families.tensors(cfg), toy.tokenizer())
  toy.edit_json(tmp_path / "m" / "config.json", model_type="qwen3")
  with pytest.raises(UserError, match="'Qwen2ForCausalLM', whose model_type is 'qwen2', and "
                                      "model_type='qwen3'"):
    open_checkpoint(str(tmp_path / "m"))


@pytest.mark.parametrize("family", ["llama_yarn", "qwen2", "qwen3", "qwen3_moe", "gemma3"])
def test_gguf_and_folder_are_the_same_model(tmp_path, family):
  """CASE 33 for every family: rows in order, norms whole, experts stacked."""
  changes = {}
  if family == "gemma3":  # what a file of this family leaves unsaid is what the sizes say
    changes = dict(num_layers=6, local_layers=(True,) * 5 + (False,), query_scalar=8.0,
                   rope_local_theta=10000.0)
  if family == "qwen3_moe":
    changes = dict(tie_embeddings=True)
  cfg = families.config(family, vocab_size=len(toy.vocabulary()), bos_id=0, eos_ids=(2,), pad_id=0,
                        **changes)
  values = families.tensors(cfg)
  write_folder(tmp_path / "m", cfg, values, toy.tokenizer())
  toy.write_gguf(tmp_path / "m.gguf", cfg, values)
  folder, file = (open_checkpoint(str(tmp_path / name)) for name in ("m", "m.gguf"))
  assert file.config == folder.config == cfg
  for name, value in values.items():
    np.testing.assert_array_equal(file.read(name), value, err_msg=name)
  np.testing.assert_allclose(logits(file), logits(folder), atol=1e-4)


def test_gguf_metadata_that_is_not_supported_is_named(tmp_path, monkeypatch):
  cfg = families.config("gemma3", vocab_size=len(toy.vocabulary()), num_layers=2)
  more = {}
  real = gguf.GGUFWriter.add_layer_norm_rms_eps

  def add(writer, value):
    real(writer, value)
    for name, number in more.items():
      writer.add_float32(f"{writer.arch}.{name}", number)

  monkeypatch.setattr(gguf.GGUFWriter, "add_layer_norm_rms_eps", add)
  for name in ("final_logit_softcapping", "attn_logit_softcapping"):
    more = {name: 30.0}
    toy.write_gguf(tmp_path / "m.gguf", cfg, families.tensors(cfg))
    with pytest.raises(UserError, match=f"gemma3.{name}=30.0 is not supported"):
      open_checkpoint(str(tmp_path / "m.gguf"))
  cfg = families.config("llama_yarn", vocab_size=len(toy.vocabulary()))
  more = {"rope.scaling.yarn_attn_factor": 2.0}
  toy.write_gguf(tmp_path / "m.gguf", cfg, families.tensors(cfg))
  with pytest.raises(UserError, match="llama.rope.scaling.yarn_attn_factor=2.0"):
    open_checkpoint(str(tmp_path / "m.gguf"))


def test_mistral_files_are_those_of_a_llama(tmp_path):
  """Converters write one as `llama`: equal without a window, and refused with one, which that
  architecture has no place for."""
  cfg = families.config("mistral", vocab_size=len(toy.vocabulary()), bos_id=0, eos_ids=(2,),
                        pad_id=0, sliding_window=0, local_layers=())
  values = families.tensors(cfg)
  write_folder(tmp_path / "m", cfg, values, toy.tokenizer())
  as_llama = dataclasses.replace(cfg, architecture="llama")
  toy.write_gguf(tmp_path / "m.gguf", as_llama, values)
  folder, file = (open_checkpoint(str(tmp_path / name)) for name in ("m", "m.gguf"))
  assert folder.config == cfg and file.config == as_llama
  np.testing.assert_allclose(logits(file), logits(folder), atol=1e-4)
  windowed = families.config("mistral", vocab_size=cfg.vocab_size, architecture="llama")
  toy.write_gguf(tmp_path / "m.gguf", windowed, values)
  with pytest.raises(UserError, match=r"llama.attention.sliding_window=5 is not supported"):
    open_checkpoint(str(tmp_path / "m.gguf"))


# The text model of folders that also take images.


@pytest.mark.parametrize("prefix, head", [
    ("model.language_model.", "lm_head.weight"),
    ("language_model.model.", "language_model.lm_head.weight")])
def test_the_text_model_beside_a_vision_tower(tmp_path, prefix, head):
  """Both forms of names; `text_config` says what it must and leaves the rest to the family."""
  cfg = families.config(
      "gemma3", vocab_size=len(toy.vocabulary()), bos_id=0, eos_ids=(2,), pad_id=0)
  values = families.tensors(cfg)
  path = tmp_path / "m"
  write_folder(path, cfg, values, toy.tokenizer())
  stored = safetensors.numpy.load_file(path / "model.safetensors")
  moved = {prefix + name.removeprefix("model."): value for name, value in stored.items()}
  moved[head] = moved[prefix + "embed_tokens.weight"]  # as some writers repeat it
  tower = prefix.startswith("model.") * "model."
  for name in ("vision_tower.vision_model.post_layernorm.weight",
               "multi_modal_projector.mm_input_projection_weight"):
    moved[tower + name] = np.ones((3, 2), np.float32)
  safetensors.numpy.save_file(moved, path / "model.safetensors")
  fields = json.loads((path / "config.json").read_text())
  text = {name: value for name, value in fields.items() if name not in (
      "architectures", "eos_token_id", "bos_token_id", "pad_token_id")}
  outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
           "eos_token_id": [2], "vision_config": {"hidden_size": 8}, "text_config": text}
  (path / "config.json").write_text(json.dumps(outer))
  found = open_checkpoint(str(path))
  assert found.config == cfg and sorted(found.names()) == sorted(values)
  for name, value in values.items():
    np.testing.assert_array_equal(found.read(name), value, err_msg=name)
  for changes, match in (
      (dict(quantization_config={"bits": 4}), "quantization_config"),
      (dict(text_config=text | {"final_logit_softcapping": 3.0}), "final_logit_softcapping=3.0"),
      (dict(text_config=text | {"model_type": "qwen3"}), "model_type='qwen3'"),
      (dict(model_type="gemma3_text"), "model_type is 'gemma3'")):
    (path / "config.json").write_text(json.dumps(outer | changes))
    with pytest.raises(UserError, match=match):
      open_checkpoint(str(path))


def test_a_sparse_text_config():
  """gemma-3-4b-it says six fields; the others are the family's."""
  text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
          "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
          "sliding_window": 1024}
  config = DecoderConfig.from_hf({
      "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
      "eos_token_id": [1, 106], "text_config": text})
  assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (
      262208, 8, 4, 256)
  assert config.tie_embeddings and config.eos_ids == (1, 106)
  assert config.rope_scaling == RopeScaling("linear", 8.0) and config.rope_local_theta == 1e4
  assert config.sliding_window == 1024 and not config.is_local(5) and config.is_local(4)
