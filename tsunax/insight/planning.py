"""The micro-batches, remat, host memory and sharding that fit, and the fastest choice.

    plan(step, state, example, batch_size)   compiles candidates, executes nothing

The search for the largest micro-batch that fits is in `batch_size.py`, and the estimate of time in
`_roofline.py`. This file chooses the configurations for which that search runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tsunax._core import Device, Extra, Function, PyTree, checks, tables, trees
from tsunax.errors import HyperparameterError, WrongTypeError
from tsunax.insight import _cost, _memory, _roofline
from tsunax.insight._layouts import Layout, layouts_of
from tsunax.insight._roofline import Peaks, Work
from tsunax.insight.batch_size import (
    Search,
    SizeTrial,
    check_has_rows,
    row_parts,
    sizes_of_micro_batches,
    with_rows,
)
from tsunax.insight.description import with_si_prefix
from tsunax.program import TrainStep, check_is_train_step

__all__ = ["Peaks", "Plan", "PlanRow", "plan"]

VARIABLES = ("accumulate", "remat", "host", "layout")


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """A candidate of `plan`: its settings, and the needs of its compiled program.

    Call `step` with the state `shard(make)`, in which `make` is a state or a function that makes
    one. A candidate that was not compiled has no `need`, and a `reason`.

    The compiled program has `need` (bytes on one device, by part) and `flops` (products, all
    devices), of which remat adds `recomputed`. `wire` are the bytes that a device sends in one
    step; they, `seconds` a step and `rows_per_second` are estimates.
    """

    accumulate: int
    remat: bool | str | Function | None
    layout: Layout
    step: TrainStep
    reason: str = ""
    fits: bool = False
    need: _memory.Need | None = None
    flops: float = 0.0
    recomputed: float = 0.0
    wire: float = 0.0
    seconds: float = float("inf")
    rows_per_second: float = 0.0

    def shard(self, make: PyTree, devices: Sequence[Device] | None = None) -> PyTree:
        """The state that `make` is or makes, placed for this candidate.

        `devices` are the real ones, after a plan for a topology. Raises like `ts.shard`.
        """
        return self.layout.shard(make, devices)

    def __repr__(self) -> str:
        parts = [f"accumulate={self.accumulate}", f"remat={_remat_name(self.remat)}"]
        parts += [f"host={'+'.join(self.layout.host)}"] * bool(self.layout.host)
        return ", ".join([*parts, f"layout={self.layout.name}"])


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of `plan`: all candidates as `rows`; prints the compiled ones.

    `limit` are the bytes of one device that were allowed, less the margin, and `source` says where
    that number is from. `varied` has the values tried of each variable, or the reason if there are
    none.
    """

    rows: tuple[PlanRow, ...]
    limit: int
    source: str
    peaks: Peaks
    varied: Mapping[str, str]
    search: Search
    _repr_html_ = tables.folded

    @property
    def best(self) -> PlanRow:
        """The fastest candidate that fits. Raises DoesNotFitError if none does."""
        if fitting := [row for row in self.rows if row.fits]:
            return min(fitting, key=_SECONDS)
        nearest = min(
            (r for r in self.rows if r.need),
            key=operator.attrgetter("need.total"),
            default=self.rows[-1],
        )
        raise self.search.does_not_fit(f"nearest plan ({nearest!r})", nearest.need)

    def why(self, row: PlanRow) -> str:
        """Why a candidate is not the best, or was not compiled, as a sentence."""
        if row.reason:
            return f"{row!r} was not compiled: {row.reason}."
        if row.need is None:
            return f"{row!r} does not fit: the memory ended while it compiled."
        if not row.fits:
            parts = dataclasses.asdict(row.need) | {"host": 0}
            largest = max(parts, key=lambda name: parts[name])
            excess = trees.bytes_str(row.need.total - self.limit)
            share = trees.bytes_str(parts[largest])
            return (
                f"{row!r} does not fit: {excess} too much; the largest part is {largest}, {share}."
            )
        best = self.best
        if row == best:
            return f"{row!r} is the fastest that fits, about {tables.short(row.seconds)} s a step."
        cache, temporary = self.peaks.cache, row.need.temporary
        costs = {
            f"recomputes {with_si_prefix(row.recomputed, 'FLOP')}": row.recomputed
            > best.recomputed,
            f"sends {trees.bytes_str(row.wire)} to other devices": row.wire > best.wire,
            f"has {row.accumulate} micro-batches": row.accumulate > best.accumulate,
            f"has temporary values of {trees.bytes_str(temporary)}, more than the cache": (
                temporary > cache > 0
            ),
            "moves parts of the state from and to the host": row.layout.host != best.layout.host,
        }
        listed = ", ".join(cost for cost, is_higher in costs.items() if is_higher)
        reasons = f": it {listed}" if listed else ""
        ratio = f"takes about {row.seconds / best.seconds:.3g} times as long as {best!r}"
        return f"{row!r} fits, and {ratio}{reasons}."

    def __repr__(self) -> str:
        compiled = sorted(
            (r for r in self.rows if not r.reason), key=lambda r: (not r.fits, r.seconds)
        )
        parts = [f.name for f in dataclasses.fields(_memory.Need)]
        if not any(r.need and r.need.host for r in compiled):
            parts.remove("host")
        head = [
            "candidate",
            "fits",
            "need",
            *parts,
            "FLOPs",
            "recomputed",
            "~wire",
            "~s",
            "~rows/s",
        ]
        cells = [head]
        for r in compiled:
            sizes = [getattr(r.need, name) for name in ["total", *parts]] if r.need else []
            numbers = [
                with_si_prefix(r.flops, ""), with_si_prefix(r.recomputed, ""),
                trees.bytes_str(r.wire), f"{r.seconds:.2e}", f"{r.rows_per_second:.3g}",
            ]  # fmt: skip
            memory = [trees.bytes_str(n) for n in sizes] or ["too much", *[""] * len(parts)]
            cells.append([repr(r), "yes" if r.fits else "no", *memory, *numbers])
        title = f"{len(compiled)} of {len(self.rows)} candidates compiled"
        lines = [f"{title}, within {trees.bytes_str(self.limit)} ({self.source})"]
        lines += tables.aligned(cells, right=range(2, len(head)))
        lines += [f"{name}: {text}" for name, text in self.varied.items()]
        lines.append(
            f"~ is estimated: a roofline, peaks from {self.peaks.source}. The other figures are "
            "exact: of the compiled program, which the compiler laid out for this device."
        )
        return "\n".join(lines)


def _size_in_cache(sizes: Sequence[int], temporary: Mapping[int, int], cache: float) -> int | None:
    """The largest size with temporary values within the cache; None if all or no sizes have them.

    They grow with the rows, along the line through the smallest and the largest measured size.
    """
    if not temporary or max(temporary.values()) <= cache:
        return None
    (smallest, low), (largest, high) = min(temporary.items()), max(temporary.items())
    if smallest == largest:
        smallest, low = 0, 0
    slope = (high - low) / (largest - smallest)
    sizes_within = [size for size in sizes if low + slope * (size - smallest) <= cache]
    return max(sizes_within, default=None)


_SECONDS = operator.attrgetter("seconds", "accumulate")


def _remat_name(remat: Any) -> str:
    return str(getattr(remat, "__name__", remat)) if remat else "none"


@checks.naming_arguments
def plan(
    step: TrainStep,
    state: PyTree,
    example: PyTree,
    batch_size: int,
    *,
    devices: Any = None,
    memory: int | str | None = None,
    vary: Sequence[str] = VARIABLES,
    margin: float = 0.05,
    peaks: Peaks | None = None,
    **extra: Any,
) -> Plan:
    """The ways to run a step that fit into memory, and the fastest way: a table.

        report = ts.plan(step, make, example, 512, memory="14 GiB")
        step, state = report.best.step, report.best.shard(make)

    Candidates differ in micro-batches (`accumulate`, all divisors), in `remat` (none,
    "dots_saveable", True), in the parts of the state in the `host`'s memory, and in their `layout`
    over the devices (data parallel, with the moments spread, fully sharded). All compute the same
    step up to rounding. For each configuration the micro-batches are searched as in
    `find_accumulation`. A candidate is not compiled if another of the same layout, with no more
    remat and host memory, fits with micro-batches at least as large, or if its FLOPs and transfers
    alone take as long as an earlier candidate that fits.

    Nothing is executed or allocated. (On a GPU the programs are compiled without autotuning, which
    would run kernels.)

    Args:
      step: a `train_step`; its `accumulate` and `remat` are replaced where they are varied.
      state: a state, its shapes, or a function that makes it and is only traced.
      example: a batch of any number of rows, or its shapes.
      batch_size: rows of a batch on all devices, which stays.
      devices: a topology ("v5e:8x8", "h100:8", see `devices.topology`), a kind, a list of devices
        or a mesh (its axes stay). By default the state stays where it is.
      memory, margin: as in `find_batch_size`, for each device.
      vary: the variables to try, of "accumulate", "remat", "host" and "layout". Moments in another
        dtype are another training, so they are not tried.
      peaks: `insight.Peaks` of one device. By default from its data sheet (products in 16 bits);
        for a CPU nominal figures.
      extra: arguments for the step.

    Raises HyperparameterError and WrongTypeError for these arguments; `plan.best` raises
    DoesNotFitError.

    >>> import jax, jax.numpy as jnp, tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean(jnp.tanh(x @ params["w"]) ** 2))
    >>> make = lambda: ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones((512, 512))})
    >>> x = jax.ShapeDtypeStruct((1, 512), jnp.float32)
    >>> report = plan(step, make, x, 16384, memory="110 MiB", vary=("accumulate", "remat"))
    >>> report.best.accumulate, report.best.remat is None
    (4, True)
    """
    where = "plan()"
    check_is_train_step(step, where)
    check_has_rows(example, where)
    batch_size = checks.check_count(batch_size, where, "batch_size")
    if not isinstance(vary, Sequence):
        expected = f"some of {', '.join(VARIABLES)}"
        raise WrongTypeError("vary", where, trees.describe(vary), expected)
    for name in (vary := [vary] if isinstance(vary, str) else vary):
        checks.check_choice(name, where, "vary", VARIABLES)
    layouts, varied = layouts_of(state, devices, vary)
    first_state = layouts[0].state
    mesh = _memory.mesh_of(first_state)
    count = 1 if mesh is None else mesh.size
    search = Search.within(memory, margin, first_state, where)
    peaks = peaks or _roofline.peaks_of(_memory.device_of_state(first_state), count)
    remats: list[Any] = [None, "dots_saveable", True] if "remat" in vary else [step.remat]
    if step.remat and step.remat not in remats:
        remats.insert(1, step.remat)
    sizes = sizes_of_micro_batches(step, batch_size, row_parts(first_state), where)
    if "accumulate" not in vary:
        if batch_size % step.accumulate:
            expected = f"a multiple of accumulate={step.accumulate}"
            raise HyperparameterError("batch_size", where, batch_size, expected)
        sizes = [batch_size // step.accumulate]
    varied["remat"] = ", ".join(map(_remat_name, remats))
    varied["accumulate"] = ", ".join(str(batch_size // size) for size in reversed(sizes))
    candidates = _Candidates(step, with_rows(example, batch_size), extra, search, peaks, count)
    # Configurations that save less memory come first, because they are faster.
    configurations = itertools.product(enumerate(layouts), enumerate(remats))
    for (_, layout), (_, remat) in sorted(configurations, key=lambda c: c[0][0] + c[1][0]):
        candidates.search_sizes(layout, remat, sizes, remats)
    varied = {name: varied[name] for name in VARIABLES}
    return Plan(tuple(candidates.rows), search.limit, search.source, peaks, varied, search)


class _Candidates:
    """The rows of a plan, as the search finds them."""

    def __init__(
        self, step: TrainStep, batch: PyTree, extra: Extra, search: Search, peaks: Peaks, count: int
    ) -> None:
        self.step, self.batch, self.extra = step, batch, extra
        self.search, self.peaks, self.count = search, peaks, count
        self.rows: list[PlanRow] = []
        self.batch_size: int = max(x.shape[0] for x in jax.tree.leaves(batch) if x.shape)
        self._flops: dict[Any, float] = {}  # by remat

    def search_sizes(
        self, layout: Layout, remat: Any, sizes: Sequence[int], remats: Sequence[Any]
    ) -> None:
        """Find the largest micro-batch with which one configuration fits, of those worth it."""
        # candidates of this layout that fit with no more remat and host memory
        milder = [
            row
            for row in self.rows
            if row.fits
            and row.layout.name == layout.name
            and {*row.layout.host} <= {*layout.host}
            and remats.index(row.remat) <= remats.index(remat)
        ]
        fastest = min((row for row in self.rows if row.fits), key=_SECONDS, default=None)
        reasons: dict[int, str] = {}
        if fastest is not None and self._least_seconds(layout, remat) >= fastest.seconds:
            slow = f"its FLOPs and transfers alone take as long as {fastest!r}"
            reasons = dict.fromkeys(sizes, slow)
        elif milder:
            largest = min(milder, key=lambda row: row.accumulate)  # with the largest micro-batch
            size_that_fits = self.batch_size // largest.accumulate
            text = f"{largest!r} fits, and is faster"
            reasons = {size: text for size in sizes if size <= size_that_fits}
        new_sizes = [size for size in sizes if size not in reasons]
        trials, works = self._trials(layout, remat, new_sizes) if new_sizes else ({}, {})
        for size in sizes:
            reason = reasons.get(size) or ("" if size in trials else _reason(size, trials))
            self.rows.append(self._row(layout, remat, size, trials, works, reason))

    def _trials(
        self, layout: Layout, remat: Any, sizes: Sequence[int]
    ) -> tuple[dict[int, SizeTrial], dict[int, Work]]:
        works: dict[int, Work] = {}

        def need_of_size(size: int) -> _memory.Need:
            need, works[size] = self._measure(layout, self._step_of(remat, size))
            return need

        trials = self.search.trials(sizes, need_of_size, len(sizes) - 1)
        for _ in range(2):
            temporary = {x.size: x.need.temporary for x in trials if x.fits and x.need}
            size = _size_in_cache(sizes, temporary, self.peaks.cache)
            if size is None or size in works:
                break
            trials.append(self.search.trial(need_of_size, size))
        return {trial.size: trial for trial in trials}, works

    def _measure(self, layout: Layout, step: TrainStep) -> tuple[_memory.Need, Work]:
        """Compile a candidate."""
        batch, extra = _memory.as_shapes(layout.state, self.batch, self.extra)
        traced = step.trace(layout.state, batch, **extra)
        compiled = _memory.compiled_quickly(traced.lower(), layout.state)
        need = _memory.need_in(compiled, layout.state, batch)
        flops = _cost.flops_of(traced.jaxpr)
        return need, _roofline.work_of(flops, compiled, need, self.count)

    def _row(
        self,
        layout: Layout,
        remat: Any,
        size: int,
        trials: Mapping[int, SizeTrial],
        works: Mapping[int, Work],
        reason: str,
    ) -> PlanRow:
        step, trial, work = self._step_of(remat, size), trials.get(size), works.get(size)
        row = PlanRow(step.accumulate, remat, layout, step, reason)
        if trial is None or work is None:
            return row
        seconds = work.seconds(self.peaks)
        return dataclasses.replace(
            row,
            fits=trial.fits,
            need=trial.need,
            flops=work.flops,
            recomputed=work.flops - self._flops_of(None, layout) if remat else 0.0,
            wire=work.wire,
            seconds=seconds,
            rows_per_second=self.batch_size / seconds,
        )

    def _step_of(self, remat: Any, size: int) -> TrainStep:
        count = self.batch_size // size
        return dataclasses.replace(self.step, remat=remat, accumulate=count)

    def _flops_of(self, remat: Any, layout: Layout) -> float:
        if remat not in self._flops:
            batch, extra = _memory.as_shapes(layout.state, self.batch, self.extra)
            uncut = dataclasses.replace(self.step, remat=remat, accumulate=1, noise_scale=False)
            self._flops[remat] = _cost.flops_of(uncut.trace(layout.state, batch, **extra).jaxpr)
        return self._flops[remat]

    def _least_seconds(self, layout: Layout, remat: Any) -> float:
        """A bound that needs no compilation: products, and parts of the state to the host."""
        offloaded = filter(trees.is_offloaded, jax.tree.leaves(layout.state))
        host_bytes = 2.0 * sum(map(_memory.bytes_per_device, offloaded))
        work = Work(self._flops_of(remat, layout), 0.0, 0.0, host_bytes, self.count)
        return work.seconds(self.peaks)


def _reason(size: int, trials: Mapping[int, SizeTrial]) -> str:
    """The reason why a size was not compiled, from the trials of its configuration."""
    if any(trial.fits and trial.size > size for trial in trials.values()):
        return "it fits with fewer micro-batches"
    if any(not trial.fits and trial.size < size for trial in trials.values()):
        return "it does not fit with more micro-batches"
    return "a line through the memory of the compiled sizes is above the limit"
