"""Searches before a run: the batch that memory allows, and the learning rate at which the loss falls fastest.

    size, report = find_batch_size(step, state, example)       compiles, and executes nothing
    n, report = find_accumulation(step, state, example, 512)   the same for a batch that is given
    rate, report = find_learning_rate(step, state, data)       a hundred steps on a copy, in one compiled loop

Functions of their arguments: the state, its key and the place of the data are afterwards what they were, bit by bit.
What a program needs of a device is known to `_memory.py`.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax import _checks, _feed, _fused, _memory, _place, _tree, distributed, figures
from tsunax._loss import rows_of
from tsunax._members import over_members
from tsunax._memory import Need
from tsunax.errors import DataError, DoesNotFitError, HyperparameterError, MissingLibraryError, WrongTypeError, message
from tsunax.hyper import adjust
from tsunax.program import TrainStep
from tsunax.state import TrainState, own

__all__ = [
    "RangeTest",
    "Report",
    "Trial",
    "find_accumulation",
    "find_batch_size",
    "find_learning_rate",
]

_MOST = 1 << 31  # rows, where nobody gives a maximum
_FIRST = 8  # times the start: batches of few rows are compiled into other programs than those of many


@dataclass(frozen=True)
class Trial:
    """One size that was looked at."""

    size: int
    fits: bool
    how: str  # "compiled" or "executed"
    need: Need | None  # None where it was only executed
    seconds: float
    said: str = ""  # why it does not fit, where that is not a matter of numbers


@dataclass(frozen=True)
class Report:
    """What a search saw, in its order; prints as a table. Bytes are those of one device."""

    what: str
    found: int
    trials: tuple[Trial, ...]
    limit: int | None = None  # bytes that were allowed, the margin taken off
    source: str = ""  # of that number
    note: str = ""

    def __repr__(self) -> str:
        parts = [field.name for field in dataclasses.fields(Need)]
        if all(trial.need is None for trial in self.trials):
            parts = []
        lines = [["size", *parts, *(["need"] if parts else []), "fits", "how", "s"]]
        for t in self.trials:
            bytes = [getattr(t.need, part) for part in parts] + [t.need.total] if t.need else [None] * (len(parts) + 1)
            shown = ["" if b is None else _tree.bytes_str(b) for b in bytes] if parts else []
            lines.append([str(t.size), *shown, "yes" if t.fits else "no", t.how, f"{t.seconds:.1f}", t.said])
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        rows = [
            "  ".join([*(f"{x:>{n}}" for x, n in zip(line, widths, strict=False)), *line[len(widths) :]])
            for line in lines
        ]
        within = "" if self.limit is None else f", within {_tree.bytes_str(self.limit)} ({self.source})"
        return "\n".join(
            [f"{self.what} {self.found}{within}", *(row.rstrip() for row in rows), *filter(None, [self.note])]
        )


class _Beyond(Exception):
    """The data have no batch of that size; `rows` is what they have."""

    def __init__(self, rows: int):
        self.rows = rows


class _Search:
    """Sizes in ascending order, and what was found of them. `attempt(size) -> Trial`, or raises _Beyond."""

    def __init__(self, sizes: Sequence[int], attempt: Callable[[int], Trial], most: int):
        self.sizes, self.attempt, self.most = sizes, attempt, most
        self.trials: list[Trial] = []

    def floor(self, x: float) -> int:
        """The index of the largest size that is not above x; 0 if all are."""
        return max(0, bisect.bisect_right(self.sizes, min(x, self.sizes[-1])) - 1)

    def try_(self, at: int) -> Trial | None:
        """The trial of a size; None, and fewer sizes, where the data end before."""
        try:
            trial = self.attempt(self.sizes[at])
        except _Beyond as beyond:
            fewer = self.sizes[: bisect.bisect_right(self.sizes, beyond.rows)]
            self.sizes = fewer if fewer or not self.sizes else self.sizes[:0]
            return None
        self.trials.append(trial)
        return trial

    @property
    def best(self) -> int | None:
        return max((t.size for t in self.trials if t.fits), default=None)

    @property
    def is_over(self) -> bool:
        return len(self.trials) >= self.most or not self.sizes

    def by_doubling(self, start: int) -> None:
        """Twice as much until it fails, half as much until it fits, then by halves between the two."""
        best, at = -1, self.floor(start)
        worst = len(self.sizes)
        failed = False
        while not self.is_over and best + 1 < worst:
            trial = self.try_(min(at, worst - 1))
            if trial is None:
                worst = min(worst, len(self.sizes))
                at = min(at, worst - 1)
                continue
            at = min(at, worst - 1)
            best, worst, failed = (at, worst, failed) if trial.fits else (best, at, True)
            if best >= 0 and failed:
                at = (best + worst) // 2
            else:
                at = self.floor(2 * trial.size) if trial.fits else self.floor(trial.size // 2)

    def by_line(self, start: float, limit: int) -> None:
        """Where the line through two trials meets the limit, until nothing larger is left to look at."""
        at, before = self.floor(start), None
        while not self.is_over:
            trial = self.try_(at)
            if trial is None:
                at = min(at, len(self.sizes) - 1)
                if self.sizes and any(t.size == self.sizes[at] for t in self.trials):
                    return
                continue
            error = None if before is None else abs(before(trial.size) - _total(trial))
            at, before = self._next(limit, error)
            if any(t.size == self.sizes[at] for t in self.trials):
                return

    def _next(self, limit: int, error: float | None) -> tuple[int, Callable | None]:
        """What to look at next, a size already seen to end; and the line that says what it will need."""
        known = {t.size: _total(t) for t in self.trials}
        lo = max((n for n, need in known.items() if need <= limit), default=None)
        hi = min((n for n, need in known.items() if need > limit and n > (lo or 0)), default=None)
        least = 0 if lo is None else bisect.bisect_left(self.sizes, lo)
        most = len(self.sizes) if hi is None else bisect.bisect_left(self.sizes, hi)  # below it
        if most <= least + (lo is not None):
            return least, None
        nearest = sorted((n for n in known if known[n] < math.inf), key=lambda n: abs(known[n] - limit))[:2]
        for pair in (nearest, [n for n in (lo, hi) if n is not None]):
            if len(pair) < 2:
                continue
            a, b = sorted(pair)
            slope = (known[b] - known[a]) / (b - a)
            if not 0 < slope < math.inf:
                continue
            line = lambda n, a=a, slope=slope: known[a] + slope * (n - a)
            at = self.floor(a + (limit - known[a]) / slope)
            if least < at < most or (lo is None and at < most) or (hi is None and at > least):
                return min(at, most - 1), line
            if at == least:  # nothing larger, if the line has been right
                is_sure = error is not None and line(self.sizes[least + 1]) - error > limit
                return (least if is_sure else least + 1), line
        if hi is None:
            return self.floor(2 * (lo or 1)), None
        if lo is None:
            return self.floor(hi / 2), None
        middle = math.sqrt(lo * hi) if hi > 4 * lo else (lo + hi) / 2
        return min(max(self.floor(middle), least + 1), most - 1), None


def _total(trial: Trial) -> float:
    return math.inf if trial.need is None else trial.need.total


def find_batch_size(
    step: Callable,
    state: Any = None,
    example: Any = None,
    *,
    mode: str = "power",
    method: str = "analyse",
    start: int = 1,
    max_size: int | None = None,
    multiple_of: int = 1,
    max_trials: int = 25,
    memory: int | str | None = None,
    margin: float = 0.05,
    confirm: bool = False,
    steps_per_trial: int = 3,
    **extra: Any,
) -> tuple[int, Report]:
    """The largest batch with which a step fits into memory: `(size, report)`.

        compiled = step.lower(state, batch_of(size)).compile()
        state + batch + temporary + results not in place of the state  <=  (1 - margin) * memory

    The real step is compiled at a few sizes, and XLA says what each program needs: rule, accumulation, precision and
    sharding are in it, and nothing is executed or allocated. The sizes follow a line through those that were seen:
    three are enough where memory grows evenly. What is returned was compiled (or executed), and did fit.

    Args:
      step: a `train_step`, or any jitted `(state, batch, **extra) -> (state, ...)`. With method="run" and no state,
        a function of the size, which fails where memory ends.
      state: arrays, or shapes (`jax.eval_shape(lambda: ts.setup(rule, params))`). It is not changed.
      example: a batch of any number of rows, or its shapes; or a function of the size that gives a batch, or new data
        of which the first batch is taken: a shorter one ends the search at what there is.
      mode: "power" looks at start, 2 start, 4 start, ... (and start / 2, ...); "binsearch" at all sizes.
      method: "analyse", or "run": execute `steps_per_trial` steps at each size, twice as many rows until memory ends,
        then in "binsearch" by halves; for backends that analyse nothing. On a CPU, where an end of memory is the end of
        the process, it executes only what by analysis fits.
      max_size, multiple_of, max_trials: hold in both modes. Sizes are multiples of `multiple_of`, and of the step's
        `accumulate` times the parts into which a mesh cuts rows; they count the rows of all devices and processes.
      memory: bytes, or "80GiB", for state and step on one device; by default what the device gives to this process less
        what others hold there, on a CPU what is free on this machine.
      margin: the part of it that stays free, for batches on their way, evaluation, and what XLA does not count.
      confirm: also execute `steps_per_trial` steps at the size found, on a copy of the state, and look at half of it
        where memory ends. A copy that finds no room is said in the report.
      extra: arguments for the step, as in `step(state, batch, **extra)`.

    Raises DoesNotFitError where the smallest size does not fit; HyperparameterError and WrongTypeError for arguments
    that make no sense. Source of the search by trials: Lightning's and toma's batch size finders.

    >>> import jax.numpy as jnp
    >>> import tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones((256, 256))})
    >>> size, report = find_batch_size(step, state, jax.ShapeDtypeStruct((1, 256), jnp.float32), memory="72MiB")
    >>> size, report.trials[0].how
    (8192, 'compiled')
    """
    where = "find_batch_size()"
    for name, n in {"start": start, "multiple_of": multiple_of, "max_trials": max_trials}.items():
        _check_number(n, where, name)
    _check_number(steps_per_trial, where, "steps_per_trial")
    _check_choice("mode", mode, ("power", "binsearch"), where)
    _check_choice("method", method, ("analyse", "run"), where)
    if isinstance(margin, bool) or not _checks.is_real(margin) or not 0 <= margin < 1:
        raise HyperparameterError(message("margin", where, _tree.describe(margin), "a number from 0 to below 1"))
    if max_size is not None:
        _check_number(max_size, where, "max_size")
        if max_size < start:
            raise HyperparameterError(message("max_size", where, max_size, f"start={start} or more"))
    bare = state is None
    unit = multiple_of if bare else math.lcm(multiple_of, _parts(state) * getattr(step, "accumulate", 1))
    if max_size is not None and max_size < unit:
        raise HyperparameterError(message("max_size", where, max_size, f"{unit} or more, of which sizes are multiples"))
    sizes = _sizes(mode, start, unit, max_size or _MOST)
    if bare and (method != "run" or not callable(step)):
        raise WrongTypeError(message("state", where, "None", "a state", "find_batch_size(step, state, example)."))
    if not bare:
        _check_parts(step, example, where)
        if method == "analyse" and not hasattr(step, "lower"):
            fix = 'jax.jit it, or method="run".'
            raise WrongTypeError(message("step", where, _tree.describe(step), "one that can be lowered", fix))
    limit, source = (None, "") if bare else _limit(memory, state, margin, where)
    trials = _Trials(step, state, example, extra, limit, steps_per_trial)
    if method == "analyse":
        search = _Search(sizes, trials.compiled, max_trials)
        search.by_line(_FIRST * max(start, unit), limit or 0)
    else:
        search = _Search(sizes, trials.called if bare else trials.executed, max_trials)
        search.by_doubling(start)
    seen, note = search.trials, ""
    if search.best is None:
        raise _no_size(where, seen, limit, source)
    size = search.best
    if confirm and method == "analyse":
        size, note = _confirmed(trials, search, size)
        if size is None:
            raise _no_size(where, seen, limit, source)
    return size, Report("batch size", size, tuple(seen), limit, source, note)


def find_accumulation(
    step: TrainStep,
    state: Any,
    example: Any,
    batch_size: int,
    *,
    multiple_of: int = 1,
    max_trials: int = 25,
    memory: int | str | None = None,
    margin: float = 0.05,
    **extra: Any,
) -> tuple[int, Report]:
    """Into how few micro-batches a batch of `batch_size` rows has to be cut to fit into memory: `(n, report)`.

    The dual of `find_batch_size`: the batch, and so the course of training, is given, and memory says how it is
    computed. Then `step = dataclasses.replace(step, accumulate=n)`. Arguments and errors as there; `multiple_of` is of
    the micro-batch's rows, and the report's sizes are micro-batches.

    >>> import jax.numpy as jnp
    >>> import tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean(jnp.tanh(x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones((512, 512))})
    >>> x = jax.ShapeDtypeStruct((1, 512), jnp.float32)
    >>> n, report = find_accumulation(step, state, x, 16384, memory="96MiB")
    >>> n > 1 and report.trials[0].size == 16384
    True
    """
    where = "find_accumulation()"
    if not isinstance(step, TrainStep):
        raise WrongTypeError(message("step", where, _tree.describe(step), "a train_step", "Others cut no batches."))
    for name, n in {"batch_size": batch_size, "multiple_of": multiple_of, "max_trials": max_trials}.items():
        _check_number(n, where, name)
    if isinstance(margin, bool) or not _checks.is_real(margin) or not 0 <= margin < 1:
        raise HyperparameterError(message("margin", where, _tree.describe(margin), "a number from 0 to below 1"))
    _check_parts(step, example, where)
    unit = math.lcm(multiple_of, _parts(state))
    sizes = [n for n in range(unit, batch_size + 1, unit) if batch_size % n == 0]
    if not sizes:
        raise HyperparameterError(message("batch_size", where, batch_size, f"a multiple of {unit}"))
    limit, source = _limit(memory, state, margin, where)

    def attempt(micro: int) -> Trial:
        cut = dataclasses.replace(step, accumulate=batch_size // micro)
        trial = _Trials(cut, state, example, extra, limit, 0).compiled(batch_size)
        return dataclasses.replace(trial, size=micro)

    search = _Search(sizes, attempt, max_trials)
    search.by_line(batch_size, limit)
    if search.best is None:
        raise _no_size(where, search.trials, limit, source)
    n = batch_size // search.best
    return n, Report("accumulate", n, tuple(search.trials), limit, source)


# The learning rate


@dataclass(frozen=True)
class RangeTest:
    """The losses at rising learning rates; `plot()` draws them, and printing shows the answer."""

    name: str  # of the hyperparameter
    mode: str
    rates: np.ndarray  # (points,)
    losses: np.ndarray  # (points,), or (points, seeds); NaN where a step was rejected
    smoothed: np.ndarray  # (points,), over all seeds
    used: int  # points before the loss diverged
    steepest: float
    tenth: float  # of the rate at the minimum

    def __repr__(self) -> str:
        low, high = self.rates[0], self.rates[-1]
        ended = f", diverged at {self.rates[self.used]:.2g}" if self.used < len(self.rates) else ""
        found = f"steepest at {self.steepest:.2g}, a tenth of the minimum's {self.tenth:.2g}"
        return f"{self.name} from {low:.2g} to {high:.2g} in {len(self.rates)} steps{ended}: {found}"

    def plot(self):
        """A matplotlib Figure: the loss over the rate, both suggestions, and the band of several seeds."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            fix = "pip install 'tsunax[plot]'"
            raise MissingLibraryError(message("library", "plot()", "no matplotlib", "matplotlib", fix)) from None
        figure = Figure(figsize=(6.4, 2.8), dpi=150, layout="constrained")
        axes = figure.subplots()
        shown = self.rates[: self.used]
        losses = self.losses[: self.used].reshape(len(shown), -1)
        figures._draw(axes, "loss", {"loss": (shown, self.smoothed[: self.used])})
        if losses.shape[1] > 1:
            axes.fill_between(shown, losses.min(1), losses.max(1), color=figures._COLOURS[0], alpha=0.18, linewidth=0)
        if self.mode == "exponential":
            axes.set_xscale("log")
        for rate, colour, name in ((self.steepest, 1, "steepest"), (self.tenth, 2, "minimum / 10")):
            axes.axvline(rate, color=figures._COLOURS[colour], linewidth=1, label=f"{name}: {rate:.2g}")
        axes.set_xlabel(self.name.replace("_", " "), fontsize=9)
        axes.legend(fontsize=8, frameon=False)
        figure._repr_png_ = functools.partial(figures._png, figure)  # type: ignore[attr-defined]
        return figure


@dataclass(frozen=True)
class _Ramp:
    """The step at a hyperparameter that rises from call to call: `ramp` is (low, ratio or difference, first call)."""

    step: TrainStep
    name: str
    mode: str

    @property
    def masks(self) -> bool:
        return self.step.masks

    def __call__(self, state: TrainState, batch, *, ramp, **extra):
        one = lambda state: self.step.pure(adjust(state, **{self.name: self.rate(ramp, state.calls)}), batch, extra)
        state, info = over_members(one, state)
        return state, {"loss": info.loss, "verdict": info.verdict}

    def rate(self, ramp, calls):
        low, slope, first = ramp
        i = (calls - first).astype(jnp.float32)
        return low * jnp.exp(slope * i) if self.mode == "exponential" else low + slope * i


def find_learning_rate(
    step: TrainStep,
    state: TrainState,
    data: Any,
    *,
    low: float = 1e-8,
    high: float = 1.0,
    points: int = 100,
    mode: str = "exponential",
    smooth: float = 0.9,
    stop: float = 4.0,
    seeds: int | None = None,
    name: str = "learning_rate",
    **extra: Any,
) -> tuple[float, RangeTest]:
    """The learning rate at which the loss falls fastest, by a range test: `(rate, report)`.

        for i in range(points):
            state = ts.adjust(state, learning_rate=low * (high / low) ** (i / (points - 1)))
            state, info = step(state, next(batches))

    on a copy of the state, in the compiled loop of `train_steps`. The losses end where their exponential average
    (bias-corrected, `smooth`) is above `stop` times its minimum, or a step is rejected. `rate` is where they fall most
    steeply: of lines through the points around each, a sixth of the range wide. A tenth of the rate at the minimum of
    the average is in the report.

    Args:
      data: as for `fit`; read anew after its end, and put back to its place. What can be read only once is refused.
      mode: "exponential" rates, or "linear" ones.
      seeds: so many runs at once, from keys folded from the state's: the mean is looked at, the band is drawn. `state`
        may then be a function of a key that makes one, so that each starts elsewhere.
      name: of the hyperparameter, where there are several: "learning_rate@head", "1.learning_rate".
      extra: arguments for the step.

    Raises HyperparameterError for numbers that make no sense, a rule without that live name, and a loss that never
    falls. Source: Smith, "Cyclical Learning Rates for Training Neural Networks" (2017); defaults as fastai's and
    Lightning's finders, with less smoothing.

    >>> import tsunax as ts
    >>> x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"] - x.sum(1)) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(8)})
    >>> rate, report = find_learning_rate(step, state, ts.batches(x, 32), low=1e-5, high=10.0)
    >>> 0.01 < rate < 1, report.used < 100, ts.hyperparams(state)
    (True, True, {'learning_rate': 0.1})
    """
    where = "find_learning_rate()"
    if not isinstance(step, TrainStep):
        raise WrongTypeError(message("step", where, _tree.describe(step), "a train_step"))
    _check_choice("mode", mode, ("exponential", "linear"), where)
    _check_number(points, where, "points")
    if points < 10:
        raise HyperparameterError(message("points", where, points, "10 or more"))
    if not (_checks.is_real(low) and _checks.is_real(high) and 0 < low < high < math.inf):
        raise HyperparameterError(message("low and high", where, f"{low!r} and {high!r}", "0 < low < high"))
    if not (_checks.is_real(smooth) and 0 <= smooth < 1):
        raise HyperparameterError(message("smooth", where, _tree.describe(smooth), "a number from 0 to below 1"))
    if not (_checks.is_real(stop) and stop > 1):
        raise HyperparameterError(message("stop", where, _tree.describe(stop), "a number above 1"))
    if isinstance(data, Iterator):
        fix = "Give a list, or ts.batches: the search reads from its start and puts it back."
        raise WrongTypeError(message("data", where, _tree.describe(data), "data that can be read again", fix))
    state = _copies(state, seeds, where)
    ramp_of = _Ramp(step, name, mode)
    slope = math.log(high / low) if mode == "exponential" else high - low
    first = np.asarray(state.calls).ravel()[0].astype(np.int32)
    ramp = (np.float32(low), np.float32(slope / (points - 1)), first)
    rates = np.asarray(jax.vmap(lambda i: ramp_of.rate(ramp, first + i))(jnp.arange(points)), np.float64)
    losses = _losses(ramp_of, state, data, points, {**extra, "ramp": ramp}, lambda seen: _cut(seen, smooth, stop)[1])
    smoothed, used = _cut(losses, smooth, stop)
    return _suggested(name, mode, rates, losses, smoothed, used, where)


def _copies(state: Any, seeds: int | None, where: str) -> TrainState:
    """The state, or one for each seed along a new first axis, in arrays of its own."""
    if isinstance(state, TrainState) and seeds is None:
        return jax.tree.map(own, state)
    if seeds is None:
        raise WrongTypeError(
            message("state", where, _tree.describe(state), "a TrainState", "Or seeds=, with a function.")
        )
    _check_number(seeds, where, "seeds")
    if isinstance(state, TrainState):
        if state.key is None:
            fix = "setup(..., key=0), or give a function of a key."
            raise HyperparameterError(message("seeds", where, f"{seeds} for a state without a key", "a key", fix))
        keys = jax.vmap(lambda i: jax.random.fold_in(state.key, i))(jnp.arange(seeds))
        return jax.vmap(lambda key: state.replace(key=key))(keys)
    return jax.vmap(state)(jax.random.split(jax.random.key(0), seeds))


def _losses(ramp: _Ramp, state, data, points: int, extra, used) -> np.ndarray:
    """The losses of the steps as f64, NaN where one was rejected, until it is clear that they have diverged."""
    loop, feed, parts, calls = _fused.fused(ramp, True), _feed.Feed(ramp, data, state, "auto", float("inf")), [], 0
    try:
        while calls < points:
            chunk = feed.take(points - calls, state, calls)
            if chunk is None:
                continue
            state, infos = loop(state, chunk.feed, chunk.n, extra)
            seen = jax.tree.map(lambda x, n=chunk.steps: x[:n], infos).stacked(None)
            bad = False if seen["verdict"] is None else np.asarray(seen["verdict"]) > 0
            parts.append(np.where(bad, np.nan, np.asarray(seen["loss"], np.float64)))
            calls += chunk.steps
            if used(np.concatenate(parts)) < calls:
                break
    finally:
        feed.back()
        feed.close()
    losses = np.concatenate(parts)
    rest = np.full((points - len(losses), *losses.shape[1:]), np.nan)
    return np.concatenate([losses, rest])


def _cut(losses: np.ndarray, smooth: float, stop: float) -> tuple[np.ndarray, int]:
    """The bias-corrected average of the losses, of all seeds, and how many there are before they diverge."""
    mean, average, smoothed = losses.reshape(len(losses), -1).mean(1), 0.0, np.full(len(losses), np.nan)
    for i, loss in enumerate(mean):
        average = smooth * average + (1 - smooth) * loss
        smoothed[i] = average / (1 - smooth ** (i + 1))
        if not np.isfinite(smoothed[i]) or smoothed[i] > stop * abs(smoothed[: i + 1].min()):
            return smoothed, i
    return smoothed, len(losses)


def _suggested(name, mode, rates, losses, smoothed, used: int, where: str) -> tuple[float, RangeTest]:
    mean = losses.reshape(len(losses), -1).mean(1)[:used]
    half = min(len(rates) // 12 + 1, (used - 1) // 2)
    weights = np.arange(-half, half + 1.0)  # of a line through the points around each: symmetric, so without a lag
    slopes = np.correlate(mean, weights, "valid") if half > 0 else np.zeros(1)
    if not slopes.min() < 0:
        at = f"{rates[min(used, len(rates) - 1)]:.2g}"
        got = f"a loss that never falls, up to {at}" if used > 2 else f"a loss that diverges at {at} already"
        fix = "Other low= and high=, or a larger batch." if used > 2 else "Give a smaller low=."
        raise HyperparameterError(message(name, where, got, "one that falls somewhere", fix))
    steepest = float(rates[half + int(slopes.argmin())])
    tenth = float(rates[int(np.argmin(smoothed[:used]))] / 10)
    return steepest, RangeTest(name, mode, rates, losses, smoothed, used, steepest, tenth)


# The trials


@dataclass(frozen=True)
class _Trials:
    step: Any
    state: Any
    example: Any
    extra: dict[str, Any]
    limit: int | None
    steps: int

    def compiled(self, size: int) -> Trial:
        """By what XLA says of the program."""
        batch, began = self._batch(size, shapes=True), time.perf_counter()
        try:
            need, said = _memory.need_of(self.step, self.state, batch, self.extra), ""
        except Exception as error:  # autotuning runs out of memory too
            if not _memory.is_out_of_memory(error):
                raise
            need, said = None, "out of memory while compiling"
        fits = need is not None and self.limit is not None and need.total <= self.limit
        return Trial(size, _all_say(fits), "compiled", need, time.perf_counter() - began, said)

    def executed(self, size: int) -> Trial:
        """By some steps on a copy of the state."""
        need = None
        if _memory.device_of_state(self.state).platform == "cpu":
            trial = self.compiled(size)
            if not trial.fits:
                return trial
            need = trial.need
        batch, began = self._batch(size, shapes=False), time.perf_counter()
        said = _ran_out(lambda: self._run(batch))
        return Trial(size, _all_say(not said), "executed", need, time.perf_counter() - began, said)

    def called(self, size: int) -> Trial:
        """By a function of the size alone."""
        began = time.perf_counter()
        said = _ran_out(lambda: [jax.block_until_ready(self.step(size)) for _ in range(self.steps)])
        return Trial(size, _all_say(not said), "executed", None, time.perf_counter() - began, said)

    def _run(self, batch: Any) -> None:
        step = self.step
        if isinstance(step, TrainStep):  # a value: its programs go with it
            policy = "skip" if step.on_nonfinite == "raise" else step.on_nonfinite
            step = dataclasses.replace(step, on_nonfinite=policy)
        state = jax.tree.map(own, self.state)
        for _ in range(self.steps):
            state, *others = step(state, batch, **self.extra)
            jax.block_until_ready((state, others))  # the end of memory may show only here

    def _batch(self, size: int, shapes: bool) -> Any:
        """A batch of that many rows: of all processes, or where it is to be executed of this one."""
        example: Any = self.example
        if callable(example) and jax.tree_util.all_leaves([example]):
            example = example(size)
            if jax.tree_util.all_leaves([example]) and not _tree.is_array(example):
                example = next(iter(example), None)
                if example is None:
                    raise DataError(message("data", f"example({size})", "no batch", "one", "Give max_size=."))
            if (rows := rows_of(example)) < size:
                raise _Beyond(rows)
        local = size if shapes else size // distributed.process_count()
        return _memory.with_rows(example, local, shapes=shapes)


def _ran_out(run: Callable[[], Any]) -> str:
    """Why memory ended in `run`; "" where it did not. Keeps no traceback, which would keep arrays."""
    try:
        run()
    except Exception as error:
        if not _memory.is_out_of_memory(error):
            raise
        return "out of memory"
    return ""


def _confirmed(trials: _Trials, search: _Search, size: int) -> tuple[int | None, str]:
    """The size with which some steps did run, and what is to be said."""
    need = next(t.need for t in search.trials if t.size == size and t.need is not None)
    copy = _memory.held_by(trials.state)
    if not copy:
        return size, "not executed: the state is shapes only"
    room, _ = _memory.limit_of(None, trials.state, "find_batch_size()")
    if not _all_say(need.total + copy <= room):
        return size, "not executed: no room for a copy of the state beside it"
    at = search.sizes.index(size)
    while at >= 0:
        trial = trials.executed(search.sizes[at])
        search.trials.append(trial)
        if trial.fits:
            return trial.size, ""
        at = search.floor(trial.size / 2) if search.sizes[0] < trial.size else -1
    return None, ""


def _all_say(fits: bool) -> bool:
    """Whether it fits on all processes, which go on together."""
    if distributed.process_count() == 1:
        return fits
    return not distributed.first_of("find_batch_size()", "" if fits else "no")


# The arguments


def _sizes(mode: str, start: int, unit: int, most: int) -> Sequence[int]:
    """All sizes that may be looked at, in ascending order."""
    if mode == "binsearch":
        return range(unit, most + 1, unit)
    sizes = [-(-start // unit) * unit]
    while sizes[0] % (2 * unit) == 0:
        sizes.insert(0, sizes[0] // 2)
    while 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    last = most // unit * unit
    sizes = [n for n in sizes if n <= last]
    return sizes if last in sizes or most == _MOST else [*sizes, last]


def _parts(state: Any) -> int:
    mesh = _memory.mesh_of(state)
    return 1 if mesh is None else _place.parts_of(mesh)


def _limit(memory, state, margin: float, where: str) -> tuple[int, str]:
    """Bytes that may be taken on one device, by the smallest of all processes."""
    limit, source = _memory.limit_of(memory, state, where)
    if distributed.process_count() > 1:
        limit = min(map(int, distributed._gather(where, str(limit))))
    percent = f", {margin:.0%} of it kept free" if margin else ""
    return int(limit * (1 - margin)), source + percent


def _no_size(where: str, trials: list[Trial], limit: int | None, source: str) -> DoesNotFitError:
    smallest = min(trials, key=lambda t: t.size, default=None)
    if smallest is None:
        return DoesNotFitError(message("data", where, "no batch of any size", "rows"))
    need = "" if smallest.need is None else f" needs {_tree.bytes_str(smallest.need.total)}"
    got = f"{smallest.size} that{need or ' ran out of memory'}"
    expected = "one that fits" if limit is None else f"at most {_tree.bytes_str(limit)} ({source})"
    fix = "remat=True, a lower precision or a mesh with fsdp need less." if limit is not None else ""
    return DoesNotFitError(message("smallest batch size", where, got, expected, fix))


def _check_number(n: Any, where: str, name: str) -> None:
    if isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n < 1:
        raise HyperparameterError(message(name, where, n, "an int ≥ 1"))
    _checks.check_count(n, where, name)


def _check_choice(name: str, value: Any, known: tuple[str, ...], where: str) -> None:
    if value not in known:
        raise HyperparameterError(message(name, where, repr(value), " or ".join(map(repr, known))))


def _check_parts(step: Any, example: Any, where: str) -> None:
    if not callable(step):
        raise WrongTypeError(
            message("step", where, _tree.describe(step), "a train_step", f"{where[:-1]}step, state, ...).")
        )
    if example is None or (not callable(example) and not jax.tree.leaves(example)):
        fix = "A batch of one row, or its shapes, is enough."
        raise WrongTypeError(message("example", where, _tree.describe(example), "a batch", fix))
