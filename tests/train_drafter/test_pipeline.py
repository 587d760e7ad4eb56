"""All stages on a tiny target: what they leave behind, reuse, and runs that are killed."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

import spec_jax
from spec_jax.errors import UserError
from train_drafter import documents, evaluate, export, generate, manifest, prompts, report, train
from train_drafter.manifest import Manifest

STAGES = {"prompts": prompts, "generate": generate, "train": train, "evaluate": evaluate,
          "export": export}


class Killed(Exception):
  """Stands for a signal that cannot be caught."""


def copied(finished, folder, *stages):
  cfg, workdir = finished
  for name in stages:
    shutil.copytree(workdir / name, folder / name)
  return cfg, folder


def files(folder):
  return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*") if p.is_file()}


def test_every_stage_is_complete_and_names_its_inputs(finished):
  _, workdir = finished
  read = {"prompts": [], "generate": ["prompts"], "train": ["generate"],
          "evaluate": ["prompts", "train"], "export": ["evaluate", "prompts", "train"]}
  for name, inputs in read.items():
    found = Manifest.load(workdir / name)
    assert found.complete and sorted(found.inputs) == inputs
    assert all(found.inputs[other] == Manifest.load(workdir / other).hash for other in inputs)


def test_report_holds_what_is_promised(finished):
  cfg, workdir = finished
  made = json.loads((workdir / "evaluate" / "report.json").read_text())
  report.validate_report(made)
  assert [(s["temperature"], s["rule"]) for s in made["settings"]] == [(0, "greedy"), (1, "ratio")]
  assert all(list(s["categories"]) == ["structured", "code", "math"] for s in made["settings"])
  assert made["settings"][0]["all"]["prompts"] == 6
  assert made["controls"]["untrained"]["settings"][0]["all"]["prompts"] == 3
  whole, *timed = made["identity"]
  assert whole["verdict"] == "bitwise" and whole["drafter"] == "small_lm"
  assert json.loads((workdir / "evaluate" / "certificate.json").read_text())["prompts"] == 6
  assert (whole["prompts"], whole["identical_same_shape"]) == (6, 1.0)
  assert [(r["drafter"], r["prompts"], r["identical_width_1"]) for r in timed] == [
      ("ngram", 3, 1.0), ("small_lm", 3, 1.0)]
  assert [r["drafter"] for r in made["speed"]] == ["ngram", "small_lm"]
  assert all(r["draft_cost"] > 0 and r["verify_cost"] > 0 for r in made["speed"])
  estimates = {row["temperature"]: row for row in made["training_estimate"]}
  assert all("first_position" in estimates[t]["checks"] for t in (0.0, 1.0))
  assert made["max_new_tokens"] == cfg.evaluate.max_new_tokens


def test_finished_stages_are_reused(finished, capsys):
  cfg, workdir = finished
  before = files(workdir)
  for stage in STAGES.values():
    stage.run(cfg, workdir)
  assert files(workdir) == before
  assert capsys.readouterr().out.count("reused") == len(STAGES)


@pytest.mark.parametrize("name", [
    "prompts/prompts.jsonl", "generate/part-00000.npz", "train/drafter/drafter.safetensors",
    "export/drafter/config.json"])
@pytest.mark.parametrize("damage", ["is gone", "has another size"])
def test_a_finished_stage_that_lost_a_file_is_not_reused(finished, tmp_path, name, damage):
  cfg, folder = copied(finished, tmp_path, *STAGES)
  path = folder / name
  if damage == "is gone":
    path.unlink()
  else:
    path.write_bytes(path.read_bytes()[:-1])
  stage = path.relative_to(folder).parts[0]
  with pytest.raises(UserError, match=f"{path}: {damage} since stage {stage} ended; remove"):
    STAGES[stage].run(cfg, folder)


@pytest.mark.parametrize("name", ["identity.json", "speed-float32.json"])
def test_a_damaged_measurement_is_named(finished, tmp_path, name):
  cfg, folder = copied(finished, tmp_path, "prompts", "generate", "train", "evaluate")
  made = Manifest.load(folder / "evaluate")
  dataclasses.replace(made, complete=False).save(folder / "evaluate")
  path = folder / "evaluate" / "parts" / name
  path.write_text(path.read_text()[:-9])
  with pytest.raises(UserError, match=f"{path}: damaged .*remove it and run --stage=evaluate"):
    evaluate.run(cfg, folder)


@pytest.mark.parametrize("name, damage, stage", [
    ("prompts/prompts.jsonl", lambda old: old[:len(old) // 2], generate),
    ("prompts/eval.jsonl", lambda old: old[:-20], generate),
    ("generate/part-00000.npz", lambda old: old[:len(old) // 2], train),
    ("generate/part-00000.npz", lambda old: b"", train)])
def test_a_damaged_file_is_one_line(finished, tmp_path, name, damage, stage):
  cfg, folder = copied(finished, tmp_path, "prompts", "generate")
  if stage is generate:
    shutil.rmtree(folder / "generate")
  path = folder / name
  path.write_bytes(damage(path.read_bytes()))
  with pytest.raises(UserError, match=f"{path}.*damaged.*remove {path.parent} and run") as refused:
    stage.run(cfg, folder)
  assert "\n" not in str(refused.value)


def test_report_stage_rebuilds_the_report(finished, tmp_path, capsys):
  cfg, folder = copied(finished, tmp_path, "evaluate", "prompts", "train")
  path = folder / "evaluate" / "report.json"
  old = path.read_text()
  path.unlink()
  report.run(cfg, folder)
  assert path.read_text() == old
  assert "All prompts" in capsys.readouterr().out
  with pytest.raises(UserError, match="stage evaluate has not run"):
    report.run(cfg, tmp_path / "empty")


def test_killed_generate_goes_on(finished, tmp_path, monkeypatch):
  cfg, folder = copied(finished, tmp_path, "prompts")
  monkeypatch.setattr(generate, "_PART_ROWS", 8)
  write, written = generate._write_part, []

  def kill_at_the_second(path, answers):
    if written:
      raise Killed
    written.append(path)
    write(path, answers)

  with monkeypatch.context() as patch:
    patch.setattr(generate, "_write_part", kill_at_the_second)
    with pytest.raises(Killed):
      generate.run(cfg, folder)
  assert not Manifest.load(folder / "generate").complete
  with pytest.raises(UserError, match="not finished"):
    train.run(cfg, folder)
  kept = files(folder / "generate")[written[0]]
  generate.run(cfg, folder)
  assert files(folder / "generate")[written[0]] == kept
  straight = generate.load_answers(finished[1] / "generate")
  resumed = generate.load_answers(folder / "generate")
  assert [a.job for a in resumed] == [a.job for a in straight]
  for a, b in zip(resumed, straight, strict=True):
    np.testing.assert_array_equal(a.tokens, b.tokens)


def test_killed_train_ends_with_the_same_drafter(finished, tmp_path, monkeypatch):
  cfg, folder = copied(finished, tmp_path, "prompts", "generate")
  step, taken = train.train_step, []

  def kill_in_the_fourth(*args):
    if len(taken) == 3:
      raise Killed
    taken.append(1)
    return step(*args)

  with monkeypatch.context() as patch:
    patch.setattr(train, "train_step", kill_in_the_fourth)
    with pytest.raises(Killed):
      train.run(cfg, folder)
  train.run(cfg, folder)
  name = "drafter/drafter.safetensors"
  ours = safetensors.numpy.load_file(folder / "train" / name)
  straight = safetensors.numpy.load_file(finished[1] / "train" / name)
  assert ours.keys() == straight.keys()
  for key, value in straight.items():
    np.testing.assert_array_equal(ours[key], value)
  lines = [json.loads(x) for x in (folder / "train" / "metrics.jsonl").read_text().splitlines()]
  steps = [x["step"] for x in lines if x["split"] == "train"]
  assert steps == sorted(set(steps)) and steps[-1] >= cfg.train.steps - 1


def test_killed_evaluate_decodes_only_what_is_missing(finished, tmp_path, monkeypatch):
  cfg, folder = copied(finished, tmp_path, "prompts", "generate", "train")
  decode, begun = evaluate.decode_all, []

  def kill_at_the_third(*args, title, **options):
    begun.append(title)
    if len(begun) == 3:
      raise Killed
    return decode(*args, title=title, **options)

  with monkeypatch.context() as patch:
    patch.setattr(evaluate, "decode_all", kill_at_the_third)
    with pytest.raises(Killed):
      evaluate.run(cfg, folder)
  with monkeypatch.context() as patch:
    patch.setattr(evaluate, "decode_all", lambda *a, title, **k: begun.append(title) or decode(
        *a, title=title, **k))
    evaluate.run(cfg, folder)
  assert begun[2] == begun[3] and begun[0] not in begun[3:] and begun[1] not in begun[3:]
  again, straight = (json.loads((w / "evaluate" / "report.json").read_text())
                     for w in (folder, finished[1]))
  for key in ("settings", "controls"):
    assert again[key] == straight[key]


def test_another_config_is_refused_by_every_stage(finished, tmp_path):
  cfg, folder = copied(finished, tmp_path, *STAGES)
  before = cfg.evaluate.draft_len
  cfg.evaluate.draft_len = 4
  try:
    with pytest.raises(manifest.StaleStageError, match="evaluate.draft_len=3, this run has"):
      evaluate.run(cfg, folder)
  finally:
    cfg.evaluate.draft_len = before


def test_damaged_statistics_of_the_teacher_are_computed_again(finished, tmp_path):
  cfg, folder = copied(finished, tmp_path, "prompts", "generate")
  path = next((folder / "generate").glob("teacher-*.npz"))
  whole = path.read_bytes()
  for damaged in (b"", whole[:len(whole) // 2], b"noise" * 100):
    path.write_bytes(damaged)
    answers = generate.load_answers(folder / "generate")
    target = spec_jax.load_target(cfg.target.source, cfg.train.dtype)
    kept, _, _ = documents.prepare(answers, target, cfg, tmp_path, folder / "generate")
    assert kept[0].logsumexp.size and path.read_bytes() == whole


@pytest.mark.parametrize("damage", [lambda old: b"", lambda old: old[:-9], lambda old: b"x" * 99])
def test_a_damaged_draft_vocabulary_is_one_line(finished, tmp_path, damage):
  cfg, folder = copied(finished, tmp_path, "prompts", "generate", "train")
  path = folder / "train" / "draft_ids.npy"
  path.write_bytes(damage(path.read_bytes()))
  with pytest.raises(UserError, match=f"{path}: damaged.*remove {path.parent} and run") as refused:
    documents.draft_vocabulary(folder / "train")
  assert "\n" not in str(refused.value)
