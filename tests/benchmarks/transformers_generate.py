"""The other side of the benchmark: greedy `generate` of transformers, one prompt per line.

Runs in the second environment, where this package is not installed; started by
`tests.benchmarks.bench`:

    python tests/benchmarks/transformers_generate.py MODEL

MODEL is a .gguf file or a folder, computed in float32. It answers `ready`, then each line
`go {"ids": [...], "new_tokens": n}` with {"seconds": s, "tokens": [...]}; an empty line ends it.
"""

import json
import os
import sys
import time

import torch
import transformers


def load(model: str):
  """The model in float32, from a GGUF file or a folder."""
  transformers.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  folder, options = model, {}
  if model.endswith(".gguf"):
    folder, name = os.path.split(model)
    options = {"gguf_file": name}
  loaded = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32, **options)
  kinds = {parameter.dtype for parameter in loaded.parameters()}
  if kinds != {torch.float32}:
    raise SystemExit(f"the weights are {kinds}, not float32")
  loaded.generation_config = transformers.GenerationConfig(do_sample=False)
  return loaded.eval()


def main() -> None:
  """Answers lines until an empty one."""
  model = load(sys.argv[1])
  print("ready", flush=True)
  for line in sys.stdin:
    word, _, job = line.strip().partition(" ")
    if word != "go":
      break
    job = json.loads(job)
    ids = torch.tensor([job["ids"]])
    clock = time.perf_counter()
    with torch.inference_mode():
      out = model.generate(
          ids, attention_mask=torch.ones_like(ids), max_new_tokens=job["new_tokens"],
          do_sample=False)
    seconds = time.perf_counter() - clock
    print(json.dumps({"seconds": seconds, "tokens": out[0, ids.shape[1]:].tolist()}), flush=True)


if __name__ == "__main__":
  main()
