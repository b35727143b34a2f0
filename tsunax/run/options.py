"""What `fit` was asked for, checked before anything runs: a goal, when to evaluate, whom to call."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from tsunax._core import Function, PyTree, checks, trees
from tsunax._step.loss_fn_errors import A_STEP
from tsunax.errors import WrongTypeError
from tsunax.program import TrainStep
from tsunax.state import TrainState, check_state
from tsunax.states import COUNTED


class Goal:
    """`steps` or `epochs`, whichever was given: a place to reach, not a number to add."""

    def __init__(
        self, where: str, steps: int | None, epochs: int | None, has_data: bool = True
    ) -> None:
        given = {"steps": steps, "epochs": epochs}
        check_whole(where, **{name: x for name, x in given.items() if x is not None})
        if not has_data and steps is None:
            got = "no data" if epochs is None else f"epochs={epochs} without data"
            raise WrongTypeError("goal", where, got, "steps=, if there are no data")
        if (steps is None) == (epochs is None):
            both = f"steps={steps} and epochs={epochs}"
            got = "neither steps nor epochs" if steps is None else both
            raise WrongTypeError("goal", where, got, "one of them")
        self.steps: int | None = steps
        self.epochs: int | None = epochs

    def left(self, step: int) -> float:
        return float("inf") if self.steps is None else self.steps - step

    def reached(self, step: int, epoch: int) -> bool:
        return step >= self.steps if self.steps is not None else epoch >= (self.epochs or 0)

    def __str__(self) -> str:
        return f"steps={self.steps}" if self.steps is not None else f"epochs={self.epochs}"


@dataclass(frozen=True)
class Options:
    """What `fit` was given, checked."""

    goal: Goal
    evaluate: Function | None
    evaluate_steps: int | None  # every so many steps
    evaluate_epochs: int | None  # or every so many epochs
    callbacks: tuple[Any, ...]
    loggers: tuple[Any, ...]
    log_every: int
    steps_per_call: Any  # an int, "auto", or None: no compiled loop
    max_bad: int
    extra: Mapping[str, Any]
    saver: Any  # `Checkpoints`, or None
    dry_run: bool  # every callback is called at the end, whatever it waits for

    @functools.cached_property
    def names(self) -> list[str]:
        """The key of each callback's memory, wherever it stands among the others."""
        names = [_name(f) for f in self.callbacks]
        before = [names[:i].count(name) for i, name in enumerate(names)]
        return [f"{name} #{n}" if n else name for name, n in zip(names, before, strict=True)]

    @functools.cached_property
    def intervals(self) -> list[int]:
        """A boundary lies at every multiple of these."""
        found = [f.every for f in self.callbacks if is_every(f)]
        found += [self.log_every] if any(map(is_bare, self.callbacks)) else []
        found += [self.saver.every] if self.saver is not None and self.saver.every else []
        return found + ([self.evaluate_steps] if self.evaluate_steps else [])

    @functools.cached_property
    def places(self) -> list[int]:
        """And at these steps."""
        return [place for f in self.callbacks for place in getattr(f, "at", ())]

    def deciding(self) -> dict[str, Any]:
        """What decides when a call ends: the same on all processes."""
        names = "evaluate_steps evaluate_epochs log_every steps_per_call max_bad dry_run intervals "
        names += "places listens_to_epochs"
        found = {name: getattr(self, name) for name in names.split()}
        return {"goal": str(self.goal), "evaluate": self.evaluate is not None, **found}

    @property
    def listens_to_epochs(self) -> bool:
        is_asked = self.evaluate_epochs or self.saves_epochs
        return bool(is_asked) or any(map(is_bare, self.callbacks))

    @property
    def saves_epochs(self) -> bool:
        """Whether a checkpoint is made at the end of every epoch: where nobody said when."""
        return self.saver is not None and not self.saver.every

    def next_boundary(self, step: int) -> float:
        """The first step beyond this one that somebody waits for."""
        found = [(step // n + 1) * n for n in self.intervals]
        found += [place for place in self.places if place > step]
        return min(*found, self.goal.left(0), float("inf"))

    def events(self, step: int) -> list[str]:
        """What happens at this step, in order."""
        due = {
            "step": any(wants(f, "step", step) for f in self.callbacks),
            "log": step % self.log_every == 0,
            "evaluate": bool(self.evaluate_steps) and step % self.evaluate_steps == 0,
        }
        return [event for event, is_due in due.items() if is_due]


def is_every(callback: object) -> bool:
    return isinstance(getattr(callback, "every", None), int)


def is_bare(callback: object) -> bool:
    has_events = getattr(callback, "events", None) is not None
    return not (is_every(callback) or hasattr(callback, "at") or has_events)


def _name(callback: Any) -> str:
    """A name that the same callback has in every process: its type and its plain fields."""
    fields = dataclasses.fields(callback) if dataclasses.is_dataclass(callback) else ()
    values = ((field.name, getattr(callback, field.name)) for field in fields)
    told = [f"{name}={x!r}" for name, x in values if isinstance(x, bool | int | float | str)]
    own = getattr(callback, "__qualname__", type(callback).__name__)
    return f"{own}({', '.join(told)})" if told else own


def wants(callback: Any, event: str, step: int) -> bool:
    if event == "step":
        is_due = is_every(callback) and step % callback.every == 0
        return is_due or step in getattr(callback, "at", ())
    if getattr(callback, "events", None) is not None:
        return event in callback.events
    return is_bare(callback) or (event == "start" and hasattr(callback, "at"))


def options_of(
    goal: Goal,
    evaluate: Function | None,
    every: int | str,
    callbacks: Any,
    logger: Any,
    log_every: int,
    steps_per_call: int | str | None,
    max_bad: int,
    extra: Mapping[str, Any],
    saver: Any,
    dry_run: bool,
) -> Options:
    """The arguments of `fit`, each checked by itself."""
    where = "fit()"
    steps: Any = None
    epochs: int | None = None
    if evaluate is not None:
        if not callable(evaluate):
            got, expected = trees.describe(evaluate), "f(state) -> {name: number}"
            fix = "For example lambda state: ts.evaluate(eval_step, state, data)."
            raise WrongTypeError("evaluate", where, got, expected, fix)
        check_takes("evaluate", where, evaluate, "f(state)", None)
    if isinstance(every, str) and (found := re.fullmatch(r"(?:(\d+) )?epochs?", every)):
        epochs = int(found[1] or 1)
    else:
        steps = every
    evaluate_every = every if epochs is None else epochs
    check_whole(where, evaluate_every=evaluate_every, log_every=log_every, max_bad=max_bad)
    if evaluate is None:
        if every != "epoch":
            got, fix = f"None, but evaluate_every={every!r}", "It says when to call evaluate."
            raise WrongTypeError("evaluate", where, got, "a function", fix)
        steps = epochs = None
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        expected = "{name: arrays}, with str names"
        raise WrongTypeError("extra", where, trees.describe(extra), expected)
    checks.check_arrays(extra, "extra", "Bind it to the step instead, with functools.partial.")
    if steps_per_call is not None and not checks.is_one_of(steps_per_call, ["auto"]):
        check_whole(where, steps_per_call=steps_per_call)
    callbacks, loggers = _functions("callback", callbacks), _functions("logger", logger)
    for f in callbacks:
        check_takes("callback", where, f, "f(run)", None)
    for f in loggers:
        check_takes("logger", where, f, "f(row, step=...)", {}, step=0)
    if jax.process_index():
        loggers = ()
    when = goal, evaluate, steps, epochs
    settings = log_every, steps_per_call, max_bad, extra, saver, dry_run
    return Options(*when, callbacks, loggers, *settings)


def _functions(name: str, given) -> tuple[Any, ...]:
    """One function or several. Raises WrongTypeError for what is none."""
    found = tuple(given) if isinstance(given, list | tuple) else (given,)
    if name == "logger" and given is None:
        found = ()
    for f in found:
        if not callable(f) or isinstance(f, type):
            fix = f"Call it: {f.__name__}(...)." if isinstance(f, type) else ""
            raise WrongTypeError(name, "fit()", trees.describe(f), "a function", fix)
    return found


def check_step(where: str, step: object, state: PyTree) -> None:
    """Raise WrongTypeError for what is no step, or no state for it."""
    if not callable(step):
        fix = "Make one: ts.train_step(loss_fn)."
        if isinstance(step, TrainState):
            fix = f"The order is {where[:-1]}step, state, data, ...)."
        raise WrongTypeError("step", where, trees.describe(step), A_STEP, fix)
    if isinstance(step, TrainStep):
        check_state(state, where)
        return
    names = [p.name for p in checks.parameters_of(step)]
    if isinstance(state, COUNTED) and names[:1] == ["params"]:
        fix = f"Give ts.train_step({getattr(step, '__name__', 'loss_fn')})."
        raise WrongTypeError("step", where, trees.describe_call(step), A_STEP, fix)
    checks.check_all_alive(state, "state")
    if not jax.tree.leaves(state):
        raise WrongTypeError("state", where, trees.describe(state), "a tree of arrays")


def check_takes(
    what: str, where: str, f: Function, expected: str, *args: Any, **kwargs: Any
) -> None:
    """Raise WrongTypeError if a function cannot be called so, as far as its signature tells."""
    try:
        inspect.signature(f).bind(*args, **kwargs)
    except TypeError:
        raise WrongTypeError(what, where, trees.describe_call(f), expected) from None
    except ValueError:  # some builtins have none
        return


def check_whole(where: str, **values: Any) -> None:
    """Raise WrongTypeError for what is no int ≥ 1."""
    for name, value in values.items():
        checks.check_count(value, where, name)
