"""The description of a saved tree: each leaf by its path and name, with shape, dtype and hash. No
file is opened.

A *path* distinguishes a list's 0 from a dict's: (".params", "['encoder']", "[0]"); paths are
compared. A *name* is used in files: "params/encoder/0".
"""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tsunax._core import PyTree, trees
from tsunax.errors import CheckpointError, WrongTypeError
from tsunax.state import Clocked, TrainState

Keys = tuple[str, ...]

_DTYPES = re.compile(
    r"bool|u?int(1|2|4|8|16|32|64)|float(16|32|64)|complex(64|128)|bfloat16|float[4-8]_\w{1,16}",
    re.ASCII,
)
# in a key: characters with a meaning in names
_ESCAPED = re.compile(r"[^ -~]|[%/\[\]]|^@|^(?=__metadata__$)")


class Damaged(Exception):
    """A checkpoint that must not be used; the text says why."""


class TooNew(Exception):
    """A manifest of a format that this version does not know."""


@dataclass(frozen=True)
class Leaf:
    """One leaf of a saved tree: an array, or a plain Python value."""

    path: Keys
    kind: str  # "array", "key:<implementation>", or the type of a plain value
    shape: tuple[int, ...] = ()
    dtype: str = ""  # NumPy's name of an array's dtype
    value: PyTree = None
    name: str = ""  # in files
    hash: int = 0  # hash of the whole array, see `checksums`

    @property
    def is_user_value(self) -> bool:
        """Whether it is an array of data, history or callbacks; names of a state escape the "@"."""
        return self.name.startswith("@")

    @property
    def n_bytes(self) -> int:
        """The bytes of the array; 0 for a plain value."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize if self.dtype else 0

    def __str__(self) -> str:
        if self.dtype:
            kind = self.kind if generator_of(self.kind) else self.dtype
            return f"{kind}[{','.join(map(str, self.shape))}]"
        return f"{self.kind} {self.value!r:.40}" if self.value is not None else self.kind


def generator_of(kind: str) -> str:
    """The name of the generator of a leaf's kind "key:<name>"; "" for arrays and plain values."""
    return kind.partition("key:")[2]


def dtype_of(name: str) -> np.dtype | None:
    """The dtype with this name, if arrays of it can be saved: no objects, strings, dates."""
    try:
        return np.dtype(name) if _DTYPES.fullmatch(name) else None
    except TypeError:  # this version of ml_dtypes does not have the dtype
        return None


def is_shape(shape: Sequence[Any]) -> bool:
    """Whether NumPy can have an array of this shape, without its axes of length 0."""
    are_sizes = all(type(n) is int and 0 <= n < 1 << 48 for n in shape)
    return are_sizes and len(shape) <= 64 and math.prod(n for n in shape if n) < 1 << 48


def leaf_of(path: Keys, x: PyTree, name: str = "") -> Leaf:
    """The description of a leaf to save or restore; WrongTypeError for other types."""
    if trees.is_key(x):
        kind = f"key:{implementation(x.dtype)}"
        return Leaf(path, kind, key_shape(x.shape, x.dtype), "uint32", name=name)
    if trees.is_array(x) or isinstance(x, jax.ShapeDtypeStruct):
        if can_be_saved(x):
            return Leaf(path, "array", tuple(x.shape), np.dtype(x.dtype).name, name=name)
    elif isinstance(x, (bool, int, float, complex, str)) and type(x).__module__ == "builtins":
        value = [x.real, x.imag] if isinstance(x, complex) else x
        return Leaf(path, type(x).__name__, value=finite(value), name=name)
    raise WrongTypeError(
        "leaf",
        show("state", path),
        got=trees.describe(x),
        expected="an array, a number or a string",
    )


def can_be_saved(x: PyTree) -> bool:
    return dtype_of(np.dtype(x.dtype).name) == x.dtype and not isinstance(x, np.ma.MaskedArray)


def plain_value(leaf: Leaf) -> PyTree:
    value = unfinite(leaf.value)
    return complex(*map(unfinite, value)) if leaf.kind == "complex" else value


def finite(x: PyTree) -> PyTree:
    """JSON has no NaN: floats that are not finite become strings in a list."""
    if isinstance(x, list):
        return [finite(v) for v in x]
    return [repr(x)] if isinstance(x, float) and not math.isfinite(x) else x


def unfinite(x: PyTree) -> PyTree:
    is_encoded = isinstance(x, list) and len(x) == 1 and x[0] in ("nan", "inf", "-inf")
    return float(x[0]) if is_encoded else x


def implementation(dtype: Any) -> str:
    """The name of the generator of a key dtype: "fry"."""
    return re.sub(r"[^\w]", "", str(dtype).removeprefix("key"))[:40]


@functools.cache  # each call of `eval_shape` would keep a kilobyte forever
def key_shape(shape: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype)).shape


@functools.cache
def _generators() -> dict[str, str]:
    key_of = lambda names: jax.eval_shape(lambda: jax.random.key(0, impl=names))
    names = ("threefry2x32", "rbg", "unsafe_rbg")
    return {implementation(key_of(name).dtype): name for name in names}


def wrap_key(data: PyTree, name: str) -> jax.Array:
    if name not in _generators():
        raise Damaged(f"a key of the generator {name!r}, which is not known here")
    return jax.random.wrap_key_data(data, impl=_generators()[name])


@dataclass(frozen=True)
class Tree:
    """A flattened tree: its leaves and their names, in flatten order, and its training states."""

    leaves: list[tuple[Keys, Any]]
    states: dict[Keys, TrainState]
    names: list[str]
    clocks: list[Any]  # clocks of `states`; the clock of a run precedes its members'


def tree_of(tree: PyTree) -> Tree:
    out, names, n_of_name = Tree([], {}, [], []), [], {}
    _walk(tree, (), (), out, names)
    for name in names:  # keys of a custom node may differ in their type alone
        n = n_of_name.get(name, 0) + 1
        n_of_name[name] = n
        out.names.append(joined(name) + (f"%~{n}" if n > 1 else ""))
    return out


def _walk(x, path: Keys, name: Keys, out: Tree, names: list[Keys]) -> None:
    children = trees.children_of(x)
    if not children and x is not None and jax.tree_util.all_leaves([x]):
        out.leaves.append((path, x))
        names.append(name)
        return
    is_box = trees._is_box(x)  # versions of flax differ in whether they wrap values
    if isinstance(x, Clocked):
        out.clocks.append(x.clock)
    if isinstance(x, TrainState):
        out.states[path] = x
    for key, child in children:
        is_value_of_box = is_box and trees.key_name(key[0]) == "value"
        child_path, child_name = path, name
        if not is_value_of_box:
            child_path = path + tuple(map(_entry, key))
            child_name = name + tuple(map(trees.key_name, key))
        _walk(child, child_path, child_name, out, names)


def _entry(entry) -> str:
    """A key entry as a string that differs for index 0 of a list and key 0 of a dict."""
    if isinstance(entry, jax.tree_util.DictKey) and not isinstance(entry.key, str):
        return f"{{{entry.key!r}}}"
    return str(entry)


def joined(keys: tuple[str, ...]) -> str:
    """Keys as a single name, percent-encoded as in a URL.

    >>> joined(("encoder", "0", "kernel")), joined(("a/b", "", "[0]"))
    ('encoder/0/kernel', 'a%2fb/%/%5b0%5d')
    """
    escape = lambda match: f"%{ord(match[0]):02x}" if match[0] else "%"
    return "/".join(_ESCAPED.sub(escape, key) or "%" for key in keys)


def show(root: str, path: Keys) -> str:
    return root + "".join(path)


def in_dtype(value: Any, dtype: Any, where: str) -> Any:
    """`value.astype(dtype)`. Raises CheckpointError for numbers that it cannot hold."""
    with np.errstate(over="ignore", invalid="ignore"):
        converted = value.astype(dtype, copy=False)
    if not isinstance(value, np.ndarray) or converted is value:
        return converted
    if trees.is_inexact(converted):
        cannot_hold = np.isfinite(value) & ~np.isfinite(converted)
    else:  # an integer that wraps around to the other sign comes back as it was
        cannot_hold = (converted.astype(value.dtype) != value) | ((converted < 0) != (value < 0))
    if n_lost := np.count_nonzero(cannot_hold):
        raise CheckpointError(
            "array",
            where,
            got=f"{n_lost} of {value.size} numbers that {converted.dtype} cannot hold",
            expected="a dtype that has room for them",
        )
    return converted
