"""Renders and submits sbatch scripts, for one command or for the cells of a sweep as a job array.

  python -m launch.sweep --sweep=... --workdir=... --launcher=slurm --slurm_gpus=1 \
    --slurm_time=8:00:00
  python -m launch.slurm --slurm_gpus=8 --slurm_processes=8 --name=big --logs=logs \
    -- python -m train_drafter --distributed --config=...

A job runs one process per GPU, or one per host where --slurm_processes=1, as JAX counts devices:
`--ntasks-per-node` with `--gres`, never `--gpus-per-task`, which hides a task's neighbours from it
and breaks the collectives between them. Preempted jobs are requeued by SLURM. Before the time limit
SLURM sends SIGTERM to the step, training saves a checkpoint, and the job asks to be requeued.
"""

import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from launch import cell as cell_lib
from launch import options as flag_options
from spec_jax import command
from spec_jax.errors import UserError

_JOBS = "slurm_jobs.txt"  # one line "job id, cells" for each submission
_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")


@dataclasses.dataclass(frozen=True)
class Options:
  """What a job asks for; empty or 0 leaves it to the cluster.

  Attributes:
    nodes: hosts of a job.
    processes: tasks on each host.
    gpus: on each host.
    gpu_type: of --gres, such as h100.
    cpus: of each task.
    memory: of each host, such as 64G.
    time: limit, as SLURM writes it.
    partition: where it runs.
    account: who pays.
    qos: quality of service.
    grace_s: seconds between the warning and the end of the job.
    at_once: cells of a sweep that run at once; 0 for all.
    container: image for `srun --container-image` (pyxis).
    venv: folder whose bin/activate is sourced.
    setup: shell lines before the command, such as "module load cuda".
    extra: further words of sbatch, such as "--constraint=nvlink".
  """

  nodes: int = 1
  processes: int = 1
  gpus: int = 0
  gpu_type: str = ""
  cpus: int = 0
  memory: str = ""
  time: str = ""
  partition: str = ""
  account: str = ""
  qos: str = ""
  grace_s: int = 60
  at_once: int = 0
  container: str = ""
  venv: str = ""
  setup: str = ""
  extra: str = ""


def check(options: Options) -> None:
  """Refuses what SLURM would misread.

  Raises:
    UserError: names the flag and its value.
  """
  for name, least in {"nodes": 1, "processes": 1, "gpus": 0, "cpus": 0, "at_once": 0,
                      "grace_s": 1}.items():
    value = getattr(options, name)
    if value < least:
      raise UserError(f"--slurm_{name}={value} must be at least {least}")
  if options.gpus and options.processes not in (1, options.gpus):
    raise UserError(f"--slurm_processes={options.processes} must be 1 (a process per host) or "
                    f"{options.gpus} (a process per GPU, --slurm_gpus={options.gpus})")
  if options.gpu_type and not options.gpus:
    raise UserError(f"--slurm_gpu_type={options.gpu_type} needs --slurm_gpus")
  if options.time and not _TIME.fullmatch(options.time):
    raise UserError(f"--slurm_time={options.time} must be minutes, h:mm:ss or days-h:mm:ss")
  if "--gpus-per-task" in options.extra:
    raise UserError("--slurm_extra: --gpus-per-task hides the GPUs of a host from its other tasks; "
                    "use --slurm_gpus and --slurm_processes")


def directives(options: Options, name: str, output: str, array: int = 0) -> list[str]:
  """The words of sbatch, in the order they stand in a script.

  Args:
    options: what the job asks for.
    name: of the job.
    output: log of the batch script, as SLURM's file name pattern.
    array: number of tasks of a job array; 0 for a single job.
  """
  at_once = f"%{options.at_once}" if options.at_once else ""
  kind = f"{options.gpu_type}:" if options.gpu_type else ""
  words = [
      f"--job-name={name}",
      array and f"--array=0-{array - 1}{at_once}",
      f"--nodes={options.nodes}",
      f"--ntasks-per-node={options.processes}",
      options.gpus and f"--gres=gpu:{kind}{options.gpus}",
      options.cpus and f"--cpus-per-task={options.cpus}",
      options.memory and f"--mem={options.memory}",
      options.time and f"--time={options.time}",
      options.partition and f"--partition={options.partition}",
      options.account and f"--account={options.account}",
      options.qos and f"--qos={options.qos}",
      "--requeue",
      f"--signal=TERM@{options.grace_s}",
      "--open-mode=append",
      f"--output={output}",
      *shlex.split(options.extra)]
  return [word for word in words if word]


def _script(options: Options, words: Sequence[str], body: Sequence[str]) -> str:
  """A script that runs `body`, whose last command sets the status, and requeues itself on 75."""
  lines = ["#!/bin/bash", *(f"#SBATCH {word}" for word in words), "set -uo pipefail"]
  if options.setup:
    lines.append(options.setup)
  if options.venv:
    lines.append(f"source {shlex.quote(f'{options.venv}/bin/activate')}")
  return "\n".join([
      *lines, *body, "status=$?",
      f"if [ $status -eq {cell_lib.AGAIN} ]; then",
      "  # Warned before the time limit; the work is saved.",
      '  scontrol requeue "$SLURM_JOB_ID"',
      "fi", "exit $status", ""])


def step_words(options: Options, logs: str) -> list[str]:
  """The srun words in front of a command: one log for each rank, and no rank outlives another.

  Args:
    options: what the job asks for.
    logs: pattern of the log of a rank, with %t for its number.
  """
  words = ["srun", "--kill-on-bad-exit=1", f"--ntasks-per-node={options.processes}",
           f"--ntasks={options.nodes * options.processes}",
           "--open-mode=append", f"--output={logs}"]
  return [*words, f"--container-image={options.container}"] if options.container else words


def array_script(options: Options, root: Path, names: Sequence[str], launch: str) -> str:
  """The job array of a sweep: task i runs cell i, its stages as steps of the job.

  `launch.cell` runs on the first host and holds the locks; each stage is a step of srun, of as
  many processes as the job has.

  Raises:
    UserError: a folder with spaces in its name.
  """
  joined = " --distributed" if options.nodes * options.processes > 1 else ""
  if len(str(root).split()) > 1:
    raise UserError(f"--workdir={root}: sbatch takes no spaces in it")
  cells = " ".join(shlex.quote(name) for name in names)
  step = step_words(options, f"{root}/cells/@CELL@/log-%t.txt")
  body = [
      f"cd {shlex.quote(str(Path.cwd()))}",
      f"cells=({cells})",
      'cell="${cells[$SLURM_ARRAY_TASK_ID]}"',
      f"step={shlex.quote(shlex.join(step))}",
      f"{shlex.quote(sys.executable)} -m launch.cell --workdir={shlex.quote(str(root))} "
      f'--cell="$cell" --launch={launch} --step="${{step//@CELL@/$cell}}"{joined}']
  output = f"{root}/logs/%A_%a.txt"
  return _script(options, directives(options, root.name, output, len(names)), body)


def command_script(options: Options, name: str, logs: Path, words: Sequence[str]) -> str:
  """One job for one command, a process per task."""
  body = [
      f"cd {shlex.quote(str(Path.cwd()))}",
      shlex.join([*step_words(options, f"{logs}/{name}-%j-%t.txt"), *words]),
      "code=$?",
      # A step that was warned ends with 143; were the job itself ended, this line is not reached.
      f"(exit $((code == {cell_lib.STOPPED} ? {cell_lib.AGAIN} : code)))"]
  return _script(options, directives(options, name, f"{logs}/{name}-%j.txt"), body)


# Talking to SLURM.


def submit(script: str) -> str:
  """Hands a script to sbatch; returns the job's id.

  Raises:
    UserError: sbatch is missing or refuses.
  """
  return _call(["sbatch", "--parsable"], script).strip().split(";")[0]


def states(job: str) -> dict[str, str]:
  """State of every task of a job: "id" or "id_task" -> SLURM's word, such as PENDING or FAILED.

  squeue knows the jobs of now, sacct those of before; where there is no accounting, a job that
  squeue has forgotten is absent.
  """
  found: dict[str, str] = {}
  if shutil.which("sacct"):
    found |= _rows(["sacct", "-X", "-n", "-P", "-j", job, "-o", "JobID,State"])
  found |= _rows(["squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%i|%T"])
  return {name: state.split(" ")[0] for name, state in found.items()}


def _rows(words: Sequence[str]) -> dict[str, str]:
  try:
    text = _call(words)
  except UserError:
    return {}  # no accounting, or the job is too old for squeue
  return dict(line.split("|", 1) for line in text.splitlines() if "|" in line)


def _call(words: Sequence[str], text: str = "") -> str:
  try:
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
  except FileNotFoundError:
    raise UserError(f"{words[0]}: not found; SLURM is not installed on this machine") from None
  if done.returncode:
    reason = " ".join(done.stderr.split()) or f"status {done.returncode}"
    raise UserError(f"{words[0]}: {reason}")
  return done.stdout


# Sweeps.


def launch(options: Options, root: Path, names: Sequence[str], launch_id: str) -> int:
  """Submits the cells that are neither done nor in the queue, as one array; returns the exit
  status.

  Raises:
    UserError: a bad option, or sbatch refuses.
  """
  check(options)
  live = cell_states(root)
  todo = []
  for name in names:
    record = cell_lib.read_record(root / "cells" / name)
    if record.get("state") == "done":
      continue
    if live.get(name, "") in _LIVE:
      print(f"{name}: in the queue already ({live[name]})")
    else:
      todo.append(name)
  if not todo:
    print("nothing to submit")
    return 0
  script = array_script(options, root, todo, launch_id)
  (root / "logs").mkdir(exist_ok=True)
  for name in todo:  # srun opens the logs of the ranks before the cell makes its folder
    (root / "cells" / name).mkdir(parents=True, exist_ok=True)
  (root / "sbatch.sh").write_text(script, encoding="utf-8")
  job = submit(script)
  with open(root / _JOBS, "a", encoding="utf-8") as file:
    file.write(f"{job} {' '.join(todo)}\n")
  print(f"job {job}: {len(todo)} cells; --status shows them")
  return 0


_LIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED",
         "REQUEUE_HOLD", "SPECIAL_EXIT", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")


def cell_states(root: Path) -> dict[str, str]:
  """SLURM's word for each cell of a sweep that was submitted, by its newest job."""
  try:
    lines = (root / _JOBS).read_text(encoding="utf-8").splitlines()
  except OSError:
    return {}
  found: dict[str, str] = {}
  for line in lines:
    job, *names = line.split()
    known = states(job)
    for task, name in enumerate(names):
      if f"{job}_{task}" in known:
        found[name] = known[f"{job}_{task}"]
  return found


# The command line.


def define_flags(values: flags.FlagValues) -> None:
  """Defines the flags --slurm_... in `values`."""
  flag_options.define("slurm", Options, values)


def options(values: flags.FlagValues) -> Options:
  """The options of the command line, checked.

  Raises:
    UserError: names the flag and its value.
  """
  return flag_options.read("slurm", Options, check, values)


def main() -> None:
  """Submits one command: what stands behind `--`."""
  define_flags(flags.FLAGS)
  flags.DEFINE_string("name", "spec-jax", "name of the job")
  flags.DEFINE_string("logs", "logs", "folder of the logs, one for each rank")
  flags.DEFINE_bool("dry_run", False, "print the script")

  def execute(parsed):
    values, words = parsed
    logs = Path(values.logs).absolute()
    script = command_script(options(values), values.name, logs, words)
    if values.dry_run:
      print(script)
      return
    logs.mkdir(parents=True, exist_ok=True)
    print(f"job {submit(script)}")

  command.run(execute, flag_options.parse)


if __name__ == "__main__":
  main()
