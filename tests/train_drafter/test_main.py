"""The command line of train_drafter: one line for bad input, the stages in order, the record."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from absl import flags

from spec_jax.errors import UserError
from tests.train_drafter import tiny_run
from train_drafter import __main__ as cli
from train_drafter import config, manifest

ROOT = Path(__file__).parents[2]

CONFIG = """
import dataclasses

@dataclasses.dataclass
class Train:
  lr: float = 1e-3
  batch: int = 4
  profile: bool = False

@dataclasses.dataclass
class Generate:
  temperatures: tuple[float, ...] = (0.0,)
  max_new_tokens: int = 64

@dataclasses.dataclass
class Config:
  target: str = "demo"
  train: Train = dataclasses.field(default_factory=Train)
  generate: Generate = dataclasses.field(default_factory=Generate)

def get_config(target="demo"):
  return Config(target=target)
"""


@pytest.fixture
def config_file(tmp_path):
  path = tmp_path / "small.py"
  path.write_text(CONFIG)
  return path


@pytest.fixture
def stages(monkeypatch):
  """Stand-ins for the config module and the stages, which note what they are called with."""
  calls = []
  checks = types.ModuleType("train_drafter.config")

  def finalize(cfg):
    calls.append(("finalize", cfg.train.lr))

  def validate(cfg):
    calls.append(("validate", cfg.train.lr))
    if cfg.train.batch < 1:
      raise UserError(f"train.batch={cfg.train.batch}: at least 1")

  checks.finalize, checks.validate = finalize, validate
  monkeypatch.setattr("train_drafter.config", checks, raising=False)
  monkeypatch.setitem(sys.modules, "train_drafter.config", checks)
  monkeypatch.setattr(cli, "_check_target", lambda cfg: None)
  monkeypatch.setattr(cli, "_check_mesh", lambda cfg: None)
  monkeypatch.setattr(cli, "_check_buckets", lambda cfg, stages: None)
  monkeypatch.setattr(cli, "_reads_features", lambda cfg: True)

  for name in cli.STAGES:
    module = types.ModuleType(f"train_drafter.{name}")

    def run(cfg, workdir, name=name):
      part = {"train": dataclasses.asdict(cfg.train)} if name == "train" else {}
      opened = manifest.begin(workdir / name, stage=name, config=part)
      calls.append((name, opened.complete))
      manifest.finish(workdir / name, opened, {})
      return workdir / name

    module.run = run
    monkeypatch.setitem(sys.modules, module.__name__, module)
  return calls


def parse(*args):
  values = flags.FlagValues()
  argv = ["train_drafter", *map(str, args)]
  cli.define_flags(values, argv)
  return cli.parse(argv, values)


def run(*args):
  cli.execute(parse(*args))


def refusal(*args):
  with pytest.raises(UserError) as caught:
    parse(*args)
  text = str(caught.value)
  assert "\n" not in text
  return text


def test_overrides_of_every_type(config_file):
  options = parse(
    f"--config={config_file}",
    "--config.train.lr=3e-4",
    "--config.train.batch",
    "8",
    "--config.train.profile",
    "--config.generate.temperatures=(0.0,0.7)",
    "--config.target=other",
    "--workdir=w",
  )
  cfg = options.config
  assert (cfg.train.lr, cfg.train.batch, cfg.train.profile) == (3e-4, 8, True)
  assert cfg.generate.temperatures == (0.0, 0.7) and cfg.target == "other"
  assert options.stages == cli.STAGES and options.workdir == Path("w")
  assert options.command == (
    f"python -m train_drafter --config={config_file} --config.train.lr=3e-4 --config.train.batch 8 "
    "--config.train.profile '--config.generate.temperatures=(0.0,0.7)' --config.target=other "
    "--workdir=w"
  )


def test_elements_of_a_tuple_have_their_type(config_file):
  base = [f"--config={config_file}", "--workdir=w"]
  for text, expected in [("1", (1.0,)), ("(0, 1)", (0.0, 1.0)), ("0,0.7", (0.0, 0.7)), ("()", ())]:
    found = parse(*base, f"--config.generate.temperatures={text}").config.generate.temperatures
    assert found == expected and all(type(item) is float for item in found)
  for text in ("hot", "True"):
    reason = refusal(*base, f"--config.generate.temperatures={text}")
    assert reason.startswith("--config.generate.temperatures: ") and "of type float" in reason


def test_an_argument_reaches_get_config(config_file):
  assert parse(f"--config={config_file}:big", "--workdir=w").config.target == "big"


@pytest.mark.parametrize(
  "name, nearest",
  [
    ("train.lrr", "train.lr"),
    ("lr", "train.lr"),
    ("generate.lr", "train.lr"),
    ("trian.batch", "train.batch"),
    ("generate.max_tokens", "generate.max_new_tokens"),
    ("train.lr.x", "train.lr"),
  ],
)
def test_an_unknown_field_is_named_with_its_nearest(config_file, name, nearest):
  for arg in (f"--config.{name}=1", f"-config.{name}=1"):
    assert refusal(f"--config={config_file}", arg, "--workdir=w") == (
      f"--config.{name}: no such field; the nearest is --config.{nearest}"
    )
  assert "train.profil: no such field" in refusal(
    f"--config={config_file}", "--noconfig.train.profil", "--workdir=w"
  )


def test_bad_flags_are_one_line(config_file):
  config = f"--config={config_file}"
  assert "could not convert string to float: 'fast'" in refusal(config, "--config.train.lr=fast")
  assert "--config.train.lr=fast" in refusal(config, "--config.train.lr=fast")
  assert "train is a group of fields" in refusal(config, "--config.train=1")
  assert "stage=evalute" in refusal(config, "--workdir=w", "--stage=evalute")
  assert "workdri" in refusal(config, "--workdri=w")
  assert "'evaluate'" in refusal(config, "--workdir=w", "evaluate")
  assert refusal(config) == "--workdir is needed"
  assert refusal("--workdir=w") == "--config is needed"
  assert "--config is needed" in refusal("--config.train.lr=1", "--workdir=w")
  late = refusal("--config.train.lr=1", config, "--workdir=w")
  assert late == "--config is needed before any --config.field=value"


def test_a_bad_config_file_is_one_line(tmp_path, config_file):
  path = tmp_path / "bad.py"
  assert refusal(f"--config={path}", "--workdir=w") == f"--config={path}: no such file"
  for text, reason in [
    ("x = 1\nx = = 2\n", f"{path}:2: SyntaxError"),
    ("def get_config():\n  return 1 / 0\n", f"{path}:2: ZeroDivisionError: division by zero"),
    ("def get_config():\n  return {}['x']\n", f"{path}:2: KeyError: 'x'"),
    ("y = 1\n", f"{path}: has no function get_config()"),
    ("def get_config():\n  return {}\n", "returned dict, not a dataclass"),
    (CONFIG.replace("Config(target=target)", "Config"), "returned the class Config, not"),
  ]:
    path.write_text(text)
    assert reason in refusal(f"--config={path}", "--workdir=w")
  path.write_text("def get_config():\n  return 1\n")
  assert "TypeError" in refusal(f"--config={path}:argument", "--workdir=w")


def test_a_missing_flagfile_is_one_line(monkeypatch):
  monkeypatch.setattr(
    cli.command, "run", lambda execute, parser, **_: parser(["x", "--flagfile=/no/such/file"]))
  with pytest.raises(UserError, match="/no/such/file"):
    cli.main()


def test_all_stages_run_in_order_after_the_checks(config_file, workdir, stages, capsys):
  run(f"--config={config_file}", "--config.train.lr=0.5", f"--workdir={workdir}")
  names = [name for name, _ in stages]
  order = ["prompts", "generate", "extract", "train", "evaluate", "export", "report"]
  assert names == ["finalize", "validate", *order]
  assert stages[0] == ("finalize", 0.5)
  lines = capsys.readouterr().out.splitlines()
  assert [line.split(":")[0] for line in lines] == list(cli.STAGES)
  assert lines[3] == f"train: 0:00  {workdir / 'train'}"


def test_a_mesh_without_its_devices_is_refused_before_any_stage():
  cfg = config.Config()
  cli._check_mesh(cfg)  # the default asks for nothing
  cfg.mesh.fsdp = 64
  with pytest.raises(UserError, match="mesh.fsdp=64, mesh.tensor=1 needs 64 devices, and there"):
    cli._check_mesh(cfg)


def test_extract_runs_only_for_a_drafter_that_reads_features(
    config_file, workdir, stages, monkeypatch):
  monkeypatch.setattr(cli, "_reads_features", lambda cfg: False)
  run(f"--config={config_file}", f"--workdir={workdir}")
  assert "extract" not in [name for name, _ in stages]
  stages.clear()
  run(f"--config={config_file}", f"--workdir={workdir}", "--stage=extract")  # asked for by name
  assert [name for name, _ in stages] == ["finalize", "validate", "extract"]


def test_which_drafters_read_features():
  cfg = config.Config()
  for kind, reads in [("small_lm", False), ("eagle3", True), ("dflash", True), ("dspark", True)]:
    cfg.drafter.kind = kind
    assert cli._reads_features(cfg) == reads


def test_evaluate_is_followed_by_its_report(config_file, workdir, stages):
  run(f"--config={config_file}", f"--workdir={workdir}", "--stage=evaluate")
  assert [name for name, _ in stages] == ["finalize", "validate", "evaluate", "report"]


def test_a_refused_stage_leaves_no_claim(config_file, workdir, stages, monkeypatch, capsys):
  """What was refused before anything was made binds neither the next run nor the old folder."""
  first = [f"--config={config_file}", f"--workdir={workdir}", "--stage=train"]
  module = sys.modules["train_drafter.train"]
  good = module.run

  def refuse(cfg, folder):
    manifest.begin(folder / "train", stage="train", config={"train": dataclasses.asdict(cfg.train)})
    raise UserError("no such file")

  monkeypatch.setattr(module, "run", refuse)
  with pytest.raises(UserError, match="no such file"):
    run(*first, "--config.train.lr=9.0")
  assert not (workdir / "train").exists()
  monkeypatch.setattr(module, "run", good)
  run(*first)
  kept = manifest.Manifest.load(workdir / "train").run
  monkeypatch.setattr(module, "run", refuse)
  with pytest.raises(UserError, match="no such file"):
    run(*first, "--config.train.lr=9.0", "--overwrite")
  assert manifest.Manifest.load(workdir / "train").run == kept
  assert not (workdir / "train.old-1").exists()
  assert "is " + str(workdir / "train") + " again" in capsys.readouterr().out
  # What a stage has begun to make stays.
  monkeypatch.setattr(module, "run", lambda cfg, folder: (
      (folder / "train" / "part").write_text("x"), refuse(cfg, folder)))
  shutil.rmtree(workdir / "train")
  (workdir / "train").mkdir()
  with pytest.raises(UserError):
    run(*first)
  assert (workdir / "train" / "part").exists()


def test_a_bucket_is_no_workdir_and_is_tried_before_the_stages_that_fill_it(
    config_file, workdir, monkeypatch):
  assert refusal(f"--config={config_file}", "--workdir=gs://lab/run").startswith(
    "--workdir=gs://lab/run: is a bucket, and this must be a path of this machine: mount")
  from train_drafter import buckets
  from train_drafter.config import Config
  tried = []
  monkeypatch.setattr(buckets, "check_access", tried.append)
  cfg = Config()
  cli._check_buckets(cfg, cli.STAGES)
  cfg.storage.features = "s3://lab/x"
  cli._check_buckets(cfg, ("evaluate", "report"))
  assert not tried
  cli._check_buckets(cfg, ("train",))
  assert tried == [cfg]


def test_a_target_is_refused_before_the_first_stage(workdir):
  cfg = tiny_run.make_config(workdir)
  for change, said in [({"source": "nowhere.gguf"}, "nowhere.gguf"),
                       ({}, r"init_layers=\(0, 9\) must name layers 0..2")]:
    cfg.drafter.init_layers = (0, 9)
    with pytest.raises(UserError, match=said):
      cli.execute(cli.Options(
        dataclasses.replace(cfg, target=dataclasses.replace(cfg.target, **change)),
        workdir / "run", cli.STAGES, False, False, ""))
    assert not (workdir / "run").exists()


def test_a_damaged_record_of_the_command_is_written_anew(config_file, workdir, stages):
  first = [f"--config={config_file}", f"--workdir={workdir}"]
  run(*first)
  for text in ('{"config": {', "[]", ""):
    (workdir / "config.json").write_text(text)
    run(*first)
    assert json.loads((workdir / "config.json").read_text())["config"]["train"]["lr"] == 1e-3


def test_one_stage(config_file, workdir, stages):
  run(f"--config={config_file}", f"--workdir={workdir}", "--stage=generate")
  assert [name for name, _ in stages] == ["finalize", "validate", "generate"]


def test_a_bad_value_stops_before_any_work(config_file, workdir, stages):
  folder = workdir / "new"
  with pytest.raises(UserError, match="train.batch=0"):
    run(f"--config={config_file}", "--config.train.batch=0", f"--workdir={folder}")
  assert not folder.exists()
  assert [name for name, _ in stages] == ["finalize", "validate"]


def test_profile_reaches_the_config(config_file, workdir, stages):
  options = parse(f"--config={config_file}", f"--workdir={workdir}", "--stage=report", "--profile")
  cli.execute(options)
  assert options.config.train.profile


def test_the_record_has_the_config_and_the_command(config_file, workdir, stages):
  run(f"--config={config_file}", "--config.train.lr=0.5", f"--workdir={workdir}")
  record = json.loads((workdir / "config.json").read_text())
  assert record["config"]["train"] == {"lr": 0.5, "batch": 4, "profile": False}
  assert "--config.train.lr=0.5" in record["command"]


def test_finished_stages_are_reused_and_another_config_refused(config_file, workdir, stages):
  first = [f"--config={config_file}", f"--workdir={workdir}"]
  run(*first)
  before = (workdir / "config.json").read_text()
  stages.clear()
  run(*first)
  assert [c for c in stages if c[0] in cli.STAGES] == [(name, True) for name in cli.STAGES]
  assert (workdir / "config.json").read_text() == before
  with pytest.raises(UserError, match=r"train.lr=0.001, this run has train.lr=0.5"):
    run(*first, "--config.train.lr=0.5", "--stage=train")
  assert (workdir / "config.json").read_text() == before


def test_overwrite_moves_only_what_another_config_made(config_file, workdir, stages, capsys):
  first = [f"--config={config_file}", f"--workdir={workdir}"]
  run(*first)
  run(*first, "--config.train.lr=0.5", "--overwrite")
  assert (workdir / "train.old-1").is_dir() and not (workdir / "generate.old-1").exists()
  assert f"train: the old folder is now {workdir / 'train.old-1'}" in capsys.readouterr().out
  assert json.loads((workdir / "config.json").read_text())["config"]["train"]["lr"] == 0.5


def test_a_workdir_that_cannot_be_made(config_file, workdir, stages):
  (workdir / "file").write_text("")
  with pytest.raises(UserError, match="--workdir=.*/file: is a file, not a folder"):
    run(f"--config={config_file}", f"--workdir={workdir / 'file'}")
  with pytest.raises(UserError, match="--workdir=.*/file/x: Not a directory"):
    run(f"--config={config_file}", f"--workdir={workdir / 'file' / 'x'}")


def test_a_workdir_that_takes_no_file(config_file, workdir, stages, monkeypatch):
  def refuse(path, content):
    raise FileNotFoundError(2, "No such file or directory", str(path))  # as /proc does

  monkeypatch.setattr(manifest, "write_json", refuse)
  with pytest.raises(UserError, match="--workdir=.*/new: No such file or directory"):
    run(f"--config={config_file}", f"--workdir={workdir / 'new'}")


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.py")), ids=lambda path: path.stem)
def test_the_configs_that_come_with_it_pass_the_checks(path):
  cfg = parse(f"--config={path}", "--workdir=w").config
  config.finalize(cfg)
  config.validate(cfg)


def test_the_process_ends_with_one_line_and_status_2(config_file):
  done = subprocess.run(
    [sys.executable, "-m", "train_drafter", f"--config={config_file}", "--config.train.lrr=1"],
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 2
  assert done.stdout == ""
  assert done.stderr == (
    "error: --config.train.lrr: no such field; the nearest is --config.train.lr\n"
  )
