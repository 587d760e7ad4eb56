"""Where a run's arrays lie: the mesh of its config, the target on it, and the state of training.

Called by the stages; spec_jax/sharding.py has the table and what it means.
"""

from typing import Any

import jax
import optax
from jax.sharding import Mesh

import spec_jax
from spec_jax import sharding
from spec_jax.target import Target
from train_drafter.config import Config


def mesh_of(cfg: Config) -> Mesh | None:
  """The mesh that the config asks for; None for one device, which then runs as if there were none.

  Raises:
    UserError: it does not fit the devices that exist.
  """
  mesh = sharding.make_mesh(cfg.mesh.data, cfg.mesh.fsdp, cfg.mesh.tensor)
  return None if mesh.size == 1 and jax.process_count() == 1 else mesh


def load_target(cfg: Config, dtype: str) -> Target:
  """The target of a run in a dtype, each device with its slices of the parameters."""
  return spec_jax.load_target(cfg.target.source, dtype=dtype, mesh=mesh_of(cfg))


def start(
    optimizer: optax.GradientTransformation, params: Any, mesh: Mesh | None, head_dim: int,
) -> tuple[Any, Any]:
  """Parameters and the optimizer's first state, which lies as they do and is made in place."""
  params = sharding.place(params, mesh, head_dim)
  if mesh is None:
    return params, optimizer.init(params)
  where = sharding.shardings(jax.eval_shape(optimizer.init, params), mesh, head_dim)
  return params, jax.jit(optimizer.init, out_shardings=where)(params)
