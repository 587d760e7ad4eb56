"""sbatch scripts as text, and the cells of a sweep on a real cluster of one node."""

import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from launch import cell as cell_lib
from launch import slurm, status
from spec_jax.errors import UserError
from tests.launch import cluster, fakes
from tests.train_drafter import processes, tiny_run
from train_drafter import generate, prompts, train


def directives(script):
  lines = script.splitlines()
  return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]


def test_a_process_per_gpu_sees_all_gpus_of_its_host():
  script = slurm.command_script(
    slurm.Options(nodes=2, processes=8, gpus=8, gpu_type="h100", time="8:00:00", partition="long",
                  grace_s=90, container="image.sqsh", setup="module load cuda"),
    "big", Path("/logs"), ["python", "-m", "train_drafter", "--config.x=(0, 1)"])
  words = directives(script)
  assert {"--nodes=2", "--ntasks-per-node=8", "--gres=gpu:h100:8", "--time=8:00:00",
          "--partition=long", "--requeue", "--signal=TERM@90"} <= set(words)
  assert "--gpus-per-task" not in script and "--array" not in script
  step = next(line for line in script.splitlines() if line.startswith("srun"))
  assert "--ntasks=16" in step and "--kill-on-bad-exit=1" in step
  assert "--output=/logs/big-%j-%t.txt" in step and "--container-image=image.sqsh" in step
  assert step.endswith("python -m train_drafter '--config.x=(0, 1)'")
  assert script.index("module load cuda") < script.index("srun")
  bash = subprocess.run(["bash", "-n"], input=script, text=True, check=False)
  assert bash.returncode == 0


@pytest.mark.parametrize("change, said", [
  ({"nodes": 0}, "--slurm_nodes=0 must be at least 1"),
  ({"gpus": 8, "processes": 3}, "--slurm_processes=3 must be 1 .* or 8"),
  ({"gpu_type": "h100"}, "--slurm_gpu_type=h100 needs --slurm_gpus"),
  ({"time": "soon"}, "--slurm_time=soon"),
  ({"extra": "--gpus-per-task=1"}, "--gpus-per-task hides"),
])
def test_what_slurm_would_misread_is_refused(change, said):
  with pytest.raises(UserError, match=said):
    slurm.check(slurm.Options(**change))


def test_without_slurm_the_program_is_named(monkeypatch):
  monkeypatch.setenv("PATH", "/nowhere")
  with pytest.raises(UserError, match="sbatch: not found"):
    slurm.submit("#!/bin/bash\n")


def test_a_cell_of_several_processes_is_joined(tmp_path):
  script = slurm.array_script(slurm.Options(nodes=2, processes=4), tmp_path, ["a"], "x")
  line = next(line for line in script.splitlines() if "launch.cell" in line)
  assert line.endswith(" --distributed") and "--ntasks=8" in script
  assert "--distributed" not in slurm.array_script(slurm.Options(), tmp_path, ["a"], "x")


@pytest.fixture
def slurm_env(tmp_path_factory, monkeypatch):
  """A cluster that this process and its children talk to."""
  absent = cluster.missing()
  if absent:
    pytest.skip(f"SLURM is not installed ({', '.join(absent)}): apt-get install slurm-wlm munge")
  with cluster.running(tmp_path_factory.mktemp("slurm")) as env:
    for name in ("SLURM_CONF", "PATH"):
      monkeypatch.setenv(name, env[name])
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    yield env


def text(*words):
  return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_a_sweep_on_a_cluster(slurm_env, tmp_path, capsys):
  """Three cells: one ends, one fails, one is warned and requeues itself, then is requeued by the
  cluster, and goes on from its part each time. All share what they can."""
  root, names, launch = fakes.write(tmp_path, [
    {"train.loss": "ce"},
    {"train.loss": "tv", "prompts.system": "fail=train"},
    {"train.loss": "tv", "prompts.system": "slow=train"}])
  good, bad, slow = names
  options = slurm.Options(cpus=1, extra="--mem=20")
  try:
    assert slurm.launch(options, root, names, launch) == 0
    job = re.search(r"job (\d+): 3 cells", capsys.readouterr().out)[1]
    cells = {cell.name: cell for cell in cell_lib.load_cells(root)}
    states = lambda: {s.name: s for s in status.read(root)}
    ranks = lambda name: "".join(
      p.read_text() for p in sorted(cells[name].folder.glob("log-*.txt")))
    fakes.wait_for(lambda: states()[good].state == "done", 40)
    fakes.wait_for(lambda: states()[bad].state == "failed", 40)
    assert states()[bad].note == "train.field=1 is wrong"
    fakes.wait_for(lambda: "train: at work" in ranks(slow), 40)
    assert (states()[slow].state, states()[slow].note) == ("running", "RUNNING")
    assert "error: train.field=1" in ranks(bad)  # the log of its rank

    fakes.wait_for(lambda: slurm.states(job).get(f"{job}_1") == "FAILED", 20)
    # Launched again: what failed is submitted, what runs is not.
    assert slurm.launch(options, root, names, "again") == 0
    out = capsys.readouterr().out
    assert f"{slow}: in the queue already (RUNNING)" in out and ": 1 cells" in out

    # As before a time limit: the step alone is told, the job requeues itself.
    restarts = lambda: re.search(r"Restarts=(\d+)", text("scontrol", "show", "job", f"{job}_2"))[1]
    text("scancel", "--signal=TERM", f"{job}_2")
    fakes.wait_for(lambda: restarts() == "1" and ranks(slow).count("at work") == 2, 60)
    # As for another job: the cluster requeues it.
    text("scontrol", "requeue", f"{job}_2")
    fakes.wait_for(lambda: restarts() == "2" and ranks(slow).count("at work") == 3, 60)
    (root / "go").touch()
    fakes.wait_for(lambda: states()[slow].state == "done", 40)
    fakes.wait_for(lambda: slurm.states(job).get(f"{job}_2") == "COMPLETED", 20)
    assert slurm.states(job)[f"{job}_1"] == "FAILED"
  except BaseException:
    for path in sorted(root.rglob("log*/*.txt")) + sorted(root.rglob("log*.txt")):
      print(f"== {path}\n{path.read_text()[-1500:]}", file=sys.stderr)
    raise
  made = [line.split() for line in fakes.made(root)]
  assert [m for m in made if m[:2] == ["train", slow]] == [["train", slow, "resumed"]]
  # Both of loss=tv have prompts of their own (their behaviour is told there); each was made once.
  assert sorted(m[0] for m in made if m[1] == slow) == ["evaluate", "generate", "prompts", "train"]


def test_training_on_two_processes_is_preempted_and_goes_on(slurm_env, tmp_path, monkeypatch):
  """One of two tasks is told to stop in a step: both stop at the same one, the job requeues itself,
  and ends with the parameters of a run of one process."""
  cfg = tiny_run.make_config(tmp_path)
  cfg.train.steps, cfg.train.eval_every = 12, 6
  (tmp_path / "cfg.pickle").write_bytes(pickle.dumps(cfg))
  workdir, one = tmp_path / "run", tmp_path / "one"
  for stage in (prompts, generate):
    stage.run(cfg, workdir)
  shutil.copytree(workdir, one)
  train.run(cfg, one)
  monkeypatch.chdir(processes.ROOT)
  for name, value in processes.environment().items():
    monkeypatch.setenv(name, value)
  words = [sys.executable, "-m", "tests.train_drafter.one_process", f"--workdir={workdir}",
           f"--config={tmp_path / 'cfg.pickle'}", "--stages=train", "--told_at=4", "--told=1"]
  options = slurm.Options(processes=2, extra="--mem=20")
  job = slurm.submit(slurm.command_script(options, "pair", tmp_path, words))
  logs = lambda: [p.read_text() for p in sorted(tmp_path.glob(f"pair-{job}-*.txt"))]
  try:
    fakes.wait_for(lambda: slurm.states(job).get(job) == "COMPLETED", 240)
  except BaseException:
    print("\n==\n".join(logs()), file=sys.stderr)
    raise
  assert "Restarts=1" in text("scontrol", "show", "job", job)
  for log in logs():
    assert log.count("stopped at step") == 1 and log.count("goes on from step") == 1
  same, other = (safetensors.numpy.load_file(str(folder / "train/drafter/drafter.safetensors"))
                 for folder in (one, workdir))
  for name, value in same.items():
    np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-5)


def test_one_command_on_two_processes(slurm_env, tmp_path, monkeypatch):
  """`launch.slurm` alone: a log for each rank, and the job fails as its command does."""
  monkeypatch.chdir(tmp_path)
  # Tasks of a node of two CPUs.
  options = slurm.Options(processes=2, extra="--mem=20")
  code = ("import os; r = os.environ['SLURM_PROCID']; print('rank', r, os.environ['SLURM_NTASKS']);"
          " raise SystemExit(3 * int(r))")
  script = slurm.command_script(options, "pair", tmp_path, [sys.executable, "-c", code])
  job = slurm.submit(script)
  fakes.wait_for(lambda: slurm.states(job).get(job) == "FAILED", 40)
  logs = {p.name: p.read_text() for p in tmp_path.glob("pair-*-*.txt")}
  assert logs[f"pair-{job}-0.txt"].startswith("rank 0 2")
  assert logs[f"pair-{job}-1.txt"].startswith("rank 1 2")
  assert "ExitCode=3:0" in text("scontrol", "show", "job", job)
