"""Whether replay and real decoding agree, and what rounding may explain where they do not.

At temperature 0 replay is exact hopping, so it has to give the rounds of the decoding itself, but
for ties: a drafter of bfloat16 computes a draft in a pass of one or two tokens and the replay in a
pass over the whole text, and where its two best logits are close the two may choose differently.
`forecast.py` compares draft by draft (`spec_jax.replay.decisions`); here is what counts as close,
measured like the tolerance of the identity certificate, and the verdict.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from spec_jax import decode, sampling, sharding
from spec_jax.drafters import Drafter
from spec_jax.identity import TOLERANCE_CAP, WIDTH
from spec_jax.sampling import Sampling
from spec_jax.target import Target
from train_drafter import replay

ONE_SIDED = 1e-3  # probability of so lopsided differences below which rounding is no explanation
_NEXT = 16  # ids behind the best one that could take its place
_ROWS = 8  # prompts whose drafts the rounding is measured with
_WARM = Sampling(greedy=False)


def rounding(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], draft_len: int) -> float:
  """The largest difference of a margin, from the best logit to one of the next `_NEXT`, between the
  passes that draft while decoding and the pass over the whole text, on the same tokens.

  Args:
    target: in the dtype that is judged.
    drafter: of a kind of LEARNED.
    prompts: token ids; drafts are drawn behind each at temperature 1, so that the text is none of
      the greedy answers that are judged.
    draft_len: K.

  Returns:
    NaN when a probability is no number.
  """
  rows = sharding.padded_rows(_ROWS, target.mesh)
  longest = sorted(prompts, key=len)[-rows:]
  prompts = [longest[r % len(longest)] for r in range(rows)]
  width = -(-max(map(len, prompts)) // WIDTH) * WIDTH
  tokens, lengths = np.zeros((rows, width), np.int32), np.array(list(map(len, prompts)), np.int32)
  for row, prompt in zip(tokens, prompts, strict=True):
    row[:len(prompt)] = prompt
  program = decode.Program(
      target.graph, drafter.graph, draft_len, _WARM, "ratio", (), 0, mesh=target.mesh)
  params = target.params, drafter.params
  state = decode.init_state(program, params, rows, width + draft_len + 3, 1)
  every = np.arange(rows, dtype=np.int32)
  state = decode.insert(
      program, params, state, tokens, lengths, np.full(rows, 2, np.int32),
      np.ones(rows, np.float32), every, np.asarray(0, np.int32), every)
  drafted, ours = sharding.fetch(_drafts(program, params, state))
  first = sharding.fetch(state.tokens)[every, lengths]
  answers = [[int(a), *map(int, draft)] for a, draft in zip(first, drafted, strict=True)]
  batch, spans = replay.text_rows(list(zip(prompts, answers, strict=True)), rows, draft_len + 1)
  places = np.concatenate([np.arange(s.start + 1, s.stop) for s in spans])
  theirs = sharding.fetch(_read(
      target.graph, drafter.graph, params, sharding.place_rows(batch, target.mesh), places,
      drafter.kind, draft_len)).reshape(ours.shape)
  if not np.isfinite(ours + theirs).all():
    return float("nan")
  order = np.argsort(-ours, -1, kind="stable")[..., :_NEXT + 1]
  least = np.finfo(np.float32).tiny  # what a drafter cannot propose has no logit
  logs = [np.log(np.maximum(np.take_along_axis(q, order, -1), least)) for q in (ours, theirs)]
  margins = [x[..., 1:] - x[..., :1] for x in logs]
  return float(np.abs(margins[0] - margins[1]).max())


def tolerance(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], draft_len: int) -> float:
  """Twice the `rounding`, at most the cap of the coarser dtype; 0 when it is no number."""
  own = max((str(x.dtype) for x in jax.tree.leaves(drafter.params) if x.ndim > 1),
            key=lambda name: TOLERANCE_CAP.get(name, 0.0))
  cap = max(TOLERANCE_CAP[target.dtype], TOLERANCE_CAP.get(own, 0.0))
  worst = rounding(target, drafter, prompts, draft_len)
  return min(2 * worst, cap) if np.isfinite(worst) else 0.0


@functools.partial(jax.jit, static_argnames=("program",))
def _drafts(program, params, state):
  """Drafts [B, K] of one round and the q [B, K, V] that they were drawn from."""
  target, drafter = decode.merge(program, params)
  keys = sampling.round_keys(state.keys, state.length)
  proposal, _ = decode.propose(program, drafter, target, state, keys)
  return proposal.tokens, proposal.probs


@functools.partial(jax.jit, static_argnames=("target_graph", "drafter_graph", "kind", "draft_len"))
def _read(
    target_graph: Any, drafter_graph: Any, params: Any, batch: dict[str, Array], places: Array,
    kind: str, draft_len: int) -> Float[Array, "M V"]:
  """q of the tokens `places` of a batch, K for each row, by the pass that the replay takes."""
  target, module = nnx.merge(target_graph, params[0]), nnx.merge(drafter_graph, params[1])
  read = target.hidden(
      batch["tokens"], batch["positions"], taps=module.taps, segments=batch["segments"])
  batch = batch | {"features": read.features}
  states = replay.block_states(module, kind, batch, target, (draft_len,))
  place = jnp.minimum(jnp.arange(len(places)) % draft_len, states.shape[1] - 1)
  logits = module.masked(module.train_logits(
      states[places, place], target, module.head_parameters()), target)
  q = sampling.probabilities(logits, _WARM, jnp.ones(len(places)))
  return module.full_probs(q, target.config.vocab_size)


# The verdict.


def summary(part: Mapping[str, Any]) -> dict[str, Any] | None:
  """The drafts of a part of `forecast.replay_part` in sum; None where they were not compared.

  Returns:
    decisions: drafts that were accepted or refused; lost, won: those that decoding refused and the
    replay accepts, and the other way round; beyond: those of them that lie beyond the tolerance;
    margin: the largest of them (None where one is infinite); tolerance; lopsided: the probability
    that as many of the prompts or more fall to one side, where both are equally likely. Prompts and
    not drafts, since a tie of a text that goes round in circles comes again and again.
  """
  rows = part["rows"]
  if "tolerance" not in part or not all("decisions" in row for row in rows):
    return None
  lost, won = ([m for row in rows for m in row[side]] for side in ("lost", "won"))
  apart = lost + won
  finite = [m for m in apart if m is not None]
  sides = [np.sign(len(row["lost"]) - len(row["won"])) for row in rows]
  return {
      "decisions": sum(row["decisions"] for row in rows), "lost": len(lost), "won": len(won),
      "beyond": len(apart) - sum(m <= part["tolerance"] for m in finite),
      "margin": max(finite, default=0.0) if len(finite) == len(apart) else None,
      "tolerance": part["tolerance"], "lopsided": _lopsided(sides.count(1), sides.count(-1))}


def _lopsided(a: int, b: int) -> float:
  """Two-sided sign test: P(max(A, B) >= max(a, b)) of a + b fair coins."""
  n, most = a + b, max(a, b)
  tail = sum(math.comb(n, k) for k in range(most, n + 1))
  return min(1.0, 2 * tail / 2**n)


def verdict(found: Mapping[str, Any] | None, agrees: bool | None) -> str | None:
  """"agrees", "rounding" or "disagrees"; None where that cannot be judged.

  Rounding is an explanation where every draft that differs is a tie within the tolerance and the
  prompts do not all fall to one side, as they do when decoding drafts worse than it should.

  Args:
    found: of `summary`; decides where it is there.
    agrees: whether the interval of the difference of tau holds 0; decides otherwise.
  """
  if found is None:
    return {True: "agrees", False: "disagrees", None: None}[agrees]
  if not found["lost"] + found["won"]:
    return "agrees"
  return "disagrees" if found["beyond"] or found["lopsided"] < ONE_SIDED else "rounding"


def reason(found: Mapping[str, Any] | None) -> str:
  """What the verdict rests on, as the end of a sentence; "" where drafts were not compared."""
  if found is None:
    return ""
  apart = found["lost"] + found["won"]
  if not apart:
    return f"; all {found['decisions']} drafts were decided alike"
  margin = "infinite" if found["margin"] is None else f"{found['margin']:.2g}"
  text = (f"; {apart} of {found['decisions']} drafts were decided otherwise "
          f"(margin up to {margin}, tolerance {found['tolerance']:.2g})")
  if found["beyond"]:
    return f"{text}: rounding does not explain {found['beyond']} of them"
  if found["lopsided"] < ONE_SIDED:
    return (f"{text}, but on one side (decoding refused {found['lost']}, the replay "
            f"{found['won']}): rounding would not choose")
  return f"{text}: ties"
