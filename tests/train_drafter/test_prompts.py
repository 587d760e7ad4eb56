"""Prompt files in three forms, odd conversations, duplicates, overlaps, the mix and the stage."""

import json
import types

import pytest

import spec_jax
from spec_jax.errors import UserError
from train_drafter import config, placement, prompts
from train_drafter.manifest import Manifest, StaleStageError
from train_drafter.prompts import (
  category_counts,
  deduplicate,
  overlaps,
  parse_mix,
  read_prompts,
  remove_overlaps,
  select,
  word_ngrams,
)


def user(text, id="p", category="general"):
  return {
    "id": id,
    "category": category,
    "messages": [{"role": "user", "content": text}],
    "source": "t",
  }


def chat(*turns):
  return {"messages": [{"role": role, "content": text} for role, text in turns]}


def write(path, *records):
  lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
  path.write_text("\n".join(lines) + "\n", encoding="utf-8")
  return path


GOOD = chat(("user", "good"))


# Reading.


def test_three_forms_in_one_file(tmp_path):
  path = write(
    tmp_path / "mixed.jsonl",
    {**chat(("system", "s"), ("user", "a"), ("assistant", "b")), "category": "code", "id": "m1"},
    {"conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},
    {"instruction": "e", "input": "f", "output": "g"},
    {"instruction": "h", "input": "", "output": "i", "source": "own"},
  )
  read = read_prompts(path)
  assert read.dropped == []
  assert read.prompts == [
    {
      "id": "m1",
      "category": "code",
      "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
      "source": "mixed.jsonl",
    },
    {
      "id": "mixed-2",
      "category": "general",
      "messages": [{"role": "user", "content": "c"}],
      "source": "mixed.jsonl",
    },
    {
      "id": "mixed-3",
      "category": "general",
      "messages": [{"role": "user", "content": "e\n\nf"}],
      "source": "mixed.jsonl",
    },
    {
      "id": "mixed-4",
      "category": "general",
      "messages": [{"role": "user", "content": "h"}],
      "source": "own",
    },
  ]


def test_only_trailing_answers_are_cut(tmp_path):
  path = write(
    tmp_path / "a.jsonl",
    chat(("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")),
  )
  (prompt,) = read_prompts(path).prompts
  assert [m["content"] for m in prompt["messages"]] == ["1", "2", "3"]


@pytest.mark.parametrize(
  "record, reason",
  [
    ({"messages": []}, "empty conversation"),
    ({"conversations": []}, "empty conversation"),
    (chat(("assistant", "hi"), ("user", "a")), "first turn is the assistant's"),
    (chat(("system", "s"), ("assistant", "hi"), ("user", "a")), "first turn is the assistant's"),
    (chat(("user", "a"), ("user", "b")), "two user turns in a row"),
    (chat(("user", "a"), ("assistant", "b"), ("assistant", "c")), "two assistant turns in a row"),
    (chat(("user", None)), "null content"),
    (chat(("user", "a"), ("assistant", None)), "null content"),
    ({"messages": [{"role": "user"}]}, "null content"),
    ({"instruction": None}, "null content"),
    (chat(("user", 5)), "content is not text"),
    (chat(("user", " \n")), "blank content"),
    (chat(("tool", "a")), "unknown role"),
    ({"messages": [{"content": "a"}]}, "unknown role"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown role"),
    ({"conversations": [{"from": "narrator", "value": "a"}]}, "unknown role"),
    (chat(("system", "s")), "no user turn"),
    (chat(("user", "a"), ("system", "s"), ("user", "b")), "system turn inside the conversation"),
    ({"messages": None}, "the conversation is not a list"),
    ({"messages": "hello"}, "the conversation is not a list"),
    ({"messages": ["hello"]}, "a turn is not an object"),
    ({"text": "hello"}, "no messages, conversations or instruction"),
    ([1, 2], "not a JSON object"),
    ('{"messages": [', "broken JSON"),
    ("[" * 100_000, "broken JSON"),
    ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "content is not Unicode text"),
  ],
)
def test_an_odd_conversation_is_dropped_with_reason_and_line(tmp_path, record, reason):
  path = write(tmp_path / "odd.jsonl", GOOD, record, "", GOOD)
  read = read_prompts(path, max_dropped_share=0.5)
  assert len(read.prompts) == 2
  assert [(d.file, d.line, d.reason) for d in read.dropped] == [("odd.jsonl", 2, reason)]
  assert read.counts() == {reason: 1}


def test_bytes_that_are_not_utf8_are_dropped_not_fatal(tmp_path):
  path = tmp_path / "latin.jsonl"
  path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\xff\xfe\n")
  read = read_prompts(path, max_dropped_share=0.5)
  assert len(read.prompts) == 1
  assert read.counts() == {"not UTF-8": 1}


def test_report_names_reasons_and_lines(tmp_path):
  path = write(tmp_path / "r.jsonl", *[GOOD] * 8, {"messages": []}, "{", *["nope"] * 6)
  text = read_prompts(path, max_dropped_share=0.9).report()
  assert "dropped 7: broken JSON (r.jsonl:10, r.jsonl:11, r.jsonl:12, r.jsonl:13, " in text
  assert text.splitlines()[0].endswith(", ...)")
  assert "dropped 1: empty conversation (r.jsonl:9)" in text


def test_the_share_of_dropped_lines_is_a_limit(tmp_path):
  records = [GOOD] * 9 + ["{"]
  assert len(read_prompts(write(tmp_path / "ok.jsonl", *records)).prompts) == 9
  bad = write(tmp_path / "bad.jsonl", *records, "{")
  with pytest.raises(UserError, match=r"bad\.jsonl: line 10: broken JSON; 2 of 11 lines"):
    read_prompts(bad)


def test_a_good_file_does_not_hide_a_bad_one(tmp_path):
  write(tmp_path / "a.jsonl", *[GOOD] * 50)
  write(tmp_path / "b.jsonl", "{", GOOD)
  with pytest.raises(UserError, match=r"b\.jsonl: line 1"):
    read_prompts(tmp_path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_fails_whatever_the_share(tmp_path, content):
  path = tmp_path / "empty.jsonl"
  path.write_text(content)
  with pytest.raises(UserError, match=r"empty\.jsonl: line 1: the file is empty"):
    read_prompts(path, max_dropped_share=1.0)


def test_a_file_without_a_valid_line_fails_whatever_the_share(tmp_path):
  path = write(tmp_path / "none.jsonl", "", '{"messages": []}', "{")
  with pytest.raises(UserError, match=r"none\.jsonl: line 2: empty conversation; 2 of 2 lines"):
    read_prompts(path, max_dropped_share=1.0)


def test_folders_and_lists_of_paths(tmp_path):
  folder = tmp_path / "folder"
  folder.mkdir()
  write(folder / "b.jsonl", chat(("user", "b")))
  write(folder / "a.jsonl", chat(("user", "a")))
  (folder / "notes.txt").write_text("no prompt")
  other = write(tmp_path / "c.jsonl", chat(("user", "c")))
  texts = [p["messages"][0]["content"] for p in read_prompts(f"{folder}, {other}").prompts]
  assert texts == ["a", "b", "c"]


def test_a_path_with_a_comma_in_its_name_is_one_path(tmp_path):
  assert len(read_prompts(write(tmp_path / "a,b.jsonl", GOOD)).prompts) == 1


def test_missing_paths_are_named(tmp_path):
  with pytest.raises(UserError, match=r"absent\.jsonl: no such prompt file"):
    read_prompts(tmp_path / "absent.jsonl")
  with pytest.raises(UserError, match="no .jsonl file in this folder"):
    read_prompts(tmp_path)
  with pytest.raises(UserError, match="names no file"):
    read_prompts(" , ")


def test_ids_are_unique_over_files(tmp_path):
  (tmp_path / "x").mkdir()
  first = write(tmp_path / "a.jsonl", {**GOOD, "id": "same"}, {**GOOD, "id": "same"}, GOOD)
  second = write(tmp_path / "x" / "a.jsonl", {**GOOD, "id": "same"}, {**GOOD, "id": 7}, GOOD)
  ids = [p["id"] for p in read_prompts(f"{first},{second}").prompts]
  assert ids == ["same", "a-2", "a-3", "a-1", "7", "a-3.2"]


# Duplicates and overlaps.


def test_duplicates_ignore_case_spacing_and_closing_punctuation():
  same = [user("What is  this?"), user("what is this"), user("WHAT is\nthis!")]
  assert deduplicate(same) == same[:1]


def test_operators_roles_and_history_make_different_prompts():
  different = [
    user("48 / 6"),
    user("48 * 6"),
    user("what is 3.5"),
    user("what is 35"),
    {**user("x"), **chat(("system", "a"), ("user", "48 / 6"))},
    {**user("x"), **chat(("user", "hi"), ("assistant", "yes"), ("user", "48 / 6"))},
    {**user("x"), **chat(("system", "hi"), ("user", "yes"))},
    {**user("x"), **chat(("user", "hi"), ("assistant", "yes"))},
  ]
  assert deduplicate(different) == different


def test_word_ngrams():
  assert word_ngrams("abcd", 3) == {("a", "b", "c"), ("b", "c", "d")}
  assert word_ngrams("ab", 3) == {("a", "b")}
  assert word_ngrams("", 3) == set()


WORDS = [f"w{i}" for i in range(40)]


def test_thirteen_shared_words_are_an_overlap_and_twelve_are_none():
  evaluation = [user(" ".join(WORDS[:30]))]
  thirteen = user("Intro: " + ", ".join(WORDS[5:18]).upper() + " end.", "13")
  twelve = user("intro " + " ".join(WORDS[5:17]) + " end of it all", "12")
  assert overlaps([twelve, thirteen], evaluation, 13) == ["13"]
  assert overlaps([twelve, thirteen], evaluation, 12) == ["12", "13"]
  assert overlaps([user(" ".join(WORDS[5:18]))], evaluation, 13) == ["p"]


def test_scattered_words_are_no_overlap():
  train = [user(" ".join(w for w in WORDS[:30] if w != "w15") + " x y z")]
  assert overlaps(train, [user(" ".join(WORDS[10:22]) + " other")], 13) == []


def test_a_short_prompt_overlaps_as_a_whole():
  short = "what is the capital of peru"
  assert overlaps([user(short.title() + "?")], [user(short)]) == ["p"]
  assert overlaps([user(f"please tell me, {short}, quickly")], [user(short)]) == ["p"]
  assert overlaps([user(short)], [user(f"in your opinion {short} " + " ".join(WORDS))]) == ["p"]
  assert overlaps([user("what is the capital of chile")], [user(short)]) == []


def test_a_few_common_words_overlap_only_when_they_are_all():
  assert overlaps([user("Tell me more about bees and how they live")], [user("tell me more")]) == []
  assert overlaps([user("Tell me more!")], [user("tell me more")]) == ["p"]


def test_a_shared_system_text_is_no_overlap_but_a_shared_turn_is():
  system = ("system", " ".join(WORDS))
  train = {**user("", "t"), **chat(system, ("user", "one two three"))}
  evaluation = {**user("", "e"), **chat(system, ("user", "four five six"))}
  assert overlaps([train], [evaluation]) == []
  answer = ("assistant", " ".join(WORDS))
  train = {**user("", "t"), **chat(("user", "a"), answer, ("user", "why"))}
  evaluation = {**user("", "e"), **chat(("user", "b"), answer, ("user", "how"))}
  assert overlaps([train], [evaluation]) == ["t"]


def test_remove_overlaps_keeps_the_others():
  train = [user("the very same question as there", "a"), user("some other words in this one", "b")]
  kept, removed = remove_overlaps(train, [user("the very same question as there")])
  assert [p["id"] for p in kept] == ["b"]
  assert removed == ["a"]
  with pytest.raises(UserError, match="overlap_words=0"):
    overlaps(train, train, 0)


# The mix.


def test_mix_entries():
  assert parse_mix(("code=2", " qa = 0.5 ")) == {"code": 2.0, "qa": 0.5}
  for bad in ("code", "code=", "=1", "code=x", "code=-1", "code=nan", "code=inf"):
    with pytest.raises(UserError, match="prompts.mix"):
      parse_mix((bad,))
  with pytest.raises(UserError, match="twice"):
    parse_mix(("qa=1", "qa=2"))
  with pytest.raises(UserError, match="all weights are 0"):
    parse_mix(("qa=0",))


def test_counts_follow_the_weights_and_add_up():
  assert category_counts(100, {"a": 3, "b": 1}) == {"a": 75, "b": 25}
  assert category_counts(10, {"a": 1, "b": 1, "c": 1}) == {"a": 4, "b": 3, "c": 3}
  assert category_counts(10, {"a": 1.2, "b": 2.8, "c": 6}) == {"a": 1, "b": 3, "c": 6}
  assert category_counts(2, {"a": 1, "b": 1, "c": 1, "d": 0}) == {"a": 1, "b": 1, "c": 0, "d": 0}


def test_what_a_category_lacks_goes_to_the_others():
  assert category_counts(100, {"a": 1, "b": 1, "c": 2}, {"a": 5, "b": 90, "c": 90}) == {
    "a": 5,
    "b": 32,
    "c": 63,
  }
  assert category_counts(100, {"a": 1, "b": 1}, {"a": 5, "b": 7}) == {"a": 5, "b": 7}


def test_select_draws_by_category_mixed_and_repeatably():
  pool = [user(f"{c}{i}", f"{c}{i}", c) for c in "abc" for i in range(50)]
  chosen = select(pool, 40, {"a": 3.0, "b": 1.0}, seed=1)
  assert [sum(p["category"] == c for p in chosen) for c in "abc"] == [30, 10, 0]
  assert chosen == select(pool, 40, {"a": 3.0, "b": 1.0}, seed=1)
  assert chosen != select(pool, 40, {"a": 3.0, "b": 1.0}, seed=2)
  # Neither the first of the pool nor one category after the other.
  assert {p["id"] for p in chosen if p["category"] == "a"} != {f"a{i}" for i in range(30)}
  assert "b" in {p["category"] for p in chosen[:20]}
  assert len(select(pool, 0, {}, seed=1)) == 150
  assert len(select(pool, 7, {}, seed=1)) == 7
  with pytest.raises(UserError, match="'z'"):
    select(pool, 5, {"z": 1.0}, seed=1)


# Prompts the target writes itself.


class FakeTokenizer:
  """Renders <sys>..<usr>..; one id a character."""

  def apply_chat(self, messages, *, add_generation_prompt=True, **args):
    return "".join(f"<{m['role']}>{m['content']}\n" for m in messages)

  def encode(self, text, add_special=False, parse_special=False):
    assert parse_special
    return [1] * add_special + [ord(c) for c in text]

  def hash(self):
    return "tok"

  def template_hash(self):
    return "tpl"


TARGET = types.SimpleNamespace(tokenizer=FakeTokenizer(), name="fake", weight_hash="w")


def fake_generate(monkeypatch, text_of):
  """Replaces spec_jax.generate; `text_of(i)` gives text and finish reason of stream i."""
  calls = []

  def generate(target, drafter, chats, *, sequence_ids, on_finish=None, **settings):
    assert drafter is None
    calls.append({"prompts": list(chats), "ids": list(sequence_ids), **settings})
    texts, reasons = zip(*[text_of(i) for i in sequence_ids], strict=True)
    for text in texts:
      if on_finish:
        on_finish(types.SimpleNamespace(tokens=[0] * len(text)))
    return types.SimpleNamespace(texts=list(texts), finish_reasons=list(reasons))

  monkeypatch.setattr(spec_jax, "generate", generate)
  return calls


def test_self_written_prompts_start_at_the_user_header(monkeypatch):
  calls = fake_generate(monkeypatch, lambda i: (f" question number {i} please\n", "eos"))
  written = prompts.self_write(TARGET, 3, seed=5, top_p=0.9, system="be kind")
  assert calls[0]["prompts"] == [[1, *map(ord, "<system>be kind\n<user>")]] * 3
  assert (calls[0]["temperature"], calls[0]["top_p"], calls[0]["seed"]) == (1.0, 0.9, 5)
  assert written[1] == {
    "id": "self-5-00001",
    "category": "general",
    "messages": [{"role": "user", "content": "question number 1 please"}],
    "source": "self_written",
  }


def test_useless_texts_are_replaced_by_fresh_streams(monkeypatch):
  useless = {
    0: ("this one never ends", "length"),
    1: ("hi", "eos"),
    2: ("word " * 30, "eos"),
    4: ("what about number 3", "eos"),
  }
  calls = fake_generate(monkeypatch, lambda i: useless.get(i, (f"What about number {i}?", "eos")))
  written = prompts.self_write(TARGET, 4, seed=0, batch_size=2)
  texts = [p["messages"][0]["content"] for p in written]
  assert texts == [f"What about number {i}?" for i in (3, 5, 6, 7)]
  asked = [i for call in calls for i in call["ids"]]
  assert asked == list(range(len(asked)))


def test_self_writing_gives_up_instead_of_looping(monkeypatch):
  calls = fake_generate(monkeypatch, lambda i: ("never done", "length"))
  with pytest.raises(UserError, match="self_written=4"):
    prompts.self_write(TARGET, 4, seed=0)
  assert sum(len(call["ids"]) for call in calls) == 16


# The stage.


def run(workdir, **options):
  cfg = config.Config(prompts=config.PromptsConfig(**{"count": 45, **options}))
  return prompts.run(cfg, workdir)


def lines(path):
  return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_stage_with_embedded_prompts(tmp_path, capsys):
  folder = run(tmp_path, system="be brief", eval_per_category=2)
  train, evaluation = lines(folder / "prompts.jsonl"), lines(folder / "eval.jsonl")
  assert folder == tmp_path / "prompts"
  assert len(train) == 45 and len(evaluation) == 18
  manifest = Manifest.load(folder)
  assert manifest.complete
  assert set(manifest.counts["categories"].values()) == {5}
  assert manifest.counts["overlaps"] == manifest.counts["duplicates"] == 0
  assert {p["messages"][0]["role"] for p in train + evaluation} == {"system"}
  # A prompt with a system text of its own keeps it.
  assert len({p["messages"][0]["content"] for p in evaluation}) > 1
  assert {p["category"] for p in train[:15]} != {"structured"}
  assert "kept 45 (structured 5, code 5" in capsys.readouterr().out


def test_stage_reads_files_drops_duplicates_and_overlaps(tmp_path, capsys):
  secret = "this question of the evaluation must never be trained on by anybody at all ever"
  train = write(
    tmp_path / "train.jsonl",
    *[chat(("user", f"question number {i}")) for i in range(20)],
    chat(("user", "Question  number 3?")),
    chat(("user", f"Listen: {secret}")),
    "{",
  )
  evaluation = write(tmp_path / "eval.jsonl", chat(("user", secret)), chat(("user", secret + "!")))
  folder = run(tmp_path / "w", path=str(train), eval_path=str(evaluation), count=15)
  counts = Manifest.load(folder).counts
  assert counts["prompts"] == 15 == len(lines(folder / "prompts.jsonl"))
  assert (counts["eval"], counts["eval_duplicates"]) == (1, 1)
  assert (counts["duplicates"], counts["overlaps"]) == (1, 1)
  assert counts["dropped"] == {"broken JSON": 1}
  assert secret not in (folder / "prompts.jsonl").read_text()
  out = capsys.readouterr().out
  assert "train.jsonl:23" in out
  assert "1 bad lines, 1 duplicates, 1 that share 13 words" in out


def test_stage_is_reused_and_notices_an_edited_file(tmp_path):
  path = write(tmp_path / "t.jsonl", *[chat(("user", f"number {i}")) for i in range(5)])
  folder = run(tmp_path / "w", path=str(path))
  before = (folder / "prompts.jsonl").stat().st_mtime_ns
  run(tmp_path / "w", path=str(path))
  assert (folder / "prompts.jsonl").stat().st_mtime_ns == before
  write(path, GOOD)
  with pytest.raises(StaleStageError, match="data.train"):
    run(tmp_path / "w", path=str(path))
  with pytest.raises(StaleStageError, match="prompts.seed"):
    run(tmp_path / "w", path=str(path), seed=1)


def test_stage_adds_self_written_prompts(tmp_path, monkeypatch):
  fake_generate(monkeypatch, lambda i: (f"self written number {i}", "eos"))
  monkeypatch.setattr(placement, "load_target", lambda cfg, dtype: TARGET)
  folder = run(tmp_path, count=9, self_written=4)
  train = lines(folder / "prompts.jsonl")
  assert sum(p["source"] == "self_written" for p in train) == 4 and len(train) == 13
  manifest = Manifest.load(folder)
  assert manifest.counts["self_written"] == 4
  assert manifest.target.weights == "w"


def test_template_arguments_reach_the_header_and_the_manifest(tmp_path, monkeypatch):
  fake_generate(monkeypatch, lambda i: (f"self written number {i}", "eos"))
  monkeypatch.setattr(placement, "load_target", lambda cfg, dtype: TARGET)
  seen = {}
  monkeypatch.setattr(prompts, "user_header", lambda _, **args: seen.update(args) or [1])
  cfg = config.Config(
    prompts=config.PromptsConfig(count=9, self_written=1, system="s"),
    generate=config.GenerateConfig(template_args=("enable_thinking=false",)),
  )
  folder = prompts.run(cfg, tmp_path)
  assert seen == {"system": "s", "enable_thinking": False}
  assert Manifest.load(folder).config["template_args"] == {"enable_thinking": False}


def test_self_written_prompts_come_on_top_of_the_count_and_outside_the_mix(tmp_path, monkeypatch):
  fake_generate(monkeypatch, lambda i: (f"self written number {i}", "eos"))
  monkeypatch.setattr(placement, "load_target", lambda cfg, dtype: TARGET)
  path = write(
    tmp_path / "t.jsonl",
    *[{**chat(("user", f"{c} number {i}")), "category": c} for c in ("qa", "code") for i in "1234"],
  )
  folder = run(tmp_path / "w", path=str(path), count=3, mix=("qa=1",), self_written=2)
  train = lines(folder / "prompts.jsonl")
  assert sorted(p["category"] for p in train) == ["general", "general", "qa", "qa", "qa"]


@pytest.mark.parametrize(
  "options, message",
  [
    ({"mix": ("poetry=1",)}, "'poetry'"),
    ({"count": 0}, "prompts.count=0"),
    ({"path": "absent.jsonl"}, "absent.jsonl"),
    ({"eval_path": "absent.jsonl"}, "absent.jsonl"),
  ],
)
def test_stage_refuses_bad_options(tmp_path, options, message):
  with pytest.raises(UserError, match=message):
    run(tmp_path, **options)


def test_bad_files_are_found_before_the_target_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(placement, "load_target", lambda cfg, dtype: TARGET)
  calls = fake_generate(monkeypatch, lambda i: (f"self written number {i}", "eos"))
  path = write(tmp_path / "bad.jsonl", "{")
  with pytest.raises(UserError, match="bad.jsonl"):
    run(tmp_path / "w", path=str(path), self_written=2)
  assert calls == []


def test_nothing_left_to_train_on_is_an_error(tmp_path):
  path = write(tmp_path / "same.jsonl", chat(("user", "one two three four five six")))
  with pytest.raises(UserError, match="no training prompt is left"):
    run(tmp_path / "w", path=str(path), eval_path=str(path))
