"""Where speculation pays by measured costs: batches and contexts on the machine that evaluated.

`report.py` makes the part "measured" of the section `whatif` with it, from the costs that
`forecast.costs` has timed and the replayed tau; the computed part is that of `whatif.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

AXES = {"batches": "batch", "contexts": "context"}


def measured(
    costs: Sequence[Mapping[str, Any]], taus: Mapping[int, float], draft_len: int,
) -> dict[str, list[dict]]:
  """Speed-up S = tau / (c + v) at every batch and context whose costs were timed.

  tau is that of the evaluation prompts everywhere: acceptance does not depend on the batch, and
  how it changes with the context is not measured.

  Args:
    costs: of `forecast.cost_part`, with "dtype".
    taus: replayed tau by K.
    draft_len: K of the report, that of rows without one.

  Returns:
    {"batches": [{"dtype", "batch", "draft_len", "plain_step_s", "draft_cost", "verify_cost",
    "tau", "speedup", "plain_tokens_per_s", "tokens_per_s": of all sequences, "chosen"}],
    "contexts": the same by "context", of one sequence}; the K with the largest speedup of each
    batch or context is chosen.
  """
  return {name: [row for cost in costs for row in _rows(
      cost["dtype"], cost.get(name) or (), axis, taus, draft_len)] for name, axis in AXES.items()}


def _rows(dtype, timed, axis, taus, draft_len) -> list[dict]:
  out: list[dict] = []
  for raw in timed:
    K = raw.get("draft_len", draft_len)
    tau, total = taus.get(K), raw["draft_cost"] + raw["verify_cost"]
    plain = raw.get("batch", 1) / raw["plain_step_s"]
    gain = None if tau is None else tau / total
    out.append({
        "dtype": dtype, axis: raw[axis], "draft_len": K, "plain_step_s": raw["plain_step_s"],
        "draft_cost": raw["draft_cost"], "verify_cost": raw["verify_cost"], "tau": tau,
        "speedup": gain, "plain_tokens_per_s": plain,
        "tokens_per_s": None if gain is None else plain * gain, "chosen": False})
  for place in dict.fromkeys(row[axis] for row in out):
    own = [row for row in out if row[axis] == place and row["speedup"] is not None]
    if own:
      max(own, key=lambda row: row["speedup"])["chosen"] = True
  return out


def lines(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
  """A sentence for each axis and dtype: which K where, and where plain decoding is faster."""
  out = []
  for name, axis in AXES.items():
    rows = [row for row in found.get(name, ()) if row["chosen"]]
    what = {"batch": "sequences decoded together", "context": "tokens of context"}[axis]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
      said = [f"{row[axis]}: " + (
          f"K = {row['draft_len']}, S {row['speedup']:.2f}" if row["speedup"] > 1 else
          f"plain decoding (S {row['speedup']:.2f} at best)")
              for row in rows if row["dtype"] == dtype]
      out.append(f"{dtype}, best by {what}: " + "; ".join(said))
  return out
