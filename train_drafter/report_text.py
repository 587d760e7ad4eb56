"""The acceptance report for people: tables for the terminal (80 columns and more) and report.md.

The tables are plain rows of strings, made once and rendered twice. Called by
`train_drafter.report`; reads nothing but the report's own dict.
"""

from __future__ import annotations

from rich.box import Box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from train_drafter import report_sections as sections
from train_drafter.report_cells import (
  NONE,
  Table,
  number,
  percent,
  setting_label,
  tau_text,
  with_interval,
)

# A rule under the header and a blank between columns: 80 columns hold the widest table.
_BOX = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")


def _of_control(report: dict, name: str, entry: dict) -> dict | None:
  """The control's entry for the same temperature and rule."""
  for other in report["controls"][name]["settings"]:
    if (other["temperature"], other["rule"]) == (entry["temperature"], entry["rule"]):
      return other
  return None


def _category_table(report: dict) -> Table:
  settings = report["settings"]
  labels = [setting_label(e, settings) for e in settings]
  # Figures of several settings share a cell, in the order of the tau columns.
  header = ["category", *[f"τ {label}\n(95 %)" for label in labels], "acc.\n%", "loops\n%",
            *[f"{name}\nτ" for name in report["controls"]]]

  def group_of(entry, category):
    return entry["all"] if category == "all" else entry["categories"].get(category)

  def joined(groups, figure):
    return "/".join(figure(g) if g else NONE for g in groups)

  rows = []
  for category in [*sections.ranked(settings), "all"]:
    groups = [group_of(e, category) for e in settings]
    controls = []
    for name in report["controls"]:
      entries = [_of_control(report, name, e) for e in settings]
      controls.append(joined([group_of(e, category) if e else None for e in entries],
                             lambda g: number(g["tau"])))
    rows.append([category, *[tau_text(g) if g else NONE for g in groups],
                 joined(groups, lambda g: percent(g["acceptance_rate"])),
                 joined(groups, lambda g: percent(g["looped_token_share"])), *controls])
  sizes = [g["prompts"] for g in settings[0]["categories"].values()]
  each = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)}–{max(sizes)}"
  note = (f"{each} prompts per category, in order of τ at {labels[0]}\n"
          "acc.: drafts accepted; loops: looped tokens")
  if len(labels) > 1:
    note += f"\na/b: {' / '.join(labels)}"
  return Table("τ (tokens per verification pass) by category", header, rows, note)


def _every_setting(report: dict):
  """(drafter, label, all-group) of the trained drafter and of the controls."""
  lists = {report["drafter"]: report["settings"]}
  lists.update({name: c["settings"] for name, c in report["controls"].items()})
  for name, settings in lists.items():
    for entry in settings:
      yield name, setting_label(entry, settings), entry["all"]


def overall_table(report: dict) -> Table:
  header = ["drafter", "T", "rounds", "EOS\ncut %", "τ pooled\n(95 %)", "τ mean\n(95 %)", "acc.\n%",
            "loops\n%", "τ before\nloops"]
  rows = [[name, label.removeprefix("T="), str(g["rounds"]), percent(g["eos_cut_share"], 1),
           tau_text(g), with_interval(g["tau_mean"], g["tau_mean_ci"]),
           percent(g["acceptance_rate"], 1), percent(g["looped_token_share"], 1),
           number(g["tau_before_first_loop"])]
          for name, label, g in _every_setting(report)]
  return Table("All prompts", header, rows,
               "τ pooled weighs rounds, τ mean weighs prompts; EOS cut: rounds ended inside the "
               "block by EOS", text_columns=2)


def position_table(report: dict) -> Table:
  header = ["drafter", "T", "% of rounds", *[str(k + 1) for k in range(report["draft_len"])]]
  rows = []
  for name, label, group in _every_setting(report):
    for kind in ("survival", "conditional"):
      first = kind == "survival"
      rows.append([name if first else "", label.removeprefix("T=") if first else "", kind,
                   *[percent(v, 0) for v in group[kind]]])
  return Table("Acceptance by position in the block", header, rows, text_columns=3)


def speed_table(report: dict) -> Table:
  header = ["dtype", "drafter", "T", "plain\ntok/s", "spec.\ntok/s", "speed-up\n(95 %)",
            "pooled", "pre-\ndicted", "draft\ncost", "verify\ncost"]
  rows = [[r["dtype"], r["drafter"], f"{r['temperature']:g}",
           number(r["plain_tokens_per_s"], 1), number(r["speculative_tokens_per_s"], 1),
           with_interval(r["speedup"], r["speedup_ci"]), number(r.get("speedup_pooled")),
           number(r["predicted_speedup"]),
           number(r["draft_cost"]), number(r["verify_cost"])] for r in report["speed"]]
  note = ("speed-up: median over prompts; pooled: of all tokens and seconds\n"
          "costs in plain steps of the target")
  return Table("Speed", header, rows, note, text_columns=2)


def _tables(report: dict) -> list[Table]:
  tables = [_category_table(report), overall_table(report), position_table(report)]
  tables += [speed_table(report)] if report["speed"] else []
  return [t for t in (*tables, *sections.tables(report)) if t.rows]


def _lines(report: dict) -> list[tuple[str, list[str]]]:
  return [*sections.lines(report), ("Identity", identity_lines(report)),
          ("Training estimate", estimate_lines(report))]


def title(report: dict) -> str:
  return (f"{report['drafter']} for {report['target']}: K = {report['draft_len']}, "
          f"{report['settings'][0]['all']['prompts']} prompts, "
          f"up to {report['max_new_tokens']} new tokens")


def headline_text(report: dict) -> str:
  """One sentence on speed: which drafter, in which dtype, against which plain decoding."""
  line = report["headline"]
  if line is None:
    return "Speed was not measured."
  plain = f"plain decoding ({line['plain_dtype']}, {line['plain_tokens_per_s']:.1f} tokens/s)"
  ratio = f"{with_interval(line['speedup'], line['speedup_ci'])} times"
  what = f"{line['drafter']} in {line['dtype']}, T={line['temperature']:g}"
  if line["speedup"] < 1:
    return (f"No drafter is faster than {plain}; the best is {what}: "
            f"{line['speculative_tokens_per_s']:.1f} tokens/s, {ratio} that.")
  pooled = line.get("speedup_pooled")
  pooled = "" if pooled is None else f"; {pooled:.2f} times over all tokens and seconds"
  return (f"Fastest: {what}: {line['speculative_tokens_per_s']:.1f} tokens/s, {ratio} the fastest "
          f"{plain}{pooled}.")


def identity_lines(report: dict) -> list[str]:
  """One line per identity row."""
  def share(value):
    return "not measured" if value is None else f"{100 * value:.1f} %"

  lines = []
  for r in report["identity"]:
    line = (f"{r['dtype']}, {r['drafter']}, {r['prompts']} prompts: identical to same-shape plain "
            f"{share(r['identical_same_shape'])}, to one-token plain "
            f"{share(r['identical_width_1'])}")
    apart = r.get("divergences")
    if apart:
      rounding = sum(d["within_tolerance"] for d in apart)
      line += (f"; {rounding} of {len(apart)} differences at a tie within rounding "
               f"({r['tolerance']:.2g})")
    lines.append(f"{r['verdict']}: {line}" if r.get("verdict") else line)
  return lines


def estimate_lines(report: dict) -> list[str]:
  """Training's promises beside what decoding gave."""
  lines = []
  for row in report["training_estimate"]:
    for name, check in row["checks"].items():
      lines.append(f"{name} at T={row['temperature']:g}: training estimated "
                   f"{check['estimate']:.3f}, decoding gave {number(check['measured'], 3)}")
  if lines:
    lines.append("estimated on held-out training answers, all generate.temperatures together")
  return lines


def print_table(table: Table, console: Console) -> None:
  """Prints one table under its title; rows that begin with "all" are bold."""
  grid = RichTable(box=_BOX, padding=(0, int(console.width >= 100), 0, 0), show_edge=False,
                   pad_edge=False)
  for i, name in enumerate(table.header):
    grid.add_column(Text(name), justify="left" if i < table.text_columns else "right",
                    vertical="bottom")
  for row in table.rows:
    grid.add_row(*[Text(cell) for cell in row], style="bold" if row[0] == "all" else None)
  console.print(Text(f"\n{table.title}", style="bold"))
  console.print(grid)
  if table.note:
    console.print(Text(table.note, style="dim"))


def print_report(report: dict, console: Console | None = None) -> None:
  """Prints the report; 80 columns are enough for up to two temperatures and eight drafts."""
  console = console or Console()
  console.print(Text(title(report), style="bold"))
  for table in _tables(report):
    print_table(table, console)
  console.print()
  console.print(Text(headline_text(report), style="bold green"))
  for heading, lines in _lines(report):
    if lines:
      console.print(Text(f"\n{heading}", style="bold"))
      for line in lines:
        console.print(Text(line, style="bold red" if sections.is_loud(line) else ""))
  if report["warnings"]:
    console.print()
    for line in report["warnings"]:
      console.print(Text(f"Warning: {line}", style="yellow"))
  console.print(Text("\nDefinitions", style="bold"))
  for name, meaning in report["definitions"].items():
    console.print(Text(f"{name}: {meaning}", style="dim"))


def markdown_table(table: Table) -> list[str]:
  """The lines of one table with its heading and note."""
  def cells(row):
    return "| " + " | ".join(c.replace("\n", " ").replace("|", "\\|") for c in row) + " |"

  marks = ["---" if i < table.text_columns else "---:" for i in range(len(table.header))]
  return [f"## {table.title}", "", cells(table.header), cells(marks),
          *[cells(row) for row in table.rows],
          *(["", table.note.replace("\n", "; "), ""] if table.note else [""])]


def markdown(report: dict) -> str:
  """The same tables and lines as a Markdown page."""
  out = [f"# {title(report)}", "", f"**{headline_text(report)}**", ""]
  out += [f"> Warning: {line}\n" for line in report["warnings"]]
  for table in _tables(report):
    out += markdown_table(table)
  for table in sections.computed_tables(report):
    out += markdown_table(table)
  for heading, lines in _lines(report):
    if lines:
      loud = lambda line: f"- **{line}**" if sections.is_loud(line) else f"- {line}"
      out += [f"## {heading}", "", *map(loud, lines), ""]
  out += ["## Definitions", ""]
  out += [f"- `{name}`: {meaning}" for name, meaning in report["definitions"].items()]
  return "\n".join(out) + "\n"
