"""A DFlash drafter: a block of drafts in one pass over tapped layers of the target.

  python -m train_drafter --config=configs/dflash.py --workdir=runs/dflash \
    --config.prompts.path=TRAIN_FOLDER --config.prompts.eval_path=EVAL.jsonl

`configs/dflash.py:smoke` is the same in five to ten minutes, on the embedded prompts.
"""

from configs.small_lm import longer
from train_drafter.config import Config


def get_config(arg: str = "") -> Config:
  """The config; `smoke` for a small one.

  Raises:
    UserError: an unknown argument.
  """
  cfg = longer("dflash", arg)
  cfg.drafter.init_layers = (28, 29)
  cfg.drafter.block_size = 8
  cfg.evaluate.lookup = "3-2"
  return cfg
