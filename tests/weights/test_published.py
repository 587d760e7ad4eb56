"""Published drafter folders: what stands in them, what a fresh process reads back, refusals."""

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import spec_jax
from spec_jax import drafters, sampling
from spec_jax.drafters import dflash, dspark, eagle3
from spec_jax.errors import UserError
from spec_jax.models.config import RopeScaling
from spec_jax.models.decoder import block_shapes, rope_inverse_frequencies
from spec_jax.sampling import Sampling
from spec_jax.types import Context
from spec_jax.weights import published
from spec_jax.weights.safetensors import rope_divisors, write_folder
from tests import tiny
from tests.train_drafter.test_extract import marked_target
from tests.weights import toy

ROOT = Path(__file__).parents[2]
LAYERS, RANK, MASK = 8, 6, 63
KINDS = ("eagle3", "dflash", "dspark")
REDUCED = np.array([1, 2, 5, 9, 12, 17, 22, 28, 33, 40, 44, 50, 61], np.int32)
OPTIONS = {
    "eagle3": {"taps": (1, 3, 4)},
    "dflash": {"taps": (1, 2, 5), "mask_id": MASK, "block_size": 5},
    "dspark": {"taps": (0, 3, 6), "mask_id": MASK - 1, "block_size": 4}}
# Name of a folder -> kind, reduced draft vocabulary. A new process reads the first four.
CASES = {"eagle3": ("eagle3", True), "dflash": ("dflash", False), "dspark": ("dspark", False),
         "dspark-reduced": ("dspark", True), "eagle3-whole": ("eagle3", False)}
FRESH = list(CASES)[:4]
READ_BACK = """
import sys
import numpy as np
import spec_jax
from tests.weights.test_published import proposals
root, *names = sys.argv[1:]
target = spec_jax.load_target(root + "/target")
for name in names:
  drafter = spec_jax.load_drafter(f"{root}/{name}", target)
  np.savez(f"{root}/{name}.npz", kind=drafter.kind, **proposals(drafter.module, target))
"""


def config(**changes):
  return tiny.config(num_layers=LAYERS, bos_id=0, eos_ids=(2,), pad_id=0, **changes)


@functools.cache
def target():
  return tiny.make(config(), tiny.tensors(config()), tiny.tokenizer())


def filled(shapes, seed=3):
  """A value of its own in every place of every tensor."""
  rng = np.random.default_rng(seed)
  return {name: ((1 + 0.2 * rng.normal(size=shape)) if name.endswith("norm")
                 else 0.3 * rng.normal(size=shape)).astype(np.float32)
          for name, shape in shapes.items()}


def build(kind, reduced=False, *, cfg=None, divisors=None, to=None, **changes):
  """A drafter whose every tensor is filled."""
  cfg = cfg or dataclasses.replace(config(), num_layers=1 if kind == "eagle3" else 2)
  options = OPTIONS[kind] | changes
  ids = REDUCED if reduced else None
  lib = {"eagle3": eagle3, "dflash": dflash, "dspark": dspark}[kind]
  shapes = lib.tensor_shapes(cfg, options["taps"], *(
      (RANK, len(REDUCED) if reduced else 0) if kind == "dspark" else ()))
  tensors = filled(shapes) | ({} if divisors is None else {"rope_freqs": divisors})
  return drafters.build(kind, to or target(), tensors, cfg, options, draft_ids=ids)


def proposals(module, to):
  """Greedy and sampled drafts, and q, after two texts of different length."""
  rows, K = [[5, 9, 33, 12, 40, 7], [21, 8, 11, 30, 4, 19, 27, 6, 10]], 3
  tokens = np.full((2, 24), 62, np.int32)
  for b, row in enumerate(rows):
    tokens[b, :len(row)] = row
  length = jnp.asarray([len(row) for row in rows], jnp.int32)
  places = jnp.broadcast_to(jnp.arange(24), tokens.shape)
  keys = sampling.round_keys(sampling.row_keys(3, jnp.arange(2)), length)

  @jax.jit
  def run(tokens):
    features = to.module.hidden(tokens, places, taps=module.taps).features
    state = module.observe(
        module.init_state(2, 40), tokens, features, places, places >= 0, to.module)
    greedy, drawn = (
        module.propose(state, Context(tokens, length, keys, jnp.full(2, temperature, jnp.float32)),
                       K, Sampling(temperature == 0), to.module)[0] for temperature in (0.0, 1.0))
    return {"greedy": greedy.tokens, "drawn": drawn.tokens, "probs": drawn.probs}

  return {name: np.asarray(value) for name, value in run(jnp.asarray(tokens)).items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """The target and every case of CASES as folders."""
  root = tmp_path_factory.mktemp("published")
  write_folder(root / "target", config(), tiny.tensors(config()), tiny.tokenizer())
  for name, (kind, reduced) in CASES.items():
    published.write_published(root / name, build(kind, reduced), target())
  return root


@pytest.fixture
def folder(tmp_path):
  """Writes a drafter of a kind that a test may damage."""
  def write(kind, reduced=False, **options):
    published.write_published(tmp_path / kind, build(kind, reduced, **options), target())
    return tmp_path / kind

  return write


def fields_of(folder):
  return json.loads((folder / "config.json").read_text())


def tensors_of(folder):
  return safetensors.numpy.load_file(folder / "model.safetensors")


def edit_tensors(folder, change):
  values = tensors_of(folder)
  change(values)
  safetensors.numpy.save_file(values, folder / "model.safetensors")


def edit_section(folder, name, **changes):
  """Changes fields of an object in config.json; None removes one."""
  section = fields_of(folder)[name] | changes
  toy.edit_json(folder / "config.json",
                **{name: {k: v for k, v in section.items() if v is not None}})


def refuse(folder, match, to=None):
  with pytest.raises(UserError, match=match):
    published.read_published(folder, to or target())


# CASE 35: the round trip.


@pytest.fixture(scope="module")
def read_back(written):
  """What a new process reads from the files alone."""
  subprocess.run([sys.executable, "-c", READ_BACK, str(written), *FRESH], check=True, cwd=ROOT)
  return {name: dict(np.load(written / f"{name}.npz")) for name in FRESH}


def whole(module, lent):
  """A reduced dspark as its export drafts: from all ids, those it lacked without a second term."""
  tensors = drafters.own_tensors(module)
  rows = np.zeros((tiny.VOCAB, RANK), np.float32)
  rows[REDUCED] = tensors["markov_w2"]
  return drafters.build("dspark", lent, tensors | {"markov_w2": rows}, module.config,
                        module.options())


@pytest.mark.parametrize("name", FRESH)
def test_a_new_process_drafts_the_same(read_back, name):
  kind, reduced = CASES[name]
  module = build(kind, reduced)
  wanted = proposals(whole(module, target()) if name == "dspark-reduced" else module, target())
  found = read_back[name]
  assert found.pop("kind") == kind
  np.testing.assert_array_equal(found["greedy"], wanted["greedy"])
  np.testing.assert_array_equal(found["drawn"], wanted["drawn"])
  np.testing.assert_allclose(found["probs"], wanted["probs"], atol=1e-6)
  # Drafts that say little would be equal whatever was lost.
  assert wanted["probs"].max(-1).mean() > 0.1


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_and_setting_is_read_back(written, name):
  kind, reduced = CASES[name]
  module, found = build(kind, reduced), published.read_published(written / name, target())
  own = (whole(module, target()) if name == "dspark-reduced" else module).own_tensors()
  assert set(found.tensors) == set(own)
  for key, value in own.items():
    np.testing.assert_array_equal(found.tensors[key], value, err_msg=key)
    assert len(np.unique(value)) > 0.9 * value.size or name == "dspark-reduced"
  assert (found.kind, found.config) == (kind, module.config)
  assert found.options == OPTIONS[kind] and found.head is None
  loaded = spec_jax.load_drafter(str(written / name), target())
  assert loaded.kind == kind and loaded.module.options() == module.options() | (
      {"steps": loaded.module.steps} if kind == "eagle3" else {})


@pytest.mark.parametrize("kind, changes, setting", [
    ("eagle3", dict(rope_theta=777.5), dict()),
    ("eagle3", dict(rms_norm_eps=3e-4, max_position=99), dict(taps=(0, 5, 7))),
    ("dflash", dict(rope_theta=5e5, rms_norm_eps=1e-6), dict(block_size=9, mask_id=3)),
    ("dflash", dict(max_position=1234, num_layers=3), dict(taps=(2,))),
    ("dspark", dict(rope_theta=99.0, intermediate_size=24), dict(block_size=2, taps=(3, 7))),
    ("dspark", dict(rope_scaling=RopeScaling("linear", 4.0), num_kv_heads=1), dict(mask_id=0))])
def test_other_settings_are_read_back(tmp_path, kind, changes, setting):
  cfg = dataclasses.replace(build(kind).config, **changes)
  module = build(kind, cfg=cfg, **setting)
  published.write_published(tmp_path, module, target())
  found = published.read_published(tmp_path, target())
  assert found.config == cfg and found.options == OPTIONS[kind] | setting


# What stands in the files: names, orientation and numbers that other programs expect.


def in_file(kind, module):
  """Stored name -> value, written out apart from the maps that are tested."""
  get = lambda name: np.asarray(module.own_tensors()[name])
  layer = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm",
           "self_attn.q_proj": "wq", "self_attn.k_proj": "wk", "self_attn.v_proj": "wv",
           "self_attn.o_proj": "wo", "mlp.gate_proj": "w_gate", "mlp.up_proj": "w_up",
           "mlp.down_proj": "w_down"}
  out = {"fc.weight": get("fc"), "norm.weight": get("final_norm")}
  if kind == "eagle3":
    layer |= {"hidden_norm": "hidden_norm"}
    return out | {f"midlayer.{stored}.weight": get(f"layers.0.{name}")
                  for stored, name in layer.items()}
  layer |= {"self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm"}
  out["hidden_norm.weight"] = get("hidden_norm")
  for i in range(2):
    out |= {f"layers.{i}.{stored}.weight": get(f"layers.{i}.{name}")
            for stored, name in layer.items()}
  if kind == "dspark":
    out |= {"markov_head.markov_w1.weight": get("markov_w1"),
            "markov_head.markov_w2.weight": get("markov_w2"),
            "confidence_head.proj.weight": get("confidence")[None, :-1],
            "confidence_head.proj.bias": get("confidence")[-1:]}
  return out


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_orientation_of_the_stored_tensors(written, kind):
  module, stored = build(kind), tensors_of(written / kind)
  wanted = in_file(kind, module)
  assert set(stored) - set(wanted) == (
      {"lm_head.weight", "d2t", "t2d"} if kind == "eagle3" else set())
  for name, value in wanted.items():
    assert stored[name].dtype == np.float32
    np.testing.assert_array_equal(stored[name], value, err_msg=name)
  D, F = 32, 48
  layer = "midlayer" if kind == "eagle3" else "layers.1"
  assert stored["fc.weight"].shape == (D, 3 * D)  # [out, in]
  assert stored[f"{layer}.mlp.down_proj.weight"].shape == (D, F)
  assert stored[f"{layer}.self_attn.k_proj.weight"].shape == (16, 2 * D if layer[0] == "m" else D)


def test_which_norm_is_which():
  """EAGLE-3 reads [input_layernorm of the embedding ; hidden_norm of the features]: with the first
  one zero, the token has no say, with the second one zero, the features have none."""
  module = build("eagle3")
  stored = in_file("eagle3", module)
  x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 3, 32)), jnp.float32)
  at = jnp.arange(3)[None]
  q = lambda embedded, fused, **norms: np.asarray(drafters.build(
      "eagle3", target(), module.own_tensors() | norms, module.config,
      OPTIONS["eagle3"])._project(embedded, fused, at)[0])
  off = jnp.zeros(32)
  for name, first in (("input_layernorm", True), ("hidden_norm", False)):
    ours = next(key for key, value in module.own_tensors().items()
                if np.array_equal(value, stored[f"midlayer.{name}.weight"]))
    changed = (x[1], x[0]) if first else (x[0], x[1])
    np.testing.assert_array_equal(q(x[0], x[0], **{ours: off}), q(*changed, **{ours: off}))
    assert np.abs(q(x[0], x[0]) - q(*changed)).max() > 0.1


def test_the_vocabulary_map_travels(written, folder):
  """CASE 21: d2t is an offset, t2d a mask, and the head has the rows of those ids."""
  stored, fields = tensors_of(written / "eagle3"), fields_of(written / "eagle3")
  assert stored["d2t"].dtype == np.int64 and stored["t2d"].dtype == bool
  assert [i + d for i, d in enumerate(stored["d2t"].tolist())] == REDUCED.tolist()
  assert np.flatnonzero(stored["t2d"]).tolist() == REDUCED.tolist()
  assert len(stored["t2d"]) == fields["vocab_size"] == tiny.VOCAB
  assert fields["draft_vocab_size"] == len(REDUCED)
  head = np.asarray(target().module.head_weight())
  np.testing.assert_array_equal(stored["lm_head.weight"], head[REDUCED])
  loaded = spec_jax.load_drafter(str(written / "eagle3"), target()).module
  np.testing.assert_array_equal(loaded.draft_ids[...], REDUCED)
  stored = tensors_of(written / "eagle3-whole")
  assert not stored["d2t"].any() and stored["t2d"].all() and len(stored["d2t"]) == tiny.VOCAB
  np.testing.assert_array_equal(stored["lm_head.weight"], head)
  assert not hasattr(spec_jax.load_drafter(
      str(written / "eagle3-whole"), target()).module, "draft_ids")


def test_ids_in_any_order_are_written_ascending(tmp_path):
  """A trainer takes a draft's columns by the mask t2d, which has no order."""
  order = np.random.default_rng(0).permutation(len(REDUCED))
  module = build("eagle3")
  module = drafters.build("eagle3", target(), module.own_tensors(), module.config,
                          OPTIONS["eagle3"], draft_ids=REDUCED[order])
  published.write_published(tmp_path, module, target())
  loaded = spec_jax.load_drafter(str(tmp_path), target()).module
  np.testing.assert_array_equal(loaded.draft_ids[...], REDUCED)
  hidden = jax.random.normal(jax.random.key(0), (5, 32))
  ours, theirs = (m.full_id(sampling.argmax(m.logits(hidden, target().module)))
                  for m in (module, loaded))
  np.testing.assert_array_equal(ours, theirs)


def test_a_reduced_dspark_is_written_for_all_ids(written):
  rows = tensors_of(written / "dspark-reduced")["markov_head.markov_w2.weight"]
  assert rows.shape == (tiny.VOCAB, RANK)
  np.testing.assert_array_equal(rows[REDUCED], build("dspark", True).markov_w2[...])
  assert not np.delete(rows, REDUCED, 0).any()


def test_config_of_each_form(written):
  one, two, three = (fields_of(written / kind) for kind in KINDS)
  assert one["architectures"] == ["LlamaForCausalLMEagle3"] and one["model_type"] == "llama"
  assert one["num_hidden_layers"] == 1 and one["tie_word_embeddings"] is False
  assert two["architectures"] == three["architectures"] == ["DFlashDraftModel"]
  for block, mask, size, taps in ((two, MASK, 5, [1, 2, 5]), (three, MASK - 1, 4, [0, 3, 6])):
    assert block["model_type"] == "qwen3" and block["layer_types"] == ["full_attention"] * 2
    assert (block["num_hidden_layers"], block["num_target_layers"]) == (2, LAYERS)
    assert block["block_size"] == size
    assert block["dflash_config"].items() >= {
        "mask_token_id": mask, "target_layer_ids": taps}.items()
  assert set(two["dflash_config"]) == {"mask_token_id", "target_layer_ids"}
  assert three["dflash_config"].items() >= {
      "projector_type": "dspark", "markov_rank": RANK, "markov_head_type": "vanilla",
      "enable_confidence_head": True, "confidence_head_with_markov": True}.items()
  for fields in (one, two, three):
    wanted = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
              "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
              "rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": 512,
              "hidden_act": "silu", "attention_bias": False, "torch_dtype": "float32",
              "eos_token_id": 2}
    assert {name: fields[name] for name in wanted} == wanted
  assert all((written / kind / "tokenizer.json").is_file() for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_layer_numbering(tmp_path, kind):
  """CASE 20: after block i of this target its channel holds 1 + ... + (i + 1)."""
  marked = marked_target(LAYERS)
  taps = {"eagle3": (1, 3, 4), "dflash": (0, 3, 7), "dspark": (0, 4, 7)}[kind]
  published.write_published(tmp_path, build(kind, taps=taps, to=marked), marked)
  fields = fields_of(tmp_path)
  after = lambda layers: layers * (layers + 1) / 2  # so many layers have run
  if kind == "eagle3":
    outputs = fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    inputs = fields["eagle_aux_hidden_state_layer_ids"]
    assert fields["eagle_config"]["use_aux_hidden_state"] is True
    assert [after(j) for j in inputs] == [after(i + 1) for i in taps]
  else:
    outputs = fields["dflash_config"]["target_layer_ids"]
  assert [after(i + 1) for i in outputs] == [after(i + 1) for i in taps]
  module = spec_jax.load_drafter(str(tmp_path), marked).module
  seen = marked.module.hidden(jnp.asarray([[5, 6]]), jnp.arange(2)[None], taps=module.taps)
  marks = np.asarray(seen.features).reshape(2, 3, 32)[:, :, 1]
  np.testing.assert_allclose(marks, [[after(i + 1) for i in taps]] * 2, rtol=1e-5)


def test_layers_named_in_one_of_the_two_ways(folder):
  path = folder("eagle3")
  toy.edit_json(path / "config.json", eagle_config=None)  # as vLLM's folders
  assert published.read_published(path, target()).options["taps"] == (1, 3, 4)
  toy.edit_json(path / "config.json", eagle_aux_hidden_state_layer_ids=[3, 4, 8])
  assert published.read_published(path, target()).options["taps"] == (2, 3, 7)
  toy.edit_json(path / "config.json", eagle_aux_hidden_state_layer_ids=None)
  assert published.read_published(path, target()).options["taps"] == (1, 3, 4)  # the default
  toy.edit_json(path / "config.json", eagle_config={  # as SGLang's
      "eagle_aux_hidden_state_layer_ids": [0, 2, 6], "use_aux_hidden_state": True})
  assert published.read_published(path, target()).options["taps"] == (0, 2, 6)
  toy.edit_json(path / "config.json", eagle_aux_hidden_state_layer_ids=[0, 2, 6])
  refuse(path, r"\[0, 2, 6\] and .*\[0, 2, 6\] disagree: the second must count one more")


# CASE 13: RoPE settings.


@pytest.mark.parametrize("kind", KINDS)
def test_rope_settings(tmp_path, kind):
  cfg = dataclasses.replace(
      build(kind).config, head_dim=32, partial_rotary_factor=0.25, rope_theta=777.0,
      rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64))
  published.write_published(tmp_path, build(kind, cfg=cfg), target())
  found = spec_jax.load_drafter(str(tmp_path), target()).module
  ours, theirs = rope_inverse_frequencies(cfg), np.asarray(found.inverse_frequencies, np.float32)
  assert len(ours) == 4  # a quarter of 32, in pairs
  assert not np.allclose(
      ours, rope_inverse_frequencies(dataclasses.replace(cfg, rope_scaling=None)))
  for position in (0, 100, 5000):
    np.testing.assert_array_equal(np.cos(position * ours), np.cos(position * theirs))
    np.testing.assert_array_equal(np.sin(position * ours), np.sin(position * theirs))


def test_a_table_of_divisors_becomes_its_scaling_or_is_refused(tmp_path):
  plain = dataclasses.replace(build("dflash").config, rope_theta=5e5, head_dim=32)
  scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
  table = rope_divisors(dataclasses.replace(plain, rope_scaling=scaling)).astype(np.float32)
  module = build("dflash", cfg=plain, divisors=table)
  published.write_published(tmp_path, module, target())
  found = spec_jax.load_drafter(str(tmp_path), target()).module
  assert found.config.rope_scaling == scaling
  np.testing.assert_allclose(found.inverse_frequencies, module.inverse_frequencies, rtol=1e-6)
  other = build("dflash", cfg=plain, divisors=np.linspace(1, 3, 16, dtype=np.float32))
  with pytest.raises(UserError, match="rope_freqs is not a llama3 table"):
    published.write_published(tmp_path / "other", other, target())


def test_a_setting_without_a_place_is_refused_when_writing(tmp_path, monkeypatch):
  module = build("eagle3")
  real = type(module.config).to_hf
  monkeypatch.setattr(type(module.config), "to_hf", lambda self: real(self) | {"rope_theta": 1.0})
  with pytest.raises(UserError, match="the drafter's rope_theta=10000.0 has no place in the publ"):
    published.write_published(tmp_path / "d", module, target())
  assert not (tmp_path / "d").exists()


# What is read besides: the variants of public folders.


def test_variants_of_public_folders(folder):
  def check(path, kind, reduced=False):
    found = spec_jax.load_drafter(str(path), target())
    assert found.kind == kind
    ours, theirs = (m.own_tensors() for m in (found.module, build(kind, reduced)))
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)

  path = folder("eagle3", True)
  embed = np.asarray(target().module.embed[...])

  def vary(values):
    for name in [name for name in values if name.startswith("midlayer.")]:
      values[name.replace("midlayer", "layers.0")] = values.pop(name)
    values["embed_tokens.weight"] = embed.astype(ml_dtypes.bfloat16)

  edit_tensors(path, vary)
  toy.edit_json(
      path / "config.json", architectures=["LlamaForCausalLM"], use_cache=True,
      transformers_version="4.28.1", norm_before_residual=False, sliding_window=None,
      target_hidden_size=32)
  check(path, "eagle3", True)
  path = folder("dspark")
  edit_tensors(path, lambda values: values.update({
      "embed_tokens.weight": embed,
      "lm_head.weight": np.asarray(target().module.head_weight())}))
  edit_section(path, "dflash_config", mask_token_id=None, attention_mode="gqa")
  toy.edit_json(path / "config.json", architectures=["DSparkDraftModel"], mask_token_id=MASK - 1)
  toy.shard(path)
  check(path, "dspark")


def test_half_precision_weights(folder):
  path = folder("dflash")
  edit_tensors(path, lambda values: values.update(
      {name: value.astype(ml_dtypes.bfloat16) for name, value in values.items()}))
  found = published.read_published(path, target()).tensors
  for name, value in build("dflash").own_tensors().items():
    assert found[name].dtype == np.float32
    np.testing.assert_allclose(found[name], value, rtol=2**-8)


@pytest.mark.parametrize("reduced", [True, False])
def test_a_trained_head_is_the_drafters_own(folder, reduced):
  path = folder("eagle3", reduced)
  rows = np.asarray(target().module.head_weight())[REDUCED if reduced else slice(None)]
  own = rows[::-1] + np.float32(0.25)
  edit_tensors(path, lambda values: values.update({"lm_head.weight": np.ascontiguousarray(own)}))
  np.testing.assert_array_equal(published.read_published(path, target()).head, own)
  module = spec_jax.load_drafter(str(path), target()).module
  hidden = jax.random.normal(jax.random.key(0), (3, 32))
  np.testing.assert_allclose(module.logits(hidden, target().module), hidden @ own.T, atol=1e-4)
  # And goes where the drafter goes.
  published.write_published(path.parent / "again", module, target())
  np.testing.assert_array_equal(tensors_of(path.parent / "again")["lm_head.weight"], own)


def test_a_target_in_bfloat16_lends_its_head(written):
  low = spec_jax.load_target(str(written / "target"), dtype="bfloat16")
  for name in CASES:
    assert published.read_published(written / name, low).head is None


def test_which_folders_are_published(written, tmp_path):
  assert all(published.is_published(written / name) for name in CASES)
  assert not published.is_published(written / "target")
  assert not published.is_published(tmp_path)
  (tmp_path / "config.json").write_text("{")
  assert not published.is_published(tmp_path)
  with pytest.raises(UserError, match="kind='small_lm' has no published form"):
    published.write_published(tmp_path, tiny.weak_drafter().module, tiny.target())


# What is refused, by name.


@pytest.mark.parametrize("kind, changes, match", [
    ("eagle3", dict(norm_before_residual=1), "norm_before_residual=1 must be true or false"),
    ("eagle3", dict(norm_before_fc=True), "norm_before_fc=True"),
    ("eagle3", dict(fc_norm=True), "fc_norm=True"),
    ("eagle3", dict(norm_output=True), "norm_output=True"),
    ("eagle3", dict(num_hidden_layers=2), r"num_hidden_layers=2 is not supported \(only 1\)"),
    ("eagle3", dict(tie_word_embeddings=True), "tie_word_embeddings=True"),
    ("eagle3", dict(model_type="mistral"), "model_type='mistral' is not supported"),
    ("eagle3", dict(model_type="qwen3"), "no tensor midlayer.self_attn.q_norm.weight"),
    ("eagle3", dict(sliding_window=64), "sliding_window=64"),
    ("eagle3", dict(architectures=["Eagle3Speculator"]), "architectures='Eagle3Speculator'"),
    ("eagle3", dict(logit_gain=1.0), "field logit_gain=1.0 is not known"),
    ("eagle3", dict(new_switch=False), "field new_switch=False is not known"),
    ("eagle3", dict(hidden_act="gelu"), "hidden_act='gelu'"),
    ("eagle3", dict(attention_bias=True), "attention_bias=True"),
    ("eagle3", dict(mlp_bias=True), "mlp_bias=True"),
    ("eagle3", dict(quantization_config={"bits": 4}), "quantization_config"),
    ("eagle3", dict(rope_scaling={"rope_type": "longrope", "factor": 4.0}), "'longrope' is not"),
    ("eagle3", dict(rope_scaling={"rope_type": "default", "mrope_section": [1]}),
     r"rope_scaling.mrope_section=\[1\] is not known"),
    ("eagle3", dict(rope_parameters={"rope_theta": 1.0}, rope_scaling={"rope_type": "linear"}),
     "rope_parameters=.* and rope_scaling=.* disagree"),
    ("eagle3", dict(eagle_config=[1]), r"eagle_config=\[1\] must be an object"),
    ("eagle3", dict(draft_vocab_size=13), r"head.weight has shape \[64, 32\], not .* \[13, 32\]"),
    ("eagle3", dict(head_dim=16), r"q_proj.weight has shape \[32, 64\].* says \[64, 64\]"),
    ("eagle3", dict(intermediate_size=47), "mlp.gate_proj.weight has shape"),
    ("dflash", dict(is_causal=True), "is_causal=True"),
    ("dflash", dict(layer_types=["full_attention", "sliding_attention"]), "layer_types="),
    ("dflash", dict(layer_types=["full_attention"]), "layer_types="),
    ("dflash", dict(layer_types=None, sliding_window=64), "sliding_window=64"),
    ("dflash", dict(use_sliding_window=True), "use_sliding_window=True"),
    ("dflash", dict(num_target_layers=36), "num_target_layers=36 is not the target's 8"),
    ("dflash", dict(draft_vocab_size=32), "has no tensor lm_head.weight"),
    ("dflash", dict(block_size=4.5), "block_size=4.5 must be a whole number"),
    ("dflash", dict(block_size=1), "block_size=1 must be a whole number from 2 on"),
    ("dspark", dict(block_size=0), "block_size=0 must be a whole number from 1 on"),
    ("dflash", dict(dflash_config={"mask_token_id": 64, "target_layer_ids": [1, 2, 5]}),
     r"mask_token_id=64 is no id of the target's 0..63"),
    ("dflash", dict(dflash_config={"projector_type": ["dspark"]}), r"projector_type=\['dspark'\]"),
    ("eagle3", dict(architectures=[["x"]]), r"architectures=\"\['x'\]\" is no drafter"),
    ("eagle3", dict(num_key_value_heads=3), "num_kv_heads=3 does not divide num_heads=4"),
    ("eagle3", dict(num_key_value_heads="2"), "num_key_value_heads='2' must be a whole number"),
    ("eagle3", dict(rms_norm_eps="1e-5"), "rms_norm_eps='1e-5' must be a number"),
    ("dflash", dict(block_size=None), "block_size=None must be a whole number"),
    ("dflash", dict(mask_token_id=5), "mask_token_id=63 and mask_token_id=5 disagree"),
    ("dflash", dict(architectures=["DFlash2DraftModel"]), "architectures='DFlash2DraftModel'"),
    ("dflash", dict(architectures=["DSparkDraftModel"]), "projector_type=None of DSparkDraftModel"),
    ("dflash", dict(hidden_size=64), "hidden_size=64 is not the target's 32"),
    ("dflash", dict(vocab_size=65), "vocab_size=65 is not the target's 64"),
    ("dflash", dict(num_hidden_layers=True), "num_hidden_layers=True must be a whole number"),
    ("dflash", dict(max_position_embeddings=None), "max_position_embeddings=None must be"),
    ("dflash", dict(num_hidden_layers=3, layer_types=None), "has no tensor layers.2.")])
def test_a_field_is_refused_by_name(folder, kind, changes, match):
  path = folder(kind)
  toy.edit_json(path / "config.json", **changes)
  refuse(path, f"{kind}: .*{match}")


@pytest.mark.parametrize("kind, section, changes, match", [
    ("eagle3", "eagle_config", dict(use_aux_hidden_state=False), "use_aux_hidden_state=False"),
    ("eagle3", "eagle_config", dict(use_more=1), "eagle_config.use_more=1 is not known"),
    ("eagle3", "eagle_config", dict(eagle_aux_hidden_state_layer_ids=[1, 3, 5]), "disagree"),
    ("dflash", "dflash_config", dict(target_layer_ids=[1, 2, 8]),
     r"layers \[1, 2, 8\] \(outputs, from 0\) are not all of the target's 0..7"),
    ("dflash", "dflash_config", dict(target_layer_ids=[2, 1, 5]), r"\[2, 1, 5\] must .*ascend"),
    ("dflash", "dflash_config", dict(target_layer_ids=[1, 1, 5]), r"\[1, 1, 5\] must .*ascend"),
    ("dflash", "dflash_config", dict(target_layer_ids=[]), r"layers \[\] must be given"),
    ("dflash", "dflash_config", dict(target_layer_ids=None), "target_layer_ids=None must be a l"),
    ("dflash", "dflash_config", dict(target_layer_ids=[1, 5]), r"fc.weight has shape \[32, 96\]"),
    ("dflash", "dflash_config", dict(mask_token_id=None), "mask_token_id=None must be a whole"),
    ("dflash", "dflash_config", dict(projector_type="domino"), "projector_type='domino'"),
    ("dflash", "dflash_config", dict(markov_head_type="vanilla"), "markov_head_type='vanilla' is"),
    ("dflash", "dflash_config", dict(output_multiplier=2.0), "output_multiplier=2.0"),
    ("dflash", "dflash_config", dict(final_logit_softcapping=30.0), "final_logit_softcapping=30"),
    ("dflash", "dflash_config", dict(input_embedding_scale=-8.0), "input_embedding_scale=-8.0"),
    ("dflash", "dflash_config", dict(input_embedding_scale=float("inf")), "embedding_scale=inf"),
    ("dspark", "dflash_config", dict(markov_head_type="gated"), "markov_head_type='gated'"),
    ("dspark", "dflash_config", dict(enable_confidence_head=False), "enable_confidence_head=Fal"),
    ("dspark", "dflash_config", dict(confidence_head_with_markov=False), "head_with_markov=False"),
    ("dspark", "dflash_config", dict(markov_rank=7), r"markov_w1.weight has shape \[64, 6\]"),
    ("dspark", "dflash_config", dict(markov_rank=None), "markov_rank=None must be a whole"),
    ("dspark", "dflash_config", dict(shift_label=True), "shift_label=True is not known")])
def test_a_nested_field_is_refused_by_name(folder, kind, section, changes, match):
  path = folder(kind)
  edit_section(path, section, **changes)
  refuse(path, f"{kind}: .*{match}")


def absolute(values):
  values["d2t"] += np.arange(len(values["d2t"]))


def within(values):
  """Absolute ids that stay inside the vocabulary."""
  values["d2t"] = REDUCED.astype(np.int64) // 2


def without(name):
  return lambda values: values.pop(name)


def shaped(name, *shape):
  return lambda values: values.update({name: np.ones(shape, np.float32)})


@pytest.mark.parametrize("kind, change, match", [
    ("eagle3", absolute, r"d2t gives id 73: its offsets must lead to 13 ids in 0..63"),
    ("eagle3", within, "tensors d2t and t2d name different ids"),
    ("eagle3", lambda v: v.update(d2t=np.arange(13)[::-1].copy()), "d2t gives an id twice"),
    ("eagle3", lambda v: v.update(d2t=v["d2t"].astype(np.float32)), "d2t has type float32"),
    ("eagle3", without("d2t"), "no tensor d2t, which draft_vocab_size=13 needs"),
    ("eagle3", lambda v: v.update(d2t=v["d2t"][:5]), r"d2t has shape \[5\], not draft_v.*=13"),
    ("eagle3", without("lm_head.weight"), "no tensor lm_head.weight"),
    ("eagle3", without("midlayer.hidden_norm.weight"), "no tensor midlayer.hidden_norm.weight"),
    ("eagle3", shaped("midlayer.self_attn.q_norm.weight", 8), "q_norm.weight is not supported"),
    ("eagle3", shaped("embed_tokens.weight", 64, 31), r"\[64, 31\], the target's \[64, 32\]"),
    ("eagle3", shaped("embed_tokens.weight", 64, 32), "embed_tokens.weight is not the target's"),
    ("eagle3", lambda v: v.update({"fc.weight": v["fc.weight"].astype(np.int8)}), "type I8"),
    ("dflash", shaped("lm_head.weight", 64, 32), "lm_head.weight is not the target's, .*differ by"),
    ("dflash", lambda v: v.update(d2t=np.zeros(64, np.int64)), "tensor d2t is not supported"),
    ("dflash", shaped("layers.0.self_attn.q_proj.bias", 32), "q_proj.bias is not supported"),
    ("dspark", shaped("confidence_head.proj.bias", 2), r"proj.bias has shape \[2\], not \[1\]"),
    ("dspark", shaped("confidence_head.proj.weight", 38, 1), r"\[38, 1\], .* says \[1, 38\]"),
    ("dspark", shaped("markov_head.gate_proj.weight", 6, 38), "gate_proj.weight is not supported")])
def test_a_tensor_is_refused_by_name(folder, kind, change, match):
  path = folder(kind, kind == "eagle3")
  edit_tensors(path, change)
  refuse(path, f"{kind}.*{match}")


def test_a_file_that_was_cut_anywhere_is_named(folder):
  path = folder("dspark")
  whole = (path / "model.safetensors").read_bytes()
  for size in (0, 5, 8, 200, len(whole) // 2, len(whole) - 1):
    (path / "model.safetensors").write_bytes(whole[:size])
    refuse(path, "dspark/model.safetensors is not a readable safetensors file")


def test_another_target_is_refused(folder):
  path = folder("eagle3", True)
  small = tiny.config(num_layers=4)
  refuse(path, r"layers \[1, 3, 4\] .* target's 0..3",
         tiny.make(small, tiny.tensors(small), tiny.tokenizer()))
  (path / "tokenizer.json").unlink()
  names = tiny.tokenizer().token_strings()
  names[-2:] = names[:-3:-1]
  toy.tokenizer(tokens=names).save(path)
  refuse(path, "the drafter's vocabulary is not the target's: id 62")


def test_layer_shapes_are_all_in_the_map():
  """A tensor that a layer gains is not left out of the files."""
  cfg = build("eagle3").config
  assert {f"layers.{{i}}.{name}" for name in block_shapes(cfg)} <= set(published._EAGLE3_NAMES)
