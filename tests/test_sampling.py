"""Logits to probabilities to draws: the transforms, the inverse-CDF search, the random streams."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import sampling
from spec_jax.errors import UserError
from spec_jax.sampling import Sampling, draw, probabilities

ALMOST_ONE = np.float32(1 - 2**-24)  # the largest float32 below 1


def law(logits, temperature=1.0, **settings):
  logits = jnp.asarray(logits, jnp.float32)[None]
  settings = Sampling(greedy=False, **settings)
  return np.asarray(probabilities(logits, settings, jnp.full(1, temperature, jnp.float32)))[0]


def softmax(x):
  e = np.exp(np.asarray(x, np.float64) - np.max(x))
  return e / e.sum()


# The transforms.


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature(temperature):
  logits = np.array([1.0, -2.0, 0.5, 3.0])
  np.testing.assert_allclose(law(logits, temperature), softmax(logits / temperature), atol=1e-6)


def test_top_k_keeps_the_k_most_probable():
  logits = np.array([1.0, 4.0, 2.0, 3.0])
  expected = softmax([-np.inf, 4.0, -np.inf, 3.0])
  np.testing.assert_allclose(law(logits, top_k=2), expected, atol=1e-6)
  np.testing.assert_allclose(law(logits, top_k=0), softmax(logits), atol=1e-6)
  np.testing.assert_allclose(law(logits, top_k=9), softmax(logits), atol=1e-6)


@pytest.mark.parametrize(
    "top_p,kept", [(1e-50, 1), (0.3, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
  p = np.array([0.125, 0.5, 0.07, 0.305])
  expected = np.where(np.isin(np.arange(4), np.argsort(-p)[:kept]), p, 0)
  np.testing.assert_allclose(law(np.log(p), top_p=top_p), expected / expected.sum(), atol=1e-6)


@pytest.mark.parametrize("min_p,kept", [(0.0, 4), (0.1, 4), (0.2, 3), (0.5, 2), (0.7, 1), (1.0, 1)])
def test_min_p_keeps_what_is_near_the_best(min_p, kept):
  p = np.array([0.125, 0.5, 0.07, 0.305])
  expected = np.where(np.isin(np.arange(4), np.argsort(-p)[:kept]), p, 0)
  np.testing.assert_allclose(law(np.log(p), min_p=min_p), expected / expected.sum(), atol=1e-6)


def test_bias_comes_first_and_counts_under_greedy():
  """CASE 14."""
  logits = np.array([1.0, 3.0, 2.0, 0.0])
  found = law(logits, 2.0, bias=((1, -100.0), (3, 1.5)))
  np.testing.assert_allclose(found, softmax(np.array([1.0, -97.0, 2.0, 1.5]) / 2), atol=1e-6)
  np.testing.assert_array_equal(law(logits, 0.0, bias=((1, -100.0),)), [0, 0, 1, 0])
  assert law(logits, 1.0, bias=((1, -np.inf),))[1] == 0
  settings = Sampling(bias=((5, 2.0), (7, 1.0)))
  places = jnp.asarray([9, 9, 9, 9, 9, 1, 9, 9])  # ids 5 at place 1; 7 is not there
  np.testing.assert_array_equal(
      sampling.biased(jnp.zeros((2, 3)), settings, places), [[0, 2, 0], [0, 2, 0]])


def test_top_p_comes_after_temperature_and_top_k():
  p = np.array([0.4, 0.3, 0.2, 0.1])
  # Two ids are left by top-k with 4/7 and 3/7; 0.5 of that is reached by the first alone.
  np.testing.assert_allclose(law(np.log(p), top_k=2, top_p=0.5), [1, 0, 0, 0], atol=1e-6)
  # Flat at a high temperature, so that 0.5 needs two ids where it needs one at temperature 1.
  kept = law(np.log([0.6, 0.2, 0.1, 0.1]), 100.0, top_p=0.5)
  assert np.count_nonzero(kept) == 2


def test_ids_that_do_not_exist_keep_probability_zero():
  logits = np.array([0.0, 1.0, -np.inf, -np.inf])
  for settings in ({}, {"top_k": 3}, {"top_p": 0.999}, {"top_k": 3, "top_p": 0.999}):
    for temperature in (1e-3, 1.0, 1e4):
      p = law(logits, temperature, **settings)
      assert (p[2:] == 0).all() and p.sum() == pytest.approx(1)


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6, 9.9e-6])
def test_below_the_threshold_is_the_argmax(temperature):
  # Softmax in float32 would merge the first two logits; the argmax of the logits does not.
  logits = np.array([1e-9, 2e-9, -3.0])
  np.testing.assert_array_equal(law(logits, temperature), [0, 1, 0])
  np.testing.assert_array_equal(law([1.0, 7.0, 7.0], temperature), [0, 1, 0])


@pytest.mark.parametrize("temperature", [1e-5, 1e-3])
def test_just_above_the_threshold_has_no_nan(temperature):
  p = law([40.0, -40.0, 39.0, -np.inf], temperature)
  np.testing.assert_allclose(p, [1, 0, 0, 0], atol=1e-6)


def test_temperatures_of_one_batch_do_not_mix():
  logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 8)), jnp.float32)
  heat = jnp.asarray([0.0, 0.5, 1.0, 2.0])
  mixed = probabilities(logits, Sampling(False), heat)
  for b in range(4):
    alone = probabilities(logits[b:b + 1], Sampling(False), heat[b:b + 1])
    np.testing.assert_array_equal(mixed[b], alone[0])


@pytest.mark.parametrize("settings,named", [
    ({"top_p": 0.0}, "top_p=0.0"), ({"top_p": 1.5}, "top_p=1.5"),
    ({"top_p": float("nan")}, "top_p=nan"), ({"top_k": -1}, "top_k=-1"),
    ({"min_p": -0.1}, "min_p=-0.1"), ({"min_p": float("nan")}, "min_p=nan"),
    ({"bias": ((4, float("inf")),)}, "bias of id 4"),
    ({"bias": ((4, float("nan")),)}, "bias of id 4")])
def test_settings_out_of_range_are_named(settings, named):
  with pytest.raises(UserError, match=named):
    Sampling(False, **settings)


def test_log_probability_is_of_the_raw_logits():
  logits = np.random.default_rng(1).normal(size=(2, 5, 9)).astype(np.float32)
  tokens = np.random.default_rng(2).integers(0, 9, (2, 5))
  found = sampling.log_probability(jnp.asarray(logits), jnp.asarray(tokens))
  for b in range(2):
    for t in range(5):
      assert found[b, t] == pytest.approx(np.log(softmax(logits[b, t])[tokens[b, t]]), abs=1e-5)


# The draw.


def test_draw_inverts_the_cdf():
  weights = jnp.asarray([0.5, 0.0, 0.25, 0.25], jnp.float32)
  u = jnp.asarray([0.0, 0.49, 0.5, 0.74, 0.75, 0.99])
  drawn = draw(jnp.broadcast_to(weights, (6, 4)), u)
  np.testing.assert_array_equal(drawn, [0, 0, 2, 2, 3, 3])


def sequential(weights, u):
  return draw(weights, u)


def by_prefix_tree(weights, u):
  """The same with the cumulative sums that accelerators compute: not monotone by rounding."""
  tree = lambda x, axis: jax.lax.associative_scan(jnp.add, x, axis=axis)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sampling.jnp, "cumsum", tree)
    return draw(weights, u)


@pytest.mark.parametrize("method", [sequential, by_prefix_tree])
@pytest.mark.parametrize("V", [1, 3, 255, 256, 257, 1000])
def test_draw_never_takes_a_zero(method, V):
  rng = np.random.default_rng(V)
  N = 4000
  weights = rng.random((N, V)).astype(np.float32) ** 8 * (rng.random((N, V)) < 0.2)
  weights[np.arange(N), rng.integers(0, V, N)] = rng.random(N) + 1e-3
  # The places where rounding decides: both ends, and the very edges of the CDF.
  edges = np.cumsum(weights, 1) / weights.sum(1, keepdims=True)
  u = edges[np.arange(N), rng.integers(0, V, N)].astype(np.float32)
  u = np.minimum(u, ALMOST_ONE)
  u[:400], u[400:800] = 0.0, ALMOST_ONE
  drawn = np.asarray(method(jnp.asarray(weights), jnp.asarray(u)))
  assert ((drawn >= 0) & (drawn < V)).all()
  assert (weights[np.arange(N), drawn] > 0).all()


def test_draw_at_both_ends():
  weights = np.zeros((2, 700), np.float32)
  weights[:, [3, 300, 650]] = 0.25
  drawn = draw(jnp.asarray(weights), jnp.asarray([0.0, ALMOST_ONE]))
  np.testing.assert_array_equal(drawn, [3, 650])


def test_draw_takes_weights_that_do_not_sum_to_one():
  weights = jnp.asarray([3.0, 0.0, 1.0]) * 1e-6
  u = jnp.linspace(0, 0.999, 1000)
  drawn = np.asarray(draw(jnp.broadcast_to(weights, (1000, 3)), u))
  assert (drawn == 0).mean() == pytest.approx(0.75, abs=0.002) and not (drawn == 1).any()


@pytest.mark.parametrize("V", [5, 300, 4096])
def test_draw_has_the_law_of_the_array_it_reads(V):
  # CASE 2: logits rounded to bfloat16; 200,000 draws against the array that the ratio would use.
  logits = jnp.asarray(np.random.default_rng(V).normal(size=V) * 3, jnp.bfloat16)
  p = probabilities(logits[None], Sampling(False), jnp.ones(1))[0]
  N = 200_000
  u = jax.random.uniform(jax.random.key(V), (N,))
  drawn = np.asarray(jax.jit(jax.vmap(draw, (None, 0)))(p, u))
  expected = N * np.asarray(p, np.float64)
  order = np.argsort(expected)
  # Pools the rare ids until every cell expects at least 20.
  cells = np.cumsum(expected[order]) // 20
  pool = lambda x: np.bincount(np.unique(cells, return_inverse=True)[1], weights=x[order])
  seen, wanted = pool(np.bincount(drawn, minlength=V)), pool(expected)
  assert wanted.min() > 1
  chi = np.sum((seen - wanted) ** 2 / wanted)
  freedom = len(wanted) - 1
  # Five standard deviations of chi-square: the seed is fixed, so this passes or fails for good.
  assert chi < freedom + 5 * np.sqrt(2 * freedom)


# The streams.


def test_streams_are_disjoint():
  rows = sampling.row_keys(3, jnp.arange(4))
  seen = []
  for start in range(5, 12):
    keys = sampling.round_keys(rows, jnp.full(4, start))
    for purpose in (sampling.DRAFT, sampling.ACCEPT, sampling.RESIDUAL, sampling.BONUS):
      seen.append(np.asarray(sampling.uniforms(keys, purpose, 6)))
  seen = np.concatenate(seen).ravel()
  # 672 draws of 23 bits: a chance collision has probability 0.03, a shared stream repeats dozens.
  assert len(np.unique(seen)) >= len(seen) - 1
  assert (seen >= 0).all() and (seen < 1).all()


def test_streams_do_not_depend_on_the_batch_nor_on_the_draft_length():
  many = sampling.round_keys(sampling.row_keys(7, jnp.arange(5)), jnp.arange(5) + 20)
  one = sampling.round_keys(sampling.row_keys(7, jnp.asarray([3])), jnp.asarray([23]))
  a, b = sampling.uniforms(many, sampling.DRAFT, 8), sampling.uniforms(one, sampling.DRAFT, 3)
  np.testing.assert_array_equal(a[3, :3], b[0])
  other = sampling.round_keys(sampling.row_keys(8, jnp.asarray([3])), jnp.asarray([23]))
  assert not np.array_equal(b, sampling.uniforms(other, sampling.DRAFT, 3))
