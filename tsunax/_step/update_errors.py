"""Errors in the arguments of `update`. A step that succeeds does not run this file."""

import difflib
from typing import Any

import jax
import numpy as np

from tsunax._core import checks, trees
from tsunax.errors import RuleError, StateError, unknown
from tsunax.loss import Loss
from tsunax.rules import inspecting


def other_tree(grads: Any, params: Any) -> StateError:
    """The error for gradients of another structure than the trained part of the params."""
    fix = "Gradients have the structure of ts.trainable(state)."
    if isinstance(grads, tuple) and any(isinstance(part, Loss) for part in grads):
        fix = "Take it apart: loss, grads = ts.value_and_grad(loss_fn)(state, batch)."
    return StateError(f"gradient {trees.first_difference(grads, params, 'grads')}. {fix}")


def wrong_gradient(grads: Any, i: int, p: Any) -> StateError:
    """The error for a leaf of the gradients that does not fit its parameter."""
    where, g = list(trees.leaves_at("grads", grads))[i]
    got = "a deleted array" if trees.is_gone(g) else trees.describe(g)
    return StateError("gradient", where, got, f"{trees.describe(p)}, as in params")


def other_shape(updates: Any, i: int, p: Any, of_rows: bool) -> RuleError:
    """The error for a rule whose update of a parameter has another shape."""
    where, u = list(trees.leaves_at("params", updates))[i]
    got, fix = f"shape {np.shape(u)}", "The rule changes it."
    if of_rows and np.shape(u)[1:] == np.shape(p):
        fix = "Under per_example=True the gradients have an axis of rows, and this rule keeps it. "
        fix += "Begin with one that takes it: optax.contrib.differentially_private_aggregate, say."
    return RuleError("update", where, got, f"{np.shape(p)}", fix)


def without_rows(update: Any, params: Any) -> RuleError | None:
    """The error for gradients without the axis of rows that a rule asks for; None for others."""
    if not inspecting.takes_rows(update, params):
        return None
    got, expected = "that of the batch", "one for each row, which this rule asks for"
    fix = "Give train_step(loss_fn, per_example=True), or value_and_grad(..., per_example=True)."
    return RuleError("gradient", "update()", got, expected, fix)


def check_no_rows(new: Any, old: Any) -> None:
    """Raise RuleError for a rule that adds gradients of rows to its state, as in `accumulate`."""
    for (where, x), y in zip(trees.leaves_at("opt_state", new), jax.tree.leaves(old), strict=False):
        if np.shape(x) != np.shape(y):
            fix = "Put the rule that takes gradients of rows first: chain(it, accumulate(...))."
            got = f"shape {np.shape(x)}"
            raise RuleError("optimizer state", where, got, f"{np.shape(y)}", fix)


def lacking(error: Exception, given: Any) -> RuleError | None:
    """The error for a rule that was not given an argument; None for other failures."""
    lacks = [name for name in inspecting.missing(error) if name not in given]
    if not lacks:
        return None
    how = ["loss=loss" if name == "value" else f"{name}=..." for name in lacks]
    fix = f"Give update(state, grads, {', '.join(how)})."
    if {*lacks} <= {"value", *checks.SEARCHES}:
        fix += " train_step gives it by itself."
    what = "loss" if "value" in lacks else lacks[0]
    expected = f"the {what}, which this rule asks for"
    return RuleError(what, "update()", "None", expected, fix)


def check_extra(state: Any, extra) -> None:
    """Raise for keywords of `update` that are hyperparameters, or its own ones misspelled."""
    names = [] if state.numbers is None else [name for name, _ in state.numbers.column_names()]
    for name in extra:
        if name in names:
            fix = f"Set it before the step: state = ts.adjust(state, {name}=...)."
            raise StateError("keyword", "update()", repr(name), "no hyperparameter", fix)
        close = difflib.get_close_matches(name, _KEYWORDS, 1, 0.8)
        if name in _OWN or (close and name not in _KEYWORDS):
            raise StateError(unknown("keyword", "update()", name, _KEYWORDS))


_OWN = ("params", "updates", "opt_state")  # what update itself gives to the rule
_KEYWORDS = (
    *("loss", "model_state", "on_nonfinite", "norms"),
    *("value", "grad", "weight", "flush", "outside", *checks.SEARCHES),  # for rules
)
