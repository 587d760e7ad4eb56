"""Reads prompts from JSON lines in messages, ShareGPT or Alpaca form. The prompts stage calls it.

The form is recognised line by line. A line that is no conversation is dropped and counted by
reason, with its line number; too many of them stop the run.
"""

import dataclasses
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from spec_jax.errors import UserError

# What the two chat forms call the speakers.
_ROLES = {
  "system": "system",
  "user": "user",
  "human": "user",
  "assistant": "assistant",
  "gpt": "assistant",
  "chatgpt": "assistant",
}


@dataclasses.dataclass(frozen=True)
class Dropped:
  """A line that gave no prompt: file name, line number from 1, and why."""

  file: str
  line: int
  reason: str


@dataclasses.dataclass
class PromptFile:
  """What was read from one or more files.

  Attributes:
    prompts: as on disk: id, category, messages (the last is the user's), source.
    dropped: the lines that gave none, in order.
  """

  prompts: list[dict]
  dropped: list[Dropped]

  def counts(self) -> dict[str, int]:
    """Dropped lines by reason, most frequent first."""
    return dict(Counter(drop.reason for drop in self.dropped).most_common())

  def report(self) -> str:
    """One line a reason, with the first places it was met; "" when nothing was dropped."""
    lines = []
    for reason, count in self.counts().items():
      places = [f"{d.file}:{d.line}" for d in self.dropped if d.reason == reason]
      more = ", ..." if count > 5 else ""
      lines.append(f"dropped {count}: {reason} ({', '.join(places[:5])}{more})")
    return "\n".join(lines)


class _NoPrompt(Exception):
  """The line holds no usable conversation; the text is the reason."""


def read_prompts(path: str | Path, *, max_dropped_share: float = 0.1) -> PromptFile:
  """Reads prompt files.

  Args:
    path: a file, a folder (its .jsonl files), or several of either separated by commas.
    max_dropped_share: of the non-blank lines of one file, how many may be dropped.

  Raises:
    UserError: a path is missing, a file is empty or has no valid line, or too many lines of a file
      were dropped; with the file's name and a line number.
  """
  result = PromptFile([], [])
  used_ids: set[str] = set()
  for file in prompt_files(path):
    _read_file(file, result, used_ids, max_dropped_share)
  return result


def prompt_files(path: str | Path) -> list[Path]:
  """The files that a `path` of `read_prompts` stands for.

  Raises:
    UserError: a file is missing, or a folder has no .jsonl file.
  """
  parts = [str(path)] if Path(path).exists() else [p.strip() for p in str(path).split(",")]
  files: list[Path] = []
  for part in filter(None, parts):
    place = Path(os.path.expanduser(part))
    if place.is_dir():
      inside = sorted(place.glob("*.jsonl"))
      if not inside:
        raise UserError(f"{place}: no .jsonl file in this folder")
      files += inside
    elif place.exists():
      files.append(place)
    else:
      raise UserError(f"{place}: no such prompt file or folder")
  if not files:
    raise UserError(f"prompt path {str(path)!r} names no file")
  return files


def _read_file(file: Path, result: PromptFile, used_ids: set[str], max_share: float) -> None:
  kept, dropped = 0, []
  try:
    lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
  except OSError as error:
    raise UserError(f"{file}: {error.strerror}") from error
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    try:
      record = _parse(line)
      messages = conversation(record)
    except _NoPrompt as reason:
      dropped.append(Dropped(file.name, number, str(reason)))
      continue
    kept += 1
    result.prompts.append(
      {
        "id": _unique(record.get("id"), f"{file.stem}-{number}", used_ids),
        "category": _text_or(record.get("category"), "general"),
        "messages": messages,
        "source": _text_or(record.get("source"), file.name),
      }
    )
  result.dropped += dropped
  if not kept and not dropped:
    raise UserError(f"{file}: line 1: the file is empty")
  total = kept + len(dropped)
  if not kept or len(dropped) > max_share * total:
    first = dropped[0]
    raise UserError(
      f"{file}: line {first.line}: {first.reason}; {len(dropped)} of {total} lines are no prompt "
      f"(max_dropped_share={max_share:g})"
    )


def _parse(line: bytes) -> dict[str, Any]:
  try:
    record = json.loads(line.decode("utf-8"))
  except UnicodeDecodeError:
    raise _NoPrompt("not UTF-8") from None
  except (ValueError, RecursionError):
    raise _NoPrompt("broken JSON") from None
  if not isinstance(record, dict):
    raise _NoPrompt("not a JSON object")
  return record


def conversation(record: dict[str, Any]) -> list[dict[str, str]]:
  """The messages of one record in any of the three forms, cut behind the last user turn."""
  if "messages" in record:
    turns = _turns(record["messages"], "role", "content")
  elif "conversations" in record:
    turns = _turns(record["conversations"], "from", "value")
    if isinstance(record.get("system"), str) and record["system"].strip():
      turns = [("system", record["system"]), *turns]
  elif "instruction" in record:
    turns = _alpaca(record)
  else:
    raise _NoPrompt("no messages, conversations or instruction")
  _check_order([role for role, _ in turns])
  while turns[-1][0] == "assistant":
    turns.pop()
  return [{"role": role, "content": content} for role, content in turns]


def _turns(value: Any, role_key: str, text_key: str) -> list[tuple[str, str]]:
  if not isinstance(value, list):
    raise _NoPrompt("the conversation is not a list")
  if not value:
    raise _NoPrompt("empty conversation")
  turns = []
  for turn in value:
    if not isinstance(turn, dict):
      raise _NoPrompt("a turn is not an object")
    role = turn.get(role_key)
    if not isinstance(role, str) or role not in _ROLES:
      raise _NoPrompt("unknown role")
    turns.append((_ROLES[role], _content(turn.get(text_key))))
  return turns


def _alpaca(record: dict[str, Any]) -> list[tuple[str, str]]:
  text = _content(record["instruction"])
  # A missing input is usual in this form, and the output is the answer, which the target gives.
  extra = record.get("input")
  if extra is not None and _content(extra, allow_blank=True).strip():
    text = f"{text}\n\n{extra}"
  turns = [("user", text)]
  if isinstance(record.get("system"), str) and record["system"].strip():
    turns.insert(0, ("system", record["system"]))
  return turns


def _content(value: Any, *, allow_blank: bool = False) -> str:
  if value is None:
    raise _NoPrompt("null content")
  if not isinstance(value, str):
    raise _NoPrompt("content is not text")
  if not value.strip() and not allow_blank:
    raise _NoPrompt("blank content")
  try:
    value.encode("utf-8")
  except UnicodeEncodeError:
    # A lone surrogate, legal in JSON, that no tokenizer and no file can take.
    raise _NoPrompt("content is not Unicode text") from None
  return value


def _check_order(roles: list[str]) -> None:
  """Optional system text, then user and assistant in turn, the user first."""
  spoken = roles[1:] if roles[0] == "system" else roles
  if "system" in spoken:
    raise _NoPrompt("system turn inside the conversation")
  if not spoken:
    raise _NoPrompt("no user turn")
  if spoken[0] == "assistant":
    raise _NoPrompt("first turn is the assistant's")
  for before, after in zip(spoken, spoken[1:], strict=False):
    if before == after:
      raise _NoPrompt(f"two {before} turns in a row")


def _text_or(value: Any, default: str) -> str:
  return value if isinstance(value, str) and value.strip() else default


def _unique(value: Any, default: str, used: set[str]) -> str:
  """The record's own id when it has a fresh one, else one from the file and line."""
  name = str(value) if isinstance(value, str | int) and str(value).strip() else default
  if name in used:
    name = default
  number = 2
  while name in used:
    name, number = f"{default}.{number}", number + 1
  used.add(name)
  return name
