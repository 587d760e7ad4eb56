"""What the command lines of this project share: how flags are read and how a program ends."""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags, logging

from spec_jax.errors import UserError

# What a disk or its owner refuses: a full disk, a quota, a limit, a read-only or a foreign folder.
_DISK = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO,
         errno.ENAMETOOLONG)


def parse(argv: Sequence[str], values: flags.FlagValues) -> flags.FlagValues:
  """Reads a command line of flags alone.

  Raises:
    UserError: one line for whatever is wrong with it.
  """
  try:
    rest = values(list(argv))
  except flags.Error as error:
    raise UserError(" ".join(str(error).split())) from None
  if len(rest) > 1:
    raise UserError(f"unexpected argument {rest[1]!r}; options start with --")
  return values


def run(
    execute: Callable[[Any], int | None], parser: Callable[[Sequence[str]], Any], *,
    interrupted: str = "") -> None:
  """Runs a program and ends the process.

  The exit status is what `execute` returns (None is 0), 2 with one line for bad input and for a
  file that the system refuses to read or write, 130 for an interrupt, 1 when the reader of the
  output has gone (`| head`).

  Args:
    execute: takes what `parser` returned.
    parser: takes the command line, flags of absl among it.
    interrupted: printed on an interrupt.
  """
  def body(options):
    if not flags.FLAGS["verbosity"].present:
      logging.set_verbosity(logging.WARNING)
    sys.exit(execute(options))

  try:
    app.run(body, flags_parser=parser)
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt:
    if interrupted:
      print(interrupted, file=sys.stderr)
    sys.exit(130)
  except BrokenPipeError:
    sys.stdout = open(os.devnull, "w")  # what is still buffered has nowhere to go
    sys.exit(1)
  except OSError as error:
    if error.errno not in _DISK:
      raise
    where = f"{error.filename}: " if error.filename else ""
    print(f"error: {where}{error.strerror}", file=sys.stderr)
    sys.exit(2)
