"""GGUF reading: row order under grouped-query attention, tensor types, metadata, refusals."""

import dataclasses
import re

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from spec_jax.errors import UserError
from spec_jax.models.config import RopeScaling
from spec_jax.weights import open_checkpoint
from spec_jax.weights.gguf import unpermute
from spec_jax.weights.safetensors import rope_divisors, write_folder
from tests.weights import toy


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_rows_come_back_in_their_order(tmp_path, kind):
  cfg = toy.config()
  values = toy.tensors(cfg)
  found = open_checkpoint(str(toy.write_gguf(tmp_path / "m.gguf", cfg, values, kind)))
  assert found.config == cfg
  assert set(found.names()) == set(values)
  for name, value in values.items():
    if kind != "F32" and value.ndim == 2:  # quantised by rows, so the order of rows is no matter
      value = gguf.dequantize(gguf.quantize(value, GGMLQuantizationType.Q8_0),
                              GGMLQuantizationType.Q8_0)
    read = found.read(name)
    assert read.dtype == np.float32 and read.flags.writeable
    np.testing.assert_array_equal(read, value, err_msg=name)


def test_unpermute_inverts_the_interleaving():
  rows = np.arange(48.0).reshape(24, 2)
  for heads in (1, 2, 3):
    np.testing.assert_array_equal(unpermute(toy.interleave(rows, heads), heads), rows)
  assert (unpermute(toy.interleave(rows, 3), 1) != rows).any()  # the head count matters


def _q6_k(rng, rows, blocks):
  """Random Q6_K blocks and their values, decoded element by element."""
  data = rng.integers(0, 256, size=(rows, blocks, 210), dtype=np.uint8)
  data[..., 208:] = np.frombuffer(np.float16(1 / 1024).tobytes(), np.uint8)
  values = np.zeros((rows, blocks, 256), np.float32)
  for block, out in zip(data.reshape(-1, 210), values.reshape(-1, 256), strict=True):
    scale = block[192:208].view(np.int8).astype(int)
    for half in range(2):
      low = block[half * 64:half * 64 + 64].astype(int)
      high = block[128 + half * 32:128 + half * 32 + 32].astype(int)
      for i in range(32):
        six = (low[i] & 15 | (high[i] & 3) << 4, low[i + 32] & 15 | (high[i] >> 2 & 3) << 4,
               low[i] >> 4 | (high[i] >> 4 & 3) << 4, low[i + 32] >> 4 | (high[i] >> 6 & 3) << 4)
        for quarter, q in enumerate(six):
          out[half * 128 + quarter * 32 + i] = (
              scale[half * 8 + quarter * 2 + i // 16] * (q - 32) / 1024)
  return data.reshape(rows, -1), values.reshape(rows, -1)


def test_mixed_types(tmp_path):
  cfg = toy.config(num_layers=1, intermediate_size=256)
  values = toy.tensors(cfg)
  q6_data, q6_values = _q6_k(np.random.default_rng(1), cfg.hidden_size, 1)
  kinds = {"embed": "F16", "layers.0.wq": "BF16", "layers.0.wv": "Q4_0", "layers.0.w_up": "Q8_0"}
  path = toy.write_gguf(tmp_path / "m.gguf", cfg, values, kinds,
                        raw={"layers.0.w_down": (q6_data, GGMLQuantizationType.Q6_K)})
  found = open_checkpoint(str(path))
  np.testing.assert_allclose(found.read("layers.0.w_down"), q6_values, rtol=1e-6)
  for name, relative in (("embed", 2**-11), ("layers.0.wq", 2**-8), ("layers.0.wo", 0)):
    np.testing.assert_allclose(found.read(name), values[name], rtol=relative, atol=1e-6)
  for name, steps in (("layers.0.w_up", 127), ("layers.0.wv", 7)):
    blocks = values[name].reshape(values[name].shape[0], -1, 32)
    bound = np.abs(blocks).max(-1, keepdims=True) / steps * 1.01
    assert (np.abs(found.read(name).reshape(blocks.shape) - blocks) <= bound).all(), name


def test_a_type_nobody_knows_names_the_tensor(tmp_path):
  cfg = toy.config()
  path = toy.write_gguf(tmp_path / "m.gguf", cfg, toy.tensors(cfg))
  reader = gguf.GGUFReader(path, "r+")
  tensor = next(t for t in reader.tensors if t.name == "blk.1.ffn_up.weight")
  tensor.field.parts[4][:] = 9999
  reader.data.flush()
  with pytest.raises(UserError, match=r"blk\.1\.ffn_up\.weight has the unknown type 9999"):
    open_checkpoint(str(path))


def test_a_type_without_a_decoder_names_the_tensor(tmp_path):
  cfg = toy.config()
  integers = np.zeros((cfg.hidden_size, cfg.num_heads * cfg.head_dim), np.int32)
  path = toy.write_gguf(tmp_path / "m.gguf", cfg, toy.tensors(cfg),
                        raw={"layers.0.wo": (integers, GGMLQuantizationType.I32)})
  with pytest.raises(UserError, match=r"blk\.0\.attn_output\.weight has type I32"):
    open_checkpoint(str(path))


def test_no_output_means_tied(tmp_path):
  cfg = toy.config()
  values = toy.tensors(cfg)
  del values["head"]
  found = open_checkpoint(str(toy.write_gguf(tmp_path / "m.gguf", cfg, values)))
  assert found.config.tie_embeddings and "head" not in found.names()


def test_rope_freqs_are_read_and_exported(tmp_path):
  cfg = toy.config(rope_theta=500000.0, head_dim=64, num_heads=2, num_kv_heads=1, num_layers=1)
  scaled = RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)  # as Llama 3.2
  table = rope_divisors(dataclasses.replace(cfg, rope_scaling=scaled)).astype(np.float32)
  assert table[0] == 1 and np.isclose(table[-1], 32) and len(set(table.tolist())) > 3
  path = toy.write_gguf(tmp_path / "m.gguf", cfg, toy.tensors(cfg),
                        extra={"rope_freqs.weight": table})
  found = open_checkpoint(str(path))
  np.testing.assert_array_equal(found.read("rope_freqs"), table)
  write_folder(tmp_path / "out", found.config, {n: found.read(n) for n in found.names()},
               found.tokenizer())
  assert open_checkpoint(str(tmp_path / "out")).config.rope_scaling == scaled
  broken = {n: found.read(n) for n in found.names()}
  broken["rope_freqs"] = broken["rope_freqs"] * 1.1
  with pytest.raises(UserError, match="rope_freqs"):
    write_folder(tmp_path / "out2", found.config, broken, found.tokenizer())


def test_padding_tokens_do_not_exist(tmp_path):
  cfg = toy.config(vocab_size=len(toy.vocabulary()) + 6)
  tokens = toy.vocabulary() + [f"[PAD{i}]" for i in range(6)]
  types = [3] * 3 + [1] * (len(toy.vocabulary()) - 3) + [5] * 6
  path = toy.write_gguf(tmp_path / "m.gguf", cfg, toy.tensors(cfg), tokens=tokens,
                        token_types=types)
  found = open_checkpoint(str(path))
  assert found.config.vocab_size == len(tokens)
  assert found.config.vocab_real == len(toy.vocabulary()) == found.tokenizer().vocab_size


def test_what_is_not_supported_is_named(tmp_path):
  cfg = toy.config()
  values = toy.tensors(cfg)

  def refuse(match, **changes):
    path = toy.write_gguf(tmp_path / "m.gguf", cfg, changes.pop("values", values), **changes)
    with pytest.raises(UserError, match=match):
      open_checkpoint(str(path))

  refuse("general.architecture='mamba'", arch="mamba")
  refuse("tokenizer.ggml.pre='tekken'", pre="tekken")
  refuse(r"blk\.0\.attn_q\.bias is not supported",
         extra={"blk.0.attn_q.bias": np.zeros(64, np.float32)})
  refuse(r"no tensor blk\.1\.attn_v\.weight",
         values={n: v for n, v in values.items() if n != "layers.1.wv"})
  refuse(r"output_norm\.weight has shape \[63\].* says \[64\]",
         values=values | {"final_norm": values["final_norm"][:63]})


def test_not_a_gguf_file(tmp_path):
  path = tmp_path / "m.gguf"
  for content in (b"", b"not a model at all", b"GGUF\x03\0\0\0"):
    path.write_bytes(content)
    with pytest.raises(UserError, match="m.gguf is not a GGUF file, or one that is cut short"):
      open_checkpoint(str(path))
  cfg = toy.config()
  toy.write_gguf(path, cfg, toy.tensors(cfg))
  path.write_bytes(path.read_bytes()[:-40_000])  # a download that stopped
  with pytest.raises(UserError, match="m.gguf is not a GGUF file, or one that is cut short"):
    open_checkpoint(str(path))


def test_a_file_that_was_cut_anywhere(tmp_path):
  """In the header, the metadata, the list of tensors or the last tensor."""
  cfg = toy.config()
  whole = toy.write_gguf(tmp_path / "whole.gguf", cfg, toy.tensors(cfg)).read_bytes()
  path = tmp_path / "m.gguf"
  for size in [*range(0, 200, 7), *range(200, len(whole), 1009), len(whole) - 40]:
    path.write_bytes(whole[:size])
    with pytest.raises(UserError, match="m.gguf is not a GGUF file, or one that is cut short"):
      open_checkpoint(str(path))


def test_metadata_that_is_no_text(tmp_path):
  cfg = toy.config()
  path = toy.write_gguf(tmp_path / "m.gguf", cfg, toy.tensors(cfg))
  whole = path.read_bytes()
  for text, match in ((b"llama", "general.architecture cannot be read"),
                      (b"<|im_end|>", r"tokenizer.ggml.\* cannot be read")):
    path.write_bytes(whole.replace(text, b"\xff" + text[1:], 1))
    with pytest.raises(UserError, match=f"m.gguf: {match}"):
      open_checkpoint(str(path))


@pytest.mark.parametrize("key, value, match", [
    ("attention.head_count", [8, 8], r"=\[8, 8\] must be a whole number from 1 on"),
    ("attention.head_count", 0, "=0 must be"), ("attention.head_count", "8", "='8' must be"),
    ("attention.head_count_kv", [2, 2], r"=\[2, 2\] must be"),
    ("attention.head_count_kv", 3, "num_kv_heads=3 does not divide num_heads=8"),
    ("embedding_length", 0, "=0 must be"), ("block_count", "two", "='two' must be"),
    ("feed_forward_length", [96, 96], r"=\[96, 96\] must be"), ("context_length", 0, "=0 must be"),
    ("rope.freq_base", "x", "='x' must be a number above 0"),
    ("rope.freq_base", 0.0, "=0.0 must be a number above 0"),
    ("attention.layer_norm_rms_epsilon", [1.0], r"=\[1.0\] must be a number"),
    ("tokenizer.ggml.bos_token_id", 999, "=999 is none of the ids 0.."),
    ("tokenizer.ggml.bos_token_id", "x", "='x' is none of the ids"),
    ("tokenizer.ggml.tokens", 3, r"has no tokenizer.ggml.tokens \(a list\)"),
    ("tokenizer.ggml.pre", [1], r"tokenizer.ggml.pre=\[1\] is not supported"),
    ("general.architecture", [1], r"general.architecture=\[1\] is not supported")])
def test_metadata_of_another_type_is_named_with_its_value(tmp_path, monkeypatch, key, value, match):
  cfg = toy.config()
  path = toy.write_gguf(tmp_path / "m.gguf", cfg, toy.tensors(cfg))
  whole = key if key.startswith(("tokenizer", "general")) else f"llama.{key}"
  plain = gguf.GGUFReader.__init__

  class Field:
    def contents(self):
      return value

  def init(self, *args):
    plain(self, *args)
    assert whole in self.fields
    self.fields[whole] = Field()

  monkeypatch.setattr(gguf.GGUFReader, "__init__", init)
  shown = re.escape(key) if match.startswith("=") else ""
  with pytest.raises(UserError, match=f"m.gguf: .*{shown}{match}") as caught:
    open_checkpoint(str(path))
  assert "\n" not in str(caught.value)


def test_a_template_beside_the_file_and_the_end_of_a_turn(tmp_path):
  """Base models bring no template, and files often name no end of turn: a template shows it."""
  cfg, chat = toy.config(eos_ids=(0,)), [{"role": "user", "content": "hello"}]
  toy.write_gguf(tmp_path / "m.gguf", cfg, toy.tensors(cfg), template="", eos=0)
  found = open_checkpoint(str(tmp_path / "m.gguf"))
  assert found.config.eos_ids == (0,)
  with pytest.raises(UserError, match="no chat template"):
    found.tokenizer().encode_chat(chat)
  (tmp_path / "m.jinja").write_text("{{ messages[0]['content'] }}")  # names no control token
  assert open_checkpoint(str(tmp_path / "m.gguf")).config.eos_ids == (0,)
  (tmp_path / "m.jinja").write_text(toy.CHATML)
  found = open_checkpoint(str(tmp_path / "m.gguf"))
  assert found.config.eos_ids == found.tokenizer().eos_ids == (0, 2)
  assert found.tokenizer().decode(found.tokenizer().encode_chat(chat)).startswith("user\nhello")
  # What the file states stays, and a template beside it replaces its own.
  toy.write_gguf(tmp_path / "m.gguf", cfg, toy.tensors(cfg), template="{{ x }}", eos=0)
  assert open_checkpoint(str(tmp_path / "m.gguf")).tokenizer().chat_template == toy.CHATML
