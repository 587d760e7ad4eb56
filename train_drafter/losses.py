"""Distillation objectives: pure functions of logits, and the chunked form that training uses.

A token loss maps student logits and teacher rows of a chunk to per-token values; `chunked_sums`
runs it over chunks of tokens and computes the gradient with respect to the hidden states on the way
forward, so that no [tokens, V] array of all positions exists in either direction.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spec_jax.models.decoder import linear


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


LOSSES: dict[str, Callable[[Array, Array], Array]] = {"fkl": fkl}


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
    token_sums: Callable[[Array, Any], dict[str, Array]],
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    rest: Any,
    chunk: int,
) -> dict[str, Array]:
  """Sums over tokens of a loss and its metrics, differentiable with respect to `hidden` alone.

  Args:
    token_sums: (student logits [c, V], chunk of `rest`) -> scalars; the one named "loss" is
      differentiated.
    hidden: student states, M a multiple of chunk.
    head: frozen, so it gets no gradient.
    rest: pytree of arrays whose first axis is M.
    chunk: tokens scored at once.
  """
  if hidden.shape[0] % chunk:
    raise ValueError(f"{hidden.shape[0]} tokens are not a multiple of chunk={chunk}")

  def forward(hidden):
    split = lambda x: x.reshape(-1, chunk, *x.shape[1:])

    def step(sums, inputs):
      part, rest = inputs
      def score(part):
        out = token_sums(linear(part, head), rest)
        return out["loss"], out
      (_, out), grad = jax.value_and_grad(score, has_aux=True)(part)
      return jax.tree.map(jnp.add, sums, out), grad

    shapes = jax.eval_shape(
        lambda: token_sums(linear(hidden[:chunk], head), jax.tree.map(lambda x: x[:chunk], rest)))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    sums, grads = jax.lax.scan(step, zeros, (split(hidden), jax.tree.map(split, rest)))
    return sums, grads.reshape(hidden.shape)

  @jax.custom_vjp
  def run(hidden):
    return forward(hidden)[0]

  run.defvjp(forward, lambda grads, g: (grads * g["loss"].astype(grads.dtype),))
  return run(hidden)
