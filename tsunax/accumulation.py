"""One gradient from many micro-batches, inside a step (`over_micro_batches`) or across calls (`accumulate`).

Sums of weight times gradient and of weight, in float32, divided once: the result does not depend on how a batch is
cut, whatever the masks. A micro-batch that weighs nothing adds nothing, NaN included. Everything here selects and
never multiplies by a flag: 0 · NaN is NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tsunax import _axes, _checks, _convolutions, _live, _number, _place, _tree, guard
from tsunax._loss import Loss, rows_of, uneven
from tsunax._norms import global_norm
from tsunax.errors import LossError, RuleError, message


def cut(batch, n: int, mask):
    """`(batch, mask)` with a second axis of n: micro-batch i has the rows i, i + n, i + 2n, ...

    Strided, so that on many devices each one keeps its rows, and padding is spread evenly. A batch that does not
    divide is padded with copies of its last row where there is a `mask` (f32 of shape (rows,)) to say so. Raises
    LossError otherwise, and for leaves that have no rows or another number of them.
    """
    named = jax.tree_util.tree_flatten_with_path(batch)[0]
    for path, leaf in named:
        if not np.shape(leaf):
            fix = "It has no rows to cut. Give it as an extra argument: step(state, batch, name=...)."
            raise LossError(message("leaf", _tree.access_str("batch", path), "a scalar", "an array of rows", fix))
    if found := uneven(batch):
        raise LossError(found)
    rows = rows_of(batch)
    padding = -rows % n
    if mask is not None and np.shape(mask)[:1] != (rows,):
        raise LossError(message("mask", "the step", _tree.describe(mask), f"f32 of shape ({rows},)"))
    if padding and mask is None:
        fix = "Name `mask` in loss_fn, and the batch is padded."
        raise LossError(message("batch", "train_step()", f"{rows} rows", f"a multiple of accumulate={n}", fix))

    def apart(x, fill):
        x = jnp.asarray(x)
        x = jnp.concatenate([x, fill(x, padding)]) if padding else x
        return _place.cut(x, n)

    last = lambda x, k: jnp.broadcast_to(x[-1:], (k, *x.shape[1:]))
    nothing = lambda x, k: jnp.zeros((k, *x.shape[1:]), x.dtype)
    batch = jax.tree.map(lambda x: apart(x, last), batch)
    if mask is None or (isinstance(mask, np.ndarray) and not padding):  # all rows, and no array to say so
        return batch, None
    return batch, apart(mask, nothing)


def over_micro_batches(
    gradient: Callable[[Any, dict], tuple[Loss, Any]],
    n: int,
    batch,
    keywords: dict,
    like,
    overwritten=None,
    *,
    drop: bool,
    axes: _axes.Axes = (),
) -> tuple[Loss, Any]:
    """`(loss, grads)` of the whole batch from `gradient(micro-batch, keywords) -> (Loss, grads of its mean)`.

    A scan of value-and-grad, never the gradient of a scan, which would store every micro-batch. Each one gets its
    rows of `mask`, a key of its own, and the model state that the one before it left. Gradients have the structure and
    dtypes of `like`. Of what gradients overwrite, `loss.overwritten`, the maximum is taken. With `drop`, a
    micro-batch whose loss or gradient is not finite is left out with its weight and its model state; `loss.dropped`
    has their weights, 0 for the others.
    """
    batch, mask = cut(batch, n, keywords.get("mask"))
    if "mask" in keywords and mask is None:
        keywords = keywords | {"mask": keywords["mask"][::n]}
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), like)
    lowest = jax.tree.map(lambda x: jnp.full_like(x, -jnp.inf), overwritten)
    known = None  # the weight of a micro-batch, where it follows from the shapes

    def one(carry, i):
        sums, most, model_state = carry
        # sliced here, and not by the scan: that would need the whole batch a second time, transposed
        rows, part = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False), (batch, mask))
        given = {"mask": part, "model_state": model_state}
        if "key" in keywords:
            given["key"] = jax.random.fold_in(keywords["key"], i)

        def traced(rows, given):
            nonlocal known
            loss, grads = gradient(rows, keywords | given)
            known = loss.weight if isinstance(loss.weight, np.generic | np.ndarray) else None
            return loss if known is None else dataclasses.replace(loss, weight=None), grads

        loss, grads = _convolutions.fast(traced)(rows, {k: v for k, v in given.items() if v is not None})
        weight = jnp.float32(loss.weight if known is None else known)
        take = weight != 0
        if drop:
            take &= jnp.isfinite(loss.total) & jnp.isfinite(global_norm(grads))
        after = _next_state(loss.model_state, model_state)
        if after is not None:
            after = guard.choose(take, after, model_state)
        add = lambda sum, g: jnp.where(take, sum + weight.astype(sum.dtype) * g.astype(sum.dtype), sum)
        most = guard.choose(take, jax.tree.map(jnp.maximum, most, loss.overwritten), most)
        loss = dataclasses.replace(loss, weight=weight, mean_value=None, model_state=None, overwritten=None)
        return (jax.tree.map(add, sums, grads), most, after), (take, loss)

    carry = _axes.vary((start, lowest, keywords.get("model_state")), axes)
    (sums, most, model_state), (take, losses) = jax.lax.scan(one, carry, np.arange(n))
    loss = _merged(take, losses)
    grads = jax.tree.map(lambda sum, x: (sum / loss.weight.astype(sum.dtype)).astype(x.dtype), sums, like)
    if known is not None and not drop:
        loss = dataclasses.replace(loss, weight=np.float32(n * known))
    dropped = jnp.where(take, 0, losses.weight) if drop else None
    most = guard.choose(jnp.any(take), most, overwritten)
    return dataclasses.replace(loss, model_state=model_state, dropped=dropped, overwritten=most), grads


def over_devices(loss: Loss, grads, axes: _axes.Axes) -> tuple[Loss, Any]:
    """`(loss, grads)` of the rows of all devices along named axes, from those of each one: one reduction of gradients.

    As over micro-batches: sums of weight times gradient and of weight, divided once; the maximum of what gradients
    overwrite. Model states are averaged.
    """
    grads = _axes.vary(grads, axes)
    weight = _axes.vary(jnp.asarray(loss.weight, jnp.float32), axes)
    share = weight / jax.lax.psum(weight, axes)

    def add(g):
        wide = jnp.promote_types(g.dtype, jnp.float32)
        return jax.lax.psum(jnp.where(weight != 0, share.astype(wide) * g.astype(wide), 0), axes).astype(g.dtype)

    return loss_over_devices(loss, axes), jax.tree.map(add, grads)


def loss_over_devices(loss: Loss, axes: _axes.Axes) -> Loss:
    """The loss of the rows of all devices."""
    each = dataclasses.replace(loss, weight=jnp.asarray(loss.weight, jnp.float32), mean_value=None)
    each = _axes.gathered(dataclasses.replace(each, model_state=None, dropped=None, overwritten=None), axes)
    merged = _merged(each.weight != 0, each)
    if isinstance(loss.weight, np.ndarray | np.generic):  # known, the same everywhere
        merged = dataclasses.replace(merged, weight=np.float32(loss.weight * jax.lax.psum(1, axes)))
    model_state = None if loss.model_state is None else _axes.mean(loss.model_state, axes)
    dropped = None if loss.dropped is None else jax.lax.psum(_axes.vary(loss.dropped, axes), axes)
    most = jax.tree.map(lambda x: jax.lax.pmax(x, axes), _axes.vary(loss.overwritten, axes))
    return dataclasses.replace(merged, model_state=model_state, dropped=dropped, overwritten=most)


def check_model_state(new, old) -> None:
    """Raise StateError unless the state can carry what the loss function returned."""
    fix = "Give setup(..., model_state=...)." if old is None else "A step keeps its structure."
    _checks.check_like("model_state", new, old, fix)


def _next_state(new, old):
    """The model state for the next micro-batch: what the loss function returned, else what it was."""
    if new is None:
        return old
    check_model_state(new, old)
    return new


def _merged(take, losses: Loss) -> Loss:
    """All losses of a stack that are taken, merged."""
    at = lambda i: jax.tree.map(lambda x: x[i], (take, losses))
    rest = jax.tree.map(lambda x: x[1:], (take, losses))

    def fold(carry, other):
        have, loss = carry
        ok, new = other
        both = guard.choose(have & ok, loss.merge(new), guard.choose(ok, new, loss))
        return (have | ok, both), None

    have, loss = jax.lax.scan(fold, at(0), rest)[0]
    return dataclasses.replace(loss, weight=jnp.where(have, loss.weight, 0))  # a mean over nothing is NaN


# ------------------------------------------------------------------------------------------------ across calls


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Window:
    """State of `accumulate`."""

    inner: Any  # the rule's own
    sums: Any  # f32, like params: Σ weight · gradient of the calls gathered so far
    value: Any  # f32: Σ weight · loss
    weight: Any  # f32: Σ weight
    calls: Any  # int32: how many
    count: Any  # int32: windows that were applied. The clock of `every` where nobody passes `step=`
    emitted: Any  # bool: whether the last call was the last one of its window


def _is_window(x) -> bool:
    return isinstance(x, Window)


def emitted(opt_state):
    """Whether the call that left this state moved parameters; None where nothing waits: some rule runs on every call.

    A chain waits for its last rule, groups for any of theirs if all of them have a window.
    """
    if _is_window(opt_state):
        return opt_state.emitted
    if type(opt_state) is tuple:
        return emitted(opt_state[-1]) if opt_state else None
    parts = getattr(opt_state, "inner", None)
    found = [emitted(part) for part in parts.values()] if isinstance(parts, dict) else []
    return functools.reduce(operator.or_, found) if found and all(x is not None for x in found) else None


def any_emitted(opt_state):
    """The same of any window anywhere; None where there is none."""
    found = [x.emitted for x in jax.tree.leaves(opt_state, is_leaf=_is_window) if _is_window(x)]
    return functools.reduce(operator.or_, found) if found else None


def in_sums(opt_state) -> list[bool]:
    """For each leaf whether it is a sum under way. Those go on for frozen leaves, with nothing added to them."""

    def flags(x):
        if not _is_window(x):
            return False
        none = jax.tree.map(lambda _: False, x)
        return dataclasses.replace(none, sums=jax.tree.map(lambda _: True, x.sums))

    return jax.tree.leaves(jax.tree.map(flags, opt_state, is_leaf=_is_window))


@dataclass(frozen=True)
class _Init:
    init: Callable

    def __call__(self, params) -> Window:
        inner, zero = self.init(params), jnp.float32(0)
        if any(isinstance(x, guard.SpikeState) for x in guard.reports(inner)):
            fix = "A window that it rejected would stay and be rejected for ever."
            raise RuleError(
                message("reject_spikes", "accumulate()", "it inside", "chain(reject_spikes(), accumulate(...))", fix)
            )
        sums = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), params)
        return Window(inner, sums, zero, zero, jnp.int32(0), jnp.int32(0), jnp.bool_(False))

    def blank(self) -> _Init:
        return _Init(_live.blank(self.init))


@dataclass(frozen=True)
class Gather:
    update: Callable
    every: Any  # int, or a schedule

    def __call__(self, grads, state: Window, params=None, *, weight=None, flush: bool = False, **extra):
        weight = jnp.float32(1 if weight is None else weight)
        value = jnp.float32(extra.get("value", 0))
        take = (weight > 0) & jnp.isfinite(global_norm(grads)) & jnp.isfinite(value)
        add = lambda sum, x: jnp.where(take, sum + weight.astype(sum.dtype) * x.astype(sum.dtype), sum)
        sums = jax.tree.map(add, state.sums, grads)
        total, value = add(state.weight, jnp.float32(1)), add(state.value, value)
        calls = state.calls + take.astype(jnp.int32)
        n = self.every
        if callable(n):
            now: Any = n(extra.get("step", state.count))
            n = jnp.maximum(jnp.round(now).astype(jnp.int32), 1)
        due = (total > 0) & ((calls >= n) | flush)

        def apply():
            mean = jax.tree.map(lambda sum, g: (sum / total.astype(sum.dtype)).astype(g.dtype), sums, grads)
            known = {"value": value / total, "grad": mean}
            given = extra | {name: x for name, x in known.items() if name in extra or flush}
            return self.update(mean, state.inner, params, weight=total, **given)

        def gather():
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(apply)[0]), state.inner

        updates, inner = jax.lax.cond(due, apply, gather)
        begin = lambda x: jnp.where(due, jnp.zeros_like(x), x)
        sums, value, total, calls = jax.tree.map(begin, (sums, value, total, calls))
        return updates, Window(inner, sums, value, total, calls, state.count + due.astype(jnp.int32), due)


def accumulate(rule: optax.GradientTransformation, every: Any) -> optax.GradientTransformationExtraArgs:
    """Gather the gradients of `every` calls and give the rule their weighted mean: `Σ weight · g / Σ weight`.

    The other calls change no parameter and no state of the rule; `state.step` and schedules wait, `state.calls` counts
    on, and `info.applied` says which it was. Weights are those of the losses (in plain optax code, `weight=`). A call
    whose gradient is not finite is left out and not counted. `every` is an int, or a schedule of `step`. What the
    last, short window holds is applied by `ts.flush(state)`. Rules before it in a chain see every
    call; it is the last one itself. In `groups` beside a rule that runs on every call, `state.step` counts calls.

    The rule runs on the last call of a window only (`lax.cond`); under `vmap` that becomes a select, so that it runs
    on every call: same numbers, more work. In memory it costs one f32 gradient in the state; `train_step(...,
    accumulate=n)` needs it only during the step.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.accumulate(ts.rules.sgd(0.1), every=2), {"w": jnp.zeros(2)})
    >>> for g in (1.0, 3.0):
    ...     state, info = ts.update(state, {"w": jnp.full(2, g)})
    ...     print(info.applied, state.params["w"])
    False [0. 0.]
    True [-0.2 -0.2]
    """
    _live.check_rule(rule, "accumulate()")
    if callable(every):
        _number.check_schedule("accumulate()", "every", every)
    else:
        _checks.check_count(every, "accumulate()", "every")
    rule = _live.with_extra(rule)
    return _live.as_rule(_Init(rule.init), Gather(rule.update, every))
