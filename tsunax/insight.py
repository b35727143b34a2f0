"""See into a step: what it costs before it runs (`describe`), where a value that is not finite came from (`replay`).

    describe(step, state, batch)   compiles, executes nothing
    replay(step, state, batch)     runs that one step again, equation by equation

Both are functions of what the step itself is given, and change none of it.
"""

from __future__ import annotations

import html
import linecache
import math
import re
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax import _blame, _checks, _cost, _fused, _hoist, _memory, _traces, _tree, _where, guard
from tsunax._cost import Collective, Flops
from tsunax._live import PatternMask
from tsunax._loss_fn import LIBRARIES
from tsunax._members import members_of
from tsunax._memory import Need
from tsunax.errors import HyperparameterError, StateError, WrongTypeError, message
from tsunax.hyper import hyperparams
from tsunax.program import TrainStep, _apart, home_of
from tsunax.state import TrainState, check_state, frozen_flags, trained_part
from tsunax.step import gradient_of

__all__ = ["Description", "Leaf", "Report", "describe", "measured_peak", "replay"]

MOST_ROWS = 24  # of leaves, before those alike are shown as one


@dataclass(frozen=True)
class Leaf:
    """One leaf of params: what it is, and what the rule does with it now."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    status: str  # "trained", "frozen", "not trained", or "overwritten" by its gradient
    rule: str  # the live rules that see it, with the pattern of their group
    values: Mapping[str, Any]  # live hyperparameters by name; a decay is 0 where a mask spares the leaf
    clip: str
    sharding: str  # "" on one device

    @property
    def kind(self) -> tuple:
        """What two leaves have in common that are shown as one."""
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
    seconds: Mapping[str, float]  # to trace, lower and compile it now
    traces: int  # of this step so far, this one included
    recompiles: tuple[str, ...]  # why, for each but the first
    device: str
    devices: int
    peak: float | None  # FLOP/s of one device

    def utilisation(self, seconds_per_step: float, peak: float | None = None) -> float:
        """The part of the peak that the dot products and convolutions of a step reach (MFU), 0 to 1.

        What rematerialisation computes again counts as work. `peak`: FLOP/s of one device; without it that of
        `describe`.
        """
        where = "utilisation()"
        found = self.peak if peak is None else peak
        if found is None:
            fix = "Give peak=312e12 (of its data sheet), or describe(..., peak='measure')."
            raise HyperparameterError(message("peak", where, "None", "FLOP/s of one device", fix))
        _check_positive(found, where, "peak")
        _check_positive(seconds_per_step, where, "seconds_per_step")
        return self.flops.matmul / (seconds_per_step * found * self.devices)

    def __repr__(self) -> str:
        return "\n".join([*_summary(self), "", *_rows(self.leaves)])

    def _repr_html_(self) -> str:
        style = "white-space:pre;overflow-x:auto;line-height:1.4;font-family:Menlo,Consolas,monospace;margin:0"
        return f'<pre style="{style}">{html.escape(repr(self))}</pre>'


def describe(step: TrainStep, state: TrainState, batch, *, peak: Any = None, **extra) -> Description:
    """What a step costs and does, read off its program: compiled, never executed. Prints as a page of text.

    FLOPs are counted over the program of the step, gradient and rule included, with loops (`accumulate=`, a scan over
    layers) as often as they run, and what `remat` computes again; see `Flops` for what is one. The loops of
    `train_steps` and `fit` cost this much a step. Memory, donation and communication are those of the compiled program.
    The table has a line for each leaf of params, or for each kind of leaf where there are many.

    Args:
      step: a `train_step`.
      state, batch, extra: as for the step; arrays, or shapes (`jax.ShapeDtypeStruct`).
      peak: FLOP/s of one device, for `utilisation`; or "measure", which runs a matrix product for half a second.

    `recompiles` says why this step was traced more often than once since it was made, `fit` included: the leaf with
    another shape, dtype or weak type, the other rule, selection or precision, or where the trees differ. A step that is
    made anew, of a new function, knows nothing of the one before it.

    Raises WrongTypeError for what is no train_step, and what the step itself raises for these arguments.

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
        raise WrongTypeError(message("step", where, _tree.describe(step), "a train_step", fix))
    check_state(state, where, batch)
    _checks.check_arrays(batch, "batch", "Leave it out, or turn it into numbers.") if not _is_shapes(batch) else None
    if peak is not None and not (isinstance(peak, str) and peak == "measure"):
        _check_positive(peak, where, "peak", " of one device, or 'measure'")
    shapes, more = _memory.as_shapes(state, batch, extra)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")  # it is said here, with the leaves
        started = time.perf_counter()
        traced = step.trace(state, shapes, **more)
        then = time.perf_counter()
        lowered = traced.lower()
        later = time.perf_counter()
        compiled = lowered.compile()
    seconds = {"trace": then - started, "lower": later - then, "compile": time.perf_counter() - later}
    text = compiled.as_text() or ""
    analysis, device = compiled.memory_analysis(), _memory.device_of_state(state)
    donated, failed = _donation(step, state, text)
    costs = compiled.cost_analysis() or {}
    costs = costs[0] if isinstance(costs, list) else costs
    traces = [*step.traces, *_elsewhere(step)]
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
        seconds=seconds,
        traces=len(traces),
        recompiles=tuple(_traces.why(traces)),
        device=device.device_kind,
        devices=1 if (mesh := _memory.mesh_of(state)) is None else mesh.size,
        peak=measured_peak(device) if isinstance(peak, str) else peak,
    )


def _is_shapes(tree) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def _elsewhere(step: TrainStep) -> list:
    """The traces of an equal step whose compiled loop this one shares."""
    other = _fused.fused(step, step.donate).step
    return other.traces if isinstance(other, TrainStep) and other is not step else []


def _check_positive(x, where: str, name: str, more: str = "") -> None:
    expected = f"a number above 0{more}"
    if isinstance(x, bool) or not isinstance(x, (int, float, np.number)):
        raise WrongTypeError(message(name, where, _tree.describe(x), expected))
    if not 0 < x < math.inf:
        raise HyperparameterError(message(name, where, x, expected))


def measured_peak(device: Any = None, dtype: Any = "float32", size: int = 2048, seconds: float = 0.5) -> float:
    """FLOP/s that a square matrix product reaches on a device, the best of those that `seconds` have room for."""
    x = jax.device_put(jnp.ones((size, size), dtype), device)
    product = jax.jit(lambda x: x @ x)
    jax.block_until_ready(product(x))
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        jax.block_until_ready(product(x))
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _donation(step: TrainStep, state: TrainState, text: str) -> tuple[int, tuple[str, ...]]:
    """Bytes on one device that the step consumes, and the leaves of which none are used again."""
    if not step.donate:
        return 0, ()
    known, aliased = _cost.donated_in(text)
    fields = "clock", "params", "opt_state", "model_state", ("masters", "average", "loss_scale")
    total, failed = 0, []
    for path, x in jax.tree_util.tree_flatten_with_path(_apart(state)[0])[0]:
        size = _memory.bytes_on_one(x)
        total += size
        name = "moving" + jax.tree_util.keystr(path)
        if size and name in known and name not in aliased:
            field, rest = fields[path[0].idx], path[1:]
            if isinstance(field, tuple):
                field, rest = field[path[1].idx], path[2:]
            failed.append(_tree.access_str(f"state.{field}", rest))
    return total, tuple(failed)


# ----------------------------------------------------------------------------------------------------------- the leaves


def _leaves(state: TrainState) -> tuple[Leaf, ...]:
    named = _tree.leaves_with_names(state.params)
    n = len(named)
    selected, replaced = state.plan.selected or (True,) * n, state.plan.overwritten or (False,) * n
    concrete = isinstance(state.frozen, jax.Array) and not _tree.is_traced(state.frozen) and state.frozen.ndim == 1
    frozen = iter(frozen_flags(state) if concrete else [False] * n)
    ruled = _ruled(state)
    found = []
    for (name, path, x), on, new in zip(named, selected, replaced, strict=True):
        status = "not trained" if not on else "frozen" if next(frozen) else "overwritten" if new else "trained"
        rules, values, clip = ruled.get(path, ([], {}, []))
        rule = ", ".join(rules) or ("" if status in ("not trained", "overwritten") else "an optax rule")
        kind = str(_tree.dtype_of(x))
        found.append(Leaf(_tree.show(name), np.shape(x), kind, status, rule, values, ", ".join(clip), _sharding(x)))
    return tuple(found)


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
    known = hyperparams(state) if all(map(_tree.is_array, jax.tree.leaves(state))) else {}
    lives = state.numbers.layout.lives
    for at, s, group, _ in state.numbers.columns():
        flat = state.numbers.layout.names[at][group]
        decays = _decays(s, state)
        pattern = "@".join(_hoist.patterns(lives[at][0]))
        of = s.cut.of if s.cut else (0,) * len(s.paths)
        for path, mine, decayed in zip(s.paths, of, decays, strict=True):
            if mine != group:
                continue
            rules, values, clip = found.setdefault(path, ([], {}, []))
            title = s.live.title
            if title.startswith("clip"):
                clip.append(" ".join([title, *(_number(known[name]) for name in flat if name in known)]))
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
    part = _tree.partition(part, [path in seen for path, _ in jax.tree_util.tree_flatten_with_path(part)[0]])[0]
    if "mask" not in s.live.statics:
        flags = list(_where.select(where, part, allow_empty=True))
    else:
        mask = where(part) if callable(where) or isinstance(where, PatternMask) else where
        flags = [bool(x) for x in jax.tree.leaves(mask)]
    return flags if len(flags) == len(s.paths) else everywhere


# ------------------------------------------------------------------------------------------------------------- in words


def _number(x) -> str:
    if np.ndim(x):
        return f"{np.min(x):.3g}..{np.max(x):.3g}"
    return f"{float(x):.3g}"


def _si(x: float) -> str:
    unit, letter = next(((n, c) for n, c in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if x >= n), (1, ""))
    return f"{x / unit:.3g} {letter}"


def _summary(d: Description) -> list[str]:
    total = sum(d.seconds.values())
    on = d.device if d.devices == 1 else f"{d.devices} x {d.device}"
    parts = ", ".join(f"{name} {x:.2f}" for name, x in d.seconds.items())
    share = f", {d.flops.matmul / d.flops.total:.1%} in products and convolutions" if d.flops.total else ""
    lines = [
        f"a step on {on}, compiled in {total:.2f} s ({parts})",
        f"  work      {_si(d.flops.total)}FLOP{share}; {_si(d.flops.transcendental)}calls of exp, sqrt, ...",
    ]
    if d.flops.loops:
        lines.append(
            f"            the bodies of {d.flops.loops} while loops counted once: nobody knows how often they run"
        )
    if d.flops.opaque:
        lines.append(f"            not counted: {', '.join(d.flops.opaque)}")
    if d.bytes_accessed is not None:
        lines.append(f"  traffic   {_tree.bytes_str(d.bytes_accessed)} read and written, loop bodies counted once")
    if d.memory is not None:
        need = d.memory
        named = ("state", "batch", "temporary", "results", "runtime")
        shown = ", ".join(f"{name} {_tree.bytes_str(getattr(need, name))}" for name in named)
        lines.append(f"  memory    {_tree.bytes_str(need.total)}: {shown}")
    if d.donates:
        lines.append(f"  donated   {_tree.bytes_str(d.donated)}, of which results take {_tree.bytes_str(d.aliased)}")
        if d.not_aliased:
            names = _tree.listed(d.not_aliased, 3)
            lines.append(f"  WARNING   the donation of {names} failed: both old and new are held (jax#9675)")
    else:
        lines.append("  donated   nothing: donate=False")
    if d.devices > 1:
        talk = (f"{c.kind} {c.count:g} x, {_tree.bytes_str(c.bytes)}" for c in d.communication)
        lines.append(f"  talks     {'; '.join(talk) or 'not at all'}, on each device")
    if d.peak is not None:
        lines.append(
            f"  peak      {_si(d.peak)}FLOP/s a device: {d.flops.matmul / d.peak / d.devices * 1e3:.3g} ms at best"
        )
    again = f", {len(d.recompiles)} of them again" if d.recompiles else ""
    lines.append(f"  traced    {d.traces} time{'s' * (d.traces != 1)}{again}")
    counts = Counter(d.recompiles)
    lines += [f"            {why}" + (f" ({n} times)" if n > 1 else "") for why, n in counts.items()]
    return lines


def _rows(leaves: tuple[Leaf, ...]) -> list[str]:
    """The table: a line for each leaf, or where there are many for each kind."""
    head = ["leaf", "shape", "status", "rule", "numbers", "clip", "sharding"]
    if len(leaves) <= MOST_ROWS:
        groups = [[leaf] for leaf in leaves]
    else:
        by_kind: dict[tuple, list[Leaf]] = {}
        for leaf in leaves:
            by_kind.setdefault(leaf.kind, []).append(leaf)
        groups = list(by_kind.values())
    rows, shown = [head], _told(leaves)
    for group in groups:
        first, n = group[0], len(group)
        path, shape = first.path, f"{first.dtype}{list(first.shape)}"
        if n > 1:
            size = sum(math.prod(leaf.shape) for leaf in group)
            path, shape = f"{_common([leaf.path for leaf in group])} ({n} leaves)", f"{first.dtype}, {_si(size)}in all"
        values = " ".join(f"{name}={_number(x)}" for name, x in first.values.items() if name in shown)
        rows.append([path, shape, first.status, first.rule, values, first.clip, first.sharding])
    used = [i for i in range(len(head)) if any(row[i] for row in rows[1:])]
    width = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return ["  ".join(f"{row[i]:<{width[i]}}" for i in used).rstrip() for row in rows]


def _told(leaves: tuple[Leaf, ...]) -> set[str]:
    """The numbers that a table has room for: rates, decays, and what is not the same everywhere."""
    seen: dict[str, set[str]] = {}
    for leaf in leaves:
        for name, x in leaf.values.items():
            seen.setdefault(name, set()).add(str(x))
    return {name for name, values in seen.items() if len(values) > 1 or "rate" in name or "decay" in name}


def _common(paths: list[str]) -> str:
    """What paths begin and end with: "blocks/.../kernel"."""
    parts = [path.split("/") for path in paths]
    begin = _while_same(parts)
    end = _while_same([part[len(begin) :][::-1] for part in parts])[::-1]
    return "/".join([*begin, "...", *end])


def _while_same(parts: list[list[str]]) -> list[str]:
    same = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        same.append(names[0])
    return same


# --------------------------------------------------------------------------------------------------------------- replay


@dataclass(frozen=True)
class Report:
    """What `replay` returns: plain data, and a paragraph when it is printed."""

    result: str  # what was not finite: "loss", "gradient of params['w']", "" where all was
    argument: str  # the leaf of the batch, the params or the model state that was not finite when it was given; or ""
    micro_batch: int | None  # of `accumulate`, counted from 0
    primitive: str  # of JAX, that gave the first value that is not finite; "" where it was an argument
    line: str  # "path.py:12 (function)" in the user's code
    code: str  # the text of that line
    in_gradient: bool  # whether the loss itself was finite
    trips: tuple[int, ...]  # of the user's own loops around it, outermost first, counted from 0
    text: str

    def __repr__(self) -> str:
        return self.text


def replay(step: TrainStep, state: TrainState, batch, **extra) -> Report:
    """Where the first value that is not finite came from, in a step that was rejected: runs it again, with checks.

    The loss and its gradient are computed once more, with keys, mask, model state and micro-batches as in that call, so
    that every value can be looked at; then they are walked back from what was not finite to what made it so. It names
    the micro-batch, the argument or the primitive, and the line. -inf that a mask puts in, or log(0) in a branch that
    `where` does not take, is not blamed. Nothing is donated, and the state stays as it is. It needs memory for every
    intermediate value of the step.

    Args:
      step: the `train_step`.
      state: as it was given to that call. A rejected step leaves it as it was, but for the count: of the one after it
        `state.replace(calls=state.calls - 1)`, with a loss scale also that one's. What `fit` rejected knows them:
        `replay(step, *error.rejected[-1].of(error.state))`.
      batch, extra: the arguments of that call.

    Raises WrongTypeError and StateError for what is no train_step, no state, or a population.

    >>> import jax.numpy as jnp
    >>> import tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean(jnp.sqrt(x * params["w"])))
    >>> report = replay(step, ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(3)}), jnp.array([4.0, 0.0, 1.0]))
    >>> report.result, report.primitive, report.in_gradient
    ("gradient of params['w']", 'div', True)
    """
    where = "replay()"
    if not isinstance(step, TrainStep):
        fix = "Make one: ts.train_step(loss_fn)."
        raise WrongTypeError(message("step", where, _tree.describe(step), "a train_step", fix))
    check_state(state, where, batch)
    if members_of(state) is not None:
        raise StateError(message("state", where, "a population", "one member", "Give ts.member(state, i)."))
    home = home_of(state, state.params)[0]
    if home is not None:
        batch, extra = step._placed(state, home, batch, extra)
    gradient = gradient_of(step.loss_fn, step.accumulate, step.remat, "skip", where, step.axis_name)

    def look(state, batch, extra):
        loss, grads = gradient(state, batch, **extra)
        return loss.compute(), grads

    given = state, batch, extra
    program, shapes = jax.make_jaxpr(look, return_shape=True)(*given)
    values = jax.tree.leaves(jax.jit(look)(*given))
    names = ["loss", *(f"gradient of {_tree.access_str('params', path)}" for path, _ in _keyed(shapes[1]))]
    wrong = [(i, found) for i, x in enumerate(values) if (found := _blame.bad(x)) is not None]
    if not wrong:
        return _nothing(step, state, batch, shapes, values)
    place, found = wrong[0]
    origin = _blame.origin(program, jax.tree.leaves(given), place, found)
    what = f"{names[place]} is {_what(np.asarray(values[place]))}"
    return _report(step, given, names[place], what, origin)


def _keyed(tree) -> list[tuple[tuple, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _nothing(step: TrainStep, state: TrainState, batch, shapes, values) -> Report:
    grads = jax.tree.unflatten(jax.tree.structure(shapes[1]), values[1:])
    found = guard.locate(state.plan.apart(grads)[0])
    if found != "gradient norm":
        text = f"{found} overflows when it is squared: every value is finite."
        return Report(found, "", None, "", "", "", True, (), text)
    text = (
        "Loss and gradients are finite. If the step was rejected, a rule did it (a spike, clip_array_norm), the state "
        "is not the one of that call, or the step computes in another order where nobody looks."
    )
    return Report("", "", None, "", "", "", False, (), text)


def _report(step: TrainStep, given: tuple, result: str, what: str, origin: _blame.Origin) -> Report:
    n, trips = step.accumulate, tuple(i for _, i in origin.trips)
    micro = None
    if n > 1 and origin.argument is None and trips:  # the outermost loop is that over micro-batches
        micro, trips = trips[0], trips[1:]
    in_gradient = result != "loss"
    argument = line = code = ""
    if origin.argument is not None:
        argument = _argument(given, origin.argument)
        bad = _blame.bad(origin.value)
        if n > 1 and argument.startswith("batch") and bad is not None and bad.ndim:
            micro = int(np.argwhere(bad)[0][0]) % n
        made = f"{argument} was given so: {_what(origin.value)}"
    else:
        line, code = _line(origin.sources)
        said = "a constant" if origin.constant else _what(origin.value)
        derivative = "the derivative of " if in_gradient else ""
        at = f" at {derivative}{line}" if line else ""
        made = f"{origin.primitive} gave {said}{_from(origin)}{at}" + (f": `{code}`" if code else "")
    places = [f"micro-batch {micro} of {n}"] if micro is not None else []
    places += [f"trip {i} of a loop" for i in trips]
    text = f"The {what}. The first such value: {made}" + (f" ({', '.join(places)})" if places else "") + "."
    primitive = "" if origin.argument is not None else origin.primitive
    return Report(result, argument, micro, primitive, line, code, in_gradient, trips, text)


def _argument(given: tuple, place: int) -> str:
    path = _keyed(given)[place][0]
    name, rest = ("state", "batch", "")[path[0].idx], path[1:]
    return _tree.access_str(name, rest) if name else _tree.access_str("extra", rest)


def _what(x: np.ndarray) -> str:
    """How many elements are not finite, and what the first one is."""
    x = np.asarray(x)
    bad = ~np.isfinite(x)
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    value = f"{x[first]}"
    return value if not x.shape else f"{value} at {list(first)}, {int(bad.sum())} of {x.size} not finite"


def _from(origin: _blame.Origin) -> str:
    """The operands where the first bad value is, for a primitive that works element by element."""
    out = np.asarray(origin.value)
    first = tuple(np.argwhere(~np.isfinite(out))[0])
    operands = [np.asarray(x) for x in origin.operands if hasattr(x, "dtype") or isinstance(x, (int, float))]
    if not operands or len(operands) != len(origin.operands) or any(x.shape not in ((), out.shape) for x in operands):
        return ""
    return " from " + " and ".join(f"{x[first] if x.shape else x[()]}" for x in operands)


def _line(sources: tuple) -> tuple[str, str]:
    """The innermost line of the user's own code that an equation comes from, and its text."""
    from jax.extend import source_info_util

    for source in sources:
        lines = reversed(source_info_util.summarize(source, num_frames=100).splitlines())
        found = [match for line in lines if (match := _FRAME.match(line))]
        own = [match for match in found if "site-packages" not in match[1] and not match[1].startswith(LIBRARIES)]
        if match := next(iter(own or ()), None):
            return f"{match[1]}:{match[2]} ({match[3]})", linecache.getline(match[1], int(match[2])).strip()
    return "", ""


_FRAME = re.compile(r"(.*?):(\d+)(?::\d+)? \((.*)\)$")
