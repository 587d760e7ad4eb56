"""What training starts from: copies of target layers, random weights, or another drafter.

`train.init_from` names a folder of this project or a published one (EAGLE-3, DFlash, DSpark,
speculators, a small LM), whatever `spec_jax.load_drafter` reads. Called by train.py, and by
evaluate.py for the control that has not been trained.
"""

import dataclasses
from typing import Any

import numpy as np

from spec_jax import drafters
from spec_jax.drafters.head import LearnedDrafter
from spec_jax.errors import UserError
from spec_jax.target import Target
from train_drafter import head_sample
from train_drafter.config import Config
from train_drafter.extract import taps_of


@dataclasses.dataclass(frozen=True)
class Start:
  """What is known of `train.init_from` before the documents are read.

  Attributes:
    hash: SHA-256 of the folder's files; "" for a start from the target.
    draft_ids: [Vd] its draft vocabulary, None where the run chooses its own or has all ids.
  """

  hash: str = ""
  draft_ids: np.ndarray | None = None

  def recorded(self) -> dict[str, Any]:
    """What the manifest records beside the config: another content of the folder is another run."""
    return {"init_from": {"sha256": self.hash}} if self.hash else {}


def begin_with(cfg: Config, target: Target) -> Start:
  """Looks at `train.init_from` and `train.sampled_vocab` before any work.

  Raises:
    UserError: the folder cannot be read, or one of them does not match the target or the config;
      names both values.
  """
  source, sampled = cfg.train.init_from, cfg.train.sampled_vocab
  head_sample.check(cfg, target.config)
  if not source:
    return Start()
  module = loaded(cfg, target, "float32")
  if sampled and module.own_head:
    raise UserError(f"train.sampled_vocab={sampled} {head_sample.OWN_HEAD} "
                    f"(train.init_from={source})")
  ids = getattr(module, "draft_ids", None)
  try:
    found = drafters.source_hash(source)
  except UserError as error:  # "self", which is no folder
    raise UserError(f"train.init_from={source}: {error}") from None
  return Start(found, None if ids is None else np.asarray(ids[...]))


def initial_drafter(
    cfg: Config, target: Target, draft_ids: np.ndarray | None,
    dtype: str | None = None) -> LearnedDrafter:
  """The drafter of a config before its training.

  Args:
    cfg: of the run.
    target: lends embedding and head.
    draft_ids: [Vd] the run's draft vocabulary, None for all ids.
    dtype: compute dtype, the target's by default. Parameters that were loaded stay float32 where
      none is asked for: training goes on from what the files hold.
  """
  d = cfg.drafter
  if not cfg.train.init_from:
    return drafters.init_learned(
        d.kind, target, tuple(d.init_layers), steps=d.steps, num_taps=d.num_taps,
        block_size=d.block_size, anchors=d.anchors, mask_id=d.mask_id, rank=d.markov_rank,
        draft_ids=draft_ids, dtype=dtype, seed=cfg.train.seed, random=d.init == "random")
  module = loaded(cfg, target, dtype or "float32")
  if dtype is None and not module.own_head:  # the lent rows are not trained: as the target has them
    drafters.lend_head(module, target)
  return module


def loaded(cfg: Config, target: Target, dtype: str) -> LearnedDrafter:
  """The drafter of `train.init_from` with the training options of the config.

  Raises:
    UserError: it does not match the target or the config; names both values.
  """
  source, d = cfg.train.init_from, cfg.drafter
  try:
    module = drafters.load_drafter(source, target, dtype).module
  except UserError as error:
    raise UserError(f"train.init_from: {error}") from None
  kind = getattr(module, "kind", source.partition(":")[0])
  if kind != d.kind:
    raise UserError(f"train.init_from={source}: is a drafter of kind {kind!r}, this run trains "
                    f"drafter.kind={d.kind!r}")
  ids, V = getattr(module, "draft_ids", None), target.config.vocab_real
  size = V if ids is None else len(ids[...])
  most = min(d.draft_vocab or V, V)
  wanted = {
      "layers": (module.config.num_layers, len(d.init_layers) if kind != "eagle3" else 1,
                 f"drafter.init_layers={d.init_layers}"),
      "taps": (tuple(module.taps), taps_of(cfg, target.config.num_layers),
               f"drafter.num_taps={d.num_taps}"),
      "draft vocabulary": (size, most, f"drafter.draft_vocab={d.draft_vocab}"),
      "vocab_size": (module.config.vocab_size, target.config.vocab_size, "the target's vocabulary")}
  if kind in ("dflash", "dspark"):
    wanted["block_size"] = (module.block_size, d.block_size, f"drafter.block_size={d.block_size}")
    if d.mask_id >= 0:
      wanted["mask_id"] = (module.mask_id, d.mask_id, f"drafter.mask_id={d.mask_id}")
  if kind == "dspark":
    rank = module.markov_w1[...].shape[1]
    wanted["markov_rank"] = (rank, d.markov_rank, f"drafter.markov_rank={d.markov_rank}")
  for name, (found, asked, field) in wanted.items():
    if found != asked:
      raise UserError(f"train.init_from={source}: has {name} {found}, this run {asked} ({field})")
  for name, value in (("steps", d.steps), ("anchors", d.anchors)):
    if hasattr(module, name):
      setattr(module, name, value)
  return module
