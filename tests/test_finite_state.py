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
BAD = [np.nan, np.inf, -np.inf]
X = jnp.ones(3)


def loss_fn(params, batch):
    return jnp.mean((params["w"] * batch - 1) ** 2)


def fresh(rule="adam", **options):
    return ts.setup(RULES[rule](), {"w": jnp.ones(3)}, **options)


def poisoned(state, bad, field="opt_state", choose=max):
    """The state with one bad number in the last array of a field, or the first one with `choose=min`."""
    flat, treedef = jax.tree.flatten(getattr(state, field))
    at = choose(i for i, x in enumerate(flat) if x.ndim)
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


@pytest.mark.parametrize("rule", ["adam", "momentum", "plain optax"])
def test_the_first_step_refuses_a_first_moment_whose_update_overflows(rule):
    with pytest.raises(StateError, match=r"state\.opt_state.*\['w'\]: got 1 of 3 numbers"):
        ts.train_step(loss_fn)(poisoned(fresh(rule), 1e38, choose=min), X)


@pytest.mark.parametrize("rule", ["adam", "adagrad", "plain optax"])
def test_large_sums_of_squares_are_no_fault(rule):
    """They divide the update. A run with gradients of 6e16 goes on with a new step, as after a restart."""
    state = fresh(rule)
    for _ in range(3):
        state, info = ts.train_step(lambda params, batch: jnp.mean((params["w"] * batch) ** 2))(state, X * 3e8)
        assert info.applied and np.isfinite(state.params["w"]).all()
    assert max(float(jnp.max(x)) for x in jax.tree.leaves(state.opt_state)) > 2.0**100


def test_a_step_that_judges_each_update_does_not_look():
    _, info = ts.train_step(loss_fn, norms="update")(poisoned(fresh(), np.nan), X)
    assert not info.applied


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
    weights = runs.params["w"].at[1, 0].set(np.nan)
    with pytest.warns(UserWarning, match=r"step\(\): leaf at state\.params\['w'\]: got 1 of 6 numbers"):
        _, info = ts.train_step(loss_fn)(dataclasses.replace(runs, params={"w": weights}), X)
    assert info.applied.tolist() == [True, False]  # one failed member does not stop the others
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
            step(poisoned(start(), 1e300, choose=min), None)
        _, info = step(poisoned(start(), 1e60, choose=min), None)
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


@pytest.mark.medium
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


def test_a_decay_out_of_its_range_makes_no_nan_where_no_step_is_judged():
    state = fresh(ema=lambda step: 0.9 + 0.05 * step)
    step = ts.train_step(loss_fn, on_nonfinite="ignore")
    for _ in range(5):
        state, _ = step(state, X * 2)
    assert np.isfinite(state.average.params["w"]).all()


def test_params_on_other_devices_take_their_masters_along():
    policy = ts.precision.Policy(param="bfloat16", compute="bfloat16")
    state = ts.shard(ts.setup(ts.rules.adam(1e-3), {"w": jnp.full(8, 0.3)}, precision=policy), ts.mesh())
    masters = np.asarray(state.masters["w"])
    alone = jax.device_put(jax.device_get(state.params), jax.devices()[1])
    replaced = state.replace(params=alone)
    assert np.array_equal(np.asarray(replaced.masters["w"]), masters)
