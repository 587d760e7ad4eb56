"""Replay against decoding at temperature 0: ties are told from errors, draft by draft."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax
from spec_jax import drafters
from spec_jax import replay as arithmetic
from spec_jax.drafters.small_lm import SmallLM
from spec_jax.identity import TOLERANCE_CAP
from spec_jax.models.decoder import Decoder
from spec_jax.records import RowRecords
from spec_jax.target import from_module
from tests import tiny
from tests.train_drafter.test_forecast import part
from tests.train_drafter.test_replay import ENDS, decoded, pair
from train_drafter import agreement, forecast, replay

# Decisions.


def test_decisions_by_hand():
  """Eight tokens behind the prefill's, K = 3: two accepted and one refused; all three accepted;
  and a round that EOS cut behind its first draft."""
  record = RowRecords([3, 3, 3], [2, 3, 2], [3, 4, 1], "eos")
  chance, margin = np.zeros((8, 3)), np.full((8, 3), -9.0)
  chance[0, :2] = chance[3, :3] = chance[7, 0] = 1
  assert arithmetic.decisions(record, chance, margin) == {"decisions": 7, "lost": [], "won": []}
  # Drafts that decoding did not come to are not asked for.
  chance[1, 0] = chance[7, 1] = 1
  assert arithmetic.decisions(record, chance, margin)["lost"] == []
  chance[0, 2], margin[0, 2] = 1, 0.25  # refused there
  chance[3, 1], margin[3, 1] = 0, -0.5  # accepted there
  chance[7, 0], margin[7, 0] = 0, -np.inf
  assert arithmetic.decisions(record, chance, margin) == {
      "decisions": 7, "lost": [0.25], "won": [0.5, None]}
  # Beyond the drafter's context nothing is drafted.
  alone = RowRecords([0, 0], [0, 0], [1, 1], "length")
  assert arithmetic.decisions(alone, np.ones((2, 3)), margin[:2])["decisions"] == 0


def compared(lost, won, tolerance=0.1, decisions=50, **changes):
  """A part whose prompts differ by these margins, a list a prompt."""
  made = part(**changes)
  made["tolerance"] = tolerance
  for row, a, b in zip(made["rows"], lost, won, strict=True):
    row |= {"decisions": decisions, "lost": a, "won": b}
  return made


@pytest.mark.parametrize("lost, won, verdict, said", [
    ([[], [], []], [[], [], []], "agrees", "all 150 drafts were decided alike"),
    ([[0.1], [], []], [[], [0.02], []], "rounding",
     "2 of 150 drafts were decided otherwise (margin up to 0.1, tolerance 0.1): ties"),
    ([[0.11], [], []], [[], [0.02], []], "disagrees", "rounding does not explain 1 of them"),
    ([[0.01], [], []], [[None], [], []], "disagrees", "margin up to infinite"),
])
def test_the_verdict_is_by_drafts_not_by_the_interval(lost, won, verdict, said):
  for measured in ((4, 2, 0), (6, 3, 0)):  # tau as replayed, and far from it
    warnings = []
    row = forecast.replay_section([compared(lost, won, measured=measured)], warnings)[-1]
    assert row["verdict"] == verdict and row["agrees"] is (measured == (4, 2, 0))
    assert said in agreement.reason(row["decisions"])
    assert [w for w in warnings if "DISAGREE" in w and said in w] == (
        warnings if verdict == "disagrees" else [])
    assert bool(warnings) == (verdict == "disagrees")


def test_ties_that_all_fall_to_one_side_are_no_ties():
  """Eleven prompts: 2 / 2^11 < 0.001. Ten are too few to tell, and so is a loop within one."""
  def judged(lost, won):
    rows = [{"decisions": 9, "lost": [0.01] * a, "won": [0.01] * b}
            for a, b in zip(lost, won, strict=True)]
    found = agreement.summary({"rows": rows, "tolerance": 0.1})
    return found["lopsided"], agreement.verdict(found, True)

  assert judged([1] * 11, [0] * 11) == (2 / 2**11, "disagrees")
  assert judged([0] * 11, [1] * 11) == (2 / 2**11, "disagrees")
  assert judged([1] * 10, [0] * 10) == (2 / 2**10, "rounding")
  assert judged([40, 0], [0, 1]) == (1.0, "rounding")
  assert judged([1] * 12, [0] * 11 + [2])[1] == "rounding"


def test_parts_of_an_earlier_run_are_judged_by_the_interval():
  row = forecast.replay_section([part(measured=(6, 3, 0))], [])[-1]
  assert (row["decisions"], row["verdict"]) == (None, "disagrees")
  assert forecast.replay_section([part("ratio", 1.0)], [])[-1]["verdict"] == "agrees"


# Real decoding.


def held(target, drafter, prompts, out, draft_len):
  """The summary of a decoding against its replay."""
  found = replay.estimate(
      target, drafter, prompts, out.tokens, temperature=0.0, lengths=(draft_len,),
      decoded=(draft_len, out.records))
  own = agreement.tolerance(target, drafter, prompts, draft_len)
  return agreement.summary(found | {"tolerance": own})


@pytest.mark.parametrize("kind", ["small_lm", "eagle3", "dflash", "dspark"])
def test_float32_decides_every_draft_alike(kind):
  target, drafter = pair(kind)
  prompts, out = decoded(kind, 3, 0.0, 10, **ENDS)
  found = held(target, drafter, prompts, out, 3)
  assert agreement.verdict(found, None) == "agrees" and found["lopsided"] == 1
  by_hand = sum(min(a, e) + (e == a + 1 and a < p) for r in out.records for p, a, e in zip(
      r.proposed, r.accepted, r.emitted, strict=True))
  assert found["decisions"] == by_hand > 30
  # The passes do round differently, by what float32 leaves.
  assert 0 < agreement.rounding(target, drafter, prompts, 3) < 1e-4


class Deaf(SmallLM):
  """Has not read the prompt."""

  def observe(self, state, tokens, features, positions, valid, target):
    return state


class Late(SmallLM):
  """Drafts one position too late."""

  def _pass(self, state, tokens, positions, target, attend_length=None):
    late = positions + (positions.shape[1] == 1)
    return super()._pass(state, tokens, late, target, attend_length)


class Holed(SmallLM):
  """Leaves the row of the last draft empty behind a block that was accepted whole (CASES 6)."""

  def propose(self, state, context, draft_len, sampling, target):
    at = jnp.maximum(context.length[:, None] - 2, 0)
    rows = jnp.arange(at.shape[0])[:, None]
    kept = jax.tree.map(lambda x: x[rows, :, at], state)
    proposal, moved = super().propose(state, context, draft_len, sampling, target)
    return proposal, jax.tree.map(lambda x, old: x.at[rows, :, at].set(old), moved, kept)


@functools.cache
def models(dtype, kind=SmallLM):
  """A target of wide margins and its first layer as drafter."""
  cfg = tiny.config()
  values = {name: jnp.asarray(v, dtype if v.ndim > 1 else jnp.float32)
            for name, v in tiny.tensors(cfg).items()}
  target = from_module(Decoder(cfg, values.__getitem__), dtype=dtype)
  module = drafters.init_from_target(target, (0,))
  return target, drafters.wrap("small_lm", kind.__name__, kind(module.config, values.__getitem__))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [SmallLM, Deaf, Late, Holed])
def test_an_error_shouts_and_rounding_does_not(kind, dtype):
  target, drafter = models(dtype, kind)
  prompts = tiny.prompts(48)
  out = spec_jax.generate(target, drafter, prompts, draft_len=2, max_new_tokens=48, batch_size=16)
  found = held(target, drafter, prompts, out, 2)
  apart = found["lost"] + found["won"]
  assert found["tolerance"] <= TOLERANCE_CAP[dtype]
  if kind is SmallLM:
    assert agreement.verdict(found, None) == ("rounding" if apart else "agrees")
    assert apart == 0 or dtype == "bfloat16"
    assert found["tolerance"] > 0 or dtype == "bfloat16"  # so few numbers may round alike
  else:
    assert agreement.verdict(found, None) == "disagrees", found
    assert found["beyond"] > 0


def test_rounding_to_bfloat16_is_told_from_an_error_of_float32():
  """Decoded in bfloat16 and replayed in float32 from the same weights: some drafts are decided
  otherwise, all within what bfloat16 rounds and beyond what float32 does."""
  target, drafter = models("bfloat16")
  prompts = tiny.prompts(48)
  out = spec_jax.generate(target, drafter, prompts, draft_len=2, max_new_tokens=48, batch_size=16)
  wide = lambda x: dataclasses.replace(x, params=jax.tree.map(
      lambda leaf: leaf.astype(jnp.float32), x.params))
  found = replay.estimate(
      dataclasses.replace(wide(target), dtype="float32"), wide(drafter), prompts, out.tokens,
      temperature=0.0, lengths=(2,), decoded=(2, out.records))
  judged = {dtype: agreement.summary(found | {"tolerance": cap})
            for dtype, cap in TOLERANCE_CAP.items()}
  assert judged["bfloat16"]["lost"] + judged["bfloat16"]["won"] > 0
  assert agreement.verdict(judged["bfloat16"], False) == "rounding", judged
  assert agreement.verdict(judged["float32"], True) == "disagrees", judged


def test_a_label_that_the_drafter_does_not_have_has_no_margin():
  module = drafters.init_from_target(tiny.target(), (0,), np.array([3, 1], np.int32))
  logits = jnp.asarray([[2.0, 0.5], [2.0, 0.5], [2.0, 0.5]])
  found = replay._margin(logits, jnp.asarray([3, 1, 0]), module.draft_ids[...], module)
  np.testing.assert_allclose(found, [1.5, -1.5, -np.inf])
  whole = replay._margin(logits, jnp.asarray([1, 0, 0]), None, module)
  np.testing.assert_allclose(whole, [-1.5, 1.5, 1.5])


def test_the_words_of_the_report(finished):
  """A finished run says how many drafts were compared; its section survives the disk."""
  _, workdir = finished
  made = json.loads((workdir / "evaluate" / "report.json").read_text())
  exact = [r for r in made["replay"] if r["temperature"] == 0 and r["measured"] is not None]
  assert exact and all(r["verdict"] == "agrees" for r in exact)
  for row in exact:
    assert row["decisions"]["lost"] == row["decisions"]["won"] == 0
    line = f"; all {row['decisions']['decisions']} drafts were decided alike"
    for name in ("report.md", "report.html"):
      assert line in (workdir / "evaluate" / name).read_text()
  warm = [r for r in made["replay"] if r["temperature"] > 0]
  assert warm and all(r["decisions"] is None for r in warm)
  assert made["definitions"]["verdict"]
