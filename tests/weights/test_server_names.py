"""The loaders of vLLM and SGLang, as far as names go: every tensor that is written for them finds a
parameter, and every parameter that they need gets one.

Neither imports without a GPU. The tables below were read from these files; a server drops or
refuses what has no place in them.

| file | commit |
| --- | --- |
| vllm/model_executor/models/llama_eagle3.py | 00bd1493b3e8 |
| vllm/model_executor/models/qwen3_dflash.py | 036a00d1f5d0 |
| vllm/model_executor/models/qwen3_dspark.py | 0302ff404394 |
| vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py (layers that are read) | 0cfdd2e15d69 |
| sglang/srt/models/llama_eagle3.py | 03d5a7771f60 |
| sglang/srt/models/dflash.py | 003b23d7388e |
| sglang/srt/models/qwen3_dspark.py | 2dd29f7bf200 |
"""

import pytest

from spec_jax.weights import published
from spec_jax.weights.forms import Form
from tests.weights.test_published import LAYERS, OPTIONS, build, fields_of, target, tensors_of

STACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
           "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
LAYER = {"input_layernorm", "post_attention_layernorm", "self_attn.qkv_proj", "self_attn.o_proj",
         "mlp.gate_up_proj", "mlp.down_proj"}
NORMED = LAYER | {"self_attn.q_norm", "self_attn.k_norm"}
MARKOV = {"markov_head.markov_w1", "markov_head.markov_w2"}


def weights(prefix, *groups):
  return {f"{prefix}{name}.weight" for group in groups for name in group}


def blocks(prefix):
  return {name for i in range(2) for name in weights(f"{prefix}layers.{i}.", NORMED)}


# Parameters of each module: those that must be given, and those that may.
EAGLE3_VLLM = (weights("model.layers.0.", LAYER | {"hidden_norm"})
               | {"model.fc.weight", "model.norm.weight", "lm_head.weight"})
EAGLE3_SGLANG = (weights("model.midlayer.", LAYER | {"hidden_norm"})
                 | {"model.fc.weight", "model.norm.weight", "lm_head.weight"})
DFLASH = {"fc.weight", "hidden_norm.weight", "norm.weight"}
DFLASH_VLLM = blocks("model.") | {f"model.{name}" for name in DFLASH}
DSPARK_VLLM = DFLASH_VLLM | weights("model.", MARKOV) | {
    "model.confidence_head.proj.weight", "model.confidence_head.proj.bias"}
DSPARK_SGLANG = (DSPARK_VLLM - {"model.norm.weight"}) | {
    "model.shared_head.norm.weight", "model.embed_tokens.weight", "lm_head.weight"}
VOCABULARY = {"draft_id_to_target_id", "lm_head.weight"}


def stacked(name):
  for part, whole in STACKED.items():
    name = name.replace(f".{part}.", f".{whole}.")
  return name


def by_vllm(name):
  """Where load_weights puts a tensor; None for what it skips."""
  if "t2d" in name:
    return None
  if "d2t" in name:
    return name.replace("d2t", "draft_id_to_target_id")
  name = name if "lm_head" in name else f"model.{name}"
  return stacked(name.replace("midlayer.", "layers.0."))


def by_sglang_eagle3(name):
  if "d2t" in name:
    return "hot_token_id"  # no parameter: i + d2t[i]
  return None if "t2d" in name else stacked(name if "lm_head" in name else f"model.{name}")


def by_sglang_dflash(name):
  return stacked(name)


def by_sglang_dspark(name):
  top = {"norm.weight": "model.shared_head.norm.weight", "lm_head.weight": "lm_head.weight"}
  return top.get(name, stacked(f"model.{name}"))


@pytest.mark.parametrize("kind, form, reduced, rule, needed", [
    ("eagle3", "vllm", True, by_vllm, EAGLE3_VLLM | VOCABULARY),
    ("eagle3", "vllm", False, by_vllm, EAGLE3_VLLM | VOCABULARY),
    ("eagle3", "sglang", True, by_sglang_eagle3, EAGLE3_SGLANG | {"hot_token_id"}),
    ("eagle3", "hf", True, by_sglang_eagle3, EAGLE3_SGLANG | {"hot_token_id"}),
    ("dflash", "vllm", False, by_vllm, DFLASH_VLLM),
    ("dflash", "vllm", True, by_vllm, DFLASH_VLLM | VOCABULARY),
    ("dflash", "sglang", False, by_sglang_dflash, blocks("") | DFLASH),
    ("dflash", "sglang", True, by_sglang_dflash, blocks("") | DFLASH),
    ("dspark", "vllm", False, by_vllm, DSPARK_VLLM),
    ("dspark", "vllm", True, by_vllm, DSPARK_VLLM | VOCABULARY),
    ("dspark", "sglang", True, by_sglang_dspark, DSPARK_SGLANG),
    # vLLM takes a folder of speculators through the same loaders.
    ("eagle3", "speculators", True, by_vllm,
     EAGLE3_VLLM | VOCABULARY | {"model.embed_tokens.weight"}),
    ("dflash", "speculators", True, by_vllm, DFLASH_VLLM | VOCABULARY),
    ("dspark", "speculators", False, by_vllm, DSPARK_VLLM)])
def test_every_name_has_its_place(tmp_path, kind, form, reduced, rule, needed):
  published.write_published(
      tmp_path, build(kind, reduced), target(), form=Form(form, "org/name", 3))
  placed = [place for name in tensors_of(tmp_path) if (place := rule(name)) is not None]
  assert set(placed) == needed
  parts = len([place for place in placed if place.endswith(("qkv_proj.weight", "up_proj.weight"))])
  assert parts == 5 * (1 if kind == "eagle3" else 2)  # three and two to a stack


def vllm_layers(fields):
  """The states that vLLM captures, j behind layer j - 1 (`get_eagle3_aux_layers_from_config`)."""
  if ids := fields.get("eagle_aux_hidden_state_layer_ids"):
    return ids
  if ids := fields.get("dflash_config", {}).get("target_layer_ids"):
    return [i + 1 for i in ids]
  return [i + 1 for i in fields["target_layer_ids"]]


def sglang_layers(kind, fields):
  """The layers whose output SGLang captures; it adds one to read it before the next."""
  if kind == "eagle3":
    return fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
  return fields.get("dflash_config", fields)["target_layer_ids"]


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_both_read_the_layers_of_training(tmp_path, kind):
  """CASE 20: two servers that count differently."""
  taps = list(OPTIONS[kind]["taps"])
  assert max(taps) < LAYERS
  for form in ("vllm", "sglang"):
    published.write_published(tmp_path / form, build(kind), target(), form=Form(form))
  assert [j - 1 for j in vllm_layers(fields_of(tmp_path / "vllm"))] == taps
  assert sglang_layers(kind, fields_of(tmp_path / "sglang")) == taps
