"""Parts of the evaluate stage: which prompts, what counts as identical, and the cost pieces."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax
from spec_jax.errors import UserError
from spec_jax.generate import Run
from train_drafter import evaluate, speed
from train_drafter.config import Config
from train_drafter.evaluate import Bench
from train_drafter.generate import encode_prompt, read_jsonl


@pytest.fixture(scope="module")
def bench(finished, tmp_path_factory):
  """A copy of the finished run, opened as the stage opens it."""
  cfg, workdir = finished
  folder = tmp_path_factory.mktemp("evaluate") / "run"
  shutil.copytree(workdir, folder)
  target = spec_jax.load_target(cfg.target.source)
  prompts = read_jsonl(folder / "prompts" / "eval.jsonl")
  ids = [encode_prompt(target, p["messages"]) for p in prompts]
  return Bench(cfg, folder, target, prompts, ids)


def with_categories(bench, letters, **options):
  cfg = Config()
  for name, value in options.items():
    setattr(cfg.evaluate, name, value)
  prompts = [{"category": c, "id": str(i)} for i, c in enumerate(letters)]
  return dataclasses.replace(bench, cfg=cfg, prompts=prompts)


def test_settings_are_greedy_at_zero_and_coldest_first():
  cfg = Config()
  cfg.evaluate.temperatures = (1.0, 0.0, 0.7, 1.0)
  assert evaluate.settings(cfg) == [(0.0, "greedy"), (0.7, "ratio"), (1.0, "ratio")]


def test_timed_prompts_take_the_categories_in_turn(bench):
  assert with_categories(bench, "aabbcc", speed_prompts=4).timed() == [0, 2, 4, 1]
  assert with_categories(bench, "aab", speed_prompts=0).timed() == [0, 2, 1]


def test_spread_takes_the_first_of_every_category(bench):
  assert with_categories(bench, "aaabbc").spread(2) == [0, 1, 3, 4, 5]
  assert with_categories(bench, "aaabbc").spread(0) == list(range(6))


def test_width_is_that_of_the_longest_of_the_given_prompts(bench):
  some = dataclasses.replace(bench, ids=[[1] * n for n in (5, 33, 64, 65)])
  assert [some.width([0]), some.width([0, 1]), some.width([2]), some.width([3, 0])] == [
      32, 64, 64, 96]


def test_other_prompts_leave_out_what_was_trained_on(bench, tmp_path, capsys):
  kept, = read_jsonl(bench.workdir / "prompts" / "eval.jsonl")[:1]
  trained, = read_jsonl(bench.workdir / "prompts" / "prompts.jsonl")[:1]
  path = tmp_path / "other.jsonl"
  path.write_text("".join(json.dumps(p) + "\n" for p in (trained, kept, kept)))
  cfg = dataclasses.replace(bench.cfg, evaluate=dataclasses.replace(
      bench.cfg.evaluate, path=str(path)))
  found = evaluate.evaluation_prompts(cfg, bench.workdir)
  assert [p["messages"] for p in found] == [kept["messages"]]
  assert "dropped 1 duplicates, 1 that share 13 words" in capsys.readouterr().out
  path.write_text(json.dumps(trained) + "\n")
  with pytest.raises(UserError, match="evaluate.path=.*no prompt is left"):
    evaluate.evaluation_prompts(cfg, bench.workdir)


def test_untrained_control_is_the_initialisation(bench):
  ours, trained = bench.drafter(evaluate.UNTRAINED).module, bench.drafter("small_lm").module
  np.testing.assert_array_equal(ours.draft_ids[...], trained.draft_ids[...])
  source = bench.target.module.stack.layers[2].wq[...]
  np.testing.assert_array_equal(ours.stack.layers[1].wq[...], source)
  assert not np.array_equal(trained.stack.layers[1].wq[...], source)


def test_greedy_text_is_the_same_for_every_drafter(bench):
  rows = {name: evaluate.acceptance(bench, name, 0.0, "greedy")
          for name in ("small_lm", evaluate.NGRAM, evaluate.UNTRAINED)}
  text = {name: {r["id"]: r["tokens"] for r in found} for name, found in rows.items()}
  for name, found in text.items():
    assert all(found[i] == text["ngram"][i] for i in found), name


def test_identity_counts_a_changed_answer(bench, monkeypatch):
  real = evaluate.audit.Run.bucket

  def changed(run, *args):
    for row in real(run, *args):
      if run.program.draft_len and not bool(run.force_reject) and row.index == 1:
        row.tokens[-1] += 1
      yield row

  monkeypatch.setattr(evaluate.audit.Run, "bucket", changed)
  (bench.workdir / "evaluate" / "parts" / "identity.json").unlink()
  found, = evaluate.identity_of_batch(bench)
  assert found["prompts"] == 6 and found["identical_same_shape"] == pytest.approx(5 / 6)
  assert found["verdict"] == "broken"
  assert [d["against"] for d in found["divergences"]] == ["same-shape", "width 1"]
  written = json.loads((bench.workdir / "evaluate" / "certificate.json").read_text())
  assert written["verdict"] == "broken" and written["drafter"].endswith("drafter")


def test_divergence_says_where_and_by_how_much(bench):
  theirs = [r["tokens"] for r in evaluate.acceptance(bench, evaluate.NGRAM, 0.0, "greedy")][:1]
  ours = [list(theirs[0])]
  ours[0][3] += 1
  found, = evaluate.divergences(bench, [0], ours, theirs, 1e-3)
  assert not found["within_tolerance"]
  assert found["id"] == bench.prompts[0]["id"] and found["equal_tokens"] == 3
  tokens = jnp.asarray([bench.ids[0] + theirs[0][:3]])
  logits = bench.target.module(tokens, jnp.arange(tokens.shape[1])[None])[0][0, -1]
  # The token that came is far from the best: no tie between the best two excuses it.
  margin = float(np.max(logits) - logits[ours[0][3]])
  assert found["margin"] == pytest.approx(margin, abs=1e-4)
  assert evaluate.divergences(bench, [0], theirs, theirs, 1e-3) == []


def test_single_decodes_without_a_new_compilation(bench):
  single = speed.Single(bench.target, bench.drafter("ngram"), 3, bench.width(range(4)), 16)
  spent = single.warm_up(bench.ids[0])
  assert set(spent) == {"s", "saved_s"} and min(spent.values()) >= 0
  before = spec_jax.decode.chunk._cache_size()
  for ids in bench.ids[1:4]:
    row, seconds = single(ids)
    assert seconds > 0 and row.tokens
  assert spec_jax.decode.chunk._cache_size() == before


def test_interleaved_takes_turns():
  calls = []
  pieces = {name: lambda name=name: calls.append(name) or jnp.zeros(()) for name in "ab"}
  times = speed.interleaved(pieces, 3)
  assert calls == ["a", "b"] * 4  # the first turn is the warm-up
  assert {name: len(t) for name, t in times.items()} == {"a": 3, "b": 3}


def test_sizes_are_measured_until_memory_or_patience_ends():
  def measure(size, most=99, error="RESOURCE_EXHAUSTED: out of memory"):
    if size > most:
      raise jax.errors.JaxRuntimeError(error)
    return [{"size": size}], size / 10

  sizes = lambda *args, **options: [row["size"] for row in speed._while_it_fits(
      (8, 1, 4, 16), lambda size: measure(size, **options), *args)]
  assert sizes(9.0) == [1, 4, 8, 16]
  assert sizes(0.5) == [1, 4, 8]  # the pass over 8 took too long for another
  assert sizes(9.0, most=4) == [1, 4]
  with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
    sizes(9.0, most=4, error="broken")


def test_answers_too_short_to_time_leave_the_rest_of_the_report(bench, monkeypatch, capsys):
  monkeypatch.setattr(evaluate.timings, "LEAST_TIMED", 99)
  path = bench.workdir / "evaluate" / "parts" / "speed-float32.json"
  before = path.read_text()
  path.unlink()
  made = evaluate.speed_and_identity(bench)
  assert made["speed"] == [] and len(made["identity"]) == 2
  assert "too few to time" in capsys.readouterr().out
  path.write_text(before)


def test_provenance_names_what_was_measured(finished):
  cfg, workdir = finished
  made = json.loads((workdir / "evaluate" / "report.json").read_text())
  assert made["provenance"]["identity_dtype"] == "float32"
  assert made["provenance"]["untrained_per_category"] == cfg.evaluate.untrained_per_category
  assert any("untrained was decoded on 3 of the 6 prompts" in w for w in made["warnings"])
  found = made["provenance"]
  assert found["command"].startswith("python ") and found["git_commit"]
  assert found["config"] == json.loads(json.dumps(dataclasses.asdict(cfg)))
  assert found["machine"]["cores"] and found["machine"]["backend"] == "cpu"
  assert found["created"] <= found["finished"]
  assert set(found["prompt_hashes"]) == {
      row["id"] for row in read_jsonl(workdir / "prompts" / "eval.jsonl")}
  for name in ("target_weights", "tokenizer", "chat_template", "drafter_files", "prompts_hash"):
    assert len(found[name]) == 64, name


def test_short_prompts_are_prefilled_at_a_narrower_width(bench, monkeypatch):
  """Three widths of prompts through one queue: two prefill shapes, and the text stays the same."""
  prompts = [[3 + k] * n for k, n in enumerate([90, 20, 31, 70, 8, 25])]
  widths = []
  fill = Run._fill
  monkeypatch.setattr(
      Run, "_fill",
      lambda run, state, size, *rest: widths.append(size) or fill(run, state, size, *rest))

  def texts(batch_size):
    widths.clear()
    run = Run(bench.target, None, prompts, draft_len=0, max_new_tokens=8,
                       batch_size=batch_size)
    rows = {row.index: row.tokens for row in run.bucket(96, range(len(prompts)))}
    return [rows[i] for i in range(len(prompts))], sorted(set(widths))

  queued, narrow = texts(1)
  at_once, wide = texts(6)
  assert (narrow, wide) == ([32, 96], [96])
  assert queued == at_once


def test_the_width_of_a_prefill_depends_on_the_prompt_alone(bench, monkeypatch):
  """Otherwise its rounding would depend on its company, which depends on acceptance."""
  prompts = [[3 + k] * (90 if k % 3 else 20) for k in range(20)]
  seen, fill = {}, Run._fill

  def watched(run, state, size, filled, *rest):
    seen.update(dict.fromkeys(filled.values(), size))
    return fill(run, state, size, filled, *rest)

  monkeypatch.setattr(Run, "_fill", watched)
  run = Run(bench.target, None, prompts, draft_len=0, max_new_tokens=8, batch_size=16)
  assert len(list(run.bucket(96, range(20)))) == 20
  assert seen == {k: 96 if k % 3 else 32 for k in range(20)}
