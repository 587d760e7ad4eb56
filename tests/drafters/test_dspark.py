"""The serial tail of dspark; what it shares with dflash is tested in test_dflash.py."""

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters import dspark
from tests.drafters.test_dflash import (
  RANK,
  REDUCED,
  TAPS,
  build,
  config,
  document,
  pack,
  prompts,
  propose,
  target,
  train,
  values,
)


def test_q_is_conditional_on_the_token_drafted_before():
  # Many rows of one text, each with draws of its own.
  row = prompts(1)[0]
  proposal = propose(build("dspark"), [row] * 200, 2, temperature=1.5)
  probs, first = np.asarray(proposal.probs), np.asarray(proposal.tokens)[:, 0]
  np.testing.assert_array_equal(probs[:, 0], probs[:1, 0].repeat(200, 0))
  distinct = np.unique(first)
  assert len(distinct) > 5
  laws = []
  for token in distinct:
    same = probs[first == token, 1]
    np.testing.assert_array_equal(same, same[:1].repeat(len(same), 0))
    laws.append(same[0])
  gaps = [np.abs(a - b).max() for n, a in enumerate(laws) for b in laws[:n]]
  assert min(gaps) > 1e-3


def test_the_confidence_changes_no_draft():
  rows = prompts(4)
  other = values("dspark") | {"confidence": -5 * values("dspark")["confidence"]}
  a, b = (propose(build("dspark", tensors=t), rows, 5, 1.0) for t in (values("dspark"), other))
  np.testing.assert_array_equal(a.tokens, b.tokens)
  np.testing.assert_array_equal(a.probs, b.probs)


def test_states_end_in_the_row_of_the_true_token_before():
  module = build("dspark", anchors=24)
  batch = pack([[(document(12, 1), range(3, 11))]])
  states, at = train(module, batch)
  hidden, tokens = np.asarray(states.hidden), np.asarray(batch["tokens"])[0]
  assert hidden.shape[1:] == (1, 32 + RANK)
  for (_, c), block in at.items():
    for j in range(5):
      if c + j < 12:
        np.testing.assert_array_equal(
            hidden[5 * block + j, 0, 32:], values("dspark")["markov_w1"][tokens[c + j]])


def test_student_logits_and_what_is_trained_behind_the_states():
  for reduced in (False, True):
    module = build("dspark", reduced=reduced)
    head = np.asarray(target().module.head_weight())
    head = head[REDUCED] if reduced else head
    hidden = jax.random.normal(jax.random.key(0), (7, 32 + RANK))
    trained = module.head_parameters()
    assert set(trained) == {"markov_w2", "confidence"}
    assert trained["markov_w2"].shape == (len(head), RANK)
    wanted = hidden[:, :32] @ head.T + hidden[:, 32:] @ np.asarray(trained["markov_w2"]).T
    np.testing.assert_allclose(
        module.train_logits(hidden, target().module, trained), wanted, atol=1e-4)
    np.testing.assert_allclose(
        module.confidence_logit(hidden, trained["confidence"]),
        hidden @ np.asarray(trained["confidence"])[:-1] + trained["confidence"][-1], atol=1e-5)


def test_both_factors_learn():
  module = build("dspark", anchors=24)
  batch = pack([[(document(12, 1), range(3, 11))]])
  tail = values("dspark")["markov_w2"]

  def loss(markov_w1, trained):
    drafter = build("dspark", tensors=values("dspark") | {"markov_w1": markov_w1}, anchors=24)
    states = drafter.train_states(batch, target().module, jax.random.key(0))
    logits = drafter.train_logits(states.hidden[:, 0], target().module, trained)
    return jnp.sum(states.weight[:, 0] * jax.nn.log_softmax(logits)[:, 5])

  first, rest = jax.jit(jax.grad(loss, (0, 1)))(
      jnp.asarray(values("dspark")["markov_w1"]), module.head_parameters())
  assert rest["markov_w2"].shape == tail.shape and np.abs(rest["markov_w2"]).max() > 0
  # The rows of the true tokens before a draft, no others.
  used = {t for t in document(12, 1)[4:11]}
  assert set(np.flatnonzero(np.abs(first).max(-1))) == used


def test_the_decay_does_not_follow_the_block():
  assert [build("dspark", block_size=size).gamma for size in (4, 8, 16)] == [4.0] * 3


def test_it_starts_as_its_backbone():
  tensors = dspark.init_tensors(target(), (6, 7), TAPS, seed=3, rank=RANK)
  assert {k: v.shape for k, v in tensors.items()} == dspark.tensor_shapes(config(), TAPS, RANK)
  assert 0 < np.abs(tensors["markov_w1"]).max() < 0.2
  assert not np.abs(tensors["markov_w2"]).max()
  other = dspark.init_tensors(target(), (6, 7), TAPS, seed=4, rank=RANK)
  assert np.abs(other["markov_w1"] - tensors["markov_w1"]).max() > 0
  a, b = (propose(build("dspark", tensors=t), prompts(4), 5, 1.0) for t in (tensors, other))
  np.testing.assert_array_equal(a.probs, b.probs)
  reduced = dspark.init_tensors(target(), (7,), TAPS, seed=3, draft_vocab=12)
  assert reduced["markov_w2"].shape == (12, dspark.RANK)
  assert reduced["markov_w1"].shape == (64, dspark.RANK)


def test_the_anchor_drafts_in_a_block_of_one():
  # Nothing but the anchor and the context: the mask has no part in the first draft.
  module = build("dspark", mask_id=4)
  one = propose(module, prompts(4), 1, 1.0).probs
  np.testing.assert_array_equal(one, propose(build("dspark"), prompts(4), 1, 1.0).probs)
  two = propose(module, prompts(4), 2, 1.0).probs
  assert np.abs(two - propose(build("dspark"), prompts(4), 2, 1.0).probs)[:, 0].max() > 1e-4
