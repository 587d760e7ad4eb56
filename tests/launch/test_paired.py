"""Paired differences: against enumeration by hand, coverage and false alarms on simulated runs."""

import itertools

import numpy as np
import pytest

from launch import paired as lib
from spec_jax import records
from spec_jax.records import RowRecords


def row(accepted, proposed=5):
  return RowRecords([proposed] * len(accepted), accepted, [a + 1 for a in accepted], "length")


def test_p_value_by_hand():
  """Three prompts, each better by itself: of the 8 exchanges only all or none are as far apart."""
  ours, theirs = [row([3, 3]), row([4]), row([2])], [row([1, 1]), row([0]), row([0])]
  assert lib.permutation_p(ours, theirs) == 2 / 8
  assert lib.permutation_p(theirs, ours) == 2 / 8
  # A prompt that is equal on both sides neither helps nor hurts.
  assert lib.permutation_p([*ours, row([5])], [*theirs, row([5])]) == 2 / 8


def test_p_value_agrees_with_a_loop_over_exchanges():
  rng = np.random.default_rng(3)
  sides = [[row(rng.integers(0, 5, size=rng.integers(1, 6)).tolist()) for _ in range(7)]
           for _ in range(2)]
  gaps = []
  for flip in itertools.product([0, 1], repeat=7):
    taus = [records.tau([sides[side ^ f][i] for i, f in enumerate(flip)]) for side in (0, 1)]
    gaps.append(abs(taus[0] - taus[1]))
  expected = np.mean([g >= gaps[0] - 1e-9 for g in gaps])
  assert 0 < expected < 1
  assert lib.permutation_p(*sides) == pytest.approx(expected)
  drawn = lib.permutation_p(*sides, permutations=100)
  assert drawn == pytest.approx(expected, abs=0.2) and drawn >= 1 / 101


def test_blocks_of_exchanges_give_the_same_answer(monkeypatch):
  rng = np.random.default_rng(4)
  sides = [[row(rng.integers(0, 5, size=4).tolist()) for _ in range(9)] for _ in range(2)]
  whole = lib.permutation_p(*sides)
  monkeypatch.setattr(lib, "_CELLS", 50)
  assert lib.permutation_p(*sides) == whole


def test_equal_runs_and_runs_without_rounds():
  ours = [row([1, 2]), row([0])]
  assert lib.permutation_p(ours, ours) == 1
  empty = [row([]), row([])]
  assert np.isnan(lib.permutation_p(ours, empty))
  found = lib.paired(ours, empty)
  assert found["p"] is None and found["difference"] is None
  assert (found["better"], found["equal"], found["worse"]) == (0, 0, 0)
  with pytest.raises(ValueError, match="2 prompts against 1"):
    lib.permutation_p(ours, ours[:1])
  with pytest.raises(ValueError, match="2 prompts against 1"):
    records.tau_difference_ci(ours, ours[:1])


def test_false_alarms_are_as_rare_as_promised():
  """Two drafters of the same law on prompts that differ widely in difficulty."""
  rng = np.random.default_rng(0)
  alarms = 0
  for seed in range(200):
    rates = rng.uniform(0.1, 0.8, size=12)
    sides = [[row(rng.binomial(5, r, size=6).tolist()) for r in rates] for _ in range(2)]
    alarms += lib.permutation_p(*sides, seed=seed, permutations=500) < 0.05
  assert alarms <= 21  # 10 expected; above that once in a thousand


def test_interval_covers_the_true_difference_and_gains_from_pairing():
  rng = np.random.default_rng(1)
  hits, widths, apart = 0, [], []
  for seed in range(150):
    rates = rng.choice([0.1, 0.7], size=40)
    ours, theirs = ([row(rng.binomial(5, r + shift, size=15).tolist()) for r in rates]
                    for shift in (0.1, 0.0))
    low, high = records.tau_difference_ci(ours, theirs, seed=seed, resamples=400)
    hits += low <= 0.5 <= high
    widths.append(high - low)
    apart.append(np.ptp(records.tau_ci(ours, seed=seed, resamples=400)))
  assert 0.88 <= hits / 150 <= 0.99
  assert np.mean(widths) < 0.6 * np.mean(apart)  # what the prompts share cancels


def test_interval_of_two_prompts_is_the_spread_of_its_resamples():
  """Prompt 1: 4 against 2; prompt 2: 3 against 2: the resamples give 2, 1.5 or 1."""
  ours, theirs = [row([3]), row([2])], [row([1]), row([1])]
  assert records.tau_difference_ci(ours, theirs, seed=1).tolist() == [1, 2]
  assert np.isnan(records.tau_difference_ci(ours[:1], theirs[:1])).all()


def test_interval_matches_a_loop_that_draws_the_same_prompts_on_both_sides():
  """Prompts of very different length: the rounds of both runs must be drawn with the tokens."""
  rng = np.random.default_rng(7)
  sides = [[], []]
  for _ in range(25):
    size, rate = rng.integers(1, 30), rng.uniform(0.1, 0.9)
    for side in sides:
      side.append(row(rng.binomial(5, rate, size=size + rng.integers(0, 3)).tolist()))
  gaps = []
  for _ in range(3000):
    drawn = rng.integers(25, size=25)
    gaps.append(records.tau([sides[0][i] for i in drawn])
                - records.tau([sides[1][i] for i in drawn]))
  np.testing.assert_allclose(records.tau_difference_ci(*sides, resamples=4000),
                             np.quantile(gaps, [0.025, 0.975]), atol=0.03)


def test_paired_by_hand():
  found = lib.paired([row([3]), row([1, 1]), row([0])], [row([1]), row([1]), row([2])])
  assert found["tau"] == pytest.approx(9 / 4) and found["baseline_tau"] == pytest.approx(7 / 3)
  assert found["difference"] == pytest.approx(9 / 4 - 7 / 3)
  assert (found["better"], found["equal"], found["worse"]) == (1, 1, 1)
  assert found["prompts"] == 3


def test_holm_by_hand():
  """Ordered 0.01, 0.02, 0.04: times 3, 2, 1, never falling."""
  assert lib.holm([0.02, 0.01, 0.04]) == pytest.approx([0.04, 0.03, 0.04])
  assert lib.holm([0.02]) == [0.02]
  assert lib.holm([0.9, 0.8]) == [1, 1]
  adjusted = lib.holm([float("nan"), 0.03])
  assert np.isnan(adjusted[0]) and adjusted[1] == 0.03
