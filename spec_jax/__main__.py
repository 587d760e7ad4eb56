"""Decodes one prompt, speculatively and plainly, and says what speculation brought.

  python -m spec_jax --prompt="Write a haiku about rain."
  python -m spec_jax --drafter=runs/quickstart/train/drafter --prompt="Name five birds."
  python -m spec_jax --drafter=ngram:4-1 --temperature=0.8 --seed=3 --stop=END < question.txt
  python -m spec_jax --target=model.gguf --drafter=none --nochat --prompt="Once upon a time"

The text appears as the rounds finish; tokens that the drafter proposed and the target accepted are
green (not in a pipe, nor with NO_COLOR set). Then plain and speculative decoding run once more,
compiled already, and two lines compare them: tokens per second of the decoding proper, tau (tokens
per verification pass), and whether the text is the same.
"""

import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOBase

import numpy as np
from absl import flags

from spec_jax import command, records
from spec_jax.drafters import Drafter, load_drafter
from spec_jax.errors import UserError
from spec_jax.generate import Finished, Progress, Prompt, Run
from spec_jax.platform import configure, tune_process
from spec_jax.sampling import GREEDY_BELOW
from spec_jax.sharding import parse_mesh
from spec_jax.target import DTYPES, Target, load_target

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
# What a model writes must not steer the terminal: C0 controls but tab and newline, DEL, C1.
_CONTROLS = {i: None for i in (*range(32), *range(127, 160)) if chr(i) not in "\t\n"}


def define_flags(values: flags.FlagValues) -> None:
  """Defines the flags of this program in `values`."""
  own = {"flag_values": values}
  flags.DEFINE_string(
      "target", "demo", "demo, a Hugging Face folder, a .gguf file, or hf:org/name", **own)
  flags.DEFINE_string(
      "drafter", "ngram", "ngram, ngram:MAX-MIN, lookup:SOURCE (prompt lookup over another "
      "drafter), self, a folder that train_drafter wrote, any small model of the same tokenizer, "
      "or none for plain decoding", **own)
  flags.DEFINE_string("prompt", None, "the text; standard input by default", **own)
  flags.DEFINE_bool("chat", True, "wrap the text as a user's message in the chat template", **own)
  flags.DEFINE_string("system", None, "system message of the chat", **own)
  flags.DEFINE_integer("draft_len", 5, "tokens drafted in each round", **own)
  flags.DEFINE_float(
      "temperature", 0.0, f"0 (anything below {GREEDY_BELOW:g}) is greedy", **own)
  flags.DEFINE_float("top_p", 1.0, "keep the most probable ids up to this mass", **own)
  flags.DEFINE_integer("top_k", 0, "keep so many ids, 0 for all", **own)
  flags.DEFINE_float("min_p", 0.0, "drop ids below this share of the most probable one", **own)
  flags.DEFINE_string(
      "rule", None, "ratio, block, coupled, or typical (not lossless); at temperature 0 all are "
      "greedy", **own)
  flags.DEFINE_integer("max_new_tokens", 128, "the longest answer", **own)
  flags.DEFINE_multi_string("stop", [], "end at this text; may be given several times", **own)
  flags.DEFINE_integer("seed", 0, "of every random draw", **own)
  flags.DEFINE_string("dtype", "float32", f"compute type: {' or '.join(DTYPES)}", **own)
  flags.DEFINE_string(
      "mesh", "", "devices that the model is divided over: data,fsdp,tensor, such as 1,1,4 (-1 for "
      "all that is left as data); one device by default", **own)
  flags.DEFINE_bool("compare", True, "measure plain against speculative decoding afterwards", **own)


def parse(argv: Sequence[str], values: flags.FlagValues) -> flags.FlagValues:
  """Reads the command line.

  Raises:
    UserError: one line for whatever is wrong with it.
  """
  command.parse(argv, values)
  if values.system is not None and not values.chat:
    raise UserError("--system needs --chat")
  return values


def execute(values: flags.FlagValues, stdin: TextIOBase, out: TextIOBase) -> None:
  """Decodes and writes; the flags are those of `define_flags`.

  Raises:
    UserError: a flag has a bad value or a file is not what it should be.
  """
  text = values.prompt
  if text is None:
    if stdin.isatty():
      raise UserError("--prompt is needed, or a text on standard input")
    try:
      text = stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
      raise UserError(f"standard input is not text: {error}") from None
  if not text.strip():
    raise UserError("the prompt is empty")
  target = load_target(values.target, values.dtype, parse_mesh(values.mesh))
  drafter = None if values.drafter == "none" else load_drafter(values.drafter, target)
  start = _starter(values, target, _prompt(values, text, target))
  stream = Stream(target.tokenizer.decode, out, colours(out))
  shown = start(drafter, stream.progress)
  row = next(shown.all())
  stream.finish(row)
  if values.compare and drafter is not None:
    out.write(comparison(start, drafter, row, values))
  out.flush()


def _prompt(values: flags.FlagValues, text: str, target: Target) -> Prompt:
  if not values.chat:
    return text
  if not target.tokenizer.chat_template:
    raise UserError(f"target={values.target!r} has no chat template; use --nochat")
  system = [] if values.system is None else [{"role": "system", "content": values.system}]
  return [*system, {"role": "user", "content": text}]


def _starter(values: flags.FlagValues, target: Target, prompt: Prompt) -> Callable[..., Run]:
  def start(drafter: Drafter | None, on_round: Callable[[Progress], None] | None = None) -> Run:
    return Run(
        target, drafter, [prompt], draft_len=values.draft_len, temperature=values.temperature,
        top_p=values.top_p, top_k=values.top_k, min_p=values.min_p, rule=values.rule,
        stop=values.stop, max_new_tokens=values.max_new_tokens, seed=values.seed, batch_size=1,
        on_round=on_round)

  return start


def colours(out: TextIOBase) -> bool:
  """Whether `out` is a terminal that wants colours."""
  return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def drafted(count: int, accepted: np.ndarray, emitted: np.ndarray) -> list[bool]:
  """For each of `count` tokens of a row, whether it is an accepted draft."""
  marks = [False]  # the prefill's
  for a, e in zip(accepted, emitted, strict=True):
    marks += [place < int(a) for place in range(e)]
  return marks[:count]


class Stream:
  """Writes a row's text as it grows, accepted drafts in green.

  A character may take several tokens: text that ends in the middle of one waits for the rest.
  """

  def __init__(self, decode: Callable[[list[int]], str], out: TextIOBase, colour: bool):
    self._decode, self._out, self._colour = decode, out, colour
    self._seen, self._written = 0, 0  # tokens, characters

  def progress(self, now: Progress) -> None:
    """The row after a round."""
    self._grow(now.tokens, drafted(len(now.tokens), now.accepted, now.emitted))

  def finish(self, row: Finished) -> None:
    """The whole row; ends the line."""
    done = row.records
    self._grow(row.tokens, drafted(len(row.tokens), done.accepted, done.emitted))
    self._write(self._decode(row.tokens)[self._written:], False)  # half a character at the very end
    self._out.write("\n")
    self._out.flush()

  def _grow(self, tokens, marks):
    for n in range(self._seen + 1, len(tokens) + 1):
      text = self._decode(tokens[:n])
      if not text.endswith("\ufffd"):
        self._write(text[self._written:], marks[n - 1])
        self._written = max(self._written, len(text))
    self._seen = max(self._seen, len(tokens))
    self._out.flush()

  def _write(self, piece, accepted):
    if self._out.isatty():
      piece = piece.translate(_CONTROLS)
    if piece:
      self._out.write(f"{_GREEN}{piece}{_PLAIN}" if accepted and self._colour else piece)


def comparison(
    start: Callable[..., Run], drafter: Drafter, shown: Finished, values: flags.FlagValues) -> str:
  """Runs both ways of decoding once more, warm, and returns the two lines about them.

  Args:
    start: makes a Run of a drafter (None for plain).
    drafter: the one that was shown.
    shown: its row; its run has compiled the speculative half.
    values: the flags.
  """
  warm = start(None)
  if not warm.stop:
    warm.budgets = [min(2, n) for n in warm.budgets]  # the same shapes, so that this compiles them
  ended = next(warm.all())
  plain_run, fast_run = start(None), start(drafter)
  # A stop string is looked for every few rounds, and the rounds behind it would count as time. The
  # timed runs end by their budget, at the token where the stop ended the row.
  for run, row in ((plain_run, ended), (fast_run, shown)):
    if run.stop:
      run.stop, run.budgets = (), [len(row.tokens)]
  plain, fast = next(plain_run.all()), next(fast_run.all())
  speed = [_speed(run, row) for run, row in ((fast_run, fast), (plain_run, plain))]
  rounds = fast.records
  lines = [
      f"speculative {_figure(speed[0])} tokens/s   {drafter.name}, draft_len {values.draft_len}, "
      f"{_accepted(rounds)}",
      f"plain       {_figure(speed[1])} tokens/s   {_verdict(plain, shown, values)}"]
  if speed[0] and speed[1]:
    lines[1] += f"; speculative decoding is {speed[0] / speed[1]:.2f} times as fast"
  return "\n" + "\n".join(lines) + "\n"


def _speed(run: Run, row: Finished) -> float | None:
  """Tokens per second of the rounds: without the prefill, nor the token that comes from it."""
  return (len(row.tokens) - 1) / run.seconds["decode"] if len(row.tokens) > 1 else None


def _figure(value: float | None) -> str:
  return f"{'-':>6}" if value is None else f"{value:6.1f}"


def _accepted(row: records.RowRecords) -> str:
  if not row.rounds:
    return "no rounds"
  text = f"tau {records.tau([row]):.2f}"
  if row.proposed.any():
    text += f", {records.acceptance_rate([row]):.0%} of the drafts accepted"
  beyond = int((row.proposed == 0).sum())
  return text + (f", {beyond} plain rounds beyond the drafter's context" if beyond else "")


def _verdict(plain: Finished, shown: Finished, values: flags.FlagValues) -> str:
  if values.temperature >= GREEDY_BELOW and values.rule == "typical":
    return "typical acceptance is not lossless: its text has another law"
  if values.temperature >= GREEDY_BELOW and values.rule != "coupled":
    return "another sample of the same law"
  if plain.tokens == shown.tokens:
    return "identical text"
  pairs = zip(plain.tokens, shown.tokens, strict=False)
  same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(
      len(plain.tokens), len(shown.tokens)))
  return (f"text differs from token {same + 1} on (passes of another width round "
          "differently; the identity part of an evaluation checks that it is no more than that)")


def main() -> None:
  """The command line."""
  define_flags(flags.FLAGS)

  def run(values: flags.FlagValues) -> None:
    configure()
    execute(values, sys.stdin, sys.stdout)

  command.run(run, lambda argv: parse(argv, flags.FLAGS))


if __name__ == "__main__":
  tune_process()
  main()
