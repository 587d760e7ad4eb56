"""The acceptance report: built from raw round records, checked, written, and rebuilt without
decoding again.

`train_drafter.evaluate` hands its records and measurements to `save_evaluation` and `build_report`;
`report_from_folder` makes the same report from what was saved. The metrics are those of
`spec_jax.records`; the tables are made by `train_drafter.report_text`.

Raw material, all plain Python:

- records: {drafter: {(temperature, rule): [row]}}, row = {"id", "category", "records": RowRecords,
  "tokens": list of int}, the same prompts under every key. On disk `records.jsonl`, one row a line.
- measurements, the other arguments of `build_report`; on disk `evaluation.json`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_jax import records as metrics
from spec_jax.errors import UserError
from spec_jax.records import RowRecords
from spec_jax.verify import RULES
from train_drafter import forecast, manifest, payoff, timings, whatif
from train_drafter.report_checks import (
  acceptance_warnings,
  check_estimates,
  context_warnings,
  find,
)
from train_drafter.report_html import html
from train_drafter.report_schema import (
  DEFINITIONS,
  SCHEMA_VERSION,
  TIMES,
  validate_material,
  validate_report,
  validate_speed,
)
from train_drafter.report_text import markdown, print_report
from train_drafter.templates import CATEGORIES

__all__ = ["build_report", "load_evaluation", "load_records", "print_report",
           "report_from_folder", "run", "save_evaluation", "save_records", "validate_report",
           "write_report"]

RECORDS_FILE = "records.jsonl"
MEASUREMENTS_FILE = "evaluation.json"

Setting = tuple[float, str]
Records = Mapping[str, Mapping[Setting, Sequence[dict]]]


def _group(rows: Sequence[dict], draft_len: int, seed: int) -> dict:
  """Every figure of one set of prompts; see `spec_jax.records.summarize` for the first ones."""
  group = metrics.summarize([r["records"] for r in rows], draft_len, seed)
  early = []
  for row in rows:
    try:
      early.append(metrics.before_first_loop(row["records"], row["tokens"]))
    except ValueError as error:
      raise UserError(f"report: prompt {row['id']!r}: {error}") from None
  group["looped_token_share"] = metrics.to_plain(
      metrics.looped_share([r["tokens"] for r in rows]))
  group["tau_before_first_loop"] = metrics.to_plain(metrics.tau(early))
  group["tau_before_first_loop_ci"] = metrics.to_plain(metrics.tau_ci(early, seed=seed))
  return group


def _settings(drafter: str, by_setting: Mapping[Setting, Sequence[dict]], draft_len: int,
              seed: int) -> list[dict]:
  """The report's entry for each (temperature, rule), coldest first."""
  entries = []
  for (temperature, rule), rows in sorted(by_setting.items()):
    if not rows:
      raise UserError(f"report: no prompts for {drafter} at T={temperature:g}, {rule}")
    ids = [r["id"] for r in rows]
    if len(set(ids)) < len(ids):
      twice = next(i for i in ids if ids.count(i) > 1)
      raise UserError(f"report: prompt {twice!r} stands twice under {drafter} at "
                      f"T={temperature:g}, {rule}")
    found = list(dict.fromkeys(r["category"] for r in rows))
    order = [c for c in CATEGORIES if c in found] + [c for c in found if c not in CATEGORIES]
    entries.append({
        "temperature": float(temperature),
        "rule": rule,
        "all": _group(rows, draft_len, seed),
        "categories": {name: _group([r for r in rows if r["category"] == name], draft_len, seed)
                       for name in order},
    })
  return entries


def _speed_rows(rows: Sequence[dict], settings: Mapping[str, Sequence[dict]]) -> list[dict]:
  """Adds temperature (0 unless given), tau and the predicted speed-up where they can be known."""
  fastest = max((row.get("plain_tokens_per_s", 0.0) for row in rows), default=0.0)
  out = []
  for given in rows:
    row = {"temperature": 0.0, **dict.fromkeys(TIMES), **given}
    if row.get("tau") is None:
      entry = find(settings.get(row.get("drafter"), ()), row["temperature"])
      row["tau"] = entry["all"]["tau"] if entry else None
    cost = [row.get("draft_cost"), row.get("verify_cost")]
    known = row["tau"] is not None and None not in cost and sum(cost) > 0
    row["over_fastest_plain"] = row.get("speculative_tokens_per_s", 0.0) / (fastest or 1.0)
    row["predicted_speedup"] = row["tau"] / sum(cost) if known else None
    out.append({name: metrics.to_plain(value) for name, value in row.items()})
  validate_speed(out)
  return out


def _headline(speed: Sequence[dict]) -> dict | None:
  """The fastest drafter at the lowest temperature against the fastest plain decoding.

  Within one dtype the ratio is the paired one. Across dtypes it is that of the same prompts, which
  were not timed in turn, or without their raw times that of the medians, which has no interval.
  """
  if not speed:
    return None
  coldest = min(row["temperature"] for row in speed)
  rows = [row for row in speed if row["temperature"] == coldest]
  best = max(rows, key=lambda row: row["speculative_tokens_per_s"])
  plain = max(rows, key=lambda row: row["plain_tokens_per_s"])
  paired = plain["dtype"] == best["dtype"]
  plain_rate = (best if paired else plain)["plain_tokens_per_s"]
  ratio, interval = best["speedup"], best["speedup_ci"]
  if not paired:
    found = timings.across(best, plain) or {
        "ratio": best["speculative_tokens_per_s"] / plain_rate, "ratio_ci": [None, None]}
    ratio, interval = found["ratio"], found["ratio_ci"]
  return {
      "drafter": best["drafter"],
      "dtype": best["dtype"],
      "temperature": coldest,
      "speculative_tokens_per_s": best["speculative_tokens_per_s"],
      "plain_dtype": plain["dtype"],
      "plain_tokens_per_s": plain_rate,
      "speedup": ratio,
      "speedup_ci": interval,
      "speedup_pooled": best.get("speedup_pooled") if paired else None,
  }


def _whatif(memory: dict | None, costs: Sequence[dict], taus: dict[int, float],
            draft_len: int) -> dict | None:
  """Where speculation pays: as measured, and as computed where the sizes of both are known."""
  known = whatif.section(memory, taus) if memory and "target" in memory else {}
  measured = payoff.measured(costs, taus, draft_len)
  return {**known, "measured": measured} if known or any(measured.values()) else None


def build_report(*, target: str, drafter: str, draft_len: int, max_new_tokens: int,
                 records: Records, speed: Sequence[dict] = (), identity: Sequence[dict] = (),
                 provenance: dict | None = None,
                 training_estimate: dict | Sequence[dict] | None = None, seed: int = 0,
                 replay: Sequence[dict] = (), costs: Sequence[dict] = (),
                 memory: dict | None = None) -> dict:
  """Turns raw records and measurements into the report.

  Args:
    target: name of the target.
    drafter: the trained drafter's key in `records`; every other key is a control.
    draft_len: K.
    max_new_tokens: the cap of every answer.
    records: see the module's docstring.
    speed: rows with dtype, drafter, plain_tokens_per_s, speculative_tokens_per_s, speedup,
      speedup_ci, draft_cost, verify_cost and optionally temperature, tau and anything else.
    identity: rows with dtype, drafter, prompts, identical_same_shape, identical_width_1 (shares).
    provenance: versions, dates, hashes; any JSON.
    training_estimate: what training promised: temperature, optionally rule, and any of tau,
      acceptance_rate and first_position (probability that the first draft is accepted); or a list.
    seed: of every bootstrap.
    replay, costs: parts of `train_drafter.forecast`, raw.
    memory: of `train_drafter.whatif`; the section "whatif" comes from it, the costs and `replay`.

  Returns:
    The report, valid for `validate_report`.

  Raises:
    UserError: the drafter has no records, a setting has no prompts or one twice, or the result
      lacks a key.
  """
  if drafter not in records:
    raise UserError(f"report: no records of the drafter {drafter!r}, only of {sorted(records)}")
  estimates = _listed(training_estimate)
  speed = [{name: metrics.to_plain(value) for name, value in row.items()} for row in speed]
  validate_material(
      replay=replay, costs=costs, memory=memory, identity=identity, speed=speed,
      training_estimate=estimates, target=target, drafter=drafter, draft_len=draft_len,
      max_new_tokens=max_new_tokens, seed=seed, provenance=provenance)
  by_drafter = {name: _settings(name, by_setting, draft_len, seed)
                for name, by_setting in records.items()}
  settings = by_drafter[drafter]
  controls = {name: {"settings": by_drafter[name]} for name in by_drafter if name != drafter}
  warnings = acceptance_warnings(drafter, settings, controls)
  warnings += context_warnings(drafter, records[drafter])
  for name in controls:
    for key, rows in records[name].items():
      ours = records[drafter].get(key)
      if ours is None:
        continue
      ids, theirs = {r["id"] for r in ours}, {r["id"] for r in rows}
      if theirs < ids:
        warnings.append(f"{name} was decoded on {len(theirs)} of the {len(ids)} prompts at "
                        f"T={key[0]:g}: its figures rest on those")
      elif theirs != ids:
        warnings.append(f"{name} was decoded on other prompts than {drafter} at T={key[0]:g}: "
                        "their figures cannot be compared")
  estimates = check_estimates(estimates, settings, warnings)
  for row in identity:
    warnings += row.get("dead_drafter", ())
    same = row.get("identical_same_shape")
    if row.get("dtype") == "float32" and same is not None and same < 1:
      warnings.append(f"float32 outputs with {row.get('drafter')} differ from same-shape plain "
                      f"decoding on {100 * (1 - same):.1f} % of the prompts")
    for place in row.get("divergences", ()):
      if not place["within_tolerance"]:
        warnings.append(
            f"{row['dtype']} text with {row['drafter']} leaves plain decoding of "
            f"{place.get('against', 'width 1')} on {place['id']} behind {place['equal_tokens']} "
            f"tokens, and rounding does not explain it (tolerance {row['tolerance']:.3g})")
  training = (provenance or {}).get("training", {})
  if training.get("steps", 0) < training.get("planned_steps", 0):
    warnings.append(f"training stopped at step {training['steps']} of {training['planned_steps']}")
  speed_rows = _speed_rows(speed, by_drafter)
  coldest = settings[0]["all"]
  report = {
      "schema_version": SCHEMA_VERSION,
      "target": target,
      "drafter": drafter,
      "draft_len": draft_len,
      "max_new_tokens": max_new_tokens,
      "settings": settings,
      "controls": controls,
      "speed": speed_rows,
      "plain": timings.plain_section(speed_rows),
      "replay": forecast.replay_section(replay, warnings, seed),
      "costs": [{"batches": [], "contexts": [], **cost} for cost in costs],
      "prediction": forecast.prediction_section(costs, replay, speed_rows, drafter, draft_len),
      "whatif": _whatif(memory, costs, forecast.coldest_taus(replay), draft_len),
      "memory": memory,
      "identity": [{k: metrics.to_plain(v) for k, v in row.items()} for row in identity],
      # Of the coldest setting, where loops are worst; every setting has its own as well.
      "looped_token_share": coldest["looped_token_share"],
      "tau_before_first_loop": coldest["tau_before_first_loop"],
      "training_estimate": estimates,
      "warnings": warnings,
      "headline": _headline(speed_rows),
      "definitions": DEFINITIONS,
      "provenance": provenance or {},
  }
  validate_report(report)
  return report


def _listed(training_estimate: dict | Sequence[dict] | None) -> Sequence[dict]:
  if training_estimate is None:
    return []
  return [training_estimate] if isinstance(training_estimate, dict) else training_estimate


def _write(path: Path, text: str) -> None:
  """Whole or not at all: a killed run leaves the old file."""
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(path.name + ".partial")
  partial.write_text(text, encoding="utf-8")
  os.replace(partial, path)


def write_report(report: dict, folder: str | Path) -> Path:
  """Writes report.json, report.md and report.html; returns the path of the first.

  Raises:
    UserError: the report lacks a key (nothing is written then).
  """
  validate_report(report)
  path = Path(folder) / "report.json"
  _write(path, json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
  _write(path.with_name("report.md"), markdown(report))
  _write(path.with_name("report.html"), html(report))
  return path


def save_records(path: str | Path, records: Records) -> Path:
  """Writes every row of `records`, one JSON line each; returns the path."""
  lines = []
  for drafter, by_setting in records.items():
    for (temperature, rule), rows in by_setting.items():
      for row in rows:
        r = row["records"]
        lines.append(json.dumps({
            "drafter": drafter, "temperature": float(temperature), "rule": rule,
            "id": row["id"], "category": row["category"], "reason": r.reason,
            "proposed": r.proposed.tolist(), "accepted": r.accepted.tolist(),
            "emitted": r.emitted.tolist(), "tokens": [int(t) for t in row["tokens"]],
        }, separators=(",", ":")))
  _write(Path(path), "".join(line + "\n" for line in lines))
  return Path(path)


def _check_line(raw: Any) -> None:
  """What `RowRecords` does not look at itself; raises ValueError with field and value."""
  if not isinstance(raw, dict):
    raise ValueError(f"must be an object, got {raw!r}")
  for name in ("drafter", "rule", "id", "category"):
    if not isinstance(raw[name], str):
      raise ValueError(f"{name} must be a string, got {raw[name]!r}")
  if raw["rule"] not in RULES:
    raise ValueError(f"rule must be one of {', '.join(RULES)}, got {raw['rule']!r}")
  if not isinstance(raw["temperature"], int | float) or not 0 <= raw["temperature"] < math.inf:
    raise ValueError(f"temperature must be a number of at least 0, got {raw['temperature']!r}")
  if not isinstance(raw["tokens"], list) or not all(type(t) is int for t in raw["tokens"]):
    raise ValueError("tokens must be a list of whole numbers")


def load_records(path: str | Path) -> dict[str, dict[Setting, list[dict]]]:
  """Reads what `save_records` wrote.

  Raises:
    UserError: the file is missing or empty, or names the line that is broken.
  """
  path = Path(path)
  if not path.is_file():
    raise UserError(f"{path}: no such file")
  out: dict[str, dict[Setting, list[dict]]] = {}
  text = path.read_text(encoding="utf-8", errors="replace")  # what is no text is no JSON either
  for number, line in enumerate(text.splitlines(), 1):
    try:
      raw = json.loads(line)
      _check_line(raw)
      row = {"id": raw["id"], "category": raw["category"], "tokens": raw["tokens"],
             "records": RowRecords(raw["proposed"], raw["accepted"], raw["emitted"],
                                   raw["reason"])}
      metrics.check_answer(row["records"], row["tokens"])
      key = (float(raw["temperature"]), raw["rule"])
      out.setdefault(raw["drafter"], {}).setdefault(key, []).append(row)
    except KeyError as error:
      raise UserError(f"{path}:{number}: {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
      raise UserError(f"{path}:{number}: {error}") from None
  if not out:
    raise UserError(f"{path}: holds no records")
  return out


def save_evaluation(folder: str | Path, *, records: Records, **measurements) -> None:
  """Saves the raw material of a report: the arguments of `build_report`, records apart."""
  folder = Path(folder)
  save_records(folder / RECORDS_FILE, records)
  _write(folder / MEASUREMENTS_FILE,
         json.dumps(measurements, indent=1, default=metrics.to_plain, allow_nan=False) + "\n")


def load_evaluation(folder: str | Path) -> dict[str, Any]:
  """Reads what `save_evaluation` wrote: the arguments of `build_report`.

  Raises:
    UserError: a file is missing or broken, or lacks a key (named, with the value of a wrong one).
  """
  path = Path(folder) / MEASUREMENTS_FILE
  if not path.is_file():
    raise UserError(f"{path}: no such file")
  try:
    measurements = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise UserError(f"{path}: {error}") from None
  if not isinstance(measurements, dict):
    raise UserError(f"{path}: must hold an object")
  measurements.pop("whatif", None)  # earlier runs kept what is made from the rest now
  try:
    validate_material(**measurements | {
        "training_estimate": _listed(measurements.get("training_estimate"))})
  except UserError as error:
    raise UserError(f"{path}: {str(error).removeprefix('report: ')}") from None
  return {**measurements, "records": load_records(path.with_name(RECORDS_FILE))}


def report_from_folder(folder: str | Path) -> dict:
  """Rebuilds the report from a folder of `save_evaluation`, without decoding.

  Raises:
    UserError: a file is missing or broken.
  """
  try:
    return build_report(**load_evaluation(folder))
  except KeyError as error:
    raise UserError(f"{Path(folder) / MEASUREMENTS_FILE}: {error.args[0]} is missing") from None
  except (AttributeError, TypeError, ValueError) as error:
    raise UserError(f"{Path(folder) / MEASUREMENTS_FILE}: {error}") from None


def run(cfg: Any, workdir: str | Path) -> Path:
  """The report stage: rebuilds report.json, .md and .html of a finished evaluation, and prints it.

  Args:
    cfg: of the run; checked against what the folders were made with.
    workdir: folder of the run.

  Raises:
    UserError: the evaluate stage has not run, or ran with another config.
  """
  folder = Path(workdir) / "evaluate"
  manifest.require(folder, "evaluate", cfg)
  report = report_from_folder(folder)
  write_report(report, folder)
  print_report(report)
  return folder
