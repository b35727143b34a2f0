"""The clock of all calls, also of calls that only gather: see `rules.accumulate`."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import Maybe, PyTree

LIMIT = np.iinfo(np.int32).max


class WindowState:
    """A base class for states of rules that gather gradients: see `rules.accumulate`."""

    emitted: Any  # bool: whether the last call ended its window


def emitted(opt_state: PyTree) -> jax.Array | None:
    """Whether the last call moved params, from its state; None if some rule runs on every call.

    A chain moves params with its last rule, a wrapper with its inner rule. A partition moves them
    with any of its rules, if all its rules have a window.
    """
    if isinstance(opt_state, WindowState):
        return opt_state.emitted
    if type(opt_state) is tuple:
        return emitted(opt_state[-1]) if opt_state else None
    parts = getattr(opt_state, "inner", None)
    if parts is not None and not isinstance(parts, dict):
        return emitted(parts)
    emitted_by_part = [emitted(part) for part in (parts or {}).values()]
    all_wait = emitted_by_part and all(x is not None for x in emitted_by_part)
    return functools.reduce(operator.or_, emitted_by_part) if all_wait else None


def with_gathered(verdict: jax.Array | None, emitted: jax.Array | None) -> jax.Array | None:
    """The verdict, or -1 if the step was not rejected but only gathered its gradient."""
    if emitted is None:
        return verdict
    code = jnp.int32(0) if verdict is None else verdict
    return jnp.where((code == 0) & ~emitted, -1, code)


_APPLIED, _GATHERED, _REJECTED = np.array([[1, 1, 0, 0], [0, 1, 0, 0], [0, 1, 1, 1]], np.int32)


def count(clock: jax.Array, emitted: Maybe, verdict: Maybe = None) -> jax.Array:
    """The clock after this call: applied updates, calls, rejected calls, rejected calls in a row.

    The increments are constant vectors: XLA:CPU would run one more kernel for each stacked scalar.
    """
    old_clock = jnp.minimum(clock, LIMIT - 1)
    increments = _APPLIED if emitted is None else jnp.where(emitted, _APPLIED, _GATHERED)
    new_clock = old_clock * np.array([1, 1, 1, 0], np.int32) + increments
    return (
        new_clock if verdict is None else jnp.where(verdict == 0, new_clock, old_clock + _REJECTED)
    )
