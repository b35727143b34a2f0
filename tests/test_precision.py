"""What is computed in which dtype, master copies, stochastic rounding, and the loss scale."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests import gpu_facts, toys
from tests.helpers import assert_trees_close, assert_trees_equal
from tsunax.errors import HyperparameterError, NonFiniteError, StateError, WrongTypeError
from tsunax.precision import LossScale, Policy, cast, round_stochastically

BF16 = Policy(param="bfloat16", compute="bfloat16")
STOCHASTIC = Policy(param="bfloat16", compute="bfloat16", rounding="stochastic")


def make_params():
    return {"w": jax.random.normal(jax.random.key(0), (4, 3)), "n": jnp.arange(2)}


X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"]).astype(jnp.float32) ** 2)


def start(rule=None, **options):
    return ts.setup(rule or ts.rules.sgd(0.1), make_params(), trainable="w", **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_loss_function_sees_the_policy_and_nobody_else(dtype):
    seen = {}

    def fn(params, batch, model_state, train):
        kinds = {"w": params["w"], "n": params["n"], **batch, "m": model_state["m"]}
        seen[train] = {name: str(x.dtype) for name, x in kinds.items()}
        return ts.Loss.mean(jnp.square(batch["x"] @ params["w"]).sum(-1), model_state={"m": model_state["m"] + 1})

    state = start(precision=dtype, model_state={"m": jnp.zeros(2)}, ema=0.9)
    batch = {"x": X, "y": np.arange(8)}
    after, info = ts.train_step(fn, donate=False, norms="update")(state, batch)
    ts.eval_step(fn)(state, batch)
    assert seen[True] == {"w": dtype, "n": "int32", "x": dtype, "y": "int32", "m": "float32"}
    assert seen[False] == seen[True] | {"w": "float32", "x": "float32"}
    assert {str(x.dtype) for x in (after.params["w"], after.average.params["w"], after.model_state["m"])} == {"float32"}
    assert {str(x.dtype) for x in (info.loss, info.grad_norm, info.update_norm)} == {"float32"}


def regression(model):
    def fn(params, batch):
        errors = (model(params, batch["x"]) - batch["y"]) ** 2
        SEEN.update({name: str(x.dtype) for name, x in {**batch, "w": params["w"]}.items()})
        return ts.Loss.mean(errors, batch["weight"])

    return fn


SEEN: dict[str, str] = {}
W = np.array([1.0, 2.0, 3.0, 4.0], np.float32)


def convolution(params, x):
    return jax.lax.conv(x[:, None], params["w"][None, None], (1,), "VALID").sum((1, 2))


def recurrent(params, x):
    """The products are in the body of a scan, and all that happens before is in the way."""
    read = lambda h, row: (jnp.tanh(h + row @ params["w"][:1]), None)
    rows = (jnp.where(x > 0, x, 0) / 2).T[..., None]
    return jax.lax.scan(jax.checkpoint(read), jnp.zeros(len(x), params["w"].dtype), rows)[0]


def on_each_device(params, x):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec
    return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(spec("i"), spec()), out_specs=spec("i"))(x, params["w"])


def ragged(params, x):
    return jax.lax.ragged_dot(x, params["w"][None, :, None], jnp.array([len(x)]))[:, 0]


MODELS = {
    "product": lambda params, x: x @ params["w"],
    "on each device": on_each_device,
    "ragged": ragged,
    "rows": lambda params, x: jax.vmap(jax.jit(jnp.dot), (0, None))(x, params["w"]),
    "convolution": convolution,
    "recurrent": recurrent,
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.several_devices] if n == "on each device" else []) for n in MODELS]
)
def test_inputs_are_cast_and_targets_and_weights_are_not(name, accumulate):
    """Targets near 1000 are multiples of 4 in bfloat16."""
    state = ts.setup(ts.rules.sgd(0.1), {"w": W}, precision="bfloat16")
    batch = {"x": X, "y": X @ W + 1000, "weight": np.linspace(1, 2, 8, dtype=np.float32)}
    step = ts.train_step(regression(MODELS[name]), accumulate=accumulate)
    step.lower(state, batch)
    assert SEEN == {"w": "bfloat16", "x": "bfloat16", "y": "float32", "weight": "float32"}
    lines = str(step.trace(state, batch).jaxpr).splitlines()
    dots = [line for line in lines if "dot_general[" in line or "conv_g" in line]  # ragged_dot_general[ too
    assert dots and all(":bf16" in line for line in dots)


def test_an_evaluation_is_exact_unless_it_is_asked_to_be_fast():
    """A perfect fit of targets near 1000; and a fit in bfloat16 looked at in bfloat16."""
    fn = regression(lambda params, x: x @ params["w"] + params["b"])
    batch = {"x": X, "y": X @ W + np.float32(1000.3), "weight": np.ones(8, np.float32)}
    params = {"b": np.float32(1000.3), "w": W}
    start = lambda precision: ts.setup(ts.rules.sgd(0.1), params, precision=precision)
    exact = float(ts.eval_step(fn)(start(None), batch).compute())
    assert exact < 1e-8
    for precision in ("bfloat16", "float16"):
        assert float(ts.eval_step(fn)(start(precision), batch).compute()) == exact
        assert set(SEEN.values()) == {"float32"}
    fast = Policy(compute="bfloat16", evaluate="bfloat16")
    assert float(ts.eval_step(fn)(start(fast), batch).compute()) > 0.01
    assert SEEN == {"w": "bfloat16", "x": "bfloat16", "y": "float32", "weight": "float32"}
    everything = Policy(compute="bfloat16", evaluate="bfloat16", batch="**")
    ts.eval_step(fn)(start(everything), batch)
    assert set(SEEN.values()) == {"bfloat16"}


@pytest.mark.parametrize("accumulate", [1, 4])
def test_inputs_are_looked_for_once_in_a_trace(accumulate):
    """Once more than without a precision."""
    found = []

    def fn(params, batch):
        found.append(1)
        return loss_fn(params, batch)

    for precision, expected in [(None, 1), ("bfloat16", 2)]:
        found.clear()
        ts.train_step(fn, accumulate=accumulate).lower(start(precision=precision), {"x": X})
        assert len(found) == expected


def test_the_batch_may_be_narrowed():
    seen = {}

    def fn(params, batch):
        seen.update({name: str(x.dtype) for name, x in batch.items()})
        return jnp.mean(batch["x"] @ params["w"])

    ts.train_step(fn)(start(precision=Policy(compute="bfloat16", batch=["**", "!t"])), {"x": X, "t": X[:, 0]})
    assert seen == {"x": "bfloat16", "t": "float32"}


@pytest.mark.parametrize("batch", [None, {}])
def test_a_loss_of_no_batch_has_a_precision_too(batch):
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)}, precision="bfloat16")
    state, info = ts.train_step(lambda params, batch: jnp.sum(params["w"]).astype(jnp.float32))(state, batch)
    assert float(info.loss) == 2 and bool(info.applied)


def test_in_bfloat16_it_is_the_hand_written_cast():
    state, step = start(ts.rules.adam(0.1), precision="bfloat16"), ts.train_step(loss_fn)
    params, tx = {"w": make_params()["w"]}, optax.adam(0.1)
    opt_state = tx.init(params)

    @jax.jit
    def plain(params, opt_state):
        low = lambda p: loss_fn(cast(p, jnp.bfloat16), {"x": jnp.asarray(X, jnp.bfloat16)})
        updates, opt_state = tx.update(jax.grad(low)(params), opt_state)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(5):
        state, _ = step(state, {"x": X})
        params, opt_state = plain(params, opt_state)
    assert_trees_close(state.params["w"], params["w"], rtol=1e-6, atol=1e-6)


def test_updates_below_the_rounding_add_up_in_a_master_copy_and_are_lost_without():
    """100 updates of 1e-3 on 1.0 change nothing in bfloat16."""
    run = lambda **options: many(ts.setup(ts.rules.sgd(1.0), {"w": jnp.ones(3, jnp.bfloat16)}, **options))

    def many(state):
        step = jax.jit(lambda s: ts.update(s, {"w": jnp.full(3, 1e-3, s.params["w"].dtype)})[0])
        for _ in range(100):
            state = step(state)
        return state

    assert (np.asarray(run().params["w"], np.float32) == 1).all()
    state = run(precision=BF16)
    assert state.params["w"].dtype == jnp.bfloat16 and state.masters["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.masters["w"], 0.9, rtol=2e-3)
    np.testing.assert_array_equal(state.params["w"], state.masters["w"].astype(jnp.bfloat16))
    state = run(precision=STOCHASTIC, key=0)
    assert state.masters is None and state.params["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(state.params["w"], np.float32), 0.9, atol=0.05)


@pytest.mark.medium
def test_stochastic_rounding_is_unbiased_and_keeps_what_fits():
    x = jnp.full(20000, 1.0 + 2**-10)  # an eighth of the way to the next bfloat16
    got = np.asarray(round_stochastically([x], jax.random.key(0))[0], np.float64)
    assert set(got) == {1.0, 1.0 + 2**-7}
    np.testing.assert_allclose(got.mean(), 1.0 + 2**-10, atol=5 * 2**-7 * np.sqrt(1 / 8 * 7 / 8 / 20000))
    exact = jnp.array([0.0, -1.5, jnp.inf, -jnp.inf, 2.0**-120])
    np.testing.assert_array_equal(round_stochastically([exact], jax.random.key(1))[0].astype(jnp.float32), exact)
    assert np.isnan(round_stochastically([jnp.array([jnp.nan])], jax.random.key(2))[0].astype(jnp.float32)).all()


def test_complex_params_are_not_rounded_and_keep_their_imaginary_part():
    params = {"w": jnp.ones(2), "c": jnp.full(2, 1 + 1j, jnp.complex64)}
    state = ts.setup(ts.rules.sgd(0.1), params, precision=STOCHASTIC, key=0)
    state, _ = ts.update(state, {"w": jnp.ones(2, jnp.bfloat16), "c": jnp.full(2, 1j, jnp.complex64)})
    np.testing.assert_allclose(state.params["c"], np.full(2, 1 + 0.9j), rtol=1e-6)
    assert state.params["c"].dtype == jnp.complex64 and state.params["w"].dtype == jnp.bfloat16


# --------------------------------------------------------------------------------------------------- complex params

ZEROS, GOAL = {"z": np.zeros(2, np.complex64)}, np.array([1 + 2j, -3j], np.complex64)


def distance(params, batch):
    return jnp.mean(jnp.sum(jnp.abs(params["z"][None] - batch) ** 2, -1))


@pytest.mark.medium
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("scale", [None, 4.0])
def test_a_step_of_complex_params_is_steepest_descent(accumulate, scale):
    """The minimum of `|z - goal|²` is one step of rate 1/2 away; JAX's own gradient leads to the goal's conjugate."""
    state, batch = ts.setup(ts.rules.sgd(0.5), ZEROS, loss_scale=scale), np.stack([GOAL, GOAL])
    at = {"z": jnp.full(2, 1j, jnp.complex64)}
    _, grads = ts.value_and_grad(distance, accumulate=accumulate)(state, batch, at=at)
    np.testing.assert_allclose(grads["z"], 2 * (1j - GOAL), rtol=1e-6)
    state, info = ts.train_step(distance, accumulate=accumulate)(state, batch)
    np.testing.assert_allclose(state.params["z"], GOAL, rtol=1e-6)
    np.testing.assert_allclose(info.grad_norm, 2 * np.linalg.norm(GOAL), rtol=1e-6)


def test_a_line_search_over_complex_params_goes_downhill():
    """optax compares the slope with JAX's own gradient: with another one a step of 1, to and fro, is taken for good."""
    search = optax.scale_by_backtracking_linesearch(20, store_grad=True)
    state = ts.setup(optax.chain(optax.sgd(1.0), search), {"z": np.zeros(1, np.complex64)})
    step, batch = ts.train_step(distance), np.full((1, 1), -3j, np.complex64)
    for _ in range(8):
        state, _ = step(state, batch)
    np.testing.assert_allclose(state.params["z"], [-3j], atol=0.1)


@pytest.mark.parametrize(
    ("penalty", "rule"),
    [
        (lambda p: 0.1 * ts.regularize.l2(p), ts.rules.add_decayed_weights(0.1)),
        (lambda p: 0.1 * ts.regularize.l1(p), ts.rules.sign_decay(0.1)),
    ],
)
def test_penalties_on_complex_params_are_their_decay(penalty, rule):
    params = {"z": np.array([3 + 4j, -1j, 0], np.complex64)}
    nothing = lambda params, batch: jnp.mean(jnp.abs(params["z"] - params["z"]))
    by_rule, _ = ts.train_step(nothing)(ts.setup(ts.rules.chain(rule, ts.rules.sgd(0.5)), params), jnp.ones(1))
    by_loss, _ = ts.train_step(lambda p, batch: penalty(p))(ts.setup(ts.rules.sgd(0.5), params), jnp.ones(1))
    assert_trees_close(by_loss.params, by_rule.params, rtol=1e-6, atol=1e-6)
    assert (np.abs(by_loss.params["z"][:2]) < np.abs(params["z"][:2])).all()


def test_gradients_given_to_update_are_used_as_they_are():
    state, _ = ts.update(ts.setup(ts.rules.sgd(1.0), ZEROS), {"z": jnp.asarray(GOAL)})
    np.testing.assert_array_equal(state.params["z"], -GOAL)


def test_masters_stay_true_when_params_are_replaced_and_frozen_ones_stay():
    state = start(precision=BF16)
    new = {"w": jnp.full((4, 3), 0.5, jnp.bfloat16), "n": jnp.arange(2)}
    state = state.replace(params=new)
    np.testing.assert_array_equal(state.masters["w"], np.full((4, 3), 0.5, np.float32))
    frozen = ts.freeze(state, "w")
    after, _ = ts.train_step(loss_fn, donate=False)(frozen, {"x": X})
    assert_trees_equal((after.params, after.masters), (frozen.params, frozen.masters))
    again, _ = ts.train_step(loss_fn)(ts.thaw(after), {"x": X})
    assert (np.asarray(again.masters["w"]) != 0.5).all()


# -------------------------------------------------------------------------------------------------- the loss scale


def scaled(params, batch):
    """A loss whose gradient is below float16's smallest number, unless it is scaled; `big` makes it overflow."""
    return jnp.mean((batch["x"] @ params["w"]) * batch["f"])


@pytest.mark.medium
def test_small_gradients_survive_by_the_scale():
    def fn(params, batch):  # every cotangent passes through float16
        return jnp.mean(((batch["x"] @ params["w"]) * jnp.float16(1e-4)) * jnp.float16(1e-4)).astype(jnp.float32)

    moved = {}
    for scale in (1.0, 1024.0, 2.0**14):
        state = start(precision="float16", loss_scale=scale)
        _, grads = ts.value_and_grad(fn)(state, {"x": X})
        moved[scale] = np.abs(np.asarray(grads["w"])).max()
    assert moved[1.0] == 0
    exact = np.abs(X.astype(np.float64).mean(0)).max() / 3 * 1e-8
    np.testing.assert_allclose(moved[2.0**14], exact, rtol=0.1)


def test_the_scale_halves_where_it_overflows_and_doubles_after_its_interval():
    state = start(precision="float16", loss_scale=LossScale(2.0**14, interval=3, ceiling=2.0**15))
    step, seen = ts.train_step(scaled), []
    for factor in (1, 1, 1e5, 1, 1, 1, 1, 1, 1, 1, 1, 1):
        state, info = step(state, {"x": X, "f": np.float32(factor)})
        seen.append((bool(info.applied), float(np.log2(state.loss_scale.scale)), int(state.loss_scale.good)))
    assert seen[:6] == [(True, 14, 1), (True, 14, 2), (False, 13, 0), (True, 13, 1), (True, 13, 2), (True, 14, 0)]
    assert seen[8] == (True, 15, 0) and seen[11] == (True, 15, 0)  # the ceiling
    assert int(state.rejected) == 1 and int(state.step) == 11


def test_clipping_and_norms_see_unscaled_gradients():
    rule = ts.rules.chain(ts.rules.clip_by_global_norm(1e6), ts.rules.sgd(0.1))
    half, full = start(rule, precision="float16", loss_scale=1024.0), start(rule)
    (a, i), (b, j) = (ts.train_step(scaled)(s, {"x": X, "f": np.float32(1)}) for s in (half, full))
    np.testing.assert_allclose(i.grad_norm, j.grad_norm, rtol=1e-2)
    np.testing.assert_allclose(a.params["w"], b.params["w"], rtol=1e-2, atol=1e-3)


@pytest.mark.medium
def test_raise_waits_for_the_scale_and_then_tells_where_it_ended():
    state = start(precision="float16", loss_scale=LossScale(4.0, floor=1.0))
    step, bad = ts.train_step(scaled, on_nonfinite="raise"), {"x": X, "f": np.float32(np.inf)}
    state, _ = step(state, bad)
    assert float(state.loss_scale.scale) == 2 and int(state.rejected_in_a_row) == 1
    with pytest.raises(NonFiniteError, match=r"loss scale 1\.0, its floor.*3 rejected in a row"):
        for _ in range(2):
            state, _ = step(state, bad)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (dict(precision="half"), WrongTypeError, "precision at setup(): got 'half', expected one of bfloat16"),
        (dict(precision=np.float16), WrongTypeError, "a Policy"),
        (dict(loss_scale=0.0), StateError, "expected 1.18e-38 ≤ floor ≤ scale"),
        (dict(loss_scale="static"), StateError, "scale='static'"),
        (dict(loss_scale=LossScale(0.5)), StateError, "floor ≤ scale ≤ ceiling"),
        (dict(loss_scale=LossScale(float("inf"))), StateError, "floor ≤ scale ≤ ceiling"),
        (dict(precision=STOCHASTIC), StateError, "key=0"),
        (dict(precision=Policy(moments="bfloat16")), StateError, "key=0"),
        (dict(ema=1.0), ValueError, "decay at ema(): got 1.0, expected a finite float32 ≥ 0 and < 1"),
        (dict(ema=-0.1), ValueError, "≥ 0 and < 1"),
        (dict(ema="0.9"), WrongTypeError, "ema at setup(): got '0.9' (str)"),
    ],
)
def test_what_setup_refuses(options, error, says):
    with pytest.raises(error) as caught:
        start(**options)
    assert says in str(caught.value)


def test_a_state_that_rounds_keeps_a_key():
    for precision in (STOCHASTIC, Policy(moments="bfloat16")):
        with pytest.raises(StateError, match=r"key at replace\(\): got None, expected a key\. Rounding draws"):
            start(precision=precision, key=0).replace(key=None)


def with_low_moments(rule, params, **options):
    return ts.setup(rule, params, key=0, precision=Policy(moments="bfloat16"), **options)


def test_low_moments_are_those_of_float32_to_a_unit():
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(32, 16)).astype(np.float32), "b": np.zeros(16, np.float32)}
    rule = ts.rules.adamw(1e-2)
    state, plain = with_low_moments(rule, params), ts.setup(rule, params, key=0)
    assert {str(x.dtype) for x in jax.tree.leaves(state.opt_state)} == {"bfloat16", "int32"}
    batch = rng.normal(size=(8, 32)).astype(np.float32)
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"] + params["b"][None]) ** 2))
    state, info = step(state, batch)
    plain, _ = step(plain, batch)
    assert_trees_equal(state.params, plain.params)  # the moments before were zero, which is exact
    for low, full in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(plain.opt_state), strict=True):
        low, full = np.asarray(low, np.float32), np.asarray(full, np.float32)
        np.testing.assert_allclose(low, full, rtol=2**-7, atol=0)
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, info = step(state, np.full_like(batch, np.nan))
    assert not info.applied and int(state.calls) == 2
    assert_trees_equal((state.params, state.opt_state), before)
    assert "bfloat16" in {str(x.dtype) for x in jax.tree.leaves(state.opt_state)}


def test_small_changes_of_low_moments_add_up():
    """Rounded to nearest, a second moment stands still once a step changes it by less than its last bit."""
    params, g, n = {"w": jnp.zeros(4096)}, {"w": jnp.ones(4096)}, 1500
    state = with_low_moments(ts.rules.adam(1e-3, b2=0.999), params)

    @jax.jit
    def run(state):
        return jax.lax.fori_loop(0, n, lambda _, s: ts.update(s, g, loss=jnp.float32(0))[0], state)

    exact = 1 - 0.999**n
    nearest = jnp.bfloat16(0)
    for _ in range(n):
        nearest = (jnp.float32(0.999) * nearest.astype(jnp.float32) + jnp.float32(0.001)).astype(jnp.bfloat16)
    found = float(jnp.mean(run(state).opt_state[0].nu["w"].astype(jnp.float32)))
    assert abs(found / exact - 1) < 5e-3, found
    assert abs(float(nearest) / exact - 1) > 0.3, nearest


def test_copies_of_params_and_sums_are_no_moments():
    """Prodigy compares params with their first values: rounded, they seem to have moved at once, and nothing trains."""
    rng = np.random.default_rng(0)
    params = {"w": 1 + 0.1 * rng.normal(size=(32, 16)).astype(np.float32)}
    x = rng.normal(size=(16, 32)).astype(np.float32)
    y = x @ (1 + 0.1 * rng.normal(size=(32, 16)).astype(np.float32))
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"] - y) ** 2))
    state = with_low_moments(optax.contrib.prodigy(1.0), params)
    dtypes = [optax.tree.get(state.opt_state, name)["w"].dtype for name in ("params0", "exp_avg")]
    assert dtypes == [jnp.float32, jnp.bfloat16]
    state, history = ts.fit(step, state, [x] * 96, epochs=1, progress=False)
    assert history["loss"][-1] < 0.1 * history["loss"][0], history
    window = with_low_moments(ts.rules.accumulate(ts.rules.adam(0.1), 2), params).opt_state
    assert {str(x.dtype) for x in jax.tree.leaves(window.sums)} == {"float32"}
    assert {str(x.dtype) for x in jax.tree.leaves(window.inner)} == {"bfloat16", "int32"}


@pytest.mark.medium
@pytest.mark.parametrize("name", ["adam", "lion", "adamax", "sgd", "adafactor", "accumulate", "muon"])
def test_low_moments_of_any_rule(name):
    rules = {"sgd": ts.rules.sgd(0.1, momentum=0.9), "accumulate": ts.rules.accumulate(ts.rules.adam(0.1), 2)}
    rule = rules[name] if name in rules else getattr(ts.rules, name)(1e-2)
    make = lambda: with_low_moments(rule, {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, ema=0.9)
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"] + params["b"][None]) ** 2))
    data, kinds = [np.ones((2, 4), np.float32)] * 6, [x.dtype for x in jax.tree.leaves(make())]
    one, many = (ts.fit(step, make(), data, epochs=1, steps_per_call=k, progress=False)[0] for k in (1, 3))
    assert_trees_equal(one, many)
    assert int(one.calls) == 6 and [x.dtype for x in jax.tree.leaves(one)] == kinds
    cut, info = step(ts.adjust(one, "w", learning_rate=0.5), data[0])
    assert jnp.isfinite(info.loss) and len(jax.tree.leaves(cut.opt_state)) >= len(jax.tree.leaves(many.opt_state))


def test_policies_refuse_what_is_no_dtype():
    with pytest.raises(HyperparameterError, match=r"moments at Policy\(\)"):
        Policy(moments="float16")
    for bad in ("int8", None):
        with pytest.raises(WrongTypeError, match=r"compute at Policy\(\)"):
            Policy(compute=bad)
    with pytest.raises(WrongTypeError, match="expected 'bfloat16', to round to it"):
        Policy(rounding="stochastic")
    with pytest.raises(StateError, match="a loss scale lives from rejected steps"):
        ts.train_step(loss_fn, on_nonfinite="ignore")(start(precision="float16"), {"x": X})


def test_a_dropped_micro_batch_lowers_the_scale():
    x = np.array([[100.0, 100.0], [1e-3, 1e-3]] * 2, np.float32)
    fn = lambda params, batch: jnp.mean((batch @ params["w"]).astype(jnp.float32))
    state = ts.setup(ts.rules.sgd(1e-4), {"w": jnp.ones(2)}, precision="float16")
    step, dropped = ts.train_step(fn, accumulate=2, on_nonfinite="drop"), []
    for _ in range(12):
        state, info = step(state, x)
        dropped.append(float(info.dropped))
    assert dropped[0] > 0 and dropped[-1] == 0 and float(state.loss_scale.scale) < 2.0**16


@pytest.mark.parametrize("policy", ["skip", pytest.param("drop", marks=pytest.mark.medium)])
def test_fit_does_not_give_up_while_the_scale_comes_down(policy):
    """Twelve steps that overflow: under "drop" nothing of them is left, not even a weight."""
    step = ts.train_step(lambda p, b: jnp.mean((b @ p["w"]).astype(jnp.float32)), accumulate=2, on_nonfinite=policy)
    state = ts.setup(ts.rules.sgd(1e-6), {"w": jnp.ones(2)}, precision="float16")
    data = ts.batches(np.full((8, 2), 3000, np.float32), 4)
    state, _ = ts.fit(step, state, data, steps=2, max_bad=2, progress=False)
    rejected = 12 - gpu_facts.OVERFLOWS_LATER
    assert (int(state.step), int(state.rejected)) == (2, rejected)
    assert float(state.loss_scale.scale) == 2.0 ** (16 - rejected)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_below_float16_reach_the_master_copies(accumulate):
    policy = Policy(param="float16", compute="float16")
    state = ts.setup(ts.rules.adam(0.1), {"w": jnp.zeros(2)}, precision=policy, loss_scale=2.0**15)
    step = ts.train_step(lambda p, b: jnp.mean((b @ p["w"]).astype(jnp.float32)) * 1e-3, accumulate=accumulate)
    for _ in range(10):
        state, info = step(state, np.full((2, 2), 2e-5, np.float32))
    np.testing.assert_allclose(info.grad_norm, 2e-8 * np.sqrt(2), rtol=0.05)
    assert (np.asarray(state.masters["w"]) < -0.5).all()


def test_training_goes_on_from_the_average_also_with_master_copies():
    state = ts.setup(ts.rules.sgd(1.0), {"w": jnp.zeros(1)}, ema=0.75, precision=BF16)
    state, _ = ts.update(state, {"w": -jnp.ones(1, jnp.bfloat16)})
    after, _ = ts.update(ts.averaged(state), {"w": jnp.zeros(1, jnp.bfloat16)})
    assert float(after.params["w"][0]) == float(after.masters["w"][0]) == 0.25


@pytest.mark.medium
def test_losses_on_probabilities_have_finite_gradients_in_float16():
    for loss in (ts.losses.binary_cross_entropy, ts.losses.binary_focal_loss):
        slope = jax.grad(lambda p, loss=loss: loss(p, jnp.ones(1)).sum())(jnp.zeros(1, jnp.float16))
        assert np.isfinite(slope).all() and slope[0] < -100


@pytest.mark.medium
def test_a_batch_of_padding_alone_is_no_overflow():
    """Its loss is a mean over nothing, NaN: the step is rejected, and the scale has nothing to do with it."""
    fn = lambda params, batch, mask: ts.Loss.mean((batch @ params["w"]).astype(jnp.float32), mask)
    for accumulate in (1, 2):
        state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)}, precision="float16")
        step = ts.train_step(fn, accumulate=accumulate)
        state, info = step(state, jnp.ones((4, 2)), mask=jnp.zeros(4))
        assert not bool(info.applied) and float(state.loss_scale.scale) == 2.0**16
        state, info = step(state, jnp.full((4, 2), jnp.inf), mask=jnp.ones(4))
        assert not bool(info.applied) and float(state.loss_scale.scale) == 2.0**15
    with pytest.raises(NonFiniteError, match="loss: got nan"):
        ts.train_step(fn, on_nonfinite="raise")(state, jnp.ones((4, 2)), mask=jnp.zeros(4))


@pytest.mark.parametrize("scale", [1e39, 1e-46, LossScale(1e39, dynamic=False)])
def test_a_scale_that_float32_cannot_hold_is_refused(scale):
    with pytest.raises(StateError, match=r"loss_scale at setup\(\): got .*1e.*expected 1.18e-38 ≤ floor"):
        start(loss_scale=scale)


@pytest.mark.parametrize("scale", [np.float32(256), np.int64(256), jnp.float32(256)])
def test_a_scale_may_be_any_number(scale):
    state = start(loss_scale=scale)
    assert float(state.loss_scale.scale) == 256 and not state.loss_scale.dynamic


@pytest.mark.medium
def test_only_a_scale_at_its_floor_is_called_that():
    """A batch of padding alone is rejected whatever the scale is."""
    fn = lambda params, batch, mask: ts.Loss.mean((batch["x"] @ params["w"]).astype(jnp.float32).sum(-1), mask)
    step = ts.train_step(fn, on_nonfinite="raise")
    with pytest.raises(NonFiniteError, match=r"loss scale 65536.0, 1 rejected in a row"):
        step(start(precision="float16"), {"x": X}, mask=jnp.zeros(8))


@pytest.mark.medium
def test_a_loss_scale_out_of_range_is_told_with_its_step():
    """A fixed scale that overflows in float16 at every step; one put into a state that float32 cannot hold."""
    state, step = start(precision="float16", loss_scale=2.0**30), ts.train_step(scaled, on_nonfinite="raise")
    with pytest.raises(
        NonFiniteError, match=r"step 0 \(call 0\) was rejected: .*loss scale 1073741824.0, 1 rejected in a"
    ):
        step(state, {"x": X, "f": np.float32(1)})
    state = start(precision="float16")
    for bad in (np.inf, 0.0, np.nan):
        with pytest.raises(StateError, match=r"loss_scale at replace\(\).*expected .* ≤ floor ≤ scale"):
            state.replace(loss_scale=dataclasses.replace(state.loss_scale, scale=np.float32(bad)))


def test_masters_keep_their_digits_where_params_stay_as_they_were(tmp_path):
    """In `replace(params=)`, `restore(params_only=True)` and `restore(partial=)`."""
    policy = ts.precision.Policy(param="bfloat16")
    make = lambda x: ts.setup(ts.rules.adam(1e-2), {"w": jnp.full(3, x), "v": jnp.full(2, x)}, precision=policy)
    state = make(1 / 3)
    assert_trees_equal(state.replace(params=state.params).masters, state.masters)
    moved = state.replace(params={**state.params, "v": jnp.zeros(2, jnp.bfloat16)})
    assert_trees_equal(moved.masters, {"w": state.masters["w"], "v": jnp.zeros(2)})
    with ts.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state)
    reader = ts.Checkpoints(tmp_path / "run", read_only=True)
    assert_trees_equal(reader.restore(make(0.7), params_only=True).state.masters, state.masters)
    partial = reader.restore(make(0.7), partial="w").state
    assert_trees_equal(partial.masters, {"w": state.masters["w"], "v": make(0.7).masters["v"]})
    assert_trees_equal(partial.params, {"w": state.params["w"], "v": make(0.7).params["v"]})


@pytest.mark.medium
def test_lbfgs_compares_params_in_float32_beside_low_moments():
    losses = []
    for policy in (None, ts.precision.Policy(moments="bfloat16")):
        state, step = (
            ts.setup(ts.rules.lbfgs(), {"w": jnp.zeros(8)}, precision=policy, key=0),
            ts.train_step(toys.loss_fn),
        )
        for _ in range(15):
            state, info = step(state, toys.X)
        assert state.opt_state[0].params["w"].dtype == jnp.float32
        losses.append(float(info.loss))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
