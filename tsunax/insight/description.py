"""Describe a compiled step: its cost, what it does to each leaf, and why it was recompiled.

describe(step, state, batch)   compiles, executes nothing
"""

from __future__ import annotations

import html
import math
import os
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tsunax._core import Device, PyTree, checks, patterns, tables, trees
from tsunax._step import traces as _traces
from tsunax._step.roles import frozen_flags
from tsunax.errors import HyperparameterError, StateError, WrongTypeError
from tsunax.hyper import hyperparams
from tsunax.insight import _cost, _memory
from tsunax.insight._cost import Collective, Flops
from tsunax.insight._memory import Need
from tsunax.program import TrainStep
from tsunax.rules import number_table
from tsunax.rules.factories import PatternMask
from tsunax.run import fused_loop
from tsunax.state import TrainState, check_state, split, trained_part

__all__ = ["Description", "Leaf", "describe", "measured_peak"]

WIDTH = 80  # of the page
MOST_CELL = WIDTH // 2 - 1  # of a cell of the table: two stand beside each other
MOST_ROWS = 24  # of leaves; if there are more, a row is for all of one kind


@dataclass(frozen=True)
class Leaf:
    """One leaf of params: what it is, and what the rule does with it now."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    # "trained", "frozen", "2 of 8 frozen" (members), "not trained", or "overwritten" by its
    # gradient
    status: str
    rule: str  # the live rules that see it, with the pattern of their group
    values: Mapping[
        str, Any
    ]  # live hyperparameters by name; a decay is 0 where a mask spares the leaf
    clip: str
    sharding: str  # "" on one device

    @property
    def kind(self) -> tuple[Any, ...]:
        """Leaves of one kind may share a row."""
        same = self.dtype, self.status, self.rule, self.clip, self.sharding
        return *same, tuple((name, str(x)) for name, x in self.values.items())


@dataclass(frozen=True)
class Description:
    """What `describe` returns: plain data, and a page of text when it is printed."""

    flops: Flops  # of one call, on all devices together
    bytes_accessed: float | None  # on one device, loop bodies counted once, where XLA says
    memory: Need | None  # bytes on one device while it runs, where XLA says
    donates: bool
    donated: int  # bytes on one device that the step consumes
    aliased: int  # bytes of them that its results take the place of
    not_aliased: tuple[str, ...]  # the leaves whose donation failed
    communication: tuple[Collective, ...]
    leaves: tuple[Leaf, ...]
    seconds: Mapping[
        str, float
    ]  # to trace, lower and compile it now: none where that was done before
    traces: int  # of this step so far, this one included
    recompiles: tuple[str, ...]  # why, for each but the first
    device: str
    devices: int
    peak: float | None  # FLOP/s of one device

    def utilisation(self, seconds_per_step: float, peak: float | None = None) -> float:
        """Model FLOPs utilization (MFU), 0 to 1: products and convolutions over the peak.

        What rematerialisation computes again counts as work. `peak`: FLOP/s of one device; without
        it that of `describe`.
        """
        where = "utilisation()"
        found = self.peak if peak is None else peak
        if found is None:
            fix = "Give peak=312e12 (of its data sheet), or describe(..., peak='measure')."
            raise HyperparameterError("peak", where, "None", "FLOP/s of one device", fix)
        _check_positive(found, where, "peak")
        _check_positive(seconds_per_step, where, "seconds_per_step")
        return self.flops.matmul / (seconds_per_step * found * self.devices)

    def __repr__(self) -> str:
        return "\n".join([*_summary(self), "", *_rows(self.leaves)])

    def _repr_html_(self) -> str:
        style = "overflow-x:auto;line-height:1.4"
        return f'<pre style="{style}">{html.escape(repr(self))}</pre>'


def describe(
    step: TrainStep, state: TrainState, batch: PyTree, *, peak: Any = None, **extra: Any
) -> Description:
    """Describe the cost and effects of a step from its compiled program, without executing it.

    FLOPs are counted over the whole step, gradient and rule included, with loops (`accumulate=`, a
    scan over layers) as often as they run, and what `remat` computes again; see `Flops`. The loops
    of `run_steps` and `fit` cost this much a step. Memory, donation and communication are those of
    the compiled program. The table has a line for each leaf of params, or for each kind of leaf if
    there are many.

    Args:
      step: a `train_step`.
      state, batch, extra: as for the step; arrays, or shapes (`jax.ShapeDtypeStruct`).
      peak: FLOP/s of one device, for `utilisation`; or "measure", which runs matrix products for a
        second or two.

    `recompiles` says why this step was traced again since it was made, by `fit` too: the leaf with
    another shape, dtype or weak type, the other rule, selection or precision, or where the trees
    differ. Equal steps, of one function, share the loop of `fit` and its traces.

    Raises WrongTypeError for a step that is no `train_step`, and what the step itself raises for
    these arguments.

    >>> import jax.numpy as jnp
    >>> import tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    >>> about = describe(step, ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones((64, 32))}), jnp.ones((16, 64)))
    >>> about.flops.matmul == 2 * 2 * 16 * 64 * 32, about.aliased == about.donated, about.leaves[0].values
    (True, True, {'learning_rate': 0.1})
    """
    where = "describe()"
    if not isinstance(step, TrainStep):
        fix = "Make one: ts.train_step(loss_fn)."
        raise WrongTypeError("step", where, trees.describe(step), "a train_step", fix)
    check_state(state, where, batch)
    if any(map(trees.is_traced, jax.tree.leaves((state, batch, extra)))):
        fix = "Call it outside of jit, with arrays or shapes."
        raise StateError("state or batch", where, "a traced one", "a concrete one", fix)
    if not _is_shapes(batch):
        checks.check_arrays(batch, "batch", "Leave it out, or turn it into numbers.")
    if peak is not None and not checks.is_one_of(peak, ("measure",)):
        _check_positive(peak, where, "peak", " of one device, or 'measure'")
    shapes, more = _memory.as_shapes(state, batch, extra)
    times = [time.perf_counter()]
    with warnings.catch_warnings():  # of donation, which is described with the leaves
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        traced = step.trace(state, shapes, **more)
        times.append(time.perf_counter())
        lowered = traced.lower()
        times.append(time.perf_counter())
        compiled = lowered.compile()
        times.append(time.perf_counter())
    text = compiled.as_text() or ""
    analysis, device = compiled.memory_analysis(), _memory.device_of_state(state)
    donated, failed = _donation(step, state, text)
    costs = compiled.cost_analysis() or {}
    costs = costs[0] if isinstance(costs, list) else costs
    loop = fused_loop.fused(step, step.donate)
    shared = loop.step if isinstance(loop.step, TrainStep) else step  # of equal steps
    looped = [trace for trace in shared.traces if trace.kind == "loop" and shared is not step]
    traces = [*step.traces, *looped]
    places = [("step", x) for x in step.programs.devices]
    places += [("loop", x) for x in loop.programs.devices]
    precision = state.plan.precision
    dtype = "float32" if precision is None else precision.compute or "float32"
    return Description(
        flops=_cost.flops_of(traced.jaxpr),
        bytes_accessed=costs.get("bytes accessed"),
        memory=None if analysis is None else _memory.need_in(compiled, state, shapes),
        donates=step.donate,
        donated=donated,
        aliased=0 if analysis is None else analysis.alias_size_in_bytes,
        not_aliased=failed,
        communication=_cost.collectives_in(text),
        leaves=_leaves(state),
        seconds=dict(zip(("trace", "lower", "compile"), np.diff(times).tolist(), strict=True)),
        traces=len(traces),
        recompiles=tuple(_traces.why(traces, places)),
        device=device.device_kind,
        devices=1 if (mesh := _memory.mesh_of(state)) is None else mesh.size,
        peak=measured_peak(device, dtype) if isinstance(peak, str) else peak,
    )


def _is_shapes(tree) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def _check_positive(x, where: str, name: str, more: str = "") -> None:
    expected = f"a number above 0{more}"
    if isinstance(x, bool) or not isinstance(x, (int, float, np.number)):
        raise WrongTypeError(name, where, trees.describe(x), expected)
    if not 0 < x < math.inf:
        raise HyperparameterError(name, where, x, expected)


def measured_peak(
    device: Device = None,
    dtype: DTypeLike = "float32",
    size: int | None = None,
    seconds: float = 0.5,
) -> float:
    """FLOP/s of the best square matrix product of this dtype on a device within `seconds`.

    `size`: of the matrices; without it they grow from 1024 to 16384 until a product takes 10 ms.

    >>> measured_peak(size=128, seconds=0.01) > 1e6
    True
    """
    where = "measured_peak()"
    _check_positive(seconds, where, "seconds")
    if size is not None:
        checks.check_count(size, where, "size")
    if device is not None and not isinstance(device, jax.Device):
        fix = "Take one of jax.devices(), or ts.device()."
        raise WrongTypeError("device", where, trees.describe(device), "a jax.Device", fix)
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        raise WrongTypeError("dtype", where, trees.describe(dtype), "the name of a dtype") from None
    product = jax.jit(lambda x: x @ x)
    best, n = 0.0, size or 1024
    while True:
        x = jax.device_put(jnp.ones((n, n), dtype), device)
        jax.block_until_ready(product(x))
        fastest, end = math.inf, time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            jax.block_until_ready(product(x))
            fastest = min(fastest, time.perf_counter() - start)
        best = max(best, 2 * n**3 / fastest)
        if size is not None or fastest > 0.01 or n >= 16384:
            return best
        n *= 2


def _donation(step: TrainStep, state: TrainState, text: str) -> tuple[int, tuple[str, ...]]:
    """Bytes on one device that the step consumes, and the leaves whose memory is not used again."""
    if not step.donate:
        return 0, ()
    known, aliased = _cost.donated_in(text)
    fields = "params", *state._moving
    total, failed = 0, []
    for path, x in jax.tree_util.tree_flatten_with_path(split(state)[0])[0]:
        size = _memory.bytes_on_one(x)
        total += size
        name = "moving" + jax.tree_util.keystr(path)
        if size and name in known and name not in aliased:
            failed.append(trees.access_str(f"state.{fields[path[0].idx]}", path[1:]))
    return total, tuple(failed)


# --------------------------------------------------------------------------------------- the leaves


def _leaves(state: TrainState) -> tuple[Leaf, ...]:
    named = trees.leaves_with_names(state.params)
    n = len(named)
    selected, replaced = state.plan.selected or (True,) * n, state.plan.overwritten or (False,) * n
    frozen = iter(_frozen_words(state))
    ruled = _ruled(state)
    found = []
    for (name, path, x), on, new in zip(named, selected, replaced, strict=True):
        status = "overwritten" if new else "not trained"
        if on:
            status = next(frozen) or "trained"
        rules, values, clip = ruled.get(path, ([], {}, []))
        rule = ", ".join(rules) or ("an optax rule" if on else "")
        about = status, rule, values, ", ".join(clip), _sharding(x)
        found.append(Leaf(trees.show(name), np.shape(x), str(trees.dtype_of(x)), *about))
    return tuple(found)


def _frozen_words(state: TrainState) -> list[str]:
    """For each trained leaf "frozen", or in how many members, or "" (also for mere shapes)."""
    if not all(map(trees.is_array, jax.tree.leaves(state.frozen))):
        return [""] * len(jax.tree.leaves(trained_part(state)))
    flags = np.atleast_2d(frozen_flags(state))
    some = [f"{on.sum()} of {len(on)} frozen" if on.any() else "" for on in flags.T]
    return ["frozen" if on.all() else text for on, text in zip(flags.T, some, strict=True)]


def _sharding(x) -> str:
    sharding = getattr(x, "sharding", None)
    if sharding is None or len(sharding.device_set) == 1:
        return ""
    return str(getattr(sharding, "spec", sharding)).replace("PartitionSpec", "P")


def _ruled(state: TrainState) -> dict[tuple, tuple[list[str], dict[str, Any], list[str]]]:
    """By key path: the live rules that see a leaf, their numbers for it, and those that clip it."""
    found: dict[tuple, tuple[list[str], dict[str, Any], list[str]]] = {}
    if state.numbers is None:
        return found
    known = hyperparams(state) if all(map(trees.is_array, jax.tree.leaves(state))) else {}
    lives = state.numbers.layout.lives
    for at, s, group, _ in state.numbers.columns():
        flat = state.numbers.layout.names[at][group]
        decays = _decays(s, state)
        pattern = "@".join(number_table.patterns(lives[at][0]))
        of = s.cut.of if s.cut else (0,) * len(s.paths)
        for path, mine, decayed in zip(s.paths, of, decays, strict=True):
            if mine != group:
                continue
            rules, values, clip = found.setdefault(path, ([], {}, []))
            title = s.live.title
            if title.startswith("clip"):
                bounds = [_number(known[name]) for name in flat if name in known]
                clip.append(" ".join([title, *bounds]))
                continue
            rules.append(f"{title}@{pattern}" if pattern else title)
            for name, label in zip(s.live.names, flat, strict=True):
                if label in known:
                    spared = name.endswith("decay") and not decayed
                    values[name if name not in values else label] = 0.0 if spared else known[label]
    return found


def _decays(s, state: TrainState) -> list[bool]:
    """For each leaf that a live rule sees whether its decay reaches it."""
    where = s.live.statics.get("mask", s.live.statics.get("where"))
    everywhere = [True] * len(s.paths)
    if where is None:
        return everywhere
    seen, part = frozenset(s.paths), trained_part(state)
    keyed = jax.tree_util.tree_flatten_with_path(part)[0]
    part = trees.partition(part, [path in seen for path, _ in keyed])[0]
    if "mask" not in s.live.statics:
        flags = list(patterns.select(where, part, allow_empty=True))
    else:
        mask = where(part) if callable(where) or isinstance(where, PatternMask) else where
        flags = [bool(x) for x in jax.tree.leaves(mask)]
    return flags if len(flags) == len(s.paths) else everywhere


# ----------------------------------------------------------------------------------------- in words


def _number(x) -> str:
    low, high = f"{np.min(x):.3g}", f"{np.max(x):.3g}"
    return low if low == high else f"{low}..{high}"


def _si(x: float, unit: str) -> str:
    sizes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    n, letter = next(((n, c) for n, c in sizes if x >= n), (1, ""))
    return f"{x / n:.3g} {letter}{unit}"


def _summary(d: Description) -> list[str]:
    total = sum(d.seconds.values())
    on = d.device if d.devices == 1 else f"{d.devices} x {d.device}"
    parts = ", ".join(f"{name} {x:.2f}" for name, x in d.seconds.items())
    when = f"in {total:.2f} s ({parts})" if total > 0.005 else "before"
    lines = [f"a step on {on}, compiled {when}"]
    for name, text in _facts(d):
        indents = f"  {name:<8}  ", " " * (12 if name else 14)
        lines += _wrapped(text, *indents, max_lines=4, placeholder=" ...", break_long_words=False)
    return lines


def _wrapped(text: str, first: str, then: str, **how: Any) -> list[str]:
    indents = {"initial_indent": first, "subsequent_indent": then}
    return textwrap.wrap(text, WIDTH, **indents, break_on_hyphens=False, **how)


def _facts(d: Description) -> Iterator[tuple[str, str]]:
    """The lines of a description, each with its title."""
    share = d.flops.matmul / d.flops.total if d.flops.total else 0.0
    work = _si(d.flops.total, "FLOP")
    work += f", {share:.1%} in products and convolutions" if d.flops.total else ""
    yield "work", f"{work}; {_si(d.flops.transcendental, 'calls')} of exp, sqrt, ..."
    if n := d.flops.loops:
        bodies = "the body of a while loop is" if n == 1 else f"the bodies of {n} while loops are"
        yield "", f"{bodies} counted once: nobody knows how often they run"
    if d.flops.opaque:
        yield "", f"not counted: {', '.join(d.flops.opaque)}"
    if d.bytes_accessed is not None:
        traffic = trees.bytes_str(d.bytes_accessed)
        yield "traffic", f"{traffic} read and written, loop bodies counted once"
    if (need := d.memory) is not None:
        named = ("state", "batch", "temporary", "results", "runtime")
        shown = ", ".join(f"{name} {trees.bytes_str(getattr(need, name))}" for name in named)
        yield "memory", f"{trees.bytes_str(need.total)}: {shown}"
    taken = f"{trees.bytes_str(d.donated)}, of which results take {trees.bytes_str(d.aliased)}"
    yield "donated", taken if d.donates else "nothing: donate=False"
    if d.not_aliased:
        names = trees.listed(d.not_aliased, 3)
        yield "WARNING", f"the donation of {names} failed: both old and new are held (jax#9675)"
    if d.devices > 1:
        talk = (f"{c.kind} {c.count:g} x, {trees.bytes_str(c.bytes)}" for c in d.communication)
        yield "talks", f"{'; '.join(talk) or 'not at all'}, on each device"
    if d.peak is not None:
        best = d.flops.matmul / d.peak / d.devices * 1e3
        yield "peak", f"{_si(d.peak, 'FLOP/s')} a device: {best:.3g} ms at best"
    again = f", {len(d.recompiles)} of them again" if d.recompiles else ""
    yield "traced", f"{d.traces} time{'s' * (d.traces != 1)}{again}"
    for why, n in Counter(d.recompiles).items():
        yield "", why + (f" ({n} times)" if n > 1 else "")


def _rows(leaves: tuple[Leaf, ...]) -> list[str]:
    """The table: a row for each leaf, or for each kind of leaf if there are many.

    What all have in common is said once, below.
    """
    by_kind: dict[Any, list[Leaf]] = {}
    for i, leaf in enumerate(leaves):
        by_kind.setdefault(i if len(leaves) <= MOST_ROWS else leaf.kind, []).append(leaf)
    numbers = _told(leaves)
    head, rows = ["leaf", "shape", "status", "rule", *numbers, "clip", "sharding"], []
    for group in by_kind.values():
        first, n = group[0], len(group)
        path, shape = first.path, f"{first.dtype}{list(first.shape)}"
        if n > 1:
            size = sum(math.prod(leaf.shape) for leaf in group)
            path = f"{_common([leaf.path for leaf in group])} ({n} leaves)"
            shape = f"{first.dtype}, {_si(size, 'in all')}"
        values = [_number(first.values[name]) if name in first.values else "" for name in numbers]
        rows.append((path, shape, first.status, first.rule, *values, first.clip, first.sharding))
    columns = [[title, *_shortened(cells)] for title, *cells in zip(head, *rows, strict=True)]
    common, shown = [], columns[:2]
    for title, *cells in columns[2:]:
        if len(set(cells)) > 1:
            shown.append([title, *cells])
        elif cells and cells[0]:
            common.append(f"{title}={cells[0]}" if title in numbers else cells[0])
    told = _wrapped(f"all: {', '.join(common)}", "", "     ") if common else []
    return [*_blocks(*shown), *told]


def _shortened(cells: list[str]) -> list[str]:
    """Cells that are too long without their middle, cut so that they still differ if that can be."""
    cut = lambda x, n: x if len(x) < MOST_CELL else f"{x[:n]}...{x[n + 3 - MOST_CELL :]}"
    ways = [[cut(x, n) for x in cells] for n in (17, *range(MOST_CELL - 4, 0, -1))]
    return next((way for way in ways if len(set(way)) == len(set(cells))), ways[0])


def _blocks(first: list[str], *columns: list[str]) -> list[str]:
    """Columns side by side; those that do not fit into the page follow below with the first one."""
    table = lambda block: tables.aligned(list(zip(*block, strict=True)))
    lines, block = [], [first]
    for column in columns:
        if len(block) > 1 and max(map(len, table([*block, column]))) > WIDTH:
            lines += table(block)
            block = [first]
        block.append(column)
    return lines + table(block)


def _told(leaves: tuple[Leaf, ...]) -> list[str]:
    """The numbers that a table has room for: rates, decays, and those that differ."""
    seen: dict[str, set[str]] = {}
    for leaf in leaves:
        for name, x in leaf.values.items():
            seen.setdefault(name, set()).add(str(x))
    return [n for n, values in seen.items() if len(values) > 1 or "rate" in n or "decay" in n]


def _common(paths: list[str]) -> str:
    """The names that paths begin and end with: "blocks/.../kernel"."""
    parts: Any = [path.split("/") for path in paths]
    same = os.path.commonprefix
    begin = same(parts)
    end = same([part[len(begin) :][::-1] for part in parts])[::-1]
    return "/".join([*begin, "...", *end])
