"""Chat templates: the jinja2 environment they run in, and what keeps user text from control ids.

Used by `tokenizer.py` alone.
"""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from spec_jax.errors import UserError


class Guard:
  """Replaces the spelling of control tokens in message text by placeholders, and back.

  Also replaced: the beginning of such a spelling at the end of a text and its end at the start of
  a text, which the template's own letters could complete, and the placeholders' own marks.
  """

  # Private-use characters: trimming and upper-casing spare them, no template tests for them.
  _OPEN, _CLOSE = "\ue0f0", "\ue0f1"

  def __init__(self, controls: Sequence[str]):
    self.hidden: list[str] = []
    self._pattern = None
    if controls:
      starts = {c[:n] for c in controls for n in range(1, len(c))}
      ends = {c[n:] for c in controls for n in range(1, len(c))}
      self._pattern = re.compile(
          rf"{any_of(controls)}|[{self._OPEN}{self._CLOSE}]"
          rf"|\A(?P<lead>\s*)(?:{any_of(ends)})|(?:{any_of(starts)})(?=\s*\Z)")

  def hide(self, value: Any) -> Any:
    """The value with every string in it made safe (dict keys are left alone)."""
    if isinstance(value, str):
      return self._pattern.sub(self._replace, value) if self._pattern else value
    if isinstance(value, Mapping):
      return {key: self.hide(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
      return [self.hide(item) for item in value]
    return value

  def reveal(self, text: str) -> str:
    """The text with every placeholder replaced by what it stands for."""
    return re.sub(f"{self._OPEN}([0-9]+){self._CLOSE}", lambda m: self.hidden[int(m[1])], text)

  def _replace(self, match: re.Match) -> str:
    lead = match["lead"] or ""
    self.hidden.append(match.group()[len(lead):])
    return f"{lead}{self._OPEN}{len(self.hidden) - 1}{self._CLOSE}"


def any_of(words: Sequence[str] | set[str]) -> str:
  """A regular expression that matches any of the words."""
  # Longest first: an alternation takes the first that fits.
  return "|".join(map(re.escape, sorted(words, key=len, reverse=True)))


class _GenerationTag(jinja2.ext.Extension):
  """`{% generation %}...{% endgeneration %}`, the mark some templates put around answers."""

  tags = {"generation"}

  def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
    """Renders the body as if the tag were not there."""
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
  """The template of a chat format, compiled once for each source."""
  # The environment that templates on Hugging Face are written for, sandboxed: a template is data.
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True,
      extensions=[jinja2.ext.loopcontrols, _GenerationTag])

  def raise_exception(message: str):
    raise jinja2.TemplateError(message)

  def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)

  environment.filters["tojson"] = tojson
  environment.globals["raise_exception"] = raise_exception
  environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
  return environment.from_string(source)


def read_template(folder: Path, config: Mapping[str, Any]) -> str:
  """The template of a model folder: its file, or what tokenizer_config.json (`config`) holds, one
  or the default of several; "" for none.

  Raises:
    UserError: it is no text.
  """
  template = config.get("chat_template") or ""
  if isinstance(template, list):  # several named templates
    template = next((entry.get("template") for entry in template if isinstance(entry, dict)
                     and entry.get("name") == "default"), "")
  own = folder / "chat_template.jinja"
  if own.is_file():
    try:
      template = own.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
      raise UserError(f"{own} is not text: {error}") from None
  if not isinstance(template, str):
    raise UserError(f"{folder / 'tokenizer_config.json'}: chat_template is no text")
  return template
