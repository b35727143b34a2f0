"""One gradient from many micro-batches: in a step and across calls, against the whole batch and plain optax."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests.helpers import assert_trees_close, assert_trees_equal, count_compiles, medium_if, relative
from tsunax.errors import HyperparameterError, LossError, RuleError, StateError, TsunaxError, WrongTypeError
from tsunax.rules.optimizers import CONTRIB, OPTAX

FEATURES, CLASSES = 5, 3
SHAPES = {"body": (FEATURES, 8), "head": (8, CLASSES)}


def make_params(seed=0):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


def make_batch(rows=32, seed=1):
    rng = np.random.default_rng(seed)
    # unequal masks: a mean of means is far off
    keep = np.arange(rows) % 7 < rng.integers(1, 7, rows)
    return {
        "x": rng.normal(size=(rows, FEATURES)).astype(np.float32),
        "y": rng.integers(0, CLASSES, rows),
        "keep": keep.astype(np.float32) * rng.uniform(0.1, 2, rows).astype(np.float32),
    }


def losses(params, batch):
    logits = jnp.tanh(batch["x"] @ params["body"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def masked(params, batch, mask):
    values = losses(params, batch)
    return ts.Loss.mean(values, batch["keep"] * mask, metrics={"loss": values, "rows": ts.metrics.Mean.of(values)})


def plain(params, batch):
    return losses(params, batch).mean()


def exact(params, batch):
    """In float64, by NumPy."""
    x, w, v = (np.asarray(a, np.float64) for a in (batch["x"], params["body"], params["head"]))
    hidden = np.tanh(x @ w)
    logits = hidden @ v
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    rows = np.arange(len(x))
    weights = np.asarray(batch["keep"], np.float64)
    slope = p.copy()
    slope[rows, batch["y"]] -= 1
    slope *= (weights / weights.sum())[:, None]
    grads = {"body": x.T @ (slope @ v.T * (1 - hidden**2)), "head": hidden.T @ slope}
    return -(np.log(p[rows, batch["y"]]) * weights).sum() / weights.sum(), grads


# --------------------------------------------------------------------------------------------------- within a step


@pytest.mark.parametrize("n", medium_if(lambda n: n != 3, [2, 3, 7, 16]))
def test_micro_batches_with_unequal_masks_are_the_whole_batch(n):
    state, batch = ts.setup(ts.rules.sgd(0.1), make_params()), make_batch(33)  # 33: only 3 divides it
    loss, grads = jax.jit(ts.value_and_grad(masked, accumulate=n))(state, batch)
    value, expected = exact(state.params, batch)
    assert relative(grads, expected) <= 1e-6
    np.testing.assert_allclose(loss.compute(), value, rtol=1e-6)
    np.testing.assert_allclose(loss.weight, batch["keep"].sum(), rtol=1e-6)
    whole, _ = jax.jit(ts.value_and_grad(masked))(state, batch)
    np.testing.assert_allclose(loss.metrics["loss"].compute(), whole.metrics["loss"].compute(), rtol=1e-6)
    parts = [jax.tree.map(lambda x, i=i: x[i::n], batch) for i in range(n)]
    means = [exact(state.params, part) for part in parts if part["keep"].sum() > 0]
    mean_of_means = jax.tree.map(lambda *xs: sum(xs) / len(xs), *[g for _, g in means])
    assert relative(mean_of_means, expected) > 1e-2  # the test can tell


def test_a_scalar_loss_weighs_its_rows():
    state, batch = ts.setup(ts.rules.sgd(0.1), make_params()), make_batch(24)
    whole, expected = jax.jit(ts.value_and_grad(plain))(state, batch)
    loss, grads = jax.jit(ts.value_and_grad(plain, accumulate=4))(state, batch)
    assert relative(grads, expected) <= 1e-6 and float(loss.weight) == float(whole.weight) == 24

    def padded(params, batch, mask):
        return jnp.sum(losses(params, batch) * mask) / jnp.sum(mask)

    loss, grads = jax.jit(ts.value_and_grad(padded, accumulate=5))(state, batch)
    assert relative(grads, expected) <= 1e-6 and float(loss.weight) == 24


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.uint8, bool])
def test_rows_are_counted_in_float32_whatever_the_mask_is_of(dtype):
    fn = lambda params, batch, mask: jnp.mean(batch @ params["w"] * mask)
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(1)})
    for rows in (301, 70_001):
        loss, _ = jax.jit(ts.value_and_grad(fn))(state, jnp.ones((rows, 1)), mask=jnp.ones(rows, dtype))
        assert float(loss.weight) == rows and loss.weight.dtype == jnp.float32


@pytest.mark.parametrize("accumulate", [1, 3])
def test_weights_are_data_and_have_no_gradient(accumulate):
    """Through a total alone it would be half of one, and through both another one for every way to cut a batch."""
    x, t = np.array([1.0, 2.0, 4.0], np.float32), jnp.array([1.0, 2.0, 3.0])

    def fn(params, batch):
        weights = params["t"][batch["i"]]
        return ts.Loss.mean(batch["x"] * params["w"], weights, metrics={"x": ts.metrics.Mean.of(batch["x"], weights)})

    state, batch = ts.setup(ts.rules.sgd(0.1), {"w": jnp.float32(1), "t": t}), {"x": x, "i": np.arange(3)}
    loss, grads = ts.value_and_grad(fn, accumulate=accumulate)(state, batch)
    np.testing.assert_allclose([loss.compute(), grads["w"]], [17 / 6, 17 / 6], rtol=1e-6)
    np.testing.assert_array_equal(grads["t"], np.zeros(3))


@pytest.mark.medium
@pytest.mark.parametrize("kind", [np.asarray, list, tuple])
def test_a_mask_may_be_of_any_kind_also_outside_of_jit(kind):
    """NumPy's and JAX's ones are told apart inside: a mask that nobody gave is NumPy's, and lets every row through."""
    averaged = lambda params, batch, mask: ts.Loss.mean(batch * params["w"], mask)
    plain = lambda params, batch, mask: jnp.sum(batch * params["w"] * mask) / jnp.sum(mask)
    unnamed = lambda params, batch, **given: averaged(params, batch, given["mask"])
    state, x, mask = ts.setup(ts.rules.sgd(0.1), {"w": jnp.float32(1)}), jnp.array([1.0, 2, 3, 4]), kind([1, 0, 1, 0])
    for fn in (averaged, plain, unnamed):
        for accumulate in (1, 2):
            f = ts.value_and_grad(fn, accumulate=accumulate)
            for loss, grads in (f(state, x, mask=mask), jax.jit(f)(state, x, mask=mask)):
                assert [float(n) for n in (loss.compute(), loss.weight, grads["w"])] == [2, 2, 2]


def test_a_mean_over_nothing_adds_nothing_to_an_evaluation():
    fn = lambda params, batch, mask: jnp.sum(batch @ params["w"] * mask) / jnp.sum(mask)
    state, evaluate = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(1)}), ts.eval_step(fn)
    some, none = (evaluate(state, jnp.full((3, 1), 2.0), mask=jnp.full(3, keep)) for keep in (1.0, 0.0))
    for both in (some.merge(none), none.merge(some)):
        assert float(both.compute()) == 2 and float(both.weight) == 3


@pytest.mark.medium
def test_a_fully_masked_micro_batch_is_harmless():
    batch = make_batch(12)
    batch["keep"][1::4] = 0
    batch["x"][1::4] = np.nan

    def fn(params, batch):
        values = losses(params, batch)
        return jnp.sum(values * batch["keep"]) / jnp.sum(batch["keep"])  # 0 / 0 in one of four

    def weighed(params, batch):
        return ts.Loss(fn(params, batch) * jnp.sum(batch["keep"]), jnp.sum(batch["keep"]))

    state = ts.setup(ts.rules.sgd(0.1), make_params())
    rest = jax.tree.map(lambda x: np.delete(x, slice(1, None, 4), axis=0), batch)
    value, expected = exact(state.params, rest)
    loss, grads = ts.value_and_grad(weighed, accumulate=4)(state, batch)
    np.testing.assert_allclose(loss.compute(), value, rtol=1e-6)
    assert relative(grads, expected) <= 1e-6


@pytest.mark.medium
def test_each_micro_batch_has_its_key_and_the_model_state_of_the_one_before():
    def fn(params, batch, key, model_state):
        n = model_state["n"]
        noise = model_state["noise"].at[n % 4].set(jax.random.uniform(key))
        return ts.Loss.mean(batch @ params["w"], model_state={"n": n + 1, "last": batch[0, 0], "noise": noise})

    start = {"n": jnp.int32(0), "last": jnp.float32(0), "noise": jnp.zeros(4)}
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)}, key=0, model_state=start)
    batch, step = jnp.arange(16.0).reshape(8, 2), ts.train_step(fn, accumulate=4, donate=False)
    after, _ = step(state, batch)
    assert int(after.model_state["n"]) == 4 and float(after.model_state["last"]) == batch[3, 0]
    assert len(set(np.asarray(after.model_state["noise"]).tolist())) == 4
    again, _ = step(after, batch)
    assert not np.intersect1d(again.model_state["noise"], after.model_state["noise"]).size


@pytest.mark.medium
@pytest.mark.parametrize("where", [0, pytest.param(2, marks=pytest.mark.medium)])
@pytest.mark.parametrize("what", ["loss", pytest.param("gradient", marks=pytest.mark.medium)])
def test_a_bad_micro_batch_is_dropped_with_its_weight(what, where):
    def fn(params, batch, mask):
        out = masked(params, batch, mask)
        here = jnp.max(jnp.where(batch["bad"], 1.0, 0.0))
        bad = here * jnp.sqrt((1 - here) * params["head"][0, 0] ** 2)  # 0, and at 0 the slope is infinite, times 0
        bad = jnp.where(here > 0, jnp.nan, 0) if what == "loss" else bad
        return ts.Loss(out.total + bad, out.weight)

    batch = make_batch(12) | {"bad": np.arange(12) % 4 == where}
    state = ts.setup(ts.rules.sgd(0.1), make_params())
    good = jax.tree.map(lambda x: np.delete(x, slice(where, None, 4), axis=0), batch)
    value, expected = exact(state.params, good)
    loss, grads = ts.value_and_grad(fn, accumulate=4, on_nonfinite="drop")(state, batch)
    assert relative(grads, expected) <= 1e-6
    np.testing.assert_allclose([loss.compute(), loss.weight], [value, good["keep"].sum()], rtol=1e-6)
    dropped = [batch["keep"][i::4].sum() if i == where else 0 for i in range(4)]
    np.testing.assert_allclose(loss.dropped, dropped, rtol=1e-6)
    step = ts.train_step(fn, accumulate=4, on_nonfinite="drop", donate=False)
    after, info = step(state, batch)
    assert bool(info.applied) and float(info.dropped) > 0
    _, info = ts.train_step(fn, accumulate=4, donate=False)(state, batch)
    assert not bool(info.applied)
    after, info = step(state, batch | {"bad": np.ones(12, bool)})
    assert not bool(info.applied) and int(after.rejected) == 1
    _, info = step(ts.freeze(state, "head"), batch)
    assert (float(info.dropped) > 0) == (what == "loss")  # a step ignores gradients of frozen leaves


@pytest.mark.medium
def test_one_program_serves_all_batches_and_memory_is_that_of_one_micro_batch():
    step = ts.train_step(masked, accumulate=4)
    state = ts.setup(ts.rules.adam(0.1), make_params())
    state, _ = step(state, make_batch(32))
    with count_compiles() as c:
        for seed in range(3):
            state, _ = step(state, make_batch(32, seed))
    assert c.compiled.count("train_step") == 0

    wide = {"a": jnp.zeros((256, 2048)), "b": jnp.zeros((2048, 256))}
    fn = lambda params, x: jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)
    bytes_of = lambda step, rows: step.lower(ts.setup(ts.rules.sgd(0.1), wide), jnp.zeros((rows, 256))).compile()
    temp = lambda *args: bytes_of(*args).memory_analysis().temp_size_in_bytes
    gradient = sum(x.nbytes for x in jax.tree.leaves(wide))
    assert temp(ts.train_step(fn, accumulate=8), 8192) <= 1.1 * (temp(ts.train_step(fn), 1024) + gradient)
    assert temp(ts.train_step(fn), 8192) > 4 * temp(ts.train_step(fn, accumulate=8), 8192)


@pytest.mark.parametrize("n", [0, -2, 2.5, True, "4", None])
def test_only_counts_are_taken(n):
    kind = HyperparameterError if type(n) is int else WrongTypeError
    with pytest.raises(kind, match=r"accumulate at train_step\(\): got .*expected an int ≥ 1"):
        ts.train_step(plain, accumulate=n)
    if not callable(n):
        with pytest.raises(kind, match=r"every at accumulate\(\): got .*expected an int ≥ 1"):
            ts.rules.accumulate(ts.rules.sgd(0.1), every=n)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (make_batch(30), ["30 rows", "accumulate=4", "mask"]),
        ({**make_batch(32), "scale": np.float32(1)}, ["batch['scale']", "a scalar", "extra argument"]),
        ({**make_batch(32), "x": np.ones((28, FEATURES), np.float32)}, ["batch['x'] (28, 5)", "batch['y'] (32,)"]),
        ({}, ["rows at batch", "no arrays"]),
    ],
    ids=["does not divide", "a scalar", "uneven", "empty"],
)
def test_what_cannot_be_cut_is_told(batch, says):
    with pytest.raises(LossError) as caught:
        ts.train_step(lambda params, batch: jnp.float32(0) * params["body"].sum(), accumulate=4)(
            ts.setup(ts.rules.sgd(0.1), make_params()), batch
        )
    assert [part for part in says if part not in str(caught.value)] == []


# ------------------------------------------------------------------------------------------------------ across calls


def cut(batch, n):
    size = len(batch["x"]) // n
    return [jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], batch) for i in range(n)]


# lbfgs and sophia evaluate the loss elsewhere, across calls on the last batch alone; galore's projections come from an
# SVD, which amplifies rounding; noisy_sgd wants a key, and optimistic_adam is deprecated
OTHERS = ("lbfgs", "sophia", "galore", "noisy_sgd", "optimistic_adam")


QUICK = ("adam", "adafactor")
MEDIUM = ("reduce_on_plateau", "schedule_free_adamw")
EVERY = [name for name in (*OPTAX, *CONTRIB) if name not in OTHERS]


MARKS = dict.fromkeys(QUICK, ()) | dict.fromkeys(MEDIUM, pytest.mark.medium)


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, pytest.mark.slow)) for n in EVERY])
def test_windows_give_every_rule_the_numbers_of_the_weighted_mean(name):
    """Six updates from four calls each; that a step's own accumulation gives this mean is tested above."""
    factory = getattr(ts.rules, name)
    rate = factory.__signature__.parameters.get("learning_rate")
    rule = factory(0.01) if rate is not None and rate.default is rate.empty else factory()
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: rng.normal(size=(6, 4, *x.shape)).astype(np.float32), make_params())
    weights = rng.uniform(0.1, 2, (6, 4)).astype(np.float32)
    values = rng.uniform(1, 2, (6, 4)).astype(np.float32)

    def mean(x):
        w = weights.reshape(*weights.shape, *(1,) * (x.ndim - 2)).astype(np.float64)
        return ((w * x).sum(1) / w.sum(1)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def train(rule, grads, values, weights):
        def one(state, given):
            g, v, w = given
            return ts.update(state, g, loss=ts.Loss(v * w, w))[0], None

        return jax.lax.scan(one, ts.setup(rule, make_params()), (grads, values, weights))[0]

    flat = jax.tree.map(lambda x: x.reshape(24, *x.shape[2:]), (grads, values, weights))
    gathered = train(ts.rules.accumulate(rule, every=4), *flat)
    whole = train(rule, jax.tree.map(mean, grads), mean(values), weights.sum(1))
    assert int(gathered.step) == int(whole.step) == 6 and int(gathered.calls) == 24
    assert_trees_close(gathered.params, whole.params, rtol=1e-4, atol=1e-5)


def test_the_rule_inside_sees_the_mean_of_its_window_and_nothing_in_between():
    """Optimisers.jl's documented example: AccumGrad(2), WeightDecay(0.01), Descent(0.1)."""
    rule = ts.rules.accumulate(ts.rules.chain(ts.rules.add_decayed_weights(0.01), ts.rules.sgd(0.1)), every=2)
    state = ts.setup(rule, {"x": jnp.float32(1), "y": jnp.float32(2)})
    before = state.params
    state, info = ts.update(state, {"x": jnp.float32(33), "y": jnp.float32(0)})
    assert_trees_equal(state.params, before)
    assert not bool(info.applied) and int(info.verdict) == -1 and int(state.step) == 0
    state, info = ts.update(state, {"x": jnp.float32(0), "y": jnp.float32(444)})
    np.testing.assert_allclose([state.params["x"], state.params["y"]], [-0.651, -20.202], rtol=1e-6)
    assert bool(info.applied) and int(state.step) == 1 and int(state.calls) == 2


def test_schedules_and_averages_wait_for_the_window():
    schedule = ts.schedules.linear_schedule(1.0, 0.0, 10)
    state = ts.setup(ts.rules.accumulate(ts.rules.sgd(schedule), every=3), {"w": jnp.zeros(1)}, ema=0.5)
    moved = []
    for _ in range(9):
        before = float(state.params["w"][0])
        state, _ = ts.update(state, {"w": -jnp.ones(1)})
        moved.append(float(state.params["w"][0]) - before)
    np.testing.assert_allclose(moved, [0, 0, 1, 0, 0, 0.9, 0, 0, 0.8], rtol=1e-6)
    np.testing.assert_allclose(ts.averaged(state).params["w"], [0.5 * (0.5 * 0.5 + 0.5 * 1.9) + 0.5 * 2.7], rtol=1e-6)


@pytest.mark.medium
def test_a_window_may_follow_a_schedule():
    every = ts.schedules.piecewise_constant_schedule(1.0, {2: 3.0})
    state = ts.setup(ts.rules.accumulate(ts.rules.sgd(0.1), every=every), {"w": jnp.zeros(1)})
    applied = []
    for _ in range(8):
        state, info = ts.update(state, {"w": jnp.ones(1)})
        applied.append(bool(info.applied))
    assert applied == [True, True, False, False, True, False, False, True]


@pytest.mark.medium
def test_a_flush_that_is_rejected_counts():
    clip = ts.rules.clip_by_norm(1.0, p=4)  # 1e12 to the fourth is beyond float32
    state = ts.setup(ts.rules.accumulate(ts.rules.chain(clip, ts.rules.sgd(1.0)), every=4), {"w": jnp.zeros(1)})
    state, _ = ts.update(state, {"w": jnp.full(1, 1e12)})
    after = ts.flush(state)
    assert [int(n) for n in after.clock] == [0, 2, 1, 1]
    assert_trees_equal((after.params, after.opt_state), (state.params, state.opt_state))


def test_spikes_are_looked_for_in_calls_and_not_in_windows():
    """A window that is rejected stays, and so would be every later one."""
    rule = ts.rules.accumulate(ts.rules.chain(ts.rules.reject_spikes(), ts.rules.sgd(0.1)), every=2)
    with pytest.raises(RuleError, match=r"reject_spikes at accumulate\(\): got it inside, expected chain\(reject"):
        ts.setup(rule, {"w": jnp.zeros(1)})


@pytest.mark.parametrize("value", [np.nan, np.inf, -3.0, 0.0, "4", None])
def test_a_schedule_of_no_count_is_refused(value):
    with pytest.raises(TsunaxError, match=r"every at accumulate\(\), step 0 of its schedule: got"):
        ts.rules.accumulate(ts.rules.sgd(0.1), every=lambda step: value)


def test_flush_divides_by_what_the_window_holds():
    state = ts.setup(ts.rules.accumulate(ts.rules.sgd(1.0), every=4), {"w": jnp.zeros(1)})
    for g in (1.0, 5.0):
        state, _ = ts.update(state, {"w": jnp.full(1, g)})
    state = ts.flush(state)
    assert float(state.params["w"][0]) == -3.0 and int(state.step) == 1
    with count_compiles() as count:
        again = ts.flush(state)
    assert not count.compiles  # at the end of every epoch, the same program
    assert_trees_equal(again.params, state.params)
    assert int(again.step) == 1


@pytest.mark.parametrize("bad", medium_if(np.isinf, [np.nan, np.inf, -np.inf]))
def test_a_bad_call_leaves_the_window_as_it_was(bad):
    def run(gradients, update):
        state = ts.setup(ts.rules.accumulate(ts.rules.adam(0.1), every=2), {"w": jnp.ones(2)})
        for g in gradients:
            state, _ = update(state, {"w": jnp.full(2, g, jnp.float32)})
        return state

    expected = run([1.0, 3.0], ts.update)
    assert_trees_equal(run([1.0, bad, 3.0], ts.update).params, expected.params)
    rule = ts.rules.accumulate(ts.rules.adam(0.1), every=2)
    params, opt_state = {"w": jnp.ones(2)}, rule.init({"w": jnp.ones(2)})
    for g in (1.0, bad, 3.0):  # in plain optax code nobody guards
        updates, opt_state = rule.update({"w": jnp.full(2, g, jnp.float32)}, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_trees_close(params, expected.params, rtol=1e-6, atol=1e-7)


@pytest.mark.medium
def test_under_vmap_and_in_groups_and_frozen():
    def run(rate):
        state = ts.setup(ts.rules.accumulate(ts.rules.sgd(rate), every=2), {"w": jnp.zeros(1)})
        for g in (1.0, 3.0):
            state, _ = ts.update(state, {"w": jnp.full(1, g)})
        return state.params["w"]

    np.testing.assert_allclose(jax.vmap(run)(jnp.array([0.1, 1.0])), [[-0.2], [-2.0]], rtol=1e-6)
    rule = ts.rules.partition({"a": ts.rules.accumulate(ts.rules.sgd(1.0), every=2), "b": ts.rules.sgd(1.0)})
    state = ts.setup(ts.rules.accumulate(ts.rules.adam(1.0), every=2), {"a": jnp.zeros(1), "b": jnp.zeros(1)})
    state, _ = ts.update(state, {"a": jnp.ones(1), "b": jnp.ones(1)})
    state = ts.freeze(state, "a")
    before = [x for x in jax.tree.leaves(state.opt_state)]
    state, _ = ts.update(state, {"a": jnp.ones(1), "b": jnp.ones(1)})
    assert float(state.params["a"][0]) == 0 and float(state.params["b"][0]) != 0 and before
    state = ts.setup(rule, {"a": jnp.zeros(1), "b": jnp.zeros(1)})
    for _ in range(2):
        state, _ = ts.update(state, {"a": jnp.ones(1), "b": jnp.ones(1)})
    assert float(state.params["a"][0]) == -1.0


def ones(*names):
    return {name: jnp.ones(1) for name in names}


def zeros(*names):
    return {name: jnp.zeros(1) for name in names}


def test_a_clip_in_the_window_of_a_group_sees_no_single_call_of_other_groups():
    window = ts.rules.accumulate(ts.rules.chain(ts.rules.clip_by_global_norm(1.0), ts.rules.sgd(1.0)), every=2)
    rule = ts.rules.partition({"a": window, "b": ts.rules.sgd(1.0)})
    for grads_of_b in ((0.0, 0.0), (100.0, 0.0), (0.0, 100.0)):
        state = ts.setup(rule, {"a": jnp.zeros(1), "b": jnp.zeros(1)})
        for grad in grads_of_b:
            state, _ = ts.update(state, {"a": jnp.full(1, 3.0), "b": jnp.full(1, grad)})
        assert float(state.params["a"][0]) == -1


def test_a_rule_beside_a_window_moves_on_every_call():
    rule = ts.rules.partition({"a": ts.rules.accumulate(ts.rules.sgd(0.1), every=2), "b": ts.rules.sgd(0.1)})
    state = ts.setup(rule, zeros("a", "b"))
    for _ in range(3):
        state, info = ts.update(state, ones("a", "b"))
        assert bool(info.applied)
    np.testing.assert_allclose([state.params["a"][0], state.params["b"][0]], [-0.1, -0.3], rtol=1e-6)
    state = ts.flush(state)
    np.testing.assert_allclose([state.params["a"][0], state.params["b"][0]], [-0.2, -0.3], rtol=1e-6)


def test_nothing_stands_behind_a_window_in_a_chain():
    with pytest.raises(RuleError, match=r"accumulate at chain\(\).*accumulate\(chain"):
        ts.rules.chain(ts.rules.accumulate(ts.rules.clip(1.0), every=2), ts.rules.adam(0.1))
    state = ts.setup(ts.rules.chain(ts.rules.clip(1.0), ts.rules.accumulate(ts.rules.sgd(1.0), every=2)), zeros("a"))
    for g in (5.0, 0.5):
        state, _ = ts.update(state, {"a": jnp.full(1, g)})
    assert float(state.params["a"][0]) == -0.75 and int(state.step) == 1  # clipped on every call


@pytest.mark.medium
def test_flush_touches_nothing_but_windows():
    plain = ts.setup(ts.rules.adam(0.1), zeros("a"))
    plain, _ = ts.update(plain, ones("a"))
    assert_trees_equal(ts.flush(plain), plain)
    rule = ts.rules.chain(ts.rules.reject_spikes(), ts.rules.accumulate(ts.rules.sgd(0.1), every=2))
    state = ts.setup(rule, zeros("a"), precision="float16", ema=0.5)
    for _ in range(2):
        state, _ = ts.update(state, ones("a"), loss=jnp.float32(1.0))
    flushed = ts.flush(state)  # an empty window
    assert int(flushed.calls) == int(state.calls) + 1
    assert_trees_equal(flushed.replace(calls=state.calls), state)
    state, _ = ts.update(state, ones("a"), loss=jnp.float32(1.0))
    flushed = ts.flush(state)
    assert_trees_equal((flushed.opt_state[0], flushed.loss_scale), (state.opt_state[0], state.loss_scale))
    np.testing.assert_allclose(flushed.params["a"], -0.2, rtol=1e-6)


def test_flush_gives_the_rule_the_loss_of_the_window():
    rule = ts.rules.accumulate(ts.rules.chain(ts.rules.sgd(0.1), ts.rules.reduce_on_plateau()), every=2)
    state, _ = ts.update(ts.setup(rule, zeros("a")), ones("a"), loss=jnp.float32(0.36))
    state = ts.flush(state)
    assert any(np.allclose(x, 0.36) for x in jax.tree.leaves(state.opt_state))


def test_what_was_gathered_before_a_freeze_ends_with_its_window():
    state = ts.setup(ts.rules.accumulate(ts.rules.sgd(1.0), every=2), zeros("a", "b"))
    state, _ = ts.update(state, ones("a", "b"))
    state, _ = ts.update(ts.freeze(state, "a"), ones("a", "b"))
    assert float(state.params["a"][0]) == 0 and float(state.params["b"][0]) == -1
    state = ts.thaw(state, "a")
    for _ in range(2):
        state, _ = ts.update(state, ones("a", "b"))
    assert float(state.params["a"][0]) == -1 and float(state.params["b"][0]) == -2


def test_a_weightless_micro_batch_leaves_the_model_state():
    def fn(params, batch, mask, model_state):
        seen = 0.9 * model_state + 0.1 * jnp.sum(mask * batch) / jnp.sum(mask)
        return ts.Loss.mean((params["w"] * batch - 1) ** 2, mask, model_state=seen)

    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.float32(0)}, model_state=jnp.float32(0))
    state, info = ts.train_step(fn, accumulate=4)(state, jnp.ones(3))
    assert bool(info.applied)
    np.testing.assert_allclose(state.model_state, 1 - 0.9**3, rtol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_model_state_that_nobody_asked_to_carry_raises_however_the_batch_is_cut(accumulate):
    fn = lambda params, batch: ts.Loss.mean(losses(params, batch), model_state={"n": jnp.float32(1)})
    with pytest.raises(StateError, match=r"leaf at model_state.*Give setup\(\.\.\., model_state=\.\.\.\)\."):
        ts.train_step(fn, accumulate=accumulate)(ts.setup(ts.rules.sgd(0.1), make_params()), make_batch(12))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_python_number_in_the_model_state_is_float32(accumulate):
    fn = lambda params, batch, model_state: ts.Loss.mean(batch @ params["w"], model_state={"n": 0.5, "i": 3})
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)}, model_state={"n": 1.0, "i": 2})
    after, _ = ts.train_step(fn, accumulate=accumulate)(state, jnp.ones((4, 2)))
    assert float(after.model_state["n"]) == 0.5 and int(after.model_state["i"]) == 3
    assert [str(x.dtype) for x in jax.tree.leaves(after.model_state)] == ["int32", "float32"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counted:
    inner: Any
    calls: Any


def test_a_wrapper_with_a_state_of_its_own_waits_for_the_window_inside():
    inside = ts.rules.accumulate(ts.rules.sgd(1.0), every=2)

    def update(updates, state, params=None, **extra):
        updates, inner = inside.update(updates, state.inner, params, **extra)
        return updates, Counted(inner, state.calls + 1)

    init = lambda params: Counted(inside.init(params), jnp.int32(0))
    state = ts.setup(optax.GradientTransformationExtraArgs(init, update), {"w": jnp.zeros(2)})
    steps = []
    for _ in range(4):
        state, info = ts.update(state, {"w": jnp.ones(2)})
        steps.append((int(state.step), bool(info.applied)))
    assert steps == [(0, False), (1, True), (1, False), (2, True)]
