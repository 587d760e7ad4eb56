"""What a stage folder was made from, in its manifest.json. Every stage begins and ends with it.

A stage calls `require` for each folder it reads, `begin` on its own folder, works, and calls
`finish`. `begin` answers with a complete manifest (reuse the folder), an incomplete one of the same
hash (resume in it), or refuses.
"""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from spec_jax.errors import UserError
from train_drafter import distributed

FILE = "manifest.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")


@dataclasses.dataclass(frozen=True)
class TargetId:
  """Which target a stage ran: its name and the SHA-256 of weights, tokenizer and chat template."""

  name: str = ""
  weights: str = ""
  tokenizer: str = ""
  chat_template: str = ""

  def hashes(self) -> dict[str, str]:
    """The parts that determine a stage; the name is for people."""
    return {
      "target weights": self.weights,
      "tokenizer": self.tokenizer,
      "chat template": self.chat_template,
    }


@dataclasses.dataclass
class Manifest:
  """The content of manifest.json.

  Attributes:
    stage: name of the stage that wrote the folder.
    config: the part of the config that determines the folder, nested as in the whole config.
    hash: `stage_hash` of the config, the inputs and the target.
    inputs: stage name -> hash of the manifest that was read.
    run: random id of the run that made the folder. Two runs of one hash may differ in content (a
      time budget, another version of the code), so what was made from one is not reused for the
      other.
    read: stage name -> `run` of the manifest that was read.
    target: the target that was run.
    counts: what is in the folder (kept, supervised, dropped by reason, ...).
    packages: versions of Python and of the packages that matter.
    git_commit: commit of the code, "-dirty" when it had changes; "" outside a repository.
    created: time of `begin`, ISO 8601, UTC.
    files: name -> bytes of the files that later stages read.
    complete: the stage ended; written last.
  """

  stage: str
  config: dict[str, Any]
  hash: str
  inputs: dict[str, str]
  target: TargetId
  run: str = ""
  read: dict[str, str] = dataclasses.field(default_factory=dict)
  counts: dict[str, Any] = dataclasses.field(default_factory=dict)
  packages: dict[str, str] = dataclasses.field(default_factory=dict)
  git_commit: str = ""
  created: str = ""
  files: dict[str, int] = dataclasses.field(default_factory=dict)
  complete: bool = False

  @classmethod
  def load(cls, folder: Path) -> "Manifest":
    """Reads `folder`/manifest.json.

    Raises:
      UserError: there is none, it cannot be read, or its hash is not that of its content.
    """
    path = folder / FILE
    try:
      fields = json.loads(path.read_text(encoding="utf-8"))
      manifest = cls(**{**fields, "target": TargetId(**fields["target"])})
    except OSError as error:
      raise UserError(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
      raise UserError(f"{path}: damaged, no stage manifest ({error}); remove {folder} and run its "
                      "stage again") from error
    real = stage_hash(manifest.config, {**manifest.inputs, **manifest.target.hashes()})
    if manifest.hash != real:
      raise UserError(
        f"{path}: hash {manifest.hash[:12]} is not that of its content ({real[:12]}); "
        "the file was edited"
      )
    return manifest

  def save(self, folder: Path) -> None:
    """Writes `folder`/manifest.json in one piece."""
    write_json(folder / FILE, dataclasses.asdict(self))


class StaleStageError(UserError):
  """A stage folder was made with something else than this run asks for.

  Attributes:
    folder: the folder, for `set_aside`.
  """

  def __init__(self, folder: Path, reason: str):
    super().__init__(
      f"{folder}: {reason}; use another --workdir, or --overwrite to move the old folder aside"
    )
    self.folder = folder


def stage_hash(config_part: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
  """SHA-256 of the canonical JSON of what determines a stage.

  Args:
    config_part: nested mapping of JSON values; key order and tuple or list do not matter.
    inputs: name -> hash of everything that was read.

  Raises:
    ValueError: a value is not finite.
    TypeError: a value is not JSON.
  """
  content = {"config": config_part, "inputs": dict(inputs)}
  text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
  return hashlib.sha256(text.encode("utf-8")).hexdigest()


def files_hash(files: Iterable[Any]) -> str:
  """SHA-256 of what stands in data files (anything with `read_bytes`), in order."""
  return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def is_complete(folder: Path, hash: str) -> bool:
  """Whether `folder` holds a finished stage of this hash."""
  if not (folder / FILE).exists():
    return False
  manifest = Manifest.load(folder)
  return manifest.complete and manifest.hash == hash


def begin(
  folder: Path,
  *,
  stage: str,
  config: Mapping[str, Any],
  inputs: Mapping[str, Manifest] | None = None,
  target: TargetId | None = None,
) -> Manifest:
  """Opens a stage folder for this config.

  Args:
    folder: the stage's folder; made when it is missing.
    stage: name of the stage.
    config: the part of the config that determines the folder, nested as in the whole config, so
      that a refusal can name `train.lr`.
    inputs: stage name -> manifest, as `require` gave it, of every folder that is read.
    target: the target the stage runs; None when it runs none.

  Returns:
    The manifest: `complete` says that nothing is left to do, otherwise the stage goes on with
    whatever it finds in the folder.

  Raises:
    StaleStageError: the folder was made with another config, other inputs or another target.
    UserError: the inputs disagree with each other or with the target, or the folder cannot be
      written.
  """
  inputs, target = dict(inputs or {}), target or TargetId()
  _check_agreement(stage, inputs, target)
  config = json.loads(json.dumps(config, allow_nan=False))
  hashes = {name: manifest.hash for name, manifest in inputs.items()}
  wanted = Manifest(
    stage=stage,
    config=config,
    hash=stage_hash(config, {**hashes, **target.hashes()}),
    inputs=hashes,
    target=target,
    run=secrets.token_hex(16),
    read={name: manifest.run for name, manifest in inputs.items()},
    packages=_package_versions(),
    git_commit=_git_commit(),
    created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
  )
  with distributed.primary_first(f"{stage}: its folder"):
    return _open(folder, wanted)


def _open(folder: Path, wanted: Manifest) -> Manifest:
  """The manifest in a folder, which must be as wanted; writes it where there is none."""
  if (folder / FILE).exists():
    found = Manifest.load(folder)
    if found.hash != wanted.hash:
      raise StaleStageError(folder, _first_difference(found, wanted))
    for name, run in wanted.read.items():
      if found.read.get(name) != run:
        raise StaleStageError(folder, f"was made from an earlier run of stage {name}")
    _check_files(folder, found)
    return found
  try:
    folder.mkdir(parents=True, exist_ok=True)
    if any(not path.name.startswith(".") for path in folder.iterdir()):
      raise StaleStageError(folder, f"holds files but no {FILE}, so another program made it")
    wanted.save(folder)
  except OSError as error:
    raise UserError(f"{folder}: cannot be written ({error.strerror})") from error
  return wanted


def finish(
  folder: Path, manifest: Manifest, counts: Mapping[str, Any], files: str = ""
) -> Manifest:
  """Marks the folder as complete, after everything else in it was written.

  Args:
    folder: the stage's folder.
    manifest: as `begin` gave it.
    counts: what is in the folder.
    files: glob pattern of the files that later stages read; a run that reuses the folder looks
      whether they are all there.
  """
  found = sorted(path for path in folder.glob(files) if path.is_file()) if files else []
  sizes = {str(path.relative_to(folder)): path.stat().st_size for path in found}
  done = dataclasses.replace(manifest, counts=dict(counts), complete=True, files=sizes)
  if distributed.is_primary():
    done.save(folder)
  distributed.barrier(f"{manifest.stage}: finished")
  return done


def _check_files(folder: Path, manifest: Manifest) -> None:
  """Refuses to reuse a folder that has lost a file."""
  for name, size in manifest.files.items():
    path = folder / name
    if not path.is_file() or path.stat().st_size != size:
      state = "has another size" if path.is_file() else "is gone"
      raise UserError(
        f"{path}: {state} since stage {manifest.stage} ended; "
        f"remove {folder} and run its stage again"
      )


def require(folder: Path, stage: str, config: Any) -> Manifest:
  """The manifest of a finished stage that another one reads.

  Args:
    folder: the stage's folder; the folders it was made from are looked for beside it, and theirs
      too, so that a run never mixes configs. One that is gone is not missed.
    stage: its name.
    config: the whole config of this run, a dataclass; a field of the stage's own part that this
      config has too must have the same value.

  Raises:
    UserError: the folder is missing, unfinished, of another stage, was made with another config,
      or from a folder beside it that has changed since.
  """
  if not (folder / FILE).exists():
    raise UserError(f"{folder}: stage {stage} has not run; run --stage={stage} first")
  manifest = Manifest.load(folder)
  if manifest.stage != stage:
    raise UserError(f"{folder}: holds stage {manifest.stage}, not {stage}")
  if not manifest.complete:
    raise UserError(f"{folder}: stage {stage} is not finished; run --stage={stage} again")
  asked = dict(_flatten(json.loads(json.dumps(dataclasses.asdict(config)))))
  own = dict(_flatten(manifest.config))
  for name, value in own.items():
    if asked.get(name, value) != value:
      raise UserError(
        f"{folder}: was made with {name}={_text(own, name)}, this run has "
        f"{name}={_text(asked, name)}; give the same value, or use another --workdir"
      )
  for name, run in manifest.read.items():
    beside = folder.parent / name
    if (beside / FILE).exists() and require(beside, name, config).run != run:
      raise UserError(
        f"{folder}: was made from another run of {name} than {beside} holds now; "
        f"run --stage={stage} --overwrite"
      )
  return manifest


def withdraw(folder: Path) -> bool:
  """Removes a stage folder that holds nothing but an unfinished manifest: the stage was refused
  before it made anything, so the next run need not agree with it. Whether there is none now."""
  try:
    names = [path.name for path in folder.iterdir()]
  except FileNotFoundError:
    return True
  except NotADirectoryError:
    return False
  if names != [FILE] or Manifest.load(folder).complete:
    return False
  (folder / FILE).unlink()
  folder.resolve().rmdir()  # a sweep links the stages that its cells share
  return True


def set_aside(folder: Path) -> Path:
  """Renames a stage folder to the first free `<name>.old-<n>` and returns the new path."""
  number = 1
  while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
    number += 1
  folder.rename(aside)
  return aside


def write_json(path: Path, content: Any) -> None:
  """Writes JSON so that a crash leaves the old file or the new one, never a part."""
  part = path.with_name(f".{path.name}.{os.getpid()}")
  with open(part, "w", encoding="utf-8") as file:
    json.dump(content, file, indent=2, allow_nan=False)
    file.write("\n")
    file.flush()
    os.fsync(file.fileno())
  part.replace(path)
  folder = os.open(path.parent, os.O_RDONLY)
  try:
    os.fsync(folder)
  finally:
    os.close(folder)


def _check_agreement(stage: str, inputs: Mapping[str, Manifest], target: TargetId) -> None:
  """Raises UserError when two inputs rest on different data, or on another target than this."""
  seen: dict[str, tuple[str, str]] = {name: (m.hash, name) for name, m in inputs.items()}
  for what, digest in target.hashes().items():
    if digest:
      seen[what] = (digest, "this run")
  for name, manifest in inputs.items():
    for what, digest in {**manifest.inputs, **manifest.target.hashes()}.items():
      other, owner = seen.setdefault(what, (digest, name)) if digest else ("", "")
      if digest and other != digest:
        raise UserError(
          f"{stage}: {name} was made with {what} {digest[:12]}, {owner} has {other[:12]}"
        )


def _first_difference(found: Manifest, wanted: Manifest) -> str:
  if found.stage != wanted.stage:
    return f"holds stage {found.stage}, not {wanted.stage}"
  old, new = dict(_flatten(found.config)), dict(_flatten(wanted.config))
  for name in [*new, *(name for name in old if name not in new)]:
    if old.get(name, _ABSENT) != new.get(name, _ABSENT):
      return f"was made with {name}={_text(old, name)}, this run has {name}={_text(new, name)}"
  old, new = ({**m.inputs, **m.target.hashes()} for m in (found, wanted))
  for name in [*new, *(name for name in old if name not in new)]:
    if old.get(name, "") != new.get(name, ""):
      return (
        f"was made from {name} {old.get(name, '')[:12] or 'none'}, "
        f"this run has {new.get(name, '')[:12] or 'none'}"
      )
  return f"hash {found.hash[:12]} is not {wanted.hash[:12]}"


_ABSENT = object()


def _text(values: Mapping[str, Any], name: str) -> str:
  return json.dumps(values[name]) if name in values else "(no such field)"


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
  for name, value in tree.items():
    if isinstance(value, Mapping):
      yield from _flatten(value, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}", value


def _package_versions() -> dict[str, str]:
  versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
  return {"python": ".".join(map(str, sys.version_info[:3])), **versions}


def _git_commit() -> str:
  command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
  try:
    done = subprocess.run(
      command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
    )
  except (OSError, subprocess.SubprocessError):
    return ""
  return done.stdout.strip()
