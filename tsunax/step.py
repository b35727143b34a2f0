"""One training step, in the order of its formula.

    loss, grads = value_and_grad(loss_fn)(state, batch)
    state, info = update(state, grads, loss=loss)

    state, info = train_step(loss_fn)(state, batch)     # both lines in one program

    loss_fn -> loss, grads -> verdict -> applied: rule, application, average; or rejected
            -> the guard's record of the call, applied or rejected

All of it is one compiled program (`program.py`). `state.py` has the values that a step carries to
the next; `loop.py` calls steps, or your code does.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]

from tsunax import guard
from tsunax._core import AxisName, Extra, Function, Maybe, PyTree, Scalar, checks, trees
from tsunax._state import thawed_flags
from tsunax._step.gradients import gradient_of
from tsunax._step.loss_fn import GradientOptions
from tsunax._step.updating import (
    Attempt,
    Judge,
    RuleCall,
    certainty_of,
    fit_gradients,
    mean_over_rows,
    rule_call,
    run_rule,
    with_moved_averages,
    with_params,
    with_unmoved,
)
from tsunax.errors import RuleError, StateError
from tsunax.loss import Loss, as_update_loss, check_model_state, number_text
from tsunax.rules import number_table
from tsunax.state import TrainState, check_state, master_params, params_with_trained, trained_part

if TYPE_CHECKING:
    from tsunax.microbatches import NoiseScale
    from tsunax.watching import Watch, Watched


def value_and_grad(
    loss_fn: Function,
    *,
    accumulate: int = 1,
    remat: bool | str | Function | None = None,
    on_nonfinite: str = "skip",
    axis_name: AxisName = None,
    per_example: bool | Function = False,
    noise_scale: bool = False,
    check_rows: bool = True,
) -> Function:
    """The first half of a step: `f(state, batch, *, at=None, **extra) -> (Loss, grads)`.

    In plain JAX: `jax.value_and_grad(loss_fn)(state.params, batch)`, restricted to the leaves that
    are trained, in the precision of the state, over `accumulate` micro-batches. `grads` has the
    structure of `trainable(state)`. `at=` evaluates at other trained parameters (SAM, line
    searches). `remat`, `axis_name` and `check_rows` are as in `train_step`. Of the policies of
    `on_nonfinite`, only "drop" has an effect in this half. Gradients of complex leaves are the
    conjugates of JAX's gradients, so that `z - rate * g` goes downhill, as in PyTorch.

    With `per_example=True` gradients have a first axis of rows: `jax.vmap(jax.grad(loss_fn), (None,
    0))` over batches of one row, with a key for each row. A row without weight has zeros. The Loss
    covers all rows. With `noise_scale=True` the Loss has a `noise_scale`.

    Raises LossError, before anything is compiled, for a loss_fn that cannot be used, or that does
    not depend on any trained leaf; see `train_step`.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> f = value_and_grad(lambda params, x: jnp.sum(params["w"] * x))
    >>> loss, grads = f(state, jnp.array([3.0, 4.0]))
    >>> float(loss.compute()), grads["w"]
    (11.0, Array([3., 4.], dtype=float32))
    """
    options = GradientOptions(
        loss_fn,
        accumulate=accumulate,
        remat=remat,
        on_nonfinite=on_nonfinite,
        axis_name=axis_name,
        per_example=per_example,
        noise_scale=noise_scale,
        check_rows=check_rows,
    )
    gradient = gradient_of(options, "value_and_grad()")
    if not (options.is_cut and check_rows):
        return gradient
    from tsunax._step.finite_state import FirstLook

    first_look = FirstLook(options, looks_at_state=False)

    def f(
        state: TrainState, batch: PyTree, *, at: PyTree = None, **extra: Any
    ) -> tuple[Loss, PyTree]:
        loss, grads = gradient(state, batch, at=at, **extra)
        # Here the look comes after the gradient, so that errors of the arguments come first. A step
        # looks before its program runs, because the program consumes the state (`program.py`).
        if first_look.pending:
            first_look(state, batch, extra)
        return loss, grads

    return f


class StepInfo(NamedTuple):
    """The report of a step: its loss, norms, verdict and metrics.

    Reading a value, `float(info.loss)`, waits for the device; keeping it does not. `loss` and
    `weight` (the rows or tokens behind it) are f32 scalars, as are `grad_norm` and, under
    `norms="update"`, `update_norm` (else None). `metrics` is a dict; `verdict` is 0 if the step was
    `applied`. Not every step has `dropped`, `loss_scale`, `noise_scale`, `step`, or the live
    `numbers`, which `hyperparams` names, or a `watch`.
    """

    loss: jax.Array  # f32, the mean. None if `update` got no loss
    weight: jax.Array  # f32: rows or tokens behind it
    # f32, L2 norm over trained leaves that are not frozen, before the rule. None without norms
    grad_norm: jax.Array
    # f32, L2 norm of the updates that the rule would add to params, under `norms="update"`
    update_norm: jax.Array | None
    # int32: 0 applied, -1 gathered, > 0 rejected (`guard.explain` says why). None under "ignore",
    # except for a rule that gathers
    verdict: Scalar
    metrics: dict[str, PyTree]  # f32, or the result of the metric's compute()
    dropped: jax.Array | None  # f32: the weight of micro-batches that were left out, under "drop"
    loss_scale: jax.Array | None  # f32: the loss scale of this step, if the state has one
    noise_scale: NoiseScale | None  # how gradients scatter, under `noise_scale=True`
    step: jax.Array | None  # int32: the clock that the schedules saw, if the rule has any
    watch: Watched | None  # the numbers of layers, under `watch=`
    numbers: number_table.Numbers | None  # the live hyperparameters of this step

    @property
    def applied(self) -> jax.Array | np.ndarray:
        """Whether the step moved the params.

        False if it was rejected, or if `rules.accumulate` only gathered its gradient.
        """
        if self.verdict is not None:
            return self.verdict == 0
        table = None if self.numbers is None else self.numbers.values[..., 0, 0]
        numbers = (self.loss, self.grad_norm, self.step, table)
        number = next((x for x in numbers if x is not None), 0)
        return np.ones(np.shape(number), bool)  # for a population (members,)

    def __repr__(self) -> str:
        names = "loss weight grad_norm update_norm applied".split()
        parts = {name: getattr(self, name) for name in names}
        parts |= (self.metrics or {}) | self.hyperparams
        text_of = lambda x: number_text(x) if trees.is_array(x) and not np.ndim(x) else x
        texts = [f"{name}={text_of(x)}" for name, x in parts.items() if x is not None]
        return f"StepInfo({', '.join(texts)})"

    @property
    def hyperparams(self) -> dict[str, Any]:
        """The live hyperparameters that the step used, a dict by flat name."""
        return {} if self.numbers is None else self.numbers.named(self.step)


def update(
    state: TrainState,
    grads: PyTree,
    *,
    loss: Loss | Maybe = None,
    model_state: PyTree = None,
    on_nonfinite: str = "skip",
    norms: bool | str = True,
    **extra: Any,
) -> tuple[TrainState, StepInfo]:
    """The second half of a step: verdict, rule, frozen leaves, clock.

    In plain JAX: `updates, opt_state = rule.update(grads, opt_state, params)` and
    `params = optax.apply_updates(params, updates)`. Pure: call it inside your own jit.

    Args:
      grads: of the structure of `trainable(state)`, or of the full tree. They are used as they are:
        `value_and_grad` conjugates gradients of complex leaves, `jax.grad` does not.
      loss: the `Loss` or scalar that they are the gradient of, for the verdict and for rules.
      model_state: replaces `state.model_state` if the step is applied; default: `loss.model_state`.
      on_nonfinite: what to do if the loss, a gradient, an update that the rule would add to params,
        or a rule's report is not finite. In a program, loss and gradient are judged before the rule
        runs, and the update only if the rule could make an infinite update of a finite gradient
        (see `describe`). Outside of one, and with `norms="update"`, the update is always judged.
        Only a judged update shows a state that was not finite before. "skip" rejects the step:
        every array of the state but its counts and its loss scale stays bit-identical. "raise"
        rejects too, and a compiled step then waits and raises. "ignore" applies the step. "drop"
        is "skip" here: `value_and_grad` drops micro-batches.
      norms: whether info has `grad_norm`; "update" for `update_norm` too, at a pass over updates.
      extra: goes to the rule, if it takes extra arguments. Members of a population share it, unless
        it is in `populations.each`.

    Raises StateError if grads do not fit the state, naming the first path, and for a keyword that
    is a hyperparameter or a misspelled argument of `update`.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> state, info = update(state, {"w": jnp.array([3.0, 4.0])})
    >>> state.params["w"], float(info.grad_norm), bool(info.applied)
    (Array([0.7, 1.6], dtype=float32), 5.0, True)
    """
    check_state(state, "update()", grads)
    checks.check_choice(on_nonfinite, "update()", "on_nonfinite", guard.POLICIES)
    check_norms(norms, "update()")
    if extra:
        from tsunax._step import step_errors

        step_errors.check_extra(state, extra)
    from tsunax.states import with_own_values

    def update_member(
        state: TrainState, grads: PyTree, loss: Any, model_state: PyTree, extra: Extra
    ) -> tuple[TrainState, StepInfo]:
        return update_unchecked(state, grads, loss, model_state, on_nonfinite, norms, extra)

    return with_own_values(update_member, state, (grads, loss, model_state), extra)


def check_norms(norms: object, where: str) -> None:
    """Raise unless `norms` is a bool or "update"."""
    if norms != "update":
        checks.check_flags(where, norms=norms)


def update_unchecked(
    state: TrainState,
    grads: PyTree,
    loss: Loss | Maybe,
    model_state: PyTree,
    on_nonfinite: str,
    norms: bool | str,
    extra: Extra,
    watch: Watch | None = None,
) -> tuple[TrainState, StepInfo]:
    """`update` without the checks of its arguments."""
    is_judged = guard.POLICIES[on_nonfinite].judges
    if state.loss_scale is not None and not is_judged:
        expected = "another policy: a loss scale lives from rejected steps"
        raise StateError("on_nonfinite", "update()", "'ignore'", expected)
    grads, loss = fit_gradients(state, grads, as_update_loss(loss))
    if model_state is None:
        model_state = state.model_state if loss.model_state is None else loss.model_state
    check_model_state(model_state, state.model_state)
    value = None if loss.total is None else loss.compute()
    thawed = thawed_flags(state)
    grads = guard.without_frozen(grads, thawed)
    mean, grad_norm = mean_over_rows(grads, trained_part(state)), None
    # A rule that clips first gets the verdict's norm, and has to clip by the same bits as optax.
    shares_norm = mean is grads and getattr(state.plan.update, "begins_with_norm", False)
    if norms or is_judged or any(map(trees.is_offloaded, jax.tree.leaves(state))):
        grad_norm = guard.global_norm(mean, by_leaf=shares_norm)
    # Offloaded leaves come to the device once the gradient, and so its norm, is there.
    stored_state, state = state, trees.on_device(state, earlier_result=grad_norm)

    norm_of_rule = grad_norm if shares_norm else None
    call = rule_call(state, grads, norm_of_rule, value, loss.weight, extra, thawed)
    make_attempt = functools.partial(_attempt, state, call, loss, model_state, thawed, watch)
    judge = Judge(
        state, loss, value=value, grad_norm=grad_norm, call=call, make_attempt=make_attempt
    )
    update_norm = verdict = None
    if not is_judged:
        chosen = make_attempt()
        update_norm = chosen.update_norm(state) if norms == "update" else None
    elif norms == "update" or not trees.is_tracing():  # Without jit, branches would compile anew.
        chosen, verdict, update_norm = judge.choose_late()
    else:
        chosen, verdict = judge.choose(certainty_of(state, grads, loss.weight))
    new = _recorded(state, chosen.applied_to(state), verdict, chosen.moves_params, loss)
    verdict = guard.with_gathered(verdict, chosen.moves_params)
    norms_in_info = grad_norm if norms else None, update_norm if norms == "update" else None
    watched = None if watch is None else watch.report(state, new, mean, chosen.update_numbers)
    info = _info(state, loss, value, norms_in_info, verdict, watched)
    return trees.offloaded_like(new, stored_state), info


def _attempt(
    state: TrainState,
    call: RuleCall,
    loss: Loss,
    model_state: PyTree,
    thawed: list[Any] | None,
    watch: Watch | None,
) -> Attempt:
    """The result of the step if the verdict applies it."""
    updates, opt_state = run_rule(call)
    moves_params = guard.moves_params(opt_state)
    opt_state = number_table.without_numbers(opt_state)
    if difference := trees.first_difference(opt_state, state.opt_state, "opt_state"):
        raise RuleError(f"optimizer state {difference}. The rule changes it from call to call.")
    if (policy := state.plan.precision) is not None:
        opt_state = policy.rounded_moments(opt_state, state.opt_state, state.key, state.calls)
    clock = guard.count(state.clock, moves_params)  # for averages; see `_recorded`
    new = dataclasses.replace(state, clock=clock, opt_state=opt_state, model_state=model_state)
    new = with_params(new, optax.apply_updates(master_params(state), updates))
    new = with_moved_averages(new)
    new = with_unmoved(state, new, thawed, moves_params)
    if (replaced := loss.overwritten) is not None:
        new = dataclasses.replace(new, params=params_with_trained(new, trained_part(new), replaced))
    updates = guard.without_frozen(updates, thawed)
    update_numbers = None if watch is None else watch.numbers_of_updates(state, updates)
    new = dataclasses.replace(new, clock=state.clock)
    return Attempt.from_states(state, new, moves_params, updates, update_numbers)


def _info(
    state: TrainState,
    loss: Loss,
    value: Any,
    norms: tuple[Any, Any],
    verdict: Scalar,
    watched: Watched | None,
) -> StepInfo:
    scale, numbers, (grad_norm, update_norm) = state.loss_scale, state.numbers, norms
    mean: Any = None if value is None else jnp.asarray(value, jnp.float32)
    return StepInfo(
        loss=mean,
        weight=loss.weight,
        grad_norm=grad_norm,
        update_norm=update_norm,
        verdict=verdict,
        metrics={name: m.compute() for name, m in loss.metrics.items()},
        dropped=None if loss.dropped is None else jnp.sum(loss.dropped),
        loss_scale=None
        if scale is None
        else trees.own(scale.scale),  # a step may donate the state's
        noise_scale=loss.noise_scale,
        step=state.step if numbers is not None and numbers.scheduled else None,
        watch=watched,
        numbers=numbers,
    )


def _recorded(
    old: TrainState, new: TrainState, verdict: Any, moves_params: Any, loss: Loss
) -> TrainState:
    """`new` with the records of every call, applied or not: counts and loss scale."""
    new = dataclasses.replace(new, clock=guard.count(old.clock, moves_params, verdict))
    if verdict is None or old.loss_scale is None:
        return new
    applied = verdict == 0 if moves_params is None else (verdict == 0) & moves_params
    overflowed = guard.overflowed(verdict)
    if loss.weight is not None:  # a mean over nothing is NaN, and no overflow
        overflowed &= loss.weight != 0
    if loss.dropped is not None:  # micro-batches were dropped instead
        overflowed |= jnp.any(loss.dropped != 0)
    scale = old.loss_scale.grown(applied & ~overflowed, overflowed)
    return dataclasses.replace(new, loss_scale=scale)
