"""Whole training runs in memory: stopped and resumed, out of budget, and with bad numbers."""

import dataclasses
import json
import os
import signal
import types

import numpy as np
import pytest
import safetensors.numpy

from spec_jax.errors import UserError
from tests import tiny
from tests.train_drafter.training import documents, make_config, module_of, pack
from train_drafter import metrics as metrics_lib
from train_drafter import train
from train_drafter.batches import Packer


class Killed(Exception):
  """Stands for a signal that cannot be caught."""


@pytest.fixture
def shared(monkeypatch):
  """Runs of equal settings share one compiled step, as two processes would have equal ones."""
  real = train.make_setup

  def make_setup(cfg, target, module, steps):
    setup, state = real(cfg, target, module, steps)
    return SETUPS.setdefault((steps, repr(cfg.train)), setup), state

  monkeypatch.setattr(train, "make_setup", make_setup)
  return monkeypatch


SETUPS: dict = {}


class Recorder(Packer):
  """A packer that remembers which batches were made: one more than a stopped run has used."""

  def __init__(self, *args, **options):
    super().__init__(*args, **options)
    self.taken = []

  def batch(self, step):
    batch = super().batch(step)
    self.taken.append(batch["tokens"].tobytes())
    return batch


def fit(cfg, folder, docs=None, began=0.0):
  docs = documents() if docs is None else docs
  packer = pack(docs[cfg.train.validation:], cfg, Recorder)
  folder.mkdir(exist_ok=True)
  held = pack(docs[:cfg.train.validation], cfg).in_order()
  try:
    return train.fit(cfg, tiny.target(), module_of(), packer, held, folder, began), packer.taken
  except (Killed, SystemExit) as stopped:
    return stopped, packer.taken


def tensors(folder):
  return safetensors.numpy.load_file(folder / "drafter" / "drafter.safetensors")


def metrics(folder, split=None):
  rows = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
  rows = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
  return [row for row in rows if split in (None, row["split"])]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
  """Twenty steps in one go: its result, the batches and the folder."""
  folder = tmp_path_factory.mktemp("straight")
  cfg = make_config()
  setup, _ = train.make_setup(cfg, tiny.target(), module_of(), 20)
  SETUPS.setdefault((20, repr(cfg.train)), setup)
  with pytest.MonkeyPatch.context() as patch:
    real = train.make_setup
    patch.setattr(train, "make_setup", lambda *a: (setup, real(*a)[1]))
    result, taken = fit(cfg, folder)
  return result, taken, folder


def stop_before(monkeypatch, step, how):
  """A kill instead of the step with this 0-based number, or a signal during the one before."""
  real = train.train_step

  def train_step(setup, state, *rest):
    if how == "kill" and int(state.step) == step:
      raise Killed
    out = real(setup, state, *rest)
    if how == "signal" and int(out[0].step) == step:
      os.kill(os.getpid(), signal.SIGTERM)
    return out

  monkeypatch.setattr(train, "train_step", train_step)


def test_a_run_logs_every_step_and_warms_up(straight):
  result, taken, folder = straight
  rows = metrics(folder, "train")
  assert [row["step"] for row in rows] == list(range(1, 21)) and len(taken) == 20
  lr = np.array([row["lr"] for row in rows])
  np.testing.assert_allclose(lr[:6], [0, 0.002, 0.004, 0.006, 0.008, 0.01], rtol=1e-5)
  assert lr[-1] < 0.002 and np.all(np.diff(lr[5:]) < 0)
  assert [row["step"] for row in metrics(folder, "validation")] == [5, 10, 15, 20]
  best = max(metrics(folder, "validation"), key=lambda row: row["alpha"] + row["greedy_match"])
  assert result["best_step"] == result["validation"]["step"] == best["step"]
  assert (result["steps"], result["planned_steps"], result["skipped_steps"]) == (20, 20, 0)
  assert rows[-1]["loss"] < rows[0]["loss"]


def test_the_best_checkpoint_is_the_one_whose_replay_accepts_most():
  """By replayed tau where the validation has one, else by the first place of a draft."""
  found = {"alpha": 0.5, "greedy_match": 0.4, "alpha_tau": 2.25, "greedy_match_tau": 1.5}
  assert train.quality(found) == pytest.approx(1.25 + 0.5)
  better = {**found, "alpha": 0.1, "greedy_match": 0.1, "alpha_tau": 2.5}
  assert train.quality(better) > train.quality(found)
  assert train.quality({"alpha": 0.5, "greedy_match": 0.4}) == pytest.approx(0.9)


@pytest.mark.parametrize("stops", [
    [("kill", 12), ("signal", 17)],  # inside an epoch; twelve goes back to ten
    [("signal", 10), ("signal", 11), ("kill", 20)]])
def test_resumed_is_the_same_run(straight, shared, tmp_path, stops):
  """CASE 25, and the first half of 36."""
  result, taken, folder = straight
  cfg, seen = make_config(), {}
  for how, step in stops:
    with pytest.MonkeyPatch.context() as patch:
      stop_before(patch, step, how)
      stopped, batches = fit(cfg, tmp_path)
    if how == "signal":
      assert isinstance(stopped, SystemExit) and stopped.code == 128 + signal.SIGTERM
    first = seen.get("next", 0)
    for i, batch in enumerate(batches):
      assert batch == taken[first + i]
    seen["next"] = step if how == "signal" or step == 20 else 5 * (step // 5)
  again, batches = fit(cfg, tmp_path)
  assert batches == taken[seen["next"]:]
  assert again == result
  assert metrics(tmp_path) == metrics(folder)
  ours, theirs = tensors(tmp_path), tensors(folder)
  assert ours.keys() == theirs.keys()
  for name, value in theirs.items():
    np.testing.assert_array_equal(ours[name], value)


def test_metrics_behind_the_checkpoint_are_dropped(straight, shared, tmp_path):
  _, _, folder = straight
  with pytest.MonkeyPatch.context() as patch:
    stop_before(patch, 13, "kill")
    fit(make_config(), tmp_path)
  path = tmp_path / "metrics.jsonl"
  assert metrics(tmp_path)[-1]["step"] == 12
  path.write_text(path.read_text() + '{"step": 12, "spl')  # killed in the middle of a line
  fit(make_config(), tmp_path)
  assert metrics(tmp_path) == metrics(folder)


def nan_documents(docs, which):
  bad = []
  for i, d in enumerate(docs):
    hidden = d.hidden.copy()
    if i in which:
      hidden[:] = np.nan
    bad.append(dataclasses.replace(d, hidden=hidden))
  return bad


def test_too_many_bad_steps_end_the_run(shared, tmp_path):
  docs = documents()
  said = r"3 steps in a row.*train\.max_bad_steps=3.*train\.lr=0\.01"
  with pytest.raises(UserError, match=said):
    fit(make_config(), tmp_path, nan_documents(docs, range(3, 14)))
  assert [row["skipped"] for row in metrics(tmp_path, "train")] == [1, 2, 3]


def test_a_bad_step_now_and_then_does_not(shared, tmp_path):
  result, taken = fit(make_config(), tmp_path, nan_documents(documents(), [5]))
  rows = metrics(tmp_path, "train")
  assert result["steps"] == 20 and 2 <= result["skipped_steps"] == rows[-1]["skipped"] < 10
  # The schedule waits for a step that was skipped: each learning rate is used once.
  used = [row["lr"] for before, row in zip([{"skipped": 0}, *rows], rows, strict=False)
          if row["skipped"] == before["skipped"]]
  assert len(set(used)) == len(used) and used[0] == 0
  assert all(np.all(np.isfinite(x)) for x in tensors(tmp_path).values())


def test_validation_that_is_never_finite_is_one_line(shared, tmp_path):
  with pytest.raises(UserError, match="no validation was finite"):
    fit(make_config(), tmp_path, nan_documents(documents(), range(3)))


def test_of_equal_validations_one_step_is_named(shared, tmp_path):
  result, _ = fit(make_config(lr=0.0), tmp_path)
  assert result["best_step"] == result["validation"]["step"]


# Budgets.


def test_steps_are_measured_once(shared, tmp_path, monkeypatch):
  cfg = make_config(steps=0, budget_s=100.0)
  clock = iter(range(0, 1000, 2))
  calls = []
  monkeypatch.setattr(train, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
  monkeypatch.setattr(
      train, "train_step", lambda setup, state, *rest: calls.append(1) or (state, {}))
  args = (cfg, tiny.target(), module_of(), pack(documents(), cfg), tmp_path, 0.0)
  steps = train.planned_steps(*args)
  # Two seconds a step; the clock stands at 24 when the rest of the budget is shared out.
  assert steps == int(0.92 * (100 - 24) / 2) and len(calls) == 6
  assert train.planned_steps(*args) == steps and len(calls) == 6
  assert json.loads((tmp_path / "plan.json").read_text())["steps"] == steps
  cfg.train.steps = 7
  assert train.planned_steps(*args) == 7


def test_the_budget_is_a_hard_limit(shared, tmp_path, monkeypatch):
  monkeypatch.setattr(train, "_LEAST_STEPS", 3)
  result, taken = fit(make_config(budget_s=1e-9), tmp_path)  # began at 0: long ago
  assert (result["steps"], result["planned_steps"], result["best_step"]) == (3, 20, 3)
  assert len(taken) == 4 and (tmp_path / "checkpoints" / "3").is_dir()
  assert tensors(tmp_path) and [r["step"] for r in metrics(tmp_path, "train")] == [1, 2, 3]


def test_compiling_longer_than_the_budget_leaves_more_than_a_first_step(tmp_path, capsys):
  cfg = make_config(steps=0, budget_s=1e-9)
  assert train.planned_steps(
      cfg, tiny.target(), module_of(), pack(documents(), cfg), tmp_path, 0.0) == train._LEAST_STEPS
  assert "train.budget_s=1e-09 is short" in capsys.readouterr().out
  cfg.train.steps = train._LEAST_STEPS
  assert fit(cfg, tmp_path)[0]["steps"] == train._LEAST_STEPS


def test_a_run_of_one_step(tmp_path):
  result, _ = fit(make_config(steps=1), tmp_path)
  assert (result["steps"], result["best_step"]) == (1, 1)


@pytest.mark.parametrize("steps, traced", [(5, []), (6, [5]), (12, [5, 6, 7])])
def test_a_short_run_writes_its_trace_too(monkeypatch, tmp_path, steps, traced):
  open_now, seen = [], []
  profiler = types.SimpleNamespace(
      start_trace=open_now.append, stop_trace=lambda: open_now.pop())
  monkeypatch.setattr(metrics_lib.jax, "profiler", profiler)
  profile = metrics_lib.Profile(tmp_path)
  for step in range(steps):
    profile.before(step)
    seen += [step] * len(open_now)
  profile.close()
  assert seen == traced and not open_now
