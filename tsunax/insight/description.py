"""Describe a compiled step: its cost, its effect on each leaf, and why it was recompiled.

describe(step, state, batch)   compiles, executes nothing
"""

import textwrap
import timeit
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tsunax._core import Device, Function, PyTree, checks, device_kinds, placement, tables, trees
from tsunax._state.state_text import leaf_rows
from tsunax._step.updating import certainty_of
from tsunax.devices.gpu_topologies import LIMITS_TEXT
from tsunax.insight import _cost, _memory
from tsunax.insight.retraces import retrace_reasons
from tsunax.program import TrainStep, check_is_train_step
from tsunax.run import fused_loop
from tsunax.state import TrainState, check_state, split, trained_part
from tsunax.states import States, over_members, training_states

__all__ = ["Description", "Leaf", "describe", "measured_peak"]

MAX_ROWS = 40  # leaves in the printed table; `leaves` has every leaf


@dataclass(frozen=True)
class Leaf:
    """One leaf of params: its path, shape and dtype, and whether it trains now."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    status: str  # trained, frozen, 2 of 8 frozen (members), not trained, overwritten (by gradients)
    sharding: str  # "" on one device


@dataclass(frozen=True)
class Description:
    """The result of `describe`: plain data, and a page of text when it is printed.

    `flops` counts products and convolutions of a call on all `devices` (of the kind `device`), a
    multiply-add as two, cuDNN's attention included, other custom calls not. `memory` and
    `communication` are bytes on each device; so are `donated` (consumed by the step, if it
    `donates`) and `aliased` (donated and reused by results), while `not_aliased` names the leaves
    with a failed donation. `leaves` are the leaves of params, `traces` counts this trace and all
    earlier ones, and `recompiles` has a reason for each trace but the first.
    """

    flops: float
    memory: _memory.Need | None
    donates: bool
    donated: int
    aliased: int
    not_aliased: tuple[str, ...]
    communication: tuple[_cost.Collective, ...]
    leaves: tuple[Leaf, ...]
    traces: int
    recompiles: tuple[str, ...]
    device: str
    devices: int
    limits: str  # facts that only a real device shows; "" if the device is here
    judged: str  # the inputs of the verdict: loss and gradient, or also the update; and why
    _repr_html_ = tables.folded

    def utilization(self, seconds_per_step: float, peak: float) -> float:
        """Model FLOPs utilization (MFU), 0 to 1: products and convolutions over the peak.

        `flops / (seconds_per_step · peak · devices)`; the work that rematerialization repeats is
        counted. `peak`: FLOP/s of a single device, from its data sheet or `measured_peak()`.
        """
        return self.flops / (seconds_per_step * peak * self.devices)

    def __repr__(self) -> str:
        lines = [f"a step on {f'{self.devices} x ' * (self.devices > 1)}{self.device}"]
        for name, text in _facts(self):
            title_column, indent = f"  {name:<8}  ", " " * (12 if name else 14)
            lines += textwrap.wrap(text, 80, initial_indent=title_column, subsequent_indent=indent)
        return "\n".join([*lines, "", *_rows(self.leaves)])


@checks.naming_arguments
def describe(
    step: Function, state: TrainState | States, batch: PyTree = None, **extra: Any
) -> Description:
    """Describe the cost and effects of a step from its compiled program, without executing it.

    FLOPs are counted over the whole step, gradient and rule included, with loops (`accumulate=`, a
    scan over layers) as often as they run, and what `remat` computes again. Loops of `fit` and
    `run_steps` cost this much a step. The rest is read off the compiled program.

    Args:
      step: a `train_step`; for `States` the function that `fit` takes, with the run donated.
      state, batch, extra: as for the step; arrays, or shapes (`jax.ShapeDtypeStruct`).

    `recompiles` says why this step was traced again, by `fit` too: a leaf of another shape, dtype
    or weak type, another rule, selection, precision or tree. Equal steps that read equal values
    share the loop of `fit`.

    Raises WrongTypeError for another step, and the errors of the step itself for these arguments.

    >>> import jax.numpy as jnp, tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones((64, 32))})
    >>> about = describe(step, state, jnp.ones((16, 64)))
    >>> about.flops == 2 * 2 * 16 * 64 * 32, about.aliased == about.donated
    (True, True)
    """
    where = "describe()"
    if not (isinstance(state, States) and callable(step)):
        check_is_train_step(step, where)
    if not isinstance(state, States):
        check_state(state, where, batch)
    shapes, extra_shapes = _memory.as_shapes(state, batch, extra)
    with warnings.catch_warnings():  # the description itself lists failed donations
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        traced = fused_loop.lowerable(step, state).trace(state, shapes, **extra_shapes)
        compiled = traced.lower().compile()
    text = compiled.as_text() or ""
    analysis, device = compiled.memory_analysis(), _memory.device_of_state(state)
    mesh = _memory.mesh_of(state)
    is_absent_gpu = mesh is not None and placement.is_absent(mesh) and device.platform == "gpu"
    donates = getattr(step, "donate", True)
    donated, leaves_not_aliased = _donated_bytes_and_failures(state, text) if donates else (0, ())
    traces: list[Any] = list(getattr(step, "traces", ()))
    if isinstance(step, TrainStep):
        shared_step: Any = fused_loop.fused(step, donates).step  # equal steps share a program
        traces += [x for x in shared_step.traces if x.kind == "loop" and shared_step is not step]
    return Description(
        flops=_cost.flops_of(traced.jaxpr),
        memory=None if analysis is None else _memory.need_in(compiled, state, shapes),
        donates=donates,
        donated=donated,
        aliased=0 if analysis is None else analysis.alias_size_in_bytes,
        not_aliased=leaves_not_aliased,
        communication=_cost.collectives_in(text),
        leaves=tuple(x for title, s in training_states(state).items() for x in _leaves(title, s)),
        traces=len(traces) or 1,
        recompiles=tuple(retrace_reasons(traces)),
        device=device.device_kind,
        devices=1 if mesh is None else mesh.size,
        limits=LIMITS_TEXT if is_absent_gpu else "",
        judged=_verdict_text(step, state) if isinstance(step, TrainStep) else "",
    )


def _verdict_text(step: TrainStep, state: Any) -> str:
    """The values that the verdict of a step looks at, and the reason."""
    if not step.reaction.judges:
        return "by nothing"
    if step.norms == "update":
        return "by loss, gradient and update: norms='update'"
    reasons: list[str] = []

    def trace_certainty(state: TrainState) -> None:
        is_certain, reason, _ = certainty_of(state, trained_part(state), None)
        live_clause = " while its live numbers are within bounds, else also by its update"
        judged_parts = f"loss and gradient{'' if is_certain is True else live_clause}"
        reasons.append(f"loss, gradient and update: {reason}" if reason else judged_parts)

    jax.eval_shape(lambda state: over_members(trace_certainty, state), state)
    return f"by {reasons[0]}"


def measured_peak(device: Device = None, dtype: jax.typing.DTypeLike = "float32") -> float:
    """FLOP/s of the best square matrix product of `dtype` on `device`: `2 n³ / seconds`, a float.

    The matrices grow from 1024 to 16384 until a product takes 10 ms; each is timed twenty times.
    Their numbers are random, because a GPU multiplies ones faster: it needs less power. Products of
    float32 on a GPU may be TF32's, as in a step: `jax.default_matmul_precision` decides.
    """
    product, best = jax.jit(lambda matrix: matrix @ matrix), 0.0
    if device is not None:
        device = device_kinds.as_sharding(device, "measured_peak()")
    for n in (1024, 2048, 4096, 8192, 16384):
        matrix = jax.device_put(jax.random.normal(jax.random.key(0), (n, n)).astype(dtype), device)
        multiply = lambda matrix=matrix: jax.block_until_ready(product(matrix))
        multiply()  # compiles
        fastest = min(timeit.repeat(multiply, number=1, repeat=20))
        best = max(best, 2 * n**3 / fastest)
        if fastest > 0.01:
            break
    return best


def _donated_bytes_and_failures(
    state: TrainState | States, text: str
) -> tuple[int, tuple[str, ...]]:
    """Bytes per device that the step consumes, and the donated leaves that no result reuses."""
    argument_names, aliased = _cost.donated_in(text)
    is_single = isinstance(state, TrainState)
    fields = state._moving if is_single else ()
    root, moving = ("moving", split(state)[0]) if is_single else ("state", state)
    total, failed = 0, []
    for path, x in jax.tree_util.tree_leaves_with_path(moving):
        size, name = _memory.bytes_per_device(x), root + jax.tree_util.keystr(path)
        total += size
        if size and name in argument_names and name not in aliased:
            field, path = (f".{fields[path[0].idx]}", path[1:]) if is_single else ("", path)
            failed.append(trees.access_str(f"state{field}", path))
    return total, tuple(failed)


def _leaves(title: str, state: TrainState) -> list[Leaf]:
    return [
        Leaf(title + path, np.shape(x), str(trees.dtype_of(x)), status or "trained", _sharding(x))
        for path, x, status in leaf_rows(state)
    ]


def _sharding(x) -> str:
    sharding = getattr(x, "sharding", None)
    if sharding is None or len(sharding.device_set) == 1:
        return ""
    return str(getattr(sharding, "spec", sharding)).replace("PartitionSpec", "P")


def with_si_prefix(x: float, unit: str) -> str:
    sizes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    scale, letter = next(((scale, letter) for scale, letter in sizes if x >= scale), (1, ""))
    return f"{x / scale:.3g} {letter}{unit}"


def _facts(d: Description) -> Iterator[tuple[str, str]]:
    """The lines of a description, each with its title."""
    yield "work", f"{with_si_prefix(d.flops, 'FLOP')} in products and convolutions"
    if (need := d.memory) is not None:
        names_of_parts = ("state", "batch", "temporary", "results", "runtime")
        parts = ", ".join(
            f"{name} {trees.bytes_str(getattr(need, name))}" for name in names_of_parts
        )
        host_text = f"; {trees.bytes_str(need.host)} in host memory" if need.host else ""
        yield "memory", f"{trees.bytes_str(need.total)}: {parts}{host_text}"
    donated_text = (
        f"{trees.bytes_str(d.donated)}, of which results take {trees.bytes_str(d.aliased)}"
    )
    yield "donated", donated_text if d.donates else "nothing: donate=False"
    if d.not_aliased:
        names = trees.listed(d.not_aliased, 3)
        yield "WARNING", f"the donation of {names} failed: both old and new are held (jax#9675)"
    if d.devices > 1:
        collectives = (
            f"{c.kind} {c.count:g} x, {trees.bytes_str(c.bytes)}" for c in d.communication
        )
        yield "talks", f"{'; '.join(collectives) or 'not at all'}, on each device"
    if d.judged:
        yield "judged", d.judged
    if d.limits:
        yield "limits", d.limits
    retraced = f", {len(d.recompiles)} of them again" if d.recompiles else ""
    yield "traced", f"{d.traces} time{'s' * (d.traces != 1)}{retraced}"
    for reason, n in Counter(d.recompiles).items():
        yield "", reason + (f" ({n} times)" if n > 1 else "")


def _rows(leaves: tuple[Leaf, ...]) -> list[str]:
    cells = lambda x: [x.path, f"{x.dtype}{list(x.shape)}", x.status, x.sharding]
    rows = [["leaf", "shape", "status", "sharding"], *map(cells, leaves[:MAX_ROWS])]
    filled_columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    n_hidden = len(leaves) - MAX_ROWS
    last_line = [f"... {n_hidden} more leaves, in .leaves"] if n_hidden > 0 else []
    return [*tables.aligned(list(zip(*filled_columns, strict=True))), *last_line]
