"""The exported folder: what is in it, what a fresh process reads back, and its golden cases."""

import ast
import json
import os
import shlex
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
from spec_jax.weights.forms import Form
from spec_jax.weights.safetensors import write_folder
from tests import tiny
from tests.train_drafter import tiny_run
from tests.weights import toy
from train_drafter import card, export, manifest, prompts, serving
from train_drafter import config as config_lib
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
  # A folder that is handed on names no folder of this machine.
  root = str(Path(cfg.target.source).parent)
  for file in ("config.json", "generation_config.json", export.ACCEPTANCE, card.FILE_NAME):
    assert root not in (folder / file).read_text(), file
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
    export.write_drafter(tmp_path / "d", module, target, Form(), {})


# Formats, the model card and the commands.


@pytest.mark.parametrize("kind, reduced, form", [
    ("eagle3", True, "speculators"), ("dspark", True, "vllm")])
def test_formats_stand_beside_each_other(tmp_path, capsys, monkeypatch, kind, reduced, form):
  cfg, workdir, target = run_of(tmp_path, kind, reduced)
  cfg.export.format, cfg.export.target_name = form, "org/name"
  export.run(cfg, workdir)
  folder = workdir / "export" / form
  assert {"README.md", "acceptance.json", "config.json", "model.safetensors"} <= {
      p.name for p in folder.iterdir()}
  fields = {"method": "dspark", "model": str(folder), "num_speculative_tokens": 3}
  serve = {"speculators": f"vllm serve {folder}", "vllm": (
      f"vllm serve org/name --speculative-config '{json.dumps(fields)}'")}[form]
  assert serve in capsys.readouterr().out.splitlines()
  content = json.loads((folder / export.ACCEPTANCE).read_text())
  assert "travels as d2t" in content["note"]
  drafter, out = decode(cfg, target, folder, content["cases"])
  assert hasattr(drafter.module, "draft_ids")
  assert [r.accepted.tolist() for r in out.records] == [
      case["accepted"] for case in content["cases"]]
  if form == "vllm":
    return
  export.run(cfg, workdir)  # finished: nothing is decoded again
  assert f"reused\n{serve}" in capsys.readouterr().out
  cfg.export.license = "mit"
  cfg.export.target_name = "org/other"
  with monkeypatch.context() as patch:  # stopped in the middle
    patch.setattr(export, "write_drafter", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
      export.run(cfg, workdir)
  export.run(cfg, workdir)  # under other names it is written again
  assert "reused" not in capsys.readouterr().out
  assert 'license: "mit"' in (folder / "README.md").read_text()
  assert "org/other" in (folder / "config.json").read_text()
  cfg.export.format = "sglang"
  export.run(cfg, workdir)
  assert (workdir / "export" / "sglang" / export.ACCEPTANCE).is_file()
  counts = manifest.Manifest.load(workdir / "export").counts
  assert sorted(counts["named"]) == ["sglang", "speculators"]


def test_the_card_has_the_figures_of_the_report(exported):
  cfg, workdir, folder = exported
  text = (folder / "README.md").read_text()
  report = json.loads((workdir / "evaluate" / "report.json").read_text())
  for entry in report["settings"]:
    group = entry["all"]
    assert f"| T={entry['temperature']:g} | all | {group['prompts']} | {group['tau']:.2f} (" in text
    assert f"| {group['acceptance_rate']:.1%} | {group['survival'][0]:.1%} |" in text
  train = manifest.Manifest.load(workdir / "train").counts
  assert f"supervised {train['supervised']}" in text
  assert "Licence of this drafter: not stated" in text and "license:" not in text
  assert f'base_model: "{Path(cfg.target.source).name}"' in text
  assert str(Path(cfg.target.source).parent) not in text  # a path of this machine
  assert "tokens emitted / rounds" in text and "assistant_model" in text


def test_a_card_without_a_report_says_so(tmp_path):
  cfg = tiny_run.make_config(tmp_path)
  cfg.export.license, cfg.train.init_from = "apache-2.0", "somewhere"
  card.write(tmp_path / "d", cfg, tmp_path, tiny.weak_drafter().module, "vllm", "org/name", "")
  text = (tmp_path / "d" / "README.md").read_text()
  assert "Not measured: this run has no `report.json`." in text
  assert '\nlicense: "apache-2.0"\n' in text and 'base_model: "org/name"' in text
  assert "SHA-256 unknown" in text and "- train: no counts recorded" in text
  assert '"method": "draft_model"' in text
  assert not [word for word in text.split() if word.endswith("%")]  # no figure is invented


@pytest.mark.parametrize("kind, form, wanted", [
    ("small_lm", "vllm", ['vllm serve org/t --speculative-config',
                          '{"method": "draft_model", "model": "d", "num_speculative_tokens": 4}']),
    ("small_lm", "sglang", ["--speculative-algorithm STANDALONE", "--speculative-num-steps 4",
                            "--speculative-eagle-topk 1", "--speculative-num-draft-tokens 5"]),
    ("small_lm", "hf", ["assistant_model=drafter", 'name, draft = "org/t", "d"\n']),
    ("eagle3", "vllm", ['"method": "eagle3"']),
    ("eagle3", "sglang", ["--model-path org/t --speculative-algorithm EAGLE3 "
                          "--speculative-draft-model-path d", "--speculative-num-steps 4"]),
    ("eagle3", "hf", ['ea_model_path="d"']), ("eagle3", "speculators", ["vllm serve d"]),
    ("dflash", "sglang", ["DFLASH", "--speculative-num-draft-tokens 5"]),
    ("dflash", "hf", ["dflash generate transformers --model org/t --draft d --block-size 5"]),
    ("dspark", "sglang", ["DSPARK", "--speculative-dspark-block-size 4"]),
    ("dspark", "hf", ["python -m spec_jax --target=org/t --drafter=d --draft_len=4"])])
def test_commands(kind, form, wanted):
  text = serving.command(kind, form, "d", "org/t", 4)
  assert "'\"'\"'" not in text  # quotes within quotes, which nobody can read
  for part in wanted:
    assert part in text


@pytest.mark.parametrize("kind", ["small_lm", "eagle3"])
@pytest.mark.parametrize("name", ["org/t", "/a folder/it's", 'say "t"', "back\\slash"])
def test_a_printed_program_holds_the_names(kind, name):
  """The shell's word is a program of Python, with the names as they are."""
  *start, program = shlex.split(serving.command(kind, "hf", name, f"{name}2", 4))
  assert start == ["python", "-c"]
  texts = {n.value for n in ast.walk(ast.parse(program)) if isinstance(n, ast.Constant)}
  assert {name, f"{name}2"} <= texts


def test_a_small_model_is_no_folder_of_speculators(tmp_path):
  cfg = tiny_run.make_config(tmp_path)
  cfg.export.format = "speculators"
  with pytest.raises(UserError, match="export.format='speculators' holds no small_lm"):
    config_lib.validate(cfg)
  with pytest.raises(UserError, match="holds no small_lm"):
    serving.command("small_lm", "speculators", "d", "t", 3)


def test_a_small_model_of_its_own_keeps_its_ends(tmp_path):
  """A drafter that was started from another small model is exported whole."""
  small = tiny.config(hidden_size=24, bos_id=0, eos_ids=(2,))
  write_folder(tmp_path / "m", small, tiny.tensors(small, 4), tiny.tokenizer())
  target = tiny.target()
  module = spec_jax.load_drafter(str(tmp_path / "m"), target).module
  export.write_drafter(tmp_path / "d", module, target, Form(), {})
  ours, theirs = (open_checkpoint(str(tmp_path / name)) for name in "dm")
  for name in theirs.names():
    np.testing.assert_array_equal(ours.read(name), theirs.read(name), err_msg=name)
