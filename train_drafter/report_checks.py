"""What a reader of the report must know before quoting it: floors, loops, broken promises.

Called by `train_drafter.report`; each function reads entries of the report and returns or adds
warnings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spec_jax.errors import UserError
from spec_jax.identity import CAUSES
from spec_jax.verify import RULES
from train_drafter.report_cells import setting_label, tau_text

SELF = "self"
SELF_SHARE = 0.9  # of accepted drafts below which a target that drafts for itself is not at ease

# What a training estimate may predict, and where real decoding's value and interval stand.
ESTIMATES = {
    "tau": lambda group: (group["tau"], group["tau_ci"]),
    "acceptance_rate": lambda group: (group["acceptance_rate"], group["acceptance_rate_ci"]),
    "first_position": lambda group: (group["survival"][0], group["survival_ci"][0]),
}


def find(settings: Sequence[dict], temperature: float, rule: str | None = None) -> dict | None:
  """The first entry at that temperature (and rule, if given)."""
  for entry in settings:
    if entry["temperature"] == temperature and rule in (None, entry["rule"]):
      return entry
  return None


def check_estimates(estimates: Sequence[dict], settings: Sequence[dict],
                    warnings: list[str]) -> list[dict]:
  """Puts real decoding beside each training estimate and warns where they disagree."""
  out = []
  for given in estimates:
    if "temperature" not in given:
      raise UserError("report: training_estimate.temperature is missing")
    entry = find(settings, given["temperature"], given.get("rule"))
    row = {**given, "checks": {}}
    out.append(row)
    if entry is None:
      warnings.append(f"the training estimate is for T={given['temperature']:g}, where nothing "
                      "was decoded: it stands unchecked")
      continue
    for name, look in ESTIMATES.items():
      if given.get(name) is None:
        continue
      measured, interval = look(entry["all"])
      agrees = None
      if interval[0] is not None:
        agrees = interval[0] <= given[name] <= interval[1]
      row["checks"][name] = {"estimate": given[name], "measured": measured,
                             "interval": interval, "agrees": agrees}
      where = f"at {setting_label(entry, settings)}"
      if agrees is None:
        warnings.append(f"the training estimate of {name} {where} cannot be checked: too few "
                        "prompts for an interval")
      elif not agrees:
        warnings.append(
            f"the training estimate of {name} {where} is {given[name]:.3f}, real decoding gave "
            f"{measured:.3f} ({interval[0]:.3f} to {interval[1]:.3f}): trust the latter")
  return out


def acceptance_warnings(drafter: str, settings: Sequence[dict],
                        controls: Mapping[str, dict]) -> list[str]:
  """What a reader must know before quoting a tau of this report."""
  out = []
  for entry in controls.get(SELF, {}).get("settings", ()):
    share = entry["all"]["acceptance_rate"]
    if share is not None and share < SELF_SHARE:
      out.append(f"at {setting_label(entry, settings)} the target accepted only "
                 f"{100 * share:.0f} % of its own drafts: rounding does not explain that")
  for entry in settings:
    where, group = setting_label(entry, settings), entry["all"]
    if entry["rule"] in RULES and not RULES[entry["rule"]].lossless:
      out.append(f"at {where} the rule {entry['rule']} is NOT lossless: the text does not have the "
                 "target's law")
    untrained = find(controls.get("untrained", {}).get("settings", ()), entry["temperature"],
                      entry["rule"])
    if untrained:
      low, high = group["tau_ci"][0], untrained["all"]["tau_ci"][1]
      ours, floor = (low, high) if None not in (low, high) else (group["tau"],
                                                                 untrained["all"]["tau"])
      if ours is not None and floor is not None and ours <= floor:
        out.append(f"at {where} {drafter} is at the floor: tau {tau_text(group)} against "
                   f"{tau_text(untrained['all'])} of its untrained self; {CAUSES}")
      behind = [name for name, own in entry["categories"].items()
                if name in untrained["categories"] and own["tau"] is not None
                and own["tau"] <= (untrained["categories"][name]["tau"] or 0)]
      if behind:
        out.append(f"at {where} {drafter} is not above its untrained self in: "
                   + ", ".join(behind))
    early, low = group["tau_before_first_loop"], group["tau_ci"][0]
    if early is not None and low is not None and early < low:
      out.append(f"at {where} looped output carries part of the number: tau {group['tau']:.2f}, "
                 f"before the first loop {early:.2f} "
                 f"({100 * group['looped_token_share']:.0f} % of the tokens are looped)")
  return out


def context_warnings(
    drafter: str, records: Mapping[tuple[float, str], Sequence[dict]]) -> list[str]:
  """Rounds without a draft: there the text had passed the drafter's own context."""
  out = []
  for (temperature, rule), rows in sorted(records.items()):
    plain = sum(int((row["records"].proposed == 0).sum()) for row in rows)
    if plain:
      out.append(f"at T={temperature:g} ({rule}) {plain} of "
                 f"{sum(row['records'].rounds for row in rows)} rounds were plain decoding: the "
                 f"text had passed the context of {drafter}")
  return out
