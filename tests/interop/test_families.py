"""Every target family against transformers (models and arrays of reference_families.py).

Both ways: the folders that transformers wrote give its logits here, in one pass and through the
cache, beyond the sliding windows; and the folders written here give them there.
"""

import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models.cache import init_cache
from spec_jax.models.decoder import Decoder
from spec_jax.weights import open_checkpoint
from spec_jax.weights.safetensors import write_folder

pytestmark = pytest.mark.interop
TOLERANCE = 1e-4
NAMES = ("llama_linear", "llama_yarn", "mistral", "qwen2", "qwen2_window", "qwen3", "qwen3_yarn",
         "qwen3_moe", "qwen3_moe_raw", "gemma3", "gemma3_linear", "gemma3_vision")


@pytest.fixture(scope="module")
def reference():
  folder = Path(os.environ.get("SPEC_JAX_INTEROP_DIR", ".interop"))
  path = folder / "families.npz"
  if not path.is_file():
    pytest.skip(f"no {path}: run `make interop`")
  with np.load(path) as arrays:
    return {"folder": folder / "families"} | {name: arrays[name] for name in arrays.files}


def decoder(checkpoint):
  return Decoder(checkpoint.config, lambda name: jnp.asarray(checkpoint.read(name)))


def difference(ours, theirs, real):
  """The largest difference of a logit, relative to nothing: logits here are of the order of one."""
  return float(np.abs(np.asarray(ours)[:, :real] - theirs[:, :real]).max())


def test_every_family_is_compared(reference):
  assert sorted(NAMES) == sorted(reference["names"].tolist())


@pytest.mark.parametrize("name", NAMES)
def test_one_pass_and_the_cache(reference, name, capsys):
  checkpoint = open_checkpoint(str(reference["folder"] / name))
  config, model = checkpoint.config, decoder(checkpoint)
  ids = jnp.asarray(reference["ids"])[None]
  T = ids.shape[1]
  places = jnp.arange(T)[None]
  whole = jax.jit(lambda ids: model(ids, places)[0])(ids)[0]
  step = jax.jit(lambda ids, places, cache: model(ids, places, cache))
  cache, parts = init_cache(config, 1, T + 4, jnp.float32), []
  for start, stop in ((0, 20), *((i, i + 4) for i in range(20, T, 4))):
    logits, out = step(ids[:, start:stop], places[:, start:stop], cache)
    cache = out.cache
    parts.append(logits[0])
  theirs, real = reference[f"{name}_whole"], config.vocab_real
  # What transformers computes through its own cache differs from its one pass as little.
  found = [difference(whole, theirs, real), difference(np.concatenate(parts), theirs, real),
           difference(whole, reference[f"{name}_cached"], real)]
  with capsys.disabled():
    print(f"\n{name}: one pass {found[0]:.1e}, cached {found[1]:.1e}, "
          f"spread of the logits {theirs[:, :real].std():.2f}")
  assert max(found) < TOLERANCE
  assert theirs[:, :real].std() > 0.3  # the bound means something


@pytest.fixture(scope="module")
def written(reference, tmp_path_factory):
  """Folders written here, and the logits that transformers computes from them."""
  root = tmp_path_factory.mktemp("families")
  for name in NAMES:
    checkpoint = open_checkpoint(str(reference["folder"] / name))
    write_folder(root / "out" / name, checkpoint.config,
                 {key: checkpoint.read(key) for key in checkpoint.names()}, checkpoint.tokenizer())
  np.save(root / "ids.npy", reference["ids"])
  script = Path(__file__).with_name("reference_families.py")
  subprocess.run(
      [str(reference["python"]), script, "--logits", root / "out", root / "ids.npy",
       root / "out.npz"], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
  with np.load(root / "out.npz") as arrays:
    return {"folder": root / "out"} | {name: arrays[name] for name in arrays.files}


@pytest.mark.parametrize("name", NAMES)
def test_what_we_write_transformers_reads(reference, written, name):
  """The same class, logits and config as of the folder that was read (CASE 35); of a folder with a
  vision tower the text model."""
  checkpoint = open_checkpoint(str(reference["folder"] / name))
  again = open_checkpoint(str(written["folder"] / name))
  assert again.config == checkpoint.config
  for key in checkpoint.names():
    # Weights that are stored as an offset from one pass through float32 twice.
    np.testing.assert_allclose(again.read(key), checkpoint.read(key), rtol=0, atol=1e-7)
  theirs = reference[f"{name}_whole"]
  assert difference(written[name], theirs, checkpoint.config.vocab_real) < TOLERANCE
  wanted = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3",
            "qwen3_moe": "Qwen3Moe", "gemma3": "Gemma3"}[checkpoint.config.architecture]
  assert str(written[f"{name}_class"]) == f"{wanted}ForCausalLM"


def test_the_real_gemma(reference):
  """The first positions, and those beyond the window, of the real file in both (METHODS: 1e-2)."""
  arrays = reference["folder"].parent / "gemma3_270m.npz"
  path = os.environ.get("SPEC_JAX_GEMMA_GGUF")
  if not path or not arrays.is_file():
    pytest.skip("SPEC_JAX_GEMMA_GGUF named no file here or when the reference was computed")
  checkpoint = open_checkpoint(path)
  model = decoder(checkpoint)
  with np.load(arrays) as theirs:
    ids, at, wanted = (theirs[name] for name in ("ids", "at", "logits"))
  assert ids[0] == checkpoint.config.bos_id and len(ids) > checkpoint.config.sliding_window
  text = checkpoint.tokenizer().decode(ids[1:13].tolist())
  assert checkpoint.tokenizer().encode(text, add_special=True) == ids[:13].tolist()
  hidden = model.hidden(jnp.asarray(ids[None]), jnp.arange(len(ids))[None]).hidden[0]
  logits = np.asarray(model.logits(hidden[at]))
  assert np.abs(logits - wanted).max() < 1e-2 < wanted.std()
  # "<bos>The capital of France is" -> " Paris"
  assert checkpoint.tokenizer().decode([int(logits[5].argmax())]) in (" Paris", " the", " a")
