"""Rung 4: under `coupled` the seed alone decides the tokens.

At equal shape the equality is exact. Across draft lengths and against width 1 the passes round
differently, so a difference is allowed where the two best values of log p + noise lie within the
tolerance; such places are counted and printed.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax
from spec_jax import drafters, identity, sampling
from tests import tiny

SETTINGS = dict(
    temperature=0.8, top_p=0.95, rule="coupled", seed=5, max_new_tokens=16, batch_size=4)


@pytest.fixture(scope="module")
def tolerance():
  """Of the gap between two values of log p + noise: the measured rounding of the logits between
  pass widths, on other prompts, over the temperature."""
  texts = tiny.prompts(4, seed=9)
  return identity.rounding_tolerance(tiny.target(), texts, 7, rows=4) / SETTINGS["temperature"]


@pytest.fixture(scope="module")
def prompts():
  return tiny.prompts(12)


def decode(drafter, prompts, **options):
  return spec_jax.generate(tiny.target(), drafter, prompts, **(SETTINGS | options))


def by_name():
  return {
      "self": tiny.self_drafter(), "weak": tiny.weak_drafter(),
      "ngram": drafters.load_drafter("ngram", tiny.target()),
      "fixed law": tiny.fixed_law(np.full(tiny.VOCAB, 1 / tiny.VOCAB))}


@pytest.fixture(scope="module")
def reference(prompts):
  return decode(tiny.weak_drafter(), prompts, draft_len=4)


def test_the_drafter_does_not_matter(prompts, reference):
  taus = {}
  for name, drafter in by_name().items():
    out = decode(drafter, prompts, draft_len=4)
    assert out.tokens == reference.tokens, name
    taus[name] = spec_jax.records.tau(out.records)
  # It does matter for how many passes it takes.
  assert taus["self"] > taus["weak"] > taus["fixed law"] >= 1


def test_self_draft_is_always_accepted(prompts):
  """The drafter's own passes are one wide, so a rejection is allowed at a tie alone."""
  out = decode(tiny.self_drafter(), prompts, draft_len=4)
  for records, reason in zip(out.records, out.finish_reasons, strict=True):
    assert reason == "length" and (records.accepted == 4).all()


def test_the_company_does_not_matter(prompts, reference):
  for members in ([3], [7, 3, 0, 11], list(range(12))[::-1]):
    # Four rows in each case: the shape stays.
    chosen = members + [m for m in range(12) if m not in members][:max(0, 4 - len(members))]
    out = decode(tiny.weak_drafter(), [prompts[i] for i in chosen], draft_len=4,
                 sequence_ids=chosen)
    assert out.tokens == [reference.tokens[i] for i in chosen]


def test_the_seed_does_matter(prompts, reference):
  assert decode(tiny.weak_drafter(), prompts, draft_len=4, seed=6).tokens != reference.tokens


def choice(prompt, tokens, i):
  """The best id by log p + noise behind the first tokens of an answer, and by how much it wins."""
  ids = jnp.asarray([[*prompt, *tokens]])
  logits = tiny.target().module(ids, jnp.arange(ids.shape[1])[None])[0][:, -1]
  settings = sampling.Sampling(False, SETTINGS["top_p"], coupled=True)
  probs = sampling.probabilities(logits, settings, jnp.full(1, SETTINGS["temperature"]))
  keys = sampling.round_keys(
      sampling.row_keys(SETTINGS["seed"], jnp.asarray([i])), jnp.asarray([ids.shape[1]]))
  noise = sampling.gumbel(keys, jnp.arange(1), probs.shape[-1])[:, 0]
  scores = np.asarray(jnp.log(probs) + noise)[0]
  top = np.sort(scores)[-2:]
  return int(np.argmax(scores)), float(top[1] - top[0])


@pytest.mark.parametrize("draft_len", [0, 1, 2, 7])
def test_the_draft_length_does_not_matter(prompts, reference, draft_len, tolerance, capsys):
  out = decode(tiny.weak_drafter() if draft_len else None, prompts, draft_len=draft_len)
  ties = 0
  for i, (ours, theirs) in enumerate(zip(out.tokens, reference.tokens, strict=True)):
    if ours != theirs:
      same = next(k for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
      assert choice(prompts[i], ours[:same], i)[1] < tolerance
      ties += 1
  with capsys.disabled():
    print(f"\n  coupled, K = {draft_len} against 4: {len(prompts) - ties} of {len(prompts)} equal, "
          f"{ties} part at a tie within {tolerance:.2g}", end="")


def test_the_noise_is_shared_and_the_gap_is_that_of_the_choice(prompts, reference, tolerance):
  """`choice` looks at the very noise that decided."""
  for i in range(4):
    best, gap = choice(prompts[i], reference.tokens[i][:5], i)
    assert best == reference.tokens[i][5] and gap > tolerance
  keys = sampling.round_keys(sampling.row_keys(1, jnp.arange(2)), jnp.asarray([7, 9]))
  later = sampling.round_keys(sampling.row_keys(1, jnp.arange(2)), jnp.asarray([9, 11]))
  ours = sampling.gumbel(keys, jnp.asarray([2, 3]), 5)
  np.testing.assert_array_equal(ours, sampling.gumbel(later, jnp.asarray([0, 1]), 5))
  assert not np.array_equal(ours[0], ours[1])
