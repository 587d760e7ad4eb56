"""Decoder, loaders and tokenizer against transformers (arrays of reference_llama.py)."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.errors import UserError
from spec_jax.models.decoder import Decoder
from spec_jax.weights import open_checkpoint
from spec_jax.weights.safetensors import write_folder

pytestmark = pytest.mark.interop
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def reference():
  folder = Path(os.environ.get("SPEC_JAX_INTEROP_DIR", ".interop"))
  path = folder / "llama.npz"
  if not path.is_file():
    pytest.skip(f"no {path}: run `make interop`")
  with np.load(path) as arrays:
    return {"folder": folder} | {name: arrays[name] for name in arrays.files}


@pytest.fixture(scope="module")
def demo(reference):
  if "demo_ids" not in reference:
    pytest.skip("the reference was computed without the demo target")
  try:
    return open_checkpoint("demo")
  except UserError as error:
    pytest.skip(f"demo target: {error}")


def run(checkpoint, ids, taps=()):
  """Logits [T, V] and the tapped layers, each [T, D], of our decoder in float32."""
  divisors = checkpoint.read("rope_freqs") if "rope_freqs" in checkpoint.names() else None
  model = Decoder(checkpoint.config, lambda name: jnp.asarray(checkpoint.read(name)), divisors)
  tokens = jnp.asarray(ids)[None]
  logits, out = model(tokens, jnp.arange(tokens.shape[1])[None], taps=taps)
  layers = np.split(np.asarray(out.features[0]), len(taps), -1) if taps else []
  return np.asarray(logits[0]), layers


def compare(reference, name, checkpoint):
  taps = json.loads(str(reference["taps"]))[name]
  logits, layers = run(checkpoint, reference[f"{name}_ids"], taps)
  real = checkpoint.config.vocab_real
  np.testing.assert_allclose(
      logits[:, :real], reference[f"{name}_logits"][:, :real], atol=TOLERANCE, rtol=0)
  for ours, theirs in zip(layers, reference[f"{name}_layers"], strict=True):
    # A few channels of a trained model are thousands of times the others.
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=1e-4)


def same_ids(reference, tokenizer, expected):
  expected = json.loads(str(expected))
  texts, chats = (json.loads(str(reference[key])) for key in ("texts", "chats"))
  for text, ids in zip(texts, expected["texts"], strict=True):
    assert tokenizer.encode(text) == ids, text
  for chat, ids, rendered in zip(chats, expected["chats"], expected["rendered"], strict=True):
    assert tokenizer.apply_chat(chat) == rendered
    assert tokenizer.encode_chat(chat) == ids


@pytest.mark.parametrize("name", ["single", "sharded"])
def test_folder(reference, name):
  checkpoint = open_checkpoint(str(reference["folder"] / f"llama_{name}"))
  assert checkpoint.config.rope_scaling.kind == "llama3"
  assert set(checkpoint.config.eos_ids) == {1, 5}
  assert 0 < checkpoint.config.vocab_real < checkpoint.config.vocab_size == 320
  compare(reference, "tiny", checkpoint)


def test_folder_in_bfloat16(reference):
  checkpoint = open_checkpoint(str(reference["folder"] / "llama_bfloat16"))
  logits, _ = run(checkpoint, reference["tiny_ids"])
  real = checkpoint.config.vocab_real
  np.testing.assert_allclose(
      logits[:, :real], reference["bfloat16_logits"][:, :real], atol=TOLERANCE, rtol=0)


def test_folder_tokenizer(reference):
  tokenizer = open_checkpoint(str(reference["folder"] / "llama_single")).tokenizer()
  same_ids(reference, tokenizer, reference["tiny_text_ids"])


@pytest.mark.demo
def test_demo(reference, demo):
  compare(reference, "demo", demo)


@pytest.mark.demo
def test_demo_tokenizer(reference, demo):
  same_ids(reference, demo.tokenizer(), reference["demo_text_ids"])


@pytest.mark.parametrize("kind", ["tiny", "demo"])
def test_what_we_write_transformers_reads(reference, kind, tmp_path, request):
  """A folder written here gives the same logits and ids there (CASE 35)."""
  if kind == "tiny":
    source = open_checkpoint(str(reference["folder"] / "llama_single"))
    config, tokenizer = source.config, source.tokenizer()
    tensors = {name: source.read(name) for name in source.names()}
  else:  # one layer cut out of the real model, as a drafter is
    demo = request.getfixturevalue("demo")
    config, tokenizer = dataclasses.replace(demo.config, num_layers=1), demo.tokenizer()
    tensors = {name: demo.read(name) for name in demo.names()
               if not name.startswith("layers.") or name.startswith("layers.0.")}
  write_folder(tmp_path / "m", config, tensors, tokenizer)
  ids, out = reference[f"{kind}_ids"], tmp_path / "out.npz"
  np.save(tmp_path / "ids.npy", ids)
  script = Path(__file__).with_name("reference_llama.py")
  subprocess.run([str(reference["python"]), script, "--logits", tmp_path / "m",
                  tmp_path / "ids.npy", out], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
  logits, _ = run(open_checkpoint(str(tmp_path / "m")), ids)
  with np.load(out) as theirs:
    real = config.vocab_real
    np.testing.assert_allclose(
        logits[:, :real], theirs["logits"][:, :real], atol=TOLERANCE, rtol=0)
    same_ids(reference, tokenizer, theirs["text_ids"])
