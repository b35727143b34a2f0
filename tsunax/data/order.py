"""The order of rows: a function of (seed, epoch), and the share of each process in a batch."""

from __future__ import annotations

import jax
import numpy as np

from tsunax._core import Function
from tsunax.distributed import process_count

ALL_ROWS = 2**62  # the window of a shuffle of the whole epoch
Process = tuple[int, int]  # (index, count)


def draw(seed: int, epoch: int) -> Function:
    """`draw(n)`: the next n random words of an epoch.

    NumPy promises the words of a bit generator for every version and machine, but not its
    permutations.
    """
    return np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw


def shuffled(words: np.ndarray) -> np.ndarray:
    """Orders by random words, along the last axis; overwrites the words.

    The index of each word replaces its low bits, so that one plain sort orders the indices: three
    times as fast as a stable argsort.
    """
    n = words.shape[-1]
    low = np.uint64((1 << max(n - 1, 0).bit_length()) - 1)
    words &= ~low
    words |= np.arange(n, dtype=np.uint64)
    words.sort(axis=-1)
    words &= low
    return words.astype(np.int32 if n < 2**31 else np.int64)


def rows_of_epoch(n: int, window: int | None, seed: int, epoch: int) -> np.ndarray:
    """All n rows, shuffled within windows; without a window in sequence."""
    dtype = np.int32 if n < 2**31 else np.int64
    if window is None:
        return np.arange(n, dtype=dtype)
    words, window = draw(seed, epoch), min(window, n)
    end = n - n % window  # of the windows that are full
    rows = shuffled(words(end).reshape(-1, window)).ravel()
    if window < n:
        starts = np.repeat(np.arange(0, end, window, dtype=dtype), window)
        rest = np.add(end, shuffled(words(n - end)), dtype=dtype)
        rows = np.concatenate([rows + starts, rest])
    return rows


# Several processes


def share(rows: int, process: Process, is_whole: bool = False) -> slice:
    """The rows of a global batch that a process gets: its part, or all of them."""
    index, count = process
    return slice(rows) if is_whole else slice(index * rows // count, (index + 1) * rows // count)


def is_whole(rows: int, batch_size: int, count: int) -> bool:
    """Whether every process gets all rows of a batch: a short one that no parts divide.

    An array of all processes is made of equal parts, and equal parts keep their programs the same.
    The parts are those of the devices, if the processes train as one program.
    """
    parts = jax.device_count() if count > 1 and count == process_count() else count
    return count > 1 and rows < batch_size and bool(rows % parts)


def share_of_epoch(rows: np.ndarray, batch_size: int, process: Process) -> np.ndarray:
    """The rows that a process gets, batch after batch."""
    if process == (0, 1):
        return rows
    full = rows[: len(rows) - len(rows) % batch_size].reshape(-1, batch_size)
    rest = rows[full.size :]
    mine = share(len(rest), process, is_whole(len(rest), batch_size, process[1]))
    return np.concatenate([full[:, share(batch_size, process)].ravel(), rest[mine]])
