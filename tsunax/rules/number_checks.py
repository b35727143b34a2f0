"""Checks of live numbers and their schedules: a finite number, in the range of its name."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import Function, checks, trees
from tsunax.errors import HyperparameterError, WrongTypeError

# By name: (lower bound, whether the bound itself is allowed, exclusive upper bound, all in words)
_RANGES = {
    **dict.fromkeys(("learning_rate", "max_learning_rate"), (0, True, math.inf, "≥ 0")),
    **dict.fromkeys(("eps", "eps_root", "weight_decay", "sign_decay"), (0, True, math.inf, "≥ 0")),
    **dict.fromkeys(("b1", "b2", "b3", "rho", "momentum"), (0, True, 1, "≥ 0 and < 1")),
    **dict.fromkeys(("decay", "beta1", "beta2"), (0, True, 1, "≥ 0 and < 1")),
    **dict.fromkeys(("max_norm", "max_delta"), (0, False, math.inf, "> 0")),
    "every": (1, True, math.inf, "≥ 1"),
}
_NO_RANGE = -math.inf, True, math.inf, ""


def check_number(where: str, name: str, value: Any, kind: str = "a number or a schedule") -> None:
    """Raise unless `value` is a finite number in the range of its name. Traced numbers pass."""
    is_traced = trees.is_traced(value)
    if not checks.is_real(value) or (np.ndim(value) and not is_traced):
        raise WrongTypeError(name, where, trees.describe(value), kind)
    if is_traced:
        return
    dtype = jax.dtypes.canonicalize_dtype(float)
    number = value if isinstance(value, int) else float(np.asarray(value))
    low, includes_low, high, text = _RANGES.get(name, _NO_RANGE)
    is_finite = abs(number) <= float(jnp.finfo(dtype).max)
    if not is_finite or not low <= number < high or (number == low and not includes_low):
        raise HyperparameterError(name, where, value, f"a finite {dtype} {text}".rstrip())


def check_schedule(where: str, name: str, schedule: Function) -> None:
    """Raise unless a schedule gives a number in the range of its name at step 0, and can be traced.

    The whole numbers in the schedule are checked as steps, too, because a part begins or ends
    there; a decay may reach 1 at such a step. A schedule need not be defined after its last part.
    """
    value = schedule(0)
    check_number(f"{where}, step 0 of its schedule", name, value, "a number")
    if trees.is_traced(value):
        return
    whole_numbers = [
        x for x in jax.tree.leaves(schedule) if isinstance(x, int | float) and x % 1 == 0
    ]
    # At most eight steps, because each is a call. Parts follow each other: the sum is the last end.
    steps = [int(x) for x in whole_numbers if 1 < x < 1 << 29][:8]
    low, _, high, text = _RANGES.get(name, _NO_RANGE)
    for step in {*steps, sum(steps)}:
        value = float(schedule(step))
        if value < low or value > high:
            place = f"{where}, step {step} of its schedule"
            raise HyperparameterError(name, place, value, f"a number {text}".rstrip())
    jax.eval_shape(schedule, jax.ShapeDtypeStruct((), np.int32))
