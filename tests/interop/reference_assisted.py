"""Assisted generation of transformers for tests/interop/test_assisted.py.

Runs in the second environment (`make interop`), where this package is not installed:

    python tests/interop/reference_assisted.py OUTDIR           writes OUTDIR/assisted.npz
    python tests/interop/reference_assisted.py --read TARGET DRAFTER PROMPTS OUT

The first notes the interpreter. The second decodes prompts (JSON: id lists, and how many tokens to
add to each) greedily with `generate(assistant_model=...)` and a drafter's folder as it was
exported, its generation_config.json included; it stores text, drafts proposed and drafts accepted
in each round.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.generation.candidate_generator import AssistedCandidateGenerator

ROUNDS = []  # (proposed, accepted) of the decode that runs
_update = AssistedCandidateGenerator.update_candidate_strategy
_crop = AssistedCandidateGenerator._update_past_and_masks


def note(self, input_ids, scores, num_matches):
  ROUNDS.append((scores.shape[1] - 1, int(num_matches)))
  return _update(self, input_ids, scores, num_matches)


def crop_to_text(self, input_ids, remove_from_pkv=0, num_added_tokens=1):
  """Removes from the drafter's cache what the target refused.

  transformers 5.15.0 removes one entry whatever was refused, since `Cache.crop` counts what to
  remove and no longer what to keep: the drafter is then asked for the keys of no token at all, and
  its first projection fails ("cannot reshape tensor of 0 elements").
  """
  cache = self.assistant_kwargs.get("past_key_values")
  held = 0 if cache is None else cache.get_seq_length()
  beyond = max(held - (input_ids.shape[-1] - 1), 0)
  return _crop(self, input_ids, beyond - num_added_tokens, num_added_tokens)


def main():
  transformers.utils.logging.disable_progress_bar()
  torch.set_num_threads(2)
  if sys.argv[1] != "--read":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    np.savez(out / "assisted.npz", python=sys.executable, version=transformers.__version__)
    return
  target, drafter = (
      transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
      for folder in sys.argv[2:4])
  settings = drafter.generation_config
  assert settings.num_assistant_tokens_schedule == "constant"
  assert settings.assistant_confidence_threshold == 0
  AssistedCandidateGenerator.update_candidate_strategy = note
  AssistedCandidateGenerator._update_past_and_masks = crop_to_text
  found = []
  for ids, count in json.loads(Path(sys.argv[4]).read_text()):
    ROUNDS.clear()
    out = target.generate(torch.tensor([ids]), assistant_model=drafter, do_sample=False,
                          max_new_tokens=count)
    plain = target.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=count)
    found.append({"tokens": out[0, len(ids):].tolist(), "plain": plain[0, len(ids):].tolist(),
                  "rounds": list(ROUNDS)})
  Path(sys.argv[5]).write_text(json.dumps(found))


if __name__ == "__main__":
  main()
