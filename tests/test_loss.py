"""What a loss function returns: a sum and its weight, which adds, multiplies and prints as the mean would."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from jax.sharding import PartitionSpec as P
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
    assert not loss.terms and not other.terms


def test_losses_under_one_mask_are_exact_over_micro_batches():
    mask = jnp.arange(len(X)) % 3 > 0
    loss_fn = lambda p, x, mask: ts.Loss.mean(values(p, x), mask) + ts.Loss.mean(values(p, x) ** 2, mask)
    state = ts.setup(ts.rules.sgd(0.1), PARAMS)
    whole, grads = ts.value_and_grad(loss_fn)(state, X, mask=mask)
    cut, same = ts.value_and_grad(loss_fn, accumulate=4)(state, X, mask=mask)
    assert_trees_close((cut.compute(), same), (whole.compute(), grads), rtol=2e-6, atol=1e-6)


# Two means with weights of their own. In four micro-batches (rows i, i + 4), or on four devices (rows 2i, 2i + 1), one
# has no label at all.
LABELED = {"of micro-batches": np.array([1, 0, 0, 3, 1, 1, 0, 0]), "of devices": np.array([1, 0, 0, 0, 1, 1, 0, 2])}
LABELED = {name: mask.astype(np.float32) for name, mask in LABELED.items()}


def partly(params, batch):
    x, labeled = batch
    few = ts.Loss.mean(values(params, x), labeled, metrics={"few": jnp.sin(values(params, x))})
    wide = jnp.tanh(x * params["w"][None])
    return 2 * (few + 0.3 * ts.Loss.mean(wide, metrics={"wide": jnp.mean(wide)})) + penalty(params)


def partly_expected(params, batch):
    x, labeled = batch
    few = jnp.sum(values(params, x) * labeled) / jnp.maximum(jnp.sum(labeled), 1e-9)
    return 2 * (few + 0.3 * jnp.mean(jnp.tanh(x * params["w"][None]))) + penalty(params)


def assert_partly(found, batch, params=PARAMS, **tolerance):
    expected = jax.value_and_grad(partly_expected)(params, batch)
    assert_trees_close((found[0].compute(), found[1]), expected, **{"rtol": 2e-6, "atol": 1e-6} | tolerance)


WITH_TERMS = {
    "one batch": {},
    "2 micro-batches": {"accumulate": 2},
    "4 micro-batches": {"accumulate": 4},
    "remat": {"accumulate": 4, "remat": True},
    "noise scale": {"accumulate": 2, "noise_scale": True},
    "row by row": {"per_example": lambda g: g},
    "row by row in micro-batches": {"accumulate": 2, "per_example": lambda g: g},
    "drop": {"accumulate": 4, "on_nonfinite": "drop"},
}


@pytest.mark.parametrize("name", WITH_TERMS)
@pytest.mark.parametrize("mask", LABELED)
def test_losses_with_weights_of_their_own_add_exactly(name, mask):
    state, batch = ts.setup(ts.rules.sgd(0.1), PARAMS), (X, LABELED[mask])
    loss, grads = jax.jit(ts.value_and_grad(partly, **WITH_TERMS[name]))(state, batch)
    assert_partly((loss, grads), batch)
    few = np.sum(np.sin(values(PARAMS, X)) * batch[1]) / np.sum(batch[1])
    wide = np.mean(np.tanh(X * PARAMS["w"][None]))
    metrics = {name: m.compute() for name, m in loss.metrics.items()}
    assert_trees_close(metrics, {"few": few, "wide": wide}, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_terms_are_exact_over_devices(accumulate):
    """Sharded, and inside `shard_map`, where each device has rows of its own."""
    state, batch = ts.setup(ts.rules.sgd(0.1), PARAMS), (X, LABELED["of devices"])
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    f = ts.value_and_grad(partly, axis_name="rows", accumulate=accumulate)
    on_axes = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("rows")), out_specs=P())
    assert_partly(jax.jit(on_axes)(state, batch), batch)
    grads = jax.grad(partly_expected)(PARAMS, batch)
    expected = {"w": PARAMS["w"] - 0.1 * grads["w"]}
    sharded = ts.shard(state, ts.mesh(devices=jax.devices()[:4]))
    state, info = ts.train_step(partly, accumulate=accumulate)(sharded, batch)
    assert_trees_close((state.params, info.loss), (expected, partly_expected(PARAMS, batch)), rtol=2e-6, atol=1e-6)


def test_terms_of_members_and_under_a_loss_scale():
    batch, rates = (X, LABELED["of micro-batches"]), np.array([0.1, 0.2], np.float32)
    moved = lambda rate: PARAMS["w"] - rate * jax.grad(partly_expected)(PARAMS, batch)["w"]
    runs = ts.population(lambda key, rate: ts.setup(ts.rules.sgd(rate), PARAMS), 2, rate=rates)
    runs, _ = ts.train_step(partly, accumulate=4)(runs, batch)
    assert_trees_close(runs.params["w"], jax.vmap(moved)(rates), rtol=2e-6, atol=1e-6)
    state = ts.setup(ts.rules.sgd(0.1), PARAMS, loss_scale=1024.0)
    state, _ = ts.train_step(partly, accumulate=4)(state, batch)
    assert_trees_close(state.params["w"], moved(0.1), rtol=2e-6, atol=1e-6)


def test_a_dropped_micro_batch_leaves_every_term():
    x = np.where(np.arange(8)[:, None] % 4 == 3, np.nan, X)
    mask, taken = LABELED["of micro-batches"], np.arange(8) % 4 != 3
    state = ts.setup(ts.rules.sgd(0.1), PARAMS)
    found = jax.jit(ts.value_and_grad(partly, accumulate=4, on_nonfinite="drop"))(state, (x, mask))
    assert_partly(found, (X[taken], mask[taken]))
    assert float(jnp.sum(found[0].dropped)) > 0


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_term_without_weight_adds_nothing_and_no_weight_at_all_is_nan(accumulate):
    state, none = ts.setup(ts.rules.sgd(0.1), PARAMS), np.zeros(8, np.float32)
    f = jax.jit(ts.value_and_grad(partly, accumulate=accumulate))
    assert_partly(f(state, (X, none)), (X, none))
    both = lambda p, batch: (
        ts.Loss.mean(values(p, batch[0]), batch[1]) + ts.Loss.mean(batch[0] * p["w"][None], batch[2])
    )
    step = ts.train_step(both, accumulate=accumulate, donate=False)
    _, info = step(state, (X, none, none))
    assert np.isnan(info.loss) and not info.applied and float(info.weight) == 0
    _, info = step(state, (X, MASK, none))
    assert info.applied and float(info.weight) == MASK.sum()
    few = MASK * (np.arange(8) % 4 != 3)  # with four micro-batches, the last one has no weight in either
    half = few * (np.arange(8) < 4)
    expected = lambda p: sum(
        jnp.sum(v * w) / np.sum(w) for v, w in ((values(p, X), few), (jnp.mean(X * p["w"][None], 1), half))
    )
    found = jax.jit(ts.value_and_grad(both, accumulate=accumulate))(state, (X, few, half))
    found = found[0].compute(), found[1]
    assert_trees_close(found, jax.value_and_grad(expected)(PARAMS), rtol=2e-6, atol=1e-6)


def test_the_weight_of_a_sum_does_not_depend_on_the_cut():
    """It is the larger one of the batch, also for rules that average calls by weight."""
    first = np.float32(np.arange(8) % 4 < 2)
    state, masks = ts.setup(ts.rules.sgd(0.1), PARAMS), (first, 1 - first)
    both = lambda p, b: ts.Loss.mean(values(p, b[0]), b[1]) + ts.Loss.mean(values(p, b[0]) ** 2, b[2])
    expected = max(mask.sum() for mask in masks)
    assert sum(max(a[i::4].sum() for a in masks) for i in range(4)) > expected
    penalized = lambda p, b: both(p, b) + penalty(p) + 2 * penalty(p)
    for loss_fn, options in itertools.product((both, penalized), ({}, {"accumulate": 4}, {"per_example": lambda g: g})):
        step = ts.train_step(loss_fn, donate=False, **options)
        assert float(step(state, (X, *masks))[1].weight) == expected


def test_terms_merge_over_batches_and_in_a_scan():
    state, batch = ts.setup(ts.rules.sgd(0.1), PARAMS), (X, LABELED["of micro-batches"])
    parts = [(batch[0][at], batch[1][at]) for at in (slice(0, 2), slice(2, 3), slice(3, 8))]
    expected = partly_expected(PARAMS, batch)
    scores = ts.evaluate(ts.eval_step(partly), state, parts)
    assert_trees_close(scores["loss"], expected, rtol=2e-6, atol=1e-6)
    assert_trees_close(scores["few"], jnp.sum(jnp.sin(values(PARAMS, X)) * batch[1]) / 6, rtol=2e-6, atol=1e-6)
    score = ts.eval_step(partly)
    merge = lambda loss, part: (loss.merge(score.pure(state, part, {})), None)
    rows = jax.tree.map(lambda x: x[:, None], batch)
    first = score(state, jax.tree.map(lambda x: x[0], rows))
    loss = jax.lax.scan(merge, first, jax.tree.map(lambda x: x[1:], rows))[0]
    assert_trees_close(loss.compute(), expected, rtol=2e-6, atol=1e-6)


def test_each_term_needs_the_mask_of_padding():
    loss_fn = lambda p, x, mask: ts.Loss.mean(values(p, x), mask) + ts.Loss.mean(x * p["w"][None])
    state = ts.setup(ts.rules.sgd(0.1), PARAMS)
    with pytest.raises(LossError, match="mask at loss_fn: got a loss that does not use it"):
        ts.train_step(loss_fn)(state, X, mask=MASK)


def test_the_weights_of_terms_cost_no_second_pass():
    """Micro-batches need the weights of the whole batch first: XLA drops all else of that pass."""
    state, batch = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones((64, 64))}), (jnp.ones((32, 64)), jnp.ones(32))
    rows = lambda p, x: jnp.sum(jnp.tanh(x @ p["w"]), -1)
    two = lambda p, b: ts.Loss.mean(rows(p, b[0]), b[1]) + ts.Loss.mean(rows(p, b[0]) ** 2)
    one = lambda p, b: ts.Loss.mean(rows(p, b[0]) + rows(p, b[0]) ** 2, b[1])
    flops = [ts.train_step(f, accumulate=4).lower(state, batch).compile().cost_analysis()["flops"] for f in (one, two)]
    assert flops[1] < 1.05 * flops[0]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda a: a.merge(a + ts.Loss.mean(jnp.ones(3))),
            r"other at Loss.merge\(\): got 2 weights, metrics \['m'\], expected 1 weights, metrics \['m'\]",
        ),
        (lambda a: a + dataclasses.replace(a), r"metric 'm' at Loss \+ Loss"),
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
