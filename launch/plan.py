"""What a job will need, on paper: memory, feature bytes, tokens per second and hours.

  python -m launch.plan --target=8b --accelerator=v5p --chips=8 --drafter=eagle3
  python -m launch.plan --target=/models/my-llama --accelerator=h100 --chips=16 --steps=20000

`--target` is a folder with a config.json, that file, a .gguf file, demo, or 1b, 8b or 70b (the
shapes of Llama 3). The numbers are a roofline: for a piece of work of `flops` and `bytes` on C
chips,

  seconds = max(flops / (C * peak * e_f), bytes / (C * bandwidth * e_b))

with the shares e_f, e_b that programs reach (launch/accelerators.py). A step of generation and a
round of decoding take the accelerator's time of a layer for each of theirs on top, where that is
known (on CPU). Communication, compilation and waiting are left out, so small models on many chips
come out too well. In the formulas M is the
parameters of the target's layers, m of the drafter, V and Vd the vocabularies, D the width, L the
layers, G and H the key/value heads and their width, N the query heads, A and P the tokens of an
answer and of its prompt, B the rows decoded at once, K the draft length. Of a mixture of experts
memory holds all of M, a token computes with the experts it is sent to, and a pass reads those that
its tokens touch when they are routed independently.

  weights       2 (M + V D [twice when untied]) bytes, bfloat16
  cache         4 L G H bytes for each token of a row
  forward pass  2 M + 2 L N H (P + A) flops for each token, the second for attention to half of the
                row on average; 2 V D more where logits are computed
  group         the smallest power of two of chips that hold weights and one row of cache in 60 % of
                their memory; the other chips repeat it (data parallel)
  B             --rows for each group, or as many as fit beside the weights, at most 256
  generate      a step: B forward passes with logits; reads weights and caches. The prompts cost
                P / A more forward passes for each answered token
  extract       a forward pass of every token, without logits; writes the bytes of
                `train_drafter.store.bytes_per_token`
  train         places: drafter positions for each token: 1 (small_lm), J (eagle3, its J steps) or
                anchors * block / seq_len (dflash, dspark). Flops for each token: 6 b places
                (forward and two products backward; b is m without the projection fc of the taps)
                + 6 c (once for every token: fc, and of dflash and dspark the keys and values)
                + 8 Vd D scored (logits, recomputed, their gradient, the teacher's), where scored
                is places of the tokens that are in an answer. Online features add a forward pass
                of the target. Reads the float32 weights three times
  train memory  16 m (float32 parameter, gradient and two moments), the frozen embedding and head
                (the whole target when online), and 16 chunk Vd bytes of the loss, on each chip;
                parameters are spread over the chips only where they do not fit on one
  decode        a round: K + 1 forward passes with logits of B rows, and K drafter passes (one of
                dflash and dspark); emits --tau tokens

No number of it was measured on an accelerator. On two CPU cores generation, extraction and training
are within a factor of two of what was measured; tests/launch/test_plan.py holds that fast.
"""

import dataclasses
import json
import math
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.table import Table

from launch import accelerators
from launch.accelerators import Accelerator
from spec_jax import command
from spec_jax.drafters import dflash, dspark, eagle3
from spec_jax.errors import UserError
from spec_jax.models.config import DecoderConfig
from spec_jax.weights import open_checkpoint
from train_drafter import config as config_lib
from train_drafter import whatif
from train_drafter.store import bytes_per_token

_USABLE = 0.6  # share of a memory that weights may take in a group
_FULL = 0.9  # share of a memory that anything may take

# Shapes of Llama 3.2 1B, Llama 3.1 8B and 70B.
TARGETS = {
    "1b": DecoderConfig(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_layers=16,
                        num_heads=32, num_kv_heads=8, head_dim=64),
    "8b": DecoderConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32,
                        num_heads=32, num_kv_heads=8, head_dim=128, tie_embeddings=False),
    "70b": DecoderConfig(vocab_size=128256, hidden_size=8192, intermediate_size=28672,
                         num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128,
                         tie_embeddings=False)}


@dataclasses.dataclass(frozen=True)
class Job:
  """How much there is to do.

  Attributes:
    prompts: answered.
    prompt_tokens: P, mean of a prompt.
    answer_tokens: A, mean of an answer.
    rows: B, decoded at once by each group of chips; 0 for as many as fit.
    steps: of training.
    batch_rows: rows of a training step on each chip.
    seq_len: tokens of such a row.
    features: store or online.
    kind: of the drafter.
    layers: of the drafter.
    draft_vocab: Vd; 0 for V.
    draft_len: K.
    tau: emitted tokens of a round, a guess.
  """

  prompts: int = 100_000
  prompt_tokens: int = 256
  answer_tokens: int = 512
  rows: int = 0
  steps: int = 20_000
  batch_rows: int = 4
  seq_len: int = 2048
  features: str = "store"
  kind: str = "eagle3"
  layers: int = 1
  draft_vocab: int = 32_000
  draft_len: int = 5
  tau: float = 2.5


@dataclasses.dataclass(frozen=True)
class Plan:
  """What comes out; bytes are of one chip unless said otherwise.

  Attributes:
    group: chips that hold one copy of the target.
    rows: decoded at once by each group.
    weights: bytes of the target.
    cache: bytes of the caches.
    training: bytes of training.
    fits: whether the largest of these fits.
    features_per_token: bytes of the store for each token.
    features: bytes of the whole store, on disk.
    generate, extract, train, decode: tokens per second of all chips; of training, tokens read.
    hours: stage -> hours.
  """

  group: int
  rows: int
  weights: float
  cache: float
  training: float
  fits: bool
  features_per_token: int
  features: float
  generate: float
  extract: float
  train: float
  decode: float
  hours: dict[str, float]


def seconds(chip: Accelerator, chips: float, flops: float, bytes_read: float) -> float:
  """The roofline of the module's docstring."""
  compute, memory = chip.efficiency
  return max(flops / (chips * chip.flops * compute),
             bytes_read / (chips * chip.bandwidth * memory))


def layer_parameters(config: DecoderConfig, experts: float | None = None) -> float:
  """Parameters of the matrices of one layer; of a mixture with so many of its experts, all when
  None."""
  D, H, E = config.hidden_size, config.head_dim, config.num_experts
  attention = D * H * (2 * config.num_heads + 2 * config.num_kv_heads)
  if not E:
    return attention + 3 * D * config.intermediate_size
  return attention + D * E + 3 * D * config.expert_size * (E if experts is None else experts)


def touched(config: DecoderConfig, tokens: float) -> float:
  """Parameters of the layers that a pass of so many tokens reads."""
  experts = whatif.distinct_experts(
      config.num_experts, config.experts_per_token, tokens) if config.num_experts else None
  return config.num_layers * layer_parameters(config, experts)


def taps_of(target: DecoderConfig, kind: str) -> tuple[int, ...]:
  """The target's layers that a drafter of this kind reads."""
  if kind == "small_lm":
    return ()
  if kind == "eagle3":
    return eagle3.eagle3_taps(target.num_layers)
  return tuple(dflash.dflash_taps(target.num_layers, config_lib.DrafterConfig().num_taps))


def drafter_parameters(target: DecoderConfig, job: Job) -> float:
  """m, the trained parameters of the drafter (of a copy of a mixture all experts)."""
  own = dataclasses.replace(target, num_layers=job.layers)
  if job.kind == "small_lm":
    return job.layers * layer_parameters(target)
  taps = taps_of(target, job.kind)
  if job.kind == "dspark":
    shapes = dspark.tensor_shapes(own, taps, draft_vocab=job.draft_vocab)
  else:
    shapes = (eagle3 if job.kind == "eagle3" else dflash).tensor_shapes(own, taps)
  return sum(math.prod(shape) for shape in shapes.values())


def plan(target: DecoderConfig, chip: Accelerator, chips: int, job: Job) -> Plan:
  """The numbers of a job.

  Raises:
    UserError: the target does not fit on all chips together.
  """
  D, L, V = target.hidden_size, target.num_layers, target.vocab_size
  layers, used, head = L * layer_parameters(target), touched(target, 1), V * D
  context = job.prompt_tokens + job.answer_tokens
  forward = 2 * used + 2 * L * target.num_heads * target.head_dim * context
  weights = 2.0 * (layers + head * (1 if target.tie_embeddings else 2))
  row = 4.0 * L * target.num_kv_heads * target.head_dim * context

  group = 1
  while group < chips and weights + row > _USABLE * chip.memory * group:
    group *= 2
  group = min(group, chips)
  if weights + row > _FULL * chip.memory * group:
    raise UserError(f"--chips={chips}: the target needs {weights / 1e9:,.1f} GB, the chips have "
                    f"{chip.memory * chips / 1e9:,.0f} GB")
  groups = chips // group
  fitting = max(1, int((_FULL * chip.memory * group - weights) / row))
  rows = job.rows or min(fitting, 256)

  prefill = job.prompt_tokens / job.answer_tokens * forward
  unread = lambda tokens: 2 * (layers - touched(target, tokens))  # bytes of experts left alone
  step = seconds(chip, group, rows * (forward + 2 * head + prefill),
                 weights - unread(rows) + rows * row / 2)
  step += target.num_layers * chip.layer_s
  generate = groups * rows / step

  taps = taps_of(target, job.kind)
  per_token = bytes_per_token("store", hidden_size=D, num_taps=len(taps)) if taps else 0
  tokens = job.prompts * context
  # Eight thousand tokens share one reading of the weights.
  extract = groups * 8192 / seconds(chip, group, 8192 * forward, weights)

  m, Vd = drafter_parameters(target, job), job.draft_vocab or V
  options = config_lib.DrafterConfig()
  batch = job.batch_rows * job.seq_len
  places = {"small_lm": 1.0, "eagle3": float(options.steps)}.get(
      job.kind, options.anchors * options.block_size / job.seq_len)
  scored = places * (job.answer_tokens / context if places >= 1 else 1.0)
  online = job.features == "online" and bool(taps)
  projection = len(taps) * D * D
  every = projection  # c
  if job.kind in ("dflash", "dspark"):
    every += job.layers * 2 * target.num_kv_heads * target.head_dim * D
  flops = 6 * ((m - projection) * places + every) + 8 * Vd * D * scored + forward * online
  train = chips * batch / seconds(
      chip, 1, batch * flops, 3 * 4.0 * m + weights * online)
  loss = 4.0 * 4 * config_lib.TrainConfig().chunk * Vd
  frozen = weights / group if online else 2.0 * head * (1 if target.tie_embeddings else 2)
  training = 16.0 * m + frozen + loss
  if training > _FULL * chip.memory:
    training = (16.0 * m + frozen) / chips + loss

  drafting = job.draft_len if job.kind in ("small_lm", "eagle3") else 1
  width = rows * (job.draft_len + 1)
  round_s = seconds(chip, group, width * (forward + 2 * head),
                    weights - unread(width) + rows * row / 2)
  round_s += drafting * seconds(
      chip, group, rows * (2 * m + 2 * Vd * D), 2.0 * m + 2.0 * Vd * D)
  round_s += (target.num_layers + drafting * job.layers) * chip.layer_s
  decode = groups * rows * job.tau / round_s

  cache = rows * row / group
  hours = {
      "generate": job.prompts * job.answer_tokens / generate / 3600,
      "extract": tokens / extract / 3600 if taps and not online else 0.0,
      "train": job.steps * batch * chips / train / 3600}
  return Plan(
      group, rows, weights / group, cache, training,
      max(weights / group + cache, training) <= _FULL * chip.memory, per_token,
      0.0 if online else float(tokens * per_token), generate, extract, train, decode, hours)


def load_target(argument: str) -> DecoderConfig:
  """A preset, the config.json of a folder, or what the demo or a .gguf file says of itself.

  Raises:
    UserError: none of these, or of an architecture that is not supported.
  """
  if argument.lower() in TARGETS:
    return TARGETS[argument.lower()]
  path = Path(argument)
  if argument == "demo" or path.suffix == ".gguf":
    return open_checkpoint(argument).config
  path = path / "config.json" if path.is_dir() else path
  try:
    fields = json.loads(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise UserError(f"--target={argument}: not one of {', '.join(TARGETS)}, and {path}: "
                    f"{error.strerror}") from None
  except ValueError as error:
    raise UserError(f"--target={argument}: {path} is no JSON ({error})") from None
  return DecoderConfig.from_hf(fields)


def show(found: Plan, chip: Accelerator, chips: int, job: Job, console: Console) -> None:
  """Prints the plan as two tables."""
  size = lambda value: (f"{value / 1e12:,.2f} TB" if value >= 1e12 else f"{value / 1e9:,.2f} GB")
  memory = Table(title=f"one chip of {chips} ({size(chip.memory)})", title_justify="left")
  memory.add_column("what")
  memory.add_column("bytes", justify="right")
  for name, value in [
      (f"weights of the target over {found.group} chips", found.weights),
      (f"caches of {found.rows} rows a group", found.cache), ("training", found.training)]:
    memory.add_row(name, size(value))
  console.print(memory)
  if not found.fits:
    console.print("[red]does not fit[/]: more chips, fewer --rows or a smaller --draft_vocab")
  if found.features:
    console.print(f"features: {found.features_per_token:,} bytes a token, {size(found.features)} "
                  "on disk")
  stages = Table()
  stages.add_column("stage")
  for name in ("tokens/s", "hours", "chip hours"):
    stages.add_column(name, justify="right")
  for name in ("generate", "extract", "train"):
    hours = found.hours[name]
    if hours:
      stages.add_row(
          name, f"{getattr(found, name):,.0f}", f"{hours:,.2f}", f"{hours * chips:,.1f}")
  stages.add_row(f"decode (tau {job.tau:g})", f"{found.decode:,.0f}", "", "")
  total = sum(found.hours.values())
  stages.add_row("all", "", f"{total:,.2f}", f"{total * chips:,.1f}")
  console.print(stages)


def execute(values: flags.FlagValues) -> None:
  """Checks the flags and prints the plan.

  Raises:
    UserError: names the flag and its value.
  """
  if not values.target:
    raise UserError("--target is needed")
  job = Job(**{field.name: values[field.name if field.name != "kind" else "drafter"].value
               for field in dataclasses.fields(Job)})
  if job.kind not in config_lib.KINDS:
    raise UserError(f"--drafter={job.kind} must be one of {', '.join(config_lib.KINDS)}")
  if job.features not in ("store", "online"):
    raise UserError(f"--features={job.features} must be store or online")
  least = {"rows": 0, "draft_vocab": 0}
  for field in dataclasses.fields(Job):
    if field.type is int and getattr(job, field.name) < least.get(field.name, 1):
      raise UserError(f"--{field.name}={getattr(job, field.name)} must be at least "
                      f"{least.get(field.name, 1)}")
  if values.chips < 1:
    raise UserError(f"--chips={values.chips} must be at least 1")
  chip = accelerators.find(values.accelerator)
  found = plan(load_target(values.target), chip, values.chips, job)
  show(found, chip, values.chips, job, Console())


def main() -> None:
  """The command line."""
  flags.DEFINE_string("target", "", "config.json, its folder, a .gguf file, demo, or 1b, 8b, 70b")
  flags.DEFINE_string("accelerator", "v5p", ", ".join(accelerators.ACCELERATORS))
  flags.DEFINE_integer("chips", 1, "how many")
  kinds = {int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string}
  for field in dataclasses.fields(Job):
    name = "drafter" if field.name == "kind" else field.name
    kinds[field.type](name, field.default, "see Job in launch/plan.py")
  command.run(execute, lambda argv: command.parse(argv, flags.FLAGS))


if __name__ == "__main__":
  main()
