"""Which loss trains the drafter that accepts most?

  python -m launch.sweep --sweep=configs/sweeps/losses.py --workdir=runs/losses

Eight losses, three seeds each, on one set of answers. `losses.py:smoke` is three losses: enough to
see the machinery work, not to rank them.
"""

from configs.sweeps import budgets
from launch.grid import Sweep, axis, seeds
from train_drafter.config import LOSSES


def get_sweep(arg: str = "") -> Sweep:
  """The sweep; `smoke` for a small one."""
  return budgets.sweep(
      "losses", arg, full=seeds(axis("train.loss", *LOSSES), 3),
      smoke=axis("train.loss", "ce", "fkl", "lk_hybrid"))
