"""One gradient from many micro-batches, one after the other or one on each device.

Sums of weight times gradient and of weight, in float32, divided once: the result does not depend on
how a batch is cut, whatever the masks. A micro-batch that weighs nothing adds nothing, NaN
included. Everything here selects and never multiplies by a flag: 0 · NaN is NaN.
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

from tsunax import guard
from tsunax._core import Maybe, PyTree, convolutions, placement, trees
from tsunax._core import axes as _axes
from tsunax.errors import LossError
from tsunax.loss import Loss, check_model_state, rows_of, uneven


def cut(batch: PyTree, n: int, mask: Maybe) -> tuple[PyTree, jax.Array | None]:
    """`(batch, mask)` with a second axis of n: micro-batch i has the rows i, i + n, i + 2n, ...

    Strided, so that on many devices each one keeps its rows, and padding is spread evenly. A batch
    that does not divide is padded with copies of its last row where there is a `mask` (f32 of shape
    (rows,)) to say so. Raises LossError otherwise, and for leaves that have no rows or another
    number of them.
    """
    named = jax.tree_util.tree_flatten_with_path(batch)[0]
    if not named and mask is None:  # n draws of a loss function that takes a key and no batch
        return batch, None
    for path, leaf in named:
        if not np.shape(leaf):
            fix = (
                "It has no rows to cut. Give it as an extra argument: step(state, batch, name=...)."
            )
            raise LossError(
                "leaf", trees.access_str("batch", path), "a scalar", "an array of rows", fix
            )
    if found := uneven(batch):
        raise LossError(found)
    rows = rows_of(batch)
    padding = -rows % n
    if mask is not None and np.shape(mask)[:1] != (rows,):
        raise LossError("mask", "the step", trees.describe(mask), f"f32 of shape ({rows},)")
    if padding and mask is None:
        fix = "Name `mask` in loss_fn, and the batch is padded."
        raise LossError(
            "batch", "train_step()", f"{rows} rows", f"a multiple of accumulate={n}", fix
        )

    def apart(x: Any, fill: Any):
        x = jnp.asarray(x)
        x = jnp.concatenate([x, fill(x, padding)]) if padding else x
        return placement.cut(x, n)

    last = lambda x, k: jnp.broadcast_to(x[-1:], (k, *x.shape[1:]))
    nothing = lambda x, k: jnp.zeros((k, *x.shape[1:]), x.dtype)
    batch = jax.tree.map(lambda x: apart(x, last), batch)
    # all rows, and no array to say so
    if mask is None or (isinstance(mask, np.ndarray) and not padding):
        return batch, None
    return batch, apart(mask, nothing)


def over_micro_batches(
    gradient: Callable[[Any, dict[str, Any]], tuple[Loss, Any]],
    n: int,
    batch: PyTree,
    keywords: dict[str, Any],
    like: PyTree,
    overwritten: PyTree = None,
    *,
    drop: bool,
    axes: _axes.Axes = (),
) -> tuple[Loss, Any]:
    """`(loss, grads)` of the whole batch, from one micro-batch after the other.

    `gradient(micro-batch, keywords)` gives its Loss and the gradients of its mean.

    A scan of value-and-grad, never the gradient of a scan, which would store every micro-batch.
    Each one gets its rows of `mask`, a key of its own, and the model state that the one before it
    left. Gradients have the structure and dtypes of `like`. Of what gradients overwrite,
    `loss.overwritten`, the maximum is taken. With `drop`, a micro-batch whose loss or gradient is
    not finite is left out with its weight and its model state; `loss.dropped` has their weights, 0
    for the others.
    """
    batch, mask = cut(batch, n, keywords.get("mask"))
    if "mask" in keywords and mask is None:
        keywords = keywords | {"mask": keywords["mask"][::n]}
    start = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), like
    )
    lowest = jax.tree.map(lambda x: jnp.full_like(x, -jnp.inf), overwritten)
    known = None  # the weight of a micro-batch, where it follows from the shapes

    def one(carry: Any, i: Any) -> tuple[Any, Any]:
        sums, most, model_state = carry
        # sliced here, and not by the scan: that would need the whole batch a second time,
        # transposed
        rows, part = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False), (batch, mask)
        )
        given = {"mask": part, "model_state": model_state}
        if "key" in keywords:
            given["key"] = jax.random.fold_in(keywords["key"], i)

        def traced(rows: Any, given: Any):
            nonlocal known
            loss, grads = gradient(rows, keywords | given)
            known = loss.weight if isinstance(loss.weight, np.generic | np.ndarray) else None
            return loss if known is None else dataclasses.replace(loss, weight=None), grads

        loss, grads = convolutions.fast(traced)(
            rows, {k: v for k, v in given.items() if v is not None}
        )
        weight = jnp.float32(loss.weight if known is None else known)
        take = weight != 0
        if drop:
            take &= jnp.isfinite(loss.total) & jnp.isfinite(guard.global_norm(grads))
        after = _next_state(loss.model_state, model_state)
        if after is not None:
            after = guard.choose(take, after, model_state)
        add = lambda sum, g: jnp.where(
            take, sum + weight.astype(sum.dtype) * g.astype(sum.dtype), sum
        )
        most = guard.choose(take, jax.tree.map(jnp.maximum, most, loss.overwritten), most)
        loss = dataclasses.replace(
            loss, weight=weight, mean_value=None, model_state=None, overwritten=None
        )
        return (jax.tree.map(add, sums, grads), most, after), (take, loss)

    carry = _axes.vary((start, lowest, keywords.get("model_state")), axes)
    (sums, most, model_state), (take, losses) = jax.lax.scan(one, carry, np.arange(n))
    loss = _merged(take, losses)
    grads = jax.tree.map(
        lambda sum, x: (sum / loss.weight.astype(sum.dtype)).astype(x.dtype), sums, like
    )
    if known is not None and not drop:
        loss = dataclasses.replace(loss, weight=np.float32(n * known))
    dropped = jnp.where(take, 0, losses.weight) if drop else None
    most = guard.choose(jnp.any(take), most, overwritten)
    return dataclasses.replace(
        loss, model_state=model_state, dropped=dropped, overwritten=most
    ), grads


def over_devices(loss: Loss, grads: PyTree, axes: _axes.Axes) -> tuple[Loss, Any]:
    """`(loss, grads)` over the rows of all devices along `axes`, with one reduction of gradients.

    As over micro-batches: sums of weight times gradient and of weight, divided once; the maximum of
    what gradients overwrite. Model states are averaged.
    """
    grads = _axes.vary(grads, axes)
    weight = _axes.vary(jnp.asarray(loss.weight, jnp.float32), axes)
    share = weight / jax.lax.psum(weight, axes)

    def add(g: Any) -> PyTree:
        wide = jnp.promote_types(g.dtype, jnp.float32)
        return jax.lax.psum(
            jnp.where(weight != 0, share.astype(wide) * g.astype(wide), 0), axes
        ).astype(g.dtype)

    return loss_over_devices(loss, axes), jax.tree.map(add, grads)


def loss_over_devices(loss: Loss, axes: _axes.Axes) -> Loss:
    """The loss over the rows of all devices."""
    each = dataclasses.replace(loss, weight=jnp.asarray(loss.weight, jnp.float32), mean_value=None)
    each = _axes.gathered(
        dataclasses.replace(each, model_state=None, dropped=None, overwritten=None), axes
    )
    merged = _merged(each.weight != 0, each)
    if isinstance(loss.weight, np.ndarray | np.generic):  # known, the same everywhere
        merged = dataclasses.replace(merged, weight=np.float32(loss.weight * jax.lax.psum(1, axes)))
    model_state = None if loss.model_state is None else _axes.mean(loss.model_state, axes)
    dropped = None if loss.dropped is None else jax.lax.psum(_axes.vary(loss.dropped, axes), axes)
    most = jax.tree.map(lambda x: jax.lax.pmax(x, axes), _axes.vary(loss.overwritten, axes))
    return dataclasses.replace(merged, model_state=model_state, dropped=dropped, overwritten=most)


def _next_state(new: PyTree, old: PyTree) -> PyTree:
    """The model state for the next micro-batch: what loss_fn returned, else the last one."""
    if new is None:
        return old
    check_model_state(new, old)
    return new


def _merged(take: jax.Array, losses: Loss) -> Loss:
    """Merge those losses of a stack whose flag in `take` is true."""
    at = lambda i: jax.tree.map(lambda x: x[i], (take, losses))
    rest = jax.tree.map(lambda x: x[1:], (take, losses))

    def fold(carry: Any, other: Any):
        have, loss = carry
        ok, new = other
        both = guard.choose(have & ok, loss.merge(new), guard.choose(ok, new, loss))
        return (have | ok, both), None

    have, loss = jax.lax.scan(fold, at(0), rest)[0]
    # a mean over nothing is NaN
    return dataclasses.replace(loss, weight=jnp.where(have, loss.weight, 0))
