"""Speculative decoding in JAX: load a target and a drafter, decode, read the acceptance.

  target = spec_jax.load_target("demo", dtype="float32")
  drafter = spec_jax.load_drafter("ngram", target)
  out = spec_jax.generate(target, drafter, ["Once upon a time"], draft_len=5)
"""

from spec_jax.drafters import load_drafter
from spec_jax.errors import UserError
from spec_jax.generate import GenerateResult, generate
from spec_jax.platform import configure
from spec_jax.target import load_target

configure()

__all__ = [
    "GenerateResult", "UserError", "configure", "generate", "load_drafter", "load_target"]
