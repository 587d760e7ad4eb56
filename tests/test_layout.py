"""What may import what."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent


def imported(path):
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield node.module or ""


def test_the_decoding_half_does_not_know_the_distillation_half():
  files = sorted((ROOT / "spec_jax").rglob("*.py"))
  assert len(files) > 15
  outside = {"train_drafter", "configs", "launch", "tests", "optax", "orbax", "grain", "torch",
             "transformers"}
  for path in files:
    names = {name.split(".")[0] for name in imported(path)}
    assert not names & outside, f"{path.relative_to(ROOT)} imports {names & outside}"


def test_modules_stay_readable():
  for folder in ("spec_jax", "train_drafter", "configs", "launch"):
    for path in (ROOT / folder).rglob("*.py"):
      lines = len(path.read_text(encoding="utf-8").splitlines())
      assert lines < 450 or path.name == "templates.py", f"{path.relative_to(ROOT)}: {lines} lines"
