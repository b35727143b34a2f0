"""`predict`: the outputs of a jitted loop by hand, of each row of the data, on one device and on eight."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from jax.sharding import PartitionSpec as P
from tests import toys
from tests.helpers import assert_trees_close, assert_trees_equal, count_compiles
from tsunax.errors import LossError, StateError, WrongTypeError
from tsunax.run import evaluation

X = np.random.default_rng(0).normal(size=(23, 16)).astype(np.float32)


def model(params, x):
    hidden = jnp.tanh(x @ params["w"])
    return {"y": hidden @ params["v"], "hidden": hidden}


def make(**options):
    rng = np.random.default_rng(1)
    params = {"w": rng.normal(size=(16, 64)), "v": rng.normal(size=(64, 3))}
    params = {name: jnp.asarray(x, jnp.float32) for name, x in params.items()}
    return ts.setup(ts.rules.adam(1e-3), params, **options)


LAYOUTS = {"data": {}, "fsdp": {"data": 1, "fsdp": 8}, "tensor": {"data": 2, "fsdp": 2, "tensor": 2}}


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
@pytest.mark.parametrize("rows", [23, 10])
def test_the_outputs_are_those_of_a_jitted_loop(layout, rows):
    state, run = make(), jax.jit(model)
    expected = [run(state.params, X[i : i + rows]) for i in range(0, 23, rows)]
    expected = jax.tree.map(lambda *xs: np.concatenate(xs), *expected)
    if layout:
        rules = {"w": P(None, "tensor")} if layout == "tensor" else None
        state = ts.shard(state, ts.mesh(**LAYOUTS[layout]), rules)
    with count_compiles() as c:
        found = ts.predict(model, state, ts.batches(X, rows))
    assert c.compiled.count("pure") <= 1  # a short batch runs the same program
    assert isinstance(found["y"], np.ndarray) and found["y"].shape == (23, 3)
    assert_trees_close(found, expected, rtol=1e-5, atol=1e-6)
    with count_compiles() as c:
        assert_trees_equal(ts.predict(model, state, ts.batches(X, rows)), found)
    assert c.compiled.count("pure") == 0


def test_a_function_without_a_hash_compiles_once_a_call():
    @dataclasses.dataclass  # compared by its fields
    class Scaled:
        factor: float

        def __call__(self, params, batch):
            return self.factor * (batch @ params["w"])

    f, state = Scaled(2.0), make()
    with count_compiles() as c:
        found = ts.predict(f, state, ts.batches(X, 10))
    assert c.compiled.count("pure") == 1
    assert_trees_close(found, 2 * (X @ state.params["w"]), rtol=1e-5, atol=1e-6)


def test_devices_share_the_work():
    """Whatever the layout of the params, a device computes its rows, and gathers no output."""
    x = np.ones((32, 16), np.float32)
    flops = {}
    for name, axes in {"one": None, **LAYOUTS}.items():
        state = make() if axes is None else ts.shard(make(), ts.mesh(**axes))
        batch = next(evaluation._placed_batches("", state, [x], {}, evaluation.processes.Unanimous(), False))[0]
        program = evaluation._model(model, False, evaluation._sharding_of_rows(batch)).trace(state, batch, {})
        compiled = program.lower().compile()
        flops[name] = compiled.cost_analysis()["flops"]
        if axes:
            shapes = {x.shard_shape((32, 8)) for x in jax.tree.leaves(compiled.output_shardings)}
            assert shapes == {(8 if name == "tensor" else 4, 8)}
    assert flops["one"] / flops["data"] == pytest.approx(8, rel=0.02)
    assert flops["one"] / flops["fsdp"] == pytest.approx(8, rel=0.02)


def test_precision_and_keywords_are_those_of_an_evaluation():
    policy = ts.precision.Policy(compute="bfloat16", evaluate="bfloat16")
    state, low = make(precision=policy), []

    def f(params, x, train, step, scale, mask, key=None):
        low.append((params["w"].dtype, x.dtype, train, mask.shape))
        return scale * (x @ params["w"]) + jnp.arange(64)[None] * mask[:, None] + step

    found = ts.predict(f, state, ts.batches(X, 10), scale=2.0)
    assert low[-1] == (jnp.bfloat16, jnp.bfloat16, False, (10,))
    np.testing.assert_allclose(found, 2 * X @ np.asarray(state.params["w"]) + np.arange(64), rtol=0.05, atol=0.5)
    exact = ts.predict(lambda params, x: x @ params["w"], make(precision="bfloat16"), [X])
    assert exact.dtype == np.float32
    np.testing.assert_allclose(exact, X @ np.asarray(state.params["w"]), rtol=1e-5, atol=1e-5)


def test_a_generator_yields_batch_by_batch_and_reads_one_ahead():
    read = []

    def data():
        for i in range(0, 23, 10):
            read.append(i)
            yield X[i : i + 10]

    found = []
    for y in ts.predictions(model, make(), data()):
        found.append((len(y["y"]), len(read)))
    assert found == [(10, 2), (10, 3), (3, 3)]


def test_a_model_state_is_carried_from_batch_to_batch():
    f = lambda params, x, model_state: (x.sum(1) + model_state["sum"], {"sum": model_state["sum"] + x.sum()})
    state = make(model_state={"sum": jnp.float32(0)})
    sums = X[:20].reshape(4, 5, 16).sum((1, 2)).cumsum() - X[:20].reshape(4, 5, 16).sum((1, 2))
    found = ts.predict(f, state, ts.batches(X[:20], 5), carry=True)
    np.testing.assert_allclose(found, X[:20].sum(1) + sums.repeat(5), rtol=1e-4, atol=1e-4)
    assert float(state.model_state["sum"]) == 0


def test_members_of_a_population_lead():
    runs = ts.population(lambda key: ts.setup(ts.rules.sgd(0.1), {"w": jax.random.normal(key, (16, 2))}), 8)
    expected = np.einsum("ri,mio->mro", X, runs.params["w"])
    for state in (runs, ts.shard(runs, ts.mesh())):
        found = ts.predict(lambda params, x: x @ params["w"], state, {"a": ts.batches(X, 10)})["a"]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_rows_that_get_no_or_another_place_are_said():
    with pytest.warns(UserWarning, match="leaves out 3 of 23 rows"):
        assert len(ts.predict(model, make(), ts.batches(X, 10, drop_remainder=True))["y"]) == 20
    data = ts.batches(X, 10, shuffle=True)
    with pytest.warns(UserWarning, match=r"shuffled, so prediction i is of row data.order\(0\)\[i\]"):
        found = ts.predict(model, make(), data)["y"]
    np.testing.assert_allclose(found, ts.predict(model, make(), [X])["y"][data.order(0)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("evaluates", [False, True])
def test_short_batches_have_the_rows_of_the_first_batch_of_their_length(evaluates):
    """Long sequences come in batches of fewer rows, so that a batch fits into memory."""
    state, shapes = ts.setup(ts.rules.sgd(0.1), jnp.zeros(())), []

    def outputs(params, x, mask):
        shapes.append(x.shape)
        return ts.Loss.mean(x, mask[:, None] * jnp.ones(x.shape)) if evaluates else x[:, 0]

    data = [np.full(shape, i, np.float32) for i, shape in enumerate([(8, 2), (3, 6), (5, 2), (2, 6)])]
    if evaluates:
        expected = np.mean(np.concatenate([x.ravel() for x in data]))
        assert ts.evaluate(ts.eval_step(outputs), state, data)["loss"] == pytest.approx(expected)
    else:
        assert_trees_equal(ts.predict(outputs, state, data), np.concatenate([x[:, 0] for x in data]))
    assert sorted({*shapes}) == [(3, 6), (8, 2)]


@pytest.mark.parametrize("wrap", [lambda data: data, ts.prefetch])
def test_rows_of_interleaved_data_are_put_back_by_their_numbers(wrap):
    texts = [np.arange(1, n + 1) for n in (3, 7, 1, 5, 2, 7, 4)]
    sizes = ((2, True), (3, False))
    parts = zip(ts.data.pad(texts, [4, 8]).values(), sizes, strict=True)
    data = ts.data.interleave([ts.batches(x, n, drop_remainder=drop, seed=1) for x, (n, drop) in parts])
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(())})
    f = lambda params, batch: (jnp.sum(batch.values, 1), batch.indices)
    with pytest.warns(UserWarning, match=r"interleave draws the order .* prediction i is row indices\[i\]"):
        sums, indices = ts.predict(f, state, wrap(data))
    assert sums.tolist() == [texts[i].sum() for i in indices] and len({*indices.tolist()}) == 7
    data = ts.data.interleave([ts.batches(np.ones((5, 1), np.float32), 2, drop_remainder=True)])
    with pytest.warns(UserWarning, match="leaves out 1 of 5 rows"), pytest.warns(UserWarning, match="interleave"):
        ts.predict(lambda params, batch: batch, state, wrap(data))


@pytest.mark.parametrize(
    ("f", "kind", "text"),
    [
        (
            lambda params, x: x.mean(),
            LossError,
            r"outputs at predict\(\): got .*, expected an array that leads with 10",
        ),
        (lambda params, x: {"a": x.T}, LossError, r"outputs\['a'\] at predict\(\)"),
        (lambda params, x, lost: x, LossError, "lost"),
        (ts.eval_step(lambda params, x: x.mean()), WrongTypeError, r"expected predict\(lambda params, batch"),
    ],
)
def test_wrong_functions(f, kind, text):
    with pytest.raises(kind, match=text):
        ts.predict(f, make(), ts.batches(X, 10))


def test_a_state_that_is_donated_between_two_batches_is_told():
    state, step = make(), ts.train_step(lambda params, x: jnp.mean(model(params, x)["y"] ** 2))
    outputs = ts.predictions(model, state, ts.batches(X, 8))
    next(outputs)
    step(state, X)
    with pytest.raises(StateError, match="predict"):
        list(outputs)


@pytest.mark.parametrize("device", [None, 1])
def test_a_users_guard_of_transfers_stays_out(device):
    """Batches in NumPy are moved by the program's own call, whatever the user allows."""
    state = make() if device is None else ts.to_device(make(), jax.devices()[device])
    expected = ts.predict(model, state, ts.batches(X, 10))
    with jax.transfer_guard("disallow"):
        outputs = ts.predict(model, state, ts.batches(X, 10))
    assert_trees_equal(outputs, expected)


@pytest.mark.parametrize("outputs", [None, {}, ()])
def test_outputs_without_an_array_are_refused(outputs):
    with pytest.raises(ts.errors.LossError, match=r"result at predict.*expected an array for each row"):
        ts.predict(lambda params, x: outputs, toys.state(), ts.batches(toys.X, 8))


def test_a_wrong_function_is_refused_before_the_first_batch():
    with pytest.raises(ts.errors.WrongTypeError, match="f at predict"):
        ts.predictions(5, toys.state(), ts.batches(toys.X, 8))


@pytest.mark.parametrize(
    ("f", "options", "text"),
    [
        (
            lambda params, x, foo: x,
            {},
            r"keyword at f: got 'foo', .*or to predict\(\), predict\(f, state, data, foo=\.\.\.\)",
        ),
        (lambda params, x: x, {"foo": 1}, r"keyword at predict\(\): got 'foo', expected none. f does not name it"),
        (lambda params, x: x, {"train": True}, r"keyword at predict\(\): got 'train', expected another name"),
        (lambda params, x: x, {"carry": 3}, r"carry at predict\(\): got 3"),
    ],
)
def test_errors_name_the_arguments_of_predict(f, options, text):
    with pytest.raises(ts.errors.TsunaxError, match=text):
        ts.predict(f, toys.state(), ts.batches(toys.X, 8), **options)


def test_a_wrong_state_is_one_of_predict():
    with pytest.raises(ts.errors.WrongTypeError, match=r"state at predict\(\): got 5"):
        ts.predict(lambda params, x: x, 5, ts.batches(toys.X, 8))
