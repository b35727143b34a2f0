"""The parts of `update`, in the order in which `step.py` calls them.

First the gradients are brought into the structure of the params. Then the rule runs, and frozen
leaves stay as they are. The verdict comes before the rule or after it. Except under "ignore", loss
and gradient are judged in any case. `certainty_of` decides whether the update is judged, too:

    True         the rule makes finite updates of finite gradients: on a CPU it runs only if the
                 verdict applies the step (`choose_early`), elsewhere its result is selected
    None         unknown: the rule runs, and the norm of its update is in the verdict
                 (`choose_late`)
    a traced bool   live numbers decide. `guard.early_or_late` chooses by platform and size: early,
                 with the update judged while the numbers are out of bounds; or late
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
from __future__ import annotations

import dataclasses
import functools
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsunax import guard
from tsunax._core import Extra, Function, Maybe, PyTree, Scalar, checks, trees
from tsunax._state import averages_of, thawed_flags
from tsunax._step.gradients import conjugated
from tsunax.errors import RuleError, StateError
from tsunax.loss import Loss
from tsunax.rules import number_table, update_bounds
from tsunax.state import TrainState, master_params, params_with_trained, trained_part

# {dtype: a real dtype with the same range}
RANGES = {
    **{name: name for name in ("float32", "float64")},
    **{"bfloat16": "float32", "complex64": "float32", "complex128": "float64"},
}


def fit_gradients(state: TrainState, grads: PyTree, loss: Loss) -> tuple[PyTree, Loss]:
    """The gradients in the structure of `trainable(state)`, also if given for the full tree."""
    params, plan = trained_part(state), state.plan
    if plan.selected and jax.tree.structure(grads) == jax.tree.structure(state.params):
        if plan.overwritten is not None:
            new, old = (trees.partition(x, plan.overwritten)[0] for x in (grads, state.params))
            checks.check_like("grads", new, old, "The gradient of such a leaf is its next value.")
            new = trees.cast_like(jax.tree.map(trees.own, new), old)
            loss = dataclasses.replace(loss, overwritten=new)
        grads = trees.partition(grads, plan.selected)[0]
    if difference := trees.first_difference(grads, params, "grads"):
        raise StateError(f"gradient {difference}. It has the structure of ts.trainable(state).")
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


def thawed_moments(state: TrainState, thawed: list[Any]) -> list[Any]:
    """For each leaf of the optimizer state, whether its parameter may move; True for a count."""
    from tsunax.rules import leaf_owners

    inputs = state.plan.init, state.opt_state, state.numbers, master_params(state)
    return [True if i is None else thawed[i] for i in leaf_owners.owners_of(*inputs)]


class RuleCall(NamedTuple):
    """A call of the rule of a state, with its live numbers."""

    update: Function
    grads: PyTree
    # () -> the state of the rule with its live numbers. They join it where the rule runs: a table
    # that is reshaped before a cond is copied in it.
    opt_state: Function
    params: PyTree
    keywords: Extra

    def __call__(self) -> tuple[PyTree, PyTree]:
        """The updates and the new state of the rule."""
        return self.update(self.grads, self.opt_state(), self.params, **self.keywords)

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
        inputs = self.grads, self.opt_state(), self.params
        grads, opt_state, params = jax.tree.map(join, inputs, is_leaf=is_like_params)
        return self._replace(grads=grads, opt_state=lambda: opt_state, params=params)


def rule_call(
    state: TrainState,
    grads: PyTree,
    grad_norm: Maybe,
    value: Maybe,
    weight: Scalar,
    extra: Extra,
    thawed: list[Any] | None = None,
) -> RuleCall:
    """The call of the rule for these gradients.

    Params and moments of frozen leaves are zeros in it, like their gradients. So a decay or a
    momentum does not move these leaves, and a norm behind it counts none. A search gets the true
    params.
    """
    params, policy, opt_state = master_params(state), state.plan.precision, state.opt_state
    if state.masters is not None or (policy is not None and policy.stochastic):
        grads = trees.cast_like(grads, params)
    # Complex gradients are as JAX makes them: line searches compare them with the gradient of
    # `value_fn`.
    mean = mean_over_rows(grads, params)
    keywords: Extra = {"grad": conjugated(mean), "step": state.step, "weight": weight}
    keywords |= ({} if value is None else {"value": value}) | extra
    keywords |= {} if grad_norm is None else {"grad_norm": grad_norm}
    for name in checks.SEARCHES:
        if callable(keywords.get(name)):
            keywords[name] = checks.accepting(keywords[name], keywords)
            if thawed is not None:
                keywords[name] = _with_frozen(keywords[name], params, thawed)
    if thawed is not None:
        params = guard.without_frozen(params, thawed)
        opt_state = guard.without_frozen(opt_state, thawed_moments(state, thawed))
    opt_state = opt_state if policy is None else policy.wide_moments(opt_state)
    live_opt_state = functools.partial(
        number_table.join_numbers, opt_state, state.numbers, state.step
    )
    return RuleCall(state.plan.update, grads, live_opt_state, params, keywords)


def _with_frozen(search: Function, params: PyTree, thawed: list[Any]) -> Function:
    """A function of params in which the frozen leaves are always the leaves of `params`."""

    @functools.wraps(search)
    def f(moved_params: PyTree, *args: Any, **keywords: Any) -> Any:
        return search(guard.choose(thawed, moved_params, params), *args, **keywords)

    return f


def run_rule(call: RuleCall) -> tuple[PyTree, PyTree]:
    """The updates and the new state of the rule. Raises RuleError if their shapes are wrong."""
    updates, opt_state = call()
    results = [("updates", updates, call.params), ("opt_state", opt_state, call.opt_state())]
    # A rule that does not take the gradients of rows would add their axis to its state, too.
    for name, new, old in results if _rows_in(call.grads, call.params) else results[:1]:
        for (place, x), y in zip(trees.leaves_at(name, new), jax.tree.leaves(old), strict=False):
            if np.shape(x) != np.shape(y):
                fix = "Rules that take the gradients of rows, and only they, need per_example=True."
                raise RuleError("result of the rule", place, np.shape(x), np.shape(y), fix)
    return updates, opt_state


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


def with_unmoved(old: TrainState, new: TrainState, thawed: Any, moves_params: Maybe) -> TrainState:
    """`new` without its moves of frozen leaves, and of all params if the call only gathered.

    The declaration `like=` of a field says how its leaves correspond to trained leaves.
    """
    if thawed is None and moves_params is None:
        return new
    from tsunax.rules import accumulation

    moves: Any = True if moves_params is None else moves_params
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
            # The count of an average counts each applied call, also if all leaves are frozen.
            counts = [moves] * (len(jax.tree.leaves(new_field)) - len(flags))
            fields[f.name] = guard.choose([*flags, *counts], new_field, old_field)
        elif role == "rule" and thawed is not None:
            # `rules.accumulate` keeps the sum of a frozen leaf, because the leaf may be thawed in
            # the same window. The end of the window clears the sum.
            windows = accumulation.windows_of_sums(new_field)
            pairs = zip(thawed_moments(old, thawed), windows, strict=True)
            moments = [flag if w is None else flag | w.emitted for flag, w in pairs]
            fields[f.name] = guard.choose(moments, new_field, old_field)
    return dataclasses.replace(new, **fields)


class Certainty(NamedTuple):
    """Whether a finite gradient makes a finite update."""

    is_certain: Any  # True, a traced bool if it depends on live numbers, or None if unknown
    reason: str = ""  # why it is unknown
    by_element: bool = False  # whether an update depends on no other element, but for global norms


def certainty_of(state: TrainState, grads: PyTree, weight: Scalar) -> Certainty:
    """Whether a finite gradient makes a finite update of this state."""
    inputs = jax.tree.leaves((trained_part(state), master_params(state), grads, state.opt_state))
    kinds = {RANGES.get(str(x.dtype), "") for x in inputs if trees.is_inexact(x)}
    if len(kinds) > 1 or "" in kinds:
        return Certainty(None, "float16, or dtypes of several ranges")
    opt_state = number_table.join_numbers(state.opt_state, state.numbers, state.step)
    is_complex = any(map(jnp.iscomplexobj, inputs))
    params_norm = lambda: guard.global_norm(master_params(state))
    (kind,) = kinds
    try:
        is_certain, by_element = update_bounds.certain(
            state.plan.update, opt_state, kind, is_complex, weight, params_norm
        )
    except update_bounds.Undeclared as error:
        return Certainty(None, f"{error} may make an infinite update of a finite gradient")
    if isinstance(is_certain, bool):
        reason = "" if is_certain else "its numbers, such as an eps of 0"
        # Numbers that are known to be out of bounds count as unknown: the update is judged.
        return Certainty(is_certain or None, reason)
    if any(map(guard.is_over_mesh, inputs)):
        return Certainty(None, "live numbers, over a mesh")
    return Certainty(is_certain, by_element=by_element and thawed_flags(state) is None)


class Attempt(NamedTuple):
    """The changes of a step to its state if the verdict applies the step."""

    leaves: dict[int, Any]  # the leaves of the state that it changes, by their place
    moves_params: jax.Array | None  # bool; None if every call moves params
    updates: PyTree = None  # the rule adds them to params, zero for frozen leaves
    update_numbers: jax.Array | None = None  # the numbers of a `Watch` of updates

    @classmethod
    def from_states(
        cls,
        old: TrainState,
        new: TrainState,
        moves_params: Any,
        updates: PyTree,
        update_numbers: Any,
    ) -> Attempt:
        """The attempt that makes the state `new` of `old`."""
        pairs = enumerate(zip(*map(jax.tree.leaves, (old, new)), strict=True))
        leaves = {i: new_leaf for i, (old_leaf, new_leaf) in pairs if new_leaf is not old_leaf}
        return cls(leaves, moves_params, updates, update_numbers)

    def undone(self, state: TrainState) -> Attempt:
        """The attempt of a rejected step: the same leaves, with their values in `state`."""
        old_leaves = jax.tree.leaves(state)
        as_nan = lambda x: jnp.full(x.shape, jnp.nan, x.dtype)
        return Attempt(
            {i: old_leaves[i] for i in self.leaves},
            None if self.moves_params is None else jnp.bool_(False),
            update_numbers=jax.tree.map(as_nan, self.update_numbers),
        )

    def applied_to(self, state: TrainState) -> TrainState:
        """The state with the leaves of this attempt."""
        old_leaves, structure = jax.tree.flatten(state)
        return structure.unflatten(self.leaves.get(i, x) for i, x in enumerate(old_leaves))

    def update_norm(self, state: TrainState) -> jax.Array:
        """The norm of the updates, infinite if they make a float16 parameter infinite."""
        norm, params = guard.global_norm(self.updates), trained_part(self.applied_to(state))
        halves = [x for x in jax.tree.leaves(params) if x.dtype == jnp.float16]
        overflows = ~jnp.isfinite(guard.global_norm(halves)) & jnp.isfinite(norm)
        return jnp.where(overflows, jnp.inf, norm) if halves else norm


@dataclass(frozen=True)
class Judge:
    """A step to judge: its numbers, and the result that it would have."""

    state: TrainState
    loss: Loss
    value: Maybe  # the mean loss
    grad_norm: Maybe
    call: RuleCall
    make_attempt: Function  # () -> Attempt

    def choose(self, certainty: Certainty) -> tuple[Attempt, jax.Array]:
        """The attempt, or the unchanged state if it is rejected; and the verdict."""
        early, late = (lambda: self.choose_early(certainty)), (lambda: self.choose_late()[:2])
        if isinstance(certainty.is_certain, jax.Array):
            return guard.early_or_late(early, late, self.call.grads)
        return early() if certainty.is_certain else late()

    def choose_early(self, certainty: Certainty) -> tuple[Attempt, jax.Array]:
        """The rule runs after the verdict, unless the verdict needs its report or its update."""
        make_attempt = jax.jit(self.make_attempt)  # its callers share one trace
        update_size = None
        if certainty.is_certain is not True:
            # While the numbers are out of bounds the rule runs twice: to judge, and to apply.
            # Leaves are joined in the branch alone: other calls do not pay for it.
            def joined_updates() -> PyTree:
                joined_call = self.call.with_joined_leaves()
                return joined_call()[0]

            updates = joined_updates if certainty.by_element else lambda: make_attempt().updates
            update_size = guard.unless(certainty.is_certain, lambda: guard.excess(updates()))
        # For an overwritten leaf the gradient is the new value (flax's fp8). XLA fuses the last
        # operations of such a gradient into a select, but not into a cond.
        return self._chosen(make_attempt, update_size, may_branch=self.loss.overwritten is None)

    def choose_late(self) -> tuple[Attempt, jax.Array, jax.Array]:
        """The rule runs before the verdict on the norm of its update, which is the third result."""
        attempt = self.make_attempt()
        update_norm = attempt.update_norm(self.state)
        chosen, verdict = self._chosen(lambda: attempt, update_norm, may_branch=False)
        # The rule ran, so its updates are known also if they are rejected.
        return chosen._replace(update_numbers=attempt.update_numbers), verdict, update_norm

    def _chosen(
        self, make_attempt: Function, update_size: Maybe, *, may_branch: bool
    ) -> tuple[Attempt, jax.Array]:
        verdict = self._verdict(make_attempt, update_size)
        without_updates = lambda: make_attempt()._replace(updates=None)
        unchanged = jax.eval_shape(without_updates).undone(self.state)
        chosen = guard.decide(verdict == 0, without_updates, unchanged, may_branch=may_branch)
        return chosen, verdict

    def _verdict(self, make_attempt: Function, update_size: Maybe) -> jax.Array:
        """The verdict on loss, gradient, reports of rules, and the size of the update.

        `update_size` is the norm of the update, or 0, inf or NaN by `guard.excess`; None for an
        update that is not judged. If the rule has reports, `make_attempt` is called, because the
        reports are in the new state of the rule.
        """
        state, overwritten = self.state, self.loss.overwritten
        must_be_finite: list[Any] = [] if update_size is None else [update_size]
        if overwritten is not None:  # Neither norm covers overwritten leaves.
            must_be_finite.append(guard.global_norm(overwritten))
        must_be_finite += [
            average.scheduled_rate(state.step + 1)
            for average in averages_of(state).values()
            if average.schedule is not None
        ]
        # Overwritten leaves and averages are judged with the update: this sum is finite only if all
        # of these numbers are.
        update_size = functools.reduce(operator.add, must_be_finite) if must_be_finite else None
        has_reports = bool(guard.reports(state.opt_state))
        opt_state = make_attempt().applied_to(state).opt_state if has_reports else ()
        return guard.judge(self.value, self.grad_norm, state.calls, opt_state, update_size)
