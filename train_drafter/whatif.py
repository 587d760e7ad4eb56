"""Where speculation pays: memory of target and drafter, and a roofline of named accelerators.

The evaluate stage measures `memory` with the modules at hand; `report.py` turns it, the replayed
tau and the measured costs into the section `whatif` with `section` here, whose part "measured" is
that of `payoff.py`. A roofline says what no program beats: a
pass takes as long as its bytes at full bandwidth or its operations at full speed, whichever is
longer. Kernels, communication and the host come on top.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from spec_jax.drafters import Drafter
from spec_jax.models.cache import init_cache
from spec_jax.models.quant import Int8Weight
from spec_jax.target import Target


@dataclasses.dataclass(frozen=True)
class Accelerator:
  """One chip.

  Attributes:
    name: as its vendor calls it.
    flops: peak dense bfloat16 operations per second.
    bandwidth: of its memory, bytes per second.
    memory: bytes.
    source: of the figures.
  """

  name: str
  flops: float
  bandwidth: float
  memory: float
  source: str


ACCELERATORS = (
    # docs.cloud.google.com/tpu/docs/v6e has both columns (v5e: 197 TFLOPs, 16 GB, 800 GBps).
    Accelerator("TPU v5e", 197e12, 800e9, 16e9, "Google Cloud, TPU v6e documentation"),
    # docs.cloud.google.com/tpu/docs/v5p: 459 TFLOPs, 95 GB, 2765 GBps.
    Accelerator("TPU v5p", 459e12, 2765e9, 95e9, "Google Cloud, TPU v5p documentation"),
    Accelerator("TPU v6e", 918e12, 1600e9, 32e9, "Google Cloud, TPU v6e documentation"),
    # H100 data sheet: 1979 TFLOPS of bfloat16 with sparsity, half of it dense; 3.35 TB/s.
    Accelerator("H100 SXM", 989e12, 3350e9, 80e9, "NVIDIA H100 data sheet"),
    # H200 data sheet: as the H100, with 141 GB at 4.8 TB/s.
    Accelerator("H200", 989e12, 4800e9, 141e9, "NVIDIA H200 data sheet"),
    # DGX Spark data sheet: 273 GB/s, 128 GB, 1 PFLOP of FP4 with sparsity. Bfloat16 is not in it:
    # half for dense, and half again for each doubling of the width.
    Accelerator("GB10", 125e12, 273e9, 128e9, "NVIDIA DGX Spark data sheet; bfloat16 derived"),
    # No product: 2 cores x 2.5 GHz x 32 float32 operations a cycle (AVX2), two channels of
    # DDR4-3200 at 25.6 GB/s.
    Accelerator("two-core CPU", 160e9, 51.2e9, 16e9, "nominal, 2 cores AVX2 and DDR4-3200"),
)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (512, 4096, 32768)
# A dense model of today that fills a small accelerator: 15.5 billion parameters in bfloat16.
DENSE_BYTES = 31e9
DENSE_TAUS = (2.0, 3.0, 4.0)
# Published mixtures: experts of a layer and how many of them a token uses.
MIXTURES = {"Mixtral 8x7B": (8, 2), "OLMoE 1B-7B": (64, 8), "Qwen3-30B-A3B": (128, 8)}


@dataclasses.dataclass(frozen=True)
class Model:
  """What a pass of a decoder moves and computes.

  Attributes:
    weight_bytes: read by every pass, whatever its tokens: for a dense model all of it.
    flops_per_token: multiplications and additions of a token, attention to the context apart.
    cache_bytes: keys and values of one token.
    attention_flops: of one token for each token of its context.
    expert_bytes: of one expert, all layers together; a pass reads those that its tokens use.
    experts: N of a layer, 0 for a dense model.
    experts_per_token: k.
  """

  weight_bytes: float
  flops_per_token: float
  cache_bytes: float = 0.0
  attention_flops: float = 0.0
  expert_bytes: float = 0.0
  experts: int = 0
  experts_per_token: int = 0


def distinct_experts(experts: int, per_token: int, tokens: int | float) -> float:
  """N (1 - (1 - k/N)^T): experts of a layer that T tokens touch, routed independently."""
  return experts * (1.0 - (1.0 - per_token / experts) ** tokens)


def pass_bytes(model: Model, rows: int, width: int, context: int) -> float:
  """Bytes that a pass of `rows` sequences by `width` tokens reads behind `context` tokens each."""
  read = model.weight_bytes + rows * context * model.cache_bytes
  if model.experts:
    read += model.expert_bytes * distinct_experts(
        model.experts, model.experts_per_token, rows * width)
  return read


def pass_seconds(
    chip: Accelerator, model: Model, rows: int = 1, width: int = 1, context: int = 0) -> float:
  """Roofline time of one pass: the longer of memory and arithmetic."""
  work = rows * width * (model.flops_per_token + context * model.attention_flops)
  return max(pass_bytes(model, rows, width, context) / chip.bandwidth, work / chip.flops)


def plain_ceiling(chip: Accelerator, model: Model, rows: int = 1, context: int = 0) -> float:
  """Tokens per second of all rows with ordinary decoding: at most bandwidth / bytes of weights."""
  return rows / pass_seconds(chip, model, rows, 1, context)


def speculative_ceiling(
    chip: Accelerator, target: Model, drafter: Model, tau: float, draft_len: int, *,
    passes: int, rows: int = 1, context: int = 0) -> float:
  """Tokens per second of all rows with K drafts a round.

  Args:
    chip: the accelerator.
    target: what verifies, K + 1 wide.
    drafter: of one of its passes.
    tau: tokens of a round.
    draft_len: K.
    passes: of the drafter in a round: K one token wide each, or one pass K + 1 wide.
    rows: sequences decoded together.
    context: tokens in the cache of each.
  """
  width = 1 if passes == draft_len else draft_len + 1
  draft = passes * pass_seconds(chip, drafter, rows, width, context)
  return rows * tau / (draft + pass_seconds(chip, target, rows, draft_len + 1, context))


# What the modules at hand hold.


def _size(tree: Any) -> tuple[int, int]:
  """Numbers and bytes of the arrays (or shapes) of a tree; scales of int8 matrices are bytes."""
  leaves = [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Int8Weight))
            if hasattr(x, "dtype")]
  return (sum(int(np.prod(x.shape)) for x in leaves),
          sum(x.nbytes if isinstance(x, Int8Weight) else
              int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in leaves))


def _state_bytes(make: Any) -> float:
  """Bytes of state per token of a sequence, of make(rows, capacity)."""
  small, large = (
      _size(jax.eval_shape(lambda n=n: jax.tree.leaves(make(1, n))))[1] for n in (64, 128))
  return (large - small) / 64


def memory(target: Target, drafter: Drafter) -> dict[str, Any]:
  """Parameters, cache and features of both, as arrays in memory.

  Returns:
    {"target": {"dtype", "parameters", "parameter_bytes", "cache_bytes_per_token",
    "head_parameters", and of a mixture "experts", "experts_per_token" and "expert_parameters" of
    one expert in all layers}, "drafter": the same ("parameter_bytes" without what it borrows), with
    "kind" and "depth_passes" ("each" for a pass for each draft, "block" for one);
    "features_per_token" and their bytes; "cache_tokens_displaced": tokens of the target's cache
    that would fit into the drafter's parameters; "peak_device_bytes": null where the backend does
    not tell}.
  """
  config, module = target.config, drafter.module
  E = config.num_experts
  count, size = _size(target.params)
  cache = _state_bytes(lambda rows, capacity: init_cache(
      config, rows, capacity, target.module.embed[...].dtype))
  own, own_size = _size(drafter.params)
  head = module.head_weight(target.module)
  stats = jax.devices()[0].memory_stats() or {}
  trained = _size(nnx.state(module, nnx.Param))[0]
  return {
      "target": {
          "dtype": target.dtype, "parameters": count, "parameter_bytes": size,
          "cache_bytes_per_token": cache,
          "head_parameters": config.vocab_size * config.hidden_size,
          "embedding_parameters": 0 if config.tie_embeddings else
          config.vocab_size * config.hidden_size,
          "attention_width": config.num_layers * config.num_heads * config.head_dim,
          "experts": E, "experts_per_token": config.experts_per_token if E else 0,
          "expert_parameters":
              3 * config.num_layers * config.hidden_size * config.expert_size if E else 0},
      "drafter": {
          "kind": drafter.kind, "parameters": own, "trained_parameters": trained,
          "parameter_bytes": own_size,
          "cache_bytes_per_token": _state_bytes(module.init_state),
          "head_parameters": int(np.prod(head.shape)), "head_bytes": int(head.nbytes),
          "head_is_own": hasattr(module, "head"),
          "attention_width": module.config.num_layers * module.config.num_heads
          * module.config.head_dim,
          "depth_passes": "block" if drafter.kind in ("dflash", "dspark") else "each"},
      # float32 as the pass returns them; they live for one round, or in the drafter's own state.
      "features_per_token": len(module.taps) * config.hidden_size,
      "features_bytes_per_token": 4 * len(module.taps) * config.hidden_size,
      "cache_tokens_displaced": own_size / cache,
      "peak_device_bytes": stats.get("peak_bytes_in_use")}


def models(facts: Mapping[str, Any]) -> tuple[Model, Model]:
  """Target and drafter of `memory` as a roofline sees them.

  Of an embedding a pass reads a few rows; of a borrowed head the drafter reads all.
  """
  target, drafter = facts["target"], facts["drafter"]
  per = target["parameter_bytes"] / target["parameters"]
  expert, k = target.get("expert_parameters", 0), target.get("experts_per_token", 0)
  experts = target.get("experts", 0)
  read = target["parameters"] - target["embedding_parameters"] - experts * expert
  borrowed = 0 if drafter["head_is_own"] else 1
  weights = drafter["parameters"] + borrowed * drafter["head_parameters"]
  return (
      Model(read * per, 2.0 * (read + k * expert), target["cache_bytes_per_token"],
            4.0 * target["attention_width"], expert * per, experts, k),
      Model(drafter["parameter_bytes"] + borrowed * drafter["head_bytes"], 2.0 * weights,
            drafter["cache_bytes_per_token"], 4.0 * drafter["attention_width"]))


def section(facts: Mapping[str, Any], taus: Mapping[int, float]) -> dict[str, Any]:
  """The what-if page of one target and drafter, as far as it is computed.

  Args:
    facts: of `memory`.
    taus: replayed tau by K, at temperature 0 where there is one.

  Returns:
    {"accelerators": [{"name", "peak_flops", "bandwidth", "memory", "source",
    "plain_tokens_per_s" of one sequence; "cache_tokens", "cache_tokens_with_drafter" that fit
    beside the weights, null where those do not fit; "rows": [{"batch", "context",
    "plain_tokens_per_s", "tokens_per_s", "speedup", "draft_len"}]}], each row with the best K;
    "dense": of `dense_example`; "experts": [{"name", "experts", "per_token", "by_tokens": {T:
    distinct experts of a layer}}], the target first if it is a mixture}.
  """
  target, drafter = models(facts)
  each = facts["drafter"]["depth_passes"] == "each"
  chips = []
  for chip in ACCELERATORS:
    rows = []
    for batch in BATCHES:
      for context in CONTEXTS:
        plain = plain_ceiling(chip, target, batch, context)
        fast, K = _best(chip, target, drafter, taus, each, rows=batch, context=context)
        rows.append({
            "batch": batch, "context": context, "plain_tokens_per_s": plain,
            "tokens_per_s": fast, "draft_len": K,
            "speedup": None if fast is None else fast / plain})
    chips.append({
        "name": chip.name, "peak_flops": chip.flops, "bandwidth": chip.bandwidth,
        "memory": chip.memory, "source": chip.source,
        "plain_tokens_per_s": plain_ceiling(chip, target),
        **cache_room(facts, chip.memory), "rows": rows})
  own = facts["target"]
  mixture = {"this target": (own["experts"], own["experts_per_token"])} if own.get(
      "experts") else {}
  return {"accelerators": chips, "dense": dense_example(facts, taus),
          "experts": experts_table(mixture | MIXTURES)}


def _best(chip, target, drafter, taus, each, **shape) -> tuple[float | None, int | None]:
  """Tokens per second with the best K, and that K."""
  return max(((speculative_ceiling(
      chip, target, drafter, tau, K, passes=K if each else 1, **shape), K)
      for K, tau in taus.items()), default=(None, None))


def cache_room(facts: Mapping[str, Any], memory_bytes: float) -> dict[str, float | None]:
  """Tokens of cache beside the weights, without and with the drafter (its weights, and its own
  state of each token)."""
  target, drafter = facts["target"], facts["drafter"]
  left = memory_bytes - target["parameter_bytes"]
  plain = left / target["cache_bytes_per_token"]
  both = (left - drafter["parameter_bytes"]) / (
      target["cache_bytes_per_token"] + drafter["cache_bytes_per_token"])
  return {"cache_tokens": plain if plain > 0 else None,
          "cache_tokens_with_drafter": both if both > 0 else None}


def dense_example(
    facts: Mapping[str, Any], taus: Mapping[int, float], size: float = DENSE_BYTES,
) -> dict[str, Any]:
  """What the same tau would buy a dense model of `size` bytes of weights, one sequence at a time.

  Its drafter is as large beside it as the one at hand beside its target. The context costs nothing
  here: the plain ceiling is bandwidth / bytes of weights.

  Returns:
    {"weight_bytes", "drafter_share": of the bytes that a pass reads, "rows": [{"name", "fits",
    "plain_tokens_per_s", "draft_len", "tau", "tokens_per_s": with the best K, and "tau_2",
    "tau_3", "tau_4": tokens per second of such a tau with that drafter and K = tau or, if that is
    more, the best K: a round of K drafts gives K + 1 tokens at most}]}.
  """
  target, drafter = models(facts)
  share = drafter.weight_bytes / (
      target.weight_bytes + target.expert_bytes * target.experts)
  each = facts["drafter"]["depth_passes"] == "each"
  per = facts["target"]["parameter_bytes"] / facts["target"]["parameters"]
  large, small = (Model(part, 2.0 * part / per) for part in (size, size * share))
  rows = []
  for chip in ACCELERATORS:
    fast, K = _best(chip, large, small, taus, each)
    row = {"name": chip.name, "fits": bool(size * (1 + share) <= chip.memory),
           "plain_tokens_per_s": plain_ceiling(chip, large), "draft_len": K,
           "tau": taus.get(K), "tokens_per_s": fast}
    for tau in DENSE_TAUS if K else ():
      row[f"tau_{tau:g}"] = _best(chip, large, small, {max(K, math.ceil(tau)): tau}, each)[0]
    rows.append(row)
  return {"weight_bytes": size, "drafter_share": share, "rows": rows}


def experts_table(
    mixtures: Mapping[str, tuple[int, int]], widths: Sequence[int] = (1, 2, 4, 6, 8, 16, 32, 64),
) -> list[dict]:
  """Expected distinct experts of a layer by the tokens of a pass.

  Args:
    mixtures: experts and how many of them a token uses, by name.
    widths: tokens of a pass, of all sequences together.
  """
  return [{"name": name, "experts": N, "per_token": k,
           "by_tokens": {str(T): distinct_experts(N, k, T) for T in widths}}
          for name, (N, k) in mixtures.items()]
