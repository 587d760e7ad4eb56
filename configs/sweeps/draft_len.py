"""How many tokens should be drafted in a round? One drafter, trained once, measured with each.

  python -m launch.sweep --sweep=configs/sweeps/draft_len.py --workdir=runs/draft_len
"""

from configs.sweeps import budgets
from launch.grid import Sweep, axis


def get_sweep(arg: str = "") -> Sweep:
  """The sweep; `smoke` for a small one."""
  return budgets.sweep(
      "draft_len", arg, full=axis("evaluate.draft_len", *range(1, 9)),
      smoke=axis("evaluate.draft_len", 2, 4))
