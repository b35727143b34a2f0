"""Values as text and arrays as bits that are equal in every process and every run.

No addresses, no order of sets: an object is its type and its fields, a function its name, its code,
and what it keeps.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import types
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from tsunax._core import trees

_DEEP = 12  # objects within objects, beyond which nobody looks


def bits_of(array: Any) -> np.ndarray | None:
    """An array on the host (a key as its words); None if other processes hold a part of it."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        if not array.is_fully_replicated:
            return None
        array = array.addressable_data(0)
    return trees.on_host(array)


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def words_of(x: Any, depth: int = 0, seen: frozenset = frozenset()) -> str:
    """What a value is, in full.

    >>> words_of({"rate": 0.1, "sizes": {3, 1}, "f": max})
    "{'rate': 0.1, 'sizes': {1, 3}, 'f': max}"
    >>> words_of(np.ones(3, np.float32))
    'float32[3] 8a31a40ecac0'
    """
    if x is None or isinstance(x, (bool, int, float, complex, str, bytes)):
        return repr(x)
    if trees.is_array(x):
        return _of_array(x)
    if depth > _DEEP or id(x) in seen:
        return "…"
    inner = lambda y: words_of(y, depth + 1, seen | {id(x)})
    kind = type(x).__name__
    if isinstance(x, type):
        return f"{x.__module__}.{x.__qualname__}"
    if isinstance(x, Mapping):
        return f"{kind * (kind != 'dict')}{{{', '.join(f'{inner(k)}: {inner(v)}' for k, v in x.items())}}}"
    if isinstance(x, Set):
        return f"{kind * (kind != 'set')}{{{', '.join(sorted(map(inner, x)))}}}"
    if isinstance(x, (list, tuple)):
        inside = ", ".join(map(inner, x))
        return (
            f"[{inside}]"
            if kind == "list"
            else f"({inside})"
            if kind == "tuple"
            else f"{kind}({inside})"
        )
    if isinstance(x, functools.partial):
        return f"partial({inner(x.func)}, {inner(x.args)}, {inner(x.keywords)})"
    if isinstance(x, types.MethodType):
        return f"{inner(x.__self__)}.{x.__name__}"
    if isinstance(x, types.FunctionType):
        return _of_function(x, inner)
    if callable(x) and hasattr(x, "__qualname__"):
        return x.__qualname__
    if dataclasses.is_dataclass(x):
        return f"{kind}({', '.join(f'{f.name}={inner(getattr(x, f.name, None))}' for f in dataclasses.fields(x))})"
    if type(x).__repr__ is object.__repr__ and (fields := getattr(x, "__dict__", None)):
        return f"{kind}({', '.join(f'{name}={inner(y)}' for name, y in fields.items())})"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(x))


def _of_array(x: Any) -> str:
    words = (
        trees.describe(x) if np.ndim(x) or isinstance(x, np.ndarray | jax.Array) else f"{x.dtype}[]"
    )
    words += " weak" * bool(getattr(x, "weak_type", False))
    if (bits := bits_of(x)) is None:
        return words
    if bits.dtype == object:
        return f"{words} {words_of(bits.tolist())}"
    return (
        f"{words} {bits[()]}"
        if bits.ndim == 0
        else f"{words} {hash_of(np.ascontiguousarray(bits).tobytes())}"
    )


def _of_function(f: types.FunctionType, inner: Callable[[Any], str]) -> str:
    kept = [f.__defaults__, f.__kwdefaults__]
    for cell in f.__closure__ or ():
        try:
            kept.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    text = inner([x for x in kept if x is not None])
    return f"{f.__qualname__} {_hash_of_code(f.__code__)}" + (f" of {text}" if text != "[]" else "")


def _hash_of_code(code: types.CodeType) -> str:
    """Of what it does: the functions inside it too, and not the lines or files where it stands."""
    inside = [
        _hash_of_code(x) if isinstance(x, types.CodeType) else words_of(x) for x in code.co_consts
    ]
    return hash_of(code.co_code + repr((code.co_names, inside)).encode())


def name_and_code(f: Callable) -> tuple[str, str]:
    """A function's name, and a hash of its code; what it closes over may change.

    ("Net", "") for an object's class.
    """
    while isinstance(f, functools.partial):
        f = f.func
    if isinstance(f, types.FunctionType | types.MethodType):
        return f.__qualname__, _hash_of_code(f.__code__)
    call = vars(type(f)).get("__call__")
    return type(f).__qualname__, _hash_of_code(call.__code__) if isinstance(
        call, types.FunctionType
    ) else ""


def parts_of(root: str, thing: Any) -> dict[str, str]:
    """The leaves of a tree by path, and its containers and static fields."""
    return dict(_walk(root, thing, ()))


def _walk(root: str, node: Any, path: tuple) -> Iterator[tuple[str, str]]:
    place = trees.access_str(root, path)
    if node is None or jtu.all_leaves([node]):
        yield place, words_of(node)
        return
    children = trees._children(node)
    kind, static = jtu.tree_structure(node, is_leaf=lambda x: x is not node).node_data()
    if kind not in (dict, list, tuple) or not children:
        yield (
            f"{place} itself",
            f"{kind.__name__}" + (f" {words_of(static)}" if static is not None else ""),
        )
    elif kind is not dict:
        yield f"{place} itself", kind.__name__
    for key, child in children:
        yield from _walk(root, child, path + key)


__all__ = ["bits_of", "hash_of", "name_and_code", "parts_of", "words_of"]
