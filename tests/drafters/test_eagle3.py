"""EAGLE-3: taps, the cache under ragged acceptance, training against decoding, supervision."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax
from spec_jax import decode, drafters, sampling
from spec_jax.drafters import eagle3 as lib
from spec_jax.errors import UserError
from spec_jax.generate import Run
from spec_jax.models.decoder import linear
from spec_jax.types import Context
from tests import tiny

LAYERS, STEPS = 8, 4


@functools.cache
def target():
  cfg = tiny.config(num_layers=LAYERS)
  return tiny.make(cfg, tiny.tensors(cfg), tiny.tokenizer())


@functools.cache
def drafter(reduced=False):
  """Random weights in every tensor, so that a wrong one shows."""
  rng = np.random.default_rng(1)
  module = drafters.init_learned("eagle3", target(), (LAYERS - 1,), steps=STEPS)
  tensors = {name: np.asarray(value) + 0.2 * rng.normal(size=value.shape).astype(np.float32)
             for name, value in module.own_tensors().items()}
  ids = np.arange(0, tiny.VOCAB, 2).astype(np.int32) if reduced else None
  return drafters.wrap("eagle3", "e", drafters.build(
      "eagle3", target(), tensors, module.config, module.options(), draft_ids=ids))


def test_taps():
  assert lib.eagle3_taps(30) == (1, 14, 26) and lib.eagle3_taps(8) == (1, 3, 4)
  assert lib.eagle3_taps(7) == (1, 2, 3)
  for shallow in (1, 6):
    with pytest.raises(UserError, match=f"needs 7 layers; this one has {shallow}"):
      lib.eagle3_taps(shallow)


def features_of(tokens):
  """Features [1, T, F] of a text."""
  ids = jnp.asarray([tokens])
  return target().module.hidden(
      ids, jnp.arange(len(tokens))[None], taps=drafter().module.taps).features


def reference(tokens, drafted):
  """Logits of the first draft and those behind each of `drafted`, input by input from the
  definition: no cache, the whole sequence of inputs each time."""
  module, t = drafter().module, target().module
  fused = list(linear(features_of(tokens[:-1])[0], module.fc[...]))
  text = list(tokens)
  out = []
  for token in [None, *drafted]:
    if token is not None:
      text.append(token)
      fused.append(hidden[-1])
    x = jnp.stack(fused)[None]
    at = jnp.arange(len(fused))[None]
    q, k, v = module._project(t.embed[...][jnp.asarray([text[1:]])], x, at)
    scores = jnp.einsum("btghd,bsgd->bghts", q.reshape(
        1, len(fused), 2, 2, 8), k) * 8**-0.5
    causal = jnp.tril(jnp.ones((len(fused),) * 2, bool))
    p = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), -1)
    mixed = jnp.einsum("bghts,bsgd->btghd", p, v).reshape(1, len(fused), 4, 8)
    hidden = module._finish(x, mixed)[0]
    out.append(module.logits(module._normed(hidden[-1:]), t)[0])
  return out


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_those_of_the_definition(temperature):
  tokens = [5, 9, 33, 12, 40, 7, 21]
  module, t, K = drafter().module, target().module, 4
  P = len(tokens) - 1
  state = module.init_state(1, 32)
  state = module.observe(
      state, jnp.asarray([tokens[:-1]]), features_of(tokens[:-1]), jnp.arange(P)[None],
      jnp.ones((1, P), bool), t)
  padded = jnp.asarray([tokens + [0] * (32 - len(tokens))])
  keys = sampling.round_keys(sampling.row_keys(3, jnp.asarray([0])), jnp.asarray([len(tokens)]))
  where = Context(padded, jnp.asarray([len(tokens)]), keys, jnp.full(1, temperature))
  proposal, _ = module.propose(state, where, K, sampling.Sampling(temperature == 0), t)
  drafted = np.asarray(proposal.tokens)[0].tolist()
  for j, logits in enumerate(reference(tokens, drafted[:-1])):
    if temperature:
      np.testing.assert_allclose(proposal.probs[0, j], jax.nn.softmax(logits), atol=1e-5)
    else:
      assert drafted[j] == int(jnp.argmax(logits))


@pytest.mark.parametrize("draft_len", [1, 3, 6])
@pytest.mark.parametrize("reduced", [False, True])
def test_greedy_text_is_the_targets(draft_len, reduced):
  prompts = tiny.prompts(7)
  options = dict(max_new_tokens=20, batch_size=3)
  plain = spec_jax.generate(target(), None, prompts, **options)
  out = spec_jax.generate(target(), drafter(reduced), prompts, draft_len=draft_len, **options)
  assert out.tokens == plain.tokens


def close(ours, theirs):
  """To 1e-5 of the largest: what float32 sums of such values can keep."""
  np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(jnp.abs(theirs).max()))


@pytest.mark.parametrize("skipped", [False, True])
def test_the_cache_is_that_of_the_committed_text(skipped):
  """CASE 7: after every round, also where the drafter's own turn was skipped."""
  prompts, K = [[5, 9, 33], [7], [11, 12, 13, 14, 15, 16, 17]], 3
  answers = spec_jax.generate(target(), None, prompts, max_new_tokens=16).tokens
  known = tiny.scripted(prompts, answers, [0, 2, K])
  module, t = drafter().module, target().module

  class Both(tiny.Scripted):
    """Proposes by the script and keeps the state of the drafter that is looked at."""
    taps = module.taps

    def __init__(self):
      inner = known.module
      self.table, self.right = inner.table, inner.right
      self.inner = module

    def init_state(self, *args):
      return self.inner.init_state(*args)

    def insert(self, *args):
      return self.inner.insert(*args)

    def observe(self, *args):
      return self.inner.observe(*args)

    def after_round(self, *args):
      return self.inner.after_round(*args)

    def propose(self, state, context, draft_len, settings, target):
      args = (state, context, draft_len)
      moved = self.inner.catch_up(*args, target) if skipped else self.inner.propose(
          *args, settings, target)[1]
      return super().propose(*args, settings, target)[0], moved

  run = Run(target(), drafters.wrap("ngram", "both", Both()), prompts, draft_len=K,
            max_new_tokens=16, batch_size=3)
  P, S = 8, 32
  state = decode.init_state(run.program, run.params, 3, S, 16)
  tokens = np.zeros((3, P), np.int32)
  for row, ids in zip(tokens, prompts, strict=True):
    row[:len(ids)] = ids
  ints = lambda *x: np.asarray(x, np.int32)
  state = decode.insert(
      run.program, run.params, state, tokens, ints(*map(len, prompts)), ints(16, 16, 16),
      np.zeros(3, np.float32), ints(0, 1, 2), run.seed, ints(0, 1, 2))
  accepted = []
  for _ in range(4):
    before = np.asarray(state.length)
    state = decode.chunk(run.program, run.params, state, jnp.int32(1), jnp.int32(9),
                         jnp.asarray(False))
    accepted.append(np.asarray(state.accepted)[:, len(accepted)])
    for b in range(3):
      length = int(state.length[b])
      text = np.asarray(state.tokens)[b, :length]
      known_inputs = before[b] - 1  # of the tokens that were committed when the round began
      fresh = module.init_state(1, S)
      fresh = module.observe(
          fresh, jnp.asarray(text[None, :-1]), features_of(text[:-1]),
          jnp.arange(length - 1)[None], None, t)
      for name in ("k", "v"):
        close(getattr(state.draft, name)[b, :, :known_inputs],
              getattr(fresh, name)[0, :, :known_inputs])
      close(state.draft.fused[b, :length - 1], fresh.fused[0, :length - 1])
  assert [set(column) for column in np.transpose(accepted)] == [{0}, {2}, {K}]


def batch_of(tokens, segments, prompt_lens, features=None):
  """One row of documents as the packer lays it out."""
  T = len(tokens)
  segments = np.asarray(segments)
  positions, place = np.zeros(T, np.int32), []
  teacher = np.full((1, T), -1, np.int32)
  for s, p in enumerate(prompt_lens):
    at = np.nonzero(segments == s)[0]
    positions[at] = np.arange(len(at))
    for i in at[p - 1:-1]:
      teacher[0, i] = len(place)
      place.append(i)
  if features is None:
    features = np.random.default_rng(0).normal(size=(1, T, 3 * 32)).astype(np.float32)
  return {"tokens": jnp.asarray([tokens]), "positions": jnp.asarray(positions[None]),
          "segments": jnp.asarray(segments[None]), "place": jnp.asarray(place),
          "weight": jnp.ones(len(place)), "teacher": jnp.asarray(teacher),
          "features": jnp.asarray(features)}


def test_what_is_supervised():
  """CASE 18: labels at 4, 5 and 6 from the inputs 2, 3 and 4, moved left by one with every step."""
  batch = batch_of([11, 12, 13, 21, 22, 23, 2], [0] * 7, [3])
  states = drafter().module.train_states(batch, target().module, jax.random.key(0))
  assert batch["place"].tolist() == [2, 3, 4, 5] and states.source.tolist() == [0, 1, 2, 3]
  # The first answered token is never drafted; of the last step only inputs >= 0 remain.
  weights = np.asarray(states.weight)
  np.testing.assert_allclose(weights[0], 0)
  np.testing.assert_allclose(weights[1], [1, 0.8, 0.64, 0], atol=1e-6)
  np.testing.assert_allclose(weights[2:], [[1, 0.8, 0.64, 0.512]] * 2, atol=1e-6)
  # By gradients: step 0 of the state behind input i depends on the features of i and before.
  def at(features, n, j):
    return jnp.sum(drafter().module.train_states(
        batch | {"features": features}, target().module, jax.random.key(0)).hidden[n, j])
  for n, j, last in [(1, 0, 2), (3, 0, 4), (3, 1, 3), (2, 2, 1)]:
    grad = np.abs(jax.grad(at)(batch["features"], n, j))[0].sum(-1)
    assert (grad[:last + 1] > 0).all() and (grad[last + 1:] == 0).all(), (n, j)


def test_documents_do_not_see_each_other():
  """CASE 27."""
  tokens = [11, 12, 13, 21, 22, 23, 31, 32, 33, 41, 42, 43]
  segments = [0] * 6 + [1] * 6
  batch = batch_of(tokens, segments, [2, 3])
  states = drafter().module.train_states(batch, target().module, jax.random.key(0))
  second = np.asarray(batch["place"]) >= 6
  changed = dict(batch, tokens=batch["tokens"].at[0, :6].set(50),
                 features=batch["features"].at[0, :6].set(9.0))
  other = drafter().module.train_states(changed, target().module, jax.random.key(0))
  used = np.asarray(states.weight) > 0
  np.testing.assert_allclose(np.asarray(other.hidden)[second & used.any(1)][:, 0],
                             np.asarray(states.hidden)[second & used.any(1)][:, 0], atol=1e-6)
  hidden = np.where(used[..., None], states.hidden, 0)[second]
  np.testing.assert_allclose(np.where(used[..., None], other.hidden, 0)[second], hidden, atol=1e-6)
  # The first draftable token of the second document is its second answered one, from its own input.
  assert used[second].any(1).tolist() == [False, True, True]
  assert used[second][1].tolist() == [True, True, True, False]


def test_training_is_decoding():
  """The states of the training-time test are those that decoding goes through, step by step."""
  tokens = [5, 9, 33, 12, 40, 7, 21, 60, 3, 18]
  batch = batch_of(tokens, [0] * len(tokens), [3], features_of(tokens))
  states = drafter().module.train_states(batch, target().module, jax.random.key(0))
  module = drafter().module
  for anchor in (4, 5):  # decoding from the text up to here, the drafts being the true tokens
    wanted = reference(tokens[:anchor + 1], tokens[anchor + 1:anchor + STEPS])
    for j in range(STEPS):
      n = anchor + j - 2  # the row of the position whose next token this step predicts
      if n < len(states.source):
        assert int(batch["place"][n]) == anchor + j
        found = module.logits(states.hidden[n, j], target().module)
        close(found, wanted[j])


def test_save_and_load(tmp_path):
  drafters.save_drafter(tmp_path / "d", drafter(True).module, target())
  again = drafters.load_drafter(str(tmp_path / "d"), target())
  assert again.kind == "eagle3" and again.module.options() == drafter().module.options()
  prompts = tiny.prompts(4)
  ours, theirs = (spec_jax.generate(
      target(), d, prompts, temperature=1.0, max_new_tokens=12, batch_size=4)
      for d in (drafter(True), again))
  assert ours.tokens == theirs.tokens
  assert [r.accepted.tolist() for r in ours.records] == [
      r.accepted.tolist() for r in theirs.records]


def test_a_target_it_does_not_fit_is_refused():
  with pytest.raises(UserError, match="needs 7 layers; this one has 2"):
    drafters.init_learned("eagle3", tiny.target(), (1,))
  with pytest.raises(UserError, match=r"must name layers 0..7"):
    drafters.init_learned("eagle3", target(), (8,))
  module = drafter().module
  with pytest.raises(UserError, match=r"taps=\(1, 3, 4\): the target has 2 layers"):
    drafters.build("eagle3", tiny.target(), module.own_tensors(), module.config, module.options())
  wide = dataclasses.replace(module.config, hidden_size=48)
  with pytest.raises(UserError, match="hidden_size=48 differs from the target's 32"):
    drafters.build("eagle3", target(), module.own_tensors(), wide, module.options())
