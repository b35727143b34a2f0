"""Where the time of a run went: the seconds of `history.time` are those of the wall clock, each with its cause."""

import collections
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tsunax.run.history import CAUSES, Clock

X = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
fit = functools.partial(ts.fit, progress=False)


def make():
    return ts.setup(ts.rules.adam(0.05), {"w": jnp.ones((6, 2))})


def new_step(seconds=0.0):
    """A step that nothing has compiled yet, whose loss takes so many seconds on the device."""

    def loss_fn(params, x):
        loss = jnp.mean((x @ params["w"]) ** 2)
        if not seconds:
            return loss
        wait = lambda _: (time.sleep(seconds), np.float32(0))[1]
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return loss + jax.pure_callback(wait, shape, jax.lax.stop_gradient(jnp.sum(x)))

    return ts.train_step(loss_fn)


class Sleeper:
    """Sleeps for a cause, and counts what it slept."""

    def __init__(self):
        self.slept = collections.Counter()

    def __call__(self, cause, seconds):
        before = time.perf_counter()
        time.sleep(seconds)
        self.slept[cause] += time.perf_counter() - before

    def batches(self, n=16):
        for i in range(n):
            self("data", 0.02)
            yield X[4 * i : 4 * i + 4]


class Loader:
    """Batches that take their time, again in every epoch."""

    def __init__(self, sleep):
        self.sleep = sleep

    def __iter__(self):
        return self.sleep.batches()


def timed(step, sleep, steps, **options):
    """A run that sleeps wherever it can, and the seconds that it took."""

    def evaluate(state):
        sleep("evaluation", 0.03)
        return {"val/loss": 1.0}

    def callback(run):
        sleep("callbacks", 0.015)

    def logger(row, step):
        sleep("callbacks", 0.005)

    given = {"evaluate": evaluate, "evaluate_every": 8, "callbacks": ts.callbacks.every(5, callback)}
    state, before = make(), time.perf_counter()
    history = fit(step, state, Loader(sleep), steps=steps, logger=logger, log_every=4, **given, **options)[1]
    return history, time.perf_counter() - before


@pytest.mark.medium
@pytest.mark.parametrize("per_call", ["auto", 1, None])
def test_the_seconds_add_up_to_the_wall_clock(tmp_path, per_call):
    """Within 1 %, and each cause has what slept for it: compiled anew, then resumed, then gone on with."""
    step = new_step(0.004)
    earlier = dict.fromkeys(CAUSES, 0.0)
    for steps in (24, 40):
        sleep = Sleeper()
        given = {"checkpoint": tmp_path, "fast_forward": True, "steps_per_call": per_call}
        history, wall = timed(step, sleep, steps, **given)
        spent = {cause: history.time[cause] - earlier[cause] for cause in CAUSES}
        assert sum(spent.values()) == pytest.approx(wall, rel=0.01), spent
        for cause, slept in sleep.slept.items():
            assert slept <= spent[cause] + 1e-4, (cause, slept, spent)
        assert spent["checkpoint"] > 0 and (spent["compile"] > 0.01) == (steps == 24), spent
        assert spent["idle"] < 0.15 * wall, spent
        with ts.Checkpoints(tmp_path, read_only=True) as checkpoints:
            earlier = checkpoints.restore(make()).history["time"]
    later = {cause for cause in CAUSES if history.time[cause] != earlier[cause]}
    assert later == {"checkpoint", "idle"}  # the save at the end is in no checkpoint
    sleep, before = Sleeper(), dict(history.time)
    again, wall = timed(step, sleep, 8, history=ts.loop.History())
    assert sum(again.time.values()) == pytest.approx(wall, rel=0.01)
    assert history.time == before  # nothing counts on


def test_a_history_goes_on_with_its_seconds():
    step, state, walls, history = new_step(), make(), 0.0, None
    for steps in (3, 6, 9):
        before = time.perf_counter()
        state, history = fit(step, state, [X], steps=steps, callbacks=lambda run: time.sleep(0.05), history=history)
        walls += time.perf_counter() - before
        assert sum(history.time.values()) == pytest.approx(walls, rel=0.01)
    plain = history.plain()
    assert ts.loop.History.of(plain).time == history.time and list(history.time) == list(CAUSES)
    del plain["time"]  # of a checkpoint without
    assert ts.loop.History.of(plain).time == dict.fromkeys(CAUSES, 0.0)


def test_a_run_that_ends_with_an_error_has_its_seconds():
    def slow(run):
        time.sleep(0.2)
        raise ZeroDivisionError

    state, before = make(), time.perf_counter()
    with pytest.raises(ZeroDivisionError) as ended:
        fit(new_step(), state, [X], steps=9, callbacks=ts.callbacks.every(3, slow))
    wall = time.perf_counter() - before
    spent = ended.value.history.time
    assert sum(spent.values()) == pytest.approx(wall, rel=0.01) and 0.2 <= spent["callbacks"] < 0.25


@pytest.mark.medium
@pytest.mark.parametrize("per_call", ["auto", 1, None])
@pytest.mark.parametrize("kind", ["train_step", "function"])
def test_what_compiles_is_no_time_of_the_device(kind, per_call):
    def slow_to_trace(params, x):
        time.sleep(0.3)
        return jnp.mean((x @ params["w"]) ** 2)

    step = ts.train_step(slow_to_trace)
    if kind == "function":
        inner, step = jax.jit(step.pure), lambda state, batch: inner(state, batch, {})
    for most in (10.0, 0.05):
        found = fit(step, make(), [X], steps=3, steps_per_call=per_call)[1].time
        assert found["device"] < 0.25 and (found["compile"] > 0.25) == (most == 10.0), found


@pytest.mark.medium
@pytest.mark.parametrize("products, steps_long, is_waiting", [(10_000, 0.4, False), (100, 5.0, True)])
def test_data_that_come_while_the_device_works_are_not_waited_for(products, steps_long, is_waiting, capsys):
    """A program without callbacks: one with some runs before its call returns, on a CPU."""

    def loss_fn(params, x):
        w = params["w"] @ params["w"].T
        return jnp.mean(x @ jax.lax.scan(lambda y, _: (jnp.tanh(y @ w), None), w, None, length=products)[0])

    class Slow:
        seconds = 0.0

        def __iter__(self):
            for i in range(0, 64, 8):
                time.sleep(self.seconds)
                yield X[i : i + 8]

    step = ts.train_step(loss_fn)
    for _ in range(2):  # compiled in the first one
        one = fit(step, make(), Slow(), steps=20, steps_per_call=1)[1].time["device"] / 20
    Slow.seconds = steps_long * one
    history = ts.fit(step, make(), Slow(), steps=40, steps_per_call=1)[1]
    share = history.time["data"] / (history.time["data"] + history.time["device"])
    assert (share > 0.6) if is_waiting else (share < 0.25), history.time
    last = capsys.readouterr().err.splitlines()[-1]
    assert (f"{share:.0%} waiting for data" in last) == (share > 0.2), last


def test_each_moment_has_one_cause(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    clock = Clock()
    with clock("evaluation"), clock("data"):
        pass
    clock.lap("data")
    clock.cause = "device"  # what it turned out to be
    clock.lap("idle")
    total = dict.fromkeys(CAUSES, 0.0) | {"data": 40.0}
    clock.continue_from(total)
    clock.lap("compile")
    found = {cause: seconds for cause, seconds in clock.seconds.items() if seconds}
    assert found == {"idle": 3.0, "evaluation": 2.0, "data": 1.0, "device": 1.0}
    assert total["data"] == 41.0 and sum(total.values()) == 40 + sum(found.values()) == 47
