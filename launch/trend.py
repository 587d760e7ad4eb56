"""tau against the amount of data, with a fitted line: the analysis of configs/sweeps/data.py."""

import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from launch import status
from train_drafter import report_plots
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


@dataclasses.dataclass(frozen=True)
class Point:
  """One run: answered tokens, tau at the lowest temperature with its interval (None for either end
  that is unknown), epochs of training, and the name."""

  tokens: int
  tau: float
  interval: tuple[float | None, float | None]
  epochs: float
  name: str


def points(runs: Mapping[str, Path]) -> list[Point]:
  """The runs that have a report, by their amount of data.

  Args:
    runs: name -> work folder of a finished run.
  """
  out = []
  for name, folder in runs.items():
    found = status.report_tau(folder)
    if found is not None:
      tokens = Manifest.load(folder / "generate").counts["answer_tokens"]
      epochs = Manifest.load(folder / "train").counts.get("epochs", math.nan)
      out.append(Point(tokens, *found, epochs, name))
  return sorted(out, key=lambda p: (p.tokens, p.tau, p.name))


def curve(runs: Mapping[str, Path]) -> str:
  """SVG: tau with its interval against answered tokens on a logarithmic axis, and the line.

  Args:
    runs: name -> work folder of a finished run.
  """
  rows = points(runs)
  x, y = [p.tokens for p in rows], [p.tau for p in rows]
  line = fit(x, y)
  with matplotlib.rc_context({**report_plots.STYLE, "svg.hashsalt": "trend"}):
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    for p in rows:
      if None not in p.interval:
        axes.plot([p.tokens] * 2, p.interval, color=report_plots.colour(0), alpha=0.5)
    axes.plot(x, y, "o", color=report_plots.colour(0), label="run, 95 % over prompts")
    if line is not None:
      ends = [min(x), max(x)]
      axes.plot(ends, [line.level + line.gain * math.log2(n) for n in ends],
                color=report_plots.colour(1), label=f"{line.gain:+.3f} for each doubling")
    if rows:
      axes.set_xscale("log", base=2)
      axes.set_xticks(sorted(set(x)), [f"{n:,}" for n in sorted(set(x))], rotation=45)
      axes.minorticks_off()
      axes.legend()
    axes.set_xlabel("answer tokens")
    axes.set_ylabel("τ")
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
  return out.getvalue()


def tau_against_tokens(runs: Mapping[str, Path]) -> str:
  """The runs by their amount of data, tau beside each, and what a doubling brings.

  Args:
    runs: name -> work folder of a finished run.
  """
  rows = points(runs)
  lines = ["answer tokens     tau  epochs  run",
           *(f"{p.tokens:>13,}  {p.tau:6.3f}  {p.epochs:6.1f}  {p.name}" for p in rows)]
  line = fit([p.tokens for p in rows], [p.tau for p in rows])
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
