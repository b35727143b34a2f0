"""Callbacks: what happens between the steps of a run, as plain values.

A callback is any `f(run) -> None | state`. These are frozen values that print as the call that
makes them. Their memory is `run.memory`, a dict that is saved as JSON with the run. The loop makes
a boundary at the multiples of `callback.every` and at the steps `callback.at`; a callback with
`callback.events` is called at these events alone. `Watching` gets each new value of a metric once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tsunax._core import PyTree, Where, checks
from tsunax._core.cadence import Cadence, When, cadence_of
from tsunax.errors import HyperparameterError
from tsunax.hyper import adjust, freeze, hyperparams, thaw
from tsunax.run.part import Part, Watcher
from tsunax.run.profiling import profile
from tsunax.run.rewinding import rewind
from tsunax.run.verifying import verify
from tsunax.run.watchdog import watchdog

if TYPE_CHECKING:
    from tsunax.run.run import Run

__all__ = [
    "At", "Part", "adjust_at", "early_stopping", "every", "freeze_at", "patience", "plateau",
    "profile", "rewind", "thaw_at", "throttle", "time_limit", "verify", "watchdog",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__  # for completion: `adjust` and `thaw` are no callbacks


def _check_number(where: str, name: str, value: float, limit: float = math.inf) -> None:
    if not 0 <= value < limit:
        raise HyperparameterError(name, where, value, f"≥ 0 and < {limit:g}")


@dataclass(frozen=True)
class Watching(Watcher):
    """A callback that counts the new values of a metric that are no better than the best."""

    metric: str = "val/loss"
    _: KW_ONLY
    patience: int = 5
    min_delta: float = 0.0
    mode: Literal["min", "max"] | None = None  # None: "min" for a name with "loss"
    #: It logs no numbers.
    may_log = False

    def __post_init__(self) -> None:
        where = f"{type(self).__name__}()"
        if self.mode is None and "loss" in self.metric:
            object.__setattr__(self, "mode", "min")
        checks.check_choice(self.mode, where, f"mode for {self.metric!r}", ("min", "max"))
        checks.check_count(self.patience, where, "patience")
        _check_number(where, "min_delta", self.min_delta)

    @property
    def watches(self) -> dict[str, str]:
        """{metric: name of this callback for messages}, a dict of one str."""
        return {self.metric: f"{type(self).__name__}()"}

    @property
    def events(self) -> tuple[str, ...] | None:
        """The events that bring the metric: evaluations for "val/loss"; else None, for all."""
        return ("start", "evaluate") if "/" in self.metric else None

    def news(self, run: Run) -> tuple[int, float] | None:
        """(step, value) of the metric if it is new.

        None at the end of a run, because a run that continues does not have the numbers of the end.
        """
        newest = run.history.newest(self.metric)
        if newest is None or newest[0] == run.memory.get("seen") or run.event == "end":
            return None
        run.memory["seen"] = newest[0]
        return newest

    def wait(self, memory: dict[str, Any], step: int, value: float) -> None:
        """Count the values that do not beat the best by more than `min_delta`; NaN never does."""
        sign = 1 if self.mode == "min" else -1  # with it, lower is better in both modes
        bar = sign * memory["best"] - self.min_delta if "best" in memory else math.inf
        if sign * value < bar:
            memory.update(best=value, best_step=step, wait=0)
        else:
            memory["wait"] = memory.get("wait", 0) + 1


# How often: wrappers


@dataclass(frozen=True)
class every:
    """`fn(run)` at every multiple of a number of steps, of "2 epochs", or every "10 minutes".

    A tuple means whichever comes first: `every((500, "10 minutes"), f)`. A duration (in "s", "min",
    "h" or "d", or a `timedelta`) counts from the last call, or the start of `fit`. With it `fn`
    should not change the state, because the run would not repeat; `fit` warns if it does. Raises
    TypeError or HyperparameterError for another interval, or unless `fn` is a function of a run.

    >>> every(100, print)
    every(interval=100, fn=<built-in function print>)
    """

    interval: When
    fn: Callable[[Run], Any]

    def __post_init__(self) -> None:
        if cadence_of(self.interval, "every()", "interval") == Cadence():
            raise HyperparameterError("interval", "every()", "()", "an interval: () is never")
        checks.check_takes("fn", "every()", self.fn, "f(run)", None)

    @property
    def every(self) -> When:
        """How often `fit` calls it: the `interval`."""
        return self.interval

    def __call__(self, run: Run) -> PyTree:
        return self.fn(run)


@dataclass(frozen=True)
class throttle:
    """`fn(run)` at most once in `seconds`, also if there are more boundaries.

    `leading` calls it at the first boundary, else `seconds` later. With `trailing`, a call that
    came too early is made up for at the first boundary after the wait, or at the end of the run.
    As Flux's `throttle`, without its timer thread. Wall clocks of several processes differ: `fn`
    should not change the state there. HyperparameterError unless `seconds` is finite and ≥ 0.
    """

    fn: Callable[[Run], Any]
    seconds: float
    leading: bool = True
    trailing: bool = False

    def __post_init__(self) -> None:
        _check_number("throttle()", "seconds", self.seconds)

    def __call__(self, run: Run) -> PyTree:
        memory, clock = run.memory, time.time()
        # If the clock was set back, the wait is over.
        is_waiting = clock < memory.get("throttled_until", 0.0) <= clock + self.seconds
        has_missed_call = memory.get("throttled", False)
        if is_waiting and not (run.event == "end" and has_missed_call):
            memory["throttled"] = has_missed_call or self.trailing
            return None
        # Without `leading` the first boundary only begins a wait; its call comes after it.
        misses_call = not (self.leading or has_missed_call)
        memory.update(throttled_until=clock + self.seconds, throttled=misses_call)
        return None if misses_call else self.fn(run)


# When to stop


@dataclass(frozen=True)
class early_stopping(Watching):
    """Stop when a metric has not improved for `patience` new values.

    A value improves if it is more than `min_delta` better than the best; only such a value becomes
    the new best. The first number always improves. NaN and ±inf stop the run at once. `mode` is
    "min" (the default if the name contains "loss") or "max"; HyperparameterError for another name
    without it. `fit` raises RowError for a metric that no row can have, or warns at the end.

    >>> early_stopping("val/accuracy", mode="max", patience=3)
    early_stopping(metric='val/accuracy', patience=3, min_delta=0.0, mode='max')

    As in Keras and Lightning. Flux's moves its bar with improvements below the delta, and forgets
    its best on a NaN.
    """

    def __call__(self, run: Run) -> None:
        memory, metric = run.memory, self.metric
        if news := self.news(run):
            step, value = news
            if not math.isfinite(value):
                return run.stop(f"{metric} is {value} at step {step}")
            self.wait(memory, step, value)
        # A run that this callback has stopped before stops again at its start.
        if memory.get("wait", 0) >= self.patience:
            best = f"{memory['best']:.6g} at step {memory['best_step']}"
            run.stop(f"{metric} is no better than {best} for {memory['wait']} values")


@dataclass(frozen=True)
class patience:
    """Stop when `predicate(run)` has been true n times in a row.

    The predicate is called once for each step that has a boundary, so at every multiple of
    `log_every`; inside `every(k, ...)` at multiples of k. The start and the end of a run do
    not count. Flux's `patience`, with its count in the run's memory. Raises TypeError or
    HyperparameterError unless `predicate` is a function of a run and n an int ≥ 1.

    >>> patience(lambda run: run.metrics.get("val/accuracy", 0) > 0.99, 3).n
    3
    """

    predicate: Callable[[Run], Any]
    n: int

    def __post_init__(self) -> None:
        checks.check_takes("predicate", "patience()", self.predicate, "f(run)", None)
        checks.check_count(self.n, "patience()", "n")

    def __call__(self, run: Run) -> None:
        memory = run.memory
        if run.event not in ("start", "end") and memory.get("asked") != run.step:
            memory["asked"] = run.step
            memory["times"] = memory.get("times", 0) + 1 if self.predicate(run) else 0
        if memory.get("times", 0) >= self.n:
            name = getattr(self.predicate, "__name__", "the predicate")
            run.stop(f"{name} was true {memory['times']} times in a row")


@dataclass(frozen=True)
class time_limit:
    """Stop after `seconds` of training, counted over resumed runs too.

    It looks at the clock at every boundary, so a run may be `log_every` steps longer. An hour is
    `time_limit(3600)`. HyperparameterError unless `seconds` is finite and ≥ 0.
    """

    seconds: float
    #: It logs no numbers.
    may_log = False
    #: The keys of its memory that a rewind does not restore.
    outlives_rewinds: ClassVar[tuple[str, ...]] = ("elapsed", "since")

    def __post_init__(self) -> None:
        _check_number("time_limit()", "seconds", self.seconds)

    def __call__(self, run: Run) -> None:
        memory, clock = run.memory, time.monotonic()
        if run.event != "start":  # at the start, `since` may be the clock of another process
            memory["elapsed"] = memory.get("elapsed", 0.0) + clock - memory.get("since", clock)
        memory["since"] = clock
        if memory.get("elapsed", 0.0) >= self.seconds:
            run.stop(f"the time limit of {self.seconds:g} s is reached")


# What to change


@dataclass(frozen=True)
class plateau(Watching):
    """Multiply the learning rate by `factor` when a metric stops improving.

    It does so after `patience` values of the metric without improvement (`min_delta` and `mode` as
    in `early_stopping`; NaN is no improvement), down to `min_learning_rate`; a lower rate stays.
    The rate of each group gets the factor, inside `where` only. A rate that follows a schedule
    leaves it: from then on it is constant, its last value times `factor`. ReduceLROnPlateau without
    cooldown.

    Raises as `early_stopping`, and HyperparameterError at the start without a live learning rate,
    and for a population.

    >>> plateau(factor=0.1, patience=3).metric
    'val/loss'
    """

    _: KW_ONLY
    factor: float = 0.5
    min_learning_rate: float = 0.0
    where: Where = "**"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_number("plateau()", "factor", self.factor, 1)
        _check_number("plateau()", "min_learning_rate", self.min_learning_rate)

    def __call__(self, run: Run) -> PyTree:
        if run.event == "start":
            _rates(run.state, self.where)
        memory, news = run.memory, self.news(run)
        if news is None:
            return None
        self.wait(memory, *news)
        if memory["wait"] < self.patience:
            return None
        memory["wait"] = 0
        state, rates = _rates(run.state, self.where)
        minimum = self.min_learning_rate
        new_rates = {name: max(x * self.factor, min(x, minimum)) for name, x in rates.items()}
        changes = (f"{name} {x:.3g} → {new_rates[name]:.3g}" for name, x in rates.items())
        run.history.mark("plateau", run.step, ", ".join(changes))
        return adjust(state, **new_rates)


def _rates(state, where) -> tuple[Any, dict[str, float]]:
    """The state with groups cut at `where`, and the learning rates of the leaves by flat name."""
    state = adjust(state, where)
    old_numbers = hyperparams(state)
    floats = [x for x in old_numbers.values() if isinstance(x, float)]
    if not floats:  # a metric is of one member of a population, and each has its own rates
        got, fix = "arrays, as of a population", "Adjust them in your own callback."
        raise HyperparameterError("hyperparameters", "plateau()", got, "numbers", fix)
    another_rate = 1 + 2 * max(floats)
    # the rates of `where` are the numbers that change with its learning rate
    new_numbers = hyperparams(adjust(state, where, learning_rate=another_rate))
    return state, {name: x for name, x in old_numbers.items() if x != new_numbers[name]}


@dataclass(frozen=True)
class At:
    """`change(state, where, **values)` at one step, once for a run that is resumed (see `thaw_at`).

    The change is tried at the start of the run, so that a pattern without a leaf (PatternError) or
    an unknown name (HyperparameterError) raises at once. Raises WrongTypeError or
    HyperparameterError unless `step` is an int ≥ 0.
    """

    step: int
    change: Callable[..., Any]
    where: Where
    values: dict[str, Any]
    #: It logs no numbers.
    may_log = False

    def __post_init__(self) -> None:
        step = checks.check_count(self.step, f"{self.change.__name__}_at()", "step", 0)
        object.__setattr__(self, "step", step)

    @property
    def at(self) -> tuple[int]:
        """The steps at which the loop makes a boundary for this change: a tuple of one int."""
        return (self.step,)

    def __call__(self, run: Run) -> PyTree:
        is_early = run.step < self.step
        if run.memory.get("done") or (is_early and run.event != "start"):
            return None
        state = self.change(run.state, self.where, **self.values)
        if is_early:
            return None
        run.memory["done"] = True
        values = [f"{name}={value}" for name, value in self.values.items()]
        run.history.mark(self.change.__name__, run.step, ", ".join([str(self.where), *values]))
        return state


def thaw_at(step: int, where: Where = "**") -> At:
    """`ts.thaw(state, where)` at a step: to train a head first, then the body. Raises as `At`."""
    return At(step, thaw, where, {})


def freeze_at(step: int, where: Where) -> At:
    """`ts.freeze(state, where)` at a step.

    The first freeze compiles once more, unless `setup` got `freezable=True`. Raises as `At`.
    """
    return At(step, freeze, where, {})


def adjust_at(step: int, where: Where = "**", /, **values: Any) -> At:
    """`ts.adjust(state, where, **values)` at a step.

    The first values of a part of the params compile once more. Raises as `At`, and
    HyperparameterError without values.

    >>> adjust_at(1000, learning_rate=1e-4).at
    (1000,)
    """
    if not values:
        raise HyperparameterError("values", "adjust_at()", "none", "adjust_at(9, learning_rate=1)")
    return At(step, adjust, where, values)
