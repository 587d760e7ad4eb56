"""`config.json` of the Hugging Face layout, family by family. Called by `DecoderConfig`.

A family is one row of FAMILIES: what its folders leave unsaid and what they may not say. A field
that changes what the model computes is read or refused, never passed over.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spec_jax.errors import UserError
from spec_jax.models.config import RopeScaling, yarn_magnitude

if TYPE_CHECKING:
  from spec_jax.models.config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Family:
  """One architecture of `config.json`.

  Attributes:
    name: `DecoderConfig.architecture`.
    model_type: of config.json.
    fixed: fields of DecoderConfig that the architecture itself decides.
    absent: field of config.json -> its value where the file has none.
    only: field of config.json -> the one value that is computed here.
  """

  name: str
  model_type: str
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  only: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_NO_BIAS = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_QWEN = {"use_mrope": False}
_QWEN3_MOE_EXPERTS = 128  # where the file says nothing
# architectures[0] -> family.
FAMILIES = {
    "LlamaForCausalLM": Family(
        "llama", "llama", absent={"max_position_embeddings": 2048},
        only=_NO_BIAS | {"sliding_window": None}),
    "MistralForCausalLM": Family(
        "mistral", "mistral",
        absent={"sliding_window": 4096, "max_position_embeddings": 131072},
        only=_NO_BIAS | {"layer_types": None}),
    "Qwen2ForCausalLM": Family(
        "qwen2", "qwen2", fixed={"qkv_bias": True},
        absent={"sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32768},
        only=_NO_BIAS | _QWEN | {"attention_bias": True}),
    "Qwen3ForCausalLM": Family(
        "qwen3", "qwen3", fixed={"qk_norm": True},
        absent={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28,
                "max_position_embeddings": 32768},
        only=_NO_BIAS | _QWEN),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", "qwen3_moe", fixed={"qk_norm": True},
        absent={"max_position_embeddings": 32768, "num_experts_per_tok": 8,
                "moe_intermediate_size": 768, "norm_topk_prob": False},
        only=_NO_BIAS | _QWEN | {
            "use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "Gemma3ForCausalLM": Family(
        "gemma3", "gemma3_text",
        fixed={"qk_norm": True, "sandwich_norms": True, "activation": "gelu_tanh"},
        absent={"head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256,
                "max_position_embeddings": 131072, "tie_word_embeddings": True,
                "sliding_window_pattern": 6},
        only={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
              "attn_logit_softcapping": None, "final_logit_softcapping": None,
              "use_bidirectional_attention": False}),
}
_BY_NAME = {family.name: (stated, family) for stated, family in FAMILIES.items()}
# architectures[0] of folders that hold a text model beside towers for other inputs -> model_type,
# architecture of the text model, and what `text_config` has where it is silent.
_WRAPPED = {
    "Gemma3ForConditionalGeneration": ("gemma3", "Gemma3ForCausalLM", {
        "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}),
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "low_freq_factor",
    "high_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "attention_factor", "mscale", "mscale_all_dim", "truncate", "finetuned"}


# What a field must be where it is stated. null stands for "as usual", except in _NEEDED.
_NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
           "num_attention_heads")
_WHOLE = (*_NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window",
          "max_window_layers", "sliding_window_pattern", "num_experts", "num_local_experts",
          "num_experts_per_tok", "moe_intermediate_size", "original_max_position_embeddings")
_REAL = ("rms_norm_eps", "rope_theta", "partial_rotary_factor", "rope_local_base_freq",
         "query_pre_attn_scalar", "factor", "low_freq_factor", "high_freq_factor", "beta_fast",
         "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
# Where null is as if the field were absent.
_UNSTATED = ("max_position_embeddings", "num_experts_per_tok", "moe_intermediate_size",
             "max_window_layers", "sliding_window_pattern", "norm_topk_prob")
_SWITCHES = ("tie_word_embeddings", "use_sliding_window", "norm_topk_prob", "truncate")
_FROM_ZERO = ("max_window_layers", "beta_fast", "beta_slow", "attention_factor", "mscale",
              "mscale_all_dim")  # the other numbers are above it
_KINDS = (dict.fromkeys(_WHOLE, (int, "a whole number")) | dict.fromkeys(_REAL, (
    (int, float), "a number")) | dict.fromkeys(("architectures", "layer_types"), (list, "a list"))
    | dict.fromkeys(("rope_scaling", "rope_parameters", _FULL, _SLIDING), (dict, "an object"))
    | dict.fromkeys(_SWITCHES, (bool, "true or false"))
    | {"rope_type": (str, "a text"), "type": (str, "a text")})


def _check_kinds(fields: Mapping[str, Any], within: str = "") -> None:
  """Refuses a value of another kind than its field has, and a number out of its range, by name."""
  for name, value in fields.items():
    kind, text = _KINDS.get(name, (object, ""))
    if value is None and name not in _NEEDED:
      continue
    if kind is not object and (
        not isinstance(value, kind) or isinstance(value, bool) != (kind is bool)):
      raise UserError(f"config.json field {within}{name}={value!r} must be {text}")
    if kind is list and not all(isinstance(entry, str) for entry in value):
      raise UserError(f"config.json field {within}{name}={value!r} must be a list of texts")
    if name in _WHOLE and value < (name not in _FROM_ZERO):
      raise UserError(f"config.json field {within}{name}={value} must be at least "
                      f"{int(name not in _FROM_ZERO)}")
    if name in _REAL and not (0 <= value < math.inf and (value or name in _FROM_ZERO)):
      raise UserError(f"config.json field {within}{name}={value} must be a number "
                      f"{'from 0 on' if name in _FROM_ZERO else 'above 0'}")
    if name == "partial_rotary_factor" and value > 1:
      raise UserError(f"config.json field {within}{name}={value} must be at most 1")
    if isinstance(value, dict) and kind is dict:
      _check_kinds(value, f"{within}{name}.")


def check_model_type(hf: Mapping[str, Any]) -> None:
  """Refuses a folder whose `architectures` and `model_type` are of different families: servers go
  by the one or by the other."""
  _check_kinds(hf)
  stated = (hf.get("architectures") or ["(none)"])[0]
  wanted = FAMILIES[stated].model_type if stated in FAMILIES else None
  if stated in _WRAPPED:
    wanted = _WRAPPED[stated][0]
  if wanted is not None and hf.get("model_type", wanted) != wanted:
    raise UserError(f"config.json says architectures={stated!r}, whose model_type is {wanted!r}, "
                    f"and model_type={hf['model_type']!r}")


def is_wrapped(hf: Mapping[str, Any]) -> bool:
  """Whether a folder holds its text model beside towers for other inputs, which are not read."""
  return (hf.get("architectures") or ["(none)"])[0] in _WRAPPED


def _text_part(hf: Mapping[str, Any]) -> Mapping[str, Any]:
  """The config of the text model alone."""
  if not is_wrapped(hf):
    return hf
  _, inner, silent = _WRAPPED[hf["architectures"][0]]
  text = hf.get("text_config")
  if not isinstance(text, Mapping):
    raise UserError(f"config.json field text_config={text!r} must be an object")
  check_model_type({"architectures": [inner]} | {
      name: text[name] for name in ("model_type",) if name in text})
  outer = ("quantization_config", "tie_word_embeddings", "eos_token_id", "bos_token_id",
           "pad_token_id")
  return silent | {name: hf[name] for name in outer if name in hf} | text | {
      "architectures": [inner]}


def read(hf: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of `DecoderConfig` that a config.json states.

  Raises:
    UserError: unknown architecture, an unsupported field value, or a missing field, by name.
  """
  _check_kinds(hf)
  hf = _text_part(hf)
  _check_kinds(hf)
  hf = {name: value for name, value in hf.items() if value is not None or name not in _REAL}
  stated = (hf.get("architectures") or ["(none)"])[0]
  if stated not in FAMILIES:
    known = ", ".join([*FAMILIES, *_WRAPPED])
    raise UserError(f"architectures={stated!r} is not supported (known: {known})")
  family = FAMILIES[stated]
  for field, only in {"quantization_config": None, **family.only}.items():
    # null stands for "nothing special" wherever a switch or a list is expected.
    if hf.get(field) not in (None, only):
      raise UserError(f"config.json field {field}={hf[field]!r} is not supported (only {only!r})")
  # null is no value where a size is expected, but "no window" of a sliding_window.
  hf = {name: value for name, value in hf.items() if value is not None or name not in _UNSTATED}
  get = lambda name, default=None: hf.get(name, family.absent.get(name, default))
  try:
    heads, hidden, layers = hf["num_attention_heads"], hf["hidden_size"], hf["num_hidden_layers"]
    eos = hf.get("eos_token_id")
    window, local = _windows(family, get, layers)
    return dict(
        vocab_size=hf["vocab_size"],
        hidden_size=hidden,
        intermediate_size=hf["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=get("head_dim") or hidden // heads,
        rms_norm_eps=float(get("rms_norm_eps", 1e-6)),
        max_position=get("max_position_embeddings"),
        tie_embeddings=bool(get("tie_word_embeddings", False)),
        bos_id=_or(hf.get("bos_token_id"), -1),
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        pad_id=_or(hf.get("pad_token_id"), -1),
        architecture=family.name,
        sliding_window=window,
        local_layers=local,
        **family.fixed,
        **_rope(family, hf),
        **_extras(family, get, hidden),
    )
  except KeyError as error:
    raise UserError(f"config.json has no field {error.args[0]!r}") from None


def _extras(family: Family, get, hidden: int) -> dict[str, Any]:
  if family.name == "qwen3_moe":
    # Published folders say num_experts, transformers 5 writes num_local_experts.
    stated = {value for name in ("num_experts", "num_local_experts")
              if (value := get(name)) is not None} or {_QWEN3_MOE_EXPERTS}
    if len(stated) > 1:
      raise UserError(f"config.json fields num_experts={get('num_experts')} and "
                      f"num_local_experts={get('num_local_experts')} disagree")
    return {"num_experts": stated.pop(), "experts_per_token": get("num_experts_per_tok"),
            "expert_size": get("moe_intermediate_size"), "norm_topk": bool(get("norm_topk_prob"))}
  if family.name == "gemma3":
    return {"embed_scale": hidden**0.5, "query_scalar": float(get("query_pre_attn_scalar"))}
  return {}


def _windows(family: Family, get, layers: int) -> tuple[int, tuple[bool, ...]]:
  """The window and which layers have it."""
  window, kinds = get("sliding_window"), get("layer_types")
  if family.name in ("llama", "qwen3_moe"):
    return 0, ()
  if family.name == "mistral":
    return window or 0, (window is not None,) * layers
  if family.name.startswith("qwen"):
    window = window if get("use_sliding_window") else None
    rule = [window is not None and i >= get("max_window_layers") for i in range(layers)]
  else:
    # Early folders call the field sliding_window_pattern, later ones hide it behind layer_types.
    rule = [(i + 1) % get("sliding_window_pattern") != 0 for i in range(layers)]
  if kinds is not None:
    if len(kinds) != layers or not set(kinds) <= {_FULL, _SLIDING}:
      raise UserError(f"config.json field layer_types={kinds} is not supported (only {_FULL} and "
                      f"{_SLIDING}, in each of the num_hidden_layers={layers})")
    rule = [kind == _SLIDING for kind in kinds]
  if any(rule) and window is None:
    raise UserError(f"config.json field layer_types={kinds} names sliding layers, but "
                    f"sliding_window={get('sliding_window')!r} with "
                    f"use_sliding_window={get('use_sliding_window')!r}")
  return window or 0, tuple(rule)


def _rope(family: Family, hf: Mapping[str, Any]) -> dict[str, Any]:
  """Bases and scaling; transformers 4 wrote rope_scaling, transformers 5 writes rope_parameters."""
  rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
  fields: dict[str, Any] = {}
  base = 10000.0
  if family.name == "gemma3":
    base, local = 1_000_000.0, hf.get("rope_local_base_freq", 10000.0)
    if _FULL in rope or _SLIDING in rope:
      sliding, rope = rope.get(_SLIDING) or {}, rope.get(_FULL) or {}
      if (kind := sliding.get("rope_type", "default")) != "default":
        raise UserError(f"config.json field rope_parameters.{_SLIDING}.rope_type={kind!r} is not "
                        "supported (only 'default')")
      local = sliding.get("rope_theta", local)
    fields["rope_local_theta"] = float(local)
  rope = {name: value for name, value in rope.items()
          if value is not None or name not in _ROPE_KEYS}
  return fields | {
      "rope_theta": float(rope.get("rope_theta", hf.get("rope_theta", base))),
      "rope_scaling": _scaling(rope, hf),
      "partial_rotary_factor": float(
          rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)))}


def _scaling(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> RopeScaling | None:
  if unknown := sorted(set(rope) - _ROPE_KEYS):
    raise UserError(f"rope_scaling field {unknown[0]}={rope[unknown[0]]!r} is not supported")
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind == "default":
    return None
  if kind == "linear":
    return RopeScaling("linear", float(rope["factor"]))
  if kind == "llama3":
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    if low >= high:
      raise UserError(f"rope_scaling field low_freq_factor={low} must be below "
                      f"high_freq_factor={high}")
    return RopeScaling("llama3", float(rope["factor"]), low, high,
                       int(rope["original_max_position_embeddings"]))
  if kind != "yarn":
    raise UserError(f"rope_scaling type {kind!r} is not supported (only linear, llama3, yarn)")
  stated = rope.get("original_max_position_embeddings")
  original = int(hf["max_position_embeddings"] if stated is None else stated)
  factor = rope.get("factor")
  factor = float(hf["max_position_embeddings"] / original if factor is None else factor)
  attention, mscale, all_dim = (
      rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
  if attention is None and mscale and all_dim:
    attention = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
  return RopeScaling(
      "yarn", factor, original_max_position=original,
      beta_fast=float(rope.get("beta_fast") or 32), beta_slow=float(rope.get("beta_slow") or 1),
      attention_factor=float(attention or 0), truncate=bool(rope.get("truncate", True)))


def write(config: "DecoderConfig") -> dict[str, Any]:
  """The fields of a stock config.json, inverse of `read`."""
  c = config
  stated, family = _BY_NAME[c.architecture]
  eos = list(c.eos_ids)
  fields = {
      "architectures": [stated],
      "model_type": family.model_type,
      "vocab_size": c.vocab_size,
      "hidden_size": c.hidden_size,
      "intermediate_size": c.intermediate_size,
      "num_hidden_layers": c.num_layers,
      "num_attention_heads": c.num_heads,
      "num_key_value_heads": c.num_kv_heads,
      "head_dim": c.head_dim,
      "hidden_act": "silu",
      "attention_bias": False,
      "mlp_bias": False,
      "rope_theta": c.rope_theta,
      "rope_scaling": _scaling_fields(c.rope_scaling),
      "partial_rotary_factor": c.partial_rotary_factor,
      "rms_norm_eps": c.rms_norm_eps,
      "max_position_embeddings": c.max_position,
      "tie_word_embeddings": c.tie_embeddings,
      "bos_token_id": None if c.bos_id < 0 else c.bos_id,
      "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
      "pad_token_id": None if c.pad_id < 0 else c.pad_id,
  }
  if c.architecture == "llama":
    return fields
  del fields["mlp_bias"]
  kinds = [_SLIDING if c.is_local(i) else _FULL for i in range(c.num_layers)]
  if c.architecture == "mistral":
    fields["sliding_window"] = c.sliding_window or None
  if c.architecture in ("qwen2", "qwen3"):
    fields |= {"layer_types": kinds, "sliding_window": c.sliding_window or None,
               "use_sliding_window": c.sliding_window > 0}
  if c.architecture in ("mistral", "qwen2"):
    del fields["attention_bias"]
  if c.architecture == "qwen3_moe":
    fields |= {
        "num_experts": c.num_experts, "num_experts_per_tok": c.experts_per_token,
        "moe_intermediate_size": c.expert_size, "norm_topk_prob": c.norm_topk,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
  if c.architecture == "gemma3":
    del fields["hidden_act"]
    fields |= {
        "hidden_activation": "gelu_pytorch_tanh", "layer_types": kinds,
        "rope_local_base_freq": c.rope_local_theta, "sliding_window": c.sliding_window or 4096,
        "query_pre_attn_scalar": _integral(c.query_scalar), "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "use_bidirectional_attention": False}
  return fields


def _scaling_fields(scaling: RopeScaling | None) -> dict[str, Any] | None:
  if scaling is None:
    return None
  fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
  if scaling.kind == "llama3":
    fields |= {"low_freq_factor": scaling.low_freq_factor,
               "high_freq_factor": scaling.high_freq_factor}
  if scaling.kind in ("llama3", "yarn"):
    fields["original_max_position_embeddings"] = scaling.original_max_position
  if scaling.kind == "yarn":
    fields |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow,
               "truncate": scaling.truncate}
    if scaling.attention_factor:
      fields["attention_factor"] = scaling.attention_factor
  return fields


def _integral(value: float) -> int | float:
  # transformers wants an int where it published one.
  return int(value) if math.floor(value) == value else value


def _or(value, default):
  return default if value is None else value
