"""The shell: what it streams, the two lines of comparison, and one line for what is wrong."""

import io
import re
import subprocess
import sys

import numpy as np
import pytest
from absl import flags

import spec_jax
from spec_jax import __main__ as shell
from spec_jax.errors import UserError
from spec_jax.generate import Finished, Progress
from spec_jax.records import RowRecords
from spec_jax.weights.safetensors import write_folder
from tests import tiny


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("target") / "m"
  write_folder(path, tiny.config(), tiny.tensors(tiny.config()), tiny.tokenizer())
  return path


def values(*args):
  found = flags.FlagValues()
  shell.define_flags(found)
  return shell.parse(["spec_jax", *args], found)


def run(*args, stdin="", out=None):
  out = out or io.StringIO()
  shell.execute(values("--max_new_tokens=16", *args), io.StringIO(stdin), out)
  return out.getvalue()


@pytest.fixture(scope="module")
def shown(folder):
  return run(f"--target={folder}", "--drafter=self", "--nochat", "--prompt=hello")


def test_the_text_is_that_of_generate(folder, shown):
  target = spec_jax.load_target(str(folder))
  out = spec_jax.generate(target, None, ["hello"], max_new_tokens=16)
  text, blank, *lines = shown.rstrip("\n").rsplit("\n", 3)
  assert text == out.texts[0] and blank == "" and len(lines) == 2


def test_the_two_lines(shown):
  first, second = shown.splitlines()[-2:]
  assert re.fullmatch(
      r"speculative +\d+\.\d tokens/s   self, draft_len 5, tau 5\.00, 100% of the drafts accepted",
      first)
  assert re.fullmatch(
      r"plain +\d+\.\d tokens/s   identical text; speculative decoding is \d+\.\d\d times as fast",
      second)


def test_standard_input_and_no_comparison(folder, shown):
  # The same prompt by the other way in; no colours in a pipe.
  out = run(f"--target={folder}", "--drafter=self", "--nochat", "--nocompare", stdin="hello\n")
  assert shown.startswith(out) and "\x1b" not in out


def test_chat_wraps_the_prompt(folder):
  target = spec_jax.load_target(str(folder))
  chat = [{"role": "system", "content": "us"}, {"role": "user", "content": "hello"}]
  wanted = spec_jax.generate(target, None, [chat], max_new_tokens=16).texts[0]
  out = run(f"--target={folder}", "--drafter=none", "--system=us", "--prompt=hello")
  assert out == wanted + "\n"


def test_colours_on_a_terminal(folder, shown, monkeypatch):
  monkeypatch.delenv("NO_COLOR", raising=False)
  monkeypatch.setenv("TERM", "xterm")
  args = (f"--target={folder}", "--drafter=self", "--nochat", "--nocompare", "--prompt=hello")
  out = run(*args, out=Terminal())
  plain = out.replace("\x1b[32m", "").replace("\x1b[0m", "")
  assert shown.startswith(plain) and out.count("\x1b[32m") == out.count("\x1b[0m") > 3
  monkeypatch.setenv("NO_COLOR", "1")
  assert run(*args, out=Terminal()) == plain


# The stream.


def stream(decode, out=None, colour=False):
  out = out or io.StringIO()
  return shell.Stream(decode, out, colour), out


def finished(tokens, accepted, emitted):
  counts = [np.asarray(c, np.int32) for c in ([5] * len(accepted), accepted, emitted)]
  return Finished(0, tokens, "length", [0.0] * len(tokens), RowRecords(*counts, "length"), None)


def test_accepted_drafts_are_marked():
  # The prefill's token; a round of two drafts and the correction; a round cut inside its drafts.
  marks = lambda count, *rounds: shell.drafted(count, *(np.array(r, np.int32) for r in rounds))
  assert marks(7, [2, 5], [3, 3]) == [False, True, True, False, True, True, True]
  assert marks(1, [], []) == [False]
  assert marks(2, [2], [3]) == [False, True]  # a stop string cut the row


def test_rounds_beyond_the_drafters_context_are_told():
  """CASE 13: decoding falls back to plain steps there, and says so."""
  told = lambda *rounds: shell._accepted(RowRecords(*rounds, "length"))
  assert told([4, 4], [2, 4], [3, 5]) == "tau 4.00, 75% of the drafts accepted"
  beyond = told([4, 0, 0], [2, 0, 0], [3, 1, 1])
  assert beyond.endswith(", 2 plain rounds beyond the drafter's context")


def test_text_comes_out_as_the_rounds_finish():
  decode = lambda ids: "".join("abcdef"[i] for i in ids)
  writer, out = stream(decode)
  writer.progress(Progress(0, [0], np.array([], int), np.array([], int)))
  assert out.getvalue() == "a"
  writer.progress(Progress(0, [0, 1, 2], np.array([1]), np.array([2])))
  assert out.getvalue() == "abc"
  writer.finish(finished([0, 1, 2, 3], [1, 0], [2, 1]))
  assert out.getvalue() == "abcd\n"


@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 5, 6], [2, 4, 6], [3, 6], [6], [1, 5, 6]])
def test_characters_of_several_tokens_wait_for_the_rest(cuts):
  data = "é😀".encode()  # six tokens of one byte each
  decode = lambda ids: bytes(data[i] for i in ids).decode(errors="replace")
  writer, out = stream(decode)
  for n in cuts:
    writer.progress(Progress(0, list(range(n)), np.array([n - 1]), np.array([n - 1])))
    assert "\ufffd" not in out.getvalue() and "é😀".startswith(out.getvalue())
  writer.finish(finished(list(range(6)), [5], [5]))
  assert out.getvalue() == "é😀\n"


def test_half_a_character_at_the_end_is_shown():
  data = "a😀".encode()
  decode = lambda ids: bytes(data[i] for i in ids).decode(errors="replace")
  writer, out = stream(decode)
  writer.finish(finished([0, 1, 2], [2], [2]))
  assert out.getvalue() == "a\ufffd\n"


def test_a_model_cannot_steer_the_terminal():
  text = "a\x1b[2Jb\x07\tc\nd\x9be"
  writer, out = stream(lambda ids: text[:len(ids)], Terminal())
  writer.finish(finished(list(range(len(text))), [5] * 2, [6] * 2))
  assert out.getvalue() == "a[2Jb\tc\nde\n"
  writer, out = stream(lambda ids: text[:len(ids)])  # a file gets what the model wrote
  writer.finish(finished(list(range(len(text))), [5] * 2, [6] * 2))
  assert out.getvalue() == text + "\n"


# Bad input.


@pytest.mark.parametrize("args,message", [
    (["--promt=x"], "promt"), (["--draft_len=many"], "draft_len"), (["hello"], "'hello'"),
    (["--system=x", "--nochat"], "--system needs --chat")])
def test_flags_are_checked(args, message):
  with pytest.raises(UserError, match=message):
    values(*args)


@pytest.mark.parametrize("args,message", [
    (["--prompt= "], "the prompt is empty"),
    (["--prompt=x", "--target=no/such/model"], "no/such/model"),
    (["--prompt=x", "--dtype=float64"], "dtype='float64'"),
    (["--prompt=x", "--drafter=nothing"], "drafter='nothing'"),
    (["--prompt=x", "--draft_len=0"], "draft_len=0"),
    (["--prompt=x", "--max_new_tokens=0"], "max_new_tokens=0"),
    (["--prompt=x", "--temperature=-1"], "temperature=-1"),
    (["--prompt=x", "--rule=best"], "rule='best'"),
    (["--prompt=x", "--seed=99999999999"], "seed=99999999999"),
    (["--prompt=" + "x" * 600], "600 tokens and the context holds 512")])
def test_settings_are_checked(folder, args, message):
  with pytest.raises(UserError, match=message):
    run(f"--target={folder}", "--nochat", *args)


def test_a_missing_prompt_is_asked_for(folder):
  with pytest.raises(UserError, match="--prompt is needed"):
    shell.execute(values(f"--target={folder}"), Terminal(), io.StringIO())


def test_the_command(folder):
  command = [sys.executable, "-m", "spec_jax"]
  bad = subprocess.run([*command, "--target=no/such/model", "--prompt=x"],
                       capture_output=True, text=True, check=False)
  assert bad.returncode == 2 and bad.stdout == ""
  assert bad.stderr.startswith("error: ") and bad.stderr.count("\n") == 1
  usage = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
  assert "python -m spec_jax --prompt=" in usage.stdout and "--draft_len" in usage.stdout
