"""Transforms between the arrays in a file and the leaves of a tree: axes by name, dtypes, stacks.

`planned` finds the arrays of every leaf and their transform, before an array is read.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tsunax._core import checks, patterns, trees
from tsunax.checkpoints import _matching, leaves
from tsunax.checkpoints.checksums import Bounds
from tsunax.errors import HyperparameterError, WrongTypeError

Axes = tuple[tuple[str, ...], ...]  # the names that each axis joins; the last varies fastest
_TOKENS = re.compile(r"\(([\w\s]*)\)|(\.\.\.|\w+)|(\S)")


@dataclasses.dataclass(frozen=True)
class Transform:
    """How an array in a file becomes a leaf, and back; made by `rearrange("o i -> i o")`, `cast`.

    `file` and `leaf` are the axes of both, `sizes` the lengths of joined axes, `dtype` is the dtype
    of floats in the file, "" for the leaf's dtype.
    """

    file: Axes
    leaf: Axes
    sizes: Mapping[str, int]
    dtype: str = ""

    def forward(self, x: Any) -> Any:
        """The leaf for `x`, an array of the file, in its dtype. ValueError for another shape."""
        return _rearranged(x, *_solved_axes(self.file, self.leaf, self.sizes, x.shape))

    def inverse(self, x: Any) -> Any:
        """The array of the file for `x`, a leaf.

        Raises ValueError for another shape, CheckpointError for numbers too large for the dtype.
        """
        x = _rearranged(x, *_solved_axes(self.leaf, self.file, self.sizes, x.shape))
        return leaves.in_dtype(x, self._dtype_of(x.dtype.name), "save()")

    def stored(self, leaf: leaves.Leaf) -> leaves.Leaf:
        """The description of the array in the file from the leaf's; raises as `inverse`."""
        _, file, lengths = _solved_axes(self.leaf, self.file, self.sizes, leaf.shape)
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

        Only a part is read along a name that comes first in its axis on both sides; else all of it.
        Raises ValueError for another shape.
        """
        leaf, file, lengths = _solved_axes(self.leaf, self.file, self.sizes, shape)
        # An axis is a row of blocks, one for each index of its first name, of this length each.
        inner_length = lambda axis: _length(axis[1:], lengths)
        spans = {name: (0, n) for name, n in lengths.items()}  # start and stop to read
        for axis, (start, stop) in zip(leaf, bounds, strict=True):
            if any(axis[0] == file_axis[0] for file_axis in file):
                n = inner_length(axis) or 1
                spans[axis[0]] = start // n, -(-stop // n)  # whole blocks around the bounds
        start_of = lambda axis: spans[axis[0]][0] * inner_length(axis)
        span_of = lambda axis: (start_of(axis), spans[axis[0]][1] * inner_length(axis))
        lengths_of_parts = {name: stop - start for name, (start, stop) in spans.items()}
        part = _rearranged(read(tuple(map(span_of, file))), file, leaf, lengths_of_parts)
        # Cut off the parts of whole blocks beyond the bounds.
        cuts = zip(bounds, map(start_of, leaf), strict=True)
        return part[(*(slice(a - start, b - start) for (a, b), start in cuts), ...)]


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
    for name, n in sizes.items():
        checks.check_count(n, "rearrange()", name)
    sides = [_TOKENS.findall(side) for side in pattern.split("->")]
    # A token is a group in parentheses, a single name, or another character.
    axes = [tuple(tuple(group.split()) or (name,) for group, name, _ in side) for side in sides]
    names = [sorted(name for axis in side for name in axis) for side in axes]
    is_malformed = (
        len(sides) != 2
        or any(other_text for side in sides for *_, other_text in side)
        or names[0] != names[1]
        or len(set(names[0])) < len(names[0])
        or not set(sizes) <= set(names[0])
        or any(x != "..." and not x.isidentifier() for x in names[0])
        or any(len({*axis} - {*sizes}) > 1 for side in axes for axis in side)
    )
    if is_malformed:
        raise HyperparameterError(
            "pattern",
            "rearrange()",
            got=f"{pattern!r} with {sizes}",
            expected=(
                "each name once on both sides of '->', and the length of all names but one in "
                "parentheses"
            ),
        )
    return Transform(axes[0], axes[1], sizes)


def cast(dtype: Any) -> Transform:
    """A transform of floats to the float `dtype` in the file; other leaves keep their dtype.

    Raises WrongTypeError for another dtype: integers would lose the fractions.

    >>> cast("float16").inverse(np.float32([0.1]))
    array([0.1], dtype=float16)
    """
    if dtype is None or not jnp.issubdtype(np.dtype(dtype), np.floating):  # None is float64
        raise WrongTypeError("dtype", "cast()", trees.describe(dtype), "a float dtype")
    return dataclasses.replace(UNCHANGED, dtype=np.dtype(dtype).name)


UNCHANGED = rearrange("... -> ...")


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A leaf, and the arrays of a file that make it; no array is read yet."""

    where: str
    leaf: leaves.Leaf
    names: dict[str, tuple[int, ...]]  # {name of an array: its place in the stacked axes}
    transform: Transform
    stored: leaves.Leaf  # each of the arrays

    def part(self, bounds: Bounds, read: Callable[[str, Bounds], Any]) -> np.ndarray:
        """The part of the leaf within `bounds`, by `read` of parts of the arrays."""
        part_of_array = lambda name, depth: self.transform.part(
            self.leaf.shape[depth:], bounds[depth:], functools.partial(read, name)
        )
        if () in self.names.values():  # no stacked axes: one array
            return part_of_array(next(iter(self.names)), 0)
        out = np.empty([stop - start for start, stop in bounds], leaves.dtype_of(self.leaf.dtype))
        for name, place in self.names.items():
            place_in_part = tuple(i - start for i, (start, _) in zip(place, bounds, strict=False))
            is_needed = all(0 <= i < n for i, n in zip(place_in_part, out.shape, strict=False))
            if is_needed:
                out[place_in_part] = part_of_array(name, len(place))
        return out


def planned(tree, where, rename, transform, call: str, prefix: str = "") -> dict[int, Mapped]:
    """For each leaf that `where` selects, by its number, the arrays of a file that make it."""
    names = ["/".join(name) for name, _, _ in trees.leaves_with_names(tree)]
    # `call` is "restore()" or "save()": errors name its argument, "restore(where=)".
    select = lambda where, name: patterns.select(where, tree, f"{call[:-1]}{name}=)")
    flags = select(where, "where") if where is not None else (True,) * len(names)
    transforms = {} if transform is None else transform
    flags_by_pattern = {pattern: select(pattern, "transform") for pattern in transforms}
    plan, faults = {}, []
    for i, (path, x) in enumerate(leaves.tree_of(tree).leaves):
        if flags[i]:
            # A name by `rename` has no prefix, and its "{}" count along stacked axes.
            new_name = prefix + names[i] if rename is None else rename(names[i])
            if not isinstance(new_name, str):
                got, expected = trees.describe(new_name), "the name in the file, a str"
                raise WrongTypeError(f"rename({names[i]!r:.80})", call, got, expected)
            texts = [new_name] if rename is None else new_name.split("{}")
            matching = (pattern for pattern, is_match in flags_by_pattern.items() if is_match[i])
            leaf_transform = transforms.get(next(matching, None), UNCHANGED)
            try:
                plan[i] = _mapped(leaves.leaf_of(path, x), texts, leaf_transform)
            except ValueError as error:
                faults.append(f"{leaves.show('tree', path)}: {error}")
    _matching.refuse(
        f"leaves that do not fit in {call}",
        faults,
        fix="Change the pattern of transform=, or its sizes.",
    )
    return plan


def _mapped(leaf: leaves.Leaf, name: list[str], transform: Transform) -> Mapped:
    """The plan for a leaf; the parts of `name` are joined by a number for each stacked axis."""
    *texts, last_text = name
    depth = len(texts)
    if depth > len(leaf.shape) or "" in texts[1:]:
        raise ValueError(f"{leaf} for {'{}'.join(name)!r}, expected an axis for each {{}}")
    stored = transform.stored(dataclasses.replace(leaf, shape=leaf.shape[depth:]))
    name_at = lambda place: (
        "".join(f"{text}{i}" for text, i in zip(texts, place, strict=True)) + last_text
    )
    names = {name_at(place): place for place in np.ndindex(leaf.shape[:depth])}
    return Mapped(leaves.show("tree", leaf.path), leaf, names, transform, stored)


def _length(axis: tuple[str, ...], lengths: Mapping[str, int]) -> int:
    return math.prod(lengths[name] for name in axis)


def _solved_axes(
    known_side: Axes, other_side: Axes, sizes: Mapping[str, int], shape
) -> tuple[Axes, Axes, dict]:
    """Both sides with a name for each axis of "...", the length of every name; or ValueError."""
    ellipsis_axes = tuple((f"...{i}",) for i in range(len(shape) - len(known_side) + 1))
    without_ellipsis = lambda side: sum(
        (ellipsis_axes if axis == ("...",) else (axis,) for axis in side), ()
    )
    axes = without_ellipsis(known_side)
    other_axes = without_ellipsis(other_side)
    lengths = dict(sizes)
    for axis, n in zip(axes, shape, strict=False):
        # At most one name of an axis has no size: the remaining factor of the length.
        known_length = math.prod(sizes.get(name, 1) for name in axis)
        lengths |= {name: n // known_length for name in axis if name not in sizes}
    if len(axes) != len(shape) or [_length(axis, lengths) for axis in axes] != [*shape]:
        text = " ".join(f"({' '.join(axis)})" if axis[1:] else axis[0] for axis in known_side)
        raise ValueError(f"shape {tuple(shape)}, expected {text!r} with {dict(sizes)}")
    return axes, other_axes, lengths


def _rearranged(x: Any, axes: Axes, other_axes: Axes, lengths: Mapping[str, int]) -> Any:
    names = [name for axis in axes for name in axis]
    order = [names.index(name) for axis in other_axes for name in axis]
    transposed = x.reshape([lengths[name] for name in names]).transpose(order)
    return transposed.reshape([_length(axis, lengths) for axis in other_axes])
