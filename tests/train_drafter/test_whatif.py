"""The roofline by hand, and the memory of modules against their arrays."""

import functools

import numpy as np
import pytest

from spec_jax import drafters
from tests import families, tiny
from tests.drafters import test_dflash
from train_drafter import whatif
from train_drafter.whatif import Model

CHIPS = {chip.name: chip for chip in whatif.ACCELERATORS}


def test_a_dense_model_of_31_gb_at_273_gb_per_second():
  model = Model(weight_bytes=31e9, flops_per_token=2 * 15.5e9)
  assert whatif.plain_ceiling(CHIPS["GB10"], model) == pytest.approx(8.8, abs=0.05)
  drafter = Model(weight_bytes=1e9, flops_per_token=1e9)
  # Five passes of 1/31 of the target's bytes, one of the target: 3.5 / (1 + 5/31) times as fast.
  fast = whatif.speculative_ceiling(CHIPS["GB10"], model, drafter, 3.5, 5, passes=5)
  assert fast == pytest.approx(273 / 31 * 3.5 / (36 / 31))
  # A block drafter reads its weights once.
  block = whatif.speculative_ceiling(CHIPS["GB10"], model, drafter, 3.5, 5, passes=1)
  assert block == pytest.approx(273 / 31 * 3.5 / (32 / 31))


def test_a_wide_batch_is_bound_by_arithmetic_and_speculation_stops_paying():
  model = Model(weight_bytes=16e9, flops_per_token=16e9)
  drafter = Model(weight_bytes=0.5e9, flops_per_token=0.5e9)
  chip = CHIPS["TPU v5e"]
  gain = [whatif.speculative_ceiling(chip, model, drafter, 3.0, 4, passes=4, rows=rows)
          / whatif.plain_ceiling(chip, model, rows) for rows in (1, 64, 1024)]
  assert gain[0] > 2.5 and gain[0] >= gain[1] > 1 > gain[2]
  assert whatif.pass_seconds(chip, model, 1024, 5) == 1024 * 5 * 16e9 / 197e12


def test_the_cache_is_read_too():
  model = Model(weight_bytes=8e9, flops_per_token=8e9, cache_bytes=1e5, attention_flops=1e5)
  assert whatif.pass_bytes(model, 4, 6, 20_000) == 8e9 + 4 * 20_000 * 1e5
  assert whatif.plain_ceiling(CHIPS["H100 SXM"], model, 1, 80_000) == pytest.approx(
      whatif.plain_ceiling(CHIPS["H100 SXM"], model) / 2)


def test_distinct_experts():
  assert whatif.distinct_experts(128, 8, 1) == 8
  assert whatif.distinct_experts(8, 2, 2) == 8 * (1 - 0.75**2)
  assert whatif.distinct_experts(8, 8, 3) == 8
  assert whatif.distinct_experts(64, 8, 10_000) == pytest.approx(64)
  draws = np.random.default_rng(0)
  seen = [len({e for _ in range(6) for e in draws.choice(64, 8, replace=False)})
          for _ in range(3000)]
  assert np.mean(seen) == pytest.approx(whatif.distinct_experts(64, 8, 6), abs=0.3)
  mixture = Model(weight_bytes=1e9, flops_per_token=1e9, expert_bytes=1e8, experts=64,
                  experts_per_token=8)
  assert whatif.pass_bytes(mixture, 1, 1, 0) == 1e9 + 8e8
  assert whatif.pass_bytes(mixture, 2, 3, 0) == 1e9 + 1e8 * whatif.distinct_experts(64, 8, 6)


@functools.cache
def pair(kind):
  if kind == "small_lm":
    return tiny.target(), tiny.weak_drafter()
  return test_dflash.target(), drafters.wrap(kind, kind, test_dflash.build(kind, reduced=True))


@pytest.mark.parametrize("kind", ["small_lm", "dflash"])
def test_memory_counts_the_arrays(kind):
  target, drafter = pair(kind)
  facts = whatif.memory(target, drafter)
  config = target.config
  layers = config.num_layers
  cache = 2 * layers * config.num_kv_heads * config.head_dim * 4
  assert facts["target"]["cache_bytes_per_token"] == cache
  assert facts["target"]["parameter_bytes"] == 4 * facts["target"]["parameters"]
  own = facts["drafter"]
  depth = drafter.module.config.num_layers
  assert own["cache_bytes_per_token"] == cache / layers * depth
  assert facts["features_bytes_per_token"] == 4 * len(drafter.module.taps) * 32
  assert facts["cache_tokens_displaced"] == own["parameter_bytes"] / cache
  if kind == "small_lm":  # its first layer and the final norm; the head is the target's
    layer = sum(v.size for n, v in tiny.tensors(config).items() if n.startswith("layers.0."))
    assert own["parameters"] == own["trained_parameters"] == layer + 32
    assert not own["head_is_own"] and own["head_parameters"] == tiny.VOCAB * 32
  else:
    assert own["head_is_own"] and own["head_parameters"] == len(test_dflash.REDUCED) * 32


def test_the_section_has_a_row_for_every_batch_and_context():
  target, drafter = pair("small_lm")
  facts = whatif.memory(target, drafter)
  made = whatif.section(facts, {1: 1.4, 3: 1.9})
  assert [c["name"] for c in made["accelerators"]] == [c.name for c in whatif.ACCELERATORS]
  for chip in made["accelerators"]:
    assert len(chip["rows"]) == len(whatif.BATCHES) * len(whatif.CONTEXTS)
    assert {r["draft_len"] for r in chip["rows"]} <= {1, 3}
    assert all(r["tokens_per_s"] == pytest.approx(r["speedup"] * r["plain_tokens_per_s"])
               for r in chip["rows"])
  read = facts["target"]["parameter_bytes"] - 4 * tiny.VOCAB * 32  # the embedding is looked up
  chip = made["accelerators"][0]
  assert chip["plain_tokens_per_s"] == pytest.approx(chip["bandwidth"] / read)
  empty = whatif.section(facts, {})["accelerators"][0]["rows"][0]
  assert empty["tokens_per_s"] is None and empty["plain_tokens_per_s"] > 0


FACTS = {
    "target": {"dtype": "bfloat16", "parameters": 1000, "parameter_bytes": 2000,
               "cache_bytes_per_token": 10.0, "head_parameters": 100, "embedding_parameters": 0,
               "attention_width": 1},
    "drafter": {"kind": "small_lm", "parameters": 100, "parameter_bytes": 200,
                "cache_bytes_per_token": 2.0, "head_parameters": 0, "head_bytes": 0,
                "head_is_own": True, "attention_width": 1, "depth_passes": "each"},
}


def test_a_31_gb_dense_model_on_every_accelerator():
  """A tenth of the weights in the drafter, K = 5, tau 3: a round reads 1.5 times the weights."""
  dense = whatif.dense_example(FACTS, {1: 1.2, 5: 3.0})
  assert dense["weight_bytes"] == 31e9 and dense["drafter_share"] == pytest.approx(0.1)
  rows = {row["name"]: row for row in dense["rows"]}
  own = rows["GB10"]
  assert own["plain_tokens_per_s"] == pytest.approx(8.8, abs=0.05)
  assert (own["draft_len"], own["tau"], own["fits"]) == (5, 3.0, True)
  assert own["tokens_per_s"] == own["tau_3"] == pytest.approx(273 / 31 * 3.0 / 1.5)
  assert own["tau_2"] == pytest.approx(273 / 31 * 2.0 / 1.5)
  assert not rows["TPU v5e"]["fits"] and not rows["TPU v6e"]["fits"] and rows["TPU v5p"]["fits"]
  # A block of one draft gives two tokens at most: tau 2, 3 and 4 take 2, 3 and 4 drafts.
  short = {r["name"]: r for r in whatif.dense_example(FACTS, {1: 1.2, 5: 1.3})["rows"]}["GB10"]
  assert short["draft_len"] == 1 and short["tokens_per_s"] == pytest.approx(273 / 31 * 1.2 / 1.1)
  for tau in (2, 3, 4):
    assert short[f"tau_{tau}"] == pytest.approx(273 / 31 * tau / (1 + 0.1 * tau))
  empty = whatif.dense_example(FACTS, {})["rows"][0]
  assert empty["tokens_per_s"] is None and "tau_2" not in empty


def test_what_the_drafter_takes_away_from_the_cache():
  assert whatif.cache_room(FACTS, 3400) == {
      "cache_tokens": 140.0, "cache_tokens_with_drafter": 100.0}
  assert whatif.cache_room(FACTS, 2100) == {
      "cache_tokens": 10.0, "cache_tokens_with_drafter": None}


def test_a_mixture_reads_the_experts_that_its_tokens_use():
  """Four experts of 200 parameters, one for each token: 200 dense ones remain."""
  mixture = FACTS | {"target": FACTS["target"] | {
      "experts": 4, "experts_per_token": 1, "expert_parameters": 200}}
  model, _ = whatif.models(mixture)
  assert (model.weight_bytes, model.flops_per_token) == (400, 2 * 400)
  assert whatif.pass_bytes(model, 1, 1, 0) == 400 + 400
  assert whatif.pass_bytes(model, 1, 2, 0) == pytest.approx(400 + 400 * 4 * (1 - 0.75**2))
  assert whatif.dense_example(mixture, {1: 1.2})["drafter_share"] == pytest.approx(0.1)
  first = whatif.section(mixture, {1: 1.2})["experts"][0]
  assert (first["name"], first["experts"]) == ("this target", 4)
  assert first["by_tokens"]["2"] == pytest.approx(4 * (1 - 0.75**2))


def test_memory_of_a_mixture_counts_its_experts():
  target = families.target("qwen3_moe")
  facts = whatif.memory(target, drafters.wrap(
      "small_lm", "d", drafters.init_from_target(target, (0,))))["target"]
  assert (facts["experts"], facts["experts_per_token"]) == (6, 2)
  own = sum(v.size for n, v in families.tensors(target.config).items() if ".experts_" in n)
  assert facts["expert_parameters"] == own / 6
