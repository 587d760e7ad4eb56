"""Where a run's arrays lie: the mesh of its config, the target on it, and the state of training.

Called by the stages; spec_jax/sharding.py has the table and what it means.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import spec_jax
from spec_jax import sharding
from spec_jax.target import Target
from train_drafter.config import Config


def mesh_of(cfg: Config, own: bool = False) -> Mesh | None:
  """The mesh that the config asks for; None for one device, which then runs as if there were none.

  Of several processes all devices take part, so that the default is then data=-1.

  Args:
    cfg: of the run.
    own: for a stage that shares its work out, each process deciding for itself: the part of the
      mesh on the devices of this process, `data` being what fsdp and tensor leave of them. Sizes
      that reach over processes are cut to what divides the devices of one.

  Raises:
    UserError: it does not fit the devices that exist.
  """
  sizes = cfg.mesh
  if jax.process_count() == 1:
    mesh = sharding.make_mesh(sizes.data, sizes.fsdp, sizes.tensor)
    return None if mesh.size == 1 else mesh
  if own:
    devices = jax.local_devices()
    tensor = math.gcd(sizes.tensor, len(devices))
    fsdp = math.gcd(sizes.fsdp, len(devices) // tensor)
    if (fsdp, tensor) != (sizes.fsdp, sizes.tensor):
      _say_cut(sizes.fsdp, sizes.tensor, fsdp, tensor, len(devices))
    mesh = sharding.make_mesh(-1, fsdp, tensor, devices)
    return None if mesh.size == 1 else mesh
  data = -1 if (sizes.data, sizes.fsdp, sizes.tensor) == (1, 1, 1) else sizes.data
  return sharding.make_mesh(data, sizes.fsdp, sizes.tensor)


@functools.cache
def _say_cut(fsdp: int, tensor: int, own_fsdp: int, own_tensor: int, devices: int) -> None:
  """Says once that a layout is narrower where each process works for itself."""
  if jax.process_index() == 0:
    print(f"mesh.fsdp={fsdp}, mesh.tensor={tensor} reach over processes, which only train does: "
          f"elsewhere each process holds a whole target on its own {devices} devices "
          f"(fsdp={own_fsdp}, tensor={own_tensor})", flush=True)


def load_target(cfg: Config, dtype: str, own: bool = True) -> Target:
  """The target of a run in a dtype, each device with its slices of the parameters.

  Args:
    cfg: of the run.
    dtype: as `spec_jax.load_target` takes it.
    own: as in `mesh_of`; False for the stage that all processes run together (train).
  """
  return spec_jax.load_target(cfg.target.source, dtype=dtype, mesh=mesh_of(cfg, own))


def own_rows(mesh: Mesh | None) -> Callable[[int], np.ndarray]:
  """Which entries of an axis of rows lie on devices of this process, as a mask of its size."""
  @functools.cache
  def own(size: int) -> np.ndarray:
    found = np.full(size, mesh is None)
    if mesh is not None:
      where = sharding.row_sharding((size,), mesh)
      for index, in where.addressable_devices_indices_map((size,)).values():
        found[index] = True
    return found
  return own


def start(
    optimizer: optax.GradientTransformation, params: Any, mesh: Mesh | None, head_dim: int,
) -> tuple[Any, Any]:
  """Parameters and the optimizer's first state, which lies as they do and is made in place."""
  params = sharding.place(params, mesh, head_dim)
  if mesh is None:
    return params, optimizer.init(params)
  where = sharding.shardings(jax.eval_shape(optimizer.init, params), mesh, head_dim)
  return params, jax.jit(optimizer.init, out_shardings=where)(params)
