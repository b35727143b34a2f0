"""Gradients of each row of a batch alone: stacked, or each changed by a function and then averaged.

A stack has the memory of as many gradients as there are rows. A mean of changed gradients (each
clipped, for example) has that of one micro-batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import Extra, Function, PyTree, checks
from tsunax._cpu import convolutions
from tsunax.errors import LossError
from tsunax.loss import Loss, rows_of
from tsunax.microbatches import check_rows, in_turn, merged_losses

Gradient = Callable[[Any, Extra], tuple[Loss, Any]]  # of (rows, keywords)


def apart(
    gradient: Gradient, batch: PyTree, keywords: Extra, of_row: Any, finish: Function, n: int
) -> tuple[Gradient, PyTree, Extra]:
    """A gradient function made of `gradient` for single rows, and its arguments (rows, keywords).

    With `of_row=True` it is their stack, computed in n micro-batches; else the mean, by weight, of
    `of_row(finish(gradient))` of each. Each row has a key, whatever micro-batch it is in.
    """
    check_rows(batch)
    keys, rest = None, {name: x for name, x in keywords.items() if name != "key"}
    if "key" in keywords:
        own = lambda i: jax.random.fold_in(keywords["key"], i)
        keys = jax.vmap(own)(np.arange(rows_of(batch)))

    def stacked(rows: PyTree, keywords: Extra) -> tuple[Loss, Any]:
        each, mask = _each(gradient, keywords), _given_mask(keywords)
        if n == 1:
            losses, grads = each(rows, mask)
        else:
            part = lambda _, given, i: (None, convolutions.fast(each)(*given))
            losses, grads = in_turn(part, n, None, (rows, mask))[1]
        return _joined(losses), finish(grads)

    def mean(rows: PyTree, keywords: Extra) -> tuple[Loss, Any]:
        losses, grads = _each(gradient, keywords)(rows, _given_mask(keywords))
        grads = jax.vmap(finish)(grads)
        changed = jax.vmap(of_row)(grads)
        checks.check_like("grads", changed, grads, "per_example changes the gradient of a row.")
        share = losses.weight / jnp.sum(losses.weight)
        of_all = lambda g: jnp.tensordot(share.astype(g.dtype), g, 1)
        return _joined(losses), jax.tree.map(of_all, changed)

    batch = jax.tree.map(jnp.asarray, batch)
    return stacked if of_row is True else mean, (batch, keys), rest


def _each(gradient: Gradient, keywords: Extra) -> Function:
    """`f((rows, keys), mask)`: `gradient` of each row alone; zeros for one that weighs nothing."""
    if isinstance(keywords.get("mask"), np.ndarray):  # lets every row through
        keywords = keywords | {"mask": keywords["mask"][:1]}

    def one(row: Any, mask: Any) -> tuple[Loss, Any]:
        batch, key = row
        own = {"key": key, "mask": None if mask is None else mask[None]}
        given = keywords | {name: x for name, x in own.items() if x is not None}
        loss, grads = gradient(jax.tree.map(lambda x: x[None], batch), given)
        if loss.model_state is not None:
            fix = "Leave it out: statistics of one row are none."
            raise LossError("model_state", "loss_fn", "one", "none under per_example", fix)
        return loss, jax.tree.map(lambda g: jnp.where(loss.weight != 0, g, 0), grads)

    return jax.vmap(one)


def _given_mask(keywords: Extra) -> jax.Array | None:
    """The mask, unless it is NumPy's, which nobody gave and which lets every row through."""
    mask = keywords.get("mask")
    return None if isinstance(mask, np.ndarray) else mask


def _joined(losses: Loss) -> Loss:
    """The losses of single rows, merged into the loss of the batch."""
    most = jax.tree.map(lambda x: x.max(0), losses.overwritten)
    alone = dataclasses.replace(losses, mean_value=None, overwritten=None)
    return dataclasses.replace(merged_losses(losses.weight != 0, alone), overwritten=most)
