"""A tiny target folder and a config that runs every stage on it in seconds."""

import json
from pathlib import Path

from spec_jax.weights.safetensors import write_folder
from tests import tiny
from tests.weights import toy
from train_drafter.config import Config
from train_drafter.templates import CATEGORIES

WORDS = ("hello user", "tell us the time", "1212 and more", "sell the shell", "use her hello",
         "list the users", "set a timer", "the well")


def write_target(folder: Path) -> Path:
  """A random Llama with the toy tokenizer and its chat template."""
  config = tiny.config(
      vocab_size=len(toy.vocabulary()), num_layers=3, max_position=256, bos_id=0, eos_ids=(2,))
  write_folder(folder, config, tiny.tensors(config), toy.tokenizer())
  return folder


def write_prompts(path: Path, count: int, word: str, categories=CATEGORIES) -> Path:
  """Short user messages, one of each category in turn."""
  rows = [{"id": f"{word}-{i}", "category": categories[i % len(categories)],
           "messages": [{"role": "user", "content": f"{word} {i}: {WORDS[i % len(WORDS)]}"}]}
          for i in range(count)]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def make_config(root: Path) -> Config:
  """Writes target and prompts below `root`; returns a config that uses them."""
  cfg = Config()
  cfg.target.source = str(write_target(root / "target"))
  cfg.target.dtype = "float32"
  cfg.prompts.path = str(write_prompts(root / "train.jsonl", 24, "ask"))
  cfg.prompts.eval_path = str(write_prompts(root / "eval.jsonl", 6, "exam", CATEGORIES[:3]))
  cfg.prompts.count = 0
  cfg.generate.max_new_tokens = 16
  cfg.generate.batch_size = 8
  cfg.drafter.init_layers = (0, 2)
  cfg.drafter.draft_vocab = 192
  cfg.train.steps = 6
  cfg.train.batch_rows, cfg.train.seq_len, cfg.train.chunk = 2, 64, 32
  cfg.generate.max_prompt_tokens = 63
  cfg.train.validation, cfg.train.eval_every = 4, 2
  cfg.train.dtype = "float32"
  cfg.evaluate.draft_len, cfg.evaluate.more_draft_lens = 3, (1,)
  cfg.evaluate.batch_sizes, cfg.evaluate.contexts = (1, 2), (32, 64)
  cfg.evaluate.self_prompts = 2
  cfg.evaluate.dtype = cfg.evaluate.drafter_dtype = "float32"
  cfg.evaluate.speed_dtypes = ("float32",)
  cfg.evaluate.max_new_tokens = 16
  cfg.evaluate.batch_size = 4
  cfg.evaluate.untrained_per_category = 1
  cfg.evaluate.speed_prompts = 3
  cfg.export.prompts = 2
  return cfg
