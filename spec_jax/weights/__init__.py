"""Checkpoints in foreign formats, behind one interface. Called by `load_target` and the exports."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np

from spec_jax.models.config import DecoderConfig
from spec_jax.tokenizer import Tokenizer
from spec_jax.weights import resolve
from spec_jax.weights.gguf import GgufCheckpoint
from spec_jax.weights.resolve import Source
from spec_jax.weights.safetensors import FolderCheckpoint
from spec_jax.weights.stream import Block

__all__ = ["Checkpoint", "open_checkpoint"]


@runtime_checkable
class Checkpoint(Protocol):
  """Weights on disk, read one tensor at a time under canonical names (see `names.py`).

  Attributes:
    source: where it lies.
    config: the decoder it describes.
  """

  source: Source
  config: DecoderConfig

  def names(self) -> list[str]:
    """Canonical names of the tensors."""

  def shape(self, name: str) -> tuple[int, ...]:
    """Of one tensor, matrices as [out, in]."""

  def blocks(self, name: str) -> Iterator[Block]:
    """One tensor in float32, a few rows at a time (see `stream.py`)."""

  def read(self, name: str) -> np.ndarray:
    """One tensor in float32, matrices as [out, in]."""

  def tokenizer(self) -> Tokenizer:
    """The tokenizer that came with the weights."""

  def weight_hash(self) -> str:
    """SHA-256 over the bytes of the weight files."""


def open_checkpoint(source: str) -> Checkpoint:
  """Opens a model: "demo", "hf:org/name", a folder in the Hugging Face layout or a .gguf file.

  Tensor names and shapes are checked here, so a broken file stops before anything is computed.

  Raises:
    UserError: names the path, field or tensor.
  """
  found = resolve.resolve(source)
  return GgufCheckpoint(found) if found.kind == "gguf" else FolderCheckpoint(found)
