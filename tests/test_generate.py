"""`generate` end to end on a tiny target: speculation changes nothing but the number of passes.

A compilation takes longer than everything else here, so the tests share shapes: batches of four,
sixteen new tokens, prompts of the smallest bucket.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax
from spec_jax import drafters
from spec_jax.errors import UserError
from spec_jax.generate import BUCKETS, Run, bucket, encode_prompt, stop_cut
from spec_jax.weights.safetensors import write_folder
from tests import tiny

K = 5


def decode(drafter, prompts, **options):
  options = {"draft_len": K, "max_new_tokens": 16, "batch_size": 4} | options
  return spec_jax.generate(options.pop("target", tiny.target()), drafter, prompts, **options)


@pytest.fixture(scope="module")
def prompts():
  return tiny.prompts(24)


@pytest.fixture(scope="module")
def plain(prompts):
  return decode(None, prompts)


def check_records(out, budget=16):
  """The bookkeeping that must hold for every row of every decode."""
  for tokens, logprobs, records, reason in zip(
      out.tokens, out.logprobs, out.records, out.finish_reasons, strict=True):
    assert len(tokens) == len(logprobs) <= budget
    assert records.emitted.sum() == len(tokens) - 1  # the first token is the prefill's
    assert records.reason == reason
    assert np.isfinite(logprobs).all() and max(logprobs) <= 0


def test_rows_in_flight_end_when_nothing_is_filled_any_more(prompts, plain):
  work = Run(tiny.target(), None, prompts, draft_len=0, max_new_tokens=16, batch_size=4)
  done = []
  for row in work.all():
    work.stop_filling()
    done.append(row)
  # Four are in flight; several may have ended in the chunk that the first came from.
  assert 4 <= len(done) <= 7
  assert [r.tokens for r in done] == [plain.tokens[r.index] for r in done]


@pytest.mark.parametrize("kind", ["self", "weak", "ngram", "reject"])
def test_greedy_equals_plain(prompts, plain, kind):
  drafter = {"self": tiny.self_drafter(), "weak": tiny.weak_drafter(),
             "ngram": drafters.load_drafter("ngram", tiny.target()),
             "reject": tiny.weak_drafter()}[kind]
  out = decode(drafter, prompts, force_reject=kind == "reject")
  assert out.tokens == plain.tokens
  for ours, theirs in zip(out.logprobs, plain.logprobs, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
  check_records(out)
  accepted = sum(r.accepted.sum() for r in out.records)
  proposed = sum(r.proposed.sum() for r in out.records)
  assert {"self": accepted == proposed > 0, "weak": 0 < accepted < proposed,
          "ngram": proposed > 0, "reject": proposed == 0}[kind]


def test_logprobs_are_those_of_the_raw_distribution(prompts, plain):
  target = tiny.target()
  ids = prompts[0] + plain.tokens[0]
  logits, _ = target.module(jnp.asarray([ids]), jnp.arange(len(ids))[None])
  logits = np.asarray(logits[0, len(prompts[0]) - 1:-1], np.float64)
  expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
  assert plain.tokens[0] == logits.argmax(1).tolist()
  np.testing.assert_allclose(
      plain.logprobs[0], expected[np.arange(16), plain.tokens[0]], atol=1e-4)


@pytest.mark.parametrize("draft_len", [1, 7])
def test_greedy_does_not_depend_on_the_draft_length(prompts, plain, draft_len):
  assert decode(tiny.weak_drafter(), prompts, draft_len=draft_len).tokens == plain.tokens


def eos_of_many(plain):
  """The id whose first occurrences lie at the most different places."""
  first = lambda e: {row.index(e) + 1 for row in plain.tokens if e in row}
  return max(range(tiny.VOCAB), key=lambda e: len(first(e) & set(range(1, 7))))


def test_eos_inside_a_block():
  # CASE 3. Enough prompts that the EOS falls on every place of a block, of a budget and beyond it.
  prompts = tiny.prompts(60, seed=4)
  plain = decode(None, prompts)
  eos = eos_of_many(plain)
  ends = [row.index(eos) + 1 if eos in row else 17 for row in plain.tokens]
  assert set(ends) >= set(range(1, 7))
  budgets = [(16, n, max(1, n - 1))[i % 3] for i, n in enumerate(ends)]
  budgets = [min(16, b) for b in budgets]
  out = decode(tiny.self_drafter(), prompts, eos_ids=(eos,), max_new_tokens=budgets)
  for row, n, budget, ours, reason in zip(
      plain.tokens, ends, budgets, out.tokens, out.finish_reasons, strict=True):
    assert ours == row[:min(n, budget)]
    assert reason == ("eos" if n <= budget else "length")
  check_records(out)


# Stop strings (CASE 4).


def spelled(prompts, plain):
  """Per prompt the text after each of its tokens."""
  text = tiny.target().tokenizer.decode
  return [[text(row[:n]) for n in range(1, len(row) + 1)] for row in plain.tokens]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_stop_strings_at_every_place(prompts, plain, batch_size):
  texts = spelled(prompts, plain)
  stops = [t[n + 1][len(t[n - 1]):] for t, n in zip(texts, itertools.cycle(range(1, 12)))
           if len(t[n + 1][len(t[n - 1]):]) >= 2][:4]  # pairs of tokens of four rows
  out = decode(tiny.self_drafter(), prompts, stop=stops, batch_size=batch_size)
  seen = []
  for row, text, ours, reason in zip(
      plain.tokens, texts, out.tokens, out.finish_reasons, strict=True):
    ends = [n + 1 for n, t in enumerate(text) if any(s in t for s in stops)]
    assert ours == (row[:ends[0]] if ends else row)
    assert reason == ("stop" if ends else "length")
    seen += ends[:1]
  assert len(set(seen)) >= 3
  for text, tokens, logprobs in zip(out.texts, out.tokens, out.logprobs, strict=True):
    assert text == tiny.target().tokenizer.decode(tokens) and len(tokens) == len(logprobs)
  check_records(out)


def test_a_stop_completed_by_the_third_of_six(prompts, plain):
  # One round of the self-draft commits six ids behind the first.
  row = plain.tokens[1]
  text = tiny.target().tokenizer.decode
  stop = text(row[:4])[len(text(row[:2])):]
  assert stop not in text(row[:3])
  out = decode(tiny.self_drafter(), prompts[1:2], stop=[stop])
  assert out.tokens[0] == row[:4] and out.finish_reasons == ["stop"]
  records = out.records[0]
  assert records.accepted.tolist() == [5] and records.emitted.tolist() == [3]
  check_records(out)


def test_a_stop_past_the_cap_is_not_reached(prompts, plain):
  row = plain.tokens[1]
  text = tiny.target().tokenizer.decode
  out = decode(
      tiny.self_drafter(), prompts[:4], max_new_tokens=[16, 5, 6, 1],
      stop=[text(row[:6])[len(text(row[:4])):]])
  assert out.tokens[1] == row[:5] and out.finish_reasons[1] == "length"


def test_a_stop_in_the_very_first_token(prompts, plain):
  text = tiny.target().tokenizer.decode
  stop = text(plain.tokens[1][:1])
  assert stop
  out = decode(tiny.self_drafter(), prompts[1:2], stop=[stop])
  assert out.tokens[0] == plain.tokens[1][:1] and out.finish_reasons == ["stop"]
  assert out.records[0].rounds == 0


def test_one_stop_string_is_not_a_list_of_letters(prompts, plain):
  text = tiny.target().tokenizer.decode(plain.tokens[2])
  out = decode(None, prompts[:4], stop=text[:2][::-1] + "|<|")
  assert out.tokens == plain.tokens[:4]


def test_stop_cut_finds_the_first_token():
  text = lambda ids: "".join("abcdef"[i] for i in ids)
  ids = [0, 1, 2, 3, 4, 5]
  assert stop_cut(text, ids, ["cd"]) == 4
  assert stop_cut(text, ids, ["ef", "b"]) == 2
  assert stop_cut(text, ids, ["x"]) == -1
  assert stop_cut(text, [], ["x"]) == -1


# The end of the context (CASE 5).


@pytest.mark.parametrize("kind", ["plain", "self", "ngram"])
def test_the_end_of_the_context(kind):
  target = tiny.target()
  drafter = {"plain": None, "self": tiny.self_drafter(),
             "ngram": drafters.load_drafter("ngram", target)}[kind]
  base = tiny.prompts(4, seed=9)
  rng = np.random.default_rng(0)
  lengths = [28, 31, 32, 17]
  prompts = [(p + rng.integers(3, 64, 32).tolist())[:n] for p, n in zip(base, lengths, strict=True)]
  free = decode(None, prompts)
  out = decode(drafter, prompts, max_length=32)
  for row, ours, n in zip(free.tokens, out.tokens, lengths, strict=True):
    assert ours == row[:32 - n + 1]
  assert out.finish_reasons == ["length"] * 4
  with pytest.raises(UserError, match="prompt 1 has 33 tokens and the context holds 32"):
    decode(drafter, [prompts[0], prompts[2] + [5]], max_length=32)


def test_a_full_buffer_keeps_its_last_tokens():
  """A row that fills its buffer exactly and waits for a slower one: its writes need the slack."""
  rng = np.random.default_rng(2)
  prompts = [p[:1] + rng.integers(3, 64, 31).tolist() for p in tiny.prompts(4)]  # the whole bucket
  roomy = decode(None, [*prompts, prompts[0] + [5]]).tokens[:4]  # 33 ids: the next bucket
  assert decode(None, prompts).tokens == roomy
  drafter = tiny.scripted(prompts, roomy, [K, 0, 2, K])
  assert decode(drafter, prompts).tokens == roomy


def test_the_context_of_the_target_is_the_limit():
  cfg = tiny.config(max_position=32)
  target = tiny.make(cfg, tiny.tensors(cfg))
  run = lambda n, **options: Run(target, None, [[5] * n], draft_len=0, **options)
  assert run(32).budgets == [1] and run(20).budgets == [13] and run(3).budgets == [30]
  with pytest.raises(UserError, match="prompt 0 has 33 tokens and the context holds 32"):
    run(33)
  with pytest.raises(UserError, match="max_length=33"):
    run(4, max_length=33)


def test_a_drafter_with_a_shorter_context():
  drafter = tiny.self_drafter()
  module = drafter.module
  module.config = tiny.config(max_position=16)
  short = drafters.wrap("small_lm", "short", module)
  prompts = [p[:3] for p in tiny.prompts(3)] + [tiny.prompts(4)[3] * 9]
  prompts[3] = prompts[3][:18]  # longer than the drafter's whole context
  plain = decode(None, prompts)
  out = decode(short, prompts)
  assert out.tokens == plain.tokens
  for i, records in enumerate(out.records):
    start = len(prompts[i]) + 1 + np.concatenate([[0], np.cumsum(records.emitted)[:-1]])
    np.testing.assert_array_equal(records.proposed, np.where(start + K <= 16, K, 0))
  assert (out.records[3].proposed == 0).all() and (out.records[0].proposed > 0).any()


# Batches.


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_does_not_depend_on_the_batch(prompts, temperature):
  options = dict(temperature=temperature, seed=5)
  alone = [decode(tiny.weak_drafter(), [p], batch_size=1, sequence_ids=[i], **options)
           for i, p in enumerate(prompts[:5])]
  together = decode(tiny.weak_drafter(), prompts, **options)
  assert [a.tokens[0] for a in alone] == together.tokens[:5]
  for a, records in zip(alone, together.records[:5], strict=True):
    np.testing.assert_array_equal(a.records[0].accepted, records.accepted)
  check_records(together)
  if temperature:
    assert together.tokens != decode(tiny.weak_drafter(), prompts, **options | {"seed": 6}).tokens


def test_ragged_acceptance(prompts, plain):
  # CASE 8: right 0, 2 and K times; a row with budget 1; one that ends at once by EOS.
  eos = plain.tokens[4][0]
  cut = [row[:row.index(eos) + 1] if eos in row else row for row in plain.tokens[:5]]
  right = [0, 2, K, 3, 1]
  drafter = tiny.scripted(prompts[:5], plain.tokens[:5], right)
  out = decode(drafter, prompts[:5], max_new_tokens=[16, 16, 16, 1, 16], eos_ids=(eos,))
  expected = cut[:3] + [cut[3][:1], cut[4]]
  assert out.tokens == expected
  assert out.finish_reasons[4] == "eos" and out.records[4].rounds == 0
  assert out.records[3].rounds == 0
  for i in range(3):
    if eos not in cut[i]:
      full = out.records[i].accepted[:-1]  # the script runs out in the last round
      np.testing.assert_array_equal(full, right[i])
  assert any(eos not in row for row in cut[:3])


def test_the_order_of_finishing_and_the_callback(prompts, plain):
  seen = []
  budgets = [1 + i % 16 for i in range(len(prompts))]
  out = decode(tiny.self_drafter(), prompts, max_new_tokens=budgets, on_finish=seen.append)
  assert sorted(row.index for row in seen) == list(range(len(prompts)))
  assert out.tokens == [row[:b] for row, b in zip(plain.tokens, budgets, strict=True)]


def test_rounds_are_reported_as_they_finish(prompts, plain):
  seen = {}
  run = Run(tiny.target(), tiny.weak_drafter(), prompts[:6], draft_len=K, max_new_tokens=16,
            batch_size=4, on_round=lambda now: seen.setdefault(now.index, []).append(now))
  rows = {row.index: row for row in run.all()}
  assert set(seen) == set(rows) == set(range(6))
  for i, row in rows.items():
    assert row.tokens == plain.tokens[i]
    steps = [len(now.tokens) for now in seen[i]]
    # From the prefill's token on, every round but the last, which the row itself tells.
    assert steps == np.cumsum([1, *row.records.emitted[:-1]]).tolist()
    for now in seen[i]:
      assert now.tokens == row.tokens[:len(now.tokens)]
      np.testing.assert_array_equal(now.accepted, row.records.accepted[:len(now.accepted)])


def test_hidden_states_predict_the_tokens(prompts, plain):
  out = decode(tiny.weak_drafter(), prompts[:6], keep_hidden=True)
  head = tiny.target().module.head_weight()
  for tokens, hidden in zip(out.tokens, out.hidden, strict=True):
    assert hidden.shape == (len(tokens), 32)
    assert jnp.argmax(hidden @ head.T, -1).tolist() == tokens
  assert out.tokens == plain.tokens[:6]


# Temperatures.


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6])
def test_temperatures_below_the_threshold_are_greedy(prompts, plain, temperature):
  out = decode(tiny.weak_drafter(), prompts, temperature=temperature, rule="ratio")
  assert out.tokens == plain.tokens


@pytest.mark.parametrize("temperature", [1e-5, 1e-3])
def test_temperatures_just_above_it_work(prompts, plain, temperature):
  # The margins of this target are far above these temperatures, so the law is a point.
  out = decode(tiny.weak_drafter(), prompts, temperature=temperature)
  assert out.tokens == plain.tokens
  check_records(out)


def test_temperatures_mixed_in_one_batch(prompts, plain):
  mixed = [(0.0, 1e-6, 1.0, 2.0)[i % 4] for i in range(len(prompts))]
  out = decode(tiny.weak_drafter(), prompts, temperature=mixed)
  hot = decode(tiny.weak_drafter(), prompts, temperature=1.0)
  for i in range(len(prompts)):
    if mixed[i] < 1:
      assert out.tokens[i] == plain.tokens[i]
    elif mixed[i] == 1:
      assert out.tokens[i] == hot.tokens[i]
  assert out.tokens != plain.tokens
  check_records(out)


def test_force_reject_equals_plain_under_sampling(prompts):
  # Plain decoding and a round that accepts nothing draw from the same stream.
  options = dict(temperature=0.9, seed=3)
  rejected = decode(tiny.weak_drafter(), prompts, force_reject=True, **options)
  assert rejected.tokens == decode(None, prompts, **options).tokens
  assert all((r.accepted == 0).all() for r in rejected.records)


# Law, through the compiled loop.


def exact_law(target, prompt, length, temperature, top_k):
  """The probability of every continuation of this length, {ids: probability}."""
  law = {(): 1.0}
  for _ in range(length):
    rows = jnp.asarray([[*prompt, *head] for head in law])
    logits, _ = target.module(rows, jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape))
    scaled = np.asarray(logits[:, -1], np.float64) / temperature
    longer = {}
    for (head, weight), row in zip(law.items(), scaled, strict=True):
      best = np.argsort(-row)[:top_k]
      p = np.exp(row[best] - row[best].max())
      longer |= {(*head, int(t)): weight * x for t, x in zip(best, p / p.sum(), strict=True)}
    law = longer
  return law


@pytest.mark.parametrize("kind", ["stochastic", "deterministic"])
def test_the_law_of_sampled_text(kind):
  """Chi-square of the three tokens behind the first against the target's exact law."""
  target, prompt, n, top_k = tiny.target(), [7, 11, 5], 4000, 3
  options = dict(temperature=4.0, top_k=top_k, max_new_tokens=4, batch_size=500)
  law = exact_law(target, prompt, 4, 4.0, top_k)
  if kind == "deterministic":
    drafter = tiny.scripted([prompt], [max(law, key=law.get)], [2])
  else:
    # Some of the ids that the law holds, unevenly, and some that it never gives.
    near = np.bincount([i for row in law for i in row], minlength=tiny.VOCAB) ** 0.5 + 0.2
    drafter = tiny.fixed_law(near / near.sum())
  out = decode(drafter, [prompt] * n, draft_len=2, **options)
  accepted = np.concatenate([r.accepted for r in out.records])
  assert set(accepted.tolist()) == {0, 1, 2}

  seen = dict.fromkeys(law, 0)
  for row in out.tokens:
    seen[tuple(row)] += 1  # anything outside the law is a KeyError
  expected, counts = (np.array([d[key] for key in law]) for d in (law, seen))
  assert expected.sum() == pytest.approx(1)
  expected = expected * n
  order = np.argsort(expected)
  cell = np.unique(np.cumsum(expected[order]) // 20, return_inverse=True)[1]
  wanted, got = (np.bincount(cell, weights=x[order]) for x in (expected, counts))
  chi, freedom = np.sum((got - wanted) ** 2 / wanted), len(wanted) - 1
  assert freedom > 20
  assert chi < freedom + 5 * np.sqrt(2 * freedom)


# Vocabularies and ties (CASES 10 and 11).


def loud(cfg, ids, scale=3.0):
  """Tensors whose logits at `ids` are equal and the largest everywhere."""
  values = tiny.tensors(cfg)
  values["embed"][:, 0] = 20.0  # a channel that every state carries
  for i in ids:
    values["head"][i] = 0
    values["head"][i, 0] = scale
  return values


def test_ties_go_to_the_lowest_id_on_every_path():
  cfg = tiny.config()
  target = tiny.make(cfg, loud(cfg, [3, 9]))
  prompts = tiny.prompts(4)
  for drafter in (None, drafters.load_drafter("self", target),
                  tiny.scripted(prompts, [[9] * 16] * 4, [K] * 4)):
    out = decode(drafter, prompts, target=target)
    assert out.tokens == [[3] * 16] * 4


def test_ids_that_do_not_exist_never_appear(tmp_path):
  # CASE 10a: 58 real ids; target 64 wide, drafter 60 wide; the loudest row of both is no real id.
  cfg = tiny.config(vocab_real=58)
  target = tiny.make(cfg, loud(cfg, [61], 1.0), tiny.tokenizer())
  narrow = tiny.config(vocab_size=60, num_layers=1)
  tokenizer = tiny.toy.tokenizer(tokens=tiny.tokenizer().token_strings()[:58])
  write_folder(tmp_path / "d", narrow, loud(narrow, [59], 1.0), tokenizer)
  prompts = [[i % 58 for i in p] for p in tiny.prompts(12)]
  own = drafters.load_drafter(str(tmp_path / "d"), target)
  itself = drafters.load_drafter("self", target)
  for drafter, temperature in ((own, 0.0), (own, [0.0, 2.0] * 6), (itself, [0.0, 2.0] * 6)):
    out = decode(drafter, prompts, target=target, temperature=temperature)
    assert max(max(row) for row in out.tokens) < 58
    check_records(out)


def test_an_added_token_comes_only_from_the_target(tmp_path):
  # CASE 10c: the drafter's tokenizer ends before the target's last token, its matrix does not.
  cfg = tiny.config(vocab_real=61)
  target = tiny.make(cfg, loud(cfg, [60], 1.2), tiny.tokenizer())
  narrow = tiny.config(num_layers=1)
  tokenizer = tiny.toy.tokenizer(tokens=tiny.tokenizer().token_strings()[:60])
  write_folder(tmp_path / "d", narrow, loud(narrow, [60], 5.0), tokenizer)
  drafter = drafters.load_drafter(str(tmp_path / "d"), target)
  prompts = [[i % 60 for i in p] for p in tiny.prompts(12)]
  out = decode(drafter, prompts, target=target, temperature=[0.0, 2.0] * 6)
  added = [i for row in out.tokens for i in row if i == 60]
  assert added
  # Whatever the drafter got accepted is another id: only the last id of a round can be the new one.
  for row, records in zip(out.tokens, out.records, strict=True):
    at = 1
    for accepted, emitted in zip(records.accepted, records.emitted, strict=True):
      assert 60 not in row[at:at + min(accepted, emitted)]
      at += emitted


# Buckets and arguments.


def test_buckets():
  assert [bucket(n) for n in (1, 32, 33, 8192, 8193)] == [32, 32, 64, 8192, 16384]
  assert all(bucket(b) == b for b in BUCKETS)


def test_every_prompt_is_in_one_bucket_that_holds_it():
  rng = np.random.default_rng(0)
  prompts = [[5] * int(n) for n in rng.integers(1, 400, 300)]
  run = Run(tiny.target(), None, prompts, draft_len=0, batch_size=4)
  buckets = run.buckets()
  assert sorted(i for members in buckets.values() for i in members) == list(range(300))
  for size, members in buckets.items():
    assert all(len(prompts[i]) <= size for i in members)
  assert len(buckets) > 1


def test_few_prompts_share_a_bucket_unless_the_next_is_far():
  buckets = lambda *lengths: {
      size: len(members) for size, members in Run(
          tiny.target(), None, [[5] * n for n in lengths], draft_len=0).buckets().items()}
  assert buckets(20, 33, 60, 100) == {128: 4}  # too few to be worth more than one compilation
  assert buckets(20, 30, 500) == {32: 2, 512: 1}  # the long one would make all of them wait


def test_prompts_may_be_strings_chats_or_ids():
  target = tiny.target()
  ids = encode_prompt(target, "hello")
  assert ids == target.tokenizer.encode("hello")
  chat = encode_prompt(target, [{"role": "user", "content": "hello"}])
  assert chat == target.tokenizer.encode_chat([{"role": "user", "content": "hello"}])
  assert encode_prompt(target, tuple(ids)) == ids


def test_no_prompts_give_no_rows():
  out = decode(None, [])
  assert out.tokens == out.texts == out.records == []


def test_a_biased_id_never_appears(prompts, plain):
  """CASE 14: the id that greedy would choose and the drafter proposes."""
  banned = plain.tokens[0][1]
  for temperature, value in ((0.0, -100.0), (1.0, float("-inf"))):
    texts = [decode(drafter, prompts, bias={banned: value}, temperature=temperature).tokens
             for drafter in (None, tiny.self_drafter())]
    assert not any(banned in row for text in texts for row in text)
    assert temperature or texts[0] == texts[1]


def test_arguments_that_mean_nothing_pass_and_unknown_ones_do_not(prompts, plain):
  neutral = dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
                 min_new_tokens=0)
  assert decode(None, prompts[:4], **neutral).tokens == plain.tokens[:4]
  with pytest.raises(TypeError, match="'best_of'"):
    decode(None, prompts[:4], best_of=2)


@pytest.mark.parametrize("options,message", [
    ({"prompts": [[]]}, "prompt 0 is empty"), ({"prompts": [[5], ""]}, "prompt 1 is empty"),
    ({"prompts": [[5, 64]]}, "prompt 0 holds id 64"), ({"prompts": [[-1]]}, "holds id -1"),
    ({"prompts": "hello"}, "prompts must be a list"), ({"draft_len": 0}, "draft_len=0"),
    ({"batch_size": 0}, "batch_size=0"),
    ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ({"max_new_tokens": [3, 3]}, "max_new_tokens has 2 entries for 1 prompts"),
    ({"temperature": -0.5}, "temperature=-0.5"), ({"temperature": float("nan")}, "temperature=nan"),
    ({"prompts": [[5], [6]], "temperature": [0.5, float("nan")]}, "temperature=nan"),
    ({"temperature": float("inf")}, "temperature=inf"), ({"rule": "none"}, "rule='none'"),
    ({"temperature": 1.0, "rule": "greedy"}, "rule='greedy'"), ({"top_p": 0}, "top_p=0"),
    ({"top_k": -2}, "top_k=-2"), ({"stop": [""]}, "stop holds an empty string"),
    ({"stop": ["x<|im_end|>"]}, "control token '<|im_end|>'"), ({"temperature": 1e39}, "1e.39"),
    ({"min_p": 2.0}, "min_p=2.0"), ({"bias": {64: 1.0}}, "bias holds id 64"),
    ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 is not supported"),
    ({"presence_penalty": 0.1}, "presence_penalty=0.1"),
    ({"frequency_penalty": 0.1}, "frequency_penalty=0.1"),
    ({"min_new_tokens": 3}, "min_new_tokens=3"),
    ({"sequence_ids": [1, 2]}, "sequence_ids has 2 entries"), ({"sequence_ids": [-1]}, "holds -1"),
    ({"max_length": 0}, "max_length=0")])
def test_bad_arguments_are_named(options, message):
  with pytest.raises(UserError, match=message):
    decode(tiny.weak_drafter(), options.pop("prompts", [[5, 6]]), **options)
