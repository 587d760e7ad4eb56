"""What a round of speculative decoding leaves behind, and every metric computed from it.

`decode.py` fills one `RowRecords` per prompt; `train_drafter.evaluate`, `train_drafter.report` and
the shell read their figures from the functions here and from nowhere else. Pure numpy.

Definitions (the same sentences stand in the report):

- A round is one verification pass of one row: `proposed` K drafts, `accepted` A of them matched in
  a row from the first (counted before truncation), `emitted` E tokens kept, the bonus or correction
  token included. The token that prefill yields belongs to no round.
- A round is *cut* where E < A + 1: EOS, a stop or the token budget ended the row inside the block.
  A cut round counts what it emitted: its A and K become min(A, E) and min(K, E). Positions after
  the cut were never a success or a failure, so they leave the denominators.
- tau = sum E / rounds; acceptance rate = sum A / sum K; survival s_k = rounds with A >= k / rounds;
  conditional a_k = rounds with A >= k / rounds with A >= k - 1 (each over the rounds where
  position k was not cut away). A round with fewer than k proposals that was not cut counts as one
  that did not reach k.
- Undefined ratios (0 / 0) are nan here and null in `summarize`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

Numbers = np.ndarray | Sequence  # one axis of numbers
REASONS = ("eos", "stop", "length")
RESAMPLES = 2000
LEVEL = 0.95
LOOP_GRAM = 8
# Half of the 128 new tokens of the project's tables: a longer cycle cannot come round twice there.
LOOP_MAX_PERIOD = 64


@dataclasses.dataclass(frozen=True, eq=False)
class RowRecords:
  """The rounds of one prompt, in order.

  Attributes:
    proposed: int32 [rounds], drafts verified in the round.
    accepted: int32 [rounds], drafts matched, before truncation.
    emitted: int32 [rounds], tokens kept after EOS, stop or budget, the bonus included.
    reason: why the row ended: "eos", "stop" or "length".

  Raises:
    ValueError: an invariant does not hold; the message names field, round and values.
  """

  proposed: Numbers
  accepted: Numbers
  emitted: Numbers
  reason: str

  def __post_init__(self):
    for name in ("proposed", "accepted", "emitted"):
      value = np.asarray(getattr(self, name))
      if value.ndim != 1:
        raise ValueError(f"records: {name} must have one axis [rounds], got shape {value.shape}")
      if value.size and value.dtype.kind not in "iu":
        raise ValueError(f"records: {name} must hold integers, got {value.dtype}")
      value = value.astype(np.int32)
      value.flags.writeable = False
      object.__setattr__(self, name, value)
    sizes = [len(self.proposed), len(self.accepted), len(self.emitted)]
    if len(set(sizes)) != 1:
      raise ValueError(f"records: proposed, accepted, emitted differ in length: {sizes}")
    if self.reason not in REASONS:
      raise ValueError(f"records: reason must be one of {REASONS}, got {self.reason!r}")
    _check("accepted must be >= 0", self.accepted < 0, accepted=self.accepted)
    _check("accepted must be <= proposed", self.accepted > self.proposed,
           accepted=self.accepted, proposed=self.proposed)
    _check("emitted must be >= 1", self.emitted < 1, emitted=self.emitted)
    _check("emitted must be <= accepted + 1", self.emitted > self.accepted + 1,
           emitted=self.emitted, accepted=self.accepted)
    # A cut ends the row: an earlier one means rounds of a finished row were recorded.
    _check("only the last round may be cut", self.cut[:-1],
           emitted=self.emitted, accepted=self.accepted)

  @property
  def rounds(self) -> int:
    return len(self.emitted)

  @property
  def cut(self) -> np.ndarray:
    """bool [rounds]: the round was truncated by EOS, a stop or the budget."""
    return self.emitted < self.accepted + 1


def _check(rule: str, broken: np.ndarray, **values: np.ndarray) -> None:
  """Raises ValueError naming the first round where `broken` holds."""
  if broken.any():
    i = int(np.argmax(broken))
    shown = ", ".join(f"{name} {int(value[i])}" for name, value in values.items())
    raise ValueError(f"records: {rule}: round {i} has {shown}")


@dataclasses.dataclass(frozen=True)
class Counts:
  """Integer sums per prompt, cut rounds already cut; n prompts, K positions.

  `rounds`, `emitted`, `proposed`, `accepted`, `cut` are [n]. `reached[i, k-1]` counts the rounds
  with A >= k, `exposed` those whose position k was not cut away, `eligible` those of `exposed` with
  A >= k - 1.
  """

  rounds: np.ndarray
  emitted: np.ndarray
  proposed: np.ndarray
  accepted: np.ndarray
  cut: np.ndarray
  reached: np.ndarray
  exposed: np.ndarray
  eligible: np.ndarray


def counts(rows: Sequence[RowRecords], draft_len: int) -> Counts:
  """Sums the rounds of every prompt.

  Args:
    rows: one `RowRecords` per prompt.
    draft_len: K, at least every `proposed`.

  Returns:
    `Counts`, int64.

  Raises:
    ValueError: a round proposed more than `draft_len` drafts.
  """
  k = np.arange(1, draft_len + 1)
  scalars = np.zeros((5, len(rows)), np.int64)
  positions = np.zeros((3, len(rows), draft_len), np.int64)
  for i, row in enumerate(rows):
    if row.rounds and row.proposed.max() > draft_len:
      raise ValueError(f"records: row {i} proposed {row.proposed.max()} drafts, "
                       f"draft_len is {draft_len}")
    cut = row.cut
    proposed = np.where(cut, np.minimum(row.proposed, row.emitted), row.proposed)
    accepted = np.minimum(row.accepted, row.emitted)
    scalars[:, i] = row.rounds, row.emitted.sum(), proposed.sum(), accepted.sum(), cut.sum()
    exposed = ~cut[:, None] | (proposed[:, None] >= k)
    positions[0, i] = (accepted[:, None] >= k).sum(0)
    positions[1, i] = exposed.sum(0)
    positions[2, i] = (exposed & (accepted[:, None] >= k - 1)).sum(0)
  return Counts(*scalars, *positions)


def _ratio(numerator, denominator):
  """numerator / denominator in float64, nan where the denominator is 0."""
  numerator = np.asarray(numerator, np.float64)
  denominator = np.asarray(denominator, np.float64)
  return np.divide(numerator, denominator, out=np.full(numerator.shape, np.nan),
                   where=denominator > 0)


def _interval(samples: np.ndarray, level: float) -> np.ndarray:
  """Percentile interval over axis 0, nan left out: [2, ...]."""
  tails = [(1 - level) / 2, (1 + level) / 2]
  known = ~np.isnan(samples)
  if known.all():
    return np.quantile(samples, tails, axis=0)
  out = np.full((2, *samples.shape[1:]), np.nan)
  for index in np.ndindex(samples.shape[1:]):
    column = samples[(slice(None), *index)]
    column = column[~np.isnan(column)]
    if column.size:
      out[(slice(None), *index)] = np.quantile(column, tails)
  return out


def resample_weights(n: int, seed: int, resamples: int = RESAMPLES) -> np.ndarray:
  """How often each of n prompts is drawn: float64 [resamples, n]. One product makes all the sums,
  and two runs weighed by the same draws are resampled in pairs."""
  draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)
  return draws.astype(np.float64)


def tau_difference_ci(rows: Sequence[RowRecords], others: Sequence[RowRecords], *, seed: int = 0,
                      resamples: int = RESAMPLES, level: float = LEVEL) -> np.ndarray:
  """Interval [2] of tau(rows) - tau(others), where rows[i] and others[i] are of the same prompt.

  Each resample draws the same prompts on both sides, so what makes a prompt easy for both cancels.
  nan where `bootstrap_ratio` gives nan for either side.

  Raises:
    ValueError: the lists differ in length.
  """
  if len(rows) != len(others):
    raise ValueError(f"tau_difference_ci: {len(rows)} prompts against {len(others)}")
  if min(sum(r.rounds > 0 for r in side) for side in (rows, others)) < 2:
    return np.full(2, np.nan)
  weight = resample_weights(len(rows), seed, resamples)
  ours, theirs = (_ratio(weight @ np.array([int(r.emitted.sum()) for r in side], np.float64),
                         weight @ np.array([r.rounds for r in side], np.float64))
                  for side in (rows, others))
  return _interval(ours - theirs, level)


def bootstrap_ratio(numerator, denominator, *, seed: int = 0, resamples: int = RESAMPLES,
                    level: float = LEVEL) -> np.ndarray:
  """Percentile bootstrap of a pooled ratio, prompts resampled with replacement.

  Rounds of one prompt depend on one another, so the prompt is the unit that is drawn.

  Args:
    numerator: [n] or [n, M], sums per prompt.
    denominator: the same shape.
    seed: the same seed gives the same interval.
    resamples: number of draws.
    level: coverage.

  Returns:
    float64 [2] or [2, M], lower and upper end; nan where fewer than two prompts count anything,
    since one prompt says nothing about the spread between prompts.
  """
  numerator = np.asarray(numerator, np.float64)
  denominator = np.asarray(denominator, np.float64)
  n = len(numerator)
  if n < 2:
    return np.full((2, *numerator.shape[1:]), np.nan)
  weight = resample_weights(n, seed, resamples)
  interval = _interval(_ratio(weight @ numerator, weight @ denominator), level)
  return np.where((denominator > 0).sum(0) < 2, np.nan, interval)


def tau(rows: Sequence[RowRecords]) -> float:
  """Pooled tokens per verification pass: sum E / rounds."""
  return float(_ratio(sum(int(r.emitted.sum()) for r in rows), sum(r.rounds for r in rows)))


def tau_per_prompt(rows: Sequence[RowRecords]) -> np.ndarray:
  """float64 [prompts]; nan for a prompt without rounds (prefill already gave EOS)."""
  return np.array([tau([row]) for row in rows], np.float64)


def tau_mean(rows: Sequence[RowRecords]) -> float:
  """Mean of tau over the prompts that have rounds; every prompt weighs the same."""
  values = tau_per_prompt(rows)
  values = values[~np.isnan(values)]
  return float(values.mean()) if values.size else math.nan


def tau_ci(rows: Sequence[RowRecords], **bootstrap) -> np.ndarray:
  """Interval [2] of the pooled tau; see `bootstrap_ratio`."""
  return bootstrap_ratio([r.emitted.sum() for r in rows], [r.rounds for r in rows], **bootstrap)


def tau_mean_ci(rows: Sequence[RowRecords], **bootstrap) -> np.ndarray:
  """Interval [2] of `tau_mean`."""
  values = tau_per_prompt(rows)
  known = ~np.isnan(values)
  return bootstrap_ratio(values[known], np.ones(known.sum()), **bootstrap)


def acceptance_rate(rows: Sequence[RowRecords]) -> float:
  """sum A / sum K, drafts alone: the bonus token is in neither."""
  draft_len = max((int(r.proposed.max()) for r in rows if r.rounds), default=0)
  total = counts(rows, draft_len)
  return float(_ratio(total.accepted.sum(), total.proposed.sum()))


def cut_by_eos(rows: Sequence[RowRecords]) -> int:
  """Rounds that EOS ended inside the block; at most the last one of each prompt."""
  return sum(int(r.cut.sum()) for r in rows if r.reason == "eos")


def survival(rows: Sequence[RowRecords], draft_len: int) -> np.ndarray:
  """s_k for k = 1..K: float64 [draft_len]."""
  total = counts(rows, draft_len)
  return _ratio(total.reached.sum(0), total.exposed.sum(0))


def conditional(rows: Sequence[RowRecords], draft_len: int) -> np.ndarray:
  """a_k for k = 1..K: float64 [draft_len], nan where no round reached k - 1."""
  total = counts(rows, draft_len)
  return _ratio(total.reached.sum(0), total.eligible.sum(0))


def to_plain(value):
  """numpy and nan -> what JSON can hold: floats and ints of Python, nan as None."""
  if isinstance(value, np.ndarray):
    return [to_plain(v) for v in value]
  if isinstance(value, float | np.floating):
    return None if math.isnan(value) else float(value)
  return int(value) if isinstance(value, np.integer) else value


def summarize(rows: Sequence[RowRecords], draft_len: int, seed: int = 0,
              resamples: int = RESAMPLES) -> dict:
  """Every acceptance figure of one group of prompts, ready for JSON.

  Args:
    rows: one `RowRecords` per prompt.
    draft_len: K.
    seed: of the bootstrap.
    resamples: of the bootstrap.

  Returns:
    prompts, rounds, emitted, cut_rounds, eos_cut_rounds (ints); eos_cut_share, tau, tau_mean,
    acceptance_rate (float or None); tau_ci, tau_mean_ci, acceptance_rate_ci ([lo, hi], 95 %,
    [None, None] below two prompts); survival, conditional (lists of K), survival_ci (K pairs).
  """
  total = counts(rows, draft_len)
  options = {"seed": seed, "resamples": resamples}
  figures = {
      "prompts": len(rows),
      "rounds": total.rounds.sum(),
      "emitted": total.emitted.sum(),
      "cut_rounds": total.cut.sum(),
      "eos_cut_rounds": cut_by_eos(rows),
      "eos_cut_share": float(_ratio(cut_by_eos(rows), total.rounds.sum())),
      "tau": tau(rows),
      "tau_ci": tau_ci(rows, **options),
      "tau_mean": tau_mean(rows),
      "tau_mean_ci": tau_mean_ci(rows, **options),
      "acceptance_rate": _ratio(total.accepted.sum(), total.proposed.sum())[()],
      "acceptance_rate_ci": bootstrap_ratio(total.accepted, total.proposed, **options),
      "survival": _ratio(total.reached.sum(0), total.exposed.sum(0)),
      "survival_ci": bootstrap_ratio(total.reached, total.exposed, **options).T,
      "conditional": _ratio(total.reached.sum(0), total.eligible.sum(0)),
  }
  return {name: to_plain(value) for name, value in figures.items()}


def looped_mask(tokens: Sequence[int], gram: int = LOOP_GRAM,
                max_period: int = LOOP_MAX_PERIOD) -> np.ndarray:
  """Which tokens of one answer lie inside a repetition of an 8-gram cycle.

  The gram starting at s is a repetition if the same `gram` tokens also start at s - d for some
  1 <= d <= `max_period`; the text from s - d to s + gram - 1 then has period d. All `gram` tokens
  of the repetition are looped, the first occurrence is not, except where the two overlap. The rule
  is deliberately broad: a list that repeats eight tokens of its frame counts, although its entries
  differ.

  Returns:
    bool [n].
  """
  tokens = [int(t) for t in tokens]
  mask = np.zeros(len(tokens), bool)
  last_start: dict[tuple[int, ...], int] = {}
  for start in range(len(tokens) - gram + 1):
    key = tuple(tokens[start:start + gram])
    before = last_start.get(key)
    if before is not None and start - before <= max_period:
      mask[start:start + gram] = True
    last_start[key] = start
  return mask


def first_loop(tokens: Sequence[int]) -> int:
  """Index of the first looped token; len(tokens) if there is none."""
  mask = looped_mask(tokens)
  return int(np.argmax(mask)) if mask.any() else len(mask)


def looped_share(answers: Sequence[Sequence[int]]) -> float:
  """Looped tokens / tokens over several answers; nan without tokens."""
  masks = [looped_mask(tokens) for tokens in answers]
  return float(_ratio(sum(int(m.sum()) for m in masks), sum(len(m) for m in masks)))


def check_answer(row: RowRecords, tokens: Sequence[int]) -> None:
  """Refuses tokens that these rounds cannot have emitted; the EOS or the stop string at their end
  may be missing.

  Raises:
    ValueError: `tokens` and `row` are not of the same answer.
  """
  missing = 1 + int(row.emitted.sum()) - len(tokens)
  if missing < 0 or (missing > 1 and row.reason != "stop"):
    raise ValueError(f"records: an answer of {len(tokens)} tokens cannot come from prefill's one "
                     f"and {int(row.emitted.sum())} emitted")


def before_first_loop(row: RowRecords, tokens: Sequence[int]) -> RowRecords:
  """The rounds of `row` that end before its first looped token.

  tokens[0] comes from prefill and belongs to no round, so round r covers the tokens from
  1 + E_0 + … + E_{r-1} on. A round that straddles the loop's start is left out.

  Args:
    row: the rounds of one prompt.
    tokens: its answer; the EOS or the stop string at its end may be missing.

  Returns:
    `row` itself if the answer never loops, else its first rounds with reason "length".

  Raises:
    ValueError: `tokens` and `row` are not of the same answer.
  """
  check_answer(row, tokens)
  start = first_loop(tokens)
  if start == len(tokens):
    return row
  keep = int((1 + np.cumsum(row.emitted) <= start).sum())
  return RowRecords(row.proposed[:keep], row.accepted[:keep], row.emitted[:keep], "length")


def paired_ratio(a: Numbers, b: Numbers, *, seed: int = 0,
                 resamples: int = RESAMPLES, level: float = LEVEL) -> dict:
  """Compares paired measurements: a[i] and b[i] were taken right after one another.

  The ratio is the median of a[i] / b[i], which slow drift of the machine does not touch; the
  interval resamples pairs. Give rates as (speculative, plain), or times as (plain, speculative).

  Returns:
    {"pairs", "a_median", "b_median", "ratio", "ratio_ci": [lo, hi]}; the interval is
    [None, None] for a single pair.

  Raises:
    ValueError: lengths differ, nothing was measured, or a value is not positive.
  """
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  if a.shape != b.shape or a.ndim != 1 or not a.size:
    raise ValueError(f"paired_ratio: needs equal, non-empty lists, got {a.shape} and {b.shape}")
  if not ((a > 0) & (b > 0) & np.isfinite(a) & np.isfinite(b)).all():
    raise ValueError("paired_ratio: every measurement must be positive and finite")
  ratio = a / b
  interval = np.full(2, np.nan)
  if len(ratio) > 1:
    draw = np.random.default_rng(seed).integers(len(ratio), size=(resamples, len(ratio)))
    interval = _interval(np.median(ratio[draw], axis=1), level)
  return {"pairs": len(ratio), "a_median": float(np.median(a)), "b_median": float(np.median(b)),
          "ratio": float(np.median(ratio)), "ratio_ci": to_plain(interval)}


def identical_share(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
  """Share of prompts whose two answers are equal token for token; nan without prompts.

  Raises:
    ValueError: the lists do not hold the same number of answers.
  """
  if len(ours) != len(theirs):
    raise ValueError(f"identical_share: {len(ours)} answers against {len(theirs)}")
  same = [list(map(int, a)) == list(map(int, b)) for a, b in zip(ours, theirs, strict=True)]
  return float(np.mean(same)) if same else math.nan
