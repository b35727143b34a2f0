"""Checks of your own step: does it train correctly with each capability?

    def test_my_step():
        ts.testing.check_accumulation(step, state, batch, n=4)
        ts.testing.check_resume(step, state, data)

Each check runs the step both ways from copies of the state. It returns the largest difference,
relative to the largest element of its leaf, or raises CheckError with the name of the leaf if the
difference is more than the tolerance. Gradients that are rounding noise (of a bias before a
normalization layer) are measured relative to the largest gradient of all; their params are skipped,
because Adam turns the sign of noise into full steps. DataError if every step was rejected.
"""

import contextlib
import copy
import dataclasses
import itertools
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tsunax import guard
from tsunax._core import Function, PyTree, Where, trees
from tsunax._state.state_fields import averages_of, frozen_flags
from tsunax._step.members import members_of
from tsunax._step.retrace_reasons import retrace_reasons
from tsunax._step.row_probe import RowProbe
from tsunax.data.positions import Data
from tsunax.devices import meshes
from tsunax.errors import CheckError, DataError, HyperparameterError, StateError, WrongTypeError
from tsunax.hyper import freeze
from tsunax.insight.description import describe
from tsunax.loop import fit
from tsunax.populations import member, population
from tsunax.program import TrainStep
from tsunax.rules.leaf_owners import owners_of
from tsunax.run.feed import innermost
from tsunax.run.info_columns import logged_step
from tsunax.state import TrainState, base, check_state, donated, in_float32, own, trained_part
from tsunax.step import StepInfo

__all__ = [
    "check_accumulation", "check_coordinates", "check_donation", "check_frozen", "check_fused",
    "check_population", "check_precision", "check_purity", "check_recompiles", "check_resume",
    "check_sharding",
]  # fmt: skip

EXACT = 1e-5  # of float32, for sums in another order
NOISE = 1e-6  # of the largest gradient: a smaller one is the rounding of zero
STEPS = 3


def check_accumulation(
    step: TrainStep,
    state: TrainState,
    batch: PyTree,
    n: int = 4,
    tolerance: float = EXACT,
    **extra: Any,
) -> float:
    """Compare gradients and loss of n micro-batches with those of the whole batch.

    Returns the largest relative difference, a float; raises CheckError if it is more than
    `tolerance`, as for models that mix rows (batch norm, contrastive losses) and losses that
    average averages, and for a loss that does so near these params, as `train_step` warns. `extra`
    are arguments for `step`. Randomness drawn per row differs by construction: give a `state`
    without a key.

    >>> import tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"] - 1) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)})
    >>> check_accumulation(step, state, np.ones((8, 2), np.float32)) < 1e-6
    True
    """
    where = "check_accumulation()"
    _check(step, state, where)
    steps = (dataclasses.replace(step, accumulate=k) for k in (1, n))
    whole_batch, in_parts = (
        _gradient(s, _settled(s, state, batch, extra), batch, extra) for s in steps
    )
    _check_taken([_all_finite(whole_batch)], where, batch)
    worst = _compared(f"accumulate={n}", in_parts[0], whole_batch[0], tolerance, "loss")
    parts = in_parts[1], whole_batch[1], tolerance, "grads", _sizes_of_noise(whole_batch[1])
    worst = max(worst, _compared(f"accumulate={n}", *parts))
    probe = RowProbe(dataclasses.replace(step, accumulate=n))
    difference = probe.difference(state, batch, extra)
    if difference and abs(difference.whole - difference.merged) > tolerance * abs(difference.whole):
        raise CheckError(probe.text(difference))
    return worst


def check_precision(
    step: TrainStep, state: TrainState, batch: PyTree, tolerance: float = 0.05, **extra: Any
) -> float:
    """Compare gradients in the precision of the state with those in float32.

    `max |low - full| / max |full|` of each leaf: finds those that overflow, underflow to zero, or
    lose more than `tolerance`. Returns the largest as a float; raises CheckError above `tolerance`,
    StateError for a `state` in float32. `step`, `batch` and `extra` as in `check_accumulation`.
    """
    where = "check_precision()"
    _check(step, state, where)
    if (policy := state.plan.precision) is None:
        raise StateError("precision", where, "None", "one: setup(..., precision='bfloat16')")
    title = f"precision {policy.compute}"
    full = _gradient(step, in_float32(state), batch, extra)
    low = _gradient(step, _settled(step, state, batch, extra), batch, extra)
    _check_taken([_all_finite(full)], where, batch)
    return _compared(title, low[1], full[1], tolerance, "grads", _sizes_of_noise(full[1]))


def check_sharding(
    step: TrainStep,
    state: TrainState,
    batch: PyTree,
    mesh: Mesh | None = None,
    tolerance: float = EXACT,
    steps: int = STEPS,
    **extra: Any,
) -> float:
    """Compare losses and params of `steps` steps over a `mesh` (None: `ts.mesh()`) with one device.

    Randomness has to come from the key, not from shapes. Returns the largest relative difference, a
    float, and raises CheckError if one is more than `tolerance` (for params: times `steps`).
    `step`, `state`, `batch` and `extra` as in `check_accumulation`.
    """
    where = "check_sharding()"
    _check(step, state, where)
    mesh = meshes.mesh() if mesh is None else mesh
    state = _settled(step, state, batch, extra)
    title, sizes = f"mesh {dict(mesh.shape)}", _without_digits(step, state, batch, extra)
    single, single_infos = _run_steps(step, _copy(state), batch, extra, steps, where)
    spread, spread_infos = _run_steps(step, meshes.shard(_copy(state), mesh), batch, extra, steps)
    comparison = spread.params, single.params, tolerance * steps, "params", sizes
    losses = [
        _compared(f"{title}, step {i}", spread_info.loss, single_info.loss, tolerance, "loss")
        for i, (single_info, spread_info) in enumerate(
            zip(single_infos, spread_infos, strict=True), 1
        )
    ]
    return max(*losses, _compared(title, *comparison))


def check_resume(
    step: Function,
    state: PyTree,
    data: Iterable[PyTree],
    steps: int = 6,
    at: int = 3,
    **options: Any,
) -> None:
    """Compare the bits of a run stopped at step `at` and resumed with those of one without a stop.

    Compares state, key, position of the data and losses; raises CheckError for one other bit, and
    WrongTypeError unless `at` is between the step of `state` and `steps`. Each run begins at the
    current position of `data`, which is restored at the end. `options` are passed to `fit` beside
    `step`, for example `fast_forward=True` for data that stores no position.

    >>> import tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.adam(0.1), {"w": jnp.ones(2)})
    >>> check_resume(step, state, ts.batches(np.ones((8, 2), np.float32), 2, shuffle=True))
    """
    where = "check_resume()"
    begin = _begin(state, steps, where)
    if not begin < at < steps:
        raise WrongTypeError(
            "at",
            where,
            got=at,
            expected=f"a step after {begin}, where the state is, and before steps={steps}",
        )
    options = {"progress": False, "log_every": 1, **options}
    fix = "A list is, with fast_forward=True: "
    fix += "check_resume(step, state, list(data), fast_forward=True)."
    with tempfile.TemporaryDirectory() as folder, _rereading(data, where, fix) as anew:
        run = lambda state, n, **run_options: fit(
            step, state, anew(), steps=n, **options, **run_options
        )
        expected, history = run(_copy(state), steps)
        losses = _finite_losses(history, where)  # a checkpoint that is not finite would be refused
        path = Path(folder) / "run"
        run(_copy(state), at, checkpoint=path)
        resumed, resumed_losses = run(_copy(state), steps, checkpoint=path, resume="must")
    _compared(f"a run resumed at step {at}", resumed, expected, 0.0, "state")
    resumed_losses = _finite_losses(resumed_losses, where)
    _compared(f"losses of a run resumed at step {at}", resumed_losses, losses, 0.0, "losses")


def check_fused(
    step: Function, state: PyTree, data: Iterable[PyTree], steps: int = 6, tolerance: float = EXACT
) -> float:
    """Compare the bits of many steps in one compiled loop with those of one step a call.

    `fit(step, state, data, steps=steps, steps_per_call=n)` for n of 1, 4 and "auto": CheckError for
    another bit. The params of a loop in Python may differ by `tolerance · steps`, because XLA may
    round differently; returns that difference, a float.
    """
    where, options = "check_fused()", {"steps": steps, "progress": False, "log_every": 1}
    _begin(state, steps, where)
    runs = {}
    with _rereading(data, where, "A list is: list(data).") as anew:
        for n in (1, 4, "auto"):
            runs[n], rows = fit(step, _copy(state), anew(), steps_per_call=n, **options)
            _finite_losses(rows, where)
        source, plain, steps_done = anew(), _copy(state), logged_step(state, 0)
        for batch in itertools.chain.from_iterable(itertools.repeat(source)):
            plain, _ = step(plain, batch)
            steps_done = logged_step(plain, steps_done + 1)
            if steps_done >= steps:
                break
    for n in (4, "auto"):
        _compared(f"steps_per_call={n!r}", runs[n], runs[1], 0.0, "state")
    params = lambda x: x.params if isinstance(x, TrainState) else x
    return _compared("the plain loop", params(plain), params(runs[1]), tolerance * steps, "params")


def check_frozen(
    step: TrainStep, state: TrainState, batch: PyTree, where: Where, **extra: Any
) -> None:
    """Check that frozen leaves keep their bits, with moments and averages, and that others move.

    Runs 3 times `step(state, batch, **extra)` from `ts.freeze(state, where)`. Raises CheckError
    with the path of the leaf, PatternError if `where` matches nothing.
    """
    place, title = "check_frozen()", f"freeze({where!r})"
    _check(step, state, place)
    frozen_state = freeze(_copy(_settled(step, state, batch, extra)), where)
    first_state = _copy(frozen_state)
    last_state, _ = _run_steps(step, frozen_state, batch, extra, STEPS, place)
    frozen = frozen_flags(first_state)
    owners = owners_of(
        first_state.plan.init, first_state.opt_state, first_state.numbers, base(first_state)
    )
    owners = [*range(len(frozen))] * (1 + len(averages_of(first_state))) + owners

    def leaves(s: TrainState) -> list[tuple[str, Any]]:
        averages = {name: average.params for name, average in averages_of(s).items()}
        named = trees.leaves_at("state", (trained_part(s), averages))
        return [*named, *trees.leaves_at("opt_state", s.opt_state)]

    moved = []
    for i, (name, x), (_, y) in zip(owners, leaves(first_state), leaves(last_state), strict=True):
        moved.append(i is not None and trees.bits_differ(x, y))
        if moved[-1] and frozen[i]:
            raise CheckError(f"leaf {name}", title, f"other bits after {STEPS} steps", "its own")
    if not all(frozen) and not any(moved[: len(frozen)]):
        raise CheckError("others", title, f"none that moved in {STEPS} steps", "one at least")


def check_population(
    step: TrainStep,
    make: Function,
    batch: PyTree,
    n: int = 3,
    tolerance: float = EXACT,
    **values: Any,
) -> float:
    """Compare each member of `population(make, n, **values)` with its single run.

    Returns the largest relative difference of params after 3 steps on `batch`, a float. Raises
    CheckError if it is more than 3 · `tolerance`: batched matrix products round differently from
    single ones. `make`, `n` and `values` are those of `ts.population`; `step` a train_step.
    """
    runs, where = population(make, n, key=0, **values), "check_population()"
    _check(step, runs, where)
    runs, _ = _run_steps(step, runs, batch, {}, STEPS, where)
    worst, sizes = 0.0, None
    for i, key in enumerate(jax.random.split(jax.random.key(0), n)):
        single = make(key, **jax.tree.map(lambda x, i=i: np.asarray(x)[i], values))
        sizes = _without_digits(step, single, batch, {}) if sizes is None else sizes
        single, _ = _run_steps(step, single, batch, {}, STEPS)
        pair = member(runs, i).params, single.params, tolerance * STEPS, "params", sizes
        worst = max(worst, _compared(f"member {i}", *pair))
    return worst


def check_coordinates(
    make: Function, widths: Sequence[int], batch: PyTree, steps: int = 3, tolerance: float = 0.25
) -> dict[str, float]:
    """Check that training moves what a model computes as much at any width (µP).

    `make(width)`, for two or more ints in `widths`, returns `(step, state, outputs)`, and
    `outputs(params, batch)` a dict of arrays: activations, logits. After `steps` steps on it the
    mean size of their change is fitted by a power of the width. Returns the powers by name, all
    near 0 under `rules.scale_by_width` and a matching initialization.

    Raises CheckError for a power outside of `tolerance`: above 0, rates that fit a narrow model are
    too large for a wide one; below, a wide one stands still there.
    """
    where, sizes = "check_coordinates()", {}
    if len(set(widths)) < 2:
        raise DataError("widths", where, str(list(widths)), "two or more, for example 64, 128, 256")
    for width in widths:
        step, state, outputs = make(width)
        _check(step, state, where)
        first_outputs = outputs(state.params, batch)
        state, _ = _run_steps(step, state, batch, {}, steps, where)
        for name, x in outputs(state.params, batch).items():
            sizes.setdefault(name, []).append(max(np.mean(np.abs(x - first_outputs[name])), 1e-30))
    logs = np.log(np.asarray(widths, float))
    powers = {name: float(np.polyfit(logs, np.log(x), 1)[0]) for name, x in sizes.items()}
    for name, power in powers.items():
        if abs(power) > tolerance:
            raise CheckError(
                f"outputs[{name!r}]",
                where,
                got=f"a change that goes with the width to the power {power:.2f}",
                expected=f"0, give or take {tolerance:g}",
                fix="Chain rules.scale_by_width after the rule; look at the layer's initial scale.",
            )
    return powers


def check_purity(step: TrainStep, state: TrainState, batch: PyTree, **extra: Any) -> None:
    """Check that the loss function depends on its arguments only, and leaks no tracer.

    Two traces of `step(state, batch, **extra)` must return the same bits, else it raises
    CheckError: random numbers of NumPy and Python, clocks and counters were read in the trace. For
    a leaked tracer JAX's own exception is raised.
    """
    where, ends = "check_purity()", []
    _check(step, state, where)
    start = _settled(step, state, batch, extra)
    for _ in range(2):
        anew = dataclasses.replace(step, donate=False)  # an equal step without compiled programs
        with jax.checking_leaks():
            ends.append(anew(_copy(start), batch, **extra))
    _check_taken(_taken_steps([info for _, info in ends], state), where, batch)
    try:
        for root, found, expected in zip(("state", "info"), ends[1], ends[0], strict=True):
            _compared("a second trace", found, expected, 0.0, root)
    except CheckError as error:
        fix = "It reads what is no argument: np.random, random, time, a global that changes."
        raise CheckError(f"{error} {fix} Randomness comes from `key`.") from None


def check_donation(step: TrainStep, state: TrainState, batch: PyTree, **extra: Any) -> int:
    """Check that the compiled step reuses all donated memory. Returns its bytes on one device.

    `describe(step, state, batch, **extra).aliased`, an int; nothing is executed. Raises CheckError
    with the leaves that no result replaces (none has their dtype, shape and sharding), and
    WrongTypeError for a step with `donate=False`.
    """
    where = "check_donation()"
    _check(step, state, where)
    if not step.donate:
        raise WrongTypeError(
            "step",
            where,
            got="train_step(..., donate=False)",
            expected="one that does",
            fix="train_step(loss_fn) donates.",
        )
    found = describe(step, state, batch, **extra)
    if found.not_aliased:
        raise CheckError(
            "donation",
            "the compiled step",
            got=f"memory that no result takes: {trees.listed(found.not_aliased, 3)}",
            expected="all of it used again",
        )
    return found.aliased


def check_recompiles(
    step: TrainStep, state: TrainState, batches: Iterable[Any], most: int = 1, **extra: Any
) -> int:
    """Check that a step is compiled at most `most` times over these batches. Returns the number.

    CheckError names the reason of each compilation. `step`, `state` and `extra` as elsewhere.

    >>> import tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)})
    >>> check_recompiles(step, state, [np.ones((4, 2)), np.ones((3, 2))])
    Traceback (most recent call last):
    tsunax.errors.CheckError: traces at 2 batches: got 2, ... step: batch is float32[3,2], was ...
    """
    _check(step, state, "check_recompiles()")
    anew, state, batches = dataclasses.replace(step), _copy(state), list(batches)
    for batch in batches:
        state, _ = anew(state, batch, **extra)
    if (found := len(anew.traces)) > most:
        raise CheckError(
            "traces",
            f"{len(batches)} batches",
            got=found,
            expected=f"at most {most}",
            fix="; ".join(retrace_reasons(anew.traces)),
        )
    return found


def _check(step: Any, state: Any, where: str) -> None:
    if not isinstance(step, TrainStep):
        raise WrongTypeError("step", where, trees.describe(step), "a train_step")
    check_state(state, where)
    _begin(state, math.inf, where)


def _begin(state: Any, steps: float, where: str) -> int:
    """The step of a live state. Raises HyperparameterError if it is not before `steps`."""
    if any(map(trees.is_gone, jax.tree.leaves(state))):
        raise StateError(donated(where))
    at = int(np.max(state.step)) if isinstance(state, TrainState) else 0
    if at >= steps and isinstance(state, TrainState):
        raise HyperparameterError("steps", where, steps, f"one beyond {at}, where the state is")
    return at


def _check_taken(taken: Iterable[Any], where: str, batch: Any = ()) -> None:
    """Raise DataError if nothing that was compared is finite and was applied."""
    if not any(np.any(x) for x in taken):
        fix = f"Nothing was compared: give data that it trains on. {guard.in_batch(batch)}"
        raise DataError(
            "batch",
            where,
            got="a run whose steps were all rejected or not finite",
            expected="one step at least",
            fix=fix.rstrip(),
        )


def _taken_steps(infos: list[Any], state: Any) -> list[Any]:
    """Whether the loss of each step was finite and it was applied, or a loss scale was falling."""
    is_falling = state.loss_scale is not None and state.loss_scale.dynamic
    is_taken = lambda verdict: verdict is None or is_falling or np.asarray(verdict) <= 0
    # another kind of step has others
    step_infos = [info for info in infos if isinstance(info, StepInfo)]
    return [np.isfinite(info.loss) & is_taken(info.verdict) for info in step_infos] or [True]


def _finite_losses(rows: Any, where: str) -> dict[str, Any]:
    """The losses of a run by name. Raises DataError if there are some and none is finite."""
    losses = {name: rows[name] for name in rows.names if name.partition("/")[0] == "loss"}
    _check_taken(map(np.isfinite, losses.values()) if losses else [True], where)
    return losses


def _copy(state):
    return jax.tree.map(own, state)


def _run_steps(step, state, batch, extra, steps: int, where: str = "") -> tuple[Any, list[Any]]:
    """The state after some steps with one batch, and their infos. With `where` checked."""
    infos = []
    with _keyless():
        for _ in range(steps):
            state, info = step(state, batch, **extra)
            infos.append(info)
    if where:
        _check_taken(_taken_steps(infos, state), where, batch)
    return state, infos


@contextlib.contextmanager
def _rereading(data: Any, where: str, fix: str) -> Iterator[Callable[[], Any]]:
    """A function that returns the data at their current position, which is restored at the end."""
    inner, read, put = innermost(data), None, None
    for names in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        if all(hasattr(inner, name) for name in names) and not isinstance(inner, Data):
            read, put = (getattr(inner, name) for name in names)
    if put is None and isinstance(inner, Iterator):
        raise WrongTypeError(
            "data",
            where,
            got=trees.describe(inner),
            expected="data that can be read again",
            fix=fix,
        )
    start = read and copy.deepcopy(read())  # some return the dict that they change later

    def begin():
        if put is not None:
            put(copy.deepcopy(start))
        return data.afresh() if isinstance(data, Data) else data

    yield begin
    if put is not None:
        put(start)


def _gradient(step: TrainStep, state: TrainState, batch: Any, extra) -> tuple[Any, Any]:
    """Loss and gradients of a step, in float32 at least."""
    run = dataclasses.replace(step, on_nonfinite="ignore", axis_name=None).gradient
    with _keyless():
        loss, grads = jax.jit(run)(_copy(state), batch, **extra)
    return loss.compute(), grads


@contextlib.contextmanager
def _keyless() -> Iterator[None]:
    """Without the warning of a state without a key: several checks ask for one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* names key, but the state has none")
        yield


def _settled(step: TrainStep, state: TrainState, batch: Any, extra) -> TrainState:
    """The state with the dynamic loss scale that a run would settle at; populations unchanged."""
    scale = None if members_of(state) is not None else state.loss_scale
    while scale is not None and scale.dynamic and scale.scale > scale.floor:
        if _all_finite(_gradient(step, state, batch, extra)[1]):
            break
        scale = dataclasses.replace(scale, scale=scale.scale / scale.factor)
        state = dataclasses.replace(state, loss_scale=scale)
    return state


def _largest(x: Any) -> float:
    return float(np.max(np.abs(trees.on_host(x).astype(np.complex128)), initial=0))


def _sizes_of_noise(grads: Any, root: str = "grads") -> dict[str, float]:
    """The largest size of all gradients, by the names of those that are rounding noise."""
    sizes = {name: _largest(x) for name, x in trees.leaves_at(root, grads)}
    whole = max(sizes.values(), default=0.0)
    return {name: whole for name, size in sizes.items() if size < NOISE * whole}


def _without_digits(*call: Any) -> dict[str, float]:
    """An infinite size, by the names of params whose gradient in a step is rounding noise."""
    return dict.fromkeys(_sizes_of_noise(_gradient(*call)[1], "params"), np.inf)


def _all_finite(tree: Any) -> bool:
    return all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(tree))


def _compared(
    where: str, got: Any, expected: Any, tolerance: float, root: str, sizes: Any = None
) -> float:
    """The largest relative difference of two trees (to sizes by name, if given), or CheckError."""
    if difference := trees.first_difference(got, expected, root):
        raise CheckError(f"tree of {where}: {difference}.")
    differences, sizes = [(0.0, "", "")], sizes or {}
    pairs = zip(trees.leaves_at(root, got), trees.leaves_at(root, expected), strict=True)
    for (name, x), (_, y) in pairs:
        far, text = _distance(x, y, tolerance == 0, sizes.get(name))
        differences.append((far, name, text))
    worst, name, text = max(differences, key=lambda x: x[0])
    if worst > tolerance:
        raise CheckError(
            f"leaf {name}",
            where,
            got=text,
            expected="the same bits" if tolerance == 0 else f"at most {tolerance:.2g}",
        )
    return worst


def _distance(x: Any, y: Any, exact: bool, size: float | None) -> tuple[float, str]:
    """The relative difference of two leaves, as a number and in words."""
    if not trees.bits_differ(x, y):
        return 0.0, ""
    x, y = trees.on_host(x), trees.on_host(y)
    if x.shape != y.shape or (x.dtype != y.dtype and exact):
        return np.inf, f"{x.dtype}{list(x.shape)} for {y.dtype}{list(y.shape)}"
    a, b = (z.astype(np.complex128) for z in (x, y))
    are_equal = (a == b) | (np.isnan(a) & np.isnan(b))  # whatever the bits of NaN
    with np.errstate(invalid="ignore"):
        gap = np.where(are_equal, 0, np.abs(a - b))
    if exact or not np.isfinite(gap).all():
        place = () if are_equal.all() else tuple(np.argwhere(~are_equal)[0].tolist())
        return np.inf, f"{x[place]!s} for {y[place]!s}" + (f" at {list(place)}" if place else "")
    size = _largest(b[np.isfinite(b)]) if size is None else size
    far = float(np.max(gap, initial=0)) / size if size else np.inf * (not are_equal.all())
    return far, f"a difference of {far:.2g} of its largest element"
