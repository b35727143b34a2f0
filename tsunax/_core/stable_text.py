"""Values as text and arrays as bits that are equal in every process and every run.

Texts have no addresses and no order of sets: an object is its type and fields, a function its name,
its code and the values that it closes over.
"""

import contextlib
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

_DEEP = 14  # objects within objects, beyond which nobody looks


def bits_of(array: Any) -> np.ndarray | None:
    """An array on the host (a key as its words); None if other processes hold a part of it."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        if not array.is_fully_replicated:
            return None
        array = array.addressable_data(0)
    return trees.on_host(array)


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def words_of(
    x: Any, depth: int = 0, seen: frozenset = frozenset(), code: bool = True, numbers: bool = True,
    contents: bool = True,
) -> str:  # fmt: skip
    """A value as text.

    Without `code` it is an outline, for files that other versions read: functions by their names
    and closures, arrays and (without `numbers`) numbers as "#", and an object with a method
    `in_words(inner)` as that returns. Without `contents` arrays are their shapes.

    >>> words_of({"rate": 0.1, "sizes": {3, 1}, "f": max}), words_of(np.ones(3, np.float32))
    ("{'rate': 0.1, 'sizes': {1, 3}, 'f': max}", 'float32[3] 8a31a40ecac0')
    """
    if x is None or isinstance(x, (bool, str, bytes)):
        return repr(x)
    if isinstance(x, (int, float, complex)) and not trees.is_array(x):
        return repr(x) if numbers else "#"
    if trees.is_array(x):
        return "#" if not code else _of_array(x) if contents else trees.describe(x)
    if depth > _DEEP or id(x) in seen:
        return "…"
    inner = lambda y: words_of(y, depth + 1, seen | {id(x)}, code, numbers, contents)
    kind = type(x).__name__
    if not code and (in_words := getattr(type(x), "in_words", None)):
        return in_words(x, inner)
    if isinstance(x, type):
        return f"{x.__module__}.{x.__qualname__}" if code else x.__name__
    if isinstance(x, Mapping):
        inside = ", ".join(f"{inner(k)}: {inner(v)}" for k, v in x.items())
        return f"{kind * (kind != 'dict')}{{{inside}}}"
    if isinstance(x, Set):
        return f"{kind * (kind != 'set')}{{{', '.join(sorted(map(inner, x)))}}}"
    if isinstance(x, (list, tuple)):
        inside = ", ".join(map(inner, x))
        left, right = {"list": "[]", "tuple": "()"}.get(kind) or (f"{kind}(", ")")
        return f"{left}{inside}{right}"
    if isinstance(x, functools.partial):
        return f"partial({inner(x.func)}, {inner(x.args)}, {inner(x.keywords)})"
    if isinstance(x, types.MethodType):
        return f"{inner(x.__self__)}.{x.__name__}"
    if isinstance(x, types.FunctionType):
        return _of_function(x, inner, code)
    if callable(x) and hasattr(x, "__qualname__"):
        return x.__qualname__
    fields = [f.name for f in dataclasses.fields(x)] if dataclasses.is_dataclass(x) else []
    if not fields and type(x).__repr__ is object.__repr__:
        fields = list(getattr(x, "__dict__", {}))
    if fields or dataclasses.is_dataclass(x):
        return f"{kind}({', '.join(f'{name}={inner(getattr(x, name, None))}' for name in fields)})"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(x))


def _of_function(f: types.FunctionType, inner: Callable[[Any], str], code: bool) -> str:
    if not code:
        kept = [text for text in map(inner, cells_of(f)) if text not in ("#", "None")]
        return f.__qualname__.split(".<locals>")[0] + (f"({', '.join(kept)})" if kept else "")
    kept = [f.__defaults__, f.__kwdefaults__, *cells_of(f)]
    text = inner([x for x in kept if x is not None])
    return f"{f.__qualname__} {hash_of_code(f.__code__)}" + (f" of {text}" if text != "[]" else "")


def cells_of(f: Any) -> list[Any]:
    """The values that a function closes over."""
    found = []
    for cell in getattr(f, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not filled yet
            found.append(cell.cell_contents)
    return found


def _of_array(x: Any) -> str:
    is_array = np.ndim(x) or isinstance(x, np.ndarray | jax.Array)
    words = trees.describe(x) if is_array else f"{x.dtype}[]"
    words += " weak" * bool(getattr(x, "weak_type", False))
    if (bits := bits_of(x)) is None:
        return words
    if bits.dtype == object:
        return f"{words} {words_of(bits.tolist())}"
    value = hash_of(np.ascontiguousarray(bits).tobytes()) if bits.ndim else bits[()]
    return f"{words} {value}"


def hash_of_code(code: types.CodeType) -> str:
    """The hash of code with the functions inside it, whatever its file and lines."""
    of = lambda x: hash_of_code(x) if isinstance(x, types.CodeType) else words_of(x)
    inside = list(map(of, code.co_consts))
    return hash_of(code.co_code + repr((code.co_names, inside)).encode())


def parts_of(root: str, thing: Any) -> dict[str, str]:
    """The leaves of a tree by path, and its containers and static fields."""
    return dict(_walk_parts(root, thing, ()))


def _walk_parts(root: str, node: Any, path: tuple) -> Iterator[tuple[str, str]]:
    place = trees.access_str(root, path)
    if node is None or jtu.all_leaves([node]):
        yield place, words_of(node)
        return
    children = trees.children_of(node)
    kind, static = jtu.tree_structure(node, is_leaf=lambda x: x is not node).node_data()
    if kind not in (dict, list, tuple) or not children:
        words = "" if static is None else f" {words_of(static)}"
        yield f"{place} itself", f"{kind.__name__}{words}"
    elif kind is not dict:
        yield f"{place} itself", kind.__name__
    for key, child in children:
        yield from _walk_parts(root, child, path + key)
