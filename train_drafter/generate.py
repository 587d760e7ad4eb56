"""The generate stage: the target answers the training prompts.

Reads `prompts/prompts.jsonl`; writes `generate/part-NNNNN.npz` with the token ids, the length of
each prompt, and the target's final hidden state behind every answered token (the teacher: its
logits are the head times that state), and `responses.jsonl` with the text. A part is written in one
piece; a stage that was stopped goes on with the prompts that no part holds. Of several processes
each answers its share of the prompts and writes parts of its own.
"""

import dataclasses
import itertools
import json
import os
import shutil
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from spec_jax.errors import UserError
from spec_jax.generate import Finished, Run, encode_prompt
from spec_jax.models.config import DecoderConfig
from spec_jax.target import Target, default_mask_id
from train_drafter import config as config_lib
from train_drafter import distributed, manifest, placement
from train_drafter.checkpoint import GracefulExit
from train_drafter.config import Config
from train_drafter.progress import Bar
from train_drafter.prompts import evaluation_set

STAGE = "generate"
_PART_ROWS = 64
# What a token of a prompt costs beside a token of an answer, to share out a time budget.
_PREFILL_COST = 0.25


@dataclasses.dataclass(frozen=True)
class Answer:
  """One answered prompt.

  Attributes:
    job: index of prompt and answer.
    prompt: index of the prompt.
    tokens: [n] prompt and answer.
    prompt_len: tokens of the prompt.
    hidden: [n - prompt_len, D] bfloat16 state, after the final norm, behind each answered token.
    temperature: it was sampled at.
  """

  job: int
  prompt: int
  tokens: np.ndarray
  prompt_len: int
  hidden: np.ndarray
  temperature: float


def target_id(target: Target) -> manifest.TargetId:
  """What the manifests record of a target."""
  return manifest.TargetId(
      target.name, target.weight_hash, target.tokenizer.hash(), target.tokenizer.template_hash())


def read_jsonl(path: Path) -> list[dict]:
  """The objects of a file that this project wrote.

  Raises:
    UserError: it is gone or damaged, with the number of the line.
  """
  rows = []
  try:
    with open(path, encoding="utf-8") as file:
      for line in file:
        rows.append(json.loads(line))
  except (OSError, ValueError) as error:
    reason = getattr(error, "strerror", None) or "damaged"
    raise UserError(f"{path}:{len(rows) + 1}: {reason}; remove {path.parent} and run its stage "
                    "again") from None
  return rows


def run(cfg: Config, workdir: Path) -> Path:
  """Writes `workdir`/generate; goes on where a stopped run was; reuses a finished one.

  Raises:
    UserError: the prompts stage has not run, no prompt is short enough, or the folder belongs to
      another config.
  """
  workdir = Path(workdir)
  folder = workdir / STAGE
  source = manifest.require(workdir / "prompts", "prompts", cfg)
  target = placement.load_target(cfg, cfg.target.dtype)
  opened = manifest.begin(
      folder, stage=STAGE, config=config_lib.part(cfg, "target", "generate"),
      inputs={"prompts": source}, target=target_id(target))
  if opened.complete:
    print(f"{STAGE}: {opened.counts['answers']} answers, reused")
    return folder
  check_later_stages(cfg, target, read_jsonl(workdir / "prompts" / "eval.jsonl"))
  prompts = read_jsonl(workdir / "prompts" / "prompts.jsonl")
  counts = _answer_all(cfg, target, prompts, folder)
  manifest.finish(folder, opened, counts, "part-*.npz")
  print(
      f"{STAGE}: {counts['answers']} answers, {counts['answer_tokens']} tokens; "
      f"{counts['prompt_too_long']} prompts too long, {counts['unanswered']} not reached in time")
  return folder


def check_later_stages(cfg: Config, target: Target, evaluation: Sequence[dict]) -> None:
  """Refuses now, before the long work, what a later stage would refuse for this target.

  Raises:
    UserError: names the field, or the evaluation prompt that is longer than the context.
  """
  check_layers(cfg, target.config)
  if cfg.drafter.kind in ("dflash", "dspark") and cfg.drafter.mask_id < 0:
    default_mask_id(target)
  if cfg.evaluate.path:
    evaluation_set(dataclasses.replace(cfg.prompts, eval_path=cfg.evaluate.path))
  args = config_lib.template_args(cfg)
  for prompt in evaluation:
    length = len(encode_prompt(target, prompt["messages"], template_args=args))
    if length > target.config.max_position:
      raise UserError(f"evaluation prompt {prompt['id']} has {length} tokens and the target's "
                      f"context holds {target.config.max_position}")


def check_layers(cfg: Config, target: DecoderConfig) -> None:
  """Refuses a drafter that copies or taps layers, or names ids, that the target does not have.

  Raises:
    UserError: names the field and what there is, or the target is too shallow.
  """
  from train_drafter.extract import taps_of  # which reads this file

  layers, held, ids = cfg.drafter.init_layers, target.num_layers, target.vocab_real
  # A small_lm of random weights takes no more from them than their number, where all are alike.
  random = (cfg.drafter.init == "random" and cfg.drafter.kind == "small_lm"
            and not target.local_layers)
  if max(layers) >= held and not random:
    raise UserError(f"drafter.init_layers={layers} must name layers 0..{held - 1} of the target")
  taps_of(cfg, held)
  for name in ("draft_len", "longest_draft_len", "more_draft_lens"):
    value = getattr(cfg.evaluate, name)
    if np.max(value, initial=0) >= target.max_position:
      raise UserError(f"evaluate.{name}={value} must be below the target's context of "
                      f"{target.max_position} tokens")
  if cfg.drafter.kind in ("dflash", "dspark") and cfg.drafter.mask_id >= target.vocab_size:
    raise UserError(f"drafter.mask_id={cfg.drafter.mask_id} must be an id of the target, below "
                    f"{target.vocab_size}")
  if cfg.train.sampled_vocab >= min(cfg.drafter.draft_vocab or ids, ids):
    raise UserError(f"train.sampled_vocab={cfg.train.sampled_vocab} must be below the draft "
                    f"vocabulary, of the target's {ids} ids at most")
  if cfg.features.mode == "topk" and cfg.features.topk > ids:
    raise UserError(f"features.topk={cfg.features.topk} is larger than the target's vocabulary of "
                    f"{ids} ids")


def load_answers(folder: Path) -> list[Answer]:
  """Every answer of a finished stage, in the order of the jobs."""
  answers = [a for path in sorted(folder.glob("part-*.npz")) for a in _read_part(path)]
  return sorted(answers, key=lambda a: a.job)


def _answer_all(cfg: Config, target: Target, prompts: Sequence[dict], folder: Path) -> dict:
  options = cfg.generate
  args = config_lib.template_args(cfg)
  ids = [encode_prompt(target, p["messages"], i, args) for i, p in enumerate(prompts)]
  jobs = [(i, a) for a in range(options.answers) for i in range(len(ids))]
  limit = min(options.max_prompt_tokens, target.config.max_position)
  fits = [k for k, (i, _) in enumerate(jobs) if len(ids[i]) <= limit]
  if not fits:
    raise UserError(
        f"generate: all {len(ids)} prompts are longer than "
        f"generate.max_prompt_tokens={options.max_prompt_tokens} or the target's context of "
        f"{target.config.max_position} tokens")
  heat = lambda k: options.temperatures[(jobs[k][0] + jobs[k][1]) % len(options.temperatures)]
  done = {a.job for path in folder.glob("part-*.npz") for a in _read_part(path)}
  parts = _own_parts(folder)
  distributed.agree("generate: answers that are there", len(done))  # before any are added
  todo = distributed.share([i for i, k in enumerate(fits) if k not in done])
  work = Run(
      target, None, [ids[jobs[k][0]] for k in fits], draft_len=0,
      temperature=[heat(k) for k in fits], top_p=options.top_p, top_k=options.top_k,
      max_new_tokens=options.max_new_tokens, seed=options.seed, batch_size=options.batch_size,
      sequence_ids=fits, keep_hidden=True, only=todo)
  _warn_of_space(folder, sum(work.budgets[i] for i in todo) * distributed.count(), target)
  waiting: list[Answer] = []
  with GracefulExit() as stop:
    try:
      with Bar("generate", total=len(done) + len(todo), start=len(done),
               budget=options.budget_s) as bar:
        for row in _within_budget(work, options.budget_s):
          k, asked = fits[row.index], work.ids[row.index]
          waiting.append(Answer(
              k, jobs[k][0], np.asarray(asked + row.tokens, np.int32), len(asked),
              row.hidden.astype(ml_dtypes.bfloat16), heat(k)))
          bar.advance(1, amount=len(row.tokens))
          if len(waiting) == _PART_ROWS:
            _write_part(next(parts), waiting)
            waiting = []
          if stop.requested:
            break
    finally:  # also on an interrupt
      if waiting:
        _write_part(next(parts), waiting)
    # No time-out: a share may take longer than another.
    stop.leave_together(f"{STAGE}: all answers")
  answers = load_answers(folder)
  if distributed.is_primary():
    _write_texts(folder, target, prompts, jobs, answers)
  return {
      "answers": len(answers),
      "answer_tokens": int(sum(len(a.tokens) - a.prompt_len for a in answers)),
      "prompt_tokens": int(sum(a.prompt_len for a in answers)),
      "prompt_too_long": len(jobs) - len(fits),
      "unanswered": len(fits) - len(answers)}


def _warn_of_space(folder: Path, tokens: int, target: Target) -> None:
  """Says so when `tokens` answered tokens, the most there can be, may fill the disk. No refusal:
  how long answers are is not known before."""
  need = tokens * (2 * target.config.hidden_size + 4)
  free = shutil.disk_usage(folder).free
  if need > free and distributed.is_primary():
    print(f"{STAGE}: answers of full length would need {need / 1e9:,.1f} GB and {free / 1e9:,.1f} "
          "GB are free; finished parts stay when the disk is full", flush=True)


def _own_parts(folder: Path) -> Iterator[Path]:
  """Names for the parts that this process adds to those that are there: each has one writer."""
  found = [int(path.stem.removeprefix("part-")) for path in folder.glob("part-*.npz")]
  numbers = itertools.count(max(found, default=-1) + 1 + distributed.index(), distributed.count())
  return map(lambda number: folder / f"part-{number:05d}.npz", numbers)


def _within_budget(work: Run, budget_s: float) -> Iterator[Finished]:
  """Rows as they end. A time budget is shared out over the buckets by the work in each, so that
  running out of time leaves the mix of prompts as it is."""
  groups = work.buckets()
  cost = {
      size: len(members) * (work.max_new + _PREFILL_COST * size)
      for size, members in groups.items()}
  began, spent = time.monotonic(), 0.0
  for size, members in groups.items():
    spent += cost[size]
    for row in work.bucket(size, members):
      yield row
      if budget_s and time.monotonic() - began > budget_s * spent / sum(cost.values()):
        work.stop_filling()  # the rows in flight end: without them long answers would be rarer


def _write_part(path: Path, answers: Sequence[Answer]) -> None:
  hidden = np.concatenate([a.hidden for a in answers]).view(np.uint16)
  part = path.with_name(f".{path.name}.part")
  with open(part, "wb") as file:
    np.savez(
        file, job=np.asarray([a.job for a in answers], np.int32),
        prompt=np.asarray([a.prompt for a in answers], np.int32),
        length=np.asarray([len(a.tokens) for a in answers], np.int32),
        prompt_len=np.asarray([a.prompt_len for a in answers], np.int32),
        temperature=np.asarray([a.temperature for a in answers], np.float32),
        tokens=np.concatenate([a.tokens for a in answers]), hidden_bfloat16=hidden)
    file.flush()
    os.fsync(file.fileno())
  part.replace(path)


def _read_part(path: Path) -> Iterator[Answer]:
  try:
    # Opened here: numpy leaves a file open when it is no archive.
    with open(path, "rb") as file, np.load(file) as found:
      part = {name: found[name] for name in (
          "job", "prompt", "length", "prompt_len", "temperature", "tokens", "hidden_bfloat16")}
  except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
    raise UserError(f"{path}: damaged ({error}); remove {path.parent} and run its stage "
                    "again") from None
  tokens, hidden = part["tokens"], part["hidden_bfloat16"].view(ml_dtypes.bfloat16)
  at = state = 0
  rows = (part[name] for name in ("job", "prompt", "length", "prompt_len", "temperature"))
  for job, prompt, n, p, t in zip(*rows, strict=True):
    yield Answer(int(job), int(prompt), tokens[at:at + n], int(p), hidden[state:state + n - p],
                 float(t))
    at, state = at + n, state + n - p


def _write_texts(folder, target, prompts, jobs, answers) -> None:
  part = folder / ".responses.jsonl.part"
  with open(part, "w", encoding="utf-8") as file:
    for a in answers:
      prompt = prompts[jobs[a.job][0]]
      text = target.tokenizer.decode(a.tokens[a.prompt_len:].tolist())
      row = {"id": prompt["id"], "category": prompt["category"], "temperature": a.temperature,
             "messages": [*prompt["messages"], {"role": "assistant", "content": text}]}
      file.write(json.dumps(row, ensure_ascii=False) + "\n")
  part.replace(folder / "responses.jsonl")
