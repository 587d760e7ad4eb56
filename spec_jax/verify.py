"""The acceptance rules: pure functions of the target's rows, the proposal and the round's keys.

Each rule has the form rule(rows [B, K+1, V], proposal, keys, limit) -> Verdict and an entry in
RULES that says whether it is lossless. `limit` [B] is how many drafts of each row may be accepted;
limit 0 is plain decoding through the same executable.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import sampling
from spec_jax.errors import UserError
from spec_jax.types import Keys, Proposal, Verdict


def greedy(
    logits: Float[Array, "B W V"], proposal: Proposal, keys: Keys | None, limit: Int[Array, " B"],
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
    p: Float[Array, "B W V"], proposal: Proposal, keys: Keys, limit: Int[Array, " B"],
) -> Verdict:
  """Speculative sampling (Leviathan 2211.17192, Chen 2302.01318): u < p/q, strictly."""
  return _sampled(RULES["ratio"], p, proposal, keys, limit)


def ratio_acceptance(
    p: Float[Array, "B W V"], proposal: Proposal, limit: Int[Array, " B"]) -> Float[Array, "B K"]:
  """min(1, p_i(x_i)/q_i(x_i)), whatever the limit."""
  del limit
  return jnp.minimum(acceptance_probabilities(p, proposal), 1.0)


def ratio_leftover(
    p: Float[Array, "B W V"], proposal: Proposal, accepted: Int[Array, " B"],
) -> Float[Array, "B V"]:
  """Weights of the token that replaces the first rejected draft."""
  row, q, token = _at_rejection(p, proposal, accepted)
  return residual(row, q, token)


def block(
    p: Float[Array, "B W V"], proposal: Proposal, keys: Keys, limit: Int[Array, " B"],
) -> Verdict:
  """Block verification (Sun 2403.10444): the longest prefix whose own test passes is kept.

  The tests are independent, one per prefix length, and the *largest* i with u_i < h_i counts; the
  expected number of accepted drafts is at least that of `ratio`.
  """
  return _sampled(RULES["block"], p, proposal, keys, limit)


def block_scale(p: Float[Array, "B W V"], proposal: Proposal) -> Float[Array, "B W"]:
  """P_0...P_K: P_0 = 1, P_i = min(P_{i-1} p_i(x_i)/q_i(x_i), 1)."""
  ratios = acceptance_probabilities(p, proposal)

  def step(scale, ratio):
    # A prefix of probability zero stays one, also before an infinite ratio.
    scale = jnp.where(scale > 0, jnp.minimum(scale * ratio, 1.0), 0.0)
    return scale, scale

  first = jnp.ones(p.shape[0], p.dtype)
  _, rest = jax.lax.scan(step, first, ratios.T)
  return jnp.concatenate([first[:, None], rest.T], 1)


def block_acceptance(
    p: Float[Array, "B W V"], proposal: Proposal, limit: Int[Array, " B"]) -> Float[Array, "B K"]:
  """h_1...h_limit of block verification over the first `limit` drafts; 0 behind them.

  h_i = R_i / (R_i + 1 - P_i) with R_i the mass of (P_i p_{i+1} - q_{i+1})+, and h_limit = P_limit.
  0/0 is 0: that residual is empty, and a deeper prefix is accepted.
  """
  K = proposal.tokens.shape[1]
  scale = block_scale(p, proposal)
  # R_1...R_{K-1}: the residual behind i drafts is against the draft i + 1.
  mass = jnp.sum(_scaled_residual(
      p[:, 1:K], scale[:, 1:K], None if proposal.probs is None else proposal.probs[:, 1:],
      proposal.tokens[:, 1:]), -1)
  below = mass + 1 - scale[:, 1:K]
  inner = jnp.where(below > 0, mass / jnp.where(below > 0, below, 1.0), 0.0)
  inner = jnp.concatenate([inner, jnp.zeros((p.shape[0], min(K, 1)), p.dtype)], 1)
  place = jnp.arange(1, K + 1)
  return jnp.where(place < limit[:, None], inner,
                   jnp.where(place == limit[:, None], scale[:, 1:], 0.0))


def block_leftover(
    p: Float[Array, "B W V"], proposal: Proposal, accepted: Int[Array, " B"],
) -> Float[Array, "B V"]:
  """Weights of the token behind `accepted` drafts: (P_i p_{i+1} - q_{i+1})+."""
  row, q, token = _at_rejection(p, proposal, accepted)
  scale = jnp.take_along_axis(block_scale(p, proposal), accepted[:, None], 1)[:, 0]
  left = _scaled_residual(row, scale, q, token)
  return jnp.where(jnp.sum(left, -1, keepdims=True) > 0, left, row)


def _scaled_residual(p, scale, q, token):
  """(scale p - q)+ over the last axis; q is one-hot at `token` when None."""
  if q is None:
    hit = jnp.arange(p.shape[-1]) == token[..., None]
    return jnp.where(hit, 0.0, scale[..., None] * p)  # scale p never exceeds the 1 of the draft
  return jnp.maximum(scale[..., None] * p - q, 0.0)


def coupled(
    p: Float[Array, "B W V"], proposal: Proposal, keys: Keys, limit: Int[Array, " B"],
) -> Verdict:
  """Gumbel-coupled sampling (2408.07978): a draft is accepted while it is the target's own sample.

  The target's sample of a position is argmax(log p + noise) with the noise of that position, which
  the drafter used too; so the output depends on the seed alone, not on the drafter or on K.
  """
  noise = sampling.gumbel(keys, jnp.arange(p.shape[1]), p.shape[2])
  own = sampling.draw_coupled(p, noise)
  accepted = _prefix(proposal.tokens == own[:, :-1], limit)
  return Verdict(accepted, jnp.take_along_axis(own, accepted[:, None], 1)[:, 0])


EPSILON, DELTA = 0.09, 0.3  # of `typical`


def typical(
    p: Float[Array, "B W V"], proposal: Proposal, keys: Keys, limit: Int[Array, " B"],
) -> Verdict:
  """Typical acceptance (Medusa, 2401.10774), NOT lossless: what is probable enough stays."""
  return _sampled(RULES["typical"], p, proposal, keys, limit)


def typical_acceptance(
    p: Float[Array, "B W V"], proposal: Proposal, limit: Int[Array, " B"]) -> Float[Array, "B K"]:
  """1 where p_i(x_i) > min(EPSILON, DELTA exp(-entropy of p_i)), otherwise 0."""
  del limit
  rows = p[:, :-1]
  entropy = -jnp.sum(jnp.where(rows > 0, rows * jnp.log(jnp.where(rows > 0, rows, 1.0)), 0.0), -1)
  least = jnp.minimum(EPSILON, DELTA * jnp.exp(-entropy))
  return (_at(rows, proposal.tokens) > least).astype(p.dtype)


def typical_leftover(
    p: Float[Array, "B W V"], proposal: Proposal, accepted: Int[Array, " B"],
) -> Float[Array, "B V"]:
  """The target's own distribution."""
  return _at_rejection(p, proposal, accepted)[0]


def _sampled(rule: "Rule", p, proposal, keys, limit) -> Verdict:
  """A rule that accepts by uniform numbers: the form that `ratio`, `block` and `typical` share."""
  K = proposal.tokens.shape[1]
  u_bonus = sampling.uniforms(keys, sampling.BONUS, 1)[:, 0]
  if K == 0:
    return Verdict(jnp.zeros(p.shape[0], jnp.int32), sampling.draw(p[:, 0], u_bonus))
  passed = _passes(sampling.uniforms(keys, sampling.ACCEPT, K), rule.acceptance(p, proposal, limit))
  accepted = (_deepest if rule.deepest else _prefix)(passed, limit)
  rejected = accepted < limit
  left = rule.leftover(p, proposal, jnp.minimum(accepted, K - 1))
  row = jnp.take_along_axis(p, accepted[:, None, None], 1)[:, 0]
  weights = jnp.where(rejected[:, None], left, row)
  u_residual = sampling.uniforms(keys, sampling.RESIDUAL, 1)[:, 0]
  return Verdict(accepted, sampling.draw(weights, jnp.where(rejected, u_residual, u_bonus)))


def _passes(u, chance) -> Bool[Array, "B K"]:
  """Strictly: u can be 0, and a draft of probability 0 must not pass then."""
  return u < chance


def _at_rejection(p, proposal, accepted):
  """The target's row behind `accepted` drafts, and the q (None: one-hot) and draft it rejects."""
  row = jnp.take_along_axis(p, accepted[:, None, None], 1)[:, 0]
  q = None
  if proposal.probs is not None:
    q = jnp.take_along_axis(proposal.probs, accepted[:, None, None], 1)[:, 0]
  return row, q, jnp.take_along_axis(proposal.tokens, accepted[:, None], 1)[:, 0]


def _deepest(passed: Bool[Array, "B K"], limit) -> Int[Array, " B"]:
  place = jnp.arange(1, passed.shape[1] + 1)
  return jnp.max(jnp.where(passed & (place <= limit[:, None]), place, 0), 1).astype(jnp.int32)


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
    acceptance: (p, proposal, limit) -> the probabilities [B, K] that the uniforms are held against;
      None for a rule without such uniforms.
    leftover: (p, proposal, accepted < limit) -> weights [B, V] of the next token.
    deepest: the last test that passes counts, not the first that fails.
  """

  name: str
  apply: Callable[..., Verdict]
  lossless: bool
  on_logits: bool = False
  acceptance: Callable[..., Array] | None = None
  leftover: Callable[..., Array] | None = None
  deepest: bool = False


RULES = {rule.name: rule for rule in (
    Rule("greedy", greedy, lossless=True, on_logits=True),
    Rule("ratio", ratio, lossless=True, acceptance=ratio_acceptance, leftover=ratio_leftover),
    Rule("block", block, lossless=True, acceptance=block_acceptance, leftover=block_leftover,
         deepest=True),
    Rule("coupled", coupled, lossless=True),
    Rule("typical", typical, lossless=False, acceptance=typical_acceptance,
         leftover=typical_leftover))}


def keep_drafts(
    p: Float[Array, "B W V"], proposal: Proposal, keys: Keys, limit: Int[Array, " B"],
) -> Verdict:
  """Accepts every draft, and the target samples the token behind them: the drafter's own text."""
  row = jnp.take_along_axis(p, limit[:, None, None], 1)[:, 0]
  return Verdict(limit, sampling.draw(row, sampling.uniforms(keys, sampling.BONUS, 1)[:, 0]))


# No rule to decode with, hence not in RULES: train_drafter makes on-policy data with it.
DRAFTS = Rule("drafts", keep_drafts, lossless=False)


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
