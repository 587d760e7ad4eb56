"""Long conversations made of a run's prompts and answers."""

import pytest

import spec_jax
from spec_jax.errors import UserError
from spec_jax.generate import encode_prompt
from tests.benchmarks.long_context import conversations
from tests.train_drafter import tiny_run


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  return spec_jax.load_target(str(tiny_run.write_target(tmp_path_factory.mktemp("t") / "target")))


def prompts(count):
  return [{"id": f"{c}{i}", "category": c, "messages": [
      {"role": "system", "content": "hello"}, {"role": "user", "content": f"the time {i}"}]}
      for i in range(count) for c in ("qa", "code")]


def test_turns_are_questions_with_their_own_answers(target):
  rows = prompts(12)
  answers = {p["id"]: f"the answer of {p['id']}" for p in rows}
  found = conversations(rows, answers, target, 90, 2)
  assert [r["id"] for r in found] == ["long-qa-0", "long-qa-1", "long-code-0", "long-code-1"]
  asked = []
  for row in found:
    assert len(encode_prompt(target, row["messages"], 0)) >= 90
    assert len(encode_prompt(target, row["messages"][:-3] + row["messages"][-1:], 0)) < 90
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * (
        len(row["messages"]) // 2) + ["user"]
    by_text = {p["messages"][-1]["content"]: p["id"] for p in rows
               if p["category"] == row["category"]}
    for question, answer in zip(row["messages"][::2], row["messages"][1::2], strict=False):
      assert answer["content"] == answers[by_text[question["content"]]]
    asked += [(row["category"], m["content"]) for m in row["messages"] if m["role"] == "user"]
  assert len(asked) == len(set(asked))  # no question twice


def test_too_few_prompts_are_an_error(target):
  with pytest.raises(UserError, match="no category has prompts and answers for 900 tokens"):
    conversations(prompts(3), {"qa0": "hello"}, target, 900, 1)
