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
    """The rows of a run. To the newest one an evaluation and callbacks may still add numbers."""

    run: Any
    goal: Goal
    loggers: Sequence[Any]
    clock: Clock
    settings: Function  # what a logger is told at the start, by `(path, has_closing_row)`
    step: int = -1  # of the newest row
    told_step: int = -1  # of the row that the loggers were given last
    resumed_row: int = -1  # the step of a row that loggers got before the run was resumed there
    # what makes the row of the newest step, if it has none
    last: tuple[Callable[[], Mapping[str, Any]], int] | None = None
    is_closed: bool = False  # whether further numbers belong to the end of the run alone
    # Whether the loggers get this row at the end of the run, which comes next at the same step.
    is_open: bool = False
    has_closing_row: bool = False  # see `reopen`
    opened: list[Any] = field(default_factory=list)  # loggers

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
        is_over = bool(run.stopped) or self.goal.reached(run.step, run.epoch)
        self.is_open = is_over and not is_end
        if not self.is_open:
            self.flush()

    def end(self, run: Any, error: BaseException | None) -> None:
        """Give loggers the last row, as far as it can be had, and close them."""
        with contextlib.ExitStack() as stack:
            for logger in self.opened:
                if hasattr(logger, "close"):
                    stack.callback(logger.close)
            if error is not None:
                with contextlib.suppress(Exception):
                    self.flush()

    def emit(self, columns: dict[str, np.ndarray], steps: np.ndarray) -> None:
        """Rows for the history, and for the loggers but the last one: it may not be whole yet."""
        self.flush()
        self.run.history.extend(columns, steps)
        for i in range(len(steps)) if self.loggers else [len(steps) - 1]:
            self.begin_row(int(steps[i]))
            self.run.row = {name: float(x[i]) for name, x in columns.items()}
        self.run.metrics |= self.run.row

    def begin_row(self, step: int) -> None:
        """From here on numbers belong to the row of this step."""
        if step != self.step:
            self.flush()
            self.step, self.run.row = step, {}

    def add(self, row: Mapping[str, float], step: int) -> None:
        """A row of numbers, or more numbers for the row of this step."""
        self.begin_row(step)
        self.run.row |= row
        self.run.metrics |= row
        self.record(row, step)

    def record(self, row: Mapping[str, float], step: int) -> None:
        """Add numbers to the history: a run that continues keeps none of those of its end."""
        history = self.run.history
        (history.close if self.is_closed else history.add)(row, step)

    def reopen(self, step: int, is_over: bool) -> None:
        """Take out of the history what only the end of the run has, because the run continues.

        Sets `has_closing_row`: whether the row of this `step` is another one now, or was saved
        before loggers had it, because only the end of the run is missing: they get it once more.
        """
        run, history = self.run, self.run.history
        closing_step, numbers = history.reopen()
        run.metrics = {name: history.last(name) for name in history.names}
        newest = {name: history.newest(name) or (-1, 0.0) for name in history.names}
        row = {name: x for name, (i, x) in newest.items() if i == step}
        if closing_step != step and not is_over:
            self.resumed_row = step if row else -1
            return
        if numbers:  # the row of the end again, if the run ends before its next step
            self.last = (lambda: {name: np.array([x]) for name, x in numbers.items()}), step
        self.step, run.row, self.has_closing_row = step, row, True

    def close(self) -> None:
        """Add the row of the last step, whatever `log_every` is. Loggers get one row of a step."""
        self.is_closed = True
        if self.last is None:
            return
        (row_of, step), self.last = self.last, None
        row = {name: float(x[0]) for name, x in row_of().items()}
        if step == self.told_step:
            self.record(row, step)
            self.run.metrics |= row
        else:
            self.add(row, step)

    def numbers_at(self, step: int) -> dict[str, float]:
        """The newest numbers, as far as they are of this step."""
        history = self.run.history
        newest = {name: history.newest(name) or (-1, 0.0) for name in history.names}
        found = {name: x for name, (at, x) in newest.items() if at == step}
        if self.last is not None and self.last[1] == step:  # its row is no row of the history
            found |= {name: float(x[0]) for name, x in self.last[0]().items()}
        return {name: x for name, x in found.items() if np.isfinite(x)}

    def flush(self) -> None:
        """Give the newest row to the loggers."""
        row, self.run.row = self.run.row, {}
        self.told_step = self.step if row else self.told_step
        for logger in self.loggers if row and self.step != self.resumed_row else ():
            with self.clock("callbacks"), blamed("logger", logger, self.run):
                logger(dict(row), step=self.step)

    def sync(self) -> None:
        """Put the rows on the disk: a run that resumes here does not log them again."""
        for logger in self.loggers:
            if (sync := getattr(logger, "sync", None)) is not None:
                with blamed("logger", logger, self.run):
                    sync()
