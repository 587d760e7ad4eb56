"""Folders of a bucket: what of a run may lie at gs:// or s3://, and how it is handled there.

storage.features names one for the parts of the feature store (tensorstore reads and writes gs://
and s3://), storage.checkpoints one for the checkpoints (orbax takes gs:// alone, with the package
gcsfs). The rest of a run is small, or needs what a bucket lacks (renaming, appending, locks): it
stays in the work folder, which is local or mounted. There, place.json of a stage says where its
large files lie: below the bucket's folder under a name of that run alone, so that two runs never
meet.

A part in a bucket cannot appear by a rename: it is there once the object `complete` is, which is
written last.
"""

import contextlib
import functools
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorstore as ts
from etils import epath

from spec_jax.errors import UserError
from train_drafter import distributed, manifest, urls

Folder = Path | epath.Path  # a folder here, or one in a bucket
PLACE = "place.json"
FAILURES = (OSError, ValueError, RuntimeError)  # how tensorstore reports what a bucket refuses
_COMPLETE = "complete"
_TRIES = 3  # of a request of `check_access`: a missing bucket is told in seconds


def check_access(cfg: Any) -> None:
  """Writes and removes a small object in every bucket of a config, before hours of work.

  Raises:
    UserError: names the field, its value and why it cannot be written.
  """
  if cfg.storage.checkpoints and importlib.util.find_spec("gcsfs") is None:
    raise UserError(f"storage.checkpoints={cfg.storage.checkpoints}: orbax needs the package gcsfs "
                    "for it (pip install gcsfs); or mount the bucket and leave the field empty")
  for name in urls.FIELDS:
    url = getattr(cfg.storage, name)
    if not url:
      continue
    spec = urls.kvstore(url)
    retries = {f"{spec['driver']}_request_retries": {"max_retries": _TRIES}}
    key = f".probe-{distributed.index()}-{os.getpid()}"
    try:
      store = ts.KvStore.open({**spec, "context": retries}).result()
      store.write(key, b"").result()
      del store[key]
    except FAILURES as error:
      raise UserError(f"storage.{name}={url}: cannot be written ({reason(error)})") from None


# Where the large files of a stage lie.


def place(folder: Path, field: str, base: str, run: str, local: str) -> Folder:
  """Where a stage writes its large files: its own folder, or one below `base` of this run alone.

  What was decided when the first of them was written holds until the stage is made anew.

  Args:
    folder: of the stage.
    field: "storage.features" or "storage.checkpoints", for the message.
    base: its value; "" for the stage's own folder.
    run: of the stage's manifest.
    local: glob pattern of such files in the stage's own folder.

  Raises:
    UserError: the stage has begun elsewhere.
  """
  wanted = str(epath.Path(base) / f"{folder.name}-{run[:16]}") if base else ""
  known = str(where(folder)) if (folder / PLACE).exists() else ""
  begun = bool(known) or any(folder.glob(local))
  if begun and known != wanted:
    raise UserError(f"{field}={base!r}: {folder} has begun with {known or 'its files in it'}; give "
                    "the value it was begun with, or remove the folder and run its stage again")
  if not wanted:
    return folder
  if not known and distributed.is_primary():
    manifest.write_json(folder / PLACE, {"place": wanted})
  return epath.Path(wanted)


def where(folder: Path) -> Folder:
  """Where the large files of a stage lie, by its place.json; its own folder without one.

  Raises:
    UserError: place.json is damaged.
  """
  path = folder / PLACE
  if not path.exists():
    return folder
  try:
    url = json.loads(path.read_text(encoding="utf-8"))["place"]
    if not urls.is_bucket(url):
      raise ValueError(f"{url!r} is no bucket")
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise UserError(f"{path}: damaged ({error})") from None
  return epath.Path(url)


def checkpoints(cfg: Any, folder: Path) -> Folder:
  """Where training keeps its checkpoints.

  Args:
    cfg: of the run.
    folder: of the train stage, with its manifest.

  Raises:
    UserError: as `place`.
  """
  base = cfg.storage.checkpoints
  run = manifest.Manifest.load(folder).run if base else ""
  found = place(folder, "storage.checkpoints", base, run, "checkpoints")
  return found if base else found / "checkpoints"


# Folders in a bucket.


def is_complete(folder: Folder) -> bool:
  """Whether all of a folder that `new_folder` made is there."""
  return _open(os.fspath(folder)).read(_COMPLETE).result().state == "value"


@contextlib.contextmanager
def new_folder(folder: Folder) -> Iterator[None]:
  """The body writes below the folder, which then counts as complete. What a killed process left
  there goes first.

  Raises:
    FileExistsError: it is complete already.
  """
  if is_complete(folder):
    raise FileExistsError("it is there already")
  store = _open(os.fspath(folder))
  store.delete_range(ts.KvStore.KeyRange()).result()
  yield
  store.write(_COMPLETE, b"").result()


def remove(folder: Folder) -> None:
  """Removes everything below a folder; the object that makes it complete first."""
  store = _open(os.fspath(folder))
  del store[_COMPLETE]
  store.delete_range(ts.KvStore.KeyRange()).result()


def reason(error: BaseException) -> str:
  """The first line of an error, without where in the library it arose."""
  return re.split(r"\n| \[(?:source locations|http_response)", str(error), maxsplit=1)[0][:300]


@functools.cache
def _open(folder: str) -> ts.KvStore:
  return ts.KvStore.open(urls.kvstore(folder)).result()
