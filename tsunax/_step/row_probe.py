"""Whether a loss mixes the rows of its batch, measured on a few of them at the first step.

Micro-batches add up exactly if the loss is a (weighted) mean of values, one for each row. CLIP's
loss is not: it compares each row with all others, and a micro-batch has only its own rows. So the
loss of a few rows is compared with the merged losses of the same rows in micro-batches, outside of
the step's program, forward only. A warning about a right loss is worse than a missing one:

- a difference counts only if it is clearly larger than what rounding errors in the params change,
  in the coarsest dtype of the program, and than what other random numbers change (a loss that draws
  numbers for each row differs by construction);
- if a loss names `train`, and `key` or `model_state`, it is measured with `train=False`;
- a loss that cannot be measured is taken for a right one, without a word: if it raises for a few
  rows and for two micro-batches, is not finite, draws numbers without train too, has a model
  state and no `train`, or calls Python (`jax.debug.print`, `io_callback`).

Params and rows may agree by chance (zeros at the start, sorted labels), so the loss is measured
again for params near these, with the rows in another order. Traced arrays have no values: inside a
program of your own numbers are made up for them, unless they would be too many.
"""

import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_context

from tsunax._core import Extra, PyTree, placement, trees
from tsunax._step.loss_fn import GradientOptions, LossFn, seen_by
from tsunax.errors import message, warn
from tsunax.loss import Loss, rows_of
from tsunax.state import TrainState, trained_part, with_rest

ROWS = 8  # of a micro-batch: more take time, and with fewer some losses raise
PARTS = 8  # micro-batches: of two, masks may agree by chance; of large ones two are enough
# How much the moved params of each measurement change the outputs of a layer, about. A single one
# may miss a loss whose parts agree by chance, for example under masks with as many ones.
NEAR = 0.0, 0.25, 0.5, 1.0, 1.5
LEAST = 1e-4  # a smaller part of a loss is left to rounding, whatever the dtype
MOST = 1 << 24  # elements to make up: more would take seconds, and memory that a step needs

_NOT_A_MEAN = (
    "Return a mean over rows; under a mask or weights ts.Loss.mean(values, mask). If the loss "
    "compares rows or uses statistics of the batch, give it in two parts, "
    "ts.whole_batch(embed, loss), or give it the other rows as an extra argument. "
    "With check_rows=False nothing is measured."
)
_SUM = (
    "It is a sum over rows, and the sums of micro-batches are averaged. "
    "Return the mean, or ts.Loss(total, weight) with the weight of these rows."
)
_ALONE = "Each row is alone in its gradient, so that this is another loss than that of the batch."
_EMBED = "Each micro-batch has only its own rows: mix them in loss(embeddings, batch)."


class RowProbe:
    """Before the first call of a step, `probe(state, batch, extra)` warns if its loss mixes rows.

    The other calls look at `pending` only.
    """

    def __init__(self, options: GradientOptions) -> None:
        self._loss_fn, self._accumulate = options.loss_fn, options.accumulate
        self._alone = options.per_example is not False
        self.pending: bool = options.check_rows and (self._accumulate > 1 or self._alone)

    def __call__(self, state: TrainState, batch: PyTree, extra: Extra) -> None:
        self.pending, difference = False, None
        with (
            contextlib.suppress(Exception),  # the step itself raises what is wrong
            jax.transfer_guard("allow"),
            jax.default_matmul_precision("highest"),
            eval_context(),
        ):
            difference = self.difference(*_with_values(state, batch, extra))
        if difference is not None:
            self._warn(*difference)

    def difference(
        self, state: TrainState, batch: PyTree, extra: Extra
    ) -> tuple[float, float, float, int, int] | None:
        """The loss of some rows, that of their micro-batches, where, and how many of both."""
        if jnp.ndim(state.clock) > 1:
            from tsunax._step.members import of_first_member

            state, batch, extra = of_first_member(state, batch, extra)
        fn, rows = LossFn.of(self._loss_fn), rows_of(batch)
        mean_embedding = getattr(self._loss_fn, "mean_embedding", None)  # of `ts.whole_batch`
        fn = fn if mean_embedding is None else dataclasses.replace(fn, fn=mean_embedding)
        n = rows if self._alone else self._accumulate
        pads, has_modes = rows % n > 0, "train" in fn.names
        if "model_state" in fn.names and not has_modes:
            return None
        mask = (
            np.arange(rows) < rows - 1 if pads else None
        )  # a loss without one raises, as its step
        mask = extra.get("mask", mask)
        most = -(-rows // n)  # in a micro-batch of the step
        few = [size for size in range(ROWS, most) if most % size == 0][:1]
        for size in [*few, most] if rows > 1 else []:
            parts = min(n, PARTS, max(2, PARTS * ROWS // 2 // size))
            take = np.linspace(0, rows - 1, parts * size).astype(int)
            with contextlib.suppress(Exception):  # it may be a loss for one number of rows
                taken = jax.tree.map(functools.partial(placement.rows_at, take), (batch, mask))
                both = _difference(fn, parts, state, taken, extra, is_sum=self._alone)
                return both and (*both, parts * size, parts)
        return None

    def _warn(self, whole: float, merged: float, near: float, rows: int, parts: int) -> None:
        what, fix = "loss", _NOT_A_MEAN
        if self._alone:
            fix = _ALONE
        elif hasattr(self._loss_fn, "mean_embedding"):
            what, fix = "embed", _EMBED
        elif abs(whole - parts * merged) < LEAST * abs(whole):
            fix = _SUM
        got = f"{whole:.6g} for {rows} rows and {merged:.6g} for these in {parts} micro-batches"
        got += " at params near those of the state" if near else ""
        under = "per_example" if self._alone else f"accumulate={self._accumulate}"
        expected = f"a mean over rows under {under}"
        warn(message(what, trees.describe_call(self._loss_fn), got, expected, fix))


def _difference(
    fn: LossFn, parts: int, state: TrainState, rows: PyTree, extra: Extra, *, is_sum: bool
) -> tuple[float, float, float] | None:
    """The loss of all rows and of `parts` micro-batches, and where they differ beyond rounding.

    With `is_sum` the loss may be a sum over rows as well as a mean.
    """
    train = "train" not in fn.names or {"key", "model_state"}.isdisjoint(fn.names)

    @jax.jit
    def loss_of(trained, state, rows, extra, index, draw):
        state, extra = jax.tree.map(lambda x: _redrawn(x, draw), (state, extra))
        params = with_rest(state, trained)
        batch, mask = jax.tree.map(lambda x: x[index], rows)
        more = {} if mask is None else {"mask": mask.astype(np.float32)}
        keywords = fn.keywords(state, extra | more, train=True)
        keywords |= {"train": train} if "train" in keywords else {}
        loss = fn(*seen_by(fn, state, params, batch, keywords, train=train), keywords)
        return dataclasses.replace(loss, metrics={}, model_state=None, mean_value=None)

    def measured(near: float, draw: int) -> tuple[float, float, float]:
        """The loss of the rows, the merged loss of their micro-batches, and the size of all."""
        move = lambda i, x: _moved(x, np.float32(i), np.float32(near), np.float32(draw * rounding))
        moved = treedef.unflatten(map(move, itertools.count(1), leaves))
        given = state, rows, extra
        of = lambda index: loss_of(moved, *given, index, np.uint32(draw))
        cut = [of(order[i::parts]) for i in range(parts)]
        cut = [loss for loss in cut if loss.weight != 0]
        losses = of(order), functools.reduce(Loss.merge, cut), *cut
        whole, merged, *each = map(float, losses)
        return whole, merged, max(map(abs, (whole, merged, *each)))

    trained, order = trained_part(state), np.arange(rows_of(rows))
    leaves, treedef = jax.tree.flatten(trained)
    program = loss_of.trace(trained, state, rows, extra, order, np.uint32(0))
    draws = "random_bits" in str(program.jaxpr)
    if (draws and not train) or program.jaxpr.effects:  # a callback of the user runs in steps alone
        return None
    rounding = _coarsest(program.jaxpr.jaxpr)
    for near in NEAR:
        whole, merged, size = measured(near, 0)
        least = max(LEAST, 2 * rounding) * size
        adds_up = is_sum and abs(whole - parts * merged) < least
        if abs(whole - merged) > least and not adds_up:
            again, merged_again, _ = measured(near, 1)
            noise = max(abs(whole - again), abs(merged - merged_again))
            if draws and noise > 16 * rounding * size:  # Other rows have other random numbers.
                return None
            if min(abs(whole - merged), abs(again - merged_again)) > max(least, 8 * noise):
                return whole, merged, near
        order = np.random.default_rng(0).permutation(order)
    return None


def _with_values(state: TrainState, batch: PyTree, extra: Extra) -> tuple[TrainState, Any, Extra]:
    """Numbers for traced arrays: zeros in the state, others between 0 and 1, integers 0 or 1."""
    traced = [x for x in jax.tree.leaves((state, batch, extra)) if trees.is_traced(x)]
    if sum(x.size for x in traced) > MOST:
        raise OverflowError
    rng = np.random.default_rng(0)

    def made_up(x: Any, spread: float = 0.5) -> Any:
        if not trees.is_traced(x):
            return x
        if trees.is_key(x):
            return jnp.broadcast_to(jax.random.key(0, impl=jax.random.key_impl(x)), x.shape)
        numbers = np.clip(rng.normal(spread, spread, x.shape), 0, 1)  # a mask has zeros and ones
        return (numbers if trees.is_inexact(x) else numbers > 0.5).astype(x.dtype)

    state = jax.tree.map(lambda x: made_up(x, 0.0), state)
    return state, *jax.tree.map(made_up, (batch, dict(extra)))


def _redrawn(x: Any, draw: jax.Array) -> Any:
    """Other keys, typed or raw, and counts of draws, for another `draw`."""
    if trees.is_key(x):
        words = jax.random.key_data(x) + draw
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return x + draw if x.dtype == np.uint32 else x


@jax.jit
def _moved(x: jax.Array, i: jax.Array, near: jax.Array, errors: jax.Array) -> jax.Array:
    """Leaf i, moved by a wave, and then by relative `errors`. It compiles once for each shape."""
    if not trees.is_inexact(x):
        return x
    wide, inputs = trees.wide_dtype(x), x.size // x.shape[-1] if x.ndim > 1 and x.size else 1
    place = jnp.arange(x.size, dtype=np.float32).reshape(x.shape) + i
    wave = lambda step: (place * np.float32(step)) % 2 - 1  # a sine takes longer to compile
    shift, factor = near * np.float32(inputs**-0.5) * wave(0.618034), 1 + errors * wave(0.754878)
    return ((x.astype(wide) + shift.astype(wide)) * factor.astype(wide)).astype(x.dtype)


def _coarsest(jaxpr: Any) -> float:
    """The largest rounding error, relative, of the dtypes in a program."""
    dtypes = {getattr(v.aval, "dtype", None) for eqn in jaxpr.eqns for v in eqn.outvars}
    own = [
        float(jnp.finfo(x).eps) for x in dtypes if x is not None and jnp.issubdtype(x, np.inexact)
    ]
    inner = [_coarsest(part) for eqn in jaxpr.eqns for part in trees.programs_in(eqn)]
    return max([0.0, *own, *inner])
