"""Teacher-forced passes over known responses, and the replay estimate they give.

Called by evaluate.py on the responses that a drafter's own decoding left behind (the arithmetic of
rounds is in `spec_jax.replay`). Every position of a response is scored with the very modules that
decode, by the path that training takes (`train_states`): `small_lm` in one pass for every K,
`eagle3` with its training-time test carried on to the longest K, `dflash` and `dspark` with blocks
at every anchor, once for each K, because a block's width changes its slots. The states of a batch
are held, their logits are not: those exist for one chunk of positions at a time.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from spec_jax import replay, sampling, sharding
from spec_jax.drafters import LEARNED, Drafter
from spec_jax.records import RowRecords
from spec_jax.sampling import GREEDY_BELOW, Sampling
from spec_jax.target import Target

LENGTHS = (1, 3, 5, 7)
RULES = ("greedy", "ratio")  # that the estimate is for
_CHUNK = 64  # positions whose logits exist at once
_ANCHORS = 32  # blocks of a row that run at once
_WIDTH = 64  # rows are as wide as the next multiple of it
_BLOCKS = ("dflash", "dspark")
PACKED = ("small_lm", "eagle3")  # whose training batches give the estimate of every answer


def draft_lens(
    drafter: Drafter, draft_len: int, longest: int = LENGTHS[-1]) -> tuple[int, ...]:
  """The K that are estimated: every one up to `longest` where one pass serves all of them, a few of
  these for block drafters, and `draft_len` in any case; () for a drafter without `train_states`."""
  if drafter.kind not in LEARNED:
    return ()
  if drafter.kind not in _BLOCKS:
    return tuple(range(1, max(longest, draft_len) + 1))
  few = {K for K in LENGTHS if K <= longest} | {draft_len}
  return tuple(sorted(K for K in few if K <= drafter.module.depths))


def estimate(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]], *, temperature: float, lengths: Sequence[int],
    batch_size: int = 8, advance: Callable[[int, int], Any] = lambda answers, tokens: None,
    decoded: tuple[int, Sequence[RowRecords]] | None = None,
) -> dict[str, Any]:
  """What decoding with `drafter` would have done on the target's own answers.

  Args:
    target: in the dtype that decodes.
    drafter: of a kind of LEARNED.
    prompts: token ids.
    answers: what the target gave under `ratio` at this temperature (under `greedy` at 0), the EOS
      included; the first token is the prefill's.
    temperature: of both sides.
    lengths: the K.
    batch_size: answers of one pass.
    advance: called with the number of answers of a batch that is done and of their tokens.
    decoded: K and the records of the decoding that left the answers, to be compared draft by draft;
      at temperature 0.

  Returns:
    {"lengths", "rows", "survival"}: for each answer {"tokens": those emitted by rounds, "rounds":
    E_0 by K, "uniform": sums over starts of sum_k prod (1 - TV) by K, "starts": their numbers, and
    with `decoded` the fields of `spec_jax.replay.decisions`}; and by K the survival s_1...s_K over
    all answers.
  """
  lengths = tuple(lengths)
  rows: list[dict] = [{} for _ in answers]
  reached = {K: np.zeros(K) for K in lengths}
  exposed = {K: np.zeros(K) for K in lengths}
  for i, tables in chances(
      target, drafter, prompts, answers, temperature, lengths, batch_size, advance):
    row = {"tokens": max(len(answers[i]) - 1, 0), "rounds": [], "uniform": [], "starts": []}
    for K, (chance, overlap, margin) in tables.items():
      if decoded is not None and K == decoded[0]:
        row |= replay.decisions(decoded[1][i], chance, margin)
      counts = replay.expected(chance)
      total, starts = replay.uniform_anchor(overlap)
      reached[K] += counts.reached
      exposed[K] += counts.exposed
      for name, value in (("rounds", counts.rounds), ("uniform", total), ("starts", starts)):
        row[name].append(value)
    rows[i] = row
  survival = [np.divide(reached[K], exposed[K], out=np.zeros(K), where=exposed[K] > 0).tolist()
              for K in lengths]
  return {"lengths": list(lengths), "rows": rows, "survival": survival}


def chances(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]], temperature: float, lengths: Sequence[int],
    batch_size: int = 8, advance: Callable[[int, int], Any] = lambda answers, tokens: None):
  """Yields (index, {K: (chance [N, K], overlap [N, K], margin [N, K])}) of every answer, as
  `spec_jax.replay` has them; the arguments are those of `estimate`."""
  module, lengths = drafter.module, tuple(lengths)
  order = sorted(range(len(answers)), key=lambda i: -len(prompts[i]) - len(answers[i]))
  most = -(-max(map(len, answers), default=1) // 16) * 16
  greedy = temperature < GREEDY_BELOW
  columns, at = {}, 0
  for K in lengths:
    columns[K] = at
    at += K if drafter.kind in _BLOCKS else 0
  for begin in range(0, len(order), batch_size):
    members = order[begin:begin + batch_size]
    batch, spans = text_rows([(prompts[i], answers[i]) for i in members], batch_size, most)
    scores = sharding.fetch(_scores(
        target.graph, drafter.graph, (target.params, drafter.params),
        sharding.place_rows(batch, target.mesh), np.float32(temperature), drafter.kind, lengths,
        greedy))
    for i, span in zip(members, spans, strict=True):
      own = [values[span][1:] for values in scores]  # the prefill's token is no draft
      first = len(prompts[i]) + 1  # committed where start 0 drafts
      found = {}
      for K in lengths:
        chance, shared, margin = (_table(x, K, columns[K], drafter.kind) for x in own)
        # Beyond the drafter's context decoding accepts nothing.
        chance[first + np.arange(len(chance)) + K > module.max_position] = 0.0
        found[K] = chance, shared, margin
      yield i, found
    advance(len(members), sum(len(answers[i]) for i in members))


def _table(values: np.ndarray, draft_len: int, column: int, kind: str) -> np.ndarray:
  """[N, K] by start and place of values [N, J] by token and column."""
  N = len(values)
  if kind == "small_lm":
    return replay.by_position(values[:, 0], draft_len) if N else np.zeros((0, draft_len))
  place = np.arange(draft_len)
  token = np.arange(N)[:, None] + place
  found = values[np.minimum(token, max(N - 1, 0)), column + place]
  return np.where(token < N, found.astype(np.float64), 0.0)


def text_rows(texts: Sequence[tuple], rows: int, most: int) -> tuple[dict[str, np.ndarray], list]:
  """One text a row, in the form that `train_states` takes, and the places of each answer.

  `place`, `row` and `index` name the answered tokens one behind another, all rows' together.
  """
  T = -(-max(len(p) + len(a) for p, a in texts) // _WIDTH) * _WIDTH
  M = -(-rows * most // _CHUNK) * _CHUNK
  out = {
      "tokens": np.zeros((rows, T), np.int32),
      "positions": np.broadcast_to(np.arange(T, dtype=np.int32), (rows, T)),
      "segments": np.full((rows, T), -1, np.int32),
      "teacher": np.full((rows, T), -1, np.int32),
      "place": np.zeros(M, np.int32), "weight": np.zeros(M, np.float32),
      "row": np.zeros(M, np.int32), "index": np.zeros(M, np.int32),
      "label": np.zeros(M, np.int32), "first": np.zeros(rows, np.int32),
      "answered": np.zeros(rows, np.int32)}
  spans, m = [], 0
  for r, (prompt, answer) in enumerate(texts):
    P, n = len(prompt), len(answer)
    out["tokens"][r, :P + n] = [*prompt, *answer]
    out["segments"][r, :P + n] = 0
    out["teacher"][r, P - 1:P - 1 + n] = np.arange(m, m + n)
    span = slice(m, m + n)
    out["place"][span] = r * T + P - 1 + np.arange(n)
    out["weight"][span] = 1.0
    out["row"][span], out["index"][span], out["label"][span] = r, np.arange(n), answer
    out["first"][r], out["answered"][r] = P, n
    spans.append(span)
    m += n
  return out, spans


@functools.partial(
    jax.jit, static_argnames=("target_graph", "drafter_graph", "kind", "lengths", "greedy"))
def _scores(
    target_graph: Any, drafter_graph: Any, params: Any, batch: dict[str, Array],
    temperature: Float[Array, ""], kind: str, lengths: tuple[int, ...], greedy: bool,
) -> tuple[Float[Array, "M J"], Float[Array, "M J"], Float[Array, "M J"]]:
  """What `score` gives at every answered token, by column of `block_states`."""
  target = nnx.merge(target_graph, params[0])
  module = nnx.merge(drafter_graph, params[1])
  read = target.hidden(
      batch["tokens"], batch["positions"], taps=module.taps, segments=batch["segments"])
  batch = batch | {"features": read.features}
  states = block_states(module, kind, batch, target, lengths)
  teacher = read.hidden.reshape(-1, read.hidden.shape[-1])[batch["place"]]
  heat = jnp.full(batch["place"].shape, temperature)
  return score(module, target, states, teacher, batch["label"], heat, batch["weight"], greedy)


def score(
    module: Any, target: Any, states: Float[Array, "M J E"], teacher: Float[Array, "M D"],
    labels: Int[Array, " M"], temperatures: Float[Array, " M"], used: Float[Array, " M"],
    greedy: bool) -> tuple[Float[Array, "M J"], Float[Array, "M J"], Float[Array, "M J"]]:
  """min(1, q(x)/p(x)) and sum min(p, q) of every state, and under greedy by how much the logit of x
  exceeds the best other one (0 otherwise); some positions at a time.

  Args:
    module: the drafter.
    target: lends the head.
    states: of the drafter, J for each position.
    teacher: the target's states that predict the same tokens.
    labels: x.
    temperatures: of both sides; 0 for certain choices.
    used: 0 for positions that hold nothing.
    greedy: every temperature is 0: no probabilities are made.
  """
  ids = module.draft_ids[...] if hasattr(module, "draft_ids") else None
  trained = module.head_parameters()
  settings = Sampling(greedy)

  def one(part):
    hidden, teacher, label, heat = part
    rows = target.logits(teacher)
    best = sampling.argmax(rows)
    p = None if greedy else sampling.probabilities(rows, settings, heat)

    def column(state):
      logits = module.masked(module.train_logits(state, target, trained), target)
      if greedy:
        draft = module.full_id(sampling.argmax(logits))
        return draft == label, draft == best, _margin(logits, label, ids, module)
      accept, overlap = _ratio(
          p, sampling.probabilities(logits, settings, heat), label, ids, module)
      return accept, overlap, jnp.zeros_like(overlap)

    return jax.tree.map(
        lambda x: x.T.astype(jnp.float32), jax.lax.map(column, hidden.transpose(1, 0, 2)))

  def chunk(part):
    used, part = part
    shapes = jax.eval_shape(one, part)
    nothing = lambda part: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.cond(jnp.any(used > 0), one, nothing, part)

  count = len(labels)
  pad = lambda x: jnp.pad(x, ((0, -count % _CHUNK), *[(0, 0)] * (x.ndim - 1)))
  split = lambda x: pad(x).reshape(-1, _CHUNK, *x.shape[1:])
  out = jax.lax.map(chunk, jax.tree.map(split, (used, (states, teacher, labels, temperatures))))
  return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[:count], out)


def _margin(logits, label, ids, module):
  """The logit of `label` less the best of the others; logits [c, Vd] over the draft vocabulary."""
  place = label if ids is None else module.draft_place[...][label]
  own = place[:, None] == jnp.arange(logits.shape[1])
  best = lambda where: jnp.max(logits, -1, initial=-jnp.inf, where=where)
  return best(own) - best(~own)


def _ratio(p, q, label, ids, module):
  """min(1, q(x)/p(x)) and sum min(p, q); q [c, Vd] over the draft vocabulary, p [c, V]."""
  at = lambda x, place: jnp.take_along_axis(x, place[:, None], 1)[:, 0]
  place = label if ids is None else module.draft_place[...][label]
  shared = p[:, :q.shape[1]] if ids is None else p[:, ids]
  known = place < q.shape[1]  # what is not in the draft vocabulary can only come from the target
  qx = jnp.where(known, at(q, jnp.where(known, place, 0)), 0.0)
  px = at(p, label)
  # A token of probability zero, by rounding or at temperature 0, was a draft if q drafts it.
  accept = jnp.where(qx < px, qx / jnp.where(px > 0, px, 1.0), (qx > 0).astype(qx.dtype))
  overlap = jnp.sum(jnp.minimum(shared, q[:, :shared.shape[1]]), -1)
  return accept, jnp.minimum(overlap, 1.0)  # the sum of float32 may exceed it


def block_states(
    module: Any, kind: str, batch: dict[str, Array], target: Any, lengths: tuple[int, ...],
) -> Float[Array, "M J E"]:
  """The states that predict every answered token: one (small_lm), one for each place of a draft
  (eagle3), or one for each place of a draft of each K (block drafters).

  `module` is a merged copy, so what training has set on it may be set for the K here.
  """
  if kind == "eagle3":
    module.steps = max(lengths)
  if kind not in _BLOCKS:
    return module.train_states(batch, target, jax.random.key(0)).hidden
  columns = []
  for K in lengths:
    module.block_size = K + module.silent
    blocks = _blocks(module, batch, target, K)
    for j in range(K):  # a token's start is j + 1 tokens before it
      columns.append(blocks[batch["row"], jnp.maximum(batch["index"] - 1 - j, 0), j])
  return jnp.stack(columns, 1)


def _blocks(module, batch, target, draft_len) -> Float[Array, "R A K E"]:
  """States of the blocks at every answered token, a few anchors of each row at a time."""
  R, T = batch["tokens"].shape
  count = batch["place"].shape[0] // R
  count = -(-count // _ANCHORS) * _ANCHORS
  starts = jnp.arange(count).reshape(-1, _ANCHORS)

  def some(index: Int[Array, " C"]):
    place = jnp.minimum(batch["first"][:, None] + index, T - 1)
    live = index < batch["answered"][:, None] - 1
    hidden = module.train_states(batch, target, None, (place, live)).hidden
    return hidden.reshape(R, _ANCHORS, draft_len, -1)

  out = jax.lax.map(some, starts)  # [count / C, R, C, K, E]
  return out.transpose(1, 0, 2, 3, 4).reshape(R, count, draft_len, -1)


# The training-time metric.


def packed_chances(
    module: Any, target: Any, batch: dict[str, Array], draft_len: int, known: Any = None,
) -> Float[Array, "M J"]:
  """min(1, q(x)/p(x)) of every supervised position of a packed batch (see `Packer`), from the
  teacher's stored states: the target does not run. J is 1 (small_lm) or K (eagle3).

  `known` are the `train_states` of the batch, which serve every K of small_lm; eagle3 trains with
  other steps and runs again.
  """
  if known is not None and module.kind == "small_lm":
    states = known.hidden
  else:
    states = block_states(module, module.kind, batch, target, (draft_len,))
  label = jnp.roll(batch["tokens"].reshape(-1), -1)[batch["place"]]
  heat = jnp.maximum(batch["temperature"], 0.0)
  teacher = batch["hidden"].astype(states.dtype)
  return score(module, target, states, teacher, label, heat, batch["weight"], False)[0]


def packed_rounds(
    chances: np.ndarray, batch: Mapping[str, Any], kind: str, draft_len: int,
) -> dict[str, np.ndarray]:
  """Tokens and expected rounds [2] of the answers of a packed batch, by name: "replay_tau" of what
  was sampled warm, "replay_tau_T0" of greedy answers; those of unknown temperature are left out."""
  T = batch["segments"].shape[1]
  place = batch["place"][batch["weight"] > 0]
  owner = place // T * (T + 1) + batch["segments"].reshape(-1)[place]
  edges = np.flatnonzero(np.diff(owner, prepend=-1, append=-1))
  sums: dict[str, np.ndarray] = {}
  for begin, end in zip(edges, edges[1:], strict=False):
    heat = float(batch["temperature"][begin])
    if heat < 0 or end - begin < 2:
      continue
    name = "replay_tau_T0" if heat < GREEDY_BELOW else "replay_tau"
    table = _table(chances[begin + 1:end], draft_len, 0, kind)
    found = np.array([end - begin - 1, replay.expected_rounds(table)])
    sums[name] = sums.get(name, 0.0) + found
  return sums
