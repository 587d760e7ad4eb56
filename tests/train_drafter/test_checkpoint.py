"""Whatever stops a run, the last complete step is there and comes back as it was."""

import dataclasses
import functools
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_jax.errors import UserError
from train_drafter.checkpoint import Checkpoints, GracefulExit

ROOT = Path(__file__).parents[2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  params: dict
  opt_state: optax.OptState
  step: jax.Array
  key: jax.Array


def train_state(seed=0):
  params = {
    "wq": jax.random.normal(jax.random.key(seed), (4, 3)),
    "layers": [{"norm": jnp.full((3,), seed, jnp.bfloat16)}],
  }
  return TrainState(params, optax.adamw(1e-3).init(params), jnp.int32(seed), jax.random.key(seed))


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def small(value):
  return {"w": jnp.full((3,), value, jnp.float32)}


def child(code, folder):
  """Runs `code` in a new process; `folder` is its first argument."""
  return subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code), str(folder)],
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=120,
  )


def test_restores_what_was_saved(workdir):
  saved = train_state(3)
  with Checkpoints(workdir / "ckpt") as checkpoints:
    checkpoints.save(7, saved, {"data": {"epoch": 1, "index": 40}, "best": 2.5}, metric=2.5)
  with Checkpoints(workdir / "ckpt") as checkpoints:
    assert checkpoints.latest_step == 7
    back = checkpoints.restore(jax.eval_shape(train_state))
  assert back.step == 7
  assert back.extra == {"data": {"epoch": 1, "index": 40}, "best": 2.5}
  assert_same(back.state, saved)


def test_a_concrete_state_gives_its_device_to_what_comes_back(workdir):
  with Checkpoints(workdir) as checkpoints:
    checkpoints.save(1, train_state(1), {})
    back = checkpoints.restore(train_state(0)).state
  assert isinstance(back.params["wq"], jax.Array)
  assert back.params["wq"].sharding == train_state().params["wq"].sharding


def test_partial_restore_reads_parameters_alone(workdir):
  saved = train_state(2)
  content = {"params": saved.params, "opt_state": saved.opt_state}
  with Checkpoints(workdir) as checkpoints:
    checkpoints.save(1, content, {})
    like = {"params": train_state(0).params}
    assert_same(checkpoints.restore(like, partial=True).state, {"params": saved.params})
    with pytest.raises(ValueError):
      checkpoints.restore(like)


def test_another_shape_is_refused(workdir):
  with Checkpoints(workdir) as checkpoints:
    checkpoints.save(1, small(1), {})
    for shape in [(4,), (2,), (3, 1)]:
      with pytest.raises(ValueError):
        checkpoints.restore({"w": jax.ShapeDtypeStruct(shape, jnp.float32)})


def test_donating_the_state_right_after_a_save_leaves_the_file_alone(workdir):
  @functools.partial(jax.jit, donate_argnums=0)
  def step(x):
    return x * 0 - 1

  x = jnp.arange(4_000_000, dtype=jnp.float32)
  expected = np.array(x)
  with Checkpoints(workdir) as checkpoints:
    checkpoints.save(1, {"x": x}, {})
    for _ in range(3):
      x = step(x)
    x.block_until_ready()
    back = checkpoints.restore({"x": jax.ShapeDtypeStruct(expected.shape, jnp.float32)})
  np.testing.assert_array_equal(back.state["x"], expected)


@pytest.mark.parametrize("best, expected", [("min", 2), ("max", 1)])
def test_keeps_the_newest_and_the_best(workdir, best, expected):
  with Checkpoints(workdir, max_to_keep=2, best=best) as checkpoints:
    for step, metric in enumerate([9.0, 1.0, 4.0, math.nan, None, 3.0], start=1):
      checkpoints.save(step, small(step), {}, metric=metric)
    checkpoints.wait()
    assert checkpoints.best_step == expected
  assert {p.name for p in workdir.iterdir()} == {str(expected), "5", "6"}
  with Checkpoints(workdir, max_to_keep=2, best=best) as checkpoints:
    assert checkpoints.best_step == expected
    back = checkpoints.restore(small(0), step=checkpoints.best_step)
    np.testing.assert_array_equal(back.state["w"], expected)
    checkpoints.save(7, small(7), {}, metric=5.0)
  assert {p.name for p in workdir.iterdir()} == {str(expected), "6", "7"}


def test_no_metric_no_best(workdir):
  with Checkpoints(workdir) as checkpoints:
    assert checkpoints.best_step is None
    checkpoints.save(1, small(1), {}, metric=math.inf)
    checkpoints.wait()
    assert checkpoints.best_step is None


def test_saving_the_last_step_again_is_nothing_and_an_earlier_one_a_mistake(workdir):
  with Checkpoints(workdir) as checkpoints:
    checkpoints.save(2, small(2), {})
    checkpoints.save(2, small(9), {})
    np.testing.assert_array_equal(checkpoints.restore(small(0)).state["w"], 2)
    with pytest.raises(ValueError, match="step 1 is not after step 2"):
      checkpoints.save(1, small(1), {})


def test_nothing_to_restore_is_one_line(workdir):
  with Checkpoints(workdir) as checkpoints:
    with pytest.raises(UserError, match=f"{workdir}: holds no complete checkpoint$"):
      checkpoints.restore(small(0))
    checkpoints.save(1, small(1), {})
    with pytest.raises(UserError, match="holds no complete checkpoint of step 5"):
      checkpoints.restore(small(0), step=5)


DAMAGES = {
  "extra/metadata": b"{", "metrics/metrics": b"", "state/_METADATA": b"{",
  "state/manifest.ocdbt": b"", "state/d/*": b""}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_step_is_one_line_and_the_one_before_is_left(workdir, name):
  with Checkpoints(workdir) as checkpoints:
    for step in (1, 2):
      checkpoints.save(step, small(step), {"at": step}, metric=1.0)
  paths = list((workdir / "2").glob(name))
  assert paths
  for path in paths:
    path.write_bytes(DAMAGES[name])
  with pytest.raises(UserError, match=f"{workdir}/2: this checkpoint is damaged .*remo") as caught:
    with Checkpoints(workdir) as checkpoints:
      checkpoints.restore(small(0))
  assert "\n" not in str(caught.value)
  shutil.rmtree(workdir / "2")
  with Checkpoints(workdir) as checkpoints:
    assert_same(checkpoints.restore(small(0)).state, small(1))


def test_another_shape_is_no_damage(workdir):
  with Checkpoints(workdir) as checkpoints:
    checkpoints.save(1, train_state(1), {})
  other = dataclasses.replace(train_state(0), params={"wq": jnp.zeros((4, 4)), "layers": []})
  with Checkpoints(workdir) as checkpoints:  # a new process knows nothing but the files
    with pytest.raises(ValueError):
      checkpoints.restore(other)
    assert_same(checkpoints.restore(train_state(0)).state, train_state(1))


def test_a_folder_that_cannot_be_made_is_named(workdir):
  (workdir / "file").write_text("")
  with pytest.raises(UserError, match="file/ckpt: checkpoints cannot be written"):
    Checkpoints(workdir / "file" / "ckpt")


def test_a_lost_folder_fails_the_save(workdir):
  folder = workdir / "ckpt"
  with pytest.raises(UserError, match=f"{folder}: a checkpoint was not written"):
    with Checkpoints(folder) as checkpoints:
      checkpoints.save(1, small(1), {})
      checkpoints.wait()
      shutil.rmtree(folder)
      folder.write_text("")
      checkpoints.save(2, small(2), {})


def test_a_full_disk_fails_the_run_and_keeps_the_old_step(workdir):
  # A limit on the size of files stands for the full disk; the failure comes in the background.
  code = """
    import resource, sys
    from pathlib import Path
    import jax, numpy as np
    from spec_jax.errors import UserError
    from train_drafter.checkpoint import Checkpoints
    try:
      with Checkpoints(Path(sys.argv[1]), max_to_keep=1) as checkpoints:
        checkpoints.save(1, {"w": jax.numpy.ones(3)}, {})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        noise = np.random.default_rng(0).normal(size=500_000)
        checkpoints.save(2, {"w": jax.numpy.asarray(noise)}, {})
        print("training goes on")
    except UserError as error:
      print(error)
      sys.exit(2)
  """
  done = child(code, workdir)
  assert done.returncode == 2, done.stderr
  assert done.stdout.splitlines() == [
    "training goes on",
    f"{workdir}: a checkpoint was not written (File too large)",
  ]
  with Checkpoints(workdir) as checkpoints:
    assert checkpoints.latest_step == 1


def test_a_kill_during_a_save_leaves_the_step_before(workdir):
  code = """
    import os, signal, sys
    from pathlib import Path
    import jax, numpy as np
    from train_drafter.checkpoint import Checkpoints
    checkpoints = Checkpoints(Path(sys.argv[1]), max_to_keep=1)
    checkpoints.save(1, {"w": jax.numpy.ones(3)}, {"index": 10})
    checkpoints.wait()
    noise = np.random.default_rng(0).normal(size=20_000_000).astype(np.float32)
    checkpoints.save(2, {"w": jax.numpy.asarray(noise)}, {"index": 20})
    os.kill(os.getpid(), signal.SIGKILL)
  """
  done = child(code, workdir)
  assert done.returncode == -signal.SIGKILL, done.stderr
  left = {p.name for p in workdir.iterdir()}
  assert "1" in left and "2" not in left and len(left) == 2, "the kill came outside the save"
  with Checkpoints(workdir, max_to_keep=1) as checkpoints:
    assert checkpoints.latest_step == 1
    back = checkpoints.restore(small(0))
    np.testing.assert_array_equal(back.state["w"], 1)
    assert back.extra == {"index": 10}
    checkpoints.save(3, small(3), {})
  assert {p.name for p in workdir.iterdir()} == {"3"}, "the part of step 2 is still there"


def test_a_deletion_that_was_killed_is_finished_later(workdir):
  with Checkpoints(workdir, max_to_keep=1) as checkpoints:
    checkpoints.save(1, small(1), {}, metric=1.0)
  shutil.rmtree(workdir / "1" / "metrics")
  with Checkpoints(workdir, max_to_keep=1) as checkpoints:
    assert checkpoints.best_step is None
    for step in (2, 3):
      checkpoints.save(step, small(step), {}, metric=5.0 - step)
  assert {p.name for p in workdir.iterdir()} == {"3"}


def test_leaving_right_after_the_last_step_loses_nothing(workdir):
  code = """
    import sys
    from pathlib import Path
    import jax
    from train_drafter.checkpoint import Checkpoints
    with Checkpoints(Path(sys.argv[1])) as checkpoints:
      checkpoints.save(5, {"w": jax.numpy.full(2_000_000, 5.0)}, {})
      sys.exit(0)
  """
  done = child(code, workdir)
  assert done.returncode == 0, done.stderr
  with Checkpoints(workdir) as checkpoints:
    assert checkpoints.latest_step == 5


def test_saved_on_two_devices_restored_on_one(workdir):
  code = """
    import os, sys
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    from pathlib import Path
    import jax, jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec
    from train_drafter.checkpoint import Checkpoints
    mesh = jax.make_mesh((2,), ("fsdp",))
    w = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("fsdp")))
    assert len(w.sharding.device_set) == 2
    with Checkpoints(Path(sys.argv[1])) as checkpoints:
      checkpoints.save(1, {"w": w}, {})
  """
  done = child(code, workdir)
  assert done.returncode == 0, done.stderr
  with Checkpoints(workdir) as checkpoints:
    back = checkpoints.restore({"w": jnp.zeros(8)}).state["w"]
  np.testing.assert_array_equal(back, np.arange(8.0))
  assert len(back.sharding.device_set) == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request(signum):
  before = signal.getsignal(signum)
  with pytest.raises(SystemExit) as caught:
    with GracefulExit() as stop:
      assert not stop.requested
      os.kill(os.getpid(), signum)
      assert stop.requested
      stop.leave()
  assert caught.value.code == 128 + signum
  assert signal.getsignal(signum) is before


def test_a_second_interrupt_stops_at_once():
  with pytest.raises(KeyboardInterrupt):
    with GracefulExit() as stop:
      os.kill(os.getpid(), signal.SIGINT)
      assert stop.requested
      os.kill(os.getpid(), signal.SIGINT)


def test_sigterm_during_a_step_ends_with_a_checkpoint_of_that_step(workdir):
  code = """
    import os, signal, sys, threading
    from pathlib import Path
    import jax, jax.numpy as jnp
    from train_drafter.checkpoint import Checkpoints, GracefulExit
    compiled = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda i, x: jnp.sin(x @ x), x))
    x = jnp.ones((300, 300))
    with Checkpoints(Path(sys.argv[1])) as checkpoints, GracefulExit() as stop:
      for step in range(1, 1000):
        if step == 3:
          threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()
        x = compiled(x).block_until_ready()
        if stop.requested:
          checkpoints.save(step, {"x": x}, {"step": step})
          stop.leave()
  """
  done = child(code, workdir)
  assert done.returncode == 128 + signal.SIGTERM, done.stderr
  with Checkpoints(workdir) as checkpoints:
    assert checkpoints.latest_step is not None and 3 <= checkpoints.latest_step < 999
