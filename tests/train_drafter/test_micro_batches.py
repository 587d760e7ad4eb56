"""Several batches to a step: CASES 24 and 25."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.errors import UserError
from tests import tiny
from tests.train_drafter import test_fit
from tests.train_drafter.training import bits, documents, make_config, module_of, pack
from train_drafter import config as config_lib
from train_drafter import micro_batches, train
from train_drafter.config import Config

shared = test_fit.shared


def test_a_mean_is_over_tokens_and_not_over_batches():
  """Token losses [4, 4] and [1, 1, 1, 1, 1, 1] are 1.75 on average, not 2.5."""
  batches = tuple({"losses": jnp.asarray(row), "weight": jnp.asarray(real)} for row, real in (
      ([4.0, 4.0, 9.0, 9.0, 9.0, 9.0], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]), ([1.0] * 6, [1.0] * 6)))
  sums_of = lambda scale, batch: {
      "loss": jnp.sum(scale * batch["losses"] * batch["weight"]),
      "weight": jnp.sum(batch["weight"])}
  loss, sums, grad = jax.jit(lambda x: micro_batches.mean_gradient(sums_of, x, batches))(2.0)
  assert (float(loss), float(grad), float(sums["weight"])) == (3.5, 1.75, 8.0)
  empty = tuple(b | {"weight": 0 * b["weight"]} for b in batches)
  loss, sums, grad = micro_batches.mean_gradient(sums_of, jnp.float32(2.0), empty)
  assert (float(loss), float(grad), float(sums["weight"])) == (0.0, 0.0, 0.0)


def test_a_step_is_that_of_one_batch_with_all_rows():
  cfg, target, module = make_config(), tiny.target(), module_of()
  packer = pack(documents(), cfg)
  parts = tuple(packer.batch(i) for i in range(3))
  assert len({float(b["weight"].sum()) for b in parts}) > 1
  rows, places = parts[0]["tokens"].size, len(parts[0]["place"])
  moved = [b | {"place": b["place"] + i * rows,
                "teacher": np.where(b["teacher"] >= 0, b["teacher"] + i * places, -1)}
           for i, b in enumerate(parts)]
  whole = {name: np.concatenate([b[name] for b in moved])
           for name in moved[0] if name != "step"} | {"step": np.int32(0)}
  setup, state = train.make_setup(cfg, target, module, 20)

  sums_of = lambda params, batch: train.batch_sums(
      setup, params, setup.frozen, target.params, batch)
  run = jax.jit(lambda params, batch: micro_batches.mean_gradient(sums_of, params, batch))
  gradient = lambda batch: run(state.params, batch)
  (loss, sums, grads), (theirs, total, expected) = gradient(parts), gradient(whole)
  np.testing.assert_allclose(loss, theirs, rtol=1e-5)
  for name, value in total.items():
    np.testing.assert_allclose(sums[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
  for a, b in zip(bits(grads), bits(expected), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  mean_of_means = np.mean([float(gradient(b)[0]) for b in parts])
  assert abs(mean_of_means - float(theirs)) > 1e-3  # what would be wrong is another number


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_the_schedule_counts_steps_and_a_stopped_run_goes_on(shared, tmp_path, fraction):
  """Forty batches are ten steps; stopped at the fourth and the seventh it is the same run."""
  cfg = make_config(steps=10, micro_batches=4, eval_every=5, on_policy_fraction=fraction)
  result, taken = test_fit.fit(cfg, tmp_path / "straight")
  rows = test_fit.metrics(tmp_path / "straight", "train")
  schedule = train.make_setup(cfg, tiny.target(), module_of(), 10)[0].schedule
  np.testing.assert_allclose(
      [row["lr"] for row in rows], [float(schedule(i)) for i in range(10)], rtol=1e-6)
  assert len(taken) == 40 if not fraction else 10 < len(taken) < 30
  assert result["epochs"] == rows[-1]["epoch"] == pack(
      documents()[cfg.train.validation:], cfg).epoch_of(40) > 2
  for step in (4, 7):
    with pytest.MonkeyPatch.context() as patch:
      test_fit.stop_before(patch, step, "signal")
      stopped, _ = test_fit.fit(cfg, tmp_path / "stopped")
    assert isinstance(stopped, SystemExit)
  again, rest = test_fit.fit(cfg, tmp_path / "stopped")
  assert rest == taken[len(taken) - len(rest):] and again == result
  assert test_fit.metrics(tmp_path / "stopped") == test_fit.metrics(tmp_path / "straight")
  ours, theirs = (test_fit.tensors(tmp_path / name) for name in ("stopped", "straight"))
  for name, value in theirs.items():
    np.testing.assert_array_equal(ours[name], value)


def test_older_folders_stay_valid_and_mixed_teachers_are_refused():
  cfg = Config()
  assert "micro_batches" not in config_lib.train_part(cfg)["train"]
  cfg.train.micro_batches = 2
  assert config_lib.train_part(cfg)["train"]["micro_batches"] == 2
  cfg.drafter.kind, cfg.drafter.init_layers = "eagle3", (29,)
  cfg.train.on_policy_fraction, cfg.features.mode = 0.5, "topk"
  with pytest.raises(UserError, match="train.micro_batches=2 cannot mix .*features.mode='topk'"):
    config_lib.validate(cfg)
