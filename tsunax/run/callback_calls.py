"""The user's callbacks and parts: when they are called, and their changes of a run."""

import itertools
from typing import Any

from tsunax._core import Function, checks, trees
from tsunax.errors import StateError, WrongTypeError
from tsunax.run.history import Clock
from tsunax.run.info_columns import logged_step
from tsunax.run.options import Options, is_bare, is_callback_due
from tsunax.run.part import Part, blamed
from tsunax.run.run import Run
from tsunax.states import States, training_states


class CallbackCalls(Part):
    """Calls each callback at its events and steps."""

    def __init__(self, options: Options, memory: dict[str, Any]) -> None:
        self.options: Options = options
        self.memory: dict[str, Any] = memory
        self.every: float = min(options.callback_intervals, default=float("inf"))
        self.epochs: bool = any(map(is_bare, options.callbacks))

    def next_step(self, step: int) -> float:
        places = (place for place in self.options.places if place > step)
        next_steps = [(step // n + 1) * n for n in self.options.callback_intervals]
        return min([*next_steps, *places], default=float("inf"))

    def due(self, run: Run, events: Any) -> bool:
        return True

    def at(self, run: Run, events: list[str]) -> None:
        options = self.options
        callback_events = {
            "step": ["step"] + ["log"] * (run.step % options.log_every == 0),
            "save": [],  # A signal asked for it, so a repeated run does not have this event.
        }
        if options.dry_run:
            callback_events["end"] = ["step", "end"]
        for event in itertools.chain(*(callback_events.get(x, [x]) for x in events)):
            run.event = event
            is_tried = options.dry_run and event == "step" and "end" in events
            for name, callback in zip(options.names, options.callbacks, strict=False):
                if is_callback_due(callback, event, run.step) or (
                    is_tried and not is_bare(callback)
                ):
                    run.memory = self.memory.setdefault(name, {})
                    with blamed("callback", callback, run):
                        _call(run, options.clock, callback, run)


class UserPart(Part):
    """A user's part, with a memory: errors name it, and rows have the numbers that it logs."""

    def __init__(self, part: Part, options: Options, memory: dict[str, Any]) -> None:
        self.part: Part = part
        self.options: Options = options
        self.memory: dict[str, Any] = memory
        self.every: float = part.every
        self.epochs: bool = part.epochs

    def next_step(self, step: int) -> float:
        place = self.part.next_step(step)
        return place if place > step else float("inf")

    def due(self, run: Run, events: Any) -> bool:
        if self.options.dry_run and "end" in events:  # a dry run calls all that it has
            return True
        return self._result(run, self.part.due, run, events)

    def begin(self, run: Run) -> None:
        self._result(run, self.part.begin, run)

    def at(self, run: Run, events: list[str]) -> None:
        self._result(run, _call, run, self.options.clock, self.part.at, run, events)

    def read(self, run: Run, has_row: bool) -> None:
        self._result(run, self.part.read, run, has_row)

    def end(self, run: Run, error: BaseException | None) -> None:
        self._result(run, self.part.end, run, error)

    def _result(self, run: Run, call: Function, *args: Any) -> Any:
        run.memory = self.memory
        with blamed("part", self.part, run):
            return call(*args)


class Agreed(Part):
    """At each boundary all processes agree whether the run stops, and on the state."""

    def __init__(self, agreement: Any) -> None:
        self.agreement = agreement

    def due(self, run: Any, events: Any) -> bool:
        return True

    def at(self, run: Any, events: list[str]) -> None:
        report = run.stopped, run.state, run.is_changed
        run.stopped = self.agreement.boundary(f"step {run.step}", *report)


def _call(run: Run, clock: Clock, callback: Function, *args: Any) -> None:
    """Call a callback: the run gets the state that it returns, the row of this step its numbers."""
    run.rows.begin_row(run.step)
    previous_row = dict(run.row)
    with clock("callbacks"):
        state = callback(*args)
        if state is not None:
            check_returned(state, run)
            run.state, run.is_changed = state, True
    if logged := {k: x for k, x in run.row.items() if x != previous_row.get(k)}:
        run.rows.record(logged, run.step)


def check_returned(new: Any, run: Run) -> None:
    """Raise unless `new` is a state like the run's; rules, numbers and freezes may differ."""
    old, fix = run.state, "A callback keeps the structure of the state."
    if type(new) is not type(old):
        expected = f"a {type(old).__name__}, or nothing"
        raise WrongTypeError("result", "callback", trees.describe(new), expected)
    old_states, new_states = training_states(old), training_states(new)
    if not old_states or old_states.keys() != new_states.keys():
        checks.check_like("state", new, old, fix)
    for prefix, name in itertools.product(old_states, ("params", "model_state")):
        old_part, new_part = (getattr(s[prefix], name) for s in (old_states, new_states))
        checks.check_like(f"{prefix}{name}", new_part, old_part, fix)
    if isinstance(old, States):
        checks.check_like("carry", new.carry, old.carry, fix)
    new_step = logged_step(new, run.step)
    if new_step != run.step:
        raise StateError("step", "the callback's state", new_step, run.step)
