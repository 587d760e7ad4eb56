"""On-policy batches: the drafter's own text with the target's states behind it."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from spec_jax import drafters, sampling, verify
from spec_jax.errors import UserError
from spec_jax.generate import Run
from spec_jax.types import Proposal
from tests import tiny
from tests.drafters import test_eagle3
from tests.train_drafter.training import documents, head_of, make_config, module_of, pack
from train_drafter import config as config_lib
from train_drafter import train
from train_drafter.on_policy import OnPolicy
from train_drafter.store import StoredDocument


@dataclasses.dataclass(frozen=True)
class Stored(StoredDocument):
  """A document of a store, in memory."""

  states: np.ndarray = None
  sparse = False

  def features(self, start, stop):
    return np.ones((stop - start, 3 * self.states.shape[1]), ml_dtypes.bfloat16)

  def last_hidden(self, start, stop):
    return self.states[start:stop]


def test_beside_a_store_the_features_of_its_own_text_are_the_targets():
  target = test_eagle3.target()
  module = drafters.init_learned("eagle3", target, (7,), steps=2)
  docs = []
  for i, d in enumerate(documents(target=target)):
    states = np.zeros((len(d.tokens), target.config.hidden_size), ml_dtypes.bfloat16)
    kept = Stored(i, i, d.tokens, d.first + 1, None, i, 0, states)
    docs.append(dataclasses.replace(d, hidden=None, stored=kept))
  cfg = make_config(on_policy_fraction=0.5)
  cfg.drafter.kind, cfg.evaluate.draft_len = "eagle3", 3
  source = OnPolicy(cfg, target, pack(docs, cfg, features=3 * target.config.hidden_size))
  theirs = source.packer.batch(0)
  assert "features" in theirs
  batch = train.with_features(source.batch(4, module), module.taps, target)
  assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
      name: (x.shape, x.dtype) for name, x in theirs.items()}
  live = batch["segments"] >= 0
  features = target.module.hidden(
      *(jnp.asarray(batch[n]) for n in ("tokens", "positions")), taps=module.taps,
      segments=jnp.asarray(batch["segments"])).features
  np.testing.assert_allclose(
      np.asarray(batch["features"], np.float32)[live], np.asarray(features)[live], rtol=2.0**-7,
      atol=2e-3)


def test_every_draft_is_kept():
  """Also one that the target excludes; behind them the target decides."""
  p = jnp.asarray([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]] * 2)
  keys = sampling.round_keys(
      sampling.row_keys(0, jnp.arange(2, dtype=jnp.int32)), jnp.zeros(2, jnp.int32))
  proposal = Proposal(jnp.asarray([[1, 1], [1, 1]], jnp.int32), jnp.full((2, 2, 2), 0.5))
  verdict = verify.keep_drafts(p, proposal, keys, jnp.asarray([2, 1], jnp.int32))
  assert verdict.accepted.tolist() == [2, 1] and verdict.next_token.tolist() == [1, 0]
  assert verify.DRAFTS.name not in verify.RULES and not verify.DRAFTS.lossless


def own(**changes):
  cfg = make_config(on_policy_fraction=0.5, **changes)
  cfg.evaluate.draft_len = 3
  return cfg, OnPolicy(cfg, tiny.target(), pack(documents(), cfg))


def test_the_teacher_is_the_target_on_the_drafters_text():
  """States, normaliser and argmax of every supervised place belong to the text up to it."""
  cfg, source = own(teacher_temperature=0.7)
  batch, target = source.batch(4, module_of()), tiny.target()
  live = np.flatnonzero(batch["weight"])
  assert len(live) > 20
  out = target.module.hidden(*(jnp.asarray(batch[n]) for n in ("tokens", "positions")),
                             segments=jnp.asarray(batch["segments"]))
  states = np.asarray(out.hidden).reshape(-1, 32)[batch["place"][live]]
  np.testing.assert_allclose(
      np.asarray(batch["hidden"], np.float32)[live], states, rtol=2.0**-7, atol=2e-3)
  logits = np.asarray(batch["hidden"], np.float32)[live] @ head_of(target).T
  np.testing.assert_allclose(
      batch["logsumexp"][live], np.log(np.exp(logits / 0.7).sum(-1)), rtol=1e-5)
  np.testing.assert_array_equal(batch["best"][live], logits.argmax(-1))
  assert batch.keys() == source.packer.batch(0).keys()
  for name, value in source.packer.batch(0).items():
    assert batch[name].shape == value.shape and batch[name].dtype == value.dtype, name


def test_a_batch_depends_on_step_and_drafter_alone():
  _, source = own()
  first = source.batch(4, module_of())
  for name, value in source.batch(4, module_of()).items():
    np.testing.assert_array_equal(value, first[name])
  assert not np.array_equal(source.batch(5, module_of())["tokens"], first["tokens"])
  other = jax.tree.map(lambda x: x, module_of())
  other.stack.final_norm[...] = 3.0 * other.stack.final_norm[...]
  assert not np.array_equal(source.batch(4, other)["tokens"], first["tokens"])
  due = [source.due(step) for step in range(400)]
  assert 160 < sum(due) < 240 and 60 < sum(a != b for a, b in zip(due[::2], due[1::2], strict=True))


def test_the_text_is_the_drafters():
  """All drafts are in it, which a target of another mind would have refused."""
  cfg, source = own()
  kept = []
  real = Run.bucket

  def bucket(self, size, members):
    for row in real(self, size, members):
      kept.append((int(row.records.proposed.sum()), int(row.records.accepted.sum())))
      yield row

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Run, "bucket", bucket)
    source.batch(4, module_of())
  assert kept and all(a == p or a >= p - 3 for p, a in kept)  # the budget cuts the last round
  assert sum(a for _, a in kept) > 0.7 * sum(p for p, _ in kept)


def test_training_on_it(tmp_path):
  """Every other step or so; the run is the same when it is made again."""
  cfg = make_config(steps=8, on_policy_fraction=0.5, eval_every=4)
  finals = []
  for name in ("a", "b"):
    module = module_of()
    packer = pack(documents(), cfg)
    (tmp_path / name).mkdir()
    train.fit(cfg, tiny.target(), module, packer, packer.in_order()[:1], tmp_path / name, 0.0)
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    finals.append([line.split('"loss"')[1] for line in lines])
  assert finals[0] == finals[1]
  plain = make_config(steps=8, eval_every=4)
  (tmp_path / "c").mkdir()
  packer = pack(documents(), plain)
  train.fit(plain, tiny.target(), module_of(), packer, packer.in_order()[:1], tmp_path / "c", 0.0)
  lines = (tmp_path / "c" / "metrics.jsonl").read_text().splitlines()
  assert [line.split('"loss"')[1] for line in lines] != finals[0]


def test_block_drafters_are_refused():
  cfg = make_config(on_policy_fraction=0.5)
  config_lib.validate(cfg)
  cfg = dataclasses.replace(cfg, drafter=dataclasses.replace(cfg.drafter, kind="dflash"))
  with pytest.raises(UserError, match="train.on_policy_fraction=0.5 needs.*not dflash"):
    config_lib.validate(cfg)
