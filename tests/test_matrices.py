"""Muon over a mesh: the numbers of one device, a share of the products for each, and few bytes on the wire."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from tests.helpers import assert_trees_close
from tsunax.insight._cost import collectives_in
from tsunax.rules.matrices import map_matrices

FULLY, CLOSE = {"data": 1, "fsdp": 8}, {"rtol": 1e-5, "atol": 1e-5}


def matrices(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {f"w{i}": (rng.normal(size=shape) / 8).astype(np.float32) for i, shape in enumerate(shapes)}


def loss_fn(params, batch, mask):
    """A row goes through every matrix, of whatever shape."""
    total = 0
    for w in params.values():
        w = w.reshape(-1, *w.shape[-2:]) if w.ndim > 1 else w[None, None]
        out = jnp.tanh(jnp.einsum("bi,kij->bkj", batch[:, : w.shape[1]], w))
        total = total + jnp.mean((out - batch[:, None, : w.shape[2]]) ** 2, (1, 2))
    return ts.Loss.mean(total, where=mask)


def batches(n=4, rows=16, width=256):
    return np.random.default_rng(1).normal(size=(n, rows, width)).astype(np.float32)


def program(rule, params, axes=None, **options):
    """The compiled step, on a mesh with these axes or on one device."""
    state = ts.setup(rule, params)
    state = state if axes is None else ts.shard(state, ts.mesh(**axes), **options)
    return ts.train_step(loss_fn).lower(state, batches()[0]).compile()


def sent(compiled):
    return sum(c.bytes for c in collectives_in(compiled.as_text()))


def flops(compiled):
    return compiled.cost_analysis()["flops"]


# The program


@pytest.mark.medium
def test_few_bytes_fully_sharded():
    params = matrices(*[(256, 256)] * 4)
    adam = sent(program(ts.rules.adam(1e-3), params, FULLY))
    own = sent(program(ts.rules.muon(1e-3), params, FULLY))
    plain = sent(program(optax.contrib.muon(1e-3), params, FULLY))
    assert own <= 2 * adam and plain > 5 * adam, (adam, own, plain)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("count", "axes"),
    [
        (8, FULLY),
        *(pytest.param(k, axes, marks=pytest.mark.medium) for k in (4, 9) for axes in (FULLY, {})),
        pytest.param(8, {"data": 4, "fsdp": 2}, marks=pytest.mark.medium),
    ],
)
def test_a_share_of_the_products(count, axes):
    """Of k equal matrices each of 8 devices orthogonalizes ceil(k / 8)."""
    params = matrices(*[(128, 128)] * count)  # of smaller ones what is not a product weighs more than 5 %
    cost = lambda axes: (
        flops(program(ts.rules.muon(1e-3), params, axes)) - flops(program(ts.rules.adam(1e-3), params, axes))
    )
    share = math.ceil(count / 8) / count
    assert cost(axes) == pytest.approx(share * cost(None), rel=0.05)


# The numbers

PARAMS = {
    "five": [(64, 64)] * 5,
    "nine": [(64, 64)] * 9,
    "shapes": [(64, 32), (32, 64), (64, 64), (64, 64), (48, 40), (64,), (7, 5)],
    "stacked": [(6, 64, 32), (3, 64, 32), (64, 32), (32,)],
}
LAYOUTS = {
    "data": ({}, {}),
    "fsdp": (FULLY, {}),
    "zero1": ({}, {"zero1": True}),
    "both": ({"data": 2, "fsdp": 4}, {}),
    "tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, {"rules": {"w0": P(None, "tensor")}}),
}


def muon(params):
    if params != "stacked":
        return ts.rules.muon(0.02, ns_steps=2, weight_decay=0.01)
    last = lambda tree: jax.tree.map(lambda x: MuonDimensionNumbers(-2, -1) if x.ndim > 1 else None, tree)
    return ts.rules.muon(0.02, ns_steps=2, muon_weight_dimension_numbers=last)


@pytest.mark.parametrize(
    ("params", "layout"),
    [
        ("stacked", "fsdp"),
        *(("five", layout) for layout in ("data", "tensor")),
        *(
            pytest.param(params, layout, marks=pytest.mark.slow)
            for params in ("nine", "shapes", "stacked")
            for layout in LAYOUTS
        ),
    ],
)
def test_the_numbers_of_one_device(params, layout):
    """Accumulation, and a step that is rejected on the way."""
    axes, options = LAYOUTS[layout]
    one = ts.setup(muon(params), matrices(*PARAMS[params]), ema=0.9)
    many = ts.shard(one, ts.mesh(**axes), **options)
    assert jax.tree.structure(one) == jax.tree.structure(many)
    step, data = ts.train_step(loss_fn, accumulate=2, donate=False), batches(5)
    data[2, 3] = np.nan
    for batch in data:
        one, expected = step(one, batch)
        many, info = step(many, batch)
        np.testing.assert_allclose(info.loss, expected.loss, rtol=1e-5)
    assert int(one.rejected) == int(many.rejected) == 1
    assert_trees_close((many.params, many.opt_state, many.average), (one.params, one.opt_state, one.average), **CLOSE)


@pytest.mark.medium
def test_fused_in_fit():
    one = ts.setup(muon("nine"), matrices(*PARAMS["nine"]))
    many, data, step = ts.shard(one, ts.mesh(**FULLY)), list(batches(6)), ts.train_step(loss_fn, donate=False)
    one, expected = ts.fit(step, one, data, steps=6, steps_per_call=3, log_every=1, progress=False)
    many, found = ts.fit(step, many, data, steps=6, steps_per_call=3, log_every=1, progress=False)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    assert_trees_close(many.params, one.params, **CLOSE)


OPTIONS = {
    "plain": {},
    "dion": {"ns_coeffs": "dion"},
    "aol": {"preconditioning": "aol", "ns_steps": 4},
    "schatten": {"preconditioning": "schatten"},
    "spectral": {"preconditioning": "spectral"},
    "adaptive": {"adaptive": True, "nesterov": False},
    "bf16": {"mu_dtype": jnp.bfloat16},
    "rms": {"consistent_rms": 0.2, "adam_learning_rate": 1e-3, "adam_b1": 0.8},
    "masked": {"weight_decay": 0.1, "weight_decay_mask": {"w0": True, "w1": False, "w2": False}},
    "tree": {"muon_weight_dimension_numbers": {"w0": MuonDimensionNumbers((0, 2), -2), "w1": None, "w2": None}},
    "prefix": {"muon_weight_dimension_numbers": MuonDimensionNumbers(1, 0)},
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in ("dion", "tree") else pytest.mark.medium) for x in OPTIONS]
)
def test_the_options_of_optax(name):
    """In plain optax code, with the mesh as an extra argument: the update of optax's own."""
    params = matrices((8, 16, 12) if name == "tree" else (24, 16), (24, 16), *([] if name == "prefix" else [(16,)]))
    own, mesh = ts.rules.muon(0.1, **OPTIONS[name]), ts.mesh(**FULLY)
    tx = optax.contrib.muon(0.1, **OPTIONS[name])
    state, expected = own.init(params), tx.init(params)
    update = jax.jit(lambda grads, state: own.update(grads, state, params, device_mesh=mesh))
    for seed in range(3):
        grads = matrices(*map(np.shape, params.values()), seed=seed)
        found, state = update(grads, state)
        reference, expected = jax.jit(tx.update)(grads, expected, params)
        assert_trees_close(found, reference, **CLOSE)
        assert jax.tree.structure(state.inner) == jax.tree.structure(expected)
        assert_trees_close(state.inner, expected, **CLOSE)


@pytest.mark.medium
def test_other_functions_of_whole_matrices():
    """The inverse roots of Shampoo, of stacks of different sizes."""
    root = lambda m: jnp.linalg.inv(jnp.linalg.cholesky(m @ m.T + jnp.eye(len(m))))
    stacks = [jax.random.normal(jax.random.key(k), (k, n, n)) for k, n in ((3, 4), (1, 6), (9, 4), (8, 5))]
    found = jax.jit(lambda stacks: map_matrices(root, stacks, ts.mesh()))(stacks)
    assert_trees_close(found, [jax.vmap(root)(x) for x in stacks], rtol=1e-5, atol=1e-6)


@pytest.mark.medium
def test_a_population_shares_members_instead():
    params = matrices((32, 32), (32, 32))
    runs = ts.population(lambda key, rate: ts.setup(ts.rules.muon(rate), params), 8, rate=np.linspace(0.01, 0.08, 8))
    step = ts.train_step(loss_fn, donate=False)
    text = step.lower(ts.shard(runs, ts.mesh()), batches()[0]).compile().as_text()
    assert not any(c.kind == "all-to-all" for c in collectives_in(text))
    one, many = step(runs, batches()[0])[0], step(ts.shard(runs, ts.mesh()), batches()[0])[0]
    assert_trees_close(many.params, one.params, **CLOSE)


@pytest.mark.medium
def test_explicit_axes():
    one = ts.setup(ts.rules.muon(0.02), matrices((64, 64), (64, 64), (32,)))
    many, step = ts.shard(one, ts.mesh(explicit=True)), ts.train_step(loss_fn, donate=False)
    for batch in batches(2):
        one, many = step(one, batch)[0], step(many, batch)[0]
    assert_trees_close(many.params, one.params, **CLOSE)


@pytest.mark.medium
def test_a_mesh_given_to_an_update():
    one = ts.setup(ts.rules.muon(0.02), matrices((64, 32)))
    mesh, grads = ts.mesh(**FULLY), jax.tree.map(jnp.asarray, matrices((64, 32), seed=1))
    many = ts.shard(one, mesh)
    one, _ = ts.update(one, grads)
    update = lambda many: ts.update(many, grads, device_mesh=mesh)[0].params
    for params in (update(many), jax.jit(update)(many)):
        assert_trees_close(params, one.params, **CLOSE)


@pytest.mark.medium
def test_a_checkpoint_goes_from_one_device_to_a_mesh_and_back(tmp_path):
    one = ts.setup(ts.rules.muon(0.02), matrices((64, 64), (64, 64), (32,)))
    many, step = ts.shard(one, ts.mesh(**FULLY)), ts.train_step(loss_fn, donate=False)
    one, many = step(one, batches()[0])[0], step(many, batches()[0])[0]
    with ts.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(many)
    with ts.Checkpoints(tmp_path) as checkpoints:
        again = checkpoints.restore(one).state
    assert_trees_close(again.params, one.params, **CLOSE)
    assert_trees_close(step(again, batches()[1])[0].params, step(many, batches()[1])[0].params, **CLOSE)
