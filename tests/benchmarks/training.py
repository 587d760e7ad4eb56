"""Training throughput of every drafter, with its memory and a roofline beside it.

  python -m tests.benchmarks.training                    all kinds, the demo target
  python -m tests.benchmarks.training --kinds=eagle3

One step of each drafter at its config's sizes, on random documents: seconds (median of steps that
take turns with the other kinds), supervised tokens per second, the bytes XLA asks for, and the time
the step's arithmetic would take at the rate of one large matrix product measured in the same run.
Below them the peak that the process (the device, off CPU) really reached, with everything in it: of
one kind alone with --kinds.
"""

import dataclasses
import importlib
import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl import flags

import spec_jax
from spec_jax import command, platform
from spec_jax.errors import UserError
from spec_jax.target import Target
from train_drafter import config as config_lib
from train_drafter import train
from train_drafter.batches import Document, Packer
from train_drafter.config import Config

PROMPT, ANSWER = 90, 110  # tokens of a document: the means of the quickstart's data
SIDE = 2048  # of the matrix product that stands for the peak

_TARGET = flags.DEFINE_string("target", "demo", "the target, as load_target takes it")
_KINDS = flags.DEFINE_list("kinds", list(config_lib.KINDS), "drafters")
_STEPS = flags.DEFINE_integer("steps", 7, "timed steps of each", 1)


class Training:
  """The compiled training step of one kind of drafter and what it runs on."""

  def __init__(self, cfg: Config, target: Target):
    self.target = target
    rng = np.random.default_rng(0)
    vocabulary = min(cfg.drafter.draft_vocab, target.config.vocab_real)
    module = train.initial_drafter(cfg, target, np.arange(vocabulary, dtype=np.int32))
    self.setup, self.state = train.make_setup(cfg, target, module, 1000)
    options = cfg.train
    packer = Packer(
        documents(target, rng, options.batch_rows * options.seq_len // PROMPT), seed=0,
        rows=options.batch_rows, seq_len=options.seq_len, chunk=options.chunk)
    self.batch = packer.batch(0)
    if module.taps:
      shape = (options.batch_rows, options.seq_len, len(module.taps) * target.config.hidden_size)
      self.batch["features"] = rng.normal(size=shape).astype(ml_dtypes.bfloat16)
    self.supervised = int(self.batch["weight"].sum())
    args = (self.setup, self.state, self.setup.frozen, target.params, self.batch)
    self.compiled = train.train_step.lower(*args).compile()
    blocks = options.batch_rows * cfg.drafter.anchors * module.depths
    self._scored = packer.places if cfg.drafter.kind in ("small_lm", "eagle3") else blocks

  def step(self) -> float:
    """Seconds of one step."""
    clock = time.perf_counter()
    self.state, sums = self.compiled(
        self.state, self.setup.frozen, self.target.params, self.batch)
    jax.block_until_ready(sums)
    return time.perf_counter() - clock

  def gigabytes(self) -> float | None:
    """What the step keeps: its arguments and its temporary buffers."""
    memory = self.compiled.memory_analysis()
    if memory is None:
      return None
    # The outputs lie where the donated arguments were.
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return (memory.argument_size_in_bytes + memory.temp_size_in_bytes + new) / 1e9

  def flops(self) -> float | None:
    """Floating-point operations of the step as XLA counts them, with the loss in one chunk: of a
    loop it counts the body once."""
    whole = dataclasses.replace(self.setup.options, chunk=self._scored)
    setup = dataclasses.replace(self.setup, options=whole)
    cost: Any = train.train_step.lower(
        setup, self.state, setup.frozen, self.target.params, self.batch).cost_analysis()
    return cost.get("flops") if cost else None


def documents(target: Target, rng: np.random.Generator, count: int) -> list[Document]:
  """Random ids with random teacher states."""
  D = target.config.hidden_size
  return [Document(
      rng.integers(0, target.config.vocab_real, PROMPT + ANSWER).astype(np.int32), PROMPT - 1,
      rng.normal(size=(ANSWER, D)).astype(ml_dtypes.bfloat16),
      np.full(ANSWER, 10.0, np.float32), np.zeros(ANSWER, np.int32)) for _ in range(count)]


def peak(repeats: int = 5) -> float:
  """FLOP/s of a bfloat16 product of two large square matrices."""
  a = jnp.ones((SIDE, SIDE), jnp.bfloat16)
  product = jax.jit(lambda a: jax.lax.dot(a, a, preferred_element_type=jnp.float32))
  times = []
  for _ in range(repeats + 1):
    clock = time.perf_counter()
    product(a).block_until_ready()
    times.append(time.perf_counter() - clock)
  return 2 * SIDE**3 / float(np.median(times[1:]))


def settings(kind: str) -> Config:
  """The config of the longer runs of this kind.

  Raises:
    UserError: there is no such kind.
  """
  if kind not in config_lib.KINDS:
    raise UserError(f"--kinds: {kind!r} is not among {', '.join(config_lib.KINDS)}")
  return importlib.import_module(f"configs.{kind}").get_config()


def peak_gigabytes() -> tuple[str, float]:
  """The most memory in use so far, and of what: the device, or the process where that is the CPU
  (whose buffers are its own)."""
  stats = jax.local_devices()[0].memory_stats() or {}
  if "peak_bytes_in_use" in stats:
    return "device", stats["peak_bytes_in_use"] / 1e9
  unit = 1 if sys.platform == "darwin" else 1024
  return "process", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def execute(values: flags.FlagValues) -> None:
  """Compiles, times in turn and prints one line for each kind.

  Raises:
    UserError: the target cannot be loaded or is too shallow, or a kind is unknown.
  """
  target = spec_jax.load_target(values.target, "bfloat16")
  made = {kind: Training(settings(kind), target) for kind in values.kinds}
  times: dict[str, list[float]] = {kind: [] for kind in made}
  rates = []
  for turn in range(values.steps + 1):
    rates.append(peak())
    for kind, training in made.items():
      seconds = training.step()
      if turn:  # the first one warms up
        times[kind].append(seconds)
  rate = float(np.median(rates))
  print(f"one {SIDE}x{SIDE} bfloat16 product: {rate / 1e9:.0f} GFLOP/s")
  print("drafter    s/step  supervised tokens/s  GB   GFLOP counted  least s at that rate")
  for kind, training in made.items():
    second, memory, flops = float(np.median(times[kind])), training.gigabytes(), training.flops()
    print(f"{kind:9s}  {second:6.3f}  {training.supervised / second:19,.0f}  "
          f"{'-' if memory is None else f'{memory:.2f}'}  "
          f"{'-' if flops is None else f'{flops / 1e9:13,.0f}'}  "
          f"{'-' if flops is None else f'{flops / rate:20.3f}'}")
  print("peak of the {}: {:.2f} GB".format(*peak_gigabytes()))


def main() -> None:
  """The command line."""
  def run(values: flags.FlagValues) -> None:
    platform.configure()
    execute(values)

  command.run(run, lambda argv: command.parse(argv, flags.FLAGS))


if __name__ == "__main__":
  platform.tune_process()
  main()
