"""One finished tiny run, shared by the tests of the stages that need a whole one."""

import pytest

from tests.train_drafter import fake_bucket, tiny_run
from train_drafter import buckets, evaluate, export, generate, prompts, store, train


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
  """(config, workdir) of a run that went through every stage. Read it, copy it, leave it alone."""
  root = tmp_path_factory.mktemp("tiny")
  cfg = tiny_run.make_config(root)
  for stage in (prompts, generate, train, evaluate, export):
    stage.run(cfg, root / "run")
  return cfg, root / "run"


def forget():
  """Drops the clients that know the address of an earlier server."""
  buckets._open.cache_clear()
  store._reading.cache_clear()


@pytest.fixture
def bucket(monkeypatch):
  """The bucket gs://lab on this machine, which tensorstore's own client talks to."""
  forget()
  with fake_bucket.serving(fake_bucket.Google) as (found, address):
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    yield found
  forget()


@pytest.fixture
def amazon(monkeypatch):
  """The bucket s3://lab likewise."""
  forget()
  with fake_bucket.serving(fake_bucket.Amazon) as (found, address):
    for name, value in {"ENDPOINT_URL": address, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b",
                        "REGION": "us-east-1", "EC2_METADATA_DISABLED": "true"}.items():
      monkeypatch.setenv(f"AWS_{name}", value)
    yield found
  forget()
