"""The state of every cell of a sweep, read from its folders alone.

`python -m launch.sweep --workdir=... --status` prints it, whatever launched the cells; for SLURM
the states of the jobs are asked for too.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from launch import cell as cell_lib
from launch import slurm
from spec_jax.errors import UserError

_COLOURS = {"done": "green", "running": "cyan", "failed": "red", "waiting": "yellow"}


@dataclasses.dataclass(frozen=True)
class State:
  """One row of the table.

  Attributes:
    name: of the cell.
    state: queued, waiting (for a stage that another cell makes), running, stopped, failed or done;
      "lost" when it says running and no process holds its lock.
    stage: the stage it is at.
    step: "120/400" of training, "" before it.
    tau: of the report once there is one; before, "~1.8", the estimate from validation.
    note: why it failed, or what the scheduler says.
  """

  name: str
  state: str
  stage: str = ""
  step: str = ""
  tau: str = ""
  note: str = ""


def read(root: Path) -> list[State]:
  """The state of every cell.

  Raises:
    UserError: the folder holds no sweep.
  """
  jobs = slurm.cell_states(root)
  found = []
  for cell in cell_lib.load_cells(root):
    state = state_of(cell)
    job = jobs.get(cell.name)
    if job and state.state in ("queued", "stopped", "lost", "running", "waiting"):
      state = dataclasses.replace(state, note=job)
    found.append(state)
  return found


def state_of(cell: cell_lib.Cell) -> State:
  """The state of one cell."""
  folder = cell.folder
  record = cell_lib.read_record(folder)
  state = record.get("state", "queued")
  if state in ("running", "waiting") and not cell_lib.is_locked(folder / ".lock"):
    state = "lost"
  stage = record.get("stage", "")
  if state in ("running", "waiting") and stage == "all":
    stage = _stage_at(folder)
  return State(cell.name, state, stage, _steps(folder), tau_text(folder), record.get("reason", ""))


def tau_text(folder: Path) -> str:
  """tau of a run: from its report with the interval, before that the estimate of the validation."""
  tau = report_tau(folder)
  if tau is not None:
    value, (low, high) = tau
    return f"{value:.2f}" if low is None else f"{value:.2f} ({low:.2f}-{high:.2f})"
  found = [row for row in _metrics(folder) if row.get("split") == "validation"]
  if not found:
    return ""
  return f"~{estimate(found[-1], _config(folder, 'evaluate', 'draft_len', 5)):.2f}"


def report_tau(folder: Path) -> tuple[float, tuple[float | None, float | None]] | None:
  """tau and its interval at the lowest temperature of a run's report; None before there is one."""
  try:
    report = json.loads((folder / "evaluate" / "report.json").read_text(encoding="utf-8"))
    group = min(report["settings"], key=lambda s: s["temperature"])["all"]
    return (group["tau"], tuple(group["tau_ci"])) if group["tau"] is not None else None
  except (OSError, ValueError, KeyError):
    return None


def estimate(row: dict[str, Any], draft_len: int) -> float:
  """tau at temperature 0 that a validation predicts: 1 plus the chance that the first k drafts are
  the target's own choices, over k; a drafter that was scored at its first place alone counts as
  that good at all of them."""
  if "greedy_match_tau" in row:
    return row["greedy_match_tau"]
  return sum(row["greedy_match"] ** k for k in range(draft_len + 1))


def _steps(folder: Path) -> str:
  rows = _metrics(folder)
  if not rows:
    return ""
  total = _config(folder, "train", "steps", 0)
  if not total:
    try:
      total = json.loads((folder / "train" / "plan.json").read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError):
      total = "?"
  return f"{rows[-1]['step']}/{total}"


def _stage_at(folder: Path) -> str:
  for stage in ("export", "evaluate", "train", "extract", "generate", "prompts"):
    if (folder / stage).exists():
      return stage
  return "prompts"


def _metrics(folder: Path) -> list[dict]:
  rows = []
  try:
    for line in (folder / "train" / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
      rows.append(json.loads(line))
  except (OSError, ValueError):
    pass  # not there yet, or its last line is being written
  return rows


def _config(folder: Path, section: str, field: str, default: Any) -> Any:
  try:
    record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return record["config"][section][field]
  except (OSError, ValueError, KeyError):
    return default


def table(states: Sequence[State]) -> Table:
  """The states as a rich table."""
  counts: dict[str, int] = {}
  for s in states:
    counts[s.state] = counts.get(s.state, 0) + 1
  title = ", ".join(f"{count} {state}" for state, count in counts.items())
  out = Table(title=f"{len(states)} cells: {title}", title_justify="left")
  out.add_column("cell", overflow="fold")
  for name in ("state", "stage", "step", "tau (T=0)"):
    out.add_column(name, no_wrap=True)
  out.add_column("note", overflow="fold")
  for s in states:
    colour = _COLOURS.get(s.state)
    state = f"[{colour}]{s.state}[/]" if colour else s.state
    out.add_row(escape(s.name), state, s.stage, s.step, s.tau, escape(s.note))
  return out


def show(states: Sequence[State], console: Console) -> None:
  """Prints the table."""
  console.print(table(states))


def watch(root: Path, seconds: float) -> None:
  """Prints the table once, or again every so many seconds until every cell has ended.

  Raises:
    UserError: `seconds` is negative, or the folder holds no sweep.
  """
  if seconds < 0:
    raise UserError(f"--watch={seconds} must be >= 0")
  if cell_lib.load_sweep(root).get("launcher") == "gke":
    print("the cells write to their bucket, not to this folder; `kubectl get jobsets` knows their "
          "state")
  states = read(root)
  if not seconds:
    show(states, Console())
    return
  with Live(table(states), auto_refresh=False) as live:
    while any(s.state not in ("done", "failed") for s in states):
      time.sleep(seconds)
      states = read(root)
      live.update(table(states), refresh=True)
