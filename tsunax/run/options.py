"""Arguments of `fit`, checked before anything runs: the goal, evaluations, callbacks, loggers."""

import dataclasses
import datetime
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tsunax._core import Function, PyTree, checks, processes, trees
from tsunax._core.cadence import Cadence, When, cadence_of
from tsunax._core.interrupts import SIGNALS
from tsunax._step.loss_fn import MadeOfLossFn
from tsunax.errors import WrongTypeError
from tsunax.program import TrainStep
from tsunax.run.history import Clock, History
from tsunax.run.part import Part, Watcher
from tsunax.state import check_state


class Goal:
    """The `steps` or the `epochs` at which a run ends, counted from the beginning of training."""

    def __init__(
        self, where: str, steps: int | None, epochs: int | None, has_data: bool = True
    ) -> None:
        if (steps is None) == (epochs is None) or (steps is None and not has_data):
            raise WrongTypeError(
                "goal",
                where,
                got=f"steps={steps} and epochs={epochs}",
                expected="one of them, and steps= without data",
            )
        name = "epochs" if steps is None else "steps"
        count = checks.check_count(epochs if steps is None else steps, where, name)
        self.steps: int | None = None if steps is None else count
        self.epochs: int | None = count if steps is None else None

    def steps_left(self, step: int) -> float:
        return float("inf") if self.steps is None else self.steps - step

    def reached(self, step: int, epoch: int) -> bool:
        return step >= self.steps if self.steps is not None else epoch >= (self.epochs or 0)

    def __str__(self) -> str:
        return f"steps={self.steps}" if self.steps is not None else f"epochs={self.epochs}"


@dataclass(eq=False)
class Options:
    """The arguments of `fit`, each checked by itself."""

    goal: Goal
    evaluate: Function | None
    evaluate_every: When
    callbacks: Any  # a function or several; then a tuple
    loggers: Any
    log_every: int
    steps_per_call: Any  # an int, "auto", or None: no compiled loop
    max_bad: int
    signals: Sequence[str]
    extra: Mapping[str, Any]
    dry_run: bool  # at its end every callback is called, also one that no event has called
    progress: bool
    history: History | None
    resume: str
    fast_forward: bool
    checkpoint: Any  # the user's value
    parts: tuple[Part, ...] = ()  # the parts among the callbacks
    watchdog: Any = None  # the last `callbacks.watchdog` among them, or the default one
    clock: Clock = field(default_factory=Clock)  # starts when the options are made

    def __post_init__(self) -> None:
        where = "fit()"
        self._check_evaluate(where)
        self.log_every = checks.check_count(self.log_every, where, "log_every")
        self.max_bad = checks.check_count(self.max_bad, where, "max_bad")
        if self.steps_per_call not in (None, "auto"):
            self.steps_per_call = checks.check_count(self.steps_per_call, where, "steps_per_call")
        checks.check_choice(self.resume, where, "resume", ("auto", "must", "never"))
        if self.resume == "must" and self.checkpoint is None:
            raise WrongTypeError("resume", where, "'must' without checkpoint=", "a path")
        self.signals = tuple(self.signals)
        for name in self.signals:
            checks.check_choice(name, where, "signals", SIGNALS)
        from tsunax.run.watchdog import watchdog

        functions = _listed(self.callbacks)
        watchdogs = [f for f in functions if isinstance(f, watchdog)]
        self.watchdog = watchdogs[-1] if watchdogs else watchdog()
        self.parts = tuple(f for f in functions if isinstance(f, Part))
        for part in self.parts:
            if not callable(part.at):
                raise WrongTypeError(
                    f"{type(part).__name__}.at",
                    where,
                    got=trees.describe(part.at),
                    expected="a method at(run, events)",
                )
        self.callbacks = tuple(f for f in functions if not isinstance(f, Part | watchdog))
        self.loggers = () if self.loggers is None else _listed(self.loggers)
        for f in self.callbacks:
            if isinstance(f, type):
                raise WrongTypeError(
                    "callback",
                    where,
                    got=trees.describe(f),
                    expected="a function",
                    fix=f"Call it: {f.__name__}(...).",
                )
            checks.check_takes("callback", where, f, "f(run), or a callbacks.Part", None)
        for f in self.loggers:
            checks.check_takes("logger", where, f, "f(row, step=...)", {}, step=0)
        paths = [str(f.path) for f in self.loggers if hasattr(f, "path")]
        if len({*paths}) < len(paths):
            raise WrongTypeError("logger", where, f"files {', '.join(paths)}", "a file for each")
        if not processes.current().is_first:
            self.loggers = ()
        if not isinstance(self.history, History | None):
            got, expected = trees.describe(self.history), "the History of an earlier run"
            raise WrongTypeError("history", where, got, expected)

    def _check_evaluate(self, where: str) -> None:
        if self.evaluate is None:
            if self.evaluate_every != "epoch":
                raise WrongTypeError(
                    "evaluate",
                    where,
                    got=f"None, but evaluate_every={self.evaluate_every!r}",
                    expected="a function",
                )
            return
        example = "f(state), as lambda state: ts.evaluate(eval_step, state, {'val': data})"
        if isinstance(self.evaluate, MadeOfLossFn):  # which takes a state without a batch, too
            raise WrongTypeError("evaluate", where, trees.describe(self.evaluate), example)
        checks.check_takes("evaluate", where, self.evaluate, example, None)
        cadence_of(self.evaluate_every, where, "evaluate_every")

    @functools.cached_property
    def names(self) -> list[str]:
        """The key of the memory of each callback, and behind all callbacks of each part."""
        names = [_name(f) for f in (*self.callbacks, *self.parts)]
        earlier_counts = [names[:i].count(name) for i, name in enumerate(names)]
        return [
            f"{name} #{n}" if n else name for name, n in zip(names, earlier_counts, strict=True)
        ]

    @functools.cached_property
    def cadences(self) -> list[Cadence]:
        """The cadence of each callback."""
        return [cadence_of(interval_of(f), type(f).__name__, "every") for f in self.callbacks]

    @functools.cached_property
    def places(self) -> list[int]:
        return [place for f in self.callbacks for place in getattr(f, "at", ())]

    def deciding_settings(self) -> dict[str, Any]:
        """Settings that decide when a call ends: the same on all processes."""
        names = "evaluate_every log_every steps_per_call max_bad dry_run places"
        settings = {name: getattr(self, name) for name in names.split()}
        settings |= {"goal": str(self.goal), "cadences": list(map(str, self.cadences))}
        return settings | {"evaluate": self.evaluate is not None}

    @property
    def watched(self) -> dict[str, str]:
        """{metric that a callback waits for: name of the callback}."""
        all_watches = [f.watches for f in self.callbacks if isinstance(f, Watcher)]
        return {metric: name for watches in all_watches for metric, name in watches.items()}

    @property
    def may_log(self) -> bool:
        """Whether a callback or a part of the user may log any name."""
        return bool(self.parts) or any(getattr(f, "may_log", True) for f in self.callbacks)


def interval_of(callback: object) -> Any:
    """The `every` of a callback; () for none. An attribute of another type means something else."""
    every = getattr(callback, "every", ())
    return every if isinstance(every, int | np.integer | str | datetime.timedelta | tuple) else ()


def is_bare(callback: object) -> bool:
    """Whether a callback does not say when it is called: a plain function, for example."""
    has_events = getattr(callback, "events", None) is not None
    return not (interval_of(callback) or hasattr(callback, "at") or has_events)


def _name(callback: Any) -> str:
    """A name that the same callback has in every process: its type, plain fields and functions.

    Checkpoints have it, too: a field with `repr=False` is left out, such as a password.
    """
    if function_name := getattr(callback, "__qualname__", ""):
        return function_name
    fields = dataclasses.fields(callback) if dataclasses.is_dataclass(callback) else ()
    values = {field.name: getattr(callback, field.name) for field in fields if field.repr}
    texts = {k: repr(x) for k, x in values.items() if isinstance(x, bool | int | float | str)}
    texts |= {k: _name(x) for k, x in values.items() if callable(x)}
    type_name = type(callback).__name__
    return f"{type_name}({', '.join(f'{k}={x}' for k, x in texts.items())})" if texts else type_name


def is_callback_due(callback: Any, event: str, step: int) -> bool:
    """Whether an event calls a callback, apart from its cadence."""
    if event == "step":
        return step in getattr(callback, "at", ())
    if getattr(callback, "events", None) is not None:
        return event in callback.events
    # A repeated run has other boundaries of the clock: plain functions are not called there.
    is_repeatable = event in ("start", "log", "evaluate", "epoch", "end")
    is_tried = event == "start" and hasattr(callback, "at")  # see `callbacks.At`
    return is_tried or (is_bare(callback) and is_repeatable)


def _listed(functions: Any) -> tuple[Any, ...]:
    """One function or several, as a tuple."""
    return tuple(functions) if isinstance(functions, list | tuple) else (functions,)


def check_step(where: str, step: object, state: PyTree) -> None:
    """Raise WrongTypeError unless `step` is a step, and StateError for a state that is gone."""
    if not callable(step):
        raise WrongTypeError(
            "step",
            where,
            got=trees.describe(step),
            expected=f"a function (state, batch) -> (state, info): {where[:-1]}step, state, ...)",
        )
    if isinstance(step, TrainStep):
        check_state(state, where)
    else:
        for place, leaf in trees.leaves_at("state", state):
            checks.check_alive(leaf, place)
