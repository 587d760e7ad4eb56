"""Learned drafters in the folders that servers load, both ways: EAGLE-3, DFlash and DSpark.

A published folder holds config.json and model.safetensors (or shards with an index), and perhaps
the tokenizer. `load_drafter` asks `is_published` and reads with `read_published`;
`train_drafter/export.py` writes with `write_published`. FORMATS.md lists fields and tensors.

What a drafter computes depends on every field of its config, so the fields form a closed set: those
that are read, those of one value only, those that change nothing; any other one is refused by name.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from spec_jax.errors import UserError
from spec_jax.models.config import DecoderConfig
from spec_jax.target import Target
from spec_jax.tokenizer import Tokenizer, check_same_vocabulary
from spec_jax.weights import safetensors as folders
from spec_jax.weights.names import HF_NAMES, check_tensors, stored_name

# Kind -> architectures and model_type of its config.json; the first architecture is written. Early
# EAGLE-3 folders say LlamaForCausalLM and are known by their draft_vocab_size.
_FORMS = {
    "eagle3": (("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"), "llama"),
    "dflash": (("DFlashDraftModel",), "qwen3"),
    "dspark": (("DFlashDraftModel", "DSparkDraftModel"), "qwen3"),
}
_AUX = "eagle_aux_hidden_state_layer_ids"
_SIGNS = ("eagle_config", "dflash_config", "draft_vocab_size", _AUX)
_EAGLE3_NAMES = {
    "fc": "fc.weight",
    "final_norm": "norm.weight",
    "layers.{i}.hidden_norm": "midlayer.hidden_norm.weight",
    **{name: stored.replace("model.layers.{i}", "midlayer")
       for name, stored in HF_NAMES["llama"].items() if name.startswith("layers.")},
}

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
          "num_attention_heads", "max_position_embeddings")
_READ = {
    *_SIZES, "architectures", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta",
    "rope_scaling", "rope_parameters", "partial_rotary_factor", "hidden_act", "attention_bias",
    "mlp_bias", "quantization_config", "layer_types", "sliding_window", "draft_vocab_size",
    "target_hidden_size", "num_target_layers"}
_INERT = {
    "_name_or_path", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "initializer_range", "max_window_layers", "pad_token_id", "spec_jax", "torch_dtype",
    "transformers_version", "use_cache"}
_METHOD = ("block_size", "mask_token_id", "target_layer_ids")  # of the block drafters
_ROPE = {"rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "rope_theta",
         "original_max_position_embeddings", "partial_rotary_factor"}
# Switches of public trainers and servers -> the one value that is computed here.
_ONLY = {"use_sliding_window": False, "pretraining_tp": 1}
_EAGLE3_ONLY = _ONLY | {
    "num_hidden_layers": 1, "tie_word_embeddings": False, "norm_before_residual": False,
    "norm_before_fc": False, "fc_norm": False, "norm_output": False, "parallel_drafting": False}
_BLOCK_ONLY = _ONLY | {"is_causal": False}
_METHOD_ONLY = {"attention_mode": "gqa", "input_embedding_scale": 1.0, "output_multiplier": 1.0,
                "final_logit_softcapping": 0.0}
_DSPARK_HEADS = {
    "projector_type": "dspark", "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True}

# Fields of a drafter's config that a folder does not state: they are the target's.
_BORROWED = ("vocab_real", "bos_id", "eos_ids", "pad_id", "tie_embeddings")
_TYPES = {"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"}
_NEAR = 0.2  # relative distance up to which a copy of the target's embedding is a rounded one


@dataclasses.dataclass(frozen=True, eq=False)
class Published:
  """A drafter as read from a published folder; `drafters.build` takes these.

  Attributes:
    kind: eagle3, dflash or dspark.
    config: of its decoder layers; vocabulary and special ids are the target's.
    tensors: float32 by canonical name.
    options: taps, and mask_id and block_size of the block drafters.
    draft_ids: [Vd] ids that it can propose, None for all of them.
    head: [Vd, D] its own scoring rows, None where they are the target's.
  """

  kind: str
  config: DecoderConfig
  tensors: dict[str, np.ndarray]
  options: dict[str, Any]
  draft_ids: np.ndarray | None
  head: np.ndarray | None


def is_published(folder: str | Path) -> bool:
  """Whether config.json in `folder` describes a drafter of such a form, supported or not."""
  try:
    fields = folders._read_object(Path(folder) / "config.json")
  except UserError:
    return False
  drafters = {name for names, _ in _FORMS.values() for name in names} - {"LlamaForCausalLM"}
  return any(name in fields for name in _SIGNS) or _architecture(fields) in drafters


def read_published(folder: str | Path, target: Target) -> Published:
  """Reads a published drafter for a target.

  The embedding, and the head of a block drafter, are the target's: public folders often hold frozen
  copies, which are checked against it and not kept. An EAGLE-3 folder that names no layers was made
  for the default ones.

  Args:
    folder: with config.json and the weights.
    target: it lends what the folder does not hold, and it must be of the stated sizes.

  Raises:
    UserError: a field, value or tensor that is not supported, missing or not the target's, by name.
  """
  folder = Path(folder)
  fields = folders._read_object(folder / "config.json")
  try:
    kind, config, options = _described(fields, target)
  except UserError as error:
    raise UserError(f"{folder}: {error}") from None
  if target.tokenizer is not None and (folder / "tokenizer.json").is_file():
    check_same_vocabulary(Tokenizer.from_folder(folder), target.tokenizer)
  stored = _load(folder)
  try:
    head, ids = _vocabulary(kind, fields, stored, target)
    tensors = _canonical(kind, fields, stored, config, options["taps"])
  except UserError as error:
    raise UserError(f"{folder}: {error}") from None
  return Published(kind, config, tensors, options, ids, head)


def write_published(
    folder: str | Path, module: nnx.Module, target: Target,
    extra_config: Mapping[str, Any] | None = None) -> None:
  """Writes a drafter in the published form of its kind: float32 weights, config, tokenizer.

  The forms of the block drafters have no reduced vocabulary: such a folder proposes from all ids,
  and those that the drafter could not propose have a zero row in markov_w2.

  Args:
    folder: made when absent; config.json is written last.
    module: an Eagle3, DFlash or DSpark.
    target: that it drafts for.
    extra_config: further fields of config.json, of no effect on what is computed.

  Raises:
    UserError: the kind has no such form, or a setting of the drafter no place in it; by name.
  """
  folder, kind = Path(folder), module.kind
  if kind not in _FORMS:
    raise UserError(f"drafter kind={kind!r} has no published form (only {', '.join(_FORMS)})")
  config = module.config
  if module.rope_divisors is not None:
    divisors = np.asarray(module.rope_divisors)
    config = dataclasses.replace(config, rope_scaling=folders._scaling_of(divisors, config))
  fields = _fields(module, config, target)
  stored = _stored(module, target)
  folder.mkdir(parents=True, exist_ok=True)
  safetensors.numpy.save_file(
      {name: np.ascontiguousarray(value) for name, value in stored.items()},
      str(folder / folders._SINGLE), metadata={"format": "pt"})
  if target.tokenizer is not None:
    target.tokenizer.save(folder)
  folders._write_json(folder / "config.json", fields | dict(extra_config or {}))


# Layer numbering. Here and in the files of SGLang and DFlash, i is the output of layer i, from 0;
# in the field that vLLM reads, j is the output of layer j - 1. No other place converts.


def _tap_fields(kind: str, taps: Sequence[int]) -> dict[str, Any]:
  """Where the tapped layers stand in config.json (EAGLE-3) or in dflash_config."""
  if kind != "eagle3":
    return {"target_layer_ids": list(taps)}
  return {"eagle_config": {_AUX: list(taps), "use_aux_hidden_state": True},
          _AUX: [i + 1 for i in taps]}


def _taps(kind: str, fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
  """The tapped layers, 0-based outputs, that config.json names."""
  from spec_jax.drafters.eagle3 import eagle3_taps

  name = _AUX if kind == "eagle3" else "target_layer_ids"
  if kind == "eagle3":
    taps, after = _section(fields, "eagle_config").get(_AUX), fields.get(_AUX)
    if after is not None:
      before = [j - 1 for j in _wholes(name, after)]
      if taps is not None and taps != before:
        raise UserError(f"eagle_config.{_AUX}={taps} and {_AUX}={after} disagree: the second must "
                        "count one more")
      taps = before
    taps = list(eagle3_taps(num_layers)) if taps is None else taps
  else:
    taps = _method(fields).get(name)
  taps = _wholes(name, taps)
  # The decoder returns them in this order and each once, whatever it is asked.
  if not taps or taps != sorted(set(taps)):
    raise UserError(f"{name}: layers {taps} must be given and ascend")
  if taps[0] < 0 or taps[-1] >= num_layers:
    raise UserError(f"{name}: layers {taps} (outputs, from 0) are not all of the target's "
                    f"0..{num_layers - 1}")
  return tuple(taps)


# Fields of config.json.


def _fields(module: nnx.Module, config: DecoderConfig, target: Target) -> dict[str, Any]:
  """config.json of a drafter.

  Raises:
    UserError: reading it would not give the same drafter; names what has no place in the form.
  """
  kind, theirs = module.kind, target.config
  lent = {name: getattr(theirs, name) for name in _BORROWED}
  fields = dataclasses.replace(config, **lent | {"tie_embeddings": False}).to_hf()
  architectures, model_type = _FORMS[kind]
  fields |= {"architectures": [architectures[0]], "model_type": model_type,
             "torch_dtype": "float32"}
  if config.partial_rotary_factor == 1:  # stock configs lack the field
    del fields["partial_rotary_factor"]
  if kind == "eagle3":
    reduced = hasattr(module, "draft_ids")
    fields["draft_vocab_size"] = len(module.draft_ids[...]) if reduced else theirs.vocab_size
    fields |= _tap_fields(kind, module.taps)
  else:
    method = {"mask_token_id": module.mask_id} | _tap_fields(kind, module.taps)
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


def _described(
    fields: Mapping[str, Any], target: Target) -> tuple[str, DecoderConfig, dict[str, Any]]:
  """Kind, layers and options of the drafter that config.json describes."""
  kind = _kind(fields)
  _check_fields(kind, fields)
  config = _decoder_config(fields, target)
  options: dict[str, Any] = {"taps": _taps(kind, fields, target.config.num_layers)}
  if kind != "eagle3":
    method = _method(fields)
    options |= {"mask_id": _whole("mask_token_id", method.get("mask_token_id")),
                "block_size": _whole("block_size", method.get("block_size"))}
  return kind, config, options


def _architecture(fields: Mapping[str, Any]) -> str:
  names = fields.get("architectures")
  return str(names[0]) if isinstance(names, list) and names else "(none)"


def _section(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
  value = fields.get(name)
  if not isinstance(value, dict | None):
    raise UserError(f"config.json field {name}={value!r} must be an object")
  return value or {}


def _method(fields: Mapping[str, Any]) -> dict[str, Any]:
  """dflash_config, with what some folders state at the top level instead."""
  stated = _section(fields, "dflash_config")
  method = {name: value for name, value in stated.items() if value is not None}
  for name in (name for name in _METHOD if fields.get(name) is not None):
    if method.setdefault(name, fields[name]) != fields[name]:
      raise UserError(f"dflash_config.{name}={method[name]!r} and {name}={fields[name]!r} disagree")
  return method


def _kind(fields: Mapping[str, Any]) -> str:
  name = _architecture(fields)
  if name in _FORMS["eagle3"][0]:
    return "eagle3"
  projector = _section(fields, "dflash_config").get("projector_type")
  kind = {None: "dflash", "dspark": "dspark"}.get(projector)
  if name not in _FORMS["dspark"][0]:
    known = dict.fromkeys(n for names, _ in _FORMS.values() for n in names)
    raise UserError(f"architectures={name!r} is no drafter that is supported (known: "
                    f"{', '.join(known)})")
  if kind is None or name not in _FORMS[kind][0]:
    raise UserError(f"dflash_config.projector_type={projector!r} of {name} is not supported (only "
                    "'dspark', or none in a DFlashDraftModel)")
  return kind


def _check_fields(kind: str, fields: Mapping[str, Any]) -> None:
  """Every field is known, and says what is computed here."""
  for name in _SIZES:
    _whole(name, fields.get(name), 1)
  if kind == "eagle3":
    _closed("", fields, {*_READ, _AUX, "eagle_config"},
            _EAGLE3_ONLY | {"model_type": _FORMS[kind][1]})
    _closed("eagle_config.", _section(fields, "eagle_config"), {_AUX},
            {"use_aux_hidden_state": True})
  else:
    _closed("", fields, {*_READ, *_METHOD, "dflash_config", "tie_word_embeddings"},
            _BLOCK_ONLY | {"model_type": _FORMS[kind][1]})
    _closed("dflash_config.", _section(fields, "dflash_config"),
            {*_METHOD, "markov_rank", "confidence_head_alpha", "num_anchors"},
            _METHOD_ONLY | _DSPARK_HEADS if kind == "dspark" else _METHOD_ONLY)
    if fields.get("draft_vocab_size") not in (None, fields.get("vocab_size")):
      raise UserError(f"draft_vocab_size={fields['draft_vocab_size']!r} differs from vocab_size="
                      f"{fields.get('vocab_size')!r}: the form of {kind} has no reduced vocabulary")
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
  config = DecoderConfig.from_hf({**fields, "architectures": ["LlamaForCausalLM"]})
  return dataclasses.replace(config, **{name: getattr(theirs, name) for name in _BORROWED})


def _whole(name: str, value: Any, least: int = 0) -> int:
  if not isinstance(value, int) or isinstance(value, bool) or value < least:
    raise UserError(f"config.json field {name}={value!r} must be a whole number from {least} on")
  return value


def _wholes(name: str, values: Any) -> list[int]:
  if not isinstance(values, list):
    raise UserError(f"config.json field {name}={values!r} must be a list of layers")
  return [_whole(name, value) for value in values]


# Tensors.


def _names(kind: str) -> dict[str, str]:
  """Canonical name -> stored name."""
  from spec_jax.drafters import dflash, dspark

  return {"eagle3": _EAGLE3_NAMES, "dflash": dflash.EXPORT_NAMES,
          "dspark": dspark.EXPORT_NAMES}[kind]


def _shapes(
    kind: str, config: DecoderConfig, taps: tuple[int, ...], rank: int,
) -> dict[str, tuple[int, ...]]:
  """Shape of every tensor in the file, by canonical name."""
  from spec_jax.drafters import dflash, dspark, eagle3

  if kind != "dspark":
    return {"eagle3": eagle3, "dflash": dflash}[kind].tensor_shapes(config, taps)
  shapes = dspark.tensor_shapes(config, taps, rank)
  return shapes | {"confidence": (1, *shapes["confidence"])}


def _stored(module: nnx.Module, target: Target) -> dict[str, np.ndarray]:
  """The tensors of the file by stored name."""
  kind, V = module.kind, target.config.vocab_size
  tensors = {name: np.asarray(value, np.float32) for name, value in module.own_tensors().items()}
  reduced = hasattr(module, "draft_ids")
  ids = np.asarray(module.draft_ids[...], np.int64) if reduced else np.arange(V)
  if kind == "dspark":
    tensors["confidence"] = tensors["confidence"][None]
    rows = np.zeros((V, tensors["markov_w2"].shape[1]), np.float32)
    rows[ids] = tensors["markov_w2"]
    tensors["markov_w2"] = rows
  stored = {stored_name(_names(kind), name): value for name, value in tensors.items()}
  if kind == "eagle3":
    head = np.asarray(module.head_weight(target.module), np.float32)
    # Ascending, because trainers take the draft's columns of a target by the mask t2d.
    order = np.argsort(ids)
    stored |= {"lm_head.weight": head[order], "d2t": ids[order] - np.arange(len(ids)),
               "t2d": np.isin(np.arange(V), ids)}
  return stored


def _load(folder: Path) -> dict[str, np.ndarray]:
  """Every tensor of a folder by stored name, as stored."""
  where, stored = folders._find_tensors(folder), {}
  for path in sorted(set(where.values())):
    with safetensors.safe_open(path, framework="numpy") as file:
      present = set(file.keys())
      for name in (name for name, at in where.items() if at == path):
        if name not in present:
          raise UserError(f"{path} has no tensor {name}, which the index says it holds")
        if (kind := file.get_slice(name).get_dtype()) not in _TYPES:
          raise UserError(f"{path}: tensor {name} has type {kind}, which is not supported (only "
                          f"{', '.join(sorted(_TYPES))})")
        stored[name] = file.get_tensor(name)
  return stored


def _canonical(
    kind: str, fields: Mapping[str, Any], stored: dict[str, np.ndarray], config: DecoderConfig,
    taps: tuple[int, ...]) -> dict[str, np.ndarray]:
  """The drafter's own tensors, float32 by canonical name; `stored` holds no others."""
  names = _names(kind)
  if kind == "eagle3":  # servers rename the layer
    stored = {name.replace("layers.0.", "midlayer."): value for name, value in stored.items()}
  bias = stored.pop("confidence_head.proj.bias", None) if kind == "dspark" else None
  if bias is not None and np.any(bias):
    raise UserError(f"tensor confidence_head.proj.bias={bias.tolist()} is not supported (only 0)")
  rank = _whole("markov_rank", _method(fields).get("markov_rank")) if kind == "dspark" else 0
  shapes = _shapes(kind, config, taps, rank)
  check_tensors(shapes, {name: value.shape for name, value in stored.items()}, names,
                "model.safetensors")
  tensors = {name: stored[stored_name(names, name)].astype(np.float32) for name in shapes}
  if kind == "dspark":
    tensors["confidence"] = tensors["confidence"][0]
  return tensors


def _vocabulary(
    kind: str, fields: Mapping[str, Any], stored: dict[str, np.ndarray], target: Target,
) -> tuple[np.ndarray | None, np.ndarray | None]:
  """Takes embedding, head and vocabulary map out of `stored`; gives the drafter's own head and ids.

  Returns:
    [Vd, D] head, None where it is the target's; [Vd] target ids, None for the whole vocabulary.
  """
  embed, head = (stored.pop(name, None) for name in ("embed_tokens.weight", "lm_head.weight"))
  if embed is not None:
    _check_copy("embed_tokens.weight", embed, target.module.embed[...])
  rows = target.module.head_weight()
  if kind != "eagle3":
    if head is not None:
      _check_copy("lm_head.weight", head, rows)
    return None, None
  V, D = rows.shape
  size = fields.get("draft_vocab_size")
  size = V if size is None else _whole("draft_vocab_size", size)
  if head is None:
    raise UserError("has no tensor lm_head.weight")
  if head.shape != (size, D):
    raise UserError(f"tensor lm_head.weight has shape {list(head.shape)}, not [draft_vocab_size, "
                    f"hidden_size] = [{size}, {D}]")
  ids = _draft_ids(size, V, stored)
  theirs = np.asarray(rows if ids is None else rows[ids])
  own = None if np.array_equal(head.astype(theirs.dtype), theirs) else head.astype(np.float32)
  return own, ids


def _draft_ids(size: int, vocab_size: int, stored: dict[str, np.ndarray]) -> np.ndarray | None:
  """[Vd] target ids from the offsets d2t; None when they are all ids in order."""
  offsets, mask = stored.pop("d2t", None), stored.pop("t2d", None)
  if offsets is None:
    if size != vocab_size:
      raise UserError(f"has no tensor d2t, which draft_vocab_size={size} needs")
    offsets = np.zeros(size, np.int64)
  if offsets.shape != (size,):
    raise UserError(f"tensor d2t has shape {list(offsets.shape)}, not draft_vocab_size={size}")
  ids = np.arange(size) + offsets
  outside = ids[(ids < 0) | (ids >= vocab_size)]
  if len(outside) or len(np.unique(ids)) != size:
    wrong = f"id {outside[0]}" if len(outside) else "an id twice"
    raise UserError(f"tensor d2t gives {wrong}: its offsets must lead to {size} ids in "
                    f"0..{vocab_size - 1}")
  if mask is not None and not np.array_equal(mask, np.isin(np.arange(vocab_size), ids)):
    raise UserError("tensors d2t and t2d name different ids")
  return None if not offsets.any() and size == vocab_size else ids.astype(np.int32)


def _check_copy(name: str, copy: np.ndarray, original: Any) -> None:
  """A frozen copy of a tensor of the target may be rounded, or the target's be, but no other."""
  if copy.shape != original.shape:
    raise UserError(f"tensor {name} has shape {list(copy.shape)}, the target's "
                    f"{list(original.shape)}")
  ours, theirs = np.asarray(copy, np.float32), np.asarray(original, np.float32)
  far = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
  if not far <= _NEAR:
    raise UserError(f"tensor {name} is not the target's, which the drafter would read instead: "
                    f"they differ by {far:.0%}")
