"""A small decoder of the target's own architecture, drafting K tokens autoregressively."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from spec_jax import sampling as sampling_lib
from spec_jax.drafters.head import LearnedDrafter, follow
from spec_jax.models.cache import init_cache, insert_rows
from spec_jax.models.config import DecoderConfig
from spec_jax.models.decoder import Decoder, Stack, block_shapes, embed_rows
from spec_jax.models.quant import Int8Weight, Weight
from spec_jax.sampling import Sampling
from spec_jax.types import Cache, Context, Proposal, TrainStates


class SmallLM(LearnedDrafter):
  """The stack of a small decoder; embedding and head are the target's unless it has its own.

  Attributes:
    stack: the trained part, blocks and final norm.
    embed: [V, D] own embedding, absent when it is the target's.
  """

  kind = "small_lm"
  taps: tuple[int, ...] = ()

  def __init__(
      self,
      config: DecoderConfig,
      tensor: Callable[[str], Array],
      *,
      embed: Array | Int8Weight | None = None,
      head: Array | Int8Weight | None = None,
      draft_ids: Array | np.ndarray | None = None,
      rope_divisors: np.ndarray | None = None,
      mesh: Mesh | None = None,
  ):
    self.stack = Stack(config, tensor, rope_divisors, mesh)
    if embed is not None:
      self.embed = nnx.Variable(embed)
    self.set_head(config, head, draft_ids)

  def init_state(self, rows: int, capacity: int) -> Cache:
    """An empty key/value cache."""
    return init_cache(self.config, rows, capacity, self.stack.layers[0].wq[...].dtype)

  def insert(self, state: Cache, part: Cache, rows: Int[Array, " R"]) -> Cache:
    """Row refill: the first positions of other sequences into `rows`."""
    return insert_rows(state, part, rows)

  def observe(self, state, tokens, features, positions, valid, target: Decoder) -> Cache:
    """Absorbs a prompt: its keys and values, [B, T] ids at [B, T] positions from 0.

    Rows shorter than T write stale entries beyond their length, which later passes overwrite.
    """
    del features, valid
    return self._pass(state, tokens, positions, target, tokens.shape[1])[1]

  def after_round(self, state, tokens, features, positions, valid, target: Decoder) -> Cache:
    """Absorbs a verified block; `propose` has computed its keys already."""
    return state

  def catch_up(self, state: Cache, context: Context, draft_len: int, target: Decoder) -> Cache:
    """Keys of the tokens that the last round can have committed, and of the one before them: that
    row is empty behind a block of this drafter that was accepted whole."""
    start = jnp.maximum(context.length - draft_len - 3, 0)
    places = start[:, None] + jnp.arange(draft_len + 3)
    tokens = jnp.take_along_axis(context.tokens, places, 1)
    return self._pass(state, tokens, places, target)[1]

  def propose(
      self, state: Cache, context: Context, draft_len: int, sampling: Sampling, target: Decoder,
  ) -> tuple[Proposal, Cache]:
    """Drafts K tokens.

    The first step is two wide, the last two committed tokens: after a fully accepted block the row
    of the last draft was never computed, and this writes it at no extra cost.
    """
    length = context.length
    two = jnp.maximum(length[:, None] - 2 + jnp.arange(2), 0)
    tokens = jnp.take_along_axis(context.tokens, two, 1)
    logits, state = self._pass(state, tokens, two, target)
    u = sampling_lib.uniforms(context.keys, sampling_lib.DRAFT, draft_len)
    pick = functools.partial(
        self.pick, context=context, sampling=sampling, width=target.config.vocab_size)
    first, probs = pick(logits, jnp.int32(0), u[:, 0])

    def step(carry, inputs):
      state, token = carry
      offset, u = inputs
      logits, state = self._pass(state, token[:, None], (length + offset)[:, None], target)
      token, probs = pick(logits, offset + 1, u)
      return (state, token), (token, probs)

    proposal, (state, _) = follow(step, (state, first), first, probs, u)
    return proposal, state

  def own_tensors(self) -> dict[str, Weight]:
    """The tensors of the stack by canonical name."""
    tensors = {"final_norm": self.stack.final_norm[...]}
    for i, block in enumerate(self.stack.layers):
      tensors |= {f"layers.{i}.{name}": getattr(block, name)[...]
                  for name in block_shapes(self.config)}
    return tensors

  @property
  def rope_divisors(self) -> tuple[float, ...] | None:
    return self.stack.rope_divisors

  def train_hidden(
      self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"],
      segments: Int[Array, "B T"] | None, target: Decoder) -> Float[Array, "B T D"]:
    """Hidden states of whole sequences, before the head."""
    return self.stack(self._embed(tokens, target), positions, segments=segments).hidden

  def train_states(self, batch: dict[str, Array], target: Decoder, key: Array) -> TrainStates:
    """The states behind every supervised position (see `LearnedDrafter.train_states`)."""
    del key
    hidden = self.train_hidden(batch["tokens"], batch["positions"], batch["segments"], target)
    count = batch["place"].shape[0]
    return TrainStates(
        hidden.reshape(-1, 1, hidden.shape[-1])[batch["place"]], jnp.arange(count),
        batch["weight"][:, None], jnp.zeros((count, 1), jnp.int32), jnp.arange(count)[:, None],
        count)

  def _embed(self, tokens, target):
    if hasattr(self, "embed"):
      return embed_rows(self.embed[...], tokens, self.config.embed_scale)
    return target.embedded(tokens)

  def _pass(self, state, tokens, positions, target, attend_length=None):
    """Logits [B, Vd] of the last position, and the cache."""
    out = self.stack(
        self._embed(tokens, target), positions, state, attend_length=attend_length)
    return self.logits(out.hidden[:, -1], target), out.cache
