"""A stage folder is reused, resumed or refused by what it was made from."""

import dataclasses
import json
import os

import pytest

from spec_jax.errors import UserError
from train_drafter import manifest
from train_drafter.manifest import Manifest, StaleStageError, TargetId, stage_hash

CONFIG = {"generate": {"max_new_tokens": 64, "temperatures": (0.0, 0.7)}, "target": "demo"}
TARGET = TargetId(name="demo", weights="a" * 64, tokenizer="b" * 64, chat_template="c" * 64)


@dataclasses.dataclass
class Section:
  """A part of a config, as the stages have them."""

  lr: float = 1.0
  layers: tuple[int, ...] = (0, 1)


@dataclasses.dataclass
class Whole:
  """A config of one section."""

  train: Section = dataclasses.field(default_factory=Section)


ANY = Whole()


def finished(folder, stage="prompts", config=None, inputs=None, target=None):
  opened = manifest.begin(
    folder, stage=stage, config=config or {"n": 1}, inputs=inputs, target=target
  )
  return manifest.finish(folder, opened, {"kept": 3})


def test_hash_ignores_order_and_sequence_type_and_sees_every_value():
  base = stage_hash({"a": 1, "b": (1, 2)}, {"x": "1"})
  assert stage_hash({"b": [1, 2], "a": 1}, {"x": "1"}) == base
  assert len(base) == 64
  others = [
    stage_hash({"a": 2, "b": (1, 2)}, {"x": "1"}),
    stage_hash({"a": 1, "b": (2, 1)}, {"x": "1"}),
    stage_hash({"a": 1, "b": (1, 2)}, {"x": "2"}),
    stage_hash({"a": 1, "b": (1, 2)}, {}),
  ]
  assert len({base, *others}) == 5


def test_hash_refuses_what_has_no_canonical_form():
  with pytest.raises(ValueError):
    stage_hash({"a": float("nan")}, {})


def test_a_finished_stage_is_reused_and_an_unfinished_one_resumed(workdir):
  folder = workdir / "generate"
  first = manifest.begin(folder, stage="generate", config=CONFIG, target=TARGET)
  assert not first.complete and not manifest.is_complete(folder, first.hash)
  (folder / "part-0.jsonl").write_text("{}")
  again = manifest.begin(folder, stage="generate", config=CONFIG, target=TARGET)
  assert again == first
  manifest.finish(folder, again, {"kept": 3})
  done = manifest.begin(folder, stage="generate", config=CONFIG, target=TARGET)
  assert done.complete and done.counts == {"kept": 3} and done.created == first.created
  assert manifest.is_complete(folder, first.hash)
  assert not manifest.is_complete(folder, "0" * 64)


def test_manifest_records_its_surroundings(workdir):
  finished(workdir / "prompts", target=TARGET)
  found = json.loads((workdir / "prompts" / "manifest.json").read_text())
  assert found["packages"]["jax"] and found["packages"]["python"]
  assert found["target"]["weights"] == TARGET.weights
  assert list(found)[-1] == "complete" and found["complete"] is True
  assert [path.name for path in (workdir / "prompts").iterdir()] == ["manifest.json"]


def test_another_config_is_refused_by_its_first_field(workdir):
  folder = workdir / "generate"
  finished(folder, "generate", CONFIG)
  changed = {"generate": {"max_new_tokens": 128, "temperatures": (0.0, 0.7)}, "target": "other"}
  with pytest.raises(StaleStageError) as caught:
    manifest.begin(folder, stage="generate", config=changed)
  text = str(caught.value)
  assert "generate.max_new_tokens=64, this run has generate.max_new_tokens=128" in text
  assert str(folder) in text and "--workdir" in text and "--overwrite" in text
  assert "target=" not in text and "\n" not in text


def test_a_field_that_is_gone_or_new_is_named(workdir):
  finished(workdir / "a", "a", {"x": 1, "y": 2})
  with pytest.raises(StaleStageError, match=r"y=2, this run has y=\(no such field\)"):
    manifest.begin(workdir / "a", stage="a", config={"x": 1})
  with pytest.raises(StaleStageError, match=r"z=\(no such field\), this run has z=3"):
    manifest.begin(workdir / "a", stage="a", config={"x": 1, "y": 2, "z": 3})


def test_other_inputs_or_another_target_are_refused(workdir):
  prompts = finished(workdir / "prompts")
  other = dataclasses.replace(prompts, hash="f" * 64)
  finished(workdir / "g", "g", {"n": 1}, {"prompts": prompts}, TARGET)
  with pytest.raises(StaleStageError, match=f"prompts {prompts.hash[:12]}, this run has ffff"):
    manifest.begin(
      workdir / "g", stage="g", config={"n": 1}, inputs={"prompts": other}, target=TARGET
    )
  retrained = dataclasses.replace(TARGET, weights="d" * 64)
  with pytest.raises(StaleStageError, match="target weights aaaaaaaaaaaa, this run has dddd"):
    manifest.begin(
      workdir / "g", stage="g", config={"n": 1}, inputs={"prompts": prompts}, target=retrained
    )
  renamed = dataclasses.replace(TARGET, name="the same weights elsewhere")
  assert manifest.begin(
    workdir / "g", stage="g", config={"n": 1}, inputs={"prompts": prompts}, target=renamed
  ).complete


def test_overwrite_keeps_the_old_folder(workdir):
  folder = workdir / "prompts"
  finished(folder, config={"n": 1})
  with pytest.raises(StaleStageError) as caught:
    manifest.begin(folder, stage="prompts", config={"n": 2})
  assert manifest.set_aside(caught.value.folder) == workdir / "prompts.old-1"
  finished(folder, config={"n": 2})
  manifest.set_aside(folder)
  assert Manifest.load(workdir / "prompts.old-1").config == {"n": 1}
  assert Manifest.load(workdir / "prompts.old-2").config == {"n": 2}
  assert not folder.exists()


def test_a_foreign_folder_is_refused_and_a_killed_begin_is_not(workdir):
  folder = workdir / "prompts"
  folder.mkdir()
  (folder / ".manifest.json.123").write_text("{")
  manifest.begin(folder, stage="prompts", config={})
  other = workdir / "thesis"
  other.mkdir()
  (other / "chapter1.txt").write_text("")
  with pytest.raises(StaleStageError, match="holds files but no manifest.json"):
    manifest.begin(other, stage="prompts", config={})


def test_a_folder_that_cannot_be_made_is_named(workdir):
  (workdir / "file").write_text("")
  with pytest.raises(UserError, match=r"file/prompts: cannot be written \(Not a directory\)"):
    manifest.begin(workdir / "file" / "prompts", stage="prompts", config={})


def test_require(workdir):
  with pytest.raises(UserError, match="stage prompts has not run"):
    manifest.require(workdir / "prompts", "prompts", ANY)
  opened = manifest.begin(workdir / "prompts", stage="prompts", config={})
  with pytest.raises(UserError, match="stage prompts is not finished"):
    manifest.require(workdir / "prompts", "prompts", ANY)
  manifest.finish(workdir / "prompts", opened, {})
  with pytest.raises(UserError, match="holds stage prompts, not train"):
    manifest.require(workdir / "prompts", "train", ANY)
  assert manifest.require(workdir / "prompts", "prompts", ANY).hash == opened.hash


def test_require_sees_that_the_folder_it_was_made_from_has_changed(workdir):
  old = finished(workdir / "prompts", config={"n": 1})
  finished(workdir / "generate", "generate", {"m": 1}, {"prompts": old})
  assert manifest.require(workdir / "generate", "generate", ANY).inputs == {"prompts": old.hash}
  manifest.set_aside(workdir / "prompts")
  finished(workdir / "prompts", config={"n": 2})
  with pytest.raises(UserError, match="made from another run of prompts"):
    manifest.require(workdir / "generate", "generate", ANY)


def test_require_refuses_a_stage_of_another_config_however_deep(workdir):
  """`--stage=evaluate` without the overrides that the training had must not mix the two."""
  part = {"train": {"lr": 3.0, "layers": (0, 1)}, "data": {"train": "1" * 64}}
  first = finished(workdir / "train", "train", part)
  finished(workdir / "evaluate", "evaluate", {"n": 1}, {"train": first})
  same = Whole(Section(lr=3.0))
  assert manifest.require(workdir / "evaluate", "evaluate", same).complete
  for name in ("train", "evaluate"):
    with pytest.raises(UserError, match="train: was made with train.lr=3.0, this run has train"):
      manifest.require(workdir / name, name, Whole())


def test_a_stage_made_again_is_another_one(workdir):
  """Its config may be the same and its content not: a time budget, another version of the code."""
  old = finished(workdir / "prompts")
  finished(workdir / "generate", "generate", {"m": 1}, {"prompts": old})
  manifest.set_aside(workdir / "prompts")
  new = finished(workdir / "prompts")
  assert new.hash == old.hash and new.run != old.run
  with pytest.raises(StaleStageError, match="made from an earlier run of stage prompts"):
    manifest.begin(workdir / "generate", stage="generate", config={"m": 1}, inputs={"prompts": new})
  with pytest.raises(UserError, match="made from another run of prompts"):
    manifest.require(workdir / "generate", "generate", ANY)
  # One that is gone is not missed.
  manifest.set_aside(workdir / "prompts")
  assert manifest.require(workdir / "generate", "generate", ANY).complete


def test_inputs_that_disagree_are_refused(workdir):
  old = finished(workdir / "p1", "prompts", {"n": 1})
  new = finished(workdir / "p2", "prompts", {"n": 2})
  made = finished(workdir / "g", "generate", {"m": 1}, {"prompts": old}, TARGET)
  both = {"generate": made, "prompts": new}
  with pytest.raises(UserError, match=f"generate was made with prompts {old.hash[:12]}, prompts"):
    manifest.begin(workdir / "t", stage="train", config={}, inputs=both, target=TARGET)
  other = dataclasses.replace(TARGET, tokenizer="e" * 64)
  with pytest.raises(UserError, match="made with tokenizer bbbbbbbbbbbb, this run has eeeeee"):
    manifest.begin(
      workdir / "t", stage="train", config={}, inputs={"generate": made}, target=other
    )
  again = finished(workdir / "g2", "extract", {"m": 1}, {"prompts": new}, TARGET)
  with pytest.raises(UserError, match="extract was made with prompts"):
    manifest.begin(
      workdir / "t", stage="train", config={}, inputs={"generate": made, "extract": again}
    )
  assert not (workdir / "t").exists()


def test_an_edited_or_broken_manifest_is_refused(workdir):
  finished(workdir / "prompts", config={"n": 1})
  path = workdir / "prompts" / "manifest.json"
  fields = json.loads(path.read_text())
  path.write_text(json.dumps({**fields, "config": {"n": 2}}))
  with pytest.raises(UserError, match="the file was edited"):
    Manifest.load(workdir / "prompts")
  for text in ("{", "[]", json.dumps({"stage": "prompts"})):
    path.write_text(text)
    with pytest.raises(UserError, match="manifest.json: damaged, no stage manifest"):
      Manifest.load(workdir / "prompts")
  for name in fields:
    for wrong in (None, 3, ["x"]):
      path.write_text(json.dumps({**fields, name: wrong}))
      with pytest.raises(UserError, match="manifest.json: damaged"):
        Manifest.load(workdir / "prompts")


def test_a_write_that_fails_leaves_the_old_file(workdir, monkeypatch):
  path = workdir / "x.json"
  manifest.write_json(path, {"a": 1})
  with pytest.raises(TypeError):
    manifest.write_json(path, {"a": object()})
  assert json.loads(path.read_text()) == {"a": 1}

  def crash(descriptor):
    raise KeyboardInterrupt

  monkeypatch.setattr(os, "fsync", crash)
  with pytest.raises(KeyboardInterrupt):
    manifest.write_json(path, {"a": 2})
  assert json.loads(path.read_text()) == {"a": 1}
