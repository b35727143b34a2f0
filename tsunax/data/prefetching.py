"""Prefetching: a thread makes the next batches and copies them to a device."""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from tsunax._core import Device, PyTree
from tsunax.data.batching import Data
from tsunax.data.cursors import END, Source, as_source
from tsunax.data.on_devices import placement, put, sharding_of
from tsunax.errors import DataError, suggests_names


def _placer(device: Any):
    """A function that puts a batch on a device, or its rows over the devices of a mesh."""
    if device is None:
        return lambda batch, is_whole: batch
    sharding = placement(device, "prefetch()")
    if not isinstance(sharding, NamedSharding):
        return lambda batch, is_whole: jax.device_put(batch, sharding)
    if sharding.is_fully_addressable:
        where = lambda x: sharding_of(np.shape(x), sharding)
        return lambda batch, is_whole: jax.device_put(batch, jax.tree.map(where, batch))
    replicated = sharding_of((), sharding)

    def place(x, is_whole):
        return put(np.asarray(x), replicated if is_whole or not np.ndim(x) else sharding)

    return lambda batch, is_whole: jax.tree.map(lambda x: place(x, is_whole), batch)


def _run_ahead(source: Source, place, slots: queue.SimpleQueue, ready: queue.SimpleQueue) -> None:
    """The thread: for every slot a batch and the position after it, until the end or an error."""
    try:
        while slots.get():
            batch, is_whole = source.next(), source.is_whole
            placed = END if batch is None else place(batch, is_whole)
            ready.put((placed, (source.state(), is_whole), None))
            if batch is None:
                return
    except BaseException as error:
        ready.put((END, None, error))


def _end(slots: queue.SimpleQueue, thread: threading.Thread) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            slots.get_nowait()
    slots.put(False)
    if thread is not threading.current_thread():  # which may collect the garbage
        thread.join(5)  # a thread that waits for a batch ends with it


class _Ahead:
    """An iterator over the batches that its thread has read; the thread ends with the iterator."""

    def __init__(self, owner: Prefetched):
        self._owner, self._thread = owner, None
        self._slots, self._ready = queue.SimpleQueue(), queue.SimpleQueue()

    def __iter__(self) -> _Ahead:
        return self

    def _start(self) -> None:
        owner = self._owner
        owner.close()
        owner._running = weakref.ref(self)
        owner._source.rewind()
        for _ in range(owner._size):
            self._slots.put(True)
        work = (owner._source, owner._place, self._slots, self._ready)
        self._thread = threading.Thread(target=_run_ahead, args=work, daemon=True)
        self._thread.name = "tsunax-prefetch"
        # called when the iterator is collected, and at exit
        self._finish = weakref.finalize(self, _end, self._slots, self._thread)
        self._thread.start()

    def __next__(self) -> Any:
        if self._thread is None:
            self._start()
        if not self._finish.alive:
            raise StopIteration
        batch, state, error = self._ready.get()
        if batch is END:
            self.close()
        else:
            self._slots.put(True)
        if error is not None:
            try:
                raise error
            finally:
                del error  # or the traceback would keep this frame, and this frame the error
        if state is not None:
            self._owner._state, self._owner.is_whole = state
        if batch is END:
            raise StopIteration
        return batch

    def close(self) -> None:
        """End the thread now, and drop the batches that were read ahead."""
        if self._thread is not None:
            self._finish()


class Prefetched(Data):
    """Data that is read ahead, made by `prefetch`; its position counts the batches you received."""

    def __init__(self, data: Iterable[PyTree], device: Device, size: int) -> None:
        self._source, self._place, self._size = as_source(data), _placer(device), size
        self._state: dict[str, Any] | None = None
        self._running: Any = lambda: None

    @property
    def data(self) -> Any:
        """The data that is read ahead."""
        return self._source.data

    @property
    def resumable(self) -> bool:  # type: ignore[override]
        return self._source.resumable

    @property
    def is_placed(self) -> bool:  # type: ignore[override]
        return self._source.is_placed

    def afresh(self) -> Prefetched:
        """The same data at the beginning, with a separate position and thread."""
        data = self.data.afresh() if isinstance(self.data, Data) else self.data
        other = copy.copy(self)
        other._source, other._state, other._running = as_source(data), None, lambda: None
        return other

    def __repr__(self) -> str:
        return f"Prefetched({self.data!r}, size {self._size})"

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> _Ahead:
        return _Ahead(self)

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch you received; the state of the data itself there."""
        return self._source.state() if self._state is None else self._state

    def follow(self, state: Mapping[str, Any]) -> None:
        self.close()
        self._source.follow(state)
        self._state = dict(state)

    def restart(self) -> None:
        """Begin anew with the data."""
        self.close()
        self._source, self._state = as_source(self.data), None

    def close(self) -> None:
        """End the thread of a running loop."""
        if running := self._running():
            running.close()

    def set_state(self, state: Mapping[str, Any], fast_forward: bool = False) -> None:
        """Resume from a position; see `Source.restore`."""
        self.close()
        self._source.restore(state, fast_forward)
        self._state = None


@suggests_names
def prefetch(data: Iterable[PyTree], device: Device = None, size: int = 2) -> Prefetched:
    """Data whose next `size` batches a thread makes, and copies to a device, ahead of the loop.

        for batch in prefetch(data, device):  # the same batches in the same order
            state, info = step(state, batch)

    With a Mesh or NamedSharding the rows are spread over the devices along axis 0, and leaves
    without rows are copied to each; each of several processes gives its own part. Without a device
    batches are only made ahead. Exceptions of the data are raised here as the cause of a DataError.
    The thread ends with the loop. Batches read ahead of a generator are lost when a loop over it
    ends.

    Raises DataError for a size below 1, and while it runs for rows that do not divide by the
    devices.

    >>> import tsunax as ts
    >>> data = prefetch(ts.batches(np.arange(6), 2))
    >>> for batch in data:
    ...     print(batch, data.get_state())
    [0 1] {'epoch': 0, 'position': 1}
    [2 3] {'epoch': 0, 'position': 2}
    [4 5] {'epoch': 1, 'position': 0}
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise DataError("size", "prefetch()", repr(size), "an int of 1 or more")
    return Prefetched(data, device, size)
