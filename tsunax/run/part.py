"""A part of a run: a task between its steps, in a separate file.

Evaluation, callbacks, rows and loggers, progress and checkpoints are parts. To write a new part,
make a subclass of `Part`, and give `fit(callbacks=[...])` one of its values:

    class Webhook(ts.callbacks.Part):
        every = 100

        def at(self, run, events):
            post(run.step, run.metrics)  # of the newest row: of this step if log_every divides 100

        def end(self, run, error):
            if error is not None or run.interrupted:  # SIGTERM, say, is no error
                post(run.step, run.interrupted or repr(error))

The loop holds a boundary at the steps that a part needs, and there calls the parts in order:
commands, the evaluation, callbacks, parts of users, rows and loggers, progress, the save, answers.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from tsunax._core import Function, trees
from tsunax._core.cadence import Cadence, Timer, When, cadence_of

EVALUATE = "evaluate now"  # the event of a command, before the evaluation


class Part:
    """A part of a run of `fit`. This class does nothing: write the methods that your part needs.

    `run` is the run that callbacks get, with step, state, history, `log` and `stop`; `metrics` has
    the newest number of each column, `info` is the info of the last step. Each
    part has its own `run.memory`, which is saved with the run under the name of the part: its type,
    and for a dataclass the numbers, texts and functions in its fields, but not those with
    `repr=False`. All processes call all parts, in a dry run, too, and an exception of a part ends
    the run.
    """

    #: How often the part needs a boundary: a number of steps, "epoch", "2 epochs", "10 minutes", or
    #: a tuple of these for whichever comes first; () for never.
    every: When = ()
    #: The names in `run.memory` that a rewind does not reset.
    outlives_rewinds: tuple[str, ...] = ()

    @property
    def cadence(self) -> Cadence:
        """The parsed `every`, which a user may change. Only another value is parsed again."""
        # No `every` is the part itself, so the first call parses.
        nothing_parsed = self, Cadence()
        parsed_every, cadence = vars(self).get("_parsed", nothing_parsed)
        if parsed_every is not self.every:
            cadence = cadence_of(self.every, type(self).__name__, "every")
            vars(self)["_parsed"] = self.every, cadence  # a part may be a frozen dataclass
        return cadence

    @functools.cached_property
    def timers(self) -> Sequence[Timer]:
        """The timer of `every` if it has a duration. The loop restarts it after `at`."""
        return [Timer(self.cadence.seconds)] if self.cadence.seconds < math.inf else []

    def next_step(self, step: int) -> float:
        """The first step beyond `step` at which the part needs a boundary; inf for none.

        By default the next multiple of the steps of `every`. All processes return the same step.
        """
        return self.cadence.next_step(step)

    def due(self, run: Any, events: Sequence[str]) -> bool:
        """Whether `at` is called at this boundary: as `every` says, and at `next_step`.

        Events are "start" (before the first step), "step" (a part needed it), "evaluate" (an
        evaluation was done), "epoch" (an epoch has ended), "end" (of the run), and events at any
        step: "save" (a signal or a command), "evaluate now" (a command) and "clock" (the duration
        of a part has passed). A part may add events for later parts.
        To be called at "start", "end" or "save", override this method.
        """
        is_step = "step" in events and self.next_step(run.step - 1) == run.step
        is_epoch = "epoch" in events and self.cadence.is_at_epoch(run.epoch)
        return is_step or is_epoch or any(timer.is_due for timer in self.timers)

    def _prepare(self, run: Any, feed: Any) -> None:
        """Called before any part begins, also after a rewind; for the parts of this package."""

    def begin(self, run: Any) -> None:
        """Called before the first boundary, and again after each rewind."""

    def at(self, run: Any, events: list[str]) -> Any:
        """Called at a boundary, if the part is due there. `run.state` is the state at `run.step`.

        It may return a new state, as callbacks may. Only here does `run.log` add to the rows.
        """

    def read(self, run: Any, has_row: bool) -> None:
        """Called when the numbers of further steps are read, between boundaries, too."""

    def end(self, run: Any, error: BaseException | None) -> None:
        """Called at the end of the run if `begin` was called; with the error that ends it.

        A rewind ends the parts, too, and begins them again: `run.restart` is not None then.

        The error has `state` and `history`, see `fit`. It is None if the run reached its goal, if a
        callback stopped it, and if a signal ended it, which `run.interrupted` names ("SIGTERM").
        Parts end in the reverse order of their beginning. The loggers end after the parts of users,
        which are not told of their errors. An error that `end` raises ends the run, or is a note of
        the error that does. `run.log` has no effect here.
        """


class EachBoundary(Part):
    """A part that is called at each boundary."""

    def due(self, run: Any, events: Sequence[str]) -> bool:
        return True


class Watcher:
    """A callback that waits for a metric."""

    @property
    def watches(self) -> dict[str, str]:
        """{the metric: a name of the callback for messages}."""
        return {}


@contextlib.contextmanager
def blamed(role: str, fn: Function | Part, run: Any, step: int | None = None) -> Iterator[None]:
    """A block that adds to an exception which function raised it, and at which step."""
    try:
        yield
    except Exception as error:
        place = f"step {run.step} (epoch {run.epoch})" if step is None else f"step {step}"
        name = trees.describe_call(fn) if callable(fn) else type(fn).__name__
        error.add_note(f"raised by the {role} {name} at {place}")
        raise
