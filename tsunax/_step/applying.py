"""An update that the verdict lets through: its gradients, the rule, and the leaves that stay.

The steps of `update`, in `step.py`, call these functions in their order.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsunax import guard
from tsunax._core import Extra, Function, Maybe, PyTree, Scalar, checks, trees
from tsunax._core.trees import own
from tsunax._state.state_fields import averages_of
from tsunax._step.gradients import conjugated
from tsunax.errors import RuleError, StateError
from tsunax.loss import Loss
from tsunax.rules import number_table
from tsunax.state import TrainState, master_params, params_with_trained, trained_part


def fit_gradients(state: TrainState, grads: PyTree, loss: Loss) -> tuple[PyTree, Loss]:
    """The gradients in the structure of `trainable(state)`, also if given for the full tree."""
    params, plan, structure = trained_part(state), state.plan, jax.tree.structure(grads)
    if structure != jax.tree.structure(params):
        if not plan.selected or structure != jax.tree.structure(state.params):
            difference = trees.first_difference(grads, params, "grads")
            raise StateError(f"gradient {difference}. It has the structure of ts.trainable(state).")
        if plan.overwritten is not None:
            new, old = (trees.partition(x, plan.overwritten)[0] for x in (grads, state.params))
            checks.check_like("grads", new, old, "The gradient of such a leaf is its next value.")
            new = trees.cast_like(jax.tree.map(own, new), old)
            loss = dataclasses.replace(loss, overwritten=new)
        grads = trees.partition(grads, plan.selected)[0]
    rows = _rows_in(grads, params)
    for i, (grad, param) in enumerate(zip(*map(jax.tree.leaves, (grads, params)), strict=True)):
        if not _is_gradient(grad, param, rows):
            place, _ = list(trees.leaves_at("grads", grads))[i]
            raise StateError("gradient", place, trees.describe(grad), trees.describe(param))
    return grads, loss


def _is_gradient(grad: Any, param: Any, rows: tuple[int, ...]) -> bool:
    """Whether an array is the gradient of a parameter, with a first axis of `rows` if not ()."""
    if not trees.is_inexact(grad) or np.shape(grad) != (*rows, *np.shape(param)):
        return False
    is_native = checks.dtype_fault(trees.dtype_of(grad)) is None
    return is_native and (jnp.iscomplexobj(param) or not jnp.iscomplexobj(grad))


def _rows_in(grads: PyTree, params: PyTree) -> tuple[int, ...]:
    """`(rows,)` for the gradients of rows (`per_example=True`), else ()."""
    g, p = jax.tree.leaves(grads)[0], jax.tree.leaves(params)[0]
    return np.shape(g)[:1] if np.ndim(g) == np.ndim(p) + 1 else ()


def mean_over_rows(grads: PyTree, params: PyTree) -> PyTree:
    """The mean of the gradients of rows; gradients without an axis of rows are returned."""
    return jax.tree.map(lambda g: jnp.mean(g, 0), grads) if _rows_in(grads, params) else grads


def without_frozen(grads: PyTree, thawed: list[Any] | None) -> PyTree:
    """The gradients with zeros for frozen leaves, which count in no norm."""
    if thawed is None:
        return grads
    return guard.choose(thawed, grads, jax.tree.map(jnp.zeros_like, grads))


class RuleCall(NamedTuple):
    """A call of the rule of a state, with its live numbers."""

    update: Function
    grads: PyTree
    opt_state: PyTree
    numbers: number_table.Numbers | None  # that `opt_state` does not have
    step: Scalar
    params: PyTree
    keywords: Extra

    @property
    def live_opt_state(self) -> PyTree:
        """The state of the rule with its live numbers.

        They join it where the rule runs: a table that is reshaped before a cond is copied in it.
        """
        return number_table.join_numbers(self.opt_state, self.numbers, self.step)

    def __call__(self) -> tuple[PyTree, PyTree]:
        """The updates and the new state of the rule."""
        return self.update(self.grads, self.live_opt_state, self.params, **self.keywords)

    def with_joined_leaves(self) -> RuleCall:
        """The call with all small leaves in one vector, for a rule that works by element.

        Its program has one operation where the program of the call has one for each leaf.
        """
        leaves, structure = jax.tree.flatten(self.params)
        groups, shapes = guard.groups_of_leaves(leaves), [x.shape for x in leaves]
        if len(groups) == len(leaves):
            return self

        def is_like_params(tree: PyTree) -> bool:
            return jax.tree.structure(tree) == structure and shapes == [
                np.shape(x) for x in jax.tree.leaves(tree)
            ]

        join = lambda x: guard.joined(jax.tree.leaves(x), groups) if is_like_params(x) else x
        inputs = self.grads, self.live_opt_state, self.params
        grads, opt_state, params = jax.tree.map(join, inputs, is_leaf=is_like_params)
        return self._replace(grads=grads, opt_state=opt_state, numbers=None, params=params)


def rule_call(
    state: TrainState, grads: PyTree, grad_norm: Maybe, value: Maybe, weight: Scalar, extra: Extra
) -> RuleCall:
    """The call of the rule for these gradients."""
    params, policy, opt_state = master_params(state), state.plan.precision, state.opt_state
    if state.masters is not None or (policy is not None and policy.stochastic):
        grads = trees.cast_like(grads, params)
    # Complex gradients are as JAX makes them: line searches compare them with the gradient of
    # `value_fn`.
    mean = mean_over_rows(grads, params)
    arguments: Extra = {"grad": conjugated(mean), "step": state.step, "weight": weight}
    arguments |= ({} if value is None else {"value": value}) | extra
    arguments |= {} if grad_norm is None else {"grad_norm": grad_norm}
    for name in checks.SEARCHES:
        if callable(arguments.get(name)):
            arguments[name] = checks.accepting(arguments[name], arguments)
    opt_state = opt_state if policy is None else policy.wide_moments(opt_state)
    numbers, step = state.numbers, state.step
    return RuleCall(state.plan.update, grads, opt_state, numbers, step, params, arguments)


def run_rule(call: RuleCall) -> tuple[PyTree, PyTree]:
    """The updates and the new state of the rule. Raises RuleError if their shapes are wrong."""
    results = call()
    has_rows = bool(_rows_in(call.grads, call.params))
    _check_results(results, (call.params, call.live_opt_state), has_rows=has_rows)
    return results


def _check_results(results: PyTree, trees_before: PyTree, *, has_rows: bool) -> None:
    """Raise RuleError if the rule returned updates or a state of other shapes than before."""
    shapes_of = lambda tree: [*map(np.shape, jax.tree.leaves(tree))]
    names = ("updates", "opt_state") if has_rows else ("updates",)
    for name, new, old in zip(names, results, trees_before, strict=False):
        if shapes_of(new) == shapes_of(old):
            continue
        pairs = zip(trees.leaves_at(name, new), shapes_of(old), strict=False)
        faults = [
            (place, np.shape(x), shape) for (place, x), shape in pairs if np.shape(x) != shape
        ]
        place, got, expected = (faults or [(name, "another tree", "that of the params")])[0]
        fix = "Rules that take the gradients of rows, and only they, need per_example=True."
        raise RuleError("result of the rule", place, got, expected, fix)


def with_params(state: TrainState, params: PyTree) -> TrainState:
    """The state with new trained params, rounded as it stores them."""
    policy = state.plan.precision
    if state.masters is not None:
        rounded = trees.cast_like(params, trained_part(state))
        return dataclasses.replace(
            state, params=params_with_trained(state, rounded), masters=params
        )
    if policy is not None and policy.stochastic:
        params = policy.rounded(params, state.key, state.calls)
    return dataclasses.replace(state, params=params_with_trained(state, params))


def with_moved_averages(state: TrainState) -> TrainState:
    params = trained_part(state) if state.masters is None else state.masters
    averages = averages_of(state).items()
    moved = {name: average.moved(params, state.step) for name, average in averages}
    return dataclasses.replace(state, **moved)


def with_unmoved(old: TrainState, new: TrainState, thawed: Any, emitted: Maybe) -> TrainState:
    """`new` without its moves of frozen leaves, and of all params if the call only gathered.

    The declaration `like=` of a field says how its leaves correspond to trained leaves.
    """
    if thawed is None and emitted is None:
        return new
    from tsunax.rules import accumulation, leaf_owners

    moves: Any = True if emitted is None else emitted  # a call that only gathers moves no parameter
    flags = [moves & flag for flag in thawed or [True] * len(jax.tree.leaves(trained_part(old)))]
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(old):
        new_field, old_field, role = getattr(new, f.name), getattr(old, f.name), f.metadata["like"]
        if f.metadata["moves"] != "step" or new_field is old_field:
            continue
        if role == "params":
            part = guard.choose(flags, trained_part(new), trained_part(old))
            fields[f.name] = params_with_trained(old, part)
        elif role in ("trained", "average"):
            # An average also has a count, which moves if any leaf may move.
            counts = [moves] * (len(jax.tree.leaves(new_field)) - len(flags))
            fields[f.name] = guard.choose([*flags, *counts], new_field, old_field)
        elif role == "rule" and thawed is not None:
            owners = leaf_owners.owners_of(
                old.plan.init, old_field, old.numbers, master_params(old)
            )
            pairs = zip(owners, accumulation.in_sums(new_field), strict=True)
            moments = [True if i is None or is_sum else thawed[i] for i, is_sum in pairs]
            fields[f.name] = guard.choose(moments, new_field, old_field)
    return dataclasses.replace(new, **fields)
