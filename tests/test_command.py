"""How a program of this project ends: one line and status 2 for what the user can mend."""

import pytest

from spec_jax import command
from spec_jax.errors import UserError


@pytest.fixture(autouse=True)
def often(monkeypatch):
  """`app.run` without what absl registers once a process."""
  monkeypatch.setattr(command.app, "run", lambda body, flags_parser: body(flags_parser([])))


def ended(execute, capsys):
  """Exit status and error output of a program that does `execute`."""
  with pytest.raises(SystemExit) as caught:
    command.run(execute, lambda argv: None)
  return caught.value.code, capsys.readouterr().err


def full_disk(_):
  with open("/dev/full", "w") as file:
    file.write("x")


def raising(error):
  def execute(_):
    raise error
  return execute


@pytest.mark.parametrize("execute,line", [
    (raising(UserError("train.lr=-1 must be at least 0")), "train.lr=-1 must be at least 0"),
    (full_disk, "No space left on device"),
    (raising(PermissionError(13, "Permission denied", "run/x")), "run/x: Permission denied"),
    (raising(OSError(30, "Read-only file system", "run/x")), "run/x: Read-only file system")])
def test_what_the_user_can_mend_is_one_line(execute, line, capsys):
  assert ended(execute, capsys) == (2, f"error: {line}\n")


def test_a_mistake_of_the_program_stays_a_traceback():
  with pytest.raises(FileNotFoundError):
    command.run(raising(FileNotFoundError(2, "No such file", "x")), lambda argv: None)


def test_the_status_of_a_program_is_its_own(capsys):
  assert ended(lambda _: 1, capsys) == (1, "")
  assert ended(raising(KeyboardInterrupt()), capsys) == (130, "")
