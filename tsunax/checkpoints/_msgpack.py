"""The files of `flax.serialization.to_bytes`: msgpack with arrays in it. Read here with a list of
dtypes that may be.

It knows bytes and NumPy, and no tree but dicts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tsunax.checkpoints import manifest
from tsunax.checkpoints.manifest import Damaged

__all__ = []

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # flax's numbers of the extension types
_CHUNKED = "__msgpack_chunked_array__"


def read(content: bytes) -> dict[str, Any]:
    """The nested dicts of a file. Raises Damaged for anything else."""
    import msgpack

    try:
        found = msgpack.unpackb(content, ext_hook=_extension, raw=False, strict_map_key=False)
        tree = _whole(found)
    except Damaged:
        raise
    except (
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
        OverflowError,
        msgpack.UnpackException,
    ) as error:
        raise Damaged(f"{type(error).__name__} {str(error)[:80]}") from None
    if not isinstance(tree, dict):
        raise Damaged("no dict of arrays")
    return tree


def _extension(code: int, data: bytes):
    import msgpack

    if code in (_ARRAY, _SCALAR):
        shape, name, content = msgpack.unpackb(data, raw=True)
        dtype = manifest.dtype_of(name.decode("ascii")) if isinstance(name, bytes) else None
        if dtype is None:  # object among them, whose bytes would be taken for pointers
            raise Damaged(f"an array of dtype {name!r:.40}")
        array = np.frombuffer(content, dtype).reshape(_shape(shape)).copy()
        return array[()] if code == _SCALAR else array
    if code == _COMPLEX:
        real, imag = msgpack.unpackb(data)
        return complex(real, imag)
    raise Damaged(f"an extension type {code}")


def _shape(shape) -> tuple[int, ...]:
    if not isinstance(shape, list) or not manifest.is_shape(shape):
        raise Damaged("an array without a shape")
    return tuple(shape)


def _whole(x):
    """Keys as strings, and arrays that were stored in chunks in one piece."""
    if isinstance(x, list):
        return [_whole(y) for y in x]
    if not isinstance(x, dict):
        return x
    if _CHUNKED not in x:
        found = {str(key): _whole(y) for key, y in x.items()}
        if len(found) != len(x):
            raise Damaged("two entries of one name")
        return found
    shape, chunks = ([part[str(i)] for i in range(len(part))] for part in (x["shape"], x["chunks"]))
    flat = np.concatenate(chunks) if chunks else np.zeros(0)
    if flat.ndim != 1 or math.prod(_shape(shape)) != flat.size:
        raise Damaged("chunks that do not make up their array")
    return flat.reshape(shape)
