"""Steps on named axes of devices: the numbers of the whole batch, one reduction, and no mean that is forgotten."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from jax.sharding import PartitionSpec as P
from tests.helpers import assert_trees_close
from tsunax.errors import RuleError, StateError

N, ROWS = 4, 16


def mesh():
    return jax.make_mesh((N,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:N])


def loss_fn(params, batch, model_state):
    """Rows that weigh differently, on the last device not at all, and a state that moves."""
    errors = jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2, -1)
    seen = {"mean": 0.9 * model_state["mean"] + 0.1 * jnp.mean(batch["x"]), "n": model_state["n"] + 1}
    return ts.Loss.mean(errors, where=batch["weight"], metrics={"error": errors**2}, model_state=seen)


def data(n=3):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    weight = lambda: (rng.random(ROWS) * (np.arange(ROWS) < ROWS - ROWS // N)).astype(np.float32)
    return [{"x": normal(ROWS, 8), "y": normal(ROWS, 4), "weight": weight()} for _ in range(n)]


def setup():
    params = {"w": np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)}
    start = {"mean": np.float32(0), "n": np.int32(0)}
    return ts.setup(ts.rules.adam(1e-2), params, model_state=start, key=0)


def run(step, state, batches):
    infos = []
    for batch in batches:
        state, info = step(state, batch)
        infos.append(jax.device_get((info.loss, info.weight, info.grad_norm, info.metrics)))
    return state, infos


def mapped(step, check=True):
    return jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P(), check_vma=check))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("check", [True, pytest.param(False, marks=pytest.mark.medium)])
def test_shard_map_gives_the_numbers_of_the_whole_batch(check, accumulate):
    expected, infos = run(ts.train_step(loss_fn), setup(), data())
    step = mapped(ts.train_step(loss_fn, axis_name="data", accumulate=accumulate), check)
    state, found = run(step, setup(), data())
    assert_trees_close(found, infos, rtol=2e-6, atol=1e-7)
    assert_trees_close(state.params, expected.params, rtol=1e-5, atol=1e-6)
    assert int(state.model_state["n"]) == 3 * accumulate
    if accumulate == 1:
        assert_trees_close(state.model_state["mean"], expected.model_state["mean"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["pmap", "vmap"])
def test_pmap_gives_the_numbers_of_the_whole_batch(name):
    expected, infos = run(ts.train_step(loss_fn), setup(), data())
    devices = {"devices": jax.devices()[:N]} if name == "pmap" else {}
    step = getattr(jax, name)(ts.train_step(loss_fn, axis_name="i"), axis_name="i", **devices)
    states = jax.tree.map(lambda x: jnp.stack([x] * N), setup())
    cut = [jax.tree.map(lambda x: x.reshape(N, -1, *x.shape[1:]), batch) for batch in data()]
    states, found = run(step, states, cut)
    for at in range(N):  # the same on every device
        assert_trees_close(jax.tree.map(lambda x, at=at: x[at], found), infos, rtol=2e-6, atol=1e-7)
        assert_trees_close(jax.tree.map(lambda x, at=at: x[at], states.params), expected.params, rtol=1e-5, atol=1e-6)


def test_gradients_are_reduced_once_however_many_micro_batches_there_are():
    def reductions(accumulate):
        text = mapped(ts.train_step(loss_fn, axis_name="data", accumulate=accumulate)).lower(setup(), data(1)[0])
        return len(re.findall(r"stablehlo\.all_reduce", text.as_text()))

    assert reductions(4) == reductions(1)
    # none of them in the loop
    text = mapped(ts.train_step(loss_fn, axis_name="data", accumulate=4)).lower(setup(), data(1)[0]).compile().as_text()
    entry = next(part for part in text.split("\n\n") if part.startswith("ENTRY"))
    assert text.count(" all-reduce(") == entry.count(" all-reduce(") > 0


def test_evaluation_and_gradients():
    batch, state = data(1)[0], setup()
    whole = ts.eval_step(loss_fn)(state, batch)
    found = mapped(ts.eval_step(loss_fn, axis_name="data"))(state, batch)
    np.testing.assert_allclose(found.compute(), whole.compute(), rtol=1e-6)
    np.testing.assert_allclose(found.metrics["error"].compute(), whole.metrics["error"].compute(), rtol=1e-6)
    loss, grads = ts.value_and_grad(loss_fn)(state, batch)
    other, of_all = mapped(ts.value_and_grad(loss_fn, axis_name="data"))(state, batch)
    np.testing.assert_allclose(other.compute(), loss.compute(), rtol=1e-6)
    assert_trees_close(of_all, grads, rtol=2e-6, atol=1e-7)


def test_a_row_that_is_not_finite_rejects_the_step_everywhere():
    batch = data(1)[0]
    batch["x"][3] = np.nan
    batch["weight"][3] = 1
    state, info = mapped(ts.train_step(loss_fn, axis_name="data"))(setup(), batch)
    assert int(info.verdict) > 0 and int(state.step) == 0
    assert_trees_close(state.params, setup().params, rtol=0, atol=0)


def test_each_device_has_a_key_of_its_own():
    def noise(params, batch, key):
        return ts.Loss.mean(batch * params["w"], metrics={"bits": jax.random.uniform(key, batch.shape)})

    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(())}, key=0)
    _, info = mapped(ts.train_step(noise, axis_name="data"))(state, np.ones(N, np.float32))
    one = jax.random.uniform(jax.random.fold_in(state.key, 0), (1,))[0]
    assert abs(float(info.metrics["bits"]) - float(one)) > 1e-3  # the mean of different ones


def test_a_mean_that_was_forgotten_is_an_error():
    step, batch = ts.train_step(loss_fn), data(1)[0]
    cut = jax.tree.map(lambda x: x.reshape(N, -1, *x.shape[1:]), batch)
    states = jax.tree.map(lambda x: jnp.stack([x] * N), setup())
    text = "axis_name at train_step.*none inside of .*expected one. .*name the axis"
    for check in (True, False):
        with pytest.raises(StateError, match=text):
            mapped(step, check)(setup(), batch)
    for name in ("i", None):
        with pytest.raises(StateError, match=text):
            jax.pmap(step, axis_name=name, devices=jax.devices()[:N])(states, cut)
    with pytest.raises(StateError, match=r"axis_name at eval_step.*none inside of the axes"):
        mapped(ts.eval_step(loss_fn))(setup(), batch)
    with pytest.raises(NameError, match="unbound axis name: data"):
        ts.train_step(loss_fn, axis_name="data")(setup(), batch)


def test_a_line_search_over_rows_of_one_device_is_refused():
    """Each device would take another step."""
    loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
    state = ts.setup(optax.lbfgs(), {"w": np.ones((8, 4), np.float32)})
    for check in (True, False):
        with pytest.raises(RuleError, match=r"rule at train_step\(axis_name='data'\): got a line search.*ts\.shard"):
            mapped(ts.train_step(loss, axis_name="data"), check)(state, data(1)[0]["x"])


def test_a_rule_with_a_collective_is_set_up_outside():
    mean = optax.stateless(lambda g, p: jax.lax.pmean(g, "data"))
    loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
    state, batch = ts.setup(optax.chain(mean, optax.sgd(0.1)), {"w": np.ones(8, np.float32)}), data(1)[0]["x"]
    found, _ = mapped(ts.train_step(loss, axis_name="data"))(state, batch)
    expected, _ = ts.train_step(loss)(ts.setup(ts.rules.sgd(0.1), {"w": np.ones(8, np.float32)}), batch)
    assert_trees_close(found.params, expected.params, rtol=1e-6, atol=1e-6)
    misspelled = optax.stateless(lambda g, p: jax.tree.map(lambda x: x * rate_of_it, g))  # noqa: F821
    with pytest.raises(RuleError, match="rate_of_it"):
        ts.setup(misspelled, {"w": np.ones(8, np.float32)})


@pytest.mark.medium
def test_whoever_combines_them_says_so():
    of_rows = lambda state, batch: ts.value_and_grad(loss_fn, axis_name=())(state, batch)[1]["w"]
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    batch = {**data(1)[0], "weight": np.ones(ROWS, np.float32)}
    grads = jax.jit(jax.shard_map(of_rows, mesh=mesh(), check_vma=False, **specs))(setup(), batch)
    _, whole = ts.value_and_grad(loss_fn)(setup(), batch)
    np.testing.assert_allclose(grads.reshape(N, 8, 4).mean(0), whole["w"], rtol=2e-6, atol=1e-7)
