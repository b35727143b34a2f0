"""`evaluate`: exact whatever the sizes of batches, and in one program where the loss names `mask`."""

import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests.helpers import count_compiles
from tsunax.errors import DataError

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
