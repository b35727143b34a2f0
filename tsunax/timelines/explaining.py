"""Why a step went as it did: the rows of its batch one by one, and the gradients before it."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsunax import guard
from tsunax._core import Figure, PyTree, tables, trees
from tsunax.checkpoints.edits import Edit
from tsunax.errors import told
from tsunax.hyper import hyperparams
from tsunax.program import TrainStep
from tsunax.run import info_columns
from tsunax.state import TrainState, trained_part
from tsunax.step import StepInfo
from tsunax.timelines.replaying import Moment, ReplayedCall, Script

MOST_LISTED = 8  # rows and leaves that a printed explanation lists
# How far the mean of the rows may be from the loss of the batch: sums in another order.
TOLERANCE = 1e-3


class RankedRows(NamedTuple):
    """The numbers of rows, and the values that rank them. See `Explanation`."""

    rows: np.ndarray = np.empty(0, int)
    losses: np.ndarray = np.empty(0)
    row_norms: np.ndarray = np.empty(0)
    falls: np.ndarray = np.empty(0)
    note: str = ""


@dataclass(frozen=True)
class Explanation:
    """An explanation of one call, from `timeline(...).explain(step)`.

    `rows` are the numbers of the rows in the data (in the batch if these are unknown); `losses` and
    `row_norms` their losses and gradient norms, each row alone with the key of the call, by falling
    loss; or by rising loss, if the lowest one is the farthest from the median.

    If the mean of these losses is not the loss of the batch (dropout, noise, batch statistics,
    pairs), both are empty, and `note` has both numbers. Then `rows` are in the order of `falls`:
    how far the loss of the batch falls if the next row takes the place of a row.

    `norms` has the gradient norm of each leaf at `norm_steps`: the steps before, and this step.
    `numbers` are hyperparameters; of any step but a `train_step` of one state the numbers of its
    info by name, with the loss of each member of a population or of `States`: "critic/loss".
    `edits` are the changes of the state by callbacks and commands between these steps.
    """

    step: int
    calls: int
    verdict: str
    loss: float
    grad_norm: float
    rows: np.ndarray
    losses: np.ndarray
    row_norms: np.ndarray
    falls: np.ndarray
    note: str
    norm_steps: list[int]
    norms: dict[str, np.ndarray]
    numbers: dict[str, float]
    edits: list[Edit]

    def __repr__(self) -> str:
        head = f"call {self.calls} of the run, at step {self.step}: {self.verdict}"
        if self.norm_steps:  # else the loss is among the numbers
            head += f", loss {self.loss:.6g}, gradient norm {self.grad_norm:.6g}"
        lines = [head]
        if self.numbers:
            lines.append(", ".join(tables.summary(self.numbers)))
        lines += map(repr, self.edits)
        if self.note:
            lines.append(self.note)
        if len(self.rows):
            columns = {"loss": self.losses, "gradient norm": self.row_norms}
            if len(self.falls):
                columns = {"fall of the loss if the next row takes its place": self.falls}
            order = zip(self.rows, *columns.values(), strict=True)
            listed = [[f"{row}", *(f"{x:.6g}" for x in values)] for row, *values in order]
            heads = ["row", *columns]
            lines += tables.aligned([heads, *listed[:MOST_LISTED]], right=range(len(heads)))
        ratio_of = lambda x: x[-1] / max(np.median(x[:-1]), 1e-30) if len(x) > 1 else math.nan
        ratios = {name: ratio_of(x) for name, x in self.norms.items()}
        # NaN comes first
        largest = sorted(ratios, key=lambda name: -np.nan_to_num(ratios[name], nan=math.inf))
        heads = ["gradient of", "norm", "× median of the steps before"]
        listed = [
            [name, f"{self.norms[name][-1]:.4g}", f"{ratios[name]:.3g}"]
            for name in largest[:MOST_LISTED]
        ]
        lines += tables.aligned([heads, *listed], right=(1, 2)) if listed else []
        return "\n".join(lines)

    _repr_html_ = tables.folded

    def plot(self) -> Figure:
        """A matplotlib Figure: the losses of the rows, and the gradient norms of the leaves."""
        from tsunax.run import plots

        figure = plots.new_figure(9, 2.8)
        row_axes, norm_axes = figure.subplots(1, 2)
        values, name = (self.falls, "fall") if len(self.falls) else (self.losses, "loss")
        row_axes.bar([str(row) for row in self.rows[:MOST_LISTED]], values[:MOST_LISTED])
        row_axes.set_ylabel(name, fontsize=9)
        row_axes.tick_params(labelsize=8)
        steps = np.array(self.norm_steps, int)
        norms = {name: (steps, values) for name, values in self.norms.items()}
        plots.draw(norm_axes, "gradient norm", norms or {"gradient norm": (steps, np.array([]))})
        for axes, name in ((row_axes, "row"), (norm_axes, "step")):
            axes.set_xlabel(name, fontsize=9)
        return figure


def explained(
    script: Script, earlier: Moment, call: ReplayedCall, rows: np.ndarray | None
) -> Explanation:
    """The explanation of a call, with the gradients of the calls from an earlier moment on."""
    info, state = call.info, call.start.state
    is_plain = isinstance(script.step, TrainStep) and isinstance(state, TrainState)
    is_info = isinstance(info, StepInfo)
    if not (is_plain and is_info) or np.ndim(info.loss):  # a loss for each member of a population
        ranked = RankedRows(note="rows and layers are known for a train_step of one state alone")
        norm_steps, norms = [], {}
    else:
        ranked = _rows_by_loss(script, call, rows)
        norm_steps, norms = _norms_before(script, earlier, call)
    number = lambda x: math.nan if x is None or np.ndim(x) else float(x)
    verdict, facts = "called", dict(info) if isinstance(info, Mapping) else {}
    if is_info:
        facts = {"loss": info.loss, "grad_norm": info.grad_norm}
    if (
        is_info
        and isinstance(state, TrainState)
        and info.verdict is not None
        and not np.ndim(info.verdict)
    ):
        verdict = guard.explain(int(info.verdict), call.end.state.opt_state)
    return Explanation(
        call.end.step,
        call.end.calls,
        verdict,
        number(facts.get("loss")),
        number(facts.get("grad_norm")),
        *ranked,
        norm_steps,
        norms,
        _scalars(hyperparams(state)) if norm_steps else _numbers_of(info),
        [*script.edits[earlier.edit_count : call.start.edit_count]],
    )


def _numbers_of(info: Any) -> dict[str, float]:
    """The numbers of the info of a call, by the names that rows of the history have."""
    columns = info_columns.columns(jax.tree.map(lambda x: np.asarray(x)[None], info))
    return _scalars({name: x[0] for name, x in columns.items() if not np.ma.is_masked(x)})


def _scalars(numbers: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(x) for name, x in numbers.items() if not np.ndim(x)}


def _rows_by_loss(script: Script, call: ReplayedCall, rows: np.ndarray | None) -> RankedRows:
    """The rows of a batch by their losses, each alone, or by the loss of the batch without each."""
    if not jax.tree.leaves(call.batch):
        return RankedRows(note="the step makes its own data, so there are no rows")
    options: Any = {"per_example": False, "noise_scale": False, "on_nonfinite": "skip"}
    step = dataclasses.replace(_train_step(script), **options)
    gradient = dataclasses.replace(step, accumulate=1).gradient
    count = len(jax.tree.leaves(call.batch)[0])
    numbers, extra = np.arange(count) if rows is None else rows, dict(script.extra)

    @jax.jit
    def losses_of_rows(state: TrainState, batch: PyTree, extra: Any) -> Any:
        def loss_of_row(i: jax.Array) -> Any:
            row_of = lambda x: jax.lax.dynamic_slice_in_dim(jnp.asarray(x), i, 1)
            loss, grads = gradient(state, jax.tree.map(row_of, batch), **extra)
            return loss.compute(), loss.weight, guard.global_norm(grads)

        return jax.lax.map(loss_of_row, jnp.arange(count))

    @jax.jit
    def losses_without_rows(state: TrainState, batch: PyTree, extra: Any) -> Any:
        def loss_without(i: jax.Array) -> jax.Array:
            # JAX drops the update of an index out of bounds: for i = count no row is replaced.
            order = jnp.arange(count).at[i].set((i + 1) % count)
            changed_batch = jax.tree.map(lambda x: jnp.asarray(x)[order], batch)
            # with the micro-batches of the call: each has another key
            return step.gradient(state, changed_batch, **extra)[0].compute()

        return jax.lax.map(loss_without, jnp.arange(count + 1))

    try:
        values = losses_of_rows(call.start.state, call.batch, extra)
        losses, weights, norms = (np.asarray(x, np.float64) for x in values)
        total = np.sum(np.where(weights > 0, losses * weights, 0.0))
        mean, loss = total / max(np.sum(weights), 1e-30), float(call.info.loss)
        if not math.isfinite(loss) or abs(mean - loss) <= TOLERANCE * max(abs(loss), 1e-6):
            finite = losses[np.isfinite(losses)] if np.isfinite(losses).any() else np.zeros(1)
            median = np.median(finite)
            is_highest_farthest = np.max(finite) - median >= median - np.min(finite)
            signed_losses = losses if is_highest_farthest else -losses
            ranks = np.where(np.isfinite(losses), signed_losses, np.inf)
            order = np.argsort(-ranks, kind="stable")
            return RankedRows(numbers[order], losses=losses[order], row_norms=norms[order])
        note = f"the mean of its rows alone is {mean:.6g}, and not {loss:.6g}, as with dropout, "
        note += "noise, batch statistics or a loss over pairs"
    except Exception as error:  # a loss of pairs, for example, has no value for one row
        note = f"rows alone have no loss: {told(error)}"
    try:
        values = losses_without_rows(call.start.state, call.batch, extra)
        *losses, loss = np.asarray(values, np.float64)  # the last one is of the whole batch
    except Exception as error:  # leaves of other lengths
        return RankedRows(note=f"{note}; no ranking of rows: {told(error)}")
    falls = loss - np.array(losses)
    order = np.argsort(-np.nan_to_num(falls, nan=-np.inf), kind="stable")
    return RankedRows(numbers[order], falls=falls[order], note=note)


def _norms_before(
    script: Script, earlier: Moment, call: ReplayedCall
) -> tuple[list[int], dict[str, np.ndarray]]:
    """The steps from an earlier moment to a call, and the gradient norm of each leaf there."""
    gradient = dataclasses.replace(_train_step(script), on_nonfinite="skip").gradient

    @jax.jit
    def norms_of(state: TrainState, batch: PyTree, extra: Any) -> list[jax.Array]:
        _, grads = gradient(state, batch, **extra)
        return [jnp.sqrt(x) for x in guard.square_sums(grads)]

    steps, rows = [], []
    for replayed_call in script.calls(earlier):
        is_last = replayed_call.end.calls >= call.end.calls
        current_call = call if is_last else replayed_call
        batch = jax.tree.map(jnp.asarray, current_call.batch)
        steps.append(current_call.end.step)
        norms = norms_of(current_call.start.state, batch, dict(script.extra))
        rows.append([float(x) for x in norms])
        if is_last:
            break
    names = [name for name, _ in trees.leaves_at("params", trained_part(call.start.state))]
    columns = np.array(rows).T
    return steps, dict(zip(names, columns, strict=True))


def _train_step(script: Script) -> TrainStep:
    assert isinstance(script.step, TrainStep)
    return script.step
