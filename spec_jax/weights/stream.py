"""Tensors that reach memory a few rows at a time.

A file holds a tensor in its own type and a decoder in another: converting it whole would hold it
twice or more. A checkpoint therefore yields blocks of rows in float32, and whoever reads it puts
each where it belongs. Called by both loaders and by `load_target`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
  from spec_jax.weights import Checkpoint

BLOCK_BYTES = 4 << 20  # of float32

# Where the rows lie in the tensor (a slice of its first axis, or an expert and a slice of its
# rows), and their float32 values.
Block = tuple[slice | tuple[int, slice], np.ndarray]


def spans(shape: Sequence[int]) -> Iterator[slice]:
  """Slices of the first axis that hold at most BLOCK_BYTES of float32, but at least one row."""
  row = 4 * math.prod(shape[1:])
  step = max(1, BLOCK_BYTES // row)
  for first in range(0, shape[0], step):
    yield slice(first, min(first + step, shape[0]))


def whole(checkpoint: "Checkpoint", name: str) -> np.ndarray:
  """One tensor of a checkpoint in float32, put together in place."""
  value = np.empty(checkpoint.shape(name), np.float32)
  for rows, block in checkpoint.blocks(name):
    value[rows] = block
  return value


class Lazy(Mapping):
  """The tensors of a checkpoint in float32 by canonical name, each read when it is asked for."""

  def __init__(self, checkpoint: "Checkpoint"):
    self._checkpoint = checkpoint
    self._names = dict.fromkeys(checkpoint.names())

  def __getitem__(self, name: str) -> np.ndarray:
    if name not in self._names:
      raise KeyError(name)
    return self._checkpoint.read(name)

  def __contains__(self, name: object) -> bool:  # else asking reads the tensor
    return name in self._names

  def __iter__(self) -> Iterator[str]:
    return iter(self._names)

  def __len__(self) -> int:
    return len(self._names)
