"""NaN, infinite and enormous numbers that come into a state from outside of a step, which judges its gradient alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tsunax.errors import StateError

RULES = {
    "adam": lambda: ts.rules.adam(1e-3),
    "momentum": lambda: ts.rules.sgd(1e-2, momentum=0.9),
    "adagrad": lambda: ts.rules.adagrad(0.1),
    "plain optax": lambda: optax.adamw(1e-3),
}
BAD = [np.nan, np.inf, -np.inf, 1e38]
X = jnp.ones(3)


def loss_fn(params, batch):
    return jnp.mean((params["w"] * batch - 1) ** 2)


def fresh(rule="adam", **options):
    return ts.setup(RULES[rule](), {"w": jnp.ones(3)}, **options)


def poisoned(state, bad, field="opt_state"):
    """The state with one bad number in the last array of a field."""
    flat, treedef = jax.tree.flatten(getattr(state, field))
    at = max(i for i, x in enumerate(flat) if x.ndim)
    flat[at] = flat[at].at[1].set(bad)
    return dataclasses.replace(state, **{field: treedef.unflatten(flat)})


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("rule", RULES)
def test_the_first_step_refuses_bad_moments(rule, bad):
    state = poisoned(fresh(rule), bad)
    with pytest.raises(StateError, match=r"state\.opt_state.*\['w'\]: got 1 of 3 numbers"):
        ts.train_step(loss_fn)(state, X)
    assert not state.params["w"].is_deleted()
    ts.train_step(loss_fn, on_nonfinite="ignore")(state, X)


@pytest.mark.parametrize("field", ["params", "average"])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_the_first_step_refuses_bad_params_and_averages(field, bad):
    with pytest.raises(StateError, match=rf"state\.{field}"):
        ts.train_step(loss_fn)(poisoned(fresh("plain optax", ema=0.9), bad, field), X)


def test_a_fit_after_an_ignoring_one_refuses_what_that_left():
    ignoring = ts.train_step(loss_fn, on_nonfinite="ignore")
    state, _ = ignoring(fresh(), X * np.nan)
    with pytest.raises(StateError, match="not look at updates"):
        ts.fit(ts.train_step(loss_fn), state, [X], steps=2, progress=False)


def test_members_of_a_population_and_traced_states():
    runs = ts.population(lambda i: fresh(), 2)
    ts.train_step(loss_fn, donate=False)(runs, X)
    with pytest.raises(StateError, match="3 of 6 numbers"):
        ts.train_step(loss_fn)(poisoned(runs, np.nan), X)
    jax.jit(ts.train_step(loss_fn))(poisoned(fresh(), np.nan), X)  # a traced state has no numbers


def test_a_rule_whose_update_is_judged_keeps_its_infinities():
    rule = optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau())
    _, info = ts.train_step(lambda p, b: loss_fn(p, b))(ts.setup(rule, {"w": jnp.ones(3)}), X)
    assert info.applied


def test_what_comes_in_later_is_warned_of(tmp_path):
    state, bad = fresh(), poisoned(fresh(), np.nan)
    with pytest.warns(UserWarning, match=r"migrate\(\): leaf at state\.opt_state"):
        ts.migrate(bad, ts.rules.chain(ts.rules.clip_by_global_norm(1.0), ts.rules.adam(1e-3)))
    with ts.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(bad)
    with pytest.warns(UserWarning, match=r"restore of step 0: leaf at state\.opt_state"):
        restored = ts.Checkpoints(tmp_path / "run", read_only=True).restore(state).state
    assert np.isnan(restored.opt_state[0].nu["w"]).sum() == 1
    ts.exchange.save(tmp_path / "a.safetensors", bad)
    with pytest.warns(UserWarning, match=r"restore\(\): leaf at state\.opt_state"):
        ts.exchange.restore(tmp_path / "a.safetensors", state)


def test_moments_of_64_bits_have_their_own_range():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        start = lambda: ts.setup(ts.rules.adam(1e-3), {"w": jnp.ones(3, jnp.float64)})
        step = ts.train_step(lambda params, batch: jnp.mean(params["w"] ** 2))
        with pytest.raises(StateError, match=r"not below 8e\+270"):
            step(poisoned(start(), 1e300), None)
        _, info = step(poisoned(start(), 1e60), None)
        assert info.applied


def test_a_sum_that_overflows_is_refused_when_it_starts_again():
    step, large = ts.train_step(lambda p, b: jnp.sum(p["w"] * b)), jnp.array([1.8e19, 0, 0])
    state = fresh("adagrad")
    for _ in range(2):
        state, info = step(state, large)
        assert info.applied
    assert np.isinf(state.opt_state[0].sum_of_squares["w"][0]) and np.isfinite(state.params["w"]).all()
    with pytest.raises(StateError, match="sum_of_squares"):
        ts.train_step(loss_fn)(state, X)


@pytest.mark.parametrize("decay", [np.nan, -0.5, 1.5, np.inf])
def test_a_decay_of_an_average_out_of_its_range_rejects_the_step(decay):
    state = fresh(ema=lambda step: jnp.where(step == 2, decay, 0.9))
    step, applied = ts.train_step(loss_fn), []
    for _ in range(4):
        state, info = step(state, X * 2)
        applied.append(bool(info.applied))
    assert applied == [True, True, False, False] and np.isfinite(state.average.params["w"]).all()


def test_a_decay_that_is_not_used_yet_and_one_rounded_above_one():
    decay = lambda step: jnp.array([0.5, np.nan, 1 + 1e-7])[step]
    state, step = fresh(ema=ts.averages.ema(decay, start=2)), ts.train_step(loss_fn)
    for _ in range(3):
        state, info = step(state, X * 2)
        assert info.applied
