"""The batches of a call: feeders, which read them, and their shapes, room and placement.

The room of a call is the number of batches that its program is compiled for. It follows from the
bytes of a batch and from settings alone; the clock decides how many batches a call has.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from tsunax._core import PyTree, Scalar, Step, TreeDef, placement, trees
from tsunax.data.checks import check_batch
from tsunax.data.cursors import Source
from tsunax.data.positions import Data, innermost
from tsunax.errors import DataError, warn
from tsunax.program import TrainStep
from tsunax.run import fused_loop

# Bytes of the batches of a call: they fit in a cache, and are a fraction of a model's memory.
BUFFER_BYTES = 1 << 20
# The most batches of a call: its fixed cost does not matter then, and a progress bar still moves.
MOST_BATCHES = 64
# Steps of a call if the program gathers or makes its batches: then only infos need memory.
RESIDENT = 1024
NO_LIMIT = np.iinfo(np.int32).max
# Bytes of the copies of a single batch, which are made once for many calls.
REPEATED_BYTES = 4 << 20
MOST_SHAPES = 16  # shapes that the batches of a run may have: each shape compiles


class Chunk(NamedTuple):
    """Batches for one call."""

    feed: PyTree  # on the device
    steps: int
    epochs: Any  # int (steps,), or one int
    bytes: int


class Limits(NamedTuple):
    """The limits of the calls of a run."""

    steps_per_call: int | str | None = "auto"
    interval: float = float("inf")  # steps between two boundaries
    steps: float = float("inf")  # steps of the whole run
    last_epoch: float = 0  # a call may cross the ends of all epochs before this epoch; 0: of none


def epochs_of(chunks: Sequence[Chunk]) -> np.ndarray:
    return np.concatenate([np.broadcast_to(chunk.epochs, chunk.steps) for chunk in chunks])


class Feeder:
    """A way to read a source; see `run/feed.py` for the five feeders."""

    size: int = 1  # the most steps of a call, of batches of the newest shape

    def take(self, steps: int, home: Any, step: int) -> Chunk | None:
        """The batches of the next call, for a state with the sharding `home` after `step`.

        `steps` is the most steps of the call. None at the end of an epoch, unless calls cross it.
        """
        raise NotImplementedError

    def forget(self) -> None:
        """Drop a batch that is repeated."""


class Form(NamedTuple):
    """The room and the bytes of batches of one shape."""

    room: int  # batches of a call
    bytes: int  # bytes of a batch
    is_tail: bool  # whether it is the short batch at the end of an epoch


class Forms:
    """The shapes of the batches of a run, each checked when it first comes."""

    def __init__(self, data: Any, limits: Limits, repeated_bytes: int | None = None) -> None:
        self._data, self._limits, self._repeated_bytes = data, limits, repeated_bytes
        self._first_batch: Any = None  # shapes of the first batch
        self._forms: dict[Any, Form] = {}

    def form_of(self, leaves: list[Any], treedef: TreeDef, step: int, axes: int = 0) -> Form:
        """The form of a batch, or of several behind `axes` axes."""

        def type_of(x: Any) -> tuple[Any, Any]:
            """Shape and dtype; () and None for a string, which `check_batch` refuses."""
            return getattr(x, "shape", ())[axes:], getattr(x, "dtype", None)

        types = tuple(map(type_of, leaves))
        if (treedef, types) not in self._forms:
            as_struct = lambda x, shape, dtype: (
                x if dtype is None else jax.ShapeDtypeStruct(shape, dtype)
            )
            structs = [as_struct(x, *leaf_type) for x, leaf_type in zip(leaves, types, strict=True)]
            batch = treedef.unflatten(structs)
            is_on_device = any(isinstance(x, jax.Array) for x in leaves)
            check_batch(batch, f"step {step}")
            bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(batch))
            self._first_batch = batch if self._first_batch is None else self._first_batch
            is_tail = batch is not self._first_batch and self._is_tail(batch, step)
            room = 2 if is_tail else self._room(bytes, is_on_device)  # a tail comes once an epoch
            self._forms[treedef, types] = Form(room, bytes, is_tail)
        return self._forms[treedef, types]

    def room_of(self, batch: PyTree) -> int:
        """The batches of a call for batches of this shape, which may be new."""
        leaves = jax.tree.leaves(batch)
        is_on_device = any(isinstance(x, jax.Array) for x in leaves)
        return self._room(sum(getattr(x, "nbytes", 0) for x in leaves), is_on_device)

    def _room(self, bytes: int, is_on_device: bool) -> int:
        if self._repeated_bytes is not None:
            return buffer_size(bytes, self._limits, self._repeated_bytes)
        # a program stacks arrays on a device, with an operand for each batch
        most_batches = 8 if is_on_device else MOST_BATCHES
        return buffer_size(bytes, self._limits, most_batches=most_batches)

    def _is_tail(self, batch: PyTree, step: int) -> bool:
        """Whether it is the short batch at the end of an epoch; warns of any other new shape."""
        where, first = f"batch at step {step}", self._first_batch
        if difference := trees.first_difference(batch, first, "batch"):
            raise DataError(f"{where}: {difference}. Batches of a run have one structure.")
        if getattr(innermost(self._data), "has_few_shapes", False):
            return False  # a few shapes, by design
        row_shapes = [[(x.shape[1:], x.dtype) for x in jax.tree.leaves(b)] for b in (batch, first)]
        differs_in_rows_alone = row_shapes[0] == row_shapes[1]
        if len(self._forms) >= MOST_SHAPES:
            got = f"shape number {MOST_SHAPES + 1}"
            fix = "pad to a few sizes, ts.data.pad and ts.data.interleave"
            if differs_in_rows_alone:
                fix = "ts.batches(arrays, batch_size), or pad the rows and name `mask` in loss_fn"
            fix = f"Each one compiles: {fix}."
            raise DataError(
                "batch", f"step {step}", got, f"{MOST_SHAPES} shapes at most in a run", fix
            )
        # Batches with other numbers of rows warn when the number of shapes has doubled.
        if not differs_in_rows_alone or len(self._forms) in (2, 4, 8):
            listed = lambda batch: ", ".join(map(trees.describe, jax.tree.leaves(batch)))
            warn(
                f"{where}: {listed(batch)} after {listed(first)}, which compiles the step once more"
            )
        gathers = isinstance(self._data, Data) and self._data.gathers
        may_be_tail = differs_in_rows_alone and gathers
        return may_be_tail and check_batch(batch) < check_batch(first)


def with_room(x: Any, size: int) -> Any:
    """An array with a first axis of `size`: its last row is repeated."""
    if len(x) == size:
        return x
    if isinstance(x, jax.Array):
        return jnp.concatenate([x, jnp.broadcast_to(x[-1:], (size - len(x), *x.shape[1:]))])
    out = placement.aligned_empty((size, *x.shape[1:]), x.dtype)
    out[: len(x)], out[len(x) :] = x, x[-1:]
    return out


def buffer_size(
    batch_bytes: int, limits: Limits, bytes: int = BUFFER_BYTES, most_batches: int = MOST_BATCHES
) -> int:
    """The number of batches for which a call has room; at least 2: a loop of one is unrolled.

    It depends on sizes and settings alone: the clock chooses how many batches a call has.
    """
    if isinstance(limits.steps_per_call, int):
        return int(max(2, min(limits.steps_per_call, limits.interval)))
    return int(max(2, min(bytes // max(batch_bytes, 1), most_batches, limits.interval)))


def put_on_devices(
    stack: fused_loop.Stacked, home: Any, step: Step, is_whole: bool = False
) -> fused_loop.Stacked:
    """Put stacked batches on the devices of the state.

    Rows that do not divide by the devices of a mesh are padded if the step masks. A batch that is
    whole on every process stays whole. On one device jit places them, which is fastest.
    """
    is_on_mesh = isinstance(home, NamedSharding)
    placement.check_devices(stack.batches, home)
    if is_on_mesh and not is_whole and getattr(step, "masks", False):
        rows = jax.tree.leaves(stack.batches)[0].shape[1]
        if padding := -rows % placement.divisor(home, getattr(step, "accumulate", 1)):
            batches, mask = placement.padded(stack.batches, rows, rows + padding, axis=1)
            stack = fused_loop.Stacked(batches, placement.put_rows(mask, home, shared=False))
    if is_whole:
        return placement.replicate(stack, home, shared=False)
    has_arrays = any(isinstance(x, jax.Array) for x in jax.tree.leaves(stack))
    if is_on_mesh or (home is not None and has_arrays):
        return placement.put_rows(stack, home, axis=1, shared=False)
    return stack


@functools.lru_cache(maxsize=128)
def count_of(steps: int, limit: int = NO_LIMIT) -> np.ndarray:
    """The counts for a call of the loop: its steps, and rejected steps in a row that end it."""
    return np.array([steps, limit], np.int32)


class NoBatches(Feeder):
    """Calls without batches, for a step that takes its data from the state."""

    def __init__(self, limits: Limits) -> None:
        steps = limits.steps_per_call
        self._is_looped = steps is not None
        room = steps if isinstance(steps, int) else RESIDENT
        self.size: int = int(max(2, min(room, limits.interval, RESIDENT)))

    def take(self, steps: int, home: Any, step: int) -> Chunk:
        if not self._is_looped:
            return Chunk(fused_loop.Single(None), 1, 0, 0)
        return Chunk(fused_loop.Nothing(self.size), min(steps, self.size), 0, 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gathered:
    """Rows of arrays on the device: batch i has `order[first + i·rows : first + (i + 1)·rows]`."""

    arrays: PyTree
    order: jax.Array | None  # int32 (all rows,); None: in sequence
    first: Scalar  # int32
    rows: int = field(metadata={"static": True})
    size: int = field(metadata={"static": True})
    spread: Any = field(metadata={"static": True})  # the sharding of a batch's rows, on a mesh

    def batch_at(self, i: Scalar) -> PyTree:
        from tsunax.data.on_devices import gather

        batch = gather(self.arrays, self.order, self.first + i * self.rows, (self.rows,))
        return batch if self.spread is None else placement.constrain_rows(batch, self.spread)


class ResidentRows(Feeder):
    """The rows of arrays on the device, which the program gathers."""

    def __init__(self, source: Source, divides_rows: bool) -> None:
        self._source, self._divides_rows = source, divides_rows
        self.size: int = max(2, min(len(source.data), RESIDENT))
        self._full_rows = 0  # rows of a batch, except for a short batch at the end of an epoch

    def take(self, steps: int, home: Any, step: int) -> Chunk | None:
        source, epoch = self._source, self._source.epoch
        if (gathered := source.advance(min(steps, self.size))) is None:
            return None
        first, (steps, rows) = gathered
        self._full_rows = max(self._full_rows, rows)
        size = self.size if rows == self._full_rows else 2  # the short batch
        spread = placement.rows_over(home, rows) if self._divides_rows else None
        data, start = source.data, np.int32(first)
        feed = Gathered(data.resident, data.device_order(epoch), start, rows, size, spread)
        return Chunk(feed, steps, epoch, 0)


class OfHost(Feeder):
    """A feeder of batches on the host, with one form for each of their shapes."""

    def __init__(
        self, source: Source, forms: Forms, step: Step, divides_rows: bool, last_epoch: float = 0
    ) -> None:
        self._source, self._forms, self._step = source, forms, step
        self._divides_rows = divides_rows
        self._last_epoch = last_epoch  # a call may cross the ends of earlier epochs; 0: of none

    @property
    def _is_whole(self) -> bool:
        """Whether each device takes all rows, as the members of a population do."""
        return self._source.is_whole or not self._divides_rows


class SingleBatches(OfHost):
    """Single batches, for a step that is called without a loop."""

    def take(self, steps: int, home: Any, step: int) -> Chunk | None:
        epoch = self._source.epoch
        if (batch := self._source.next()) is None:
            return None
        form = self._forms.form_of(*jax.tree.flatten(batch), step)
        if self._is_whole:
            batch = placement.replicate(batch, home, shared=False)
        elif not isinstance(self._step, TrainStep) and isinstance(home, NamedSharding):
            batch = placement.put_rows(batch, home, shared=False)  # a TrainStep places its batch
        return Chunk(fused_loop.Single(batch), 1, epoch, form.bytes)


class OneBatch(OfHost):
    """Many epochs of data with a single batch, which is read again after every boundary."""

    _copies: fused_loop.Stacked | None = None

    def take(self, steps: int, home: Any, step: int) -> Chunk:
        source, stack = self._source, self._copies
        if source.position:  # behind its only batch: take the end of the epoch
            source.next()
        epoch = source.epoch
        if stack is None:
            leaves, treedef = jax.tree.flatten(source.next())
            self.size: int = self._forms.form_of(leaves, treedef, step).room
            copies = [with_room(x[None], self.size) for x in leaves]
            stack = fused_loop.Stacked(treedef.unflatten(copies))
            placement.check_devices(stack.batches, home)
            stack = stack if isinstance(home, NamedSharding) else jax.device_put(stack, home)
        steps = int(min(steps, self.size, self._last_epoch - epoch))
        source.count_repeated_epochs(steps)
        self._copies = put_on_devices(stack, home, self._step, self._is_whole)
        return Chunk(self._copies, steps, np.arange(epoch, epoch + steps), 0)

    def forget(self) -> None:
        self._copies = None


class Stacks(OfHost):
    """Batches that are stacked on the host."""

    def take(self, steps: int, home: Any, step: int) -> Chunk | None:
        source, steps = self._source, min(steps, self.size)
        epoch = source.epoch
        epochs: Any = epoch  # an array if the call crosses the end of an epoch
        if epoch < self._last_epoch and len(source.data) < steps:
            steps_left = (self._last_epoch - epoch) * len(source.data) - source.position
            batches, epochs = self._over_epochs(int(min(steps, steps_left)))
        else:
            batches = source.take(steps, self._forms.room_of)
        if batches is None:
            return None
        leaves, treedef = jax.tree.flatten(batches)
        form = self._forms.form_of(leaves, treedef, step, axes=1)
        if not form.is_tail:
            self.size: int = form.room
        stack = fused_loop.Stacked(treedef.unflatten(with_room(x, form.room) for x in leaves))
        stack = put_on_devices(stack, home, self._step, self._is_whole)
        return Chunk(stack, len(leaves[0]), epochs, form.room * form.bytes)

    def _over_epochs(self, steps: int) -> tuple[Any, np.ndarray]:
        """The next `steps` batches, over the ends of short epochs, and the epoch of each batch."""
        stacks, epochs = [], []
        while len(epochs) < steps:
            epoch = self._source.epoch
            if (stack := self._source.take(steps - len(epochs))) is not None:
                stacks.append(stack)
                epochs += [epoch] * len(jax.tree.leaves(stack)[0])
        return jax.tree.map(lambda *x: np.concatenate(x), *stacks), np.array(epochs)
