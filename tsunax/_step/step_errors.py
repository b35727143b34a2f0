"""Errors of a step: in its arguments, if its program failed; in its numbers, if it was rejected."""

import contextlib
import dataclasses
import difflib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsunax import errors, guard, losses
from tsunax._core import Extra, PyTree, checks, placement, trees
from tsunax._state import COUNTS, thawed_flags
from tsunax._step.loss_fn import CutsItsBatch, LossFn, inputs_of_loss_fn
from tsunax.errors import NonFiniteError, StateError, hide_own_frames
from tsunax.state import TrainState, split


def check_not_donated(state: TrainState, arguments: Extra) -> None:
    """Raise StateError for arguments that have arrays of the state, which the step consumes."""
    donated_part, _ = split(state)
    donated_arrays = {id(x) for x in jax.tree.leaves(donated_part)}
    for name, tree in arguments.items():
        if any(id(x) in donated_arrays for x in jax.tree.leaves(tree)):
            raise StateError(
                f"argument {name!r}",
                "step()",
                got="arrays of the state itself",
                expected="copies, because the step donates them, or train_step(..., donate=False)",
            )


def explain(error: Exception, step, state: TrainState, batch: Any, extra: Extra) -> None:
    """Raise a clearer error for a failed program if its arguments explain it; hide own frames."""
    hide_own_frames(error)
    home = placement.state_sharding(state)
    placement.check_devices(batch, home)
    placement.check_devices(extra, home, "extra")
    if step.donate:
        check_not_donated(state, {"batch": batch, **extra})


class RejectedCall(NamedTuple):
    """A call of a step that was perhaps rejected."""

    step: Any  # the `TrainStep`
    state: TrainState  # after the call
    info: Any  # None for a call that is replayed
    batch: PyTree
    extra: Mapping[str, Any]

    def raise_error(self, place: str = "") -> None:
        """Raise NonFiniteError for a rejected step, unless it only lowered the loss scale.

        `place` names the step in a call of many steps; `state` is the state after these.
        """
        state, info = self.state, self.info
        rejected = np.flatnonzero(info.verdict > 0)
        if not len(rejected):
            return
        if np.ndim(info.verdict):
            reason = guard.explain(int(info.verdict[rejected[0]]), state.opt_state)
            text = f"members {rejected.tolist()} were rejected, the first for its {reason}"
        elif is_searching(state, info, int(info.verdict)):
            return
        else:
            reason = self.reason()
            if state.loss_scale is not None:
                reason += f", {int(state.rejected_in_a_row)} rejected in a row"
            place = place or f"step {int(state.step)} (call {int(state.calls) - 1})"
            text = f"{place} was rejected: {reason}"
        raise NonFiniteError(f"{text}. `error.state` is the state after the call.", state, info)

    def reason(self) -> str:
        """The bad leaf, micro-batch, batch or labels. Compiles a program, and waits for it."""
        step, state, info, batch, extra = self
        # A rejected step changes only counts, so the rejected gradients can be computed again. The
        # count of calls decides the random keys.
        one_call = np.eye(len(COUNTS), dtype=np.int32)[COUNTS.index("calls")]
        state_before = dataclasses.replace(state, clock=state.clock - one_call)
        grads, dropped = _gradient_program(step)(state_before, batch, extra)
        reason = guard.explain(int(info.verdict), state.opt_state, grads)
        if dropped is not None and np.any(dropped):
            number = int(np.argmax(np.asarray(dropped) != 0))
            reason += f", micro-batch {number} of {step.accumulate}"
        reason += self.about_batch(joins_rows=True)
        if (scale := state.loss_scale) is not None and info.loss_scale is not None:
            floor = ", its floor" if scale.dynamic and info.loss_scale <= scale.floor else ""
            reason += f", loss scale {float(info.loss_scale)}{floor}"
        return reason

    def about_batch(self, *, joins_rows: bool = False) -> str:
        """The numbers of the batch that are not finite, or its first wrong label, or "".

        If `joins_rows`, the labels of several micro-batches are checked: loss_fn gets all rows.
        """
        fault, verdict = guard.fault_in_batch(self.batch), self.info.verdict
        may_run_loss = joins_rows or self.step.accumulate == 1
        if not fault and may_run_loss and verdict is not None and guard.is_of_loss(verdict):
            fault = self.wrong_label()
        return fault and f", {fault}"

    def wrong_label(self) -> str:
        """The first wrong label, if the loss is finite without such labels. It is run eagerly."""
        fn, state = LossFn.of(self.step.loss_fn), self.state
        with repaired_labels() as label_faults, contextlib.suppress(Exception):
            keywords = fn.keywords(state, dict(self.extra), train=True)
            inputs = inputs_of_loss_fn(fn, state, state.params, self.batch, keywords)
            loss = fn(*inputs, keywords).compute()
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
def _gradient_program(step) -> Any:
    """A function for the gradients of a step, and the weights of its bad micro-batches."""
    drops = step.accumulate > 1 and not (step.per_example or isinstance(step.loss_fn, CutsItsBatch))

    def gradients(state, batch, extra):
        loss, grads = step.gradient(state, batch, **extra)
        if drops:
            dropping = dataclasses.replace(step, on_nonfinite="drop")
            loss, _ = dropping.gradient(state, batch, **extra)
        return guard.without_frozen(grads, thawed_flags(state)), loss.dropped

    return jax.jit(gradients)


def is_searching(state: TrainState, info: Any, verdict: Any) -> Any:
    """Whether a rejected step, also of each member, only lowered a dynamic loss scale."""
    scale = state.loss_scale
    if scale is None or info.loss_scale is None or not scale.dynamic:
        return False
    has_rows = (info.weight != 0) | (info.dropped is not None and info.dropped != 0)
    return guard.overflowed(verdict) & (info.loss_scale > scale.floor) & has_rows


def check_extra(state: Any, extra) -> None:
    """Raise for keywords that are hyperparameters, or misspelled keywords of `update`.

    Rules ignore keywords that they do not take.
    """
    numbers = [] if state.numbers is None else state.numbers.column_names()
    reserved = {*_RESERVED, *(name for name, _ in numbers)}
    for name in extra:
        is_close = difflib.get_close_matches(name, _KEYWORDS, 1, 0.8) and name not in _KEYWORDS
        if name in reserved or is_close:
            fix = "A hyperparameter is set before the step: ts.adjust(state, ...)."
            raise StateError(errors.unknown("keyword", "update()", name, _KEYWORDS, fix))


# arguments that update passes to the rule
_RESERVED = ("params", "updates", "opt_state", "grad_norm")
_KEYWORDS = (
    *("loss", "model_state", "on_nonfinite", "norms"),
    *("value", "grad", "weight", "flush", "outside", *checks.SEARCHES),  # for rules
)
