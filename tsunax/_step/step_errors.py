"""Errors of a step: in its arguments, if its program failed; in its numbers, if it was rejected."""

import contextlib
import dataclasses
import difflib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax import errors, guard, losses
from tsunax._core import Extra, checks, placement, trees
from tsunax._core.source_lines import hide_own_frames
from tsunax._state.state_fields import COUNTS
from tsunax._step import members
from tsunax._step.loss_fn import LossFn, inputs_of_loss_fn
from tsunax.errors import NonFiniteError, RuleError, StateError, TsunaxError, WrongTypeError
from tsunax.loss import Loss
from tsunax.rules import inspecting
from tsunax.state import TrainState, split


def argument_error(error: Exception, state: TrainState, batch, extra) -> TsunaxError | None:
    """The TsunaxError for the arguments that made a program fail, or None."""
    if isinstance(error, TsunaxError):
        error.__dict__.pop("__notes__", None)  # JAX's note about the frames that it has hidden
        return None
    if trees.is_gone(state.clock):  # the program consumed the state, and failed afterwards
        return None
    try:
        _check_arguments(state, batch, extra)
    except TsunaxError as fault:
        return fault
    if isinstance(error, FloatingPointError):
        said = "jax_debug_nans stops at each NaN, also in a step that its verdict would have "
        error.add_note(said + "rejected (on_nonfinite=): without that setting, training goes on.")
    hide_own_frames(error)
    return None


def _check_arguments(state: TrainState, batch, extra) -> None:
    is_iterable = hasattr(batch, "__iter__") and jax.tree_util.all_leaves([batch])
    if isinstance(batch, Iterator) or (is_iterable and not trees.is_array(batch)):
        raise WrongTypeError(
            "batch",
            "step()",
            got=trees.describe(batch),
            expected="a tree of arrays",
            fix="A step takes one batch: for batch in data.",
        )
    checks.check_arrays(batch, "batch", "Leave it out, or turn it into numbers.")
    for name, tree in extra.items():
        fix = f"Bind it to loss_fn instead: functools.partial(loss_fn, {name}=...)."
        checks.check_arrays(tree, name, fix)
    check_not_donated(state, {"batch": batch, **extra})
    checks.check_arrays(state, "state")
    home = placement.state_sharding(state)
    for name, tree in {"state": state, "batch": batch, **extra}.items():
        placement.check_devices(tree, home, name)
    members.check_each(state, (batch, extra))


def check_not_donated(state: TrainState, arguments: Extra) -> None:
    """Raise StateError for arguments that have arrays of the state, which the step consumes."""
    moving = {id(x) for x in jax.tree.leaves(split(state)[0])}
    for name, tree in arguments.items():
        if any(id(x) in moving for x in jax.tree.leaves(tree)):
            raise StateError(
                f"argument {name!r}",
                "step()",
                got="arrays of the state itself",
                expected="others",
                fix="The step donates them: copy, or train_step(..., donate=False).",
            )


def raise_if_rejected(step, state: TrainState, info: Any, batch, extra) -> None:
    """Raise NonFiniteError for a rejected step, unless it only lowered the loss scale."""
    verdicts = np.atleast_1d(info.verdict)
    rejected = np.flatnonzero(verdicts > 0)
    if len(rejected) and np.ndim(info.verdict):
        first = guard.explain(int(verdicts[rejected[0]]), state.opt_state)
        raise NonFiniteError(
            f"members {rejected.tolist()} of a population were rejected, the first for its "
            f"{first}. `error.state` is the state after the step.",
            state,
            info,
        )
    if not len(rejected) or is_searching(state, info, int(info.verdict)):
        return
    reason = rejection_reason(step, state, info, batch, extra)
    if state.loss_scale is not None:
        reason += f", {int(state.rejected_in_a_row)} rejected in a row"
    raise NonFiniteError(
        f"step {int(state.step)} (call {int(state.calls) - 1}) was rejected: {reason}. "
        "`error.state` is the state before it.",
        state,
        info,
    )


def rejection_reason(step, state: TrainState, info: Any, batch, extra) -> str:
    """Why a step was rejected: the bad leaf, micro-batch, batch or labels. Compiles once, waits."""
    # A rejected step changes only counts, so the rejected gradients can be computed again.
    clock = state.clock - np.eye(len(COUNTS), dtype=np.int32)[COUNTS.index("calls")]
    state_before = dataclasses.replace(state, clock=clock)
    grads, dropped = _gradient_program(step, step.gradient)(state_before, batch, extra)
    reason = guard.explain(int(info.verdict), state.opt_state, grads)
    if dropped is not None and np.any(dropped):
        reason += f", micro-batch {int(np.argmax(np.asarray(dropped) != 0))} of {step.accumulate}"
    reason += about_batch(step, state, info, batch, extra, joins_rows=True)
    if (scale := state.loss_scale) is not None and info.loss_scale is not None:
        floor = ", its floor" if scale.dynamic and info.loss_scale <= scale.floor else ""
        reason += f", loss scale {float(info.loss_scale)}{floor}"
    return reason


def about_batch(
    step, state: TrainState, info: Any, batch, extra, *, joins_rows: bool = False
) -> str:
    """The numbers of a batch that are not finite, or its first wrong label in a class loss; or "".

    If `joins_rows`, the labels of several micro-batches are checked: loss_fn gets all rows at once.
    """
    fault, fits = guard.in_batch(batch), joins_rows or step.accumulate == 1
    if not fault and fits and info.verdict is not None and guard.is_of_loss(info.verdict):
        fault = wrong_label(step, state, batch, extra)
    return fault and f", {fault}"


def wrong_label(step, state: TrainState, batch, extra) -> str:
    """The first wrong label, if without such labels the loss is finite; loss_fn runs eagerly."""
    fn = LossFn.of(step.loss_fn)
    with repaired_labels() as label_faults, contextlib.suppress(Exception):
        keywords = fn.keywords(state, extra, train=True)
        loss = fn(*inputs_of_loss_fn(fn, state, state.params, batch, keywords), keywords).compute()
        return label_faults[0] if label_faults and np.isfinite(loss) else ""
    return ""


@contextlib.contextmanager
def repaired_labels() -> Iterator[list[str]]:
    """A context that collects wrong labels, which class losses replace by class 0 meanwhile.

    Only losses that run eagerly do so.
    """
    label_faults: list[str] = []

    def watch(labels: jax.Array, classes: int) -> jax.Array:
        if trees.is_traced(labels):
            return labels
        bad = (labels < 0) | (labels >= classes)
        if count := int(np.sum(bad)):
            place = [int(i) for i in np.unravel_index(int(np.argmax(bad)), labels.shape)]
            first = f"label {int(labels[tuple(place)])}" + (f" at {place}" if place else "")
            text = f"{count} of {labels.size} labels are none of the {classes} classes"
            label_faults.append(f"{text}, first {first}")
        return jnp.where(bad, 0, labels)

    token = losses.label_watcher.set(watch)
    try:
        yield label_faults
    finally:
        losses.label_watcher.reset(token)


@functools.lru_cache(maxsize=8)
def _gradient_program(step, gradient: Any) -> Any:
    """A function for the gradients of a step, and the weights of its bad micro-batches."""

    def gradients(state, batch, extra):
        _, grads = gradient(state, batch, **extra)
        if step.accumulate == 1:
            return grads, None
        dropping = dataclasses.replace(step, on_nonfinite="drop").gradient
        return grads, dropping(state, batch, **extra)[0].dropped

    return jax.jit(gradients)


def is_searching(state: TrainState, info: Any, verdict: Any) -> Any:
    """Whether a rejected step, also of each member, only lowered a dynamic loss scale."""
    scale = state.loss_scale
    if scale is None or info.loss_scale is None or not scale.dynamic:
        return False
    counted = (info.weight != 0) | (info.dropped is not None and info.dropped != 0)
    return guard.overflowed(verdict) & (info.loss_scale > scale.floor) & counted


def other_tree(grads: Any, params: Any) -> StateError:
    """The error for gradients of another structure than the trained part of the params."""
    fix = "Gradients have the structure of ts.trainable(state)."
    if isinstance(grads, tuple) and any(isinstance(part, Loss) for part in grads):
        fix = "Take it apart: loss, grads = ts.value_and_grad(loss_fn)(state, batch)."
    return StateError(f"gradient {trees.first_difference(grads, params, 'grads')}. {fix}")


def wrong_gradient(grads: Any, i: int, p: Any) -> StateError:
    """The error for a leaf of the gradients that does not fit its parameter."""
    where, g = list(trees.leaves_at("grads", grads))[i]
    return StateError(
        "gradient",
        where,
        got="a deleted array" if trees.is_gone(g) else trees.describe(g),
        expected=f"{trees.describe(p)}, as in params",
    )


def raise_of_rule(
    error: Exception, update: Any, extra: Extra, result: Any, trees_before: Any, has_rows: bool
) -> None:
    """Raise the error of a rule that failed or returned other shapes, if its cause is known.

    A rule may lack an argument, need the gradients of rows, or not accept them. `result` is the
    result of `update(grads)`, None if it raised. `trees_before` are the params and the state of the
    rule before.
    """
    params, opt_state = trees_before
    if lacks := [name for name in inspecting.missing(error) if name not in extra]:
        how = ["loss=loss" if name == "value" else f"{name}=..." for name in lacks]
        fix = f"Give update(state, grads, {', '.join(how)})."
        if {*lacks} <= {"value", *checks.SEARCHES}:
            fix += " train_step gives it by itself."
        name = "loss" if "value" in lacks else lacks[0]
        raise RuleError(
            name, "update()", got="None", expected=f"the {name}, which this rule asks for", fix=fix
        ) from error
    if not has_rows and inspecting.takes_rows(lambda grads: (opt_state, *update(grads)), params):
        raise RuleError(
            "gradient",
            "update()",
            got="that of the batch",
            expected="one for each row, which this rule asks for",
            fix="Give per_example=True to train_step or value_and_grad.",
        ) from error
    if result is None:
        return
    fix = (
        "Under per_example=True the gradients have an axis of rows, and this rule keeps it. "
        "Begin with one that takes it: optax.contrib.differentially_private_aggregate, say."
    )
    fix = fix if has_rows else "The rule changes it."
    _check_shapes("update", "params", result[0], params, fix)
    fix = "Put the rule that takes gradients of rows first: chain(it, accumulate(...))."
    _check_shapes("optimizer state", "opt_state", result[1], opt_state, fix)


def _check_shapes(title: str, root: str, new: Any, old: Any, fix: str) -> None:
    for (where, x), y in zip(trees.leaves_at(root, new), jax.tree.leaves(old), strict=False):
        if np.shape(x) != np.shape(y):
            raise RuleError(
                title, where, got=f"shape {np.shape(x)}", expected=f"{np.shape(y)}", fix=fix
            ) from None


def check_extra(state: Any, extra) -> None:
    """Raise for keywords that are hyperparameters, or misspelled keywords of `update`."""
    names = [] if state.numbers is None else [name for name, _ in state.numbers.column_names()]
    for name in extra:
        if name in names:
            raise StateError(
                "keyword",
                "update()",
                got=repr(name),
                expected="no hyperparameter",
                fix=f"Set it before the step: state = ts.adjust(state, {name}=...).",
            )
        close = difflib.get_close_matches(name, _KEYWORDS, 1, 0.8)
        if name in _RESERVED or (close and name not in _KEYWORDS):
            raise StateError(errors.unknown("keyword", "update()", name, _KEYWORDS))


_RESERVED = ("params", "updates", "opt_state")  # arguments that update passes to the rule
_KEYWORDS = (
    *("loss", "model_state", "on_nonfinite", "norms"),
    *("value", "grad", "weight", "flush", "outside", *checks.SEARCHES),  # for rules
)
