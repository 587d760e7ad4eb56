"""`generate`: prompts in, texts and records out. Owns what is text, queue or bucket.

Prompts are grouped into a few length buckets, so the number of compilations is bounded by their
number. Within a bucket rows that finish are refilled from the queue between chunks of rounds.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax import decode, sharding, verify
from spec_jax.drafters import Drafter
from spec_jax.errors import UserError
from spec_jax.records import RowRecords
from spec_jax.sampling import Sampling
from spec_jax.target import Target

Prompt = str | Sequence[dict[str, Any]] | Sequence[int]

BUCKETS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_STOP_ROUNDS = 8  # rounds between two looks at the text when stop strings are given
# Arguments of other frameworks that are refused, and the values that mean nothing.
_NEUTRAL = {
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "min_new_tokens": 0}
_FILL = 4  # batches' worth of prompts below which a bucket joins the next
_CHUNK_ROUNDS = 64  # rounds of a chunk when there is nothing to look at


@dataclasses.dataclass(frozen=True)
class GenerateResult:
  """What `generate` returns, one entry per prompt.

  Attributes:
    texts: the decoded tokens, special ids left out; a stop string is kept.
    tokens: emitted ids, the EOS included.
    finish_reasons: "eos", "stop" or "length".
    logprobs: log probability of each token under the target's raw distribution (temperature 1).
    records: one RowRecords per prompt (METHODS section 4).
    hidden: [n, D] target state behind each token, only with keep_hidden.
    seconds: prefill and decode time spent, compilation included on a first call.
  """

  texts: list[str]
  tokens: list[list[int]]
  finish_reasons: list[str]
  logprobs: list[list[float]]
  records: list[RowRecords]
  hidden: list[np.ndarray] | None = None
  seconds: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Finished:
  """One row that has ended."""

  index: int
  tokens: list[int]
  reason: str
  logprobs: list[float]
  records: RowRecords
  hidden: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Progress:
  """A running row between two rounds: the tokens so far, accepted and emitted of each round."""

  index: int
  tokens: list[int]
  accepted: np.ndarray
  emitted: np.ndarray


def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    *,
    draft_len: int = 5,
    temperature: float | Sequence[float] = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    bias: Mapping[int, float] | None = None,
    rule: str | None = None,
    max_new_tokens: int | Sequence[int] = 64,
    stop: Sequence[str] = (),
    seed: int = 0,
    batch_size: int = 8,
    max_length: int | None = None,
    force_reject: bool = False,
    eos_ids: Sequence[int] | None = None,
    sequence_ids: Sequence[int] | None = None,
    keep_hidden: bool = False,
    on_finish: Callable[[Finished], None] | None = None,
    template_args: dict[str, Any] | None = None,
    **unsupported: float,
) -> GenerateResult:
  """Decodes prompts, speculatively with a drafter, plainly with None.

  Args:
    target: from `load_target`.
    drafter: from `load_drafter`, or None.
    prompts: strings (encoded as they are), chats (lists of {"role", "content"}), or id lists.
    draft_len: K, static; ignored without a drafter.
    temperature: 0 is greedy; one for all or one per prompt.
    top_p: nucleus mass.
    top_k: 0 for all.
    min_p: ids less probable than min_p times the most probable one are out.
    bias: by id, added to the raw logits (-inf bans an id); also at temperature 0.
    rule: "ratio", "block", "coupled" or "typical" (which is not lossless), all of them "greedy" at
      temperature 0; by default "ratio".
    max_new_tokens: budget, one for all or one per prompt.
    stop: strings that end a row; the row keeps the token that completes the string.
    seed: of every random draw; a row's draws depend on the seed and its sequence id alone.
    batch_size: rows decoded together.
    max_length: context limit, the target's by default: a prompt may fill it exactly.
    force_reject: accept no draft (the same-shape baseline of METHODS section 1).
    eos_ids: ids that end a row, the target's by default; () for none.
    sequence_ids: names of the random streams, by default the prompt's index.
    keep_hidden: also return the target's hidden states.
    on_finish: called with each row as it ends, in order of ending.
    template_args: arguments of the chat template.
    **unsupported: repetition_penalty, presence_penalty, frequency_penalty and min_new_tokens: known
      and refused unless they change nothing, since they make the law of a token depend on the
      drafts before it.

  Raises:
    TypeError: an argument that is not known.
    UserError: an empty prompt, a prompt that does not fit, or a setting out of range.
  """
  for name, value in unsupported.items():
    if name not in _NEUTRAL:
      raise TypeError(f"generate() got an unexpected keyword argument {name!r}")
    if value != _NEUTRAL[name]:
      raise UserError(f"{name}={value} is not supported (only {_NEUTRAL[name]}, which is none)")
  run = Run(
      target, drafter, prompts, draft_len=draft_len, temperature=temperature, top_p=top_p,
      top_k=top_k, min_p=min_p, bias=bias, rule=rule, max_new_tokens=max_new_tokens, stop=stop,
      seed=seed, batch_size=batch_size, max_length=max_length, force_reject=force_reject,
      eos_ids=eos_ids, sequence_ids=sequence_ids, keep_hidden=keep_hidden,
      template_args=template_args)
  started = time.perf_counter()
  rows: list[Finished | None] = [None] * len(prompts)
  for row in run.all():
    rows[row.index] = row
    if on_finish is not None:
      on_finish(row)
  text = target.tokenizer.decode if target.tokenizer is not None else lambda t: ""
  return GenerateResult(
      texts=[text(r.tokens) for r in rows],
      tokens=[r.tokens for r in rows],
      finish_reasons=[r.reason for r in rows],
      logprobs=[r.logprobs for r in rows],
      records=[r.records for r in rows],
      hidden=[r.hidden for r in rows] if keep_hidden else None,
      seconds={"total": time.perf_counter() - started, **run.seconds})


def encode_prompt(
    target: Target, prompt: Prompt, index: int | str = 0,
    template_args: dict[str, Any] | None = None) -> list[int]:
  """Token ids of a string, a chat or an id list; `index` is what an error calls the prompt.

  Raises:
    UserError: the prompt is empty, or holds an id outside the vocabulary.
  """
  if not isinstance(prompt, str | Sequence | np.ndarray):
    raise UserError(f"prompt {index} is {prompt!r}, neither a string, a chat nor a list of ids")
  if isinstance(prompt, str):
    ids = target.tokenizer.encode(prompt, add_special=True)
  elif len(prompt) and isinstance(prompt[0], dict):
    ids = target.tokenizer.encode_chat(list(prompt), **(template_args or {}))
  else:
    ids = [int(i) for i in prompt]
  if not ids:
    raise UserError(f"prompt {index} is empty")
  for i in ids:
    if not 0 <= i < target.config.vocab_real:
      raise UserError(f"prompt {index} holds id {i}, outside 0..{target.config.vocab_real - 1}")
  return ids


def bucket(length: int) -> int:
  """The smallest bucket that holds a prompt of this length."""
  for size in BUCKETS:
    if length <= size:
      return size
  return -(-length // BUCKETS[-1]) * BUCKETS[-1]


def stop_cut(text: Callable[[list[int]], str], tokens: list[int], stop: Sequence[str]) -> int:
  """How many tokens are kept when a stop string ends a row, or -1 when none occurs.

  The cut lies behind the first token whose text completes any of the strings.
  """
  if not any(s in text(tokens) for s in stop):
    return -1
  low, high = 1, len(tokens)
  while low < high:
    middle = (low + high) // 2
    low, high = (low, middle) if any(s in text(tokens[:middle]) for s in stop) else (
        middle + 1, high)
  return low


class Run:
  """One decode of many prompts: the queue, the batch and what is looked at between chunks.

  `generate` drains it; a caller that wants rows as they end, or wants to stop early, iterates over
  `all()` or over `bucket()` itself. The arguments are those of `generate`, and on_round: called
  with a `Progress` of each running row after its prefill and after every round; the host then waits
  for every round, which costs speed; and only: the indices of the prompts that are decoded, where
  this is a part of a larger run, whose shapes it keeps, and so also its rounding.
  """

  def __init__(
      self, target, drafter, prompts, *, draft_len, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0,
      bias=None, rule=None, max_new_tokens=64, stop=(), seed=0, batch_size=8, max_length=None,
      force_reject=False, eos_ids=None, sequence_ids=None, keep_hidden=False, template_args=None,
      on_round=None, only=None):
    if isinstance(prompts, str):
      raise UserError("prompts must be a list, also of one string")
    count = len(prompts)
    self.target, self.stop = target, (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in self.stop:
      raise UserError("stop holds an empty string")
    for i in target.tokenizer.control_ids if self.stop else ():
      name = target.tokenizer.id_to_token(i)
      if any(name in text for text in self.stop):
        raise UserError(f"stop holds the control token {name!r}, which is no text; its id {i} can "
                        "be one of eos_ids")
    self.ids = [encode_prompt(target, p, i, template_args) for i, p in enumerate(prompts)]
    limit = target.config.max_position if max_length is None else max_length
    if not 1 <= limit <= target.config.max_position:
      raise UserError(f"max_length={max_length} must be in 1..{target.config.max_position}")
    for i, row in enumerate(self.ids):
      if len(row) > limit:
        raise UserError(f"prompt {i} has {len(row)} tokens and the context holds {limit}")
    budgets = _per_prompt("max_new_tokens", max_new_tokens, count)
    if any(b < 1 for b in budgets):
      raise UserError(f"max_new_tokens={min(budgets)} must be at least 1")
    if drafter is not None and draft_len < 1:
      raise UserError(f"draft_len={draft_len} must be at least 1")
    if drafter is not None and draft_len >= limit:
      raise UserError(f"draft_len={draft_len} must be below the context of {limit} tokens")
    if batch_size < 1:
      raise UserError(f"batch_size={batch_size} must be at least 1")
    # The last token of a row needs no place in the cache, hence the + 1.
    self.budgets = [
        int(min(b, limit - len(row) + 1)) for b, row in zip(budgets, self.ids, strict=True)]
    self.temperatures = _per_prompt("temperature", temperature, count)
    coldest, warmest = min(self.temperatures, default=0.0), max(self.temperatures, default=0.0)
    for heat in self.temperatures:
      if not heat <= float(np.finfo(np.float32).max):
        raise UserError(f"temperature={heat} must be a finite number")
    chosen = verify.choose(rule, coldest, warmest)
    for i in bias or {}:
      if not 0 <= i < target.config.vocab_real:
        raise UserError(f"bias holds id {i}, outside 0..{target.config.vocab_real - 1}")
    if sum(value == -math.inf for value in (bias or {}).values()) >= target.config.vocab_real:
      raise UserError("bias bans every id")
    settings = Sampling(
        chosen.name == "greedy", float(top_p), int(top_k), float(min_p),
        tuple((int(i), float(v)) for i, v in sorted((bias or {}).items())),
        chosen.name == "coupled")
    eos = target.config.eos_ids if eos_ids is None else tuple(eos_ids)
    pad = target.config.pad_id if target.config.pad_id >= 0 else 0
    self.program = decode.Program(
        target.graph, None if drafter is None else drafter.graph,
        0 if drafter is None else draft_len, settings, chosen.name, eos, pad, keep_hidden,
        sharding.mesh_of(target.params))
    self.params = (target.params, None if drafter is None else sharding.place(
        drafter.params, self.program.mesh, target.config.head_dim))
    if not -2**31 <= seed < 2**31:
      raise UserError(f"seed={seed} must fit in 32 bits")
    # Scalars of the host: with several processes an array of one device is no common argument.
    self.seed = np.asarray(seed, np.int32)
    self.force_reject = np.asarray(force_reject, bool)
    self.batch_size, self.on_round = batch_size, on_round
    self.only = frozenset(range(count) if only is None else only)
    self.max_new = max(self.budgets, default=1)
    self.sequence = _per_prompt(
        "sequence_ids", range(count) if sequence_ids is None else sequence_ids, count)
    for i in self.sequence:
      if not 0 <= i < 2**31:
        raise UserError(f"sequence_ids holds {i}, outside 0..2**31 - 1")
    self.seconds = {"prefill": 0.0, "decode": 0.0}
    self._filling = True

  def stop_filling(self) -> None:
    """The bucket that runs begins no further prompt; its rows in flight go on to their end."""
    self._filling = False

  def buckets(self) -> dict[int, list[int]]:
    """Prompt indices by bucket, the small buckets first.

    A bucket of less than a few batches joins the next larger one unless that is more than twice as
    large: padding a few prompts costs less than a compilation and a half-empty batch.
    """
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(self.ids):
      groups.setdefault(bucket(len(row)), []).append(i)
    sizes = sorted(groups)
    for small, large in zip(sizes, sizes[1:], strict=False):
      if len(groups[small]) < _FILL * self.batch_size and large <= 2 * small:
        groups[large] = sorted(groups.pop(small) + groups[large])
    return dict(sorted(groups.items()))

  def all(self) -> Iterator[Finished]:
    """Every prompt, bucket by bucket."""
    for size, members in self.buckets().items():
      yield from self.bucket(size, members)

  def bucket(self, size: int, members: Sequence[int]) -> Iterator[Finished]:
    """The prompts `members` of one bucket through one batch, refilled as rows end."""
    B, mesh = min(self.batch_size, len(members)), self.program.mesh
    R = min(8, max(1, B // 8))  # as many as end before a refill
    if B > 1:  # places that no prompt takes hold finished rows
      B, R = sharding.padded_rows(B, mesh), sharding.padded_rows(R, mesh)
    # With a queue a second, narrower prefill pays for its compilation: most prompts are short. A
    # prompt's width depends on the prompt alone, or else its rounding would depend on its company.
    widths = (_narrow(size), size) if len(members) > B else (size,)
    width = lambda i: min(w for w in widths if w >= len(self.ids[i]))
    members = [i for i in members if i in self.only]
    if not members:
      return
    capacity = size + self.max_new + self.program.draft_len + 1
    state = decode.init_state(self.program, self.params, B, capacity, self.max_new)
    queue, held = list(reversed(members)), [-1] * B
    refill = np.asarray(max(1, B // 8), np.int32)
    rounds = 1 if self.on_round else _STOP_ROUNDS if self.stop else _CHUNK_ROUNDS
    rounds = np.asarray(rounds, np.int32)
    self._filling = True
    while queue or any(i >= 0 for i in held):
      if not self._filling:
        queue.clear()
      free = [b for b in range(B) if held[b] < 0]
      while queue and free:
        wide, group = width(queue[-1]), []
        while queue and len(group) < min(R, len(free)) and width(queue[-1]) == wide:
          group.append(queue.pop())
        state = self._fill(state, wide, dict(zip(free, group, strict=False)), held, R)
        free = free[len(group):]
      self._report(state, held)
      ending = refill if queue else np.asarray(B + 1, np.int32)
      clock = time.perf_counter()
      state = decode.chunk(
          self.program, self.params, state, rounds, ending, self.force_reject)
      state, rows = self._harvest(state, held)
      self.seconds["decode"] += time.perf_counter() - clock
      yield from rows

  def _fill(self, state, size, filled, held, R):
    """Puts the prompts of `filled`, place -> index, into the batch; at most R."""
    clock = time.perf_counter()
    tokens = np.full((R, size), self.program.pad_id, np.int32)
    lengths, allowed, sequence = (np.ones(R, np.int32) for _ in range(3))
    at, heat = np.full(R, len(held), np.int32), np.zeros(R, np.float32)
    for r, (place, i) in enumerate(filled.items()):
      held[place] = i
      tokens[r, :len(self.ids[i])] = self.ids[i]
      lengths[r], allowed[r], at[r] = len(self.ids[i]), self.budgets[i], place
      sequence[r], heat[r] = self.sequence[i], self.temperatures[i]
    state = decode.insert(
        self.program, self.params, state, tokens, lengths, allowed, heat, sequence, self.seed, at)
    state.reason.block_until_ready()
    self.seconds["prefill"] += time.perf_counter() - clock
    return state

  def _report(self, state, held):
    """Calls on_round with every row that is held."""
    if self.on_round is None:
      return
    now = {name: np.array(sharding.fetch(getattr(state, name))) for name in (
        "tokens", "length", "rounds", "accepted", "emitted")}
    for b, i in enumerate(held):
      if i >= 0:
        text = now["tokens"][b, len(self.ids[i]):now["length"][b]]
        done = now["rounds"][b]
        self.on_round(Progress(
            i, text.tolist(), now["accepted"][b, :done], now["emitted"][b, :done]))

  def _harvest(self, state, held):
    """Rows that have ended, by the device or by a stop string; frees their places."""
    reason = np.array(sharding.fetch(state.reason))
    ended = {b: 0 for b in range(len(held)) if held[b] >= 0 and reason[b] != decode.RUNNING}
    if self.stop:
      length, tokens = sharding.fetch((state.length, state.tokens))
      for b, i in enumerate(held):
        if i < 0:
          continue
        answer = tokens[b, len(self.ids[i]):length[b]].tolist()
        cut = stop_cut(self.target.tokenizer.decode, answer, self.stop)
        if cut >= 0:
          ended[b] = cut
          reason[b] = decode.STOP
      state = dataclasses.replace(
          state, reason=sharding.place_rows(jnp.asarray(reason), self.program.mesh))
    if not ended:
      return state, []
    small = sharding.fetch({f: getattr(state, f) for f in (
        "tokens", "length", "prompt", "logprobs", "accepted", "emitted", "proposed", "rounds")})
    rows = []
    for b, cut in ended.items():
      hidden = sharding.fetch(state.hidden[b]) if self.program.keep_hidden else None
      row = {k: v[b] for k, v in small.items()}
      rows.append(_finished(held[b], row, int(reason[b]), cut, hidden))
      held[b] = -1
    return state, rows


def _narrow(size: int) -> int:
  """A third of a prefill's width, a multiple of 32."""
  return -(-size // 96) * 32


def _per_prompt(name: str, value, count: int) -> list:
  """One value for all prompts, or one for each."""
  values = list(value) if isinstance(value, Sequence | np.ndarray) else [value] * count
  if len(values) != count:
    raise UserError(f"{name} has {len(values)} entries for {count} prompts")
  return values


def _finished(index: int, row: dict[str, Any], reason: int, cut: int, hidden) -> Finished:
  count = int(row["length"] - row["prompt"])
  rounds = int(row["rounds"])
  proposed, accepted, emitted = (
      row[name][:rounds].astype(np.int32) for name in ("proposed", "accepted", "emitted"))
  if cut and cut < count:
    count = cut
  if cut:  # rounds behind the stop never happened; the one that holds it is cut
    before = 1 + np.concatenate([[0], np.cumsum(emitted)[:-1]]) if rounds else np.zeros(0, int)
    kept = int(np.sum(before < count))
    proposed, accepted, emitted = proposed[:kept], accepted[:kept], emitted[:kept].copy()
    if kept:
      emitted[-1] = count - before[kept - 1]
  tokens = row["tokens"][row["prompt"]:row["prompt"] + count].tolist()
  return Finished(
      index, tokens, decode.REASONS[reason], row["logprobs"][:count].tolist(),
      RowRecords(proposed, accepted, emitted, decode.REASONS[reason]),
      None if hidden is None else hidden[:count])
