"""What an accelerator can do: the published figures of train_drafter/whatif.py by short names, and
the shares of them that programs reach."""

import dataclasses

from spec_jax.errors import UserError
from train_drafter import whatif


@dataclasses.dataclass(frozen=True)
class Accelerator:
  """One chip.

  Attributes:
    flops: FLOP/s of dense bfloat16 matrix products.
    bandwidth: bytes/s of its memory.
    memory: bytes of its memory.
    efficiency: share of `flops` and of `bandwidth` that programs like these reach. Half is what
      large models are commonly trained at; the CPU's two were fitted to measured rates.
    layer_s: seconds that a layer of a pass over few tokens takes beside its arithmetic and its
      reading (launching many small operations); fitted on a CPU, 0 where it is not known.
  """

  flops: float
  bandwidth: float
  memory: float
  efficiency: tuple[float, float] = (0.5, 0.7)
  layer_s: float = 0.0


_NAMES = {"v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e", "h100": "H100 SXM", "h200": "H200",
          "gb10": "GB10"}
_PUBLISHED = {chip.name: chip for chip in whatif.ACCELERATORS}
ACCELERATORS = {
    name: Accelerator(chip.flops, chip.bandwidth, chip.memory)
    for name, chip in ((name, _PUBLISHED[full]) for name, full in _NAMES.items())} | {
    # Two cores of a server with avx512_bf16: measured, no data sheet has them.
    "cpu2": Accelerator(1.0e12, 16e9, 24e9, (0.45, 1.0), 0.33e-3)}


def find(name: str) -> Accelerator:
  """The accelerator of this name.

  Raises:
    UserError: it is not in the table.
  """
  if name.lower() not in ACCELERATORS:
    raise UserError(f"--accelerator={name} must be one of {', '.join(ACCELERATORS)}")
  return ACCELERATORS[name.lower()]
