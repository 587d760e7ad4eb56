"""A tiny target of every family, shared by the tests of decoder, loaders and drafters."""

import dataclasses

import numpy as np

from spec_jax.models.config import DecoderConfig, RopeScaling
from spec_jax.models.decoder import tensor_shapes
from spec_jax.target import Target
from tests import tiny

WINDOW = 5
CHANGES = {
    "llama_yarn": dict(rope_scaling=RopeScaling("yarn", 4.0, original_max_position=16),
                       rope_theta=300.0),
    "mistral": dict(
        architecture="mistral", sliding_window=WINDOW, local_layers=(True, True)),
    "qwen2": dict(architecture="qwen2", qkv_bias=True, tie_embeddings=True),
    "qwen3": dict(architecture="qwen3", qk_norm=True, head_dim=12),
    "qwen3_moe": dict(
        architecture="qwen3_moe", qk_norm=True, num_experts=6, experts_per_token=2,
        expert_size=10, norm_topk=True),
    "gemma3": dict(
        architecture="gemma3", qk_norm=True, sandwich_norms=True, activation="gelu_tanh",
        embed_scale=32**0.5, query_scalar=20.0, sliding_window=WINDOW, local_layers=(True, False),
        rope_theta=5000.0, rope_local_theta=100.0, rope_scaling=RopeScaling("linear", 4.0),
        tie_embeddings=True),
}


def config(family: str, **changes) -> DecoderConfig:
  """Two layers; Gemma's first is local."""
  return tiny.config(**CHANGES[family] | changes)


def tensors(cfg: DecoderConfig, seed: int = 0) -> dict[str, np.ndarray]:
  """Random tensors; norms are not one and biases not zero, so that none can be left out."""
  rng = np.random.default_rng(seed)
  values = {}
  for name, shape in tensor_shapes(cfg).items():
    if name.endswith("norm"):
      values[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
    else:
      scale = {"embed": 1.0 / cfg.embed_scale, "head": 0.5}.get(name, 0.3)
      values[name] = rng.normal(size=shape).astype(np.float32) * scale
  return values


def target(family: str, **changes) -> Target:
  """A float32 target of the family, with a tokenizer."""
  cfg = dataclasses.replace(config(family), **changes)
  return tiny.make(cfg, tensors(cfg), tiny.tokenizer())
