"""Checks of a step of your own: does it still train rightly when a trick is switched on?

    def test_my_step():
        ts.testing.check_accumulation(step, state, batch, n=4)
        ts.testing.check_resume(step, state, data)

Each runs the step both ways from copies of the state, which stays as it is, and raises CheckError
that names the leaf that differs most, and by how much. Where nothing differs too much it returns
that number. Numbers are relative to the largest element of a leaf, where nothing else is said. A
leaf whose gradient is rounding alone (a bias before a normalisation, or added to all logits) has no
digits to compare: its gradient is measured by the largest of all, and its params, of which Adam
makes whole steps, are left out. Where every step was rejected there is nothing to compare:
DataError.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tsunax import guard
from tsunax._core import checks, trees
from tsunax._step.members import members_of
from tsunax._step.roles import frozen_flags
from tsunax._step.traces import why
from tsunax.data.batching import Data
from tsunax.data.prefetching import Prefetched
from tsunax.devices.meshes import mesh as all_devices
from tsunax.devices.meshes import shard
from tsunax.errors import (
    CheckError,
    DataError,
    HyperparameterError,
    StateError,
    TsunaxError,
    WrongTypeError,
    message,
)
from tsunax.hyper import freeze
from tsunax.insight.description import describe
from tsunax.loop import fit
from tsunax.loss import rows_of
from tsunax.populations import member, population
from tsunax.program import TrainStep
from tsunax.rules.owners import owners_of
from tsunax.state import (
    Plan,
    TrainState,
    base,
    check_state,
    donated,
    own,
    trained_part,
    with_rest,
)
from tsunax.step import StepInfo, gradient_of

__all__ = [
    "check_accumulation",
    "check_donation",
    "check_frozen",
    "check_fused",
    "check_population",
    "check_precision",
    "check_purity",
    "check_recompiles",
    "check_resume",
    "check_sharding",
]

EXACT = 1e-5  # of float32, for sums in another order
NOISE = 1e-6  # of the largest gradient: a leaf with less than that has what rounding left of none
STEPS = 3


def check_accumulation(
    step: TrainStep, state: TrainState, batch: Any, n: int = 4, tolerance: float = EXACT, **extra
) -> float:
    """That gradients and loss of n micro-batches are those of the whole batch, up to the order of
    sums.

    What a model that looks at its batch as a whole (batch statistics, contrastive losses) does not
    stand, nor a loss that is a mean of means. Randomness that is drawn per row differs by
    construction: give a state without a key.

    >>> import tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"] - 1) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)})
    >>> check_accumulation(step, state, np.ones((8, 2), np.float32)) < 1e-6
    True
    """
    where = "check_accumulation()"
    _check(step, state, where, batch, extra)
    _check_tolerance(tolerance, where)
    checks.check_count(n, where, "n")
    if rows_of(batch) % n:
        raise WrongTypeError(
            message("batch", where, f"{rows_of(batch)} rows", f"a multiple of {n}")
        )
    ways = (dataclasses.replace(step, accumulate=k) for k in (1, n))
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*expected a mean over rows under accumulate"
        )  # it is compared here
        one, many = (
            _gradient(way, _settled(way, state, batch, extra), batch, extra) for way in ways
        )
    _check_finite(one, where, batch)
    worst = _compared(f"accumulate={n}", many[0], one[0], tolerance, "loss")
    sizes = _sizes_of_noise(one[1], "grads", by_norm=False)
    return max(
        worst, _compared(f"accumulate={n}", many[1], one[1], tolerance, "grads", sizes=sizes)
    )


def check_precision(
    step: TrainStep, state: TrainState, batch: Any, tolerance: float = 0.05, **extra
) -> float:
    """That the gradients in the state's precision are near those in float32: by norm, leaf by leaf.

    Names leaves that overflow, underflow to zero, or lose more than `tolerance` of their norm.
    bfloat16 has 8 bits of a number, float16 has 11.
    """
    here = "check_precision()"
    _check(step, state, here, batch, extra)
    _check_tolerance(tolerance, here)
    plan = state.plan
    if plan.precision is None:
        raise StateError(
            message("precision", here, "None", "one: setup(..., precision='bfloat16')")
        )
    wide = dataclasses.replace(
        state,
        params=with_rest(state, base(state)),
        masters=None,
        loss_scale=None,
        plan=Plan(plan.init, plan.update, plan.selected, None, plan.overwritten),
    )
    state = _settled(step, state, batch, extra)
    reference, (_, low) = _gradient(step, wide, batch, extra), _gradient(step, state, batch, extra)
    _check_finite(reference, here, batch)
    full = reference[1]
    where, sizes = (
        f"precision {plan.precision.compute}",
        _sizes_of_noise(full, "grads", by_norm=True),
    )
    return _compared(where, low, full, tolerance, "grads", by_norm=True, sizes=sizes)


def check_sharding(
    step: TrainStep,
    state: TrainState,
    batch: Any,
    mesh: Any = None,
    tolerance: float = EXACT,
    steps: int = STEPS,
    **extra,
) -> float:
    """That losses and params after a few steps over the devices of a mesh are those of one device.

    Without a mesh: that of all devices, `ts.mesh()`. Randomness has to come from the key, not from
    shapes.
    """
    here = "check_sharding()"
    _check(step, state, here, batch, extra)
    _check_tolerance(tolerance, here)
    checks.check_count(steps, here, "steps")
    mesh = all_devices() if mesh is None else mesh
    if not isinstance(mesh, Mesh):
        raise WrongTypeError(
            message("mesh", here, trees.describe(mesh), "a Mesh", "Make one: ts.mesh().")
        )
    state = _settled(step, state, batch, extra)
    where, sizes = f"mesh {dict(mesh.shape)}", _without_digits(step, state, batch, extra)
    single, spread = _copy(state), shard(_copy(state), mesh)
    worst, infos = 0.0, []
    for i in range(steps):
        single, one = step(single, batch, **extra)
        spread, many = step(spread, batch, **extra)
        worst = max(
            worst, _compared(f"{where}, step {i + 1}", many.loss, one.loss, tolerance, "loss")
        )
        infos.append(one)
    _check_taken(infos, here, batch, state)
    return max(
        worst,
        _compared(where, spread.params, single.params, tolerance * steps, "params", sizes=sizes),
    )


def check_resume(
    step: Callable, state: Any, data: Any, steps: int = 6, at: int = 3, **options: Any
) -> None:
    """That a run stopped at step `at` and started again from its checkpoint ends with the bits of
    one that was not.

    State, key, place of the data, losses. `data` has to be readable again: each run begins where
    its `get_state()` is now, and it is put back there. `options` go to `fit`, as
    `fast_forward=True` for data without a place of its own.

    >>> import tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.adam(0.1), {"w": jnp.ones(2)})
    >>> check_resume(step, state, ts.batches(np.ones((8, 2), np.float32), 2, shuffle=True))
    """
    where = "check_resume()"
    _check_live(state, where)
    _check_goal(state, steps, where)
    begin = int(np.max(state.step)) if isinstance(state, TrainState) else 0
    if not isinstance(at, int | np.integer) or not begin < at < steps:
        expected = f"a step before steps={steps}" + (
            f" and after {begin}, where the state is" if begin else ""
        )
        raise WrongTypeError(message("at", where, trees.describe(at), expected))
    for name in ("checkpoint", "resume", "dry_run", "history"):
        if name in options:
            got, fix = (
                f"{name}={trees.describe(options[name])}",
                "The check has its own: leave it out.",
            )
            raise WrongTypeError(message("options", where, got, "other arguments of fit", fix))
    options = {"progress": False, "log_every": 1, **options}
    fix = (
        "A list is, with fast_forward=True: check_resume(step, state, list(data), "
        "fast_forward=True)."
    )
    with tempfile.TemporaryDirectory() as folder, _rereading(data, where, fix) as anew:
        run = lambda state, n, **more: fit(step, state, anew(), steps=n, **options, **more)
        expected, rows = run(_copy(state), steps)
        _losses(rows, where)  # nobody goes on from a checkpoint that is not finite
        path = Path(folder) / "run"
        run(_copy(state), at, checkpoint=path)
        found, again = run(_copy(state), steps, checkpoint=path, resume="must")
    _compared(f"a run resumed at step {at}", found, expected, 0.0, "state")
    _compared(
        f"losses of a run resumed at step {at}",
        _losses(again, where),
        _losses(rows, where),
        0.0,
        "losses",
    )


def check_fused(
    step: Callable, state: Any, data: Any, steps: int = 6, tolerance: float = EXACT
) -> float:
    """That many steps in one compiled loop give the bits of one at a time, and a loop in Python the
    same numbers.

    Between two programs XLA may round otherwise; `tolerance` is for that.
    """
    where, options = "check_fused()", {"steps": steps, "progress": False, "log_every": 1}
    _check_live(state, where)
    _check_tolerance(tolerance, where)
    _check_goal(state, steps, where)
    runs = {}
    with _rereading(data, where, "A list is: list(data).") as begin:
        for per_call in (1, 4, "auto", None):
            runs[per_call], rows = fit(
                step, _copy(state), begin(), steps_per_call=per_call, **options
            )
            _losses(rows, where)
    for per_call in (4, "auto"):
        _compared(f"steps_per_call={per_call!r}", runs[per_call], runs[1], 0.0, "state")
    return _compared(
        "the plain loop", _params(runs[None]), _params(runs[1]), tolerance * steps, "params"
    )


def check_frozen(
    step: TrainStep, state: TrainState, batch: Any, where: Any, steps: int = STEPS, **extra
) -> None:
    """That leaves frozen by `where` stay bit for bit what they are, with moments and averages, and
    that others move.
    """
    here = "check_frozen()"
    _check(step, state, here, batch, extra)
    checks.check_count(steps, here, "steps")
    before = freeze(_copy(_settled(step, state, batch, extra)), where)
    held = jax.tree.map(own, before)
    after, infos = before, []
    for _ in range(steps):
        after, info = step(after, batch, **extra)
        infos.append(info)
    _check_taken(infos, here, batch, state)
    frozen = frozen_flags(held)
    parts = [(trained_part(s), s.average and s.average.params) for s in (held, after)]
    then, now = (_named(part, "state") for part in parts)
    n = len(frozen)
    still = {name: x for i, (name, x) in enumerate(then.items()) if frozen[i % n]}
    owners = owners_of(held.plan.init, held.opt_state, held.numbers, base(held))
    moments = zip(owners, _named(held.opt_state, "opt_state").items(), strict=True)
    still |= {name: x for owner, (name, x) in moments if owner is not None and frozen[owner]}
    now |= _named(after.opt_state, "opt_state")
    for name, x in still.items():
        if trees.bits_differ(now[name], x):
            raise CheckError(
                message(
                    f"leaf {name}",
                    f"freeze({where!r})",
                    f"other bits after {steps} steps",
                    "its own",
                )
            )
    others = [name for i, name in enumerate(_named(trained_part(held), "params")) if not frozen[i]]
    before, moved = (_named(trained_part(s), "params") for s in (held, after))
    if others and all(not trees.bits_differ(moved[name], before[name]) for name in others):
        raise CheckError(
            message(
                "others", f"freeze({where!r})", f"none that moved in {steps} steps", "one at least"
            )
        )


def check_population(
    step: TrainStep,
    make: Callable,
    batch: Any,
    n: int = 3,
    tolerance: float = EXACT,
    steps: int = STEPS,
    **values,
) -> float:
    """That each member of `population(make, n, **values)` trains as its single run.

    A batch of matrix products rounds otherwise than one of them: hence a tolerance.
    """
    where = "check_population()"
    _check_tolerance(tolerance, where)
    checks.check_count(steps, where, "steps")
    _check_untraced(where, batch, values)
    runs, worst, sizes = population(make, n, key=0, **values), 0.0, dict[str, float]()
    _check(step, runs, where, batch)
    keys, infos = jax.random.split(jax.random.key(0), n), []
    for _ in range(steps):
        runs, info = step(runs, batch)
        infos.append(info)
    _check_taken(infos, where, batch, runs)
    for i in range(n):
        one = make(
            keys[i],
            **{
                name: jax.tree.map(lambda x, i=i: np.asarray(x)[i], x) for name, x in values.items()
            },
        )
        sizes = _without_digits(step, one, batch, {}) if i == 0 else sizes
        for _ in range(steps):
            one, _ = step(one, batch)
        found = _params(member(runs, i))
        worst = max(
            worst,
            _compared(f"member {i}", found, _params(one), tolerance * steps, "params", sizes=sizes),
        )
    return worst


def check_purity(step: TrainStep, state: TrainState, batch: Any, **extra) -> None:
    """That the loss function is a function of its arguments: traced anew it gives the same bits,
    and keeps no tracer.

    Finds NumPy's and Python's random numbers, clocks and counters that are read while it is traced,
    in the state and in the info (loss, norms, metrics).
    """
    where = "check_purity()"
    _check(step, state, where, batch, extra)
    ends = []
    start = _settled(step, state, batch, extra)
    for _ in range(2):
        anew = dataclasses.replace(
            step, donate=False
        )  # an equal step, which has compiled nothing yet
        try:
            with jax.checking_leaks():
                ends.append(anew(_copy(start), batch, **extra))
        except TsunaxError:
            raise
        except Exception as error:
            if "leak" not in str(error).lower():
                raise
            got, fix = "a tracer that outlives its trace", "Return it: metrics, or model_state."
            raise CheckError(
                message("loss_fn", where, got, "values that are returned", fix)
            ) from error
    _check_taken([info for _, info in ends], where, batch, state)
    try:
        for root, found, expected in zip(("state", "info"), ends[1], ends[0], strict=True):
            _compared("a second trace", found, expected, 0.0, root)
    except CheckError as error:
        fix = (
            "It reads what is no argument: np.random, random, time, a global that changes. "
            "Randomness comes from `key`."
        )
        raise CheckError(f"{error} {fix}") from None


def check_donation(step: TrainStep, state: TrainState, batch: Any, **extra) -> int:
    """That the results of the compiled step take the memory of all that it consumes; the bytes on
    one device.

    A donated array that no result can take the place of (another dtype, shape or sharding) is
    memory held twice, of which JAX says nothing once its warning has passed. Nothing is executed.
    """
    _check(step, state, "check_donation()", batch, extra)
    if not step.donate:
        fix = "train_step(loss_fn) donates."
        raise WrongTypeError(
            message(
                "step", "check_donation()", "train_step(..., donate=False)", "one that does", fix
            )
        )
    found = describe(step, state, batch, **extra)
    if found.not_aliased:
        got = f"memory that no result takes: {trees.listed(found.not_aliased, 3)}"
        raise CheckError(message("donation", "the compiled step", got, "all of it used again"))
    return found.aliased


def check_recompiles(
    step: TrainStep, state: TrainState, batches: Iterable[Any], most: int = 1, **extra
) -> int:
    """That a step over these batches is compiled `most` times at the most; how often it was. Names
    why it was again.

    >>> import tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)})
    >>> check_recompiles(step, state, [np.ones((4, 2)), np.ones((3, 2))])
    Traceback (most recent call last):
    tsunax.errors.CheckError: traces at 2 batches: got 2, expected at most 1. step: batch has shape (3, 2), had ...
    """
    where = "check_recompiles()"
    _check(step, state, where, extra)
    checks.check_count(most, where, "most")
    anew, state, n = dataclasses.replace(step), _copy(state), 0
    for batch in checks.each_batch(batches, where):
        _check_untraced(where, batch)
        state, _ = anew(state, batch, **extra)
        n += 1
    if len(anew.traces) > most:
        reasons = "; ".join(
            why(anew.traces, [("step", device) for device in anew.programs.devices])
        )
        raise CheckError(
            message("traces", f"{n} batches", len(anew.traces), f"at most {most}", reasons)
        )
    return len(anew.traces)


# ---------------------------------------------------------------------------------------- comparing


def _check(step: Any, state: Any, where: str, *given: Any) -> None:
    if not isinstance(step, TrainStep):
        raise WrongTypeError(message("step", where, trees.describe(step), "a train_step"))
    check_state(state, where)
    _check_live(state, where, *given)


def _check_live(state: Any, where: str, *given: Any) -> None:
    """Raise StateError for a state that was donated, and for what is traced."""
    _check_untraced(where, state, *given)
    if any(map(trees.is_gone, jax.tree.leaves(state))):
        raise StateError(donated(where))


def _check_goal(state: Any, steps: Any, where: str) -> None:
    """Raise unless the state of a run is before a step, so that there are some to compare."""
    checks.check_count(steps, where, "steps")
    if isinstance(state, TrainState) and (at := int(np.max(state.step))) >= steps:
        raise HyperparameterError(
            message("steps", where, steps, f"one beyond {at}, where the state is")
        )


def _check_untraced(where: str, *given: Any) -> None:
    # under jit concrete arguments, too, give traced results: a new array tells
    if any(map(trees.is_traced, jax.tree.leaves((given, jnp.zeros(()))))):
        fix = "Call it outside of jit, with arrays."
        raise StateError(message("state or batch", where, "a traced one", "a concrete one", fix))


def _check_tolerance(tolerance: Any, where: str) -> None:
    expected = "a finite number from 0 up"
    if not checks.is_real(tolerance) or np.ndim(tolerance):
        raise WrongTypeError(message("tolerance", where, trees.describe(tolerance), expected))
    if not 0 <= tolerance < np.inf:  # NaN is neither
        raise HyperparameterError(message("tolerance", where, tolerance, expected))


def _check_finite(gradient: tuple[Any, Any], where: str, batch: Any) -> None:
    """Raise DataError for loss and gradients that are NaN or inf before anything is compared to
    them.
    """
    if not _all_finite(gradient):
        fix = f"Nothing can be compared with them. {guard.in_batch(batch)}".rstrip()
        raise DataError(
            message("loss and gradients", where, "some that are not finite", "finite ones", fix)
        )


def _check_taken(infos: list[Any], where: str, batch: Any, state: Any) -> None:
    """Raise DataError where all steps were rejected, or were of no finite number.

    Not where a loss scale is still falling, which rejects the first steps of a good run.
    """
    if any(map(_is_taken, infos)):
        return
    is_falling = state.loss_scale is not None and state.loss_scale.dynamic
    if not (is_falling and np.isfinite(np.asarray(infos[-1].loss)).any()):
        got = (
            f"{len(infos)} steps, all of them rejected or not finite: loss "
            f"{np.asarray(infos[0].loss)}"
        )
        fix = (
            f"Nothing was compared: give a batch that it trains on. {guard.in_batch(batch)}"
        ).rstrip()
        raise DataError(message("batch", where, got, "one that was taken", fix))


def _is_taken(info: Any) -> bool:
    """Of a population, whether one member took it."""
    if not isinstance(info, StepInfo):  # of a step of one's own
        return True
    taken = True if info.verdict is None else np.asarray(info.verdict) <= 0
    for x in (info.loss, info.grad_norm):
        taken = taken & (True if x is None else np.isfinite(np.asarray(x)))
    return bool(np.any(taken))


def _losses(rows: Any, where: str) -> dict[str, Any]:
    """The losses of a run by name. Raises DataError where it has some and none is finite."""
    losses = {name: rows[name] for name in rows.names if name.partition("/")[0] == "loss"}
    if losses and not any(np.isfinite(x).any() for x in losses.values()):
        fix = "Nothing was compared: give data that it trains on."
        raise DataError(message("data", where, "no loss that is finite", "one at least", fix))
    return losses


def _copy(state):
    return jax.tree.map(own, state)


@contextlib.contextmanager
def _rereading(data: Any, where: str, fix: str) -> Iterator[Callable[[], Any]]:
    """A function that gives the data from their place of now, whenever it is called.

    They are left there at the end.
    """
    inner = data
    while isinstance(inner, Prefetched):
        inner = inner.data
    read = put = None
    for names in (
        ()
        if isinstance(inner, Data)
        else (("get_state", "set_state"), ("state_dict", "load_state_dict"))
    ):
        if put is None and all(hasattr(inner, name) for name in names):
            read, put = (getattr(inner, name) for name in names)
    if put is None and isinstance(inner, Iterator):
        raise WrongTypeError(
            message("data", where, trees.describe(inner), "data that can be read again", fix)
        )
    if read is not None and read() is None:
        raise DataError(
            message(
                "data",
                where,
                "a get_state() that is None",
                "one that tells the place",
                "Read a batch.",
            )
        )
    start = read and _copied(read(), where)  # some give away the dict that they go on to change

    def begin():
        if put is not None:
            put(_copied(start, where))
        return data.afresh() if isinstance(data, Data) else data

    yield begin
    if put is not None:
        put(start)


def _copied(place: Any, where: str) -> Any:
    try:
        return copy.deepcopy(place)
    except Exception as error:  # locks, files, generators in it
        fix = f"get_state() gave {trees.describe(place)}: {type(error).__name__} {error}"
        raise DataError(
            message("data", where, "a place that cannot be copied", "one of numbers", fix)
        ) from error


def _params(state: Any) -> Any:
    return state.params if isinstance(state, TrainState) else state


def _gradient(step: TrainStep, state: TrainState, batch: Any, extra) -> tuple[Any, Any]:
    """Loss and gradients of a step, in float32 at least."""
    run = gradient_of(step.loss_fn, step.accumulate, step.remat, "ignore", "testing", None)
    loss, grads = jax.jit(run)(_copy(state), batch, **extra)
    return loss.compute(), grads


def _settled(step: TrainStep, state: TrainState, batch: Any, extra) -> TrainState:
    """The state with a dynamic loss scale that is as small as the steps of a run would make it;
    members as they are.
    """
    scale = None if members_of(state) is not None else state.loss_scale
    while scale is not None and scale.dynamic and scale.scale > scale.floor:
        if _all_finite(_gradient(step, state, batch, extra)[1]):
            break
        scale = dataclasses.replace(scale, scale=scale.scale / scale.factor)
        state = dataclasses.replace(state, loss_scale=scale)
    return state


def _size(x: Any, by_norm: bool) -> float:
    x = np.abs(np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64))
    return float(np.linalg.norm(x) if by_norm else np.max(x, initial=0))


def _sizes_of_noise(grads: Any, root: str, *, by_norm: bool) -> dict[str, float]:
    """By name the size of all gradients together, for those that are nothing but rounding beside
    it.
    """
    sizes = {name: _size(x, by_norm) for name, x in _named(grads, root).items()}
    whole = max(sizes.values(), default=0.0)
    return {name: whole for name, size in sizes.items() if size < NOISE * whole}


def _without_digits(step: TrainStep, state: TrainState, batch: Any, extra) -> dict[str, float]:
    """By name an infinite size, for params that move by the sign of rounding."""
    grads = _gradient(step, state, batch, extra)[1]
    return dict.fromkeys(_sizes_of_noise(grads, "params", by_norm=False), np.inf)


def _all_finite(tree: Any) -> bool:
    return all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(tree))


def _named(tree: Any, root: str) -> dict[str, Any]:
    return {
        trees.access_str(root, path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _compared(
    where: str,
    got: Any,
    expected: Any,
    tolerance: float,
    root: str,
    *,
    by_norm: bool = False,
    sizes: Any = None,
) -> float:
    """The largest relative difference of two trees. Raises CheckError with its leaf where it is
    above the tolerance.

    `sizes`, by name: of leaves that are measured by another size than their own.
    """
    if difference := trees.first_difference(got, expected, root):
        raise CheckError(f"tree of {where}: {difference}.")
    worst, name, text = 0.0, "", ""
    theirs = _named(expected, root)
    for here, x in _named(got, root).items():
        size = (sizes or {}).get(here)
        far, said = _distance(x, theirs[here], exact=tolerance == 0, by_norm=by_norm, size=size)
        if far > worst:
            worst, name, text = far, here, said
    if worst > tolerance:
        expects = "the same bits" if tolerance == 0 else f"at most {tolerance:.2g}"
        raise CheckError(message(f"leaf {name}", where, text, expects))
    return worst


def _distance(
    x: Any, y: Any, *, exact: bool, by_norm: bool, size: float | None
) -> tuple[float, str]:
    """How far two leaves are apart, and that in words."""
    if not trees.bits_differ(x, y):
        return 0.0, ""
    x, y = trees.on_host(x), trees.on_host(y)
    if x.shape != y.shape or (x.dtype != y.dtype and exact):
        return np.inf, f"{x.dtype}{list(x.shape)} for {y.dtype}{list(y.shape)}"
    wide = [z.astype(np.complex128 if np.iscomplexobj(z) else np.float64) for z in (x, y)]
    same = (wide[0] == wide[1]) | (
        np.isnan(wide[0]) & np.isnan(wide[1])
    )  # of NaNs whatever their bits
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0, np.abs(wide[0] - wide[1]))
    if exact or not np.isfinite(gap).all():
        at = () if same.all() else tuple(np.argwhere(~same)[0].tolist())
        return np.inf, f"{x[at]!s} for {y[at]!s}" + (f" at {list(at)}" if at else "")
    if same.all():
        return 0.0, ""
    size = _size(np.where(np.isfinite(wide[1]), wide[1], 0), by_norm) if size is None else size
    far = _size(gap, by_norm) / size if size else np.inf
    return far, f"a difference of {far:.2g} of its {'norm' if by_norm else 'largest element'}"
