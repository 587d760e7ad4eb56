"""Weights held as int8 with one scale for each output channel (dtype "int8w").

Symmetric and without calibration: a row of [out, in] is its largest magnitude / 127 times whole
numbers, so no weight is further than half a step from its own. A product dequantises on the way:
whole numbers up to 127 are exact in bfloat16, the sum is float32, and the scale multiplies the
result. Activations stay bfloat16, as beside bfloat16 weights: a step of decoding reads every weight
and few activations. `load_target` and `load_drafter` make them, `decoder.linear` and `moe.py`
multiply with them.

The library qwix (0.1.8) works with this JAX and is the faster one on CPU (5.5 against 7.6 ms for
one row, 7.8 against 8.2 for six), but it dequantises a matrix in front of the product, which
XLA:CPU takes out of the decoding loop: 20 MiB of int8 weights then hold 81 MiB of floating copies,
where the pieces of `linear` hold one.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int8

from spec_jax.types import pytree

LEVELS = 127  # -128 is left out: the range is symmetric
COMPUTE = jnp.bfloat16
_PIECE_BYTES = 4 << 20  # of COMPUTE: what stays in a cache between conversion and product


@pytree
class Int8Weight:
  """A matrix [out, in], or the matrices of all experts [E, out, in].

  To code that asks for shape and dtype it is a matrix in the compute dtype; `jnp.asarray` and
  `np.asarray` give the float32 values that it stands for.

  Attributes:
    values: [*out, in] whole numbers.
    scale: [*out] what they are multiplied by.
  """

  values: Int8[Array, "*O I"]
  scale: Float[Array, "*O"]

  @property
  def shape(self) -> tuple[int, ...]:
    return self.values.shape

  @property
  def ndim(self) -> int:
    return self.values.ndim

  @property
  def size(self) -> int:
    return self.values.size

  @property
  def dtype(self):
    return jnp.dtype(COMPUTE)

  @property
  def nbytes(self) -> int:
    return self.values.nbytes + self.scale.nbytes

  def __getitem__(self, rows) -> "Int8Weight":
    """Some of the rows (or experts), still as int8; `...` for all."""
    return self if rows is ... else Int8Weight(self.values[rows], self.scale[rows])

  def rows(self, ids: Int[Array, "*n"]) -> Float[Array, "*n I"]:
    """Rows in the compute dtype: what a lookup in an embedding gives."""
    picked = self[ids]
    return (picked.values * picked.scale[..., None]).astype(COMPUTE)

  def __jax_array__(self) -> Array:
    return self.values * self.scale[..., None]

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    return np.asarray(self.values * self.scale[..., None], dtype)


Weight = Array | np.ndarray | Int8Weight  # a tensor on the device, on the host, or as int8


def quantise(value: Float[np.ndarray, "*O I"]) -> tuple[np.ndarray, np.ndarray]:
  """Values int8 [*O, I] and scales float32 [*O] of float32 rows.

  A row of zeros has scale 1. Rows are quantised apart from each other, so parts of a matrix may be
  done one by one.
  """
  top = np.abs(value).max(-1)
  scale = np.where(top > 0, top / np.float32(LEVELS), np.float32(1)).astype(np.float32)
  return np.rint(value / scale[..., None]).astype(np.int8), scale


def quantised(value: Array | np.ndarray) -> Int8Weight:
  """An array in memory as an Int8Weight."""
  return Int8Weight(*map(jnp.asarray, quantise(np.asarray(value, np.float32))))


def parts(weight: Array | Int8Weight) -> tuple[Array, Array | None]:
  """What a product multiplies with, and what multiplies its result (None for nothing)."""
  if isinstance(weight, Int8Weight):
    return weight.values.astype(COMPUTE), weight.scale
  return weight, None


def scaled(product: Array, scale: Array | None) -> Array:
  """A product of `parts`, completed."""
  return product if scale is None else product * scale


def pieces(shape: tuple[int, ...]) -> int:
  """Into how many equal blocks of rows a matrix is cut on CPU: at least two, and so many that one
  is small; 1 where there is no such number below 64."""
  rows, columns = shape
  least = max(2, -(-rows * columns * jnp.dtype(COMPUTE).itemsize // _PIECE_BYTES))
  return next((n for n in range(least, max(64, 2 * least)) if rows % n == 0), 1)
