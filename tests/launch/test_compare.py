"""Runs side by side: from hand-written evaluation folders to the page, and what is refused."""

import csv
import io
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from rich.console import Console

from launch import compare as lib
from launch.compare import compare, load
from spec_jax.errors import UserError
from spec_jax.records import RowRecords
from train_drafter.report import save_evaluation
from train_drafter.report_text import print_table

GREEDY, RATIO = (0.0, "greedy"), (1.0, "ratio")
CATEGORIES = ("code", "qa")


def rows(accepted_of, count=24, k=5):
  """Prompts p0, p1, ... of alternating categories; accepted_of(i) gives the accepted drafts."""
  out = []
  for i in range(count):
    accepted = accepted_of(i)
    emitted = [a + 1 for a in accepted]
    out.append({"id": f"p{i}", "category": CATEGORIES[i % 2],
                "tokens": list(range(1 + sum(emitted))),
                "records": RowRecords([k] * len(accepted), accepted, emitted, "length")})
  return out


def base_rows(i):
  return [i % 4, (i * 7) % 3, i % 2]


def better_rows(i):
  return [a + 1 for a in base_rows(i)]


def run_folder(path, accepted_of=base_rows, settings=(GREEDY, RATIO), count=24, weights="w" * 64,
               hashes=True, inner=True, drafter="small_lm", found=None, dtype="bfloat16",
               **changes):
  found = rows(accepted_of, count) if found is None else found
  measured = {"target": "demo", "drafter": drafter, "draft_len": 5, "max_new_tokens": 128,
              "seed": 0, "identity": [], "training_estimate": [],
              "speed": [{"dtype": "float32", "drafter": drafter, "plain_tokens_per_s": 20.0,
                         "speculative_tokens_per_s": 24.0, "speedup": 1.2,
                         "speedup_ci": [1.1, 1.3], "draft_cost": 0.4, "verify_cost": 1.25},
                        {"dtype": "float32", "drafter": "ngram", "plain_tokens_per_s": 20.0,
                         "speculative_tokens_per_s": 99.0, "speedup": 4.9,
                         "speedup_ci": [4.8, 5.0], "draft_cost": 0.0, "verify_cost": 1.25}],
              "provenance": {"target_weights": weights, "dtype": dtype, "prompt_hashes": {
                  r["id"]: f"hash-{r['id']}" for r in found} if hashes else {}}, **changes}
  folder = path / "evaluate" if inner else path
  save_evaluation(folder, records={drafter: {key: found for key in settings},
                                   "ngram": {key: found for key in settings}}, **measured)
  return str(path)


def find(found, category="all", key=GREEDY, run=None):
  return next(r for r in found["differences"] if r["category"] == category
              and (r["temperature"], r["rule"]) == key and run in (None, r["run"]))


def test_identical_runs_differ_by_nothing(tmp_path):
  found = compare(load([run_folder(tmp_path / n) for n in "ab"]))
  assert found["notes"] == [] and found["baseline"] == "a"
  assert len(found["differences"]) == found["count"] == 2 * 3  # settings x (all, code, qa)
  for row in found["differences"]:
    assert row["difference"] == 0 and row["difference_ci"] == [0, 0]
    assert row["p"] == row["p_holm"] == 1 and row["significant"] is False
    assert (row["better"], row["worse"]) == (0, 0)


def test_a_shift_is_found_with_its_size(tmp_path):
  """Every round accepts one more: tau rises by exactly one on every set of prompts."""
  found = compare(load([run_folder(tmp_path / "a"), run_folder(tmp_path / "b", better_rows)]))
  for row in found["differences"]:
    assert row["difference"] == pytest.approx(1)
    assert row["difference_ci"] == pytest.approx([1, 1])
    assert row["significant"] and row["p_holm"] >= row["p"]
    assert row["better"] == row["prompts"]
  by_hand = sum(a + 1 for i in range(24) for a in base_rows(i)) / (3 * 24)
  assert find(found)["baseline_tau"] == pytest.approx(by_hand)
  code = sum(a + 1 for i in range(0, 24, 2) for a in base_rows(i)) / (3 * 12)
  assert find(found, "code")["baseline_tau"] == pytest.approx(code)
  # The other way round the sign turns.
  turned = compare(load([str(tmp_path / "b"), str(tmp_path / "a")]))
  assert find(turned)["difference"] == pytest.approx(-1)


def test_pairs_are_made_by_name_not_by_place(tmp_path):
  shuffled = [rows(better_rows)[i] for i in np.random.default_rng(0).permutation(24)]
  found = compare(load([run_folder(tmp_path / "a"), run_folder(tmp_path / "b", found=shuffled)]))
  assert find(found)["better"] == 24
  assert find(found)["difference_ci"] == pytest.approx([1, 1])


def test_more_comparisons_make_the_mark_harder_to_get(tmp_path):
  """Seven prompts, six better, one equal: p = 2/64 alone; among three runs and settings no more."""
  slightly = lambda i: [1, 1] if i else [0, 0]
  one = [{**r, "category": "qa"} for r in rows(slightly, 7)]
  flat = [{**r, "category": "qa"} for r in rows(lambda i: [0, 0], 7)]
  runs = [run_folder(tmp_path / "a", settings=(GREEDY,), found=flat)]
  runs += [run_folder(tmp_path / n, settings=(GREEDY,), found=one) for n in "bcd"]
  loaded = load(runs)
  alone, among = compare(loaded[:2]), compare(loaded)
  assert find(alone)["p"] == find(among, run="b")["p"] == pytest.approx(2 / 64)
  assert alone["count"] == 2 and among["count"] == 6
  assert find(alone)["p_holm"] == pytest.approx(2 * 2 / 64)
  assert find(among, run="b")["p_holm"] == pytest.approx(6 * 2 / 64)
  # With a p-value between: significant as one of two, not as one of six.
  eight = [{**r, "category": "qa"} for r in rows(lambda i: [1, 1] if i else [0, 0], 8)]
  zero = [{**r, "category": "qa"} for r in rows(lambda i: [0, 0], 8)]
  runs = [run_folder(tmp_path / "e", settings=(GREEDY,), found=zero)]
  runs += [run_folder(tmp_path / n, settings=(GREEDY,), found=eight) for n in "fgh"]
  loaded = load(runs)
  assert find(compare(loaded[:2]))["significant"] is True
  assert find(compare(loaded), run="f")["significant"] is False
  assert "among the 6 differences" in lib.markdown(compare(loaded))


@pytest.mark.parametrize("changes, message", [
  ({"weights": "v" * 64}, "target weights: wwwwwwwwwwww in a, vvvvvvvvvvvv in b"),
  ({"draft_len": 6}, "K: 5 in a, 6 in b"),
  ({"max_new_tokens": 64}, "max_new_tokens: 128 in a, 64 in b"),
  ({"seed": 1}, "seed: 0 in a, 1 in b"),
  ({"dtype": "float32"}, "dtype of the target: bfloat16 in a, float32 in b"),
  ({"settings": (GREEDY,)}, "temperatures and rules: T=0 greedy, T=1 ratio in a, T=0 greedy in b"),
  ({"settings": (GREEDY, (1.0, "block"))}, "rules: T=0 greedy, T=1 ratio in a, T=0 greedy, T=1 b"),
  ({"count": 20}, "prompts: 4 of 24 only in a, such as 'p20'"),
  ({"count": 26}, "prompts: 2 of 26 only in b, such as 'p24'"),
  ({"provenance": {"prompt_hashes": {f"p{i}": f"hash-p{i + (i == 3)}" for i in range(24)}}},
   "prompts: 1 have other tokens in b than in a, such as 'p3'"),
  ({"found": [{**r, "category": "qa"} for r in rows(base_rows)]},
   "prompts: 'p0' is code in a, qa in b"),
  ({"weights": "", "target": "else"}, "target: demo in a, else in b"),
])
def test_what_differs_is_refused_by_name(tmp_path, changes, message):
  runs = load([run_folder(tmp_path / "a"), run_folder(tmp_path / "b", **changes)])
  with pytest.raises(UserError, match="runs cannot be compared: ") as error:
    compare(runs)
  assert message in str(error.value) and "--allow_different" in str(error.value)
  assert "\n" not in str(error.value)
  found = compare(runs, allow_different=True)
  assert any(message in note for note in found["notes"])
  assert f"> Note: {found['notes'][0]}" in lib.markdown(found)


def test_the_same_drafter_twice_is_said(tmp_path):
  runs = [run_folder(tmp_path / n, provenance={"drafter_files": own, "prompt_hashes": {"p0": "h"}})
          for n, own in (("a", "x"), ("b", "y"), ("c", "x"))]
  assert compare(load(runs))["notes"] == ["c: the very drafter of a, by the hash of its files"]
  twice = compare(load([runs[0], runs[0]]))
  assert twice["notes"] == ["a (2): the very drafter of a (1), by the hash of its files"]
  assert all(row["difference"] == 0 and not row["significant"] for row in twice["differences"])


def test_a_prompt_that_stands_twice_is_refused(tmp_path):
  twice = [*rows(base_rows), rows(base_rows)[3]]
  with pytest.raises(UserError, match="prompt 'p3' stands 2 times under T=0, greedy"):
    load([run_folder(tmp_path / "a"), run_folder(tmp_path / "b", found=twice)])


@pytest.mark.parametrize("changes, message", [
  ({"draft_len": "5"}, "evaluation.json: draft_len must be a whole number of at least 0, got '5'"),
  ({"speed": [{"dtype": "float32"}]}, r"evaluation.json: speed\[0\].drafter is missing"),
  ({"provenance": 3}, "evaluation.json: provenance must be an object or null, got 3"),
])
def test_damaged_measurements_are_named(tmp_path, changes, message):
  with pytest.raises(UserError, match=message):
    load([run_folder(tmp_path / "a"), run_folder(tmp_path / "b", **changes)])


def test_only_what_is_shared_is_compared_when_told_to(tmp_path):
  hashes = {f"p{i}": f"hash-p{i + (i == 3)}" for i in range(20)}
  runs = load([run_folder(tmp_path / "a"), run_folder(
      tmp_path / "b", better_rows, settings=(GREEDY, (0.5, "ratio")), count=20, draft_len=7,
      provenance={"target_weights": "w" * 64, "prompt_hashes": hashes})])
  found = compare(runs, allow_different=True)
  assert found["settings"] == [GREEDY]
  assert find(found)["prompts"] == 19  # of 20 shared names one has another text
  by_hand = sum(a + 1 for i in range(20) if i != 3 for a in base_rows(i)) / (3 * 19)
  assert find(found)["baseline_tau"] == pytest.approx(by_hand)
  assert any(note.startswith("K: 5 in a, 7 in b") for note in found["notes"])
  assert "compared are the 19 prompts and T=0 greedy that all runs share" in found["notes"]


def test_nothing_shared_is_an_error_even_when_told_to(tmp_path):
  elsewhere = [{**r, "id": f"q{i}"} for i, r in enumerate(rows(base_rows))]
  runs = load([run_folder(tmp_path / "a"), run_folder(tmp_path / "b", found=elsewhere)])
  with pytest.raises(UserError, match="share no prompts"):
    compare(runs, allow_different=True)
  runs = load([run_folder(tmp_path / "c"), run_folder(tmp_path / "d", settings=((0.5, "ratio"),))])
  with pytest.raises(UserError, match="share no temperature and rule"):
    compare(runs, allow_different=True)


def test_runs_without_hashes_are_compared_with_a_note(tmp_path):
  found = compare(load([run_folder(tmp_path / "a"), run_folder(tmp_path / "b", hashes=False)]))
  assert found["notes"] == ["that the prompts' texts are equal was taken from their names alone: "
                            "no hashes in b"]


def test_folders_and_names(tmp_path):
  run_folder(tmp_path / "x" / "one")
  run_folder(tmp_path / "y" / "one")
  run_folder(tmp_path / "bare", inner=False)
  runs = load([str(tmp_path / "x" / "one"), str(tmp_path / "y" / "one" / "evaluate"),
               str(tmp_path / "bare")])
  assert [run.label for run in runs] == ["x/one", "y/one", "bare"]
  twice = load([str(tmp_path / "bare")] * 2)
  assert [run.label for run in twice] == ["bare (1)", "bare (2)"]
  with pytest.raises(UserError, match="nowhere: holds no evaluation"):
    load([str(tmp_path / "nowhere"), str(tmp_path / "bare")])
  with pytest.raises(UserError, match="no records of the drafter 'other'"):
    save_evaluation(tmp_path / "z", records={"ngram": {GREEDY: rows(base_rows)}}, target="demo",
                    drafter="other", draft_len=5, max_new_tokens=128)
    load([str(tmp_path / "z")])


def test_what_is_written(tmp_path):
  found = compare(load([run_folder(tmp_path / "a"), run_folder(tmp_path / "b|c", better_rows),
                        run_folder(tmp_path / "d", drafter="eagle3")]))
  lib.write(found, tmp_path / "out")
  page = (tmp_path / "out" / "compare.md").read_text()
  assert "# τ of 3 runs, baseline a" in page
  assert "| b\\|c | small_lm | 3.00 (" in page
  assert "+1.000 (+1.000 to +1.000) *" in page and "+0.000 (+0.000 to +0.000) |" in page
  assert "24/0/0" in page and "0/24/0" in page
  assert "Holm-adjusted p below 0.05 among the 12 differences" in page
  assert "| b\\|c | float32 | 0 | 20.0 | 24.0 | 1.20 (1.10 to 1.30) | 0.40 | 1.25 |" in page
  assert "99.0" not in page  # the controls' speed is not the run's
  for line in page.splitlines():
    if line.startswith("| category"):
      assert line == "| category | prompts | a τ | b\\|c | d |"
  lines = list(csv.DictReader(io.StringIO((tmp_path / "out" / "compare.csv").read_text())))
  assert len(lines) == len(found["differences"]) == 12
  first = next(x for x in lines if x["run"] == "b|c" and x["category"] == "all")
  assert float(first["difference"]) == pytest.approx(1) and first["significant"] == "True"
  assert float(first["difference_low"]) == pytest.approx(1)
  root = xml.etree.ElementTree.parse(tmp_path / "out" / "compare.svg").getroot()
  assert root.tag.endswith("svg")
  svg = (tmp_path / "out" / "compare.svg").read_text()
  assert "difference of τ from a" in svg and "b|c" in svg
  assert lib.plot(found) == svg  # the same comparison, the same file


def test_terminal_tables(tmp_path):
  found = compare(load([run_folder(tmp_path / "a"), run_folder(tmp_path / "b", better_rows)]))
  out = io.StringIO()
  for table in lib.tables(found):  # 80 columns are enough
    print_table(table, Console(file=out, width=80, color_system=None))
  text = out.getvalue()
  assert "All 24 prompts at T=0, greedy" in text and "+1.000 (+1.000 to +1.000) *" in text
  categories = [line.split()[0] for line in text.splitlines() if line.startswith(CATEGORIES)]
  tau = {c: find(found, c)["baseline_tau"] for c in CATEGORIES}
  assert categories[:2] == sorted(CATEGORIES, key=lambda c: -tau[c])


def test_command_line_options():
  def parsed(*argv):
    values = flags.FlagValues()
    lib.define_flags(values)
    return lib.parse(["compare", *argv], values)

  assert parsed("a", "b", "--out=x")[0] == ["a", "b"]
  paths, values = parsed("--baseline=c/", "a", "c", "b", "--allow_different")
  assert paths == ["c", "a", "b"] and values.allow_different
  with pytest.raises(UserError, match="--baseline=d: is none of the runs"):
    parsed("a", "b", "--baseline=d")
  with pytest.raises(UserError, match="two run folders at least"):
    parsed("a")
  with pytest.raises(UserError, match="Unknown command line flag 'bass'"):
    parsed("a", "b", "--bass=1")


def test_the_command_refuses_in_one_line_and_compares(tmp_path):
  a, b = run_folder(tmp_path / "a"), run_folder(tmp_path / "b", better_rows, draft_len=6)
  call = [sys.executable, "-m", "launch.compare", a, b, f"--out={tmp_path / 'out'}"]
  root = Path(lib.__file__).parent.parent
  refused = subprocess.run(call, cwd=root, capture_output=True, text=True)
  assert refused.returncode == 2 and not (tmp_path / "out").exists()
  assert refused.stderr.splitlines() == [
      "error: runs cannot be compared: K: 5 in a, 6 in b; --allow_different compares what they "
      "share"]
  done = subprocess.run([*call, "--allow_different"], cwd=root, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert "Note: K: 5 in a, 6 in b" in done.stdout
  assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
      "compare.csv", "compare.md", "compare.svg"]
