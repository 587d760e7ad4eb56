"""Flags made from the fields of a dataclass, and commands that stand behind `--`.

Called by the launchers that have options of their own (slurm.py, gke.py).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from spec_jax import command
from spec_jax.errors import UserError


def define(prefix: str, kind: type, values: flags.FlagValues) -> None:
  """Defines one flag --PREFIX_NAME for each field of a dataclass in `values`."""
  makers = {int: flags.DEFINE_integer, bool: flags.DEFINE_bool, str: flags.DEFINE_string}
  for field in dataclasses.fields(kind):
    makers[field.type](f"{prefix}_{field.name}", field.default,
                       f"see Options in launch/{prefix}.py", flag_values=values)


def read(prefix: str, kind: type, check: Callable[[Any], None], values: flags.FlagValues) -> Any:
  """The dataclass of a command line, checked.

  Raises:
    UserError: of `check`.
  """
  found = kind(**{field.name: values[f"{prefix}_{field.name}"].value
                  for field in dataclasses.fields(kind)})
  check(found)
  return found


def parse(argv: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
  """Flags, and the words of the command behind `--`.

  Raises:
    UserError: one line for what is wrong with the flags; there is no command.
  """
  at = argv.index("--") if "--" in argv else len(argv)
  values, words = command.parse(argv[:at], flags.FLAGS), list(argv[at + 1:])
  if not words:
    raise UserError("the command to run stands behind --")
  return values, words
