"""The one dataclass that describes a decoder. Read by the loaders, the decoder and the exports.

Every family is this dataclass with other values: what a family adds is a field here, never a class.
hf_config.py reads and writes `config.json`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from spec_jax.errors import UserError

ACTIVATIONS = ("silu", "gelu_tanh")
_SCALINGS = ("llama3", "linear", "yarn")
_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
          "max_position")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Scaling of the rotary frequencies.

  Attributes:
    kind: "llama3" (smooth by wavelength, Llama 3.1), "linear" (positions divided by factor) or
      "yarn" (2309.00071: divided by factor below a ramp over the channels).
    factor: context extension factor.
    low_freq_factor: llama3 only; wavelengths above original/low_freq_factor are divided by factor.
    high_freq_factor: llama3 only; wavelengths below original/high_freq_factor are left alone.
    original_max_position: llama3 and yarn; the context length before extension.
    beta_fast: yarn only; channels that turn more often within the original length are left alone.
    beta_slow: yarn only; channels that turn less often are divided by factor.
    attention_factor: yarn only; cos and sin are multiplied by it. 0 means 0.1 ln(factor) + 1.
    truncate: yarn only; the ends of the ramp are rounded outwards to whole channels.
  """

  kind: str
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position: int = 8192
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float = 0.0
  truncate: bool = True

  def __post_init__(self):
    if self.kind not in _SCALINGS or not self.factor > 0:
      raise UserError(f"rope scaling of kind={self.kind!r} and factor={self.factor} is not "
                      f"supported (only {', '.join(_SCALINGS)}, by a factor above 0)")

  @property
  def magnitude(self) -> float:
    """What cos and sin are multiplied by."""
    if self.kind != "yarn":
      return 1.0
    return self.attention_factor or yarn_magnitude(self.factor)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
  """0.1 weight ln(factor) + 1 (2309.00071, section 3.4), 1 where nothing is extended."""
  return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Shape and constants of a decoder-only transformer.

  The defaults are a Llama. Norm weights are those that multiply: what a family stores as an offset
  from one is added on reading (weights/names.py).

  Attributes:
    architecture: family name, a key of the name maps: llama, mistral, qwen2, qwen3, qwen3_moe or
      gemma3. Only reading and writing ask for it.
    vocab_size: V, rows of the embedding (may be padded beyond the tokenizer).
    hidden_size: D.
    intermediate_size: F of the gated MLP.
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
    qkv_bias: the projections to queries, keys and values have biases (Qwen2).
    qk_norm: every query and key head has its RMSNorm before the rotation (Qwen3, Gemma 3).
    sandwich_norms: attention and MLP have an RMSNorm behind them too (Gemma 3).
    activation: of the MLP's gate, "silu" or "gelu_tanh".
    embed_scale: the embedded tokens are multiplied by it, in the dtype of the embedding.
    query_scalar: attention scores are divided by its square root. 0 means H.
    sliding_window: a local layer sees so many positions, its own included. 0 for no local layers.
    local_layers: [num_layers] which layers are local; () for none of them.
    rope_local_theta: base of the rotary frequencies of local layers, which have no scaling. 0 for
      the same frequencies as in the other layers.
    num_experts: E of a mixture in place of the MLP; 0 for none.
    experts_per_token: experts that each token is sent to.
    expert_size: F of each expert.
    norm_topk: the weights of a token's experts are divided by their sum.
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
  qkv_bias: bool = False
  qk_norm: bool = False
  sandwich_norms: bool = False
  activation: str = "silu"
  embed_scale: float = 1.0
  query_scalar: float = 0.0
  sliding_window: int = 0
  local_layers: tuple[bool, ...] = ()
  rope_local_theta: float = 0.0
  num_experts: int = 0
  experts_per_token: int = 0
  expert_size: int = 0
  norm_topk: bool = False

  def __post_init__(self):
    for name in _SIZES:
      if getattr(self, name) < 1:
        raise UserError(f"{name}={getattr(self, name)} must be at least 1")
    if self.num_heads % self.num_kv_heads:
      raise UserError(
          f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
    if self.vocab_real == 0:
      object.__setattr__(self, "vocab_real", self.vocab_size)
    if not 0 < self.vocab_real <= self.vocab_size:
      raise UserError(f"vocab_real={self.vocab_real} is not in 1..vocab_size={self.vocab_size}")
    if self.activation not in ACTIVATIONS:
      raise UserError(f"activation={self.activation!r} is not supported (only "
                      f"{', '.join(ACTIVATIONS)})")
    if not any(self.local_layers):
      object.__setattr__(self, "local_layers", ())
      object.__setattr__(self, "sliding_window", 0)
    elif len(self.local_layers) != self.num_layers:
      raise UserError(f"local_layers names {len(self.local_layers)} layers, "
                      f"num_layers={self.num_layers}")
    elif self.sliding_window < 1:
      raise UserError(f"sliding_window={self.sliding_window} must be positive for the local layers "
                      f"{[i for i, local in enumerate(self.local_layers) if local]}")
    if self.num_experts and not 0 < self.experts_per_token <= self.num_experts:
      raise UserError(f"experts_per_token={self.experts_per_token} is not in "
                      f"1..num_experts={self.num_experts}")

  def of_layers(self, layers: Sequence[int]) -> "DecoderConfig":
    """The config of a stack made of these layers (0-based), in that order."""
    local = tuple(self.local_layers[i] for i in layers) if self.local_layers else ()
    return dataclasses.replace(self, num_layers=len(layers), local_layers=local)

  def plain(self, num_layers: int) -> "DecoderConfig":
    """A Llama of this width, heads, rotation and vocabulary: the layers of a drafter that reads the
    target's states, whatever the target's own are made of."""
    defaults = {f.name: f.default for f in dataclasses.fields(self) if f.name in _BEYOND_LLAMA}
    return dataclasses.replace(self, num_layers=num_layers, **defaults)

  def is_local(self, layer: int) -> bool:
    """Whether a layer sees `sliding_window` positions only."""
    return bool(self.local_layers) and self.local_layers[layer]

  @classmethod
  def from_hf(cls, hf: Mapping[str, Any]) -> "DecoderConfig":
    """Reads the fields of a Hugging Face `config.json`.

    Raises:
      UserError: unknown architecture, an unsupported field value, or a missing field, by name.
    """
    from spec_jax.models import hf_config

    return cls(**hf_config.read(hf))

  def to_hf(self) -> dict[str, Any]:
    """The fields of a stock `config.json` of the family, inverse of `from_hf`."""
    from spec_jax.models import hf_config

    return hf_config.write(self)


_BEYOND_LLAMA = {
    "architecture", "qkv_bias", "qk_norm", "sandwich_norms", "activation", "embed_scale",
    "query_scalar", "sliding_window", "local_layers", "rope_local_theta", "num_experts",
    "experts_per_token", "expert_size", "norm_topk"}
