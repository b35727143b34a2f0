"""Bounds of updates: whatever finite gradients come, no step makes params that are not finite."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tsunax._step.updating import certainty_of, rule_call
from tsunax.rules.optimizers import CONTRIB, OPTAX

# The rules whose steps loss and gradient alone judge, with the defaults of their numbers.
DECLARED = (
    "adabelief adagrad adam adamax adamaxw adamw amsgrad lion nadam nadamw rmsprop sgd sign_sgd signum "
    "flux_adamw flux_amsgrad flux_momentum"
).split()
MORE = {"sgd": {"momentum": 0.9}, "rmsprop": {"momentum": 0.9}, "signum": {}}
SIZES = [0.0, 1e-45, 1e-38, 1e-30, 1e-22, 1e-19, 1e-8, 1.0, 1e10, 1e18]
STARTS = [0, 1, -1, 1e10, 1e30, -3e38]
STEPS = 24


def rule_of(name, **numbers):
    make, known = getattr(ts.rules, name), getattr(ts.rules, name).__signature__.parameters
    rate = {"learning_rate": 1e-2} if "learning_rate" in known else {}
    return make(**{**rate, **MORE.get(name, {}), **numbers})


def plain_rule_of(name):
    return getattr(optax, name)(1e-2, **MORE.get(name, {})) if hasattr(optax, name) else None


def is_certain(rule, params):
    """Whether it is certain that updates are finite, or the reason why nobody knows."""
    found, reason, _ = certainty_of(ts.setup(rule, params), params, None)
    return reason or bool(found)


def draws(seed, dtype, n=64):
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1, 1], (STEPS, n))
    # long runs of one size, and changes of all sizes
    sizes = np.where(rng.uniform(size=(1, n)) < 0.3, rng.choice(SIZES, (1, n)), rng.choice(SIZES, (STEPS, n)))
    most = float(jnp.finfo(dtype).max)
    return jnp.asarray(signs * sizes, dtype), jnp.asarray(np.resize([*STARTS, most, -most], n), dtype)


def ends(rule, grads, start):
    """Whether the params were finite at each step, and whether all steps were applied."""
    state = ts.setup(rule, {"w": start})

    def one(state, g):
        new, info = ts.update(state, {"w": g}, loss=jnp.float32(1.0))
        return new, (jnp.isfinite(new.params["w"]).all(), info.applied)

    return jax.jit(lambda s, g: jax.tree.map(jnp.all, jax.lax.scan(one, s, g)[1]))(state, grads)


@pytest.mark.parametrize("name", DECLARED)
def test_declared_rules_are_certain(name):
    params = {"w": jnp.ones(3)}
    assert is_certain(rule_of(name), params) is True
    if (plain := plain_rule_of(name)) is not None:
        assert is_certain(plain, params) is True


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.medium)])
@pytest.mark.parametrize("name", DECLARED)
def test_declared_rules_keep_params_finite(name, dtype):
    grads, start = draws(len(name), dtype)
    finite, applied = ends(rule_of(name), grads, start)
    assert finite and applied


VALUES = [0.0, 1e-45, 1e-30, 1e-16, 1e-8, 1e-3, 0.1, 0.9, 0.999, 0.9999999, 1.0, 10.0, 1e10, 1e30]


@pytest.mark.medium
@pytest.mark.parametrize("name", DECLARED)
def test_with_any_numbers_params_stay_finite_whoever_judges(name):
    """Numbers that the bounds do not allow change who judges: no step of any of them reaches the params."""
    grads, start = draws(1, "float32")
    state, rng, applied = ts.setup(rule_of(name), {"w": start}), np.random.default_rng(0), 0

    def one(state, g):
        new, info = ts.update(state, {"w": g}, loss=jnp.float32(1.0))
        return new, (jnp.isfinite(new.params["w"]).all(), info.applied)

    run = jax.jit(lambda s, g: jax.lax.scan(one, s, g))
    for _ in range(60):
        new = state
        for number in ts.hyperparams(state):
            try:
                new = ts.adjust(new, **{number: float(rng.choice(VALUES))})
            except ts.errors.HyperparameterError:
                continue
        _, (finite, moved) = run(new, grads)
        assert np.asarray(finite).all(), ts.hyperparams(new)
        applied += np.asarray(moved).sum()
    assert applied > 0


NEED_MORE = {"galore", "lbfgs", "noisy_sgd", "optimistic_adam", "sophia"}  # other leaves, functions, a key; deprecated
OTHERS = sorted({*OPTAX, *CONTRIB} - {*DECLARED} - NEED_MORE)


@pytest.mark.medium
@pytest.mark.parametrize("name", OTHERS)
def test_rules_without_bounds_are_judged_by_their_update(name):
    grads, start = draws(2, "float32", 16)
    rule = rule_of(name)
    state = ts.setup(rule, {"w": start.reshape(4, 4)})
    assert certainty_of(state, {"w": start.reshape(4, 4)}, None)[0] is None
    finite = []
    step = jax.jit(lambda s, g: ts.update(s, {"w": g}, loss=jnp.float32(1.0))[0])
    for g in grads[:8].reshape(-1, 4, 4):
        state = step(state, g)
        finite.append(bool(jnp.isfinite(state.params["w"]).all()))
    assert all(finite)


# What is made of declared rules is declared, and of others not.
PAIRS = {
    "clipped": lambda rule: ts.rules.chain(ts.rules.clip_by_global_norm(1.0), rule),
    "clamped": lambda rule: ts.rules.chain(ts.rules.clip(1.0), rule),
    "spikes": lambda rule: ts.rules.chain(ts.rules.reject_spikes(), rule),
    "decayed before": lambda rule: ts.rules.chain(ts.rules.add_decayed_weights(1e-4), rule),
    "partition": lambda rule: ts.rules.partition({"w": rule, "**": ts.rules.sgd(0.1)}),
    "accumulate": lambda rule: ts.rules.accumulate(rule, 2),
    "skip zero": ts.rules.skip_zero,
    "optax.chain": lambda rule: optax.chain(optax.clip_by_global_norm(1.0), rule),
}
INNER = {"adam": ts.rules.adam(1e-3), "optax.adam": optax.adam(1e-3), "lamb": ts.rules.lamb(1e-3)}
SCHEDULED = optax.adamw(optax.cosine_decay_schedule(1e-3, 10), mask={"w": True, "v": False})


@pytest.mark.parametrize(("around", "inner"), list(itertools.product(PAIRS, INNER)))
def test_compositions_derive_it(around, inner):
    params = {"w": jnp.ones(3), "v": jnp.ones(2)}
    found = is_certain(PAIRS[around](INNER[inner]), params)
    assert found == "scale_by_trust_ratio may make an infinite update of a finite gradient" or inner != "lamb"
    assert found is True or inner == "lamb"


def test_schedules_masks_and_what_is_not_certain():
    params = {"w": jnp.ones(3), "v": jnp.ones(2)}
    assert is_certain(SCHEDULED, params) is True
    assert is_certain(optax.adam(1e-3, eps=0.0), params) == "its numbers, such as an eps of 0"
    assert is_certain(ts.rules.adam(1e-3, eps=0.0), params) is False
    assert is_certain(ts.rules.adamw(10.0, weight_decay=1.0), params) is False  # |1 - 10| p may overflow
    assert "float16" in is_certain(ts.rules.adam(1e-3), {"w": jnp.ones(3, jnp.float16)})
    own = optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, s))
    assert "may make an infinite update" in is_certain(own, params)
    signs = optax.scale_by_sign()
    around = functools.wraps(signs.update)(lambda g, s, p=None: signs.update(g, s, p))
    assert "may make an infinite update" in is_certain(optax.GradientTransformation(signs.init, around), params)
    assert is_certain(signs, params) is True
    assert is_certain(optax.sgd(np.float32(0.1)), params) is True


ONES = np.ones(3, np.float32)


def rule_with_an_empty_cell(scales):
    if scales:
        scale = 2.0
    update = lambda g, s, p=None: (jax.tree.map(lambda x: -x * (scale if scales else 0.1), g), s)
    return optax.GradientTransformation(lambda p: (), update)


@pytest.mark.parametrize(
    "rule",
    [
        optax.scale(-0.1 * ONES),
        optax.scale(-0.1 * jnp.asarray(ONES)),
        optax.scale_by_schedule(lambda count: -0.1 * jnp.asarray(ONES)),
        optax.chain(optax.add_decayed_weights(0.0 * ONES), optax.sgd(0.1)),
        rule_with_an_empty_cell(False),
    ],
)
def test_any_rule_of_optax_steps_whatever_its_closures_hold(rule):
    """One number for each column, as an array, and a variable that is not assigned."""
    state = ts.setup(rule, {"w": ONES})
    state, info = ts.train_step(lambda p, x: jnp.sum(p["w"] * x))(state, ONES)
    assert bool(info.applied)
    np.testing.assert_allclose(state.params["w"], 0.9, rtol=1e-6)


POISONS = {
    "0 · inf of a square": (optax.chain(optax.scale(10.0), optax.adam(0.1, b2=0.0)), 1e19),
    "0 · inf under rmsprop": (optax.chain(optax.scale(10.0), optax.rmsprop(0.1, decay=0.0)), 1e19),
    "0 / 0, flushed": (
        optax.chain(optax.scale_by_sign(), optax.scale_by_belief(eps=1e-38, eps_root=1e-38), optax.scale(-0.1)),
        0.0,
    ),
}


@pytest.mark.parametrize("name", POISONS)
def test_infinite_squares_and_flushed_numbers_are_judged_by_the_update(name):
    rule, first = POISONS[name]
    state, update = ts.setup(rule, {"w": jnp.ones(2)}), jax.jit(lambda s, g: ts.update(s, {"w": g})[0])
    for g in ([first, 1.0], [1.0, 1.0], [1.0, 1.0]):
        state = update(state, jnp.array(g))
        assert np.isfinite(state.params["w"]).all()


@pytest.mark.parametrize("eps", [0.0, 1e-30])
def test_numbers_of_numpy_that_are_out_of_bounds_warn_of_nothing(eps):
    assert "eps" in is_certain(optax.adam(1e-3, eps=np.float32(eps)), {"w": jnp.ones(3)})


def test_a_look_at_float64_updates_knows_their_range():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        state = ts.setup(ts.rules.adam(1e150, eps=1e-300), {"w": jnp.ones(3, np.float64)})
        new, info = jax.jit(ts.update)(state, {"w": jnp.ones(3, np.float64)})
        assert bool(info.applied) and float(new.params["w"][0]) < -1e149


def test_float16_params_that_would_overflow_are_rejected():
    state = ts.setup(ts.rules.sgd(1.0), {"w": jnp.full(2, 65504.0, jnp.float16)})
    for update in (ts.update, jax.jit(ts.update)):
        after, info = update(state, {"w": jnp.full(2, -64.0, jnp.float16)})
        assert not bool(info.applied) and bool(jnp.isfinite(after.params["w"]).all())


def test_an_update_of_half_the_last_distance_may_be_infinite():
    """The largest float32 plus 2^103 is a tie, which rounds to infinity."""
    params = {"w": jnp.full(3, jnp.finfo(jnp.float32).max)}
    assert np.isinf(params["w"] + jnp.float32(2.0**103)).all()
    of_size = lambda size: optax.chain(optax.scale_by_sign(), optax.scale(size))
    assert is_certain(of_size(2.0**103), params) is not True
    below = np.nextafter(np.float32(2.0**103), np.float32(0))
    assert np.isfinite(params["w"] + below).all() and is_certain(of_size(float(below)), params) is True


def test_smooth_signs_of_complex_numbers_have_no_bound():
    """|tanh| is below one on the real axis alone: it has a pole at i π / 2."""
    lion = lambda mode: optax.chain(optax.scale_by_lion(mode=mode, smooth_beta=1.0), optax.scale(-1e-3))
    real, complex_params = {"w": jnp.ones(3)}, {"w": jnp.ones(3, jnp.complex64)}
    assert is_certain(lion("smooth"), real) is True
    assert is_certain(lion("hard"), complex_params) is True
    assert "may make an infinite update" in is_certain(lion("smooth"), complex_params)


class NotOfOurs:
    """A user's update, which happens to have a method of that name."""

    def __call__(self, grads, state, params=None):
        return jax.tree.map(lambda g: g * 1e30, grads), state

    def bounded(self, survey, state, bounds):
        return [(0.0, 0.0)]


def test_a_method_of_a_user_says_nothing_about_bounds():
    rule = optax.GradientTransformation(lambda params: (), NotOfOurs())
    assert "may make an infinite update" in is_certain(rule, {"w": jnp.ones(3)})


# A look at the updates of rules that work by element runs them on all small leaves in one vector.
TREE = {"a": jnp.array([1.0, -2.0, 3.0]), "b": {"c": jnp.full((2, 2), 0.5)}}
CLIPPED = ts.rules.chain(ts.rules.clip_by_global_norm(1.0), ts.rules.adam(1e-3))


@pytest.mark.parametrize("name", [*DECLARED, "clipped"])
def test_rules_by_element_make_the_same_update_of_joined_leaves(name):
    @jax.jit
    def updates(state, grads):
        state, _ = ts.update(state, grads)
        assert certainty_of(state, grads, None).by_element
        call = rule_call(state, grads, None, None, None, {})
        short_call = call.with_joined_leaves()
        assert len(jax.tree.leaves(short_call.params)) == 1
        return call()[0], short_call()[0]

    grads = jax.tree.map(lambda p: 0.3 * p + 0.1, TREE)
    by_leaf, (joined,) = updates(ts.setup(CLIPPED if name == "clipped" else rule_of(name), TREE), grads)
    expected = np.concatenate([np.ravel(x) for x in jax.tree.leaves(by_leaf)])
    np.testing.assert_allclose(joined, expected, rtol=1e-5)


BY_NAME = {
    "partition": ts.rules.partition({"a": ts.rules.adam(1e-3), "**": ts.rules.sgd(0.1)}),
    "pattern": ts.rules.chain(ts.rules.add_decayed_weights(1e-4, ["**", "!a"]), ts.rules.adam(1e-3)),
    "mask": ts.rules.adamw(1e-3, mask={"a": True, "b": False}),
}


@pytest.mark.parametrize("name", [*BY_NAME, "numbers of a subtree", "frozen"])
def test_rules_that_read_names_of_leaves_are_looked_at_leaf_by_leaf(name):
    state = ts.setup(BY_NAME.get(name, ts.rules.adam(1e-3)), TREE)
    if name == "numbers of a subtree":
        state = ts.adjust(state, "a", learning_rate=1e-4)
    if name == "frozen":
        state = ts.freeze(state, "a")
    found = []
    jax.eval_shape(lambda state: found.append(certainty_of(state, TREE, None)), state)
    assert found[0].is_certain is not None and not found[0].by_element


def test_an_infinite_update_of_one_of_the_joined_leaves_rejects_the_step():
    state, update = ts.setup(ts.rules.adam(0.1, eps=0.0), TREE), jax.jit(ts.update)
    grads = {"a": jnp.ones(3), "b": {"c": jnp.array([[1.0, 0.0], [1.0, 1.0]])}}  # 0/0 of the zero
    after, info = update(state, grads)
    assert not bool(info.applied) and int(after.rejected) == 1
    jax.tree.map(np.testing.assert_array_equal, after.params, TREE)
    after, info = update(state, jax.tree.map(jnp.ones_like, TREE))
    assert bool(info.applied) and float(after.params["a"][0]) == pytest.approx(0.9)
