"""How much does a drafter gain from more data? tau against answered tokens, with a fitted trend.

  python -m launch.sweep --sweep=configs/sweeps/data.py --workdir=runs/data

All runs take the same number of steps, so the small ones see their answers more often: what differs
is the data and not the compute.
"""

from configs.sweeps import budgets
from launch import trend
from launch.grid import Sweep, axis, seeds


def get_sweep(arg: str = "") -> Sweep:
  """The sweep; `smoke` for a small one."""
  return budgets.sweep(
      "data", arg, full=seeds(axis("prompts.count", 375, 750, 1500, 3000, 6000, 12000), 3),
      smoke=axis("prompts.count", 27, 54, 108), analyse=trend.tau_against_tokens,
      plot=trend.curve)
