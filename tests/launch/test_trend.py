"""The line through tau against the amount of data."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from launch import trend
from train_drafter import manifest


def test_a_line_is_found():
  tokens = np.asarray([1000, 2000, 4000, 8000])
  found = trend.fit(tokens, 1.0 + 0.1 * np.log2(tokens))
  assert (found.gain, found.level) == (pytest.approx(0.1), pytest.approx(1.0))
  assert found.interval == (pytest.approx(0.1), pytest.approx(0.1))


def test_the_interval_is_that_of_a_regression():
  rng = np.random.default_rng(0)
  tokens = rng.uniform(1e3, 1e6, 12)
  tau = 1 + 0.05 * np.log2(tokens) + rng.normal(0, 0.1, 12)
  found, known = trend.fit(tokens, tau), stats.linregress(np.log2(tokens), tau)
  half = stats.t.ppf(0.975, 10) * known.stderr
  assert found.gain == pytest.approx(known.slope) and found.level == pytest.approx(known.intercept)
  assert found.interval == (pytest.approx(known.slope - half), pytest.approx(known.slope + half))


def test_what_no_line_can_be_drawn_through():
  assert trend.fit([], []) is None and trend.fit([5, 5], [1, 2]) is None
  assert trend.fit([2, 4], [1.0, 1.5]).interval is None


def test_the_text_of_a_sweep(tmp_path):
  def run(name, tokens, tau):
    folder = tmp_path / name
    for stage, counts in [("generate", {"answer_tokens": tokens}), ("train", {"epochs": 2.0})]:
      opened = manifest.begin(folder / stage, stage=stage, config={})
      manifest.finish(folder / stage, opened, counts)
    (folder / "evaluate").mkdir()
    group = {"tau": tau, "tau_ci": [tau - 0.05, tau + 0.05]}
    (folder / "evaluate" / "report.json").write_text(
      json.dumps({"settings": [{"temperature": 1.0, "all": {"tau": 9.0, "tau_ci": [9, 9]}},
                               {"temperature": 0.0, "all": group}]}))
    return folder

  runs = {n: run(n, t, v) for n, t, v in [("b", 2000, 1.2), ("a", 1000, 1.1), ("c", 4000, 1.31)]}
  text = trend.tau_against_tokens(runs)
  lines = text.splitlines()
  assert [line.split()[-1] for line in lines[1:4]] == ["a", "b", "c"]  # by their tokens
  assert "1,000" in lines[1] and "1.100" in lines[1] and "2.0" in lines[1]
  assert "tau gains +0.105 for each doubling of the tokens (95 % " in text
  assert "no trend" not in text
  drawing = trend.curve(runs)
  assert ElementTree.fromstring(drawing).tag.endswith("svg") and drawing == trend.curve(runs)
  for said in ("answer tokens", "1,000", "2,000", "4,000", "+0.105 for each doubling"):
    assert said in drawing
  assert "each doubling" not in trend.curve({"a": runs["a"]}) and "<svg" in trend.curve({})
  flat = [("d", 1000, 1.2), ("e", 2000, 1.1), ("f", 4000, 1.2)]
  flat = {name: run(name, tokens, tau) for name, tokens, tau in flat}
  assert "no trend can be told" in trend.tau_against_tokens(flat)
