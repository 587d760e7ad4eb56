"""The process-wide settings leave alone what the user set."""

import importlib.metadata
import os
import stat

import jax
import pytest

from spec_jax import platform

FLAG = "--xla_cpu_experimental_onednn_fusion_type=LIBRARY_FUSION_TYPE_DOT"


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
  """An empty environment, a tested jaxlib, and JAX's own settings put back afterwards."""
  before = jax.config.jax_compilation_cache_dir
  monkeypatch.setenv("XLA_FLAGS", "")  # so that what configure sets is undone afterwards
  monkeypatch.delenv("XLA_FLAGS")
  monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "cache"))
  version = importlib.metadata.version
  monkeypatch.setattr(
    importlib.metadata, "version", lambda name: "0.12.0.1" if name == "jaxlib" else version(name)
  )
  yield
  jax.config.update("jax_compilation_cache_dir", before)


def flags_after_configure():
  platform.configure()
  return os.environ.get("XLA_FLAGS")


def test_the_flag_joins_what_is_there(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
  expected = f"--xla_force_host_platform_device_count=8 {FLAG}"
  assert flags_after_configure() == expected
  assert flags_after_configure() == expected


def test_a_value_of_the_user_stays(monkeypatch):
  own = "--xla_cpu_experimental_onednn_fusion_type="
  monkeypatch.setenv("XLA_FLAGS", own)
  assert flags_after_configure() == own


def test_an_untried_jaxlib_gets_no_flag(monkeypatch):
  monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.12.1")
  assert flags_after_configure() is None


def test_only_cpu_gets_the_flag(monkeypatch):
  before = jax.config.jax_platforms
  try:
    jax.config.update("jax_platforms", "cuda,cpu")
    assert flags_after_configure() is None
    jax.config.update("jax_platforms", None)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    assert flags_after_configure() is None
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(platform, "_ACCELERATOR_PLUGINS", ("json",))
    assert flags_after_configure() is None
    monkeypatch.setattr(platform, "_ACCELERATOR_PLUGINS", ("no_such_plugin",))
    assert flags_after_configure() == FLAG
  finally:
    jax.config.update("jax_platforms", before)


def test_the_cache_is_private_and_the_users_own_stays(tmp_path):
  jax.config.update("jax_compilation_cache_dir", None)
  platform.configure()
  folder = tmp_path / "cache" / "xla"
  assert jax.config.jax_compilation_cache_dir == str(folder)
  for path in (folder, folder.parent):
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
  jax.config.update("jax_compilation_cache_dir", "elsewhere")
  platform.configure()
  assert jax.config.jax_compilation_cache_dir == "elsewhere"


def test_a_home_that_cannot_be_written_means_no_cache(monkeypatch, tmp_path):
  (tmp_path / "file").write_text("")
  monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "file" / "cache"))
  jax.config.update("jax_compilation_cache_dir", None)
  platform.configure()
  assert jax.config.jax_compilation_cache_dir is None
