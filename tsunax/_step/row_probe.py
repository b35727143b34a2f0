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
  rows and for two micro-batches, is not finite, or has a model state and no `train`.

Params and rows may agree by chance (zeros at the start, sorted labels), so the loss is measured
again for params near these, with the rows in another order. Traced arrays have no values: inside a
program of your own numbers are made up for them, unless they would be too many.
"""

import contextlib
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import Extra, Function, PyTree, trees
from tsunax._step.loss_fn import LossFn, seen_by
from tsunax.errors import message, warn
from tsunax.loss import rows_of
from tsunax.state import TrainState, trained_part, with_rest

ROWS = 8  # of a micro-batch: more take time, and with fewer some losses raise
PARTS = 8  # micro-batches: of two, masks may agree by chance; of large ones two are enough
NEAR = 0.0, 0.25, 0.5, 1.0, 1.5  # how much the params of each measurement change a layer's outputs, about
LEAST = 1e-4  # a smaller part of a loss is left to rounding, whatever the dtype
MOST = 1 << 24  # elements to make up: more would take seconds, and memory that a step needs

_NOT_A_MEAN = (
    "Return a mean over rows; under a mask or weights ts.Loss.mean(values, mask). If the loss "
    "compares rows or uses statistics of the batch, give it in two parts, "
    "ts.losses.whole_batch(embed, loss), or give it the other rows as an extra argument. "
    "With check_rows=False nothing is measured."
)
_SUM = (
    "It is a sum over rows, and the sums of micro-batches are averaged. "
    "Return the mean, or ts.Loss(total, weight) with the weight of these rows."
)
_ALONE = "Each row is alone in its gradient, so that this is another loss than that of the batch."
_EMBED = "Each micro-batch has only its own rows: mix them in loss(embeddings, batch)."


class Difference(NamedTuple):
    """The loss of some rows, and the merged loss of the same rows in micro-batches."""

    whole: float
    merged: float
    rows: int
    parts: int


class RowProbe:
    """Before the first call of a step, `probe(state, batch, extra)` warns if its loss mixes rows.

    The other calls look at `pending` only.
    """

    def __init__(
        self, loss_fn: Function, accumulate: int, per_example: bool | Function, check_rows: bool
    ) -> None:
        self._loss_fn, self._accumulate = loss_fn, accumulate
        self._alone = per_example is not False
        self.pending: bool = check_rows and (accumulate > 1 or self._alone)

    def __call__(self, state: TrainState, batch: PyTree, extra: Extra) -> None:
        self.pending, difference, rows = False, None, rows_of(batch)
        of_step = 1 if self._alone else -(-rows // self._accumulate)
        few = [k for k in range(ROWS, of_step) if of_step % k == 0][:1]
        for size in [*few, of_step] if rows > 1 else []:
            with (
                contextlib.suppress(Exception),  # the step itself raises what is wrong
                jax.transfer_guard("allow"),
                jax.default_matmul_precision("highest"),
                jax.ensure_compile_time_eval(),
            ):
                difference = self.difference(size, *_with_values(state, batch, extra))
                break
        if difference is not None:
            self._warn(difference)

    def difference(
        self, size: int, state: TrainState, batch: PyTree, extra: Extra
    ) -> Difference | None:
        """The first one that counts, for micro-batches of `size` rows."""
        if jnp.ndim(state.clock) > 1:
            from tsunax._step.members import of_first_member

            state, batch, extra = of_first_member(state, batch, extra)
        fn = LossFn.of(self._loss_fn)
        if hasattr(self._loss_fn, "mean_embedding"):  # of `losses.whole_batch`
            fn = dataclasses.replace(fn, fn=self._loss_fn.mean_embedding)
        count = rows_of(batch)
        n = count if self._alone else self._accumulate
        if ("model_state" in fn.names and "train" not in fn.names) or (
            count % n and "mask" not in fn.names
        ):
            return None
        train = {"key", "model_state"}.isdisjoint(fn.names)
        parts = min(n, PARTS, max(2, PARTS * ROWS // 2 // size))
        mask = extra.pop("mask", None)
        if mask is None and "mask" in fn.names and count % n:
            mask = np.arange(count) < count - 1  # the step pads the batch
        take = np.linspace(0, count - 1, parts * size).astype(int)
        taken = jax.tree.map(lambda x: x[take], (batch, mask))

        @jax.jit
        def loss_of(state, taken, extra, index, near, draw, jitter):
            state, extra = jax.tree.map(lambda x: _redrawn(x, draw), (state, extra))
            leaves, treedef = jax.tree.flatten(trained_part(state))
            moved = [_moved(x, i, near, jitter) for i, x in enumerate(leaves)]
            params = with_rest(state, treedef.unflatten(moved))
            batch, mask = jax.tree.map(lambda x: x[index], taken)
            extra = extra if mask is None else {**extra, "mask": mask.astype(np.float32)}
            keywords = fn.keywords(state, batch, extra, train=True)
            if "train" in keywords:
                keywords["train"] = train
            loss = fn(*seen_by(fn, state, params, batch, keywords, train=train), keywords)
            return loss.compute(), loss.weight

        def measure(order: np.ndarray, near: float, draw: int) -> tuple[float, float, float]:
            """The loss of the rows, that of their micro-batches, and the size of all of these."""
            more = np.float32(near), np.uint32(draw), np.float32(draw * rounding)
            at = lambda index: tuple(map(float, loss_of(state, taken, extra, index, *more)))
            cut = [pair for i in range(parts) if (pair := at(order[i::parts]))[1] != 0]
            losses, weights = zip(*cut, strict=True)
            whole, merged = at(order)[0], float(np.average(losses, weights=weights))
            return whole, merged, float(np.max(np.abs([whole, merged, *losses])))

        rounding, order = 0.0, np.arange(parts * size)
        start = state, taken, extra, order, np.float32(0), np.uint32(0), np.float32(0)
        rounding = _coarsest(loss_of.trace(*start).jaxpr.jaxpr)
        for near in NEAR:
            whole, merged, scale = measure(order, near, 0)
            least = max(LEAST, 2 * rounding) * scale
            if abs(whole - merged) > least and not (
                self._alone and abs(whole - parts * merged) < least
            ):
                again = measure(order, near, 1)
                noise = max(abs(whole - again[0]), abs(merged - again[1]))
                gap = min(abs(whole - merged), abs(again[0] - again[1]))
                if gap > max(least, 8 * noise):
                    return Difference(whole, merged, parts * size, parts)
            order = np.random.default_rng(0).permutation(order)
        return None

    def _warn(self, difference: Difference) -> None:
        whole, merged, rows, parts = difference
        what, fix = "loss", _NOT_A_MEAN
        if self._alone:
            fix = _ALONE
        elif hasattr(self._loss_fn, "mean_embedding"):
            what, fix = "embed", _EMBED
        elif abs(whole - parts * merged) < LEAST * abs(whole):
            fix = _SUM
        got = f"{whole:.6g} for {rows} rows and {merged:.6g} for the same in {parts} micro-batches"
        under = "per_example" if self._alone else f"accumulate={self._accumulate}"
        expected = f"a mean over rows under {under}"
        warn(message(what, trees.describe_call(self._loss_fn), got, expected, fix))


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


def _moved(x: Any, i: int, near: jax.Array, jitter: jax.Array) -> Any:
    """Leaf i, moved by a wave, and then by relative errors of `jitter`."""
    if not trees.is_inexact(x):
        return x
    wide, inputs = trees.wide_dtype(x), x.size // x.shape[-1] if x.ndim > 1 and x.size else 1
    angle = jnp.arange(1, x.size + 1, dtype=np.float32).reshape(x.shape) + np.float32(i)
    wave = near * np.float32(inputs**-0.5) * jnp.sin(np.float32(12.9898) * angle)
    errors = 1 + jitter * jnp.cos(np.float32(3.3) * angle)
    return ((x.astype(wide) + wave.astype(wide)) * errors.astype(wide)).astype(x.dtype)


def _coarsest(jaxpr: Any) -> float:
    """The largest rounding error, relative, of the dtypes in a program."""
    dtypes = {getattr(v.aval, "dtype", None) for eqn in jaxpr.eqns for v in eqn.outvars}
    own = [
        float(jnp.finfo(x).eps) for x in dtypes if x is not None and jnp.issubdtype(x, np.inexact)
    ]
    inner = [_coarsest(part) for eqn in jaxpr.eqns for part in trees.programs_in(eqn)]
    return max([0.0, *own, *inner])
