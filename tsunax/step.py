"""One training step, in the order of its formula.

    step(state, batch)  =  update(state, grads, loss=loss)   where  loss, grads = value_and_grad(loss_fn)(state, batch)

    loss_fn -> loss, grads -> rule, application, average: the state in which everything moved
            -> verdict -> that state, or the old one; the guard's record moves in both

All of it is one compiled program (`program.py`). What is carried is in `state.py`; who calls it is
up to you.
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

from tsunax import guard, microbatches
from tsunax._core import axes as _axes
from tsunax._core import checks, patterns, placement, trees
from tsunax._core.dataflow import multiplied
from tsunax._core.norms import global_norm
from tsunax._step import choice
from tsunax._step.loss_fn import LossFn, check_noted, noting
from tsunax._step.row_mixing import warn_of_mixed_rows
from tsunax.errors import LossError, RuleError, StateError, WrongTypeError, message
from tsunax.loss import Loss, as_loss, check_scalar
from tsunax.precision import cast_like, conjugated, round_stochastically
from tsunax.rules import accumulation, live_rules, number_table
from tsunax.state import (
    TrainState,
    base,
    check_state,
    in_precision,
    overwritten_part,
    own,
    trained_part,
    with_overwritten,
    with_rest,
)


@patterns.suggests_names
def value_and_grad(
    loss_fn: Callable,
    *,
    accumulate: int = 1,
    remat: Any = None,
    on_nonfinite: str = "skip",
    axis_name: Any = None,
) -> Callable:
    """The first half of a step: `f(state, batch, *, at=None, **extra) -> (Loss, grads)`.

    In plain JAX: `jax.value_and_grad(loss_fn)(state.params, batch)`, restricted to the leaves that
    are trained, in the precision of the state, over `accumulate` micro-batches. `grads` has the
    structure of `trainable(state)`. `at=` evaluates at other trained parameters (SAM, line
    searches). The other arguments are those of `train_step`; of the policies for what is not finite
    only "drop" is for this half. Gradients of complex leaves are conjugated, so that `z - rate * g`
    goes downhill, as in PyTorch: JAX's own do not.

    Raises LossError, before anything is compiled, for a loss_fn that cannot be used or that no
    trained leaf moves; see `train_step`.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> loss, grads = value_and_grad(lambda params, x: jnp.sum(params["w"] * x))(state, jnp.array([3.0, 4.0]))
    >>> float(loss.compute()), grads["w"]
    (11.0, Array([3., 4.], dtype=float32))
    """
    return gradient_of(loss_fn, accumulate, remat, on_nonfinite, "value_and_grad()", axis_name)


def gradient_of(
    loss_fn: Callable,
    accumulate: int,
    remat: Any,
    on_nonfinite: str,
    where: str,
    axis_name: Any = None,
) -> Callable:
    """`value_and_grad` of `where`, which the errors name."""
    fn, name = LossFn.of(loss_fn, where), trees.describe_call(loss_fn)
    checks.check_count(accumulate, where, "accumulate")
    _check_policy(on_nonfinite, where)
    checkpoint, given = _checkpoint(remat, where), _axes.as_axes(axis_name, where)
    last: dict[Any, list] = {}

    def f(state: TrainState, batch, *, at=None, **extra):
        check_state(state, "value_and_grad()", batch)
        now = trained_part(state)
        if at is not None:
            checks.check_like("(at=)", at, now, "It has the structure of ts.trainable(state).")
        axes = _axes.around(given, where)
        keywords = fn.keywords(state, batch, extra, train=True)
        if "key" in keywords and "key" not in extra:
            keywords["key"] = _axes.own_key(keywords["key"], axes)
        here, scales = _axes.vary((now if at is None else at, overwritten_part(state)), axes)
        inputs = _kept_for(last, state, batch, keywords)

        def objective(trained, batch, keywords, scales=scales):
            params = with_overwritten(state, with_rest(state, trained), scales)
            return objective_of(fn, state, batch, keywords, inputs)(params)

        def gradient(batch, keywords):
            found = []

            def of_parts(trained, scales):
                mean, loss = objective(trained, batch, keywords, scales)
                return noting(mean, found), loss

            of_parts = checkpoint(of_parts)
            (_, loss), (grads, new) = jax.value_and_grad(of_parts, argnums=(0, 1), has_aux=True)(
                here, scales
            )
            check_noted(found, fn)
            # jax.checkpoint hands constants out in a class of its own (jax 0.7)
            loss = jax.tree.map(
                lambda x: x if trees.is_array(x) else np.asarray(x, trees.dtype_of(x)), loss
            )
            return dataclasses.replace(loss, overwritten=new), grads

        if accumulate == 1:
            loss, grads = gradient(batch, keywords)
        else:
            run = functools.partial(
                microbatches.over_micro_batches, drop=on_nonfinite == "drop", axes=axes
            )
            loss, grads = run(gradient, accumulate, batch, keywords, base(state), scales)
            warn_of_mixed_rows(objective, here, batch, keywords, accumulate, name)
        if axes:
            loss, grads = microbatches.over_devices(loss, grads, axes)
        return loss, conjugated(_unscaled(state, grads))

    return f


def _kept_for(last: dict[Any, list], state: TrainState, batch, keywords) -> list:
    """Which leaves of the batch are inputs, found once for all micro-batches, and for calls that
    are alike.

    A call without jit would look for them again each time. `last` has those of the last call alone.
    """
    if state.plan.precision is None:
        return []
    leaves, treedef = jax.tree.flatten((state.params, batch, keywords))
    is_array = lambda x: isinstance(x, jax.Array | np.ndarray)  # the values of others may decide
    kinds = tuple((x.shape, x.dtype) if is_array(x) else (type(x), x) for x in leaves)
    try:
        known = last.get(key := (treedef, kinds, state.plan.precision))
    except TypeError:  # what cannot be hashed
        return []
    if known is None:
        last.clear()
        known = last[key] = []
    return known


def objective_of(
    fn: LossFn, state: TrainState, batch, keywords, inputs: list | None = None
) -> Callable:
    """`params -> (scaled mean loss, Loss)`."""

    def objective(params):
        loss = fn(*seen_by(fn, state, params, batch, keywords, inputs=inputs), keywords)
        mean = loss.compute()
        if state.loss_scale is not None:
            mean = mean.astype(jnp.float32) * state.loss_scale.scale
        return mean, loss

    return objective


def seen_by(
    fn: LossFn, state: TrainState, params, batch, keywords, train=True, inputs: list | None = None
) -> tuple[Any, Any]:
    """What a loss function sees of params and batch.

    `inputs` keeps which leaves of it are inputs.
    """
    policy = state.plan.precision
    params = placement.collected(in_precision(state, params, train=train))
    if policy is None:
        return params, batch
    of = lambda params, batch: fn(params, batch, keywords)
    known = [] if inputs is None else inputs

    def found(batch):
        if not known:
            known.extend(multiplied(of, params, batch))
            policy.warn_of_no_input(batch, *known)
        return known

    return params, policy.batch_to_compute(batch, train, found)


def _unscaled(state: TrainState, grads):
    if state.loss_scale is None:
        return grads
    unscale = lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)) / state.loss_scale.scale
    return jax.tree.map(lambda g, x: unscale(g).astype(x.dtype), grads, base(state))


class StepInfo(NamedTuple):
    """What an observer may want to know of one step. Reading a value waits for the device; having
    it does not.
    """

    loss: Any  # f32, the mean
    weight: Any  # f32: rows or tokens behind it
    grad_norm: (
        Any  # f32, L2 over what is trained and not frozen, before the rule. None without norms
    )
    update_norm: Any  # f32, L2 of what the rule would add to params. None without norms
    # int32: 0 taken, -1 gathered, else what was not finite (`guard`). None where nobody judged
    verdict: Any
    metrics: Any  # {name: f32, or what the metric's compute() gives}
    dropped: Any  # f32: the weight of micro-batches that were left out, under "drop"
    loss_scale: Any  # f32: the one that it used, where the state has one
    step: Any  # int32: the clock that the schedules saw, where the rule has any
    numbers: Any  # the live hyperparameters that it used

    @property
    def applied(self):
        """Whether the step moved the parameters: it was neither rejected nor only gathered by
        `rules.accumulate`.
        """
        return np.ones(np.shape(self.loss), bool) if self.verdict is None else self.verdict == 0

    def __repr__(self) -> str:
        parts = {"loss": self.loss, "weight": self.weight, "grad_norm": self.grad_norm}
        parts |= {
            "update_norm": self.update_norm,
            "applied": self.applied,
            **(self.metrics or {}),
            **self.hyperparams,
        }
        short = lambda x: (
            f"{float(x):.6g}"
            if trees.is_array(x) and not trees.is_traced(x) and not np.ndim(x)
            else x
        )
        shown = (
            f"{k}={bool(v) if k == 'applied' and not np.ndim(v) else short(v)}"
            for k, v in parts.items()
        )
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
      loss: the `Loss` or scalar that they are the gradient of: part of the verdict, and `value` for
        the rules that ask for it.
      model_state: what replaces `state.model_state` if the step is applied; by default the one in
        `loss`.
      on_nonfinite: what to do if the loss, a gradient, what the rule would add to params, or a
        rule's report is not finite. "skip" rejects the step: every array of the state but its
        counts stays bit-identical. "raise" rejects too, and a compiled step then waits and raises.
        "ignore" applies it.
      norms: whether info has `grad_norm` and `update_norm`. The verdict looks at both in any case.
      extra: goes to the rule, if it takes extra arguments.

    Raises StateError if grads do not fit the state, naming the first path, and for a keyword that
    no part of the rule names.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> state, info = update(state, {"w": jnp.array([3.0, 4.0])})
    >>> state.params["w"], float(info.grad_norm), bool(info.applied)
    (Array([0.7, 1.6], dtype=float32), 5.0, True)
    """
    check_state(state, "update()", grads)
    _check_policy(on_nonfinite, "update()")
    checks.check_flags("update()", norms=norms)
    _check_extra(state, extra)
    return moved(state, grads, loss, model_state, on_nonfinite, norms, extra)


def moved(
    state: TrainState, grads, loss, model_state, on_nonfinite: str, norms: bool, extra
) -> tuple[TrainState, StepInfo]:
    """`update`, its arguments checked."""
    if state.loss_scale is not None and on_nonfinite == "ignore":
        fix = "A loss scale lives from rejected steps."
        raise StateError(
            message(
                "on_nonfinite", "update()", "'ignore'", "another policy under a loss scale", fix
            )
        )
    loss = _finished(loss)
    grads, loss = _fitting(state, grads, loss)
    model_state = _first(model_state, loss.model_state)
    if model_state is not None:
        microbatches.check_model_state(model_state, state.model_state)
    value = None if loss.total is None else loss.compute()
    thawed = thawed_flags(state)
    grads = _without_frozen(grads, thawed)
    grad_norm = global_norm(grads) if norms or on_nonfinite != "ignore" else None

    def applied():
        """The state in which everything moved, and what the rule added to params."""
        updates, opt_state = _ruled(state, grads, value, loss.weight, extra)
        emitted = accumulation.emitted(opt_state)
        new = dataclasses.replace(
            state,
            clock=guard.count(state.clock, emitted),
            opt_state=number_table.hoist_like(opt_state, state.numbers),
            model_state=_first(model_state, state.model_state),
        )
        new = _with_params(new, optax.apply_updates(base(state), updates))
        new = _averaged(new)
        new = _kept(state, new, thawed, emitted)
        new = dataclasses.replace(new, params=with_overwritten(state, new.params, loss.overwritten))
        return new, updates, emitted

    (new, updates, emitted), again = choice.candidate(applied, state)
    if difference := trees.first_difference(new.opt_state, state.opt_state, "opt_state"):
        raise RuleError(f"optimizer state {difference}. The rule changes it from call to call.")
    update_norm = (
        global_norm(_without_frozen(updates, thawed)) if norms or on_nonfinite != "ignore" else None
    )
    verdict = None
    if on_nonfinite != "ignore":
        judged: Any = update_norm
        if loss.overwritten is not None:  # it is in no norm
            judged = judged + global_norm(loss.overwritten)
        verdict = guard.judge(value, grad_norm, state.calls, new.opt_state, judged)
        new = choice.between(verdict == 0, new, state, again)
        new = _recorded(state, new, verdict, emitted, loss)
    info = StepInfo(
        loss=None if value is None else jnp.asarray(value, jnp.float32),
        weight=loss.weight,
        grad_norm=grad_norm if norms else None,
        update_norm=update_norm if norms else None,
        verdict=guard.with_gathered(verdict, emitted),
        metrics={name: m.compute() for name, m in loss.metrics.items()},
        dropped=None if loss.dropped is None else jnp.sum(loss.dropped),
        loss_scale=None
        if state.loss_scale is None
        else own(state.loss_scale.scale),  # a step may donate the state's
        step=state.step if state.numbers is not None and state.numbers.scheduled else None,
        numbers=state.numbers,
    )
    return new, info


def windows_flushed(state: TrainState) -> TrainState:
    """`rules.flush`."""
    check_state(state, "flush()")
    if accumulation.any_emitted(state.opt_state) is None:
        return state
    if (home := placement.home_on_mesh(state)) is not None:  # what it computes stays where it was
        return jax.jit(_flushed, out_shardings=home.layout)(placement.settled(state, home.layout))
    return _flushed(state)


def _flushed(state: TrainState) -> TrainState:
    nothing = jax.tree.map(jnp.zeros_like, trained_part(state))
    new, _ = moved(state, nothing, None, None, "skip", True, {"weight": 0.0, "flush": True})
    old = dataclasses.replace(state, clock=state.clock.at[..., 1].add(1))
    judged = accumulation.any_emitted(new.opt_state) | (new.rejected != state.rejected)
    new = guard.choose(judged, new, old)
    return dataclasses.replace(new, loss_scale=state.loss_scale)


def _fitting(state: TrainState, grads, loss: Loss) -> tuple[Any, Loss]:
    """Gradients as a tree like `trainable(state)`, whether they came so or for the full tree.

    Raises StateError.
    """
    params, plan = trained_part(state), state.plan
    if jax.tree.structure(grads) == jax.tree.structure(params):
        pass
    elif plan.selected and jax.tree.structure(grads) == jax.tree.structure(state.params):
        if plan.overwritten is not None:
            new, old = trees.partition(grads, plan.overwritten)[0], overwritten_part(state)
            checks.check_like("grads", new, old, "The gradient of such a leaf is its next value.")
            loss = dataclasses.replace(loss, overwritten=cast_like(jax.tree.map(own, new), old))
        grads = trees.partition(grads, plan.selected)[0]
    else:
        fix = "Gradients have the structure of ts.trainable(state)."
        if isinstance(grads, tuple) and any(isinstance(part, Loss) for part in grads):
            fix = "Take it apart: loss, grads = ts.value_and_grad(loss_fn)(state, batch)."
        raise StateError(f"gradient {trees.first_difference(grads, params, 'grads')}. {fix}")
    for (path, g), p in zip(
        jax.tree_util.tree_flatten_with_path(grads)[0], jax.tree.leaves(params), strict=True
    ):
        got, expected = trees.dtype_of(g), trees.dtype_of(p)
        faults = (
            (not trees.is_inexact(g), trees.describe(g), "floats"),
            (np.shape(g) != np.shape(p), f"shape {np.shape(g)}", f"{np.shape(p)}, as in params"),
            (
                _is_complex(got) and not _is_complex(expected),
                f"dtype {got}",
                f"{expected}, as in params",
            ),
            (trees.is_gone(g), "a deleted array", "a live one"),
        )
        for fault, got, expected in faults:
            if fault:
                raise StateError(
                    message("gradient", trees.access_str("grads", path), got, expected)
                )
    return grads, loss


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
            message(
                "loss",
                "update()",
                "a Loss without a weight",
                "one with",
                "Give ts.Loss(total, weight).",
            )
        )
    if all(hasattr(m, "compute") for m in loss.metrics.values()) and (
        loss.weight is None or trees.is_array(loss.weight)
    ):
        return loss
    return dataclasses.replace(
        as_loss(loss, 1), **({"weight": None} if loss.weight is None else {})
    )


def thawed_flags(state: TrainState) -> list[Any] | None:
    """One scalar bool for each trained leaf, false if it is frozen; None if no leaf can be."""
    if state.frozen is None:
        return None
    n = len(jax.tree.leaves(trained_part(state)))
    none = lambda words: [words[0] == 0] * n
    some = lambda words: [(words[k // 32] >> np.uint32(k % 32)) & 1 == 0 for k in range(n)]
    # On a CPU behind a cond, which makes a flag an operand of the kernels of its leaf. Fused into
    # them its place is a constant, and no two leaves have a kernel in common. Elsewhere a cond may
    # wait for the host.
    apart = lambda words: jax.lax.cond(jnp.any(words != 0), some, none, words)
    return jax.lax.platform_dependent(state.frozen, cpu=apart, default=some)


def _without_frozen(grads, thawed):
    """Zero gradients where frozen, so that norms and clipping are over what is trained."""
    if thawed is None:
        return grads
    leaves, treedef = jax.tree.flatten(grads)
    return treedef.unflatten(
        [jnp.where(on, g, jnp.zeros_like(g)) for on, g in zip(thawed, leaves, strict=True)]
    )


def _ruled(state: TrainState, grads, value, weight, extra) -> tuple[Any, Any]:
    """What the rule makes of the gradients.

    Raises RuleError for an argument that it lacks, and for other shapes.
    """
    params = base(state)
    grads = grads if params is trained_part(state) else cast_like(grads, params)
    # JAX's own gradient, because optax's line searches compare it with that of `value_fn`
    given = {"grad": conjugated(grads), "step": state.step, "weight": weight}
    given |= ({} if value is None else {"value": value}) | extra
    given = {
        k: live_rules.accepting(x, given) if k in live_rules.SEARCHES and callable(x) else x
        for k, x in given.items()
    }
    opt_state = number_table.lower(state.opt_state, state.numbers, state.step)
    try:
        updates, opt_state = state.plan.update(grads, opt_state, params, **given)
    except (TypeError, ValueError) as error:
        if not (lacks := [name for name in live_rules.missing(error) if name not in given]):
            raise
        how = ["loss=loss" if name == "value" else f"{name}=..." for name in lacks]
        fix = f"Give update(state, grads, {', '.join(how)})."
        fix += (
            " train_step gives it by itself." if {*lacks} <= {"value", *live_rules.SEARCHES} else ""
        )
        what = "loss" if "value" in lacks else lacks[0]
        raise RuleError(
            message(what, "update()", "None", f"the {what}, which this rule asks for", fix)
        ) from error
    for (path, u), p in zip(
        jax.tree_util.tree_flatten_with_path(updates)[0], jax.tree.leaves(params), strict=True
    ):
        if np.shape(u) != np.shape(p):
            where = trees.access_str("params", path)
            raise RuleError(
                message(
                    "update",
                    where,
                    f"shape {np.shape(u)}",
                    f"{np.shape(p)}",
                    "The rule changes it.",
                )
            )
    return updates, opt_state


def _with_params(state: TrainState, seen) -> TrainState:
    """The state with new trained params, rounded to the precision in which it stores them."""
    policy = state.plan.precision
    if state.masters is not None:
        trained = cast_like(seen, trained_part(state))
        return dataclasses.replace(state, params=with_rest(state, trained), masters=seen)
    if policy is not None and policy.stochastic:
        key = jax.random.fold_in(jax.random.fold_in(state.key, state.calls - 1), _ROUNDING)
        seen = round_stochastically(seen, key)
    return dataclasses.replace(state, params=with_rest(state, seen))


_ROUNDING = (
    0x726E64  # keys of this step are folded with the index of a micro-batch; this one is none
)


def _averaged(state: TrainState) -> TrainState:
    if state.average is None:
        return state
    seen = trained_part(state) if state.masters is None else state.masters
    return dataclasses.replace(state, average=state.average.moved(seen, state.step))


def _kept(old: TrainState, new: TrainState, thawed, emitted) -> TrainState:
    """`new` with the old leaves where they are frozen, and of params if the call only gathered a
    gradient.
    """
    if thawed is None and emitted is None:
        return new
    moves = True if emitted is None else emitted  # a call that only gathers moves no parameter
    leaves = [moves & on for on in thawed or [True] * len(jax.tree.leaves(trained_part(old)))]
    fields = {}
    for f in old._fields:
        now, before, like = getattr(new, f.name), getattr(old, f.name), f.metadata["like"]
        if f.metadata["moves"] != "step" or now is before:
            continue
        if like == "params":
            fields[f.name] = with_rest(
                old, guard.choose(leaves, trained_part(new), trained_part(old))
            )
        elif (
            like == "trained"
        ):  # beside them, as of an average, the number of those that it has seen
            rest = [moves] * (len(jax.tree.leaves(now)) - len(leaves))
            fields[f.name] = guard.choose([*leaves, *rest], now, before)
        elif like == "rule" and thawed is not None:
            owners = number_table.owners_of(old.plan.init, before, old.numbers, base(old))
            sums = accumulation.in_sums(now)
            kept = [
                True if o is None or s else thawed[o] for o, s in zip(owners, sums, strict=True)
            ]
            fields[f.name] = guard.choose(kept, now, before)
    return dataclasses.replace(new, **fields)


def _recorded(old: TrainState, new: TrainState, verdict, emitted, loss: Loss) -> TrainState:
    """The guard's own record, which moves whether the step was applied or not: its counts, and the
    loss scale.
    """
    new = dataclasses.replace(new, clock=guard.count(old.clock, emitted, verdict))
    if old.loss_scale is None:
        return new
    applied = verdict == 0 if emitted is None else (verdict == 0) & emitted
    overflowed = guard.overflowed(verdict)
    if loss.weight is not None:  # a mean over nothing is NaN, and no overflow
        overflowed &= loss.weight != 0
    if loss.dropped is not None:  # what was dropped instead
        overflowed |= jnp.any(loss.dropped != 0)
    return dataclasses.replace(
        new, loss_scale=old.loss_scale.grown(applied & ~overflowed, overflowed)
    )


def _check_extra(state: TrainState, extra) -> None:
    """Raise for keywords of `update` that nothing reads: misspelled ones, and hyperparameters."""
    if not extra:
        return
    numbers, read = state.numbers, live_rules.keywords_of(state.plan.update)
    names = [] if numbers is None else [name for name, _ in numbers.column_names()]
    for search in filter(
        callable, map(extra.get, live_rules.SEARCHES)
    ):  # gets the extra that it names
        more = live_rules.names_of(search)
        read = None if read is None or more is None else read.union(more)
    for name in extra:
        if name in names:
            fix = f"Set it before the step: state = ts.adjust(state, {name}=...)."
            raise StateError(message("keyword", "update()", repr(name), "no hyperparameter", fix))
        if name not in _FOR_RULES and (name in _OWN or (read is not None and name not in read)):
            known = [*_KEYWORDS, "value", *sorted((read or set()) - {*_FOR_RULES})]
            raise StateError(patterns.unknown("keyword", "update()", name, known))


_KEYWORDS = ("loss", "model_state", "on_nonfinite", "norms")
_OWN = ("params", "updates", "opt_state")  # what update itself gives to the rule
_FOR_RULES = (
    "value",
    "grad",
    "value_fn",
    "obj_fn",
    "grad_fn",
    "weight",
    "windows_flushed",
    "outside",
)


def _first(*options):
    return next((x for x in options if x is not None), None)


def _check_policy(on_nonfinite, where: str) -> None:
    if not checks.is_one_of(on_nonfinite, guard.POLICIES):
        expected = " or ".join(map(repr, guard.POLICIES))
        raise WrongTypeError(message("on_nonfinite", where, trees.describe(on_nonfinite), expected))


def _checkpoint(remat: Any, where: str) -> Callable:
    """`jax.checkpoint` under a policy, or what leaves a function as it is."""
    if isinstance(remat, str):
        known = [
            name
            for name in dir(jax.checkpoint_policies)
            if not name.startswith(("_", "save_", "offload"))
        ]
        if remat not in known:
            raise WrongTypeError(patterns.unknown("remat", where, remat, known))
        remat = getattr(jax.checkpoint_policies, remat)
    if remat is None or remat is False:
        return lambda f: f
    if remat is not True and not callable(remat):
        expected = "True, or a policy of jax.checkpoint_policies, or its name"
        raise WrongTypeError(message("remat", where, trees.describe(remat), expected))
    policy: Any = None if remat is True else remat
    return functools.partial(jax.checkpoint, policy=policy)
