"""Sequences of different lengths as arrays: packed into rows, or padded to a few lengths.

pack      -> one shape: several sequences in a row, told apart by segments
pad       -> a few shapes: each sequence padded to the least length that holds it
interleave   batches of those shapes as one source, each shape compiled once
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from tsunax._core import PyTree, TreeDef, Where, checks, patterns, trees
from tsunax.data import order
from tsunax.data.batching import Batches
from tsunax.data.positions import Positioned
from tsunax.errors import DataError, WrongTypeError


class Packed(NamedTuple):
    """Sequences in rows of one length, see `pack`."""

    values: PyTree  # (rows, length, ...); 0 for padding
    segments: np.ndarray  # int32 (rows, length): 1, 2, ... for a row's sequences; 0 for padding
    positions: np.ndarray  # int32 (rows, length): within its sequence


class Padded(NamedTuple):
    """Sequences of one length, see `pad`."""

    # (n, length, ...), 0 for padding; leaves that a record has once, such as a label, are (n, ...)
    values: PyTree
    mask: np.ndarray  # bool (n, length): False for padding
    indices: np.ndarray  # int32 (n,): row i is `sequences[indices[i]]`; increasing


class _Records(NamedTuple):
    """Sequences as arrays."""

    columns: list[list[np.ndarray]]  # the arrays of each leaf
    treedef: TreeDef  # the structure of a record
    are_sequences: Sequence[bool]  # for each leaf: False if a record has it once
    lengths: list[int]  # for each record


def pack(sequences: Sequence[PyTree], length: int) -> Packed:
    """Pack `sequences` into rows of `length`, each into the row with the least room for it.

    Tokens attend to tokens of their segment, `segments[:, :, None] == segments[:, None, :]`, and
    weigh 1 where `segments > 0`: with `Loss.mean(losses, where)` all tokens count alike, however
    they were packed. `batches(pack(texts, 512), 32)` reads, shuffles and resumes them as arrays.

    Sequences are arrays or lists, or records of several as in `pad`, each of which has one value
    for each token.

    Raises DataError for a sequence that is empty, longer than `length`, or of another kind.

    >>> packed = pack([[1, 2, 3], [4, 5, 6, 7], [8]], 5)
    >>> packed.values.tolist(), packed.segments.tolist()
    ([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]], [[1, 1, 1, 0, 0], [1, 1, 1, 1, 2]])
    """
    records = _checked(sequences := list(sequences), length, "pack()")
    if not all(records.are_sequences):
        raise DataError(
            "sequences[0]",
            "pack()",
            got=trees.describe(sequences[0]),
            expected="one value for each token",
            fix="Use ts.data.pad, or np.full(len(tokens), label).",
        )
    counts, places = [], []  # sequences of each row; the row, begin and number of each sequence
    # sizes of the free room at the end of rows, in order; the rows with each size of room
    rooms, rows = [length], {length: [0]}
    for n in records.lengths:
        room = rooms[i := bisect.bisect_left(rooms, n)]
        row = rows[room].pop()
        if row == len(counts):
            counts.append(0)
            rows[length].append(row + 1)
        elif not rows[room]:
            del rooms[i]
        counts[row] += 1
        places.append((row, length - room, counts[row]))
        if new_room := room - n:
            if not rows.setdefault(new_room, []):
                bisect.insort(rooms, new_room)
            rows[new_room].append(row)
    empty = lambda x: np.zeros((len(counts), length, *x[0].shape[1:]), x[0].dtype)
    values = list(map(empty, records.columns))
    segments, positions = np.zeros((2, len(counts), length), np.int32)
    pairs, count = list(zip(values, records.columns, strict=True)), np.arange(length)
    for i, (n, (row, begin, segment)) in enumerate(zip(records.lengths, places, strict=True)):
        part = row, slice(begin, begin + n)
        segments[part], positions[part] = segment, count[:n]
        for out, column in pairs:
            out[part] = column[i]
    return Packed(records.treedef.unflatten(values), segments, positions)


def pad(
    sequences: Sequence[PyTree], lengths: Sequence[int], *, where: Where | None = None
) -> dict[int, Padded]:
    """Pad `sequences` to the least of `lengths` that holds them: `{length: Padded}`.

    For `interleave`: `[batches(x, 4096 // n) for n, x in pad(texts, [64, 128, 256]).items()]` has
    about as many tokens in each batch. Lengths that no sequence needs are left out.

    Each sequence is an array or a list, or a record of several: a dict, or a tuple such as
    `(tokens, label)`. `where` is a pattern for the leaves that are sequences, for example
    `["tokens", "mask"]`: they are padded, and have one length within a record. Other leaves are
    there once for a record. Without `where`, the leaves that differ in length between records are
    sequences. If no length differs, a single leaf with an axis is; if there are several, give
    `where`.

    Rows are in the order of `sequences`, and `indices` are their numbers there, also in shuffled
    batches: `results[batch.indices] = predictions` puts results in the order of the sequences.

    Raises DataError as `pack`, and if `where` is missing but needed; PatternError for a `where`
    without a leaf.

    >>> {n: x.values.tolist() for n, x in pad([[1, 2, 3], [4], [5, 6]], [2, 4]).items()}
    {2: [[4, 0], [5, 6]], 4: [[1, 2, 3, 0]]}
    >>> part = pad([([1, 2, 3], 0), ([4], 1), ([5, 6], 1)], [2, 4])[2]
    >>> [x.tolist() for x in part.values], part.indices.tolist()
    ([[[4, 0], [5, 6]], [1, 1]], [1, 2])
    """
    lengths = sorted(np.ravel(lengths).tolist())
    sequences = list(sequences)
    records = _checked(sequences, lengths[-1] if lengths else 0, "pad()", where)
    if where is None and sum(records.are_sequences) > 1 and len({*records.lengths}) == 1:
        raise DataError(
            "sequences[0]",
            "pad()",
            got=trees.describe(sequences[0]),
            expected="arrays of different lengths",
            fix="Name the leaves that are sequences: where='tokens'.",
        )
    parts: dict[int, list[int]] = {n: [] for n in lengths}
    for i, n in enumerate(records.lengths):
        parts[lengths[bisect.bisect_left(lengths, n)]].append(i)
    return {n: _padded(records, part, n) for n, part in parts.items() if part}


def _padded(records: _Records, part: list[int], length: int) -> Padded:
    values = []
    for is_sequence, column in zip(records.are_sequences, records.columns, strict=True):
        column = [column[i] for i in part]
        if not is_sequence:
            values.append(np.stack(column))
            continue
        values.append(np.zeros((len(part), length, *column[0].shape[1:]), column[0].dtype))
        for row, x in zip(values[-1], column, strict=True):
            row[: len(x)] = x
    mask = np.arange(length) < np.array([records.lengths[i] for i in part])[:, None]
    return Padded(records.treedef.unflatten(values), mask, np.array(part, np.int32))


def _is_array(x: Any) -> bool:
    """Whether it is one leaf of a record: an array, a number, or a list or tuple of numbers."""
    if isinstance(x, np.ndarray | list) or jax.tree_util.all_leaves([x]):
        return True
    is_plain = isinstance(x, tuple) and not hasattr(x, "_fields")
    return is_plain and not any(hasattr(element, "__len__") for element in x)


def _checked(
    sequences: list[PyTree], length: int, call: str, where: Where | None = None
) -> _Records:
    if not sequences:
        raise DataError("sequences", call, "none", "one at least")
    structure = jax.tree.structure(sequences[0], is_leaf=_is_array)
    records = [list(map(np.asarray, structure.flatten_up_to(x))) for x in sequences]
    columns = list(map(list, zip(*records, strict=True)))
    are_sequences = [len({x.shape[:1] for x in column}) > 1 for column in columns]
    if where is not None:
        are_sequences = patterns.select(where, structure.unflatten(records[0]), call)
    elif not any(are_sequences):
        are_sequences = [x.ndim > 0 for x in records[0]]
    if not any(are_sequences):
        expected = "an array with a first axis"
        raise DataError("sequences[0]", call, trees.describe(sequences[0]), expected)
    numbers = [j for j, is_sequence in enumerate(are_sequences) if is_sequence]
    kinds = lambda record: [
        (x.dtype, x.ndim, x.shape[1:] if is_sequence else x.shape)
        for x, is_sequence in zip(record, are_sequences, strict=True)
    ]
    lengths, first_kinds = [], kinds(records[0])
    for i, record in enumerate(records):
        sizes = {record[j].shape[:1] for j in numbers}
        (n,) = max(sizes) or (0,)
        if len(sizes) > 1 or not 0 < n <= length or kinds(record) != first_kinds:
            got = trees.describe(structure.unflatten(record))
            expected = f"arrays as in sequences[0], of one length from 1 to {length}"
            raise DataError(f"sequences[{i}]", call, got, expected)
        lengths.append(n)
    return _Records(columns, structure, are_sequences, lengths)


class Interleaved(Positioned):
    """Data made by `interleave`: batches of several sources in turn, with one position."""

    is_whole: bool = False
    has_few_shapes: ClassVar[bool] = True

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

    Each part has its own shape, and a run compiles each shape once. An epoch has every batch of
    every part. Like `batches`, it is a function of (seed, epoch) and resumes at any batch. Steps
    that `fit` calls at once are of one shape. Raises WrongTypeError for a part that is
    not `ts.batches(...)` without a device, DataError if there are no parts, HyperparameterError for
    a negative seed.

    >>> import tsunax as ts
    >>> short, long = np.zeros((4, 8)), np.zeros((2, 16))
    >>> data = interleave([ts.batches(short, 2), ts.batches(long, 1)], seed=1)
    >>> [batch.shape for batch in data]
    [(1, 16), (2, 8), (1, 16), (2, 8)]
    """
    parts = list(parts.values() if isinstance(parts, Mapping) else parts)
    for i, part in enumerate(parts):
        if not isinstance(part, Batches) or part.resident is not None:
            raise WrongTypeError(
                f"parts[{i}]",
                "interleave()",
                got=trees.describe(part),
                expected="ts.batches(...) of NumPy arrays, without a device",
            )
    if not parts:
        raise DataError("parts", "interleave()", "none", "one at least")
    return Interleaved(parts, checks.check_count(seed, "interleave()", "seed", least=0))
