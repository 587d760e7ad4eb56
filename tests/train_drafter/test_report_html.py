"""The page: whole, self-contained, escaped, and without a figure that the report does not hold."""

import copy
import json
import re
from html.parser import HTMLParser

import pytest

from tests.train_drafter.test_report import GREEDY, IDENTITY, RATIO, arguments, many, prompt
from train_drafter import report_elements, report_plots
from train_drafter.report import build_report, write_report
from train_drafter.report_html import html

VOID = {"meta", "link", "br", "use", "path"}


class Page(HTMLParser):
  """Visible text outside plots, attributes, and whether every element is closed in order."""

  def __init__(self, text):
    super().__init__()
    self.open, self.text, self.tags, self.attributes, self.ids = [], [], [], [], []
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += [(tag, *pair) for pair in attrs]
    self.ids += [value for name, value in attrs if name == "id"]
    if tag not in VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.handle_starttag(tag, attrs)
    if tag not in VOID:
      self.open.pop()

  def handle_endtag(self, tag):
    if tag not in VOID:
      assert self.open.pop() == tag

  def handle_data(self, data):
    if not {"svg", "style"} & set(self.open):
      self.text.append(data)

  @property
  def words(self):
    return " ".join(" ".join(self.text).split())


OPTIONAL = {
  "costs": [{"dtype": dtype, "prompts": ["code-1"], "plain_step_s": 0.016, "verify": [1.0, 1.37],
             "draft": [0.125], "draft_lens": [1], "measured": [], "batches": [], "contexts": []}
            for dtype in ("float32", "bfloat16")],
  "replay": [{"temperature": 1.0, "rule": "ratio", "draft_len": k, "prompts": 3, "tau": 2.125 + k,
              "tau_ci": [2.0 + k, 2.25 + k], "uniform_anchor": 3.11 + k, "bias": 0.91,
              "survival": [0.77] * k, "measured": 2.2 + k,
              "measured_ci": [2.1 + k, 2.3 + k], "difference": 0.075,
              "difference_ci": [-0.01 if k == 1 else 0.02, 0.16], "agrees": k == 1,
              "decisions": None, "verdict": "agrees" if k == 1 else "disagrees"}
             for k in (1, 3)],
  "prediction": [{"dtype": "bfloat16", "temperature": 0.0, "draft_len": k, "tau": 1.5,
                  "tau_timed": 1.6, "draft_cost": 0.125 * k, "verify_cost": 1.37, "speedup": 1.77,
                  "speedup_timed": 1.81, "measured": 1.2 if k == 1 else None,
                  "measured_ci": [1.1, 1.3] if k == 1 else [None, None],
                  "measured_pooled": 1.21 if k == 1 else None,
                  "error": 0.5 if k == 1 else None, "chosen": k == 2} for k in (1, 2, 3)],
  "memory": {"target": {"dtype": "bfloat16", "parameter_bytes": 3 << 29, "parameters": 135 * 10**6,
                        "cache_bytes_per_token": 2048.0},
             "drafter": {"kind": "eagle3", "parameters": 10**7, "trained_parameters": 5 * 10**6,
                         "parameter_bytes": 1 << 20, "cache_bytes_per_token": 256.0},
             "features_per_token": 96, "features_bytes_per_token": 384,
             "cache_tokens_displaced": 512.0, "peak_device_bytes": None},
  "whatif": {
    "measured": {
      "batches": [{"dtype": "bfloat16", "batch": b, "draft_len": 3, "plain_step_s": 0.016 * b,
                   "draft_cost": 0.5, "verify_cost": 1.5, "tau": 2.5, "speedup": 1.25 / b,
                   "plain_tokens_per_s": 62.5, "tokens_per_s": 78.125 / b, "chosen": True}
                  for b in (1, 2)],
      "contexts": []},
    "accelerators": [
      {"name": name, "bandwidth": 273e9, "peak_flops": 125e12, "memory": 128e9,
       "plain_tokens_per_s": plain, "cache_tokens": 61e6, "cache_tokens_with_drafter": None,
       "rows": [{"batch": b, "context": c, "plain_tokens_per_s": 7.5, "tokens_per_s": 14.25,
                 "speedup": 1.9, "draft_len": 3} for b in (1, 8) for c in (5, 7)]}
      for name, plain in (("GB10", 8.8), ("TPU", None))],
    "dense": {"weight_bytes": 31e9, "drafter_share": 0.125, "rows": [
      {"name": "GB10", "fits": True, "plain_tokens_per_s": 8.81, "draft_len": 3, "tau": 2.5,
       "tokens_per_s": 19.6, "tau_2": 15.7, "tau_3": 23.5}]},
    "experts": [{"name": "mix", "experts": 64, "per_token": 8,
                 "by_tokens": {"1": 8.0, "6": 35.2}}]},
}


def page_of(**changes):
  report = {**build_report(**arguments(**changes)), **OPTIONAL}
  return report, Page(html(report))


def test_the_page_is_whole_and_asks_for_nothing():
  report, page = page_of()
  assert not page.open
  assert "script" not in page.tags and "iframe" not in page.tags
  assert len(page.ids) == len(set(page.ids))
  for tag, name, value in page.attributes:
    if name in ("src", "href", "xlink:href", "action"):
      assert value.startswith("#") or value == "data:,", (tag, name, value)
  text = html(report)
  assert "url(http" not in text and "@import" not in text
  for heading in ("Acceptance", "By category", "By position", "Controls", "Replay estimate",
                  "Speed", "Predicted speed-up", "Memory", "Where speculation pays", "Identity",
                  "Definitions", "Provenance"):
    assert heading in page.words
  # By category and position twice; replay; S and costs of two dtypes; batches, roofline, experts.
  assert page.tags.count("svg") == 2 + 2 + 1 + 3 + 3


def test_sections_that_the_report_lacks_do_not_appear():
  page = Page(html(build_report(**arguments())))
  for heading in ("Replay estimate", "Predicted speed-up", "Memory", "Where speculation pays",
                  "Training estimate"):
    assert heading not in page.words


def test_every_warning_appears_in_full():
  records = {"small_lm": {GREEDY: many(lambda i: [int(i % 8 == 0)] * 4)},
             "untrained": {GREEDY: many(lambda i: [int(i % 10 == 0)] * 4, 12)}}
  broken = [{**IDENTITY[0], "identical_same_shape": 0.75}]
  report, page = page_of(records=records, identity=broken,
                         training_estimate={"temperature": 1.0, "tau": 9.0})
  assert len(report["warnings"]) >= 4
  for line in report["warnings"]:
    assert line in page.words
  assert "Warnings" not in Page(html({**report, "warnings": []})).words


def test_text_is_escaped_everywhere():
  """One hostile text in every place of the report that holds a string."""
  evil = '<script>alert("x")</script> & $\\frac{1}{0}$'
  records = {"small_lm": {GREEDY: [prompt("a", evil, [1]), prompt("b", evil, [2])]},
             evil: {GREEDY: [prompt("a", evil, [1]), prompt("b", evil, [2])]}}
  report = build_report(**arguments(
      records=records, target=evil, provenance={evil: evil, "config": {evil: [evil]}}))
  report |= copy.deepcopy(OPTIONAL)
  report["warnings"], report["definitions"] = [evil], {evil: evil}
  report["prediction"][0]["dtype"] = report["whatif"]["experts"][0]["name"] = evil
  report["memory"]["target"]["dtype"] = report["memory"]["drafter"]["kind"] = evil
  report["whatif"]["accelerators"][0]["name"] = report["replay"][0]["rule"] = evil
  report["whatif"]["dense"]["rows"][0]["name"] = evil
  report["whatif"]["measured"]["batches"][0]["dtype"] = evil
  page = Page(html(report))
  assert not page.open and "script" not in page.tags
  assert page.words.count('<script>alert("x")</script>') >= 18


def allowed(value, found):
  """Every way in which the page may write a number of the report."""
  if isinstance(value, dict):
    for name, inner in value.items():
      allowed(name, found)
      allowed(inner, found)
  elif isinstance(value, list):
    for inner in value:
      allowed(inner, found)
  elif isinstance(value, str):
    found.update(re.findall(r"\d+(?:\.\d+)*", value))
  elif isinstance(value, int | float) and not isinstance(value, bool):
    scales = [1, 100, 1000, *(1 / base**power for base in (1000, 1024) for power in range(1, 5))]
    for scale in scales:
      shown = value * scale
      found.update(f"{shown:{form}}" for form in (".0f", ".1f", ".2f", ".3f", "g", "#.3g", ".4g"))
    found.add(str(value))


def test_every_figure_on_the_page_is_one_of_the_report():
  report, page = page_of(training_estimate={"temperature": 1.0, "tau": 9.0},
                         provenance={"jax": "0.0", "config": {"train": {"lr": 0.003}}})
  found = {"95"}  # of the intervals
  allowed(report, found)
  found |= {str(k) for k in range(1, report["draft_len"] + 1)}  # positions
  found |= {"10"}  # how close is close
  text = re.sub(r"v\(K\+1\)", "", page.words)
  figures = re.findall(r"\d+(?:\.\d+)*", text)
  assert len(figures) > 200
  assert sorted(set(figures) - found) == []


def test_the_figures_are_where_a_reader_looks_for_them():
  report, page = page_of()
  assert "τ at T=0, greedy 2.67 (" in page.words
  assert "small_lm, 3 prompts, 6 rounds" in page.words
  assert ("best speed-up: ngram, float32 2.00 (1.90–2.10) against the fastest plain decoding: "
          "float32, 20.5 tokens/s") in page.words
  # T=0, qa: tau 3/2, acceptance 1/10, mean 3/2, no EOS, no loops, controls 1.5 and 1, one prompt.
  assert "qa 1.50 10.0 1.50 0.0 0.0 1.50 1.00 1 " in page.words
  # All: 16/6; 11/28; mean of 10/3, 3, 3/2; one of six rounds was cut by EOS.
  interval = "{:.2f}–{:.2f}".format(*report["settings"][0]["all"]["tau_ci"])
  assert f"all 2.67 ({interval}) 39.3 2.61 16.7 0.0 2.67 1.00 3" in page.words
  # Replay at K = 1 and 3: 2.125 + K, anchors 3.11 + K off by 0.91 from the decoded 2.2 + K.
  assert "1 ratio 1 3.12 (3.00–3.25) 3.20 yes +0.075 4.11 +0.91" in page.words
  assert "1 ratio 3 5.12 (5.00–5.25) 5.20 NO +0.075 6.11 +0.91" in page.words
  assert "DISAGREES at T=1, ratio, K=3: replay 5.125, decoding 5.200" in page.words
  assert "agrees at T=1, ratio, K=1" in page.words
  assert "bfloat16 1 1.77 1.20 (1.10–1.30) 1.50 0.12 1.37 1.81 1.21 +50" in page.words
  assert "bfloat16 2 1.77 – yes 1.50" in page.words
  assert "bfloat16: choose K = 2 (S 1.77)" in page.words
  assert "OFF in bfloat16 at K=1: predicted +50 % from the measured speed-up" in page.words
  assert "target bfloat16 135 M – 1.50 GiB 2.00 KiB" in page.words
  assert "take the room of 512 tokens of the target's cache, and its own cache adds 256 B" in (
      page.words)
  assert "features that the drafter reads: 96 numbers, 384 B of each" in page.words
  assert "peak device memory: this backend does not tell" in page.words
  assert "0.77" not in page.words  # lists by position are for programs
  assert "bfloat16 1 3 1.25 yes 78.1" in page.words
  assert "bfloat16 2 3 0.62 plain 39.1 62.5 0.50 1.50 32.0" in page.words
  assert "1: K = 3, S 1.25; 2: plain decoding (S 0.62 at best)" in page.words
  assert "GB10 8.8 7.5 14.2 1.90 3 61 M – 273 GB/s 125 TFLOP/s 128 GB TPU" in page.words
  assert "GB10 8.8 3 2.50 19.6 15.7 23.5 yes" in page.words
  assert "mix 64 8 8.0 35.2" in page.words


def test_categories_stand_in_order_of_tau_at_each_setting():
  rows = lambda **a: [prompt(c, c, [n]) for c, n in a.items()]
  records = {"small_lm": {GREEDY: rows(structured=1, qa=4, creative=2),
                          RATIO: rows(structured=3, qa=0, creative=1)}}
  words = page_of(records=records)[1].words
  parts = words[words.index("T=0, greedy Bars"):].split("T=1, ratio Bars")
  orders = [re.findall(r"(structured|qa|creative) \d", part) for part in parts]
  assert orders[0][:3] == ["qa", "creative", "structured"]
  assert orders[1][:3] == ["structured", "creative", "qa"]


def test_missing_values_have_a_dash_not_a_crash():
  """One prompt without rounds: nothing is defined."""
  records = {"small_lm": {GREEDY: [{**prompt("a", "qa", [], reason="eos"), "tokens": [2]}]}}
  report, page = page_of(records=records, speed=[], identity=[])
  assert report["settings"][0]["all"]["tau"] is None
  assert "Speed was not measured." in page.words and "qa – – – – 0.0 1" in page.words


def test_written_beside_the_report(tmp_path):
  report = build_report(**arguments())
  write_report(report, tmp_path)
  assert (tmp_path / "report.html").read_text() == html(report)
  assert html(json.loads((tmp_path / "report.json").read_text())) == html(report)


def test_prompt_hashes_are_for_programs():
  page = Page(html(build_report(**arguments(provenance={"prompt_hashes": {"code-1": "abcdef"}}))))
  assert "abcdef" not in page.words


@pytest.mark.parametrize("value, text", [
  (None, "–"), (True, "yes"), (False, "no"), (0, "0"), (0.0, "0"), (12, "12"), (2.0, "2.00"),
  (0.0123, "0.0123"), (1234.5, "1234"), (273e9, "273 G"), ([1, 2.5], "1, 2.50"), ("a", "a"),
])
def test_values_of_free_form_sections(value, text):
  assert report_elements.cell(value) == text


def test_bytes():
  assert report_elements.scaled(3 << 29, True) == "1.50 GiB"
  assert report_elements.scaled(100, True) == "100 B"


def test_plots_take_their_colours_from_the_page():
  svg = report_plots.lines([("a", [1, 2], [1, None], None)], "x", "y", "one")
  assert "#" not in re.sub(r"(url\(#|href=\"#)\w+", "", svg)
  css = report_plots.css_variables(False)
  for name in set(re.findall(r"var\((--c\d)\)", svg)):
    assert f"{name}:" in css
