"""Replay a rejected step with checks, and report where its first NaN or inf came from.

It keeps every value of the step, and walks back from a bad result: see `insight/_origin.py`.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tsunax import guard
from tsunax._core import Function, PyTree, dataflow, trees
from tsunax._state import averages_of, thawed_flags
from tsunax._step import step_errors
from tsunax.insight import _origin
from tsunax.program import TrainStep, check_is_train_step, place_state
from tsunax.run import fused_loop
from tsunax.state import TrainState, check_state, trained_part
from tsunax.states import States, refuse_population

__all__ = ["ReplayReport", "replay"]


@dataclasses.dataclass(frozen=True)
class ReplayReport:
    """The result of `replay`: plain data, and the paragraph `text` when it is printed.

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
    as in that call. If both are finite, the new params, model state, optimizer state and average
    are checked, too. The report names the micro-batch, the argument or the primitive, the line
    (in the user's code, or in a library if no user code encloses it) and labels that are no class.
    -inf that a mask puts in, or log(0) in a branch that `where` does not take, is not blamed.
    Nothing is donated. It needs memory for every intermediate value.

    Args:
      step: the `train_step`; for `States` the function that `fit` takes: its infos are searched,
        for example "info['critic'].loss".
      state: as it was before that call: from the state after a rejected step
        `state.replace(calls=state.calls - 1)`, with a loss scale also the previous scale. `fit`
        keeps both: `replay(step, *error.rejected[-1].of(error.state))`.
      batch, extra: the arguments of that call.

    Raises WrongTypeError for another step or state, StateError for a population, and the errors of
    the step itself for these arguments. It cannot run under jit.

    >>> import jax.numpy as jnp, tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean(jnp.sqrt(x * params["w"])))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(3)})
    >>> report = replay(step, state, jnp.array([4.0, 0.0, 1.0]))
    >>> report.result, report.primitive, report.in_gradient
    ("gradient of params['w']", 'div', True)
    """
    if isinstance(state, States):  # search the infos first
        refuse_population(state, "replay()")
        call_step, arguments = fused_loop.fused(step, True).call_step, (state, batch, extra)
        infos_of = lambda *args: (call_step(*args)[1].info,)
        new_state_of = lambda *args: (call_step(*args)[0],)
        return (
            _report_on_first_bad(infos_of, ("info",), arguments, 1)
            or _report_on_first_bad(new_state_of, ("new state",), arguments, 1, (state,))
            or _ALL_FINITE
        )
    check_is_train_step(step, "replay()")
    assert isinstance(step, TrainStep)
    check_state(state, "replay()", batch)
    refuse_population(state, "replay()")
    shardings = place_state(state.params)[0]
    if shardings is not None:
        batch, extra = step._place_batch(state, shardings, batch, extra)
    arguments = state, batch, extra
    gradient = dataclasses.replace(step, on_nonfinite="skip").gradient

    def loss_and_gradient(state, batch, extra):
        loss, grads = gradient(state, batch, **extra)
        return loss.compute(), guard.without_frozen(grads, thawed_flags(state))

    unguarded_step = dataclasses.replace(step, on_nonfinite="ignore")

    # without a verdict: the rule may make the first bad value
    def moved_fields(state, batch, extra):
        unscaled = dataclasses.replace(state, loss_scale=None)
        return _moved_fields(unguarded_step.pure(unscaled, batch, extra)[0])

    names, n = ("loss", "gradient of params"), step.accumulate
    report = _report_on_first_bad(loss_and_gradient, names, arguments, n)
    if report and report.result == "loss":
        wrong_label = step_errors.RejectedCall(step, state, None, batch, extra).wrong_label()
        text = f"{report.text} In this batch, {wrong_label}." if wrong_label else report.text
        return dataclasses.replace(report, text=text)
    old_fields = _moved_fields(state)
    if report := report or _report_on_first_bad(
        moved_fields, MOVED_FIELDS, arguments, n, old_fields
    ):
        return report
    overflowing = guard.locate(jax.jit(loss_and_gradient)(*arguments)[1])
    if overflowing == "gradient norm":
        return _ALL_FINITE
    title = f"{overflowing[0].upper()}{overflowing[1:]}"
    text = f"{title} overflows when it is squared: every value is finite."
    return ReplayReport(text, overflowing, in_gradient=True)


MOVED_FIELDS = "new params", "new model_state", "new average", "new opt_state"


def _moved_fields(state: TrainState) -> tuple:
    """The fields of a state that a step changes, without its counts."""
    averages = {name: average.params for name, average in averages_of(state).items()}
    return trained_part(state), state.model_state, averages, state.opt_state


def _report_on_first_bad(
    f: Callable, names, arguments: tuple, n_micro_batches: int, old_results: Any = ()
) -> ReplayReport | None:
    """A report on the first result of `f(*given)` that turned bad; None if all are finite.

    `f` splits its batch into `n_micro_batches`, and returns trees with these `names`.
    """
    results = jax.tree.leaves_with_path(jax.jit(f)(*arguments))
    old_leaves = itertools.chain(jax.tree.leaves(old_results), itertools.repeat(None))
    for i, ((path, leaf), old_leaf) in enumerate(zip(results, old_leaves, strict=False)):
        is_bad, was_bad = _origin.nonfinite_elements(leaf), _origin.nonfinite_elements(old_leaf)
        if is_bad is not None and was_bad is not None:
            is_bad = is_bad & ~was_bad
        if is_bad is not None and is_bad.any():
            name = trees.access_str(names[path[0].idx], path[1:])
            cause = _origin.find_origin(
                jax.make_jaxpr(f)(*arguments), jax.tree.leaves(arguments), i, is_bad
            )
            return _report(
                arguments, n_micro_batches, name, f"{name} is {_nonfinite_text(leaf)}", cause
            )
    return None


_ALL_FINITE = ReplayReport(
    "Loss, gradients and the new state are finite. If the step was rejected, a rule did it "
    "(a spike, clip_by_norm), the state is not the one of that call, or the step computes "
    "in another order."
)


def _report(
    arguments: tuple, n_micro_batches: int, result: str, description: str, origin: _origin.Origin
) -> ReplayReport:
    trips, micro_batch = tuple(i for _, i in origin.trips), None
    # The outermost loop is the loop over micro-batches, unless the rule itself has a loop.
    lengths = [equation.params.get("length") for equation, _ in origin.trips]
    if n_micro_batches > 1 and origin.argument is None and lengths[:1] == [n_micro_batches]:
        micro_batch, trips = trips[0], trips[1:]
    in_gradient = result.startswith("gradient")
    argument = line = code = ""
    if origin.argument is not None:
        path = jax.tree.leaves_with_path(arguments)[origin.argument][0]
        argument = trees.access_str(("state", "batch", "extra")[path[0].idx], path[1:])
        if n_micro_batches > 1 and argument.startswith("batch") and np.ndim(origin.value):
            micro_batch = int(np.argwhere(~np.isfinite(origin.value))[0][0]) % n_micro_batches
        cause = f"{argument} was given so: {_nonfinite_text(origin.value)}"
    else:
        line, code = dataflow.source_line(origin.sources, above=__file__)
        value_text = "a constant" if origin.constant else _nonfinite_text(origin.value)
        place_text = f" at {'the derivative of ' * in_gradient}{line}" if line else ""
        cause = f"{origin.primitive} gave {value_text}{place_text}{code and f': `{code}`'}"
    places_text = (
        [f"micro-batch {micro_batch} of {n_micro_batches}"] if micro_batch is not None else []
    )
    places_text = ", ".join([*places_text, *(f"trip {i} of a loop" for i in trips)])
    text = f"The {description}. The first such value: {cause}{places_text and f' ({places_text})'}."
    primitive = "" if argument else origin.primitive
    return ReplayReport(
        text, result, argument, micro_batch, primitive, line, code, in_gradient, trips
    )


def _nonfinite_text(x: Any) -> str:
    """The first element that is not finite, its place, and how many there are."""
    x = np.asarray(x)
    places = np.argwhere(~np.isfinite(x)).tolist()
    first = f"{x[tuple(places[0])]}"
    return f"{first} at {places[0]}, {len(places)} of {x.size} not finite" if x.shape else first
