"""Averages of the parameters, against their closed forms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests.helpers import assert_trees_equal, count_compiles
from tsunax.errors import HyperparameterError, LossError, StateError, WrongTypeError
from tsunax.state import averaged_params

STEPS = 12
BYOL = ts.schedules.cosine_annealing(1.0, 0.8, 8, restart=False)  # 1 - (1 - 0.8) · (cos(π k / 8) + 1) / 2


def run(average, *, rule=None, bad=(), steps=STEPS):
    """One parameter that goes 1, 2, 3, ...; the average after each call, and the state."""
    state = ts.setup(rule or ts.rules.sgd(1.0), {"w": jnp.zeros(1)}, ema=average)
    step, seen = jax.jit(ts.update), []
    for i in range(steps):
        state, _ = step(state, {"w": jnp.full(1, np.nan if i in bad else -1.0)})
        seen.append(float(ts.averaged(state).params["w"][0]))
    return np.array(seen), state


def by_hand(rate, steps=STEPS):
    """`rate(n)` for the n-th applied step, n = 1, 2, ...; None leaves the average as it is."""
    a, out = 0.0, []
    for n in range(1, steps + 1):
        r = rate(n)
        a = a if r is None else a + r * (n - a)
        out.append(a)
    return out


@pytest.mark.parametrize(
    ("average", "rate"),
    [
        (0.9, lambda n: 0.1),
        (ts.averages.ema(0.9, every=3), lambda n: 0.1 if n % 3 == 0 else None),
        (ts.averages.ema(0.9, start=4), lambda n: 1 if n <= 4 else 0.1),
        (ts.averages.ema(0.9, warmup=True), lambda n: 1 - min(0.9, n / (9 + n))),
        (BYOL, lambda n: 0.2 * (np.cos(np.pi * min(n - 1, 8) / 8) + 1) / 2),
        (ts.averages.ema(lambda step: 0.5 + 0.04 * step, start=4), lambda n: 1 if n <= 4 else 0.5 - 0.04 * (n - 1)),
        (ts.averages.polyak(), lambda n: 1 / n),
        (ts.averages.polyak(start=5), lambda n: 1 if n <= 5 else 1 / (n - 5)),
        (ts.averages.swa(4, 2), lambda n: 1 if n <= 4 else (2 / (n - 4) if n % 2 == 0 else None)),
    ],
    ids=["ema", "every 3", "from 4", "warm-up", "BYOL", "function from 4", "polyak", "polyak from 5", "swa"],
)
def test_closed_forms(average, rate):
    np.testing.assert_allclose(run(average)[0], by_hand(rate), rtol=1e-5)


def test_what_byol_and_dino_schedule(tmp_path):
    """The momentum of the teacher, the weight decay, and a temperature, and over a resume."""
    heat = ts.schedules.linear_schedule(0.5, 1.0, 4)
    decay = ts.schedules.cosine_decay_schedule(0.4, 8, 0.1)

    def loss_fn(params, x, step, ema):
        return jnp.mean((params["w"] - ema["w"] + x) ** 2) / heat(step)

    def make():
        rule = ts.rules.adamw(0.1, weight_decay=decay)
        return ts.setup(rule, {"w": jnp.ones(1)}, ema=ts.schedules.cosine_annealing(1.0, 0.8, 8, restart=False))

    data, step = ts.batches(np.ones(8, np.float32), 1), ts.train_step(loss_fn)
    whole, history = ts.fit(step, make(), data, steps=8, log_every=1, progress=False)
    fit = lambda steps: ts.fit(step, make(), data, steps=steps, checkpoint=tmp_path, progress=False)[0]
    fit(4)
    assert_trees_equal(fit(8), whole)
    rows = [float(decay(k)) for k in range(8)]
    np.testing.assert_allclose(history["weight_decay"], rows, rtol=1e-6)
    linear = ts.schedules.linear_schedule
    for wrong in (lambda step: -1.0, lambda step: "0.9", linear(0.9, 2.0, 8), linear(0.9, -0.1, 8)):
        with pytest.raises(
            (HyperparameterError, WrongTypeError), match=r"decay at ema\(\), step (0|8) of its schedule"
        ):
            ts.averages.ema(wrong)


def test_rejected_and_gathering_calls_do_not_count():
    clean, expected = run(0.9, steps=4)
    dirty, state = run(0.9, steps=6, bad=(1, 3))
    np.testing.assert_array_equal(dirty[[0, 2, 4, 5]], clean)
    assert dirty[1] == dirty[0] and dirty[3] == dirty[2]
    assert_trees_equal(state.average, expected.average)
    gathered, _ = run(0.9, rule=ts.rules.accumulate(ts.rules.sgd(1.0), every=2), steps=8)
    np.testing.assert_array_equal(gathered[1::2], clean)
    np.testing.assert_array_equal(gathered[2::2], clean[:3])


def test_frozen_leaves_stay_and_unselected_ones_have_no_average():
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2), "c": jnp.zeros(2)}
    state = ts.setup(ts.rules.sgd(1.0), params, trainable=["**", "!c"], ema=0.5)
    state, _ = ts.update(state, {"a": -jnp.ones(2), "b": -jnp.ones(2), "c": None})
    assert state.average.params["c"] is None
    frozen = ts.freeze(state, "a")
    after, _ = ts.update(frozen, {"a": -jnp.ones(2), "b": -jnp.ones(2), "c": None})
    averaged = ts.averaged(after).params
    np.testing.assert_array_equal([averaged[k][0] for k in "abc"], [0.5, 1.25, 0])


def test_the_average_is_f32_beside_bfloat16_and_the_loss_function_may_have_it():
    seen = []

    def fn(params, batch, ema):
        seen.append(ema["w"].dtype)
        return jnp.mean((batch * (params["w"] - ema["w"] + 1)) ** 2)

    state = ts.setup(ts.rules.sgd(0.5), {"w": jnp.ones(3, jnp.bfloat16)}, ema=0.9)
    step = ts.train_step(fn)
    state, _ = step(state, jnp.ones(3, jnp.bfloat16))
    assert state.average.params["w"].dtype == jnp.float32 and seen[0] == jnp.bfloat16
    with count_compiles() as c:
        state, _ = step(state, jnp.ones(3, jnp.bfloat16))
    assert c.compiled.count("train_step") == 0
    assert ts.averaged(state).params["w"].dtype == jnp.bfloat16
    with pytest.raises(LossError, match=r"got 'ema'.*setup\(\.\.\., ema=\.\.\.\)"):
        step(ts.setup(ts.rules.sgd(0.5), {"w": jnp.ones(3)}), jnp.ones(3))


def test_a_state_without_one_says_so():
    with pytest.raises(StateError, match=r"average at averaged\(\).*ema=0.999"):
        ts.averaged(ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)}))
    for bad in (0, -1, 2.5, True):
        with pytest.raises(HyperparameterError if type(bad) is int else WrongTypeError, match="every at polyak"):
            ts.averages.polyak(every=bad)
    with pytest.raises(WrongTypeError, match=r"warmup at ema\(\): got 'no' \(str\), expected True or False"):
        ts.averages.ema(0.9, warmup="no")
    assert ts.averages.swa(np.int64(4), np.int32(2)) == ts.averages.swa(4, 2)


def test_batch_statistics_of_averaged_params():
    def fn(params, batch, model_state, train):
        mean = jnp.mean(batch @ params["w"])
        new = {"mean": 0.5 * model_state["mean"] + 0.5 * mean} if train else model_state
        return ts.Loss.mean((batch @ params["w"] - 1) ** 2, model_state=new)

    batch = jnp.ones((4, 2))
    state = ts.setup(ts.rules.sgd(0.05), {"w": jnp.ones(2)}, model_state={"mean": jnp.float32(0)}, ema=0.9)
    step = ts.train_step(fn)
    for _ in range(3):
        state, _ = step(state, batch)
    averaged, refresh = ts.averaged(state), ts.update_batch_stats(fn)
    for _ in range(30):
        averaged = refresh(averaged, batch)
    np.testing.assert_allclose(averaged.model_state["mean"], averaged.params["w"].sum(), rtol=1e-6)
    assert int(averaged.step) == int(state.step)
    with pytest.raises(StateError, match="model_state"):
        ts.update_batch_stats(lambda params, batch: jnp.mean(batch @ params["w"]))(state, batch)


@pytest.mark.parametrize("precision", [None, ts.precision.Policy(param="bfloat16", compute="bfloat16", batch="**")])
def test_an_averaged_state_trains_on_and_its_average_lives(precision):
    """One buffer for params and average would be donated twice, or die with the params."""
    state = ts.setup(
        ts.rules.sgd(0.5), {"w": jnp.ones(3), "n": jnp.ones(2)}, trainable="w", ema=0.5, precision=precision
    )
    step = ts.train_step(lambda params, x: jnp.mean((x * params["w"]).astype(jnp.float32) ** 2))
    state, _ = step(state, jnp.ones(3))
    wanted, averaged = np.asarray(state.average.params["w"]), ts.averaged(state)
    assert averaged.params["n"] is state.params["n"]
    kept = jax.tree.map(np.asarray, averaged.params)
    after, _ = step(averaged, jnp.ones(3))
    now = kept["w"].astype(np.float32) if precision is None else wanted
    np.testing.assert_allclose(after.average.params["w"], wanted + 0.5 * (now - now / 3 - wanted), rtol=1e-2)


def test_the_steps_that_a_leaf_sat_out_count_with_the_average_that_it_had():
    """One count for all leaves: 2 averaged params, 3 frozen steps, 1 more, so a weight of 1/6 for the last one."""
    state = ts.setup(ts.rules.sgd(1.0), {"a": jnp.zeros(1), "b": jnp.zeros(1)}, ema=ts.averages.polyak())
    step = jax.jit(lambda s: ts.update(s, {"a": -jnp.ones(1), "b": -jnp.ones(1)})[0])
    run = lambda s, n: s if n == 0 else run(step(s), n - 1)
    state = run(ts.thaw(run(ts.freeze(run(state, 2), "a"), 3)), 1)
    averaged = ts.averaged(state).params
    np.testing.assert_allclose(averaged["b"], [(1 + 2 + 3 + 4 + 5 + 6) / 6], rtol=1e-6)
    np.testing.assert_allclose(averaged["a"], [(1.5 * 5 + 3) / 6], rtol=1e-6)


def test_a_loss_function_sees_the_average_as_it_is_stored_in_bfloat16():
    """XLA for GPUs leaves out a cast to bfloat16 that is followed by one back, but no `reduce_precision`."""
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(8, jnp.bfloat16), "v": jnp.ones(8)}, ema=0.9)
    state = dataclasses.replace(
        state, average=dataclasses.replace(state.average, params={"w": jnp.arange(8) + 0.3, "v": jnp.arange(8) + 0.3})
    )
    seen = lambda state: jax.tree.map(lambda x: x.astype(jnp.float32), averaged_params(state, "loss_fn"))
    stored = ts.averaged(state).params
    assert stored["w"].dtype == jnp.bfloat16
    assert_trees_equal(jax.jit(seen)(state), jax.tree.map(lambda x: x.astype(jnp.float32), stored))
    assert str(jax.make_jaxpr(seen)(state)).count("reduce_precision") == 1
