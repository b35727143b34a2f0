"""Checks of a step: the same numbers on every way to compute them, memory and compilations."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from tsunax._core import Function, PyTree, Where, trees
from tsunax._state import averages_of, frozen_flags
from tsunax._step.row_probe import row_difference
from tsunax.devices import meshes
from tsunax.errors import CheckError, DataError, StateError, WrongTypeError
from tsunax.hyper import freeze
from tsunax.insight.description import describe
from tsunax.insight.retraces import retrace_reasons
from tsunax.populations import member, population
from tsunax.program import TrainStep
from tsunax.rules.leaf_owners import owners_of
from tsunax.state import TrainState, in_float32, master_params, trained_part
from tsunax.testing._comparing import (
    EXACT,
    STEPS,
    applied_steps,
    are_all_finite,
    check_compared_steps,
    check_start,
    compared,
    copied,
    gradient_of,
    run_steps,
    sizes_of_noise,
    sizes_of_noisy_params,
    with_settled_scale,
)


def check_accumulation(
    step: TrainStep,
    state: TrainState,
    batch: PyTree,
    n: int = 4,
    tolerance: float = EXACT,
    **extra: Any,
) -> float:
    """Compare gradients and loss of n micro-batches with the whole batch.

    Returns the largest relative difference, a float; raises CheckError if it is more than
    `tolerance`, as for models that mix rows (batch norm, contrastive losses) and losses that
    average averages, and for a loss that does so near these params, as `train_step` warns. `extra`
    are arguments for `step`. Randomness drawn per row differs by construction: give a `state`
    without a key.

    >>> import jax.numpy as jnp, tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"] - 1) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)})
    >>> check_accumulation(step, state, np.ones((8, 2), np.float32)) < 1e-6
    True
    """
    where = "check_accumulation()"
    check_start(step, state, where)
    step = dataclasses.replace(step, noise_scale=False)  # the whole batch has none
    title, accumulating = f"accumulate={n}", dataclasses.replace(step, accumulate=n)
    (whole_loss, whole_grads), (loss, grads) = (
        gradient_of(s, with_settled_scale(s, state, batch, extra), batch, extra)
        for s in (dataclasses.replace(step, accumulate=1), accumulating)
    )
    check_compared_steps([are_all_finite((whole_loss, whole_grads))], where, batch)
    worst = max(
        compared(title, loss, whole_loss, tolerance, "loss"),
        compared(title, grads, whole_grads, tolerance, "grads", sizes_of_noise(whole_grads)),
    )
    difference = row_difference(accumulating, state, batch, extra)
    if difference and abs(difference.whole - difference.merged) > tolerance * abs(difference.whole):
        raise CheckError(difference.text(accumulating))
    return worst


def check_precision(
    step: TrainStep, state: TrainState, batch: PyTree, tolerance: float = 0.05, **extra: Any
) -> float:
    """Compare gradients in the precision of the state with those in float32.

    `max |low - full| / max |full|` of each leaf: finds gradients that overflow, underflow to zero,
    or lose more than `tolerance`. Returns the largest as a float; raises CheckError above
    `tolerance`, StateError for a `state` in float32. `step`, `batch` and `extra` as in
    `check_accumulation`.
    """
    where = "check_precision()"
    check_start(step, state, where)
    if (policy := state.plan.precision) is None:
        raise StateError("precision", where, "None", "one: setup(..., precision='bfloat16')")
    full_loss, full = gradient_of(step, in_float32(state), batch, extra)
    _, low = gradient_of(step, with_settled_scale(step, state, batch, extra), batch, extra)
    check_compared_steps([are_all_finite((full_loss, full))], where, batch)
    title = f"precision {policy.compute}"
    return compared(title, low, full, tolerance, "grads", sizes_of_noise(full))


def check_sharding(
    step: TrainStep,
    state: TrainState,
    batch: PyTree,
    mesh: jax.sharding.Mesh | None = None,
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
    check_start(step, state, where)
    mesh = meshes.mesh() if mesh is None else mesh
    state = with_settled_scale(step, state, batch, extra)
    title, sizes = f"mesh {dict(mesh.shape)}", sizes_of_noisy_params(step, state, batch, extra)
    single, single_infos = run_steps(step, copied(state), batch, extra, steps, where)
    spread, spread_infos = run_steps(step, meshes.shard(copied(state), mesh), batch, extra, steps)
    losses = [
        compared(f"{title}, step {i}", spread_info.loss, single_info.loss, tolerance, "loss")
        for i, (single_info, spread_info) in enumerate(
            zip(single_infos, spread_infos, strict=True), 1
        )
    ]
    total_tolerance = tolerance * steps
    return max(
        *losses, compared(title, spread.params, single.params, total_tolerance, "params", sizes)
    )


def check_frozen(
    step: TrainStep, state: TrainState, batch: PyTree, where: Where, **extra: Any
) -> None:
    """Check that frozen leaves keep their bits, with moments and averages, and other leaves move.

    Runs 3 times `step(state, batch, **extra)` from `ts.freeze(state, where)`. Raises CheckError
    with the path of the leaf, PatternError if `where` matches nothing.
    """
    place, title = "check_frozen()", f"freeze({where!r})"
    check_start(step, state, place)
    frozen_state = freeze(copied(with_settled_scale(step, state, batch, extra)), where)
    first = copied(frozen_state)
    last_state, _ = run_steps(step, frozen_state, batch, extra, STEPS, place)
    frozen = frozen_flags(first)
    owners = [*range(len(frozen))] * (1 + len(averages_of(first)))
    owners += owners_of(first.plan.init, first.opt_state, first.numbers, master_params(first))

    def leaves(s: TrainState) -> list[tuple[str, Any]]:
        averages = {name: average.params for name, average in averages_of(s).items()}
        return [
            *trees.leaves_at("state", (trained_part(s), averages)),
            *trees.leaves_at("opt_state", s.opt_state),
        ]

    has_moved = []
    for i, (name, x), (_, y) in zip(owners, leaves(first), leaves(last_state), strict=True):
        has_moved.append(i is not None and trees.bits_differ(x, y))
        if has_moved[-1] and frozen[i]:
            raise CheckError(f"leaf {name}", title, f"other bits after {STEPS} steps", "its own")
    if not all(frozen) and not any(has_moved[: len(frozen)]):
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
    single ones. `make`, `n` and `values` are arguments of `ts.population`; `step` a train_step.
    """
    runs, where = population(make, n, key=0, **values), "check_population()"
    check_start(step, runs, where)
    runs, _ = run_steps(step, runs, batch, {}, STEPS, where)
    worst, sizes = 0.0, None
    for i, key in enumerate(jax.random.split(jax.random.key(0), n)):
        single = make(key, **jax.tree.map(lambda x, i=i: np.asarray(x)[i], values))
        sizes = sizes_of_noisy_params(step, single, batch, {}) if sizes is None else sizes
        single, _ = run_steps(step, single, batch, {}, STEPS)
        params = member(runs, i).params
        difference = compared(
            f"member {i}", params, single.params, tolerance * STEPS, "params", sizes
        )
        worst = max(worst, difference)
    return worst


def check_coordinates(
    make: Function, widths: Sequence[int], batch: PyTree, steps: int = 3, tolerance: float = 0.25
) -> dict[str, float]:
    """Check that training moves the outputs of a model as much at any width (µP).

    `make(width)`, for two or more ints in `widths`, returns `(step, state, outputs)`, and
    `outputs(params, batch)` a dict of arrays: activations, logits. After `steps` steps on it the
    mean size of their change is fitted by a power of the width. Returns the powers by name, all
    near 0 under `rules.scale_by_width` and a matching initialization.

    Raises CheckError for a power outside of `tolerance`: above 0, rates that fit a narrow model are
    too large for a wide one; below, a wide model hardly trains.
    """
    where, sizes = "check_coordinates()", {}
    if len(set(widths)) < 2:
        raise DataError("widths", where, str(list(widths)), "two or more, for example 64, 128, 256")
    for width in widths:
        step, state, outputs = make(width)
        check_start(step, state, where)
        first_outputs = outputs(state.params, batch)
        state, _ = run_steps(step, state, batch, {}, steps, where)
        for name, x in outputs(state.params, batch).items():
            sizes.setdefault(name, []).append(max(np.mean(np.abs(x - first_outputs[name])), 1e-30))
    logs = np.log(np.asarray(widths, float))
    powers = {name: float(np.polyfit(logs, np.log(x), 1)[0]) for name, x in sizes.items()}
    for name, power in powers.items():
        if abs(power) > tolerance:
            got = f"a change that goes with the width to the power {power:.2f}"
            raise CheckError(f"outputs[{name!r}]", where, got, f"0, give or take {tolerance:g}")
    return powers


def check_purity(step: TrainStep, state: TrainState, batch: PyTree, **extra: Any) -> None:
    """Check that the loss function depends on its arguments only, and leaks no tracer.

    Two traces of `step(state, batch, **extra)` must return the same bits, else it raises
    CheckError: random numbers of NumPy and Python, clocks and counters were read in the trace. For
    a leaked tracer JAX's own exception is raised.
    """
    where, results = "check_purity()", []
    check_start(step, state, where)
    start = with_settled_scale(step, state, batch, extra)
    for _ in range(2):
        fresh_step = dataclasses.replace(step, donate=False)  # equal, without compiled programs
        with jax.checking_leaks():
            results.append(fresh_step(copied(start), batch, **extra))
    check_compared_steps(applied_steps([info for _, info in results], state), where, batch)
    try:
        for root, first, second in zip(("state", "info"), *results, strict=True):
            compared("a second trace", second, first, 0.0, root)
    except CheckError as error:
        raise CheckError(
            f"{error} It reads what is no argument: np.random, random, time, a global that "
            "changes. Randomness comes from `key`."
        ) from None


def check_donation(step: TrainStep, state: TrainState, batch: PyTree, **extra: Any) -> int:
    """Check that the compiled step reuses all donated memory. Returns its bytes on one device.

    `describe(step, state, batch, **extra).aliased`, an int; nothing is executed. Raises CheckError
    with the leaves that no result replaces (none has their dtype, shape and sharding), and
    WrongTypeError for a step with `donate=False`.
    """
    where = "check_donation()"
    check_start(step, state, where)
    if not step.donate:
        raise WrongTypeError("step", where, "train_step(..., donate=False)", "one that donates")
    description = describe(step, state, batch, **extra)
    if description.not_aliased:
        got = f"memory that no result takes: {trees.listed(description.not_aliased, 3)}"
        raise CheckError("donation", "the compiled step", got, "all of it used again")
    return description.aliased


def check_recompiles(
    step: TrainStep, state: TrainState, batches: Iterable[Any], most: int = 1, **extra: Any
) -> int:
    """Check that a step is compiled at most `most` times over these batches. Returns the number.

    CheckError names the reason of each compilation. `step`, `state` and `extra` as elsewhere.

    >>> import jax.numpy as jnp, tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)})
    >>> check_recompiles(step, state, [np.ones((4, 2)), np.ones((3, 2))])
    Traceback (most recent call last):
    tsunax.errors.CheckError: traces at 2 batches: got 2, ... step: batch is float32[3,2], was ...
    """
    check_start(step, state, "check_recompiles()")
    fresh_step, state, batches = dataclasses.replace(step), copied(state), list(batches)
    for batch in batches:
        state, _ = fresh_step(state, batch, **extra)
    if (n_traces := len(fresh_step.traces)) > most:
        reasons = "; ".join(retrace_reasons(fresh_step.traces))
        place = f"{len(batches)} batches"
        raise CheckError("traces", place, n_traces, f"at most {most}", reasons)
    return n_traces
