"""The evaluate stage: real speculative decoding of the held-out prompts, and the report.

Reads `prompts/eval.jsonl` and `train/drafter`; writes `evaluate/`: one file of records for each
drafter and setting (a stopped stage goes on with the missing ones), one of speed and identity for
each dtype, and from them report.json and report.md. Of several processes each decodes its share of
the prompts (shares.py); what is timed, compared or small is the first one's alone.

Identity is measured twice. Over all evaluation prompts (or identity_per_category of them, since it
is the dearest part) in float32, batched: the certificate of `spec_jax.audit`, also written to
certificate.json and certificate.md. And on the prompts that are timed one by one, for each dtype:
the very decodes whose speed is reported, against plain decoding and, for the other dtypes, against
the same-shape baseline.
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import spec_jax
from spec_jax import audit, identity, sampling, sharding
from spec_jax import drafters as drafters_lib
from spec_jax import records as metrics
from spec_jax.drafters import Drafter
from spec_jax.errors import UserError
from spec_jax.generate import Finished, encode_prompt
from spec_jax.target import Target
from train_drafter import config as config_lib
from train_drafter import (
  distributed,
  forecast,
  manifest,
  placement,
  report,
  shares,
  speed,
  timings,
  whatif,
)
from train_drafter.config import Config
from train_drafter.conversations import prompt_files
from train_drafter.documents import draft_vocabulary
from train_drafter.generate import read_jsonl, target_id
from train_drafter.overlap import remove_overlaps
from train_drafter.progress import Bar
from train_drafter.prompts import evaluation_set, with_system
from train_drafter.provenance import prompt_hashes, provenance
from train_drafter.train import initial_drafter

STAGE = "evaluate"
NGRAM, LOOKUP, UNTRAINED, SELF = "ngram", "lookup", "untrained", "self"
_WIDTH = identity.WIDTH
_COST_REPEATS = 11
_PROBED = 4  # prompts whose text the rounding between pass widths is measured with


@dataclasses.dataclass(frozen=True)
class Bench:
  """One target in one dtype with its drafters, and the encoded prompts.

  Attributes:
    cfg: of the run.
    workdir: its folder.
    target: in the dtype of this part of the evaluation.
    prompts: lines of eval.jsonl.
    ids: their token ids.
  """

  cfg: Config
  workdir: Path
  target: Target
  prompts: list[dict]
  ids: list[list[int]]

  def width(self, members: Sequence[int]) -> int:
    """Width of a prefill that each of these prompts fits into."""
    return -(-max(len(self.ids[i]) for i in members) // _WIDTH) * _WIDTH

  def drafter(self, name: str) -> Drafter:
    """The trained drafter or one of the controls, on the devices of the target."""
    found = self._drafter(name)
    return dataclasses.replace(found, params=sharding.place(
        found.params, self.target.mesh, self.target.config.head_dim))

  def _drafter(self, name):
    dtype = self.cfg.evaluate.drafter_dtype
    if name == SELF:
      return spec_jax.load_drafter(SELF, self.target)
    if name == NGRAM:
      return spec_jax.load_drafter(self.cfg.evaluate.ngram, self.target)
    folder = self.workdir / "train" / "drafter"
    if name == self.cfg.drafter.kind:
      return spec_jax.load_drafter(str(folder), self.target, dtype)
    if name == LOOKUP:
      return spec_jax.load_drafter(
          f"lookup:{self.cfg.evaluate.lookup}:{folder}", self.target, dtype)
    vocabulary = draft_vocabulary(self.workdir / "train")
    module = initial_drafter(self.cfg, self.target, vocabulary, dtype)
    return drafters_lib.wrap(self.cfg.drafter.kind, name, module)

  def spread(self, per_category: int) -> list[int]:
    """Indices of the first prompts of every category, all of them for 0."""
    seen: dict[str, int] = {}
    kept = []
    for i, prompt in enumerate(self.prompts):
      seen[prompt["category"]] = seen.get(prompt["category"], 0) + 1
      if not per_category or seen[prompt["category"]] <= per_category:
        kept.append(i)
    return kept

  def in_turn(self, count: int) -> list[int]:
    """Indices of so many prompts, taken from the categories in turn; all of them for 0."""
    place: dict[str, int] = {}
    order = []
    for i, prompt in enumerate(self.prompts):
      place[prompt["category"]] = place.get(prompt["category"], 0) + 1
      order.append((place[prompt["category"]], i))
    ranked = [i for _, i in sorted(order)]
    return ranked[:count or len(ranked)]

  def timed(self) -> list[int]:
    """Indices of the prompts that are timed."""
    return self.in_turn(self.cfg.evaluate.speed_prompts)

  def decoded(self, name: str) -> list[int]:
    """Indices of the prompts that a drafter decodes: the dear controls have a few."""
    if name == SELF:
      return sorted(self.in_turn(self.cfg.evaluate.self_prompts))
    return self.spread(self.cfg.evaluate.untrained_per_category if name == UNTRAINED else 0)


def names(cfg: Config) -> list[str]:
  """Every drafter that is measured, the trained one first."""
  lookup, own = [LOOKUP] * bool(cfg.evaluate.lookup), [SELF] * bool(cfg.evaluate.self_prompts)
  return [cfg.drafter.kind, NGRAM, *lookup, UNTRAINED, *own]


def run(cfg: Config, workdir: Path) -> Path:
  """Writes `workdir`/evaluate; reuses what is there.

  Raises:
    UserError: a stage before it has not run, or the folder belongs to another config.
  """
  workdir = Path(workdir)
  folder = workdir / STAGE
  inputs = {name: manifest.require(workdir / name, name, cfg) for name in ("prompts", "train")}
  options = cfg.evaluate
  # Every dtype is loaded once and does all its work.
  kinds = [k for k in config_lib.DTYPES if k in (
      options.dtype, *[options.identity_dtype] * options.same_shape, *options.speed_dtypes)]
  prompts = evaluation_prompts(cfg, workdir)
  part = config_lib.part(cfg, "evaluate")
  if options.path:
    part["data"] = manifest.files_hash(prompt_files(options.path))
  target = placement.load_target(cfg, kinds[0])
  opened = manifest.begin(
      folder, stage=STAGE, config=part, inputs=inputs, target=target_id(target))
  if opened.complete:
    print(f"{STAGE}: reused")
    return folder
  args = config_lib.template_args(cfg)
  ids = [encode_prompt(target, p["messages"], i, args) for i, p in enumerate(prompts)]
  spent: dict[str, float] = {}
  for kind in kinds:
    if kind != options.dtype and not distributed.is_primary():
      continue
    if target.dtype != kind:
      target = placement.load_target(cfg, kind)
    bench = Bench(cfg, workdir, target, prompts, ids)
    for heat, rule in settings(cfg) if kind == options.dtype else ():
      for name in names(cfg):
        with timings.Stopwatch(spent, f"acceptance {name} T={heat:g} {rule}"):
          acceptance(bench, name, heat, rule)
    if distributed.is_primary():
      with distributed.alone():
        _measure(bench, spent)
  if distributed.is_primary():
    hashes = prompt_hashes([p["id"] for p in prompts], ids)
    made = collect(cfg, workdir, opened, inputs["train"].counts, hashes)
    report.write_report(made, folder)  # printed by the report stage, which follows
  distributed.barrier(f"{STAGE}: what the first process measures", math.inf)
  manifest.finish(folder, opened, {
      "prompts": len(prompts), "seconds": {n: round(s, 1) for n, s in spent.items()}})
  return folder


def _measure(bench: Bench, spent: dict[str, float]) -> None:
  """Everything but the acceptance runs of one dtype."""
  cfg, kind, options = bench.cfg, bench.target.dtype, bench.cfg.evaluate
  if kind == options.dtype:
    with timings.Stopwatch(spent, "replay"):
      forecast.replayed(bench, settings(cfg), acceptance, _kept)
    _kept(bench.workdir / STAGE / "parts" / "memory.json", functools.partial(
        whatif.memory, bench.target, bench.drafter(cfg.drafter.kind)))
  if kind == options.identity_dtype and options.same_shape:
    with timings.Stopwatch(spent, f"identity {kind}"):
      identity_of_batch(bench)
  if kind in options.speed_dtypes:
    with timings.Stopwatch(spent, f"speed {kind}"):
      speed_and_identity(bench)
  if kind in forecast.dtypes(cfg):
    with timings.Stopwatch(spent, f"costs {kind}"):
      forecast.costs(bench, _kept)


def evaluation_prompts(cfg: Config, workdir: Path) -> list[dict]:
  """What is decoded: the evaluation prompts of the prompts stage, or those of `evaluate.path`.

  Of the latter, whatever shares a run of words with a training prompt is left out.

  Raises:
    UserError: a broken file, or nothing is left.
  """
  if not cfg.evaluate.path:
    return read_jsonl(workdir / "prompts" / "eval.jsonl")
  options = dataclasses.replace(cfg.prompts, eval_path=cfg.evaluate.path, eval_per_category=0)
  found, duplicates, file = evaluation_set(options)
  if file.dropped:
    print(file.report())
  trained = read_jsonl(workdir / "prompts" / "prompts.jsonl")
  kept, shared = remove_overlaps(with_system(found, options.system), trained, options.overlap_words)
  print(f"{STAGE}: {len(kept)} prompts of {cfg.evaluate.path}; dropped {duplicates} duplicates, "
        f"{len(shared)} that share {options.overlap_words} words with a training prompt")
  if not kept:
    raise UserError(f"evaluate.path={cfg.evaluate.path}: no prompt is left")
  return kept


def settings(cfg: Config) -> list[tuple[float, str]]:
  """(temperature, rule) of every acceptance run, coldest first."""
  rules = lambda t: ("greedy",) if t < sampling.GREEDY_BELOW else dict.fromkeys(cfg.evaluate.rules)
  return [(float(t), rule) for t in sorted(set(cfg.evaluate.temperatures)) for rule in rules(t)]


# Acceptance.


def records_path(
    workdir: Path, name: str, temperature: float, rule: str, draft_len: int = 0) -> Path:
  """Where the records of one drafter at one setting lie; 0 is the K of the report."""
  other = f"-K{draft_len}" if draft_len else ""
  return workdir / STAGE / "parts" / f"{name}-T{temperature:g}-{rule}{other}.jsonl"


def acceptance(
    bench: Bench, name: str, temperature: float, rule: str, draft_len: int = 0) -> list[dict]:
  """Records of one drafter at one setting; decoded unless they lie there already."""
  path = records_path(bench.workdir, name, temperature, rule, draft_len)
  members = bench.decoded(name)

  def decode(own):
    done = decode_all(
        bench, bench.drafter(name), members, temperature, rule, draft_len=draft_len, own=own,
        title=f"{name} T={temperature:g} {rule}" + (f" K={draft_len}" if draft_len else ""))
    return [{"id": bench.prompts[i]["id"], "category": bench.prompts[i]["category"],
             "records": row.records, "tokens": row.tokens} for i, row in sorted(done.items())]

  return shares.records(path, (name, temperature, rule), members, decode)


def decode_all(
    bench: Bench, drafter: Drafter | None, members: Sequence[int], temperature: float, rule: str, *,
    title: str, draft_len: int = 0, own: Sequence[int] | None = None) -> dict[int, Finished]:
  """Decodes the prompts `members`, or `own` of them; by index."""
  options = bench.cfg.evaluate
  with Bar(title, total=len(members if own is None else own)) as bar:
    return audit.decode_all(
        bench.target, drafter, bench.ids, members, own=own, temperature=temperature, rule=rule,
        draft_len=draft_len or options.draft_len, max_new_tokens=options.max_new_tokens,
        seed=options.seed, batch_size=options.batch_size,
        on_finish=lambda row: bar.advance(1, amount=len(row.tokens)))


# Identity.


def identity_of_batch(bench: Bench) -> list[dict]:
  """The certificate of the trained drafter over many prompts, and its row of the report."""
  def measure():
    options, members = bench.cfg.evaluate, bench.spread(bench.cfg.evaluate.identity_per_category)
    with contextlib.ExitStack() as stack:
      bars: dict[str, Bar] = {}

      def count(way, row):
        if way not in bars:
          stack.close()  # the way before has ended
          bars[way] = stack.enter_context(
              Bar(f"{way} {bench.target.dtype}", total=len(members)))
        bars[way].advance(1, amount=len(row.tokens))

      certificate, _ = audit.audit(
          bench.target, bench.drafter(bench.cfg.drafter.kind), [bench.ids[i] for i in members],
          draft_len=options.draft_len, max_new_tokens=options.max_new_tokens,
          batch_size=options.batch_size, names=[bench.prompts[i]["id"] for i in members],
          on_finish=count)
    audit.write(certificate, bench.workdir / STAGE)
    return [{
        "dtype": bench.target.dtype, "drafter": bench.cfg.drafter.kind, "prompts": len(members),
        "identical_same_shape": certificate["identical_same_shape"] / len(members),
        "identical_width_1": certificate["identical_width_1"] / len(members),
        "batch_size": options.batch_size, "decode": "batched", "verdict": certificate["verdict"],
        "tolerance": certificate["tolerance"], "dead_drafter": certificate["warnings"],
        "divergences": [
            {"id": d["prompt"], **{k: d[k] for k in (
                "against", "equal_tokens", "margin", "worst_margin", "within_tolerance")}}
            for d in certificate["differences"]]}]

  return _kept(bench.workdir / STAGE / "parts" / "identity.json", measure)


def speed_and_identity(bench: Bench) -> dict[str, list[dict]]:
  """Speed and identity of one dtype from the same decodes, prompt by prompt."""
  path = bench.workdir / STAGE / "parts" / f"speed-{bench.target.dtype}.json"
  return _kept(path, lambda: _measure_speed(bench))


def _measure_speed(bench: Bench) -> dict[str, list[dict]]:
  options = bench.cfg.evaluate
  members = bench.timed()
  size = bench.width(members)
  make = lambda drafter: speed.Single(
      bench.target, drafter, options.draft_len, size, options.max_new_tokens)
  plain = make(None)
  timed = [name for name in names(bench.cfg)[1:] if name not in (UNTRAINED, SELF)]
  sides = {name: make(bench.drafter(name)) for name in (*timed, bench.cfg.drafter.kind)}
  # The batched comparison has the same-shape baseline of its own dtype already.
  baseline = not (options.same_shape and bench.target.dtype == options.identity_dtype)
  text: dict[str, list[list[int]]] = {n: [] for n in ("plain", "same shape", *sides)}
  fields = ("tokens", "decode_s", "prefill_s")
  clock: dict[str, dict[str, list]] = {n: {f: [] for f in fields} for n in ("plain", *sides)}
  warm = {n: s.warm_up(bench.ids[members[0]]) for n, s in {"plain": plain, **sides}.items()}
  with Bar(f"speed {bench.target.dtype}", total=len(members)) as bar:
    for turn, i in enumerate(members):
      order = ["plain", *sides]
      if turn % 2:
        order.reverse()  # whatever comes first meets the caches as the other side left them
      for name in order:
        row, seconds = (plain if name == "plain" else sides[name]).timed(bench.ids[i])
        text[name].append(row.tokens)
        # The first token came from the prefill.
        values = (len(row.tokens) - 1, seconds["decode"], seconds["prefill"])
        for field, value in zip(fields, values, strict=True):
          clock[name][field].append(value)
        bar.advance(0, amount=len(row.tokens))
      if baseline:
        text["same shape"].append(sides[NGRAM](bench.ids[i], force_reject=True)[0].tokens)
      bar.advance(1)
  price = speed.costs(sides, bench.ids[members[0]], _COST_REPEATS)
  short = timings.too_short(clock["plain"])
  if short:
    print(f"{STAGE}: every one of {len(members)} timed answers has at most {timings.LEAST_TIMED} "
          "tokens, too few to time: no speed in the report")
  # Of the prompts' own text, not of the answers that are judged.
  texts = sorted((bench.ids[i] for i in members), key=len)[-_PROBED:]
  tolerance = identity.rounding_tolerance(bench.target, texts, options.draft_len)
  speeds, identities = [], []
  for name in sides:
    if not short:
      asked = [bench.prompts[i]["id"] for i in members]
      speeds.append({
          "dtype": bench.target.dtype, "drafter": name, "temperature": 0.0, "batch_size": 1,
          **timings.speed_row(asked, clock[name], clock["plain"], options.seed), **price[name],
          **{f"{prefix}compile_{key}": seconds
             for prefix, n in zip(timings.SIDES, (name, "plain"), strict=True)
             for key, seconds in warm[n].items()}})
    identities.append({
        "dtype": bench.target.dtype, "drafter": name, "prompts": len(members),
        "identical_same_shape": metrics.identical_share(text[name], text["same shape"])
        if baseline and name == NGRAM else None,
        "identical_width_1": metrics.identical_share(text[name], text["plain"]),
        "batch_size": 1, "decode": "speed", "tolerance": tolerance,
        "divergences": divergences(bench, members, text[name], text["plain"], tolerance)})
  return {"speed": speeds, "identity": identities}


def divergences(
    bench: Bench, members: Sequence[int], ours: Sequence[list[int]], theirs: Sequence[list[int]],
    tolerance: float) -> list[dict]:
  """Where texts part: prompt, length of the equal part, the target's margin there, and whether
  rounding between the widths explains it."""
  width = bench.width(members) + bench.cfg.evaluate.max_new_tokens
  out = []
  for i, a, b in zip(members, ours, theirs, strict=True):
    if a != b:
      found = identity.divergence(bench.target, bench.ids[i], a, b, width, tolerance)
      out.append({"id": bench.prompts[i]["id"], **{name: found[name] for name in (
          "equal_tokens", "margin", "worst_margin", "within_tolerance")}})
  return out


# The report.


def collect(
    cfg: Config, workdir: Path, opened: manifest.Manifest, trained: dict[str, Any],
    hashes: dict[str, str]) -> dict:
  """Saves the raw material in the stage folder and builds the report from it."""
  folder = workdir / STAGE
  options = cfg.evaluate
  rows = {
      name: {key: report.load_records(records_path(workdir, name, *key))[name][key]
             for key in settings(cfg)}
      for name in names(cfg)}
  parts = folder / "parts"
  speeds, identities = [], []
  if (parts / "identity.json").exists():
    identities += _read_part(parts / "identity.json")
  for kind in options.speed_dtypes:
    part = _read_part(parts / f"speed-{kind}.json")
    speeds += part["speed"]
    identities += part["identity"]
  forecasts = {name: [_read_part(path) for path in paths]
               for name, paths in forecast.part_paths(cfg, parts, settings(cfg)).items()}
  forecasts["memory"] = _read_part(parts / "memory.json")
  report.save_evaluation(
      folder, records=rows, target=cfg.target.source, drafter=cfg.drafter.kind,
      draft_len=options.draft_len, max_new_tokens=options.max_new_tokens, speed=speeds,
      identity=identities, training_estimate=trained.get("training_estimate", []),
      seed=options.seed, **forecasts,
      provenance={
          **provenance(cfg, opened, hashes, workdir / "train" / "drafter"),
          "identity_dtype": options.identity_dtype, "dtype": options.dtype,
          "drafter_dtype": options.drafter_dtype, "batch_size": options.batch_size,
          "untrained_per_category": options.untrained_per_category,
          "training": {name: trained[name] for name in (
              "documents", "supervised", "planned_steps", "steps", "epochs") if name in trained}})
  return report.report_from_folder(folder)


def _kept(path: Path, measure: Callable[[], Any]) -> Any:
  """The JSON at `path`, measured and written when it is not there."""
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_json(path, measure())
  return _read_part(path)


def _read_part(path: Path) -> Any:
  try:
    return json.loads(path.read_text())
  except ValueError as error:
    raise UserError(f"{path}: damaged ({error}); remove it and run --stage={STAGE} again") from None
