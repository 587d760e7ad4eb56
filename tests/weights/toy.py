"""Tiny checkpoints and tokenizers for tests, written with each format's own writer."""

import json
from pathlib import Path

import gguf
import numpy as np
import safetensors.numpy
import tokenizers
from gguf import GGMLQuantizationType
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from spec_jax.models.config import DecoderConfig
from spec_jax.models.decoder import tensor_shapes
from spec_jax.tokenizer import Tokenizer
from spec_jax.weights import names

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Pairs in the alphabet of byte-level encoding, where a space is the letter G with a dot above.
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u0120", "t"), ("1", "2"),
          ("<", "|"), ("u", "s"), ("e", "r"), ("us", "er")]
# DecoderConfig.architecture -> general.architecture of a GGUF file.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
                 "gemma3": "gemma3"}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def vocabulary() -> list[str]:
  """Specials first, then the 256 byte letters, then the merges."""
  return SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in MERGES]


def tokenizer(
    template: str = CHATML,
    tokens: list[str] | None = None,
    bos: str = "<|endoftext|>",
    adds_bos: bool = False,
) -> Tokenizer:
  """A byte-level tokenizer of a few merges with three control tokens."""
  tokens = vocabulary() if tokens is None else tokens
  backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, MERGES))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIALS])
  if adds_bos:
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
  return Tokenizer(backend, chat_template=template, bos_id=backend.token_to_id(bos),
                   eos_ids=[backend.token_to_id("<|im_end|>")],
                   pad_id=backend.token_to_id("<|endoftext|>"))


def config(**changes) -> DecoderConfig:
  """Eight query and two key/value heads."""
  fields = dict(
      vocab_size=len(vocabulary()), hidden_size=64, intermediate_size=96, num_layers=2,
      num_heads=8, num_kv_heads=2, head_dim=8, rope_theta=5000.0, max_position=64,
      tie_embeddings=False, bos_id=0, eos_ids=(2,), pad_id=0)
  return DecoderConfig(**(fields | changes))


def tensors(cfg: DecoderConfig, seed: int = 0) -> dict[str, np.ndarray]:
  """Random float32 tensors under canonical names."""
  rng = np.random.default_rng(seed)
  return {name: rng.normal(size=shape).astype(np.float32) * 0.1 + (len(shape) == 1)
          for name, shape in tensor_shapes(cfg).items()}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
  """Rows in llama.cpp's order, row by row: within a head 0, H/2, 1, H/2 + 1, ..."""
  size = rows.shape[0] // heads
  order = [head * size + half * (size // 2) + pair
           for head in range(heads) for pair in range(size // 2) for half in range(2)]
  return rows[order]


def write_gguf(
    path: Path,
    cfg: DecoderConfig,
    values: dict[str, np.ndarray],
    kinds: dict[str, str] | str = "F32",
    *,
    tokens: list[str] | None = None,
    token_types: list[int] | None = None,
    pre: str = "gpt-2",
    add_bos: bool = False,
    raw: dict[str, tuple[np.ndarray, GGMLQuantizationType]] | None = None,
    arch: str | None = None,
    template: str = CHATML,
    eos: int = 2,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
  """Writes a file as a converter of such weights does: q and k of a Llama interleaved, norms in
  float32 and whole.

  Args:
    cfg: its architecture is what counts, unless `arch` names another one.
    kinds: tensor type for every matrix, or canonical name -> type (F32 otherwise).
    raw: canonical name -> bytes already quantised, and their type.
    template: of chats; "" for none.
    eos: id that ends a text.
    extra: stored name -> further tensors.
  """
  writer = gguf.GGUFWriter(path, arch or ARCHITECTURES[cfg.architecture])
  writer.add_block_count(cfg.num_layers)
  writer.add_context_length(cfg.max_position)
  writer.add_embedding_length(cfg.hidden_size)
  writer.add_feed_forward_length(cfg.intermediate_size)
  writer.add_head_count(cfg.num_heads)
  writer.add_head_count_kv(cfg.num_kv_heads)
  writer.add_key_length(cfg.head_dim)
  writer.add_rope_freq_base(cfg.rope_theta)
  writer.add_layer_norm_rms_eps(cfg.rms_norm_eps)
  if cfg.sliding_window:
    writer.add_sliding_window(cfg.sliding_window)
  if cfg.num_experts:
    writer.add_expert_count(cfg.num_experts)
    writer.add_expert_used_count(cfg.experts_per_token)
    writer.add_expert_feed_forward_length(cfg.expert_size)
  if cfg.rope_scaling is not None:
    writer.add_rope_scaling_type(gguf.RopeScalingType(cfg.rope_scaling.kind))
    writer.add_rope_scaling_factor(cfg.rope_scaling.factor)
    writer.add_rope_scaling_orig_ctx_len(cfg.rope_scaling.original_max_position)
  tokens = vocabulary() if tokens is None else tokens
  types = [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS))
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(tokens)
  writer.add_token_types(types if token_types is None else token_types)
  writer.add_token_merges([f"{a} {b}" for a, b in MERGES])
  writer.add_bos_token_id(0)
  writer.add_eos_token_id(eos)
  writer.add_pad_token_id(0)
  writer.add_add_bos_token(add_bos)
  if template:
    writer.add_chat_template(template)
  stored = names.GGUF_NAMES[cfg.architecture]
  for name, value in values.items():
    if raw and name in raw:
      data, kind = raw[name]
      writer.add_tensor(names.stored_name(stored, name), data, raw_dtype=kind)
      continue
    if cfg.architecture == "llama" and name.endswith(".wq"):
      value = interleave(value, cfg.num_heads)
    if cfg.architecture == "llama" and name.endswith(".wk"):
      value = interleave(value, cfg.num_kv_heads)
    kind = (kinds if value.ndim == 2 else "F32") if isinstance(kinds, str) else kinds.get(
        name, "F32")
    kind = GGMLQuantizationType[kind]
    if kind == GGMLQuantizationType.F32:
      data = value.astype(np.float32)
    elif kind == GGMLQuantizationType.F16:
      data = value.astype(np.float16)
    else:
      data = gguf.quantize(value, kind)
    writer.add_tensor(names.stored_name(stored, name), data, raw_dtype=kind)
  for name, value in (extra or {}).items():
    writer.add_tensor(name, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def shard(folder: Path) -> None:
  """Splits a folder's single weight file in two with an index, as large models are stored."""
  single = folder / "model.safetensors"
  values = safetensors.numpy.load_file(single)
  single.unlink()
  weight_map = {}
  for k in range(2):
    part = dict(list(values.items())[k::2])
    name = f"model-{k + 1:05d}-of-00002.safetensors"
    safetensors.numpy.save_file(part, folder / name)
    weight_map |= dict.fromkeys(part, name)
  index = {"metadata": {}, "weight_map": weight_map}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def edit_json(path: Path, **changes) -> None:
  """Changes fields of a JSON file; a value of None removes the field."""
  value = json.loads(path.read_text()) | changes
  path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))
