"""The calls of the user's functions in a run: `evaluate`, callbacks and parts.

When they are called, and their changes of the run; and the metrics that callbacks and `keep_best`
wait for.
"""

import contextvars
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tsunax._core import Function, checks, processes, tables, trees
from tsunax._core.cadence import Cadence, Timer, When
from tsunax.errors import RowError, StateError, WrongTypeError, unknown, warn
from tsunax.run.evaluation import ONE_BATCH
from tsunax.run.history import OF_FIT, Clock, check_row
from tsunax.run.info_columns import logged_step
from tsunax.run.options import Options, interval_of, is_bare, is_callback_due
from tsunax.run.part import EVALUATE, EachBoundary, Part, blamed
from tsunax.run.run import Run
from tsunax.state import donated
from tsunax.states import States, training_states

_GIVE_EVALUATE = "Give fit(evaluate=lambda state: ts.evaluate(eval_step, state, {'val': data}))."


def calls_of_user(
    options: Options,
    watched: dict[str, str],
    memory: dict[str, Any],
    agreement: processes.Unanimous,
) -> list[Part]:
    """The parts that call the user's functions, in the order of a boundary."""
    parts: list[Part] = []
    if options.evaluate is not None:
        parts.append(Evaluations(options, watched, agreement))
    if options.callbacks:
        parts.append(CallbackCalls(options, memory))
    names = options.names[len(options.callbacks) :]
    for name, part in zip(names, options.parts, strict=True):
        parts.append(UserPart(part, options, memory.setdefault(name, {})))
    if watched:
        parts.append(Awaited(options, watched))
    if agreement.spans:
        parts.append(Agreed(agreement))
    return parts


class Evaluations(Part):
    """Calls `evaluate` as `evaluate_every` says, and at the end of a run."""

    def __init__(
        self, options: Options, watched: dict[str, str], agreement: processes.Unanimous
    ) -> None:
        self.options: Options = options
        self.watched: dict[str, str] = watched
        self.agreement: processes.Unanimous = agreement
        self.every: When = options.evaluate_every

    def begin(self, run: Run) -> None:
        """Raise RowError before step 1 for an awaited name that `evaluate` does not return."""
        options, names = self.options, run.history.names
        watchers = [f"{where} acts on {k!r}" for k, where in self.watched.items() if "/" in k]
        if watchers and self.timers:
            warn(
                f"fit(): evaluate_every={self.every!r} follows the clock, and "
                f"{', '.join(watchers)}, so the run will not repeat. Give it a number of steps, or "
                "epochs."
            )
        awaited = {k: name for k, name in self.watched.items() if "/" in k and k not in names}
        if not awaited or options.dry_run or options.may_log:
            return
        context = contextvars.copy_context()
        context.run(ONE_BATCH.set, True)
        row = context.run(self.row, run)
        for name, where in awaited.items():
            if name not in row:
                raise RowError(unknown("metric", where, name, row))

    def due(self, run: Run, events: Sequence[str]) -> bool:
        if "end" in events:
            return run.evaluated != run.step and not run.interrupted
        return EVALUATE in events or super().due(run, events)

    def at(self, run: Run, events: list[str]) -> None:
        row = self.agreement.numbers(f"evaluate at step {run.step}", self.row(run))
        run.evaluated, run.evaluated_names = run.step, frozenset(row)
        run.rows.add(row, run.step)
        is_end = "end" in events
        if not is_end:  # a run that continues does not have the evaluation of its end
            run.history.mark("evaluate", run.step)
        # Callbacks that count evaluations count the same evaluations when the run continues.
        if not is_end or self.options.dry_run:
            is_after_step = "step" in events  # "step" is the first event
            events.insert(int(is_after_step), "evaluate")
        run.note(f"step {run.step}: " + ", ".join(tables.summary(row, "{:.6g}".format)))
        for timer in self.timers:
            timer.restart()

    def row(self, run: Run) -> dict[str, float]:
        """The numbers of this state, on this process."""
        evaluate: Any = self.options.evaluate
        with self.options.clock("evaluation", evaluate), blamed("evaluate", evaluate, run):
            result = evaluate(run.state)
            if not isinstance(result, Mapping):
                expected = "a dict of numbers by name"
                raise WrongTypeError("result", "evaluate", trees.describe(result), expected)
            row = check_row(result, "evaluate")
            run.check_own(row, "evaluate")
        return row


class Awaited(EachBoundary):
    """Raises RowError for a metric that no later row can have; warns of it at the end."""

    def __init__(self, options: Options, watched: dict[str, str]) -> None:
        self.options: Options = options
        self.watched: dict[str, str] = watched

    def at(self, run: Run, events: list[str]) -> None:
        self._check(run, "end" in events)

    def read(self, run: Run, has_row: bool) -> None:
        if has_row:
            self._check(run, False)

    def _check(self, run: Run, is_end: bool) -> None:
        options, row_names = self.options, run.history.names
        names = [*dict.fromkeys([*row_names, *OF_FIT])]  # rates come with the first rows or later
        is_early = not row_names or (options.evaluate is not None and run.evaluated < 0)
        for metric, watcher in self.watched.items():
            if metric in names or (is_early and not is_end):
                continue
            has_evaluate = options.evaluate is not None
            fix = _GIVE_EVALUATE if "/" in metric and not has_evaluate else ""
            text = unknown("metric", watcher, metric, names, fix)
            if is_end and not options.dry_run:
                warn(text)
            # `evaluate` has run without it, or no callback logs it later.
            elif ("/" in metric and has_evaluate) or not options.may_log:
                raise RowError(text)


class CallbackCalls(EachBoundary):
    """Calls each callback at its events and steps."""

    def __init__(self, options: Options, memory: dict[str, Any]) -> None:
        self.options: Options = options
        self.memory: dict[str, Any] = memory
        self.timer_of_callback: list[Timer] = [Timer(x.seconds) for x in options.cadences]
        self.timers = [timer for timer in self.timer_of_callback if timer.seconds < math.inf]
        bare_interval = (options.log_every, "epoch") if any(map(is_bare, options.callbacks)) else ()
        self.every: When = (*map(interval_of, options.callbacks), bare_interval)

    def next_step(self, step: int) -> float:
        places = (place for place in self.options.places if place > step)
        return min([super().next_step(step), *places])

    def at(self, run: Run, events: list[str]) -> None:
        options = self.options
        callback_events = {
            "step": ["step", "log"] if run.step % options.log_every == 0 else ["step"],
            # A repeated run does not have these events, which signals and commands make.
            **{"save": [], EVALUATE: []},
        }
        if options.dry_run:
            callback_events["end"] = ["step", "end"]
        cadence_events = [
            _cadence_event(cadence, timer, run, events)
            for cadence, timer in zip(options.cadences, self.timer_of_callback, strict=True)
        ]
        for event in itertools.chain(*(callback_events.get(x, [x]) for x in events)):
            run.event = event
            is_tried = options.dry_run and event == "step" and "end" in events
            for i, callback in enumerate(options.callbacks):
                is_due = event == cadence_events[i] or is_callback_due(callback, event, run.step)
                if is_due or (is_tried and not is_bare(callback)):
                    previous_state, name = run.state, options.names[i]
                    run.memory = self.memory.setdefault(name, {})
                    with blamed("callback", callback, run):
                        _call(run, options.clock, callback, run)
                    self.timer_of_callback[i].restart()
                    if event == "clock" and run.state is not previous_state:
                        warn(
                            f"fit(): {name} changed the state when its duration had passed, so the "
                            "run will not repeat. Give it a number of steps, or epochs."
                        )


def _cadence_event(cadence: Cadence, timer: Timer, run: Run, events: list[str]) -> str:
    """The event at which a cadence calls its callback, once at a boundary; "" for none."""
    due_events = [
        *(["step"] * cadence.is_at_step(run.step)),
        *(["epoch"] * cadence.is_at_epoch(run.epoch)),
        *(["clock"] * timer.is_due),
    ]
    return next((event for event in events if event in due_events), "")


class UserPart(Part):
    """A user's part, with a memory: errors name it, and rows have the numbers that it logs."""

    def __init__(self, part: Part, options: Options, memory: dict[str, Any]) -> None:
        self.part: Part = part
        self.options: Options = options
        self.memory: dict[str, Any] = memory

    @property
    def cadence(self) -> Cadence:
        return self.part.cadence

    def next_step(self, step: int) -> float:
        place = self.part.next_step(step)
        return place if place > step else float("inf")

    def due(self, run: Run, events: Any) -> bool:
        if self.options.dry_run and "end" in events:  # a dry run calls all that it has
            return True
        return any(timer.is_due for timer in self.timers) or self._result(
            run, self.part.due, run, events
        )

    def begin(self, run: Run) -> None:
        self._result(run, self.part.begin, run)

    def at(self, run: Run, events: list[str]) -> None:
        self._result(run, _call, run, self.options.clock, self.part.at, run, events)
        for timer in self.timers:
            timer.restart()

    def read(self, run: Run, has_row: bool) -> None:
        self._result(run, self.part.read, run, has_row)

    def end(self, run: Run, error: BaseException | None) -> None:
        self._result(run, self.part.end, run, error)

    def _result(self, run: Run, call: Function, *args: Any) -> Any:
        run.memory = self.memory
        with blamed("part", self.part, run), self.options.clock("callbacks", self.part):
            return call(*args)


class Agreed(EachBoundary):
    """At each boundary all processes agree on the state, and whether the run stops or goes back."""

    def __init__(self, agreement: Any) -> None:
        self.agreement = agreement

    def at(self, run: Any, events: list[str]) -> None:
        rewinding = run.rewinding and dataclasses.astuple(run.rewinding)
        request = run.stopped, rewinding
        run.stopped, rewinding = self.agreement.boundary(
            f"step {run.step}", request, run.state, bool(run.changed_by)
        )
        if rewinding is not None and not run.stopped:
            from tsunax.run.rewinding import Rewind

            run.rewinding = Rewind(*rewinding)


def _call(run: Run, clock: Clock, callback: Function, *args: Any) -> None:
    """Call a callback: the run gets the state that it returns, the row of this step its numbers."""
    run.rows.begin_row(run.step)
    previous_row = dict(run.row)
    with clock("callbacks", callback):
        state = callback(*args)
        if state is not None:
            check_returned(state, run)
            run.replace_state(state, trees.describe_call(callback))
    if logged := {k: x for k, x in run.row.items() if x != previous_row.get(k)}:
        run.rows.record(logged, run.step)


def check_returned(new: Any, run: Run) -> None:
    """Raise unless `new` is a state like the run's; rules, numbers and freezes may differ."""
    old, fix = run.state, "A callback keeps the structure of the state."
    if type(new) is not type(old):
        raise WrongTypeError(
            "result",
            "callback",
            got=trees.describe(new),
            expected=f"a {type(old).__name__}, or nothing",
        )
    if any(map(trees.is_gone, jax.tree.leaves(new))):
        raise StateError(donated("the callback's state"))
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
