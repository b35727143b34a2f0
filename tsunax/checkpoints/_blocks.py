"""Blocks in files: named, written, hashed, and the parts of leaves that are read from them.

A *block* is an array in a file, under a name: a leaf, or the part of a process of a leaf that is
spread over several. The name of a part ends in its bounds: "params/w[0:128,0:64]".
"""

import collections
import concurrent.futures.thread  # now: at the end of the interpreter it could not be loaded
import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tsunax._core import Function, durable_files
from tsunax.checkpoints import _safetensors, checksums, leaves
from tsunax.checkpoints.checksums import Bounds
from tsunax.checkpoints.leaves import Damaged, Leaf
from tsunax.errors import told

Blocks = dict[str, np.ndarray]
Saved = Mapping[str, Leaf]
Needed = list[tuple[Bounds, ...] | None]  # bounds in each leaf; None for the whole leaf
ReadResult = tuple[list[Any], dict[str, int]]  # arrays; by leaf, the sum of the hashes of parts
# A function of a leaf. Its result reads the part of the leaf within bounds.
OpenLeaf = Callable[[Leaf], Callable[[Bounds], np.ndarray]]


def block_name(name: str, bounds: Bounds, shape: tuple[int, ...]) -> str:
    if bounds == whole(shape):
        return name
    return f"{name}[{','.join(f'{a}:{b}' for a, b in bounds)}]"


def whole(shape) -> Bounds:
    return tuple((0, n) for n in shape)


def bounds_of(index, shape) -> Bounds:
    """(start, stop) of each axis for an index into an array of this shape."""
    return tuple(cut.indices(n)[:2] for cut, n in zip(index, shape, strict=True))


def is_local(x) -> bool:
    """Whether each process has the whole leaf: it is no array over several processes."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def holders_of(sharding, shape) -> dict[Bounds, list[int]]:
    processes_of: dict[Bounds, set[int]] = {}
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        processes_of.setdefault(bounds_of(index, shape), set()).add(device.process_index)
    return {bounds: sorted(processes) for bounds, processes in processes_of.items()}


def parse_name(block: str) -> tuple[str, Bounds | None]:
    """The leaf of a block, and its bounds unless it is all of the leaf: see `block_name`."""
    name, _, cut = block.partition("[")
    if not cut:
        return name, None
    if not re.fullmatch(r"(\d{1,15}:\d{1,15},)*\d{1,15}:\d{1,15}\]", cut):
        raise Damaged(f"arrays: {block!r:.80} is no name of a block")
    pairs = (axis.split(":") for axis in cut[:-1].split(","))
    return name, tuple((int(a), int(b)) for a, b in pairs)


def plain_arrays(blocks: Blocks) -> Blocks:
    """The blocks as a file has them: dtypes that the format lacks are bytes."""
    bytes_of = lambda x: np.ascontiguousarray(x).reshape(*x.shape, 1).view(np.uint8)
    plain = lambda x: x if x.dtype.name in _safetensors.DTYPES else bytes_of(x)
    return {name: plain(x) for name, x in blocks.items()}


def write_arrays(file: Path, blocks: Blocks) -> None:
    """Blocks by name, on the disk when this returns."""
    _safetensors.write(file, plain_arrays(blocks), {})


def hashes_of(
    saved: Saved, blocks: Iterable[str], get: Callable[[str], np.ndarray], threads: int = 0
) -> Callable[[], dict[str, int]]:
    """Start hashing blocks in threads. The result waits for {block: its part of a leaf's hash}."""

    def hash_of_block(block: str) -> int:
        name, bounds = parse_name(block)
        return checksums.block_hash(get(block), bounds, saved[name].shape)

    names = list(blocks)
    pool = concurrent.futures.ThreadPoolExecutor(threads or min(4, os.cpu_count() or 1))
    try:
        jobs = {name: pool.submit(hash_of_block, name) for name in names}
    except RuntimeError:  # Python 3.12 allows no new thread at its end
        return lambda: {name: hash_of_block(name) for name in names}
    finally:
        pool.shutdown(wait=False)
    return lambda: {name: job.result() for name, job in jobs.items()}


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The parts of an array that a process needs: `pieces[index]`."""

    shape: tuple[int, ...]
    dtype: Any
    parts: Mapping[Bounds, np.ndarray]

    def __getitem__(self, index) -> np.ndarray:
        return self.parts[bounds_of(index, self.shape)]

    def astype(self, dtype, copy: bool = True) -> "Pieces":
        cast = {bounds: leaves.in_dtype(x, dtype, "restore()") for bounds, x in self.parts.items()}
        return Pieces(self.shape, dtype, cast)


@contextlib.contextmanager
def damage_of_arrays() -> Iterator[None]:
    """A context for reading arrays, in which failures of files and contents become Damaged."""
    try:
        yield
    except ConnectionError:  # a bucket does not answer: the bytes may be good
        raise
    except (OSError, ValueError) as error:
        raise Damaged(f"arrays: {told(error)}") from None


def stored_in(files: Iterable[Path]) -> dict[str, list[tuple[Bounds | None, _safetensors.Entry]]]:
    """The blocks of each leaf, over the files of all processes."""
    blocks_of_leaf: dict[str, list] = {}
    # The bytes that entries take in memory, 1,000 each, beyond four times their files. `_foreign`
    # limits their sum over all files.
    spent = 0
    for file in files:
        if not durable_files.is_real_directory(file.parent):
            raise Damaged(f"{file.parent.name}: missing")
        if file.is_symlink():
            raise Damaged(f"arrays: {file.name} is a link")
        if file.exists():
            entries = _safetensors.contents(file, spent)
            spent += max(0, 1000 * len(entries) - 4 * file.stat().st_size)
            for block, entry in entries.items():
                name, bounds = parse_name(block)
                blocks_of_leaf.setdefault(name, []).append((bounds, entry))
    return blocks_of_leaf


def read_leaf(leaf: Leaf, parts, open_leaf: OpenLeaf) -> tuple[Any, int | None]:
    """A whole leaf, verified, and None; or the `Pieces` of parts, and the sum of their hashes."""
    if not leaf.dtype:
        return leaves.plain_value(leaf), None
    read = open_leaf(leaf)
    if parts is None:
        array = read(whole(leaf.shape))
        if checksums.block_hash(array) != leaf.hash:
            raise Damaged(other_bytes(leaf))
        return array, None
    pieces = {bounds: read(bounds) for bounds in parts}
    total = sum(checksums.block_hash(x, bounds, leaf.shape) for bounds, x in pieces.items())
    return Pieces(leaf.shape, leaves.dtype_of(leaf.dtype), pieces), total % checksums.MODULUS


def part_of(leaf: Leaf, stored: list, bounds: Bounds) -> np.ndarray:
    """The part of a leaf within `bounds`, from the blocks of `stored_in`."""
    size = lambda cut: math.prod(b - a for a, b in cut)
    overlaps = []
    for cut, entry in stored:
        block_bounds = whole(leaf.shape) if cut is None else cut
        if len(block_bounds) != len(leaf.shape) or not _matches(
            entry, leaf, tuple(b - a for a, b in block_bounds)
        ):
            raise Damaged(f"arrays: {leaf.name!r:.80} is not as the manifest says")
        overlap = tuple(
            (max(block_start, start), min(block_stop, stop))
            for (block_start, block_stop), (start, stop) in zip(block_bounds, bounds, strict=True)
        )
        if all(start < stop for start, stop in overlap):
            overlaps.append((overlap, entry, _relative(overlap, block_bounds)))
    if sum(size(overlap) for overlap, *_ in overlaps) != size(bounds):
        raise Damaged(f"{_title(leaf)}: not all of it is there")
    if len(overlaps) == 1:
        _, entry, bounds_in_block = overlaps[0]
        return _read_entry(leaf, entry, bounds_in_block)
    out = np.zeros([b - a for a, b in bounds], leaves.dtype_of(leaf.dtype))
    for overlap, entry, bounds_in_block in overlaps:
        cut = tuple(slice(a, b) for a, b in _relative(overlap, bounds))
        out[cut] = _read_entry(leaf, entry, bounds_in_block)
    return out


def _relative(part: Bounds, outer: Bounds) -> Bounds:
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(part, outer, strict=True))


def _matches(entry: _safetensors.Entry, leaf: Leaf, shape: tuple[int, ...]) -> bool:
    """Whether a block has the dtype of its leaf and this shape, as `write_arrays` stores them."""
    if leaf.dtype in _safetensors.DTYPES:
        return (entry.dtype, entry.shape) == (leaf.dtype, shape)
    return (entry.dtype, entry.shape) == ("uint8", (*shape, np.dtype(leaf.dtype).itemsize))


def _read_entry(leaf: Leaf, entry: _safetensors.Entry, bounds: Bounds) -> np.ndarray:
    """The part of a block within `bounds`."""
    if entry.dtype == leaf.dtype:
        return _safetensors.read(entry, bounds)
    dtype = np.dtype(leaf.dtype)
    raw = _safetensors.read(entry, (*bounds, (0, dtype.itemsize)))
    return raw.view(dtype).reshape(raw.shape[:-1])


def leaf_sums(hashes: Mapping[str, int]) -> dict[str, int]:
    """The sum of the hashes of blocks, by leaf."""
    sums = collections.Counter()
    for block, value in hashes.items():
        sums[parse_name(block)[0]] += value
    return {leaf: value % checksums.MODULUS for leaf, value in sums.items()}


def check_same(
    saved: Saved, hashes: Mapping[str, int], open_leaf: OpenLeaf, threads: int = 0
) -> None:
    """Raise Damaged for a block that reads back as other bytes than were written."""

    def read(block: str) -> np.ndarray:
        name, bounds = parse_name(block)
        return open_leaf(saved[name])(bounds or whole(saved[name].shape))

    hashes_read_back = hashes_of(saved, hashes, read, threads)()
    for block, value in hashes.items():
        if hashes_read_back[block] != value:
            raise Damaged(other_bytes(saved[parse_name(block)[0]]))


def read_all(
    open_leaf: OpenLeaf, requested: list[Leaf], needed: Needed, place: Function, threads: int
) -> ReadResult:
    """The results of `read_leaf`, in the form of `CheckpointHome.read`."""

    def read_and_place(i: int) -> Any:
        with damage_of_arrays():
            value, part_of_hash = read_leaf(requested[i], needed[i], open_leaf)
        return place(i, value), part_of_hash

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        answers = list(pool.map(read_and_place, range(len(requested))))
    hash_sums = {leaf.name: x for leaf, (_, x) in zip(requested, answers, strict=True)}
    return [x for x, _ in answers], {name: x for name, x in hash_sums.items() if x is not None}


def other_bytes(leaf: Leaf) -> str:
    return f"{_title(leaf)}: other bytes than were saved (hash)"


def _title(leaf: Leaf) -> str:
    return "history, data or callbacks" if leaf.is_user_value else leaves.show("state", leaf.path)
