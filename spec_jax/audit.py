"""The identity certificate: does speculative decoding of these prompts give the target's own text?

  python -m spec_jax.audit --target=demo --drafter=ngram --prompts=prompts.jsonl --out=certificate

Decodes the prompts three times, greedily: speculatively, same-shape (the same executable, every
draft refused) and plainly (width 1). Against same-shape equality is expected bit for bit wherever a
row's logits depend neither on the other rows nor on the place in the block, which the probe looks
at. Against width 1 a difference is excused where the competing logits lie within the rounding
between the two widths, which is measured. Called by `train_drafter.evaluate` as well.
"""

import dataclasses
import datetime
import difflib
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from spec_jax import command, identity, platform, sharding
from spec_jax import records as metrics
from spec_jax.drafters import Drafter, load_drafter
from spec_jax.errors import UserError
from spec_jax.generate import Finished, Run, encode_prompt
from spec_jax.target import DTYPES, Target, load_target

SCHEMA_VERSION = 1
_PROBED = 4  # prompts whose text the tolerance is measured with
_RED, _GREEN, _PLAIN = "\x1b[31m", "\x1b[32m", "\x1b[0m"


@dataclasses.dataclass(frozen=True)
class Decodes:
  """One batch of prompts decoded three ways, by index of the prompt."""

  speculative: dict[int, Finished]
  same_shape: dict[int, Finished]
  width_1: dict[int, Finished]


# The certificate.


def audit(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    draft_len: int = 5,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    names: Sequence[str] | None = None,
    on_finish: Callable[[str, Finished], None] | None = None,
) -> tuple[dict[str, Any], Decodes]:
  """Decodes three ways and compares.

  Args:
    target: from `load_target`.
    drafter: from `load_drafter`.
    prompts: token ids.
    draft_len: K.
    max_new_tokens: budget of each answer.
    batch_size: rows decoded together.
    names: of the prompts in the certificate, by default their index.
    on_finish: called with the way ("speculative", "same-shape", "width 1") and each row that ends.

  Returns:
    The certificate (JSON values; the fields are those of `page`), and the decodes behind it.

  Raises:
    UserError: as `generate`.
  """
  names = [str(i) for i in range(len(prompts))] if names is None else list(names)
  for name, prompt in zip(names, prompts, strict=True):
    _check_length(name, prompt, target)
  shapes: set[tuple[int, int]] = set()  # rows and capacity of what decodes speculatively

  def decode(way, with_drafter, force_reject=False):
    return decode_all(
        target, with_drafter, prompts, range(len(prompts)), draft_len=draft_len,
        max_new_tokens=max_new_tokens, batch_size=batch_size, force_reject=force_reject,
        on_finish=None if on_finish is None else lambda row: on_finish(way, row),
        on_shape=lambda *shape: None if with_drafter is None else shapes.add(shape))

  decodes = Decodes(
      decode("speculative", drafter), decode("same-shape", drafter, True), decode("width 1", None))
  width = -(-(max(map(len, prompts)) + max_new_tokens) // identity.WIDTH) * identity.WIDTH
  # The prompts' own text, not the answers that are judged.
  rounding = identity.rounding(target, sorted(prompts, key=len)[-_PROBED:], draft_len,
                               min(batch_size, len(prompts)))
  cap = identity.TOLERANCE_CAP[target.dtype]
  tolerance = min(2 * rounding, cap) if np.isfinite(rounding) else 0.0
  differences = []
  for against, theirs in (("same-shape", decodes.same_shape), ("width 1", decodes.width_1)):
    for i in range(len(prompts)):
      ours = decodes.speculative[i].tokens
      if ours != theirs[i].tokens:
        place = identity.divergence(
            target, prompts[i], ours, theirs[i].tokens, width, tolerance)
        differences.append({"prompt": names[i], "index": i, "against": against, **place})
  rows = [decodes.speculative[i].records for i in range(len(prompts))]
  rows = [row for row in rows if row.rounds]
  measured = metrics.tau(rows) if rows else float("nan")
  predicted = identity.predicted_tau(
      drafter, target, prompts, [decodes.speculative[i].tokens for i in range(len(prompts))],
      draft_len)
  acceptance = metrics.acceptance_rate(rows) if rows else float("nan")
  total = lambda field: int(sum(getattr(row, field).sum() for row in rows))
  rounds, proposed, accepted = (
      sum(row.rounds for row in rows), total("proposed"), total("accepted"))
  certificate = {
      "schema_version": SCHEMA_VERSION,
      "verdict": verdict(differences),
      "prompts": len(prompts),
      "identical_same_shape": _equal(decodes.speculative, decodes.same_shape),
      "identical_width_1": _equal(decodes.speculative, decodes.width_1),
      "rounding": metrics.to_plain(rounding),
      "tolerance": tolerance,
      "tolerance_cap": cap,
      "differences": differences,
      "probes": [found for found in (
          identity.probe(target, size, draft_len + 1, capacity)
          for size, capacity in sorted(shapes)) if found],
      "rounds": rounds, "proposed": proposed, "accepted": accepted,
      "tau": metrics.to_plain(measured),
      "predicted_tau": predicted,
      "acceptance_rate": metrics.to_plain(acceptance),
      "warnings": identity.dead_drafter(rounds, proposed, accepted, measured, predicted),
      "settings": {"draft_len": draft_len, "max_new_tokens": max_new_tokens,
                   "batch_size": batch_size, "temperature": 0.0, "rule": "greedy",
                   "eos_ids": list(target.config.eos_ids)},
      "prompts_hash": _hash(json.dumps([list(map(int, p)) for p in prompts]).encode()),
      "target": target.name,
      "target_weights": target.weight_hash,
      "drafter": drafter.name,
      "drafter_weights": _hash(*(
          np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(drafter.params))),
      "drafter_dtypes": sorted({str(leaf.dtype) for leaf in jax.tree.leaves(drafter.params)}),
      "dtype": target.dtype,
      "backend": jax.default_backend(),
      "device": jax.devices()[0].device_kind,
      "versions": {name: importlib.metadata.version(name) for name in (
          "spec-jax", "jax", "jaxlib", "flax")},
      "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
  }
  return certificate, decodes


def decode_all(
    target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]],
    members: Sequence[int], *, batch_size: int, own: Sequence[int] | None = None,
    on_finish: Callable[[Finished], None] | None = None,
    on_shape: Callable[[int, int], Any] | None = None, **options: Any) -> dict[int, Finished]:
  """Decodes some of the prompts, bucket by bucket, the rows refilled.

  Args:
    target: from `load_target`.
    drafter: None for plain decoding.
    prompts: token ids.
    members: indices of those that are decoded; they seed the sampling too.
    batch_size: rows decoded together.
    own: those of `members` that are decoded where another process decodes the others, which then
      count for the shapes alone; None for all.
    on_finish: called with each row that ends.
    on_shape: called with the rows and the capacity of each batch.
    **options: of `spec_jax.generate.Run`.

  Returns:
    The finished rows by index in `prompts`.
  """
  # The longest prompts first: neighbours in the queue then need about the same prefill.
  order = sorted(members, key=lambda i: -len(prompts[i]))
  only = None if own is None else [k for k, i in enumerate(order) if i in set(own)]
  run = Run(target, drafter, [prompts[i] for i in order], batch_size=batch_size,
            sequence_ids=order, only=only, **options)
  done = {}
  for group in run.buckets().values():
    # Narrower than the bucket where its prompts are: attention reads the whole capacity.
    widest = max(len(prompts[order[k]]) for k in group)
    size = -(-widest // identity.WIDTH) * identity.WIDTH
    if on_shape is not None:
      on_shape(min(batch_size, len(group)), size + run.max_new + run.program.draft_len + 1)
    for row in run.bucket(size, group):
      done[order[row.index]] = row
      if on_finish is not None:
        on_finish(row)
  return done


def _check_length(name, prompt, target):
  if len(prompt) > target.config.max_position:
    raise UserError(f"prompt {name} has {len(prompt)} tokens and the context holds "
                    f"{target.config.max_position}")


def verdict(differences: Sequence[dict[str, Any]]) -> str:
  """"broken" with a difference above the tolerance, "bitwise" when none is to same-shape decoding,
  "margin-bounded" otherwise."""
  if not all(place["within_tolerance"] for place in differences):
    return "broken"
  if any(place["against"] == "same-shape" for place in differences):
    return "margin-bounded"
  return "bitwise"


def _hash(*parts: bytes) -> str:
  digest = hashlib.sha256()
  for part in parts:
    digest.update(part)
  return digest.hexdigest()


def _equal(ours: dict[int, Finished], theirs: dict[int, Finished]) -> int:
  return sum(ours[i].tokens == theirs[i].tokens for i in ours)


def page(certificate: dict[str, Any]) -> str:
  """The certificate as Markdown."""
  c, s = certificate, certificate["settings"]
  yes = lambda value, size: "not looked at" if value is None else (
      "no dependence" if value else f"depends (up to {size:.2g})")
  lines = [
      f"# Identity certificate: {c['verdict']}", "",
      f"{c['drafter']} drafting for {c['target']} ({c['dtype']}), K = {s['draft_len']}, greedy, "
      f"{c['prompts']} prompts, up to {s['max_new_tokens']} new tokens, batch {s['batch_size']}.",
      "", "| against | identical outputs |", "| --- | --- |",
      f"| same-shape plain decoding | {c['identical_same_shape']} of {c['prompts']} |",
      f"| plain decoding of width 1 | {c['identical_width_1']} of {c['prompts']} |", "",
      f"Logits of passes of different width differ by up to {_figure(c['rounding'], '.3g')} "
      f"(measured); tolerance {c['tolerance']:.3g}, twice that and at most "
      f"{c['tolerance_cap']:g}.", ""]
  lines += [
      f"Probe, {p['rows']} rows of width {p['width']}, capacity {p['capacity']}: on the other rows "
      f"{yes(p['rows_independent'], p['rows_difference'])}; on the place in the block "
      f"{yes(p['place_independent'], p['place_difference'])}." for p in c["probes"]]
  lines += [
      "" if c["probes"] else "The probe did not fit into the buffers.",
      f"{c['rounds']} rounds, {c['accepted']} of {c['proposed']} drafts accepted; tau "
      + _figure(c["tau"])
      + (f" (the drafter's teacher-forced choices promise {c['predicted_tau']:.2f})"
         if c["predicted_tau"] is not None else "")
      + ".", ""]
  lines += [f"**Warning:** {text}\n" for text in c["warnings"]]
  if c["differences"]:
    lines += ["| prompt | against | equal tokens | margin | worst margin | within tolerance |",
              "| --- | --- | --- | --- | --- | --- |"]
    lines += [f"| {d['prompt']} | {d['against']} | {d['equal_tokens']} | "
              f"{_figure(d['margin'], '.3g')} | {_figure(d['worst_margin'], '.3g')} | "
              f"{'yes' if d['within_tolerance'] else '**no**'} |" for d in c["differences"]]
    lines.append("")
  lines.append(f"{c['backend']} ({c['device']}), " + ", ".join(
      f"{name} {version}" for name, version in c["versions"].items())
      + f"; weights of the target {c['target_weights'][:16] or 'in memory'}, of the drafter "
      f"{c['drafter_weights'][:16]} ({', '.join(c['drafter_dtypes']) or 'none'}); {c['created']}")
  return "\n".join(lines) + "\n"


def _figure(value: float | None, form: str = ".2f") -> str:
  return "-" if value is None else format(value, form)


# The command line.


def read_prompts(path: str) -> list[tuple[str, Any]]:
  """Name and prompt of each line of a file of JSON lines with "messages" or "prompt".

  A line without an "id" is named by its number.

  Raises:
    UserError: the file cannot be read or is empty, or a line (by number) is neither.
  """
  try:
    lines = Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig").split("\n")
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, "strerror", None) or error
    raise UserError(f"--prompts={path}: {reason}") from None
  found = []
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
      prompt = row["messages"] if "messages" in row else row["prompt"]
      if not isinstance(prompt, str) and not all(isinstance(m["content"], str) for m in prompt):
        raise TypeError
    except (ValueError, TypeError, KeyError):
      raise UserError(f'{path}:{number}: not a JSON object with a text as "prompt" or '
                      '"messages" of role and content') from None
    if not prompt:
      raise UserError(f"{path}:{number}: the prompt is empty")
    found.append((str(row.get("id", number)), prompt))
  if not found:
    raise UserError(f"--prompts={path}: no prompt")
  return found


def text_diff(ours: str, theirs: str, colour: bool) -> str:
  """Both texts character by character from a little before the first difference on; what only the
  first has is green (or in +{}), what only the second has is red (or in -{})."""
  marks = {"+": (_GREEN, _PLAIN), "-": (_RED, _PLAIN)} if colour else {
      "+": ("+{", "}"), "-": ("-{", "}")}
  start = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
               min(len(ours), len(theirs)))
  begin = max(0, start - 60)
  a, b = ours[begin:start + 120], theirs[begin:start + 120]
  out = ["..." if begin else ""]
  for kind, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
    if kind == "equal":
      out.append(a[i:j])
      continue
    for mark, piece in (("-", b[k:m]), ("+", a[i:j])):
      if piece:
        out.append(f"{marks[mark][0]}{piece}{marks[mark][1]}")
  return "".join(out)


def define_flags(values: flags.FlagValues) -> None:
  """Defines the flags of this program in `values`."""
  own = dict(flag_values=values)
  flags.DEFINE_string("target", "demo", "as in load_target", **own)
  flags.DEFINE_string("drafter", "ngram", "as in load_drafter", **own)
  flags.DEFINE_string("prompts", None, 'JSON lines with "messages" or "prompt"', **own)
  flags.DEFINE_integer("count", 0, "take the first prompts only; 0 for all", 0, **own)
  flags.DEFINE_integer("draft_len", 5, "tokens drafted in each round", 1, **own)
  flags.DEFINE_integer("max_new_tokens", 128, "the longest answer", 1, **own)
  flags.DEFINE_integer("batch_size", 8, "rows decoded together", 1, **own)
  flags.DEFINE_enum("dtype", "float32", list(DTYPES), "compute type", **own)
  flags.DEFINE_string(
      "mesh", "", "devices that the model is divided over: data,fsdp,tensor, such as 1,1,4 (-1 for "
      "all that is left as data); one device by default", **own)
  flags.DEFINE_string("out", "certificate", "folder for certificate.json and certificate.md", **own)


def execute(values: flags.FlagValues) -> int:
  """Audits, writes and prints; 1 when the verdict is "broken".

  Raises:
    UserError: a flag has a bad value or a file is not what it should be.
  """
  if values.prompts is None:
    raise UserError("--prompts is needed: a file of JSON lines")
  rows = read_prompts(values.prompts)
  rows = rows[:values.count or len(rows)]
  _make(Path(values.out))
  if values.drafter == "none":
    raise UserError("--drafter=none: a certificate is of speculative decoding; name a drafter")
  target = load_target(values.target, values.dtype, sharding.parse_mesh(values.mesh))
  drafter = load_drafter(values.drafter, target)
  ids = []
  for name, prompt in rows:
    try:
      ids.append(encode_prompt(target, prompt, name))
      _check_length(name, ids[-1], target)
    except UserError as error:
      raise UserError(f"{values.prompts}: {error}") from None
  done: dict[str, int] = {}

  def count(way, row):
    done[way] = done.get(way, 0) + 1
    end = "\n" if done[way] == len(ids) else ""
    if sys.stderr.isatty() or end:
      print(f"\r{way}: {done[way]} of {len(ids)}", end=end, file=sys.stderr, flush=True)

  certificate, decodes = audit(
      target, drafter, ids, draft_len=values.draft_len, max_new_tokens=values.max_new_tokens,
      batch_size=values.batch_size, names=[name for name, _ in rows], on_finish=count)
  folder = write(certificate, Path(values.out))
  print(page(certificate))
  if certificate["differences"]:
    first = certificate["differences"][0]
    other = decodes.same_shape if first["against"] == "same-shape" else decodes.width_1
    texts = [target.tokenizer.decode(d[first["index"]].tokens)
             for d in (decodes.speculative, other)]
    print(f"prompt {first['prompt']}, speculative (+) against {first['against']} (-):")
    print(text_diff(*texts, colour=sys.stdout.isatty()) + "\n")
  print(f"{certificate['verdict']}: {folder}/certificate.json")
  return 1 if certificate["verdict"] == "broken" else 0


def write(certificate: dict[str, Any], folder: Path) -> Path:
  """Writes certificate.json and certificate.md; returns the folder.

  Raises:
    UserError: it cannot be written.
  """
  _make(folder)
  try:
    text = json.dumps(certificate, indent=2, allow_nan=False) + "\n"
    (folder / "certificate.json").write_text(text, encoding="utf-8")
    (folder / "certificate.md").write_text(page(certificate), encoding="utf-8")
  except OSError as error:
    raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
  return folder


def _make(folder: Path) -> None:
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f"{folder}: cannot be written ({error.strerror})") from None


def main() -> None:
  """The command line: exit status 1 for a broken identity."""
  define_flags(flags.FLAGS)

  def run(values: flags.FlagValues) -> int:
    platform.configure()
    return execute(values)

  command.run(run, lambda argv: command.parse(argv, flags.FLAGS))


if __name__ == "__main__":
  platform.tune_process()
  main()
