"""Gradients of each row of a batch alone: stacked, or each changed by a function and then averaged.

A stack has the memory of as many gradients as there are rows. A mean of changed gradients (each
clipped, for example) has that of one micro-batch.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import Extra, Function, PyTree, checks, convolutions
from tsunax.errors import LossError
from tsunax.loss import Loss, rows_of
from tsunax.microbatches import check_rows, in_turn, merged

Gradient = Callable[[Any, Extra], tuple[Loss, Any]]  # of (rows, keywords)


def by_row(gradient: Gradient, batch: PyTree, keywords: Extra) -> tuple[Function, PyTree, Extra]:
    """`each(rows, mask)`, which is `gradient` of each row alone; its rows; and other keywords.

    Results have a new first axis. Each row has a key, whatever micro-batch it is in. Rows that weigh
    nothing have gradients of zeros.
    """
    check_rows(batch)
    keys, rest = None, {name: x for name, x in keywords.items() if name != "key"}
    if "key" in keywords:
        own = lambda i: jax.random.fold_in(keywords["key"], i)
        keys = jax.vmap(own)(np.arange(rows_of(batch)))
    of_one = rest  # a mask of NumPy's lets every row through
    if isinstance(rest.get("mask"), np.ndarray):
        of_one = rest | {"mask": rest["mask"][:1]}

    def one(row: Any, mask: Any) -> tuple[Loss, Any]:
        batch, key = row
        own = {"key": key, "mask": None if mask is None else mask[None]}
        given = of_one | {name: x for name, x in own.items() if x is not None}
        loss, grads = gradient(jax.tree.map(lambda x: x[None], batch), given)
        if loss.model_state is not None:
            fix = "Leave it out: statistics of one row are none."
            raise LossError("model_state", "loss_fn", "one", "none under per_example", fix)
        return loss, jax.tree.map(lambda g: jnp.where(loss.weight != 0, g, 0), grads)

    return jax.vmap(one), (jax.tree.map(jnp.asarray, batch), keys), rest


def stacked(each: Function, rows: PyTree, keywords: Extra, n: int) -> tuple[Loss, Any]:
    """The loss of all rows, and their gradients along a first axis; n micro-batches in turn."""
    mask = _given_mask(keywords)
    if n == 1:
        losses, grads = each(rows, mask)
    else:
        part = lambda _, given, i: (None, convolutions.fast(each)(*given))
        losses, grads = in_turn(part, n, None, (rows, mask))[1]
    return _joined(losses), grads


def mean_of(each: Function, of_row: Function) -> Gradient:
    """The gradient of rows that is the mean, by weight, of `of_row(gradient)` of each."""

    def gradient(rows: PyTree, keywords: Extra) -> tuple[Loss, Any]:
        losses, grads = each(rows, _given_mask(keywords))
        changed = jax.vmap(of_row)(grads)
        checks.check_like("grads", changed, grads, "It is that of the gradient of a row.")
        share = losses.weight / jnp.sum(losses.weight)
        return _joined(losses), jax.tree.map(
            lambda g: jnp.tensordot(share.astype(g.dtype), g, 1), changed
        )

    return gradient


def _given_mask(keywords: Extra) -> jax.Array | None:
    """The mask, unless it is NumPy's, which nobody gave and which lets every row through."""
    mask = keywords.get("mask")
    return None if isinstance(mask, np.ndarray) else mask


def _joined(losses: Loss) -> Loss:
    """The loss of all rows, from those of each."""
    most = jax.tree.map(lambda x: x.max(0), losses.overwritten)
    alone = dataclasses.replace(losses, mean_value=None, overwritten=None)
    return dataclasses.replace(merged(losses.weight != 0, alone), overwritten=most)
