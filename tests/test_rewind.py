"""A run that goes back to an earlier checkpoint: its bits, its files after a kill, its line."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests import toys
from tests.helpers import medium_if
from tsunax.checkpoints import _home
from tsunax.errors import CheckpointError, HyperparameterError, RowError, SaveError, StateError
from tsunax.reproduce import fingerprint
from tsunax.run import rewinding
from tsunax.timelines import timeline

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


def a_looped_step(state, batch):
    """A step in the compiled loop of `fit`, which is another program than a step that is called."""
    return ts.fit(NOISY, state, [batch], steps=int(state.step) + 1, progress=False)


@pytest.mark.parametrize(("steps_per_call", "step"), [("auto", a_looped_step), (None, NOISY)])
@pytest.mark.parametrize("data_mode", ["skip", "repeat"])
def test_a_rewind_is_a_restore_by_hand(tmp_path, data_mode, steps_per_call, step):
    """From step 11 to the checkpoint of step 8, with the calls of step 11 and half the rate."""
    back = back_after(11, back=3, data=data_mode)
    prints, state, history = a_run(tmp_path / "a", [back], steps_per_call=steps_per_call)
    data = batches()
    all_batches, by_hand, saved = [*data, *data, *data], a_state(), None
    for i in range(11):
        if i == 8:
            saved = jax.tree.map(np.array, (by_hand.params, by_hand.opt_state))
        by_hand, _ = step(by_hand, all_batches[i])
    params, opt_state = jax.tree.map(jnp.asarray, saved)
    by_hand = ts.adjust(by_hand.replace(params=params, opt_state=opt_state, step=8), learning_rate=0.05)
    assert prints.by_calls[11] != fingerprint(by_hand) == prints.by_step[8]
    first = 11 if data_mode == "skip" else 8
    for i in range(first, first + 12):
        by_hand, _ = step(by_hand, all_batches[i])
        assert fingerprint(by_hand) == prints.by_calls[int(by_hand.calls)], i
    assert int(state.step) == 20 and int(state.calls) == 23 and fingerprint(state) == fingerprint(by_hand)
    assert history["step"].tolist() == [*range(1, 21)]
    assert (8, "rewind", f"from step 11, learning rate × 0.5, data {data_mode}") in history.marks
    assert sorted(os.listdir(tmp_path / "a" / "left" / "11")) == ["8"]
    assert ts.Checkpoints(tmp_path / "a" / "left" / "11", read_only=True).steps() == [8]


def accumulating():
    return ts.setup(ts.rules.accumulate(ts.rules.adam(0.1), 3), {"w": jnp.ones(8)}, key=jax.random.key(1))


CASES = {
    "plain": {},
    "an average": {"make": lambda: a_state(ema=0.9)},
    "micro-batches": {"step": ts.train_step(toys.noisy, accumulate=4)},
    "accumulation over calls": {"make": accumulating, "calls": (33, 48)},
    "rejected steps": {"data": lambda: batches(toys.with_a_bad_row()), "max_bad": 100},
    "a mesh": {"make": lambda: ts.shard(a_state(), ts.mesh())},
    "several states": {"make": toys.two_states, "step": toys.step_of_two},
    "a step a call": {"steps_per_call": None},
    "rows on the device": {"data": lambda: batches(device=True)},
    "read ahead": {"data": lambda: ts.prefetch(batches())},
    "a list": {"data": lambda: list(batches())},
    "no data": {"step": ts.train_step(toys.drawn), "data": lambda: False},
    "a cut after the checkpoint": {"edit": (9, lambda s: ts.adjust(s, "w", learning_rate=0.02))},
    "a cut before the checkpoint": {"edit": (7, lambda s: ts.adjust(s, "w", learning_rate=0.02))},
    "a freeze after the checkpoint": {"edit": (9, lambda s: ts.freeze(s, "w"))},
}


def edited_once(step, edit):
    """A callback that edits the state at a step, the first time only."""

    def change(run):
        if edit is not None and run.step == step and "done" not in run.memory:
            run.memory["done"] = True
            return edit(run.state)
        return None

    change.outlives_rewinds = ("done",)
    return change


FAST = "plain", "a mesh"


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
@pytest.mark.parametrize("name", medium_if(lambda name: name not in FAST, CASES))
def test_the_line_of_a_run_that_went_back_twice(tmp_path, name):
    """Steps of its line, and calls, also those that it left, from files with few checkpoints."""
    case, data_mode = dict(CASES[name]), "skip" if len(name) % 2 else "repeat"
    calls, edit = case.pop("calls", (11, 18)), edited_once(*case.pop("edit", (0, None)))
    make, step, data = case.get("make", a_state), case.get("step", NOISY), case.pop("data", batches)
    rewind = back_after(*calls, back=3, data=data_mode)
    prints, state, history = a_run(tmp_path / "a", [rewind, edit], data=data(), **case, keep_last=2)
    assert [name for _, name, _ in history.marks].count("rewind") == 2
    line = timeline(tmp_path / "a", step, make, data() or None)
    steps = [k for k in prints.by_step if k in (6, 8, 9, 13, STEPS)]
    assert {k: fingerprint(line.at(k)) for k in steps} == {k: prints.by_step[k] for k in steps}
    last_calls = [c for c in prints.by_calls if c in (calls[0] - 1, *calls, calls[-1] + 1)]
    assert {c: fingerprint(line.at(calls=c)) for c in last_calls} == {c: prints.by_calls[c] for c in last_calls}
    assert fingerprint(state) == prints.by_step[STEPS]
    assert line.audit(*line.steps[-2:]) == []


def test_a_branch_has_the_edits_of_calls_that_its_parent_left(tmp_path):
    """Replays of these calls begin at the first state, because the branch has none of their checkpoints."""

    def change(run):
        return ts.adjust(run.state, learning_rate=1e-3) if int(run.state.calls) == 9 else None

    prints, *_ = a_run(tmp_path / "a", [back_after(11, back=3), ts.callbacks.every(1, change)])
    make_line = lambda name: timeline(tmp_path / name, NOISY, a_state, batches())
    make_line("a").branch(16, tmp_path / "b", skip=1)
    line = make_line("b")
    calls = 8, 9, 10, 11, 12, 16
    assert {c: fingerprint(line.at(calls=c)) for c in calls} == {c: prints.by_calls[c] for c in calls}


def test_no_replay_crosses_a_rewind_to_before_an_edit_of_the_script(tmp_path):
    """The checkpoint of the rewind is deleted; one before it is kept, and a replay from it would miss the edit."""
    slower = lambda: ts.setup(ts.rules.sgd(0.02), {"w": jnp.ones(8)}, key=jax.random.key(1))
    a_run(tmp_path / "a", [], steps=12)
    with pytest.warns(UserWarning, match="edited in the script"):
        prints, *_ = a_run(tmp_path / "a", [back_after(15, back=6, factor=1.0)], slower)
    shutil.rmtree(tmp_path / "a" / "8")
    line = timeline(tmp_path / "a", NOISY, slower, batches())
    assert {k: fingerprint(line.at(k)) for k in (12, 20)} == {k: prints.by_step[k] for k in (12, 20)}
    with pytest.raises(StateError, match="no record at step 8"):
        line.at(9)


class Killed(BaseException):
    pass


# The renames of a rewind from step 11 to step 4: the state, steps 8 and 4, the state. See `checkpoints/rewinds.py`.
RENAMES = 4


@pytest.mark.parametrize("count", range(RENAMES + 1))
def test_a_kill_after_each_durable_step_of_a_rewind_changes_no_bit(tmp_path, monkeypatch, count):
    callbacks = lambda: [back_after(11, back=5, data="repeat")]
    _, expected, whole = a_run(tmp_path / "whole", callbacks())
    rename, renamed = os.rename, []

    def killed(source, target):
        if "rewind" in f"{source} {target}" or "/left/" in str(target):
            if len(renamed) == count:
                raise Killed
            renamed.append(target)
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        patch.setattr(_home.CheckpointHome, "discard", lambda self, name: None)  # a kill leaves the files
        error = SaveError if count < RENAMES else KeyboardInterrupt
        with pytest.raises(error):
            a_run(tmp_path / "a", [*callbacks(), stopped_after(13)])
    assert len(renamed) == count
    _, state, history = a_run(tmp_path / "a", callbacks())
    assert fingerprint(state) == fingerprint(expected)
    assert sorted(os.listdir(tmp_path / "a" / "left" / "11")) == ["4", "8"]
    for name in ("step", "loss", "learning_rate"):
        np.testing.assert_array_equal(history[name], whole[name])


def stopped_after(calls):
    """A callback that ends the process, as far as files show."""

    def stop(run):
        if int(run.state.calls) == calls:
            raise KeyboardInterrupt

    return stop


def test_the_count_of_rewinds_goes_on_over_rewinds_and_resumes(tmp_path):
    rewind = lambda: ts.callbacks.rewind(lambda run: run.step == 11, back=3, at_most=2)
    with pytest.raises(KeyboardInterrupt):
        a_run(tmp_path / "a", [rewind(), stopped_after(13)])
    with pytest.warns(UserWarning, match="after 2 rewinds the run goes on from step 11"):
        _, state, history = a_run(tmp_path / "a", [rewind()])
    assert int(state.calls) == STEPS + 6
    np.testing.assert_allclose(history["learning_rate"][[7, 8]], [0.1, 0.025])


def test_a_spike_makes_a_run_go_back(tmp_path):
    data = [*batches(), *batches()]
    data[10] = data[10] * 30
    _, _, history = a_run(tmp_path / "a", [ts.callbacks.rewind(back=1)], data=data, steps=14)
    assert [mark for mark in history.marks if mark[1] == "rewind"] == [
        (8, "rewind", "from step 11, learning rate × 0.5, data skip")
    ]
    assert history["loss"].max() < 30


def test_a_loss_is_a_spike_far_above_the_last_ones():
    losses = 2 + 0.1 * np.random.default_rng(0).normal(size=50)
    assert not any(rewinding.is_spike(losses[:n]) for n in range(1, 51))
    assert rewinding.is_spike(np.append(losses, 4.0)) and rewinding.is_spike(np.array([np.nan]))
    assert not rewinding.is_spike(np.append(losses, 0.0)) and not rewinding.is_spike(np.array([1.0, 100.0]))


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
def test_a_rejected_call_makes_a_run_go_back_behind_its_batch(tmp_path):
    rewind = ts.callbacks.rewind("rejected", back=1, factor=1)
    _, state, history = a_run(tmp_path / "a", [rewind], data=batches(toys.with_a_bad_row()), steps=12)
    marks = [name for _, name, _ in history.marks if name in ("rejected", "rewind")]
    assert {*marks} == {"rewind"} and int(state.step) == 12 and int(state.rejected) == 0


def with_a_bad_batch(number, count=32):
    data = [toys.X[8 * (i % 8) : 8 * (i % 8) + 8] for i in range(count)]
    data[number] = np.full_like(data[number], np.nan)
    return data


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
@pytest.mark.parametrize("wrap", [lambda rewind: rewind, lambda rewind: ts.callbacks.every(10, rewind)])
def test_a_rejected_call_makes_a_run_go_back_once(tmp_path, wrap):
    """Call 3 was rejected, and the checkpoint of step 4 is later than that, but the last look at the count is not."""
    rewind = wrap(ts.callbacks.rewind("rejected", back=4))
    options = {"data": with_a_bad_batch(2), "log_every": 10}
    _, state, history = a_run(tmp_path / "a", [rewind], **options)
    assert [mark[:2] for mark in history.marks if mark[1] == "rewind"] == [(4, "rewind")]
    assert int(state.rejected) == 1 and history["learning_rate"][-1] == pytest.approx(0.05)
    with pytest.raises(KeyboardInterrupt):  # a kill between the rejected call and the look at it
        a_run(tmp_path / "b", [rewind, ts.callbacks.every(1, stopped_after(7))], **options)
    a_run(tmp_path / "c", [rewind], steps=4, **options)  # a goal on the way
    for folder in ("b", "c"):
        _, resumed, history = a_run(tmp_path / folder, [rewind], **options)
        assert [mark[1] for mark in history.marks].count("rewind") == 1 and fingerprint(resumed) == fingerprint(state)


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
def test_a_rejected_call_after_a_rewind_makes_a_run_go_back_again(tmp_path):
    data = with_a_bad_batch(2)
    data[20] = data[2]
    rewind = ts.callbacks.rewind("rejected", back=1, factor=1)
    _, state, history = a_run(tmp_path / "a", [rewind], data=data, log_every=5, steps=24)
    assert [mark[1] for mark in history.marks].count("rewind") == 2 and int(state.step) == 24


@pytest.mark.parametrize("info", [lambda info: {"loss": info.loss}, lambda info: info.loss])
def test_a_call_that_a_step_of_your_own_rejected_makes_a_run_go_back(tmp_path, info):
    """Its infos have no verdict, so the history has no mark of the call."""

    def step(state, batch):
        state, report = NOISY.pure(state, batch, {})
        return state, info(report)

    rewind = ts.callbacks.rewind("rejected", back=1)
    _, state, history = a_run(tmp_path / "a", [rewind], step=step, data=with_a_bad_batch(5), every=2)
    assert [mark[1] for mark in history.marks].count("rewind") == 1 and int(state.step) == STEPS


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
def test_calls_that_were_rejected_before_the_run_make_no_rewind(tmp_path):
    state, _ = NOISY(a_state(), with_a_bad_batch(0)[0])
    assert int(state.rejected) == 1
    _, state, history = a_run(tmp_path / "a", [ts.callbacks.rewind("rejected", back=1)], lambda: state, every=1)
    assert "rewind" not in [mark[1] for mark in history.marks] and int(state.step) == STEPS


def step_of_infos(names):
    """A step of two states whose info has their infos under these names."""
    steps = [ts.train_step(toys.noisy, donate=False), ts.train_step(toys.loss_fn, donate=False)]

    def step(run, x):
        first, first_info = steps[0].pure(run.first, x, {})
        second, second_info = steps[1].pure(run.second, x, {})
        infos = dict(zip(names, (first_info, second_info), strict=True))
        return run.advance(first=first, second=second), infos

    return step


def test_a_spike_of_any_member_makes_a_run_of_states_go_back(tmp_path):
    data = [*batches(), *batches()]
    data[10] = data[10] * 30
    rewind, step = ts.callbacks.rewind(back=1), step_of_infos(("first", "second"))
    _, state, history = a_run(tmp_path / "a", [rewind], toys.two_states, step, data, steps=14)
    assert [mark[:2] for mark in history.marks if mark[1] == "rewind"] == [(8, "rewind")]
    assert history["second/loss"].max() < 30 and int(state.step) == 14
    with pytest.raises(
        RowError, match=r"rewind\(\): got one/loss, .* expected 'loss' or 'first/loss' or 'second/loss'"
    ):
        a_run(tmp_path / "b", [rewind], toys.two_states, step_of_infos(("one", "two")))


@pytest.mark.parametrize("when", ["spike", "rejected", lambda run: False])
def test_a_rewind_of_a_population_is_refused_at_the_start(tmp_path, when):
    make, options = lambda: ts.population(lambda key: a_state(), 2), {"steps": 2, "progress": False}
    for more in ({}, {"checkpoint": tmp_path / "a"}, {"dry_run": True}):
        with pytest.raises(StateError, match=r"state at rewind\(\): got a population"):
            ts.fit(NOISY, make(), batches(), callbacks=[ts.callbacks.rewind(when)], **options, **more)
    step = lambda params, x: (params - 0.1 * x.mean(), {"loss": params**2})
    with pytest.raises(StateError, match=r"state at rewind\(\): got float32\[\], expected a TrainState or States"):
        ts.fit(step, jnp.ones(()), batches(), callbacks=[ts.callbacks.rewind(when)], **options)


def test_files_of_loggers_have_the_rows_of_the_line_once(tmp_path):
    log = ts.loggers.csv(tmp_path / "rows.csv")
    a_run(tmp_path / "a", [back_after(11, back=3)], logger=log)
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert [int(line.partition(",")[0]) for line in lines[1:]] == [*range(1, STEPS + 1)]


def test_early_stopping_has_the_memory_of_the_checkpoint(tmp_path):
    """The evaluations that were left do not count: the run stops as one that never had them."""
    values = iter([1.0, 0.9, 0.1, 0.8, 0.7, 0.6, 0.5])
    stopping = ts.callbacks.early_stopping("val/x", mode="min", patience=2)
    callbacks = [stopping, back_after(12, back=1, factor=1)]
    options = {"evaluate": lambda state: {"val/x": next(values)}, "evaluate_every": 4}
    _, _, history = a_run(tmp_path / "a", callbacks, steps=24, **options)
    np.testing.assert_array_equal(history.series("val/x")[1], [1.0, 0.9, 0.8, 0.7, 0.6, 0.5])


def test_what_cannot_go_back_is_said(tmp_path):
    back = lambda **options: ts.callbacks.every(3, lambda run: run.rewind(**options) if run.step == 3 else None)
    fit = lambda state=None, **options: ts.fit(
        NOISY, a_state() if state is None else state, batches(), steps=4, progress=False, **options
    )
    with pytest.raises(CheckpointError, match="got none, expected fit"):
        fit(callbacks=[back()])
    with pytest.raises(CheckpointError, match="none before step 3"):
        fit(callbacks=[back()], checkpoint=ts.Checkpoints(tmp_path / "a", every="epoch"))
    with pytest.raises(CheckpointError, match="files on a disk"):
        fit(callbacks=[back()], checkpoint=ts.Checkpoints(tmp_path / "orbax", every=1, store="orbax"))
    with pytest.raises(HyperparameterError, match="a live learning rate"):
        rule = ts.rules.add_decayed_weights(0.1)
        state = ts.setup(rule, {"w": jnp.ones(8)}, key=jax.random.key(0))
        fit(state, callbacks=[back()], checkpoint=ts.Checkpoints(tmp_path / "b", every=1))
    with pytest.raises(StateError, match="a population"):
        state = ts.population(lambda key: a_state(), 2)
        fit(state, callbacks=[back()], checkpoint=ts.Checkpoints(tmp_path / "c", every=1))
    with pytest.raises(HyperparameterError, match=r"data at run\.rewind"):
        ts.callbacks.rewind(data="again")
    with pytest.raises(HyperparameterError, match="when at rewind"):
        ts.callbacks.rewind("later")
    with pytest.warns(UserWarning, match="goes back to step 1, the oldest"):
        _, history = fit(
            callbacks=[ts.callbacks.rewind(lambda run: int(run.state.calls) == 3)],
            checkpoint=ts.Checkpoints(tmp_path / "d", every=1, keep_last=None),
            log_every=1,
        )
    assert history["step"].tolist() == [1, 2, 3, 4]


def test_a_run_that_could_never_go_back_is_refused_before_its_first_step(tmp_path):
    started = []

    def step(state, batch):
        started.append(int(state.step))
        return NOISY(state, batch)

    rewind = ts.callbacks.rewind(lambda run: False)
    fixed_rate = ts.setup(ts.rules.add_decayed_weights(0.1), {"w": jnp.ones(8)}, key=jax.random.key(0))
    orbax = ts.Checkpoints(tmp_path / "orbax", store="orbax")
    cases = [
        (a_state(), None, "got none"),
        (a_state(), orbax, "files on a disk"),
        (fixed_rate, tmp_path / "a", "a live"),
    ]
    for state, checkpoint, text in cases:
        options = {"checkpoint": checkpoint, "callbacks": [rewind], "steps_per_call": None, "progress": False}
        with pytest.raises((CheckpointError, HyperparameterError), match=text):
            ts.fit(step, state, batches(), steps=4, **options)
    assert not started


class Counter(ts.callbacks.Part):
    """A part that counts its boundaries, also those that a rewind left."""

    every = 1
    outlives_rewinds = ("total",)

    def at(self, run, events):
        for name in ("total", "of the line"):
            run.memory[name] = run.memory.get(name, 0) + 1
        self.newest = dict(run.memory)


def test_a_part_keeps_the_memory_that_outlives_rewinds(tmp_path):
    counter = Counter()
    a_run(tmp_path / "a", [back_after(11, back=3), counter])
    assert counter.newest == {"total": 23, "of the line": 20}


def test_the_memory_below_wrappers_outlives_rewinds(tmp_path):
    every, throttle = ts.callbacks.every, ts.callbacks.throttle
    for i, wrap in enumerate([lambda f: f, lambda f: every(1, f), lambda f: every(1, throttle(f, 0.0))]):
        totals = []

        def count(run, totals=totals):
            run.memory["total"] = run.memory.get("total", 0) + 1
            totals.append(run.memory["total"])

        count.outlives_rewinds = ("total",)
        a_run(tmp_path / f"{i}", [back_after(11, back=3), wrap(count)])
        assert totals == [*range(1, len(totals) + 1)]


def positionless():
    """An iterable that begins again, and has no position."""

    class Loader:
        def __iter__(self):
            return iter(np.split(toys.X, 8))

    return Loader()


def test_data_without_a_position_are_read_again_if_the_run_may(tmp_path):
    """`fast_forward=True` holds for a rewind as for a resume."""
    options = {"data": positionless(), "fast_forward": True}
    prints, state, _ = a_run(tmp_path / "a", [back_after(15, back=3, data="repeat")], **options)
    expected, other, _ = a_run(tmp_path / "b", [back_after(15, back=3, data="repeat")], data=list(np.split(toys.X, 8)))
    assert prints.by_calls == expected.by_calls and fingerprint(state) == fingerprint(other)


@pytest.mark.parametrize("keep_last", [3, None])
@pytest.mark.parametrize(("after", "every", "first"), [(14, 2, 12), (13, 1, 11), (15, 2, 12)])
@pytest.mark.parametrize("data_mode", ["skip", "repeat"])
def test_the_batch_of_each_call_of_a_run_that_went_back(tmp_path, data_mode, after, every, first, keep_last):
    """The rewind after call `after` goes to step `first`; the next call has its batch of a line of their own."""
    back = back_after(after, back=2, data=data_mode)
    prints, state, _ = a_run(tmp_path / "a", [back], every=every, keep_last=keep_last)
    line, data = timeline(tmp_path / "a", NOISY, a_state, batches()), batches()
    assert int(state.calls) == STEPS + after - first
    for call in range(after - 3, after + 5):
        number = call - 1 if call <= after or data_mode == "skip" else first + call - after - 1
        epoch, position = divmod(number, 8)
        expected = data.order(epoch)[8 * position : 8 * position + 8]
        batch, rows = line.batch(calls=call)
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_array_equal(batch, toys.X[expected])
        assert fingerprint(line.at(calls=call)) == prints.by_calls[call] or call == after
    assert f"call {after + 1} of the run" in repr(line.explain(calls=after + 1))


def test_a_second_rewind_after_as_many_calls_keeps_what_the_first_one_left(tmp_path):
    """The user has deleted later checkpoints by hand, and the run makes the same steps again."""
    callbacks = lambda: [back_after(11, back=3)]
    a_run(tmp_path / "a", callbacks())
    for folder in (tmp_path / "a").iterdir():
        if folder.name.isdigit() and int(folder.name) > 4:
            shutil.rmtree(folder)
    _, state, _ = a_run(tmp_path / "a", callbacks())
    assert int(state.step) == 20
    left = sorted(x.name for x in (tmp_path / "a" / "left" / "11").iterdir())
    assert "8" in left and len(left) == 2


def test_a_watchdog_tells_the_rewind_and_one_end(tmp_path):
    events = []
    watchdog = ts.callbacks.watchdog(tell=lambda event, text, row: events.append((event, text)))
    a_run(tmp_path / "a", [back_after(11, back=3), watchdog])
    told = [x for x in events if x[0] in ("start", "rewind", "stop", "end")]
    assert [x[0] for x in told] == ["start", "rewind", "start", "end"]
    assert told[1][1] == "the run goes back from step 11" and "step 8" in told[2][1]


def test_a_dry_run_tries_a_rewind_without_checkpoints(tmp_path):
    tried = []
    when = lambda run: tried.append(run.step) or True
    state, _ = ts.fit(
        NOISY, a_state(), batches(), steps=20, checkpoint=tmp_path / "a", progress=False, dry_run=True, log_every=1,
        callbacks=[ts.callbacks.rewind(when)],
    )  # fmt: skip
    assert tried and int(state.step) <= 2 and not (tmp_path / "a").exists()


@pytest.mark.parametrize("calls", [6, 8])
def test_a_rewind_at_a_step_with_several_events_is_one(tmp_path, calls):
    """Call 8 ends an epoch, and is a row: the callback is called twice there."""
    when = lambda run: int(run.state.calls) in (calls, calls + 10)
    callbacks = [ts.callbacks.rewind(when, back=2, at_most=2)]
    _, state, history = a_run(tmp_path / "a", callbacks)
    assert [mark[1] for mark in history.marks].count("rewind") == 2 and int(state.step) == 20


def test_the_factor_of_a_rewind_is_no_bool():
    with pytest.raises(ts.errors.HyperparameterError, match="factor"):
        ts.callbacks.rewind("spike", factor=True)
