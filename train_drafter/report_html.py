"""The acceptance report as one self-contained page: no network, no script, plots inside.

Called by `train_drafter.report.write_report`; reads nothing but the report's own dict, and prints
no figure that is not in it. The sections `replay`, `prediction`, `memory` and `whatif` appear where
the report has them. Sentences and tables that report.md has too come from
`train_drafter.report_text`, plots from `train_drafter.report_plots`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from train_drafter import report_plots as plots
from train_drafter import report_sections as sections
from train_drafter.report_cells import NONE, Table, number, percent, setting_label, tau_text
from train_drafter.report_elements import bullets, figure, flat, pairs, table
from train_drafter.report_text import (
  estimate_lines,
  headline_text,
  identity_lines,
  overall_table,
  position_table,
  speed_table,
  title,
)
from train_drafter.report_whatif import whatif

_HIDDEN = ("prompt_hashes",)  # for programs

_CSS = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1a1c1f;--muted:#5d6470;--line:#d9dce1;--soft:#f4f5f7;
--warn:#fff4d6;--warnline:#b57b00;--shade:#0003;LIGHT}
@media (prefers-color-scheme:dark){:root{--bg:#14161a;--ink:#e8eaed;--muted:#a0a7b2;--line:#363b44;
--soft:#1d2026;--warn:#332a12;--warnline:#e0a93a;--shade:#fff4;DARK}}
@media print{:root{color-scheme:light;--bg:#fff;--ink:#000;--muted:#444;--line:#bbb;--soft:#f4f5f7;
--warn:#fff;--warnline:#000;--shade:#0000;LIGHT}nav{display:none!important}
.scroll{overflow:visible!important}
.tiles{grid-template-columns:1fr 1fr!important}.tile b{font-size:1.1rem!important}
main{max-width:none!important;padding:0!important}table{font-size:7.5pt!important}
.pair{grid-template-columns:1fr 1fr!important}
details::details-content{content-visibility:visible;height:auto}
figure,tr,.tile{break-inside:avoid}h2,h3{break-after:avoid}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1240px;margin:0 auto;padding:1.2rem 1rem 4rem}
h1{font-size:1.5rem;line-height:1.25;margin:.2rem 0 1rem;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.4rem 0 .6rem;padding-top:.8rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.4rem 0 .4rem}
p{margin:.4rem 0}ul{padding-left:1.2rem;margin:.4rem 0}li{overflow-wrap:anywhere}
nav{font-size:.9rem;display:flex;flex-wrap:wrap;gap:.2rem 1rem}
a{color:var(--c0)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(13rem,1fr));gap:.8rem;
margin:1rem 0}
.tile{background:var(--soft);border:1px solid var(--line);border-radius:8px;padding:.7rem .9rem}
.tile b{display:block;font-size:1.6rem;line-height:1.25;font-variant-numeric:tabular-nums}
.tile span{color:var(--muted);font-size:.85rem;display:block;overflow-wrap:anywhere}
.headline{font-size:1.05rem;font-weight:600}
.warnings{background:var(--warn);border-left:4px solid var(--warnline);border-radius:4px;
padding:.6rem 1rem;margin:1rem 0}
.warnings h2{border:0;margin:0;padding:0;font-size:1rem}
.loud{border:2px solid var(--warnline);background:var(--warn);border-radius:4px;font-weight:700;
padding:.2rem 1rem;margin:.6rem 0}
.scroll{overflow-x:auto;max-width:100%;/* shaded at the right while there is more to see */
background:linear-gradient(to left,var(--bg) 40%,#0000) right/2.5rem 100% no-repeat local,
linear-gradient(to left,var(--shade),#0000) right/1rem 100% no-repeat}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;margin:.4rem 0}
th,td{padding:.25rem .5rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{vertical-align:bottom;font-weight:600;white-space:pre}
.text{text-align:left}
th:first-child,td:first-child{position:sticky;left:0;background:var(--bg);padding-left:0}
tr.all td{font-weight:700}
.note{color:var(--muted);font-size:.85rem;white-space:pre-line}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(26rem,100%),1fr));gap:0 2rem}
.beside{display:grid;grid-template-columns:minmax(0,20rem) minmax(0,1fr);gap:0 1.5rem;
align-items:start}
@media (max-width:900px){.beside{grid-template-columns:minmax(0,1fr)}}
.pair>*{min-width:0}
figure{margin:.6rem 0}figure svg{width:100%;height:auto;display:block}
summary{cursor:pointer;margin:.3rem 0}
figcaption{font-size:.85rem;color:var(--muted)}
dl{display:grid;grid-template-columns:minmax(8rem,max-content) 1fr;gap:.3rem 1rem;font-size:.9rem}
dt{font-weight:600;overflow-wrap:anywhere}dd{margin:0;overflow-wrap:anywhere;min-width:0}
@media (max-width:560px){dl{grid-template-columns:1fr}dd{margin:0 0 .4rem 1rem}
dl{gap:0 1rem}h1{font-size:1.25rem}
table{font-size:.8rem}th,td{padding:.25rem .45rem}}
"""


def html(report: dict) -> str:
  """The whole page.

  Args:
    report: valid for `report_schema.validate_report`.
  """
  sections = [(name, body) for name, body in _sections(report) if body]
  anchors = {name: f"s{i}" for i, (name, _) in enumerate(sections)}
  css = _CSS.replace("LIGHT", plots.css_variables(False)).replace(
      "DARK", plots.css_variables(True))
  out = [
      "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
      '<meta name="viewport" content="width=device-width, initial-scale=1">',
      '<link rel="icon" href="data:,">',
      f"<title>{escape(title(report))}</title>", f"<style>{css}</style></head><body><main>",
      f"<h1>{escape(title(report))}</h1>",
      f'<p class="headline">{escape(headline_text(report))}</p>',
      _tiles(report), _warnings(report["warnings"]),
      "<nav>" + "".join(f'<a href="#{anchors[n]}">{escape(n)}</a>' for n, _ in sections) + "</nav>",
  ]
  for name, body in sections:
    out.append(f'<section><h2 id="{anchors[name]}">{escape(name)}</h2>{body}</section>')
  return "\n".join(out) + "\n</main></body></html>\n"


def _sections(report: dict) -> Iterator[tuple[str, str]]:
  yield "Acceptance", table(overall_table(report))
  yield "By category", _categories(report)
  yield "By position", _positions(report)
  yield "Controls", bullets(sections.control_lines(report))
  yield "Replay estimate", _replay(report)
  yield "Speed", _speed(report)
  yield "Predicted speed-up", _prediction(report)
  yield "Memory", _known(sections.memory_table(report)) + _judged(sections.memory_lines(report))
  yield "Where speculation pays", whatif(report.get("whatif") or {})
  yield "Identity", bullets(identity_lines(report))
  yield "Training estimate", bullets(estimate_lines(report))
  yield "Definitions", pairs(report["definitions"], short=False)
  yield "Provenance", _provenance(report["provenance"])


# The sections.


def _percent(value: float | None) -> str:
  return percent(value, 1)


def _known(made: Table) -> str:
  """The table, nothing for one without rows."""
  return table(made) if made.rows else ""


def _judged(lines: Sequence[str]) -> str:
  """Sentences as a list, those that must not be overlooked in a box."""
  loud = [line for line in lines if sections.is_loud(line)]
  box = f'<div class="loud">{bullets(loud)}</div>' if loud else ""
  return box + bullets([line for line in lines if not sections.is_loud(line)])


def _tiles(report: dict) -> str:
  tiles = [(f"τ at {setting_label(e, report['settings'])}, {e['rule']}", tau_text(e["all"]),
            f"{report['drafter']}, {e['all']['prompts']} prompts, {e['all']['rounds']} rounds")
           for e in report["settings"]]
  line = report["headline"]
  if line is not None:
    interval = ("" if line["speedup_ci"][0] is None else
                f" ({line['speedup_ci'][0]:.2f}–{line['speedup_ci'][1]:.2f})")
    tiles.append((f"best speed-up: {line['drafter']}, {line['dtype']}",
                  f"{line['speedup']:.2f}{interval}",
                  f"against the fastest plain decoding: {line['plain_dtype']}, "
                  f"{line['plain_tokens_per_s']:.1f} tokens/s"))
  judged = [row for row in report["identity"] if row.get("verdict")]
  if judged:
    tiles.append(("identity to plain decoding", judged[0]["verdict"],
                  f"{judged[0]['dtype']}, {judged[0]['drafter']}, {judged[0]['prompts']} prompts"))
  return '<div class="tiles">' + "".join(
      f'<div class="tile"><span>{escape(what)}</span><b>{escape(value)}</b>'
      f"<span>{escape(note)}</span></div>" for what, value, note in tiles) + "</div>"


def _warnings(warnings: Sequence[str]) -> str:
  return (f'<section class="warnings"><h2>Warnings</h2>{bullets(warnings)}</section>'
          if warnings else "")


def _at(settings: Sequence[dict], entry: dict) -> dict | None:
  """The entry of a control for the same temperature and rule."""
  return next((e for e in settings if (e["temperature"], e["rule"]) == (
      entry["temperature"], entry["rule"])), None)


def _controls_at(report: dict, entry: dict) -> dict[str, dict]:
  found = {name: _at(c["settings"], entry) for name, c in report["controls"].items()}
  return {name: e for name, e in found.items() if e is not None}


def _categories(report: dict) -> str:
  out = []
  for entry in report["settings"]:
    label = setting_label(entry, report["settings"])
    controls = _controls_at(report, entry)
    ranked = [(name, entry["categories"][name]) for name in sections.ranked([entry])]
    header = ["category", "τ\n(95 %)", "accepted\n%", "τ mean", "EOS\ncut %", "looped\n%",
              *[f"{name}\nτ" for name in controls], "prompts"]
    rows, points = [], []
    for name, group in [*ranked, ("all", entry["all"])]:
      groups = {c: e["all"] if name == "all" else e["categories"].get(name)
                for c, e in controls.items()}
      rows.append([name, tau_text(group), _percent(group["acceptance_rate"]),
                   number(group["tau_mean"]), _percent(group["eos_cut_share"]),
                   _percent(group["looped_token_share"]),
                   *[number(g["tau"]) if g else NONE for g in groups.values()],
                   str(group["prompts"])])
      points.append((name, [(report["drafter"], group["tau"], group["tau_ci"]), *[
          (c, g["tau"], g["tau_ci"]) for c, g in groups.items() if g]]))
    plot = plots.forest(points, "τ, tokens per verification pass",
                        f"τ by category at {label}, with 95 % intervals")
    out.append(f'<h3>{escape(f"{label}, {entry['rule']}")}</h3><div class="beside">'
               + figure(plot, "Bars: 95 % bootstrap interval over prompts.")
               + "<div>" + table(Table(f"τ by category at {label}", header, rows)) + "</div></div>")
  return "".join(out)


def _positions(report: dict) -> str:
  figures = []
  for entry in report["settings"]:
    label = setting_label(entry, report["settings"])
    others = {name: e["all"] for name, e in _controls_at(report, entry).items()}
    figures.append(figure(
        plots.positions(report["drafter"], entry["all"], others,
                        f"acceptance by position at {label}"),
        f"{label}, {entry['rule']}: share of rounds that accepted at least so many drafts, and of "
        "those that reached a position the share that accepted it"))
  return f'<div class="pair">{"".join(figures)}</div>' + table(position_table(report))


def _replay(report: dict) -> str:
  rows = report.get("replay") or ()
  if not rows:
    return ""
  figures = []
  for heat, rule in dict.fromkeys((row["temperature"], row["rule"]) for row in rows):
    own = sorted((r for r in rows if (r["temperature"], r["rule"]) == (heat, rule)),
                 key=lambda r: r["draft_len"])
    label = f"T={heat:g}, {rule}"
    xs = [r["draft_len"] for r in own]
    column = lambda key, own=own: [r.get(key) for r in own]
    curves = [("replay", xs, column("tau"), column("tau_ci"))]
    for key, name in (("uniform_anchor", "uniform anchors"), ("measured", "decoding (measured)")):
      if any(isinstance(v, int | float) for v in column(key)):
        curves.append((name, xs, column(key), column(f"{key}_ci")))
    figures.append(figure(
        plots.lines(curves, "K, drafts per round", "τ", f"estimates of τ at {label}",
                    zero=False), label))
  return (_judged(sections.agreement_lines(report)) + f'<div class="pair">{"".join(figures)}</div>'
          + table(sections.replay_table(report)))


def _speed(report: dict) -> str:
  rows = report["speed"]
  if not rows:
    return "<p>Speed was not measured.</p>"
  times = sections.times_table(report)
  out = bullets(sections.plain_lines(report)) + table(speed_table(report))
  return out + (f"<h3>{escape(times.title)}</h3>{table(times)}" if times.rows else "")


def _prediction(report: dict) -> str:
  rows = report.get("prediction") or ()
  if not rows:
    return ""
  figures = []
  for dtype in dict.fromkeys(row["dtype"] for row in rows):
    own = sorted((r for r in rows if r["dtype"] == dtype), key=lambda r: r["draft_len"])
    xs = [r["draft_len"] for r in own]
    column = lambda key, own=own: [r[key] for r in own]
    curves = [("S predicted", xs, column("speedup"), None)]
    if any(v is not None for v in column("measured")):
      curves.append(("S (measured)", xs, column("measured"), column("measured_ci")))
    figures.append(figure(plots.lines(curves, "K, drafts per round", "speed-up S",
                                      f"speed-up by K, {dtype}", line=1.0),
                          f"{dtype}: speed-up"))
  for cost in report.get("costs") or ():
    curves = [("v(K+1), a verification pass", list(range(len(cost["verify"]))), cost["verify"],
               None), ("c(K), a proposal", cost["draft_lens"], cost["draft"], None)]
    figures.append(figure(plots.lines(curves, "K, drafts per round", "plain steps",
                                      f"costs by K, {cost['dtype']}"),
                          f"{cost['dtype']}: costs, as measured"))
  return (_judged(sections.prediction_lines(report))
          + f'<div class="pair">{"".join(figures)}</div>'
          + table(sections.prediction_table(report)))


def _provenance(provenance: Mapping[str, Any]) -> str:
  shown = {name: value for name, value in provenance.items() if name not in (*_HIDDEN, "config")}
  exact = lambda value: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
  out = pairs({name: exact(value) for name, value in flat(shown)})
  config = provenance.get("config")
  if config:
    out += (f"<details><summary>Config</summary>"
            f"{pairs({name: exact(v) for name, v in flat(config)})}</details>")
  return out
