"""The export stage: the trained drafter as a folder that servers load, and what it should accept.

Reads `train/drafter`, the records and the report of `evaluate/`; writes `export/drafter`, or with
another `export.format` than hf the folder of that name beside it. A small_lm becomes a stock small
Llama (with a generation_config.json of assisted generation) for transformers, vLLM and SGLang; the
others take a published form of their kind (`spec_jax/weights/forms.py`). Beside the weights stand
acceptance.json, golden prompts with the text of plain and of speculative decoding and the
acceptance of the exported folder itself, so that a server that drafts differently is noticed; and
README.md, the model card. The command that serves the folder is printed.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import spec_jax
from spec_jax import drafters
from spec_jax import records as metrics
from spec_jax.drafters.head import LearnedDrafter
from spec_jax.drafters.saved import own_ends
from spec_jax.generate import encode_prompt
from spec_jax.target import Target, canonical_tensors
from spec_jax.weights import forms
from spec_jax.weights.forms import Form
from spec_jax.weights.published import write_published
from spec_jax.weights.safetensors import write_folder
from train_drafter import card, manifest, placement, report
from train_drafter import config as config_lib
from train_drafter.config import Config
from train_drafter.evaluate import evaluation_prompts, records_path
from train_drafter.generate import target_id
from train_drafter.serving import command

STAGE = "export"
ACCEPTANCE = "acceptance.json"
_ALL_IDS = ("The exported drafter proposes from the whole vocabulary: the reduced draft vocabulary "
            "it was trained with does not travel. acceptance.reduced is the drafter with it")
_TRAVELS = ("The draft vocabulary travels as d2t and t2d. acceptance.reduced is the trained "
            "drafter before the export")
_OF_RUN = ("export.format", "export.license", "export.target_name")  # each format has its folder


def run(cfg: Config, workdir: Path) -> Path:
  """Writes one format into `workdir`/export; reuses it when it is finished under the same names.

  Raises:
    UserError: a stage before it has not run, the folder belongs to another config, or the format
      cannot hold the drafter.
  """
  workdir = Path(workdir)
  folder = workdir / STAGE
  inputs = {n: manifest.require(workdir / n, n, cfg) for n in ("prompts", "train", "evaluate")}
  # The files hold float32: the weights as they were trained, the target's as they were stored.
  target = placement.load_target(cfg, "float32")
  opened = manifest.begin(
      folder, stage=STAGE, config=config_lib.part(cfg, "export", without=_OF_RUN), inputs=inputs,
      target=target_id(target))
  form = Form(cfg.export.format, _target_name(cfg), cfg.evaluate.draft_len)
  out = folder / ("drafter" if form.name == "hf" else form.name)
  serve = command(cfg.drafter.kind, form.name, str(out), form.target, form.draft_len)
  stated = [form.target, cfg.export.license]
  named = dict(opened.counts.get("named", {}))
  if opened.complete and named.pop(form.name, None) == stated:
    print(f"{STAGE}: {out}, reused\n{serve}")
    return folder
  if opened.complete:  # another format, or this one under other names: a stop leaves the others
    others = {n: size for n, size in opened.files.items() if not n.startswith(f"{out.name}/")}
    opened = dataclasses.replace(opened, files=others, counts=opened.counts | {"named": named})
    opened.save(folder)
  trained = spec_jax.load_drafter(str(workdir / "train" / "drafter"), target, "float32").module
  facts = {"target": card.public_name(target.name), "target_weight_hash": target.weight_hash,
           "tokenizer_hash": target.tokenizer.hash(), "draft_len": cfg.evaluate.draft_len,
           "init_layers": list(cfg.drafter.init_layers), "train_hash": inputs["train"].hash}
  write_drafter(out, trained, target, form, facts)
  golden = golden_prompts(evaluation_prompts(cfg, workdir), cfg.export.prompts)
  content = measure(cfg, workdir, target, out, golden, facts)
  card.write(out, cfg, workdir, trained, form.name, form.target, content["note"])
  manifest.write_json(out / ACCEPTANCE, content)
  counts = {"prompts": len(golden), "identical": content["identical"],
            "tau": content["acceptance"]["exported"]["tau"],
            "named": named | {form.name: stated}}
  manifest.finish(folder, opened, counts, "*/*")
  print(f"{STAGE}: {out}, tau {counts['tau']:.2f} on {len(golden)} golden prompts, "
        f"{counts['identical']} of them identical to plain decoding\n{serve}")
  if not cfg.export.target_name and (form.target == "demo" or form.target.endswith(".gguf")):
    print(f"{STAGE}: servers do not load target.source={cfg.target.source!r}: "
          "export.target_name says what they load in its place")
  return folder


def _target_name(cfg: Config) -> str:
  """How servers name the target."""
  return cfg.export.target_name or cfg.target.source.removeprefix("hf:")


def write_drafter(
    path: Path, module: LearnedDrafter, target: Target, form: Form,
    facts: dict[str, Any]) -> None:
  """Writes the folder in a form of the drafter's kind.

  Args:
    path: the folder.
    module: the trained drafter.
    target: in float32.
    form: for whom; its draft length is stated for assisted generation.
    facts: kept in config.json under "spec_jax".

  Raises:
    UserError: the drafter has a setting that the form cannot state.
  """
  if module.kind == "small_lm":
    forms.refuse(module, target, form.name)
    _write_small(path, module, target, form.draft_len, facts)
  else:
    write_published(path, module, target, extra_config={"spec_jax": facts}, form=form)


def _write_small(path, module, target, draft_len, facts):
  """A stock small model: the drafter's layers with the target's embedding and head, all ids, unless
  it has its own."""
  tensors, config = drafters.own_tensors(module) | own_ends(module), module.config
  if not module.own_head:
    lent = canonical_tensors(target)
    tensors |= {name: lent[name] for name in ("embed", "head") if name in lent}
    # The vocabulary is the target's again; the rest describes the drafter.
    config = dataclasses.replace(
        config, vocab_size=target.config.vocab_size, vocab_real=target.config.vocab_real,
        tie_embeddings=target.config.tie_embeddings)
  write_folder(
      path, config, {name: np.asarray(value, np.float32) for name, value in tensors.items()},
      target.tokenizer, extra_config={"spec_jax": facts})
  # A static draft length in assisted generation: no schedule, no early stop by confidence.
  settings = path / "generation_config.json"
  fields = json.loads(settings.read_text(encoding="utf-8"))
  manifest.write_json(settings, fields | {
      "num_assistant_tokens": draft_len, "num_assistant_tokens_schedule": "constant",
      "assistant_confidence_threshold": 0.0})


def golden_prompts(prompts: Sequence[dict], count: int) -> list[dict]:
  """`count` prompts from different categories, as far as there are so many."""
  place: dict[str, int] = {}
  order = []
  for i, prompt in enumerate(prompts):
    place[prompt["category"]] = place.get(prompt["category"], 0) + 1
    order.append((place[prompt["category"]], i))
  return [prompts[i] for _, i in sorted(order)[:count]]


def measure(
    cfg: Config, workdir: Path, target: Target, folder: Path, golden: Sequence[dict],
    facts: dict[str, Any]) -> dict[str, Any]:
  """The content of acceptance.json: the written folder is loaded and decodes the golden prompts."""
  options = cfg.evaluate
  if target.dtype != options.identity_dtype:
    target = placement.load_target(cfg, options.identity_dtype)
  drafter = spec_jax.load_drafter(str(folder), target, options.drafter_dtype)
  args = config_lib.template_args(cfg)
  ids = [encode_prompt(target, p["messages"], i, args) for i, p in enumerate(golden)]
  decode = lambda force_reject: spec_jax.generate(
      target, drafter, ids, draft_len=options.draft_len, max_new_tokens=options.max_new_tokens,
      batch_size=len(ids), force_reject=force_reject)
  ours, plain = decode(False), decode(True)
  group = lambda rows: {
      name: value for name, value in metrics.summarize(rows, options.draft_len).items()
      if name in ("prompts", "rounds", "tau", "acceptance_rate", "survival")}
  fate = _TRAVELS if forms.keeps_vocabulary(drafter.kind, cfg.export.format) else _ALL_IDS
  return {
      **facts, "rule": "greedy", "temperature": 0.0, "dtype": target.dtype,
      "drafter_dtype": options.drafter_dtype, "max_new_tokens": options.max_new_tokens,
      "eos_ids": list(target.config.eos_ids),
      "note": f"plain: every draft refused in the same executable. {fate}, on the same prompts.",
      "identical": sum(a == b for a, b in zip(ours.tokens, plain.tokens, strict=True)),
      "acceptance": {"exported": group(ours.records),
                     "reduced": _reduced(
                         workdir, cfg.drafter.kind, [p["id"] for p in golden], group)},
      "cases": [
          {"id": p["id"], "category": p["category"], "prompt_ids": ids[i],
           "plain": plain.tokens[i], "speculative": ours.tokens[i],
           "finish_reason": ours.finish_reasons[i],
           "proposed": ours.records[i].proposed.tolist(),
           "accepted": ours.records[i].accepted.tolist(),
           "emitted": ours.records[i].emitted.tolist()}
          for i, p in enumerate(golden)]}


def _reduced(workdir: Path, kind: str, ids: Sequence[str], group) -> dict[str, Any] | None:
  """What the evaluation recorded for the same prompts at T=0; None where it did not decode so."""
  path = records_path(workdir, kind, 0.0, "greedy")
  if not path.exists():
    return None
  rows = {r["id"]: r["records"] for r in report.load_records(path)[kind][0.0, "greedy"]}
  return group([rows[i] for i in ids])
