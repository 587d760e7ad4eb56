"""Where arrays lie on many devices: the (data, fsdp, tensor) mesh and one table of logical axes.

A mesh enters a program with the target: `load_target(..., mesh=mesh)` leaves on each device its
slices of the parameters, and whatever runs with that target finds the mesh in their shardings
(`mesh_of`): decoding, extraction, training and evaluation. Without a mesh (None) every function
here gives back what it was given, and nothing else is computed than on one device.

  data    every device holds all of a parameter and takes its share of the rows of a batch
  fsdp    takes its share of the rows as well, and of each parameter a slice of the hidden size,
          which is gathered where it is used (ZeRO-3, 1910.02054)
  tensor  heads, inner states of the MLP and vocabulary are divided (Megatron, 1909.08053)

Arguments are placed, results are pinned to the same places, and XLA divides the programs in
between; all that a model does is to pin the residual stream of its layers (`pin_states`).
Everything here works over several processes too, where each holds the slices of its own devices
alone.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from spec_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")

# Logical axis -> the mesh axes that divide it, the first ones first. What is not here stays whole.
# Experts stay whole, each divided inside: on few tokens their matrices are gathered by id, on many
# they come one after the other, and neither can leave out a device that holds other experts.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}

# Name of a parameter (the last part of its canonical name) -> logical axes. Weights lie as
# [out, in]; norms and whatever else is not here stay whole on every device. Optimizer states and
# master weights have the path of their parameter and lie as it does.
PARAMETERS: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", "embed"),
    "head": ("vocab", "embed"),
    "wq": ("heads", "embed"),
    "wk": ("kv_heads", "embed"),
    "wv": ("kv_heads", "embed"),
    "wo": ("embed", "heads"),
    "bq": ("heads",),
    "bk": ("kv_heads",),
    "bv": ("kv_heads",),
    "w_gate": ("mlp", "embed"),
    "w_up": ("mlp", "embed"),
    "w_down": ("embed", "mlp"),
    "router": (None, "embed"),
    "experts_gate": (None, "mlp", "embed"),
    "experts_up": (None, "mlp", "embed"),
    "experts_down": (None, "embed", "mlp"),
    "fc": ("embed", None),  # eagle3, dflash, dspark: from the tapped layers
    "markov_w1": ("vocab", None),  # dspark
    "markov_w2": ("vocab", None),
}
_HEADS = ("heads", "kv_heads")


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1,
    devices: Sequence[Any] | None = None) -> Mesh:
  """The mesh over the devices of all processes (or over `devices`), tensor the innermost axis.

  Args:
    data: devices along this axis; 0 or -1 for as many as the others leave.
    fsdp: devices along this axis, at least 1.
    tensor: devices along this axis, at least 1.
    devices: to choose from; in one process the first ones are taken when there are more.

  Raises:
    UserError: the sizes do not fit the devices that exist; names them.
  """
  devices = list(jax.devices() if devices is None else devices)
  text = f"mesh.data={data}, mesh.fsdp={fsdp}, mesh.tensor={tensor}"
  if data < -1 or fsdp < 1 or tensor < 1:
    raise UserError(f"{text}: sizes must be at least 1 (data also 0 or -1, for what is left)")
  rest = fsdp * tensor
  if data <= 0:
    data, short = divmod(len(devices), rest)
    if short or not data:
      raise UserError(f"{text}: fsdp * tensor = {rest} does not divide the {len(devices)} devices")
  if data * rest > len(devices):
    raise UserError(f"{text} needs {data * rest} devices, and there are {len(devices)}")
  if data * rest < len(devices) and len({d.process_index for d in devices}) > 1:
    raise UserError(f"{text} takes {data * rest} of {len(devices)} devices: with several processes "
                    "all take part; mesh.data=-1 takes what is left")
  grid = _grid((data, fsdp, tensor), devices[:data * rest], text)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def _grid(sizes: Sequence[int], devices: Sequence[Any], text: str) -> np.ndarray:
  """The devices as an array of these sizes. Slices of TPUs (and hosts of GPUs without a common fast
  network, which JAX calls slices too) divide data as far as it goes, then fsdp, and never tensor.
  """
  slices = len({getattr(d, "slice_index", 0) for d in devices})
  outer, left = [], slices
  for size in sizes[:-1]:
    outer.append(math.gcd(size, left))
    left //= outer[-1]
  if left > 1:
    raise UserError(f"{text}: data * fsdp must be a multiple of the {slices} slices of the devices "
                    "(tensor stays inside a slice)")
  inner = [size // count for size, count in zip(sizes, (*outer, 1), strict=True)]
  if slices == 1:
    return mesh_utils.create_device_mesh(inner, devices, allow_split_physical_axes=True)
  return mesh_utils.create_hybrid_device_mesh(
      inner, (*outer, 1), devices, allow_split_physical_axes=True)


def parse_mesh(text: str) -> Mesh | None:
  """The mesh of a flag such as "2,1,4" (data, fsdp, tensor); None for "", one device.

  Raises:
    UserError: it is no such text, or does not fit the devices that exist.
  """
  if not text:
    return None
  try:
    data, fsdp, tensor = (int(size) for size in text.split(","))
  except ValueError:
    raise UserError(f"mesh={text!r} must be three sizes, data,fsdp,tensor, such as 1,1,4") from None
  return make_mesh(data, fsdp, tensor)


def mesh_of(tree: Any) -> Mesh | None:
  """The mesh that arrays of a tree lie on; None for a single device."""
  for leaf in jax.tree.leaves(tree):
    found = getattr(leaf, "sharding", None)
    if isinstance(found, NamedSharding):
      return found.mesh
  return None


# From the table to shardings.


def spec(
    logical: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh, *,
    head_dim: int = 1) -> PartitionSpec:
  """Which mesh axes divide an array; an axis that they do not divide evenly falls back to fewer of
  them, or stays whole, and a line says so once.

  Args:
    logical: name of each axis of the array, None for one that stays whole.
    shape: its size along each.
    mesh: the devices.
    head_dim: elements of a head, where an axis named for heads holds their elements one after the
      other: heads are not divided inside.
  """
  out: list[Any] = []
  for name, size in zip(logical, shape, strict=True):
    axes = tuple(a for a in RULES.get(name or "", ()) if mesh.shape[a] > 1)
    count = size // head_dim if name in _HEADS else size
    kept = axes
    while kept and count % math.prod(mesh.shape[a] for a in kept):
      kept = kept[:-1]
    if kept != axes and count > 1:
      _say(f"mesh: {name}={count} cannot be divided over {_named(mesh, axes)}: " + (
          f"divided over {_named(mesh, kept)} alone" if kept else "whole on every device"))
    out.append(kept[0] if len(kept) == 1 else kept or None)
  while out and out[-1] is None:  # as JAX itself writes it: another text would be another program
    out.pop()
  return PartitionSpec(*out)


def parameter_spec(
    path: Sequence[Any], shape: Sequence[int], mesh: Mesh | AbstractMesh, head_dim: int = 1,
) -> PartitionSpec:
  """The spec of a parameter, or of an optimizer state with its path.

  Args:
    path: keys of the tree (of JAX, or plain strings such as "layers.0.wq"), the outermost first.
    shape: of the array.
    mesh: the devices.
    head_dim: elements of a head.
  """
  names = [str(getattr(key, "key", getattr(key, "name", key))).rpartition(".")[2] for key in path]
  for name in reversed(names):
    logical = PARAMETERS.get(name)
    if logical is not None and names[-1] == "scale":  # of an int8 matrix, one for each output
      logical = logical[:-1]
    if logical is not None and len(logical) == len(shape):
      return spec(logical, shape, mesh, head_dim=head_dim)
  return PartitionSpec()


def shardings(tree: Any, mesh: Mesh, head_dim: int = 1) -> Any:
  """The sharding of every leaf of parameters, drafters, or a training state."""
  return jax.tree_util.tree_map_with_path(
      lambda path, x: NamedSharding(mesh, parameter_spec(path, x.shape, mesh, head_dim)), tree)


def row_sharding(shape: Sequence[int], mesh: Mesh) -> NamedSharding:
  """Of an array whose first axis are the rows (or positions) of a batch. Four axes are those of
  keys and values, [B, G, S, H]."""
  names = ("batch", "kv_heads") if len(shape) == 4 else ("batch",)
  logical = (*names, *[None] * len(shape))[:len(shape)]
  return NamedSharding(mesh, spec(logical, shape, mesh))


def row_shards(mesh: Mesh | AbstractMesh | None) -> int:
  """Into how many parts the rows of a batch are divided."""
  return 1 if mesh is None else math.prod(mesh.shape[a] for a in RULES["batch"])


def padded_rows(rows: int, mesh: Mesh | AbstractMesh | None) -> int:
  """The next number of rows that the mesh divides evenly."""
  return -(-rows // row_shards(mesh)) * row_shards(mesh)


# Placing. Each device gets its own slice and nothing else.


def place(tree: Any, mesh: Mesh | None, head_dim: int = 1) -> Any:
  """Parameters, a drafter or a training state, laid out by the table; what lies there stays.

  Args:
    tree: arrays of any kind; with several processes the same values on each.
    mesh: the devices; None leaves everything as it is.
    head_dim: elements of a head.
  """
  if mesh is None:
    return tree
  return jax.tree.map(_put, tree, shardings(tree, mesh, head_dim))


def place_tensor(name: str, value: np.ndarray, dtype: Any, mesh: Mesh, head_dim: int = 1) -> Array:
  """One tensor of a checkpoint in a dtype, by its canonical name such as "layers.0.wq"; the host
  converts no more than each device's slice at a time."""
  where = NamedSharding(
      mesh, parameter_spec(name.split("."), value.shape, mesh, head_dim))
  return jax.make_array_from_callback(
      value.shape, where, lambda index: np.asarray(value[index], jnp.dtype(dtype)))


def place_rows(tree: Any, mesh: Mesh | None) -> Any:
  """A batch: arrays whose first axis are rows or positions, and scalars.

  Args:
    tree: arrays of the whole batch; with several processes the same on each.
    mesh: the devices; None leaves everything as it is.
  """
  if mesh is None:
    return tree
  return jax.tree.map(lambda x: _put(x, row_sharding(np.shape(x), mesh)), tree)


def replicated(tree: Any, mesh: Mesh | None) -> Any:
  """Inside jit: results that every device holds whole (metrics)."""
  return _pinned(tree, mesh, lambda x: NamedSharding(mesh, PartitionSpec()))


def pin_rows(tree: Any, mesh: Mesh | None) -> Any:
  """Inside jit: results that lie as `place_rows` lays them, so that donated buffers fit and the
  next call finds what it was compiled for."""
  return _pinned(tree, mesh, lambda x: row_sharding(x.shape, mesh))


def pin_states(x: Array, mesh: Mesh | None) -> Array:
  """Inside jit: states [rows, ..., D] of a model, divided by their rows and never along D. Weights
  divided along D would otherwise ask for that, and whole activations would travel, not weights."""
  if mesh is None:
    return x
  logical = ("batch", *[None] * (x.ndim - 1))
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(logical, x.shape, mesh)))


def pin(tree: Any, mesh: Mesh | None, head_dim: int = 1) -> Any:
  """Inside jit: results that lie as `place` lays them."""
  if mesh is None:
    return tree
  return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings(tree, mesh, head_dim))


def pin_chunks(tree: Any, mesh: Mesh | None) -> Any:
  """Inside jit: arrays [chunks, positions, ...] that are scanned, the positions divided. Without
  this the chunks would be, and every device would compute all of each."""
  if mesh is None:
    return tree
  where = lambda x: NamedSharding(mesh, spec(
      (None, "batch", *[None] * (x.ndim - 2)), x.shape, mesh))
  return _pinned(tree, mesh, where)


def fetch(tree: Any) -> Any:
  """Host arrays. What other processes hold a part of is gathered first: all of them call this."""
  far = [x for x in jax.tree.leaves(tree)
         if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)]
  if far:
    tree = _gather(mesh_of(far))(tree)
  return jax.device_get(tree)


@functools.cache
def _gather(mesh):
  return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _pinned(tree: Any, mesh: Mesh | None, where: Callable[[Array], NamedSharding]) -> Any:
  if mesh is None:
    return tree
  return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, where(x)), tree)


def _put(value: Any, where: NamedSharding) -> Array:
  if isinstance(value, jax.Array):
    if value.sharding.is_equivalent_to(where, value.ndim):
      return value
    keys = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    if keys or len(value.sharding.device_set) > 1:
      return jax.device_put(value, where)
  host = np.asarray(value)
  return jax.make_array_from_callback(host.shape, where, lambda index: np.asarray(host[index]))


def _named(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> str:
  return " * ".join(f"{a}={mesh.shape[a]}" for a in axes)


@functools.cache
def _say(line: str) -> None:
  """Prints a line once in a process, and in the first process alone."""
  if jax.process_index() == 0:
    print(line, flush=True)
