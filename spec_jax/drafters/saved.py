"""A drafter's own folder: drafter.json says what it is, drafter.safetensors holds its tensors.

Embedding and head are the target's and stay with it, except where the drafter has its own. Called
by `load_drafter` and by the train stage.
"""

import contextlib
import dataclasses
import json
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
  except (OSError, safetensors.SafetensorError) as error:
    raise UserError(f"{path} cannot be read: {error}") from None
  ids = tensors.pop("draft_ids", None)
  ends = {name: tensors.pop(name, None) for name in ("embed", "head")}
  return facts["kind"], tensors, config, facts.get("options", {}), ids, ends


def _read_facts(path: Path) -> tuple[dict[str, Any], DecoderConfig]:
  try:
    facts = json.loads(path.read_text(encoding="utf-8"))
    for name in ("kind", "target", "target_weight_hash", "tokenizer_hash"):
      facts[name]
    fields = dict(facts["config"])
    scaling = fields["rope_scaling"]
    fields["rope_scaling"] = None if scaling is None else RopeScaling(**scaling)
    # A folder of before there were local layers has no such field.
    lists = {name: tuple(fields.get(name, ())) for name in ("eos_ids", "local_layers")}
    return facts, DecoderConfig(**fields | lists)
  except KeyError as error:
    raise UserError(f"{path} has no field {error.args[0]!r}") from None
  except (OSError, ValueError, TypeError) as error:
    raise UserError(f"{path} cannot be read: {error}") from None
