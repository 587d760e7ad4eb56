"""Eight simulated devices compute what one computes, and really hold parts (layouts.py does it)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
MESHES = {"data": (8, 1, 1), "fsdp": (2, 4, 1), "all": (2, 2, 2)}
# Fast to compile: the programs are tiny, and each runs a few times.
FLAGS = ("--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
         "--xla_llvm_disable_expensive_passes=true")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
  """Arrays and facts of one process with eight devices."""
  folder = tmp_path_factory.mktemp("layouts")
  child = subprocess.run(
      [sys.executable, "-W", "error", "-m", "tests.multidevice.layouts", str(folder)], cwd=ROOT,
      env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS,
           "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05"},
      capture_output=True, text=True, timeout=900)
  assert child.returncode == 0, child.stderr[-4000:]
  with np.load(folder / "arrays.npz") as arrays:
    return dict(arrays), json.loads((folder / "facts.json").read_text())


def of(arrays, layout):
  return {key.partition("/")[2]: value for key, value in arrays.items()
          if key.startswith(f"{layout}/")}


@pytest.mark.parametrize("layout", MESHES)
def test_logits_loss_and_gradients_are_those_of_one_device(done, layout):
  one, ours = of(done[0], "one"), of(done[0], layout)
  assert sum(name.startswith("gradient") for name in ours) >= 10
  for name, value in ours.items():
    largest = np.abs(one[name]).max()
    assert largest > 1e-3, name  # nothing is compared with zeros
    np.testing.assert_allclose(value, one[name], rtol=0, atol=1e-5 * max(1, largest), err_msg=name)


@pytest.mark.parametrize("layout", MESHES)
def test_tokens_are_those_of_one_device(done, layout):
  """Greedy, ten prompts through eight places; a difference must be a matter of rounding."""
  facts = done[1]
  lengths = [len(tokens) for tokens in facts["answers"]]
  assert lengths.count(16) > 5 and min(lengths) < 16  # some came upon the stop string
  found = facts[layout]["differences"] + facts[layout].get("expert differences", [])
  assert all(d["within_tolerance"] for d in found), found


def test_int8_matrices_are_divided_and_their_scales_as_their_rows(done):
  """The same model; what differs is the order of summation behind bfloat16 products."""
  one, ours = (done[0][f"int8w/{name}"] for name in ("one", "all"))
  np.testing.assert_allclose(ours, one, rtol=0, atol=2.0**-6 * np.abs(one).max())
  found = {path: part for path, part in done[1]["all"]["int8w"].items()
           if "'wk'" in path or "'experts_down'" in path}
  assert [part[:2] for path, part in found.items() if path.endswith(".values")] == [
      [[6, 32, 10], [6, 16, 5]], [[16, 32], [8, 16]]] * 2
  assert [part[:2] for path, part in found.items() if path.endswith(".scale")] == [
      [[6, 32], [6, 16]], [[16], [8]]] * 2


@pytest.mark.parametrize("layout", MESHES)
def test_devices_hold_parts_of_every_matrix(done, layout):
  """A part is [whole shape, its shape, how many different ones, devices]."""
  data, fsdp, tensor = MESHES[layout]
  target, state = done[1][layout]["target"], done[1][layout]["state"]
  of = lambda tree, name: [part for path, part in tree.items() if f"'{name}'" in path]
  cut = lambda *shape: [[*shape], [shape[0] // tensor, shape[1] // fsdp], fsdp * tensor, 8]
  assert of(target, "embed") == of(target, "head") == [cut(64, 32)]
  assert of(target, "wk") == [cut(16, 32)] * 2
  # Parameters of the drafter and both moments of the optimizer.
  assert of(state, "wq") == [cut(32, 32)] * 3 and of(state, "w_up") == [cut(48, 32)] * 3
  assert of(state, "w_down") == [
      [[32, 48], [32 // fsdp, 48 // tensor], fsdp * tensor, 8]] * 3
  for tree in (target, state):
    for path, (whole, part, _, devices) in tree.items():
      divided = np.prod(whole) // np.prod(part) == fsdp * tensor
      assert devices == 8 and divided == (len(whole) > 1 or fsdp * tensor == 1), path
  # Rows of keys and values over data and fsdp, their heads over tensor.
  for whole, part, count, _ in done[1][layout]["cache"].values():
    assert whole == [8, 2, 64, 8] and count == 8
    assert part == [8 // data // fsdp, 2 // tensor, 64, 8]


def test_experts_are_divided_inside(done):
  experts = done[1]["all"]["experts"]
  found = {name: part for path, part in experts.items()
           for name in ("experts_up", "experts_down", "router") if f"[0]['{name}']" in path}
  assert found == {
      "experts_up": [[6, 10, 32], [6, 5, 16], 4, 8],
      "experts_down": [[6, 32, 10], [6, 16, 5], 4, 8], "router": [[6, 32], [6, 16], 2, 8]}


@pytest.mark.parametrize("layout", MESHES)
def test_a_step_leaves_the_state_where_it_was(done, layout):
  """Donated buffers are used again, and a second step compiles nothing."""
  facts = done[1][layout]
  assert facts["kept"] and facts["donated"] and facts["compilations"] == 1


def test_weights_travel_and_not_activations(done):
  """What is cut along the hidden size is put together where it is used (the two of SwiGLU)."""
  assert done[1]["fsdp"]["gathers"] >= 2 and done[1]["data"]["gathers"] == 0


def test_checkpoints_move_between_layouts(done):
  for name, found in done[1]["checkpoints"].items():
    assert found["same"] and found["placed"], name
  wq = [part for path, part in done[1]["checkpoints"]["one-eight"]["parts"].items()
        if "'wq'" in path]
  assert wq == [[[32, 32], [16, 16], 4, 8]] * 3


def test_a_run_goes_on_with_another_layout(done):
  """Two steps on one device, killed, three on eight: the numbers are those of one device."""
  runs = [done[1]["fit"][name] for name in ("straight", "begun", "moved")]
  assert [run["devices"] for run in runs] == [[1], [1], [8]]
  straight, begun, moved = (run["rows"] for run in runs)
  assert [row[0] for row in straight] == [row[0] for row in moved] == [1, 2, 3, 4, 5]
  assert begun[:2] == straight[:2] == moved[:2]
  np.testing.assert_allclose(moved, straight, rtol=1e-5)
