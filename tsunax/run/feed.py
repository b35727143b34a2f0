"""From batches to what a call of the compiled loop takes: stacked, placed where the state lives."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from tsunax._core import PyTree, placement, trees
from tsunax._step.members import members_of
from tsunax.data.checks import check_batch
from tsunax.data.cursors import Reading, Source
from tsunax.data.positions import Data, Positioned, innermost
from tsunax.errors import DataError, warn
from tsunax.program import TrainStep
from tsunax.run import fused_loop, info_columns
from tsunax.states import COUNTED

BUFFER_BYTES = 1 << 20  # of batches of one call: in a cache, and a fraction of a model's needs
MOST = 64  # batches of a call: its fixed cost is gone by then, and a progress bar still moves
RESIDENT = 1024  # steps of a call whose batches lie on the device: so long as its infos are
MOST_ROOM = 1024  # of a call for so many steps; for more only what is left, if that is known
NO_LIMIT = np.iinfo(np.int32).max
REPEATED_BYTES = 4 << 20  # of copies of the only batch: made once for many calls
AHEAD = 64  # batches of arrays in memory that are gathered at once, however few a call takes
SHAPES = 16  # that batches may have in a run: each one compiles


class NoData:
    """What `fit(step, state, steps=n)` reads: no batches, and no epochs."""

    def __iter__(self) -> Iterator[PyTree]:
        return itertools.repeat(None)


class Chunk(NamedTuple):
    """Batches for one call."""

    feed: PyTree  # on the device
    n: Any  # int32 (2,): how many steps, and how many rejected ones in a row end them
    steps: int
    epochs: Any  # int (steps,), or one int
    bytes: int


def epochs_of(chunks: Sequence[Chunk]) -> np.ndarray:
    if all(isinstance(chunk.epochs, int) for chunk in chunks):
        return np.repeat([chunk.epochs for chunk in chunks], [chunk.steps for chunk in chunks])
    return np.concatenate([np.broadcast_to(chunk.epochs, chunk.steps) for chunk in chunks])


_UNKNOWN = object()


class Feed:
    """Chunks of data, for the state of a run: what `fit` asks for batches."""

    def __init__(
        self,
        step: Any,
        data: Iterable[PyTree] | None,
        state: PyTree,
        steps_per_call: int | str | None,
        interval: float,
        left: float = float("inf"),
        *,
        # a new state begins with the first batch, a trained one goes on where it was; else as `for`
        goes_on: bool = False,
        crosses: bool = False,  # whether a call may go beyond the end of an epoch that is shorter
        last: int | None = None,  # epochs in all: no call goes beyond
    ):
        data = NoData() if data is None else data
        self._step, self._crosses = step, crosses
        self._last = NO_LIMIT if last is None else last
        self._repeats = crosses and isinstance(data, list | tuple) and len(data) == 1
        self._repeated: Any = None  # copies of the only batch, on the device
        self._is_population = members_of(state) is not None
        is_new = goes_on and isinstance(data, Data) and _is_new(state)
        self._reading: Reading = Reading(data, goes_on, is_new)
        self.source: Source = self._reading.source
        if isinstance(steps_per_call, int):  # room for more than are left would never be filled
            steps_per_call = int(min(steps_per_call, max(MOST_ROOM, left)))
        self._setting, self._interval = steps_per_call, interval
        self.size: int = 1  # batches of a call at most, of the shape of the first one
        self._first: Any = None  # that batch, as shapes
        self._sizes: dict[Any, tuple[int, int]] = {}
        self._ended, self._rows, self._ahead = False, 0, 1
        self._block: _Block | None = None
        self._home: Any = _UNKNOWN

    @property
    def epoch(self) -> int:
        return self.source.epoch

    def steps_to(self, epochs: int, start: int) -> int | None:
        """The step at which so many epochs are over, if none is rejected; None if unknown."""
        try:
            return start + (epochs - self.epoch) * len(self.source.data) - self.source.position
        except Exception:  # a loader may raise anything there
            return None

    def ended(self) -> bool:
        """Whether an epoch has ended since the last call of this."""
        data = self.source.data
        # the length of a stream is unknown, and that of another loader may be wrong
        is_known = isinstance(innermost(data), Positioned | list | tuple)
        is_over = is_known and self.source.position >= len(data)
        if is_over and not self._ended and self._block is None:
            self._ended = self.source.take(1) is None
        ended, self._ended = self._ended, False
        return ended

    def take(
        self, n: int, state: PyTree, step: int, limit: int = NO_LIMIT, until: float = 1
    ) -> Chunk | None:
        """The next batches, n at most and all of one shape; None at the end of an epoch.

        For `until` steps nobody looks at the place of the data: so far may be read ahead.
        """
        chunk = self._take(n, state, step, limit, until)
        self._ended = chunk is None
        self._reading.follow(has_begun=True)
        return chunk

    def _take(self, n: int, state, step: int, limit: int, until: float) -> Chunk | None:
        epochs, data = self.epoch, self.source.data
        if isinstance(data, NoData):
            if self._setting is None:
                return Chunk(fused_loop.Single(None), None, 1, 0, 0)
            most = self._setting if isinstance(self._setting, int) else RESIDENT
            self.size = int(max(2, min(most, self._interval, RESIDENT)))
            count = min(n, self.size)
            return Chunk(fused_loop.Nothing(self.size), _count(count, limit), count, 0, 0)
        if self._setting is None:
            return self._single(state, step)
        if isinstance(data, Data) and self._is_beside(data.resident, state):
            return self._resident(data, n, state, limit)
        if self._repeats:
            return self._one_batch(n, state, step, limit)
        if self._block is None:
            most, before = min(n, self.size), None
            is_of_arrays = isinstance(data, Data) and data.is_of_arrays
            # epochs of batches of one shape, shorter than a call
            if self._crosses and is_of_arrays and data.tail_rows == 0 and len(data) < most:
                left = (self._last - epochs) * len(data) - self.source.position
                batches, epochs = self._across(min(most, left))
            else:
                ahead = int(min(self._ahead, until)) if is_of_arrays else 1
                before = self.source.state() if ahead > 1 else None
                batches = self.source.take(max(ahead, most))
            if batches is None:
                return None
            leaves, treedef = jax.tree.flatten(batches)
            size, bytes = self._known(treedef, leaves, step, 1)
            self._block = _Block(leaves, treedef, n, size, size * bytes, before)
        return self._of_block(self._block, n, state, limit, epochs)

    def _of_block(self, block: "_Block", n: int, state, limit: int, epochs: Any) -> Chunk:
        batches, count = block.next(n)
        if block.at == block.count:
            self._block = None
        feed, sent = self._placed(fused_loop.Stacked(batches), count, state, limit)
        return Chunk(feed, sent, count, epochs, block.bytes)

    def rest(self, n: int, steps: int, state: PyTree, limit: int) -> list[Chunk]:
        """Further chunks of n batches that were read already, for at most `steps` steps."""
        chunks, epoch = [], self.epoch
        while self._block is not None and steps >= n:
            chunks.append(self._of_block(self._block, n, state, limit, epoch))
            steps -= n
        return chunks

    def _across(self, n: int) -> tuple[Any, np.ndarray]:
        """The next n batches, and the epoch of each."""
        parts, epochs = [], []
        while len(epochs) < n:
            epoch = self.epoch
            if (part := self.source.take(n - len(epochs))) is not None:
                parts.append(part)
                epochs += [epoch] * len(jax.tree.leaves(part)[0])
        return jax.tree.map(lambda *x: np.concatenate(x), *parts), np.array(epochs)

    def _one_batch(self, n: int, state, step: int, limit: int) -> Chunk:
        """Many epochs of the only batch of the data. It is read again after every boundary."""
        if self.source.position:
            self.source.next()
        epoch, home = self.epoch, self._home_of(state)
        if self._repeated is None:
            leaves, treedef = jax.tree.flatten(self.source.next())
            size = self._known(treedef, leaves, step, 0)[0]
            feed = fused_loop.Stacked(treedef.unflatten([with_room(x[None], size) for x in leaves]))
            placement.check_devices(feed.batches, home)
            self._repeated = feed if isinstance(home, NamedSharding) else jax.device_put(feed, home)
        n = min(n, self._repeated.size, self._last - epoch)
        self.source.again(n)
        self._repeated, sent = self._placed(self._repeated, n, state, limit)
        return Chunk(self._repeated, sent, n, np.arange(epoch, epoch + n), 0)

    def _placed(self, feed, n: int, state, limit: int) -> tuple[Any, Any]:
        return place(feed, n, self._home_of(state), limit, step=self._step, whole=self._is_whole)

    @property
    def _is_whole(self) -> bool:
        """Whether each device takes all rows: of a population each has members of its own."""
        return self.source.is_whole or self._is_population

    def _single(self, state, step: int) -> Chunk | None:
        """The next batch, for a step that is called as it is: a `TrainStep` places it itself."""
        epoch = self.epoch
        if (batch := self.source.next()) is None:
            return None
        leaves, treedef = jax.tree.flatten(batch)
        bytes = self._known(treedef, leaves, step, 0)[1]
        home = self._home_of(state)
        if self._is_whole:
            batch = placement.replicate(batch, home, shared=False)
        elif not isinstance(self._step, TrainStep) and isinstance(home, NamedSharding):
            batch = placement.put_rows(batch, home, shared=False)
        return Chunk(fused_loop.Single(batch), None, 1, epoch, bytes)

    def sync(self) -> None:
        """Put the data back to where they are without what was read ahead; the state may move."""
        self._home, self._repeated = _UNKNOWN, None
        if self._block is not None:
            place, self._block = self.place(), None
            self.source.restore(place)
        self._reading.follow()

    def _is_beside(self, resident: PyTree, state) -> bool:
        """Whether arrays of data are on the devices of the state, or go there with its program."""
        home = self._home_of(state)
        are_there = lambda x: home is None or not x.committed or x.devices() == home.device_set
        return resident is not None and all(map(are_there, jax.tree.leaves(resident)))

    def _resident(self, data: Any, n: int, state, limit: int) -> Chunk | None:
        """The next rows of arrays on the device, which the program gathers: nothing is copied."""
        from tsunax.run.resident_batches import Gathered

        epoch = self.epoch
        self.size = max(2, min(len(data), RESIDENT))
        if (ahead := self.source.advance(min(n, self.size))) is None:
            return None
        first, (count, rows) = ahead
        self._rows = max(self._rows, rows)
        size = self.size if rows == self._rows else 2  # the short batch at the end
        spread = None if self._is_population else placement.rows_over(self._home_of(state), rows)
        order, first = data.device_order(epoch), np.int32(first)
        feed = Gathered(data.resident, order, first, rows, size, spread)
        return Chunk(feed, _count(count, limit), count, epoch, 0)

    def _home_of(self, state) -> Any:
        if self._home is _UNKNOWN:
            self._home = placement.state_sharding(state)
        return self._home

    def _known(self, treedef, leaves: list, step: int, stacked: int) -> tuple[int, int]:
        """The room of a call for such batches (behind `stacked` axes), and the bytes of one."""

        def form(x: Any) -> tuple[Any, Any]:  # a string has neither: check_batch refuses it
            return getattr(x, "shape", ())[stacked:], getattr(x, "dtype", None)

        shapes = tuple(map(form, leaves))
        if (treedef, shapes) not in self._sizes:
            like = lambda x, of: x if of[1] is None else jax.ShapeDtypeStruct(*of)
            one = treedef.unflatten(map(like, leaves, shapes))
            check_batch(one, f"step {step}")
            bytes = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes)
            if self._first is not None and self._is_rest(one, step):
                size = 2  # one in an epoch
            else:
                self._first = one if self._first is None else self._first
                room = ((), REPEATED_BYTES) if self._repeats else (leaves, BUFFER_BYTES)
                size = self.size = buffer_size(bytes, *room, self._setting, self._interval)
            self._sizes[treedef, shapes] = size, bytes
        size, bytes = self._sizes[treedef, shapes]
        self._ahead = max(1, min(AHEAD, BUFFER_BYTES // max(bytes, 1)))
        return size, bytes

    def _is_rest(self, one, step: int) -> bool:
        """Whether it is the short batch at the end of an epoch; warns of any other new shape."""
        where = f"batch at step {step}"
        if difference := trees.first_difference(one, self._first, "batch"):
            raise DataError(f"{where}: {difference}. Batches of a run have one structure.")
        kinds = [[(x.shape[1:], x.dtype) for x in jax.tree.leaves(b)] for b in (one, self._first)]
        if getattr(innermost(self.source.data), "has_few_shapes", False):
            return False  # its shapes are a few, and known to the user
        rows_only = kinds[0] == kinds[1]
        if len(self._sizes) >= SHAPES:
            got = f"shape number {SHAPES + 1}"
            fix = "pad to a few sizes, ts.data.pad and ts.data.interleave"
            if rows_only:
                fix = "ts.batches(arrays, batch_size), or pad the rows and name `mask` in loss_fn"
            fix = f"Each one compiles: {fix}."
            raise DataError("batch", f"step {step}", got, f"{SHAPES} shapes at most in a run", fix)
        if not rows_only or len(self._sizes) in (2, 4, 8):
            listed = lambda batch: ", ".join(map(trees.describe, jax.tree.leaves(batch)))
            text = f"{listed(one)} after {listed(self._first)}, which compiles the step once more"
            warn(f"{where}: {text}")
        data = self.source.data
        is_ours = isinstance(data, Data) and data.gathers
        return rows_only and is_ours and check_batch(one) < check_batch(self._first)

    def place(self) -> dict[str, Any]:
        """Where the data are, for a checkpoint."""
        block, settings = self._block, _settings_of(self.source.data)
        place = self.source.state()
        if block is not None and block.before is not None:
            place = block.before | {"position": block.before["position"] + block.at}
        return place if settings is None else {**place, "settings": settings}

    def go_to(self, place: Mapping[str, Any], fast_forward: bool) -> None:
        """Go on from such a place, or raise DataError for data that cannot."""
        if place is None:
            return
        settings, now = place.get("settings"), _settings_of(self.source.data)
        if (settings is not None and now is None) or (now is not None and "data" in place):
            ours, other = "ts.batches(...)", f"a {type(self.source.data).__name__}"
            other = "no data" if isinstance(self.source.data, NoData) else other
            got, saved = (other, ours) if now is None else (ours, "data of another kind")
            expected = f"{saved}, with which the checkpoint was saved"
            fix = "Give the data of that run; or start another one, with another path."
            raise DataError("data", "fit()", got, expected, fix)
        self._reading.go_to(place, fast_forward)

    def back(self) -> None:
        """Put the data back to where they were, if they can be."""
        self._reading.back()

    def close(self) -> None:
        self.sync()
        self._reading.close()


class _Block:
    """Batches that were read together. Calls get views of `size` of them, no copies."""

    def __init__(self, leaves: list, treedef, n: int, size: int, bytes: int, before):
        """Of stacked leaves, of which n batches at most go into the first call."""
        count = len(leaves[0])
        self.size = max(size, count) if count <= n else size
        # the last call may look beyond the end
        room = self.size if count <= n else count + size - 1
        self.leaves, self.treedef = [with_room(x, room) for x in leaves], treedef
        self.count, self.bytes, self.at = count, bytes, 0
        self.before = before  # the data's place where it begins; None if nothing was read ahead

    def next(self, n: int) -> tuple[Any, int]:
        """The next batches, n at most, in a tree with room for `size`."""
        i, n = self.at, min(n, self.size, self.count - self.at)
        self.at += n
        leaves = self.leaves if n == self.count else [x[i : i + self.size] for x in self.leaves]
        return self.treedef.unflatten(leaves), n


def with_room(x: Any, size: int) -> Any:
    """An array with a first axis of `size`: its last row is repeated."""
    if len(x) == size:
        return x
    if isinstance(x, jax.Array):
        return jnp.concatenate([x, jnp.broadcast_to(x[-1:], (size - len(x), *x.shape[1:]))])
    out = placement.aligned_empty((size, *x.shape[1:]), x.dtype)
    out[: len(x)], out[len(x) :] = x, x[-1:]
    return out


def buffer_size(size: int, leaves: Sequence[Any], bytes: int, setting: Any, interval: float) -> int:
    """How many batches of `size` bytes a call has room for; at least 2: a loop of one is unrolled.

    A function of sizes and settings alone: the clock may choose how many are filled, not this.
    """
    if isinstance(setting, int):
        return max(2, setting)
    # arrays on a device are stacked by a program of that many operands
    most = 8 if any(isinstance(x, jax.Array) for x in leaves) else MOST
    return int(max(2, min(bytes // max(size, 1), most, interval)))


def place(
    feed: PyTree, n: int, home: Any, limit: int = NO_LIMIT, *, step: Any = None, whole: bool = False
) -> Any:
    """Stacked batches, in memory of ours, where the state lives, and how many are to be read.

    Rows that do not divide by the devices of a mesh are padded if the step masks. A batch that is
    `whole` on every process stays so. On one device jit places them: that is the fastest way.
    """
    count, is_on_mesh = _count(n, limit), isinstance(home, NamedSharding)
    placement.check_devices(getattr(feed, "batches", None), home)
    if is_on_mesh and not whole and getattr(step, "masks", False):
        rows = jax.tree.leaves(feed.batches)[0].shape[1]
        if padding := -rows % placement.divisor(home, getattr(step, "accumulate", 1)):
            batches, mask = placement.padded(feed.batches, rows, rows + padding, axis=1)
            feed = fused_loop.Stacked(batches, placement.put_rows(mask, home, shared=False))
    if whole:
        return placement.replicate((feed, count), home, shared=False)
    is_on_device = home is not None and any(isinstance(x, jax.Array) for x in jax.tree.leaves(feed))
    if is_on_mesh or is_on_device:
        return placement.put_rows((feed, count), home, axis=1, shared=False)
    return feed, count


@functools.lru_cache(maxsize=128)
def _count(n: int, limit: int) -> np.ndarray:
    return np.array([n, limit], np.int32)


def _is_new(state) -> bool:
    """Whether no step has seen it: a `TrainState`, or a tree of some."""
    parts = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, COUNTED))
    parts = [x for x in parts if isinstance(x, COUNTED)]
    return bool(parts) and not any(map(info_columns.most_calls, parts))


def _settings_of(data) -> dict[str, Any] | None:
    """What the order of `batches` depends on; None for other data."""
    data = innermost(data)
    return data.settings if isinstance(data, Positioned) else None
