"""What the tables of a report are made of: rows of strings, and numbers as text.

Used by the modules report_text, report_sections, report_elements and report_html.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

NONE = "–"


@dataclasses.dataclass(frozen=True)
class Table:
  """Strings of one table; a header may hold a line break."""

  title: str
  header: Sequence[str]
  rows: Sequence[Sequence[str]]
  note: str = ""
  text_columns: int = 1  # the first so many are text and stand left


def number(value: float | None, digits: int = 2) -> str:
  return NONE if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
  return NONE if value is None else f"{100 * value:.{digits}f}"


def with_interval(value: float | None, interval: Sequence[float | None]) -> str:
  """1.52 (1.41–1.63); the value alone where there is no interval."""
  if value is None or interval[0] is None:
    return number(value)
  return f"{value:.2f} ({interval[0]:.2f}–{interval[1]:.2f})"


def tau_text(group: dict) -> str:
  """Pooled tau of a group with its interval."""
  return with_interval(group["tau"], group["tau_ci"])


def setting_label(entry: dict, settings: Sequence[dict]) -> str:
  """T=0, with the rule where several share a temperature."""
  label = f"T={entry['temperature']:g}"
  alone = sum(e["temperature"] == entry["temperature"] for e in settings) == 1
  return label if alone else f"{label} {entry['rule']}"


def scaled(value: float, is_bytes: bool = False) -> str:
  """273e9 -> 273 G, and 1610612736 bytes -> 1.50 GiB."""
  for prefix, power in (("P", 5), ("T", 4), ("G", 3), ("M", 2), ("k", 1)):
    size = 1024**power if is_bytes else 1000**power
    if abs(value) >= size:
      return (f"{value / size:.2f} {prefix.replace('k', 'K')}iB" if is_bytes else
              f"{value / size:.4g} {prefix}")
  return f"{value:g} B" if is_bytes else f"{value:g}"
