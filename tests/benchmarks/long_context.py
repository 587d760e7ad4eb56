"""Prompts with a warm long context, made of a run's own evaluation: earlier turns of the same kind,
answered by the target, and a new question behind them.

  python -m tests.benchmarks.long_context --workdir=runs/eagle3 --out=long.jsonl
  python -m train_drafter --config=... --workdir=runs/eagle3 --stage=evaluate --overwrite \
    --config.evaluate.path=long.jsonl --config.evaluate.temperatures="(0.0,)"

The run must have evaluated its drafter at T=0: those texts are the target's greedy answers.
"""

import json
from pathlib import Path

from absl import flags

import spec_jax
from spec_jax import command, platform
from spec_jax.errors import UserError
from spec_jax.generate import encode_prompt
from spec_jax.target import Target
from train_drafter import report
from train_drafter.generate import read_jsonl

flags.DEFINE_string("workdir", "", "folder of a run whose evaluate stage has finished")
flags.DEFINE_string("prompts", "", "its evaluation prompts, if of another file")
flags.DEFINE_string("drafter", "eagle3", "whose records at T=0 are read")
flags.DEFINE_string("target", "demo", "the target of the run")
flags.DEFINE_integer("tokens", 4000, "length of a prompt, at least", 1)
flags.DEFINE_integer("each", 1, "long prompts of every category", 1)
flags.DEFINE_string("out", "long.jsonl", "where they go, one a line")


def conversations(
    prompts: list[dict], answers: dict[str, str], target: Target, tokens: int, each: int,
) -> list[dict]:
  """Conversations of at least `tokens` tokens that end in a question.

  Args:
    prompts: evaluation prompts (id, category, messages).
    answers: text of the target by id.
    target: for tokenizer and chat template.
    tokens: least length with the generation prompt.
    each: conversations of every category with enough prompts.

  Returns:
    Lines with id, category and messages; the questions of one are no turns of another.

  Raises:
    UserError: no category has enough prompts.
  """
  by_category: dict[str, list[dict]] = {}
  for prompt in prompts:
    if prompt["id"] in answers:
      by_category.setdefault(prompt["category"], []).append(prompt)
  out = []
  for category, members in by_category.items():
    waiting = iter(members)
    for number in range(each):
      turns: list[dict] = []
      for prompt in waiting:
        # A system text in the middle of a conversation is not of the templates' form.
        asked = [m for m in prompt["messages"] if m["role"] != "system"]
        if len(encode_prompt(target, [*turns, *asked], 0)) >= tokens:
          out.append({"id": f"long-{category}-{number}", "category": category,
                      "messages": [*turns, *asked]})
          break
        turns += [*asked, {"role": "assistant", "content": answers[prompt["id"]]}]
  if not out:
    raise UserError(f"no category has prompts and answers for {tokens} tokens")
  return out


def execute(values: flags.FlagValues) -> None:
  """The command behind its flags."""
  platform.configure()
  workdir = Path(values.workdir)
  target = spec_jax.load_target(values.target)
  records = report.load_records(
      workdir / "evaluate" / "parts" / f"{values.drafter}-T0-greedy.jsonl")
  answers = {row["id"]: target.tokenizer.decode(row["tokens"])
             for row in records[values.drafter][0.0, "greedy"]}
  prompts = read_jsonl(Path(values.prompts or workdir / "prompts" / "eval.jsonl"))
  found = conversations(prompts, answers, target, values.tokens, values.each)
  Path(values.out).write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
  print(f"{len(found)} prompts of {values.tokens} tokens or more: {values.out}")


if __name__ == "__main__":
  command.run(execute, lambda argv: command.parse(argv, flags.FLAGS))
