"""Mistakes and rare combinations that a hostile user found; each failed once."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tsunax import exchange
from tsunax.errors import (
    CheckpointError,
    DataError,
    HyperparameterError,
    LossError,
    NonFiniteError,
    StateError,
    WrongTypeError,
)
from tsunax.run import feed

X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
FULLY = {"data": 1, "fsdp": -1}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] - jnp.sin(x.sum(1))) ** 2)


@pytest.mark.medium
def test_lbfgs_compares_params_in_float32_beside_low_moments():
    losses = []
    for policy in (None, ts.precision.Policy(moments="bfloat16")):
        state, step = (ts.setup(ts.rules.lbfgs(), {"w": jnp.zeros(8)}, precision=policy, key=0), ts.train_step(loss_fn))
        for _ in range(15):
            state, info = step(state, X)
        assert state.opt_state[0].params["w"].dtype == jnp.float32
        losses.append(float(info.loss))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_the_sharding_of_shapes_is_described():
    make = lambda: ts.setup(ts.rules.adam(1e-2), {"up": jnp.zeros((512, 64))})
    mesh = ts.mesh(**FULLY)
    shapes, there = ts.shard(jax.eval_shape(make), mesh), ts.shard(make, mesh)
    found, expected = ts.devices.describe_sharding(shapes), ts.devices.describe_sharding(there)
    assert (found.total, dict(found.bytes)) == (expected.total, dict(expected.bytes))
    assert found.rows == expected.rows
    assert "axis 0 over fsdp=8" in repr(found)


def test_a_leaf_called_clock_is_no_state(tmp_path):
    path, tree = tmp_path / "a.safetensors", {"clock": jnp.ones(3), "w": jnp.ones(2)}
    exchange.save(path, tree)
    assert exchange.restore(path, tree)["clock"].shape == (3,)
    exchange.save(path, {"clock": jnp.ones(4, jnp.int32), "params": {"w": jnp.full(2, 7.0)}, "w": jnp.full(2, 3.0)})
    np.testing.assert_array_equal(exchange.restore(path, {"w": jnp.zeros(2)}, where="**")["w"], [3, 3])
    state = ts.setup(ts.rules.adam(1e-2), {"w": jnp.full(2, 7.0)})
    exchange.save(path, state)
    np.testing.assert_array_equal(exchange.restore(path, {"w": jnp.zeros(2)}, where="**")["w"], [7, 7])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16"])
def test_numbers_that_do_not_fit_are_not_saved(dtype, tmp_path):
    path, tree = tmp_path / "a.safetensors", {"w": jnp.array([1e6, 1.0, jnp.inf])}
    with pytest.raises(CheckpointError, match=r"got 1 of 3 numbers that \w+ cannot hold"):
        exchange.save(path, tree, transform={"w": exchange.cast(dtype)})
    exchange.save(path, tree)
    with pytest.raises(CheckpointError, match=r"restore\(\): got 1 of 3 numbers that float16 cannot hold"):
        exchange.restore(path, {"w": jnp.zeros(3, jnp.float16)}, cast=True)


def test_an_interrupt_while_the_data_are_closed_has_the_state(monkeypatch):
    def close(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(feed.Feed, "close", close)
    step, state = ts.train_step(loss_fn), ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(8)})
    with pytest.raises(KeyboardInterrupt) as caught:
        ts.fit(step, state, [X], steps=3, progress=False)
    assert int(caught.value.state.step) == 3 and len(caught.value.history["loss"]) >= 1


@pytest.mark.parametrize("name", ["clock", "tally", "carry", "members"])
def test_members_have_names_of_their_own(name):
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(4)})
    with pytest.raises((StateError, WrongTypeError, TypeError)):
        ts.States(**{"a": state, name: state}) if name != "carry" else ts.States(carry=state)


def test_a_state_of_shapes_takes_no_params_from_a_file(tmp_path):
    params = {"w": np.zeros((64, 64), np.float32)}
    like = ts.shard(jax.eval_shape(lambda: ts.setup(ts.rules.adam(1e-2), params)), ts.mesh(**FULLY))
    exchange.save(tmp_path / "p.safetensors", params)
    with pytest.raises(StateError, match=r"got a state of shapes.* Restore into state.params, then ts.shard"):
        exchange.restore(tmp_path / "p.safetensors", like)
    assert exchange.restore(tmp_path / "p.safetensors", like.params)["w"].sharding == like.params["w"].sharding


def test_moments_stay_in_host_memory_when_a_run_migrates():
    params = {"a": np.ones((64, 64), np.float32)}
    try:
        state = ts.shard(ts.setup(ts.rules.adam(1e-2), params), ts.mesh(**FULLY), host="moments")
    except ts.errors.DeviceError as error:
        pytest.skip(str(error))
    for rule in (ts.rules.lion(1e-3), ts.rules.amsgrad(1e-3)):
        new, _ = ts.migrate(state, rule)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(new.opt_state) if x.size > 1000}
        assert kinds == {"pinned_host"}
        new, _ = ts.train_step(lambda params, x: jnp.mean((x @ params["a"]) ** 2))(new, np.ones((8, 64), np.float32))


SAID = {
    "pack a text": (lambda: ts.data.pack(["abc"], 8), DataError, "an array with a first axis"),
    "unit axes": (lambda: exchange.rearrange("() a -> a ()"), HyperparameterError, "pattern at rearrange"),
    "a number for an axis": (lambda: exchange.rearrange("1 a -> a 1"), HyperparameterError, "pattern at rearrange"),
    "no batch to size": (lambda: ts.find_batch_size(ts.train_step(drawn), with_key(), None), WrongTypeError, "got None, expected a batch with rows"),
    "no batch to cut": (lambda: ts.insight.find_accumulation(ts.train_step(drawn), with_key(), None, 64), WrongTypeError, "with rows"),
    "a key for an evaluation": (lambda: ts.evaluate(ts.eval_step(noisy), state(), [X]), LossError, "In an evaluation there is no key: write key=None"),
}  # fmt: skip


def state():
    return ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(8)})


def with_key():
    return ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(8)}, key=0)


def drawn(params, key):
    return loss_fn(params, jax.random.normal(key, (512, 8)))


def noisy(params, x, key):
    return loss_fn(params, x + jax.random.normal(key, x.shape))


def dropping(params, x, key=None):
    return loss_fn(params, x if key is None else x * jax.random.bernoulli(key, 0.5, x.shape))


def test_a_key_that_a_loss_function_would_take_and_the_state_lacks_is_warned_of():
    with pytest.warns(
        UserWarning, match=r"dropping\(params, x, key\) names key, but the state has none.* setup\(\.\.\., key=0\)"
    ):
        ts.train_step(dropping)(state(), X)
    with pytest.warns(UserWarning) as told:
        ts.train_step(dropping)(state(), X[:8])
    assert len(told) == 1
    ts.train_step(functools.partial(dropping, key=None))(state(), X)  # meant so
    ts.train_step(dropping)(with_key(), X)
    ts.eval_step(dropping)(state(), X)
    ts.value_and_grad(dropping)(state(), X, key=jax.random.key(0))


def test_an_evaluation_takes_a_key():
    found = [ts.evaluate(ts.eval_step(noisy), state(), [X], key=jax.random.key(i))["loss"] for i in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_a_learning_rate_is_found_for_a_loss_without_data():
    rate, _ = ts.find_learning_rate(ts.train_step(drawn), with_key(), points=50, low=1e-3, high=1e3)
    assert 0 < rate < 10


@pytest.mark.medium
def test_a_last_batch_that_cannot_be_cut_is_refused_before_the_first_step(tmp_path):
    data, step, calls = ts.batches(X, 12), ts.train_step(loss_fn, accumulate=3), []
    text = (
        r"got 4 rows, the last batch of an epoch of 6, expected a multiple of accumulate=3\. Choose such a batch_size"
    )
    with pytest.raises(LossError, match=text):
        ts.fit(step, state(), data, epochs=1, progress=False, callbacks=calls.append)
    with pytest.raises(LossError, match=text):
        ts.fit(step, state(), data, steps=6, progress=False, callbacks=calls.append)
    assert not calls
    ts.fit(step, state(), data, steps=5, progress=False)  # it never gets there
    ts.fit(step, state(), ts.batches(X, 12), steps=3, progress=False, checkpoint=tmp_path)
    with pytest.raises(LossError, match=text):  # resumed in the middle of the epoch
        ts.fit(step, state(), ts.batches(X, 12), steps=6, progress=False, checkpoint=tmp_path, callbacks=calls.append)
    assert not calls
    ts.fit(step, state(), ts.batches(X, 12, drop_remainder=True), epochs=2, progress=False)
    with pytest.raises(LossError, match=text):  # read ahead, and by row
        rows = ts.train_step(loss_fn, accumulate=3, per_example=lambda grads: grads)
        ts.fit(rows, state(), ts.prefetch(ts.batches(X, 12)), epochs=1, progress=False, callbacks=calls.append)
    assert not calls
    means = optax.stateless(lambda grads, _: jax.tree.map(lambda g: -0.1 * g.mean(0), grads))
    apart = ts.train_step(loss_fn, accumulate=3, per_example=True)
    ts.fit(apart, ts.setup(means, {"w": jnp.ones(8)}), ts.batches(X, 12), epochs=1, progress=False)
    with pytest.raises(LossError, match=r"got 10 rows, expected"):  # no last one, but all
        ts.fit(step, state(), ts.batches(X[:43], 10), epochs=1, progress=False)
    padding = lambda params, x, mask: ts.Loss.mean((x @ params["w"]) ** 2, mask)
    ts.fit(ts.train_step(padding, accumulate=3), state(), ts.batches(X, 12), epochs=1, progress=False)


@pytest.mark.medium
def test_the_first_warning_of_a_rejected_step_names_wrong_labels_and_data():
    def classes(params, batch):
        logits = batch[0] * params["w"][None]
        return ts.Loss.mean(ts.losses.softmax_cross_entropy_with_integer_labels(logits, batch[1]))

    labels, x = np.zeros(64, np.int32), X.copy()
    labels[2] = 11
    texts = (
        r"got nan, 1 of 64 labels are none of the 8 classes, first label 11 at \[2\]\. 1 so",
        r"batch has 1 of 512 not",
    )
    x[5, 1] = np.nan
    for loss, batch, text in zip((classes, loss_fn), ((X, labels), x), texts, strict=True):
        with pytest.warns(RuntimeWarning, match=text), pytest.raises(NonFiniteError):
            ts.fit(ts.train_step(loss), state(), [batch], steps=1, progress=False, max_bad=3)


def test_a_finished_run_says_that_nothing_is_to_do_whatever_would_not_divide(tmp_path):
    again = lambda step, **options: ts.fit(step, state(), ts.batches(X, 12), epochs=1, progress=False, **options)
    again(ts.train_step(loss_fn), checkpoint=tmp_path)
    with pytest.warns(UserWarning, match="nothing to do"):
        again(ts.train_step(loss_fn, accumulate=3), checkpoint=tmp_path)


@pytest.mark.medium
@pytest.mark.parametrize("fault", ["log", "gradient", "accumulate"])
def test_labels_are_not_blamed_for_what_they_did_not_do(fault):
    calls = []

    def masked(params, batch):
        jax.debug.callback(lambda: calls.append(0)) if fault == "gradient" else None
        logits = batch[0] * params["w"][None]
        logits = jnp.log(-logits) if fault == "log" else logits + jnp.sqrt(0 * params["w"][None])
        losses = ts.losses.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        return ts.Loss.mean(losses, batch[1] >= 0)

    labels = np.full(64, -100, np.int32)
    labels[::2] = 1  # the others are padding
    step = ts.train_step(masked, accumulate=2 if fault == "accumulate" else 1)
    with pytest.warns(RuntimeWarning) as told, pytest.raises(NonFiniteError):
        ts.fit(step, state(), [(X, labels)], steps=1, progress=False, max_bad=2)
    assert all("labels" not in str(warning.message) for warning in told)
    if fault == "gradient":
        jax.effects_barrier()
        assert len(calls) == 3  # two rejected steps, and the search for the leaf: no run for the labels


@pytest.mark.medium
@pytest.mark.parametrize("bad", [8, 1])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_replay_names_wrong_labels(bad, accumulate):
    def classes(params, batch):
        logits = batch[0] * params["w"][None] + (jnp.nan if bad == 1 else 0)  # not by the labels
        return ts.Loss.mean(ts.losses.softmax_cross_entropy_with_integer_labels(logits, batch[1]))

    labels = np.zeros(64, np.int32)
    labels[3] = bad
    report = ts.replay(ts.train_step(classes, accumulate=accumulate), state(), (X, labels))
    assert report.result == "loss" and report.primitive
    wrong = "In this batch, 1 of 64 labels are none of the 8 classes, first label 8 at [3]."
    assert report.text.endswith(wrong) == (bad == 8)


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


@pytest.mark.parametrize("name", SAID)
def test_what_is_said(name):
    call, kind, text = SAID[name]
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value)


def test_pad_to_one_length():
    (found,) = ts.data.pad([np.ones(3)], 8).values()
    assert found.tokens.shape == (1, 8) if hasattr(found, "tokens") else found[0].shape == (1, 8)
