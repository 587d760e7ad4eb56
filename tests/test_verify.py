"""The acceptance rules at their edges; their laws are enumerated in tests/exactness."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import sampling, verify
from spec_jax.errors import UserError
from spec_jax.types import Proposal
from tests.exactness.enumeration import some_keys

ALMOST_ONE = 1 - 2**-24


def injected(monkeypatch, accept, other=0.0):
  monkeypatch.setattr(
      sampling, "uniforms", lambda keys, purpose, count: jnp.full(
          (1, count), accept if purpose == sampling.ACCEPT else other, jnp.float32))


def run_ratio(p, x, q, limit=1):
  proposal = Proposal(jnp.asarray([[x]], jnp.int32), None if q is None else jnp.asarray([[q]]))
  rows = jnp.asarray([[p, p]], jnp.float32)
  verdict = verify.ratio(rows, proposal, some_keys(1), jnp.asarray([limit], jnp.int32))
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


@pytest.mark.parametrize("name", verify.RULES)
def test_a_match_behind_a_mismatch_counts_for_nothing(name):
  """CASE 16, for every rule: matches [1, 0, 1, 0] are one accepted draft."""
  rule = verify.RULES[name]
  rows = jax.nn.one_hot(jnp.asarray([[1, 2, 3, 4, 5]]), 16) * (3 if rule.on_logits else 1)
  drafts = Proposal(jnp.asarray([[1, 9, 3, 9]], jnp.int32), None)
  verdict = rule.apply(rows, drafts, some_keys(1), jnp.asarray([4], jnp.int32))
  assert (int(verdict.accepted[0]), int(verdict.next_token[0])) == (1, 2)


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
