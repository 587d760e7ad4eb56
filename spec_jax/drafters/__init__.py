"""The drafters by name, and how one is loaded and saved.

A drafter is an nnx.Module with `taps`, `max_position`, `init_state`, `insert`, `observe` (a
prompt), `after_round` (a verified block) and `propose`; one that is trained also has `train_states`
(see head.py and small_lm.py). A saved drafter is a folder with `drafter.json` (what it
is, and which target and tokenizer it belongs to) and `drafter.safetensors` (its own tensors).
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from spec_jax.drafters import dflash as dflash_lib
from spec_jax.drafters import dspark as dspark_lib
from spec_jax.drafters import eagle3 as eagle3_lib
from spec_jax.drafters.dflash import DFlash
from spec_jax.drafters.dspark import DSpark
from spec_jax.drafters.eagle3 import Eagle3
from spec_jax.drafters.head import LearnedDrafter
from spec_jax.drafters.lookup import Lookup
from spec_jax.drafters.ngram import NGram
from spec_jax.drafters.saved import own_tensors, read_saved, save_drafter
from spec_jax.drafters.small_lm import SmallLM
from spec_jax.errors import UserError
from spec_jax.models.config import DecoderConfig
from spec_jax.models.decoder import block_shapes, tensor_shapes
from spec_jax.models.quant import Int8Weight, Weight
from spec_jax.target import (
  DTYPES,
  Target,
  canonical_tensors,
  default_mask_id,
  held,
  read_tensor,
)
from spec_jax.tokenizer import check_same_vocabulary
from spec_jax.weights import open_checkpoint, published
from spec_jax.weights.resolve import files_sha256, resolve
from spec_jax.weights.stream import Lazy

__all__ = ["DRAFTERS", "LEARNED", "Drafter", "build", "init_from_target", "init_learned",
           "lend_head", "lent_head", "load_drafter", "own_tensors", "parse_lookup", "parse_ngram",
           "save_drafter", "small_lm", "small_random", "source_hash", "wrap"]

DRAFTERS = {"ngram": NGram, "lookup": Lookup, "small_lm": SmallLM, "eagle3": Eagle3,
            "dflash": DFlash, "dspark": DSpark}
LEARNED = ("small_lm", "eagle3", "dflash", "dspark")
_LONGEST_NGRAM = 32  # every length is compiled


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
    source: "ngram" (or "ngram:3-1": longest and shortest suffix), "lookup:SOURCE" (or
      "lookup:3-2:SOURCE": prompt lookup where it has a match, the drafter of SOURCE elsewhere;
      "lookup:3-2+2:SOURCE" has it draft two tokens and leaves the rest to the lookup),
      "self" (the target drafts for itself, a control), a folder that train_drafter wrote (its
      work folder will do), a published folder of EAGLE-3, DFlash, DSpark or speculators (also
      "hf:org/name"), or any small model of a known family as `load_target` takes it.
    target: the target it will draft for.
    dtype: compute dtype; the target's by default.

  Raises:
    UserError: an unknown name, a missing file, or another tokenizer (naming the first id).
  """
  dtype = dtype or target.dtype
  if dtype not in DTYPES:
    raise UserError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
  if source == "ngram" or source.startswith("ngram:"):
    return wrap("ngram", source, parse_ngram(source))
  if source.startswith("lookup:"):
    return _lookup(source, target, dtype)
  if source == "self":
    if dtype != target.dtype:
      raise UserError(f"drafter='self' has the target's dtype {target.dtype}, not {dtype}")
    return wrap("small_lm", "self", small_lm(target, canonical_tensors(target), target.config))
  folder = _folder_of(source)
  if (folder / "drafter.json").exists():
    return _load_saved(folder, target, dtype)
  if published.is_published(folder):
    found = published.read_published(folder, target)
    return wrap(found.kind, source, _built(
        folder, found.kind, target, found.tensors, found.config, found.options, dtype=dtype,
        draft_ids=found.draft_ids, own={"head": found.head}))
  if not folder.exists() and not source.startswith("hf:") and source != "demo":
    raise UserError(
        f"drafter={source!r}: no such folder, and not a drafter's name "
        "(ngram, ngram:MAX-MIN, lookup:SOURCE, self, or a folder)")
  if (folder / "prompts" / "manifest.json").is_file():
    raise UserError(f"drafter={source!r}: a work folder without a trained drafter (train/drafter)")
  checkpoint = open_checkpoint(source)
  if target.tokenizer is not None:
    check_same_vocabulary(checkpoint.tokenizer(), target.tokenizer)
  tied = checkpoint.config.tie_embeddings
  own = {name: read_tensor(checkpoint, name, dtype, tied)
         for name in ("embed", "head") if name in checkpoint.names()}
  module = small_lm(
      target, Lazy(checkpoint), checkpoint.config, dtype=dtype,
      own={"head": own["embed"]} | own if tied else own)
  return wrap("small_lm", source, module)


def _folder_of(source: str) -> Path:
  """Where the files of a drafter lie: in the folder, or below it in a run's work folder."""
  if source.startswith("hf:"):
    return resolve(source).path
  folder = Path(os.path.expanduser(source))  # unlike Path's, it leaves an unknown ~user as it is
  for place in (folder, folder / "drafter", folder / "train" / "drafter"):
    if (place / "drafter.json").exists():
      return place
  return folder


def source_hash(source: str) -> str:
  """SHA-256 over the files that `load_drafter` reads of a source: weights and what describes them.

  Raises:
    UserError: nothing is there.
  """
  folder = _folder_of(source)
  files = [path for path in folder.glob("*") if path.suffix in (".safetensors", ".bin")
           or path.name in ("config.json", "drafter.json")] if folder.is_dir() else []
  return files_sha256(files) if files else open_checkpoint(source).weight_hash()


def small_lm(
    target: Target,
    tensors: Mapping[str, Weight],
    config: DecoderConfig,
    *,
    dtype: str | None = None,
    draft_ids: np.ndarray | None = None,
    own: Mapping[str, Array | np.ndarray | Int8Weight | None] | None = None,
) -> SmallLM:
  """Builds a SmallLM from canonical tensors.

  Args:
    target: lends embedding and head where `own` has none.
    tensors: `layers.{i}.*` and `final_norm`; "rope_freqs" where the layers were made with one.
    config: of the drafter.
    dtype: compute dtype, the target's by default.
    draft_ids: [Vd] reduced draft vocabulary: the head is then a copy of those rows.
    own: the drafter's own "embed" and "head", when they are not the target's. They stay as they
      are in training: a tied pair would come apart.
  """
  dtype = dtype or target.dtype
  tensor = _checked(tensors, tensor_shapes(config), dtype)
  if (own or {}).get("embed") is None and config.hidden_size != target.config.hidden_size:
    raise UserError(
        f"drafter hidden_size={config.hidden_size} differs from the target's "
        f"{target.config.hidden_size}: it cannot share its embedding")
  own = {name: held(name, value, dtype, tied=isinstance(value, Int8Weight))
         for name, value in (own or {}).items() if value is not None}
  if "embed" in own:
    own.setdefault("head", own["embed"])
  divisors = np.asarray(tensors["rope_freqs"]) if "rope_freqs" in tensors else None
  module = SmallLM(
      config, tensor, embed=own.get("embed"), rope_divisors=divisors, mesh=target.mesh)
  if "head" in own:
    module.set_head(config, own["head"], draft_ids, own=True)
  else:
    module.set_head(config, lent_head(target, draft_ids, dtype), draft_ids)
  return module


def lend_head(module: LearnedDrafter, target: Target) -> None:
  """Gives a drafter without a head of its own the target's rows again, in the target's dtype."""
  ids = np.asarray(module.draft_ids[...]) if hasattr(module, "draft_ids") else None
  if hasattr(module, "head"):
    del module.head
  module.set_head(module.config, lent_head(target, ids, target.dtype), ids)


def lent_head(
    target: Target, draft_ids: np.ndarray | None, dtype: str) -> Array | Int8Weight | None:
  """The target's head rows for a drafter: a copy where they are fewer or computed with in another
  type, else None (the drafter then reads the target's own)."""
  if draft_ids is None and DTYPES[dtype] == DTYPES[target.dtype]:
    return None
  rows = target.module.head_weight()
  return held("head", rows if draft_ids is None else rows[np.asarray(draft_ids)], dtype)


def build(
    kind: str, target: Target, tensors: Mapping[str, Weight], config: DecoderConfig,
    options: Mapping[str, Any], *, dtype: str | None = None, draft_ids: np.ndarray | None = None,
    own: Mapping[str, np.ndarray | None] | None = None,
) -> LearnedDrafter:
  """Builds a learned drafter that borrows embedding and head from the target, but for its own.

  Args:
    kind: a name of LEARNED.
    target: lends embedding and head.
    tensors: by canonical name, those of the kind; "rope_freqs" where the layers have such a table.
    config: of its decoder layers.
    options: as `LearnedDrafter.options` gave them.
    dtype: compute dtype, the target's by default.
    draft_ids: [Vd] reduced draft vocabulary.
    own: "head" [Vd, D] of its own, which is trained; of a small_lm also "embed" (see `small_lm`).

  Raises:
    UserError: a tensor is missing or has another shape, by name.
  """
  if kind == "small_lm":
    return small_lm(target, tensors, config, dtype=dtype, draft_ids=draft_ids, own=own)
  dtype = dtype or target.dtype
  settings = dict(options) | {"taps": tuple(options["taps"])}
  shapes = {"eagle3": eagle3_lib, "dflash": dflash_lib, "dspark": dflash_lib}[kind].tensor_shapes(
      config, settings["taps"])
  if kind == "dspark":
    rank = tensors["markov_w1"].shape[-1] if "markov_w1" in tensors else dspark_lib.RANK
    shapes = dspark_lib.tensor_shapes(
        config, settings["taps"], rank, 0 if draft_ids is None else len(draft_ids))
  divisors = np.asarray(tensors["rope_freqs"]) if "rope_freqs" in tensors else None
  if config.hidden_size != target.config.hidden_size:
    raise UserError(f"drafter hidden_size={config.hidden_size} differs from the target's "
                    f"{target.config.hidden_size}: it reads the target's states")
  taps, depth = settings["taps"], target.config.num_layers
  if not taps or list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < depth:
    raise UserError(f"drafter taps={taps}: the target has {depth} layers, of which they must be "
                    "different ones, ascending from 0 on")
  tensors = dict(tensors)
  if kind == "dspark" and "confidence" in tensors:  # written before it had a bias
    short = shapes["confidence"][0] - tensors["confidence"].shape[0]
    tensors["confidence"] = jnp.pad(jnp.asarray(tensors["confidence"]), (0, max(short, 0)))
  head = (own or {}).get("head")
  lent = lent_head(target, draft_ids, dtype) if head is None else None
  module = DRAFTERS[kind](
      config, _checked(tensors, shapes, dtype), head=lent, draft_ids=draft_ids,
      rope_divisors=divisors, mesh=target.mesh, **settings)
  if head is not None:
    module.set_head(config, held("head", head, dtype), draft_ids, own=True, trained=True)
  return module


def _checked(tensors, shapes, dtype: str) -> Callable[[str], Array | Int8Weight]:
  """A `tensor(name)` function that names what is missing; vectors stay float32."""
  def tensor(name):
    if name not in tensors:
      raise UserError(f"drafter tensor {name} is missing")
    value = tensors[name]
    if value.shape != shapes[name]:
      raise UserError(f"drafter tensor {name} has shape {value.shape}, not {shapes[name]}")
    return held(name, value, dtype)

  return tensor


def small_random(tensors: Mapping[str, Array | np.ndarray], seed: int) -> dict[str, np.ndarray]:
  """Normal weights of deviation 0.02, unit norms and no biases in the shapes of `tensors`."""
  rng = np.random.default_rng(seed)
  zero = ("bq", "bk", "bv")
  return {name: np.full(value.shape, not name.endswith(zero), np.float32) if value.ndim == 1
          else 0.02 * rng.normal(size=value.shape).astype(np.float32)
          for name, value in tensors.items()}


def init_learned(
    kind: str, target: Target, layers: tuple[int, ...], *, steps: int = 3, num_taps: int = 5,
    block_size: int = 8, anchors: int = 32, mask_id: int = -1, rank: int = dspark_lib.RANK,
    draft_ids: np.ndarray | None = None, dtype: str | None = None, seed: int = 0,
    random: bool = False,
) -> LearnedDrafter:
  """An untrained drafter of copies of target layers, or of small random weights.

  Args:
    kind: a name of LEARNED.
    target: lends embedding and head, and its layers.
    layers: 0-based, one for each layer of the drafter (eagle3 has one: the last of them).
    steps: eagle3, draft steps that training simulates.
    num_taps: dflash and dspark, layers of the target that are read.
    block_size: dflash and dspark.
    anchors: dflash and dspark, blocks of a training row.
    mask_id: dflash and dspark; -1 for an unused control token of the target.
    rank: dspark, of the term of the previous token.
    draft_ids: [Vd] reduced draft vocabulary.
    dtype: compute dtype, the target's by default.
    seed: of what is random.
    random: no copies.

  Raises:
    UserError: the target has no such layer, or is too shallow for the taps.
  """
  if kind == "small_lm" and not random:
    return init_from_target(target, layers, draft_ids, dtype)
  source = canonical_tensors(target)
  if kind == "small_lm":
    names = tensor_shapes(target.config.of_layers(layers))
    tensors = {name: np.zeros(shape) for name, shape in names.items()
               if name not in ("embed", "head")}
    options = {}
  elif kind == "eagle3":
    layers = layers[-1:]
    options = {"taps": eagle3_lib.eagle3_taps(target.config.num_layers), "steps": steps}
    _check_layers(layers, target)
    tensors = eagle3_lib.init_tensors(source, target.config, layers[0], options["taps"], seed)
  else:
    mask_id = mask_id if mask_id >= 0 else default_mask_id(target)
    options = {"taps": dflash_lib.dflash_taps(target.config.num_layers, num_taps),
               "mask_id": mask_id, "block_size": block_size, "anchors": anchors}
    width = 0 if draft_ids is None else len(draft_ids)
    tensors = (dflash_lib.init_tensors(target, layers, options["taps"]) if kind == "dflash" else
               dspark_lib.init_tensors(target, layers, options["taps"], seed, rank, width))
  if random:
    tensors = small_random(tensors, seed)
  tensors |= {name: source[name] for name in ("rope_freqs",) if name in source}
  config = (target.config.of_layers(layers) if kind == "small_lm"
            else target.config.plain(len(layers)))
  return build(kind, target, tensors, config, options, dtype=dtype, draft_ids=draft_ids)


def _check_layers(layers, target):
  if not layers or not all(0 <= i < target.config.num_layers for i in layers):
    raise UserError(f"init_layers={layers} must name layers 0..{target.config.num_layers - 1}")


def init_from_target(
    target: Target, init_layers: tuple[int, ...], draft_ids: np.ndarray | None = None,
    dtype: str | None = None) -> SmallLM:
  """A SmallLM of copies of the target's layers `init_layers` (0-based), in that order."""
  _check_layers(init_layers, target)
  source = canonical_tensors(target)
  tensors = {name: source[name] for name in ("final_norm", "rope_freqs") if name in source}
  for place, i in enumerate(init_layers):
    tensors |= {f"layers.{place}.{name}": source[f"layers.{i}.{name}"]
                for name in block_shapes(target.config)}
  config = target.config.of_layers(init_layers)
  return small_lm(target, tensors, config, dtype=dtype, draft_ids=draft_ids)


def _load_saved(folder: Path, target: Target, dtype: str) -> Drafter:
  kind, tensors, config, options, ids, own = read_saved(folder, target)
  return wrap(kind, str(folder), _built(
      folder, kind, target, tensors, config, options, dtype=dtype, draft_ids=ids, own=own))


def _built(folder: Path, *args: Any, **options: Any) -> LearnedDrafter:
  """`build`, whose refusals then name the folder."""
  try:
    return build(*args, **options)
  except UserError as error:
    raise UserError(f"{folder}: {error}") from None


def _lookup(source: str, target: Target, dtype: str) -> Drafter:
  inner, sizes = source.removeprefix("lookup:"), "3-2"
  head, colon, rest = inner.partition(":")
  if colon and re.fullmatch(r"\d+-\d+(\+\d+)?", head):
    sizes, inner = head, rest
  if not inner or inner.startswith(("ngram", "lookup")):
    raise UserError(f"drafter={source!r}: write lookup:SOURCE, lookup:MAX-MIN:SOURCE or "
                    "lookup:MAX-MIN+DRAFTS:SOURCE, SOURCE a learned drafter")
  ngram, learned_len = parse_lookup(sizes)
  learned = load_drafter(inner, target, dtype)
  return wrap("lookup", source, Lookup(ngram, learned.module, learned_len))


def parse_lookup(sizes: str) -> tuple[NGram, int]:
  """The lookup of "MAX-MIN" or "MAX-MIN+DRAFTS", and how many drafts the learned part makes.

  Raises:
    UserError: it is neither.
  """
  ngram, plus, drafts = sizes.partition("+")
  if plus and not (drafts.isdecimal() and int(drafts)):
    raise UserError(f"lookup={sizes!r}: write MAX-MIN or MAX-MIN+DRAFTS with DRAFTS >= 1, for "
                    "example 3-2+2")
  return parse_ngram(f"ngram:{ngram}"), int(drafts or 0)


def parse_ngram(source: str) -> NGram:
  """The prompt-lookup drafter of "ngram" or "ngram:MAX-MIN".

  Raises:
    UserError: it is neither.
  """
  if source == "ngram":
    return NGram()
  name, _, sizes = source.partition(":")
  try:
    n_max, n_min = (int(part) for part in sizes.split("-")) if name == "ngram" else ()
  except ValueError:
    raise UserError(f"drafter={source!r}: write ngram:MAX-MIN, for example ngram:3-1") from None
  if not 1 <= n_min <= n_max <= _LONGEST_NGRAM:
    raise UserError(f"drafter={source!r}: needs 1 <= MIN <= MAX <= {_LONGEST_NGRAM}")
  return NGram(n_max, n_min)


