"""Paths that are URLs of a bucket: which fields take one, and the store that one is.

Called by config.py, by the command lines and by buckets.py, which reads and writes there.
"""

import os
import re
from pathlib import Path
from typing import Any

from spec_jax.errors import UserError

DRIVERS = {"gs": "gcs", "s3": "s3"}  # scheme -> kvstore driver of tensorstore
FIELDS = {"features": ("gs", "s3"), "checkpoints": ("gs",)}  # of storage -> schemes it takes
_URL = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<bucket>[a-z0-9][a-z0-9._-]+)(/[^?#\s]*)?")


def is_bucket(path: str | os.PathLike) -> bool:
  """Whether a path is a URL and no path of this machine."""
  return "://" in os.fspath(path)


def check_field(name: str, value: str) -> None:
  """Refuses a value of storage.* that is no folder of a bucket it can take; "" is none.

  Raises:
    UserError: names the field and its value, and what to do.
  """
  if not value:
    return
  schemes = FIELDS[name.removeprefix("storage.")]
  found = _URL.fullmatch(value)
  if found is None or found["scheme"] not in schemes:
    known = " or ".join(f"{scheme}://BUCKET/FOLDER" for scheme in schemes)
    raise UserError(f"{name}={value!r} must be {known}; leave it empty for the work folder, which "
                    "may be a mounted bucket")


def check_local(name: str, value: str) -> None:
  """Refuses a bucket where only files of this machine are read or written; `value` may be a
  comma-separated list.

  Raises:
    UserError: names the flag or field and its value, and what to do.
  """
  if any(part.strip().partition("://")[0] in DRIVERS for part in value.split(",")):
    raise UserError(f"{name}={value}: is a bucket, and this must be a path of this machine: mount "
                    "the bucket (gcsfuse, mountpoint-s3) or copy it; a bucket itself is taken by "
                    "storage.features and storage.checkpoints alone")


def kvstore(folder: str | os.PathLike) -> dict[str, Any]:
  """The spec of tensorstore's key-value store that a folder is, its keys below the folder.

  Args:
    folder: of this machine, or gs://BUCKET/FOLDER or s3://BUCKET/FOLDER; of the latter at
      $AWS_ENDPOINT_URL where that is set, as Amazon's own tools have it (MinIO, Ceph).
  """
  text = os.fspath(folder)
  if not is_bucket(text):
    return {"driver": "file", "path": f"{Path(text).absolute()}/"}
  scheme, _, rest = text.partition("://")
  bucket, _, key = rest.partition("/")
  key = key.strip("/")
  spec = {"driver": DRIVERS[scheme], "bucket": bucket, "path": f"{key}/" if key else ""}
  if scheme == "s3" and os.environ.get("AWS_ENDPOINT_URL"):
    spec |= {"endpoint": os.environ["AWS_ENDPOINT_URL"],
             "aws_region": os.environ.get("AWS_REGION", "us-east-1")}
  return spec
