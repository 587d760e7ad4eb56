"""Bucket paths: which fields take one, the specs they become, and a store that lies in one."""

import json
import os
import pickle
import shutil

import fsspec
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from etils.epath import backend as epath_backend
from orbax.checkpoint._src.path import gcs_utils

from spec_jax.errors import UserError
from tests.train_drafter.test_store import NAMES, make_arrays, make_store
from train_drafter import buckets, manifest, store, urls
from train_drafter import config as config_lib
from train_drafter.checkpoint import Checkpoints
from train_drafter.config import Config

# Values.


@pytest.mark.parametrize("url, spec", [
  ("gs://lab/runs/a", {"driver": "gcs", "bucket": "lab", "path": "runs/a/"}),
  ("gs://lab/runs/a/", {"driver": "gcs", "bucket": "lab", "path": "runs/a/"}),
  ("s3://lab.data/x", {"driver": "s3", "bucket": "lab.data", "path": "x/"}),
  ("gs://lab", {"driver": "gcs", "bucket": "lab", "path": ""}),
  ("gs://lab/", {"driver": "gcs", "bucket": "lab", "path": ""}),
])
def test_the_spec_of_a_bucket_is_the_one_tensorstore_reads_from_the_url(url, spec, monkeypatch):
  monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
  assert urls.kvstore(url) == spec
  known = ts.KvStore.Spec(url if url.endswith("/") or url.count("/") < 3 else f"{url}/").to_json()
  known.pop("context", None)
  assert {"path": "", **known} == spec


def test_the_spec_of_a_folder_is_a_file_store(tmp_path):
  assert urls.kvstore(tmp_path) == {"driver": "file", "path": f"{tmp_path}/"}
  assert urls.kvstore("a/b")["path"] == f"{os.getcwd()}/a/b/"
  assert not urls.is_bucket(tmp_path) and urls.is_bucket("s3://a/b")


@pytest.mark.parametrize("field, value, said", [
  ("storage.features", "runs/x", r"storage.features='runs/x' must be gs://BUCKET/FOLDER or s3://"),
  ("storage.features", "gs://", "must be gs://BUCKET/FOLDER or s3://BUCKET/FOLDER; leave it empty"),
  ("storage.features", "gs://La b/x", "must be gs://"),
  ("storage.features", "http://lab/x", "must be gs://"),
  ("storage.checkpoints", "s3://lab/x", r"'s3://lab/x' must be gs://BUCKET/FOLDER; leave it empty "
                                        "for the work folder, which may be a mounted bucket"),
  ("target.source", "gs://lab/model", "target.source=gs://lab/model: is a bucket, and this must be "
                                      "a path of this machine: mount the bucket"),
  ("prompts.path", "a.jsonl, s3://lab/b.jsonl", "prompts.path=a.jsonl, s3://lab/b.jsonl: is a"),
  ("prompts.eval_path", "s3://lab/e", "prompts.eval_path=s3://lab/e: is a bucket"),
  ("evaluate.path", "gs://lab/e", "evaluate.path=gs://lab/e: is a bucket"),
  ("train.init_from", "gs://lab/d", "train.init_from=gs://lab/d: is a bucket"),
])
def test_what_a_bucket_cannot_be_is_one_line_naming_the_field(field, value, said):
  cfg = Config()
  section, name = field.split(".")
  setattr(getattr(cfg, section), name, value)
  with pytest.raises(UserError, match=said) as refused:
    config_lib.validate(cfg)
  assert "\n" not in str(refused.value)


def test_good_values_pass():
  cfg = Config()
  cfg.storage.features, cfg.storage.checkpoints = "s3://lab/x", "gs://lab-data/runs/a"
  cfg.target.source = "hf:org/name"
  config_lib.validate(cfg)


# A store in a bucket.


def put(folder, *parts):
  """A finished store whose parts lie in gs://lab/runs; returns where."""
  opened = manifest.begin(folder, stage="extract", config={})
  place = buckets.place(folder, "storage.features", "gs://lab/runs", opened.run, "part-*")
  for i, arrays in enumerate(parts):
    store.write_part(store.part_folder(place, i), arrays)
  manifest.finish(folder, opened, {
    "mode": "store", "taps": [0, 1], "hidden_size": 3, "topk": 0, "parts": len(parts),
    "arrays": list(NAMES), "last_hidden": "after_final_norm"})
  return place


def test_a_store_in_a_bucket_reads_as_one_on_disk(tmp_path, bucket):
  parts = make_arrays(), make_arrays((7, 2), (1, 1), first_job=7, seed=1)
  place = put(tmp_path / "extract", *parts)
  assert {p.name for p in (tmp_path / "extract").iterdir()} == {"manifest.json", "place.json"}
  run = manifest.Manifest.load(tmp_path / "extract").run
  assert str(place) == f"gs://lab/runs/extract-{run[:16]}"
  assert all(name.startswith(f"runs/extract-{run[:16]}/part-0000") for name in bucket.objects)
  far, near = (store.open_store(folder).documents for folder in (
    tmp_path / "extract", make_store(tmp_path / "near", *parts)))
  assert len(far) == len(near) == 6
  for a, b in zip(far, near, strict=True):
    for read in (lambda d: d.tokens, lambda d: d.features(1), lambda d: d.last_hidden(0, 1)):
      np.testing.assert_array_equal(read(a), read(b))
  again = pickle.loads(pickle.dumps(far[5]))  # as it comes to a data worker
  np.testing.assert_array_equal(again.features(), near[5].features())
  store.check_space(place, 10**15, 10**6, "store")  # a bucket holds any

  # The object that makes a part complete is the last of it.
  ends = [i for i, name in enumerate(bucket.written) if name.endswith("/complete")]
  starts = [i for i, name in enumerate(bucket.written) if "/part-00001/" in name]
  assert ends[0] < starts[0] and ends[1] == len(bucket.written) - 1
  store.remove_parts(tmp_path / "extract")
  assert not bucket.objects
  with pytest.raises(UserError, match="its parts are gone"):
    store.open_store(tmp_path / "extract")


def test_a_store_in_an_s3_bucket(tmp_path, amazon):
  path = buckets.epath.Path("s3://lab/runs/a/part-00000")
  assert urls.kvstore(path)["endpoint"].startswith("http://127.0.0.1:")
  assert not store.part_exists(path)
  store.write_part(path, make_arrays())
  assert store.part_exists(path) and amazon.written[-1] == "runs/a/part-00000/complete"
  far = store.read_part(path, NAMES)
  for d, lines in zip(far, (slice(0, 5), slice(5, 6)), strict=False):
    np.testing.assert_array_equal(d.features(), make_arrays()["features"][lines])
  amazon.refuses = True
  with pytest.raises(UserError, match="s3://lab/runs/a/part-00001: cannot be read .* look at the "):
    store.part_exists(path.with_name("part-00001"))
  amazon.refuses = False
  buckets.remove(path)
  assert not amazon.objects


def test_a_part_that_was_not_finished_is_none_and_is_written_anew(tmp_path, bucket):
  place = put(tmp_path / "extract", make_arrays())
  path = store.part_folder(place, 0)
  assert store.part_exists(path) and not store.part_exists(store.part_folder(place, 1))
  with pytest.raises(UserError, match="part-00000: cannot be written .it is there already"):
    store.write_part(path, make_arrays())
  for name in list(bucket.objects):  # as a process leaves it that is killed before the end
    if name.endswith("/complete") or "/features/c/" in name:
      del bucket.objects[name]
  bucket.write(f"{str(path).removeprefix('gs://lab/')}/features/c/9/0", b"of the killed process")
  assert not store.part_exists(path)
  store.write_part(path, make_arrays(seed=5))
  assert not any(name.endswith("c/9/0") for name in bucket.objects)
  found = store.open_store(tmp_path / "extract").documents[0]
  np.testing.assert_array_equal(found.features(), make_arrays(seed=5)["features"][:5])


def test_a_bucket_that_refuses_is_one_line(tmp_path, bucket):
  place = put(tmp_path / "extract", make_arrays())
  cfg = Config()
  cfg.storage.features = "gs://lab/runs"
  buckets.check_access(cfg)
  assert not any("probe" in name for name in bucket.objects)
  bucket.refuses = True
  with pytest.raises(UserError, match=r"storage.features=gs://lab/runs: cannot be written .*no "
                                      "access"):
    buckets.check_access(cfg)
  with pytest.raises(UserError, match="part-00001: cannot be written .*no access"):
    store.write_part(store.part_folder(place, 1), make_arrays())
  with pytest.raises(UserError, match="part-00000: cannot be read .*no access.*look at the access"):
    store.open_store(tmp_path / "extract")
  cfg = Config()
  cfg.storage.checkpoints = "gs://lab/runs"
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(buckets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="storage.checkpoints=gs://lab/runs: orbax needs the package"
                                        " gcsfs"):
      buckets.check_access(cfg)


# Where a stage has begun.


def test_a_stage_stays_where_it_has_begun(tmp_path):
  place = lambda base, run="1" * 32: str(
    buckets.place(tmp_path, "storage.features", base, run, "part-*"))
  assert place("") == str(tmp_path) and not (tmp_path / "place.json").exists()
  first = place("gs://lab/a")
  assert first == f"gs://lab/a/{tmp_path.name}-{'1' * 16}" == place("gs://lab/a")
  assert str(buckets.where(tmp_path)) == first
  for other in ("", "gs://lab/b"):
    with pytest.raises(UserError, match=f"storage.features='{other}': .* has begun with {first}"):
      place(other)
  with pytest.raises(UserError, match="has begun with"):
    place("gs://lab/a", "2" * 32)  # a folder of another run
  (tmp_path / "place.json").write_text(json.dumps({"place": 3}))
  with pytest.raises(UserError, match="place.json: damaged"):
    buckets.where(tmp_path)
  (tmp_path / "place.json").unlink()
  (tmp_path / "part-00000").mkdir()
  with pytest.raises(UserError, match="has begun with its files in it"):
    place("gs://lab/a")
  shutil.rmtree(tmp_path / "part-00000")
  assert place("gs://lab/a") == first


def test_checkpoints_lie_where_the_config_says(tmp_path):
  folder, cfg = tmp_path / "train", Config()
  run = manifest.begin(folder, stage="train", config={}).run
  assert buckets.checkpoints(cfg, folder) == folder / "checkpoints"
  cfg.storage.checkpoints = "gs://lab/c"
  assert str(buckets.checkpoints(cfg, folder)) == f"gs://lab/c/train-{run[:16]}"
  cfg.storage.checkpoints = ""
  with pytest.raises(UserError, match="storage.checkpoints='': .*/train has begun with gs://lab/c"):
    buckets.checkpoints(cfg, folder)


@pytest.mark.filterwarnings("default")  # of packages that are not of the tested set
def test_checkpoints_in_a_bucket(bucket, monkeypatch):
  """gs:// through orbax, tensorstore and gcsfs (which the installation does not bring): a step
  counts once it is complete, the best and the newest stay, and a new process finds them."""
  monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # JSON instead of gRPC
  gcsfs = pytest.importorskip("gcsfs", reason="gcsfs is not installed")
  monkeypatch.setenv("STORAGE_EMULATOR_HOST", os.environ["TENSORSTORE_GCS_HTTP_URL"])
  monkeypatch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})
  gcsfs.GCSFileSystem.clear_instance_cache()
  epath_backend.fsspec_backend._get_filesystem.cache_clear()
  gcs_utils.get_bucket.cache_clear()
  folder = buckets.epath.Path("gs://lab/runs/train-1")
  state = lambda value: {"w": jnp.full((3, 2), value, jnp.float32)}
  with Checkpoints(folder, max_to_keep=1, best="max") as saved:
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.1), (4, 0.2)):
      saved.save(step, state(step), {"step": step}, metric=score)
    saved.wait()
    assert (saved.latest_step, saved.best_step) == (4, 2)
  assert not any(name.startswith("runs/train-1/1/") for name in bucket.objects)
  for name in list(bucket.objects):  # as a kill during the save of step 4 leaves it
    if name.startswith("runs/train-1/4/") and name.endswith("commit_success.txt"):
      del bucket.objects[name]
  with Checkpoints(folder, max_to_keep=1, best="max") as saved:
    assert (saved.latest_step, saved.best_step) == (2, 2)
    found = saved.restore(state(0))
    assert found.step == 2 and found.extra == {"step": 2}
    np.testing.assert_array_equal(found.state["w"], np.full((3, 2), 2.0))
    bucket.refuses = True
    with pytest.raises(UserError, match="gs://lab/runs/train-1: a checkpoint was not written"):
      saved.save(5, state(5), {})
      saved.wait()
    bucket.refuses = False
