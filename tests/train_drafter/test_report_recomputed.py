"""Every acceptance figure of a written report, recomputed from records.jsonl by a loop over rounds.

Shares no code with `spec_jax.records`: it reads the JSON lines themselves.
"""

import json

import numpy as np
import pytest

from spec_jax.records import RowRecords
from train_drafter.report import report_from_folder, save_evaluation, write_report

K = 4


def ratio(a, b):
  return None if b == 0 else a / b


def one_round(proposed, accepted, emitted):
  """Outcome of each draft that was not cut away, and whether the round was cut."""
  cut = emitted < accepted + 1
  seen = min(proposed, emitted) if cut else proposed
  return [k < accepted for k in range(seen)], cut


def is_looped(tokens):
  marks = [False] * len(tokens)
  for start in range(len(tokens) - 7):
    for back in range(1, 65):
      if start - back >= 0 and tokens[start - back:start - back + 8] == tokens[start:start + 8]:
        for k in range(start, start + 8):
          marks[k] = True
  return marks


def figures(lines):
  emitted = rounds = drafts = matched = cuts = eos_cuts = early_rounds = early_tokens = 0
  reached, exposed, eligible = ([0] * K for _ in range(3))
  means, tokens, looped = [], 0, 0
  for line in lines:
    marks = is_looped(line["tokens"])
    tokens, looped = tokens + len(marks), looped + sum(marks)
    start = marks.index(True) if any(marks) else None
    place = 1  # the first token came from prefill
    for proposed, accepted, kept in zip(
        line["proposed"], line["accepted"], line["emitted"], strict=True):
      outcome, cut = one_round(proposed, accepted, kept)
      rounds, emitted = rounds + 1, emitted + kept
      cuts, eos_cuts = cuts + cut, eos_cuts + (cut and line["reason"] == "eos")
      drafts, matched = drafts + len(outcome), matched + sum(outcome)
      place += kept
      if start is None or place <= start:
        early_rounds, early_tokens = early_rounds + 1, early_tokens + kept
      for k in range(K):
        if cut and k >= len(outcome):
          continue
        exposed[k] += 1
        reached[k] += k < len(outcome) and outcome[k]
        eligible[k] += k == 0 or (len(outcome) >= k and outcome[k - 1])
    if line["emitted"]:
      means.append(sum(line["emitted"]) / len(line["emitted"]))
  return {
      "prompts": len(lines), "rounds": rounds, "emitted": emitted, "cut_rounds": cuts,
      "eos_cut_rounds": eos_cuts, "eos_cut_share": ratio(eos_cuts, rounds),
      "tau": ratio(emitted, rounds), "tau_mean": ratio(sum(means), len(means)),
      "acceptance_rate": ratio(matched, drafts),
      "survival": [ratio(a, b) for a, b in zip(reached, exposed, strict=True)],
      "conditional": [ratio(a, b) for a, b in zip(reached, eligible, strict=True)],
      "looped_token_share": ratio(looped, tokens),
      "tau_before_first_loop": ratio(early_tokens, early_rounds)}


def tau_interval(lines, rng):
  taus = []
  for _ in range(2000):
    drawn = [lines[i] for i in rng.integers(len(lines), size=len(lines))]
    taus.append(sum(sum(x["emitted"]) for x in drawn) / sum(len(x["emitted"]) for x in drawn))
  return np.quantile(taus, [0.025, 0.975])


def random_rows(rng, count):
  rows = []
  for i in range(count):
    proposed = rng.integers(0, K + 1, size=rng.integers(0 if i % 7 == 0 else 1, 12))
    accepted = rng.integers(0, proposed + 1)
    emitted, reason = accepted + 1, "length"
    if len(emitted) and i % 3:
      reason = "eos" if i % 3 == 1 else "length"
      emitted[-1] = rng.integers(1, emitted[-1] + 1)
    size = 1 + int(emitted.sum())
    # Some answers go round in a circle of ten tokens.
    tokens = (100 + np.arange(size) % (10 if i % 4 == 0 else 1000)).tolist()
    rows.append({"id": f"p{i}", "category": "code" if i % 2 else "creative", "tokens": tokens,
                 "records": RowRecords(proposed, accepted, emitted, reason)})
  return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  rng = np.random.default_rng(4)
  path = tmp_path_factory.mktemp("evaluate")
  records = {name: {(0.0, "greedy"): random_rows(rng, 24), (1.0, "ratio"): random_rows(rng, 24)}
             for name in ("small_lm", "ngram")}
  save_evaluation(path, records=records, target="demo", drafter="small_lm", draft_len=K,
                  max_new_tokens=99)
  write_report(report_from_folder(path), path)
  return path


def test_every_figure_follows_from_the_saved_records(folder):
  report = json.loads((folder / "report.json").read_text())
  lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
  lists = {report["drafter"]: report["settings"],
           **{name: control["settings"] for name, control in report["controls"].items()}}
  seen = 0
  for drafter, settings in lists.items():
    for entry in settings:
      own = [x for x in lines if (x["drafter"], x["temperature"], x["rule"]) == (
          drafter, entry["temperature"], entry["rule"])]
      for category, group in [("all", entry["all"]), *entry["categories"].items()]:
        expected = figures([x for x in own if category in ("all", x["category"])])
        others = {name for name in group if not name.endswith("_ci")}
        assert others == set(expected)
        for name, value in expected.items():
          assert group[name] == pytest.approx(value), (drafter, category, name)
          seen += 1
  assert seen == 2 * 2 * 3 * 13
  assert 0 < report["looped_token_share"] < 1
  assert report["tau_before_first_loop"] != report["settings"][0]["all"]["tau"]


def test_the_interval_is_that_of_a_loop_over_resampled_prompts(folder):
  report = json.loads((folder / "report.json").read_text())
  lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
  own = [x for x in lines if (x["drafter"], x["rule"]) == ("small_lm", "ratio")]
  expected = tau_interval(own, np.random.default_rng(9))
  np.testing.assert_allclose(report["settings"][1]["all"]["tau_ci"], expected, atol=0.05)
