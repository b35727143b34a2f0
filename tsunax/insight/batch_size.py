"""Searches before a run for the batch that memory allows.

    size, report = find_batch_size(step, state, example)       compiles, and executes nothing
    n, report = find_accumulation(step, state, example, 512)   the same for a batch that is given

The state, its key and the place of the data are afterwards what they were, bit by bit.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tsunax._core import Function, PyTree, checks, placement, tables, trees
from tsunax._step.members import members_of
from tsunax.distributed import processes
from tsunax.errors import DataError, DoesNotFitError, HyperparameterError, WrongTypeError
from tsunax.insight import _memory
from tsunax.insight._memory import Need
from tsunax.loss import rows_of
from tsunax.program import TrainStep
from tsunax.state import own

__all__ = ["SizeReport", "SizeTrial", "find_accumulation", "find_batch_size"]

_MOST = 1 << 31  # rows, if no maximum is given
# times the start: batches of few rows are compiled into other programs than those of many
_FIRST = 8


@dataclass(frozen=True)
class SizeTrial:
    """One size that was tried."""

    size: int
    fits: bool
    how: str  # "compiled" or "executed"
    need: Need | None  # None if it was only executed
    seconds: float
    said: str = ""  # why it does not fit, if not by the numbers


@dataclass(frozen=True)
class SizeReport:
    """The trials of a search in their order; prints as a table. Bytes are those of one device."""

    what: str
    found: int
    trials: tuple[SizeTrial, ...]
    limit: int | None = None  # bytes that were allowed, the margin taken off
    source: str = ""  # of that number
    note: str = ""

    def __repr__(self) -> str:
        names = [field.name for field in dataclasses.fields(Need)] + ["need"]
        names = names if any(t.need for t in self.trials) else []
        rows = [["size", *names, "fits", "how", "s", ""]]
        for t in self.trials:
            sizes = [*dataclasses.astuple(t.need), t.need.total] if t.need else []
            needs = [trees.bytes_str(n) for n in sizes] or [""] * len(names)
            fits = "yes" if t.fits else "no"
            rows.append([str(t.size), *needs, fits, t.how, f"{t.seconds:.1f}", t.said])
        lines = tables.aligned(rows, right=range(len(rows[0]) - 1))
        limit = "" if self.limit is None else trees.bytes_str(self.limit)
        within = f", within {limit} ({self.source})" if limit else ""
        return "\n".join([f"{self.what} {self.found}{within}", *lines, *filter(None, [self.note])])


class _Beyond(Exception):
    """The data have no batch of that size; `rows` is what they have."""

    def __init__(self, rows: int):
        self.rows = rows


class _Search:
    """Sizes in ascending order, and the trials of some of them.

    `attempt(size)` returns a SizeTrial, or raises _Beyond.
    """

    def __init__(self, sizes: Sequence[int], attempt: Callable[[int], SizeTrial], most: int):
        self.sizes, self.attempt, self.most = sizes, attempt, most
        self.trials: list[SizeTrial] = []

    def floor(self, x: float) -> int:
        """The index of the largest size that is not above x; 0 if all are."""
        return max(0, bisect.bisect_right(self.sizes, x) - 1)

    def try_(self, at: int) -> SizeTrial | None:
        """The trial of a size; None, and fewer sizes, if the data end before."""
        try:
            self.trials.append(self.attempt(self.sizes[at]))
        except _Beyond as beyond:
            self.sizes = self.sizes[: bisect.bisect_right(self.sizes, beyond.rows)]
            return None
        return self.trials[-1]

    @property
    def best(self) -> int | None:
        return max((t.size for t in self.trials if t.fits), default=None)

    @property
    def is_over(self) -> bool:
        return len(self.trials) >= self.most or not self.sizes

    def by_doubling(self, start: int) -> None:
        """Double until a size fails, halve until one fits, then bisect."""
        best, worst, at, failed = -1, len(self.sizes), self.floor(start), False
        while not self.is_over and best + 1 < worst:
            at = min(at, worst - 1)
            if (trial := self.try_(at)) is None:
                worst = min(worst, len(self.sizes))
                continue
            best, worst, failed = (at, worst, failed) if trial.fits else (best, at, True)
            next_size = trial.size * 2 if trial.fits else trial.size / 2
            at = (best + worst) // 2 if best >= 0 and failed else self.floor(next_size)

    def by_line(self, start: float, limit: int) -> None:
        """Interpolate between two trials until no larger size is left to try."""
        at, line = self.floor(start), None
        while not self.is_over:
            if (trial := self.try_(at)) is not None:
                error = None if line is None else abs(line(trial.size) - _total(trial))
                at, line = self._next(limit, error)
            at = min(at, len(self.sizes) - 1)
            if self.sizes and any(t.size == self.sizes[at] for t in self.trials):
                return

    def _next(self, limit: int, error: float | None) -> tuple[int, Callable | None]:
        """The next size to try (one already tried ends the search), and the line that predicts it.

        `error`: how far the line before was off at the last trial.
        """
        known = {t.size: _total(t) for t in self.trials}
        fitting = sorted(n for n in known if known[n] <= limit)
        lo = max(fitting, default=0)  # 0: none
        hi = min((n for n in known if known[n] > limit and n > lo), default=0)
        # a size above `least` (if that fits) and below `most`
        least = bisect.bisect_left(self.sizes, lo)
        most = bisect.bisect_left(self.sizes, hi) if hi else len(self.sizes)
        if most <= least + bool(lo):
            return least, None
        if len(self.trials) == 1 and (need := self.trials[0].need) is not None:
            # as if all that is temporary grew with the rows
            known[0] = need.total - need.batch - need.temporary
        finite = (n for n in known if known[n] < math.inf)
        nearest = sorted(finite, key=lambda n: abs(known[n] - limit))[:2]
        for pair in (nearest, [n for n in (lo, hi) if n]):
            slope, line = _line(known, pair)
            if not 0 < slope < math.inf:
                continue
            at = self.floor(pair[0] + (limit - known[pair[0]]) / slope)
            if (at > least or not lo) and (at < most or not hi):
                return min(at, most - 1), line
            if at == least:  # nothing larger, if the line has been right
                _, above = _line(known, fitting[-2:])
                is_sure = error is not None and above(self.sizes[least + 1]) - error > limit
                return (least if is_sure else least + 1), line
            if lo and hi:  # beyond what does not fit: a bend between the two
                break
        if not (lo and hi):
            return self.floor(2 * lo or hi / 2), None
        middle = math.sqrt(lo * hi) if hi > 4 * lo else (lo + hi) / 2
        return min(max(self.floor(middle), least + 1), most - 1), None


def _line(known: dict[int, float], pair: list[int]) -> tuple[float, Callable[[int], float]]:
    """The slope between two sizes, and the line through them; of one size a slope of 0."""
    if len(pair) < 2:
        return 0.0, lambda n: -math.inf
    a, b = sorted(pair)
    slope = (known[b] - known[a]) / (b - a)
    return slope, lambda n: known[a] + slope * (n - a)


def _total(trial: SizeTrial) -> float:
    return math.inf if trial.need is None else trial.need.total


def find_batch_size(
    step: Function,
    state: PyTree = None,
    example: PyTree = None,
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
) -> tuple[int, SizeReport]:
    """The largest batch with which a step fits into memory: `(size, report)`.

        compiled = step.lower(state, batch_of(size)).compile()
        state + batch + temporary + results not in place of the state  <=  (1 - margin) * memory

    The real step is compiled at a few sizes, and XLA says what each program needs: rule,
    accumulation, precision and sharding are in it, and nothing is executed or allocated. The sizes
    follow a line through the trials: two or three are enough if memory grows evenly. The size that
    is returned was compiled (or executed), and did fit.

    Args:
      step: a `train_step`, or any jitted `(state, batch, **extra) -> (state, ...)`. With
        method="run" and no state, a function of the size that fails when memory ends.
      state: arrays, or shapes (`jax.eval_shape(lambda: ts.setup(rule, params))`). It is not
        changed.
      example: a batch of any number of rows, or its shapes; or a function of the size that returns
        a batch, or new data of which the first batch is taken: a shorter one ends the search at
        its size.
      mode: "power" tries start, 2 start, 4 start, ... (and start / 2, ...); "binsearch" all sizes.
      method: "analyse", or "run": execute `steps_per_trial` steps at each size, twice as many rows
        until memory ends, then in "binsearch" by halves; for backends that analyse nothing. On a
        CPU, where the process would die when memory ends, only what fits by analysis is executed.
      max_size, multiple_of, max_trials: hold in both modes. Sizes are multiples of `multiple_of`,
        and of the step's `accumulate` times the parts into which a mesh cuts rows; they count the
        rows of all devices and processes.
      memory: bytes, or "80GiB", for state and step on one device. Default: what the device gives
        to this process less what others hold there; on a CPU what is free on this machine.
      margin: the part of it that stays free, for batches on their way, evaluation, and what XLA
        does not count.
      confirm: also execute `steps_per_trial` steps at the size found, on a copy of the state, and
        try half of it if memory ends. The report says if there was no room for a copy.
      extra: arguments for the step, as in `step(state, batch, **extra)`.

    Raises DoesNotFitError if the smallest size does not fit; HyperparameterError and WrongTypeError
    for arguments that make no sense. Source of the search by trials: Lightning's and toma's batch
    size finders.

    >>> import jax.numpy as jnp
    >>> import tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones((256, 256))})
    >>> size, report = find_batch_size(step, state, jax.ShapeDtypeStruct((1, 256), jnp.float32), memory="72MiB")
    >>> size, report.trials[0].how
    (8192, 'compiled')
    """
    where, bare = "find_batch_size()", state is None
    counts = {"start": start, "multiple_of": multiple_of, "max_trials": max_trials}
    _check_numbers(where, margin, **counts, steps_per_trial=steps_per_trial)
    checks.check_choice(mode, where, "mode", ("power", "binsearch"))
    checks.check_choice(method, where, "method", ("analyse", "run"))
    unit = multiple_of
    if not bare:
        unit = math.lcm(multiple_of, _parts(state) * getattr(step, "accumulate", 1))
    if max_size is not None:
        checks.check_count(max_size, where, "max_size")
        if max_size < start:
            raise HyperparameterError("max_size", where, max_size, f"start={start} or more")
        if max_size < unit:
            expected = f"{unit} or more, of which sizes are multiples"
            raise HyperparameterError("max_size", where, max_size, expected)
    if bare and (method != "run" or not callable(step)):
        fix = "find_batch_size(step, state, example)."
        raise WrongTypeError("state", where, "None", "a state", fix)
    limit, source = None, ""
    if not bare:
        _check_parts(step, example, where)
        if method == "analyse" and not hasattr(step, "lower"):
            got, fix = trees.describe(step), 'jax.jit it, or method="run".'
            raise WrongTypeError("step", where, got, "one that can be lowered", fix)
        limit, source = _limit(memory, state, margin, where)
    sizes = _sizes(mode, start, unit, max_size or _MOST)
    trials = _Trials(step, state, example, extra, limit or 0, steps_per_trial)
    if method == "analyse":
        search = _Search(sizes, trials.compiled, max_trials)
        search.by_line(_FIRST * max(start, unit), trials.limit)
    else:
        search = _Search(sizes, trials.called if bare else trials.executed, max_trials)
        search.by_doubling(start)
    size, note = search.best, ""
    if size is not None and confirm and method == "analyse":
        size, note = _confirmed(trials, search, size)
    if size is None:
        raise _no_size(where, search.trials, limit, source)
    return size, SizeReport("batch size", size, tuple(search.trials), limit, source, note)


def find_accumulation(
    step: TrainStep,
    state: PyTree,
    example: PyTree,
    batch_size: int,
    *,
    multiple_of: int = 1,
    max_trials: int = 25,
    memory: int | str | None = None,
    margin: float = 0.05,
    **extra: Any,
) -> tuple[int, SizeReport]:
    """The fewest micro-batches with which a batch of `batch_size` rows fits: `(n, report)`.

    The dual of `find_batch_size`: the batch, and so the course of training, is given. Then
    `step = dataclasses.replace(step, accumulate=n)`. Arguments and errors as there; `multiple_of`
    is of the micro-batch's rows, and the report's sizes are micro-batches.

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
        got, fix = trees.describe(step), "Others cut no batches."
        raise WrongTypeError("step", where, got, "a train_step", fix)
    counts = {"batch_size": batch_size, "multiple_of": multiple_of, "max_trials": max_trials}
    _check_numbers(where, margin, **counts)
    _check_parts(step, example, where)
    unit = math.lcm(multiple_of, _parts(state))
    small = [n for n in range(1, math.isqrt(batch_size) + 1) if batch_size % n == 0]
    sizes = sorted(n for n in {*small, *(batch_size // n for n in small)} if n % unit == 0)
    if not sizes:
        raise HyperparameterError("batch_size", where, batch_size, f"a multiple of {unit}")
    limit, source = _limit(memory, state, margin, where)

    def attempt(micro: int) -> SizeTrial:
        cut = dataclasses.replace(step, accumulate=batch_size // micro)
        try:
            trial = _Trials(cut, state, example, extra, limit, 0).compiled(batch_size)
        except _Beyond as beyond:
            parts = f"example({batch_size})", f"{beyond.rows} rows", f"{batch_size} rows"
            fix = "Give a batch_size that the data have, or a batch to be read as shapes."
            raise DataError("batch", *parts, fix) from None
        return dataclasses.replace(trial, size=micro)

    search = _Search(sizes, attempt, max_trials)
    search.by_line(batch_size, limit)
    if search.best is None:
        raise _no_size(where, search.trials, limit, source)
    n = batch_size // search.best
    return n, SizeReport("accumulate", n, tuple(search.trials), limit, source)


# The trials


@dataclass(frozen=True)
class _Trials:
    step: Any
    state: Any
    example: Any
    extra: dict[str, Any]
    limit: int
    steps: int

    def compiled(self, size: int) -> SizeTrial:
        """By what XLA says of the program."""
        batch = self._batch(size, shapes=True)
        need = lambda: _memory.need_of(self.step, self.state, batch, self.extra)
        return self._trial(size, "compiled", need)

    def executed(self, size: int) -> SizeTrial:
        """By some steps on a copy of the state."""
        need = None
        if _memory.device_of_state(self.state).platform == "cpu":
            trial = self.compiled(size)
            if not trial.fits:
                return trial
            need = trial.need
        batch = self._batch(size, shapes=False)
        return self._trial(size, "executed", lambda: self._run(batch), need)

    def called(self, size: int) -> SizeTrial:
        """By a function of the size alone."""
        run = lambda: [jax.block_until_ready(self.step(size)) for _ in range(self.steps)]
        return self._trial(size, "executed", run)

    def _trial(self, size: int, how: str, run: Callable[[], Any], need: Any = None) -> SizeTrial:
        """Keeps no traceback, which would keep arrays."""
        began, fits, said = time.perf_counter(), True, ""
        try:
            found = run()
            if how == "compiled":
                need, fits = found, found.total <= self.limit
        except Exception as error:  # autotuning runs out of memory, too
            if not _memory.is_out_of_memory(error):
                raise
            fits, said = False, "out of memory" + " while compiling" * (how == "compiled")
        fits = _all_say(fits)
        return SizeTrial(size, fits, how, need, time.perf_counter() - began, said)

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
        """A batch of `size` rows over all processes; to execute, this process's share of it."""
        example: Any = self.example
        if callable(example) and jax.tree_util.all_leaves([example]):
            example = example(size)
            if jax.tree_util.all_leaves([example]) and not trees.is_array(example):
                example = next(iter(example), None)
            if not jax.tree.leaves(example):
                raise DataError("data", f"example({size})", "no batch", "one")
            if (rows := rows_of(example)) < size:
                raise _Beyond(rows)
        local = size if shapes else size // processes.process_count()
        return _memory.with_rows(example, local, shapes=shapes)


def _confirmed(trials: _Trials, search: _Search, size: int) -> tuple[int | None, str]:
    """The size with which some steps did run, and a note for the report."""
    need = next(t.need for t in search.trials if t.size == size and t.need is not None)
    copy = _memory.held_by(trials.state)
    if not copy:
        return size, "not executed: the state is shapes only"
    room, _ = _memory.limit_of(None, trials.state, "find_batch_size()")
    if not _all_say(need.total + copy <= room):
        return size, "not executed: no room for a copy of the state beside it"
    while True:
        trial = trials.executed(search.sizes[search.floor(size)])
        search.trials.append(trial)
        if trial.fits:
            return trial.size, ""
        if trial.size <= search.sizes[0]:
            return None, ""
        size = trial.size // 2


def _all_say(fits: bool) -> bool:
    """Whether it fits on all processes, which go on together."""
    if processes.process_count() == 1:
        return fits
    return not any(processes.words("find_batch_size()", "" if fits else "no"))


# The arguments


def _sizes(mode: str, start: int, unit: int, most: int) -> Sequence[int]:
    """All sizes that may be tried, in ascending order."""
    if mode == "binsearch":
        return range(unit, most + 1, unit)
    first, last = -(-start // unit) * unit, most // unit * unit
    while first % (2 * unit) == 0:
        first //= 2
    sizes = []
    while first <= last:
        sizes.append(first)
        first *= 2
    return sizes if last in sizes or most == _MOST else [*sizes, last]


def _parts(state: Any) -> int:
    mesh = _memory.mesh_of(state)
    return 1 if mesh is None or members_of(state) is not None else placement.parts_of(mesh)


def _limit(memory, state, margin: float, where: str) -> tuple[int, str]:
    """Bytes that may be taken on one device, by the smallest of all processes."""
    limit, source = _memory.limit_of(memory, state, where)
    if processes.process_count() > 1:
        limit = min(map(int, processes.words(where, str(limit))))
    percent = f", {margin:.0%} of it kept free" if margin else ""
    return int(limit * (1 - margin)), source + percent


def _no_size(
    where: str, trials: list[SizeTrial], limit: int | None, source: str
) -> DoesNotFitError:
    if not trials:
        return DoesNotFitError("data", where, "no batch of any size", "rows")
    smallest = min(trials, key=lambda t: t.size)
    why = f"needs {trees.bytes_str(smallest.need.total)}" if smallest.need else "ran out of memory"
    expected, fix = "one that fits", ""
    if limit is not None:
        expected = f"at most {trees.bytes_str(limit)} ({source})"
        fix = "remat=True, a lower precision or a mesh with fsdp need less."
    got = f"{smallest.size} that {why}"
    return DoesNotFitError("smallest batch size", where, got, expected, fix)


def _check_numbers(where: str, margin: Any, **counts: Any) -> None:
    for name, n in counts.items():
        checks.check_count(n, where, name)
    if isinstance(margin, bool) or not checks.is_real(margin) or not 0 <= margin < 1:
        got = trees.describe(margin)
        raise HyperparameterError("margin", where, got, "a number from 0 to below 1")


def _check_parts(step: Any, example: Any, where: str) -> None:
    if not callable(step):
        got, fix = trees.describe(step), f"{where[:-1]}step, state, ...)."
        raise WrongTypeError("step", where, got, "a train_step", fix)
    if example is None or (not callable(example) and not jax.tree.leaves(example)):
        fix = "A batch of one row, or its shapes, is enough."
        raise WrongTypeError("example", where, trees.describe(example), "a batch", fix)
