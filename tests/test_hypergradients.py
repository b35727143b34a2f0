"""Derivatives of what training leads to with respect to its hyperparameters: closed forms, differences, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts

# jax.experimental.enable_x64 is gone from new releases, jax.enable_x64 not yet in 0.7.2
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
RNG = np.random.default_rng(0)


def quadratic(params, a):
    """½ Σ a w²; its gradient is a w."""
    return sum(0.5 * jnp.sum(a * w**2) for w in params.values())


def test_one_step_on_a_quadratic():
    """w' = w - r (a w + d w), V = ½ Σ w'²: dV/dr = -Σ w' (a + d) w, and dV/dd = -r Σ w' w for each leaf's own d."""
    a, w = np.array([1.0, 2.0, 0.5]), {"u": np.array([1.0, -2.0, 3.0]), "v": np.array([0.5, 1.5, -1.0])}
    rate, decay = 0.25, {"u": 0.125, "v": 0.5}
    step = ts.train_step(quadratic)

    def validation(rate, decay):
        rules = {k: ts.rules.chain(ts.rules.add_decayed_weights(d), ts.rules.sgd(rate)) for k, d in decay.items()}
        state = ts.setup(ts.rules.partition(rules), {k: jnp.asarray(x, jnp.float32) for k, x in w.items()})
        state, _ = step(state, jnp.asarray(a, jnp.float32))
        return quadratic(state.params, 1.0)

    by_rate, by_decay = jax.jit(jax.grad(validation, (0, 1)))(rate, decay)
    new = {k: x - rate * (a + decay[k]) * x for k, x in w.items()}
    np.testing.assert_allclose(by_rate, -sum(np.sum(new[k] * (a + decay[k]) * w[k]) for k in w), rtol=1e-6)
    for k in w:
        np.testing.assert_allclose(by_decay[k], -rate * np.sum(new[k] * w[k]), rtol=1e-6)


X = RNG.normal(size=(5, 16, 4))
Y = np.tanh(X @ RNG.normal(size=(4, 2)))
VAL = X[0] * 0.9, Y[0]
PARAMS = {"w": RNG.normal(size=(4, 8)) * 0.5, "v": RNG.normal(size=(8, 2)) * 0.5}
HYPER = {"rate": 2.0**-4, "b1": 0.75, "w": 2.0**-3, "v": 2.0**-2}  # float32 holds them and their neighbours exactly


def loss_fn(params, batch):
    x, y = batch
    return ts.Loss.mean(jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2, -1))


STEP = ts.train_step(loss_fn)


def plain(state, batch):
    return STEP(state, batch)[0]


def guarded(state, batch):
    """A step with a derivative also where it is rejected: `cond` differentiates the branch that was taken."""
    applied = STEP(jax.lax.stop_gradient(state), batch)[1].applied
    stay = lambda state: state.replace(calls=state.calls + 1, rejected=state.rejected + 1)
    return jax.lax.cond(applied, lambda state: plain(state, batch), stay, state)


def validation(hyper, x, y, step=plain, remat=jax.checkpoint):
    rule = lambda decay: ts.rules.adamw(hyper["rate"], b1=hyper["b1"], weight_decay=decay)
    rules = ts.rules.partition({"w": rule(hyper["w"]), "v": rule(hyper["v"])})
    state = ts.setup(rules, {name: jnp.asarray(w, x.dtype) for name, w in PARAMS.items()})
    state, _ = jax.lax.scan(remat(lambda state, batch: (step(state, batch), None)), state, (x, y))
    return loss_fn(state.params, tuple(jnp.asarray(part, x.dtype) for part in VAL)).compute()


@pytest.mark.medium
def test_many_steps_against_finite_differences():
    with enable_x64(True):
        hyper = {name: jnp.float64(x) for name, x in HYPER.items()}
        found = jax.jit(jax.grad(validation))(hyper, X, Y)
        f, h = jax.jit(validation), 2.0**-12
        for name, x in hyper.items():
            up, down = (f({**hyper, name: x + s}, X, Y) for s in (h, -h))
            # hyperparameters are float32, and so is a cotangent on its way to them
            np.testing.assert_allclose(found[name], (up - down) / (2 * h), rtol=2e-4, err_msg=name)


@pytest.mark.medium
def test_a_rejected_step_needs_a_branch():
    """Its derivative is that of a run without the batch; by `where` alone it would be NaN, since 0 · NaN is."""
    hyper = {name: jnp.float32(x) for name, x in HYPER.items()}
    x, y = X.astype(np.float32), Y.astype(np.float32)
    bad, keep = x.copy(), [0, 1, 3, 4]
    bad[2, 0, 0] = np.nan
    both = jax.jit(jax.value_and_grad(validation), static_argnums=3)
    value, found = both(hyper, bad, y, guarded)
    wanted, expected = both(hyper, x[keep], y[keep], plain)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, expected)
    value, found = both(hyper, bad, y, plain)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    assert all(np.isnan(g) for g in found.values())


@pytest.mark.medium
def test_checkpointed_steps_keep_states_and_no_activations():
    """Of 64 steps with 1 MiB of activations each, by XLA's own count."""
    x, y = np.ones((64, 16384, 4), np.float32), np.ones((64, 16384, 2), np.float32)
    hyper = {name: jnp.float32(v) for name, v in HYPER.items()}

    def temporary(remat):
        program = jax.jit(jax.grad(lambda hyper: validation(hyper, x, y, remat=remat))).lower(hyper).compile()
        return program.memory_analysis().temp_size_in_bytes

    kept, rebuilt = temporary(lambda f: f), temporary(jax.checkpoint)
    assert kept > 64 * 16384 * 8 * 4 and rebuilt < kept / 5


@pytest.mark.medium
def test_a_population_of_hypergradients():
    """Under vmap, too: a gradient for each start."""
    hyper = {name: jnp.float32(x) for name, x in HYPER.items()}
    rates = jnp.array([0.03, 0.06], jnp.float32)
    x, y = X.astype(np.float32), Y.astype(np.float32)
    of = jax.jit(lambda rate: jax.grad(validation)({**hyper, "rate": rate}, x, y)["rate"])
    np.testing.assert_allclose(jax.jit(jax.vmap(of))(rates), [of(rate) for rate in rates], rtol=1e-4)
