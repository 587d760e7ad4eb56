"""The identity certificate: its verdicts, the probe, the tolerance, and dead drafters."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from spec_jax import audit as audit_lib
from spec_jax import drafters, identity
from spec_jax import records as metrics
from spec_jax.drafters.small_lm import SmallLM
from spec_jax.errors import UserError
from spec_jax.weights.safetensors import write_folder
from tests import tiny

OPTIONS = dict(draft_len=5, max_new_tokens=16, batch_size=4)


@pytest.fixture(scope="module")
def prompts():
  return tiny.prompts(10)


@pytest.fixture(scope="module")
def made(prompts):
  return audit_lib.audit(tiny.target(), tiny.weak_drafter(), prompts, **OPTIONS)


def test_a_sound_decode_is_bitwise(made, prompts):
  certificate, decodes = made
  assert certificate["verdict"] == "bitwise" and certificate["differences"] == []
  assert certificate["identical_same_shape"] == certificate["identical_width_1"] == len(prompts)
  assert all(row.records.accepted.sum() == 0 for row in decodes.same_shape.values())
  assert any(row.records.accepted.sum() > 0 for row in decodes.speculative.values())
  assert certificate["settings"]["draft_len"] == 5 and certificate["dtype"] == "float32"
  json.dumps(certificate, allow_nan=False)
  text = audit_lib.page(certificate)
  assert "certificate: bitwise" in text and "| same-shape plain decoding | 10 of 10 |" in text


def test_a_prompt_that_does_not_fit_is_named():
  names, long = ["first", "second", "third"], [5] * 513
  with pytest.raises(UserError, match="prompt second has 513 tokens and the context holds 512"):
    audit_lib.audit(tiny.target(), tiny.weak_drafter(), [[5], long, [6]], names=names)


def test_the_promise_of_a_sound_drafter_is_kept(made):
  """At temperature 0 hopping over the drafter's teacher-forced choices is what decoding does."""
  certificate, decodes = made
  rows = [row.records for row in decodes.speculative.values()]
  assert certificate["tau"] == pytest.approx(metrics.tau(rows))
  assert certificate["tau"] > 1.05
  assert certificate["predicted_tau"] == pytest.approx(certificate["tau"], rel=0.02)
  assert certificate["warnings"] == []


def test_self_draft_promises_whole_blocks(prompts):
  answers = [list(range(3, 3 + 13))] * len(prompts)
  own = tiny.self_drafter()
  plain = audit_lib.audit(tiny.target(), own, prompts[:4], **OPTIONS)[0]
  # Fifteen tokens behind the prefill's: rounds of 6, 6 and 3.
  assert plain["tau"] == plain["predicted_tau"] == pytest.approx(15 / 3)
  # Answers that are not the target's promise little.
  assert identity.predicted_tau(own, tiny.target(), prompts, answers, 5) < 2
  ngram = drafters.load_drafter("ngram", tiny.target())
  assert identity.predicted_tau(ngram, tiny.target(), prompts, answers, 5) is None


class Deaf(SmallLM):
  """A drafter whose cache has a hole where the prompt was."""

  def observe(self, state, tokens, features, positions, valid, target):
    return state


def test_a_hole_in_the_cache_cannot_hide(prompts):
  """All outputs are right and tau is low: only the promise tells."""
  module = tiny.self_drafter().module
  deaf = Deaf(module.config, lambda name: jnp.asarray(tiny.tensors(tiny.config())[name]))
  drafter = drafters.wrap("small_lm", "deaf", deaf)
  certificate, _ = audit_lib.audit(tiny.target(), drafter, [[7] * 12, *prompts[:3]], **OPTIONS)
  assert certificate["verdict"] == "bitwise"
  assert certificate["predicted_tau"] == pytest.approx(5) and certificate["tau"] < 4
  assert "likely causes" in certificate["warnings"][0]
  assert "Warning" in audit_lib.page(certificate)


@pytest.mark.parametrize("rounds,proposed,accepted,measured,predicted,message", [
    (10, 50, 5, 1.5, 1.52, None), (10, 50, 5, 1.5, None, None), (10, 50, 5, 1.44, 1.5, "promise"),
    (10, 50, 0, 1.0, None, "0 of 50"), (10, 50, 0, 1.0, 1.5, "0 of 50"),
    (10, 0, 0, 1.0, 1.5, "own context"), (0, 0, 0, float("nan"), None, "no round")])
def test_what_counts_as_dead(rounds, proposed, accepted, measured, predicted, message):
  found = identity.dead_drafter(rounds, proposed, accepted, measured, predicted)
  assert len(found) == (message is not None) and (message or "") in "".join(found)


def test_beyond_its_context_a_drafter_promises_nothing(prompts):
  """Plain rounds are no sign of a dead drafter."""
  module = tiny.weak_drafter().module
  short = SmallLM(
      dataclasses.replace(module.config, max_position=4),
      lambda name: jnp.asarray(tiny.tensors(tiny.config())[name]))
  drafter = drafters.wrap("small_lm", "short", short)
  certificate, _ = audit_lib.audit(tiny.target(), drafter, [[5] * 8, [6] * 9], **OPTIONS)
  assert certificate["predicted_tau"] == certificate["tau"] == 1.0
  assert "own context" in certificate["warnings"][0] and certificate["proposed"] == 0


def test_answers_of_one_token_certify_nothing_and_say_so(prompts):
  certificate, _ = audit_lib.audit(
      tiny.target(), tiny.weak_drafter(), prompts[:2], draft_len=5, max_new_tokens=1)
  assert certificate["rounds"] == 0 and certificate["tau"] is None
  assert "no round was decoded" in audit_lib.page(certificate)


def place(against, within):
  return {"against": against, "within_tolerance": within}


@pytest.mark.parametrize("differences,expected", [
    ([], "bitwise"), ([place("width 1", True)], "bitwise"),
    ([place("width 1", True), place("same-shape", True)], "margin-bounded"),
    ([place("width 1", False)], "broken"),
    ([place("same-shape", True), place("same-shape", False)], "broken")])
def test_verdicts(differences, expected):
  assert audit_lib.verdict(differences) == expected


# The command line.


@pytest.fixture
def arguments(tmp_path):
  write_folder(tmp_path / "m", tiny.config(), tiny.tensors(tiny.config()), tiny.tokenizer())
  path = tmp_path / "prompts.jsonl"
  path.write_text('{"id": "a", "prompt": "hello"}\n\n{"prompt": "us 12"}\n'
                  '{"messages": [{"role": "user", "content": "hello"}]}\n{"prompt": "tell"}\n')
  return [f"--target={tmp_path / 'm'}", f"--prompts={path}", f"--out={tmp_path / 'c'}",
          "--max_new_tokens=16", "--batch_size=4"]


def execute(arguments):
  values = flags.FlagValues()
  audit_lib.define_flags(values)
  values(["audit", *arguments])
  return audit_lib.execute(values)


def test_the_command_writes_both_files(arguments, tmp_path, capsys):
  assert execute(arguments) == 0
  made = json.loads((tmp_path / "c" / "certificate.json").read_text())
  assert made["verdict"] == "bitwise" and made["prompts"] == 4
  assert "certificate: bitwise" in (tmp_path / "c" / "certificate.md").read_text()
  assert "bitwise: " in capsys.readouterr().out


def test_a_wrong_token_is_broken_and_shown(arguments, monkeypatch, capsys):
  right = audit_lib.Run.bucket

  def wrong(run, *args):
    for row in right(run, *args):
      if run.program.draft_len and not bool(run.force_reject):
        row.tokens[4] = (row.tokens[4] + 1) % tiny.VOCAB
      yield row

  monkeypatch.setattr(audit_lib.Run, "bucket", wrong)
  assert execute(arguments) == 1
  out = capsys.readouterr().out
  assert "certificate: broken" in out and "| a | same-shape | 4 |" in out
  assert "prompt a, speculative (+) against same-shape (-):" in out and "+{" in out and "-{" in out


def test_the_diff_marks_what_differs():
  shown = audit_lib.text_diff("one two three", "one too three", False)
  assert shown == "one t-{o}+{w}o three" or shown == "one t+{w}o-{o} three"
  coloured = audit_lib.text_diff("ab", "ac", True)
  assert "\x1b[31mc\x1b[0m" in coloured and "\x1b[32mb\x1b[0m" in coloured
  assert audit_lib.text_diff("x" * 100 + "a", "x" * 100 + "b", False).startswith("...xxx")


@pytest.mark.parametrize("text,message", [
    ("", "no prompt"), ("\n\n", "no prompt"), ("{}\n", ":1: not a JSON object"),
    ('{"prompt": "x"}\n[1]\n', ":2: not a JSON object"), ("oops\n", ":1: not a JSON object"),
    ('{"prompt": [1, "x"]}\n', ":1: not a JSON"), ('{"messages": ["hi"]}\n', ":1: not a JSON"),
    ('{"messages": [{"role": "user"}]}\n', ":1: not a JSON"),
    ('{"prompt": ""}\n', ":1: the prompt is")])
def test_bad_prompt_files(tmp_path, text, message):
  (tmp_path / "p.jsonl").write_text(text)
  with pytest.raises(UserError, match=message):
    audit_lib.read_prompts(str(tmp_path / "p.jsonl"))


def test_marks_that_json_lines_may_hold(tmp_path):
  path = tmp_path / "p.jsonl"
  path.write_text('\ufeff{"id": "a", "prompt": "x\u2028y"}\n', encoding="utf-8")
  assert audit_lib.read_prompts(str(path)) == [("a", "x\u2028y")]


def test_a_missing_file_and_no_file(tmp_path):
  with pytest.raises(UserError, match="--prompts=.*No such file"):
    audit_lib.read_prompts(str(tmp_path / "p.jsonl"))
  with pytest.raises(UserError, match="--prompts is needed"):
    execute([])


# The probe (rung 5) and the tolerance.


@pytest.mark.parametrize("width", [4, 6, 8])
def test_rows_are_independent_on_this_backend(width, capsys):
  """The property that same-shape equality rests on, looked at and not assumed."""
  found = identity.probe(tiny.target(), 4, width, 64)
  with capsys.disabled():
    print(f"\n  probe, float32, 4 rows of width {width}: {found}", end="")
  assert found["rows_independent"] and found["place_independent"]


def test_the_probe_sees_dependence(monkeypatch):
  real = identity.block_logits

  def mixed(graph, params, cache, block, start):
    logits, cache = real(graph, params, cache, block, start)
    return logits + 1e-6 * jnp.mean(block), cache

  monkeypatch.setattr(identity, "block_logits", mixed)
  found = identity.probe(tiny.target(), 4, 4, 64)
  assert not found["rows_independent"] and found["rows_difference"] > 0
  assert not found["place_independent"]
  assert identity.probe(tiny.target(), 1, 4, 64)["rows_independent"] is None
  assert identity.probe(tiny.target(), 4, 4, 8) is None  # two blocks do not fit


def test_the_tolerance_is_measured_and_capped(monkeypatch):
  texts = [list(range(3, 33)), [5, 6]]  # the short one is made longer
  measured = identity.rounding_tolerance(tiny.target(), texts, 5, rows=2)
  assert identity.rounding_tolerance(tiny.target(), [[4]], 5) > 0
  assert 0 <= measured < 1e-3
  real = identity.block_logits

  def rough(graph, params, cache, block, start):
    logits, cache = real(graph, params, cache, block, start)
    return logits + 1e-4 * (block.shape[1] > 1), cache

  monkeypatch.setattr(identity, "block_logits", rough)
  assert identity.rounding_tolerance(tiny.target(), texts, 5) == pytest.approx(2e-4, rel=0.3)

  def rougher(graph, params, cache, block, start):
    logits, cache = real(graph, params, cache, block, start)
    return logits + block.shape[1], cache

  monkeypatch.setattr(identity, "block_logits", rougher)
  assert identity.rounding_tolerance(tiny.target(), texts, 5) == 1e-3


def judged(ours, theirs, tolerance=1e-3, prompt=(5, 6, 7)):
  return identity.divergence(tiny.target(), prompt, ours, theirs, 32, tolerance)


def logits_behind(ids):
  return np.asarray(tiny.target().module(
      jnp.asarray([ids]), jnp.arange(len(ids))[None])[0][0, -1])


def test_the_margin_is_to_the_worse_of_the_two_tokens():
  logits = logits_behind([5, 6, 7, 8])
  found = judged([8, 11], [8, 9, 10])
  assert (found["equal_tokens"], found["ours"], found["theirs"]) == (1, 11, 9)
  assert found["margin"] == pytest.approx(logits.max() - min(logits[11], logits[9]), abs=1e-4)
  assert not found["within_tolerance"]


def greedy(prompt, count):
  text = list(prompt)
  for _ in range(count):
    text.append(int(np.argmax(logits_behind(text))))
  return text[len(prompt):]


def test_a_text_that_ends_early_is_no_rounding():
  """Lost tokens and tokens behind the end: the ids that are there are all the right ones."""
  text = greedy((5, 6, 7), 6)
  for ours, theirs in ((text[:4], text), (text, text[:4])):
    found = judged(ours, theirs, tolerance=1.0)
    assert found["equal_tokens"] == 4 and found["margin"] < 1e-3
    assert not found["within_tolerance"]


def test_what_follows_an_excused_difference_is_judged_too():
  text = greedy((5, 6, 7), 6)
  other = int(np.argsort(logits_behind([5, 6, 7]))[-2])
  tie = float(np.diff(np.sort(logits_behind([5, 6, 7]))[-2:])[0])
  sound = [other, *greedy((5, 6, 7, other), 5)]
  found = judged(sound, text, tolerance=tie + 1e-3)
  assert found["within_tolerance"] and found["worst_margin"] == pytest.approx(tie, abs=1e-3)
  worst = int(np.argmin(logits_behind([5, 6, 7, *sound[:4]])))
  found = judged([*sound[:4], worst, sound[5]], text, tolerance=tie + 1e-3)
  assert found["margin"] <= tie + 1e-3 and not found["within_tolerance"]


def test_logits_that_are_no_numbers_are_broken_and_written(prompts, monkeypatch):
  real = identity.text_gaps
  monkeypatch.setattr(identity, "text_gaps", lambda *args: real(*args) * jnp.nan)
  found = judged([8, 11], [8, 9])
  assert found["margin"] is None and not found["within_tolerance"]
  json.dumps(found, allow_nan=False)
