"""Several runs side by side: which drafter accepts more on the same prompts, and is it chance?

  python -m launch.compare runs/a runs/b runs/c --out=runs/compare

Reads the records that the evaluate stage saved (nothing is decoded), pairs the prompts, and writes
compare.md, compare.csv and compare.svg. Runs that differ in anything but the drafter (target,
prompts, K, token budget, dtype, temperatures and rules, seed) are refused by name;
--allow_different compares what they share and says so.

Every difference is run minus baseline, in pooled tau, with a 95 % bootstrap interval over prompts.
A star marks those that a paired permutation test finds after Holm's correction over all
differences of the page, so that more runs or categories make the mark harder to get.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from absl import flags
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from launch.paired import PERMUTATIONS, holm, paired
from spec_jax import command
from spec_jax.errors import UserError
from train_drafter import report, report_plots
from train_drafter.report_text import NONE, Table, markdown_table, print_table

LEVEL = 0.05
METHOD = (
    "Differences are run minus baseline in pooled τ over the same prompts; intervals: 95 %, "
    "bootstrap over prompts, both runs resampled together, not adjusted. * significant: two-sided "
    "paired permutation test (runs exchanged prompt by prompt, up to "
    f"{PERMUTATIONS} exchanges), Holm-adjusted p below {LEVEL:g} among the {{count}} differences "
    "of this page.")


@dataclasses.dataclass(frozen=True)
class Loaded:
  """One run: what to call it, how it was measured, and the records of its trained drafter.

  Attributes:
    label: unique among the runs.
    measured: the arguments of `report.build_report`, records apart.
    records: (temperature, rule) -> prompt id -> row.
  """

  label: str
  measured: dict[str, Any]
  records: dict[tuple[float, str], dict[str, dict]]

  @property
  def provenance(self) -> Mapping[str, Any]:
    return self.measured.get("provenance") or {}

  def prompts(self) -> dict[str, str]:
    """Id -> category of every prompt that stands under each setting."""
    shared = set.intersection(*(set(rows) for rows in self.records.values()))
    first = next(iter(self.records.values()))
    return {name: row["category"] for name, row in first.items() if name in shared}


def load(paths: Sequence[str]) -> list[Loaded]:
  """Reads run folders, the workdir or its evaluate folder.

  Raises:
    UserError: a folder holds no evaluation, or a broken one.
  """
  folders = []
  for path in map(Path, paths):
    inner = path / "evaluate"
    folder = inner if (inner / report.MEASUREMENTS_FILE).is_file() else path
    if not (folder / report.MEASUREMENTS_FILE).is_file():
      raise UserError(f"{path}: holds no evaluation ({report.MEASUREMENTS_FILE}), here or in "
                      "evaluate/")
    folders.append(folder)
  runs = []
  for label, folder in zip(labels(folders), folders, strict=True):
    measured = report.load_evaluation(folder)
    records, drafter = measured.pop("records"), measured.get("drafter")
    if drafter not in records:
      raise UserError(f"{folder}: no records of the drafter {drafter!r}, only of "
                      f"{sorted(records)}")
    for (heat, rule), rows in records[drafter].items():
      name, count = collections.Counter(row["id"] for row in rows).most_common(1)[0]
      if count > 1:
        raise UserError(f"{folder}: prompt {name!r} stands {count} times under T={heat:g}, {rule}")
    runs.append(Loaded(label, measured, {
        key: {row["id"]: row for row in rows} for key, rows in sorted(records[drafter].items())}))
  return runs


def labels(folders: Sequence[Path]) -> list[str]:
  """Short names: the paths without what all of them share, numbered where one stands twice."""
  homes = [str((f.parent if f.resolve().name == "evaluate" else f).resolve()) for f in folders]
  common = os.path.commonpath([os.path.dirname(home) for home in homes])
  names, out = [os.path.relpath(home, common) for home in homes], []
  for i, name in enumerate(names):
    out.append(f"{name} ({names[:i].count(name) + 1})" if names.count(name) > 1 else name)
  return out


# What must be the same.


def differences(base: Loaded, other: Loaded) -> list[str]:
  """What besides the drafter differs between two runs, a line each, the names of both given."""
  lines = []

  def check(what, get):
    ours, theirs = get(base), get(other)
    if ours != theirs:
      lines.append(f"{what}: {ours} in {base.label}, {theirs} in {other.label}")

  weights = [run.provenance.get("target_weights") for run in (base, other)]
  if all(weights):
    check("target weights", lambda run: run.provenance["target_weights"][:12])
  else:
    check("target", lambda run: run.measured.get("target"))
  for key, name in (("draft_len", "K"), ("max_new_tokens", "max_new_tokens"), ("seed", "seed")):
    check(name, lambda run, key=key: run.measured.get(key))
  dtypes = [run.provenance.get("dtype") for run in (base, other)]
  if all(dtypes):
    check("dtype of the target", lambda run: run.provenance["dtype"])
  check("temperatures and rules", lambda run: ", ".join(f"T={t:g} {r}" for t, r in run.records))
  ours, theirs = base.prompts(), other.prompts()
  for one, two, run in ((ours, theirs, base), (theirs, ours, other)):
    missing = [name for name in one if name not in two]
    if missing:
      lines.append(f"prompts: {len(missing)} of {len(one)} only in {run.label}, "
                   f"such as {missing[0]!r}")
  both = [name for name in ours if name in theirs]
  moved = [name for name in both if ours[name] != theirs[name]]
  if moved:
    lines.append(f"prompts: {moved[0]!r} is {ours[moved[0]]} in {base.label}, "
                 f"{theirs[moved[0]]} in {other.label}")
  changed = [name for name in both if not same_prompt(base, other, name)]
  if changed:
    lines.append(f"prompts: {len(changed)} have other tokens in {other.label} than in "
                 f"{base.label}, such as {changed[0]!r}")
  return lines


def same_prompt(base: Loaded, other: Loaded, name: str) -> bool:
  """Whether a prompt's tokens are equal, as far as both runs kept their hash."""
  ours, theirs = (run.provenance.get("prompt_hashes", {}).get(name) for run in (base, other))
  return ours is None or theirs is None or ours == theirs


# The comparison.


def compare(runs: Sequence[Loaded], allow_different: bool = False) -> dict:
  """Compares every run with the first.

  Args:
    runs: at least two, the baseline first.
    allow_different: compare what the runs share instead of refusing.

  Returns:
    runs [{label, drafter, target, draft_len}], baseline, notes [text], settings [{temperature,
    rule, prompts, categories}], differences [{run, temperature, rule, category, ...}, with the
    fields of `paired.paired`, p_holm and significant], speed [rows], count: differences with a
    p-value, which the marks account for.

  Raises:
    UserError: the runs differ, or share nothing.
  """
  if len(runs) < 2:
    raise UserError("two runs at least are needed, the baseline first")
  base, others = runs[0], runs[1:]
  notes = list(dict.fromkeys(line for other in others for line in differences(base, other)))
  if notes and not allow_different:
    more = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
    raise UserError(f"runs cannot be compared: {notes[0]}{more}; "
                    "--allow_different compares what they share")
  names = {name: category for name, category in base.prompts().items() if all(
      name in other.prompts() and same_prompt(base, other, name) for other in others)}
  settings = [key for key in base.records if all(key in other.records for other in others)]
  if not names or not settings:
    raise UserError("runs cannot be compared: they share no "
                    + ("prompts" if settings else "temperature and rule"))
  if notes:
    notes.append(f"compared are the {len(names)} prompts and "
                 + ", ".join(f"T={t:g} {r}" for t, r in settings) + " that all runs share")
  unknown = [run.label for run in runs if not run.provenance.get("prompt_hashes")]
  if unknown:
    notes.append("that the prompts' texts are equal was taken from their names alone: no hashes in "
                 + ", ".join(unknown))
  hashes = [run.provenance.get("drafter_files") for run in runs]
  same = [run.label for run, own in zip(others, hashes[1:], strict=True)
          if own is not None and own == hashes[0]]
  if same:
    notes.append(f"{', '.join(same)}: the very drafter of {base.label}, by the hash of its files")
  rows = []
  seed = base.measured.get("seed", 0)
  for key in settings:
    for category in ("all", *dict.fromkeys(names.values())):
      members = [n for n, own in names.items() if category in ("all", own)]
      for other in others:
        ours, theirs = ([run.records[key][n]["records"] for n in members] for run in (other, base))
        rows.append({"run": other.label, "temperature": key[0], "rule": key[1],
                     "category": category, **paired(ours, theirs, seed=seed)})
  adjusted = holm([float("nan") if row["p"] is None else row["p"] for row in rows])
  for row, p in zip(rows, adjusted, strict=True):
    row["p_holm"] = None if row["p"] is None else p
    row["significant"] = row["p"] is not None and p < LEVEL
  return {
      "baseline": base.label,
      "runs": [{"label": r.label, **{k: r.measured.get(k) for k in (
          "drafter", "target", "draft_len", "max_new_tokens")}} for r in runs],
      "notes": notes,
      "settings": settings,
      "differences": rows,
      "count": sum(row["p"] is not None for row in rows),
      "speed": [{"run": run.label, **row} for run in runs for row in run.measured.get("speed", ())
                if row["drafter"] == run.measured["drafter"]],
  }


# What people read.


def _value(value: float | None, interval: Sequence[float | None] = (None,), form: str = ".2f"):
  if value is None:
    return NONE
  known = interval[0] is not None
  return f"{value:{form}}" + (f" ({interval[0]:{form}} to {interval[1]:{form}})" if known else "")


def ranked(found: dict, key: tuple[float, str]) -> list[str]:
  """The categories of one setting in order of the baseline's tau, "all" last."""
  tau = {row["category"]: row["baseline_tau"] or 0 for row in found["differences"]
         if (row["temperature"], row["rule"]) == key}
  return [*sorted((c for c in tau if c != "all"), key=lambda c: -tau[c]), "all"]


def tables(found: dict) -> list[Table]:
  """One table of all prompts and one by category for each setting, then speed."""
  out = []
  cells = {(r["temperature"], r["rule"], r["category"], r["run"]): r for r in found["differences"]}
  others = [run["label"] for run in found["runs"][1:]]
  for key in found["settings"]:
    where = f"T={key[0]:g}, {key[1]}"
    pooled = [cells[(*key, "all", label)] for label in others]
    lines = [[found["baseline"], found["runs"][0]["drafter"], _value(
        pooled[0]["baseline_tau"], pooled[0]["baseline_tau_ci"]), "baseline", "", ""]]
    for run, row in zip(found["runs"][1:], pooled, strict=True):
      lines.append([
          run["label"], run["drafter"], _value(row["tau"], row["tau_ci"]),
          _value(row["difference"], row["difference_ci"], "+.3f") + " *" * row["significant"],
          "" if row["p_holm"] is None else f"{row['p_holm']:.2g}",
          f"{row['better']}/{row['equal']}/{row['worse']}"])
    out.append(Table(
        f"All {pooled[0]['prompts']} prompts at {where}",
        ["run", "drafter", "τ (95 %)", "difference (95 %)", "p\n(Holm)", "prompts\n+/=/−"],
        lines,
        text_columns=2))
    lines = []
    for category in ranked(found, key):
      row = [cells[(*key, category, label)] for label in others]
      lines.append([category, str(row[0]["prompts"]), _value(row[0]["baseline_tau"]), *[
          _value(r["difference"], r["difference_ci"], "+.2f") + " *" * r["significant"]
          for r in row]])
    out.append(Table(f"By category at {where}: difference of τ from {found['baseline']}",
                     ["category", "prompts", f"{found['baseline']}\nτ", *others], lines))
  if found["speed"]:
    keys = ("draft_cost", "verify_cost")
    out.append(Table(
        "Speed of each run", ["run", "dtype", "T", "plain\ntok/s", "spec.\ntok/s",
                              "speed-up (95 %)", "c", "v(K+1)"],
        [[r["run"], r["dtype"], f"{r.get('temperature', 0):g}",
          f"{r['plain_tokens_per_s']:.1f}", f"{r['speculative_tokens_per_s']:.1f}",
          _value(r["speedup"], r["speedup_ci"]), *[_value(r.get(k)) for k in keys]]
         for r in found["speed"]],
        "each against its own plain side; runs were not timed in turn, so compare speed-ups, not "
        "rates", text_columns=2))
  return out


def markdown(found: dict) -> str:
  """The page: notes first, then the tables and the plot."""
  out = [f"# τ of {len(found['runs'])} runs, baseline {found['baseline']}", ""]
  out += [f"> Note: {line}\n" for line in found["notes"]]
  out += [METHOD.format(count=found["count"]), "", "![differences by category](compare.svg)", ""]
  for table in tables(found):
    out += markdown_table(table)
  return "\n".join(out).rstrip() + "\n"


def csv_text(found: dict) -> str:
  """Every difference on a line, intervals in two columns."""
  out = io.StringIO()
  fields = ["baseline", "run", "temperature", "rule", "category", "prompts", "tau", "tau_low",
            "tau_high", "baseline_tau", "difference", "difference_low", "difference_high", "p",
            "p_holm", "significant", "better", "equal", "worse"]
  writer = csv.DictWriter(out, fields, extrasaction="ignore", lineterminator="\n")
  writer.writeheader()
  for row in found["differences"]:
    ends = {f"{name}_{end}": row[f"{name}_ci"][k] for name in ("tau", "difference")
            for k, end in enumerate(("low", "high"))}
    writer.writerow({"baseline": found["baseline"], **row, **ends})
  return out.getvalue()


def plot(found: dict) -> str:
  """SVG: the differences by category with their intervals, a panel for each setting."""
  with matplotlib.rc_context({**report_plots.STYLE, "svg.hashsalt": "compare"}):
    many = len(found["runs"]) - 1
    figure = Figure(figsize=(5 * len(found["settings"]), 1.6 + 0.3 * many + 0.4 * max(
        len(ranked(found, key)) for key in found["settings"])), layout="constrained")
    panels = figure.subplots(1, len(found["settings"]), squeeze=False)[0]
    for axes, key in zip(panels, found["settings"], strict=True):
      rows = [(category, [(r["run"], r["difference"], r["difference_ci"])
                          for r in found["differences"] if r["category"] == category
                          and (r["temperature"], r["rule"]) == key])
              for category in ranked(found, key)]
      report_plots.draw_forest(axes, rows, line=0)
      axes.set_title(f"T={key[0]:g}, {key[1]}")
      axes.set_xlabel(f"difference of τ from {found['baseline']}")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=1)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
  return out.getvalue()


def write(found: dict, folder: Path) -> None:
  """Writes compare.md, compare.csv and compare.svg.

  Raises:
    UserError: the folder cannot be written.
  """
  try:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("compare.md", markdown(found)), ("compare.csv", csv_text(found)),
                       ("compare.svg", plot(found))):
      (folder / name).write_text(text, encoding="utf-8")
  except OSError as error:
    raise UserError(f"--out={folder}: {error.strerror}") from None


# The command line.


def define_flags(values: flags.FlagValues) -> None:
  """Defines the flags of this program in `values`."""
  own = dict(flag_values=values)
  flags.DEFINE_string("out", "runs/compare", "folder for compare.md, .csv and .svg", **own)
  flags.DEFINE_string("baseline", None, "the run that the others are compared with; by default "
                      "the first", **own)
  flags.DEFINE_bool("allow_different", False, "compare what the runs share where they differ in "
                    "more than the drafter", **own)


def parse(argv: Sequence[str], values: flags.FlagValues) -> tuple[list[str], flags.FlagValues]:
  """The run folders, the baseline first, and the flags.

  Raises:
    UserError: one line for whatever is wrong.
  """
  values.set_gnu_getopt(True)  # flags may stand behind the folders
  try:
    paths = values(list(argv))[1:]
  except flags.Error as error:
    raise UserError(" ".join(str(error).split())) from None
  if values.baseline is not None:
    wanted = [p for p in paths if os.path.normpath(p) == os.path.normpath(values.baseline)]
    if not wanted:
      raise UserError(f"--baseline={values.baseline}: is none of the runs")
    paths.remove(wanted[0])
    paths.insert(0, wanted[0])
  if len(paths) < 2:
    raise UserError("two run folders at least are needed: python -m launch.compare RUN RUN...")
  return paths, values


def execute(options: tuple[list[str], flags.FlagValues]) -> None:
  """Compares, writes and prints."""
  paths, values = options
  found = compare(load(paths), values.allow_different)
  write(found, Path(values.out))
  console = Console()
  for line in found["notes"]:
    console.print(Text(f"Note: {line}", style="yellow"))
  for table in tables(found):
    print_table(table, console)
  console.print(Text("\n" + METHOD.format(count=found["count"]), style="dim"))
  console.print(Text(f"{values.out}/compare.md"))


def main() -> None:
  """The command line."""
  define_flags(flags.FLAGS)
  command.run(execute, lambda argv: parse(argv, flags.FLAGS))


if __name__ == "__main__":
  main()
