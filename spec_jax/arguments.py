"""The arguments of `generate` as numbers, texts and ids: a wrong type is named before any work.

What only looks like the right thing (1.5 tokens, True rows, a byte string as a list of ids) would
decode something else than was asked for.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spec_jax.errors import UserError


def whole(name: str, value: Any) -> int:
  """The value as an int.

  Raises:
    UserError: it is none, also True, "3" and 3.0.
  """
  try:
    if isinstance(value, bool | np.bool_):
      raise TypeError
    return operator.index(value)
  except TypeError:
    raise UserError(f"{name}={value!r} must be a whole number") from None


def real(name: str, value: Any) -> float:
  """The value as a float.

  Raises:
    UserError: it is no number.
  """
  try:
    if isinstance(value, bool | np.bool_ | str | bytes):
      raise TypeError
    return float(value)
  except (TypeError, ValueError):
    raise UserError(f"{name}={value!r} must be a number") from None


def per_prompt(name: str, value: Any, count: int, kind: Callable[[str, Any], Any]) -> list:
  """One value for all prompts, or one for each.

  Args:
    name: of the argument.
    value: a number, or `count` of them.
    count: of the prompts.
    kind: `whole` or `real`.

  Raises:
    UserError: one is no such number, or they are not `count`.
  """
  several = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
  values = list(value) if several and np.ndim(value) else [value] * count
  if len(values) != count:
    raise UserError(f"{name} has {len(values)} entries for {count} prompts")
  return [kind(name, item) for item in values]


def texts(name: str, value: Any) -> tuple[str, ...]:
  """One string or several.

  Raises:
    UserError: something else is among them.
  """
  if isinstance(value, str):
    return (value,)
  if not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
    raise UserError(f"{name}={value!r} must be strings")
  return tuple(value)


def ids(name: str, values: Any, vocab: int) -> tuple[int, ...]:
  """Several ids.

  Args:
    name: of the argument, for the message.
    values: the ids.
    vocab: how many there are.

  Raises:
    UserError: there is something else among them, or an id that does not exist.
  """
  if not isinstance(values, Sequence | np.ndarray | set | frozenset) or isinstance(
      values, str | bytes):
    raise UserError(f"{name}={values!r} must be ids")
  found = tuple(whole(f"{name}: id", i) for i in values)
  for i in found:
    if not 0 <= i < vocab:
      raise UserError(f"{name} holds id {i}, outside 0..{vocab - 1}")
  return found


def bias(values: Any, vocab: int) -> tuple[tuple[int, float], ...]:
  """(id, value) pairs of a mapping, by id.

  Raises:
    UserError: it is no mapping of existing ids to numbers.
  """
  if not isinstance(values, Mapping):
    raise UserError(f"bias={values!r} must be a mapping of ids to numbers")
  found = [(i, real(f"bias of id {i}", values[i])) for i in ids("bias", tuple(values), vocab)]
  return tuple(sorted(found))
