"""The prompts stage: which prompts the target will answer, and which it is measured with.

Prompts come from files (`train_drafter/conversations.py`), or from the embedded templates
(`train_drafter/templates.py`) and, when asked for, from the target itself. The stage removes
duplicates and every training prompt that shares a run of words with an evaluation prompt, and
writes `prompts.jsonl` and `eval.jsonl`.
"""

import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from spec_jax.errors import UserError
from train_drafter import config, manifest
from train_drafter.conversations import PromptFile, prompt_files, read_prompts
from train_drafter.overlap import deduplicate, normalized, overlaps, remove_overlaps, word_ngrams
from train_drafter.progress import Bar
from train_drafter.templates import CATEGORIES, evaluation_prompts, training_prompts

__all__ = [
  "category_counts",
  "deduplicate",
  "overlaps",
  "parse_mix",
  "read_prompts",
  "remove_overlaps",
  "run",
  "select",
  "self_write",
  "word_ngrams",
]

STAGE = "prompts"
PROMPTS_FILE = "prompts.jsonl"
EVAL_FILE = "eval.jsonl"

_WORD = re.compile(r"\w+")
# How many texts `self_write` may ask for, per prompt wanted; some end too late or are duplicates.
_SELF_TRIES = 4


# How many of which category.


def parse_mix(mix: Iterable[str]) -> dict[str, float]:
  """Category weights of entries like "code=2".

  Raises:
    UserError: an entry is no category with a weight, a category comes twice, or all weights are 0.
  """
  weights: dict[str, float] = {}
  for entry in mix:
    name, equals, number = (part.strip() for part in entry.partition("="))
    try:
      weight = float(number)
    except ValueError:
      weight = -1.0
    if not name or not equals or not 0 <= weight < float("inf"):
      raise UserError(f"prompts.mix: {entry!r} is not of the form category=weight")
    if name in weights:
      raise UserError(f"prompts.mix: category {name!r} comes twice")
    weights[name] = weight
  if weights and not any(weights.values()):
    raise UserError("prompts.mix: all weights are 0")
  return weights


def category_counts(
  count: int, weights: Mapping[str, float], available: Mapping[str, int] | None = None
) -> dict[str, int]:
  """Splits a number of prompts by weight.

  Args:
    count: how many in all.
    weights: by category.
    available: upper bounds; what one category lacks is shared among the others by weight.

  Returns:
    Counts by category in the order of `weights`; their sum is `count`, or less when all that is
    available is less.
  """
  result = dict.fromkeys(weights, 0)
  room = {c: (count if available is None else available.get(c, 0)) for c in weights}
  active = {c: w for c, w in weights.items() if w > 0}
  left = count
  while active:
    total = sum(active.values())
    full = [c for c, w in active.items() if left * w / total >= room[c]]
    if not full:
      break
    for category in full:
      result[category] = room[category]
      left -= room[category]
      del active[category]
  # The rest fits below every bound: whole shares, then one more for the largest remainders.
  shares = {c: left * w / sum(active.values()) for c, w in active.items()}
  for category, share in shares.items():
    result[category] = int(share)
  by_remainder = sorted(shares, key=lambda c: int(shares[c]) - shares[c])
  for category in by_remainder[: left - sum(map(int, shares.values()))]:
    result[category] += 1
  return result


def select(
  prompts: Sequence[dict], count: int, weights: Mapping[str, float], seed: int
) -> list[dict]:
  """Draws prompts by category weight and mixes their order.

  Args:
    prompts: to choose from.
    count: how many; 0 for as many as there are.
    weights: by category, a category without one is left out; empty for no regard to categories.
    seed: of the choice and of the order.

  Raises:
    UserError: a category with a weight has no prompt.
  """
  shuffled = _shuffled(prompts, seed)
  if not weights:
    return shuffled[: count or None]
  groups: dict[str, list[dict]] = {}
  for prompt in shuffled:
    groups.setdefault(prompt["category"], []).append(prompt)
  for category, weight in weights.items():
    if weight > 0 and category not in groups:
      raise UserError(
        f"prompts.mix: no prompt of category {category!r}; there are {', '.join(sorted(groups))}"
      )
  sizes = {c: len(group) for c, group in groups.items()}
  counts = category_counts(count or len(prompts), weights, sizes)
  return _shuffled([p for c, n in counts.items() for p in groups.get(c, [])[:n]], seed)


def _shuffled(prompts: Sequence[dict], seed: int) -> list[dict]:
  # Keys from random(), whose sequence Python promises; shuffle() carries no such promise.
  rng = random.Random(f"{seed}/order")
  return [prompts[i] for _, i in sorted((rng.random(), i) for i in range(len(prompts)))]


# Prompts the target writes itself.


def user_header(tokenizer: Any, *, system: str = "", **template_args: Any) -> list[int]:
  """Ids of the chat template up to where the user's text begins.

  Raises:
    UserError: the template shows no user text, or has nothing before it.
  """
  marker = "qzuserqz"
  messages = [{"role": "system", "content": system}] if system else []
  messages.append({"role": "user", "content": marker})
  text = tokenizer.apply_chat(messages, add_generation_prompt=False, **template_args)
  header, found, _ = text.partition(marker)
  if not found:
    raise UserError("prompts.self_written: the chat template does not show the user's text")
  ids = tokenizer.encode(header, add_special=True, parse_special=True)
  if not ids:
    raise UserError("prompts.self_written: the chat template has nothing before the user's text")
  return ids


def self_write(
  target: Any,
  count: int,
  seed: int,
  *,
  temperature: float = 1.0,
  top_p: float = 1.0,
  max_new_tokens: int = 96,
  batch_size: int = 16,
  system: str = "",
  template_args: Mapping[str, Any] | None = None,
  on_row: Callable[[int], None] | None = None,
) -> list[dict]:
  """Lets the target write user turns: it samples from the chat template's user header on.

  A text counts when the target itself ended it within the budget, it has at least three words, no
  word run fills it, and no earlier text is the same.

  Args:
    target: from `spec_jax.load_target`.
    count: how many prompts; fewer come back when too many texts are of no use.
    seed: of the sampling.
    temperature: 1 is the target's own distribution.
    top_p: nucleus mass.
    max_new_tokens: budget of one text; one that reaches it is unfinished and dropped.
    batch_size: rows decoded together.
    system: system text in front.
    template_args: arguments of the chat template.
    on_row: called with the number of tokens of every text as it ends.

  Returns:
    Prompts as on disk, category "general", source "self_written"; the system text is not in them.

  Raises:
    UserError: as `user_header`, or no text was of use.
  """
  import spec_jax

  header = user_header(target.tokenizer, system=system, **(template_args or {}))
  kept: list[dict] = []
  seen: set[str] = set()
  tried, limit = 0, _SELF_TRIES * count
  while len(kept) < count and tried < limit:
    ask = min(max(count - len(kept), min(batch_size, count)), limit - tried)
    out = spec_jax.generate(
      target,
      None,
      [header] * ask,
      temperature=temperature,
      top_p=top_p,
      max_new_tokens=max_new_tokens,
      seed=seed,
      batch_size=batch_size,
      # A stream of its own for every text, the retries included.
      sequence_ids=range(tried, tried + ask),
      on_finish=None if on_row is None else lambda row: on_row(len(row.tokens)),
    )
    tried += ask
    for text, reason in zip(out.texts, out.finish_reasons, strict=True):
      messages = [{"role": "user", "content": text.strip()}]
      key = normalized({"messages": messages})
      if reason != "eos" or not _is_prompt(text) or key in seen or len(kept) == count:
        continue
      seen.add(key)
      kept.append(
        {
          "id": f"self-{seed}-{len(kept):05d}",
          "category": "general",
          "messages": messages,
          "source": "self_written",
        }
      )
  if count and not kept:
    raise UserError(f"prompts.self_written={count}: the target wrote no usable prompt")
  return kept


def _is_prompt(text: str) -> bool:
  words = _WORD.findall(text.casefold())
  return len(words) >= 3 and len(set(words)) > 0.3 * len(words)


# The stage.


def run(cfg: Any, workdir: Path) -> Path:
  """Writes `workdir`/prompts; reuses it when it was made from the same config and data.

  Args:
    cfg: the whole config; `cfg.prompts` and, for self-written prompts, `cfg.target` are read.
    workdir: folder of the run.

  Raises:
    UserError: bad prompt files, a bad mix, or nothing left to train on or to evaluate with.
  """
  workdir, options = Path(workdir), cfg.prompts
  folder = workdir / STAGE
  part = {**config.part(cfg, STAGE), "data": data_hashes(options)}
  target, template_args = None, {}
  if options.self_written:
    target, template_args = _load_target(cfg), config.template_args(cfg)
    part |= {"target": {"dtype": cfg.target.dtype}, "template_args": template_args}
  opened = manifest.begin(
    folder,
    stage=STAGE,
    config=part,
    target=None if target is None else _target_id(target),
  )
  if opened.complete:
    print(f"{STAGE}: {opened.counts.get('prompts', '?')} prompts, reused")
    return folder
  evaluation, eval_duplicates, eval_file = evaluation_set(options)
  write = None
  if target is not None:
    write = lambda: _written_by(target, options, template_args)
  prompts, counts = training_set(options, evaluation, write)
  for file in filter(None, (counts.pop("file"), eval_file)):
    if file.dropped:
      print(file.report())
  _write(folder / PROMPTS_FILE, with_system(prompts, options.system))
  _write(folder / EVAL_FILE, with_system(evaluation, options.system))
  counts |= {
    "prompts": len(prompts),
    "categories": _by_category(prompts),
    "eval": len(evaluation),
    "eval_categories": _by_category(evaluation),
    "eval_duplicates": eval_duplicates,
    "eval_dropped": eval_file.counts() if eval_file else {},
  }
  print(
    f"{STAGE}: kept {len(prompts)} ({_listing(counts['categories'])}); dropped "
    f"{sum(counts['dropped'].values())} bad lines, {counts['duplicates']} duplicates, "
    f"{counts['overlaps']} that share {options.overlap_words} words with an evaluation prompt\n"
    f"{STAGE}: {len(evaluation)} for evaluation ({_listing(counts['eval_categories'])}); dropped "
    f"{sum(counts['eval_dropped'].values())} bad lines, {eval_duplicates} duplicates"
  )
  manifest.finish(folder, opened, counts, "*.jsonl")
  return folder


def evaluation_set(options: Any) -> tuple[list[dict], int, PromptFile | None]:
  """The evaluation prompts, without duplicates, cut to `eval_per_category` in each category.

  Returns:
    The prompts, how many duplicates were left out, and what was read when there is a file.
  """
  file = None
  prompts = evaluation_prompts()
  if options.eval_path:
    file = read_prompts(options.eval_path, max_dropped_share=options.max_dropped_share)
    prompts = file.prompts
  seen: Counter[str] = Counter()
  kept = []
  unique = deduplicate(prompts)
  for prompt in unique:
    seen[prompt["category"]] += 1
    if not options.eval_per_category or seen[prompt["category"]] <= options.eval_per_category:
      kept.append(prompt)
  return kept, len(prompts) - len(unique), file


def training_set(
  options: Any, evaluation: Sequence[dict], write: Callable[[], list[dict]] | None = None
) -> tuple[list[dict], dict[str, Any]]:
  """The training prompts in the order in which the target will answer them.

  Args:
    options: `cfg.prompts`.
    evaluation: the prompts to keep away from.
    write: gives the prompts of the target itself, on top of `count` and outside of `mix`; called
      once everything else is known to be fine.

  Returns:
    The prompts, and counts: file (what was read, or None), dropped, duplicates, overlaps,
    self_written.
  """
  weights = parse_mix(options.mix)
  file = None
  if options.path:
    file = read_prompts(options.path, max_dropped_share=options.max_dropped_share)
    pool = file.prompts
  else:
    if not options.count and not options.self_written:
      raise UserError("prompts.count=0: the embedded templates need a number of prompts")
    unknown = set(weights) - set(CATEGORIES)
    if unknown:
      raise UserError(
        f"prompts.mix: unknown category {min(unknown)!r}; known: {', '.join(CATEGORIES)}"
      )
    pool = training_prompts(
      category_counts(options.count, weights or dict.fromkeys(CATEGORIES, 1.0)), options.seed
    )
  written = write() if write else []
  own = set(map(id, written))
  everything = [*pool, *written]
  unique = deduplicate(everything)
  clean, shared = remove_overlaps(unique, evaluation, options.overlap_words)
  written = [p for p in clean if id(p) in own]
  clean = [p for p in clean if id(p) not in own]
  if options.path:
    clean = select(clean, options.count, weights, options.seed)
  clean = select([*clean, *written], 0, {}, options.seed)
  if not clean:
    raise UserError("prompts: no training prompt is left after removing duplicates and overlaps")
  return clean, {
    "file": file,
    "dropped": file.counts() if file else {},
    "duplicates": len(everything) - len(unique),
    "overlaps": len(shared),
    "self_written": len(written),
  }


def with_system(prompts: Iterable[dict], system: str) -> list[dict]:
  """The prompts, each without a system turn given this one; an empty text changes nothing."""
  if not system:
    return list(prompts)
  turn = {"role": "system", "content": system}
  return [
    p if p["messages"][0]["role"] == "system" else {**p, "messages": [turn, *p["messages"]]}
    for p in prompts
  ]


def _written_by(target: Any, options: Any, template_args: Mapping[str, Any]) -> list[dict]:
  with Bar("prompts", total=options.self_written) as bar:
    return self_write(
      target,
      options.self_written,
      options.seed,
      top_p=options.self_written_top_p,
      system=options.system,
      template_args=template_args,
      # Texts that are of no use are asked for again, so more end than are wanted.
      on_row=lambda tokens: bar.advance(int(bar.done < bar.total), amount=tokens),
    )


def _load_target(cfg: Any) -> Any:
  from train_drafter import placement

  return placement.load_target(cfg, cfg.target.dtype)


def _target_id(target: Any) -> manifest.TargetId:
  tokenizer = target.tokenizer
  return manifest.TargetId(
    target.name, target.weight_hash, tokenizer.hash(), tokenizer.template_hash()
  )


def data_hashes(options: Any) -> dict[str, str]:
  """SHA-256 of the files behind the prompts, so that an edited file makes a new stage."""
  package = resources.files("train_drafter")
  grammars = sorted((package / "grammars").iterdir(), key=lambda file: file.name)
  train = prompt_files(options.path) if options.path else grammars
  test = prompt_files(options.eval_path) if options.eval_path else [package / "eval_prompts.jsonl"]
  return {"train": manifest.files_hash(train), "eval": manifest.files_hash(test)}


def _by_category(prompts: Iterable[dict]) -> dict[str, int]:
  counts = Counter(prompt["category"] for prompt in prompts)
  known = [c for c in CATEGORIES if c in counts]
  return {c: counts[c] for c in [*known, *sorted(set(counts) - set(known))]}


def _listing(counts: Mapping[str, int]) -> str:
  return ", ".join(f"{name} {count}" for name, count in counts.items())


def _write(path: Path, prompts: Iterable[dict]) -> None:
  part = path.with_name(f".{path.name}.{os.getpid()}")
  with open(part, "w", encoding="utf-8") as file:
    for prompt in prompts:
      file.write(json.dumps(prompt, ensure_ascii=False) + "\n")
  part.replace(path)
