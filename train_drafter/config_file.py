"""Config files and the names of their fields: loading, strict overlay, and what a wrong name meant.

Called by the command line of train_drafter and by the sweeps of `launch`.
"""

import dataclasses
import difflib
import importlib.util
import traceback
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from spec_jax.errors import UserError


def load(path: str, arguments: Sequence[str], flag: str = "--config") -> Any:
  """What `get_config(*arguments)` of a Python file returns; `flag` is what named the file.

  Raises:
    UserError: one line, with the line of the file where it has one.
  """
  config = call(path, "get_config", arguments, flag)[1]
  if isinstance(config, type) or not dataclasses.is_dataclass(config):
    kind = f"the class {config.__name__}" if isinstance(config, type) else type(config).__name__
    raise UserError(f"{path}: get_config() returned {kind}, not a dataclass")
  return config


def call(
    path: str, function: str, arguments: Sequence[str], flag: str) -> tuple[ModuleType, Any]:
  """Runs a Python file and a function of it; returns the module and what the function returned.

  Args:
    path: of the file.
    function: its name.
    arguments: of the call.
    flag: that named the file, for the messages.

  Raises:
    UserError: one line, with the line of the file where it has one.
  """
  if not Path(path).is_file():
    raise UserError(f"{flag}={path}: no such file")
  spec = importlib.util.spec_from_file_location("config_file", path)
  if spec is None:
    raise UserError(f"{flag}={path}: not a Python file")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
      raise UserError(f"{path}: has no function {function}()")
    return module, getattr(module, function)(*arguments)
  except UserError:
    raise
  except Exception as error:
    own = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    line = getattr(error, "lineno", None) or (own[-1] if own else 0)
    reason = " ".join(str(error).split())
    raise UserError(f"{path}:{line}: {type(error).__name__}: {reason}") from error


def fields(config: Any, prefix: str = "") -> Iterator[tuple[str, bool]]:
  """Dotted name of every field, and whether it is a group of fields."""
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    group = dataclasses.is_dataclass(value)
    yield prefix + field.name, group
    if group:
      yield from fields(value, f"{prefix}{field.name}.")


def settle_tuples(config: Any, prefix: str = "") -> None:
  """Gives the elements of every `tuple[T, ...]` field their type, which the flags leave open."""
  for field in dataclasses.fields(config):
    name, value = prefix + field.name, getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      settle_tuples(value, f"{name}.")
    elif typing.get_origin(field.type) is tuple:
      kind = typing.get_args(field.type)[0]
      for item in value:
        if type(item) is not kind and not (kind is float and type(item) is int):
          raise UserError(f"--config.{name}: {item!r} is not of type {kind.__name__}")
      setattr(config, field.name, tuple(kind(item) for item in value))


def overlay(config: Any, overrides: Mapping[str, Any]) -> None:
  """Sets fields by their dotted names, as `--config.name=value` would.

  Lists become tuples and integers floats where the field is declared so; any other type is left for
  `validate` to refuse.

  Raises:
    UserError: a name is no field (with the nearest one), or a group of fields.
  """
  names = dict(fields(config))
  for name, value in overrides.items():
    if names.get(name, True):
      raise UserError(wrong_field(name, names, flag=""))
    *groups, last = name.split(".")
    owner = config
    for group in groups:
      owner = getattr(owner, group)
    kind = next(field.type for field in dataclasses.fields(owner) if field.name == last)
    setattr(owner, last, _as_declared(value, kind))


def _as_declared(value: Any, kind: Any) -> Any:
  if typing.get_origin(kind) is tuple:
    if isinstance(value, list | tuple):
      return tuple(_as_declared(item, typing.get_args(kind)[0]) for item in value)
    return value
  return float(value) if kind is float and type(value) is int else value


def wrong_field(name: str, names: Mapping[str, bool], flag: str = "--config.") -> str:
  """The message for a name that cannot be set: a group of fields, or no field.

  Args:
    name: as it was given, dotted.
    names: of `fields`.
    flag: what stands before a name on the command line.
  """
  if names.get(name):
    one = next(other for other in names if other.startswith(f"{name}."))
    return f"{flag}{name} is a group of fields; set one of them, such as {flag}{one}"
  leaves = [other for other, group in names.items() if not group]

  # The last part weighs most: `--config.lr` should find train.lr.
  def likeness(other: str) -> float:
    whole = difflib.SequenceMatcher(None, name, other).ratio()
    last = difflib.SequenceMatcher(None, name.split(".")[-1], other.split(".")[-1]).ratio()
    return whole + last

  nearest = max(leaves, key=likeness)
  return f"{flag}{name}: no such field; the nearest is {flag}{nearest}"
