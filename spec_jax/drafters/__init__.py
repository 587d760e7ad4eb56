"""The drafters by name, and how one is loaded and saved.

A drafter is an nnx.Module with `taps`, `max_position`, `observes_rounds`, `init_state`, `insert`,
`observe` and `propose` (see small_lm.py). A saved drafter is a folder with `drafter.json` (what it
is, and which target and tokenizer it belongs to) and `drafter.safetensors` (its own tensors).
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx
from jaxtyping import Array

from spec_jax.drafters.ngram import NGram
from spec_jax.drafters.small_lm import SmallLM
from spec_jax.errors import UserError
from spec_jax.models.config import DecoderConfig, RopeScaling
from spec_jax.models.decoder import BLOCK_TENSORS, tensor_shapes
from spec_jax.target import DTYPES, Target, canonical_tensors
from spec_jax.tokenizer import check_same_vocabulary
from spec_jax.weights import open_checkpoint

DRAFTERS = {"ngram": NGram, "small_lm": SmallLM}


@dataclasses.dataclass(frozen=True, eq=False)
class Drafter:
  """A drafter ready to decode.

  Attributes:
    kind: a name of DRAFTERS.
    name: as given to `load_drafter`.
    graph: nnx graph definition.
    params: its own arrays; what it borrows stays with the target.
  """

  kind: str
  name: str
  graph: nnx.GraphDef
  params: Any

  @property
  def module(self) -> nnx.Module:
    return nnx.merge(self.graph, self.params)


def wrap(kind: str, name: str, module: nnx.Module) -> Drafter:
  """A Drafter of a module in memory."""
  return Drafter(kind, name, *nnx.split(module))


def load_drafter(source: str, target: Target, dtype: str | None = None) -> Drafter:
  """Loads a drafter for a target.

  Args:
    source: "ngram" (or "ngram:3-1": longest and shortest suffix), "self" (the target drafts for
      itself, a control), a folder that train_drafter wrote, or any small Llama as `load_target`
      takes it.
    target: the target it will draft for.
    dtype: compute dtype; the target's by default.

  Raises:
    UserError: an unknown name, a missing file, or another tokenizer (naming the first id).
  """
  dtype = dtype or target.dtype
  if dtype not in DTYPES:
    raise UserError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
  if source == "ngram" or source.startswith("ngram:"):
    return wrap("ngram", source, _ngram(source))
  if source == "self":
    if dtype != target.dtype:
      raise UserError(f"drafter='self' has the target's dtype {target.dtype}, not {dtype}")
    return wrap("small_lm", "self", small_lm(target, canonical_tensors(target), target.config))
  folder = Path(source).expanduser()
  if (folder / "drafter.json").exists():
    return _load_saved(folder, target, dtype)
  if not folder.exists() and not source.startswith("hf:") and source != "demo":
    raise UserError(
        f"drafter={source!r}: no such folder, and not a drafter's name "
        "(ngram, ngram:MAX-MIN, self, or a folder)")
  checkpoint = open_checkpoint(source)
  if target.tokenizer is not None:
    check_same_vocabulary(checkpoint.tokenizer(), target.tokenizer)
  tensors = {name: jnp.asarray(checkpoint.read(name)) for name in checkpoint.names()}
  own = {"embed": tensors["embed"], "head": tensors.get("head", tensors["embed"])}
  module = small_lm(target, tensors, checkpoint.config, dtype=dtype, own=own)
  return wrap("small_lm", source, module)


def small_lm(
    target: Target,
    tensors: Mapping[str, Array | np.ndarray],
    config: DecoderConfig,
    *,
    dtype: str | None = None,
    draft_ids: np.ndarray | None = None,
    own: dict[str, Array] | None = None,
) -> SmallLM:
  """Builds a SmallLM from canonical tensors.

  Args:
    target: lends embedding and head where `own` has none.
    tensors: `layers.{i}.*` and `final_norm`; "rope_freqs" where the layers were made with one.
    config: of the drafter.
    dtype: compute dtype, the target's by default.
    draft_ids: [Vd] reduced draft vocabulary: the head is then a copy of those rows.
    own: the drafter's own "embed" and "head", when they are not the target's.
  """
  kind = DTYPES[dtype or target.dtype]
  shapes = tensor_shapes(config)

  def tensor(name):
    if name not in tensors:
      raise UserError(f"drafter tensor {name} is missing")
    if tensors[name].shape != shapes[name]:
      raise UserError(f"drafter tensor {name} has shape {tensors[name].shape}, not {shapes[name]}")
    return jnp.asarray(tensors[name], jnp.float32 if tensors[name].ndim == 1 else kind)

  if own is None and config.hidden_size != target.config.hidden_size:
    raise UserError(
        f"drafter hidden_size={config.hidden_size} differs from the target's "
        f"{target.config.hidden_size}: it cannot share its embedding")
  own = {name: jnp.asarray(value, kind) for name, value in (own or {}).items()}
  head = own.get("head")
  if head is None and (draft_ids is not None or kind != DTYPES[target.dtype]):
    rows = target.module.head_weight()
    head = jnp.asarray(rows if draft_ids is None else rows[jnp.asarray(draft_ids)], kind)
  divisors = np.asarray(tensors["rope_freqs"]) if "rope_freqs" in tensors else None
  return SmallLM(
      config, tensor, embed=own.get("embed"), head=head, draft_ids=draft_ids,
      rope_divisors=divisors)


def init_from_target(
    target: Target, init_layers: tuple[int, ...], draft_ids: np.ndarray | None = None,
    dtype: str | None = None) -> SmallLM:
  """A SmallLM of copies of the target's layers `init_layers` (0-based), in that order."""
  bad = [i for i in init_layers if not 0 <= i < target.config.num_layers]
  if bad or not init_layers:
    raise UserError(
        f"init_layers={init_layers} must name layers 0..{target.config.num_layers - 1}")
  source = canonical_tensors(target)
  tensors = {name: source[name] for name in ("final_norm", "rope_freqs") if name in source}
  for place, i in enumerate(init_layers):
    tensors |= {f"layers.{place}.{name}": source[f"layers.{i}.{name}"] for name in BLOCK_TENSORS}
  config = dataclasses.replace(target.config, num_layers=len(init_layers))
  return small_lm(target, tensors, config, dtype=dtype, draft_ids=draft_ids)


def own_tensors(module: SmallLM) -> dict[str, Array]:
  """The tensors of a SmallLM's stack by canonical name, "rope_freqs" where it has such a table."""
  tensors = {"final_norm": module.stack.final_norm[...]}
  if module.stack.rope_divisors is not None:
    tensors["rope_freqs"] = jnp.asarray(module.stack.rope_divisors, jnp.float32)
  for i, block in enumerate(module.stack.layers):
    tensors |= {f"layers.{i}.{name}": getattr(block, name)[...] for name in BLOCK_TENSORS}
  return tensors


def save_drafter(folder: Path, module: SmallLM, target: Target, **extra: Any) -> None:
  """Writes drafter.json and drafter.safetensors (float32), the json last.

  Args:
    folder: made if absent.
    module: a drafter that shares the target's embedding and head.
    target: whose hashes are recorded, so that loading with another one is refused.
    **extra: further facts for the json.
  """
  folder.mkdir(parents=True, exist_ok=True)
  tensors = {k: np.asarray(v, np.float32) for k, v in own_tensors(module).items()}
  ids = getattr(module, "draft_ids", None)
  if ids is not None:
    tensors["draft_ids"] = np.asarray(ids[...], np.int32)
  safetensors.numpy.save_file(tensors, str(folder / "drafter.safetensors"))
  facts = {
      "kind": "small_lm", "config": dataclasses.asdict(module.config),
      "target": target.name, "target_weight_hash": target.weight_hash,
      "tokenizer_hash": target.tokenizer.hash() if target.tokenizer else "", **extra}
  part = folder / "drafter.json.part"
  part.write_text(json.dumps(facts, indent=2) + "\n")
  part.replace(folder / "drafter.json")


def _load_saved(folder: Path, target: Target, dtype: str) -> Drafter:
  facts, config = _read_facts(folder / "drafter.json")
  if facts["kind"] != "small_lm":
    raise UserError(f"{folder / 'drafter.json'}: kind {facts['kind']!r} is not supported")
  if target.tokenizer is not None and facts["tokenizer_hash"] != target.tokenizer.hash():
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
  module = small_lm(target, tensors, config, dtype=dtype, draft_ids=ids)
  return wrap("small_lm", str(folder), module)


def _read_facts(path: Path) -> tuple[dict[str, Any], DecoderConfig]:
  try:
    facts = json.loads(path.read_text(encoding="utf-8"))
    for name in ("kind", "target", "target_weight_hash", "tokenizer_hash"):
      facts[name]
    fields = dict(facts["config"])
    scaling = fields["rope_scaling"]
    fields["rope_scaling"] = None if scaling is None else RopeScaling(**scaling)
    return facts, DecoderConfig(**{**fields, "eos_ids": tuple(fields["eos_ids"])})
  except KeyError as error:
    raise UserError(f"{path} has no field {error.args[0]!r}") from None
  except (OSError, ValueError, TypeError) as error:
    raise UserError(f"{path} cannot be read: {error}") from None


def _ngram(source: str) -> NGram:
  if source == "ngram":
    return NGram()
  sizes = source.partition(":")[2]
  try:
    n_max, n_min = (int(part) for part in sizes.split("-"))
  except ValueError:
    raise UserError(f"drafter={source!r}: write ngram:MAX-MIN, for example ngram:3-1") from None
  if not 1 <= n_min <= n_max:
    raise UserError(f"drafter={source!r}: needs 1 <= MIN <= MAX")
  return NGram(n_max, n_min)


