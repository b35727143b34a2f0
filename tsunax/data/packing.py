"""Sequences of different lengths as arrays: packed into rows, or padded to a few lengths.

pack      -> one shape: several sequences in a row, told apart by segments
pad       -> a few shapes: each sequence padded to the least length that holds it
interleave   batches of those shapes as one source, each shape compiled once
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

from tsunax._core import checks, trees
from tsunax.data import order
from tsunax.data.batching import Batches, Positioned
from tsunax.errors import DataError, WrongTypeError


class Packed(NamedTuple):
    """Sequences in rows of one length, see `pack`."""

    values: np.ndarray  # (rows, length, ...); 0 where there is none
    segments: np.ndarray  # int32 (rows, length): 1, 2, ... for the sequences of a row; 0 for none
    positions: np.ndarray  # int32 (rows, length): within its sequence


class Padded(NamedTuple):
    """Sequences of one length, see `pad`."""

    values: np.ndarray  # (n, length, ...); 0 where there is none
    mask: np.ndarray  # bool (n, length): where there is some


def pack(sequences: Sequence[ArrayLike], length: int) -> Packed:
    """Pack `sequences` into rows of `length`, each into the row with the least room for it.

    A token attends to those of its own segment, `segments[:, :, None] == segments[:, None, :]`, and
    weighs 1 where `segments > 0`: with `Loss.mean(losses, where)` all tokens count alike, however
    they were packed. `batches(pack(texts, 512), 32)` reads, shuffles and resumes them as arrays.

    Raises DataError for a sequence that is empty, longer than `length`, or of another kind.

    >>> packed = pack([[1, 2, 3], [4, 5, 6, 7], [8]], 5)
    >>> packed.values.tolist(), packed.segments.tolist()
    ([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]], [[1, 1, 1, 0, 0], [1, 1, 1, 1, 2]])
    """
    checks.check_count(length, "pack()", "length")
    arrays = _checked(sequences, length, "pack()")
    counts, places = [], []  # sequences of each row; the row, begin and number of each sequence
    # how much room rows have, in order; the rows with so much
    rooms, rows = [length], {length: [0]}
    for x in arrays:
        room = rooms[i := bisect.bisect_left(rooms, len(x))]
        row = rows[room].pop()
        if row == len(counts):
            counts.append(0)
            rows[length].append(row + 1)
        elif not rows[room]:
            del rooms[i]
        counts[row] += 1
        places.append((row, length - room, counts[row]))
        if left := room - len(x):
            if not rows.setdefault(left, []):
                bisect.insort(rooms, left)
            rows[left].append(row)
    values = np.zeros((len(counts), length, *arrays[0].shape[1:]), arrays[0].dtype)
    segments, positions = np.zeros((2, len(counts), length), np.int32)
    for x, (row, at, segment) in zip(arrays, places, strict=True):
        part = row, slice(at, at + len(x))
        values[part], segments[part], positions[part] = x, segment, np.arange(len(x))
    return Packed(values, segments, positions)


def pad(sequences: Sequence[ArrayLike], lengths: Sequence[int]) -> dict[int, Padded]:
    """Pad `sequences` to the least of `lengths` that holds them: `{length: Padded}`.

    For `interleave`: `[batches(x, 4096 // n) for n, x in pad(texts, [64, 128, 256]).items()]` has
    about as many tokens in each batch. Lengths that no sequence needs are left out.

    Raises DataError as `pack`.

    >>> {n: x.values.tolist() for n, x in pad([[1, 2, 3], [4], [5, 6]], [2, 4]).items()}
    {2: [[4, 0], [5, 6]], 4: [[1, 2, 3, 0]]}
    """
    lengths = sorted(np.ravel(lengths).tolist())
    arrays = _checked(sequences, lengths[-1] if lengths else 0, "pad()")
    found: dict[int, list[np.ndarray]] = {n: [] for n in lengths}
    for x in arrays:
        found[lengths[np.searchsorted(lengths, len(x))]].append(x)
    return {n: _padded(part, n) for n, part in found.items() if part}


def _padded(arrays: list[np.ndarray], length: int) -> Padded:
    values = np.zeros((len(arrays), length, *arrays[0].shape[1:]), arrays[0].dtype)
    for row, x in zip(values, arrays, strict=True):
        row[: len(x)] = x
    return Padded(values, np.arange(length) < np.array([len(x) for x in arrays])[:, None])


def _checked(sequences: Sequence[ArrayLike], length: int, where: str) -> list[np.ndarray]:
    arrays = [np.asarray(x) for x in sequences]
    if not arrays:
        raise DataError("sequences", where, "none", "one at least")
    if not arrays[0].ndim:
        raise DataError(
            "sequences[0]", where, trees.describe(arrays[0]), "an array with a first axis"
        )
    kind = lambda x: (x.shape[1:], x.dtype)
    for i, x in enumerate(arrays):
        at = f"sequences[{i}]"
        if not x.ndim or kind(x) != kind(arrays[0]):
            expected = f"{trees.describe(arrays[0])} but for its length, as the first one"
            raise DataError(at, where, trees.describe(x), expected)
        if not 0 < len(x) <= length:
            raise DataError(at, where, f"a length of {len(x)}", f"1 to {length}", "Cut it.")
    return arrays


class Interleaved(Positioned):
    """Data made by `interleave`: batches of several sources in turn, with one position."""

    is_whole: bool = False

    def __init__(self, parts: Sequence[Batches], seed: int) -> None:
        super().__init__({"seed": seed, "parts": [part.settings for part in parts]})
        self._parts, self._seed = list(parts), seed

    def __repr__(self) -> str:
        return f"Interleaved({', '.join(map(repr, self._parts))})"

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[Any]:
        epoch, position = self._begin()
        kinds = np.repeat(range(len(self._parts)), list(map(len, self._parts)))
        kinds = kinds[order.drawn(len(kinds), self._seed, epoch)]
        parts = [part.afresh() for part in self._parts]
        read = np.bincount(kinds[:position], minlength=len(parts)).tolist()
        for part, n in zip(parts, read, strict=True):
            part.set_state({"epoch": epoch, "position": n})
        readers = list(map(iter, parts))
        for kind in kinds[position:].tolist():
            batch = next(readers[kind])
            self.is_whole, position = parts[kind].is_whole, position + 1
            self._place = epoch, position
            yield batch


def interleave(parts: Sequence[Batches] | Mapping[Any, Batches], seed: int = 0) -> Interleaved:
    """Batches of several sources, `parts`, as one, in an order drawn for each epoch.

    Each part has its own shape, which a run compiles once, however many there are. An epoch has
    every batch of every part. Like `batches`, it is a function of (seed, epoch) and resumes at any
    batch. Steps that `fit` calls at once are of one shape. Raises WrongTypeError for a part that is
    not `ts.batches(...)` without a device, DataError if there are no parts.

    >>> import tsunax as ts
    >>> short, long = np.zeros((4, 8)), np.zeros((2, 16))
    >>> data = interleave([ts.batches(short, 2), ts.batches(long, 1)], seed=1)
    >>> [batch.shape for batch in data]
    [(1, 16), (2, 8), (1, 16), (2, 8)]
    """
    parts = list(parts.values() if isinstance(parts, Mapping) else parts)
    for i, part in enumerate(parts):
        if not isinstance(part, Batches) or part.resident is not None:
            expected, fix = "ts.batches(...) without a device", "Of JAX arrays: ts.to_host(arrays)."
            raise WrongTypeError(f"parts[{i}]", "interleave()", trees.describe(part), expected, fix)
    if not parts:
        raise DataError("parts", "interleave()", "none", "one at least")
    return Interleaved(parts, seed)
