"""Transforms between the arrays in a file and the leaves of a tree: axes by name, dtypes, stacks.

`planned` finds the arrays of every leaf and their transform, before an array is read.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from tsunax._core import checks, patterns, trees
from tsunax.checkpoints import _matching, leaves
from tsunax.checkpoints.checksums import Bounds
from tsunax.checkpoints.leaves import Leaf, show
from tsunax.errors import HyperparameterError, WrongTypeError

Axes = tuple[tuple[str, ...], ...]  # the names of which each axis is made; the last varies fastest
_TOKENS = re.compile(r"\(([\w\s]*)\)|(\.\.\.|\w+)|(\S)")


@dataclass(frozen=True)
class Transform:
    """How an array in a file becomes a leaf, and back; made by `rearrange("o i -> i o")`, `cast`.

    `file` and `leaf` are the axes of both, `sizes` the lengths of those that are joined, `dtype` is
    the dtype of floats in the file, "" for that of the leaf.
    """

    file: Axes
    leaf: Axes
    sizes: Mapping[str, int]
    dtype: str = ""

    def forward(self, x: Any) -> Any:
        """The leaf for `x`, an array of the file, in its dtype. ValueError for another shape."""
        return _moved(x, *_solved(self.file, self.leaf, self.sizes, x.shape))

    def inverse(self, x: Any) -> Any:
        """The array of the file for `x`, a leaf.

        Raises ValueError for another shape, CheckpointError for numbers too large for the dtype.
        """
        x = _moved(x, *_solved(self.leaf, self.file, self.sizes, x.shape))
        return leaves.in_dtype(x, self._dtype_of(x.dtype.name), "save()")

    def stored(self, leaf: Leaf) -> Leaf:
        """The description of the array in the file, from that of the leaf; raises as `inverse`."""
        _, file, lengths = _solved(self.leaf, self.file, self.sizes, leaf.shape)
        shape, dtype = tuple(_length(axis, lengths) for axis in file), self._dtype_of(leaf.dtype)
        kind = "array" if dtype else leaf.kind  # files have no typed keys
        return dataclasses.replace(leaf, kind=kind, shape=shape, dtype=dtype)

    def _dtype_of(self, dtype: str) -> str:
        is_cast = self.dtype and dtype and jnp.issubdtype(np.dtype(dtype), np.floating)
        return self.dtype if is_cast else dtype

    def part(
        self, shape: tuple[int, ...], bounds: Bounds, read: Callable[[Bounds], np.ndarray]
    ) -> np.ndarray:
        """The part within `bounds` of a leaf of this shape; `read` reads parts of the file's array.

        Of a name that comes first in its axis on both sides, only a part is read; of others, all.
        Raises ValueError for another shape.
        """
        leaf, file, lengths = _solved(self.leaf, self.file, self.sizes, shape)
        inner = lambda axis: _length(axis[1:], lengths)
        spans = {name: (0, n) for name, n in lengths.items()}
        for axis, (start, stop) in zip(leaf, bounds, strict=True):
            if any(axis[0] == other[0] for other in file):
                spans[axis[0]] = start // (inner(axis) or 1), -(-stop // (inner(axis) or 1))
        reach = lambda axis: (spans[axis[0]][0] * inner(axis), spans[axis[0]][1] * inner(axis))
        here = {name: stop - start for name, (start, stop) in spans.items()}
        offsets = [reach(axis)[0] for axis in leaf]
        inside = [slice(a - at, b - at) for (a, b), at in zip(bounds, offsets, strict=True)]
        return _moved(read(tuple(map(reach, file))), file, leaf, here)[(*inside, ...)]


def rearrange(pattern: str, /, **sizes: int) -> Transform:
    """A transform of axes in the notation of einops: axes in the file, "->", axes of the leaf.

    Parentheses join axes, the last name varying fastest; "..." is any number of axes. Give the
    sizes of all names but one in parentheses, because `inverse` needs them too.
    Raises HyperparameterError for a malformed pattern and for missing sizes.

        rearrange("o i -> i o")                                            transpose
        rearrange("(heads d) i -> i heads d", heads=12)                    split heads
        rearrange("(heads two d) i -> i heads (d two)", heads=12, two=2)   rotary: halves to pairs

    >>> split = rearrange("(heads d) i -> i heads d", heads=2)
    >>> split.forward(np.zeros((6, 5))).shape, split.inverse(np.zeros((5, 2, 3))).shape
    ((5, 2, 3), (6, 5))
    """
    if not isinstance(pattern, str):
        expected = "a str such as 'o i -> i o'"
        raise WrongTypeError("pattern", "rearrange()", trees.describe(pattern), expected)
    for name, n in sizes.items():
        checks.check_count(n, "rearrange()", name)
    sides = [_TOKENS.findall(side) for side in pattern.split("->")]
    axes = [tuple(tuple(group.split()) or (name,) for group, name, _ in side) for side in sides]
    names = [sorted(name for axis in side for name in axis) for side in axes]
    is_odd = len(sides) != 2 or any(odd for side in sides for *_, odd in side)
    is_odd = is_odd or names[0] != names[1] or len(set(names[0])) < len(names[0])
    is_odd = is_odd or not set(sizes) <= set(names[0])
    is_odd = is_odd or any(x != "..." and not x.isidentifier() for x in names[0])
    if is_odd or any(len({*axis} - {*sizes}) > 1 for side in axes for axis in side):
        got, expected = f"{pattern!r} with {sizes}", "each name once on both sides of '->'"
        expected += ", and the length of all names but one in parentheses"
        raise HyperparameterError("pattern", "rearrange()", got, expected)
    return Transform(axes[0], axes[1], sizes)


def cast(dtype: Any) -> Transform:
    """A transform of floats to the float `dtype` in the file; other leaves keep their dtype.

    Raises WrongTypeError for another dtype: integers would lose the fractions.

    >>> cast("float16").inverse(np.float32([0.1]))
    array([0.1], dtype=float16)
    """
    try:
        found = None if dtype is None else np.dtype(dtype)  # of None it would be float64
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, np.floating):
        expected = "a float dtype, such as 'bfloat16'"
        raise WrongTypeError("dtype", "cast()", trees.describe(dtype), expected)
    return dataclasses.replace(SAME, dtype=found.name)


SAME = rearrange("... -> ...")


@dataclass(frozen=True)
class Mapped:
    """A leaf, and the arrays of a file that make it; none of them is read yet."""

    where: str
    leaf: Leaf
    names: dict[str, tuple[int, ...]]  # of the arrays, each with its place in the stacked axes
    transform: Transform
    stored: Leaf  # each of the arrays

    def part(self, bounds: Bounds, read: Callable[[str, Bounds], Any]) -> np.ndarray:
        """The part of the leaf within `bounds`, by `read` of parts of the arrays."""
        one = lambda name, depth: self.transform.part(
            self.leaf.shape[depth:], bounds[depth:], functools.partial(read, name)
        )
        if () in self.names.values():
            return one(next(iter(self.names)), 0)
        out = np.empty([b - a for a, b in bounds], leaves.dtype_of(self.leaf.dtype))
        for name, at in self.names.items():
            here = tuple(i - a for i, (a, _) in zip(at, bounds, strict=False))
            if all(0 <= i < n for i, n in zip(here, out.shape, strict=False)):
                out[here] = one(name, len(at))
        return out


def planned(tree, where, rename, transform, call: str, prefix: str = "") -> dict[int, Mapped]:
    """For each leaf that `where` selects, by its number, the arrays of a file that make it."""
    names = ["/".join(name) for name, _, _ in trees.leaves_with_names(tree)]
    select = lambda where, name: patterns.select(where, tree, f"{call[:-1]}{name}=)")
    flags = select(where, "where") if where is not None else (True,) * len(names)
    if rename is not None and not callable(rename):
        got = trees.describe(rename)
        fix = "Of a dict d: lambda name: d.get(name, name)."
        raise WrongTypeError("rename", call, got, "a function of a name", fix)
    found: list[Any] = names if rename is None else [rename(name) for name in names]
    for name, x in zip(names, found, strict=True):
        if not isinstance(x, str):
            raise WrongTypeError(
                f"result of rename for {name!r}", call, trees.describe(x), "a name"
            )
    given = {} if transform is None else transform
    if not isinstance(given, Mapping) or any(type(x) is not Transform for x in given.values()):
        got, expected = trees.describe(transform), "{pattern: rearrange(…)} or {pattern: cast(…)}"
        raise WrongTypeError("transform", call, got, expected)
    hits = {pattern: select(pattern, "transform") for pattern in given}
    plan, faults = {}, []
    for i, (path, x) in enumerate(leaves.tree_of(tree).leaves):
        if flags[i]:
            how = next((given[pattern] for pattern, on in hits.items() if on[i]), SAME)
            name = [prefix + found[i]] if rename is None else found[i].split("{}")
            try:
                plan[i] = _mapped(leaves.leaf_of(path, x), name, how)
            except ValueError as error:
                faults.append(f"{show('tree', path)}: {error}")
    fix = "Change the pattern of transform=, or its sizes."
    _matching.refuse(f"leaves that do not fit in {call}", faults, fix)
    return plan


def _mapped(leaf: Leaf, name: list[str], transform: Transform) -> Mapped:
    """The plan for a leaf; between the parts of `name` stands a number for each axis to stack."""
    *first, last = name
    depth = len(first)
    if depth > len(leaf.shape) or "" in first[1:]:
        raise ValueError(f"{leaf} for {'{}'.join(name)!r}, expected an axis for each {{}}")
    stored = transform.stored(dataclasses.replace(leaf, shape=leaf.shape[depth:]))
    fill = lambda at: "".join(f"{text}{i}" for text, i in zip(first, at, strict=True)) + last
    names = {fill(at): at for at in np.ndindex(leaf.shape[:depth])}
    return Mapped(show("tree", leaf.path), leaf, names, transform, stored)


def _length(axis: tuple[str, ...], lengths: Mapping[str, int]) -> int:
    return math.prod(lengths[name] for name in axis)


def _solved(known: Axes, other: Axes, sizes: Mapping[str, int], shape) -> tuple[Axes, Axes, dict]:
    """Both sides with a name for each axis of "...", the length of every name; or ValueError."""
    more = tuple((f"...{i}",) for i in range(len(shape) - len(known) + 1))
    spread = lambda side: sum((more if axis == ("...",) else (axis,) for axis in side), ())
    axes, others, lengths = spread(known), spread(other), dict(sizes)
    for axis, n in zip(axes, shape, strict=False):
        given = math.prod(sizes.get(name, 1) for name in axis)
        lengths |= {name: n // given for name in axis if name not in sizes}
    if len(axes) != len(shape) or [_length(axis, lengths) for axis in axes] != [*shape]:
        text = " ".join(f"({' '.join(axis)})" if axis[1:] else axis[0] for axis in known)
        raise ValueError(f"shape {tuple(shape)}, expected {text!r} with {dict(sizes)}")
    return axes, others, lengths


def _moved(x: Any, axes: Axes, others: Axes, lengths: Mapping[str, int]) -> Any:
    names = [name for axis in axes for name in axis]
    order = [names.index(name) for axis in others for name in axis]
    split = x.reshape([lengths[name] for name in names]).transpose(order)
    return split.reshape([_length(axis, lengths) for axis in others])
