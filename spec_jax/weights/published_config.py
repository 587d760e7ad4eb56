"""config.json of the published drafter forms: what it must say, and what it may not.

What a drafter computes depends on every field of its config, so the fields form a closed set: those
that are read, those of one value only, those that change nothing; any other one is refused by name.
Called by published.py.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from spec_jax.errors import UserError
from spec_jax.models.config import DecoderConfig
from spec_jax.target import Target

# Kind -> architectures and model_types of its config.json; the first of each is written. Early
# EAGLE-3 folders say LlamaForCausalLM and are known by their draft_vocab_size; a layer of qwen3 has
# norms of queries and keys.
FORMS = {
    "eagle3": (("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM",
                "Eagle3Qwen3ForCausalLM"), ("llama", "qwen3")),
    "dflash": (("DFlashDraftModel",), ("qwen3",)),
    "dspark": (("DFlashDraftModel", "DSparkDraftModel", "Qwen3DSparkModel"), ("qwen3",)),
}
_AUX = "eagle_aux_hidden_state_layer_ids"
_SPECULATORS_AUX = "aux_hidden_state_layer_ids"
SIGNS = ("eagle_config", "dflash_config", "draft_vocab_size", _AUX, "speculators_model_type")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
          "num_attention_heads", "max_position_embeddings")
_READ = {
    *_SIZES, "architectures", "model_type", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "rope_theta",
    "rope_scaling", "rope_parameters", "partial_rotary_factor", "hidden_act", "attention_bias",
    "mlp_bias", "quantization_config", "layer_types", "sliding_window", "draft_vocab_size",
    "target_hidden_size", "num_target_layers"}
_INERT = {
    "_name_or_path", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "initializer_range", "max_window_layers", "pad_token_id", "spec_jax", "torch_dtype",
    "transformers_version", "use_cache"}
_METHOD = ("block_size", "mask_token_id", "target_layer_ids")  # of the block drafters
_DSPARK_METHOD = ("markov_rank", "markov_head_type", "enable_confidence_head",
                  "confidence_head_with_markov")
_ROPE = {"rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "rope_theta",
         "original_max_position_embeddings", "partial_rotary_factor", "beta_fast", "beta_slow",
         "attention_factor", "mscale", "mscale_all_dim", "truncate"}
# Switches of public trainers and servers -> the one value that is computed here.
_ONLY = {"use_sliding_window": False, "pretraining_tp": 1}
_EAGLE3_ONLY = _ONLY | {
    "num_hidden_layers": 1, "tie_word_embeddings": False,
    "norm_before_fc": False, "fc_norm": False, "norm_output": False, "parallel_drafting": False}
_BLOCK_ONLY = _ONLY | {"is_causal": False}
_METHOD_ONLY = {"attention_mode": "gqa", "output_multiplier": 1.0, "final_logit_softcapping": 0.0}
_DSPARK_HEADS = {
    "projector_type": "dspark", "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True}

# Fields of a drafter's config that a folder does not state: they are the target's.
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_BORROWED = ("vocab_real", "bos_id", "eos_ids", "pad_id", "tie_embeddings")


# Layer numbering. Here and in the files of SGLang and DFlash, i is the output of layer i, from 0;
# in the fields that vLLM and speculators read, j is the output of layer j - 1. No other place
# converts.


def _tap_fields(kind: str, taps: Sequence[int]) -> dict[str, Any]:
  """Where the tapped layers stand in config.json (EAGLE-3) or in dflash_config."""
  if kind != "eagle3":
    return {"target_layer_ids": list(taps)}
  return {"eagle_config": {_AUX: list(taps), "use_aux_hidden_state": True},
          _AUX: [i + 1 for i in taps]}


def speculators_taps(kind: str, taps: Sequence[int]) -> dict[str, Any]:
  """Where the tapped layers stand in config.json of speculators."""
  return {_AUX if kind == "eagle3" else _SPECULATORS_AUX: [i + 1 for i in taps]}


def _taps(kind: str, fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
  """The tapped layers, 0-based outputs, that config.json names."""
  from spec_jax.drafters.eagle3 import eagle3_taps

  name = _AUX if kind == "eagle3" else "target_layer_ids"
  if kind == "eagle3":
    taps, after = _section(fields, "eagle_config").get(_AUX), fields.get(_AUX)
    if after is not None:
      before = [j - 1 for j in _wholes(name, after)]
      if taps and taps != before:
        raise UserError(f"eagle_config.{_AUX}={taps} and {_AUX}={after} disagree: the second must "
                        "count one more")
      taps = before
    taps = taps or list(eagle3_taps(num_layers))
  elif (after := fields.get(_SPECULATORS_AUX)) is not None:
    taps = [j - 1 for j in _wholes(_SPECULATORS_AUX, after)]
  else:
    taps = method_of(fields).get(name)
  if not isinstance(taps, list) or not all(type(i) is int for i in taps):
    raise UserError(f"config.json field {name}={taps!r} must be a list of layers")
  # The decoder returns them in this order and each once, whatever it is asked.
  if not taps or taps != sorted(set(taps)):
    raise UserError(f"{name}: layers {taps} must be given and ascend")
  if taps[0] < 0 or taps[-1] >= num_layers:
    raise UserError(f"{name}: layers {taps} (outputs, from 0) are not all of the target's "
                    f"0..{num_layers - 1}")
  return tuple(taps)


# Fields of config.json.


def fields_of(module: nnx.Module, config: DecoderConfig, target: Target) -> dict[str, Any]:
  """config.json of a drafter, as forms.py takes it on.

  Raises:
    UserError: reading it would not give the same drafter; names what has no place in the form.
  """
  kind, theirs = module.kind, target.config
  lent = {name: getattr(theirs, name) for name in _BORROWED}
  fields = dataclasses.replace(config, **lent | {"tie_embeddings": False}).to_hf()
  architectures, model_types = FORMS[kind]
  qwen = kind == "eagle3" and config.qk_norm
  fields |= {"architectures": [architectures[-1 if qwen else 0]],
             "model_type": model_types[-1 if qwen else 0], "torch_dtype": "float32"}
  if config.partial_rotary_factor == 1:  # stock configs lack the field
    del fields["partial_rotary_factor"]
  if kind == "eagle3":
    reduced = hasattr(module, "draft_ids")
    fields["draft_vocab_size"] = len(module.draft_ids[...]) if reduced else theirs.vocab_size
    fields |= _tap_fields(kind, module.taps)
    if module.norm_before_residual:
      fields["norm_before_residual"] = True
  else:
    method = {"mask_token_id": module.mask_id} | _tap_fields(kind, module.taps)
    scale = theirs.embed_scale if module.embed_scale is None else module.embed_scale
    if scale != 1:  # readers of the form take the raw rows of the embedding
      method["input_embedding_scale"] = scale
    if kind == "dspark":
      method |= _DSPARK_HEADS | {"markov_rank": module.markov_w1[...].shape[1]}
    del fields["mlp_bias"]
    fields |= {"block_size": module.block_size, "dflash_config": method,
               "num_target_layers": theirs.num_layers,
               "layer_types": ["full_attention"] * config.num_layers}
  _check_fields(kind, fields)
  found = _decoder_config(fields, target)
  for name in (f.name for f in dataclasses.fields(DecoderConfig) if f.name not in _BORROWED):
    if getattr(found, name) != getattr(config, name):
      raise UserError(f"the drafter's {name}={getattr(config, name)!r} has no place in the "
                      f"published form of {kind}")
  return fields


def described(
    fields: Mapping[str, Any], target: Target) -> tuple[str, DecoderConfig, dict[str, Any]]:
  """Kind, layers and options of the drafter that config.json describes."""
  kind = _kind(fields)
  _check_fields(kind, fields)
  config = _decoder_config(fields, target)
  options: dict[str, Any] = {"taps": _taps(kind, fields, target.config.num_layers)}
  if kind == "eagle3":
    normed = fields.get("norm_before_residual") or False
    if not isinstance(normed, bool):
      raise UserError(f"config.json field norm_before_residual={normed!r} must be true or false")
    options |= {"norm_before_residual": True} if normed else {}
  else:
    method = method_of(fields)
    scale = method.get("input_embedding_scale", 1.0)
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 < scale < math.inf:
      raise UserError(f"config.json field input_embedding_scale={scale!r} must be a number above 0")
    options |= {} if scale == target.config.embed_scale else {"embed_scale": float(scale)}
    mask, V = whole("mask_token_id", method.get("mask_token_id")), target.config.vocab_size
    if mask >= V:
      raise UserError(f"mask_token_id={mask} is no id of the target's 0..{V - 1}")
    # The anchor's slot of a DFlash block drafts nothing.
    size = whole("block_size", method.get("block_size"), 1 + (kind == "dflash"))
    options |= {"mask_id": mask, "block_size": size}
  return kind, config, options


def architecture(fields: Mapping[str, Any]) -> str:
  """The first of the architectures."""
  names = fields.get("architectures")
  return str(names[0]) if isinstance(names, list) and names else "(none)"


def _section(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
  value = fields.get(name)
  if not isinstance(value, dict | None):
    raise UserError(f"config.json field {name}={value!r} must be an object")
  return value or {}


def method_of(fields: Mapping[str, Any]) -> dict[str, Any]:
  """dflash_config, with what some folders state at the top level instead."""
  stated = _section(fields, "dflash_config")
  method = {name: value for name, value in stated.items() if value is not None}
  for name in (n for n in (*_METHOD, *_DSPARK_METHOD) if fields.get(n) is not None):
    if method.setdefault(name, fields[name]) != fields[name]:
      raise UserError(f"dflash_config.{name}={method[name]!r} and {name}={fields[name]!r} disagree")
  return method


def _kind(fields: Mapping[str, Any]) -> str:
  name = architecture(fields)
  if name in FORMS["eagle3"][0]:
    return "eagle3"
  projector = _section(fields, "dflash_config").get("projector_type")
  if name == "Qwen3DSparkModel" and projector is None:  # the method at the top level
    return "dspark"
  kind = "dflash" if projector is None else "dspark" if projector == "dspark" else None
  if name not in FORMS["dspark"][0]:
    known = dict.fromkeys(n for names, _ in FORMS.values() for n in names)
    raise UserError(f"architectures={name!r} is no drafter that is supported (known: "
                    f"{', '.join(known)})")
  if kind is None or name not in FORMS[kind][0]:
    raise UserError(f"dflash_config.projector_type={projector!r} of {name} is not supported (only "
                    "'dspark', or none in a DFlashDraftModel)")
  return kind


def _check_fields(kind: str, fields: Mapping[str, Any]) -> None:
  """Every field is known, and says what is computed here."""
  for name in _SIZES:
    whole(name, fields.get(name), 1)
  known = FORMS[kind][1]
  if fields.get("model_type") not in (None, *known):
    raise UserError(f"config.json field model_type={fields['model_type']!r} is not supported (only "
                    f"{' or '.join(map(repr, known))})")
  if kind == "eagle3":
    _closed("", fields, {*_READ, _AUX, "eagle_config", "norm_before_residual"}, _EAGLE3_ONLY)
    _closed("eagle_config.", _section(fields, "eagle_config"), {_AUX},
            {"use_aux_hidden_state": True})
  else:
    own = {"markov_rank", "confidence_head_alpha", "num_anchors"} if kind == "dspark" else set()
    heads = _DSPARK_HEADS if kind == "dspark" else {}
    _closed("", fields, {*_READ, *_METHOD, *own, "dflash_config", "tie_word_embeddings",
                         _SPECULATORS_AUX}, _BLOCK_ONLY | heads)
    _closed("dflash_config.", _section(fields, "dflash_config"),
            {*_METHOD, *own, "input_embedding_scale"}, _METHOD_ONLY | heads)
  for name in ("rope_parameters", "rope_scaling"):
    _closed(f"{name}.", _section(fields, name), _ROPE, {})
  one, two = (_section(fields, name) for name in ("rope_parameters", "rope_scaling"))
  if one and any(one.get(name) != value for name, value in two.items()):
    raise UserError(f"rope_parameters={one} and rope_scaling={two} disagree")
  layers, kinds = fields.get("num_hidden_layers"), fields.get("layer_types")
  if kinds is not None and kinds != ["full_attention"] * layers:
    raise UserError(f"layer_types={kinds} is not supported (only full_attention, in each of the "
                    f"num_hidden_layers={layers})")
  window = fields.get("sliding_window")
  if window is not None and kinds is None and fields.get("use_sliding_window") is not False:
    raise UserError(f"sliding_window={window} is not supported (only null)")


def _closed(
    where: str, values: Mapping[str, Any], known: set[str], only: Mapping[str, Any]) -> None:
  for name, value in values.items():
    if value is None or name in _INERT:
      continue
    if name in only and value != only[name]:
      raise UserError(f"config.json field {where}{name}={value!r} is not supported (only "
                      f"{only[name]!r})")
    if name not in only and name not in known:
      raise UserError(f"config.json field {where}{name}={value!r} is not known, and may change "
                      "what the drafter computes")


def _decoder_config(fields: Mapping[str, Any], target: Target) -> DecoderConfig:
  """The layers that config.json states, with vocabulary and special ids of the target."""
  theirs = target.config
  wanted = {"vocab_size": theirs.vocab_size, "hidden_size": theirs.hidden_size,
            "target_hidden_size": theirs.hidden_size, "num_target_layers": theirs.num_layers}
  for name, value in wanted.items():
    if fields.get(name, value) not in (None, value):
      raise UserError(f"{name}={fields[name]!r} is not the target's {value}")
  stated = {name: value for name, value in fields.items() if name not in _SPECIAL_IDS}
  config = DecoderConfig.from_hf({**stated, "architectures": ["LlamaForCausalLM"]})
  # The layers of a block drafter have these norms always, whatever the target has.
  qwen = _kind(fields) == "eagle3" and fields.get("model_type") == "qwen3"
  return dataclasses.replace(
      config, qk_norm=qwen, **{name: getattr(theirs, name) for name in _BORROWED})


def whole(name: str, value: Any, least: int = 0) -> int:
  """The value of a field that must be a whole number.

  Raises:
    UserError: it is none, or below `least`.
  """
  if not isinstance(value, int) or isinstance(value, bool) or value < least:
    raise UserError(f"config.json field {name}={value!r} must be a whole number from {least} on")
  return value


def _wholes(name: str, values: Any) -> list[int]:
  if not isinstance(values, list):
    raise UserError(f"config.json field {name}={values!r} must be a list of layers")
  return [whole(name, value) for value in values]
