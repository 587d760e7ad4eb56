"""A drafter's own folder: drafter.json says what it is, drafter.safetensors holds its tensors.

Embedding and head are the target's and stay with it, except where the drafter has its own. Called
by `load_drafter` and by the train stage.
"""

import contextlib
import dataclasses
import json
import math
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Array

from spec_jax.drafters.head import LearnedDrafter
from spec_jax.errors import UserError
from spec_jax.models.config import DecoderConfig, RopeScaling
from spec_jax.models.quant import Weight
from spec_jax.target import Target
from spec_jax.tokenizer import check_same_strings

_VOCABULARY = "vocabulary.json"  # the tokens by id
_TEXTS = ("kind", "target", "target_weight_hash", "tokenizer_hash")
_KINDS = {int: (int, "a whole number"), float: ((int, float), "a finite number"),
          bool: (bool, "true or false"), str: (str, "a text")}
# Options of each kind and their types; those of _OPTIONAL may be absent.
_BLOCK = {"taps": tuple[int, ...], "mask_id": int, "block_size": int, "embed_scale": float}
_OPTIONS = {"small_lm": {}, "dflash": _BLOCK, "dspark": _BLOCK, "eagle3": {
    "taps": tuple[int, ...], "steps": int, "norm_before_residual": bool}}
_OPTIONAL = ("steps", "norm_before_residual", "embed_scale")


def own_tensors(module: LearnedDrafter) -> dict[str, Weight]:
  """A drafter's own tensors by canonical name, "rope_freqs" where it has such a table."""
  tensors = module.own_tensors()
  if module.rope_divisors is not None:
    tensors["rope_freqs"] = jnp.asarray(module.rope_divisors, jnp.float32)
  return tensors


def own_ends(module: LearnedDrafter) -> dict[str, Array]:
  """The embedding and the head that are the drafter's own and not the target's; a head that is tied
  to such an embedding is left out."""
  ends = {"embed": module.embed[...]} if hasattr(module, "embed") else {}
  tied = ends and module.config.tie_embeddings
  return ends | ({"head": module.head[...]} if module.own_head and not tied else {})


def save_drafter(folder: Path, module: LearnedDrafter, target: Target, **extra: Any) -> None:
  """Writes drafter.json and drafter.safetensors (float32), the json last.

  Args:
    folder: made if absent.
    module: a drafter that shares the target's embedding and head; what it has of its own is
      written too.
    target: whose hashes are recorded, so that loading with another one is refused.
    **extra: further facts for the json.
  """
  folder.mkdir(parents=True, exist_ok=True)
  tensors = {k: np.asarray(v, np.float32)
             for k, v in (own_tensors(module) | own_ends(module)).items()}
  ids = getattr(module, "draft_ids", None)
  if ids is not None:
    tensors["draft_ids"] = np.asarray(ids[...], np.int32)
  safetensors.numpy.save_file(tensors, str(folder / "drafter.safetensors"))
  facts = {
      "kind": module.kind, "options": module.options(),
      "config": dataclasses.asdict(module.config),
      "target": target.name, "target_weight_hash": target.weight_hash,
      "tokenizer_hash": target.tokenizer.hash() if target.tokenizer else "", **extra}
  if target.tokenizer:  # so that another tokenizer is refused by the first id that differs
    text = json.dumps(list(target.tokenizer.token_strings()), ensure_ascii=False)
    (folder / _VOCABULARY).write_text(text, encoding="utf-8")
  part = folder / "drafter.json.part"
  part.write_text(json.dumps(facts, indent=2) + "\n")
  part.replace(folder / "drafter.json")


def read_saved(folder: Path, target: Target) -> tuple:
  """What `save_drafter` wrote.

  Returns:
    Kind, tensors by canonical name, decoder config, options, draft ids (None for all) and the
    drafter's own embedding and head (None where they are the target's): the arguments of
    `drafters.build`.

  Raises:
    UserError: a file is missing or broken, or the drafter is another target's.
  """
  facts, config = _read_facts(folder / "drafter.json")
  if target.tokenizer is not None and facts["tokenizer_hash"] != target.tokenizer.hash():
    vocabulary = folder / _VOCABULARY
    with contextlib.suppress(OSError, ValueError, TypeError):  # damaged: no id is named
      check_same_strings(json.loads(vocabulary.read_text(encoding="utf-8")),
                         target.tokenizer.token_strings())
    raise UserError(f"{folder}: this drafter was made for another tokenizer than {target.name}'s")
  if facts["target_weight_hash"] != target.weight_hash:
    raise UserError(
        f"{folder}: this drafter borrows embedding and head from {facts['target']}, "
        f"whose weights differ from {target.name}'s")
  path = folder / "drafter.safetensors"
  try:
    tensors = safetensors.numpy.load_file(str(path))
  except (OSError, KeyError, safetensors.SafetensorError) as error:  # KeyError: an unknown type
    raise UserError(f"{path} cannot be read: {error}") from None
  ids = tensors.pop("draft_ids", None)
  ends = {name: tensors.pop(name, None) for name in ("embed", "head")}
  _check_ends(path, config, min(config.vocab_size, target.config.vocab_size), ids, ends)
  return facts["kind"], tensors, config, facts["options"], ids, ends


def _read_facts(path: Path) -> tuple[dict[str, Any], DecoderConfig]:
  try:
    facts = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(f"{path} cannot be read: {error}") from None
  if not isinstance(facts, dict):
    raise UserError(f"{path} cannot be read: it holds a {type(facts).__name__}, not an object")
  try:
    for name in (*_TEXTS, "config"):
      if name not in facts:
        raise UserError(f"has no field {name!r}")
    for name in _TEXTS:
      _typed(name, facts[name], str)
    if facts["kind"] not in _OPTIONS:
      raise UserError(f"kind {facts['kind']!r} is not supported (known: {', '.join(_OPTIONS)})")
    facts["options"] = _object("options", facts.get("options", {}), _OPTIONS[facts["kind"]],
                               _OPTIONAL)
    fields = {f.name: f for f in dataclasses.fields(DecoderConfig)}
    # A folder of before there were local layers has no such field.
    config = _object(
        "config", facts["config"], {name: f.type for name, f in fields.items()},
        {name for name, f in fields.items() if f.default is not dataclasses.MISSING})
    return facts, DecoderConfig(**config)
  except UserError as error:
    raise UserError(f"{path}: {error}") from None


def _object(
    where: str, value: Any, types: Mapping[str, Any], optional: Collection[str],
) -> dict[str, Any]:
  """The entries of a JSON object, each of its type and none that is not known."""
  if not isinstance(value, dict):
    raise UserError(f"field {where}={value!r} must be an object")
  for name in types:
    if name not in value and name not in optional:
      raise UserError(f"has no field {f'{where}.{name}'!r}")
  for name, entry in value.items():
    if name not in types:
      raise UserError(f"field {where}.{name}={entry!r} is not known")
  return {name: _typed(f"{where}.{name}", entry, types[name]) for name, entry in value.items()}


def _typed(where: str, value: Any, kind: Any) -> Any:
  """A JSON value as a field of a type holds it: numbers, texts, lists of them, RopeScaling."""
  if kind == RopeScaling | None:
    fields = {f.name: f for f in dataclasses.fields(RopeScaling)}
    return None if value is None else RopeScaling(**_object(
        where, value, {name: f.type for name, f in fields.items()},
        {name for name, f in fields.items() if f.default is not dataclasses.MISSING}))
  if typing.get_origin(kind) is tuple:
    if not isinstance(value, list):
      raise UserError(f"field {where}={value!r} must be a list")
    return tuple(_typed(f"{where}[{i}]", x, typing.get_args(kind)[0]) for i, x in enumerate(value))
  known, text = _KINDS[kind]
  if (not isinstance(value, known) or isinstance(value, bool) != (kind is bool)
      or kind is float and not math.isfinite(value)):
    raise UserError(f"field {where}={value!r} must be {text}")
  return float(value) if kind is float else value


def _check_ends(
    path: Path, config: DecoderConfig, vocab_size: int, ids: np.ndarray | None,
    ends: Mapping[str, np.ndarray | None]) -> None:
  """The draft vocabulary holds ids, each once; an embedding or head of its own has a row for each
  that it scores."""
  if ids is not None:
    wrong = ""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
      wrong = f"has type {ids.dtype} and shape {list(ids.shape)}"
    elif len(outside := ids[(ids < 0) | (ids >= vocab_size)]):
      wrong = f"holds {outside[0]}"
    elif len(np.unique(ids)) < len(ids):
      wrong = "holds an id twice"
    if wrong:
      raise UserError(f"{path}: tensor draft_ids {wrong}; it must be a list of different ids in "
                      f"0..{vocab_size - 1}")
  rows = {"embed": config.vocab_size, "head": config.vocab_size if ids is None else len(ids)}
  for name, value in ends.items():
    if value is not None and value.shape != (rows[name], config.hidden_size):
      raise UserError(f"{path}: tensor {name} has shape {list(value.shape)}, not "
                      f"{[rows[name], config.hidden_size]}")
