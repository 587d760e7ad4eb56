"""What a verification pass of a mixture of experts costs by its width, beside the experts it reads.

  python -m tests.benchmarks.moe

A pass over T tokens sends each to k of N experts. Where tokens choose evenly and apart from each
other, T of them need N (1 - (1 - k/N)^T) different experts of a layer, and a pass that is bound by
reading weights grows with that number: speculation pays less beside a mixture than beside a dense
model, whose pass reads the same weights whatever T is. The table gives, for a random Qwen3-MoE:

  v(T)      the pass T wide over the pass one wide, measured
  dense     the same of a dense model whose MLP is as large as the k experts of a token
  expected  different experts by the formula
  routed    different experts of a layer that its router chose on random text, counted
  read      experts whose matrices the pass of this backend reads (for few tokens those that are
            needed on CPU, k for each elsewhere; for many all of them on CPU, those elsewhere)
  bound     v(T) by the formula if nothing but reading weights took time
"""

from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import spec_jax
from spec_jax import command, platform
from spec_jax.models import decoder
from spec_jax.models.config import DecoderConfig
from spec_jax.models.decoder import Decoder, random_tensors
from spec_jax.target import DTYPES, Target, from_module, held
from train_drafter import speed

_WIDTH = flags.DEFINE_integer("width", 16, "largest T", 1)
_EXPERTS = flags.DEFINE_integer("experts", 64, "N", 1)
_PER_TOKEN = flags.DEFINE_integer("per_token", 4, "k", 1)
_SIZE = flags.DEFINE_integer("expert_size", 256, "inner states of an expert", 1)
_HIDDEN = flags.DEFINE_integer("hidden", 512, "hidden size, a multiple of 256", 256)
_LAYERS = flags.DEFINE_integer("layers", 4, "layers", 1)
_REPEATS = flags.DEFINE_integer("repeats", 7, "measurements of each width", 1)
_DTYPE = flags.DEFINE_enum("dtype", "float32", list(DTYPES), "of the weights")
_VOCAB, _PROMPT, _COUNT = 8192, 32, 2  # ids, tokens in the cache, passes of one measurement


def make(experts: int, seed: int = 0) -> Target:
  """A random Qwen3-MoE, or with no experts a Qwen3 whose MLP is that of one token's experts."""
  D, k = _HIDDEN.value, _PER_TOKEN.value
  config = DecoderConfig(
      architecture="qwen3_moe" if experts else "qwen3", vocab_size=_VOCAB, hidden_size=D,
      intermediate_size=k * _SIZE.value, num_layers=_LAYERS.value, num_heads=D // 64,
      num_kv_heads=D // 256, head_dim=64, max_position=4096, qk_norm=True, num_experts=experts,
      experts_per_token=k if experts else 0, expert_size=_SIZE.value if experts else 0,
      norm_topk=bool(experts))
  tensor = random_tensors(config, seed, scale=0.05)
  return from_module(
      Decoder(config, lambda name: held(name, tensor(name), _DTYPE.value, tied=True)),
      dtype=_DTYPE.value)


def expected(experts: int, per_token: int, width: int) -> float:
  """Different experts that `width` tokens need when each draws `per_token` evenly."""
  return experts * (1 - (1 - per_token / experts) ** width)


def touched(experts: int, per_token: int, width: int, routed: float) -> float:
  """Experts whose matrices a pass reads on this backend (`moe.experts`)."""
  few, cpu = width * per_token <= experts, jax.default_backend() == "cpu"
  return (routed if few else experts) if cpu else width * per_token if few else routed


def routed(target: Target, width: int, texts: int = 32) -> list[float]:
  """Different experts of a layer that the first 1...width tokens of random texts are sent to, on
  average over layers and texts."""
  tokens = jnp.asarray(np.random.default_rng(width).integers(0, _VOCAB, (texts, width)))
  real, found = decoder.route, []

  def watched(*args):
    weights, chosen = real(*args)
    found.append(np.asarray(chosen).reshape(texts, width, -1))
    return weights, chosen

  with mock.patch.object(decoder, "route", watched):  # not jitted, so it sees numbers
    target.module.hidden(tokens, jnp.broadcast_to(jnp.arange(width), tokens.shape))
  ids = np.concatenate(found)  # of every layer and text
  return [float(np.mean([len(set(text[:T].ravel().tolist())) for text in ids]))
          for T in range(1, width + 1)]


def passes(target: Target, widths: range) -> dict[int, Callable]:
  """Width -> passes of the target over so many different tokens behind a prompt."""
  rng = np.random.default_rng(0)
  single = speed.Single(
      target, spec_jax.load_drafter("ngram", target), widths[-1] - 1, _PROMPT, widths[-1] + 1)
  program, params, state = single.prefilled(rng.integers(0, _VOCAB, _PROMPT - 1).tolist())
  blocks = {T: jnp.asarray(rng.integers(0, _VOCAB, (1, T)), jnp.int32) for T in widths}
  cache = [jax.tree.map(jnp.copy, state.cache)]

  def run(width):
    out, cache[0] = speed.pass_loop(
        program, params, cache[0], blocks[width], state.length, _COUNT)
    return out

  return {T: lambda T=T: run(T) for T in widths}


def shares(target: Target) -> tuple[float, float]:
  """Bytes of one expert in all layers, and of everything else that a pass reads."""
  leaves = jax.tree_util.tree_leaves_with_path(target.params)
  of_experts = sum(x.nbytes for path, x in leaves if "experts_" in jax.tree_util.keystr(path))
  return of_experts / _EXPERTS.value, sum(x.nbytes for _, x in leaves) - of_experts


def main(values: flags.FlagValues) -> None:
  """Measures both models in turn and prints the table."""
  del values
  platform.configure()
  N, k, widths = _EXPERTS.value, _PER_TOKEN.value, range(1, _WIDTH.value + 1)
  mixture, dense = make(N), make(0)
  pieces = {}
  for name, target in (("moe", mixture), ("dense", dense)):
    pieces |= {f"{name} {T}": piece for T, piece in passes(target, widths).items()}
  median = {name: float(np.median(times))
            for name, times in speed.interleaved(pieces, _REPEATS.value).items()}
  (one, rest), seen = shares(mixture), routed(mixture, widths[-1])
  milliseconds = {name: 1e3 * median[f"{name} 1"] / _COUNT for name in ("moe", "dense")}
  print(f"N = {N} experts of {_SIZE.value}, k = {k}, {_LAYERS.value} layers, hidden size "
        f"{_HIDDEN.value}, {_DTYPE.value}, {jax.default_backend()}; a pass one wide "
        f"{milliseconds['moe']:.1f} ms, dense {milliseconds['dense']:.1f} ms")
  print("   T   v(T)  dense  expected  routed  read  bound")
  for T in widths:
    need = expected(N, k, T)
    print(f"{T:4d}{median[f'moe {T}'] / median['moe 1']:7.2f}"
          f"{median[f'dense {T}'] / median['dense 1']:7.2f}{need:10.1f}{seen[T - 1]:8.1f}"
          f"{touched(N, k, T, seen[T - 1]):6.0f}{(rest + one * need) / (rest + one * k):7.2f}",
          flush=True)


if __name__ == "__main__":
  platform.tune_process()
  command.run(main, lambda argv: command.parse(argv, flags.FLAGS))
