"""Progress of a stage: a bar on a terminal, a line every few seconds elsewhere.

Every stage uses it for its long loop.
"""

import io
import os
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from train_drafter import distributed

_TERMINAL_REFRESH = 0.2  # seconds between two updates of the bar


def clock_text(seconds: float) -> str:
  """`seconds` as m:ss, or h:mm:ss from an hour on."""
  minutes, rest = divmod(int(round(seconds)), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Bar:
  """Counts `done` of `total` and the `unit`s behind them; a context manager.

  with Bar("generate", total=len(prompts)) as bar:
    ...
    bar.advance(rows_finished, amount=tokens_written, note="T=0.7")

  Rate and remaining time rest on what this process did: `start` is what an earlier one had done.
  The last line comes when the block is left, also by an error, and claims only what was done.
  """

  def __init__(
    self,
    title: str,
    total: int,
    *,
    start: int = 0,
    unit: str = "tokens",
    budget: float = 0.0,
    interval: float = 10.0,
    stream: io.TextIOBase | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Sets the bar up; nothing is printed before the block is entered.

    Args:
      title: name of the stage.
      total: how many steps, rows or prompts there are.
      start: how many were done before this process.
      unit: what `amount` counts; the rate is in units per second.
      budget: seconds after which the work ends, whatever is done; 0 for none.
      interval: seconds between two lines where the stream is no terminal.
      stream: where to print; standard output, or nowhere inside pytest and in processes other than
        the first.
      clock: seconds; a test passes its own.
    """
    if stream is None and "PYTEST_CURRENT_TEST" not in os.environ and distributed.is_primary():
      stream = sys.stdout
    self.title, self.total, self.start, self.done = title, total, start, start
    self.unit, self.amount, self.note = unit, 0.0, ""
    self._budget = budget
    self._interval, self._stream, self._clock = interval, stream, clock
    self._rich: Progress | None = None
    self._task = None

  def __enter__(self) -> "Bar":
    self._began = self._printed = self._clock()
    if self._stream is not None and self._stream.isatty():
      self._rich = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[text]}", markup=False),
        console=Console(file=self._stream),
        refresh_per_second=5,
      )
      self._task = self._rich.add_task(
        self.title, total=self.total, completed=self.done, text=self.text()
      )
      self._rich.start()
    return self

  def __exit__(self, *exc) -> None:
    self._show()
    if self._rich is not None:
      self._rich.stop()

  def advance(self, steps: int = 1, *, amount: float = 0.0, note: str | None = None) -> None:
    """Adds `steps` done and `amount` units; `note` replaces the text at the line's end."""
    self.done += steps
    self.amount += amount
    if note is not None:
      self.note = note
    wait = self._interval if self._rich is None else _TERMINAL_REFRESH
    if self._clock() - self._printed >= wait:
      self._show()

  @property
  def elapsed(self) -> float:
    """Seconds since the block was entered."""
    return self._clock() - self._began

  @property
  def rate(self) -> float:
    """Units per second of this process so far."""
    return self.amount / self.elapsed if self.elapsed > 0 else 0.0

  @property
  def remaining(self) -> float | None:
    """Seconds left at the pace of this process, within the budget; None before its first step."""
    if self.done <= self.start:
      return None
    left = max(self.total - self.done, 0) * self.elapsed / (self.done - self.start)
    return min(left, max(self._budget - self.elapsed, 0)) if self._budget else left

  def text(self) -> str:
    """The numbers of one line."""
    parts = [f"{self.done}/{self.total}"]
    if self.amount:
      parts.append(f"{self.rate:,.0f} {self.unit}/s")
    parts.append(clock_text(self.elapsed))
    if self.done < self.total:
      left = self.remaining
      parts.append("eta -" if left is None else f"eta {clock_text(left)}")
    if self.note:
      parts.append(self.note)
    return "  ".join(parts)

  def _show(self) -> None:
    self._printed = self._clock()
    if self._rich is not None:
      self._rich.update(self._task, completed=self.done, text=self.text(), refresh=True)
    elif self._stream is not None:
      print(f"{self.title}  {self.text()}", file=self._stream, flush=True)
