"""hyperparams, adjust, freeze, thaw: a run that changes while it runs, against runs that were made that way."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tsunax as ts
from tests.helpers import assert_trees_close, assert_trees_equal, count_compiles
from tsunax.errors import HyperparameterError, PatternError
from tsunax.rules import adam, adamw, chain, clip_global_norm, groups, sgd, weight_decay

TRAINED = ["body/b", "body/w", "head/b", "head/w"]


def make_params(seed=0):
    a, b = jax.random.split(jax.random.key(seed))
    return {
        "body": {"w": jax.random.normal(a, (4, 6)), "b": jnp.zeros(6) + 0.1},
        "head": {"w": jax.random.normal(b, (6, 2)), "b": jnp.zeros(2) + 0.1},
    }


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["body"]["w"] + params["body"]["b"][None])
    return jnp.mean((hidden @ params["head"]["w"] + params["head"]["b"][None] - 1.0) ** 2)


STEP = ts.train_step(loss_fn, donate=False)


def batch(i):
    return jax.random.normal(jax.random.key(100 + i), (8, 4))


def run(state, n, step=STEP, first=0):
    for i in range(first, first + n):
        state, _ = step(state, batch(i))
    return state


def step_compiles(seen):
    return sum("train_step" in name for name in seen.compiled)


# -------------------------------------------------------------------------------------------------------- names


def test_numbers_read_as_they_were_given():
    state = ts.setup(adamw(3e-4, b2=0.95, eps=1e-8, weight_decay=0.01), make_params())
    expected = {"learning_rate": 3e-4, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "eps_root": 0.0, "weight_decay": 0.01}
    assert ts.hyperparams(state) == expected


@pytest.mark.parametrize("value", [0.999, 0.9999, 1e-3, 1 / 3, 1e-30, 0.1, 0.5, 123456.789, 0.0])
def test_a_number_survives_the_round_trip_with_its_complement(value):
    rule = ts.rules.live(lambda learning_rate: optax.scale(-learning_rate))
    a, b = ts.setup(rule(value), make_params()), ts.setup(rule(0.2), make_params())
    copied = ts.adjust(b, ts.hyperparams(a))
    assert_trees_equal(copied.numbers.values[:2], a.numbers.values[:2])


def test_names_say_group_subtree_and_place_in_a_chain_only_where_they_must():
    rule = chain(clip_global_norm(1.0), clip_global_norm(2.0), groups({"body/**": adam(1e-3), "**": sgd(1e-2)}))
    state = ts.adjust(ts.setup(rule, make_params()), "body/b", b1=0.5)
    names = set(ts.hyperparams(state))
    assert {"0.max", "1.max", "learning_rate@**", "learning_rate@body/**", "b1@body/**", "b1@body/**@body/b"} <= names


# ------------------------------------------------------------------------------------------------------- adjust


VALUES = [0.25, 1, np.float32(0.25), np.float64(0.25), jnp.float32(0.25), np.array(0.25), jnp.asarray(0.25)]


@pytest.mark.parametrize("value", VALUES, ids=[f"{type(v).__name__}-{v}" for v in VALUES])
def test_adjust_is_a_rule_with_that_number(value):
    state = run(ts.setup(sgd(0.1, momentum=0.9), make_params()), 2)
    adjusted = run(ts.adjust(state, learning_rate=value), 2, first=2)
    fresh = ts.setup(sgd(float(value), momentum=0.9), make_params())
    expected = run(fresh.replace(params=state.params, opt_state=state.opt_state), 2, first=2)
    assert_trees_equal((adjusted.params, adjusted.opt_state), (expected.params, expected.opt_state))


def test_moments_are_kept():
    state = run(ts.setup(adam(0.1), make_params()), 3)
    for where in ("**", "body/**"):
        assert_trees_equal(
            jax.tree.leaves(ts.adjust(state, where, b1=0.5).opt_state)[:8], jax.tree.leaves(state.opt_state)[:8]
        )


CUTTABLE = {
    "adamw": lambda: adamw(1e-2),
    "lamb": lambda: ts.rules.lamb(1e-2),
    "adafactor": lambda: ts.rules.adafactor(1e-2),
    "prodigy": lambda: ts.rules.prodigy(),
    "schedule_free_adamw": lambda: ts.rules.schedule_free_adamw(1e-2),
    "user chain": lambda: ts.rules.live(_user_chain)(0.1),
    "chain": lambda: chain(clip_global_norm(0.1), weight_decay(1e-2), adam(optax.cosine_decay_schedule(1e-2, 20))),
}


def _user_chain(learning_rate, momentum=0.9, limit=0.1):
    return optax.chain(optax.clip_by_global_norm(limit), optax.trace(momentum), optax.scale(-learning_rate))


@pytest.mark.parametrize("name", CUTTABLE)
def test_a_cut_with_equal_values_changes_no_bit(name):
    """Also a norm inside of the factory stays global."""
    state = run(ts.setup(CUTTABLE[name](), make_params()), 3)
    cut = ts.adjust(state, "body/**")
    assert "@body/**" in " ".join(ts.hyperparams(cut))
    assert_trees_equal(run(cut, 5, first=3).params, run(state, 5, first=3).params)


def test_a_cut_subtree_trains_at_its_own_rate():
    state = ts.adjust(ts.setup(sgd(0.1), make_params()), "head/**", learning_rate=0.5)
    grads = jax.grad(loss_fn)(make_params(), batch(0))
    after = run(state, 1)
    expected = {
        k: jax.tree.map(lambda p, g, r=r: p - r * g, make_params()[k], grads[k])
        for k, r in (("body", 0.1), ("head", 0.5))
    }
    assert_trees_close(after.params, expected, rtol=1e-6, atol=1e-7)


def test_cuts_may_overlap_and_nest():
    state = ts.setup(sgd(0.1), make_params())
    state = ts.adjust(state, "body/**", learning_rate=0.2)
    state = ts.adjust(state, "**/b", learning_rate=0.3)
    state = ts.adjust(state, lambda path, leaf: path == "body/b", learning_rate=0.4)
    state = ts.adjust(state, {"body": {"w": False, "b": False}, "head": {"w": True, "b": False}}, learning_rate=0.5)
    grads = jax.grad(loss_fn)(make_params(), batch(0))
    rates = {"body": {"w": 0.2, "b": 0.4}, "head": {"w": 0.5, "b": 0.3}}
    expected = jax.tree.map(lambda p, g, r: p - r * g, make_params(), grads, rates)
    assert_trees_close(run(state, 1).params, expected, rtol=1e-6, atol=1e-7)
    assert len(set(ts.hyperparams(state))) == 4


def test_a_declared_group_is_adjusted_without_a_cut():
    state = ts.setup(groups({"body/**": sgd(0.1), "**": sgd(0.2)}), make_params())
    run(state, 1)
    with count_compiles() as seen:
        state = run(ts.adjust(state, "body/**", learning_rate=0.7), 1)
    assert step_compiles(seen) == 0
    assert ts.hyperparams(state) == {"learning_rate@body/**": 0.7, "learning_rate@**": 0.2}


def test_a_schedule_is_overridden_and_given_back():
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    state = run(ts.setup(sgd(schedule), make_params()), 2)
    assert ts.hyperparams(state)["learning_rate"] == pytest.approx(0.8)
    held = run(ts.adjust(state, learning_rate=0.123), 2)
    assert ts.hyperparams(held)["learning_rate"] == 0.123
    back = ts.adjust(held, learning_rate=None)
    assert ts.hyperparams(back)["learning_rate"] == pytest.approx(0.6)
    with pytest.raises(HyperparameterError, match="schedule"):
        ts.adjust(ts.setup(sgd(0.1), make_params()), learning_rate=None)


def test_unknown_repeated_and_misplaced_names_raise_with_the_known_ones():
    state = ts.setup(chain(clip_global_norm(1.0), clip_global_norm(2.0), sgd(0.1)), make_params())
    with pytest.raises(HyperparameterError, match="learning_rate"):
        ts.adjust(state, learning_rte=0.1)
    with pytest.raises(HyperparameterError, match=r"0\.max.*1\.max"):
        ts.adjust(state, max=3.0)
    assert ts.hyperparams(ts.adjust(state, **{"1.max": 3.0}))["1.max"] == 3.0
    with pytest.raises(PatternError, match=r"bdy.*body/b"):
        ts.adjust(state, "bdy/**", learning_rate=0.1)
    with pytest.raises(HyperparameterError):
        ts.adjust(state, learning_rate=-1.0)
    with pytest.raises(HyperparameterError, match="live"):
        ts.adjust(ts.setup(optax.sgd(0.1), make_params()), learning_rate=0.1)


def test_no_adjust_compiles_the_step_but_the_first_cut_of_a_subtree():
    state = run(ts.setup(chain(clip_global_norm(1.0), adam(1e-3)), make_params()), 1)
    kinds, draw = [float, np.float32, jnp.float32, np.float64, lambda v: int(v > 0.5)], random.Random(0)
    with count_compiles() as seen:
        for i in range(100):
            state = run(ts.adjust(state, learning_rate=kinds[i % 5](draw.random())), 1)
    assert step_compiles(seen) == 0
    with count_compiles() as seen:
        state = run(ts.adjust(state, "body/**", learning_rate=0.1), 2)
    assert step_compiles(seen) == 1
    with count_compiles() as seen:
        for i in range(100):
            state = run(ts.adjust(state, "body/**" if i % 2 else "**", learning_rate=draw.random()), 1)
    assert step_compiles(seen) == 0


def test_adjust_inside_jit_and_scan():
    state = ts.adjust(ts.setup(sgd(0.1), make_params()), "head/**")

    def body(state, rate):
        state, _ = STEP(ts.adjust(state, "head/**", learning_rate=rate), batch(0))
        return state, ts.hyperparams(state)["learning_rate@head/**"]

    rates = jnp.array([0.1, 0.2, 0.3])
    scanned, seen = jax.lax.scan(body, state, rates)
    np.testing.assert_array_equal(seen, rates)
    for rate in (0.1, 0.2, 0.3):
        state, _ = STEP(ts.adjust(state, "head/**", learning_rate=rate), batch(0))
    assert_trees_close(scanned.params, state.params, rtol=1e-6, atol=1e-7)


def test_a_population_takes_one_value_per_member():
    many = jax.vmap(lambda r: ts.setup(sgd(r), make_params()))(jnp.array([0.1, 0.2]))
    many = ts.adjust(many, learning_rate=jnp.array([0.3, 0.4]))
    np.testing.assert_allclose(many.numbers.named(None)["learning_rate"], [0.3, 0.4], rtol=1e-6)


def test_a_cut_state_is_rebuilt_in_a_new_process_from_its_arrays():
    def fresh():
        return ts.adjust(ts.setup(chain(clip_global_norm(1.0), adam(1e-2)), make_params()), "body/**")

    state = run(ts.adjust(fresh(), "body/**", learning_rate=0.2), 3)
    arrays = [np.asarray(x) for x in jax.tree.leaves(state)]  # what a checkpoint holds
    restored = jax.tree.unflatten(jax.tree.structure(fresh()), map(jnp.asarray, arrays))
    assert_trees_equal(run(restored, 3, first=3), run(state, 3, first=3))


# ------------------------------------------------------------------------------------------------- freeze, thaw


FREEZABLE = {
    **CUTTABLE,
    "sgd momentum": lambda: sgd(0.1, momentum=0.9),
    "lion": lambda: ts.rules.lion(1e-2),
    "groups": lambda: groups({"body/**": adamw(1e-2), "**": sgd(0.1, momentum=0.9)}),
    "plain adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "plain chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}


def of_leaf(state, name):
    """Every array of the optimizer state that has this leaf's shape: its moments."""
    shape = dict((("/".join(("body", k)), v.shape) for k, v in state.params["body"].items()))[name]
    return [x for x in jax.tree.leaves(state.opt_state) if x.shape == shape]


@pytest.mark.parametrize("name", FREEZABLE)
def test_frozen_leaves_and_their_moments_stay_to_the_bit(name):
    rule = FREEZABLE[name]()
    rule = rule.gradient_transformation() if isinstance(rule, optax.MultiSteps) else rule
    before = run(ts.setup(rule, make_params()), 3)
    after = run(ts.freeze(before, "body/**"), 4, first=3)
    assert_trees_equal(after.params["body"], before.params["body"])
    for leaf in ("body/w", "body/b"):
        assert_trees_equal(of_leaf(after, leaf), of_leaf(before, leaf))
    assert not np.array_equal(after.params["head"]["w"], before.params["head"]["w"])
    thawed = run(ts.thaw(after), 1, first=7)
    assert not np.array_equal(thawed.params["body"]["w"], before.params["body"]["w"])


def test_the_others_train_as_if_the_frozen_were_constants():
    frozen = run(ts.freeze(ts.setup(sgd(0.1), make_params()), "body/**"), 5)
    closed = run(ts.setup(sgd(0.1), make_params(), trainable="head/**"), 5)
    assert_trees_close(frozen.params, closed.params, rtol=1e-6, atol=1e-7)


def test_clipping_and_norms_are_over_what_is_not_frozen():
    state = ts.freeze(ts.setup(chain(clip_global_norm(0.01), sgd(1.0)), make_params()), "body/**")
    grads = jax.grad(loss_fn)(make_params(), batch(0))["head"]
    norm = optax.tree.norm(grads)
    after, info = STEP(state, batch(0))
    np.testing.assert_allclose(info.grad_norm, norm, rtol=1e-5)
    expected = jax.tree.map(lambda p, g: p - g / norm * 0.01, make_params()["head"], grads)
    assert_trees_close(after.params["head"], expected, rtol=1e-5, atol=1e-7)


def test_everything_may_be_frozen():
    state = ts.freeze(ts.setup(adamw(0.1), make_params()), "**")
    after = run(state, 3)
    assert_trees_equal(after.params, state.params)
    assert int(after.step) == 3


def test_the_first_freeze_compiles_once_and_no_later_one_does():
    draw, patterns = random.Random(1), ["body/**", "**/b", "head/w", "**", ["**", "!head/**"]]
    state = run(ts.setup(adam(1e-3), make_params()), 1)
    assert state.frozen is None
    with count_compiles() as seen:
        state = run(ts.freeze(state, "body/w"), 2)
    assert step_compiles(seen) == 1
    with count_compiles() as seen:
        for i in range(100):
            state = run((ts.freeze if i % 2 else ts.thaw)(state, draw.choice(patterns)), 1)
    assert step_compiles(seen) == 0


def test_a_freezable_setup_never_compiles_again():
    state = run(ts.setup(adam(1e-3), make_params(), freezable=True), 1)
    with count_compiles() as seen:
        state = run(ts.freeze(state, "body/**"), 1)
        state = run(ts.thaw(state), 1)
    assert step_compiles(seen) == 0


def test_freeze_and_thaw_inside_scan_and_vmap():
    state = ts.setup(sgd(0.1), make_params(), freezable=True)

    def body(state, i):
        state = jax.lax.cond(i < 2, lambda s: ts.freeze(s, "body/**"), lambda s: ts.thaw(s), state)
        state, _ = STEP(state, batch(0))
        return state, state.params["body"]["b"][0]

    _, seen = jax.lax.scan(body, state, jnp.arange(4))
    assert seen[0] == seen[1] == make_params()["body"]["b"][0] and seen[2] != seen[1] != seen[3]
    many = jax.vmap(lambda r: ts.freeze(ts.setup(sgd(r), make_params()), "body/**"))(jnp.array([0.1, 0.2]))
    assert many.frozen.shape == (2, 1)


def test_unselected_leaves_cannot_be_thawed():
    state = ts.setup(adam(1e-3), make_params(), trainable="head/**")
    with pytest.raises(PatternError, match=r"params\['body'\].*migrate"):
        ts.thaw(state, "body/**")
    frozen = run(ts.freeze(state, "head/w"), 2)
    assert_trees_equal(frozen.params["head"]["w"], state.params["head"]["w"])
    assert_trees_equal(ts.thaw(frozen).frozen, jnp.zeros(1, jnp.uint32))


def test_more_than_one_word_of_leaves():
    params = {f"p{i:02}": jnp.ones(1) for i in range(70)}
    names = ["p00", "p31", "p32", "p63", "p64", "p69"]
    state = ts.freeze(ts.setup(sgd(0.5), params), names)
    after, _ = ts.train_step(lambda p, x: sum(jnp.sum(v) for v in p.values()))(state, None)
    assert {k for k, v in after.params.items() if float(v[0]) == 1.0} == set(names)
