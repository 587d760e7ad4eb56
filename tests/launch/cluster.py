"""A SLURM cluster of one node in a temporary folder: munged, slurmctld and slurmd on free ports.

The daemons run as whoever runs the tests; as root, or where the user may start them. Nothing of an
installed cluster's configuration is read.
"""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={daemon}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job waits until the credential of its last start has expired; by default two minutes.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
JobRequeue=1
KillWait=2
MinJobAge=600
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=512 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> list[str]:
  """Programs of SLURM and munge that this machine lacks."""
  return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


@contextlib.contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
  """Starts the cluster; yields the environment in which its commands work."""
  for name in ("state", "spool"):
    (folder / name).mkdir(parents=True)
  host = socket.gethostname().split(".")[0]
  key = folder / "munge.key"
  key.write_bytes(os.urandom(128))
  key.chmod(0o600)
  folder.chmod(0o755)
  conf = folder / "slurm.conf"
  conf.write_text(CONF.format(
    host=host, control=_free_port(), daemon=_free_port(),
    user=getpass.getuser(), folder=folder, cpus=os.cpu_count() or 1))
  env = {**os.environ, "SLURM_CONF": str(conf), "PATH": PATH}
  daemons: list[subprocess.Popen] = []

  def start(*words: str) -> None:
    log = open(folder / f"{words[0]}.out", "ab")
    with log:
      daemons.append(subprocess.Popen(
        words, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True))

  try:
    start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket",
          f"--key-file={key}", f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log",
          f"--seed-file={folder}/munge.seed")
    _wait(lambda: (folder / "munge.socket").exists(), folder, "munged")
    start("slurmctld", "-D", "-c", "-f", str(conf))
    start("slurmd", "-D", "-f", str(conf), "-N", host)
    _wait(lambda: "idle" in _text(["sinfo", "-h", "-o", "%T"], env), folder, "slurmctld, slurmd")
    yield env
  finally:
    _text(["scancel", "--me", "--signal=KILL", "--full"], env)
    for daemon in reversed(daemons):
      daemon.send_signal(signal.SIGTERM)
    for daemon in reversed(daemons):
      try:
        daemon.wait(timeout=10)
      except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def _text(words, env) -> str:
  return subprocess.run(words, env=env, capture_output=True, text=True, check=False).stdout


def _wait(test, folder: Path, what: str) -> None:
  end = time.monotonic() + 30
  while not test():
    if time.monotonic() > end:
      logs = "\n".join(path.read_text(errors="replace")[-2000:]
                       for path in [*folder.glob("*.out"), *folder.glob("*.log")])
      raise RuntimeError(f"{what} did not start:\n{logs}")
    time.sleep(0.1)
