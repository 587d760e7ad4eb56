"""The first meeting of the processes of a run, before JAX starts them.

Where a process is missing, JAX's own start ends the others by a failed check that names nobody. So
each first says to process 0 who it is, on the port that JAX's coordinator takes afterwards, and
hears whether all are there. Called by distributed.py.
"""

import json
import socket
import time
from typing import Any

from spec_jax.errors import UserError

_LONGEST = 4096  # bytes of a message
_PATIENCE_S = 5.0  # for a message of somebody who has connected
_RETRY_S = 0.2


def meet(address: str, count: int, own: int, timeout_s: float) -> None:
  """Returns once every process has come.

  Args:
    address: host:port of process 0.
    count: processes.
    own: which this is.
    timeout_s: how long to wait.

  Raises:
    UserError: names who did not come, or comes twice, or counts otherwise.
  """
  host, _, port = address.rpartition(":")
  end = time.monotonic() + timeout_s
  if own == 0:
    reason = _receive(int(port), count, end, timeout_s)
  else:
    told = {"process": own, "count": count, "host": socket.gethostname()}
    reason = _report(host.strip("[]"), int(port), told, end, timeout_s)
  if reason:
    raise UserError(f"--distributed: {reason}")


def _receive(port: int, count: int, end: float, timeout_s: float) -> str:
  """Process 0: hears the others, and tells them what it returns."""
  there, lines, reason = {0: socket.gethostname()}, [], ""
  with _listen(port) as server:
    while len(there) < count and not reason:
      server.settimeout(max(end - time.monotonic(), 0.01))
      try:
        line, _ = server.accept()
      except TimeoutError:
        missing = ", ".join(str(i) for i in range(count) if i not in there)
        reason = f"process {missing} of {count} did not come within {timeout_s:g} s"
        break
      line.settimeout(_PATIENCE_S)
      said = _read(line)
      if said is None:  # a stranger
        line.close()
        continue
      lines.append(line)
      own, place = said["process"], said["host"]
      if said["count"] != count:
        reason = (f"process {own} ({place}) counts {said['count']} processes, process 0 "
                  f"({there[0]}) counts {count}")
      elif own in there:
        reason = f"two processes say that they are process {own} ({there[own]} and {place})"
      there[own] = place
  for line in lines:
    with line:
      try:
        line.sendall(json.dumps({"reason": reason}).encode() + b"\n")
        line.recv(1)  # the other closes first, so that the port is free at once
      except OSError:
        pass  # it has gone: JAX's start finds that out
  return reason


def _report(host: str, port: int, told: dict[str, Any], end: float, timeout_s: float) -> str:
  """Any other process: says who it is, and returns what process 0 answers."""
  while True:
    left = end - time.monotonic()
    if left <= 0:
      return (f"process 0 of {told['count']}, the coordinator, did not answer at {host}:{port} "
              f"within {timeout_s:g} s")
    try:
      with socket.create_connection((host, port), timeout=min(left, _PATIENCE_S)) as line:
        line.sendall(json.dumps(told).encode() + b"\n")
        line.settimeout(left + _PATIENCE_S)  # process 0 may have come later, and knows more
        answer = _read(line)
      if answer is not None:
        return answer["reason"]
    except OSError:
      pass
    time.sleep(_RETRY_S)


def _listen(port: int) -> socket.socket:
  try:
    if socket.has_dualstack_ipv6():
      return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
  except OSError as error:
    raise UserError(f"--distributed: port {port} of process 0 cannot be opened "
                    f"({error.strerror})") from None


def _read(line: socket.socket) -> dict[str, Any] | None:
  """One message; None for anything else."""
  text = b""
  try:
    while not text.endswith(b"\n") and len(text) < _LONGEST:
      more = line.recv(_LONGEST)
      if not more:
        return None
      text += more
    found = json.loads(text)
    return found if isinstance(found, dict) and ("process" in found or "reason" in found) else None
  except (OSError, ValueError):
    return None
