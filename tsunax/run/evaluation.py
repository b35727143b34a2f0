"""The mean loss and metrics of a state over whole data sets: sums and weights, divided once."""

import contextvars
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from tsunax._core import Extra, Function, PyTree, checks, placement, processes, trees
from tsunax._core.tables import flat
from tsunax._step.loss_fn import LossFn
from tsunax._step.members import members_of
from tsunax.data.checks import check_batch
from tsunax.data.cursors import as_source
from tsunax.data.positions import Data, innermost
from tsunax.errors import LossError, WrongTypeError
from tsunax.loss import Loss, check_model_state
from tsunax.program import EvalStep, TrainStep
from tsunax.state import TrainState

# whether `evaluate` takes the first batch only: `fit` needs only the names of the numbers
ONE_BATCH: contextvars.ContextVar[bool] = contextvars.ContextVar("one batch", default=False)


@checks.naming_arguments
def evaluate(
    eval_step: Function, state: TrainState, data: Iterable[PyTree], **extra: Any
) -> dict[str, float]:
    """`{"loss": ..., metrics...}` of a state over all of `data`; sizes of batches may differ.

    Batches are merged as sums and weights, on the device, and read once at the end. A batch that is
    shorter than the first batch is padded and masked if the loss function names `mask`, and so runs
    the same program; else it compiles another program.

    Every batch starts from `state.model_state`, unless the Loss of the previous batch has another
    `model_state`. `ts.eval_step(loss_fn, carry=True)` returns it so, and your function may, too.

    Args:
      eval_step: `eval_step(loss_fn)`, or any `f(state, batch, **extra) -> Loss`.
      data: one epoch of batches, from `batches` or any iterable; or several data by name,
        `{"val": a, "test": b}`, which gives `val/loss` and so on. Iterators are used up.
      extra: given to `eval_step` by name.

    Metrics that compute to an array give one number per element, `name/0`, `name/1`, ...

    Raises DataError for data without a batch, WrongTypeError for data or results of another
    type, LossError for a model state that the loss function reads and changes, without
    `carry=True`.

    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> f = ts.eval_step(lambda params, x: jnp.mean(x @ params["w"]))
    >>> evaluate(f, state, ts.batches(np.array([[1, 0], [0, 1], [4, 0]], np.float32), 2))
    {'loss': 2.33333...}
    """
    if isinstance(data, Mapping):
        return flat({k: evaluate(eval_step, state, part, **extra) for k, part in data.items()})
    if not callable(eval_step) or isinstance(eval_step, TrainStep):  # a train step would donate
        expected = "evaluate(ts.eval_step(loss_fn), state, data)"
        raise WrongTypeError("eval_step", "evaluate()", trees.describe(eval_step), expected)
    is_eval_step = isinstance(eval_step, EvalStep)
    pads = is_eval_step and "mask" not in extra and "mask" in LossFn.of(eval_step.loss_fn).names
    total, first_call, rows, home = None, None, 0, placement.state_sharding(state)
    extra = placement.place_extra(extra, state)
    is_one_process = not isinstance(home, NamedSharding) or home.is_fully_addressable
    is_population = members_of(state) is not None
    merge, compute = _OF_MEMBERS if is_population else _OF_STATE
    agreement = processes.current().agreement("evaluate()", state, innermost(data))
    agreement.start({"eval_step": eval_step}, {})
    # a copy with a separate position, because a run under way may read the same data
    source = as_source(data.afresh() if isinstance(data, Data) else data)
    while (batch := source.next()) is not None:
        batch_rows = check_batch(batch, "evaluate()")
        rows = rows or batch_rows
        mask = {}
        if pads:
            padded_rows = max(batch_rows, rows)
            padded_rows += -padded_rows % placement.divisor(home)
            batch, mask["mask"] = placement.padded(batch, batch_rows, padded_rows)
        agreement.batch("the next batch", batch)
        placement.check_devices(batch, home)
        parts = batch, mask
        if source.is_whole or is_population:
            batch, mask = placement.replicate(parts, home, shared=False)
        else:
            batch, mask = placement.put_rows(parts, home, whole=is_one_process, shared=False)
        if is_eval_step:
            agreement.program(eval_step.trace, state, batch, {**extra, **mask})
        loss = eval_step(state, batch, **extra, **mask)
        if not isinstance(loss, Loss):
            fix = "Of a loss function: ts.eval_step(loss_fn)."
            raise WrongTypeError("result", "eval_step", trees.describe(loss), "a ts.Loss", fix)
        if loss.model_state is not None:  # the function carries it from batch to batch
            check_model_state(loss.model_state, state.model_state)
            state = dataclasses.replace(state, model_state=loss.model_state)
            loss = dataclasses.replace(loss, model_state=None)
        if total is None:
            first_call = batch, {**extra, **mask}
        elif first_call is not None:
            if is_eval_step and any(eval_step.changes):
                _check_carries(eval_step.carrying, state, *first_call, compute)
                eval_step.changes.clear()  # not read: no need to check until the next trace
            first_call = None  # frees the memory of a batch
        total = loss if total is None else merge(total, loss)
        if ONE_BATCH.get():
            break
    agreement.batch("the next batch", None)
    assert total is not None  # a source without a batch raises
    return flat(jax.device_get(compute(total)))


def _check_carries(
    eval_step: EvalStep, state: TrainState, batch: PyTree, extra: Extra, compute: Function
) -> None:
    """Raise LossError if a batch has another loss after its own new model state."""
    first_loss = eval_step(state, batch, **extra)
    second_loss = eval_step(
        dataclasses.replace(state, model_state=first_loss.model_state), batch, **extra
    )
    numbers = [list(flat(jax.device_get(compute(x))).values()) for x in (first_loss, second_loss)]
    if not np.array_equal(*numbers, equal_nan=True):
        got = "one that loss_fn reads and changes, with train=False"
        fix = "Return the one given, or carry it on: ts.eval_step(loss_fn, carry=True)."
        raise LossError("model_state", "evaluate()", got, "one that it reads only", fix)


def _computed(total: Loss) -> dict[str, Any]:
    return {"loss": total.compute(), **{name: m.compute() for name, m in total.metrics.items()}}


_OF_STATE = jax.jit(Loss.merge), _computed
_OF_MEMBERS = jax.jit(jax.vmap(Loss.merge)), jax.jit(jax.vmap(_computed))
