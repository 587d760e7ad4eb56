"""A step that scores a part of the draft vocabulary: sampled softmax with importance weights.

The ids of the batch are always there; of the others a random choice, each with the logarithm of its
inverse chance added to the logits of both sides. Then every sum over the vocabulary (the student's
normaliser, the teacher's mass, alpha) is an unbiased estimate of the whole sum, given the batch
(Bengio and Senecal 2008; Jean et al. 2015, 1412.2007).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from spec_jax.errors import UserError
from spec_jax.models.config import DecoderConfig
from spec_jax.models.decoder import Decoder
from train_drafter.config import Config

OWN_HEAD = "needs a drafter that borrows the target's head; this one has a head of its own"


def check(cfg: Config, target: DecoderConfig) -> None:
  """Refuses a choice that leaves out no id of the target's. That it is below a smaller
  drafter.draft_vocab is checked by `config.validate`.

  Raises:
    UserError: names both values.
  """
  most, asked = target.vocab_real, cfg.drafter.draft_vocab
  if (asked == 0 or asked > most) and cfg.train.sampled_vocab >= most:
    raise UserError(f"train.sampled_vocab={cfg.train.sampled_vocab} must be below the {most} ids "
                    f"of the target, all of which drafter.draft_vocab={asked} takes")


def choose(
    forced: Int[Array, " n"], size: int, count: int, key: Array,
) -> tuple[Int[Array, " s"], Float[Array, " s"]]:
  """`size` different places below `count`, ascending, and the logarithm of the inverse of the
  chance of each: 0 for those that are forced, if there is room for all of them.

  Args:
    forced: places that are wanted; those of `count` or more are ignored. Where there are more
      than `size`, a random choice of them.
    size: at most `count`.
    count: of the whole vocabulary.
    key: of the choice.
  """
  wanted = jnp.zeros(count, bool).at[forced].set(True, mode="drop")
  order = jax.random.uniform(key, (count,)) + wanted
  places = jnp.sort(jax.lax.top_k(order, size)[1])
  kept = jnp.sum(wanted)
  # Of more wanted places than there is room for, each has the same chance and no other has any.
  chance = jnp.where(
      wanted[places], jnp.minimum(size / jnp.maximum(kept, 1), 1.0),
      jnp.maximum(size - kept, 1) / jnp.maximum(count - kept, 1))
  return places, -jnp.log(chance).astype(jnp.float32)


def shrink(
    module: Any, target: Decoder, batch: dict[str, Array], size: int, key: Array,
) -> Float[Array, " s"]:
  """Reduces the draft vocabulary of a module to `size` ids and returns what is added to logits.

  Args:
    module: the drafter of one step, changed in place.
    target: lends the head.
    batch: whose tokens and greedy choices are kept.
    size: below the draft vocabulary's.
    key: of the choice.

  Raises:
    UserError: the head is the drafter's own, which is trained.
  """
  if module.own_head:
    raise UserError(f"train.sampled_vocab={size} {OWN_HEAD}")
  head = module.head_weight(target)
  real = min(module.config.vocab_real, target.config.vocab_real)
  known = hasattr(module, "draft_ids")
  ids = module.draft_ids[...] if known else jnp.arange(real)
  place = module.draft_place[...] if known else jnp.arange(target.config.vocab_size)
  wanted = jnp.concatenate([batch["tokens"].reshape(-1), batch["best"]])
  places, offset = choose(place[wanted], size, ids.shape[0], key)
  kept = ids[places]
  module.head = nnx.Variable(head[places])
  module.draft_ids = nnx.Variable(kept)
  module.draft_place = nnx.Variable(
      jnp.full(place.shape, size, jnp.int32).at[kept].set(jnp.arange(size, dtype=jnp.int32)))
  return offset
