"""Loading by blocks of rows: no tensor is ever held twice, whatever the file's type."""

import gc
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax
from spec_jax import drafters
from spec_jax.weights import open_checkpoint, stream
from spec_jax.weights.safetensors import write_folder
from tests import families
from tests.weights import toy

KIB = 1024


def test_spans_cover_the_rows_in_order(monkeypatch):
  monkeypatch.setattr(stream, "BLOCK_BYTES", 4 * 30)
  assert list(stream.spans((7, 10))) == [slice(0, 3), slice(3, 6), slice(6, 7)]
  assert list(stream.spans((2, 5, 10))) == [slice(0, 1), slice(1, 2)]  # more than a block each
  assert list(stream.spans((31,))) == [slice(0, 30), slice(30, 31)]


@pytest.mark.parametrize("kind", ["folder", "F32", "Q8_0"])
@pytest.mark.parametrize("family", ["llama_yarn", "qwen3_moe", "gemma3"])
def test_blocks_of_any_size_make_the_same_tensor(tmp_path, monkeypatch, family, kind):
  """Rows that a file keeps in another order, experts, norms stored less one."""
  if family == "gemma3" and kind != "folder":
    pytest.skip("its norms are whole there")
  cfg = families.config(family, vocab_size=len(toy.vocabulary()), bos_id=0, eos_ids=(2,), pad_id=0)
  values = families.tensors(cfg)
  if kind == "folder":
    write_folder(tmp_path / "m", cfg, values, toy.tokenizer())
    path = tmp_path / "m"
  else:  # rows of 32 and 48 columns; Q8_0 has blocks of 32
    if kind == "Q8_0":
      kinds = {name: kind for name, value in values.items()
               if value.ndim > 1 and value.shape[-1] % 32 == 0}
    path = toy.write_gguf(tmp_path / "m.gguf", cfg, values, kinds if kind == "Q8_0" else kind)
  checkpoint = open_checkpoint(str(path))
  whole = {name: checkpoint.read(name) for name in checkpoint.names()}
  monkeypatch.setattr(stream, "BLOCK_BYTES", 4 * 100)  # three rows at most
  for name, value in whole.items():
    assert checkpoint.shape(name) == value.shape
    np.testing.assert_array_equal(checkpoint.read(name), value, err_msg=name)
    seen = np.zeros(value.shape, int)
    for rows, block in checkpoint.blocks(name):
      assert block.dtype == np.float32
      seen[rows] += 1
    assert (seen == 1).all(), name


def large(tmp_path, kind):
  """A model whose embedding is most of it: 4 MiB as float32."""
  cfg = toy.config(vocab_size=8192, hidden_size=128, num_layers=1)
  values = toy.tensors(cfg)
  if kind == "gguf":
    return toy.write_gguf(tmp_path / "m.gguf", cfg, values, "Q8_0")
  write_folder(tmp_path / "m", cfg, values, toy.tokenizer(), dtype=kind)
  return tmp_path / "m"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8w"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "gguf"])
def test_the_host_holds_one_tensor_as_the_dtype_has_it(tmp_path, monkeypatch, kind, dtype):
  """The most that numpy holds at once, beside the arrays that the model is made of: one tensor and
  a few blocks. (A reader that converts whole tensors holds two or three forms of it.)"""
  monkeypatch.setattr(stream, "BLOCK_BYTES", 64 * KIB)
  path = large(tmp_path, kind)
  spec_jax.load_target(str(path), dtype)  # compiles, and fills caches
  gc.collect()
  checkpoint = open_checkpoint(str(path))  # vocabulary and headers are no part of this
  checkpoint.tokenizer()
  monkeypatch.setattr("spec_jax.target.open_checkpoint", lambda source: checkpoint)
  tracemalloc.start()
  try:
    target = spec_jax.load_target(str(path), dtype)
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  # An untied embedding stays floating in int8w; the head is as large.
  largest = 8192 * 128 * {"float32": 4, "bfloat16": 2, "int8w": 2}[dtype]
  assert largest < peak < largest + 12 * 64 * KIB + 200 * KIB
  assert target.module.embed[...].shape == (8192, 128)


def test_a_small_model_as_a_drafter_is_read_once(tmp_path, monkeypatch):
  """Tensor by tensor, each in one go: nothing is read that is not used at once."""
  cfg = toy.config(tie_embeddings=True)
  write_folder(tmp_path / "m", cfg, toy.tensors(cfg), toy.tokenizer())
  target = spec_jax.load_target(str(tmp_path / "m"))
  read = []
  real = drafters.open_checkpoint

  def counted(source):
    checkpoint = real(source)
    blocks = checkpoint.blocks
    checkpoint.blocks = lambda name: (read.append(name), blocks(name))[1]
    return checkpoint

  monkeypatch.setattr(drafters, "open_checkpoint", counted)
  module = drafters.load_drafter(str(tmp_path / "m"), target, "bfloat16").module
  # The type checks of the tests look at the first item of a mapping.
  assert read[0] == "embed" and sorted(x for x in read if x != "embed") == sorted(
      x for x in target.checkpoint.names() if x != "embed")
  assert module.embed[...] is module.head[...]  # tied: one array
  for leaf in jax.tree.leaves(module.stack.layers[0].wq[...]):
    assert leaf.dtype == jnp.bfloat16
