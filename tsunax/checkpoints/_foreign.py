"""The gate for files of other programs: their bytes are checked before objects are built.

A text or a msgpack file is scanned once, and refused if Python's objects for it could take more
memory than four times the files and 64 MiB. Kinds of files that are often confused are named in the
error. No array is read here.
"""

import contextlib
import re
from collections.abc import Iterator

from tsunax.checkpoints.leaves import Damaged
from tsunax.errors import TsunaxError, told

# Bytes that a description may take beyond four times its files. SECURITY.md promises 64 MiB in all;
# the remaining 16 MiB are for objects of libraries. A larger number breaks the promise, a smaller
# one refuses small files with many entries.
_ALLOWED_BYTES = 48 << 20

# For each of these characters of JSON, the bytes of memory that CPython's objects take, measured.
_JSON_COSTS = {b",": 44, b":": 40, b"{": 120, b"[": 72, b'"': 28}
_VALUE_COST = 1000  # bytes for each value of a flax file: its object, its name and its description

# By the first byte of a value of msgpack, from 0xc0 to 0xdf: the number of bytes of the length that
# follows, and the number of bytes of the value in addition to that length
_LENGTHS = bytes.fromhex("00000000 010204 010204" + "00" * 15 + "010204 0204 0204")
_FIXED = bytes.fromhex("00000000 000000 010101 0408 01020408 01020408 020305 0911" + "00" * 7)
_MAPS, _LISTS = {*range(0x80, 0x90), 0xDE, 0xDF}, {*range(0x90, 0xA0), 0xDC, 0xDD}
_EXTENSIONS = {*range(0xC7, 0xCA), *range(0xD4, 0xD9)}
_MAX_HEAD = 1000  # bytes of an array's shape and dtype: NumPy reads a name in quadratic time

# The first bytes of the files that are read here.
SAFETENSORS, JSON = rb".{8}\{", rb"\s*[{\[]"
MSGPACK = rb"[\x81-\x8f\xde\xdf][\xa0-\xbf\xd9]"
_KINDS = {
    rb"PK\x03\x04.{26}.*\.npy": "a NumPy .npz file: np.load reads it",
    rb"PK\x03\x04.{26}[^/]*/(data\.pkl|\.format_version|byteorder)|\x80.\x8a\x0al\xfc\x9cF\xf9":
        "a PyTorch file: torch.load(..., weights_only=True) reads it, safetensors.torch writes it",
    rb"PK\x03\x04": "a zip archive: unpack it first",
    rb"\x93NUMPY": "a NumPy .npy file: np.load reads it",
    rb"\x89HDF": "an HDF5 file, as of Keras: h5py reads it",
    SAFETENSORS: "a safetensors file",
    rb"\x80[\x02-\x05]": "a pickle, which could run code: nothing is unpickled here",
    rb"version https://git-lfs": "a pointer of git-lfs, without the file: run `git lfs pull`",
    rb"\s*(<!doctype|<html|<\?xml)": "a web page: the download needs another address or a login",
    rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd": "a compressed file: unpack it first",
    rb".{257}ustar": "a tar archive: unpack it first",
    rb"GGUF": "a GGUF file of llama.cpp",
    JSON: "a JSON text",
    MSGPACK: "a msgpack file, as flax writes: format='flax'",
}  # fmt: skip


def kind_of(head: bytes, expected: bytes = b"") -> str:
    """The kind of a file by its first bytes, and its reader; "" if it is `expected` or unknown.

    `expected` is one of the patterns above, such as `JSON`.

    >>> kind_of(b"version https://git-lfs.github.com/spec/v1")
    'a pointer of git-lfs, without the file: run `git lfs pull`'
    """
    is_of_kind = lambda pattern: re.match(rb"(?is)" + pattern, head[:512])
    pattern = next(filter(is_of_kind, _KINDS), expected)
    return "" if pattern == expected else _KINDS[pattern]


@contextlib.contextmanager
def damage_only() -> Iterator[None]:
    """A context that turns a parser's exceptions for unexpected bytes into Damaged."""
    try:
        yield
    except (TsunaxError, Damaged, OSError):
        raise
    except Exception as error:
        raise Damaged(told(error)) from None


def check_cost(cost: int, size: int) -> None:
    """Raise Damaged if a description of files of `size` bytes would take `cost` bytes of memory."""
    if cost > 4 * size + _ALLOWED_BYTES:
        raise Damaged(f"a description that would take {cost >> 20} MiB, for files of {size} bytes")


def check_json(text: bytes, size: int, spent: int = 0) -> int:
    """The bytes of memory to parse a JSON text, which is Damaged if they are too many.

    `spent` are the bytes for other texts of the same files.
    """
    is_narrow = text.isascii() and b"\\u" not in text  # other texts take four bytes a character
    marks = sum(cost * text.count(mark) for mark, cost in _JSON_COSTS.items())
    cost = marks + len(text) * (2 if is_narrow else 6)
    check_cost(cost + spent, size)
    return cost


def check_msgpack(content: bytes) -> None:
    """Raise Damaged for a flax file if its values would take too much memory or time."""
    for count, (first, start, stop) in enumerate(_values(content, 0, len(content))):
        check_cost(count * _VALUE_COST, len(content))
        if first in _EXTENSIONS:  # an array: shape, dtype and bytes, in msgpack again
            for _, position, _ in _values(content, start + 1, stop):
                if position > start + _MAX_HEAD:
                    raise Damaged(f"a shape and a dtype of more than {_MAX_HEAD} bytes")


def _values(content: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(first byte, start, stop) of each value in msgpack; containers come before their values."""
    pending = 1
    while pending:
        if pending > end - position:
            raise Damaged("values that are cut")
        first = content[position]
        start, pending = position + 1, pending - 1
        size = 0
        if first < 0xC0:  # the size is in the first byte: of a text 5 bits, of a map or list 4 bits
            size = first & 31 if first >= 0xA0 else first & 15
        if 0xC0 <= first < 0xE0:
            start += _LENGTHS[first - 0xC0]
            size = int.from_bytes(content[position + 1 : start], "big") + _FIXED[first - 0xC0]
        is_container = first in _MAPS or first in _LISTS
        if is_container:
            pending += size * 2 if first in _MAPS else size
        position = start if is_container or first < 0x80 else start + size
        yield first, start, position
