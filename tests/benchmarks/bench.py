"""Plain, speculative and reference decoding, measured in one interleaved run.

  python -m tests.benchmarks.bench                                 ngram against plain decoding
  python -m tests.benchmarks.bench --drafter=runs/quickstart/train/drafter

Prints tokens per second (medians), the ratios of pairs measured right after one another, and the
share of a round that is spent outside the passes of drafter and target. Every side decodes the same
prompts greedily, one at a time, a fixed number of tokens, prefill included.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import flags

import spec_jax
from spec_jax import command, decode, platform
from spec_jax import records as metrics
from spec_jax.errors import UserError
from spec_jax.generate import encode_prompt
from spec_jax.target import Target
from spec_jax.weights.resolve import resolve
from train_drafter import speed
from train_drafter.generate import read_jsonl

ROOT = Path(__file__).parents[2]
REST = 0.3  # seconds before each side: threads of the one before stop waiting for more work
ROUNDS = 16  # of one measurement of a round and its parts

_TARGET = flags.DEFINE_string("target", "demo", "the target, as load_target takes it")
_DRAFTER = flags.DEFINE_string("drafter", "", "a trained drafter's folder, beside ngram")
_DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "compute dtypes")
_PROMPTS = flags.DEFINE_integer("prompts", 9, "prompts, one of each category in turn", 1)
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 96, "tokens each of them is answered with", 2)
_DRAFT_LEN = flags.DEFINE_integer("draft_len", 5, "drafts of a round", 1)
_REPEATS = flags.DEFINE_integer("repeats", 9, "measurements of a round and its parts", 2)
_INTEROP = flags.DEFINE_string(
    "interop_python", ".venv-interop/bin/python",
    "the Python with torch and transformers (`make interop` installs it)")


class Reference:
  """transformers' `generate` in a process of its own, waiting between two prompts."""

  def __init__(self, python: Path, model: Path):
    script = Path(__file__).with_name("transformers_generate.py")
    stock = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    self._process = subprocess.Popen(
        [str(python), str(script), str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, bufsize=1, env=stock | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"})
    if self._process.stdout.readline().strip() != "ready":
      self._process.wait()
      raise UserError(f"{python} {script.name}: did not start")

  def __call__(self, ids: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
    """Tokens and seconds of one prompt."""
    job = json.dumps({"ids": list(ids), "new_tokens": new_tokens})
    self._process.stdin.write(f"go {job}\n")
    answer = self._process.stdout.readline()
    if not answer:
      raise UserError("the transformers process ended early; its message stands above")
    answer = json.loads(answer)
    return answer["tokens"], answer["seconds"]

  def close(self) -> None:
    """Ends the process."""
    self._process.communicate("\n")


def reference_python(name: str) -> Path | None:
  """The interpreter if it is there and has transformers; prints why not otherwise."""
  python = Path(name) if Path(name).is_absolute() else ROOT / name
  if not python.exists():
    print(f"transformers: skipped, there is no {name} (make interop installs it)")
    return None
  found = subprocess.run(
      [str(python), "-c", "import torch, transformers; print(transformers.__version__)"],
      capture_output=True, text=True)
  if found.returncode:
    print(f"transformers: skipped, {name} cannot import torch and transformers")
    return None
  print(f"transformers {found.stdout.strip()}: {name}")
  return python


def load_prompts(target: Target, count: int) -> list[list[int]]:
  """Token ids of the first embedded evaluation prompts of the categories in turn."""
  rows = read_jsonl(ROOT / "train_drafter" / "eval_prompts.jsonl")
  place: dict[str, int] = {}
  order = []
  for i, row in enumerate(rows):
    place[row["category"]] = place.get(row["category"], 0) + 1
    order.append((place[row["category"]], i))
  return [encode_prompt(target, rows[i]["messages"], i) for _, i in sorted(order)[:count]]


# Tokens per second.


def side(single: speed.Single) -> Callable[[Sequence[int]], tuple[list[int], float]]:
  """Decodes one prompt: tokens and seconds, prefill included."""
  def run(ids):
    work = single.start(ids)
    clock = time.perf_counter()
    row, = work.bucket(single.size, [0])
    return row.tokens, time.perf_counter() - clock
  return run


def measure(sides: dict[str, Callable], prompts: Sequence[Sequence[int]]) -> dict[str, dict]:
  """Rates and texts by side, the sides taking turns at every prompt after a warm-up."""
  for run in sides.values():
    run(prompts[0])
  out: dict[str, dict] = {name: {"rate": [], "text": []} for name in sides}
  for turn, ids in enumerate(prompts):
    names = list(sides)
    names = names[turn % len(names):] + names[:turn % len(names)]
    for name in names:
      time.sleep(REST)
      tokens, seconds = sides[name](ids)
      out[name]["rate"].append(len(tokens) / seconds)
      out[name]["text"].append(tokens)
  return out


# The share of a round outside the passes.


def round_parts(single: speed.Single, ids: Sequence[int], repeats: int) -> dict[str, float]:
  """Milliseconds of a round and its passes, and the share of it that is neither."""
  program, params, first = single.prefilled(ids)
  state = [first]
  rounds, never = jnp.asarray(ROUNDS, jnp.int32), jnp.asarray(2, jnp.int32)
  reject = jnp.asarray(True)  # one token a round: every measurement has the same rounds

  def rounds_piece():
    before = int(state[0].rounds[0])
    state[0] = decode.chunk(program, params, state[0], rounds, never, reject)
    done = int(state[0].rounds[0]) - before
    if done != ROUNDS:
      raise UserError(f"a measurement had {done} rounds instead of {ROUNDS}")
    return ()

  pieces = speed.passes(single, ids, ROUNDS)
  times = speed.interleaved(
      {"round": rounds_piece, "pass": pieces["verify"], "draft": pieces["draft"]}, repeats)
  median = {name: 1e3 * float(np.median(t)) / ROUNDS for name, t in times.items()}
  inside = [a + b for a, b in zip(times["pass"], times["draft"], strict=True)]
  ratio = metrics.paired_ratio(inside, times["round"])
  low, high = ratio["ratio_ci"]
  return median | {"outside": 1 - ratio["ratio"], "outside_ci": [1 - high, 1 - low]}


# The run.


def compare(name: str, ours: dict, against: str, theirs: dict) -> None:
  """Prints one ratio with its interval and the share of equal texts."""
  pair = metrics.paired_ratio(ours["rate"], theirs["rate"])
  low, high = pair["ratio_ci"]
  interval = "" if low is None else f" ({low:.2f} to {high:.2f})"
  same = metrics.identical_share(ours["text"], theirs["text"])
  print(f"  {name} / {against}: {pair['ratio']:.2f}{interval} times, texts equal on "
        f"{100 * same:.0f} % of the prompts")


def bench_dtype(dtype: str, python: Path | None) -> None:
  """Measures and prints everything for one dtype."""
  target = spec_jax.load_target(_TARGET.value, dtype=dtype)
  prompts = load_prompts(target, _PROMPTS.value)
  size = -(-max(map(len, prompts)) // 32) * 32
  new_tokens = _NEW_TOKENS.value
  drafters = {"ngram": spec_jax.load_drafter("ngram", target)}
  if _DRAFTER.value:
    drafters["small_lm"] = spec_jax.load_drafter(_DRAFTER.value, target)
  make = lambda drafter, budget: speed.Single(
      target, drafter, _DRAFT_LEN.value, size, budget, eos_ids=())
  sides = {"plain": side(make(None, new_tokens))}
  sides |= {name: side(make(drafter, new_tokens)) for name, drafter in drafters.items()}
  reference = None
  if python is not None and dtype == "float32":
    reference = Reference(python, resolve(_TARGET.value).path)
    sides["transformers"] = lambda ids: reference(ids, new_tokens)
  found = measure(sides, prompts)
  if reference is not None:
    reference.close()
  print(f"\n{dtype}, {len(prompts)} prompts, {new_tokens} tokens each, greedy, K = "
        f"{_DRAFT_LEN.value}; medians of tokens per second, prefill included")
  for name, values in found.items():
    print(f"  {name:<14}{np.median(values['rate']):8.1f}")
  if reference is not None:
    compare("plain", found["plain"], "transformers", found["transformers"])
  for name in drafters:
    compare(name, found[name], "plain", found["plain"])
  budget = ROUNDS * (_REPEATS.value + 2)
  for name, drafter in drafters.items():
    parts = round_parts(make(drafter, budget), prompts[0], _REPEATS.value)
    low, high = parts["outside_ci"]
    print(f"  round with {name}: {parts['round']:.1f} ms = verification pass {parts['pass']:.1f} + "
          f"proposal {parts['draft']:.1f} + the rest; outside the passes "
          f"{100 * parts['outside']:.1f} % ({100 * low:.1f} to {100 * high:.1f})")


def main(values: flags.FlagValues) -> None:
  """Runs the benchmark for every dtype."""
  del values
  platform.configure()
  python = reference_python(_INTEROP.value)
  for dtype in _DTYPES.value:
    bench_dtype(dtype, python)


if __name__ == "__main__":
  platform.tune_process()
  command.run(main, lambda argv: command.parse(argv, flags.FLAGS))
