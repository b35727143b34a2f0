"""`rules.accumulate`: the weighted mean of the gradients of several calls, as one gradient."""

import dataclasses
import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tsunax import guard
from tsunax._core import Function, PyTree, Scalar, checks, weighted_sums
from tsunax.errors import RuleError
from tsunax.rules import number_checks
from tsunax.rules.clipping import SpikeState
from tsunax.rules.extra_arguments import Init, as_rule, with_extra
from tsunax.rules.inspecting import check_rule
from tsunax.rules.update_bounds import MadeOfRules


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Window(guard.WindowState):
    """State of `accumulate`. The verdict reads `emitted`: see `guard.moves_params`."""

    inner: PyTree  # the state of the rule inside
    sums: PyTree  # f32, like params: Σ weight · gradient of the calls in this window
    value: Scalar  # f32: Σ weight · loss
    weight: Scalar  # f32: Σ weight
    calls: Scalar  # int32: number of calls in this window
    # int32: applied windows, the clock of `every` if no `step=` is given
    count: Scalar
    emitted: Scalar  # bool: whether the last call ended its window


# Up to this total weight the sum of gradients with a finite norm is finite in float32, so that a
# window needs no check of its sum. Above it, the verdict judges the update.
MAX_WEIGHT = 2.0**60


_is_window = lambda x: isinstance(x, Window)


def any_emitted(opt_state: PyTree) -> jax.Array | None:
    """Whether the last call applied any window of a state; None without a window."""
    flags = [x.emitted for x in jax.tree.leaves(opt_state, is_leaf=_is_window) if _is_window(x)]
    return functools.reduce(operator.or_, flags) if flags else None


def windows_of_sums(opt_state: PyTree) -> list[Window | None]:
    """For each leaf of a sum its unfinished window; None for other leaves."""
    windows: list[Window | None] = []
    for x in jax.tree.leaves(opt_state, is_leaf=_is_window):
        if not _is_window(x):
            windows.append(None)
            continue
        for field in dataclasses.fields(x):
            count = len(jax.tree.leaves(getattr(x, field.name)))
            windows += [x if field.name == "sums" else None] * count
    return windows


def _first_window(init, params) -> Window:
    inner, zero = init(params), jnp.float32(0)
    if any(isinstance(x, SpikeState) for x in guard.reports(inner)):
        raise RuleError(
            "reject_spikes",
            "accumulate()",
            got="it inside",
            expected="chain(reject_spikes(), accumulate(...)), which can leave a window out",
        )
    sums, count = weighted_sums.zeros(params), jnp.int32(0)
    return Window(inner, sums, zero, zero, count, count, jnp.bool_(False))


@dataclass(frozen=True)
class Gather(MadeOfRules):
    update: Function
    every: int | Function  # int, or a schedule

    def __call__(
        self,
        grads: PyTree,
        state: Window,
        params: PyTree = None,
        *,
        weight: Scalar = None,
        flush: bool = False,
        **extra: Any,
    ) -> tuple[PyTree, Window]:
        # The squares of the other groups of `partition` are of this call alone. A clip of the mean
        # over the window does not get them.
        extra.pop("outside", None)
        weight = jnp.float32(1 if weight is None else weight)
        value = jnp.float32(extra.get("value", 0))
        is_counted = (weight > 0) & jnp.isfinite(guard.global_norm(grads)) & jnp.isfinite(value)
        old_sums = state.sums, state.value, state.weight
        sums, value, total = weighted_sums.add(
            old_sums, (grads, value, jnp.float32(1)), weight, is_counted
        )
        calls = state.calls + is_counted.astype(jnp.int32)
        n = self.every
        if callable(n):
            scheduled: Any = n(extra.get("step", state.count))
            n = jnp.maximum(jnp.round(scheduled).astype(jnp.int32), 1)
        is_due = (total > 0) & ((calls >= n) | flush)

        def apply():
            mean = weighted_sums.divided(sums, total, grads)
            # Means over the window replace the `value` and the `grad` of this call, if it has them.
            # A flush has no loss, so there the means are added.
            mean_arguments = {"value": value / total, "grad": mean}
            arguments = extra | {
                name: x for name, x in mean_arguments.items() if name in extra or flush
            }
            return self.update(mean, state.inner, params, weight=total, **arguments)

        def gather():
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(apply)[0]), state.inner

        updates, inner = jax.lax.cond(is_due, apply, gather)
        reset_if_due = lambda x: jnp.where(is_due, jnp.zeros_like(x), x)
        sums, value, total, calls = jax.tree.map(reset_if_due, (sums, value, total, calls))
        count = state.count + is_due.astype(jnp.int32)
        return updates, Window(inner, sums, value, total, calls, count, is_due)

    def bounded(self, survey: Any, state: Window, bounds: list[Any]) -> list[Any]:
        weight = 1.0 if survey.weight is None else survey.weight
        survey.need(state.weight + weight <= MAX_WEIGHT)
        # The sums of a window do not separate gradients and decay, so one bound is for both.
        joint_bounds = [(survey.joint_bound(b, c), 0.0) for b, c in bounds]
        return survey.walk(self.update, state.inner, joint_bounds)


def accumulate(
    rule: optax.GradientTransformation, every: int | Function
) -> optax.GradientTransformationExtraArgs:
    """Gather the gradients of `every` calls, then give the rule their weighted mean.

    The mean is `Σ weight · g / Σ weight`. All calls but the last of a window change neither params
    nor the state of the rule; `state.step` and schedules wait, `state.calls` counts on, and
    `info.applied` is true for the last call. Weights are the weights of the losses (in plain optax
    code, `weight=`). A call with a gradient that is not finite is left out and not counted. `every`
    is an int, or a schedule of `step`. `ts.flush(state)` applies a last, incomplete window. In a
    chain, `accumulate` must be last; rules before it see every call. If another rule of `partition`
    runs on every call, `state.step` counts calls.

    The rule runs on the last call of a window only (`lax.cond`); under `vmap` that becomes a
    select, so that it runs on every call: same numbers, more work. In memory it costs one f32
    gradient in the state; `train_step(..., accumulate=n)` needs it only during the step.

    Raises WrongTypeError for a `rule` that is no optax rule and an `every` that is no int or
    schedule, HyperparameterError for an `every` below 1.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.accumulate(ts.rules.sgd(0.1), every=2), {"w": jnp.zeros(2)})
    >>> for g in (1.0, 3.0):
    ...     state, info = ts.update(state, {"w": jnp.full(2, g)})
    ...     print(info.applied, state.params["w"])
    False [0. 0.]
    True [-0.2 -0.2]
    """
    check_rule(rule, "accumulate()")
    if callable(every):
        number_checks.check_schedule("accumulate()", "every", every)
    else:
        checks.check_count(every, "accumulate()", "every")
    rule = with_extra(rule)
    return as_rule(Init(_first_window, (rule.init,)), Gather(rule.update, every))
