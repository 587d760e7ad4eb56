"""Distills a drafter: runs the stages of a config, one after the other, in a work folder.

  python -m train_drafter --config=configs/quickstart.py --workdir=runs/quickstart
  python -m train_drafter --config=configs/quickstart.py --workdir=runs/b --config.train.lr=3e-4
  python -m train_drafter --config=configs/quickstart.py --workdir=runs/b --stage=evaluate

Finished stages are reused, a stopped one goes on where it was. A folder that was made with another
config is refused. SIGTERM (preemption) ends a run with status 143 once its work is saved.

Several processes make one run when each is started with --distributed, on hosts that see one work
folder: generate, extract, train and the decoding of evaluate share the work, the rest runs in the
first process. SLURM, GKE and TPU slices tell JAX who the processes are, elsewhere three flags do:

  python -m train_drafter ... --distributed --coordinator_address=host0:8476 --num_processes=2 \
    --process_id=0
"""

import contextlib
import dataclasses
import datetime
import importlib
import json
import math
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from spec_jax import command, platform
from spec_jax.errors import UserError
from train_drafter import config_file, distributed, lock, manifest, urls
from train_drafter.progress import clock_text

STAGES = ("prompts", "generate", "extract", "train", "evaluate", "export", "report")
CHECKS = ("verify_store",)  # run by name alone
TOGETHER = ("generate", "extract", "train", "evaluate")  # several processes share the work


@dataclasses.dataclass(frozen=True)
class Options:
  """What the command line asked for.

  Attributes:
    config: the dataclass of `get_config` with the overrides set, not yet finalized.
    workdir: folder of the run.
    stages: the stages to run, in order.
    overwrite: move stage folders of another config aside.
    profile: write a profiler trace while training.
    command: the command line, for the record.
    joined: how the processes of the run find each other; None for a run of one process.
  """

  config: Any
  workdir: Path
  stages: tuple[str, ...]
  overwrite: bool
  profile: bool
  command: str
  joined: distributed.Options | None = None


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
  """Defines the flags of this program in `values`; `argv` is where the overrides are looked for."""
  config_flags.DEFINE_config_file(
    "config",
    None,
    "config file, also file.py:argument for get_config; --config.a.b=value sets one field",
    flag_values=values,
    sys_argv=list(argv),
  )
  values["config"].parser = _ConfigParser(values, argv)
  flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
  flags.DEFINE_enum(
    "stage", "all", ["all", *STAGES, *CHECKS], "the stage to run; evaluate prints its report too",
    flag_values=values,
  )
  flags.DEFINE_bool(
    "overwrite",
    False,
    "move stage folders that another config made aside, to <stage>.old-<n>",
    flag_values=values,
  )
  flags.DEFINE_bool(
    "profile", False, "write a jax.profiler trace of a few training steps", flag_values=values
  )
  flags.DEFINE_bool(
    "distributed",
    False,
    "this is one of several processes of a run; SLURM, GKE, TPU slices and MPI say which, or the "
    "three flags below; prompts, export, report and what evaluate times run in the first alone",
    flag_values=values,
  )
  flags.DEFINE_string(
    "coordinator_address", "", "host:port of process 0, or $JAX_COORDINATOR_ADDRESS",
    flag_values=values,
  )
  flags.DEFINE_integer(
    "num_processes", 0, "processes of the run, or $JAX_NUM_PROCESSES", flag_values=values
  )
  flags.DEFINE_integer(
    "process_id", -1, "number of this process, 0-based, or $JAX_PROCESS_ID", flag_values=values
  )
  flags.DEFINE_float(
    "distributed_timeout_s",
    distributed.TIMEOUT_S,
    "seconds to wait for the other processes, at the start and where they must agree",
    flag_values=values,
  )


def parse(argv: Sequence[str], values: flags.FlagValues) -> Options:
  """Reads the command line.

  Raises:
    UserError: one line for whatever is wrong with it.
  """
  try:
    rest = values(list(argv))
  except flags.Error as error:
    if not values["config"].present:
      # Every --config.a.b is unknown without a config; name the cause.
      if any(re.match(r"--?(no)?config\.", arg) for arg in argv):
        raise UserError("--config is needed before any --config.field=value") from error
    raise UserError(" ".join(str(error).split())) from error
  if len(rest) > 1:
    raise UserError(f"unexpected argument {rest[1]!r}; options start with --")
  for name in ("config", "workdir"):
    if not values[name].value:
      raise UserError(f"--{name} is needed")
  urls.check_local("--workdir", values.workdir)
  config_file.settle_tuples(values.config)
  stage = values.stage
  joined = distributed.Options(
    values.coordinator_address, values.num_processes, values.process_id,
    values.distributed_timeout_s)
  if not values.distributed and joined != distributed.Options(timeout_s=joined.timeout_s):
    raise UserError("--coordinator_address, --num_processes and --process_id need --distributed")
  return Options(
    config=values.config,
    workdir=Path(values.workdir),
    stages={"all": STAGES, "evaluate": ("evaluate", "report")}.get(stage, (stage,)),
    overwrite=values.overwrite,
    profile=values.profile,
    command=shlex.join(["python", "-m", "train_drafter", *argv[1:]]),
    joined=joined if values.distributed else None,
  )


def execute(options: Options) -> None:
  """Checks the config, then runs the stages, each with a line that says how long it took.

  Raises:
    UserError: a field has a bad value, or a stage refuses its inputs or its folder.
  """
  from train_drafter import config as config_lib

  cfg = options.config
  if options.profile:
    cfg.train.profile = True
  config_lib.finalize(cfg)
  config_lib.validate(cfg)
  platform.configure()
  with distributed.leaving_on_sigterm(), distributed.running(options.joined):
    _execute(cfg, options)


def _execute(cfg: Any, options: Options) -> None:
  distributed.agree("--stage", list(options.stages))
  distributed.agree("the config", manifest.stage_hash(dataclasses.asdict(cfg), {})[:12])
  _check_mesh(cfg)
  _check_buckets(cfg, options.stages)
  if "prompts" in options.stages:
    _check_target(cfg)
  record = options.workdir / "config.json"
  try:
    options.workdir.mkdir(parents=True, exist_ok=True)
    if distributed.is_primary() and not record.exists():
      _write_record(record, cfg, options)
  except FileExistsError as error:
    raise UserError(f"--workdir={options.workdir}: is a file, not a folder") from error
  except OSError as error:
    raise UserError(f"--workdir={options.workdir}: {error.strerror}") from error
  distributed.barrier("--workdir")
  if not record.exists():
    raise UserError(f"--workdir={options.workdir}: process {distributed.index()} does not see what "
                    "process 0 wrote there; all processes need one folder")
  for stage in options.stages:
    if stage == "extract" and options.stages == STAGES and not _reads_features(cfg):
      continue
    began = time.monotonic()
    # The processes of one run share its folder: the first one keeps other runs out.
    with (lock.held(options.workdir, stage) if distributed.is_primary()
          else contextlib.nullcontext()):
      folder = _run_stage(stage, cfg, options)
    # Only now: a refused run leaves the record of the run that made the folder.
    if distributed.is_primary():
      _write_record(record, cfg, options)
    print(f"{stage}: {clock_text(time.monotonic() - began)}  {folder}", flush=True)


def _reads_features(cfg: Any) -> bool:
  """Whether the drafter of a config reads hidden states of the target."""
  from train_drafter.train import sources

  return "extract" in sources(cfg)


def _check_mesh(cfg: Any) -> None:
  """Refuses a mesh that does not fit the devices, before any stage."""
  from train_drafter import placement

  if (cfg.mesh.data, cfg.mesh.fsdp, cfg.mesh.tensor) != (1, 1, 1):
    placement.mesh_of(cfg)


def _check_buckets(cfg: Any, stages: Sequence[str]) -> None:
  """Refuses a bucket that cannot be written, before any stage."""
  if {"extract", "train"} & set(stages) and (cfg.storage.features or cfg.storage.checkpoints):
    from train_drafter import buckets

    buckets.check_access(cfg)


def _check_target(cfg: Any) -> None:
  """Refuses a target that cannot be loaded, or has not the layers or ids asked for, and a drafter
  to start from that does not match it, before any stage."""
  from spec_jax.weights import open_checkpoint
  from train_drafter import head_sample
  from train_drafter.generate import check_layers

  config = open_checkpoint(cfg.target.source).config
  check_layers(cfg, config)
  head_sample.check(cfg, config)
  if cfg.train.init_from:  # hours before it is needed
    import spec_jax
    from train_drafter.start import begin_with

    begin_with(cfg, spec_jax.load_target(cfg.target.source, dtype=cfg.train.dtype))


def _run_stage(stage: str, cfg: Any, options: Options) -> Path:
  """Runs a stage in all processes, or in the first one while the others wait."""
  if stage in TOGETHER:
    return _run_here(stage, cfg, options)
  if distributed.is_primary():
    with distributed.alone():
      _run_here(stage, cfg, options)
  distributed.barrier(f"stage {stage}", math.inf)  # as long as the first process lives
  return options.workdir / stage


def _run_here(stage: str, cfg: Any, options: Options) -> Path:
  module = importlib.import_module(f"train_drafter.{stage}")
  folder = options.workdir / stage
  try:
    return module.run(cfg, options.workdir)
  except manifest.StaleStageError as stale:
    if not options.overwrite or stale.folder != folder:
      raise
    distributed.barrier(f"{stage}: --overwrite")  # all have seen the old folder
    if distributed.is_primary():
      aside = manifest.set_aside(stale.folder)
      print(f"{stage}: the old folder is now {aside}", flush=True)
    distributed.barrier(f"{stage}: the old folder is moved")
  except UserError:
    if distributed.is_primary():
      manifest.withdraw(folder)
    raise
  try:
    return module.run(cfg, options.workdir)
  except UserError:
    if distributed.is_primary() and manifest.withdraw(folder):
      aside.rename(folder)
      print(f"{stage}: nothing was made, so the old folder is {folder} again", flush=True)
    raise


def _write_record(path: Path, cfg: Any, options: Options) -> None:
  content = {"config": dataclasses.asdict(cfg), "command": options.command}
  content = json.loads(json.dumps(content))
  if path.exists():
    try:
      old = json.loads(path.read_text(encoding="utf-8"))
      if content == {name: old.get(name) for name in content}:
        return
    except (ValueError, AttributeError):
      pass  # damaged; nothing reads it but people, so it is written anew
  written = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
  manifest.write_json(path, {**content, "written": written})


class _ConfigParser(flags.ArgumentParser):
  """Loads a config file and checks the names of the overrides against what it returned.

  It stands in for the parser of ml_collections, whose errors are tracebacks.
  """

  syntactic_help = "path of a Python file with get_config()"

  def __init__(self, values: flags.FlagValues, argv: Sequence[str]):
    self._values, self._argv = values, argv

  def parse(self, argument: str) -> Any:
    """Returns get_config() of the file, or get_config(argument) of `file.py:argument`."""
    path, *arguments = argument.split(":", 1)
    config = config_file.load(path, arguments)
    names = dict(config_file.fields(config))
    for arg in self._values.read_flags_from_files(list(self._argv), force_gnu=False):
      override = re.match(r"--?(?:no)?config\.([^=]*)", arg)
      if override and names.get(override[1], True):
        raise UserError(config_file.wrong_field(override[1], names))
    return config

  def flag_type(self) -> str:
    """The type shown by --help."""
    return "config file"


def main() -> None:
  """The command line."""
  def parser(argv: Sequence[str]) -> Options:
    try:
      define_flags(flags.FLAGS, argv)  # which opens the files of --flagfile
    except flags.Error as error:
      raise UserError(" ".join(str(error).split())) from None
    return parse(argv, flags.FLAGS)

  command.run(execute, parser,
              interrupted="interrupted; the same command goes on from here")


if __name__ == "__main__":
  platform.tune_process()
  main()
