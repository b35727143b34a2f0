"""Prefetching: a thread makes the next batches and copies them to a device."""

import operator
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from tsunax._core import Device, PyTree, checks
from tsunax.data.cursors import END, Source, as_source
from tsunax.data.on_devices import placement, put_tree, sharding_of, spans_processes
from tsunax.data.positions import Data
from tsunax.errors import DataError


def _placer(device: Any) -> Callable[[PyTree, bool], PyTree]:
    if device is None:
        return lambda batch, is_whole: batch
    sharding = placement(device, "prefetch()")
    if spans_processes(sharding):  # each process has its part of the rows
        replicated = sharding_of((), sharding)
        place = lambda x, is_whole: replicated if is_whole or not np.ndim(x) else sharding
        return lambda batch, is_whole: jax.tree.map(
            lambda x: put_tree(x, place(x, is_whole)), batch
        )
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return lambda batch, is_whole: jax.device_put(batch, sharding)
    by_rows = lambda x: sharding_of(np.shape(x), sharding)
    return lambda batch, is_whole: jax.device_put(batch, jax.tree.map(by_rows, batch))


def _placed(source: Source, place: Callable[[PyTree, bool], PyTree]) -> Iterator[tuple[Any, ...]]:
    """The batches of an epoch on the device, each with the position after it; `END` is last."""
    while (batch := source.next()) is not None:
        yield place(batch, source.is_whole), source.state(), source.is_whole
    yield END, source.state(), source.is_whole


def _run_ahead(batches: Iterator[Any], ready: Any, slots: Any, ended: list[bool]) -> None:
    """The thread: makes a batch for every slot; an error comes last, in a list."""
    try:
        while slots.get() and not ended:
            ready.put(next(batches))
    except BaseException as error:
        ready.put([error])


def _end(slots: Any, ended: list[bool], thread: threading.Thread) -> None:
    ended.append(True)
    slots.put(True)
    if thread is not threading.current_thread():  # the thread itself may collect the garbage
        thread.join(5)  # not longer: the data may wait for a batch that never comes


class Prefetched(Data):
    """Data that `prefetch(data, device, size)` returns; raises the same errors.

    Its position counts the batches that you received, not the batches that are read ahead. `data`
    is your iterable.
    """

    is_whole: bool = False
    reads_ahead: ClassVar[bool] = True

    def __init__(self, data: Iterable[PyTree], device: Device, size: int) -> None:
        self._source, self._device, self._size = as_source(data), device, size
        self.data: Any = self._source.data
        self._place = _placer(device)
        self._state: dict[str, Any] | None = None
        self._end: Callable[[], Any] = lambda: None  # ends the loop under way

    @property
    def resumable(self) -> bool:  # type: ignore[override]
        return self._source.resumable

    @property
    def is_placed(self) -> bool:  # type: ignore[override]
        return self._source.is_placed

    def afresh(self) -> "Prefetched":
        """The same data at the beginning, with a separate position and thread."""
        data = self.data.afresh() if isinstance(self.data, Data) else self.data
        return Prefetched(data, self._device, self._size)

    def __repr__(self) -> str:
        return f"Prefetched({self.data!r}, size {self._size})"

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[PyTree]:
        """The batches of an epoch, or of the rest of one; the thread ends with the loop."""
        self.close()
        self._source.rewind()
        batches, ended = _placed(self._source, self._place), []
        ready, slots = queue.SimpleQueue(), queue.SimpleQueue()
        thread = threading.Thread(
            name="tsunax-prefetch",
            target=_run_ahead,
            args=(batches, ready, slots, ended),
            daemon=True,
        )
        end = self._end = weakref.finalize(self, _end, slots, ended, thread)  # at exit too
        for _ in range(self._size):
            slots.put(True)
        thread.start()
        try:
            while end.alive:
                if isinstance(item := ready.get(), list):
                    raise item.pop()  # the error keeps this frame alive: no name may keep it
                batch, self._state, self.is_whole = item
                if batch is END:
                    return
                slots.put(True)
                yield batch
        finally:
            end()

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch you received; the state of the data itself there."""
        return self._source.state() if self._state is None else self._state

    def follow(self, state: Mapping[str, Any]) -> None:
        self.close()
        if isinstance(self.data, Data):
            self._source.follow(state)
        self._state = dict(state)

    def restart(self) -> None:
        """End the loop under way, and drop its iterator: the next loop calls `iter(data)`."""
        self.close()
        self._source, self._state = as_source(self.data), None

    def close(self) -> None:
        """End the loop under way; waits 5 seconds at most for the batch that its thread makes."""
        self._end()

    def set_state(self, state: Mapping[str, Any], fast_forward: bool = False) -> None:
        """Resume from `state`, a dict of `get_state()`.

        Raises DataError for data that does not store its position; with `fast_forward=True` it is
        read from the beginning instead, and earlier batches are dropped.
        """
        self.close()
        self._source.restore(state, fast_forward)
        self._state = None


@checks.naming_arguments
def prefetch(data: Iterable[PyTree], device: Device = None, size: int = 2) -> Prefetched:
    """The same data, but a thread makes the next `size` batches and copies them to a device.

        for batch in prefetch(data, device):  # the same batches in the same order
            state, info = step(state, batch)

    A device is a `jax.Device`, a kind such as "gpu", or `("gpu", 1)` for number 1 of a kind. With a
    Mesh or NamedSharding the rows are spread over the devices along axis 0, and leaves
    without rows are copied to each; each of several processes gives its own part. Without a device
    batches are only made ahead. Exceptions of the data are raised here as the cause of a DataError.
    The thread ends with the loop. Batches read ahead of a generator are lost when a loop over it
    ends.

    Raises DataError for a size below 1; JAX raises ValueError while it runs for rows that do not
    divide by the devices.

    >>> import tsunax as ts
    >>> data = prefetch(ts.batches(np.arange(6), 2))
    >>> for batch in data:
    ...     print(batch, data.get_state())
    [0 1] {'epoch': 0, 'position': 1}
    [2 3] {'epoch': 0, 'position': 2}
    [4 5] {'epoch': 1, 'position': 0}
    """
    if (size := operator.index(size)) < 1:
        raise DataError("size", "prefetch()", size, "1 or more")
    return Prefetched(data, device, size)
