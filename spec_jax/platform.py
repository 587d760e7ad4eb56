"""Process-wide settings of JAX. Every entry point calls `configure` before it touches an array."""

import importlib.metadata
import importlib.util
import os
import platform
import sys
from pathlib import Path

import jax

# oneDNN dot fusion makes bfloat16 matrix products fast on CPU. An unknown XLA flag aborts the
# process, so the flag is set only for the jaxlib versions it was tried with.
_CPU_FLAG = "--xla_cpu_experimental_onednn_fusion_type"
_CPU_FLAG_VALUE = "LIBRARY_FUSION_TYPE_DOT"
_CPU_FLAG_JAXLIB = ("0.12.0.1",)

# Freed memory stays in the process, in huge pages.
_ALLOCATOR = ":".join((
    "glibc.malloc.hugetlb=1", "glibc.malloc.mmap_max=0",
    "glibc.malloc.trim_threshold=8589934592", "glibc.malloc.top_pad=268435456"))

_ACCELERATOR_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin", "libtpu")


def cache_folder(name: str) -> Path:
  """Folder `name` of this user's cache: below $SPEC_JAX_CACHE, else $XDG_CACHE_HOME or ~/.cache.

  Returns:
    The folder, made for its owner alone.

  Raises:
    OSError: it can be neither found nor made.
  """
  root = os.environ.get("SPEC_JAX_CACHE")
  if root:
    base = Path(root)
  else:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spec-jax"
  base.mkdir(mode=0o700, parents=True, exist_ok=True)
  folder = base / name
  folder.mkdir(mode=0o700, exist_ok=True)
  return folder


def configure() -> None:
  """Sets the CPU flag of XLA, the precision of float32 products on accelerators, and the persistent
  compilation cache; what the user set stays.

  By default JAX multiplies float32 matrices in TF32 on GPU and in bfloat16 on TPU: a target loaded
  as float32 would be float32 in name only.

  Call it before the backend starts: XLA reads its flags once. Asking JAX for the platform would
  start the backend, so the platform is told from JAX_PLATFORMS and the installed plugins.
  """
  if _platform_is_cpu() and importlib.metadata.version("jaxlib") in _CPU_FLAG_JAXLIB:
    flags = os.environ.get("XLA_FLAGS", "")
    if _CPU_FLAG not in flags:
      os.environ["XLA_FLAGS"] = f"{flags} {_CPU_FLAG}={_CPU_FLAG_VALUE}".strip()
  if not _platform_is_cpu() and jax.config.jax_default_matmul_precision is None:
    jax.config.update("jax_default_matmul_precision", "highest")
  if not jax.config.jax_compilation_cache_dir:
    try:
      jax.config.update("jax_compilation_cache_dir", str(cache_folder("xla")))
    except OSError:
      pass  # A home that cannot be written costs compile time and nothing else.


def tune_process() -> None:
  """Starts the program again with an allocator setting that XLA:CPU gains from.

  Every execution allocates its temporary buffers anew. By default glibc maps large ones afresh, so
  each pays a page fault per 4 KiB (measured: a fifth of a training step). glibc reads the setting
  at start only, hence the second start; call it first thing in a command's main. It does nothing
  off Linux/glibc, on an accelerator, or where GLIBC_TUNABLES is set already.
  """
  wanted = sys.platform == "linux" and _platform_is_cpu() and platform.libc_ver()[0] == "glibc"
  if wanted and "GLIBC_TUNABLES" not in os.environ:
    os.environ["GLIBC_TUNABLES"] = _ALLOCATOR
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _platform_is_cpu() -> bool:
  named = jax.config.jax_platforms or os.environ.get("JAX_PLATFORMS", "")
  if named:
    return named.split(",")[0].strip() == "cpu"
  return not any(importlib.util.find_spec(plugin) for plugin in _ACCELERATOR_PLUGINS)
