"""The forms in which programs take a drafter, where they differ: hf, sglang, vllm, speculators.

`hf` is what the authors of a method publish: SafeAILab's EAGLE-3, z-lab's DFlash, for DSpark the
same with the fields of its tail. The others are what a server or the package `speculators` reads;
tests/weights/test_server_names.py holds their loaders' rules and the versions they were read from.
Called by published.py with the hf form, and by `train_drafter/export.py` for what a form refuses.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from spec_jax.errors import UserError
from spec_jax.target import Target
from spec_jax.weights import speculators

NAMES = ("hf", "sglang", "vllm", "speculators")
# Where a block drafter may have a reduced draft vocabulary; the others draft from all ids.
_REDUCED_BLOCKS = ("vllm", "speculators")
_DSPARK_MODEL = "Qwen3DSparkModel"  # of the servers; the method stands at the top level


@dataclasses.dataclass(frozen=True)
class Form:
  """A form and what it states beside the drafter.

  Attributes:
    name: of NAMES.
    target: how servers name the target: a folder or "org/name".
    draft_len: K that a server drafts unless it is told another.
  """

  name: str = "hf"
  target: str = ""
  draft_len: int = 5

  def __post_init__(self):
    if self.name not in NAMES:
      raise UserError(f"format={self.name!r} must be one of {', '.join(NAMES)}")


def keeps_vocabulary(kind: str, form: str) -> bool:
  """Whether a reduced draft vocabulary travels in a form."""
  return kind == "eagle3" or kind in ("dflash", "dspark") and form in _REDUCED_BLOCKS


def refuse(module: nnx.Module, target: Target, form: str) -> None:
  """Refuses what a form cannot hold.

  Raises:
    UserError: names the setting and its value, and the forms that hold it where there is one.
  """
  kind, config = module.kind, module.config
  no = lambda what, where: UserError(f"the form {form!r} of {kind} has no place for {what} "
                                     f"({where})")
  if kind == "small_lm":
    if form == "speculators":
      raise no("a small language model", "hf, vllm and sglang take it as it is")
    return
  if kind == "eagle3":
    if module.norm_before_residual and form in ("hf", "sglang"):
      raise no("norm_before_residual=True", "vllm and speculators have one")
    if config.qk_norm and form != "speculators":
      raise no("norms of queries and keys, qk_norm=True", "speculators has one")
    return
  scale = target.config.embed_scale if module.embed_scale is None else module.embed_scale
  if scale != 1 and form != "hf":
    raise no(f"input_embedding_scale={scale:g}", "hf has one; servers take the raw embedding")
  if module.own_head and form not in _REDUCED_BLOCKS:
    raise no("a head of the drafter's own", "vllm and speculators have one")


def fields(
    hf: Mapping[str, Any], module: nnx.Module, target: Target, form: Form) -> dict[str, Any]:
  """config.json of a form from that of the hf form."""
  kind, out = module.kind, dict(hf)
  reduced = len(module.draft_ids[...]) if hasattr(module, "draft_ids") else None
  if reduced is not None and keeps_vocabulary(kind, form.name):
    out["draft_vocab_size"] = reduced
  if form.name == "speculators":
    return speculators.nested(out, kind, module.taps, {
        "name_or_path": form.target or None,
        "architectures": [target.config.to_hf()["architectures"][0]]}, form.draft_len)
  if kind == "dspark" and form.name != "hf":
    method = out.pop("dflash_config")
    method.pop("projector_type")
    out |= method | {"architectures": [_DSPARK_MODEL]}
  return out


def tensors(
    stored: Mapping[str, np.ndarray], module: nnx.Module, target: Target,
    form: Form) -> dict[str, np.ndarray]:
  """The tensors of a form from those of the hf form, by stored name."""
  kind, out = module.kind, dict(stored)
  embed = lambda: np.asarray(target.module.embed[...], np.float32)
  if form.name == "speculators" and kind == "eagle3":
    # The package finds an embedding that a folder lacks by its NaN, which transformers 5 leaves
    # as the memory was.
    out = {name.replace("midlayer.", "layers.0."): value for name, value in out.items()}
    out["embed_tokens.weight"] = embed()
  if kind == "dspark" and form.name == "sglang":  # its draft model owns both
    out |= {"embed_tokens.weight": embed(),
            "lm_head.weight": np.asarray(target.module.head_weight(), np.float32)}
  return out
