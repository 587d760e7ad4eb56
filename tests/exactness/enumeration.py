"""The law of what one round emits, by exact enumeration.

The uniforms are integrated out: for each draft and each pattern of passed and failed tests, the
real rule runs once with uniforms inside that pattern's intervals, and the weights it would draw the
next token from are read instead of drawn from.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import sampling, verify
from spec_jax.sampling import Sampling
from spec_jax.types import Proposal

# Settings under which both sides are truncated; (temperature, transforms).
TRANSFORMS = {
    "none": (1.0, Sampling(greedy=False)),
    "top_k": (0.7, Sampling(greedy=False, top_k=2)),
    "top_p": (1.3, Sampling(greedy=False, top_p=0.75)),
    "min_p": (1.0, Sampling(greedy=False, min_p=0.4)),
    "bias": (0.9, Sampling(greedy=False, top_p=0.9, bias=((0, -2.0), (1, float("-inf"))))),
}


def some_keys(rows):
  """Keys for what replaces the uniforms."""
  return sampling.round_keys(
      sampling.row_keys(0, jnp.arange(rows, dtype=jnp.int32)), jnp.zeros(rows, jnp.int32))


def prefixes(V, K):
  """Every prefix of at most K ids."""
  return list(itertools.chain.from_iterable(
      itertools.product(range(V), repeat=n) for n in range(K + 1)))


def conditionals(rng, V, K, zeros=0.0):
  """A random distribution [V] after every prefix of at most K ids, with exact zeros."""
  table = {}
  for prefix in prefixes(V, K):
    weights = rng.random(V) * (rng.random(V) >= zeros)
    weights[rng.integers(V)] += 0.1
    table[prefix] = weights / weights.sum()
  return table


def transformed(rng, V, K, transform, dtype):
  """Random logits after every prefix, through the sampling transforms."""
  names = prefixes(V, K)
  logits = jnp.asarray(rng.normal(size=(len(names), V)) * 1.5, dtype)
  heat, settings = TRANSFORMS[transform]
  probs = sampling.probabilities(logits, settings, jnp.full(len(names), heat, dtype))
  probs = np.asarray(probs, np.float64)  # normalised again: the transforms work in float32
  return dict(zip(names, probs / probs.sum(-1, keepdims=True), strict=True))


def one_hot_law(choice, V, K):
  """The conditionals of a drafter that always proposes `choice(prefix)`."""
  return {prefix: np.eye(V)[choice(prefix)] for prefix in prefixes(V, K)}


def emitted_law(
    p, q, V, K, *, deterministic, limit, dtype, name="ratio", rule=None, acceptance=None,
    told=None):
  """The law of the next K + 1 tokens after one round (continued from p), [V] * (K + 1).

  Args:
    p, q: conditionals of target and drafter.
    deterministic: the rule is not told q.
    limit: drafts that may be accepted.
    dtype: of every array.
    name: of the rule whose acceptance probabilities weigh the outcomes.
    rule: what is run in its place.
    acceptance: weighs the outcomes in place of the rule's own acceptance probabilities.
    told: conditionals that the rule is told in place of q.
  """
  cases = list(itertools.product(
      itertools.product(range(V), repeat=K), itertools.product([True, False], repeat=K)))
  rows = np.array([[p[x[:i]] for i in range(K + 1)] for x, _ in cases], dtype)
  laws = np.array([[(told or q)[x[:i]] for i in range(K)] for x, _ in cases], dtype)
  proposal = Proposal(
      jnp.asarray([x for x, _ in cases], jnp.int32), None if deterministic else jnp.asarray(laws))
  limits = jnp.full(len(cases), limit, jnp.int32)
  chance = np.asarray((acceptance or verify.RULES[name].acceptance)(
      jnp.asarray(rows), proposal, limits))
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
    verdict = (rule or verify.RULES[name].apply)(
        jnp.asarray(rows), proposal, some_keys(len(cases)), limits)
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
  """The law of K + 1 tokens drawn from the target alone."""
  law = np.zeros((V,) * (K + 1))
  for full in itertools.product(range(V), repeat=K + 1):
    law[full] = np.prod([p[full[:i]][full[i]] for i in range(K + 1)])
  return law


def wrongest(
    seeds, V, K, dtype, deterministic, limit, name="ratio", rule=None, acceptance=None,
    transform=None, told=None):
  """The largest error of the emitted law over random pairs of conditionals.

  Args:
    told: makes from the drafter's conditionals what the rule is told in their place.
  """
  worst = 0.0
  for seed in seeds:
    rng = np.random.default_rng(seed)
    if transform:
      p, q = (transformed(rng, V, K, transform, dtype) for _ in range(2))
    else:  # zeros on both sides: ids that only one of the two can produce
      p, q = (conditionals(rng, V, K, zeros=0.3 * (seed % 2)) for _ in range(2))
    if deterministic:
      choice = rng.integers(0, V, 997)
      q = one_hot_law(lambda prefix, c=choice: c[hash(prefix) % 997], V, K)
    law = emitted_law(
        p, q, V, K, deterministic=deterministic, limit=limit, dtype=dtype, name=name, rule=rule,
        acceptance=acceptance, told=told(q) if told else None)
    worst = max(worst, np.abs(law - target_law(p, V, K)).max())
  return worst
