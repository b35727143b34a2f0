"""Arguments of `fit`, checked before anything runs: the goal, evaluations, callbacks, loggers."""

import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from tsunax._core import Function, PyTree, checks, processes, trees
from tsunax.errors import WrongTypeError
from tsunax.program import EvalStep, TrainStep
from tsunax.run.history import Clock, History
from tsunax.run.part import Part, Watcher
from tsunax.state import TrainState, check_state


class Goal:
    """The `steps` or the `epochs` at which a run ends, counted from the beginning of training."""

    def __init__(
        self, where: str, steps: int | None, epochs: int | None, has_data: bool = True
    ) -> None:
        for name, value in {"steps": steps, "epochs": epochs}.items():
            if value is not None:
                checks.check_count(value, where, name)
        if not has_data and steps is None:
            got = "no data" if epochs is None else f"epochs={epochs} without data"
            raise WrongTypeError("goal", where, got, "steps=, if there are no data")
        if (steps is None) == (epochs is None):
            both_goals = f"steps={steps} and epochs={epochs}"
            got = "neither steps nor epochs" if steps is None else both_goals
            raise WrongTypeError("goal", where, got, "one of them")
        self.steps: int | None = steps
        self.epochs: int | None = epochs

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
    evaluate_every: int | str
    callbacks: Any  # a function or several; then a tuple
    loggers: Any
    log_every: int
    steps_per_call: Any  # an int, "auto", or None: no compiled loop
    max_bad: int
    extra: Mapping[str, Any]
    dry_run: bool  # every callback is called at the end, also before its steps and events
    progress: bool
    history: History | None
    resume: str
    fast_forward: bool
    checkpoint: Any  # the user's value
    parts: tuple[Part, ...] = ()  # the parts among the callbacks
    evaluate_steps: int | None = None  # evaluate every n steps
    evaluate_epochs: int | None = None  # or every n epochs
    clock: Clock = field(default_factory=Clock)  # starts when the options are made

    def __post_init__(self) -> None:
        where, evaluate_every = "fit()", self.evaluate_every
        error = lambda name, x, expected: WrongTypeError(name, where, trees.describe(x), expected)
        if isinstance(evaluate_every, str) and (
            match := re.fullmatch(r"(?:(\d+) )?epochs?", evaluate_every)
        ):
            evaluate_every = self.evaluate_epochs = int(match[1] or 1)
        elif isinstance(evaluate_every, str):
            expected = "'epoch', 'n epochs' or an int ≥ 1"
            raise WrongTypeError("evaluate_every", where, repr(evaluate_every), expected)
        else:
            self.evaluate_steps = evaluate_every  # pyright: ignore[reportAttributeAccessIssue]
        counts = {"evaluate_every": evaluate_every, "log_every": self.log_every}
        counts["max_bad"] = self.max_bad
        if self.steps_per_call is not None and not checks.is_one_of(self.steps_per_call, ["auto"]):
            counts["steps_per_call"] = self.steps_per_call
        for name, value in counts.items():
            checks.check_count(value, where, name)
        example = "For example lambda state: ts.evaluate(eval_step, state, {'val': data})"
        if self.evaluate is None:
            if self.evaluate_every != "epoch":
                got = f"None, but evaluate_every={self.evaluate_every!r}"
                raise WrongTypeError("evaluate", where, got, "a function")
            self.evaluate_steps = self.evaluate_epochs = None
        elif not callable(self.evaluate):
            raise error("evaluate", self.evaluate, f"f(state) -> {{name: number}}. {example}")
        elif isinstance(self.evaluate, EvalStep):
            raise error("evaluate", self.evaluate, f"f(state). {example}")
        else:
            checks.check_takes("evaluate", where, self.evaluate, f"f(state). {example}", None)
        if not checks.is_one_of(self.resume, ("auto", "must", "never")):
            raise error("resume", self.resume, "'auto', 'must' or 'never'")
        if self.resume == "must" and self.checkpoint is None:
            got, expected = "'must' without checkpoint=", "a path to resume from"
            raise WrongTypeError("resume", where, got, expected)
        if self.history is not None and not isinstance(self.history, History):
            raise error("history", self.history, "a ts.loop.History, to go on with")
        if not isinstance(self.extra, Mapping) or not all(isinstance(x, str) for x in self.extra):
            raise error("extra", self.extra, "{name: arrays}, with str names")
        checks.check_flags("fit()", progress=self.progress)
        functions = _functions("callback", self.callbacks)
        self.parts = tuple(f for f in functions if isinstance(f, Part))
        self.callbacks = tuple(f for f in functions if not isinstance(f, Part))
        self.loggers = () if self.loggers is None else _functions("logger", self.loggers)
        for part in self.parts:
            if part.every != float("inf"):
                checks.check_count(part.every, type(part).__name__, "every")
        for f in self.callbacks:
            checks.check_takes("callback", where, f, "f(run)", None)
        paths = [str(f.path) for f in self.loggers if hasattr(f, "path")]
        # an existing file by its device and number, because it may have several paths
        files = [os.stat(path)[1:3] if os.path.exists(path) else path for path in paths]
        if repeats := [path for i, path in enumerate(paths) if files.count(files[i]) > 1]:
            raise WrongTypeError("logger", where, f"several that write to {repeats[0]}", "one")
        for f in self.loggers:
            checks.check_takes("logger", where, f, "f(row, step=...)", {}, step=0)
        if not processes.current().is_first:
            self.loggers = ()

    @functools.cached_property
    def names(self) -> list[str]:
        """The key of the memory of each callback, and behind all callbacks of each part."""
        names = [_name(f) for f in (*self.callbacks, *self.parts)]
        earlier_counts = [names[:i].count(name) for i, name in enumerate(names)]
        return [
            f"{name} #{n}" if n else name for name, n in zip(names, earlier_counts, strict=True)
        ]

    @functools.cached_property
    def callback_intervals(self) -> list[int]:
        """Callbacks need a boundary at every multiple of these intervals, and at `places`."""
        intervals = [f.every for f in self.callbacks if has_interval(f)]
        return intervals + ([self.log_every] if any(map(is_bare, self.callbacks)) else [])

    @functools.cached_property
    def places(self) -> list[int]:
        return [place for f in self.callbacks for place in getattr(f, "at", ())]

    def deciding(self) -> dict[str, Any]:
        """Settings that decide when a call ends: the same on all processes."""
        names = "evaluate_steps evaluate_epochs log_every steps_per_call max_bad dry_run places"
        settings = {name: getattr(self, name) for name in names.split()}
        settings |= {"goal": str(self.goal), "evaluate": self.evaluate is not None}
        return settings | {"intervals": self.callback_intervals}

    @property
    def watched(self) -> dict[str, str]:
        """{metric that a callback waits for: name of the callback}."""
        all_watches = [f.watches for f in self.callbacks if isinstance(f, Watcher)]
        return {metric: name for watches in all_watches for metric, name in watches.items()}

    @property
    def may_log(self) -> bool:
        """Whether a callback or a part of the user may log any name."""
        return bool(self.parts) or any(getattr(f, "may_log", True) for f in self.callbacks)


def has_interval(callback: object) -> bool:
    return isinstance(getattr(callback, "every", None), int)


def is_bare(callback: object) -> bool:
    has_events = getattr(callback, "events", None) is not None
    return not (has_interval(callback) or hasattr(callback, "at") or has_events)


def _name(callback: Any) -> str:
    """A name that the same callback has in every process: its type and its plain fields."""
    fields = dataclasses.fields(callback) if dataclasses.is_dataclass(callback) else ()
    values = ((field.name, getattr(callback, field.name)) for field in fields)
    plain_fields = [
        f"{name}={x!r}" for name, x in values if isinstance(x, bool | int | float | str)
    ]
    function_name = getattr(callback, "__qualname__", type(callback).__name__)
    return f"{function_name}({', '.join(plain_fields)})" if plain_fields else function_name


def is_callback_due(callback: Any, event: str, step: int) -> bool:
    if event == "step":
        is_due = has_interval(callback) and step % callback.every == 0
        return is_due or step in getattr(callback, "at", ())
    if getattr(callback, "events", None) is not None:
        return event in callback.events
    return is_bare(callback) or (event == "start" and hasattr(callback, "at"))


def _functions(name: str, functions) -> tuple[Any, ...]:
    """One function or several. Raises WrongTypeError for any other value."""
    listed = tuple(functions) if isinstance(functions, list | tuple) else (functions,)
    for f in listed:
        is_part = isinstance(f, Part) and name == "callback"
        if not (callable(f) or is_part) or isinstance(f, type):
            fix = f"Call it: {f.__name__}(...)." if isinstance(f, type) else ""
            fix = "Give it to callbacks=." if isinstance(f, Part) else fix
            if name == "logger" and isinstance(f, str):
                fix = f"For example ts.loggers.csv({f!r})."
            raise WrongTypeError(name, "fit()", trees.describe(f), "a function", fix)
    return listed


def check_step(where: str, step: object, state: PyTree) -> None:
    """Raise WrongTypeError unless `step` is a step, and `state` a state for it."""
    if not callable(step):
        from tsunax._step.loss_fn_errors import A_STEP

        fix = "Make one: ts.train_step(loss_fn)."
        if isinstance(step, TrainState):
            fix = f"The order is {where[:-1]}step, state, data, ...)."
        raise WrongTypeError("step", where, trees.describe(step), A_STEP, fix)
    if isinstance(step, TrainStep):
        check_state(state, where)
        return
    checks.check_all_alive(state, "state")
    if not jax.tree.leaves(state):
        raise WrongTypeError("state", where, trees.describe(state), "a tree of arrays")
