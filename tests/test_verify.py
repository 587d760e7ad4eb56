"""The acceptance rules, by exact enumeration: the emitted law is the target's, whatever drafts.

The uniforms are integrated out: for each draft and each pattern of accepting and rejecting, the
real rule runs once with uniforms inside that pattern's interval, and the weights it would draw the
next token from are read instead of drawn from.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import sampling, verify
from spec_jax.errors import UserError
from spec_jax.types import Proposal

ALMOST_ONE = 1 - 2**-24


def conditionals(rng, V, K, zeros=0.0):
  """A random distribution [V] after every prefix of at most K ids, with exact zeros."""
  table = {}
  for n in range(K + 1):
    for prefix in itertools.product(range(V), repeat=n):
      weights = rng.random(V) * (rng.random(V) >= zeros)
      weights[rng.integers(V)] += 0.1
      table[prefix] = weights / weights.sum()
  return table


def one_hot_law(choice, V, K):
  """The conditionals of a drafter that always proposes `choice(prefix)`."""
  prefixes = itertools.chain.from_iterable(
      itertools.product(range(V), repeat=n) for n in range(K + 1))
  return {prefix: np.eye(V)[choice(prefix)] for prefix in prefixes}


def emitted_law(p, q, V, K, *, deterministic, limit, dtype, rule=None):
  """The law of the next K + 1 tokens after one round (continued from p), [V] * (K + 1).

  Args:
    p, q: conditionals of target and drafter.
    deterministic: the rule is not told q.
    limit: drafts that may be accepted.
    dtype: of every array.
    rule: a rule to test instead of `ratio`.
  """
  cases = list(itertools.product(
      itertools.product(range(V), repeat=K), itertools.product([True, False], repeat=K)))
  rows = np.array([[p[x[:i]] for i in range(K + 1)] for x, _ in cases], dtype)
  laws = np.array([[q[x[:i]] for i in range(K)] for x, _ in cases], dtype)
  proposal = Proposal(
      jnp.asarray([x for x, _ in cases], jnp.int32), None if deterministic else jnp.asarray(laws))
  chance = np.minimum(verify.acceptance_probabilities(jnp.asarray(rows), proposal), 1.0)
  taken = np.array([pattern for _, pattern in cases])
  # The middle of the interval of each outcome; an empty interval has no weight below.
  inside = np.where(taken, chance / 2, (1 + chance) / 2).astype(dtype)
  weight_of = np.prod(np.where(taken, chance, 1 - chance), axis=1)
  read = []

  def uniforms(keys, purpose, count):
    return jnp.asarray(inside) if purpose == sampling.ACCEPT else jnp.zeros((len(cases), count))

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sampling, "uniforms", uniforms)
    patch.setattr(sampling, "draw", lambda weights, u: read.append(np.asarray(weights, np.float64))
                  or jnp.zeros(len(cases), jnp.int32))
    verdict = (rule or verify.ratio)(
        jnp.asarray(rows), proposal, jax.random.split(jax.random.key(0), len(cases)),
        jnp.full(len(cases), limit, jnp.int32))
  law = np.zeros((V,) * (K + 1))
  for n, (x, _) in enumerate(cases):
    chosen = np.prod([q[x[:i]][x[i]] for i in range(K)]) * weight_of[n]
    if chosen == 0:
      continue
    kept = x[:int(verdict.accepted[n])]
    following = read[0][n] / read[0][n].sum()
    for token in range(V):
      head = (*kept, token)
      for rest in itertools.product(range(V), repeat=K + 1 - len(head)):
        full = head + rest
        law[full] += chosen * following[token] * np.prod(
            [p[full[:i]][full[i]] for i in range(len(head), K + 1)])
  return law


def target_law(p, V, K):
  law = np.zeros((V,) * (K + 1))
  for full in itertools.product(range(V), repeat=K + 1):
    law[full] = np.prod([p[full[:i]][full[i]] for i in range(K + 1)])
  return law


def wrongest(seeds, V, K, dtype, deterministic, limit, rule=None):
  """The largest error of the emitted law over random pairs of conditionals."""
  worst = 0.0
  for seed in seeds:
    rng = np.random.default_rng(seed)
    # Zeros on both sides: ids that only one of the two can produce.
    p = conditionals(rng, V, K, zeros=0.3 * (seed % 2))
    q = conditionals(rng, V, K, zeros=0.3 * (seed % 2))
    if deterministic:
      choice = rng.integers(0, V, 997)
      q = one_hot_law(lambda prefix, c=choice: c[hash(prefix) % 997], V, K)
    law = emitted_law(
        p, q, V, K, deterministic=deterministic, limit=limit, dtype=dtype, rule=rule)
    worst = max(worst, np.abs(law - target_law(p, V, K)).max())
  return worst


@pytest.mark.parametrize("V,K", [(2, 1), (4, 1), (3, 2), (4, 2)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_ratio_keeps_the_law(V, K, deterministic):
  for limit in range(K + 1):
    with jax.enable_x64(True):
      assert wrongest(range(4), V, K, np.float64, deterministic, limit) < 1e-12
    assert wrongest(range(2), V, K, np.float32, deterministic, limit) < 1e-6


def test_the_example_of_the_cases():
  # CASE 1, exactly.
  p, q = {(): np.array([.5, .3, .2])}, {(): np.array([.2, .5, .3])}
  p |= {(i,): np.ones(3) / 3 for i in range(3)}
  with jax.enable_x64(True):
    law = emitted_law(p, q, 3, 1, deterministic=False, limit=1, dtype=np.float64)
  np.testing.assert_allclose(law.sum(1), [.5, .3, .2], atol=1e-12)


def resample_from_p(p, proposal, keys, limit):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(verify, "residual", lambda p, q, token: p)
    return verify.ratio(p, proposal, keys, limit)


def zero_the_rejected(p, proposal, keys, limit):
  right = verify.residual
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(verify, "residual", lambda p, q, token: right(p, None, token))
    return verify.ratio(p, proposal, keys, limit)


def shifted_rows(p, proposal, keys, limit):
  return verify.ratio(jnp.roll(p, 1, axis=1), proposal, keys, limit)


def bonus_of_the_row_before(p, proposal, keys, limit):
  return verify.ratio(p.at[:, -1].set(p[:, -2]), proposal, keys, limit)


def told_one_hot(p, proposal, keys, limit):
  """Sampled drafts verified as if they were deterministic."""
  return verify.ratio(p, Proposal(proposal.tokens, None), keys, limit)


@pytest.mark.parametrize("wrong", [
    resample_from_p, zero_the_rejected, shifted_rows, bonus_of_the_row_before, told_one_hot])
def test_the_enumeration_sees_a_wrong_rule(wrong):
  with jax.enable_x64(True):
    assert wrongest(range(1), 3, 2, np.float64, False, 2, rule=wrong) > 1e-3


def injected(monkeypatch, accept, other=0.0):
  monkeypatch.setattr(
      sampling, "uniforms", lambda keys, purpose, count: jnp.full(
          (keys.shape[0], count), accept if purpose == sampling.ACCEPT else other, jnp.float32))


def run_ratio(p, x, q, limit=1):
  proposal = Proposal(jnp.asarray([[x]], jnp.int32), None if q is None else jnp.asarray([[q]]))
  keys = jax.random.split(jax.random.key(0), 1)
  rows = jnp.asarray([[p, p]], jnp.float32)
  verdict = verify.ratio(rows, proposal, keys, jnp.asarray([limit], jnp.int32))
  return int(verdict.accepted[0]), int(verdict.next_token[0])


def test_u_zero_never_accepts_the_impossible(monkeypatch):
  injected(monkeypatch, 0.0)
  assert run_ratio([0.0, 1.0], 0, [0.5, 0.5]) == (0, 1)
  assert run_ratio([0.0, 1.0], 0, None) == (0, 1)
  # Drawn although its q is zero (a drafter of another precision): p decides.
  assert run_ratio([0.0, 1.0], 0, [0.0, 1.0])[0] == 0


@pytest.mark.parametrize("other", [0.0, ALMOST_ONE])
def test_u_almost_one_accepts_the_certain_and_nothing_less(monkeypatch, other):
  injected(monkeypatch, ALMOST_ONE, other)
  assert run_ratio([0.0, 1.0, 0.0], 1, [0.25, 0.5, 0.25]) == (1, 1)
  assert run_ratio([0.0, 1.0, 0.0], 1, None) == (1, 1)
  assert run_ratio([0.3, 0.4, 0.3], 1, [0.3, 0.4, 0.3])[0] == 1  # p equals q: always accepted
  assert run_ratio([0.6, 0.4, 0.0], 1, [0.5, 0.5, 0.0]) == (0, 0)
  assert run_ratio([0.6, 0.4, 0.0], 1, None) == (0, 0)


def test_an_empty_residual_samples_from_p():
  p, q = jnp.asarray([[0.25, 0.75]]), jnp.asarray([[0.5, 0.75]])
  np.testing.assert_array_equal(verify.residual(p, q, jnp.asarray([0])), p)
  certain = jnp.asarray([[0.0, 1.0]])
  np.testing.assert_array_equal(verify.residual(certain, None, jnp.asarray([1])), certain)
  np.testing.assert_allclose(
      verify.residual(jnp.asarray([[0.5, 0.5]]), jnp.asarray([[0.9, 0.1]]), jnp.asarray([0])),
      [[0.0, 0.4]], atol=1e-7)


def test_a_tiny_q_gives_no_nan():
  q = jnp.asarray([[[1e-38, 1.0]]])
  p = jnp.asarray([[[0.5, 0.5], [0.5, 0.5]]])
  chance = verify.acceptance_probabilities(p, Proposal(jnp.asarray([[0]]), q))
  assert chance[0, 0] > 1


# Greedy.


def run_greedy(best, drafts, limit):
  best, drafts = jnp.asarray(best), jnp.asarray(drafts, jnp.int32)
  logits = jax.nn.one_hot(best, 16) * 3
  return verify.greedy(
      logits, Proposal(drafts, None), None, jnp.full(drafts.shape[0], limit, jnp.int32))


def test_greedy_accepts_the_matching_prefix():
  # Ragged rows: 0, 1, 3 accepted, and a match behind a mismatch that counts for nothing.
  verdict = run_greedy(
      [[1, 2, 3, 4]] * 4, [[9, 2, 3], [1, 9, 3], [1, 2, 3], [9, 9, 3]], 3)
  np.testing.assert_array_equal(verdict.accepted, [0, 1, 3, 0])
  np.testing.assert_array_equal(verdict.next_token, [1, 2, 4, 1])


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_greedy_stops_at_the_limit(limit):
  verdict = run_greedy([[1, 2, 3, 4]], [[1, 2, 3]], limit)
  assert (int(verdict.accepted[0]), int(verdict.next_token[0])) == (limit, limit + 1)


def test_greedy_ties_go_to_the_lowest_id():
  # CASE 11: equal maxima at 3 and 9; only the draft 3 is right.
  logits = jnp.zeros((2, 2, 16)).at[:, :, jnp.asarray([3, 9])].set(5.0)
  verdict = verify.greedy(
      logits, Proposal(jnp.asarray([[3], [9]]), None), None, jnp.asarray([1, 1]))
  np.testing.assert_array_equal(verdict.accepted, [1, 0])
  np.testing.assert_array_equal(verdict.next_token, [3, 3])


def test_greedy_tells_neighbours_apart_that_a_softmax_merges():
  logits = jnp.full((1, 2, 8), -50.0).at[:, :, 2].set(1e-9).at[:, :, 6].set(2e-9)
  assert jax.nn.softmax(logits)[0, 0, 2] == jax.nn.softmax(logits)[0, 0, 6]
  verdict = verify.greedy(logits, Proposal(jnp.asarray([[6]]), None), None, jnp.asarray([1]))
  assert (int(verdict.accepted[0]), int(verdict.next_token[0])) == (1, 6)


# The choice of a rule.


@pytest.mark.parametrize("name,coldest,warmest,expected", [
    (None, 0.0, 0.0, "greedy"), ("ratio", 0.0, 0.0, "greedy"), ("greedy", 0.0, 1e-6, "greedy"),
    ("ratio", 1e-40, 9e-6, "greedy"), (None, 0.0, 1.0, "ratio"), ("ratio", 0.7, 0.7, "ratio"),
    (None, 1e-5, 1e-5, "ratio")])
def test_choose(name, coldest, warmest, expected):
  assert verify.choose(name, coldest, warmest).name == expected


@pytest.mark.parametrize("name,coldest,warmest,message", [
    ("best", 0.0, 0.0, "rule='best' is unknown"), (None, -1.0, 1.0, "temperature=-1.0"),
    (None, float("nan"), 1.0, "temperature=nan"), ("greedy", 0.0, 1.0, "temperature=1.0")])
def test_choose_refuses(name, coldest, warmest, message):
  with pytest.raises(UserError, match=message):
    verify.choose(name, coldest, warmest)
