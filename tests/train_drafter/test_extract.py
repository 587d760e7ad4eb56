"""The extract stage and verify_store: states, packing, taps, resuming, and what a check finds."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import spec_jax
from spec_jax.errors import UserError
from spec_jax.weights import open_checkpoint
from tests import tiny
from tests.train_drafter import tiny_run
from train_drafter import config as config_lib
from train_drafter import extract, generate, manifest, prompts, store, verify_store
from train_drafter.config import Config
from train_drafter.extract import Source
from train_drafter.generate import Answer

TAPS = (0, 2)
EOS, CONTEXT, CAP = 2, 256, 16


class Killed(BaseException):
  """Stands for a signal that cannot be caught."""


def make_config(root) -> Config:
  """A folder with the tiny target of three layers, and small passes and parts."""
  cfg = tiny_run.make_config(root)
  fields = dict(seq_len=64, batch_rows=2, shard_tokens=200, topk=8, verify_documents=1000)
  for name, value in fields.items():
    setattr(cfg.features, name, value)
  return cfg


def make_answers(seed=0) -> list[Answer]:
  """Short ones, one at the cap, one that ends in EOS, one without a prompt, and around the context.

  The jobs are out of order, as the parts of a stopped generate stage leave them.
  """
  rng = np.random.default_rng(seed)
  sizes = [(int(p), int(p + n)) for p, n in zip(
      rng.integers(1, 30, 20), rng.integers(1, CAP, 20), strict=True)]
  sizes += [(10, 10 + CAP), (0, 5), (250, CONTEXT + 10), (CONTEXT, CONTEXT + 1), (63, 64), (60, 70)]
  answers = []
  for job, (prompt_len, n) in enumerate(sizes):
    tokens = rng.integers(3, 200, n).astype(np.int32)
    if job % 4 == 0:
      tokens[-1] = EOS
    hidden = np.zeros((n - prompt_len, 32), ml_dtypes.bfloat16)
    answers.append(Answer(job, job // 2, tokens, prompt_len, hidden, 0.0))
  return [answers[i] for i in rng.permutation(len(answers))]


def write_generate(cfg, workdir, answers):
  folder = workdir / "generate"
  target = spec_jax.load_target(cfg.target.source, dtype=cfg.target.dtype)
  opened = manifest.begin(
      folder, stage="generate", config=config_lib.part(cfg, "target", "generate"),
      target=generate.target_id(target))
  generate._write_part(folder / "part-00000.npz", answers)
  manifest.finish(folder, opened, {"answers": len(answers)})
  return folder


@pytest.fixture(autouse=True)
def taps(monkeypatch):
  monkeypatch.setattr(extract, "taps_of", lambda cfg, num_layers: TAPS)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """(config, workdir, answers by job, target) of a finished extract stage. Copy it to change it."""
  root = tmp_path_factory.mktemp("extract")
  cfg, answers = make_config(root), make_answers()
  write_generate(cfg, root / "run", answers)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(extract, "taps_of", lambda cfg, num_layers: TAPS)
    extract.run(cfg, root / "run")
  return cfg, root / "run", {a.job: a for a in answers}, spec_jax.load_target(cfg.target.source)


@pytest.fixture
def fresh(made, tmp_path):
  """(config, workdir) with the generate stage alone; the config is a copy."""
  cfg, workdir, _, _ = made
  shutil.copytree(workdir / "generate", tmp_path / "generate")
  return copied(cfg), tmp_path


@pytest.fixture
def copy(made, tmp_path):
  """(config, workdir) of a copy of the finished stage."""
  cfg, workdir, _, _ = made
  for name in ("generate", "extract"):
    shutil.copytree(workdir / name, tmp_path / name)
  return copied(cfg), tmp_path


def copied(cfg):
  return dataclasses.replace(cfg, features=dataclasses.replace(cfg.features),
                             drafter=dataclasses.replace(cfg.drafter))


def alone(target, tokens, taps=TAPS):
  """Logits and float32 states of a document that is run by itself."""
  n = len(tokens)
  length = 32 if n <= 32 else CONTEXT  # two shapes to compile
  padded = np.zeros((1, length), np.int32)
  padded[0, :n] = tokens
  logits, out = whole_pass(target.params, padded, target.graph, taps)
  return tuple(np.asarray(x[0, :n]) for x in (logits, out.features, out.hidden))


@functools.partial(jax.jit, static_argnums=(2, 3))
def whole_pass(params, tokens, graph, taps):
  return nnx.merge(graph, params)(tokens, jnp.arange(tokens.shape[1])[None], taps=taps)


def near(stored, live):
  """Equal up to one unit of bfloat16: two programs may round to either neighbour."""
  np.testing.assert_allclose(
      np.asarray(stored, np.float32), live, rtol=2.0**-7, atol=1e-4 * np.abs(live).max())


def arrays_of(folder):
  """The arrays of a part by name."""
  names = [path.name for path in folder.iterdir()]
  part = store.Part(folder, names)
  return {name: part.read(name) for name in names}


def rewrite(workdir, number, change):
  """Changes arrays of a part and writes it anew: whole, with checksums, but wrong."""
  folder = store.part_folder(workdir / "extract", number)
  arrays = arrays_of(folder)
  change(arrays)
  shutil.rmtree(folder)
  store.write_part(folder, arrays)


# What is stored.


def test_every_answer_is_stored_with_the_states_of_a_pass_by_itself(made):
  cfg, workdir, answers, target = made
  opened = extract.open_features(cfg, workdir, 3)
  assert (opened.mode, opened.taps, opened.hidden_size) == ("store", TAPS, 32)
  lost = [job for job, a in answers.items() if a.prompt_len == CONTEXT]
  assert [d.job for d in opened.documents] == sorted(set(answers) - set(lost)) and len(lost) == 1
  for d in opened.documents:
    a = answers[d.job]
    assert (d.prompt, d.first_answer) == (a.prompt, a.prompt_len)
    np.testing.assert_array_equal(d.tokens, a.tokens[:CONTEXT])
    _, features, hidden = alone(target, d.tokens)
    assert d.features().dtype == d.last_hidden().dtype == ml_dtypes.bfloat16
    near(d.features(), features)
    near(d.last_hidden(), hidden)


def test_the_loss_mask_is_the_answer(made):
  """CASE 29 and 31: at the cap, from token 0, cut by the context; an EOS is learnt."""
  cfg, workdir, answers, _ = made
  documents = {d.job: d for d in extract.open_features(cfg, workdir, 3).documents}
  capped, bare, long = documents[20], documents[21], documents[22]
  assert capped.loss_mask.tolist() == [0] * 10 + [1] * CAP
  assert bare.loss_mask.tolist() == [1] * 5
  assert long.loss_mask.tolist() == [0] * 250 + [1] * 6
  for job in (0, 4, 20):
    assert documents[job].tokens[-1] == EOS and documents[job].loss_mask[-1] == 1
  counts = manifest.Manifest.load(workdir / "extract").counts
  assert counts["supervised"] == sum(int(d.loss_mask.sum()) for d in documents.values())
  assert counts["tokens"] == sum(len(d.tokens) for d in documents.values())
  assert (counts["cut_at_context"], counts["dropped_without_answer"]) == (1, 1)
  assert counts["last_hidden"] == "after_final_norm" and counts["taps"] == list(TAPS)


def test_a_document_longer_than_the_training_cap_is_stored_whole(made):
  """CASE 32: the reader cuts ids, mask and states together."""
  cfg, workdir, answers, target = made
  (d,) = [d for d in extract.open_features(cfg, workdir, 3).documents if d.job == 22]
  assert len(d.tokens) == CONTEXT > cfg.features.seq_len
  short = d.cut(40)
  _, features, _ = alone(target, answers[22].tokens[:40])
  assert len(short.tokens) == len(short.last_hidden()) == 40
  near(short.features(), features)


def test_the_states_are_those_that_generate_saw(tmp_path):
  """The state behind token i of the answer lies at i - 1: one shift, on both sides the same."""
  cfg = make_config(tmp_path)
  prompts.run(cfg, tmp_path / "run")
  generate.run(cfg, tmp_path / "run")
  extract.run(cfg, tmp_path / "run")
  answers = generate.load_answers(tmp_path / "run" / "generate")
  documents = extract.open_features(cfg, tmp_path / "run", 3).documents
  for d, a in zip(documents, answers, strict=True):
    assert d.job == a.job
    near(d.last_hidden(a.prompt_len - 1, len(a.tokens) - 1), a.hidden.astype(np.float32))
  verify_store.run(cfg, tmp_path / "run")


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_logits_are_rebuilt_from_the_store(tmp_path, weight):
  """CASE 19: the head alone makes them, whatever the final norm's weight."""
  cfg = tiny.config()
  values = tiny.tensors(cfg) | {"final_norm": np.full(32, weight, np.float32)}
  target = tiny.make(cfg, values, tiny.tokenizer())
  sources = [source(i, ids) for i, ids in enumerate(tiny.prompts(5))]
  read = {}
  for dtype in ("float32", "bfloat16"):
    path = tmp_path / dtype / "part-00000"
    store.write_part(path, arrays(target, sources, (0,), dtype=dtype))
    read[dtype] = store.read_part(path, extract.array_names("store", (0,)))
  for s, exact, rounded in zip(sources, read["float32"], read["bfloat16"], strict=True):
    live, _, _ = alone(target, s.tokens, (0,))
    states = exact.last_hidden()
    assert states.dtype == np.float32
    rebuilt = target.module.logits(jnp.asarray(states))
    np.testing.assert_allclose(rebuilt, live, atol=1e-5 * np.abs(live).max())
    np.testing.assert_array_equal(rounded.last_hidden(), states.astype(ml_dtypes.bfloat16))


def source(job, tokens, prompt_len=1):
  return Source(job, job, np.asarray(tokens, np.int32), prompt_len)


def arrays(target, sources, taps, **options):
  return extract.part_arrays(target, sources, taps, **{"rows": 2, "seq_len": 64, **options})


def marked_target(layers=7):
  """Block i adds i + 1 to channel 1 and does nothing else.

  Channel 0 is so large that a normalised state is sqrt(D) there and next to nothing elsewhere.
  """
  cfg = tiny.config(num_layers=layers)
  values = {name: np.zeros_like(x) for name, x in tiny.tensors(cfg).items()}
  values["embed"][:, 0] = 1e4
  values["final_norm"][:] = 1
  size = np.float32(np.sqrt(32))
  gated = size / (1 + np.exp(-size)) * size
  for i in range(layers):
    values[f"layers.{i}.mlp_norm"][:] = 1
    values[f"layers.{i}.w_gate"][0, 0] = values[f"layers.{i}.w_up"][0, 0] = 1
    values[f"layers.{i}.w_down"][1, 0] = (i + 1) / gated
  return tiny.make(cfg, values, tiny.tokenizer())


def test_taps_are_the_outputs_of_the_layers_they_name():
  """CASE 20: after block i the channel holds 1 + ... + (i + 1)."""
  target = marked_target()
  made = arrays(target, [source(0, [5, 6, 7]), source(1, [8] * 9)], (0, 3, 6))
  marks = made["features"].astype(np.float32).reshape(12, 3, 32)[:, :, 1]
  np.testing.assert_array_equal(marks, np.tile([1, 10, 28], (12, 1)))


def test_packing_leaks_nothing():
  """CASE 27, bit for bit, in both directions of a row."""
  target = tiny.target()
  docs = [source(i, ids) for i, ids in enumerate(tiny.prompts(3, longest=20))]
  assert {p.row for p in extract.plan_passes([len(d.tokens) for d in docs], 2, 64)[0].places} == {0}
  offsets = np.cumsum([0, *(len(d.tokens) for d in docs)])
  before = arrays(target, docs, TAPS[:1], dtype="float32")
  for changed in range(3):
    others = [*docs]
    others[changed] = source(changed, (docs[changed].tokens + 1) % 60 + 3)
    after = arrays(target, others, TAPS[:1], dtype="float32")
    for i in range(3):
      rows = slice(offsets[i], offsets[i + 1])
      for name in ("features", "last_hidden"):
        same = np.array_equal(before[name][rows], after[name][rows])
        assert same == (i != changed)


def test_a_document_does_not_depend_on_where_it_is_packed():
  target = tiny.target()
  docs = [source(i, ids) for i, ids in enumerate(tiny.prompts(8, longest=30))]
  together = arrays(target, docs, (0, 1), dtype="float32")
  turned = arrays(target, docs[::-1], (0, 1), dtype="float32")
  count = len(docs)
  for i in range(count):
    own = slice(*together["doc_offsets"][i:i + 2])
    other = slice(*turned["doc_offsets"][count - 1 - i:count - i + 1])
    for name in ("features", "last_hidden"):
      size = np.abs(together[name]).max()
      np.testing.assert_allclose(together[name][own], turned[name][other], atol=1e-5 * size)


# The other modes.


def test_top_k_mode_keeps_the_head_of_the_distribution(fresh, made, capsys):
  _, _, answers, target = made
  cfg, workdir = fresh
  cfg.features.mode = "topk"
  extract.run(cfg, workdir)
  out = capsys.readouterr().out
  opened = extract.open_features(cfg, workdir, 3)
  assert (opened.mode, opened.topk) == ("topk", 8)
  tails = []
  for d in opened.documents:
    logits, features, _ = alone(target, d.tokens)
    logsumexp = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    logprobs = logits - logsumexp[:, None]
    ids = np.argsort(-logits, -1, kind="stable")[:, :8]
    best = np.take_along_axis(logprobs, ids, -1)
    top = d.topk()
    assert top.ids.dtype == np.int32 and top.logprobs.dtype == top.logsumexp.dtype == np.float32
    np.testing.assert_allclose(top.logprobs, best, atol=1e-4)
    np.testing.assert_allclose(top.logsumexp, logsumexp, atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(logprobs, top.ids, -1), best, atol=1e-4)
    assert np.mean(top.ids == ids) > 0.99
    near(d.features(), features)
    tails.append(1 - np.exp(best)[max(d.first_answer - 1, 0):-1].sum(-1))
    with pytest.raises(UserError, match="keeps no last_hidden"):
      d.last_hidden()
  tail = np.concatenate(tails).mean()
  assert f"hold {1 - tail:.2%} of the probability" in out and f"at most {tail:.4f} apart" in out
  verify_store.run(cfg, workdir)
  assert "topk_logprobs" in capsys.readouterr().out


def test_the_chunks_of_the_logits_do_not_show(monkeypatch):
  hidden = jnp.asarray(np.random.default_rng(0).normal(size=(37, 32)), jnp.float32)
  module = tiny.target().module
  whole = extract.top_logprobs(module, hidden, 5)
  monkeypatch.setattr(extract, "_SCORE_ROWS", 8)
  for a, b in zip(whole, extract.top_logprobs(module, hidden, 5), strict=True):
    assert a.shape[0] == 37
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_top_k_larger_than_the_vocabulary_is_refused(fresh):
  cfg, workdir = fresh
  cfg.features.mode, cfg.features.topk = "topk", 10**6
  with pytest.raises(UserError, match="features.topk=1000000 is larger than .* vocabulary of"):
    extract.run(cfg, workdir)


def test_ids_that_do_not_exist_are_not_among_the_top():
  cfg = tiny.config(vocab_real=60)
  target = tiny.make(cfg, tiny.tensors(cfg), tiny.tokenizer())
  made = arrays(target, [source(0, [5, 6, 7])], (), topk=60)
  assert np.isfinite(made["topk_logprobs"]).all() and made["topk_ids"].max() < 60
  np.testing.assert_allclose(np.exp(made["topk_logprobs"]).sum(-1), 1, rtol=1e-5)


def test_online_mode_leaves_the_taps_alone(fresh, capsys):
  cfg, workdir = fresh
  cfg.features.mode = "online"
  folder = extract.run(cfg, workdir)
  assert [p.name for p in folder.iterdir()] == ["manifest.json"]
  found = manifest.Manifest.load(folder)
  assert found.complete and found.counts["taps"] == list(TAPS)
  assert verify_store.run(cfg, workdir) == folder
  assert "nothing to compare" in capsys.readouterr().out


def test_a_drafter_without_taps_has_the_last_state_alone(fresh, monkeypatch):
  cfg, workdir = fresh
  monkeypatch.setattr(extract, "taps_of", lambda cfg, num_layers: ())
  folder = extract.run(cfg, workdir)
  assert not (folder / "part-00000" / "features").exists()
  d = extract.open_features(cfg, workdir, 3).documents[0]
  assert d.features().shape == (len(d.tokens), 0) and d.last_hidden().shape == (len(d.tokens), 32)
  verify_store.run(cfg, workdir)


# Parts, passes and resuming.


def test_parts_follow_the_jobs_and_the_token_count(made):
  cfg, workdir, _, _ = made
  names = extract.array_names("store", TAPS)
  parts = [store.read_part(p, names) for p in sorted((workdir / "extract").glob("part-*"))]
  assert len(parts) > 3
  sizes = [sum(len(d.tokens) for d in part) for part in parts]
  for part, size in zip(parts, sizes, strict=True):
    assert size <= cfg.features.shard_tokens or len(part) == 1
  for size, following in zip(sizes, parts[1:], strict=False):
    assert size + len(following[0].tokens) > cfg.features.shard_tokens
  jobs = [d.job for part in parts for d in part]
  assert jobs == sorted(jobs)
  assert not list((workdir / "extract").glob(".part-*"))


def test_cut_into_parts():
  cut = lambda lengths, size: [list(p) for p in extract.cut_into_parts(lengths, size)]
  assert cut([3, 3, 3, 9, 1, 2], 6) == [[0, 1], [2], [3], [4, 5]]
  assert cut([9], 6) == [[0]] and cut([], 6) == []


@pytest.mark.parametrize("seed", range(5))
def test_passes_hold_every_document_once_in_few_shapes(seed):
  lengths = np.random.default_rng(seed).integers(1, 130, 60).tolist()
  passes = extract.plan_passes(lengths, 4, 32)
  assert sorted(p.document for made in passes for p in made.places) == list(range(60))
  assert {(made.rows, made.length) for made in passes} <= {(4, 32), (2, 64), (1, 128), (1, 256)}
  for made in passes:
    taken = np.zeros((made.rows, made.length), int)
    for p in made.places:
      assert p.start + lengths[p.document] <= made.length
      taken[p.row, p.start:p.start + lengths[p.document]] += 1
      assert made.length == 32 or lengths[p.document] > made.length // 2
    assert taken.max() == 1
  short = sum(n for n in lengths if n <= 32)
  assert sum(made.length == 32 for made in passes) <= short / (4 * 32) * 1.5 + 1


def test_every_document_of_a_pass_has_its_own_positions_and_segment():
  """Rotary embeddings are relative: nothing else would notice positions that go on."""
  docs = [source(i, [10 + i] * n) for i, n in enumerate((5, 20, 9, 3))]
  calls = []

  def forward(tokens, positions, segments):
    calls.append((tokens, positions, segments))
    return {}

  passes = extract.plan_passes([len(d.tokens) for d in docs], 2, 16)
  assert [made for made, _ in extract._run_passes(passes, docs, forward, 7)] == passes
  (short, long) = calls
  assert short[0].tolist() == [[10] * 5 + [12] * 9 + [7] * 2, [13] * 3 + [7] * 13]
  assert short[1].tolist() == [[*range(5), *range(9), 0, 0], [*range(3), *[0] * 13]]
  assert short[2].tolist() == [[0] * 5 + [2] * 9 + [-1] * 2, [3] * 3 + [-1] * 13]
  assert long[0].shape == (1, 32) and long[1][0, :20].tolist() == list(range(20))


def test_sigterm_ends_the_stage_between_two_passes(fresh, made, monkeypatch):
  """CASE 36: whole parts stay, the one in the making leaves nothing, and the store is the same."""
  _, straight, _, _ = made
  cfg, workdir = fresh
  forward, begun = extract.part_arrays, []

  def told_in_the_second(*args, **options):
    begun.append(0)
    if len(begun) == 2:
      os.kill(os.getpid(), signal.SIGTERM)
    return forward(*args, **options)

  with monkeypatch.context() as patch:
    patch.setattr(extract, "part_arrays", told_in_the_second)
    with pytest.raises(SystemExit) as stopped:
      extract.run(cfg, workdir)
  assert stopped.value.code == 143 and len(begun) == 2
  assert sorted(p.name for p in (workdir / "extract").iterdir()) == ["manifest.json", "part-00000"]
  folder = extract.run(cfg, workdir)
  parts = sorted(p.name for p in (straight / "extract").glob("part-*"))
  assert len(parts) > 2 and sorted(p.name for p in folder.glob("part-*")) == parts
  for name in parts:
    ours, theirs = arrays_of(folder / name), arrays_of(straight / "extract" / name)
    for key, value in theirs.items():
      np.testing.assert_array_equal(ours[key], value)


def test_a_store_that_the_disk_cannot_hold_is_not_begun(fresh, monkeypatch):
  cfg, workdir = fresh
  monkeypatch.setattr(store.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=5_000))
  with pytest.raises(UserError, match=r"tokens of .* bytes \(features.mode='store'\) need .* GB "
                                      r"and 0.0 GB are free"):
    extract.run(cfg, workdir)
  assert not list((workdir / "extract").glob("part-*"))


def killed_at_the_third(cfg, workdir, monkeypatch, leave=lambda path: None):
  """Runs the stage until it would write its third part; the paths of what it wrote."""
  write, written = store.write_part, []

  def kill(path, arrays):
    if len(written) == 2:
      leave(path)
      raise Killed
    write(path, arrays)
    written.append(path)

  with monkeypatch.context() as patch:
    patch.setattr(store, "write_part", kill)
    with pytest.raises(Killed):
      extract.run(cfg, workdir)
  return written


def test_a_killed_stage_goes_on_and_ends_with_the_same_store(fresh, made, monkeypatch):
  _, straight, _, _ = made
  cfg, workdir = fresh
  forward = extract.part_arrays
  written = killed_at_the_third(cfg, workdir, monkeypatch, leave=lambda path: (
      path.parent / f".{path.name}.tmp-1" / "tokens").mkdir(parents=True))
  with pytest.raises(UserError, match="stage extract is not finished"):
    extract.open_features(cfg, workdir, 3)
  kept = {p: p.stat().st_mtime_ns for path in written for p in path.rglob("*") if p.is_file()}
  ran = []
  monkeypatch.setattr(
      extract, "part_arrays",
      lambda target, sources, *a, **k: ran.append(sources) or forward(target, sources, *a, **k))
  folder = extract.run(cfg, workdir)
  assert all(p.stat().st_mtime_ns == time for p, time in kept.items())
  parts = sorted(p.name for p in (straight / "extract").glob("part-*"))
  assert sorted(p.name for p in folder.iterdir()) == sorted([*parts, "manifest.json"])
  assert len(ran) == len(parts) - 2
  for name in parts:
    ours, theirs = arrays_of(folder / name), arrays_of(straight / "extract" / name)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
      np.testing.assert_array_equal(ours[key], value)
  assert manifest.Manifest.load(folder).counts == manifest.Manifest.load(
      straight / "extract").counts


def test_a_store_in_a_bucket_goes_on_and_is_the_same_store(fresh, made, bucket, monkeypatch):
  """gs:// through tensorstore's own client: killed behind the second part, resumed, read."""
  _, straight, _, _ = made
  cfg, workdir = fresh
  cfg = dataclasses.replace(cfg, storage=config_lib.StorageConfig(features="gs://lab/runs"))
  killed_at_the_third(cfg, workdir, monkeypatch)
  before = list(bucket.written)
  home = dataclasses.replace(cfg, storage=config_lib.StorageConfig())
  with pytest.raises(UserError, match="storage.features='': .*extract has begun with gs://lab/runs/"
                                      "extract-"):
    extract.run(home, workdir)
  folder = extract.run(cfg, workdir)
  assert bucket.written[:len(before)] == before
  assert not set(bucket.written[len(before):]) & set(before)  # no part twice
  assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "place.json"]
  far, near = (extract.open_features(cfg, place, 3).documents for place in (workdir, straight))
  for a, b in zip(far, near, strict=True):
    assert (a.job, a.first_answer) == (b.job, b.first_answer)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.features(), b.features())
    np.testing.assert_array_equal(a.last_hidden(), b.last_hidden())
  extract.run(home, workdir)  # a finished stage is where it is
  verify_store.run(home, workdir)
  store.remove_parts(folder)
  assert not bucket.objects


def unfinished(workdir):
  """Takes the mark of completion and the last part away."""
  folder = workdir / "extract"
  found = manifest.Manifest.load(folder)
  dataclasses.replace(found, complete=False, counts={}).save(folder)
  shutil.rmtree(sorted(folder.glob("part-*"))[-1])
  return folder


def test_a_resumed_stage_refuses_a_damaged_part(copy):
  cfg, workdir = copy
  folder = unfinished(workdir)
  shutil.rmtree(folder / "part-00001" / "tokens")
  with pytest.raises(UserError, match=f"part-00001: damaged .* remove {folder} and run"):
    extract.run(cfg, workdir)


def test_a_resumed_stage_refuses_a_part_of_other_documents(copy):
  cfg, workdir = copy
  folder = unfinished(workdir)

  def change(arrays):
    arrays["tokens"][3] += 1

  rewrite(workdir, 1, change)
  with pytest.raises(UserError, match=f"part-00001: holds other documents.* remove {folder}"):
    extract.run(cfg, workdir)


def test_a_finished_stage_is_reused(copy, capsys):
  cfg, workdir = copy
  before = {p: p.stat().st_mtime_ns for p in (workdir / "extract").rglob("*")}
  cfg.features.verify_documents = 1  # does not change the store
  cfg.drafter.init_layers = (1,)  # nor does the drafter, as long as it reads the same layers
  extract.run(cfg, workdir)
  assert {p: p.stat().st_mtime_ns for p in (workdir / "extract").rglob("*")} == before
  assert "reused" in capsys.readouterr().out


def test_another_config_is_refused(copy, monkeypatch):
  cfg, workdir = copy
  cfg.features.shard_tokens = 100
  with pytest.raises(manifest.StaleStageError, match="shard_tokens=200, this run has .*=100"):
    extract.run(cfg, workdir)
  cfg.features.shard_tokens = 200
  monkeypatch.setattr(extract, "taps_of", lambda cfg, num_layers: (1,))
  with pytest.raises(manifest.StaleStageError, match=r"taps=\[0, 2\], this run has taps=\[1\]"):
    extract.run(cfg, workdir)
  with pytest.raises(UserError, match=r"holds the outputs of layers \(0, 2\), .* reads \(1,\)"):
    extract.open_features(cfg, workdir, 3)


def test_sources_are_sorted_cut_and_counted():
  make = lambda job, prompt_len, n: Answer(
      job, job, np.arange(n, dtype=np.int32), prompt_len, np.zeros((0, 1)), 0.0)
  sources, counts = extract.sources_of([make(4, 3, 12), make(1, 8, 9), make(2, 7, 8)], 8)
  assert [(s.job, len(s.tokens), s.prompt_len) for s in sources] == [(2, 8, 7), (4, 8, 3)]
  assert counts == {"documents": 2, "tokens": 16, "supervised": 6, "cut_at_context": 1,
                    "dropped_without_answer": 1}
  with pytest.raises(UserError, match="none of 1 answers has a token within .* context of 8"):
    extract.sources_of([make(1, 8, 9)], 8)


def test_the_layers_of_each_drafter(monkeypatch):
  monkeypatch.undo()
  cfg = Config()
  assert extract.taps_of(cfg, 30) == ()
  cfg.drafter.kind = "eagle3"
  assert extract.taps_of(cfg, 30) == (1, 14, 26)
  with pytest.raises(UserError, match="eagle3 taps layers .* this one has 3"):
    extract.taps_of(cfg, 3)
  from spec_jax.drafters import eagle3
  for wrong in ((4, 2), (2, 2), (-1, 2), (2, 30)):
    monkeypatch.setattr(eagle3, "eagle3_taps", lambda n, wrong=wrong: wrong)
    with pytest.raises(UserError, match=r"reads layers .*must ascend within the target's 0\.\.29"):
      extract.taps_of(cfg, 30)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_layers_of_the_block_drafters(monkeypatch, kind):
  monkeypatch.undo()
  cfg = Config()
  cfg.drafter.kind, cfg.drafter.num_taps = kind, 3
  assert extract.taps_of(cfg, 30) == (1, 14, 27)
  with pytest.raises(UserError):
    extract.taps_of(cfg, 4)


# The check of what is stored.


def test_verify_accepts_what_extract_wrote(made, capsys):
  cfg, workdir, _, _ = made
  before = {p: p.stat().st_mtime_ns for p in workdir.rglob("*")}
  verify_store.run(cfg, workdir)
  out = capsys.readouterr().out
  assert out.count("\n") == 1 and "25 of 25 documents agree" in out
  assert "features of layer 0 " in out and "features of layer 2 " in out and "last_hidden" in out
  assert {p: p.stat().st_mtime_ns for p in workdir.rglob("*")} == before


def one_value(name, amount):
  def change(arrays):
    arrays[name][7, 3] += amount * np.abs(arrays[name][7].astype(np.float32)).max()
  return change


def layer(column, factor):
  def change(arrays):
    arrays["features"][:, 32 * column:32 * (column + 1)] *= ml_dtypes.bfloat16(factor)
  return change


def swap_layers(arrays):
  arrays["features"] = np.roll(arrays["features"], 32, -1)


def shift(name):
  def change(arrays):
    arrays[name] = np.roll(arrays[name], 1, 0)
  return change


def one_more_in_the_mask(arrays):
  first = int(arrays["loss_mask"][:arrays["doc_offsets"][1]].argmax())
  arrays["loss_mask"][first - 1] = 1


def another_token(arrays):
  arrays["tokens"][7] += 1


def not_a_number(arrays):
  arrays["last_hidden"][7, 3] = np.nan


@pytest.mark.parametrize("change, what", [
    (one_value("features", 0.05), "features of layer 0 .* at token"),
    (one_value("last_hidden", 0.05), "last_hidden .* at token"),
    (layer(0, 1.03), "features of layer 0"), (layer(1, 0.97), "features of layer 2"),
    (swap_layers, "features of layer 0"), (shift("features"), "features of layer 0"),
    (shift("last_hidden"), "last_hidden"), (one_more_in_the_mask, "loss_mask"),
    (another_token, "tokens"), (not_a_number, "last_hidden differs by nan")])
def test_verify_finds_a_wrong_value(copy, change, what):
  cfg, workdir = copy
  rewrite(workdir, 1, change)
  message = rf"part-00001: document \d+ \(job \d+\): {what}.*remove {workdir}/extract and run"
  with pytest.raises(UserError, match=message) as refused:
    verify_store.run(cfg, workdir)
  assert "\n" not in str(refused.value)


def test_verify_measures_each_token_in_units_of_its_own_size():
  """A fault at a token of small values is not hidden by the large ones of another."""
  size = np.asarray([[1000.0], [1.0], [1.0]], np.float32)
  live = np.ones((3, 32), np.float32) * size
  allowed = lambda stored: verify_store._states("x", stored, live, (1e-3, 1e-3))
  fault = allowed(live + [[0.0], [0.0], [0.01]])
  assert fault.token == 2 and fault.share == pytest.approx((0.01 - 2.0**-8) / 1e-3, rel=1e-3)
  large = allowed(live + [[10.0], [0.0], [0.0]])
  assert large.token == 0 and large.share == pytest.approx(fault.share, rel=1e-3)
  assert allowed(live * (1 + 2.0**-9)).share == 0


def test_verify_tells_one_value_from_a_whole_token():
  """Rounding in low precision moves single values far and no token as a whole: either alone would
  refuse a good store or pass a bad one."""
  live = np.ones((2, 1024), np.float32)
  tolerance = verify_store._STATE_TOLERANCE["bfloat16"]
  judged = lambda stored: verify_store._states("x", stored, live, tolerance)
  one, every = live.copy(), live.copy()
  one[1, 3] += 0.4
  assert judged(one).share < 1
  one[1, 3] += 1.0
  assert judged(one).share > 1 and judged(one).token == 1
  every[0] += 0.1
  found = judged(every)
  assert found.share > 1 and found.token == 0
  assert found.value == pytest.approx(0.1 - 2.0**-8, rel=1e-3)


def wrong_id(arrays):
  arrays["topk_ids"][7, -1] = (arrays["topk_ids"][7].max() + 1) % 200


def same_id_twice(arrays):
  arrays["topk_ids"][7, 1], arrays["topk_logprobs"][7, 1] = (
      arrays["topk_ids"][7, 0], arrays["topk_logprobs"][7, 0])


def one_log(name):
  def change(arrays):
    arrays[name][7] += 0.01
  return change


@pytest.mark.parametrize("change, what", [
    (wrong_id, "topk_logprobs"), (same_id_twice, "topk_ids"),
    (one_log("topk_logprobs"), "topk_logprobs"), (one_log("logsumexp"), "logsumexp"),
    (layer(0, 1.03), "features of layer 0")])
def test_verify_finds_a_wrong_top_k(fresh, change, what):
  cfg, workdir = fresh
  cfg.features.mode = "topk"
  extract.run(cfg, workdir)
  rewrite(workdir, 1, change)
  with pytest.raises(UserError, match=f"part-00001: document .*: {what}"):
    verify_store.run(cfg, workdir)


def test_verify_finds_ids_that_are_not_the_top(fresh):
  """Right log-probabilities of the wrong ids: as if k had been taken of a part of the logits."""
  cfg, workdir = fresh
  cfg.features.mode = "topk"
  extract.run(cfg, workdir)
  target = spec_jax.load_target(cfg.target.source)

  def second_eight(arrays):
    logits, _, _ = alone(target, arrays["tokens"][:arrays["doc_offsets"][1]])
    n, logprobs = len(logits), np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))
    ids = np.argsort(-logprobs, -1)[:, :9]
    best = np.take_along_axis(logprobs, ids, -1)
    arrays["topk_ids"][:n], arrays["topk_logprobs"][:n] = ids[:, 1:], best[:, 1:]

  rewrite(workdir, 1, second_eight)
  with pytest.raises(UserError, match="document 0 .*: rank of topk_ids"):
    verify_store.run(cfg, workdir)


def test_the_documents_that_are_checked_are_spread_over_the_store(made):
  cfg, workdir, _, _ = made
  documents = extract.open_features(cfg, workdir, 3).documents
  picked = lambda count: [documents.index(d) for d in verify_store.spread(documents, count)]
  assert len(documents) == 25 and picked(5) == [0, 6, 12, 18, 24]
  assert picked(100) == picked(25) == list(range(25)) and picked(1) == [0]


@pytest.mark.demo
@pytest.mark.slow
def test_verify_accepts_a_bfloat16_store_and_tells_layers_apart(tmp_path, monkeypatch):
  """Packed and single passes round differently; the next layer of a real target is far off."""
  monkeypatch.setattr(extract, "taps_of", lambda cfg, num_layers: (1, 14, 26))
  cfg = make_config(tmp_path)
  cfg.target.source, cfg.target.dtype = "demo", "bfloat16"
  cfg.features.shard_tokens, cfg.features.seq_len = 10**6, 128
  tokenizer = open_checkpoint("demo").tokenizer()
  texts = ("def add(a, b):\n  return a + b\n\nprint(add(1, 2))", "Water boils at 100 degrees.",
           '{"name": "Ada", "born": 1815, "field": "mathematics"}', "One, two, three, four, five.")
  answers = []
  for i, text in enumerate(texts):
    ids = np.asarray(tokenizer.encode(text)[:7], np.int32)  # one length, one program
    assert len(ids) == 7
    hidden = np.zeros((len(ids) - 3, 1), ml_dtypes.bfloat16)
    answers.append(Answer(i, i, ids, 3, hidden, 0.0))
  write_generate(cfg, tmp_path, answers)
  extract.run(cfg, tmp_path)
  verify_store.run(cfg, tmp_path)
  opened = extract.open_features(cfg, tmp_path, 30)
  target = spec_jax.load_target("demo", dtype="bfloat16")
  mistaken = dataclasses.replace(opened, taps=(2, 15, 27))
  found = {d.what: d.share for d in verify_store.differences(
      target, mistaken, opened.documents[0], answers[0])}
  for layer in (2, 15, 27):
    assert found[f"features of layer {layer}"] > 1
  assert found["last_hidden"] <= 1


def test_verify_needs_the_stage(tmp_path):
  with pytest.raises(UserError, match="stage extract has not run"):
    verify_store.run(make_config(tmp_path), tmp_path / "run")


def test_the_manifest_names_what_the_stage_read(made):
  cfg, workdir, _, _ = made
  found = json.loads((workdir / "extract" / "manifest.json").read_text())
  assert list(found["inputs"]) == ["generate"] and found["complete"]
  assert found["config"]["taps"] == list(TAPS) and "drafter" not in found["config"]
  assert "verify_documents" not in found["config"]["features"]
