"""Batches of arrays and of records, in an order that is a function of (seed, epoch).

    for batch in ts.batches({"x": x, "y": y}, 128, shuffle=True, seed=0):
        ...

A batch is any pytree of arrays with rows along axis 0. The position in the data is two integers,
epoch and batch. This file uses no states and no steps.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import numpy as np

from tsunax._core import Device, PyTree, checks, placement, processes, trees
from tsunax.data import on_devices, order, row_readers
from tsunax.data.checks import check_batch, check_casts
from tsunax.data.positions import Positioned
from tsunax.errors import DataError, told


def spread(count: int, limit: int) -> np.ndarray:
    """Up to `limit` of the numbers below `count`, from the first on, an int array."""
    return np.unique(np.linspace(0, max(count - 1, 0), limit).astype(int))[:count]


class Batches(Positioned):
    """Data that `batches(arrays, batch_size, ...)` returns; raises the same errors.

    Each iteration is an epoch; `set_state` sets the position. `share` is the number of rows that
    this process has of a full batch, `resident` the arrays on the `device`, or None.
    """

    gathers: ClassVar[bool] = True

    def __init__(
        self,
        arrays: PyTree,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        drop_remainder: bool,
        process: tuple[int, int],
        device: Device,
    ) -> None:
        arrays = jax.tree_util.tree_map_with_path(row_readers.as_column, arrays)
        self._rows: int = check_batch(arrays, root="arrays")  # rows of all processes
        super().__init__(
            {
                "rows": self._rows, "batch_size": batch_size, "seed": seed,
                "shuffle": shuffle, "drop_remainder": drop_remainder,
            }
        )  # fmt: skip
        self.batch_size: int = batch_size
        self.process: order.Process = process
        self.resident: PyTree = None  # the arrays on the device
        self._seed, self._shuffle, self._drop = seed, shuffle, drop_remainder
        # The order of the epoch that was read last. Copies share it, so that the next run of `fit`
        # need not compute it.
        self._last_order: dict[int, order.EpochOrder] = {}
        self.share: int = batch_size // process[1]  # rows that this process has of a full batch
        self._is_ordered = shuffle or process[1] > 1
        self._full, tail = divmod(self._rows, batch_size)
        self._is_tail_whole = order.is_whole(tail, batch_size, process[1])
        self._tail = len(range(tail)[order.share(tail, batch_size, process)])
        self._leaves, self._treedef = jax.tree.flatten(arrays)
        is_in_memory = lambda x: trees.is_array(x) and not isinstance(x, np.memmap)
        self._is_in_memory = all(map(is_in_memory, self._leaves))
        # rows of records are read one by one
        self.is_of_arrays: bool = not any(isinstance(x, row_readers.Records) for x in self._leaves)
        # files and records are checked when they are read
        check_casts(jax.tree.map(lambda x: x if is_in_memory(x) else None, arrays), "arrays")
        if device is None and (device := on_devices.device_of_arrays(self._leaves)) is None:
            in_numpy = lambda x: np.asarray(x) if trees.is_array(x) and not trees.is_key(x) else x
            self._leaves = list(map(in_numpy, self._leaves))
            return
        if not self.is_of_arrays:
            raise DataError(
                "device",
                "batches()",
                got="records",
                expected="arrays",
                fix="Batches of records: ts.prefetch(data, device).",
            )
        self._sharding = on_devices.placement(device, "batches()")
        for rows in (self.share, 0 if drop_remainder else self._tail):
            on_devices.sharding_of((rows,), self._sharding)
        # every device has all rows, and gathers its own without traffic
        self._replicated = on_devices.sharding_of((), self._sharding)
        arrays = placement.with_numpy_copied(arrays)
        self.resident, self._leaves = on_devices.put_tree(arrays, self._replicated), []
        self._uploaded = (-1, None)

    def __repr__(self) -> str:
        epoch, position = self._place
        rows = f"{self._rows} rows, {self.batch_size} a batch"
        return f"Batches({rows}, at epoch {epoch}, position {position})"

    def __len__(self) -> int:
        return self._rows // self.batch_size if self._drop else -(-self._rows // self.batch_size)

    @property
    def tail_rows(self) -> int:  # type: ignore[override]
        """Rows of the short batch that ends an epoch, of all processes; 0 for none."""
        return 0 if self._drop else self._rows % self.batch_size

    def sample(self) -> list[Any]:
        """A few rows of the arrays, to recognize them by; [] for records."""
        if not self.is_of_arrays:
            return []
        rows = spread(self._rows, 8)
        if self.resident is None:
            return [row_readers.read(leaf, rows) for leaf in self._leaves]
        return [x.addressable_data(0)[rows] for x in jax.tree.leaves(self.resident)]

    def order(self, epoch: int) -> np.ndarray:
        """The rows of an epoch in order, an int array; only the share of this process.

        >>> data = batches(np.arange(6), 2, shuffle=True, seed=1)
        >>> data.order(0).tolist(), data.order(1).tolist()
        ([2, 4, 5, 0, 3, 1], [5, 3, 0, 2, 1, 4])
        """
        return self._order_of(epoch)[:]

    def _order_of(self, epoch: int) -> "order.EpochOrder":
        if epoch not in self._last_order:
            self._last_order.clear()
            arguments = self._rows, self._shuffle, self._seed, epoch, self.batch_size, self.process
            self._last_order[epoch] = order.EpochOrder(*arguments)
        return self._last_order[epoch]

    def device_order(self, epoch: int) -> jax.Array | None:
        """`order(epoch)` on the devices of `resident`, for `gather`; None for rows in sequence."""
        if not self._is_ordered:
            return None
        if self._uploaded[0] != epoch:
            self._uploaded = epoch, on_devices.put_tree(self.order(epoch), self._replicated)
        return self._uploaded[1]

    def _gathered(self, order: Any, first: int, shape: tuple[int, ...]) -> Any:
        rows = slice(first, first + math.prod(shape))
        chosen_rows = rows if order is None else order[rows]
        if self.resident is not None:
            run = on_devices.gather_to(self._sharding, shape, order is not None)
            return run(self.resident, np.int32(first) if order is None else chosen_rows)
        batch = self._treedef.unflatten(
            [row_readers.read(leaf, chosen_rows) for leaf in self._leaves]
        )
        if not self._is_in_memory:
            check_casts(batch, "batch", f"rows {first} to {rows.stop - 1} of an epoch")
        if len(shape) == 1:
            return batch
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batch)

    def __iter__(self) -> Iterator[Any]:
        return _Epoch(self)


class _Epoch:
    """An iterator over an epoch of arrays that can also `take` k batches at once."""

    def __init__(self, data: Batches):
        self.data, self.place, self.order = data, None, None

    def __iter__(self) -> "_Epoch":
        return self

    def advance(self, max_batches: int | None) -> Any:
        """The first row of the next batches in the order, and their shape; None at the end.

        The shape is `(rows,)` for None, else `(k, rows)` with k up to `max_batches`.
        """
        data = self.data
        self.place = self.place or data._begin()
        epoch, position = self.place
        if position >= len(data):
            return None
        full = data._full - position
        k = 1 if max_batches is None else max(min(max_batches, full), 1)
        rows = data.share if full else data._tail
        self.place = data._place = epoch, position + k
        data.is_whole = not full and data._is_tail_whole
        return position * data.share, (rows,) if max_batches is None else (k, rows)

    def take(self, k: int | None) -> Any:
        """The next k batches, or fewer, as one tree of `(k, rows, ...)`; or None at the end."""
        if (rows_ahead := self.advance(k)) is None:
            return None
        if self.order is None and self.data._is_ordered:
            assert self.place is not None
            self.order = self.data._order_of(self.place[0])
        return self.data._gathered(self.order, *rows_ahead)

    def __next__(self) -> Any:
        try:
            batch = self.take(None)
        except StopIteration as error:  # raised by a record: not the end of the epoch
            raise DataError("data", "rows of a batch", told(error), "rows") from error
        if batch is None:
            raise StopIteration
        return batch


@functools.partial(
    checks.naming_arguments, fix="Several arrays are one tree: ts.batches((x, y), 32)."
)
def batches(
    arrays: PyTree,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_remainder: bool = False,
    device: Device = None,
    process: tuple[int, int] | None = None,
) -> Batches:
    """Batches of arrays, in memory or in files, or of records.

        order = permutation(seed, epoch)
        batch i = tree.map(lambda x: x[order[i * batch_size : (i + 1) * batch_size]])

    A `for` runs one epoch, the next `for` the next epoch, in another order if shuffled. The order
    is a function of `(seed, epoch)`, the same on every machine and NumPy. With `get_state()` and
    `set_state()` a loop resumes at the exact next batch. A batch has the structure of `arrays`, and
    its own memory.

    Args:
      arrays: a pytree of arrays with the same rows along axis 0: NumPy's and JAX's, and objects
        indexed like them (np.memmap, h5py). Or a map-style data set (`data[i]` and `len(data)`, no
        shape and dtype): its records, pytrees without a row axis, are read one by one and stacked.
        A list is a pytree.
      batch_size: rows of a batch, of all processes and devices together.
      shuffle: another order each epoch.
      drop_remainder: leave out the last, shorter batch of an epoch.
      device: True, a device ("gpu", say), a Mesh or a NamedSharding: all arrays are put on each
        device once, and a compiled program gathers batches. `resident` and `device_order` are for
        loops that fuse. By default, JAX arrays that are on one device stay there.
      process: `(index, count)`: each batch has the part of this process; by default the numbers of
        `ts.distributed`. A short last batch that the devices cannot divide is whole on each of the
        processes, see `is_whole`. With a Mesh of all processes each process gives all rows.

    Several arrays are one tree: write `batches((x, y), 32)`. Raises DataError for arrays and
    settings that make no batches.

    >>> data = batches({"x": np.arange(5), "y": np.arange(5) > 2}, 2)
    >>> [batch["x"].tolist() for batch in data]
    [[0, 1], [2, 3], [4]]
    >>> len(data), data.get_state()
    (3, {'epoch': 1, 'position': 0})
    """
    where, fix = "batches()", "Several arrays are one tree: ts.batches((x, y), 32)."
    is_int = isinstance(batch_size, int | np.integer) and not isinstance(batch_size, bool)
    if not is_int or batch_size < 1:
        raise DataError("batch_size", where, trees.describe(batch_size), "an int of 1 or more", fix)
    checks.check_flags(where, drop_remainder=drop_remainder, shuffle=shuffle)
    spans, everyone = on_devices.spans_processes(device), processes.current()
    if process is None:
        process = (0, 1) if spans else (everyone.index, everyone.count)
    index, count = process
    if not 0 <= index < count or (spans and count > 1):
        raise DataError(
            "process",
            where,
            got=process,
            expected="an index below the count; (0, 1) with a device of all processes",
        )
    if batch_size % count:
        fix = "It counts the rows of all processes together."
        raise DataError("batch_size", where, batch_size, f"a multiple of {count} processes", fix)
    data = Batches(
        arrays,
        int(batch_size),
        seed=checks.check_count(seed, where, "seed", least=0),
        shuffle=bool(shuffle),
        drop_remainder=drop_remainder,
        process=process,
        device=device,
    )
    if not len(data):
        raise DataError(
            "arrays",
            where,
            got=f"{data._rows} rows, fewer than batch_size={batch_size}",
            expected="one batch at least with drop_remainder=True",
        )
    return data
