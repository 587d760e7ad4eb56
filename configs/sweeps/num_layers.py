"""How many layers should a drafter have? More accept more and cost more: read tau beside the speed.

  python -m launch.sweep --sweep=configs/sweeps/num_layers.py --workdir=runs/num_layers

Each takes layers from both ends of a target of 30, as the demo is.
"""

from configs.sweeps import budgets
from launch.grid import Sweep, named, seeds


def get_sweep(arg: str = "") -> Sweep:
  """The sweep; `smoke` for a small one."""
  layers = lambda *chosen: {"drafter.init_layers": chosen}
  one, two, four = layers(29), layers(0, 29), layers(0, 1, 28, 29)
  return budgets.sweep(
      "num_layers", arg,
      full=seeds(named("layers", one=one, two=two, three=layers(0, 28, 29), four=four,
                       six=layers(0, 1, 2, 27, 28, 29)), 3),
      smoke=named("layers", one=one, two=two, four=four))
