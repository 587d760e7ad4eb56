"""drafter.json and drafter.safetensors: what does not fit is one line with file, field, value."""

import json
import re
import shutil

import numpy as np
import pytest
import safetensors.numpy

from spec_jax import drafters
from spec_jax.drafters import saved
from spec_jax.errors import UserError
from spec_jax.models.config import RopeScaling
from tests import tiny

REDUCED = np.array([40, 3, 17, 22, 9, 61, 5, 33], np.int32)


def refused(folder, match, target):
  with pytest.raises(UserError, match=match) as caught:
    drafters.load_drafter(str(folder), target)
  assert "\n" not in str(caught.value)


WRONG = ["x", [1, "a"], {"a": 1}, True, 2.5, float("inf"), None]


@pytest.fixture(scope="module")
def block(tmp_path_factory):
  """A block drafter with a reduced vocabulary and a head of its own, for a target of six layers."""
  cfg = tiny.config(num_layers=6, rope_scaling=RopeScaling("yarn", 2.0))
  target = tiny.make(cfg, tiny.tensors(cfg), tiny.tokenizer())
  module = drafters.init_learned(
      "dflash", target, (0,), num_taps=2, block_size=4, mask_id=3, draft_ids=REDUCED)
  own = np.ones((len(REDUCED), 32), np.float32)
  module = drafters.build("dflash", target, module.own_tensors(), module.config,
                          module.options() | {"embed_scale": 2.0}, draft_ids=REDUCED,
                          own={"head": own})
  folder = tmp_path_factory.mktemp("block") / "d"
  drafters.save_drafter(folder, module, target)
  again = drafters.load_drafter(str(folder), target).module
  assert again.options() == module.options() and again.config == module.config
  return folder, target


def fields_of(facts):
  """(place, value) of everything in drafter.json that decides what is computed."""
  for name in ("kind", "target", "target_weight_hash", "tokenizer_hash"):
    yield (name,), facts[name]
  for section in ("options", "config"):
    yield (section,), facts[section]
    yield from (((section, name), value) for name, value in facts[section].items())
  yield from ((("config", "rope_scaling", name), value)
              for name, value in facts["config"]["rope_scaling"].items())


def test_a_field_of_another_type_is_named_with_its_value(block, tmp_path):
  """Whatever stands in drafter.json: one line with the file, the field and the value."""
  folder, target = block
  text = (folder / "drafter.json").read_text()
  shutil.copytree(folder, tmp_path / "d")
  seen = 0
  for place, right in fields_of(json.loads(text)):
    for wrong in WRONG:
      if wrong != float("inf") and type(wrong) is type(right) and type(right) not in (list, dict):
        continue
      if place == ("config", "rope_scaling") and wrong is None:
        continue
      facts = json.loads(text)
      *path, last = place
      where = facts
      for name in path:
        where = where[name]
      where[last] = wrong
      (tmp_path / "d" / "drafter.json").write_text(json.dumps(facts))
      # Of a list the entry is named, of an object what it lacks.
      found = re.escape("field " + ".".join(place))
      if wrong == [1, "a"] and isinstance(right, list):
        found += r"\[\d\]='?(a|1)'?"
      elif wrong == {"a": 1} and isinstance(right, dict):
        found = "has no field '|field .*a=1 is not known"
      else:
        found += re.escape(f"={wrong!r}") + " must be "
      refused(tmp_path / "d", f"drafter.json: ({found})", target)
      seen += 1
  assert seen > 200


@pytest.mark.parametrize("section, changes, match", [
    ("options", {"taps": [1, 9]}, r"taps=\(1, 9\): the target has 6 layers"),
    ("options", {"taps": [-1, 2]}, r"taps=\(-1, 2\): the target has 6"),
    ("options", {"taps": [2, 1]}, r"taps=\(2, 1\): .* ascending"),
    ("options", {"taps": []}, r"taps=\(\): "),
    ("options", {"mask_id": 64}, r"mask_id=64 is outside 0..63"),
    ("options", {"block_size": 1}, "block_size=1 must be at least 2"),
    ("options", {"colour": 1}, "field options.colour=1 is not known"),
    ("config", {"num_kv_heads": 0}, "num_kv_heads=0 must be at least 1"),
    ("config", {"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
    ("config", {"hidden_size": 48}, r"head has shape \[8, 32\], not \[8, 48\]"),
    ("config", {"rope_scaling": {"kind": "x", "factor": 2.0}}, "kind='x' and factor=2.0 is not s"),
    ("config", {"activation": "relu"}, "activation='relu' is not supported")])
def test_a_value_that_does_not_fit_is_named(block, tmp_path, section, changes, match):
  folder, target = block
  shutil.copytree(folder, tmp_path / "d")
  facts = json.loads((folder / "drafter.json").read_text())
  facts[section] |= changes
  (tmp_path / "d" / "drafter.json").write_text(json.dumps(facts))
  refused(tmp_path / "d", f"{re.escape(str(tmp_path / 'd'))}.*: .*{match}", target)


@pytest.mark.parametrize("ids, match", [
    (np.arange(8, dtype=np.int32) + 57, r"holds 64; .*0\.\.63"),
    (np.arange(8, dtype=np.int32) - 1, "holds -1"), (np.zeros(8, np.int32), "an id twice"),
    (np.arange(8, dtype=np.float32), r"type float32 and shape \[8\]"),
    (np.arange(8, dtype=np.int32)[None], r"shape \[1, 8\]"),
    (np.arange(7, dtype=np.int32), r"head has shape \[8, 32\], not \[7, 32\]")])
def test_a_draft_vocabulary_that_does_not_fit_is_named(block, tmp_path, ids, match):
  folder, target = block
  shutil.copytree(folder, tmp_path / "d")
  path = tmp_path / "d" / "drafter.safetensors"
  values = safetensors.numpy.load_file(path) | {"draft_ids": ids}
  safetensors.numpy.save_file(values, path)
  refused(tmp_path / "d", f"drafter.safetensors: .*{match}", target)


def test_a_file_that_was_cut_anywhere_is_named(block, tmp_path):
  folder, target = block
  shutil.copytree(folder, tmp_path / "d")
  path = tmp_path / "d" / "drafter.safetensors"
  whole = path.read_bytes()
  for size in (0, 3, 8, 100, len(whole) // 2, len(whole) - 1):
    path.write_bytes(whole[:size])
    refused(tmp_path / "d", "drafter.safetensors cannot be read", target)


def test_every_option_of_a_kind_has_its_type():
  """An option that a drafter gains would be refused where it is read."""
  target = tiny.make(cfg := tiny.config(num_layers=8), tiny.tensors(cfg), tiny.tokenizer())
  for kind in drafters.LEARNED:
    module = drafters.init_learned(
        kind, target, (0,), num_taps=2, block_size=4, mask_id=3, rank=4)
    assert set(module.options()) <= set(saved._OPTIONS[kind])
