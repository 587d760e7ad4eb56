"""Timing of decoding: single prompts, and the passes a round consists of.

Called by `train_drafter.evaluate` and by the benchmarks. Everything compiles in a warm-up before a
clock starts, and what is compared is timed in turn, so that a slow moment of the machine hits both
sides.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from spec_jax import decode
from spec_jax import sampling as sampling_lib
from spec_jax.drafters import Drafter
from spec_jax.generate import Finished, Run
from spec_jax.target import Target


@dataclasses.dataclass(frozen=True)
class Single:
  """Decodes one prompt at a time; every prompt of up to `size` tokens runs the same executable.

  Attributes:
    target: the target.
    drafter: None for plain decoding.
    draft_len: K.
    size: width of the prefill, at least the longest prompt.
    max_new_tokens: budget, and the capacity behind the prompt.
    temperature: of the sampling.
    seed: of the sampling.
    eos_ids: ids that end a row; the target's when None.
  """

  target: Target
  drafter: Drafter | None
  draft_len: int
  size: int
  max_new_tokens: int
  temperature: float = 0.0
  seed: int = 0
  eos_ids: tuple[int, ...] | None = None

  def start(self, ids: Sequence[int], budget: int | None = None, force_reject: bool = False) -> Run:
    """The run of one prompt; its buffers have the same shape for every prompt and budget."""
    run = Run(
        self.target, self.drafter, [list(ids)], draft_len=self.draft_len,
        temperature=self.temperature, max_new_tokens=budget or self.max_new_tokens,
        seed=self.seed, batch_size=1, force_reject=force_reject, eos_ids=self.eos_ids)
    run.max_new = self.max_new_tokens
    return run

  def __call__(
      self, ids: Sequence[int], budget: int | None = None, force_reject: bool = False,
  ) -> tuple[Finished, float]:
    """The finished row, and the seconds of its rounds (prefill apart)."""
    row, seconds = self.timed(ids, budget, force_reject)
    return row, seconds["decode"]

  def timed(
      self, ids: Sequence[int], budget: int | None = None, force_reject: bool = False,
  ) -> tuple[Finished, dict[str, float]]:
    """The finished row, and the seconds of its "prefill" and of its rounds ("decode")."""
    run = self.start(ids, budget, force_reject)
    row, = run.bucket(self.size, [0])
    return row, run.seconds

  def warm_up(self, ids: Sequence[int]) -> dict[str, float]:
    """Compiles everything that decoding needs.

    Returns:
      {"s": what a first decode of two tokens took beyond a second one: tracing, compiling or
      reading from the compilation cache, "saved_s": seconds of compiling that this cache saved}.
    """
    saved = []

    def count(event, seconds, **_):
      if event == "/jax/compilation_cache/compile_time_saved_sec":
        saved.append(seconds)

    def once():
      clock = time.perf_counter()
      self(ids, budget=2)
      return time.perf_counter() - clock

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
      first = once()
    finally:
      jax.monitoring.unregister_event_duration_listener(count)
    return {"s": max(first - once(), 0.0), "saved_s": max(sum(saved), 0.0)}

  def prefilled(self, ids: Sequence[int]) -> tuple[decode.Program, Any, decode.State]:
    """Program, parameters and the state behind the prefill of one prompt."""
    run = self.start(ids)
    capacity = self.size + self.max_new_tokens + run.program.draft_len + 1
    state = decode.init_state(run.program, run.params, 1, capacity, self.max_new_tokens)
    tokens = np.full((1, self.size), run.program.pad_id, np.int32)
    tokens[0, :len(ids)] = ids
    one = lambda value, kind=np.int32: np.full(1, value, kind)
    state = decode.insert(
        run.program, run.params, state, tokens, one(len(ids)), one(self.max_new_tokens),
        one(self.temperature, np.float32), one(0), run.seed, one(0))
    return run.program, run.params, state


@functools.partial(jax.jit, static_argnames=("program", "count"), donate_argnames=("cache",))
def pass_loop(program: decode.Program, params: Any, cache: Any, block: Int[Array, "B W"],
              length: Int[Array, " B"], count: int):
  """`count` passes of the target over W tokens, logits included; returns the block and the cache.

  A loop on the device, as in decoding: calling a pass by itself costs milliseconds of its own.
  """
  target, _ = decode.merge(program, params)
  positions = (length - 1)[:, None] + jnp.arange(block.shape[1])

  def body(_, carry):
    block, cache = carry
    out = target.hidden(block, positions, cache)
    # Each pass depends on the one before through all its logits; none is ever above a million.
    used = jnp.max(target.logits(out.hidden), (1, 2)) > 1e6
    return jnp.where(used[:, None], 0, block), out.cache

  return jax.lax.fori_loop(0, count, body, (block, cache))


@functools.partial(jax.jit, static_argnames=("program", "count"))
def draft_loop(program: decode.Program, params: Any, state: decode.State,
               count: int) -> Int[Array, "B S"]:
  """`count` proposals, each of them a function of the one before."""
  def body(_, carry):
    tokens, draft = carry
    now = dataclasses.replace(state, tokens=tokens, draft=draft)
    target, drafter = decode.merge(program, params)
    keys = sampling_lib.round_keys(state.keys, state.length)
    drafts, draft = decode.propose(program, drafter, target, now, keys)
    # Of all drafts: what nothing reads would not be computed (the head behind the last one).
    first = jnp.where(jnp.any(drafts.tokens < 0, 1), 0, tokens[:, 0])
    return tokens.at[:, 0].set(first), draft

  return jax.lax.fori_loop(0, count, body, (state.tokens, state.draft))[0]


def interleaved(pieces: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
  """Seconds of each piece, all of them run in turn `repeats` times after one warm-up each."""
  for piece in pieces.values():
    jax.block_until_ready(piece())
  times: dict[str, list[float]] = {name: [] for name in pieces}
  for _ in range(repeats):
    for name, piece in pieces.items():
      clock = time.perf_counter()
      jax.block_until_ready(piece())
      times[name].append(time.perf_counter() - clock)
  return times


def _passes_behind(
    program: decode.Program, params: Any, state: decode.State, count: int) -> Callable[[int], Any]:
  """width -> `count` passes of the target that wide behind what the rows of the state hold."""
  # The passes donate the target's cache, so what else reads the state has one of its own.
  cache, rows = [jax.tree.map(jnp.copy, state.cache)], state.length.shape[0]

  def run_pass(width):
    block = jnp.broadcast_to(state.tokens[:, :1], (rows, width))
    out, cache[0] = pass_loop(program, params, cache[0], block, state.length, count)
    return out

  return run_pass


def passes(single: Single, ids: Sequence[int], count: int) -> dict[str, Callable[[], Any]]:
  """The passes of a round as pieces for `interleaved`, each `count` times, behind one prompt.

  Returns:
    "plain": one token wide; "verify": K + 1 wide; "draft": proposals, with a drafter.
  """
  program, params, state = single.prefilled(ids)
  run_pass = _passes_behind(program, params, state, count)
  pieces = {"plain": lambda: run_pass(1), "verify": lambda: run_pass(single.draft_len + 1)}
  if single.drafter is not None:
    pieces["draft"] = lambda: draft_loop(program, params, state, count)
  return pieces


def costs(
    singles: Mapping[str, Single], ids: Sequence[int], repeats: int, count: int = 4,
) -> dict[str, dict]:
  """What a proposal and a verification pass cost, in plain steps, per drafter.

  Args:
    singles: by name of the drafter; all with the same target and draft length.
    ids: the prompt whose state is timed.
    repeats: measurements of each piece.
    count: passes of one measurement.

  Returns:
    name -> {"draft_cost", "verify_cost", "plain_step_s"}: ratios of medians, and seconds.
  """
  pieces: dict[str, Callable[[], Any]] = {}
  for name, single in singles.items():
    own = passes(single, ids, count)
    pieces = {"plain": own["plain"], "verify": own["verify"]} | pieces | {name: own["draft"]}
  median = {n: float(np.median(t)) for n, t in interleaved(pieces, repeats).items()}
  return {name: {"draft_cost": median[name] / median["plain"],
                 "verify_cost": median["verify"] / median["plain"],
                 "plain_step_s": median["plain"] / count} for name in singles}


def cost_curve(single: Single, ids: Sequence[int], draft_lens: Sequence[int], repeats: int,
               count: int = 4) -> dict[str, Any]:
  """What a verification pass of every width costs, and a proposal of every draft length.

  Args:
    single: with a drafter; its draft length is at least the longest of `draft_lens`.
    ids: the prompt whose state is timed.
    draft_lens: K of the proposals.
    repeats: measurements of each piece.
    count: passes of one measurement.

  Returns:
    {"plain_step_s": seconds of a pass one token wide, "verify": [v(1), ..., v(K_max + 1)] and
    "draft": [c(K) for K in draft_lens], both in such steps, from medians}.
  """
  program, params, state = single.prefilled(ids)
  run_pass = _passes_behind(program, params, state, count)
  def run_draft(draft_len):
    # What a proposal reads of the state does not depend on K.
    return draft_loop(dataclasses.replace(program, draft_len=draft_len), params, state, count)

  widths = range(1, max(draft_lens) + 2)
  pieces = {f"pass {w}": functools.partial(run_pass, w) for w in widths}
  pieces |= {f"draft {K}": functools.partial(run_draft, K) for K in draft_lens}
  median = {n: float(np.median(t)) for n, t in interleaved(pieces, repeats).items()}
  plain = median["pass 1"]
  return {"plain_step_s": plain / count, "verify": [median[f"pass {w}"] / plain for w in widths],
          "draft": [median[f"draft {K}"] / plain for K in draft_lens]}


def _round_costs(
    program: decode.Program, params: Any, state: decode.State, draft_lens: Sequence[int],
    repeats: int, count: int = 4) -> tuple[list[dict], float]:
  """What a round of each draft length costs in the state at hand, `count` at once.

  Returns:
    For each K {"draft_len", "plain_step_s": seconds of a pass one token wide, "draft_cost",
    "verify_cost": in such steps, from medians}; seconds of the slowest pass.
  """
  run_pass = _passes_behind(program, params, state, count)

  def run_draft(draft_len):
    return draft_loop(dataclasses.replace(program, draft_len=draft_len), params, state, count)

  pieces: dict[Any, Callable[[], Any]] = {"plain": lambda: run_pass(1)}
  for K in draft_lens:
    pieces["verify", K] = functools.partial(run_pass, K + 1)
    pieces["draft", K] = functools.partial(run_draft, K)
  median = {n: float(np.median(t)) for n, t in interleaved(pieces, repeats).items()}
  plain = median["plain"]
  return [{"draft_len": K, "plain_step_s": plain / count, "draft_cost": median["draft", K] / plain,
           "verify_cost": median["verify", K] / plain} for K in draft_lens], max(
               median.values()) / count


def _while_it_fits(sizes: Sequence[int], measure: Callable[[int], tuple[list[dict], float]],
                   longest_s: float) -> list[dict]:
  """Rows of `measure` for sizes in ascending order, until memory or patience ends."""
  out = []
  for size in sorted(sizes):
    try:
      found, slowest = measure(size)
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      break
    out += found
    if slowest > longest_s:
      break
  return out


def batch_costs(single: Single, ids: Sequence[int], batches: Sequence[int],
                draft_lens: Sequence[int], repeats: int, longest_s: float) -> list[dict]:
  """What a round costs when several sequences decode together.

  Args:
    single: with a drafter.
    ids: the prompt whose state is timed, the same in every row.
    batches: numbers of rows; those that memory does not hold are left out.
    draft_lens: K, at most that of `single`.
    repeats: measurements of each piece.
    longest_s: no batch follows one whose longest pass took longer.

  Returns:
    For each batch and K {"batch", and the fields of `_round_costs`}.
  """
  program, params, state = single.prefilled(ids)

  def measure(rows):
    many = jax.tree.map(lambda x: x[jnp.zeros(rows, jnp.int32)], state)
    found, slowest = _round_costs(program, params, many, draft_lens, repeats)
    return [{"batch": rows, **row} for row in found], slowest

  return _while_it_fits(batches, measure, longest_s)


def context_costs(single: Single, contexts: Sequence[int], draft_lens: Sequence[int], repeats: int,
                  longest_s: float) -> list[dict]:
  """What a round of one sequence costs behind so many tokens.

  The caches hold zeros: what a pass costs depends on how much it reads, not on what.

  Args:
    single: with a drafter.
    contexts: tokens in the cache; what target, drafter or memory do not hold is left out.
    draft_lens: K, at most that of `single`.
    repeats: measurements of each piece.
    longest_s: no context follows one whose longest pass took longer.

  Returns:
    For each context and K {"context", and the fields of `_round_costs`}.
  """
  run, room = single.start([0]), max(draft_lens) + 1
  most = min(single.target.config.max_position, single.drafter.module.max_position) - room

  def measure(context):
    state = decode.init_state(run.program, run.params, 1, context + room, 1)
    state = dataclasses.replace(state, length=jnp.full(1, context, jnp.int32))
    found, slowest = _round_costs(run.program, run.params, state, draft_lens, repeats)
    return [{"context": context, **row} for row in found], slowest

  return _while_it_fits([c for c in contexts if c <= most], measure, longest_s)
