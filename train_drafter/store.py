"""The feature store: what the target computes at every token of the answers, as chunked arrays.

A store is a stage folder of parts. A part is a folder of tensorstore arrays (zarr3, sharded, tokens
on axis 0): `tokens`, `loss_mask`, `doc_offsets`, `job`, `prompt`, and `features` with `last_hidden`
or with the `topk_` arrays and `logsumexp`. extract.py writes it; the training batches and
verify_store.py read it.
"""

import contextlib
import dataclasses
import functools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tensorstore as ts
from jaxtyping import Array, Float

from spec_jax.errors import UserError
from train_drafter import buckets, distributed, manifest, urls
from train_drafter.buckets import Folder

AFTER_FINAL_NORM = "after_final_norm"
NOT_KEPT = "not_kept"
# Small enough to be read whole when a store is opened.
INDEX = ("tokens", "loss_mask", "doc_offsets", "job", "prompt")
_CHUNK_BYTES = 2 << 20  # of one inner chunk, the least that is read
_SHARD_BYTES = 256 << 20  # of one file; a shard is encoded in memory
_CACHE_BYTES = 128 << 20  # decoded chunks kept, over all open stores of the process


@dataclasses.dataclass(frozen=True)
class TopK:
  """The head of the target's distribution at temperature 1, for n positions.

  Attributes:
    ids: [n, k] int32, the most probable first.
    logprobs: [n, k] float32.
    logsumexp: [n] float32 of the raw logits.
  """

  ids: np.ndarray
  logprobs: np.ndarray
  logsumexp: np.ndarray

  @property
  def tail(self) -> np.ndarray:
    """[n] probability outside the k ids."""
    return np.maximum(1 - np.exp(self.logprobs).sum(-1), 0)


class Part:
  """The arrays of one part, each opened when it is first read. Threads may share it."""

  def __init__(self, folder: Folder, names: Sequence[str]):
    """Opens nothing yet.

    Args:
      folder: of the part, here or in a bucket.
      names: the arrays it was written with.
    """
    self.folder, self.names = folder, frozenset(names)
    self._open: dict[str, ts.TensorStore] = {}

  def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Rows start...stop - 1 of an array.

    Raises:
      UserError: the store keeps no such array, or the part is damaged.
    """
    if name not in self.names:
      raise UserError(f"{self.folder}: keeps no {name}, only {', '.join(sorted(self.names))}; "
                      "another features.mode does")
    with _naming_damage(self.folder):
      if name not in self._open:  # two threads may both open it, and one of the two stays
        self._open[name] = _open(self.folder / name)
      array = self._open[name]
      stop = array.shape[0] if stop is None else stop
      return array[start:stop].read().result()

  def __getstate__(self) -> dict:
    """Without the open arrays: a data worker opens its own."""
    return {"folder": self.folder, "names": self.names, "_open": {}}


@dataclasses.dataclass(frozen=True, eq=False)
class StoredDocument:
  """One prompt with its answer; the states stay on disk until they are asked for.

  Attributes:
    job: index of prompt and answer in the generate stage.
    prompt: index of the prompt.
    tokens: [n] int32 ids.
    first_answer: index of the first token of the answer; n when a cut left none.
    part: where the states lie.
    index: of the document in its part.
    offset: row of its first token in the arrays of the part.
  """

  job: int
  prompt: int
  tokens: np.ndarray
  first_answer: int
  part: Part
  index: int
  offset: int

  def cut(self, length: int) -> "StoredDocument":
    """The first `length` tokens as a document: ids, mask and states end together."""
    tokens = self.tokens[:length]
    return dataclasses.replace(
        self, tokens=tokens, first_answer=min(self.first_answer, len(tokens)))

  @property
  def loss_mask(self) -> np.ndarray:
    """[n] uint8, 1 where the token is part of the answer."""
    return (np.arange(len(self.tokens)) >= self.first_answer).astype(np.uint8)

  @property
  def sparse(self) -> bool:
    """Whether the head of each distribution is kept in place of the last state."""
    return "topk_ids" in self.part.names

  def features(self, start: int = 0, stop: int | None = None) -> np.ndarray:
    """[stop - start, F] outputs of the tapped layers; F = 0 in a store without taps."""
    if "features" not in self.part.names:
      first, last = self._bounds(start, stop)
      return np.zeros((last - first, 0), ml_dtypes.bfloat16)
    return self._read("features", start, stop)

  def last_hidden(self, start: int = 0, stop: int | None = None) -> np.ndarray:
    """[stop - start, D] states after the final norm.

    Raises:
      UserError: the store keeps none, or is damaged.
    """
    return self._read("last_hidden", start, stop)

  def topk(self, start: int = 0, stop: int | None = None) -> TopK:
    """The k most probable ids at the positions start...stop - 1.

    Raises:
      UserError: the store keeps none, or is damaged.
    """
    return TopK(*(
        self._read(name, start, stop) for name in ("topk_ids", "topk_logprobs", "logsumexp")))

  def _read(self, name: str, start: int, stop: int | None) -> np.ndarray:
    first, last = self._bounds(start, stop)
    return self.part.read(name, self.offset + first, self.offset + last)

  def _bounds(self, start: int, stop: int | None) -> tuple[int, int]:
    stop = len(self.tokens) if stop is None else stop
    if not 0 <= start <= stop <= len(self.tokens):
      raise IndexError(f"positions {start}..{stop} of a document of {len(self.tokens)} tokens")
    return start, stop


@dataclasses.dataclass(frozen=True, eq=False)
class Store:
  """A finished store.

  Attributes:
    folder: of the extract stage.
    mode: "store" (last_hidden) or "topk".
    taps: layers of the target (0-based, outputs before the final norm) behind `features`, in order.
    hidden_size: D.
    topk: k; 0 in mode "store".
    documents: in the order of the jobs.
  """

  folder: Path
  mode: str
  taps: tuple[int, ...]
  hidden_size: int
  topk: int
  documents: Sequence[StoredDocument]


def open_store(folder: Path) -> Store:
  """Reads the index of a finished store; states are read by the documents.

  Raises:
    UserError: the stage is not finished, the store does not say where its states were taken, keeps
      none (features.mode=online), or a part is missing or damaged.
  """
  folder = Path(folder)
  found = manifest.Manifest.load(folder)
  if not found.complete:
    raise UserError(f"{folder}: stage extract is not finished; run --stage=extract again")
  counts = found.counts
  if counts.get("mode") == "online":
    raise UserError(f"{folder}: was made with features.mode='online', which keeps no features")
  if counts.get("last_hidden") not in (AFTER_FINAL_NORM, NOT_KEPT):
    said = counts.get("last_hidden")
    raise UserError(
        f"{folder}: its manifest has last_hidden={said!r}, so it does not say that the states were "
        f"taken after the final norm; remove {folder} and run --stage=extract again")
  try:
    mode, names, parts, size, topk = (
        counts[name] for name in ("mode", "arrays", "parts", "hidden_size", "topk"))
    taps = tuple(counts["taps"])
  except KeyError as error:
    raise UserError(f"{folder}: its manifest has no {error.args[0]!r}; remove {folder} and run "
                    "--stage=extract again") from None
  place = buckets.where(folder)
  if parts and not any(part_exists(part_folder(place, i)) for i in range(parts)):
    raise UserError(f"{folder}: its parts are gone (features.delete_used removes them after "
                    f"training); remove {folder} and run --stage=extract again")
  documents = [d for i in range(parts) for d in read_part(part_folder(place, i), names)]
  return Store(folder, mode, taps, size, topk, tuple(documents))


def part_folder(place: Folder, number: int) -> Folder:
  """Where part `number` (0-based) of a store lies.

  Args:
    place: of the parts, as `buckets.place` and `buckets.where` give it.
    number: of the part.
  """
  return place / f"part-{number:05d}"


def part_exists(path: Folder) -> bool:
  """Whether all of a part is there.

  Raises:
    UserError: the bucket it should lie in cannot be read.
  """
  with _naming_damage(path):
    return buckets.is_complete(path) if urls.is_bucket(path) else path.exists()


def read_part(folder: Folder, names: Sequence[str]) -> list[StoredDocument]:
  """The documents of one part that was written with the arrays `names`.

  Raises:
    UserError: it is missing or damaged.
  """
  part = Part(folder, names)
  tokens, mask, offsets, job, prompt = (part.read(name) for name in INDEX)
  lengths = np.diff(offsets)
  if not (offsets[0] == 0 and offsets[-1] == len(tokens) == len(mask)
          and len(lengths) == len(job) == len(prompt) and np.all(lengths > 0)):
    raise _damaged(folder, "its documents do not add up to its tokens")
  documents = []
  for i, (start, stop) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
    own = mask[start:stop]
    first = int(stop - start) - int(own.sum())
    if own[:first].any():
      raise _damaged(folder, f"the loss mask of document {i} is not one answer at its end")
    documents.append(StoredDocument(
        int(job[i]), int(prompt[i]), tokens[start:stop], first, part, i, int(start)))
  return documents


def write_part(path: Folder, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes one part; it appears under its name when all of it is on disk, or in the bucket.

  Args:
    path: folder of the part, which must not exist yet.
    arrays: by name, the rows of one document after the other; each keeps its dtype.

  Raises:
    UserError: it cannot be written.
  """
  temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
  try:
    if urls.is_bucket(path):
      with buckets.new_folder(path):
        _write_arrays(path, arrays)
      return
    if temporary.exists():  # of an earlier try of this process
      shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    _write_arrays(temporary, arrays)
    for folder, _, _ in os.walk(temporary):
      _sync(folder)
    temporary.rename(path)
    _sync(path.parent)
  except buckets.FAILURES as error:  # tensorstore reports a full disk as a ValueError
    raise UserError(f"{path}: cannot be written ({buckets.reason(error)})") from None


def remove_unfinished(folder: Path) -> None:
  """Removes what a killed process left of the part it was writing."""
  for path in folder.glob(".part-*.tmp-*"):
    shutil.rmtree(path)


def remove_parts(folder: Path) -> None:
  """Removes the parts of a store that is not needed any more (features.delete_used). A store that a
  sweep shares (a link) stays: its other cells may still read it."""
  place, count = buckets.where(folder), manifest.Manifest.load(folder).counts.get("parts", 0)
  parts = [path for path in (part_folder(place, i) for i in range(count)) if part_exists(path)]
  if folder.is_symlink():
    print(f"{folder}: is shared, so its {len(parts)} parts stay", flush=True)
  elif distributed.is_primary():
    for path in parts:
      if urls.is_bucket(path):
        with _naming_damage(path):
          buckets.remove(path)
      else:
        shutil.rmtree(path)
    print(f"{place}: {len(parts)} used parts removed", flush=True)


def bytes_per_token(mode: str, *, hidden_size: int, num_taps: int, topk: int = 64) -> int:
  """What one token takes on disk, without the index of documents.

  Args:
    mode: features.mode; "online" keeps nothing.
    hidden_size: D.
    num_taps: L tapped layers.
    topk: k, for mode "topk".
  """
  if mode == "online":
    return 0
  token_and_mask, features = 4 + 1, 2 * num_taps * hidden_size
  teacher = topk * (4 + 4) + 4 if mode == "topk" else 2 * hidden_size
  return token_and_mask + features + teacher


def check_space(folder: Folder, tokens: int, width: int, mode: str) -> None:
  """Refuses to begin a store that the disk cannot hold; a bucket holds any.

  Args:
    folder: where its parts will lie, which exists.
    tokens: still to be written.
    width: bytes of a token, as `bytes_per_token` has it.
    mode: features.mode, for the message.

  Raises:
    UserError: names both sizes.
  """
  if urls.is_bucket(folder):
    return
  free = shutil.disk_usage(folder).free
  if tokens * width > free:
    raise UserError(
        f"{folder}: {tokens:,} tokens of {width:,} bytes (features.mode={mode!r}) need "
        f"{tokens * width / 1e9:,.1f} GB and {free / 1e9:,.1f} GB are free; features.mode='online' "
        "stores nothing, 'topk' less")


def alpha_bounds(
    topk_probs: Float[Array | np.ndarray, "*n k"],
    q_at_topk: Float[Array | np.ndarray, "*n k"],
    tail_p: Float[Array | np.ndarray, "*n"],
    tail_q: Float[Array | np.ndarray, "*n"],
) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
  """Certified bounds on alpha = sum_v min(p, q) where p is known at k ids only (METHODS section 3).

  The k ids count exactly. Outside them the overlap is at least 0 and at most the smaller of the two
  masses there. Renormalising p over the k ids would be biased instead.

  Args:
    topk_probs: p at the stored ids, as stored (not renormalised).
    q_at_topk: q at the same ids.
    tail_p: mass of p outside them; a rounding below 0 counts as 0.
    tail_q: mass of q outside them.

  Returns:
    (low, high) with low <= alpha <= high up to float32 rounding; equal when either tail is 0.
  """
  low = jnp.minimum(jnp.asarray(topk_probs), jnp.asarray(q_at_topk)).sum(-1)
  rest = jnp.minimum(jnp.asarray(tail_p), jnp.asarray(tail_q))
  return low, low + jnp.maximum(rest, 0)


# Arrays on disk.


def _write_arrays(folder: Folder, arrays: Mapping[str, np.ndarray]) -> None:
  pending = [_create(folder / name, value).write(value) for name, value in arrays.items()]
  for write in pending:
    write.result()


def _create(path: Folder, value: np.ndarray) -> ts.TensorStore:
  rows = len(value)
  row_bytes = value.dtype.itemsize * int(np.prod(value.shape[1:]))
  inner = min(max(1, _CHUNK_BYTES // row_bytes), rows)
  shard = -(-min(max(inner, _SHARD_BYTES // row_bytes), rows) // inner) * inner
  data = {"name": "bytes", "configuration": {"endian": "little"}}
  checked = [data, {"name": "crc32c"}]
  sharding = {
      "chunk_shape": [inner, *value.shape[1:]], "codecs": checked, "index_codecs": checked,
      "index_location": "end"}
  return ts.open({
      **_spec(path),
      "create": True,
      # Zeros are written like other values: a chunk that is not there is then damage.
      "store_data_equal_to_fill_value": True,
      "metadata": {
          "shape": list(value.shape), "data_type": value.dtype.name, "fill_value": 0,
          "chunk_grid": {
              "name": "regular",
              "configuration": {"chunk_shape": [shard, *value.shape[1:]]}},
          "codecs": [{"name": "sharding_indexed", "configuration": sharding}]},
  }).result()


def _open(path: Folder) -> ts.TensorStore:
  return ts.open({
      **_spec(path),
      "open": True,
      "fill_missing_data_reads": False,
      # A part never changes once it has its name.
      "recheck_cached_metadata": "open", "recheck_cached_data": "open",
  }, read=True, context=_reading()).result()


def _spec(path: Folder) -> dict:
  return {"driver": "zarr3", "kvstore": urls.kvstore(path)}


@functools.cache
def _reading() -> ts.Context:
  """One cache for all readers, bounded: a shuffled epoch would otherwise keep the whole store."""
  return ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})


@contextlib.contextmanager
def _naming_damage(folder: Folder) -> Iterator[None]:
  try:
    yield
  except buckets.FAILURES as error:
    raise _damaged(folder, buckets.reason(error)) from None


def _damaged(folder: Folder, reason: str) -> UserError:
  if urls.is_bucket(folder):  # more often out of reach than damaged
    return UserError(f"{folder}: cannot be read ({reason}); look at the access to the bucket, and "
                     "if the part is damaged remove it and run --stage=extract again")
  return UserError(f"{folder}: damaged ({reason}); remove {folder.parent} and run --stage=extract "
                   "again")


def _sync(folder: str | Path) -> None:
  handle = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)
