"""Prediction against measurement: replayed tau and measured costs, and what they say of every K.

The evaluate stage measures parts, each a JSON file of its folder, with `replayed` and `costs`;
report.py turns them into the sections `replay`, `costs` and `prediction` without decoding.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec_jax import records as metrics
from spec_jax import replay as arithmetic
from spec_jax.drafters import Drafter
from spec_jax.target import Target
from train_drafter import agreement, replay, speed
from train_drafter.config import Config
from train_drafter.progress import Bar

_REPEATS = 7
_BATCH_REPEATS = 3
_LONGEST_S = 1.0  # of a pass behind which no larger batch or longer context is timed
_SHORT_LENS = (1, 3)  # K beside that of the report whose costs are measured in large batches

Setting = tuple[float, str]


def _more(cfg: Config) -> list[int]:
  """The other K that decode."""
  return list(dict.fromkeys(
      K for K in cfg.evaluate.more_draft_lens if K != cfg.evaluate.draft_len))


def _replay_path(folder: Path, setting: Setting, draft_len: int) -> Path:
  return folder / f"replay-T{setting[0]:g}-{setting[1]}-K{draft_len}.json"


def part_paths(cfg: Config, folder: Path, settings: Sequence[Setting]) -> dict[str, list[Path]]:
  """The parts that an evaluation leaves in `folder`, by argument of `report.build_report`."""
  return {
      "replay": [_replay_path(folder, setting, K) for setting in settings
                 if setting[1] in replay.RULES for K in (cfg.evaluate.draft_len, *_more(cfg))],
      "costs": [folder / f"costs-{kind}.json" for kind in dtypes(cfg)]}


def replayed(
    bench: Any, settings: Sequence[Setting], acceptance: Callable[..., list[dict]],
    kept: Callable[[Path, Callable], Any]) -> None:
  """Replay of the trained drafter at every setting that has such an estimate, over the answers of
  its own decoding; with `more_draft_lens` decoded once more and held against it.

  Args:
    bench: of evaluate.py.
    settings: (temperature, rule).
    acceptance: (bench, drafter, temperature, rule, K or 0 for that of the report) -> rows.
    kept: (path, measure) -> what lies there, measured if nothing does.
  """
  options, name = bench.cfg.evaluate, bench.cfg.drafter.kind
  drafter = bench.drafter(name)
  ids = {p["id"]: ids for p, ids in zip(bench.prompts, bench.ids, strict=True)}

  def measure(heat, rule, draft_len, tolerance):
    main = draft_len == options.draft_len
    rows = acceptance(bench, name, heat, rule, 0 if main else draft_len)
    lengths = replay.draft_lens(
        drafter, draft_len, options.longest_draft_len) if main else (draft_len,)
    with Bar(f"replay T={heat:g} K={draft_len}", total=len(rows)) as bar:
      return replay_part(
          bench.target, drafter, ids, rows, temperature=heat, rule=rule, draft_len=draft_len,
          lengths=lengths, tolerance=tolerance,
          advance=lambda answers, tokens: bar.advance(answers, amount=tokens))

  for heat, rule in settings:
    known = None  # the rounding is measured once, with the first K
    for K in (options.draft_len, *_more(bench.cfg)) if rule in replay.RULES else ():
      path = _replay_path(bench.workdir / "evaluate" / "parts", (heat, rule), K)
      known = kept(path, functools.partial(measure, heat, rule, K, known)).get("tolerance", known)


def dtypes(cfg: Config) -> list[str]:
  """Those that costs are measured in: of the ones that speed is measured in."""
  return [kind for kind in cfg.evaluate.speed_dtypes if kind in cfg.evaluate.cost_dtypes]


def costs(bench: Any, kept: Callable[[Path, Callable], Any]) -> dict[str, Any]:
  """Costs of every K in the dtype of `bench`, and speed-ups with `more_draft_lens`."""
  options, members, dtype = bench.cfg.evaluate, bench.timed(), bench.target.dtype

  def measure():
    drafter, more = bench.drafter(bench.cfg.drafter.kind), _more(bench.cfg)
    lens = sorted({
        *replay.draft_lens(drafter, options.draft_len, options.longest_draft_len), *more})
    decodes = len(members) * (len(more) + 1) if more else 0
    with Bar(f"costs {dtype}", total=decodes) as bar:
      part = cost_part(
          bench.target, drafter, [bench.ids[i] for i in members], lens, more,
          *((options.batch_sizes, options.contexts) if dtype == options.dtype else ((), ())),
          draft_len=options.draft_len, size=bench.width(members),
          max_new_tokens=options.max_new_tokens, seed=options.seed,
          advance=lambda tokens: bar.advance(1, amount=tokens))
    return {"dtype": dtype, "prompts": [bench.prompts[i]["id"] for i in members], **part}

  return kept(bench.workdir / "evaluate" / "parts" / f"costs-{dtype}.json", measure)


def replay_part(
    target: Target, drafter: Drafter, prompts: Mapping[str, Sequence[int]], rows: Sequence[dict], *,
    temperature: float, rule: str, draft_len: int, lengths: Sequence[int],
    advance: Callable[[int, int], Any], tolerance: float | None = None) -> dict[str, Any]:
  """Replay of the answers that decoding with one K gave.

  Args:
    target: in the dtype that decoded.
    drafter: the one that decoded.
    prompts: token ids by id of the prompt.
    rows: of the records of that decoding ("id", "tokens", "records").
    temperature: of the decoding.
    rule: "greedy" or "ratio".
    draft_len: K of the decoding.
    lengths: the K that are estimated.
    advance: as `replay.estimate` has it.
    tolerance: of `agreement`, measured here unless it is known.

  Returns:
    The result of `replay.estimate`, the setting, "decoded" (K), and in each row "id" and
    "measured": the rounds that the decoding took; under greedy also the "tolerance" of
    `agreement` that its decisions are judged by.
  """
  exact = rule == "greedy"
  asked = [prompts[r["id"]] for r in rows]
  found = replay.estimate(
      target, drafter, asked, [r["tokens"] for r in rows],
      temperature=temperature, lengths=lengths, advance=advance,
      decoded=(draft_len, [r["records"] for r in rows]) if exact else None)
  if exact:
    found["tolerance"] = tolerance if tolerance is not None else agreement.tolerance(
        target, drafter, asked, draft_len)
  for own, row in zip(found["rows"], rows, strict=True):
    own |= {"id": row["id"], "measured": row["records"].rounds}
  return {"temperature": temperature, "rule": rule, "decoded": draft_len, **found}


def cost_part(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], draft_lens: Sequence[int],
    timed: Sequence[int], batches: Sequence[int] = (), contexts: Sequence[int] = (), *,
    draft_len: int, size: int, max_new_tokens: int, seed: int, advance: Callable[[int], Any],
) -> dict[str, Any]:
  """Costs of every K, and speed-ups measured with some of them.

  Args:
    target: in the dtype that is timed.
    drafter: the trained one.
    prompts: token ids; the costs are those behind the first.
    draft_lens: K whose costs are measured.
    timed: K that decode every prompt, interleaved with plain decoding.
    batches: numbers of rows whose costs are measured, with `draft_len` and shorter ones.
    contexts: tokens in the cache behind which costs are measured, with the same.
    draft_len: K of the report.
    size: width of a prefill.
    max_new_tokens: of the decoding.
    seed: of the bootstrap.
    advance: called with the tokens of each decode.

  Returns:
    The result of `speed.cost_curve`, "draft_lens"; "batches": of `speed.batch_costs`;
    "contexts": of `speed.context_costs`; and "measured": for each of `timed` draft_len, speedup,
    speedup_ci, speedup_pooled and the tau of these decodes.
  """
  make = lambda draft_len, draft=drafter: speed.Single(
      target, draft, draft_len, size, max_new_tokens)
  costs = speed.cost_curve(make(max(draft_lens)), prompts[0], draft_lens, _REPEATS)
  short = sorted({K for K in (*_SHORT_LENS, draft_len) if K <= draft_len})
  many = speed.batch_costs(
      make(draft_len), prompts[0], batches, short, _BATCH_REPEATS, _LONGEST_S) if batches else []
  behind = speed.context_costs(
      make(draft_len), contexts, short, _BATCH_REPEATS, _LONGEST_S) if contexts else []
  sides = {0: make(0, None)} | {K: make(K) for K in timed} if timed else {}
  for single in sides.values():
    single(prompts[0], budget=2)
  clock: dict[int, list[tuple[int, float]]] = {K: [] for K in sides}
  rows = {K: [] for K in sides}
  for turn, ids in enumerate(prompts):
    for K in list(sides)[::-1 if turn % 2 else 1]:
      row, seconds = sides[K](ids)
      clock[K].append((len(row.tokens) - 1, seconds))
      rows[K].append(row.records)
      advance(len(row.tokens))
  measured = []
  for K in timed:
    rate = lambda K: [n / s for n, s in clock[K]]
    if min(n for K in (0, K) for n, _ in clock[K]) < 1:
      continue  # a prefill that ends a row leaves nothing to time
    pair = metrics.paired_ratio(rate(K), rate(0), seed=seed)
    pooled = lambda K: np.divide(*np.sum(clock[K], 0))
    measured.append({
        "draft_len": K, "speedup": pair["ratio"], "speedup_ci": pair["ratio_ci"],
        "speedup_pooled": float(pooled(K) / pooled(0)), "tau": metrics.tau(rows[K])})
  return {**costs, "draft_lens": list(draft_lens), "batches": many, "contexts": behind,
          "measured": measured}


# Sections of the report.


def replay_section(
    parts: Sequence[dict], warnings: list[str], seed: int = 0) -> list[dict]:
  """A row for each setting and K: replayed tau, the uniform-anchor estimate, and what decoding gave
  where it ran with that K. Adds to `warnings` where they disagree.

  Of several parts that estimate a K the one counts whose answers were decoded with it: estimate and
  measurement are then of the same text.
  """
  chosen: dict[tuple[float, str, int], dict] = {}
  for part in parts:
    for K in part["lengths"]:
      key = part["temperature"], part["rule"], K
      if key not in chosen or part["decoded"] == K:
        chosen[key] = part
  out = []
  for (temperature, rule, K), part in sorted(chosen.items()):
    at, rows = part["lengths"].index(K), part["rows"]
    tokens = np.array([r["tokens"] for r in rows])
    rounds = np.array([r["rounds"][at] for r in rows])
    starts = sum(r["starts"][at] for r in rows)
    row = {
        "temperature": temperature, "rule": rule, "draft_len": K, "prompts": len(rows),
        "tau": arithmetic.tau(tokens, rounds), "tau_ci": arithmetic.tau_ci(tokens, rounds, seed),
        "uniform_anchor":
            1 + sum(r["uniform"][at] for r in rows) / starts if starts else float("nan"),
        "survival": part["survival"][at], "measured": None, "measured_ci": [None, None],
        "difference": None, "difference_ci": [None, None], "agrees": None, "decisions": None,
        "verdict": None}
    if part["decoded"] == K:
      measured = np.array([r["measured"] for r in rows])
      real = arithmetic.tau(tokens, measured)
      low, high = arithmetic.difference_ci(tokens, measured, rounds, seed)
      row |= {"measured": real, "measured_ci": arithmetic.tau_ci(tokens, measured, seed),
              "difference": real - row["tau"], "difference_ci": np.array([low, high]),
              "agrees": None if np.isnan(low) else bool(low <= 0 <= high),
              "decisions": agreement.summary(part)}
      row["verdict"] = agreement.verdict(row["decisions"], row["agrees"])
      if row["verdict"] == "disagrees":
        warnings.append(
            f"at T={temperature:g} with K={K} the replay estimate of tau is {row['tau']:.3f} and "
            f"real decoding of the same text gave {real:.3f} (difference {real - row['tau']:+.3f}, "
            f"95 % {low:+.3f} to {high:+.3f}): they DISAGREE, so the estimates of the "
            "other K and the predicted speed-ups are not to be trusted"
            + agreement.reason(row["decisions"]))
    row["bias"] = row["uniform_anchor"] - (
        row["tau"] if row["measured"] is None else row["measured"])
    out.append({name: metrics.to_plain(value) for name, value in row.items()})
  return out


def coldest_taus(parts: Sequence[dict]) -> dict[int, float]:
  """Replayed tau by K at the lowest temperature that has an estimate."""
  rows = replay_section(parts, [])
  coldest = min((row["temperature"] for row in rows), default=0.0)
  return {row["draft_len"]: row["tau"] for row in rows
          if row["temperature"] == coldest and row["tau"] is not None}


def _tau(rows: Sequence[dict], at: int) -> float:
  return arithmetic.tau(
      np.array([r["tokens"] for r in rows]), np.array([r["rounds"][at] for r in rows]))


def prediction_section(
    costs: Sequence[dict], parts: Sequence[dict], speed_rows: Sequence[dict], drafter: str,
    draft_len: int) -> list[dict]:
  """S(K) = tau / (c(K) + v(K + 1)) for every dtype and K, at temperature 0: there speed is timed.

  Args:
    costs: of `cost_part`, with "dtype" and "prompts", the ids of the timed prompts.
    parts: of `replay_part`.
    speed_rows: measured speed-ups at `draft_len`.
    drafter: the trained one.
    draft_len: K of those.

  Returns:
    Rows; the one with the largest speedup of each dtype is "chosen". "speedup_timed" is the same
    from the tau of the timed prompts alone: that is what "measured_pooled", of all their tokens as
    tau is, has to be held against, and "error" by how much it is off; "measured" is the median of
    the prompts' ratios.
  """
  greedy = [p for p in parts if p["rule"] == "greedy"]
  out = []
  for cost in costs:
    known = {row["draft_len"]: row for row in cost["measured"]}
    for row in speed_rows:
      if row["drafter"] == drafter and row["dtype"] == cost["dtype"] and not row["temperature"]:
        known.setdefault(draft_len, row)
    rows = []
    for K, c in zip(cost["draft_lens"], cost["draft"], strict=True):
      # As in `replay_section`: of the text that this K decoded, if there is one.
      part = min((p for p in greedy if K in p["lengths"]), key=lambda p: p["decoded"] != K,
                 default=None)
      if part is None:
        continue
      total = c + cost["verify"][K]
      tau = _tau(part["rows"], part["lengths"].index(K))
      timed = _tau([r for r in part["rows"] if r["id"] in cost["prompts"]],
                   part["lengths"].index(K))
      real = known.get(K, {}).get("speedup_pooled")
      row = {"dtype": cost["dtype"], "temperature": 0.0, "draft_len": K, "tau": tau,
             "draft_cost": c, "verify_cost": cost["verify"][K], "tau_timed": timed,
             "speedup": tau / total, "speedup_timed": timed / total,
             "measured": known.get(K, {}).get("speedup"),
             "measured_ci": known.get(K, {}).get("speedup_ci", [None, None]),
             "measured_pooled": real, "error": timed / total / real - 1 if real else None}
      rows.append({name: metrics.to_plain(value) for name, value in row.items()} |
                  {"chosen": False})
    if rows:
      max(rows, key=lambda row: row["speedup"] or 0.0)["chosen"] = True
    out += rows
  return out
