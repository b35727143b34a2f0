"""The run of `fit` that callbacks get: its rows for history and loggers, its rejected calls."""

import collections
import contextlib
import copy
import dataclasses
import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import numpy as np

from tsunax._core import Function, PyTree, Scalar, trees
from tsunax.errors import RowError, StateError
from tsunax.run.history import OF_FIT, OF_ROWS, History, check_names, check_row
from tsunax.run.options import Options
from tsunax.run.part import EachBoundary, blamed
from tsunax.state import TrainState, check_state

INTERRUPTED = "interrupted"  # the reason of a run that a signal ended
Result: TypeAlias = tuple[PyTree, Any]  # the state and the infos of a call
MOST_REJECTED = 3  # calls that are kept, each with its batch on the host


@dataclass(frozen=True)
class Rejected:
    """A call with a rejected step: with a state, it has all that a repetition needs."""

    step: int  # the step of the state
    calls: int  # `calls` of the state before the call, which decides its random keys
    epoch: int
    batch: PyTree  # on the host, without rows of padding
    loss_scale: Scalar  # the loss scale of the call; None without a loss scale

    def of(self, state: TrainState, *, exact: bool = True) -> tuple[TrainState, Any]:
        """`(state, batch)` of that call, for `ts.replay(step, *rejected.of(state))`.

        Give the state at the end of the run, `error.state`: a rejected step changes only its counts
        and its loss scale. If later steps were applied, raises StateError; with `exact=False` the
        result has the later params.
        """
        check_state(state, "Rejected.of()")
        if exact and int(state.step) != self.step:
            raise StateError(
                "state",
                "Rejected.of()",
                got=f"step {int(state.step)}",
                expected=f"that of step {self.step}, where it was",
                fix="Take of(state, exact=False), or end the run at the first one: max_bad=1.",
            )
        fields: dict[str, Any] = {"calls": self.calls}
        if self.loss_scale is not None and state.loss_scale is not None:
            scale = np.float32(self.loss_scale)
            fields["loss_scale"] = dataclasses.replace(state.loss_scale, scale=scale)
        return state.replace(**fields), self.batch


@dataclass(frozen=True)
class Beginning:
    """The position and the values that a run starts from."""

    memory: dict[str, Any]  # the memory of each callback
    is_resumed: bool = False  # whether the run starts at the step of its checkpoint
    is_of_checkpoint: bool = False  # whether its state is the checkpoint's, and not the user's
    # whether the checkpoint was saved at the end of a run; True for a state that the user gave
    has_ended: bool = True
    has_open_row: bool = False  # whether loggers did not have the row of the step at that save
    stopped: str = ""  # why the run stopped there


class Run:
    """The run that callbacks get; they may change `memory`, and call `log` and `stop`."""

    def __init__(
        self,
        state: PyTree,
        step: int,
        feed: Any,
        history: History,
        *,
        options: Options,
        settings: Function,
        note: Callable[[str], None],
        stopped: str = "",
        saver: Any = None,
    ) -> None:
        self.event = "start"
        self.step: int = step
        self.epoch: int = feed.epoch  # the number of ended epochs, as of the last boundary
        self.state: PyTree = state
        self.info: Any = None  # the info of the last step, on the host; None before the first step
        # whether the last call made `step`, so was not rejected; None before the first call
        self.has_made_step: bool | None = None
        # the newest number of each column, which may be of an earlier step
        self.metrics: dict[str, float] = {name: history.last(name) for name in history.names}
        self.history = history
        self.memory: dict[str, Any] = {}  # the callback's memory, saved with the run
        self.stopped: str = stopped
        self.feed: Any = feed
        self.saver: Any = saver  # the `Checkpoints` of the run; None without
        self.rewinding: Any = None  # the `Rewind` that a callback has requested
        # the checkpoint of a rewind, from which the run begins again after this boundary
        self.restart: Any = None
        self.interrupted: str = ""  # the name of the signal that ends the run, such as SIGTERM
        self.changed_by: list[str] = []  # the callbacks of this boundary that returned a state
        self.unchanged_state: PyTree = None  # the state before they changed it
        self.evaluated: int = -1  # the step of the newest evaluation
        self.evaluated_names: frozenset[str] = frozenset()  # the same on all processes
        self.row_names: set[str] = set(OF_ROWS + OF_FIT)  # names of training rows
        self.row: dict[str, float] = {}
        self.media: dict[str, Any] = {}  # images, histograms and texts of this row
        # With witnesses the next call is a single step. Each is called after it as
        # `witness(run, result, repeat)` with the result `(state, infos)` of the call, and returns
        # the result with which the run continues. `repeat()` makes the call once more.
        self.witnesses: list[Callable[[Run, Result, Callable[[], Result]], Result]] = []
        self.note: Callable[[str], None] = note  # a line above the progress
        # (event, text, row) for `callbacks.watchdog(tell=)`, also without a listener
        self.events: queue.SimpleQueue[tuple[str, str, dict[str, Any]] | None] = queue.SimpleQueue()
        # the last rejected calls
        self.rejected: collections.deque[Rejected] = collections.deque(maxlen=MOST_REJECTED)
        self.rows: Rows = Rows(self, options, settings)

    def log(self, **values: Any) -> None:
        """Add numbers to the row of this step; a newer number replaces an older one of its name.

        A `loggers.Image`, `Histogram` or `Text` goes to the loggers that take it, with the row.
        """
        from tsunax.run.media import MEDIA

        self.check_own(values, "run.log()")
        media = {name: x for name, x in values.items() if isinstance(x, MEDIA)}
        check_names(media, "run.log()")
        self.media |= media
        row = check_row({name: values[name] for name in values if name not in media}, "run.log()")
        self.row |= row
        self.metrics |= row

    def tell(self, event: str, text: str, **numbers: float) -> None:
        """Tell an event to the watchdog of the run, with the newest numbers and further ones."""
        self.events.put((event, text, {"step": self.step, **self.metrics, **numbers}))

    def check_own(self, numbers: Mapping[str, Any], where: str) -> None:
        """Raise RowError for a name that the rows of training have: a column has one meaning."""
        if taken_names := [name for name in numbers if name in self.row_names]:
            raise RowError(
                repr(taken_names[0]),
                where,
                got="a name of the training rows",
                expected="a name of its own",
                fix="Name it: 'val/loss', or ts.evaluate(eval_step, state, {'val': data}).",
            )

    def replace_state(self, state: PyTree, source: str) -> None:
        """Go on with another state. The source is the callback or the command that made it."""
        if not self.changed_by:
            self.unchanged_state = self.state
        self.changed_by.append(source)
        self.state = state

    def stop(self, reason: str) -> None:
        """End the run after this boundary."""
        self.stopped = self.stopped or str(reason)

    def rewind(self, back: int = 100, factor: float = 0.5, data: str = "skip") -> None:
        """Go back to an earlier checkpoint after this boundary, and train from there.

        It takes the newest checkpoint at least `back` steps earlier; if there is none, the oldest,
        with a warning. Params, optimizer, averages, history and the memory of callbacks come
        from the checkpoint. `state.calls` is not reset, so the keys differ from the first time.
        `factor` multiplies the learning rate. A rate with a schedule leaves the schedule, except
        with `factor=1`. "skip" skips the batches that were read since then, "repeat" reads them
        again.

        The rewind is on the disk before the next call. Later checkpoints move to the folder
        `left/CALLS` of the run's directory. Then the run begins again, as after a kill: callbacks
        get "start". A run that is stopped at the same boundary does not go back. At the end of the
        run it is too late: a warning.

        Raises CheckpointError without an earlier checkpoint on a disk, StateError for a population,
        because its steps are calls, HyperparameterError for a rule without a live learning rate.
        """
        from tsunax.run.rewinding import Rewind

        request = Rewind(back, factor, data)
        if not self.rows.options.dry_run:  # which has no checkpoints
            request.check(self)
            self.rewinding = self.rewinding or request


@dataclass(eq=False)
class Rows(EachBoundary):
    """The rows of a run. An evaluation and callbacks may still add numbers to the newest row."""

    # When loggers get the row of a step:
    #   at a boundary of the step     after the evaluation and the callbacks
    #   without a boundary            when the next row begins
    #   at a start, save or timer, and at the last step of the run: the row is held back, because a
    #                                 next boundary of the same step may add numbers
    #   after a resume at the step    not again, unless `reopen` sets `logs_row_again`
    #   at the end of the run         with the numbers of the end, which a run that continues drops
    run: Any
    options: Options
    settings: Function  # `(path, logs_row_again)` -> the settings that a logger gets at the start
    step: int = -1  # the step of the newest row
    flushed_step: int = -1  # the step of the last row that the loggers got
    step_logged_before_resume: int = -1  # loggers do not get the row of this step again
    # if the newest applied step has no row: a function that makes its row, and the step
    pending: tuple[Callable[[], dict[str, float]], int] | None = None
    adds_to_end: bool = False  # whether further numbers belong to the end of the run only
    is_held_back: bool = False  # whether loggers do not get this row yet
    is_at_last_step: bool = False  # whether the run ends at this boundary, or at the next
    logs_row_again: bool = False  # whether loggers get the row of a resumed step again
    opened: list[Any] = field(default_factory=list)  # loggers that have begun

    def begin(self, run: Any) -> None:
        for logger in self.options.loggers:
            self.opened.append(logger)
            if hasattr(logger, "start"):
                path = getattr(logger, "path", "")
                logger.start(self.settings(path, self.logs_row_again))

    def at(self, run: Any, events: list[str]) -> None:
        is_end = "end" in events
        if is_end and run.stopped:
            reason = INTERRUPTED if run.interrupted else run.stopped
            run.history.mark("stop", run.step, reason)
        self.is_at_last_step = bool(run.stopped) or self.options.goal.reached(run.step, run.epoch)
        if "epoch" in events:
            # A run was resumed at the last step of an epoch, and the epoch ended without a further
            # step. The row of this step has another epoch now, so loggers get it again.
            self.step_logged_before_resume = -1
        # A start, a save or a timer may come at the last step of an epoch: then the boundary of the
        # epoch adds numbers to this row, also in a run that is resumed from the save.
        may_get_numbers = self.is_at_last_step or set(events) <= {"start", "save", "clock"}
        self.is_held_back = not is_end and may_get_numbers
        if not self.is_held_back or self.step != run.step:
            self.flush()

    def end(self, run: Any, error: BaseException | None) -> None:
        """Close the loggers; after an error give them the last row first, if it can be made."""
        with contextlib.ExitStack() as stack:
            for logger in self.opened:
                if hasattr(logger, "close"):
                    stack.callback(logger.close)
            if error is not None:
                with contextlib.suppress(Exception):
                    self.flush()

    def emit(self, columns: dict[str, np.ndarray], steps: np.ndarray, *, is_applied: bool) -> None:
        """Add rows to the history and the loggers, which get the last row when it is complete.

        If the step was not applied, the numbers that its `Watch` measured (masked arrays) are added
        to the row of the last applied step.
        """
        if not is_applied:
            watched = {k: x for k, x in columns.items() if isinstance(x, np.ma.MaskedArray)}
            return self.add({name: float(x[0]) for name, x in watched.items()}, int(steps[0]))
        columns = {name: np.ma.getdata(x) for name, x in columns.items()}
        self.flush()
        self.run.history.extend(columns, steps)
        for i in range(len(steps)) if self.options.loggers else [len(steps) - 1]:
            self.begin_row(int(steps[i]))
            self.run.row = {name: float(x[i]) for name, x in columns.items()}
        self.run.metrics |= self.run.row

    def begin_row(self, step: int) -> None:
        """Begin the row of this step, to which numbers belong from now on."""
        if step != self.step:
            self.flush()
            self.step, self.run.row, self.run.media = step, {}, {}

    def add(self, row: Mapping[str, float], step: int) -> None:
        """Add a row of numbers, or more numbers to the row of this step."""
        self.begin_row(step)
        self.run.row |= row
        self.run.metrics |= row
        self.record(row, step)

    def record(self, row: Mapping[str, float], step: int) -> None:
        """Add numbers to the history. A run that continues drops the numbers of its end."""
        history = self.run.history
        add = history.close if self.adds_to_end else history.add
        add(row, step)

    def reopen(self, step: int, may_lack_row: bool) -> None:
        """Remove the numbers of the end of the run from the history, because the run continues.

        Sets `logs_row_again`: whether loggers get the row of `step` again, because the removal may
        have changed the row, or because they `may_lack_row`: the run was saved while the row was
        held back, or is at its end.
        """
        run, history = self.run, self.run.history
        closing_step, numbers = history.reopen()
        run.metrics = {name: history.last(name) for name in history.names}
        row = history._numbers_at(step)
        has_changed = closing_step == step
        if not has_changed and not may_lack_row:  # loggers have this row already
            self.step_logged_before_resume = step if row else -1
            return
        if numbers:  # the row of the end, for a run that ends before its next step
            self.pending = (lambda: numbers), step
        self.step, run.row, self.logs_row_again = step, row, True

    def close(self) -> None:
        """Add the row of the last step, also if `log_every` does not divide it.

        If loggers already have a row of this step, the numbers go to the history alone.
        """
        self.adds_to_end = True
        if self.pending is None:
            return
        (row_of, step), self.pending = self.pending, None
        row = row_of()
        if step == self.flushed_step:
            self.record(row, step)
            self.run.metrics |= row
        else:
            self.add(row, step)

    def numbers_at(self, step: int) -> dict[str, float]:
        """The newest finite numbers that belong to this step."""
        numbers = self.run.history._numbers_at(step)
        if self.pending is not None and self.pending[1] == step:  # not in the history
            numbers |= self.pending[0]()
        return {name: x for name, x in numbers.items() if np.isfinite(x)}

    def saved_history(self) -> dict[str, Any]:
        """The history for a checkpoint. At the last step it already has the row that `close` adds.

        The end of the run adds that row, and saves again. If the run is killed between the two
        saves, the row is in the first.
        """
        history = self.run.history
        if self.is_at_last_step and self.pending is not None:
            row_of, step = self.pending
            history = copy.deepcopy(history)
            history.close(row_of(), step)
        return history.plain()

    def flush(self) -> None:
        """Give the newest row to the loggers."""
        # Floats always: a resumed run logs numbers again from its history, which keeps no ints.
        row, self.run.row = {name: float(x) for name, x in self.run.row.items()}, {}
        media, self.run.media = self.run.media, {}
        self.flushed_step = self.step if row or media else self.flushed_step
        clock, step = self.options.clock, self.step
        for logger in self.options.loggers if step != self.step_logged_before_resume else ():
            full_row = row | (media if getattr(logger, "media", False) is True else {})
            if full_row:
                with clock("callbacks", logger), blamed("logger", logger, self.run, step):
                    logger(full_row, step=step)

    def sync(self) -> None:
        """Put the rows on the disk, because a run that resumes here does not log them again."""
        for logger in self.options.loggers:
            if (sync := getattr(logger, "sync", None)) is not None:
                with blamed("logger", logger, self.run):
                    sync()


def with_state(error: Any, run: Run) -> Any:
    """An exception with the state and the history of the run that it ends."""
    is_donated = any(map(trees.is_gone, jax.tree.leaves(run.state)))
    has_history = hasattr(error, "history")
    if getattr(error, "state", None) is None:
        error.state = None if is_donated else run.state
    error.history, error.rejected = run.history, tuple(run.rejected)
    if error.state is None and not has_history:
        place = f"step {run.step}"
        error.add_note(f"the failed call had consumed the state of {place}: error.state is None")
    return error
