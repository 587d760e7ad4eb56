"""The exported folder: what is in it, what a fresh process reads back, and its golden cases."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax
from spec_jax import records as metrics
from spec_jax.records import RowRecords
from spec_jax.weights import open_checkpoint
from train_drafter import export
from train_drafter.generate import read_jsonl

ROOT = Path(__file__).parents[2]
IDS = [5, 9, 2, 77, 130, 41, 8, 8, 200]

# Reads the folder as any small Llama, without anything of the run.
READ_BACK = """
import sys
import numpy as np
import jax.numpy as jnp
import spec_jax
target = spec_jax.load_target(sys.argv[1])
ids = jnp.asarray([[int(i) for i in sys.argv[2].split(",")]])
np.save(sys.argv[3], target.module(ids, jnp.arange(ids.shape[1])[None])[0])
"""


@pytest.fixture(scope="module")
def exported(finished):
  cfg, workdir = finished
  return cfg, workdir, workdir / "export" / "drafter"


def test_folder_is_a_stock_llama(exported):
  cfg, workdir, folder = exported
  config = json.loads((folder / "config.json").read_text())
  target = json.loads((Path(cfg.target.source) / "config.json").read_text())
  assert config["architectures"] == ["LlamaForCausalLM"]
  assert config["num_hidden_layers"] == 2
  for name in ("vocab_size", "hidden_size", "rope_theta", "tie_word_embeddings", "eos_token_id"):
    assert config[name] == target[name]
  assert {"tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= {
      p.name for p in folder.iterdir()}
  settings = json.loads((folder / "generation_config.json").read_text())
  assert settings["num_assistant_tokens"] == cfg.evaluate.draft_len
  assert settings["num_assistant_tokens_schedule"] == "constant"
  assert settings["assistant_confidence_threshold"] == 0
  assert settings["eos_token_id"] == target["eos_token_id"]


def test_fresh_process_reads_the_logits_of_the_trained_drafter(exported, tmp_path):
  cfg, workdir, folder = exported
  target = spec_jax.load_target(cfg.target.source)
  module = spec_jax.load_drafter(str(workdir / "train" / "drafter"), target).module
  tokens = jnp.asarray([IDS])
  hidden = module.train_hidden(tokens, jnp.arange(len(IDS))[None], None, target.module)
  wanted = np.asarray(target.module.logits(hidden))
  out = tmp_path / "logits.npy"
  subprocess.run(
      [sys.executable, "-c", READ_BACK, str(folder), ",".join(map(str, IDS)), str(out)],
      check=True, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"})
  np.testing.assert_allclose(np.load(out), wanted, atol=1e-5, rtol=0)


def test_embedding_and_head_are_the_targets(exported):
  cfg, _, folder = exported
  ours, target = open_checkpoint(str(folder)), open_checkpoint(cfg.target.source)
  for name in ("embed", "head"):
    np.testing.assert_array_equal(ours.read(name), target.read(name))
  assert not np.array_equal(ours.read("layers.0.wq"), target.read("layers.0.wq"))  # was trained


def test_golden_cases_are_what_decoding_gives(exported):
  cfg, workdir, folder = exported
  content = json.loads((folder / export.ACCEPTANCE).read_text())
  target = spec_jax.load_target(cfg.target.source, dtype=content["dtype"])
  drafter = spec_jax.load_drafter(str(folder), target, content["drafter_dtype"])
  cases = content["cases"]
  prompts = [case["prompt_ids"] for case in cases]
  options = dict(max_new_tokens=content["max_new_tokens"], batch_size=len(prompts))
  plain = spec_jax.generate(target, None, prompts, **options)
  assert plain.tokens == [case["plain"] for case in cases]
  out = spec_jax.generate(target, drafter, prompts, draft_len=content["draft_len"], **options)
  assert out.tokens == [case["speculative"] for case in cases]
  assert content["identical"] == len(cases) == cfg.export.prompts
  rows = [RowRecords(c["proposed"], c["accepted"], c["emitted"], c["finish_reason"])
          for c in cases]
  assert content["acceptance"]["exported"]["tau"] == pytest.approx(metrics.tau(rows))
  for row, theirs in zip(rows, out.records, strict=True):
    np.testing.assert_array_equal(row.accepted, theirs.accepted)


def test_both_vocabularies_are_reported(exported):
  cfg, workdir, folder = exported
  content = json.loads((folder / export.ACCEPTANCE).read_text())
  assert "does not travel" in content["note"]
  assert content["acceptance"]["reduced"]["prompts"] == cfg.export.prompts
  assert {case["category"] for case in content["cases"]} == {"structured", "code"}
  known = {p["id"] for p in read_jsonl(workdir / "prompts" / "eval.jsonl")}
  assert {case["id"] for case in content["cases"]} <= known


def test_drafter_of_the_target_belongs_to_the_run(exported):
  cfg, _, folder = exported
  facts = json.loads((folder / "config.json").read_text())["spec_jax"]
  assert facts["draft_len"] == cfg.evaluate.draft_len
  assert facts["target_weight_hash"] == spec_jax.load_target(cfg.target.source).weight_hash


def test_golden_prompts_come_from_different_categories():
  prompts = [{"category": c, "id": i} for i, c in enumerate("aabbc")]
  assert [p["id"] for p in export.golden_prompts(prompts, 4)] == [0, 2, 4, 1]
  assert len(export.golden_prompts(prompts, 9)) == 5
