"""Tables and sentences of the report beyond acceptance: times, replay, prediction, memory, controls
and where speculation pays.

Made once and shown three times: `report_text` prints them and writes report.md, `report_html` sets
them into the page. Everything is read from the report's own dict; a section that it lacks has no
rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from train_drafter import agreement, payoff
from train_drafter.report_cells import (
  NONE,
  Table,
  number,
  percent,
  scaled,
  setting_label,
  tau_text,
  with_interval,
)

CONTROLS = {
    "untrained": "the drafter before training: the floor",
    "ngram": "no model: copies what followed the last words' earlier occurrence",
    "lookup": "the trained drafter, ngram where it finds a longer match",
    "self": "the target drafts for itself: the ceiling, where only rounding refuses a draft",
}
CLOSE = 0.1  # of a prediction to what was measured
_LOUD = ("DISAGREES", "OFF")  # how a sentence begins that must not be overlooked


def is_loud(line: str) -> bool:
  """Whether a sentence says that something is not as it should be."""
  return line.startswith(_LOUD)


def tables(report: Mapping[str, Any]) -> list[Table]:
  """What every form of the report shows."""
  return [times_table(report), replay_table(report), prediction_table(report),
          memory_table(report), *measured_tables(report)]


def computed_tables(report: Mapping[str, Any]) -> list[Table]:
  """The roofline and the experts: of other machines, so the terminal goes without."""
  found = report.get("whatif") or {}
  return [t for t in (chips_table(found), dense_table(found), experts_table(found)) if t.rows]


def lines(report: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
  """Headings and sentences, some of them empty."""
  measured = (report.get("whatif") or {}).get("measured") or {}
  return [("The plain side", plain_lines(report)),
          ("Replay against decoding", agreement_lines(report)),
          ("Prediction against measurement", prediction_lines(report)),
          ("What the drafter takes away", memory_lines(report)),
          ("Controls", control_lines(report)), ("Where speculation pays", payoff.lines(measured))]


def ranked(settings: Sequence[Mapping[str, Any]]) -> list[str]:
  """The categories of several settings, those of the largest tau at the first setting first."""
  taus: dict[str, float] = {}
  for entry in settings:
    for name, group in entry["categories"].items():
      taus.setdefault(name, group["tau"] or 0.0)
  return sorted(taus, key=lambda name: -taus[name])


# Speed.


def _ms(seconds: float | None) -> str:
  return NONE if seconds is None else f"{1000 * seconds:.1f}"


def times_table(report: Mapping[str, Any]) -> Table:
  """Time per token, prefill and compilation of every configuration, plain and speculative."""
  rows = []
  plain = {row["dtype"]: row for row in report.get("plain") or ()}

  def cells(row, rate, over):
    return [number(rate, 1), number(over), _ms(row.get("time_per_output_token_s")),
            _ms(row.get("prefill_s")), number(row.get("compile_s"), 1),
            number(row.get("compile_saved_s"), 1)]

  for dtype, own in plain.items():
    rows.append([dtype, "plain" + " (fastest)" * own["fastest"], "",
                 *cells(own, own["tokens_per_s"], own["over_fastest_plain"])])
    rows += [["", row["drafter"], f"{row['temperature']:g}",
              *cells(row, row["speculative_tokens_per_s"], row["over_fastest_plain"])]
             for row in report["speed"] if row["dtype"] == dtype]
  known = any(cell != NONE for row in rows for cell in row[5:])
  return Table(
      "Times", ["dtype", "decoding", "T", "tokens/s", "/ fastest\nplain", "ms per\ntoken",
                "prefill\nms", "compile\ns", "saved\ns"], rows if known else [],
      "prefill and compilation are in no rate; compile: of a first decode beyond a second "
      "one; saved: what the compilation cache spared it", text_columns=2)


def plain_lines(report: Mapping[str, Any]) -> list[str]:
  """Which plain configuration is the fastest, and which others there were."""
  rows = report.get("plain") or ()
  if not rows:
    return []
  backend = (report["provenance"].get("machine") or {}).get("backend")
  where = f" on this backend ({backend})" if backend else ""
  name = lambda row: (f"{row['dtype']}, batch {row['batch_size']}, "
                      f"{row['tokens_per_s']:.1f} tokens/s")
  text = f"the fastest plain configuration{where}: {name(rows[0])}"
  if len(rows) > 1:
    text += "; slower: " + "; ".join(map(name, rows[1:]))
  else:
    text += " (the only one that was timed)"
  return [text]


# Replay and prediction.


def replay_table(report: Mapping[str, Any]) -> Table:
  """Replayed tau beside the uniform-anchor estimate and what decoding gave."""
  rows = [[
      f"{r['temperature']:g}", r["rule"], str(r["draft_len"]),
      with_interval(r["tau"], r["tau_ci"]), number(r["measured"]),
      {"agrees": "yes", "rounding": "rounding", "disagrees": "NO"}.get(r["verdict"], NONE),
      _signed(r["difference"], 3),
      number(r["uniform_anchor"]), _signed(r["bias"])] for r in report.get("replay") or ()]
  return Table(
      "Replay estimate of τ", ["T", "rule", "K", "replay τ\n(95 %)", "decoded\nτ", "agrees",
                               "decoded -\nreplay", "uniform\nanchors", "their\nbias"], rows,
      "from one teacher-forced reading of the answers; bias: uniform anchors against decoding, or "
      "against replay where that K did not decode", text_columns=2)


def _signed(value: float | None, digits: int = 2) -> str:
  return NONE if value is None else f"{value:+.{digits}f}"


def agreement_lines(report: Mapping[str, Any]) -> list[str]:
  """Whether the replay estimate and real decoding agree, setting by setting."""
  out = []
  for r in report.get("replay") or ():
    if r["measured"] is None:
      continue
    where = f"at T={r['temperature']:g}, {r['rule']}, K={r['draft_len']}"
    text = f"{where}: replay {r['tau']:.3f}, decoding {r['measured']:.3f}"
    low, high = r["difference_ci"]
    if low is not None:
      text += f", difference {r['difference']:+.3f} (95 % {low:+.3f} to {high:+.3f})"
    word = {"agrees": "agrees", "rounding": "agrees but for rounding", "disagrees": "DISAGREES"}
    out.append(f"{word.get(r['verdict'], 'cannot be judged')} {text}"
               + agreement.reason(r["decisions"]))
  rules = {entry["rule"] for entry in report["settings"]} - {"greedy", "ratio"}
  if out:
    out += [f"the rule {rule} has no replay estimate" for rule in sorted(rules)]
  return out


def prediction_table(report: Mapping[str, Any]) -> Table:
  """S(K) from costs and replayed tau, beside the measured one."""
  rows = [[
      r["dtype"], str(r["draft_len"]), number(r["speedup"]),
      with_interval(r["measured"], r["measured_ci"]), _best(r), number(r["tau"]),
      number(r["draft_cost"]), number(r["verify_cost"]), number(r["speedup_timed"]),
      number(r["measured_pooled"]),
      NONE if r["error"] is None else f"{100 * r['error']:+.0f}"]
          for r in report.get("prediction") or ()]
  return Table(
      "Predicted speed-up S = τ / (c + v)", [
          "dtype", "K", "S", "measured S\n(95 %)", "best", "τ", "c", "v(K+1)", "S,\ntimed",
          "pooled\nS", "error\n%"], rows,
      "measured S: median over prompts; S, timed: predicted for the timed prompts, to be "
      "held against the pooled S of the same prompts (error); plain: no K pays")


def _best(row: Mapping[str, Any]) -> str:
  """Marks the K to choose, or that even it is slower than plain decoding."""
  if not row["chosen"] or row["speedup"] is None:
    return ""
  return "yes" if row["speedup"] > 1 else "plain"


def prediction_lines(report: Mapping[str, Any]) -> list[str]:
  """The K to choose for each dtype, and whether predictions came true."""
  out = []
  rows = report.get("prediction") or ()
  for dtype in dict.fromkeys(row["dtype"] for row in rows):
    own = [row for row in rows if row["dtype"] == dtype]
    for best in (row for row in own if row["chosen"] and row["speedup"] is not None):
      said = (f"choose K = {best['draft_len']} (S {best['speedup']:.2f})" if best["speedup"] > 1
              else f"no K pays: plain decoding is faster (S {best['speedup']:.2f} at best, "
                   f"K = {best['draft_len']})")
      out.append(f"{dtype}: {said}")
    checked = [(row["draft_len"], row["error"]) for row in own if row["error"] is not None]
    near = [K for K, error in checked if abs(error) <= CLOSE]
    if near:
      out.append(f"{dtype}: predicted within {100 * CLOSE:.0f} % of the measured speed-up at K = "
                 + ", ".join(map(str, near)))
    out += [f"OFF in {dtype} at K={K}: predicted {100 * error:+.0f} % from the measured speed-up"
            for K, error in checked if abs(error) > CLOSE]
  return out


# Memory.


def memory_table(report: Mapping[str, Any]) -> Table:
  """Parameters and cache of both models."""
  rows = []
  for name in ("target", "drafter"):
    own = (report.get("memory") or {}).get(name)
    if own:
      rows.append([name, own.get("dtype") or own.get("kind") or NONE,
                   _scaled(own.get("parameters")), _scaled(own.get("trained_parameters")),
                   _scaled(own.get("parameter_bytes"), True),
                   _scaled(own.get("cache_bytes_per_token"), True)])
  return Table("Memory", ["model", "kind", "parameters", "trained", "weights", "cache of\na token"],
               rows, text_columns=2)


def _scaled(value: float | None, is_bytes: bool = False) -> str:
  return NONE if value is None else scaled(value, is_bytes)


def memory_lines(report: Mapping[str, Any]) -> list[str]:
  """What the drafter takes away from the cache, and the peak."""
  facts = report.get("memory") or {}
  target, drafter = facts.get("target") or {}, facts.get("drafter") or {}
  if "cache_bytes_per_token" not in target or "cache_bytes_per_token" not in drafter:
    return []
  own, plain = (scaled(side["cache_bytes_per_token"], True) for side in (drafter, target))
  out = [f"the drafter's weights take the room of {facts['cache_tokens_displaced']:.0f} tokens of "
         f"the target's cache, and its own cache adds {own} to the {plain} of every token"]
  if facts.get("features_bytes_per_token"):
    count = facts.get("features_per_token")
    numbers = f"{count} numbers, " if count else ""
    size = scaled(facts["features_bytes_per_token"], True)
    out.append(f"features that the drafter reads: {numbers}{size} of each token of a pass")
  else:
    out.append("the drafter reads no features of the target")
  peak = facts.get("peak_device_bytes")
  out.append("peak device memory: this backend does not tell" if peak is None else
             f"peak device memory: {scaled(peak, True)}")
  return out


# Controls.


def control_lines(report: Mapping[str, Any]) -> list[str]:
  """What each control is, and its tau."""
  out = []
  for name, control in report["controls"].items():
    taus = ", ".join(
        f"{setting_label(e, report['settings'])} τ {tau_text(e['all'])} ("
        + (f"{percent(e['all']['acceptance_rate'], 1)} % accepted, " if name == "self" else "")
        + f"{e['all']['prompts']} prompts)" for e in control["settings"])
    what = CONTROLS.get(name.split(":")[0].split("_")[0])
    out.append(f"{name}{f' ({what})' if what else ''}: {taus}")
  return out


# Where speculation pays.


def measured_tables(report: Mapping[str, Any]) -> list[Table]:
  """Speed-ups by batch and by context from costs measured on this machine."""
  found = (report.get("whatif") or {}).get("measured") or {}
  heads = {"batches": ("By sequences decoded together", "batch"),
           "contexts": ("By tokens of context, one sequence", "context")}
  out = []
  for name, (what, axis) in heads.items():
    rows = [[r["dtype"], str(r[axis]), str(r["draft_len"]), number(r["speedup"]), _best(r),
             number(r["tokens_per_s"], 1), number(r["plain_tokens_per_s"], 1),
             number(r["draft_cost"]), number(r["verify_cost"]), _ms(r["plain_step_s"])]
            for r in found.get(name, ())]
    out.append(Table(
        what, ["dtype", axis, "K", "S", "best", "spec.\ntok/s", "plain\ntok/s", "c", "v(K+1)",
               "plain step\nms"], rows,
        "costs measured here, in plain steps of the same batch and context; τ of the "
        "evaluation prompts; plain: no K pays"))
  return out


def chips_table(found: Mapping[str, Any]) -> Table:
  """This target on named accelerators, one sequence at the shortest context."""
  rows = []
  for chip in found.get("accelerators") or ():
    first = next(iter(chip["rows"]), {})
    rows.append([
        chip["name"], number(chip["plain_tokens_per_s"], 1),
        number(first.get("plain_tokens_per_s"), 1), number(first.get("tokens_per_s"), 1),
        number(first.get("speedup")), str(first.get("draft_len") or NONE),
        _count(chip.get("cache_tokens")), _count(chip.get("cache_tokens_with_drafter")),
        scaled(chip["bandwidth"]) + "B/s", scaled(chip["peak_flops"]) + "FLOP/s",
        scaled(chip["memory"]) + "B"])
  context = next((chip["rows"][0]["context"] for chip in found.get("accelerators") or ()
                  if chip["rows"]), 0)
  return Table(
      "Roofline: this target on named accelerators", [
          "accelerator", "plain\nceiling", f"at {context}\nplain", f"at {context}\nspec.", "S", "K",
          "cache\ntokens", "with\ndrafter", "bandwidth", "peak bf16", "memory"], rows,
      "tokens per second of one sequence; plain ceiling: bandwidth / bytes of weights; the other "
      f"columns behind {context} tokens of context")


def _count(value: float | None) -> str:
  return NONE if value is None else scaled(float(f"{value:.3g}"))


def dense_table(found: Mapping[str, Any]) -> Table:
  """What tau buys a large dense model."""
  dense = found.get("dense") or {"rows": [], "weight_bytes": 0, "drafter_share": 0}
  taus = [key for key in next(iter(dense["rows"]), {}) if key.startswith("tau_")]
  size = scaled(dense["weight_bytes"]) + "B"
  rows = [[r["name"], number(r["plain_tokens_per_s"], 1), str(r["draft_len"] or NONE),
           number(r["tau"]), number(r["tokens_per_s"], 1),
           *[number(r.get(key), 1) for key in taus], "yes" if r["fits"] else "no"]
          for r in dense["rows"]]
  return Table(
      f"A dense model of {size} of weights",
      ["accelerator", "plain\nceiling", "K", "τ here", "tokens/s\nwith it",
       *[f"with\nτ = {key.removeprefix('tau_')}" for key in taus], "fits"], rows,
      f"tokens per second of one sequence; plain ceiling: bandwidth / {size}; a drafter of "
      f"{100 * dense['drafter_share']:.1f} % of the weights, as here; with τ = n: K = n at least")


def experts_table(found: Mapping[str, Any]) -> Table:
  """Distinct experts that a pass touches, by its tokens."""
  mixtures = found.get("experts") or ()
  widths = list(next(iter(mixtures), {}).get("by_tokens", ()))
  rows = [[m["name"], str(m["experts"]), str(m["per_token"]),
           *[number(m["by_tokens"][T], 1) for T in widths]] for m in mixtures]
  return Table(
      "Experts of a layer that a pass touches, by its tokens",
      ["mixture", "N", "k", *[f"T = {T}" for T in widths]], rows,
      "N (1 - (1 - k/N)^T), independent routing: T is K + 1 times the sequences decoded together")
