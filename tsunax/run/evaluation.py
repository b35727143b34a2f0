"""A state over whole data sets: its mean loss and metrics, or the outputs for each row.

    evaluate(ts.eval_step(loss_fn), state, data)   sums and weights, divided once
    predict(f, state, data)                        f(params, batch), row by row

Both read data in the same way: short batches are padded, and rows spread over the mesh of a state.
"""

import contextvars
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tsunax._core import Extra, Function, PyTree, checks, placement, processes, trees
from tsunax._core.tables import flat
from tsunax._step.evaluation import EvalStep
from tsunax._step.loss_fn import LossFn, hash_of_fields, inputs_of_loss_fn
from tsunax.data.checks import check_batch
from tsunax.data.cursors import as_source
from tsunax.data.positions import Data, innermost
from tsunax.errors import LossError, StateError, WrongTypeError, warn
from tsunax.loss import Loss, check_model_state, rows_of
from tsunax.program import TrainStep
from tsunax.state import TrainState, donated
from tsunax.states import divides_rows, members_of

# whether `evaluate` takes the first batch only: `fit` needs only the names of the numbers
ONE_BATCH: contextvars.ContextVar[bool] = contextvars.ContextVar("one batch", default=False)


@checks.naming_arguments
def evaluate(
    eval_step: Function, state: TrainState, data: Iterable[PyTree], **extra: Any
) -> dict[str, float]:
    """`{"loss": ..., metrics...}` of a state over all of `data`; sizes of batches may differ.

    Batches are merged as sums and weights, on the device, and read once at the end. A batch that is
    shorter than the first batch (with rows of its shape) is padded and masked if the loss function
    names `mask`, and so runs the same program; else it compiles another program.

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
        raise WrongTypeError(
            "eval_step",
            "evaluate()",
            got=trees.describe(eval_step),
            expected="evaluate(ts.eval_step(loss_fn), state, data)",
        )
    is_eval_step = isinstance(eval_step, EvalStep)
    pads = is_eval_step and "mask" not in extra and "mask" in LossFn.of(eval_step.loss_fn).names
    totals: list[tuple[int, Loss]] = []
    first_call = None
    merge, compute = _OF_STATE if members_of(state) is None else _OF_MEMBERS
    agreement = processes.current().agreement("evaluate()", state, innermost(data))
    agreement.start({"eval_step": eval_step}, {})
    for batch, keywords, _ in _placed_batches("evaluate()", state, data, extra, agreement, pads):
        if is_eval_step:
            agreement.program(eval_step.trace, state, batch, keywords)
        loss = eval_step(state, batch, **keywords)
        if not isinstance(loss, Loss):
            raise WrongTypeError(
                "result",
                "eval_step",
                got=trees.describe(loss),
                expected="a ts.Loss",
                fix="Of a loss function: ts.eval_step(loss_fn).",
            )
        if loss.model_state is not None:  # the function carries it from batch to batch
            check_model_state(loss.model_state, state.model_state)
            state = dataclasses.replace(state, model_state=loss.model_state)
            loss = dataclasses.replace(loss, model_state=None)
        if not totals:
            first_call = batch, keywords
        elif first_call is not None:
            if is_eval_step and any(eval_step.changes):
                _check_carries(eval_step.carrying, state, *first_call, compute)
                eval_step.changes.clear()  # loss_fn does not read its changes: checked once a trace
            first_call = None  # frees the memory of a batch
        _add(totals, loss, merge)
        if ONE_BATCH.get():
            break
    _, total = totals.pop()  # a source without a batch raises
    while totals:
        total = merge(totals.pop()[1], total)
    return flat(jax.device_get(compute(total)))


def _add(totals: list[tuple[int, Loss]], loss: Loss, merge: Function) -> None:
    """Add the loss of a batch to the totals of 8, 4, 2 and 1 batches, for example.

    Totals of as many batches are merged, so that the sum of n batches is rounded log2(n) times: one
    total of 150,000 batches was wrong by 4e-5.
    """
    count = 1
    while totals and totals[-1][0] == count:
        loss, count = merge(totals.pop()[1], loss), 2 * count
    totals.append((count, loss))


def _placed_batches(
    where: str,
    state: TrainState,
    data: Iterable[PyTree],
    extra: Extra,
    agreement: processes.Unanimous,
    pads: bool,
    has_mask: bool = True,
    moves: bool = True,
) -> Iterator[tuple[PyTree, dict[str, Any], int]]:
    """Each batch on the devices of a state, its keywords, and how many of its rows are real.

    With `pads` a batch has as many rows as the first batch with rows of its shape at least, and as
    the devices can share, and with `has_mask` the keywords have its mask. Without `moves` the
    batches of a state on one device stay where they are, for a compiled call that moves them in
    less time.
    """
    first_rows: dict[Any, int] = {}
    home = placement.state_sharding(state)
    extra = placement.place_extra(extra, state)
    is_one_process = not isinstance(home, NamedSharding) or home.is_fully_addressable
    # a copy with a separate position, because a run under way may read the same data
    source = as_source(data.afresh() if isinstance(data, Data) else data)
    while (batch := source.next()) is not None:
        batch_rows = check_batch(batch, where)
        mask = {}
        if pads:
            shape_of_row = tuple(np.shape(x)[1:] for x in jax.tree.leaves(batch))
            padded_rows = max(batch_rows, first_rows.setdefault(shape_of_row, batch_rows))
            padded_rows += -padded_rows % placement.divisor(home)
            if has_mask or batch_rows < padded_rows:
                batch, rows_mask = placement.padded(batch, batch_rows, padded_rows)
                mask = {"mask": rows_mask} if has_mask else {}
        agreement.batch("the next batch", batch)
        placement.check_devices(batch, home)
        parts = batch, mask
        if moves or isinstance(home, NamedSharding):
            if source.is_whole or not divides_rows(state):
                batch, mask = placement.replicate(parts, home, shared=False)
            else:
                batch, mask = placement.put_rows(parts, home, whole=is_one_process, shared=False)
        yield batch, {**extra, **mask}, batch_rows
    agreement.batch("the next batch", None)


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
        raise LossError(
            "model_state",
            "evaluate()",
            got="one that loss_fn reads and changes, with train=False",
            expected="one that it reads only",
            fix="Return the one given, or carry it on: ts.eval_step(loss_fn, carry=True).",
        )


def _computed(total: Loss) -> dict[str, Any]:
    return {"loss": total.compute(), **{name: m.compute() for name, m in total.metrics.items()}}


_OF_STATE = jax.jit(Loss.merge), _computed
_OF_MEMBERS = jax.jit(jax.vmap(Loss.merge)), jax.jit(jax.vmap(_computed))


@checks.naming_arguments
def predict(
    f: Function, state: TrainState, data: Iterable[PyTree], *, carry: bool = False, **extra: Any
) -> PyTree:
    """The outputs of a model for each row of `data`: NumPy arrays, rows in the order of the data.

        np.concatenate([f(state.params, batch) for batch in data])

    Rows are spread over the mesh of the state. A batch that is shorter than the first batch (with
    rows of its shape) is padded, runs the same program, and gives its own rows only, so that no row
    of `f` may depend on other rows (`train` is False). The precision is as in `evaluate`. Each
    process gets the rows that it reads. A population gives `(members, rows, ...)`.

    Args:
      f: `f(params, batch, ...)` returns an array, or a tree of arrays, that lead with rows. It may
        name these arguments, like a loss function: `train`, `model_state`, `mask` (f32, 0 for rows
        of padding), `ema`, `step`, and the names in `extra`, as `key`. It is compiled once, so do
        not make a new function for each call.
      data: one epoch of batches, as for `evaluate`; or several data by name, for a dict of results.
      carry: whether `f` returns `(outputs, model_state)`, and the next batch gets that model state.
      extra: given to `f` by name, the same for each batch: so a `key` draws the same numbers in
        each.

    Raises LossError for outputs without these rows, DataError for data without a batch. Warns of
    rows that `drop_remainder=True` leaves out, of shuffled `ts.batches`, and of `interleave`.

    >>> import jax.numpy as jnp, numpy as np, tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> x = np.array([[1, 0], [0, 1], [4, 0]], np.float32)
    >>> predict(lambda params, x: x @ params["w"], state, ts.batches(x, 2))
    array([1., 2., 4.], dtype=float32)
    """
    if isinstance(data, Mapping):
        return {name: predict(f, state, x, carry=carry, **extra) for name, x in data.items()}
    parts = [*predictions(f, state, data, carry=carry, **extra)]
    axis = int(members_of(state) is not None)
    return jax.tree.map(lambda *xs: np.concatenate(xs, axis), *parts)


def predictions(
    f: Function, state: TrainState, data: Iterable[PyTree], *, carry: bool = False, **extra: Any
) -> Iterator[PyTree]:
    """The outputs of each batch, one after another, for results that memory does not hold.

    As `predict`, which concatenates them. The arrays are read-only. The next batch is on its way to
    the devices while you use the outputs of the last one.

    >>> import jax.numpy as jnp, numpy as np, tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> data = ts.batches(np.eye(2, dtype=np.float32), 1)
    >>> [y.tolist() for y in predictions(lambda params, x: x @ params["w"], state, data)]
    [[1.0], [2.0]]
    """
    if not callable(f) or isinstance(f, EvalStep | TrainStep):
        raise WrongTypeError(
            "f",
            "predict()",
            got=trees.describe(f),
            expected="predict(lambda params, batch: ..., state, data)",
        )
    return _predictions(f, state, data, carry, extra)


def _predictions(
    f: Function, state: TrainState, data: Iterable[PyTree], carry: bool, extra: Extra
) -> Iterator[PyTree]:
    _warn_of_rows(innermost(data))
    pads, has_mask = "mask" not in extra, "mask" in LossFn.of(f).names
    is_population = members_of(state) is not None
    agreement = processes.current().agreement("predict()", state, innermost(data))
    agreement.start({"f": f}, {})
    try:
        hash(f)
        model_on = functools.partial(_model, f, carry)
    except TypeError:  # f has no hash, so its program is not kept for another call
        model_on = functools.cache(lambda sharding: _Model(f, carry=carry, sharding=sharding))
    outputs: Any = None
    placed = _placed_batches(
        "predict()", state, data, extra, agreement, pads, has_mask, moves=False
    )
    for batch, keywords, rows in placed:
        model = model_on(None if is_population else _sharding_of_rows(batch))
        # The call moves the batch: `jax.device_put` takes three times as long for a small one.
        with jax.transfer_guard_host_to_device("allow"):
            if outputs is None:  # later calls skip the checks of the state
                agreement.program(model.trace, state, batch, keywords)
                next_outputs: Any = model(state, batch, **keywords)
                state = model.part_read(state)
            else:
                if any(map(trees.is_gone, jax.tree.leaves(state.params)[:1])):
                    raise StateError(donated("predict()"))
                next_outputs = model.compiled(state, batch, keywords)
        if carry:
            next_outputs, model_state = next_outputs
            state = dataclasses.replace(state, model_state=model_state)
        if outputs is not None:
            yield _on_host(*outputs)
        real_rows = (slice(None), slice(rows)) if is_population else (slice(rows),)
        outputs = next_outputs, real_rows
    yield _on_host(*outputs)


@dataclasses.dataclass(frozen=True)
class _Model(EvalStep):
    """The compiled `f` of `predict`, a function `(state, batch, **extra) -> outputs`."""

    sharding: NamedSharding | None = None  # the placement of outputs on a mesh
    title: ClassVar[str] = "predict()"

    def __hash__(self) -> int:
        return hash_of_fields(self)

    @functools.cached_property
    def _fn(self) -> LossFn:
        words = {"title": "f", "caller": self.title, "call": "predict(f, state, data, {}=...)"}
        return dataclasses.replace(LossFn.of(self.loss_fn), **words)

    def _evaluate_member(self, state: TrainState, batch: PyTree, extra: Extra) -> Any:
        fn = self._fn

        def call(params: PyTree, batch: PyTree, keywords: Extra) -> Any:
            inputs = (params, batch) if fn.takes_batch else (params,)
            return fn.fn(*inputs, **jax.tree.map(lambda x: x, keywords))

        keywords = fn.keywords(state, extra, train=False)
        as_loss_fn: Any = call
        inputs = inputs_of_loss_fn(as_loss_fn, state, state.params, batch, keywords, train=False)
        outputs, model_state, rows = call(*inputs, keywords), None, rows_of(batch)
        if self.carry:
            outputs, model_state = outputs
            check_model_state(model_state, state.model_state)
        if not jax.tree.leaves(outputs):
            got, expected = trees.describe(outputs), "an array for each row, or a tree of arrays"
            raise LossError("result", "predict()", got, expected)
        for place, x in trees.leaves_at("outputs", outputs):
            if np.shape(x)[:1] != (rows,):
                raise LossError(
                    place,
                    "predict()",
                    got=trees.describe(x),
                    expected=f"an array that leads with {rows} rows",
                )
        if self.sharding is not None:
            outputs = placement.constrain_rows(outputs, self.sharding)
        return (outputs, model_state) if self.carry else outputs


# A program holds its function, and so all that the function closes over: only the last few stay.
@functools.lru_cache(maxsize=16)
def _model(f: Function, carry: bool, sharding: NamedSharding | None) -> _Model:
    return _Model(f, carry=carry, sharding=sharding)


def _sharding_of_rows(batch: PyTree) -> NamedSharding | None:
    """The sharding of the rows of a batch on a mesh; the outputs get it, too."""
    sharding = getattr(jax.tree.leaves(batch)[0], "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))


def _on_host(outputs: PyTree, rows: tuple[slice, ...]) -> PyTree:
    """Rows of outputs on this process, as NumPy arrays."""

    def local_rows(x: jax.Array) -> np.ndarray:
        if x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        parts = {shard.index[0].start: shard.data for shard in x.addressable_shards}
        return np.concatenate([parts[start] for start in sorted(parts)])

    return jax.tree.map(lambda x: local_rows(x)[rows], outputs)


def _warn_of_rows(data: Any) -> None:
    """Warn of rows that have no prediction, or another place than in the arrays."""
    settings = getattr(data, "settings", {})
    for part in settings.get("parts", [settings]):
        if part.get("drop_remainder") and (rows := part["rows"] % part["batch_size"]):
            warn(f"predict(): drop_remainder=True leaves out {rows} of {part['rows']} rows.")
    if "parts" in settings:
        warn(
            "predict(): ts.data.interleave draws the order of its batches. Return row numbers "
            "beside the outputs, as batch.indices of ts.data.pad: prediction i is row indices[i]."
        )
    if settings.get("shuffle"):
        warn(
            "predict(): the data are shuffled, so prediction i is of row data.order(0)[i]. "
            "Take ts.batches(..., shuffle=False) for the order of the arrays."
        )
