"""A run of `fit` under way: its position, and the calls that are still on the device.

    batches -> one compiled loop of k steps -> (the next call is under way) -> rows -> history,
    loggers, progress; at a boundary: evaluate -> callbacks -> loggers -> progress -> checkpoint

At a boundary the state is needed: for an evaluation, a callback, a save, the end of an epoch, the
start or the end, or because of a signal or timer. Between boundaries the host sends batches, and
reads a call while the next one runs. How many steps a call has never changes a bit.
"""

import contextlib
import functools
import itertools
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tsunax._core import Function, PyTree, Step, processes
from tsunax._core.cadence import Timer
from tsunax._core.interrupts import Interrupt
from tsunax.errors import RowError, StateError, warn
from tsunax.program import TrainStep
from tsunax.run import info_columns
from tsunax.run.chunks import Chunk, epochs_of
from tsunax.run.feed import Call, Caller, Feed
from tsunax.run.history import OF_FIT, OF_ROWS, Pace
from tsunax.run.options import Options
from tsunax.run.part import Part
from tsunax.run.rejections import Rejections
from tsunax.run.run import INTERRUPTED, Beginning, Run, with_state
from tsunax.state import own
from tsunax.step import StepInfo

# Batches stay in memory until the infos of their call are read; beyond this many bytes we read at
# once. With a larger limit a run needs more memory, with a smaller one the device waits for reads.
WAITING_BYTES = 64 << 20
# The length of a call under "auto": too short to notice, and far beyond its fixed cost of 0.3 ms.
CALL_SECONDS = 0.05


class Fit:
    """A run of `fit` under way."""

    def __init__(
        self,
        step: Step,
        options: Options,
        feed: Feed,
        run: Run,
        parts: tuple[Part, ...],
        begin_order: tuple[Part, ...],
        agreement: processes.Unanimous,
        beginning: Beginning,
        interrupt: Interrupt,
    ) -> None:
        self.step: Step = step
        self.options: Options = options
        self.feed = feed
        self.run: Run = run
        self.parts: tuple[Part, ...] = parts  # in the order of a boundary
        self.begin_order: tuple[Part, ...] = begin_order
        self.agreement: processes.Unanimous = agreement
        self.beginning: Beginning = beginning
        self.caller: Caller = Caller(step, feed, agreement, run.state, options.extra, donates=True)
        self.unread: list[Call] = []  # calls with infos that were not read yet
        self.steps_ahead: int = 0  # steps of the unread calls
        self.interrupt: Interrupt = interrupt
        self.timers: list[Timer] = [timer for part in parts for timer in part.timers]
        # whether process 0 decides for this process which timers are late
        self.is_led: bool = agreement.spans and not processes.current().is_first
        self.signal: int = 0  # the signal that ended the run: the same on all processes
        # for the next boundary, agreed by all processes: ("save", signal), ("clock", timer's index)
        self.requests: set[tuple[str, int]] = set()
        self.rejections: Rejections = Rejections(step, run.state, run, options.max_bad)
        self.held_numbers: info_columns.HeldNumbers = info_columns.HeldNumbers(beginning.memory)
        self.next_boundary: tuple[int, float] = -1, 0.0  # a step, and the first boundary beyond it
        self.pace: Pace = Pace()
        self.trace_count: int = self.count_traces()  # at the last dispatch of calls
        self.witnessed_state: PyTree = None  # the state before a call that has witnesses

    def hold_first_boundary(self) -> None:
        """Hold the boundary before the first step."""
        run, is_stopped = self.run, bool(self.run.stopped)
        self.call_parts(["start"])
        if run.stopped and not is_stopped and self.beginning.is_resumed:
            fix = (
                "It remembers the run: to train on, give it more patience or time, or leave it out."
            )
            warn(
                f"fit(): a callback stopped the run again at step {run.step}: {run.stopped}. {fix}"
            )

    def has_nothing_to_do(self) -> bool:
        """Whether the run is beyond its goal, or at its end and has held the last boundary."""
        run, goal, epoch = self.run, self.options.goal, self.feed.epoch
        is_at_end = bool(run.stopped) or goal.reached(run.step, epoch)
        return is_at_end and (self.beginning.has_ended or goal.reached(run.step - 1, epoch - 1))

    def is_finished(self) -> bool:
        """Whether the goal, a callback, a rewind, or a signal of any process ends the calls."""
        # A compiled loop ends by itself at too many rejections. Single calls (steps_per_call=None)
        # are read to count rejections: first all but the last, so that the device has work.
        for leave in (1, 0) if self.options.steps_per_call is None else ():
            if self.rejections.in_a_row + len(self.unread) >= self.rejections.max_bad:
                self.read(leave)
        run = self.run
        is_complete = self.options.goal.reached(run.step, self.feed.epoch) or run.stopped
        if is_complete or self.signal or run.restart is not None:
            return True
        self.poll(self.agreement.agree)
        return bool(self.signal)

    def poll(self, agree: Function) -> None:
        """Agree with all processes on requests of signals and timers. Process 0 has the clock."""
        requests_here = self.interrupt.requests
        timers = () if self.is_led else self.timers
        late_timers = {("clock", i) for i, timer in enumerate(timers) if timer.is_late()}
        # A timer stays late up to its boundary: once agreed, it is not requested again.
        requests_here.update(late_timers - self.requests)
        if requests := agree(requests_here):
            requests_here.difference_update(requests)
            self.signal = min((number for kind, number in requests if kind == "end"), default=0)
            self.requests.update(x for x in requests if x[0] != "end")

    def steps_to_boundary(self) -> float:
        """The number of steps up to the next boundary, if no step is rejected."""
        step = self.run.step
        if step != self.next_boundary[0]:
            goal_step = self.options.goal.steps_left(0)  # inf if the goal counts epochs
            boundaries = [part.next_step(step) for part in self.parts]
            boundaries += [goal_step] if goal_step > step else []
            self.next_boundary = step, min(boundaries, default=float("inf"))
        return self.next_boundary[1] - self.newest_step

    @property
    def newest_step(self) -> int:
        """The step after all calls, if no step of the unread calls is rejected."""
        return self.run.step + self.steps_ahead

    def call(self) -> bool:
        """Make the next call; False at the end of an epoch, without a call.

        The number of its steps is the least of `per_call()`, `steps_to_boundary()`, the room of a
        call (`chunks.buffer_size`), and the rest of an epoch, unless calls cross epochs.
        """
        run, step = self.run, self.newest_step
        most_steps = int(min(self.per_call(), self.steps_to_boundary()))
        # nothing is under way before a call with witnesses, because a boundary comes before
        most_steps = 1 if run.witnesses else most_steps
        with self.reading_data():
            chunk = self.feed.take(most_steps, run.state, step)
        # a wait for another process is no wait for data
        self.agreement.chunk(step + 1, chunk, self.feed.source)
        if chunk is None:
            return False
        self.witnessed_state = jax.tree.map(own, run.state) if run.witnesses else None
        run.state, infos = self.caller.call(run.state, chunk, step, self.rejections.limit)
        self.unread.append(Call(chunk, infos))
        self.steps_ahead += chunk.steps
        return True

    @contextlib.contextmanager
    def reading_data(self) -> Iterator[None]:
        """A block that reads batches. Its seconds count if the device waits for them."""
        clock = self.options.clock
        clock.lap("data")
        yield
        if self.unread and not info_columns.is_ready(self.unread[-1].infos):
            clock.cause = "device"  # the device was at work, so it did not wait for data
        clock.lap("device")

    def per_call(self) -> int:
        setting = self.options.steps_per_call
        if setting != "auto":
            return setting or 1
        if self.agreement.spans:  # no clock decides, because all processes run the same programs
            return self.feed.size
        return int(max(1, min(CALL_SECONDS / self.pace.step_seconds, self.feed.size)))

    def read_earlier_calls(self) -> None:
        """Read all calls but the newest, if they have waited long enough."""
        clock = self.options.clock
        start = clock.since
        if is_new := self.trace_count != self.count_traces():  # compiling took a part of the time
            self.trace_count, clock.cause = self.count_traces(), "compile"
        end = clock.lap("device")
        self.pace.read_time = self.pace.read_time or end
        chunk, infos = self.unread[-1]
        if is_new:
            self.pace.exclude(end - start, chunk.steps if info_columns.is_ready(infos) else 0)
        must_read = self.agreement.spans or not self.pace.is_known
        must_read = must_read or end - self.pace.read_time > CALL_SECONDS
        if must_read or len(self.unread) * chunk.bytes > WAITING_BYTES:
            self.read(1)
        if self.run.witnesses:
            self.call_witnesses()
        self.poll(self.agreement.agree)  # The boundary after these calls serves the requests.

    def call_witnesses(self) -> None:
        """Call the witnesses of the last call, before its infos are read. See `Run.witnesses`."""
        run, chunk = self.run, self.unread[-1].chunk
        witnesses, run.witnesses = run.witnesses, []

        def repeat() -> tuple[PyTree, Any]:
            state = jax.tree.map(own, self.witnessed_state)
            return self.caller.call(state, chunk, run.step, self.rejections.limit)

        for witness in witnesses:
            run.state, infos = witness(run, (run.state, self.unread[-1].infos), repeat)
            self.unread[-1] = Call(chunk, infos)
        self.witnessed_state = None

    def count_traces(self) -> int:
        """How often the step or its loop was traced, so compiled; at most 1 if that is unknown."""
        loop = self.caller.loop
        if isinstance(loop.step, TrainStep):  # equal steps share a loop, with the first step
            return len(loop.step.traces)
        is_looped = self.options.steps_per_call is not None
        return loop.programs.traced if is_looped else bool(self.unread)

    def hold_boundary(self, *events: str) -> None:
        """Hold the boundary after these calls, unless rejected steps keep the run before it."""
        self.read(0)
        all_events = ["step"] * (self.run.step == self.next_boundary[1]) + [*events]
        if all_events or self.requests:
            self.call_parts(all_events)

    def take_epoch_end(self) -> bool:
        """Whether an epoch ends after these calls. Then the data begin the next epoch.

        At a planned boundary `feed` looks ahead, so that a save there has the end of the epoch. For
        a signal or a timer it does not, because these must not wait for a batch, and at the goal no
        further batch is read: if the run continues later, it finds the end of the epoch then.
        """
        step = self.newest_step
        if self.steps_to_boundary() > 0 or self.options.goal.reached(step, self.feed.epoch):
            return self.feed.take_epoch_end()
        with self.reading_data():
            has_ended = self.feed.take_epoch_end(looks_ahead=True)
        self.agreement.epoch_end(step, has_ended)
        return has_ended

    def hold_epoch_boundary(self) -> None:
        """Hold the boundary at the end of an epoch, if a part needs it."""
        if any(part.cadence.epochs for part in self.parts):
            self.hold_boundary("epoch")

    def hold_last_boundary(self) -> None:
        """Hold the boundary at the end of the run, and note a signal that ends it."""
        self.read(0)
        run = self.run
        if not self.signal:
            self.poll(self.agreement.agree_at_end)
        if self.signal:
            run.interrupted = signal.Signals(self.signal).name
            run.stop(INTERRUPTED)
        if slowest := self.agreement.slowest(self.options.clock.seconds):
            run.history.mark("slowest", run.step, slowest)
        self.call_parts(["end"])

    def call_parts(self, events: list[str]) -> None:
        """Call each part that is due at this boundary, in order. The boundary serves requests."""
        clock, run = self.options.clock, self.run
        boundary_start = clock.lap("idle")
        requests, self.requests = sorted(self.requests), set()
        events += dict.fromkeys(kind for kind, _ in requests)
        for name in [signal.Signals(number).name for kind, number in requests if kind == "save"]:
            run.history.mark("save", run.step, name)
            run.note(f"{name}: saves at step {run.step:,}")
        due_timers = [self.timers[i] for kind, i in requests if kind == "clock"]
        for timer in due_timers:
            timer.is_due = True
        self.feed.sync()
        run.epoch, run.changed_by, run.unchanged_state = self.feed.epoch, [], None
        if "end" in events:
            run.rows.close()
        for part in self.parts:
            if part.due(run, events):
                part.at(run, events)
        for timer in due_timers:
            timer.is_due = False
            timer.restart()
        if run.changed_by:
            self.rejections.calls = info_columns.most_calls(run.state)
        self.caller.place_extra(self.options.extra, run.state)
        self.pace.exclude(clock.lap("idle") - boundary_start)

    @contextlib.contextmanager
    def parts_begun(self) -> Iterator[None]:
        """A block between the beginning and the end of the parts, which end in reverse order.

        Watch, display and loggers begin first, so that an error of any other part closes them.
        """

        def end(part: Part, kind: Any, error: BaseException | None, trace: Any) -> None:
            try:
                part.end(self.run, error)
            except Exception as failure:
                if error is None:
                    raise
                error.add_note(f"then the end of the run raised {failure!r}")

        with contextlib.ExitStack() as stack:
            try:
                for part in self.parts:
                    part._prepare(self.run, self.feed)
                for part in self.begin_order:
                    stack.push(functools.partial(end, part))
                    part.begin(self.run)
                yield
            except BaseException as error:
                # log the numbers of applied steps, if they can be read
                if not self.rejections.has_ended_run:
                    with contextlib.suppress(Exception):
                        self.read(0)
                with_state(error, self.run)
                raise

    def read(self, leave: int) -> None:
        """Make rows of all calls but the last `leave`. After `read(0)` nothing is under way."""
        form = lambda call: info_columns.form_of(call.infos)
        count = len(self.unread) - leave
        late_calls, self.unread = self.unread[:count], self.unread[count:]
        self.steps_ahead = sum(call.chunk.steps for call in self.unread)
        for _, calls in itertools.groupby(late_calls, form):
            chunks, infos = zip(*calls, strict=True)
            infos = [info_columns.hosted(x) for x in infos]  # the host waits here only
            infos, named = info_columns.unpacked(infos, [chunk.steps for chunk in chunks])
            ready = (chunk.steps for chunk, infos in self.unread if info_columns.is_ready(infos))
            self.pace.measure(sum(chunk.steps for chunk in chunks), sum(ready))
            self.make_rows(chunks, infos, named)

    def make_rows(self, chunks: Sequence[Chunk], infos: PyTree, named: dict[str, Any]) -> None:
        """Make rows of these steps, one for every `log_every`, and call `read` of the parts."""
        run, log_every, rejections = self.run, self.options.log_every, self.rejections
        epochs = epochs_of(chunks)
        by_member = info_columns.verdicts(infos, len(epochs))
        verdicts = np.min(by_member, 1)  # a call is rejected if all members reject it
        if not rejections.is_population:
            by_member = verdicts[:, None]
        # One TrainState or States counts applied steps; a population, or another state, its calls.
        is_of_states = isinstance(infos, info_columns.StatesInfo)
        has_clock = (is_of_states or isinstance(infos, StepInfo)) and not rejections.is_population
        steps = run.step + np.cumsum(verdicts == 0 if has_clock else np.ones(len(epochs), int))
        rejected = rejections.by_member + np.cumsum(by_member > 0, 0)
        self.pace.gathered_calls += float(np.mean(verdicts < 0)) * len(epochs)
        fatal = rejections.note(by_member, steps, chunks, infos, self.caller.extra)
        n = len(epochs) if fatal is None else fatal + 1  # the loop ended there
        rejections.keep(verdicts[:n], steps, chunks, infos)
        columns, numbers = self.columns_of(infos, named, epochs, rejected)
        is_measured = info_columns.measured_calls(columns, len(epochs))
        state = run.state  # for `rows_of`, which may be called after a callback replaced run.state

        def rows_of(rows: np.ndarray) -> dict[str, np.ndarray]:
            rows_by_name = info_columns.at_rows(columns, rows)
            if self.options.steps_per_call is None:
                # a compiled loop computes scheduled numbers itself; here, for the steps with a row
                stacked = lambda *numbers: np.array(numbers)
                map_rows = lambda f, steps: jax.tree.map(stacked, *map(f, steps[rows]))
                rows_by_name |= info_columns.scheduled(infos, state, map_rows)
            return rows_by_name | {name: np.full(len(rows), x) for name, x in numbers.items()}

        applied = np.flatnonzero(verdicts[:n] == 0)
        is_logged = (steps % log_every == 0) | (steps == 1)
        is_due = (is_logged & (verdicts == 0)) | is_measured
        due = np.flatnonzero(is_due[:n])
        for rows in info_columns.in_rows(due, is_measured):
            run.rows.emit(rows_of(rows), steps[rows], is_applied=verdicts[rows[0]] == 0)
            run.media |= info_columns.histograms(infos, rows[0])
        if len(applied):
            last = applied[-1:]
            row_of = lambda: {name: float(x[0]) for name, x in rows_of(last).items()}
            run.rows.pending = None if is_due[applied[-1]] else (row_of, int(steps[applied[-1]]))
        run.step, run.info = int(steps[n - 1]), jax.tree.map(lambda x: x[n - 1], infos)
        run.has_made_step = not has_clock or bool(verdicts[n - 1] == 0)
        if isinstance(run.info, info_columns.StatesInfo):
            clock, run.info = run.info.clock, run.info.info
            if has_clock and int(clock[0]) != run.step:
                expected = f"{run.step}: one run.advance() a call"
                raise StateError("state", "step", f"a run at step {clock[0]}", expected)
        rejections.by_member = rejected[n - 1]
        try:
            for part in self.parts:
                part.read(run, len(due) > 0)
        finally:  # the error of a part is the context of the error raised here
            if fatal is not None:
                rejections.give_up(fatal, chunks, self.caller.extra)

    def columns_of(
        self, infos: PyTree, named: dict[str, Any], epochs: np.ndarray, rejected: np.ndarray
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """The columns of these steps, and the numbers that are the same in all their rows."""
        run, is_population = self.run, self.rejections.is_population
        columns = info_columns.columns(infos) | named
        columns["epoch"] = epochs
        columns |= info_columns.by_element(
            "rejected", rejected if is_population else rejected[:, 0]
        )
        large = {name: np.shape(x)[1] for name, x in columns.items() if np.ndim(x) > 1}
        for name, size in large.items() if run.info is None else ():
            reason = f"{size:,} elements, more than {info_columns.MOST_COLUMNS:,}"
            warn(f"fit(): {name!r} gets no column: it has {reason}. Reduce it in the metric.")
        columns = {name: x for name, x in columns.items() if name not in large}
        examples = info_columns.take_examples(columns, infos, is_population)
        rates = self.pace.rates(examples, len(epochs))
        held_numbers = self.held_numbers.columns_of(run.state)
        reserved = {*OF_ROWS, *OF_FIT, *named, *held_numbers}
        if reserved_names := [name for name in info_columns.user_names(infos) if name in reserved]:
            raise RowError(
                f"metric {reserved_names[0]!r}",
                "loss_fn",
                got="a name that fit reserves",
                expected="another name",
                fix="Rename the metric.",
            )
        run.row_names.update(columns, held_numbers)
        return columns, rates | held_numbers
