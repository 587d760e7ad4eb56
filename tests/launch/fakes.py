"""A sweep whose cells run tests/launch/fake_train.py."""

import sys
import time
from pathlib import Path

from launch import grid, sweep

BASE = """
from train_drafter.config import Config

def get_config():
  cfg = Config()
  cfg.target.source = "nowhere"
  return cfg
"""


def plan(folder: Path, cells, root: Path | None = None) -> list[sweep.Planned]:
  """The planned cells with the stand-in as their program; a target of 30 layers is made believe."""
  base = folder / "base.py"
  base.write_text(BASE)
  old = sweep._layers
  sweep._layers = lambda source: 30
  try:
    planned = sweep.expand(grid.Sweep(str(base), cells), root or folder / "sweep")
  finally:
    sweep._layers = old
  fake = str(Path(__file__).with_name("fake_train.py"))
  return [sweep.Planned(p.name, p.overrides, p.config, [sys.executable, fake, *p.command[3:]],
                        p.stages) for p in planned]


def write(folder: Path, cells) -> tuple[Path, list[str], str]:
  """Folder of a written sweep, names of its cells, id of the launch."""
  planned = plan(folder, cells)
  root = folder / "sweep"
  launch = sweep.write_record(
    root, planned, sweep="s.py", base="base.py", launcher="local", command_line="launch.sweep")
  return root, [p.name for p in planned], launch


def made(root: Path) -> list[str]:
  """What the stand-in made, a line for each stage, in order."""
  path = root / "made.txt"
  return path.read_text().splitlines() if path.exists() else []


def wait_for(test, seconds: float = 20.0) -> None:
  """Waits until `test()` holds."""
  end = time.monotonic() + seconds
  while not test():
    assert time.monotonic() < end, "it did not happen"
    time.sleep(0.05)
