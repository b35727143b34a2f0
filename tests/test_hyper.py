"""Changing a run while it runs: hyperparams and adjust, freeze and thaw.

Expected values come from closed forms (SGD on a given gradient moves a leaf by its rate), from plain optax, and
from runs that were set up so from the start. Compilations are counted at the compiler.
"""

import functools
import os
import re
import subprocess
import sys

import hypothesis
import hypothesis.strategies as some
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests import test_rules
from tests.helpers import assert_trees_close, assert_trees_equal, count_compiles, medium_if
from tsunax import rules
from tsunax.errors import RuleError, WrongTypeError

RNG = np.random.default_rng(0)
PARAMS = {
    "encoder": {"w": RNG.normal(size=(3, 4)).astype(np.float32), "b": np.full(4, 0.5, np.float32)},
    "head": {"w": RNG.normal(size=(4, 2)).astype(np.float32), "b": np.full(2, -0.5, np.float32)},
}
ONES = jax.tree.map(np.ones_like, PARAMS)
BATCHES = [(RNG.normal(size=(8, 3)).astype(np.float32), RNG.normal(size=(8, 2)).astype(np.float32)) for _ in range(10)]


def loss_fn(params, batch):
    x, y = batch
    h = jnp.tanh(x @ params["encoder"]["w"] + params["encoder"]["b"][None])
    return jnp.mean((h @ params["head"]["w"] + params["head"]["b"][None] - y) ** 2)


# One for all tests: what they compile of it is what they need of it. It keeps the states that it is given.
STEP = ts.train_step(loss_fn, donate=False)


# The same without LLVM's freedom to contract a·b + c, which it takes otherwise in otherwise equal programs.
def compiled_with(**options):
    return functools.partial(jax.jit(STEP.pure, compiler_options=options), extra={})


EXACT = compiled_with(xla_backend_optimization_level=0)

# And without XLA's, which turns the division by what only one leaf divides by into a product.
AS_WRITTEN = compiled_with(xla_backend_optimization_level=0, xla_disable_hlo_passes="algsimp")


def train(state, batches=BATCHES[:3], step=STEP):
    for batch in batches:
        state, _ = step(state, batch)
    return state


def steps_compiled(c) -> int:
    return c.compiled.count("train_step")


def rates(state):
    """The rate of each leaf under SGD: how far a gradient of one moves it."""
    after, _ = ts.update(state, ONES)
    return jax.tree.map(lambda old, new: np.round(np.float64(old) - np.float64(new), 5), state.params, after.params)


def rates_of(**by_leaf):
    """`rates_of(ew=1, eb=2, hw=3, hb=4)` in the structure of PARAMS."""
    at = {k: float(v) for k, v in by_leaf.items()}
    tree = {"encoder": {"w": at["ew"], "b": at["eb"]}, "head": {"w": at["hw"], "b": at["hb"]}}
    return jax.tree.map(lambda rate, p: np.full(p.shape, rate), tree, PARAMS)


def select(tree, text):
    """The leaves with `text` in their path."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in found if text in jax.tree_util.keystr(path)}


def moved(before, after) -> bool:
    return any(np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(before.values(), after.values(), strict=True))


# -------------------------------------------------------------------------------------------------------- hyperparams


@pytest.mark.parametrize(
    "rule, names",
    [
        (rules.sgd(0.1, momentum=0.9), {"learning_rate": 0.1, "momentum": 0.9}),
        (
            rules.chain(rules.clip_by_global_norm(2.0), rules.add_decayed_weights(0.1), rules.sgd(0.3)),
            {"max_norm": 2.0, "weight_decay": 0.1, "learning_rate": 0.3},
        ),
        (rules.chain(rules.sgd(0.1), rules.sgd(0.2)), {"0.learning_rate": 0.1, "1.learning_rate": 0.2}),
        (
            rules.chain(rules.clip(1.0), rules.chain(rules.clip(2.0), rules.sgd(0.2))),
            {"0.max_delta": 1.0, "1.0.max_delta": 2.0, "learning_rate": 0.2},
        ),
        (
            rules.partition({"head/**": rules.sgd(0.1), "**": rules.sgd(0.2, momentum=0.8)}),
            {"learning_rate@head/**": 0.1, "learning_rate@**": 0.2, "momentum": 0.8},
        ),
        (
            rules.partition({"head/**": rules.chain(rules.clip(1.0), rules.clip(2.0)), "**": rules.clip(3.0)}),
            {"0.max_delta@head/**": 1.0, "1.max_delta@head/**": 2.0, "max_delta@**": 3.0},
        ),
        (optax.chain(optax.clip(1.0), rules.sgd(0.1)), {"learning_rate": 0.1}),
        (optax.adam(1e-3), {}),
        (
            rules.adam(1e-3, b2=0.999, eps=1e-8),
            {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "eps_root": 0},
        ),
    ],
)
def test_every_number_has_one_flat_name(rule, names):
    got = ts.hyperparams(ts.setup(rule, PARAMS))
    assert got == names
    assert all(type(value) is float for value in got.values())


def test_a_cut_subtree_has_names_of_its_own():
    state = ts.adjust(ts.setup(rules.sgd(0.1, momentum=0.9), PARAMS), "head/**", learning_rate=0.5)
    assert ts.hyperparams(state) == {
        **{"learning_rate": 0.1, "momentum": 0.9},
        **{"learning_rate@head/**": 0.5, "momentum@head/**": 0.9},
    }


def test_a_cut_in_a_group_has_both_patterns():
    rule = rules.partition({"head/**": rules.sgd(0.1), "**": rules.sgd(0.2)})
    state = ts.adjust(ts.setup(rule, PARAMS), "**/b", learning_rate=0.5)
    assert ts.hyperparams(state) == {
        **{"learning_rate@head/**": 0.1, "learning_rate@head/**@**/b": 0.5},
        **{"learning_rate@**": 0.2, "learning_rate@**@**/b": 0.5},
    }


@jax.tree_util.register_pytree_node_class
class Pair:
    """A state without named fields, as users write them."""

    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)


def _pair(a, b):
    def update(updates, state, params=None, **extra):
        updates, one = a.update(updates, state.parts[0], params, **extra)
        updates, two = b.update(updates, state.parts[1], params, **extra)
        return updates, Pair(one, two)

    return optax.GradientTransformationExtraArgs(lambda p: Pair(a.init(p), b.init(p)), update)


def _around(rule, learning_rate):
    """A rule of the same state as the one that it scales."""
    return optax.GradientTransformationExtraArgs(
        rule.init,
        lambda u, s, p=None, **extra: rule.update(jax.tree.map(lambda x: learning_rate * x, u), s, p, **extra),
    )


@pytest.mark.parametrize(
    "rule, before, cut",
    [
        (
            rules.chain(rules.add_decayed_weights(0.1), rules.clip(2.0), rules.add_decayed_weights(0.3)),
            ["0.weight_decay", "max_delta", "2.weight_decay"],
            ["0.weight_decay@head/**", "max_delta@head/**", "2.weight_decay@head/**"],
        ),
        (
            rules.partition({"head/**": rules.sgd(0.1), "**": rules.sgd(0.2, momentum=0.5)}),
            ["learning_rate@**", "momentum", "learning_rate@head/**"],
            [],
        ),
        (
            rules.chain(rules.sgd(0.1), rules.partition({"head/**": rules.sgd(0.2), "**": rules.sgd(0.3)})),
            ["learning_rate", "learning_rate@**", "learning_rate@head/**"],
            ["learning_rate@head/**'"],
        ),
        (_pair(rules.sgd(0.1), rules.sgd(0.2)), ["0.learning_rate", "1.learning_rate"], None),
        (rules.live(_around)(rules.sgd(0.1), 0.2), ["learning_rate", "inner.learning_rate"], None),
    ],
    ids=["chain", "groups", "chain of groups", "no names", "one in the other"],
)
def test_no_two_numbers_have_one_name_and_no_cut_renames_one(rule, before, cut):
    state = ts.setup(rule, PARAMS)
    values = [(i + 1) / 8 for i in range(len(before))]
    state = ts.adjust(state, **dict(zip(before, values, strict=True)))
    assert ts.hyperparams(state) == dict(zip(before, values, strict=True))
    after = ts.hyperparams(ts.adjust(state, "head/**"))
    assert {name: after[name] for name in before} == ts.hyperparams(state)
    expected = [f"{name}@head/**" for name in before] if cut is None else cut
    assert sorted(after) == sorted([*before, *expected])


def test_a_cut_of_one_of_two_rules_keeps_its_place_in_the_name():
    state = ts.setup(
        rules.chain(rules.add_decayed_weights(0.1), rules.add_decayed_weights(0.2), rules.sgd(1.0)), PARAMS
    )
    state = ts.adjust(state, "head/**", **{"1.weight_decay": 0.3})
    decays = {"0.weight_decay": 0.1, "1.weight_decay": 0.2, "1.weight_decay@head/**": 0.3}
    assert ts.hyperparams(state) == decays | {"learning_rate": 1.0}


@hypothesis.given(some.integers(1, 10**6), some.integers(-12, 3))
def test_a_number_of_six_digits_reads_as_it_was_given(digits, exponent):
    given = float(f"{digits}e{exponent - 6}")
    state = ts.adjust(_SGD, learning_rate=given)
    assert ts.hyperparams(state)["learning_rate"] == given


_SGD = ts.setup(rules.sgd(0.1), {"w": np.ones(1, np.float32)})


@pytest.mark.parametrize("b2", [0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999, 1 - 2.0**-20, 0.0, 0.5])
def test_a_number_near_one_reads_as_it_was_given(b2):
    """f32(0.999999) is 0.99999899, and could be so many; its complement says which."""
    assert ts.hyperparams(ts.setup(rules.adam(1e-3, b2=b2), PARAMS))["b2"] == b2
    assert ts.hyperparams(ts.adjust(ts.setup(rules.adam(1e-3), PARAMS), b2=b2))["b2"] == b2


def test_a_scheduled_number_reads_as_the_next_step_will_have_it():
    state = ts.setup(rules.sgd(optax.linear_schedule(1.0, 0.0, 10), momentum=0.5), PARAMS)
    for i in range(4):
        assert ts.hyperparams(state) == pytest.approx({"learning_rate": 1 - i / 10, "momentum": 0.5}, rel=1e-6)
        state, info = STEP(state, BATCHES[0])
        assert info.hyperparams["learning_rate"] == pytest.approx(1 - i / 10, rel=1e-6)


def test_under_tracing_they_are_arrays():
    state = ts.setup(rules.sgd(optax.linear_schedule(1.0, 0.0, 10)), PARAMS)
    assert jax.jit(lambda s: ts.hyperparams(s)["learning_rate"])(state) == 1.0


def _hands_nothing_on(rule):
    return optax.GradientTransformation(rule.init, lambda u, s, p: rule.update(u, s, p))


OWN_COUNT = {
    "multi_steps": lambda rule: optax.MultiSteps(rule, 2).gradient_transformation(),
    "of a user": _hands_nothing_on,
    "in a chain": lambda rule: rules.chain(rules.clip(9.0), _hands_nothing_on(rule)),
    "in a group": lambda rule: rules.partition({"**": _hands_nothing_on(rule)}),
    "twice": lambda rule: _hands_nothing_on(rules.chain(rule, rules.clip(9.0))),
}


@pytest.mark.parametrize("name", OWN_COUNT)
def test_a_schedule_that_the_step_does_not_reach_reads_as_the_next_update_will_have_it(name):
    """By what it does: a gradient of one moves a leaf by the rate."""
    every, update = 2 if name == "multi_steps" else 1, jax.jit(ts.update)
    state = ts.setup(OWN_COUNT[name](rules.sgd(optax.linear_schedule(1.0, 0.0, 10))), PARAMS).replace(step=5)
    for i in range(4):
        says = ts.hyperparams(state)["learning_rate"]
        before = state
        for _ in range(every):
            state, info = update(state, ONES)
        moved_by = before.params["head"]["b"][0] - state.params["head"]["b"][0]
        np.testing.assert_allclose([says, moved_by], [1 - i / 10] * 2, rtol=1e-6)
        assert "learning_rate" not in info.hyperparams  # its count is in no info
    state = ts.adjust(state, "head/**", learning_rate=0.25)
    assert [v for k, v in ts.hyperparams(state).items() if "rate" in k] == pytest.approx([0.6, 0.25])


@pytest.mark.parametrize(
    "wrap", [optax.chain, pytest.param(lambda rule: optax.apply_if_finite(rule, 3), marks=pytest.mark.medium)]
)
def test_a_schedule_in_a_wrapper_that_hands_the_step_on_is_read_there(wrap):
    state = ts.setup(wrap(rules.sgd(optax.linear_schedule(1.0, 0.0, 10))), PARAMS).replace(step=5)
    assert ts.hyperparams(state) == {"learning_rate": 0.5}
    assert ts.update(state, ONES)[1].hyperparams == {"learning_rate": 0.5}
    state = ts.setup(rules.adam(optax.linear_schedule(1.0, 0.0, 10)), PARAMS).replace(step=5)
    assert ts.hyperparams(state)["learning_rate"] == 0.5


# ------------------------------------------------------------------------------------------------------------- adjust

KINDS = {
    "float": lambda v: float(v),
    "int": lambda v: int(v),
    "np.float32": np.float32,
    "np.float64": np.float64,
    "np.int64": np.int64,
    "np.float16": np.float16,
    "0-d numpy": lambda v: np.array(v, np.float32),
    "weak jax": lambda v: jnp.asarray(float(v)),
    "jax": jnp.float32,
    "jax int": jnp.int32,
    "jax bfloat16": jnp.bfloat16,
}


@pytest.mark.parametrize("where", ["**", "head/**"])
def test_whatever_kind_of_number_is_given_it_is_the_same_and_compiles_nothing(where):
    state = ts.setup(rules.sgd(0.25, momentum=0.5), PARAMS)
    expected = train(ts.adjust(state, where, learning_rate=2.0))
    with count_compiles() as c:
        for kind in KINDS.values():
            assert_trees_equal(train(ts.adjust(state, where, learning_rate=kind(2))), expected)
    assert steps_compiled(c) == 0
    if where == "**":  # a cut is made of host work and a few copies, too; a second one of the kind compiles nothing
        with count_compiles() as c:
            for kind in (float, int, np.float32):
                ts.adjust(state, learning_rate=kind(2))
        assert c.compiles == 0


def test_the_whole_tree_and_subtrees_move_by_their_rates():
    state = ts.setup(rules.sgd(1.0), PARAMS)
    assert_trees_equal(rates(state), rates_of(ew=1, eb=1, hw=1, hb=1))
    state = ts.adjust(state, learning_rate=2.0)
    assert_trees_equal(rates(state), rates_of(ew=2, eb=2, hw=2, hb=2))
    state = ts.adjust(state, "head/**", learning_rate=3.0)
    assert_trees_equal(rates(state), rates_of(ew=2, eb=2, hw=3, hb=3))
    state = ts.adjust(state, "**/b", learning_rate=4.0)  # overlaps
    assert_trees_equal(rates(state), rates_of(ew=2, eb=4, hw=3, hb=4))
    state = ts.adjust(state, "head/**", learning_rate=5.0)  # holds both parts of it
    assert_trees_equal(rates(state), rates_of(ew=2, eb=4, hw=5, hb=5))
    state = ts.adjust(state, "encoder/w", learning_rate=6.0)  # within
    assert_trees_equal(rates(state), rates_of(ew=6, eb=4, hw=5, hb=5))
    state = ts.adjust(state, learning_rate=7.0)
    assert_trees_equal(rates(state), rates_of(ew=7, eb=7, hw=7, hb=7))


LEAVES = {"ew": "encoder/w", "eb": "encoder/b", "hw": "head/w", "hb": "head/b"}
PATTERNS = {
    "**": "ew eb hw hb",
    "encoder/**": "ew eb",
    "head/**": "hw hb",
    "**/w": "ew hw",
    "**/b": "eb hb",
    "head/w": "hw",
    ("**", "!encoder/w"): "eb hw hb",
}


@pytest.mark.parametrize("name", ["whole", "groups"])
@hypothesis.settings(max_examples=25)
@hypothesis.given(
    some.lists(some.tuples(some.sampled_from(list(PATTERNS)), some.integers(1, 9)), min_size=1, max_size=6)
)
def test_the_last_adjust_of_a_leaf_wins_however_cuts_overlap(name, adjusts):
    rule = {"whole": rules.sgd(0.5), "groups": rules.partition({"head/**": rules.sgd(0.5), "**": rules.sgd(0.5)})}[name]
    state, expected = ts.setup(rule, PARAMS), dict.fromkeys(LEAVES, 0.5)
    for where, rate in adjusts:
        state = ts.adjust(state, list(where) if isinstance(where, tuple) else where, learning_rate=rate)
        expected |= dict.fromkeys(PATTERNS[where].split(), rate)
    assert_trees_equal(rates(state), rates_of(**expected))
    names = ts.hyperparams(state)
    assert set(names.values()) >= set(map(float, expected.values()))
    assert_trees_equal(rates(ts.adjust(state, **names)), rates_of(**expected))


@pytest.mark.medium
@pytest.mark.several_devices
def test_a_state_on_a_mesh_is_adjusted_where_it_is():
    """The axes that `jax.make_mesh` gives are explicit from jax 0.9 on."""
    mesh = jax.make_mesh((4,), ("data",))
    whole, parts = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*p)) for p in ((), ("data",)))
    state = ts.setup(rules.sgd(0.25), jax.device_put(PARAMS, whole))
    for where in ("**", "head/**", "encoder/**"):
        state = ts.adjust(state, where, learning_rate=2.0)
        assert state.numbers.values.sharding == whole and state.numbers.values.committed
    state = ts.adjust(state, "head/w", learning_rate=3.0)
    assert_trees_equal(rates(state), rates_of(ew=2, eb=2, hw=3, hb=2))
    traced = jax.jit(lambda s, rate: ts.adjust(s, "head/b", learning_rate=rate))(state, 4.0)
    assert_trees_equal(rates(traced), rates_of(ew=2, eb=2, hw=3, hb=4))

    many = jax.vmap(lambda rate: ts.setup(rules.sgd(rate), PARAMS))(jnp.arange(4.0))
    many = ts.adjust(jax.device_put(many, parts), "head/**", learning_rate=np.arange(4.0) + 0.5)
    assert many.numbers.values.sharding.spec[0] == "data"
    names = {k: v.tolist() for k, v in ts.hyperparams(many).items()}
    assert names == {"learning_rate": [0, 1, 2, 3], "learning_rate@head/**": [0.5, 1.5, 2.5, 3.5]}


def test_an_adjusted_state_shares_its_arrays():
    state = ts.setup(rules.sgd(0.5), {"w": np.ones(2, np.float32)}, freezable=True)
    same = [ts.adjust(state, learning_rate=1.0), ts.freeze(state, "w"), ts.thaw(state, "w")]
    ts.train_step(lambda params, x: jnp.sum(params["w"]) * x)(state, 1.0)
    for other in same:
        with pytest.raises(ts.errors.StateError, match="donated"):
            ts.hyperparams(other)


COMPLEX = {"z": np.ones(3, np.complex64), "w": np.ones((2, 2), np.float32)}


@pytest.mark.parametrize(
    "wrap, params", [(optax.flatten, PARAMS), (optax.contrib.split_real_and_imaginary, COMPLEX)], ids=["flat", "split"]
)
def test_where_a_wrapper_hides_the_leaves_the_whole_is_adjusted(wrap, params):
    state = ts.setup(wrap(rules.sgd(0.5)), params)
    for adjusted in (ts.adjust(state, learning_rate=2.0), ts.adjust(state, ["**"], learning_rate=2.0)):
        assert ts.hyperparams(adjusted) == {"learning_rate": 2.0}
        after, _ = ts.update(adjusted, jax.tree.map(np.ones_like, params))
        assert_trees_close(after.params, jax.tree.map(lambda p: p - 2, params), rtol=1e-6, atol=1e-7)
    for values in ({"learning_rate": 2.0}, {}):
        with pytest.raises(ts.errors.HyperparameterError, match=r"none with live numbers.*hides its leaves"):
            ts.adjust(state, "**/w", **values)


def test_leaves_without_a_live_rule_are_told():
    state = ts.setup(rules.partition({"head/**": optax.sgd(0.1), "**": rules.sgd(0.1)}), PARAMS)
    with pytest.raises(ts.errors.HyperparameterError, match=r"none with live numbers for these leaves"):
        ts.adjust(state, "head/**", learning_rate=2.0)


def test_where_may_be_a_predicate_a_mask_or_a_list():
    state = ts.setup(rules.sgd(1.0), PARAMS)
    mask = {"encoder": {"w": False, "b": True}, "head": {"w": False, "b": True}}
    for where in (lambda path, leaf: leaf.ndim == 1, mask, ["**", "!**/w"]):
        assert_trees_equal(rates(ts.adjust(state, where, learning_rate=3.0)), rates_of(ew=1, eb=3, hw=1, hb=3))


def test_a_mask_is_a_mask_even_where_params_are_called_like_hyperparameters():
    params = {"w1": jnp.ones(1), "b1": jnp.ones(1), "learning_rate": jnp.ones(1)}
    state = ts.adjust(ts.setup(rules.adam(1.0), params), {"w1": False, "b1": True, "learning_rate": False}, b2=0.5)
    assert {k: v for k, v in ts.hyperparams(state).items() if "b2" in k} == {"b2": 0.999, "b2@mask": 0.5}


def test_a_group_that_was_declared_needs_no_cut():
    state = ts.setup(rules.partition({"head/**": rules.sgd(1.0), "**": rules.sgd(2.0)}), PARAMS)
    names, structure = list(ts.hyperparams(state)), jax.tree.structure(state)
    state = ts.adjust(state, "head/**", learning_rate=3.0)
    assert_trees_equal(rates(state), rates_of(ew=2, eb=2, hw=3, hb=3))
    state = ts.adjust(state, learning_rate=4.0)
    assert_trees_equal(rates(state), rates_of(ew=4, eb=4, hw=4, hb=4))
    assert list(ts.hyperparams(state)) == names and jax.tree.structure(state) == structure


@pytest.mark.parametrize("where", ["**", "head/**"])
def test_moments_are_kept(where):
    state = train(ts.setup(rules.adamw(0.01), PARAMS))
    after = ts.adjust(state, where, learning_rate=0.5, b1=0.5, b2=0.5)
    for text in ("mu", "nu"):
        assert select(state.opt_state, text)
        assert_trees_equal(list(select(after.opt_state, text).values()), list(select(state.opt_state, text).values()))
    assert_trees_equal(after.params, state.params)
    assert int(after.step) == 3


@pytest.mark.medium
def test_new_betas_work_on_the_old_moments():
    """mu ← b1 mu + (1 - b1) g, with the b1 of the leaf."""
    state = train(ts.setup(rules.adam(0.01, b1=0.75), PARAMS))
    old = select(state.opt_state, "mu")
    state, _ = ts.update(ts.adjust(state, "head/**", b1=0.25), ONES)
    for path, mu in select(state.opt_state, "mu").items():
        b1 = 0.25 if "head" in path else 0.75
        before = next(x for p, x in old.items() if p.partition("mu")[2] == path.partition("mu")[2])
        np.testing.assert_allclose(mu, b1 * before + (1 - b1), rtol=1e-6)


CUT_EQUAL = {
    "adamw": lambda: rules.adamw(0.01, weight_decay=0.1),
    "multi_steps": lambda: optax.MultiSteps(rules.adam(0.01), 2).gradient_transformation(),
    "clipped": lambda: rules.live(lambda rate: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(rate)))(0.01),
    "lamb": lambda: rules.lamb(0.01, weight_decay=0.1),
    "adafactor": lambda: rules.adafactor(0.01, min_dim_size_to_factor=2),
    "prodigy": lambda: rules.prodigy(1.0),
    "schedule_free_adamw": lambda: rules.schedule_free_adamw(0.01),
}


@pytest.mark.parametrize(
    "name", [name if i < 3 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(CUT_EQUAL)]
)
def test_a_cut_with_equal_values_changes_no_bit(name):
    """Even of what looks at all leaves together: a global norm stays global."""
    state = train(ts.setup(CUT_EQUAL[name](), PARAMS), BATCHES[:2], EXACT)
    cut = train(ts.adjust(state, "head/**"), BATCHES, EXACT)
    assert len(ts.hyperparams(cut)) == 2 * len(ts.hyperparams(state))
    assert_trees_equal(cut.params, train(state, BATCHES, EXACT).params)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.optimistic_adam. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("row", [r for r in test_rules.ROWS if not r.obj_fn], ids=lambda r: r.name)
def test_every_rule_can_be_cut_and_frozen(row):
    """A subtree of one leaf could differ in a bit: XLA turns the division by what only it uses into a product."""
    exact = AS_WRITTEN if row.name == "muon" else EXACT  # its head is one leaf: the others are Adam's
    state = train(ts.setup(row.live(**row.needs | row.arguments), PARAMS, freezable=True), step=exact)
    cut, whole = (train(s, BATCHES, exact) for s in (ts.adjust(state, "head/**"), state))
    assert_trees_equal(cut.params, whole.params)
    if row.name == "lbfgs":
        with pytest.raises(ts.errors.RuleError, match=r"rule at freeze\(\): got lbfgs.*memory mixes all leaves"):
            ts.freeze(state, "head/**")
        return
    frozen = train(ts.freeze(state, "head/**"), BATCHES, EXACT)
    for tree in ("params", "opt_state"):
        before, after = (select(getattr(s, tree), "['head']") for s in (state, frozen))
        assert_trees_equal(list(before.values()), list(after.values()))
    assert moved(select(state.params, "['encoder']"), select(frozen.params, "['encoder']"))


def test_a_schedule_can_be_overridden_and_given_back():
    state = ts.setup(rules.sgd(optax.linear_schedule(1.0, 0.0, 10)), PARAMS)
    state = ts.adjust(state, learning_rate=0.3)
    state = train(state)
    assert ts.hyperparams(state)["learning_rate"] == 0.3
    assert_trees_equal(rates(state), rates_of(ew=0.3, eb=0.3, hw=0.3, hb=0.3))
    state = ts.adjust(state, learning_rate=None)
    assert ts.hyperparams(state)["learning_rate"] == pytest.approx(0.7)  # three steps have gone by
    state = ts.adjust(state, "head/**", learning_rate=0.5)
    assert_trees_equal(rates(state), rates_of(ew=0.7, eb=0.7, hw=0.5, hb=0.5))
    state = ts.adjust(state, "**/b", learning_rate=None)
    assert_trees_equal(rates(state), rates_of(ew=0.7, eb=0.7, hw=0.5, hb=0.7))
    with pytest.raises(WrongTypeError, match="got None, expected a number"):
        ts.adjust(ts.setup(rules.sgd(0.1), PARAMS), learning_rate=None)


def test_copying_hyperparameters_copies_them_exactly():
    """All digits, complements too: 1 - b2 must not be rounded again."""
    rule = lambda rate, b2: rules.chain(rules.clip_by_global_norm(rate), rules.adamw(rate, b2=b2))
    a, b = (
        ts.adjust(ts.setup(rule(rate, b2), PARAMS), "head/**", b2=0.9 * b2)
        for rate, b2 in [(0.1, 0.9), (1 / 3, 0.9999123456789)]
    )
    copy = ts.adjust(a, **ts.hyperparams(b))
    assert_trees_equal(copy.numbers.values[:2], b.numbers.values[:2])
    assert ts.hyperparams(copy) == ts.hyperparams(b)


@pytest.mark.parametrize(
    "rule",
    [
        lambda: rules.chain(rules.clip(1.0), rules.clip(2.0), rules.sgd(0.1)),
        lambda: rules.partition({"head/**": rules.sgd(0.1), "**": rules.sgd(0.2, momentum=0.5)}),
    ],
    ids=["chain", "groups"],
)
def test_hyperparameters_of_a_cut_are_copied_into_the_same_cut(rule):
    a, b = ts.setup(rule(), PARAMS), ts.adjust(ts.setup(rule(), PARAMS), "**/b", learning_rate=3.0)
    with pytest.raises(ts.errors.HyperparameterError, match=r"@\*\*/b'.*Cut it first: ts\.adjust\(state, pattern\)"):
        ts.adjust(a, **ts.hyperparams(b))
    copy = ts.hyperparams(ts.adjust(ts.adjust(a, "**/b"), **ts.hyperparams(b)))
    assert {name: copy[name] for name in ts.hyperparams(b)} == ts.hyperparams(b)
    if "momentum" in ts.hyperparams(a):
        with pytest.raises(ts.errors.HyperparameterError, match=r"Did you mean 'momentum'"):
            ts.adjust(a, **{"momentum@**": 0.5})
    with pytest.raises(ts.errors.HyperparameterError, match=r"Did you mean '(max_delta|learning_rate@head/\*\*)'"):
        ts.adjust(a, **{"learning_rate@haed/**": 1.0} if "momentum" in ts.hyperparams(a) else {"0.max_delt": 1.0})


def test_names_that_are_not_there_are_refused_with_those_that_are():
    state = ts.setup(rules.chain(rules.clip(1.0), rules.clip(2.0), rules.sgd(0.1)), PARAMS)
    with pytest.raises(ts.errors.HyperparameterError, match=r"learning_rat.*learning_rate"):
        ts.adjust(state, learning_rat=0.1)
    with pytest.raises(ts.errors.HyperparameterError, match=r"momentum.*learning_rate, max_delta"):
        ts.adjust(state, momentum=0.1)
    with pytest.raises(ts.errors.HyperparameterError, match=r"max_delta.*0\.max_delta.*1\.max_delta"):
        ts.adjust(state, max_delta=3.0)
    live = ts.hyperparams(ts.adjust(state, **{"1.max_delta": 3.0}))
    assert live == {"0.max_delta": 1.0, "1.max_delta": 3.0, "learning_rate": 0.1}
    with pytest.raises(ts.errors.PatternError, match="haed"):
        ts.adjust(state, "haed/**", learning_rate=0.1)
    groups = ts.setup(rules.partition({"head/**": rules.adam(0.1), "**": rules.sgd(0.1)}), PARAMS)
    with pytest.raises(ts.errors.HyperparameterError, match=r"b1.*learning_rate"):
        ts.adjust(groups, "encoder/**", b1=0.5)
    with pytest.raises(ts.errors.HyperparameterError, match="live"):
        ts.adjust(ts.setup(optax.sgd(0.1), PARAMS), learning_rate=0.1)


def test_a_partition_clips_by_group_where_a_cut_does_not():
    """So `adjust` of a subtree cannot be a partition with a rule for each group."""
    params = {"body": jnp.ones(4), "head": jnp.full(4, 3.0)}
    make = lambda: rules.chain(rules.add_decayed_weights(0.01), rules.clip_by_global_norm(1.0), rules.sgd(0.1))
    whole = ts.setup(make(), params)
    cut = ts.adjust(whole, "head", learning_rate=0.1)
    apart = ts.setup(rules.partition({"head": make(), "**": make()}), params)
    grads = {"body": jnp.arange(4.0), "head": 2 * jnp.arange(4.0)}
    after = {name: ts.update(s, grads)[0].params for name, s in {"whole": whole, "cut": cut, "apart": apart}.items()}
    assert_trees_equal(after["cut"], after["whole"])
    assert float(jnp.abs(after["apart"]["body"] - after["whole"]["body"]).max()) > 0.01


@pytest.mark.medium
def test_a_hundred_adjusts_compile_no_step_and_a_cut_compiles_one():
    state = train(ts.setup(rules.adam(0.01, eps=1e-3), PARAMS))
    kinds = list(KINDS.values())
    with count_compiles() as c:
        for i in range(100):
            state = ts.adjust(state, learning_rate=kinds[i % len(kinds)](1), b1=0.9 + i / 2000)
            state, _ = STEP(state, BATCHES[i % 10])
    assert steps_compiled(c) == 0
    with count_compiles() as c:
        state = train(ts.adjust(state, "head/**", learning_rate=0.1))
    assert steps_compiled(c) == 1
    with count_compiles() as c:
        for i in range(30):
            where = ("head/**", "**", ["**", "!head/**"])[i % 3]
            state, _ = STEP(ts.adjust(state, where, learning_rate=kinds[i % len(kinds)](1)), BATCHES[i % 10])
    assert steps_compiled(c) == 0
    assert len(ts.hyperparams(state)) == 10


def test_a_further_cut_is_work_on_the_host():
    params = [np.ones(2, np.float32) for _ in range(7)]
    state = ts.adjust(ts.setup(rules.adam(0.01), params), "0", learning_rate=0.5)
    with count_compiles() as c:
        for i in range(1, 6):
            state = ts.adjust(state, str(i), learning_rate=0.5 + i)
    assert (c.compiles, c.traces) == (0, 0)
    found = {k: v for k, v in ts.hyperparams(state).items() if "rate@" in k}
    assert found == {f"learning_rate@{i}": 0.5 + i for i in range(6)}


def test_adjust_in_a_scan_is_adjust_in_a_loop():
    state = ts.adjust(ts.setup(rules.sgd(0.5, momentum=0.5), PARAMS), "head/**")  # the cut alone

    def body(state, given):
        rate, batch = given
        state = ts.adjust(ts.adjust(state, learning_rate=rate), "head/**", learning_rate=2 * rate, momentum=0.25)
        return STEP(state, batch)

    values = np.linspace(0.1, 0.2, 4, dtype=np.float32)
    scanned, infos = jax.lax.scan(body, state, (values, jax.tree.map(lambda *xs: np.stack(xs), *BATCHES[:4])))
    for rate, batch in zip(values, BATCHES[:4], strict=True):
        state, _ = body(state, (rate, batch))
    assert_trees_close(scanned.params, state.params, rtol=1e-6, atol=1e-7)
    assert_trees_equal(scanned.numbers, state.numbers)
    np.testing.assert_array_equal(infos.hyperparams["learning_rate@head/**"], 2 * values)


def test_a_new_cut_in_a_scan_is_another_structure():
    state = ts.setup(rules.sgd(0.5), PARAMS)
    with pytest.raises(TypeError, match="carry"):
        jax.lax.scan(lambda s, _: (ts.adjust(s, "head/**", learning_rate=0.1), 0), state, None, length=2)


@pytest.mark.medium
@pytest.mark.parametrize("where", ["**", "head/**"])
def test_members_of_a_population_take_one_value_each(where):
    make = lambda rate: ts.adjust(ts.setup(rules.adam(rate), PARAMS), where)
    many = jax.vmap(make)(jnp.array([0.1, 0.2, 0.3]))
    given = np.array([0.01, 0.02, 0.05])
    many = ts.adjust(many, where, learning_rate=given, b2=0.99)
    many = jax.jit(jax.vmap(STEP, in_axes=(0, None)))(many, BATCHES[0])[0]
    for i, rate in enumerate(given):
        single = ts.adjust(make([0.1, 0.2, 0.3][i]), where, learning_rate=float(rate), b2=0.99)
        single, _ = STEP(single, BATCHES[0])
        assert_trees_close(
            jax.tree.map(lambda x, i=i: np.asarray(x)[i], many.params), single.params, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("members", [[], [0], True])
def test_a_single_state_has_no_members(members):
    state = ts.setup(rules.adam(0.1), PARAMS)
    for edit in (ts.freeze, ts.thaw):
        with pytest.raises(ts.errors.StateError, match="expected a mask, or different indices of members below 0"):
            edit(state, "**", members=members)


# ------------------------------------------------------------------------------------------------------------- freeze

FREEZABLE = {
    "adamw": lambda: rules.adamw(0.01, weight_decay=0.1),
    "momentum": lambda: rules.sgd(0.01, momentum=0.9),
    "lion": lambda: rules.lion(0.01, weight_decay=0.1),
    "adafactor": lambda: rules.adafactor(0.01, min_dim_size_to_factor=2, momentum=0.9),
    "lamb": lambda: rules.lamb(0.01, weight_decay=0.1),
    "schedule_free": lambda: rules.schedule_free_adamw(0.01),
    "chain": lambda: rules.chain(rules.clip_by_global_norm(1.0), rules.add_decayed_weights(0.1), rules.adam(0.01)),
    "groups": lambda: rules.partition(
        {"**/w": rules.adamw(0.01, weight_decay=0.1), "**": rules.sgd(0.01, momentum=0.9)}
    ),
    "cut": lambda: rules.adamw(0.01, weight_decay=0.1),
    "optax": lambda: optax.adamw(0.01, weight_decay=0.1),
    "optax_chain": lambda: optax.chain(optax.clip(1.0), optax.add_decayed_weights(0.1), optax.adam(0.01)),
    "multi_steps": lambda: optax.MultiSteps(rules.adamw(0.01, weight_decay=0.1), 2).gradient_transformation(),
}


def freezable(name, **setup):
    state = ts.setup(FREEZABLE[name](), PARAMS, freezable=True, **setup)
    return ts.adjust(state, "**/w", learning_rate=0.02) if name == "cut" else state


QUICK = ("adamw", "groups", "cut", "multi_steps")


@pytest.mark.parametrize("name", medium_if(lambda name: name not in QUICK, FREEZABLE))
def test_frozen_params_and_moments_keep_their_bits_and_go_on_from_them(name):
    state = train(freezable(name))
    frozen = ts.freeze(state, "encoder/**")
    with count_compiles() as c:
        after = train(frozen, BATCHES[3:8])
        thawed = train(ts.thaw(after), BATCHES[8:])
    assert steps_compiled(c) == 0
    for tree in ("params", "opt_state"):
        before, now, later = (select(getattr(s, tree), "['encoder']") for s in (state, after, thawed))
        assert_trees_equal(list(now.values()), list(before.values()))
        assert before and moved(now, later)
        head = [select(getattr(s, tree), "['head']") for s in (state, after)]
        assert moved(*head)
    assert int(after.step) == 8


def test_a_thawed_leaf_goes_on_with_its_momentum():
    """trace ← g + 0.5 trace, from the trace that it had."""
    state = train(ts.setup(rules.sgd(0.25, momentum=0.5), PARAMS))
    trace = select(state.opt_state, "trace")
    state = ts.thaw(train(ts.freeze(state, "encoder/**"), BATCHES[3:6]), "encoder/w")
    state, _ = ts.update(state, ONES)
    after = select(state.opt_state, "trace")
    for path in after:
        if "['encoder']['w']" in path:
            np.testing.assert_allclose(after[path], 1 + 0.5 * trace[path], rtol=1e-6)
        elif "['encoder']['b']" in path:  # not thawed
            np.testing.assert_array_equal(after[path], trace[path])


@pytest.mark.medium
def test_the_first_freeze_compiles_once_and_the_others_never():
    step = ts.train_step(loss_fn, donate=False)  # nobody else's: what others compiled counts for none
    state = train(ts.setup(rules.adam(0.01), PARAMS), step=step)
    assert state.frozen is None  # a state that never froze has no such leaf
    with count_compiles() as c:
        state = train(ts.freeze(state, "head/**"), step=step)
    assert steps_compiled(c) == 1
    patterns = [list(p) if isinstance(p, tuple) else p for p in PATTERNS]
    rng = np.random.default_rng(0)
    with count_compiles() as c:
        for i in range(100):
            change = ts.freeze if rng.random() < 0.5 else ts.thaw
            state = change(state, patterns[rng.integers(len(patterns))])
            state, _ = step(state, BATCHES[i % 10])
    assert steps_compiled(c) == 0


@pytest.mark.medium
def test_leaves_that_are_alike_share_their_kernels_though_each_may_be_frozen():
    """A kernel for each leaf compiles for as long as there are leaves."""
    params = [jnp.ones((8, 8)) for _ in range(40)]
    step = ts.train_step(lambda params, x: sum(jnp.mean((x @ w) ** 2) for w in params))

    def kernels(state):
        text = step.lower(state, np.ones((4, 8), np.float32)).compile().as_text()
        bodies = re.findall(r"^\S*fused\S* .*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
        return {re.sub(r"%[\w.\-]+|, metadata=\{[^}]*\}|, backend_config=.*", "", body) for body in bodies}

    plain, freezable = (len(kernels(ts.setup(rules.adam(1e-3), params, freezable=on))) for on in (False, True))
    assert 0 < plain < 40 and freezable < plain + 40 + 10, (plain, freezable)  # and one that reads the flag of each


@pytest.mark.medium
def test_with_room_made_at_setup_not_even_the_first_freeze_compiles():
    step = ts.train_step(loss_fn, donate=False)
    state = train(ts.setup(rules.adam(0.01), PARAMS, freezable=True), step=step)
    with count_compiles() as c:
        state = train(ts.thaw(train(ts.freeze(state, "head/**"), step=step), "**/w"), step=step)
    assert steps_compiled(c) == 0
    room, none = (train(ts.setup(rules.adam(0.01), PARAMS, freezable=f), step=EXACT).params for f in (True, False))
    assert_trees_equal(room, none)


@pytest.mark.parametrize("sequence", range(5))
def test_a_leaf_is_frozen_if_the_last_word_on_it_was_freeze(sequence):
    rng = np.random.default_rng(sequence)
    state, expected = ts.setup(rules.sgd(1.0), PARAMS, freezable=True), dict.fromkeys(LEAVES, 1.0)
    for _ in range(6):
        where = list(PATTERNS)[rng.integers(len(PATTERNS))]
        on = bool(rng.integers(2))
        state = (ts.freeze if on else ts.thaw)(state, list(where) if isinstance(where, tuple) else where)
        expected |= dict.fromkeys(PATTERNS[where].split(), 0.0 if on else 1.0)
        assert_trees_equal(rates(state), rates_of(**expected))


@pytest.mark.medium
def test_more_leaves_than_bits_in_a_word():
    params = [np.ones(1, np.float32) for _ in range(40)]
    state = ts.setup(rules.sgd(1.0), params)
    mask = [bool(i % 3 == 0 or i in (31, 32, 39)) for i in range(40)]
    state, _ = jax.jit(ts.update)(ts.freeze(state, mask), params)
    assert [float(x[0]) for x in state.params] == [float(on) for on in mask]


def test_a_global_clip_is_over_what_is_not_frozen():
    rule = rules.chain(rules.clip_by_global_norm(1.0), rules.sgd(1.0))
    state, info = ts.update(ts.freeze(ts.setup(rule, PARAMS), "encoder/**"), ONES)
    norm = 10**0.5  # eight kernels and two biases are left
    assert_trees_close(
        jax.tree.map(np.subtract, PARAMS["head"], state.params["head"]),
        jax.tree.map(lambda x: np.full(x.shape, 1 / norm), PARAMS["head"]),
        rtol=1e-5,
        atol=0,
    )
    np.testing.assert_allclose(info.grad_norm, norm, rtol=1e-6)


BEHIND = {
    "decay": rules.chain(rules.add_decayed_weights(0.1), rules.clip_by_global_norm(1.0), rules.sgd(1.0)),
    "optax": optax.chain(optax.add_decayed_weights(0.1), optax.clip_by_global_norm(1.0), optax.sgd(1.0)),
    "adamw": rules.chain(rules.adamw(0.5, weight_decay=0.1), rules.clip_by_global_norm(0.5)),
    "window": rules.accumulate(rules.chain(rules.sgd(1.0, momentum=0.9), rules.clip_by_global_norm(0.5)), 1),
    "normalized": optax.chain(optax.add_decayed_weights(0.1), optax.normalize_by_update_norm(), optax.sgd(1.0)),
}


@pytest.mark.parametrize("name", BEHIND)
def test_a_norm_behind_another_rule_does_not_count_frozen_leaves(name):
    """Neither their decay nor the moments that they had before they were frozen."""
    params = {"body": jnp.array([100.0]), "head": jnp.array([1.0])}
    first, later = ({"body": jnp.array([x]), "head": jnp.array([y])} for x, y in ((90.0, 0.0), (7.0, 1.9)))
    moved, _ = ts.update(ts.setup(BEHIND[name], params), first)
    selected = ts.setup(BEHIND[name], params, trainable="head")
    if name != "normalized":  # which divides by the norm of no gradient at all
        selected, _ = ts.update(selected, first)
    frozen = ts.freeze(moved.replace(params={**moved.params, "head": selected.params["head"]}), "body")
    for _ in range(2):
        selected, expected = ts.update(selected, later, norms="update")
        frozen, info = ts.update(frozen, later, norms="update")
        np.testing.assert_allclose(frozen.params["head"], selected.params["head"], rtol=1e-6)
        np.testing.assert_allclose(info.update_norm, expected.update_norm, rtol=1e-6)
        assert frozen.params["body"] == moved.params["body"]


def test_a_sum_of_a_frozen_leaf_waits_in_its_window():
    rule = rules.accumulate(rules.chain(rules.clip_by_global_norm(0.5), rules.sgd(1.0)), 3)
    start = ts.setup(rule, {"body": jnp.array([100.0]), "head": jnp.array([1.0])})
    grads = {"body": jnp.array([30.0]), "head": jnp.array([0.3])}
    gathered, _ = ts.update(start, grads)
    frozen, _ = ts.update(ts.freeze(gathered, "body"), grads)
    thawed, _ = ts.update(ts.thaw(frozen, "body"), grads)
    mean = np.array([20.0, 0.3])  # the second call had no gradient of the body
    np.testing.assert_allclose(thawed.params["body"], 100 - 0.5 * mean[0] / np.linalg.norm(mean), rtol=1e-6)
    frozen, _ = ts.update(frozen, grads)  # the window ends while the body is frozen
    np.testing.assert_allclose(frozen.params["head"], 1 - 0.3, rtol=1e-6)
    assert frozen.params["body"] == 100 and frozen.opt_state.sums["body"] == 0


def test_a_frozen_leaf_cannot_reject_a_step():
    """Its gradient counts as zero, whatever it is."""
    state = ts.freeze(ts.setup(rules.adam(0.1), PARAMS), "encoder/**")
    bad = ONES | {"encoder": jax.tree.map(lambda x: np.full_like(x, np.nan), ONES["encoder"])}
    after, info = ts.update(state, bad)
    assert bool(info.applied)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after.params, after.opt_state)))
    assert_trees_equal(after.params["encoder"], PARAMS["encoder"])


def test_everything_may_be_frozen():
    state = train(ts.setup(rules.adamw(0.01), PARAMS, freezable=True))
    after = train(ts.freeze(state, "**"), BATCHES)
    arrays = lambda tree: [x for x in jax.tree.leaves(tree) if np.ndim(x)]  # the count of all leaves goes on
    assert_trees_equal((after.params, arrays(after.opt_state)), (state.params, arrays(state.opt_state)))
    assert int(after.step) == 13 and int(after.calls) == 13


@pytest.mark.medium
def test_freeze_in_jit_scan_and_vmap():
    state = train(ts.setup(rules.adam(0.01), PARAMS, freezable=True))
    expected = train(ts.freeze(state, "head/**"), BATCHES[:1]).params
    jitted = jax.jit(lambda s, batch: STEP(ts.freeze(s, "head/**"), batch)[0])(state, BATCHES[0])
    assert_trees_close(jitted.params, expected, rtol=1e-6, atol=1e-7)
    assert_trees_equal(jitted.params["head"], state.params["head"])

    def body(s, batch):  # never two steps on end for the head
        s, _ = STEP(ts.freeze(s, "head/**"), batch)
        s, _ = STEP(ts.thaw(s, "head/**"), batch)
        return s, s.params["head"]["b"]

    stacked = jax.tree.map(lambda *xs: np.stack(xs), *BATCHES[:3])
    scanned, _ = jax.lax.scan(body, state, stacked)
    looped = state
    for batch in BATCHES[:3]:
        looped, _ = body(looped, batch)
    assert_trees_close(scanned.params, looped.params, rtol=1e-5, atol=1e-6)

    many = jax.tree.map(lambda x: jnp.asarray(np.stack([x, x])), state)
    many = jax.vmap(lambda s, batch: STEP(ts.freeze(s, "head/**"), batch)[0], in_axes=(0, None))(many, BATCHES[0])
    assert_trees_close(jax.tree.map(lambda x: np.asarray(x)[1], many.params), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_a_whole_population_is_frozen_at_once():
    many = jax.vmap(lambda rate: ts.setup(rules.sgd(rate), PARAMS))(jnp.array([1.0, 2.0]))
    after, _ = jax.vmap(ts.update, in_axes=(0, None))(ts.freeze(many, "head/**"), ONES)
    assert_trees_equal(after.params["head"], many.params["head"])
    np.testing.assert_allclose(
        (many.params["encoder"]["b"] - after.params["encoder"]["b"])[:, 0], [1.0, 2.0], rtol=1e-6
    )


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_frozen_is_as_if_closed_over(name):
    """The other leaves train as in a run that selected only them."""
    selected = train(ts.setup(FREEZABLE[name](), PARAMS, trainable="head/**"), BATCHES, EXACT)
    frozen = train(ts.freeze(freezable(name), "encoder/**"), BATCHES, EXACT)
    assert_trees_equal(frozen.params, selected.params)


def test_frozen_is_as_if_closed_over_up_to_rounding():
    """Under a rule of which the documentation says so."""
    rule = rules.nadam
    selected = train(ts.setup(rule(1e-2), PARAMS, trainable="head/**"), BATCHES)
    frozen = train(ts.freeze(ts.setup(rule(1e-2), PARAMS), "encoder/**"), BATCHES)
    assert_trees_equal(frozen.params["encoder"], PARAMS["encoder"])
    assert_trees_close(frozen.params["head"], selected.params["head"], rtol=1e-6, atol=1e-7)


def test_what_setup_left_out_cannot_be_thawed():
    state = ts.setup(rules.adam(0.1), PARAMS, trainable=["**", "!encoder/**"])
    with pytest.raises(ts.errors.PatternError, match=r"params\['encoder'\].*migrate"):
        ts.thaw(state, "encoder/**")
    with pytest.raises(ts.errors.PatternError, match=r"params\['encoder'\]"):
        ts.freeze(state, "encoder/**")


def test_freeze_and_adjust_work_on_a_partial_selection():
    state = ts.setup(rules.sgd(1.0), PARAMS, trainable=["**", "!encoder/w"])
    state = ts.adjust(state, "**/w", learning_rate=2.0)
    assert_trees_equal(rates(state), rates_of(ew=0, eb=1, hw=2, hb=1))
    state = ts.freeze(state, "**/b")
    assert_trees_equal(rates(state), rates_of(ew=0, eb=0, hw=2, hb=0))
    state = ts.thaw(state)
    assert_trees_equal(rates(state), rates_of(ew=0, eb=1, hw=2, hb=1))


# ---------------------------------------------------------------------------------------------------- a new process

RESTORE = """
import sys
import numpy as np, jax
import tsunax as ts
from tests import test_hyper as t

blank = t.shaped()
with np.load(sys.argv[1]) as saved:
    state = jax.tree.unflatten(jax.tree.structure(blank), [saved[f"arr_{i}"] for i in range(len(saved.files))])
state = jax.tree.map(jax.numpy.asarray, state)
np.savez(sys.argv[2], *jax.tree.leaves(t.train(state, t.BATCHES[5:])))
print(ts.hyperparams(state))
"""


_SCHEDULE = optax.linear_schedule(0.1, 0.0, 20)  # compares by identity


def shaped():
    """The state of this run before it has numbers: the same setup and the same cuts, without their values."""
    rule = rules.chain(rules.clip_by_global_norm(1.0), rules.adamw(_SCHEDULE, weight_decay=0.1))
    state = ts.setup(rule, PARAMS, freezable=True)
    return ts.adjust(ts.adjust(state, "head/**"), "**/b")


def running():
    state = train(shaped(), BATCHES[:2])
    state = ts.adjust(state, "head/**", learning_rate=0.02, b2=0.99)
    state = ts.adjust(state, "**/b", weight_decay=0.0, eps=1e-4)
    return ts.freeze(train(state, BATCHES[2:5]), "encoder/b")


@pytest.mark.medium
def test_a_cut_state_is_rebuilt_from_its_arrays():
    state = running()
    blank = shaped()
    assert jax.tree.structure(blank) == jax.tree.structure(state)
    arrays = [np.array(x) for x in jax.tree.leaves(state)]
    restored = jax.tree.unflatten(jax.tree.structure(blank), [jnp.asarray(x) for x in arrays])
    assert ts.hyperparams(restored) == ts.hyperparams(state)
    assert_trees_equal(train(restored, BATCHES[5:]), train(state, BATCHES[5:]))


@pytest.mark.slow
def test_a_cut_state_goes_on_in_a_new_process(tmp_path):
    state = running()
    np.savez(tmp_path / "saved.npz", *jax.tree.leaves(state))
    paths = [str(tmp_path / name) for name in ("saved.npz", "after.npz")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(
        [sys.executable, "-c", RESTORE, *paths], env=environment, capture_output=True, text=True, check=True
    )
    assert re.sub(r"\s+", "", out.stdout) == re.sub(r"\s+", "", str(ts.hyperparams(state)))
    expected = jax.tree.leaves(train(state, BATCHES[5:]))
    with np.load(tmp_path / "after.npz") as after:
        assert_trees_equal([after[f"arr_{i}"] for i in range(len(expected))], expected)


# ---------------------------------------------------------------------------------------- what rules may be made of

FACTORY = "def nameless(learning_rate=0.1):\n    return optax.chain(optax.trace(0.5), optax.scale(-learning_rate))"


@pytest.mark.parametrize("module", ["missing", None, ""])
def test_a_factory_may_have_no_module(module):
    made = {"optax": optax}
    exec(FACTORY, made)
    factory = made["nameless"]
    if module != "missing":
        factory.__module__ = module
    rule = rules.live(factory)(0.25)
    state = ts.adjust(ts.setup(rule, PARAMS), "head/**", learning_rate=0.5)
    assert_trees_equal(rates(state), rates_of(ew=0.25, eb=0.25, hw=0.5, hb=0.5))
    assert "nameless" in repr(rules.live(factory))


def test_a_rule_can_be_hashed_whatever_its_numbers_are():
    assert hash(rules.adam(jnp.float32(1e-3))) == hash(rules.adam(1e-3))
    assert len({rules.sgd(0.5), rules.sgd(0.5), rules.sgd(0.25)}) == 2
    jax.eval_shape(lambda rate: {rules.chain(rules.sgd(rate)): rate}.popitem()[1], 0.5)


@pytest.mark.slow
def test_rules_leave_the_interpreter_in_silence():
    """Plans are looked up to the very end, when modules have lost their names."""
    script = "import numpy as np, tsunax as ts; p = np.ones(2, np.float32)\n"
    script += "states = [ts.setup(ts.rules.sgd(0.1, nesterov=n), p) for n in (False, True)]"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert out.stderr == ""


def test_states_compare_without_looking_at_their_arrays():
    """Equality by value would ask arrays whether they are true."""
    rule = rules.adam(0.1)
    state = ts.setup(rule, PARAMS)
    other = ts.adjust(state, learning_rate=0.2)
    assert state.numbers == state.numbers and state.numbers != other.numbers
    assert rule.init(PARAMS) != rule.init(PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(other)


# --------------------------------------------------------------------------- footguns of optax, by their known numbers


def test_footgun_17_overriding_a_schedule_is_not_ignored():
    state = ts.adjust(ts.setup(rules.sgd(optax.constant_schedule(1.0)), PARAMS), learning_rate=0.5)
    assert_trees_equal(rates(state), rates_of(ew=0.5, eb=0.5, hw=0.5, hb=0.5))


def test_footgun_18_rates_of_two_groups_in_a_chain_are_read_and_set_by_name():
    rule = rules.chain(
        rules.clip_by_global_norm(1e3), rules.partition({"head/**": rules.adam(0.1), "**": rules.sgd(0.2)})
    )
    state = ts.adjust(ts.setup(rule, PARAMS), **{"learning_rate@**": 0.7})
    found = {k: v for k, v in ts.hyperparams(state).items() if "rate" in k}
    assert found == {"learning_rate@head/**": 0.1, "learning_rate@**": 0.7}


def test_footgun_19_a_float_then_an_array_then_an_int_is_one_trace():
    traced = []

    def counted(params, batch):
        traced.append(1)
        return loss_fn(params, batch)

    step, state = ts.train_step(counted, donate=False), ts.setup(rules.sgd(0.5), PARAMS)
    state, _ = step(state, BATCHES[0])
    first = len(traced)
    for value in (0.25, jnp.array(0.5), 1, np.float64(0.125)):
        state, _ = step(ts.adjust(state, learning_rate=value), BATCHES[0])
    assert len(traced) == first


def test_footgun_20_live_numbers_do_not_grow_the_optimizer_state():
    """They stand beside it, as one array; what is in it is plain optax's."""
    live, plain = ts.setup(rules.adamw(0.1), PARAMS), optax.adamw(0.1).init(PARAMS)
    assert len(jax.tree.leaves(live.opt_state)) <= len(jax.tree.leaves(plain))
    assert len(jax.tree.leaves(live.numbers)) == 1


def test_footgun_21_there_is_one_position_of_all_schedules():
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    rule = rules.partition({"head/**": rules.sgd(schedule), "**": rules.sgd(schedule)})
    state = ts.setup(rule, PARAMS)
    state, _ = ts.update(state, ONES)
    bad = jax.tree.map(lambda x: np.full_like(x, np.inf), ONES)
    state, _ = ts.update(state, bad)  # rejected: no schedule moves
    assert list(ts.hyperparams(state).values()) == pytest.approx([0.9, 0.9])
    state = state.replace(step=5)
    assert ts.hyperparams(state) == {"learning_rate@head/**": 0.5, "learning_rate@**": 0.5}


def test_footgun_24_a_frozen_leaf_does_not_decay():
    state = ts.freeze(ts.setup(rules.adamw(1.0, weight_decay=0.01), PARAMS), "encoder/**")
    state, _ = ts.update(state, jax.tree.map(np.zeros_like, PARAMS))
    assert_trees_equal(state.params["encoder"], PARAMS["encoder"])
    np.testing.assert_allclose(state.params["head"]["w"], 0.99 * PARAMS["head"]["w"], rtol=1e-6)


def test_footgun_25_what_is_not_selected_has_no_moments():
    state = ts.setup(rules.adam(0.1), PARAMS, trainable="head/**")
    assert not select(state.opt_state, "['encoder']") and len(select(state.opt_state, "['head']")) == 4


def test_footgun_28_another_pattern_on_an_old_state_is_no_error():
    state = train(ts.setup(rules.adam(0.01), PARAMS, freezable=True))
    for where in ("head/**", "**/w", "encoder/b"):
        state = train(ts.freeze(ts.thaw(state), where), BATCHES[:1])
    assert int(state.step) == 6


def test_a_state_goes_through_functools_reduce_untouched():
    """Nothing here mutates: the first state is what it was."""
    state = ts.setup(rules.sgd(1.0), PARAMS)
    functools.reduce(
        lambda s, where: ts.freeze(ts.adjust(s, where, learning_rate=3.0), where), ["head/**", "**/b"], state
    )
    assert state.frozen is None and ts.hyperparams(state) == {"learning_rate": 1.0}


@pytest.mark.medium
def test_a_line_search_leaves_frozen_leaves_where_they_are():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    fn = lambda params, x: jnp.mean((x @ (params["a"] * params["b"]) - 3) ** 2)
    rule, x = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)), jnp.eye(2)
    state, closed = ts.freeze(ts.setup(rule, params), "a"), ts.setup(rule, params, trainable="b")
    step = ts.train_step(fn)
    for _ in range(3):
        state, _ = step(state, x)
        closed, _ = step(closed, x)
    assert_trees_close(state.params, closed.params, rtol=1e-6, atol=1e-7)


def test_an_update_of_a_frozen_state_outside_of_a_program_compiles_nothing_again():
    state = ts.freeze(ts.setup(rules.adam(0.1), PARAMS), "head/**")
    grads = jax.tree.map(jnp.ones_like, state.params)
    for _ in range(2):
        state, _ = ts.update(state, grads)
    with count_compiles() as compiles:
        state, _ = ts.update(state, grads)
    assert compiles.compiled == []
    assert_trees_equal(state.params["head"], PARAMS["head"])


def test_a_rule_without_live_numbers_has_none_that_was_adjusted():
    make = lambda key: ts.setup(ts.rules.lbfgs(), {"w": jnp.ones(2)})
    for state in (make(None), ts.population(make, 2)):
        assert state.numbers.values.shape[-1] == 0
        assert state.numbers.adjusted_names() == set()


def test_lbfgs_cannot_be_frozen_in_part():
    state = ts.setup(ts.rules.lbfgs(), {"a": jnp.ones(2), "b": jnp.ones(2)})
    with pytest.raises(RuleError, match=r"rule at freeze\(\): got lbfgs.*trainable="):
        ts.freeze(state, "a")
    assert ts.freeze(state, "**").frozen is not None


SHAPES_ARE_NO_STATE = {
    "hyperparams": lambda state, step: ts.hyperparams(state),
    "adjust": lambda state, step: ts.adjust(state, learning_rate=0.1),
    "fit": lambda state, step: ts.fit(step, state, [np.ones(2, np.float32)], epochs=1, progress=False),
}


@pytest.mark.parametrize("name", SHAPES_ARE_NO_STATE)
def test_a_state_of_shapes_is_refused(name):
    state = jax.eval_shape(lambda: ts.setup(ts.rules.adam(0.1), {"w": jnp.ones(2)}))
    step = ts.train_step(lambda params, x: jnp.sum(params["w"] * x))
    with pytest.raises(WrongTypeError, match=r"leaf at state\..*ShapeDtypeStruct, expected an array"):
        SHAPES_ARE_NO_STATE[name](state, step)
