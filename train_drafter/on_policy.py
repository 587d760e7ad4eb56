"""Batches of the drafter's own continuations, scored by the target (`train.on_policy_fraction`).

In decoding a drafter reads its own drafts until the target corrects it, K tokens at most; answers
of the target alone never show it those. So the decoding loop runs with the drafter as it is at that
step under the rule `drafts` (every draft is kept, the token behind K of them is the target's), and
the verification passes leave the target's states, which are the teacher. Called by train.py.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from spec_jax import drafters
from spec_jax.generate import Run
from spec_jax.identity import WIDTH
from spec_jax.target import Target
from spec_jax.verify import DRAFTS
from train_drafter.batches import Document, Packer
from train_drafter.config import Config
from train_drafter.documents import score


class OnPolicy:
  """Makes the batches of the steps that are on-policy, a pure function of seed, step and drafter.

  Attributes:
    prompts: token ids of the prompts that are continued in one batch.
  """

  def __init__(self, cfg: Config, target: Target, packer: Packer):
    self.cfg, self.target, self.packer = cfg, target, packer
    lengths = [len(d.tokens) for d in packer.documents]
    self.count = max(1, round(packer.rows * packer.seq_len / np.mean(lengths)))
    longest = max(d.first + 1 for d in packer.documents)
    self._size = -(-longest // WIDTH) * WIDTH
    self._budget = max(d.supervised for d in packer.documents)

  def due(self, step: int) -> bool:
    """Whether the batch of this step (0-based) is the drafter's own."""
    return self._rng(step).random() < self.cfg.train.on_policy_fraction

  def batch(self, step: int, module: Any) -> dict[str, np.ndarray]:
    """The batch of a step; what does not fit into its rows is left out.

    Args:
      step: 0-based.
      module: the drafter at that step, in the dtype it computes in.
    """
    cfg, packer = self.cfg, self.packer
    rng = self._rng(step)
    rng.random()  # what `due` drew
    chosen = rng.choice(
        len(packer.documents), self.count, replace=self.count > len(packer.documents))
    chosen = [packer.documents[i] for i in chosen]
    prompts = [d.tokens[:d.first + 1] for d in chosen]
    run = Run(
        self.target, drafters.wrap(cfg.drafter.kind, "on-policy", module),
        [p.tolist() for p in prompts], draft_len=cfg.evaluate.draft_len, rule="ratio",
        temperature=cfg.train.teacher_temperature, seed=cfg.train.seed, keep_hidden=True,
        max_new_tokens=[d.supervised for d in chosen], batch_size=self.count,
        sequence_ids=[step % (2**31 // self.count) * self.count + i for i in range(self.count)])
    run.program = dataclasses.replace(run.program, rule=DRAFTS.name)
    run.max_new = self._budget  # buffers of one shape at every step
    made = []
    for row in sorted(run.bucket(self._size, range(self.count)), key=lambda row: row.index):
      hidden = np.asarray(row.hidden).astype(ml_dtypes.bfloat16)  # as answers are kept
      lse, best = score(self.target, hidden, cfg.train.teacher_temperature)
      prompt = prompts[row.index]
      made.append(Document(
          np.concatenate([prompt, np.asarray(row.tokens, np.int32)]), len(prompt) - 1, hidden, lse,
          best).cut(packer.seq_len))
    return packer.of(made) | {"step": np.int32(step)}

  def _rng(self, step: int) -> np.random.Generator:
    return np.random.default_rng([self.cfg.train.seed, step, 1])
