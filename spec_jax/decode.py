"""The decoding loop on the device: prefill, the draft -> verify -> commit round, the while_loop.

State is one frozen pytree; a round is a pure function of it; a chunk of rounds is one
`lax.while_loop` inside one `jit` whose state buffers are donated. Called by `generate.py`, which
owns everything that is text or queue.

Invariant between rounds, for each row: `length` tokens are committed, all but the last of them
have keys and values in the target's cache, and the last one is the first input of the next pass.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from spec_jax import sampling as sampling_lib
from spec_jax import sharding, verify
from spec_jax.models.cache import init_cache, insert_rows
from spec_jax.sampling import Sampling
from spec_jax.types import Cache, Context, Proposal, pytree

RUNNING, EOS, LENGTH, STOP = range(4)  # why a row ended; STOP is decided on the host
REASONS = ("running", "eos", "length", "stop")


@dataclasses.dataclass(frozen=True)
class Program:
  """Everything static of a decode; one compiled chunk per Program and state shape.

  Attributes:
    target: graph definition of the target decoder.
    drafter: graph definition of the drafter, None for plain decoding (draft_len 0).
    draft_len: K.
    sampling: the transforms.
    rule: name of the verification rule.
    eos_ids: ids that end a row.
    pad_id: id of the places that hold nothing.
    keep_hidden: also keep the target's final hidden state behind each emitted token.
    mesh: devices that the parameters and the rows are divided over; None for one device.
  """

  target: nnx.GraphDef
  drafter: nnx.GraphDef | None
  draft_len: int
  sampling: Sampling
  rule: str
  eos_ids: tuple[int, ...]
  pad_id: int
  keep_hidden: bool = False
  mesh: Mesh | None = None


@pytree
class State:
  """A batch of ragged rows in flight. S is the buffer capacity, M the most new tokens of a row.

  Attributes:
    tokens: [B, S] committed ids, pad beyond the length.
    length: [B] committed tokens.
    prompt: [B] tokens of them that are the prompt.
    budget: [B] tokens the row may emit in all.
    temperature: [B] sampling temperature; below sampling.GREEDY_BELOW is greedy.
    reason: [B] RUNNING, or why the row ended.
    keys: [B] one random key per row, folded from the sequence id.
    logprobs: [B, M + W] log probability of each emitted token under the raw target logits.
    hidden: [B, M + W, D] state that predicted each emitted token; [B, 0, D] when not kept.
    proposed, accepted, emitted: [B, M] one entry per round.
    rounds: [B] rounds so far.
    cache: the target's.
    draft: the drafter's state.
  """

  tokens: Int[Array, "B S"]
  length: Int[Array, " B"]
  prompt: Int[Array, " B"]
  budget: Int[Array, " B"]
  temperature: Float[Array, " B"]
  reason: Int[Array, " B"]
  keys: Array
  logprobs: Float[Array, "B E"]
  hidden: Float[Array, "B E2 D"]
  proposed: Int[Array, "B M"]
  accepted: Int[Array, "B M"]
  emitted: Int[Array, "B M"]
  rounds: Int[Array, " B"]
  cache: Cache
  draft: Any


def init_state(program: Program, params: Any, rows: int, capacity: int, max_new: int) -> State:
  """A batch whose rows are all finished, to be filled by `insert`.

  Args:
    program: static settings.
    params: (target params, drafter params), as `chunk` takes them.
    rows: B.
    capacity: S, at least the longest prompt plus max_new plus K + 1.
    max_new: M.
  """
  if program.mesh is None:
    return _empty(program, params, rows, capacity, max_new)
  # Compiled, so that every device makes its own part and none ever holds the whole cache.
  return _empty_on_mesh(program, params, rows, capacity, max_new)


@functools.partial(jax.jit, static_argnames=("program", "rows", "capacity", "max_new"))
def _empty_on_mesh(program, params, rows, capacity, max_new):
  return sharding.pin_rows(_empty(program, params, rows, capacity, max_new), program.mesh)


def _empty(program: Program, params: Any, rows: int, capacity: int, max_new: int) -> State:
  target, drafter = merge(program, params)
  W = program.draft_len + 1
  ints = lambda *shape: jnp.zeros(shape, jnp.int32)
  dtype = target.embed[...].dtype
  kept = max_new + W if program.keep_hidden else 0
  return State(
      tokens=jnp.full((rows, capacity), program.pad_id, jnp.int32),
      length=ints(rows) + 1, prompt=ints(rows) + 1, budget=ints(rows),
      temperature=jnp.zeros(rows, jnp.float32), reason=ints(rows) + LENGTH,
      keys=sampling_lib.row_keys(0, ints(rows)),
      logprobs=jnp.zeros((rows, max_new + W), jnp.float32),
      hidden=jnp.zeros((rows, kept, target.config.hidden_size), dtype),
      proposed=ints(rows, max_new), accepted=ints(rows, max_new), emitted=ints(rows, max_new),
      rounds=ints(rows),
      cache=init_cache(target.config, rows, capacity, dtype),
      draft=() if drafter is None else drafter.init_state(rows, capacity))


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def insert(
    program: Program,
    params: Any,
    state: State,
    tokens: Int[Array, "R P"],
    lengths: Int[Array, " R"],
    budgets: Int[Array, " R"],
    temperatures: Float[Array, " R"],
    sequence: Int[Array, " R"],
    seed: Int[Array, ""],
    places: Int[Array, " R"],
) -> State:
  """Prefills R prompts and puts them into rows `places` of the batch (row refill).

  Each row leaves with its first token committed: that token comes from the prefill and belongs to
  no round. A place >= B is dropped, which is how a group of fewer than R prompts is padded.
  """
  target, drafter = merge(program, params)
  R, P = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(P), (R, P))
  dtype = target.embed[...].dtype
  out = target.hidden(
      tokens, positions, init_cache(target.config, R, P, dtype),
      taps=() if drafter is None else drafter.taps, attend_length=P)
  last = jnp.take_along_axis(out.hidden, (lengths - 1)[:, None, None], 1)
  logits = target.logits(last)
  keys = sampling_lib.row_keys(seed, sequence)
  nothing = Proposal(jnp.zeros((R, 0), jnp.int32), None)
  first = _verdict(
      program, logits, nothing, sampling_lib.round_keys(keys, lengths), 0, temperatures).next_token

  put = lambda big, small: big.at[places].set(small.astype(big.dtype), mode="drop")
  row = jnp.full((R, state.tokens.shape[1]), program.pad_id, jnp.int32).at[:, :P].set(
      jnp.where(positions < lengths[:, None], tokens, program.pad_id))
  row = row.at[jnp.arange(R), lengths].set(first)
  ended = jnp.where(_is_eos(program, first), EOS, jnp.where(budgets <= 1, LENGTH, RUNNING))
  zeros = jnp.zeros((R, state.proposed.shape[1]), jnp.int32)
  logprobs = jnp.zeros((R, state.logprobs.shape[1])).at[:, 0].set(
      sampling_lib.log_probability(logits, first[:, None])[:, 0])
  hidden = state.hidden
  if program.keep_hidden:
    hidden = hidden.at[places, 0].set(last[:, 0].astype(hidden.dtype), mode="drop")
  draft = state.draft
  if drafter is not None:
    part = drafter.observe(
        drafter.init_state(R, P), tokens, out.features, positions,
        positions < lengths[:, None], target)
    draft = drafter.insert(draft, part, places)
  return sharding.pin_rows(dataclasses.replace(
      state,
      tokens=put(state.tokens, row), length=put(state.length, lengths + 1),
      prompt=put(state.prompt, lengths), budget=put(state.budget, budgets),
      temperature=put(state.temperature, temperatures),
      reason=put(state.reason, ended), keys=state.keys.at[places].set(keys, mode="drop"),
      logprobs=put(state.logprobs, logprobs), hidden=hidden,
      proposed=put(state.proposed, zeros), accepted=put(state.accepted, zeros),
      emitted=put(state.emitted, zeros), rounds=put(state.rounds, jnp.zeros(R, jnp.int32)),
      cache=insert_rows(state.cache, out.cache, places), draft=draft), program.mesh)


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def chunk(
    program: Program,
    params: Any,
    state: State,
    max_rounds: Int[Array, ""],
    max_finished: Int[Array, ""],
    force_reject: Bool[Array, ""],
) -> State:
  """Runs rounds until `max_rounds` are done, no row runs, or `max_finished` rows have ended.

  Args:
    program: static settings.
    params: (target params, drafter params).
    state: the batch; its buffers are donated.
    max_rounds: bound on the rounds of this call.
    max_finished: return early once so many rows have ended in this call, so that the host can
      refill them.
    force_reject: True accepts no draft: the same-shape baseline, in the same executable.
  """
  running = jnp.sum(state.reason == RUNNING)

  def more(carry):
    done, state = carry
    left = jnp.sum(state.reason == RUNNING)
    return (done < max_rounds) & (left > 0) & (running - left < max_finished)

  def body(carry):
    done, state = carry
    return done + 1, one_round(program, params, state, force_reject)

  return sharding.pin_rows(
      jax.lax.while_loop(more, body, (jnp.int32(0), state))[1], program.mesh)


def one_round(program: Program, params: Any, state: State, force_reject: Array) -> State:
  """Draft, verify, commit: a pure function of the state."""
  target, drafter = merge(program, params)
  K = program.draft_len
  keys = sampling_lib.round_keys(state.keys, state.length)
  proposal, draft = propose(program, drafter, target, state, keys)
  limit = jnp.where(force_reject, 0, jnp.full_like(state.length, K))
  if drafter is not None:  # past its own context the drafter's guesses are not used
    limit = jnp.where(state.length + K <= drafter.max_position, limit, 0)

  last = jnp.take_along_axis(state.tokens, (state.length - 1)[:, None], 1)
  block = jnp.concatenate([last, proposal.tokens], 1)
  positions = (state.length - 1)[:, None] + jnp.arange(K + 1)
  out = target.hidden(
      block, positions, state.cache, taps=() if drafter is None else drafter.taps)
  logits = target.logits(out.hidden)
  verdict = _verdict(program, logits, proposal, keys, limit, state.temperature)

  if drafter is not None:
    valid = jnp.arange(K + 1) <= verdict.accepted[:, None]
    draft = drafter.after_round(draft, block, out.features, positions, valid, target)
  state = dataclasses.replace(state, cache=out.cache, draft=draft)
  return _commit(program, state, proposal, verdict, logits, out.hidden, limit)


def _commit(program, state, proposal, verdict, logits, hidden, limit) -> State:
  """Appends the accepted drafts and the next token, cut at EOS and at the budget."""
  B, W = state.length.shape[0], program.draft_len + 1
  slots = jnp.arange(W)
  accepted = verdict.accepted[:, None]
  drafted = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
  block = jnp.where(slots < accepted, drafted, verdict.next_token[:, None])
  count = verdict.accepted + 1
  is_eos = _is_eos(program, block) & (slots < count[:, None])
  to_eos = jnp.where(is_eos.any(1), jnp.argmax(is_eos, 1) + 1, W + 1)
  left = state.budget - (state.length - state.prompt)
  running = state.reason == RUNNING
  count = jnp.where(running, jnp.minimum(jnp.minimum(count, to_eos), left), 0)
  reason = jnp.where(to_eos <= count, EOS, jnp.where(count >= left, LENGTH, RUNNING))
  block = jnp.where(slots < count[:, None], block, program.pad_id)

  at = state.length - state.prompt
  write = jax.vmap(jax.lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))
  logprobs = sampling_lib.log_probability(logits, block)
  # A finished row writes one pass of padding behind its text and keeps its own values.
  kept = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, W))(
      state.logprobs, at)
  new = slots < count[:, None]
  states = state.hidden
  if program.keep_hidden:
    states = write(states, hidden.astype(states.dtype), at, 0)
  record = lambda table, value: table.at[jnp.arange(B), state.rounds].set(
      jnp.where(running, value, 0), mode="drop")
  return dataclasses.replace(
      state,
      tokens=write(state.tokens, block, state.length, 0),
      length=state.length + count,
      reason=jnp.where(running, reason, state.reason),
      logprobs=write(state.logprobs, jnp.where(new, logprobs, kept), at, 0),
      hidden=states,
      proposed=record(state.proposed, limit),
      accepted=record(state.accepted, verdict.accepted),
      emitted=record(state.emitted, count),
      rounds=state.rounds + running)


def propose(program, drafter, target, state, keys):
  """The drafts of one round for every row, and the drafter's new state."""
  if drafter is None:
    return Proposal(jnp.zeros((state.length.shape[0], 0), jnp.int32), None), state.draft
  context = Context(state.tokens, state.length, keys, state.temperature)
  return drafter.propose(state.draft, context, program.draft_len, program.sampling, target)


def _verdict(program, logits, proposal, keys, limit, temperature):
  rule = verify.DRAFTS if program.rule == verify.DRAFTS.name else verify.RULES[program.rule]
  if rule.on_logits:
    rows = sampling_lib.biased(logits, program.sampling)
  else:
    rows = sampling_lib.probabilities(logits, program.sampling, temperature)
  return rule.apply(rows, proposal, keys, jnp.broadcast_to(limit, logits.shape[:1]))


def _is_eos(program: Program, tokens: Array) -> Array:
  hit = jnp.zeros(tokens.shape, bool)
  for i in program.eos_ids:
    hit = hit | (tokens == i)
  return hit


def merge(program: Program, params: Any):
  """The target and the drafter (None for plain decoding) as modules."""
  target, drafter = params
  merged = None if program.drafter is None else nnx.merge(program.drafter, drafter)
  return nnx.merge(program.target, target), merged
