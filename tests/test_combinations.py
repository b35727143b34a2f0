"""What two features do together, beside the equivalences of tests/test_equivalences.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests.helpers import assert_trees_close
from tsunax.errors import NonFiniteError, RuleError, StateError, WrongTypeError

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def test_a_population_raises_for_its_rejected_members():
    loss = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
    runs = ts.population(lambda key, size: ts.setup(ts.rules.sgd(0.1), {"w": size * jnp.ones(4)}), 3, size=np.ones(3))
    step = ts.train_step(loss, on_nonfinite="raise", donate=False)
    runs, _ = step(runs, X)
    runs = runs.replace(params={"w": runs.params["w"].at[1].set(1e30)})
    with pytest.raises(NonFiniteError, match=r"members \[1\] were rejected, the first for its loss"):
        step(runs, X)


def test_a_window_of_each_member_is_flushed():
    rule = ts.rules.accumulate(ts.rules.sgd(0.1), every=2)
    make = lambda key=None: ts.setup(rule, {"w": jnp.ones(4)})
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), donate=False)
    one, runs = make(), ts.population(lambda key: make(), 3)
    one, runs = step(one, X)[0], step(runs, X)[0]
    one, runs = ts.flush(one), ts.flush(runs)
    assert int(one.step) == 1
    for i in range(3):
        assert_trees_close(ts.populations.member(runs, i).params, one.params, **CLOSE)
    assert np.asarray(runs.step).tolist() == [1, 1, 1]


def test_a_model_state_that_a_loss_makes_without_reading_it():
    loss = lambda params, x: ts.Loss.mean((x @ params["w"]).sum(-1) ** 2, model_state={"last": x.sum()})
    for accumulate in (1, 2):
        state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones((4, 3))}, model_state={"last": jnp.zeros(())})
        state, _ = ts.train_step(loss, accumulate=accumulate)(state, X)
        np.testing.assert_allclose(state.model_state["last"], X[accumulate - 1 :: accumulate].sum(), rtol=1e-5)


def test_keys_of_a_population():
    runs = ts.population(lambda key: ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(4)}, key=key), 3, key=0)
    for key in (1, jax.random.key(1), jax.random.split(jax.random.key(1), 3)):
        new = runs.replace(key=key)
        assert new.key.shape == (3,) and len(np.unique(jax.random.key_data(new.key), axis=0)) == 3
        step = ts.train_step(
            lambda params, x, key: jnp.mean((x @ params["w"] + jax.random.normal(key)) ** 2), donate=False
        )
        step(new, X)


def test_two_rules_that_differ_in_a_container_are_two_rules():
    def factory(learning_rate, options=()):
        return ts.rules.sgd.factory(learning_rate, 0.9, nesterov=options[0] is True)

    rule, params = ts.rules.live(factory), {"w": jnp.ones(4)}
    loss = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
    step = ts.train_step(loss, donate=False)
    one, other = ts.setup(rule(0.01, options=(1,)), params), ts.setup(rule(0.01, options=(True,)), params)
    assert one.plan is not other.plan and one.plan.update.live.statics["options"] == (1,)
    assert type(one.plan.update.live.statics["options"][0]) is int
    for _ in range(2):
        one, other = step(one, X)[0], step(other, X)[0]
    assert not np.array_equal(one.params["w"], other.params["w"])


def test_skip_zero_around_accumulate_is_refused():
    with pytest.raises(
        RuleError, match=r"skip_zero\(\): got accumulate inside, expected accumulate\(skip_zero\(rule\)\)"
    ):
        ts.setup(ts.rules.skip_zero(ts.rules.accumulate(ts.rules.sgd(1.0), every=2)), {"w": jnp.ones(2)})
    rule = ts.rules.accumulate(ts.rules.skip_zero(ts.rules.sgd(1.0)), every=2)
    state = ts.setup(rule, {"a": jnp.zeros(1), "b": jnp.zeros(1)})
    for a, b in ((1.0, 0.0), (0.0, 1.0)):
        state, _ = ts.update(state, {"a": jnp.full(1, a), "b": jnp.full(1, b)})
    assert float(state.params["a"][0]) == float(state.params["b"][0]) == -0.5


@pytest.mark.parametrize("how", ["whole", "per_example"])
def test_nothing_can_be_dropped_of_one_gradient(how):
    whole = ts.whole_batch(lambda params, x: x @ params["w"], lambda z, x: jnp.mean(z**2))
    loss, options = (
        (whole, {}) if how == "whole" else (lambda params, x: jnp.mean(x @ params["w"]), {"per_example": True})
    )
    with pytest.raises(WrongTypeError, match=r"options at .*got on_nonfinite='drop'"):
        ts.value_and_grad(loss, accumulate=2, on_nonfinite="drop", **options)


def test_an_evaluation_without_a_batch():
    loss = lambda params, key=None: ts.Loss(jnp.sum(params["w"] ** 2), 1.0)
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(4)})
    assert float(ts.eval_step(loss)(state).compute()) == 4


@pytest.mark.medium
def test_bases_stay_orthogonal_beside_low_moments():
    policy = ts.precision.Policy(moments="bfloat16")
    state = ts.setup(ts.rules.soap(0.01, precondition_frequency=2), {"w": jnp.ones((8, 8))}, precision=policy, key=0)
    rng = np.random.default_rng(0)
    for _ in range(6):
        state, _ = ts.update(state, {"w": rng.normal(size=(8, 8)).astype(np.float32)})
    kept = state.opt_state[0]
    assert kept.mu["w"].dtype == jnp.bfloat16 and kept.row_basis["w"].dtype == jnp.float32
    np.testing.assert_allclose(kept.row_basis["w"].T @ kept.row_basis["w"], np.eye(8), atol=1e-5)


def test_a_rule_that_changes_its_state_is_named_beside_low_moments():
    import optax

    init = lambda params: {"a": jnp.zeros(4)}
    rule = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, {**state, "b": 1.0}))
    policy = ts.precision.Policy(moments="bfloat16")
    with pytest.raises((RuleError, StateError)):
        state = ts.setup(rule, {"w": jnp.ones(4)}, precision=policy, key=0)
        ts.update(state, {"w": jnp.ones(4)})
