"""`evaluate`: exact whatever the sizes of batches, and in one program where the loss names `mask`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests import toys
from tests.helpers import count_compiles
from tsunax.errors import DataError, LossError, StateError

X = np.random.default_rng(0).normal(size=(23, 3)).astype(np.float32)


def values(params, x):
    return (x @ params["w"]) ** 2


def masked(params, x, mask):
    loss = values(params, x)
    return ts.Loss.mean(loss, mask, metrics={"large": loss > 1})


def plain(params, x):
    loss = values(params, x)
    return ts.Loss.mean(loss, metrics={"large": loss > 1})


def make():
    return ts.setup(ts.rules.sgd(0.1), {"w": jnp.arange(1.0, 4.0)})


@pytest.mark.parametrize(("loss_fn", "compiled"), [(masked, 1), (plain, 2)])
@pytest.mark.parametrize("rows", [23, 10, 5])
def test_short_batches_count_as_what_they_are(loss_fn, compiled, rows):
    eval_step, state = ts.eval_step(loss_fn), make()
    with count_compiles() as c:
        found = ts.evaluate(eval_step, state, ts.batches(X, rows))
    expected = np.asarray(values(state.params, X))
    assert found["loss"] == pytest.approx(expected.mean(), rel=1e-6)
    assert found["large"] == pytest.approx((expected > 1).mean(), rel=1e-6)
    assert c.compiled.count("pure") == (1 if rows == 23 else compiled), c.compiled
    with count_compiles() as c:
        assert ts.evaluate(eval_step, state, ts.batches(X, rows)) == found
    assert c.compiled.count("pure") == 0


def test_several_data_sets_have_names():
    found = ts.evaluate(ts.eval_step(plain), make(), {"a": ts.batches(X[:8], 4), "b": [X[8:]]})
    expected = np.asarray(values(make().params, X))
    assert sorted(found) == ["a/large", "a/loss", "b/large", "b/loss"]
    assert found["a/loss"] == pytest.approx(expected[:8].mean(), rel=1e-6)
    assert found["b/loss"] == pytest.approx(expected[8:].mean(), rel=1e-6)


def test_the_data_begin_at_their_beginning_and_stay_where_they_were():
    data = ts.batches(X, 5, shuffle=True)
    next(iter(data))
    place = data.get_state()
    whole = ts.evaluate(ts.eval_step(plain), make(), ts.batches(X, 23))["loss"]
    assert ts.evaluate(ts.eval_step(plain), make(), data)["loss"] == pytest.approx(whole, rel=1e-6)
    assert data.get_state() == place


class Ending:
    """Rows of which one raises what ends an iterator."""

    def __len__(self):
        return 23

    def __getitem__(self, i):
        if i == 17:
            raise StopIteration(f"row {i}")
        return X[i]


def test_a_row_that_cannot_be_read_ends_no_epoch():
    """No mean over a part of the rows, and no shorter epoch."""
    step = ts.train_step(plain)
    with pytest.raises(DataError, match="row 17"):
        ts.evaluate(ts.eval_step(plain), make(), ts.batches(Ending(), 5))
    for steps_per_call in (None, 1, "auto"):
        with pytest.raises(DataError, match="row 17"):
            data = ts.batches(Ending(), 5)
            ts.fit(step, make(), data, epochs=1, steps_per_call=steps_per_call, progress=False)


def test_fit_inside_of_a_program_says_what_to_call_there():
    step, data = ts.train_step(plain), [np.ones((4, 3), np.float32)]
    call = lambda state: ts.fit(step, state, data, steps=1, progress=False)[0]
    with pytest.raises(StateError, match=r"call at fit\(\): got one inside jit, .*step"):
        jax.jit(call)(make())


def streaming(params, x, model_state, train):
    """A running mean of all rows before, which the loss reads; 8 rows in batches of 2."""
    loss = (x @ params["w"] - model_state["mean"]) ** 2
    mean = 0.5 * model_state["mean"] + 0.5 * jnp.mean(x)
    return ts.Loss.mean(loss, metrics={"loss_again": loss}, model_state={"mean": mean})


def normalized(params, x, model_state):
    """As batch norm in its training mode: it changes what it does not read."""
    return ts.Loss.mean(values(params, x - x.mean()), model_state={"mean": 0.9 * model_state["mean"]})


def with_mean():
    return ts.setup(ts.rules.sgd(0.1), {"w": jnp.arange(1.0, 4.0)}, model_state={"mean": jnp.float32(0.5)})


def test_a_model_state_is_carried_from_batch_to_batch():
    """By the option, and of a function that returns it; each evaluation begins anew."""
    state, rows = with_mean(), X[:8]
    mean, losses = 0.5, []
    for x in rows.reshape(4, 2, 3):
        losses.append(np.mean((x @ np.arange(1.0, 4.0) - mean) ** 2))
        mean = 0.5 * mean + 0.5 * x.mean()
    own = lambda state, x: streaming(state.params, x, state.model_state, False)
    for f in (ts.eval_step(streaming, carry=True), jax.jit(own)):
        for _ in range(2):
            found = ts.evaluate(f, state, ts.batches(rows, 2))
            assert found["loss"] == found["loss_again"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert float(state.model_state["mean"]) == 0.5
    found = ts.evaluate(ts.eval_step(streaming, carry=True), state, ts.batches(rows, 2))
    copies = ts.population(lambda key: with_mean(), 2, key=0)
    several = ts.evaluate(ts.eval_step(streaming, carry=True), copies, ts.batches(rows, 2))
    assert several["loss/0"] == several["loss/1"] == pytest.approx(found["loss"], rel=1e-6)


def test_a_model_state_that_a_loss_reads_and_changes_is_refused():
    """Where a second batch would start from it; what nobody reads may change, and what does not change be read."""
    state, f = with_mean(), ts.eval_step(streaming)
    for _ in range(2):
        with pytest.raises(
            LossError, match=r"model_state at evaluate\(\): got one that loss_fn reads and changes.*carry=True"
        ):
            ts.evaluate(f, state, ts.batches(X[:8], 2))
    assert ts.evaluate(f, state, ts.batches(X[:2], 2))["loss"] == pytest.approx(float(f(state, X[:2]).compute()))
    reads = lambda params, x, model_state: ts.Loss.mean(
        values(params, x) + model_state["mean"], model_state=model_state
    )
    for loss_fn in (normalized, reads):
        f = ts.eval_step(loss_fn)
        expected = np.mean([float(f(state, x).compute()) for x in X[:8].reshape(4, 2, 3)])
        assert ts.evaluate(f, state, ts.batches(X[:8], 2))["loss"] == pytest.approx(expected, rel=1e-5)


def test_an_evaluation_takes_a_key():
    found = [
        ts.evaluate(ts.eval_step(toys.noisy), toys.state(), [toys.X], key=jax.random.key(i))["loss"] for i in (0, 0, 1)
    ]
    assert found[0] == found[1] != found[2]


def test_the_mean_of_many_batches_is_right_to_the_last_digit():
    """A running sum of 3,000 numbers in float32 has an error of 1e-5."""
    loss = jnp.float32(0.1)
    numbers = ts.evaluate(
        lambda state, batch: ts.Loss(loss, 1.0), ts.setup(ts.rules.sgd(0.1), loss), [np.ones(1)] * 3000
    )
    np.testing.assert_allclose(numbers["loss"], np.float32(0.1), rtol=2e-7)
