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
TOLERANCE_CAP = {"float32": 1e-3, "bfloat16": 0.5}
WIDTH = 32  # prefill widths are multiples of it
# Below these shares of what its own choices promise, or of accepted drafts, a drafter is called
# dead.
_PROMISED_SHARE, _FLOOR = 0.8, 0.01
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
def text_logits(graph: Any, params: Any, tokens: Int[Array, "1 T"], at: Int[Array, ""]):
  """Logits [V] at position `at`, from a pass over the whole text."""
  target = nnx.merge(graph, params)
  out = target.hidden(tokens, jnp.arange(tokens.shape[1])[None])
  return target.logits(out.hidden[0, at])


# The probe.


def probe(target: Target, rows: int, width: int, capacity: int, seed: int = 0) -> dict[str, Any]:
  """Whether a row's logits depend on the other rows' contents or on its place in the block.

  Passes of the shape that decoding uses, over random ids behind `width` others, are compared bit
  for bit: with the other rows changed, and with the block begun one position later, as it is after
  a round that accepted less.

  Returns:
    rows_independent, place_independent: the answers; rows_difference, place_difference: the largest
    difference of a logit that was seen.
  """
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
  other = ids.copy()
  other[1:] = rng.integers(0, target.config.vocab_real, other[1:].shape)
  company = float(np.abs(first[0] - run(other)[1][0]).max())
  moved = float(np.abs(first[:, 1:] - later[:, :-1]).max(initial=0.0))
  return {"rows": rows, "width": width, "rows_independent": company == 0.0,
          "rows_difference": company, "place_independent": moved == 0.0,
          "place_difference": moved}


# Rounding between widths.


def rounding_tolerance(target: Target, texts: Sequence[Sequence[int]], draft_len: int) -> float:
  """Twice the largest logit difference between passes of width 1 and of width K + 1 over the same
  tokens, at most the cap of the dtype.

  Args:
    target: in the dtype that is judged.
    texts: ids to run over, other than the answers that are judged.
    draft_len: K.
  """
  width = draft_len + 1
  dtype = target.module.embed[...].dtype
  longest = max((len(text) for text in texts), default=0)
  capacity = -(-(longest + width) // WIDTH) * WIDTH
  worst = 0.0
  for text in texts:
    ids = jnp.asarray([list(text)], jnp.int32)
    one, wide = (init_cache(target.config, 1, capacity, dtype) for _ in range(2))
    for start in range(0, len(text) - width + 1, width):
      at = lambda n: jnp.full(1, n, jnp.int32)
      both, wide = block_logits(
          target.graph, target.params, wide, ids[:, start:start + width], at(start))
      for k in range(width):
        row, one = block_logits(
            target.graph, target.params, one, ids[:, start + k:start + k + 1], at(start + k))
        gap = jnp.abs(row[:, 0] - both[:, k])[:, :target.config.vocab_real]
        worst = max(worst, float(jnp.max(gap)))
  return min(2 * worst, TOLERANCE_CAP[target.dtype])


def divergence(target: Target, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int],
               width: int) -> dict[str, Any]:
  """Where two answers part, and how far apart the competing logits are there.

  Args:
    target: of both.
    prompt: its ids.
    ours, theirs: ids of two different answers.
    width: the pass over the text is padded to it.

  Returns:
    equal_tokens: length of the common part; ours, theirs: the ids behind it (None at an end);
    margin: from the best logit to the worse of the two, in a pass over the whole text.
  """
  same = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
              min(len(ours), len(theirs)))
  text = [*prompt, *theirs[:same]]
  padded = np.zeros((1, max(width, len(text))), np.int32)
  padded[0, :len(text)] = text
  logits = np.asarray(text_logits(
      target.graph, target.params, padded, jnp.asarray(len(text) - 1)))
  came = [row[same] if same < len(row) else None for row in (ours, theirs)]
  margin = float(np.max(logits) - np.min(logits[[i for i in came if i is not None]]))
  return {"equal_tokens": same, "ours": came[0], "theirs": came[1], "margin": margin}


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
    place = argmax(linear(hidden, ours.head_weight(theirs)))
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
      run = 0
      while run < draft_len and at + run < len(match) and match[at + run]:
        run += 1
      at += run + 1
      rounds += 1
    emitted += len(match)
  return emitted / rounds if rounds else None


def dead_drafter(measured: float, acceptance: float, predicted: float | None) -> list[str]:
  """Warnings when a drafter accepts less than it should, with the likely causes.

  Args:
    measured: tau.
    acceptance: share of the drafts that were accepted.
    predicted: tau by `predicted_tau`, None when there is none.
  """
  found = []
  if predicted is not None and measured - 1 < _PROMISED_SHARE * (predicted - 1):
    found.append(f"tau is {measured:.2f} where the drafter's own teacher-forced choices promise "
                 f"{predicted:.2f}; {CAUSES}")
  if acceptance < _FLOOR:
    found.append(f"only {acceptance:.1%} of the drafts are accepted, which an untrained drafter "
                 f"reaches too; {CAUSES}")
  return found
