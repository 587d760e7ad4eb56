"""Which layers of the target should a drafter of two layers start from, and do they matter?

  python -m launch.sweep --sweep=configs/sweeps/init_layers.py --workdir=runs/init_layers

The layers are those of a target of 30, as the demo is. The random start is the control.
"""

from configs.sweeps import budgets
from launch.grid import Sweep, named, seeds


def get_sweep(arg: str = "") -> Sweep:
  """The sweep; `smoke` for a small one."""
  start = lambda *layers: {"drafter.init": "target", "drafter.init_layers": layers}
  ends, random = start(0, 29), {"drafter.init": "random", "drafter.init_layers": (0, 29)}
  return budgets.sweep(
      "init_layers", arg,
      full=seeds(named("init", ends=ends, first=start(0, 1), last=start(28, 29),
                       middle=start(14, 15), spread=start(10, 20), random=random), 3),
      smoke=named("init", ends=ends, last=start(28, 29), random=random))
