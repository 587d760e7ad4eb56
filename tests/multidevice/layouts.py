"""What tests/multidevice/test_layouts.py compares: the same work on one device and on meshes of the
eight simulated devices of this process. `python -m tests.multidevice.layouts FOLDER` leaves there
arrays.npz, with keys "layout/what", and facts.json.
"""

import contextlib
import functools
import io
import json
import re
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import spec_jax
from spec_jax import decode, drafters, identity, sharding
from spec_jax.generate import Run
from spec_jax.models import moe
from spec_jax.models.decoder import linear
from spec_jax.types import Cache
from spec_jax.weights.safetensors import write_folder
from tests import families, tiny
from tests.train_drafter.training import documents, make_config, pack
from train_drafter import extract, train
from train_drafter.batches import Packer
from train_drafter.checkpoint import Checkpoints

LAYOUTS = {"one": None, "data": (8, 1, 1), "fsdp": (2, 4, 1), "all": (2, 2, 2)}
TEXT = np.random.default_rng(0).integers(3, tiny.VOCAB, (8, 16)).astype(np.int32)
EXPERTS = families.config("qwen3_moe")


def main(folder: Path) -> None:
  write_folder(folder / "target", tiny.config(), tiny.tensors(tiny.config()), tiny.tokenizer())
  write_folder(folder / "experts", EXPERTS, families.tensors(EXPERTS), tiny.tokenizer())
  arrays: dict[str, np.ndarray] = {}
  facts: dict[str, dict] = {}
  tokens: dict[str, list] = {}
  for name, sizes in LAYOUTS.items():
    mesh = None if sizes is None else sharding.make_mesh(*sizes)
    target = spec_jax.load_target(str(folder / "target"), mesh=mesh)
    found, fact = {}, {"target": parts(target.params)}
    found["logits"] = logits(target)
    found |= step(target, fact)
    found |= stored(target)
    tokens[name], fact["cache"] = decoded(target)
    if name in ("one", "all"):
      experts = spec_jax.load_target(str(folder / "experts"), mesh=mesh)
      fact["experts"] = parts(experts.params)
      int8 = spec_jax.load_target(str(folder / "experts"), "int8w", mesh=mesh)
      fact["int8w"], arrays[f"int8w/{name}"] = parts(int8.params), logits(int8)
      found |= {"experts": logits(experts), "grouped": grouped(experts)}
      tokens[f"{name} experts"] = answers(experts, None)
      found |= {f"dspark {k}": v for k, v in gradient(target, dspark(target)).items()}
    arrays |= {f"{name}/{key}": value for key, value in found.items()}
    facts[name] = fact
    print(name, flush=True)
  one = spec_jax.load_target(str(folder / "target"))
  experts = spec_jax.load_target(str(folder / "experts"))
  for name in LAYOUTS:
    facts[name]["differences"] = differences(one, tokens["one"], tokens[name])
  facts["all"]["expert differences"] = differences(
      experts, tokens["one experts"], tokens["all experts"])
  facts["answers"] = tokens["one"]
  facts["checkpoints"] = checkpoints(one, folder)
  facts["fit"] = resumed(folder)
  np.savez(folder / "arrays.npz", **arrays)
  (folder / "facts.json").write_text(json.dumps(facts))


def parts(tree) -> dict[str, list]:
  """By path: shape of the whole, shape of a device's part, and different parts there are."""
  return {jax.tree_util.keystr(path): [
      list(x.shape), list(x.addressable_shards[0].data.shape),
      len({str(s.index) for s in x.addressable_shards}), len(x.sharding.device_set)]
          for path, x in jax.tree_util.tree_leaves_with_path(tree) if hasattr(x, "sharding")}


@functools.partial(jax.jit, static_argnames=("graph",))
def _logits(graph, params, tokens):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return nnx.merge(graph, params)(tokens, positions)[0]


def logits(target):
  return sharding.fetch(_logits(
      target.graph, target.params, sharding.place_rows(TEXT, target.mesh)))


def grouped(target):
  """The product over the experts of a layer that accelerators use and the CPU's programs do not."""
  layer = target.module.stack.layers[0]
  rows = np.random.default_rng(4).normal(size=(24, 32)).astype(np.float32)

  @jax.jit
  def run(rows, router, *experts):
    weights, chosen = moe.route(linear(rows, router), 2, True)
    return moe._grouped(rows, weights, chosen, *experts, jax.nn.silu)

  names = ("router", "experts_gate", "experts_up", "experts_down")
  return sharding.fetch(run(
      sharding.place_rows(rows, target.mesh), *(getattr(layer, name)[...] for name in names)))


# Training.


def batch_of(cfg, target, step=0):
  docs = documents(12, target=tiny.target())
  batch = pack(docs, cfg).batch(step)
  taps = np.random.default_rng(1).normal(size=(*batch["tokens"].shape, 32))
  return sharding.place_rows(batch | {"features": taps.astype(np.float32)}, target.mesh)


def config():
  return make_config(batch_rows=8)


def dspark(target):
  module = drafters.init_learned(
      "dspark", target, (0,), num_taps=1, block_size=3, anchors=4, mask_id=5, rank=8)
  rows = np.random.default_rng(3).normal(size=module.markov_w2[...].shape)  # not the zeros it has
  module.markov_w2[...] = jnp.asarray(rows, jnp.float32)
  return module


def gradient(target, module):
  cfg = config()
  setup, state = train.make_setup(cfg, target, module, 20)

  @jax.jit
  def grads(params, frozen, target_params, batch):
    def loss(params):
      sums = train.batch_sums(setup, params, frozen, target_params, batch)
      return sums["loss"] / sums["weight"], sums
    return jax.value_and_grad(loss, has_aux=True)(params)

  (loss, sums), grad = grads(state.params, setup.frozen, target.params, batch_of(cfg, target))
  named = {f"gradient {jax.tree_util.keystr(path)}": x
           for path, x in jax.tree_util.tree_leaves_with_path(grad)}
  return sharding.fetch({"loss": loss, "alpha": sums["alpha"], **named})


def step(target, fact):
  """Gradients of a batch, then three updates (the first at rate 0) and where the state lies."""
  cfg = config()
  module = drafters.init_from_target(target, (0,))
  found = gradient(target, module)
  setup, state = train.make_setup(cfg, target, module, 20)
  before = parts(state)
  for _ in range(3):
    old = state
    state, sums = train.train_step(
        setup, state, setup.frozen, target.params, batch_of(cfg, target))
  if target.mesh is not None:
    program = train.train_step.lower(
        setup, state, setup.frozen, target.params, batch_of(cfg, target)).compile().as_text()
    # A matrix [48, 32] of the MLP; states are never so large.
    fact["gathers"] = len(re.findall(r"f32\[48,32\].* all-gather(?:-start)?\(", program))
  fact["state"] = parts(state)
  fact["kept"] = before == fact["state"]
  fact["compilations"] = train.train_step._cache_size()
  fact["donated"] = all(x.is_deleted() for x in jax.tree.leaves(old.params))
  train.train_step.clear_cache()
  found |= sharding.fetch({"third loss": sums["loss"] / sums["weight"], "norm": sums["grad_norm"]})
  batches = tuple(batch_of(cfg, target, i) for i in range(2))
  where = parts(state)
  state, sums = train.train_step(setup, state, setup.frozen, target.params, batches)
  fact["kept"] &= parts(state) == where
  train.train_step.clear_cache()
  return found | sharding.fetch({"loss of two": sums["loss"] / sums["weight"],
                                 "norm of two": sums["grad_norm"]})


# Extraction and decoding.


def stored(target):
  rng = np.random.default_rng(2)
  sources = [extract.Source(i, i, rng.integers(3, 60, n).astype(np.int32), 2)
             for i, n in enumerate((9, 20, 14, 30, 7))]
  found = extract.part_arrays(target, sources, (0, 1), rows=3, seq_len=32, dtype="float32")
  return {f"stored {name}": found[name] for name in ("features", "last_hidden", "tokens")}


def answers(target, drafter):
  """Ten prompts through eight places, a stop string among the reasons to end."""
  out = spec_jax.generate(
      target, drafter, tiny.prompts(10), draft_len=3, max_new_tokens=16, batch_size=8,
      stop=("7a",), keep_hidden=True)
  assert all(len(h) == len(t) for h, t in zip(out.hidden, out.tokens, strict=True))
  return out.tokens


def decoded(target):
  """The answers, and where keys and values lie."""
  drafter = drafters.wrap("small_lm", "weak", drafters.init_from_target(target, (0,)))
  run = Run(target, drafter, tiny.prompts(8), draft_len=3)
  state = decode.init_state(run.program, run.params, 8, 64, 16)
  assert isinstance(state.cache, Cache)
  return answers(target, drafter), parts({"target": state.cache, "drafter": state.draft})


def differences(target, ours, theirs):
  """Answers that are not those of one device, by the margin rule."""
  tolerance = identity.rounding_tolerance(target, tiny.prompts(4, seed=5), 3)
  return [identity.divergence(target, prompt, b, a, 64, tolerance)
          for prompt, a, b in zip(tiny.prompts(10), ours, theirs, strict=True) if a != b]


# Checkpoints.


def checkpoints(one, folder):
  """States that went from one layout to another: whether every bit came along, and where to."""
  found = {}
  states = {}
  for name, sizes in {"one": None, "two": (1, 2, 1), "eight": (2, 2, 2)}.items():
    mesh = None if sizes is None else sharding.make_mesh(*sizes)
    target = spec_jax.load_target(str(folder / "target"), mesh=mesh)
    _, state = train.make_setup(config(), target, drafters.init_from_target(target, (0,)), 20)
    states[name] = jax.tree.map(lambda x: x + 1, state)
  for source, goal in (("two", "one"), ("one", "eight")):
    with Checkpoints(folder / f"{source}-{goal}") as saved:
      saved.save(1, states[source], {})
      saved.wait()
      blank = jax.tree.map(lambda x: x * 0, states[goal])
      back = saved.restore(blank).state
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), back, states[source])
    places = jax.tree.map(
        lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), back, blank)
    found[f"{source}-{goal}"] = {
        "same": all(jax.tree.leaves(same)), "placed": all(jax.tree.leaves(places)),
        "parts": parts(back)}
  return found


class Stopped(Exception):
  """Ends a run in the middle."""


class Stopping(Packer):
  """A packer whose run ends in front of step 3."""

  def batch(self, step):
    if step == 3:
      raise Stopped
    return super().batch(step)


def resumed(folder):
  """A run that begins on one device and ends on eight, beside one that stays on one."""
  docs = documents(14, target=tiny.target())
  real = train.train_step

  def fit(where, sizes, kind=Packer):
    devices = set()

    def step(*args):
      state, sums = real(*args)
      devices.update(len(x.sharding.device_set) for x in jax.tree.leaves((state, sums)))
      return state, sums

    cfg = make_config(batch_rows=8, steps=5, eval_every=2)
    mesh = None if sizes is None else sharding.make_mesh(*sizes)
    target = spec_jax.load_target(str(folder / "target"), mesh=mesh)
    (folder / where).mkdir(exist_ok=True)
    with contextlib.suppress(Stopped), contextlib.redirect_stdout(io.StringIO()), \
        mock.patch.object(train, "train_step", step):
      train.fit(cfg, target, drafters.init_from_target(target, (0,)), pack(docs[3:], cfg, kind),
                pack(docs[:3], cfg).in_order(), folder / where, 0.0)
    rows = [json.loads(x) for x in (folder / where / "metrics.jsonl").read_text().splitlines()]
    taken = [[r["step"], r["loss"], r["alpha"]] for r in rows if r["split"] == "train"]
    return {"rows": taken, "devices": sorted(devices)}

  straight = fit("straight", None)
  begun = fit("moved", None, Stopping)
  return {"straight": straight, "begun": begun, "moved": fit("moved", (2, 2, 2))}


if __name__ == "__main__":
  main(Path(sys.argv[1]))
