"""Where a report comes from: the command, the code, the machine and what was decoded.

`train_drafter.evaluate` puts it into the report; `launch.compare` reads the hashes to tell whether
two runs decoded the same prompts with the same target.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from train_drafter.manifest import Manifest

UNKNOWN = "unknown"


def prompt_hashes(names: Sequence[str], ids: Sequence[Sequence[int]]) -> dict[str, str]:
  """Name of each prompt -> short SHA-256 of its token ids, the chat template applied."""
  text = lambda tokens: json.dumps([int(t) for t in tokens]).encode()
  return {name: hashlib.sha256(text(tokens)).hexdigest()[:16]
          for name, tokens in zip(names, ids, strict=True)}


def machine() -> dict[str, Any]:
  """The machine of this process, without its name: backend, devices, processor, memory, system."""
  try:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  except (ValueError, OSError):
    memory = None
  return {
      "backend": jax.default_backend(),
      "device": jax.devices()[0].device_kind,
      "devices": jax.device_count(),
      "processes": jax.process_count(),
      "processor": _processor(),
      "cores": os.cpu_count(),
      "memory_bytes": memory,
      "system": f"{platform.system()} {platform.release()} {platform.machine()}",
      "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }


def _processor() -> str:
  """The processor's own name where the system tells it."""
  try:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
  except OSError:
    lines = []
  named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
  return named[0] if named else platform.processor() or UNKNOWN


def _files_hash(folder: Path) -> str:
  """SHA-256 over names and content of a folder's files, which may be larger than memory."""
  whole = hashlib.sha256()
  for path in sorted(path for path in folder.rglob("*") if path.is_file()):
    with open(path, "rb") as file:
      digest = hashlib.file_digest(file, "sha256").hexdigest()
    whole.update(f"{path.relative_to(folder)} {digest}\n".encode())
  return whole.hexdigest()


def command() -> str:
  """The command line of this process, the interpreter without its path."""
  return shlex.join(["python", *sys.orig_argv[1:]])


def provenance(config: Any, opened: Manifest, hashes: Mapping[str, str],
               drafter: Path) -> dict[str, Any]:
  """What can be known about an evaluation while it is collected.

  Args:
    config: of the whole run, a dataclass, as resolved.
    opened: manifest of the evaluate stage.
    hashes: of `prompt_hashes`.
    drafter: folder of the trained drafter.

  Returns:
    JSON values: the command line, the commit ("unknown" outside a checkout), versions, dates,
    SHA-256 of the stages read, of target, tokenizer, template, drafter and prompts, the machine and
    the config.
  """
  everything = json.dumps(sorted(hashes.items())).encode()
  return {
      "command": command(),
      "git_commit": opened.git_commit or UNKNOWN,
      "packages": opened.packages,
      "created": opened.created,
      "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
      "inputs": opened.inputs,
      "target_weights": opened.target.weights,
      "tokenizer": opened.target.tokenizer,
      "chat_template": opened.target.chat_template,
      "drafter_files": _files_hash(drafter),
      "prompts": len(hashes),
      "prompts_hash": hashlib.sha256(everything).hexdigest(),
      "prompt_hashes": dict(hashes),
      "device": jax.devices()[0].device_kind,
      "cores": os.cpu_count(),
      "machine": machine(),
      "config": json.loads(json.dumps(dataclasses.asdict(config))),
  }
