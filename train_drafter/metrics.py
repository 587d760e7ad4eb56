"""What training measures of itself: means of the sums of a step, their files, and a trace.

Called by train.py.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorboardX
from jaxtyping import Array, Float

from spec_jax.errors import UserError
from train_drafter import distributed
from train_drafter.batches import Packer


def means(sums: dict[str, np.ndarray]) -> dict[str, Any]:
  """Means of the sums of `batch_sums`: loss; alpha, greedy_match and kept_mass of the first drafted
  token; and of a drafter with several draft places also the list over all, and the tau that these
  would give if places were independent (an estimate over uniform anchors). With
  features.mode=topk, alpha is the certified upper bound and alpha_lower the lower one."""
  count = np.maximum(sums["count"], 1)
  out: dict[str, Any] = {"loss": float(sums["loss"] / max(sums["weight"], 1e-9))}
  first = ("alpha", "greedy_match", "kept_mass")
  if "alpha_lower" in sums:
    first = (*first, "alpha_lower")
  for name in first:
    out[name] = float(sums[name][0] / count[0])
  if len(count) > 1:
    for name in ("alpha", "greedy_match"):
      places = sums[name] / count
      out[f"{name}_by_place"] = [round(float(x), 4) for x in places]
      out[f"{name}_tau"] = float(1 + np.cumprod(places).sum())
  return out | (_calibration(sums) if "confidence_count" in sums else {})


def alpha_text(record: dict[str, Any]) -> str:
  """alpha of `means` for the terminal; of a sparse teacher both certified bounds."""
  if "alpha_lower" not in record:
    return f"{record['alpha']:.3f}"
  return f"{record['alpha_lower']:.3f} to {record['alpha']:.3f} (certified bounds)"


_BINS = 10  # of the confidence, for its calibration


def calibration_sums(
    confidence: Float[Array, " c"], alpha: Float[Array, " c"], used: Float[Array, " c"],
) -> dict[str, Float[Array, " bins"]]:
  """Sums by bin of the predicted chance that a draft is accepted, for `means`."""
  at = jnp.minimum((confidence * _BINS).astype(jnp.int32), _BINS - 1)
  one = lambda value: jnp.zeros(_BINS).at[at].add(used * value)
  return {"confidence_count": one(1.0), "confidence_told": one(confidence),
          "confidence_alpha": one(alpha)}


def _calibration(sums: dict[str, np.ndarray]) -> dict[str, Any]:
  """Rows [states, mean confidence, mean alpha] of the bins that hold any, and the expected
  calibration error: the mean of |confidence - alpha| of the bins, weighed by their states."""
  count, told, alpha = (
      np.asarray(sums[f"confidence_{name}"], np.float64) for name in ("count", "told", "alpha"))
  rows = [[int(n), round(t / n, 4), round(a / n, 4)]
          for n, t, a in zip(count, told, alpha, strict=True) if n]
  return {"confidence_by_bin": rows,
          "confidence_error": float(np.abs(told - alpha).sum() / max(count.sum(), 1))}


def quality(found: dict[str, Any]) -> float:
  """What the best checkpoint has most of: accepted drafts at T=1 and at T=0."""
  return sum(found.get(f"{name}_tau", 1 + found[name]) - 1 for name in ("alpha", "greedy_match"))


def _step_of(line: str) -> float:
  """The step of a line of metrics; infinite for a damaged one."""
  try:
    return json.loads(line)["step"] if line.endswith("\n") else math.inf
  except (ValueError, TypeError, KeyError):
    return math.inf


class MetricLog:
  """metrics.jsonl and TensorBoard, written by the first process; a resumed run drops what lies
  behind its checkpoint."""

  def __init__(self, folder: Path, step: int):
    self._began, self._file = time.monotonic(), None
    if not distributed.is_primary():
      return
    self.path = folder / "metrics.jsonl"
    text = self.path.read_text(errors="replace") if self.path.exists() else ""
    lines = text.splitlines(True)
    # A killed process may have left a part of a line.
    kept = [line for line in lines if _step_of(line) <= step]
    self.path.write_text("".join(kept))
    self._file = open(self.path, "a", buffering=1)
    self._board = tensorboardX.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

  def step(self, step: int, sums: dict, setup: Any, packer: Packer) -> str:
    """Writes the metrics of a step (by now computed); returns the progress note.

    Args:
      step: updates whose batches are consumed.
      sums: of `train_step`.
      setup: the `Setup` of train.py, for schedule and limits.
      packer: for the epoch.

    Raises:
      UserError: too many non-finite steps in a row.
    """
    values = jax.device_get(sums)
    skipped = int(values["skipped"])
    row = means(values) | {
        "grad_norm": float(values["grad_norm"]),
        "lr": float(setup.schedule(step - 1 - skipped)),  # the schedule waits for skipped steps
        "epoch": packer.epoch_of(step * setup.options.micro_batches), "skipped": skipped}
    self._write(step, "train", row)
    if values["bad"] >= setup.options.max_bad_steps:
      raise UserError(
          f"train: {int(values['bad'])} steps in a row were not finite at step {step} "
          f"(train.max_bad_steps={setup.options.max_bad_steps}); lower train.lr={setup.options.lr}")
    taus = "".join(f"  {kind} {row[name]:.2f}" for kind, name in (
        ("tau~ T=1", "alpha_tau"), ("T=0", "greedy_match_tau")) if name in row)
    return (f"loss {row['loss']:.3f}  alpha {row['alpha']:.3f}  "
            f"match {row['greedy_match']:.3f}{taus}  lr {row['lr']:.1e}")

  def validation(self, step: int, found: dict[str, Any]) -> None:
    """Writes the means of `validate`, and all rows so far to the disk: a mounted bucket holds them
    from then on."""
    self._write(step, "validation", found)
    if self._file is not None:
      os.fsync(self._file.fileno())

  def close(self) -> None:
    """Flushes both files."""
    if self._file is not None:
      self._file.close()
      self._board.close()

  def _write(self, step: int, split: str, row: dict) -> None:
    if self._file is None:
      return
    seconds = round(time.monotonic() - self._began, 2)
    self._file.write(json.dumps({"step": step, "split": split, "seconds": seconds, **row}) + "\n")
    for name, value in row.items():
      if not isinstance(value, list):
        self._board.add_scalar(f"{split}/{name}", value, step)


class Profile:
  """A jax.profiler trace of steps 5 to 7 of this process, or of as many as there are."""

  def __init__(self, folder: Path | None):
    self.folder, self.running = folder, False

  def before(self, step: int) -> None:
    """Starts or stops the trace in front of a step of this process, counted from 0."""
    if self.folder is not None and step == 5:
      jax.profiler.start_trace(str(self.folder / "profile"))
      self.running = True
    if step == 8:
      self.close()

  def close(self) -> None:
    """Writes the trace."""
    if self.running:
      jax.profiler.stop_trace()
      self.running = False
