"""tau against the amount of data, with a fitted line: the analysis of configs/sweeps/data.py."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from launch import status
from train_drafter.manifest import Manifest


@dataclasses.dataclass(frozen=True)
class Fit:
  """tau = level + gain * log2(tokens), by least squares.

  Attributes:
    level: at one token, outside of any use.
    gain: of tau for each doubling of the tokens.
    interval: 95 % of the gain by Student's t; None with fewer than three runs.
  """

  level: float
  gain: float
  interval: tuple[float, float] | None


def fit(tokens: Sequence[float], tau: Sequence[float]) -> Fit | None:
  """The line through the runs; None when all have one amount of data.

  Args:
    tokens: [n] answered tokens, above zero.
    tau: [n] of each run.
  """
  x, y = np.log2(np.asarray(tokens, float)), np.asarray(tau, float)
  spread = float(np.sum((x - x.mean()) ** 2)) if len(x) else 0.0
  if spread == 0:
    return None
  gain = float(np.sum((x - x.mean()) * (y - y.mean())) / spread)
  level = float(y.mean() - gain * x.mean())
  free = len(x) - 2
  if free < 1:
    return Fit(level, gain, None)
  error = math.sqrt(float(np.sum((y - level - gain * x) ** 2)) / free / spread)
  half = float(stats.t.ppf(0.975, free)) * error
  return Fit(level, gain, (gain - half, gain + half))


def tau_against_tokens(runs: Mapping[str, Path]) -> str:
  """The runs by their amount of data, tau beside each, and what a doubling brings.

  Args:
    runs: name -> work folder of a finished run.
  """
  rows = []
  for name, folder in runs.items():
    found = status.report_tau(folder)
    if found is not None:
      tokens = Manifest.load(folder / "generate").counts["answer_tokens"]
      epochs = Manifest.load(folder / "train").counts.get("epochs", math.nan)
      rows.append((tokens, found[0], epochs, name))
  rows.sort()
  lines = ["answer tokens     tau  epochs  run",
           *(f"{tokens:>13,}  {tau:6.3f}  {epochs:6.1f}  {name}"
             for tokens, tau, epochs, name in rows)]
  line = fit([row[0] for row in rows], [row[1] for row in rows])
  if line is None:
    return "\n".join([*lines, "no trend: all runs have one amount of data"])
  text = f"tau gains {line.gain:+.3f} for each doubling of the tokens"
  if line.interval is None:
    text += " (two runs: no interval)"
  else:
    low, high = line.interval
    text += f" (95 % {low:+.3f} to {high:+.3f} over {len(rows)} runs)"
    if low <= 0 <= high:
      text += ": no trend can be told from these"
  return "\n".join([*lines, text])
