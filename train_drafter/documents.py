"""Answers to documents: the teacher's statistics, the held-out part and the draft vocabulary.

Called by train.py; evaluate.py reads the draft vocabulary of a run here.
"""

import dataclasses
import functools
import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from spec_jax import sampling, sharding
from spec_jax.errors import UserError
from spec_jax.target import Target
from train_drafter import distributed
from train_drafter.batches import Document
from train_drafter.config import Config
from train_drafter.generate import Answer
from train_drafter.progress import Bar
from train_drafter.store import StoredDocument

_DRAFT_IDS = "draft_ids.npy"
_SCORE_ROWS = 1024  # teacher states scored at once
# What numpy raises for a file that is cut short or overwritten.
_DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


def prepare(
    answers: Sequence[Answer | StoredDocument], target: Target, cfg: Config, folder: Path,
    upstream: Path | None = None, given: np.ndarray | None = None,
) -> tuple[list[Document], list[Document], dict[str, Any]]:
  """Documents with teacher statistics; chooses the draft vocabulary.

  Args:
    answers: of the stage before.
    target: whose head scores its states.
    cfg: of the run.
    folder: of the stage; gets the draft vocabulary.
    upstream: folder of the answers, which keeps the statistics for every run that learns from them
      (scoring takes as long as many steps); `folder` unless given.
    given: [Vd] draft vocabulary that is not chosen but taken over, of the drafter that training
      starts from.

  Returns:
    The documents to train on, the train.validation or a few more that are held out, and counts.
    All answers to a prompt lie on one side: what is held out is never half seen.

  Raises:
    UserError: there is nothing to train on.
  """
  if not answers:
    raise UserError("train: the generate stage left no answers")
  whole = [(a.prompt, _document(a, cfg)) for a in answers]
  documents, of_prompt, dropped = [], {}, 0
  path = (upstream or folder) / (
      f"teacher-{cfg.train.dtype}-T{cfg.train.teacher_temperature:g}"
      + "-prompts" * cfg.train.prompt_tokens + ".npz")
  if whole[0][1].sparse:
    scored = [_sparse_statistics(d) for _, d in whole]
  else:
    scored = _kept_statistics(path, [d for _, d in whole])
  if not scored:
    scored = list(teacher_statistics([d for _, d in whole], target, cfg))
    if distributed.is_primary():
      _keep_statistics(path, [d for _, d in whole], scored)
  for (prompt, d), (lse, best) in zip(whole, scored, strict=True):
    d = dataclasses.replace(d, logsumexp=lse, best=best).cut(cfg.train.seq_len)
    if d.supervised > 0:
      documents.append(d)
      of_prompt.setdefault(prompt, []).append(d)
    else:
      dropped += 1
  if not documents:
    raise UserError(f"train: none of {len(answers)} answers has a supervised token")
  counts = np.zeros(target.config.vocab_size, np.int64)
  for d in documents:
    np.add.at(counts, d.tokens[d.first + 1:], 1)
    np.add.at(counts, d.best, 1)
  ids = given
  if ids is None:
    ids = choose_vocabulary(counts, cfg.drafter.draft_vocab, target.config)
  coverage = 1.0
  if ids is not None:
    coverage = float(counts[ids].sum() / counts.sum())
  prompts = sorted(of_prompt)
  kept, held = [], []
  for i in np.random.default_rng(cfg.train.seed).permutation(len(prompts)):
    (held if len(held) < cfg.train.validation else kept).extend(of_prompt[prompts[i]])
  if cfg.train.prompt_tokens:  # what is measured is answers in any case
    held = [d for d in map(Document.answer_alone, held) if d.supervised > 0]
    if not held:
      raise UserError(f"train.seq_len={cfg.train.seq_len} cuts away every answer of the "
                      f"train.validation={cfg.train.validation} held out")
  if not kept:
    raise UserError(f"train.validation={cfg.train.validation} leaves none of {len(documents)} "
                    "answers to train")
  with distributed.primary_first("train: draft vocabulary"):
    if ids is not None and not (folder / _DRAFT_IDS).exists():
      _keep_vocabulary(folder, ids)
  return kept, held, {
      "documents": len(documents), "held_out": len(held), "dropped": dropped,
      "draft_vocab_coverage": coverage,
      "supervised": int(sum(d.supervised for d in documents))}


def choose_vocabulary(counts: np.ndarray, size: int, config) -> np.ndarray | None:
  """The `size` most frequent ids, every EOS among them, ascending; None for all of them.

  Ids that never occurred fill the rest from the lowest id (the earliest merges) on.
  """
  if not 0 < size < config.vocab_real:
    return None
  ranked = counts[:config.vocab_real].astype(np.float64)
  ranked[list(config.eos_ids)] = np.inf
  return np.sort(np.argsort(-ranked, kind="stable")[:size]).astype(np.int32)


def _document(source: Answer | StoredDocument, cfg: Config) -> Document:
  """A document whose teacher statistics are still missing."""
  options, nothing = cfg.generate, np.zeros(0, np.float32)
  if isinstance(source, Answer):
    return Document(source.tokens, source.prompt_len - 1, source.hidden, nothing, nothing,
                    temperature=float(source.temperature))
  # An answer's first token is predicted by the prompt's last one.
  # The store does not keep temperatures: single answers took them in the order of their prompts.
  known = options.temperatures[source.prompt % len(options.temperatures)]
  first = 0 if cfg.train.prompt_tokens else source.first_answer - 1
  return Document(source.tokens, first, None, nothing, nothing, source,
                  temperature=float(known) if options.answers == 1 else -1.0)


def _sparse_statistics(document: Document) -> tuple[np.ndarray, np.ndarray]:
  """The same of a document whose log-probabilities are stored: they are normalised already."""
  ids = document.teacher()["topk_ids"]
  return np.zeros(len(ids), np.float32), ids[:, 0].astype(np.int32)


def _kept_statistics(
    path: Path, documents: Sequence[Document]) -> list[tuple[np.ndarray, np.ndarray]]:
  """What an earlier process left of `teacher_statistics` for these documents; empty for nothing,
  also where it is damaged: it is computed and written again."""
  if not path.exists():
    return []
  try:
    with open(path, "rb") as file, np.load(file) as kept:
      lse, best, of = kept["logsumexp"], kept["best"], str(kept["documents"])
  except _DAMAGED:
    return []
  if of != _fingerprint(documents):
    return []
  edges = np.cumsum([d.supervised for d in documents])[:-1]
  return list(zip(np.split(lse, edges), np.split(best, edges), strict=True))


def _keep_statistics(path: Path, documents: Sequence[Document],
                     found: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
  """Writes them whole or not at all, also beside another process that does the same."""
  lse, best = (np.concatenate(x) for x in zip(*found, strict=True))
  part = path.with_name(f".{path.name}.{os.getpid()}.part")
  with open(part, "wb") as file:
    np.savez(file, logsumexp=lse, best=best, documents=_fingerprint(documents))
  part.replace(path)


def _fingerprint(documents: Sequence[Document]) -> str:
  """A hash of the tokens and of what is supervised."""
  digest = hashlib.sha256()
  for d in documents:
    digest.update(np.asarray([len(d.tokens), d.first], np.int64).tobytes())
    digest.update(np.asarray(d.tokens, np.int32).tobytes())
  return digest.hexdigest()


def teacher_statistics(
    documents: Sequence[Document], target: Target, cfg: Config,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """(logsumexp, argmax) of the teacher's logits at every supervised position, by document."""

  heat = cfg.train.teacher_temperature
  count, done = sum(d.supervised for d in documents), []
  waiting = np.zeros((0, target.config.hidden_size), ml_dtypes.bfloat16)
  with Bar("teacher", total=count) as bar:
    for k, d in enumerate(documents):
      waiting = np.concatenate([waiting, d.teacher_states()])
      last = k == len(documents) - 1
      while len(waiting) >= _SCORE_ROWS or (last and len(waiting)):
        part, waiting = waiting[:_SCORE_ROWS], waiting[_SCORE_ROWS:]
        done.append(score(target, part, heat))
        bar.advance(len(part), amount=len(part))
  lse, best = (np.concatenate(x) for x in zip(*done, strict=True)) if done else ((), ())
  edges = np.cumsum([d.supervised for d in documents])[:-1]
  yield from zip(np.split(lse, edges), np.split(best, edges), strict=True)


def score(
    target: Target, hidden: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
  """logsumexp of the logits divided by the temperature, and their argmax, of states [n, D]."""
  found = []
  for start in range(0, len(hidden), _SCORE_ROWS):
    part = hidden[start:start + _SCORE_ROWS]
    full = np.pad(part, ((0, _SCORE_ROWS - len(part)), (0, 0)))
    full = sharding.place_rows(full, target.mesh)
    found.append([x[:len(part)] for x in sharding.fetch(
        _score(target.graph, target.params, full, temperature))])
  return tuple(np.concatenate(x) for x in zip(*found, strict=True))


@functools.partial(jax.jit, static_argnames=("graph",))
def _score(graph, params, hidden, temperature):
  logits = nnx.merge(graph, params).logits(hidden)
  return jax.nn.logsumexp(logits / temperature, -1), sampling.argmax(logits)


def draft_vocabulary(folder: Path) -> np.ndarray | None:
  """The reduced draft vocabulary [Vd] that `prepare` chose, None for the whole vocabulary.

  Raises:
    UserError: the file is damaged.
  """
  path = folder / _DRAFT_IDS
  if not path.exists():
    return None
  try:
    with open(path, "rb") as file:
      return np.load(file)
  except _DAMAGED as error:
    raise UserError(f"{path}: damaged ({error}); remove {folder} and run its stage again") from None


def _keep_vocabulary(folder: Path, ids: np.ndarray) -> None:
  """Writes it whole or not at all: a resumed run goes on with what it finds."""
  part = folder / f".{_DRAFT_IDS}.part"
  with open(part, "wb") as file:
    np.save(file, ids)
    file.flush()
    os.fsync(file.fileno())
  part.replace(folder / _DRAFT_IDS)
