"""What a callback sees of a run of `fit`; the rejected calls that it keeps; its newest row."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tsunax._core import Function, PyTree, Scalar, trees
from tsunax.errors import RowError, StateError
from tsunax.run.history import Clock, History, check_row
from tsunax.state import TrainState, check_state

# names that rows have of themselves; no metric may be called so
OF_ROWS = ("loss", "grad_norm", "update_norm", "loss_scale", "dropped", "weight", "step")
OF_FIT = ("epoch", "rejected", "steps_per_second", "examples_per_second")
MOST_REJECTED = 3  # calls that are kept, each with its batch on the host


@dataclass(frozen=True)
class Rejected:
    """A call whose step was rejected: what it takes, beside the state, to have it again."""

    step: int  # of the clock
    calls: int  # of the state when it was called: its keys come from that
    epoch: int
    batch: PyTree  # on the host, without rows of padding
    loss_scale: Scalar  # the one that it used, where the state has one

    def of(self, state: TrainState, *, exact: bool = True) -> tuple[TrainState, Any]:
        """`(state, batch)` of that call, for `ts.replay(step, *rejected.of(state))`.

        From the state that the run ended in, as `error.state`: a rejected step leaves it as it was.
        If others were applied since, StateError, or with `exact=False` that call with later params.
        """
        check_state(state, "Rejected.of()")
        if exact and int(state.step) != self.step:
            got, expected = f"step {int(state.step)}", f"that of step {self.step}, where it was"
            fix = "Take of(state, exact=False), or end the run at the first one: max_bad=1."
            raise StateError("state", "Rejected.of()", got, expected, fix)
        fields: dict[str, Any] = {"calls": self.calls}
        if self.loss_scale is not None and state.loss_scale is not None:
            scale = np.float32(self.loss_scale)
            fields["loss_scale"] = dataclasses.replace(state.loss_scale, scale=scale)
        return state.replace(**fields), self.batch


class Run:
    """What a callback sees of a run; it may change `memory`, and call `log` and `stop`."""

    def __init__(self, state: PyTree, step: int, epoch: int, history: History) -> None:
        self.event = "start"
        self.step: int = step
        self.epoch: int = epoch
        self.state: PyTree = state
        self.info: Any = None  # of the last step, its numbers on the host; None before the first
        self.metrics: dict[str, float] = {name: history.last(name) for name in history.names}
        self.history = history
        self.memory: dict[str, Any] = {}  # the callback's own; saved and given back
        self.stopped: str = ""
        self.taken: set[str] = set(OF_ROWS + OF_FIT)  # names of training rows
        self.row: dict[str, float] = {}
        self.note: Callable[[str], None] = print  # a line above the progress
        # the last ones
        self.rejected: collections.deque[Rejected] = collections.deque(maxlen=MOST_REJECTED)

    def log(self, **numbers: Any) -> None:
        """Let numbers join the row of this step; of two with one name the newer one wins."""
        self.check_own(numbers, "run.log()")
        found = check_row(numbers, "run.log()")
        self.row |= found
        self.metrics |= found

    def check_own(self, numbers: Mapping[str, Any], where: str) -> None:
        """Raise RowError for a name that the rows of training have: a column has one meaning."""
        if taken := [name for name in numbers if name in self.taken]:
            got, expected = "a name of the training rows", "a name of its own"
            fix = "Name it: 'val/loss', or ts.evaluate(eval_step, state, {'val': data})."
            raise RowError(repr(taken[0]), where, got, expected, fix)

    def stop(self, reason: str) -> None:
        """End the run after this boundary."""
        self.stopped = self.stopped or str(reason)


@contextlib.contextmanager
def blamed(what: str, fn: Function, run: Run) -> Iterator[None]:
    """Say of an exception which function raised it, and when."""
    try:
        yield
    except Exception as error:
        at = f"step {run.step} (epoch {run.epoch})"
        error.add_note(f"raised by the {what} {trees.describe_call(fn)} at {at}")
        raise


@dataclass(eq=False)
class RowLog:
    """The newest row of a run: an evaluation and callbacks may still add numbers to it."""

    run: Run
    loggers: Sequence[Function]
    clock: Clock
    step: int = -1  # of the newest row
    told_step: int = -1  # of the row that the loggers were given last
    resumed_row: int = -1  # the step of a row that loggers got before the run was resumed there
    # what makes the row of the newest step, if it has none
    last: tuple[Callable[[], Mapping[str, Any]], int] | None = None
    is_closed: bool = False  # whether further numbers belong to the end of the run alone

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
        self.run.row |= row
        self.run.metrics |= row
        self.record(row, step)

    def record(self, row: Mapping[str, float], step: int) -> None:
        """Add numbers to the history: a run that continues keeps none of those of its end."""
        history = self.run.history
        (history.close if self.is_closed else history.add)(row, step)

    def reopen(self, step: int, is_over: bool) -> bool:
        """Take out of the history what only the end of the run has, because the run continues.

        Returns whether the row of this `step` is another one now, or was saved before loggers had
        it, because only the end of the run is missing: then they get it once more.
        """
        run, history = self.run, self.run.history
        closing_step, numbers = history.reopen()
        run.metrics = {name: history.last(name) for name in history.names}
        newest = {name: history.newest(name) or (-1, 0.0) for name in history.names}
        row = {name: x for name, (i, x) in newest.items() if i == step}
        if closing_step != step and not is_over:
            self.resumed_row = step if row else -1
            return False
        if numbers:  # the row of the end again, if the run ends before its next step
            self.last = (lambda: {name: np.array([x]) for name, x in numbers.items()}), step
        self.step, run.row = step, row
        return True

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


def with_state(error: Any, run: Run) -> Any:
    """An exception with the state and the history of the run that it ends."""
    gone = any(map(trees.is_gone, jax.tree.leaves(run.state)))
    if getattr(error, "state", None) is None:
        error.state = None if gone else run.state
    error.history, error.rejected = run.history, tuple(run.rejected)
    if gone:
        at = f"step {run.step}"
        error.add_note(f"the failed call had consumed the state of {at}: error.state is None")
    return error
