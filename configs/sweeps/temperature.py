"""At which temperature should the target write the training data?

  python -m launch.sweep --sweep=configs/sweeps/temperature.py --workdir=runs/temperature

Each drafter is measured at temperature 0 and 1: data that suits one may not suit the other.
"""

from configs.sweeps import budgets
from launch.grid import Sweep, axis, seeds


def get_sweep(arg: str = "") -> Sweep:
  """The sweep; `smoke` for a small one."""
  heat = lambda *mixes: axis("generate.temperatures", *mixes)
  return budgets.sweep(
      "temperature", arg,
      full=seeds(heat((0.0,), (0.5,), (0.7,), (1.0,), (0.0, 1.0), (0.0, 0.5, 1.0)), 3),
      smoke=heat((0.0,), (0.0, 1.0)), fixed={"evaluate.temperatures": (0.0, 1.0)})
