"""Rung 1: the law of every lossless rule is the target's, exactly."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import verify
from spec_jax.types import Proposal
from tests.exactness import enumeration
from tests.exactness.enumeration import conditionals, emitted_law, target_law, wrongest

# Rules whose randomness is uniforms; `greedy` has none and `coupled` has its own rung.
BY_UNIFORMS = [r.name for r in verify.RULES.values() if r.lossless and r.acceptance is not None]


def test_every_lossless_rule_is_on_a_rung():
  lossless = {name for name, rule in verify.RULES.items() if rule.lossless}
  assert lossless == {*BY_UNIFORMS, "greedy", "coupled"}
  assert not verify.RULES["typical"].lossless


@pytest.mark.parametrize("V,K", [(2, 1), (4, 1), (3, 2), (4, 2), (2, 3)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", BY_UNIFORMS)
def test_the_law_is_the_targets(name, V, K, deterministic):
  for limit in range(K + 1):
    with jax.enable_x64(True):
      assert wrongest(range(4), V, K, np.float64, deterministic, limit, name) < 1e-12
    assert wrongest(range(2), V, K, np.float32, deterministic, limit, name) < 1e-6


@pytest.mark.parametrize("transform", [t for t in enumeration.TRANSFORMS if t != "none"])
@pytest.mark.parametrize("name", BY_UNIFORMS)
def test_truncation_changes_nothing_about_it(name, transform):
  with jax.enable_x64(True):
    for deterministic in (False, True):
      assert wrongest(
          range(3), 4, 2, np.float64, deterministic, 2, name, transform=transform) < 1e-12
  for deterministic in (False, True):
    assert wrongest(
        range(1), 4, 2, np.float32, deterministic, 2, name, transform=transform) < 1e-6


def test_the_example_of_the_cases():
  """CASE 1, exactly."""
  p, q = {(): np.array([.5, .3, .2])}, {(): np.array([.2, .5, .3])}
  p |= {(i,): np.ones(3) / 3 for i in range(3)}
  with jax.enable_x64(True):
    law = emitted_law(p, q, 3, 1, deterministic=False, limit=1, dtype=np.float64)
  np.testing.assert_allclose(law.sum(1), [.5, .3, .2], atol=1e-12)


def test_block_keeps_at_least_as_much_as_ratio():
  """E[tau] of block verification is never below that of token by token (2403.10444, theorem 2)."""
  gains = []
  with jax.enable_x64(True):
    for seed in range(6):
      rng = np.random.default_rng(seed)
      p, q = (conditionals(rng, 3, 3) for _ in range(2))
      gains.append(expected_accepted("block", p, q) - expected_accepted("ratio", p, q))
  assert min(gains) > -1e-12 and max(gains) > 1e-3


def expected_accepted(name, p, q, V=3, K=3):
  """Mean accepted drafts of a round, over drafts and uniforms."""
  rule, total = verify.RULES[name], 0.0
  for x in itertools.product(range(V), repeat=K):
    rows = jnp.asarray([[p[x[:i]] for i in range(K + 1)]])
    proposal = Proposal(
        jnp.asarray([x], jnp.int32), jnp.asarray([[q[x[:i]] for i in range(K)]]))
    h = np.asarray(rule.acceptance(rows, proposal, jnp.asarray([K], jnp.int32)))[0]
    if rule.deepest:
      mean = sum(i * h[i - 1] * np.prod(1 - h[i:]) for i in range(1, K + 1))
    else:
      mean = sum(np.prod(h[:i]) for i in range(1, K + 1))
    total += mean * np.prod([q[x[:i]][x[i]] for i in range(K)])
  return total


def test_typical_acceptance_is_not_lossless():
  with jax.enable_x64(True):
    assert wrongest(range(2), 3, 2, np.float64, False, 2, "typical") > 1e-3


def test_the_reference_law_sums_to_one():
  assert target_law(conditionals(np.random.default_rng(0), 3, 2), 3, 2).sum() == pytest.approx(1)
