"""The curriculum of a run: cheaper or easier training programs in front of the whole objective.

Called by train.py. The number of a step alone decides which program takes it, so that a resumed run
takes the same ones; validation always scores the whole objective.
"""

import dataclasses
from typing import Any

from flax import nnx


@dataclasses.dataclass(frozen=True, eq=False)
class Curriculum:
  """The programs of a run in their order.

  Attributes:
    ends: share of the run's steps at which each ends, ascending; the last is 1.
    setups: the `Setup` of train.py of each.
  """

  ends: tuple[float, ...]
  setups: tuple[Any, ...]

  def at(self, step: int, steps: int) -> Any:
    """The setup of a step (0-based) of a run of `steps`."""
    done = sum(step >= round(end * steps) for end in self.ends[:-1])
    return self.setups[done]

  def parts(self) -> list[tuple[float, Any]]:
    """(share of the run, setup) of each program."""
    return [(end - start, setup) for start, end, setup in zip(
        (0.0, *self.ends), self.ends, self.setups, strict=False)]


def curriculum(setup: Any, module: Any) -> Curriculum:
  """Of `train.ce_share` and `train.first_step_share`, which may overlap.

  Under the first the loss is the cross entropy of the teacher's best token: it learns fast where
  the gradient of the acceptance probability itself is still zero (METHODS section 3, tv). Under the
  second an eagle3 drafter trains the first of its draft steps alone, at less than half the cost of
  three: the later ones draft from its own states, which mean little before the first is good.

  Args:
    setup: of the whole objective.
    module: the drafter.
  """
  options, setups = setup.options, []
  ends = sorted({options.first_step_share, options.ce_share, 1.0} - {0.0})
  for end in ends:
    changes: dict[str, Any] = {}
    if end <= options.ce_share:
      changes["options"] = dataclasses.replace(options, loss="ce")
    if end <= options.first_step_share:
      changes["graph"] = _first_step(module)
    # Setups are told apart by identity: what is not changed must not compile twice.
    setups.append(dataclasses.replace(setup, **changes) if changes else setup)
  return Curriculum(tuple(ends), tuple(setups))


def _first_step(module: Any) -> nnx.GraphDef:
  """The graph definition of a drafter with one draft step; its arrays are the same."""
  copy = nnx.merge(*nnx.split(module))
  copy.steps = 1
  return nnx.graphdef(copy)
