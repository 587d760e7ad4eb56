"""The block drafters: decoding, the cached context, training, and what a new drafter starts from.

Everything that `dspark` shares is tested for both kinds here; its serial tail in test_dspark.py.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

import spec_jax
from spec_jax import decode, drafters, sampling
from spec_jax.drafters import dflash, dspark
from spec_jax.drafters.dflash import DFlash, dflash_taps
from spec_jax.drafters.dspark import DSpark
from spec_jax.errors import UserError
from spec_jax.generate import Run
from spec_jax.models.config import RopeScaling
from spec_jax.models.decoder import linear, rms_norm
from spec_jax.sampling import Sampling
from spec_jax.target import canonical_tensors, default_mask_id
from spec_jax.tokenizer import Tokenizer
from spec_jax.types import Context
from tests import tiny
from tests.weights import toy

KINDS = ("dflash", "dspark")
BLOCK = 5  # slots
DRAFTS = {"dflash": 4, "dspark": 5}
SILENT = {"dflash": 1, "dspark": 0}  # slots that predict nothing: the anchor of dspark does
TAPS = dflash_taps(8, 3)
MASK = 63  # no prompt and no answer of these tests holds it
RANK = 6
REDUCED = np.array([40, 3, 17, 22, 9, 61, 5, 33, 12, 50, 28, 44], np.int32)


@functools.cache
def target():
  """Eight layers, for three taps; quieter than those of two, so that rounding grows as little."""
  cfg = tiny.config(num_layers=8)
  tensors = {name: value * 0.5 if name.startswith("layers.") and value.ndim > 1 else value
             for name, value in tiny.tensors(cfg).items()}
  return tiny.make(cfg, tensors, tiny.tokenizer())


def config(**changes):
  return dataclasses.replace(target().config, num_layers=2, **changes)


@functools.cache
def values(kind, draft_vocab=0):
  """Random tensors; the norms are random too, so that a forgotten one is noticed."""
  shapes = dflash.tensor_shapes(config(), TAPS) if kind == "dflash" else dspark.tensor_shapes(
      config(), TAPS, RANK, draft_vocab)
  rng = np.random.default_rng(7)
  wide = {"markov_w1": 1.0, "markov_w2": 1.0}
  return {
      name: (1 + 0.3 * rng.normal(size=shape) if name.endswith("norm")
             else wide.get(name, 0.3) * rng.normal(size=shape)).astype(np.float32)
      for name, shape in shapes.items()}


def build(kind, *, reduced=False, tensors=None, cfg=None, **options):
  """A drafter of those tensors."""
  tensors = values(kind, len(REDUCED) if reduced else 0) if tensors is None else tensors
  if reduced:
    options |= {"draft_ids": REDUCED, "head": target().module.head_weight()[REDUCED]}
  options = {"taps": TAPS, "mask_id": MASK, "block_size": BLOCK} | options
  return {"dflash": DFlash, "dspark": DSpark}[kind](
      cfg or config(), lambda name: jnp.asarray(tensors[name]), **options)


def prompts(count, seed=0):
  """Rows without the mask."""
  return [[i if i != MASK else 62 for i in row] for row in tiny.prompts(count, seed=seed)]


def features_of(ids, size):
  """The target's states [size, F] of a text alone; what lies behind it is of padding."""
  return read(target().params, jnp.asarray([[*ids, *[0] * (size - len(ids))]], jnp.int32))[0]


@jax.jit
def read(params, ids):
  """The target's states of whole rows, [B, T, F]."""
  places = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
  return nnx.merge(target().graph, params).hidden(ids, places, taps=TAPS).features


def context(rows, temperature=0.0, capacity=40):
  """Committed rows; behind them stand ids that must not be read."""
  tokens = np.full((len(rows), capacity), 62, np.int32)
  for b, row in enumerate(rows):
    tokens[b, :len(row)] = row
  length = jnp.asarray([len(r) for r in rows], jnp.int32)
  keys = sampling.round_keys(sampling.row_keys(0, jnp.arange(len(rows))), length)
  return Context(
      jnp.asarray(tokens), length, keys, jnp.full(len(rows), temperature, jnp.float32))


def propose(drafter, rows, draft_len, temperature=0.0, **settings):
  """One proposal after the target has read all but the last token of each row.

  The drafter sees the states of the last token and of padding too, as in a ragged prefill.
  """
  where = context(rows, temperature)
  features = read(target().params, where.tokens[:, :24])
  graph, params = nnx.split(drafter)  # compiled once for drafters of one kind
  settings = Sampling(temperature == 0, **settings)
  return _propose(graph, params, target().params, where, features, draft_len, settings)


@functools.partial(jax.jit, static_argnames=("graph", "draft_len", "settings"))
def _propose(graph, params, target_params, where, features, draft_len, settings):
  drafter, module = nnx.merge(graph, params), nnx.merge(target().graph, target_params)
  rows = where.length.shape[0]
  places = jnp.broadcast_to(jnp.arange(24), (rows, 24))
  state = drafter.observe(
      drafter.init_state(rows, 40), where.tokens[:, :24], features, places, places >= 0, module)
  return drafter.propose(state, where, draft_len, settings, module)[0]


# Taps, settings, refusals.


@pytest.mark.parametrize("layers,count,expected", [
    (36, 5, (1, 9, 17, 25, 33)), (30, 5, (1, 8, 14, 20, 27)), (30, 1, (15,)), (8, 3, (1, 3, 5)),
    (8, 2, (1, 5)), (6, 3, (1, 2, 3)), (2, 1, (1,)), (1, 1, (0,))])
def test_taps(layers, count, expected):
  assert dflash_taps(layers, count) == expected


@pytest.mark.parametrize("layers,count", [(5, 3), (4, 2), (3, 2), (2, 2), (6, 4), (1, 2)])
def test_too_few_layers_for_the_taps(layers, count):
  with pytest.raises(UserError, match=f"has {layers} layers, too few for {count} taps"):
    dflash_taps(layers, count)


def test_settings_are_checked():
  with pytest.raises(UserError, match="at least one"):
    dflash_taps(8, 0)
  with pytest.raises(UserError, match="block_size=1 must be at least 2"):
    build("dflash", block_size=1)
  with pytest.raises(UserError, match="block_size=0 must be at least 1"):
    build("dspark", block_size=0)
  with pytest.raises(UserError, match="mask_id=64 is outside 0..63"):
    build("dflash", mask_id=64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_longer_than_the_block_is_refused(kind):
  most = DRAFTS[kind]
  with pytest.raises(UserError, match=f"draft_len={most + 1} .*block_size=5 drafts at most {most}"):
    propose(build(kind), prompts(2), most + 1)


def test_the_decay_follows_the_block():
  gammas = [build("dflash", block_size=size).gamma for size in (4, 8, 9, 10, 13, 16, 32)]
  assert gammas == [4, 4, 4.5, 5, 6, 7, 7]
  assert build("dflash", gamma=2.5).gamma == 2.5


# Decoding.


@functools.cache
def plain(heat, rule=None):
  return spec_jax.generate(
      target(), None, prompts(7), temperature=heat, rule=rule, max_new_tokens=[20, 3] * 3 + [20],
      batch_size=3).tokens


@pytest.mark.parametrize("kind,draft_len,reduced", [
    ("dflash", 1, False), ("dflash", 4, False), ("dflash", 2, True), ("dspark", 5, True)])
def test_outputs_are_the_targets(kind, draft_len, reduced):
  # Ragged rows, more of them than the batch holds.
  drafter = drafters.wrap(kind, kind, build(kind, reduced=reduced))
  options = dict(draft_len=draft_len, max_new_tokens=[20, 3] * 3 + [20], batch_size=3)
  out = spec_jax.generate(target(), drafter, prompts(7), **options)
  assert out.tokens == plain(0.0)
  # Coupled sampling: the very tokens, and drafts that are accepted only if their noise is right.
  warm = spec_jax.generate(
      target(), drafter, prompts(7), temperature=2.0, rule="coupled", **options)
  assert warm.tokens == plain(2.0, "coupled")
  assert sum(int(r.accepted.sum()) for r in warm.records) > 0


def test_beyond_its_own_context_the_target_decodes_alone():
  drafter = drafters.wrap("dflash", "short", build("dflash", cfg=config(max_position=20)))
  out = spec_jax.generate(
      target(), drafter, prompts(7), draft_len=4, max_new_tokens=[20, 3] * 3 + [20], batch_size=3)
  assert out.tokens == plain(0.0)
  assert any(0 in r.proposed for r in out.records)


@pytest.mark.parametrize("kind,draft_len", [("dflash", 1), ("dflash", 4), ("dspark", 5)])
def test_the_context_is_that_of_a_fresh_reading(kind, draft_len):
  # CASE 7, after every round, with rounds that accept different numbers of drafts.
  module, rows = build(kind), prompts(4, seed=2)
  run = Run(target(), drafters.wrap(kind, kind, module), rows, draft_len=draft_len,
            max_new_tokens=24, batch_size=4, temperature=4.0)
  state = decode.init_state(run.program, run.params, 4, 64, 24)
  state = run._fill(state, 32, {i: i for i in range(4)}, [-1] * 4, 4)

  @jax.jit
  def fresh(tokens, features):
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return module.observe(
        module.init_state(*tokens.shape), tokens, features, places, places >= 0, target().module)

  accepted = set()
  for r in range(9):
    wanted = fresh(state.tokens, read(target().params, state.tokens))
    for b in range(4):
      n = int(state.length[b]) - 1
      for ours, expected in zip(
          jax.tree.leaves(state.draft), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours[b, :, :n], expected[b, :, :n], atol=1e-5)
    accepted |= set(np.asarray(state.accepted)[:, max(r - 1, 0)].tolist())
    state = decode.chunk(run.program, run.params, state, jnp.int32(1), jnp.int32(99),
                         jnp.asarray(False))
  assert {0, 1} <= accepted and (draft_len == 1 or max(accepted) > 1)


# The mathematics, against plain numpy.


def reference(tensors, features, anchor, width, silent):
  """States of the slots that predict, in float64, one head and slot at a time.

  Args:
    features: [a, F] of the positions before the anchor.
  """
  cfg = config()
  N, G, H = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
  w = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
  embed = np.asarray(target().module.embed[...], np.float64)

  def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.rms_norm_eps) * weight

  def turned(x, position):
    angle = position * cfg.rope_theta ** (-np.arange(0, H, 2) / H)
    a, b = x[:H // 2], x[H // 2:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])

  known = norm(np.asarray(features, np.float64) @ w["fc"].T, w["hidden_norm"])
  x = embed[[anchor] + [MASK] * (width - 1)]
  for i in range(cfg.num_layers):
    layer = {name: w[f"layers.{i}.{name}"] for name in dflash.LAYER_TENSORS}
    h = norm(x, layer["attn_norm"])
    seen, out = np.concatenate([known, h]), np.zeros((width, N * H))
    for n in range(N):
      g = n * G // N
      k, v = (seen @ layer[name][g * H:(g + 1) * H].T for name in ("wk", "wv"))
      k = np.stack([turned(norm(row, layer["k_norm"]), p) for p, row in enumerate(k)])
      for slot in range(width):
        q = norm(layer["wq"][n * H:(n + 1) * H] @ h[slot], layer["q_norm"])
        score = k @ turned(q, len(features) + slot) / np.sqrt(H)
        chance = np.exp(score - score.max())
        out[slot, n * H:(n + 1) * H] = chance @ v / chance.sum()
    x = x + out @ layer["wo"].T
    h = norm(x, layer["mlp_norm"])
    gate = h @ layer["w_gate"].T
    x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["w_up"].T)) @ layer["w_down"].T
  return norm(x[silent:], w["final_norm"])


def chain(tensors, states, anchor, drafted):
  """Logits [K, V] of each place given the drafts before it."""
  logits = states @ np.asarray(target().module.head_weight(), np.float64).T
  if "markov_w1" in tensors:
    logits += tensors["markov_w1"][[anchor, *drafted[:-1]]] @ tensors["markov_w2"].T
  return logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_len", [1, 3, 4])
def test_the_forward_pass_against_numpy(kind, draft_len):
  module, tensors, rows = build(kind), values(kind), prompts(4)
  warm, cold = propose(module, rows, draft_len, 1.0), propose(module, rows, draft_len)
  assert cold.probs is None
  for b, row in enumerate(rows):
    states = reference(tensors, features_of(row, 24)[:len(row) - 1], row[-1],
                       draft_len + SILENT[kind], SILENT[kind])
    logits = chain(tensors, states, row[-1], warm.tokens[b].tolist())
    q = np.exp(logits - logits.max(-1, keepdims=True))
    np.testing.assert_allclose(warm.probs[b], q / q.sum(-1, keepdims=True), atol=2e-5)
    greedy = cold.tokens[b].tolist()
    assert chain(tensors, states, row[-1], greedy).argmax(-1).tolist() == greedy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduced", [False, True])
def test_probs_are_those_the_drafts_were_drawn_from(kind, reduced):
  K, rows = DRAFTS[kind], prompts(40)
  proposal = propose(build(kind, reduced=reduced), rows, K, temperature=1.3)
  u = sampling.uniforms(context(rows).keys, sampling.DRAFT, K)
  if reduced:  # drawn over the draft vocabulary, whose order is not that of the ids
    q = proposal.probs[..., REDUCED]
    np.testing.assert_array_equal(REDUCED[sampling.draw(q, u)], proposal.tokens)
    np.testing.assert_array_equal(np.delete(proposal.probs, REDUCED, -1), 0)
  else:
    np.testing.assert_array_equal(sampling.draw(proposal.probs, u), proposal.tokens)
  np.testing.assert_allclose(proposal.probs.sum(-1), 1, atol=1e-5)
  assert len(np.unique(proposal.tokens)) > 6


@pytest.mark.parametrize("kind,reduced", [("dflash", True), ("dspark", False)])
def test_coupled_drafts_take_the_noise_of_their_positions(kind, reduced):
  K, rows = DRAFTS[kind], prompts(40)
  # Without dspark's term of the token before, whose law is then the same whatever is drawn.
  tensors = {k: v * (k != "markov_w2") for k, v in values(kind, reduced and len(REDUCED)).items()}
  module = build(kind, reduced=reduced, tensors=tensors)
  probs = propose(module, rows, K, temperature=1.3).probs
  coupled = propose(module, rows, K, temperature=1.3, coupled=True)
  noise = sampling.gumbel(context(rows).keys, jnp.arange(K), tiny.VOCAB)
  np.testing.assert_array_equal(sampling.draw_coupled(probs, noise), coupled.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_see_the_slots_behind_them(kind):
  # A causal block would give the first draft the same q whatever follows it.
  rows = prompts(4)
  one, all_ = (propose(build(kind), rows, k, 1.0).probs[:, 0] for k in (1, DRAFTS[kind]))
  assert (np.abs(one - all_).max(-1) > 1e-3).all()


def test_bfloat16():
  tensors = {k: jnp.asarray(v, jnp.bfloat16 if v.ndim > 1 else jnp.float32)
             for k, v in values("dflash").items()}
  low, rows = build("dflash", tensors=tensors), prompts(4)
  assert low.init_state(1, 8).k[0].dtype == jnp.bfloat16
  exact = propose(build("dflash"), rows, 4, 1.0).probs
  probs = propose(low, rows, 4, 1.0).probs
  assert probs.dtype == jnp.float32
  assert 0 < np.abs(probs - exact).max() < 0.3 and np.abs(probs - exact).mean() < 0.01


# Training.


def pack(rows, size=24, shift=0):
  """A batch as train_drafter packs it.

  Args:
    rows: of lists of (ids, places), the places whose next token is supervised.
    size: T.
    shift: added to every position.
  """
  R = len(rows)
  batch = {
      "tokens": np.zeros((R, size), np.int32), "positions": np.zeros((R, size), np.int32),
      "segments": np.full((R, size), -1, np.int32), "teacher": np.full((R, size), -1, np.int32),
      "features": np.zeros((R, size, len(TAPS) * 32), np.float32)}
  count = 0
  for r, row in enumerate(rows):
    at = 0
    for s, (ids, places) in enumerate(row):
      here = slice(at, at + len(ids))
      batch["tokens"][r, here], batch["segments"][r, here] = ids, s
      batch["positions"][r, here] = np.arange(len(ids)) + shift
      batch["features"][r, here] = features_of(ids, size)[:len(ids)]
      for place in places:
        batch["teacher"][r, at + place] = count
        count += 1
      at += len(ids)
  return {name: jnp.asarray(value) for name, value in batch.items()}


def train(module, batch, seed=0):
  """The states of one step and, for each block with something supervised, its row and column."""
  states = _train(*nnx.split(module), target().params, batch, jax.random.key(seed))
  K = module.depths
  weight = np.asarray(states.weight).reshape(-1, K)
  first = np.asarray(states.source).reshape(-1, K)[:, 0]
  teacher = np.asarray(batch["teacher"])
  at = {}
  for block in np.flatnonzero(weight[:, 0]):
    (r,), (c,) = np.nonzero(teacher == first[block])
    assert (r, c) not in at, "an anchor is drawn twice"
    at[r, c] = block
  return states, at


@functools.partial(jax.jit, static_argnames=("graph",))
def _train(graph, params, target_params, batch, key):
  return nnx.merge(graph, params).train_states(
      batch, nnx.merge(target().graph, target_params), key)


def document(length, seed):
  return np.random.default_rng(seed).integers(3, 62, length).tolist()


@pytest.mark.parametrize("kind,reduced", [("dflash", False), ("dspark", False), ("dspark", True)])
def test_training_and_decoding_see_the_same(kind, reduced):
  module = build(kind, reduced=reduced, anchors=24)
  K, rows = module.depths, prompts(4, seed=3)
  proposal = propose(module, rows, K, temperature=1.0)
  # The drafts as the data: they are what the next ones are conditioned on. Two texts to a row.
  texts = [([*row, *drafted], range(max(len(row) - 2, 0), len(row) + K - 1))
           for row, drafted in zip(rows, proposal.tokens.tolist(), strict=True)]
  batch = pack([texts[:2], texts[2:]], size=40)
  states, at = train(module, batch)
  for b, row in enumerate(rows):
    start = len(texts[b - 1][0]) if b % 2 else 0
    block = at[b // 2, start + len(row) - 1]
    hidden = states.hidden.reshape(-1, K, states.hidden.shape[-1])[block]
    logits = module.train_logits(hidden, target().module, module.head_parameters())
    q = np.asarray(proposal.probs)[b]
    np.testing.assert_allclose(
        jax.nn.softmax(logits), q[:, REDUCED] if reduced else q, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_each_draft_has_the_label_of_its_own_position(kind):
  # CASE 27: an anchor two tokens before the end supervises two drafts, not the next text's.
  ids, more = document(9, 1), document(8, 2)
  module = build(kind, anchors=24)
  K = module.depths
  batch = pack([[(ids, range(3, 8)), (more, range(1, 7))]], size=17)  # the row ends as the text
  states, at = train(module, batch)
  # The first answered token is the first anchor, the last one with a successor the last.
  assert set(at) == {(0, c) for c in [*range(4, 8), *range(9 + 2, 9 + 7)]}
  tokens, teacher = np.asarray(batch["tokens"])[0], np.asarray(batch["teacher"])[0]
  following = {row: tokens[c + 1] for c, row in enumerate(teacher) if row >= 0}
  source, weight = (np.asarray(x).reshape(-1, K) for x in (states.source, states.weight))
  for (_, c), block in at.items():
    left = (9 if c < 9 else 17) - 1 - c
    for j in range(1, K + 1):
      if j > left:
        assert weight[block, j - 1] == 0
        continue
      assert following[source[block, j - 1]] == tokens[c + j]
      np.testing.assert_allclose(weight[block, j - 1], np.exp(-(j - 1) / 4.0), rtol=1e-6)
  assert weight[at[0, 6]].astype(bool).sum() == 2
  np.testing.assert_array_equal(states.depth.reshape(-1, K)[0], np.arange(K))
  # Slots without a label take no part: only blocks with an anchor have weight.
  assert (weight.sum(-1) > 0).sum() == len(at)


def test_a_draft_does_not_reach_over_a_question():
  # Two answers in one text: what lies behind the first is not a continuation of its drafts.
  module = build("dflash", anchors=24)
  states, at = train(module, pack([[(document(14, 1), [2, 3, 4, 7, 8, 9, 10])]]))
  weight = np.asarray(states.weight).reshape(-1, 4) > 0
  assert {c: int(weight[block].sum()) for (_, c), block in at.items()} == {
      3: 2, 4: 1, 8: 3, 9: 2, 10: 1}


def test_anchors_are_drawn_anew_without_replacement():
  module = build("dflash", anchors=3)
  batch = pack([[(document(12, 1), range(2, 11))], [(document(7, 2), range(3, 6))], []])
  counts: dict = {}
  draw = jax.jit(lambda key: module.draw_anchors(batch, key))
  for seed in range(300):
    place, live = (np.asarray(x) for x in draw(jax.random.key(seed)))
    assert live.sum(1).tolist() == [3, 2, 0]
    for r in range(2):
      drawn = place[r][live[r]].tolist()
      assert len(set(drawn)) == len(drawn)
      for c in drawn:
        counts[r, c] = counts.get((r, c), 0) + 1
  assert set(counts) == {(0, c) for c in range(3, 11)} | {(1, 4), (1, 5)}
  # 300 draws of three of eight: 112.5 each, a deviation of 8.4.
  assert all(80 < counts[0, c] < 146 for c in range(3, 11))
  assert counts[1, 4] == counts[1, 5] == 300
  # A row without an anchor gives numbers, and no weight.
  states, _ = train(module, batch)
  assert np.isfinite(states.hidden).all()
  assert (np.asarray(states.weight).reshape(3, -1)[2] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_the_context_before_the_anchor_and_nothing_else(kind):
  # CASE 27, for the features of every position and every block.
  module = build(kind, anchors=24)
  texts = [(document(9, 1), range(2, 8)), (document(8, 2), range(1, 7))]
  batch = pack([texts, texts[:1]])
  _, at = train(module, batch)
  K = module.depths

  def hidden(features):
    states = module.train_states(batch | {"features": features}, target().module, jax.random.key(0))
    return states.hidden[..., :32].reshape(-1, K, 32)

  @jax.jit
  def gradients(features, blocks):
    out, back = jax.vjp(hidden, features)
    some = jax.random.normal(jax.random.key(1), out.shape[1:])
    return jax.vmap(lambda b: back(jnp.zeros_like(out).at[b].set(some))[0])(blocks)

  grads = gradients(batch["features"], jnp.asarray(list(at.values())))
  touched = np.abs(np.asarray(grads)).max(-1) > 0
  segments = np.asarray(batch["segments"])
  for n, (r, c) in enumerate(at):
    seen = np.zeros_like(touched[n])
    seen[r] = (segments[r] == segments[r, c]) & (np.arange(24) < c)
    np.testing.assert_array_equal(touched[n], seen)


@pytest.mark.parametrize("kind", KINDS)
def test_another_text_in_the_row_changes_nothing(kind):
  # CASE 27: packed twice, the second copy is read as the first is.
  module, ids = build(kind, anchors=24), document(9, 1)
  text, other = (ids, range(2, 8)), (document(9, 5), range(2, 8))
  K = module.depths
  twice, at = train(module, pack([[text, text]]))
  mixed, same = train(module, pack([[other, text]]))
  assert at == same
  for c in range(3, 8):
    states = [np.asarray(s.hidden).reshape(-1, K, s.hidden.shape[-1])[at[0, 9 + c]]
              for s in (twice, mixed)]
    np.testing.assert_array_equal(*states)
    # dspark's states hold the token before each draft: compared as far as the text goes.
    first = np.asarray(twice.hidden).reshape(-1, K, twice.hidden.shape[-1])[at[0, c]]
    np.testing.assert_allclose(states[0][:8 - c], first[:8 - c], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_absolute(kind):
  module, text = build(kind, anchors=24), (document(12, 1), range(4, 11))
  plain, at = train(module, pack([[text]]))
  shifted, _ = train(module, pack([[text]], shift=37))
  np.testing.assert_allclose(plain.hidden, shifted.hidden, atol=1e-5)
  # The first anchor's context stays and its block moves.
  batch = pack([[text]])
  moved, _ = train(module, batch | {
      "positions": batch["positions"] + 3 * (jnp.arange(24) >= 5)})
  block = lambda states: np.asarray(states.hidden).reshape(
      -1, module.depths, states.hidden.shape[-1])[at[0, 5]]
  assert (np.abs(block(moved) - block(plain)).max(-1) > 1e-3).all()


# Tensors and names.


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_its_tensors_and_options(kind):
  module = build(kind)
  options = json.loads(json.dumps(module.options()))
  again = build(kind, tensors=module.own_tensors(), **options | {"taps": tuple(options["taps"])})
  a, b = (propose(m, prompts(4), 3, 1.0) for m in (module, again))
  np.testing.assert_array_equal(a.probs, b.probs)
  shapes = {name: value.shape for name, value in module.own_tensors().items()}
  assert shapes == {name: value.shape for name, value in values(kind).items()}
  # What is trained is what is its own, and nothing of the target's.
  trained = jax.tree.leaves(nnx.state(module, nnx.Param))
  assert sorted(x.shape for x in trained) == sorted(shapes.values())
  names = {"dflash": dflash, "dspark": dspark}[kind].EXPORT_NAMES
  assert {n.replace("layers.0.", "layers.{i}.") for n in shapes if "layers.1." not in n} == set(
      names)
  assert len(set(names.values())) == len(names)


def test_published_names():
  names = dspark.EXPORT_NAMES
  assert names["fc"] == "fc.weight" and names["final_norm"] == "norm.weight"
  assert names["layers.{i}.wq"] == "layers.{i}.self_attn.q_proj.weight"
  assert names["layers.{i}.k_norm"] == "layers.{i}.self_attn.k_norm.weight"
  assert names["layers.{i}.attn_norm"] == "layers.{i}.input_layernorm.weight"
  assert names["layers.{i}.mlp_norm"] == "layers.{i}.post_attention_layernorm.weight"
  assert names["markov_w1"] == "markov_head.markov_w1.weight"
  assert names["confidence"] == "confidence_head.proj.weight"


def test_rope_settings_are_the_configs():
  # CASE 13.
  scaled = config(rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64), partial_rotary_factor=0.25)
  plain = build("dflash").inverse_frequencies
  assert build("dflash", cfg=scaled).inverse_frequencies != plain
  assert len(build("dflash", cfg=scaled).inverse_frequencies) == 1
  divided = build("dflash", rope_divisors=np.array([1, 2, 4, 8], np.float32))
  np.testing.assert_allclose(
      divided.inverse_frequencies, np.array(plain) / [1, 2, 4, 8], rtol=1e-6)
  assert divided.rope_divisors == (1, 2, 4, 8)


# What a new drafter starts from.


def test_a_start_from_the_target():
  tensors = dflash.init_tensors(target(), (6, 7), TAPS)
  assert {k: v.shape for k, v in tensors.items()} == dflash.tensor_shapes(config(), TAPS)
  source = canonical_tensors(target())
  np.testing.assert_array_equal(tensors["layers.1.wq"], source["layers.7.wq"])
  np.testing.assert_array_equal(tensors["final_norm"], source["final_norm"])
  # The values of the context are those that the layer gives for the deepest tap.
  features = features_of(document(9, 1), 24)[None, :9]
  context = build("dflash", tensors=tensors).context(features, jnp.arange(9)[None])
  deepest = rms_norm(features[..., -32:], source["layers.6.attn_norm"], config().rms_norm_eps)
  wanted = linear(deepest, source["layers.6.wv"]).reshape(1, 9, 2, 8).transpose(0, 2, 1, 3)
  np.testing.assert_allclose(context.v[0], wanted, atol=1e-5)
  # Queries keep their size.
  x = jax.random.normal(jax.random.key(0), (500, 32))
  q = rms_norm(x, source["layers.6.attn_norm"], 1e-5) @ source["layers.6.wq"].T
  np.testing.assert_allclose(tensors["layers.0.q_norm"], np.sqrt((q**2).mean()), rtol=0.05)


@pytest.mark.parametrize("layers", [(), (8,), (-1,)])
def test_layers_that_are_not_there(layers):
  with pytest.raises(UserError, match=r"must name layers 0\.\.7"):
    dflash.init_tensors(target(), layers, TAPS)


def with_controls(tmp_path, *more, template=toy.CHATML):
  """The tiny tokenizer with further control tokens, as a target's."""
  first = tiny.tokenizer()
  first.save(tmp_path)
  backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in more])
  tokenizer = Tokenizer(backend, chat_template=template, bos_id=first.bos_id,
                        eos_ids=first.eos_ids, pad_id=first.pad_id)
  cfg = tiny.config(vocab_size=80, num_layers=1)
  return tiny.make(cfg, tiny.tensors(cfg), tokenizer)


def test_the_mask_is_a_control_token_without_a_role(tmp_path):
  find = lambda *more, **options: default_mask_id(with_controls(tmp_path, *more, **options))
  assert find("<free>", "<spare>") == 65
  # Not one that the template writes, spelled out or not, in whatever branch.
  assert find("<free>", "<user>", template=(
      "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}")) == 64
  assert find("<free>", "<tool>", template=toy.CHATML + "{% if tools %}<tool>{% endif %}") == 64
  # A template that knows no system turn, and none at all.
  assert find("<free>", "<user>", template=(
      "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
      "{{ '<' + m['role'] + '>' }}{% endfor %}")) == 64
  assert find("<free>", template="") == 64


def test_a_tokenizer_without_a_free_control_token():
  with pytest.raises(UserError, match="set drafter.mask_id"):
    default_mask_id(target())  # BOS, EOS and what the template writes
  with pytest.raises(UserError, match="set drafter.mask_id"):
    default_mask_id(dataclasses.replace(target(), tokenizer=None))
