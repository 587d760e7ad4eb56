"""The generate stage: what it keeps of an answer, parts, resuming, and a time budget."""

import json
import os
import signal
import types

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from spec_jax.errors import UserError
from tests import tiny
from train_drafter import generate
from train_drafter.config import Config
from train_drafter.generate import Answer

PROMPTS = 10


class Killed(Exception):
  """Stands for a signal that cannot be caught."""


# Two ids end an answer, so that some are short.
TARGET = tiny.make(tiny.config(eos_ids=(40, 41), max_position=48), tiny.tensors(tiny.config()),
                   tiny.tokenizer())


def make_config(**changes):
  cfg = Config()
  fields = dict(temperatures=(0.0, 1.0), answers=2, max_new_tokens=12, max_prompt_tokens=24,
                batch_size=4, seed=3)
  for name, value in (fields | changes).items():
    assert hasattr(cfg.generate, name)
    setattr(cfg.generate, name, value)
  return cfg


def make_prompts(count=PROMPTS):
  """Id lists in place of chats, so that the lengths are known."""
  return [{"id": f"p{i}", "category": "qa", "messages": ids}
          for i, ids in enumerate(tiny.prompts(count))]


def answer_all(folder, cfg=None, prompts=None):
  return generate._answer_all(cfg or make_config(), TARGET, prompts or make_prompts(), folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """Two answers to each of ten prompts in one go."""
  folder = tmp_path_factory.mktemp("generate")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(generate, "_PART_ROWS", 6)
    patch.setattr(generate, "_write_texts", _texts(generate._write_texts))
    counts = answer_all(folder)
  return folder, counts, generate.load_answers(folder)


def _texts(real):
  """Ids are no messages: the file gets the text of the answer alone."""
  def write(folder, target, prompts, jobs, answers):
    real(folder, target, [{**p, "messages": []} for p in prompts], jobs, answers)
  return write


@pytest.fixture(autouse=True)
def texts(monkeypatch):
  monkeypatch.setattr(generate, "_write_texts", _texts(generate._write_texts))


def same(a, b):
  assert [x.job for x in a] == [x.job for x in b]
  for x, y in zip(a, b, strict=True):
    np.testing.assert_array_equal(x.tokens, y.tokens)
    np.testing.assert_array_equal(x.hidden, y.hidden)
    assert (x.prompt, x.prompt_len, x.temperature) == (y.prompt, y.prompt_len, y.temperature)


def test_every_prompt_is_answered_at_temperatures_in_turn(made):
  folder, counts, answers = made
  prompts = [p["messages"] for p in make_prompts()]
  assert [a.job for a in answers] == list(range(2 * PROMPTS))
  for a in answers:
    prompt, turn = a.job % PROMPTS, a.job // PROMPTS  # a second round answers all once more
    assert a.tokens[:a.prompt_len].tolist() == prompts[prompt]
    assert a.temperature == (prompt + turn) % 2
    reply = a.tokens[a.prompt_len:]
    ended = reply[-1] in (40, 41)
    assert 1 <= len(reply) <= 12 and (ended or len(reply) == 12)
    assert not set(reply[:-1].tolist()) & {40, 41}  # the EOS is the last, and kept: it is learnt
  assert any(a.tokens[-1] in (40, 41) for a in answers)
  assert counts == {
      "answers": 20, "answer_tokens": sum(len(a.tokens) - a.prompt_len for a in answers),
      "prompt_tokens": 2 * sum(map(len, prompts)), "prompt_too_long": 0, "unanswered": 0}
  rows = [json.loads(x) for x in (folder / "responses.jsonl").read_text().splitlines()]
  assert [r["id"] for r in rows] == [f"p{a.job % PROMPTS}" for a in answers]
  assert [r["temperature"] for r in rows] == [a.temperature for a in answers]
  for row, a in zip(rows, answers, strict=True):
    text = TARGET.tokenizer.decode(a.tokens[a.prompt_len:].tolist())
    assert row["messages"] == [{"role": "assistant", "content": text}]


def plain_states(a):
  """The target's states and logits at the positions that predicted the answer, in one pass."""
  module, n = TARGET.module, len(a.tokens)
  padded = np.zeros((1, 48), np.int32)
  padded[0, :n] = a.tokens
  logits, out = module(jnp.asarray(padded), jnp.arange(48)[None])
  place = slice(a.prompt_len - 1, n - 1)
  return np.asarray(out.hidden[0, place]), np.asarray(logits[0, place])


def test_hidden_states_are_those_behind_each_answered_token(made):
  """The teacher's logits are the head times the stored state, up to the rounding of the store."""
  _, _, answers = made
  head = np.asarray(TARGET.module.head_weight())
  for a in answers[:3] + answers[-3:]:
    states, logits = plain_states(a)
    assert a.hidden.shape == (len(a.tokens) - a.prompt_len, 32)
    assert a.hidden.dtype == ml_dtypes.bfloat16
    stored = a.hidden.astype(np.float32)
    np.testing.assert_allclose(stored, states, rtol=2**-8, atol=1e-4)
    np.testing.assert_allclose(stored @ head.T, logits, atol=0.08)
    if a.temperature == 0:  # greedy: the state says which id was taken
      np.testing.assert_array_equal(logits.argmax(-1), a.tokens[a.prompt_len:])


def test_parts_are_whole(made, tmp_path, monkeypatch):
  folder, _, answers = made
  sizes = [len(list(generate._read_part(p))) for p in sorted(folder.glob("part-*.npz"))]
  assert sizes == [6, 6, 6, 2]
  assert sorted(p.name for p in folder.iterdir()) == [
      *(f"part-{i:05d}.npz" for i in range(4)), "responses.jsonl"]
  real = np.savez

  def killed(file, **arrays):
    real(file, **arrays)
    file.truncate(100)
    raise Killed

  monkeypatch.setattr(np, "savez", killed)
  with pytest.raises(Killed):
    generate._write_part(tmp_path / "part-00000.npz", answers[:2])
  assert generate.load_answers(tmp_path) == [] and not list(tmp_path.glob("part-*"))
  monkeypatch.setattr(np, "savez", real)
  generate._write_part(tmp_path / "part-00000.npz", answers[:2])
  same(generate.load_answers(tmp_path), answers[:2])
  assert [p.name for p in tmp_path.iterdir()] == ["part-00000.npz"]


@pytest.mark.parametrize("stop_at", [1, 3])
def test_a_stopped_stage_answers_only_what_is_missing(made, tmp_path, monkeypatch, stop_at):
  _, counts, answers = made
  monkeypatch.setattr(generate, "_PART_ROWS", 6)
  real, written = generate._write_part, []

  def write(path, rows):
    if len(written) == stop_at:
      raise Killed
    real(path, rows)
    written.append(path)

  monkeypatch.setattr(generate, "_write_part", write)
  with pytest.raises(Killed):
    answer_all(tmp_path)
  kept = {p: p.read_bytes() for p in written}
  assert len(generate.load_answers(tmp_path)) == 6 * stop_at
  asked = []

  class Run(generate.Run):
    def __init__(self, target, drafter, prompts, **options):
      asked.append(len(options["only"]))
      super().__init__(target, drafter, prompts, **options)

  monkeypatch.setattr(generate, "_write_part", real)
  monkeypatch.setattr(generate, "Run", Run)
  assert answer_all(tmp_path) == counts
  assert asked == [20 - 6 * stop_at]
  assert {p: p.read_bytes() for p in written} == kept
  same(generate.load_answers(tmp_path), answers)
  # Once more: nothing is left to do.
  assert answer_all(tmp_path) == counts and asked[1:] == [0]


@pytest.mark.parametrize("rows", [1, 7])
def test_sigterm_keeps_every_answer_that_has_ended(made, tmp_path, monkeypatch, rows):
  """CASE 36: what the next run answers is what this one would have."""
  _, counts, answers = made
  real = generate._within_budget

  def told(work, budget):
    for n, row in enumerate(real(work, budget), 1):
      if n == rows:
        os.kill(os.getpid(), signal.SIGTERM)
      yield row

  with monkeypatch.context() as patch:
    patch.setattr(generate, "_within_budget", told)
    with pytest.raises(SystemExit) as stopped:
      answer_all(tmp_path)
  assert stopped.value.code == 143
  assert len(generate.load_answers(tmp_path)) == rows
  assert answer_all(tmp_path) == counts
  same(generate.load_answers(tmp_path), answers)


def test_prompts_that_are_too_long_are_counted(tmp_path):
  prompts = make_prompts(4)
  prompts[1]["messages"] = [5] * 24  # just fits
  prompts[2]["messages"] = [5] * 25
  counts = answer_all(tmp_path, make_config(answers=1), prompts)
  assert (counts["answers"], counts["prompt_too_long"], counts["unanswered"]) == (3, 1, 0)
  assert [a.job for a in generate.load_answers(tmp_path)] == [0, 1, 3]


def test_a_prompt_longer_than_the_context_is_too_long_as_well(tmp_path):
  """The limit of the config may be above that of the target."""
  prompts = make_prompts(3)
  prompts[1]["messages"] = [5] * 60
  counts = answer_all(tmp_path, make_config(answers=1, max_prompt_tokens=384), prompts)
  assert (counts["answers"], counts["prompt_too_long"]) == (2, 1)


def test_no_answer_at_all_is_one_line(tmp_path):
  with pytest.raises(UserError, match="all 2 prompts are longer than generate.max_prompt_tokens=1"):
    answer_all(tmp_path, make_config(answers=1, max_prompt_tokens=1),
               [{"id": str(i), "category": "qa", "messages": [5, 6]} for i in range(2)])


def test_what_a_later_stage_would_refuse_is_refused_first():
  target = tiny.target()
  prompt = lambda n: {"id": "exam-7", "messages": [5] * n}
  cfg = make_config()
  cfg.drafter.init_layers = (0, 1)
  generate.check_later_stages(cfg, target, [prompt(512)])
  with pytest.raises(UserError, match="evaluation prompt exam-7 has 513 tokens .* holds 512"):
    generate.check_later_stages(cfg, target, [prompt(513)])
  cfg.drafter.init_layers = (0, 29)
  with pytest.raises(UserError, match=r"drafter.init_layers=\(0, 29\) must name layers 0..1"):
    generate.check_later_stages(cfg, target, [])
  cfg.drafter.init_layers, cfg.evaluate.path = (0,), "no/such.jsonl"
  with pytest.raises(UserError, match="no/such.jsonl"):
    generate.check_later_stages(cfg, target, [])


# A time budget, with a clock that each answer moves.


class Clockwork(generate.Run):
  """A Run of two buckets with three rows in flight, whose answers take one second each."""

  max_new = 100

  def __init__(self):
    self.now = 0.0

  def buckets(self):
    return {40: list(range(100)), 200: list(range(100, 200))}

  def bucket(self, size, members):
    self.left = len(members)
    for i in members:
      if not self.left:
        break
      self.left -= 1
      self.now += 1.0
      yield types.SimpleNamespace(index=i)

  def stop_filling(self):
    self.left = min(self.left, 3)


def within(monkeypatch, budget):
  work = Clockwork()
  monkeypatch.setattr(generate, "time", types.SimpleNamespace(monotonic=lambda: work.now))
  rows = [row.index for row in generate._within_budget(work, budget)]
  return sum(i < 100 for i in rows), sum(i >= 100 for i in rows)


def test_a_budget_is_shared_out_over_the_buckets(monkeypatch):
  # Answers cost 100 and a quarter of the prompt: 110 against 150 of 260 parts. The first that is
  # late is the 23rd, and three more are in flight.
  short, long = within(monkeypatch, 52.0)
  assert (short, long) == (23 + 3, 27 + 3)


def test_no_budget_and_a_large_one_leave_nothing_out(monkeypatch):
  assert within(monkeypatch, 0.0) == (100, 100)
  assert within(monkeypatch, 1000.0) == (100, 100)


def test_what_a_budget_leaves_out_is_recorded(made, tmp_path, monkeypatch):
  _, _, answers = made
  clock = iter(range(10**6))
  monkeypatch.setattr(generate, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
  counts = answer_all(tmp_path, make_config(budget_s=6.5))
  assert 6 + 1 < counts["answers"] <= 6 + 1 + 4 and counts["unanswered"] == 20 - counts["answers"]
  # What was answered is what a run without a budget answers.
  by_job = {a.job: a for a in answers}
  same(generate.load_answers(tmp_path), [by_job[a.job] for a in generate.load_answers(tmp_path)])


def test_answers_come_back_as_they_were(tmp_path):
  rng = np.random.default_rng(0)
  make = lambda job, n, p: Answer(
      job, job // 2, rng.integers(0, 60, n).astype(np.int32), p,
      rng.normal(size=(n - p, 3)).astype(ml_dtypes.bfloat16), float(job % 2))
  first, second = [make(5, 9, 4), make(0, 3, 2)], [make(2, 4, 1)]
  generate._write_part(tmp_path / "part-00000.npz", first)
  generate._write_part(tmp_path / "part-00001.npz", second)
  same(generate.load_answers(tmp_path), [first[1], second[0], first[0]])
