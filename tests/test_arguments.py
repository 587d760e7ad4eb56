"""Arguments of the wrong type are named; what means the same in another type passes."""

import numpy as np
import pytest

from spec_jax import arguments, drafters
from spec_jax.errors import UserError
from spec_jax.generate import Run, encode_prompt
from tests import tiny


def test_what_means_the_same_passes():
  assert arguments.whole("seed", np.int64(7)) == 7 and arguments.whole("seed", np.array(7)) == 7
  assert arguments.real("top_p", 1) == 1.0 and arguments.real("top_p", np.float32(0.5)) == 0.5
  per = arguments.per_prompt
  assert per("t", 0.5, 3, arguments.real) == [0.5] * 3
  assert per("t", np.array([0, 1]), 2, arguments.whole) == per("t", range(2), 2, arguments.whole)
  assert arguments.texts("stop", "END") == ("END",)
  assert arguments.texts("stop", ["a", "b"]) == ("a", "b")
  assert arguments.ids("eos_ids", {5}, 64) == (5,)
  assert arguments.bias({7: 1, np.int32(3): -np.inf}, 64) == ((3, -np.inf), (7, 1.0))
  ids = np.array([5, 6, 7])
  assert encode_prompt(tiny.target(), ids) == [5, 6, 7]
  assert Run(tiny.target(), None, np.array([[5, 6], [7, 8]]), draft_len=0).ids == [[5, 6], [7, 8]]


@pytest.mark.parametrize("options,message", [
    ({"draft_len": 2.5}, "draft_len=2.5 must be a whole number"),
    ({"draft_len": "5"}, "draft_len='5'"), ({"draft_len": True}, "draft_len=True"),
    ({"batch_size": 1.0}, "batch_size=1.0"), ({"max_length": "x"}, "max_length='x'"),
    ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"), ({"max_new_tokens": "7"}, "tokens='7'"),
    ({"max_new_tokens": None}, "max_new_tokens=None"), ({"max_new_tokens": [2.0]}, "tokens=2.0"),
    ({"temperature": None}, "temperature=None must be a number"),
    ({"temperature": "hot"}, "temperature='hot'"), ({"top_p": "x"}, "top_p='x'"),
    ({"top_k": 1.5}, "top_k=1.5"), ({"min_p": None}, "min_p=None"), ({"seed": 1.5}, "seed=1.5"),
    ({"seed": None}, "seed=None"), ({"sequence_ids": [1.5]}, "sequence_ids=1.5"),
    ({"stop": None}, "stop=None must be strings"), ({"stop": [3]}, r"stop=\[3\]"),
    ({"stop": b"x"}, "stop=b'x'"), ({"eos_ids": 2}, "eos_ids=2 must be ids"),
    ({"eos_ids": ["x"]}, "eos_ids: id='x'"), ({"eos_ids": [64]}, "eos_ids holds id 64"),
    ({"bias": [1]}, r"bias=\[1\] must be a mapping"), ({"bias": {"a": 1.0}}, "bias: id='a'"),
    ({"bias": {3: "x"}}, "bias of id 3='x'"), ({"drafter": "ngram"}, "drafter='ngram' is no dr"),
    ({"prompts": None}, "prompts must be a list"), ({"prompts": iter([[5]])}, "must be a list"),
    ({"prompts": [None]}, "prompt 0 is None, neither"), ({"prompts": [b"hi"]}, "prompt 0 is b'hi'"),
    ({"prompts": [{"role": "user", "content": "x"}]}, "prompt 0 is .*, neither"),
    ({"prompts": [[1.5, 2]]}, "prompt 0: id=1.5"), ({"prompts": [["a"]]}, "prompt 0: id='a'"),
    ({"prompts": [[True]]}, "prompt 0: id=True"),
    ({"prompts": [[5], [{"role": "user"}]]}, "prompt 1: chat template.*content"),
    ({"prompts": [[5], [{"role": "user", "content": None}]]}, "prompt 1: chat template"),
    ({"prompts": [[{"role": "user", "content": "x"}, "y"]]}, "prompt 0: id=.'role'")])
def test_a_wrong_type_is_named(options, message):
  given = {"prompts": [[5, 6]], "drafter": drafters.load_drafter("ngram", tiny.target()),
           "draft_len": 4} | options
  with pytest.raises(UserError, match=message):
    Run(tiny.target(), given.pop("drafter"), given.pop("prompts"), **given)
