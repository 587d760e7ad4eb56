"""Answers to packed training batches, a pure function of (seed, step) so that a resumed run sees
the same samples. Called by train.py."""

import copy
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence

import grain
import ml_dtypes
import numpy as np

from train_drafter.store import StoredDocument


@dataclasses.dataclass(frozen=True)
class Document:
  """One sequence with its supervised positions.

  Attributes:
    tokens: [n] ids.
    first: the first supervised position; the positions first...n-2 each predict the next token.
    hidden: [n - 1 - first, D] bfloat16 teacher states at the supervised positions; None where
      `stored` has them.
    logsumexp: [n - 1 - first] of the teacher's logits.
    best: [n - 1 - first] the teacher's argmax.
    stored: the document in the feature store, read when a batch needs it.
    temperature: that the answer was sampled at; -1 where that is not known.
  """

  tokens: np.ndarray
  first: int
  hidden: np.ndarray | None
  logsumexp: np.ndarray
  best: np.ndarray
  stored: StoredDocument | None = None
  temperature: float = -1.0

  @property
  def supervised(self) -> int:
    return len(self.tokens) - 1 - self.first

  def cut(self, length: int) -> "Document":
    """The document without what lies beyond `length` tokens: ids and states cut together."""
    keep = max(min(len(self.tokens), length) - 1 - self.first, 0)
    return dataclasses.replace(
        self, tokens=self.tokens[:length], logsumexp=self.logsumexp[:keep], best=self.best[:keep],
        hidden=None if self.hidden is None else self.hidden[:keep])

  def answer_alone(self) -> "Document":
    """The document with the answer's tokens alone supervised, where the prompt's are too."""
    first = max(self.stored.first_answer - 1, self.first)
    skip = first - self.first
    return dataclasses.replace(
        self, first=first, logsumexp=self.logsumexp[skip:], best=self.best[skip:])

  def teacher_states(self) -> np.ndarray:
    """[n - 1 - first, D] bfloat16."""
    if self.hidden is not None:
      return self.hidden
    return self.stored.last_hidden(self.first, len(self.tokens) - 1)

  def teacher(self) -> dict[str, np.ndarray]:
    """What the loss is made from, [n - 1 - first, ...]: the states, or ids and log-probabilities of
    the most probable tokens where the store keeps those."""
    if not self.sparse:
      return {"hidden": self.teacher_states()}
    found = self.stored.topk(self.first, len(self.tokens) - 1)
    return {"topk_ids": found.ids, "topk_logprobs": found.logprobs}

  @property
  def sparse(self) -> bool:
    """Whether the store keeps the head of the teacher's distributions in place of its states."""
    return self.hidden is None and self.stored.sparse

  def features(self) -> np.ndarray:
    """[n, F] bfloat16 outputs of the tapped layers."""
    return self.stored.features(0, len(self.tokens))


class Packer:
  """Packs documents into batches of `rows` sequences of `seq_len` tokens.

  Every epoch shuffles the documents anew and fills rows first-fit (grain's packing bounds the
  tokens of a row but not its supervised positions, and gives up access by step); what does not fill
  a last batch waits for the next epoch's order. Documents in a row are kept apart by segment ids
  and each has its own positions from 0.
  """

  def __init__(
      self, documents: Sequence[Document], *, rows: int, seq_len: int, chunk: int, seed: int,
      pad_id: int = 0, features: int = 0,
      own: Callable[[int], np.ndarray] = lambda size: np.ones(size, bool)):
    """Packs for training (`batch(step)`) or, in order, for validation (`in_order()`).

    Args:
      documents: each at most seq_len tokens and with at least one supervised position.
      rows: sequences of a batch.
      seq_len: tokens of a sequence.
      chunk: the supervised positions of a batch are padded to a multiple of it.
      seed: of the order.
      pad_id: id of the places that hold nothing.
      features: F, width of the features that batches hold; 0 for none.
      own: which entries of an axis of rows or supervised positions this process needs. States of
        the others are not read and stay zero; what a batch is made of depends on no process.
    """
    self.documents, self.rows, self.seq_len, self.seed = documents, rows, seq_len, seed
    self.pad_id, self.features, self.own = pad_id, features, own
    self._empty: dict[str, np.ndarray] = {}  # name -> no rows of what a teacher has
    supervised = sum(d.supervised for d in documents)
    share = supervised / sum(len(d.tokens) for d in documents)
    # The supervised positions of a row are bounded near their mean share, so that the buffer of a
    # batch can be small; a single document always fits.
    wanted = max(rows * share * seq_len, max(d.supervised for d in documents) * rows * 0.5)
    self.places = -(-int(1.05 * wanted) // chunk) * chunk
    self.row_supervised = max(self.places // rows, max(d.supervised for d in documents))
    self.places = -(-rows * self.row_supervised // chunk) * chunk
    self._epochs: list[list[list[int]]] = []
    self._lock = threading.Lock()

  def batch(self, step: int) -> dict[str, np.ndarray]:
    """The batch of a step (0-based)."""
    epoch, left = 0, step
    while left >= self.batches(epoch):
      left -= self.batches(epoch)
      epoch += 1
    rows = self._epoch(epoch)[left * self.rows:(left + 1) * self.rows]
    return self._arrays(rows) | {"step": np.int32(step)}

  def of(self, documents: Sequence[Document]) -> dict[str, np.ndarray]:
    """A batch of other documents without features, in the same shapes; what finds no place in it is
    left out."""
    most = self.row_supervised
    other = copy.copy(self)
    other._empty, other.features = {}, 0  # what no store has is computed (`extract.with_features`)
    other.documents = [d if d.supervised <= most else d.cut(d.first + 1 + most) for d in documents]
    return other._arrays(other._pack(range(len(documents)))[:self.rows])

  def batches(self, epoch: int) -> int:
    """Batches of an epoch."""
    return max(1, len(self._epoch(epoch)) // self.rows)

  def epoch_of(self, step: int) -> float:
    """Epochs done before a step, as a fraction."""
    epoch = 0
    while step >= self.batches(epoch):
      step -= self.batches(epoch)
      epoch += 1
    return epoch + step / self.batches(epoch)

  def in_order(self) -> list[dict[str, np.ndarray]]:
    """Batches of all documents once, in their order; the last may be short of rows."""
    rows = self._pack(range(len(self.documents)))
    return [self._arrays(rows[i:i + self.rows]) | {"step": np.int32(i)}
            for i in range(0, len(rows), self.rows)]

  def _epoch(self, epoch: int) -> list[list[int]]:
    with self._lock:  # `ahead` asks from a thread of its own
      while len(self._epochs) <= epoch:
        number = len(self._epochs)
        rows = self._pack(shuffled(len(self.documents), self.seed, number))
        self._epochs.append([rows[i] for i in shuffled(len(rows), self.seed, number)])
      return self._epochs[epoch]

  def _pack(self, order) -> list[list[int]]:
    """First fit over a few open rows."""
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []
    for i in order:
      d = self.documents[i]
      for r in range(max(0, len(rows) - 8), len(rows)):
        tokens, places = space[r]
        if len(d.tokens) <= tokens and d.supervised <= places:
          break
      else:
        r = len(rows)
        rows.append([])
        space.append((self.seq_len, self.row_supervised))
      rows[r].append(int(i))
      space[r] = (space[r][0] - len(d.tokens), space[r][1] - d.supervised)
    return rows

  def _arrays(self, rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    R, T, M = self.rows, self.seq_len, self.places
    own_rows, own_places = self.own(R), self.own(M)
    if not self._empty:
      some = self.documents[rows[0][0]].teacher()
      self._empty = {name: value[:0] for name, value in some.items()}
    out = {
        "tokens": np.full((R, T), self.pad_id, np.int32),
        "positions": np.zeros((R, T), np.int32),
        "segments": np.full((R, T), -1, np.int32),
        "place": np.zeros(M, np.int32),
        "weight": np.zeros(M, np.float32),
        "logsumexp": np.zeros(M, np.float32),
        "best": np.zeros(M, np.int32),
        "teacher": np.full((R, T), -1, np.int32),
        "temperature": np.full(M, -1.0, np.float32),
    }
    out |= {name: np.zeros((M, value.shape[1]), value.dtype)
            for name, value in self._empty.items()}
    if self.features:
      out["features"] = np.zeros((R, T, self.features), ml_dtypes.bfloat16)
    m = 0
    for r, row in enumerate(rows):
      at = 0
      for s, i in enumerate(row):
        d = self.documents[i]
        n = len(d.tokens)
        out["tokens"][r, at:at + n] = d.tokens
        out["positions"][r, at:at + n] = np.arange(n)
        out["segments"][r, at:at + n] = s
        new = slice(m, m + d.supervised)
        out["place"][new] = r * T + at + d.first + np.arange(d.supervised)
        out["weight"][new] = 1.0
        out["temperature"][new] = d.temperature
        out["teacher"][r, at + d.first:at + d.first + d.supervised] = np.arange(
            m, m + d.supervised)
        if self.features and own_rows[r]:
          out["features"][r, at:at + n] = d.features()
        if own_places[new].any():
          for name, value in d.teacher().items():
            out[name][new] = value
        out["logsumexp"][new] = d.logsumexp
        out["best"][new] = d.best
        at, m = at + n, m + d.supervised
    return out


def ahead(
    make: Callable[[int], dict[str, np.ndarray] | None], start: int, steps: int,
) -> Iterator[dict[str, np.ndarray] | None]:
  """`make(step)` of the steps start...steps - 1, None where it makes none; the next one, which may
  be read from disk, is made while one is used."""
  batches = grain.MapDataset.range(start, steps).map(make)
  return iter(batches.to_iter_dataset(
      grain.ReadOptions(num_threads=1, prefetch_buffer_size=1), allow_nones=True))


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
  """The order of `count` things in an epoch: each once."""
  order = grain.MapDataset.range(count).seed(seed).shuffle().repeat()
  return [int(order[epoch * count + i]) for i in range(count)]
