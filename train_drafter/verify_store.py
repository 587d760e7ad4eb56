"""The verify_store stage: re-runs the target on documents of the feature store and compares.

Reads `generate/` and `extract/`; writes nothing. `--stage=verify_store` runs it; the documents are
spread evenly over the store and run one by one, unpacked, so that a fault of the packing shows too.

The rule. Ids and loss mask must be those of the answers. By how much a stored state x exceeds
r * |y| of its distance from the live value y, with r = 2**-8 for the rounding to bfloat16 twice
over, is the order of summation, which differs between a packed pass and a single one. In units of
the rms over the D values of that token and layer (each tapped layer by itself, since deep layers
are larger) it may be 1e-3 for a float32 target. With bfloat16 or int8w a sum that rounds the other
way goes on through all layers: one value may be off by 1 rms, all D of a token by 2**-4 in the rms
(the demo target in bfloat16 on CPU reached 0.39 and 0.025 over 4,347 tokens; of the next layers'
tokens half are beyond 0.25).
Stored log-probabilities and logsumexp must lie within 1e-3 nats (float32) or 1 (bfloat16 and int8w,
where the same documents reached 0.42) of the live ones at the stored ids, which must be distinct
and, within the same tolerance, at least as probable as the live k-th.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spec_jax import sharding
from spec_jax.errors import UserError
from spec_jax.target import Target
from train_drafter import extract, manifest, placement
from train_drafter.config import Config
from train_drafter.generate import Answer, load_answers
from train_drafter.store import Store, StoredDocument

STAGE = "verify_store"
_ROUNDING = 2.0**-8
# In units of the rms: of one value, and of the D values of a token together.
_STATE_TOLERANCE = {
    "float32": (1e-3, 1e-3), "bfloat16": (1.0, 2.0**-4), "int8w": (1.0, 2.0**-4)}
_LOG_TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0, "int8w": 1.0}  # nats
_SHORTEST = 64  # documents are padded to this or twice it, and so on: few shapes


@dataclasses.dataclass(frozen=True)
class Difference:
  """How far one array of one document is from the live one.

  Attributes:
    what: the array, with the layer for features.
    share: the worst difference in units of what the rule allows; above 1 it fails.
    token: position of the worst one.
    value: that difference: of states beyond their rounding, in units of the rms; of
      log-probabilities in nats; of ids and mask 1 for a wrong one.
  """

  what: str
  share: float
  token: int
  value: float


def run(cfg: Config, workdir: Path) -> Path:
  """Compares features.verify_documents documents and prints the worst differences.

  Raises:
    UserError: names part, document, array and token of the first document outside the rule; or the
      extract stage has not run.
  """
  workdir = Path(workdir)
  folder = workdir / extract.STAGE
  source = manifest.require(folder, extract.STAGE, cfg)
  if source.counts["mode"] == "online":
    print(f"{STAGE}: features.mode=online keeps no features, nothing to compare")
    return folder
  target = placement.load_target(cfg, cfg.target.dtype)
  store = extract.open_features(cfg, workdir, target.config.num_layers)
  answers = {a.job: a for a in load_answers(workdir / "generate")}
  worst: dict[str, float] = {}
  documents = spread(store.documents, cfg.features.verify_documents)
  for d in documents:
    if d.job not in answers:
      raise _failed(store, d, f"generate holds no answer {d.job}")
    for found in differences(target, store, d, answers[d.job]):
      if not found.share <= 1:  # a NaN fails too
        raise _failed(store, d, f"{found.what} differs by {found.value:.3g} at token "
                                f"{found.token}, {found.share:.4g} times what is allowed")
      worst[found.what] = max(worst.get(found.what, 0.0), found.value)
  text = ", ".join(f"{what} {value:.2g}" for what, value in worst.items())
  print(f"{STAGE}: {len(documents)} of {len(store.documents)} documents agree with the target; "
        f"worst differences: {text}")
  return folder


def spread(documents: Sequence[StoredDocument], count: int) -> list[StoredDocument]:
  """`count` documents at even distances, the first and the last among them."""
  places = np.linspace(0, len(documents) - 1, min(count, len(documents)))
  return [documents[round(place)] for place in places]


def differences(
    target: Target, store: Store, document: StoredDocument, answer: Answer,
) -> Iterator[Difference]:
  """Compares one document with its answer and with the target, by the rule of this module.

  Args:
    target: run on this document alone.
    store: that the document belongs to.
    document: as it was read.
    answer: of the same job.
  """
  n = min(len(answer.tokens), target.config.max_position)
  if len(document.tokens) != n:
    yield Difference("length", np.inf, n, float(abs(len(document.tokens) - n)))
    return
  yield _exact("tokens", document.tokens != answer.tokens[:n])
  yield _exact("loss_mask", document.loss_mask != (np.arange(n) >= answer.prompt_len))
  length = _SHORTEST
  while length < n:
    length *= 2
  tokens = np.zeros((1, length), np.int32)
  tokens[0, :n] = document.tokens
  topk = document.topk() if store.mode == "topk" else None
  ids = np.zeros((length, store.topk), np.int32)
  if topk is not None:
    ids[:n] = topk.ids
  live = sharding.fetch(_live(target.params, tokens, ids, graph=target.graph, taps=store.taps))
  live = {name: value[:n] for name, value in live.items()}
  tolerance = _STATE_TOLERANCE[target.dtype]
  by_layer = document.features().reshape(n, len(store.taps), store.hidden_size)
  for i, layer in enumerate(store.taps):
    yield _states(f"features of layer {layer}", by_layer[:, i], live["features"][:, i], tolerance)
  if topk is None:
    yield _states("last_hidden", document.last_hidden(), live["last_hidden"], tolerance)
    return
  tolerance = _LOG_TOLERANCE[target.dtype]
  twice = np.sort(topk.ids, -1)
  yield _exact("topk_ids", (twice[:, 1:] == twice[:, :-1]).any(-1))
  yield _logs("topk_logprobs", np.abs(topk.logprobs - live["logprobs"]).max(-1), tolerance)
  yield _logs("logsumexp", np.abs(topk.logsumexp - live["logsumexp"]), tolerance)
  short = np.maximum(live["kth"] - live["logprobs"].min(-1), 0)
  yield _logs("rank of topk_ids", short, tolerance)


@functools.partial(jax.jit, static_argnames=("graph", "taps"))
def _live(params, tokens, ids, *, graph, taps):
  """float32 states of one document: features [T, L, D] and last_hidden, or the logs at `ids`."""
  module = nnx.merge(graph, params)
  T, k = ids.shape
  out = module.hidden(tokens, jnp.arange(T)[None], taps=taps)
  features = out.features.astype(jnp.float32).reshape(T, len(taps), out.hidden.shape[-1])
  if not k:
    return {"features": features, "last_hidden": out.hidden[0].astype(jnp.float32)}

  def score(states, ids):
    logits = module.logits(states)
    logsumexp = jax.nn.logsumexp(logits, -1)
    at = jnp.take_along_axis(logits, ids, -1) - logsumexp[:, None]
    return at, jax.lax.top_k(logits, k)[0][:, -1] - logsumexp, logsumexp

  rows = min(T, 256)  # a power of two, as T is
  cut = lambda x: x.reshape(-1, rows, x.shape[-1])
  at, kth, logsumexp = jax.lax.map(lambda x: score(*x), (cut(out.hidden[0]), cut(ids)))
  return {"features": features, "logprobs": at.reshape(T, k), "kth": kth.reshape(T),
          "logsumexp": logsumexp.reshape(T)}


def _exact(what: str, wrong: np.ndarray) -> Difference:
  at = int(wrong.argmax()) if len(wrong) else 0
  return Difference(what, np.inf if wrong.any() else 0.0, at, float(wrong.any()))


def _states(
    what: str, stored: np.ndarray, live: np.ndarray, tolerance: tuple[float, float]) -> Difference:
  stored = stored.astype(np.float32)
  rms = np.sqrt(np.mean(live**2, -1, keepdims=True)) + np.finfo(np.float32).tiny
  beyond = np.maximum(np.abs(stored - live) - _ROUNDING * np.abs(live), 0) / rms
  values = np.stack([beyond.max(-1), np.sqrt(np.mean(beyond**2, -1))])
  shares = values / np.asarray(tolerance)[:, None]
  by_token = shares.max(0)  # NaN stays NaN, and argmax finds it
  at = int(by_token.argmax())
  return Difference(
      what, float(by_token[at]), at, float(values[shares[:, at].argmax(), at]))


def _logs(what: str, by_token: np.ndarray, tolerance: float) -> Difference:
  at = int(by_token.argmax())
  return Difference(what, float(by_token[at]) / tolerance, at, float(by_token[at]))


def _failed(store: Store, document: StoredDocument, reason: str) -> UserError:
  return UserError(
      f"{document.part.folder}: document {document.index} (job {document.job}): {reason}; remove "
      f"{store.folder} and run --stage=extract again")
