"""Collections whose gradient replaces them (fp8 scales), against flax's own TrainState."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from flax import linen
from flax.training.train_state import TrainState
from tests.helpers import assert_trees_equal
from tsunax.errors import NonFiniteError, PatternError

OWG = "_overwrite_with_gradient"


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        dense = functools.partial(linen.Dense, dot_general_cls=linen.Fp8DirectDotGeneralOp)
        hidden = dense(32)(x)
        return dense(16)(jax.nn.relu(hidden))


NET = Net()
X = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
VARIABLES = jax.jit(NET.init)(jax.random.key(0), X)


def loss_fn(params, batch):
    return jnp.mean((NET.apply(params, batch) - 1) ** 2)


def batch(i):
    return X * np.float32(1 + i)


def start(rule=None, **options):
    return ts.setup(rule or ts.rules.adam(1e-2), VARIABLES, **options)


@functools.cache
def gradient(accumulate=1):
    return jax.jit(ts.value_and_grad(loss_fn, accumulate=accumulate))


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


@functools.cache
def by_flax(steps, every=1):
    """flax's own training state, in a step that computes what ours computes."""
    tx = optax.adam(1e-2) if every == 1 else optax.MultiSteps(optax.adam(1e-2), every)
    state = TrainState.create(apply_fn=NET.apply, params=VARIABLES, tx=tx)

    @jax.jit
    def step(state, x):
        value, grads = jax.value_and_grad(loss_fn)(state.params, x)
        new = state.apply_gradients(grads=grads)
        norm, moved = (
            optax.tree.norm(tree["params"]) for tree in (grads, jax.tree.map(jnp.subtract, new.params, state.params))
        )
        taken = jnp.isfinite(value) & jnp.isfinite(norm)
        return jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, state), (value, norm, moved)

    for i in range(steps):
        state, _ = step(state, batch(i))
    return state


# Its two programs are fused alike, and so have the same bits, as users' programs are compiled: `.ci/weekly` does.
IS_QUICKLY_COMPILED = "--xla_backend_optimization_level=1" in os.environ.get("XLA_FLAGS", "")


@pytest.mark.medium
@pytest.mark.skipif(IS_QUICKLY_COMPILED, reason="needs TSUNAX_TEST_COMPILER=default")
def test_the_gradient_replaces_them_as_in_flax():
    state, step = start(), ts.train_step(loss_fn)
    rows = jax.tree.leaves(state.opt_state)
    assert len(rows) == 1 + 2 * len(jax.tree.leaves(VARIABLES["params"]))  # a count, and no moments of theirs
    assert not jax.tree.leaves(ts.trainable(state)[OWG])  # model state, in all but the place where flax keeps it
    for i in range(5):
        state, _ = step(state, batch(i))
    expected = by_flax(5)
    assert_trees_equal(state.params, expected.params)
    scales = [x for path, x in jax.tree_util.tree_flatten_with_path(state.params[OWG])[0] if "scale" in str(path)]
    assert (flat(scales) != 1).all()


@pytest.mark.medium
def test_norms_moments_masters_and_averages_are_without_them():
    low = ts.precision.Policy(param="bfloat16", compute="bfloat16")
    state = start(precision=low, ema=0.9, loss_scale=256.0)
    for tree in (state.masters, state.average.params):
        assert len(jax.tree.leaves(tree)) == len(jax.tree.leaves(VARIABLES["params"]))
    seen = []

    def fn(params, batch, ema):
        seen.extend(str(x.dtype) for tree in (params, ema) for x in jax.tree.leaves(tree[OWG]))
        return loss_fn(params, batch).astype(jnp.float32)

    loss, grads = gradient()(start(), batch(1))
    _, info = ts.update(start(), grads, loss=loss)
    np.testing.assert_allclose(info.grad_norm, np.linalg.norm(flat(grads["params"])), rtol=1e-6)
    after, _ = ts.train_step(fn, donate=False)(state, batch(1))
    assert set(seen) == {"float32"}
    assert {str(x.dtype) for x in jax.tree.leaves(after.params[OWG])} == {"float32"}
    history = after.params[OWG]["Dense_0"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    np.testing.assert_allclose(history[0], 2 * np.abs(X).max(), rtol=1e-2)  # not unscaled
    assert_trees_equal(ts.averaged(after).params[OWG], after.params[OWG])


@pytest.mark.medium
@pytest.mark.parametrize("accumulate", [4])
def test_micro_batches_combine_by_their_maximum(accumulate):
    x = batch(0) * np.linspace(1, 2, 32, dtype=np.float32)[:, None]
    new = lambda x, accumulate=1: gradient(accumulate)(start(), x)[0].overwritten[OWG]
    whole, parts = new(x), new(x, accumulate)
    one = lambda i: new(x[i::accumulate])
    expected = functools.reduce(lambda a, b: jax.tree.map(np.maximum, a, b), map(one, range(accumulate)))
    np.testing.assert_allclose(flat(parts), flat(expected), rtol=1e-5)
    for path, got in jax.tree_util.tree_flatten_with_path(parts["Dense_0"])[0]:
        if "input" in str(path) or "kernel" in str(path):  # those are of the batch, however it is cut
            full = functools.reduce(lambda tree, key: tree[key.key], path, whole["Dense_0"])
            np.testing.assert_array_equal(got, full)


@pytest.mark.slow
def test_calls_that_only_gather_overwrite_as_in_flax():
    state = start(ts.rules.accumulate(ts.rules.adam(1e-2), every=2))
    step = ts.train_step(loss_fn)
    for i in range(3):
        state, info = step(state, batch(i))
    assert not bool(info.applied) and int(state.step) == 1
    expected = by_flax(3, every=2)
    np.testing.assert_allclose(flat(state.params), flat(expected.params), rtol=1e-6, atol=1e-7)
    after = ts.flush(state)
    assert int(after.step) == 2
    assert_trees_equal(after.params[OWG], state.params[OWG])


@pytest.mark.medium
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_rejected_step_overwrites_nothing(accumulate):
    bad = batch(0)
    bad[3] = np.nan
    state = start()
    after, info = ts.train_step(loss_fn, accumulate=accumulate, donate=False)(state, bad)
    assert not bool(info.applied)
    assert_trees_equal(after.params, state.params)
    with pytest.raises(NonFiniteError, match="loss: got nan"):
        ts.train_step(loss_fn, accumulate=accumulate, on_nonfinite="raise", donate=False)(state, bad)


@pytest.mark.medium
def test_a_next_value_that_is_not_finite_rejects_the_step():
    loss, grads = gradient()(start(), batch(0))
    bad = jax.tree.map(lambda x: x * jnp.nan, loss.overwritten)
    after, info = ts.update(start(), grads, loss=dataclasses.replace(loss, overwritten=bad))
    assert not bool(info.applied)
    assert_trees_equal(after.params, start().params)


@pytest.mark.medium
def test_unselected_ones_stay_and_frozen_params_do_not_stop_them():
    step = ts.train_step(loss_fn, donate=False)
    for where, moves in (("params/Dense_0/**", 3), ("**", 2)):  # as batch statistics go on under a freeze
        state = ts.freeze(start(), where)
        after, _ = step(state, batch(0))
        kept = jax.tree.map(lambda a, b: bool((a == b).all()), after.params, state.params)
        same = {f"{kind}/{layer}": all(jax.tree.leaves(kept[kind][layer])) for kind in kept for layer in kept[kind]}
        assert sum(not x for x in same.values()) == moves, same
        assert same["params/Dense_0"] and not same[f"{OWG}/Dense_0"]
    with pytest.raises(PatternError, match="left out"):
        ts.freeze(start(), f"{OWG}/**")
    left_out = start(trainable="params/**")
    after, _ = step(left_out, batch(0))
    assert_trees_equal(after.params[OWG], left_out.params[OWG])
    assert (flat(after.params["params"]) != flat(left_out.params["params"])).any()


@pytest.mark.medium
def test_numbers_of_a_part_are_cut_beside_them():
    state = ts.adjust(start(), "params/Dense_0/**", learning_rate=0.0)
    after, _ = ts.train_step(loss_fn, donate=False)(state, batch(0))
    assert_trees_equal(after.params["params"]["Dense_0"], state.params["params"]["Dense_0"])
    assert (flat(after.params["params"]["Dense_1"]) != flat(state.params["params"]["Dense_1"])).any()


@pytest.mark.slow
def test_a_line_search_finds_its_loss():
    state = start(ts.rules.lbfgs())
    after, info = ts.train_step(loss_fn)(state, batch(0))
    assert bool(info.applied) and float(loss_fn(after.params, batch(0))) < float(info.loss)


@pytest.mark.slow
def test_the_adapter_of_linen_puts_them_beside_the_params():
    model = ts.models.linen(NET, VARIABLES)
    assert set(model.params) == {"params", OWG} and not model.model_state
    fn = lambda params, x: jnp.mean((model.apply(params, x)[0] - 1) ** 2)
    state = ts.setup(ts.rules.adam(1e-2), model.params)
    step = ts.train_step(fn)
    for i in range(3):
        state, _ = step(state, batch(i))
    np.testing.assert_allclose(flat(state.params), flat(by_flax(3).params), rtol=1e-6, atol=1e-7)
    assert model.build(state)(X).shape == (32, 16)
