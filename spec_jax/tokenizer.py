"""Text to ids and back, and the chat template. Used by the API, the shell and the data stages.

The byte-pair encoding is the `tokenizers` library's and the template engine is jinja2's; this file
says how either source (a Hugging Face folder or the metadata of a GGUF file) sets them up, and
keeps one promise that neither gives: text written by a user never becomes a control id.
"""

import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from spec_jax.chat_template import Guard, any_of, compile_template, read_template
from spec_jax.errors import UserError

# GGUF `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 3, 4, 5, 6
_SPACE = "\u2581"  # what SentencePiece writes for a space
# Tokens that end a turn in the chat templates that use them; files often name the end of a text
# alone.
_TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>")

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_LLAMA3 = [
    pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_SPLIT), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
]
_QWEN2 = [  # of Llama 3, with digits one by one
    pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_SPLIT.replace("{1,3}", "")), "isolated"),
    _LLAMA3[1],
]
# GGUF `tokenizer.ggml.pre` -> (pre-tokenizers, a whole word of the vocabulary skips the merges,
# BOS is added where the file does not say).
_PRE = {
    "gpt-2": ([_BYTES], False, False),
    "gpt2": ([_BYTES], False, False),
    "llama-bpe": (_LLAMA3, True, True),
    "qwen2": (_QWEN2, False, False),
    "smollm": ([_DIGITS, _BYTES], False, False),
}

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
  """A `tokenizers.Tokenizer` with its chat template and its special ids.

  Attributes:
    vocab_size: R, one above the largest id.
    bos_id, pad_id: -1 for none.
    eos_ids: every id that ends a sequence, the tokenizer's own first.
    adds_bos: the tokenizer puts BOS before a text (`encode(..., add_special=True)`).
    chat_template: jinja source, "" for none.
  """

  def __init__(
      self,
      backend: tokenizers.Tokenizer,
      *,
      chat_template: str = "",
      bos_id: int = -1,
      eos_ids: Sequence[int] = (),
      pad_id: int = -1,
  ):
    backend.no_padding()
    backend.no_truncation()
    self._special = backend
    # The same tokenizer, reading the spelling of a control token as ordinary text.
    self._plain = copy.deepcopy(backend)
    self._plain.encode_special_tokens = True
    self.chat_template = chat_template
    self.bos_id, self.eos_ids, self.pad_id = bos_id, tuple(dict.fromkeys(eos_ids)), pad_id
    vocabulary = backend.get_vocab(with_added_tokens=True)
    self.vocab_size = max(vocabulary.values()) + 1
    strings = [f"[no token {i}]" for i in range(self.vocab_size)]
    for string, i in vocabulary.items():
      strings[i] = string
    self._strings = strings
    added = backend.get_added_tokens_decoder()
    self.control_ids = frozenset(i for i, token in added.items() if token.special)
    for name, i in (("bos", bos_id), ("pad", pad_id), *(("eos", i) for i in self.eos_ids)):
      if not -1 <= i < self.vocab_size:
        raise UserError(f"tokenizer: {name} id {i} is outside its {self.vocab_size} tokens")
    self.adds_bos = bos_id >= 0 and bos_id in backend.encode("", add_special_tokens=True).ids[:1]
    self._controls = [strings[i] for i in sorted(self.control_ids)]
    self._control_pattern = re.compile(any_of(self._controls))

  @classmethod
  def from_folder(cls, folder: str | Path) -> "Tokenizer":
    """Reads the tokenizer files of a Hugging Face folder.

    `eos_ids` is the union of the EOS of `tokenizer_config.json`, `config.json` and
    `generation_config.json`: chat models often name the end of turn in one of them only.

    Raises:
      UserError: a missing or unreadable file, by name.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
      raise UserError(f"{path} does not exist (only folders with a tokenizer.json are read)")
    try:
      backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
      raise UserError(f"{path} is not a tokenizer: {error}") from None
    config = _read_json(folder / "tokenizer_config.json")
    template = read_template(folder, config)

    def special(name: str) -> int:
      token = config.get(name)
      token = token.get("content") if isinstance(token, dict) else token
      if token is None:
        return -1
      i = backend.token_to_id(token) if isinstance(token, str) else None
      if i is None:
        raise UserError(f"{folder / 'tokenizer_config.json'}: {name}={token!r} is not a token")
      return i

    eos = [i for i in (special("eos_token"),) if i >= 0]
    bos, pad = special("bos_token"), special("pad_token")
    for name in ("config.json", "generation_config.json"):
      other = _read_json(folder / name)
      ids = other.get("eos_token_id")
      several = ids if isinstance(ids, list) else [] if ids is None else [ids]
      for key, i in (("bos_token_id", other.get("bos_token_id")),
                     ("pad_token_id", other.get("pad_token_id")),
                     *(("eos_token_id", i) for i in several)):
        if i is not None and type(i) is not int:
          raise UserError(f"{folder / name}: {key}={i!r} is no id")
      eos += several
      bos = _first(bos, other.get("bos_token_id"))
      pad = _first(pad, other.get("pad_token_id"))
    return cls(backend, chat_template=template, bos_id=bos, eos_ids=eos, pad_id=pad)

  @classmethod
  def from_gguf(cls, reader: Any, chat_template: str = "") -> "Tokenizer":
    """Builds the tokenizer from the metadata of a `gguf.GGUFReader`.

    Trailing tokens of type UNUSED are padding of the embedding and are left out. Where no end of
    turn is stated, it is the token by which the chat template ends one, if that is a common one.

    Args:
      reader: of the file.
      chat_template: in place of the file's; "" for that one.

    Raises:
      UserError: a kind of tokenizer or pre-tokenizer that is not known, by name.
    """

    def get(name: str, default: Any = None) -> Any:
      field = reader.fields.get(f"tokenizer.{name}")
      return default if field is None else field.contents()

    model, pre = get("ggml.model"), get("ggml.pre", "(none)")
    pieces = model == "llama"  # SentencePiece
    if model != "gpt2" and not pieces:
      raise UserError(f"tokenizer.ggml.model={model!r} is not supported (only 'gpt2' and 'llama', "
                      "byte-pair)")
    if not pieces and (not isinstance(pre, str) or pre not in _PRE):
      raise UserError(f"tokenizer.ggml.pre={pre!r} is not supported (known: {', '.join(_PRE)})")
    default_bos = pieces or _PRE[pre][2]
    ranks = "scores" if pieces else "merges"
    strings, kinds, merges = get("ggml.tokens"), get("ggml.token_type"), get(f"ggml.{ranks}")
    for name, value in (("tokens", strings), ("token_type", kinds), (ranks, merges)):
      if not value or not isinstance(value, list):
        raise UserError(f"GGUF file has no tokenizer.ggml.{name} (a list)")
    if len(kinds) != len(strings):
      raise UserError(f"tokenizer.ggml.token_type has {len(kinds)} entries for "
                      f"{len(strings)} tokens")
    real = len(strings)
    while real and kinds[real - 1] == _UNUSED:
      real -= 1
    strings, kinds = strings[:real], kinds[:real]
    for name in ("ggml.bos_token_id", "ggml.unknown_token_id"):
      if not isinstance(value := get(name, -1), int) or value >= real:
        raise UserError(f"tokenizer.{name}={value!r} is none of the ids 0..{real - 1}")
    vocabulary = {string: i for i, string in enumerate(strings)}
    if len(vocabulary) != real:
      raise UserError("tokenizer.ggml.tokens names a token twice")
    if pieces:
      unknown = get("ggml.unknown_token_id", -1)
      backend = _sentencepiece(
          vocabulary, dict(zip(strings, merges, strict=False)), kinds,
          strings[unknown] if unknown >= 0 else None, get("ggml.add_space_prefix", True))
    else:
      backend = _byte_level(vocabulary, merges, pre)
    added = [AddedToken(s, special=k == _CONTROL, normalized=False)
             for s, k in zip(strings, kinds, strict=True) if k in (_CONTROL, _USER_DEFINED)]
    backend.add_tokens([token for token in added if not token.special])
    backend.add_special_tokens([token for token in added if token.special])
    bos = get("ggml.bos_token_id", -1)
    post = [] if pieces else [processors.ByteLevel(trim_offsets=False)]
    if get("ggml.add_bos_token", default_bos) and bos >= 0:
      post.append(processors.TemplateProcessing(
          single=f"{strings[bos]} $A", special_tokens=[(strings[bos], bos)]))
    if post:
      backend.post_processor = processors.Sequence(post)
    template = chat_template or get("chat_template", "")
    eos = [get(f"ggml.{name}_token_id", -1) for name in ("eos", "eot", "eom")]
    if eos[1] < 0:
      eos += [vocabulary[end] for end in _TURN_ENDS if end in vocabulary and end in template]
    return cls(
        backend,
        chat_template=template,
        bos_id=bos,
        eos_ids=[i for i in eos if i >= 0],
        pad_id=get("ggml.padding_token_id", -1),
    )

  def save(self, folder: str | Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` (with the chat template)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    self._special.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the class that takes tokenizer.json as is
        "clean_up_tokenization_spaces": False,
        **self._special_strings(),
    }
    if self.chat_template:
      config["chat_template"] = self.chat_template
    text = json.dumps(config, ensure_ascii=False, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

  def encode(
      self, text: str, add_special: bool = False, parse_special: bool = False
  ) -> list[int]:
    """Ids of a text.

    Args:
      text: any string.
      add_special: BOS in front, when the tokenizer wants one and the text does not bring it.
      parse_special: the spelling of a control token is that token. Off for text a user wrote.
    """
    if parse_special:
      ids = self._special.encode(_whole(text), add_special_tokens=False).ids
    else:
      ids = self._encode_plain(text)
    return self._one_bos(ids) if add_special and self.adds_bos else ids

  def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
    """Text of ids; control tokens are left out unless `skip_special` is False."""
    return self._special.decode([int(i) for i in ids], skip_special_tokens=skip_special)

  def id_to_token(self, i: int) -> str:
    """The vocabulary's spelling of one id (byte-level letters, not text)."""
    return self._strings[i]

  def token_strings(self) -> list[str]:
    """The spelling of every id, in order."""
    return list(self._strings)

  def apply_chat(
      self,
      messages: Sequence[Mapping[str, Any]],
      *,
      add_generation_prompt: bool = True,
      **template_args: Any,
  ) -> str:
    """Renders the chat template.

    Args:
      messages: dicts with "role" and "content".
      add_generation_prompt: end with the header of the assistant's turn.
      **template_args: passed to the template (tools, documents, enable_thinking, ...).

    Raises:
      UserError: there is no template, it does not compile, or it refuses the messages.
    """
    if not self.chat_template:
      raise UserError("the tokenizer has no chat template")
    try:
      return compile_template(self.chat_template).render(
          messages=[dict(message) for message in messages],
          add_generation_prompt=add_generation_prompt,
          **self._special_strings() | {"tools": None, "documents": None} | template_args,
      )
    except jinja2.TemplateError as error:
      raise UserError(f"chat template: {error}") from None
    except (TypeError, KeyError) as error:  # null content, a missing field
      raise UserError(f"chat template cannot render the messages: {error}") from None

  def encode_chat(
      self,
      messages: Sequence[Mapping[str, Any]],
      *,
      add_generation_prompt: bool = True,
      **template_args: Any,
  ) -> list[int]:
    """Ids of a rendered chat; control ids come from the template alone, with one BOS in front.

    Messages without the spelling of a control token encode exactly as the whole rendering does.
    Otherwise those spellings travel through the template as placeholders, the rendering is cut at
    the template's own control tokens, and what lies between is encoded as ordinary text.
    """
    guard = Guard(self._controls)
    args = {key: guard.hide(value) if key in ("tools", "documents") else value
            for key, value in template_args.items()}
    text = self.apply_chat([guard.hide(message) for message in messages],
                           add_generation_prompt=add_generation_prompt, **args)
    if not guard.hidden:
      ids = self.encode(text, parse_special=True)
    else:
      ids, position = [], 0
      for match in self._control_pattern.finditer(text):
        ids += self._encode_plain(guard.reveal(text[position:match.start()]))
        ids.append(self._special.token_to_id(match.group()))
        position = match.end()
      ids += self._encode_plain(guard.reveal(text[position:]))
    return self._one_bos(ids)

  def hash(self) -> str:
    """SHA-256 of everything that decides how text becomes ids."""
    return hashlib.sha256(self._special.to_str().encode()).hexdigest()

  def template_hash(self) -> str:
    """SHA-256 of the chat template."""
    return hashlib.sha256(self.chat_template.encode()).hexdigest()

  def _special_strings(self) -> dict[str, str]:
    ids = {"bos_token": self.bos_id, "pad_token": self.pad_id,
           "eos_token": self.eos_ids[0] if self.eos_ids else -1}
    return {name: self._strings[i] for name, i in ids.items() if i >= 0}

  def _encode_plain(self, text: str) -> list[int]:
    if not text:
      return []
    ids = self._plain.encode(_whole(text), add_special_tokens=False).ids
    if self.control_ids.isdisjoint(ids):
      return ids
    # A model that looks whole words up (ignore_merges) finds a control token's spelling too; such
    # a word is encoded letter by letter. An id that is still control is the unknown token's.
    safe = []
    for i in ids:
      if i in self.control_ids and self._strings[i] in text:
        for letter in self._strings[i]:
          safe += self._plain.encode(letter, add_special_tokens=False).ids
      else:
        safe.append(i)
    return safe

  def _one_bos(self, ids: list[int]) -> list[int]:
    if self.bos_id < 0:
      return ids
    if self.adds_bos:
      ids = [self.bos_id, *ids]
    while ids[:2] == [self.bos_id, self.bos_id]:
      ids = ids[1:]
    return ids


def _byte_level(
    vocabulary: dict[str, int], merges: Sequence[str], pre: str) -> tokenizers.Tokenizer:
  """Byte-pair encoding over byte-level letters, split by the rule `pre`."""
  splitters, ignore_merges, _ = _PRE[pre]
  # A token may hold a space only as its first byte-level letter, so one split is enough.
  pairs = [tuple(merge.split(" ", 1)) for merge in merges]
  try:
    bpe = models.BPE(vocabulary, pairs, ignore_merges=ignore_merges)
  except Exception as error:
    raise UserError(f"tokenizer.ggml.merges do not fit the tokens: {error}") from None
  backend = tokenizers.Tokenizer(bpe)
  if pre == "qwen2":
    backend.normalizer = normalizers.NFC()
  backend.pre_tokenizer = pre_tokenizers.Sequence(splitters)
  backend.decoder = decoders.ByteLevel()
  return backend


def _sentencepiece(
    vocabulary: dict[str, int], scores: Mapping[str, float], kinds: Sequence[int],
    unknown: str | None, prefix: bool) -> tokenizers.Tokenizer:
  """SentencePiece's byte-pair encoding: of two neighbours, those join whose union scores highest.

  As merges in that order; letters that the vocabulary lacks become its byte tokens.
  """
  whole = {s for s, i in vocabulary.items() if kinds[i] not in (_CONTROL, _USER_DEFINED, _BYTE)}
  pairs = [(s[:k], s[k:]) for s in whole for k in range(1, len(s))
           if s[:k] in whole and s[k:] in whole]
  pairs.sort(key=lambda pair: (-scores[pair[0] + pair[1]], vocabulary[pair[0] + pair[1]],
                               len(pair[0])))
  backend = tokenizers.Tokenizer(models.BPE(
      vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
  spaces = [normalizers.Prepend(_SPACE)] if prefix else []
  backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", _SPACE)])
  steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
  backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
  return backend


def check_same_vocabulary(drafter: Tokenizer, target: Tokenizer) -> None:
  """Checks that the ids both tokenizers have are the same tokens.

  One may have more tokens than the other (added to a fine-tuned target, say): those ids come from
  its owner only.

  Raises:
    UserError: names the first id that differs and both spellings.
  """
  check_same_strings(drafter.token_strings(), target.token_strings())


def check_same_strings(drafter: Sequence[str], target: Sequence[str]) -> None:
  """`check_same_vocabulary` of the tokens by id.

  Raises:
    UserError: names the first id that differs and both spellings.
  """
  for i, (ours, theirs) in enumerate(zip(drafter, target, strict=False)):
    if ours != theirs:
      raise UserError(f"the drafter's vocabulary is not the target's: id {i} is {ours!r} in the "
                      f"drafter and {theirs!r} in the target")


def _whole(text: str) -> str:
  """The text with U+FFFD for lone surrogates, which JSON can hold and no encoding of text can."""
  return _LONE_SURROGATE.sub("\ufffd", text)


def _read_json(path: Path) -> dict[str, Any]:
  if not path.is_file():
    return {}
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except (ValueError, RecursionError) as error:
    raise UserError(f"{path} is not JSON: {error}") from None
  if not isinstance(value, dict):
    raise UserError(f"{path} holds a {type(value).__name__}, not an object")
  return value


def _first(i: int, other: int | None) -> int:
  return i if i >= 0 or other is None else other
