"""The run of `fit` that callbacks get, and the rejected calls that it keeps."""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tsunax._core import Function, PyTree, Scalar, trees
from tsunax.errors import RowError, StateError
from tsunax.run.history import History, check_row
from tsunax.run.options import Options
from tsunax.run.rows import Rows
from tsunax.state import TrainState, check_state

# Names of rows that `fit` fills: no metric may have such a name.
OF_ROWS = ("loss", "grad_norm", "update_norm", "loss_scale", "dropped", "weight", "step")
OF_FIT = ("epoch", "rejected", "steps_per_second", "examples_per_second")
INTERRUPTED = "interrupted"  # the reason of a run that a signal ended
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

        Give it the state at the end of the run, `error.state`: a rejected step does not change it.
        If later steps were applied, StateError, or with `exact=False` the call with later params.
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
    ) -> None:
        self.event = "start"
        self.step: int = step
        self.epoch: int = feed.epoch  # counted at boundaries, a fraction in rows
        self.place: Callable[[], dict[str, Any]] = feed.place  # the position of the data, to save
        self.state: PyTree = state
        self.info: Any = None  # the info of the last step, on the host; None before the first step
        # the newest number of each column: of the last row, so not always of this step
        self.metrics: dict[str, float] = {name: history.last(name) for name in history.names}
        self.history = history
        self.memory: dict[str, Any] = {}  # the callback's memory, saved with the run
        self.stopped: str = stopped
        self.interrupted: bool = False  # whether a signal ends the run
        self.is_changed: bool = False  # whether a callback of this boundary returned a state
        self.evaluated: int = -1  # the step of the newest evaluation
        self.evaluated_names: frozenset[str] = frozenset()  # the same on all processes
        self.row_names: set[str] = set(OF_ROWS + OF_FIT)  # names of training rows
        self.row: dict[str, float] = {}
        self.note: Callable[[str], None] = note  # a line above the progress
        # the last rejected calls
        self.rejected: collections.deque[Rejected] = collections.deque(maxlen=MOST_REJECTED)
        parts_of_rows = options.goal, options.loggers, options.clock, settings
        self.rows: Rows = Rows(self, *parts_of_rows)

    def log(self, **numbers: Any) -> None:
        """Add numbers to the row of this step; a newer number replaces an older one of its name."""
        self.check_own(numbers, "run.log()")
        row = check_row(numbers, "run.log()")
        self.row |= row
        self.metrics |= row

    def check_own(self, numbers: Mapping[str, Any], where: str) -> None:
        """Raise RowError for a name that the rows of training have: a column has one meaning."""
        if taken_names := [name for name in numbers if name in self.row_names]:
            got, expected = "a name of the training rows", "a name of its own"
            fix = "Name it: 'val/loss', or ts.evaluate(eval_step, state, {'val': data})."
            raise RowError(repr(taken_names[0]), where, got, expected, fix)

    def stop(self, reason: str) -> None:
        """End the run after this boundary."""
        self.stopped = self.stopped or str(reason)


def with_state(error: Any, run: Run) -> Any:
    """An exception with the state and the history of the run that it ends."""
    is_donated = any(map(trees.is_gone, jax.tree.leaves(run.state)))
    has_history = hasattr(error, "history")
    if getattr(error, "state", None) is None:
        error.state = None if is_donated else run.state
    error.history, error.rejected = run.history, tuple(run.rejected)
    if is_donated and not has_history:
        place = f"step {run.step}"
        error.add_note(f"the failed call had consumed the state of {place}: error.state is None")
    return error
