"""A thread that notices the stalls of a run: it reads the clock of the run.

Each moment of the main thread belongs to a cause, and a run that moves begins a new lap of its
clock many times a second (`history.Clock`). The watchdog reads the start and the cause of the lap,
so the main thread does no work for it. While C code holds the interpreter's lock, no thread runs,
and so this thread sees nothing.
"""

import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from tsunax._core import checks, processes
from tsunax._core.cadence import seconds_in
from tsunax.errors import HyperparameterError, told, warn
from tsunax.run.history import Clock
from tsunax.run.part import Part

# Looks at a lap until it counts as a stall, spread over `after`. Looks are counted, not seconds,
# because a process that was paused, or a laptop that slept, has not stalled. More looks find a
# stall more exactly, and wake the thread more often.
LOOKS = 8
# The most seconds that the end of a run waits until `tell` has heard of it.
DELIVERY_SECONDS = 5.0
REASONS = {  # the words for the causes of a clock
    "compile": "compilation",
    "data": "data",
    "device": "the device",
    "evaluation": "evaluation",
    "checkpoint": "a save",
    "callbacks": "a callback",
    "idle": "the work between calls",
}
# Files of JAX that have a frame on the stack while a program is traced, lowered and compiled. If
# JAX renames them, a stall in the compiler counts as a stall of the device.
COMPILER_FILES = tuple(
    os.path.join("jax", "_src", *names)
    for names in (
        ("compiler.py",),
        ("interpreters", "mlir.py"),
        ("interpreters", "partial_eval.py"),
    )
)
# Files that have a frame on the stack while a process waits for the word of other processes, or
# for the result of a program, which other processes may run, too.
WAITING_FILES = (os.path.join("distributed", "_peers.py"), os.path.join("jax", "_src", "array.py"))
WAITING_REPORT = "waits"  # the report of a process that waits for a device or for other processes


def seconds_of(value: Any, where: str, name: str) -> float:
    """The seconds of a duration: a number, a `timedelta`, or a text as "5 minutes"."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    number = value if is_number else 0.0  # 0 is refused below
    seconds = seconds_in(value) if isinstance(value, str | timedelta) else number
    if not 0 < seconds < 1e6:
        raise HyperparameterError(
            name,
            where,
            got=repr(value),
            expected="seconds > 0, a timedelta, or a text as '5 minutes' or '2 h'",
        )
    return float(seconds)


@dataclass(frozen=True)
class watchdog:
    """Notices stalls of a run, and names the cause. Every `fit` has a watchdog.

    If nothing happens for the time `after` (seconds, a `timedelta`, or a text: "30 s", "5 minutes",
    "2 h"), stderr gets a line with the cause (data, the device, compilation, evaluation, a save, a
    callback, or another process), and the stacks of all threads. The run is not stopped. When it
    continues, a line has the time that it took. Each stall is reported once. `after=None` watches
    nothing. One evaluation, save or callback that takes longer than `after` counts as a stall.

    `tell(event, text, row)` is called on a separate thread, in the order of the events, on the
    first process only. `row` has the newest numbers by name, the "step", and of a stall its
    "seconds". Exceptions of `tell` become warnings. The end of a run waits for it, 5 seconds at
    most.

        start      before the first step
        stall      nothing has happened for the time `after`
        rejected   a warning of rejected steps: of the first, the tenth, the hundredth, ...
        stop       a callback or a signal has stopped the run
        rewind     the run goes back to an earlier checkpoint; then it starts again
        error      an exception has ended it
        end        the run is over, also after a stop and an error

    If you pass several watchdogs, the last one counts. Raises HyperparameterError unless `after` is
    a duration.

    >>> watchdog(after="30 s").after
    '30 s'
    """

    after: float | str | timedelta | None = "5 minutes"
    tell: Callable[[str, str, dict[str, Any]], Any] | None = None

    def __post_init__(self) -> None:
        if self.after is not None:
            seconds_of(self.after, "watchdog()", "after")
        if self.tell is not None:
            checks.check_takes("tell", "watchdog()", self.tell, "f(event, text, row)", "", "", {})


@dataclass(eq=False)
class Watch(Part):
    """The threads of a watchdog: one looks at the clock of a run, the other calls `tell`."""

    setting: watchdog
    clock: Clock
    everyone: processes.Alone  # the processes that train this state together
    name: str  # the name of this process in messages
    has_ended: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def begin(self, run: Any) -> None:
        has_listener = self.setting.tell is not None and processes.current().is_first
        loops = [self._deliver] * has_listener + [self._watch] * (self.setting.after is not None)
        for loop in loops:
            thread = threading.Thread(target=loop, args=(run, threading.get_ident()), daemon=True)
            thread.name = f"tsunax-watchdog{loop.__name__}"
            thread.start()
            self.threads.append(thread)
        run.tell("start", f"the run begins at step {run.step:,}")

    def end(self, run: Any, error: BaseException | None) -> None:
        if error is not None:
            run.tell("error", told(error))
        elif run.stopped:
            by_signal = f"interrupted by {run.interrupted}"
            run.tell("stop", by_signal if run.interrupted else run.stopped)
        if error is None and run.restart is not None:
            run.tell("rewind", f"the run goes back from step {run.step:,}")
        else:
            run.tell("end", f"the run has ended at step {run.step:,}")
        run.events.put(None)
        self.has_ended.set()
        for thread in self.threads:
            thread.join(DELIVERY_SECONDS)

    def _deliver(self, run: Any, main_thread: int) -> None:
        tell: Any = self.setting.tell
        for event, text, row in iter(run.events.get, None):
            try:
                tell(event, text, row)
            except BaseException as error:  # the thread has to tell of further events
                with contextlib.suppress(Warning):  # it is an error under `python -W error`
                    warn(f"watchdog(): tell of {event!r} raised {told(error)}")

    def _watch(self, run: Any, main_thread: int) -> None:
        """Look at the clock until the run ends: has the main thread begun a new lap?"""
        interval = seconds_of(self.setting.after, "watchdog()", "after") / LOOKS
        # Start and cause of a lap are read together. Otherwise, if a stall ended meanwhile, the
        # report would have the cause of the next lap.
        lap_now = lambda: (self.clock.since, self.clock.cause, self.clock.subject)
        lap, looks, is_compiling = lap_now(), 0, False
        # During a stall the thread looks every second, because the line after it has its length.
        while not self.has_ended.wait(min(interval, 1.0) if looks >= LOOKS else interval):
            previous_lap, lap = lap, lap_now()
            if lap[0] == previous_lap[0]:
                looks += 1
                # Between the stages of a compilation no file of the compiler is on the stack for a
                # moment, so this look and the previous one count.
                was_compiling = is_compiling
                is_compiling = _has_frame_of(COMPILER_FILES, main_thread)
                flags = was_compiling or is_compiling, _has_frame_of(WAITING_FILES, main_thread)
                self._report(run, lap, *flags, is_stall=looks == LOOKS)
            else:
                if looks >= LOOKS:
                    _print(f"{self.name} goes on after {_seconds(lap[0] - previous_lap[0])}")
                self.everyone.reports("")
                looks = 0

    def _report(
        self,
        run: Any,
        lap: tuple[float, str, Any],
        is_compiling: bool,
        is_waiting: bool,
        is_stall: bool,
    ) -> None:
        """Report a lap to the other processes, and to users if it is a stall.

        The reports of all come before a stall, so a process that waits names the late process.
        """
        start, cause, subject = lap
        f = getattr(subject, "fn", subject)  # the function of `every`
        name = getattr(f, "__qualname__", type(f).__name__).rpartition("<locals>.")[2]
        cause = "compile" if cause == "device" and is_compiling else cause
        reason = REASONS[cause] if subject is None else f"{REASONS[cause]} ({name})"
        seconds = time.perf_counter() - start
        is_waiting = is_waiting or cause in ("device", "idle")
        own_report = WAITING_REPORT if is_waiting else _waiting(seconds, reason)
        reports = self.everyone.reports(own_report)
        if not is_stall:
            return
        late_processes = [
            f"{k}, which {x or 'reports nothing'}"
            for k, x in reports.items()
            if x != WAITING_REPORT
        ]
        if is_waiting and late_processes:
            reason = "; ".join(late_processes[:3])
        # Calls after this step may be under way: their numbers were not read yet.
        text = f"{self.name} {_waiting(seconds, reason)}, after step {run.step:,}"
        run.tell("stall", text, seconds=seconds)
        _print(f"{text}. It was not stopped. The stacks of its threads:")
        with contextlib.suppress(OSError, ValueError), tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            print(file.read(), file=sys.stderr, flush=True)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds:.3f} s"


def _waiting(seconds: float, reason: str) -> str:
    return f"has waited {_seconds(seconds)} for {reason}"


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the stream is closed
        print(f"tsunax: {text}", file=sys.stderr, flush=True)


def _has_frame_of(files: tuple[str, ...], thread: int) -> bool:
    """Whether a function of these files runs in a thread, or waits for one that it called."""
    frames = traceback.walk_stack(sys._current_frames().get(thread))
    return any(frame.f_code.co_filename.endswith(files) for frame, _ in frames)
