"""The law of what the compiled loop emits, by counting: tiny transformers, many rows at once."""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np
from scipy import optimize, stats

from spec_jax import decode, drafters
from spec_jax.drafters import Drafter
from spec_jax.drafters.lookup import Lookup
from spec_jax.drafters.ngram import NGram
from spec_jax.generate import Run
from spec_jax.target import Target
from tests import tiny

V, EOS = 6, 5
ROWS = 4096  # rows of one batch
PROMPTS = ([1, 2, 3], [2, 0, 1, 4, 3])  # of different lengths, so that the batch is ragged
LEVEL = 1e-6  # of one chi-square test: a suite of a hundred fails by chance once in 10,000 runs
POWER = 0.99


@functools.cache
def target(layers: int = 1) -> Target:
  """Six ids, one of them EOS, with laws that depend on the whole prefix."""
  cfg = tiny.config(vocab_size=V, eos_ids=(EOS,), num_layers=layers, max_position=64)
  values = tiny.tensors(cfg, 3)
  values["head"] = values["head"] * 0.5  # flat enough for many texts
  return tiny.make(cfg, values)


@functools.cache
def drafter() -> Drafter:
  """Another random transformer."""
  cfg = dataclasses.replace(target().config, num_layers=1)
  values = tiny.tensors(cfg, 8)
  own = {"embed": jnp.asarray(values["embed"]), "head": jnp.asarray(values["head"] * 0.6)}
  return drafters.wrap("small_lm", "other", drafters.small_lm(target(), values, cfg, own=own))


@functools.cache
def reader(kind: str) -> Drafter:
  """A drafter of this kind that reads a target of seven layers, with random weights."""
  rng = np.random.default_rng(4)
  options = dict(steps=2, num_taps=2, block_size=4, mask_id=0, rank=4)
  module = drafters.init_learned(kind, target(7), (6,), **options)
  tensors = {name: np.asarray(value) + 0.2 * rng.normal(size=value.shape).astype(np.float32)
             for name, value in module.own_tensors().items()}
  return drafters.wrap(kind, kind, drafters.build(
      kind, target(7), tensors, module.config, module.options()))


@functools.cache
def looked_up(learned_len: int = 0) -> Drafter:
  """Prompt lookup over the drafter of the other tests: both parts draft in most rounds."""
  return drafters.wrap("lookup", "lookup", Lookup(NGram(2, 1), drafter().module, learned_len))


def exact_law(prompt, count, transform, layers: int = 1) -> dict[tuple[int, ...], float]:
  """Probability of each sequence of `count` tokens, cut behind EOS.

  Args:
    transform: logits [V] float64 -> probabilities [V], written apart from the library's.
    layers: of the target.
  """
  texts = list(itertools.product(range(V), repeat=count - 1))
  ids = jnp.asarray([[*prompt, *text] for text in texts])
  logits = np.asarray(target(layers).module(ids, jnp.broadcast_to(
      jnp.arange(ids.shape[1]), ids.shape))[0], np.float64)[:, len(prompt) - 1:]
  law: dict[tuple[int, ...], float] = {}
  rows = dict(zip(texts, logits, strict=True))
  for text in itertools.product(range(V), repeat=count):
    chance, kept = 1.0, text
    for n, token in enumerate(text):
      # Sequences that share a prefix have the same row for its next token.
      chance *= transform(rows[(*text[:n], *[0] * (count - 1 - n))][n])[token]
      if token == EOS:
        kept = text[:n + 1]
        if any(text[n + 1:]):
          chance = 0.0  # counted once, for the text that goes on with zeros
        break
    if chance:
      law[kept] = law.get(kept, 0.0) + chance
  return law


def softmax(logits, heat=1.0):
  """Probabilities [V] at a temperature."""
  z = np.exp((logits - logits.max()) / heat)
  return z / z.sum()


def cut_top_p(p, mass):
  """The smallest set of most probable ids that reaches the mass, renormalised."""
  order = np.argsort(-p)
  kept = np.zeros_like(p)
  kept[order[:int(np.searchsorted(np.cumsum(p[order]), mass)) + 1]] = 1
  return p * kept / (p * kept).sum()


def counts(
    number, draft_len, budget, layers: int = 1, prompts=PROMPTS,
    **settings) -> list[dict[tuple[int, ...], int]]:
  """How often each text came out of the compiled loop, by prompt, `number` decodes or more each.

  The prompts have different lengths and share every batch in turn.
  """
  run = Run(target(layers), settings.pop("drafter", drafter()), prompts, draft_len=draft_len,
            max_new_tokens=budget, **settings)
  tallies: list[dict[tuple[int, ...], int]] = [{} for _ in prompts]
  longest = max(map(len, prompts))
  kinds = np.arange(ROWS) % len(prompts)
  padded = np.zeros((len(prompts), longest), np.int32)
  for row, prompt in zip(padded, prompts, strict=True):
    row[:len(prompt)] = prompt
  lengths = np.asarray([len(p) for p in prompts], np.int32)[kinds]
  for turn in range(-(-number * len(prompts) // ROWS)):
    state = decode.init_state(
        run.program, run.params, ROWS, longest + budget + draft_len + 1, budget)
    state = decode.insert(
        run.program, run.params, state, padded[kinds], lengths, np.full(ROWS, budget, np.int32),
        np.full(ROWS, run.temperatures[0], np.float32),
        np.arange(turn * ROWS, (turn + 1) * ROWS, dtype=np.int32), run.seed,
        np.arange(ROWS, dtype=np.int32))
    state = decode.chunk(run.program, run.params, state, jnp.int32(budget + 1),
                         jnp.int32(ROWS + 1), jnp.asarray(False))
    texts, ends = np.asarray(state.tokens).tolist(), np.asarray(state.length).tolist()
    for kind, text, start, end in zip(kinds.tolist(), texts, lengths.tolist(), ends, strict=True):
      key = tuple(text[start:end])
      tallies[kind][key] = tallies[kind].get(key, 0) + 1
  return tallies


def chi_square(tally, law, first: int) -> tuple[float, float]:
  """p-value of the counts of the first tokens against a law, and the smallest bias it would catch.

  Args:
    tally: counts by text.
    law: probabilities of texts of `first` tokens (fewer where EOS came).
    first: how many tokens of a text count.

  Returns:
    The p-value (0 for a text of probability 0), and the total variation distance that the test
    would have caught with probability POWER at LEVEL, whatever form the bias has.
  """
  seen: dict[tuple[int, ...], int] = {}
  for text, n in tally.items():
    key = text[:first]
    seen[key] = seen.get(key, 0) + n
  number = sum(seen.values())
  if any(law.get(text, 0.0) <= 0 for text in seen):
    return 0.0, 0.0
  cells = sorted(law, key=law.get, reverse=True)
  expected, observed = [], []
  rest = [0.0, 0]
  for cell in cells:
    if law[cell] * number >= 20:
      expected.append(law[cell] * number)
      observed.append(seen.get(cell, 0))
    else:  # small cells are pooled
      rest = [rest[0] + law[cell] * number, rest[1] + seen.get(cell, 0)]
  if rest[0] > 0:
    expected.append(rest[0])
    observed.append(rest[1])
  expected, observed = np.asarray(expected), np.asarray(observed)
  statistic, degrees = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
  return float(stats.chi2.sf(statistic, degrees)), detectable(number, degrees)


def detectable(number: int, degrees: int) -> float:
  """Total variation distance that is caught with probability POWER: a bias of that distance has a
  noncentrality of at least 4 N TV^2 (Cauchy-Schwarz)."""
  edge = stats.chi2.isf(LEVEL, degrees)
  missing = lambda shift: stats.ncx2.sf(edge, degrees, shift) - POWER
  return float(np.sqrt(optimize.brentq(missing, 1.0, 1e4) / (4 * number)))
