"""The feature store: parts on disk, reading by document, damage, sizes, and bounds on alpha."""

import concurrent.futures
import json
import pickle
import shutil

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.errors import UserError
from train_drafter import manifest, store

BF16 = ml_dtypes.bfloat16
NAMES = (*store.INDEX, "features", "last_hidden")
LENGTHS = (5, 1, 9, 4)
PROMPTS = (2, 0, 8, 3)


def make_arrays(lengths=LENGTHS, prompts=PROMPTS, first_job=3, width=6, hidden=4, seed=0):
  rng = np.random.default_rng(seed)
  n = sum(lengths)
  return {
      "tokens": rng.integers(0, 60, n).astype(np.int32),
      "loss_mask": np.concatenate(
          [np.arange(m) >= p for m, p in zip(lengths, prompts, strict=True)]).astype(np.uint8),
      "doc_offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
      "job": np.arange(first_job, first_job + len(lengths), dtype=np.int32),
      "prompt": np.arange(len(lengths), dtype=np.int32) // 2,
      "features": rng.normal(size=(n, width)).astype(BF16),
      "last_hidden": rng.normal(size=(n, hidden)).astype(BF16)}


def make_store(folder, *parts, **changes):
  """A finished stage folder of these parts."""
  opened = manifest.begin(folder, stage="extract", config={})
  for i, arrays in enumerate(parts):
    store.write_part(store.part_folder(folder, i), arrays)
  counts = {"mode": "store", "taps": [0, 1], "hidden_size": 3, "topk": 0, "parts": len(parts),
            "arrays": list(parts[0]) if parts else [], "last_hidden": "after_final_norm"}
  counts = {name: value for name, value in (counts | changes).items() if value is not None}
  manifest.finish(folder, opened, counts)
  return folder


@pytest.fixture
def made(tmp_path):
  parts = make_arrays(), make_arrays((7, 2), (1, 1), first_job=7, seed=1)
  return make_store(tmp_path / "extract", *parts), parts


# Reading what was written.


def test_documents_come_back_bit_for_bit(made):
  folder, parts = made
  opened = store.open_store(folder)
  assert (opened.mode, opened.taps, opened.hidden_size, opened.topk) == ("store", (0, 1), 3, 0)
  assert [d.job for d in opened.documents] == [3, 4, 5, 6, 7, 8]
  assert [d.prompt for d in opened.documents] == [0, 0, 1, 1, 0, 0]
  assert [d.index for d in opened.documents] == [0, 1, 2, 3, 0, 1]
  assert [d.first_answer for d in opened.documents] == [*PROMPTS, 1, 1]
  at = 0
  for d in opened.documents[:4]:
    rows = slice(at, at + len(d.tokens))
    for name, value in (("tokens", d.tokens), ("loss_mask", d.loss_mask),
                        ("features", d.features()), ("last_hidden", d.last_hidden())):
      assert value.dtype == parts[0][name].dtype
      np.testing.assert_array_equal(value, parts[0][name][rows])
    at += len(d.tokens)
  np.testing.assert_array_equal(opened.documents[5].features(), parts[1]["features"][7:])


def test_a_range_is_of_the_document_and_not_of_the_part(made):
  folder, (arrays, _) = made
  d = store.open_store(folder).documents[2]  # its tokens are rows 6..14
  np.testing.assert_array_equal(d.features(2, 5), arrays["features"][8:11])
  np.testing.assert_array_equal(d.last_hidden(7), arrays["last_hidden"][13:15])
  assert d.features(9).shape == (0, 6)
  for bad in ((0, 10), (-1, 3), (4, 3)):
    with pytest.raises(IndexError, match="of a document of 9 tokens"):
      d.features(*bad)


def test_a_cut_shortens_ids_mask_and_states_together(made):
  folder, (arrays, _) = made
  d = store.open_store(folder).documents[0].cut(3)
  assert (len(d.tokens), d.first_answer, d.loss_mask.tolist()) == (3, 2, [0, 0, 1])
  np.testing.assert_array_equal(d.features(), arrays["features"][:3])
  np.testing.assert_array_equal(d.last_hidden(), arrays["last_hidden"][:3])
  with pytest.raises(IndexError):
    d.features(0, 4)  # stored, but cut away
  nothing = store.open_store(folder).documents[2].cut(6)
  assert nothing.first_answer == 6 and not nothing.loss_mask.any()
  assert len(d.cut(100).tokens) == 3


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_the_dtype_on_disk_is_that_of_the_array(tmp_path, dtype):
  arrays = make_arrays()
  arrays["features"] = np.random.default_rng(5).normal(size=(19, 6)).astype(dtype)
  d = store.open_store(make_store(tmp_path / "extract", arrays)).documents[0]
  assert d.features().dtype == dtype
  np.testing.assert_array_equal(d.features(), arrays["features"][:5])


def test_the_format_is_zarr3_with_small_inner_chunks(tmp_path, monkeypatch):
  """FORMATS.md: sharded, tokens on axis 0, the hidden axis unsplit, inner chunks of 1 to 4 MiB."""
  arrays = make_arrays((3000,), (1,), width=1024)
  monkeypatch.setattr(store, "_SHARD_BYTES", 4 << 20)  # several files
  store.write_part(tmp_path / "part-00000", arrays)
  meta = json.loads((tmp_path / "part-00000" / "features" / "zarr.json").read_text())
  assert meta["zarr_format"] == 3 and meta["data_type"] == "bfloat16"
  (codec,) = meta["codecs"]
  assert codec["name"] == "sharding_indexed"
  rows, width = codec["configuration"]["chunk_shape"]
  assert width == 1024 and 1 << 20 <= rows * width * 2 <= 4 << 20
  shard = meta["chunk_grid"]["configuration"]["chunk_shape"]
  assert shard[1] == 1024 and shard[0] % rows == 0 and shard[0] < 3000
  assert len(list((tmp_path / "part-00000" / "features").rglob("c/*/*"))) == 2
  (d,) = store.read_part(tmp_path / "part-00000", NAMES)
  np.testing.assert_array_equal(d.features(1000, 2900), arrays["features"][1000:2900])


def test_threads_and_processes_share_a_store(made):
  folder, (arrays, _) = made
  documents = store.open_store(folder).documents[:4]
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    read = list(pool.map(lambda i: documents[i % 4].features(), range(64)))
  offsets = arrays["doc_offsets"]
  for i, value in enumerate(read):
    np.testing.assert_array_equal(
        value, arrays["features"][offsets[i % 4]:offsets[i % 4 + 1]])
  again = pickle.loads(pickle.dumps(documents[2]))
  np.testing.assert_array_equal(again.features(), documents[2].features())


def test_top_k_is_kept_in_place_of_the_hidden_state(tmp_path):
  rng = np.random.default_rng(0)
  arrays = make_arrays()
  del arrays["last_hidden"]
  probs = np.sort(rng.dirichlet(np.ones(8), 19), -1)[:, ::-1][:, :3]
  arrays |= {"topk_ids": rng.integers(0, 60, (19, 3)).astype(np.int32),
             "topk_logprobs": np.log(probs).astype(np.float32),
             "logsumexp": rng.normal(size=19).astype(np.float32)}
  opened = store.open_store(make_store(
      tmp_path / "extract", arrays, mode="topk", topk=3, last_hidden="not_kept"))
  top = opened.documents[2].topk(1, 4)
  for name, value in (("topk_ids", top.ids), ("topk_logprobs", top.logprobs),
                      ("logsumexp", top.logsumexp)):
    np.testing.assert_array_equal(value, arrays[name][7:10])
  np.testing.assert_allclose(top.tail, 1 - probs[7:10].sum(-1), atol=1e-6)
  with pytest.raises(UserError, match="part-00000: keeps no last_hidden.*another features.mode"):
    opened.documents[0].last_hidden()


def test_a_store_without_taps_has_features_of_width_zero(tmp_path):
  arrays = make_arrays()
  del arrays["features"]
  opened = store.open_store(make_store(tmp_path / "extract", arrays, taps=[]))
  assert opened.documents[2].features(1, 4).shape == (3, 0)
  with pytest.raises(IndexError):
    opened.documents[2].features(0, 10)


# What is refused.


@pytest.mark.parametrize("said, message", [
    (None, "last_hidden=None"), ("before_final_norm", "last_hidden='before_final_norm'")])
def test_a_store_must_say_where_its_states_were_taken(tmp_path, said, message):
  folder = make_store(tmp_path / "extract", make_arrays(), last_hidden=said)
  with pytest.raises(UserError, match=message) as refused:
    store.open_store(folder)
  assert "\n" not in str(refused.value)


def test_an_unfinished_or_empty_store_is_refused(tmp_path):
  folder = tmp_path / "extract"
  with pytest.raises(UserError, match="manifest.json"):
    store.open_store(folder)
  manifest.begin(folder, stage="extract", config={})
  with pytest.raises(UserError, match="not finished; run --stage=extract"):
    store.open_store(folder)
  with pytest.raises(UserError, match="features.mode='online', which keeps no features"):
    store.open_store(make_store(tmp_path / "online", mode="online"))
  with pytest.raises(UserError, match="has no 'parts'"):
    store.open_store(make_store(tmp_path / "old", make_arrays(), parts=None))


def shard_of(folder, name):
  (path,) = [p for p in (folder / "part-00000" / name).rglob("*")
             if p.is_file() and p.name != "zarr.json"]
  return path


def flip_a_bit(path):
  content = bytearray(path.read_bytes())
  content[7] ^= 1
  path.write_bytes(content)


@pytest.mark.parametrize("name", ["tokens", "features"])
@pytest.mark.parametrize("damage", [
    flip_a_bit, lambda path: path.write_bytes(path.read_bytes()[:20]),
    lambda path: path.write_bytes(b""), lambda path: path.unlink(),
    lambda path: shutil.rmtree(path.parent.parent.parent)])
def test_damage_is_one_line_naming_the_part(made, name, damage):
  """Above all a lost file: as zarr has it, it would read as zeros."""
  folder, _ = made
  damage(shard_of(folder, name))
  with pytest.raises(UserError, match=(
      f"{folder}/part-00000: damaged .*remove {folder} and run --stage=extract again")) as refused:
    store.open_store(folder).documents[0].features()
  assert "\n" not in str(refused.value)
  if name == "features":  # the other part is whole
    assert store.open_store(folder).documents[4].features().shape == (7, 6)


def test_a_lost_part_is_named(made):
  folder, _ = made
  shutil.rmtree(folder / "part-00001")
  with pytest.raises(UserError, match="part-00001: damaged"):
    store.open_store(folder)


def test_used_parts_are_removed_unless_a_sweep_shares_them(made):
  folder, _ = made
  link = folder.with_name("linked")
  link.symlink_to(folder)
  store.remove_parts(link)
  assert len(store.open_store(folder).documents) == 6
  store.remove_parts(folder)
  assert [path.name for path in folder.iterdir()] == ["manifest.json"]
  with pytest.raises(UserError, match="its parts are gone .features.delete_used"):
    store.open_store(folder)


@pytest.mark.parametrize("name, value", [
    ("loss_mask", np.asarray([0, 0, 1, 0, 1] + [1] * 14, np.uint8)),
    ("doc_offsets", np.asarray([0, 5, 6, 15, 18], np.int64)),
    ("doc_offsets", np.asarray([0, 5, 5, 15, 19], np.int64)),
    ("job", np.arange(3, dtype=np.int32))])
def test_an_index_that_does_not_add_up_is_damage(tmp_path, name, value):
  folder = make_store(tmp_path / "extract", make_arrays() | {name: value})
  with pytest.raises(UserError, match="part-00000: damaged"):
    store.open_store(folder)


# Writing.


def test_a_part_appears_whole_or_not_at_all(tmp_path, monkeypatch):
  class Killed(BaseException):
    """Stands for a signal that cannot be caught."""

  def killed(folder):
    raise Killed

  path = tmp_path / "part-00000"
  with monkeypatch.context() as patch:
    patch.setattr(store, "_sync", killed)
    with pytest.raises(Killed):
      store.write_part(path, make_arrays())
  assert not path.exists() and len(list(tmp_path.iterdir())) == 1
  store.write_part(path, make_arrays())  # over what the first try left
  assert [p.name for p in tmp_path.iterdir()] == ["part-00000"]
  (tmp_path / ".part-00001.tmp-123" / "tokens").mkdir(parents=True)
  store.remove_unfinished(tmp_path)
  assert [p.name for p in tmp_path.iterdir()] == ["part-00000"]


def test_all_zeros_are_written_like_other_values(tmp_path):
  arrays = make_arrays()
  arrays["features"] = np.zeros_like(arrays["features"])
  folder = make_store(tmp_path / "extract", arrays)
  assert not store.open_store(folder).documents[1].features().any()


def test_a_part_that_cannot_be_written_is_one_line(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="part-00000: cannot be written") as refused:
    store.write_part(tmp_path / "file" / "part-00000", make_arrays())
  assert "\n" not in str(refused.value)
  store.write_part(tmp_path / "part-00000", make_arrays())
  with pytest.raises(UserError, match="part-00000: cannot be written"):  # never over another
    store.write_part(tmp_path / "part-00000", make_arrays())


def test_bytes_per_token_are_those_on_disk(tmp_path):
  arrays = make_arrays((6000,), (1,), width=48, hidden=16)
  store.write_part(tmp_path / "part-00000", arrays)
  on_disk = sum(p.stat().st_size for p in (tmp_path / "part-00000").rglob("*") if p.is_file())
  wanted = store.bytes_per_token("store", hidden_size=16, num_taps=3)
  assert wanted == 4 + 1 + 2 * 48 + 2 * 16
  assert 6000 * wanted < on_disk < 6000 * wanted + 8000
  assert store.bytes_per_token("topk", hidden_size=16, num_taps=3, topk=8) == 5 + 96 + 8 * 8 + 4
  assert store.bytes_per_token("online", hidden_size=16, num_taps=3) == 0


def test_a_reader_keeps_a_bounded_cache():
  limit = store._reading()["cache_pool"].to_json()["total_bytes_limit"]
  assert 64 << 20 <= limit <= 256 << 20
  assert store._reading() is store._reading()


def test_tensorstore_is_given_no_other_format(made):
  """What other programs need to read it: a plain zarr3 folder."""
  folder, (arrays, _) = made
  path = folder / "part-00000" / "last_hidden"
  array = ts.open({"driver": "zarr3", "kvstore": f"file://{path}/"}).result()
  np.testing.assert_array_equal(array.read().result(), arrays["last_hidden"])


# Bounds on alpha.


def dense_case(seed, vocab, k, heat):
  rng = np.random.default_rng(seed)
  law = lambda: rng.dirichlet(np.full(vocab, heat))
  p, q = law(), law()
  ids = np.argsort(-p)[:k]
  rest = np.setdiff1d(np.arange(vocab), ids)
  return p, q, ids, p[rest].sum(), q[rest].sum()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 40), st.integers(1, 40), st.sampled_from([0.05, 1.0]))
def test_bounds_hold_the_true_alpha(seed, vocab, k, heat):
  p, q, ids, tail_p, tail_q = dense_case(seed, vocab, min(k, vocab), heat)
  low, high = map(float, store.alpha_bounds(
      *(np.asarray(x, np.float32) for x in (p[ids], q[ids], tail_p, tail_q))))
  alpha = np.minimum(p, q).sum()
  assert low - 1e-6 <= alpha <= high + 1e-6
  assert high - low <= min(tail_p, tail_q) + 1e-6
  if len(ids) == vocab:
    assert low == high == pytest.approx(alpha, abs=1e-6)


def test_bounds_are_the_tightest_there_are():
  """For what is stored there is a pair of laws that reaches either end."""
  head_p, head_q = np.asarray([0.5, 0.2]), np.asarray([0.1, 0.3])
  low, high = map(float, store.alpha_bounds(head_p, head_q, np.asarray(0.3), np.asarray(0.6)))
  apart = np.minimum([0.5, 0.2, 0.3, 0.0], [0.1, 0.3, 0.0, 0.6]).sum()
  together = np.minimum([0.5, 0.2, 0.3, 0.0], [0.1, 0.3, 0.3, 0.3]).sum()
  assert (low, high) == pytest.approx((apart, together)) and high - low == pytest.approx(0.3)


def test_a_tail_of_zero_makes_the_bounds_exact():
  p, q = np.asarray([[0.6, 0.4], [0.9, 0.1]]), np.asarray([[0.5, 0.2], [0.3, 0.3]])
  for tail_p, tail_q in ((0.0, 0.4), (-1e-7, 0.4), (0.3, 0.0)):
    low, high = store.alpha_bounds(p, q, np.full(2, tail_p), np.full(2, tail_q))
    np.testing.assert_array_equal(low, high)
    np.testing.assert_allclose(low, [0.7, 0.4], rtol=1e-6)
