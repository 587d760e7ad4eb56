"""The acceptance rules: pure functions of the target's rows, the proposal and the round's keys.

Each rule has the form rule(rows [B, K+1, V], proposal, keys, limit) -> Verdict and an entry in
RULES that says whether it is lossless. `limit` [B] is how many drafts of each row may be accepted;
limit 0 is plain decoding through the same executable.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import sampling
from spec_jax.errors import UserError
from spec_jax.types import Proposal, Verdict


def greedy(
    logits: Float[Array, "B W V"], proposal: Proposal, keys: Array | None, limit: Int[Array, " B"],
) -> Verdict:
  """Accepts while the draft is the argmax of the float32 logits; ties go to the lowest id."""
  del keys
  best = sampling.argmax(logits)
  accepted = _prefix(proposal.tokens == best[:, :-1], limit)
  return Verdict(accepted, jnp.take_along_axis(best, accepted[:, None], 1)[:, 0])


def acceptance_probabilities(
    p: Float[Array, "B W V"], proposal: Proposal) -> Float[Array, "B K"]:
  """p_i(x_i)/q_i(x_i), not clipped; q is one-hot for a deterministic drafter."""
  px = _at(p[:, :-1], proposal.tokens)
  if proposal.probs is None:
    return px
  qx = _at(proposal.probs, proposal.tokens)
  return jnp.where(qx > 0, px / jnp.where(qx > 0, qx, 1.0), jnp.where(px > 0, jnp.inf, 0.0))


def residual(
    p: Float[Array, "B V"], q: Float[Array, "B V"] | None, token: Int[Array, " B"],
) -> Float[Array, "B V"]:
  """Weights of the token that replaces a rejected draft: (p - q)+, or p where that is all zero."""
  if q is None:
    left = jnp.where(jnp.arange(p.shape[-1]) == token[:, None], 0.0, p)
  else:
    left = jnp.maximum(p - q, 0.0)
  return jnp.where(jnp.sum(left, -1, keepdims=True) > 0, left, p)


def ratio(
    p: Float[Array, "B W V"], proposal: Proposal, keys: Array, limit: Int[Array, " B"],
) -> Verdict:
  """Speculative sampling (Leviathan 2211.17192, Chen 2302.01318): u < p/q, strictly."""
  K = proposal.tokens.shape[1]
  u = sampling.uniforms(keys, sampling.ACCEPT, K)
  accepted = _prefix(u < acceptance_probabilities(p, proposal), limit)
  row = jnp.take_along_axis(p, accepted[:, None, None], 1)[:, 0]
  u_bonus = sampling.uniforms(keys, sampling.BONUS, 1)[:, 0]
  if K == 0:
    return Verdict(accepted, sampling.draw(row, u_bonus))
  at = jnp.minimum(accepted, K - 1)[:, None]
  q = None
  if proposal.probs is not None:
    q = jnp.take_along_axis(proposal.probs, at[..., None], 1)[:, 0]
  rejected = accepted < limit
  left = residual(row, q, jnp.take_along_axis(proposal.tokens, at, 1)[:, 0])
  u_residual = sampling.uniforms(keys, sampling.RESIDUAL, 1)[:, 0]
  weights = jnp.where(rejected[:, None], left, row)
  return Verdict(accepted, sampling.draw(weights, jnp.where(rejected, u_residual, u_bonus)))


def _prefix(match: Bool[Array, "B K"], limit) -> Int[Array, " B"]:
  usable = match & (jnp.arange(match.shape[1]) < limit[:, None])
  return jnp.sum(jnp.cumprod(usable.astype(jnp.int32), 1), 1).astype(jnp.int32)


def _at(probs, tokens):
  return jnp.take_along_axis(probs, tokens[..., None], -1)[..., 0]


@dataclasses.dataclass(frozen=True)
class Rule:
  """A verification rule.

  Attributes:
    name: as in the `rule` argument.
    apply: the pure function.
    lossless: the output's law is the target's.
    on_logits: takes logits instead of probabilities (temperature 0).
  """

  name: str
  apply: Callable[..., Verdict]
  lossless: bool
  on_logits: bool


RULES = {
    "greedy": Rule("greedy", greedy, lossless=True, on_logits=True),
    "ratio": Rule("ratio", ratio, lossless=True, on_logits=False),
}


def choose(name: str | None, coldest: float, warmest: float) -> Rule:
  """The rule that runs for rows of these temperatures.

  All of them at zero (below sampling.GREEDY_BELOW) is `greedy` everywhere, whatever the name; None
  is `greedy` or `ratio`, as the temperatures ask for.

  Raises:
    UserError: an unknown name, a negative temperature, or `greedy` above temperature zero.
  """
  if name is not None and name not in RULES:
    raise UserError(f"rule={name!r} is unknown (known: {', '.join(RULES)})")
  if not coldest >= 0:
    raise UserError(f"temperature={coldest} must be >= 0")
  if warmest < sampling.GREEDY_BELOW:
    return RULES["greedy"]
  if name == "greedy":
    raise UserError(f"rule='greedy' needs temperature=0, got temperature={warmest}")
  return RULES[name or "ratio"]
