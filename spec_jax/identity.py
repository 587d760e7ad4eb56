"""What an identity claim rests on: the probe, the rounding between pass widths, the margin where
two texts part, and whether a drafter accepts what it should. Called by `audit.py` and by the
evaluate stage.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from spec_jax.drafters import Drafter
from spec_jax.drafters.small_lm import SmallLM
from spec_jax.models.cache import init_cache
from spec_jax.models.decoder import linear
from spec_jax.sampling import argmax
from spec_jax.target import Target

# The rounding tolerance is measured; a difference above these is an error whatever is measured.
TOLERANCE_CAP = {"float32": 1e-3, "bfloat16": 0.5, "int8w": 0.5}
WIDTH = 32  # prefill widths are multiples of it
# Below these shares of what its own choices promise, or of accepted drafts, a drafter is called
# dead.
_PROMISED_SHARE, _FLOOR = 0.9, 0.01
CAUSES = ("likely causes: another tokenizer or chat template than in training, wrong tapped "
          "layers, other RoPE settings, a hole in the drafter's cache")


# The passes that are compared. They take the graph as a static argument and compile per shape.


@functools.partial(jax.jit, static_argnames=("graph",), donate_argnames=("cache",))
def block_logits(graph: Any, params: Any, cache: Any, block: Int[Array, "B W"],
                 start: Int[Array, " B"]):
  """Logits [B, W, V] of a block that begins at position `start`, and the cache."""
  target = nnx.merge(graph, params)
  out = target.hidden(block, start[:, None] + jnp.arange(block.shape[1]), cache)
  return target.logits(out.hidden), out.cache


@functools.partial(jax.jit, static_argnames=("graph",))
def text_logits(graph: Any, params: Any, tokens: Int[Array, "1 T"]):
  """Logits [T, V] of a pass over a whole text."""
  target = nnx.merge(graph, params)
  out = target.hidden(tokens, jnp.arange(tokens.shape[1])[None])
  return target.logits(out.hidden[0])


@functools.partial(jax.jit, static_argnames=("graph",))
def text_gaps(graph: Any, params: Any, tokens: Int[Array, "1 T"]):
  """By how much the best logit exceeds that of each next token, [T - 1], over a whole text."""
  logits = text_logits(graph, params, tokens)[:-1]
  came = jnp.take_along_axis(logits, tokens[0, 1:, None], 1)[:, 0]
  return jnp.max(logits, -1) - came


# The probe.


def probe(
    target: Target, rows: int, width: int, capacity: int, seed: int = 0) -> dict[str, Any] | None:
  """Whether a row's logits depend on the other rows' contents or on its place in the block.

  Passes of the shape that decoding uses, over random ids behind `width` others, are compared bit
  for bit: with the other rows changed, and with the block begun one position later, as it is after
  a round that accepted less.

  Returns:
    rows_independent (None for a single row), place_independent: the answers; rows_difference,
    place_difference: the largest difference of a logit that was seen. None when the capacity is too
    small for two blocks.
  """
  if 2 * width + 1 > capacity:
    return None
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, target.config.vocab_real, (rows, 2 * width + 1)).astype(np.int32)
  dtype = target.module.embed[...].dtype

  def run(text):
    cache = init_cache(target.config, rows, capacity, dtype)
    out = []
    for start in (0, width, width + 1):
      logits, cache = block_logits(target.graph, target.params, cache,
                                   text[:, start:start + width], jnp.full(rows, start, jnp.int32))
      out.append(np.asarray(logits)[..., :target.config.vocab_real])
    return out

  _, first, later = run(ids)
  company = None
  if rows > 1:  # each half keeps its contents while the other's change
    half = np.arange(rows) < rows // 2
    company = 0.0
    for kept in (half, ~half):
      other = rng.integers(0, target.config.vocab_real, ids.shape).astype(np.int32)
      other[kept] = ids[kept]
      company = max(company, float(np.abs(first[kept] - run(other)[1][kept]).max()))
  moved = float(np.abs(first[:, 1:] - later[:, :-1]).max(initial=0.0))
  return {"rows": rows, "width": width, "capacity": capacity,
          "rows_independent": None if company is None else company == 0.0,
          "rows_difference": company, "place_independent": moved == 0.0,
          "place_difference": moved}


# Rounding between widths.


def rounding(target: Target, texts: Sequence[Sequence[int]], draft_len: int, rows: int = 1,
             seed: int = 0) -> float:
  """The largest difference of a logit between passes of width 1, of width K + 1, and over the whole
  text, on the same tokens.

  Args:
    target: in the dtype that is judged.
    texts: ids to run over, other than the answers that are judged; made longer with random ids
      where they are shorter than eight blocks.
    draft_len: K.
    rows: how many rows a pass has, as in the decode that is judged.
    seed: of the random ids.

  Returns:
    NaN when a logit is no number.
  """
  width, blocks = draft_len + 1, 8
  rng = np.random.default_rng(seed)
  length = width * blocks
  ids = rng.integers(0, target.config.vocab_real, (rows, length)).astype(np.int32)
  for row, k in zip(ids, range(rows), strict=True):
    if texts:
      text = list(texts[k % len(texts)])[:length]
      row[:len(text)] = text
  dtype = target.module.embed[...].dtype
  one, wide = (init_cache(target.config, rows, length + width, dtype) for _ in range(2))
  at = lambda n: jnp.full(rows, n, jnp.int32)
  real = lambda logits: np.asarray(logits)[..., :target.config.vocab_real]
  everything = real(text_logits(target.graph, target.params, ids[:1]))
  gaps = []
  for start in range(0, length, width):
    both, wide = block_logits(
        target.graph, target.params, wide, ids[:, start:start + width], at(start))
    both, whole = real(both), everything[start:start + width]
    gaps.append(np.abs(both[0] - whole).max())
    for k in range(width):
      row, one = block_logits(
          target.graph, target.params, one, ids[:, start + k:start + k + 1], at(start + k))
      row = real(row)[:, 0]
      gaps += [np.abs(row - both[:, k]).max(), np.abs(row[0] - whole[k]).max()]
  return float(np.max(gaps))


def rounding_tolerance(
    target: Target, texts: Sequence[Sequence[int]], draft_len: int, rows: int = 1) -> float:
  """Twice the `rounding`, at most the cap of the dtype; 0 when it is no number."""
  worst = rounding(target, texts, draft_len, rows)
  return min(2 * worst, TOLERANCE_CAP[target.dtype]) if np.isfinite(worst) else 0.0


def divergence(target: Target, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int],
               width: int, tolerance: float) -> dict[str, Any]:
  """Where two greedy answers part, and whether rounding explains it.

  It does where the two tokens are within the tolerance of the best logit, and every token of `ours`
  after that is within the tolerance of the best one of its own text. An answer that ends where the
  other goes on is never rounding: only a different token can end a text.

  Args:
    target: of both.
    prompt: its ids.
    ours, theirs: ids of two different answers.
    width: the passes over the texts are padded to it.
    tolerance: of `rounding_tolerance`.

  Returns:
    equal_tokens: length of the common part; ours, theirs: the ids behind it (None at an end);
    margin: from the best logit to the worse of the two; worst_margin: the largest of all of `ours`
    (None for what is no finite number); within_tolerance.
  """
  same = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
              min(len(ours), len(theirs)))

  def gaps(answer):
    text = [*prompt, *answer]
    padded = np.zeros((1, max(width, len(text))), np.int32)
    padded[0, :len(text)] = text
    found = np.asarray(text_gaps(target.graph, target.params, padded))
    return found[len(prompt) - 1:len(text) - 1]

  mine, other = gaps(ours), gaps(theirs)
  at = [row[same] for row in (mine, other) if same < len(row)]
  margin, worst = float(np.max(at)), float(np.max(mine, initial=0.0))
  came = [row[same] if same < len(row) else None for row in (ours, theirs)]
  finite = np.isfinite(margin) and np.isfinite(worst)
  return {
      "equal_tokens": same, "ours": came[0], "theirs": came[1],
      "margin": margin if np.isfinite(margin) else None,
      "worst_margin": worst if np.isfinite(worst) else None,
      "within_tolerance": bool(
          finite and None not in came and max(margin, worst) <= tolerance)}


# A dead drafter.


def predicted_tau(drafter: Drafter, target: Target, prompts: Sequence[Sequence[int]],
                  answers: Sequence[Sequence[int]], draft_len: int) -> float | None:
  """tau at temperature 0 that the drafter's own teacher-forced choices promise on these answers.

  One pass of the drafter over each text, as in training; rounds then hop over the places where its
  best token is the answer's. None for a drafter that has no such pass.
  """
  module = drafter.module
  if not isinstance(module, SmallLM):
    return None
  longest = max((len(p) + len(a) for p, a in zip(prompts, answers, strict=True)), default=0)
  width = -(-longest // WIDTH) * WIDTH

  @jax.jit
  def best(params, target_params, tokens):
    ours, theirs = nnx.merge(drafter.graph, params), nnx.merge(target.graph, target_params)
    hidden = ours.train_hidden(tokens, jnp.arange(width)[None], None, theirs)
    logits = linear(hidden, ours.head_weight(theirs))
    real = min(ours.config.vocab_real, target.config.vocab_real)
    if not hasattr(ours, "draft_ids"):
      logits = jnp.where(jnp.arange(logits.shape[-1]) < real, logits, -jnp.inf)
    place = argmax(logits)
    return ours.draft_ids[...][place] if hasattr(ours, "draft_ids") else place

  emitted = rounds = 0
  for prompt, answer in zip(prompts, answers, strict=True):
    if len(answer) < 2:
      continue
    tokens = np.zeros((1, width), np.int32)
    tokens[0, :len(prompt) + len(answer)] = [*prompt, *answer]
    guess = np.asarray(best(drafter.params, target.params, tokens))[0]
    # match[j]: the drafter's choice behind the answer's token j is the token j + 1.
    match = guess[len(prompt):len(prompt) + len(answer) - 1] == np.asarray(answer[1:])
    at = 0
    while at < len(match):
      # Past its own context a drafter's guesses are not used.
      length, run = len(prompt) + at + 1, 0
      reach = draft_len if length + draft_len <= module.max_position else 0
      while run < reach and at + run < len(match) and match[at + run]:
        run += 1
      at += run + 1
      rounds += 1
    emitted += len(match)
  return emitted / rounds if rounds else None


def dead_drafter(rounds: int, proposed: int, accepted: int, measured: float,
                 predicted: float | None) -> list[str]:
  """Warnings when nothing was speculated, or a drafter accepts less than it should.

  Args:
    rounds, proposed, accepted: of the decode that is judged.
    measured: tau.
    predicted: tau by `predicted_tau`, None when there is none.
  """
  if not rounds:
    return ["no round was decoded: every answer ended with the token of its prefill"]
  if not proposed:
    return ["no draft was verified: the prompts lie beyond the drafter's own context"]
  if accepted <= _FLOOR * proposed:
    return [f"{accepted} of {proposed} drafts were accepted, which an untrained drafter reaches "
            f"too; {CAUSES}"]
  if predicted is not None and measured - 1 < _PROMISED_SHARE * (predicted - 1):
    return [f"tau is {measured:.2f} where the drafter's own teacher-forced choices promise "
            f"{predicted:.2f}; {CAUSES}"]
  return []
