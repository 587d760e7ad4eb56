"""A short training run on the tiny target, shared by the tests of the train stage."""

import jax
import ml_dtypes
import numpy as np

from spec_jax import drafters
from tests import tiny
from train_drafter import config as config_lib
from train_drafter.batches import Document, Packer
from train_drafter.config import Config

EOS = 2


def make_config(**changes) -> Config:
  """Twenty short steps in float32 with five of warm-up; `changes` are of the train section."""
  cfg = Config()
  fields = dict(
      steps=20, budget_s=0.0, batch_rows=2, seq_len=32, lr=1e-2, warmup=0.25, chunk=16,
      validation=3, eval_every=5, max_bad_steps=3, dtype="float32")
  for name, value in (fields | changes).items():
    assert hasattr(cfg.train, name)
    setattr(cfg.train, name, value)
  cfg.generate.max_prompt_tokens = cfg.train.seq_len - 1
  cfg.drafter.init_layers, cfg.drafter.draft_vocab = (0,), 0
  config_lib.validate(cfg)
  return cfg


def head_of(target) -> np.ndarray:
  return np.asarray(target.module.head_weight(), np.float32)


def document(tokens, first, head, rng) -> Document:
  """A document with random teacher states and the statistics that belong to them."""
  count = len(tokens) - 1 - first
  hidden = rng.normal(size=(count, head.shape[1])).astype(ml_dtypes.bfloat16)
  logits = hidden.astype(np.float32) @ head.T
  return Document(np.asarray(tokens, np.int32), first, hidden,
                  np.log(np.exp(logits).sum(-1)).astype(np.float32),
                  logits.argmax(-1).astype(np.int32))


def documents(count=14, seed=0, longest=30, target=None):
  rng = np.random.default_rng(seed)
  head = head_of(target or tiny.target())
  out = []
  for _ in range(count):
    n = int(rng.integers(6, longest))
    out.append(document(rng.integers(3, tiny.VOCAB, n), int(rng.integers(0, n - 2)), head, rng))
  return out


def pack(docs, cfg, kind=Packer, **changes):
  options = dict(rows=cfg.train.batch_rows, seq_len=cfg.train.seq_len, chunk=cfg.train.chunk,
                 seed=cfg.train.seed)
  return kind(docs, **(options | changes))


def module_of(target=None, draft_ids=None):
  return drafters.init_from_target(target or tiny.target(), (0,), draft_ids)


def bits(tree):
  return [np.asarray(x) for x in jax.tree.leaves(tree)]


def copied(tree):
  """Copies of the arrays, for what a step will donate."""
  return [np.array(x) for x in jax.tree.leaves(tree)]


def assert_same(tree, before):
  for x, y in zip(bits(tree), before, strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)
