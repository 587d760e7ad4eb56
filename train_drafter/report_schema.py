"""What report.json holds: its version, the definition of every figure, and the check on writing.

Used by `train_drafter.report`. Add a key here first; raise `SCHEMA_VERSION` when a key's meaning
changes or a key goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spec_jax.errors import UserError
from train_drafter.timings import LEAST_TIMED

SCHEMA_VERSION = 1

DEFINITIONS = {
    "round": "one verification pass of one row; finished rows and the token that prefill yields "
             "count none",
    "tau": "tokens emitted / rounds, the bonus or correction token included, pooled over prompts",
    "tau_mean": "the mean over prompts of each prompt's own tau",
    "acceptance_rate": "drafts accepted / drafts proposed, the bonus token in neither",
    "survival": "share of rounds that accepted at least k drafts",
    "conditional": "share of the rounds with at least k - 1 accepted drafts that accepted the k-th",
    "cut_rounds": "rounds ended inside the block by EOS, a stop or the token budget; they count "
                  "what they emitted, and positions after the cut leave the denominators",
    "interval": "95 %, percentile bootstrap over prompts (over measured pairs for speed-ups)",
    "eos_cut_share": "rounds ended inside the block by EOS / rounds",
    "looped_token_share": "share of tokens inside an 8-gram that began 1 to 64 tokens earlier too",
    "tau_before_first_loop": "tau of the rounds that end before a prompt's first looped token",
    "speedup": "median over interleaved pairs, same prompts and dtype, of speculative / plain "
               "tokens per second; prefill and compilation left out, and so are answers of fewer "
               f"than {LEAST_TIMED} plain tokens",
    "speedup_pooled": "the same from the total tokens and seconds of each side, short answers too",
    "plain": "ordinary decoding; of the configurations that were timed the fastest one is named, "
             "and the headline is against it",
    "time_per_output_token_s": "median over prompts of decoding seconds / tokens, the prefill and "
                               "its token in neither",
    "prefill_s": "median over prompts of the seconds until the first token, at the padded width",
    "compile_s": "seconds of a first decode beyond a second one: tracing and compiling, or reading "
                 "from the compilation cache; in no rate",
    "compile_saved_s": "seconds of compiling that this cache saved, as it recorded them",
    "error": "the predicted speed-up of the timed prompts / their pooled measured one, less 1",
    "self": "the target drafts for itself; where every draft is certain only rounding between pass "
            "widths refuses one",
    "cache_tokens": "(memory - weights) / cache bytes of a token, of both models with the drafter",
    "whatif.measured": "costs timed on this machine, tau replayed on the evaluation prompts",
    "predicted_speedup": "tau / (draft_cost + verify_cost)",
    "draft_cost": "time of one proposal / time of one plain step of the target",
    "verify_cost": "time of one verification pass (K + 1 wide) / time of one plain step",
    "replay": "tau from teacher-forced logits on the decoded text: expected rounds when a token is "
              "an accepted draft with probability min(1, q/p) (under greedy: when it is drafted); "
              "for the rules ratio and greedy, block has no such estimate",
    "bias": "uniform_anchor - the measured tau, or - replay where that K did not decode",
    "over_fastest_plain": "tokens per second / those of the fastest plain configuration",
    "uniform_anchor": "1 + mean over all starts with K tokens behind them of sum_k prod (1 - TV): "
                      "biased, since rounds begin behind tokens that were hard to guess",
    "agrees": "the 95 % interval of measured - replayed tau of the same text holds 0",
    "verdict": "at T=0 replay and decoding are compared draft by draft: agrees where all are "
               "decided alike, rounding where only ties are not (margin of the drafter's logits "
               "within twice the measured difference between its passes, prompts on both sides), "
               "else disagrees; above T=0 by the interval, which one sound estimate in twenty "
               "misses",
    "speedup_timed": "the predicted speed-up from the tau of the timed prompts alone",
    "roofline": "a pass takes its bytes / bandwidth or its operations / peak, whichever is longer; "
                "no kernel, communication or host time",
    "cache_tokens_displaced": "parameter bytes of the drafter / cache bytes of a target token",
    "identical_same_shape": "share of outputs equal to those of the same compiled step with every "
                            "draft refused",
    "identical_width_1": "share of outputs equal to those of ordinary one-token decoding",
}

_TEXT, _BOOL, _LIST, _DICT = "a string", "true or false", "a list", "an object"
_MAYBE_TEXT, _MAYBE_DICT = "a string or null", "an object or null"
_MAYBE_BOOL = "true, false or null"
_NUMBER, _MAYBE, _INT = "a number", "a number or null", "a whole number of at least 0"
_SIZE, _MAYBE_SIZE = "a number of at least 0", "a number of at least 0, or null"
_RATE, _MAYBE_RATE = "a number above 0", "a number above 0, or null"
_SHARE, _TAU = "a share from 0 to 1, or null", "a number of at least 1, or null"
_PAIR, _SHARE_PAIR = "two numbers in order, or two nulls", "two shares in order, or two nulls"
_SHARES, _SHARE_PAIRS = "a list of shares or nulls", "a list of pairs of shares or nulls"
_SIZES, _RATES, _INTS = "numbers of at least 0", "numbers above 0", "whole numbers of at least 0"
_TEXTS = "a list of strings"

_ROUNDED = 1e-9  # by so much sums of floats may miss the end of a range
_whole = lambda v: isinstance(v, int) and not isinstance(v, bool)
_number = lambda v: _whole(v) or (isinstance(v, float) and math.isfinite(v))
_least = lambda low: lambda v: _number(v) and v >= low - _ROUNDED
_share = lambda v: _number(v) and -_ROUNDED <= v <= 1 + _ROUNDED
_above = lambda v: _number(v) and v > 0
_or_null = lambda test: lambda v: v is None or test(v)
_listed = lambda test: lambda v: isinstance(v, list) and all(map(test, v))
_text, _object = (lambda kind: lambda v: isinstance(v, kind))(str), lambda v: isinstance(v, dict)


def _pair(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
  return lambda v: isinstance(v, list) and len(v) == 2 and (
      v == [None, None] or (all(map(test, v)) and v[0] <= v[1] + _ROUNDED))


_TESTS: dict[str, Callable[[Any], bool]] = {
    _TEXT: _text, _BOOL: lambda v: isinstance(v, bool), _LIST: lambda v: isinstance(v, list),
    _DICT: _object, _MAYBE_TEXT: _or_null(_text), _MAYBE_DICT: _or_null(_object),
    _MAYBE_BOOL: lambda v: v is None or isinstance(v, bool), _NUMBER: _number,
    _MAYBE: _or_null(_number), _INT: lambda v: _whole(v) and v >= 0, _SIZE: _least(0),
    _MAYBE_SIZE: _or_null(_least(0)), _RATE: _above, _MAYBE_RATE: _or_null(_above),
    _SHARE: _or_null(_share), _TAU: _or_null(_least(1)), _PAIR: _pair(_number),
    _SHARE_PAIR: _pair(_share), _SHARES: _listed(_or_null(_share)),
    _SHARE_PAIRS: _listed(_pair(_share)), _SIZES: _listed(_least(0)), _RATES: _listed(_above),
    _INTS: _listed(lambda v: _whole(v) and v >= 0), _TEXTS: _listed(_text)}

_GROUP_KEYS = {
    "prompts": _INT, "rounds": _INT, "emitted": _INT, "cut_rounds": _INT,
    "eos_cut_rounds": _INT, "eos_cut_share": _SHARE, "tau": _TAU,
    "tau_ci": _PAIR, "tau_mean": _TAU, "tau_mean_ci": _PAIR, "acceptance_rate": _SHARE,
    "acceptance_rate_ci": _SHARE_PAIR, "survival": _SHARES, "survival_ci": _SHARE_PAIRS,
    "conditional": _SHARES, "looped_token_share": _SHARE, "tau_before_first_loop": _TAU,
    "tau_before_first_loop_ci": _PAIR,
}
_REPORT_KEYS = {
    "schema_version": _INT, "target": _TEXT, "drafter": _TEXT, "draft_len": _INT,
    "max_new_tokens": _INT, "settings": _LIST, "controls": _DICT, "speed": _LIST,
    "identity": _LIST, "looped_token_share": _SHARE, "tau_before_first_loop": _TAU,
    "training_estimate": _LIST, "warnings": _TEXTS, "headline": _MAYBE_DICT, "definitions": _DICT,
    "provenance": _DICT, "replay": _LIST, "costs": _LIST, "prediction": _LIST,
    "whatif": _MAYBE_DICT, "memory": _MAYBE_DICT, "plain": _LIST,
}
# The keys of "whatif" and "memory" stand with `section` and `memory` of train_drafter/whatif.py and
# `measured` of train_drafter/payoff.py.
_MODEL_KEYS = dict.fromkeys((
    "parameters", "parameter_bytes", "trained_parameters", "cache_bytes_per_token",
    "head_parameters", "head_bytes", "embedding_parameters", "attention_width", "experts",
    "experts_per_token", "expert_parameters"), _SIZE) | {
        "dtype": _TEXT, "kind": _TEXT, "depth_passes": _TEXT, "head_is_own": _BOOL}
# A row for each setting and K; "measured" and what follows are null where that K did not decode.
_REPLAY_KEYS = {
    "temperature": _SIZE, "rule": _TEXT, "draft_len": _INT, "prompts": _INT, "tau": _TAU,
    "tau_ci": _PAIR, "uniform_anchor": _TAU, "bias": _MAYBE, "survival": _SHARES,
    "measured": _TAU, "measured_ci": _PAIR, "difference": _MAYBE,
    "difference_ci": _PAIR, "agrees": _MAYBE_BOOL, "verdict": _MAYBE_TEXT,
    "decisions": _MAYBE_DICT,  # of `agreement.summary`
}
# A dtype: verify[W - 1] is v(W), draft[i] is c of K = draft_lens[i], both in plain steps; batches
# has the costs by sequences decoded together, in plain steps of as many, contexts those by tokens
# in the cache.
_COST_KEYS = {"dtype": _TEXT, "prompts": _TEXTS, "plain_step_s": _RATE, "verify": _RATES,
              "draft": _SIZES, "draft_lens": _INTS, "measured": _LIST, "batches": _LIST,
              "contexts": _LIST}
_STEP_KEYS = {"plain_step_s": _RATE, "draft_cost": _SIZE, "verify_cost": _RATE}
_TIMED_KEYS = {"draft_len": _INT, "speedup": _RATE, "speedup_ci": _PAIR, "speedup_pooled": _RATE}
# A dtype and K; "chosen" marks the largest predicted speed-up of a dtype.
_PREDICTION_KEYS = {
    "dtype": _TEXT, "temperature": _SIZE, "draft_len": _INT, "tau": _TAU, "tau_timed": _TAU,
    "draft_cost": _SIZE, "verify_cost": _RATE, "speedup": _MAYBE_RATE,
    "speedup_timed": _MAYBE_RATE, "measured": _MAYBE_RATE, "measured_ci": _PAIR,
    "measured_pooled": _MAYBE_RATE, "error": _MAYBE, "chosen": _BOOL,
}
_SETTING_KEYS = {"temperature": _SIZE, "rule": _TEXT, "all": _DICT, "categories": _DICT}
# Of a side of the timing, null where an earlier run did not keep them.
TIMES = ("time_per_output_token_s", "plain_time_per_output_token_s", "prefill_s",
         "plain_prefill_s", "compile_s", "plain_compile_s", "compile_saved_s",
         "plain_compile_saved_s")
_PLAIN_KEYS = {
    "dtype": _TEXT, "batch_size": _INT, "tokens_per_s": _RATE,
    "time_per_output_token_s": _MAYBE_RATE, "prefill_s": _MAYBE_RATE, "compile_s": _MAYBE,
    "compile_saved_s": _MAYBE_SIZE, "fastest": _BOOL, "over_fastest_plain": _RATE,
}
_SPEED_KEYS = {
    "dtype": _TEXT, "drafter": _TEXT, "temperature": _SIZE, "plain_tokens_per_s": _RATE,
    "speculative_tokens_per_s": _RATE, "speedup": _RATE, "speedup_ci": _PAIR,
    "draft_cost": _MAYBE_SIZE, "verify_cost": _MAYBE_RATE, "predicted_speedup": _MAYBE_RATE,
    "over_fastest_plain": _RATE, **dict.fromkeys(TIMES, _MAYBE),
}
_SPEED_ALSO = {"batch_size": _INT, "pairs": _INT, "speedup_pooled": _MAYBE_RATE, "tau": _TAU,
               "plain_step_s": _RATE, "samples": _DICT}
_SAMPLE_KEYS = {"prompts": _TEXTS, "tokens": _INTS, "decode_s": _RATES, "prefill_s": _SIZES,
                "plain_tokens": _INTS, "plain_decode_s": _RATES, "plain_prefill_s": _SIZES}
_HEADLINE_KEYS = {
    "drafter": _TEXT, "dtype": _TEXT, "temperature": _SIZE, "speculative_tokens_per_s": _RATE,
    "plain_dtype": _TEXT, "plain_tokens_per_s": _RATE, "speedup": _RATE, "speedup_ci": _PAIR,
    "speedup_pooled": _MAYBE_RATE,
}
_IDENTITY_KEYS = {"dtype": _TEXT, "drafter": _TEXT, "prompts": _INT,
                  "identical_same_shape": _SHARE, "identical_width_1": _SHARE}
_IDENTITY_ALSO = {"tolerance": _SIZE, "divergences": _LIST, "dead_drafter": _TEXTS}
_DIVERGENCE_KEYS = {"id": _TEXT, "equal_tokens": _INT, "margin": _MAYBE, "within_tolerance": _BOOL}


def _check_keys(value, keys: Mapping[str, str], where: str,
                also: Mapping[str, str] | None = None) -> None:
  """Every one of `keys`, and those of `also` that are there."""
  if not isinstance(value, dict):
    raise UserError(f"report: {where} must be an object, got {_short(value)}")
  for name, kind in (*keys.items(), *(also or {}).items()):
    path = f"{where}.{name}" if where else name
    if name in value:
      if not _TESTS[kind](value[name]):
        raise UserError(f"report: {path} must be {kind}, got {_short(value[name])}")
    elif name in keys:
      raise UserError(f"report: {path} is missing")


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 80 else text[:77] + "..."


def _check_rows(rows: Any, keys: Mapping[str, str], where: str,
                also: Mapping[str, str] | None = None) -> None:
  if not isinstance(rows, list | tuple):
    raise UserError(f"report: {where} must be a list, got {_short(rows)}")
  for i, row in enumerate(rows):
    _check_keys(row, keys, f"{where}[{i}]", also)


def _check_finite(value: Any, where: str) -> None:
  """No number that JSON cannot hold, wherever it stands."""
  if isinstance(value, float) and not math.isfinite(value):
    raise UserError(f"report: {where} is {value}, which JSON cannot hold")
  for key, inner in (value.items() if isinstance(value, dict) else
                     enumerate(value) if isinstance(value, list) else ()):
    name = f"[{key}]" if isinstance(value, list) else f".{key}"
    _check_finite(inner, f"{where}{name}".lstrip("."))


def validate_speed(rows: Sequence[dict]) -> None:
  """Checks the speed rows alone; raises as `validate_report` does."""
  _check_rows(rows, _SPEED_KEYS, "speed", _SPEED_ALSO)
  for i, row in enumerate(rows):
    if "samples" in row:
      where = f"speed[{i}].samples"
      _check_keys(row["samples"], _SAMPLE_KEYS, where)
      sizes = {name: len(row["samples"][name]) for name in _SAMPLE_KEYS}
      if len(set(sizes.values())) > 1:
        raise UserError(f"report: {where} must have one entry a prompt everywhere, got {sizes}")


def _check_measured(costs: Any, memory: Any, identity: Any) -> None:
  """What a report has as it was measured."""
  _check_rows(costs, {k: v for k, v in _COST_KEYS.items() if k not in ("batches", "contexts")},
              "costs", {"batches": _LIST, "contexts": _LIST})
  for i, cost in enumerate(costs):
    most = max(cost["draft_lens"], default=0)
    if len(cost["draft"]) != len(cost["draft_lens"]) or len(cost["verify"]) <= most:
      raise UserError(f"report: costs[{i}] must have a draft for each of draft_lens "
                      f"{cost['draft_lens']} and verify up to K + 1 = {most + 1}, got "
                      f"{len(cost['draft'])} and {len(cost['verify'])}")
    _check_rows(cost["measured"], _TIMED_KEYS, f"costs[{i}].measured")
    for name, axis in (("batches", "batch"), ("contexts", "context")):
      _check_rows(cost.get(name, []), {axis: _INT, **_STEP_KEYS}, f"costs[{i}].{name}",
                  {"draft_len": _INT})
  if memory is not None:
    _check_keys(memory, {}, "memory", {
        "target": _DICT, "drafter": _DICT, "features_per_token": _INT,
        "features_bytes_per_token": _SIZE, "cache_tokens_displaced": _SIZE,
        "peak_device_bytes": _MAYBE_SIZE})
    for name in ("target", "drafter"):
      _check_keys(memory.get(name, {}), {}, f"memory.{name}", _MODEL_KEYS)
  _check_rows(identity, _IDENTITY_KEYS, "identity", _IDENTITY_ALSO)
  for i, row in enumerate(identity):
    _check_rows(row.get("divergences", []), _DIVERGENCE_KEYS, f"identity[{i}].divergences")
    if row.get("divergences") and "tolerance" not in row:
      raise UserError(f"report: identity[{i}].tolerance is missing")


_RAW_KEYS = {
    "target": _TEXT, "drafter": _TEXT, "draft_len": _INT, "max_new_tokens": _INT, "seed": _INT,
    "provenance": _MAYBE_DICT}
_ESTIMATE_KEYS = {"temperature": _SIZE, "rule": _TEXT, "tau": _MAYBE, "acceptance_rate": _MAYBE,
                  "first_position": _MAYBE}
_MADE = {"temperature", "predicted_speedup", "over_fastest_plain", *TIMES}  # of a raw speed row


def validate_material(
    *, speed: Any = (), identity: Any = (), training_estimate: Any = (), replay: Any = (),
    costs: Any = (), memory: Any = None, provenance: Any = None, seed: Any = 0,
    **single: Any) -> None:
  """Checks what was measured, before figures are made of it; nothing is taken for granted.

  Args:
    speed: rows without what the report adds.
    identity: rows of the report.
    training_estimate: a list.
    replay: parts of `forecast.replay_part`.
    costs: of `forecast.cost_part`, with "dtype" and "prompts".
    memory: of `whatif.memory`.
    provenance: any JSON.
    seed: of every bootstrap.
    **single: target, drafter, draft_len and max_new_tokens.

  Raises:
    UserError: names the first key that is missing or holds something else.
  """
  _check_keys({**single, "seed": seed, "provenance": provenance}, _RAW_KEYS, "")
  _check_rows(speed, {k: v for k, v in _SPEED_KEYS.items() if k not in _MADE}, "speed", {
      **_SPEED_ALSO, "temperature": _SIZE, **dict.fromkeys(TIMES, _MAYBE)})
  _check_rows(training_estimate, {}, "training_estimate", _ESTIMATE_KEYS)
  trained = (provenance or {}).get("training", {})
  _check_keys(trained, {}, "provenance.training", {"steps": _INT, "planned_steps": _INT})
  _check_rows(replay, {"temperature": _SIZE, "rule": _TEXT, "decoded": _INT, "lengths": _INTS,
                       "rows": _LIST, "survival": _LIST}, "replay", {"tolerance": _SIZE})
  for i, part in enumerate(replay):
    count = len(part["lengths"])
    _check_rows(part["rows"], {
        "tokens": _INT, "rounds": _SIZES, "uniform": _SIZES, "starts": _INTS, "id": _TEXT,
        "measured": _INT}, f"replay[{i}].rows", {"decisions": _INT, "lost": _LIST, "won": _LIST})
    for k, row in enumerate(part["rows"]):
      for name in ("rounds", "uniform", "starts"):
        if len(row[name]) != count:
          raise UserError(f"report: replay[{i}].rows[{k}].{name} must have an entry for each of "
                          f"lengths {part['lengths']}, got {_short(row[name])}")
    if len(part["survival"]) != count:
      raise UserError(f"report: replay[{i}].survival must have an entry for each of lengths "
                      f"{part['lengths']}, got {len(part['survival'])}")
  _check_measured(costs, memory, identity)


def validate_report(report: dict) -> None:
  """Checks keys, types and ranges.

  Raises:
    UserError: names the first key that is missing or holds something else, and the value.
  """
  _check_keys(report, _REPORT_KEYS, "")
  if report["schema_version"] != SCHEMA_VERSION:
    raise UserError(f"report: schema_version must be {SCHEMA_VERSION}, "
                    f"got {report['schema_version']}")
  if report["headline"] is not None:
    _check_keys(report["headline"], _HEADLINE_KEYS, "headline")
  lists = {"settings": report["settings"]}
  for name, control in report["controls"].items():
    _check_keys(control, {"settings": _LIST}, f"controls.{name}")
    lists[f"controls.{name}.settings"] = control["settings"]
  for where, entries in lists.items():
    _check_rows(entries, _SETTING_KEYS, where)
    for i, entry in enumerate(entries):
      groups = {"all": entry["all"]}
      groups.update({f"categories.{name}": g for name, g in entry["categories"].items()})
      for name, group in groups.items():
        _check_keys(group, _GROUP_KEYS, f"{where}[{i}].{name}")
        for key in ("survival", "survival_ci", "conditional"):
          if len(group[key]) != report["draft_len"]:
            raise UserError(f"report: {where}[{i}].{name}.{key} must have draft_len = "
                            f"{report['draft_len']} entries, got {len(group[key])}")
  validate_speed(report["speed"])
  for name, keys in (("replay", _REPLAY_KEYS), ("costs", _COST_KEYS),
                     ("prediction", _PREDICTION_KEYS), ("plain", _PLAIN_KEYS)):
    _check_rows(report[name], keys, name)
  _check_measured(report["costs"], report["memory"], report["identity"])
  _check_finite(report, "")
