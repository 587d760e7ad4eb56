"""An EAGLE-3 drafter: one layer over three tapped layers of the target.

  python -m train_drafter --config=configs/eagle3.py --workdir=runs/eagle3 \
    --config.prompts.path=TRAIN_FOLDER --config.prompts.eval_path=EVAL.jsonl

`configs/eagle3.py:smoke` is the same in five to ten minutes, on the embedded prompts.
"""

from configs.small_lm import longer
from train_drafter.config import Config


def get_config(arg: str = "") -> Config:
  """The config; `smoke` for a small one.

  Raises:
    UserError: an unknown argument.
  """
  cfg = longer("eagle3", arg)
  cfg.drafter.init_layers = (29,)
  cfg.drafter.steps = 3
  cfg.evaluate.lookup = "3-2"
  return cfg
