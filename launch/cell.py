"""Runs one cell of a sweep: the stages it shares with others under a lock, then the rest.

  python -m launch.cell --workdir=runs/losses --cell=loss=ce

The launchers start it, one process for each cell, on whatever machine sees the folder of the sweep.
A shared stage lies in `stages/<stage>-<key>/` and is linked into the cell's folder; the first cell
that holds its lock makes it, the others wait. Locks are the kernel's (flock): they end with the
processes that hold them, also with killed ones. The folder needs a file system that has them (local
disks, NFS, Lustre mounted with flock).

Exit status: 0 done, 1 failed (cell.json says why), 75 the stage was told to stop and saved its work
(a scheduler's warning: run again), 76 another process runs this cell, 143 stopped by a signal.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from spec_jax import command
from spec_jax.errors import UserError
from train_drafter import manifest

SWEEP = "sweep.json"
RECORD = "cell.json"
LOG = "log.txt"
DONE, FAILED, AGAIN, ELSEWHERE, STOPPED = 0, 1, 75, 76, 128 + signal.SIGTERM
_POLL_S = 0.3
_ENTRY = {"name": str, "overrides": dict, "command": list, "stages": dict, "config": dict}


class Stopped(Exception):
  """SIGTERM or Ctrl-C came."""


@dataclasses.dataclass(frozen=True)
class Cell:
  """A cell as sweep.json has it.

  Attributes:
    root: folder of the sweep.
    name: of the cell.
    overrides: field -> value, without those of the whole sweep.
    command: the command line of the whole run.
    stages: stage -> shared folder, both in order; empty where nothing is shared.
  """

  root: Path
  name: str
  overrides: dict[str, Any]
  command: list[str]
  stages: dict[str, Path]

  @property
  def folder(self) -> Path:
    """The work folder of the run."""
    return self.root / "cells" / self.name


def load_sweep(root: Path) -> dict[str, Any]:
  """The content of sweep.json.

  Raises:
    UserError: there is none, or it is damaged.
  """
  path = root / SWEEP
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
    for entry in content["cells"]:
      for name, kind in _ENTRY.items():
        if not isinstance(entry[name], kind):
          raise TypeError(f"{name} of a cell is {entry[name]!r:.60}")
    return content
  except OSError as error:
    raise UserError(f"{path}: {error.strerror}") from None
  except (ValueError, KeyError, TypeError) as error:
    raise UserError(f"{path}: damaged ({error}); remove it, and the same launch.sweep writes it "
                    "anew") from None


def load_cells(root: Path) -> list[Cell]:
  """Every cell of a sweep.

  Raises:
    UserError: as `load_sweep`.
  """
  return [Cell(root, c["name"], c["overrides"], c["command"],
               {stage: root / folder for stage, folder in c["stages"].items()})
          for c in load_sweep(root)["cells"]]


def read_record(folder: Path) -> dict[str, Any]:
  """cell.json of a cell; empty when it never started."""
  try:
    found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return {}
  return found if isinstance(found, dict) else {}


# Locks.


@contextlib.contextmanager
def locked(path: Path, patience: float = math.inf) -> Iterator[int | None]:
  """Holds the lock of a file; yields its descriptor, or None when another process holds it for
  `patience` seconds.

  The descriptor goes to the child processes that work under the lock, so that it lasts as long as
  any of them.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
  end = time.monotonic() + patience
  held = False
  try:
    while not held:
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = True
      except BlockingIOError:
        if time.monotonic() >= end:
          break
        time.sleep(_POLL_S)
      except OSError as error:
        raise UserError(f"{path}: cannot be locked ({error.strerror}); sweeps share stages on a "
                        "file system with flock") from None
    yield descriptor if held else None
  finally:
    os.close(descriptor)


def is_locked(path: Path) -> bool:
  """Whether some process holds the lock of a file."""
  if not path.exists():
    return False
  with locked(path, 0.0) as held:
    return held is None


# One cell.


class Runner:
  """The state of `run_cell`: the child process and the signal that came."""

  def __init__(self, cell: Cell, launch: str, step: str, distributed: bool = False):
    self.cell, self.launch = cell, launch
    self.step, self.more = shlex.split(step), ["--distributed"] if distributed else []
    self.child: subprocess.Popen | None = None
    self.starting = False
    self.signum = 0

  def stop(self, signum: int, frame: Any) -> None:
    """Signal handler: the child is asked to end, and whatever waits gives up."""
    del frame
    self.signum = signum
    if self.child is not None:
      self.child.send_signal(signal.SIGTERM)
    elif not self.starting:
      raise Stopped

  def note(self, state: str, **more: Any) -> None:
    """Writes cell.json."""
    manifest.write_json(self.cell.folder / RECORD, {
        "state": state, **more, "host": socket.gethostname(), "pid": os.getpid(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")})

  def run(self, stage: str, *locks: int) -> None:
    """Runs one stage, or "all", as a child process.

    Raises:
      Stopped: a signal came.
      _Told: the child alone was told to stop.
      _Failed: it ended with an error, whose last line is the text.
    """
    self.note("running", stage=stage)
    log = self.cell.folder / LOG
    words = [*self.step, *self.cell.command, f"--stage={stage}", *self.more]
    before = {path: path.stat().st_size for path in _logs(self.cell.folder)}
    with open(log, "ab") as file:
      file.write(f"$ {shlex.join(words)}\n".encode())
      file.flush()
      before[log] = file.tell()
      self.starting = True  # a signal now would miss the child
      self.child = subprocess.Popen(
          words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, pass_fds=locks,
          start_new_session=True)
      self.starting = False
      if self.signum:
        self.child.send_signal(signal.SIGTERM)
      status = self.child.wait()
      self.child = None
    if self.signum:
      raise Stopped
    if status in (-signal.SIGTERM, 128 + signal.SIGTERM):
      time.sleep(1.0)  # a scheduler that ends the job signals both, the child a moment earlier
      if self.signum:
        raise Stopped
      raise _Told
    if status < 0:
      raise _Failed(f"stage {stage} was killed by {signal.Signals(-status).name}")
    if status:
      raise _Failed(last_error(self.cell.folder, before) or f"exit status {status}")

  def shared(self, stage: str, folder: Path, *locks: int) -> None:
    """Links a shared stage into the cell, and makes it unless that is done."""
    _link(self.cell.folder / stage, folder)
    lock = folder.with_name(f"{folder.name}.lock")
    if _complete(folder):
      return
    self.note("waiting", stage=stage)
    failure = folder.with_name(f"{folder.name}.failed")
    with locked(lock) as held:
      if _complete(folder):
        return
      known = _failure(failure)
      # One launch tries a stage once: twenty cells need not find out one after the other.
      if known and self.launch and known.get("launch") == self.launch:
        raise _Failed(f"{stage} failed in cell {known['cell']}: {known['reason']}")
      folder.mkdir(parents=True, exist_ok=True)
      try:
        self.run(stage, held, *locks)
      except _Failed as failed:
        manifest.write_json(failure, {
            "launch": self.launch, "cell": self.cell.name, "reason": str(failed)})
        raise
      failure.unlink(missing_ok=True)


class _Told(Exception):
  pass


class _Failed(Exception):
  pass


def run_cell(cell: Cell, launch: str = "", step: str = "", distributed: bool = False) -> int:
  """Runs what is missing of a cell.

  Args:
    cell: of sweep.json.
    launch: names the launch of the sweep that this belongs to; a shared stage that failed in it is
      not tried again.
    step: words in front of each stage's command line, such as "srun --label".
    distributed: the step starts several processes, which make one run.

  Returns:
    The exit status, as the module's docstring has it.

  Raises:
    UserError: the folder of the cell cannot be made.
  """
  try:
    cell.folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f"{cell.folder}: cannot be made ({error.strerror})") from None
  runner = Runner(cell, launch, step, distributed)
  before = {s: signal.signal(s, runner.stop) for s in (signal.SIGTERM, signal.SIGINT)}
  try:
    # A look at the state takes the lock for a moment.
    with locked(cell.folder / ".lock", 1.0) as held:
      if held is None:
        print(f"{cell.name}: another process runs this cell")
        return ELSEWHERE
      try:
        for stage, folder in cell.stages.items():
          runner.shared(stage, folder, held)
        runner.run("all", held)
      except Stopped:
        runner.note("stopped")
        return STOPPED
      except _Told:
        runner.note("stopped")
        return AGAIN
      except (_Failed, UserError) as failed:
        runner.note("failed", reason=str(failed))
        print(f"{cell.name}: failed: {failed}")
        return FAILED
      runner.note("done")
      return DONE
  except Stopped:
    return STOPPED
  finally:
    for signum, handler in before.items():
      signal.signal(signum, handler)


def _logs(folder: Path) -> list[Path]:
  """log.txt, and behind it the logs of the ranks of a step."""
  return sorted(folder.glob("log*.txt"), key=lambda path: (path.name != LOG, path.name))


def last_error(folder: Path, before: Mapping[Path, int]) -> str:
  """Why a program failed, from what its logs have gained: the last `error:` line, else the last
  line.

  Args:
    folder: of the cell.
    before: log -> bytes it had.
  """
  text = ""
  for log in _logs(folder):
    with open(log, "rb") as file:
      file.seek(before.get(log, 0))
      text += file.read().decode("utf-8", "replace") + "\n"
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  errors = [line for line in lines if line.startswith("error: ")]
  return errors[-1].removeprefix("error: ") if errors else lines[-1] if lines else ""


def _link(link: Path, folder: Path) -> None:
  target = os.path.relpath(folder, link.parent)
  if link.is_symlink() and os.readlink(link) == target:
    return
  if link.is_symlink() or link.exists():
    held = os.readlink(link) if link.is_symlink() else "a folder of its own"
    raise UserError(f"{link}: is {held}, the sweep now asks for {target}: its inputs have changed; "
                    "use another --workdir, or remove the folder of this cell")
  link.symlink_to(target, target_is_directory=True)


def _complete(folder: Path) -> bool:
  return (folder / manifest.FILE).exists() and manifest.Manifest.load(folder).complete


def _failure(path: Path) -> dict[str, Any]:
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return {}


def main() -> None:
  """The command line."""
  flags.DEFINE_string("workdir", "", "folder of the sweep")
  flags.DEFINE_string("cell", "", "name of the cell")
  flags.DEFINE_string("launch", "", "the launch of the sweep that this belongs to")
  flags.DEFINE_string("step", "", "words in front of each command line, such as srun")
  flags.DEFINE_bool("distributed", False, "the step starts several processes of one run")

  def execute(values: flags.FlagValues) -> int:
    for name in ("workdir", "cell"):
      if not values[name].value:
        raise UserError(f"--{name} is needed")
    cells = {cell.name: cell for cell in load_cells(Path(values.workdir))}
    if values.cell not in cells:
      raise UserError(f"--cell={values.cell}: is not in {Path(values.workdir) / SWEEP}")
    return run_cell(cells[values.cell], values.launch, values.step, values.distributed)

  command.run(execute, lambda argv: command.parse(argv, flags.FLAGS))


if __name__ == "__main__":
  main()
