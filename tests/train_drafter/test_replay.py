"""Replay of known answers against real decoding, for every learned drafter."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import spec_jax
from spec_jax import drafters, records
from spec_jax import replay as arithmetic
from tests import tiny
from tests.drafters import test_dflash, test_eagle3
from train_drafter import replay
from train_drafter.batches import Document, Packer

NEW = 24
ENDS = dict(eos_ids=tuple(range(3, 9)), max_new_tokens=[NEW, 1, 9, NEW, 2] * 2)


@functools.cache
def pair(kind):
  """Target and drafter; the drafter guesses right now and then."""
  if kind == "small_lm":
    return tiny.target(), tiny.weak_drafter()
  if kind == "reduced":
    ids = np.random.default_rng(0).permutation(tiny.VOCAB)[:40].astype(np.int32)
    return tiny.target(), drafters.wrap(
        "small_lm", "r", drafters.init_from_target(tiny.target(), (0,), ids))
  if kind == "eagle3":
    return test_eagle3.target(), test_eagle3.drafter()
  return test_dflash.target(), drafters.wrap(kind, kind, test_dflash.build(kind, reduced=True))


def decoded(kind, draft_len, temperature, count, **options):
  target, drafter = pair(kind)
  prompts = [p for seed in range(-(-count // 48)) for p in test_dflash.prompts(48, seed=seed)]
  prompts = prompts[:count]
  options = {"rule": "ratio", "batch_size": 16, "max_new_tokens": NEW} | options
  out = spec_jax.generate(
      target, drafter, prompts, draft_len=draft_len, temperature=temperature, **options)
  return prompts, out


def estimated(kind, prompts, out, temperature, lengths):
  target, drafter = pair(kind)
  return replay.estimate(
      target, drafter, prompts, out.tokens, temperature=temperature, lengths=lengths)


@pytest.mark.parametrize("kind", ["small_lm", "eagle3", "dflash", "dspark"])
def test_greedy_replay_is_the_decoding_itself(kind):
  """One set of greedy answers gives the rounds of every K, prompt by prompt; some end at EOS."""
  target, drafter = pair(kind)
  lengths = {"dflash": (1, 3, 4), "dspark": (1, 3, 5)}.get(kind, (1, 3, 5, 7))
  prompts, out = decoded(kind, 2, 0.0, 10, **ENDS)
  assert len({len(t) for t in out.tokens}) > 3 and len(set(out.finish_reasons)) == 2
  found = estimated(kind, prompts, out, 0.0, lengths)
  for place, K in enumerate(lengths):
    real = decoded(kind, K, 0.0, 10, **ENDS)[1]
    assert real.tokens == out.tokens
    assert [r["rounds"][place] for r in found["rows"]] == [r.rounds for r in real.records]
    assert [r["tokens"] for r in found["rows"]] == [int(r.emitted.sum()) for r in real.records]
    np.testing.assert_allclose(
        found["survival"][place], np.nan_to_num(records.survival(real.records, K)), atol=1e-12)


@pytest.mark.parametrize("kind,draft_len,temperature", [
    ("small_lm", 3, 1.0), ("reduced", 5, 2.0), ("eagle3", 4, 1.5), ("dflash", 4, 2.0)])
def test_warm_replay_agrees_with_decoding(kind, draft_len, temperature):
  prompts, out = decoded(kind, draft_len, temperature, 144)
  found = estimated(kind, prompts, out, temperature, (1, draft_len))
  tokens = np.array([r["tokens"] for r in found["rows"]])
  rounds = np.array([r["rounds"][1] for r in found["rows"]])
  measured = np.array([r.rounds for r in out.records])
  low, high = arithmetic.difference_ci(tokens, measured, rounds)
  assert low <= 0 <= high, (low, high)
  assert measured.sum() < 0.95 * tokens.sum()  # there is something to agree about
  assert high - low < 0.15
  # The interval is narrow enough to refuse the estimate of another K.
  wrong = np.array([r["rounds"][0] for r in found["rows"]])
  low, high = arithmetic.difference_ci(tokens, measured, wrong)
  assert low > 0
  np.testing.assert_allclose(
      found["survival"][1], records.survival(out.records, draft_len), atol=0.05)


def test_the_chance_is_q_over_p_and_the_overlap_is_of_both():
  """A draft vocabulary of ids 3 and 1: the others have q = 0 and come from the target alone."""
  module = drafters.init_from_target(tiny.target(), (0,), np.array([3, 1], np.int32))
  p = np.zeros((4, tiny.VOCAB), np.float32)
  p[:, [1, 2, 3]] = 0.5, 0.2, 0.3
  q = np.tile(np.array([[0.9, 0.1]], np.float32), (4, 1))
  label = np.array([1, 2, 3, 0], np.int32)
  ids = module.draft_ids[...]
  accept, overlap = replay._ratio(*map(jnp.asarray, (p, q, label)), ids, module)
  np.testing.assert_allclose(accept[:3], [0.2, 0.0, 1.0], rtol=1e-6)
  np.testing.assert_allclose(overlap, [0.4] * 4, rtol=1e-6)


def test_tables_are_by_start_and_place():
  values = np.arange(8.0).reshape(4, 2) / 10
  np.testing.assert_array_equal(replay._table(values, 2, 0, "eagle3"), [
      [0.0, 0.3], [0.2, 0.5], [0.4, 0.7], [0.6, 0.0]])
  np.testing.assert_array_equal(replay._table(values, 1, 1, "dflash")[:, 0], values[:, 1])
  np.testing.assert_array_equal(replay._table(values, 2, 0, "small_lm"), [
      [0.0, 0.2], [0.2, 0.4], [0.4, 0.6], [0.6, 0.0]])
  assert replay._table(np.zeros((0, 1)), 3, 0, "small_lm").shape == (0, 3)


def test_which_lengths():
  assert replay.draft_lens(pair("small_lm")[1], 9) == tuple(range(1, 10))
  assert replay.draft_lens(pair("eagle3")[1], 5) == tuple(range(1, 8))
  assert replay.draft_lens(pair("dflash")[1], 4) == (1, 3, 4)
  assert replay.draft_lens(pair("dspark")[1], 2) == (1, 2, 3, 5)
  assert replay.draft_lens(pair("eagle3")[1], 4, longest=2) == (1, 2, 3, 4)
  assert replay.draft_lens(pair("dspark")[1], 2, longest=3) == (1, 2, 3)
  ngram = drafters.wrap("ngram", "n", drafters.parse_ngram("ngram"))
  assert replay.draft_lens(ngram, 5) == ()


def test_nothing_is_accepted_beyond_the_drafters_context():
  target = test_dflash.target()
  short = drafters.wrap(
      "dflash", "s", test_dflash.build("dflash", cfg=test_dflash.config(max_position=20)))
  prompts = test_dflash.prompts(8)
  out = spec_jax.generate(target, short, prompts, draft_len=4, max_new_tokens=20)
  found = replay.estimate(
      target, short, prompts, out.tokens, temperature=0.0, lengths=(4,))
  assert [r["rounds"][0] for r in found["rows"]] == [r.rounds for r in out.records]
  assert any(0 in r.proposed for r in out.records)


@pytest.mark.parametrize("kind", ["reduced", "eagle3"])
def test_a_validation_replays_the_answers_of_its_batches(kind):
  """Packed, from stored teacher states, warm and greedy answers in one batch: the same rounds as
  those of `estimate`; answers of unknown temperature and the padding count nothing."""
  target, drafter = pair(kind)
  rng = np.random.default_rng(0)
  texts = [rng.integers(3, tiny.VOCAB, n).tolist() for n in (9, 14, 11, 20, 17, 8)]
  heats, firsts = (1.0, 0.0, 1.0, 0.0, -1.0, 1.0), (2, 3, 5, 1, 2, 6)
  docs, at = [], drafter.module.taps
  for text, heat, first in zip(texts, heats, firsts, strict=True):
    out = target.module.hidden(
        jnp.asarray([text]), jnp.arange(len(text))[None], taps=at)
    hidden = np.asarray(out.hidden)[0, first:-1].astype(ml_dtypes.bfloat16)
    nothing = np.zeros(len(hidden))
    docs.append(Document(np.array(text, np.int32), first, hidden, nothing.astype(np.float32),
                         nothing.astype(np.int32), temperature=heat))
  batch, = Packer(docs, rows=2, seq_len=64, chunk=16, seed=0).in_order()
  arrays = {name: jnp.asarray(value) for name, value in batch.items()}
  arrays["features"] = target.module.hidden(
      arrays["tokens"], arrays["positions"], taps=at, segments=arrays["segments"]).features
  chances = np.asarray(replay.packed_chances(drafter.module, target.module, arrays, 3))
  known = jax.jit(lambda batch: drafter.module.train_states(
      batch, target.module, jax.random.key(1)))(arrays)
  np.testing.assert_allclose(chances, replay.packed_chances(
      drafter.module, target.module, arrays, 3, known), rtol=1e-5, atol=1e-6)
  sums = replay.packed_rounds(chances, batch, drafter.kind, 3)
  for name, heat in (("replay_tau", 1.0), ("replay_tau_T0", 0.0)):
    own = [i for i, h in enumerate(heats) if h == heat]
    split = [(texts[i][:firsts[i] + 1], texts[i][firsts[i] + 1:]) for i in own]
    found = replay.estimate(target, drafter, *zip(*split, strict=True), temperature=heat,
                            lengths=(3,))
    tokens, rounds = sums[name]
    assert tokens == sum(r["tokens"] for r in found["rows"])
    # bfloat16 teacher states move the chances a little.
    assert rounds == pytest.approx(sum(r["rounds"][0] for r in found["rows"]), rel=0.02)
    assert rounds < 0.98 * tokens or heat == 0
  assert len(sums) == 2
