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
from train_drafter import distributed
from train_drafter.config import Config


def mesh_of(cfg: Config, own: bool = False) -> Mesh | None:
  """The mesh that the config asks for; None for one device, which then runs as if there were none.

  Args:
    cfg: of the run.
    own: of several processes, over the devices of this one alone, which works on a share of its own
      (so does a stage that runs in one process): as many of them divide the parameters as the
      config asks for and there are, the others hold copies.

  Raises:
    UserError: it does not fit the devices that exist.
  """
  if jax.process_count() > 1 and (own or distributed.count() == 1):
    devices = jax.local_devices()
    tensor = math.gcd(cfg.mesh.tensor, len(devices))
    fsdp = math.gcd(cfg.mesh.fsdp, len(devices) // tensor)
    return sharding.make_mesh(-1, fsdp, tensor, devices) if len(devices) > 1 else None
  mesh = sharding.make_mesh(cfg.mesh.data, cfg.mesh.fsdp, cfg.mesh.tensor)
  return None if mesh.size == 1 and jax.process_count() == 1 else mesh


def load_target(cfg: Config, dtype: str, own: bool = False) -> Target:
  """The target of a run in a dtype, each device with its slices of the parameters; `own` as for
  `mesh_of`."""
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
