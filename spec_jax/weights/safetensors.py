"""Reads and writes model folders in the Hugging Face layout.

Reading maps the files and converts a few rows at a time. Called by `open_checkpoint`; the exports
call `write_folder`.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from spec_jax.errors import UserError
from spec_jax.models.config import DecoderConfig, RopeScaling
from spec_jax.models.decoder import rope_inverse_frequencies, tensor_shapes
from spec_jax.models.hf_config import check_model_type, is_wrapped
from spec_jax.tokenizer import Tokenizer
from spec_jax.weights import names, stream
from spec_jax.weights.resolve import Source, files_sha256
from spec_jax.weights.stream import Block

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_FLOATS = {"F64", "F32", "F16", "BF16"}


class FolderCheckpoint:
  """A folder with config.json, safetensors and tokenizer files, open for reading.

  Attributes:
    source: where it lies.
    config: the decoder it describes; `eos_ids` is the union over config.json,
      generation_config.json and the tokenizer, `vocab_real` the tokenizer's size.
  """

  def __init__(self, source: Source):
    self.source = source
    folder = source.path
    self._tokenizer = Tokenizer.from_folder(folder)
    try:
      fields = _read_object(folder / "config.json")
      check_model_type(fields)
      config = DecoderConfig.from_hf(fields)
    except UserError as error:
      raise UserError(f"{folder}: {error}") from None
    if self._tokenizer.vocab_size > config.vocab_size:
      raise UserError(f"{folder}: the tokenizer has {self._tokenizer.vocab_size} tokens, "
                      f"config.json vocab_size={config.vocab_size}")
    self._file_of = _find_tensors(folder)
    self.config = dataclasses.replace(
        config,
        bos_id=self._tokenizer.bos_id,
        eos_ids=self._tokenizer.eos_ids,
        pad_id=self._tokenizer.pad_id,
        vocab_real=self._tokenizer.vocab_size,
    )
    self._names = names.HF_NAMES[config.architecture]
    if is_wrapped(fields):
      self._names = names.of_text_tower(self._names, self._file_of)
      self._file_of = {name: path for name, path in self._file_of.items()
                       if not name.startswith(names.HF_TOWERS)}
    self._less_one = config.architecture in names.HF_NORMS_LESS_ONE
    needed = tensor_shapes(self.config)
    found = self._shapes()
    head = self._names["head"]
    if config.tie_embeddings and head in found:
      self._check_tied(head, found)
      del found[head]
    elif head not in found and not config.tie_embeddings:
      raise UserError(f"{folder} has no tensor {head}, and config.json says "
                      "tie_word_embeddings=false")
    names.check_tensors(needed, found, self._names, str(folder))
    self._needed = needed

  def names(self) -> list[str]:
    """Canonical names of the tensors."""
    return list(self._needed)

  def shape(self, name: str) -> tuple[int, ...]:
    """Shape of a tensor by canonical name."""
    return self._needed[name]

  def blocks(self, name: str) -> Iterator[Block]:
    """One tensor in float32 by blocks of rows; those of experts are one expert each.

    Args:
      name: canonical.
    """
    shape = self._needed[name]
    parts = names.stored_parts(self._names, name, shape)
    offset = np.float32(self._less_one and name.endswith("norm"))
    if next(iter(parts.values())) != shape:
      for e, stored in enumerate(parts):
        for rows, value in self._rows(stored):
          yield (e, rows), value
      return
    for rows, value in self._rows(next(iter(parts))):
      yield rows, value + offset if offset else value

  def read(self, name: str) -> np.ndarray:
    """One tensor in float32.

    Args:
      name: canonical.
    """
    return stream.whole(self, name)

  def tokenizer(self) -> Tokenizer:
    """The tokenizer of the folder."""
    return self._tokenizer

  def weight_hash(self) -> str:
    """SHA-256 over the weight files."""
    return files_sha256(sorted(set(self._file_of.values())))

  def _rows(self, stored: str) -> Iterator[tuple[slice, np.ndarray]]:
    """Rows of one stored tensor as float32, read from the file when they are asked for."""
    with safetensors.safe_open(self._file_of[stored], framework="numpy") as file:
      view = file.get_slice(stored)
      for rows in stream.spans(view.get_shape()):
        yield rows, view[rows].astype(np.float32, copy=False)

  def _shapes(self) -> dict[str, tuple[int, ...]]:
    """Stored name -> shape, from the headers alone."""
    found = {}
    for path in sorted(set(self._file_of.values())):
      with safetensors.safe_open(path, framework="numpy") as file:
        present = set(file.keys())
        for name in (n for n, where in self._file_of.items() if where == path):
          if name not in present:
            raise UserError(f"{path} has no tensor {name}, which {_INDEX} says it holds")
          view = file.get_slice(name)
          if view.get_dtype() not in _FLOATS:
            raise UserError(f"{path}: tensor {name} has type {view.get_dtype()}, which is not "
                            f"supported (only {', '.join(sorted(_FLOATS))})")
          found[name] = tuple(view.get_shape())
    return found

  def _check_tied(self, head: str, found: Mapping[str, tuple[int, ...]]) -> None:
    embed = self._names["embed"]
    if embed in found and not (found[embed] == found[head] and all(
        np.array_equal(ours, theirs) for (_, ours), (_, theirs) in zip(
            self._rows(head), self._rows(embed), strict=True))):
      raise UserError(f"{self.source.path}: config.json says tie_word_embeddings=true, but "
                      f"{head} differs from {embed}")


def write_folder(
    path: str | Path,
    config: DecoderConfig,
    tensors: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
    dtype: str = "float32",
    extra_config: Mapping[str, Any] | None = None,
) -> None:
  """Writes a stock Hugging Face folder that transformers, vLLM and SGLang read.

  Args:
    path: the folder; made when absent.
    config: the decoder; must need exactly the given tensors.
    tensors: canonical name -> array. "rope_freqs" (from a GGUF target) becomes the rope_scaling
      that it came from.
    tokenizer: written beside the weights.
    dtype: of the stored weights: float32, bfloat16 or float16.
    extra_config: further fields of config.json.

  Raises:
    UserError: a tensor is missing, has another shape or no place in the format.
  """
  path = Path(path)
  if dtype not in _DTYPES:
    raise UserError(f"dtype={dtype!r} is not supported (known: {', '.join(_DTYPES)})")
  tensors = dict(tensors)
  if (freqs := tensors.pop("rope_freqs", None)) is not None:
    config = dataclasses.replace(config, rope_scaling=_scaling_of(np.asarray(freqs), config))
  family = names.HF_NAMES[config.architecture]
  stored: dict[str, np.ndarray] = {}
  for name, value in tensors.items():
    try:
      parts = names.stored_parts(family, name, np.shape(value))
    except KeyError:
      raise UserError(f"tensor {name} has no place in a {config.architecture} folder") from None
    if config.architecture in names.HF_NORMS_LESS_ONE and name.endswith("norm"):
      value = np.asarray(value, np.float32) - np.float32(1)
    whole = np.shape(value) in parts.values()
    stored |= zip(parts, [value] if whole else value, strict=True)
  found = {name: tuple(np.shape(value)) for name, value in stored.items()}
  names.check_tensors(tensor_shapes(config), found, family, str(path))
  path.mkdir(parents=True, exist_ok=True)
  safetensors.numpy.save_file(
      {name: np.ascontiguousarray(value, _DTYPES[dtype]) for name, value in stored.items()},
      str(path / _SINGLE), metadata={"format": "pt"})
  tokenizer.save(path)
  fields = config.to_hf()
  ids = {key: fields[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")
         if fields[key] is not None}
  _write_json(path / "generation_config.json", ids)
  _write_json(path / "config.json", fields | {"torch_dtype": dtype} | dict(extra_config or {}))


def _scaling_of(freqs: np.ndarray, config: DecoderConfig) -> RopeScaling:
  # The format has no table of divisors. The tables met in practice are llama3's, whose factor is
  # the largest divisor; anything else is refused rather than approximated.
  guess = RopeScaling("llama3", float(np.round(freqs.max(), 3)), 1.0, 4.0, 8192)
  if config.rope_scaling is not None or not np.allclose(
      freqs, rope_divisors(dataclasses.replace(config, rope_scaling=guess)), rtol=1e-3):
    raise UserError("rope_freqs is not a llama3 table: a Hugging Face folder cannot hold it")
  return guess


def rope_divisors(config: DecoderConfig) -> np.ndarray:
  """What the config's rotary scaling divides the inverse frequencies by, [H/2].

  GGUF stores this table as rope_freqs.weight.
  """
  plain = dataclasses.replace(config, rope_scaling=None)
  return rope_inverse_frequencies(plain) / rope_inverse_frequencies(config)


def _find_tensors(folder: Path) -> dict[str, Path]:
  """Stored name -> file. With an index, only the files it names are opened."""
  if (folder / _INDEX).is_file():
    weight_map = _read_object(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(
        isinstance(shard, str) for shard in weight_map.values()):
      raise UserError(f"{folder / _INDEX} has no weight_map")
    file_of = {name: folder / shard for name, shard in weight_map.items()}
    for path in sorted(set(file_of.values())):
      if not path.is_file():
        raise UserError(f"{path} does not exist, but {_INDEX} names it")
      _open_check(path)
    return file_of
  path = folder / _SINGLE
  if not path.is_file():
    raise UserError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
  return dict.fromkeys(_open_check(path), path)


def _open_check(path: Path) -> list[str]:
  try:
    with safetensors.safe_open(path, framework="numpy") as file:
      return list(file.keys())
  except safetensors.SafetensorError as error:
    raise UserError(f"{path} is not a readable safetensors file: {error}") from None


def _read_object(path: Path) -> dict[str, Any]:
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise UserError(f"{path} cannot be read: {error.strerror}") from None
  except (ValueError, RecursionError) as error:
    raise UserError(f"{path} is not JSON: {error}") from None
  if not isinstance(value, dict):
    raise UserError(f"{path} holds a {type(value).__name__}, not an object")
  return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
