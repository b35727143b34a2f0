"""The verdict on a step, before its rule runs or after it.

Loss and gradient are judged in any case. `certainty` decides whether the update is, too:

    True         the rule makes finite updates of finite gradients: it runs only if the verdict
                 applies the step (`choose_early`)
    None         unknown: the rule runs, and the norm of its update is in the verdict
                 (`choose_late`)
    a traced bool   live numbers decide: early, with the update judged while the numbers are out
                 of bounds; or late, by platform and size (`guard.early_or_late`)
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

from tsunax import guard
from tsunax._core import Function, Maybe, PyTree, Scalar, trees
from tsunax._state.state_fields import averages_of, thawed_flags
from tsunax._step.applying import RuleCall
from tsunax.loss import Loss
from tsunax.rules import number_table, update_bounds
from tsunax.state import TrainState, master_params, split, trained_part, with_part

# {dtype: a real dtype with the same range}
RANGES = {
    **{name: name for name in ("float32", "float64")},
    **{"bfloat16": "float32", "complex64": "float32", "complex128": "float64"},
}


class Certainty(NamedTuple):
    """Whether a finite gradient makes a finite update."""

    is_certain: Any  # True, a traced bool if it depends on live numbers, or None if unknown
    reason: str = ""  # why it is unknown
    by_element: bool = False  # whether an update depends on no other element, but for global norms


def certainty(state: TrainState, grads: PyTree, weight: Scalar) -> Certainty:
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
        return Certainty(is_certain or None, reason)  # not certain is as unknown
    if any(map(guard.is_over_mesh, inputs)):
        return Certainty(None, "live numbers, over a mesh")
    return Certainty(is_certain, by_element=by_element and thawed_flags(state) is None)


class Attempt(NamedTuple):
    """The changes of a step to its state if the verdict applies the step."""

    fields: dict[str, Any]  # the fields that it changes, of params only the part that moves
    emitted: jax.Array | None  # bool: whether it moves params; None: every call does
    updates: PyTree = None  # the rule adds them to params, zero for frozen leaves
    of_updates: jax.Array | None = None  # their numbers, for a `Watch` of updates

    @classmethod
    def from_states(
        cls, old: TrainState, new: TrainState, emitted: Any, updates: PyTree, of_updates: Any
    ) -> Attempt:
        """The attempt that makes the state `new` of `old`."""
        moving = (f.name for f in dataclasses.fields(new) if f.metadata.get("moves") == "step")
        fields = {name: getattr(new, name) for name in moving if name != "params"}
        fields = {name: x for name, x in fields.items() if x is not getattr(old, name)}
        return cls({**fields, "params": split(new)[0][0]}, emitted, updates, of_updates)

    def undone(self, state: TrainState) -> Attempt:
        """The attempt of a rejected step: the same fields, with their values in `state`."""
        fields = {name: getattr(state, name) for name in self.fields}
        emitted = None if self.emitted is None else jnp.bool_(False)
        of_updates = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), self.of_updates)
        return Attempt({**fields, "params": split(state)[0][0]}, emitted, None, of_updates)

    def applied_to(self, state: TrainState) -> TrainState:
        """The state with the fields of this attempt."""
        params = with_part(self.fields["params"], state.params, state.plan.moving)
        return dataclasses.replace(state, **{**self.fields, "params": params})

    def update_norm(self) -> jax.Array:
        """The norm of the updates, infinite if they make a float16 parameter infinite."""
        norm = guard.global_norm(self.updates)
        halves = [x for x in jax.tree.leaves(self.fields["params"]) if x.dtype == jnp.float16]
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
    attempt: Function  # () -> Attempt

    def choose(self, certainty: Certainty) -> tuple[Attempt, jax.Array]:
        """The attempt, or the unchanged state if it is rejected; and the verdict."""
        early = lambda: self.choose_early(certainty)
        late = lambda: self.choose_late()[:2]
        if certainty.is_certain is None:
            return late()
        if certainty.is_certain is True:
            return early()
        return guard.early_or_late(early, late, self.call.grads)

    def choose_early(self, certainty: Certainty) -> tuple[Attempt, jax.Array]:
        """The rule runs after the verdict, unless the verdict needs its report or its update."""
        attempt, fault = jax.jit(self.attempt), None  # Its callers share one trace.
        if certainty.is_certain is not True:
            # Leaves are joined in the branch alone: other calls do not pay for it.
            joined_updates = lambda: self.call.with_joined_leaves()()[0]
            updates = joined_updates if certainty.by_element else lambda: attempt().updates
            excess = lambda: guard.excess(updates())
            fault = guard.unless(certainty.is_certain, excess)
        # For an overwritten leaf the gradient is the new value (flax's fp8). XLA fuses the last
        # operations of such a gradient into a select, but not into a cond.
        decide = guard.decide if self.loss.overwritten is None else guard.select
        return self._chosen(attempt, fault, decide)

    def choose_late(self) -> tuple[Attempt, jax.Array, jax.Array]:
        """The rule runs before the verdict on the norm of its update, which is the third result."""
        attempt = self.attempt()
        update_norm = attempt.update_norm()
        chosen, verdict = self._chosen(lambda: attempt, update_norm, guard.select)
        # The rule ran, so its updates are known also if they are rejected.
        return chosen._replace(of_updates=attempt.of_updates), verdict, update_norm

    def _chosen(
        self, attempt: Function, of_update: Maybe, decide: Function
    ) -> tuple[Attempt, jax.Array]:
        verdict = self._verdict(attempt, of_update)
        without_updates = lambda: attempt()._replace(updates=None)
        unchanged = jax.eval_shape(without_updates).undone(self.state)
        return decide(verdict == 0, without_updates, unchanged), verdict

    def _verdict(self, attempt: Function, of_update: Maybe) -> jax.Array:
        """The verdict on loss, gradient, reports of rules, and a number of the update.

        The number `of_update` is not finite if the update is not; None for an update that is not
        judged. A rule that reports calls `attempt`: the reports are in the new state of the rule.
        """
        state, overwritten = self.state, self.loss.overwritten
        must_be_finite: list[Any] = [] if of_update is None else [of_update]
        if overwritten is not None:  # Neither norm covers overwritten leaves.
            must_be_finite.append(guard.global_norm(overwritten))
        must_be_finite += [
            average.scheduled_rate(state.step + 1)
            for average in averages_of(state).values()
            if average.schedule is not None
        ]
        last = functools.reduce(operator.add, must_be_finite) if must_be_finite else None
        opt_state = attempt().fields.get("opt_state", ()) if guard.reports(state.opt_state) else ()
        return guard.judge(self.value, self.grad_norm, state.calls, opt_state, last)
