"""Learned drafters in the folders that servers load, both ways: EAGLE-3, DFlash and DSpark.

A published folder holds config.json and model.safetensors (or shards with an index, or the
pytorch_model.bin of old ones), and perhaps the tokenizer. `load_drafter` asks `is_published` and
reads with `read_published`; `train_drafter/export.py` writes with `write_published`. FORMATS.md
lists fields and tensors.

published_config.py holds what config.json may say, forms.py where the forms of the servers differ,
speculators.py the nested config.json of that package.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from spec_jax.errors import UserError
from spec_jax.models.config import DecoderConfig
from spec_jax.target import Target
from spec_jax.tokenizer import Tokenizer, check_same_vocabulary
from spec_jax.weights import forms, pickled, published_config, speculators
from spec_jax.weights import safetensors as folders
from spec_jax.weights.forms import Form
from spec_jax.weights.names import HF_NAMES, check_tensors, stored_name
from spec_jax.weights.published_config import FORMS

_EAGLE3_NAMES = {
    "fc": "fc.weight",
    "final_norm": "norm.weight",
    "layers.{i}.hidden_norm": "midlayer.hidden_norm.weight",
    **{name: stored.replace("model.layers.{i}", "midlayer")
       for name, stored in HF_NAMES["qwen3"].items() if name.startswith("layers.")},
}
_TYPES = {"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"}
_BIAS = "confidence_head.proj.bias"
_TRAINING = ("verifier_lm_head.weight", "verifier_norm.weight")  # of the target, kept for a loss
_NEAR = 0.2  # relative distance up to which a tensor is a copy of the target's
_ROUNDED = 0.01  # up to which nothing but rounding to half precision made the difference


_HF = Form()


@dataclasses.dataclass(frozen=True, eq=False)
class Published:
  """A drafter as read from a published folder; `drafters.build` takes these.

  Attributes:
    kind: eagle3, dflash or dspark.
    config: of its decoder layers; vocabulary and special ids are the target's.
    tensors: float32 by canonical name.
    options: taps, and mask_id and block_size of the block drafters; what is not usual besides.
    draft_ids: [Vd] ids that it can propose, None for all of them.
    head: [Vd, D] its own scoring rows, None where they are the target's.
  """

  kind: str
  config: DecoderConfig
  tensors: dict[str, np.ndarray]
  options: dict[str, Any]
  draft_ids: np.ndarray | None
  head: np.ndarray | None


def is_published(folder: str | Path) -> bool:
  """Whether config.json in `folder` describes a drafter of such a form, supported or not."""
  try:
    fields = folders._read_object(Path(folder) / "config.json")
  except UserError:
    return False
  drafters = {name for names, _ in FORMS.values() for name in names} - {"LlamaForCausalLM"}
  return any(name in fields for name in published_config.SIGNS) or (
      published_config.architecture(fields) in drafters)


def read_published(folder: str | Path, target: Target) -> Published:
  """Reads a published drafter for a target.

  The embedding, and the head of a block drafter, are the target's: public folders often hold frozen
  copies, which are checked against it and not kept, but for a head that differs by more than
  rounding. An EAGLE-3 folder that names no layers was made for the default ones.

  Args:
    folder: with config.json and the weights.
    target: it lends what the folder does not hold, and it must be of the stated sizes.

  Raises:
    UserError: a field, value or tensor that is not supported, missing or not the target's, by name.
  """
  folder = Path(folder)
  fields = folders._read_object(folder / "config.json")
  try:
    if speculators.is_speculators(fields):
      fields = speculators.flattened(fields)
    kind, config, options = published_config.described(fields, target)
  except UserError as error:
    raise UserError(f"{folder}: {error}") from None
  if target.tokenizer is not None and (folder / "tokenizer.json").is_file():
    check_same_vocabulary(Tokenizer.from_folder(folder), target.tokenizer)
  stored = {name.removeprefix("model."): value for name, value in _load(folder).items()
            if name not in _TRAINING}
  try:
    head, ids = _vocabulary(kind, fields, stored, target)
    width = 0 if ids is None else len(ids)
    tensors = _canonical(kind, fields, stored, config, options["taps"], width)
  except UserError as error:
    raise UserError(f"{folder}: {error}") from None
  return Published(kind, config, tensors, options, ids, head)


def write_published(
    folder: str | Path, module: nnx.Module, target: Target,
    extra_config: Mapping[str, Any] | None = None, form: Form = _HF) -> None:
  """Writes a drafter in a published form of its kind: float32 weights, config, tokenizer.

  Where the form of a block drafter has no reduced vocabulary, the folder proposes from all ids, and
  those that the drafter could not propose have a zero row in markov_w2.

  Args:
    folder: made when absent; config.json is written last.
    module: an Eagle3, DFlash or DSpark.
    target: that it drafts for.
    extra_config: further fields of config.json, of no effect on what is computed.
    form: for whom.

  Raises:
    UserError: the kind has no such form, or a setting of the drafter no place in it; by name.
  """
  folder, kind = Path(folder), module.kind
  if kind not in FORMS:
    raise UserError(f"drafter kind={kind!r} has no published form (only {', '.join(FORMS)})")
  forms.refuse(module, target, form.name)
  config = module.config
  if module.rope_divisors is not None:
    divisors = np.asarray(module.rope_divisors)
    config = dataclasses.replace(config, rope_scaling=folders._scaling_of(divisors, config))
  fields = published_config.fields_of(module, config, target)
  fields = forms.fields(fields, module, target, form)
  stored = _stored(module, target, forms.keeps_vocabulary(kind, form.name))
  stored = forms.tensors(stored, module, target, form)
  folder.mkdir(parents=True, exist_ok=True)
  safetensors.numpy.save_file(
      {name: np.ascontiguousarray(value) for name, value in stored.items()},
      str(folder / folders._SINGLE), metadata={"format": "pt"})
  if target.tokenizer is not None:
    target.tokenizer.save(folder)
  folders._write_json(folder / "config.json", fields | dict(extra_config or {}))


# Tensors.


def _names(kind: str) -> dict[str, str]:
  """Canonical name -> stored name."""
  from spec_jax.drafters import dflash, dspark

  return {"eagle3": _EAGLE3_NAMES, "dflash": dflash.EXPORT_NAMES,
          "dspark": dspark.EXPORT_NAMES}[kind]


def _shapes(
    kind: str, config: DecoderConfig, taps: tuple[int, ...], rank: int, width: int,
) -> dict[str, tuple[int, ...]]:
  """Shape of every tensor in the file, by canonical name; width: of a reduced vocabulary, or 0."""
  from spec_jax.drafters import dflash, dspark, eagle3

  if kind != "dspark":
    return {"eagle3": eagle3, "dflash": dflash}[kind].tensor_shapes(config, taps)
  shapes = dspark.tensor_shapes(config, taps, rank, width)
  return shapes | {"confidence": (1, shapes["confidence"][0] - 1)}


def _stored(module: nnx.Module, target: Target, keep: bool) -> dict[str, np.ndarray]:
  """The tensors of the file by stored name; `keep` a reduced vocabulary, or draft from all ids."""
  kind, V = module.kind, target.config.vocab_size
  tensors = {name: np.asarray(value, np.float32) for name, value in module.own_tensors().items()}
  reduced = hasattr(module, "draft_ids")
  ids = np.asarray(module.draft_ids[...], np.int64) if reduced else np.arange(V)
  # Ascending, because trainers take the draft's columns of a target by the mask t2d.
  order = np.argsort(ids)
  bias = None
  if kind == "dspark":
    bias, tensors["confidence"] = tensors["confidence"][-1:], tensors["confidence"][None, :-1]
    rows = tensors["markov_w2"][order]
    if not keep:
      rows = np.zeros((V, rows.shape[1]), np.float32)
      rows[ids] = tensors["markov_w2"]
    tensors["markov_w2"] = rows
  stored = {stored_name(_names(kind), name): value for name, value in tensors.items()}
  if bias is not None:
    stored[_BIAS] = bias
  if kind == "eagle3" or keep and (reduced or module.own_head):
    head = np.asarray(module.head_weight(target.module), np.float32)
    stored |= {"lm_head.weight": head[order]}
  if kind == "eagle3" or keep and reduced:
    stored |= {"d2t": ids[order] - np.arange(len(ids)), "t2d": np.isin(np.arange(V), ids)}
  return stored


def _load(folder: Path) -> dict[str, np.ndarray]:
  """Every tensor of a folder by stored name, as stored."""
  if (folder / pickled.FILE).is_file() and not any(folder.glob("*.safetensors*")):
    return pickled.read(folder / pickled.FILE)
  where, stored = folders._find_tensors(folder), {}
  for path in sorted(set(where.values())):
    with safetensors.safe_open(path, framework="numpy") as file:
      present = set(file.keys())
      for name in (name for name, at in where.items() if at == path):
        if name not in present:
          raise UserError(f"{path} has no tensor {name}, which the index says it holds")
        if (kind := file.get_slice(name).get_dtype()) not in _TYPES:
          raise UserError(f"{path}: tensor {name} has type {kind}, which is not supported (only "
                          f"{', '.join(sorted(_TYPES))})")
        stored[name] = file.get_tensor(name)
  return stored


def _canonical(
    kind: str, fields: Mapping[str, Any], stored: dict[str, np.ndarray], config: DecoderConfig,
    taps: tuple[int, ...], width: int) -> dict[str, np.ndarray]:
  """The drafter's own tensors, float32 by canonical name; `stored` holds no others."""
  names = _names(kind)
  if kind == "eagle3":  # servers rename the layer
    stored = {name.replace("layers.0.", "midlayer."): value for name, value in stored.items()}
  bias = stored.pop(_BIAS, np.zeros(1)) if kind == "dspark" else np.zeros(1)
  if bias.shape != (1,):
    raise UserError(f"tensor {_BIAS} has shape {list(bias.shape)}, not [1]")
  rank = 0
  if kind == "dspark":
    stated = published_config.method_of(fields).get("markov_rank")
    rank = published_config.whole("markov_rank", stated)
  shapes = _shapes(kind, config, taps, rank, width)
  check_tensors(shapes, {name: value.shape for name, value in stored.items()}, names,
                "model.safetensors")
  tensors = {name: stored[stored_name(names, name)].astype(np.float32) for name in shapes}
  if kind == "dspark":
    tensors["confidence"] = np.append(tensors["confidence"][0], bias.astype(np.float32))
  return tensors


def _vocabulary(
    kind: str, fields: Mapping[str, Any], stored: dict[str, np.ndarray], target: Target,
) -> tuple[np.ndarray | None, np.ndarray | None]:
  """Takes embedding, head and vocabulary map out of `stored`; gives the drafter's own head and ids.

  Returns:
    [Vd, D] head, None where it is the target's; [Vd] target ids, None for the whole vocabulary.
  """
  embed, head = (stored.pop(name, None) for name in ("embed_tokens.weight", "lm_head.weight"))
  if embed is not None:
    _check_copy("embed_tokens.weight", embed, target.module.embed[...])
  rows = target.module.head_weight()
  V, D = rows.shape
  size = fields.get("draft_vocab_size")
  size = V if size is None else published_config.whole("draft_vocab_size", size)
  if kind != "eagle3" and size == V:
    far = 0.0 if head is None else _check_copy("lm_head.weight", head, rows)
    return (head.astype(np.float32) if far > _ROUNDED else None), None
  if head is None and size == V and "d2t" not in stored:  # servers take the target's as well
    return None, None
  if head is None:
    raise UserError("has no tensor lm_head.weight")
  if head.shape != (size, D):
    raise UserError(f"tensor lm_head.weight has shape {list(head.shape)}, not [draft_vocab_size, "
                    f"hidden_size] = [{size}, {D}]")
  ids = _draft_ids(size, V, stored)
  theirs = np.asarray(rows if ids is None else rows[ids])
  own = None if np.array_equal(head.astype(theirs.dtype), theirs) else head.astype(np.float32)
  return own, ids


def _draft_ids(size: int, vocab_size: int, stored: dict[str, np.ndarray]) -> np.ndarray | None:
  """[Vd] target ids from the offsets d2t; None when they are all ids in order."""
  offsets, mask = stored.pop("d2t", None), stored.pop("t2d", None)
  if offsets is None:
    if size != vocab_size:
      raise UserError(f"has no tensor d2t, which draft_vocab_size={size} needs")
    offsets = np.zeros(size, np.int64)
  if offsets.shape != (size,):
    raise UserError(f"tensor d2t has shape {list(offsets.shape)}, not draft_vocab_size={size}")
  if offsets.dtype.kind not in "iu":
    raise UserError(f"tensor d2t has type {offsets.dtype}, not whole numbers")
  ids = np.arange(size) + offsets
  outside = ids[(ids < 0) | (ids >= vocab_size)]
  if len(outside) or len(np.unique(ids)) != size:
    wrong = f"id {outside[0]}" if len(outside) else "an id twice"
    raise UserError(f"tensor d2t gives {wrong}: its offsets must lead to {size} ids in "
                    f"0..{vocab_size - 1}")
  if mask is not None and not np.array_equal(mask, np.isin(np.arange(vocab_size), ids)):
    raise UserError("tensors d2t and t2d name different ids")
  return None if not offsets.any() and size == vocab_size else ids.astype(np.int32)


def _check_copy(name: str, copy: np.ndarray, original: Any) -> float:
  """A copy of a tensor of the target may be rounded, or the target's be, or trained a little, but
  no other; gives how far it is, relative to the target's."""
  if copy.shape != original.shape:
    raise UserError(f"tensor {name} has shape {list(copy.shape)}, the target's "
                    f"{list(original.shape)}")
  ours, theirs = np.asarray(copy, np.float32), np.asarray(original, np.float32)
  far = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
  if not far <= _NEAR:
    raise UserError(f"tensor {name} is not the target's, which the drafter would read instead: "
                    f"they differ by {far:.0%}")
  return far
