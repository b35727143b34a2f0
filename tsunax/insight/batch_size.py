"""The batch that memory allows, read off compiled steps; no step is executed.

size, report = find_batch_size(step, state, example)
n, report = find_accumulation(step, state, example, 512)   micro-batches for a fixed batch size
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tsunax._core import Function, PyTree, checks, placement, processes, tables, trees
from tsunax.errors import DoesNotFitError, HyperparameterError, WrongTypeError
from tsunax.insight import _memory
from tsunax.program import TrainStep, check_is_train_step
from tsunax.run import fused_loop
from tsunax.states import row_axes

__all__ = ["SizeReport", "SizeTrial", "find_accumulation", "find_batch_size"]

_MAX_ROWS = 1 << 31  # rows, unless `max_size` is given: no device has memory for more
# A search starts at this multiple of the smallest size: XLA compiles batches of very few rows into
# special programs, unlike the programs of large batches. A larger multiple may start too high.
_FIRST_MULTIPLE = 8
# Bytes by which memory may differ from a straight line: XLA rounds each buffer up, to 64 bytes on a
# CPU and to 256 on a GPU. Not added if the line met all trials exactly: then nothing was rounded.
# If it is too small, the search may stop one size too early; larger costs another trial.
_ROUNDING = 2048
# The assumed memory without rows is given up if a line from it missed a trial by this share of the
# memory of its rows. If the share is too large, the search may stop too early; a smaller share
# costs another trial.
_WRONG_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class SizeTrial:
    """A batch of `size` rows, compiled in `seconds`: its `need` of memory, and whether it `fits`.

    `need` is None if memory ended during the compilation.
    """

    size: int
    fits: bool
    need: _memory.Need | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class SizeReport:
    """The `trials` of a search, a tuple in their order; prints as a table.

    `found` is the size, or the number of micro-batches, as `what` says; `limit` are the bytes of
    one device that were allowed, less the margin, and `source` says where that number is from.
    """

    what: str
    found: int
    trials: tuple[SizeTrial, ...]
    limit: int
    source: str
    _repr_html_ = tables.folded

    def __repr__(self) -> str:
        has_host = any(t.need and t.need.host for t in self.trials)
        fields = [f.name for f in dataclasses.fields(_memory.Need) if has_host or f.name != "host"]
        rows = [["size", *fields, "need", "fits", "s"]]
        for t in self.trials:
            sizes = [getattr(t.need, name) for name in [*fields, "total"]] if t.need else []
            cells = [trees.bytes_str(n) for n in sizes] or [""] * len(fields) + ["too much"]
            rows.append([str(t.size), *cells, "yes" if t.fits else "no", f"{t.seconds:.1f}"])
        within = f"within {trees.bytes_str(self.limit)} ({self.source})"
        lines = tables.aligned(rows, right=range(len(rows[0])))
        return "\n".join([f"{self.what} {self.found}, {within}", *lines])


def _trials_of(sizes: Sequence[int], index: int, attempt, limit: int) -> list[SizeTrial]:
    """Trials of ascending sizes from `sizes[index]` on, along a line through sizes near the limit.

    A bisection between `lo`, the index of the largest size that fits, and `hi`, the index of the
    smallest size that does not.
    """
    trials: list[SizeTrial] = []
    bytes_of_size: dict[int, float] = {}
    lo, hi = -1, len(sizes)
    line, pair, is_exact = None, [0], True
    while True:
        trials.append(trial := attempt(sizes[index]))
        if trial.fits:
            lo = index
        else:
            hi = index
        if hi - lo == 1:
            return trials
        line_error = math.inf
        if (need := trial.need) is not None:
            line_error = math.inf if line is None else abs(line(trial.size) - need.total)
            is_exact &= line is None or 0 in pair or line_error < 1
            if line is not None and 0 in pair:
                rise = line(trial.size) - bytes_of_size[0]
                if line_error > _WRONG_SHARE * rise:
                    del bytes_of_size[0]  # memory without rows was assumed, and wrong
            bytes_of_size[trial.size] = need.total
            if len(bytes_of_size) == 1:  # assume that all temporary memory grows with the rows
                bytes_of_size[0] = need.total - need.batch - need.temporary
        low_size = 0 if lo < 0 else sizes[lo]
        high_size = sizes[hi] if hi < len(sizes) else 0
        nearest = sorted(bytes_of_size, key=lambda n: abs(bytes_of_size[n] - limit))[:2]
        for pair in (nearest, [low_size, high_size]):
            if (line := _line(bytes_of_size, pair)) is None:
                continue
            index = bisect.bisect_right(sizes, limit, key=line) - 1
            if index <= lo:  # stop if the line through the fitting sizes rules the next size out
                fitting = _line(
                    bytes_of_size,
                    sorted(n for n in bytes_of_size if bytes_of_size[n] <= limit)[-2:],
                )
                uncertainty = line_error + _ROUNDING * (not is_exact)
                if lo >= 0 and fitting and fitting(sizes[lo + 1]) - uncertainty > limit:
                    return trials
                index = lo + 1
            if index < hi:
                break
        else:  # there is no line, or memory bends between the two sizes
            is_far = high_size > 4 * low_size
            middle = math.sqrt(low_size * high_size) if is_far else (low_size + high_size) / 2
            index = bisect.bisect_right(sizes, middle if high_size else 2 * low_size) - 1
            index = min(max(index, lo + 1), hi - 1)


def _line(bytes_of_size: dict[int, float], pair: list[int]) -> Callable[[int], float] | None:
    """The line through two sizes, if it rises."""
    smaller, larger = min(pair, default=0), max(pair, default=0)
    if (
        smaller not in bytes_of_size
        or larger not in bytes_of_size
        or bytes_of_size[smaller] >= bytes_of_size[larger]
    ):
        return None
    slope = (bytes_of_size[larger] - bytes_of_size[smaller]) / (larger - smaller)
    return lambda n: bytes_of_size[smaller] + slope * (n - smaller)


@dataclasses.dataclass(frozen=True)
class Search:
    """The search for the largest size that fits into `limit` bytes of one device.

    `find_batch_size` and `find_accumulation` search once, `plan` once for each configuration.
    """

    where: str
    limit: int
    source: str

    @classmethod
    def within(cls, memory: int | str | None, margin: float, state: PyTree, where: str) -> Search:
        """A search within the memory of the devices of a state, or within `memory`."""
        if not 0 <= margin < 1:
            expected = "a number from 0 to below 1"
            raise HyperparameterError("margin", where, margin, expected)
        allowed_bytes, source = _memory.limit_of(memory, state, where)
        words = processes.current().gather(where, str(allowed_bytes), timeout=processes.LAST)
        limit = int(min(map(int, words)) * (1 - margin))
        return cls(where, limit, source + (f", {margin:.0%} of it kept free" if margin else ""))

    def trial(self, need_of_size: Callable[[int], _memory.Need], size: int) -> SizeTrial:
        """Compile one size. Keeps no traceback, because it would keep arrays."""
        start, need = time.perf_counter(), None
        try:
            need = need_of_size(size)
        except (MemoryError, RuntimeError) as error:  # autotuning runs out of memory, too
            is_out_of_memory = re.search(
                "RESOURCE_EXHAUSTED|out of memory", str(error), re.IGNORECASE
            )
            if not is_out_of_memory and not isinstance(error, MemoryError):
                raise
        word = "" if need is not None and need.total <= self.limit else "no"
        # processes decide together
        fits = not any(processes.current().gather(self.where, word, timeout=processes.LAST))
        return SizeTrial(size, fits, need, time.perf_counter() - start)

    def trials(
        self,
        sizes: Sequence[int],
        need_of_size: Callable[[int], _memory.Need],
        first_index: int | None = None,
    ) -> list[SizeTrial]:
        """Trials of ascending sizes up to the largest that fits, from `first_index` on."""
        if first_index is None:
            first_index = bisect.bisect_right(sizes, _FIRST_MULTIPLE * sizes[0]) - 1
        attempt = functools.partial(self.trial, need_of_size)
        return _trials_of(sizes, first_index, attempt, self.limit)

    def does_not_fit(self, title: str, need: _memory.Need | None) -> DoesNotFitError:
        """The error for a search in which nothing fits."""
        got = f"{trees.bytes_str(need.total)} of memory" if need else "more than XLA could lay out"
        expected = f"at most {trees.bytes_str(self.limit)} ({self.source})"
        fix = "remat=True, a lower precision or a mesh with fsdp need less."
        return DoesNotFitError(title, self.where, got, expected, fix)


@checks.naming_arguments
def find_batch_size(
    step: Function,
    state: PyTree,
    example: PyTree,
    *,
    mode: str = "power",
    max_size: int | None = None,
    multiple_of: int = 1,
    memory: int | str | None = None,
    margin: float = 0.05,
    **extra: Any,
) -> tuple[int, SizeReport]:
    """The largest batch with which a step fits into memory: `(size, report)`.

        compiled = step.lower(state, batch_of(size)).compile()
        state + batch + temporary + results not in place of the state  <=  (1 - margin) * memory

    The real step is compiled at a few sizes, and XLA says what each program needs: rule,
    accumulation, precision and sharding are in it. No step is executed, and no array allocated. The
    sizes follow a line through the trials: two or three if memory grows evenly. The returned size
    did fit. Near the limit XLA may compute activations again instead of storing them, so that a
    larger batch fits, too, but runs slower: the search follows the line and ignores this.

    Args:
      step: a `train_step`, or any jitted `(state, batch, **extra) -> (state, ...)`; for `States`
        the function that `fit` takes.
      state: arrays, or shapes (`jax.eval_shape(lambda: ts.setup(rule, params))`).
      example: a batch of any number of rows, or its shapes.
      mode: "power" tries 1, 2, 4, ... times `multiple_of`, and `max_size`; "binsearch" all sizes.
      max_size, multiple_of: hold in both modes. Sizes are multiples of `multiple_of`,
        and of the step's `accumulate` times the parts into which a mesh cuts rows; of all devices.
      memory: bytes for state and step on one device, or a text as "16GiB". Default: the device's
        limit for this process less the memory in use by other arrays; on a CPU the free memory of
        this machine.
      margin: the fraction that stays free: for prefetched batches, evaluation, and memory that
        XLA's analysis leaves out.
      extra: arguments for the step, as in `step(state, batch, **extra)`.

    Raises DoesNotFitError if the smallest size does not fit; HyperparameterError, WrongTypeError.

    >>> import jax, jax.numpy as jnp, tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones((256, 256))})
    >>> row = jax.ShapeDtypeStruct((1, 256), jnp.float32)
    >>> size, report = find_batch_size(step, state, row, memory=72 << 20)
    >>> size, report.trials[0].size
    (8192, 8)
    """
    where = "find_batch_size()"
    checks.check_choice(mode, where, "mode", ("power", "binsearch"))
    checks.check_count(multiple_of, where, "multiple_of")
    unit = math.lcm(multiple_of, row_parts(state) * getattr(step, "accumulate", 1))
    max_rows = _MAX_ROWS if max_size is None else max_size
    checks.check_count(max_rows, where, "max_size", least=unit)
    sizes: Sequence[int] = range(unit, max_rows + 1, unit)
    if mode == "power":
        sizes = [unit << i for i in range((max_rows // unit).bit_length())]
        sizes = sorted({*sizes, max_rows // unit * unit}) if max_size else sizes
    step, search = fused_loop.lowerable(step, state), Search.within(memory, margin, state, where)
    check_has_rows(example, where)
    need_of_size = lambda size: _memory.need_of(step, state, with_rows(example, size), extra)
    return _largest_fitting("batch size", search, sizes, need_of_size)


@checks.naming_arguments
def find_accumulation(
    step: TrainStep,
    state: PyTree,
    example: PyTree,
    batch_size: int,
    *,
    multiple_of: int = 1,
    memory: int | str | None = None,
    margin: float = 0.05,
    **extra: Any,
) -> tuple[int, SizeReport]:
    """The fewest micro-batches with which a batch of `batch_size` rows fits: `(n, report)`.

    The dual of `find_batch_size`: the batch, and so the course of training, is given. Then
    `step = dataclasses.replace(step, accumulate=n)`. `state`, `example`, `memory`, `margin`,
    `extra` and errors (DoesNotFitError, HyperparameterError) as there; `multiple_of`
    divides the rows of a micro-batch, and the sizes of the report are micro-batches.

    >>> import jax, jax.numpy as jnp
    >>> import tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean(jnp.tanh(x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones((512, 512))})
    >>> x = jax.ShapeDtypeStruct((1, 512), jnp.float32)
    >>> n, report = find_accumulation(step, state, x, 16384, memory=96 << 20)
    >>> n > 1 and n * max(trial.size for trial in report.trials if trial.fits) == 16384
    True
    """
    where = "find_accumulation()"
    check_is_train_step(step, where)
    checks.check_count(multiple_of, where, "multiple_of")
    batch_size = checks.check_count(batch_size, where, "batch_size")
    unit = math.lcm(multiple_of, row_parts(state))
    sizes = sizes_of_micro_batches(step, batch_size, unit, where)
    check_has_rows(example, where)
    search, batch = Search.within(memory, margin, state, where), with_rows(example, batch_size)

    def need_of_size(size: int) -> _memory.Need:
        cut_step = dataclasses.replace(step, accumulate=batch_size // size)
        return _memory.need_of(cut_step, state, batch, extra)

    uncut = len(sizes) - 1
    return _largest_fitting("accumulate", search, sizes, need_of_size, uncut, batch_size)


def _largest_fitting(
    title: str,
    search: Search,
    sizes: Sequence[int],
    need_of_size: Callable[[int], _memory.Need],
    first_index: int | None = None,
    whole_batch: int | None = None,
) -> tuple[int, SizeReport]:
    """The largest size that fits; with `whole_batch`, the number of micro-batches of that size."""
    trials = search.trials(sizes, need_of_size, first_index)
    if (largest_size := max((t.size for t in trials if t.fits), default=None)) is None:
        need = min(trials, key=lambda t: t.size).need
        raise search.does_not_fit(f"smallest batch size {sizes[0]}", need)
    answer = largest_size if whole_batch is None else whole_batch // largest_size
    return answer, SizeReport(title, answer, tuple(trials), search.limit, search.source)


def check_has_rows(example: PyTree, where: str) -> None:
    """Raise WrongTypeError for an example batch without rows."""
    if not any(map(np.ndim, jax.tree.leaves(example))):
        fix = "A loss that draws its own samples has their number in loss_fn."
        raise WrongTypeError("example", where, trees.describe(example), "a batch with rows", fix)


def with_rows(example: PyTree, rows: int) -> PyTree:
    """The shapes of a batch of `rows` rows."""
    shapes = jax.eval_shape(lambda x: x, example)
    resized = lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
    return jax.tree.map(lambda x: resized(x) if x.shape else x, shapes)


def sizes_of_micro_batches(step: TrainStep, batch_size: int, unit: int, where: str) -> list[int]:
    """The multiples of `unit` that divide a batch, ascending; half of it at most for a noise scale.

    The noise scale of a step is measured between its micro-batches.
    """
    min_parts = 2 if step.noise_scale else 1
    small_divisors = [n for n in range(1, math.isqrt(batch_size) + 1) if batch_size % n == 0]
    divisors = {*small_divisors, *(batch_size // n for n in small_divisors)}
    if sizes := sorted(n for n in divisors if n % unit == 0 and n * min_parts <= batch_size):
        return sizes
    expected = f"{min_parts} or more micro-batches of " * (min_parts > 1) + f"a multiple of {unit}"
    raise HyperparameterError("batch_size", where, batch_size, expected)


def row_parts(state: Any) -> int:
    """The number of parts into which the mesh of a state cuts rows."""
    mesh = _memory.mesh_of(state)
    is_cut = mesh is not None and bool(row_axes(state, mesh))
    return placement.row_parts(mesh) if is_cut else 1
