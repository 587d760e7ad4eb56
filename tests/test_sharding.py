"""The mesh and the table of logical axes, on one device (what eight compute: tests/multidevice)."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from spec_jax import drafters, sharding
from spec_jax.errors import UserError
from spec_jax.models.decoder import tensor_shapes
from tests import families, tiny
from tests.train_drafter.training import make_config, module_of
from train_drafter import placement, train
from train_drafter.config import Config

P = PartitionSpec


def mesh(data, fsdp, tensor):
  return AbstractMesh((data, fsdp, tensor), sharding.AXES)


@pytest.fixture
def said(monkeypatch, capsys):
  """What is printed, with nothing said before."""
  sharding._say.cache_clear()
  yield lambda: capsys.readouterr().out.splitlines()
  sharding._say.cache_clear()


@pytest.mark.parametrize("family", ["llama_yarn", *sorted(families.CHANGES)])
def test_every_matrix_of_every_family_is_in_the_table(family):
  """A new family whose tensors nobody placed would lie whole on every device, unnoticed."""
  for name, shape in tensor_shapes(families.config(family)).items():
    known = name.rpartition(".")[2] in sharding.PARAMETERS
    assert known == (not name.endswith("norm")), name
    if known:
      assert len(sharding.PARAMETERS[name.rpartition(".")[2]]) == len(shape)


def test_every_matrix_of_every_drafter_is_in_the_table():
  deep = tiny.make(tiny.config(num_layers=8), tiny.tensors(tiny.config(num_layers=8)))
  for kind in drafters.LEARNED:
    module = drafters.init_learned(kind, deep, (0,), num_taps=2, mask_id=5, rank=4)
    for name, value in drafters.own_tensors(module).items():
      known = name.rpartition(".")[2] in sharding.PARAMETERS
      assert known == (value.ndim > 1), name


def test_specs_by_name_and_path():
  shapes = {"embed": (64, 32), "layers.1.wo": (32, 32), "layers.0.wk": (16, 32),
            "layers.0.experts_down": (6, 32, 10), "final_norm": (32,)}
  of = lambda name: sharding.parameter_spec((name,), shapes[name], mesh(2, 2, 2), 8)
  assert {name: of(name) for name in shapes} == {
      "embed": P("tensor", "fsdp"), "layers.1.wo": P("fsdp", "tensor"),
      "layers.0.wk": P("tensor", "fsdp"), "layers.0.experts_down": P(None, "fsdp", "tensor"),
      "final_norm": P()}
  # The whole training state: an optimizer's moments lie as their parameter, scalars are whole.
  _, state = train.make_setup(make_config(), tiny.target(), module_of(), 20)
  found = {jax.tree_util.keystr(path): sharding.parameter_spec(path, x.shape, mesh(1, 4, 2), 8)
           for path, x in jax.tree_util.tree_leaves_with_path(state)}
  wq = [spec for path, spec in found.items() if "'wq'" in path]
  assert wq == [P("tensor", "fsdp")] * 3
  assert all(spec == P() for path, spec in found.items() if "norm" in path or "count" in path)


def test_axes_that_do_not_divide_stay_whole_and_are_named_once(said):
  layout = mesh(2, 4, 4)
  for _ in range(2):  # two key/value heads of eight elements: 16 would divide, a head would not
    assert sharding.parameter_spec(("wk",), (16, 32), layout, 8) == P(None, "fsdp")
    assert sharding.parameter_spec(("wq",), (32, 32), layout, 8) == P("tensor", "fsdp")
  assert said() == ["mesh: kv_heads=2 cannot be divided over tensor=4: whole on every device"]
  assert sharding.spec(("batch",), (8,), layout) == P(("data", "fsdp"))
  assert sharding.spec(("batch",), (6,), layout) == P("data")
  assert sharding.spec(("batch",), (5,), layout) == P()
  assert said() == [
      "mesh: batch=6 cannot be divided over data=2 * fsdp=4: divided over data=2 alone",
      "mesh: batch=5 cannot be divided over data=2 * fsdp=4: whole on every device"]
  assert sharding.padded_rows(9, layout) == 16 and sharding.padded_rows(9, None) == 9


@pytest.mark.parametrize(("sizes", "message"), [
    ((2, 1, 1), "needs 2 devices, and there are 1"),
    ((1, 2, 3), "needs 6 devices"),
    ((-1, 2, 1), "fsdp . tensor = 2 does not divide the 1 devices"),
    ((1, 0, 1), "sizes must be at least 1"),
    ((-2, 1, 1), "sizes must be at least 1")])
def test_a_mesh_that_does_not_fit_names_its_sizes(sizes, message):
  with pytest.raises(UserError, match=message) as error:
    sharding.make_mesh(*sizes, devices=jax.devices()[:1])
  assert str(error.value).startswith("mesh.data={}, mesh.fsdp={}, mesh.tensor={}".format(*sizes))


def test_the_mesh_of_a_flag():
  assert sharding.parse_mesh("") is None
  assert dict(sharding.parse_mesh("1,1,1").shape) == {"data": 1, "fsdp": 1, "tensor": 1}
  for text in ("2", "1,1,x", "1,1,1,1"):
    with pytest.raises(UserError, match="must be three sizes"):
      sharding.parse_mesh(text)


def test_tensor_stays_inside_a_slice():
  class Chip:
    platform = device_kind = "cpu"

    def __init__(self, i, per_slice):
      self.id, self.process_index, self.slice_index = i, i // 4, i // per_slice

  chips = [Chip(i, 4) for i in range(16)]
  for sizes, slices in (((4, 2, 2), 4), ((2, 4, 2), 4), ((1, 4, 4), 4), ((2, 2, 4), 4)):
    grid = sharding._grid(sizes, chips, "mesh")
    assert grid.shape == sizes and len({d.id for d in grid.flat}) == 16
    inside = [{d.slice_index for d in row} for row in grid.reshape(-1, sizes[2])]
    assert all(len(found) == 1 for found in inside)
    assert len({d.slice_index for d in grid[:, 0, 0]}) == min(sizes[0], slices)
  with pytest.raises(UserError, match="multiple of the 4 slices"):
    sharding._grid((2, 1, 8), chips, "mesh.data=2")
  one = sharding._grid((2, 1, 2), [Chip(i, 4) for i in range(4)], "mesh")
  assert [d.id for d in one.flat] == [0, 1, 2, 3]


def test_processes_all_take_part():
  class Device:
    def __init__(self, process):
      self.process_index = process

  with pytest.raises(UserError, match="takes 1 of 2 devices"):
    sharding.make_mesh(devices=[Device(0), Device(1)])


def test_one_device_is_no_mesh():
  """The default runs the programs that it ran before there was a mesh."""
  assert placement.mesh_of(Config()) is None
  assert tiny.target().mesh is None
  tree = {"wq": np.ones(3)}
  assert sharding.place(tree, None) is tree and sharding.place_rows(tree, None) is tree
  assert sharding.pin(tree, None) is tree and sharding.pin_chunks(tree, None) is tree
