"""A step under everything at once: places, micro-batches, what a loss names, policies. All agree."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests.helpers import assert_trees_close, covering_array
from tsunax.errors import NonFiniteError, RuleError, StateError, WrongTypeError

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
PARAMS = {"w": jnp.ones((4, 3)), "frozen": jnp.ones(3)}
STATISTICS = {"sum": jnp.zeros(()), "n": jnp.int32(0)}
NAMED = ["", "mask", "model_state", "key", "mask model_state key"]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def losses_of(named):
    """A loss function with these keywords, whose numbers do not depend on how a batch is cut."""

    def rows(params, x, mask, model_state):
        values = jnp.sum((x @ params["w"] + params["frozen"][None]) ** 2, -1)
        seen = jnp.float32(len(x)) if mask is None else mask.sum()
        new = None if model_state is None else {"sum": model_state["sum"] + seen, "n": model_state["n"] + 1}
        return ts.Loss.mean(values, mask, model_state=new)

    return {
        "": lambda params, x: rows(params, x, None, None),
        "mask": lambda params, x, mask: rows(params, x, mask, None),
        "model_state": lambda params, x, model_state: rows(params, x, None, model_state),
        "key": lambda params, x, key: rows(params, x + 0 * jax.random.normal(key, x.shape), None, None),
        "mask model_state key": lambda params, x, mask, model_state, key: rows(
            params, x + 0 * jax.random.normal(key, x.shape), mask, model_state
        ),
    }[named]


def state_of(place, named, trainable):
    more = {"key": 0} if "key" in named else {}
    more |= {"model_state": STATISTICS} if "model_state" in named else {}
    make = lambda key=None: ts.setup(ts.rules.adam(0.1), PARAMS, trainable=trainable, **more)
    if place == "population":
        return ts.population(lambda key: make(), 3)
    return ts.shard(make(), ts.mesh()) if place == "mesh" else make()


FACTORS = ["one", "population", "mesh"], NAMED, [1, 2], ["skip", "raise"], ["**", "w"]
is_possible = lambda place, named, accumulate, policy, trainable: (place, policy) != ("mesh", "raise")
ALL = [row for row in itertools.product(*FACTORS) if is_possible(*row)]
PAIRS = covering_array(*FACTORS, is_possible=is_possible)


def test_the_combinations_of_the_fast_tests_have_every_pair():
    pairs = lambda rows: {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}
    assert pairs(PAIRS) == pairs(ALL) and len(PAIRS) < len(ALL) / 4


@pytest.mark.parametrize(
    ("place", "named", "accumulate", "policy", "trainable"),
    [*PAIRS, *(pytest.param(*row, marks=pytest.mark.medium) for row in ALL if row not in PAIRS)],
)
def test_every_combination_computes_the_same(place, named, accumulate, policy, trainable):
    step = ts.train_step(losses_of(named), accumulate=accumulate, on_nonfinite=policy, donate=False)
    state = state_of(place, named, trainable)
    for _ in range(2):
        state, info = step(state, X)
    if "mask" in named:  # a mask of None counts as no mask
        again, _ = step(state, X, mask=None)
        assert_trees_close(again.params, step(state, X)[0].params, rtol=0, atol=0)
    if place == "population":
        state = ts.populations.member(state, 1)
    if "model_state" in named:
        assert float(state.model_state["sum"]) == 32 and int(state.model_state["n"]) == 2 * accumulate
    assert np.all(info.applied)
    one, expected = ts.train_step(losses_of(""), donate=False), state_of("one", "", trainable)
    for _ in range(2):
        expected, _ = one(expected, X)
    assert_trees_close(state.params, expected.params, **CLOSE)


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
