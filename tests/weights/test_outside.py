"""Drafters that others published: folders written here by hand in each form, and what is refused.

The tensors are those of test_published.py; no function of spec_jax.weights that writes is used.
"""

import dataclasses
import functools
import io
import json
import pickle
import zipfile

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import spec_jax
from spec_jax import drafters
from spec_jax.drafters import eagle3
from spec_jax.errors import UserError
from spec_jax.target import canonical_tensors
from spec_jax.weights import published, speculators
from spec_jax.weights.safetensors import write_folder
from tests import families, tiny
from tests.weights import toy
from tests.weights.test_published import (
  KINDS,
  LAYERS,
  MASK,
  OPTIONS,
  RANK,
  REDUCED,
  build,
  config,
  fields_of,
  filled,
  in_file,
  proposals,
  target,
)

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu"}


def write(folder, fields, tensors):
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(fields))
  safetensors.numpy.save_file(
      {name: np.ascontiguousarray(value) for name, value in tensors.items()},
      folder / "model.safetensors")
  return folder


def load(folder, to=None):
  return spec_jax.load_drafter(str(folder), to or target()).module


def mapping():
  """d2t as an offset, t2d as a mask."""
  return {"d2t": (REDUCED - np.arange(len(REDUCED))).astype(np.int64),
          "t2d": np.isin(np.arange(64), REDUCED)}


def head(ids=None):
  rows = np.asarray(target().module.head_weight(), np.float32)
  return rows if ids is None else rows[ids]


def nested(kind, layers, **own):
  """config.json of the package speculators."""
  return {
      "architectures": [f"{kind}Speculator"], "speculators_model_type": kind,
      "speculators_version": "0.9.0", "transformers_version": "5.15.0", "dtype": "float32",
      "speculators_config": {
          "algorithm": kind, "default_proposal_method": "greedy",
          "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
          "verifier": {"name_or_path": "org/name", "architectures": ["LlamaForCausalLM"]}},
      "transformer_layer_config": {
          **{k: v for k, v in SIZES.items() if k != "rope_theta"}, "num_hidden_layers": 2,
          "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **layers}, **own}


def as_layer(tensors):
  return {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}


def safeailab(folder):
  """As SafeAILab's first folders: no layers named, and nothing that says EAGLE."""
  return write(folder, {
      **SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
      "draft_vocab_size": len(REDUCED), "pretraining_tp": 1, "tie_word_embeddings": False,
      "use_cache": True, "bos_token_id": 1}, {
          **in_file("eagle3", build("eagle3")), **mapping(), "lm_head.weight": head(REDUCED)})


def of_vllm(folder):
  """As vLLM names everything: layer 0 of a model, layers counted from one."""
  tensors = as_layer(in_file("eagle3", build("eagle3")))
  return write(folder, {
      **SIZES, "architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama",
      "num_hidden_layers": 1, "draft_vocab_size": len(REDUCED),
      "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, {
          **{f"model.{name}": value for name, value in tensors.items()}, **mapping(),
          "lm_head.weight": head(REDUCED)})


def speculators_eagle3(folder):
  return write(folder, nested(
      "eagle3", {"model_type": "llama", "num_hidden_layers": 1, "attention_bias": False},
      draft_vocab_size=len(REDUCED), norm_before_residual=False, norm_before_fc=False,
      fc_norm=False, norm_output=False, embed_requires_grad=False, target_hidden_size=None,
      eagle_aux_hidden_state_layer_ids=[2, 4, 5]), {
          **as_layer(in_file("eagle3", build("eagle3"))), **mapping(),
          "lm_head.weight": head(REDUCED),
          "embed_tokens.weight": np.asarray(target().module.embed[...]),
          "verifier_norm.weight": np.ones(32, np.float32)})


def z_lab(folder):
  return write(folder, {
      **SIZES, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2,
      "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 5,
      "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 2, 5]},
      "num_target_layers": LAYERS, "layer_types": ["full_attention"] * 2, "max_window_layers": 2,
      "use_sliding_window": False, "sliding_window": None, "tie_word_embeddings": True},
      in_file("dflash", build("dflash")))


def speculators_dflash(folder):
  """With a reduced vocabulary, which z-lab's form has no place for."""
  return write(folder, nested(
      "dflash", {"model_type": "qwen3", "layer_types": ["full_attention"] * 2},
      draft_vocab_size=len(REDUCED), aux_hidden_state_layer_ids=[2, 3, 6], block_size=5,
      mask_token_id=MASK, sample_from_anchor=False, sliding_window_non_causal=False), {
          **in_file("dflash", build("dflash")), **mapping(), "lm_head.weight": head(REDUCED)})


def deepspec(folder):
  """As DSpark's authors write it: the method at the top level, frozen copies of the target."""
  return write(folder, {
      **SIZES, "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 2,
      "block_size": 4, "mask_token_id": MASK - 1, "target_layer_ids": [0, 3, 6],
      "markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True,
      "confidence_head_with_markov": True, "num_target_layers": LAYERS,
      "tie_word_embeddings": False}, {
          **in_file("dspark", build("dspark")), "lm_head.weight": head(),
          "embed_tokens.weight": np.asarray(target().module.embed[...])})


def speculators_dspark(folder):
  return write(folder, nested(
      "dspark", {"model_type": "qwen3"}, draft_vocab_size=len(REDUCED), block_size=4,
      aux_hidden_state_layer_ids=[1, 4, 7], mask_token_id=MASK - 1, sample_from_anchor=True,
      markov_rank=RANK, markov_head_type="vanilla", enable_confidence_head=True,
      confidence_head_with_markov=True), {
          **in_file("dspark", build("dspark", True)), **mapping(),
          "lm_head.weight": head(REDUCED)})


FOLDERS = {  # writer -> kind, whether its vocabulary is reduced
    safeailab: ("eagle3", True), of_vllm: ("eagle3", True), speculators_eagle3: ("eagle3", True),
    z_lab: ("dflash", False), speculators_dflash: ("dflash", True), deepspec: ("dspark", False),
    speculators_dspark: ("dspark", True)}


@functools.cache
def wanted(kind, reduced):
  return proposals(build(kind, reduced), target())


@pytest.mark.parametrize("writer", FOLDERS)
def test_every_form_is_the_drafter_it_states(tmp_path, writer):
  kind, reduced = FOLDERS[writer]
  assert published.is_published(writer(tmp_path / "d"))
  module, known = load(tmp_path / "d"), build(kind, reduced)
  assert module.kind == kind and module.config == known.config and not module.own_head
  assert module.options() == known.options()
  assert hasattr(module, "draft_ids") == reduced
  for name, value in known.own_tensors().items():
    np.testing.assert_array_equal(module.own_tensors()[name], value, err_msg=name)
  if writer in (of_vllm, speculators_dflash, speculators_dspark):  # the rest computes the same
    found = proposals(module, target())
    np.testing.assert_array_equal(found["greedy"], wanted(kind, reduced)["greedy"])
    np.testing.assert_allclose(found["probs"], wanted(kind, reduced)["probs"], atol=1e-6)


def test_what_speculators_leaves_unsaid_is_its_classes_default():
  flat = speculators.flattened(
      {"speculators_model_type": "dflash", "transformer_layer_config": {"model_type": "qwen3"}})
  assert (flat["head_dim"], flat["num_key_value_heads"], flat["rms_norm_eps"]) == (128, 32, 1e-6)
  assert flat["intermediate_size"] == 22016 and flat["vocab_size"] == 151936
  flat = speculators.flattened(
      {"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "llama"}})
  assert (flat["intermediate_size"], flat["max_position_embeddings"]) == (11008, 2048)
  assert "head_dim" not in flat and flat["architectures"] == ["LlamaForCausalLMEagle3"]


def test_a_head_that_a_folder_lacks_is_the_targets(tmp_path):
  fields = json.loads((of_vllm(tmp_path / "d") / "config.json").read_text())
  fields["draft_vocab_size"] = None
  write(tmp_path / "d", fields, in_file("eagle3", build("eagle3")))
  module = load(tmp_path / "d")
  assert not module.own_head and not hasattr(module, "draft_ids") and not hasattr(module, "head")


# Layers as of Qwen3, and a residual stream from the normed features.


def hand_layer(t, eps, embedded, fused, positions, normed, qk):
  """One pass of the EAGLE-3 layer over a text in numpy: [T, D] before the final norm."""
  norm = lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w
  g = norm(fused, t["hidden_norm"])
  x = np.concatenate([norm(embedded, t["attn_norm"]), g], -1)
  T = len(x)
  q, k, v = (x @ t[w].T for w in ("wq", "wk", "wv"))
  q, k, v = q.reshape(T, 4, 8), k.reshape(T, 2, 8), v.reshape(T, 2, 8)
  if qk:
    q, k = norm(q, t["q_norm"]), norm(k, t["k_norm"])
  angle = positions[:, None] * 10000.0 ** (-np.arange(4) / 4)
  cos, sin = (np.concatenate([f(angle)] * 2, -1)[:, None] for f in (np.cos, np.sin))
  turn = lambda y: y * cos + np.concatenate([-y[..., 4:], y[..., :4]], -1) * sin
  q, k = turn(q), turn(k)
  out = np.zeros((T, 4, 8))
  for n in range(4):
    scores = q[:, n] @ k[:, n // 2].T / np.sqrt(8)
    scores = np.where(np.tril(np.ones((T, T))) > 0, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out[:, n] = p / p.sum(-1, keepdims=True) @ v[:, n // 2]
  x = (g if normed else fused) + out.reshape(T, -1) @ t["wo"].T
  h = norm(x, t["mlp_norm"])
  gate = h @ t["w_gate"].T
  return x + (gate / (1 + np.exp(-gate)) * (h @ t["w_up"].T)) @ t["w_down"].T


@pytest.mark.parametrize("normed, qk", [(True, False), (True, True), (False, True)])
def test_layers_of_other_trainers(tmp_path, normed, qk):
  """As many folders of speculators have them: against one pass in numpy."""
  cfg = dataclasses.replace(config(), num_layers=1, qk_norm=qk)
  values = filled(eagle3.tensor_shapes(cfg, (1, 3, 4)), seed=8)
  values = {name: np.asarray(value, np.float32) for name, value in values.items()}
  rest = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
          "hidden_norm": "hidden_norm", "w_gate": "mlp.gate_proj", "w_up": "mlp.up_proj",
          "w_down": "mlp.down_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
          **{f"w{x}": f"self_attn.{x}_proj" for x in "qkvo"}}
  stored = {"fc.weight": values["fc"], "norm.weight": values["final_norm"],
            "lm_head.weight": head(REDUCED), **mapping()}
  layer = {name.removeprefix("layers.0."): value for name, value in values.items()}
  stored |= {f"layers.0.{rest[n]}.weight": layer[n] for n in layer if n in rest}
  write(tmp_path / "d", nested(
      "eagle3", {"model_type": "qwen3" if qk else "llama", "num_hidden_layers": 1},
      draft_vocab_size=len(REDUCED), norm_before_residual=normed,
      eagle_aux_hidden_state_layer_ids=[2, 4, 5]), stored)
  module = load(tmp_path / "d")
  assert module.config.qk_norm == qk and module.norm_before_residual == normed
  rng = np.random.default_rng(1)
  tokens, features = np.asarray([[5, 9, 33, 12, 40]]), rng.normal(size=(1, 5, 96))
  states = module.train_hidden(
      jnp.asarray(tokens), jnp.arange(5)[None], jnp.zeros((1, 5), jnp.int32),
      jnp.asarray(features, jnp.float32), target().module)
  embedded = np.asarray(target().module.embed[...])[np.roll(tokens[0], -1)]
  x = hand_layer(layer, 1e-5, embedded, features[0] @ values["fc"].T, np.arange(5), normed, qk)
  x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * values["final_norm"]
  np.testing.assert_allclose(states[0][0, :-1], x[:-1], atol=2e-4)
  # It goes where its folder says it may.
  drafters.save_drafter(tmp_path / "own", module, target())
  again = drafters.load_drafter(str(tmp_path / "own"), target()).module
  assert again.norm_before_residual == normed and again.config == module.config


def test_a_block_drafter_of_the_raw_embedding(tmp_path):
  """Beside a target that scales its embedding: readers of z-lab's form take the raw rows."""
  gemma = families.target("gemma3", num_layers=8, local_layers=(True, False) * 4)
  scale = gemma.config.embed_scale
  cfg = dataclasses.replace(gemma.config.plain(2), embed_scale=1.0)
  module = build("dflash", cfg=cfg, to=gemma)
  published.write_published(tmp_path / "d", module, gemma)
  assert fields_of(tmp_path / "d")["dflash_config"]["input_embedding_scale"] == scale
  assert load(tmp_path / "d", gemma).embed_scale is None
  section = fields_of(tmp_path / "d")["dflash_config"]
  toy.edit_json(tmp_path / "d" / "config.json",
                dflash_config={k: v for k, v in section.items() if "scale" not in k})
  raw = load(tmp_path / "d", gemma)
  assert raw.embed_scale == 1.0 and raw.options()["embed_scale"] == 1.0
  context = raw.context(jnp.ones((1, 3, 96)), jnp.arange(3)[None])
  args = (jnp.asarray([[9]]), jnp.asarray([[3]]), 5, context, jnp.ones((1, 1, 3), bool))
  values = {name: np.asarray(value) for name, value in canonical_tensors(gemma).items()}
  unscaled = tiny.make(dataclasses.replace(gemma.config, embed_scale=1.0), values)
  ours, theirs = (np.asarray(m.block_states(*args, t.module)) for m, t in (
      (raw, gemma), (module, unscaled)))
  np.testing.assert_allclose(ours, theirs, atol=1e-5)
  assert np.abs(ours - np.asarray(module.block_states(*args, gemma.module))).max() > 1e-2


# Small language models of every family, of other sizes than the target.


@pytest.mark.parametrize("family", [*families.CHANGES, "llama"])
def test_a_small_model_of_a_known_family_drafts(tmp_path, family):
  changes = families.CHANGES.get(family, {})
  cfg = tiny.config(**changes | {"hidden_size": 24, "bos_id": 0, "eos_ids": (2,), "pad_id": 0})
  if family == "gemma3":
    cfg = dataclasses.replace(cfg, embed_scale=24**0.5)
  write_folder(tmp_path / "m", cfg, families.tensors(cfg, 4), tiny.tokenizer())
  drafter = spec_jax.load_drafter(str(tmp_path / "m"), tiny.target())
  module = drafter.module
  assert module.kind == "small_lm" and module.own_head and module.config.hidden_size == 24
  assert module.config.architecture == cfg.architecture
  # What it has of its own stays with it.
  drafters.save_drafter(tmp_path / "own", module, tiny.target())
  again = spec_jax.load_drafter(str(tmp_path / "own"), tiny.target()).module
  np.testing.assert_array_equal(again.head[...], module.head[...])
  np.testing.assert_array_equal(again.embed[...], module.embed[...])
  if family in ("qwen3_moe", "gemma3"):
    prompts = [[5, 9, 11, 33], [40, 6]]
    options = dict(max_new_tokens=12, batch_size=2)
    plain = spec_jax.generate(tiny.target(), None, prompts, **options)
    ours = [spec_jax.generate(tiny.target(), d, prompts, draft_len=3, **options) for d in (
        drafter, drafters.wrap("small_lm", "again", again))]
    assert ours[0].tokens == ours[1].tokens == plain.tokens


# What does not match is refused with both values.


@pytest.mark.parametrize("writer, changes, match", [
    (z_lab, dict(hidden_size=64), "hidden_size=64 is not the target's 32"),
    (z_lab, dict(vocab_size=65), "vocab_size=65 is not the target's 64"),
    (safeailab, dict(target_hidden_size=48), "target_hidden_size=48 is not the target's 32"),
    (of_vllm, dict(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
     r"layers \[1, 3, 8\] \(outputs, from 0\) are not all of the target's 0..7"),
    (of_vllm, dict(eagle_aux_hidden_state_layer_ids=[0, 4, 5]), r"layers \[-1, 3, 4\] .* not all"),
    (speculators_dflash, dict(aux_hidden_state_layer_ids=[2, 3, 9]), r"\[1, 2, 8\] .* 0..7"),
    (speculators_dflash, dict(draft_vocab_size=9), r"head.weight has shape \[13, 32\].*\[9, 32\]"),
    (speculators_dflash, dict(sample_from_anchor=True), "sample_from_anchor=True is not supp"),
    (speculators_dflash, dict(speculators_model_type="peagle"), "speculators_model_type='peagle'"),
    (speculators_dflash, dict(speculators_model_type=["a"]), r"model_type=\['a'\] is not"),
    (speculators_dflash, dict(transformer_layer_config={"model_type": {}}), "model_type={} is not"),
    (speculators_dflash, dict(transformer_layer_config=3), "layer_config=3 must be an object"),
    (speculators_dspark, dict(sample_from_anchor=False), "sample_from_anchor=False is not supp"),
    (speculators_dspark, dict(markov_head_type="rnn"), "markov_head_type='rnn' is not supported"),
    (speculators_eagle3, dict(norm_before_fc=True), "norm_before_fc=True is not supported"),
    (speculators_eagle3, dict(embed_requires_grad=True), "embed_requires_grad=True is not supp"),
    (speculators_eagle3, dict(new_switch=1), "new_switch=1 is not known"),
    (deepspec, dict(markov_rank=7), r"markov_w1.weight has shape \[64, 6\].*\[64, 7\]"),
    (deepspec, dict(enable_confidence_head=False), "enable_confidence_head=False")])
def test_a_mismatch_is_refused_with_both_values(tmp_path, writer, changes, match):
  toy.edit_json(writer(tmp_path / "d") / "config.json", **changes)
  with pytest.raises(UserError, match=match):
    load(tmp_path / "d")


class Global:
  """Stands for a name that a pickle asks for."""

  def __init__(self, name):
    self.name = name


class Stored:
  """A storage of an archive of torch, pickled by its key."""

  def __init__(self, kind, key, size):
    self.pid = ("storage", Global(f"torch {kind}"), key, "cpu", size)


class Archive(pickle._Pickler):
  """Writes data.pkl as torch does, protocol 2, without torch."""

  def persistent_id(self, obj):
    return obj.pid if isinstance(obj, Stored) else None

  def save(self, obj, save_persistent_id=True):
    if isinstance(obj, Global):
      self.write(pickle.GLOBAL + obj.name.replace(" ", "\n").encode() + b"\n")
    elif isinstance(obj, tuple) and obj and isinstance(obj[0], Global):  # (name, arguments): a call
      self.save(obj[0])
      self.save(obj[1])
      self.write(pickle.REDUCE)
    else:
      super().save(obj, save_persistent_id)


def archive(path, tensors, call="torch._utils _rebuild_tensor_v2"):
  """tensors: name -> (storage type, array, offset, strides) with the array as it is stored."""
  named = {
      name: (Global(call), (Stored(kind, str(i), stored.size), offset, shape, strides, False, {}))
      for i, (name, (kind, stored, offset, shape, strides)) in enumerate(tensors.items())}
  out = io.BytesIO()
  Archive(out, 2).dump(named)
  with zipfile.ZipFile(path, "w") as file:
    file.writestr("archive/data.pkl", out.getvalue())
    file.writestr("archive/byteorder", b"little")
    for i, (_, stored, *_) in enumerate(tensors.values()):
      file.writestr(f"archive/data/{i}", np.ascontiguousarray(stored).tobytes())


def test_a_folder_of_torch_is_read_without_torch(tmp_path):
  """As SafeAILab publishes: pytorch_model.bin; one tensor is a transposed view."""
  folder = safeailab(tmp_path / "d")
  values = safetensors.numpy.load_file(folder / "model.safetensors")
  (folder / "model.safetensors").unlink()
  kinds = {"d2t": "LongStorage", "t2d": "BoolStorage", "norm.weight": "HalfStorage",
           "fc.weight": "BFloat16Storage"}
  low = {"HalfStorage": np.float16, "BFloat16Storage": ml_dtypes.bfloat16}
  stored = {}
  for name, value in values.items():
    kind = kinds.get(name, "FloatStorage")
    value = value.astype(low.get(kind, value.dtype))
    strides = [s // value.itemsize for s in value.strides]
    if name == "midlayer.self_attn.o_proj.weight":
      stored[name] = kind, np.concatenate([[9, 9], value.T.reshape(-1)]).astype(np.float32), 2, \
          value.shape, strides[::-1] if len(set(value.shape)) == 1 else [1, len(value)]
    else:
      stored[name] = kind, value, 0, value.shape, strides
  archive(folder / "pytorch_model.bin", stored)
  module, known = load(folder), build("eagle3")
  for name, value in known.own_tensors().items():
    near = 2**-7 if name in ("fc", "final_norm") else 0
    np.testing.assert_allclose(module.own_tensors()[name], value, rtol=near, err_msg=name)
  np.testing.assert_array_equal(module.draft_ids[...], REDUCED)
  # A pickle may run anything; here it may not.
  archive(folder / "pytorch_model.bin", stored, call="os system")
  with pytest.raises(UserError, match="asks for os.system, which is not needed for tensors"):
    load(folder)
  kind, value, _, shape, strides = stored["fc.weight"]
  archive(folder / "pytorch_model.bin", stored | {"fc.weight": (kind, value, 5, shape, strides)})
  with pytest.raises(UserError, match="cannot be read as tensors: .* leaves its storage"):
    load(folder)
  (folder / "pytorch_model.bin").write_bytes(b"PK nothing")
  with pytest.raises(UserError, match="pytorch_model.bin cannot be read as tensors"):
    load(folder)


def test_another_embedding_than_the_targets_is_refused(tmp_path):
  folder = deepspec(tmp_path / "d")
  values = safetensors.numpy.load_file(folder / "model.safetensors")
  values["embed_tokens.weight"] = values["embed_tokens.weight"][::-1].copy()
  safetensors.numpy.save_file(values, folder / "model.safetensors")
  with pytest.raises(UserError, match="embed_tokens.weight is not the target's"):
    load(folder)


assert set(KINDS) == {kind for kind, _ in FOLDERS.values()} == set(OPTIONS)
