"""One verdict per step: was everything finite, and if not, what was not.

A verdict is one int32 computed inside the step: 0 if the step is applied, else the place of the
first value that is not finite (the loss, the gradient's norm, or what a rule reported). It travels
with the info, so that nobody has to wait for the device to be told, and `explain` turns it into
words on the host. Which gradient leaf it was is not in it: a map of 200 leaves would cost every
step what only a bad one needs. `locate` finds it by looking at the gradients again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import trees

POLICIES = ("skip", "raise", "ignore", "drop")
LIMIT = np.iinfo(np.int32).max
GOT = "got {}"


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("values",), meta_fields=("whats",)
)
@dataclass(frozen=True)
class Report:
    """Numbers that a rule leaves in its state for the verdict: a step where one is not finite is
    rejected.
    """

    values: Any  # f32 of shape (n,)
    whats: tuple[
        str, ...
    ]  # what each of them is, with path and shape; "{}" stands for "nan" or "inf"


def _is_report(x) -> bool:
    return isinstance(x, Report) or hasattr(type(x), "whats")  # a state of a rule that reports


def reports(opt_state) -> list[Any]:
    return [x for x in jax.tree.leaves(opt_state, is_leaf=_is_report) if _is_report(x)]


def judge(loss, grad_norm, calls, opt_state, update_norm=None):
    """The verdict: 0, or 2·place, +1 for a NaN. The first place wins: loss, gradient, clock,
    reports, update.
    """
    verdict, place = jnp.where(calls < LIMIT, LIMIT, 6), 4
    for report in reports(opt_state):
        n = len(report.whats)
        verdict = jnp.minimum(
            verdict, jnp.min(_found(report.values, np.arange(place, place + n)), initial=LIMIT)
        )
        place += n
    for i, value in ((1, loss), (2, grad_norm), (place, update_norm)):
        if value is not None:
            verdict = jnp.minimum(verdict, _found(value, i))
    return jnp.where(verdict == LIMIT, 0, verdict)


def _found(value, place):
    return jnp.where(jnp.isfinite(value), LIMIT, np.int32(2) * place + jnp.isnan(value)).astype(
        jnp.int32
    )


def overflowed(verdict):
    """Whether it was the loss or the gradient, and not what a rule reported."""
    return (verdict > 0) & (verdict < 6)


def with_gathered(verdict, emitted):
    """The verdict, -1 where the call was taken but its gradient only gathered."""
    if emitted is None:
        return verdict
    taken = jnp.int32(0) if verdict is None else verdict
    return jnp.where((taken == 0) & ~emitted, -1, taken)


_APPLIED, _GATHERED, _REJECTED = np.array([[1, 1, 0, 0], [0, 1, 0, 0], [0, 1, 1, 1]], np.int32)


def count(clock, emitted, verdict=None):
    """The clock after this call: applied updates, calls, rejected ones, rejected ones in a row.

    Of constants, not stacked from scalars: XLA:CPU would run a kernel of its own for each.
    """
    now = jnp.minimum(clock, LIMIT - 1)
    taken = now * np.array([1, 1, 1, 0], np.int32) + (
        _APPLIED if emitted is None else jnp.where(emitted, _APPLIED, _GATHERED)
    )
    return taken if verdict is None else jnp.where(verdict == 0, taken, now + _REJECTED)


def explain(verdict: int, opt_state, grads=None) -> str:
    """What a verdict says, for an optimizer state of the same setup; with the gradients, which leaf
    it was.
    """
    if verdict == 0:
        return "applied"
    place, is_nan = divmod(int(verdict), 2)
    norm = "gradient norm" if grads is None else locate(grads)
    clock = f"clock, at its limit of {LIMIT} calls"
    update = f"update that the rule made of finite gradients: {GOT}"
    places = [
        f"loss: {GOT}",
        f"{norm}: {GOT}",
        clock,
        *(what for r in reports(opt_state) for what in r.whats),
        update,
    ]
    return places[place - 1].replace(GOT, f"got {'nan' if is_nan else 'inf'}")


def locate(grads) -> str:
    """The first gradient leaf that is not finite, or overflows when squared."""
    named, squares = jax.tree_util.tree_flatten_with_path(grads)[0], trees.square_sums(grads)
    for (path, leaf), square in zip(named, squares, strict=True):
        if not bool(jnp.isfinite(square)):
            what = "norm of the gradient" if bool(jnp.all(jnp.isfinite(leaf))) else "gradient"
            return f"{what} of {trees.access_str('params', path)}, shape {jnp.shape(leaf)}"
    return "gradient norm"


def in_batch(batch) -> str:
    """Where a batch first holds what is not finite; "" if it does nowhere."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        bad = ~jnp.isfinite(leaf) if trees.is_inexact(leaf) else np.zeros(1, bool)
        if count := int(jnp.sum(bad)):
            first = [int(i) for i in np.unravel_index(int(jnp.argmax(bad)), np.shape(leaf))]
            found = f"{trees.access_str('batch', path)} has {count} of {np.size(leaf)} not finite"
            return f"{found}, the first at {first}" if first else found
    return ""


def choose(take, new, old):
    """`new` where its flag is true, else `old`, leaf by leaf; `take` is one scalar bool, or a list
    of one per leaf.

    Selects, never multiplies: 0 · NaN is NaN. Dtypes are those of `new`, so that a rule that
    changes the dtype of its state does here what it does in plain optax.
    """
    new, treedef = jax.tree.flatten(new)
    old = treedef.flatten_up_to(old)
    take = take if isinstance(take, list) else [take] * len(new)

    def one(flag, n, o):
        if n is o or flag is True:
            return n
        o = o if o.dtype == n.dtype else o.astype(n.dtype)
        return jnp.where(flag, n, o)

    return treedef.unflatten([one(f, n, o) for f, n, o in zip(take, new, old, strict=True)])
