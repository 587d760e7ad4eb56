"""The metrics: hand-computed values, an independent slow recomputation, and refused records."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax import records
from spec_jax.records import RowRecords


def row(accepted, emitted=None, proposed=5, reason="length"):
  """Rounds of K=`proposed`; without `emitted` nothing is truncated."""
  emitted = [a + 1 for a in accepted] if emitted is None else emitted
  return RowRecords([proposed] * len(accepted), accepted, emitted, reason)


def test_example_of_the_definitions():
  """A = [5, 0, 2], K = 5, nothing truncated."""
  rows = [row([5, 0, 2])]
  assert records.tau(rows) == pytest.approx(10 / 3)
  assert records.acceptance_rate(rows) == pytest.approx(7 / 15)
  np.testing.assert_allclose(records.survival(rows, 5), [2 / 3, 2 / 3, 1 / 3, 1 / 3, 1 / 3])
  np.testing.assert_allclose(records.conditional(rows, 5), [2 / 3, 1, 1 / 2, 1, 1])
  assert records.summarize(rows, 5)["cut_rounds"] == 0


def test_block_cut_by_eos_counts_what_was_emitted():
  """K = 5, all five match, EOS is the third: three, not six, and three drafts, not five."""
  rows = [row([5], [3], reason="eos")]
  summary = records.summarize(rows, 5)
  assert summary["tau"] == 3
  assert summary["acceptance_rate"] == 1
  assert summary["survival"] == [1, 1, 1, None, None]
  assert summary["conditional"] == [1, 1, 1, None, None]
  assert (summary["rounds"], summary["emitted"], summary["cut_rounds"]) == (1, 3, 1)


def test_cut_round_beside_whole_ones():
  """A = [5, 0, 2, 4→2]: the cut round is in the denominators of positions 1 and 2 alone."""
  rows = [row([5, 0, 2, 4], [6, 1, 3, 2], reason="eos")]
  assert records.tau(rows) == pytest.approx(12 / 4)
  assert records.acceptance_rate(rows) == pytest.approx((5 + 0 + 2 + 2) / (5 + 5 + 5 + 2))
  np.testing.assert_allclose(records.survival(rows, 5), [3 / 4, 3 / 4, 1 / 3, 1 / 3, 1 / 3])
  np.testing.assert_allclose(records.conditional(rows, 5), [3 / 4, 1, 1 / 2, 1, 1])


def test_eos_as_the_bonus_is_no_cut():
  rows = [row([5], [6], reason="eos")]
  assert records.summarize(rows, 5)["cut_rounds"] == 0
  assert records.acceptance_rate(rows) == 1


def test_eos_as_the_last_accepted_draft_is_a_cut():
  """A = 3 of 5 and the third is EOS: the rejected fourth would have come after the end."""
  rows = [row([3], [3], reason="eos")]
  assert records.summarize(rows, 5)["cut_rounds"] == 1
  assert records.acceptance_rate(rows) == 1


def test_only_eos_counts_as_a_cut_by_eos():
  """Cut by EOS, cut by the budget, EOS as the bonus (no cut), and a row without rounds."""
  rows = [row([0, 5], [1, 3], reason="eos"), row([5], [3]), row([5], [6], reason="eos"),
          row([], reason="eos")]
  summary = records.summarize(rows, 5)
  assert (summary["cut_rounds"], summary["eos_cut_rounds"], summary["rounds"]) == (2, 1, 4)
  assert summary["eos_cut_share"] == 1 / 4
  assert records.summarize(rows[3:], 5)["eos_cut_share"] is None


def test_fewer_proposals_are_not_a_cut():
  """One draft proposed and accepted, K = 3: the round did not reach position 2."""
  rows = [row([1], proposed=1)]
  np.testing.assert_allclose(records.survival(rows, 3), [1, 0, 0])
  assert records.conditional(rows, 3)[1] == 0
  assert records.acceptance_rate(rows) == 1


def test_pooled_tau_is_not_the_mean_over_prompts():
  """A prompt of one round with tau 6 and one of three rounds with tau 1."""
  rows = [row([5]), row([0, 0, 0])]
  assert records.tau(rows) == pytest.approx(9 / 4)
  assert records.tau_mean(rows) == pytest.approx(7 / 2)


def test_prompt_without_rounds_counts_none():
  rows = [row([5]), row([], reason="eos"), row([0, 0, 0])]
  summary = records.summarize(rows, 5)
  assert (summary["prompts"], summary["rounds"]) == (3, 4)
  assert summary["tau"] == pytest.approx(9 / 4)
  assert summary["tau_mean"] == pytest.approx(7 / 2)
  assert math.isnan(records.tau_per_prompt(rows)[1])


def test_nothing_at_all_is_null():
  summary = records.summarize([], 2)
  assert summary["prompts"] == summary["rounds"] == 0
  assert summary["tau"] is None and summary["acceptance_rate"] is None
  assert summary["tau_ci"] == [None, None] and summary["survival"] == [None, None]


def test_summary_has_the_keys_and_plain_values():
  summary = records.summarize([row([5, 0]), row([2])], 5)
  assert set(summary) == {
      "prompts", "rounds", "emitted", "cut_rounds", "eos_cut_rounds", "eos_cut_share", "tau",
      "tau_ci", "tau_mean", "tau_mean_ci", "acceptance_rate", "acceptance_rate_ci", "survival",
      "survival_ci", "conditional"}
  assert type(summary["rounds"]) is int and type(summary["tau"]) is float
  assert len(summary["survival_ci"]) == 5 and len(summary["survival_ci"][0]) == 2


# --- intervals


def test_interval_of_two_prompts_is_the_spread_of_its_resamples():
  """Resamples of two prompts (tau 6, one round; tau 1, three rounds): 1, 9/4 or 6."""
  low, high = records.tau_ci([row([5]), row([0, 0, 0])], seed=3)
  assert (low, high) == (1, 6)
  low, high = records.tau_ci([row([5]), row([0, 0, 0])], seed=3, level=0.4)
  assert (low, high) == (9 / 4, 9 / 4)


def test_interval_matches_a_resampling_loop():
  rng = np.random.default_rng(0)
  rows = [row(rng.integers(0, 6, size=rng.integers(1, 20)).tolist()) for _ in range(30)]
  taus = []
  for _ in range(3000):
    drawn = [rows[i] for i in rng.integers(len(rows), size=len(rows))]
    taus.append(sum(r.emitted.sum() for r in drawn) / sum(len(r.emitted) for r in drawn))
  expected = np.quantile(taus, [0.025, 0.975])
  np.testing.assert_allclose(records.tau_ci(rows, resamples=4000), expected, atol=0.03)


def test_interval_is_seeded_and_narrows():
  rng = np.random.default_rng(1)
  rows = [row(rng.integers(0, 6, size=10).tolist()) for _ in range(400)]
  np.testing.assert_array_equal(records.tau_ci(rows, seed=7), records.tau_ci(rows, seed=7))
  assert np.ptp(records.tau_ci(rows)) < np.ptp(records.tau_ci(rows[:25])) / 2


def test_interval_covers_the_truth_as_often_as_it_says():
  """Prompts differ in their rate; a loop over rounds instead of prompts would cover far less."""
  rng = np.random.default_rng(5)
  hits, trials = 0, 300
  for seed in range(trials):
    rows = [row(rng.binomial(5, rng.choice([0.1, 0.6]), size=20).tolist()) for _ in range(40)]
    low, high = records.tau_ci(rows, seed=seed, resamples=400)
    hits += low <= 1 + 5 * 0.35 <= high
  assert 0.89 <= hits / trials <= 0.985


def test_one_prompt_has_no_interval():
  assert np.isnan(records.tau_ci([row([5, 0, 2])])).all()
  assert np.isnan(records.tau_ci([row([5, 0, 2]), row([], reason="eos")])).all()


# --- an independent recomputation, round by round


def slow_summary(rows, draft_len):
  """The definitions as a loop over rounds and positions, sharing no code with records.py."""
  emitted = rounds = drafts = matched = 0
  reached = [0] * draft_len
  exposed = [0] * draft_len
  eligible = [0] * draft_len
  for r in rows:
    for k_all, a_all, e in zip(r.proposed.tolist(), r.accepted.tolist(), r.emitted.tolist(),
                               strict=True):
      whole = e == a_all + 1
      rounds += 1
      emitted += e
      outcome = []
      for j in range(1, k_all + 1):
        if whole or j <= e:
          outcome.append(j <= a_all)
      drafts += len(outcome)
      matched += sum(outcome)
      for j in range(1, draft_len + 1):
        if not whole and j > e:
          continue
        exposed[j - 1] += 1
        got = j <= len(outcome) and outcome[j - 1]
        reached[j - 1] += got
        if all(outcome[:j - 1]) and len(outcome) >= j - 1:
          eligible[j - 1] += 1
  def ratio(a, b):
    return None if b == 0 else a / b
  return {
      "rounds": rounds, "emitted": emitted,
      "tau": ratio(emitted, rounds),
      "acceptance_rate": ratio(matched, drafts),
      "survival": [ratio(a, b) for a, b in zip(reached, exposed, strict=True)],
      "conditional": [ratio(a, b) for a, b in zip(reached, eligible, strict=True)],
  }


@st.composite
def any_row(draw, draft_len=4):
  proposed = draw(st.lists(st.integers(0, draft_len), max_size=6))
  accepted = [draw(st.integers(0, k)) for k in proposed]
  emitted = [a + 1 for a in accepted]
  reason = "length"
  if emitted and draw(st.booleans()):
    emitted[-1] = draw(st.integers(1, emitted[-1]))
    reason = "eos"
  return RowRecords(proposed, accepted, emitted, reason)


@settings(max_examples=200, deadline=None)
@given(st.lists(any_row(), max_size=5))
def test_figures_agree_with_the_slow_recomputation(rows):
  fast = records.summarize(rows, 4, resamples=10)
  for name, value in slow_summary(rows, 4).items():
    assert fast[name] == pytest.approx(value), name
  assert records.tau(rows) == pytest.approx(
      float("nan") if fast["tau"] is None else fast["tau"], nan_ok=True)


@settings(max_examples=100, deadline=None)
@given(st.lists(any_row(), min_size=1, max_size=5))
def test_without_cuts_tau_is_one_plus_the_survivals(rows):
  whole = [RowRecords(r.proposed, r.accepted, r.accepted + 1, "length") for r in rows]
  if sum(r.rounds for r in whole):
    assert records.tau(whole) == pytest.approx(1 + records.survival(whole, 4).sum())


# --- refused records


@pytest.mark.parametrize("fields, message", [
    (([5], [6], [7], "length"), "accepted must be <= proposed: round 0 has accepted 6, proposed 5"),
    (([5], [-1], [1], "length"), "accepted must be >= 0"),
    (([5], [2], [4], "length"), r"emitted must be <= accepted \+ 1"),
    (([5], [2], [0], "length"), "emitted must be >= 1"),
    (([5, 5], [3, 0], [2, 1], "eos"), "only the last round may be cut: round 0"),
    (([5], [2, 1], [3], "length"), "differ in length"),
    (([5], [2], [3], "done"), "reason must be one of"),
    (([5.0], [2.0], [2.5], "length"), "must hold integers"),
    (([[5]], [[2]], [[3]], "length"), "one axis"),
])
def test_impossible_records_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    RowRecords(*fields)


def test_more_proposals_than_the_draft_length_are_refused():
  with pytest.raises(ValueError, match="proposed 5 drafts, draft_len is 4"):
    records.summarize([row([0])], 4)


def test_records_cannot_be_changed_afterwards():
  with pytest.raises(ValueError):
    row([5]).accepted[0] = 1


# --- loops


PHRASE = list(range(100, 110))  # ten different tokens


def test_repeated_phrase_is_looped_from_its_second_time_on():
  tokens = [1, 2, *PHRASE, *PHRASE, 3]
  mask = records.looped_mask(tokens)
  assert mask.tolist() == [False] * 12 + [True] * 10 + [False]
  assert records.first_loop(tokens) == 12
  assert records.looped_share([tokens, [1, 2, 3]]) == pytest.approx(10 / 26)


def test_seven_equal_tokens_are_no_loop():
  assert not records.looped_mask([*PHRASE[:7], 1, *PHRASE[:7], 2]).any()
  assert records.first_loop(PHRASE) == len(PHRASE)
  assert records.first_loop([]) == 0


def test_one_token_again_and_again():
  """Eight need eight before them at distance one: nine equal tokens, the first is no repetition."""
  assert not records.looped_mask([7] * 8).any()
  assert records.looped_mask([5, *[7] * 9]).tolist() == [False, False] + [True] * 8


def test_repetition_far_away_is_a_quotation_not_a_cycle():
  far = [*PHRASE, *range(200, 255), *PHRASE]
  near = [*PHRASE, *range(200, 254), *PHRASE]
  assert not records.looped_mask(far).any()
  assert records.looped_mask(near).sum() == 10


def test_rounds_before_the_first_loop():
  """Prefill's token, then rounds of 6, 5, 6, 5: the loop starts at 12, the third round covers it.

  Ends of the rounds: 7, 12, 18, 23."""
  tokens = [1, 2, *PHRASE, *PHRASE, 3]
  whole = row([5, 4, 5, 4])
  kept = records.before_first_loop(whole, tokens)
  assert kept.emitted.tolist() == [6, 5]
  assert records.tau([kept]) == pytest.approx(11 / 2)
  straddling = records.before_first_loop(row([5, 5, 5, 3]), tokens)  # ends 7, 13: one kept
  assert straddling.emitted.tolist() == [6]
  plain = row([5], [6])
  assert records.before_first_loop(plain, list(range(7))) is plain


def test_answer_of_another_row_is_refused():
  with pytest.raises(ValueError, match="cannot come from"):
    records.before_first_loop(row([5]), list(range(8)))
  with pytest.raises(ValueError, match="cannot come from"):
    records.before_first_loop(row([5]), list(range(5)))
  records.before_first_loop(row([5], reason="eos"), list(range(6)))  # EOS left out
  records.before_first_loop(row([5], reason="stop"), list(range(4)))  # stop string left out


# --- paired measurements and identity


def test_paired_ratio_ignores_drift():
  """The machine slows down tenfold; every pair says 2."""
  drift = np.linspace(1, 10, 9)
  result = records.paired_ratio(2 / drift, 1 / drift)
  assert result["ratio"] == pytest.approx(2)
  assert result["ratio_ci"] == pytest.approx([2, 2])
  assert result["pairs"] == 9
  assert result["b_median"] == pytest.approx(1 / 5.5)


def test_paired_ratio_by_hand():
  result = records.paired_ratio([3, 1, 8], [1, 2, 2])  # 3, 0.5, 4
  assert result["ratio"] == 3
  low, high = result["ratio_ci"]
  assert low == 0.5 and high == 4
  assert records.paired_ratio([3], [2])["ratio_ci"] == [None, None]


@pytest.mark.parametrize("a, b", [([], []), ([1], [1, 2]), ([1, 0], [1, 1]), ([1], [math.inf])])
def test_broken_measurements_are_refused(a, b):
  with pytest.raises(ValueError, match="paired_ratio"):
    records.paired_ratio(a, b)


def test_identical_share():
  assert records.identical_share([[1, 2], [3], []], [[1, 2], [3, 4], []]) == pytest.approx(2 / 3)
  with pytest.raises(ValueError, match="2 answers against 1"):
    records.identical_share([[1], [2]], [[1]])
