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
