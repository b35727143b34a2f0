"""`rules.soap`: the numbers of the paper's algorithm in NumPy, and the same over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests.helpers import assert_trees_close

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
SHAPES = {"square": (4, 4), "bias": (5,), "stacked": (2, 3, 3), "tall": (12, 4)}


def draw(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def algorithm(p, grads, lr, b1, b2, eps, decay, frequency, is_left=True):
    """Algorithm 3 of arXiv:2409.11321 for one matrix in float64, the first call without an update."""
    p, q, s = p.astype(np.float64), np.eye(len(p)), np.eye(p.shape[1])
    m, v = np.zeros_like(p), np.zeros_like(p)
    left, right = np.zeros((len(p), len(p))), np.zeros((p.shape[1], p.shape[1]))
    for t, g in enumerate(np.asarray(grads, np.float64)):
        u = np.zeros_like(p)
        if t:
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * (q.T @ g @ s) ** 2
            u = (q.T @ m @ s) / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
            u = q @ u @ s.T
        p = p - lr * (u + decay * p)
        left, right = b2 * left + (1 - b2) * g @ g.T, b2 * right + (1 - b2) * g.T @ g
        if t == 0:
            q, s = np.linalg.eigh(left)[1][:, ::-1] if is_left else q, np.linalg.eigh(right)[1][:, ::-1]
        elif t % frequency == 0:
            q, s = np.linalg.qr(left @ q)[0] if is_left else q, np.linalg.qr(right @ s)[0]
    return p


@pytest.mark.medium
@pytest.mark.parametrize("numbers", [(0.01, 0.95, 0.95, 1e-8, 0.0, 3), (0.03, 0.9, 0.8, 1e-4, 0.1, 1)])
def test_the_algorithm_of_the_paper(numbers):
    lr, b1, b2, eps, decay, frequency = numbers
    rule = ts.rules.soap(lr, b1, b2, eps, decay, precondition_frequency=frequency, max_size=8)
    params, grads = draw(0), [draw(seed) for seed in range(1, 10)]
    expected = lambda name, at=slice(None), **options: algorithm(
        params[name][at], [g[name][at] for g in grads], *numbers, **options
    )
    state = ts.setup(rule, params)
    for g in grads:
        state, _ = ts.update(state, g)
    close = {"rtol": 2e-4, "atol": 2e-5}
    np.testing.assert_allclose(state.params["square"], expected("square"), **close)
    np.testing.assert_allclose(state.params["tall"], expected("tall", is_left=False), **close)
    for k in range(2):
        np.testing.assert_allclose(state.params["stacked"][k], expected("stacked", k), **close)
    # a vector has Adam's update, without the first call
    adam = ts.setup(ts.rules.adamw(lr, b1, b2, eps, weight_decay=decay), {"bias": params["bias"] * (1 - lr * decay)})
    for g in grads[1:]:
        adam, _ = ts.update(adam, {"bias": g["bias"]})
    np.testing.assert_allclose(state.params["bias"], adam.params["bias"], **close)


def loss_fn(params, batch):
    return jnp.mean(jnp.tanh(jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)


def runs(mesh, steps=8):
    params, data = draw(0, {"up": (32, 64), "down": (64, 32)}), np.random.default_rng(1)
    state = ts.setup(ts.rules.soap(10.0, eps=1.0, precondition_frequency=2), params)
    state, step = state if mesh is None else ts.shard(state, mesh), ts.train_step(loss_fn, donate=False)
    batch = data.normal(size=(256, 32)).astype(np.float32)
    infos = []
    for _ in range(steps):
        state, info = step(state, batch)
        infos.append(float(info.loss))
    return state, infos


@pytest.mark.medium
def test_a_mesh_computes_what_one_device_computes():
    one, expected = runs(None)
    for axes in ({"data": 1, "fsdp": 8}, {}):
        many, found = runs(ts.mesh(**axes))
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        assert_trees_close(many.params, one.params, **CLOSE)
    assert expected[-1] < 0.9 * expected[1]


@pytest.mark.medium
def test_the_devices_share_the_bases():
    """Of 8 equal sides each of 8 devices iterates one: the program has one QR of one matrix, not of eight."""
    params = draw(0, {f"w{i}": (64, 64) for i in range(4)})
    state = ts.setup(ts.rules.soap(0.01), params)
    loss = lambda params, batch: sum(jnp.mean((batch @ w) ** 2) for w in params.values())
    batch = np.ones((8, 64), np.float32)
    step = ts.train_step(loss, donate=False)
    text = step.lower(ts.shard(state, ts.mesh()), batch).compile().as_text()
    assert "f32[1,64,64]" in text and "all-to-all" in text
    many, one = step(ts.shard(state, ts.mesh()), batch)[0], step(state, batch)[0]
    assert_trees_close(many.params, one.params, rtol=1e-5, atol=1e-6)


def test_a_rotation_of_the_problem_changes_nothing():
    """Adam depends on the axes in which a problem is written down, SOAP does not."""
    rng = np.random.default_rng(0)
    q, s = (np.linalg.qr(rng.normal(size=(8, 8)))[0] for _ in range(2))
    scales = np.outer(np.linspace(1, 3, 8), np.linspace(1, 2, 8))
    start = rng.normal(size=(8, 8))

    def losses(rule, q, s):
        loss = lambda w: jnp.sum((scales * (q.T @ w @ s)) ** 2)
        w, update = jnp.asarray(q @ start @ s.T, jnp.float32), jax.jit(rule.update)
        state, found = rule.init(w), []
        for _ in range(30):
            value, grads = jax.value_and_grad(loss)(w)
            updates, state = update(grads, state, w)
            w = optax.apply_updates(w, updates)
            found.append(float(value))
        return found

    eye, soap, adam = (
        np.eye(8),
        ts.rules.soap(0.05, eps=0.1, weight_decay=0.0, precondition_frequency=5),
        ts.rules.adam(0.05),
    )
    np.testing.assert_allclose(losses(soap, q, s), losses(soap, eye, eye), rtol=1e-3)
    assert abs(losses(adam, q, s)[-1] / losses(adam, eye, eye)[-1] - 1) > 0.05


def test_its_numbers_are_checked():
    with pytest.raises(ValueError, match=r"precondition_frequency at soap\(\): got 0, expected"):
        ts.rules.soap(0.01, precondition_frequency=0)
    with pytest.raises(ValueError, match=r"b1 at soap\(\)"):
        ts.rules.soap(0.01, b1=1.5)
