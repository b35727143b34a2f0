"""A run that goes back to an earlier checkpoint: its bits, its files after a kill, its line."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tsunax.checkpoints import _home
from tsunax.errors import CheckpointError, HyperparameterError, SaveError, StateError
from tsunax.reproduce import fingerprint
from tsunax.run import rewinding
from tsunax.timelines import timeline

import toys

STEPS = 20


class Prints:
    """A callback: the fingerprint of each state of a run by calls, and of its line by step."""

    def __init__(self):
        self.by_calls, self.by_step = {}, {}

    def __call__(self, run):
        if run.event == "start":
            self.by_step = {k: x for k, x in self.by_step.items() if k < run.step}
        self.by_calls.setdefault(int(run.state.calls), fingerprint(run.state))
        self.by_step.setdefault(run.step, fingerprint(run.state))


def back_after(*calls, **options):
    """A callback that goes back after these numbers of calls."""
    when = lambda run: int(run.state.calls) in calls
    return ts.callbacks.rewind(when, **options)


def batches(x=toys.X, **options):
    return ts.batches(x, 8, shuffle=True, seed=3, **options)


def a_state(**options):
    return toys.state(key=jax.random.key(1), **options)


NOISY = ts.train_step(toys.noisy)


def a_run(folder, callbacks, make=a_state, step=NOISY, data=None, *, every=4, steps=STEPS, **options):
    """(its prints, its last state, its history)"""
    prints = Prints()
    options = {"progress": False, "log_every": 1, "callbacks": [prints, *callbacks], **options}
    with ts.Checkpoints(folder, every=every, keep_last=options.pop("keep_last", None)) as checkpoints:
        data = batches() if data is None else data
        state, history = ts.fit(step, make(), data or None, steps=steps, checkpoint=checkpoints, **options)
    return prints, state, history


@pytest.mark.parametrize("data_mode", ["skip", "repeat"])
def test_a_rewind_is_a_restore_by_hand(tmp_path, data_mode):
    """From step 11 to the checkpoint of step 8, with the calls of step 11 and half the rate."""
    prints, state, history = a_run(tmp_path / "a", [back_after(11, back=3, data=data_mode)])
    data = batches()
    all_batches, by_hand, saved = [*data, *data, *data], a_state(), None
    for i in range(11):
        if i == 8:
            saved = jax.tree.map(np.array, (by_hand.params, by_hand.opt_state))
        by_hand, _ = NOISY(by_hand, all_batches[i])
    params, opt_state = jax.tree.map(jnp.asarray, saved)
    by_hand = ts.adjust(by_hand.replace(params=params, opt_state=opt_state, step=8), learning_rate=0.05)
    assert prints.by_calls[11] != fingerprint(by_hand) == prints.by_step[8]
    first = 11 if data_mode == "skip" else 8
    for i in range(first, first + 12):
        by_hand, _ = NOISY(by_hand, all_batches[i])
        assert fingerprint(by_hand) == prints.by_calls[int(by_hand.calls)], i
    assert int(state.step) == 20 and int(state.calls) == 23 and fingerprint(state) == fingerprint(by_hand)
    assert history["step"].tolist() == [*range(1, 21)]
    assert (8, "rewind", f"from step 11, learning rate × 0.5, data {data_mode}") in history.marks
    assert sorted(os.listdir(tmp_path / "a" / "left" / "11")) == ["8"]
    assert ts.Checkpoints(tmp_path / "a" / "left" / "11", read_only=True).steps() == [8]


def with_a_bad_row():
    x = toys.X.copy()
    x[21] = np.nan
    return x


def two_states():
    return ts.States(first=a_state(), second=toys.state(), carry=jnp.zeros(()))


def step_of_two(run, x):
    step = ts.train_step(toys.noisy, donate=False).pure
    first, info = step(run.first, x, {})
    return run.advance(first=first, second=run.second, carry=run.carry + info.loss), info


def accumulating():
    return ts.setup(ts.rules.accumulate(ts.rules.adam(0.1), 3), {"w": jnp.ones(8)}, key=jax.random.key(1))


CASES = {
    "plain": {},
    "an average": {"make": lambda: a_state(ema=0.9)},
    "micro-batches": {"step": ts.train_step(toys.noisy, accumulate=4)},
    "accumulation over calls": {"make": accumulating, "calls": (33, 48)},
    "rejected steps": {"data": lambda: batches(with_a_bad_row()), "max_bad": 100},
    "a mesh": {"make": lambda: ts.shard(a_state(), ts.mesh())},
    "several states": {"make": two_states, "step": step_of_two},
    "a step a call": {"steps_per_call": None},
    "rows on the device": {"data": lambda: batches(device=True)},
    "read ahead": {"data": lambda: ts.prefetch(batches())},
    "a list": {"data": lambda: list(batches())},
    "no data": {"step": ts.train_step(toys.drawn), "data": lambda: False},
    "a cut after the checkpoint": {"edit": lambda s: ts.adjust(s, "w", learning_rate=0.02)},
    "a freeze after the checkpoint": {"edit": lambda s: ts.freeze(s, "w")},
}


def edited_once(edit, step):
    """A callback that edits the state at a step, the first time only."""

    def change(run):
        if edit is not None and run.step == step and "done" not in run.memory:
            run.memory["done"] = True
            return edit(run.state)
        return None

    change.outlives_rewinds = ("done",)
    return change


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
@pytest.mark.parametrize("data_mode", ["skip", "repeat"])
@pytest.mark.parametrize("name", CASES)
def test_the_line_of_a_run_that_went_back_twice(tmp_path, name, data_mode):
    """All steps of its line, and all calls, also those that it left, from files with few checkpoints."""
    case = dict(CASES[name])
    calls, edit = case.pop("calls", (11, 18)), edited_once(case.pop("edit", None), 10)
    make, step, data = case.get("make", a_state), case.get("step", NOISY), case.pop("data", batches)
    rewind = back_after(*calls, back=3, data=data_mode)
    prints, state, history = a_run(tmp_path / "a", [rewind, edit], data=data(), **case, keep_last=2)
    assert [name for _, name, _ in history.marks].count("rewind") == 2
    line = timeline(tmp_path / "a", step, make, data() or None)
    assert {k: fingerprint(line.at(k)) for k in prints.by_step} == prints.by_step
    assert {c: fingerprint(line.at(calls=c)) for c in prints.by_calls} == prints.by_calls
    assert fingerprint(state) == prints.by_step[STEPS]
    assert line.audit(*line.steps[-2:]) == []
