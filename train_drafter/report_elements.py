"""HTML of the report's pieces: tables, lists, figures, and any object of the report as such.

Every text passes through `escape`. Called by `train_drafter.report_html`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from train_drafter.report_cells import NONE, Table, scaled

# A key that is not named here stands under its own name.
_HEADS = {"temperature": "T", "draft_len": "K", "tau": "τ"}


def table(made: Table) -> str:
  """A table in a box of its own that scrolls where the page is narrow."""
  def row(cells, tag):
    marks = [' class="text"' if i < made.text_columns else "" for i in range(len(cells))]
    return "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>"
                   for mark, cell in zip(marks, cells, strict=True))

  body = "".join(f'<tr{" class=all" if cells[0] == "all" else ""}>{row(cells, "td")}</tr>'
                 for cells in made.rows)
  note = f'<p class="note">{escape(made.note)}</p>' if made.note else ""
  return (f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(made.title)}">'
          f"<table><thead><tr>{row(made.header, 'th')}</tr></thead><tbody>{body}</tbody></table>"
          f"</div>{note}")


def figure(svg: str, caption: str) -> str:
  return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def bullets(lines: Sequence[str]) -> str:
  return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def pairs(values: Mapping[str, str], short: bool = True) -> str:
  items = "".join(f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>"
                  for name, value in values.items())
  return f"<dl{' class=short' if short else ''}>{items}</dl>"


def cell(value: Any, name: str = "") -> str:
  """One value of an optional section as text: three digits, large numbers scaled, sizes in KiB and
  more where the key says bytes."""
  if value is None:
    return NONE
  if isinstance(value, bool):
    return "yes" if value else "no"
  if isinstance(value, int | float):
    if "bytes" in name or abs(value) >= 1e6:
      return scaled(value, "bytes" in name)
    if isinstance(value, int) or value == 0 or name == "temperature":
      return f"{value:g}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"
  if isinstance(value, list | tuple):
    return ", ".join(cell(v, name) for v in value) or NONE
  return str(value)


def rows_table(name: str, rows: Sequence[Mapping[str, Any]],
               heads: Mapping[str, str] | None = None) -> str:
  """A table of objects, the keys as columns; an interval `x_ci` stands behind `x`.

  Args:
    name: what the table shows.
    rows: the objects; one inside a row becomes columns of its own.
    heads: key -> head of the columns, in order; by default every key.
  """
  rows = [dict(flat(row)) for row in rows]
  keys = list(dict.fromkeys(key for row in rows for key in row))
  shown = ([k for k in heads if k in keys] if heads else
           [k for k in keys if not (k.endswith("_ci") and k[:-3] in keys)])
  first = lambda key: next((row[key] for row in rows if row.get(key) is not None), None)
  # Texts first, so that the columns that stand left are together.
  shown.sort(key=lambda key: not isinstance(first(key), str))

  def text(row, key):
    interval = row.get(f"{key}_ci")
    value = row.get(key)
    if isinstance(value, int | float) and interval and interval[0] is not None:
      return f"{value:.3f} ({interval[0]:.3f}–{interval[1]:.3f})"
    return cell(value, key)

  names = heads or _HEADS
  made = Table(name, [names.get(k, k.replace("_", " ").replace(".", "\n")) for k in shown],
               [[text(row, key) for key in shown] for row in rows],
               text_columns=sum(isinstance(first(key), str) for key in shown) or 1)
  return table(made)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
  """(dotted name, value) of everything inside an object."""
  for name, value in values.items():
    if isinstance(value, Mapping):
      yield from flat(value, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}", value
