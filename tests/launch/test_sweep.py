"""Sweeps from plan to table: refusals, sharing, failing, stopping and going on."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

from launch import cell as cell_lib
from launch import grid, local, status, sweep
from spec_jax.errors import UserError
from tests.launch import fakes
from train_drafter import __main__ as cli
from train_drafter import manifest

ROOT = Path(__file__).parents[2]
LOSSES = grid.axis("train.loss", "ce", "fkl")


def cells_of(root):
  return {cell.name: cell for cell in cell_lib.load_cells(root)}


# Planning.


def test_an_invalid_cell_names_itself_and_its_field_and_nothing_starts(tmp_path):
  for cells, said in [
    (grid.axis("train.loss", "ce", "cee"), r"cell 2 \(loss=cee\): train.loss='cee' must be one of"),
    (grid.axis("train.los", "ce"), r"cell 1 \(train.los=ce\): train.los: no such field; the nearest"
                                   " is train.loss"),
    (grid.axis("drafter.init_layers", (0, 30)), r"init_layers=\(0, 30\) must name layers 0..29"),
    (grid.axis("train.lr", "fast"), r"train.lr='fast' must be of type float"),
    ([*LOSSES, *LOSSES], "cells 1 and 3 are both named loss=ce"),
    ([], "the sweep has no cells"),
    (grid.where(LOSSES, lambda cell: False), "the sweep has no cells"),
    (grid.axis("train.loss"), "the sweep has no cells"),
    (["train.loss=ce"], "cell 1 is 'train.loss=ce', not a dict of fields"),
    ([{3: "ce"}], "cell 1 is {3: 'ce'}, not a dict of fields"),
  ]:
    with pytest.raises(UserError, match=said):
      fakes.plan(tmp_path, cells)
  assert not (tmp_path / "sweep").exists()


def test_files_that_are_no_sweep_are_one_line(tmp_path):
  path = tmp_path / "sweep.py"
  for text, said in [
    ("X = 1", "sweep.py: has no function get_sweep()"),
    ("def get_sweep(:", "sweep.py:1: SyntaxError"),
    ("def get_sweep():\n  return 3", "sweep.py: get_sweep() returned int, not a Sweep"),
    ("from launch import grid\n\ndef get_sweep():\n"
     "  return grid.where(grid.axis('a', 1), lambda c: c['b'])", "sweep.py:4: KeyError: 'b'"),
  ]:
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(said)):
      sweep.load(str(path))
  with pytest.raises(UserError, match="the sweep's base=/nowhere.py: no such file"):
    sweep.expand(grid.Sweep("/nowhere.py", LOSSES), tmp_path)
  with pytest.raises(UserError, match=f"--workdir={path}: is a file, not a folder"):
    sweep.write_record(path, [], sweep="", base="", launcher="local", command_line="")


def test_cells_share_the_stages_their_fields_leave_alone(tmp_path):
  def shared(a, b):
    first, second = (p.stages for p in fakes.plan(tmp_path, [a, b]))
    return [stage for stage in first if first[stage] == second.get(stage)]

  tapped = {"drafter.kind": "dflash"}
  assert shared({"train.loss": "ce"}, {}) == ["prompts", "generate"]
  assert shared({"evaluate.draft_len": 2}, {}) == ["prompts", "generate", "train"]
  assert shared({"generate.top_p": 0.9}, {}) == ["prompts"]
  assert shared({"prompts.count": 5}, {}) == []
  assert shared(tapped, {}) == ["prompts", "generate"]
  assert shared(tapped, {"drafter.kind": "dspark", "train.lr": 0.1}) == [
    "prompts", "generate", "extract"]
  assert shared(tapped, {"drafter.kind": "eagle3"}) == ["prompts", "generate"]  # taps other layers
  assert shared({"train.keep": 5}, {}) == ["prompts", "generate", "train"]


def test_an_edited_data_file_is_another_stage(tmp_path):
  data = tmp_path / "data.jsonl"
  cells = [{"prompts.path": str(data)}]
  data.write_text('{"messages": []}\n')
  first = fakes.plan(tmp_path, cells)[0].stages
  assert fakes.plan(tmp_path, cells)[0].stages == first
  data.write_text('{"messages": [1]}\n')
  second = fakes.plan(tmp_path, cells)[0].stages
  assert all(first[stage] != second[stage] for stage in first)


@pytest.mark.parametrize("name", [
  "losses", "init_layers", "num_layers", "draft_len", "temperature", "data"])
@pytest.mark.parametrize("arg", ["", ":smoke"])
def test_the_command_lines_of_every_sweep_say_what_was_checked(name, arg, tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(sweep, "_layers", lambda source: 30)
  found = sweep.load(f"configs/sweeps/{name}.py{arg}")
  planned = sweep.expand(found, tmp_path)
  assert len(planned) == len(found.cells) >= 2
  for cell in planned:
    values = flags.FlagValues()
    argv = cell.command[2:]  # absl takes the first as the program's name
    cli.define_flags(values, argv)
    assert cli.parse(argv, values).config == cell.config
    assert cell.config.train.steps and not cell.config.train.budget_s  # cells are comparable
  with pytest.raises(UserError, match=f"{name}.py:big is unknown"):
    sweep.load(f"configs/sweeps/{name}.py:big")


def test_the_same_folder_takes_no_other_sweep(tmp_path):
  root, *_ = fakes.write(tmp_path, LOSSES)
  fakes.write(tmp_path, [*LOSSES, {"train.loss": "tv"}])  # one more is no other sweep
  assert len(cells_of(root)) == 3
  base = fakes.BASE.replace("return cfg", "cfg.train.lr = 0.5\n  return cfg")
  old, fakes.BASE = fakes.BASE, base
  try:
    with pytest.raises(UserError, match=r"loss=ce was made with train.lr=0.004, .* has 0.5"):
      fakes.write(tmp_path, LOSSES)
  finally:
    fakes.BASE = old
  assert len(cells_of(root)) == 3


# Running.


def test_shared_stages_are_made_once_and_done_cells_stay(tmp_path, capsys):
  root, names, launch = fakes.write(tmp_path, LOSSES)
  assert [s.state for s in status.read(root)] == ["queued", "queued"]
  assert local.launch(root, names, launch, parallel=2) == 0
  lines = fakes.made(root)
  assert sorted(line.split()[0] for line in lines) == sorted(
    ["prompts", "generate", "train", "train", "evaluate", "evaluate"])
  for name, cell in cells_of(root).items():
    for stage, folder in cell.stages.items():
      link = cell.folder / stage
      assert link.is_symlink() and link.resolve() == folder.resolve(), (name, stage)
    assert not (cell.folder / "evaluate").is_symlink()
  states = status.read(root)
  assert [(s.state, s.tau, s.step) for s in states] == [("done", "1.50 (1.40-1.60)", "4/4")] * 2
  assert "loss=ce: done, tau 1.50" in capsys.readouterr().out
  assert local.launch(root, names, "again") == 0
  assert fakes.made(root) == lines
  assert "2 of 2 cells are done already" in capsys.readouterr().out


def test_a_failed_cell_says_why_and_stops_no_other(tmp_path, capsys):
  root, names, launch = fakes.write(tmp_path, [
    {"train.loss": "ce", "prompts.system": "fail=train"},
    {"train.loss": "fkl"}, {"train.loss": "tv", "prompts.system": "crash=train"}])
  assert local.launch(root, names[:2], launch) == 1
  assert cell_lib.run_cell(cells_of(root)[names[2]], launch) == cell_lib.FAILED
  bad, good, dead = status.read(root)
  assert (bad.state, bad.note, good.state) == ("failed", "train.field=1 is wrong", "done")
  assert (dead.state, dead.note) == ("failed", "stage train was killed by SIGKILL")
  out = capsys.readouterr().out
  assert f"{names[0]}: failed: train.field=1 is wrong" in out and "log.txt" in out
  assert f"{names[1]}: done" in out


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
  root, names, launch = fakes.write(tmp_path, LOSSES)
  (root / "cells").write_text("")
  process = start(root, names, launch)
  out = process.communicate(timeout=30)[0]
  assert process.returncode == 1 and "Traceback" not in out
  for name in names:
    assert f"error: {root}/cells/{name}: cannot be made (Not a directory)" in out
    assert f"{name}: ended with status 2" in out


def test_a_shared_stage_that_fails_is_tried_once_in_a_launch(tmp_path):
  cells = [{"train.loss": loss, "prompts.system": "fail=generate"} for loss in ("ce", "fkl")]
  root, names, launch = fakes.write(tmp_path, cells)
  cells = [cells_of(root)[name] for name in names]
  tries = lambda: sum((c.folder / "log.txt").read_text().count("--stage=generate") for c in cells
                      if (c.folder / "log.txt").exists())
  assert [cell_lib.run_cell(c, launch) for c in cells] == [cell_lib.FAILED] * 2
  assert tries() == 1
  notes = [s.note for s in status.read(root)]
  assert notes == ["generate.field=1 is wrong",
                   f"generate failed in cell {names[0]}: generate.field=1 is wrong"]
  assert cell_lib.run_cell(cells[1], "the next launch") == cell_lib.FAILED
  assert tries() == 2


def start(root, names, launch, *more):
  code = (f"import sys; from pathlib import Path; from launch import local; "
          f"sys.exit(local.launch(Path({str(root)!r}), {names!r}, {launch!r}, parallel=2))")
  return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_a_stopped_sweep_saves_its_work_and_goes_on(tmp_path):
  """Two cells share a slow stage: one makes it, one waits for it; both end and both go on. The
  launcher gets SIGINT and tells the cells with SIGTERM, so both handlers are met."""
  cells = [{"train.loss": loss, "prompts.system": "slow=generate"} for loss in ("ce", "fkl")]
  root, names, launch = fakes.write(tmp_path, cells)
  process = start(root, names, launch)
  states = lambda: sorted(s.state for s in status.read(root))
  fakes.wait_for(lambda: states() == ["running", "waiting"] and all(
    s.stage == "generate" for s in status.read(root)))
  assert cell_lib.run_cell(cells_of(root)[names[0]]) == cell_lib.ELSEWHERE
  process.send_signal(signal.SIGINT)
  out = process.communicate(timeout=30)[0]
  assert process.returncode == 128 + signal.SIGINT, out
  assert states() == ["stopped", "stopped"] and "Traceback" not in out
  assert [line.split()[0] for line in fakes.made(root)] == ["prompts"]
  (root / "go").touch()
  assert local.launch(root, names, "again") == 0
  made = [line.split() for line in fakes.made(root)]
  assert [(m[0], m[2]) for m in made if m[0] == "generate"] == [("generate", "resumed")]
  assert states() == ["done", "done"]


def test_a_killed_cell_leaves_no_lock_behind_its_stage(tmp_path):
  """The lock of a stage lives as long as the program that works in its folder, so a second cell
  never writes beside an orphan."""
  root, names, launch = fakes.write(tmp_path, [{"prompts.system": "slow=generate"}])
  cell = cells_of(root)[names[0]]
  lock = cell.stages["generate"].with_name(cell.stages["generate"].name + ".lock")
  process = subprocess.Popen(
    [sys.executable, "-m", "launch.cell", f"--workdir={root}", f"--cell={names[0]}"], cwd=ROOT,
    env={**os.environ, "PYTHONPATH": str(ROOT)})
  fakes.wait_for(lambda: (cell.stages["generate"] / "part").exists())
  process.kill()
  process.wait()
  assert cell_lib.is_locked(lock) and status.read(root)[0].state == "running"
  (root / "go").touch()  # the orphan ends
  fakes.wait_for(lambda: not cell_lib.is_locked(lock))
  assert status.read(root)[0].state == "lost"
  assert cell_lib.run_cell(cell) == cell_lib.DONE
  assert sum(line.startswith("generate ") for line in fakes.made(root)) == 1


def test_a_cell_that_another_process_runs_is_waited_for(tmp_path, capsys):
  """The second launch of a sweep, or the first after a launcher was killed: the orphan goes on."""
  root, names, launch = fakes.write(tmp_path, [{"prompts.system": "slow=train"}])
  process = subprocess.Popen(
    [sys.executable, "-m", "launch.cell", f"--workdir={root}", f"--cell={names[0]}"], cwd=ROOT,
    env={**os.environ, "PYTHONPATH": str(ROOT)})
  train = cells_of(root)[names[0]].stages["train"]
  fakes.wait_for(lambda: (train / "part").exists())
  second = start(root, names, "second")
  assert "another process runs it; waiting for that one" in (
    second.stdout.readline() + second.stdout.readline())
  assert second.poll() is None
  (root / "go").touch()
  assert process.wait(timeout=20) == cell_lib.DONE
  out = second.communicate(timeout=30)[0]
  assert second.returncode == 0 and f"{names[0]}: done, tau 1.50" in out, out
  assert "started" not in out  # it was done by then
  assert sum(line.startswith("train ") for line in fakes.made(root)) == 1


@pytest.mark.parametrize("content", [
  "{", "[]", "{}", '{"cells": 3}', '{"cells": [1]}', '{"cells": [{"name": "a"}]}',
  '{"cells": [{"name": 3, "overrides": {}, "command": [], "stages": {}, "config": {}}]}'])
def test_a_damaged_record_is_one_line(tmp_path, content):
  root, names, launch = fakes.write(tmp_path, LOSSES)
  (root / "sweep.json").write_text(content)
  for read in (status.read, cell_lib.load_cells, lambda root: fakes.write(tmp_path, LOSSES)):
    with pytest.raises(UserError, match="sweep.json: damaged .*; remove it, and the same launch"):
      read(root)
  (root / "sweep.json").unlink()
  fakes.write(tmp_path, LOSSES)
  assert [s.name for s in status.read(root)] == names


def test_a_field_that_is_new_since_then_is_no_other_sweep(tmp_path):
  root, *_ = fakes.write(tmp_path, LOSSES)
  content = json.loads((root / "sweep.json").read_text())
  del content["cells"][0]["config"]["storage"], content["cells"][1]["config"]["train"]["beta2"]
  (root / "sweep.json").write_text(json.dumps(content))
  fakes.write(tmp_path, LOSSES)


def test_a_warned_step_asks_to_be_run_again(tmp_path):
  """SIGTERM at the program alone, as a scheduler warns a step before its time limit."""
  root, names, launch = fakes.write(tmp_path, [{"prompts.system": "slow=train"}])
  cell = cells_of(root)[names[0]]
  process = subprocess.Popen(
    [sys.executable, "-m", "launch.cell", f"--workdir={root}", f"--cell={names[0]}"], cwd=ROOT,
    env={**os.environ, "PYTHONPATH": str(ROOT)})
  fakes.wait_for(lambda: (cell.stages["train"] / "part").exists())
  fakes.wait_for(lambda: "train: at work" in (cell.folder / "log.txt").read_text())
  children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
  os.kill(int(children[0]), signal.SIGTERM)
  assert process.wait(timeout=20) == cell_lib.AGAIN
  assert status.read(root)[0].state == "stopped"


def test_inputs_that_changed_are_refused(tmp_path):
  root, names, launch = fakes.write(tmp_path, [{"train.loss": "ce"}])
  cell = cells_of(root)[names[0]]
  assert cell_lib.run_cell(cell, launch) == cell_lib.DONE
  content = json.loads((root / "sweep.json").read_text())
  content["cells"][0]["stages"]["prompts"] = "stages/prompts-other"
  (root / "sweep.json").write_text(json.dumps(content))
  assert cell_lib.run_cell(cells_of(root)[names[0]], launch) == cell_lib.FAILED
  assert "its inputs have changed" in status.read(root)[0].note


def test_a_refused_stage_behind_a_link_leaves_no_claim(tmp_path):
  shared, link = tmp_path / "stages" / "train-1", tmp_path / "cell" / "train"
  shared.mkdir(parents=True)
  link.parent.mkdir()
  cell_lib._link(link, shared)
  manifest.begin(link, stage="train", config={})
  assert manifest.withdraw(link) and not shared.exists()
  shared.mkdir()  # as the next cell does
  assert not manifest.begin(link, stage="train", config={"other": 1}).complete


def test_the_estimate_of_tau():
  assert status.estimate({"greedy_match": 0.5}, 2) == 1.75
  assert status.estimate({"greedy_match": 0.5, "greedy_match_tau": 2.5}, 2) == 2.5


def test_the_table_counts_the_states(capsys):
  from rich.console import Console
  states = [status.State("a[b]", "done", tau="1.5"), status.State("c", "failed", note="no [x]")]
  status.show(states, Console(width=100))
  out = capsys.readouterr().out
  assert "2 cells: 1 done, 1 failed" in out and "a[b]" in out and "no [x]" in out


def test_finished_cells_are_compared(tmp_path, capsys, monkeypatch):
  runs, called = [tmp_path / "a", tmp_path / "b"], []
  sweep.compare(tmp_path, runs[:1])
  assert "nothing to compare" in capsys.readouterr().out

  def run(words, check):
    called.append(words[1:])
    return subprocess.CompletedProcess(words, 3)

  monkeypatch.setattr(sweep.subprocess, "run", run)
  sweep.compare(tmp_path, runs, ["--x"])
  assert called == [["-m", "launch.compare", *map(str, runs), f"--out={tmp_path / 'compare'}",
                     "--x"]]
  assert "launch.compare ended with status 3" in capsys.readouterr().out


def test_the_analysis_of_a_sweep_reads_finished_cells(tmp_path, capsys, monkeypatch):
  root, names, launch = fakes.write(tmp_path, [{}])
  local.launch(root, names, launch)
  seen = {}
  planned = fakes.plan(tmp_path, [{}])
  sweep.finish(root, grid.Sweep("b", [{}], {}, lambda runs: seen.update(runs) or "the trend",
                                lambda runs: f"<svg>{len(runs)}</svg>"), planned)
  assert seen == {"base": root / "cells" / "base"}
  assert "the trend" in capsys.readouterr().out
  assert (root / "analysis.txt").read_text() == "the trend\n"
  assert (root / "analysis.svg").read_text() == "<svg>1</svg>\n"
  with pytest.raises(UserError, match="the analysis of the sweep failed: KeyError: 'other'"):
    sweep.finish(root, grid.Sweep("b", [{}], {}, lambda runs: runs["other"]), planned)
