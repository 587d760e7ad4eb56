"""Figures of speed from the raw seconds of every timed prompt.

`evaluate.py` times plain and speculative decoding in turn and keeps each prompt's seconds in the
rows that `speed_row` makes; `report.py` makes `plain_section` and the headline from those. All of
it is arithmetic on plain lists, so that a report is remade from what was measured.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spec_jax import records as metrics

LEAST_TIMED = 8  # rounds' worth of tokens below which a decode is too short to time
SIDES = ("", "plain_")  # in front of the name of a figure: speculative, plain

Clock = Mapping[str, Sequence[float]]  # "tokens", "decode_s" and "prefill_s" of every prompt


def too_short(plain: Clock) -> bool:
  """Whether no answer is long enough to time."""
  return not any(n >= LEAST_TIMED for n in plain["tokens"])


def speed_row(
    prompts: Sequence[str], ours: Clock, theirs: Clock, seed: int = 0) -> dict[str, Any]:
  """Rates, their paired ratio and the times apart of one drafter against plain decoding.

  Args:
    prompts: their ids.
    ours: of speculative decoding; the token of the prefill is none of "tokens".
    theirs: of plain decoding, taken in turn with it.
    seed: of the bootstrap.

  Returns:
    Medians over the prompts whose plain answer has LEAST_TIMED tokens at least: tokens per second,
    "speedup" with interval, time per output token and prefill of both sides; "speedup_pooled" of
    all prompts' tokens and seconds; "samples": the raw values.
  """
  enough = [k for k, n in enumerate(theirs["tokens"]) if n >= LEAST_TIMED]
  of = lambda side, name: np.array([side[name][k] for k in enough], np.float64)
  rates = [of(side, "tokens") / of(side, "decode_s") for side in (ours, theirs)]
  pair = metrics.paired_ratio(*rates, seed=seed)
  row = {
      "plain_tokens_per_s": pair["b_median"], "speculative_tokens_per_s": pair["a_median"],
      "speedup": pair["ratio"], "speedup_ci": pair["ratio_ci"], "pairs": pair["pairs"],
      "speedup_pooled": pooled_rate(ours) / pooled_rate(theirs)}
  samples: dict[str, list] = {"prompts": list(prompts)}
  for prefix, side, rate in zip(SIDES, (ours, theirs), rates, strict=True):
    row[f"{prefix}time_per_output_token_s"] = float(np.median(1.0 / rate))
    row[f"{prefix}prefill_s"] = float(np.median(of(side, "prefill_s")))
    samples |= {prefix + name: list(side[name]) for name in ("tokens", "decode_s", "prefill_s")}
  return row | {"samples": samples}


def pooled_rate(side: Clock) -> float:
  """Tokens per second over all prompts: long answers weigh more than in a median of rates."""
  return float(sum(side["tokens"]) / sum(side["decode_s"]))


def plain_section(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Every plain configuration that was timed, with its rate as a share of the fastest one's.

  Args:
    rows: of the report's speed section, at any temperature; the coldest counts.

  Returns:
    Rows of dtype and batch size, the fastest first.
  """
  coldest = min((row["temperature"] for row in rows), default=0.0)
  found: dict[tuple, dict] = {}
  for row in sorted(rows, key=lambda row: -row["plain_tokens_per_s"]):
    if row["temperature"] == coldest:
      found.setdefault((row["dtype"], row.get("batch_size") or 1), {
          "dtype": row["dtype"], "batch_size": row.get("batch_size") or 1,
          "tokens_per_s": row["plain_tokens_per_s"],
          "time_per_output_token_s": row.get("plain_time_per_output_token_s"),
          "prefill_s": row.get("plain_prefill_s"), "compile_s": row.get("plain_compile_s"),
          "compile_saved_s": row.get("plain_compile_saved_s")})
  out = list(found.values())
  for row in out:
    row["over_fastest_plain"] = row["tokens_per_s"] / out[0]["tokens_per_s"]
    row["fastest"] = row is out[0]
  return out


def across(best: Mapping[str, Any], plain: Mapping[str, Any], seed: int = 0) -> dict | None:
  """The ratio of speculative decoding in one dtype to plain decoding in another, prompt by prompt.

  The two were not timed in turn, so drift of the machine between them is in it.

  Returns:
    The fields of `spec_jax.records.paired_ratio`; None where the prompts are not the same.
  """
  ours, theirs = (row.get("samples") or {} for row in (best, plain))
  if not ours or ours.get("prompts") != theirs.get("prompts"):
    return None
  kept = [k for k, (a, b) in enumerate(zip(
      ours["plain_tokens"], theirs["plain_tokens"], strict=True)) if min(a, b) >= LEAST_TIMED]
  if not kept:
    return None
  rate = lambda row, prefix: [row[f"{prefix}tokens"][k] / row[f"{prefix}decode_s"][k] for k in kept]
  return metrics.paired_ratio(rate(ours, ""), rate(theirs, "plain_"), seed=seed)


class Stopwatch:
  """Sets `spent[name]` to the seconds of a block."""

  def __init__(self, spent: dict[str, float], name: str):
    self.spent, self.name = spent, name

  def __enter__(self):
    self.began = time.monotonic()

  def __exit__(self, *error):
    self.spent[self.name] = time.monotonic() - self.began
