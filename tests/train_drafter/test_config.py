"""The config: every bad field is one line that names it and its value."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from spec_jax.errors import UserError
from train_drafter import config as config_lib
from train_drafter.config import Config

ROOT = Path(__file__).parents[2]
NAN, INF = float("nan"), float("inf")

BAD = [
    ("export.format", "onnx"), ("export.license", 1), ("export.target_name", 2),
    ("train.init_from", 3),
    ("target.dtype", "float16"), ("target.source", 3),
    ("prompts.count", -1), ("prompts.self_written", -1), ("prompts.self_written_top_p", 0.0),
    ("prompts.self_written_top_p", 1.5), ("prompts.eval_per_category", -2),
    ("prompts.max_dropped_share", -0.1), ("prompts.max_dropped_share", NAN),
    ("prompts.overlap_words", 0), ("prompts.seed", -1), ("prompts.mix", "math=2"),
    ("generate.temperatures", ()), ("generate.temperatures", (0.0, -1.0)),
    ("generate.temperatures", (1.0, NAN)), ("generate.temperatures", (1.0, INF)),
    ("generate.temperatures", 1.0),
    ("generate.answers", 0), ("generate.top_p", 0.0), ("generate.top_p", NAN),
    ("generate.top_k", -1), ("generate.max_new_tokens", 0), ("generate.max_prompt_tokens", 0),
    ("generate.batch_size", 0), ("generate.budget_s", -1.0), ("generate.budget_s", INF),
    ("generate.seed", 2**31), ("generate.template_args", ("thinking",)),
    ("generate.template_args", ("=false",)),
    ("drafter.kind", "eagle9"), ("drafter.init_layers", ()), ("drafter.init_layers", (0, -1)),
    ("drafter.init", "zeros"), ("drafter.draft_vocab", -1),
    ("train.optimizer", "sgd"), ("train.loss", "mse"), ("train.steps", -1), ("train.steps", 2.5),
    ("train.budget_s", -1.0),
    ("train.batch_rows", 0), ("train.micro_batches", 0), ("train.seq_len", 7),
    ("train.lr", -1e-3), ("train.lr", NAN),
    ("train.on_policy_fraction", 1.5), ("train.sampled_vocab", -1), ("train.prompt_tokens", True),
    ("train.ce_share", 1.5), ("train.first_step_share", -0.1),
    ("evaluate.longest_draft_len", 0),
    ("train.lr", INF), ("train.lr", "1e-3"), ("train.warmup", 1.5), ("train.final_lr", -0.1),
    ("train.weight_decay", -0.1), ("train.beta2", 0.0), ("train.beta2", 1.1),
    ("train.beta2", 1.0), ("train.clip", -1.0),
    ("train.max_bad_steps", 0), ("train.dtype", "int8"), ("train.teacher_temperature", 0.0),
    ("train.teacher_temperature", INF), ("train.chunk", 0), ("train.validation", 0),
    ("train.eval_every", -1), ("train.keep", 0), ("train.profile", "yes"), ("train.seed", -1),
    ("evaluate.more_draft_lens", (3, 0)), ("evaluate.batch_sizes", (0,)),
    ("evaluate.contexts", (0,)), ("evaluate.self_prompts", -1),
    ("evaluate.draft_len", 0), ("evaluate.temperatures", ()), ("evaluate.temperatures", (-0.5,)),
    ("evaluate.rules", ("greedy",)), ("evaluate.identity_dtype", ""), ("evaluate.dtype", "fp32"),
    ("evaluate.drafter_dtype", "f"), ("evaluate.speed_dtypes", ("float32", "int4")),
    ("evaluate.cost_dtypes", ("int4",)),
    ("evaluate.max_new_tokens", 0), ("evaluate.batch_size", 0),
    ("evaluate.untrained_per_category", -1), ("evaluate.identity_per_category", -1),
    ("evaluate.speed_prompts", -1), ("evaluate.ngram", "ngram:1-3"),
    ("features.mode", "disk"), ("features.topk", 0), ("features.shard_tokens", 10),
    ("features.batch_rows", 0), ("features.seq_len", 1), ("features.verify_documents", 0),
    ("drafter.steps", 0), ("drafter.num_taps", 0), ("drafter.block_size", 1),
    ("drafter.anchors", 0), ("drafter.mask_id", -2), ("drafter.markov_rank", 0),
    ("train.position_weight", "linear"), ("evaluate.lookup", "1-3"),
    ("evaluate.lookup", "3-2+0"), ("evaluate.lookup", "3-2+x"), ("evaluate.lookup", "+2"),
    ("evaluate.lookup", "33-2"), ("evaluate.ngram", "ngram:100-1"), ("train.steps", 10**20),
    ("drafter.init_layers", (0, 2**31)), ("evaluate.draft_len", 10**20),
    ("evaluate.seed", 2**31), ("export.prompts", 0),
    ("storage.features", "runs/x"), ("storage.checkpoints", "s3://lab/x"),
    ("mesh.data", -2), ("mesh.fsdp", 0), ("mesh.tensor", 0)]


def put(cfg, name, value):
  section, attribute = name.split(".")
  assert hasattr(getattr(cfg, section), attribute)
  setattr(getattr(cfg, section), attribute, value)


@pytest.mark.parametrize("name,value", BAD, ids=lambda x: str(x))
def test_a_bad_field_is_named_with_its_value(name, value):
  cfg = Config()
  put(cfg, name, value)
  with pytest.raises(UserError) as raised:
    config_lib.validate(cfg)
  message = str(raised.value)
  assert name in message and "\n" not in message
  shown = value[0] if name == "generate.template_args" else value
  assert str(shown) in message or repr(shown) in message


def test_every_section_is_covered():
  """A number or a choice that is never checked would stand out here."""
  free = {"prompts.path", "prompts.eval_path", "prompts.system", "evaluate.same_shape",
          "evaluate.path", "features.delete_used"}
  names = {f"{section.name}.{field.name}" for section in dataclasses.fields(Config)
           for field in dataclasses.fields(section.type)}
  assert names - free == {name for name, _ in BAD}


def test_a_section_is_of_its_type():
  cfg = Config()
  cfg.train = None
  with pytest.raises(UserError, match="train=None must be of type TrainConfig"):
    config_lib.validate(cfg)


@pytest.mark.parametrize("name,value", [
    ("train.warmup", 1.0), ("train.final_lr", 1.0), ("train.lr", 0.0), ("train.lr", 1),
    ("train.clip", 0.0), ("drafter.draft_vocab", 0), ("generate.temperatures", (0,)),
    ("prompts.max_dropped_share", 0.0), ("evaluate.speed_prompts", 0)])
def test_the_edges_are_allowed(name, value):
  cfg = Config()
  put(cfg, name, value)
  config_lib.validate(cfg)


@pytest.mark.parametrize("kind, most", [("dflash", 7), ("dspark", 8)])
def test_a_draft_fits_into_its_block(kind, most):
  cfg = Config()
  cfg.drafter.kind, cfg.evaluate.draft_len = kind, most
  config_lib.validate(cfg)
  cfg.evaluate.draft_len = most + 1
  with pytest.raises(UserError, match=f"evaluate.draft_len={most + 1} must be at most {most}"):
    config_lib.validate(cfg)


def test_a_sparse_teacher_is_of_a_feature_store():
  cfg = Config()
  cfg.features.mode = "topk"
  with pytest.raises(UserError, match="features.mode='topk' .* drafter.kind='small_lm'"):
    config_lib.validate(cfg)
  cfg.drafter.kind = "eagle3"
  config_lib.validate(cfg)


def test_training_needs_an_end():
  cfg = Config()
  cfg.train.steps, cfg.train.budget_s = 0, 0.0
  with pytest.raises(UserError, match="train.steps=0 needs train.budget_s > 0"):
    config_lib.validate(cfg)


def test_prompts_must_leave_room_for_an_answer_in_a_training_sequence():
  cfg = Config()
  cfg.train.seq_len = cfg.generate.max_prompt_tokens
  with pytest.raises(UserError, match="generate.max_prompt_tokens=384 must be below train.seq_len"):
    config_lib.validate(cfg)
  cfg.train.seq_len += 1
  config_lib.validate(cfg)


def test_a_misspelt_field_of_a_config_file_is_refused():
  """cfg.train.learning_rate = ... must not pass as if it had been set."""
  for section in ("train", "generate"):
    with pytest.raises(AttributeError, match="learning_rate"):
      getattr(Config(), section).learning_rate = 1.0
  with pytest.raises(AttributeError, match="trian"):
    Config().trian = 1


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.py")), ids=lambda path: path.stem)
def test_the_shipped_configs_are_valid(path):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  cfg = module.get_config()
  config_lib.finalize(cfg)
  config_lib.validate(cfg)


@pytest.mark.parametrize("kind", config_lib.KINDS)
def test_every_drafter_has_a_smoke(kind):
  cfg = importlib.import_module(f"configs.{kind}").get_config("smoke")
  config_lib.validate(cfg)
  assert cfg.drafter.kind == kind and cfg.generate.budget_s + cfg.train.budget_s <= 120


def test_template_arguments_are_typed():
  cfg = Config()
  cfg.generate.template_args = ("enable_thinking=false", "Deep=True", "n=3", "name=a=b")
  assert config_lib.template_args(cfg) == {
      "enable_thinking": False, "Deep": True, "n": 3, "name": "a=b"}


def test_parts_leave_out_what_does_not_matter():
  cfg = Config()
  part = config_lib.part(cfg, "drafter", "train", without=("train.profile",))
  assert set(part) == {"drafter", "train"} and "profile" not in part["train"]
  assert part["train"]["lr"] == cfg.train.lr
  assert cfg.train.profile is False


@pytest.mark.parametrize("change,message", [
    ({"drafter.kind": "dspark"}, "dspark"), ({"features.mode": "topk"}, "topk"),
    ({"drafter.draft_vocab": 4096}, "drafter.draft_vocab=4096")])
def test_where_a_sampled_vocabulary_does_not_go(change, message):
  cfg = Config()
  cfg.train.sampled_vocab = 4096
  config_lib.validate(cfg)
  for name, value in change.items():
    put(cfg, name, value)
  with pytest.raises(UserError, match=message):
    config_lib.validate(cfg)
