"""The same model from GGUF and from a folder computes the same (CASE 33)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models.config import RopeScaling
from spec_jax.models.decoder import Decoder
from spec_jax.weights import open_checkpoint
from spec_jax.weights.safetensors import rope_divisors, write_folder
from tests.weights import toy


def logits(source):
  found = open_checkpoint(str(source))
  divisors = found.read("rope_freqs") if "rope_freqs" in found.names() else None
  model = Decoder(found.config, lambda name: jnp.asarray(found.read(name)), divisors)
  tokens = jnp.arange(40)[None] * 7 % 256
  return np.asarray(model(tokens, jnp.arange(40)[None])[0])


@pytest.mark.parametrize("kind,bound", [("F32", 1e-4), ("Q8_0", 0.1)])
def test_gguf_equals_the_folder(tmp_path, kind, bound):
  cfg = toy.config()
  values = toy.tensors(cfg)
  write_folder(tmp_path / "m", cfg, values, toy.tokenizer())
  toy.write_gguf(tmp_path / "m.gguf", cfg, values, kind)
  ours, theirs = logits(tmp_path / "m"), logits(tmp_path / "m.gguf")
  assert ours.std() > 5 * bound  # the bound means something
  np.testing.assert_allclose(ours, theirs, atol=bound, rtol=0)


def test_rope_freqs_are_applied(tmp_path):
  # Scaled from a context of 16, so that 40 positions feel it.
  scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 16)
  cfg = toy.config()
  values = toy.tensors(cfg)
  scaled_cfg = dataclasses.replace(cfg, rope_scaling=scaling)
  table = rope_divisors(scaled_cfg).astype(np.float32)
  toy.write_gguf(tmp_path / "plain.gguf", cfg, values)
  toy.write_gguf(tmp_path / "m.gguf", cfg, values, extra={"rope_freqs.weight": table})
  write_folder(tmp_path / "m", scaled_cfg, values, toy.tokenizer())
  scaled = logits(tmp_path / "m")
  np.testing.assert_allclose(logits(tmp_path / "m.gguf"), scaled, atol=1e-4, rtol=0)
  assert np.abs(logits(tmp_path / "plain.gguf") - scaled).max() > 1e-2
