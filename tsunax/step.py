"""One training step, in the order of its formula.

    step(state, batch)  =  update(state, grads, loss=loss)   where  loss, grads = value_and_grad(loss_fn)(state, batch)

    loss_fn -> loss, grads -> frozen leaves cut out -> verdict -> rule -> params' -> (state', info)

All of it is one compiled program (`program.py`). What is carried is in `state.py`; who calls it is up to you.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tsunax import _axes, _checks, _hoist, _place, _tree, _where, accumulation, guard
from tsunax._dataflow import multiplied
from tsunax._loss import Loss, as_loss, check_scalar
from tsunax._loss_fn import LossFn, check_noted, noting
from tsunax._row_mixing import warn_of_mixed_rows
from tsunax.errors import LossError, RuleError, StateError, WrongTypeError, message
from tsunax.precision import cast_like, conjugated, round_stochastically
from tsunax.state import (
    TrainState,
    base,
    check_flags,
    check_state,
    in_precision,
    joined,
    moving_part,
    trained_part,
    with_rest,
)


def value_and_grad(
    loss_fn: Callable,
    *,
    accumulate: int = 1,
    remat: Any = None,
    on_nonfinite: str = "skip",
    axis_name: Any = None,
) -> Callable:
    """The first half of a step: `f(state, batch, *, at=None, **extra) -> (Loss, grads)`.

    In plain JAX: `jax.value_and_grad(loss_fn)(state.params, batch)`, restricted to the leaves that are trained, in
    the precision of the state, over `accumulate` micro-batches. `grads` has the structure of `trainable(state)`.
    `at=` evaluates at other trained parameters (SAM, line searches). The other arguments are those of `train_step`;
    of the policies for what is not finite only "drop" is for this half. Gradients of complex leaves are
    conjugated, so that `z - rate * g` goes downhill, as in PyTorch: JAX's own do not.

    Raises LossError, before anything is compiled, for a loss_fn that cannot be used or that no trained leaf moves;
    see `train_step`.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> loss, grads = value_and_grad(lambda params, x: jnp.sum(params["w"] * x))(state, jnp.array([3.0, 4.0]))
    >>> float(loss.compute()), grads["w"]
    (11.0, Array([3., 4.], dtype=float32))
    """
    return gradient_of(loss_fn, accumulate, remat, on_nonfinite, "value_and_grad()", axis_name)


def gradient_of(
    loss_fn: Callable, accumulate: int, remat: Any, on_nonfinite: str, where: str, axis_name: Any = None
) -> Callable:
    """`value_and_grad` of `where`, which the errors name."""
    fn, name = LossFn.of(loss_fn, where), _tree.describe_call(loss_fn)
    _checks.check_count(accumulate, where, "accumulate")
    _check_policy(on_nonfinite, where)
    checkpoint, given = _checkpoint(remat, where), _axes.as_axes(axis_name, where)

    def f(state: TrainState, batch, *, at=None, **extra):
        check_state(state, "value_and_grad()", batch)
        plan, now = state.plan, moving_part(state)
        if at is not None:
            _checks.check_like("(at=)", at, now, "It has the structure of ts.trainable(state).")
        axes = _axes.around(given, where)
        keywords = fn.keywords(state, batch, extra, train=True)
        if "key" in keywords and "key" not in extra:
            keywords["key"] = _axes.own_key(keywords["key"], axes)
        here = _axes.vary(now if at is None else at, axes)

        def objective(part, batch, keywords):
            params = joined(part, state.params, plan.selected)
            return objective_of(fn, state, batch, keywords)(params)

        def gradient(batch, keywords):
            found = []

            def of_part(part):
                mean, loss = objective(part, batch, keywords)
                return noting(mean, found), loss

            (_, loss), grads = jax.value_and_grad(checkpoint(of_part), has_aux=True)(here)
            check_noted(found, fn)
            # jax.checkpoint hands constants out in a class of its own (jax 0.7)
            loss = jax.tree.map(lambda x: x if _tree.is_array(x) else np.asarray(x, _tree.dtype_of(x)), loss)
            return loss, plan.apart(grads)

        if accumulate == 1:
            loss, (grads, new) = gradient(batch, keywords)
        else:
            like, drop = (base(state), plan.apart(now)[1]), on_nonfinite == "drop"
            run = functools.partial(accumulation.over_micro_batches, drop=drop, axes=axes)
            loss, (grads, new) = run(gradient, accumulate, batch, keywords, like)
            warn_of_mixed_rows(objective, here, batch, keywords, accumulate, name)
        if axes:
            loss, (grads, new) = accumulation.over_devices(loss, (grads, new), axes)
        return loss, _together(conjugated(_unscaled(state, grads)), new)

    return f


def objective_of(fn: LossFn, state: TrainState, batch, keywords) -> Callable:
    """`params -> (scaled mean loss, Loss)`."""

    def objective(params):
        loss = fn(*seen_by(fn, state, params, batch, keywords), keywords)
        mean = loss.compute()
        if state.loss_scale is not None:
            mean = mean.astype(jnp.float32) * state.loss_scale.scale
        return mean, loss

    return objective


def _together(trained, overwritten):
    return trained if overwritten is None else _tree.merge(trained, overwritten)


def seen_by(fn: LossFn, state: TrainState, params, batch, keywords, train=True) -> tuple[Any, Any]:
    """What a loss function sees of params and batch."""
    policy = state.plan.precision
    params = _place.collected(in_precision(state, params, train=train))
    if policy is None:
        return params, batch
    inputs = lambda batch: multiplied(lambda *given: fn(*given, keywords), params, batch)
    return params, policy.batch_to_compute(batch, train, inputs)


def _unscaled(state: TrainState, grads):
    if state.loss_scale is None:
        return grads
    unscale = lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)) / state.loss_scale.scale
    return jax.tree.map(lambda g, x: unscale(g).astype(x.dtype), grads, base(state))


class StepInfo(NamedTuple):
    """What an observer may want to know of one step. Reading a value waits for the device; having it does not."""

    loss: Any  # f32, the mean
    weight: Any  # f32: rows or tokens behind it
    grad_norm: Any  # f32, L2 over what is trained and not frozen, before the rule. None without norms
    update_norm: Any  # f32, L2 of what the rule would add to params. None without norms
    verdict: Any  # int32: 0 taken, -1 gathered, else what was not finite (`guard`). None where nobody judged
    metrics: Any  # {name: f32, or what the metric's compute() gives}
    dropped: Any  # f32: the weight of micro-batches that were left out, under "drop"
    loss_scale: Any  # f32: the one that it used, where the state has one
    step: Any  # int32: the clock that the schedules saw, where the rule has any
    numbers: Any  # the live hyperparameters that it used

    @property
    def applied(self):
        """Whether the step moved the parameters: it was neither rejected nor only gathered by `rules.accumulate`."""
        return np.ones(np.shape(self.loss), bool) if self.verdict is None else self.verdict == 0

    def __repr__(self) -> str:
        parts = {"loss": self.loss, "weight": self.weight, "grad_norm": self.grad_norm}
        parts |= {"update_norm": self.update_norm, "applied": self.applied, **(self.metrics or {}), **self.hyperparams}
        short = lambda x: f"{float(x):.6g}" if _tree.is_array(x) and not _tree.is_traced(x) and not np.ndim(x) else x
        shown = (f"{k}={bool(v) if k == 'applied' and not np.ndim(v) else short(v)}" for k, v in parts.items())
        return f"StepInfo({', '.join(shown)})"

    @property
    def hyperparams(self) -> dict[str, Any]:
        """The live hyperparameters that the step used, by flat name."""
        return {} if self.numbers is None else self.numbers.named(self.step)


def update(
    state: TrainState,
    grads,
    *,
    loss=None,
    model_state=None,
    on_nonfinite: str = "skip",
    norms: bool = True,
    **extra,
) -> tuple[TrainState, StepInfo]:
    """The second half of a step: verdict, rule, frozen leaves, clock.

    In plain JAX: `updates, opt_state = rule.update(grads, opt_state, params)` and
    `params = optax.apply_updates(params, updates)`. Pure: call it inside your own jit.

    Args:
      grads: of the structure of `trainable(state)`, or of the full tree. They are used as they are:
        `value_and_grad` conjugates those of complex leaves, `jax.grad` does not.
      loss: the `Loss` or scalar that they are the gradient of: part of the verdict, and `value` for the rules
        that ask for it.
      model_state: what replaces `state.model_state` if the step is applied; by default the one in `loss`.
      on_nonfinite: what to do where the loss, a gradient or a rule's report is not finite. "skip" rejects the
        step: every array of the state but `calls` stays bit-identical. "raise" rejects too, and a compiled step
        then waits and raises. "ignore" applies it.
      norms: whether info has `grad_norm` and `update_norm`.
      extra: goes to the rule, if it takes extra arguments.

    Raises StateError if grads do not fit the state, naming the first path.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> state, info = update(state, {"w": jnp.array([3.0, 4.0])})
    >>> state.params["w"], float(info.grad_norm), bool(info.applied)
    (Array([0.7, 1.6], dtype=float32), 5.0, True)
    """
    check_state(state, "update()", grads)
    _check_policy(on_nonfinite, "update()")
    check_flags("update()", norms=norms)
    if state.loss_scale is not None and on_nonfinite == "ignore":
        fix = "A loss scale lives from rejected steps."
        raise StateError(message("on_nonfinite", "update()", "'ignore'", "another policy under a loss scale", fix))
    params = trained_part(state)
    grads, overwriting = state.plan.apart(_fitting(state, grads, moving_part(state)))
    loss = _finished(loss)
    model_state = _first(model_state, loss.model_state)
    if model_state is not None:
        accumulation.check_model_state(model_state, state.model_state)
    value = None if loss.total is None else loss.compute()

    thawed, thawed_too = thawed_flags(state)
    grads = _without_frozen(grads, thawed)
    grad_norm = _tree.global_norm(grads) if norms or on_nonfinite != "ignore" else None
    seen = base(state)
    grads = grads if seen is params else cast_like(grads, seen)
    # JAX's own gradient, because optax's line searches compare it with that of `value_fn`
    given = {"grad": conjugated(grads), "step": state.step, "weight": loss.weight}
    given |= ({} if value is None else {"value": value}) | extra
    opt_state = _hoist.lower(state.opt_state, state.numbers, state.step)
    updates, opt_state = _ruled(state.plan.update, grads, opt_state, seen, given)
    opt_state = _hoist.hoist_like(opt_state, state.numbers)
    if difference := _tree.first_difference(opt_state, state.opt_state, "opt_state"):
        raise RuleError(f"optimizer state {difference}. The rule changes it from call to call.")
    verdict = None if on_nonfinite == "ignore" else guard.judge(value, grad_norm, state.calls, opt_state)
    emitted = accumulation.emitted(opt_state)
    clock, model_state = guard.count(state.clock, verdict, emitted), _first(model_state, state.model_state)
    new = dataclasses.replace(state, clock=clock, params=params, opt_state=opt_state, model_state=model_state)
    new = _with_params(new, optax.apply_updates(seen, updates))
    new = _averaged(new)
    new = _transact(state, new, thawed, verdict, emitted)
    new = _overwritten(new, overwriting, thawed_too, verdict)
    new = _rescaled(new, verdict, emitted, loss)
    info = StepInfo(
        loss=None if value is None else jnp.asarray(value, jnp.float32),
        weight=loss.weight,
        grad_norm=grad_norm if norms else None,
        update_norm=_tree.global_norm(_without_frozen(updates, thawed)) if norms else None,
        verdict=guard.with_gathered(verdict, emitted),
        metrics={name: m.compute() for name, m in loss.metrics.items()},
        dropped=None if loss.dropped is None else jnp.sum(loss.dropped),
        loss_scale=None if state.loss_scale is None else state.loss_scale.scale,
        step=state.step if state.numbers is not None and state.numbers.scheduled else None,
        numbers=state.numbers,
    )
    return new, info


def flush(state: TrainState) -> TrainState:
    """Apply what an unfinished window of `rules.accumulate` holds, at the end of an epoch or a run.

    It is divided by the weight that it has, not by that of a full window. A state whose windows are empty stays as
    it is, but for `calls`.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.accumulate(ts.rules.sgd(0.1), every=4), {"w": jnp.zeros(2)})
    >>> state, _ = ts.update(state, {"w": jnp.ones(2)})
    >>> ts.flush(state).params["w"]
    Array([-0.1, -0.1], dtype=float32)
    """
    check_state(state, "flush()")
    if accumulation.any_emitted(state.opt_state) is None:
        return state
    if (home := _place.home_on_mesh(state)) is not None:  # what it computes stays where it was
        return jax.jit(_flushed, out_shardings=home.layout)(_place.settled(state, home.layout))
    return _flushed(state)


def _flushed(state: TrainState) -> TrainState:
    nothing = jax.tree.map(jnp.zeros_like, trained_part(state))
    nothing = _together(nothing, state.plan.apart(moving_part(state))[1])
    new, _ = update(state, nothing, weight=0.0, flush=True)
    old = dataclasses.replace(state, clock=state.clock.at[..., 1].add(1))
    judged = accumulation.any_emitted(new.opt_state) | (new.rejected != state.rejected)
    new = guard.choose(judged, new, old)
    return dataclasses.replace(new, loss_scale=state.loss_scale)


def _fitting(state: TrainState, grads, params):
    """Gradients as a tree like `params`, whether they came so or for the full tree. Raises StateError."""
    if jax.tree.structure(grads) == jax.tree.structure(params):
        pass
    elif state.plan.selected and jax.tree.structure(grads) == jax.tree.structure(state.params):
        grads = _tree.partition(grads, state.plan.selected)[0]
    else:
        fix = "Gradients have the structure of ts.trainable(state)."
        if isinstance(grads, tuple) and any(isinstance(part, Loss) for part in grads):
            fix = "Take it apart: loss, grads = ts.value_and_grad(loss_fn)(state, batch)."
        raise StateError(f"gradient {_tree.first_difference(grads, params, 'grads')}. {fix}")
    for (path, g), p in zip(jax.tree_util.tree_flatten_with_path(grads)[0], jax.tree.leaves(params), strict=True):
        got, expected = _tree.dtype_of(g), _tree.dtype_of(p)
        faults = (
            (not _tree.is_inexact(g), _tree.describe(g), "floats"),
            (np.shape(g) != np.shape(p), f"shape {np.shape(g)}", f"{np.shape(p)}, as in params"),
            (_is_complex(got) and not _is_complex(expected), f"dtype {got}", f"{expected}, as in params"),
            (_tree.is_gone(g), "a deleted array", "a live one"),
        )
        for fault, got, expected in faults:
            if fault:
                raise StateError(message("gradient", _tree.access_str("grads", path), got, expected))
    return grads


def _is_complex(dtype) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, np.complexfloating)


def _finished(loss) -> Loss:
    """The loss that a user gave to `update`, as `value_and_grad` would give it."""
    if not isinstance(loss, Loss):
        if loss is not None:
            check_scalar("loss", "update()", loss)
        return Loss(loss, mean_value=loss)
    if loss.weight is None and loss.mean_value is None:
        raise LossError(
            message("loss", "update()", "a Loss without a weight", "one with", "Give ts.Loss(total, weight).")
        )
    if all(hasattr(m, "compute") for m in loss.metrics.values()) and (
        loss.weight is None or _tree.is_array(loss.weight)
    ):
        return loss
    return dataclasses.replace(as_loss(loss, 1), **({"weight": None} if loss.weight is None else {}))


def thawed_flags(state: TrainState) -> tuple[Any, Any]:
    """One scalar bool for each leaf that the rule trains, and for each that is overwritten: false where it is frozen.

    None where nothing can be.
    """
    if state.frozen is None:
        return None, None
    leaves, treedef = jax.tree.flatten(moving_part(state))
    none = lambda words: [words[0] == 0] * len(leaves)
    some = lambda words: [(words[k // 32] >> np.uint32(k % 32)) & 1 == 0 for k in range(len(leaves))]
    # On a CPU behind a cond, which makes a flag an operand of the kernels of its leaf. Fused into them its place is a
    # constant, and no two leaves have a kernel in common. Elsewhere a cond may wait for the host.
    apart = lambda words: jax.lax.cond(jnp.any(words != 0), some, none, words)
    flags = jax.lax.platform_dependent(state.frozen, cpu=apart, default=some)
    trained, overwritten = map(jax.tree.leaves, state.plan.apart(treedef.unflatten(flags)))
    return trained, overwritten


def _without_frozen(grads, thawed):
    """Zero gradients where frozen, so that norms and clipping are over what is trained."""
    if thawed is None:
        return grads
    leaves, treedef = jax.tree.flatten(grads)
    return treedef.unflatten([jnp.where(on, g, jnp.zeros_like(g)) for on, g in zip(thawed, leaves, strict=True)])


def _ruled(rule: Callable, grads, opt_state, params, given) -> tuple[Any, Any]:
    """What the rule makes of the gradients. Raises RuleError for one that wants the loss, or returns other shapes."""
    try:
        updates, opt_state = rule(grads, opt_state, params, **given)
    except TypeError as error:
        if "value" in given or "'value" not in str(error):
            raise
        fix = "Give update(state, grads, loss=loss); train_step gives it by itself."
        raise RuleError(message("loss", "update()", "None", "the loss, which this rule asks for", fix)) from error
    for (path, u), p in zip(jax.tree_util.tree_flatten_with_path(updates)[0], jax.tree.leaves(params), strict=True):
        if np.shape(u) != np.shape(p):
            where = _tree.access_str("params", path)
            raise RuleError(message("update", where, f"shape {np.shape(u)}", f"{np.shape(p)}", "The rule changes it."))
    return updates, opt_state


def _with_params(state: TrainState, seen) -> TrainState:
    """The state with new trained params, rounded to the precision in which it stores them."""
    policy = state.plan.precision
    if state.masters is not None:
        params = cast_like(seen, state.params)
        return dataclasses.replace(state, params=params, masters=seen)
    if policy is not None and policy.stochastic:
        key = jax.random.fold_in(jax.random.fold_in(state.key, state.calls), _ROUNDING)
        return dataclasses.replace(state, params=round_stochastically(seen, key))
    return dataclasses.replace(state, params=seen)


_ROUNDING = 0x726E64  # keys of this step are folded with the index of a micro-batch; this one is none


def _averaged(state: TrainState) -> TrainState:
    if state.average is None:
        return state
    seen = state.params if state.masters is None else state.masters
    return dataclasses.replace(state, average=state.average.moved(seen, state.step))


def _rescaled(state: TrainState, verdict, emitted, loss: Loss) -> TrainState:
    """The guard's own record: it moves whether the step was applied or not."""
    if state.loss_scale is None:
        return state
    applied = verdict == 0 if emitted is None else (verdict == 0) & emitted
    overflowed = guard.overflowed(verdict)
    if loss.weight is not None:  # a mean over nothing is NaN, and no overflow
        overflowed &= loss.weight != 0
    if loss.dropped is not None:  # what was dropped instead
        overflowed |= jnp.any(loss.dropped != 0)
    return dataclasses.replace(state, loss_scale=state.loss_scale.grown(applied & ~overflowed, overflowed))


def _transact(old: TrainState, new: TrainState, thawed, verdict, emitted) -> TrainState:
    """`new` where the step is applied and the leaf is not frozen, else `old`: one select per leaf."""
    params = trained_part(old)
    if verdict is not None or thawed is not None or emitted is not None:
        n = len(jax.tree.leaves(params))
        taken = jnp.bool_(True) if verdict is None else verdict == 0
        moved = taken if emitted is None else taken & emitted  # a call that only gathers moves no parameter
        on = thawed or [True] * n
        owners = [None] * len(jax.tree.leaves(new.opt_state))
        if thawed is not None:
            owners = _hoist.owners_of(old.plan.init, old.opt_state, old.numbers, base(old))
        leaves = [moved & flag for flag in on]
        sums = accumulation.in_sums(new.opt_state) if thawed is not None else [False] * len(owners)
        kept = [taken if o is None or s else taken & on[o] for o, s in zip(owners, sums, strict=True)]
        choose = lambda flags, name: guard.choose(flags, getattr(new, name), getattr(old, name))
        new = dataclasses.replace(
            new,
            params=guard.choose(leaves, new.params, params),
            opt_state=choose(kept, "opt_state"),
            model_state=choose(taken, "model_state"),
            masters=None if old.masters is None else choose(leaves, "masters"),
            average=None if old.average is None else choose([*leaves, moved, True], "average"),
        )
    return dataclasses.replace(new, params=with_rest(old, new.params))


def _overwritten(state: TrainState, new, thawed, verdict) -> TrainState:
    """The leaves whose gradient replaces them. Calls that only gather replace them too, as they do model state."""
    if new is None:
        return state
    taken = jnp.bool_(True) if verdict is None else verdict == 0
    old = state.plan.apart(moving_part(state))[1]
    on = [taken & flag for flag in thawed or [True] * len(jax.tree.leaves(old))]
    return dataclasses.replace(state, params=joined(guard.choose(on, new, old), state.params, state.plan.replaced))


def _first(*options):
    return next((x for x in options if x is not None), None)


def _check_policy(on_nonfinite, where: str) -> None:
    if not _checks.is_one_of(on_nonfinite, guard.POLICIES):
        expected = " or ".join(map(repr, guard.POLICIES))
        raise WrongTypeError(message("on_nonfinite", where, _tree.describe(on_nonfinite), expected))


def _checkpoint(remat: Any, where: str) -> Callable:
    """`jax.checkpoint` under a policy, or what leaves a function as it is."""
    if isinstance(remat, str):
        known = [name for name in dir(jax.checkpoint_policies) if not name.startswith(("_", "save_", "offload"))]
        if remat not in known:
            raise WrongTypeError(_where.unknown("remat", where, remat, known))
        remat = getattr(jax.checkpoint_policies, remat)
    if remat is None or remat is False:
        return lambda f: f
    if remat is not True and not callable(remat):
        expected = "True, or a policy of jax.checkpoint_policies, or its name"
        raise WrongTypeError(message("remat", where, _tree.describe(remat), expected))
    policy: Any = None if remat is True else remat
    return functools.partial(jax.checkpoint, policy=policy)
