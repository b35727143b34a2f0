"""Runs of a step from copies of a state, and the largest difference of their results."""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax import guard
from tsunax._core import trees
from tsunax.errors import CheckError, DataError, HyperparameterError
from tsunax.program import TrainStep, check_is_train_step
from tsunax.state import TrainState, check_state, own
from tsunax.step import StepInfo

# Relative difference of float32 sums in another order. If it grows, small mistakes pass.
EXACT = 1e-5
# A gradient below this part of the largest gradient is the rounding of zero. If it grows, wrong
# small gradients pass.
NOISE = 1e-6
STEPS = 3


def check_start(step: Any, state: Any, where: str) -> None:
    check_is_train_step(step, where)
    check_state(state, where)


def live_step(state: Any, steps: float, where: str) -> int:
    """The step of a state. Raises HyperparameterError if it is not before `steps`."""
    if not isinstance(state, TrainState):
        return 0
    if (step := int(np.max(state.step))) >= steps:
        raise HyperparameterError("steps", where, steps, f"one beyond {step}, where the state is")
    return step


def check_compared_steps(are_good: Iterable[Any], where: str, batch: Any = ()) -> None:
    """Raise DataError if nothing that was compared is finite and was applied."""
    if not any(np.any(x) for x in are_good):
        got = "a run in which every step was rejected or not finite"
        fix = f"Nothing was compared: give data that it trains on. {guard.fault_in_batch(batch)}"
        raise DataError("batch", where, got, "one step at least", fix.rstrip())


def applied_steps(infos: list[Any], state: Any) -> list[Any]:
    """Whether the loss of each step was finite and it was applied, or a loss scale was falling."""
    is_falling = state.loss_scale is not None and state.loss_scale.dynamic
    is_applied = lambda verdict: verdict is None or is_falling or np.asarray(verdict) <= 0
    # another kind of step returns another info
    step_infos = [info for info in infos if isinstance(info, StepInfo)]
    return [np.isfinite(info.loss) & is_applied(info.verdict) for info in step_infos] or [True]


def copied(state):
    return jax.tree.map(own, state)


def run_steps(step, state, batch, extra, steps: int, where: str = "") -> tuple[Any, list[Any]]:
    """The state after some steps with one batch, and their infos. With `where` checked."""
    infos = []
    with without_key_warnings():
        for _ in range(steps):
            state, info = step(state, batch, **extra)
            infos.append(info)
    if where:
        check_compared_steps(applied_steps(infos, state), where, batch)
    return state, infos


def gradient_of(step: TrainStep, state: TrainState, batch: Any, extra) -> tuple[Any, Any]:
    """Loss and gradients of a step, in float32 at least."""
    run = dataclasses.replace(step, on_nonfinite="ignore", axis_name=None).gradient
    with without_key_warnings():
        loss, grads = jax.jit(run)(copied(state), batch, **extra)
    return loss.compute(), grads


@contextlib.contextmanager
def without_key_warnings() -> Iterator[None]:
    """Without the warning of a state without a key: several checks remove the key."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* names key, but the state has none")
        yield


def with_settled_scale(step: TrainStep, state: TrainState, batch: Any, extra) -> TrainState:
    """The state with the dynamic loss scale that a run would settle at; populations unchanged."""
    scale = state.loss_scale
    if scale is None or np.ndim(scale.scale):
        return state
    while scale.dynamic and scale.scale > scale.floor:
        if are_all_finite(gradient_of(step, state, batch, extra)[1]):
            break
        scale = dataclasses.replace(scale, scale=scale.scale / scale.factor)
        state = dataclasses.replace(state, loss_scale=scale)
    return state


def _largest(x: Any) -> float:
    return float(np.max(np.abs(trees.on_host(x).astype(np.complex128)), initial=0))


def sizes_of_noise(grads: Any, root: str = "grads") -> dict[str, float]:
    """The largest size of all gradients, by the names of the gradients that are rounding noise."""
    sizes = {name: _largest(x) for name, x in trees.leaves_at(root, grads)}
    whole = max(sizes.values(), default=0.0)
    return {name: whole for name, size in sizes.items() if size < NOISE * whole}


def sizes_of_noisy_params(*call: Any) -> dict[str, float]:
    """An infinite size, by the names of params with a gradient that is rounding noise."""
    return dict.fromkeys(sizes_of_noise(gradient_of(*call)[1], "params"), np.inf)


def are_all_finite(tree: Any) -> bool:
    return all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(tree))


def compared(
    where: str, got: Any, expected: Any, tolerance: float, root: str, sizes: Any = None
) -> float:
    """The largest relative difference of two trees (to sizes by name, if given), or CheckError."""
    if difference := trees.first_difference(got, expected, root):
        raise CheckError(f"tree of {where}: {difference}.")
    pairs = zip(trees.leaves_at(root, got), jax.tree.leaves(expected), strict=True)
    size_of, distances = (sizes or {}).get, [("", 0.0, "")]  # first, because 0 wins over NaN
    for (name, x), y in pairs:
        distances.append((name, *_distance(x, y, tolerance == 0, size_of(name))))
    name, worst, text = max(distances, key=lambda x: x[1])
    if worst > tolerance:
        expected = "the same bits" if tolerance == 0 else f"at most {tolerance:.2g}"
        raise CheckError(f"leaf {name}", where, text, expected)
    return worst


def _distance(x: Any, y: Any, exact: bool, size: float | None) -> tuple[float, str]:
    """The relative difference of two leaves, as a number and in words."""
    if not trees.bits_differ(x, y):
        return 0.0, ""
    x, y = trees.on_host(x), trees.on_host(y)
    if x.shape != y.shape or (x.dtype != y.dtype and exact):
        return np.inf, f"{x.dtype}{list(x.shape)} for {y.dtype}{list(y.shape)}"
    a, b = (z.astype(np.complex128) for z in (x, y))
    are_equal = (a == b) | (np.isnan(a) & np.isnan(b))  # the bits of NaN do not count
    with np.errstate(invalid="ignore"):
        gap = np.where(are_equal, 0, np.abs(a - b))
    if exact or not np.isfinite(gap).all():
        place = () if are_equal.all() else tuple(np.argwhere(~are_equal)[0].tolist())
        return np.inf, f"{x[place]!s} for {y[place]!s}" + (f" at {list(place)}" if place else "")
    size = _largest(b[np.isfinite(b)]) if size is None else size
    far = float(np.max(gap, initial=0)) / size if size else np.inf * (not are_equal.all())
    return far, f"a difference of {far:.2g} of its largest element"
