"""The objectives against their plain definitions, and the chunked form against the whole one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models.decoder import linear
from train_drafter import losses


def probabilities(logits):
  e = np.exp(logits - logits.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def plain_fkl(student, teacher):
  """sum p log(p/q) as it is written down, in float64; terms with p = 0 are left out."""
  q, p = probabilities(student), probabilities(teacher)
  return np.array([
      sum(p[i, v] * np.log(p[i, v] / q[i, v]) for v in range(p.shape[1]) if p[i, v] > 0)
      for i in range(len(p))])


def differences(f, x, eps=1e-6):
  """Central differences of a scalar function at the finite places of x."""
  grad = np.zeros_like(x)
  for place in zip(*np.nonzero(np.isfinite(x)), strict=True):
    up, down = x.copy(), x.copy()
    up[place] += eps
    down[place] -= eps
    grad[place] = (f(up) - f(down)) / (2 * eps)
  return grad


def with_zeros(seed=0, rows=4, width=7):
  """Logits with p = 0 (row 1), p = q = 0 (row 2), and p = 0 by underflow (row 3)."""
  rng = np.random.default_rng(seed)
  student, teacher = 3 * rng.normal(size=(2, rows, width))
  teacher[1, :3] = -np.inf
  teacher[2, 2:4] = student[2, 2:4] = -np.inf
  teacher[3, 5] = -5000.0
  student[3, 6] = -700.0
  return student, teacher


def test_fkl_is_its_definition():
  student, teacher = with_zeros()
  with jax.enable_x64(True):
    loss = losses.fkl(jnp.asarray(student), jnp.asarray(teacher))
  assert loss.dtype == jnp.float64
  np.testing.assert_allclose(loss, plain_fkl(student, teacher), rtol=1e-12)
  narrow = losses.fkl(jnp.asarray(student, jnp.float32), jnp.asarray(teacher, jnp.float32))
  np.testing.assert_allclose(narrow, plain_fkl(student, teacher), rtol=1e-5)


def test_fkl_gradient_is_that_of_finite_differences():
  student, teacher = with_zeros()
  weight = np.array([1.0, -2.0, 0.5, 3.0])
  with jax.enable_x64(True):
    f = lambda s: jnp.sum(weight * losses.fkl(s, jnp.asarray(teacher)))
    ours = np.asarray(jax.grad(f)(jnp.asarray(student)))
    # The steps stay where the loss is of moderate size: at -700 the differences see nothing.
    expected = differences(lambda s: float(np.sum(weight * plain_fkl(s, teacher))), student)
  np.testing.assert_allclose(ours, expected, atol=2e-8)
  assert np.all(np.isfinite(ours))


def test_fkl_of_a_shifted_teacher_is_zero_and_flat():
  student, _ = with_zeros()
  loss, grad = jax.value_and_grad(lambda s: jnp.sum(losses.fkl(s, s + 2.5)))(
      jnp.asarray(student, jnp.float32))
  np.testing.assert_allclose(loss, 0, atol=1e-5)
  np.testing.assert_allclose(grad, 0, atol=1e-6)


def test_fkl_gives_the_teacher_no_gradient():
  student, teacher = (jnp.asarray(x, jnp.float32) for x in with_zeros())
  grad = jax.grad(lambda t: jnp.sum(losses.fkl(student, t)))(teacher)
  np.testing.assert_array_equal(grad, 0)


def test_fkl_is_infinite_only_where_the_student_cannot():
  """p > 0 at q = 0: no number is right, and the gradient stays finite."""
  student = jnp.asarray([[0.0, -jnp.inf, 1.0], [0.0, 1.0, 2.0]])
  teacher = jnp.zeros((2, 3))
  loss = losses.fkl(student, teacher)
  assert np.isposinf(loss[0]) and np.isfinite(loss[1])
  grad = jax.grad(lambda s: jnp.sum(losses.fkl(s, teacher)))(student)
  assert np.all(np.isfinite(grad))


def test_fkl_survives_logits_of_any_size():
  student = jnp.asarray([[1e4, -1e4, 0.0], [-1e30, 0.0, 1.0]])
  teacher = jnp.asarray([[1e4, 0.0, 1.0], [-1e30, 1e4, 1.0]])
  loss, grad = jax.value_and_grad(lambda s: jnp.sum(losses.fkl(s, teacher)))(student)
  assert np.isfinite(loss) and np.all(np.isfinite(grad))


# The other objectives, written down plainly in float64; terms of probability zero are left out.


def plain(name, student, teacher, lse, label):
  q, p = probabilities(student), probabilities(teacher)
  full = np.exp(teacher - lse[:, None])
  kl = lambda a, b: np.array([
      sum(x * np.log(x / y) for x, y in zip(u, v, strict=True) if x > 0)
      for u, v in zip(a, b, strict=True)])
  alpha, rows = np.minimum(full, q).sum(-1), np.arange(len(q))
  floored = np.maximum(p, np.exp(-60.0))
  return {
      "ce": lambda: -np.log(q[rows, p.argmax(-1)]), "fkl": lambda: kl(p, q),
      "rkl": lambda: kl(q, floored),
      "jsd": lambda: (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2, "tv": lambda: 1 - alpha,
      "lk_alpha": lambda: -np.log(alpha),
      "lk_hybrid": lambda: np.exp(-3 * alpha) * kl(p, q) + (1 - np.exp(-3 * alpha)) * (1 - alpha),
      "ce_tv": lambda: -0.1 * np.log(np.append(q, np.ones((len(q), 1)), 1)[rows, label])
      + 0.9 * (np.abs(full - q).sum(-1) + 1 - full.sum(-1))}[name]()


def grid(seed=0):
  """Logits with exact zeros on both sides, mass outside the draft vocabulary, and a label that is
  not in it; no entry so far down that finite differences see nothing."""
  rng = np.random.default_rng(seed)
  student, teacher = 2 * rng.normal(size=(2, 4, 7))
  teacher[1, :3] = -np.inf
  teacher[2, 2:4] = student[2, 2:4] = -np.inf
  lse = np.log(np.exp(teacher).sum(-1) * np.array([1.0, 1.3, 2.0, 1.1]))
  return student, teacher, lse, np.array([0, 4, 1, 7])


@pytest.mark.parametrize("name", losses.LOSSES)
def test_an_objective_is_its_definition(name):
  student, teacher, lse, label = grid()
  with jax.enable_x64(True):
    found = losses.LOSSES[name](jnp.asarray(student), losses.Teacher(
        jnp.asarray(teacher), jnp.asarray(lse), jnp.asarray(label)))
  np.testing.assert_allclose(found, plain(name, student, teacher, lse, label), rtol=1e-10)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_the_gradient_is_that_of_finite_differences(name):
  student, teacher, lse, label = grid(1)
  weight = np.array([1.0, -2.0, 0.5, 3.0])
  with jax.enable_x64(True):
    given = losses.Teacher(jnp.asarray(teacher), jnp.asarray(lse), jnp.asarray(label))
    ours = np.asarray(jax.grad(lambda s: jnp.sum(weight * losses.LOSSES[name](s, given)))(
        jnp.asarray(student)))
  if name == "lk_hybrid":  # its weight is detached
    share = np.exp(-3 * np.minimum(np.exp(teacher - lse[:, None]), probabilities(student)).sum(-1))
    value = lambda s: share * plain("fkl", s, teacher, lse, label) + (1 - share) * plain(
        "tv", s, teacher, lse, label)
  else:
    value = lambda s: plain(name, s, teacher, lse, label)
  expected = differences(lambda s: float(np.sum(weight * value(s))), student)
  np.testing.assert_allclose(ours, expected, atol=1e-7)
  assert np.all(np.isfinite(ours))


@pytest.mark.parametrize("name", losses.LOSSES)
def test_float32_extremes_stay_finite(name):
  """Exact zeros of p, -inf in q at the same ids, and logits of any size."""
  student = jnp.asarray([[1e4, -1e4, 0.0, -jnp.inf], [-1e30, 0.0, 1.0, -jnp.inf]])
  teacher = jnp.asarray([[0.0, 1e4, -jnp.inf, -jnp.inf], [-1e30, 1e4, 1.0, -jnp.inf]])
  given = losses.Teacher(teacher, jax.nn.logsumexp(teacher, -1), jnp.asarray([1, 1]))
  loss, grad = jax.value_and_grad(lambda s: jnp.sum(losses.LOSSES[name](s, given)))(student)
  assert np.isfinite(loss) and np.all(np.isfinite(grad))


def test_tv_is_the_rejection_probability_and_vanishes_on_a_cold_start():
  """METHODS: the gradient is -q_j (m_j - E_q m), m = 1[q < p]."""
  student, teacher, lse, label = grid(2)
  with jax.enable_x64(True):
    given = losses.Teacher(jnp.asarray(teacher), jnp.asarray(lse), jnp.asarray(label))
    grad = jax.grad(lambda s: jnp.sum(losses.tv(s, given)))(jnp.asarray(student))
  q, full = probabilities(student), np.exp(teacher - lse[:, None])
  m = (q < full).astype(float)
  np.testing.assert_allclose(grad, -q * (m - (q * m).sum(-1, keepdims=True)), atol=1e-12)


# Overlap.


def test_overlap_keeps_the_mass_outside_the_draft_vocabulary():
  rng = np.random.default_rng(1)
  teacher = 2 * rng.normal(size=(5, 12))
  ids = np.array([0, 3, 4, 9])
  student = rng.normal(size=(5, 4))
  p, q = probabilities(teacher), np.zeros((5, 12))
  q[:, ids] = probabilities(student)
  expected = np.minimum(p, q).sum(-1)
  lse = np.log(np.exp(teacher).sum(-1))
  ours = losses.overlap(
      jnp.asarray(student, jnp.float32), jnp.asarray(teacher[:, ids], jnp.float32),
      jnp.asarray(lse, jnp.float32))
  np.testing.assert_allclose(ours, expected, rtol=1e-5)
  renormalised = np.minimum(probabilities(teacher[:, ids]), q[:, ids]).sum(-1)
  assert np.all(renormalised > expected + 0.01)  # the mistake would be seen
  kept = losses.kept_mass(jnp.asarray(teacher[:, ids], jnp.float32), jnp.asarray(lse, jnp.float32))
  np.testing.assert_allclose(kept, p[:, ids].sum(-1), rtol=1e-5)


def test_overlap_of_equals_is_one_and_of_strangers_zero():
  teacher = jnp.asarray([[0.0, 1.0, -jnp.inf, -jnp.inf]])
  lse = jax.nn.logsumexp(teacher, -1)
  np.testing.assert_allclose(losses.overlap(teacher + 3, teacher, lse), 1.0, rtol=1e-6)
  np.testing.assert_allclose(losses.overlap(teacher[:, ::-1], teacher, lse), 0.0, atol=1e-7)


# Chunks.


def chunk_problem(seed=2, tokens=24, width=8, vocab=20):
  rng = np.random.default_rng(seed)
  hidden = rng.normal(size=(tokens, width)).astype(np.float32)
  head = rng.normal(size=(vocab, width)).astype(np.float32)
  rest = {"teacher": rng.normal(size=(tokens, vocab)).astype(np.float32),
          "weight": (rng.random(tokens) < 0.7).astype(np.float32)}
  return jnp.asarray(hidden), jnp.asarray(head), jax.tree.map(jnp.asarray, rest)


def scorer(head):
  """Token sums of a frozen head with a trained addition from the first three channels."""
  def weighted(part, trained, rest):
    student = linear(part, head) + part[:, :3] @ trained["extra"].T
    each = losses.fkl(student, rest["teacher"])
    return {"loss": jnp.sum(rest["weight"] * each), "count": jnp.sum(rest["weight"])}

  return weighted


@pytest.mark.parametrize("chunk", [4, 24])
def test_chunks_equal_the_whole(chunk):
  hidden, head, rest = chunk_problem()
  trained = {"extra": jnp.asarray(np.random.default_rng(5).normal(size=(20, 3)), jnp.float32)}

  @jax.jit
  def both(hidden, trained):
    # Not the sum itself: what stands behind the loss scales the gradient.
    ours = lambda h, t: (lambda s: (s["loss"] / s["count"], s))(
        losses.chunked_sums(scorer(head), h, t, rest, chunk))
    whole = lambda h, t: (lambda s: (s["loss"] / s["count"], s))(scorer(head)(h, t, rest))
    return [jax.value_and_grad(f, (0, 1), has_aux=True)(hidden, trained) for f in (ours, whole)]

  ((loss, sums), grads), ((loss2, sums2), grads2) = both(hidden, trained)
  np.testing.assert_allclose(loss, loss2, rtol=1e-5)
  for grad, grad2 in zip(jax.tree.leaves(grads), jax.tree.leaves(grads2), strict=True):
    np.testing.assert_allclose(grad, grad2, rtol=1e-4, atol=1e-6)
    assert np.abs(grad).max() > 0.01
  for name, value in sums2.items():
    np.testing.assert_allclose(sums[name], value, rtol=1e-5)


def test_a_chunk_without_weight_is_not_computed():
  """Nothing of it is read, which NaN would show; the others give what they gave."""
  hidden, head, rest = chunk_problem()
  rest["weight"] = rest["weight"].at[4:12].set(0.0)
  used = lambda rest: jnp.any(rest["weight"] > 0)
  trained = {"extra": jnp.ones((20, 3))}
  f = lambda h, used: losses.chunked_sums(
      scorer(head), h, trained, rest, 4, used=used)
  value = jax.jit(
      jax.value_and_grad(lambda h, used: f(h, used)["loss"]), static_argnums=1)
  whole, grad = value(hidden, None)
  loss, skipped = value(hidden.at[4:12].set(jnp.nan), used)
  np.testing.assert_allclose(loss, whole, rtol=1e-6)
  np.testing.assert_allclose(skipped, grad, rtol=1e-6)
  assert np.isnan(value(hidden.at[4:12].set(jnp.nan), None)[0])


def test_gradients_of_a_narrow_head_add_up_in_float32():
  """A thousand chunks that each add less than bfloat16 can resolve beside the sum."""
  hidden = jnp.ones((1024, 3), jnp.float32)
  trained = {"w": jnp.zeros(3, jnp.bfloat16)}
  score = lambda part, trained, rest: {"loss": jnp.sum(part @ trained["w"].astype(jnp.float32))}
  grad = jax.grad(
      lambda t: losses.chunked_sums(score, hidden, t, {}, 1)["loss"])(trained)["w"]
  assert grad.dtype == jnp.bfloat16
  np.testing.assert_array_equal(grad, 1024.0)


def test_a_part_of_a_chunk_is_refused():
  hidden, head, rest = chunk_problem()
  with pytest.raises(ValueError, match="24 tokens are not a multiple of chunk=5"):
    losses.chunked_sums(scorer(head), hidden, {}, rest, 5)


# The matrix product under it.


@pytest.mark.parametrize("dtype,tolerance", [("float64", 1e-12), ("float32", 1e-5),
                                             ("bfloat16", 2e-2)])
def test_linear_and_its_gradients(dtype, tolerance):
  rng = np.random.default_rng(3)
  with jax.enable_x64(dtype == "float64"):
    x = jnp.asarray(rng.normal(size=(2, 3, 16)), "float64" if dtype == "float64" else "float32")
    w = jnp.asarray(rng.normal(size=(5, 16)), dtype)
    up = jnp.asarray(rng.normal(size=(2, 3, 5)), x.dtype)
    out, back = jax.vjp(linear, x, w)
    dx, dw = back(up)
    assert out.dtype == x.dtype and dx.dtype == x.dtype and dw.dtype == w.dtype
    exact = [np.asarray(a, np.float64) for a in (x, w, up)]
  x, w, up = exact
  scale = tolerance * 4  # entries are sums of up to 16 products of unit normals
  np.testing.assert_allclose(out, np.einsum("abi,oi->abo", x, w), atol=scale)
  np.testing.assert_allclose(dx, np.einsum("abo,oi->abi", up, w), atol=scale)
  np.testing.assert_allclose(
      np.asarray(dw, np.float64), np.einsum("abo,abi->oi", up, x), atol=scale)


# A teacher of which the most probable ids are known.


def sparse_case(rng, V=12, k=4, temperature=1.5):
  """Student logits, the whole p, its k most probable ids; the student lacks the last two ids."""
  p = rng.dirichlet(np.full(V, 0.4))
  ids = np.argsort(-p)[:k]
  return temperature * rng.normal(size=V - 2), p, ids


@pytest.mark.parametrize("seed", range(6))
def test_completed_is_the_divergence_over_k_and_the_rest(seed):
  student, p, ids = sparse_case(np.random.default_rng(seed))
  inside = ids < len(student)

  def coarse(z):  # KL over the ids that both know and "another one"
    q = jax.nn.softmax(z)[ids[inside]]
    tail_p = 1 - p[ids].sum()
    return jnp.sum(p[ids[inside]] * (jnp.log(p[ids[inside]]) - jnp.log(q))) + tail_p * (
        jnp.log(tail_p) - jnp.log(1 - q.sum()))

  def ours(z):
    rows, _ = losses.completed(z, jnp.log(p[ids]), jnp.asarray(ids))
    # `fkl` renormalises what it is given: the mass of ids that the student lacks is left out.
    total = jnp.sum(jnp.exp(rows))
    return losses.fkl(z, rows) * total + total * jnp.log(total)

  with jax.enable_x64(True):
    z = jnp.asarray(student)
    np.testing.assert_allclose(ours(z), coarse(z), rtol=1e-9)
    total = 1 - p[ids[~inside]].sum()
    wanted = jax.grad(coarse)(z)
    # The same direction as long as no known mass is outside, else that of the renormalised p.
    if inside.all():
      np.testing.assert_allclose(jax.grad(ours)(z), wanted, atol=1e-12)
    renormalised = jnp.where(jnp.isin(jnp.arange(len(student)), ids), p[:len(student)], 0.0)
    wrong = jax.grad(lambda z: losses.fkl(z, jnp.log(renormalised)))(z)
    assert np.abs(wrong - wanted).max() > 1e-2 and total > 0


@pytest.mark.parametrize("seed", range(6))
def test_the_bounds_of_alpha_hold_and_meet(seed):
  student, p, ids = sparse_case(np.random.default_rng(seed))
  with jax.enable_x64(True):
    z = jnp.asarray(student)
    q = np.pad(np.asarray(jax.nn.softmax(z)), (0, 2))
    alpha = np.minimum(p, q).sum()
    rows, lower = losses.completed(z, jnp.log(p[ids]), jnp.asarray(ids))
    upper = losses.overlap(z, rows, jnp.zeros(()))
    assert lower <= alpha + 1e-12 and alpha <= upper + 1e-12
    np.testing.assert_allclose(
        upper, lower + min(1 - p[ids].sum(), 1 - q[ids].sum()), rtol=1e-9)
    whole = np.argsort(-p)
    rows, lower = losses.completed(z, jnp.log(p[whole]), jnp.asarray(whole))
    np.testing.assert_allclose([lower, losses.overlap(z, rows, jnp.zeros(()))], alpha, rtol=1e-5)
    np.testing.assert_allclose(rows, np.log(p[:len(student)]), rtol=1e-9)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_every_loss_is_finite_with_a_sparse_teacher(name):
  """Also where nothing is left for the tail, on one side or on both."""
  for logprobs in ([0.0, -200.0], [-0.5, -3.0], [-1e-9, -40.0]):
    for student in ([90.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]):
      def loss(z, logprobs=logprobs):
        rows, _ = losses.completed(z, jnp.asarray(logprobs), jnp.asarray([1, 5]))
        return losses.LOSSES[name](z, losses.Teacher(rows, jnp.zeros(()), jnp.asarray(1)))
      value, grad = jax.value_and_grad(loss)(jnp.asarray(student))
      assert np.isfinite(value) and np.isfinite(grad).all(), (name, logprobs, student)
