"""Sums of cotangents kept in memory: the same bits, in every program that a step may be part of, on CPU only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from jax import export
from jax.extend import core
from tests.helpers import assert_trees_equal, medium_if
from tsunax._cpu import kept_sums

DRAW = np.random.default_rng(0)
PARAMS = {"w": jnp.asarray(DRAW.standard_normal((3, 128, 128)) / 12, jnp.float32), "g": jnp.ones((3, 128))}
X = DRAW.standard_normal((128, 128)).astype(np.float32)  # 64 KiB


def block(x, w, g):
    norm = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * g[None]
    return x + jnp.tanh(norm @ w)


def unrolled(params, x):
    for w, g in zip(params["w"], params["g"], strict=True):
        x = block(x, w, g)
    return jnp.mean(x**2)


def scanned(params, x):
    x, _ = jax.lax.scan(lambda x, wg: (block(x, *wg), None), x, (params["w"], params["g"]))
    return jnp.mean(x**2)


def programs(jaxpr):
    """A program, and all in it."""
    yield (jaxpr := getattr(jaxpr, "jaxpr", jaxpr))
    for eqn in jaxpr.eqns:
        for x in eqn.params.values():
            for inner in x if isinstance(x, tuple) else (x,):
                if isinstance(inner, (core.Jaxpr, getattr(core, "ClosedJaxpr", core.Jaxpr))):
                    yield from programs(inner)


def kept_in(step, state, batch) -> int:
    program = step.trace(state, batch).jaxpr
    return sum(eqn.params.get("name") == "kept_sum" for inner in programs(program) for eqn in inner.eqns)


def start(**options):
    return ts.setup(ts.rules.adam(1e-2), PARAMS, **options)


def trained(step, state, **fit):
    if fit:
        return ts.fit(step, state, [X], steps=3, progress=False, **fit)[0]
    for _ in range(2):
        state, _ = step(state, X)
    return state


def never(monkeypatch):
    monkeypatch.setattr(kept_sums, "MIN_BYTES", 1 << 60)


CASES = {  # the loss, what train_step takes, what setup takes, what fit takes
    "unrolled": (unrolled, {}, {}, {}),
    "scan over layers": (scanned, {}, {}, {}),
    "remat": (unrolled, {"remat": True}, {}, {}),
    "micro-batches": (
        lambda p, x: jnp.repeat(unrolled(p, jnp.repeat(x, 2, 0))[None], len(x)).mean(),
        {"accumulate": 2},
        {},
        {},
    ),
    "bfloat16": (lambda p, x: unrolled(p, jnp.concatenate([x, x])), {}, {"precision": "bfloat16"}, {}),
    "a loop": (unrolled, {}, {}, {"steps_per_call": 3}),
}


MORE = "scan over layers", "remat", "bfloat16"  # the same rewriting, of other programs


@pytest.mark.medium
@pytest.mark.parametrize("name", medium_if(MORE.__contains__, CASES))
def test_bits_are_those_without_it(name, monkeypatch):
    loss_fn, options, setting, fit = CASES[name]
    step = ts.train_step(loss_fn, **options)
    # since jax 0.12 no sum in the body of a scan is read twice
    is_none = name == "scan over layers" and jax.__version_info__ >= (0, 11)
    assert (kept_in(step, start(**setting), X) == 0) == is_none
    kept = trained(step, start(**setting), **fit)
    never(monkeypatch)
    plain = ts.train_step(lambda params, x: loss_fn(params, x), **options)
    assert kept_in(plain, start(**setting), X) == 0
    assert_trees_equal(kept, trained(plain, start(**setting), **fit))


@pytest.mark.medium
def test_members_of_a_population_train_as_their_single_runs():
    step = ts.train_step(unrolled, donate=False)
    runs = jax.vmap(lambda rate: ts.setup(ts.rules.sgd(rate), PARAMS))(jnp.array([0.1, 0.3]))
    runs, _ = step(runs, X)
    single, _ = step(ts.setup(ts.rules.sgd(0.3), PARAMS), X)
    np.testing.assert_allclose(runs.params["w"][1], single.params["w"], rtol=1e-5, atol=1e-7)


@pytest.mark.medium
def test_a_step_can_be_differentiated():
    step = ts.train_step(unrolled)
    state = ts.setup(ts.rules.sgd(0.1), PARAMS)

    def after(scale):
        new, _ = step.pure(state.replace(params=jax.tree.map(lambda p: p * scale, PARAMS)), X, {})
        return unrolled(new.params, X)

    rate = jax.jit(jax.grad(after))(1.0)
    below, above = (jax.jit(after)(1 + e) for e in (-1e-2, 1e-2))
    np.testing.assert_allclose(rate, (above - below) / 2e-2, rtol=5e-2)


def test_not_finite_sums_stay_as_they_are():
    f = lambda x: jnp.sum(jnp.sin(x) * jnp.exp(x) * x)
    x = jnp.asarray(X).at[0, 0].set(jnp.nan).at[3, 3].set(jnp.inf)
    np.testing.assert_array_equal(jax.jit(kept_sums.keep_sums(jax.grad(f)))(x), jax.jit(jax.grad(f))(x))


def test_other_platforms_meshes_and_small_sums_have_the_program_of_before():
    f = jax.jit(kept_sums.keep_sums(jax.grad(unrolled)))
    text = lambda platform: f.trace(PARAMS, X).lower(lowering_platforms=(platform,)).as_text()
    assert "bitcast_convert" in text("cpu") and "bitcast_convert" not in text("cuda") + text("tpu")
    step = ts.train_step(unrolled)
    assert kept_in(step, ts.shard(start(), ts.mesh()), X) == 0
    assert kept_in(step, start(), X[:8]) == 0


def test_a_weight_that_follows_from_the_shapes_is_still_known():
    step = ts.train_step(lambda params, x: ts.Loss.mean(jnp.sum(jnp.tanh(x @ params["w"][0]) ** 2, -1)))
    _, info = step(start(), X)
    assert isinstance(info.weight, np.ndarray | np.generic) and info.weight == len(X)


def test_sums_of_symbolic_shapes_are_left_alone():
    """`jax.export` with a batch of any size: nobody knows how large they are."""
    (rows,) = export.symbolic_shape("rows")
    loss_fn = lambda params, x: ts.Loss(unrolled(params, x), 1.0)
    grads = jax.jit(lambda state, x: ts.value_and_grad(loss_fn)(state, x)[1])
    exported = export.export(grads)(start(), jax.ShapeDtypeStruct((rows, 128), jnp.float32))
    assert_trees_equal(exported.call(start(), X), jax.jit(jax.grad(unrolled))(PARAMS, X))
