"""Replay a rejected step with checks, and report where its first NaN or inf came from.

It keeps every value of the step, and walks back from a bad result: see `insight/_origin.py`.
"""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from tsunax import guard
from tsunax._core import Function, PyTree, checks, trees
from tsunax._core.dataflow import source_line
from tsunax._state.state_fields import averages_of
from tsunax._step import step_errors
from tsunax._step.members import members_of
from tsunax.errors import StateError, WrongTypeError
from tsunax.insight import _origin
from tsunax.program import TrainStep, place_state
from tsunax.run import fused_loop
from tsunax.state import TrainState, check_state, trained_part
from tsunax.states import States

__all__ = ["ReplayReport", "replay"]


@dataclass(frozen=True)
class ReplayReport:
    """What `replay` returns: plain data, and the paragraph `text` when it is printed.

    `result` was not finite: "loss", "gradient of params['w']" or "new params['w']" (the rule's).
    `argument` is the leaf of batch, params or model state that was already not finite, or else
    `primitive` the JAX operation that returned the first such value, at the user's `line` ("a.py:12
    (function)") with the text `code`, in the iterations `trips` of the loops around it, from the
    outermost on. `micro_batch` and `trips` count from 0; `in_gradient`: the loss was finite.
    """

    text: str
    result: str = ""
    argument: str = ""
    micro_batch: int | None = None
    primitive: str = ""
    line: str = ""
    code: str = ""
    in_gradient: bool = False
    trips: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return self.text


def replay(
    step: Function, state: TrainState | States, batch: PyTree = None, **extra: Any
) -> ReplayReport:
    """Run a rejected step again with checks; report where the first NaN or inf came from.

    The loss and its gradient are computed once more, with keys, mask, model state and micro-batches
    as in that call. If both are finite, the same is done with what the step makes of them: params,
    model state, optimizer state, average. The report names the micro-batch, the argument or the
    primitive, the line (the user's own, or that of a library if none of the user's is around it)
    and labels that are no class. -inf that a mask puts in, or log(0) in a branch that `where` does
    not take, is not blamed. Nothing is donated. It needs memory for every intermediate value.

    Args:
      step: the `train_step`; for `States` the function that `fit` takes, whose infos are looked
        through: "info['critic'].loss".
      state: as it was given to that call: from the state after a rejected step
        `state.replace(calls=state.calls - 1)`, with a loss scale also the one before. `fit` keeps
        both: `replay(step, *error.rejected[-1].of(error.state))`.
      batch, extra: the arguments of that call.

    Raises WrongTypeError for what is no train_step, state or array, StateError for a population and
    under jit, and what the step itself raises for these arguments.

    >>> import jax.numpy as jnp, tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean(jnp.sqrt(x * params["w"])))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(3)})
    >>> report = replay(step, state, jnp.array([4.0, 0.0, 1.0]))
    >>> report.result, report.primitive, report.in_gradient
    ("gradient of params['w']", 'div', True)
    """
    where = "replay()"
    if isinstance(state, States):
        checks.check_all_alive(state, "state")
    elif not isinstance(step, TrainStep):
        fix = "Make one: ts.train_step(loss_fn)."
        raise WrongTypeError("step", where, trees.describe(step), "a train_step", fix)
    else:
        check_state(state, where, batch)
    if members_of(state) is not None:
        fix = "Give ts.populations.member(state, i)."
        raise StateError("state", where, "a population", "one member", fix)
    if any(map(trees.is_traced, jax.tree.leaves((state, batch, extra)))):
        fix = "Call it outside of jit, with the arrays of that call."
        raise StateError("state", where, "a traced one", "a concrete one", fix)
    for name, tree in {"state": state, "batch": batch, **extra}.items():
        if jax.tree.leaves(tree):
            checks.check_arrays(tree, name)
    if isinstance(state, States) or not isinstance(step, TrainStep):  # first its infos
        once, given = fused_loop.fused(step, True).once, (state, batch, extra)
        infos, new = lambda *args: (once(*args)[1].info,), lambda *args: (once(*args)[0],)
        found = _searched(infos, ("info",), given, 1)
        return found or _searched(new, ("new state",), given, 1, (state,)) or _finite()
    shardings = place_state(state.params)[0]
    if shardings is not None:
        batch, extra = step._place_batch(state, shardings, batch, extra)
    given = state, batch, extra
    gradient = dataclasses.replace(step, on_nonfinite="skip").gradient

    def look(state, batch, extra):
        loss, grads = gradient(state, batch, **extra)
        return loss.compute(), grads

    free = dataclasses.replace(step, on_nonfinite="ignore")

    def move(state, batch, extra):  # whatever its verdict: a rule may be what makes the first one
        return _moved(free.pure(dataclasses.replace(state, loss_scale=None), batch, extra)[0])

    found = _searched(look, ("loss", "gradient of params"), given, step.accumulate)
    if found and found.result == "loss" and (wrong := step_errors.wrong_label(step, *given)):
        return dataclasses.replace(found, text=f"{found.text} In this batch, {wrong}.")
    if found := found or _searched(move, MOVED, given, step.accumulate, _moved(state)):
        return found
    large = guard.locate(jax.jit(look)(*given)[1])
    if large == "gradient norm":
        return _finite()
    text = f"{large[0].upper()}{large[1:]} overflows when it is squared: every value is finite."
    return ReplayReport(text, large, in_gradient=True)


MOVED = "new params", "new model_state", "new average", "new opt_state"


def _moved(state: TrainState) -> tuple:
    """What a step makes of a state beside its counts."""
    averages = {name: average.params for name, average in averages_of(state).items()}
    return trained_part(state), state.model_state, averages, state.opt_state


def _searched(f: Callable, names, given: tuple, n: int, before: Any = ()) -> ReplayReport | None:
    """A report on the first result of `f(*given)` that turned bad; None if all are finite.

    `f` cuts its batch into n micro-batches, and returns trees of these names.
    """
    results = jtu.tree_leaves_with_path(jax.jit(f)(*given))
    was = itertools.chain(jax.tree.leaves(before), itertools.repeat(None))
    for i, ((path, x), old) in enumerate(zip(results, was, strict=False)):
        bad, was_bad = _origin.bad(x), _origin.bad(old)
        if bad is not None and was_bad is not None:
            bad = bad & ~was_bad
        if bad is not None and bad.any():
            name = trees.access_str(names[path[0].idx], path[1:])
            found = _origin.origin(jax.make_jaxpr(f)(*given), jax.tree.leaves(given), i, bad)
            return _report(given, n, name, f"{name} is {_what(x)}", found)
    return None


def _finite() -> ReplayReport:
    return ReplayReport(
        "Loss, gradients and the new state are finite. If the step was rejected, a rule did it "
        "(a spike, clip_by_norm), the state is not the one of that call, or the step computes "
        "in another order."
    )


def _report(given: tuple, n: int, result: str, what: str, origin: _origin.Origin) -> ReplayReport:
    trips, micro = tuple(i for _, i in origin.trips), None
    # the outermost loop is that over micro-batches, unless the rule has one
    if n > 1 and origin.argument is None and trips and origin.trips[0][0].params.get("length") == n:
        micro, trips = trips[0], trips[1:]
    in_gradient = result.startswith("gradient")
    argument = line = code = ""
    if origin.argument is not None:
        path = jtu.tree_leaves_with_path(given)[origin.argument][0]
        argument = trees.access_str(("state", "batch", "extra")[path[0].idx], path[1:])
        bad = _origin.bad(origin.value)
        if n > 1 and argument.startswith("batch") and bad is not None and bad.ndim:
            micro = int(np.argwhere(bad)[0][0]) % n
        made = f"{argument} was given so: {_what(origin.value)}"
    else:
        line, code = source_line(origin.sources, above=__file__)
        said = "a constant" if origin.constant else _what(origin.value)
        at = f" at {'the derivative of ' * in_gradient}{line}" if line else ""
        made = f"{origin.primitive} gave {said}{at}{code and f': `{code}`'}"
    places = [f"micro-batch {micro} of {n}"] if micro is not None else []
    places = ", ".join([*places, *(f"trip {i} of a loop" for i in trips)])
    text = f"The {what}. The first such value: {made}{places and f' ({places})'}."
    primitive = "" if argument else origin.primitive
    return ReplayReport(text, result, argument, micro, primitive, line, code, in_gradient, trips)


def _what(x: Any) -> str:
    """How many elements are not finite, and what the first one is."""
    x = np.asarray(x)
    places = np.argwhere(~np.isfinite(x)).tolist()
    first = f"{x[tuple(places[0])]}"
    return f"{first} at {places[0]}, {len(places)} of {x.size} not finite" if x.shape else first
