"""Sections of prediction: hand-computed values, warnings, and the parts of a finished run."""

import copy
import dataclasses
import json
import shutil

import numpy as np
import pytest

from spec_jax.errors import UserError
from tests.train_drafter.test_report import hand_written
from train_drafter import config as config_lib
from train_drafter import evaluate, forecast, report
from train_drafter.config import Config
from train_drafter.manifest import Manifest


def part(rule="greedy", temperature=0.0, decoded=2, lengths=(1, 2), measured=(4, 2, 0), **changes):
  """Two prompts of 8 and 4 tokens and one that the prefill ended; K = 1 takes 6 + 3 rounds and
  K = 2 takes 4 + 2."""
  rounds = {1: (6.0, 3.0, 0.0), 2: (4.0, 2.0, 0.0)}
  rows = [{"id": name, "tokens": n, "measured": m, "rounds": [rounds[K][i] for K in lengths],
           "uniform": [1.5 * s for K in lengths], "starts": [s for K in lengths]}
          for i, (name, n, m, s) in enumerate(
              zip(("a", "b", "c"), (8, 4, 0), measured, (6, 4, 0), strict=True))]
  return {"temperature": temperature, "rule": rule, "decoded": decoded, "rows": rows,
          "lengths": list(lengths), "survival": [[0.5] * K for K in lengths]} | changes


COST = {"dtype": "float32", "prompts": ["a"], "plain_step_s": 0.01, "verify": [1.0, 1.1, 1.5],
        "draft": [0.1, 0.2], "draft_lens": [1, 2], "batches": [], "contexts": [],
        "measured": [{"draft_len": 1, "speedup": 1.2, "speedup_ci": [1.1, 1.3],
                      "speedup_pooled": 1.15}]}


def test_replay_rows_by_hand():
  warnings = []
  one, two = forecast.replay_section([part()], warnings)
  assert (one["draft_len"], one["measured"], one["agrees"]) == (1, None, None)
  assert one["tau"] == 12 / 9 and two["tau"] == two["measured"] == 2.0
  assert two["difference_ci"] == [0, 0] and two["agrees"] is True and not warnings
  assert two["uniform_anchor"] == 2.5 and two["survival"] == [0.5, 0.5]
  assert two["bias"] == 0.5 and one["bias"] == 2.5 - 12 / 9
  assert (two["prompts"], two["rule"], two["temperature"]) == (3, "greedy", 0.0)


def test_a_disagreement_is_loud():
  warnings = []
  row = forecast.replay_section([part(measured=(6, 3, 0))], warnings)[-1]
  assert row["agrees"] is False and row["difference"] == 12 / 9 - 2
  warning, = warnings
  assert "T=0 with K=2" in warning and "is 2.000" in warning and "gave 1.333" in warning
  assert "DISAGREE" in warning
  one_prompt = part()
  one_prompt["rows"] = one_prompt["rows"][:1]
  assert forecast.replay_section([one_prompt], warnings)[-1]["agrees"] is None


def test_the_text_of_the_same_length_counts():
  other = part(decoded=1, lengths=(1,), measured=(6, 3, 0))
  for parts in ([part(), other], [other, part()]):
    one, two = forecast.replay_section(parts, [])
    assert (one["measured"], two["measured"]) == (12 / 9, 2.0) and one["agrees"]


def test_prediction_by_hand():
  speed = [{"dtype": "float32", "drafter": "small_lm", "temperature": 0.0, "speedup": 1.25,
            "speedup_ci": [1.2, 1.3]},
           {"dtype": "float32", "drafter": "ngram", "temperature": 0.0, "speedup": 9.0,
            "speedup_ci": [9, 9]}]
  warm = part("ratio", 1.0)
  one, two = forecast.prediction_section([COST], [warm, part()], speed, "small_lm", 2)
  assert one["speedup"] == pytest.approx(12 / 9 / 1.2)
  assert two["speedup"] == pytest.approx(2.0 / 1.7)
  assert two["speedup_timed"] == pytest.approx((8 / 4) / 1.7) and two["tau_timed"] == 2.0
  assert one["tau_timed"] == 8 / 6
  assert (one["measured"], two["measured"], two["measured_ci"]) == (1.2, 1.25, [1.2, 1.3])
  assert (one["measured_pooled"], two["measured_pooled"]) == (1.15, None)
  assert one["error"] == pytest.approx(8 / 6 / 1.2 / 1.15 - 1) and two["error"] is None
  assert (one["chosen"], two["chosen"]) == (False, True)
  assert forecast.prediction_section([COST], [warm], speed, "small_lm", 2) == []
  # Another decoding with K = 1: both sections speak of its text.
  other = part(decoded=1, lengths=(1,))
  other["rows"][0]["rounds"] = [7.0]
  rows = forecast.prediction_section([COST], [part(), other], speed, "small_lm", 2)
  assert [r["tau"] for r in rows] == [12 / 10, 2.0] == [
      r["tau"] for r in forecast.replay_section([part(), other], [])]


def test_a_finished_run_predicts_and_checks(finished):
  """At T=0 in float32 the replay of the tiny run is its decoding, round for round."""
  cfg, workdir = finished
  made = json.loads((workdir / "evaluate" / "report.json").read_text())
  K = cfg.evaluate.draft_len
  rows = {(r["temperature"], r["draft_len"]): r for r in made["replay"]}
  assert set(rows) == {(t, k) for t in (0.0, 1.0) for k in range(1, 8)}
  measured = {s["temperature"]: s["all"] for s in made["settings"]}
  for t in (0.0, 1.0):
    assert rows[t, K]["measured"] == measured[t]["tau"]
    assert rows[t, K]["measured_ci"] == measured[t]["tau_ci"]
    assert [k for k in range(1, 8) if rows[t, k]["measured"] is not None] == [1, K]
    np.testing.assert_array_equal(np.diff([rows[t, k]["tau"] for k in range(1, 8)]) >= -1e-9, True)
  for k in (1, K):
    assert rows[0.0, k]["difference"] == 0 and rows[0.0, k]["agrees"]
  np.testing.assert_allclose(rows[0.0, K]["survival"], measured[0.0]["survival"], atol=1e-12)
  cost, = made["costs"]
  assert len(cost["verify"]) == 8 and len(cost["draft"]) == 7 and cost["verify"][0] == 1
  assert all(v > 0 for v in cost["verify"] + cost["draft"]) and len(cost["prompts"]) == 3
  places = lambda name, axis: [(row[axis], row["draft_len"]) for row in cost[name]]
  assert places("batches", "batch") == [(1, 1), (1, 3), (2, 1), (2, 3)]
  assert places("contexts", "context") == [(32, 1), (32, 3), (64, 1), (64, 3)]
  for row in cost["batches"] + cost["contexts"]:
    assert row["verify_cost"] > 0 and row["draft_cost"] > 0 and row["plain_step_s"] > 0
  found = made["whatif"]["measured"]
  assert [r["speedup"] for r in found["contexts"][2:]] == pytest.approx([
      rows[0.0, row["draft_len"]]["tau"] / (row["draft_cost"] + row["verify_cost"])
      for row in cost["contexts"][2:]])
  assert sum(r["chosen"] for r in found["batches"]) == 2
  assert [r["draft_len"] for r in made["prediction"]] == list(range(1, 8))
  assert sum(r["chosen"] for r in made["prediction"]) == 1
  timed = {r["draft_len"]: r["measured"] for r in made["prediction"]}
  assert timed[K] == next(
      r["speedup"] for r in made["speed"] if r["drafter"] == cfg.drafter.kind)
  assert timed[1] == cost["measured"][0]["speedup"] > 0 and timed[2] is None
  report.validate_report(made)
  assert made["memory"]["drafter"]["kind"] == "small_lm"
  assert made["memory"]["target"]["parameters"] > made["memory"]["drafter"]["trained_parameters"]
  best = made["whatif"]["accelerators"][0]["rows"][0]
  taus = {k: rows[0.0, k]["tau"] for k in range(1, 8)}
  assert best["draft_len"] in taus and best["speedup"] <= taus[best["draft_len"]]


def test_a_stopped_stage_keeps_its_parts(finished, tmp_path, monkeypatch):
  cfg, workdir = finished
  folder = tmp_path / "run"
  shutil.copytree(workdir, folder)
  made = Manifest.load(folder / "evaluate")
  dataclasses.replace(made, complete=False).save(folder / "evaluate")
  (folder / "evaluate" / "parts" / "replay-T0-greedy-K1.json").unlink()
  calls = []
  estimate = forecast.replay.estimate
  monkeypatch.setattr(forecast.replay, "estimate", lambda *args, **options: calls.append(
      options["lengths"]) or estimate(*args, **options))
  monkeypatch.setattr(forecast, "cost_part", None)
  evaluate.run(cfg, folder)
  assert calls == [(1,)]
  old, new = (json.loads((w / "evaluate" / "report.json").read_text()) for w in (workdir, folder))
  assert old["replay"] == new["replay"] and old["prediction"] == new["prediction"]


def test_more_draft_lens_are_checked():
  cfg = Config()
  cfg.evaluate.more_draft_lens = (1, 0)
  with pytest.raises(UserError, match="more_draft_lens=.1, 0. must be at least 1"):
    config_lib.validate(cfg)
  cfg.evaluate.more_draft_lens = (1, 9)
  config_lib.validate(cfg)
  cfg.drafter.kind = "dflash"
  with pytest.raises(UserError, match="more_draft_lens=.1, 9. must be at most 7"):
    config_lib.validate(cfg)


def test_sections_of_a_hand_written_report(tmp_path):
  """A disagreement stands among the report's warnings, and the sections come back from disk."""
  everything = dict(
      target="toy", drafter="small_lm", draft_len=5, max_new_tokens=128, records=hand_written(),
      replay=[part(measured=(6, 3, 0))], costs=[COST], memory={"features_bytes_per_token": 0})
  made = report.build_report(**everything)
  assert [w for w in made["warnings"] if "DISAGREE" in w]
  assert [r["tau"] for r in made["replay"]] == [12 / 9, 2.0]
  assert [r["chosen"] for r in made["prediction"]] == [False, True]
  assert made["costs"] == [COST] and made["memory"] == {"features_bytes_per_token": 0}
  assert made["whatif"] is None
  report.save_evaluation(tmp_path, **everything)
  assert report.report_from_folder(tmp_path) == made
  for section, name in (("replay", "agrees"), ("prediction", "chosen"), ("costs", "verify")):
    broken = copy.deepcopy(made)
    del broken[section][0][name]
    with pytest.raises(UserError, match=rf"{section}\[0\].{name} is missing"):
      report.validate_report(broken)
  made["replay"][0]["agrees"] = "yes"
  with pytest.raises(UserError, match="agrees must be true, false or null"):
    report.validate_report(made)


def test_training_is_logged_in_units_of_tau(finished):
  _, workdir = finished
  found = Manifest.load(workdir / "train").counts["validation"]
  taus = {name: value for name, value in found.items() if name.startswith("replay_tau")}
  assert taus and all(1 <= value <= 6 for value in taus.values())
  text = (workdir / "train" / "metrics.jsonl").read_text()
  rows = [json.loads(line) for line in text.splitlines()]
  curve = [row for row in rows if row["split"] == "validation"]
  assert len(curve) == 3 and all(taus.keys() <= row.keys() for row in curve)
