"""The clock of all calls, also of those that only gather: see `rules.accumulate`."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import Maybe, PyTree

LIMIT = np.iinfo(np.int32).max


def emitted(opt_state: PyTree) -> jax.Array | None:
    """Whether the call that left this state moved params; None if some rule runs on every call.

    A chain waits for its last rule, a wrapper for the rule whose state is its `inner`, a partition
    for any of its rules if all of them have a window.
    """
    if getattr(type(opt_state), "waits", False):  # the window of `rules.accumulate`
        return opt_state.emitted
    if type(opt_state) is tuple:
        return emitted(opt_state[-1]) if opt_state else None
    parts = getattr(opt_state, "inner", None)
    if parts is not None and not isinstance(parts, dict):
        return emitted(parts)
    found = [emitted(part) for part in (parts or {}).values()]
    all_wait = found and all(x is not None for x in found)
    return functools.reduce(operator.or_, found) if all_wait else None


def with_gathered(verdict: jax.Array | None, emitted: jax.Array | None) -> jax.Array | None:
    """The verdict, or -1 if the step was taken but only gathered its gradient."""
    if emitted is None:
        return verdict
    taken = jnp.int32(0) if verdict is None else verdict
    return jnp.where((taken == 0) & ~emitted, -1, taken)


_APPLIED, _GATHERED, _REJECTED = np.array([[1, 1, 0, 0], [0, 1, 0, 0], [0, 1, 1, 1]], np.int32)


def count(clock: jax.Array, emitted: Maybe, verdict: Maybe = None) -> jax.Array:
    """The clock after this call: applied updates, calls, rejected ones, rejected ones in a row.

    Of constants, not stacked from scalars: XLA:CPU would run a kernel of its own for each.
    """
    now = jnp.minimum(clock, LIMIT - 1)
    more = _APPLIED if emitted is None else jnp.where(emitted, _APPLIED, _GATHERED)
    taken = now * np.array([1, 1, 1, 0], np.int32) + more
    return taken if verdict is None else jnp.where(verdict == 0, taken, now + _REJECTED)
