"""The learned drafters against the packages dflash and speculators, at equal random weights.

The arrays are those of reference_drafters.py. Every comparison is made three times: with folders
that the packages' models were written to, with folders of ours that the packages read or convert,
and with folders of ours in the form of speculators, read by its own classes. eagle3_qwen3 (norms of
queries and keys, a normed residual stream, a head of its own) has the form of speculators alone.
"""

import dataclasses
import functools
import json
import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import spec_jax
from spec_jax import drafters, sampling
from spec_jax.drafters.dflash import dflash_taps
from spec_jax.drafters.eagle3 import eagle3_taps
from spec_jax.drafters.head import LearnedDrafter
from spec_jax.sampling import Sampling
from spec_jax.target import Target
from spec_jax.types import Context
from spec_jax.weights import pickled, published
from spec_jax.weights.forms import Form

pytestmark = pytest.mark.interop
TOLERANCE = 1e-4
KINDS = ("dflash", "dspark", "eagle3")
EAGLES = ("eagle3", "eagle3_qwen3")
CAPACITY, WARMTH = 40, 0.25
TRIES = 32  # sampled drafts behind one text


@dataclasses.dataclass(frozen=True)
class Case:
  """What the packages computed, and our drafters of the same weights.

  Attributes:
    arrays: by the names of reference_drafters.py.
    target: whose states and embedding both sides read.
    modules: ours, by kind or by a name of EAGLES.
  """

  arrays: dict[str, np.ndarray]
  target: Target
  modules: dict[str, LearnedDrafter]

  def features(self, kind, text):
    """[T, F] of a text, from the packages' own target."""
    layers = self.arrays[f"{text}_layers"]
    return np.concatenate([layers[i] for i in self.modules[kind].taps], -1)

  def run(self, kind, function, size, *args):
    """function(module, target, size, *args), compiled once for both sources of the weights."""
    graph, params = nnx.split(self.modules[kind])
    return _run(function, size, graph, self.target.graph, params, self.target.params, args)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(function, size, graph, target_graph, params, target_params, args):
  return function(nnx.merge(graph, params), nnx.merge(target_graph, target_params), size, *args)


@pytest.fixture(scope="module")
def reference():
  folder = Path(os.environ.get("SPEC_JAX_INTEROP_DIR", ".interop"))
  path = folder / "drafters.npz"
  if not path.is_file():
    pytest.skip(f"no {path}: run `make interop`")
  with np.load(path) as arrays:
    if "missing" in arrays:
      pytest.skip(f"the second environment lacks dflash or speculators: {arrays['missing']}")
    return {"folder": folder / "peers"} | {name: arrays[name] for name in arrays.files}


@pytest.fixture(scope="module")
def target(reference):
  return spec_jax.load_target(str(reference["folder"] / "target"))


@pytest.fixture(scope="module", params=["theirs", "ours", "speculators"])
def case(request, reference, target, tmp_path_factory):
  folder, arrays = reference["folder"], reference
  load = lambda kind: drafters.load_drafter(str(folder / kind), target).module
  names = KINDS if request.param == "ours" else dict.fromkeys((*KINDS, *EAGLES))
  if request.param != "theirs":
    first, folder = {name: load(name) for name in names}, tmp_path_factory.mktemp(request.param)
    verifier = reference["folder"] / "target"
    for seed, (name, module) in enumerate(first.items()):
      module = changed(module, target, seed)
      if name in KINDS:
        published.write_published(folder / name, module, target)
      published.write_published(
          folder / f"speculators-{name}", module, target,
          form=Form("speculators", str(verifier), 4))
    out = folder / "drafters.npz"
    way = {"ours": "--read", "speculators": "--speculators"}[request.param]
    subprocess.run(
        [str(reference["python"]), Path(__file__).with_name("reference_drafters.py"), way,
         verifier, folder, out],
        check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    with np.load(out) as read:
      arrays = reference | {name: read[name] for name in read.files}
  prefix = "speculators-" if request.param == "speculators" else ""
  return Case(arrays, target, {name: load(f"{prefix}{name}") for name in names})


def changed(module, target, seed):
  """The same drafter with other weights and another reduced vocabulary."""
  rng = np.random.default_rng(seed)
  other = lambda x: (np.asarray(x) * rng.uniform(0.5, 1.5, x.shape)).astype(np.float32)
  tensors = {name: other(value) for name, value in drafters.own_tensors(module).items()}
  if module.kind != "eagle3":
    return drafters.build(module.kind, target, tensors, module.config, module.options())
  ids, head = np.asarray(module.draft_ids[...]), other(module.head[...])
  return drafters.build(module.kind, target, tensors, module.config, module.options(),
                        draft_ids=ids + rng.integers(0, 3, ids.shape).astype(np.int32),
                        own={"head": head})


def close(ours, theirs):
  np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


def test_what_torch_pickles_is_read(reference, tmp_path):
  """The peers' eagle3 as pytorch_model.bin, one tensor of it in half precision."""
  stored = reference["folder"] / "eagle3" / "model.safetensors"
  program = ("import sys, torch, safetensors.torch as s; t = s.load_file(sys.argv[1]); "
             "t['norm.weight'] = t['norm.weight'].bfloat16(); torch.save(t, sys.argv[2])")
  subprocess.run([str(reference["python"]), "-c", program, stored, tmp_path / pickled.FILE],
                 check=True)
  found = pickled.read(tmp_path / pickled.FILE)
  wanted = safetensors.numpy.load_file(stored)
  assert set(found) == set(wanted)
  for name, value in wanted.items():
    same = value.astype(found[name].dtype)
    np.testing.assert_array_equal(found[name], same, err_msg=name)
    assert found[name].dtype == value.dtype or name == "norm.weight"


def test_layers_that_are_read(reference):
  # speculators counts the embedding as layer 0.
  assert eagle3_taps(8) == tuple(reference["eagle3_layers"] - 1)
  for layers, count, theirs in json.loads(str(reference["dflash_layers"])):
    assert dflash_taps(layers, count) == tuple(theirs)


# Decoding.


def context(texts):
  """Rows of committed tokens, the last of which is not yet read by the target."""
  tokens = np.zeros((len(texts), CAPACITY), np.int32)
  for row, text in zip(tokens, texts, strict=True):
    row[:len(text)] = text
  length = jnp.asarray([len(text) for text in texts], jnp.int32)
  keys = sampling.round_keys(sampling.row_keys(0, jnp.arange(len(texts))), length)
  return Context(jnp.asarray(tokens), length, keys, jnp.full(len(texts), WARMTH))


def observed(case, kind, text, lengths):
  """What rows that are beginnings of one text observe, and their context.

  Behind them stand features of other positions, which must not be read.
  """
  ids, features = case.arrays[text], case.features(kind, text)
  known = np.arange(len(ids)) < np.asarray(lengths)[:, None] - 1
  where = context([ids[:n] for n in lengths])
  places = jnp.broadcast_to(jnp.arange(len(ids)), known.shape)
  features = jnp.asarray(np.where(known[..., None], features, features[::-1]))
  return (where.tokens[:, :len(ids)], features, places, jnp.asarray(known)), where


def observe(module, to, seen):
  return module.observe(module.init_state(len(seen[0]), CAPACITY), *seen, to)


def block_states(module, to, draft_len, seen, more, where):
  """States and logits of blocks behind a prompt and perhaps a verified block."""
  state = observe(module, to, seen)
  if more:
    state = module.after_round(state, *more, to)
  states = module.draft_states(state, where, draft_len, to)
  return states, module.logits(states, to)


@pytest.mark.parametrize("name", ["dflash", "dflash_narrow"])
def test_dflash_decoding(case, name):
  theirs = case.arrays[f"{name}_states"]
  seen, where = observed(case, "dflash", "text", case.arrays["anchors"] + 1)
  states, logits = case.run("dflash", block_states, theirs.shape[1] - 1, seen, (), where)
  close(states, theirs[:, 1:])
  close(logits, case.arrays[f"{name}_logits"][:, 1:])


def test_dflash_decoding_on_from_a_verified_block(case):
  first, second = case.arrays["round"]
  size = case.modules["dflash"].block_size
  seen, _ = observed(case, "dflash", "text", [first + 1])
  where = context([case.arrays["text"][:second + 1]])
  block = slice(first, first + size)
  accepted = np.arange(first, first + size)[:, None] < second
  features = np.where(accepted, case.features("dflash", "text")[block], 9.0).astype(np.float32)
  more = (where.tokens[:, block], jnp.asarray(features)[None], jnp.arange(CAPACITY)[None, block],
          jnp.ones((1, size), bool))
  states, _ = case.run("dflash", block_states, size - 1, seen, more, where)
  close(states, case.arrays["dflash_round_states"][:, 1:])


def drafts(module, to, draft_len, seen, where):
  """Greedy and sampled drafts."""
  state = observe(module, to, seen)
  return [module.propose(state, where, draft_len, Sampling(cold), to)[0] for cold in (True, False)]


def check_drafts(case, kind, text, anchors, theirs, logits):
  """Greedy drafts behind the anchors, and the distributions that they came from.

  Args:
    theirs: [A, K] greedy drafts.
    logits: [A, K, Vd] behind the anchor and the drafts before.
  """
  seen, where = observed(case, kind, text, np.repeat(anchors, TRIES) + 1)
  cold, warm = case.run(kind, drafts, theirs.shape[1], seen, where)
  # No greedy draft is a matter of rounding.
  best = np.sort(logits, -1)
  assert (best[..., -1] - best[..., -2]).min() > 10 * TOLERANCE
  np.testing.assert_array_equal(cold.tokens, np.repeat(theirs, TRIES, 0))
  # A sampled draft has the law of a greedy one where all drafts before it are the same.
  same = np.asarray(warm.tokens) == np.repeat(theirs, TRIES, 0)
  same = np.cumprod(np.pad(same[:, :-1], ((0, 0), (1, 0)), constant_values=True), -1) > 0
  assert same.any(0).all()
  probs = np.asarray(warm.probs)
  if case.modules[kind].kind == "eagle3":
    probs = probs[..., np.asarray(case.modules[kind].draft_ids[...])]
  close(probs[same], np.repeat(jax.nn.softmax(logits / WARMTH, -1), TRIES, 0)[same])


def test_dspark_drafts(case):
  anchors = case.arrays["row_anchors"]
  some = np.flatnonzero(anchors < len(case.arrays["document_0"]))[::4]
  check_drafts(case, "dspark", "document_0", anchors[some], case.arrays["dspark_row_drafts"][some],
               case.arrays["dspark_row_draft_logits"][some])


def has(case, name):
  """Skips what the form of a case has no place for."""
  if name not in case.modules:
    pytest.skip(f"only speculators has a form for {name}")
  module = case.modules[name]
  assert module.own_head
  assert module.config.qk_norm == module.norm_before_residual == (name == "eagle3_qwen3")


@pytest.mark.parametrize("name", EAGLES)
def test_eagle3_drafts(case, name):
  has(case, name)
  check_drafts(case, name, "text", case.arrays["chains"], case.arrays[f"{name}_drafts"],
               case.arrays[f"{name}_draft_logits"])


# Training, on one row of two documents and padding.


def batch_of(case, kind, prompts):
  """The row as train_drafter packs it; tokens behind the prompt of each document are supervised."""
  texts = [case.arrays[f"document_{d}"] for d in range(len(prompts))]
  rest = int(case.arrays["padding"])
  join = lambda parts, fill: jnp.asarray(np.concatenate(
      [*parts, np.full((rest, *parts[0].shape[1:]), fill, parts[0].dtype)])[None])
  teacher, count = [], 0
  for text, prompt in zip(texts, prompts, strict=True):
    taught = len(text) - prompt
    row = np.full(len(text), -1, np.int32)
    row[prompt - 1:-1] = count + np.arange(taught)
    teacher, count = [*teacher, row], count + taught
  teacher = join(teacher, -1)
  return {
      "tokens": join([text.astype(np.int32) for text in texts], 0),
      "positions": join([np.arange(len(text), dtype=np.int32) for text in texts], 0),
      "segments": join([np.full(len(text), d, np.int32) for d, text in enumerate(texts)], -1),
      "features": join([case.features(kind, f"document_{d}") for d in range(len(texts))], 0),
      "teacher": teacher, "place": jnp.asarray(np.flatnonzero(teacher[0] >= 0), jnp.int32),
      "weight": jnp.ones(count)}


def target_logits(case):
  """Logits [columns, V] of the documents, without the padding."""
  return np.concatenate([case.arrays[f"document_{d}_logits"] for d in (0, 1)])


def train(module, to, seed, batch):
  """States, logits, of dspark those of the confidence, of a block drafter the anchors."""
  key = jax.random.key(seed)
  states = module.train_states(batch, to, key)
  flat = states.hidden.reshape(-1, states.hidden.shape[-1])
  logits = module.train_logits(flat, to, module.head_parameters())
  anchors = confidence = None
  if module.kind != "eagle3":
    anchors = module.draw_anchors(batch, key)
  if module.kind == "dspark":
    confidence = module.confidence_logit(flat, module.confidence[...])
  return states, logits, confidence, anchors


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_training_blocks(case, kind):
  module = case.modules[kind]
  batch = batch_of(case, kind, case.arrays["prompts"])
  states, logits, confidence, (columns, live) = case.run(kind, train, 0, batch)
  columns, live, K = np.asarray(columns)[0], np.asarray(live)[0], module.depths
  shaped = lambda x: np.asarray(x).reshape(len(columns), K, -1)
  hidden, logits = shaped(states.hidden)[..., :module.config.hidden_size], shaped(logits)
  weight, source = (shaped(x)[..., 0] for x in (states.weight, states.source))
  theirs = {name.removeprefix(f"{kind}_row_"): value[:, -K:]
            for name, value in case.arrays.items() if name.startswith(f"{kind}_row_")}
  compared = labels = 0
  for block, column in enumerate(case.arrays["row_anchors"]):
    for own in np.flatnonzero((columns == column) & live):
      close(hidden[own], theirs["states"][block])
      close(logits[own], theirs["logits"][block])
      if kind == "dspark":
        close(shaped(confidence)[own, :, 0], theirs["confidence"][block])
      compared += 1
      for j in np.flatnonzero(weight[own]):
        place = int(batch["place"][source[own, j]])
        close(target_logits(case)[place], theirs["targets"][block, j])
        assert theirs["mask"][block, j] == 1
        labels += 1
  # One of their anchors is the last token of the first document, which nothing follows.
  assert compared == len(case.arrays["row_anchors"]) - 1 and labels > 50


@pytest.mark.parametrize("name", EAGLES)
def test_training_time_test_of_eagle3(case, name):
  has(case, name)
  module = case.modules[name]
  batch = batch_of(case, name, [1, 1])
  states, logits, _, _ = case.run(name, train, 0, batch)
  logits = np.asarray(logits).reshape(*states.hidden.shape[:2], -1)
  hidden, weight = np.asarray(states.hidden), np.asarray(states.weight)
  theirs, ids = case.arrays[f"{name}_states"], np.asarray(module.draft_ids[...])
  start, compared = len(case.arrays["document_0"]), 0  # of the second document
  for n, column in enumerate(np.asarray(batch["place"])[np.asarray(states.source)]):
    second = int(column >= start)
    for j in range(len(theirs)):
      at = column - 1 - j  # the input whose step j predicts what stands behind the column
      if at < second * start:
        assert weight[n, j] == 0
        continue
      assert weight[n, j] > 0
      at -= second  # in their row the first document is one input shorter
      close(hidden[n, j], theirs[j, at])
      close(logits[n, j], case.arrays[f"{name}_logits"][j, at])
      close(target_logits(case)[column][ids], case.arrays[f"{name}_targets"][at + j])
      compared += 1
  assert compared > 80
