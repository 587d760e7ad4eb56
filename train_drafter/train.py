"""The train stage: distills the drafter from the target's answers.

Reads `generate/`; writes `train/`: checkpoints, metrics.jsonl and TensorBoard events, plan.json
(the number of steps, once measured), draft vocabulary and teacher statistics, and at the end the
best drafter by validation in `drafter/`, in the form that `spec_jax.load_drafter` reads.
"""

import contextlib
import dataclasses
import functools
import json
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from spec_jax import drafters, sampling, sharding
from spec_jax.errors import UserError
from spec_jax.models.decoder import linear
from spec_jax.target import Target
from spec_jax.types import pytree
from train_drafter import (
  buckets,
  distributed,
  head_sample,
  losses,
  manifest,
  metrics,
  micro_batches,
  placement,
  replay,
  store,
)
from train_drafter import config as config_lib
from train_drafter.batches import Packer, ahead
from train_drafter.checkpoint import Checkpoints, GracefulExit
from train_drafter.config import Config, TrainConfig
from train_drafter.curriculum import curriculum
from train_drafter.documents import draft_vocabulary, prepare
from train_drafter.extract import open_features, with_features
from train_drafter.generate import load_answers, target_id
from train_drafter.metrics import MetricLog, Profile, means, quality
from train_drafter.on_policy import OnPolicy
from train_drafter.optimizer import make_optimizer
from train_drafter.progress import Bar
from train_drafter.start import begin_with, initial_drafter

STAGE = "train"
REPLAYED = 5  # K of the replayed tau of a validation
_CALIBRATION = 6  # steps that measure the time of a step
_LEAST_STEPS = 20  # that a process takes even when compiling has used the budget up


@pytree
class TrainState:
  """What a step changes, and all that a checkpoint holds.

  The fields are `Any` because the checkpoint code maps the tree to descriptions of its leaves.

  Attributes:
    params: trained parameters, float32.
    opt_state: of optax.
    step: updates whose batches are consumed, an int32 scalar as the two that follow.
    bad: non-finite steps in a row.
    skipped: non-finite steps in all.
  """

  params: Any
  opt_state: Any
  step: Any
  bad: Any
  skipped: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
  """What a step does not change.

  Attributes:
    graph: nnx graph definition of the drafter.
    frozen: its arrays that are not trained (reduced head, draft ids).
    target: graph definition of the target.
    optimizer: of optax.
    options: the train config.
    schedule: learning rate by update.
    kind: of the drafter.
    mesh: the devices, None for one.
    head_dim: elements of a head, which no device divides.
  """

  graph: nnx.GraphDef
  frozen: Any
  target: nnx.GraphDef
  optimizer: optax.GradientTransformation
  options: TrainConfig
  schedule: optax.Schedule
  kind: str
  mesh: Mesh | None = None
  head_dim: int = 1


def run(cfg: Config, workdir: Path) -> Path:
  """Trains, or goes on from the last checkpoint; reuses a finished folder.

  Raises:
    UserError: the generate stage has not run, nothing is supervised, too many non-finite steps, or
      the folder belongs to another config.
  """
  workdir = Path(workdir)
  folder = workdir / STAGE
  source = {name: manifest.require(workdir / name, name, cfg) for name in sources(cfg)}
  target = placement.load_target(cfg, cfg.train.dtype, own=False)
  part = config_lib.train_part(cfg)
  warm = begin_with(cfg, target)
  opened = manifest.begin(
      folder, stage=STAGE, config=part | warm.recorded(), inputs=source, target=target_id(target))
  if opened.complete:
    print(f"{STAGE}: {opened.counts['steps']} steps, reused")
    return folder
  began = time.monotonic()
  stored = "extract" in source and cfg.features.mode != "online"
  if stored:
    answers = open_features(cfg, workdir, target.config.num_layers).documents
  else:
    answers = load_answers(workdir / "generate")
  kept, held, counts = prepare(
      answers, target, cfg, folder, workdir / ("extract" if stored else "generate"), warm.draft_ids)
  print(f"{STAGE}: {counts['documents']} answers, {counts['supervised']} supervised tokens "
        f"({counts['dropped']} answers with nothing to learn dropped), draft vocabulary covers "
        f"{counts['draft_vocab_coverage']:.2%}", flush=True)
  module = initial_drafter(cfg, target, draft_vocabulary(folder))
  pack = functools.partial(
      Packer, rows=cfg.train.batch_rows, seq_len=cfg.train.seq_len, chunk=cfg.train.chunk,
      seed=cfg.train.seed, pad_id=max(target.config.pad_id, 0), own=placement.own_rows(target.mesh),
      features=len(module.taps) * target.config.hidden_size if stored else 0)
  result = fit(cfg, target, module, pack(kept), pack(held).in_order(), folder, began)
  manifest.finish(folder, opened, counts | result, "drafter/*")
  if stored and cfg.features.delete_used:
    store.remove_parts(workdir / "extract")
  return folder


def sources(cfg: Config) -> tuple[str, ...]:
  """The stages that training reads: the answers, and the features where the drafter reads some."""
  return ("generate",) if cfg.drafter.kind == "small_lm" else ("generate", "extract")


# One step.


def make_setup(cfg: Config, target: Target, module: Any, steps: int) -> tuple[Setup, TrainState]:
  """The static part of training and the state before the first step."""
  options = cfg.train
  graph, params, frozen = nnx.split(module, nnx.Param, ...)
  params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)  # copies: they are donated
  warmup = min(max(1, round(options.warmup * steps)), steps - 1)  # the cosine needs a step
  schedule = optax.warmup_cosine_decay_schedule(
      0.0, options.lr, warmup, steps, options.final_lr * options.lr)
  optimizer = optax.chain(
      optax.clip_by_global_norm(options.clip) if options.clip else optax.identity(),
      make_optimizer(options, schedule, params))
  mesh, head_dim = target.mesh, target.config.head_dim
  params, opt_state = placement.start(optimizer, params, mesh, head_dim)
  zero = jnp.zeros((), jnp.int32)
  state = sharding.place(TrainState(params, opt_state, zero, zero + 0, zero + 0), mesh, head_dim)
  frozen, kind = sharding.place(frozen, mesh, head_dim), getattr(module, "kind", "")
  return Setup(graph, frozen, target.graph, optimizer, options, schedule, kind, mesh,
               head_dim), state


def batch_sums(
    setup: Setup, params: Any, frozen: Any, target_params: Any, batch: dict, *,
    states: Any = None, sampled: int = 0):
  """Sums over the states that predict something: loss and its weight; and, by place in the draft,
  alpha, greedy match, the teacher's mass on the draft vocabulary, and their count. `states` are
  those of `train_states` where they are known. With `sampled` ids of the draft vocabulary the sums
  are estimates (`head_sample`)."""
  options = setup.options
  module = drafter_of(setup, params, frozen)
  target = nnx.merge(setup.target, target_params)
  key = _batch_key(setup, batch)
  if states is None:
    states = module.train_states(batch, target, key)
  if sampled:
    offset = head_sample.shrink(module, target, batch, sampled, jax.random.fold_in(key, 1))
  ids = module.draft_ids[...] if hasattr(module, "draft_ids") else None
  head = module.teacher_rows(target)
  following = jnp.roll(batch["tokens"].reshape(-1), -1)[batch["place"]]  # the data token
  place_of = lambda tokens: tokens if ids is None else module.draft_place[...][tokens]
  rows_of = {name: batch[name] for name in ("hidden", "logsumexp", "best")
             if name in batch} | {"label": place_of(following)}
  if "topk_ids" in batch:
    rows_of |= {"logprobs": batch["topk_logprobs"], "place": place_of(batch["topk_ids"])}

  def student_logits(part, trained, j):
    student = module.masked(module.train_logits(part[:, j], target, trained), target)
    student = student / options.teacher_temperature  # as a drafter decodes at its target's
    return student + offset if sampled else student

  def token_sums(part, trained, rest):
    teacher = {name: value[rest["source"]] for name, value in rows_of.items()}
    if "hidden" in teacher:
      rows = module.masked(linear(teacher["hidden"], head), target) / options.teacher_temperature
      rows = rows + offset if sampled else rows
    total: dict[str, jax.Array] = {}
    for j in range(part.shape[1]):
      student = student_logits(part, trained, j)
      lower, sums = {}, {}
      if "logprobs" in teacher:
        rows, below = losses.completed(student, teacher["logprobs"], teacher["place"])
        lower = {"alpha_lower": below}
      known = losses.Teacher(rows, teacher["logsumexp"], teacher["label"])
      best = sampling.argmax(jax.lax.stop_gradient(student - offset if sampled else student))
      match = (best if ids is None else ids[best]) == teacher["best"]
      alpha = losses.overlap(jax.lax.stop_gradient(student), rows, known.logsumexp)
      weight, depth = rest["weight"][:, j], rest["depth"][:, j]
      used = (weight > 0).astype(jnp.float32)
      each = losses.LOSSES[options.loss](student, known)
      if "confidence" in trained:  # 2607.05147: learns 1 - TV, for the report alone
        told = module.confidence_logit(part[:, j], trained["confidence"])
        each += optax.sigmoid_binary_cross_entropy(told, alpha)
        sums = metrics.calibration_sums(jax.nn.sigmoid(told), alpha, used)
      sums |= {"loss": jnp.sum(weight * each), "weight": jnp.sum(weight)}
      places = lower | {
          "alpha": alpha, "greedy_match": match, "count": 1.0,
          "kept_mass": losses.kept_mass(rows, known.logsumexp)}
      for name, value in places.items():
        sums[name] = jnp.zeros(module.depths).at[depth].add(used * value)
      total = {name: total.get(name, 0.0) + value for name, value in sums.items()}
    return total

  short = -states.source.shape[0] % options.chunk
  pad = lambda x: jnp.pad(x, ((0, short), *[(0, 0)] * (x.ndim - 1)))
  hidden, trained = pad(states.hidden), module.head_parameters()
  rest = {name: pad(getattr(states, name)) for name in ("source", "weight", "depth", "block")}
  there = rest["weight"] > 0
  if options.position_weight == "uniform":
    rest["weight"] = there.astype(jnp.float32)
  elif options.position_weight == "dpace":  # a pass of its own: a weight needs its whole block
    known = lambda inputs: jnp.stack([
        losses.likelihood(student_logits(inputs[0], trained, j), rows_of["label"][inputs[1]])
        for j in range(hidden.shape[1])], -1)
    likely = jax.lax.map(known, jax.tree.map(
        lambda x: x.reshape(-1, options.chunk, *x.shape[1:]),
        jax.lax.stop_gradient((hidden, rest["source"]))))
    rest["weight"] = losses.dpace(
        likely.reshape(there.shape), there, rest["block"], rest["depth"], states.blocks,
        module.depths)
  return losses.chunked_sums(
      token_sums, hidden, trained, rest, options.chunk, setup.mesh,
      used=lambda rest: jnp.any(rest["weight"] > 0))


@functools.partial(jax.jit, static_argnames=("setup",), donate_argnames=("state",))
def train_step(setup: Setup, state: TrainState, frozen: Any, target_params: Any, batch: Any):
  """One update from a batch or its micro-batches; returns the new state and metrics as sums with
  their count.

  A step whose loss or gradient is not finite, or that has nothing supervised, changes no parameter.
  """
  sums_of = lambda params, batch: batch_sums(
      setup, params, frozen, target_params, batch, sampled=setup.options.sampled_vocab)
  loss, sums, grads = micro_batches.mean_gradient(
      sums_of, state.params, batch, setup.mesh, setup.head_dim)
  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(loss) & jnp.isfinite(norm)
  usable = finite & (sums["weight"] > 0)
  updates, opt_state = setup.optimizer.update(grads, state.opt_state, state.params)
  keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(usable, a, b), new, old)
  state = TrainState(
      params=keep(optax.apply_updates(state.params, updates), state.params),
      opt_state=keep(opt_state, state.opt_state),
      step=state.step + (sums["weight"] > 0),
      bad=jnp.where(finite, 0, state.bad + 1),
      skipped=state.skipped + ~finite)
  sums |= {"grad_norm": norm, "bad": state.bad, "skipped": state.skipped}
  return sharding.pin(state, setup.mesh, setup.head_dim), sharding.replicated(sums, setup.mesh)


def _batch_key(setup: Setup, batch: dict) -> jax.Array:
  return jax.random.fold_in(jax.random.key(setup.options.seed), batch["step"])


def drafter_of(setup: Setup, params: Any, frozen: Any) -> nnx.Module:
  """The drafter of the parameters, in the dtype it computes in."""
  low = jnp.dtype(setup.options.dtype)
  params = jax.tree.map(lambda x: x.astype(low) if x.ndim > 1 else x, params)
  return nnx.merge(setup.graph, params, frozen)


@functools.partial(jax.jit, static_argnames=("setup", "replayed"))
def validation_sums(
    setup: Setup, params: Any, frozen: Any, target_params: Any, batch: dict, replayed: bool):
  """The sums of a batch, without a gradient, and if `replayed` (else None) how probably each
  supervised token is an accepted draft (`replay.packed_chances`)."""
  module = drafter_of(setup, params, frozen)
  target = nnx.merge(setup.target, target_params)
  states = module.train_states(batch, target, _batch_key(setup, batch))
  sums = batch_sums(setup, params, frozen, target_params, batch, states=states)
  chances = replay.packed_chances(
      module, target, batch, REPLAYED, states) if replayed else None
  return sharding.replicated((sums, chances), setup.mesh)


def validate(setup: Setup, params: Any, target_params: Any, batches: Iterable[dict]) -> dict:
  """Means over the validation batches, as `means` names them."""
  total: dict[str, np.ndarray] = {}
  replayed: dict[str, np.ndarray] = {}
  for batch in batches:
    sums, chances = jax.device_get(validation_sums(
        setup, params, setup.frozen, target_params, sharding.place_rows(batch, setup.mesh),
        "hidden" in batch and setup.kind in replay.PACKED))
    total = {name: total.get(name, 0.0) + value for name, value in sums.items()}
    if chances is not None:
      found = replay.packed_rounds(chances, batch, setup.kind, REPLAYED)
      replayed |= {name: replayed.get(name, 0.0) + value for name, value in found.items()}
  # In the unit of the report: tokens per round of decoding REPLAYED drafts a round.
  return means(total) | {name: float(n / rounds) for name, (n, rounds) in replayed.items()}


# The loop.


def fit(cfg, target, module, packer: Packer, held: Sequence[dict], folder: Path, began: float):
  """Trains for the planned steps and writes the best drafter; returns counts for the manifest."""
  steps = planned_steps(cfg, target, module, packer, folder, began)
  distributed.agree("train: answers and steps", [len(packer.documents), len(held), steps])
  setup, state = make_setup(cfg, target, module, steps)
  programs = curriculum(setup, module)
  every = cfg.train.eval_every or max(1, steps // 10)
  own, each = OnPolicy(cfg, target, packer), cfg.train.micro_batches
  make = lambda at: None if own.due(at) else packer.batch(at)
  deadline = began + 1.15 * cfg.train.budget_s if cfg.train.budget_s else float("inf")
  place = buckets.checkpoints(cfg, folder)
  with Checkpoints(place, max_to_keep=cfg.train.keep, best="max") as saved, GracefulExit() as stop:
    extra: dict[str, Any] = {"best": None}
    if saved.latest_step is not None:
      restored = saved.restore(state)
      state, extra = restored.state, restored.extra
      print(f"{STAGE}: goes on from step {restored.step}", flush=True)
    step = first = int(state.step)
    last = None
    with contextlib.closing(MetricLog(folder, step)) as log, \
        contextlib.closing(Profile(folder if cfg.train.profile else None)) as profile, \
        Bar("train", total=steps, start=step) as bar:
      batches = ahead(make, step * each, steps * each)
      while step < steps:
        profile.before(step - first)
        taken = []
        for at in range(step * each, (step + 1) * each):
          batch = next(batches) or own.batch(
              at, drafter_of(setup, state.params, setup.frozen))
          taken.append(with_features(batch, module.taps, target))
        state, sums = train_step(
            programs.at(step, steps), state, setup.frozen, target.params,
            micro_batches.place(taken, setup.mesh))
        step += 1
        note = None if last is None else log.step(*last, setup, packer)
        last = (step, sums)
        bar.advance(1, amount=float(sum(b["weight"].sum() for b in taken)), note=note)
        stopping, late = stop.agreed(
            step, late=time.monotonic() > deadline and step - first >= _LEAST_STEPS)
        due = step % every == 0 or step == steps or late
        if due or stopping:  # what a checkpoint holds is also in the log
          log.step(*last, setup, packer)
          last = score = None
        if due:
          found = validate(setup, state.params, target.params, (
              with_features(batch, module.taps, target) for batch in held))
          log.validation(step, found)
          score = quality(found)
          known = extra["best"] or {"score": -math.inf}
          if known["score"] <= score < math.inf:  # of equal ones the newest, as best_step has it
            extra = {"best": {"step": step, "score": score, **found}}
        if due or stopping:  # a signal adds no validation: the best step does not depend on it
          saved.save(step, state, extra, metric=score)
        if stopping:
          saved.wait()
          print(f"{STAGE}: stopped at step {step} of {steps}; the same command goes on from there",
                flush=True)
          stop.leave()
        if late:
          print(f"{STAGE}: stopped at step {step} of {steps}: train.budget_s is used up")
          break
    saved.wait()
    skipped = int(state.skipped)
    if extra["best"] is None:
      raise UserError(f"train: no validation was finite; lower train.lr={cfg.train.lr}")
    best = saved.restore(state, step=saved.best_step)
  final = nnx.merge(setup.graph, *jax.tree.map(
      jnp.asarray, sharding.fetch((best.state.params, setup.frozen))))
  if distributed.is_primary():
    drafters.save_drafter(folder / "drafter", final, target, step=best.step)
  record = best.extra["best"]
  print(f"{STAGE}: best step {best.step}, validation alpha {metrics.alpha_text(record)}, "
        f"greedy match {record['greedy_match']:.3f}" + (
            f", confidence head off by {record['confidence_error']:.3f} on average"
            if "confidence_error" in record else ""))
  return {
      "steps": step, "planned_steps": steps, "skipped_steps": skipped, "best_step": best.step,
      "validation": record, "epochs": packer.epoch_of(step * each),
      "training_estimate": [
          {"temperature": 0.0, "first_position": record["greedy_match"]},
          {"temperature": cfg.train.teacher_temperature, "rule": "ratio",
           "first_position": record["alpha"]}]}


def planned_steps(cfg, target, module, packer: Packer, folder: Path, began: float) -> int:
  """train.steps, or as many as fit into the time left; measured once and kept in plan.json."""
  if cfg.train.steps:
    return cfg.train.steps
  path = folder / "plan.json"
  if distributed.from_primary("train: plan", path.exists()):
    try:
      return int(json.loads(path.read_text())["steps"])
    except (ValueError, TypeError, KeyError):
      raise UserError(f"{path}: damaged; remove {folder} and run its stage again") from None
  setup, state = make_setup(cfg, target, module, 1000)
  second, each = 0.0, cfg.train.micro_batches
  for share, part in curriculum(setup, module).parts():
    times = []
    for step in range(_CALIBRATION):
      clock = time.monotonic()
      taken = [with_features(packer.batch(step * each + i), module.taps, target)
               for i in range(each)]
      state, sums = train_step(part, state, setup.frozen, target.params,
                               micro_batches.place(taken, setup.mesh))
      jax.block_until_ready(sums)
      times.append(time.monotonic() - clock)
    second += share * float(np.median(times[1:]))
  left = cfg.train.budget_s - (time.monotonic() - began)
  steps = distributed.from_primary(
      "train: planned steps", max(_LEAST_STEPS, int(0.92 * left / second)))
  if distributed.is_primary():
    manifest.write_json(path, {"steps": steps, "seconds_per_step": second})
  if steps * second > left:
    print(f"{STAGE}: train.budget_s={cfg.train.budget_s:g} is short for reading, compiling and "
          f"{_LEAST_STEPS} steps of {second:.3f} s; it takes these steps all the same", flush=True)
  else:
    print(f"{STAGE}: {second:.3f} s a step, {steps} steps in {left:.0f} s", flush=True)
  return steps
