"""Every stage on a target that is no Llama, with int8 weights: DFlash beside a tiny Qwen3."""

import json

import numpy as np
import pytest

import spec_jax
from spec_jax.models.quant import Int8Weight
from spec_jax.weights.safetensors import write_folder
from tests import families
from tests.train_drafter import tiny_run
from tests.weights import toy
from train_drafter import evaluate, export, extract, generate, prompts, report, train


def make_config(root):
  cfg = tiny_run.make_config(root)
  config = families.config(
      "qwen3", vocab_size=len(toy.vocabulary()), num_layers=5, max_position=256, bos_id=0,
      eos_ids=(2,), pad_id=0)
  write_folder(root / "target", config, families.tensors(config), toy.tokenizer())
  cfg.target.dtype = "int8w"
  cfg.features.seq_len, cfg.features.batch_rows = 64, 2
  cfg.drafter.kind, cfg.drafter.init_layers = "dflash", (4,)
  cfg.drafter.num_taps, cfg.drafter.block_size, cfg.drafter.anchors = 2, 4, 8
  cfg.drafter.mask_id = 3  # all three control tokens of this vocabulary are in use
  cfg.train.steps = 4
  cfg.evaluate.temperatures, cfg.evaluate.more_draft_lens = (0.0,), ()
  cfg.evaluate.batch_sizes = (1,)
  cfg.evaluate.dtype = cfg.evaluate.drafter_dtype = cfg.evaluate.identity_dtype = "int8w"
  cfg.evaluate.speed_dtypes, cfg.evaluate.cost_dtypes = ("int8w",), ()
  cfg.evaluate.max_new_tokens = 12
  cfg.evaluate.speed_prompts = 2
  return cfg


@pytest.mark.slow
def test_dflash_through_all_stages_in_int8(tmp_path, capsys):
  cfg, workdir = make_config(tmp_path), tmp_path / "run"
  for stage in (prompts, generate, extract, train, evaluate, report, export):
    stage.run(cfg, workdir)
  said = " ".join(capsys.readouterr().out.split())
  assert "int8w, dflash" in said
  made = json.loads((workdir / "evaluate" / "report.json").read_text())
  report.validate_report(made)
  assert {row["dtype"] for row in made["speed"]} == {"int8w"}
  assert {row["drafter"] for row in made["speed"]} == {"dflash", "ngram"}
  whole, *_ = made["identity"]
  assert whole["dtype"] == "int8w" and whole["identical_same_shape"] == 1.0
  assert made["settings"][0]["all"]["rounds"] > 0
  certificate = json.loads((workdir / "evaluate" / "certificate.json").read_text())
  assert certificate["dtype"] == "int8w" and "int8" in certificate["drafter_dtypes"]
  assert certificate["verdict"] == "bitwise"
  memory = json.loads((workdir / "evaluate" / "parts" / "memory.json").read_text())
  assert memory["target"]["dtype"] == "int8w"
  assert memory["target"]["parameter_bytes"] < 1.5 * memory["target"]["parameters"]
  golden = json.loads((workdir / "export" / "drafter" / "acceptance.json").read_text())
  assert golden["dtype"] == golden["drafter_dtype"] == "int8w"
  assert golden["identical"] == len(golden["cases"]) == cfg.export.prompts
  target = spec_jax.load_target(cfg.target.source, "int8w")
  loaded = spec_jax.load_drafter(str(workdir / "export" / "drafter"), target).module
  ours = spec_jax.load_drafter(str(workdir), target).module
  for a, b in ((loaded.fc[...], ours.fc[...]), (loaded.layers[0].wq[...], ours.layers[0].wq[...])):
    assert isinstance(a, Int8Weight)
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
