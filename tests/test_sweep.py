"""Populations: each member is its single run, in one program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import tsunax as ts
from tests.helpers import assert_trees_close, assert_trees_equal
from tsunax.errors import DeviceError, HyperparameterError, StateError, WrongTypeError

N, RATES = 4, np.logspace(-3, -1, 4)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(83, 8)).astype(np.float32)
Y = np.tanh(X[:, :3] @ RNG.normal(size=(3, 3)).astype(np.float32))


def make(key, rate, **options):
    params = {"w": jax.random.normal(key, (8, 16)) * 0.3, "v": jax.random.normal(key, (16, 3)) * 0.3}
    rule = ts.rules.chain(ts.rules.clip_global_norm(1.0), ts.rules.adam(ts.schedules.cosine_decay_schedule(rate, 60)))
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
    hidden = jnp.tanh(x @ params["w"]) + 0.01 * jax.random.normal(key, (len(x), 16))
    return ts.Loss.mean(jnp.mean((hidden @ params["v"] - y) ** 2, -1), where=mask)


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
        taken = ts.member(runs, i - N)
        assert_trees_close(taken.params, one.params, rtol=1e-3, atol=1e-5)
        assert_trees_equal(jax.random.key_data(taken.key), jax.random.key_data(one.key))
        assert int(taken.step) == int(one.step) == 18


@pytest.mark.slow
def test_one_program_and_any_number_of_calls():
    step = ts.train_step(loss_fn)
    states = [fit(ts.population(make, N, rate=RATES), step, steps_per_call=k)[0] for k in (1, 5, "auto")]
    assert_trees_equal(states[0].params, states[1].params)
    assert_trees_equal(states[0].params, states[2].params)
    runs = ts.population(make, N, rate=RATES)
    for rate in (0.1, RATES):
        runs, _ = step(ts.adjust(runs, learning_rate=rate), (X[:16], Y[:16]))
    assert step._programs[None]._cache_size() == 1


def test_a_member_that_fails_fails_alone():
    """Its steps are rejected, the others go on; only where all of them fail the run gives up."""
    step = ts.train_step(lambda params, batch: loss_fn(params, batch).compute() * params["s"])

    def with_scale(key, bad):
        params = {"w": jnp.ones((8, 16)) * 0.1, "v": jnp.ones((16, 3)) * 0.1, "s": bad}
        return ts.setup(ts.rules.adam(1e-2), params, key=key, trainable=["w", "v"])

    runs = ts.population(with_scale, 3, bad=np.array([1.0, np.nan, 1.0], np.float32))
    runs, history = ts.fit(step, runs, data(), steps=20, log_every=1, progress=False)
    assert runs.step.tolist() == [20, 0, 20] and runs.rejected.tolist() == [0, 20, 0]
    assert np.isnan(history["loss/1"]).all() and history["loss/0"][-1] < history["loss/0"][0]
    runs = ts.population(with_scale, 2, bad=np.full(2, np.nan, np.float32))
    with pytest.warns(RuntimeWarning, match="rejected"), pytest.raises(ts.errors.NonFiniteError, match="10 in a row"):
        ts.fit(step, runs, data(), steps=20, progress=False)


def test_batches_of_their_own():
    step, runs = ts.train_step(loss_fn), ts.population(make, 2, key=0, rate=RATES[:2])
    batches = [(X[:8], Y[:8]), (X[8:16], Y[8:16])]
    _, info = step(runs, ts.each(jax.tree.map(lambda *x: np.stack(x), *batches)))
    for i, batch in enumerate(batches):
        one = make(jax.random.split(jax.random.key(0), 2)[i], float(RATES[i]))
        np.testing.assert_allclose(info.loss[i], step(one, batch)[1].loss, rtol=1e-5)


def test_selected_members():
    runs = ts.population(make, N, rate=RATES)
    found = ts.select(runs, [2, -2, 0])
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


@pytest.mark.slow
def test_a_run_of_a_population_goes_on(tmp_path):
    step = ts.train_step(loss_fn)
    expected, _ = fit(ts.population(make, N, rate=RATES), step)
    ts.fit(step, ts.population(make, N, rate=RATES), data(), steps=7, checkpoint=tmp_path / "a", progress=False)
    runs, _ = fit(ts.population(make, N, rate=RATES), step, checkpoint=tmp_path / "a")
    assert_trees_equal(runs.params, expected.params)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda runs: ts.population(make, 3, rate=RATES), StateError, r"'rate' at population.*\(4,\).*first axis of 3"),
        (lambda runs: ts.population(make, 0, rate=RATES), HyperparameterError, "n at population.*0"),
        (lambda runs: ts.population(make, 2.0), WrongTypeError, "n at population"),
        (lambda runs: ts.population({}, 2), WrongTypeError, "make at population"),
        (lambda runs: ts.population(lambda key: key, 2), StateError, "result at make"),
        (lambda runs: ts.member(runs, 4), StateError, "member at member.*an index below 4"),
        (lambda runs: ts.member(runs, True), StateError, "member at member"),
        (lambda runs: ts.member(make(KEYS[0], 0.1), 0), StateError, "runs at member.*a population"),
        (lambda runs: ts.select(runs, [0, 4]), StateError, "indices at select.*0 ... 4.*below 4"),
        (lambda runs: ts.select(runs, []), StateError, "indices at select"),
        (lambda runs: ts.select(runs, 2), StateError, "indices at select"),
    ],
)  # fmt: skip
def test_what_cannot_be(call, kind, text):
    with pytest.raises(kind, match=text):
        call(ts.population(make, N, rate=RATES))
