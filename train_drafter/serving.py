"""How an exported drafter is run, by format: the command of the server that reads the folder.

The export stage prints it and the model card (card.py) holds it. The flags are those of vLLM
(`--speculative-config`), SGLang (`--speculative-*`), transformers (`assistant_model`), the packages
dflash and EAGLE, and of this project.
"""

import json
import shlex

from spec_jax.errors import UserError

_VLLM = {"small_lm": "draft_model", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
# Names stand in double quotes, as JSON writes them: the shell quotes the whole by single ones.
_ASSISTED = """\
import torch, transformers as t
name, draft = {target}, {folder}
tokenizer = t.AutoTokenizer.from_pretrained(name)
target, drafter = (t.AutoModelForCausalLM.from_pretrained(n, dtype=torch.float32)
                   for n in (name, draft))
ids = tokenizer.apply_chat_template([{{"role": "user", "content": "Name five birds."}}],
                                    add_generation_prompt=True, return_tensors="pt",
                                    return_dict=True)
out = target.generate(**ids, assistant_model=drafter, do_sample=False, max_new_tokens=128)
print(tokenizer.decode(out[0]))"""
_EAGLE = """\
from eagle.model.ea_model import EaModel
model = EaModel.from_pretrained(base_model_path={target}, ea_model_path={folder},
                                use_eagle3=True, total_token=-1, torch_dtype="auto",
                                device_map="auto")
ids = model.get_tokenizer()("Name five birds.", return_tensors="pt").input_ids.cuda()
print(model.get_tokenizer().decode(model.eagenerate(ids, temperature=0, max_new_tokens=128)[0]))"""


def command(kind: str, form: str, folder: str, target: str, draft_len: int) -> str:
  """The command that serves a target with an exported drafter.

  Args:
    kind: of the drafter.
    form: hf, sglang, vllm or speculators.
    folder: where the drafter lies.
    target: as the server names it.
    draft_len: K.

  Raises:
    UserError: the form does not hold this kind.
  """
  if kind == "small_lm" and form == "speculators":
    raise UserError("export.format='speculators' holds no small_lm; hf, vllm and sglang do")
  if form == "speculators":  # the folder names its target and its K
    return shlex.join(["vllm", "serve", folder])
  if form == "vllm":
    config = {"method": _VLLM[kind], "model": folder, "num_speculative_tokens": draft_len}
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(config)])
  if form == "sglang":
    return _sglang(kind, folder, target, draft_len)
  return _published(kind, folder, target, draft_len)


def own_command(folder: str, target: str, draft_len: int) -> str:
  """The same with this project, whatever the form."""
  return shlex.join(["python", "-m", "spec_jax", f"--target={target}", f"--drafter={folder}",
                     f"--draft_len={draft_len}", "--prompt=Name five birds."])


def _sglang(kind, folder, target, draft_len):
  names = {"small_lm": "STANDALONE", "eagle3": "EAGLE3", "dflash": "DFLASH", "dspark": "DSPARK"}
  out = ["python", "-m", "sglang.launch_server", "--model-path", target,
         "--speculative-algorithm", names[kind], "--speculative-draft-model-path", folder]
  chain = {"--speculative-num-steps": draft_len, "--speculative-eagle-topk": 1}
  verified = {"--speculative-num-draft-tokens": draft_len + 1}  # the last committed one too
  more = {"small_lm": chain | verified, "eagle3": chain | verified, "dflash": verified,
          "dspark": {"--speculative-dspark-block-size": draft_len}}[kind]
  return shlex.join([*out, *(str(x) for pair in more.items() for x in pair)])


def _published(kind, folder, target, draft_len):
  """With what the authors of the method publish; there is none of DSpark that reads this form."""
  if kind in ("small_lm", "eagle3"):
    program = {"small_lm": _ASSISTED, "eagle3": _EAGLE}[kind]
    return shlex.join(["python", "-c", program.format(
        target=json.dumps(target, ensure_ascii=False),
        folder=json.dumps(folder, ensure_ascii=False))])
  if kind == "dflash":
    return shlex.join(["dflash", "generate", "transformers", "--model", target, "--draft", folder,
                       "--block-size", str(draft_len + 1), "Name five birds."])
  return own_command(folder, target, draft_len)
