"""Tensors of a pytorch_model.bin, read without torch and without running what a pickle may hold.

The first EAGLE-3 drafters were published so. The file is a zip archive: data.pkl names the tensors,
data/KEY holds the bytes of each storage. A pickle is a program; here it may call four harmless
names, and any other one is refused. Called by published.py.
"""

import collections
import pickle
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from spec_jax.errors import UserError

FILE = "pytorch_model.bin"
_STORAGES = {
    "DoubleStorage": np.float64, "FloatStorage": np.float32, "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16, "LongStorage": np.int64, "IntStorage": np.int32,
    "BoolStorage": np.bool_}


def read(path: Path) -> dict[str, np.ndarray]:
  """Every tensor by name, as stored.

  Raises:
    UserError: not such an archive, or its pickle asks for anything but tensors; by name.
  """
  try:
    with zipfile.ZipFile(path) as archive:
      entry = next((n for n in archive.namelist() if n.endswith("/data.pkl")), None)
      if entry is None:
        raise UserError(f"{path} holds no data.pkl: an archive of torch from before 1.6?")
      root = entry.removesuffix("data.pkl")
      if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
        raise UserError(f"{path}: big-endian tensors are not supported")
      with archive.open(entry) as file:
        found = _Unpickler(file, archive, root, path).load()
  except UserError:
    raise
  except Exception as error:  # a damaged archive or pickle raises what it likes
    raise UserError(f"{path} cannot be read as tensors: {error}") from None
  if not isinstance(found, dict) or not all(
      isinstance(k, str) and isinstance(v, np.ndarray) for k, v in found.items()):
    raise UserError(f"{path} holds something else than tensors by name")
  return dict(found)


class _Unpickler(pickle.Unpickler):
  """Builds arrays from storages and refuses every name that is not needed for that."""

  def __init__(self, file: Any, archive: zipfile.ZipFile, root: str, path: Path):
    super().__init__(file)
    self._archive, self._root, self._path = archive, root, path

  def find_class(self, module: str, name: str) -> Any:
    """The few names that a file of tensors needs."""
    if (module, name) == ("collections", "OrderedDict"):
      return collections.OrderedDict
    if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
      return _tensor
    if (module, name) == ("torch._utils", "_rebuild_parameter"):
      return lambda data, *rest: data
    if module == "torch" and name in _STORAGES:
      return np.dtype(_STORAGES[name])
    raise UserError(f"{self._path} asks for {module}.{name}, which is not needed for tensors and "
                    "is not run")

  def persistent_load(self, pid: Any) -> np.ndarray:
    """The storage ("storage", type, key, device, size) as a flat array."""
    _, dtype, key, _, size = pid
    values = np.frombuffer(self._archive.read(f"{self._root}data/{key}"), dtype)
    if len(values) != size:
      raise UserError(f"{self._path}: storage {key} has {len(values)} values, not {size}")
    return values


def _tensor(storage, offset, shape, strides, *rest):
  """A view of a storage; strides count values."""
  size = storage.dtype.itemsize
  reach = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
  if 0 in shape:
    return np.zeros(shape, storage.dtype)
  if offset < 0 or min((*strides, 0)) < 0 or reach >= len(storage):
    raise ValueError(f"a tensor of shape {list(shape)} leaves its storage")
  return np.lib.stride_tricks.as_strided(
      storage[offset:], shape, [s * size for s in strides], writeable=False)
