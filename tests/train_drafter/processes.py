"""Starts several real processes that make one run, and waits for them."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def address() -> str:
  """A free port of this machine."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{probe.getsockname()[1]}"


def environment(**more: str) -> dict[str, str]:
  """One CPU device for each process, no second start, and a quick compilation."""
  return {
    **os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": "",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05", **more}


def run(
    words: Sequence[Sequence[str]], timeout: float = 280.0, **more: str
) -> list[tuple[int, str, str]]:
  """(exit status, stdout, stderr) of one Python process for each list of words."""
  started = [
    subprocess.Popen([sys.executable, *own], cwd=ROOT, env=environment(**more), text=True,
                     stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for own in words]
  try:
    found = [process.communicate(timeout=timeout) for process in started]
  finally:
    for process in started:
      if process.poll() is None:
        process.kill()
        process.wait()
  return [(p.returncode, out, err) for p, (out, err) in zip(started, found, strict=True)]


def stages(
    count: int, config: Path, workdir: Path, stages: str, *more: str, **options
) -> list[tuple[int, str, str]]:
  """Runs stages of a pickled config in `count` processes."""
  place = address()
  return run([
    ["-m", "tests.train_drafter.one_process", f"--config={config}", f"--workdir={workdir}",
     f"--stages={stages}", f"--address={place}", f"--count={count}", f"--index={i}", *more]
    for i in range(count)], **options)
