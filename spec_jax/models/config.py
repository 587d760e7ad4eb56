"""The one dataclass that describes a decoder. Read by the loaders, the decoder and the exports."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spec_jax.errors import UserError

_SUPPORTED = {"LlamaForCausalLM": "llama"}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Scaling of the rotary frequencies.

  Attributes:
    kind: "llama3" (smooth by wavelength, Llama 3.1) or "linear" (positions divided by factor).
    factor: context extension factor.
    low_freq_factor: llama3 only; wavelengths above original/low_freq_factor are divided by factor.
    high_freq_factor: llama3 only; wavelengths below original/high_freq_factor are left alone.
    original_max_position: llama3 only; the context length before extension.
  """

  kind: str
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position: int = 8192


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Shape and constants of a decoder-only transformer of the Llama family.

  Attributes:
    architecture: family name, "llama".
    vocab_size: V, rows of the embedding (may be padded beyond the tokenizer).
    hidden_size: D.
    intermediate_size: F of the SwiGLU.
    num_layers: decoder blocks.
    num_heads: N query heads.
    num_kv_heads: G key/value heads; N is a multiple of G.
    head_dim: H.
    rope_theta: base of the rotary frequencies.
    rope_scaling: None for none.
    partial_rotary_factor: share of H that rotates.
    rms_norm_eps: epsilon of every RMSNorm.
    max_position: context length the weights were trained for.
    tie_embeddings: the head is the embedding.
    bos_id: -1 for none.
    eos_ids: every id that ends a sequence.
    pad_id: -1 for none.
    vocab_real: R <= V, ids that really exist; ids >= R never leave the sampler. 0 means V.
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  partial_rotary_factor: float = 1.0
  rms_norm_eps: float = 1e-5
  max_position: int = 2048
  tie_embeddings: bool = True
  bos_id: int = -1
  eos_ids: tuple[int, ...] = ()
  pad_id: int = -1
  vocab_real: int = 0
  architecture: str = "llama"

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise UserError(
          f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
    if self.vocab_real == 0:
      object.__setattr__(self, "vocab_real", self.vocab_size)
    if not 0 < self.vocab_real <= self.vocab_size:
      raise UserError(f"vocab_real={self.vocab_real} is not in 1..vocab_size={self.vocab_size}")

  @classmethod
  def from_hf(cls, hf: Mapping[str, Any]) -> "DecoderConfig":
    """Reads the fields of a Hugging Face `config.json`.

    Raises:
      UserError: unknown architecture, an unsupported field value, or a missing field, by name.
    """
    names = hf.get("architectures") or ["(none)"]
    if names[0] not in _SUPPORTED:
      raise UserError(
          f"architectures={names[0]!r} is not supported (known: {', '.join(_SUPPORTED)})")
    for field, only in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False),
                        ("quantization_config", None), ("sliding_window", None)):
      if hf.get(field, only) != only:
        raise UserError(f"config.json field {field}={hf[field]!r} is not supported (only {only!r})")
    try:
      heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
      eos = hf.get("eos_token_id")
      return cls(
          vocab_size=hf["vocab_size"],
          hidden_size=hidden,
          intermediate_size=hf["intermediate_size"],
          num_layers=hf["num_hidden_layers"],
          num_heads=heads,
          num_kv_heads=hf.get("num_key_value_heads") or heads,
          head_dim=hf.get("head_dim") or hidden // heads,
          rope_theta=float(_rope(hf).get("rope_theta", hf.get("rope_theta", 10000.0))),
          rope_scaling=_scaling_from_hf(_rope(hf)),
          partial_rotary_factor=float(
              _rope(hf).get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))),
          rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
          max_position=hf.get("max_position_embeddings", 2048),
          tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
          bos_id=_or(hf.get("bos_token_id"), -1),
          eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
          pad_id=_or(hf.get("pad_token_id"), -1),
          architecture=_SUPPORTED[names[0]],
      )
    except KeyError as error:
      raise UserError(f"config.json has no field {error.args[0]!r}") from None

  def to_hf(self) -> dict[str, Any]:
    """The fields of a stock `LlamaForCausalLM` `config.json`, inverse of `from_hf`."""
    scaling = None
    if self.rope_scaling is not None:
      scaling = {"rope_type": self.rope_scaling.kind, "factor": self.rope_scaling.factor}
      if self.rope_scaling.kind == "llama3":
        scaling |= {
            "low_freq_factor": self.rope_scaling.low_freq_factor,
            "high_freq_factor": self.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": self.rope_scaling.original_max_position,
        }
    eos = list(self.eos_ids)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": self.vocab_size,
        "hidden_size": self.hidden_size,
        "intermediate_size": self.intermediate_size,
        "num_hidden_layers": self.num_layers,
        "num_attention_heads": self.num_heads,
        "num_key_value_heads": self.num_kv_heads,
        "head_dim": self.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": self.rope_theta,
        "rope_scaling": scaling,
        "partial_rotary_factor": self.partial_rotary_factor,
        "rms_norm_eps": self.rms_norm_eps,
        "max_position_embeddings": self.max_position,
        "tie_word_embeddings": self.tie_embeddings,
        "bos_token_id": None if self.bos_id < 0 else self.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": None if self.pad_id < 0 else self.pad_id,
    }


def _or(value, default):
  return default if value is None else value


def _rope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
  # transformers 4 wrote rope_scaling, transformers 5 writes rope_parameters.
  return hf.get("rope_parameters") or hf.get("rope_scaling") or {}


def _scaling_from_hf(rope: Mapping[str, Any]) -> RopeScaling | None:
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind == "default":
    return None
  if kind == "linear":
    return RopeScaling("linear", float(rope["factor"]))
  if kind == "llama3":
    return RopeScaling(
        "llama3", float(rope["factor"]), float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]), int(rope["original_max_position_embeddings"]))
  raise UserError(f"rope_scaling type {kind!r} is not supported (only linear, llama3)")
