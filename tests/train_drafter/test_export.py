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
from spec_jax import drafters
from spec_jax import records as metrics
from spec_jax.errors import UserError
from spec_jax.records import RowRecords
from spec_jax.weights import open_checkpoint
from spec_jax.weights.safetensors import write_folder
from tests import tiny
from tests.train_drafter import tiny_run
from tests.weights import toy
from train_drafter import config as config_lib
from train_drafter import export, manifest, prompts
from train_drafter.generate import read_jsonl, target_id

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


# Drafters that read the target's states. Their runs are made up to the export: an untrained drafter
# stands for the trained one.


def run_of(root, kind, reduced):
  """(config, workdir, target) of a run whose stages before the export look finished."""
  cfg, workdir = tiny_run.make_config(root), root / "run"
  decoder = tiny.config(vocab_size=len(toy.vocabulary()), num_layers=8, max_position=256, bos_id=0,
                        eos_ids=(2,))
  values = {name: value if name in ("embed", "head") or value.ndim == 1 else value * 0.5
            for name, value in tiny.tensors(decoder).items()}
  write_folder(cfg.target.source, decoder, values, toy.tokenizer())
  cfg.drafter.kind, cfg.drafter.init_layers = kind, (7,)
  prompts.run(cfg, workdir)
  target = spec_jax.load_target(cfg.target.source)
  ids = np.arange(0, decoder.vocab_size, 2).astype(np.int32) if reduced else None
  module = drafters.init_learned(
      kind, target, (7,), num_taps=3, block_size=5, mask_id=1, rank=4, draft_ids=ids)
  if kind == "dspark":
    module.markov_w2.set_value(module.markov_w2[...] + 0.5)
  for stage in ("train", "evaluate"):
    opened = manifest.begin(workdir / stage, stage=stage, config=config_lib.part(cfg, "drafter"),
                            target=target_id(target))
    manifest.finish(workdir / stage, opened, {})
  drafters.save_drafter(workdir / "train" / "drafter", module, target)
  return cfg, workdir, target


def decode(cfg, target, folder, cases):
  drafter = spec_jax.load_drafter(str(folder), target)
  return drafter, spec_jax.generate(
      target, drafter, [case["prompt_ids"] for case in cases], draft_len=cfg.evaluate.draft_len,
      max_new_tokens=cfg.evaluate.max_new_tokens, batch_size=len(cases))


@pytest.mark.parametrize("kind, reduced, architecture", [
    ("eagle3", True, "LlamaForCausalLMEagle3"), ("dflash", False, "DFlashDraftModel"),
    ("dspark", True, "DFlashDraftModel")])
def test_published_form_and_its_golden_cases(tmp_path, kind, reduced, architecture):
  cfg, workdir, target = run_of(tmp_path, kind, reduced)
  export.run(cfg, workdir)
  folder = workdir / "export" / "drafter"
  assert manifest.Manifest.load(workdir / "export").complete
  config = json.loads((folder / "config.json").read_text())
  assert config["architectures"] == [architecture]
  assert config["spec_jax"]["target_weight_hash"] == target.weight_hash
  assert {"model.safetensors", "tokenizer.json", "acceptance.json"} <= {
      p.name for p in folder.iterdir()}
  content = json.loads((folder / export.ACCEPTANCE).read_text())
  cases = content["cases"]
  assert len(cases) == content["identical"] == cfg.export.prompts
  assert content["acceptance"]["reduced"] is None  # no evaluation was made
  drafter, out = decode(cfg, target, folder, cases)
  assert drafter.kind == kind
  assert out.tokens == [case["speculative"] for case in cases]
  for row, case in zip(out.records, cases, strict=True):
    assert row.accepted.tolist() == case["accepted"]
  trained, before = decode(cfg, target, workdir / "train" / "drafter", cases)
  assert trained.module.taps == drafter.module.taps
  if kind != "dspark":  # the same drafts, where the same ids can be drafted
    assert [r.accepted.tolist() for r in before.records] == [case["accepted"] for case in cases]
  assert hasattr(drafter.module, "draft_ids") == (kind == "eagle3")
  assert ("travels as d2t" if kind == "eagle3" else "does not travel") in content["note"]


def test_a_setting_without_a_place_stops_the_export(tmp_path):
  target = tiny.target()
  module = drafters.init_learned(
      "dflash", target, (1,), num_taps=1, block_size=4, mask_id=1)
  tensors = drafters.own_tensors(module) | {"rope_freqs": np.array([1, 2, 3, 4], np.float32)}
  module = drafters.build("dflash", target, tensors, module.config, module.options())
  with pytest.raises(UserError, match="rope_freqs"):
    export.write_drafter(tmp_path / "d", module, target, 3, {})
