"""Prompt lookup over a learned drafter: the part that drafts, a state without holes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax
from spec_jax import drafters, sampling
from spec_jax.drafters.lookup import Lookup, LookupState
from spec_jax.errors import UserError
from spec_jax.types import Context
from tests import tiny
from tests.drafters import test_eagle3

LOOPS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 10, 9, 10, 9], [20, 21, 22, 23], [31]]


def over(learned, sizes="2-2"):
  """The composition with a drafter in memory."""
  ngram, learned_len = drafters.parse_lookup(sizes)
  return drafters.wrap("lookup", "lookup", Lookup(ngram, learned.module, learned_len))


def context(rows, temperature):
  size = 32
  tokens = np.zeros((len(rows), size), np.int32)
  for line, row in zip(tokens, rows, strict=True):
    line[:len(row)] = row
  lengths = jnp.asarray([len(r) for r in rows])
  keys = sampling.round_keys(sampling.row_keys(3, jnp.arange(len(rows))), lengths)
  return Context(jnp.asarray(tokens), lengths, keys, jnp.full(len(rows), temperature))


def proposal(drafter, rows, temperature=0.0, draft_len=3):
  """One proposal behind a prefill of all but the last token."""
  module, target = drafter.module, tiny.target().module
  where = context(rows, temperature)
  P = max(map(len, rows))
  places = jnp.broadcast_to(jnp.arange(P), (len(rows), P))

  @jax.jit
  def run(where):
    state = module.init_state(len(rows), 40)
    state = module.observe(state, where.tokens[:, :P], None, places, places >= 0, target)
    return module.propose(state, where, draft_len, sampling.Sampling(temperature == 0), target)

  return run(where)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_row_has_the_part_that_its_own_text_asks_for(temperature):
  learned = tiny.weak_drafter()
  found, state = proposal(over(learned), LOOPS, temperature)
  ngram = proposal(drafters.load_drafter("ngram:2-2", tiny.target()), LOOPS)[0].tokens
  own = proposal(learned, LOOPS, temperature)[0]
  np.testing.assert_array_equal(found.tokens[:2], ngram[:2])
  np.testing.assert_array_equal(found.tokens[2:], own.tokens[2:])
  assert bool(state.foreign)
  assert not bool(proposal(over(learned), LOOPS[2:], temperature)[1].foreign)
  if temperature:
    np.testing.assert_array_equal(found.probs[:2], jax.nn.one_hot(ngram[:2], tiny.VOCAB))
    np.testing.assert_array_equal(found.probs[2:], own.probs[2:])
  # A batch whose rows all match does without the learned part; nothing else changes.
  alone, state = proposal(over(learned), LOOPS[:2], temperature)
  np.testing.assert_array_equal(alone.tokens, found.tokens[:2])
  assert bool(state.foreign)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_behind_its_drafts_the_learned_part_leaves_the_block_to_the_lookup(temperature):
  learned, K, L = tiny.weak_drafter(), 5, 2
  found, state = proposal(over(learned, "2-2+2"), LOOPS, temperature, K)
  whole = proposal(over(learned), LOOPS, temperature, K)[0]
  np.testing.assert_array_equal(found.tokens[:2], whole.tokens[:2])  # looked up as before
  own = proposal(learned, LOOPS, temperature, L)[0]
  np.testing.assert_array_equal(found.tokens[2:, :L], own.tokens[2:])
  for row, line in zip(LOOPS[2:], np.asarray(found.tokens)[2:], strict=True):
    text = [*row, *line[:L].tolist()]
    rest = proposal(drafters.load_drafter("ngram:2-1", tiny.target()), [text], 0.0, K - L)[0].tokens
    np.testing.assert_array_equal(line[L:], rest[0])
  assert bool(state.foreign)  # what is verified behind its drafts has no keys of its own
  if temperature:
    np.testing.assert_array_equal(found.probs[2:, :L], own.probs[2:])
    np.testing.assert_array_equal(
        found.probs[2:, L:], jax.nn.one_hot(found.tokens[2:, L:], tiny.VOCAB))


@pytest.mark.parametrize("K", [1, 3])
def test_a_learned_part_as_long_as_the_block_is_all_of_it(K):
  learned = tiny.weak_drafter()
  whole, state = proposal(over(learned), LOOPS[1:3], 1.0, K)
  for more in (0, 4):
    found, other = proposal(over(learned, f"2-2+{K + more}"), LOOPS[1:3], 1.0, K)
    np.testing.assert_array_equal(found.tokens, whole.tokens)
    np.testing.assert_array_equal(found.probs, whole.probs)
    assert bool(other.foreign) == bool(state.foreign)
  assert not bool(proposal(over(learned, f"2-2+{K}"), LOOPS[2:], 1.0, K)[1].foreign)


@pytest.mark.parametrize("kind, sizes", [
    ("small_lm", "2-1"), ("eagle3", "2-1"), ("small_lm", "2-2+1"), ("eagle3", "2-2+2")])
def test_other_drafts_and_skipped_turns_leave_no_hole(kind, sizes, monkeypatch):
  """CASES 6 and 7: one row at a time the learned part is skipped whenever there is a match; in a
  batch it rarely is. Both accept what a learned part accepts that reads its whole text anew."""
  target = tiny.target() if kind == "small_lm" else test_eagle3.target()
  learned = tiny.weak_drafter() if kind == "small_lm" else test_eagle3.drafter()
  prompts = [*LOOPS, *tiny.prompts(4, seed=5)]
  options = dict(draft_len=4, max_new_tokens=40)
  decode = lambda prompts: spec_jax.generate(
      target, over(learned, sizes), prompts, batch_size=len(prompts), **options)
  together, alone = decode(prompts), [decode([p]) for p in prompts]
  plain = spec_jax.generate(target, None, prompts, batch_size=8, max_new_tokens=40)
  assert together.tokens == plain.tokens == [out.tokens[0] for out in alone]
  # The reference absorbs every committed token before every proposal, whoever drafted it.
  always = Lookup.propose
  monkeypatch.setattr(Lookup, "propose", lambda self, state, *args: always(
      self, LookupState(state.learned, jnp.asarray(True)), *args))
  monkeypatch.setattr(jnp, "all", lambda x: jnp.zeros((), bool))
  anew = decode(prompts)
  monkeypatch.undo()
  accepted = [r.accepted.tolist() for r in anew.records]
  assert [r.accepted.tolist() for r in together.records] == accepted
  assert [out.records[0].accepted.tolist() for out in alone] == accepted


def test_by_name(tmp_path):
  module = drafters.init_from_target(tiny.target(), (0,))
  drafters.save_drafter(tmp_path / "d", module, tiny.target())
  made = drafters.load_drafter(f"lookup:{tmp_path / 'd'}", tiny.target()).module
  assert (made.ngram.n_max, made.ngram.n_min) == (3, 2) and made.learned.kind == "small_lm"
  made = drafters.load_drafter("lookup:5-3:self", tiny.target()).module
  assert (made.ngram.n_max, made.ngram.n_min, made.learned_len) == (5, 3, 0)
  made = drafters.load_drafter("lookup:5-3+2:self", tiny.target()).module
  assert (made.ngram.n_max, made.ngram.n_min, made.learned_len) == (5, 3, 2)
  for bad, said in [("lookup:", "write lookup:SOURCE"), ("lookup:ngram", "write lookup:SOURCE"),
                    ("lookup:3-2:", "write lookup:SOURCE"), ("lookup:2-3:self", "1 <= MIN <= MAX"),
                    ("lookup:3-2+0:self", "DRAFTS >= 1"),
                    ("lookup:no/such", "no such folder")]:
    with pytest.raises(UserError, match=said):
      drafters.load_drafter(bad, tiny.target())
