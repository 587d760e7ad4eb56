"""Launches a sweep: one run of train_drafter for each cell of a grid, and a table at the end.

  python -m launch.sweep --sweep=configs/sweeps/losses.py --workdir=runs/losses
  python -m launch.sweep --sweep=configs/sweeps/losses.py:smoke --workdir=runs/smoke --dry_run
  python -m launch.sweep --workdir=runs/losses --status

A sweep file has `get_sweep()`, or `get_sweep(argument)` for `file.py:argument`, which returns a
`launch.grid.Sweep`. Every cell is finalized and validated before anything starts. The folder then
holds sweep.json (cells, overrides, configs, folders, command lines), `cells/<name>/` (one run each)
and `stages/` (what cells share). The same command again runs what is missing.
"""

import copy
import dataclasses
import datetime
import functools
import json
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launch import cell as cell_lib
from launch import gke, grid, local, slurm, status
from spec_jax import command
from spec_jax.errors import UserError
from train_drafter import config_file, manifest, urls

LAUNCHERS = ("local", "slurm", "gke")


@dataclasses.dataclass(frozen=True)
class Planned:
  """A cell before it is written.

  Attributes:
    name: of the run.
    overrides: field -> value, without those of the whole sweep.
    config: the finalized and validated config.
    command: the command line of the whole run.
    stages: stage -> shared folder below the sweep's.
  """

  name: str
  overrides: dict[str, Any]
  config: Any
  command: list[str]
  stages: dict[str, str]

  def entry(self) -> dict[str, Any]:
    """What sweep.json holds of it."""
    return json.loads(json.dumps({
        "name": self.name, "folder": f"cells/{self.name}", "overrides": self.overrides,
        "command": self.command, "stages": self.stages,
        "config": dataclasses.asdict(self.config)}))


def load(argument: str) -> grid.Sweep:
  """The sweep of `file.py` or `file.py:argument`.

  Raises:
    UserError: one line for whatever is wrong with the file.
  """
  path, *arguments = argument.split(":", 1)
  found = config_file.call(path, "get_sweep", arguments, "--sweep")[1]
  if not isinstance(found, grid.Sweep):
    raise UserError(f"{path}: get_sweep() returned {type(found).__name__}, not a Sweep")
  return found


def expand(
    sweep: grid.Sweep, root: Path, *, python: str = sys.executable, share: bool = True,
    check_target: bool = True) -> list[Planned]:
  """Every cell, laid over the base config, finalized and validated.

  Args:
    sweep: what the sweep file returned.
    root: folder of the sweep.
    python: first word of the command lines.
    share: whether cells share stages.
    check_target: whether targets are opened, to check the layers that cells name. Sharing needs it.

  Raises:
    UserError: names the cell and the field; two cells that are the same.
  """
  from train_drafter import config as config_lib

  path, *arguments = sweep.base.split(":", 1)
  base = config_file.load(path, arguments, "the sweep's base")
  fields = [name for name, group in config_file.fields(base) if not group]
  config_file.overlay(base, sweep.fixed)
  layers = functools.cache(_layers)
  planned: list[Planned] = []
  seen: dict[str, int] = {}
  if not sweep.cells:
    raise UserError("the sweep has no cells: an axis has no value, or a filter leaves nothing")
  for number, cell in enumerate(sweep.cells, 1):
    if not isinstance(cell, Mapping) or not all(isinstance(field, str) for field in cell):
      raise UserError(f"cell {number} is {cell!r:.60}, not a dict of fields")
    name = grid.run_name(cell, fields)
    if name in seen:
      raise UserError(f"cells {seen[name]} and {number} are both named {name}")
    seen[name] = number
    cfg = copy.deepcopy(base)
    try:
      overrides = grid.settings(cell)
      both = sorted(set(overrides) & set(sweep.fixed))
      if both:
        raise UserError(f"{both[0]} is set by the cell and by the whole sweep")
      config_file.overlay(cfg, overrides)
      config_lib.finalize(cfg)
      config_lib.validate(cfg)
      stages = _checked_stages(cfg, layers, share) if check_target else {}
    except UserError as error:
      raise UserError(f"cell {number} ({name}): {error}") from None
    words = [f"--config.{field}={grid.flag_text(value)}"
             for field, value in {**sweep.fixed, **overrides}.items()]
    planned.append(Planned(
        name, overrides, cfg,
        [python, "-m", "train_drafter", f"--config={sweep.base}", *words,
         f"--workdir={root / 'cells' / name}"], stages))
  return planned


def _layers(source: str) -> int:
  from spec_jax.weights import open_checkpoint

  return open_checkpoint(source).config.num_layers


def _checked_stages(cfg: Any, layers: Callable[[str], int], share: bool) -> dict[str, str]:
  from launch import stages

  # What `train_drafter` refuses when it starts, without opening the target for every cell.
  held, drafter = layers(cfg.target.source), cfg.drafter
  if drafter.init == "target" and max(drafter.init_layers) >= held:
    raise UserError(f"drafter.init_layers={drafter.init_layers} must name layers 0..{held - 1} of "
                    "the target")
  found = stages.folders(cfg, layers)  # also checks the taps
  return found if share else {}


# The record.


def write_record(
    root: Path, planned: Sequence[Planned], *, sweep: str, base: str, launcher: str,
    command_line: str) -> str:
  """Writes sweep.json and returns the id of this launch.

  Raises:
    UserError: the folder holds a cell of the same name with another config.
  """
  entries = [cell.entry() for cell in planned]
  if (root / cell_lib.SWEEP).exists():
    _compare(root, {c["name"]: c for c in cell_lib.load_sweep(root)["cells"]}, entries)
  launch = secrets.token_hex(8)
  try:
    root.mkdir(parents=True, exist_ok=True)
    manifest.write_json(root / cell_lib.SWEEP, {
        "sweep": sweep, "base": base, "launcher": launcher, "command": command_line,
        "launch": launch, "cwd": str(Path.cwd()),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cells": entries})
  except FileExistsError as error:
    raise UserError(f"--workdir={root}: is a file, not a folder") from error
  except OSError as error:
    raise UserError(f"--workdir={root}: {error.strerror}") from error
  return launch


def _compare(root: Path, old: Mapping[str, dict], entries: Sequence[dict]) -> None:
  for entry in entries:
    before = old.pop(entry["name"], None)
    if before is None:
      continue
    for section, fields in entry["config"].items():
      for field, value in fields.items():
        # A field that there was not then had no say.
        known = before["config"].get(section, {}).get(field, value)
        if known != value:
          raise UserError(
              f"{root}: cell {entry['name']} was made with {section}.{field}={json.dumps(known)}, "
              f"this sweep has {json.dumps(value)}; use another --workdir")
  for name in old:
    print(f"cell {name} is no longer in the sweep; its folder stays")


def show_plan(planned: Sequence[Planned], console: Console) -> None:
  """The cells, what they share, and their command lines."""
  users: dict[str, int] = {}
  for cell in planned:
    for folder in cell.stages.values():
      users[folder] = users.get(folder, 0) + 1
  table = Table(title=f"{len(planned)} cells", title_justify="left")
  table.add_column("cell", overflow="fold")
  table.add_column("shared with others", overflow="fold")
  for cell in planned:
    table.add_row(escape(cell.name), ", ".join(
        stage for stage, folder in cell.stages.items() if users[folder] > 1) or "-")
  console.print(table)
  for folder, count in users.items():
    if count > 1:
      print(f"{folder}: made once for {count} cells")
  for cell in planned:
    print(shlex.join(cell.command))


# The end.


def finish(root: Path, sweep: grid.Sweep, planned: Sequence[Planned]) -> None:
  """Prints the table of states, the sweep's own analysis, and calls `launch.compare`."""
  states = status.read(root)
  status.show(states, Console())
  chosen = {cell.name for cell in planned}
  runs = {s.name: root / "cells" / s.name
          for s in states if s.state == "done" and s.name in chosen}
  # A sweep over the measurement itself compares runs that compare otherwise refuses to.
  measured = any(field.split(".")[0] in ("target", "evaluate")
                 for cell in planned for field in cell.overrides)
  compare(root, list(runs.values()), ["--allow_different"] if measured else [])
  for make, name in ((sweep.analyse, "analysis.txt"), (sweep.plot, "analysis.svg")):
    if make is None or not runs:
      continue
    try:
      text = make(runs)
      (root / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    except Exception as error:  # the sweep file's own code, behind hours of runs
      kind = type(error).__name__
      raise UserError(f"the analysis of the sweep failed: {kind}: {error}") from error
    print(text if name.endswith(".txt") else root / name)


def compare(root: Path, runs: Sequence[Path], more: Sequence[str] = ()) -> None:
  """Calls `python -m launch.compare` on finished runs, with `more` flags."""
  if len(runs) < 2:
    print(f"{len(runs)} finished cells: nothing to compare")
  else:
    words = [sys.executable, "-m", "launch.compare", *map(str, runs), f"--out={root / 'compare'}",
             *more]
    done = subprocess.run(words, check=False)
    if done.returncode:
      print(f"launch.compare ended with status {done.returncode}: {shlex.join(words)}")


# The command line.


def define_flags(values: flags.FlagValues) -> None:
  """Defines the flags of this program in `values`."""
  text = functools.partial(flags.DEFINE_string, flag_values=values)
  yes = functools.partial(flags.DEFINE_bool, flag_values=values)
  text("sweep", "", "sweep file, also file.py:argument for get_sweep")
  text("workdir", "", "folder of the sweep")
  flags.DEFINE_enum("launcher", "local", LAUNCHERS, "where cells run", flag_values=values)
  yes("dry_run", False, "check every cell and print what would run or be submitted")
  yes("status", False, "print the state of every cell and end")
  flags.DEFINE_float("watch", 0.0, "with --status: print again every so many seconds",
                     flag_values=values)
  local.define_flags(values)
  slurm.define_flags(values)
  gke.define_flags(values)


def execute(values: flags.FlagValues) -> int:
  """Runs the program; returns its exit status."""
  if not values.workdir:
    raise UserError("--workdir is needed")
  urls.check_local("--workdir", values.workdir)
  root = Path(values.workdir)
  if values.status:
    status.watch(root, values.watch)
    return 0
  if not values.sweep:
    raise UserError("--sweep is needed")
  sweep = load(values.sweep)
  launcher = values.launcher
  if launcher == "gke":
    return _on_gke(values, sweep, root)
  if launcher == "slurm":
    root = root.absolute()  # the job's folder is another one
  planned = expand(sweep, root)
  if values.dry_run:
    show_plan(planned, Console())
    if launcher == "slurm":
      print(slurm.array_script(
          slurm.options(values), root, [cell.name for cell in planned], launch="LAUNCH"))
    return 0
  gpus = local.gpus(values)
  launch = write_record(
      root, planned, sweep=values.sweep, base=sweep.base, launcher=launcher,
      command_line=shlex.join(["python", "-m", "launch.sweep", *sys.argv[1:]]))
  names = [cell.name for cell in planned]
  if launcher == "slurm":
    return slurm.launch(slurm.options(values), root, names, launch)
  code = local.launch(root, names, launch, parallel=values.parallel, gpus=gpus)
  if code in (0, 1):
    finish(root, sweep, planned)
  return code


def _on_gke(values: flags.FlagValues, sweep: grid.Sweep, root: Path) -> int:
  options = gke.options(values)
  more = ["--distributed"] if gke.pods(options) > 1 else []
  inside = gke.inside(options, root)
  planned = expand(sweep, inside, python="python", share=False, check_target=False)
  print("targets are not opened here: each job checks its own when it starts", file=sys.stderr)
  jobs = [gke.job_set(options, f"{root.name}-{cell.name}", [*cell.command, *more])
          for cell in planned]
  if values.dry_run:
    print(gke.to_yaml(jobs))
    return 0
  write_record(root, planned, sweep=values.sweep, base=sweep.base, launcher="gke",
               command_line=shlex.join(["python", "-m", "launch.sweep", *sys.argv[1:]]))
  return gke.apply(jobs)


def main() -> None:
  """The command line."""
  define_flags(flags.FLAGS)
  command.run(execute, lambda argv: command.parse(argv, flags.FLAGS),
              interrupted="interrupted; the same command goes on from here")


if __name__ == "__main__":
  main()
