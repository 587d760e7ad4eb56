"""The replay estimate against hand-computed values, enumeration, and simulated decoding."""

import itertools

import numpy as np
import pytest

from spec_jax import records, replay
from spec_jax.records import RowRecords


def table(N, K, seed=0):
  return np.random.default_rng(seed).uniform(0, 1, (N, K))


def play(coins):
  """(accepted, emitted) of every round of one response, its coins [N, K] tossed beforehand: the
  loop of decoding, with no probability in it. A counts before the end cuts it."""
  N, K = coins.shape
  rounds, t = [], 0
  while t < N:
    accepted = 0
    while accepted < K and t + accepted + 1 <= N and coins[t, accepted]:
      accepted += 1
    emitted = min(accepted + 1, N - t)
    rounds.append((accepted, emitted))
    t += emitted
  return rounds


def enumerate_rounds(chance):
  """Expected rounds, by the probability of every outcome of all coins."""
  total = 0.0
  for outcome in itertools.product([0, 1], repeat=chance.size):
    coins = np.array(outcome, bool).reshape(chance.shape)
    total += np.where(coins, chance, 1 - chance).prod() * len(play(coins))
  return total


def test_hand_computed():
  # One token: one round, whatever the draft. Two tokens and K = 1, chance a for the first: with it
  # one round emits both, otherwise there is a second: 2 - a.
  assert replay.expected_rounds(np.array([[0.3]])) == 1
  assert replay.expected_rounds(replay.by_position(np.array([0.25, 0.9]), 1)) == 1.75
  # Three tokens, K = 2, chances 1/2: from the first start k = 0, 1, 2 with 1/2, 1/4, 1/4, which
  # leaves 2, 1, 0 tokens; E_2 = 1, E_1 = 1 + 1/2, so E_0 = 1 + 3/4 + 1/4 = 2.
  half = replay.by_position(np.full(3, 0.5), 2)
  assert replay.expected_rounds(half) == 2.0
  np.testing.assert_allclose(
      replay.accepted_law(half), [[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.5, 0.5, 0.0]])
  # Nothing is ever accepted, and everything is.
  assert replay.expected_rounds(np.zeros((7, 3))) == 7
  assert replay.expected_rounds(np.ones((8, 3))) == 2
  assert replay.expected_rounds(np.ones((9, 3))) == 3
  assert replay.expected_rounds(np.zeros((0, 3))) == 0
  # 12 tokens over 4 + 2 expected rounds, and a prompt whose prefill ended it.
  assert replay.tau(np.array([7, 5, 0]), np.array([4.0, 2.0, 0.0])) == 2.0
  assert np.isnan(replay.tau(np.array([0]), np.array([0.0])))


@pytest.mark.parametrize("N,K", [(1, 1), (3, 1), (3, 2), (4, 2), (3, 4), (4, 3)])
def test_against_every_outcome(N, K):
  chance = table(N, K, seed=10 * N + K)
  assert replay.expected_rounds(chance) == pytest.approx(enumerate_rounds(chance), rel=1e-12)


def test_by_position_is_one_diagonal_and_ignores_what_is_past_the_end():
  a = np.array([0.1, 0.2, 0.3])
  np.testing.assert_array_equal(
      replay.by_position(a, 2), [[0.1, 0.2], [0.2, 0.3], [0.3, 0.0]])
  chance = table(4, 3)
  junk = chance.copy()
  junk[3, 1:] = junk[2, 2] = np.nan
  assert replay.expected_rounds(junk) == replay.expected_rounds(chance)


def test_plausible_wrong_versions_differ():
  a = np.array([0.9, 0.2, 0.6, 0.8, 0.4, 0.7])
  right = replay.expected_rounds(replay.by_position(a, 3))

  def wrong(chance, past_end=0.0, K=3):
    rounds = np.full(len(chance) + K + 1, past_end)
    for t in range(len(chance) - 1, -1, -1):
      live = 1.0
      rounds[t] = 1.0
      for k in range(K):
        ahead = chance[t + k] if t + k < len(chance) else 0.0
        rounds[t] += live * (1 - ahead) * rounds[t + k + 1]
        live *= ahead
      rounds[t] += live * rounds[t + K + 1]
    return rounds[0]

  assert wrong(a) == pytest.approx(right)  # the same recursion, written out
  assert abs(wrong(a, past_end=1.0) - right) > 0.1  # a round counted behind the end
  assert abs(wrong(np.concatenate([[1.0], a])) - right) > 0.01  # the prefill's token as a draft
  q, p = np.array([0.2, 0.9, 0.3, 0.5]), np.array([0.5, 0.6, 0.6, 0.4])
  rounds = [replay.expected_rounds(replay.by_position(np.minimum(1, r), 2))
            for r in (q / p, p / q)]
  assert abs(rounds[0] - rounds[1]) > 0.1


def test_counts_agree_with_records_of_simulated_decoding():
  N, K, n = 9, 3, 20_000
  chance = table(N, K, seed=3) ** 0.5
  coins = np.random.default_rng(0).uniform(size=(n, N, K)) < chance
  rows = []
  for tossed in coins:
    accepted, emitted = zip(*play(tossed), strict=True)
    rows.append(RowRecords([K] * len(accepted), accepted, emitted, "length"))
  exact = replay.expected(chance)
  assert exact.rounds == pytest.approx(replay.expected_rounds(chance), rel=1e-12)
  total = records.counts(rows, K)
  spread = total.rounds.std() / n**0.5
  assert total.rounds.mean() == pytest.approx(exact.rounds, abs=4 * spread)
  for name in ("reached", "exposed"):
    sample = getattr(total, name)
    spread = sample.std(0) / n**0.5 + 1e-12
    assert (abs(sample.mean(0) - getattr(exact, name)) < 4 * spread + 1e-9).all(), name
  np.testing.assert_allclose(records.survival(rows, K), exact.reached / exact.exposed, atol=0.01)
  assert records.acceptance_rate(rows) == pytest.approx(
      exact.reached.sum() / exact.exposed.sum(), abs=0.01)
  assert records.tau(rows) == pytest.approx(N / exact.rounds, rel=0.01)
  assert exact.accepted.sum() == pytest.approx(exact.rounds)
  assert (exact.accepted * np.arange(K + 1)).sum() == pytest.approx(exact.reached.sum())


@pytest.mark.parametrize("K", [1, 3, 5])
def test_certain_coins_are_exact_hopping(K):
  match = np.random.default_rng(K).uniform(size=(40, K)) < 0.7
  emitted = replay.hop(match)
  assert emitted.sum() == 40 and (emitted >= 1).all() and (emitted <= K + 1).all()
  assert [e for _, e in play(match)] == emitted.tolist()
  assert replay.expected_rounds(match.astype(float)) == len(emitted)
  by_hand = np.array([[1, 1], [0, 0], [1, 1], [1, 0], [1, 1], [1, 1]], bool)
  assert replay.hop(by_hand).tolist() == [3, 2, 1]


def test_the_uniform_anchor_estimate_is_biased():
  """Easy tokens come in runs: rounds begin behind hard ones, where the next is hard again."""
  a = np.tile(np.repeat([0.98, 0.05], 10), 30)
  chance = replay.by_position(a, 4)
  total, count = replay.uniform_anchor(chance)
  assert count == len(a) - 3
  assert 1 + total / count > len(a) / replay.expected_rounds(chance) + 0.3
  # Where every coin is the same, starts do not matter: both are 1 + a + a^2.
  flat = replay.by_position(np.full(6000, 0.5), 2)
  total, count = replay.uniform_anchor(flat)
  assert 1 + total / count == pytest.approx(1.75)
  assert 6000 / replay.expected_rounds(flat) == pytest.approx(1.75, rel=1e-3)
  assert replay.uniform_anchor(chance[:3]) == (0.0, 0)


def test_intervals():
  rng = np.random.default_rng(0)
  tokens = rng.integers(50, 100, 60)
  expected = tokens / rng.uniform(1.5, 3.0, 60)
  low, high = replay.tau_ci(tokens, expected)
  assert low < replay.tau(tokens, expected) < high and high - low > 0.1
  same = replay.difference_ci(tokens, expected, expected)
  np.testing.assert_array_equal(same, [0, 0])
  noisy = expected + rng.normal(size=60)
  low, high = replay.difference_ci(tokens, noisy, expected)
  assert low < 0 < high and high - low < 0.1
  low, high = replay.difference_ci(tokens, expected * 1.05, expected)
  assert high < 0  # five percent more rounds are noticed
  assert np.isnan(replay.difference_ci(np.array([5, 0]), np.array([2, 0]), np.array([2, 0]))).all()


def test_what_is_no_probability_is_refused():
  for value in (-0.1, 1.5, np.nan):
    chance = np.full((4, 2), 0.5)
    chance[1, 1] = value
    with pytest.raises(ValueError, match=r"chance\[1, 1\]"):
      replay.expected_rounds(chance)
  with pytest.raises(ValueError, match="must be"):
    replay.expected_rounds(np.zeros((4, 0)))
