"""The quickstart: a small_lm drafter of the demo target in about twenty minutes on two cores."""

from train_drafter.config import Config


def get_config(arg: str = "") -> Config:
  """The config; it takes no argument."""
  del arg
  cfg = Config()
  cfg.prompts.count = 3000
  cfg.generate.budget_s = 300.0
  cfg.train.budget_s = 480.0
  return cfg
