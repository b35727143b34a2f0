"""Populations: each member is its single run, in one program."""

import dataclasses
import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from jax.sharding import NamedSharding
from tests.helpers import assert_trees_close, assert_trees_equal, count_compiles, medium_if
from tsunax import testing
from tsunax.errors import DeviceError, HyperparameterError, StateError, WrongTypeError

NEEDS_EXPLICIT_AXES = pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="jax 0.7 raises for `jnp.asarray` in a vmap over explicit axes"
)
N, RATES = 4, np.logspace(-3, -1, 4)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(83, 8)).astype(np.float32)
Y = np.tanh(X[:, :3] @ RNG.normal(size=(3, 3)).astype(np.float32))


def make(key, rate, **options):
    params = {"w": jax.random.normal(key, (8, 16)) * 0.3, "v": jax.random.normal(key, (16, 3)) * 0.3}
    rule = ts.rules.chain(
        ts.rules.clip_by_global_norm(1.0), ts.rules.adam(ts.schedules.cosine_decay_schedule(rate, 60))
    )
    return ts.setup(rule, params, key=key, ema=0.9, **options)


def loss_fn(params, batch, key=None):
    x, y = batch
    hidden = jnp.tanh(x @ params["w"])
    if key is not None:
        hidden = hidden + 0.01 * jax.random.normal(key, hidden.shape)
    errors = jnp.mean((hidden @ params["v"] - y) ** 2, -1)
    return ts.Loss.mean(errors, metrics={"large": (errors > 0.1).astype(jnp.float32)})


def masked(params, batch, key, mask):
    x, y = batch
    hidden = jnp.tanh(x @ params["w"]) + 0.02 * jax.random.uniform(key, (len(x), 16))
    return ts.Loss.mean(jnp.mean((hidden @ params["v"] - y) ** 2, -1), where=mask)


@functools.cache
def some_runs():
    return ts.population(make, N, rate=RATES)


def taken(runs):
    copy = jax.tree.map(jnp.copy, runs)
    ts.train_step(loss_fn)(copy, (X, Y))
    return copy


def data():
    return ts.batches((X, Y), 16, shuffle=True)


def fit(state, step, **options):
    return ts.fit(step, state, data(), epochs=3, log_every=1, progress=False, **options)


KEYS = jax.random.split(jax.random.key(0), N)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_member_is_its_single_run(accumulate):
    """History, evaluation and state of three epochs, with seeds, rates, noise, schedules, clipping and averages."""
    step = ts.train_step(masked, accumulate=accumulate)
    scores = lambda state: ts.evaluate(ts.eval_step(loss_fn), ts.averaged(state), {"val": data()})
    runs, history = fit(ts.population(make, N, key=0, rate=RATES), step, evaluate=scores)
    for i in (0, N - 1):
        one, expected = fit(make(KEYS[i], float(RATES[i])), step, evaluate=scores)
        for name in ("loss", "grad_norm", "learning_rate", "val/loss"):
            np.testing.assert_allclose(history[f"{name}/{i}"], expected[name], rtol=2e-4, err_msg=name)
        taken = ts.populations.member(runs, i - N)
        assert_trees_close(taken.params, one.params, rtol=1e-3, atol=1e-5)
        assert_trees_equal(jax.random.key_data(taken.key), jax.random.key_data(one.key))
        assert int(taken.step) == int(one.step) == 18


def linear(params, batch, mask=None):
    x, y = batch
    errors = jnp.mean((x @ params["w"] - y) ** 2, -1)
    return ts.Loss.mean(errors, mask, metrics={"large": (errors > 0.1).astype(jnp.float32)})


@functools.cache
def linear_runs():
    setup = lambda key, rate: ts.setup(ts.rules.sgd(rate), {"w": jax.random.normal(key, (8, 3))}, key=key)
    return ts.population(setup, N, rate=RATES)


HALVES = {
    "whole": ({}, jax.jit),
    "eager": ({}, lambda f: f),
    "padded": ({"accumulate": 5}, jax.jit),
    "rows": ({"per_example": lambda g: g}, jax.jit),
}


@pytest.mark.parametrize("name", medium_if(lambda name: name != "whole", HALVES))
def test_both_halves_of_a_step_map_over_members_as_the_step_does(name):
    """Also in a map of the user, in which a member has no axis."""
    options, jit = HALVES[name]
    step, f = ts.train_step(linear, donate=False, **options), ts.value_and_grad(linear, **options)

    def halves(state, batch):
        loss, grads = f(state, batch)
        return ts.update(state, grads, loss=loss)

    runs, batch = linear_runs(), (X[:12], Y[:12])
    expected, info = step(runs, batch)
    state, found = jit(halves)(runs, batch)
    mapped, _ = jit(jax.vmap(halves, (0, None)))(runs, batch)
    for result in (state, mapped):
        assert_trees_close(result.params, expected.params, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(result.clock, expected.clock)
    assert_trees_close(
        (found.loss, found.grad_norm, found.metrics), (info.loss, info.grad_norm, info.metrics), rtol=1e-5, atol=1e-6
    )


def test_members_have_trained_parameters_batches_and_gradients_of_their_own():
    runs, f = linear_runs(), ts.value_and_grad(linear)
    at = jax.tree.map(lambda x: 2 * x, ts.trainable(runs))
    x, y = jax.tree.map(lambda x: x[:48].reshape(N, 12, *x.shape[1:]), (X, Y))
    loss, grads = f(runs, ts.populations.each((x, y)), at=at)
    errors = np.einsum("mri,mij->mrj", x, at["w"]) - y
    np.testing.assert_allclose(loss.compute(), np.mean(errors**2, (1, 2)), rtol=1e-5)
    np.testing.assert_allclose(grads["w"], 2 * np.einsum("mri,mrj->mij", x, errors) / 36, rtol=1e-4, atol=1e-6)
    state, _ = ts.update(runs, grads, loss=loss)
    expected = runs.params["w"] - RATES[:, None, None].astype(np.float32) * grads["w"]
    np.testing.assert_allclose(state.params["w"], expected, rtol=1e-5, atol=1e-6)
    of_one = jax.tree.map(lambda x: x[0], grads)
    with pytest.raises(StateError, match=r"each\[0\]\['w'\]: got float32\[8,3\], expected .* first axis of 4 members"):
        ts.update(runs, of_one)
    with pytest.raises(StateError, match=r"\(at=\)"):
        f(runs, (X, Y), at=of_one)
    with pytest.raises(StateError, match="a first axis of 4 members"):
        ts.train_step(linear)(runs, ts.populations.each((X[:3, None], Y[:3, None])))


def test_members_have_arguments_of_their_own_in_an_update():
    rule = ts.rules.chain(ts.rules.sgd(0.1), ts.rules.reduce_on_plateau(patience=0))
    runs = ts.population(lambda key: ts.setup(rule, {"w": jnp.ones(2)}), 3)
    values, grads = jnp.array([1.0, 2.0, 3.0]), {"w": jnp.ones((3, 2))}
    own, _ = ts.update(runs, grads, value=ts.populations.each(values))
    shared, _ = ts.update(runs, grads, value=jnp.float32(2))
    assert own.opt_state[1].best_value.tolist() == [1, 2, 3]
    assert shared.opt_state[1].best_value.tolist() == [2, 2, 2]


@pytest.mark.parametrize("shape", [(), (3,)])
def test_the_model_state_of_each_member_is_updated(shape):
    def counting(params, batch, model_state):
        mean = jnp.mean(batch[0] @ params["w"], 0)
        return ts.Loss.mean(jnp.sum(mean), model_state=0.5 * model_state + 0.5 * (mean if shape else mean.sum()))

    setup = lambda key: ts.setup(ts.rules.sgd(0.1), {"w": jax.random.normal(key, (8, 3))}, model_state=jnp.ones(shape))
    runs = ts.population(setup, N)
    new = ts.update_batch_stats(counting)(runs, (X, Y))
    means = np.einsum("rk,mkj->mj", X, runs.params["w"]) / len(X)
    np.testing.assert_allclose(new.model_state, 0.5 + 0.5 * (means if shape else means.sum(1)), rtol=1e-4)
    np.testing.assert_array_equal(new.calls, np.ones(N))


@pytest.mark.slow
def test_one_program_and_any_number_of_calls():
    step, runs = ts.train_step(loss_fn), ts.population(make, N, rate=RATES)
    testing.check_fused(dataclasses.replace(step), runs, data(), steps=18)
    for rate in (0.1, RATES):
        runs, _ = step(ts.adjust(runs, learning_rate=rate), (X[:16], Y[:16]))
    assert step.programs[None]._cache_size() == 1


@pytest.mark.medium
def test_a_member_that_fails_fails_alone():
    """Its steps are rejected, the others go on; only where all of them fail the run gives up."""
    step = ts.train_step(lambda params, batch: loss_fn(params, batch).compute() * params["s"])

    def with_scale(key, bad):
        params = {"w": jnp.ones((8, 16)) * 0.1, "v": jnp.ones((16, 3)) * 0.1, "s": bad}
        return ts.setup(ts.rules.adam(1e-2), params, key=key, trainable=["w", "v"])

    runs = ts.population(with_scale, 3, bad=np.array([1.0, np.nan, 1.0], np.float32))
    with pytest.warns(RuntimeWarning, match=r"rejected for members 1: .* 1?[01] so far"):
        runs, history = ts.fit(step, runs, data(), steps=20, log_every=1, progress=False)
    assert history["rejected/1"].tolist() == [*range(1, 21)] and not history["rejected/0"].any()
    assert history.marks[0] == (1, "rejected", "members 1")
    assert runs.step.tolist() == [20, 0, 20] and runs.rejected.tolist() == [0, 20, 0]
    assert np.isnan(history["loss/1"]).all() and history["loss/0"][-1] < history["loss/0"][0]
    runs = ts.population(with_scale, 2, bad=np.full(2, np.nan, np.float32))
    with pytest.warns(RuntimeWarning, match="rejected"), pytest.raises(ts.errors.NonFiniteError, match="10 in a row"):
        ts.fit(step, runs, data(), steps=20, progress=False)


def test_a_search_for_the_loss_scale_of_members_is_no_failure():
    start = lambda key, w: ts.setup(ts.rules.sgd(0.1), {"w": w}, precision="float16")
    runs = ts.population(start, 2, w=np.array([[0.0] * 4, [3.0] * 4], np.float32))
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"] - 1) ** 2))
    runs, history = ts.fit(step, runs, ts.batches(np.ones((16, 4), np.float32), 4), steps=6, progress=False)
    assert history.last("rejected/1") == runs.rejected[1] > runs.rejected[0] > 0


@pytest.mark.medium
def test_batches_of_their_own():
    step, runs = ts.train_step(loss_fn), ts.population(make, N, key=0, rate=RATES)
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(N)]
    _, info = step(runs, ts.populations.each(jax.tree.map(lambda *x: np.stack(x), *batches)))
    for i, batch in enumerate(batches):
        one = make(KEYS[i], float(RATES[i]))
        np.testing.assert_allclose(info.loss[i], step(one, batch)[1].loss, rtol=1e-5)


@pytest.mark.medium
def test_selected_members():
    runs = ts.population(make, N, rate=RATES)
    found = ts.populations.select(runs, [2, -2, 0])
    assert_trees_equal(found.params["w"], np.asarray(runs.params["w"])[[2, 2, 0]])
    np.testing.assert_allclose(ts.hyperparams(found)["learning_rate"], RATES[[2, 2, 0]], rtol=1e-6)
    found, info = ts.train_step(loss_fn)(found, (X[:16], Y[:16]))
    assert info.loss.shape == (3,) and info.loss[0] == info.loss[1] != info.loss[2]
    assert not runs.params["w"].is_deleted()


@pytest.mark.slow
def test_over_devices():
    """Members are shared by the devices, and none of them talks to another."""
    step, whole = ts.train_step(loss_fn), ts.population(make, 8, rate=np.logspace(-3, -1, 8))
    runs = ts.shard(whole, ts.mesh())
    assert {x.sharding.spec[0] for x in jax.tree.leaves(runs.params)} == {("data", "fsdp", "tensor")}
    text = step.lower(runs, (X[:16], Y[:16])).compile().as_text()
    talk = [line.strip() for line in text.splitlines() if re.search(r" all-| collective-", line)]
    assert all(re.search(r"= \w+\[8(,\d)?\]\S* all-gather\(", line) for line in talk), talk  # what info tells of each
    expected, rows = fit(ts.population(make, 8, rate=np.logspace(-3, -1, 8)), step)
    for per_call in ("auto", None):
        runs = ts.shard(ts.population(make, 8, rate=np.logspace(-3, -1, 8)), ts.mesh())
        runs, found = fit(runs, step, steps_per_call=per_call)
        np.testing.assert_allclose(found["loss/7"], rows["loss/7"], rtol=1e-4)
    assert isinstance(runs.clock.sharding, NamedSharding)
    val = ts.evaluate(ts.eval_step(loss_fn), runs, data())
    exact = ts.evaluate(ts.eval_step(loss_fn), expected, data())
    assert val == pytest.approx(exact, rel=1e-3)
    with pytest.raises(DeviceError, match=r"population at shard.*3 members, expected a multiple of 8 devices"):
        ts.shard(ts.population(make, 3, rate=RATES[:3]), ts.mesh())


@pytest.mark.medium
@pytest.mark.parametrize("explicit", [False, pytest.param(True, marks=NEEDS_EXPLICIT_AXES)])
def test_members_with_frozen_leaves_over_devices(explicit):
    made = functools.partial(ts.population, functools.partial(make, freezable=True), 8, rate=np.logspace(-3, -1, 8))
    step, frozen = ts.train_step(loss_fn), ts.freeze(made(), "w")
    before, batch = np.array(frozen.params["w"]), (X[:16], Y[:16])
    runs = ts.shard(ts.freeze(made(), "w"), ts.mesh(explicit=explicit))
    for _ in range(3):
        frozen, _ = step(frozen, batch)
        runs, _ = step(runs, batch)
    assert_trees_equal(runs.params["w"], before)
    assert_trees_close(runs.params, frozen.params, rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(runs.params["v"]) - np.asarray(made().params["v"])).max() > 1e-4


@NEEDS_EXPLICIT_AXES
def test_members_over_explicit_axes_are_fitted_and_evaluated():
    """The weight of a loss is a constant: it is on the mesh, as what depends on the members."""
    start = lambda key, rate: ts.setup(ts.rules.sgd(rate), {"w": jax.random.normal(key, (8, 3))})
    mean = lambda params, x: ts.Loss.mean(jnp.mean((x @ params["w"]) ** 2, 1))
    whole = ts.population(start, 8, rate=np.logspace(-3, -1, 8))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    runs = ts.shard(jax.tree.map(jnp.copy, whole), mesh)
    batches, step, score = [X[:16], X[16:32]], ts.train_step(mean), ts.eval_step(mean)
    assert ts.evaluate(score, runs, batches) == pytest.approx(ts.evaluate(score, whole, batches))
    runs, rows = ts.fit(step, runs, batches, steps=4, progress=False)
    whole, expected = ts.fit(step, whole, batches, steps=4, progress=False)
    assert_trees_close(runs.params, whole.params, rtol=1e-5, atol=1e-6)
    assert rows["loss/7"] == pytest.approx(expected["loss/7"])
    watching = ts.train_step(mean, watch=ts.Watch(numbers="max", every=1))
    watched = [watching(state, X[:16])[1].watch.named()["w/grads_max"] for state in (runs, whole)]
    assert_trees_close(*watched, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_run_of_a_population_goes_on():
    testing.check_resume(ts.train_step(loss_fn), ts.population(make, N, rate=RATES), data(), steps=18, at=7)


@pytest.mark.medium
@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.medium), 3])
def test_groups_of_members_are_the_whole_population(at_once):
    """One group after the other, for the memory of one group: the same numbers up to rounding."""
    step = ts.train_step(masked, accumulate=2)
    cut = dataclasses.replace(step, at_once=at_once)
    batches = ts.populations.each(
        jax.tree.map(lambda *x: np.stack(x), *[(X[16 * i : 16 * i + 16], Y[16 * i : 16 * i + 16]) for i in range(N)])
    )
    expected, wanted = step(ts.population(make, N, key=0, rate=RATES), batches)
    found, info = cut(ts.population(make, N, key=0, rate=RATES), batches)
    np.testing.assert_allclose(info.loss, wanted.loss, rtol=1e-5)
    assert_trees_close(found.params, expected.params, rtol=1e-4, atol=1e-6)
    assert found.calls.tolist() == [1] * N


@pytest.mark.medium
def test_groups_take_the_memory_of_one():
    """Temporary bytes by XLA's own count: 32 members at once, and 2."""
    big = jax.ShapeDtypeStruct((4096, 8), np.float32), jax.ShapeDtypeStruct((4096, 3), np.float32)
    runs = jax.eval_shape(lambda: ts.population(make, 32, rate=np.full(32, 0.01)))
    step = ts.train_step(loss_fn)

    def temporary(step):
        return step.lower(runs, big).compile().memory_analysis().temp_size_in_bytes

    assert temporary(dataclasses.replace(step, at_once=2)) < temporary(step) / 6


@pytest.mark.medium
def test_population_based_training():
    """The worst go on from copies of the best, moments too, with learning rates of their own."""
    step, runs = ts.train_step(loss_fn), ts.population(make, N, key=0, rate=RATES)
    runs, info = step(runs, (X[:16], Y[:16]))
    order, arange = np.argsort(info.loss), np.arange(N)
    is_worst = np.isin(arange, order[-2:])
    chosen = ts.populations.select(runs, np.where(is_worst, order[0], arange))
    for i in arange:
        source = order[0] if is_worst[i] else i
        assert_trees_equal(
            jax.tree.leaves(ts.populations.member(chosen, i).opt_state),
            jax.tree.leaves(ts.populations.member(runs, source).opt_state),
        )
        assert_trees_equal(ts.populations.member(chosen, i).params, ts.populations.member(runs, source).params)
    rates = np.where(is_worst, 0.5, 0.25).astype(np.float32)
    chosen = ts.adjust(chosen, learning_rate=rates)
    np.testing.assert_array_equal(ts.hyperparams(chosen)["learning_rate"], rates)


@pytest.mark.medium
def test_members_that_stop_alone():
    """To the bit they stay as they are, and the others go on as if nobody had stopped."""
    step, batches = ts.train_step(masked), list(data())[:4]
    runs = alone = ts.population(functools.partial(make, freezable=True), N, key=0, rate=RATES)
    step = dataclasses.replace(step, donate=False)
    for batch in batches[:2]:
        runs, _ = step(runs, batch)
        alone, _ = step(alone, batch)
    stopped = ts.freeze(runs, "**", members=[1, -1])
    for members in (np.arange(N) % (N - 1) == 1, [], np.zeros(N, bool)):
        assert np.any(ts.freeze(runs, "**", members=members).frozen) == (len(members) > 0 and np.any(members))
    with count_compiles() as count:
        for batch in batches[2:]:
            stopped, _ = step(stopped, batch)
    assert "train_step" not in count.compiled
    for batch in batches[2:]:
        alone, _ = step(alone, batch)
    parts = lambda state: (state.params, state.average.params, jax.tree.leaves(state.opt_state)[1:])
    of = lambda state, i: jax.tree.map(lambda x: np.asarray(x)[i], parts(state))
    for i in range(N):
        assert_trees_equal(of(stopped, i), of(runs if i in (1, N - 1) else alone, i))
    thawed, _ = step(ts.thaw(stopped, members=1), batches[0])
    moved = [not np.array_equal(of(thawed, i)[0]["w"], of(stopped, i)[0]["w"]) for i in range(N)]
    assert moved == [i != N - 1 for i in range(N)]
    with pytest.raises(StateError, match=rf"members at freeze\(\): got .*a mask, or .*below {N}"):
        ts.freeze(runs, "**", members=[N])
    with pytest.raises(StateError, match="members at thaw"):
        ts.thaw(ts.freeze(ts.populations.member(runs, 0), "**"), members=[0])


def test_equal_calls_compile_once():
    """Whatever function objects they are given; numbers that it reads and static parts are those of this call."""
    scale, base = 1.0, jnp.ones(2)

    def made(rate, n=3, **options):
        def make(key, rate):
            params = {"w": scale * base + jax.random.normal(key, (2,))}
            return ts.setup(ts.rules.sgd(rate), params, key=key, **options)

        return ts.population(make, n, rate=rate)

    rate = np.array([0.1, 0.2, 0.3], np.float32)
    first = made(rate)
    with count_compiles() as count:
        again = made(rate)
        halved = made(rate / 2)
    assert not count.compiles
    assert_trees_equal(again, first)
    assert jax.tree.leaves(again)[0].committed == jax.tree.leaves(first)[0].committed
    np.testing.assert_array_equal(ts.hyperparams(halved)["learning_rate"], rate / 2)
    assert made(rate, trainable="w").plan == first.plan
    assert made(rate, precision="bfloat16").plan.precision.compute == "bfloat16"  # in no array of the state
    scale = 2.0
    assert_trees_equal(made(rate).params["w"] - first.params["w"], np.ones((3, 2), np.float32))
    base = 3 * jnp.ones(2)
    np.testing.assert_allclose(made(rate).params["w"] - first.params["w"], 5, rtol=1e-6)
    jitted = jax.jit(made)(rate)
    np.testing.assert_allclose(jitted.params["w"] - first.params["w"], 5, rtol=1e-6)


def test_values_may_be_lists():
    assert_trees_equal(ts.population(make, 4, rate=RATES.tolist()), ts.population(make, 4, rate=RATES))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda runs: ts.population(make, 3, rate=RATES), StateError, r"'rate' at population.*\[4\].*first axis of 3"),
        (lambda runs: ts.population(make, 0, rate=RATES), HyperparameterError, "n at population.*0"),
        (lambda runs: ts.population(make, 2.0), WrongTypeError, "n at population"),
        (lambda runs: ts.population(lambda key: key, 2), StateError, "result at make"),
        (lambda runs: ts.population(make, 2, rate=np.array([0.1, np.nan])), HyperparameterError, r"learning_rate at .*got nan"),
        (lambda runs: ts.population(make, 2, rate=np.array([0.1, -0.1])), HyperparameterError, r"learning_rate at .*got -0.1"),
        *[(lambda runs, i=i: ts.populations.member(runs, i), StateError, r"indices at member\(\): got .*an index below 4") for i in (1.5, "a", None)],
        *[(lambda runs, i=i: jax.jit(ts.populations.member)(runs, i), StateError, r"indices at member\(\): got .*an index below 4") for i in (1.5, True, np.arange(2))],
        (lambda runs: jax.jit(ts.populations.select)(runs, np.array([True, False, True, False])), StateError, r"indices at select\(\): got bool\[4\]"),
        (lambda runs: ts.populations.member(runs, 4), StateError, "indices at member.*an index below 4"),
        (lambda runs: ts.populations.member(runs, True), StateError, "indices at member"),
        (lambda runs: ts.populations.member(make(KEYS[0], 0.1), 0), StateError, "runs at member.*a population"),
        (lambda runs: ts.populations.select(runs, [0, 4]), StateError, "indices at select.*below 4"),
        (lambda runs: ts.populations.select(runs, []), StateError, "indices at select"),
        (lambda runs: ts.populations.select(runs, 2), StateError, "indices at select"),
        (lambda runs: ts.train_step(loss_fn, at_once=0), HyperparameterError, "at_once at train_step.*an int ≥ 1"),
    ],
)  # fmt: skip
def test_what_cannot_be(call, kind, text):
    with pytest.raises(kind, match=text):
        call(some_runs())


def test_members_are_taken_by_traced_indices():
    runs = ts.population(make, 3, rate=np.array([0.1, 0.2, 0.3], np.float32))
    take = jax.jit(lambda i: (ts.populations.member(runs, i), ts.populations.select(runs, jnp.stack([i, i - 3]))))
    one, two = take(jnp.int32(1))
    assert_trees_equal(one, ts.populations.member(runs, 1))
    assert_trees_equal(two, ts.populations.select(runs, [1, 1]))


def test_members_to_freeze_are_values_and_each_one_once():
    runs = ts.population(lambda key: ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)}), 3, key=0)
    with pytest.raises(StateError, match="expected a mask, or different indices"):
        ts.freeze(runs, "w", members=np.array([0, 1, 0]))  # meant as a mask
    for members in ([True], [0.5]):
        with pytest.raises(StateError, match=r"members at freeze\(\): got list of 1"):
            ts.freeze(runs, "w", members=members)


HANGS = """
import jax, jax.numpy as jnp, numpy as np, tsunax as ts
init, shapes = jax.nn.initializers.orthogonal(1.0), [(4, 64), (64, 64), (64, 2), (4, 64), (64, 64), (64, 1)]
def make(_, seed):
    key = jax.random.key(seed)
    keys = jax.random.split(key)
    carry = (jax.random.uniform(keys[0], (4, 4)), jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int32)), keys[1]
    params = {str(i): init(jax.random.fold_in(key, i), shape) for i, shape in enumerate(shapes)}
    return ts.States(agent=ts.setup(ts.rules.adam(1e-3), params), carry=carry)
runs = ts.population(make, 4, seed=np.arange(4))
w = runs.agent.params["1"]
np.testing.assert_allclose(w @ w.swapaxes(1, 2), np.tile(np.eye(64), (4, 1, 1)), atol=1e-5)
"""


@pytest.mark.medium
def test_a_population_of_orthogonal_weights_does_not_wait_forever():
    """As the members' decompositions did under vmap, with a thread pool of two."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")} | {"NPROC": "2"}
    done = subprocess.run([sys.executable, "-c", HANGS], env=env, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
