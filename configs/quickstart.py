"""The quickstart: a small_lm drafter of the demo target on two cores.

The budgets are seconds on the wall; what does not fit is left out and counted in the manifests.
"""

from spec_jax.errors import UserError
from train_drafter.config import Config


def get_config(arg: str = "") -> Config:
  """The config; it takes no argument.

  Raises:
    UserError: there is one.
  """
  if arg:
    raise UserError(f"configs/quickstart.py:{arg}: there is no such form (it takes no argument)")
  cfg = Config()
  cfg.prompts.count = 3000
  cfg.prompts.mix = (
      "structured=2", "code=1", "math=1", "qa=1", "summarization=1", "translation=1", "rag=1",
      "multi_turn=1", "creative=1")
  cfg.prompts.eval_per_category = 12
  cfg.generate.budget_s = 200.0
  cfg.train.budget_s = 290.0
  # Every prompt: --config.evaluate.identity_per_category=0 (minutes, in float32).
  cfg.evaluate.identity_per_category = 2
  cfg.evaluate.speed_prompts = 6
  cfg.evaluate.cost_dtypes = ("bfloat16",)
  # Minutes more, and worth them on a quiet machine: costs of batches and long contexts, and the
  # target that drafts for itself.
  cfg.evaluate.batch_sizes = cfg.evaluate.contexts = ()
  cfg.evaluate.self_prompts = 0
  cfg.evaluate.batch_size = 36
  cfg.evaluate.untrained_per_category = 2
  return cfg
