"""The order of rows: a function of (seed, epoch), and the share of each process in a batch."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tsunax._core import processes

SORTED = 1 << 22  # epochs up to this many rows are sorted: 0.4 s, and the least time for a row
AHEAD = 1 << 16  # rows that a permutation computes at once: their words stay in a cache
ROUNDS = 8  # rounds of the network: `tests/test_data.py` fails for four
Process = tuple[int, int]  # (index, count)


def drawn(n: int, seed: int, epoch: int) -> np.ndarray:
    """All numbers below n in the order of random words, drawn from all orders.

    NumPy promises the words of a bit generator for ever, but not its permutations. The index of
    each word replaces its low bits: one plain sort is three times as fast as a stable argsort.
    """
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    low = np.uint64((1 << max(n - 1, 0).bit_length()) - 1)
    words = words & ~low | np.arange(n, dtype=np.uint64)
    words.sort()
    return words & low


def permutation(n: int, seed: int, epoch: int) -> Callable[[np.ndarray], np.ndarray]:
    """A keyed permutation of `range(n)`, one number at a time: no sort, no memory.

    A Feistel network over the bits of x permutes the next power of two. Numbers out of range go
    through it again until they are in range (Black & Rogaway 2002).
    """
    bits = (n - 1).bit_length()
    low, high = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64)

    def permute_once(x: np.ndarray) -> np.ndarray:
        left_half, right_half = x >> low, x & ((np.uint64(1) << low) - np.uint64(1))
        for first_key, second_key in zip(keys[::2], keys[1::2], strict=True):
            left_half ^= _mixed(right_half, first_key) >> (np.uint64(64) - high)
            right_half ^= _mixed(left_half, second_key) >> (np.uint64(64) - low)
        return (left_half << low) | right_half

    def permuted(x: np.ndarray) -> np.ndarray:
        x = permute_once(x.astype(np.uint64))
        while (too_large := np.flatnonzero(x >= n)).size:
            x[too_large] = permute_once(x[too_large])
        return x

    return permuted


def _mixed(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """Words with high bits that depend on all bits of x: a product is a sum of shifts of x."""
    x = x ^ key
    x *= np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xD6E8FEB86659FD93)
    return x


class EpochOrder:
    """The rows of an epoch in order, for one process: `order[i:j]` is computed when it is read."""

    def __init__(
        self, n: int, shuffle: bool, seed: int, epoch: int, batch_size: int, process: Process
    ) -> None:
        self.batch_size: int = batch_size
        self.process: Process = process
        self.batches: int = n // batch_size
        # rows of the short last batch
        self.tail: slice = share(n % batch_size, batch_size, process)
        self.dtype: type = np.int32 if n < 2**31 else np.int64
        # rows at places in the epoch of all processes
        self.rows_at: Any = lambda places: places
        if shuffle:  # up to SORTED rows at once
            self.rows_at = permutation(n, seed, epoch) if n > SORTED else drawn(n, seed, epoch).take
        # the rows that were computed last, and the index of the first
        self.computed_rows: tuple[int, np.ndarray] = 0, np.empty(0, self.dtype)

    def __getitem__(self, places: slice) -> np.ndarray:
        start, stop, _ = places.indices(len(self))
        first, rows = self.computed_rows
        if not first <= start <= stop <= first + len(rows):
            end = min(max(stop, start + AHEAD), len(self))
            blocks = [(i, min(i + AHEAD, end)) for i in range(start, end, AHEAD)]
            parts = [self.rows_at(self._places(*block)).astype(self.dtype) for block in blocks]
            first, rows = start, np.concatenate(parts)
            self.computed_rows = (first, rows) if len(parts) == 1 else self.computed_rows
        return rows[start - first : stop - first]

    def __len__(self) -> int:
        share_size = self.batch_size // self.process[1]
        return self.batches * share_size + self.tail.stop - self.tail.start

    def _places(self, start: int, stop: int) -> np.ndarray:
        places, (index, count) = np.arange(start, stop), self.process
        if count == 1:
            return places
        share_size = self.batch_size // count
        full = places // share_size * self.batch_size + index * share_size + places % share_size
        tail_places = places + self.batches * (self.batch_size - share_size) + self.tail.start
        return np.where(places < self.batches * share_size, full, tail_places)


def share(rows: int, batch_size: int, process: Process) -> slice:
    """The rows of a global batch that a process gets: its part, or all rows."""
    index, count = (0, 1) if is_whole(rows, batch_size, process[1]) else process
    return slice(index * rows // count, (index + 1) * rows // count)


def is_whole(rows: int, batch_size: int, count: int) -> bool:
    """Whether every process gets all rows of a batch, because they do not divide equally."""
    return count > 1 and rows < batch_size and bool(rows % processes.current().row_parts(count))
