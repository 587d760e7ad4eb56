"""Which runs may share a stage, told before anything runs.

A stage's key covers the same part of the config as its manifest (train_drafter/manifest.py) and the
keys of the stages it reads. Were it to cover less, the manifest would refuse the folder; a test
compares both.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from train_drafter import config as config_lib
from train_drafter import manifest
from train_drafter.extract import NOT_STORED, taps_of
from train_drafter.prompts import data_hashes
from train_drafter.train import sources

SHARED = ("prompts", "generate", "extract", "train")


def parts(cfg: Any, layers: Callable[[str], int]) -> dict[str, dict]:
  """The part of a config that determines each shared stage, in the order they run.

  Args:
    cfg: a whole config, validated.
    layers: number of layers of a target by its `target.source`.

  Raises:
    UserError: a data file cannot be read, or the target is too shallow for the drafter.
  """
  prompts = {**config_lib.part(cfg, "prompts"), "data": data_hashes(cfg.prompts)}
  if cfg.prompts.self_written:
    prompts |= {"target": config_lib.part(cfg, "target")["target"],
                "template_args": config_lib.template_args(cfg)}
  out = {"prompts": prompts, "generate": config_lib.part(cfg, "target", "generate")}
  if "extract" in sources(cfg):
    features = config_lib.part(cfg, "features", without=NOT_STORED)
    out["extract"] = {**features, "taps": list(taps_of(cfg, layers(cfg.target.source)))}
  out["train"] = config_lib.train_part(cfg)
  return out


def keys(cfg: Any, layers: Callable[[str], int]) -> dict[str, str]:
  """Stage -> key of every shared stage, as `parts` orders them; each covers the ones before it."""
  out: dict[str, str] = {}
  for stage, part in parts(cfg, layers).items():
    out[stage] = manifest.stage_hash(part, dict(out))
  return out


def folders(cfg: Any, layers: Callable[[str], int]) -> dict[str, str]:
  """Stage -> path of its shared folder below that of the sweep."""
  return {stage: str(Path("stages") / f"{stage}-{key[:16]}")
          for stage, key in keys(cfg, layers).items()}
