"""Penalties: closed forms in value and gradient, and the same training as decay first in the chain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests.helpers import assert_trees_close, assert_trees_equal, medium_if
from tsunax.errors import ParamsError, PatternError
from tsunax.regularize import elastic, l1, l2

RATE, STEPS = 0.02, 20
WHERE = ["**", "!**/bias"]


def make_params(seed=0):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(5, 3)).astype(np.float32)
    w[0] = 0.0  # what a penalty must leave where it is
    return {"dense": {"kernel": w, "bias": rng.normal(size=3).astype(np.float32)}}


def data_loss(params, batch):
    return jnp.mean((batch[0] @ params["dense"]["kernel"] + params["dense"]["bias"][None] - batch[1]) ** 2)


def make_batch(i):
    rng = np.random.default_rng(i + 100)
    x, y = rng.normal(size=(8, 5)).astype(np.float32), rng.normal(size=(8, 3)).astype(np.float32)
    x[:, 0] = 0.0  # the loss says nothing of the first row of the kernel
    return x, y


def train(rule, loss_fn, steps=STEPS):
    """The last state, and the losses that were reported."""
    state, step, losses = ts.setup(rule, make_params()), ts.train_step(loss_fn), []
    for i in range(steps):
        state, info = step(state, make_batch(i))
        losses.append(info.loss)
    return state.params, np.array(losses)


# ------------------------------------------------------------------------------------------------ closed forms


def test_values_and_gradients():
    params = make_params()
    kernel, bias = (x.astype(np.float64) for x in (params["dense"]["kernel"], params["dense"]["bias"]))
    expected = {
        "l1": np.abs(kernel).sum(),
        "l2": 0.5 * (kernel**2).sum(),
        "elastic": 0.3 * np.abs(kernel).sum() + 0.7 * 0.5 * (kernel**2).sum(),
        "all": np.abs(kernel).sum() + np.abs(bias).sum(),
    }
    slopes = {
        "l1": np.sign(kernel),
        "l2": kernel,
        "elastic": 0.3 * np.sign(kernel) + 0.7 * kernel,
        "all": np.sign(kernel),
    }
    penalties = {
        "l1": lambda p: l1(p, WHERE),
        "l2": lambda p: l2(p, WHERE),
        "elastic": lambda p: elastic(p, WHERE, l1_ratio=0.3),
        "all": l1,
    }
    found = jax.jit(lambda p: {name: jax.value_and_grad(f)(p) for name, f in penalties.items()})(params)
    assert_trees_close({k: v for k, (v, _) in found.items()}, expected, rtol=1e-6, atol=0)
    assert_trees_close({k: g["dense"]["kernel"] for k, (_, g) in found.items()}, slopes, rtol=1e-6, atol=0)
    for name, (_, g) in found.items():
        assert_trees_equal(
            g["dense"]["bias"], np.sign(bias).astype(np.float32) if name == "all" else np.zeros_like(g["dense"]["bias"])
        )


def test_the_gradient_at_zero_is_zero():
    zeros = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    for f in (l1, l2, elastic):
        assert_trees_equal(jax.grad(f)(zeros), zeros)


@pytest.mark.medium
def test_low_precision_sums_in_f32():
    ones = {
        "w": jnp.ones(4097, jnp.bfloat16),
        "v": jnp.full(4, 300.0, jnp.float16),
    }  # 4097 is no bfloat16, 300² no float16
    assert l1(ones) == np.float32(4097 + 1200) and l2(ones) == np.float32(2048.5 + 180_000)
    assert l1(ones).dtype == l2(ones).dtype == elastic(ones).dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(jax.grad(l2)(ones))} == {jnp.dtype("bfloat16"), jnp.dtype("float16")}


def test_leaves_that_are_no_floats_are_passed_over():
    tree = {"w": jnp.array([3.0, -4.0]), "n": jnp.arange(3), "on": np.array(True), "name": "dense", "none": None}
    assert (float(l1(tree)), float(l2(tree))) == (7.0, 12.5)
    assert float(l2({"w": 2.0, "c": jnp.array([3 + 4j])})) == 2.0 + 12.5


@pytest.mark.parametrize(
    ("where", "error", "text"),
    [
        ("wieghts", PatternError, "'wieghts'"),
        ("n", PatternError, "where at l1(): got 'n', which selects no floats"),
        (lambda path, leaf: False, PatternError, "selects nothing"),
    ],
)
def test_a_penalty_on_nothing_is_told(where, error, text):
    with pytest.raises(error) as caught:
        l1({"weights": jnp.ones(2), "n": jnp.arange(3)}, where)
    assert text in str(caught.value)


def test_no_leaves_are_told():
    with pytest.raises(ParamsError):
        l2({})


# ------------------------------------------------------------------------------------------------------- ties


def test_an_array_at_two_paths_counts_once():
    w, v = jnp.array([3.0, -4.0]), np.array([3.0, -4.0], np.float32)
    assert float(l1({"in": w, "out": w})) == 7.0
    assert float(l1({"in": w, "out": w, "x": v}, ["**", "!in"])) == 14.0  # equal, but not the same
    assert float(l2({"in": v, "out": v})) == 12.5
    assert float(l1({"a": 2.0, "b": 2.0})) == 4.0  # equal Python numbers are no tied arrays


def test_what_a_loss_function_ties_counts_once_also_in_a_trace():
    p = {"embed": jnp.array([3.0, -4.0])}
    tied = lambda p: l2({**p, "head": p["embed"]})
    value, grads = jax.jit(jax.value_and_grad(tied))(p)
    assert float(value) == 12.5
    assert_trees_equal(grads, p)


def test_ties_are_not_seen_through_jit_grad_and_setup():
    w = jnp.array([3.0, -4.0])
    tied = {"in": w, "out": w}
    assert float(jax.jit(l2)(tied)) == 25.0
    assert float(jax.value_and_grad(l2)(tied)[0]) == 25.0
    assert float(l2(ts.setup(ts.rules.sgd(0.1), tied).params)) == 25.0


# --------------------------------------------------------------------------- a penalty is decay first in the chain

DECAYS = {
    "l2": (lambda p: RATE * l2(p, WHERE), lambda: [ts.rules.add_decayed_weights(RATE, where=WHERE)]),
    "l1": (lambda p: RATE * l1(p, WHERE), lambda: [ts.rules.sign_decay(RATE, where=WHERE)]),
    "elastic": (
        lambda p: RATE * elastic(p, WHERE, l1_ratio=0.25),
        lambda: [ts.rules.add_decayed_weights(0.75 * RATE, where=WHERE), ts.rules.sign_decay(0.25 * RATE, where=WHERE)],
    ),
}
RULES = {
    "sgd": lambda: ts.rules.sgd(0.1),
    "momentum": lambda: ts.rules.sgd(0.05, momentum=0.9),
    "adam": lambda: ts.rules.adam(0.03),
}


without_decay = functools.cache(lambda rule: train(RULES[rule](), data_loss)[0])


def penalised(penalty):
    return lambda params, batch: data_loss(params, batch) + penalty(params)


@pytest.mark.parametrize("rule", medium_if(lambda name: name != "sgd", RULES))
@pytest.mark.parametrize("decay", DECAYS)
def test_a_penalty_in_the_loss_is_decay_first_in_the_chain(rule, decay):
    penalty, decays = DECAYS[decay]
    in_loss, losses = train(RULES[rule](), penalised(penalty))
    in_chain, plain_losses = train(ts.rules.chain(*decays(), RULES[rule]()), data_loss)
    assert_trees_close(in_chain, in_loss, rtol=1e-5, atol=2e-6)
    moved = np.abs(in_loss["dense"]["kernel"] - without_decay(rule)["dense"]["kernel"]).max()
    assert moved > 1e-2  # it did something
    if rule != "adam":  # where loss and penalty leave a weight alone
        assert_trees_equal(in_loss["dense"]["kernel"][0], np.zeros(3, np.float32))
    # what is reported differs by the penalty, here of the params before the first step
    assert_trees_close(losses[0] - plain_losses[0], float(penalty(make_params())), rtol=1e-4, atol=0)
    assert (losses > plain_losses).all()


@pytest.mark.medium
def test_where_they_stop_agreeing():
    penalty, decays = DECAYS["l2"]
    clip = lambda: ts.rules.clip_by_global_norm(0.3)
    apart = lambda a, b: max(np.abs(x - y).max() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))

    in_loss, _ = train(ts.rules.chain(clip(), RULES["sgd"]()), penalised(penalty))
    decay_first, _ = train(ts.rules.chain(*decays(), clip(), RULES["sgd"]()), data_loss)
    clip_first, _ = train(ts.rules.chain(clip(), *decays(), RULES["sgd"]()), data_loss)
    assert apart(in_loss, decay_first) < 2e-6  # the penalty's gradient is clipped too
    assert apart(in_loss, clip_first) > 1e-3  # and not with a clip in front of the decay

    in_loss, _ = train(RULES["adam"](), penalised(penalty))
    decoupled, _ = train(
        ts.rules.adamw(0.03, weight_decay=RATE, mask={"dense": {"kernel": True, "bias": False}}), data_loss
    )
    assert apart(in_loss, decoupled) > 1e-3  # adamw's decay does not pass through the moments


def test_decay_of_a_leaf_without_gradient():
    """In the seeds a leaf that takes no part in the loss is not decayed; here it is, either way."""
    params = {"used": jnp.ones(2), "unused": jnp.ones(2)}
    loss_fn = lambda p, batch: jnp.sum(p["used"] * batch)
    penalty = lambda p, batch: loss_fn(p, batch) + RATE * l2(p)
    for rule, f in (
        (ts.rules.chain(ts.rules.add_decayed_weights(RATE), ts.rules.sgd(1.0)), loss_fn),
        (ts.rules.sgd(1.0), penalty),
    ):
        state, _ = ts.train_step(f)(ts.setup(rule, params), np.ones(2, np.float32))
        assert_trees_close(state.params["unused"], np.full(2, 1 - RATE), rtol=1e-6, atol=0)
