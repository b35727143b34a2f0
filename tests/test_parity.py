"""The rules of Optimisers.jl: each against its formula in NumPy, float64; what changes mid-run; chains; skip_zero.

A formula here is written down from the paper and from what Optimisers.jl computes, and shares nothing with optax.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests.helpers import assert_trees_close, assert_trees_equal, count_compiles, medium_if
from tsunax import rules
from tsunax.rules import _flux

# ---------------------------------------------------------------- Optimisers.jl in NumPy: (t, x, gradient) -> step back


def descent(eta):
    return lambda t, x, g: eta * g


def momentum(eta, rho):
    v = 0.0

    def step(t, x, g):
        nonlocal v
        v = rho * v + eta * g
        return v

    return step


def nesterov(eta, rho):
    v = 0.0  # as there: it points downhill

    def step(t, x, g):
        nonlocal v
        back = -(rho**2) * v + (1 + rho) * eta * g
        v = rho * v - eta * g
        return back

    return step


def rmsprop(eta, rho, eps, centred=False):
    quad = lin = 0.0

    def step(t, x, g):
        nonlocal quad, lin
        quad = rho * quad + (1 - rho) * g**2
        lin = rho * lin + (1 - rho) * g if centred else lin
        return eta * g / (np.sqrt(quad - lin**2) + eps)

    return step


def rprop(eta, ell, gamma):
    before, size = 0.0, eta

    def step(t, x, g):
        nonlocal before, size
        same = g * before
        size = np.where(same > 0, np.minimum(size * ell[1], gamma[1]), size)
        size = np.where(same < 0, np.maximum(size * ell[0], gamma[0]), size)
        before = np.where(same < 0, 0.0, g)
        return size * np.sign(before)

    return step


def moments(b1, b2):
    """Adam's two, and both corrected."""
    m = v = 0.0

    def step(t, g):
        nonlocal m, v
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        return m, v, m / (1 - b1**t), v / (1 - b2**t)

    return step


def adam(eta, b1, b2, eps):
    of = moments(b1, b2)

    def step(t, x, g):
        _, _, m_hat, v_hat = of(t, g)
        return eta * m_hat / (np.sqrt(v_hat) + eps)

    return step


def adamax(eta, b1, b2, eps):
    m = u = 0.0

    def step(t, x, g):
        nonlocal m, u
        m, u = b1 * m + (1 - b1) * g, np.maximum(b2 * u, np.abs(g))
        return eta / (1 - b1**t) * m / (u + eps)

    return step


def nadam(eta, b1, b2, eps):
    of = moments(b1, b2)

    def step(t, x, g):
        m, v, _, _ = of(t, g)
        ahead = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        return eta * ahead / (np.sqrt(v * b2 / (1 - b2**t)) + eps)

    return step


def radam(eta, b1, b2, eps):
    of, limit = moments(b1, b2), 2 / (1 - b2) - 1

    def step(t, x, g):
        _, _, m_hat, v_hat = of(t, g)
        length = limit - 2 * t * b2**t / (1 - b2**t)
        if length <= 4:
            return eta * m_hat
        r = np.sqrt((length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length))
        return eta * r * m_hat / (np.sqrt(v_hat) + eps)

    return step


def oadam(eta, b1, b2, eps):
    inner, before = adam(eta, b1, b2, eps), 0.0

    def step(t, x, g):
        nonlocal before
        now = inner(t, x, g)
        back, before = 2 * now - before, now
        return back

    return step


def adagrad(eta, eps):
    total = eps

    def step(t, x, g):
        nonlocal total
        total = total + g**2
        return eta * g / (np.sqrt(total) + eps)

    return step


def adadelta(rho, eps):
    squares = moved = 0.0

    def step(t, x, g):
        nonlocal squares, moved
        squares = rho * squares + (1 - rho) * g**2
        back = g * np.sqrt(moved + eps) / np.sqrt(squares + eps)
        moved = rho * moved + (1 - rho) * back**2
        return back

    return step


def amsgrad(eta, b1, b2, eps):
    m = v = most = eps

    def step(t, x, g):
        nonlocal m, v, most
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        most = np.maximum(most, v)
        return eta * m / (np.sqrt(most) + eps)

    return step


def adabelief(eta, b1, b2, eps):
    m = s = 0.0

    def step(t, x, g):
        nonlocal m, s
        m = b1 * m + (1 - b1) * g
        s = b2 * s + (1 - b2) * (g - m) ** 2 + eps
        return eta * m / (1 - b1**t) / (np.sqrt(s / (1 - b2**t)) + eps)

    return step


def adamw(eta, b1, b2, lam, eps, couple):
    inner = adam(1.0, b1, b2, eps)
    return lambda t, x, g: eta * inner(t, x, g) + (eta if couple else 1) * lam * x


def lion(eta, b1, b2):
    """Of the paper: Chen et al. 2023, without decay."""
    m = 0.0

    def step(t, x, g):
        nonlocal m
        direction = np.sign(b1 * m + (1 - b1) * g)
        m = b2 * m + (1 - b2) * g
        return eta * direction

    return step


def lion_of_julia(eta, b1, b2):
    """Of Optimisers.jl, where the weights of the average have changed places."""
    m = 0.0

    def step(t, x, g):
        nonlocal m
        m = b2 * g + (1 - b2) * m
        return eta * np.sign((b2 - b1) * g + b1 * m)

    return step


def add_decayed_weights(lam):
    return lambda t, x, g: g + lam * x


def sign_decay(lam):
    return lambda t, x, g: g + lam * np.sign(x)


def clip_grad(delta):
    return lambda t, x, g: np.clip(g, -delta, delta)


def clip_norm(omega, p):
    return lambda t, x, g: g * min(omega / max(np.linalg.norm(g, p), 1e-300), 1)


def in_turn(*steps):
    """OptimiserChain."""
    return lambda t, x, g: functools.reduce(lambda back, step: step(t, x, back), steps, g)


# --------------------------------------------------------------------------------------- one row for each of its rules


@dataclasses.dataclass(frozen=True)
class Row:
    """A rule there, and what computes the same here."""

    name: str
    there: Callable  # makes a fresh step in NumPy
    here: optax.GradientTransformation
    namesake: optax.GradientTransformation | None = None  # what looks like it and is not


EPS = 0.05  # large, so that it shows where it stands
B = dict(b1=0.8, b2=0.95)
UNCORRECTED = dict(bias_correction_mu=False, bias_correction_nu=False)
ROWS = [
    Row("Descent", lambda: descent(0.1), rules.sgd(0.1)),
    Row("Momentum", lambda: momentum(0.01, 0.9), rules.flux_momentum(0.01)),
    Row("Nesterov", lambda: nesterov(0.001, 0.9), rules.flux_momentum(0.001, nesterov=True)),
    Row(
        "RMSProp",
        lambda: rmsprop(0.02, 0.9, EPS),
        rules.rmsprop(0.02, eps=EPS, eps_in_sqrt=False),
        rules.rmsprop(0.02, eps=EPS),
    ),
    Row(
        "RMSProp centred",
        lambda: rmsprop(0.02, 0.9, EPS, centred=True),
        rules.rmsprop(0.02, eps=EPS, eps_in_sqrt=False, centered=True),
        rules.rmsprop(0.02, eps=EPS, centered=True),
    ),
    Row(
        "Rprop",
        lambda: rprop(0.1, (0.5, 1.2), (0.02, 0.5)),
        rules.flux_rprop(0.1, min_step_size=0.02, max_step_size=0.5),
        rules.rprop(0.1, min_step_size=0.02, max_step_size=0.5),
    ),
    Row("Adam", lambda: adam(0.02, **B, eps=EPS), rules.adam(0.02, **B, eps=EPS)),
    Row("AdaMax", lambda: adamax(0.02, **B, eps=1e-8), rules.adamax(0.02, **B)),
    Row(
        "NAdam",
        lambda: nadam(0.02, **B, eps=EPS),
        rules.nadam(0.02 / 0.95**0.5, **B, eps=EPS / 0.95**0.5),
        rules.nadam(0.02, **B, eps=EPS),
    ),
    Row(
        "RAdam",
        lambda: radam(0.02, **B, eps=EPS),
        rules.radam(0.02, **B, eps=EPS, threshold=4.0),
        rules.radam(0.02, **B, eps=EPS),
    ),
    Row(
        "OAdam",
        lambda: oadam(0.02, 0.5, 0.9, EPS),
        rules.flux_oadam(0.02, eps=EPS),
        rules.optimistic_adam_v2(0.02, b1=0.5, b2=0.9, eps=EPS, nesterov=False),
    ),
    Row(
        "AdaGrad",
        lambda: adagrad(0.1, EPS),
        rules.flux_adagrad(0.1, eps=EPS),
        rules.adagrad(0.1, initial_accumulator_value=EPS, eps=EPS),
    ),
    Row("AdaDelta", lambda: adadelta(0.9, 1e-2), rules.adadelta(1.0, eps=1e-2), rules.adadelta(1.0)),
    Row(
        "AMSGrad",
        lambda: amsgrad(0.02, **B, eps=EPS),
        rules.flux_amsgrad(0.02, **B, eps=EPS),
        rules.amsgrad(0.02, **B, eps=EPS, **UNCORRECTED),
    ),
    Row(
        "AdaBelief",
        lambda: adabelief(0.02, **B, eps=EPS),
        rules.adabelief(0.02, **B, eps=EPS, eps_root=EPS),
        rules.adabelief(0.02, **B, eps=EPS),
    ),
    Row(
        "AdamW",
        lambda: adamw(0.02, **B, lam=0.1, eps=EPS, couple=True),
        rules.adamw(0.02, **B, eps=EPS, weight_decay=0.1),
        rules.adamw(0.02, **B, eps=EPS),
    ),
    Row(
        "AdamW couple=true",
        lambda: adamw(0.02, **B, lam=0.1, eps=EPS, couple=True),
        rules.flux_adamw(0.02, **B, eps=EPS, weight_decay=0.1),
    ),
    Row(
        "AdamW couple=false",
        lambda: adamw(0.02, **B, lam=0.1, eps=EPS, couple=False),
        rules.flux_adamw(0.02, **B, eps=EPS, weight_decay=0.1, couple=False),
        rules.adamw(0.02, **B, eps=EPS, weight_decay=0.1),
    ),
    Row("Lion", lambda: lion(0.02, 0.8, 0.95), rules.lion(0.02, 0.8, 0.95, weight_decay=0.0), rules.lion(0.02)),
    Row(
        "Lion as Julia runs it",
        lambda: lion_of_julia(0.02, 0.6, 0.7),
        rules.lion(0.02, 0.6 * (1 - 0.7) / 0.7, 1 - 0.7, weight_decay=0.0),
        rules.lion(0.02, 0.6, 0.7, weight_decay=0.0),
    ),
    Row(
        "WeightDecay",
        lambda: in_turn(add_decayed_weights(0.42), momentum(0.01, 0.9)),
        rules.chain(rules.add_decayed_weights(0.42), rules.flux_momentum(0.01)),
    ),
    Row(
        "SignDecay",
        lambda: in_turn(sign_decay(0.42), adam(0.02, **B, eps=EPS)),
        rules.chain(rules.sign_decay(0.42), rules.adam(0.02, **B, eps=EPS)),
    ),
    Row(
        "SignDecay with WeightDecay",
        lambda: in_turn(sign_decay(0.012), add_decayed_weights(0.034), descent(0.1)),
        rules.chain(rules.sign_decay(0.012), rules.add_decayed_weights(0.034), rules.sgd(0.1)),
    ),
    Row(
        "ClipGrad",
        lambda: in_turn(clip_grad(0.7), adam(0.02, **B, eps=EPS)),
        rules.chain(rules.clip(0.7), rules.adam(0.02, **B, eps=EPS)),
    ),
    Row(
        "ClipNorm",
        lambda: in_turn(clip_norm(0.7, 1), descent(0.1)),
        rules.chain(rules.clip_by_norm(0.7, p=1), rules.sgd(0.1)),
        rules.chain(rules.clip(0.7), rules.sgd(0.1)),
    ),
    Row(
        "OptimiserChain: clip, then decay",
        lambda: in_turn(clip_norm(0.7, 2), add_decayed_weights(0.5), descent(0.1)),
        rules.chain(rules.clip_by_norm(0.7), rules.add_decayed_weights(0.5), rules.sgd(0.1)),
        rules.chain(rules.add_decayed_weights(0.5), rules.clip_by_norm(0.7), rules.sgd(0.1)),
    ),
    Row(
        "OptimiserChain: decay, then clip",
        lambda: in_turn(add_decayed_weights(0.5), clip_norm(0.7, 2), descent(0.1)),
        rules.chain(rules.add_decayed_weights(0.5), rules.clip_by_norm(0.7), rules.sgd(0.1)),
        rules.chain(rules.clip_by_norm(0.7), rules.add_decayed_weights(0.5), rules.sgd(0.1)),
    ),
]
EVERY_ROW = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name.replace(" ", "_"))

# Large and small ones, sign flips, and a column that is often zero.
RNG = np.random.default_rng(7)
START = RNG.normal(size=6).astype(np.float32)
GRADS = (RNG.normal(size=(20, 6)) * [3.0, 1.0, 0.3, 0.03, 1.0, 1.0]).astype(np.float32)
GRADS[:, 4] *= RNG.random(20) < 0.5
GRADS[:, 5] = np.abs(GRADS[:, 5])


def trained(rule, start=START, grads=GRADS, **more):
    """The params after each of these gradients."""
    state = ts.setup(rule, jnp.asarray(start))
    walk = lambda state, g: (lambda new: (new, new.params))(ts.update(state, g, norms=False, **more)[0])
    return np.asarray(jax.jit(lambda s, gs: jax.lax.scan(walk, s, gs)[1])(state, jnp.asarray(grads)))


def by_formula(step, start=START, grads=GRADS):
    x, out = np.float64(start), []
    for t, g in enumerate(np.float64(grads), start=1):
        x = x - step(t, x, g)
        out.append(x)
    return np.stack(out)


@EVERY_ROW
def test_optimisers_rule(row):
    np.testing.assert_allclose(trained(row.here), by_formula(row.there()), rtol=1e-6, atol=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize("row", [r for r in ROWS if r.namesake], ids=lambda row: row.name.replace(" ", "_"))
def test_the_namesake_computes_something_else(row):
    """What the docs call a difference is one: else the rows above prove nothing."""
    assert np.abs(trained(row.namesake) - by_formula(row.there())).max() > 1e-3


# ------------------------------------------------------------------------------------------ the rules of ours, as rules

OURS = {
    "flux_adagrad": dict(learning_rate=0.03, eps=1e-3),
    "flux_adamw": dict(learning_rate=0.03, b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.1),
    "flux_amsgrad": dict(learning_rate=0.03, b1=0.8, b2=0.95, eps=1e-3),
    "flux_momentum": dict(learning_rate=0.03, momentum=0.8),
    "flux_oadam": dict(learning_rate=0.03, b1=0.4, b2=0.8, eps=1e-3),
    "flux_rprop": dict(learning_rate=0.03, eta_minus=0.4, eta_plus=1.1, min_step_size=1e-3, max_step_size=2.0),
}
EVERY_RULE_OF_OURS = pytest.mark.parametrize("name", OURS)


def test_every_rule_of_ours_has_a_row():
    assert list(OURS) == _flux.__all__ == [n for n in rules.__all__ if n.startswith("flux_")]


@EVERY_RULE_OF_OURS
def test_its_numbers_are_live(name):
    rule = getattr(rules, name)
    assert ts.hyperparams(ts.setup(rule(**OURS[name]), START)) == OURS[name]
    assert rule(0.1).update == rule(0.2).update


@EVERY_RULE_OF_OURS
def test_it_is_plain_optax_inside(name):
    """The factory itself, in the loop that everybody writes, gives what the live rule gives."""
    tx = getattr(_flux, name)(**OURS[name])

    def walk(carry, g):
        updates, opt_state = tx.update(g, carry[1], carry[0])
        params = optax.apply_updates(carry[0], updates)
        return (params, opt_state), params

    params = jnp.asarray(START)
    _, expected = jax.jit(lambda p, gs: jax.lax.scan(walk, (p, tx.init(p)), gs))(params, jnp.asarray(GRADS))
    np.testing.assert_allclose(trained(getattr(rules, name)(**OURS[name])), expected, rtol=1e-6, atol=1e-6)


@EVERY_RULE_OF_OURS
def test_it_keeps_the_dtype_of_the_params(name):
    """As Optimisers.jl does: its state has the parameter's dtype."""
    params = {"w": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}
    rule = getattr(rules, name)(**OURS[name])
    state = jax.eval_shape(rule.init, params)
    updates, after = jax.eval_shape(lambda g, s: rule.update(g, s, g), params, state)
    assert updates["w"].dtype == jnp.bfloat16
    dtypes = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]
    assert dtypes(after) == dtypes(state)


# ----------------------------------------------------------------------------------- numbers that change on the way


RATES = optax.piecewise_constant_schedule(0.1, {2: 0.1})  # .1, .1, .01


@pytest.mark.parametrize(
    "rule, expected",
    [(rules.flux_momentum, 0.529), (lambda rate: rules.sgd(rate, momentum=0.9), 1 - 0.1 - 0.19 - 0.01 * 2.71)],
    ids=["flux_momentum", "sgd"],
)
def test_momentum_and_a_rate_that_changes(rule, expected):
    one = np.ones(1, np.float32)
    np.testing.assert_allclose(trained(rule(RATES), one, np.ones((3, 1), np.float32))[-1], expected, rtol=1e-6)
    state = ts.setup(rule(0.1), one)
    for rate in (0.1, 0.1, 0.01):
        state, _ = ts.update(ts.adjust(state, learning_rate=rate), one)
    np.testing.assert_allclose(state.params, expected, rtol=1e-6)


def test_adam_and_a_b1_that_changes():
    """Constant gradient 1, b1 from .9 to .5 before step 3: neither correction is that of the moment, which gives 1.

    Here, as in optax, it is b1 of now to the power of the count. In Optimisers.jl it is a running product that is
    one step ahead: it began with the b1 of setup.
    """
    m, product, moves = 0.0, 0.9, []
    for b1 in (0.9, 0.9, 0.5):
        m = b1 * m + (1 - b1)
        moves.append(m / (1 - product))
        product *= b1
    np.testing.assert_allclose(moves, [1.0, 1.0, 2.196], atol=5e-4)  # Optimisers.jl

    state, one = ts.setup(rules.adam(1.0), np.zeros(1, np.float32)), np.ones(1, np.float32)
    for b1 in (0.9, 0.9, 0.5):
        before = state.params
        state, _ = ts.update(ts.adjust(state, b1=b1), one)
    np.testing.assert_allclose(before - state.params, 0.680, atol=5e-4)
    np.testing.assert_allclose(before - state.params, m / (1 - 0.5**3), rtol=1e-5)


def test_rprop_reads_its_rate_at_setup_only():
    one = np.ones(1, np.float32)
    for rule, first in ((rules.flux_rprop(0.1), 0.1), (rules.rprop(0.1), 0.0)):
        state, _ = ts.update(ts.setup(rule, one), one)
        np.testing.assert_allclose(1 - state.params, first, rtol=1e-6)  # optax's is a step late
        moved, _ = ts.update(ts.adjust(state, learning_rate=9.0), one)
        stayed, _ = ts.update(state, one)
        assert_trees_equal(moved.params, stayed.params)


def test_adamw_without_couple_does_not_follow_the_rate():
    """Gradient 0, so that only decay moves: (1 - .5)² against (1 - .5 · .1)(1 - .5 · .2)."""
    rates = optax.piecewise_constant_schedule(0.1, {1: 2.0})
    zeros, one = np.zeros((2, 1), np.float32), np.ones(1, np.float32)
    decayed = lambda couple: trained(rules.flux_adamw(rates, weight_decay=0.5, couple=couple), one, zeros)[-1]
    np.testing.assert_allclose(decayed(False), 0.25, rtol=1e-6)
    np.testing.assert_allclose(decayed(True), 0.95 * 0.9, rtol=1e-6)


@pytest.mark.medium
def test_centred_rmsprop_divides_by_zero_where_gradients_are_constant():
    """n - m² of a constant gradient rounds below zero: known, documented, as in optax and Julia. It is rejected."""
    grads = np.tile(np.linspace(0.1, 3, 50, dtype=np.float32), (400, 1))
    rule = functools.partial(rules.rmsprop, 1e-3, centered=True)
    start = np.ones(50, np.float32)
    assert np.isnan(trained(rule(eps_in_sqrt=False), start, grads, on_nonfinite="ignore")[-1]).any()
    assert np.isfinite(trained(rule(eps_in_sqrt=False), start, grads)[-1]).all()
    assert np.isfinite(trained(rule(eps=1e-5), start, grads)[-1]).all()


def test_float16_wants_an_epsilon_that_it_can_hold():
    """1e-8 is 0 in float16, and 0/0 is NaN; Optimisers.jl raises it to 1e-7 there. Such a step is rejected."""
    zero, one = jnp.zeros(2, jnp.float16), jnp.ones(2, jnp.float16)
    step = lambda eps, **how: ts.update(ts.setup(rules.adam(0.1, eps=eps), one), zero, **how)
    after, info = step(1e-8, norms="update")
    assert not bool(info.applied) and np.isnan(info.update_norm)
    np.testing.assert_array_equal(after.params, one)
    assert not bool(step(1e-8, norms=False)[1].applied)
    assert np.isnan(step(1e-8, on_nonfinite="ignore")[0].params).all()
    after, info = step(1e-7)
    assert bool(info.applied)
    np.testing.assert_array_equal(after.params, one)


# -------------------------------------------------------------------------------------- chains, decay, clipping


def test_an_empty_chain_is_the_identity():
    """Here updates are added, so the raw gradient alone goes uphill: Julia's empty chain is `sgd(1.0)`."""
    params, grads = {"w": jnp.ones(2)}, {"w": jnp.array([0.5, -0.25])}
    assert_trees_equal(rules.chain().update(grads, rules.chain().init(params), params)[0], grads)
    assert_trees_equal(ts.update(ts.setup(rules.chain(), params), grads)[0].params, {"w": jnp.array([1.5, 0.75])})
    assert_trees_equal(ts.update(ts.setup(rules.sgd(1.0), params), grads)[0].params, {"w": jnp.array([0.5, 1.25])})


def test_accum_grad_with_decay_and_descent():
    """The example of its documentation: decay and descent see the mean of two gradients, once."""
    params, rule = (
        {"x": jnp.ones(1), "y": jnp.full(1, 2.0)},
        rules.chain(rules.add_decayed_weights(0.01), rules.sgd(0.1)),
    )
    grads = [{"x": jnp.full(1, x), "y": jnp.full(1, y)} for x, y in ((33.0, 0.0), (0.0, 444.0))]
    expected = {"x": np.array([-0.651]), "y": np.array([-20.2020])}
    state, _ = ts.update(ts.setup(rule, params), jax.tree.map(lambda a, b: (a + b) / 2, *grads))
    assert_trees_close(state.params, expected, rtol=1e-6, atol=0)

    state = ts.setup(rules.accumulate(rule, every=2), params)
    state, _ = ts.update(state, grads[0])
    assert_trees_equal(state.params, params)
    assert_trees_close(ts.update(state, grads[1])[0].params, expected, rtol=1e-6, atol=0)


X, Y = RNG.normal(size=(8, 3)).astype(np.float32), RNG.normal(size=8).astype(np.float32)
WEIGHTS = {"w": np.array([2.0, -1.0, 0.5], np.float32), "b": np.array([0.25], np.float32)}
fit_loss = lambda p, batch: jnp.mean((X @ p["w"] + p["b"] - Y) ** 2)
PENALTIES = {
    "add_decayed_weights": lambda p: 0.21 * sum(jnp.sum(x**2) for x in jax.tree.leaves(p)),
    "sign_decay": lambda p: 0.42 * sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(p)),
}


def fitted(rule, loss=fit_loss, steps=10):
    step = ts.train_step(loss)
    scan = jax.jit(lambda s: jax.lax.scan(lambda s, _: step(s, X), s, None, length=steps))
    state, info = scan(ts.setup(rule, WEIGHTS))
    return state.params, info.loss


@pytest.mark.parametrize("decay", PENALTIES)
@pytest.mark.parametrize(
    "rule",
    [
        rules.sgd(0.1),
        *(pytest.param(r, marks=pytest.mark.medium) for r in (rules.flux_momentum(0.02), rules.adam(0.1))),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_decay_first_is_a_penalty_in_the_loss(decay, rule):
    penalised = lambda p, batch: fit_loss(p, batch) + PENALTIES[decay](p)
    in_loss, reported = fitted(rule, penalised)
    in_chain, bare = fitted(rules.chain(getattr(rules, decay)(0.42), rule))
    assert_trees_close(in_chain, in_loss, rtol=2e-5, atol=2e-6)
    # the losses that are reported differ by the penalty
    np.testing.assert_allclose(reported[0] - bare[0], PENALTIES[decay](WEIGHTS), rtol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize(
    "chain",
    [
        lambda decay: rules.chain(rules.clip_by_global_norm(0.5), decay, rules.sgd(0.1)),
        lambda decay: rules.chain(rules.live(optax.scale_by_adam)(), decay, optax.scale(-0.1)),
    ],
    ids=["behind a clip", "behind adam"],
)
def test_where_decay_and_penalty_stop_agreeing(chain):
    penalised = lambda p, batch: fit_loss(p, batch) + PENALTIES["add_decayed_weights"](p)
    in_loss, _ = fitted(chain(rules.add_decayed_weights(0.0)), penalised)
    in_chain, _ = fitted(chain(rules.add_decayed_weights(0.42)))
    assert max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (in_loss, in_chain)), strict=True)) > 0.05


TWO = {"a": np.array([3.0, 4.0], np.float32), "b": np.array([0.0, 12.0], np.float32)}  # norms 5, 12, together 13


@pytest.mark.parametrize(
    "clip, scales",
    [
        (rules.clip_by_norm(6.5), (1.0, 6.5 / 12)),  # Optimisers.jl's ClipNorm
        (rules.clip_by_global_norm(6.5), (0.5, 0.5)),  # Lightning's gradient_clip_val
        (rules.clip_by_norm(6.5, p=1), (6.5 / 7, 6.5 / 12)),
        (rules.clip_by_norm(6.5, p=np.inf), (1.0, 6.5 / 12)),
    ],
    ids=["per array", "global", "p=1", "p=inf"],
)
def test_clip_per_array_and_globally(clip, scales):
    state = ts.setup(rules.chain(clip, rules.sgd(1.0)), jax.tree.map(np.zeros_like, TWO))
    expected = {name: -scale * np.float64(TWO[name]) for name, scale in zip("ab", scales, strict=True)}
    assert_trees_close(ts.update(state, TWO)[0].params, expected, rtol=1e-6, atol=0)
    assert_trees_equal(ts.update(state, state.params)[0].params, state.params)  # a zero gradient is no 0/0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("clip", [rules.clip_by_norm(1.0), rules.clip_by_global_norm(1.0), rules.clip(1.0)])
def test_a_clip_does_not_hide_what_is_not_finite(clip, bad):
    state = ts.setup(rules.chain(clip, rules.sgd(1.0)), TWO)
    after, info = ts.update(state, TWO | {"b": np.array([bad, 1.0], np.float32)})
    assert not info.applied
    assert_trees_equal(after.params, state.params)


# ------------------------------------------------------------------------ no gradient, and a gradient that is zero

HEADS = {
    "body": RNG.normal(size=(3, 4)).astype(np.float32),
    "cats": {"w": RNG.normal(size=4).astype(np.float32), "b": np.ones(1, np.float32)},
    "dogs": {"w": RNG.normal(size=5).astype(np.float32)[:4], "b": np.ones(1, np.float32)},
}


def head_loss(head):
    def loss(params, batch):
        out = jnp.tanh(batch @ params["body"]) @ params[head]["w"] + params[head]["b"]
        return jnp.mean((out - 1) ** 2)

    return loss


both_loss = lambda params, batch: head_loss("cats")(params, batch) + head_loss("dogs")(params, batch)


@functools.cache
def heads_trained(rule, frozen=None):
    """Two steps with both heads, three with the cats only, two with both: the state before, between and after."""
    both, cats = ts.train_step(both_loss, donate=False), ts.train_step(head_loss("cats"), donate=False)
    state = ts.setup(rule, HEADS, freezable=frozen is not None)
    for _ in range(2):
        state, _ = both(state, X)
    before = state = ts.freeze(state, frozen) if frozen else state
    for _ in range(3):
        state, _ = cats(state, X)
    between = state = ts.thaw(state) if frozen else state
    for _ in range(2):
        state, _ = both(state, X)
    return before, between, state


def of_dogs(state):
    """The dogs' params and moments."""
    adam = next(s for s in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(s, "mu"))
    return state.params["dogs"], adam.mu["dogs"], adam.nu["dogs"]


DECAYING = rules.chain(rules.sign_decay(0.01), rules.adamw(0.05, weight_decay=0.1))
SKIPPING = rules.skip_zero(DECAYING)


@pytest.mark.medium
def test_a_head_without_a_gradient_stays_as_it_is():
    before, between, after = heads_trained(SKIPPING)
    assert_trees_equal(of_dogs(between), of_dogs(before))
    assert np.abs(between.params["cats"]["w"] - before.params["cats"]["w"]).max() > 1e-3
    assert np.abs(after.params["dogs"]["w"] - between.params["dogs"]["w"]).max() > 1e-3
    assert int(between.step) == 5


@pytest.mark.medium
def test_without_skip_zero_it_moves():
    before, between, _ = heads_trained(DECAYING)
    for was, now in zip(*map(jax.tree.leaves, (of_dogs(before), of_dogs(between))), strict=True):
        assert (was != now).all()


@pytest.mark.medium
def test_a_head_that_is_skipped_is_a_head_that_is_frozen():
    skipped = heads_trained(SKIPPING)
    frozen = heads_trained(DECAYING, "dogs/**")
    for a, b in zip(skipped, frozen, strict=True):
        assert_trees_close(a.params, b.params, rtol=2e-6, atol=2e-7)
        assert_trees_close(of_dogs(a), of_dogs(b), rtol=2e-6, atol=2e-7)


@pytest.mark.medium
def test_two_players_leave_each_other_alone():
    """A GAN with one state: each player's loss gives the other a gradient of zero, without stop_gradient elsewhere."""
    players = {"maker": np.ones(3, np.float32), "judge": np.full(3, 0.5, np.float32)}
    made = lambda p: jnp.tanh(p["maker"])
    make = lambda p, batch: -jnp.mean(made(p) * jax.lax.stop_gradient(p["judge"]))
    judge = lambda p, batch: jnp.mean((jax.lax.stop_gradient(made(p)) - batch) * p["judge"])
    state = ts.setup(rules.skip_zero(rules.adamw(0.1, weight_decay=0.5)), players)
    for loss, moves, rests in ((judge, "judge", "maker"), (make, "maker", "judge")) * 2:
        before = state
        state, _ = ts.train_step(loss, donate=False)(state, np.float32(0.0))
        assert_trees_equal(state.params[rests], before.params[rests])
        assert (state.params[moves] != before.params[moves]).all()


def test_the_count_is_shared_and_goes_on():
    """After four steps without, the correction is that of step 5: (1-b1)/(1-b1⁵) over the root of the same with b2."""
    state = ts.setup(rules.skip_zero(rules.adam(1.0)), {"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)})
    step = jax.jit(ts.update)
    for b in (0.0, 0.0, 0.0, 0.0, 1.0):
        state, _ = step(state, {"a": jnp.ones(1), "b": jnp.full(1, b)})
    expected = (0.1 / (1 - 0.9**5)) / np.sqrt(0.001 / (1 - 0.999**5))
    np.testing.assert_allclose(-state.params["b"], expected, rtol=1e-5)


SKIPPED = {
    "sgd": rules.sgd(0.1, momentum=0.9),
    "adamw": rules.adamw(0.1),
    "amsgrad": rules.amsgrad(0.1),
    "rmsprop": rules.rmsprop(0.1, centered=True, momentum=0.9),
    "adafactor": rules.adafactor(0.1, min_dim_size_to_factor=2),
    "lion": rules.lion(0.1),
    "muon": rules.muon(0.1),
    "schedule_free_sgd": rules.schedule_free_sgd(0.1),
    "plain optax": optax.adamw(0.1),
    "masked": optax.masked(optax.adamw(0.1), {"a": False, "b": True}),
    "chain": rules.chain(rules.clip_by_norm(1.0), rules.add_decayed_weights(0.1), rules.adam(0.1)),
    "groups": rules.partition({"b": rules.adamw(0.1), "**": rules.sgd(0.1)}),
    "schedule": rules.adamw(optax.cosine_decay_schedule(0.1, 10)),
} | {name: getattr(rules, name)(0.1) for name in OURS}


QUICK = ("sgd", "masked", "groups")


@pytest.mark.parametrize("name", medium_if(lambda name: name not in QUICK, SKIPPED))
def test_what_belongs_to_a_skipped_leaf_stays(name):
    """Whatever of the state has b's shape, or a part of it: (5, 7) is in no other leaf."""
    params = {"a": jnp.ones((2, 3)), "b": jnp.linspace(-1, 1, 35).reshape(5, 7)}
    ones = jax.tree.map(jnp.ones_like, params)
    state = ts.setup(rules.skip_zero(SKIPPED[name]), params)
    step = jax.jit(ts.update)
    before, _ = step(state, ones)
    after, info = step(before, ones | {"b": jnp.zeros((5, 7))})
    assert info.applied
    of_b = lambda s: [x for x in jax.tree.leaves((s.params, s.opt_state)) if {5, 7} & set(np.shape(x))]
    assert_trees_equal(of_b(after), of_b(before))
    assert (after.params["a"] != before.params["a"]).all()


def test_skip_zero_in_plain_optax_and_on_a_subtree_with_a_rate_of_its_own():
    tx = optax.chain(optax.clip(1.0), rules.skip_zero(rules.adamw(0.1, weight_decay=0.5)))
    params = {"a": jnp.ones(1), "b": jnp.ones(1)}
    updates, _ = jax.jit(lambda g: tx.update(g, tx.init(params), params))({"a": jnp.ones(1), "b": jnp.zeros(1)})
    assert_trees_close(updates, {"a": np.array([-0.15]), "b": np.zeros(1)}, rtol=1e-5, atol=0)

    state = ts.adjust(ts.setup(rules.skip_zero(rules.adam(0.1)), params), "b", learning_rate=0.5)
    step = jax.jit(ts.update)
    for b, expected in ((0.0, 1.0), (1.0, 1 - 0.5 * (0.1 / 0.19) / np.sqrt(0.001 / 0.001999))):
        state, _ = step(state, {"a": jnp.ones(1), "b": jnp.full(1, b)})
        np.testing.assert_allclose(state.params["b"], expected, rtol=1e-5)


def test_inside_accumulate_a_leaf_moves_that_took_part_in_any_call():
    state = ts.setup(rules.accumulate(rules.skip_zero(rules.sgd(1.0)), every=2), {n: jnp.zeros(1) for n in "abc"})
    step = jax.jit(ts.update)
    for a, b in ((1.0, 0.0), (0.0, 2.0)):
        state, _ = step(state, {"a": jnp.full(1, a), "b": jnp.full(1, b), "c": jnp.zeros(1)})
    expected = {"a": np.float32([-0.5]), "b": np.float32([-1.0]), "c": np.float32([0.0])}
    assert_trees_equal(state.params, expected)


def test_skip_zero_takes_nan_for_a_gradient():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state, grads = ts.setup(rules.skip_zero(rules.sgd(0.1)), params), params | {"b": jnp.array([0.0, jnp.nan])}
    assert not ts.update(state, grads)[1].applied
    assert np.isnan(ts.update(state, grads, on_nonfinite="ignore")[0].params["b"][1])


def averages(state):
    return [optax.tree_utils.tree_get(state.opt_state, name) for name in ("mu", "nu")]


def test_skip_zero_where_nothing_has_a_gradient_and_in_one_program():
    rule = rules.skip_zero(rules.adamw(0.1, weight_decay=0.5))
    assert rule.update == rules.skip_zero(rules.adamw(0.2, weight_decay=0.1)).update
    state, zeros = ts.setup(rule, TWO), jax.tree.map(jnp.zeros_like, TWO)
    step = jax.jit(ts.update)
    step(state, zeros)
    with count_compiles() as compiles:
        after, _ = step(state, zeros)
    assert compiles.compiles == 0
    assert_trees_equal((after.params, averages(after)), (state.params, averages(state)))
    assert int(after.step) == optax.tree_utils.tree_get(after.opt_state, "count") == 1  # which all leaves share


def test_skip_zero_takes_a_rule():
    with pytest.raises(ts.errors.WrongTypeError, match=r"rule at skip_zero\(\): got the function adam"):
        rules.skip_zero(rules.adam)


# --------------------------------------------------------------------------------------------------------- the page


def test_the_page_names_every_rule():
    page = (Path(__file__).parents[1] / "docs" / "rules.md").read_text(encoding="utf-8")
    named = {row.name.split(" ")[0].rstrip(":") for row in ROWS} | set(OURS) | {"AccumGrad", "skip_zero"}
    assert not {name for name in named if f"`{name}" not in page}
