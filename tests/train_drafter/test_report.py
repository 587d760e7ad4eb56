"""The report from hand-written records: hand-computed values, warnings, files and the tables."""

import copy
import io
import json

import numpy as np
import pytest
from rich.console import Console

from spec_jax.errors import UserError
from spec_jax.records import RowRecords
from train_drafter import report as report_lib
from train_drafter.report import (
  build_report,
  load_records,
  print_report,
  report_from_folder,
  save_evaluation,
  save_records,
  validate_report,
  write_report,
)
from train_drafter.report_text import markdown

GREEDY, RATIO = (0.0, "greedy"), (1.0, "ratio")


def prompt(name, category, accepted, emitted=None, reason="length", tokens=None, k=5):
  emitted = [a + 1 for a in accepted] if emitted is None else emitted
  tokens = list(range(1 + sum(emitted))) if tokens is None else tokens
  return {"id": name, "category": category, "tokens": tokens,
          "records": RowRecords([k] * len(accepted), accepted, emitted, reason)}


def hand_written():
  """Three prompts in two categories. small_lm at T=0:

  code-1 A = 5, 0, 2 (E = 9 in 3 rounds: 6+1+3 = 10); code-2 all five match and EOS is the third
  (E = 3 in 1 round, cut); qa-1 A = 0, 1 (E = 1+2 = 3 in 2 rounds).
  """
  trained = [prompt("code-1", "code", [5, 0, 2]),
             prompt("code-2", "code", [5], [3], reason="eos"),
             prompt("qa-1", "qa", [0, 1])]
  nothing = [prompt("code-1", "code", [0] * 10),
             prompt("code-2", "code", [0] * 3),
             prompt("qa-1", "qa", [0] * 3)]
  return {"small_lm": {RATIO: trained, GREEDY: trained},
          "ngram": {GREEDY: trained, RATIO: nothing},
          "untrained": {GREEDY: nothing, RATIO: nothing}}


SPEED = [
  {"dtype": "float32", "drafter": "small_lm", "plain_tokens_per_s": 20.0,
   "speculative_tokens_per_s": 24.0, "speedup": 1.2, "speedup_ci": [1.1, 1.3],
   "draft_cost": 0.4, "verify_cost": 1.2},
  {"dtype": "float32", "drafter": "ngram", "plain_tokens_per_s": 20.5,
   "speculative_tokens_per_s": 41.0, "speedup": 2.0, "speedup_ci": [1.9, 2.1],
   "draft_cost": 0.0, "verify_cost": 1.25},
  {"dtype": "bfloat16", "drafter": "ngram", "plain_tokens_per_s": 10.0,
   "speculative_tokens_per_s": 18.0, "speedup": 1.8, "speedup_ci": [1.7, 1.9],
   "draft_cost": 0.0, "verify_cost": 1.25},
]
IDENTITY = [{"dtype": "float32", "drafter": "small_lm", "prompts": 3,
             "identical_same_shape": 1.0, "identical_width_1": 2 / 3}]


def arguments(**changes):
  return {"target": "demo", "drafter": "small_lm", "draft_len": 5, "max_new_tokens": 128,
          "records": hand_written(), "speed": SPEED, "identity": IDENTITY,
          "provenance": {"jax": "0.0"}, **changes}


def test_hand_computed_values():
  report = build_report(**arguments())
  assert [(s["temperature"], s["rule"]) for s in report["settings"]] == [GREEDY, RATIO]
  group = report["settings"][0]["all"]
  assert (group["prompts"], group["rounds"], group["emitted"]) == (3, 6, 16)
  assert group["cut_rounds"] == group["eos_cut_rounds"] == 1
  assert group["eos_cut_share"] == pytest.approx(1 / 6)
  assert group["tau"] == pytest.approx(16 / 6)
  assert group["tau_mean"] == pytest.approx((10 / 3 + 3 + 3 / 2) / 3)
  # A: 5 0 2, 3 (cut), 0 1; K: 5 5 5, 3, 5 5.
  assert group["acceptance_rate"] == pytest.approx(11 / 28)
  assert group["survival"] == pytest.approx([4 / 6, 3 / 6, 2 / 6, 1 / 5, 1 / 5])
  assert group["conditional"] == pytest.approx([4 / 6, 3 / 4, 2 / 3, 1, 1])
  code, qa = (report["settings"][0]["categories"][c] for c in ("code", "qa"))
  assert list(report["settings"][0]["categories"]) == ["code", "qa"]
  assert code["tau"] == pytest.approx(13 / 4)
  assert qa["tau"] == pytest.approx(3 / 2) and qa["acceptance_rate"] == pytest.approx(1 / 10)
  assert qa["tau_ci"] == [None, None]
  low, high = group["tau_ci"]
  assert 3 / 2 <= low < 16 / 6 < high <= 10 / 3
  assert report["controls"]["untrained"]["settings"][0]["all"]["tau"] == 1
  assert report["controls"]["ngram"]["settings"][1]["all"]["tau"] == 1
  assert report["looped_token_share"] == 0
  assert report["tau_before_first_loop"] == pytest.approx(16 / 6)
  assert report["warnings"] == []


def test_rounds_beyond_the_drafters_context_are_told():
  """CASE 13: decoding falls back to plain steps there, and says so."""
  records = hand_written()
  rows = records["small_lm"][GREEDY] = copy.deepcopy(records["small_lm"][GREEDY])
  rows[2] |= {"records": RowRecords([5, 0, 0], [1, 0, 0], [2, 1, 1], "length"),
              "tokens": list(range(5))}
  report = build_report(**arguments(records=records))
  assert report["warnings"] == ["at T=0 (greedy) 2 of 7 rounds were plain decoding: the text had "
                                "passed the context of small_lm"]


def test_looped_output_is_told_apart():
  """Ten tokens, then the same ten again: the loop starts at 10, after the rounds of 4 and 5."""
  records = hand_written()
  tokens = [*range(100, 110)] * 2
  records["small_lm"][GREEDY] = [prompt("loop", "qa", [3, 4, 4, 4], tokens=tokens),
                                 prompt("loop-2", "qa", [3, 4, 4, 4], tokens=tokens)]
  records = {"small_lm": records["small_lm"]}
  report = build_report(**arguments(records=records))
  assert report["looped_token_share"] == 0.5
  assert report["settings"][0]["all"]["tau"] == pytest.approx(19 / 4)
  assert report["tau_before_first_loop"] == pytest.approx(9 / 2)
  assert any("looped output carries part" in w and "T=0" in w for w in report["warnings"])


def test_categories_stand_in_the_projects_order():
  rows = [prompt(c, c, [1]) for c in ("legal", "creative", "structured")]
  report = build_report(**arguments(records={"small_lm": {GREEDY: rows}}))
  assert list(report["settings"][0]["categories"]) == ["structured", "creative", "legal"]


# --- speed


def test_predicted_speed_uses_the_drafters_own_tau():
  speed = build_report(**arguments())["speed"]
  assert speed[0]["predicted_speedup"] == pytest.approx(16 / 6 / 1.6)
  assert speed[0]["temperature"] == 0 and speed[0]["speedup"] == 1.2
  speed = build_report(**arguments(speed=[{**SPEED[0], "tau": 2.0}]))["speed"]
  assert speed[0]["predicted_speedup"] == pytest.approx(2 / 1.6)
  speed = build_report(**arguments(speed=[{**SPEED[0], "draft_cost": None}]))["speed"]
  assert speed[0]["predicted_speedup"] is None


def test_headline_names_the_fastest_drafter_and_dtype():
  headline = build_report(**arguments())["headline"]
  assert (headline["drafter"], headline["dtype"], headline["plain_dtype"]) == (
      "ngram", "float32", "float32")
  assert headline["speedup"] == 2.0 and headline["speedup_ci"] == [1.9, 2.1]


def test_headline_compares_with_the_fastest_plain_decoding_of_any_dtype():
  slow_plain = [{**SPEED[1], "plain_tokens_per_s": 20.0},
                {**SPEED[2], "plain_tokens_per_s": 25.0}]
  headline = build_report(**arguments(speed=slow_plain))["headline"]
  assert (headline["dtype"], headline["plain_dtype"]) == ("float32", "bfloat16")
  assert headline["speedup"] == pytest.approx(41 / 25)
  assert headline["speedup_ci"] == [None, None]


def test_slower_than_plain_is_said():
  slow = [{**SPEED[0], "speculative_tokens_per_s": 15.0, "speedup": 0.75,
           "speedup_ci": [0.7, 0.8]}]
  text = shown(build_report(**arguments(speed=slow)))
  assert "No drafter is faster than plain decoding (float32, 20.0 tokens/s)" in text
  assert "0.75 (0.70–0.80) times that" in text


def test_report_without_speed():
  report = build_report(**arguments(speed=[]))
  assert report["headline"] is None
  assert "Speed was not measured." in shown(report)


# --- warnings


def many(accepted_of, n=40):
  return [prompt(f"p{i}", "qa", accepted_of(i)) for i in range(n)]


def test_training_that_stopped_early_warns():
  made = lambda steps: build_report(**arguments(
      provenance={"training": {"steps": steps, "planned_steps": 20}}))["warnings"]
  assert "training stopped at step 19 of 20" in made(19)
  assert made(20) == build_report(**arguments())["warnings"]


def test_training_estimate_outside_the_interval_warns():
  records = {"small_lm": {RATIO: many(lambda i: [i % 3, 0, 1])}}  # tau 5 / 3
  good = {"temperature": 1.0, "tau": 1 + 2 / 3, "first_position": 5 / 9, "acceptance_rate": 2 / 15}
  report = build_report(**arguments(records=records, training_estimate=good))
  assert report["warnings"] == []
  checks = report["training_estimate"][0]["checks"]
  assert set(checks) == {"tau", "first_position", "acceptance_rate"}
  assert all(c["agrees"] for c in checks.values())

  accuracy = {"temperature": 1.0, "tau": 2.5}
  report = build_report(**arguments(records=records, training_estimate=[accuracy]))
  assert len(report["warnings"]) == 1
  assert "training estimate of tau at T=1 is 2.500, real decoding gave 1.6" in report["warnings"][0]
  assert not report["training_estimate"][0]["checks"]["tau"]["agrees"]

  report = build_report(**arguments(records=records,
                                    training_estimate={"temperature": 0.0, "tau": 2.5}))
  assert "unchecked" in report["warnings"][0]
  with pytest.raises(UserError, match="training_estimate.temperature is missing"):
    build_report(**arguments(records=records, training_estimate={"tau": 2.5}))


def test_drafter_at_the_floor_warns():
  """Slightly above its untrained self, intervals overlapping: nothing was shown."""
  records = {"small_lm": {GREEDY: many(lambda i: [int(i % 8 == 0)] * 4)},
             "untrained": {GREEDY: many(lambda i: [int(i % 10 == 0)] * 4)}}
  warnings = build_report(**arguments(records=records))["warnings"]
  assert len(warnings) == 1 and "at the floor" in warnings[0]
  records["small_lm"][GREEDY] = many(lambda i: [2, i % 2])
  assert build_report(**arguments(records=records))["warnings"] == []


def test_category_behind_its_untrained_self_is_named():
  records = hand_written()
  records["untrained"][GREEDY][2] = prompt("qa-1", "qa", [0, 1])
  warnings = build_report(**arguments(records=records))["warnings"]
  assert "at T=0 small_lm is not above its untrained self in: qa" in warnings


def test_controls_on_other_prompts_warn():
  records = hand_written()
  records["ngram"][GREEDY] = records["ngram"][GREEDY][:2]
  assert any("ngram was decoded on 2 of the" in w
             for w in build_report(**arguments(records=records))["warnings"])
  records["ngram"][GREEDY].append(prompt("elsewhere", "qa", [0, 1]))
  assert any("ngram was decoded on other prompts" in w
             for w in build_report(**arguments(records=records))["warnings"])


def test_broken_float32_identity_warns():
  broken = [{**IDENTITY[0], "identical_same_shape": 0.75}]
  warnings = build_report(**arguments(identity=broken))["warnings"]
  assert any("25.0 % of the prompts" in w for w in warnings)


def test_divergence_beyond_rounding_warns():
  def report_of(within):
    place = {"id": "qa-0", "equal_tokens": 7, "margin": 0.02, "within_tolerance": within}
    row = {**IDENTITY[0], "tolerance": 0.01, "divergences": [place]}
    return build_report(**arguments(identity=[row]))

  message = "leaves plain decoding of width 1 on qa-0 behind 7 tokens, and rounding does not"
  assert any(message in w for w in report_of(False)["warnings"])
  assert not any("rounding" in w for w in report_of(True)["warnings"])
  assert "1 of 1 differences at a tie within rounding" in markdown(report_of(True))


# --- bad material


@pytest.mark.parametrize("change, message", [
    (lambda r: r.pop("small_lm"), "no records of the drafter 'small_lm'"),
    (lambda r: r["ngram"].update({GREEDY: []}), "no prompts for ngram at T=0, greedy"),
    (lambda r: r["ngram"][GREEDY].append(r["ngram"][GREEDY][0]), "prompt 'code-1' stands twice"),
    (lambda r: r["small_lm"][GREEDY][2].update(tokens=[1]), "prompt 'qa-1': .* cannot come from"),
])
def test_bad_material_is_refused(change, message):
  records = hand_written()
  records["small_lm"] = copy.deepcopy(records["small_lm"])
  change(records)
  with pytest.raises(UserError, match=message):
    build_report(**arguments(records=records))


def test_missing_keys_are_named():
  report = build_report(**arguments())
  del report["settings"][1]["categories"]["qa"]["tau_ci"]
  with pytest.raises(UserError, match=r"settings\[1\].categories.qa.tau_ci is missing"):
    validate_report(report)
  report = build_report(**arguments())
  del report["controls"]["ngram"]["settings"][0]["all"]["cut_rounds"]
  with pytest.raises(UserError, match=r"controls.ngram.settings\[0\].all.cut_rounds is missing"):
    validate_report(report)
  report = build_report(**arguments())
  report["draft_len"] = "5"
  with pytest.raises(UserError, match="draft_len must be a whole number of at least 0, got '5'"):
    validate_report(report)
  with pytest.raises(UserError, match=r"speed\[0\].speedup_ci is missing"):
    build_report(**arguments(speed=[{k: v for k, v in SPEED[0].items() if k != "speedup_ci"}]))
  with pytest.raises(UserError, match=r"identity\[0\].drafter is missing"):
    build_report(**arguments(identity=[{k: v for k, v in IDENTITY[0].items() if k != "drafter"}]))


# --- files


def test_written_report_is_plain_json(tmp_path):
  numpy_speed = [{**SPEED[0], "speedup": np.float64(1.2), "speedup_ci": np.array([1.1, 1.3])}]
  report = build_report(**arguments(speed=numpy_speed))
  path = write_report(report, tmp_path / "evaluate")
  assert json.loads(path.read_text()) == report
  assert sorted(p.name for p in path.parent.iterdir()) == [
      "report.html", "report.json", "report.md"]


def test_invalid_report_is_not_written(tmp_path):
  report = build_report(**arguments())
  del report["target"]
  with pytest.raises(UserError, match="report: target is missing"):
    write_report(report, tmp_path)
  assert not list(tmp_path.iterdir())


def test_report_is_rebuilt_from_the_records_alone(tmp_path):
  everything = arguments(training_estimate={"temperature": 1.0, "tau": 2.0}, seed=3)
  save_evaluation(tmp_path, **everything)
  assert report_from_folder(tmp_path) == build_report(**everything)
  assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 18


def test_records_survive_the_round_trip(tmp_path):
  records = hand_written()
  records["small_lm"][GREEDY][0]["id"] = "odd\u2028id\n"
  back = load_records(save_records(tmp_path / "records.jsonl", records))
  assert list(back) == list(records)
  for drafter, by_setting in records.items():
    for key, rows in by_setting.items():
      for a, b in zip(rows, back[drafter][key], strict=True):
        assert (a["id"], a["category"], a["tokens"]) == (b["id"], b["category"], b["tokens"])
        for name in ("proposed", "accepted", "emitted"):
          np.testing.assert_array_equal(getattr(a["records"], name), getattr(b["records"], name))
        assert a["records"].reason == b["records"].reason


@pytest.mark.parametrize("spoil, message", [
    (lambda line: line[:-5], r"records.jsonl:2: "),
    (lambda line: line.replace('"reason":"eos",', ""), r"records.jsonl:2: reason is missing"),
    (lambda line: line.replace('"emitted":[3]', '"emitted":[9]'),
     r"records.jsonl:2: records: emitted must be <= accepted \+ 1"),
    (lambda line: "[]", r"records.jsonl:2: must be an object, got \[\]"),
    (lambda line: line.replace('"emitted":[3]', '"emitted":"3"'),
     r"records.jsonl:2: records: emitted must have one axis"),
    (lambda line: line.replace('"id":"code-2"', '"id":7'), r"records.jsonl:2: id must be a string"),
    (lambda line: line.replace('"rule":"ratio"', '"rule":"ratix"'),
     r"records.jsonl:2: rule must be one of greedy, .*, got 'ratix'"),
    (lambda line: line.replace('"temperature":1.0', '"temperature":"hot"'),
     r"records.jsonl:2: temperature must be a number of at least 0, got 'hot'"),
    (lambda line: line.replace('"temperature":1.0', '"temperature":NaN'),
     r"records.jsonl:2: temperature must be a number of at least 0, got nan"),
    (lambda line: line.replace('"tokens":[0,1,', '"tokens":['),
     r"records.jsonl:2: records: an answer of 2 tokens cannot come from prefill's one and 3 emi"),
    (lambda line: line.replace('"tokens":[0,', '"tokens":["a",'),
     r"records.jsonl:2: tokens must be a list of whole numbers"),
])
def test_broken_record_lines_are_named(tmp_path, spoil, message):
  path = save_records(tmp_path / "records.jsonl", hand_written())
  lines = path.read_text().splitlines()
  lines[1] = spoil(lines[1])
  path.write_text("\n".join(lines) + "\n")
  with pytest.raises(UserError, match=message):
    load_records(path)


def test_missing_and_empty_files_are_named(tmp_path):
  with pytest.raises(UserError, match="evaluation.json: no such file"):
    report_from_folder(tmp_path)
  with pytest.raises(UserError, match="records.jsonl: no such file"):
    load_records(tmp_path / "records.jsonl")
  (tmp_path / "records.jsonl").write_text("")
  with pytest.raises(UserError, match="records.jsonl: holds no records"):
    load_records(tmp_path / "records.jsonl")
  save_evaluation(tmp_path, **arguments())
  (tmp_path / "evaluation.json").write_text('{"tarket": 1}')
  with pytest.raises(UserError, match="evaluation.json: .*tar[gk]et"):
    report_from_folder(tmp_path)


# --- what people read


def shown(report, width=400):
  out = io.StringIO()
  print_report(report, Console(file=out, width=width, color_system=None))
  return out.getvalue()


def line_of(text, start):
  return next(line for line in text.splitlines() if line.startswith(start)).split()


def test_printed_figures():
  report = build_report(**arguments(training_estimate={"temperature": 1.0, "tau": 9.0}))
  text = shown(report)
  assert text.startswith("small_lm for demo: K = 5, 3 prompts, up to 128 new tokens")
  assert line_of(text, "qa") == ["qa", "1.50", "1.50", "10/10", "0/0", "1.50/1.00", "1.00/1.00"]
  group = report["settings"][0]["all"]
  interval = f"({group['tau_ci'][0]:.2f}–{group['tau_ci'][1]:.2f})"
  assert line_of(text, "all ")[:3] == ["all", "2.67", interval]
  assert line_of(text, "all ")[-4:] == ["39/39", "0/0", "2.67/1.00", "1.00/1.00"]
  assert line_of(text, "small_lm   0  survival")[3:] == ["67", "50", "33", "20", "20"]
  assert line_of(text, " " * 14 + "conditional")[1:] == [
      "67", "75", "67", "100", "100"]
  assert line_of(text, "bfloat16")[:6] == ["bfloat16", "ngram", "0", "10.0", "18.0", "1.80"]
  assert ("Fastest: ngram in float32, T=0: 41.0 tokens/s, 2.00 (1.90–2.10) times the fastest "
          "plain decoding (float32, 20.5 tokens/s).") in text
  assert ("float32, small_lm, 3 prompts: identical to same-shape plain 100.0 %, to one-token "
          "plain 66.7 %") in text
  assert "Warning: the training estimate of tau at T=1 is 9.000" in text
  assert "acceptance_rate: drafts accepted / drafts proposed" in text


@pytest.mark.parametrize("width", [80, 110])
def test_tables_fit_the_terminal(width):
  """Every figure of a table's row stands on one line, for the project's own table sizes."""
  records = {d: {key: [prompt(f"s{i}", "summarization", [i % 6, 0, 1] * 500) for i in range(9)]
                 for key in (GREEDY, RATIO)} for d in ("small_lm", "ngram", "untrained")}
  text = shown(build_report(**arguments(records=records)), width)
  assert max(map(len, text.splitlines())) <= width
  tables = text[:text.index("Fastest:")]
  assert sum(line.count("(") == line.count(")") for line in tables.splitlines()) == len(
      tables.splitlines())
  assert len(line_of(tables, "summarization")) == 9
  assert "…" not in tables


def test_markdown_has_the_same_figures(tmp_path):
  report = build_report(**arguments())
  write_report(report, tmp_path)
  page = (tmp_path / "report.md").read_text()
  assert "| qa | 1.50 | 1.50 | 10/10 | 0/0 | 1.50/1.00 | 1.00/1.00 |" in page
  assert "**Fastest: ngram in float32, T=0: 41.0 tokens/s, 2.00 (1.90–2.10) times" in page
  for line in page.splitlines():
    if line.startswith("| category"):
      assert line.count("|") == 8


def test_two_rules_at_one_temperature_are_told_apart():
  records = hand_written()
  records["small_lm"][(1.0, "block")] = records["small_lm"][RATIO]
  text = shown(build_report(**arguments(records=records)))
  assert "τ T=1 block" in text and "τ T=1 ratio" in text and "τ T=0 " in text


def test_definitions_cover_every_figure():
  report = build_report(**arguments())
  for name in ("tau", "tau_mean", "acceptance_rate", "survival", "conditional", "cut_rounds",
               "looped_token_share", "tau_before_first_loop", "speedup", "predicted_speedup",
               "draft_cost", "verify_cost", "identical_same_shape", "identical_width_1"):
    assert report["definitions"][name]
  assert report["schema_version"] == report_lib.SCHEMA_VERSION
