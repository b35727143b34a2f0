"""The compiled evaluation of a loss function: `eval_step`, and calls on the mesh of a state."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
from __future__ import annotations

import dataclasses
import functools
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from tsunax._core import AxisName, Extra, Function, PyTree, checks, trees
from tsunax._step import on_mesh
from tsunax._step.gradients import axes_around
from tsunax._step.loss_fn import LossFn, MadeOfLossFn, hash_of_fields, inputs_of_loss_fn
from tsunax.errors import hide_own_frames
from tsunax.loss import Loss
from tsunax.program import check_byte_order, place_state
from tsunax.state import Plan, TrainState, check_state
from tsunax.states import over_members


def call_on_mesh(
    run: Function, state: TrainState, batch: PyTree, extra: Extra, where: str, *, whole: bool
) -> PyTree:
    """`run(state, batch, extra)` on the mesh of the state."""
    check_state(state, where, batch)
    shardings = place_state(state.params)[0]
    try:
        check_byte_order(batch, extra)
        if shardings is not None and not trees.is_tracing():
            batch, extra = on_mesh.place_as_it_is(state, shardings, batch, extra, whole=whole)
        return run(state, batch, extra)
    except Exception as error:
        hide_own_frames(error)
        raise


@dataclass(frozen=True)
class EvalStep(MadeOfLossFn):
    """The result of `eval_step(loss_fn, ...)`: `f(state, batch, **extra) -> Loss`."""

    axis_name: AxisName = None
    carry: bool = False
    title: ClassVar[str] = "eval_step()"  # its name in errors

    def __hash__(self) -> int:
        return hash_of_fields(self)

    def __post_init__(self) -> None:
        checks.check_flags(self.title, carry=self.carry)
        _ = self._fn  # A wrong signature of loss_fn raises here, not in the first call.

    @functools.cached_property
    def _fn(self) -> LossFn:
        return LossFn.of(self.loss_fn)

    def pure(self, state: TrainState, batch: PyTree, extra: Extra) -> Loss:
        """The evaluation without compilation; for a population, the evaluation of each member.

        For your program: `jax.jit(f.pure)(state, batch, {})`; `extra` is a dict.
        """
        return over_members(self._evaluate_member, state, batch, extra)

    def _evaluate_member(self, state: TrainState, batch: PyTree, extra: Extra) -> Loss:
        keywords = self._fn.keywords(state, extra, train=False)
        inputs = inputs_of_loss_fn(self._fn, state, state.params, batch, keywords, train=False)
        loss = self._fn(*inputs, keywords, merges=True)
        if axes := axes_around(self.axis_name, self.title):
            from tsunax.microbatches import loss_over_devices

            loss = loss_over_devices(loss, axes, keywords.get("mask"))
        if self.carry or loss.model_state is None:
            return loss
        # In a trace, leaves that the loss function does not change are the same objects.
        old, new = map(jax.tree.leaves, (state.model_state, loss.model_state))
        is_changed = len(old) != len(new) or any(map(operator.is_not, old, new))
        self.changes.append(is_changed)
        return dataclasses.replace(loss, model_state=None)

    @functools.cached_property
    def changes(self) -> list[bool]:
        """For each trace whether it dropped a model state that the loss function had changed."""
        return []

    @functools.cached_property
    def carrying(self) -> EvalStep:
        """The same evaluation with `carry=True`."""
        return dataclasses.replace(self, carry=True)

    @functools.cached_property
    def compiled(self) -> Any:
        """The compiled `pure` for a result of `part_read`, without checks and transfers."""
        return jax.jit(self.pure)

    def part_read(self, state: TrainState) -> TrainState:
        """The part of a state that an evaluation reads: a new rule or freeze compiles nothing."""
        has_average = "ema" in self._fn.names
        selected = state.plan.selected if has_average else None
        plan = Plan(None, None, selected, state.plan.precision, state.plan.overwritten)
        read_fields = {"clock", "params", "model_state"} | ({"average"} if has_average else set())
        all_fields = (field.name for field in dataclasses.fields(state))
        unread = dict.fromkeys(name for name in all_fields if name not in read_fields)
        return dataclasses.replace(state, **{**unread, "plan": plan})

    def __call__(self, state: TrainState, batch: PyTree = None, **extra: Any) -> Loss:
        run = lambda state, *args: self.compiled(self.part_read(state), *args)
        return call_on_mesh(run, state, batch, extra, self.title, whole=True)

    def trace(self, state: TrainState, batch: PyTree, extra: Extra) -> jax.stages.Traced:
        """The traced program of a call of this evaluation; `extra` is a dict."""
        run = lambda state, *args: self.compiled.trace(self.part_read(state), *args)
        return call_on_mesh(run, state, batch, extra, self.title, whole=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"loss_fn": self.loss_fn, "axis_name": self.axis_name, "carry": self.carry}


def eval_step(loss_fn: Function, *, axis_name: AxisName = None, carry: bool = False) -> EvalStep:
    """The compiled evaluation of a step's `loss_fn`: `f(state, batch, **extra) -> Loss`.

    `train` is False, there is a `key` only if you pass one, and `model_state` is read only; the
    precision comes from the state. Results of several batches merge: `a.merge(b).compute()` is the
    mean over all rows of both. With `carry=True` the Loss has the `model_state` that `loss_fn`
    returns, and `evaluate` gives it to the next batch: hidden states, for example. `axis_name` and
    errors are as in `train_step`.

    >>> import jax.numpy as jnp
    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> f = eval_step(lambda params, x: jnp.mean(x @ params["w"]))
    >>> float(f(state, jnp.eye(2)).merge(f(state, jnp.ones((1, 2)))).compute())
    2.0
    """
    return EvalStep(loss_fn, axis_name, carry)
