"""train.init_from: a warm start from our own and from published folders, and what is refused."""

import copy
import dataclasses
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import spec_jax
from spec_jax import drafters
from spec_jax.errors import UserError
from spec_jax.weights import published
from spec_jax.weights.forms import Form
from spec_jax.weights.safetensors import write_folder
from tests import tiny
from tests.train_drafter import training
from tests.weights import test_published as folders
from tests.weights import toy
from train_drafter import manifest, start, train
from train_drafter.manifest import Manifest, StaleStageError

LONG = dict(seq_len=24, batch_rows=2)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """Drafters of every kind as folders; eagle3 and dspark in the form of speculators, eagle3 with a
  head of its own."""
  root, target = tmp_path_factory.mktemp("start"), folders.target()
  drafters.save_drafter(root / "small_lm", drafters.init_from_target(target, (3,)), target)
  rows = np.asarray(target.module.head_weight())[folders.REDUCED]
  own = rows + np.random.default_rng(5).normal(size=rows.shape).astype(np.float32) * 0.1
  module = folders.build("eagle3")
  module = drafters.build("eagle3", target, module.own_tensors(), module.config,
                          folders.OPTIONS["eagle3"], draft_ids=folders.REDUCED, own={"head": own})
  form = Form("speculators", "org/name", 3)
  published.write_published(root / "eagle3", module, target, form=form)
  published.write_published(root / "dflash", folders.build("dflash"), target)
  published.write_published(root / "dspark", folders.build("dspark", True), target, form=form)
  return root


def config_for(written, kind, /, **changes):
  """A config that describes the folder of a kind."""
  cfg = training.make_config(**LONG)
  cfg.train.init_from = str(written / kind)
  d = cfg.drafter
  d.kind, d.steps, d.anchors = kind, 2, 5
  d.init_layers = (3,) if kind == "small_lm" else (1, 2)
  d.draft_vocab = len(folders.REDUCED) if kind in ("eagle3", "dspark") else 0
  d.num_taps, d.block_size = 3, 4 if kind == "dspark" else 5
  d.markov_rank = folders.RANK
  for name, value in changes.items():
    setattr(d, name, value)
  return cfg


@pytest.fixture(autouse=True)
def taps_of_the_folders(monkeypatch):
  """The folders of test_published read layers of their own choice."""
  monkeypatch.setattr(start, "taps_of", lambda cfg, layers: tuple(
      folders.OPTIONS.get(cfg.drafter.kind, {"taps": ()})["taps"]))


def batch_of(cfg, target, module):
  batch = training.pack(training.documents(6, longest=20, target=target), cfg).batch(0)
  return train.with_features(batch, module.taps, target)


@pytest.mark.parametrize("kind", ["small_lm", "eagle3", "dflash", "dspark"])
def test_the_first_loss_is_the_folders_own(written, kind):
  """And training goes on from there, a head of its own included."""
  target, cfg = folders.target(), config_for(written, kind)
  known = start.begin_with(cfg, target)
  assert known.hash == drafters.source_hash(str(written / kind)) and len(known.hash) == 64
  assert known.recorded() == {"init_from": {"sha256": known.hash}}
  reduced = kind in ("eagle3", "dspark")
  assert (known.draft_ids is not None) == reduced
  if reduced:
    np.testing.assert_array_equal(known.draft_ids, folders.REDUCED)
  loaded = spec_jax.load_drafter(str(written / kind), target).module
  for name, value in (("steps", 2), ("anchors", 5)):
    if hasattr(loaded, name):
      setattr(loaded, name, value)
  batch = batch_of(cfg, target, loaded)
  setup, state = train.make_setup(cfg, target, loaded, 20)
  theirs = train.validate(setup, state.params, target.params, [batch])
  module = train.initial_drafter(cfg, target, known.draft_ids)
  setup, state = train.make_setup(cfg, target, module, 20)
  before = training.copied(state.params)
  state, sums = train.train_step(setup, state, setup.frozen, target.params, batch)
  assert float(sums["loss"] / sums["weight"]) == pytest.approx(theirs["loss"], rel=1e-5)
  for _ in range(2):
    state, _ = train.train_step(setup, state, setup.frozen, target.params, batch)
  changed = [not np.array_equal(a, b) for a, b in zip(training.bits(state.params), before,
                                                      strict=True)]
  assert np.mean(changed) > 0.9
  assert module.own_head == (kind == "eagle3")
  if kind == "eagle3":
    assert any(x.shape == (len(folders.REDUCED), 32) for x in jax.tree.leaves(state.params))


def test_a_drafter_of_its_own_head_learns_from_the_targets(written):
  """The teacher's logits are the target's, whatever the drafter scores with."""
  target = folders.target()
  module = spec_jax.load_drafter(str(written / "eagle3"), target).module
  rows = np.asarray(target.module.head_weight())[folders.REDUCED]
  np.testing.assert_array_equal(module.teacher_rows(target.module), rows)
  assert np.abs(np.asarray(module.head_weight(target.module)) - rows).max() > 0.1
  trained = module.head_parameters()
  assert set(trained) == {"head"}
  hidden = jax.random.normal(jax.random.key(0), (3, 32))
  np.testing.assert_allclose(
      module.train_logits(hidden, target.module, {"head": 2 * trained["head"]}),
      2 * module.train_logits(hidden, target.module, trained), rtol=1e-5)


def test_a_trained_head_is_saved_with_the_drafter(written, tmp_path):
  target = folders.target()
  module = spec_jax.load_drafter(str(written / "eagle3"), target).module
  module.head.set_value(module.head[...] * 1.5)
  drafters.save_drafter(tmp_path / "d", module, target)
  again = spec_jax.load_drafter(str(tmp_path / "d"), target).module
  assert again.own_head
  np.testing.assert_array_equal(again.head[...], module.head[...])
  hidden = jax.random.normal(jax.random.key(0), (3, 32))
  np.testing.assert_array_equal(again.logits(hidden, target.module),
                                module.logits(hidden, target.module))
  # A copy of the target's rows is not written.
  lent = drafters.init_from_target(tiny.target(), (0,), np.arange(9, dtype=np.int32))
  assert not lent.own_head and hasattr(lent, "head")
  drafters.save_drafter(tmp_path / "lent", lent, tiny.target())
  assert "head" not in safetensors.numpy.load_file(tmp_path / "lent" / "drafter.safetensors")


@pytest.mark.parametrize("kind, changes, match", [
    ("eagle3", dict(kind="dflash"), "a drafter of kind 'eagle3', .*drafter.kind='dflash'"),
    ("dflash", dict(init_layers=(1,)), r"has layers 2, this run 1 \(drafter.init_layers=\(1,\)"),
    ("small_lm", dict(init_layers=(1, 2)), "has layers 1, this run 2"),
    ("eagle3", dict(draft_vocab=9), "has draft vocabulary 13, this run 9 .*draft_vocab=9"),
    ("eagle3", dict(draft_vocab=0), "has draft vocabulary 13, this run 64"),
    ("dflash", dict(draft_vocab=13), "has draft vocabulary 64, this run 13"),
    ("dflash", dict(block_size=7), "has block_size 5, this run 7"),
    ("dflash", dict(mask_id=3), "has mask_id 63, this run 3"),
    ("dspark", dict(markov_rank=9), "has markov_rank 6, this run 9")])
def test_a_folder_that_does_not_match_is_refused(written, kind, changes, match):
  with pytest.raises(UserError, match=f"train.init_from=.*{kind}: .*{match}"):
    start.begin_with(config_for(written, kind, **changes), folders.target())


def test_a_head_that_is_trained_is_scored_whole(written):
  cfg = config_for(written, "eagle3")
  cfg.train.sampled_vocab = 4
  with pytest.raises(UserError, match="sampled_vocab=4 needs a drafter that borrows .*init_from="):
    start.begin_with(cfg, folders.target())


def test_other_taps_and_another_target_are_refused(written, monkeypatch):
  monkeypatch.setattr(start, "taps_of", lambda cfg, layers: (1, 2, 4))
  with pytest.raises(UserError, match=r"has taps \(1, 2, 5\), this run \(1, 2, 4\)"):
    start.begin_with(config_for(written, "dflash"), folders.target())
  wide = tiny.config(num_layers=8, hidden_size=48)
  wide = tiny.make(wide, tiny.tensors(wide), tiny.tokenizer())
  with pytest.raises(UserError, match="init_from: .*hidden_size=32 is not the target's 48"):
    start.begin_with(config_for(written, "dflash"), wide)
  with pytest.raises(UserError, match="train.init_from: .*no such folder"):
    start.begin_with(config_for(written, "nothing"), folders.target())
  cfg = config_for(written, "dflash")
  cfg.train.init_from = "ngram"
  with pytest.raises(UserError, match="is a drafter of kind 'ngram'"):
    start.begin_with(cfg, folders.target())


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_small_model_of_another_size_goes_on_learning(tmp_path, kind):
  """Its layers learn; the embedding and the head that it has of its own stay as they were."""
  small = tiny.config(hidden_size=24, num_layers=1, bos_id=0, eos_ids=(2,), pad_id=0)
  values, target = tiny.tensors(small, 4), folders.target()
  cfg = training.make_config(**LONG)
  if kind == "gguf":
    path = toy.write_gguf(
        tmp_path / "m.gguf", small, values, tokens=tiny.tokenizer().token_strings())
  else:
    path = tmp_path / "m"
    write_folder(path, small, values, tiny.tokenizer())
  cfg.train.init_from = str(path)
  known = start.begin_with(cfg, target)
  assert known.hash == drafters.source_hash(str(path)) and known.draft_ids is None
  module = train.initial_drafter(cfg, target, None)
  batch = batch_of(cfg, target, module)
  setup, state = train.make_setup(cfg, target, module, 20)
  losses = []
  for _ in range(6):
    state, sums = train.train_step(setup, state, setup.frozen, target.params, batch)
    losses.append(float(sums["loss"] / sums["weight"]))
  assert losses[-1] < losses[0]
  drafters.save_drafter(tmp_path / "d", nnx.merge(setup.graph, state.params, setup.frozen), target)
  again = spec_jax.load_drafter(str(tmp_path / "d"), target).module
  for name in ("embed", "head"):
    np.testing.assert_array_equal(getattr(again, name)[...], values[name])
  assert np.abs(again.own_tensors()["layers.0.wo"] - values["layers.0.wo"]).max() > 1e-3


def test_a_sampled_vocabulary_that_does_not_fit_is_refused_before_any_work(written):
  target = folders.target()
  cfg = config_for(written, "eagle3")
  cfg.train.sampled_vocab = 5
  with pytest.raises(UserError, match="sampled_vocab=5 needs a drafter that borrows .*/eagle3"):
    start.begin_with(cfg, target)
  cfg = config_for(written, "dflash")  # all ids
  cfg.train.sampled_vocab = 63
  assert start.begin_with(cfg, target).hash
  cfg.train.sampled_vocab, cfg.train.init_from = 64, ""
  with pytest.raises(UserError, match="train.sampled_vocab=64 must be below the 64 ids of the tar"):
    start.begin_with(cfg, target)


@pytest.mark.parametrize("source, match", [
    ("self", "train.init_from=self: model 'self' does not exist"),
    ("demo.txt", "train.init_from: drafter='demo.txt': no such folder"),
    ("{}/empty", "train.init_from: .*/empty is not a model folder: it has no config.json"),
    ("{}/config", "train.init_from: .*/config/tokenizer.json does not exist"),
    ("{}/model.safetensors", "train.init_from: .* is neither a folder nor a .gguf file")])
def test_a_source_of_another_kind_is_one_line(tmp_path, source, match):
  (tmp_path / "empty").mkdir()
  (tmp_path / "config").mkdir()
  (tmp_path / "config" / "config.json").write_text("{}")
  (tmp_path / "model.safetensors").write_bytes(b"")
  cfg = training.make_config(**LONG)
  cfg.drafter.init_layers, cfg.drafter.draft_vocab = tuple(range(8)), 0
  cfg.train.init_from = source.format(tmp_path)
  with pytest.raises(UserError, match=match) as caught:
    start.begin_with(cfg, folders.target())
  assert "\n" not in str(caught.value)


def test_a_run_that_goes_on_from_another(finished, tmp_path):
  """The manifest records the hash of the folder, whose draft vocabulary is taken over."""
  cfg, workdir = copy.deepcopy(finished[0]), finished[1]
  for stage in ("prompts", "generate"):
    shutil.copytree(workdir / stage, tmp_path / stage)
  shutil.copytree(workdir / "train" / "drafter", tmp_path / "old")
  cfg.train.init_from, cfg.train.steps = str(tmp_path / "old"), 2
  cfg.train.eval_every, cfg.train.lr, cfg.train.seed = 1, 1e-6, 3
  train.run(cfg, tmp_path)
  found = Manifest.load(tmp_path / "train")
  assert found.config["init_from"] == {"sha256": drafters.source_hash(str(tmp_path / "old"))}
  np.testing.assert_array_equal(np.load(tmp_path / "train" / "draft_ids.npy"),
                                np.load(workdir / "train" / "draft_ids.npy"))
  first = Manifest.load(workdir / "train").counts["validation"]
  target = spec_jax.load_target(cfg.target.source)
  ours, theirs = (spec_jax.load_drafter(str(f), target).module for f in (
      tmp_path / "train" / "drafter", workdir / "train" / "drafter"))
  for name, value in theirs.own_tensors().items():  # two steps of a millionth
    np.testing.assert_allclose(ours.own_tensors()[name], value, atol=1e-4)
  assert found.counts["validation"]["alpha"] == pytest.approx(first["alpha"], abs=0.2)
  assert manifest.require(tmp_path / "train", "train", cfg).complete
  # Another drafter in that folder is another run.
  text = (tmp_path / "old" / "drafter.json").read_text()
  (tmp_path / "old" / "drafter.json").write_text(text + "\n")
  with pytest.raises(StaleStageError, match="init_from.sha256"):
    train.run(cfg, tmp_path)
  plain = dataclasses.replace(cfg.train, init_from="")
  assert start.begin_with(dataclasses.replace(cfg, train=plain), target).recorded() == {}
