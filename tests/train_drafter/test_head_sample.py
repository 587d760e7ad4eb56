"""Sampled vocabulary of a training step: whole sums are estimated without bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.errors import UserError
from tests import tiny
from train_drafter import head_sample
from train_drafter.config import Config

COUNT, SIZE = 40, 16
FORCED = jnp.array([3, 3, 7, 11, COUNT, COUNT + 5])


def sums(values, keys, shift=lambda x: x):
  """Estimates of the sum of exp(values), one for each key."""
  def one(key):
    places, offset = head_sample.choose(FORCED, SIZE, COUNT, key)
    return jnp.sum(jnp.exp(values[places] + shift(offset)))
  return jax.vmap(one)(keys)


def test_forced_places_are_always_there_and_all_are_different():
  for seed in range(20):
    places, offset = head_sample.choose(FORCED, SIZE, COUNT, jax.random.key(seed))
    assert sorted(set(places.tolist())) == places.tolist() and len(places) == SIZE
    at = {int(p): float(o) for p, o in zip(places, offset, strict=True)}
    assert at[3] == at[7] == at[11] == 0.0
    rest = [o for p, o in at.items() if p not in (3, 7, 11)]
    np.testing.assert_allclose(rest, np.log((COUNT - 3) / (SIZE - 3)), rtol=1e-5)


def test_the_normaliser_is_estimated_without_bias():
  values = jnp.asarray(np.random.default_rng(0).normal(size=COUNT) * 1.5, jnp.float32)
  keys = jax.random.split(jax.random.key(1), 20_000)
  whole = float(jnp.sum(jnp.exp(values)))
  found = np.asarray(sums(values, keys))
  error = 4 * found.std() / np.sqrt(len(found))
  assert abs(found.mean() - whole) < error < 0.03 * whole
  # Without the weights, as a plain restriction of the vocabulary would have it, it is not.
  short = np.asarray(sums(values, keys, lambda offset: 0 * offset))
  assert abs(short.mean() - whole) > 5 * error


def test_more_forced_places_than_size():
  places, offset = head_sample.choose(jnp.arange(COUNT), SIZE, COUNT, jax.random.key(0))
  assert len(set(places.tolist())) == SIZE
  np.testing.assert_allclose(offset, np.log(COUNT / SIZE), rtol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_choice_follows_the_key(seed):
  a, b = (head_sample.choose(FORCED, SIZE, COUNT, jax.random.key(s))[0] for s in (seed, seed + 2))
  assert (a != b).any()


@pytest.mark.parametrize("draft_vocab, sampled, refused", [
    (0, 61, False), (0, 62, True), (0, 70, True), (64, 62, True), (99, 70, True), (99, 61, False),
    (40, 39, False)])
def test_a_choice_that_leaves_nothing_out_is_refused(draft_vocab, sampled, refused):
  """Of a target of 64 rows, 62 of which are ids; config.validate compares with a draft vocabulary
  that is smaller."""
  cfg = Config()
  cfg.drafter.draft_vocab, cfg.train.sampled_vocab = draft_vocab, sampled
  target = tiny.config(vocab_real=62)
  if not refused:
    head_sample.check(cfg, target)
    return
  with pytest.raises(UserError, match=f"train.sampled_vocab={sampled} must be below the 62 ids .*"
                     f"drafter.draft_vocab={draft_vocab}"):
    head_sample.check(cfg, target)
