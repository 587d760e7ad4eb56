"""One finished tiny run, shared by the tests of the stages that need a whole one."""

import pytest

from tests.train_drafter import tiny_run
from train_drafter import evaluate, export, generate, prompts, train


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
  """(config, workdir) of a run that went through every stage. Read it, copy it, leave it alone."""
  root = tmp_path_factory.mktemp("tiny")
  cfg = tiny_run.make_config(root)
  for stage in (prompts, generate, train, evaluate, export):
    stage.run(cfg, root / "run")
  return cfg, root / "run"
