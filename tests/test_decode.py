"""The compiled loop seen from inside: caches, finished rows, compilations, donation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax
from spec_jax import decode
from spec_jax.generate import Run
from tests import tiny

NEVER = jnp.int32(1 << 20)
ACCEPT = jnp.asarray(False)


def start(drafter, prompts, draft_len, max_new, **options):
  """A run and its batch with every prompt inserted."""
  run = Run(tiny.target(), drafter, prompts, draft_len=draft_len, max_new_tokens=max_new,
            batch_size=len(prompts), **options)
  capacity = 32 + max_new + draft_len + 1
  state = decode.init_state(run.program, run.params, len(prompts), capacity, max_new)
  state = run._fill(
      state, 32, {i: i for i in range(len(prompts))}, [-1] * len(prompts), len(prompts))
  return run, state


def rounds(run, state, count=1):
  return decode.chunk(run.program, run.params, state, jnp.int32(count), NEVER, ACCEPT)


def leaves(state):
  """Every array of a state by its path, random keys as their bits."""
  state = dataclasses.replace(state, keys=jax.random.key_data(state.keys))
  return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def snapshot(state):
  """A copy on the host; the state itself may be donated later."""
  return {path: np.array(leaf) for path, leaf in leaves(state).items()}


@pytest.fixture(scope="module")
def plain():
  prompts = tiny.prompts(3)
  return prompts, spec_jax.generate(tiny.target(), None, prompts, max_new_tokens=200).tokens


def prefill_cache(tokens, drafter=None):
  """The cache [1, ...] of one pass over the tokens [S], of the target or of a drafter."""
  S = tokens.shape[0]
  places = jnp.arange(S)[None]
  target = tiny.target().module
  if drafter is None:
    empty = decode.init_cache(tiny.config(), 1, S, jnp.float32)
    return target.hidden(tokens[None], places, empty).cache
  return drafter.observe(
      drafter.init_state(1, S), tokens[None], None, places, places >= 0, target)


@pytest.mark.parametrize("draft_len", range(1, 9))
def test_no_hole_after_full_acceptance(plain, draft_len):
  # CASE 6: the row of the last draft is never computed while drafting; the next round must do it.
  prompts, expected = plain
  run, state = start(tiny.self_drafter(), prompts, draft_len, 200)
  state = rounds(run, state, 1000)
  for b, prompt in enumerate(prompts):
    n = int(state.rounds[b])
    assert (np.asarray(state.accepted)[b, :n] == draft_len).all()
    assert np.asarray(state.tokens)[b, len(prompt):len(prompt) + 200].tolist() == expected[b]
    # Every committed token but the last has its keys, in the target's cache and in the drafter's.
    length = int(state.length[b]) - 1
    fresh = prefill_cache(state.tokens[b])
    # The last round may end before the drafter comes to its last K + 1 tokens.
    drafted = length - draft_len - 1
    for layer in range(2):
      for name in ("k", "v"):
        wanted = getattr(fresh, name)[layer][0][:, :length]
        ours = getattr(state.cache, name)[layer][b, :, :length]
        np.testing.assert_allclose(ours, wanted, atol=1e-4)
        ours = getattr(state.draft, name)[layer][b, :, :drafted]
        np.testing.assert_allclose(ours, wanted[:, :drafted], atol=1e-4)


@pytest.mark.parametrize("draft_len", [1, 4])
def test_the_drafter_cache_holds_in_every_round(draft_len):
  """Partial acceptance: what the drafter reads at the start of a round is what a prefill gives."""
  prompts = tiny.prompts(3, seed=2)
  run, state = start(tiny.weak_drafter(), prompts, draft_len, 24)
  for _ in range(8):
    state = rounds(run, state)
    for b in range(3):
      if int(state.reason[b]) != decode.RUNNING:
        continue
      # The two-wide first step of the next round computes length - 2 and length - 1 itself.
      n = int(state.length[b]) - 2
      fresh = prefill_cache(state.tokens[b], tiny.weak_drafter().module)
      ours, wanted = np.asarray(state.draft.k[0])[b], np.asarray(fresh.k[0])[0]
      np.testing.assert_allclose(ours[:, :n], wanted[:, :n], atol=1e-4)


def test_finished_rows_do_not_change():
  # CASE 8: a row with budget 1, one that ends soon, one that goes on.
  prompts = tiny.prompts(3)
  run, state = start(tiny.weak_drafter(), prompts, 4, 24)
  state = dataclasses.replace(state, budget=jnp.asarray([1, 6, 24], jnp.int32))
  state = dataclasses.replace(
      state, reason=jnp.where(state.budget <= 1, decode.LENGTH, state.reason))
  ended = {}
  watched = ("length", "reason", "rounds", "prompt", "budget", "proposed", "accepted", "emitted")
  for _ in range(24):
    now = {name.lstrip("."): value for name, value in snapshot(state).items()}
    for b in range(3):
      if now["reason"][b] == decode.RUNNING:
        continue
      length = now["length"][b]
      values = [now[name][b].tolist() for name in watched]
      values += [now["tokens"][b].tolist(),
                 now["logprobs"][b, :length - now["prompt"][b]].tolist()]
      assert ended.setdefault(b, values) == values
      assert (now["tokens"][b, length:] == tiny.PAD).all()
    state = rounds(run, state)
  assert set(ended) == {0, 1, 2}
  assert ended[0][2] == 0 and ended[0][0] == len(prompts[0]) + 1
  assert ended[1][0] == len(prompts[1]) + 6


def test_max_finished_hands_control_back():
  prompts = tiny.prompts(4)
  run, state = start(tiny.weak_drafter(), prompts, 4, 24)
  state = dataclasses.replace(state, budget=jnp.asarray([4, 24, 24, 12], jnp.int32))
  state = decode.chunk(run.program, run.params, state, NEVER, jnp.int32(1), ACCEPT)
  assert np.asarray(state.reason).tolist().count(decode.LENGTH) == 1
  state = decode.chunk(run.program, run.params, state, NEVER, jnp.int32(1), ACCEPT)
  assert np.asarray(state.reason).tolist().count(decode.LENGTH) == 2
  state = decode.chunk(run.program, run.params, state, NEVER, NEVER, ACCEPT)
  assert decode.RUNNING not in np.asarray(state.reason)


def test_max_rounds_bounds_a_chunk():
  run, state = start(tiny.weak_drafter(), tiny.prompts(4), 4, 24)
  for done in (1, 3):
    state = rounds(run, state, done - int(state.rounds.max()))
    assert int(state.rounds.max()) == done


def test_a_refilled_row_forgets_its_predecessor():
  """The second occupant of a place decodes as if it were the first."""
  prompts = tiny.prompts(2)
  long, short = prompts[0] * 2, prompts[1][:2]
  run, state = start(tiny.weak_drafter(), [long[:20]], 4, 24)
  state = rounds(run, state, 100)
  run, state = Run(
      tiny.target(), tiny.weak_drafter(), [short], draft_len=4, max_new_tokens=24,
      batch_size=1), state
  state = run._fill(state, 32, {0: 0}, [-1], 1)
  assert int(state.rounds[0]) == 0 and not np.asarray(state.accepted).any()
  state = rounds(run, state, 100)
  fresh, again = start(tiny.weak_drafter(), [short], 4, 24)
  again = rounds(fresh, again, 100)
  n = int(again.length[0])
  for name in ("length", "rounds", "accepted", "emitted", "proposed"):
    np.testing.assert_array_equal(getattr(state, name), getattr(again, name))
  np.testing.assert_array_equal(state.tokens[0, :n], again.tokens[0, :n])


def test_a_padded_insert_touches_no_row():
  run, state = start(None, tiny.prompts(2), 0, 8)
  before = snapshot(state)
  nowhere = np.full(2, 2, np.int32)
  ones = np.ones(2, np.int32)
  state = decode.insert(
      run.program, run.params, state, np.zeros((2, 32), np.int32), ones, ones,
      np.zeros(2, np.float32), ones, run.seed, nowhere)
  after = snapshot(state)
  for path, value in before.items():
    np.testing.assert_array_equal(value, after[path], err_msg=path)


def buffers(state):
  return {leaf.unsafe_buffer_pointer() for leaf in leaves(state).values() if leaf.size > 64}


@pytest.mark.parametrize("step", ["chunk", "insert"])
def test_buffers_are_donated(step):
  run, state = start(tiny.weak_drafter(), tiny.prompts(3), 4, 24)
  old, pointers = state, buffers(state)
  assert len(pointers) >= 6  # text, caches of both models
  if step == "chunk":
    state = rounds(run, state)
  else:
    state = run._fill(state, 32, {0: 0, 1: 1, 2: 2}, [-1] * 3, 3)
  assert old.tokens.is_deleted() and old.cache.k[0].is_deleted() and old.draft.k[0].is_deleted()
  # The large buffers are the same memory: nothing of the size of a cache is copied.
  assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.cache)} <= pointers
  # What is borrowed is never donated.
  assert not tiny.target().params["embed"][...].is_deleted()


def test_the_number_of_compilations_is_bounded():
  """Sixty prompts of every length up to 120: one compilation per bucket in use, two functions."""
  target = tiny.target()
  rng = np.random.default_rng(0)
  lengths = rng.permutation(np.arange(1, 121))[:60]
  prompts = [rng.integers(3, tiny.VOCAB, n).tolist() for n in lengths]
  options = dict(max_new_tokens=3, batch_size=2)
  used = len(Run(target, None, prompts, draft_len=0, **options).buckets())
  assert 1 < used <= 4
  before = decode.insert._cache_size(), decode.chunk._cache_size()
  first = spec_jax.generate(target, None, prompts, **options)
  after = decode.insert._cache_size(), decode.chunk._cache_size()
  assert [a - b for a, b in zip(after, before, strict=True)] == [used, used]
  # Other prompts, seeds and temperatures below the threshold compile nothing.
  again = spec_jax.generate(target, None, prompts[::-1], seed=9, temperature=1e-7, **options)
  assert (decode.insert._cache_size(), decode.chunk._cache_size()) == after
  assert again.tokens[::-1] == first.tokens


def test_temperatures_do_not_recompile():
  prompts = tiny.prompts(2)
  options = dict(max_new_tokens=3, batch_size=2)
  spec_jax.generate(tiny.target(), None, prompts, temperature=0.5, **options)
  before = decode.chunk._cache_size()
  for temperature in (0.7, 1.3, [0.0, 2.0]):
    spec_jax.generate(tiny.target(), None, prompts, temperature=temperature, **options)
  assert decode.chunk._cache_size() == before
