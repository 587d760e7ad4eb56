"""Damaged values of a report and of what it is made from: one line that names field and value."""

import copy
import json

import pytest

from spec_jax.errors import UserError
from tests.train_drafter.test_forecast import COST, part
from tests.train_drafter.test_report import arguments
from tests.train_drafter.test_report_sections import timed
from tests.train_drafter.test_whatif import FACTS
from train_drafter.report import (
  build_report,
  report_from_folder,
  save_evaluation,
  validate_report,
  write_report,
)

DIVERGENCE = {"id": "qa-0", "equal_tokens": 7, "margin": 0.02, "within_tolerance": True}
IDENTITY = {"dtype": "float32", "drafter": "small_lm", "prompts": 3, "identical_same_shape": 1.0,
            "identical_width_1": 0.5, "tolerance": 0.1, "divergences": [DIVERGENCE],
            "dead_drafter": []}
# Of programs, or made by arithmetic on what is checked.
FREE = ("definitions", "provenance", "whatif", "training_estimate")


def material():
  cost = {**COST, "batches": [{"batch": 2, "plain_step_s": 0.01, "draft_cost": 0.1,
                               "verify_cost": 1.2, "draft_len": 1}]}
  return arguments(speed=[timed()], identity=[copy.deepcopy(IDENTITY)], memory=FACTS,
                   replay=[part()], costs=[cost])


@pytest.fixture(scope="module")
def report():
  return build_report(**material())


def places(value, path=()):
  """(path, value) of everything inside."""
  items = (value.items() if isinstance(value, dict) else
           enumerate(value) if isinstance(value, list) else ())
  for key, inner in items:
    yield (*path, key), inner
    yield from places(inner, (*path, key))


def spoiled(whole, path, value):
  whole = copy.deepcopy(whole)
  at = whole
  for key in path[:-1]:
    at = at[key]
  at[path[-1]] = value
  return whole


def refused(check, whole, path):
  """The message: one line that names the field, or the list or object that holds it."""
  with pytest.raises(UserError) as error:
    check(whole)
  text = str(error.value)
  assert "\n" not in text and len(text) < 300
  names = [key for key in path if isinstance(key, str)]
  assert any(name in text for name in names[-2:]), (path, text)
  return text


def test_no_number_may_be_a_text_a_list_or_no_number_at_all(report):
  count = 0
  for path, value in list(places(report)):
    if path[0] in FREE or isinstance(value, str | dict | list | None) or path[-1] == "margin":
      continue
    for bad in ("abc", [1, "x"], {"a": 1}, float("nan"), float("inf")):
      text = refused(validate_report, spoiled(report, path, bad), path)
      assert str(bad) in text or repr(bad) in text or "..." in text, (path, text)
      count += 1
  assert count > 800


@pytest.mark.parametrize("name", FREE)
def test_json_can_hold_what_is_free(report, name):
  """A number that is none is refused anywhere."""
  whole = spoiled(report, (name,), [{"deep": [float("nan")]}] if isinstance(
      report[name], list) else {"deep": [float("nan")]})
  with pytest.raises(UserError, match=rf"report: {name}.*deep\[0\] is nan, which JSON cannot hold"):
    validate_report(whole)


@pytest.mark.parametrize("path, value, message", [
    (("settings", 0, "all", "tau"), 0.5,
     "report: settings[0].all.tau must be a number of at least 1, or null, got 0.5"),
    (("settings", 0, "all", "acceptance_rate"), 1.5,
     "report: settings[0].all.acceptance_rate must be a share from 0 to 1, or null, got 1.5"),
    (("settings", 0, "all", "tau_ci"), [2.0, 1.0],
     "report: settings[0].all.tau_ci must be two numbers in order, or two nulls, got [2.0, 1.0]"),
    (("settings", 1, "categories", "qa", "rounds"), -3,
     "report: settings[1].categories.qa.rounds must be a whole number of at least 0, got -3"),
    (("settings", 0, "all", "survival", 2), None, None),
    (("settings", 0, "all", "survival", 2), -0.25, "settings[0].all.survival must be a list of"),
    (("settings", 0, "all", "survival_ci", 0), [None, 0.5], "all.survival_ci must be a list of"),
    (("controls", "ngram", "settings", 0, "temperature"), -1,
     "controls.ngram.settings[0].temperature must be a number of at least 0, got -1"),
    (("speed", 0, "speedup"), 0.0, "report: speed[0].speedup must be a number above 0, got 0.0"),
    (("speed", 0, "samples", "tokens"), [1],
     "report: speed[0].samples must have one entry a prompt everywhere, got {'prompts': 3"),
    (("costs", 0, "verify", 1), 0, "report: costs[0].verify must be numbers above 0, got [1.0, 0,"),
    (("replay", 1, "verdict"), 3, "report: replay[1].verdict must be a string or null, got 3"),
    (("identity", 0, "identical_width_1"), 2,
     "identity[0].identical_width_1 must be a share from 0 to 1, or null, got 2"),
    (("schema_version",), 0, "report: schema_version must be 1, got 0"),
    (("warnings",), ["a", 3], "report: warnings must be a list of strings, got ['a', 3]"),
])
def test_a_value_out_of_its_range_is_named(report, path, value, message):
  whole = spoiled(report, path, value)
  if message is None:
    validate_report(whole)
  else:
    assert message in refused(validate_report, whole, path)


def test_nothing_is_written_of_a_report_that_json_cannot_hold(report, tmp_path):
  with pytest.raises(UserError, match="provenance.cores is inf"):
    write_report(spoiled(report, ("provenance", "cores"), float("inf")), tmp_path)
  assert not list(tmp_path.iterdir())


# What was measured.


def test_every_damage_of_what_was_measured_is_one_line(tmp_path):
  """Each number of evaluation.json as a text, each key left out: a line, never a traceback."""
  save_evaluation(tmp_path, **material())
  path = tmp_path / "evaluation.json"
  whole = json.loads(path.read_text())
  report_from_folder(tmp_path)
  count = 0
  for place, value in list(places(whole)):
    if place[0] in ("provenance", "identity") or isinstance(value, dict | list):
      continue
    if place[:2] == ("speed", 0) and place[2] not in ("speedup", "draft_cost", "samples"):
      continue  # every key of a row is checked alike
    damaged = [] if isinstance(value, str) else [spoiled(whole, place, "abc")]
    if isinstance(place[-1], str):
      damaged.append(spoiled(whole, place, 0))
      at = damaged[-1]
      for key in place[:-1]:
        at = at[key]
      del at[place[-1]]
    for bad in damaged:
      path.write_text(json.dumps(bad))
      try:
        report_from_folder(tmp_path)
      except UserError as error:
        count += 1
        assert "\n" not in str(error), place
        assert any(key in str(error) for key in place if isinstance(key, str)), (place, str(error))
  assert count > 100


@pytest.mark.parametrize("changes, message", [
    ({"replay": [part(lengths=(1, 2)) | {"lengths": [1, 2, 3]}]},
     r"replay\[0\].rows\[0\].rounds must have an entry for each of lengths \[1, 2, 3\]"),
    ({"replay": [part() | {"survival": []}]}, r"replay\[0\].survival must have an entry for each"),
    ({"costs": [COST | {"draft": [0.1]}]}, r"costs\[0\] must have a draft for each of draft_lens"),
    ({"costs": [COST | {"verify": [1.0]}]}, r"verify up to K \+ 1 = 3, got 2 and 1"),
    ({"memory": {"target": 3}}, r"memory.target must be an object, got 3"),
    ({"memory": {"target": {"parameters": "many"}}},
     r"memory.target.parameters must be a number of at least 0, got 'many'"),
    ({"identity": [{k: v for k, v in IDENTITY.items() if k != "tolerance"}]},
     r"identity\[0\].tolerance is missing"),
    ({"identity": [IDENTITY | {"divergences": [{"id": "a"}]}]},
     r"identity\[0\].divergences\[0\].equal_tokens is missing"),
])
def test_what_does_not_fit_together_is_named(changes, message):
  with pytest.raises(UserError, match=message):
    build_report(**material() | changes)
