"""Decoding shared out over the processes of a run: each its prompts, one file in the end.

Called by evaluate.py. A row depends on its prompt and on the number of that, which seeds it, not on
the rows that are decoded beside it: the shares are what one process decodes.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from train_drafter import distributed, report


def records(
    path: Path, key: tuple[str, float, str], members: Sequence[int],
    decode: Callable[[Sequence[int]], list[dict]]) -> list[dict]:
  """The records at `path`, decoded unless they lie there already.

  Args:
    path: of the file that the first process writes.
    key: drafter, temperature and rule.
    members: numbers of the prompts, ascending.
    decode: takes those of them that are this process's own and returns their rows in that order.

  Raises:
    UserError: a file is damaged, or another process failed or is missing.
  """
  name, *setting = key
  load = lambda file: report.load_records(file)[name][tuple(setting)]
  save = lambda file, rows: report.save_records(file, {name: {tuple(setting): rows}})
  # No time-out: the first process may have something to measure before.
  if not distributed.from_primary(f"evaluate: {path.stem}", path.exists(), math.inf):
    if distributed.count() == 1:
      save(path, decode(members))
    else:
      _in_shares(path, members, decode, load, save)
  return load(path)


def _in_shares(path, members, decode, load, save) -> None:
  count = min(distributed.count(), len(members))
  share = lambda i: path.with_name(f"{path.stem}.share-{i}-of-{count}.jsonl")
  mine = share(distributed.index())
  if distributed.index() < count and not mine.exists():  # there when a stopped run goes on
    save(mine, decode(distributed.share(members)))
  # As long as the others live: one share may take longer than another.
  distributed.barrier(f"evaluate: {path.stem}, all shares", math.inf)
  if distributed.is_primary():
    rows: list = [None] * len(members)
    for i in range(count):
      rows[i::distributed.count()] = load(share(i))
    save(path, rows)
    for file in path.parent.glob(f"{path.stem}.share-*.jsonl"):
      file.unlink()
  distributed.barrier(f"evaluate: {path.stem}, together")
