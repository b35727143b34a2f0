"""The batch that memory allows, read off compiled steps; no step is executed.

size, report = find_batch_size(step, state, example)
n, report = find_accumulation(step, state, example, 512)   the same for a batch that is given
"""

import bisect
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tsunax._core import Function, PyTree, checks, placement, processes, tables, trees
from tsunax._step.members import members_of
from tsunax.errors import DoesNotFitError, HyperparameterError, WrongTypeError
from tsunax.insight import _memory
from tsunax.insight._memory import Need
from tsunax.program import TrainStep
from tsunax.run import fused_loop

__all__ = ["SizeReport", "SizeTrial", "find_accumulation", "find_batch_size"]

_MOST = 1 << 31  # rows, if no maximum is given
# times the smallest: batches of few rows are compiled into other programs than those of many
_FIRST = 8
# Bytes by which memory may be off the line: XLA rounds the size of each buffer up, to 64 bytes on a
# CPU and 256 on a GPU. A line that met all trials exactly shows that nothing was rounded.
_ROUNDING = 2048


@dataclass(frozen=True)
class SizeTrial:
    """A batch of `size` rows, compiled in `seconds`: its `need` of memory, and whether it `fits`.

    `need` is None if memory ended during the compilation.
    """

    size: int
    fits: bool
    need: Need | None
    seconds: float


@dataclass(frozen=True)
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
        is_known = any(t.need and t.need.host for t in self.trials)
        names = [f.name for f in dataclasses.fields(Need) if is_known or f.name != "host"]
        rows = [["size", *names, "need", "fits", "s"]]
        for t in self.trials:
            sizes = [getattr(t.need, name) for name in [*names, "total"]] if t.need else []
            needs = [trees.bytes_str(n) for n in sizes] or [""] * len(names) + ["too much"]
            rows.append([str(t.size), *needs, "yes" if t.fits else "no", f"{t.seconds:.1f}"])
        within = f"within {trees.bytes_str(self.limit)} ({self.source})"
        lines = tables.aligned(rows, right=range(len(rows[0])))
        return "\n".join([f"{self.what} {self.found}, {within}", *lines])


def _search(sizes: Sequence[int], at: int, attempt, limit: int) -> list[SizeTrial]:
    """Trials of ascending sizes from place `at` on, along a line through those near the limit."""
    trials: list[SizeTrial] = []
    known: dict[int, float] = {}  # bytes by size
    lo, hi = -1, len(sizes)  # what fits, what does not
    line, pair, is_exact = None, [0], True
    while True:
        trials.append(trial := attempt(sizes[at]))
        lo, hi = (at, hi) if trial.fits else (lo, at)
        if hi - lo == 1:
            return trials
        error = math.inf
        if (need := trial.need) is not None:
            error = math.inf if line is None else abs(line(trial.size) - need.total)
            is_exact &= line is None or 0 in pair or error < 1
            known[trial.size] = need.total
            if len(known) == 1:  # as if all that is temporary grew with the rows
                known[0] = need.total - need.batch - need.temporary
        below, above = (0 if lo < 0 else sizes[lo]), (sizes[hi] if hi < len(sizes) else 0)
        nearest = sorted(known, key=lambda n: abs(known[n] - limit))[:2]
        for pair in (nearest, [below, above]):
            if (line := _line(known, pair)) is None:
                continue
            at = bisect.bisect_right(sizes, limit, key=line) - 1
            if at <= lo:  # nothing larger, if the line through what fits has been right
                fitting = _line(known, sorted(n for n in known if known[n] <= limit)[-2:])
                doubt = error + _ROUNDING * (not is_exact)
                if lo >= 0 and fitting and fitting(sizes[lo + 1]) - doubt > limit:
                    return trials
                at = lo + 1
            if at < hi:
                break
        else:  # no line, or a bend between the two
            middle = math.sqrt(below * above) if above > 4 * below else (below + above) / 2
            at = bisect.bisect_right(sizes, middle if above else 2 * below) - 1
            at = min(max(at, lo + 1), hi - 1)


def _line(known: dict[int, float], pair: list[int]) -> Callable[[int], float] | None:
    """The line through two sizes, if it rises."""
    a, b = min(pair, default=0), max(pair, default=0)
    if a not in known or b not in known or known[a] >= known[b]:
        return None
    slope = (known[b] - known[a]) / (b - a)
    return lambda n: known[a] + slope * (n - a)


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
    sizes follow a line through the trials: two or three if memory grows evenly. What is returned
    did fit. Where memory ends, XLA may compute activations again instead of storing them, so that a
    larger batch fits, too, at a price: the search goes by the line.

    Args:
      step: a `train_step`, or any jitted `(state, batch, **extra) -> (state, ...)`; for `States`
        the function that `fit` takes.
      state: arrays, or shapes (`jax.eval_shape(lambda: ts.setup(rule, params))`).
      example: a batch of any number of rows, or its shapes.
      mode: "power" tries 1, 2, 4, ... times `multiple_of`, and `max_size`; "binsearch" all sizes.
      max_size, multiple_of: hold in both modes. Sizes are multiples of `multiple_of`,
        and of the step's `accumulate` times the parts into which a mesh cuts rows; of all devices.
      memory: bytes for state and step on one device, or a text as "16GiB". Default: what the device
        gives to this process less what others hold there; on a CPU what is free on this machine.
      margin: the part that stays free, for batches on their way, evaluation, what XLA leaves out.
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
    unit = math.lcm(multiple_of, _parts(state) * getattr(step, "accumulate", 1))
    most = _MOST if max_size is None else max_size
    checks.check_count(most, where, "max_size", least=unit)
    sizes: Sequence[int] = range(unit, most + 1, unit)
    if mode == "power":
        sizes = [unit << i for i in range((most // unit).bit_length())]
        sizes = sorted({*sizes, most // unit * unit}) if max_size else sizes
    how = where, step, (state, example, extra), sizes, memory, margin
    return _found("batch size", *how)


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
    >>> n > 1 and n * report.trials[-1].size == 16384
    True
    """
    where = "find_accumulation()"
    if not isinstance(step, TrainStep):
        raise WrongTypeError("step", where, trees.describe(step), "a train_step")
    checks.check_count(batch_size, where, "batch_size")
    checks.check_count(multiple_of, where, "multiple_of")
    unit = math.lcm(multiple_of, _parts(state))
    small = [n for n in range(1, math.isqrt(batch_size) + 1) if batch_size % n == 0]
    sizes = sorted(n for n in {*small, *(batch_size // n for n in small)} if n % unit == 0)
    if not sizes:
        raise HyperparameterError("batch_size", where, batch_size, f"a multiple of {unit}")
    how = where, step, (state, example, extra), sizes, memory, margin, batch_size
    return _found("accumulate", *how)


def _found(what, where, step, arguments, sizes, memory, margin, whole=None) -> Any:
    """The largest of these sizes that fits; with `whole`, the micro-batches that it is cut into."""
    state, example, extra = arguments
    if odd := [x for x in jax.tree.leaves(example) if not checks.is_numeric(x)]:
        raise WrongTypeError("example", where, trees.describe(odd[0]), "one batch")
    if not any(map(np.ndim, jax.tree.leaves(example))):
        fix = "A loss that draws its own samples has their number in loss_fn."
        raise WrongTypeError("example", where, trees.describe(example), "a batch with rows", fix)
    step = fused_loop.lowerable(step, state)
    if isinstance(margin, bool) or not checks.is_real(margin) or not 0 <= margin < 1:
        got = trees.describe(margin)
        raise HyperparameterError("margin", where, got, "a number from 0 to below 1")
    if not hasattr(step, "lower"):
        got, fix = trees.describe(step), "ts.train_step(loss_fn), or jax.jit it."
        raise WrongTypeError("step", where, got, "one that can be lowered", fix)
    total, source = _memory.limit_of(memory, state, where)
    words = functools.partial(processes.current().gather, timeout=processes.LAST)
    total = min(map(int, words(where, str(total))))
    limit = int(total * (1 - margin))
    source += f", {margin:.0%} of it kept free" if margin else ""
    shapes = jax.eval_shape(lambda x: x, example)

    def attempt(size: int) -> SizeTrial:
        """One size by what XLA says; keeps no traceback, which would keep arrays."""
        cut = dataclasses.replace(step, accumulate=whole // size) if whole else step
        rows = lambda x: jax.ShapeDtypeStruct((whole or size, *x.shape[1:]), x.dtype)
        batch = jax.tree.map(lambda x: rows(x) if x.shape else x, shapes)
        began, need = time.perf_counter(), None
        try:
            need = _memory.need_of(cut, state, batch, extra)
        except (MemoryError, RuntimeError) as error:  # autotuning runs out of memory, too
            said = re.search("RESOURCE_EXHAUSTED|out of memory", str(error), re.IGNORECASE)
            if not said and not isinstance(error, MemoryError):
                raise
        fits = need is not None and need.total <= limit
        fits = not any(words(where, "" if fits else "no"))  # all go on together
        return SizeTrial(size, fits, need, time.perf_counter() - began)

    first = len(sizes) if whole else bisect.bisect_right(sizes, _FIRST * sizes[0])
    trials = _search(sizes, first - 1, attempt, limit)
    if (best := max((t.size for t in trials if t.fits), default=None)) is None:
        one = min(trials, key=lambda t: t.size)
        needs = f"needs {trees.bytes_str(one.need.total)}" if one.need else "could not be compiled"
        expected = f"at most {trees.bytes_str(limit)} ({source})"
        fix = "remat=True, a lower precision or a mesh with fsdp need less."
        got = f"{one.size} that {needs}"
        raise DoesNotFitError("smallest batch size", where, got, expected, fix)
    found = best if whole is None else whole // best
    return found, SizeReport(what, found, tuple(trials), limit, source)


def _parts(state: Any) -> int:
    mesh = _memory.mesh_of(state)
    return 1 if mesh is None or members_of(state) is not None else placement.row_parts(mesh)
