"""The optimizers of training: AdamW, or Muon for the matrices between hidden states."""

from typing import Any

import jax
import optax

from train_drafter.config import TrainConfig

_LONGEST = 16  # times as long as wide: beyond that a matrix is a table with a row for each id
_MUON_RMS = 0.2  # of a step over its rate: about that of Adam, so that one rate suits both


def make_optimizer(
    options: TrainConfig, schedule: optax.Schedule, params: Any) -> optax.GradientTransformation:
  """AdamW, or Muon for the matrices between hidden states and AdamW for everything else."""
  decayed = jax.tree.map(lambda x: x.ndim > 1, params)
  if options.optimizer == "adamw":
    return optax.adamw(
        schedule, b2=options.beta2, weight_decay=options.weight_decay, mask=decayed)
  numbers = jax.tree.map(
      lambda x: optax.contrib.MuonDimensionNumbers()
      if x.ndim == 2 and max(x.shape) <= _LONGEST * min(x.shape) else None, params)
  return optax.contrib.muon(
      schedule, weight_decay=options.weight_decay, weight_decay_mask=decayed,
      adam_b2=options.beta2, adam_weight_decay=options.weight_decay,
      muon_weight_dimension_numbers=numbers, consistent_rms=_MUON_RMS)
