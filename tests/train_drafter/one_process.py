"""One process of a run of several, for the tests: stages of a pickled config, as `python -m
train_drafter --distributed` runs them, with a SIGTERM in the middle where that is asked for.

  python -m tests.train_drafter.one_process --config=cfg.pickle --workdir=run --stages=train ...
"""

import argparse
import os
import pickle
import signal
import sys
from pathlib import Path

from absl import flags

from spec_jax import command
from train_drafter import __main__ as program
from train_drafter import distributed


def told_at(step: int) -> None:
  """SIGTERM comes to this process while the batch behind `step` others runs."""
  from train_drafter import train
  real, done = train.train_step, []

  def train_step(*args):
    done.append(0)
    if len(done) == step + 1:
      os.kill(os.getpid(), signal.SIGTERM)
    return real(*args)

  train.train_step = train_step


def tell_shares() -> None:
  """Prints how many of the prompts this process decodes in evaluate."""
  from train_drafter import evaluate
  real = evaluate.decode_all

  def decode_all(bench, drafter, members, *args, own=None, **options):
    print(f"decodes {len(members if own is None else own)} of {len(members)}", flush=True)
    return real(bench, drafter, members, *args, own=own, **options)

  evaluate.decode_all = decode_all


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--config", type=Path)
  parser.add_argument("--workdir", type=Path)
  parser.add_argument("--stages")
  parser.add_argument("--address", default="")
  parser.add_argument("--count", type=int, default=0)
  parser.add_argument("--index", type=int, default=-1)
  parser.add_argument("--timeout", type=float, default=120.0)
  parser.add_argument("--told_at", type=int, default=-1)
  parser.add_argument("--told", type=int, default=0, help="the process that is told")
  known = parser.parse_args()
  own = known.index if known.index >= 0 else int(os.environ.get("SLURM_PROCID", 0))
  if own == known.told and known.told_at >= 0 and not list(
      known.workdir.glob("train/checkpoints/*/_CHECKPOINT_METADATA")):
    told_at(known.told_at)
  if "evaluate" in known.stages:
    tell_shares()
  options = program.Options(
    config=pickle.loads(known.config.read_bytes()), workdir=known.workdir,
    stages=tuple(known.stages.split(",")), overwrite=False, profile=False, command="test",
    joined=distributed.Options(known.address, known.count, known.index, known.timeout))
  sys.argv = sys.argv[:1]
  command.run(program.execute, lambda argv: flags.FLAGS(argv) and options)


if __name__ == "__main__":
  main()
