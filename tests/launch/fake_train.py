"""Stands in for `python -m train_drafter` in tests of the launchers: the same flags and folders,
with stages that take no JAX. Behaviour comes from --config.prompts.system:

  fail=STAGE    ends with an error line    crash=STAGE    dies of SIGKILL
  slow=STAGE    saves a part and waits for the file `go` in the sweep's folder, or for SIGTERM

Every stage made appends a line to made.txt in the sweep's folder.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

STAGES = ("prompts", "generate", "train", "evaluate")


def make(stage: str, workdir: Path, options: dict) -> None:
  folder = workdir / stage
  root = workdir.parent.parent
  file = folder / "manifest.json"
  if file.exists() and json.loads(file.read_text())["complete"]:
    return
  behaviour = options.get("config.prompts.system", "")
  folder.mkdir(parents=True, exist_ok=True)
  part = folder / "part"
  resumed = part.exists()
  if f"slow={stage}" in behaviour:
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    part.write_text("half")
    print(f"{stage}: at work", flush=True)
    end = time.monotonic() + 120  # a test that failed leaves no program behind
    while not (root / "go").exists():
      if stopped or time.monotonic() > end:
        sys.exit(143)
      time.sleep(0.02)
  if f"crash={stage}" in behaviour:
    os.kill(os.getpid(), signal.SIGKILL)
  if f"fail={stage}" in behaviour:
    print(f"some line\nerror: {stage}.field=1 is wrong\nlast line", flush=True)
    sys.exit(2)
  if stage == "train":
    rows = [{"step": 3, "split": "train"},
            {"step": 4, "split": "validation", "greedy_match": 0.5, "alpha": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  if stage == "evaluate":
    group = {"tau": 1.5, "tau_ci": [1.4, 1.6]}
    (folder / "report.json").write_text(json.dumps(
      {"settings": [{"temperature": 0.0, "rule": "greedy", "all": group}]}))
  config = {"flags": options}
  text = json.dumps({"config": config, "inputs": {"target weights": "", "tokenizer": "",
                                                  "chat template": ""}},
                    sort_keys=True, separators=(",", ":"))
  target = {"name": "", "weights": "", "tokenizer": "", "chat_template": ""}
  file.write_text(json.dumps({
    "stage": stage, "config": config, "hash": hashlib.sha256(text.encode()).hexdigest(),
    "inputs": {}, "target": target, "complete": True, "counts": {"answer_tokens": 7}}))
  with open(root / "made.txt", "a") as made:
    made.write(f"{stage} {workdir.name} {'resumed' if resumed else 'fresh'}\n")


def main() -> None:
  options = dict(arg[2:].split("=", 1) for arg in sys.argv[1:])
  workdir = Path(options["workdir"])
  workdir.mkdir(parents=True, exist_ok=True)
  steps = int(options.get("config.train.steps", 4))
  (workdir / "config.json").write_text(json.dumps(
    {"config": {"train": {"steps": steps}, "evaluate": {"draft_len": 2}}}))
  for stage in STAGES if options["stage"] == "all" else [options["stage"]]:
    make(stage, workdir, options)


if __name__ == "__main__":
  main()
