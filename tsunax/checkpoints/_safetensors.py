"""The safetensors format: a header with the name, dtype, shape and place of each array, and their
bytes. No code in it.

    8 bytes: length of the header | {"a/w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0,
    24]}, ...} | the bytes

Large sets are several files, and an index that says which name is where, as the Hugging Face hub
has them. A header is believed only where it accounts for every byte of its file, so that nothing
larger than the file is ever allocated. Written here rather than with the library of that name: that
one reads no bfloat16 into NumPy, holds all arrays at once, and neither syncs nor renames. It knows
files and NumPy, and no tree.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tsunax._core import durable_files
from tsunax.checkpoints import manifest
from tsunax.checkpoints.manifest import Damaged

__all__ = []

_NAMES = (
    "BOOL bool U8 uint8 I8 int8 U16 uint16 I16 int16 U32 uint32 I32 int32 U64 uint64 I64 int64 F16 float16 "
    "BF16 bfloat16 F32 float32 F64 float64 C64 complex64 F8_E4M3 float8_e4m3fn F8_E5M2 float8_e5m2 "
    "F8_E8M0 float8_e8m0fnu F8_E4M3FNUZ float8_e4m3fnuz F8_E5M2FNUZ float8_e5m2fnuz"
).split()
_DTYPE_OF: dict[str, str] = dict(zip(_NAMES[::2], _NAMES[1::2], strict=True))
CODE_OF = {name: code for code, name in _DTYPE_OF.items()}
HEADER = 100_000_000  # bytes: the limit of the format
INDEX = ".index.json"

Specs = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name


@dataclass(frozen=True)
class Entry:
    """Where an array is: `start` counts from the beginning of its file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return _nbytes(self.dtype, self.shape)


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * np.dtype(manifest.dtype_of(dtype)).itemsize


# ------------------------------------------------------------------------------------------ reading


def contents(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """What is in a file, or in all files of an index, and the text beside it.

    Raises Damaged, OSError.
    """
    if not path.name.endswith(INDEX):
        return _header(path)
    with durable_files.opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > HEADER:
            raise Damaged(f"an index of {size} bytes")
        body = _parsed(file.read(HEADER + 1))
    where, about = body.get("weight_map"), body.get("metadata", {})
    if not isinstance(where, dict) or not isinstance(about, dict):
        raise Damaged("an index without weight_map")
    files = {
        name: _header(path.parent / name)[0]
        for name in dict.fromkeys(map(_plain_name, where.values()))
    }
    for name, file in where.items():
        if name not in files[file]:
            raise Damaged(f"{name!r:.80} is not in {file}")
    return {name: files[file][name] for name, file in where.items()}, _texts(about)


def _texts(about: dict) -> dict[str, str]:
    return {name: text for name, text in about.items() if isinstance(text, str)}


def _plain_name(name) -> str:
    """The name of a file beside the index: nothing that leads elsewhere."""
    bad = not isinstance(name, str) or name in ("", ".", "..") or len(name) > 255
    if bad or any(c in "/\\:" or ord(c) < 32 for c in name) or not name.endswith(".safetensors"):
        raise Damaged(f"an index that names {name!r:.80}")
    return name


def _parsed(content: bytes) -> dict[str, Any]:
    manifest.check_pieces(content)
    try:
        body = json.loads(content, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"header: {type(error).__name__} {str(error)[:80]}") from None
    if not isinstance(body, dict):
        raise Damaged("header: no dict")
    return body


def _once(pairs: list) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name that is there twice")
    return found


def _no_constant(text: str):
    raise ValueError(text)


def _header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    with durable_files.opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little") if size >= 8 else 0
        if not 2 <= length <= min(HEADER, size - 8):
            raise Damaged(f"{path.name}: no safetensors header")
        body = _parsed(file.read(length))
    about = body.pop("__metadata__", None) or {}
    if not isinstance(about, dict) or len(_texts(about)) != len(about):
        raise Damaged("header: __metadata__ that is not text")
    found, end = {}, 8 + length
    spans = []
    for name, x in body.items():
        dtype, shape, (start, stop) = _checked(name, x)
        found[name] = Entry(path, dtype, shape, 8 + length + start)
        spans.append((start, stop, name))
    for start, stop, name in sorted(spans):
        if 8 + length + start != end:
            raise Damaged(f"{name!r:.80}: bytes that overlap or leave a gap")
        end = 8 + length + stop
    if end != size:
        raise Damaged(f"{path.name}: {size} bytes where its header has {end}")
    return found, about


def _checked(name: str, x) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    try:
        code, shape, (start, stop) = x["dtype"], tuple(x["shape"]), x["data_offsets"]
        numbers = [*shape, start, stop]
        if (
            len(x) != 3
            or len(shape) > 64
            or not all(type(n) is int and 0 <= n < 1 << 48 for n in numbers)
        ):
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise Damaged(f"header: {name!r:.80} has no dtype, shape or place") from None
    dtype = _DTYPE_OF.get(code) if isinstance(code, str) else None
    if dtype is None or manifest.dtype_of(dtype) is None:
        raise Damaged(f"{name!r:.80}: dtype {code!r:.20}, which NumPy does not have")
    if stop - start != _nbytes(dtype, shape):
        raise Damaged(
            f"{name!r:.80}: {stop - start} bytes for {dtype}[{','.join(map(str, shape))}]"
        )
    if not manifest.is_shape(shape):  # an empty array, of 2**94 rows
        raise Damaged(f"{name!r:.80}: a shape that NumPy does not have, {list(shape)}")
    return dtype, shape, (start, stop)


def read(entry: Entry) -> np.ndarray:
    """One array, without a second copy of its bytes."""
    out = np.empty(entry.shape, manifest.dtype_of(entry.dtype))
    raw = out.reshape(-1).view(np.uint8)
    with durable_files.opened(entry.file) as file:
        file.seek(entry.start)
        got = file.readinto(memoryview(raw)) if raw.size else 0  # type: ignore[attr-defined]
    if got != raw.size:
        raise Damaged(f"{entry.file.name}: cut while it was read")
    if entry.dtype == "bool" and raw.size and raw.max() > 1:
        raise Damaged(f"{entry.file.name}: a bool that is neither 0 nor 1")
    return out


# ------------------------------------------------------------------------------------------ writing


def save(
    path: Path,
    specs: Specs,
    get: Callable[[str], np.ndarray],
    about: dict[str, str],
    most: int | None,
) -> None:
    """Write the arrays that `get` gives by name; files of at most `most` bytes of them, if that
    takes several.

    Whole or not at all: every file is written aside and synced before the first has its name, and
    an index goes before what it leads to is replaced, and comes last. A link at one of the names is
    replaced, not followed.
    """
    groups = _groups(specs, most)
    index = path.with_name(path.name + INDEX)
    other = index if len(groups) == 1 else path
    if os.path.lexists(other):
        raise FileExistsError(
            f"{other.name} is there, an export of other size; delete it or take another name"
        )
    ready: list[tuple[Path, Path]] = []
    try:
        for i, group in enumerate(groups):
            part = f"{path.stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors"
            final = path if len(groups) == 1 else path.with_name(part)
            ready.append((durable_files.aside(path.parent, "tmp", 0), final))
            write(
                ready[-1][0],
                {name: specs[name] for name in group},
                get,
                about if len(groups) == 1 else _format(about),
            )
        if len(groups) > 1:
            where = {name: ready[i][1].name for i, group in enumerate(groups) for name in group}
            body = {
                "metadata": {"total_size": sum(_nbytes(*x) for x in specs.values()), **about},
                "weight_map": where,
            }
            ready.append((durable_files.aside(path.parent, "tmp", 0), index))
            durable_files.write(ready[-1][0], json.dumps(body, indent=1).encode())
            with contextlib.suppress(FileNotFoundError):
                os.unlink(index)
            durable_files.sync(path.parent)
        for temporary, final in ready:
            os.replace(temporary, final)
        durable_files.sync(path.parent)
    finally:
        for temporary, _ in ready:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _format(about: dict[str, str]) -> dict[str, str]:
    return {"format": about["format"]}


def _groups(specs: Specs, most: int | None) -> list[list[str]]:
    """Names in order, cut where the bytes of a group would be more than `most`; a larger array is
    alone.
    """
    groups: list[list[str]] = [[]]
    used = 0
    for name, spec in specs.items():
        size = _nbytes(*spec)
        if most is not None and groups[-1] and used + size > most:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def write(
    path: Path, specs: Specs, get: Callable[[str], np.ndarray], about: dict[str, str]
) -> None:
    """A new file, on the disk when this returns."""
    body: dict[str, Any] = {"__metadata__": about}
    at = 0
    order = sorted(
        specs, key=lambda name: -np.dtype(manifest.dtype_of(specs[name][0])).itemsize
    )  # so all are aligned
    for name in order:
        dtype, shape = specs[name]
        body[name] = {
            "dtype": CODE_OF[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + _nbytes(dtype, shape)],
        }
        at = body[name]["data_offsets"][1]
    header = json.dumps(body, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > HEADER:
        raise ValueError(f"a header of {len(header)} bytes, more than the format's {HEADER}")
    with open(path, "xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in order:
            array = np.ascontiguousarray(get(name)).reshape(-1)
            file.write(array.view(np.uint8).data if array.size else b"")
        file.flush()
        os.fsync(file.fileno())
