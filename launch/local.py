"""Runs the cells of a sweep on this machine, one after the other or a few at a time.

Called by launch.sweep. Each cell is a process of `launch.cell` with its own log; a cell that fails
stops no other. SIGTERM and Ctrl-C reach every cell, which saves its work and ends; the same command
goes on from there. A cell that another process runs already (a second launch of the sweep, or the
cell of a launcher that was killed) is waited for.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from launch import cell as cell_lib
from launch import status
from spec_jax.errors import UserError
from train_drafter.progress import clock_text

_POLL_S = 0.2


def define_flags(values: flags.FlagValues) -> None:
  """Defines the flags of this launcher in `values`."""
  flags.DEFINE_integer("parallel", 1, "local: cells that run at once", flag_values=values)
  flags.DEFINE_string(
      "gpus", "", "local: devices that cells take in turn, such as 0,1,2,3; sets --parallel",
      flag_values=values)


def gpus(values: flags.FlagValues) -> list[str]:
  """The devices of --gpus.

  Raises:
    UserError: --parallel is below 1.
  """
  if values.parallel < 1:
    raise UserError(f"--parallel={values.parallel} must be at least 1")
  return [name.strip() for name in values.gpus.split(",") if name.strip()]


def launch(
    root: Path, names: Sequence[str], launch_id: str, *, parallel: int = 1,
    gpus: Sequence[str] = ()) -> int:
  """Runs every cell that is not done.

  Args:
    root: folder of the sweep, with its sweep.json.
    names: of the cells, in order.
    launch_id: of `write_record`.
    parallel: cells at once.
    gpus: CUDA device of each place; as many cells run at once as there are.

  Returns:
    0 when every cell is done, 1 when one is not, 128 + signal when one came.
  """
  todo = [name for name in names if not _done(root, name)]
  if len(todo) < len(names):
    print(f"{len(names) - len(todo)} of {len(names)} cells are done already", flush=True)
  places: list[str | None] = list(gpus) or [None] * parallel
  running: dict[str, tuple[subprocess.Popen, str | None, float]] = {}
  elsewhere: list[str] = []  # cells that other processes run
  bad, came = 0, 0

  def stop(signum, frame):
    nonlocal came
    del frame
    if not came:
      print("stopping; every cell saves its work first", file=sys.stderr, flush=True)
    came = signum
    for process, _, _ in list(running.values()):
      process.send_signal(signal.SIGTERM)

  before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
  try:
    while running or ((todo or elsewhere) and not came):
      for name in [n for n in elsewhere if not cell_lib.is_locked(root / "cells" / n / ".lock")]:
        elsewhere.remove(name)
        todo.append(name)
      while todo and places and not came:
        name = todo.pop(0)
        if _done(root, name):  # by another launch of the sweep since
          print(f"{name}: {_ending(root, name, cell_lib.DONE)}", flush=True)
          continue
        place = places.pop(0)
        running[name] = (_start(root, name, launch_id, place), place, time.monotonic())
        print(f"{name}: started", flush=True)
        if came:  # it came while the process was being started
          running[name][0].send_signal(signal.SIGTERM)
      for name, (process, place, began) in list(running.items()):
        code = process.poll()
        if code is not None:
          del running[name]
          places.insert(0, place)
          if code == cell_lib.ELSEWHERE:
            elsewhere.append(name)
          else:
            bad += code != cell_lib.DONE
          print(f"{name}: {_ending(root, name, code)}  "
                f"{clock_text(time.monotonic() - began)}", flush=True)
      time.sleep(_POLL_S)
  finally:
    for signum, handler in before.items():
      signal.signal(signum, handler)
  return 128 + came if came else int(bad > 0)


def _done(root: Path, name: str) -> bool:
  return cell_lib.read_record(root / "cells" / name).get("state") == "done"


def _start(root: Path, name: str, launch_id: str, gpu: str | None) -> subprocess.Popen:
  words = [sys.executable, "-m", "launch.cell", f"--workdir={root}", f"--cell={name}",
           f"--launch={launch_id}"]
  env = dict(os.environ) if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
  # A session of its own: Ctrl-C on the terminal reaches this process, which tells the cells.
  # Its stderr is this one's: what keeps a cell from its own log is told there.
  return subprocess.Popen(
      words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)


def _ending(root: Path, name: str, code: int) -> str:
  folder = root / "cells" / name
  if code == cell_lib.DONE:
    found = status.state_of(cell_lib.Cell(root, name, {}, [], {}))
    return f"done, tau {found.tau}"
  if code == cell_lib.FAILED:
    reason = cell_lib.read_record(folder).get("reason", "")
    return f"failed: {reason} ({folder / cell_lib.LOG})"
  return {
      cell_lib.ELSEWHERE: "another process runs it; waiting for that one",
      cell_lib.AGAIN: "was told to stop and saved its work",
      cell_lib.STOPPED: "stopped",
  }.get(code, f"ended with status {code} ({folder / cell_lib.LOG})")
