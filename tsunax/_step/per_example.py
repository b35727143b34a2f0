"""Gradients of each row of a batch alone: stacked, or each changed by a function and then averaged.

A stack needs the memory of one gradient for each row. A mean of changed gradients (each clipped,
for example) needs the memory of one micro-batch.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax import guard
from tsunax._core import Extra, Function, Maybe, PyTree, checks
from tsunax._cpu import convolutions
from tsunax._state import thawed_flags
from tsunax._step.loss_fn import Gradient, Problem, Strategy
from tsunax.errors import LossError
from tsunax.loss import Loss, rows_of
from tsunax.microbatches import check_rows, in_turn, merged_losses


def stacked(problem: Problem, n: int) -> tuple[Loss, PyTree]:
    """The strategy for the gradients of all rows along a new first axis, in n micro-batches."""
    rows, keywords = _rows_with_keys(problem)
    each, mask = _each(problem.gradient, keywords), keywords.get("mask")
    if n == 1:
        losses, grads = each(rows, mask)
    else:
        part = lambda _, args, i: (None, convolutions.fast(each)(*args))
        losses, grads = in_turn(part, n, None, (rows, mask))[1]
    return _joined(losses, mask), problem.finish(grads)


def averaged(problem: Problem, of_row: Function, strategy: Strategy) -> tuple[Loss, PyTree]:
    """The strategy for the weighted mean of `of_row(gradient)` over the rows.

    The batch is cut by another strategy: one batch, or micro-batches. `of_row` gets zeros for
    frozen leaves, which count in no norm.
    """
    thawed = thawed_flags(problem.state)
    finish = lambda grads: guard.without_frozen(problem.finish(grads), thawed)

    def gradient(rows: PyTree, keywords: Extra) -> tuple[Loss, PyTree]:
        mask = keywords.get("mask")
        losses, grads = _each(problem.gradient, keywords)(rows, mask)
        grads = jax.vmap(finish)(grads)
        changed = jax.vmap(of_row)(grads)
        checks.check_like("grads", changed, grads, "per_example changes the gradient of a row.")
        # A function may change the zeros of a row without weight, for example to 0/0.
        changed = jax.vmap(guard.choose)(losses.weight != 0, changed, grads)
        share = losses.weight / jnp.sum(losses.weight)
        weighted_mean = lambda g: jnp.tensordot(share.astype(g.dtype), g, 1)
        return _joined(losses, mask), jax.tree.map(weighted_mean, changed)

    rows, keywords = _rows_with_keys(problem)
    fields: Any = {"gradient": gradient, "batch": rows, "keywords": keywords}
    return strategy(dataclasses.replace(problem, **fields))


def _rows_with_keys(problem: Problem) -> tuple[PyTree, Extra]:
    """`((batch, keys), keywords)`: each row has a key, in any cut into micro-batches."""
    check_rows(problem.batch)
    keywords, keys = dict(problem.keywords), None
    if (key := keywords.pop("key", None)) is not None:
        of_row = lambda i: jax.random.fold_in(key, i)
        keys = jax.vmap(of_row)(np.arange(rows_of(problem.batch)))
    return (jax.tree.map(jnp.asarray, problem.batch), keys), keywords


def _each(gradient: Gradient, keywords: Extra) -> Function:
    """`f((rows, keys), mask)`: `gradient` of each row alone; zeros for rows without weight."""

    def of_row(row: Any, mask: Any) -> tuple[Loss, Any]:
        batch, key = row
        row_values = {"key": key, "mask": None if mask is None else mask[None]}
        row_keywords = keywords | {name: x for name, x in row_values.items() if x is not None}
        loss, grads = gradient(jax.tree.map(lambda x: x[None], batch), row_keywords)
        if loss.model_state is not None:
            raise LossError("model_state", "loss_fn", "one", "none under per_example")
        return loss, jax.tree.map(lambda g: jnp.where(loss.weight != 0, g, 0), grads)

    return jax.vmap(of_row)


def _joined(losses: Loss, mask: Maybe) -> Loss:
    """The losses of single rows, merged into the loss of the batch."""
    # Gradients that replace their leaf (fp8 scales) are joined by maximum.
    largest = jax.tree.map(lambda x: x.max(0), losses.overwritten)
    mergeable = dataclasses.replace(losses, mean_value=None, overwritten=None)
    loss = merged_losses(losses.weight != 0, mergeable, mask)
    return dataclasses.replace(loss, overwritten=largest)
