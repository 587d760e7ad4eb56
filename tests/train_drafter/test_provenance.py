"""What the report says about where it comes from."""

import hashlib

from train_drafter import provenance as lib
from train_drafter.config import Config
from train_drafter.manifest import Manifest, TargetId


def made(tmp_path, commit="abc", files=(("a/w.bin", b"1"), ("cfg.json", b"2")), hashes=None):
  for name, content in files:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(content)
  opened = Manifest("evaluate", {}, "", {"train": "t"}, TargetId("demo", "w", "k", "c"),
                    git_commit=commit, created="2026-01-01T00:00:00+00:00")
  return lib.provenance(Config(), opened, hashes or {"p": "1"}, tmp_path)


def test_hash_of_a_prompt_is_that_of_its_tokens():
  found = lib.prompt_hashes(["a", "b", "c"], [[1, 2], [1, 2], [12]])
  assert found["a"] == found["b"] == hashlib.sha256(b"[1, 2]").hexdigest()[:16]
  assert found["c"] != found["a"]


def test_no_checkout_is_said(tmp_path):
  assert made(tmp_path, "")["git_commit"] == "unknown"
  assert made(tmp_path)["git_commit"] == "abc"


def test_hash_of_the_drafter_sees_content_and_names(tmp_path):
  hashes = [made(tmp_path / str(i), files=files)["drafter_files"] for i, files in enumerate([
      [("w", b"1"), ("x", b"2")], [("x", b"2"), ("w", b"1")], [("w", b"1"), ("x", b"3")],
      [("w", b"1"), ("y", b"2")]])]
  assert hashes[0] == hashes[1] and len(set(hashes)) == 3


def test_prompts_hash_does_not_depend_on_their_order(tmp_path):
  one, two, other = (made(tmp_path, hashes=h)["prompts_hash"] for h in (
      {"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {"a": "2", "b": "1"}))
  assert one == two != other


def test_machine_and_command_are_named(tmp_path):
  found = made(tmp_path)
  assert found["machine"]["processor"] and found["machine"]["device"]
  assert found["machine"]["memory_bytes"] > 1 << 28
  assert found["command"].startswith("python ") and "pytest" in found["command"]
  assert found["config"]["evaluate"]["draft_len"] == Config().evaluate.draft_len
