"""The train stage: what is supervised, what a step sees and changes, and how data is prepared."""

import dataclasses
import math
import re
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from spec_jax.drafters.head import LearnedDrafter
from spec_jax.drafters.small_lm import SmallLM
from spec_jax.errors import UserError
from spec_jax.models.decoder import Decoder
from spec_jax.target import from_module
from tests import tiny
from tests.train_drafter.training import (
  EOS,
  assert_same,
  bits,
  copied,
  document,
  documents,
  head_of,
  make_config,
  module_of,
  pack,
)
from train_drafter import documents as documents_lib
from train_drafter import train
from train_drafter.generate import Answer
from train_drafter.store import StoredDocument


@pytest.fixture(scope="module")
def stepper():
  """Setup, a maker of fresh states, batches and the target of the tests of a single step."""
  cfg, target = make_config(), tiny.target()
  setup, _ = train.make_setup(cfg, target, module_of(), 20)
  fresh = lambda: train.make_setup(cfg, target, module_of(), 20)[1]
  return types.SimpleNamespace(
      cfg=cfg, target=target, setup=setup, fresh=fresh, packer=pack(documents(), cfg),
      step=lambda state, batch: train.train_step(
          setup, state, setup.frozen, target.params, batch))


# What is supervised: a module whose parameters are the states themselves shows the gradient of the
# loss position by position.


class States(LearnedDrafter):
  """A student whose hidden state at every place of a batch is a parameter."""

  train_states = SmallLM.train_states

  def __init__(self, value, config):
    self.value = nnx.Param(jnp.asarray(value))
    self.set_head(config, None, None)

  def train_hidden(self, tokens, positions, segments, target):
    return self.value[...]


def places_gradient(batch, cfg, target):
  """Sums of a batch and the gradient [rows, T, D] with respect to the student's states."""
  rows, T = batch["tokens"].shape
  value = np.random.default_rng(1).normal(size=(rows, T, target.config.hidden_size))
  setup, state = train.make_setup(cfg, target, States(value.astype(np.float32), target.config), 1)

  @jax.jit
  def grads(params, batch):
    def loss(params):
      sums = train.batch_sums(setup, params, setup.frozen, target.params, batch)
      return sums["loss"], sums
    return jax.grad(loss, has_aux=True)(params)

  grad, sums = grads(state.params, batch)
  return sums, np.asarray(jax.tree.leaves(grad)[0]), value


def test_each_supervised_place_learns_from_its_own_teacher_row():
  """CASE 18 for a plain LM, 31 and 27: P P P A A A EOS supervises 2...5, the EOS among them."""
  cfg, target = make_config(), tiny.target()
  head, rng = head_of(target), np.random.default_rng(0)
  docs = [document([11, 12, 13, 21, 22, 23, EOS], 2, head, rng),
          document([31, 32, 33, 34, EOS], 1, head, rng)]
  assert docs[0].supervised == 4  # of positions 2, 3, 4 and 5: what comes behind each is answered
  batch = pack(docs, cfg).in_order()[0]
  _, grad, value = places_gradient(batch, cfg, target)
  expected = np.zeros_like(value)
  softmax = lambda z: np.exp(z) / np.exp(z).sum(-1, keepdims=True)
  for start, d in ((0, docs[0]), (7, docs[1])):
    at = start + d.first + np.arange(d.supervised)
    q, p = (softmax(x.astype(np.float32) @ head.T) for x in (value[0, at], d.hidden))
    expected[0, at] = (q - p) @ head
  moved = np.argwhere(np.abs(grad).max(-1) > 0)
  assert moved.tolist() == [[0, 2], [0, 3], [0, 4], [0, 5], [0, 8], [0, 9], [0, 10]]
  np.testing.assert_allclose(grad, expected, atol=1e-4)


@pytest.mark.parametrize("heat", [1.0, 0.5])
def test_sums_are_those_of_the_definitions(heat):
  """At another temperature both sides are divided: that is how the drafter will decode."""
  cfg, target = make_config(teacher_temperature=heat), tiny.target()
  teacher = lambda d: d.hidden.astype(np.float64) @ head_of(target).T / heat
  docs = [dataclasses.replace(d, logsumexp=np.log(np.exp(teacher(d)).sum(-1)).astype(np.float32))
          for d in documents(2, seed=3, longest=15)]
  batch = pack(docs, cfg).in_order()[0]
  sums, _, value = places_gradient(batch, cfg, target)
  head = head_of(target).astype(np.float64)
  loss = alpha = match = 0.0
  flat = value.reshape(-1, value.shape[-1]).astype(np.float32).astype(np.float64)
  at = iter(batch["place"].tolist())
  for d in docs:
    for row, best in zip(d.hidden.astype(np.float64), d.best, strict=True):
      p, z = (np.exp(h @ head.T / heat) for h in (row, flat[next(at)]))
      p, q = p / p.sum(), z / z.sum()
      loss, alpha = loss + np.sum(p * np.log(p / q)), alpha + np.minimum(p, q).sum()
      match += q.argmax() == best
  count = sum(d.supervised for d in docs)
  np.testing.assert_allclose(sums["loss"], loss, rtol=1e-4)
  np.testing.assert_allclose(sums["alpha"], [alpha], rtol=1e-4)
  assert float(sums["greedy_match"][0]) == match and float(sums["count"][0]) == count
  assert float(sums["weight"]) == count


def test_ids_that_do_not_exist_take_no_part():
  """A padded vocabulary: the ids >= vocab_real are out on both sides, as in decoding."""
  config = tiny.config(vocab_real=50)
  values = tiny.tensors(config)
  values["head"][50:] *= 20  # were they scored, they would carry all of the mass
  target = tiny.make(config, values)
  cfg = make_config()
  head, rng = head_of(target), np.random.default_rng(0)
  d = document(np.arange(3, 12), 3, head[:50], rng)
  sums, grad, value = places_gradient(pack([d], cfg).in_order()[0], cfg, target)
  rows = value[0, 3:8].astype(np.float32)
  p, q = (np.exp(h.astype(np.float32) @ head[:50].T) for h in (d.hidden, rows))
  p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
  np.testing.assert_allclose(sums["loss"], np.sum(p * np.log(p / q)), rtol=1e-4)
  np.testing.assert_allclose(sums["alpha"], [np.minimum(p, q).sum()], rtol=1e-4)
  np.testing.assert_allclose(grad[0, 3:8], (q - p) @ head[:50], atol=1e-4)
  assert float(sums["greedy_match"][0]) == np.sum(q.argmax(-1) == d.best)


def test_padding_changes_neither_loss_nor_gradient():
  """CASE 22: the same documents in buffers of other sizes."""
  cfg, target = make_config(chunk=4), tiny.target()
  rng = np.random.default_rng(2)
  docs = [document(rng.integers(3, 60, 8), 2, head_of(target), rng)]

  def step(rows, seq_len, chunk):
    own = make_config(chunk=chunk, lr=0.0)
    setup, state = train.make_setup(own, target, module_of(), 20)
    batch = pack(docs, own, rows=rows, seq_len=seq_len).in_order()[0]
    mean = lambda params, batch: (lambda s: s["loss"] / s["weight"])(
        train.batch_sums(setup, params, setup.frozen, target.params, batch))
    return jax.jit(jax.value_and_grad(mean))(state.params, batch)

  (loss, grad), (loss2, grad2) = step(1, 8, cfg.train.chunk), step(3, 64, 32)
  np.testing.assert_allclose(loss, loss2, rtol=1e-5)
  for a, b in zip(bits(grad), bits(grad2), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_documents_of_a_row_do_not_see_each_other():
  """CASE 27: neither the text before a document nor a copy of it changes its states."""
  cfg, target = make_config(), tiny.target()
  rng = np.random.default_rng(4)
  head, module = head_of(target), module_of()
  second = document(rng.integers(3, 60, 12), 2, head, rng)
  states = jax.jit(lambda b: module.train_hidden(
      b["tokens"], b["positions"], b["segments"], target.module))

  def second_states(first):
    batch = pack([first, second], cfg).in_order()[0]
    assert batch["segments"][0, [0, 12, 24]].tolist() == [0, 1, -1]
    return np.asarray(states({k: batch[k] for k in ("tokens", "positions", "segments")}))[0, :24]

  random = lambda: document(rng.integers(3, 60, 12), 2, head, rng)
  a, b, copy = second_states(random()), second_states(random()), second_states(second)
  assert np.abs(a[:12] - b[:12]).max() > 0.1
  np.testing.assert_array_equal(a[12:], b[12:])
  np.testing.assert_allclose(copy[12:], copy[:12], atol=1e-5)
  np.testing.assert_allclose(copy[12:], a[12:], atol=1e-5)


# The memory of the logits (CASE 28).


def largest_over_vocabulary(text, vocab):
  """Elements of the largest array of a compiled program with an axis of `vocab`."""
  largest = 0
  for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text):
    shape = [int(n) for n in dims.split(",")]
    if vocab in shape:
      largest = max(largest, math.prod(shape))
  return largest


def test_no_array_holds_the_logits_of_all_positions():
  vocab, chunk = 1536, 16
  config = tiny.config(vocab_size=vocab, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1,
                       head_dim=4, intermediate_size=8)
  target = tiny.make(config, tiny.tensors(config))
  rng = np.random.default_rng(0)
  docs = [document(rng.integers(3, 60, 32), 1, head_of(target), rng) for _ in range(8)]

  def compiled(chunk):
    cfg = make_config(batch_rows=8, chunk=chunk)
    setup, state = train.make_setup(cfg, target, module_of(target), 20)
    batch = pack(docs, cfg).batch(0)
    assert batch["place"].size >= 240
    leaves, tree = jax.tree.flatten(state)
    step = jax.jit(lambda leaves, batch: train.train_step(
        setup, jax.tree.unflatten(tree, leaves), setup.frozen, target.params, batch))
    return step.lower(leaves, batch).compile(), batch["place"].size

  program, positions = compiled(chunk)
  assert largest_over_vocabulary(program.as_text(), vocab) == chunk * vocab
  memory = program.memory_analysis()
  if memory is not None:
    assert memory.temp_size_in_bytes < positions * vocab * 4
  whole, positions = compiled(256)  # this test would notice
  assert largest_over_vocabulary(whole.as_text(), vocab) >= positions * vocab


# What a step changes.


def test_a_batch_with_nothing_to_learn_changes_nothing(stepper):
  """CASE 23, second half."""
  batch = stepper.packer.batch(0)
  empty = batch | {"weight": np.zeros_like(batch["weight"])}
  state, _ = stepper.step(stepper.fresh(), batch)
  state, _ = stepper.step(state, batch)
  before = copied(state)
  state, sums = stepper.step(state, empty)
  assert_same(state, before)
  assert float(sums["weight"]) == 0 and np.isfinite(float(sums["grad_norm"]))


def test_a_step_that_is_not_finite_changes_no_parameter_and_counts(stepper):
  good = stepper.packer.batch(0)
  hidden = good["hidden"].copy()
  hidden[3, 0] = np.nan
  bad = good | {"hidden": hidden}
  state, _ = stepper.step(stepper.fresh(), good)
  state, _ = stepper.step(state, good)
  before = copied((state.params, state.opt_state))
  for n in (1, 2):
    state, sums = stepper.step(state, bad)
    assert not np.isfinite(float(sums["loss"]))
    assert (int(sums["bad"]), int(sums["skipped"])) == (n, n)
    assert (int(state.bad), int(state.skipped)) == (n, n)
    assert int(state.step) == 2 + n  # the batch is consumed: the next one is another
    assert_same((state.params, state.opt_state), before)
  state, sums = stepper.step(state, good)
  assert (int(sums["bad"]), int(sums["skipped"]), int(state.step)) == (0, 2, 5)
  assert any(np.any(a != b) for a, b in zip(bits(state.params), before, strict=False))


def test_a_gradient_that_is_not_finite_is_no_better(stepper):
  """The loss is fine and the gradient of what multiplies a huge activation by zero is not."""
  scale = {"w_up": 1e25, "w_down": 0.0}
  state = stepper.fresh()
  params = jax.tree_util.tree_map_with_path(
      lambda path, x: x * next((v for k, v in scale.items() if k in str(path)), 1.0), state.params)
  before = copied(params)
  batch = stepper.packer.batch(0)
  state, _ = stepper.step(dataclasses.replace(state, params=params), batch)
  state, sums = stepper.step(state, batch)  # the first one has a learning rate of zero
  assert np.isfinite(float(sums["loss"])) and not np.isfinite(float(sums["grad_norm"]))
  assert_same(state.params, before)
  assert (int(state.bad), int(state.skipped)) == (2, 2)


def test_only_matrices_decay():
  cfg = make_config(weight_decay=0.1, warmup=0.0)
  setup, state = train.make_setup(cfg, tiny.target(), module_of(), 20)
  zero = jax.tree.map(jnp.zeros_like, state.params)
  opt_state = setup.optimizer.update(zero, state.opt_state, state.params)[1]  # past warm-up
  updates, _ = setup.optimizer.update(zero, opt_state, state.params)
  lr = float(setup.schedule(1))
  assert lr > 0
  for update, value in zip(bits(updates), bits(state.params), strict=True):
    expected = -lr * 0.1 * value if value.ndim > 1 else np.zeros_like(value)
    np.testing.assert_allclose(update, expected, rtol=1e-5)
  assert {x.ndim for x in bits(state.params)} == {1, 2}


def test_frozen_stays_frozen():
  """CASE 26: neither head nor embedding move or have optimiser state, also under weight decay."""
  target = tiny.target()
  ids = np.array([2, *range(5, 45)], np.int32)
  cfg = make_config(weight_decay=0.1, steps=100)
  module = module_of(draft_ids=ids)
  setup, state = train.make_setup(cfg, target, module, 100)
  before = [np.array(x) for x in (
      module.head[...], target.params["embed"][...], target.params["head"][...])]
  shapes = {x.shape for x in jax.tree.leaves((state.params, state.opt_state))}
  assert not any({41, tiny.VOCAB} & set(shape) for shape in shapes)
  start = copied(state.params)
  packer = pack(documents(), cfg)
  for step in range(100):
    state, _ = train.train_step(setup, state, setup.frozen, target.params, packer.batch(step % 4))
  assert all(np.any(a != b) for a, b in zip(bits(state.params), start, strict=True))
  final = nnx.merge(setup.graph, state.params, setup.frozen)
  after = [final.head_weight(target.module), target.module.embed[...], target.module.head[...]]
  for a, b in zip(after, before, strict=True):
    np.testing.assert_array_equal(a, b)
  np.testing.assert_array_equal(final.draft_ids[...], ids)


def bfloat16_target():
  config = tiny.config()
  values = tiny.tensors(config)
  kind = lambda value: jnp.bfloat16 if value.ndim > 1 else jnp.float32
  return from_module(
      Decoder(config, lambda name: jnp.asarray(values[name], kind(values[name]))), dtype="bfloat16")


def test_master_weights_are_float32_under_bfloat16():
  """Steps far below what bfloat16 resolves still add up."""
  target = bfloat16_target()
  cfg = make_config(dtype="bfloat16", lr=1e-6, warmup=0.0, final_lr=1.0)
  setup, state = train.make_setup(cfg, target, module_of(target), 20)
  kinds = lambda tree: {x.dtype for x in bits(tree) if x.ndim > 0}
  start = copied(state.params)
  packer = pack(documents(target=target), cfg)
  for step in range(4):
    state, sums = train.train_step(setup, state, setup.frozen, target.params, packer.batch(step))
  assert kinds((state.params, state.opt_state)) == {np.dtype(np.float32)}
  assert np.isfinite(float(sums["loss"]))
  for new, old in zip(bits(state.params), start, strict=True):
    if new.ndim > 1:
      moved = np.abs(new - old)
      assert 1e-6 < np.median(moved) < 5e-6  # three steps of about lr each: the first has none


def test_golden_step(stepper):
  """Fixed seeds, fixed numbers: a change of the objective, the batches or the optimiser shows."""
  state, seen = stepper.fresh(), []
  for step in range(3):
    state, sums = stepper.step(state, stepper.packer.batch(step))
    seen.append(float(sums["loss"]) / float(sums["weight"]))
  checksum = sum(float(np.sum(np.abs(x.astype(np.float64)))) for x in bits(state.params))
  np.testing.assert_allclose(seen, GOLDEN_LOSSES, rtol=1e-5)
  np.testing.assert_allclose(checksum, GOLDEN_CHECKSUM, rtol=1e-5)


GOLDEN_LOSSES = [5.194693960794589, 5.113911290322581, 6.180310385567801]
GOLDEN_CHECKSUM = 1941.31581158


# Preparation.


def answer(job, prompt, reply, target, rng):
  hidden = rng.normal(size=(len(reply), target.config.hidden_size)).astype(ml_dtypes.bfloat16)
  return Answer(job, job, np.asarray([*prompt, *reply], np.int32), len(prompt), hidden, 0.0)


def test_answers_become_documents(tmp_path):
  """CASES 23 and 32: what the cap cuts away is counted, ids and states are cut together."""
  target, rng = tiny.target(), np.random.default_rng(0)
  cfg = make_config(teacher_temperature=0.5, validation=1)
  answers = [
      answer(0, range(3, 8), [20, 21, 22, EOS], target, rng),
      answer(1, range(3, 43), [20, 21, EOS], target, rng),  # the cap leaves no answer
      answer(2, range(3, 13), range(20, 60), target, rng),  # longer than the cap
      answer(3, range(3, 34), [20, 21], target, rng),  # one supervised token is left
      answer(4, range(3, 35), [20, 21], target, rng)]  # none: the first lies behind the cap
  kept, held, counts = documents_lib.prepare(answers, target, cfg, tmp_path)
  docs = kept + held
  assert (counts["documents"], counts["dropped"], counts["supervised"]) == (3, 2, 4 + 22 + 1)
  head = head_of(target)
  by_length = {len(d.tokens): d for d in docs}
  whole = by_length[9]
  assert whole.first == 4 and whole.tokens.tolist() == [3, 4, 5, 6, 7, 20, 21, 22, EOS]
  long = next(d for d in docs if d.supervised == 22)
  assert len(long.tokens) == 32 and long.first == 9
  np.testing.assert_array_equal(long.tokens, answers[2].tokens[:32])
  for d, a in ((whole, answers[0]), (long, answers[2])):
    np.testing.assert_array_equal(d.hidden, a.hidden[:d.supervised])
    logits = d.hidden.astype(np.float64) @ head.T.astype(np.float64)
    np.testing.assert_allclose(
        d.logsumexp, np.log(np.exp(logits / 0.5).sum(-1)), rtol=1e-5)  # of the warm teacher
    np.testing.assert_array_equal(d.best, logits.argmax(-1))
  assert (len(kept), len(held), counts["held_out"]) == (2, 1, 1)


def test_the_statistics_are_kept_beside_the_answers(tmp_path, monkeypatch):
  """For every run that learns from the same answers with the same teacher, and for no other."""
  target, rng = tiny.target(), np.random.default_rng(0)
  answers = [answer(i, range(3, 8), [20 + i, 21, 22, EOS], target, rng) for i in range(4)]
  (tmp_path / "one").mkdir()
  (tmp_path / "two").mkdir()
  scored = []
  score = documents_lib.teacher_statistics
  monkeypatch.setattr(documents_lib, "teacher_statistics",
                      lambda *args: scored.append(1) or score(*args))

  def prepare(folder, answers, **changes):
    cfg = make_config(validation=1, **changes)
    kept, held, _ = documents_lib.prepare(answers, target, cfg, tmp_path / folder, tmp_path)
    return [(d.tokens.tolist(), d.logsumexp.tolist(), d.best.tolist()) for d in kept + held]

  first = prepare("one", answers)
  assert prepare("two", answers, lr=0.5) == first and len(scored) == 1
  assert prepare("two", answers, teacher_temperature=0.5) != first and len(scored) == 2
  prepare("two", answers[1:] + [answer(4, range(3, 8), [30, 21, 22, EOS], target, rng)])
  assert len(scored) == 3


def test_prompts_can_be_learned_from_and_what_is_held_out_stays_answers(tmp_path):
  """With train.prompt_tokens every token but the first is a label; validation has answers alone."""
  target, rng = tiny.target(), np.random.default_rng(0)

  @dataclasses.dataclass(frozen=True)
  class Stored(StoredDocument):  # in memory
    states: np.ndarray = None
    sparse = False

    def last_hidden(self, start, stop):
      return self.states[start:stop]

  made = []
  for i, (prompt, reply) in enumerate([(5, 4), (20, 9), (31, 3), (40, 2)]):
    tokens = np.arange(3, 3 + prompt + reply, dtype=np.int32)
    states = rng.normal(size=(len(tokens), target.config.hidden_size))
    made.append(Stored(i, i, tokens, prompt, None, i, 0, states.astype(ml_dtypes.bfloat16)))
  cfg = make_config(validation=2)
  cfg.train.prompt_tokens = True
  cfg.generate.temperatures, cfg.generate.answers = (0.0, 1.0), 1
  kept, held, counts = documents_lib.prepare(made, target, cfg, tmp_path)
  lengths = [min(len(d.tokens), cfg.train.seq_len) for d in made]
  assert counts["supervised"] == sum(n - 1 for n in lengths)
  head = head_of(target).astype(np.float64)
  for d in kept + held:
    source = made[d.stored.index]
    assert d.first == (0 if any(d is k for k in kept) else source.first_answer - 1)
    assert d.supervised == len(d.tokens) - 1 - d.first > 0
    logits = source.states[d.first:len(d.tokens) - 1].astype(np.float64) @ head.T
    np.testing.assert_allclose(d.logsumexp, np.log(np.exp(logits).sum(-1)), rtol=1e-5)
    np.testing.assert_array_equal(d.best, logits.argmax(-1))
    np.testing.assert_array_equal(
        d.teacher_states(), source.states[d.first:len(d.tokens) - 1])
  cfg.train.prompt_tokens = False  # other statistics, kept apart
  kept, _, counts = documents_lib.prepare(made, target, cfg, tmp_path)
  assert counts["supervised"] == sum(
      max(n - d.first_answer, 0) for n, d in zip(lengths, made, strict=True))
  assert len(list(tmp_path.glob("teacher-*.npz"))) == 2


def test_all_answers_to_a_prompt_lie_on_one_side(tmp_path):
  target, rng = tiny.target(), np.random.default_rng(0)
  make = lambda job, prompt: dataclasses.replace(
      answer(job, [3, 4, 5 + prompt], [20 + prompt, EOS], target, rng), prompt=prompt)
  answers = [make(8 * turn + prompt, prompt) for turn in range(3) for prompt in range(8)]
  kept, held, _ = documents_lib.prepare(answers, target, make_config(validation=4), tmp_path)
  sides = [{int(d.tokens[2]) for d in side} for side in (kept, held)]
  assert (len(kept), len(held)) == (18, 6) and not sides[0] & sides[1]


def test_nothing_supervised_is_one_line(tmp_path):
  target, rng = tiny.target(), np.random.default_rng(0)
  with pytest.raises(UserError, match="none of 1 answers has a supervised token"):
    documents_lib.prepare(
        [answer(0, range(3, 43), [20], target, rng)], target, make_config(), tmp_path)
  with pytest.raises(UserError, match="validation=3 leaves none of 1 answers"):
    documents_lib.prepare(
        [answer(0, [3, 4], [20, EOS], target, rng)], target, make_config(), tmp_path)
  with pytest.raises(UserError, match="the generate stage left no answers"):
    documents_lib.prepare([], target, make_config(), tmp_path)


def test_the_draft_vocabulary_holds_what_is_frequent_and_every_eos():
  config = tiny.config(eos_ids=(2, 40), vocab_real=60)
  counts = np.zeros(64, np.int64)
  counts[[7, 9, 50]] = [5, 9, 7]
  counts[61] = 100  # an id that does not exist
  chosen = lambda size: documents_lib.choose_vocabulary(counts, size, config)
  assert chosen(4).tolist() == [2, 9, 40, 50]
  assert chosen(5).tolist() == [2, 7, 9, 40, 50]
  # Never seen: the lowest ids, in every run the same.
  assert chosen(8).tolist() == [0, 1, 2, 3, 7, 9, 40, 50]
  assert chosen(8).dtype == np.int32
  assert chosen(0) is None and chosen(60) is None and chosen(64) is None
  counts[[7, 9, 50]] = 5
  assert chosen(4).tolist() == [2, 7, 9, 40]  # equally frequent: the lowest


def test_the_draft_vocabulary_travels(tmp_path):
  """CASE 21: the map is chosen once, kept with the run, and covers what is counted."""
  target, rng = tiny.target(), np.random.default_rng(0)
  cfg = make_config()
  cfg.drafter.draft_vocab = 10
  cfg.train.validation = 1
  answers = [answer(i, [3, 4, 5], [20, 21, 22, 20, EOS], target, rng) for i in range(2)]
  *_, counts = documents_lib.prepare(answers, target, cfg, tmp_path)
  ids = documents_lib.draft_vocabulary(tmp_path)
  assert len(set(ids.tolist())) == 10 and {20, 21, 22, EOS} <= set(ids.tolist())
  # Answered ids and the teacher's own choices count, five of each; prompts do not.
  kept, held, _ = documents_lib.prepare(answers, target, make_config(validation=1), tmp_path)
  seen = [i for d in kept + held for i in [20, 21, 22, 20, EOS, *d.best.tolist()]]
  covered = sum(i in ids for i in seen)
  assert counts["draft_vocab_coverage"] == covered / 20 and 10 <= covered
  module = train.initial_drafter(cfg, target, ids)
  np.testing.assert_array_equal(module.head_weight(target.module), head_of(target)[ids])
