"""The replay estimate of tau: what decoding would have done on a text that is known already.

Given a response that the target produced under `ratio`, whether its tokens were accepted drafts is
a matter of independent coins: the token x_i was the accepted draft with probability
a_i = min(1, q_i(x_i) / p_i(x_i)), whatever comes behind it (P(draft = x and accepted) = min(p, q),
divided by P(x) = p). So the number of rounds of every draft length follows from teacher-forced
logits, without decoding (METHODS section 4). Under `greedy` the coins are certain: exact hopping.
`block` accepts by prefixes and not by coins of single tokens, so it has no such estimate.

Arrays are of one response: N tokens to emit (the first token of a response comes from the prefill
and is not one of them) and `chance[t, j - 1]`, the probability that the token j places behind
start t is accepted, given that those before it were. Start t is the block whose anchor is the t-th
token of the response, so t + j <= N; what lies beyond (t + j > N) is ignored. `train_drafter`
computes them with the real modules (replay.py there); `spec_jax.records` has the measured figures.
Pure numpy.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Real

from spec_jax.records import LEVEL, RESAMPLES, RowRecords, bootstrap_ratio


def by_position(chance: Float[np.ndarray, " N"], draft_len: int) -> Float[np.ndarray, "N K"]:
  """`chance` of a drafter whose q depends on the token's position alone (small_lm).

  Args:
    chance: of every token to emit.
    draft_len: K.

  Returns:
    The table by start and place; 0 beyond the end.
  """
  N = len(chance)
  at = np.arange(N)[:, None] + np.arange(draft_len)
  return np.where(at < N, np.asarray(chance, np.float64)[np.minimum(at, N - 1)], 0.0)


def _checked(chance) -> np.ndarray:
  """float64 [N, K] with 0 beyond the end.

  Raises:
    ValueError: a value that counts is no probability, naming its place.
  """
  chance = np.asarray(chance, np.float64)
  if chance.ndim != 2 or chance.shape[1] < 1:
    raise ValueError(f"replay: chance must be [N, K] with K >= 1, got shape {chance.shape}")
  N, K = chance.shape
  inside = np.arange(N)[:, None] + np.arange(1, K + 1) <= N
  bad = inside & ~((chance >= 0) & (chance <= 1))
  if bad.any():
    t, j = np.argwhere(bad)[0]
    raise ValueError(f"replay: chance[{t}, {j}] = {chance[t, j]} is not in [0, 1]")
  return np.where(inside, chance, 0.0)


def accepted_law(chance: Float[np.ndarray, "N K"]) -> Float[np.ndarray, "N W"]:
  """P(A = k) for k = 0..K of a round that begins at each start.

  A counts the accepted drafts that are emitted: at most the N - t tokens that are left.

  Raises:
    ValueError: a value is no probability.
  """
  reached = np.cumprod(_checked(chance), 1)
  edge = lambda value: np.full((len(reached), 1), value)
  reached = np.concatenate([edge(1.0), reached, edge(0.0)], 1)
  return reached[:, :-1] - reached[:, 1:]


def expected_rounds(chance: Float[np.ndarray, "N K"]) -> float:
  """E_0, the expected verification passes for the N tokens.

  E_t = 1 + sum over k of P(A = k) E_{t + k + 1}, and 0 from t = N on.

  Raises:
    ValueError: a value is no probability.
  """
  law = accepted_law(chance)
  N, W = law.shape
  rounds = np.zeros(N + W)
  for t in range(N - 1, -1, -1):
    rounds[t] = 1.0 + law[t] @ rounds[t + 1:t + 1 + W]
  return float(rounds[0])


@dataclasses.dataclass(frozen=True)
class Expected:
  """Expected counts of the rounds of one response, cut rounds cut as in `spec_jax.records`.

  Attributes:
    rounds: E_0.
    accepted: P(A = k) summed over the rounds, [K + 1].
    reached: rounds with A >= k, for k = 1..K.
    exposed: rounds whose position k was not cut away.
  """

  rounds: float
  accepted: np.ndarray
  reached: np.ndarray
  exposed: np.ndarray


def expected(chance: Float[np.ndarray, "N K"]) -> Expected:
  """Every count that survival and acceptance are made of: survival is reached / exposed, the
  acceptance rate sum(reached) / sum(exposed), both over the sums of all responses.

  Raises:
    ValueError: a value is no probability.
  """
  law = accepted_law(chance)
  N, W = law.shape
  visits = np.zeros(N + W)  # probability that a round begins at each start
  visits[0] = 1.0 if N else 0.0
  for t in range(N):
    visits[t + 1:t + 1 + W] += visits[t] * law[t]
  at_least = np.cumsum(law[:, ::-1], 1)[:, ::-1][:, 1:]
  # A round is cut when all the tokens that are left are accepted drafts: the places behind them are
  # then neither a success nor a failure.
  left = N - np.arange(N)
  short = left < W
  whole = np.where(short, law[np.arange(N), np.minimum(left, W - 1)], 0.0)
  beyond = np.arange(1, W) > left[:, None]
  exposed = np.where(beyond, 1.0 - whole[:, None], 1.0)
  visits = visits[:N]
  return Expected(float(visits.sum()), visits @ law, visits @ at_least, visits @ exposed)


def hop(match: Bool[np.ndarray, "N K"]) -> Int[np.ndarray, " rounds"]:
  """Emitted tokens of every round under `greedy`: exact hopping over a known response.

  Args:
    match: the draft for the token j places behind start t is that token.

  Returns:
    One entry per round; they sum to N.
  """
  match = np.asarray(match, bool)
  N, K = match.shape
  emitted, t = [], 0
  while t < N:
    left = min(K, N - t)
    wrong = ~match[t, :left]
    accepted = int(np.argmax(wrong)) if wrong.any() else left
    emitted.append(min(accepted + 1, N - t))
    t += emitted[-1]
  return np.array(emitted, np.int64)


def decisions(
    record: RowRecords, chance: Float[np.ndarray, "N K"], margin: Float[np.ndarray, "N K"],
) -> dict[str, Any]:
  """Greedy decoding against its replay, draft by draft.

  At temperature 0 a draft was accepted if it is the token of the text, so the two can part only
  where the drafter's best token is another one in another pass. Whatever follows from that (other
  rounds behind it) is no second difference: each draft that decoding verified is asked for by
  itself, at the start and place where it stood.

  Args:
    record: of the decoding, with K drafts a round.
    chance: of the replay of the same text.
    margin: by how much the drafter's logit of the token exceeds the best other one, negative where
      another one is best.

  Returns:
    decisions: drafts that were accepted or refused; lost: |margin| of those that decoding refused
    and the replay accepts, won: of the others that differ. None for a margin that is not finite: no
    rounding makes a draft of an id that the drafter does not have.
  """
  ends = np.cumsum(record.emitted)
  out: dict[str, Any] = {"decisions": 0, "lost": [], "won": []}
  for end, proposed, accepted, emitted in zip(
      ends, record.proposed, record.accepted, record.emitted, strict=True):
    kept = min(accepted, emitted)  # of a round that was cut
    seen = kept + (kept < emitted and accepted < proposed)
    for place in range(seen):
      at = end - emitted, place
      out["decisions"] += 1
      if (chance[at] > 0.5) != (place < kept):
        size = abs(float(margin[at]))
        out["won" if place < kept else "lost"].append(size if np.isfinite(size) else None)
  return out


def uniform_anchor(overlap: Float[np.ndarray, "N K"]) -> tuple[float, int]:
  """The often logged estimate of tau - 1: the sum over k of prod_{j <= k} (1 - TV), every start
  weighing the same.

  It is not what decoding gives: rounds begin right behind the tokens that were hard to guess, so
  starts are no uniform sample (and it averages the overlap of p and q over drafts that the text did
  not take).

  Args:
    overlap: 1 - TV(p, q) by start and place.

  Returns:
    The sum over the starts that have K tokens behind them, and their number.
  """
  overlap = _checked(overlap)
  N, K = overlap.shape
  whole = overlap[:max(N - K + 1, 0)]
  return float(np.cumprod(whole, 1).sum()), len(whole)


def tau(tokens: Real[np.ndarray, " n"], rounds: Real[np.ndarray, " n"]) -> float:
  """sum of tokens / sum of E_0 over prompts; nan without rounds."""
  total = float(np.sum(rounds))
  return float(np.sum(tokens)) / total if total > 0 else float("nan")


def tau_ci(
    tokens: Real[np.ndarray, " n"], rounds: Real[np.ndarray, " n"], seed: int = 0,
) -> Float[np.ndarray, " 2"]:
  """95 % percentile bootstrap over prompts, as the measured tau has it."""
  return bootstrap_ratio(tokens, rounds, seed=seed)


def difference_ci(
    tokens: Real[np.ndarray, " n"], measured: Real[np.ndarray, " n"],
    rounds: Real[np.ndarray, " n"], seed: int = 0,
) -> Float[np.ndarray, " 2"]:
  """95 % interval of measured tau - replayed tau on the same responses, prompts drawn in pairs.

  Much narrower than either tau's own interval, since how hard the texts are is in both.

  Args:
    tokens: emitted by rounds.
    measured: rounds that decoding took.
    rounds: E_0 of the same responses.
    seed: of the bootstrap.

  Returns:
    Lower and upper end; nan below two prompts with tokens.
  """
  tokens, measured, rounds = (np.asarray(x, np.float64) for x in (tokens, measured, rounds))
  n = len(tokens)
  if (tokens > 0).sum() < 2:
    return np.full(2, np.nan)
  draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
  draws = draws[draws @ tokens > 0].astype(np.float64)
  emitted = draws @ tokens
  tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
  return np.quantile(emitted / (draws @ measured) - emitted / (draws @ rounds), tails)
