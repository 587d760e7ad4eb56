"""`launch.plan` against rates measured here, of models that its CPU figures were not fitted to.

  python -m tests.benchmarks.plan_check

The figures of the accelerator `cpu2` (launch/accelerators.py) were fitted to runs of SmolLM2-135M
(width 576, 30 layers, 49,152 ids; batches of 64 rows; small_lm training). Here two random decoders
of other shapes answer in other batches, are extracted from, train an EAGLE-3 drafter and decode
with a small_lm. The arithmetic of the machine as it is (its cores, and what other programs leave of
them) is measured beside each rate, by one large matrix product, and takes the place of the entry's;
the shares that programs reach and the bandwidth are the entry's. Each measured rate stands beside
the planned one; the exit status is 1 if any ratio leaves [1/2, 2].
"""

import dataclasses
import time
from collections.abc import Callable, Iterator

import numpy as np
from absl import flags

from launch import accelerators, plan
from launch.accelerators import Accelerator
from spec_jax import command, drafters, platform
from spec_jax import records as metrics
from spec_jax.generate import Run
from spec_jax.models.config import DecoderConfig
from spec_jax.models.decoder import Decoder, tensor_shapes
from spec_jax.target import Target, from_module, held
from tests.benchmarks import training
from train_drafter import extract
from train_drafter.config import Config

SHAPES = {
    "wide": DecoderConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_layers=8, num_heads=16,
        num_kv_heads=4, head_dim=64, max_position=1024),
    "deep": DecoderConfig(
        vocab_size=8192, hidden_size=384, intermediate_size=1024, num_layers=20, num_heads=6,
        num_kv_heads=2, head_dim=64, max_position=1024)}
ROWS, PROMPT, ANSWER = 16, 60, 48
DRAFT_LEN = 3
REPEATS = 4

_ONLY = flags.DEFINE_list("shapes", list(SHAPES), "which of the shapes")
_ACCELERATOR = flags.DEFINE_string("accelerator", "cpu2", "whose figures are checked")


def make_target(config: DecoderConfig) -> Target:
  """A random target in bfloat16."""
  rng = np.random.default_rng(0)
  shapes = tensor_shapes(config)

  def tensor(name):
    shape = shapes[name]
    value = (np.ones(shape, np.float32) if len(shape) == 1
             else 0.02 * rng.standard_normal(shape, np.float32))
    return held(name, value, "bfloat16")

  return from_module(Decoder(config, tensor), dtype="bfloat16")


def best_seconds(work: Callable[[], None]) -> float:
  """The fastest of REPEATS calls behind one that compiles: what other programs take from the
  machine is in the others."""
  times = []
  for _ in range(REPEATS + 1):
    clock = time.perf_counter()
    work()
    times.append(time.perf_counter() - clock)
  return min(times[1:])


def generation(target: Target) -> float:
  """Answered tokens per second of plain decoding, the prompts' passes included."""
  rng = np.random.default_rng(1)
  prompts = rng.integers(0, target.config.vocab_size, (2 * ROWS, PROMPT)).tolist()

  def work():
    run = Run(target, None, prompts, draft_len=0, temperature=1.0, max_new_tokens=ANSWER,
              batch_size=ROWS, eos_ids=())
    assert sum(len(row.tokens) for size, members in run.buckets().items()
               for row in run.bucket(size, members)) == 2 * ROWS * ANSWER

  return 2 * ROWS * ANSWER / best_seconds(work)


def extraction(target: Target) -> float:
  """Tokens per second of the extract stage's passes, written to arrays; two full passes."""
  rng = np.random.default_rng(2)
  count = 16 * (512 // (PROMPT + ANSWER))
  sources = [extract.Source(i, i, rng.integers(
      0, target.config.vocab_size, PROMPT + ANSWER).astype(np.int32), PROMPT) for i in range(count)]
  taps = plan.taps_of(target.config, "eagle3")
  work = lambda: extract.part_arrays(target, sources, taps, rows=8, seq_len=512)
  return count * (PROMPT + ANSWER) / best_seconds(work)


def steps(target: Target, draft_vocab: int) -> float:
  """Tokens per second that EAGLE-3 training reads."""
  cfg = Config()
  cfg.drafter.kind, cfg.drafter.init_layers = "eagle3", (target.config.num_layers - 1,)
  cfg.drafter.draft_vocab = draft_vocab
  cfg.train.batch_rows, cfg.train.seq_len = 2, 512
  work = training.Training(cfg, target)
  return 2 * 512 / best_seconds(lambda: work.step())


def decoding(target: Target) -> tuple[float, float]:
  """Tokens per second of speculative decoding with a small_lm of one layer, and its tau."""
  rng = np.random.default_rng(3)
  prompts = rng.integers(0, target.config.vocab_size, (ROWS, 4)).tolist()
  drafter = drafters.wrap("small_lm", "one layer", drafters.init_from_target(target, (0,)))
  found = []

  def work():
    run = Run(target, drafter, prompts, draft_len=DRAFT_LEN, temperature=1.0,
              max_new_tokens=PROMPT + ANSWER, batch_size=ROWS, eos_ids=())
    found[:] = [row for size, members in run.buckets().items()
                for row in run.bucket(size, members)]

  seconds = best_seconds(work)
  tau = metrics.tau([row.records for row in found])
  return sum(len(row.tokens) for row in found) / seconds, tau


def check(name: str, chip: Accelerator) -> Iterator[tuple[str, float, float, float]]:
  """(quantity, FLOP/s of the product beside it, planned and measured tokens per second)."""
  target = make_target(SHAPES[name])
  draft_vocab = SHAPES[name].vocab_size // 2
  job = plan.Job(
      prompt_tokens=PROMPT, answer_tokens=ANSWER, rows=ROWS, kind="eagle3", layers=1,
      draft_vocab=draft_vocab, batch_rows=2, seq_len=512)
  # A training document has its own shares of prompt and answer.
  trained = dataclasses.replace(
      job, prompt_tokens=training.PROMPT, answer_tokens=training.ANSWER)
  decoded = dataclasses.replace(
      job, kind="small_lm", draft_vocab=0, draft_len=DRAFT_LEN, prompt_tokens=4,
      answer_tokens=PROMPT + ANSWER)
  ways = [
      ("generate", job, lambda: (generation(target), 0.0)),
      ("extract", job, lambda: (extraction(target), 0.0)),
      ("train", trained, lambda: (steps(target, draft_vocab), 0.0)),
      ("decode", decoded, lambda: decoding(target))]
  for what, task, measure in ways:
    before = training.peak()
    rate, tau = measure()
    product = (before + training.peak()) / 2
    planned = plan.plan(target.config, dataclasses.replace(chip, flops=product), 1,
                        dataclasses.replace(task, tau=tau or task.tau))
    yield what + (f" (tau {tau:.2f})" if tau else ""), product, getattr(planned, what), rate


def execute(values: flags.FlagValues) -> int:
  """Measures, prints, and says whether all ratios lie within a factor of two."""
  platform.configure()
  chip = accelerators.find(values.accelerator)
  print("shape  quantity           GFLOP/s  planned/s  measured/s  ratio")
  bad = 0
  for name in values.shapes:
    for what, product, planned, measured in check(name, chip):
      ratio = planned / measured
      bad += not 0.5 <= ratio <= 2
      print(f"{name:5s}  {what:17s}  {product / 1e9:7,.0f}  {planned:9,.0f}  {measured:10,.0f}  "
            f"{ratio:5.2f}", flush=True)
  print(f"{bad} outside a factor of two")
  return int(bad > 0)


if __name__ == "__main__":
  platform.tune_process()
  command.run(execute, lambda argv: command.parse(argv, flags.FLAGS))
