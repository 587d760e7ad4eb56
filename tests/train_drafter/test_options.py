"""Options of the training step: position weights of whole drafts, and the optimizer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_jax import drafters
from spec_jax.drafters.dflash import dflash_taps
from spec_jax.drafters.eagle3 import eagle3_taps
from spec_jax.errors import UserError
from tests import tiny
from tests.train_drafter.training import documents, make_config, pack
from train_drafter import config as config_lib
from train_drafter import losses, metrics, train
from train_drafter.optimizer import make_optimizer

LAYERS = 8


def brute(likelihoods):
  """Weights of one draft with these q of the data tokens, by the formula."""
  soft = [0.5 * q + 0.5 for q in likelihoods]
  K = len(soft)
  return [sum(np.prod(soft[:m + 1]) for m in range(j, K)) for j in range(K)]


def test_dpace_weights_are_those_of_the_formula():
  """Two drafts whose states lie mixed; the second one ends early, and one state is padding."""
  first, second = [0.9, 0.2, 0.6], [0.0, 1.0]
  rows = [(1, 1, second[1], True), (0, 2, first[2], True), (0, 0, first[0], True),
          (1, 0, second[0], True), (0, 1, first[1], True), (0, 0, 0.7, False)]
  block, depth, q, there = (np.asarray(x)[:, None] for x in zip(*rows, strict=True))
  found = losses.dpace(
      jnp.asarray(q, jnp.float32), jnp.asarray(there), jnp.asarray(block), jnp.asarray(depth), 2, 3)
  wanted = [brute((first, second)[b][:])[d] if t else 0.0 for b, d, _, t in rows]
  np.testing.assert_allclose(found[:, 0], wanted, rtol=1e-6)
  assert brute([1.0, 1.0, 1.0]) == [3.0, 2.0, 1.0]  # a certain draft: what is left of the block


def test_likelihood_of_a_token_outside_the_draft_vocabulary_is_zero():
  logits = jnp.log(jnp.asarray([[0.25, 0.75], [0.25, 0.75]]))
  np.testing.assert_allclose(losses.likelihood(logits, jnp.asarray([1, 2])), [0.75, 0.0])


@pytest.fixture(scope="module")
def target():
  cfg = tiny.config(num_layers=LAYERS)
  return tiny.make(cfg, tiny.tensors(cfg))


def reader(kind, target):
  """A drafter of this kind, a config for it and one batch with random features."""
  cfg = make_config(chunk=8)
  module = drafters.init_learned(
      kind, target, (6,), steps=3, num_taps=2, block_size=4, anchors=3, mask_id=1, rank=4)
  taps = eagle3_taps(LAYERS) if kind == "eagle3" else dflash_taps(LAYERS, 2)
  batch = pack(documents(target=target), cfg).batch(0)
  rng = np.random.default_rng(0)
  width = len(taps) * target.config.hidden_size
  return cfg, module, jax.tree.map(jnp.asarray, batch) | {
      "features": jnp.asarray(rng.normal(size=(*batch["tokens"].shape, width)), jnp.float32)}


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_dpace_in_a_step(kind, target):
  """The loss of a batch, its weights worked out draft by draft from the states of the drafter."""
  cfg, module, batch = reader(kind, target)
  cfg.drafter.kind, cfg.train.position_weight = kind, "dpace"
  config_lib.validate(cfg)
  setup, state = train.make_setup(cfg, target, module, 20)
  sums = train.batch_sums(setup, state.params, setup.frozen, target.params, batch)
  key = jax.random.fold_in(jax.random.key(cfg.train.seed), 0)
  states = module.train_states(batch, target.module, key)
  following = np.roll(np.asarray(batch["tokens"]).reshape(-1), -1)[batch["place"]]
  teacher = jnp.asarray(batch["hidden"], jnp.float32) @ target.module.head_weight().T
  drafts: dict[int, dict[int, tuple[float, float]]] = {}
  for n, j in zip(*np.nonzero(np.asarray(states.weight)), strict=True):
    source = int(states.source[n])
    logits = module.train_logits(
        states.hidden[n, j][None], target.module, module.head_parameters())
    q = float(jax.nn.softmax(logits[0])[following[source]])
    loss = float(losses.fkl(logits, teacher[source][None])[0])
    if kind == "dspark":
      alpha = losses.overlap(logits, teacher[source][None], jnp.asarray(
          batch["logsumexp"][source])[None])
      loss += float(optax.sigmoid_binary_cross_entropy(module.confidence_logit(
          states.hidden[n, j][None], module.confidence[...]), alpha)[0])
    own = drafts.setdefault(int(states.block[n, j]), {})
    assert int(states.depth[n, j]) not in own
    own[int(states.depth[n, j])] = q, loss
  total = weights = 0.0
  for own in drafts.values():
    first, last = min(own), max(own)
    assert len(own) == last + 1 - first and (kind == "eagle3" or first == 0)
    pairs = [own[d] for d in sorted(own)]
    # A draft of eagle3 may begin in the prompt: what it does not predict there is certain.
    for weight, (_, loss) in zip(brute([q for q, _ in pairs]), pairs, strict=True):
      total, weights = total + weight * loss, weights + weight
  assert len(drafts) > 2 and max(map(len, drafts.values())) > 1
  np.testing.assert_allclose(sums["weight"], weights, rtol=1e-4)
  np.testing.assert_allclose(sums["loss"], total, rtol=1e-4)


def test_dpace_needs_drafts_that_training_tells_apart():
  cfg = make_config()
  cfg.train.position_weight = "dpace"
  with pytest.raises(UserError, match="train.position_weight='dpace'.*not for small_lm"):
    config_lib.validate(cfg)


# The confidence head.


def test_calibration_of_a_confidence():
  """Two bins; what is not used does not count; a confidence of one lies in the last bin."""
  sums = metrics.calibration_sums(
      jnp.asarray([0.31, 0.39, 1.0, 0.95, 0.5]), jnp.asarray([0.3, 0.1, 0.9, 0.7, 0.0]),
      jnp.asarray([1.0, 1.0, 1.0, 1.0, 0.0]))
  found = metrics.means({
      "loss": np.ones(()), "weight": np.ones(()), "count": np.ones(1), "alpha": np.ones(1),
      "greedy_match": np.ones(1), "kept_mass": np.ones(1)} | jax.device_get(sums))
  np.testing.assert_allclose(
      found["confidence_by_bin"], [[2, 0.35, 0.2], [2, 0.975, 0.8]], atol=1e-4)
  assert found["confidence_error"] == pytest.approx((2 * 0.15 + 2 * 0.175) / 4, abs=1e-6)


# Muon.


def test_muon_moves_matrices_alone(target):
  """Every matrix between states moves by the same root mean square, a table moves as under Adam."""
  cfg, module, batch = reader("dspark", target)
  cfg.drafter.kind = "dspark"
  moves = {}
  for name in ("adamw", "muon"):
    own = dataclasses.replace(cfg, train=dataclasses.replace(
        cfg.train, optimizer=name, warmup=0.0, clip=0.0))
    setup, state = train.make_setup(own, target, module, 20)
    old = {jax.tree_util.keystr(k): np.array(v) for k, v in jax.tree.leaves_with_path(state.params)}
    for _ in range(2):  # the rate of the first step is zero
      state, _ = train.train_step(setup, state, setup.frozen, target.params, batch)
    moves[name] = {jax.tree_util.keystr(k): np.asarray(v) - old[jax.tree_util.keystr(k)]
                   for k, v in jax.tree.leaves_with_path(state.params)}
  rms = lambda x: float(np.sqrt(np.mean(x ** 2)))
  matrices = [k for k in moves["muon"] if any(w in k for w in ("'wq'", "'w_up'", "'fc'", "'wo'"))]
  assert len(matrices) == 4
  for name, move in moves["muon"].items():
    if "norm" in name or "confidence" in name:
      # optax's Muon takes Nesterov's form of Adam for the rest.
      np.testing.assert_allclose(move, moves["adamw"][name], rtol=0.3, atol=1e-7)
    elif name in matrices:
      # Adam's first step has the size of the rate everywhere, an orthogonalised one has not.
      uneven = lambda x: np.abs(x).std() / np.abs(x).mean()
      assert uneven(moves["adamw"][name]) < 0.1 and uneven(move) > 0.3, name
      # A fifth of the rate, and less where so few tokens give a gradient of low rank.
      assert 0 < rms(move) / rms(moves["adamw"][name]) < 0.24, name


def test_a_table_is_no_matrix_for_muon():
  cfg = make_config(optimizer="muon")
  params = {"table": np.zeros((400, 8)), "matrix": np.zeros((16, 8)), "norm": np.zeros(8)}
  optimizer = make_optimizer(cfg.train, lambda step: 1.0, params)
  grads = jax.tree.map(lambda x: np.random.default_rng(0).normal(size=x.shape), params)
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  table = np.abs(updates["table"])  # the first step of Adam: all entries are one size
  np.testing.assert_allclose(table, table[0, 0], rtol=1e-3)
  assert np.abs(updates["matrix"]).std() > 0.3 * np.abs(updates["matrix"]).mean()


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_sampled_vocabulary_in_a_step(kind, target):
  """With all ids it is the whole loss; with half of them the sums of many draws are near it."""
  cfg, module, batch = reader(kind, target)
  cfg.drafter.kind = kind
  setup, state = train.make_setup(cfg, target, module, 20)
  count = target.config.vocab_real if not hasattr(module, "draft_ids") else len(module.draft_ids)
  sums = jax.jit(lambda step, size: train.batch_sums(
      setup, state.params, setup.frozen, target.params, batch | {"step": step}, sampled=size),
      static_argnums=1)
  # Anchors are drawn anew each step, so whole and part are compared step by step.
  whole, same = sums(0, 0), sums(0, count)
  for name in ("loss", "alpha", "kept_mass", "greedy_match"):
    np.testing.assert_allclose(same[name], whole[name], rtol=2e-5, err_msg=name)
  kept = len(set(np.asarray(batch["tokens"]).ravel()) | set(np.asarray(batch["best"])))
  size = (kept + count) // 2
  assert kept < size < count
  part = [(sums(step, size), sums(step, 0)) for step in range(40)]
  for name in ("loss", "kept_mass", "alpha"):
    found = sum(np.sum(a[name]) for a, _ in part)
    expected = sum(np.sum(b[name]) for _, b in part)
    assert abs(found / expected - 1) < 0.05, name
