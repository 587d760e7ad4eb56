"""The embedded prompts: training prompts from grammars, evaluation prompts written by hand.

The prompts stage (`train_drafter/prompts.py`) calls `training_prompts` and `evaluation_prompts`.
The grammars are package data, one file per category in `grammars/`, next to `common.txt` whose
word lists every category may use. A grammar file has sections:

    [name]      options, one a line            [name,]     options, separated by commas
    [prompt]    the start: one task kind a line; turns are separated by ` || ` and alternate
                between user and assistant; a first turn `system: ...` is the system text

An option may hold columns separated by ` ~ `. In its text a slot is written `{{...}}`:

    {{name}}        an option of a section; one prompt never draws an option twice while others
                    are left, so three {{first}} are three people
    {{name#k}}      the same text again wherever the key k returns
    {{name#k.1}}    column 1 of the option bound to k; its own slots are drawn anew each time
    {{a/b/}}        one of the listed texts (the last one is empty here); they may hold slots
    {{int:2-90:4}}  a number, optionally on a step; takes a key like a section
    {{^name}}       with its first letter in upper case

`\\n` is a line break, `a(n)` becomes "a" or "an", and lines that start with `;;` are comments.
"""

import functools
import json
import random
import re
from collections.abc import Mapping
from importlib import resources

from spec_jax.errors import UserError

CATEGORIES = (
  "structured",
  "code",
  "math",
  "qa",
  "summarization",
  "translation",
  "rag",
  "multi_turn",
  "creative",
)

_INTEGER = re.compile(r"int:(-?\d+)-(-?\d+)(?::(\d+))?$")
_REFERENCE = re.compile(r"(\w+)(?:#(\w+))?(?:\.(\d+))?$")
_ARTICLE = re.compile(r"\b([Aa])\(n\) (\W*)(\w)")
_WORD = re.compile(r"\w+")
_BRACES = re.compile(r"\{\{|\}\}")
_BRACES_OR_SLASH = re.compile(r"\{\{|\}\}|/")

# How many draws in a row may repeat earlier prompts before a category counts as exhausted.
_PATIENCE = 2000


class Grammar:
  """The sections of one grammar file on top of the common ones.

  Attributes:
    name: file name, for messages.
    sections: options by section name; an option is a tuple of columns.
  """

  def __init__(self, name: str, *texts: str):
    """Parses grammar texts; a section in a later text replaces one of the same name.

    Raises:
      ValueError: a line stands before the first section, or a section is empty.
    """
    self.name = name
    self.sections: dict[str, list[tuple[str, ...]]] = {}
    for text in texts:
      self._parse(text)
    for section, options in self.sections.items():
      if not options:
        raise ValueError(f"{name}: section [{section}] has no options")

  def _parse(self, text: str) -> None:
    options, by_comma = None, False
    for line in text.splitlines():
      if not line.strip() or line.startswith(";;"):
        continue
      header = re.fullmatch(r"\[(\w+)(,?)\]", line.strip())
      if header:
        options, by_comma = [], bool(header[2])
        self.sections[header[1]] = options
      elif options is None:
        raise ValueError(f"{self.name}: a line before the first section: {line!r}")
      elif by_comma:
        options.extend((part.strip(),) for part in line.split(",") if part.strip())
      else:
        options.append(tuple(part.replace("\\n", "\n") for part in line.split(" ~ ")))


class _Draw:
  """One expansion of a grammar: the random state, the bound keys and the options used up."""

  def __init__(self, grammar: Grammar, rng: random.Random):
    self.grammar = grammar
    self.rng = rng
    self.texts: dict[tuple[str, str], str] = {}
    self.rows: dict[tuple[str, str], tuple[str, ...]] = {}
    self.used: dict[str, set[int]] = {}

  def pick(self, count: int) -> int:
    """A number below `count`."""
    # Python promises the sequence of random() across versions, not that of choice().
    return int(self.rng.random() * count)

  def option(self, section: str) -> tuple[str, ...]:
    """The columns of an option that this prompt has not used yet."""
    options = self.grammar.sections.get(section)
    if options is None:
      raise ValueError(f"{self.grammar.name}: no section [{section}]")
    used = self.used.setdefault(section, set())
    if len(used) == len(options):
      used.clear()
    free = [i for i in range(len(options)) if i not in used]
    index = free[self.pick(len(free))]
    used.add(index)
    return options[index]

  def expand(self, text: str) -> str:
    """Fills every slot of a text."""
    literal, *rest = _pieces(text, self.grammar.name)
    for body, behind in zip(rest[::2], rest[1::2], strict=True):
      literal += self.slot(body) + behind
    return literal

  def slot(self, body: str) -> str:
    """The text for what stands between the braces of a slot."""
    if body.startswith("^"):
      text = self.slot(body[1:])
      return text[:1].upper() + text[1:]
    choices = _alternatives(body)
    if len(choices) > 1:
      return self.expand(choices[self.pick(len(choices))])
    if body.startswith("int:"):
      body, _, key = body.partition("#")
      if key and (body, key) in self.texts:
        return self.texts[body, key]
      text = self.integer(body)
      if key:
        self.texts[body, key] = text
      return text
    reference = _REFERENCE.match(body)
    if not reference:
      raise ValueError(f"{self.grammar.name}: cannot read the slot {{{{{body}}}}}")
    section, key, column = reference.groups()
    if column is not None:
      row = self.rows.get((section, key)) if key else None
      if row is None:
        row = self.option(section)
        if key:
          self.rows[section, key] = row
      return self.expand(row[int(column)])
    if key is None:
      return self.expand(self.option(section)[0])
    if (section, key) not in self.texts:
      self.texts[section, key] = self.expand(self.option(section)[0])
    return self.texts[section, key]

  def integer(self, body: str) -> str:
    """A number for `int:low-high` or `int:low-high:step`, both ends included."""
    bounds = _INTEGER.match(body)
    if not bounds:
      raise ValueError(f"{self.grammar.name}: cannot read the number {{{{{body}}}}}")
    low, high, step = int(bounds[1]), int(bounds[2]), int(bounds[3] or 1)
    return str(low + step * self.pick((high - low) // step + 1))


@functools.cache
def _pieces(text: str, name: str) -> tuple[str, ...]:
  """Splits a text into literal, slot body, literal, ..., literal. Slots may hold slots."""
  pieces, depth, begin = [], 0, 0
  for mark in _BRACES.finditer(text):
    # Closing braces outside a slot are the text's own, as in JSON.
    step = 1 if mark[0] == "{{" else -1 if depth else 0
    if (depth, step) in ((0, 1), (1, -1)):
      pieces.append(text[begin : mark.start()])
      begin = mark.end()
    depth += step
  if depth:
    raise ValueError(f"{name}: a slot is not closed: {text[begin - 2 : begin + 40]!r}")
  return (*pieces, text[begin:])


@functools.cache
def _alternatives(body: str) -> tuple[str, ...]:
  """Splits a slot at the slashes that stand outside nested slots."""
  parts, depth, begin = [], 0, 0
  for mark in _BRACES_OR_SLASH.finditer(body):
    if mark[0] == "/":
      if depth == 0:
        parts.append(body[begin : mark.start()])
        begin = mark.end()
    else:
      depth += 1 if mark[0] == "{{" else -1
  return (*parts, body[begin:])


def _messages(text: str) -> list[dict[str, str]]:
  """Turns the text of an expanded [prompt] option into chat messages."""
  turns = text.split(" || ")
  messages = []
  if turns[0].startswith("system: "):
    messages.append({"role": "system", "content": turns.pop(0).removeprefix("system: ")})
  for index, turn in enumerate(turns):
    messages.append({"role": "assistant" if index % 2 else "user", "content": turn.strip()})
  return messages


def sample(grammar: Grammar, rng: random.Random) -> list[dict[str, str]]:
  """Draws one prompt of a grammar as chat messages that end on a user turn."""
  draw = _Draw(grammar, rng)
  text = draw.expand(draw.option("prompt")[0])
  text = _ARTICLE.sub(
    lambda m: f"{m[1]}{'n' if m[3].lower() in 'aeiou' else ''} {m[2]}{m[3]}", text
  )
  return _messages(text)


@functools.cache
def load_grammar(category: str) -> Grammar:
  """The grammar of one category, with the common word lists.

  Raises:
    UserError: no such category.
  """
  if category not in CATEGORIES:
    raise UserError(f"unknown prompt category {category!r}; known: {', '.join(CATEGORIES)}")
  folder = resources.files("train_drafter") / "grammars"
  texts = [(folder / f"{name}.txt").read_text("utf-8") for name in ("common", category)]
  return Grammar(f"{category}.txt", *texts)


def training_prompts(count_per_category: Mapping[str, int], seed: int) -> list[dict]:
  """Draws distinct training prompts from the grammars.

  Args:
    count_per_category: prompts wanted by category.
    seed: the same seed gives the same prompts; a larger count only appends, category by category.

  Returns:
    Prompts as on disk: id, category, messages, source "template"; grouped by category.

  Raises:
    UserError: an unknown category, a negative count, or more prompts than a grammar can give.
  """
  prompts = []
  for category, count in count_per_category.items():
    if count < 0:
      raise UserError(f"prompts of category {category!r}: count {count} is negative")
    grammar = load_grammar(category)
    rng = random.Random(f"{seed}/{category}")
    seen: set[tuple[str, ...]] = set()
    repeats = 0
    while len(seen) < count:
      messages = sample(grammar, rng)
      # Punctuation and case make no new prompt.
      key = tuple(_WORD.findall(" ".join(m["content"] for m in messages).lower()))
      if key in seen:
        repeats += 1
        if repeats > _PATIENCE:
          raise UserError(f"the templates of {category!r} gave only {len(seen)} of {count} prompts")
        continue
      seen.add(key)
      repeats = 0
      prompts.append(
        {
          "id": f"template-{category}-{len(seen) - 1:05d}",
          "category": category,
          "messages": messages,
          "source": "template",
        }
      )
  return prompts


def evaluation_prompts() -> list[dict]:
  """The hand-written evaluation prompts, in the order of the categories.

  Returns:
    Prompts as on disk: id, category, messages, source "handwritten".
  """
  text = (resources.files("train_drafter") / "eval_prompts.jsonl").read_text("utf-8")
  return [json.loads(line) for line in text.splitlines() if line.strip()]
