"""The algebra of sweeps, names of runs, and the overlay onto a config."""

import dataclasses
import re

import pytest

from launch import grid
from spec_jax.errors import UserError
from train_drafter import config, config_file

FIELDS = [name for name, group in config_file.fields(config.Config()) if not group]


def test_product_zip_and_chain():
  a, b = grid.axis("a", 1, 2), grid.axis("b", "x", "y")
  assert grid.product(a, b) == [
    {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}]
  assert grid.zip_(a, b) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
  assert grid.chain(a, b) == [{"a": 1}, {"a": 2}, {"b": "x"}, {"b": "y"}]
  assert grid.product() == [{}] and grid.product(a) == a and grid.zip_() == []
  assert grid.product(a, []) == []


def test_laws_of_the_algebra():
  a, b, c = grid.axis("a", 1, 2), grid.axis("b", 3), grid.axis("c", 4, 5, 6)
  assert grid.product(grid.product(a, b), c) == grid.product(a, grid.product(b, c))
  assert grid.product(grid.chain(a, grid.axis("a", 9)), c) == grid.chain(
    grid.product(a, c), grid.product(grid.axis("a", 9), c))


def test_what_does_not_fit_together_is_refused():
  with pytest.raises(UserError, match="zip_: the grids have 2, 3 cells"):
    grid.zip_(grid.axis("a", 1, 2), grid.axis("b", 1, 2, 3))
  with pytest.raises(UserError, match="a is set twice in one cell: 1 and 3"):
    grid.product(grid.axis("a", 1), grid.axis("a", 3))
  size = grid.named("size", small={"a": 1})
  with pytest.raises(UserError, match="a is set twice"):
    grid.settings(grid.product(size, grid.axis("a", 3))[0])


def test_named_axes_filters_and_seeds():
  size = grid.named("size", small={"a": 1, "b": 2}, large={"a": 9, "b": 9})
  cells = grid.seeds(size, 2)
  assert [grid.settings(c) for c in cells] == [
    {"a": 1, "b": 2, "train.seed": 0}, {"a": 1, "b": 2, "train.seed": 1},
    {"a": 9, "b": 9, "train.seed": 0}, {"a": 9, "b": 9, "train.seed": 1}]
  assert grid.where(cells, lambda c: c["@size"] == "large" and c["train.seed"]) == [cells[3]]
  assert grid.where(cells, lambda c: c["a"] < 5) == cells[:2]
  assert [grid.run_name(c, FIELDS) for c in cells[:2]] == [
    "size=small,train.seed=0", "size=small,train.seed=1"]


@pytest.mark.parametrize("cell, name", [
  ({}, "base"),
  ({"train.loss": "lk_hybrid"}, "loss=lk_hybrid"),
  ({"train.loss": "ce", "train.lr": 3e-4}, "loss=ce,lr=0.0003"),
  ({"drafter.init_layers": (0, 29)}, "init_layers=0+29"),
  ({"generate.temperatures": (0.0, 0.7)}, "generate.temperatures=0+0.7"),  # evaluate has some too
  ({"prompts.mix": ()}, "mix=none"),
  ({"evaluate.same_shape": False}, "same_shape=false"),
  ({"train.steps": 5}, "train.steps=5"),  # drafter.steps is another field
])
def test_names(cell, name):
  assert grid.run_name(cell, FIELDS) == name


def test_names_are_safe_and_tell_values_apart():
  paths = ["/a/b c.jsonl", "/a/b-c.jsonl", "../x", "a\nb", "a,train.lr=1", "é",
           "x" * 300, "x" * 301]
  names = [grid.run_name({"prompts.path": path}, FIELDS) for path in paths]
  assert len(set(names)) == len(paths)
  for name in names:
    assert re.fullmatch(r"[A-Za-z0-9.,+=_-]{1,100}", name) and not name.startswith((".", "-"))
  # A name depends on its own cell alone.
  assert names == [grid.run_name({"prompts.path": path}, FIELDS) for path in paths]


def test_overlay_is_strict_and_keeps_the_declared_types():
  cfg = config.Config()
  config_file.overlay(cfg, {
    "train.lr": 1, "drafter.init_layers": [1, 2], "generate.temperatures": (0, 1),
    "train.loss": "ce"})
  assert cfg.train.lr == 1.0 and type(cfg.train.lr) is float
  assert cfg.drafter.init_layers == (1, 2) and cfg.train.loss == "ce"
  assert [type(t) for t in cfg.generate.temperatures] == [float, float]
  config.validate(cfg)
  before = dataclasses.asdict(cfg)
  for name, said in [("train.lrr", "train.lrr: no such field; the nearest is train.lr"),
                     ("lr", "the nearest is train.lr"), ("train", "train is a group of fields"),
                     ("train.lr.x", "no such field")]:
    with pytest.raises(UserError, match=said):
      config_file.overlay(cfg, {name: 1})
  assert dataclasses.asdict(cfg) == before
  config_file.overlay(cfg, {"train.steps": 1.5})  # of another type: validate names it
  with pytest.raises(UserError, match="train.steps=1.5 must be of type int"):
    config.validate(cfg)
