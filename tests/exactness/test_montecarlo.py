"""Rung 3: the law of whole decodes through the compiled loop, against one computed apart."""

import numpy as np
import pytest

from tests.exactness import montecarlo
from tests.exactness.montecarlo import chi_square, counts, cut_top_p, exact_law, softmax

EFFECT = 0.02  # total variation that must be caught with probability montecarlo.POWER
NUMBER = 120_000  # enough for it, which is asserted
LAWS = {
    "plain": ({"temperature": 1.0}, softmax),
    "cut": ({"temperature": 1.2, "top_p": 0.9}, lambda z: cut_top_p(softmax(z, 1.2), 0.9)),
}


@pytest.mark.parametrize("rule", ["ratio", "block", "coupled"])
@pytest.mark.parametrize("draft_len", [2, 5])
def test_the_law_of_the_loop(rule, draft_len, capsys):
  """Ragged prompts, EOS inside blocks; the first three tokens are counted together."""
  name = "plain" if draft_len == 2 else "cut"
  settings, transform = LAWS[name]
  tallies = counts(NUMBER, draft_len, 4, rule=rule, **settings)
  for prompt, tally in zip(montecarlo.PROMPTS, tallies, strict=True):
    law = exact_law(prompt, 3, transform)
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    p_value, least = chi_square(tally, law, 3)
    with capsys.disabled():
      print(f"\n  {rule}, K = {draft_len}, {name}: p = {p_value:.3f}; a bias of total variation "
            f"{least:.4f} would have been caught", end="")
    assert p_value > montecarlo.LEVEL and least < EFFECT


@pytest.mark.parametrize("kind, rule", [
    ("lookup", "ratio"), ("lookup+1", "ratio"), ("lookup+1", "block"), ("eagle3", "ratio"),
    ("eagle3", "block"), ("dflash", "ratio"), ("dflash", "block"), ("dspark", "ratio"),
    ("dspark", "block")])
def test_the_law_with_every_drafter(kind, rule, capsys):
  """The q that each returns is what its drafts were drawn from, also given the drafts before."""
  composed = kind.startswith("lookup")
  layers = 1 if composed else 7
  made = montecarlo.looked_up(int(kind[7:] or 0)) if composed else montecarlo.reader(kind)
  tallies = counts(NUMBER // 4, 2, 4, layers, drafter=made, rule=rule, temperature=1.0)
  for prompt, tally in zip(montecarlo.PROMPTS, tallies, strict=True):
    p_value, least = chi_square(tally, exact_law(prompt, 3, softmax, layers), 3)
    with capsys.disabled():
      print(f"\n  {kind}, {rule}: p = {p_value:.3f}; a bias of total variation {least:.4f} would "
            "have been caught", end="")
    assert p_value > montecarlo.LEVEL and least < 2 * EFFECT


def test_plain_decoding_has_the_law_too():
  tallies = counts(NUMBER, 0, 4, drafter=None, temperature=1.0)
  for prompt, tally in zip(montecarlo.PROMPTS, tallies, strict=True):
    assert chi_square(tally, exact_law(prompt, 3, softmax), 3)[0] > montecarlo.LEVEL


def test_typical_acceptance_is_caught():
  law = exact_law(montecarlo.PROMPTS[0], 3, softmax)
  tally = counts(
      NUMBER, 2, 4, prompts=montecarlo.PROMPTS[:1], rule="typical", temperature=1.0)[0]
  assert chi_square(tally, law, 3)[0] < montecarlo.LEVEL


def test_a_bias_of_the_stated_size_is_caught():
  """The power that is printed is real: a law that far off fails in 99 of 100 drawn samples."""
  rng = np.random.default_rng(0)
  law = {(i,): 1 / 40 for i in range(40)}
  least = montecarlo.detectable(20_000, 39)
  # The bias that is hardest to see at its size: proportional to p.
  biased = np.array([1 / 40 + (1 if i % 2 else -1) * 2 * least / 40 for i in range(40)])
  caught = sum(
      chi_square({(i,): int(n) for i, n in enumerate(rng.multinomial(20_000, biased))}, law, 1)[0]
      < montecarlo.LEVEL for _ in range(200))
  assert caught >= 190
  fair = [chi_square({(i,): int(n) for i, n in enumerate(rng.multinomial(
      20_000, np.full(40, 1 / 40)))}, law, 1)[0] for _ in range(200)]
  assert min(fair) > montecarlo.LEVEL and 0.3 < np.mean(fair) < 0.7
