"""The rows of a run: from the infos of steps, evaluations and callbacks to history and loggers."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tsunax._core import Function
from tsunax.run.history import Clock
from tsunax.run.options import Goal
from tsunax.run.part import Part, blamed


@dataclass(eq=False)
class Rows(Part):
    """The rows of a run. An evaluation and callbacks may still add numbers to the newest row."""

    run: Any
    goal: Goal
    loggers: Sequence[Any]
    clock: Clock
    settings: Function  # `(path, has_closing_row)` -> the settings that a logger gets at the start
    step: int = -1  # the step of the newest row
    flushed_step: int = -1  # the step of the last row that the loggers got
    resumed_row: int = -1  # the step of a row that loggers got before the run was resumed there
    # a function that makes the row of the newest step, and this step, if it has no row
    pending: tuple[Callable[[], Mapping[str, Any]], int] | None = None
    is_closed: bool = False  # whether further numbers belong to the end of the run only
    # Whether the loggers get this row at the end of the run, the next boundary at the same step.
    is_open: bool = False
    has_closing_row: bool = False  # see `reopen`
    opened: list[Any] = field(default_factory=list)  # loggers that have begun

    def due(self, run: Any, events: Any) -> bool:
        return True

    def begin(self, run: Any) -> None:
        for logger in self.loggers:
            self.opened.append(logger)
            if hasattr(logger, "start"):
                path = getattr(logger, "path", "")
                logger.start(self.settings(path, self.has_closing_row))

    def at(self, run: Any, events: list[str]) -> None:
        is_end = "end" in events
        if is_end and run.stopped:
            run.history.mark("stop", run.step, run.stopped)
        is_last_row = bool(run.stopped) or self.goal.reached(run.step, run.epoch)
        self.is_open = is_last_row and not is_end
        if not self.is_open:
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

    def emit(self, columns: dict[str, np.ndarray], steps: np.ndarray) -> None:
        """Add rows to the history and the loggers, which get the last row when it is complete."""
        self.flush()
        self.run.history.extend(columns, steps)
        for i in range(len(steps)) if self.loggers else [len(steps) - 1]:
            self.begin_row(int(steps[i]))
            self.run.row = {name: float(x[i]) for name, x in columns.items()}
        self.run.metrics |= self.run.row

    def begin_row(self, step: int) -> None:
        """Begin the row of this step, to which numbers belong from now on."""
        if step != self.step:
            self.flush()
            self.step, self.run.row = step, {}

    def add(self, row: Mapping[str, float], step: int) -> None:
        """Add a row of numbers, or more numbers to the row of this step."""
        self.begin_row(step)
        self.run.row |= row
        self.run.metrics |= row
        self.record(row, step)

    def record(self, row: Mapping[str, float], step: int) -> None:
        """Add numbers to the history. A run that continues drops the numbers of its end."""
        history = self.run.history
        (history.close if self.is_closed else history.add)(row, step)

    def reopen(self, step: int, has_last_row: bool) -> None:
        """Remove the numbers of the end of the run from the history, because the run continues.

        Sets `has_closing_row`: whether loggers get the row of this `step` once more. They do if
        its numbers have changed, or if it is the last row and was saved before they got it.
        """
        run, history = self.run, self.run.history
        closing_step, numbers = history.reopen()
        run.metrics = {name: history.last(name) for name in history.names}
        newest = {name: history.newest(name) or (-1, 0.0) for name in history.names}
        row = {name: x for name, (i, x) in newest.items() if i == step}
        if closing_step != step and not has_last_row:
            self.resumed_row = step if row else -1
            return
        if numbers:  # the row of the end, for a run that ends before its next step
            self.pending = (lambda: {name: np.array([x]) for name, x in numbers.items()}), step
        self.step, run.row, self.has_closing_row = step, row, True

    def close(self) -> None:
        """Add the row of the last step, also between `log_every`. Loggers get each step once."""
        self.is_closed = True
        if self.pending is None:
            return
        (row_of, step), self.pending = self.pending, None
        row = {name: float(x[0]) for name, x in row_of().items()}
        if step == self.flushed_step:
            self.record(row, step)
            self.run.metrics |= row
        else:
            self.add(row, step)

    def numbers_at(self, step: int) -> dict[str, float]:
        """The newest finite numbers that belong to this step."""
        history = self.run.history
        newest = {name: history.newest(name) or (-1, 0.0) for name in history.names}
        numbers = {name: x for name, (i, x) in newest.items() if i == step}
        if self.pending is not None and self.pending[1] == step:  # not in the history
            numbers |= {name: float(x[0]) for name, x in self.pending[0]().items()}
        return {name: x for name, x in numbers.items() if np.isfinite(x)}

    def flush(self) -> None:
        """Give the newest row to the loggers."""
        row, self.run.row = self.run.row, {}
        self.flushed_step = self.step if row else self.flushed_step
        for logger in self.loggers if row and self.step != self.resumed_row else ():
            with self.clock("callbacks"), blamed("logger", logger, self.run):
                logger(dict(row), step=self.step)

    def sync(self) -> None:
        """Put the rows on the disk, because a run that resumes here does not log them again."""
        for logger in self.loggers:
            if (sync := getattr(logger, "sync", None)) is not None:
                with blamed("logger", logger, self.run):
                    sync()
