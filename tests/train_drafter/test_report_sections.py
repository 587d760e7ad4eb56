"""Times, prediction, memory and what-if of the report by hand, in every form that people read."""

import copy
import json

import pytest

from tests.train_drafter.test_forecast import COST, part
from tests.train_drafter.test_report import GREEDY, RATIO, arguments, hand_written, prompt, shown
from train_drafter import payoff, timings
from train_drafter.report import build_report, report_from_folder, save_evaluation
from train_drafter.report_html import html
from train_drafter.report_text import markdown

# Three prompts; the plain answer to the last is too short to time.
PLAIN = {"tokens": [10, 20, 3], "decode_s": [1.0, 2.5, 0.3], "prefill_s": [0.1, 0.3, 9.0]}
FAST = {"tokens": [10, 24, 3], "decode_s": [0.5, 2.0, 0.3], "prefill_s": [0.2, 0.4, 9.0]}


def test_a_speed_row_by_hand():
  row = timings.speed_row(["a", "b", "c"], FAST, PLAIN)
  assert row["pairs"] == 2
  # 10 and 8 tokens per second against 20 and 12: ratios 2 and 1.5.
  assert (row["plain_tokens_per_s"], row["speculative_tokens_per_s"]) == (9.0, 16.0)
  assert row["speedup"] == 1.75 and row["speedup_ci"] == [1.5, 2.0]
  assert row["speedup_pooled"] == pytest.approx((37 / 2.8) / (33 / 3.8))
  assert row["plain_time_per_output_token_s"] == pytest.approx((0.1 + 0.125) / 2)
  assert row["time_per_output_token_s"] == pytest.approx((1 / 20 + 1 / 12) / 2)
  assert (row["plain_prefill_s"], row["prefill_s"]) == pytest.approx((0.2, 0.3))
  assert row["samples"]["plain_decode_s"] == PLAIN["decode_s"]
  assert row["samples"]["tokens"] == FAST["tokens"]
  assert timings.too_short({"tokens": [7, 3]}) and not timings.too_short(PLAIN)


def timed(dtype="float32", scale=1.0, **changes):
  """A row of the speed section; `scale` makes all of it slower."""
  slower = lambda side: side | {k: [scale * s for s in side[k]] for k in ("decode_s", "prefill_s")}
  return {"dtype": dtype, "drafter": "small_lm", "temperature": 0.0, "batch_size": 1,
          "draft_cost": 0.4, "verify_cost": 1.2, "compile_s": 8.0, "plain_compile_s": 5.0,
          **timings.speed_row(["a", "b", "c"], slower(FAST), slower(PLAIN))} | changes


def test_every_figure_of_speed_follows_from_the_saved_seconds(tmp_path):
  """From evaluation.json as written, by a loop over prompts."""
  save_evaluation(tmp_path, **arguments(speed=[timed(), timed("bfloat16", 2.0)]))
  raw = json.loads((tmp_path / "evaluation.json").read_text())["speed"]
  report = report_from_folder(tmp_path)
  for row, given in zip(report["speed"], raw, strict=True):
    s = given["samples"]
    pairs = [(s["tokens"][k] / s["decode_s"][k], s["plain_tokens"][k] / s["plain_decode_s"][k])
             for k in range(3) if s["plain_tokens"][k] >= 8]
    middle = lambda values: sum(values) / 2  # of two
    assert row["speedup"] == pytest.approx(middle([a / b for a, b in pairs]))
    assert row["speculative_tokens_per_s"] == pytest.approx(middle([a for a, _ in pairs]))
    assert row["plain_tokens_per_s"] == pytest.approx(middle([b for _, b in pairs]))
    assert row["plain_time_per_output_token_s"] == pytest.approx(middle([1 / b for _, b in pairs]))


def test_the_fastest_plain_configuration_is_chosen_and_named():
  report = build_report(**arguments(
      speed=[timed("float32", 2.0), timed("bfloat16", 1.0, drafter="ngram")],
      provenance={"machine": {"backend": "cpu"}}))
  first, second = report["plain"]
  assert (first["dtype"], first["fastest"], second["fastest"]) == ("bfloat16", True, False)
  assert first["tokens_per_s"] == 9.0 and first["compile_s"] == 5.0
  line = ("the fastest plain configuration on this backend (cpu): bfloat16, batch 1, "
          "9.0 tokens/s; slower: float32, batch 1, 4.5 tokens/s")
  for text in (shown(report), markdown(report), html(report)):
    assert line in text
  # A drafter of the slower dtype is held against it too, on the same prompts.
  slow = build_report(**arguments(speed=[timed("float32", 0.9, plain_tokens_per_s=1.0),
                                         timed("bfloat16", 1.0)]))["headline"]
  assert (slow["dtype"], slow["plain_dtype"]) == ("float32", "bfloat16")
  assert slow["speedup"] == pytest.approx(1.75 / 0.9)
  assert slow["speedup_ci"] == pytest.approx([1.5 / 0.9, 2 / 0.9])


def test_times_stand_in_every_form():
  report = build_report(**arguments(speed=[timed(compile_saved_s=6.5)]))
  page = markdown(report)
  assert "| float32 | plain (fastest) |  | 9.0 | 1.00 | 112.5 | 200.0 | 5.0 | – |" in page
  assert "|  | small_lm | 0 | 16.0 | 1.78 | 66.7 | 300.0 | 8.0 | 6.5 |" in page
  words = shown(report).split()
  at = words.index("(fastest)")
  assert words[at - 2:at + 6] == [
      "float32", "plain", "(fastest)", "9.0", "1.00", "112.5", "200.0", "5.0"]
  assert "plain (fastest)" in html(report)
  old = {k: v for k, v in timed().items() if "prefill" not in k and "compile" not in k
         and "time_per" not in k and k != "samples"}
  report = build_report(**arguments(speed=[old]))
  assert report["speed"][0]["prefill_s"] is None and "## Times" not in markdown(report)


def predicted(measured=(4, 2, 0), pooled=1.15):
  cost = copy.deepcopy(COST)
  cost["measured"][0]["speedup_pooled"] = pooled
  return build_report(**arguments(
      replay=[part(measured=measured)], costs=[cost], draft_len=5, speed=[]))


def test_replay_and_prediction_stand_in_the_terminal_and_on_the_page():
  """K = 1 takes 9 rounds for 12 tokens and K = 2 takes 6; uniform anchors say 2.5."""
  report = predicted()
  page = markdown(report)
  row = next(line for line in page.splitlines() if line.startswith("| 0 | greedy | 2 "))
  assert "| 2.00 (" in row and row.endswith("| 2.00 | yes | +0.000 | 2.50 | +0.50 |")
  assert ("agrees at T=0, greedy, K=2: replay 2.000, decoding 2.000, difference +0.000"
          in shown(report))
  # S(1) = 12/9 / 1.2, timed alone 8/6 / 1.2 = 1.11 against the measured 1.15.
  assert ("| float32 | 1 | 1.11 | 1.20 (1.10–1.30) |  | 1.33 | 0.10 | 1.10 | 1.11 | 1.15 | -3 |"
          in page)
  for text in (shown(report), page):
    assert "float32: choose K = 2 (S 1.18)" in text
    assert "predicted within 10 % of the measured speed-up at K = 1" in text
    assert "DISAGREES" not in text and "OFF" not in text


def test_what_does_not_agree_is_loud():
  report = predicted(measured=(6, 3, 0), pooled=2.0)
  page = markdown(report)
  assert "- **DISAGREES at T=0, greedy, K=2: replay 2.000, decoding 1.333" in page
  assert "- **OFF in float32 at K=1: predicted -44 % from the measured speed-up**" in page
  assert '<div class="loud"><ul><li>DISAGREES' in html(report)
  assert any("DISAGREE" in line for line in report["warnings"])


def test_a_rule_without_an_estimate_is_named():
  records = hand_written()
  records["small_lm"][(1.0, "block")] = records["small_lm"][RATIO]
  report = build_report(**arguments(records=records, replay=[part()]))
  assert "the rule block has no replay estimate" in markdown(report)


def test_categories_stand_in_order_of_tau():
  rows = lambda **a: [prompt(c, c, [n]) for c, n in a.items()]
  records = {"small_lm": {GREEDY: rows(structured=1, qa=4, creative=2),
                          RATIO: rows(structured=3, qa=0, creative=1)}}
  report = build_report(**arguments(records=records))
  for text, edge in ((markdown(report), "| "), (shown(report), "")):
    places = [text.index(f"\n{edge}{name} ") for name in ("qa", "creative", "structured")]
    assert places == sorted(places)


def test_the_target_as_its_own_drafter():
  records = hand_written()
  records["self"] = {GREEDY: [prompt("code-1", "code", [5, 5, 5]), prompt("qa-1", "qa", [5, 4])]}
  report = build_report(**arguments(records=records))
  for text in (markdown(report), shown(report), html(report)):
    assert "self (the target drafts for itself" in text and "96.0 % accepted, 2 prompts)" in text
  assert not any("its own drafts" in w for w in report["warnings"])
  records["self"] = {GREEDY: [prompt("code-1", "code", [5, 2, 0])]}
  report = build_report(**arguments(records=records))
  assert ("at T=0 the target accepted only 47 % of its own drafts: rounding does not explain that"
          in report["warnings"])


# --- where speculation pays


def costs(**axes):
  def one(axis, size, K, c, v, step):
    return {axis: size, "draft_len": K, "plain_step_s": step, "draft_cost": c, "verify_cost": v}

  batches = [one("batch", 1, 1, 0.25, 1.0, 0.01), one("batch", 1, 2, 0.5, 1.1, 0.01),
             one("batch", 8, 1, 0.3, 2.0, 0.04), one("batch", 8, 2, 0.6, 3.0, 0.04)]
  return {**COST, "batches": batches,
          "contexts": [one("context", 99, 2, 0.5, 1.0, 0.02)]} | axes


def test_measured_payoff_by_hand():
  found = payoff.measured([costs()], {1: 1.5, 2: 2.0}, 2)
  one, two, wide, wider = found["batches"]
  assert (one["speedup"], two["speedup"]) == (1.5 / 1.25, 2.0 / 1.6)
  assert (one["chosen"], two["chosen"]) == (False, True)
  assert (wide["chosen"], wider["chosen"]) == (True, False) and wide["speedup"] == 1.5 / 2.3
  assert wide["plain_tokens_per_s"] == 8 / 0.04
  assert wide["tokens_per_s"] == pytest.approx(200 * 1.5 / 2.3)
  behind, = found["contexts"]
  assert behind["context"] == 99 and behind["plain_tokens_per_s"] == 50
  assert payoff.lines(found) == [
      "float32, best by sequences decoded together: 1: K = 2, S 1.25; "
      "8: plain decoding (S 0.65 at best)",
      "float32, best by tokens of context: 99: K = 2, S 1.33"]


def test_costs_of_earlier_runs_have_the_reports_draft_length():
  old = [{"batch": 4, "plain_step_s": 0.1, "draft_cost": 0.5, "verify_cost": 1.5}]
  row, = payoff.measured([costs(batches=old, contexts=())], {5: 3.0}, 5)["batches"]
  assert (row["draft_len"], row["speedup"]) == (5, 1.5)
  unknown, = payoff.measured([costs(batches=old, contexts=())], {}, 5)["batches"]
  assert unknown["speedup"] is None and not unknown["chosen"]


def test_measured_payoff_stands_in_every_form():
  report = build_report(**arguments(replay=[part()], costs=[costs()], speed=[]))
  assert report["whatif"]["measured"]["batches"][0]["tau"] == pytest.approx(12 / 9)
  page = markdown(report)
  assert "| float32 | 8 | 2 | 0.56 |  | 111.1 | 200.0 | 0.60 | 3.00 | 40.0 |" in page
  assert "| float32 | 8 | 1 | 0.58 | plain | " in page
  assert "| float32 | 1 | 2 | 1.25 | yes | " in page
  assert "best by tokens of context: 99: K = 2, S 1.33" in shown(report)
  assert "By sequences decoded together" in html(report)
