"""Checks of live numbers and their schedules: which parameters take them, and in which range."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import Function, PyTree, Scalar, checks, trees
from tsunax.errors import HyperparameterError, WrongTypeError, remedy, told
from tsunax.rules.number_table import ScheduleShape


def split_schedule(schedule: PyTree) -> tuple[ScheduleShape, list[Any]]:
    leaves, treedef = jax.tree.flatten(schedule)
    functions = tuple(leaf if callable(leaf) else None for leaf in leaves)
    return ScheduleShape(treedef, functions), [leaf for leaf in leaves if not callable(leaf)]


_NEVER_NUMBERS = {"key", "seed", "mask", "mu_dtype"}
_NUMBER_WORDS = ("float", "Scalar", "ArrayLike", "Schedule")
# Words in annotations of trees, or of functions of the params.
_OTHER_WORDS = ("Mask", "ArrayTree", "Mapping", "Iterable")


def takes_number(parameter: inspect.Parameter, value: Any) -> bool:
    """Whether this parameter of a factory takes a live number, or a schedule, given this value.

    Counts, flags, names, masks, dtypes, keys, tuples and functions are part of the program.
    """
    default, annotation = parameter.default, str(parameter.annotation)
    if parameter.name in _NEVER_NUMBERS or any(word in annotation for word in _OTHER_WORDS):
        return False
    is_empty = default is parameter.empty
    if isinstance(default, (bool, int, str, tuple)) or (callable(default) and not is_empty):
        return False
    # Such a function is no number and no schedule.
    if re.match(r"(typing\.|collections\.abc\.)?Callable\b", annotation):
        return False
    is_expected = (
        isinstance(default, float)
        or parameter.name in ("learning_rate", "lr")
        or any(word in annotation for word in _NUMBER_WORDS)
    )
    if value is None:
        return is_expected and default is not None
    if isinstance(value, (float, np.floating)) or trees.is_traced(value):
        return True
    return is_expected


# By name: (lower bound, whether the bound itself is allowed, exclusive upper bound). None: no bound
_RANGES = {
    "learning_rate": (0, True, None),
    "max_learning_rate": (0, True, None),
    **dict.fromkeys(("b1", "b2", "b3", "rho", "momentum", "decay", "beta1", "beta2"), (0, True, 1)),
    **dict.fromkeys(("eps", "eps_root", "weight_decay", "sign_decay"), (0, True, None)),
    **dict.fromkeys(("max_norm", "max_delta"), (0, False, None)),
    "every": (1, True, None),
}


def check_number(where: str, name: str, value: Any, kind: str = "a number or a schedule") -> None:
    """Raise unless `value` is a finite number in the range of its name. Traced numbers pass."""
    if not checks.is_real(value):
        raise WrongTypeError(name, where, trees.describe(value), kind)
    if trees.is_traced(value):
        return
    if np.ndim(value):
        raise HyperparameterError(name, where, f"an array of shape {np.shape(value)}", "one number")
    largest_float = float(jnp.finfo(jax.dtypes.canonicalize_dtype(float)).max)
    number = value if isinstance(value, int) else float(np.asarray(value))
    if not -largest_float <= number <= largest_float:  # NaN too
        got = f"{number}" if isinstance(number, float) else "an int of many digits"
        raise HyperparameterError(
            name,
            where,
            got=got,
            expected="a finite number"
            if got in ("nan", "inf", "-inf")
            else f"one within ±{largest_float:.2g}",
        )
    low, includes_low, high = _RANGES.get(name, (None, True, None))
    too_low = low is not None and (number < low or (number == low and not includes_low))
    if too_low or (high is not None and number >= high):
        raise HyperparameterError(
            name,
            where,
            got=f"{value}",
            expected=f"{'≥' if includes_low else '>'} {low}"
            + (f" and < {high}" if high is not None else ""),
        )


def checked_schedule(where: str, name: str, value: Scalar | Function) -> ScheduleShape | None:
    """The shape of a schedule, or None for a number. Raises for a bad schedule or number."""
    if not callable(value):
        return check_number(where, name, value)
    check_schedule(where, name, value)
    return split_schedule(value)[0]


def check_schedule(where: str, name: str, schedule: Function) -> None:
    """Raise unless a schedule gives a number in the range of its name at step 0, and can be traced.

    The whole numbers in the schedule are checked as steps, too, because a part begins or ends
    there; a decay may reach 1 at such a step. A schedule need not be defined after its last part.
    """
    place_of_step = f"{where}, step 0 of its schedule"
    value = result_of(place_of_step, name, schedule, 0)
    if trees.is_traced(value):
        return
    check_number(place_of_step, name, value, "a number")
    whole_numbers = [
        x for x in jax.tree.leaves(schedule) if isinstance(x, int | float) and x % 1 == 0
    ]
    steps = [int(x) for x in whole_numbers if 1 < x < 1 << 29][:8]
    low, _, high = _RANGES.get(name, (None, True, None))
    for step in {*steps, sum(steps)}:
        value = float(result_of(place_of_step, name, schedule, step))
        if (low is not None and value < low) or (high is not None and value > high):
            raise HyperparameterError(
                name,
                f"{where}, step {step} of its schedule",
                got=value,
                expected=f"≥ {low}" + (f" and ≤ {high}" if high is not None else ""),
            )
    shape_at(f"{where}, its schedule under jit", name, schedule)


def shape_at(where: str, name: str, schedule: Function) -> Any:
    """The shape and dtype of a function of a traced step, or HyperparameterError if it fails."""
    return result_of(where, name, jax.eval_shape, schedule, jax.ShapeDtypeStruct((), np.int32))


def result_of(where: str, name: str, f: Function, *args: Any) -> Any:
    """`f(*args)`, or HyperparameterError with the exception that it raised."""
    try:
        return f(*args)
    except Exception as error:
        raise HyperparameterError(name, where, told(error), "a number", remedy(error)) from error


def as_rows(values: Sequence[Scalar]) -> jax.Array:
    """Table rows of shape (4, n): the values, their complements, zeros, and the values again.

    The complements of concrete values are rounded once, from float64.
    """
    dtype = jax.dtypes.canonicalize_dtype(float)
    wide = np.asarray([0.0 if trees.is_traced(v) else float(v) for v in values], np.float64)
    rows = jnp.asarray(np.stack([wide, 1 - wide, np.zeros_like(wide), wide]).astype(dtype))
    for i, value in enumerate(values):
        if trees.is_traced(value):
            value = jnp.asarray(value, dtype)
            rows = rows.at[:, i].set(jnp.stack([value, 1 - value, jnp.zeros_like(value), value]))
    return rows
