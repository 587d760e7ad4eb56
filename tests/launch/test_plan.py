"""Cost on paper: the roofline by hand, orders that must hold, and measured rates."""

import dataclasses
import json

import pytest

from launch import accelerators, plan
from spec_jax.errors import UserError
from spec_jax.models.config import DecoderConfig
from train_drafter.config import KINDS

DEMO = DecoderConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30,
                     num_heads=9, num_kv_heads=3, head_dim=64)
V5P = accelerators.find("v5p")
JOB = plan.Job()


def test_parameters_of_published_shapes():
  """1.24, 8.03 and 70.6 billion, as their model cards have it."""
  for name, billions in [("1b", 1.236), ("8b", 8.030), ("70b", 70.554)]:
    target = plan.TARGETS[name]
    count = target.num_layers * plan.layer_parameters(target)
    count += target.vocab_size * target.hidden_size * (1 if target.tie_embeddings else 2)
    assert count == pytest.approx(billions * 1e9, rel=1e-3)


def test_a_roofline_by_hand():
  chip = accelerators.Accelerator(100.0, 10.0, 1.0, (0.5, 0.5))
  assert plan.seconds(chip, 2, flops=300, bytes_read=1) == 3.0
  assert plan.seconds(chip, 2, flops=3, bytes_read=100) == 10.0


def test_generation_by_hand():
  """One row on one chip is bound by reading the weights; many rows by arithmetic."""
  target = plan.TARGETS["8b"]
  chip = dataclasses.replace(V5P, efficiency=(1.0, 1.0))
  one = plan.plan(target, chip, 1, dataclasses.replace(JOB, rows=1, answer_tokens=8,
                                                       prompt_tokens=1))
  assert one.generate == pytest.approx(2765e9 / 16.06e9, rel=0.01)
  # Caches of 256 rows keep this chip waiting for its memory; one with more of it computes.
  chip = dataclasses.replace(chip, bandwidth=2 * chip.bandwidth)
  many = plan.plan(target, chip, 1, dataclasses.replace(JOB, rows=256, prompt_tokens=1))
  flops = 2 * 8.03e9 - 2 * 128256 * 4096 + 2 * 32 * 32 * 128 * 513 * (1 + 1 / 512)
  assert many.generate == pytest.approx(459e12 / flops, rel=0.01)


def test_chips_share_what_does_not_fit_on_one():
  big, small = plan.TARGETS["70b"], plan.TARGETS["8b"]
  assert plan.plan(big, V5P, 8, JOB).group == 4 and plan.plan(small, V5P, 8, JOB).group == 1
  assert plan.plan(big, V5P, 8, JOB).weights == pytest.approx(141.1e9 / 4, rel=0.01)
  with pytest.raises(UserError, match="--chips=1: the target needs 141.1 GB, the chips have 95 GB"):
    plan.plan(big, V5P, 1, JOB)
  twice = plan.plan(small, V5P, 16, JOB)
  assert twice.generate == pytest.approx(2 * plan.plan(small, V5P, 8, JOB).generate)
  assert not plan.plan(small, accelerators.find("v5e"), 8, dataclasses.replace(JOB, rows=256)).fits


SMALL = DecoderConfig(vocab_size=1000, hidden_size=64, intermediate_size=128, num_layers=4,
                      num_heads=4, num_kv_heads=2, head_dim=16)
SMALL_JOB = plan.Job(
  prompts=1000, prompt_tokens=24, answer_tokens=8, rows=4, steps=10, batch_rows=2, seq_len=64,
  kind="small_lm", layers=2, draft_vocab=500, draft_len=3, tau=2.0)


def test_every_stage_by_hand():
  """Sizes small enough for paper: a layer has 64 * 16 * 12 + 3 * 64 * 128 = 36,864 parameters."""
  layers, head = 4 * 36864, 1000 * 64
  forward = 2 * layers + 2 * 4 * 4 * 16 * 32  # attention to half of 32 tokens, twice
  weights, row = 2 * (layers + head), 4 * 4 * 2 * 16 * 32
  slow = accelerators.Accelerator(1e12, 1e9, 1e9, (1.0, 1.0))  # waits for its memory
  fast = dataclasses.replace(slow, bandwidth=1e15)  # never does
  wait, compute = (plan.plan(SMALL, chip, 1, SMALL_JOB) for chip in (slow, fast))
  assert (wait.weights, wait.cache, wait.group) == (weights, 4 * row, 1)
  # Generation: three prompt tokens to each answered one.
  assert wait.generate == pytest.approx(4 / ((weights + 2 * row) / 1e9))
  assert compute.generate == pytest.approx(1e12 / (forward + 2 * head + 3 * forward))
  # Training: 2 * 36,864 parameters, a quarter of the tokens is scored over 500 ids.
  m = 2 * 36864
  assert wait.train == pytest.approx(2 * 64 / (12 * m / 1e9))
  assert compute.train == pytest.approx(1e12 / (6 * m + 8 * 500 * 64 / 4))
  assert wait.training == 16 * m + 2 * head + 16 * 256 * 500
  # Decoding: one pass of four positions, three of the drafter.
  drafts = 3 * (2 * m + 2 * 500 * 64)
  assert wait.decode == pytest.approx(4 * 2 / ((weights + 2 * row + drafts) / 1e9))
  assert compute.decode == pytest.approx(
    4 * 2 / ((4 * 4 * (forward + 2 * head) + 4 * drafts) / 1e12))
  # Four layers of the target and three times two of the drafter take a second each on top.
  slower = plan.plan(SMALL, dataclasses.replace(fast, layer_s=1.0), 1, SMALL_JOB)
  assert slower.generate == pytest.approx(4 / 4, rel=1e-3)
  assert slower.decode == pytest.approx(4 * 2 / (4 + 3 * 2), rel=1e-3)
  assert slower.train == compute.train
  # Extraction for EAGLE-3, which needs seven layers: three taps and the last state, ids and mask.
  tapped = plan.plan(dataclasses.replace(SMALL, num_layers=8), fast, 1, dataclasses.replace(
    SMALL_JOB, kind="eagle3", layers=1))
  assert tapped.extract == pytest.approx(1e12 / (2 * forward))
  # Its three steps run the layer (attention reads twice the width) and the projection once.
  layer = 64 * 16 * (2 * (4 + 2 * 2) + 4) + 3 * 64 * 128
  assert tapped.train == pytest.approx(
    1e12 / (6 * (3 * layer + 3 * 64 * 64) + 8 * 500 * 64 * 3 / 4), rel=5e-3)  # norms left out
  assert tapped.features_per_token == 4 * 2 * 64 + 5
  assert tapped.features == 1000 * 32 * (4 * 2 * 64 + 5)
  assert tapped.hours == pytest.approx({
    "generate": 8000 / tapped.generate / 3600, "extract": 32000 / tapped.extract / 3600,
    "train": 10 * 128 / tapped.train / 3600})


def test_a_mixture_holds_all_experts_and_computes_with_a_few():
  """The shape of Qwen3-30B-A3B: 30.5 billion parameters, 3.3 of them for a token."""
  target = DecoderConfig(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_layers=48, num_heads=32,
    num_kv_heads=4, head_dim=128, tie_embeddings=False, num_experts=128, experts_per_token=8,
    expert_size=768)
  ends = 2 * 151936 * 2048
  assert 48 * plan.layer_parameters(target) + ends == pytest.approx(30.5e9, rel=2e-3)
  assert plan.touched(target, 1) + ends == pytest.approx(3.35e9, rel=5e-3)
  assert plan.touched(target, 10**6) == pytest.approx(48 * plan.layer_parameters(target))
  # Two tokens of 8 of 128 experts touch 128 (1 - (15/16)^2) = 15.5 of them.
  assert plan.touched(target, 2) == pytest.approx(48 * plan.layer_parameters(target, 15.5))
  chip = dataclasses.replace(V5P, efficiency=(1.0, 1.0), flops=1e18)
  one = plan.plan(target, chip, 1, dataclasses.replace(JOB, rows=1, prompt_tokens=1,
                                                       answer_tokens=8))
  assert one.weights == pytest.approx(2 * 30.5e9, rel=2e-3)
  assert one.generate == pytest.approx(2765e9 / (2 * 3.35e9), rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter_has_a_plan(kind):
  job = dataclasses.replace(JOB, kind=kind, layers=1 if kind == "eagle3" else 2)
  found = plan.plan(plan.TARGETS["8b"], V5P, 8, job)
  taps = {"small_lm": 0, "eagle3": 3}.get(kind, 5)
  assert found.features_per_token == (2 * 4096 * (taps + 1) + 5 if taps else 0)
  assert (found.hours["extract"] > 0) == (taps > 0) and found.fits
  online = plan.plan(plan.TARGETS["8b"], V5P, 8, dataclasses.replace(job, features="online"))
  assert online.features == 0 and (online.train < found.train) == (taps > 0)


def test_measured_rates_of_two_cores_are_within_a_factor_of_two():
  """LOG.md, the quickstart on a quiet machine: 1,772 answers of 90.6 tokens at 588 tokens/s over
  the stage, 64 rows; steps of 2,048 tokens in 0.36 to 0.40 s, two layers and 16,384 draft ids.
  Extraction for eagle3 ran at 1,610 tokens/s in rows of 512."""
  chip = accelerators.find("cpu2")
  job = plan.Job(prompts=1772, prompt_tokens=90, answer_tokens=91, rows=64, steps=748, batch_rows=4,
                 seq_len=512, kind="small_lm", layers=2, draft_vocab=16384)
  found = plan.plan(DEMO, chip, 1, job)
  assert 0.5 < found.generate / 588 < 2
  assert 0.5 < found.train / (2048 / 0.38) < 2
  tapped = plan.plan(DEMO, chip, 1, dataclasses.replace(
    job, kind="eagle3", layers=1, prompt_tokens=150, answer_tokens=106))
  assert 0.5 < tapped.extract / 1610 < 2


def test_targets_from_files(tmp_path):
  fields = {"architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576,
            "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
            "num_key_value_heads": 3, "tie_word_embeddings": True}
  (tmp_path / "config.json").write_text(json.dumps(fields))
  for argument in (tmp_path, tmp_path / "config.json"):
    assert plan.layer_parameters(plan.load_target(str(argument))) == plan.layer_parameters(DEMO)
  with pytest.raises(UserError, match="--target=9b: not one of 1b, 8b, 70b"):
    plan.load_target("9b")
  with pytest.raises(UserError, match="--accelerator=tpu must be one of v5e"):
    accelerators.find("tpu")


@pytest.mark.demo
def test_the_demo_target_by_name():
  assert plan.layer_parameters(plan.load_target("demo")) == plan.layer_parameters(DEMO)
