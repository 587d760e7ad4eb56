"""A DSpark drafter: DFlash with a serial tail of low rank.

  python -m train_drafter --config=configs/dspark.py --workdir=runs/dspark \
    --config.prompts.path=TRAIN_FOLDER --config.prompts.eval_path=EVAL.jsonl

`configs/dspark.py:smoke` is the same in five to ten minutes, on the embedded prompts.
"""

from configs.small_lm import longer
from train_drafter.config import Config


def get_config(arg: str = "") -> Config:
  """The config; `smoke` for a small one.

  Raises:
    UserError: an unknown argument.
  """
  cfg = longer("dspark", arg)
  cfg.drafter.init_layers = (28, 29)
  cfg.drafter.block_size = 7
  cfg.train.loss = "ce_tv"
  cfg.evaluate.lookup = "3-2"
  return cfg
