"""What a loss function returns: a sum and its weight, which adds, multiplies and prints as the mean would."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests.helpers import assert_trees_close
from tsunax.errors import LossError

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
MASK = np.array([1, 1, 0, 1, 0, 1, 1, 1], np.float32)
PARAMS = {"w": jnp.array([0.5, -1.0, 2.0])}
values = lambda params, x: (x @ params["w"] - 1) ** 2
plain = lambda params, x: jnp.mean(values(params, x))
penalty = lambda params: 0.1 * jnp.sum(params["w"] ** 2)


def test_it_is_read_as_a_number():
    loss = ts.Loss.mean(jnp.array([1.0, 3.0, 8.0]), jnp.array([1, 1, 0]))
    assert float(loss) == 2.0
    assert f"{loss:.3f}" == "2.000" and f"{loss:>8.1e}" == " 2.0e+00"


def test_it_prints_the_loss_and_what_is_known():
    loss = ts.Loss.mean(jnp.array([1.0, 3.0]), metrics={"worst": 3.0, "mean": ts.metrics.Mean.of(jnp.ones(3))})
    assert repr(loss) == str(loss) == f"{loss}" == "Loss(2, weight=2, worst=3, mean=1)"
    assert repr(ts.Loss.mean(jnp.float32(0.25))) == "Loss(0.25)"
    assert repr(ts.Loss(3.0)) == "Loss(total=3)"
    assert repr(ts.Loss(jnp.ones(4), jnp.ones(4))) == "Loss(float32[4], weight=float32[4])"  # of a population
    seen = []
    jax.jit(lambda x: seen.append(repr(ts.Loss(x, 2.0))))(1.0)
    assert seen == ["Loss(float32[], weight=2)"]
    assert "float32" in repr(jax.eval_shape(lambda: ts.Loss.mean(jnp.ones(3))))


OF_NUMBERS = {  # a Loss, and the scalar that it stands for
    "plus a penalty": (lambda p, v, m: m + penalty(p), lambda p, v, m: m + penalty(p)),
    "a penalty before": (lambda p, v, m: penalty(p) + m, lambda p, v, m: m + penalty(p)),
    "regularize": (lambda p, v, m: m + ts.regularize.l2(p), lambda p, v, m: m + ts.regularize.l2(p)),
    "minus": (lambda p, v, m: 3 - (m - penalty(p)) / 2, lambda p, v, m: 3 - (m - penalty(p)) / 2),
    "times": (lambda p, v, m: np.float32(0.5) * m * jnp.float32(3), lambda p, v, m: 1.5 * m),
    "negative": (lambda p, v, m: -m, lambda p, v, m: -m),
    "sum": (lambda p, v, m: sum([m, 2 * m]), lambda p, v, m: 3 * m),
}


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_arithmetic_is_that_of_the_mean(name):
    """Loss and gradient, of a scalar mean and of values, in one batch and in micro-batches."""
    combined, expected = OF_NUMBERS[name]
    state = ts.setup(ts.rules.sgd(0.1), PARAMS)
    scalar = lambda p, x: expected(p, None, plain(p, x))
    loss, grads = jax.value_and_grad(scalar)(PARAMS, X)
    for mean in (lambda v: ts.Loss.mean(v), lambda v: ts.Loss.mean(jnp.mean(v)), lambda v: ts.Loss(jnp.sum(v), v.size)):
        loss_fn = lambda p, x, mean=mean: combined(p, None, mean(values(p, x)))
        for n in (1, 4):
            found, other = ts.value_and_grad(loss_fn, accumulate=n)(state, X)
            assert_trees_close((found.compute(), other), (loss, grads), rtol=2e-6, atol=1e-6)


def test_a_penalty_weighs_as_much_as_the_loss_under_a_mask():
    """Whatever the weights of the micro-batches, one of which is empty; and nothing of 0/0."""
    mask = np.array([1, 1, 0, 1, 0, 0, 1, 1], np.float32)
    expected = lambda p, x: jnp.sum(values(p, x) * mask) / jnp.sum(mask) + penalty(p)
    loss, grads = jax.value_and_grad(expected)(PARAMS, X)
    loss_fn = lambda p, x, mask: ts.Loss.mean(values(p, x), mask) + penalty(p)
    state = ts.setup(ts.rules.sgd(0.1), PARAMS)
    for n in (1, 4):
        found, other = ts.value_and_grad(loss_fn, accumulate=n)(state, X, mask=mask)
        assert_trees_close((found.compute(), other), (loss, grads), rtol=2e-6, atol=1e-6)


def test_two_losses_of_one_weight_are_one():
    a = ts.Loss.mean(jnp.array([1.0, 3.0]), metrics={"a": 1.0})
    b = ts.Loss.mean(jnp.array([5.0, 7.0]), metrics={"b": 2.0}, model_state={"n": 1})
    both = a + b
    assert (float(both), float(both.weight), [*both.metrics], both.model_state) == (8.0, 2.0, ["a", "b"], {"n": 1})
    scalar = ts.Loss.mean(jnp.float32(0.5), metrics={"c": 1.0})
    for found in (a + scalar, scalar + a):
        assert (float(found), float(found.weight), {*found.metrics}) == (2.5, 2.0, {"a", "c"})
    assert (scalar + scalar.compute()).weight is None and float(a - a.compute()) == 0.0
    given = ts.Loss.mean(jnp.array([1.0, 3.0]), jnp.array([1.0, 0.0]))
    assert float(given + dataclasses.replace(given, total=given.total * 2)) == 3.0


@pytest.mark.parametrize("on", [lambda f: f, jax.jit])
def test_losses_under_one_mask_add_up(on):
    rows, wide = jnp.array([1.0, 3.0, 5.0]), jnp.arange(6.0).reshape(3, 2)
    mask = jnp.array([1.0, 0.0, 3.0])

    @on
    def both(mask):
        parts = [ts.Loss.mean(wide, mask), 0.5 * ts.Loss.mean(rows, mask), -ts.Loss.mean(rows, mask)]
        return sum(parts), ts.Loss.mean(rows, mask) + ts.Loss.mean(wide, mask) + 1.0

    loss, other = both(mask)
    assert_trees_close(float(loss), 3.5 - 0.5 * 4.0, rtol=1e-6, atol=0)
    assert_trees_close(float(other), 3.5 + 4.0 + 1.0, rtol=1e-6, atol=0)
    assert float(loss.weight) == 8.0 and float(other.weight) == 4.0
    with pytest.raises(LossError, match="two that may differ"):
        ts.Loss.mean(rows, mask) + ts.Loss.mean(rows, mask + 0)


def test_losses_under_one_mask_are_exact_over_micro_batches():
    mask = jnp.arange(len(X)) % 3 > 0
    loss_fn = lambda p, x, mask: ts.Loss.mean(values(p, x), mask) + ts.Loss.mean(values(p, x) ** 2, mask)
    state = ts.setup(ts.rules.sgd(0.1), PARAMS)
    whole, grads = ts.value_and_grad(loss_fn)(state, X, mask=mask)
    cut, same = ts.value_and_grad(loss_fn, accumulate=4)(state, X, mask=mask)
    assert_trees_close((cut.compute(), same), (whole.compute(), grads), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda a: a + ts.Loss.mean(jnp.ones(3)),
            r"weights at Loss \+ Loss: got two that may differ.*the same array as mask: ts.Loss.mean\(a, mask\)",
        ),
        (lambda a: a + dataclasses.replace(a), r"metric 'm' at Loss \+ Loss"),
        (lambda a: a + jnp.ones(2), r"operand at Loss \+ ...: got float32\[2\], expected one real number"),
        (lambda a: a * a, r"operand at Loss \* \.\.\.: got Loss, .*take the mean: loss.compute\(\)"),
        (lambda a: 1.0 / 2.0 * a / "x", r"operand at Loss / ...: got 'x' \(str\)"),
        (lambda a: ts.Loss(3.0) + 1.0, r"loss at Loss \+ ...: got a Loss without a weight"),
        (lambda a: float(ts.Loss(3.0)), r"loss at Loss.compute\(\): got a Loss without a weight.*Give ts.Loss\("),
    ],
)
def test_what_has_no_meaning_says_what_to_do(make, says):
    with pytest.raises(LossError, match=says):
        make(ts.Loss.mean(jnp.array([1.0, 3.0]), metrics={"m": 1.0}))


@pytest.mark.parametrize("f", [
    round, abs, int, lambda a: a > 1, lambda a: a > 1, lambda a: 2 / a,
    lambda a: a**2, lambda a: 2**a, lambda a: round(a, 3), lambda a: np.float32(2) / a,
    lambda a: jnp.ones(()) / a,
])  # fmt: skip
def test_a_loss_is_no_number(f):
    for loss in (ts.Loss.mean(jnp.array([1.0, 3.0])), ts.Loss.mean(jnp.array([1.0]), jnp.ones(1))):
        with pytest.raises(TypeError):
            f(loss)
