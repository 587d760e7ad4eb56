"""What the sweeps of this folder share, so that their tables can be laid side by side.

Every run of a sweep trains the same number of steps: a time budget would give a slow drafter fewer
of them, and would measure the machine.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.grid import Cell, Sweep, settings
from spec_jax.errors import UserError

FULL = {"generate.budget_s": 0.0, "train.budget_s": 0.0, "train.steps": 2000}

# 72 answers of 40 tokens, 60 steps of 512 tokens, two evaluation prompts of each category.
SMOKE = {
    "prompts.count": 72, "prompts.eval_per_category": 2, "generate.max_new_tokens": 40,
    "generate.max_prompt_tokens": 192, "generate.budget_s": 0.0,
    "train.budget_s": 0.0, "train.steps": 60, "train.batch_rows": 2, "train.seq_len": 256,
    "train.validation": 8, "train.eval_every": 20,
    "evaluate.max_new_tokens": 40, "evaluate.temperatures": (0.0,), "evaluate.same_shape": False,
    "evaluate.speed_dtypes": ("bfloat16",), "evaluate.speed_prompts": 2,
    "evaluate.untrained_per_category": 1, "evaluate.batch_size": 18, "export.prompts": 1}


def sweep(
    name: str, arg: str, full: Sequence[Cell], smoke: Sequence[Cell], *,
    fixed: Mapping[str, Any] | None = None,
    analyse: Callable[[Mapping[str, Path]], str] | None = None,
    plot: Callable[[Mapping[str, Path]], str] | None = None) -> Sweep:
  """The sweep of a file in this folder.

  Args:
    name: of the file.
    arg: "" for the cells of `full` on configs/small_lm.py (12,000 prompts), "smoke" for those of
      `smoke` on configs/quickstart.py, some minutes each on two cores.
    full: cells.
    smoke: cells.
    fixed: overrides of every cell, over those of this file.
    analyse, plot: as `Sweep` has them.

  Raises:
    UserError: another argument.
  """
  if arg not in ("", "smoke"):
    raise UserError(f"configs/sweeps/{name}.py:{arg} is unknown (only smoke)")
  cells, base = (smoke, "configs/quickstart.py") if arg else (full, "configs/small_lm.py")
  varied = {field for cell in cells for field in settings(cell)}
  common = {**(SMOKE if arg else FULL), **(fixed or {})}
  return Sweep(base, cells, {f: v for f, v in common.items() if f not in varied}, analyse,
               plot)
