"""Shape letters and the small frozen pytrees that cross module borders.

Shape letters: B rows, S capacity, T positions of one pass, K draft length, V vocabulary, D hidden
size, F width of the tapped features, N query heads, G key/value heads, H head size, R rotated
half size, W = K + 1 width of a verification pass.
"""

import dataclasses

import jax
from jaxtyping import Array, Float, Int


def pytree(cls):
  """Makes a frozen dataclass whose fields are all pytree children (or `static` metadata)."""
  cls = dataclasses.dataclass(frozen=True)(cls)
  static = [f.name for f in dataclasses.fields(cls) if f.metadata.get("static")]
  data = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("static")]
  return jax.tree_util.register_dataclass(cls, data, static)


@pytree
class Cache:
  """Keys and values of one decoder, a tuple over layers, rows addressed by absolute position.

  Attributes:
    k: per layer [B, G, S, H].
    v: per layer [B, G, S, H].
  """

  k: tuple[Float[Array, "B G S H"], ...]
  v: tuple[Float[Array, "B G S H"], ...]


@pytree
class DecoderOutput:
  """What one pass of a decoder gives.

  Attributes:
    hidden: [B, T, D] after the final norm, in the compute dtype.
    features: [B, T, F] outputs of the tapped layers, concatenated; F = 0 without taps.
    cache: the updated cache, None when the pass ran without one.
  """

  hidden: Float[Array, "B T D"]
  features: Float[Array, "B T F"]
  cache: Cache | None


@pytree
class Keys:
  """What the random draws of one round are named by, so that they depend on nothing else.

  Attributes:
    rows: [B] one key per sequence id.
    start: [B] absolute position of the first token that the round commits.
  """

  rows: jax.Array
  start: Int[Array, " B"]


@pytree
class Context:
  """The committed part of a decode, as a drafter sees it.

  Attributes:
    tokens: [B, S] committed ids, row b valid below length[b].
    length: [B] committed tokens; the last of them is not yet in the target's cache.
    keys: of the draws of this round.
    temperature: [B] sampling temperature of each row.
  """

  tokens: Int[Array, "B S"]
  length: Int[Array, " B"]
  keys: Keys
  temperature: Float[Array, " B"]


@pytree
class Proposal:
  """K drafted tokens.

  Attributes:
    tokens: [B, K].
    probs: [B, K, V] the float32 distributions the tokens were drawn from; None for a deterministic
      drafter (q is one-hot at the token).
  """

  tokens: Int[Array, "B K"]
  probs: Float[Array, "B K V"] | None


@pytree
class TrainStates:
  """What a drafter's teacher-forced pass gives to the loss: states before the head.

  Attributes:
    hidden: [N, J, E] J states for each of N teacher rows.
    source: [N] row of the teacher arrays (supervised positions of the batch) that holds the
      target's distribution of the token that the states predict.
    weight: [N, J] of the state in the loss; 0 for a state that predicts nothing.
    depth: [N, J] place in the draft, 0 for the first drafted token.
    block: [N, J] which draft the state belongs to, below `blocks`.
    blocks: how many drafts there may be.
  """

  hidden: Float[Array, "N J E"]
  source: Int[Array, " N"]
  weight: Float[Array, "N J"]
  depth: Int[Array, "N J"]
  block: Int[Array, "N J"]
  blocks: int = dataclasses.field(metadata=dict(static=True))


@pytree
class Verdict:
  """The outcome of one verification.

  Attributes:
    accepted: [B] drafts accepted, 0..K.
    next_token: [B] the token after them: the correction or the bonus.
  """

  accepted: Int[Array, " B"]
  next_token: Int[Array, " B"]
