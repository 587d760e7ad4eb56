"""Two processes in one work folder: the second is refused, a killed one leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spec_jax.errors import UserError
from tests.train_drafter import tiny_run
from train_drafter import __main__ as cli
from train_drafter import lock

ROOT = Path(__file__).parents[2]
HOLDER = """
import sys, time
from pathlib import Path
from train_drafter import lock
with lock.held(Path(sys.argv[1]), "generate"):
  print("held", flush=True)
  time.sleep(60)
"""


def test_a_stage_that_another_process_runs_is_refused(tmp_path):
  process = subprocess.Popen(
    [sys.executable, "-c", HOLDER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
  try:
    assert process.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"--workdir={tmp_path}: another process runs stage gen"):
      with lock.held(tmp_path, "generate"):
        raise AssertionError("both hold it")
    with lock.held(tmp_path, "train"):  # another stage is none of its business
      pass
  finally:
    process.send_signal(signal.SIGKILL)
    process.communicate()
  with lock.held(tmp_path, "generate"):
    pass
  with lock.held(tmp_path, "generate"):
    pass


def test_the_command_line_holds_it(tmp_path):
  cfg = tiny_run.make_config(tmp_path)
  options = cli.Options(cfg, tmp_path / "run", ("prompts",), False, False, "")
  (tmp_path / "run").mkdir()
  with lock.held(tmp_path / "run", "prompts"):
    with pytest.raises(UserError, match="another process runs stage prompts there"):
      cli.execute(options)
  assert not (tmp_path / "run" / "prompts").exists()
  cli.execute(options)
  assert (tmp_path / "run" / "prompts" / "prompts.jsonl").exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
  with pytest.raises(UserError, match="missing: cannot be written .No such file"):
    with lock.held(tmp_path / "missing", "train"):
      raise AssertionError
  assert os.listdir(tmp_path) == []
