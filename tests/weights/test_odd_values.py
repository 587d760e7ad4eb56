"""Whatever stands in a field of a folder's config.json: it is read, or refused in one line.

Values that nobody means, in every field of every published form and of every family, each file
changed in one place. What is refused and by which words is in the tests of the forms; here nothing
else than a UserError may come out.
"""

import itertools
import json

import pytest

from spec_jax.errors import UserError
from spec_jax.weights import open_checkpoint, published
from spec_jax.weights.safetensors import write_folder
from tests import families, tiny
from tests.weights import test_outside as outside
from tests.weights.test_published import target

ODD = ["x", [], {}, [[]], True, -1, 0, 2.5, 1e308, float("nan"), None, "1", [1], {"type": "yarn"}]


def places(value, at=()):
  """Where each field of nested objects stands."""
  if isinstance(value, dict):
    for name, entry in value.items():
      yield (*at, name)
      yield from places(entry, (*at, name))


def changed(text, place, value):
  """The JSON with another value in one place."""
  out = json.loads(text)
  *path, last = place
  where = out
  for name in path:
    where = where[name]
  where[last] = value
  return json.dumps(out)


def refused_or_read(folder, read):
  """How many of the changed files are refused, and how many of them there are."""
  file = folder / "config.json"
  text = file.read_text()
  read()  # as it is
  refused = count = 0
  for place, value in itertools.product(places(json.loads(text)), ODD):
    file.write_text(changed(text, place, value))
    count += 1
    try:
      read()
    except UserError as error:
      refused += 1
      assert "\n" not in str(error) and folder.name in str(error), (place, value)
    except Exception as error:
      raise AssertionError(f"{'.'.join(place)}={value!r}: {error!r}") from error
  return refused, count


@pytest.mark.parametrize("writer", outside.FOLDERS)
def test_a_published_drafter(tmp_path, writer):
  folder = writer(tmp_path / "the-drafter")
  refused, count = refused_or_read(folder, lambda: published.read_published(folder, target()))
  assert refused > count / 3 > 50


@pytest.mark.parametrize("family", [*families.CHANGES, "llama"])
def test_a_model(tmp_path, family):
  folder = tmp_path / "the-model"
  changes = families.CHANGES.get(family, {})
  config = tiny.config(**changes | {"bos_id": 0, "eos_ids": (2,), "pad_id": 0})
  write_folder(folder, config, families.tensors(config), tiny.tokenizer())
  refused, count = refused_or_read(folder, lambda: open_checkpoint(str(folder)))
  assert refused > count / 3 > 50
