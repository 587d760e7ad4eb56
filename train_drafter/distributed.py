"""Several processes that make one run: who they are, where they meet, what they agree on.

`__main__` starts and ends it; every stage asks here which share of the work is its own and who
writes. In a run of one process everything here returns at once.

JAX starts the processes (`jax.distributed.initialize`); the meeting points stand on the key-value
store of its coordinator and not on its barriers, because a process that waits here still hears a
signal, and because an error can then say who is missing and why. All processes see one work folder.
"""

import atexit
import contextlib
import dataclasses
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import clusters  # what jax.distributed.initialize finds out by itself
from jax._src import distributed as jax_distributed  # its client has no public name
from jax.experimental import multihost_utils

from spec_jax.errors import UserError
from train_drafter import rendezvous

TIMEOUT_S = 600.0
STOPPED = 128 + signal.SIGTERM  # exit status of a run that was told to stop and saved its work
_SHUTDOWN_S = 30  # that the end of a process waits for the others
_WATCH_S = 1.0  # between two looks at what other processes were told
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.01, 0.5  # between two looks at a meeting point


@dataclasses.dataclass(frozen=True)
class Options:
  """How the processes find each other; what is not set is found out by JAX (SLURM, TPU, GKE, MPI).

  Attributes:
    coordinator_address: host:port of process 0.
    num_processes: of the run; 0 where unset.
    process_id: of this process; -1 where unset.
    timeout_s: how long a process waits for the others, at the start and at a meeting point.
  """

  coordinator_address: str = ""
  num_processes: int = 0
  process_id: int = -1
  timeout_s: float = TIMEOUT_S

  @property
  def explicit(self) -> bool:
    """Whether nothing is left to find out."""
    return bool(self.coordinator_address) and self.num_processes > 0 and self.process_id >= 0


_VARIABLES = {"coordinator_address": "JAX_COORDINATOR_ADDRESS", "num_processes":
              "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}


def with_environment(options: Options) -> Options:
  """The options with what is unset taken from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
  JAX_PROCESS_ID.

  Raises:
    UserError: a value is no number or makes no sense.
  """
  unset = Options()
  found = {}
  for name, variable in _VARIABLES.items():
    text = os.environ.get(variable, "")
    if getattr(options, name) == getattr(unset, name) and text:
      if name != "coordinator_address" and not text.isdigit():
        raise UserError(f"{variable}={text} must be a number")
      found[name] = text if name == "coordinator_address" else int(text)
  options = dataclasses.replace(options, **found)
  if options.coordinator_address and ":" not in options.coordinator_address:
    raise UserError(f"--coordinator_address={options.coordinator_address} must be host:port")
  if options.num_processes < 0:
    raise UserError(f"--num_processes={options.num_processes} must be at least 1")
  if options.num_processes and not -1 <= options.process_id < options.num_processes:
    raise UserError(f"--process_id={options.process_id} must be in 0..{options.num_processes - 1} "
                    f"(--num_processes={options.num_processes})")
  if not options.timeout_s > 0:
    raise UserError(f"--distributed_timeout_s={options.timeout_s} must be > 0")
  return options


class _Session:
  """What a process of a started run keeps.

  Attributes:
    timeout_s: of a meeting point.
    used: name of a meeting point -> how often it was used.
    told: whether this process has passed a signal on.
  """

  def __init__(self, timeout_s: float):
    self.timeout_s = timeout_s
    self.used: dict[str, int] = {}
    self.told = False
    self._ended = threading.Event()
    self._watcher = threading.Thread(target=self._watch, name="told-to-stop", daemon=True)

  @property
  def client(self) -> Any:
    """The client of JAX's coordinator."""
    return jax_distributed.global_state.client

  def begin(self) -> None:
    """Starts to look whether another process was told to stop."""
    self._watcher.start()

  def end(self) -> None:
    """Ends the looking, before the client is gone."""
    self._ended.set()
    if self._watcher.is_alive():
      self._watcher.join(5)

  def read(self, folder: str) -> dict[int, str]:
    """Process -> value of the keys `folder`/<process> that are set."""
    found = self.client.key_value_dir_get(f"{folder}/")
    return {int(key.rsplit("/", 1)[1]): value for key, value in found}

  def write(self, folder: str, value: str) -> None:
    """Sets the key of this process."""
    self.client.key_value_set(f"{folder}/{index()}", value, allow_overwrite=True)

  def _watch(self) -> None:
    """A signal to one process becomes one to each: what a scheduler sends to one host alone must
    not leave the others waiting for it."""
    while not self._ended.wait(_WATCH_S):
      try:
        told = self.read(_TOLD)
      except Exception:  # the coordinator is gone: JAX ends the process
        return
      if told and not self.told:
        self.told = True
        os.kill(os.getpid(), int(next(iter(told.values()))))
        return


_session: _Session | None = None
_alone = False
_TOLD, _FAILED, _HOSTS = "spec_jax/told", "spec_jax/failed", "spec_jax/hosts"
_LEFT = "told to stop"


def start(options: Options) -> None:
  """Joins the run. Call it before anything that starts JAX's backend.

  Raises:
    UserError: nothing says which processes there are, or one of them did not come in time (names
      it).
  """
  global _session
  options = with_environment(options)
  # Its handler of SIGTERM would stand against those of the stages.
  jax.config.update("jax_enable_preemption_service", False)
  place, total, own, devices = _found(options)
  rendezvous.meet(place, total, own, options.timeout_s)
  jax.distributed.initialize(
      place, total, own, devices, cluster_detection_method="deactivate",
      shutdown_timeout_seconds=_SHUTDOWN_S)
  _session = _Session(options.timeout_s)
  _session.begin()
  atexit.register(_session.end)  # runs before JAX's own
  _session.write(_HOSTS, socket.gethostname())


def _visible_gpus() -> list[int] | None:
  """The GPUs of this process where SLURM runs one for a host: all of them. JAX would take the one
  that has the number of the task; None leaves the choice to it."""
  tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", os.environ.get("SLURM_TASKS_PER_NODE", ""))
  gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
  if tasks.split("(")[0] == "1" and gpus.isdigit() and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
    return list(range(int(gpus)))
  return None


def _found(options: Options) -> tuple[str, int, int, Sequence[int] | None]:
  """Coordinator, number of processes, number of this one, and its devices (None for all).

  Raises:
    UserError: nothing says them.
  """
  place, total, own = (
      options.coordinator_address or None, options.num_processes or None,
      options.process_id if options.process_id >= 0 else None)
  devices = None
  # A stray SLURM_JOB_ID must not have a say where everything is given.
  if not options.explicit:
    place, total, own, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        place, total, own, _visible_gpus(), None, math.ceil(options.timeout_s))
  missing = [f"--{name}" for name, value in (
      ("coordinator_address", place), ("num_processes", total), ("process_id", own))
      if value is None]
  if missing:
    raise UserError(f"--distributed: neither SLURM, TPU, GKE nor MPI says who the processes are; "
                    f"give {', '.join(missing)}")
  return place, total, own, devices


def stop() -> None:
  """Leaves the run, once all processes are here.

  Raises:
    UserError: one of them is missing.
  """
  global _session
  if _session is None:
    return
  barrier("the end")
  _session.end()
  _session = None
  jax.distributed.shutdown()


@contextlib.contextmanager
def running(options: Options | None) -> Iterator[None]:
  """The body as one process of a run; on its own where there are no options.

  Raises:
    UserError: as `start` and `stop`.
  """
  if options is None:
    yield
    return
  start(options)
  try:
    yield
  except SystemExit:  # told to stop: the others were told too
    fail(_LEFT)
    raise
  except BaseException as error:
    fail(str(error) or type(error).__name__)
    raise
  stop()


def index() -> int:
  """This process, 0-based; asking does not start JAX's backend."""
  return jax_distributed.global_state.process_id


def count() -> int:
  """Processes that work together: those of the run, one inside `alone`."""
  return 1 if _alone else jax_distributed.global_state.num_processes


@contextlib.contextmanager
def alone() -> Iterator[None]:
  """The body runs in this process only: nothing in it waits for the others."""
  global _alone
  before, _alone = _alone, True
  try:
    yield
  finally:
    _alone = before


def is_primary() -> bool:
  """Whether this process writes what is written once (manifests, logs, reports)."""
  return index() == 0


def share[T](items: Sequence[T]) -> Sequence[T]:
  """Every count()-th of the items: those that are this process's own."""
  return items if count() == 1 else items[index()::count()]


def gather(name: str, value: Any = None, timeout_s: float | None = None) -> list[Any]:
  """A meeting point: waits until every process is here; returns their values, process by process.

  Args:
    name: of the meeting point, for people; all processes come to the same ones in the same order.
    value: JSON.
    timeout_s: how long to wait; that of the start when None, `math.inf` as long as the others live.

  Raises:
    UserError: a process did not come in time, or failed: names it, with its host.
    SystemExit: it was told to stop, and has.
  """
  if _session is None or _alone:
    return [value]
  number = _session.used[name] = _session.used.get(name, 0) + 1
  folder = f"spec_jax/at/{name.replace('/', ' ')}#{number}"
  _session.write(folder, json.dumps(value))
  patience = _session.timeout_s if timeout_s is None else timeout_s
  end, wait = time.monotonic() + patience, _FIRST_WAIT_S
  while len(there := _session.read(folder)) < count():
    missing = [i for i in range(count()) if i not in there]
    failed = _session.read(_FAILED)
    for i in missing:
      if failed.get(i) == _LEFT:
        raise SystemExit(STOPPED)
      if i in failed:
        raise UserError(f"{name}: {_named(i)} failed: {failed[i]}")
    if time.monotonic() > end:
      raise UserError(
          f"{name}: {', '.join(map(_named, missing))} of {count()} did not come within "
          f"{patience:g} s; look into the log of that process, or raise --distributed_timeout_s")
    time.sleep(wait)
    wait = min(2 * wait, _LONGEST_WAIT_S)
  return [json.loads(there[i]) for i in range(count())]


def _named(process: int) -> str:
  hosts = _session.read(_HOSTS) if _session is not None else {}
  return f"process {process} ({hosts[process]})" if process in hosts else f"process {process}"


def barrier(name: str, timeout_s: float | None = None) -> None:
  """Waits until every process is here.

  Raises:
    UserError: as `gather`.
  """
  gather(name, None, timeout_s)


def agree[T](name: str, value: T) -> T:
  """The value, which must be the same in every process.

  Raises:
    UserError: it is not (names the processes and their values), or as `gather`.
  """
  found = gather(name, value)
  for i, other in enumerate(found):
    if other != found[0]:
      raise UserError(f"{name}: {_named(0)} has {found[0]}, {_named(i)} has {other}")
  return value


def from_primary(name: str, value: Any, timeout_s: float | None = None) -> Any:
  """The value that process 0 has.

  Raises:
    UserError: as `gather`.
  """
  return gather(name, value, timeout_s)[0]


@contextlib.contextmanager
def primary_first(name: str) -> Iterator[None]:
  """The body runs in process 0, and then in the others at once: what they would write is there.

  A body that raises in process 0 does not keep the others from theirs, which fails likewise.

  Raises:
    UserError: as `gather`.
  """
  if not is_primary():
    barrier(name, math.inf)
  try:
    yield
  finally:
    if is_primary():
      barrier(name)
  barrier(f"{name}, all")


def fail(reason: str) -> None:
  """Tells the others why this process will not come any more."""
  if _session is not None:
    with contextlib.suppress(Exception):  # the coordinator may be what has failed
      _session.write(_FAILED, reason)


def tell(signum: int) -> None:
  """Passes a signal on to the other processes. Called by handlers of signals."""
  if _session is not None and not _session.told:
    _session.told = True
    with contextlib.suppress(Exception):
      _session.write(_TOLD, str(int(signum)))


def most(*values: float) -> list[float]:
  """The largest of each value over all processes, which must all ask at the same step.

  This one goes over the devices and not over the coordinator: it comes behind the steps that were
  dispatched, and costs no more than a step's own reductions.
  """
  if count() == 1:
    return list(values)
  found = multihost_utils.process_allgather(np.asarray(values, np.float32))
  return [float(x) for x in found.max(0)]


@contextlib.contextmanager
def leaving_on_sigterm() -> Iterator[None]:
  """SIGTERM ends the body with status 143; a stage that has something to save hears it itself."""
  def handler(signum, frame):
    del frame
    tell(signum)
    print("stopped; the same command goes on from here", file=sys.stderr, flush=True)
    raise SystemExit(STOPPED)

  before = signal.signal(signal.SIGTERM, handler)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before)
