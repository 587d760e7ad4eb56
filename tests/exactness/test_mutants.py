"""Rung 2: plausible wrong versions, each with the rung that must catch it."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax
from spec_jax import sampling, verify
from spec_jax.types import Proposal
from tests import tiny
from tests.exactness import montecarlo
from tests.exactness.enumeration import wrongest
from tests.exactness.montecarlo import chi_square, counts, cut_top_p, exact_law, softmax

ALMOST_ONE = 1 - 2**-24
CAUGHT: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def listing(pytestconfig):
  yield
  with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
    print("\n  mutants caught: " + "; ".join(CAUGHT), end="")


@contextlib.contextmanager
def replaced(module, **functions):
  with pytest.MonkeyPatch.context() as patch:
    for name, function in functions.items():
      patch.setattr(module, name, function)
    yield


# Caught by enumeration: wrong residuals and rows.


def resample_from_p(p, proposal, keys, limit):
  with replaced(verify, residual=lambda p, q, token: p):
    return verify.ratio(p, proposal, keys, limit)


def zero_only_the_rejected(p, proposal, keys, limit):
  right = verify.residual
  with replaced(verify, residual=lambda p, q, token: right(p, None, token)):
    return verify.ratio(p, proposal, keys, limit)


def shift_the_rows(p, proposal, keys, limit):
  return verify.ratio(jnp.roll(p, 1, axis=1), proposal, keys, limit)


def shifted_acceptance(p, proposal, limit):
  return verify.ratio_acceptance(jnp.roll(p, 1, axis=1), proposal, limit)


def bonus_of_the_row_before(p, proposal, keys, limit):
  return verify.ratio(p.at[:, -1].set(p[:, -2]), proposal, keys, limit)


def drop_by_own_confidence(p, proposal, keys, limit):
  """Drafts from the first one on that the drafter itself finds unlikely are not verified."""
  own = jnp.take_along_axis(proposal.probs, proposal.tokens[..., None], -1)[..., 0]
  sure = jnp.cumprod((own >= 0.3).astype(jnp.int32), 1)
  return verify.ratio(p, proposal, keys, jnp.minimum(limit, jnp.sum(sure, 1)))


# Each with its own acceptance probabilities, so that the law is really the mutant's.
@pytest.mark.parametrize("mutant,acceptance", [
    (resample_from_p, verify.ratio_acceptance), (zero_only_the_rejected, verify.ratio_acceptance),
    (shift_the_rows, shifted_acceptance), (bonus_of_the_row_before, verify.ratio_acceptance),
    (drop_by_own_confidence, verify.ratio_acceptance)])
def test_enumeration_catches(mutant, acceptance):
  with jax.enable_x64(True):
    assert wrongest(range(3), 3, 2, np.float64, False, 2) < 1e-12
    assert wrongest(
        range(3), 3, 2, np.float64, False, 2, rule=mutant, acceptance=acceptance) > 1e-3
  CAUGHT.append(f"{mutant.__name__} (enumeration)")


def test_sampled_drafts_told_as_deterministic_are_no_mutant():
  """Accepting x with p(x) and drawing from p without x otherwise keeps the law, whatever drafts x:
  q(v) p(v) + sum over x != v of q(x) p(v) = p(v). It accepts less, which is all that is lost."""
  told = lambda proposal: Proposal(proposal.tokens, None)
  with jax.enable_x64(True):
    assert wrongest(
        range(3), 3, 2, np.float64, False, 2,
        rule=lambda p, proposal, keys, limit: verify.ratio(p, told(proposal), keys, limit),
        acceptance=lambda p, proposal, limit: verify.ratio_acceptance(p, told(proposal), limit)
    ) < 1e-12


def block_keeps_the_smallest(p, proposal, keys, limit):
  def smallest(passed, limit):
    place = jnp.arange(1, passed.shape[1] + 1)
    passed = passed & (place <= limit[:, None])
    return jnp.where(passed.any(1), jnp.argmax(passed, 1) + 1, 0).astype(jnp.int32)

  with replaced(verify, _deepest=smallest):
    return verify.block(p, proposal, keys, limit)


def block_stops_at_the_first_failure(p, proposal, keys, limit):
  with replaced(verify, _deepest=verify._prefix):
    return verify.block(p, proposal, keys, limit)


def block_residual_unscaled(p, proposal, keys, limit):
  rule = dataclasses.replace(verify.RULES["block"], leftover=verify.ratio_leftover)
  return verify._sampled(rule, p, proposal, keys, limit)


@pytest.mark.parametrize("mutant", [
    block_keeps_the_smallest, block_stops_at_the_first_failure, block_residual_unscaled])
def test_enumeration_catches_in_block(mutant):
  with jax.enable_x64(True):
    assert wrongest(range(3), 3, 2, np.float64, False, 2, "block") < 1e-12
    assert wrongest(range(3), 3, 2, np.float64, False, 2, "block", mutant) > 1e-3
  CAUGHT.append(f"{mutant.__name__} (enumeration)")


def test_enumeration_catches_argmax_proposals_with_softmax_q():
  argmax_of = lambda q: {prefix: np.eye(len(row))[row.argmax()] for prefix, row in q.items()}
  rng = np.random.default_rng(0)
  from tests.exactness.enumeration import conditionals, emitted_law, target_law
  p, q = (conditionals(rng, 3, 1) for _ in range(2))
  with jax.enable_x64(True):
    error = lambda **told: np.abs(emitted_law(
        p, argmax_of(q), 3, 1, deterministic=False, limit=1, dtype=np.float64, **told)
        - target_law(p, 3, 1)).max()
    assert error() < 1e-12 and error(told=q) > 1e-3
  CAUGHT.append("argmax proposals with softmax q (enumeration)")


# Caught by injected uniforms: comparisons.


@pytest.mark.parametrize("name", ["ratio", "block"])
def test_injected_zero_catches_less_or_equal(name):
  """With u = 0 a draft of probability 0 must not be accepted; `<=` accepts it."""
  p = jnp.asarray([[[0.0, 1.0], [0.5, 0.5]]])
  proposal = Proposal(jnp.asarray([[0]], jnp.int32), jnp.asarray([[[0.5, 0.5]]]))
  limit = jnp.asarray([1], jnp.int32)

  def accepted(u):
    with replaced(sampling, uniforms=lambda keys, purpose, count: jnp.full((1, count), u)):
      verdict = verify.RULES[name].apply(p, proposal, KEYS, limit)
    return int(verdict.accepted[0]), int(verdict.next_token[0])

  assert accepted(0.0) == (0, 1)
  with replaced(verify, _passes=lambda u, chance: u <= chance):
    assert accepted(0.0)[0] == 1
  CAUGHT.append(f"<= for < in {name} (u = 0)")


@pytest.mark.parametrize("name", ["ratio", "block"])
def test_injected_almost_one_accepts_the_certain(name):
  """With the largest u a draft that p and q agree on is still accepted."""
  p = jnp.asarray([[[0.25, 0.75], [0.0, 1.0]]])
  proposal = Proposal(jnp.asarray([[1]], jnp.int32), jnp.asarray([[[0.25, 0.75]]]))
  high = lambda keys, purpose, count: jnp.full((1, count), ALMOST_ONE, jnp.float32)


  def accepted():
    with replaced(sampling, uniforms=high):
      verdict = verify.RULES[name].apply(p, proposal, KEYS, jnp.asarray([1], jnp.int32))
    return int(verdict.accepted[0]), int(verdict.next_token[0])

  assert accepted() == (1, 1)
  guarded = lambda p, proposal: jnp.take_along_axis(
      p[:, :-1], proposal.tokens[..., None], -1)[..., 0] / (0.75 + 1e-6)
  with replaced(verify, acceptance_probabilities=guarded):
    assert accepted()[0] == 0
  CAUGHT.append(f"an epsilon in the denominator in {name} (u = 1 - 2**-24)")


KEYS = sampling.round_keys(
    sampling.row_keys(0, jnp.arange(1, dtype=jnp.int32)), jnp.zeros(1, jnp.int32))


# Caught by counting through the compiled loop: keys, and transforms on one side only.

uniforms, probabilities = sampling.uniforms, sampling.probabilities


def one_key_twice(keys, purpose, count):
  """The residual is drawn with the number that the draft was."""
  return uniforms(keys, sampling.DRAFT if purpose == sampling.RESIDUAL else purpose, count)


def no_round_in_the_key(keys, purpose, count):
  """One key per absolute position: a position that is drafted again reuses its numbers."""
  def row(key, start):
    at = lambda j: jax.random.uniform(jax.random.fold_in(
        jax.random.fold_in(key, purpose), start + j))
    return jax.vmap(at)(jnp.arange(count))
  return jax.vmap(row)(keys.rows, keys.start)


def top_p_before_temperature(logits, settings, temperature):
  """Right for drafts, for the prefill and for plain decoding; wrong in the verification pass."""
  if logits.ndim != 3 or logits.shape[1] == 1:
    return probabilities(logits, settings, temperature)
  ones = jnp.ones_like(temperature)
  cut = probabilities(logits, settings, ones)
  bare = dataclasses.replace(settings, top_p=1.0)
  return probabilities(jnp.where(cut > 0, logits, -jnp.inf), bare, temperature)


@pytest.mark.parametrize("mutant,module,name,settings,number", [
    (one_key_twice, sampling, "uniforms", {"rule": "ratio", "temperature": 1.0}, 60_000),
    (no_round_in_the_key, sampling, "uniforms", {"rule": "block", "temperature": 1.0}, 400_000),
    # The control of the dearest: not a mutant, and not caught.
    (sampling.uniforms, sampling, "uniforms", {"rule": "block", "temperature": 1.0}, 400_000),
    (top_p_before_temperature, sampling, "probabilities",
     {"rule": "ratio", "temperature": 1.2, "top_p": 0.9}, 60_000)],
    ids=lambda value: getattr(value, "__name__", None))
def test_counting_catches(mutant, module, name, settings, number):
  heat, mass = settings["temperature"], settings.get("top_p", 1.0)
  transform = lambda z: cut_top_p(softmax(z, heat), mass) if mass < 1 else softmax(z, heat)
  law = exact_law(montecarlo.PROMPTS[0], 3, transform)
  jax.clear_caches()  # the functions that are replaced are compiled in
  try:
    with replaced(module, **{name: mutant}):
      tally = counts(number, 3, 5, prompts=montecarlo.PROMPTS[:1], **settings)[0]
  finally:
    jax.clear_caches()
  caught = chi_square(tally, law, 3)[0] < montecarlo.LEVEL
  if mutant is uniforms:
    assert not caught
  else:
    assert caught
    CAUGHT.append(f"{mutant.__name__} (counting)")


# Caught by coupled equality: what names the noise.


def noise_by_round(keys, places, width):
  """Noise that starts anew with every round: another draft length gives another text."""
  def row(key, start):
    at = lambda j: jax.random.gumbel(
        jax.random.fold_in(jax.random.fold_in(key, start), j), (width,), jnp.float32)
    return jax.vmap(at)(places)
  return jax.vmap(row)(keys.rows, keys.start)


def noise_of_the_drafter(keys, places, width):
  """The drafter's single places get other noise than the target's block: it draws by itself."""
  start = keys.start + (1000 if len(places) == 1 else 0)
  return gumbel(dataclasses.replace(keys, start=start), places, width)


gumbel = sampling.gumbel


@pytest.mark.parametrize("mutant", [noise_by_round, noise_of_the_drafter])
def test_coupled_equality_catches(mutant):
  """Either the text depends on the draft length, or self-draft is refused where nothing is."""
  options = dict(temperature=0.8, rule="coupled", seed=5, max_new_tokens=12, batch_size=4)
  decode = lambda draft_len: spec_jax.generate(
      tiny.target(), tiny.self_drafter(), tiny.prompts(4), draft_len=draft_len, **options)
  jax.clear_caches()
  try:
    with replaced(sampling, gumbel=mutant):
      short, long = decode(2), decode(4)
  finally:
    jax.clear_caches()
  whole = all((r.accepted == r.proposed).all() for r in long.records)
  assert short.tokens != long.tokens or not whole
  CAUGHT.append(f"{mutant.__name__} (coupled equality)")
