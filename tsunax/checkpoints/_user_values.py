"""Values of a user as JSON and back: data, history and callbacks, with a list of their arrays."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tsunax._core import trees
from tsunax.checkpoints import leaves
from tsunax.checkpoints.leaves import Damaged
from tsunax.errors import WrongTypeError

DEPTH = 64


def encode(x: Any, keep: Callable[[tuple, np.ndarray], Any], *path) -> Any:
    """A value as JSON; its arrays are given to `keep(path, array)`, which returns their number."""
    inner = lambda y, key: encode(y, keep, *path, key)
    where = lambda: path[0] + "".join(f"[{key!r}]" for key in path[1:])
    if len(path) > DEPTH:
        raise WrongTypeError("value", where(), f"more than {DEPTH} levels", "fewer")
    if x is None or isinstance(x, bool):
        return x
    if isinstance(x, str):
        return str(x)
    if isinstance(x, int) and abs(x) < 1 << 1024:
        return int(x)
    if isinstance(x, float):
        return {"$float": repr(x)} if not math.isfinite(x) else float(x)
    if isinstance(x, Mapping):
        if not all(isinstance(key, str) for key in x):
            raise WrongTypeError("dict", where(), trees.describe(x), "keys that are strings")
        encoded = {key: inner(value, key) for key, value in x.items()}
        return {"$dict": encoded} if any(key.startswith("$") for key in encoded) else encoded
    if isinstance(x, (list, tuple)):
        encoded = [inner(value, i) for i, value in enumerate(x)]
        return encoded if isinstance(x, list) else {"$tuple": encoded}
    if trees.is_key(x):
        data = inner(trees.on_host(x), "key")
        return {"$key": leaves.implementation(trees.dtype_of(x)), "data": data}
    is_readable = getattr(x, "is_fully_addressable", True) or getattr(
        x, "is_fully_replicated", True
    )
    if trees.is_array(x) and is_readable and leaves.can_be_saved(x):
        return {"$array": keep(path, np.array(x, copy=True))}
    expected = "None, numbers, strings, arrays, and lists, tuples and dicts of them"
    raise WrongTypeError("value", where(), trees.describe(x), expected)


def decode(x, arrays: list[np.ndarray], depth: int = 0):
    """The inverse of `encode`; arrays come back as NumPy's."""
    inner = lambda y: decode(y, arrays, depth + 1)
    if depth > 2 * DEPTH:
        raise Damaged(f"manifest: values of more than {2 * DEPTH} levels")
    if isinstance(x, list):
        return [inner(y) for y in x]
    if not isinstance(x, dict):
        return x
    match x:
        case {"$dict": dict(values)} if len(x) == 1:
            return {key: inner(y) for key, y in values.items()}
        case {"$tuple": list(values)} if len(x) == 1:
            return tuple(inner(y) for y in values)
        case {"$float": "nan" | "inf" | "-inf"} if len(x) == 1:
            return float(x["$float"])
        case {"$array": int(i)} if len(x) == 1 and 0 <= i < len(arrays):
            return arrays[i]
        case {"$key": str(name), "data": {"$array": int(i)}} if 0 <= i < len(arrays):
            return leaves.wrap_key(arrays[i], name)
    if any(key.startswith("$") for key in x):
        raise Damaged("manifest: a value that cannot be read")
    return {key: inner(y) for key, y in x.items()}
