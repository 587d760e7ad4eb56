"""Duplicates among prompts, and training prompts that give evaluation prompts away.

The prompts stage (`train_drafter/prompts.py`) calls it; so does the test that guards the embedded
prompts.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spec_jax.errors import UserError

_WORD = re.compile(r"\w+")
_PUNCTUATION = re.compile(r"[.,;:!?'\"]+(?=\s|$)")

# A text of fewer words than this counts as shared only when it is the whole other prompt: a run
# like "tell me more" stands in too many prompts to mean anything.
_SHORTEST_RUN = 5


def normalized(prompt: Mapping[str, Any]) -> str:
  """Roles and texts without what makes no difference: case, spacing, closing punctuation."""
  lines = []
  for message in prompt["messages"]:
    text = unicodedata.normalize("NFKC", message["content"]).casefold()
    lines.append(message["role"] + " " + " ".join(_PUNCTUATION.sub("", text).split()))
  return "\n".join(lines)


def deduplicate(prompts: Iterable[dict]) -> list[dict]:
  """The first prompt of each normalised text, in order."""
  seen: set[str] = set()
  kept = []
  for prompt in prompts:
    key = normalized(prompt)
    if key not in seen:
      seen.add(key)
      kept.append(prompt)
  return kept


def words_of(prompt: Mapping[str, Any]) -> tuple[str, ...]:
  """Normalised words of the user and assistant turns.

  The system text is left out: it is an instruction that whole data sets share by design.
  """
  spoken = (m["content"] for m in prompt["messages"] if m["role"] != "system")
  text = unicodedata.normalize("NFKC", " ".join(spoken)).casefold()
  return tuple(_WORD.findall(text))


def word_ngrams(words: Sequence[str], n: int) -> set[tuple[str, ...]]:
  """All runs of n words; the whole text when it has fewer, nothing when it has none."""
  words = tuple(words)
  if len(words) < n:
    return {words} if words else set()
  return {words[i : i + n] for i in range(len(words) - n + 1)}


def overlaps(train: Iterable[dict], evaluation: Iterable[dict], n: int = 13) -> list[str]:
  """Training prompts that share a run of n words with an evaluation prompt.

  A prompt of fewer than n words overlaps when it stands as a whole in the other one.

  Returns:
    Ids of the training prompts, in order.

  Raises:
    UserError: n is below 1.
  """
  if n < 1:
    raise UserError(f"overlap_words={n} must be at least 1")
  texts = [words for words in map(words_of, evaluation) if words]
  whole = set(texts)
  # Runs by length: n for what both sides are long enough for, shorter ones for short prompts.
  short_eval: dict[int, set[tuple[str, ...]]] = {}
  for words in texts:
    if _SHORTEST_RUN <= len(words) < n:
      short_eval.setdefault(len(words), set()).add(words)
  runs: dict[int, set[tuple[str, ...]]] = {}

  def eval_runs(length: int) -> set[tuple[str, ...]]:
    if length not in runs:
      runs[length] = set()
      for words in texts:
        if len(words) >= length:
          runs[length] |= word_ngrams(words, length)
    return runs[length]

  def hit(words: tuple[str, ...]) -> bool:
    if words in whole:
      return True
    if len(words) >= n and not eval_runs(n).isdisjoint(word_ngrams(words, n)):
      return True
    if _SHORTEST_RUN <= len(words) < n and words in eval_runs(len(words)):
      return True
    return any(
      len(words) >= length and not known.isdisjoint(word_ngrams(words, length))
      for length, known in short_eval.items()
    )

  return [prompt["id"] for prompt in train if hit(words_of(prompt))]


def remove_overlaps(
  train: Sequence[dict], evaluation: Sequence[dict], n: int = 13
) -> tuple[list[dict], list[str]]:
  """Training prompts without those of `overlaps`, and the ids of those."""
  ids = overlaps(train, evaluation, n)
  bad = set(ids)
  return [prompt for prompt in train if prompt["id"] not in bad], ids
