"""Statistics of two runs on the same prompts: how far apart, how surely, among how many looks.

Called by `launch.compare`. The size of a difference comes with a bootstrap interval over prompts
(`spec_jax.records.tau_difference_ci`); whether it is more than chance is asked of a permutation
test, because an interval of three prompts that happen to agree excludes zero far too easily.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec_jax import records as metrics
from spec_jax.records import RowRecords

PERMUTATIONS = 20000
_CELLS = 4_000_000  # of a block of exchanges: 32 MB
_EQUAL = 1e-12  # differences of tau this close are the same one, summed in another order


def permutation_p(rows: Sequence[RowRecords], others: Sequence[RowRecords], *, seed: int = 0,
                  permutations: int = PERMUTATIONS) -> float:
  """Two-sided p-value of "which run a prompt's rounds came from does not matter".

  Under that hypothesis the two runs may be exchanged prompt by prompt; the p-value is the share of
  exchanges whose pooled tau differ at least as much as the measured ones. All exchanges are gone
  through where they are no more than `permutations`, else that many are drawn and the measured one
  counts among them.

  Args:
    rows: one `RowRecords` per prompt.
    others: of the other run, the same prompts in the same order.
    seed: of the draws.
    permutations: how many exchanges are looked at.

  Returns:
    The p-value; nan where a run has no rounds.

  Raises:
    ValueError: the lists differ in length.
  """
  if len(rows) != len(others):
    raise ValueError(f"permutation_p: {len(rows)} prompts against {len(others)}")
  # [side, prompt, (emitted, rounds)]; whole numbers in float64 are summed exactly.
  sums = np.array([[(int(r.emitted.sum()), r.rounds) for r in side] for side in (rows, others)],
                  np.float64).reshape(2, -1, 2)
  total = sums.sum(1)
  if not total[:, 1].all():
    return float("nan")
  change = sums[1] - sums[0]
  change = change[change.any(1)]  # an exchange of equal prompts changes nothing
  every = 2.0**len(change) <= permutations
  count = 2**len(change) if every else permutations
  random = np.random.default_rng(seed)
  measured = abs(total[0, 0] / total[0, 1] - total[1, 0] / total[1, 1])
  hits, step = 0, max(1, _CELLS // max(1, len(change)))
  for start in range(0, count, step):
    size = min(step, count - start)
    exchanged = (np.arange(start, start + size)[:, None] >> np.arange(len(change)) & 1 if every
                 else random.integers(2, size=(size, len(change))))
    moved = exchanged.astype(np.float64) @ change
    ours, theirs = total[0] + moved, total[1] - moved
    with np.errstate(divide="ignore", invalid="ignore"):
      apart = np.abs(ours[:, 0] / ours[:, 1] - theirs[:, 0] / theirs[:, 1])
    # An exchange that leaves one side without rounds says nothing: it counts as chance.
    hits += int((~(apart < measured - _EQUAL)).sum())
  return hits / count if every else (hits + 1) / (count + 1)


def holm(p_values: Sequence[float]) -> list[float]:
  """Holm's step-down adjustment: below 0.05 means significant among all of them at 5 %.

  The smallest of m p-values is multiplied by m, the next by m - 1, and so on, never below the one
  before. nan stays nan and does not count.
  """
  known = [i for i, p in enumerate(p_values) if not np.isnan(p)]
  adjusted, floor = [float("nan")] * len(p_values), 0.0
  for rank, i in enumerate(sorted(known, key=lambda i: p_values[i])):
    floor = max(floor, min(1.0, (len(known) - rank) * p_values[i]))
    adjusted[i] = floor
  return adjusted


def paired(rows: Sequence[RowRecords], others: Sequence[RowRecords], *, seed: int = 0) -> dict:
  """Everything about one difference of pooled tau, rows against others, ready for JSON.

  Returns:
    prompts, tau, tau_ci, baseline_tau, baseline_tau_ci, difference, difference_ci, p (before any
    adjustment), and better, equal, worse: prompts by their own tau (without rounds: in none).
  """
  apart = metrics.tau_per_prompt(rows) - metrics.tau_per_prompt(others)
  ours, theirs = metrics.tau(rows), metrics.tau(others)
  found = {
      "prompts": len(rows),
      "tau": ours, "tau_ci": metrics.tau_ci(rows, seed=seed),
      "baseline_tau": theirs, "baseline_tau_ci": metrics.tau_ci(others, seed=seed),
      "difference": ours - theirs,
      "difference_ci": metrics.tau_difference_ci(rows, others, seed=seed),
      "p": permutation_p(rows, others, seed=seed),
      "better": int((apart > 0).sum()), "equal": int((apart == 0).sum()),
      "worse": int((apart < 0).sum()),
  }
  return {name: metrics.to_plain(value) for name, value in found.items()}
