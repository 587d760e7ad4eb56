"""The extract stage: the target reads its answers again and leaves what a drafter learns from.

Reads `generate/`; writes `extract/`, a feature store of parts (see store.py), or with
features.mode=online its manifest alone. A part appears in one piece; a stage that was stopped goes
on with the parts that are missing, and the cut into parts depends on the answers alone, so that it
ends with the same store. Of several processes each writes its share of the parts. train.py reads it
with `open_features`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from spec_jax import sharding
from spec_jax.errors import UserError
from spec_jax.models.decoder import Decoder
from spec_jax.target import Target
from train_drafter import buckets, distributed, manifest, placement, store, urls
from train_drafter import config as config_lib
from train_drafter.buckets import Folder
from train_drafter.checkpoint import GracefulExit
from train_drafter.config import Config
from train_drafter.generate import load_answers, target_id
from train_drafter.progress import Bar

STAGE = "extract"
NOT_STORED = ("features.verify_documents", "features.delete_used")  # fields no store depends on
_SCORE_ROWS = 256  # positions whose logits exist at once
_MASS_DOCUMENTS = 64  # read back for the mean mass that the top k hold
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
  """One answer as it will be stored.

  Attributes:
    job: index of prompt and answer.
    prompt: index of the prompt.
    tokens: [n] int32, prompt and answer.
    prompt_len: tokens of the prompt, below n.
  """

  job: int
  prompt: int
  tokens: np.ndarray
  prompt_len: int


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a document lies in a pass: its tokens start at [row, start]."""

  document: int
  row: int
  start: int


@dataclasses.dataclass(frozen=True)
class Pass:
  """One call of the target.

  Attributes:
    rows: sequences of the call.
    length: tokens of a sequence.
    places: of the documents in it.
  """

  rows: int
  length: int
  places: tuple[Place, ...]


def run(cfg: Config, workdir: Path) -> Path:
  """Writes `workdir`/extract; goes on where a stopped run was; reuses a finished one.

  Raises:
    UserError: the generate stage has not run or left nothing to learn, the target is too shallow
      for the drafter's taps, features.topk is larger than the vocabulary, or the folder belongs to
      another config or is damaged.
  """
  workdir = Path(workdir)
  folder = workdir / STAGE
  source = manifest.require(workdir / "generate", "generate", cfg)
  target = placement.load_target(cfg, cfg.target.dtype)
  taps = taps_of(cfg, target.config.num_layers)
  if cfg.features.mode == "topk" and cfg.features.topk > target.config.vocab_real:
    raise UserError(f"features.topk={cfg.features.topk} is larger than the target's vocabulary of "
                    f"{target.config.vocab_real} ids")
  # The taps and not the drafter: drafters that read the same layers share a store.
  part = config_lib.part(cfg, "features", without=NOT_STORED)
  opened = manifest.begin(
      folder, stage=STAGE, config={**part, "taps": list(taps)}, inputs={"generate": source},
      target=target_id(target))
  if opened.complete:
    print(f"{STAGE}: {opened.counts['tokens']} tokens, reused")
    return folder
  sources, counts = sources_of(load_answers(workdir / "generate"), target.config.max_position)
  counts |= {"mode": cfg.features.mode, "taps": list(taps),
             "hidden_size": target.config.hidden_size}
  if cfg.features.mode == "online":
    manifest.finish(folder, opened, counts)
    print(f"{STAGE}: {counts['tokens']} tokens; features.mode=online keeps no features, the target "
          "runs while the drafter trains")
    return folder
  place = buckets.place(
      folder, "storage.features", cfg.storage.features, opened.run, "part-*")
  counts |= _write_parts(cfg, target, taps, sources, place)
  manifest.finish(folder, opened, counts)
  _print_summary(store.open_store(folder), counts)
  return folder


def taps_of(cfg: Config, num_layers: int) -> tuple[int, ...]:
  """The target layers (0-based, outputs before the final norm) that the drafter reads; () for none.

  Raises:
    UserError: the target is too shallow for them.
  """
  kind = cfg.drafter.kind
  taps: tuple[int, ...] = ()
  named = f"drafter.kind={kind!r}"
  try:
    if kind == "eagle3":
      from spec_jax.drafters import eagle3
      taps = tuple(eagle3.eagle3_taps(num_layers))
    elif kind in ("dflash", "dspark"):
      from spec_jax.drafters import dflash
      named = f"drafter.num_taps={cfg.drafter.num_taps}"
      taps = tuple(dflash.dflash_taps(num_layers, cfg.drafter.num_taps))
  except UserError as error:
    raise UserError(f"{named}: {error}") from None
  # The decoder returns them in this order and each once, whatever it is asked.
  if list(taps) != sorted(set(taps) & set(range(num_layers))):
    raise UserError(f"drafter.kind={kind!r} reads layers {taps}, which must ascend within the "
                    f"target's 0..{num_layers - 1}")
  return taps


def open_features(cfg: Config, workdir: Path, num_layers: int) -> store.Store:
  """The finished store of a run, for the stages behind this one.

  Raises:
    UserError: the stage has not run with this config, or the store was made for other layers.
  """
  folder = Path(workdir) / STAGE
  manifest.require(folder, STAGE, cfg)
  opened = store.open_store(folder)
  taps = taps_of(cfg, num_layers)
  if opened.taps != taps:
    raise UserError(f"{folder}: holds the outputs of layers {opened.taps}, drafter.kind="
                    f"{cfg.drafter.kind!r} reads {taps}; run --stage=extract --overwrite")
  return opened


def sources_of(answers: Sequence[Any], context: int) -> tuple[list[Source], dict[str, int]]:
  """The answers as documents, by job, and counts of what is kept and dropped.

  Args:
    answers: of the generate stage.
    context: positions the target has; what lies beyond is cut off.

  Raises:
    UserError: no answer has a token within the context.
  """
  sources, cut = [], 0
  for a in sorted(answers, key=lambda a: a.job):
    if a.prompt_len < min(len(a.tokens), context):
      sources.append(Source(a.job, a.prompt, a.tokens[:context], a.prompt_len))
      cut += len(a.tokens) > context
  if not sources:
    raise UserError(f"extract: none of {len(answers)} answers has a token within the target's "
                    f"context of {context}")
  return sources, {
      "documents": len(sources), "tokens": sum(len(s.tokens) for s in sources),
      "supervised": sum(len(s.tokens) - s.prompt_len for s in sources), "cut_at_context": cut,
      "dropped_without_answer": len(answers) - len(sources)}


def cut_into_parts(lengths: Sequence[int], shard_tokens: int) -> list[range]:
  """Consecutive documents of at most `shard_tokens` tokens together (a longer one is alone)."""
  parts, first, tokens = [], 0, 0
  for i, n in enumerate(lengths):
    if i > first and tokens + n > shard_tokens:
      parts.append(range(first, i))
      first, tokens = i, 0
    tokens += n
  return [*parts, range(first, len(lengths))] if len(lengths) else parts


def plan_passes(lengths: Sequence[int], rows: int, seq_len: int) -> list[Pass]:
  """Packs documents first-fit into passes of few shapes.

  A pass holds `rows` sequences of `seq_len`; documents that are longer go into sequences of twice
  that, and so on, with so many fewer to a pass.

  Args:
    lengths: tokens of each document.
    rows: sequences of a pass of the smallest shape.
    seq_len: their length.
  """
  buckets: dict[int, list[int]] = {}
  for i, n in enumerate(lengths):
    size = seq_len
    while size < n:
      size *= 2
    buckets.setdefault(size, []).append(i)
  passes = []
  for size, members in sorted(buckets.items()):
    used: list[int] = []  # of each sequence
    places = []
    for i in members:
      row = next((r for r, n in enumerate(used) if n + lengths[i] <= size), len(used))
      if row == len(used):
        used.append(0)
      places.append(Place(i, row, used[row]))
      used[row] += lengths[i]
    height = max(1, rows * seq_len // size)
    for top in range(0, len(used), height):
      own = tuple(dataclasses.replace(p, row=p.row - top)
                  for p in places if top <= p.row < top + height)
      passes.append(Pass(height, size, own))
  return passes


def part_arrays(
    target: Target,
    sources: Sequence[Source],
    taps: tuple[int, ...],
    *,
    rows: int,
    seq_len: int,
    topk: int = 0,
    dtype: str = "bfloat16",
    advance: Callable[[int], None] = lambda tokens: None,
) -> dict[str, np.ndarray]:
  """Runs the target over documents; the arrays of one part, as `store.write_part` takes them.

  Args:
    target: run in its own dtype.
    sources: the documents; none may be longer than the target's context.
    taps: layers (0-based) whose outputs are `features`.
    rows: sequences of a pass.
    seq_len: tokens of a sequence.
    topk: ids kept of each position's distribution in place of the last hidden state; 0 for none.
    dtype: of the states that are kept.
    advance: called with the tokens of each pass that is done.
  """
  lengths = [len(s.tokens) for s in sources]
  offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
  arrays = {
      "tokens": np.concatenate([s.tokens for s in sources]).astype(np.int32),
      "loss_mask": np.concatenate(
          [np.arange(len(s.tokens)) >= s.prompt_len for s in sources]).astype(np.uint8),
      "doc_offsets": offsets,
      "job": np.asarray([s.job for s in sources], np.int32),
      "prompt": np.asarray([s.prompt for s in sources], np.int32)}
  passes = plan_passes(lengths, rows, seq_len)
  forward = lambda *texts: _forward(
      target.params, *sharding.place_rows(texts, target.mesh), graph=target.graph, taps=taps,
      topk=topk, dtype=dtype)
  fill = lambda rows: sharding.padded_rows(rows, target.mesh)
  for done, states in _run_passes(passes, sources, forward, max(target.config.pad_id, 0), fill):
    for name, value in states.items():
      if name not in arrays:
        arrays[name] = np.empty((int(offsets[-1]), *value.shape[1:]), value.dtype)
      for p in done.places:
        at = p.row * done.length + p.start
        arrays[name][offsets[p.document]:offsets[p.document + 1]] = (
            value[at:at + lengths[p.document]])
    advance(sum(lengths[p.document] for p in done.places))
  return arrays


@functools.partial(jax.jit, static_argnames=("graph", "taps"))
def _online(graph: Any, params: Any, taps: tuple[int, ...], tokens, positions, segments):
  """Outputs [R, T, F] of the tapped layers of the target."""
  return nnx.merge(graph, params).hidden(
      tokens, positions, taps=taps, segments=segments).features.astype(jnp.bfloat16)


def with_features(batch: dict, taps: tuple[int, ...], target: Target) -> dict:
  """The batch with the features it lacks: the target runs (features.mode=online)."""
  if not taps or "features" in batch:
    return batch
  texts = sharding.place_rows([batch[n] for n in ("tokens", "positions", "segments")], target.mesh)
  return batch | {"features": _online(target.graph, target.params, taps, *texts)}


def array_names(mode: str, taps: tuple[int, ...]) -> tuple[str, ...]:
  """The arrays that a part of this mode holds."""
  teacher = ("topk_ids", "topk_logprobs", "logsumexp") if mode == "topk" else ("last_hidden",)
  return (*store.INDEX, *(("features",) if taps else ()), *teacher)


def top_logprobs(
    module: Decoder, hidden: Float[Array, "N D"], k: int,
) -> tuple[Int[Array, "N k"], Float[Array, "N k"], Float[Array, " N"]]:
  """Ids and log-probabilities of the k largest logits, and the logsumexp of all, in float32.

  The logits exist for a few positions at a time. Equal logits come by ascending id.
  """
  count = hidden.shape[0]
  chunks = jnp.pad(hidden, ((0, -count % _SCORE_ROWS), (0, 0))).reshape(
      -1, _SCORE_ROWS, hidden.shape[1])

  def score(states):
    logits = module.logits(states)
    logsumexp = jax.nn.logsumexp(logits, -1)
    top, ids = jax.lax.top_k(logits, k)
    return ids, top - logsumexp[:, None], logsumexp

  return tuple(x.reshape(-1, *x.shape[2:])[:count] for x in jax.lax.map(score, chunks))


@functools.partial(jax.jit, static_argnames=("graph", "taps", "topk", "dtype"))
def _forward(params, tokens, positions, segments, *, graph, taps, topk, dtype):
  """The states [B * T, ...] of a packed pass by array name."""
  module = nnx.merge(graph, params)
  out = module.hidden(tokens, positions, taps=taps, segments=segments)
  flat = lambda x: x.reshape(-1, x.shape[-1])
  states = {"features": flat(out.features).astype(_DTYPES[dtype])} if taps else {}
  if topk:
    ids, logprobs, logsumexp = top_logprobs(module, flat(out.hidden), topk)
    return states | {"topk_ids": ids, "topk_logprobs": logprobs, "logsumexp": logsumexp}
  return states | {"last_hidden": flat(out.hidden).astype(_DTYPES[dtype])}


def _run_passes(passes: Sequence[Pass], sources: Sequence[Source], forward: Callable,
                pad_id: int, fill: Callable[[int], int] = lambda rows: rows,
                ) -> Iterator[tuple[Pass, dict[str, np.ndarray]]]:
  """Each pass with its states; the device works on the next one while a pass is copied out.

  `fill` tells how many rows a call has in place of those of a pass; the others hold nothing.
  """
  waiting = None
  for new in passes:
    tokens = np.full((fill(new.rows), new.length), pad_id, np.int32)
    positions = np.zeros_like(tokens)
    segments = np.full_like(tokens, -1)
    for p in new.places:
      own = sources[p.document].tokens
      where = p.row, slice(p.start, p.start + len(own))
      tokens[where], positions[where], segments[where] = own, np.arange(len(own)), p.document
    states = forward(tokens, positions, segments)
    if waiting is not None:
      yield waiting[0], sharding.fetch(waiting[1])
    waiting = new, states
  if waiting is not None:
    yield waiting[0], sharding.fetch(waiting[1])


def _write_parts(cfg: Config, target: Target, taps: tuple[int, ...], sources: Sequence[Source],
                 place: Folder) -> dict[str, Any]:
  """Writes the parts that are missing at a place; returns counts for the manifest."""
  options = cfg.features
  topk = options.topk if options.mode == "topk" else 0
  names = array_names(options.mode, taps)
  lengths = [len(s.tokens) for s in sources]
  width = store.bytes_per_token(
      options.mode, hidden_size=target.config.hidden_size, num_taps=len(taps), topk=topk)
  parts = cut_into_parts(lengths, options.shard_tokens)
  if distributed.is_primary() and not urls.is_bucket(place):
    store.remove_unfinished(place)
  missing = []
  for number, members in enumerate(parts):
    path = store.part_folder(place, number)
    if store.part_exists(path):
      _check_part(path, names, [sources[i] for i in members])
    else:
      missing.append(number)
  tokens_of = lambda numbers: sum(lengths[i] for number in numbers for i in parts[number])
  distributed.agree(f"{STAGE}: parts that are missing", missing)  # before any is written
  store.check_space(place, tokens_of(missing), width, options.mode)
  own = distributed.share(missing)
  with GracefulExit() as stop:
    there = sum(lengths) - tokens_of(missing)
    with Bar("extract", total=there + tokens_of(own), start=there) as bar, \
        contextlib.suppress(_Told):
      def advance(tokens: int) -> None:
        bar.advance(tokens, amount=tokens)
        if stop.requested:
          raise _Told  # a part is short against a run, so what there is of it is dropped

      for number in own:
        arrays = part_arrays(
            target, [sources[i] for i in parts[number]], taps, rows=options.batch_rows,
            seq_len=options.seq_len, topk=topk, advance=advance)
        store.write_part(store.part_folder(place, number), arrays)
    stop.leave_together(f"{STAGE}: all parts")
  return {
      "parts": len(parts), "arrays": list(names), "topk": topk, "bytes_per_token": width,
      "last_hidden": store.NOT_KEPT if topk else store.AFTER_FINAL_NORM}


class _Told(Exception):
  """A signal came."""


def _check_part(path: Folder, names: Sequence[str], sources: Sequence[Source]) -> None:
  """Refuses a part that an earlier process left, unless it holds these documents."""
  found = store.read_part(path, names)
  if len(found) != len(sources) or not all(
      d.job == s.job and d.first_answer == s.prompt_len and np.array_equal(d.tokens, s.tokens)
      for d, s in zip(found, sources, strict=True)):
    raise UserError(f"{path}: holds other documents than this run would write; remove "
                    f"{path.parent} and run --stage=extract again")


def _print_summary(opened: store.Store, counts: dict[str, Any]) -> None:
  layers = f"layers {opened.taps}" if opened.taps else "no layers"
  print(f"{STAGE}: {counts['documents']} documents, {counts['tokens']} tokens "
        f"({counts['supervised']} supervised), {layers}, {counts['bytes_per_token']} bytes a "
        f"token; {counts['cut_at_context']} cut at the context, "
        f"{counts['dropped_without_answer']} dropped with nothing to learn")
  if opened.mode == "topk":
    step = max(1, len(opened.documents) // _MASS_DOCUMENTS)
    tails = [d.topk(max(d.first_answer - 1, 0), len(d.tokens) - 1).tail
             for d in opened.documents[::step]]
    tail = float(np.concatenate(tails).mean())
    print(f"{STAGE}: the {opened.topk} most probable ids hold {1 - tail:.2%} of the probability, "
          f"so the certified bounds on alpha lie at most {tail:.4f} apart on average")
