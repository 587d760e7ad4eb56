"""Distillation objectives: pure functions of logits, and the chunked form that training uses.

A token loss maps student logits and teacher rows of a chunk to per-token values; `chunked_sums`
runs it over chunks of tokens and computes the gradient with respect to the hidden states on the way
forward, so that no [tokens, V] array of all positions exists in either direction.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from spec_jax import sampling, sharding
from spec_jax.types import pytree


@jax.custom_vjp
def fkl(
    student: Float[Array, "*n V"], teacher: Float[Array, "*n V"]) -> Float[Array, "*n"]:
  """Forward KL, sum_v p log(p/q), of logits; the teacher gets no gradient.

  Both may hold -inf: an id with p = 0 adds nothing, also where q = 0, and an id with p > 0 and
  q = 0 gives an infinite loss. The gradient q - p is written out (finite in every case): XLA:CPU
  runs it in half the time of the derived one.
  """
  return _fkl_forward(student, teacher)[0]


def _fkl_forward(student, teacher):
  top = lambda z: jax.lax.stop_gradient(jnp.max(z, -1, keepdims=True))
  student, teacher = student - top(student), teacher - top(teacher)
  # The barriers keep each exponential from being computed again inside every reduction.
  q, p = jax.lax.optimization_barrier((jnp.exp(student), jnp.exp(teacher)))
  q_sum, p_sum = jnp.sum(q, -1, keepdims=True), jnp.sum(p, -1, keepdims=True)
  # Masked before the product: 0 * inf and inf - inf are NaN.
  gap = jnp.where(p > 0, teacher, 0.0) - jnp.where(p > 0, student, 0.0)
  cross = jnp.sum(jnp.where(p > 0, p * gap, 0.0), -1, keepdims=True) / p_sum
  loss = (cross - jnp.log(p_sum) + jnp.log(q_sum))[..., 0]
  return loss, q / q_sum - p / p_sum


fkl.defvjp(_fkl_forward, lambda grad, g: (g[..., None] * grad, jnp.zeros_like(grad)))


@pytree
class Teacher:
  """The target at a chunk of supervised positions.

  Attributes:
    logits: [..., Vd] at the ids of the draft vocabulary.
    logsumexp: [...] over the target's whole vocabulary: ids outside the draft vocabulary keep their
      mass in the full p.
    label: [...] place of the data token in the draft vocabulary, Vd or more when it is not there.
  """

  logits: Float[Array, "*n V"]
  logsumexp: Float[Array, "*n"]
  label: Int[Array, "*n"]

  @property
  def full(self) -> Float[Array, "*n V"]:
    """p of the whole vocabulary at the draft ids; sums to less than 1."""
    return jnp.exp(self.logits - self.logsumexp[..., None])


def completed(
    student: Float[Array, "*n V"], logprobs: Float[Array, "*n k"], place: Int[Array, "*n k"],
) -> tuple[Float[Array, "*n V"], Float[Array, "*n"]]:
  """log p of a teacher of which the k most probable ids are known, and a lower bound of alpha.

  The mass that is left, p_tail, is laid out as the student's own: then `fkl` is the divergence over
  k + 1 outcomes (the ids and "another one"), which is at most that of the whole vocabulary, and
  alpha is sum over the k of min(p, q) + min(p_tail, q_tail), its certified upper bound. Without
  min(p_tail, q_tail) it is the lower bound (METHODS section 3). Renormalising the k would instead
  teach that nothing else is ever right.

  Args:
    student: logits over the draft vocabulary; gets no gradient from here.
    logprobs: of the teacher's k most probable ids.
    place: of these ids in the draft vocabulary, V or more where they are not in it.
  """
  logs, real = _log_softmax(jax.lax.stop_gradient(student))
  q = jnp.where(real, jnp.exp(logs), 0.0)
  inside = place < student.shape[-1]
  p_top = jnp.exp(logprobs)
  q_top = jnp.where(inside, jnp.take_along_axis(q, jnp.where(inside, place, 0), -1), 0.0)
  lower = jnp.sum(jnp.where(inside, jnp.minimum(p_top, q_top), 0.0), -1)
  p_tail = 1.0 - jnp.sum(p_top, -1, keepdims=True)
  q_tail = 1.0 - jnp.sum(q_top, -1, keepdims=True)
  known = (p_tail > _LEAST_TAIL) & (q_tail > _LEAST_TAIL)
  shift = jnp.log(jnp.where(known, p_tail, 1.0)) - jnp.log(jnp.where(known, q_tail, 1.0))
  rows = jnp.where(known & real, logs + shift, -jnp.inf)
  one = lambda row, at, value: row.at[at].set(value, mode="drop")
  for _ in range(rows.ndim - 1):
    one = jax.vmap(one)
  return one(rows, place, logprobs), lower


_LEAST_TAIL = 1e-6  # mass below which rounding decides what is left

# log p is taken as at least this where a loss divides by p: an id that the teacher excludes costs
# the student much and not infinitely much.
_LEAST_LOG = -60.0


def _log_softmax(logits):
  """log probabilities with 0 in place of -inf, and where they are real."""
  real = logits > -jnp.inf
  safe = jnp.where(real, logits, 0.0)
  top = jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
  total = jnp.sum(jnp.where(real, jnp.exp(safe - top), 0.0), -1, keepdims=True)
  return jnp.where(real, safe - top - jnp.log(total), 0.0), real


def ce(student: Float[Array, "*n V"], teacher: Teacher) -> Float[Array, "*n"]:
  """-log q at the most probable id of the teacher within the draft vocabulary (hard label)."""
  return _cross_entropy(student, sampling.argmax(jax.lax.stop_gradient(teacher.logits)))


def likelihood(student: Float[Array, "*n V"], label: Int[Array, "*n"]) -> Float[Array, "*n"]:
  """q(label); 0 where the label is outside the draft vocabulary."""
  return jnp.where(label < student.shape[-1], jnp.exp(-_cross_entropy(student, label)), 0.0)


def _cross_entropy(student, label):
  """-log q(label); 0 where the label is outside the draft vocabulary."""
  logs, _ = _log_softmax(student)
  inside = label < student.shape[-1]
  at = jnp.where(inside, label, 0)[..., None]
  return jnp.where(inside, -jnp.take_along_axis(logs, at, -1)[..., 0], 0.0)


def rkl(student: Float[Array, "*n V"], teacher: Teacher) -> Float[Array, "*n"]:
  """Reverse KL, sum q log(q/p), p renormalised on the draft vocabulary; mode seeking."""
  log_q, real = _log_softmax(student)
  log_p, known = _log_softmax(jax.lax.stop_gradient(teacher.logits))
  log_p = jnp.maximum(jnp.where(known, log_p, _LEAST_LOG), _LEAST_LOG)
  return jnp.sum(jnp.where(real, jnp.exp(log_q) * (log_q - log_p), 0.0), -1)


def jsd(student: Float[Array, "*n V"], teacher: Teacher) -> Float[Array, "*n"]:
  """Jensen-Shannon divergence with beta = 1/2 (DistillSpec, 2310.08461); at most log 2."""
  log_q, real = _log_softmax(student)
  log_p, known = _log_softmax(jax.lax.stop_gradient(teacher.logits))
  p, q = jnp.where(known, jnp.exp(log_p), 0.0), jnp.where(real, jnp.exp(log_q), 0.0)
  middle = (p + q) / 2
  log_m = jnp.log(jnp.where(middle > 0, middle, 1.0))
  return jnp.sum(p * (log_p - log_m) + q * (log_q - log_m), -1) / 2


def tv(student: Float[Array, "*n V"], teacher: Teacher) -> Float[Array, "*n"]:
  """1 - sum min(p, q): the probability that a draft of q is refused."""
  return 1.0 - _alpha(student, teacher)


def lk_alpha(student: Float[Array, "*n V"], teacher: Teacher) -> Float[Array, "*n"]:
  """-log alpha: the direction of `tv`, scaled by 1/alpha."""
  return -jnp.log(jnp.maximum(_alpha(student, teacher), 1e-20))


def lk_hybrid(student: Float[Array, "*n V"], teacher: Teacher) -> Float[Array, "*n"]:
  """lambda KL + (1 - lambda) TV with lambda = exp(-3 alpha), alpha detached (2602.23881)."""
  alpha = _alpha(student, teacher)
  share = jnp.exp(-3.0 * jax.lax.stop_gradient(alpha))
  return share * fkl(student, teacher.logits) + (1.0 - share) * (1.0 - alpha)


def ce_tv(student: Float[Array, "*n V"], teacher: Teacher) -> Float[Array, "*n"]:
  """0.1 CE(data token) + 0.9 |p - q|_1 (DSpark, 2607.05147)."""
  outside = 1.0 - jnp.sum(teacher.full, -1)  # where q is 0
  distance = jnp.sum(jnp.abs(teacher.full - _softmax(student)), -1) + outside
  return 0.1 * _cross_entropy(student, teacher.label) + 0.9 * distance


def _softmax(student):
  logs, real = _log_softmax(student)
  return jnp.where(real, jnp.exp(logs), 0.0)


def _alpha(student, teacher):
  return jnp.sum(jnp.minimum(jax.lax.stop_gradient(teacher.full), _softmax(student)), -1)


# Each takes student logits and a Teacher; `fkl`, `ce`, `rkl` and `jsd` renormalise p on the draft
# vocabulary, the others use the full p.
LOSSES: dict[str, Callable[[Array, Teacher], Array]] = {
    "ce": ce, "fkl": lambda student, teacher: fkl(student, teacher.logits), "rkl": rkl, "jsd": jsd,
    "tv": tv, "lk_alpha": lk_alpha, "lk_hybrid": lk_hybrid, "ce_tv": ce_tv}


def dpace(
    likelihood: Float[Array, "N J"], there: Bool[Array, "N J"], block: Int[Array, "N J"],
    depth: Int[Array, "N J"], blocks: int, depths: int) -> Float[Array, "N J"]:
  """Weights of the places of a draft by what they can gain (D-PACE, 2605.18810):
  w_j = sum over m >= j of the product over i <= m of q_i / 2 + 1 / 2, without a gradient.

  Args:
    likelihood: q_i, the student's probability of the data token.
    there: which states predict something; the others count as certain (a draft may begin in the
      prompt) and add nothing themselves.
    block: the block of a state, below `blocks`.
    depth: its place there, below `depths`.

  Returns:
    The weights, 0 for a state that is not there.
  """
  loss = jnp.where(there, 0.5 - 0.5 * jax.lax.stop_gradient(likelihood), 0.0)
  soft = 1.0 - jnp.zeros((blocks, depths)).at[block, depth].add(loss)
  known = jnp.zeros((blocks, depths), bool).at[block, depth].max(there)
  reach = jnp.where(known, jnp.cumprod(soft, -1), 0.0)
  ahead = jnp.cumsum(reach[:, ::-1], -1)[:, ::-1]
  return jnp.where(there, ahead[block, depth], 0.0)


def overlap(
    student: Float[Array, "*n V"], teacher: Float[Array, "*n V"],
    teacher_logsumexp: Float[Array, "*n"]) -> Float[Array, "*n"]:
  """alpha = sum_v min(p, q): the probability that a draft of q is accepted under `ratio`.

  Args:
    student: logits over the draft vocabulary.
    teacher: the target's logits at the same ids.
    teacher_logsumexp: over the target's whole vocabulary, so that ids outside the draft vocabulary
      keep their mass in p.
  """
  p = jnp.exp(teacher - teacher_logsumexp[..., None])
  return jnp.sum(jnp.minimum(p, jax.nn.softmax(student)), -1)


def kept_mass(
    teacher: Float[Array, "*n V"], teacher_logsumexp: Float[Array, "*n"]) -> Float[Array, "*n"]:
  """The mass of p on the draft vocabulary: what a renormalised teacher leaves out is the rest."""
  return jnp.sum(jnp.exp(teacher - teacher_logsumexp[..., None]), -1)


def chunked_sums(
    token_sums: Callable[[Array, Any, Any], dict[str, Array]],
    hidden: Float[Array, "M *E"],
    trained: Any,
    rest: Any,
    chunk: int,
    mesh: Mesh | None = None,
    used: Callable[[Any], Bool[Array, ""]] | None = None,
) -> dict[str, Array]:
  """Sums over tokens of a loss and its metrics, differentiable with respect to `hidden` and
  `trained`.

  Args:
    token_sums: (chunk of `hidden`, trained, chunk of `rest`) -> sums; the one named "loss" is
      differentiated. It computes the logits: of what it closes over (a frozen head) there is no
      gradient.
    hidden: student states, M a multiple of chunk.
    trained: pytree of arrays of the head that are trained; {} for none.
    rest: pytree of arrays whose first axis is M.
    chunk: tokens scored at once.
    mesh: devices that the tokens of a chunk are divided over.
    used: of a chunk of `rest`, whether it adds anything; one that does not is not computed. All are
      by default.
  """
  if hidden.shape[0] % chunk:
    raise ValueError(f"{hidden.shape[0]} tokens are not a multiple of chunk={chunk}")

  def forward(hidden, trained):
    split = lambda x: x.reshape(-1, chunk, *x.shape[1:])

    def score(part, trained, rest):
      out = token_sums(part, trained, rest)
      return out["loss"], out

    def scored(part, rest):
      (_, out), grads = jax.value_and_grad(score, (0, 1), has_aux=True)(part, trained, rest)
      return out, grads

    def nothing(part, rest):
      return jax.tree.map(
          lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(scored, part, rest))

    def step(carry, inputs):
      sums, total = carry
      # Over a mesh all devices would have to agree on every chunk first.
      whole = used is None or mesh is not None
      out, (grad, more) = (scored(*inputs) if whole else
                           jax.lax.cond(used(inputs[1]), scored, nothing, *inputs))
      return (jax.tree.map(jnp.add, sums, out), jax.tree.map(jnp.add, total, more)), grad

    shapes = jax.eval_shape(lambda: token_sums(
        hidden[:chunk], trained, jax.tree.map(lambda x: x[:chunk], rest)))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    # At least float32, whatever the arrays are: this is a sum over all chunks.
    wide = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), trained)
    (sums, total), grads = jax.lax.scan(
        step, (zeros, wide),
        sharding.pin_chunks((split(hidden), jax.tree.map(split, rest)), mesh))
    total = jax.tree.map(lambda x, like: x.astype(like.dtype), total, trained)
    return sums, (grads.reshape(hidden.shape), total)

  @jax.custom_vjp
  def run(hidden, trained):
    return forward(hidden, trained)[0]

  run.defvjp(forward, lambda grads, g: jax.tree.map(
      lambda x: x * g["loss"].astype(x.dtype), grads))
  return run(hidden, trained)
