"""One gradient from many micro-batches, one after the other or one on each device.

Weighted sums are divided once: the result does not depend on how a batch is cut, with any masks. A
micro-batch without weight adds nothing, not even its NaNs, to the loss and its gradient. Metrics
with their own weights still count its rows, unless they are padding.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsunax import guard
from tsunax._core import Function, Maybe, PyTree, placement, trees, weighted_sums
from tsunax._core import axes as _axes
from tsunax._cpu import convolutions
from tsunax._state import thawed_flags
from tsunax._step.loss_fn import Problem
from tsunax.errors import LossError
from tsunax.loss import Loss, StaticWeight, check_mask, check_model_state, rows_of, uneven
from tsunax.state import master_params


class NoiseScale(NamedTuple):
    """How gradients scatter from row to row: the noise that a larger batch would average out.

    Both numbers are unbiased estimates from the micro-batches of one step. Of their gradients `g_i`
    and weights `w_i` (rows or tokens), with `W = Σ w_i`, `g = Σ w_i g_i / W`:

        trace = Σ w_i |g_i - g|² / (n - 1)        squared_norm = |g|² - trace / W

    If they weigh the same, that is appendix A.1 of McCandlish et al. 2018 (arXiv:1812.06162). The
    numbers of one step scatter widely, and `squared_norm` may be negative: average each over many
    steps, then divide. The mean of ratios is another number. NaN if fewer than two micro-batches
    have weight. Each unit of weight is taken for an independent draw: tokens of one text are none.
    """

    trace: jax.Array  # f32: trace of the covariance of the gradient of one row (unit of weight)
    squared_norm: jax.Array  # f32: |G|² of the gradient G over all data

    def compute(self) -> jax.Array:
        """The simple noise scale `trace / squared_norm`, in rows (units of weight)."""
        return self.trace / self.squared_norm


def check_rows(batch: PyTree) -> None:
    """Raise LossError for leaves without rows, or with another number of rows."""
    for where, leaf in trees.leaves_at("batch", batch):
        if not np.shape(leaf):
            fix = "Give it as an extra argument: step(state, batch, name=...)."
            raise LossError("leaf", where, "a scalar", "an array of rows", fix)
    if fault := uneven(batch):
        raise LossError(fault)


def indivisible(rows: int, n: int, note: str = "") -> LossError:
    """The error for rows that cannot be cut into n equal micro-batches."""
    fix = (
        "Choose such a batch_size, and drop_remainder=True if only the last batch is shorter. Or "
        "name `mask` in loss_fn and return ts.Loss.mean(values, mask): the batch is then padded."
    )
    expected = f"a multiple of accumulate={n}"
    return LossError("batch", "train_step()", f"{rows} rows{note}", expected, fix)


def strided_micro_batches(
    batch: PyTree, n: int, mask: Maybe, *, pads: bool
) -> tuple[PyTree, jax.Array | None]:
    """`(batch, mask)` with a second axis of n: micro-batch i has the rows i, i + n, i + 2n, ...

    The rows are strided, so that each of many devices keeps its rows, and padding is spread evenly.
    The mask is f32 of shape (rows,), or None if all rows count. If it `pads`, a batch that does not
    divide is padded with copies of its last row, which the mask marks. Raises LossError otherwise,
    and for leaves without rows or with different numbers of rows.
    """
    if batch is None and not pads:  # a loss_fn without a batch is called n times
        return batch, None
    check_rows(batch)
    rows = rows_of(batch)
    padding = -rows % n
    check_mask(mask, rows)
    if padding and not pads:
        raise indivisible(rows, n)

    batch = placement.padded(jax.tree.map(jnp.asarray, batch), rows, rows + padding)[0]
    batch = jax.tree.map(lambda x: placement.strided_rows(x, n), batch)
    if mask is None and not padding:
        return batch, None
    mask = jnp.ones(rows, jnp.float32) if mask is None else jnp.asarray(mask)
    mask = jnp.pad(mask, [(0, padding), *[(0, 0)] * (mask.ndim - 1)]) if padding else mask
    return batch, placement.strided_rows(mask, n)


def _part(parts: PyTree, i: Any) -> PyTree:
    """Micro-batch i of `strided_micro_batches`; slices by a scan would need a transposed copy."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False), parts)


def in_turn(f: Function, n: int, carry: PyTree, rows: PyTree) -> tuple[Any, Any]:
    """`carry, out = f(carry, rows of micro-batch i, i)` for each i; `out` for all rows in order.

    Rows that do not divide are padded with copies of the last row; their results are cut off.
    """
    size = rows_of(rows)
    parts, _ = strided_micro_batches(rows, n, None, pads=True)
    carry, out = jax.lax.scan(lambda carry, i: f(carry, _part(parts, i), i), carry, np.arange(n))
    return carry, jax.tree.map(lambda x: placement.rows_in_order(x, size), out)


def over_micro_batches(problem: Problem, n: int, drop: bool) -> tuple[Loss, PyTree]:
    """The strategy of one micro-batch after the other, with the memory of one.

    The gradients are taken within a scan: the gradient of a scan would store every micro-batch. A
    micro-batch gets its
    rows of `mask`, its key, and the model state that the previous micro-batch left. Gradients
    have the structure and dtypes of the trained leaves. `loss.overwritten` is the maximum over
    micro-batches. With `drop`, a micro-batch with a loss or gradient that is not finite is left
    out with its weight and its model state, and `loss.dropped` has its weight (else 0). With a
    `problem.square`, `loss.noise_scale` has the sum of weight times that, and its count.
    """
    keywords, state, square = problem.keywords, problem.state, problem.square
    like, overwritten = master_params(state), problem.overwritten
    first_state = keywords.get("model_state", state.model_state)
    pads = "mask" in keywords
    batch, mask = strided_micro_batches(problem.batch, n, keywords.get("mask"), pads=pads)
    lowest = jax.tree.map(lambda x: jnp.full_like(x, -jnp.inf), overwritten)
    thawed = thawed_flags(state) if drop else None

    def add_micro_batch(carry: Any, i: Any) -> tuple[Any, Any]:
        sums, largest, model_state = carry
        rows, own_keywords = _part((batch, {} if mask is None else {"mask": mask}), i)
        if "key" in keywords:
            own_keywords["key"] = jax.random.fold_in(keywords["key"], i)
        if "model_state" in keywords:
            own_keywords["model_state"] = model_state

        def gradient(rows: Any, own_keywords: Any):
            loss, grads = problem.gradient(rows, keywords | own_keywords)
            return loss, StaticWeight.unless_array(loss.weight), grads

        loss, static_weight, grads = convolutions.fast(gradient)(rows, own_keywords)
        weight = jnp.float32(loss.weight if static_weight is None else static_weight.value)
        take = weight != 0
        if drop:
            norm = guard.global_norm(guard.without_frozen(grads, thawed))
            take &= jnp.isfinite(loss.total) & jnp.isfinite(norm)
        if loss.model_state is not None:
            check_model_state(loss.model_state, model_state)
            model_state = guard.choose(take, loss.model_state, model_state)
        sums = weighted_sums.add(sums, grads, weight, take)
        next_values = jax.tree.map(jnp.maximum, largest, loss.overwritten)
        largest = guard.choose(take, next_values, largest)
        squares = None if square is None else jnp.where(take, weight * square(grads), 0)
        loss = Loss(loss.total, weight, loss.metrics, terms=loss.terms)
        loss = _axes.vary(loss, problem.axes)
        return (sums, largest, model_state), (take, loss, static_weight, squares)

    carry = _axes.vary((weighted_sums.zeros(like), lowest, first_state), problem.axes)
    (sums, largest, model_state), out = jax.lax.scan(add_micro_batch, carry, np.arange(n))
    take, losses, static_weight, squares = out
    loss = merged_losses(take, losses, None if mask is None else jnp.moveaxis(mask, 1, 0))
    grads = weighted_sums.divided(sums, loss.weight, like)
    if static_weight is not None and not drop:
        loss = dataclasses.replace(loss, weight=np.float32(n * static_weight.value))
    scatter = None if squares is None else (jnp.sum(squares), jnp.sum(take, dtype=jnp.float32))
    loss = dataclasses.replace(
        loss,
        model_state=model_state,
        dropped=jnp.where(take, 0, losses.weight) if drop else None,
        overwritten=guard.choose(jnp.any(take), largest, overwritten),
        noise_scale=scatter,
    )
    return loss, grads


def over_devices(loss: Loss, grads: PyTree, axes: _axes.Axes, mask: Maybe) -> tuple[Loss, Any]:
    """`(loss, grads)` over the rows of all devices along `axes`, with one reduction of gradients.

    As over micro-batches: the sum of weight times gradient, divided once by the sum of weights; and
    the maximum of the overwritten leaves. Model states are averaged.
    """
    grads = _axes.vary(grads, axes)
    weight = _axes.vary(jnp.asarray(loss.weight, jnp.float32), axes)
    share = weight / jax.lax.psum(weight, axes)

    def add(g: Any) -> PyTree:
        wide = trees.wide_dtype(g)
        part = jnp.where(weight != 0, share.astype(wide) * g.astype(wide), 0)
        return jax.lax.psum(part, axes).astype(g.dtype)

    return loss_over_devices(loss, axes, mask), jax.tree.map(add, grads)


def loss_over_devices(loss: Loss, axes: _axes.Axes, mask: Maybe) -> Loss:
    """The loss over the rows of all devices. Each device has its own mask, or none has."""
    weight = jnp.asarray(loss.weight, jnp.float32)
    losses = Loss(loss.total, weight, loss.metrics, terms=loss.terms)
    has_rows = None if mask is None else jnp.any(jnp.asarray(mask) != 0)
    losses, has_rows = _axes.gathered((losses, has_rows), axes)
    merged = merged_losses(losses.weight != 0, losses, has_rows)
    if static := StaticWeight.unless_array(loss.weight):  # the same on each device
        merged = dataclasses.replace(
            merged, weight=np.float32(static.value * jax.lax.psum(1, axes))
        )

    def reduced(reduce: Function, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: reduce(x, axes), _axes.vary(tree, axes))

    return dataclasses.replace(
        merged,
        model_state=None if loss.model_state is None else _axes.mean(loss.model_state, axes),
        dropped=reduced(jax.lax.psum, loss.dropped),
        overwritten=reduced(jax.lax.pmax, loss.overwritten),
        noise_scale=reduced(jax.lax.psum, loss.noise_scale),
    )


def merged_losses(take: jax.Array, losses: Loss, masks: Maybe) -> Loss:
    """Merge the losses of a stack that have a true flag in `take`, and their metrics.

    A loss without weight is not taken, but its metrics may have a weight. They are merged
    unless the mask of the part, in `masks`, has only padding.
    """
    adds_metrics = losses.weight == 0
    if masks is not None:
        adds_metrics &= jax.vmap(jnp.any)(masks != 0)
    flags = jax.tree.map(lambda _: take, losses)
    for name, metric in losses.metrics.items():
        flag = take | adds_metrics & jax.vmap(_counts)(metric)
        flags.metrics[name] = jax.tree.map(lambda _, flag=flag: flag, metric)
    stack = jax.tree.leaves(flags), losses
    first = jax.tree.map(lambda x: x[0], stack)
    later = jax.tree.map(lambda x: x[1:], stack)

    def fold(carry: Any, part: Any) -> tuple[Any, None]:
        has_any, loss = carry
        take, new = part
        merge_flags = list(map(operator.and_, has_any, take))
        merged = guard.choose(merge_flags, loss.merge(new), guard.choose(take, new, loss))
        return (list(map(operator.or_, has_any, take)), merged), None

    has_any, loss = jax.lax.scan(fold, first, later)[0]
    # A sum without any part is 0, also its weight, so that the mean is NaN.
    metrics = {name: _uncounted(metric) for name, metric in loss.metrics.items()}
    empty = dataclasses.replace(jax.tree.map(jnp.zeros_like, loss), metrics=metrics)
    return guard.choose(has_any, loss, empty)


def _counts(metric: Any) -> jax.Array:
    """Whether a metric of rows without weight in the loss counts: if it has a weight, or is finite.

    A metric of another library does not say its weight, and may be 0/0 if it has none.
    """
    weight = _weight_of(metric)
    has_weight = False if weight is None else jnp.any(weight != 0)
    numbers = filter(trees.is_inexact, jax.tree.leaves(metric))
    is_finite = [jnp.all(jnp.isfinite(x)) for x in numbers]
    return functools.reduce(operator.and_, is_finite, jnp.asarray(True)) | has_weight


def _uncounted(metric: Any) -> Any:
    """A metric to which no part adds, and which `_counts` leaves out of another merge.

    Sums with a weight are 0. A metric of another library, such as a maximum, may have no neutral
    number: it is not finite.
    """
    if _weight_of(metric) is not None:
        return jax.tree.map(jnp.zeros_like, metric)
    unknown = lambda x: jnp.where(jnp.isfinite(x), jnp.nan, x)
    return jax.tree.map(lambda x: unknown(x) if trees.is_inexact(x) else jnp.zeros_like(x), metric)


def _weight_of(metric: Any) -> Any:
    """The weight of a metric; None if it does not say it."""
    weight = getattr(metric, "weight", None)
    return weight if trees.is_a(weight, np.number, np.bool_) else None
