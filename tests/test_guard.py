"""Verdicts: nothing poisons a state, and every message names the place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests.helpers import assert_trees_equal, count_compiles
from tsunax import guard
from tsunax.errors import NonFiniteError

ROWS, MICRO = 12, 4
LEAVES = ("a", "b", "c")


def make_state(**options):
    params = {name: jnp.full(3, 0.5) for name in LEAVES}
    rule = ts.rules.chain(ts.rules.clip_by_global_norm(1.0), ts.rules.adam(0.01))
    start = {"seen": jnp.float32(0)}
    return ts.setup(rule, params, model_state=start, key=0, ema=0.9, **options)


def loss_fn(params, batch, key, model_state):
    """`batch["poison"]` (rows, leaves) enters the gradient of a leaf, `batch["loss"]` (rows,) the loss."""
    x = batch["x"] + 0.01 * jax.random.normal(key, batch["x"].shape)
    values = sum((x @ params[name] - 1) ** 2 for name in LEAVES)
    for i, name in enumerate(LEAVES):
        values = values + _poisoned(params[name][0], batch["poison"][:, i])
    return ts.Loss.mean(values + batch["loss"], model_state={"seen": model_state["seen"] + jnp.sum(x)})


@jax.custom_vjp
def _poisoned(x, poison):
    """0, with `poison` in the gradient of x."""
    return jnp.zeros_like(poison)


_poisoned.defvjp(
    lambda x, poison: (jnp.zeros_like(poison), (poison, x)),
    lambda kept, g: (jnp.sum(kept[0]).astype(kept[1].dtype), None),
)


def make_batch(seed):
    rng = np.random.default_rng(seed)
    zeros = {"poison": np.zeros((ROWS, len(LEAVES)), np.float32), "loss": np.zeros(ROWS, np.float32)}
    return {"x": rng.normal(size=(ROWS, 3)).astype(np.float32)} | zeros


@pytest.mark.parametrize("accumulate", [1, pytest.param(MICRO, marks=pytest.mark.medium)])
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"precision": "float16"}, marks=pytest.mark.medium)], ids=["float32", "float16"]
)
def test_injected_nan_and_inf_never_reach_a_state(accumulate, options):
    """125 injections for each case, 500 in all, at a random step, place, leaf and micro-batch."""
    if options:  # at its floor from the start, so that every rejection raises
        options = options | {"loss_scale": ts.precision.LossScale(1.0)}
    step = ts.train_step(loss_fn, accumulate=accumulate, on_nonfinite="raise", donate=False)
    state, rng, injections, calls = make_state(**options), np.random.default_rng(accumulate), 0, 0
    while injections < 125:
        batch, calls = make_batch(calls), calls + 1
        bad = rng.uniform() < 0.6
        if bad:
            row, value = rng.integers(ROWS), rng.choice([np.nan, np.inf, -np.inf])
            at = rng.choice(["loss", *LEAVES])
            if at == "loss":
                batch["loss"][row] = value
            else:
                batch["poison"][row, LEAVES.index(at)] = value
            injections += 1
        try:
            after, info = step(state, batch)
        except NonFiniteError as error:
            assert bad
            after, said = error.state, str(error)
            where = "rejected: loss" if at == "loss" else f"gradient of params['{at}'], shape (3,)"
            assert where in said and ("nan" in said or "inf" in said)
            assert f"step {int(state.step)} (call {int(state.calls)})" in said
            assert accumulate == 1 or f"micro-batch {row % accumulate} of {accumulate}" in said
            own = ("calls", "rejected", "rejected_in_a_row")
            assert_trees_equal(after.replace(loss_scale=state.loss_scale, **{k: getattr(state, k) for k in own}), state)
            assert int(after.rejected) == injections
        else:
            assert not bad and bool(info.applied) and int(after.step) == int(state.step) + 1
            assert int(after.rejected_in_a_row) == 0
        state = after
    assert all(
        np.isfinite(x).all() for x in jax.tree.leaves((state.params, state.opt_state, state.average, state.model_state))
    )


@pytest.mark.several_devices
def test_under_data_parallelism_the_verdict_is_one():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    place = lambda x, *axes: jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))
    state = ts.setup(ts.rules.adam(0.1), place({"w": jnp.ones(3)}))
    step = ts.train_step(lambda params, x: jnp.mean(x @ params["w"]), donate=False)
    for bad in range(4):
        x = np.ones((8, 3), np.float32)
        x[2 * bad] = np.nan
        after, info = step(state, place(x, "data"))
        assert not bool(info.applied)
        assert_trees_equal(after.params, state.params)
        assert {len(x.devices()) for x in jax.tree.leaves(after)} == {4}


def test_after_one_nan_the_next_good_step_is_applied():
    step, state = ts.train_step(loss_fn, accumulate=MICRO), make_state()
    applied = []
    for i in range(6):
        batch = make_batch(i)
        batch["loss"][0] = np.nan if i == 2 else 0
        state, info = step(state, batch)
        applied.append(bool(info.applied))
    assert applied == [True, True, False, True, True, True]
    assert (int(state.rejected), int(state.rejected_in_a_row), int(state.step)) == (1, 0, 5)


def test_reports_keep_their_dtype_beside_float64_params():
    """Another dtype would compile the second step anew, and no loop could carry it."""
    rule = ts.rules.chain(ts.rules.reject_spikes(), ts.rules.clip_by_norm(1.0), ts.rules.sgd(0.1))
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        state = ts.setup(rule, {"w": jnp.ones(3, jnp.float64)})
        new, _ = ts.train_step(lambda params, x: jnp.mean(x @ params["w"]), donate=False)(state, np.ones((2, 3)))
    assert [x.dtype for x in jax.tree.leaves(new)] == [x.dtype for x in jax.tree.leaves(state)]


def test_the_leaf_that_is_named_is_the_one_that_was_not_finite():
    imaginary = np.complex64(complex(1, np.inf))
    assert guard.locate({"a": jnp.ones(2), "b": jnp.full(2, imaginary)}) == "gradient of params['b'], shape (2,)"
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        large = {"a": jnp.full(2, 1e30), "b": jnp.full(2, np.nan)}  # whose squares float64 holds
        assert guard.locate(large) == "gradient of params['b'], shape (2,)"


@pytest.mark.medium
def test_the_clock_ends_with_an_error_and_not_with_keys_that_repeat():
    state = make_state().replace(calls=np.int32(guard.LIMIT - 1))
    step = ts.train_step(loss_fn, on_nonfinite="raise")
    state, _ = step(state, make_batch(0))
    with pytest.raises(NonFiniteError, match="clock, at its limit of 2147483647 calls"):
        step(state, make_batch(1))


# ----------------------------------------------------------------------------------------------------------- spikes


def run(factors, rule=None, **options):
    """The verdicts of steps whose gradient is multiplied by these factors, and the last state."""
    rule = rule or ts.rules.chain(ts.rules.reject_spikes(**options), ts.rules.sgd(0.0))
    state, rng = ts.setup(rule, {"w": jnp.zeros(4)}), np.random.default_rng(0)
    step, verdicts = jax.jit(ts.update), []
    for factor in factors:
        g = np.float32(factor * np.exp(0.1 * rng.normal()))
        state, info = step(state, {"w": jnp.full(4, g)}, loss=jnp.float32(1.0))
        verdicts.append(int(info.verdict))
    return np.array(verdicts), state


def test_spikes_are_rejected_and_ripples_are_not():
    factors = np.ones(120)
    factors[[70, 90]] = 50, 3
    factors[100] = 1.5
    verdicts, state = run(factors)
    assert np.flatnonzero(verdicts).tolist() == [70, 90] and int(state.rejected) == 2
    said = guard.explain(verdicts[70], state.opt_state)
    assert said == "gradient norm: a spike, above its running band"


@pytest.mark.medium
def test_a_spike_of_the_loss_and_none_in_the_warm_up():
    rule = ts.rules.chain(ts.rules.reject_spikes(warmup=10), ts.rules.sgd(0.0))
    state, verdicts = ts.setup(rule, {"w": jnp.zeros(1)}), []
    for i in range(30):
        loss = jnp.float32(40.0 if i in (5, 20) else 2 + 0.01 * i)
        state, info = ts.update(state, {"w": jnp.ones(1)}, loss=loss)
        verdicts.append(int(info.verdict))
    assert np.flatnonzero(verdicts).tolist() == [20]
    assert "loss: a spike" in guard.explain(verdicts[20], state.opt_state)


def test_what_is_rejected_changes_no_statistics():
    clean, expected = run(np.ones(60))
    state = expected
    for g in (1e4, np.nan, np.inf, 1e6):
        state, info = ts.update(state, {"w": jnp.full(4, g, jnp.float32)}, loss=jnp.float32(1.0))
        assert not bool(info.applied)
    assert_trees_equal(state.opt_state, expected.opt_state)
    assert not clean.any() and int(state.rejected_in_a_row) == 4
    live = ts.hyperparams(state)
    assert live["factor"] == 6.0 and live["decay"] == 0.98


def test_the_band_is_that_of_its_formula():
    """In float64, by NumPy: a mean and a mean distance that forget, of the log of the norm and of the loss."""
    rng = np.random.default_rng(3)
    grads = rng.normal(size=(80, 4)) * np.exp(rng.normal(0, 0.3, (80, 1)) + 4 * (rng.uniform(size=(80, 1)) < 0.1))
    values = 2 + rng.normal(0, 0.3, 80) + 20 * (rng.uniform(size=80) < 0.05)
    rule = ts.rules.chain(ts.rules.reject_spikes(factor=4.0, decay=0.9, warmup=20), ts.rules.sgd(0.0))
    state = ts.setup(rule, {"w": jnp.zeros(4)})
    one = lambda s, x: (lambda new, info: (new, info.verdict))(*ts.update(s, {"w": x[0]}, loss=x[1]))
    state, verdicts = jax.jit(lambda *xs: jax.lax.scan(one, state, xs))(np.float32(grads), np.float32(values))

    centre, spread, seen, expected = np.zeros(2), np.zeros(2), 0, []
    for g, value in zip(grads, values, strict=True):
        now = np.array([np.log(np.linalg.norm(g)), value])
        above = now > centre + np.maximum(4.0 * spread, [np.log(2), abs(centre[1])])
        bad = seen >= 20 and above.any()
        expected.append(2 * (4 + int(above.argmax())) if bad else 0)
        if not bad:
            rate, distance = (0.1, np.abs(now - centre)) if seen else (1.0, np.zeros(2))
            centre, spread, seen = centre + rate * (now - centre), spread + rate * (distance - spread), seen + 1
    assert set(expected) == {0, 8, 10}
    np.testing.assert_array_equal(verdicts, expected)
    np.testing.assert_allclose(state.opt_state[0].band, [centre, spread, [seen, seen], [0, 0]], rtol=1e-5)


@pytest.mark.medium
def test_a_spike_is_no_overflow():
    rule = ts.rules.chain(ts.rules.reject_spikes(warmup=1), ts.rules.sgd(0.0))
    state = ts.setup(rule, {"w": jnp.zeros(1)}, precision="float16")
    for g in (1.0, 1.0, 1e4):
        state, info = ts.update(state, {"w": jnp.full(1, g)}, loss=jnp.float32(1.0))
    assert not bool(info.applied) and float(state.loss_scale.scale) == 2.0**16
    state, info = ts.update(state, {"w": jnp.full(1, np.inf)}, loss=jnp.float32(1.0))
    assert not bool(info.applied) and float(state.loss_scale.scale) == 2.0**15


def test_the_verdict_is_the_first_place_of_all():
    """2 · place, + 1 for a NaN, in the order loss, norm, clock, reports."""
    report = lambda *values: guard.RuleReport(np.float32(values), tuple(f"value {v}" for v in values))
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    judge = jax.jit(guard.judge)
    for loss, norm, calls, reports, expected in (
        (1, 2, 3, [report(1, 2), report()], 0),
        (nan, inf, 0, [report(nan, 2)], 3),
        (-inf, nan, 0, [report(nan, 2)], 2),
        (0, nan, guard.LIMIT, [report(nan)], 5),
        (0, 0, guard.LIMIT, [report(nan)], 6),
        (0, 0, 0, [report(1, 2), report(3, -inf, nan), report(nan)], 2 * 7),
        (0, 0, 0, [report(1, nan), report(inf)], 2 * 5 + 1),
        (None, None, 0, [report(1), report(), report(inf)], 2 * 5),
        (None, 0, 0, [], 0),
    ):
        got = judge(loss, norm, np.int32(calls), reports)
        assert int(got) == expected and got.dtype == jnp.int32


@pytest.mark.medium
def test_raise_names_the_place_in_the_batch_where_it_holds_the_nan():
    step = ts.train_step(loss_fn, on_nonfinite="raise", donate=False)
    state, batch = make_state(), make_batch(0)
    state, _ = step(state, batch)
    batch["x"][4, 1:], batch["x"][7, 0] = np.nan, -np.inf
    with pytest.raises(NonFiniteError) as caught:
        step(state, batch)
    assert "step 1 (call 1) was rejected: loss: got nan" in str(caught.value)
    assert "batch['x'] has 3 of 36 not finite, the first at [4, 1]" in str(caught.value)
    for other in (batch, jax.tree.map(jnp.asarray, batch)):
        assert (
            guard.fault_in_batch({"n": np.arange(3), **other})
            == "batch['x'] has 3 of 36 not finite, the first at [4, 1]"
        )
    assert guard.fault_in_batch({"s": np.float32(np.inf)}) == "batch['s'] has 1 of 1 not finite"
    assert guard.fault_in_batch(make_batch(0)) == ""


@pytest.mark.medium
@pytest.mark.parametrize("label", [-1, 10])
def test_a_label_that_is_no_class_is_named(label):
    def loss(params, batch):
        values = ts.losses.softmax_cross_entropy_with_integer_labels(batch["x"] @ params["w"], batch["y"])
        return ts.Loss.mean(values)

    batch = {"x": np.ones((4, 3), np.float32), "y": np.array([0, 9, label, 3])}
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros((3, 10))})
    for accumulate in (1, 2):
        with pytest.raises(
            NonFiniteError, match=rf"1 of 4 labels are none of the 10 classes, first label {label} at \[2\]"
        ):
            ts.train_step(loss, on_nonfinite="raise", accumulate=accumulate, donate=False)(state, batch)


# ------------------------------------------------------------------------------------------------- where the choice is


def test_a_rule_that_makes_nan_of_finite_gradients_is_rejected():
    """A schedule or a division in a rule makes NaN of finite gradients: it never reaches the params."""
    params, grads = {"a": jnp.ones(2), "unused": jnp.ones(2)}, {"a": jnp.ones(2), "unused": jnp.zeros(2)}
    late = ts.rules.sgd(lambda step: jnp.where(step < 5, 0.1, jnp.nan))
    for rule in (ts.rules.adam(0.01, eps=0.0), optax.adam(0.01, eps=0.0), late):
        for norms in ("update", True, False):
            run = jax.jit(functools.partial(ts.update, norms=norms))
            for f in (run, functools.partial(ts.update, norms=norms)):
                state = ts.setup(rule, params).replace(step=5)
                after, info = f(state, grads)
                assert not bool(info.applied) and (info.update_norm is None) == (norms != "update")
                assert_trees_equal(after.params, params)
                assert_trees_equal(after.opt_state, state.opt_state)
                assert "update that the rule made" in guard.explain(int(info.verdict), after.opt_state)


def test_an_adjusted_number_changes_who_judges_and_compiles_nothing():
    """With eps=0 Adam makes NaN of a gradient of zero, and a good update of another one."""
    step = ts.train_step(lambda params, x: jnp.mean(x @ params["w"]))
    zero, one = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    adjusted = lambda eps: ts.adjust(ts.setup(ts.rules.adam(0.1), {"w": jnp.ones(3)}), eps=eps)
    for eps in (1e-7, 1e-6):
        state, _ = step(adjusted(eps), one)
    ts.adjust(state, eps=1e-5)
    with count_compiles() as compiles:
        fresh, info = step(adjusted(0.0), zero)
        assert int(info.verdict) == 2 * 4 + 1 and int(fresh.rejected) == 1
        np.testing.assert_array_equal(fresh.params["w"], np.ones(3))
        state, info = step(ts.adjust(state, eps=0.0), one)
        assert bool(info.applied) and int(state.step) == 2
    assert compiles.compiled.count("train_step") == 0


@pytest.mark.medium
def test_both_ways_to_choose_have_the_same_bits():
    """A cond on a CPU, a select for each array elsewhere, and either with a judged update."""
    loss_fn = lambda params, x: jnp.mean(jnp.tanh(x @ params["w"]) @ params["v"])
    params = {"w": jnp.ones((8, 4)) / 3, "v": jnp.ones(4) / 7}
    x = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)

    def run(rule, selects=False, **options):
        with pytest.MonkeyPatch.context() as patch:
            if selects:
                decide = guard.decide
                patch.setattr(guard, "decide", lambda *arguments, may_branch: decide(*arguments, may_branch=False))
            step, state, infos = ts.train_step(loss_fn, **options), ts.setup(rule, params, ema=0.9), []
            text = step.lower(state, x).as_text()
            for bad in (0, 0, 1, 0):
                state, info = step(state, x * np.float32(np.nan) if bad else x)
                infos.append((info.loss, info.verdict, info.grad_norm))
        return state, infos, "case" in text

    for rule in (ts.rules.adamw(0.01), optax.adamw(0.01)):
        *cond, has_cond = run(rule)
        *select, _ = run(rule, selects=True)
        *judged, judged_has_cond = run(rule, norms="update")
        assert has_cond and not judged_has_cond
        assert_trees_equal(cond, select)
        assert_trees_equal(cond, judged)


def test_a_step_for_other_devices_has_the_same_bits(monkeypatch):
    """A TPU, and a GPU for few leaves, judge the update of live rules in any case."""
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)

    def run():
        step = ts.train_step(lambda params, x: jnp.mean(x @ params["w"]))
        state, verdicts = ts.setup(ts.rules.adam(0.1), {"w": jnp.ones(3)}), []
        for batch, eps in ((x, 1e-8), (np.nan * x, 1e-8), (0 * x, 0.0), (x, 0.0)):
            state, info = step(ts.adjust(state, eps=eps), batch)
            verdicts.append(int(info.verdict))
        return state, verdicts, "case" in step.lower(state, x).as_text()

    *early, has_cond = run()
    monkeypatch.setattr(guard, "early_or_late", lambda early, late, grads: late())
    *late, late_has_cond = run()
    assert has_cond and not late_has_cond
    assert_trees_equal(early, late)


def test_unknown_rules_run_once_and_are_judged_by_their_update():
    def callback(updates, state, params=None):
        calls.append(1)
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        scale = jax.pure_callback(lambda: runs.append(1) or np.float32(1), shape)
        return jax.tree.map(lambda g: g * scale, updates), state

    calls, runs = [], []
    rule = optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), callback), optax.sgd(0.1))
    step = ts.train_step(lambda params, x: jnp.mean(x @ params["w"]))
    state = ts.setup(rule, {"w": jnp.ones(4)})
    runs.clear()
    state, _ = step(state, np.ones((2, 4), np.float32))
    jax.block_until_ready(state.params)
    assert len(runs) == 1
    text = step.lower(ts.setup(ts.rules.lamb(0.1), {"w": jnp.ones(4)}), np.ones((2, 4), np.float32)).as_text()
    assert "case" not in text


@pytest.mark.several_devices
def test_devices_that_decide_differently_select():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), axis_name=())
    state = ts.setup(ts.rules.adam(0.1), {"w": jnp.ones(4)})
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)

    def local(state, x):
        after, info = step.pure(state, x, {})
        return jax.lax.pmean(after.params["w"], "data"), info.loss[None]

    specs = (jax.P(), jax.P("data")) if hasattr(jax, "P") else None
    if specs is None:
        from jax.sharding import PartitionSpec

        specs = (PartitionSpec(), PartitionSpec("data"))
    w, losses = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs))(state, x)
    assert np.isfinite(w).all() and losses.shape == (8,)
