"""Reference arrays of the packages dflash and speculators for tests/interop/test_drafters.py.

Runs in the second environment (`make interop`), where this package is not installed:

    python tests/interop/reference_drafters.py OUTDIR    writes OUTDIR/drafters.npz, OUTDIR/peers/
    python tests/interop/reference_drafters.py --read TARGET FOLDERS OUT
    python tests/interop/reference_drafters.py --speculators TARGET FOLDERS OUT

The first makes random draft models of those packages beside a tiny random target, writes them as
published folders (peers/target, peers/dflash, peers/eagle3, peers/dspark), and stores what the
packages compute with them. The second computes the same arrays with drafters that a test wrote in
those forms, read by the packages themselves as far as they can: dflash by dflash and by the
converter of speculators, eagle3 by its converter, dspark, for which neither has one, tensor by
tensor. The third takes folders in the form of speculators, each by the package's own class and
`from_pretrained` (FOLDERS/dflash in the form of dflash besides). eagle3_qwen3, an EAGLE-3 layer of
Qwen3 whose residual stream is normed first, has no other form: the first writes it as speculators
itself saves it.
"""

import json
import math
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # beside a GPU speculators would compile its passes for it

import numpy as np  # noqa: E402
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from reference_llama import run, tiny_tokenizer  # noqa: E402

try:
  import dflash.model
  import loguru
  import speculators.convert
  from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
  from speculators.models.dflash import core as dflash_core
  from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
  from speculators.models.dspark import core as dspark_core
  from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig, shift_batch
  from speculators.models.eagle3 import core as eagle3_core
  from speculators.models.utils import resolve_target_layer_ids
  MISSING = ""
except ImportError as error:
  MISSING = str(error)

LAYERS = 8  # of the target
# Query heads share key heads, and are together wider than the hidden size.
SIZES = dict(hidden_size=48, intermediate_size=80, num_attention_heads=6, num_key_value_heads=2,
             head_dim=12, max_position_embeddings=256, rms_norm_eps=1e-5)
# Frequencies that the scaling moves within the few positions of the test.
SCALED = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
BLOCK, NARROW, RANK, STEPS = 6, 3, 5, 4
TEXT = 24  # tokens of the text that is decoded
ANCHORS = (1, 9, 17)  # where blocks begin in it
ROUND = (9, 12)  # anchors of two rounds one after the other
CHAINS = (4, 15)  # where eagle3 continues it
DOCUMENTS, PROMPTS, PADDING = (17, 13), (3, 2), 4  # of the packed row
TAP_CASES = [(8, 2), (8, 3), (16, 4), (28, 1), (30, 5), (36, 5), (61, 6), (80, 8)]


def randomise(model, seed):
  """Weights that keep the size of what passes through; norms that cannot be mistaken for none."""
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, value in model.named_parameters():
      if value.ndim == 1:
        value.uniform_(0.5, 1.5, generator=generator)
      else:
        wide = name.startswith(("embed", "model.embed", "markov_head.markov_w1"))
        value.normal_(generator=generator).mul_(1.0 if wide else 1.5 / math.sqrt(value.shape[1]))
  return model.eval()


# The models.


def make_target(folder):
  """A random Llama, written with a tokenizer."""
  tokenizer = tiny_tokenizer()
  config = transformers.LlamaConfig(
      **SIZES, vocab_size=len(tokenizer), num_hidden_layers=LAYERS, tie_word_embeddings=False,
      rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
  model = randomise(transformers.LlamaForCausalLM(config), 0)
  model.save_pretrained(folder)
  tokenizer.save_pretrained(folder)
  return model


def borrow(model, target, ids=None):
  """Gives a model of speculators the target's embedding, and its head to compute labels with."""
  head = target.lm_head.weight if ids is None else target.lm_head.weight[ids]
  model.embed_tokens.weight.data = target.model.embed_tokens.weight.data.clone()
  model.verifier_norm.weight.data = target.model.norm.weight.data.clone()
  model.verifier_lm_head.weight.data = head.data.clone()
  if model.config.speculators_model_type != "eagle3":  # a block drafter has no head of its own
    model.lm_head.weight.data = head.data.clone()
  return model


def layers_config(kind, **changes):
  """Of draft layers, for speculators."""
  config = kind(**SIZES, **changes, tie_word_embeddings=False)
  config._attn_implementation = "eager"  # its own default wants a compiler
  return config


def make_dflash(target):
  """The drafter as the package dflash holds it."""
  V = target.config.vocab_size
  config = transformers.Qwen3Config(
      **SIZES, vocab_size=V, num_hidden_layers=3, tie_word_embeddings=False,
      rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, block_size=BLOCK,
      num_target_layers=LAYERS, dflash_config={
          "mask_token_id": V - 1,
          "target_layer_ids": dflash.model.build_target_layer_ids(LAYERS, 3)})
  return randomise(dflash.model.DFlashDraftModel(config), 1)


def same_in_speculators(model):
  """A drafter of dflash as speculators holds it, which counts the embedding as layer 0."""
  c = model.config
  config = DFlashSpeculatorConfig(
      transformer_layer_config=layers_config(
          transformers.Qwen3Config, vocab_size=c.vocab_size, rope_parameters=c.rope_parameters,
          num_hidden_layers=c.num_hidden_layers),
      draft_vocab_size=c.vocab_size, block_size=model.block_size,
      mask_token_id=model.mask_token_id,
      aux_hidden_state_layer_ids=[i + 1 for i in model.target_layer_ids])
  other = DFlashDraftModel(config)
  left, unknown = other.load_state_dict(model.state_dict(), strict=False)
  assert not unknown and not [n for n in left if not n.startswith(("embed", "lm_head", "verifier"))]
  return other.eval()


def make_dspark(target):
  """The drafter as speculators holds it."""
  V = target.config.vocab_size
  layers = layers_config(transformers.Qwen3Config, vocab_size=V, num_hidden_layers=2,
                         rope_parameters={"rope_type": "default", "rope_theta": 20000.0})
  model = DSparkDraftModel(DSparkSpeculatorConfig(
      transformer_layer_config=layers, draft_vocab_size=V, block_size=BLOCK, mask_token_id=V - 2,
      aux_hidden_state_layer_ids=[1, 4, 7], markov_rank=RANK))
  return randomise(model, 2)


def make_eagle3(target, folder, kind=transformers.LlamaConfig, seed=3, **options):
  """The drafter as speculators holds it, with a reduced vocabulary and a head of its own."""
  V = target.config.vocab_size
  ids = torch.arange(2, V, 5)
  layers = layers_config(
      kind, vocab_size=V, num_hidden_layers=1, rope_parameters=dict(SCALED))
  model = Eagle3DraftModel(Eagle3SpeculatorConfig(
      transformer_layer_config=layers, draft_vocab_size=len(ids),
      eagle_aux_hidden_state_layer_ids=resolve_target_layer_ids(None, str(folder)), **options))
  randomise(model, seed)
  model.load_vocab_mappings(torch.isin(torch.arange(V), ids), ids - torch.arange(len(ids)))
  return model


# The published folders.


def write(folder, config, tensors):
  """config.json and model.safetensors."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
  safetensors.torch.save_file(
      {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")


def own_tensors(model, copies):
  """The state of a model of speculators, without what it keeps of the target."""
  return {name: value.clone() for name, value in model.state_dict().items()
          if not name.startswith(("verifier", *copies))}


def write_eagle3(folder, model):
  """As the trainers of SGLang write it: the layer is called midlayer, layers are counted twice."""
  c = model.config.transformer_layer_config
  after = model.config.eagle_aux_hidden_state_layer_ids
  layers = "eagle_aux_hidden_state_layer_ids"
  rope = {field: value for field, value in SCALED.items() if field != "rope_theta"}
  write(folder, {
      **SIZES, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
      "vocab_size": c.vocab_size, "draft_vocab_size": model.config.draft_vocab_size,
      "num_hidden_layers": 1, "hidden_act": "silu", "tie_word_embeddings": False,
      "rope_theta": SCALED["rope_theta"], "rope_scaling": rope, layers: after,
      "eagle_config": {layers: [j - 1 for j in after], "use_aux_hidden_state": True}}, {
          name.replace("layers.0.", "midlayer."): value
          for name, value in own_tensors(model, ["embed"]).items()})


def write_dspark(folder, model):
  """The dflash form with the fields and tensors of the tail."""
  c = model.config.transformer_layer_config
  write(folder, {
      **SIZES, "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
      "vocab_size": c.vocab_size, "num_hidden_layers": c.num_hidden_layers, "hidden_act": "silu",
      "rope_parameters": dict(c.rope_parameters), "block_size": model.config.block_size,
      "num_target_layers": LAYERS, "layer_types": ["full_attention"] * c.num_hidden_layers,
      "dflash_config": {
          "projector_type": "dspark", "mask_token_id": model.config.mask_token_id,
          "target_layer_ids": [j - 1 for j in model.config.aux_hidden_state_layer_ids],
          "markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True,
          "confidence_head_with_markov": True}}, own_tensors(model, ["embed", "lm_head"]))


def converted(folder, kind, target, target_folder, scratch):
  """A folder through the converter of speculators, and its model read from what that wrote."""
  loguru.logger.remove()
  form, model = {"dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
                 "eagle3": (Eagle3SpeculatorConfig, Eagle3DraftModel)}[kind]
  options = {}
  if kind == "eagle3":  # which the converter does not read
    fields = json.loads((folder / "config.json").read_text())
    name = "eagle_aux_hidden_state_layer_ids"
    options[name] = fields[name]
  speculators.convert.convert_model(
      str(folder), str(target_folder), kind, str(scratch / kind), **options)
  config = form.from_pretrained(str(scratch / kind))
  config.transformer_layer_config._attn_implementation = "eager"
  read = model.from_pretrained(str(scratch / kind), config=config, dtype=torch.float32).eval()
  # Under transformers 5 an embedding that the folder lacks is left as the memory was, where
  # speculators looks for NaN to fill it with the target's.
  read.embed_tokens.weight.data = target.model.embed_tokens.weight.data.clone()
  return read


def own(folder, kind):
  """A folder in the form of speculators by its own class, which takes the rest from the target that
  the folder names."""
  form, model = {"dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
                 "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
                 "eagle3": (Eagle3SpeculatorConfig, Eagle3DraftModel)}[kind]
  config = form.from_pretrained(str(folder))
  config.transformer_layer_config._attn_implementation = "eager"
  return model.from_pretrained(str(folder), config=config, dtype=torch.float32).eval()


def read_dspark(folder):
  """Tensor by tensor."""
  fields = json.loads((folder / "config.json").read_text())
  method = fields["dflash_config"]
  rope = {"rope_type": "default", "rope_theta": fields["rope_theta"]}
  layers = layers_config(
      transformers.Qwen3Config, vocab_size=fields["vocab_size"], rope_parameters=rope,
      num_hidden_layers=fields["num_hidden_layers"])
  model = DSparkDraftModel(DSparkSpeculatorConfig(
      transformer_layer_config=layers, draft_vocab_size=fields["vocab_size"],
      block_size=fields["block_size"], mask_token_id=method["mask_token_id"],
      aux_hidden_state_layer_ids=[i + 1 for i in method["target_layer_ids"]],
      markov_rank=method["markov_rank"], markov_head_type=method["markov_head_type"],
      enable_confidence_head=method["enable_confidence_head"],
      confidence_head_with_markov=method["confidence_head_with_markov"]))
  left, unknown = model.load_state_dict(
      safetensors.torch.load_file(folder / "model.safetensors"), strict=False)
  assert not unknown
  assert all(n.startswith(("embed", "lm_head", "verifier")) for n in left), left
  return model.eval()


# What they compute.


class Text(NamedTuple):
  """A text and what the target makes of it.

  Attributes:
    ids: T of them.
    hidden: its states [1, T, D], the embedding first, as transformers counts them.
    last: [1, T, D] output of the last layer, before the final norm.
    logits: [T, V].
  """

  ids: list[int]
  hidden: tuple
  last: torch.Tensor
  logits: np.ndarray


def read(target, ids):
  """The target on a text."""
  logits, last = run(target, ids, [LAYERS - 1])
  with torch.no_grad():
    hidden = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
  return Text(ids, hidden, torch.from_numpy(last), logits)


def layers_of(text):
  """Outputs [LAYERS, T, D] of the target's layers."""
  return torch.cat([*text.hidden[1:LAYERS], text.last])


def joined(text, numbers):
  """Features [1, T, F] by the numbers of speculators: the state at that place of `hidden`."""
  return torch.cat([text.hidden[j] for j in numbers], -1)


def block(target, ids, anchor, width, mask):
  """Embeddings [1, W, D] of the anchor's token and the masks behind it."""
  tokens = torch.tensor([[ids[anchor]] + [mask] * (width - 1)])
  return target.model.embed_tokens(tokens)


@torch.no_grad()
def dflash_arrays(model, target, text):
  """Blocks of the package dflash: alone, narrower, and in two rounds over one cache."""
  features = dflash.model.extract_context_feature(text.hidden, model.target_layer_ids)
  ids, mask, out = text.ids, model.mask_token_id, {}
  for name, width in (("dflash", BLOCK), ("dflash_narrow", NARROW)):
    states = torch.cat([
        model(target_hidden=features[:, :a], noise_embedding=block(target, ids, a, width, mask),
              position_ids=torch.arange(a + width)[None]) for a in ANCHORS])
    out[f"{name}_states"] = states
    out[f"{name}_logits"] = model.compute_logits(states, target.lm_head)
  cache, start = transformers.DynamicCache(), 0
  for a in ROUND:
    states = model(
        target_hidden=features[:, start:a], noise_embedding=block(target, ids, a, BLOCK, mask),
        position_ids=torch.arange(start, a + BLOCK)[None], past_key_values=cache, use_cache=True)
    cache.crop(-BLOCK)
    start = a
  out["dflash_round_states"] = states
  return out


def packed(texts):
  """One row of all documents [1, T, ...] with padding behind."""
  row = torch.cat(texts, 1)
  pad = torch.zeros((1, PADDING, *row.shape[2:]), dtype=row.dtype)
  return torch.cat([row, pad], 1)


def row_of(documents, numbers):
  """The packed row as the block drafters of speculators take it."""
  tensor = lambda values: torch.tensor([values])
  return dict(
      hidden_states=packed([joined(text, numbers) for text in documents]),
      input_ids=packed([tensor(text.ids) for text in documents]),
      loss_mask=packed([tensor([int(i >= p) for i in range(len(text.ids))])
                        for text, p in zip(documents, PROMPTS, strict=True)]),
      verifier_last_hidden_states=packed([text.last for text in documents]),
      document_ids=tensor([d for d, text in enumerate(documents) for _ in text.ids]
                          + [-1] * PADDING),
      position_ids=packed([tensor(range(len(text.ids))) for text in documents]))


def no_loss(core):
  """Keeps what a pass of speculators hands to its loss, which needs Triton and a GPU."""
  return mock.patch.object(core, "compute_metrics", return_value=(torch.zeros(()), {}))


@torch.no_grad()
def training_arrays(name, core, model, documents):
  """The training pass of a block drafter of speculators, with all anchors that it allows."""
  row = row_of(documents, model.config.aux_hidden_state_layer_ids)
  allowed = row["loss_mask"][0].bool()
  allowed[-model.block_size:] = False
  anchors = allowed.nonzero()[:, 0]
  states = []
  hook = model.norm.register_forward_hook(lambda module, args, result: states.append(result))
  with no_loss(core) as spy:
    model(**row, max_anchors=len(anchors))
  hook.remove()
  logits, targets, *rest = spy.call_args.args
  blocks = lambda x: x.reshape(len(anchors), model.block_size, *x.shape[2:])
  out = {"states": blocks(states[0]), "logits": blocks(logits), "targets": blocks(targets),
         "mask": blocks(rest[1 if name == "dspark" else 0])}
  if name == "dspark":
    out["confidence"] = blocks(rest[0])
    out["drafts"], out["draft_logits"] = chains(
        model, out["states"], row["input_ids"][0, anchors])
  return {"row_anchors": anchors} | {f"{name}_row_{key}": value for key, value in out.items()}


def chains(model, states, anchors):
  """Greedy drafts [A, W] of dspark behind each anchor, and the logits that they came from."""
  previous, drafted, scores = anchors[:, None], [], []
  for j in range(states.shape[1]):
    bias = model.markov_head.block_bias(
        prev_token_ids=previous, hidden_states=states[:, j:j + 1])
    scores.append(model.lm_head(states[:, j:j + 1]) + bias)
    previous = scores[-1].argmax(-1)
    drafted.append(previous)
  return torch.cat(drafted, 1), torch.cat(scores, 1)


@torch.no_grad()
def run_eagle3(model, **inputs):
  """Normed states, logits [J, T, .] and the labels [T, Vd] of a training-time test."""
  states = []
  hook = model.norm.register_forward_hook(lambda module, args, result: states.append(result[0]))
  with no_loss(eagle3_core) as spy:
    model(**inputs)
  hook.remove()
  calls = [call.args for call in spy.call_args_list]
  return torch.stack(states), torch.stack([args[0][0] for args in calls]), calls[0][1][0]


def eagle3_arrays(model, documents, text, name="eagle3"):
  """Training-time test over the packed row, and greedy drafts behind two places of the text."""
  numbers = model.config.eagle_aux_hidden_state_layer_ids
  parts = []
  for d, document in enumerate(documents):
    size = len(document.ids)
    part = shift_batch(dict(
        input_ids=torch.tensor(document.ids), hidden_states=joined(document, numbers)[0],
        verifier_last_hidden_states=document.last[0], lengths=torch.tensor([size]),
        loss_mask=torch.ones(size, dtype=torch.bool), position_ids=torch.arange(size)))
    del part["lengths"]
    parts.append(part | {"document_ids": torch.full_like(part["input_ids"], d)})
  row = {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}
  states, logits, targets = run_eagle3(model, **row, ttt_steps=STEPS)
  out = {f"{name}_states": states, f"{name}_logits": logits, f"{name}_targets": targets}

  # A chain of drafts is the test at one input, with the drafts as the text behind it.
  ids_of, drafted, scores = model.d2t + torch.arange(len(model.d2t)), [], []
  for place in CHAINS:
    ids = text.ids[1:place + 1]
    for j in range(STEPS):
      tokens = torch.tensor([ids + [0] * (STEPS - j)])
      size = tokens.shape[1]
      features = torch.zeros(1, size, len(numbers) * SIZES["hidden_size"])
      features[:, :place] = joined(text, numbers)[:, :place]
      _, logits, _ = run_eagle3(
          model, hidden_states=features, input_ids=tokens, ttt_steps=j + 1,
          document_ids=torch.zeros(1, size, dtype=torch.long),
          verifier_last_hidden_states=torch.zeros(1, size, SIZES["hidden_size"]))
      scores.append(logits[j, place - 1])
      ids.append(int(ids_of[scores[-1].argmax()]))
    drafted.append(ids[-STEPS:])
  return out | {f"{name}_drafts": torch.tensor(drafted),
                f"{name}_draft_logits": torch.stack(scores).reshape(len(CHAINS), STEPS, -1)}


def arrays_of(target, dflash_model, block_model, dspark, eagle3, eagle3_qwen3=None):
  """Everything, of one target and one drafter of each kind."""
  rng = np.random.default_rng(5)
  # The last ids are the masks, which no text holds.
  text, *documents = (
      read(target, rng.integers(2, target.config.vocab_size - 2, size).tolist())
      for size in (TEXT, *DOCUMENTS))
  out = {}
  for name, each in (("text", text), *((f"document_{d}", x) for d, x in enumerate(documents))):
    out |= {name: each.ids, f"{name}_layers": layers_of(each), f"{name}_logits": each.logits}
  out |= dflash_arrays(dflash_model, target, text)
  out |= training_arrays("dflash", dflash_core, block_model, documents)
  out |= training_arrays("dspark", dspark_core, dspark, documents)
  out |= eagle3_arrays(eagle3, documents, text)
  if eagle3_qwen3 is not None:
    out |= eagle3_arrays(eagle3_qwen3, documents, text, "eagle3_qwen3")
  return {name: value.numpy() if isinstance(value, torch.Tensor) else value
          for name, value in out.items()}


def facts(target_folder):
  """Settings that the test repeats, and what the packages choose by default."""
  return {
      "python": sys.executable, "anchors": ANCHORS, "narrow": NARROW, "round": ROUND,
      "chains": CHAINS, "prompts": PROMPTS, "padding": PADDING,
      "eagle3_layers": resolve_target_layer_ids(None, str(target_folder)),
      "dflash_layers": json.dumps(
          [(n, k, dflash.model.build_target_layer_ids(n, k)) for n, k in TAP_CASES])}


def main():
  transformers.utils.logging.disable_progress_bar()
  torch.set_num_threads(2)
  warnings.filterwarnings("ignore", "--target-layer-ids")  # the defaults are what is asked for
  if sys.argv[1] in ("--read", "--speculators"):
    target_folder, folders, out = map(Path, sys.argv[2:])
    target = transformers.AutoModelForCausalLM.from_pretrained(
        target_folder, dtype=torch.float32).eval()
    dflash_model = dflash.model.DFlashDraftModel.from_pretrained(
        folders / "dflash", dtype=torch.float32).eval()
    more = []
    if sys.argv[1] == "--speculators":
      loguru.logger.remove()
      block_model, eagle3, dspark = (
          own(folders / f"speculators-{kind}", kind) for kind in ("dflash", "eagle3", "dspark"))
      more = [own(folders / "speculators-eagle3_qwen3", "eagle3")]
    else:
      with tempfile.TemporaryDirectory() as scratch:
        block_model, eagle3 = (
            converted(folders / kind, kind, target, target_folder, Path(scratch))
            for kind in ("dflash", "eagle3"))
      dspark = borrow(read_dspark(folders / "dspark"), target)
    np.savez(out, **arrays_of(target, dflash_model, block_model, dspark, eagle3, *more))
    return
  out = Path(sys.argv[1])
  out.mkdir(parents=True, exist_ok=True)
  if MISSING:  # another environment than the one that the Makefile makes
    print(f"the drafters are not compared: {MISSING}")
    np.savez(out / "drafters.npz", missing=MISSING)
    return
  folder = out / "peers"
  target = make_target(folder / "target")
  dflash_model, dspark = make_dflash(target), make_dspark(target)
  eagle3 = make_eagle3(target, folder / "target")
  dflash_model.save_pretrained(folder / "dflash")
  write_dspark(folder / "dspark", dspark)
  write_eagle3(folder / "eagle3", eagle3)
  ids = eagle3.d2t + torch.arange(len(eagle3.d2t))
  eagle3_qwen3 = borrow(make_eagle3(
      target, folder / "target", transformers.Qwen3Config, 4, norm_before_residual=True),
      target, ids)
  eagle3_qwen3.save_pretrained(folder / "eagle3_qwen3")
  np.savez(out / "drafters.npz", **facts(folder / "target"), **arrays_of(
      target, dflash_model, borrow(same_in_speculators(dflash_model), target),
      borrow(dspark, target), borrow(eagle3, target, ids), eagle3_qwen3))


if __name__ == "__main__":
  main()
