"""The model card of an exported drafter: README.md, as the Hub shows it.

The figures are those of `evaluate/report.json` and of the manifests of the run; where one is
missing the card says so. Called by the export stage for every folder that it writes.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_jax.drafters.head import LearnedDrafter
from spec_jax.errors import UserError
from train_drafter.config import Config
from train_drafter.manifest import FILE, Manifest
from train_drafter.report_schema import DEFINITIONS
from train_drafter.report_text import setting_label, tau_text
from train_drafter.serving import command, own_command

FILE_NAME = "README.md"
_UNSTATED = "not stated"
_DEFINED = ("round", "tau", "acceptance_rate", "survival", "interval", "looped_token_share")
_KINDS = {"small_lm": "small language model", "eagle3": "EAGLE-3 draft model",
          "dflash": "DFlash block drafter", "dspark": "DSpark block drafter"}


def write(
    path: Path, cfg: Config, workdir: Path, module: LearnedDrafter, form: str, target: str,
    note: str) -> None:
  """Writes README.md into an exported folder.

  Args:
    path: the folder.
    cfg: of the run.
    workdir: of the run, whose report and manifests are read.
    module: the drafter.
    form: of the folder.
    target: as servers name the target.
    note: what the acceptance that travels with the folder rests on.
  """
  kind, K = module.kind, cfg.evaluate.draft_len
  target = public_name(target)
  reduced = len(module.draft_ids[...]) if hasattr(module, "draft_ids") else None
  report = read_report(workdir)
  lines = [
      *_front(cfg, target), f"# {_KINDS[kind]} for {target}", "",
      f"Drafts tokens for speculative decoding with the target `{target}`. It changes the speed of "
      "decoding, not its output, as long as a server verifies the drafts.", "",
      *_table(["", ""], [
          ["kind", f"{kind} ({_KINDS[kind]})"], ["format", form], ["target", f"`{target}`"],
          ["target layers read", ", ".join(map(str, module.taps)) or "none"],
          ["draft vocabulary", f"{reduced or 'all'} ids"],
          ["draft length measured", str(K)],
          ["made with", "spec-jax"]]),
      "## Acceptance", "", *acceptance(report), note, "",
      "## Data", "", *_data(cfg, workdir), "",
      "## Use", "", "In " + _program(kind, form) + ":", "", "```", command(
          kind, form, "PATH/TO/THIS/FOLDER", target, K), "```", "", "In spec-jax:", "", "```",
      own_command("PATH/TO/THIS/FOLDER", target, K), "```", "",
      "`acceptance.json` holds golden prompts as token ids with the greedy text of plain and of "
      "speculative decoding and the drafts accepted in each round: a server that drafts otherwise "
      "shows it there.", "",
      "## What the figures mean", "",
      *(f"- **{name.replace('_', ' ')}**: {DEFINITIONS[name]}" for name in _DEFINED), "",
      "## Licence", "",
      f"Licence of this drafter: {cfg.export.license or _UNSTATED}. Copies of the target's weights "
      "(layers it started from, embedding or head where the format holds them) stay under the "
      "licence of the target."]
  path.mkdir(parents=True, exist_ok=True)
  (path / FILE_NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")


def public_name(target: str) -> str:
  """The name of a target without the path, which says nothing on another machine."""
  return Path(target).name if Path(target).expanduser().exists() else target


def read_report(workdir: Path) -> dict[str, Any] | None:
  """`evaluate/report.json` of a run, None where there is none.

  Raises:
    UserError: it is broken.
  """
  path = Path(workdir) / "evaluate" / "report.json"
  if not path.is_file():
    return None
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise UserError(f"{path} is not JSON: {error}") from None


def acceptance(report: Mapping[str, Any] | None) -> list[str]:
  """Lines of the acceptance table, by setting and category."""
  if report is None:
    return ["Not measured: this run has no `report.json`.", ""]
  rows = []
  for entry in report["settings"]:
    label = setting_label(entry, report["settings"])
    rows += [[label, "all", *_figures(entry["all"])]]
    rows += [[label, name, *_figures(group)] for name, group in entry["categories"].items()]
  head = ["setting", "prompts of", "prompts", "tau", "acceptance rate",
          "first draft accepted", "looped tokens"]
  lines = [f"Measured by real speculative decoding, {report['draft_len']} drafts a round, at most "
           f"{report['max_new_tokens']} new tokens a prompt:", ""]
  return [*lines, *_table(head, rows), *_speed(report)]


def _figures(group: Mapping[str, Any]) -> list[str]:
  share = lambda value: "–" if value is None else f"{value:.1%}"
  first = group["survival"][0] if group["survival"] else None
  return [str(group["prompts"]), tau_text(group), share(group["acceptance_rate"]), share(first),
          share(group["looped_token_share"])]


def _speed(report: Mapping[str, Any]) -> list[str]:
  best = report["headline"]
  if best is None:
    return ["No speed was measured.", ""]
  machine = report["provenance"].get("machine", {})
  where = machine.get("processor") if machine.get("backend") == "cpu" else machine.get("device")
  return [f"Fastest measured: {best['drafter']} at T={best['temperature']:g} in {best['dtype']}, "
          f"{best['speedup']:.2f} times plain decoding in {best['plain_dtype']}, one prompt at a "
          f"time, on {where or 'a machine that is not recorded'}.", ""]


def _data(cfg: Config, workdir: Path) -> list[str]:
  """What it was trained on: the source of the prompts and counts of the manifests."""
  source = "the prompt templates of spec-jax" if not cfg.prompts.path else (
      "prompts of the user's own files")
  lines = [f"Trained on answers of the target itself to {source}"
           + (f", started from another drafter (`train.init_from`, SHA-256 "
              f"{_start(workdir)[:12]})" if cfg.train.init_from else "") + f"; loss "
           f"`{cfg.train.loss}`."]
  for stage in ("prompts", "generate", "train"):
    folder = Path(workdir) / stage
    counts = Manifest.load(folder).counts if (folder / FILE).exists() else {}
    plain = {k: v for k, v in counts.items() if isinstance(v, int) and not isinstance(v, bool)}
    text = ", ".join(f"{name} {value}" for name, value in plain.items())
    lines.append(f"- {stage}: {text or 'no counts recorded'}")
  return [lines[0], "", *lines[1:]]


def _start(workdir: Path) -> str:
  folder = Path(workdir) / "train"
  config = Manifest.load(folder).config if (folder / FILE).exists() else {}
  return config.get("init_from", {}).get("sha256", "unknown")


def _front(cfg: Config, target: str) -> list[str]:
  """YAML that the Hub reads; JSON strings are YAML strings."""
  licence = cfg.export.license
  return ["---", *([f"license: {json.dumps(licence)}"] if licence else []),
          f"base_model: {json.dumps(target)}", "tags:", "- speculative-decoding", "---", ""]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
  line = lambda cells: "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
  return [line(head), "|" + " --- |" * len(head), *map(line, rows), ""]


def _program(kind: str, form: str) -> str:
  if form == "hf":
    return {"small_lm": "transformers", "eagle3": "EAGLE (SafeAILab)", "dflash": "dflash (z-lab)",
            "dspark": "spec-jax"}[kind]
  return {"sglang": "SGLang", "vllm": "vLLM", "speculators": "vLLM (speculators)"}[form]
