"""One process works on a stage folder at a time. The command line of train_drafter takes the lock.

Two runs of the same command in one work folder would write parts of the same name and remove each
other's unfinished checkpoints. The lock is the kernel's (flock): it ends with the process that
holds it, also with a killed one, so nothing is left to clean up.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from spec_jax.errors import UserError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


@contextlib.contextmanager
def held(workdir: Path, stage: str) -> Iterator[None]:
  """Holds the lock of one stage of a work folder.

  A file system without locks gives no protection and is no reason to stop.

  Raises:
    UserError: another process holds it, or the folder cannot be written.
  """
  path = workdir / f".{stage}.lock"
  try:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
  except OSError as error:
    raise UserError(f"--workdir={workdir}: cannot be written ({error.strerror})") from error
  try:
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise UserError(f"--workdir={workdir}: another process runs stage {stage} there; wait for it "
                      "or use another --workdir") from None
    except OSError as error:
      if error.errno not in _NO_LOCKS:
        raise UserError(f"{path}: cannot be locked ({error.strerror})") from error
    yield
  finally:
    os.close(descriptor)
