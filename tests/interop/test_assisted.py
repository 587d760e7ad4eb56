"""An exported small_lm drafts in transformers as it does here: the same drafts are accepted in
every round of `generate(assistant_model=...)` (reference_assisted.py) and of our loop, greedy, in
float32, with a constant number of drafts.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import spec_jax
from spec_jax import drafters
from spec_jax.weights.forms import Form
from spec_jax.weights.safetensors import write_folder
from tests import families, tiny
from train_drafter import export

pytestmark = pytest.mark.interop
K, TOKENS = 4, 40


@pytest.fixture(scope="module")
def python():
  path = Path(os.environ.get("SPEC_JAX_INTEROP_DIR", ".interop")) / "assisted.npz"
  if not path.is_file():
    pytest.skip(f"no {path}: run `make interop`")
  with np.load(path) as arrays:
    return str(arrays["python"])


@pytest.mark.parametrize("family, layers", [
    ("llama", (0, 1)), ("llama", (0, 2)), ("qwen3", (0, 1)), ("qwen2", (0, 1))])
def test_the_same_drafts_are_accepted_in_every_round(tmp_path, python, family, layers):
  changes = families.CHANGES.get(family, {})
  cfg = tiny.config(**changes | {"num_layers": 3, "bos_id": 0, "pad_id": 0})
  values = tiny.tensors(cfg)
  target = tiny.make(cfg, values, tiny.tokenizer())
  write_folder(tmp_path / "target", cfg, values, tiny.tokenizer())
  module = drafters.init_from_target(target, layers)
  export.write_drafter(tmp_path / "drafter", module, target, Form("hf", draft_len=K), {})
  drafter = spec_jax.load_drafter(str(tmp_path / "drafter"), target)
  prompts = tiny.prompts(6, seed=3)
  ours = spec_jax.generate(
      target, drafter, prompts, draft_len=K, max_new_tokens=TOKENS, batch_size=len(prompts))
  # The first token of an answer comes from our prefill; theirs would draft it.
  asked = [([*ids, answer[0]], TOKENS - 1)
           for ids, answer in zip(prompts, ours.tokens, strict=True)]
  (tmp_path / "prompts.json").write_text(json.dumps(asked))
  subprocess.run(
      [python, Path(__file__).with_name("reference_assisted.py"), "--read", tmp_path / "target",
       tmp_path / "drafter", tmp_path / "prompts.json", tmp_path / "out.json"],
      check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
  theirs = json.loads((tmp_path / "out.json").read_text())
  accepted = []
  for answer, row, found in zip(ours.tokens, ours.records, theirs, strict=True):
    assert answer[1:] == found["tokens"] == found["plain"]
    assert row.rounds == len(found["rounds"]) > 1
    # Near the end they draft no further than the budget; we cut what goes beyond it.
    for (proposed, matched), A, E in zip(found["rounds"], row.accepted, row.emitted, strict=True):
      assert matched + 1 == E
      assert proposed < K or matched == A
    accepted += [matched for proposed, matched in found["rounds"] if proposed == K]
  assert len(set(accepted)) > 2  # rounds of every kind were compared
