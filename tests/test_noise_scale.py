"""The gradient noise scale: exact algebra, a closed form in the mean, and no cost if nobody asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tsunax import microbatches
from tsunax._core import stable_text
from tsunax.errors import WrongTypeError

ROWS, N = 12, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3)).astype(np.float32)
Y = RNG.normal(size=ROWS).astype(np.float32)
W = np.float32([0.5, -1, 2])
loss_fn = lambda params, batch: jnp.mean((batch[0] @ params["w"] - batch[1]) ** 2) / 2


def setup(**options):
    return ts.setup(ts.rules.sgd(0.0), {"w": W}, **options)


def of_rows(x=X, y=Y, w=W):
    """The gradient of each row, in float64."""
    x, y, w = (np.asarray(a, np.float64) for a in (x, y, w))
    return (x @ w - y)[:, None] * x


def by_hand(rows, weights=None, n=N):
    """Appendix A.1 of arXiv:1812.06162, of micro-batches that may weigh differently."""
    weights = np.ones(len(rows)) if weights is None else np.asarray(weights, np.float64)
    parts = [(weights[i::n].sum(), weights[i::n] @ rows[i::n]) for i in range(n)]
    parts = [(w, total / w) for w, total in parts if w]
    big, whole = weights.sum(), weights @ rows / weights.sum()
    scatter = sum(w * np.sum((g - whole) ** 2) for w, g in parts) / (len(parts) - 1)
    return scatter, np.sum(whole**2) - scatter / big


def test_of_equal_micro_batches_it_is_the_paper_s():
    _, info = ts.train_step(loss_fn, accumulate=N, noise_scale=True)(setup(), (X, Y))
    rows, small, big = of_rows(), ROWS // N, ROWS
    small_norm = np.mean([np.sum(rows[i::N].mean(0) ** 2) for i in range(N)])
    big_norm = np.sum(rows.mean(0) ** 2)
    squared_norm = (big * big_norm - small * small_norm) / (big - small)
    trace = (small_norm - big_norm) / (1 / small - 1 / big)
    found = info.noise_scale
    np.testing.assert_allclose(found, (trace, squared_norm), rtol=1e-4)
    np.testing.assert_allclose(found.compute(), trace / squared_norm, rtol=1e-4)
    np.testing.assert_allclose(found, by_hand(rows), rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"loss_scale": 256.0}, {"precision": "bfloat16"}])
def test_micro_batches_may_weigh_differently(options):
    """One of them nothing; under a loss scale; and the mean of loss and gradient as without it."""
    weights = RNG.random(ROWS).astype(np.float32) * (np.arange(ROWS) % N != 2)

    def weighed(params, batch):
        return ts.Loss.mean((batch[0] @ params["w"] - batch[1]) ** 2 / 2, batch[2])

    run = lambda **more: jax.jit(ts.value_and_grad(weighed, accumulate=N, **more))(setup(**options), (X, Y, weights))
    loss, grads = run(noise_scale=True)
    rtol = 0.05 if "precision" in options else 1e-4
    np.testing.assert_allclose(loss.noise_scale, by_hand(of_rows(), weights), rtol=rtol)
    plain, same = run()
    np.testing.assert_array_equal(grads["w"], same["w"])
    assert loss.compute() == plain.compute() and plain.noise_scale is None


def test_averages_over_steps_are_those_of_the_distribution():
    """Rows x ~ N(0, I), y = x·w* + N(0, σ²): |G|² = |w - w*|², tr(Σ) = (d + 1)|w - w*|² + dσ²."""
    d, noise, goal = 3, 0.7, np.float32([0.2, 0.1, 1.0])
    step = ts.train_step(loss_fn, accumulate=N, noise_scale=True)

    def run(key):
        one, two = jax.random.split(key)
        x = jax.random.normal(one, (16, d))
        return step.pure(setup(), (x, x @ goal + noise * jax.random.normal(two, (16,))), {})[1].noise_scale

    found = jax.tree.map(lambda x: float(x.mean()), jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 20000)))
    away = float(np.sum((W - goal) ** 2))
    np.testing.assert_allclose(found.squared_norm, away, rtol=0.02)
    np.testing.assert_allclose(found.trace, (d + 1) * away + d * noise**2, rtol=0.02)
    np.testing.assert_allclose(found.compute(), found.trace / found.squared_norm)


def test_frozen_leaves_are_not_in_it():
    split = lambda params, batch: loss_fn({"w": jnp.concatenate([params["a"], params["b"]])}, batch)
    state = ts.setup(ts.rules.sgd(0.0), {"a": W[:1], "b": W[1:]}, freezable=True)
    _, info = ts.train_step(split, accumulate=N, noise_scale=True)(ts.freeze(state, "a"), (X, Y))
    np.testing.assert_allclose(info.noise_scale, by_hand(of_rows()[:, 1:]), rtol=1e-4)


def test_dropped_micro_batches_are_not_in_it():
    bad = np.where(np.arange(ROWS)[:, None] == 1, np.nan, X)
    step = ts.train_step(loss_fn, accumulate=N, noise_scale=True, on_nonfinite="drop")
    _, info = step(setup(), (bad, Y))
    np.testing.assert_allclose(info.noise_scale, by_hand(of_rows(), np.arange(ROWS) % N != 1), rtol=1e-4)


@pytest.mark.medium
def test_over_devices_of_a_population_and_in_the_history():
    step = ts.train_step(loss_fn, accumulate=2, noise_scale=True)
    batch = np.tile(X, (2, 1))[:16], np.tile(Y, 2)[:16]
    _, alone = step(setup(), batch)
    _, spread = step(ts.shard(setup(), ts.mesh()), batch)
    np.testing.assert_allclose(spread.noise_scale, alone.noise_scale, rtol=1e-3, atol=1e-3)
    _, infos = step(ts.population(lambda key: setup(), 2), batch)
    assert infos.noise_scale.trace.shape == (2,)
    _, history = ts.fit(step, setup(), [batch] * 3, epochs=1, log_every=1, progress=False)
    np.testing.assert_allclose(history["noise_scale/trace"], [float(alone.noise_scale.trace)] * 3, rtol=1e-5)


@pytest.mark.medium
def test_inside_shard_map_it_is_that_of_all_devices():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec
    step = ts.train_step(loss_fn, accumulate=2, noise_scale=True, axis_name="data")
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec()))
    _, info = step(setup(), (X, Y))
    order = np.concatenate([np.arange(6)[i::2] for i in range(2)])  # micro-batches of three rows
    rows = of_rows()[np.stack([order, order + 6]).reshape(4, 3).T.reshape(-1)]
    np.testing.assert_allclose(info.noise_scale, by_hand(rows), rtol=1e-4)


def test_it_costs_nothing_if_nobody_asks(monkeypatch):
    def text(**options):
        jaxpr = ts.train_step(loss_fn, accumulate=N, **options).trace(setup(), (X, Y)).jaxpr
        return stable_text.without_address(str(jaxpr))  # jax 0.7.2 prints functions with theirs

    asked, plain = text(noise_scale=True), text()
    monkeypatch.setattr(microbatches, "NoiseScale", None)
    assert text() == text(noise_scale=False) == plain != asked
    assert asked.count("eqn") == plain.count("eqn")
    _, info = ts.train_step(loss_fn, accumulate=N)(setup(), (X, Y))
    assert info.noise_scale is None


def test_wrong_uses_are_told():
    with pytest.raises(WrongTypeError, match=r"options at train_step\(\): got noise_scale without accumulate=2"):
        ts.train_step(loss_fn, noise_scale=True)
    with pytest.raises(WrongTypeError, match=r"options at value_and_grad\(\): got noise_scale .*with per_example"):
        ts.value_and_grad(loss_fn, accumulate=2, noise_scale=True, per_example=True)
