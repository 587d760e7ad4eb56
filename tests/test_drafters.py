"""The drafters: what n-gram lookup proposes, reduced vocabularies, saving, loading, refusals."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax
from spec_jax import drafters, sampling
from spec_jax.drafters.ngram import NGram
from spec_jax.errors import UserError
from spec_jax.models.config import RopeScaling
from spec_jax.models.decoder import Decoder
from spec_jax.sampling import Sampling
from spec_jax.target import from_module
from spec_jax.types import Context
from spec_jax.weights.safetensors import write_folder
from tests import tiny
from tests.weights import toy


def context(rows, temperature=0.0, capacity=40, fill=63):
  """Committed rows; what lies behind them must not be read, so it is filled with an id."""
  tokens = np.full((len(rows), capacity), fill, np.int32)
  for b, row in enumerate(rows):
    tokens[b, :len(row)] = row
  length = jnp.asarray([len(r) for r in rows], jnp.int32)
  keys = sampling.round_keys(sampling.row_keys(0, jnp.arange(len(rows))), length)
  return Context(
      jnp.asarray(tokens), length, keys, jnp.full(len(rows), temperature, jnp.float32))


# ngram.


def lookup(rows, draft_len=4, n_max=3, n_min=1):
  proposal, _ = NGram(n_max, n_min).propose((), context(rows), draft_len, None, None)
  assert proposal.probs is None
  return proposal.tokens.tolist()


def reference(row, draft_len, n_max, n_min):
  """The rule in plain Python."""
  for n in range(n_max, n_min - 1, -1):
    if len(row) <= n:
      continue
    for i in range(len(row) - n - 1, -1, -1):
      if row[i:i + n] == row[-n:]:
        start = i + n
        period = len(row) - start
        return [row[start + j % period] for j in range(draft_len)]
  return [row[-1]] * draft_len


@pytest.mark.parametrize("row,expected", [
    # The longest suffix decides, although a shorter one occurred later.
    ([1, 2, 3, 50, 51, 52, 53, 3, 9, 1, 2, 3], [50, 51, 52, 53]),
    # Of two occurrences the last.
    ([7, 8, 20, 21, 7, 8, 30, 31, 32, 33, 7, 8], [30, 31, 32, 33]),
    # The continuation runs into the end of the text: it goes on periodically.
    ([4, 5, 6, 5, 6], [5, 6, 5, 6]),
    ([9, 9], [9, 9, 9, 9]),
    ([1, 2, 5, 1, 2], [5, 1, 2, 5]),
    # No match, and a text of one token: the last token again.
    ([1, 2, 3], [3, 3, 3, 3]),
    ([6], [6, 6, 6, 6]),
])
def test_ngram(row, expected):
  assert lookup([row]) == [expected] == [reference(row, 4, 3, 1)]


def test_ngram_rows_do_not_see_each_other_nor_what_lies_behind_the_text():
  rows = [[1, 2, 9, 1, 2], [63, 5, 63], [1, 2, 8, 8, 1, 2], [3]]
  assert lookup(rows) == [reference(r, 4, 3, 1) for r in rows]
  # A match in the padding or in the row above would change these.
  assert lookup(rows)[1] == [5, 63, 5, 63]


@pytest.mark.parametrize("n_max,n_min", [(3, 1), (4, 2), (1, 1)])
def test_ngram_against_plain_python(n_max, n_min):
  rng = np.random.default_rng(n_max)
  rows = [rng.integers(0, 3, rng.integers(1, 40)).tolist() for _ in range(200)]
  assert lookup(rows, 6, n_max, n_min) == [reference(r, 6, n_max, n_min) for r in rows]


def test_ngram_by_name():
  module = drafters.load_drafter("ngram:5-2", tiny.target()).module
  assert (module.n_max, module.n_min) == (5, 2)
  assert drafters.load_drafter("ngram", tiny.target()).module.n_max == 3
  for bad, said in [("ngram:3", "write ngram:MAX-MIN"), ("ngram:1-3", "1 <= MIN <= MAX"),
                    ("ngrams", "write ngram:MAX-MIN"), ("lookup:3-1", "write ngram:MAX-MIN")]:
    with pytest.raises(UserError, match=said):
      drafters.parse_ngram(bad)


# small_lm.


def propose(module, rows, draft_len=4, temperature=0.0):
  """One proposal after a prefill of all but the last token."""
  target = tiny.target().module
  where = context(rows, temperature, fill=0)
  length = max(len(r) for r in rows) - 1
  places = jnp.broadcast_to(jnp.arange(length), (len(rows), length))

  @jax.jit
  def run(where):
    state = module.init_state(len(rows), 40)
    state = module.observe(state, where.tokens[:, :length], None, places, places >= 0, target)
    return module.propose(state, where, draft_len, Sampling(temperature == 0), target)[0]

  return run(where)


def law(module, ids, temperature=1.0):
  """The drafter's distribution after each of the ids, by one pass over all of them."""
  target = tiny.target().module
  padded = jnp.asarray([[*ids, *[0] * (24 - len(ids))]])  # one shape for all lengths

  @jax.jit
  def run(ids):
    hidden = module.train_hidden(ids, jnp.arange(24)[None], None, target)
    return jax.nn.softmax(hidden[0] @ module.head_weight(target).T / temperature)

  return np.asarray(run(padded))[:len(ids)]


def test_drafts_are_the_greedy_text_of_the_drafter():
  module = tiny.weak_drafter().module
  row = tiny.prompts(1)[0]
  drafted = propose(module, [row]).tokens[0].tolist()
  ids = [*row, *drafted]
  assert drafted == law(module, ids)[len(row) - 1:-1].argmax(1).tolist()


def test_probs_are_those_the_drafts_were_drawn_from():
  module = tiny.weak_drafter().module
  rows = tiny.prompts(3)
  proposal = propose(module, rows, temperature=1.3)
  u = sampling.uniforms(context(rows).keys, sampling.DRAFT, 4)
  np.testing.assert_array_equal(sampling.draw(proposal.probs, u), proposal.tokens)
  np.testing.assert_allclose(proposal.probs.sum(-1), 1, atol=1e-5)
  # The q of place j is the drafter's law after the drafts before it.
  ids = [*rows[0], *proposal.tokens[0].tolist()]
  np.testing.assert_allclose(
      proposal.probs[0], law(module, ids, 1.3)[len(rows[0]) - 1:-1], atol=1e-4)


REDUCED = np.array([40, 3, 17, 22, 9, 61, 5, 33], np.int32)


def test_reduced_vocabulary():
  full = drafters.init_from_target(tiny.target(), (0,))
  module = drafters.init_from_target(tiny.target(), (0,), draft_ids=REDUCED)
  rows = tiny.prompts(6)
  assert set(np.asarray(propose(module, rows).tokens).ravel().tolist()) <= set(REDUCED.tolist())
  proposal = propose(module, rows, temperature=1.0)
  assert proposal.probs.shape == (6, 4, tiny.VOCAB)
  outside = np.setdiff1d(np.arange(tiny.VOCAB), REDUCED)
  assert (np.asarray(proposal.probs)[..., outside] == 0).all()
  drawn = np.take_along_axis(
      np.asarray(proposal.probs), np.asarray(proposal.tokens)[..., None], -1)
  assert (drawn > 0).all()
  # The first place: the law over all ids, restricted and renormalised.
  whole = np.asarray(propose(full, rows, temperature=1.0).probs)[:, 0, REDUCED]
  np.testing.assert_allclose(
      proposal.probs[:, 0, REDUCED], whole / whole.sum(-1, keepdims=True), atol=1e-5)


def test_a_reduced_vocabulary_changes_no_output():
  module = drafters.init_from_target(tiny.target(), (0,), draft_ids=REDUCED)
  drafter = drafters.wrap("small_lm", "reduced", module)
  options = dict(max_new_tokens=16, batch_size=4)
  prompts = tiny.prompts(8)
  out = spec_jax.generate(tiny.target(), drafter, prompts, **options)
  assert out.tokens == spec_jax.generate(tiny.target(), None, prompts, **options).tokens
  warm = spec_jax.generate(tiny.target(), drafter, prompts, temperature=1.0, **options)
  assert set(sum(warm.tokens, [])) - set(REDUCED.tolist())  # the target gives the other ids


@pytest.mark.parametrize("layers,named", [((), r"\(\)"), ((2,), r"\(2,\)"), ((-1,), r"\(-1,\)")])
def test_init_layers_are_checked(layers, named):
  with pytest.raises(UserError, match=f"init_layers={named} must name layers 0..1"):
    drafters.init_from_target(tiny.target(), layers)


# Saving and loading.


@pytest.fixture
def saved(tmp_path):
  module = drafters.init_from_target(tiny.target(), (1, 0))
  drafters.save_drafter(tmp_path / "d", module, tiny.target(), step=7)
  return tmp_path / "d"


@pytest.mark.parametrize("draft_ids", [None, REDUCED])
def test_save_and_load(tmp_path, draft_ids):
  module = drafters.init_from_target(tiny.target(), (1,), draft_ids=draft_ids)
  drafters.save_drafter(tmp_path / "d", module, tiny.target(), step=7)
  again = drafters.load_drafter(str(tmp_path / "d"), tiny.target())
  assert json.loads((tmp_path / "d" / "drafter.json").read_text())["step"] == 7
  assert again.module.config == module.config
  rows = tiny.prompts(4)
  for temperature in (0.0, 1.0):
    a, b = (propose(m, rows, temperature=temperature) for m in (module, again.module))
    np.testing.assert_array_equal(a.tokens, b.tokens)
    if temperature:
      np.testing.assert_array_equal(a.probs, b.probs)


def test_rope_settings_survive(tmp_path):
  # CASE 13, in the drafter's own folder.
  scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
  cfg = tiny.config(rope_scaling=scaling, partial_rotary_factor=0.25, rope_theta=777.0)
  target = tiny.make(cfg, tiny.tensors(cfg), tiny.tokenizer())
  module = drafters.init_from_target(target, (0,))
  drafters.save_drafter(tmp_path / "d", module, target)
  again = drafters.load_drafter(str(tmp_path / "d"), target).module
  assert again.config.rope_scaling == scaling
  assert again.stack.inverse_frequencies == module.stack.inverse_frequencies
  assert again.stack.inverse_frequencies == target.module.stack.inverse_frequencies


def test_the_rope_table_of_a_gguf_target_reaches_its_drafters(tmp_path):
  # Such a table stands in no config field: dropped, the drafter would see other positions.
  cfg, table = toy.config(), np.array([1.0, 1.5, 4.0, 8.0], np.float32)
  values = toy.tensors(cfg)
  path = toy.write_gguf(tmp_path / "m.gguf", cfg, values, extra={"rope_freqs.weight": table})
  target = spec_jax.load_target(str(path))
  expected = target.module.stack.inverse_frequencies
  plain = from_module(Decoder(cfg, lambda n: jnp.asarray(values[n]))).module.stack
  assert expected != plain.inverse_frequencies
  module = drafters.init_from_target(target, (0,))
  drafters.save_drafter(tmp_path / "d", module, target)
  for drafter in (module, drafters.load_drafter("self", target).module,
                  drafters.load_drafter(str(tmp_path / "d"), target).module,
                  drafters.load_drafter(str(path), target).module):
    assert drafter.stack.inverse_frequencies == expected


def test_a_plain_llama_folder_is_a_drafter(tmp_path):
  cfg = tiny.config(num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1)
  write_folder(tmp_path / "m", cfg, tiny.tensors(cfg, 3), tiny.tokenizer())
  drafter = drafters.load_drafter(str(tmp_path / "m"), tiny.target())
  prompts = tiny.prompts(4)
  out = spec_jax.generate(tiny.target(), drafter, prompts, max_new_tokens=16, batch_size=4)
  plain = spec_jax.generate(tiny.target(), None, prompts, max_new_tokens=16, batch_size=4)
  assert out.tokens == plain.tokens


# Refusals: one line that names what is wrong.


def refused(source, message, target=None):
  with pytest.raises(UserError, match=message) as caught:
    drafters.load_drafter(str(source), target or tiny.target())
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name,message", [
    ("ngramm", "drafter='ngramm': no such folder"), ("eagle9", "drafter='eagle9': no such folder"),
    ("no/such/folder", "drafter='no/such/folder': no such folder"),
    ("~no.such.user/x", "drafter='~no.such.user/x': no such folder"),
    ("ngram:3", "ngram:MAX-MIN"), ("ngram:a-b", "ngram:MAX-MIN"),
    ("ngram:1-3", "1 <= MIN <= MAX"), ("ngram:2-0", "1 <= MIN <= MAX")])
def test_unknown_names(name, message):
  refused(name, message)


def test_dtypes(monkeypatch, saved):
  with pytest.raises(UserError, match="dtype='float16' must be one of float32, bfloat16"):
    drafters.load_drafter("self", tiny.target(), "float16")
  with pytest.raises(UserError, match="'self' has the target's dtype float32, not bfloat16"):
    drafters.load_drafter("self", tiny.target(), "bfloat16")


def test_a_home_folder_may_be_written_short(monkeypatch, saved):
  monkeypatch.setenv("HOME", str(saved.parent))
  assert drafters.load_drafter(f"~/{saved.name}", tiny.target()).name


def test_the_work_folder_of_a_run_will_do(saved, tmp_path):
  (tmp_path / "run" / "train").mkdir(parents=True)
  saved.rename(tmp_path / "run" / "train" / "drafter")
  for folder in (tmp_path / "run", tmp_path / "run" / "train"):
    loaded = drafters.load_drafter(str(folder), tiny.target())
    assert loaded.name == str(tmp_path / "run" / "train" / "drafter")


def test_a_work_folder_before_its_training_has_ended_says_so(tmp_path):
  (tmp_path / "prompts").mkdir()
  (tmp_path / "prompts" / "manifest.json").write_text("{}")
  (tmp_path / "config.json").write_text("{}")
  refused(tmp_path, "a work folder without a trained drafter")


def test_another_tokenizer(saved, tmp_path):
  letters = tiny.tokenizer().token_strings()
  letters[10], letters[11] = letters[11], letters[10]
  other = dataclasses.replace(tiny.target(), tokenizer=toy.tokenizer(tokens=letters))
  refused(saved, "id 10 is .* in the drafter and .* in the target", other)  # CASE 10b
  for damaged in (b"[", b"null", b"\xff"):
    (saved / "vocabulary.json").write_bytes(damaged)
    refused(saved, "another tokenizer", other)
  (saved / "vocabulary.json").unlink()
  refused(saved, "another tokenizer", other)
  cfg = tiny.config(num_layers=1)
  write_folder(tmp_path / "m", cfg, tiny.tensors(cfg), tiny.tokenizer())
  refused(tmp_path / "m", "id 10 is", other)  # CASE 10b


def test_another_target(saved):
  facts = json.loads((saved / "drafter.json").read_text())
  (saved / "drafter.json").write_text(json.dumps(facts | {"target_weight_hash": "0" * 64}))
  refused(saved, "whose weights differ from memory's")


def test_damaged_folders(saved):
  facts = json.loads((saved / "drafter.json").read_text())
  write = lambda **changes: (saved / "drafter.json").write_text(json.dumps(facts | changes))
  write(kind="eagle9")
  refused(saved, "kind 'eagle9' is not supported")
  write(config={**facts["config"], "num_layers": 3})
  refused(saved, "drafter tensor layers.2.attn_norm is missing")
  write(config={**facts["config"], "intermediate_size": 40})
  refused(saved, r"w_gate has shape \(48, 32\), not \(40, 32\)")
  write(config={**facts["config"], "colour": 1})
  refused(saved, "drafter.json: field config.colour=1 is not known")
  (saved / "drafter.json").write_text(json.dumps({k: facts[k] for k in facts if k != "config"}))
  refused(saved, "drafter.json: has no field 'config'")
  (saved / "drafter.json").write_text("{")
  refused(saved, "drafter.json cannot be read")
  write()
  (saved / "drafter.safetensors").write_bytes(b"nothing")
  refused(saved, "drafter.safetensors cannot be read")
  (saved / "drafter.safetensors").unlink()
  refused(saved, "drafter.safetensors cannot be read")
