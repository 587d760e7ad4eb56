"""Model folders: shards, index, tied heads, ids that end a sequence, write and read back."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from spec_jax.errors import UserError
from spec_jax.models.config import RopeScaling
from spec_jax.models.decoder import tensor_shapes
from spec_jax.weights import open_checkpoint
from spec_jax.weights.safetensors import write_folder
from tests.weights import toy

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
  cfg = toy.config()
  write_folder(tmp_path / "m", cfg, toy.tensors(cfg), toy.tokenizer())
  return tmp_path / "m"


def refuse(folder, match):
  with pytest.raises(UserError, match=match):
    open_checkpoint(str(folder))


@pytest.mark.parametrize("sharded", [False, True])
def test_round_trip(folder, sharded):
  if sharded:
    toy.shard(folder)
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"left over from another upload")
    (folder / "model.safetensors").write_bytes(b"so is this")
  found = open_checkpoint(str(folder))
  assert found.config == toy.config()
  values = toy.tensors(toy.config())
  assert set(found.names()) == set(values)
  for name, value in values.items():
    np.testing.assert_array_equal(found.read(name), value)
  assert found.tokenizer().hash() == toy.tokenizer().hash()


def test_bfloat16(tmp_path):
  cfg = toy.config(tie_embeddings=True)
  values = toy.tensors(cfg)
  write_folder(tmp_path / "m", cfg, values, toy.tokenizer(), dtype="bfloat16")
  found = open_checkpoint(str(tmp_path / "m"))
  read = found.read("layers.0.w_up")
  assert read.dtype == np.float32
  want = values["layers.0.w_up"].astype(ml_dtypes.bfloat16).astype(np.float32)
  np.testing.assert_array_equal(read, want)
  assert json.loads((tmp_path / "m" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_missing_shard_is_named(folder):
  toy.shard(folder)
  (folder / "model-00002-of-00002.safetensors").unlink()
  refuse(folder, r"model-00002-of-00002\.safetensors does not exist")


def test_a_tensor_the_index_misplaces_is_named(folder):
  toy.shard(folder)
  index = json.loads((folder / INDEX).read_text())
  name = "model.layers.1.mlp.up_proj.weight"
  shards = sorted(set(index["weight_map"].values()))
  shards.remove(index["weight_map"][name])
  index["weight_map"][name] = shards[0]
  (folder / INDEX).write_text(json.dumps(index))
  refuse(folder, rf"{shards[0]} has no tensor {name}")


def edit_tensors(folder, change):
  path = folder / "model.safetensors"
  values = safetensors.numpy.load_file(path)
  change(values)
  safetensors.numpy.save_file(values, path)


def test_a_missing_or_odd_tensor_is_named(folder):
  name = "model.layers.0.self_attn.k_proj.weight"
  edit_tensors(folder, lambda v: v.update({name: v[name][:8]}))
  refuse(folder, rf"tensor {name} has shape \[8, 64\], the config says \[16, 64\]")
  edit_tensors(folder, lambda v: v.pop(name))
  refuse(folder, f"has no tensor {name}")


def test_an_unknown_tensor_is_refused_and_a_buffer_is_not(folder):
  buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
  edit_tensors(folder, lambda v: v.update({buffer: np.ones(4, np.float32)}))
  open_checkpoint(str(folder))
  bias = "model.layers.0.self_attn.q_proj.bias"
  edit_tensors(folder, lambda v: v.update({bias: np.ones(64, np.float32)}))
  refuse(folder, f"tensor {bias} is not supported")


def test_packed_integers_are_refused(folder):
  name = "model.layers.0.mlp.up_proj.weight"
  edit_tensors(folder, lambda v: v.update({name: v[name].astype(np.int8)}))
  refuse(folder, f"tensor {name} has type I8")
  toy.edit_json(folder / "config.json", quantization_config={"quant_method": "gptq"})
  refuse(folder, "quantization_config")


def test_head_rules(folder):
  toy.edit_json(folder / "config.json", tie_word_embeddings=True)
  refuse(folder, "lm_head.weight differs from model.embed_tokens.weight")
  edit_tensors(folder, lambda v: v.update({"lm_head.weight": v["model.embed_tokens.weight"]}))
  found = open_checkpoint(str(folder))
  assert found.config.tie_embeddings and "head" not in found.names()
  edit_tensors(folder, lambda v: v.pop("lm_head.weight"))
  found = open_checkpoint(str(folder))
  assert found.config.tie_embeddings and "head" not in found.names()
  toy.edit_json(folder / "config.json", tie_word_embeddings=False)
  refuse(folder, "lm_head.weight.*tie_word_embeddings=false")


def test_eos_is_the_union(folder):
  toy.edit_json(folder / "config.json", eos_token_id=[9, 2])
  toy.edit_json(folder / "generation_config.json", eos_token_id=7)
  found = open_checkpoint(str(folder))
  assert found.config.eos_ids == found.tokenizer().eos_ids
  assert set(found.config.eos_ids) == {2, 7, 9}
  toy.edit_json(folder / "tokenizer_config.json", eos_token="h")
  assert set(open_checkpoint(str(folder)).config.eos_ids) == {
      2, 7, 9, toy.vocabulary().index("h")}


def test_padded_vocabulary(tmp_path):
  cfg = toy.config(vocab_size=len(toy.vocabulary()) + 19)
  write_folder(tmp_path / "m", cfg, toy.tensors(cfg), toy.tokenizer())
  found = open_checkpoint(str(tmp_path / "m"))
  assert (found.config.vocab_size, found.config.vocab_real) == (
      cfg.vocab_size, len(toy.vocabulary()))
  toy.edit_json(tmp_path / "m" / "config.json", vocab_size=100)
  refuse(tmp_path / "m", "vocab_size=100")


def test_config_round_trip(tmp_path):
  cfg = toy.config(rope_scaling=RopeScaling("llama3", 8.0, 1.5, 3.5, 32),
                   partial_rotary_factor=0.25, rms_norm_eps=1e-6, rope_theta=1234.5)
  write_folder(tmp_path / "m", cfg, toy.tensors(cfg), toy.tokenizer(),
               extra_config={"spec_note": 1})
  assert open_checkpoint(str(tmp_path / "m")).config == cfg
  assert json.loads((tmp_path / "m" / "config.json").read_text())["spec_note"] == 1


def test_broken_files_are_named(folder):
  toy.edit_json(folder / "config.json", architectures=["MambaForCausalLM"])
  refuse(folder, "MambaForCausalLM")
  (folder / "config.json").write_text("{")
  refuse(folder, "config.json is not JSON")
  (folder / "config.json").write_text(json.dumps(toy.config().to_hf()))
  (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
  refuse(folder, "model.safetensors is not a readable safetensors file")
  (folder / "model.safetensors").unlink()
  refuse(folder, "neither model.safetensors nor")
  (folder / "tokenizer.json").write_text("{}")
  refuse(folder, "tokenizer.json is not a tokenizer")
  (folder / "tokenizer.json").unlink()
  refuse(folder, "tokenizer.json does not exist")


def test_write_refuses_what_does_not_fit(tmp_path):
  cfg = toy.config()
  values = toy.tensors(cfg)
  for change, match in (
      ({"layers.0.wq": np.ones((3, 3))}, "q_proj"), ({"fc": np.ones(3)}, "tensor fc")):
    with pytest.raises(UserError, match=match):
      write_folder(tmp_path / "m", cfg, values | change, toy.tokenizer())
  with pytest.raises(UserError, match="lm_head"):
    write_folder(tmp_path / "m", cfg, {n: v for n, v in values.items() if n != "head"},
                 toy.tokenizer())
  with pytest.raises(UserError, match="dtype='int4'"):
    write_folder(tmp_path / "m", cfg, values, toy.tokenizer(), dtype="int4")


def test_an_export_read_by_a_new_process_is_the_same(tmp_path):
  # Every number distinct: a tensor under another's name, or transposed, cannot hide.
  cfg = toy.config(hidden_size=64, num_heads=8, head_dim=8, intermediate_size=64)
  start, values = 0, {}
  for name, shape in tensor_shapes(cfg).items():
    size = int(np.prod(shape))
    values[name] = np.arange(start, start + size, dtype=np.float32).reshape(shape)
    start += size
  write_folder(tmp_path / "m", cfg, values, toy.tokenizer())
  script = ("import sys, numpy\nfrom spec_jax.weights import open_checkpoint\n"
            "c = open_checkpoint(sys.argv[1])\n"
            "numpy.savez(sys.argv[2], **{n: c.read(n) for n in c.names()})")
  subprocess.run([sys.executable, "-c", script, tmp_path / "m", tmp_path / "back.npz"],
                 check=True, cwd=Path(__file__).parents[2])
  with np.load(tmp_path / "back.npz") as back:
    assert set(back.files) == set(values)
    for name, value in values.items():
      np.testing.assert_array_equal(back[name], value)
