"""The line a stage prints where there is no terminal, and the bar where there is one."""

import io

from train_drafter.progress import Bar, clock_text


class Clock:
  """Seconds that pass only when a test says so."""

  now = 100.0

  def __call__(self):
    return self.now


class Terminal(io.StringIO):
  def isatty(self):
    return True


def lines(stream):
  return stream.getvalue().splitlines()


def test_one_line_per_interval_and_one_at_the_end():
  stream, clock = io.StringIO(), Clock()
  with Bar("generate", total=10, interval=10.0, stream=stream, clock=clock) as bar:
    for _ in range(10):
      clock.now += 4.0
      bar.advance(amount=100)
  assert lines(stream) == [
    "generate  3/10  25 tokens/s  0:12  eta 0:28",
    "generate  6/10  25 tokens/s  0:24  eta 0:16",
    "generate  9/10  25 tokens/s  0:36  eta 0:04",
    "generate  10/10  25 tokens/s  0:40",
  ]


def test_a_resumed_stage_predicts_from_its_own_steps():
  stream, clock = io.StringIO(), Clock()
  with Bar("train", total=100, start=90, stream=stream, clock=clock) as bar:
    assert bar.remaining is None
    clock.now += 10.0
    bar.advance(5, note="loss 2.5")
    assert bar.remaining == 10.0
  assert lines(stream)[0] == "train  95/100  0:10  eta 0:10  loss 2.5"


def test_a_budget_bounds_the_prediction():
  clock = Clock()
  with Bar("generate", total=100, budget=20.0, stream=io.StringIO(), clock=clock) as bar:
    clock.now += 5.0
    bar.advance(10)
    assert bar.remaining == 15.0  # and not the 45 that all of it would take
    clock.now += 30.0
    assert bar.remaining == 0
    bar.advance(89)
    clock.now -= 30.0
    assert 0 < bar.remaining < 1


def test_an_error_leaves_the_true_count():
  stream = io.StringIO()
  try:
    with Bar("train", total=10, stream=stream, clock=Clock()) as bar:
      bar.advance(3)
      raise KeyError
  except KeyError:
    pass
  assert lines(stream) == ["train  3/10  0:00  eta 0:00"]


def test_a_terminal_gets_a_bar_with_the_numbers():
  stream, clock = Terminal(), Clock()
  with Bar("generate", total=4, unit="tokens", stream=stream, clock=clock) as bar:
    clock.now += 2.0
    bar.advance(4, amount=5000, note="[structured]")
  text = stream.getvalue()
  assert "generate" in text and "4/4  2,500 tokens/s  0:02  [structured]" in text
  assert "\x1b[" in text


def test_nothing_is_printed_inside_pytest(capsys):
  with Bar("generate", total=1) as bar:
    bar.advance(1)
  assert capsys.readouterr().out == ""


def test_clock_text():
  assert [clock_text(s) for s in (0, 59.6, 61, 3600, 36_061)] == [
    "0:00", "1:00", "1:01", "1:00:00", "10:01:01",
  ]


def test_a_part_without_steps_names_none():
  stream, clock = io.StringIO(), Clock()
  with Bar("costs", total=0, stream=stream, clock=clock):
    clock.now += 33.0
  assert lines(stream) == ["costs  0:33"]
