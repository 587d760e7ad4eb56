"""What an accelerator can do, as its maker publishes it."""

import dataclasses

from spec_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Accelerator:
  """One chip.

  Attributes:
    flops: FLOP/s of dense bfloat16 matrix products.
    bandwidth: bytes/s of its memory.
    memory: bytes of its memory.
    efficiency: share of `flops` and of `bandwidth` that programs like these reach. Half is what
      large models are commonly trained at; the CPU's two were fitted to measured rates.
  """

  flops: float
  bandwidth: float
  memory: float
  efficiency: tuple[float, float] = (0.5, 0.7)


ACCELERATORS = {
    # Google Cloud, TPU v5e, v5p and v6e system architecture pages (decimal units).
    "v5e": Accelerator(197e12, 819e9, 16e9),
    "v5p": Accelerator(459e12, 2765e9, 95e9),
    "v6e": Accelerator(918e12, 1638e9, 32e9),
    # NVIDIA data sheets of H100 SXM and H200 SXM, without sparsity.
    "h100": Accelerator(989e12, 3.35e12, 80e9),
    "h200": Accelerator(989e12, 4.8e12, 141e9),
    # NVIDIA DGX Spark data sheet: 1 PFLOP/s FP4 with sparsity, of which dense bfloat16 is taken to
    # be an eighth; memory shared with the CPU.
    "gb10": Accelerator(125e12, 273e9, 128e9),
    # Two cores of a server with avx512_bf16: measured, no data sheet has them.
    "cpu2": Accelerator(1.0e12, 16e9, 24e9, (0.45, 1.0)),
}


def find(name: str) -> Accelerator:
  """The accelerator of this name.

  Raises:
    UserError: it is not in the table.
  """
  if name.lower() not in ACCELERATORS:
    raise UserError(f"--accelerator={name} must be one of {', '.join(ACCELERATORS)}")
  return ACCELERATORS[name.lower()]
