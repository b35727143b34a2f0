"""Files of the safetensors library, and parts of the arrays in them.

The library checks on opening that a header accounts for every byte of its file. The bytes are
written and read here: the library has no NumPy array of float8, a bucket takes a file in pieces, a
file that is cut while it is mapped ends the process, and a shard is rarely needed whole.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tsunax._core import durable_files, trees
from tsunax.checkpoints import _foreign, checksums, leaves
from tsunax.checkpoints.leaves import Damaged
from tsunax.errors import told

_CODES_AND_NAMES = (
    "BOOL bool U8 uint8 I8 int8 U16 uint16 I16 int16 U32 uint32 I32 int32 U64 uint64 I64 int64 "
    "F16 float16 BF16 bfloat16 F32 float32 F64 float64 C64 complex64 F8_E4M3 float8_e4m3fn "
    "F8_E5M2 float8_e5m2 F8_E8M0 float8_e8m0fnu F8_E4M3FNUZ float8_e4m3fnuz "
    "F8_E5M2FNUZ float8_e5m2fnuz"
).split()
DTYPE_OF = dict(zip(_CODES_AND_NAMES[::2], _CODES_AND_NAMES[1::2], strict=True))
DTYPES = frozenset(_CODES_AND_NAMES[1::2])  # `Checkpoints` stores other dtypes as bytes
MAX_HEADER = 100_000_000  # bytes: the limit that the format sets
INDEX = ".index.json"
_BYTES_AT_ONCE = 16 << 20  # bytes per read: more costs memory, less costs time


def _fill(path: Path, start: int, target: memoryview) -> int:
    """Read the bytes from `start` on into `target`; returns how many there are."""
    with durable_files.opened(path) as file:
        file.seek(start)
        return file.readinto(target)


@dataclass(frozen=True, slots=True)
class Entry:
    """An array in a file; `start` counts from the beginning of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    fill: Callable[[Path, int, memoryview], int] = (
        _fill  # objects in a bucket have another function
    )


def contents(path: Path, spent: int = 0) -> dict[str, Entry]:
    """The arrays in a file, or in all files of a Hugging Face index; Damaged, OSError.

    `spent` is the memory that other files take beyond four times their bytes.
    """
    if not path.name.endswith(INDEX):
        return _header(path, spent)
    content = durable_files.read(path, MAX_HEADER, follow=True)
    if kind := _foreign.kind_of(content, _foreign.JSON):
        raise Damaged(kind)
    spent = max(0, _foreign.check_json(content, len(content)) - 4 * len(content))
    try:
        files_of_names = json.loads(content)["weight_map"].items()
        names_of_files: dict[str, list[str]] = {}
        for name, file in files_of_names:
            names_of_files.setdefault(_plain_name(file), []).append(name)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise Damaged(f"an index without weight_map: {told(error)}") from None
    entries_of_names = {}
    for file, names in names_of_files.items():
        durable_files.check_inside(path.parent / file, path.parent)
        entries = _header(path.parent / file, spent)
        if missing := [name for name in names if name not in entries]:
            raise Damaged(f"{missing[0]!r:.80} is not in {file}")
        entries_of_names |= {name: entries[name] for name in names}
    return {name: entries_of_names[name] for name, _ in files_of_names}


def _plain_name(name) -> str:
    is_short_text = isinstance(name, str) and len(name) <= 255 and name.isprintable()
    if not is_short_text or not re.fullmatch(r"[^/\\:]*\.safetensors", name):
        raise Damaged(f"an index that names {trees.describe(name)}")
    return name


def _header(path: Path, spent: int) -> dict[str, Entry]:
    import safetensors

    with durable_files.opened(path) as opened:  # raises for a pipe, which would block the library
        size, first_bytes = os.fstat(opened.fileno()).st_size, opened.read(512)
        start = 8 + int.from_bytes(first_bytes[:8], "little")
        opened.seek(8)
        text = opened.read(start - 8) if start <= min(size, 8 + MAX_HEADER) else b""
    entries = {}
    try:
        _foreign.check_json(text, size, spent)
        del text
        with safetensors.safe_open(path, "numpy") as file:
            for name in file.offset_keys():
                x = file.get_slice(name)
                code, shape = x.get_dtype(), tuple(x.get_shape())
                dtype = DTYPE_OF.get(code)
                if dtype is None:
                    raise Damaged(f"{name!r:.80}: dtype {code!r:.20}, which NumPy does not have")
                if not leaves.is_shape(shape):  # an empty array may have 2**94 rows
                    raise Damaged(f"{name!r:.80}: a shape that NumPy does not have, {shape}"[:200])
                entries[name] = Entry(path, dtype, shape, start)
                start += math.prod(shape) * np.dtype(dtype).itemsize
            return entries
    except (safetensors.SafetensorError, Damaged) as error:
        text = str(error).removeprefix("Error while deserializing header: ")
        kind = _foreign.kind_of(first_bytes, _foreign.SAFETENSORS)
        raise Damaged(f"{path.name}: {kind or text[:120]}") from None


def read(entry: Entry, bounds: checksums.Bounds | None = None) -> np.ndarray:
    """An array, or its part within (start, stop) of each axis. Rows of the part are read whole."""
    dtype = np.dtype(entry.dtype)
    if not entry.shape:
        return read(dataclasses.replace(entry, shape=(1,))).reshape(())
    bounds = bounds or tuple((0, n) for n in entry.shape)
    (first_row, last_row), *inner_bounds = bounds
    out = np.empty([stop - start for start, stop in bounds], dtype)
    if not out.size:
        return out
    inner_slices = tuple(slice(*bound) for bound in inner_bounds)
    row_size = math.prod(entry.shape[1:])
    rows_at_once = max(1, _BYTES_AT_ONCE // (row_size * dtype.itemsize))
    start = entry.start + first_row * row_size * dtype.itemsize
    for row_index in range(0, last_row - first_row, rows_at_once):
        target = out[row_index : row_index + rows_at_once]
        is_whole = target.shape[1:] == entry.shape[1:]
        rows = target if is_whole else np.empty((len(target), *entry.shape[1:]), dtype)
        raw = rows.reshape(-1).view(np.uint8)
        if entry.fill(entry.file, start, memoryview(raw)) != raw.size:  # type: ignore[arg-type]
            raise Damaged(f"{entry.file.name}: cut while it was read")
        start += raw.size
        if entry.dtype == "bool" and raw.max() > 1:
            raise Damaged(f"{entry.file.name}: a bool that is neither 0 nor 1")
        if not is_whole:
            target[...] = rows[(slice(None), *inner_slices)]
    return out


def size_and_pieces(
    arrays: Mapping[str, np.ndarray], about: Mapping[str, str]
) -> tuple[int, Iterator[Any]]:
    """The bytes of a file with these arrays: their number, then pieces without a copy of all."""
    # The largest items come first, so that every array is aligned.
    names = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    code_of = {name: code for code, name in DTYPE_OF.items()}
    header: dict[str, Any] = {"__metadata__": about} if about else {}
    end = 0
    for name in names:
        x, start = arrays[name], end
        end += x.nbytes
        header[name] = {
            "dtype": code_of[x.dtype.name], "shape": x.shape, "data_offsets": [start, end]
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for name in names:
            content = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
            for start in range(0, content.size, _BYTES_AT_ONCE):
                yield memoryview(content[start : start + _BYTES_AT_ONCE])  # type: ignore[arg-type]

    return 8 + len(text) + end, pieces()


def write(path: Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    """A new file, on the disk when this returns; `about` is its text for other programs."""
    with open(path, "xb") as file:
        _, pieces = size_and_pieces(arrays, about)
        file.writelines(pieces)
    durable_files.sync(path)
    try:
        contents(path)
    except Damaged as error:
        raise OSError(f"not all of it was written: {error}") from None
