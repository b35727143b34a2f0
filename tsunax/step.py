"""One training step, in the order of its formula.

    loss, grads = value_and_grad(loss_fn)(state, batch)
    state, info = update(state, grads, loss=loss)             both: step(state, batch)

    loss_fn -> loss, grads -> verdict -> applied: rule, application, average; or rejected
            -> the guard's record, of both

All of it is one compiled program (`program.py`). What is carried is in `state.py`; who calls it is
up to you.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]

from tsunax import guard
from tsunax._core import AxisName, Extra, Function, Maybe, PyTree, Scalar, checks, trees
from tsunax._core.trees import own
from tsunax._step.certainty import certainty
from tsunax._step.gradients import gradient_of
from tsunax._step.loss_fn import GradientOptions
from tsunax._step.row_probe import RowProbe
from tsunax._step.state_fields import averages_of, thawed_flags
from tsunax.errors import RuleError, StateError
from tsunax.loss import Loss, check_model_state, finished, number_text
from tsunax.rules import number_table
from tsunax.rules.number_table import Numbers
from tsunax.state import TrainState, base, check_state, split, trained_part, with_part, with_rest

if TYPE_CHECKING:
    from tsunax.microbatches import NoiseScale


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
    searches). `remat`, `axis_name` and `check_rows` are those of `train_step`; of its policies
    `on_nonfinite` only "drop" is for this half. Gradients of complex leaves are conjugated, so that
    `z - rate * g` goes downhill, as in PyTorch: JAX's own do not.

    With `per_example=True` gradients have a first axis of rows: `jax.vmap(jax.grad(loss_fn), (None,
    0))` over batches of one row, each with a key of its own. A row without weight has zeros. The
    Loss is that of all rows. With `noise_scale=True` it has a `noise_scale`.

    Raises LossError, before anything is compiled, for a loss_fn that cannot be used or that no
    trained leaf moves; see `train_step`.

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
    gradient, row_probe = gradient_of(options, "value_and_grad()"), RowProbe(options)

    def f(
        state: TrainState, batch: PyTree, *, at: PyTree = None, **extra: Any
    ) -> tuple[Loss, PyTree]:
        loss, grads = gradient(state, batch, at=at, **extra)
        if row_probe.pending:
            row_probe(state, batch, extra)
        return loss, grads

    return f


class StepInfo(NamedTuple):
    """What a step reports: its loss, norms, verdict and metrics.

    Reading a value, `float(info.loss)`, waits for the device; keeping it does not. `loss` and
    `weight` (the rows or tokens behind it) are f32 scalars, as are `grad_norm` and, under
    `norms="update"`, `update_norm` (else None). `metrics` is a dict; `verdict` is 0 if the step was
    `applied`. Not every step has `dropped`, `loss_scale`, `noise_scale`, `step`, or the live
    `numbers`, which `hyperparams` names.
    """

    loss: jax.Array  # f32, the mean. None if `update` was given none
    weight: jax.Array  # f32: rows or tokens behind it
    # f32, L2 over what is trained and not frozen, before the rule. None without norms
    grad_norm: jax.Array
    # f32, L2 of what the rule would add to params, under `norms="update"`
    update_norm: jax.Array | None
    # int32: 0 taken, -1 gathered, else what was not finite (`guard`). None if nobody judged
    verdict: Scalar
    metrics: dict[str, PyTree]  # f32, or what the metric's compute() gives
    dropped: jax.Array | None  # f32: the weight of micro-batches that were left out, under "drop"
    loss_scale: jax.Array | None  # f32: the one that it used, if the state has one
    noise_scale: NoiseScale | None  # how gradients scatter, under `noise_scale=True`
    step: jax.Array | None  # int32: the clock that the schedules saw, if the rule has any
    numbers: Numbers | None  # the live hyperparameters that it used

    @property
    def applied(self) -> jax.Array | np.ndarray:
        """Whether the step moved the params.

        False if it was rejected, or if `rules.accumulate` only gathered its gradient.
        """
        return np.ones(np.shape(self.loss), bool) if self.verdict is None else self.verdict == 0

    def __repr__(self) -> str:
        names = "loss weight grad_norm update_norm applied".split()
        parts = {name: getattr(self, name) for name in names}
        if self.update_norm is None:
            del parts["update_norm"]
        parts |= (self.metrics or {}) | self.hyperparams
        shown = lambda x: number_text(x) if trees.is_array(x) and not np.ndim(x) else x
        return f"StepInfo({', '.join(f'{name}={shown(x)}' for name, x in parts.items())})"

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
        `value_and_grad` conjugates those of complex leaves, `jax.grad` does not.
      loss: the `Loss` or scalar that they are the gradient of: part of the verdict, and `value` for
        the rules that ask for it.
      model_state: replaces `state.model_state` if the step is applied; default: the one in `loss`.
      on_nonfinite: what to do if the loss, a gradient, what the rule would add to params, or a
        rule's report is not finite. Loss and gradient are judged before the rule runs; the update
        is only looked at if the rule could make an infinite one of a finite gradient (see
        `describe`). "skip" rejects the step: every array of the state but its
        counts and its loss scale stays bit-identical. "raise" rejects too, and a compiled step then
        waits and raises. "ignore" applies it.
      norms: whether info has `grad_norm`; "update" for `update_norm` beside it, which costs a pass
        over all updates.
      extra: goes to the rule, if it takes extra arguments.

    Raises StateError if grads do not fit the state, naming the first path, and for a keyword that
    is a hyperparameter or one of its own misspelled.

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
        _errors().check_extra(state, extra)
    return update_unchecked(state, grads, loss, model_state, on_nonfinite, norms, extra)


def check_norms(norms: object, where: str) -> None:
    """Raise for what does not say which norms an info has."""
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
) -> tuple[TrainState, StepInfo]:
    """`update` without the checks of its arguments."""
    if state.loss_scale is not None and on_nonfinite == "ignore":
        fix = "A loss scale lives from rejected steps."
        got, expected = "'ignore'", "another policy under a loss scale"
        raise StateError("on_nonfinite", "update()", got, expected, fix)
    grads, loss = _fitting(state, grads, finished(loss))
    if model_state is None:
        model_state = state.model_state if loss.model_state is None else loss.model_state
    check_model_state(model_state, state.model_state)
    value = None if loss.total is None else loss.compute()
    thawed = thawed_flags(state)
    grads = _without_frozen(grads, thawed)
    is_judged = on_nonfinite != "ignore"
    mean, grad_norm = _mean(grads, trained_part(state)), None
    # A rule that clips first gets the verdict's norm, and has to clip by the same bits as optax.
    shares_norm = mean is grads and getattr(state.plan.update, "begins_with_norm", False)
    if norms or is_judged or any(map(trees.is_offloaded, jax.tree.leaves(state))):
        grad_norm = guard.global_norm(mean, by_leaf=shares_norm)
    given, state = state, trees.on_device(state, after=grad_norm)

    def applied() -> tuple[dict[str, Any], PyTree, Any]:
        """The fields that an applied step changes, its updates, and whether they move params."""
        updates, opt_state = _ruled(
            state, grads, grad_norm if shares_norm else None, value, loss.weight, extra
        )
        emitted = guard.emitted(opt_state)
        opt_state = number_table.hoist_like(opt_state, state.numbers)
        if difference := trees.first_difference(opt_state, state.opt_state, "opt_state"):
            raise RuleError(f"optimizer state {difference}. The rule changes it from call to call.")
        if (policy := state.plan.precision) is not None:
            opt_state = policy.rounded_moments(opt_state, state.opt_state, state.key, state.calls)
        clock = guard.count(state.clock, emitted)
        new = dataclasses.replace(state, clock=clock, opt_state=opt_state, model_state=model_state)
        new = _with_params(new, optax.apply_updates(base(state), updates))
        new = _averaged(new)
        new = _with_unmoved(state, new, thawed, emitted)
        if (replaced := loss.overwritten) is not None:
            new = dataclasses.replace(new, params=with_rest(new, trained_part(new), replaced))
        return _changed_fields(new, state), updates, emitted

    def judged_late() -> tuple[Any, ...]:
        """The fields, whether they move params, the verdict and the norm of the update."""
        fields, updates, emitted = applied()
        verdict = update_norm = None
        if is_judged or norms == "update":
            update_norm = _update_norm(fields, _without_frozen(updates, thawed))
        if is_judged:
            verdict = _verdict(state, value, grad_norm, fields, update_norm, loss)
            fields = guard.choose(verdict == 0, fields, _fields_like(fields, state))
        return fields, emitted, verdict, update_norm

    def judged_early() -> tuple[Any, ...]:
        """As `judged_late`, but the rule runs after the verdict, and nothing has the norm."""
        excess = lambda: guard.excess(_without_frozen(applied()[1], thawed))
        norm = None if is_certain is True else guard.unless(is_certain, excess)
        fields = applied()[0] if guard.reports(state.opt_state) else {}
        verdict = _verdict(state, value, grad_norm, fields, norm, loss)
        shapes, _, emits = jax.eval_shape(applied)
        old = _fields_like(shapes, state), None if emits is None else jnp.bool_(False)
        # XLA fuses the end of a gradient that replaces its leaf into a select, not into a cond.
        decide = guard.decide if loss.overwritten is None else guard.select
        return *decide(verdict == 0, lambda: applied()[::2], old), verdict, None

    is_certain: Any = None
    if is_judged and norms != "update" and trees.is_tracing():
        is_certain = certainty(state, grads, loss.weight)[0]
    if is_certain is None:
        fields, emitted, verdict, update_norm = judged_late()
    else:
        applied = jax.jit(applied)  # It is traced once, although several branches call it.
        late = lambda: (*judged_late()[:3], None)
        either = lambda: guard.early_or_late(judged_early, late, grads)
        fields, emitted, verdict, update_norm = judged_early() if is_certain is True else either()
    new = _recorded(state, _with_fields(state, fields), verdict, emitted, loss)
    shown = grad_norm if norms else None, update_norm if norms == "update" else None
    new = trees.offloaded_like(new, given)
    return new, _info(state, loss, value, shown, guard.with_gathered(verdict, emitted))


def _changed_fields(new: TrainState, old: TrainState) -> dict[str, Any]:
    """The fields that an applied step alone changes, of params the part that moves."""
    moving = (f.name for f in dataclasses.fields(new) if f.metadata.get("moves") == "step")
    fields = {name: getattr(new, name) for name in moving if name != "params"}
    fields = {name: x for name, x in fields.items() if x is not getattr(old, name)}
    return {**fields, "params": split(new)[0][0]}


def _fields_like(fields: Extra, state: TrainState) -> dict[str, Any]:
    """The same fields of another state."""
    rest = {name: getattr(state, name) for name in fields if name != "params"}
    return {**rest, "params": split(state)[0][0]}


def _with_fields(state: TrainState, fields: Extra) -> TrainState:
    """The state with these fields."""
    params = with_part(fields["params"], state.params, state.plan.moving)
    return dataclasses.replace(state, **{**fields, "params": params})


def _update_norm(fields: Extra, updates: PyTree) -> jax.Array:
    """The norm of the updates, infinite if they make a float16 parameter infinite."""
    norm = guard.global_norm(updates)
    small = [x for x in jax.tree.leaves(fields["params"]) if x.dtype == jnp.float16]
    overflows = ~jnp.isfinite(guard.global_norm(small)) & jnp.isfinite(norm)
    return jnp.where(overflows, jnp.inf, norm) if small else norm


def _verdict(
    state: TrainState, value: Any, grad_norm: Any, fields: Extra, update_norm: Any, loss: Loss
) -> jax.Array:
    if loss.overwritten is not None:  # It is in no norm.
        norm = guard.global_norm(loss.overwritten)
        update_norm = norm if update_norm is None else update_norm + norm
    opt_state = fields.get("opt_state", ())
    return guard.judge(value, grad_norm, state.calls, opt_state, update_norm)


def _info(
    state: TrainState, loss: Loss, value: Any, norms: tuple[Any, Any], verdict: Scalar
) -> StepInfo:
    scale, numbers = state.loss_scale, state.numbers
    mean: Any = None if value is None else jnp.asarray(value, jnp.float32)
    return StepInfo(
        mean,
        loss.weight,
        *norms,
        verdict,
        metrics={name: m.compute() for name, m in loss.metrics.items()},
        dropped=None if loss.dropped is None else jnp.sum(loss.dropped),
        loss_scale=None if scale is None else own(scale.scale),  # a step may donate the state's
        noise_scale=loss.noise_scale,
        step=state.step if numbers is not None and numbers.scheduled else None,
        numbers=numbers,
    )


def _fitting(state: TrainState, grads: PyTree, loss: Loss) -> tuple[PyTree, Loss]:
    """The gradients in the structure of `trainable(state)`, given so or for the full tree."""
    params, plan, structure = trained_part(state), state.plan, jax.tree.structure(grads)
    if structure != jax.tree.structure(params):
        if not plan.selected or structure != jax.tree.structure(state.params):
            raise _errors().other_tree(grads, params)
        if plan.overwritten is not None:
            new, old = (trees.partition(x, plan.overwritten)[0] for x in (grads, state.params))
            checks.check_like("grads", new, old, "The gradient of such a leaf is its next value.")
            new = trees.cast_like(jax.tree.map(own, new), old)
            loss = dataclasses.replace(loss, overwritten=new)
        grads = trees.partition(grads, plan.selected)[0]
    rows = _rows_in(grads, params)
    for i, (g, p) in enumerate(zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True)):
        shape = (*rows, *np.shape(p))
        fits = trees.is_inexact(g) and np.shape(g) == shape and not trees.is_gone(g)
        fits = fits and checks.dtype_fault(trees.dtype_of(g)) is None
        if not fits or (jnp.iscomplexobj(g) and not jnp.iscomplexobj(p)):
            raise _errors().wrong_gradient(grads, i, p)
    return grads, loss


def _rows_in(grads: PyTree, params: PyTree) -> tuple[int, ...]:
    """`(rows,)` for the gradients of rows (`per_example=True`), else ()."""
    g, p = jax.tree.leaves(grads)[0], jax.tree.leaves(params)[0]
    return np.shape(g)[:1] if np.ndim(g) == np.ndim(p) + 1 else ()


def _mean(grads: PyTree, params: PyTree) -> PyTree:
    """The mean of the gradients of rows; others as they are."""
    return jax.tree.map(lambda g: jnp.mean(g, 0), grads) if _rows_in(grads, params) else grads


def _errors() -> Any:
    """The module with the errors of an update, which a step does without as a rule."""
    from tsunax._step import step_errors

    return step_errors


def _without_frozen(grads: PyTree, thawed: list[Any] | None) -> PyTree:
    """The gradients with zeros for frozen leaves, which count in no norm."""
    if thawed is None:
        return grads
    return guard.choose(thawed, grads, jax.tree.map(jnp.zeros_like, grads))


def _ruled(
    state: TrainState, grads: PyTree, grad_norm: Maybe, value: Maybe, weight: Scalar, extra: Extra
) -> tuple[PyTree, PyTree]:
    """The updates and the new state of the rule."""
    params, policy, opt_state = base(state), state.plan.precision, state.opt_state
    if state.masters is not None or (policy is not None and policy.stochastic):
        grads = trees.cast_like(grads, params)
    mean = _mean(grads, params)
    # JAX's own gradient, because optax's line searches compare it with that of `value_fn`
    given: dict[str, Any] = {"grad": trees.conjugated(mean), "step": state.step, "weight": weight}
    given |= ({} if value is None else {"value": value}) | extra
    given |= {} if grad_norm is None else {"grad_norm": grad_norm}
    for name in checks.SEARCHES:
        if callable(given.get(name)):
            given[name] = checks.accepting(given[name], given)
    opt_state = opt_state if policy is None else policy.wide_moments(opt_state)
    opt_state = number_table.lower(opt_state, state.numbers, state.step)
    update = lambda grads: state.plan.update(grads, opt_state, params, **given)
    traced = lambda grads: (opt_state, *update(grads))
    lacks_rows = lambda: mean is grads and _errors().without_rows(traced, params)
    try:
        updates, new = update(grads)
    except Exception as error:
        if lacks := _errors().lacking(error, given) or lacks_rows():
            raise lacks from error
        raise
    for i, (u, p) in enumerate(zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True)):
        if np.shape(u) != np.shape(p):
            raise lacks_rows() or _errors().other_shape(updates, i, p, mean is not grads)
    if mean is not grads:
        _errors().check_no_rows(new, opt_state)
    return updates, new


def _with_params(state: TrainState, seen: PyTree) -> TrainState:
    """The state with new trained params, rounded as it stores them."""
    policy = state.plan.precision
    if state.masters is not None:
        trained = trees.cast_like(seen, trained_part(state))
        return dataclasses.replace(state, params=with_rest(state, trained), masters=seen)
    if policy is not None and policy.stochastic:
        seen = policy.rounded(seen, state.key, state.calls)
    return dataclasses.replace(state, params=with_rest(state, seen))


def _averaged(state: TrainState) -> TrainState:
    if not (found := averages_of(state)):
        return state
    seen = trained_part(state) if state.masters is None else state.masters
    moved = {name: average.moved(seen, state.step) for name, average in found.items()}
    return dataclasses.replace(state, **moved)


def _with_unmoved(old: TrainState, new: TrainState, thawed: Any, emitted: Maybe) -> TrainState:
    """`new` with the frozen leaves of `old`, and all its params if the call only gathered.

    The declarations of the fields say which leaves belong to params.
    """
    if thawed is None and emitted is None:
        return new
    from tsunax.rules import accumulation, leaf_owners

    moves: Any = True if emitted is None else emitted  # a call that only gathers moves no parameter
    leaves = [moves & on for on in thawed or [True] * len(jax.tree.leaves(trained_part(old)))]
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(old):
        now, before, like = getattr(new, f.name), getattr(old, f.name), f.metadata["like"]
        if f.metadata["moves"] != "step" or now is before:
            continue
        if like == "params":
            part = guard.choose(leaves, trained_part(new), trained_part(old))
            fields[f.name] = with_rest(old, part)
        elif like in ("trained", "average"):
            # beside the leaves an average has a count, which goes on if anything may move
            rest = [moves] * (len(jax.tree.leaves(now)) - len(leaves))
            fields[f.name] = guard.choose([*leaves, *rest], now, before)
        elif like == "rule" and thawed is not None:
            owners = leaf_owners.owners_of(old.plan.init, before, old.numbers, base(old))
            pairs = zip(owners, accumulation.in_sums(now), strict=True)
            kept = [True if o is None or is_sum else thawed[o] for o, is_sum in pairs]
            fields[f.name] = guard.choose(kept, now, before)
    return dataclasses.replace(new, **fields)


def _recorded(
    old: TrainState, new: TrainState, verdict: Any, emitted: Any, loss: Loss
) -> TrainState:
    """`new` with what the guard records of every call, applied or not: counts and loss scale."""
    new = dataclasses.replace(new, clock=guard.count(old.clock, emitted, verdict))
    if verdict is None or old.loss_scale is None:
        return new
    applied = verdict == 0 if emitted is None else (verdict == 0) & emitted
    overflowed = guard.overflowed(verdict)
    if loss.weight is not None:  # a mean over nothing is NaN, and no overflow
        overflowed &= loss.weight != 0
    if loss.dropped is not None:  # what was dropped instead
        overflowed |= jnp.any(loss.dropped != 0)
    scale = old.loss_scale.grown(applied & ~overflowed, overflowed)
    return dataclasses.replace(new, loss_scale=scale)
