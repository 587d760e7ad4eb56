"""The packer: every document once, apart from the others, and the same batches in every process."""

import collections
import dataclasses
import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from spec_jax.errors import UserError
from train_drafter.batches import Document, Packer, ahead
from train_drafter.store import StoredDocument

ROOT = Path(__file__).parents[2]
D = 4


def document(i, length, first):
  """Ids, states and statistics that tell the document and the position they belong to."""
  count = length - 1 - first
  places = np.arange(first, length - 1)
  return Document(
      tokens=np.arange(length, dtype=np.int32) + 1000 * (i + 1),
      first=first,
      hidden=np.repeat((100 * i + places)[:, None], D, 1).astype(ml_dtypes.bfloat16),
      logsumexp=(1000 * i + places).astype(np.float32),
      best=np.arange(count, dtype=np.int32) + 1000 * (i + 1) + first + 1)


def documents(count, seed=0, longest=20):
  rng = np.random.default_rng(seed)
  out = []
  for i in range(count):
    length = int(rng.integers(3, longest + 1))
    out.append(document(i, length, int(rng.integers(0, length - 1))))
  return out


def packer(docs, rows=3, seq_len=24, chunk=8, seed=5, **options):
  return Packer(docs, rows=rows, seq_len=seq_len, chunk=chunk, seed=seed, **options)


def held(batch):
  """The numbers of the documents of a batch, row by row."""
  out = []
  for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
    starts = [np.flatnonzero(segments == s)[0] for s in range(segments.max() + 1)]
    out.append([int(tokens[at]) // 1000 - 1 for at in starts])
  return out


def flat(batch):
  return [i for row in held(batch) for i in row]


def test_a_document_cut_is_cut_in_ids_and_states_together():
  whole = document(0, 12, 3)
  for length in range(1, 15):
    cut = whole.cut(length)
    n = min(length, 12)
    assert len(cut.tokens) == n
    count = max(n - 1 - 3, 0)
    assert len(cut.hidden) == len(cut.logsumexp) == len(cut.best) == count
    assert max(cut.supervised, 0) == count
    # The state at a position still predicts the token behind it, which the cut document holds.
    np.testing.assert_array_equal(cut.best, cut.tokens[4:4 + count])
  assert whole.cut(4).supervised == 0 and whole.cut(5).supervised == 1


def test_rows_hold_whole_documents_apart_from_each_other():
  docs = documents(30)
  p = packer(docs, pad_id=7)
  for step in range(p.batches(0)):
    batch = p.batch(step)
    assert batch["tokens"].shape == (3, 24)
    for r, row in enumerate(held(batch)):
      at = 0
      for s, i in enumerate(row):
        n = len(docs[i].tokens)
        place = slice(at, at + n)
        np.testing.assert_array_equal(batch["tokens"][r, place], docs[i].tokens)
        np.testing.assert_array_equal(batch["positions"][r, place], np.arange(n))
        np.testing.assert_array_equal(batch["segments"][r, place], s)
        at += n
      assert np.all(batch["tokens"][r, at:] == 7) and np.all(batch["segments"][r, at:] == -1)


def test_every_place_points_at_its_state_and_its_label_is_of_its_own_document():
  docs = documents(30)
  p = packer(docs)
  for step in range(p.batches(0)):
    batch = p.batch(step)
    tokens, segments = batch["tokens"].reshape(-1), batch["segments"].reshape(-1)
    positions = batch["positions"].reshape(-1)
    real = batch["weight"] == 1
    place = batch["place"][real]
    assert len(set(place.tolist())) == len(place)
    assert np.all(batch["weight"][~real] == 0) and real.sum() == sum(
        docs[i].supervised for i in flat(batch))
    # The next place belongs to the same document (no label from the next one) and the statistics
    # name the document and the position they were computed at.
    assert np.all(segments[place] == segments[place + 1]) and np.all(segments[place] >= 0)
    np.testing.assert_array_equal(batch["best"][real], tokens[place + 1])
    number = tokens[place] // 1000 - 1
    np.testing.assert_array_equal(batch["logsumexp"][real], 1000 * number + positions[place])
    np.testing.assert_array_equal(
        batch["hidden"][real].astype(np.float32)[:, 0],
        (100 * number + positions[place]).astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("seed", range(8))
def test_the_places_of_a_batch_suffice_whatever_the_mix(seed):
  """Answers of very different shares, also one that is all answer beside many that hardly are."""
  rng = np.random.default_rng(seed)
  docs = [document(i, n, int(rng.choice([0, n - 2])))
          for i, n in enumerate(rng.integers(2, 9, 60).tolist())]
  chunk = int(rng.integers(1, 20))
  p = packer(docs, chunk=chunk)
  sizes = {p.batch(step)["weight"].shape for step in range(p.batches(0))}
  assert len(sizes) == 1 and sizes.pop()[0] % chunk == 0
  for step in range(p.batches(0)):
    batch = p.batch(step)
    assert batch["weight"].sum() == sum(docs[i].supervised for i in flat(batch))


def test_the_supervised_places_are_few_where_answers_are_short():
  docs = [document(i, 24, 20) for i in range(40)]
  assert packer(docs, rows=8, chunk=4).batch(0)["place"].shape == (24,)  # 3 of 24 tokens a row


def test_an_epoch_holds_every_document_at_most_once_and_all_but_a_last_batch():
  docs = documents(50)
  p = packer(docs)
  step = 0
  for epoch in range(3):
    batches = [held(p.batch(step + k)) for k in range(p.batches(epoch))]
    assert all(all(rows) for rows in batches)  # no row is empty
    seen = collections.Counter(i for rows in batches for row in rows for i in row)
    assert set(seen.values()) == {1}
    missing = set(range(50)) - set(seen)
    # What is left out filled fewer rows than a batch has.
    left = sum(len(docs[i].tokens) for i in missing)
    assert left <= (p.rows - 1) * p.seq_len
    step += p.batches(epoch)
  assert p.epoch_of(step) == 3.0


def test_what_waits_is_not_always_the_same():
  """No document is left out for good: it has its turn in another epoch's order."""
  docs = documents(50)
  p = packer(docs)
  seen = {i for step in range(3 * p.batches(0)) for i in flat(p.batch(step))}
  assert seen == set(range(50))


def test_whole_rows_leave_nothing_out():
  docs = [document(i, 24, 10) for i in range(12)]
  p = packer(docs)
  assert p.batches(0) == 4
  assert sorted(i for step in range(4) for i in flat(p.batch(step))) == list(range(12))


def test_fewer_documents_than_a_batch_has_rows():
  docs = documents(2)
  p = packer(docs, rows=5)
  for step in range(3):
    assert sorted(flat(p.batch(step))) == [0, 1]
    assert p.batch(step)["tokens"].shape == (5, 24)
  assert p.epoch_of(2) == 2.0


def test_a_batch_depends_on_seed_and_step_alone():
  docs = documents(40)
  forwards, backwards = packer(docs), packer(docs)
  steps = list(range(12))
  first = {s: forwards.batch(s) for s in steps}
  second = {s: backwards.batch(s) for s in reversed(steps)}
  for s in steps:
    for name, value in first[s].items():
      np.testing.assert_array_equal(value, second[s][name])
  other = packer(docs, seed=6)
  assert [flat(other.batch(s)) for s in steps] != [flat(forwards.batch(s)) for s in steps]


def test_epochs_come_in_different_orders():
  p = packer(documents(40))
  n = p.batches(0)
  assert [flat(p.batch(s)) for s in range(n)] != [flat(p.batch(n + s)) for s in range(n)]


def digest(count=40, steps=10):
  p = packer(documents(count))
  order = [flat(p.batch(s)) for s in range(steps)]
  return hashlib.sha256(json.dumps(order).encode()).hexdigest()


def test_another_process_makes_the_same_batches():
  code = "from tests.train_drafter.test_batches import digest; print(digest())"
  for seed in ("1", "2"):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}, check=True)
    assert done.stdout.strip() == digest()


def test_validation_comes_once_and_in_order():
  docs = documents(20)
  p = packer(docs, rows=2)
  batches = p.in_order()
  assert sorted(i for b in batches for i in flat(b)) == list(range(20))
  assert flat(batches[0])[0] == 0
  assert {b["tokens"].shape for b in batches} == {(2, 24)}
  assert sum(b["weight"].sum() for b in batches) == sum(d.supervised for d in docs)


def test_made_ahead_is_the_same():
  """From any step on, each once, the next one before it is asked for, none behind the last."""
  docs = documents(40)
  plain, made, next_made = packer(docs), [], threading.Event()

  def make(step):
    made.append(step)
    if step == 4:
      next_made.set()
    return plain.batch(step)

  batches = ahead(make, 3, 8)
  first = next(batches)
  assert next_made.wait(10)
  for step, ours in zip(range(3, 8), [first, *batches], strict=True):
    theirs = packer(docs).batch(step)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
      np.testing.assert_array_equal(ours[name], value)
  assert made == [3, 4, 5, 6, 7]


def test_a_step_without_a_batch_keeps_its_turn():
  """As on-policy steps: None stands at its step and moves none of the others."""
  assert list(ahead(lambda step: step if step % 3 else None, 3, 8)) == [None, 4, 5, None, 7]
  assert list(ahead(lambda step: step, 8, 8)) == []


def test_an_error_of_a_batch_reaches_the_caller():
  def make(step):
    raise UserError(f"batch {step} is broken")

  with pytest.raises(UserError, match="batch 2 is broken"):
    next(ahead(make, 2, 4))


class Stored(StoredDocument):
  """Stands for a document of the store: rows that tell their document and position."""

  sparse = False

  def __init__(self, i):
    object.__setattr__(self, "i", i)

  def features(self, start, stop):
    return np.repeat((20 * self.i + np.arange(start, stop))[:, None], 6, 1)

  def last_hidden(self, start, stop):
    return np.repeat((20 * self.i + np.arange(start, stop))[:, None], D, 1)


def test_features_and_teacher_rows_lie_where_their_tokens_are():
  docs = [dataclasses.replace(document(i, n, f), hidden=None, stored=Stored(i)).cut(12)
          for i, (n, f) in enumerate([(9, 3), (15, 6), (5, 0), (12, 10)])]
  batch, = packer(docs, rows=3, features=6).in_order()
  known = packer([document(i, n, f).cut(12) for i, (n, f) in enumerate(
      [(9, 3), (15, 6), (5, 0), (12, 10)])], rows=3).in_order()[0]
  same = known["place"] == batch["place"]
  assert same.all()
  row = batch["place"][:int(batch["weight"].sum())]
  np.testing.assert_array_equal(
      batch["hidden"][:len(row), 0],
      (20 * (batch["tokens"] // 1000 - 1) + batch["positions"]).reshape(-1)[row])
  there = batch["segments"] >= 0
  number = batch["tokens"] // 1000 - 1
  np.testing.assert_array_equal(
      batch["features"][there][:, 0], (20 * number + batch["positions"])[there])
  assert not batch["features"][~there].any()
  rows = batch["teacher"].reshape(-1)
  for m, at in enumerate(batch["place"]):
    if batch["weight"][m]:
      assert rows[at] == m
  assert (rows >= 0).sum() == batch["weight"].sum() == sum(d.supervised for d in docs)


def test_a_process_reads_only_what_its_devices_hold(monkeypatch):
  """Of two processes each has its half of every array; the batch is that of one process."""
  docs, read = documents(90), []
  teacher = Document.teacher
  monkeypatch.setattr(Document, "teacher", lambda d: read.append(id(d)) or teacher(d))
  monkeypatch.setattr(Document, "features", lambda d: np.full((len(d.tokens), 3), len(d.tokens)))
  half = lambda which: lambda size: np.arange(size) * 2 // size == which
  whole = packer(docs, rows=4, seq_len=120, features=3).batch(1)
  there = set(read)
  for which in (0, 1):
    read.clear()
    part = packer(docs, rows=4, seq_len=120, features=3, own=half(which)).batch(1)
    assert set(read) < there and part.keys() == whole.keys()
    for name, value in whole.items():
      mine = half(which)(len(value)) if name in ("hidden", "features") else ...
      np.testing.assert_array_equal(part[name][mine], value[mine], err_msg=name)
    assert not part["features"][~half(which)(4)].any() and part["features"].any()
