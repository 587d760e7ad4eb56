"""A loaded target: decoder, tokenizer, and where they came from. `load_target` is the way in."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from spec_jax import sharding
from spec_jax.errors import UserError
from spec_jax.models import quant
from spec_jax.models.config import DecoderConfig
from spec_jax.models.decoder import BLOCK_TENSORS, Decoder, block_shapes
from spec_jax.models.quant import Int8Weight
from spec_jax.tokenizer import Tokenizer
from spec_jax.weights import Checkpoint, open_checkpoint

# Compute type of each: "int8w" holds matrices as int8 and multiplies them in bfloat16.
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8w": quant.COMPUTE}
# Matrices that stay floating under "int8w": a router decides by small differences, and of a table
# that is only looked up a step reads a row.
_FLOATING = ("router", "markov_w1")


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
  """The model whose output speculation must not change.

  Attributes:
    name: as given to `load_target`.
    config: its decoder config.
    tokenizer: with the chat template.
    graph: nnx graph definition of the decoder.
    params: its parameters; the only copy, shared with drafters that borrow embedding and head.
    dtype: a name of DTYPES.
    checkpoint: the files behind it, None for a model made in memory.
  """

  name: str
  config: DecoderConfig
  tokenizer: Tokenizer | None
  graph: nnx.GraphDef
  params: Any
  dtype: str
  checkpoint: Checkpoint | None = None

  @functools.cached_property
  def weight_hash(self) -> str:
    """SHA-256 of the weight files ("" for a model made in memory)."""
    return "" if self.checkpoint is None else self.checkpoint.weight_hash()

  @functools.cached_property
  def mesh(self) -> Mesh | None:
    """The devices that its parameters are divided over; None for one device."""
    return sharding.mesh_of(self.params)

  @property
  def module(self) -> Decoder:
    return nnx.merge(self.graph, self.params)


def load_target(source: str, dtype: str = "float32", mesh: Mesh | None = None) -> Target:
  """Loads a target.

  Args:
    source: "demo", a folder in the Hugging Face layout, a .gguf file, or "hf:org/name".
    dtype: "float32", "bfloat16" or "int8w" (matrices as int8 with a scale for each output
      channel, activations bfloat16; an embedding only when it is the head too, of experts not the
      router). Vectors (norms, biases) stay float32 in all.
    mesh: devices that its parameters are divided over (`sharding.make_mesh`), tensor by tensor, and
      with them everything that runs with the target; None for one device.

  Raises:
    UserError: a missing file, an unsupported field or an unknown dtype, by name.
  """
  if dtype not in DTYPES:
    raise UserError(f"dtype={dtype!r} is not supported (only {', '.join(DTYPES)})")
  checkpoint = open_checkpoint(source)
  config = checkpoint.config
  divisors = checkpoint.read("rope_freqs") if "rope_freqs" in checkpoint.names() else None
  module = Decoder(config, lambda name: read_tensor(
      checkpoint, name, dtype, config.tie_embeddings, mesh), divisors, mesh)
  return from_module(
      module, name=source, tokenizer=checkpoint.tokenizer(), dtype=dtype, checkpoint=checkpoint)


def is_int8(name: str, ndim: int, dtype: str, tied: bool = False) -> bool:
  """Whether a tensor is held as int8.

  Args:
    name: canonical.
    ndim: of the tensor.
    dtype: a name of DTYPES.
    tied: the embedding is the head, which every step reads whole.
  """
  last = name.rpartition(".")[2]
  return (dtype == "int8w" and ndim > 1 and last not in _FLOATING and (last != "embed" or tied))


def read_tensor(
    checkpoint: Checkpoint, name: str, dtype: str, tied: bool, mesh: Mesh | None = None,
) -> Array | Int8Weight:
  """One tensor of a checkpoint as the dtype holds it.

  It is converted on the way, a few rows at a time, so loading a model takes its own size and one
  tensor more, as the dtype holds it (the host's copy of what then goes to the devices).

  Args:
    checkpoint: open for reading.
    name: canonical.
    dtype: a name of DTYPES.
    tied: as `is_int8` has it.
    mesh: devices that the tensor is divided over.
  """
  def place(name, value):
    if mesh is None:
      return jnp.array(value)
    return sharding.place_tensor(name, value, value.dtype, mesh, checkpoint.config.head_dim)

  shape = checkpoint.shape(name)
  if is_int8(name, len(shape), dtype, tied):
    values, scale = np.empty(shape, np.int8), np.empty(shape[:-1], np.float32)
    for rows, block in checkpoint.blocks(name):
      values[rows], scale[rows] = quant.quantise(block)
    return Int8Weight(place(name, values), place(f"{name}.scale", scale))
  value = np.empty(shape, np.float32 if len(shape) == 1 else DTYPES[dtype])
  for rows, block in checkpoint.blocks(name):
    value[rows] = block
  return place(name, value)


def held(
    name: str, value: Array | np.ndarray | Int8Weight, dtype: str, tied: bool = False,
) -> Array | Int8Weight:
  """A tensor in memory as the dtype holds it; one that is held so already is not copied."""
  if not is_int8(name, value.ndim, dtype, tied):
    return jnp.asarray(value, jnp.float32 if value.ndim == 1 else DTYPES[dtype])
  return value if isinstance(value, Int8Weight) else quant.quantised(value)


def from_module(
    module: Decoder, *, name: str = "memory", tokenizer: Tokenizer | None = None,
    dtype: str = "float32", checkpoint: Checkpoint | None = None) -> Target:
  """Wraps a decoder that is already in memory."""
  graph, params = nnx.split(module)
  return Target(name, module.config, tokenizer, graph, params, dtype, checkpoint)


def canonical_tensors(target: Target) -> dict[str, Array | Int8Weight]:
  """The target's tensors by canonical name (as loaded, not copied).

  "rope_freqs" is among them when the target's file held such a table.
  """
  module = target.module
  tensors = {"embed": module.embed[...], "final_norm": module.stack.final_norm[...]}
  if not module.config.tie_embeddings:
    tensors["head"] = module.head[...]
  if module.stack.rope_divisors is not None:
    tensors["rope_freqs"] = jnp.asarray(module.stack.rope_divisors, jnp.float32)
  for i, block in enumerate(module.stack.layers):
    tensors |= {f"layers.{i}.{name}": getattr(block, name)[...]
                for name in block_shapes(module.config)}
  return tensors


def llama_layer(
    tensors: Mapping[str, Array | Int8Weight], config: DecoderConfig, layer: int, seed: int = 0,
) -> dict[str, Array]:
  """The part of a target's layer that a Llama layer has, in float32: where a drafter that reads the
  target's states starts from.

  Biases and the norms behind attention and MLP have no place there. A mixture of experts has no
  dense MLP to copy: the layer starts with small random projections whose output is nothing.

  Args:
    tensors: of the target, by canonical name.
    config: of the target.
    layer: 0-based.
    seed: of what is random.
  """
  shapes = block_shapes(config.plain(config.num_layers))
  out = {}
  for name in BLOCK_TENSORS:
    value = tensors.get(f"layers.{layer}.{name}")
    if value is not None:
      out[name] = jnp.asarray(value, jnp.float32)
    elif name == "w_down":
      out[name] = jnp.zeros(shapes[name])
    else:
      key = jax.random.fold_in(jax.random.key(seed), BLOCK_TENSORS.index(name))
      out[name] = 0.02 * jax.random.normal(key, shapes[name])
  return out


def default_mask_id(target: Target) -> int:
  """A control token that no text of the target holds: the highest id that is free.

  Text never becomes a control id (tokenizer.py), so what remains are those of the special roles and
  of the chat template.

  Raises:
    UserError: there is none.
  """
  tokenizer = target.tokenizer
  if tokenizer is not None:
    taken = {tokenizer.bos_id, tokenizer.pad_id, *tokenizer.eos_ids, target.config.bos_id,
             target.config.pad_id, *target.config.eos_ids} | _chat_ids(tokenizer)
    # A branch of the template that those chats do not reach (tools, images) has its tokens too.
    free = [i for i in tokenizer.control_ids - taken if i < target.config.vocab_size
            and tokenizer.id_to_token(i) not in tokenizer.chat_template]
    if free:
      return max(free)
  raise UserError(f"target {target.name} has no unused control token that could be the mask: set "
                  "drafter.mask_id to an id that never occurs in the data")


def _chat_ids(tokenizer: Tokenizer) -> set[int]:
  """Ids of rendered chats, and of a letter that the vocabulary may not know."""
  used = set(tokenizer.encode("\U0010fffd"))
  turns = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")]
  for messages in (turns, turns[1:], turns[1:2]):
    for prompt in (True, False):
      try:
        used |= set(tokenizer.encode_chat(messages, add_generation_prompt=prompt))
      except UserError:  # there are templates without a system turn, and models without a template
        continue
  return used
