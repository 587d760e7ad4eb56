"""Plots of the reports as SVG that stands inside a page and takes its colours from it.

matplotlib draws; every colour is a CSS variable of the page (`--ink`, `--muted`, `--c0` …), so a
plot follows light, dark and print. Called by `train_drafter.report_html`; `launch.compare` writes
the same figures as files of their own with fixed colours.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape

import matplotlib
from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind readers: on white, on near black.
SERIES = (("#0072b2", "#5ab4f0"), ("#c4500a", "#f39a5b"), ("#00795a", "#3ecfa3"),
          ("#a8457f", "#e79ac7"), ("#8a6d00", "#e6c04a"), ("#0d0d0d", "#f2f2f2"),
          ("#6f6f6f", "#a5a5a5"))
INK, MUTED = "#010203", "#010204"  # stand for var(--ink) and var(--muted) until `_embed`
STYLE = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 10,
    "axes.edgecolor": MUTED, "axes.labelcolor": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10,
    "axes.titlecolor": INK, "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "legend.frameon": False,
    "legend.fontsize": 9, "grid.color": MUTED, "grid.alpha": 0.25, "axes.grid": True,
    "axes.axisbelow": True, "lines.linewidth": 1.5, "lines.markersize": 4,
}
_WIDTH = 4.4  # inches: about the width of a phone, so that text is never scaled down much


def colour(i: int) -> str:
  """The i-th series' colour; the last one stands for all that follow."""
  return SERIES[min(i, len(SERIES) - 1)][0]


def css_variables(dark: bool) -> str:
  """The custom properties of the series for one colour scheme."""
  return "".join(f"--c{i}:{pair[dark]};" for i, pair in enumerate(SERIES))


def _embed(figure: Figure, label: str) -> str:
  """The figure as an <svg> element without sizes, ids of groups or colours of its own."""
  text = io.StringIO()
  # The salt makes the ids: the same figure the same text, two figures of one page never one id.
  with matplotlib.rc_context({"svg.hashsalt": label, "svg.fonttype": "none"}):
    figure.savefig(text, format="svg", transparent=True, bbox_inches="tight",
                   metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
  svg = text.getvalue()
  box = re.search(r'viewBox="0 0 ([\d.]+) [\d.]+"', svg)
  svg = svg[svg.index("<svg"):]
  svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
  svg = re.sub(r'<g id="[^"]*"', "<g", svg)
  svg = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font: \1 system-ui, sans-serif", svg)
  names = {INK: "--ink", MUTED: "--muted", **{pair[0]: f"--c{i}" for i, pair in enumerate(SERIES)}}
  for value, name in names.items():
    svg = svg.replace(value, f"var({name})")
  points = float(box[1])
  root = (f'<svg viewBox={re.search(r"viewBox=(.*?)>", svg)[1].split(" version")[0]} role="img" '
          f'aria-label="{escape(label)}" style="max-width:{points * 4 / 3 * 1.1:.0f}px">')
  return root + svg[svg.index(">") + 1:].strip()


def _axes(height: float, xlabel: str, ylabel: str):
  figure = Figure(figsize=(_WIDTH, height), layout="constrained")
  axes = figure.subplots()
  axes.set_xlabel(xlabel)
  axes.set_ylabel(ylabel)
  return figure, axes


def _legend(figure: Figure, axes, columns: int = 2) -> None:
  handles, labels = axes.get_legend_handles_labels()
  if handles:
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _known(xs: Sequence, ys: Sequence) -> tuple[list, list]:
  pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
  return [x for x, _ in pairs], [y for _, y in pairs]


def positions(name: str, group: Mapping, controls: Mapping[str, Mapping], label: str) -> str:
  """Survival (with its interval) and conditional acceptance of one setting by position.

  Args:
    name: of the drafter.
    group: its figures, as in the report.
    controls: name -> the same figures of each control.
    label: what the plot shows, for readers that cannot see it.
  """
  with matplotlib.rc_context(STYLE):
    figure, axes = _axes(2.9, "position in the block", "% of rounds")
    places = range(1, len(group["survival"]) + 1)
    percent = lambda values: _known(places, [None if v is None else 100 * v for v in values])
    band = [(k, 100 * lo, 100 * hi) for k, (lo, hi) in zip(places, group["survival_ci"],
                                                           strict=True) if lo is not None]
    if band:
      axes.fill_between(*zip(*band, strict=True), color=colour(0), alpha=0.2, linewidth=0)
    axes.plot(*percent(group["survival"]), color=colour(0), marker="o", zorder=3,
              label=f"{name}: survival, 95 %")
    axes.plot(*percent(group["conditional"]), color=colour(0), marker="s", linestyle="--",
              label=f"{name}: conditional")
    for i, (other, figures) in enumerate(controls.items()):
      axes.plot(*percent(figures["survival"]), color=colour(i + 1), marker=".", linewidth=1,
                label=f"{other}: survival")
    axes.set_xticks(places)
    axes.set_ylim(-2, 102)
    _legend(figure, axes)
    return _embed(figure, label)


def forest(rows: Sequence[tuple[str, Sequence[tuple[str, float | None, Sequence]]]], xlabel: str,
           label: str, line: float | None = None) -> str:
  """Values with intervals, one line of the plot for each row, see `draw_forest`."""
  with matplotlib.rc_context(STYLE):
    figure, axes = _axes(0.9 + 0.26 * len(rows), xlabel, "")
    draw_forest(axes, rows, line)
    _legend(figure, axes, 3)
    return _embed(figure, label)


def draw_forest(axes, rows: Sequence, line: float | None = None) -> None:
  """Draws (row name, [(series, value, [lo, hi])]) from top to bottom.

  Args:
    axes: of matplotlib.
    rows: the series of every row in the same order; None is left out.
    line: where a vertical line stands, such as "no difference".
  """
  series = list(dict.fromkeys(name for _, values in rows for name, _, _ in values))
  for i, name in enumerate(series):
    # Beside each other within a row, the first one on top.
    shift = (i - (len(series) - 1) / 2) * 0.7 / max(len(series), 1)
    found = [(y + shift, value, interval) for y, (_, values) in enumerate(rows)
             for other, value, interval in values if other == name and value is not None]
    for y, _, (low, high) in found:
      if low is not None:
        axes.plot([low, high], [y, y], color=colour(i), linewidth=1.2)
    axes.plot([x for _, x, _ in found], [y for y, _, _ in found], linestyle="none",
              marker="os^Dv*P"[i % 7], color=colour(i), label=name)
  if line is not None:
    axes.axvline(line, color=axes.xaxis.label.get_color(), linewidth=0.8)
  axes.set_yticks(range(len(rows)), [name for name, _ in rows])
  axes.set_ylim(len(rows) - 0.4, -0.6)
  axes.locator_params(axis="x", nbins=5)  # labels such as -0.035 would run into each other
  axes.grid(visible=False, axis="y")


def lines(curves: Sequence[tuple[str, Sequence, Sequence, Sequence | None]], xlabel: str,
          ylabel: str, label: str, zero: bool = True, log: bool = False,
          line: float | None = None) -> str:
  """Curves over whole numbers: (name, xs, ys, intervals or None); None among ys is left out.

  A name that ends in "(measured)" is drawn as points alone, with its intervals. `line` is where a
  horizontal line stands, such as a speed-up of one.
  """
  with matplotlib.rc_context(STYLE):
    figure, axes = _axes(2.9, xlabel, ylabel)
    for i, (name, xs, ys, intervals) in enumerate(curves):
      # A little aside, so that intervals at one x do not hide one another.
      places = [x + (0.06 * i if intervals else 0) for x in xs]
      for x, pair in zip(places, intervals or (), strict=False):
        if pair and pair[0] is not None:
          axes.plot([x, x], pair, color=colour(i), linewidth=1.2)
      axes.plot(*_known(places, ys), color=colour(i), label=name, marker="os^Dv*P"[i % 7],
                linestyle="none" if name.endswith("(measured)") else "-")
    if line is not None:
      axes.axhline(line, color=axes.xaxis.label.get_color(), linewidth=0.8)
    if log:
      axes.set_xscale("log", base=2)
    ticks = sorted({x for _, xs, _, _ in curves for x in xs})
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    if zero:
      axes.set_ylim(bottom=0)
    _legend(figure, axes)
    return _embed(figure, label)
