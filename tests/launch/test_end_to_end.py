"""A real sweep: two cells on a tiny random target share everything up to the trained drafter."""

import dataclasses
import json
from pathlib import Path

import pytest

from launch import cell as cell_lib
from launch import grid, stages, status, sweep
from spec_jax.weights import open_checkpoint
from tests.train_drafter import tiny_run
from train_drafter import manifest

ROOT = Path(__file__).parents[2]
BASE = """
from train_drafter import config_file
from train_drafter.config import Config

def get_config():
  cfg = Config()
  config_file.overlay(cfg, {fields!r})
  return cfg
"""


def write_base(folder: Path) -> Path:
  """A config file of the tiny run, with only what a table of tau reads."""
  cfg = tiny_run.make_config(folder)
  cfg.train.steps = 4
  cfg.evaluate.temperatures, cfg.evaluate.speed_dtypes = (0.0,), ()
  cfg.evaluate.same_shape, cfg.export.prompts = False, 1
  fields = {f"{section}.{name}": value for section, values in dataclasses.asdict(cfg).items()
            for name, value in values.items()}
  path = folder / "base.py"
  path.write_text(BASE.format(fields=fields))
  return path


@pytest.mark.slow
def test_two_cells_share_one_trained_drafter(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(ROOT)
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
  compared = []
  monkeypatch.setattr(sweep, "compare", lambda root, runs, more: compared.extend([*runs, *more]))
  root = tmp_path / "sweep"
  found = grid.Sweep(str(write_base(tmp_path)), grid.axis("evaluate.draft_len", 1, 2))
  planned = sweep.expand(found, root)
  launch = sweep.write_record(
    root, planned, sweep="s.py", base=found.base, launcher="local", command_line="")
  one, two = cell_lib.load_cells(root)
  for cell in (one, two):  # as the launchers' processes do
    code = cell_lib.run_cell(cell, launch)
    assert code == cell_lib.DONE, (cell.folder / "log.txt").read_text()[-2000:]
  made = sorted(path.name.split("-")[0] for path in (root / "stages").iterdir() if path.is_dir())
  assert made == ["generate", "prompts", "train"]
  log = (two.folder / "log.txt").read_text()
  for stage in made:
    assert f"--stage={stage}" in (one.folder / "log.txt").read_text()
    assert f"--stage={stage}" not in log and f"{stage}: " in log and "reused" in log
    assert (one.folder / stage).resolve() == (two.folder / stage).resolve()

  # The keys cover what the manifests cover.
  layers = lambda source: open_checkpoint(source).config.num_layers
  for stage, part in stages.parts(planned[0].config, layers).items():
    known = manifest.Manifest.load(one.folder / stage).config
    assert json.loads(json.dumps(part)) == known, stage
  reports = [json.loads((c.folder / "evaluate" / "report.json").read_text()) for c in (one, two)]
  assert [r["draft_len"] for r in reports] == [1, 2]
  assert [(s.state, s.step) for s in status.read(root)] == [("done", "4/4")] * 2
  sweep.finish(root, found, planned)
  assert compared == [one.folder, two.folder, "--allow_different"]
  assert "2 cells: 2 done" in capsys.readouterr().out
