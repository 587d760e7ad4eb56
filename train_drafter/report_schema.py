"""What report.json holds: its version, the definition of every figure, and the check on writing.

Used by `train_drafter.report`. Add a key here first; raise `SCHEMA_VERSION` when a key's meaning
changes or a key goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spec_jax.errors import UserError

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
               "tokens per second; prefill and compilation left out",
    "speedup_pooled": "the same from the total tokens and seconds of each side",
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
    "uniform_anchor": "1 + mean over all starts of sum_k prod (1 - TV): biased, since rounds begin "
                      "behind tokens that were hard to guess",
    "agrees": "the 95 % interval of measured - replayed tau of the same text holds 0",
    "speedup_timed": "the predicted speed-up from the tau of the timed prompts alone",
    "roofline": "a pass takes its bytes / bandwidth or its operations / peak, whichever is longer; "
                "no kernel, communication or host time",
    "cache_tokens_displaced": "parameter bytes of the drafter / cache bytes of a target token",
    "identical_same_shape": "share of outputs equal to those of the same compiled step with every "
                            "draft refused",
    "identical_width_1": "share of outputs equal to those of ordinary one-token decoding",
}

_NUMBER, _MAYBE, _INT, _TEXT = "a number", "a number or null", "an integer", "a string"
_LIST, _DICT, _PAIR = "a list", "an object", "a pair of numbers or nulls"
_MAYBE_DICT, _BOOL, _MAYBE_BOOL = "an object or null", "true or false", "true, false or null"
_GROUP_KEYS = {
    "prompts": _INT, "rounds": _INT, "emitted": _INT, "cut_rounds": _INT,
    "eos_cut_rounds": _INT, "eos_cut_share": _MAYBE, "tau": _MAYBE,
    "tau_ci": _PAIR, "tau_mean": _MAYBE, "tau_mean_ci": _PAIR, "acceptance_rate": _MAYBE,
    "acceptance_rate_ci": _PAIR, "survival": _LIST, "survival_ci": _LIST, "conditional": _LIST,
    "looped_token_share": _MAYBE, "tau_before_first_loop": _MAYBE,
    "tau_before_first_loop_ci": _PAIR,
}
_REPORT_KEYS = {
    "schema_version": _INT, "target": _TEXT, "drafter": _TEXT, "draft_len": _INT,
    "max_new_tokens": _INT, "settings": _LIST, "controls": _DICT, "speed": _LIST,
    "identity": _LIST, "looped_token_share": _MAYBE, "tau_before_first_loop": _MAYBE,
    "training_estimate": _LIST, "warnings": _LIST, "headline": _MAYBE_DICT, "definitions": _DICT,
    "provenance": _DICT, "replay": _LIST, "costs": _LIST, "prediction": _LIST,
    "whatif": _MAYBE_DICT, "memory": _MAYBE_DICT, "plain": _LIST,
}
# The keys of "whatif" and "memory" stand with `section` and `memory` of train_drafter/whatif.py and
# `measured` of train_drafter/payoff.py.
# A row for each setting and K; "measured" and what follows are null where that K did not decode.
_REPLAY_KEYS = {
    "temperature": _NUMBER, "rule": _TEXT, "draft_len": _INT, "prompts": _INT, "tau": _MAYBE,
    "tau_ci": _PAIR, "uniform_anchor": _MAYBE, "bias": _MAYBE, "survival": _LIST,
    "measured": _MAYBE, "measured_ci": _PAIR, "difference": _MAYBE,
    "difference_ci": _PAIR, "agrees": _MAYBE_BOOL,
}
# A dtype: verify[W - 1] is v(W), draft[i] is c of K = draft_lens[i], both in plain steps; batches
# has the costs by sequences decoded together, in plain steps of as many, contexts those by tokens
# in the cache.
_COST_KEYS = {"dtype": _TEXT, "prompts": _LIST, "plain_step_s": _NUMBER, "verify": _LIST,
              "draft": _LIST, "draft_lens": _LIST, "measured": _LIST, "batches": _LIST,
              "contexts": _LIST}
# A dtype and K; "chosen" marks the largest predicted speed-up of a dtype.
_PREDICTION_KEYS = {
    "dtype": _TEXT, "temperature": _NUMBER, "draft_len": _INT, "tau": _MAYBE, "tau_timed": _MAYBE,
    "draft_cost": _NUMBER, "verify_cost": _NUMBER, "speedup": _MAYBE, "speedup_timed": _MAYBE,
    "measured": _MAYBE, "measured_ci": _PAIR, "measured_pooled": _MAYBE, "error": _MAYBE,
    "chosen": _BOOL,
}
_SETTING_KEYS = {"temperature": _NUMBER, "rule": _TEXT, "all": _DICT, "categories": _DICT}
# Of a side of the timing, null where an earlier run did not keep them.
TIMES = ("time_per_output_token_s", "plain_time_per_output_token_s", "prefill_s",
         "plain_prefill_s", "compile_s", "plain_compile_s", "compile_saved_s",
         "plain_compile_saved_s")
_PLAIN_KEYS = {
    "dtype": _TEXT, "batch_size": _INT, "tokens_per_s": _NUMBER, "time_per_output_token_s": _MAYBE,
    "prefill_s": _MAYBE, "compile_s": _MAYBE, "compile_saved_s": _MAYBE, "fastest": _BOOL,
    "over_fastest_plain": _NUMBER,
}
_SPEED_KEYS = {
    "dtype": _TEXT, "drafter": _TEXT, "temperature": _NUMBER, "plain_tokens_per_s": _NUMBER,
    "speculative_tokens_per_s": _NUMBER, "speedup": _NUMBER, "speedup_ci": _PAIR,
    "draft_cost": _MAYBE, "verify_cost": _MAYBE, "predicted_speedup": _MAYBE,
    "over_fastest_plain": _NUMBER, **dict.fromkeys(TIMES, _MAYBE),
}
_HEADLINE_KEYS = {
    "drafter": _TEXT, "dtype": _TEXT, "temperature": _NUMBER, "speculative_tokens_per_s": _NUMBER,
    "plain_dtype": _TEXT, "plain_tokens_per_s": _NUMBER, "speedup": _NUMBER, "speedup_ci": _PAIR,
}
_IDENTITY_KEYS = {"dtype": _TEXT, "drafter": _TEXT, "prompts": _INT,
                  "identical_same_shape": _MAYBE, "identical_width_1": _MAYBE}


def _is(value, kind: str) -> bool:
  number = isinstance(value, int | float) and not isinstance(value, bool)
  if kind == _PAIR:
    return isinstance(value, list) and len(value) == 2 and all(_is(v, _MAYBE) for v in value)
  return {_NUMBER: number, _MAYBE: number or value is None, _TEXT: isinstance(value, str),
          _INT: number and isinstance(value, int), _LIST: isinstance(value, list),
          _DICT: isinstance(value, dict), _BOOL: isinstance(value, bool),
          _MAYBE_BOOL: value is None or isinstance(value, bool),
          _MAYBE_DICT: value is None or isinstance(value, dict)}[kind]


def _check_keys(value, keys: Mapping[str, str], where: str) -> None:
  if not isinstance(value, dict):
    raise UserError(f"report: {where} must be an object")
  for name, kind in keys.items():
    path = f"{where}.{name}" if where else name
    if name not in value:
      raise UserError(f"report: {path} is missing")
    if not _is(value[name], kind):
      raise UserError(f"report: {path} must be {kind}, got {value[name]!r}")


def validate_speed(rows: Sequence[dict]) -> None:
  """Checks the speed rows alone; raises as `validate_report` does."""
  for i, row in enumerate(rows):
    _check_keys(row, _SPEED_KEYS, f"speed[{i}]")


def validate_report(report: dict) -> None:
  """Checks keys and types.

  Raises:
    UserError: names the first key that is missing or holds something else.
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
    for i, entry in enumerate(entries):
      _check_keys(entry, _SETTING_KEYS, f"{where}[{i}]")
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
    for i, row in enumerate(report[name]):
      _check_keys(row, keys, f"{name}[{i}]")
  for i, row in enumerate(report["identity"]):
    _check_keys(row, _IDENTITY_KEYS, f"identity[{i}]")
