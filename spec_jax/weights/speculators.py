"""config.json of the `speculators` package (vLLM): what nests there, flat as in the other forms.

The layers stand in transformer_layer_config, from which the package leaves out what equals the
defaults of its config class; what belongs to the method stands beside it. Called by published.py,
which checks the fields as those of any other form, and by forms.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from spec_jax.errors import UserError
from spec_jax.weights import published_config

# The class of transformer_layer_config by its model_type -> values that it leaves unsaid
# (transformers 5.15.0).
_ABSENT = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6},
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
}
_CLASSES = {"eagle3": "Eagle3Speculator", "dflash": "DFlashSpeculator",
            "dspark": "DSparkSpeculator"}
_ARCHITECTURES = {"eagle3": "LlamaForCausalLMEagle3", "dflash": "DFlashDraftModel",
                  "dspark": "Qwen3DSparkModel"}
_COMMON = ("draft_vocab_size", "target_hidden_size")
_READ = {
    "eagle3": ("eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc",
               "fc_norm", "norm_output"),
    "dflash": ("aux_hidden_state_layer_ids", "block_size", "mask_token_id"),
    "dspark": ("aux_hidden_state_layer_ids", "block_size", "mask_token_id", "markov_rank",
               "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")}
# Switches -> the one value that is computed here. A drafter that samples at the anchor drafts one
# token more: dspark does, dflash does not.
_ONLY = {
    "eagle3": {"embed_requires_grad": False},
    "dflash": {"sample_from_anchor": False, "sliding_window_non_causal": False},
    "dspark": {"sample_from_anchor": True, "sliding_window_non_causal": False}}
_INERT = {"architectures", "auto_map", "dtype", "model_type", "spec_jax", "speculators_config",
          "speculators_model_type", "speculators_version", "tie_word_embeddings", "torch_dtype",
          "transformer_layer_config", "transformers_version"}
VERSION = "0.9.0"  # of the package whose classes read what is written here


def is_speculators(fields: Mapping[str, Any]) -> bool:
  """Whether config.json is one of the package's."""
  return "speculators_model_type" in fields


def flattened(fields: Mapping[str, Any]) -> dict[str, Any]:
  """The same drafter as config.json of the other forms states it, with layers counted as here.

  Raises:
    UserError: the kind or a field is not supported, by name.
  """
  kind = fields["speculators_model_type"]
  if not isinstance(kind, str) or kind not in _CLASSES:
    raise UserError(f"speculators_model_type={kind!r} is not supported (known: "
                    f"{', '.join(_CLASSES)})")
  layers = fields.get("transformer_layer_config")
  if not isinstance(layers, Mapping):
    raise UserError(f"config.json field transformer_layer_config={layers!r} must be an object")
  model_type = layers.get("model_type", "qwen3")  # the package's own default
  if not isinstance(model_type, str) or model_type not in _ABSENT:
    raise UserError(f"transformer_layer_config.model_type={model_type!r} is not supported (known: "
                    f"{', '.join(_ABSENT)})")
  for name, value in fields.items():
    only = _ONLY[kind]
    if name in only and value not in (None, only[name]):
      raise UserError(f"config.json field {name}={value!r} is not supported (only {only[name]!r})")
    if name not in {*_INERT, *_COMMON, *_READ[kind], *only} and value is not None:
      raise UserError(f"config.json field {name}={value!r} is not known, and may change what the "
                      "drafter computes")
  stated = {name: value for name, value in layers.items() if value is not None}
  own = {name: fields[name] for name in (*_COMMON, *_READ[kind]) if fields.get(name) is not None}
  architecture = _ARCHITECTURES[kind]
  if kind == "eagle3" and model_type == "qwen3":
    architecture = "Eagle3Qwen3ForCausalLM"
  return {**_ABSENT[model_type], **stated, "model_type": model_type, **own,
          "architectures": [architecture]}


def nested(
    fields: Mapping[str, Any], kind: str, taps: Sequence[int], target: Mapping[str, Any],
    draft_len: int) -> dict[str, Any]:
  """config.json of the package from the flat one.

  Args:
    fields: as `published_config.fields_of` gives them.
    kind: of the drafter.
    taps: layers that it reads, 0-based outputs.
    target: "name_or_path" and "architectures" of the model that verifies.
    draft_len: K that a server drafts unless it is told another.
  """
  layers = {name: fields[name] for name in (
      "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
      "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
      "attention_bias")}
  rope = {"rope_type": "default"} | dict(fields.get("rope_scaling") or {})
  rope["rope_theta"] = fields["rope_theta"]
  if fields.get("partial_rotary_factor", 1) != 1:
    rope["partial_rotary_factor"] = fields["partial_rotary_factor"]
  layers |= {"model_type": fields["model_type"], "rope_parameters": rope,
             "tie_word_embeddings": False}
  method = dict(fields.get("dflash_config") or {})
  own = {"draft_vocab_size": fields.get("draft_vocab_size") or fields["vocab_size"]}
  own |= published_config.speculators_taps(kind, taps)
  if kind == "eagle3":
    own |= {"norm_before_residual": bool(fields.get("norm_before_residual")),
            "norm_before_fc": False, "fc_norm": False, "norm_output": False}
  else:
    layers["layer_types"] = fields["layer_types"]
    own |= {"block_size": fields["block_size"], "mask_token_id": method["mask_token_id"]}
    own |= _ONLY[kind] | {name: method[name] for name in _READ[kind] if name in method}
  return {
      "architectures": [_CLASSES[kind]], "speculators_model_type": kind,
      "speculators_version": VERSION, "dtype": "float32", **own, "transformer_layer_config": layers,
      "speculators_config": {
          "algorithm": kind, "default_proposal_method": "greedy",
          "proposal_methods": [{
              "proposal_type": "greedy", "speculative_tokens": draft_len, "verifier_accept_k": 1,
              "accept_tolerance": 0.0}],
          "verifier": dict(target)}}
