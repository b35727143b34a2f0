"""Whether a loss mixes the rows of its batch, measured on a few rows at the first step.

Micro-batches add up exactly if the loss is a (weighted) mean of values, one for each row. CLIP's
loss is not: it compares each row with all rows of the batch, and a micro-batch has few rows. So the
loss of a few rows is compared with the merged losses of the same rows in micro-batches, outside of
the step's program, forward only. A false warning is worse than a missing warning:

- a difference counts only if it is clearly larger than two other changes: by rounding errors in the
  params, in the coarsest dtype of the program, and by other random numbers (a loss that draws
  numbers for each row differs by construction);
- the precision of the state is left out, because bfloat16 may round away the difference of a masked
  mean;
- if a loss names `train`, and `key` or `model_state`, it is measured with `train=False`;
- a loss that cannot be measured gives no warning: if it raises for a few rows and for two
  micro-batches, is not finite, draws numbers without train too, has a model state and no `train`,
  or calls Python (`jax.debug.print`, `io_callback`).

Params and rows may agree by chance (zeros at the start, sorted labels), so the loss is measured
again for params near these, with the rows in another order. Traced arrays have no values: inside a
user's program numbers are made up for them, if they are few enough. The warning says that numbers
were made up, because a real mask may have only ones.
"""

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_context

from tsunax._core import Extra, PyTree, placement, trees
from tsunax._core.dataflow import programs_in
from tsunax._step.loss_fn import GradientOptions, LossFn, inputs_of_loss_fn
from tsunax.errors import message, warn
from tsunax.loss import Loss, rows_of
from tsunax.state import TrainState, in_float32, params_with_trained, trained_part

ROWS = 8  # in a micro-batch: more rows take time, and for fewer rows some losses raise
# The number of micro-batches. The masks of only two may agree by chance, but two are enough if they
# are large.
PARTS = 8
# About how much the moved params of each measurement change the outputs of a layer. With one
# measurement, the parts may agree by chance, for example under masks with equal counts of ones.
NEAR = 0.0, 0.25, 0.5, 1.0, 1.5
LEAST_SHARE = 1e-4  # a smaller relative difference counts as rounding, for each dtype
MOST_MADE_UP = 1 << 24  # elements: more would take seconds, and memory that a step needs

_FIX = (
    "Return a mean over rows; under a mask or weights ts.Loss.mean(values, mask), for a sum "
    "ts.Loss(total, weight). If the loss compares rows or uses statistics of the batch, give it in "
    "two parts, ts.whole_batch(embed, loss), or give it the other rows as an extra argument. "
    "With check_rows=False nothing is measured."
)
_MADE_UP = (
    "Numbers and masks were made up for traced arrays: if your masks are ones alone, a mean under "
    "them is right. Outside of your jit the step looks at your own."
)


class Difference(NamedTuple):
    """A loss of some rows that differs from the loss of their micro-batches."""

    whole: float  # the loss of the rows
    merged: float  # the merged losses of their micro-batches
    near: float  # how far the params were moved, see `NEAR`
    rows: int
    parts: int

    def text(self, options: GradientOptions) -> str:
        """The difference in words, and what to do."""
        got = f"{self.whole:.6g} for {self.rows} rows and {self.merged:.6g} for these in "
        got += f"{self.parts} micro-batches"
        got += " at params near those of the state" if self.near else ""
        is_per_example = options.per_example is not False
        option = "per_example" if is_per_example else f"accumulate={options.accumulate}"
        expected = f"a mean over rows under {option}"
        return message("loss", trees.describe_call(options.loss_fn), got, expected, _FIX)


def warn_of_mixed_rows(
    options: GradientOptions, state: TrainState, batch: PyTree, extra: Extra
) -> None:
    """Warn if the loss of a step mixes the rows of its batch."""
    difference = None
    with (
        contextlib.suppress(Exception),  # the step itself raises these errors
        jax.transfer_guard("allow"),
        eval_context(),
    ):
        difference = row_difference(options, *_with_values(state, batch, extra))
    if difference is not None:
        is_made_up = any(map(trees.is_traced, jax.tree.leaves((batch, extra))))
        text = difference.text(options)
        warn(f"{text} {_MADE_UP}" if is_made_up else text)


def row_difference(
    options: GradientOptions, state: TrainState, batch: PyTree, extra: Extra
) -> Difference | None:
    """The difference between the losses of some rows and of their micro-batches, or None."""
    from tsunax.states import of_first_member

    state, batch, extra = of_first_member(state, batch, extra)
    fn, rows = LossFn.of(options.loss_fn), rows_of(batch)
    is_per_example = options.per_example is not False
    mean_embedding = getattr(options.loss_fn, "mean_embedding", None)  # for `ts.whole_batch`
    fn = fn if mean_embedding is None else dataclasses.replace(fn, fn=mean_embedding)
    if "model_state" in fn.names and "train" not in fn.names:
        return None
    n = rows if is_per_example else options.accumulate
    # If rows do not divide, a step pads them under a mask. So this mask has a zero; a loss that
    # takes no mask raises, as in its step.
    mask_of_padding = np.arange(rows) < rows - 1 if rows % n else None
    mask = extra.get("mask", mask_of_padding)
    largest = -(-rows // n)  # the rows in a micro-batch of the step
    # A divisor of that number is tried first, because fewer rows take less time.
    fewer_rows = [size for size in range(ROWS, largest) if largest % size == 0][:1]
    for size in [*fewer_rows, largest] if rows > 1 else []:
        # at least two micro-batches, and about PARTS * ROWS / 2 rows in total
        parts = min(n, PARTS, max(2, PARTS * ROWS // 2 // size))
        places = np.linspace(0, rows - 1, parts * size).astype(int)
        with (
            contextlib.suppress(Exception),  # some losses take only one number of rows
            jax.default_matmul_precision("highest"),
        ):
            cut = jax.tree.map(functools.partial(placement.rows_at, places), (batch, mask))
            return _difference(fn, parts, state, cut, extra, may_be_sum=is_per_example)
    return None


def _difference(
    fn: LossFn, parts: int, state: TrainState, rows: PyTree, extra: Extra, *, may_be_sum: bool
) -> Difference | None:
    """The difference beyond rounding between the losses of all rows and of `parts` micro-batches.

    `rows` are a batch and its mask. If it `may_be_sum`, a loss may be a sum over rows, too.
    """
    train = "train" not in fn.names or {"key", "model_state"}.isdisjoint(fn.names)
    state = in_float32(state)

    @jax.jit
    def loss_of(trained, state, rows, extra, index, draw):
        state, extra = _redrawn(state, extra, draw)
        params = params_with_trained(state, trained)
        batch, mask = jax.tree.map(lambda x: x[index], rows)
        extra = extra if mask is None else extra | {"mask": mask.astype(np.float32)}
        keywords = fn.keywords(state, extra, train=True)
        keywords |= {"train": train} if "train" in keywords else {}
        loss = fn(*inputs_of_loss_fn(fn, state, params, batch, keywords, train=train), keywords)
        return dataclasses.replace(loss, metrics={}, model_state=None, mean_value=None)

    def measured(near: float, draw: int) -> tuple[float, float, float]:
        """The loss of the rows, the merged loss of their micro-batches, and the size of all."""
        distance, errors = np.float32(near), np.float32(draw * rounding)  # draw 0 has no errors
        moved = [_moved(x, np.float32(i), distance, errors) for i, x in enumerate(leaves, 1)]
        arguments = treedef.unflatten(moved), state, rows, extra
        orders = [order, *(order[i::parts] for i in range(parts))]
        whole, *cut = [loss_of(*arguments, index, np.uint32(draw)) for index in orders]
        cut = [loss for loss in cut if loss.weight != 0]
        sizes = [float(loss) for loss in (whole, functools.reduce(Loss.merge, cut), *cut)]
        return sizes[0], sizes[1], max(map(abs, sizes))

    trained, order = trained_part(state), np.arange(rows_of(rows))
    leaves, treedef = jax.tree.flatten(trained)
    program = loss_of.trace(trained, state, rows, extra, order, np.uint32(0))
    draws = "random_bits" in str(program.jaxpr)
    # Effects are callbacks of the user, which must run in steps alone.
    if (draws and not train) or program.jaxpr.effects:
        return None
    rounding = _coarsest(program.jaxpr.jaxpr)
    for near in NEAR:
        whole, merged, size = measured(near, 0)
        difference = Difference(whole, merged, near, len(order), parts)
        threshold = max(LEAST_SHARE, 2 * rounding) * size
        adds_up = may_be_sum and abs(whole - parts * merged) < threshold
        if abs(whole - merged) > threshold and not adds_up:
            whole_again, merged_again, _ = measured(near, 1)
            noise = max(abs(whole - whole_again), abs(merged - merged_again))
            # A loss that draws numbers for each row differs by construction.
            if draws and noise > 16 * rounding * size:
                return None
            gap = min(abs(whole - merged), abs(whole_again - merged_again))
            if gap > max(threshold, 8 * noise):
                return difference
        order = np.random.default_rng(0).permutation(order)
    return None


def _with_values(state: TrainState, batch: PyTree, extra: Extra) -> tuple[TrainState, Any, Extra]:
    """Numbers for traced arrays: zeros in the state, floats between 0 and 1, integers 0 or 1."""
    traced = [x for x in jax.tree.leaves((state, batch, extra)) if trees.is_traced(x)]
    if sum(x.size for x in traced) > MOST_MADE_UP:
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


def _redrawn(state: TrainState, extra: Extra, draw: jax.Array) -> tuple[TrainState, Extra]:
    """State and extra with other keys, typed or raw, and other counts of draws in model state."""

    def redrawn(x: Any) -> Any:
        if trees.is_key(x):
            words = jax.random.key_data(x) + draw
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
        return x + draw if x.dtype == np.uint32 else x

    raw = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    is_key = lambda x: trees.is_key(x) or x.shape == raw.shape
    drawn = jax.tree.map(redrawn, {"key": state.key, "model_state": state.model_state})
    of_extra = jax.tree.map(lambda x: redrawn(x) if is_key(x) else x, extra)
    return dataclasses.replace(state, **drawn), of_extra


@jax.jit
def _moved(x: jax.Array, i: jax.Array, near: jax.Array, errors: jax.Array) -> jax.Array:
    """Leaf i, moved by a wave, and then by relative `errors`. It compiles once for each shape."""
    if not trees.is_inexact(x):
        return x
    wide = trees.wide_dtype(x)
    inputs = x.size // x.shape[-1] if x.ndim > 1 and x.size else 1  # the terms of each output
    place = jnp.arange(x.size, dtype=np.float32).reshape(x.shape) + i
    wave = lambda step: (place * np.float32(step)) % 2 - 1  # a sine takes longer to compile
    shift = near * np.float32(inputs**-0.5) * wave(0.618034)
    factor = 1 + errors * wave(0.754878)
    return ((x.astype(wide) + shift.astype(wide)) * factor.astype(wide)).astype(x.dtype)


def _coarsest(jaxpr: Any) -> float:
    """The largest relative rounding error of the dtypes in a program."""
    dtypes = {getattr(v.aval, "dtype", None) for eqn in jaxpr.eqns for v in eqn.outvars}
    errors = [
        float(jnp.finfo(x).eps) for x in dtypes if x is not None and jnp.issubdtype(x, np.inexact)
    ]
    inner = [_coarsest(part) for eqn in jaxpr.eqns for part in programs_in(eqn)]
    return max([0.0, *errors, *inner])
