"""An EAGLE-3 drafter: one layer over three tapped layers of the target.

  python -m train_drafter --config=configs/eagle3.py --workdir=runs/eagle3 \
    --config.prompts.path=TRAIN_FOLDER --config.prompts.eval_path=EVAL.jsonl

`configs/eagle3.py:smoke` is the same in a few minutes, on the embedded prompts.
"""

from spec_jax.errors import UserError
from train_drafter.config import Config


def get_config(arg: str = "") -> Config:
  """The config; `smoke` for a small one.

  Raises:
    UserError: an unknown argument.
  """
  if arg not in ("", "smoke"):
    raise UserError(f"configs/eagle3.py:{arg} is unknown (only smoke)")
  cfg = Config()
  cfg.prompts.count = 12000
  cfg.prompts.mix = (
      "structured=2", "code=1.5", "math=1", "qa=1", "summarization=1", "translation=1", "rag=1",
      "multi_turn=1", "creative=1")
  cfg.generate.budget_s = 2100.0
  cfg.drafter.kind = "eagle3"
  cfg.drafter.init_layers = (29,)
  cfg.drafter.steps = 3
  cfg.train.budget_s = 1800.0
  cfg.train.validation = 96
  cfg.evaluate.lookup = "3-2"
  cfg.evaluate.identity_per_category = 2
  cfg.evaluate.untrained_per_category = 3
  if arg == "smoke":
    cfg.prompts.count = 120
    cfg.prompts.eval_per_category = 2
    cfg.generate.budget_s = 60.0
    cfg.train.budget_s = 60.0
    cfg.train.validation = 8
    cfg.evaluate.speed_prompts = 2
  return cfg
