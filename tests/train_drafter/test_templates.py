"""The embedded prompts: enough of them, all different, and no evaluation prompt given away."""

import json
import random
import re

import pytest

from spec_jax.errors import UserError
from train_drafter import templates
from train_drafter.overlap import deduplicate, overlaps, words_of
from train_drafter.templates import CATEGORIES, Grammar, evaluation_prompts, training_prompts


@pytest.fixture(scope="module")
def embedded():
  return training_prompts(dict.fromkeys(CATEGORIES, 1500), seed=0)


def draw(text, seed=0):
  return templates.sample(Grammar("test", text), random.Random(seed))


def test_each_category_gives_1500_distinct_prompts(embedded):
  assert len(embedded) == 1500 * len(CATEGORIES)
  assert len(deduplicate(embedded)) == len(embedded)
  assert len({p["id"] for p in embedded}) == len(embedded)


def test_embedded_prompts_are_well_formed(embedded):
  for prompt in embedded + evaluation_prompts():
    assert prompt["category"] in CATEGORIES
    roles = [m["role"] for m in prompt["messages"]]
    spoken = roles[1:] if roles[0] == "system" else roles
    assert spoken == ["user", "assistant"] * (len(spoken) // 2) + ["user"]
    for message in prompt["messages"]:
      assert message["content"] == message["content"].strip() != ""
      # A slot that was not filled, or an article that was not chosen.
      assert not re.search(r"\{\{|a\(n\)|#\w+\}|\\n| \|\| | ~ ", message["content"]), prompt


def test_multi_turn_prompts_have_an_earlier_answer(embedded):
  for prompt in embedded + evaluation_prompts():
    if prompt["category"] == "multi_turn":
      assert any(m["role"] == "assistant" for m in prompt["messages"])


def test_task_kinds_vary_within_a_category(embedded):
  for category in CATEGORIES:
    starts = {words_of(p)[:3] for p in embedded if p["category"] == category}
    assert len(starts) > 100, category


def test_evaluation_prompts_are_at_least_twelve_per_category_and_differ():
  prompts = evaluation_prompts()
  for category in CATEGORIES:
    assert sum(p["category"] == category for p in prompts) >= 12
  assert len(deduplicate(prompts)) == len(prompts)
  assert len({p["id"] for p in prompts}) == len(prompts)


@pytest.mark.parametrize("n", [13, 8])
def test_no_run_of_words_is_shared_with_an_evaluation_prompt(embedded, n):
  assert overlaps(embedded, evaluation_prompts(), n) == []


def test_no_run_of_eight_words_of_a_system_text_is_shared(embedded):
  def with_system_as_user(prompts):
    return [
      {**p, "messages": [{**m, "role": "user"} for m in p["messages"]]} for p in prompts
    ]

  assert overlaps(with_system_as_user(embedded), with_system_as_user(evaluation_prompts()), 8) == []


def test_same_seed_same_prompts_and_other_seed_others():
  counts = {"math": 40, "rag": 20}
  assert training_prompts(counts, 3) == training_prompts(counts, 3)
  assert training_prompts(counts, 3) != training_prompts(counts, 4)


def test_prompts_do_not_depend_on_other_categories_or_on_a_larger_count():
  few = training_prompts({"code": 5}, 0)
  more = training_prompts({"qa": 3, "code": 9}, 0)
  assert [p for p in more if p["category"] == "code"][:5] == few


def test_first_prompts_of_a_seed_stay_the_same():
  # A change of Python or of the drawing would silently make other training sets.
  text = "[prompt]\n{{int:1-1000}} {{x}} {{x}} {{int:5-50:5}}\n[x,]\nred, green, blue\n"
  assert draw(text, seed=7) == [{"role": "user", "content": "151 green red 30"}]


def test_unknown_category_and_exhausted_grammar_are_user_errors(monkeypatch):
  with pytest.raises(UserError, match="poetry"):
    training_prompts({"poetry": 1}, 0)
  with pytest.raises(UserError, match="negative"):
    training_prompts({"qa": -1}, 0)
  tiny = Grammar("tiny", "[prompt]\nsay {{x}}\n[x,]\na, b\n")
  monkeypatch.setattr(templates, "load_grammar", lambda category: tiny)
  with pytest.raises(UserError, match="gave only 2 of 3"):
    training_prompts({"qa": 3}, 0)


def test_bound_slots_repeat_and_free_slots_differ():
  text = "[prompt]\n{{n#a}} {{n#b}} {{n#a}} {{n}}\n[n,]\none, two, three\n"
  for seed in range(20):
    a, b, again, free = draw(text, seed)[0]["content"].split()
    assert a == again
    assert len({a, b, free}) == 3


def test_bound_numbers_repeat():
  for seed in range(5):
    first, second = draw("[prompt]\n{{int:1-999#k}} {{int:1-999#k}}\n", seed)[0]["content"].split()
    assert first == second


def test_columns_come_from_one_option_and_draw_their_slots_anew():
  text = (
    "[prompt]\n{{row#r.0}}: {{row#r.1}} {{row#r.1}}\n"
    "[row]\nlow ~ {{int:1-9}}\nhigh ~ {{int:90-99}}\n"
  )
  pairs = set()
  for seed in range(40):
    name, numbers = draw(text, seed)[0]["content"].split(": ")
    values = [int(n) for n in numbers.split()]
    assert all((v >= 90) == (name == "high") for v in values)
    pairs.add(len(set(values)))
  assert pairs == {1, 2}


def test_numbers_stay_in_range_and_on_their_step():
  seen = {int(draw("[prompt]\n{{int:-4-5:3}}\n", s)[0]["content"]) for s in range(60)}
  assert seen == {-4, -1, 2, 5}


def test_article_line_break_capital_and_nested_choice():
  text = "[prompt]\n{{^w}}\\na(n) {{w}} {{{{w}} x/{{w}} x}}\n[w,]\nowl, cat\n"
  seen = {draw(text, seed)[0]["content"] for seed in range(40)}
  assert all(re.fullmatch(r"(Owl\na cat|Cat\nan owl) (owl|cat) x", line) for line in seen), seen


def test_turns_and_system_text():
  messages = draw("[prompt]\nsystem: be brief || hi || hello || bye\n")
  assert messages == [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
  ]


@pytest.mark.parametrize(
  "text, message",
  [
    ("[prompt]\n{{nobody}}\n", "no section"),
    ("[prompt]\n{{open\n", "not closed"),
    ("[prompt]\n{{int:1}}\n", "cannot read the number"),
    ("[prompt]\n[x]\n", "no options"),
    ("loose line\n", "before the first section"),
  ],
)
def test_a_broken_grammar_says_so(text, message):
  with pytest.raises(ValueError, match=message):
    draw(text)


def test_every_slot_of_the_grammars_can_be_filled():
  """Every option of every section, not only those a sample happens to meet."""
  for category in CATEGORIES:
    grammar = templates.load_grammar(category)
    for options in grammar.sections.values():
      for option in options:
        for column in option:
          for seed in range(5):
            templates._Draw(grammar, random.Random(seed)).expand(column)


def test_evaluation_file_is_one_json_object_a_line():
  for prompt in evaluation_prompts():
    assert list(prompt) == ["id", "category", "messages", "source"]
    assert json.loads(json.dumps(prompt)) == prompt
