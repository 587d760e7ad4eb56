"""The algebra of sweeps: grids are lists of plain dicts {"train.loss": "ce"}, one for each run.

  product(axis("train.loss", "ce", "fkl"), axis("drafter.steps", 1, 3))    every combination: 4
  zip_(axis("train.steps", 10, 20), axis("train.lr", 2e-3, 1e-3))          side by side: 2
  chain(grid, other)                                                       one after the other
  named("data", small={"prompts.count": 100, "train.steps": 50}, large={...})
  where(grid, lambda cell: cell["train.lr"] < 1e-2)                    a filter
  seeds(grid, 3)                                                           each with three seeds

Files in `configs/sweeps/` return a `Sweep`; `launch.sweep` lays each cell over the base config.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from spec_jax.errors import UserError

Cell = dict[str, Any]

_LONGEST_NAME = 100
_SAFE = re.compile(r"[^A-Za-z0-9.+=_-]+")


@dataclasses.dataclass(frozen=True)
class Sweep:
  """What `get_sweep` of a sweep file returns.

  Attributes:
    base: config file, also `file.py:argument`, that every cell starts from.
    cells: the grid.
    fixed: overrides of every cell, which its name leaves out.
    analyse: takes {name of a finished cell: its folder} and returns text to print at the end.
    plot: takes the same and returns an SVG, which is written beside that text.
  """

  base: str
  cells: Sequence[Cell]
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  analyse: Callable[[Mapping[str, Any]], str] | None = None
  plot: Callable[[Mapping[str, Any]], str] | None = None


def axis(name: str, *values: Any) -> list[Cell]:
  """One cell for each value of a field."""
  return [{name: value} for value in values]


def named(name: str, /, **choices: Mapping[str, Any]) -> list[Cell]:
  """One cell for each choice, which sets several fields and stands in the run's name as
  `name=choice`.

  In the cell it is one entry, "@name": (choice, fields); `settings` opens it.
  """
  return [{f"@{name}": (label, dict(fields))} for label, fields in choices.items()]


def product(*grids: Iterable[Cell]) -> list[Cell]:
  """Every combination, the last grid varying fastest; without any, one empty cell.

  Raises:
    UserError: two of them set one field.
  """
  cells: list[Cell] = [{}]
  for grid in map(list, grids):
    cells = [_merge(left, right) for left in cells for right in grid]
  return cells


def zip_(*grids: Iterable[Cell]) -> list[Cell]:
  """The first cells merged, the second ones, and so on.

  Raises:
    UserError: the lengths differ, or two grids set one field.
  """
  lists = [list(grid) for grid in grids]
  if len({len(grid) for grid in lists}) > 1:
    raise UserError(f"zip_: the grids have {', '.join(str(len(grid)) for grid in lists)} cells")
  return [product(*([cell] for cell in row))[0] for row in zip(*lists, strict=True)]


def chain(*grids: Iterable[Cell]) -> list[Cell]:
  """The cells of every grid, in order."""
  return [cell for grid in grids for cell in grid]


def where(grid: Iterable[Cell], test: Callable[[Cell], bool]) -> list[Cell]:
  """The cells for which `test` holds; it sees the fields of `settings` and, as "@name", the choice
  of every named axis."""
  return [cell for cell in grid if test(settings(cell) | _labels(cell))]


def seeds(grid: Iterable[Cell], count: int, field: str = "train.seed") -> list[Cell]:
  """Each cell with seeds 0..count-1 in `field`."""
  return product(grid, axis(field, *range(count)))


def settings(cell: Mapping[str, Any]) -> Cell:
  """The fields that a cell sets, those of named axes among them.

  Raises:
    UserError: a field is set twice.
  """
  out: Cell = {}
  for name, value in cell.items():
    out = _merge(out, value[1] if name.startswith("@") else {name: value})
  return out


def _labels(cell: Mapping[str, Any]) -> Cell:
  return {name: value[0] for name, value in cell.items() if name.startswith("@")}


def _merge(left: Mapping[str, Any], right: Mapping[str, Any]) -> Cell:
  for name in left:
    if name in right:
      raise UserError(f"{name} is set twice in one cell: {left[name]!r} and {right[name]!r}")
  return {**left, **right}


# Names.


def run_name(cell: Mapping[str, Any], fields: Iterable[str]) -> str:
  """A short name of a run from what it overrides, safe as a file name: "loss=lk_hybrid,lr=0.003".

  It depends on the cell and on the config's own fields, never on the other cells, so a sweep that
  grows keeps the names (and the folders) of the runs it had.

  Args:
    cell: of a grid.
    fields: dotted names of the config; a field is named by its last part where no other has it.
  """
  last: dict[str, int] = {}
  for name in fields:
    end = name.rsplit(".", 1)[-1]
    last[end] = last.get(end, 0) + 1
  parts, lossy = [], False
  for name, value in cell.items():
    if name.startswith("@"):
      short, text = name[1:], value[0]
    else:
      short, text = name.rsplit(".", 1)[-1], _text(value)
      short = short if last.get(short, 0) == 1 else name
    safe = _SAFE.sub("-", f"{short}={text}")
    lossy |= safe != f"{short}={text}"
    parts.append(safe)
  name = ",".join(parts) or "base"
  if lossy or len(name) > _LONGEST_NAME:
    content = json.dumps(cell, sort_keys=True, default=str)
    digest = hashlib.sha256(content.encode("utf-8")).hexdigest()[:8]
    name = f"{name[:_LONGEST_NAME - 9]}-{digest}"
  return name


def _text(value: Any) -> str:
  if isinstance(value, list | tuple):
    return "+".join(map(_text, value)) or "none"
  if isinstance(value, bool):
    return "true" if value else "false"
  if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
    return str(int(value))
  return str(value) or "none"


def flag_text(value: Any) -> str:
  """A value as `--config.name=` takes it."""
  if isinstance(value, bool):
    return "true" if value else "false"
  if isinstance(value, list | tuple):
    return "(" + "".join(f"{item!r}," for item in value) + ")"
  return value if isinstance(value, str) else repr(value)
