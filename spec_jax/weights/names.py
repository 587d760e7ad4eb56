"""Tensor names per family: canonical <-> Hugging Face, canonical <-> GGUF, and their check.

Canonical names are those of the decoder; every matrix is [out, in]. Read by both loaders and the
exports, so that a family is described in one place.
"""

from collections.abc import Iterable, Mapping

from spec_jax.errors import UserError

_LLAMA_HF = {
    "embed": "model.embed_tokens.weight",
    "layers.{i}.attn_norm": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.wq": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.wk": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.wv": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.wo": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.w_gate": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.w_up": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.w_down": "model.layers.{i}.mlp.down_proj.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}

_LLAMA_GGUF = {
    "embed": "token_embd.weight",
    "layers.{i}.attn_norm": "blk.{i}.attn_norm.weight",
    "layers.{i}.wq": "blk.{i}.attn_q.weight",
    "layers.{i}.wk": "blk.{i}.attn_k.weight",
    "layers.{i}.wv": "blk.{i}.attn_v.weight",
    "layers.{i}.wo": "blk.{i}.attn_output.weight",
    "layers.{i}.mlp_norm": "blk.{i}.ffn_norm.weight",
    "layers.{i}.w_gate": "blk.{i}.ffn_gate.weight",
    "layers.{i}.w_up": "blk.{i}.ffn_up.weight",
    "layers.{i}.w_down": "blk.{i}.ffn_down.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "rope_freqs": "rope_freqs.weight",
}

_DENSE = ("layers.{i}.w_gate", "layers.{i}.w_up", "layers.{i}.w_down")


def _without(names: Mapping[str, str], left_out: tuple[str, ...]) -> dict[str, str]:
  return {name: stored for name, stored in names.items() if name not in left_out}


_QWEN2_HF = _LLAMA_HF | {
    f"layers.{{i}}.b{x}": f"model.layers.{{i}}.self_attn.{x}_proj.bias" for x in "qkv"}
_QWEN3_HF = _LLAMA_HF | {
    f"layers.{{i}}.{x}_norm": f"model.layers.{{i}}.self_attn.{x}_norm.weight" for x in "qk"}
# {e}: one stored tensor for each expert, which make one array here.
_QWEN3_MOE_HF = _without(_QWEN3_HF, _DENSE) | {
    "layers.{i}.router": "model.layers.{i}.mlp.gate.weight",
    **{f"layers.{{i}}.experts_{x}": f"model.layers.{{i}}.mlp.experts.{{e}}.{x}_proj.weight"
       for x in ("gate", "up", "down")}}
_GEMMA3_HF = _QWEN3_HF | {
    "layers.{i}.attn_post_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "layers.{i}.mlp_post_norm": "model.layers.{i}.post_feedforward_layernorm.weight"}

_PLAIN_GGUF = _without(_LLAMA_GGUF, ("rope_freqs",))
_QWEN2_GGUF = _PLAIN_GGUF | {f"layers.{{i}}.b{x}": f"blk.{{i}}.attn_{x}.bias" for x in "qkv"}
_QWEN3_GGUF = _PLAIN_GGUF | {
    f"layers.{{i}}.{x}_norm": f"blk.{{i}}.attn_{x}_norm.weight" for x in "qk"}
_QWEN3_MOE_GGUF = _without(_QWEN3_GGUF, _DENSE) | {
    "layers.{i}.router": "blk.{i}.ffn_gate_inp.weight",
    **{f"layers.{{i}}.experts_{x}": f"blk.{{i}}.ffn_{x}_exps.weight"
       for x in ("gate", "up", "down")}}
_GEMMA3_GGUF = _QWEN3_GGUF | {
    "layers.{i}.attn_post_norm": "blk.{i}.post_attention_norm.weight",
    "layers.{i}.mlp_post_norm": "blk.{i}.post_ffw_norm.weight"}

# DecoderConfig.architecture -> map.
HF_NAMES = {"llama": _LLAMA_HF, "mistral": _LLAMA_HF, "qwen2": _QWEN2_HF, "qwen3": _QWEN3_HF,
            "qwen3_moe": _QWEN3_MOE_HF, "gemma3": _GEMMA3_HF}
GGUF_NAMES = {"llama": _LLAMA_GGUF, "qwen2": _QWEN2_GGUF, "qwen3": _QWEN3_GGUF,
              "qwen3_moe": _QWEN3_MOE_GGUF, "gemma3": _GEMMA3_GGUF}

# Where folders with towers for other inputs keep the text model (what takes the place of "model."
# in the names above), newest first, and the towers, which are not read.
HF_TEXT_PREFIXES = ("model.language_model.", "language_model.model.")
HF_TOWERS = tuple(prefix + tower for prefix in ("model.", "")
                  for tower in ("vision_tower.", "multi_modal_projector."))

# Families whose Hugging Face folders store norm weights as what is added to one. GGUF files, and
# everything here, hold the sum.
HF_NORMS_LESS_ONE = {"gemma3"}

# Buffers that old exports stored and that follow from the config.
IGNORED_HF_SUFFIXES = ("rotary_emb.inv_freq",)


def of_text_tower(
    names: Mapping[str, str], found: Iterable[str]) -> dict[str, str]:
  """A family's map for a folder that holds the text model beside other towers.

  Args:
    names: of a folder of the text model alone.
    found: names of the tensors in the folder.
  """
  found = tuple(found)
  prefix = next((p for p in HF_TEXT_PREFIXES if any(name.startswith(p) for name in found)),
                HF_TEXT_PREFIXES[0])
  head = "lm_head.weight" if prefix == HF_TEXT_PREFIXES[0] else "language_model.lm_head.weight"
  return {name: head if name == "head" else prefix + stored.removeprefix("model.")
          for name, stored in names.items()}


def stored_name(names: Mapping[str, str], canonical: str) -> str:
  """The name a canonical tensor has in a file, e.g. "layers.3.wq" -> "blk.3.attn_q.weight"."""
  parts = canonical.split(".")
  if parts[0] == "layers" and len(parts) == 3:
    return names[f"layers.{{i}}.{parts[2]}"].replace("{i}", parts[1])
  return names[canonical]


def stored_parts(
    names: Mapping[str, str], canonical: str, shape: tuple[int, ...],
) -> dict[str, tuple[int, ...]]:
  """The stored tensors that make up a canonical one, in order, and their shapes."""
  name = stored_name(names, canonical)
  if "{e}" not in name:
    return {name: shape}
  return {name.format(e=e): shape[1:] for e in range(shape[0])}


def check_tensors(
    needed: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str],
    where: str,
) -> None:
  """Checks that a file holds exactly the tensors a decoder needs.

  Args:
    needed: canonical name -> shape.
    found: stored name -> shape.
    names: the family's map.
    where: the file or folder, for messages.

  Raises:
    UserError: names the tensor that is missing, has another shape, or is not known. A tensor that
      is not known (a bias, an expert) changes what the model computes, so it is not skipped.
  """
  wanted: dict[str, tuple[int, ...]] = {}
  for name, shape in needed.items():
    wanted |= stored_parts(names, name, shape)
  for name, shape in wanted.items():
    if name not in found:
      raise UserError(f"{where} has no tensor {name}")
    if tuple(found[name]) != shape:
      raise UserError(f"{where}: tensor {name} has shape {list(found[name])}, "
                      f"the config says {list(shape)}")
  for name in found:
    if name not in wanted and not name.endswith(IGNORED_HF_SUFFIXES):
      raise UserError(f"{where}: tensor {name} is not supported")
