"""Reference arrays of transformers for tests/interop/test_llama.py.

Runs in the second environment (`make interop`), where this package is not installed:

    python tests/interop/reference_llama.py OUTDIR               writes OUTDIR/llama.npz and models
    python tests/interop/reference_llama.py --logits FOLDER IDS OUT   logits of a folder, in float32

The first writes, of a tiny random Llama (grouped-query attention, llama3 rotary scaling, untied
head; also cut into shards, and in bfloat16) and of the demo model in SPEC_JAX_DEMO_GGUF: token ids,
logits and the outputs of a few layers. The second lets a test hand back a folder it wrote.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

TEXTS = [
    "The quick brown fox",
    "It's 1234567 o'clock, isn't it? 3.14159",
    "  two spaces\n\n\tand a tab   \n",
    "def f(x):\n    return {'a': x[0] ** 2}  # ok",
    "Zürich → 東京 🙂 naïve café",
    "",
    " ",
]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Answer in JSON."},
     {"role": "user", "content": "List 12 primes."},
     {"role": "assistant", "content": "[2, 3, 5]"},
     {"role": "user", "content": "More\nplease. "}],
]
TAPS = {"tiny": [0, 1, 2], "demo": [0, 15, 29]}
TEMPLATE = (
    "{%- for m in messages %}\n  {%- if m.role == 'x' %}\n    {{- raise_exception('x') }}\n"
    "  {%- endif %}\n{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ bos_token }}{{ [m0] | tojson }}{% endif %}"
).replace("m0", "messages[0]")


def tiny_tokenizer():
  """Byte-level with a few merges and two control tokens."""
  specials = ["<|im_start|>", "<|im_end|>"]
  merges = [("h", "e"), ("t", "he"), ("i", "n"), ("1", "2"), ("\u0120", "a")]
  letters = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokens = specials + letters + [a + b for a, b in merges]
  backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(specials)
  return transformers.PreTrainedTokenizerFast(
      tokenizer_object=backend, bos_token=specials[0], eos_token=specials[1],
      chat_template=TEMPLATE)


def tiny_model():
  """A random Llama whose rotary scaling matters within the few positions of the test."""
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
      vocab_size=320, hidden_size=64, intermediate_size=112, num_hidden_layers=3,
      num_attention_heads=8, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
      rms_norm_eps=1e-6, tie_word_embeddings=False, bos_token_id=0, eos_token_id=[1, 5],
      initializer_range=0.2,
      rope_parameters={
          "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32})
  model = transformers.LlamaForCausalLM(config).eval()
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      if "norm" in name:  # ones would hide a norm that is not applied
        parameter.uniform_(0.5, 1.5)
  return model


@torch.no_grad()
def run(model, ids, taps):
  """Logits [T, V] and the outputs of some layers [taps, T, D]."""
  outputs = {}

  def keep(i):
    def hook(module, args, result):
      outputs[i] = result[0] if isinstance(result, tuple) else result
    return hook

  handles = [model.model.layers[i].register_forward_hook(keep(i)) for i in taps]
  logits = model(torch.tensor([ids])).logits[0].float().numpy()
  for handle in handles:
    handle.remove()
  return logits, np.stack([outputs[i].reshape(len(ids), -1).float().numpy() for i in taps])


def text_ids(tokenizer):
  """Ids of TEXTS and CHATS, as JSON."""
  return json.dumps({
      "texts": [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS],
      "chats": [tokenizer.apply_chat_template(
          chat, add_generation_prompt=True, tokenize=True, return_dict=False) for chat in CHATS],
      "rendered": [tokenizer.apply_chat_template(
          chat, add_generation_prompt=True, tokenize=False) for chat in CHATS],
  })


def write(out):
  """Everything of the first form."""
  arrays = {"python": sys.executable, "texts": json.dumps(TEXTS), "chats": json.dumps(CHATS)}

  model, tokenizer = tiny_model(), tiny_tokenizer()
  for name, changes in (("single", {}), ("sharded", {"max_shard_size": "60KB"})):
    model.save_pretrained(out / f"llama_{name}", **changes)
    tokenizer.save_pretrained(out / f"llama_{name}")
  # Longer than the original context of the scaling.
  ids = np.random.default_rng(0).integers(0, 320, size=80).tolist()
  arrays["tiny_ids"] = ids
  arrays["tiny_logits"], arrays["tiny_layers"] = run(model, ids, TAPS["tiny"])
  arrays["tiny_text_ids"] = text_ids(tokenizer)
  model.to(torch.bfloat16).save_pretrained(out / "llama_bfloat16")
  tokenizer.save_pretrained(out / "llama_bfloat16")
  # Rounded weights, float32 arithmetic. Loaded again: the cast rounded the rotary table as well.
  model = transformers.AutoModelForCausalLM.from_pretrained(
      out / "llama_bfloat16", dtype=torch.float32).eval()
  arrays["bfloat16_logits"], _ = run(model, ids, [0])

  if gguf_path := os.environ.get("SPEC_JAX_DEMO_GGUF"):
    folder, file = os.path.split(gguf_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32).eval()
    arrays["demo_text_ids"] = text_ids(tokenizer)
    ids = json.loads(arrays["demo_text_ids"])["chats"][1]
    arrays["demo_ids"] = ids
    arrays["demo_logits"], arrays["demo_layers"] = run(model, ids, TAPS["demo"])
  arrays["taps"] = json.dumps(TAPS)
  np.savez(out / "llama.npz", **arrays)


def main():
  transformers.utils.logging.disable_progress_bar()
  torch.set_num_threads(2)
  if sys.argv[1] == "--logits":
    folder, ids, out = sys.argv[2:]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = np.load(ids).tolist()
    logits, _ = run(model, ids, [0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    np.savez(out, logits=logits, text_ids=text_ids(tokenizer))
  else:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    write(out)


if __name__ == "__main__":
  main()
