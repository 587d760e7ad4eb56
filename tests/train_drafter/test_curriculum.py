"""Which program trains which step, and that a resumed run takes the same ones."""

import dataclasses
import json
import types

import numpy as np
import pytest
import safetensors.numpy

from spec_jax import drafters
from spec_jax.errors import UserError
from tests import tiny
from tests.train_drafter.training import documents, make_config, pack
from train_drafter import config as config_lib
from train_drafter import train
from train_drafter.curriculum import curriculum

STEPS, DRAFT_STEPS = 10, 3


@pytest.fixture(scope="module")
def target():
  config = tiny.config(num_layers=8, hidden_size=16, num_heads=2, num_kv_heads=1)
  return tiny.make(config, tiny.tensors(config))


def eagle3_of(target):
  return drafters.init_learned("eagle3", target, (6,), steps=DRAFT_STEPS)


def config_of(**changes):
  cfg = make_config()
  cfg.drafter.kind, cfg.drafter.steps = "eagle3", DRAFT_STEPS
  cfg.train = dataclasses.replace(cfg.train, **(dict(steps=STEPS, eval_every=5) | changes))
  config_lib.validate(cfg)
  return cfg


def programs_of(target, **changes):
  module = eagle3_of(target)
  setup, state = train.make_setup(config_of(**changes), target, module, STEPS)
  return setup, state, curriculum(setup, module)


def test_a_step_decides_its_program(target):
  """Shares may overlap in either order; what is not changed is the setup itself."""
  setup, _, found = programs_of(target, first_step_share=0.6, ce_share=0.2)
  depth = lambda setup: train.drafter_of(setup, *arrays).depths
  _, state, _ = programs_of(target)
  arrays = state.params, setup.frozen
  told = [(part.options.loss, depth(part)) for part in (
      found.at(step, STEPS) for step in range(STEPS))]
  assert told == [("ce", 1)] * 2 + [("fkl", 1)] * 4 + [("fkl", DRAFT_STEPS)] * 4
  assert found.at(STEPS - 1, STEPS) is setup and setup.options.loss == "fkl"
  assert [round(share, 9) for share, _ in found.parts()] == [0.2, 0.4, 0.4]
  _, _, turned = programs_of(target, first_step_share=0.2, ce_share=0.6)
  told = [(part.options.loss, depth(part)) for _, part in turned.parts()]
  assert told == [("ce", 1), ("ce", DRAFT_STEPS), ("fkl", DRAFT_STEPS)]
  _, _, whole = programs_of(target, ce_share=1.0)
  assert {whole.at(step, STEPS).options.loss for step in range(STEPS)} == {"ce"}


def test_no_curriculum_is_the_setup(target):
  setup, _, found = programs_of(target)
  assert found.parts() == [(1.0, setup)]


def test_the_first_step_is_that_of_all_of_them(target):
  """Its sums are those of place 0 of the whole objective, and its loss is of that place alone."""
  setup, state, found = programs_of(target, first_step_share=0.5)
  batch = train.with_features(pack(documents(target=target), config_of()).batch(0),
                              eagle3_of(target).taps, target)
  one, whole = (
      train.validation_sums(part, state.params, setup.frozen, target.params, batch, False)[0]
      for part in found.setups)
  for name in ("alpha", "greedy_match", "count"):
    assert one[name].shape == (1,) and whole[name].shape == (DRAFT_STEPS,)
    np.testing.assert_allclose(one[name][0], whole[name][0], rtol=1e-5)
  assert 0 < one["loss"] < whole["loss"] and one["weight"] < whole["weight"]


def test_resumed_with_a_curriculum_is_the_same_run(target, tmp_path, monkeypatch):
  """Stopped in each half; every validation scores all draft steps."""
  cfg = config_of(first_step_share=0.5, eval_every=2)
  module = eagle3_of(target)
  real_setup, real_step = train.make_setup, train.train_step
  setup, _ = real_setup(cfg, target, module, STEPS)
  shared = curriculum(setup, module)  # one compilation for all of these runs
  monkeypatch.setattr(train, "make_setup", lambda *a: (setup, real_setup(*a)[1]))
  monkeypatch.setattr(train, "curriculum", lambda *a: shared)
  taken = []

  def run(folder, stop=None):
    def step(part, state, *rest):
      if int(state.step) == stop:
        raise KeyboardInterrupt
      taken.append((int(state.step), shared.setups.index(part)))
      return real_step(part, state, *rest)

    monkeypatch.setattr(train, "train_step", step)
    docs = documents(target=target)
    folder.mkdir(exist_ok=True)
    return train.fit(cfg, target, module, pack(docs[3:], cfg), pack(docs[:3], cfg).in_order(),
                     folder, 0.0)

  result = run(tmp_path / "straight")
  assert taken == [(step, int(step >= 5)) for step in range(STEPS)]
  for stop in (3, 7):
    with pytest.raises(KeyboardInterrupt):
      run(tmp_path / "stopped", stop)
  del taken[:]
  assert run(tmp_path / "stopped") == result and taken[0] == (6, 1)
  straight, stopped = (
      safetensors.numpy.load_file(tmp_path / name / "drafter" / "drafter.safetensors")
      for name in ("straight", "stopped"))
  for name, value in straight.items():
    np.testing.assert_array_equal(stopped[name], value)
  rows = [json.loads(line) for line in
          (tmp_path / "stopped" / "metrics.jsonl").read_text().splitlines()]
  trained = [len(row.get("alpha_by_place", [0])) for row in rows if row["split"] == "train"]
  assert trained == [1] * 5 + [DRAFT_STEPS] * 5
  held = [row for row in rows if row["split"] == "validation"]
  assert [len(row["alpha_by_place"]) for row in held] == [DRAFT_STEPS] * 5


def test_the_budget_counts_each_program_by_its_share(target, tmp_path, monkeypatch):
  cfg = config_of(steps=0, budget_s=100.0, ce_share=0.25)
  clock = [0.0]

  def step(part, state, *rest):
    clock[0] += 1.0 if part.options.loss == "ce" else 3.0
    return state, {}

  monkeypatch.setattr(train, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
  monkeypatch.setattr(train, "train_step", step)
  steps = train.planned_steps(
      cfg, target, eagle3_of(target), pack(documents(target=target), cfg), tmp_path, 0.0)
  second = 0.25 * 1 + 0.75 * 3
  assert steps == int(0.92 * (100 - 6 * (1 + 3)) / second)
  assert json.loads((tmp_path / "plan.json").read_text())["seconds_per_step"] == second


def test_one_draft_step_needs_a_drafter_that_has_several():
  with pytest.raises(UserError, match=r"train\.first_step_share=0\.5 needs .*eagle3.*not small_lm"):
    make_config(first_step_share=0.5)


def test_shares_are_shares():
  for name in ("ce_share", "first_step_share"):
    with pytest.raises(UserError, match=rf"train\.{name}=1\.5 must be in \[0, 1\]"):
      config_of(**{name: 1.5})
