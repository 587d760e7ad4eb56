"""Two and four real processes make the run that one makes; who is missing is named; a signal to one
stops all."""

import json
import os
import pickle
import shutil
import signal
import socket
import time
from concurrent import futures

import numpy as np
import pytest
import safetensors.numpy
from absl import flags

from spec_jax.errors import UserError
from spec_jax.records import RowRecords
from tests.train_drafter import processes, tiny_run
from train_drafter import __main__ as program
from train_drafter import distributed, evaluate, generate, rendezvous, report, shares, store
from train_drafter.distributed import Options

MEETINGS = """
import json, os, sys, time
from train_drafter import distributed
from spec_jax.errors import UserError
count, own, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
said = []

def meet(work, *args):
  try:
    said.append(work(*args))
  except UserError as error:
    said.append(f"error: {error}")

if own == 1:
  time.sleep(2.0)  # late, and waited for
  os.environ.update(SLURM_JOB_ID="7", SLURM_NTASKS="9", SLURM_PROCID="5", SLURM_LOCALID="5",
                    SLURM_STEP_NODELIST="elsewhere")
with distributed.running(distributed.Options(address, count, own, 60.0)):
  meet(distributed.gather, "who", own)
  meet(distributed.agree, "train: steps", 10 - (own == 1))
  meet(distributed.from_primary, "plan", own + 40)
  said.append(list(distributed.share(range(5))))
  if own != 1:  # the other comes to the next one only
    meet(distributed.barrier, "the last batch", 0.6)
  meet(distributed.barrier, "after it")
  with distributed.primary_first("the folder"):
    said.append(time.time())
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def met():
  """What two processes said, one of them late and with SLURM's variables of another job."""
  place = processes.address()
  return processes.run([["-c", MEETINGS, "2", str(i), place] for i in range(2)])


def test_processes_agree_before_they_start(met):
  said = [json.loads(out) for code, out, err in met if not code or pytest.fail(err)]
  assert [s[0] for s in said] == [[0, 1], [0, 1]]  # a stray SLURM job has no say
  for s in said:  # CASE 37: a batch fewer
    assert s[1].startswith("error: train: steps: process 0 (") and s[1].endswith("has 9")
    assert ") has 10, process 1 (" in s[1] and s[2] == 40
  assert [s[3] for s in said] == [[0, 2, 4], [1, 3]]


def test_a_timeout_names_who_is_missing(met):
  first, second = (json.loads(out) for _, out, _ in met)
  assert first[4].startswith("error: the last batch: process 1 (")
  assert "of 2 did not come within 0.6 s" in first[4]
  assert first[5] is None and second[4] is None  # late ones go on together
  assert first[6] < second[5]  # the first process wrote before the other looked


FAILING = """
import sys
from absl import flags
from spec_jax import command
from spec_jax.errors import UserError
from train_drafter import distributed
own, address = int(sys.argv[1]), sys.argv[2]

def execute(_):
  with distributed.running(distributed.Options(address, 2, own, 60.0)):
    if own == 1:
      raise UserError("the disk is full")
    distributed.barrier("all parts", float("inf"))

command.run(execute, lambda argv: flags.FLAGS(argv[:1]) and 1)
"""


def test_a_process_that_fails_tells_the_others_why():
  place = processes.address()
  found = processes.run([["-c", FAILING, str(i), place] for i in range(2)])
  assert [code for code, _, _ in found] == [2, 2]
  assert found[1][2].endswith("error: the disk is full\n")
  assert found[0][2].endswith(
    f"error: all parts: process 1 ({socket.gethostname()}) failed: the disk is full\n")


def meeting(*processes_of, timeout=1.0, place=None):
  """What the first meeting says to threads that stand for (number, of how many); "" if all came."""
  place = place or processes.address()

  def one(own, count):
    try:
      rendezvous.meet(place, count, own, timeout)
    except UserError as error:
      return str(error)
    return ""

  with futures.ThreadPoolExecutor(8) as pool:
    return list(pool.map(one, *zip(*processes_of, strict=True)))


def test_one_that_never_starts_is_named():
  host = socket.gethostname()
  assert meeting((0, 3), (2, 3), timeout=0.7) == [
    "--distributed: process 1 of 3 did not come within 0.7 s"] * 2
  said, = meeting((1, 2), timeout=0.7, place="127.0.0.1:9")
  assert said == ("--distributed: process 0 of 2, the coordinator, did not answer at 127.0.0.1:9 "
                  "within 0.7 s")
  twice = f"--distributed: two processes say that they are process 1 ({host} and {host})"
  assert meeting((0, 3), (1, 3), (1, 3)) == [twice] * 3
  other = f"process 1 ({host}) counts 3 processes, process 0 ({host}) counts 2"
  assert meeting((0, 2), (1, 3)) == [f"--distributed: {other}"] * 2


def test_a_stranger_at_the_door_is_no_process():
  place = processes.address()
  host, port = place.split(":")

  def strange():
    for _ in range(50):
      time.sleep(0.02)
      try:
        with socket.create_connection((host, int(port)), 1) as line:
          line.sendall(b"GET / HTTP/1.0\r\n\r\n")
          return line.recv(10)
      except OSError:
        pass
    raise AssertionError

  with futures.ThreadPoolExecutor(1) as pool:
    first = pool.submit(strange)
    assert meeting((0, 2), place=place) == [
      "--distributed: process 1 of 2 did not come within 1 s"]
    assert first.result() == b""


def test_processes_that_nobody_counts_are_told_what_to_give(monkeypatch):
  for name in list(os.environ):
    if name.startswith(("SLURM_", "OMPI_", "JAX_")):
      monkeypatch.delenv(name)
  with pytest.raises(UserError, match="give --coordinator_address, --num_processes, --process_id"):
    distributed._found(Options())


def test_processes_are_joined_only_when_asked(monkeypatch):
  for name, value in {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
                      "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "a"}.items():
    monkeypatch.setenv(name, value)
  with distributed.running(None):
    assert (distributed.count(), distributed.index(), distributed.is_primary()) == (1, 0, True)
    assert distributed.gather("alone", 3) == [3] and list(distributed.share("abc")) == [*"abc"]
    distributed.barrier("alone")


@pytest.mark.parametrize("options, said", [
  (Options("host", 2, 0), "--coordinator_address=host must be host:port"),
  (Options("host:1", 2, 2), "--process_id=2 must be in 0..1"),
  (Options("host:1", 2, 0, 0.0), "--distributed_timeout_s=0.0 must be > 0"),
])
def test_bad_options_are_named(options, said):
  with pytest.raises(UserError, match=said):
    distributed.with_environment(options)


def test_the_environment_fills_what_is_unset(monkeypatch):
  monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "a:1")
  monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
  monkeypatch.setenv("JAX_PROCESS_ID", "3")
  assert distributed.with_environment(Options()) == Options("a:1", 4, 3)
  assert distributed.with_environment(Options("b:2", 5, 0)) == Options("b:2", 5, 0)
  monkeypatch.setenv("JAX_PROCESS_ID", "x")
  with pytest.raises(UserError, match="JAX_PROCESS_ID=x must be a number"):
    distributed.with_environment(Options())


def test_the_flags_of_a_process():
  def parse(*more):
    values = flags.FlagValues()
    argv = ["prog", "--config=configs/quickstart.py", "--workdir=x", *more]
    program.define_flags(values, argv)
    return program.parse(argv, values).joined

  assert parse() is None and parse("--distributed") == Options()
  assert parse("--distributed", "--coordinator_address=a:1", "--num_processes=2", "--process_id=1",
               "--distributed_timeout_s=9") == Options("a:1", 2, 1, 9.0)
  with pytest.raises(UserError, match="need --distributed"):
    parse("--num_processes=2")


def test_sigterm_ends_a_stage_that_has_nothing_to_save():
  before = signal.getsignal(signal.SIGTERM)
  with pytest.raises(SystemExit) as stopped, distributed.leaving_on_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError
  assert stopped.value.code == 143 and signal.getsignal(signal.SIGTERM) is before


# The same run by one, two and four processes.


def make_config(root):
  """dflash on a stored tiny target; rows that four processes can share."""
  cfg = tiny_run.make_config(root)
  cfg.drafter.kind, cfg.drafter.num_taps, cfg.drafter.init_layers = "dflash", 1, (1,)
  cfg.drafter.block_size, cfg.drafter.anchors, cfg.drafter.mask_id = 4, 8, 1
  cfg.train.batch_rows, cfg.train.steps, cfg.train.eval_every = 4, 12, 6
  cfg.features.shard_tokens = 1024
  options = cfg.evaluate
  options.temperatures, options.speed_dtypes, options.same_shape = (1.0,), (), False
  options.more_draft_lens, options.longest_draft_len = (), options.draft_len
  options.self_prompts = 0
  return cfg


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  """(config, its pickle, workdir) of the run of one process."""
  root = tmp_path_factory.mktemp("alone")
  cfg = make_config(root)
  path = root / "cfg.pickle"
  path.write_bytes(pickle.dumps(cfg))
  program.execute(program.Options(
    pickle.loads(path.read_bytes()), root / "run",
    ("prompts", "generate", "extract", "train", "evaluate"), False, False, "test"))
  return cfg, path, root / "run"


def weights(workdir):
  return safetensors.numpy.load_file(str(workdir / "train" / "drafter" / "drafter.safetensors"))


def assert_same_drafter(one, other):
  one, other = weights(one), weights(other)
  assert one.keys() == other.keys()
  for name, value in one.items():
    np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def stopped(alone, tmp_path_factory):
  """(workdir, outcome) of two processes of which the second is told to stop in training."""
  cfg, path, _ = alone
  workdir = tmp_path_factory.mktemp("two") / "run"
  outcome = processes.stages(
    2, path, workdir, "prompts,generate,extract,train", "--told_at=4", "--told=1")
  assert [code for code, _, _ in outcome] == [143, 143], outcome
  return workdir, outcome


def test_two_processes_answer_and_extract_as_one(alone, stopped):
  _, _, one = alone
  two, _ = stopped
  parts = sorted(p.name for p in (two / "generate").glob("part-*.npz"))
  assert len(parts) == 2  # one of each process
  answers = [generate.load_answers(folder / "generate") for folder in (one, two)]
  assert len(answers[0]) == len(answers[1]) == 24
  for a, b in zip(*answers, strict=True):
    assert a.job == b.job
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.hidden, b.hidden)
  first, second = (store.open_store(folder / "extract") for folder in (one, two))
  assert len({d.part.folder for d in second.documents}) == 2
  for a, b in zip(first.documents, second.documents, strict=True):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.features(), b.features())


@pytest.fixture(scope="module")
def four(alone, stopped):
  """What four processes said that went on from there, and whether there was a drafter before."""
  _, path, _ = alone
  workdir, _ = stopped
  early = (workdir / "train" / "drafter").exists()
  found = processes.stages(4, path, workdir, "generate,extract,train")
  assert [code for code, _, _ in found] == [0] * 4, found
  return found, early


def test_a_signal_to_one_stops_all_and_four_go_on_to_the_same_drafter(alone, stopped, four):
  """CASE 36: SIGTERM during a step of one of two processes; the job goes on with four."""
  _, path, one = alone
  workdir, outcome = stopped
  four, early = four
  lines = [[line for line in out.splitlines() if "stopped at step" in line]
           for _, out, _ in outcome]
  assert lines[0] == lines[1] and len(lines[0]) == 1
  assert not early
  assert "goes on from step" in four[0][1] and "reused" in four[3][1]
  assert_same_drafter(one, workdir)
  log = (workdir / "train" / "metrics.jsonl").read_text().splitlines()
  steps = [row["step"] for row in map(json.loads, log) if row["split"] == "train"]
  assert steps == list(range(1, 13))


def test_two_processes_evaluate_as_one(alone, tmp_path):
  """Sampled at temperature 1: each prompt has its own random numbers, whoever decodes it."""
  cfg, path, one = alone
  workdir = tmp_path / "run"
  shutil.copytree(one, workdir, ignore=shutil.ignore_patterns("evaluate", "*.lock"))
  outcome = processes.stages(2, path, workdir, "evaluate")
  assert [code for code, _, _ in outcome] == [0, 0], outcome
  for _, out, _ in outcome:
    assert "decodes 3 of 6" in out and "decodes 6 of 6" not in out
  for name in evaluate.names(cfg):
    rows = [report.load_records(evaluate.records_path(folder, name, 1.0, "ratio"))
            for folder in (one, workdir)]
    ours, theirs = (found[name][1.0, "ratio"] for found in rows)
    assert [r["id"] for r in ours] == [r["id"] for r in theirs] and ours, name
    for a, b in zip(ours, theirs, strict=True):
      assert a["tokens"] == b["tokens"], (name, a["id"])
      np.testing.assert_array_equal(a["records"].accepted, b["records"].accepted)
  parts = workdir / "evaluate" / "parts"
  assert not list(parts.glob("*share*")) and (workdir / "evaluate" / "report.json").exists()


def test_a_share_that_is_there_is_not_decoded_again(tmp_path, monkeypatch):
  """Two processes were stopped, one of them with its share done."""
  row = lambda i: {"id": f"p{i}", "category": "qa", "tokens": [i, i, i],
                   "records": RowRecords([1], [1], [2], "length")}
  monkeypatch.setattr(distributed, "count", lambda: 2)
  monkeypatch.setattr(distributed, "barrier", lambda *args: None)
  path, key = tmp_path / "x-T1-ratio.jsonl", ("x", 1.0, "ratio")
  save = lambda name, members: report.save_records(
    tmp_path / name, {"x": {(1.0, "ratio"): [row(i) for i in members]}})
  save("x-T1-ratio.share-0-of-2.jsonl", [4, 9])
  save("x-T1-ratio.share-1-of-2.jsonl", [5])
  save("x-T1-ratio.share-0-of-3.jsonl", [7])  # of a run of other size

  def decode(members):
    raise AssertionError(members)

  assert [r["id"] for r in shares.records(path, key, [4, 5, 9], decode)] == ["p4", "p5", "p9"]
  assert [p.name for p in tmp_path.iterdir()] == [path.name]
  path.unlink()
  save("x-T1-ratio.share-1-of-2.jsonl", [5])
  found = shares.records(path, key, [4, 5, 9], lambda members: [row(i) for i in members])
  assert [r["id"] for r in found] == ["p4", "p5", "p9"]
  path.unlink()
  found = shares.records(path, key, [4], lambda members: [row(i) for i in members])
  assert [r["id"] for r in found] == ["p4"]  # none for the second process
