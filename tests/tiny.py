"""A tiny random target and scripted drafters, shared by the tests of the decoding half."""

import functools
import string

import jax.numpy as jnp
import numpy as np
from flax import nnx

from spec_jax import drafters, sampling
from spec_jax.models.config import DecoderConfig
from spec_jax.models.decoder import Decoder, tensor_shapes
from spec_jax.target import Target, from_module
from spec_jax.types import Proposal
from tests.weights import toy

VOCAB = 64
PAD = 0


def config(**changes) -> DecoderConfig:
  """Two layers, hidden 32, 64 ids; no EOS unless asked for."""
  fields = dict(
      vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
      num_kv_heads=2, head_dim=8, max_position=512, tie_embeddings=False, pad_id=PAD)
  return DecoderConfig(**(fields | changes))


def tensors(cfg: DecoderConfig, seed: int = 0) -> dict[str, np.ndarray]:
  """Random tensors whose logits are far apart: greedy text that wanders, margins of about 0.1."""
  rng = np.random.default_rng(seed)
  wide = {"embed": 1.0, "head": 0.5}
  return {
      name: np.ones(shape, np.float32) if name.endswith("norm")
      else rng.normal(size=shape).astype(np.float32) * wide.get(name, 0.3)
      for name, shape in tensor_shapes(cfg).items()}


def make(cfg: DecoderConfig, values: dict[str, np.ndarray], tokenizer=None) -> Target:
  """A float32 target of these tensors."""
  return from_module(Decoder(cfg, lambda name: jnp.asarray(values[name])), tokenizer=tokenizer)


@functools.cache
def target(seed: int = 0) -> Target:
  """The target of most tests, with its tokenizer."""
  return make(config(), tensors(config(), seed), tokenizer())


@functools.cache
def self_drafter(seed: int = 0) -> drafters.Drafter:
  """The target drafting for itself."""
  return drafters.load_drafter("self", target(seed))


@functools.cache
def weak_drafter(seed: int = 0) -> drafters.Drafter:
  """The target's first layer: right now and then."""
  return drafters.wrap("small_lm", "weak", drafters.init_from_target(target(seed), (0,)))


def tokenizer():
  """64 tokens: three control tokens, letters, digits and a few merges."""
  letters = list("abcdefghijklmnopqrstuvwxyz") + ["\u0120"] + list(string.digits) + ["<", "|"]
  merges = [a + b for a, b in toy.MERGES]
  count = VOCAB - len(toy.SPECIALS) - len(letters) - len(merges)
  return toy.tokenizer(
      tokens=toy.SPECIALS + letters + merges + list(string.ascii_uppercase[:count]))


def prompts(count: int, longest: int = 12, seed: int = 0, lowest: int = 3) -> list[list[int]]:
  """Random id lists of 2...longest ids, the first of each its own."""
  rng = np.random.default_rng(seed)
  heads = rng.permutation(np.arange(lowest, VOCAB))[:count]
  return [[int(head), *rng.integers(lowest, VOCAB, rng.integers(1, longest)).tolist()]
          for head in heads]


class Scripted(nnx.Module):
  """Proposes from a table looked up by the row's first token and the position.

  Attributes:
    table: [V, S] ids by first token of the prompt and absolute position.
    right: [V] how many proposals of a round are the table's; the others are one id further.
  """

  taps: tuple[int, ...] = ()
  max_position = 1 << 30

  def __init__(self, table: np.ndarray, right: np.ndarray):
    self.table = nnx.Variable(jnp.asarray(table, jnp.int32))
    self.right = nnx.Variable(jnp.asarray(right, jnp.int32))

  def init_state(self, rows, capacity):
    return ()

  def insert(self, state, part, rows):
    return state

  def observe(self, state, tokens, features, positions, valid, target):
    return state

  def after_round(self, state, tokens, features, positions, valid, target):
    return state

  def propose(self, state, context, draft_len, sampling, target):
    first = context.tokens[:, 0]
    places = jnp.arange(draft_len)
    at = jnp.minimum(context.length[:, None] + places, self.table[...].shape[1] - 1)
    drafted = self.table[...][first[:, None], at]
    wrong = (drafted + 1) % VOCAB
    right = places < self.right[...][first][:, None]
    return Proposal(jnp.where(right, drafted, wrong), None), state


def scripted(prompts, answers, right, size: int = 128) -> drafters.Drafter:
  """A drafter that knows the answers and gets the first `right[i]` proposals of a round right."""
  table, counts = np.zeros((VOCAB, size), np.int32), np.zeros(VOCAB, np.int32)
  for prompt, answer, count in zip(prompts, answers, right, strict=True):
    row = [*prompt, *answer][:size]
    table[prompt[0], :len(row)] = row
    counts[prompt[0]] = count
  return drafters.wrap("ngram", "scripted", Scripted(table, counts))


class FixedLaw(Scripted):
  """Draws every proposal from one distribution q [V], whatever the context."""

  def __init__(self, q: np.ndarray):
    self.q = nnx.Variable(jnp.asarray(q, jnp.float32))

  def propose(self, state, context, draft_len, settings, target):
    B = context.length.shape[0]
    probs = jnp.broadcast_to(self.q[...], (B, draft_len, VOCAB))
    u = sampling.uniforms(context.keys, sampling.DRAFT, draft_len)
    return Proposal(sampling.draw(probs, u), probs), state


def fixed_law(q: np.ndarray) -> drafters.Drafter:
  """A Drafter of FixedLaw."""
  return drafters.wrap("ngram", "fixed law", FixedLaw(q))
