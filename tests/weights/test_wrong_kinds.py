"""A field of a model folder that is of another kind than it should be is named, whatever it is."""

import json

import pytest

from spec_jax.errors import UserError
from spec_jax.models.config import DecoderConfig
from spec_jax.models.hf_config import check_model_type
from spec_jax.tokenizer import Tokenizer
from tests.weights import toy

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
FIELDS = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "rope_theta": 1e4,
    "rope_scaling": LLAMA3, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5}


def read(fields):
  check_model_type(fields)
  return DecoderConfig.from_hf(fields)


def test_the_fields_themselves_are_fine():
  assert read(FIELDS) == read(FIELDS | {"rms_norm_eps": 1e-5, "bos_token_id": None})
  assert read(FIELDS | {"rope_scaling": None, "partial_rotary_factor": None, "head_dim": None})


@pytest.mark.parametrize("name,wrong", [
    (name, wrong) for name, right in FIELDS.items() for wrong in ("x", [1, "a"], True, {"a": 1})
    if type(wrong) is not type(right)])
def test_a_field_of_config_json(name, wrong):
  with pytest.raises(UserError, match=f"config.json field {name}=.* must be "):
    read(FIELDS | {name: wrong})


@pytest.mark.parametrize("name", LLAMA3)
def test_a_field_of_the_rope_scaling(name):
  with pytest.raises(UserError, match=f"config.json field rope_scaling.{name}=.* must be "):
    read(FIELDS | {"rope_scaling": LLAMA3 | {name: [1]}})
  if name != "rope_type":
    with pytest.raises(UserError, match=f"no field '{name}'"):
      read(FIELDS | {"rope_scaling": LLAMA3 | {name: None}})


@pytest.mark.parametrize("name,wrong", [
    ("tie_word_embeddings", "false"), ("use_sliding_window", 1), ("norm_topk_prob", "no"),
    ("num_key_value_heads", 0), ("num_key_value_heads", -2), ("head_dim", -8),
    ("max_position_embeddings", 0), ("sliding_window", 0), ("sliding_window_pattern", 0),
    ("num_experts_per_tok", 0), ("max_window_layers", -1), ("rms_norm_eps", 0.0),
    ("rms_norm_eps", float("nan")), ("rope_theta", -1.0), ("rope_theta", float("inf")),
    ("query_pre_attn_scalar", 0), ("architectures", [["LlamaForCausalLM"]]),
    ("architectures", [3]), ("layer_types", [["full_attention"], 2]),
    ("partial_rotary_factor", 2.0), ("rope_scaling", LLAMA3 | {"factor": 0.0}),
    ("rope_scaling", LLAMA3 | {"truncate": "yes"})])
def test_a_value_out_of_its_range(name, wrong):
  """Each of these was a traceback, or passed for something else."""
  with pytest.raises(UserError, match=f"config.json field {name}.* must be "):
    read(FIELDS | {name: wrong})


def test_a_band_of_no_width():
  with pytest.raises(UserError, match="low_freq_factor=4.0 must be below high_freq_factor=4.0"):
    read(FIELDS | {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}})


@pytest.mark.parametrize("wrong", [0, -3, 2.5, None])
@pytest.mark.parametrize("name", [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"])
def test_a_size_below_one_and_one_without_a_value(name, wrong):
  with pytest.raises(UserError, match=f"config.json field {name}={wrong} must be "):
    read(FIELDS | {name: wrong})


@pytest.mark.parametrize("file,fields", [
    ("tokenizer_config.json", {"bos_token": 3}), ("tokenizer_config.json", {"eos_token": ["x"]}),
    ("tokenizer_config.json", {"eos_token": {"content": 2.5}}),
    ("tokenizer_config.json", {"chat_template": 3}),
    ("tokenizer_config.json", {"chat_template": {"a": 1}}),
    ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": 3}]}),
    ("generation_config.json", {"eos_token_id": "x"}),
    ("generation_config.json", {"eos_token_id": [2, "a"]}),
    ("generation_config.json", {"pad_token_id": {"a": 1}}), ("config.json", {"bos_token_id": [1]}),
    ("config.json", {"eos_token_id": 2.5})])
def test_a_field_of_the_tokenizer_files(tmp_path, file, fields):
  toy.tokenizer().save(tmp_path)
  assert Tokenizer.from_folder(tmp_path).vocab_size
  (tmp_path / file).write_text(json.dumps(fields))
  with pytest.raises(UserError, match=f"{file}: {next(iter(fields))}"):
    Tokenizer.from_folder(tmp_path)


def test_templates_without_a_default_one_and_a_file_that_is_no_text(tmp_path):
  toy.tokenizer().save(tmp_path)
  for entries in (["x"], [{"name": "x"}], [{"template": "x"}]):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    assert Tokenizer.from_folder(tmp_path).chat_template == ""
  (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
  with pytest.raises(UserError, match="chat_template.jinja is not text"):
    Tokenizer.from_folder(tmp_path)
