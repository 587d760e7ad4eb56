"""A longer run: a small_lm drafter from prompts of your own, evaluated on a file of your own.

  python -m train_drafter --config=configs/small_lm.py --workdir=runs/small_lm \
    --config.prompts.path=TRAIN_FOLDER --config.prompts.eval_path=EVAL.jsonl

`configs/small_lm.py:smoke` is the same in five to ten minutes, on the embedded prompts.
"""

from spec_jax.errors import UserError
from train_drafter.config import Config


def get_config(arg: str = "") -> Config:
  """The config; `smoke` for a small one.

  Raises:
    UserError: an unknown argument.
  """
  return longer("small_lm", arg)


def longer(kind: str, arg: str) -> Config:
  """What the longer runs of all drafters share, so that they learn from one set of answers.

  Args:
    kind: of the drafter; the config is named after it.
    arg: "" or "smoke".

  Raises:
    UserError: an unknown argument.
  """
  if arg not in ("", "smoke"):
    raise UserError(f"configs/{kind}.py:{arg} is unknown (only smoke)")
  cfg = Config()
  cfg.drafter.kind = kind
  cfg.prompts.count = 12000
  cfg.prompts.mix = (
      "structured=2", "code=1.5", "math=1", "qa=1", "summarization=1", "translation=1", "rag=1",
      "multi_turn=1", "creative=1")
  cfg.generate.budget_s = 2100.0
  cfg.train.budget_s = 1800.0
  cfg.train.validation = 96
  cfg.evaluate.identity_per_category = 2
  cfg.evaluate.untrained_per_category = 3
  if arg == "smoke":
    _shorten(cfg)
  return cfg


def _shorten(cfg: Config) -> None:
  """Every stage with as little as shows it: one evaluation prompt of each category, short answers,
  K up to 3, speed and costs in one dtype; identity in float32 all the same."""
  cfg.prompts.count = 90
  cfg.prompts.eval_per_category = 1
  cfg.generate.budget_s = 60.0
  cfg.generate.max_new_tokens = 64
  cfg.train.budget_s = 50.0
  cfg.train.validation = 8
  cfg.evaluate.draft_len = cfg.evaluate.longest_draft_len = 3
  cfg.evaluate.max_new_tokens = 48
  cfg.evaluate.identity_per_category = 1
  cfg.evaluate.untrained_per_category = 1
  cfg.evaluate.self_prompts = 0
  cfg.evaluate.speed_dtypes = ("bfloat16",)
  cfg.evaluate.batch_sizes = ()
  cfg.evaluate.speed_prompts = 3
  cfg.export.prompts = 2
