"""Checkpoints of a training run, and a clean stop on a signal.

train.py saves and resumes with `Checkpoints` and leaves its loop with `GracefulExit`; evaluate.py
and export.py restore the best step.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NoReturn

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from spec_jax.errors import UserError
from train_drafter import buckets, distributed, urls
from train_drafter.buckets import Folder

_AGREE_STEPS = 4  # steps between two agreements of several processes whether to stop


@dataclasses.dataclass(frozen=True)
class Restored:
  """A checkpoint read back: the step, the pytree in the form asked for, and the JSON beside it."""

  step: int
  state: Any
  extra: dict[str, Any]


class Checkpoints:
  """The checkpoints in one folder; a context manager whose end waits for the last save.

  A step is a complete checkpoint or none: it is written beside the others and renamed once all of
  it is there, and an older one is deleted only after that. So a process killed at any time leaves
  the last complete step. The newest `max_to_keep` steps stay, and the best one by the metric.
  """

  def __init__(
    self, folder: Folder, *, max_to_keep: int = 2, best: Literal["min", "max"] = "min"
  ):
    """Opens `folder`, which is made when missing; parts of a save that was killed are removed.

    Args:
      folder: where the steps are: a folder here, or one in a bucket (gs://, with gcsfs).
      max_to_keep: how many of the newest steps stay.
      best: whether the smallest or the largest metric is the best one.

    Raises:
      UserError: the folder cannot be made or written, or the metric of a step is damaged.
    """
    self._far = urls.is_bucket(folder)
    self.folder = folder if self._far else folder.absolute()
    self._worst = math.inf if best == "min" else -math.inf
    if not self._far:  # of a bucket this was found out as the run began
      try:
        self.folder.mkdir(parents=True, exist_ok=True)
        # A folder that cannot be written is found out now and not after the first hour.
        tempfile.TemporaryFile(dir=self.folder).close()
      except OSError as error:
        raise UserError(f"{folder}: checkpoints cannot be written ({error.strerror})") from error
    for path in self.folder.glob("*/metrics/metrics"):  # read as the manager starts
      try:
        json.loads(path.read_text())
      except (OSError, ValueError) as error:
        raise _damaged(path.parents[1], error) from error
    keep = checkpoint_managers.AnyPreservationPolicy(
      [
        checkpoint_managers.LatestN(max_to_keep),
        checkpoint_managers.BestN(
          get_metric_fn=self._metric,
          reverse=best == "min",
          n=1,
          keep_checkpoints_without_metrics=False,
        ),
      ]
    )
    self._manager = ocp.CheckpointManager(
      self.folder,
      item_names=("state", "extra"),
      options=ocp.CheckpointManagerOptions(
        preservation_policy=keep,
        best_fn=self._metric,  # without it metrics are not written
        best_mode=best,
        cleanup_tmp_directories=True,
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
      ),
    )

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *exc) -> None:
    with self._failures():
      self._manager.close()

  @property
  def latest_step(self) -> int | None:
    """The newest step; None when there is none."""
    return self._manager.latest_step()

  @property
  def best_step(self) -> int | None:
    """The step with the best metric; None when no step has one."""
    step = self._manager.best_step()
    if step is None or self._metric(self._manager.metrics(step)) == self._worst:
      return None
    return step

  def save(
    self, step: int, state: Any, extra: Mapping[str, Any], metric: float | None = None
  ) -> None:
    """Starts to write a checkpoint; it may go on while the next steps run.

    The arrays are read before this returns, so they can be donated at once. A save of the newest
    step again does nothing: the last step of a run often coincides with a periodic save.

    Args:
      step: steps done; more than the newest step.
      state: pytree of arrays and typed keys.
      extra: JSON beside the arrays (position of the data iterator, best record, ...).
      metric: validation metric; None or a value that is not finite never counts as the best.

    Raises:
      UserError: this save or the one before it failed.
    """
    if step == self.latest_step:
      return
    if self.latest_step is not None and step < self.latest_step:
      raise ValueError(f"step {step} is not after step {self.latest_step} in {self.folder}")
    known = metric is not None and math.isfinite(metric)
    with self._failures():
      self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeSave(state), extra=ocp.args.JsonSave(dict(extra))
        ),
        metrics={"metric": float(metric)} if known else {},
        force=True,
      )

  def wait(self) -> None:
    """Blocks until the last save is complete.

    Raises:
      UserError: it failed.
    """
    with self._failures():
      self._manager.wait_until_finished()

  def restore(self, like: Any, *, step: int | None = None, partial: bool = False) -> Restored:
    """Reads a step back.

    Args:
      like: pytree of arrays or `jax.ShapeDtypeStruct`: structure, shapes, types and shardings of
        the result; what has no sharding comes to the first device.
      step: the step to read; the newest when None.
      partial: `like` may leave out parts of what was saved, which are then not read.

    Raises:
      UserError: there is no such step, or its files are damaged.
      ValueError: structure or shapes are not those that were saved.
    """
    self.wait()
    if step is None:
      step = self.latest_step
    if step is None or step not in self._manager.all_steps():
      what = "checkpoint" if step is None else f"checkpoint of step {step}"
      raise UserError(f"{self.folder}: holds no complete {what}")
    abstract = jax.tree.map(_placed, like)
    try:
      restored = self._manager.restore(
        step,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeRestore(
            abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=partial,
          ),
          extra=ocp.args.JsonRestore(),
        ),
      )
    except Exception as error:  # of many kinds: each file of a step has a reader of its own
      if partial or not self._fits(step, abstract):
        raise
      raise _damaged(self.folder / str(step), error) from error
    return Restored(step=step, state=restored.state, extra=restored.extra)

  def _fits(self, step: int, abstract: Any) -> bool:
    """Whether a step holds as many leaves of the same shapes, as far as it can be read at all."""
    try:
      described = ocp.PyTreeCheckpointHandler().metadata(self.folder / str(step) / "state")
      saved = [tuple(leaf.shape) for leaf in jax.tree.leaves(described.tree)]
    except Exception:  # the description is what is damaged
      return True
    leaves = jax.tree.leaves(abstract)
    # A random key is stored as its bits, whose shape is another.
    shapes = [leaf.shape for leaf in leaves
              if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    return len(saved) == len(leaves) and Counter(shapes) <= Counter(saved)

  def _metric(self, metrics: Mapping[str, float]) -> float:
    return metrics.get("metric", self._worst)

  @contextlib.contextmanager
  def _failures(self) -> Iterator[None]:
    """A full disk or a lost folder is the user's to mend: one line that names the folder."""
    try:
      yield
    except OSError as error:
      raise UserError(f"{self.folder}: a checkpoint was not written ({error})") from error
    except buckets.FAILURES as error:
      if self._far:
        raise UserError(f"{self.folder}: a checkpoint was not written "
                        f"({buckets.reason(error)})") from error
      # So tensorstore reports a failed write; other errors are mistakes in the program.
      code = re.search(r"os_error_code='(\d+)'", str(error))
      if code is None:
        raise
      reason = os.strerror(int(code[1]))
      raise UserError(f"{self.folder}: a checkpoint was not written ({reason})") from error


def _damaged(step: Folder, error: Exception) -> UserError:
  reason = " ".join(str(error).split())[:200] or type(error).__name__
  return UserError(f"{step}: this checkpoint is damaged ({reason}); remove it, and the same "
                   "command goes on from the one before")


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
  """The abstract form of `leaf`; without a sharding Orbax would pad or cut shapes silently."""
  sharding = getattr(leaf, "sharding", None)
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


class GracefulExit:
  """Turns SIGTERM and the first Ctrl-C into a request that the loop meets between two steps.

  with GracefulExit() as stop:
    for step in ...:
      ...
      if stop.requested:
        checkpoints.save(...)
        checkpoints.wait()
        stop.leave()

  A signal during compilation or a step is seen when that call returns. A second Ctrl-C interrupts
  at once. Usable in the main thread only, as Python's signal handlers are. In a run of several
  processes a signal to one comes to all, not at the same time.
  """

  signum = 0

  def __enter__(self) -> "GracefulExit":
    self._before = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}
    return self

  def __exit__(self, *exc) -> None:
    for signum, handler in self._before.items():
      signal.signal(signum, handler)

  @property
  def requested(self) -> bool:
    """Whether a signal has come."""
    return self.signum != 0

  def leave(self) -> NoReturn:
    """Ends the process with the status a shell gives for the signal, 128 + its number; that of
    SIGTERM where only another process has heard it so far."""
    raise SystemExit(128 + (self.signum or signal.SIGTERM))

  def agreed(self, step: int, *, late: bool) -> tuple[bool, bool]:
    """Whether a signal has come, and whether it is late: for any process, at one step for all.

    Args:
      step: steps done; of several processes it is asked every few of them, which all wait for.
      late: whether time is up for this process.
    """
    if distributed.count() == 1:
      return self.requested, late
    if step % _AGREE_STEPS:
      return False, False
    told, late = distributed.most(self.requested, late)
    return bool(told), bool(late)

  def leave_together(self, where: str) -> None:
    """Waits for the other processes, and leaves if any of them was told to.

    Args:
      where: the place, for the message of who is missing.
    """
    if any(distributed.gather(where, self.requested, math.inf)):
      print(f"{where.partition(':')[0]}: stopped; the same command goes on from here", flush=True)
      self.leave()

  def _note(self, signum: int, frame: Any) -> None:
    del frame
    if signum == signal.SIGINT and self.signum == signal.SIGINT:
      raise KeyboardInterrupt
    self.signum = signum
    distributed.tell(signum)
