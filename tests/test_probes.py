"""Mistakes and rare combinations that a hostile user found; each failed once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tsunax import exchange
from tsunax.errors import CheckpointError, DataError, HyperparameterError, StateError, WrongTypeError
from tsunax.run import feed

X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
FULLY = {"data": 1, "fsdp": -1}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] - jnp.sin(x.sum(1))) ** 2)


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
    with pytest.raises(CheckpointError, match=r"got 1 of 3 numbers that are too large for"):
        exchange.save(path, tree, transform={"w": exchange.cast(dtype)})
    exchange.save(path, tree)
    with pytest.raises(CheckpointError, match=r"restore\(\): got 1 of 3 numbers that are too large for float16"):
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
    "host of lists": (lambda: ts.shard(state(), ts.mesh(), host=[["moments"]]), WrongTypeError, "host at shard"),
    "host of bytes": (lambda: ts.shard(state(), ts.mesh(), host=b"moments"), WrongTypeError, "host at shard"),
    "pack by a float": (lambda: ts.data.pack([np.ones(2)], 3.5), (WrongTypeError, HyperparameterError), "length at pack"),
    "pack a text": (lambda: ts.data.pack(["abc"], 8), DataError, "an array with a first axis"),
    "unit axes": (lambda: exchange.rearrange("() a -> a ()"), HyperparameterError, "pattern at rearrange"),
    "a number for an axis": (lambda: exchange.rearrange("1 a -> a 1"), HyperparameterError, "pattern at rearrange"),
    "rename to None": (lambda: exchange.save("a.safetensors", {"w": X}, rename={}.get), WrongTypeError, "result of rename for 'w' at save"),
    "no data": (lambda: ts.fit(ts.train_step(loss_fn), state(), steps=3, progress=False), TypeError, ""),
}  # fmt: skip


def state():
    return ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(8)})


@pytest.mark.parametrize("name", SAID)
def test_what_is_said(name):
    call, kind, text = SAID[name]
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value)
    if name == "no data":
        assert "Give the step or fit its data" in caught.value.__notes__[0]


def test_pad_to_one_length():
    (found,) = ts.data.pad([np.ones(3)], 8).values()
    assert found.tokens.shape == (1, 8) if hasattr(found, "tokens") else found[0].shape == (1, 8)
