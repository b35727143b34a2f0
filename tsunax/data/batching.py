"""Batches: where they come from, in which order, and how they get to the device in time.

    for batch in ts.batches({"x": x, "y": y}, 128, shuffle=True, seed=0):
        ...

A batch is any pytree of arrays with rows along axis 0. `batches` makes them from arrays, or from a
stream of records; their order is a function of (seed, epoch), their place two integers. Nothing
here knows of states and steps.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tsunax._core import checks, trees
from tsunax._core import placement as _placement
from tsunax._core.placement import data_axes
from tsunax.distributed import process_count, process_index
from tsunax.errors import DataError, TsunaxError, WrongTypeError, message, suggests_names, told

__all__ = ["Batches", "Data", "batches", "check_batch", "gather", "placement", "sharding_of"]

ALL_ROWS = 2**62  # as a window of a shuffle: of the whole epoch


def check_batch(batch: Any, where: str = "", root: str = "batch") -> int:
    """The rows of a batch. Raises DataError for one that has none, or not the same number in every
    leaf.

    Also for leaves without rows, WrongTypeError for leaves that are no numbers, StateError for
    deleted ones; `where` is said in the message.

    >>> check_batch({"x": np.zeros((8, 3)), "y": np.zeros(8)})
    8
    >>> check_batch({"x": np.zeros((8, 3)), "y": np.zeros(7)}, "step 12")
    Traceback (most recent call last):
    tsunax.errors.DataError: batch at step 12: got 8 rows in batch['x'], 7 in batch['y'], expected the same in every ...
    """
    keyed = [] if isinstance(batch, Iterator) else jtu.tree_flatten_with_path(batch)[0]
    if not keyed:
        raise DataError(message(root, where, trees.describe(batch), "a tree of arrays"))
    rows: dict[int, str] = {}
    for path, leaf in keyed:
        place = trees.access_str(root, path)
        at = f"{place}, {where}" if where else place
        checks.check_alive(leaf, at)
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is None and hasattr(leaf, "column_name"):
            shape = (len(leaf),)  # of a table of Hugging Face
        kinds = (np.number, np.bool_, jax.dtypes.prng_key)
        odd = dtype is None and not shape and trees.dtype_of(leaf) is None
        if odd or (
            isinstance(dtype, np.dtype) and not any(jnp.issubdtype(dtype, kind) for kind in kinds)
        ):
            fix = "Leave it out, or turn it into numbers."
            raise WrongTypeError(
                message("leaf", at, trees.describe(leaf), "an array of numbers", fix)
            )
        if not shape:
            fix = (
                f"Give it a row axis, or leave it out of the {root}: step(state, batch, name=...)."
            )
            raise DataError(
                message("leaf", at, f"a scalar, {trees.describe(leaf)}", "rows along axis 0", fix)
            )
        rows.setdefault(shape[0], place)
    if len(rows) > 1:
        got = ", ".join(
            f"{n} rows in {place}" if i == 0 else f"{n} in {place}"
            for i, (n, place) in enumerate(rows.items())
        )
        fix = (
            "If leaves differ in length, as of a graph, pad them, or call step(state, batch) "
            "yourself."
        )
        fix = fix if root == "batch" else ""
        raise DataError(message(root, where, got, "the same in every leaf", fix))
    if 0 in rows:
        raise DataError(message(root, where, "0 rows", "at least 1: the mean over none is NaN"))
    return next(iter(rows))


@functools.lru_cache(maxsize=16)
def _range(dtype: np.dtype, x64: bool) -> tuple[Any, Any, Any] | None:
    """The dtype to which JAX cuts one of 64 bits, with its range; None if JAX keeps it."""
    held = jax.dtypes.canonicalize_dtype(dtype)
    info = None if held == dtype else (np.finfo if dtype.kind == "f" else np.iinfo)(held)
    return None if info is None else (held, info.min, info.max)


def _lost(x: Any) -> tuple[str, str] | None:
    """What of a NumPy array JAX would lose without a word, as `got, expected`."""
    if not isinstance(x, np.ndarray):
        return None
    if isinstance(x, np.ma.MaskedArray):
        return "a masked array", "an array, and beside it its mask (f32, 1 for real rows)"
    if x.dtype.char not in "lLqQd" or not x.size:
        return None
    if (held := _range(x.dtype, jax.config.read("jax_enable_x64"))) is None:
        return None
    low, high = np.minimum.reduce(x, None), np.maximum.reduce(x, None)
    if held[1] <= low and high <= held[2]:
        return None
    if x.dtype.kind == "f":  # NaN and inf stay what they are
        real = np.isfinite(x)
        low, high = np.min(x, initial=0, where=real), np.max(x, initial=0, where=real)
        if held[1] <= low and high <= held[2]:
            return None
    got = f"{x.dtype} values from {low} to {high}"
    return got, f"what {held[0]}, to which JAX casts them, can hold"


def check_casts(tree: Any, root: str, where: str = "") -> None:
    """Raise DataError for NumPy arrays of which JAX would lose something without a word.

    Integers that wrap, numbers that become inf, a mask. Looks at the values of 64-bit arrays only,
    and only where JAX cuts them to 32.
    """
    if any(map(_lost, jax.tree.leaves(tree))):
        for path, leaf in jtu.tree_flatten_with_path(tree)[0]:
            if lost := _lost(leaf):
                place = trees.access_str(root, path) + (where and f", {where}")
                fix = "Leave it out, make it smaller, or set jax_enable_x64."
                if isinstance(leaf, np.ma.MaskedArray):
                    fix = "x.filled(0) and ~np.ma.getmaskarray(x) are the two."
                raise DataError(message("leaf", place, *lost, fix))


# Order


def _draw(seed: int, epoch: int):
    """`draw(n)`: the next n random words of an epoch.

    NumPy promises the words of a bit generator to every version and machine, but not its
    permutations.
    """
    return np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw


def _shuffled(words: np.ndarray) -> np.ndarray:
    """Orders by random words, along the last axis; uses them up.

    The place of each word replaces its low bits, so that one plain sort orders the places: three
    times as fast as a stable argsort.
    """
    n = words.shape[-1]
    low = np.uint64((1 << max(n - 1, 0).bit_length()) - 1)
    words &= ~low
    words |= np.arange(n, dtype=np.uint64)
    words.sort(axis=-1)
    words &= low
    return words.astype(np.int32 if n < 2**31 else np.int64)


def _share(rows: int, process: tuple[int, int], is_whole: bool = False) -> slice:
    """What a process has of a global batch: its part, or all of a short one that has none for every
    device.
    """
    index, count = process
    return slice(rows) if is_whole else slice(index * rows // count, (index + 1) * rows // count)


# Places


def placement(device: Any, where: str) -> Any:
    """The sharding of batches, rows over the devices; None for JAX's default device."""
    if device is True or isinstance(device, (NamedSharding, SingleDeviceSharding)):
        return None if device is True else device
    if isinstance(device, jax.Device):
        return SingleDeviceSharding(device)
    if isinstance(device, Mesh):
        return NamedSharding(device, PartitionSpec(data_axes(device)))
    expected = "a device, a Mesh, or a NamedSharding"
    raise WrongTypeError(message("device", where, trees.describe(device), expected))


def sharding_of(shape: tuple[int, ...], sharding: Any, axis: int = 0) -> Any:
    """The sharding for an array whose rows lie along an axis.

    Raises DataError where they do not divide.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    rows = sharding.spec[0] if len(sharding.spec) and shape else None
    sharding = NamedSharding(
        sharding.mesh, PartitionSpec(*[None] * axis, rows) if rows else PartitionSpec()
    )
    try:
        sharding.shard_shape(shape)
    except ValueError:
        got = (
            f"{shape[axis]} rows for the {sharding.mesh.size} devices of mesh "
            f"{dict(sharding.mesh.shape)}"
        )
        fix = "Choose another batch_size, drop_remainder=True, or pad the batch and mask it."
        raise DataError(
            message("batch", "", got, "rows that divide by the devices along axis 0", fix)
        ) from None
    return sharding


def _put(tree: Any, sharding: Any) -> Any:
    """Arrays that every process has, at a sharding that may span all of them."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), tree
    )


def gather(resident: Any, order: Any, first: Any, shape: tuple[int, ...]) -> Any:
    """Rows `order[first : first + prod(shape)]` of arrays on the device, as `(*shape, ...)`; to be
    called inside jit.

    In a fused loop, batch i of an epoch: `gather(resident, order, i * rows, (rows,))`, with
    `data.resident` and `data.device_order(epoch)` passed to the program as arguments. Without an
    order (None) they are taken as they lie.
    """
    n = math.prod(shape)
    if order is None:
        rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, n), resident)
    else:
        chosen = jax.lax.dynamic_slice_in_dim(order, first, n)
        rows = jax.tree.map(
            lambda x: x.at[chosen].get(mode="promise_in_bounds", unique_indices=True), resident
        )
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), rows)


@functools.lru_cache(maxsize=64)
def _gather_to(sharding: Any, shape: tuple[int, ...], ordered: bool):
    """`gather` compiled: rows chosen by the host, or from one row on.

    A slice of an order would be a kernel more.
    """
    placed = sharding_of(shape, sharding, len(shape) - 1)
    take = lambda resident, at: gather(resident, *((at, 0) if ordered else (None, at)), shape)
    return jax.jit(take, out_shardings=placed if isinstance(placed, NamedSharding) else None)


def _plain(leaf: Any) -> Any:
    """As NumPy's own array; a masked one stays what it is, so that `check_casts` sees the mask."""
    return leaf if isinstance(leaf, np.ma.MaskedArray) else np.asarray(leaf)


def _own(leaf: Any) -> Any:
    if type(leaf) is np.ndarray:
        return _placement.copied(leaf)
    if isinstance(leaf, jax.Array | np.generic) or not hasattr(leaf, "__array__"):
        return leaf
    return (
        leaf.copy() if isinstance(leaf, np.ma.MaskedArray) else _placement.copied(np.asarray(leaf))
    )


def _stack(*rows: Any) -> Any:
    return (np.ma if any(isinstance(x, np.ma.MaskedArray) for x in rows) else np).stack(rows)


def owned(tree: Any, root: str, where: str = "") -> Any:
    """The tree with copies of NumPy arrays, and of what shares memory with one; checks casts."""
    leaves, treedef = jax.tree.flatten(tree)
    if any(map(_lost, leaves)):
        check_casts(tree, root, where)
    return treedef.unflatten(map(_own, leaves))


def _stacked(records: list[Any]) -> Any:
    """Records along a new first axis. Raises DataError if structures or shapes differ."""
    try:
        batch = jax.tree.map(_stack, *records)
    except (TypeError, ValueError) as error:
        for record in records[1:]:
            if difference := trees.first_difference(record, records[0], "record"):
                text = f"{difference.removeprefix('at ')}. Records of a batch have one structure."
                raise DataError(text) from None
            named = jtu.tree_flatten_with_path(record)[0]
            for (path, x), y in zip(named, jax.tree.leaves(records[0]), strict=True):
                if np.shape(x) != np.shape(y):
                    got, place = f"shape {np.shape(x)}", trees.access_str("record", path)
                    expected = f"{np.shape(y)}, as in the first record of the batch"
                    fix = "Pad them, or cut them to one shape."
                    raise DataError(message("leaf", place, got, expected, fix)) from None
        expected = "trees of arrays and numbers"
        raise DataError(message("records", "", told(error), expected)) from error
    if not jax.tree.leaves(batch):
        got = trees.describe(records[0])
        raise DataError(message("record", "", got, "a tree of arrays and numbers"))
    return batch


class _Records:
    """A leaf whose rows are records, read one by one by their number and stacked."""

    def __init__(self, data: Any):
        self.data, self.shape = data, (len(data),)

    def read(self, rows: Any) -> Any:
        return _stacked([jax.tree.map(_own, self.data[int(i)]) for i in rows])


def _read(leaf: Any, rows: np.ndarray | slice) -> Any:
    """Rows of an array, in fresh memory; of one that lies in a file in the order of the file."""
    if isinstance(leaf, _Records):
        return leaf.read(range(*rows.indices(leaf.shape[0])) if isinstance(rows, slice) else rows)
    if isinstance(leaf, np.ndarray):
        return (
            leaf[rows].copy() if isinstance(rows, slice) else leaf.take(rows, axis=0, mode="clip")
        )
    back: Any = slice(None)
    if not isinstance(rows, slice):  # h5py wants increasing rows
        order = np.argsort(rows)
        rows, back = rows[order], np.argsort(order)
    found = leaf[rows]
    if isinstance(found, Mapping):  # a table
        return {name: _plain(column)[back] for name, column in found.items()}
    return _plain(found)[back]


# From arrays and records


class _Epoch:
    """One epoch of `Batches` from arrays: an iterator that can also `take` k batches at once."""

    def __init__(self, data: Batches):
        self.data, self.place, self.order = data, None, None

    def __iter__(self) -> _Epoch:
        return self

    def __repr__(self) -> str:
        return f"<an epoch of {self.data!r}>"

    def _advance(self, most: int | None) -> tuple[int, tuple[int, ...]] | None:
        """The first row of the next batches, and their shape; None at the end."""
        data = self.data
        if self.place is None:
            self.place = data._begin()
        epoch, position = self.place
        left = len(data) - position
        if left <= 0:
            return None
        first = position * data.share
        full = data._full - position
        shape: tuple[int, ...] = (data.share if full else data._rest,)
        if most is not None:
            shape = (max(min(most, full), 1), *shape)
        position += 1 if most is None else shape[0]
        self.place, data._place = (epoch, position), (epoch, position)
        data.is_whole = not full and data._is_whole(data.tail_rows or 0)
        return first, shape

    def _next(self, most: int | None) -> Any:
        if (ahead := self._advance(most)) is None:
            return None
        assert self.place is not None
        if self.order is None and self.data._is_ordered:
            self.order = self.data._order_of(self.place[0])
        return self.data._gathered(self.order, *ahead)

    def __next__(self) -> Any:
        if (batch := self._next(None)) is None:
            raise StopIteration
        return batch

    def take(self, k: int) -> Any:
        """The next k batches as one tree of `(k, rows, ...)`; fewer at the end, a short tail alone,
        then None.
        """
        return self._next(k)

    def advance(self, k: int) -> tuple[int, tuple[int, int]] | None:
        """What `take(k)` would gather, `(first, (k, rows))` in the order of the epoch, for a
        program that does.
        """
        return self._advance(k)  # type: ignore[return-value]


class Data:
    """Data of ours: iterable again and again, an epoch each time, from a place that it knows."""

    is_whole = False  # the batch given last: the same on all processes
    resumable = True  # whether `set_state` needs nothing but the place
    is_placed = False  # whether `set_state` was called after the last batch was given

    def __len__(self) -> int:
        """The batches of an epoch. Raises TypeError where nobody knows."""
        raise NotImplementedError

    def get_state(self) -> dict:
        """The place after the last batch given."""
        raise NotImplementedError

    def afresh(self) -> Any:
        """The same data at their beginning, with a place of their own."""
        raise NotImplementedError

    def follow(self, state: Mapping) -> None:
        """Take over the place of such a copy, as if its batches had been given here."""
        raise NotImplementedError


class Batches(Data):
    """What `batches` returns: data that can be iterated again and again, an epoch each time, and
    knows its place.
    """

    def __init__(self, arrays, batch_size, *, seed, window, drop_remainder, process, device):
        self.batch_size, self.resident = batch_size, None
        self._seed, self._window, self._process = seed, window, process
        self._drop = drop_remainder
        # of the epoch that was read last; shared by copies, so that a run of `fit` finds it again
        self._known_order: dict[int, np.ndarray] = {}
        self._place, self._restored = (0, 0), False
        self.share = batch_size // process[1]  # rows that this process has of a full batch
        self._is_ordered = window is not None or process[1] > 1
        self._rows: Any = None  # of all processes; None for a stream that does not know
        self._records: Any = arrays if _is_stream(arrays) else None
        self.is_of_arrays = False  # so that rows are read at once
        if self._records is not None:
            self._rows = len(arrays) if hasattr(arrays, "__len__") else None
            return
        arrays = _as_columns(arrays)
        self._rows = check_batch(arrays, root="arrays")
        rest = self._rows % batch_size
        self._full = self._rows // batch_size
        self._rest = len(
            range(rest)[_share(rest, process, self._is_whole(rest))]
        )  # rows of the short batch
        self._leaves, self._treedef = jax.tree.flatten(arrays)
        is_in_memory = lambda x: trees.is_array(x) and not isinstance(x, np.memmap)
        self._is_in_memory = all(map(is_in_memory, self._leaves))
        self.is_of_arrays = not any(isinstance(x, _Records) for x in self._leaves)
        # of others when they are read
        check_casts(jax.tree.map(lambda x: x if is_in_memory(x) else None, arrays), "arrays")
        if device is None:
            self._leaves = [np.asarray(x) if trees.is_array(x) else x for x in self._leaves]
            return
        if not self.is_of_arrays:
            fix = "prefetch brings batches there."
            raise DataError(message("device", "batches()", "records", "arrays", fix))
        self._sharding = placement(device, "batches()")
        for rows in (self.share, 0 if drop_remainder else self._rest):
            sharding_of((rows,), self._sharding)
        self._whole = sharding_of(
            (), self._sharding
        )  # every device has all rows, and gathers its own: no traffic
        self.resident, self._leaves = _put(arrays, self._whole), []
        self._uploaded = (-1, None)

    def afresh(self) -> Batches:
        """The same data at their beginning, with a place of their own."""
        other = copy.copy(self)
        other._place, other._restored = (0, 0), False
        return other

    def follow(self, state: Mapping) -> None:
        self._place, self._restored = (state["epoch"], state["position"]), False

    @property
    def is_placed(self) -> bool:  # type: ignore[override]
        return self._restored

    @property
    def process(self) -> tuple[int, int]:
        """Whose part of each batch it gives: `(index, count)`."""
        return self._process

    @property
    def is_stream(self) -> bool:
        """Whether records come one after the other, and not by number."""
        return self._records is not None

    def sample(self) -> list[Any]:
        """A few rows of the arrays, which tell them from others; none of records."""
        if not self.is_of_arrays:
            return []
        rows = np.unique(np.linspace(0, self._rows - 1, 8).astype(int))
        if self.resident is None:
            return [_read(leaf, rows) for leaf in self._leaves]
        return [x.addressable_data(0)[rows] for x in jax.tree.leaves(self.resident)]

    @property
    def settings(self) -> dict[str, Any]:
        """What the order of an epoch depends on, but for its number."""
        size, seed, drop = self.batch_size, self._seed, self._drop
        return {
            "rows": self._rows,
            "batch_size": size,
            "seed": seed,
            "shuffle_window": self._window,
            "drop_remainder": drop,
        }

    def __len__(self) -> int:
        """The number of batches of an epoch.

        Raises TypeError for a stream that does not know its own.
        """
        if self._rows is None:
            fix = "Give it a __len__, the number of its records; or say steps= in place of epochs=."
            got = "a stream that does not know it"
            raise TypeError(
                message("length", "batches", got, "arrays, or a stream with len()", fix)
            )
        return self._rows // self.batch_size if self._drop else -(-self._rows // self.batch_size)

    def _is_whole(self, rows: int) -> bool:
        """Whether a batch of so many rows is for every process whole: a short one that does not
        divide by the devices.

        Equal parts are what an array of all processes is made of, and what keeps their programs the
        same.
        """
        count = self._process[1]
        return count > 1 and rows < self.batch_size and bool(rows % _parts(count))

    @property
    def tail_rows(self) -> int | None:
        """Rows of the short batch that ends an epoch, of all processes; 0 without one, None where
        nobody knows.
        """
        if self._drop:
            return 0
        return None if self._rows is None else self._rows % self.batch_size

    def __repr__(self) -> str:
        size = "a stream" if self._rows is None else f"{self._rows} rows"
        epoch, position = self._place
        return f"Batches({size}, {self.batch_size} a batch, at epoch {epoch}, position {position})"

    def get_state(self) -> dict[str, int]:
        """The place after the last batch given: `{"epoch", "position"}`; after an epoch the start
        of the next.
        """
        epoch, position = self._place
        if self._rows is not None and position >= len(self):
            epoch, position = epoch + 1, 0
        return {"epoch": epoch, "position": position}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go on from a place that `get_state` gave: the next loop runs to the end of that epoch."""
        values = (
            [state.get(name) for name in ("epoch", "position")]
            if isinstance(state, Mapping)
            else [None]
        )
        whole = all(isinstance(v, (int, np.integer)) and v >= 0 for v in values) and len(state) == 2
        if not whole or (self._rows is not None and int(state["position"]) > len(self)):
            end = "" if self._rows is None else f", position at most {len(self)}"
            raise DataError(
                message("state", "set_state()", state, f'{{"epoch": int, "position": int}}{end}')
            )
        self._place, self._restored = (int(state["epoch"]), int(state["position"])), True
        self._place = tuple(self.get_state().values())

    def _begin(self) -> tuple[int, int]:
        """Where a loop that gives its first batch now starts: a new epoch, or the place that was
        set.
        """
        epoch, position = tuple(self.get_state().values())
        if position and not self._restored:
            epoch, position = epoch + 1, 0
        self._restored = False
        return epoch, position

    def order(self, epoch: int) -> np.ndarray:
        """The rows of an epoch, in order; of several processes, those of this one. Raises DataError
        for a stream.

        >>> data = batches(np.arange(6), 2, shuffle=True, seed=1)
        >>> data.order(0).tolist(), data.order(1).tolist()
        ([2, 4, 5, 0, 3, 1], [5, 3, 0, 2, 1, 4])
        """
        if self._records is not None:
            raise DataError(message("order", "batches", "a stream", "arrays"))
        checks.check_count(epoch, "order()", "epoch", 0)
        n, dtype = self._rows, np.int32 if self._rows < 2**31 else np.int64
        if self._window is None:
            rows = np.arange(n, dtype=dtype)
        else:
            draw, k = _draw(self._seed, epoch), min(self._window, n)
            cut = n - n % k
            rows = _shuffled(draw(cut).reshape(-1, k)).ravel()
            if k < n:
                starts = np.repeat(np.arange(0, cut, k, dtype=dtype), k)
                rows = np.concatenate(
                    [rows + starts, np.add(cut, _shuffled(draw(n - cut)), dtype=dtype)]
                )
        if self._process == (0, 1):
            return rows
        full = rows[: n - n % self.batch_size].reshape(-1, self.batch_size)
        tail = rows[full.size :]
        mine = _share(len(tail), self._process, self._is_whole(len(tail)))
        shares = full[:, _share(self.batch_size, self._process)], tail[mine]
        return np.concatenate([share.ravel() for share in shares])

    def _order_of(self, epoch: int) -> np.ndarray:
        if epoch not in self._known_order:
            found = self.order(epoch)
            self._known_order.clear()
            self._known_order[epoch] = found
        return self._known_order[epoch]

    def device_order(self, epoch: int) -> jax.Array | None:
        """`order(epoch)` next to the resident arrays, for `gather`; None where rows are taken as
        they lie.
        """
        if not self._is_ordered:
            return None
        if self._uploaded[0] != epoch:
            self._uploaded = epoch, _put(self.order(epoch), self._whole)
        return self._uploaded[1]

    def _gathered(self, order: Any, first: int, shape: tuple[int, ...]) -> Any:
        rows = slice(first, first + math.prod(shape))
        at = rows if order is None else order[rows]
        if self.resident is not None:
            run = _gather_to(self._sharding, shape, order is not None)
            return run(self.resident, np.int32(first) if order is None else at)
        batch = self._treedef.unflatten([_read(leaf, at) for leaf in self._leaves])
        if not self._is_in_memory:
            check_casts(batch, "batch", f"rows {first} to {rows.stop - 1} of an epoch")
        return (
            batch
            if len(shape) == 1
            else jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batch)
        )

    def __iter__(self) -> Iterator[Any]:
        return _Epoch(self) if self._records is None else self._stream()

    def _stream(self) -> Iterator[Any]:
        """Records in windows, each in its own order; those before the place are read and
        dropped.
        """
        epoch, position = self._begin()
        draw, stream = _draw(self._seed, epoch), iter(self._records)
        window, size = self._window or self.batch_size, self.batch_size
        skip = position * size
        for _ in range(skip // window):
            next(itertools.islice(stream, window, window), None)
            draw(window)

        def shuffled():
            while chunk := [jax.tree.map(_own, x) for x in itertools.islice(stream, window)]:
                yield from (
                    chunk
                    if self._window is None
                    else map(chunk.__getitem__, _shuffled(draw(len(chunk))))
                )

        records = itertools.islice(shuffled(), skip % window, None)
        enough = size if self._drop else 1
        rows = list(itertools.islice(records, size))
        while len(rows) >= enough:
            following = list(itertools.islice(records, size))
            position += 1
            self._place = (epoch, position) if len(following) >= enough else (epoch + 1, 0)
            self.is_whole = self._is_whole(len(rows))
            mine = _share(len(rows), self._process, self.is_whole)
            batch = _stacked(rows[mine])
            check_casts(batch, "batch", f"batch {position - 1} of epoch {epoch}")
            yield batch
            rows = following


def _parts(count: int) -> int:
    """Into how many parts the rows of so many processes are cut: those of their devices, once they
    train as one.
    """
    return jax.device_count() if count == process_count() else count


def _spans(device: Any) -> bool:
    """Whether it is a mesh or sharding that other processes have a part of."""
    if isinstance(device, Mesh):
        return device.is_multi_process
    return isinstance(device, NamedSharding) and not device.is_fully_addressable


def _is_column(x: Any) -> bool:
    """Whether it is indexed by arrays of rows: it has a shape and a dtype, or is of Hugging
    Face.
    """
    is_array = hasattr(x, "shape") and hasattr(x, "dtype")
    return is_array or hasattr(x, "column_names") or hasattr(x, "column_name")


def _has_records(x: Any) -> bool:
    """Whether it gives records by number, as a map-style Dataset of torch: `x[i]`, `len(x)`."""
    if _is_column(x) or isinstance(x, str | bytes | Mapping) or not jtu.all_leaves([x]):
        return False
    if not (hasattr(x, "__getitem__") and hasattr(x, "__len__")):
        return False
    if isinstance(x, Iterable):
        try:
            x[0]  # type: ignore[index]
        except NotImplementedError:  # an IterableDataset of torch with a length
            return False
        except Exception:  # its own, where it is read
            return True
    return True


def _is_stream(arrays: Any) -> bool:
    """Whether it is no pytree of arrays, but gives records one after the other."""
    if isinstance(arrays, Iterator):
        return True
    if not isinstance(arrays, Iterable) or isinstance(arrays, str | bytes | Mapping):
        return False
    if not jtu.all_leaves([arrays]):
        return False
    return not (hasattr(arrays, "columns") or _is_column(arrays) or _has_records(arrays))


def _as_columns(arrays: Any) -> Any:
    """The tree with leaves as `_read` reads them. Raises DataError for ambiguous ones."""

    def one(path, leaf):
        place = trees.access_str("arrays", path)
        if hasattr(leaf, "columns") or isinstance(leaf, Mapping):
            fix = "Columns in a dict: {name: np.asarray(table[name]), ...}."
            raise DataError(message("leaf", place, f"a {type(leaf).__name__}", "arrays", fix))
        if _has_records(leaf):
            return _Records(leaf)
        if hasattr(leaf, "iloc"):
            return np.asarray(leaf)  # a Series of pandas is indexed by labels
        shape = getattr(leaf, "shape", ())
        if shape and hasattr(leaf, "__len__") and len(leaf) != shape[0]:
            got, expected = f"length {len(leaf)} and shape {tuple(shape)}", "an array or records"
            fix = (
                "An array is as long as it has rows; a data set of records has no shape and dtype."
            )
            raise DataError(message("leaf", place, got, expected, fix))
        return leaf

    try:
        columns = jtu.tree_map_with_path(one, arrays)
        check_batch(columns, root="arrays")
    except TsunaxError as error:
        is_list = isinstance(arrays, list | tuple) and len(arrays) and not jtu.all_leaves(arrays)
        if is_list and len({jax.tree.structure(x) for x in arrays}) == 1:
            fix = (
                "Or are these records? Stack them: jax.tree.map(lambda *x: np.stack(x), *records)."
            )
            error.args = (f"{error} {fix}",)
        raise
    return columns


@suggests_names
def batches(
    arrays: Any,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_remainder: bool = False,
    shuffle_window: int | None = None,
    device: Any = None,
    process: tuple[int, int] | None = None,
) -> Batches:
    """Batches of arrays in memory or in files, or of a stream of records.

        order = permutation(seed, epoch);  batch i = tree.map(lambda x: x[order[i * batch_size : (i
        + 1) * batch_size]])

    A `for` runs one epoch; the next one runs the next epoch, in another order if shuffled. The
    order is a function of `(seed, epoch)`, the same with every machine and NumPy: a sort by random
    words of PCG64. `get_state()` and `set_state()` go on with the exact next batch, in the middle
    of an epoch too. A batch has the structure of `arrays` and memory of its own.

    Args:
      arrays: a pytree of arrays with the same rows along axis 0: NumPy's and JAX's, and what is
        indexed like them (np.memmap, h5py, a column or a table of Hugging Face). Or records,
        pytrees without a row axis,
        which are read one by one and stacked: by number from a map-style data set (`data[i]` and
        `len(data)`, no shape and dtype), or in sequence from an iterable. A list is a pytree.
      batch_size: rows of a batch, of all processes and devices together.
      shuffle: another order each epoch; of a stream with `shuffle_window`.
      drop_remainder: leave out the last, shorter batch of an epoch.
      shuffle_window: shuffle within windows of so many rows, read in sequence: for what is larger
        than memory.
      device: True, a device, a Mesh or a NamedSharding: the arrays are put there once, on each
        device all of them, and batches are gathered by a compiled program. `resident` and
        `device_order` are for loops that fuse.
      process: `(index, count)`: of each batch the part of this process; by default what
        `ts.distributed` says. All have equally many batches of equally many rows. A short last
        batch that does not divide by their devices is whole on every one of them, as `is_whole`
        tells. With a device of all processes (a Mesh) each one has all rows, and a batch is one
        array of theirs.

    Raises DataError and WrongTypeError for arrays and settings that make no batches.

    >>> data = batches({"x": np.arange(5), "y": np.arange(5) > 2}, 2)
    >>> [batch["x"].tolist() for batch in data]
    [[0, 1], [2, 3], [4]]
    >>> len(data), data.get_state()
    (3, {'epoch': 1, 'position': 0})
    """
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("seed", seed, 0),
        ("shuffle_window", shuffle_window, 1),
    ):
        whole = (
            isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= least
        )
        if not (whole or (name == "shuffle_window" and value is None)):
            raise DataError(message(name, "batches()", repr(value), f"an int of {least} or more"))
    checks.check_flags("batches()", drop_remainder=drop_remainder)
    if not isinstance(shuffle, bool | np.bool_):
        raise WrongTypeError(
            message("shuffle", "batches()", trees.describe(shuffle), "True or False")
        )
    is_pair = process is None or (isinstance(process, tuple) and len(process) == 2)
    if not is_pair or not all(isinstance(x, int | np.integer) for x in process or ()):
        raise WrongTypeError(
            message("process", "batches()", trees.describe(process), "(index, count), two ints")
        )
    index, count = process or ((0, 1) if _spans(device) else (process_index(), process_count()))
    if not 0 <= index < count or (_spans(device) and count > 1):
        expected = (
            "(0, 1), with a device of all processes"
            if _spans(device)
            else "an index below the count"
        )
        raise DataError(message("process", "batches()", process, expected))
    if batch_size % count:
        fix = (
            f"Of all processes together: {count * (batch_size // count or 1)}, or "
            f"{count * (batch_size // count + 1)}."
        )
        expected = f"a multiple of the {count} processes"
        raise DataError(message("batch_size", "batches()", batch_size, expected, fix))
    if _is_stream(arrays) and (device is not None or (shuffle and shuffle_window is None)):
        got, fix = "device=", "prefetch brings batches there."
        if device is None:
            got, window = "shuffle=True", max(1000, 10 * batch_size)
            fix = (
                f"A stream is shuffled in windows: shuffle_window={window} holds so many records. "
            )
            fix += "A class with __getitem__ and __len__ is shuffled as a whole."
        raise DataError(message("stream", "batches()", got, "shuffle_window= and no device", fix))
    window = min(shuffle_window or ALL_ROWS, ALL_ROWS) if shuffle or shuffle_window else None
    settings = {
        "seed": int(seed),
        "window": window,
        "drop_remainder": drop_remainder,
        "process": (index, count),
        "device": device,
    }
    data = Batches(arrays, int(batch_size), **settings)
    if data._rows is not None and data._rows < batch_size and drop_remainder:
        got = f"{data._rows} rows, fewer than batch_size={batch_size}"
        raise DataError(
            message("arrays", "batches()", got, "one batch at least with drop_remainder=True")
        )
    return data
