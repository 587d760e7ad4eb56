"""The page's section "Where speculation pays": measured batches and contexts, then rooflines.

Called by `train_drafter.report_html`; the tables are those of `train_drafter.report_sections`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from train_drafter import payoff
from train_drafter import report_plots as plots
from train_drafter import report_sections as sections
from train_drafter.report_cells import Table
from train_drafter.report_elements import bullets, figure, rows_table, table


def whatif(found: Mapping[str, Any]) -> str:
  """The section; "" for a report without it."""
  measured = found.get("measured") or {}
  parts = _measured(measured) + _roofline(found) + _dense(found) + _experts(found)
  return bullets(payoff.lines(measured)) + parts if parts else ""


def _part(made: Table, plot: str = "", more: str = "") -> str:
  """A heading and the table beside its plot."""
  if not made.rows:
    return ""
  body = table(made)
  if plot:
    body = f'<div class="beside">{plot}<div>{body}</div></div>'
  return f"<h3>{escape(made.title)}</h3>{body}{more}"


def _measured(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
  out = ""
  labels = {"batches": "sequences decoded together", "contexts": "tokens of context"}
  for made, (name, axis) in zip(
      sections.measured_tables({"whatif": {"measured": found}}), payoff.AXES.items(), strict=True):
    rows = [row for row in found.get(name, ()) if row["speedup"] is not None]
    curves = []
    for dtype, K in dict.fromkeys((row["dtype"], row["draft_len"]) for row in rows):
      own = [row for row in rows if (row["dtype"], row["draft_len"]) == (dtype, K)]
      curves.append((f"{dtype}, K = {K}", [row[axis] for row in own],
                     [row["speedup"] for row in own], None))
    plot = figure(
        plots.lines(curves, labels[name], "speed-up S", f"measured speed-up by {axis}", log=True,
                    line=1.0), "S = τ / (c + v) with costs measured on this machine"
    ) if curves else ""
    out += _part(made, plot)
  return out


def _roofline(found: Mapping[str, Any]) -> str:
  """The ceilings by batch size as a plot, at the shortest context, then one sequence as a table;
  every batch and context is folded away."""
  curves, folded = [], ""
  for chip in found.get("accelerators") or ():
    rows = [r for r in chip["rows"] if r["speedup"] is not None]
    rows = [r for r in rows if r["context"] == min(r["context"] for r in rows)]
    if rows:
      curves.append((chip["name"], [r["batch"] for r in rows], [r["speedup"] for r in rows], None))
    if chip["rows"]:
      folded += (f"<details><summary>{escape(chip['name'])}: every batch and context</summary>"
                 f"{rows_table(chip['name'], chip['rows'])}</details>")
  plot = figure(plots.lines(curves, "sequences decoded together", "speed-up at the ceiling",
                            "speed-up by batch size", log=True, line=1.0),
                "roofline ceilings at the shortest context, the best K each") if curves else ""
  return _part(sections.chips_table(found), plot, folded)


def _dense(found: Mapping[str, Any]) -> str:
  return _part(sections.dense_table(found))


def _experts(found: Mapping[str, Any]) -> str:
  curves = [(f"{m['name']} ({m['experts']}, {m['per_token']})", [int(T) for T in m["by_tokens"]],
             [100 * value / m["experts"] for value in m["by_tokens"].values()], None)
            for m in found.get("experts") or ()]
  plot = figure(plots.lines(curves, "tokens of a pass", "% of the experts of a layer",
                            "distinct experts by tokens", log=True),
                "expected distinct experts of a layer: what a wider verification reads"
                ) if curves else ""
  return _part(sections.experts_table(found), plot)
