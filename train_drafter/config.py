"""The configuration of a run: plain dataclasses, overridden as --config.train.lr=3e-4.

Overrides apply after `get_config`, so what depends on other fields is set in `finalize` and every
check stands in `validate`; both run before any work. Fields are scalars or tuples, with sentinels
(0, "", -1) in place of None; slots, so that a config file cannot set a field that does not exist.
No `from __future__ import annotations`: it breaks the flag parser.
"""

import dataclasses
import math
import typing
from dataclasses import dataclass, field

from spec_jax import drafters
from spec_jax.errors import UserError
from spec_jax.verify import RULES
from spec_jax.weights import forms
from train_drafter import urls


@dataclass(slots=True)
class TargetConfig:
  """The model that is sped up."""

  source: str = "demo"  # demo, a Hugging Face folder, a .gguf file, or hf:org/name
  dtype: str = "bfloat16"  # of generation and of the teacher: float32, bfloat16 or int8w


@dataclass(slots=True)
class PromptsConfig:
  """What the target will answer, and what it is measured with."""

  path: str = ""  # JSONL files (a path, a folder, or a comma-separated list); "" for the templates
  count: int = 600  # training prompts
  mix: tuple[str, ...] = ()  # category weights such as "structured=2"; () for equal shares
  self_written: int = 0  # prompts the target writes itself, besides the others
  self_written_top_p: float = 0.95
  eval_path: str = ""  # JSONL; "" for the embedded evaluation prompts
  eval_per_category: int = 0  # 0 for all
  seed: int = 0
  max_dropped_share: float = 0.1  # of unusable lines in a data file
  overlap_words: int = 13  # a training prompt that shares so many words in a row is dropped
  system: str = ""  # system text for prompts without one


@dataclass(slots=True)
class GenerateConfig:
  """How the target answers the training prompts."""

  temperatures: tuple[float, ...] = (0.0, 1.0)  # prompts take them in turn
  answers: int = 1  # answers to each prompt, at successive temperatures
  top_p: float = 1.0
  top_k: int = 0
  max_new_tokens: int = 128
  max_prompt_tokens: int = 384  # longer prompts are dropped and counted
  batch_size: int = 64
  # Stop after so many seconds of one run and go on with what there is; 0 for no limit.
  budget_s: float = 0.0
  seed: int = 0
  template_args: tuple[str, ...] = ()  # of the chat template, such as "enable_thinking=false"


@dataclass(slots=True)
class FeaturesConfig:
  """How drafters that read the target's hidden states get them."""

  mode: str = "store"  # store, online (the target runs in the training program) or topk
  topk: int = 64  # log probabilities kept of each token in mode topk
  shard_tokens: int = 65536  # tokens of one part of the store
  batch_rows: int = 8  # rows the target re-reads at once
  seq_len: int = 512  # tokens of such a row
  verify_documents: int = 8  # documents that verify_store compares
  delete_used: bool = False  # remove the stored features once a drafter was trained on them


@dataclass(slots=True)
class DrafterConfig:
  """What is trained."""

  kind: str = "small_lm"  # small_lm, eagle3, dflash or dspark
  # Target layers it starts from, 0-based: one for each layer of the drafter.
  init_layers: tuple[int, ...] = (0, 29)
  init: str = "target"  # target (copies of init_layers) or random
  draft_vocab: int = 16384  # most frequent ids it can propose; 0 for all
  steps: int = 3  # eagle3: draft steps that training simulates (training-time test)
  num_taps: int = 5  # dflash, dspark: layers of the target that are read
  block_size: int = 8  # dflash: anchor and drafts; dspark: drafts
  anchors: int = 32  # dflash, dspark: blocks of a training row
  mask_id: int = -1  # dflash, dspark: id of the places to fill; -1 for an unused control token
  markov_rank: int = 256  # dspark


@dataclass(slots=True)
class TrainConfig:
  """How it is trained."""

  loss: str = "fkl"  # ce, fkl, rkl, jsd, tv, lk_alpha, lk_hybrid, ce_tv
  # Shares of the steps, from the first on: those that train by ce before `loss`, and (eagle3) those
  # that train the first draft step alone before all of them, at less than half the cost.
  ce_share: float = 0.0
  first_step_share: float = 0.0
  # Of the later places of a draft: exp (as the drafter has it), uniform, or dpace (2605.18810).
  position_weight: str = "exp"
  steps: int = 0  # 0: as many as fit into budget_s, measured at the start
  # Seconds of one run, which stops at 1.15 times this (but not before 20 steps); 0 for no limit.
  budget_s: float = 480.0
  batch_rows: int = 4
  micro_batches: int = 1  # batches of batch_rows whose gradients a step adds up, one at a time
  seq_len: int = 512
  optimizer: str = "adamw"  # or muon: its step for matrices of the layers, AdamW for the rest
  lr: float = 4e-3
  warmup: float = 0.03  # share of the steps
  final_lr: float = 0.05  # of lr, at the end of the cosine
  weight_decay: float = 0.0
  beta2: float = 0.95
  clip: float = 1.0  # global norm; 0 for none
  max_bad_steps: int = 20  # non-finite steps in a row (each skipped and counted) before it stops
  dtype: str = "bfloat16"  # of the matmuls; master weights are float32
  # small_lm, eagle3: share of steps that learn from the drafter's own text, scored by the target.
  on_policy_fraction: float = 0.0
  # Learn from the prompts' tokens too, as the target reads them (features.mode=store): two to three
  # times the supervised tokens of the same features, but not the target's own text.
  prompt_tokens: bool = False
  teacher_temperature: float = 1.0  # divides the logits of both sides of the loss
  chunk: int = 256  # supervised positions scored at once
  # Ids of the draft vocabulary that a step scores: those of the batch and a random choice of the
  # others, weighted by the inverse of its chance; 0 for all. Validation scores all.
  sampled_vocab: int = 0
  validation: int = 32  # answers held out of training
  eval_every: int = 0  # steps; 0 for a tenth of the run
  keep: int = 2  # newest checkpoints that stay, besides the best
  init_from: str = ""  # a drafter's folder to start from (drafter.* must describe it); "" for none
  seed: int = 0
  profile: bool = False


@dataclass(slots=True)
class EvaluateConfig:
  """How it is measured: real speculative decoding of the evaluation prompts."""

  path: str = ""  # JSONL of other prompts than the prompts stage kept for evaluation
  draft_len: int = 5
  longest_draft_len: int = 7  # K up to which tau and costs are estimated, draft_len in any case
  more_draft_lens: tuple[int, ...] = ()  # K that also decode and are timed, to check predictions
  temperatures: tuple[float, ...] = (0.0, 1.0)
  rules: tuple[str, ...] = ("ratio",)  # at temperatures above zero; at zero it is greedy
  dtype: str = "bfloat16"  # of the acceptance runs
  identity_dtype: str = "float32"  # of the comparison of greedy outputs with same-shape ones
  identity_per_category: int = 0  # prompts of it; 0 for all
  drafter_dtype: str = "bfloat16"
  speed_dtypes: tuple[str, ...] = ("float32", "bfloat16")
  cost_dtypes: tuple[str, ...] = ("float32", "bfloat16")  # of them, those with costs of every K
  max_new_tokens: int = 128
  batch_size: int = 32
  untrained_per_category: int = 4  # prompts of the untrained control; 0 for all
  self_prompts: int = 4  # prompts that the target also drafts for itself; 0 for none
  same_shape: bool = True  # greedy text of all prompts against the same-shape baseline
  # Sequences decoded together whose costs are measured, up to a second a pass (in `dtype`).
  batch_sizes: tuple[int, ...] = (1, 4, 16, 64)
  # Tokens in the cache behind which costs are measured, as many as the models hold (in `dtype`).
  contexts: tuple[int, ...] = (256, 1024, 4096)
  speed_prompts: int = 9  # timed one by one, plain and speculative interleaved; 0 for all
  ngram: str = "ngram:3-1"
  # MAX-MIN, such as 3-2: also measure prompt lookup over the trained drafter; 3-2+2 has it draft
  # two tokens of a block and leaves the rest to the lookup.
  lookup: str = ""
  seed: int = 0


@dataclass(slots=True)
class ExportConfig:
  """What is written for other programs."""

  prompts: int = 4  # golden cases in acceptance.json
  format: str = "hf"  # as its authors publish the kind; or what sglang, vllm or speculators read
  target_name: str = ""  # how servers name the target, such as "org/name"; "" for target.source
  license: str = ""  # of the drafter, for the model card; "" leaves it unstated


@dataclass(slots=True)
class MeshConfig:
  """The devices a run takes and what they divide (spec_jax/sharding.py); no result depends on it
  beyond rounding, so that stage folders do not belong to a layout."""

  data: int = 1  # copies of the parameters, each with a share of the rows; -1 for all that is left
  fsdp: int = 1  # divides the rows too, and every parameter along its hidden size
  tensor: int = 1  # divides heads, MLP and vocabulary


@dataclass(slots=True)
class StorageConfig:
  """Buckets for what is large, "" for the work folder (train_drafter/buckets.py). No result depends
  on it."""

  features: str = ""  # parts of the feature store: gs://BUCKET/FOLDER or s3://BUCKET/FOLDER
  checkpoints: str = ""  # gs://BUCKET/FOLDER


@dataclass(slots=True)
class Config:
  """A whole run."""

  target: TargetConfig = field(default_factory=TargetConfig)
  prompts: PromptsConfig = field(default_factory=PromptsConfig)
  generate: GenerateConfig = field(default_factory=GenerateConfig)
  features: FeaturesConfig = field(default_factory=FeaturesConfig)
  drafter: DrafterConfig = field(default_factory=DrafterConfig)
  train: TrainConfig = field(default_factory=TrainConfig)
  evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
  export: ExportConfig = field(default_factory=ExportConfig)
  mesh: MeshConfig = field(default_factory=MeshConfig)
  storage: StorageConfig = field(default_factory=StorageConfig)


def finalize(cfg: Config) -> None:
  """Sets what depends on other fields (nothing so far is derived before the target is known)."""
  del cfg


DTYPES = ("float32", "bfloat16", "int8w")
TRAIN_DTYPES = ("float32", "bfloat16")  # what has a gradient
OPTIMIZERS = ("adamw", "muon")
KINDS = ("small_lm", "eagle3", "dflash", "dspark")
LOSSES = ("ce", "fkl", "rkl", "jsd", "tv", "lk_alpha", "lk_hybrid", "ce_tv")
_AT_LEAST = {  # field -> smallest value allowed
    "prompts.count": 0, "prompts.self_written": 0, "prompts.eval_per_category": 0,
    "prompts.overlap_words": 1,
    "generate.answers": 1, "generate.max_new_tokens": 1, "generate.max_prompt_tokens": 1,
    "generate.batch_size": 1, "generate.budget_s": 0, "generate.top_k": 0,
    "features.topk": 1, "features.shard_tokens": 1024, "features.batch_rows": 1,
    "features.seq_len": 32, "features.verify_documents": 1,
    "drafter.draft_vocab": 0, "drafter.steps": 1, "drafter.num_taps": 1, "drafter.block_size": 2,
    "drafter.anchors": 1, "drafter.mask_id": -1, "drafter.markov_rank": 1,
    "train.steps": 0, "train.budget_s": 0, "train.batch_rows": 1, "train.seq_len": 8,
    "train.micro_batches": 1,
    "train.lr": 0, "train.clip": 0, "train.max_bad_steps": 1, "train.chunk": 1,
    "train.validation": 1, "train.sampled_vocab": 0, "train.eval_every": 0, "train.keep": 1,
    "train.weight_decay": 0,
    "evaluate.draft_len": 1, "evaluate.longest_draft_len": 1,
    "evaluate.max_new_tokens": 1, "evaluate.batch_size": 1,
    "evaluate.speed_prompts": 0, "evaluate.identity_per_category": 0,
    "evaluate.untrained_per_category": 0, "evaluate.self_prompts": 0, "export.prompts": 1,
    "mesh.data": -1, "mesh.fsdp": 1, "mesh.tensor": 1}
_ONE_OF = {
    "target.dtype": DTYPES, "train.dtype": TRAIN_DTYPES, "evaluate.dtype": DTYPES,
    "evaluate.identity_dtype": DTYPES,
    "evaluate.drafter_dtype": DTYPES, "drafter.kind": KINDS, "train.loss": LOSSES,
    "train.optimizer": OPTIMIZERS,
    "train.position_weight": ("exp", "uniform", "dpace"),
    "features.mode": ("store", "online", "topk"),
    "drafter.init": ("target", "random"), "export.format": forms.NAMES}
_LOCAL = ("target.source", "prompts.path", "prompts.eval_path", "train.init_from", "evaluate.path")
_SHARES = {  # field -> zero allowed
    "prompts.max_dropped_share": True, "prompts.self_written_top_p": False,
    "generate.top_p": False, "train.on_policy_fraction": True, "train.ce_share": True,
    "train.first_step_share": True, "train.warmup": True,
    "train.final_lr": True, "train.beta2": False}


def validate(cfg: Config) -> None:
  """Checks every field before any work.

  Raises:
    UserError: names the field and its value.
  """
  _check_types(cfg)
  for name, least in _AT_LEAST.items():
    if not _get(cfg, name) >= least:
      raise UserError(f"{name}={_get(cfg, name)} must be at least {least}")
  for name, known in _ONE_OF.items():
    if _get(cfg, name) not in known:
      raise UserError(f"{name}={_get(cfg, name)!r} must be one of {', '.join(known)}")
  for name in _LOCAL:
    urls.check_local(name, _get(cfg, name))
  for name in urls.FIELDS:
    urls.check_field(f"storage.{name}", getattr(cfg.storage, name))
  for name, zero in _SHARES.items():
    value = _get(cfg, name)
    if not (0 <= value <= 1 and (zero or value > 0)):
      raise UserError(f"{name}={value} must be in {'[' if zero else '('}0, 1]")
  for name in ("generate.temperatures", "evaluate.temperatures"):
    if not _get(cfg, name) or min(_get(cfg, name)) < 0:
      raise UserError(f"{name}={_get(cfg, name)} must hold temperatures >= 0")
  for name in ("evaluate.speed_dtypes", "evaluate.cost_dtypes"):
    if not set(_get(cfg, name)) <= set(DTYPES):
      raise UserError(f"{name}={_get(cfg, name)} must be among {', '.join(DTYPES)}")
  for name in ("evaluate.more_draft_lens", "evaluate.batch_sizes", "evaluate.contexts"):
    if any(value < 1 for value in _get(cfg, name)):
      raise UserError(f"{name}={_get(cfg, name)} must be at least 1")
  known = [name for name in RULES if name != "greedy"]
  if not cfg.evaluate.rules or not set(cfg.evaluate.rules) <= set(known):
    raise UserError(f"evaluate.rules={cfg.evaluate.rules} must be among {', '.join(known)}")
  layers = cfg.drafter.init_layers
  if not layers or min(layers) < 0:
    raise UserError(f"drafter.init_layers={layers} must name target layers, 0-based, at least one")
  for name in ("prompts.seed", "generate.seed", "train.seed", "evaluate.seed"):
    if not 0 <= _get(cfg, name) < 2**31:
      raise UserError(f"{name}={_get(cfg, name)} must be in [0, 2**31)")
  if cfg.generate.max_prompt_tokens >= cfg.train.seq_len:
    raise UserError(
        f"generate.max_prompt_tokens={cfg.generate.max_prompt_tokens} must be below "
        f"train.seq_len={cfg.train.seq_len}: answers to longer prompts would be cut away")
  most = cfg.drafter.block_size - (cfg.drafter.kind == "dflash")
  longest = max(cfg.evaluate.draft_len, *cfg.evaluate.more_draft_lens, 0)
  if cfg.drafter.kind in ("dflash", "dspark") and longest > most:
    field = "draft_len" if longest == cfg.evaluate.draft_len else "more_draft_lens"
    raise UserError(f"evaluate.{field}={getattr(cfg.evaluate, field)} must be at most {most}: what "
                    f"a {cfg.drafter.kind} drafter of drafter.block_size={cfg.drafter.block_size} "
                    "drafts")
  if cfg.train.beta2 == 1:
    raise UserError("train.beta2=1.0 must be below 1: Adam divides by 1 - beta2**step")
  if cfg.train.position_weight == "dpace" and cfg.drafter.kind == "small_lm":
    raise UserError("train.position_weight='dpace' weighs the places of a draft, which training "
                    "tells apart for eagle3, dflash and dspark, not for small_lm")
  if not cfg.train.teacher_temperature > 0:
    raise UserError(f"train.teacher_temperature={cfg.train.teacher_temperature} must be > 0")
  if cfg.train.on_policy_fraction and cfg.drafter.kind not in ("small_lm", "eagle3"):
    raise UserError(
        f"train.on_policy_fraction={cfg.train.on_policy_fraction} needs a drafter whose drafts "
        f"follow each other (small_lm, eagle3), not {cfg.drafter.kind}")
  if cfg.train.sampled_vocab:
    if cfg.drafter.kind == "dspark" or cfg.features.mode == "topk":
      raise UserError(f"train.sampled_vocab={cfg.train.sampled_vocab} is for an untrained head and "
                      "a teacher known everywhere: not for drafter.kind=dspark, nor for "
                      "features.mode=topk")
    if 0 < cfg.drafter.draft_vocab <= cfg.train.sampled_vocab:
      raise UserError(f"train.sampled_vocab={cfg.train.sampled_vocab} must be below "
                      f"drafter.draft_vocab={cfg.drafter.draft_vocab}")
  if cfg.train.prompt_tokens and (cfg.drafter.kind == "small_lm" or cfg.features.mode != "store"
                                  or cfg.train.on_policy_fraction):
    raise UserError("train.prompt_tokens=True needs a feature store of whole documents: not for "
                    "drafter.kind=small_lm, features.mode other than store, nor "
                    "train.on_policy_fraction above 0")
  if cfg.train.first_step_share and cfg.drafter.kind != "eagle3":
    raise UserError(
        f"train.first_step_share={cfg.train.first_step_share} needs a drafter whose training "
        f"simulates drafting step by step (eagle3), not {cfg.drafter.kind}")
  if cfg.train.micro_batches > 1 and cfg.train.on_policy_fraction and cfg.features.mode == "topk":
    raise UserError(f"train.micro_batches={cfg.train.micro_batches} cannot mix the sparse teacher "
                    "of features.mode='topk' with on-policy batches, which have a whole one")
  if cfg.features.mode == "topk" and cfg.drafter.kind == "small_lm":
    raise UserError("features.mode='topk' is for drafters that read a feature store (eagle3, "
                    "dflash, dspark); drafter.kind='small_lm' learns from whole distributions")
  if cfg.features.mode == "topk" and cfg.train.teacher_temperature != 1:
    raise UserError(f"train.teacher_temperature={cfg.train.teacher_temperature} must be 1.0 with "
                    "features.mode='topk': the store keeps probabilities at temperature 1")
  if not cfg.train.steps and not cfg.train.budget_s:
    raise UserError("train.steps=0 needs train.budget_s > 0: steps are measured to fit into it")
  if cfg.export.format == "speculators" and cfg.drafter.kind == "small_lm":
    raise UserError("export.format='speculators' holds no small_lm; hf, vllm and sglang do")
  template_args(cfg)
  try:
    drafters.parse_ngram(cfg.evaluate.ngram)
  except UserError as error:
    raise UserError(f"evaluate.ngram: {error}") from None
  if cfg.evaluate.lookup:
    try:
      drafters.parse_lookup(cfg.evaluate.lookup)
    except UserError as error:
      raise UserError(f"evaluate.lookup={cfg.evaluate.lookup!r}: {error}") from None


def _check_types(cfg: Config) -> None:
  """Every field is of the type it is declared with, and numbers are finite."""
  for section in dataclasses.fields(cfg):
    if not isinstance(getattr(cfg, section.name), section.type):
      raise UserError(f"{section.name}={getattr(cfg, section.name)!r:.60} must be of type "
                      f"{section.type.__name__}")
    for entry in dataclasses.fields(section.type):
      name = f"{section.name}.{entry.name}"
      value, kind = _get(cfg, name), entry.type
      many = typing.get_origin(kind) is tuple
      kind = typing.get_args(kind)[0] if many else kind
      known = (int, float) if kind is float else kind
      items = value if many else (value,)
      if not isinstance(items, tuple) or not all(
          isinstance(x, known) and isinstance(x, bool) == (kind is bool) for x in items):
        text = f"a tuple of {kind.__name__}" if many else kind.__name__
        raise UserError(f"{name}={value!r} must be of type {text}")
      if kind is float and not all(map(math.isfinite, items)):
        raise UserError(f"{name}={value} must be finite")
      if kind is int and not all(-2**31 <= x < 2**31 for x in items):
        raise UserError(f"{name}={value} must be below 2**31")


def template_args(cfg: Config) -> dict[str, bool | int | str]:
  """The chat-template arguments of generate.template_args as a dict.

  Raises:
    UserError: an entry is not of the form name=value.
  """
  words = {"true": True, "false": False}
  args = {}
  for entry in cfg.generate.template_args:
    name, equals, value = entry.partition("=")
    if not name or not equals:
      raise UserError(f"generate.template_args: {entry!r} is not of the form name=value")
    args[name] = words.get(value.lower(), int(value) if value.isdigit() else value)
  return args


def part(cfg: Config, *names: str, without: tuple[str, ...] = ()) -> dict:
  """The named sections as nested dicts, for a manifest, without the fields "section.field"."""
  out = {name: dataclasses.asdict(getattr(cfg, name)) for name in names}
  for entry in without:
    section, name = entry.split(".")
    out[section].pop(name)
  return out


def train_part(cfg: Config) -> dict:
  """What a trained drafter depends on, for the manifest of its stage. A field that came later is
  left out at the value that older folders were made with."""
  later = ("train.micro_batches",) if cfg.train.micro_batches == 1 else ()
  return part(cfg, "drafter", "train", without=("train.profile", "train.keep", *later))


def _get(cfg, name: str):
  section, attribute = name.split(".")
  return getattr(getattr(cfg, section), attribute)
