"""One verdict per step: was everything finite, and if not, what was not.

A verdict is one int32 computed inside the step: 0 if the step is applied, else the place of the first value
that is not finite (the loss, the gradient's norm, or what a rule reported). It travels with the info, so that
nobody has to wait for the device to be told, and `explain` turns it into words on the host. Which gradient leaf
it was is not in it: a map of 200 leaves would cost every step what only a bad one needs. `locate` finds it by
looking at the gradients again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax import _tree

POLICIES = ("skip", "raise", "ignore", "drop")
LIMIT = np.iinfo(np.int32).max


@functools.partial(jax.tree_util.register_dataclass, data_fields=("values",), meta_fields=("whats",))
@dataclass(frozen=True)
class Report:
    """Numbers that a rule leaves in its state for the verdict: a step where one is not finite is rejected."""

    values: Any  # f32 of shape (n,)
    whats: tuple[str, ...]  # what each of them is, with path and shape


def _is_report(x) -> bool:
    return isinstance(x, Report)


def reports(opt_state) -> list[Report]:
    return [x for x in jax.tree.leaves(opt_state, is_leaf=_is_report) if _is_report(x)]


def judge(loss, norm, calls, opt_state):
    """The verdict: 0, or 2·place, +1 for a NaN. The first place wins: loss, gradient norm, the clock, reports."""
    clock = jnp.where(calls < LIMIT, 0, jnp.inf)
    values = [loss, norm, clock, *(v for r in reports(opt_state) for v in r.values)]
    verdict = jnp.int32(0)
    for place, value in reversed(list(enumerate(values, start=1))):
        if value is not None:
            found = 2 * place + jnp.isnan(value).astype(jnp.int32)
            verdict = jnp.where(jnp.isfinite(value), verdict, found)
    return verdict


def overflowed(verdict):
    """Whether it was the loss or the gradient, and not what a rule reported."""
    return (verdict > 0) & (verdict < 6)


def with_gathered(verdict, emitted):
    """The verdict, -1 where the call was taken but its gradient only gathered."""
    if emitted is None:
        return verdict
    taken = jnp.int32(0) if verdict is None else verdict
    return jnp.where((taken == 0) & ~emitted, -1, taken)


def count(clock, verdict, emitted):
    """The clock after this call: applied updates, calls, rejected ones, rejected ones in a row."""
    taken = jnp.bool_(True) if verdict is None else verdict == 0
    applied = taken if emitted is None else taken & emitted
    ticks = jnp.stack([applied, jnp.bool_(True), ~taken, ~taken]).astype(clock.dtype)
    return jnp.where(jnp.stack([True, True, True, ~taken]), jnp.minimum(clock, LIMIT - 1) + ticks, 0)


def explain(verdict: int, opt_state, grads=None) -> str:
    """What a verdict says, for an optimizer state of the same setup; with the gradients, which leaf it was."""
    if verdict == 0:
        return "applied"
    place, is_nan = divmod(int(verdict), 2)
    norm = "gradient norm" if grads is None else locate(grads)
    clock = f"clock, at its limit of {LIMIT} calls"
    places = ["loss", norm, clock, *(what for r in reports(opt_state) for what in r.whats)]
    return f"{places[place - 1]}: got {'nan' if is_nan else 'inf'}"


def locate(grads) -> str:
    """The first gradient leaf that is not finite, or overflows when squared."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]:
        if not bool(jnp.isfinite(jnp.sum(jnp.abs(leaf.astype(jnp.float32)) ** 2))):
            return f"gradient of {_tree.access_str('params', path)}, shape {jnp.shape(leaf)}"
    return "gradient norm"


def choose(take, new, old):
    """`new` where its flag is true, else `old`, leaf by leaf; `take` is one scalar bool, or a list of one per leaf.

    Selects, never multiplies: 0 · NaN is NaN. Dtypes are those of `new`, so that a rule that changes the dtype
    of its state does here what it does in plain optax.
    """
    new, treedef = jax.tree.flatten(new)
    old = treedef.flatten_up_to(old)
    take = take if isinstance(take, list) else [take] * len(new)

    def one(flag, n, o):
        if n is o:
            return n
        o = o if o.dtype == n.dtype else o.astype(n.dtype)
        return jnp.where(flag, n, o)

    return treedef.unflatten([one(f, n, o) for f, n, o in zip(take, new, old, strict=True)])
