"""Who notices that a run stands still: what it waits for is told, once, and the run goes on."""

import signal
import threading
import time
import types
from datetime import timedelta
from pathlib import Path

import jax
import numpy as np
import pytest
import tsunax as ts
from campaigns import stalls
from tests import toys
from tsunax.run import watchdog as watching
from tsunax.run.callbacks import Part, every, watchdog
from tsunax.run.history import Clock

AFTER, SECONDS = stalls.AFTER, stalls.SECONDS


def fit(steps=6, loss_fn=toys.loss_fn, rows=toys.X, **options):
    step, state = ts.train_step(loss_fn), toys.state()
    return ts.fit(step, state, ts.batches(rows, 16), steps=steps, **{"progress": False, **options})


class Listener:
    """A `tell` that keeps the events."""

    def __init__(self):
        self.events, self.texts, self.rows, self.threads = [], [], [], set()

    def __call__(self, event, text, row):
        self.events.append(event)
        self.texts.append(text)
        self.rows.append(row)
        self.threads.add(threading.current_thread().name)

    @property
    def stalls(self):
        """The texts and rows of stalls of callbacks; on a busy machine, compilation is a stall, too."""
        return [(text, row) for text, row in zip(self.texts, self.rows, strict=True) if "s for a callback" in text]


def threads():
    return [thread.name for thread in threading.enumerate() if "watchdog" in thread.name]


@pytest.fixture(scope="module")
def compiled():
    stalls.run("", "")
    stalls.turns()
    fit()


@pytest.mark.parametrize(
    "kind",
    ["data", "device", *(pytest.param(kind, marks=pytest.mark.medium) for kind in ("trace", "evaluation", "save"))],
)
def test_a_stall_is_told_once_with_what_the_run_waits_for(compiled, kind):
    texts = stalls.stalls(kind, f"{AFTER} s")
    assert stalls.is_named(kind, texts), texts


def test_the_files_that_tell_a_compilation_are_in_jax():
    root = Path(jax.__file__).parents[1]
    assert all((root / name).exists() for name in watching.COMPILER_FILES)


def test_each_stall_is_told_and_how_long_it_took(compiled, capsys):
    def slow(run):
        time.sleep(SECONDS)

    listener = Listener()
    fit(callbacks=[every(3, slow), watchdog(AFTER, listener)])
    assert {*listener.events[1:-1]} == {"stall"}
    reasons = [text.partition(" s for ")[2] for text, _ in listener.stalls]
    assert reasons == ["a callback (slow), after step 3", "a callback (slow), after step 6"]
    assert [row["step"] for _, row in listener.stalls] == [3, 6]
    assert all(AFTER <= row["seconds"] <= SECONDS for _, row in listener.stalls)
    printed = capsys.readouterr().err
    assert all(f"tsunax: {text}. It was not stopped." in printed for text, _ in listener.stalls)
    assert "tsunax: the run goes on after 1." in printed
    assert "test_watchdog.py" in printed and "in slow" in printed


@pytest.mark.medium
def test_a_part_and_a_logger_are_named(compiled):
    class Reads(Part):
        def read(self, run, has_row):
            if run.step == 6:
                time.sleep(SECONDS)

    def slow_logger(row, step):
        time.sleep(SECONDS * (step == 1))

    listener = Listener()
    fit(callbacks=[Reads(), watchdog(AFTER, listener)], logger=slow_logger)
    reasons = [text.partition(" s for ")[2].partition(",")[0] for text, _ in listener.stalls]
    assert sorted(reasons) == ["a callback (Reads)", "a callback (slow_logger)"]


def test_tell_hears_the_events_in_order_on_a_thread(compiled):
    listener, rows = Listener(), toys.X.copy()
    rows[16:32] = np.nan

    def stop(run):
        run.stop("enough")

    with pytest.warns(RuntimeWarning, match="was rejected"):
        fit(rows=rows, callbacks=[every(3, stop), watchdog(tell=listener)])
    assert listener.events == ["start", "rejected", "stop", "end"]
    assert "was rejected" in listener.texts[1] and listener.texts[2] == "enough"
    assert listener.rows[-1]["step"] == 3 and listener.rows[-1]["rejected"] == 1
    assert listener.threads == {"tsunax-watchdog_deliver"} and not threads()


def test_tell_hears_which_signal_ends_the_run(compiled):
    listener = Listener()
    with pytest.raises(KeyboardInterrupt):
        press = every(3, lambda run: signal.raise_signal(signal.SIGINT))
        fit(callbacks=[press, watchdog(tell=listener)])
    assert listener.events == ["start", "stop", "end"] and listener.texts[1] == "interrupted by SIGINT"


def test_tell_hears_of_an_error(compiled):
    def fail(run):
        raise ValueError("no")

    listener = Listener()
    with pytest.raises(ValueError, match="no"):
        fit(callbacks=[every(3, fail), watchdog(tell=listener)])
    assert listener.events == ["start", "error", "end"] and listener.texts[1] == "ValueError no"
    assert not threads()


def test_an_exception_of_tell_is_a_warning_and_the_next_event_is_told(compiled):
    heard = []

    def tell(event, text, row):
        heard.append(event)
        raise OSError("no network")

    with pytest.warns(UserWarning, match="tell of '(start|end)' raised OSError no network"):
        state, _ = fit(callbacks=watchdog(tell=tell))
    assert heard == ["start", "end"] and int(state.step) == 6


def test_the_end_does_not_wait_for_ever_for_tell(compiled, monkeypatch):
    monkeypatch.setattr(watching, "DELIVERY_SECONDS", 0.1)
    is_over, start = threading.Event(), time.monotonic()
    fit(callbacks=watchdog(tell=lambda event, text, row: is_over.wait(20)))
    assert time.monotonic() - start < 10
    is_over.set()


def test_every_run_has_one_watchdog_but_a_dry_run(compiled):
    running = []
    look = every(6, lambda run: running.append(threads()))
    for extra in ([], [watchdog(60)], [watchdog(None)]):
        fit(callbacks=[look, *extra])
    fit(callbacks=look, dry_run=True)
    assert running == [["tsunax-watchdog_watch"], ["tsunax-watchdog_watch"], [], []]
    assert not threads()


def test_a_watchdog_without_a_time_tells_of_no_stall(compiled, capsys):
    listener = Listener()
    fit(callbacks=[every(3, lambda run: time.sleep(AFTER)), watchdog(None, listener)])
    assert listener.events == ["start", "end"] and not capsys.readouterr().err


@pytest.mark.parametrize(
    ("after", "seconds"),
    [("30 s", 30), ("1.5 minutes", 90), ("2 h", 7200), ("1 day", 86400), (0.5, 0.5), (timedelta(minutes=1), 60)],
)
def test_a_time_is_a_number_a_text_or_a_timedelta(after, seconds):
    assert watching.seconds_of(watchdog(after).after, "watchdog()", "after") == seconds


def test_a_stall_that_ends_while_it_is_reported_keeps_its_cause(capsys):
    told, reports, clock = [], [], Clock()
    everyone = types.SimpleNamespace(reports=lambda text: reports.append(text) or next_lap() or {})
    next_lap = lambda: len(reports) == watching.LOOKS and clock.lap("data") and None
    run = types.SimpleNamespace(step=8, tell=lambda *event, seconds: told.append(event[1]) or ended.set())
    clock.lap("checkpoint")
    watch = watching.Watch(watchdog(0.2), clock, everyone, "the run")
    ended = watch.has_ended
    threading.Timer(5, ended.set).start()
    watch._watch(run, threading.get_ident())
    assert len(told) == 1 and " s for a save, after step 8" in told[0] and "has waited 0.0" not in told[0]


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("device", "process 1, which reports nothing; process 3, which has waited 7.0 s for data"),
        ("data", "data"),  # its own reason
    ],
)
def test_the_process_that_is_late_is_named(capsys, cause, reason):
    reports = {"process 1": "", "process 2": "waits", "process 3": "has waited 7.0 s for data"}
    sent, told = [], []
    everyone = types.SimpleNamespace(reports=lambda text: sent.append(text) or reports)
    run = types.SimpleNamespace(step=8, tell=lambda *event, seconds: told.append(event))
    watch = watching.Watch(watchdog(60), Clock(), everyone, "process 0")
    lap = time.perf_counter() - 5, cause, None
    watch._report(run, lap, False, False, is_stall=False)
    assert not told
    watch._report(run, lap, False, False, is_stall=True)
    assert told == [("stall", f"process 0 has waited 5.0 s for {reason}, after step 8")]
    assert sent == ["waits" if cause == "device" else "has waited 5.0 s for data"] * 2
    assert "process 0 has waited" in capsys.readouterr().err
