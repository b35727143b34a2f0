"""Rows of numbers, collected until they are whole; then the history and the loggers get them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tsunax._core import Function
from tsunax.run.history import Clock
from tsunax.run.run import Run, blamed


class RowLog:
    """The newest row of a run: an evaluation and callbacks may still add numbers to it."""

    def __init__(self, run: Run, loggers: Sequence[Function], clock: Clock) -> None:
        self.run: Run = run
        self.clock: Clock = clock
        self.loggers: Sequence[Function] = loggers
        self.step: int = -1  # of the newest row
        self.told_step: int = -1  # of the row that the loggers were given last
        # what makes the row of the newest step, if it has none
        self.last: tuple[Callable[[], Mapping[str, Any]], int] | None = None

    def emit(self, columns: dict[str, np.ndarray], steps: np.ndarray) -> None:
        """Rows for the history, and for the loggers but the last one: it may not be whole yet."""
        self.flush()
        self.run.history.extend(columns, steps)
        for i in range(len(steps)) if self.loggers else [len(steps) - 1]:
            self.begin(int(steps[i]))
            self.run.row = {name: float(x[i]) for name, x in columns.items()}
        self.run.metrics |= self.run.row

    def begin(self, step: int) -> None:
        """From here on numbers belong to the row of this step."""
        if step != self.step:
            self.flush()
            self.step, self.run.row = step, {}

    def add(self, row: Mapping[str, float], step: int) -> None:
        """A row of numbers, or more numbers for the row of this step."""
        self.begin(step)
        run = self.run
        run.row |= row
        run.metrics |= row
        run.history.add(row, step)

    def close(self) -> None:
        """Add the row of the last step, whatever `log_every` is. Loggers get one row of a step."""
        if self.last is None:
            return
        (row_of, step), self.last = self.last, None
        row = {name: float(x[0]) for name, x in row_of().items()}
        self.run.history.close(row, step)
        if step == self.told_step:
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
        for logger in self.loggers if row else ():
            with self.clock("callbacks"), blamed("logger", logger, self.run):
                logger(dict(row), step=self.step)
