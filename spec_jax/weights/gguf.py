"""Reads a GGUF file: config from its metadata, tensors dequantised a few rows at a time.

The `gguf` package parses and dequantises; this file knows what each architecture leaves unsaid, and
what it stores differently from the Hugging Face layout. Called by `open_checkpoint`.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from spec_jax.errors import UserError
from spec_jax.models.config import DecoderConfig, RopeScaling
from spec_jax.models.decoder import tensor_shapes
from spec_jax.tokenizer import Tokenizer
from spec_jax.weights import names, stream
from spec_jax.weights.resolve import Source, files_sha256
from spec_jax.weights.stream import Block

# general.architecture -> DecoderConfig.architecture.
_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe",
             "gemma3": "gemma3"}
_FIXED = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True, "norm_topk": True},  # what llama.cpp computes for it
    "gemma3": {"qk_norm": True, "sandwich_norms": True, "activation": "gelu_tanh"},
}
# Metadata of one value only, over that of every family.
_ONLY = {
    "attention.sliding_window": 0, "expert_count": 0, "expert_used_count": 0,
    "attn_logit_softcapping": 0, "final_logit_softcapping": 0}
_GEMMA_PATTERN = 6  # every sixth layer is global; older files do not say it
_GEMMA_27B_LAYERS = 62  # the one size whose queries are scaled by D / N and not by H
# llama.cpp pairs neighbouring channels in its rotary embedding for these; others pair halves, as
# the Hugging Face layout does, and store q and k as they are.
_PERMUTED = {"llama"}


class _Reader(gguf.GGUFReader):
  """The package's reader, with a name in the error about a tensor type that it does not know."""

  def _build_tensors(self, start_offs, fields):
    known = {kind.value for kind in GGMLQuantizationType}
    for field in fields:
      if (kind := int(field.parts[4][0])) not in known:
        raise UserError(f"tensor {field.name} has the unknown type {kind}")
    super()._build_tensors(start_offs, fields)


class GgufCheckpoint:
  """A GGUF file, open for reading.

  Attributes:
    source: where it lies.
    config: the decoder it describes.
  """

  def __init__(self, source: Source):
    self.source = source
    where = str(source.path)
    try:
      self._reader = _Reader(source.path)
    except UserError as error:
      raise UserError(f"{where}: {error}") from None
    except (ValueError, IndexError, KeyError) as error:
      raise UserError(f"{where} is not a GGUF file, or one that is cut short ({error})") from None
    self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
    for tensor in self._reader.tensors:
      _check_type(tensor, where)
    self._tokenizer: Tokenizer | None = None
    self.config = self._read_config()
    self._names = names.GGUF_NAMES[self.config.architecture]
    needed = tensor_shapes(self.config)
    if self._names.get("rope_freqs") in self._tensors:
      needed["rope_freqs"] = (self.config.head_dim // 2,)
    found = {name: tuple(int(n) for n in reversed(tensor.shape))
             for name, tensor in self._tensors.items()}
    names.check_tensors(needed, found, self._names, where)
    self._needed = needed

  def names(self) -> list[str]:
    """Canonical names of the tensors, "rope_freqs" among them when the file has it."""
    return list(self._needed)

  def shape(self, name: str) -> tuple[int, ...]:
    """Shape of a tensor by canonical name."""
    return self._needed[name]

  def blocks(self, name: str) -> Iterator[Block]:
    """One tensor in float32 by blocks of rows, which are places in the Hugging Face order.

    Args:
      name: canonical.
    """
    tensor, shape = self._tensors[names.stored_name(self._names, name)], self._needed[name]
    order = np.arange(shape[0])
    if self.config.architecture in _PERMUTED and name.endswith((".wq", ".wk")):
      order = unpermute(
          order, self.config.num_heads if name.endswith("q") else self.config.num_kv_heads)
    for rows in stream.spans(shape):
      # The file's rows are gathered, so that a block is a slice of the tensor.
      stored = tensor.data[order[rows]]
      yield rows, np.asarray(gguf.dequantize(stored, tensor.tensor_type), np.float32)

  def read(self, name: str) -> np.ndarray:
    """One tensor in float32, rows in the Hugging Face order.

    Args:
      name: canonical.
    """
    return stream.whole(self, name)

  def tokenizer(self) -> Tokenizer:
    """The tokenizer of the file's metadata.

    A chat template in model.jinja beside model.gguf takes the place of the file's, which base
    models lack.
    """
    if self._tokenizer is None:
      beside = self.source.path.with_suffix(".jinja")
      template = beside.read_text(encoding="utf-8") if beside.is_file() else ""
      try:
        self._tokenizer = Tokenizer.from_gguf(self._reader, template)
      except UserError as error:
        raise UserError(f"{self.source.path}: {error}") from None
      except (ValueError, IndexError, TypeError) as error:
        raise UserError(f"{self.source.path}: tokenizer.ggml.* cannot be read: {error}") from None
    return self._tokenizer

  def weight_hash(self) -> str:
    """SHA-256 of the file."""
    return files_sha256([self.source.path])

  def _read_config(self) -> DecoderConfig:
    where = self.source.path
    arch = self._get("general.architecture")
    if not isinstance(arch, str) or arch not in _FAMILIES:
      raise UserError(f"{where}: general.architecture={arch!r} is not supported "
                      f"(known: {', '.join(_FAMILIES)})")

    def get(name: str, *default: Any) -> Any:
      return self._get(f"{arch}.{name}", *default)

    size = lambda name, *default: self._size(f"{arch}.{name}", *default)
    number = lambda name, *default: self._number(f"{arch}.{name}", *default)
    heads, hidden = size("attention.head_count"), size("embedding_length")
    head_dim = size("attention.key_length", hidden // heads)
    family = _FAMILIES[arch]
    extras, read = self._extras(family, get, size, number, head_dim)
    only_values = {"attention.value_length": head_dim, "rope.dimension_count": head_dim} | {
        name: value for name, value in _ONLY.items() if name not in read}
    for name, only in only_values.items():
      if (value := get(name, only)) != only:
        raise UserError(f"{where}: {arch}.{name}={value} is not supported (only {only})")
    embed = names.GGUF_NAMES[family]["embed"]
    if embed not in self._tensors:
      raise UserError(f"{where} has no tensor {embed}")
    tokenizer = self.tokenizer()
    fields = dict(
        architecture=family,
        vocab_size=int(self._tensors[embed].shape[-1]),
        hidden_size=hidden,
        # A mixture of experts has no dense MLP whose width it would be.
        intermediate_size=(get if "expert_count" in read else size)("feed_forward_length"),
        num_layers=size("block_count"),
        num_heads=heads,
        num_kv_heads=size("attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_theta=number("rope.freq_base", 10000.0),
        rope_scaling=self._read_scaling(arch),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        max_position=size("context_length"),
        tie_embeddings="output.weight" not in self._tensors,
        bos_id=tokenizer.bos_id,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
        **_FIXED[family] | extras,
    )
    try:
      config = DecoderConfig(**fields)
    except UserError as error:
      raise UserError(f"{where}: {error}") from None
    if tokenizer.vocab_size > config.vocab_size:
      raise UserError(f"{where}: {tokenizer.vocab_size} tokens for an embedding of "
                      f"{config.vocab_size} rows")
    return dataclasses.replace(config, vocab_real=tokenizer.vocab_size)

  def _extras(
      self, family: str, get, size, number, head_dim: int) -> tuple[dict[str, Any], set[str]]:
    """Fields that one family has, and the metadata they were read from."""
    if family == "qwen3_moe":
      return {"num_experts": size("expert_count"), "experts_per_token": size("expert_used_count"),
              "expert_size": size("expert_feed_forward_length")}, {
                  "expert_count", "expert_used_count"}
    if family == "gemma3":
      layers, hidden = size("block_count"), size("embedding_length")
      pattern = get("attention.sliding_window_pattern", _GEMMA_PATTERN)
      if not isinstance(pattern, list):
        pattern = size("attention.sliding_window_pattern", _GEMMA_PATTERN)
        pattern = [(i + 1) % pattern != 0 for i in range(layers)]
      scalar = hidden // size("attention.head_count") if layers == _GEMMA_27B_LAYERS else head_dim
      return {"sliding_window": size("attention.sliding_window"),
              "local_layers": tuple(bool(x) for x in pattern), "embed_scale": hidden**0.5,
              "rope_local_theta": number("rope.freq_base_swa", 10000.0),
              "query_scalar": float(scalar)}, {"attention.sliding_window"}
    return {}, set()

  def _read_scaling(self, arch: str) -> RopeScaling | None:
    kind = self._get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
      return None
    if kind not in ("linear", "yarn"):
      raise UserError(f"{self.source.path}: {arch}.rope.scaling.type={kind!r} is not supported "
                      "(only none, linear, yarn)")
    number = lambda name, *default: self._number(f"{arch}.rope.scaling.{name}", *default)
    factor = number("factor")
    if kind == "linear":
      return RopeScaling("linear", factor)
    for name, only in (("attn_factor", 1.0), ("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0),
                       ("yarn_log_multiplier", 0.0)):
      if (value := self._get(f"{arch}.rope.scaling.{name}", only)) != only:
        raise UserError(f"{self.source.path}: {arch}.rope.scaling.{name}={value} is not supported "
                        f"(only {only})")
    original = self._size(f"{arch}.rope.scaling.original_context_length",
                          self._size(f"{arch}.context_length"))
    return RopeScaling("yarn", factor, original_max_position=original,
                       beta_fast=number("yarn_beta_fast", 32.0),
                       beta_slow=number("yarn_beta_slow", 1.0))

  def _get(self, key: str, *default: Any) -> Any:
    field = self._reader.fields.get(key)
    if field is not None:
      try:
        return field.contents()
      except (ValueError, IndexError, TypeError) as error:  # text that is none, a damaged list
        raise UserError(f"{self.source.path}: {key} cannot be read: {error}") from None
    if default:
      return default[0]
    raise UserError(f"{self.source.path} has no metadata {key}")

  def _size(self, key: str, *default: int) -> int:
    value = self._get(key, *default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
      raise UserError(f"{self.source.path}: {key}={value!r:.80} must be a whole number from 1 on")
    return value

  def _number(self, key: str, *default: float) -> float:
    value = self._get(key, *default)
    if (not isinstance(value, int | float) or isinstance(value, bool)
        or not 0 < value < float("inf")):
      raise UserError(f"{self.source.path}: {key}={value!r:.80} must be a number above 0")
    return _shortest(value)


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
  """Rows of a q or k projection from llama.cpp's rotary order to the Hugging Face order.

  Within each head llama.cpp keeps the two channels that rotate together side by side
  (0, H/2, 1, H/2 + 1, ...); the Hugging Face layout keeps the halves apart.

  Args:
    rows: [num_heads * H, in].
    num_heads: of the tensor itself: query heads for q, key/value heads for k.
  """
  pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
  return pairs.swapaxes(1, 2).reshape(rows.shape)


def _check_type(tensor: Any, where: str) -> None:
  kind = tensor.tensor_type
  if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
    return
  try:  # one block of zeros: the package has no list of what it can dequantise
    gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
  except NotImplementedError:
    raise UserError(f"{where}: tensor {tensor.name} has type {kind.name}, which cannot be "
                    "dequantised") from None


def _shortest(value: float) -> float:
  # Metadata is float32; 1e-5 must come back as 1e-5, not as 9.999999747378752e-06.
  return float(str(np.float32(value)))
