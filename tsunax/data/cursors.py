"""A cursor over any data: the next batch, the next k at once, and the position to resume from.

Data is any iterable of batches: `batches`, `prefetch`, a list, a generator, and the loaders of
other libraries. The state of a loader is found by duck type.
"""

import contextlib
import copy
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import PyTree, placement, trees
from tsunax.data.checks import check_casts, owned
from tsunax.data.positions import Data
from tsunax.errors import DataError, TsunaxError, WrongTypeError, told

END = object()
GETTERS, SETTERS = ("get_state", "state_dict"), ("set_state", "load_state_dict")

# {data at the end of an epoch: the number of the next epoch}, for all data that this process reads,
# but not for data without a hash or weak references, such as lists.
_NEXT_EPOCHS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _next(batches: Iterator[Any]) -> Any:
    """The next batch or `END`; a StopIteration that comes out of a `__getitem__` is an error."""
    try:
        return next(batches)
    except StopIteration as error:
        frames = traceback.walk_tb(error.__traceback__)
        if any(frame.f_code.co_name == "__getitem__" for frame, _ in frames):
            raise
        return END


def _shapes(batch: Any) -> Any:
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, [(np.shape(x), trees.dtype_of(x)) for x in leaves]


class _Stack:
    """Up to k batches of one shape along a new first axis. Each is copied when it is added."""

    def __init__(self, batch: Any, k: int):
        leaves, self.treedef = jax.tree.flatten(batch)
        make = lambda x: placement.aligned_empty((k, *x.shape), x.dtype)
        empty = lambda x: [] if isinstance(x, jax.Array) else make(np.asarray(x))
        self.leaves: list[Any] = [empty(x) for x in leaves]
        self.count = 0
        self.add(batch)

    def add(self, batch: Any) -> None:
        for stack, leaf in zip(self.leaves, jax.tree.leaves(batch), strict=True):
            if isinstance(stack, list):
                stack.append(leaf)
            else:
                stack[self.count] = leaf
        self.count += 1

    def stacked(self) -> Any:
        stack = lambda x: jnp.stack(x) if isinstance(x, list) else x[: self.count]
        return self.treedef.unflatten(map(stack, self.leaves))


class Source:
    """A cursor over `data`, any iterable of batches, returned by `as_source`.

    Each batch has its own memory: loaders may refill one buffer (h5py, shared memory, collate
    functions) while a program or a transfer still reads the previous batch. So NumPy arrays and
    tensors of other loaders are copied; arrays of `batches` are new each time.

    `epoch` counts the epochs, `position` the batches that were read of the current epoch.
    """

    def __init__(self, data: Any) -> None:
        self.data: Any = data
        self.epoch: int = 0
        self.position: int = 0
        self.is_whole: bool = False  # whether the last batch has all rows on every process
        self._batches: Any = None  # the iterator of this epoch
        # a batch that was read too many (or `END`, or an error), the state before it, `is_whole`
        self._excess: Any = None
        # whether the current epoch was restored and the epochs before it were not read
        self.skips_epochs: bool = False
        self._count_read, self._restored, self._had_owner = 0, False, False
        self._is_data, self._is_list = isinstance(data, Data), type(data) in (list, tuple)

    @property
    def restartable(self) -> bool:
        """Whether there is a second epoch. An iterator, such as a generator, has a single one."""
        return not isinstance(self.data, Iterator)

    @property
    def resumable(self) -> bool:
        """Whether the data stores its position, so that `restore` need not read it again.

        A list or a tuple does by the number of the batch. Data with a state in their iterator are
        resumable as soon as the iterator exists.
        """
        if self._is_data or self._is_list:
            return self._is_list or self.data.resumable
        return self._owner() is not None or self._had_owner  # also between two epochs

    @property
    def trouble(self) -> str:
        """The error that `next` will raise, if it was read already; else ""."""
        error = self._excess[0] if self._excess is not None else None
        return told(error) if isinstance(error, TsunaxError) else ""

    def __iter__(self) -> Iterator[Any]:
        while (batch := self.next()) is not None:
            yield batch

    def _pull(self, k: int | None = None) -> Any:
        """The next batch, or the next k, stacked; `END` after the last batch of an epoch."""
        where = f"batch {self.position} of epoch {self.epoch}"
        try:
            if self._batches is None:
                self._batches = self._epoch_iterator()
            batch = _next(self._batches) if k is None else self._batches.take(k)
            # an IndexError ends the iterator of a Sequence, also if `__getitem__` has a bug
            is_sequence = batch is END and type(self.data).__iter__ is Sequence.__iter__
            if is_sequence and self.position < len(self.data):
                batch = self.data[self.position]  # raises the error again
        except TsunaxError:
            raise
        except Exception as error:
            raise DataError("data", where, told(error), "a batch") from error
        if batch is None:
            if k is not None:
                return END
            raise DataError("batch", where, "None", "a tree of arrays")
        if batch is END or self._is_data:
            return batch
        leaves, treedef = jax.tree.flatten(batch)
        if all(type(x) is np.ndarray for x in leaves):
            return batch
        check_casts(batch, "batch", where)  # np.asarray below would lose masks
        is_convertible = lambda x: hasattr(x, "__array__") and not isinstance(x, jax.Array)
        return treedef.unflatten(np.asarray(x) if is_convertible(x) else x for x in leaves)

    def _pull_or_error(self) -> Any:
        """The next batch, `END`, or an error, which is raised after the batches before it."""
        try:
            return self._pull()
        except TsunaxError as error:
            return error

    def _epoch_iterator(self) -> Any:
        # Datasets of Hugging Face restore a position in the epoch of this number only.
        if callable(set_epoch := getattr(self.data, "set_epoch", None)):
            set_epoch(self.epoch)
        with contextlib.suppress(TypeError):
            _NEXT_EPOCHS.pop(self.data, None)
        return iter(self.data)

    def _owned(self, batch: Any, position: int) -> Any:
        """The batch in separate memory: data may use the memory of a batch again."""
        if self._is_data or batch is END or isinstance(batch, TsunaxError):
            return batch
        return owned(batch, "batch", f"batch {position} of epoch {self.epoch}")

    def _end_epoch(self) -> None:
        if self.position == 0:
            got = f"no batch at all, {self._count_read} in earlier epochs"
            fix = "A generator can be read once: give a list, ts.batches(...) or a grain dataset."
            raise DataError("data", f"epoch {self.epoch}", got, "at least one", fix)
        self._had_owner = self._owner() is not None
        self._batches, self._restored = None, False
        self.epoch, self.position = self.epoch + 1, 0
        with contextlib.suppress(TypeError):
            _NEXT_EPOCHS[self.data] = self.epoch

    def next(self) -> PyTree:
        """The next batch; None at the end of an epoch, and then the next epoch begins.

        Raises DataError for an exception of the data (its cause), a None, or an empty epoch.
        """
        batch = self._next()
        return None if batch is None else self._owned(batch, self.position - 1)

    def _next(self) -> Any:
        """The next batch, in memory that the data may use again."""
        if self._excess is None:
            batch = self._pull()
            is_whole = self._pulls_whole
        else:
            (batch, _, is_whole), self._excess = self._excess, None
        if isinstance(batch, TsunaxError):
            raise batch
        if batch is END:
            return self._end_epoch()
        self._count(1)
        self.is_whole = is_whole
        return batch

    @property
    def _pulls_whole(self) -> bool:
        return self._is_data and self.data.is_whole

    def _count(self, n: int) -> None:
        self.position += n
        self._count_read += n
        self._restored = False

    def take(self, k: int, room_of: Callable[[PyTree], int] | None = None) -> PyTree:
        """The next k batches as one tree with a leading axis; None as in `next`.

        Eight batches of shape (32, 4) have the shape (8, 32, 4): `source.take(8)`. Fewer at the end
        of an epoch, if shapes change, and if `room_of(batch)` is less than k. `Batches` gather them
        at once. Raises as `next`.
        """
        if self._is_data and self.data.gathers:
            chunk = self._pull(k)
            if chunk is END:
                return self._end_epoch()
            self._count(len(jax.tree.leaves(chunk)[0]))
            self.is_whole = self._pulls_whole
            return chunk
        if (batch := self._next()) is None:
            return None
        k = k if room_of is None else min(k, room_of(batch))
        chunk, shapes = _Stack(batch, k), _shapes(batch)
        while chunk.count < k and self._excess is None:
            place, batch = self.state(), self._pull_or_error()
            ends_stack = batch is END or isinstance(batch, TsunaxError) or _shapes(batch) != shapes
            if ends_stack or self._pulls_whole:
                self._excess = self._owned(batch, self.position), place, self._pulls_whole
            else:
                chunk.add(batch)
                self._count(1)
        stacked = chunk.stacked()
        if not self._is_data:
            first, last = self.position - chunk.count, self.position - 1
            check_casts(stacked, "batch", f"one of batches {first} to {last} of epoch {self.epoch}")
        return stacked

    def advance(self, k: int) -> tuple[int, tuple[int, int]] | None:
        """The rows that `take(k)` would gather of resident `Batches`: `(first, (k, rows))`."""
        if self._batches is None:
            self._batches = iter(self.data)
        rows_ahead = self._batches.advance(k)
        if rows_ahead is None:
            return self._end_epoch()
        self._count(rows_ahead[1][0])
        return rows_ahead

    def count_repeated_epochs(self, n: int) -> None:
        """Count n epochs of data with a single batch, which is not read again."""
        self._count(n)
        self._batches, self.epoch, self.position = None, self.epoch + n, 0

    @property
    def is_placed(self) -> bool:
        """Whether `restore` was called after the last batch."""
        return self._restored or (self._is_data and self.data.is_placed)

    def follow(self, state: Mapping[str, Any]) -> None:
        """Take over the `state`, a dict, of a copy of its data: `follow(copy.get_state())`."""
        self.data.follow(state)
        self._batches, self._excess, self._restored = None, None, False
        self.epoch, self.position = state["epoch"], state["position"]

    def rewind(self) -> None:
        """Skip the rest of the current epoch, unless its position was just restored."""
        if self.position and not self._restored:
            self._batches = self._excess = None
            self.epoch, self.position = self.epoch + 1, 0

    def peek(self) -> dict[str, Any]:
        """Read the next batch, which `next` then returns; returns the position after that batch."""
        if isinstance(batch := self._read_ahead(), TsunaxError):
            raise batch
        return self._read_position()

    def next_is_end(self) -> bool:
        """Whether the epoch has no further batch. Reads the next batch, as `peek`."""
        return self._read_ahead() is END

    def _read_ahead(self) -> Any:
        if self._excess is None:
            place, batch = self.state(), self._pull_or_error()
            self._excess = self._owned(batch, self.position), place, self._pulls_whole
        return self._excess[0]

    def give_back(self) -> None:
        """Move data back to before a batch that was read too many.

        Data with a position go back to it. An iterator without one has lost the batch; the next
        loop over another loader begins as it does after a `break`.
        """
        if self._excess is None or not self._count_read:  # a run that did not begin sets no state
            return
        if self._is_data:
            self.data.follow(self.state())
        elif (data_state := self.state()["data"]) is not None:
            self._call(SETTERS, data_state)
        self._excess = None

    def _owner(self) -> Any:
        """The data or their iterator, whichever gives its state and takes it back; else None."""
        has = lambda owner, names: any(callable(getattr(owner, x, None)) for x in names)
        owners = [x for x in (self.data, self._batches) if has(x, GETTERS) and has(x, SETTERS)]
        return owners[0] if owners else None

    def _call(self, names: tuple[str, str], *args: Any) -> tuple[bool, Any]:
        owner = self._owner()
        for name in names if owner is not None else ():
            if callable(method := getattr(owner, name, None)):
                try:
                    return True, method(*args)
                except Exception as error:
                    raise DataError(
                        "position of the data",
                        f"{type(owner).__name__}.{name}()",
                        got=told(error),
                        expected="no error",
                    ) from error
        return False, None

    def state(self) -> dict[str, Any]:
        """The position after the last batch, `{"epoch", "position"}`, and the data's own state."""
        return self._read_position() if self._excess is None else self._excess[1]

    def _read_position(self) -> dict[str, Any]:
        """`state`, but after a batch that was read too many."""
        if self._is_data:
            return self.data.get_state()
        data_state = self._call(GETTERS)[1]
        # Some loaders change the returned dict later. A value without a copy cannot be saved.
        with contextlib.suppress(Exception):
            data_state = copy.deepcopy(data_state)
        return {"epoch": self.epoch, "position": self.position, "data": data_state}

    def restore(self, state: Mapping[str, Any], fast_forward: bool = False) -> None:
        """Resume from a position that `state` returned.

        A list begins at that batch, DataError if it is shorter. Other data without
        get_state/set_state or state_dict/load_state_dict raise DataError, except at the beginning
        of an epoch, which is then read as if it was the first. With `fast_forward=True` they are
        read from the beginning, and earlier batches and epochs dropped.
        """
        if not self._is_data and "data" not in state:
            raise DataError("state", "restore", state, "data, epoch, position")
        self._batches = self._excess = None
        self.epoch, self.position, self._restored = state["epoch"], state["position"], True
        if self._is_data:
            options = {} if self.data.resumable else {"fast_forward": fast_forward}
            self.data.set_state(state, **options)
            return
        place, data_state = f"epoch {self.epoch}, position {self.position}", state["data"]
        has_state = data_state is not None
        if has_state and self._owner() is None:
            self._batches = self._epoch_iterator()
        if has_state and self._call(SETTERS, data_state)[0]:
            return
        must_read = self.position or (self.epoch and not self.restartable)
        if has_state or (must_read and not (fast_forward or self._is_list)):
            raise DataError(
                "data",
                "restore",
                got=f"a {type(self.data).__name__} without a state, at {place}",
                expected="get_state/set_state or state_dict/load_state_dict",
                fix="Use ts.batches or grain; or fast_forward=True, to read earlier batches again.",
            )
        is_at_place = False
        with contextlib.suppress(TypeError):
            is_at_place = _NEXT_EPOCHS.get(self.data) == self.epoch
        self.skips_epochs = bool(self.epoch) and not (must_read or fast_forward or is_at_place)
        # the order of an epoch may depend on the epochs before it
        if must_read or (fast_forward and not is_at_place):
            goal = self.epoch, self.position
            self.epoch, self.position = self.epoch if self._is_list else 0, 0
            while (self.epoch, self.position) < goal:
                self._next()  # a list has its batches in memory
            if (self.epoch, self.position) > goal:
                raise DataError("data", "restore", "fewer batches than before", place)
            self._restored = True


def as_source(data: Iterable[PyTree]) -> Source:
    """A cursor over any iterable of batches: `batches`, a list, a generator, grain, torch, ...

    Leaves of other libraries, such as torch's tensors on the CPU, become NumPy arrays. The state is
    found by duck type: get_state/set_state or state_dict/load_state_dict of the iterable or its
    iterator. Raises WrongTypeError for arrays, and for objects that are no iterable.

    >>> source = as_source([np.zeros(2), np.ones(2), np.ones(3)])
    >>> source.take(8).shape, source.take(8).shape, source.state()
    ((2, 2), (1, 3), {'epoch': 0, 'position': 3, 'data': None})
    >>> source.take(8) is None, source.epoch
    (True, 1)
    """
    if isinstance(data, Source):
        return data
    are_arrays = trees.is_array(data) or isinstance(data, (Mapping, str))
    if isinstance(data, tuple):  # a NamedTuple is one batch
        are_arrays = hasattr(data, "_fields") or (data != () and all(map(trees.is_array, data)))
    # A subclass of list may be a loader, which reads its batches when they are needed. A list has
    # batches, unless they look like inputs and targets.
    elif type(data) is list and len(data) in (2, 3) and all(map(trees.is_array, data)):
        shares_rows = len({np.shape(x)[:1] for x in data}) == 1
        are_arrays = shares_rows and len({(x.ndim, x.dtype) for x in data}) > 1
    # an object with __getitem__ alone need not have an end
    if are_arrays or not isinstance(data, Iterable):
        raise WrongTypeError(
            "data",
            "",
            got=trees.describe(data),
            expected="an iterable of batches",
            fix="Of arrays or records: ts.batches(arrays, batch_size). One batch: [batch].",
        )
    return Source(data)
