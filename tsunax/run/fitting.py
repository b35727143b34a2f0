"""A run of `fit` under way: where it is, and what of it is still on the device.

    batches -> one compiled loop of k steps -> (the next call is under way) -> rows -> history,
    loggers, progress; at a boundary: evaluate -> callbacks -> loggers -> progress -> checkpoint

A boundary is a step at which the state is needed: for an evaluation, a callback, the end of an
epoch. Between them the host hands out batches, and reads the numbers of a call when the next one is
under way. How many steps go into a call may follow the clock: it never changes a bit
(`run/fused_loop.py`). The loop over calls and boundaries itself stands in `loop.py`.
"""

import collections
import contextlib
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tsunax._core import PyTree, Step, processes
from tsunax._core.interrupts import Interrupt
from tsunax.errors import NonFiniteError, RowError, StateError, warn
from tsunax.program import TrainStep
from tsunax.run import fused_loop, info_columns
from tsunax.run.calling import Caller
from tsunax.run.chunks import NO_LIMIT, Chunk, epochs_of
from tsunax.run.feed import Feed
from tsunax.run.history import Clock, History
from tsunax.run.options import Options
from tsunax.run.part import Part
from tsunax.run.rejections import Rejections
from tsunax.run.run import INTERRUPTED, OF_FIT, OF_ROWS, Run
from tsunax.step import StepInfo

WAITING_BYTES = 64 << 20  # of batches of calls that were not read yet
# of a call under "auto": nobody sees it, and its fixed cost of 0.3 ms is nothing
CALL_SECONDS = 0.05
STRETCH = 16  # reads over which rates are measured


@dataclass(frozen=True)
class Beginning:
    """What a run starts from."""

    history: History
    memory: dict[str, Any]  # of callbacks
    is_resumed: bool = False  # at the step of a checkpoint
    is_of_checkpoint: bool = False  # with the state of a checkpoint
    # whether that checkpoint, or what there is in its place, has the end of a run
    has_ended: bool = True
    has_open_row: bool = False  # whether it was saved before loggers had its row
    stopped: str = ""  # why the run stopped there


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
    ) -> None:
        self.step: Step = step
        self.options: Options = options
        self.feed = feed
        self.run: Run = run
        self.parts: tuple[Part, ...] = parts  # in the order of a boundary
        self.begin_order: tuple[Part, ...] = begin_order
        self.agreement: processes.Unanimous = agreement
        self.beginning: Beginning = beginning
        donates = not isinstance(step, TrainStep) or step.donate
        self.loop: fused_loop.Fused = fused_loop.fused(step, donates)
        self.caller: Caller = Caller(self.loop, feed, agreement, run, options.extra)
        self.signal: int = 0  # that ended the run: the same on all processes
        self.clock: Clock = options.clock
        self.rejections: Rejections = Rejections(step, run.state, run, options.max_bad)
        self.held_numbers: info_columns.HeldNumbers = info_columns.HeldNumbers(beginning.memory)
        self.next: tuple[int, float] = -1, 0.0  # the boundary after this step
        # per call over the last reads, without compiling and boundaries; 0: unknown
        self.seconds: float = 0.0
        self.gathered: float = 0.0  # calls that only gathered, as those of `rules.accumulate` do
        self.read_at: float = 0.0  # when calls were read last; 0 before the first call
        self.idle: float = 0.0  # seconds that do not count
        self.idle_steps: int = 0  # done in them
        self.steps_read: int = 0
        # (clock, steps done) at the last reads
        self.stretch: collections.deque[tuple[float, int]] = collections.deque(maxlen=STRETCH)
        self.traced: int = self.traces()  # when it was called last

    def compare(self) -> None:
        """Compare the processes of the run."""
        options = self.options
        settings = {
            "options": options.deciding(),
            "parts": [[type(part).__name__, str(part.every), part.epochs] for part in self._asking],
            "place": self.feed.source.state(),
        }
        functions = {"step": self.step, "evaluate": options.evaluate}
        trees = {"state": self.run.state, "extra": dict(options.extra)}
        self.agreement.start(functions | {"callbacks": [*options.callbacks]}, trees, **settings)

    @property
    def _asking(self) -> list[Part]:
        """The parts for which the run holds boundaries: the same on all processes."""
        return [part for part in self.parts if part.every < float("inf") or part.epochs]

    def begin(self) -> None:
        """Hold the first boundary of the run."""
        run, is_stopped = self.run, bool(self.run.stopped)
        self.boundary(["start"])
        if run.stopped and not is_stopped and self.beginning.is_resumed:
            fix = (
                "It remembers the run: to train on, give it more patience or time, or leave it out."
            )
            warn(
                f"fit(): a callback stopped the run again at step {run.step}: {run.stopped}. {fix}"
            )

    def has_nothing_to_do(self) -> bool:
        """Whether the run is beyond its goal, or is complete: its end was held, too."""
        run, goal, epoch = self.run, self.options.goal, self.feed.epoch
        is_at_end = bool(run.stopped) or goal.reached(run.step, epoch)
        return is_at_end and (self.beginning.has_ended or goal.reached(run.step - 1, epoch - 1))

    def is_finished(self, interrupt: Interrupt) -> bool:
        """Whether the goal is reached, a callback stopped the run, or any process got a signal."""
        run = self.run
        if self.options.goal.reached(run.step, self.feed.epoch) or run.stopped:
            return True
        self.signal = self.agreement.agree(interrupt.asked)
        return bool(self.signal)

    def steps_to_boundary(self) -> float:
        """How many steps may be called before somebody needs the state, if none is rejected."""
        step = self.run.step
        if step != self.next[0]:
            goal = self.options.goal.steps_left(0)
            places = [part.next_step(step) for part in self.parts] + [goal] * (goal > step)
            self.next = step, min(places, default=float("inf"))
        return self.next[1] - step - self.caller.ahead

    def next_chunks(self, interrupt: Interrupt) -> list[Chunk] | None:
        """The batches of the next calls; None if the run is over."""
        return None if self.is_finished(interrupt) else self.take(self.steps_to_boundary())

    def take(self, steps_left: float) -> list[Chunk]:
        """The batches of the next calls, for `left` steps at most; none at the end of an epoch.

        The steps of a call are the least of: the setting, or what the clock says (`per_call`);
        `left`; the room of a call (`chunks.buffer_size`); the rest of an epoch or block. The calls
        are those of `CALL_SECONDS`, of batches that lie there: a Ctrl-C waits for them.
        """
        ahead, limit = self.run.step + self.caller.ahead, self.rejections.limit or NO_LIMIT
        most_steps = int(min(self.per_call(), steps_left))
        self.clock.lap("data")
        chunk = self.feed.take(most_steps, self.run.state, ahead, limit, boundary_steps=steps_left)
        unread = self.caller.unread
        if unread and not info_columns.is_ready(unread[-1].infos):
            self.clock.cause = "device"  # it was at work meanwhile: nobody waited for data
        self.clock.lap("device")
        self.agreement.chunk(ahead + 1, chunk, self.feed.source)
        if chunk is None or self.agreement.spans or not self.seconds:
            return [] if chunk is None else [chunk]
        steps = min(CALL_SECONDS / self.seconds, steps_left) - chunk.steps
        return [chunk, *self.feed.read_ahead(most_steps, int(steps), limit)]

    def per_call(self) -> int:
        setting = self.options.steps_per_call
        if setting != "auto":
            return setting or 1
        if self.agreement.spans:  # no clock on the wall: all processes run the same programs
            return self.feed.size
        return int(max(1, min(CALL_SECONDS / self.seconds, self.feed.size))) if self.seconds else 1

    def dispatched(self) -> None:
        """Calls are under way: read those before them, if they have waited long enough."""
        start = self.clock.since
        if is_new := self.traced != self.traces():  # it compiled: no measure of anything
            self.traced, self.clock.cause = self.traces(), "compile"
        end = self.clock.lap("device")
        self.read_at = self.read_at or end
        chunk, infos = self.caller.unread[-1]
        if is_new:
            self.idle += end - start
            self.idle_steps += chunk.steps if info_columns.is_ready(infos) else 0
        is_late = self.agreement.spans or end - self.read_at > CALL_SECONDS or not self.seconds
        count = len(self.caller.unread)
        is_large = count * chunk.bytes > WAITING_BYTES
        if count > 1 and (is_late or is_large):
            self.read(1)

    def traces(self) -> int:
        """How often what is called was traced, so compiled; once if that cannot be known."""
        step = self.loop.step  # an equal one, if it was there before
        if isinstance(step, TrainStep):
            return len(step.traces)
        is_looped = self.options.steps_per_call is not None
        return self.loop.programs.traced if is_looped else bool(self.caller.unread)

    def boundary_here(self) -> None:
        """The boundary that the run was called up to, unless rejected steps left it behind."""
        self.read(0)
        if self.run.step == self.next[1]:
            self.boundary(["step"])

    def epoch_ended(self) -> None:
        """The boundary at the end of an epoch, if somebody waits for it."""
        if not any(part.epochs for part in self.parts):
            return
        self.read(0)
        self.boundary(["step"] * (self.run.step == self.next[1]) + ["epoch"])

    def end(self, interrupt: Interrupt) -> None:
        self.read(0)
        run = self.run
        self.signal = self.signal or self.agreement.signal(interrupt.asked)
        if self.signal:
            run.interrupted = True
            run.stop(INTERRUPTED)
        if slowest := self.agreement.slowest(self.clock.seconds):
            run.history.mark("slowest", run.step, slowest)
        self.boundary(["end"])

    def boundary(self, events: list[str]) -> None:
        """One boundary: each part that is due there, in order."""
        boundary_start, run = self.clock.lap("idle"), self.run
        self.feed.sync()
        run.epoch, run.is_changed = self.feed.epoch, False
        if "end" in events:
            run.rows.close()
        for part in self.parts:
            if part.due(run, events):
                part.at(run, events)
        if run.is_changed:
            self.rejections.calls = info_columns.most_calls(run.state)
        self.caller.place_extra(self.options.extra)
        self.idle += self.clock.lap("idle") - boundary_start

    @contextlib.contextmanager
    def parts_begun(self) -> Iterator[None]:
        """A block between the beginning and the end of the parts: they end in reverse order.

        The display and the loggers begin first, so that an error of any other part closes them.
        """

        def end(part: Part, kind: Any, error: BaseException | None, trace: Any) -> None:
            try:
                part.end(self.run, error)
            except Exception as failure:
                if error is None:
                    raise
                error.add_note(f"then the end of the run raised {failure!r}")

        with contextlib.ExitStack() as stack:
            for part in self.begin_order:
                stack.push(functools.partial(end, part))
                part.begin(self.run)
            try:
                yield
            except BaseException as error:
                # log the numbers of applied steps, as far as they can be had
                if not isinstance(error, NonFiniteError):
                    with contextlib.suppress(Exception):
                        self.read(0)
                raise

    def read(self, leave: int) -> None:
        """Make rows of all calls but the last `leave`. After `read(0)` nothing is under way."""
        form = lambda call: info_columns.form_of(call.infos)
        for _, part in itertools.groupby(self.caller.read(leave), form):
            chunks, infos = zip(*part, strict=True)
            infos = [info_columns.hosted(x) for x in infos]  # the one wait
            infos, named = info_columns.unpacked(infos, [chunk.steps for chunk in chunks])
            self.steps_read += sum(chunk.steps for chunk in chunks)
            self.measure()
            self.rows(chunks, infos, named)

    def measure(self) -> None:
        """The seconds per call over the last reads, from the steps that are done by now."""
        self.read_at = time.perf_counter()
        ready = (chunk.steps for chunk, infos in self.caller.unread if info_columns.is_ready(infos))
        steps_done = self.steps_read + sum(ready) - self.idle_steps
        clock = self.read_at - self.idle
        # not before the first read: it compiles
        if self.stretch and steps_done > self.stretch[0][1]:
            clock_before, steps_before = self.stretch[0]
            self.seconds = max(clock - clock_before, 1e-9) / (steps_done - steps_before)
        self.stretch.append((clock, steps_done))

    def rows(self, chunks: Sequence[Chunk], infos: PyTree, named: dict[str, Any]) -> None:
        """Give the numbers of these steps to history, loggers and progress: every `log_every`."""
        run, log_every, rejections = self.run, self.options.log_every, self.rejections
        epochs = epochs_of(chunks)
        by_member = info_columns.verdicts(infos, len(epochs))
        verdicts = np.min(by_member, 1)  # a call is rejected if all members reject it
        if not rejections.is_population:
            by_member = verdicts[:, None]
        # of one state its clock counts, else every call does
        is_of_states = isinstance(infos, info_columns.StatesInfo)
        has_clock = (is_of_states or isinstance(infos, StepInfo)) and not rejections.is_population
        steps = run.step + np.cumsum(verdicts == 0 if has_clock else np.ones(len(epochs), int))
        rejected = rejections.by_member + np.cumsum(by_member > 0, 0)
        self.gathered += float(np.mean(verdicts < 0)) * len(epochs)
        fatal = rejections.note(by_member, steps, chunks, infos, self.caller.extra)
        n = len(epochs) if fatal is None else fatal + 1  # the loop went no further
        rejections.keep(verdicts[:n], steps, chunks, infos)
        columns = dict(info_columns.columns(infos)) | named
        columns["epoch"] = epochs
        rejected_calls = rejected if rejections.is_population else rejected[:, 0]
        columns |= info_columns.by_element("rejected", rejected_calls)
        large = {name: np.shape(x)[1] for name, x in columns.items() if np.ndim(x) > 1}
        for name, size in large.items() if run.info is None else ():
            why = f"{size:,} elements, more than {info_columns.MOST_COLUMNS:,}"
            warn(f"fit(): {name!r} gets no column: it has {why}. Reduce it in the metric.")
        columns = {name: x for name, x in columns.items() if name not in large}
        rates = self.rates(columns, infos)
        held_numbers = self.held_numbers.columns_of(run.state)
        reserved = {*OF_ROWS, *OF_FIT, *named, *held_numbers}
        if reserved_names := [name for name in info_columns.own_names(infos) if name in reserved]:
            got, fix = "a name that fit reserves", "Rename the metric."
            raise RowError(f"metric {reserved_names[0]!r}", "loss_fn", got, "another name", fix)
        run.row_names.update(columns, held_numbers)
        state = run.state  # a callback may change it

        def rows_of(rows: np.ndarray) -> dict[str, np.ndarray]:
            rows_by_name = {name: x[rows] for name, x in columns.items()}
            if self.options.steps_per_call is None:
                stack = lambda f, steps: jax.tree.map(lambda *x: np.array(x), *map(f, steps[rows]))
                rows_by_name |= info_columns.scheduled(infos, state, stack)
            return rows_by_name | {
                name: np.full(len(rows), x) for name, x in (rates | held_numbers).items()
            }

        applied = np.flatnonzero(verdicts[:n] == 0)
        is_due = (steps[applied] % log_every == 0) | (steps[applied] == 1)
        if len(due := applied[is_due]):
            run.rows.emit(rows_of(due), steps[due])
        if len(applied):
            row_of = functools.partial(rows_of, applied[-1:])
            run.rows.last = None if is_due[-1] else (row_of, int(steps[applied[-1]]))
        run.step, run.info = int(steps[n - 1]), jax.tree.map(lambda x: x[n - 1], infos)
        if isinstance(run.info, info_columns.StatesInfo):
            clock, run.info = run.info.clock, run.info.info
            if has_clock and int(clock[0]) != run.step:
                got, expected = f"a run at step {clock[0]}", f"{run.step}: one run.advance() a call"
                raise StateError("state", "step", got, expected)
        rejections.by_member = rejected[n - 1]
        try:
            for part in self.parts:
                part.read(run, len(due) > 0)
        finally:  # an error of a part is the context of this one
            if fatal is not None:
                rejections.give_up(fatal, chunks, self.caller.extra)

    def rates(self, columns: dict[str, Any], infos: PyTree) -> dict[str, float]:
        """The steps and examples of a second. Takes the weights of steps out of the columns."""
        is_population = self.rejections.is_population
        is_weight = lambda name: name == "weight" or (is_population and name.startswith("weight/"))
        names = list(filter(is_weight, columns)) if isinstance(infos, StepInfo) else []
        examples = [np.mean(columns.pop(name)) for name in names]
        if not self.seconds:
            return {}
        applied_share = 1 - self.gathered / self.steps_read
        counts = {"steps": applied_share} | ({"examples": float(sum(examples))} if examples else {})
        return {f"{name}_per_second": n / self.seconds for name, n in counts.items()}
