"""Parts of a run: what the loop calls beside its steps, and what it must not know."""

import dataclasses
import datetime
import itertools
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests.helpers import assert_trees_equal
from tsunax._core import cadence
from tsunax._core.cadence import Cadence
from tsunax.run import fused_loop
from tsunax.run.feed import Reading
from tsunax.run.options import Options

ROWS = np.arange(18, dtype=np.float32).reshape(9, 2) / 8


def loss_fn(params, x):
    return jnp.mean((x - params["w"][None]) ** 2)


def setup():
    return ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(2)}, key=0)


def fit(steps=12, data=None, loss=loss_fn, state=None, **given):
    data, state = ts.batches(ROWS, 3) if data is None else data, setup() if state is None else state
    return ts.fit(ts.train_step(loss), state, data, steps=steps, progress=False, **given)


class Told(ts.callbacks.Part):
    def __init__(self, every=()):
        self.every, self.calls = every, []

    def begin(self, run):
        self.calls.append(("begin", run.step))

    def at(self, run, events):
        self.calls.append((*events, run.step))

    def end(self, run, error):
        self.calls.append(("end", run.step, error))


def test_a_part_is_called_where_it_is_due_and_told_of_the_end():
    part = Told(every=5)
    fit(callbacks=part)
    assert part.calls == [("begin", 0), ("step", 5), ("step", 10), ("end", 12, None)]


def test_a_part_hears_of_epochs_and_evaluations():
    part = Told(every="epoch")
    fit(steps=7, callbacks=[part], evaluate=lambda state: {"val/x": 1.0})
    assert part.calls == [("begin", 0), ("evaluate", "epoch", 3), ("evaluate", "epoch", 6), ("end", 7, None)]


def test_a_part_is_told_of_the_error_that_ends_the_run():
    part, error = Told(every=4), ValueError("no")

    def fail(run):
        raise error

    with pytest.raises(ValueError, match="no"):
        fit(callbacks=[part, ts.callbacks.every(8, fail)])
    assert part.calls == [("begin", 0), ("step", 4), ("end", 8, error)]


def test_an_error_of_a_part_names_it_and_the_step():
    class Broken(ts.callbacks.Part):
        every = 3

        def at(self, run, events):
            raise OSError("gone")

    with pytest.raises(OSError, match="gone") as caught:
        fit(callbacks=Broken())
    assert "Broken" in caught.value.__notes__[0] and "at step 3" in caught.value.__notes__[0]


def test_a_run_with_a_part_has_the_bits_of_one_without():
    with_part, alone = fit(callbacks=Told(every=5))[0], fit()[0]
    np.testing.assert_array_equal(with_part.params["w"], alone.params["w"])


def test_a_part_logs_into_the_row_of_its_step_and_has_its_own_memory():
    class Logs(ts.callbacks.Part):
        every = 2

        def at(self, run, events):
            run.log(**{"my/x": run.step})
            run.memory["steps"] = [*run.memory.get("steps", []), run.step]
            self.memory = run.memory

    rows, part, memories = {}, Logs(), []
    callback = ts.callbacks.every(4, lambda run: memories.append(dict(run.memory)))
    _, history = fit(steps=8, callbacks=[part, callback], logger=lambda row, step: rows.update({step: row}))
    assert [x.tolist() for x in history.series("my/x")] == [[2, 4, 6, 8], [2, 4, 6, 8]]
    assert {step: row.get("my/x") for step, row in rows.items()} == {1: None, 2: 2, 4: 4, 6: 6, 8: 8}
    assert part.memory == {"steps": [2, 4, 6, 8]} and memories == [{}, {}]


def test_a_part_may_say_at_which_steps_it_is_due():
    class At(Told):
        def next_step(self, step):
            return next((n for n in (3, 4, 9) if n > step), step)

    part = At()
    fit(callbacks=part)
    assert [step for event, step, *_ in part.calls if event == "step"] == [3, 4, 9]
    assert not hasattr(part, "is_last")


def test_the_error_that_a_part_is_told_of_has_the_state_and_the_history():
    class Reads(ts.callbacks.Part):
        def end(self, run, error):
            self.about = error.state, error.history

    def fail(run):
        raise ValueError("no")

    part = Reads()
    with pytest.raises(ValueError, match="no") as caught:
        fit(callbacks=[part, ts.callbacks.every(4, fail)])
    assert part.about[0] is caught.value.state and int(part.about[0].step) == 4
    assert part.about[1] is caught.value.history


def test_a_dry_run_calls_a_part_once():
    part = Told(every=100)
    fit(steps=1000, callbacks=[part], dry_run=True)
    assert part.calls == [("begin", 0), ("end", 2), ("end", 2, None)]


class Ends(ts.callbacks.Part):
    def __init__(self, name, calls, raises=()):
        self.name, self.calls, self.raises = name, calls, raises

    def _call(self, event, *about):
        self.calls.append((self.name, event, *about))
        if event in self.raises:
            raise ValueError(f"{event} of {self.name}")

    def begin(self, run):
        self._call("begin")

    def read(self, run, has_row):
        self._call("read")

    def end(self, run, error):
        self._call("end", type(error).__name__)


class Logged:
    def __init__(self, calls):
        self.calls = calls

    def start(self, settings):
        self.calls.append(("log", "start"))

    def __call__(self, row, *, step):
        pass

    def close(self):
        self.calls.append(("log", "close"))


def test_all_parts_end_and_the_error_of_the_run_stays():
    calls, first = [], KeyError("first")

    def fail(run):
        raise first

    parts = [Ends("a", calls), Ends("b", calls, ["end"]), fail]
    with pytest.raises(KeyError) as caught:
        fit(callbacks=parts)
    assert caught.value is first and "ValueError('end of b')" in caught.value.__notes__[-1]
    assert [x for x in calls if x[1] == "end"] == [("b", "end", "KeyError"), ("a", "end", "KeyError")]
    calls.clear()
    with pytest.raises(ValueError, match="end of b"):
        fit(callbacks=parts[:2])
    assert [x for x in calls if x[1] == "end"] == [("b", "end", "NoneType"), ("a", "end", "ValueError")]


def test_only_parts_that_began_end_and_the_loggers_and_the_display_close(monkeypatch):
    from tsunax.run.progress import Progress

    calls = []
    monkeypatch.setattr(Progress, "close", lambda self, reason="": calls.append(("bar", "close", reason)))
    parts = [Ends("a", calls), Ends("b", calls, ["begin"]), Ends("c", calls)]
    given = {"progress": True, "logger": Logged(calls)}
    with pytest.raises(ValueError, match="begin of b"):
        ts.fit(ts.train_step(loss_fn), setup(), ts.batches(ROWS, 3), steps=4, callbacks=parts, **given)
    ends = [("b", "end", "ValueError"), ("a", "end", "ValueError"), ("log", "close"), ("bar", "close", "ValueError")]
    assert calls == [("log", "start"), ("a", "begin"), ("b", "begin"), *ends]


@pytest.mark.filterwarnings("ignore:step 0")
def test_a_part_that_raises_does_not_hide_a_run_of_rejected_steps():
    with pytest.raises(ts.errors.NonFiniteError) as caught:
        fit(loss=lambda params, x: loss_fn(params, x) * jnp.nan, max_bad=1, callbacks=Ends("a", [], ["read"]))
    assert "read of a" in str(caught.value.__context__)


@pytest.mark.parametrize(
    ("every", "error"),
    [(0, ts.errors.HyperparameterError), (None, ts.errors.WrongTypeError), (2.5, ts.errors.WrongTypeError)],
)
def test_a_part_needs_a_number_of_steps(every, error):
    with pytest.raises(error, match=r"every at Told: got .*, expected (an int ≥ 1|steps \(an int\), '2 epochs')"):
        fit(callbacks=Told(every=every))


def test_a_part_may_have_another_interval_in_its_next_run():
    part = Told(every=5)
    fit(steps=6, callbacks=part)
    part.every = ("epoch", 4)
    part.calls.clear()
    fit(steps=6, callbacks=part)
    assert part.calls[1:-1] == [("epoch", 3), ("step", 4), ("step", "epoch", 6)]


def test_a_part_may_change_its_interval_within_a_run():
    class Rarer(Told):
        def at(self, run, events):
            super().at(run, events)
            if run.step == 4:
                self.every = 5

    part = Rarer(every=2)
    fit(steps=12, callbacks=part)
    assert part.calls[1:-1] == [("step", 2), ("step", 4), ("step", 5), ("step", 10)]


# ------------------------------------------------------------------------------------------------------- how often


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        (500, Cadence(steps=(500,))),
        (np.int64(5), Cadence(steps=(5,))),
        ("epoch", Cadence(epochs=(1,))),
        ("2 epochs", Cadence(epochs=(2,))),
        ("30 s", Cadence(seconds=30.0)),
        ("1.5 sec", Cadence(seconds=1.5)),
        ("1 minute", Cadence(seconds=60.0)),
        ("10min", Cadence(seconds=600.0)),
        ("2 h", Cadence(seconds=7200.0)),
        ("2 days", Cadence(seconds=172800.0)),
        (datetime.timedelta(minutes=10), Cadence(seconds=600.0)),
        ((500, "epoch", ("1 h", "10 minutes"), 300), Cadence((500, 300), (1,), 600.0)),
        ((), Cadence()),
    ],
)
def test_how_often(when, expected):
    assert cadence.cadence_of(when, "f()", "every") == expected


@pytest.mark.parametrize(
    "when", ["10 m", "m", "3 fortnights", "min", "0 s", "-1 s", "0 epochs", datetime.timedelta(0), (5, "")]
)
def test_a_cadence_that_says_nothing(when):
    with pytest.raises(
        ts.errors.HyperparameterError, match=r"every at f\(\): got .*, expected steps .*'10 minutes'"
    ) as error:
        cadence.cadence_of(when, "f()", "every")
    assert ("months" in str(error.value)) == (when in ("10 m", "m"))


def without_unit(number):
    return np.array(number).view("m8")[()]  # NumPy 2.5 warns of the constructor


@pytest.mark.parametrize("when", [np.timedelta64(5, "m"), without_unit(5), without_unit(np.iinfo(np.int64).min)])
def test_a_duration_of_numpy_is_no_number_of_steps(when):
    with pytest.raises(ts.errors.WrongTypeError, match=r"every at f\(\): got .*timedelta64.*, expected steps"):
        cadence.cadence_of(when, "f()", "every")


def test_a_checkpoint_has_no_field_that_a_part_does_not_show(tmp_path):
    @dataclasses.dataclass
    class Hook(ts.callbacks.Part):
        folder: str = "a"
        token: str = dataclasses.field(default="secret", repr=False)
        every = 2

        def at(self, run, events):
            run.memory["count"] = run.memory.get("count", 0) + 1
            counts.append(run.memory["count"])

    counts = []
    for steps, token in ((4, "secret"), (8, "another")):
        fit(steps, checkpoint=tmp_path / "a", callbacks=Hook(token=token))
    text = "".join(path.read_text() for path in tmp_path.glob("a/*/manifest.json"))
    assert "folder='a'" in text and "secret" not in text and counts == [1, 2, 3, 4]


def test_the_at_of_a_part_is_a_method():
    class Steps(ts.callbacks.Part):
        at = 5

    with pytest.raises(
        ts.errors.WrongTypeError, match=r"Steps\.at at fit\(\): got 5 \(int\), expected a method at\(run, events"
    ):
        fit(callbacks=Steps())


@pytest.mark.parametrize("when", [float("nan"), [5, "10 s"], 2.5, None, {5}])
def test_what_is_no_cadence_is_told_the_forms(when):
    with pytest.raises(ts.errors.WrongTypeError, match=r"every at f\(\): got .*, expected steps .*a tuple of these"):
        cadence.cadence_of((100, when), "f()", "every")


def test_a_cadence_has_steps_and_epochs():
    assert cadence.cadence_of("1 week", "f()", "every") == cadence.cadence_of("7 days", "f()", "every")
    every = cadence.cadence_of((4, 6, "2 epochs"), "f()", "every")
    assert [i for i in range(13) if every.is_at_step(i)] == [4, 6, 8, 12]
    assert [every.next_step(i) for i in (0, 4, 6, 11)] == [4, 6, 8, 12]
    assert [i for i in range(1, 5) if every.is_at_epoch(i)] == [2, 4]


def jumps(clock, seconds_at_step):
    """A callback that puts the clock forward at some steps: durations have passed after the next call."""

    def jump(run):
        clock.now += seconds_at_step.get(run.step, 0)

    return ts.callbacks.every(1, jump)


def endless():
    while True:
        yield ROWS[:3]


def saved_steps(path, every, callback, steps=25):
    with ts.Checkpoints(path, every=every, keep_last=None) as saver:
        fit(steps, endless(), callbacks=callback, checkpoint=saver, steps_per_call=1, fast_forward=True)
        return saver.steps()


def near(steps, expected):
    """Whether these are the expected steps, each up to one call later."""
    return len(steps) == len(expected) and all(0 <= x - y <= 1 for x, y in zip(steps, expected, strict=True))


@pytest.mark.parametrize(("every", "minutes"), [("1 h", 60), (("1 h", "2 epochs"), 60), (None, 10)])
def test_a_run_saves_when_the_duration_has_passed(tmp_path, clock, every, minutes):
    callback = jumps(clock, {3: 60 * minutes, 9: 60 * minutes - 1, 12: 1})
    assert near(saved_steps(tmp_path, every, callback), [3, 12, 25])


def test_whichever_comes_first_counts_from_the_last_save(tmp_path, clock):
    callback = jumps(clock, {3: 3600, 12: 3600, 15: 1800, 21: 1800})
    assert near(saved_steps(tmp_path, (10, "1 h"), callback), [3, 10, 12, 20, 25])


def columns(history):
    """All columns without the rates, which are times."""
    return {name: history[name].tolist() for name in history.names if not name.endswith("_per_second")}


@pytest.mark.parametrize("per_call", [1, 4, "auto", None])
def test_saves_by_the_clock_change_no_bit_and_no_row(tmp_path, monkeypatch, per_call):
    """Also of a run that is resumed from any of them."""
    ticks = itertools.count()  # a second has passed whenever the clock is read, so after each call
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))

    def run(steps=14, **given):
        rows = {}
        logger = lambda row, step: rows.update({step: {k: x for k, x in row.items() if "_per_" not in k}})
        data = ts.batches(ROWS, 3, shuffle=True)
        state, history = fit(steps, data, log_every=5, steps_per_call=per_call, logger=logger, **given)
        return state, columns(history), rows

    state, history, rows = run()
    with ts.Checkpoints(tmp_path / "all", every="1 s", keep_last=None) as saver:
        again, columns_again, rows_again = run(checkpoint=saver)
        steps = saver.steps()
    assert len(steps) > 2 and steps[-1] == 14
    assert_trees_equal(again, state)
    assert columns_again == history and rows_again == rows
    for step in steps[:-1]:
        shutil.copytree(tmp_path / "all" / str(step), tmp_path / str(step) / str(step))
        resumed, columns_resumed, rows_resumed = run(checkpoint=tmp_path / str(step), resume="must")
        assert_trees_equal(resumed, state)
        assert columns_resumed == history
        # The row of the saved step comes again if the loggers did not have it at the save.
        assert rows_resumed.items() <= rows.items()
        assert [i for i in rows_resumed if i > step] == [i for i in rows if i > step]


def test_an_evaluation_by_the_clock_is_an_event_and_the_clock_is_none_for_plain_functions(clock):
    plain_calls, timed_calls = [], []
    plain = lambda run: plain_calls.append((run.event, run.step))
    timed = ts.callbacks.every("1 h", lambda run: timed_calls.append((run.event, run.step)))
    given = {"evaluate": lambda state: {"val/x": 1.0}, "evaluate_every": "2 h", "steps_per_call": 1}
    callbacks = [jumps(clock, {2: 3600, 5: 3600}), timed, plain]
    _, history = fit(8, endless(), callbacks=callbacks, log_every=100, **given)
    assert [event for event, _ in plain_calls] == ["start", "evaluate", "end"]
    assert near([step for _, step in plain_calls], [0, 5, 8])
    assert [event for event, _ in timed_calls] == ["clock", "clock"]
    assert near([step for _, step in timed_calls], [2, 5])
    assert near([step for step, name, _ in history.marks if name == "evaluate"], [5])


def test_a_callback_is_called_once_at_a_boundary_that_has_all_its_times():
    calls = []
    callback = ts.callbacks.every((3, "epoch", "1 h"), lambda run: calls.append((run.event, run.step)))
    fit(7, callbacks=callback)  # an epoch has three steps
    assert calls == [("step", 3), ("step", 6)]
    calls.clear()
    fit(10, callbacks=[ts.callbacks.every("2 epochs", callback)])
    assert calls == [("epoch", 6)]


def test_a_part_may_follow_the_clock_in_several_runs(clock):
    part = Told(every=(5, "1 h"))
    for _ in range(2):
        part.calls.clear()
        clock.now += 3600  # between two runs
        fit(8, endless(), callbacks=[jumps(clock, {2: 3600}), part], steps_per_call=1)
        begin, by_clock, by_step, end = part.calls
        assert begin == ("begin", 0) and by_step == ("step", 5) and end == ("end", 8, None)
        assert "clock" in by_clock and near([by_clock[-1]], [2])


def test_what_follows_the_clock_and_changes_the_run_is_warned_of(tmp_path, clock):
    given = {"evaluate": lambda state: {"val/loss": 1.0}, "evaluate_every": (100, "1 h")}
    with pytest.warns(
        UserWarning, match=r"evaluate_every=.* early_stopping\(\) acts on 'val/loss', so the run will not"
    ):
        fit(2, callbacks=ts.callbacks.early_stopping("val/loss"), **given)
    best = ts.checkpoints.Best("val/loss", mode="min")
    with (
        ts.Checkpoints(tmp_path, keep_best=best) as saver,
        pytest.warns(UserWarning, match="keep_best acts on 'val/loss'"),
    ):
        fit(2, checkpoint=saver, **given)
    fit(2, **given)  # nobody acts on its numbers
    change = ts.callbacks.every("1 h", lambda run: ts.adjust(run.state, learning_rate=0.2))
    with pytest.warns(
        UserWarning, match=r"every\(interval='1 h', fn=.*\) changed the state when its duration had passed"
    ):
        fit(4, endless(), callbacks=[jumps(clock, {2: 3600}), change], steps_per_call=1)
    fit(4, callbacks=ts.callbacks.every((2, "1 h"), lambda run: ts.adjust(run.state, learning_rate=0.2)))


def test_the_cadences_of_processes_are_compared(monkeypatch):
    compared, deciding_settings = [], Options.deciding_settings
    keep = lambda self: compared.append(deciding_settings(self)) or compared[-1]
    monkeypatch.setattr(Options, "deciding_settings", keep)

    def settings(**given):
        fit(1, evaluate=lambda state: {"val/x": 1.0}, **given)
        return compared[-1]

    every = lambda interval: {"callbacks": ts.callbacks.every(interval, print)}
    assert settings() == settings() != settings(evaluate_every="10 s")
    assert settings(**every("60 s")) == settings(**every("1 min")) != settings(**every("1 h"))


def test_a_callback_may_have_an_attribute_of_any_name():
    class Callback:
        watches, calls = "x", 0

        def __call__(self, run):
            self.calls += 1

    callback = Callback()
    fit(callbacks=callback)
    assert callback.calls > 1


# ------------------------------------------------------------------------------------ calls do not wait for the host


@pytest.mark.parametrize("device", [None, True], ids=["numpy", "resident"])
@pytest.mark.parametrize("steps_per_call", [1, 4, "auto"])
def test_fit_runs_under_the_users_own_transfer_guard(device, steps_per_call):
    given = {"data": ts.batches(ROWS, 4, shuffle=True, device=device), "steps_per_call": steps_per_call}
    states = [setup(), setup()]
    with jax.transfer_guard("disallow"):
        guarded, _ = fit(state=states[0], **given)
    given["data"] = ts.batches(ROWS, 4, shuffle=True, device=device)
    free, _ = fit(state=states[1], **given)
    np.testing.assert_array_equal(guarded.params["w"], free.params["w"])


def test_each_call_but_the_first_of_its_form_is_dispatched_under_the_guard(monkeypatch):
    settings, calls, real, dispatch = [], [], jax.transfer_guard_device_to_host, fused_loop.Fused._dispatch
    monkeypatch.setattr(fused_loop, "_RECEIVES", lambda setting: settings.append(setting) or real(setting))
    monkeypatch.setattr(fused_loop.Fused, "_dispatch", lambda self, *x: calls.append(0) or dispatch(self, *x))
    step = ts.train_step(lambda params, x: loss_fn(params, 2 * x))
    for new in (1, 0):
        settings.clear(), calls.clear()
        ts.fit(step, setup(), ts.batches(ROWS, 3), steps=12, steps_per_call=3, progress=False)
        assert len(calls) >= 4 and settings == ["disallow"] * (len(calls) - new)


def _settings_of_traces(run):
    """What the guard was whenever the loss function was traced in a run."""
    seen = []

    def noting(params, x):
        seen.append(jax.config.jax_transfer_guard_device_to_host)
        return loss_fn(params, x)

    run(ts.train_step(noting))
    return seen


def _two_leaves(n):
    return ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(2), "v": jnp.zeros(n)})


def _of_other_shapes(step):
    for n in (2, 3, 2):
        ts.fit(step, _two_leaves(n), ts.batches(ROWS, 3), steps=8, steps_per_call=4, progress=False)


def _adjusted(step):
    def adjust(run):
        return ts.adjust(run.state, "w", learning_rate=0.5) if run.step == 4 else None

    callback = ts.callbacks.every(4, adjust)
    given = {"steps": 12, "steps_per_call": 4, "progress": False}
    ts.fit(step, _two_leaves(2), ts.batches(ROWS, 3), callbacks=callback, **given)


def _cleared(step):
    for _ in range(2):
        ts.fit(step, setup(), ts.batches(ROWS, 3), steps=8, steps_per_call=4, progress=False)
        jax.clear_caches()


@pytest.mark.medium
@pytest.mark.parametrize("run", [_of_other_shapes, _adjusted, _cleared])
def test_a_program_is_traced_under_the_users_setting_again(run):
    with jax.transfer_guard_device_to_host("log"):
        seen = _settings_of_traces(run)
    assert len(seen) >= 2 and set(seen) == {"log"}


def test_users_code_runs_under_the_users_setting():
    seen = []

    def note(*_, **__):
        seen.append(jax.config.jax_transfer_guard_device_to_host)

    def noting(params, x):
        note()
        return loss_fn(params, x)

    with jax.transfer_guard("log"):
        fit(loss=noting, callbacks=note, logger=note, evaluate=lambda state: note() or {"val/x": 1.0})
    assert len(seen) > 8 and set(seen) == {"log"}


# ------------------------------------------------------------------------------------------------ where data begin


def fresh(data):
    pass


def broken_off(data):
    next(iter(data))


def read_once(data):
    list(data)


def set_to_a_place(data):
    data.set_state({"epoch": 2, "position": 1})


@pytest.mark.parametrize("make", [lambda data: data, ts.prefetch], ids=["batches", "prefetch"])
@pytest.mark.parametrize(
    ("before", "as_for", "trained", "new"),
    [
        (fresh, (0, 0), (0, 0), (0, 0)),
        (broken_off, (1, 0), (0, 1), (0, 0)),
        (read_once, (1, 0), (1, 0), (0, 0)),
        (set_to_a_place, (2, 1), (2, 1), (2, 1)),
    ],
)
def test_where_data_begin(make, before, as_for, trained, new):
    """(epoch, position) of a loop as `for`, and of a run of a trained and of a new state; the data stay until then."""
    for goes_on, is_new, expected in ((False, False, as_for), (True, False, trained), (True, True, new)):
        data = make(ts.batches(ROWS, 3))
        before(data)
        place = data.get_state()
        reading = Reading(data, goes_on, is_new)
        assert tuple(reading.source.state().values()) == expected
        reading.follow()
        assert data.get_state() == place
        reading.source.next()
        reading.follow(was_read=True)
        assert data.get_state() == reading.source.state()
        reading.return_data()
        assert data.get_state() == place
        data.close()


def test_a_list_begins_at_its_beginning():
    reading = Reading([ROWS], True, True)
    assert (reading.source.epoch, reading.source.position) == (0, 0)
