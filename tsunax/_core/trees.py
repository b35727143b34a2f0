"""Pytrees: paths, parts, owners, and how messages describe them.

A leaf is called by the readable components of its key path: `params["encoder"][0].kernel` has the
*names* `("encoder", "0", "kernel")`, shown as "encoder/0/kernel". A selection is a tuple of
*flags*, a bool per leaf in flatten order.

Nothing here uses states, rules or losses. flax's wrappers are recognized by the name of their
class: flax is not imported.
"""

import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax._src import core
from jax.core import Tracer

from tsunax.errors import ParamsError, listed

Names = tuple[str, ...]
Flags = Sequence[bool]


def is_array(x: Any) -> bool:
    """Whether `x` is a JAX array (also a traced one), a NumPy array or a NumPy scalar."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def is_traced(x: Any) -> bool:
    """Whether `x` has no value yet: jit, vmap, grad or scan is tracing."""
    return isinstance(x, Tracer)


def is_placed(x: Any) -> bool:
    """Whether `x` is a JAX array on devices: not NumPy's, and not traced."""
    return isinstance(x, jax.Array) and not is_traced(x)


def is_offloaded(x: Any) -> bool:
    """Whether an array (also a traced one, or its shape) is in the host memory of its devices."""
    if is_traced(x):
        return jax.typeof(x).memory_space is jax.memory.Space.Host
    return getattr(getattr(x, "sharding", None), "memory_kind", None) == "pinned_host"


def on_device(tree: Any, earlier_result: Any = None) -> Any:
    """The tree with its offloaded arrays in the memory of their devices.

    A program moves them after `earlier_result`, the gradient norm, is computed: before, they would
    fill the memory that the gradient needs.
    """

    def put_leaf(x: Any) -> Any:
        if not is_offloaded(x):
            return x
        x = x if earlier_result is None else jax.lax.optimization_barrier((x, earlier_result))[0]
        return jax.device_put(x, jax.memory.Space.Device)

    return jax.tree.map(put_leaf, tree)


def offloaded_like(tree: Any, like: Any) -> Any:
    """The inverse of `on_device`: arrays move to host memory if their leaf of `like` is there."""
    put_leaf = lambda x, y: jax.device_put(x, jax.memory.Space.Host) if is_offloaded(y) else x
    return jax.tree.map(put_leaf, tree, like)


def is_gone(x: Any) -> bool:
    """Whether an array's buffer was donated or deleted."""
    return is_placed(x) and x.is_deleted()


def dtype_of(x: Any) -> Any:
    """The dtype of an array or `ShapeDtypeStruct`, JAX's dtype for a Python number, else None."""
    if is_array(x) or isinstance(x, jax.ShapeDtypeStruct):
        return x.dtype
    return jnp.result_type(x) if isinstance(x, (bool, int, float, complex)) else None


def is_a(x: Any, *kinds: Any) -> bool:
    """Whether `x` is a number or array with a dtype in `kinds`, such as np.floating."""
    dtype = dtype_of(x)
    return dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in kinds)


def is_key(x: Any) -> bool:
    """Whether `x` is a typed key, or an array of keys."""
    return is_a(x, jax.dtypes.prng_key)


def on_host(x: Any) -> np.ndarray:
    """An array as a NumPy array, a key as its words."""
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def bits_differ(x: Any, y: Any) -> bool:
    """Whether two leaves differ in shape, dtype or bits (0.0 is not -0.0; NaN equals itself)."""
    if type(x) is type(y) and isinstance(x, float | complex):
        x, y = np.asarray(x), np.asarray(y)
    if not (is_array(x) and is_array(y)):
        return type(x) is not type(y) or x != y
    if x.shape != y.shape or x.dtype != y.dtype:
        return True
    x, y = on_host(x), on_host(y)
    return x.tobytes() != y.tobytes()


def is_inexact(x: Any) -> bool:
    """Whether `x` is floating point or complex, and can have a gradient."""
    return is_a(x, np.inexact)


def wide_dtype(x: Any) -> Any:
    """The dtype of an array, but at least float32: for sums and means of it."""
    return jnp.promote_types(x.dtype, jnp.float32)


def own(x: Any) -> Any:
    """A copy of an array, without a weak type; other leaves stay as they are."""
    is_numpy = isinstance(x, np.ndarray)  # which `strong` copies
    return strong(x if is_numpy else jnp.array(x, copy=True)) if _is_number(x) else x


def strong(x: Any) -> Any:
    """An array without a weak type. A step returns a weak type strong, and would compile twice.

    NumPy arrays are copied, and the copy is complete on return: a transfer to a device may read
    NumPy's memory after its owner has refilled it.
    """
    if not _is_number(x):
        return x
    is_numpy = isinstance(x, np.ndarray)
    x = jax.block_until_ready(jnp.array(x, copy=True)) if is_numpy else jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def _is_number(x) -> bool:
    return is_array(x) or isinstance(x, (bool, int, float, complex))


def cast_like(tree, like):
    """Each leaf in the dtype of the same leaf in `like`."""
    return jax.tree.map(lambda x, y: jnp.asarray(x, dtype_of(y)), tree, like)


def rounded_like(tree, like):
    """`cast_like`, for a program that computes with the result in float32.

    XLA leaves out a cast to bfloat16 and back on a GPU, and the numbers would not be the stored
    numbers.
    """
    is_low = lambda x, y: x.dtype == np.float32 and dtype_of(y) == jnp.bfloat16
    rounded = lambda x, y: jax.lax.reduce_precision(x, 8, 7) if is_low(x, y) else x
    return cast_like(jax.tree.map(rounded, tree, like), like)


# Traces


def is_tracing() -> bool:
    """Whether some trace is under way: of jit, vmap, grad or scan (some may trace few arrays)."""
    return not core.trace_state_clean()


# Paths


@dataclasses.dataclass(frozen=True)
class Mark:
    """The key entry of `Marked`. A mask that reads `path[-1].key` gets the leaf's own key."""

    owner: int
    last: Any

    def __str__(self) -> str:
        return ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.last, name)


@dataclasses.dataclass(frozen=True, eq=False)
class Marked:
    """A node around one parameter: leaves that a rule makes of it have the mark in their paths."""

    tree: Any
    mark: Mark


jtu.register_pytree_with_keys(
    Marked,
    lambda node: (((node.mark, node.tree),), node.mark),
    lambda mark, children: Marked(next(iter(children)), mark),
    lambda node: ((node.tree,), node.mark),
)


def mark(tree: Any) -> Any:
    keyed, treedef = jtu.tree_flatten_with_path(tree)
    marks = [Mark(i, path[-1] if path else None) for i, (path, _) in enumerate(keyed)]
    return treedef.unflatten(Marked(leaf, m) for (_, leaf), m in zip(keyed, marks, strict=True))


def _unmark(tree: Any) -> Any:
    is_marked = lambda x: isinstance(x, Marked)
    return jax.tree.map(lambda x: x.tree if is_marked(x) else x, tree, is_leaf=is_marked)


def without_marks(path: Sequence[Any]) -> tuple:
    return tuple(entry for entry in path if not isinstance(entry, Mark))


def key_name(entry: Any) -> str:
    """The readable name of a key entry: dict key, index or field; a name stays as it is."""
    return jtu.keystr((entry,), simple=True)


def names(path: Sequence[Any]) -> Names:
    """The components of a key path."""
    return tuple(map(key_name, without_marks(path)))


def is_overwritten(path: Sequence[Any]) -> bool:
    """Whether gradients replace the leaf at this path, as for flax's fp8 scales."""
    return "_overwrite_with_gradient" in names(path)


def path_str(path: Sequence[Any]) -> str:
    """Key entries or names, joined: "encoder/0/kernel"; "" for a bare array."""
    return "/".join(names(path))


def shown_path(path: Sequence[Any]) -> str:
    """`path_str` for messages: a bare array is `<root>`."""
    return path_str(path) or "<root>"


def access_str(root: str, path: Sequence[Any]) -> str:
    """A key path as Python would write it: `params['encoder'][0].kernel`."""
    return root + jtu.keystr(without_marks(path))


def paths(tree: Any) -> list[tuple[Any, ...]]:
    """The key path of each leaf."""
    return [path for path, _ in jtu.tree_flatten_with_path(tree)[0]]


def leaves_at(root: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Each leaf with its `access_str`."""
    return ((access_str(root, path), x) for path, x in jtu.tree_flatten_with_path(tree)[0])


@functools.lru_cache(maxsize=512)
def _is_box_type(kind: type) -> bool:
    is_of_flax = lambda base: base.__module__.startswith("flax.")
    return not {base.__name__ for base in kind.__mro__ if is_of_flax(base)}.isdisjoint(_BOXES)


# base classes of boxes in NNX, and in Linen (such as Partitioned)
_BOXES = ("Variable", "AxisMetadata")


def _is_box(x: Any) -> bool:
    return _is_box_type(type(x))


def _walk_names(tree: Any, path: tuple, name: Names) -> Iterator[tuple[Names, tuple, Any]]:
    is_inner_box = lambda x: x is not tree and _is_box(x)
    for tail, node in jtu.tree_flatten_with_path(tree, is_leaf=is_inner_box)[0]:
        wrapped = _is_box(tree) and tail and key_name(tail[0]) == "value"
        inner = name + names(tail[1:] if wrapped else tail)
        if is_inner_box(node):
            yield from _walk_names(node, path + tail, inner)
        else:
            yield inner, path + tail, node


def leaves_with_names(tree: Any) -> list[tuple[Names, tuple, Any]]:
    """`(names, key path, leaf)` of every leaf in flatten order; `None` is no leaf.

    The `.value` of a flax wrapper is no name, unless leaves would share their names without it.
    """
    named_leaves = list(_walk_names(tree, (), ()))
    counts = Counter(name for name, _, _ in named_leaves)
    if len(counts) == len(named_leaves):
        return named_leaves
    return [
        (names(path) if counts[name] > 1 else name, path, leaf) for name, path, leaf in named_leaves
    ]


def axis_names(tree: Any) -> list[tuple | None]:
    """The axis names in flax's metadata for each leaf in flatten order; None without any."""
    names_of_leaves: list[tuple | None] = []
    for node in jtu.tree_leaves(tree, is_leaf=_is_box):
        inner, axes = jtu.tree_leaves(node), None
        if _is_box(node) and len(inner) == 1:
            metadata = node.get_metadata() if hasattr(node, "get_metadata") else {}
            names = map(metadata.get, ("out_sharding", "sharding_names", "sharding"))
            axes = getattr(node, "names", None) or next(filter(None, names), None)
            axes = getattr(axes, "spec", axes)
        names_of_leaves += [None if axes is None else tuple(axes)] * len(inner)
    return names_of_leaves


def bytes_str(n: float) -> str:
    """Bytes in words: "512 B", "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


# Parts


def take(tree: Any, flags: Flags) -> list[Any]:
    """The selected leaves of `tree`, in order."""
    return [leaf for leaf, flag in zip(jax.tree.leaves(tree), flags, strict=True) if flag]


def partition(tree: Any, flags: Flags) -> tuple[Any, Any]:
    """`(selected, unselected)`: two trees, each with `None` for the leaves of the other tree."""
    leaves, treedef = jax.tree.flatten(tree)
    flagged = list(zip(leaves, flags, strict=True))
    selected = treedef.unflatten(leaf if flag else None for leaf, flag in flagged)
    return selected, treedef.unflatten(None if flag else leaf for leaf, flag in flagged)


def merge(selected: Any, unselected: Any) -> Any:
    """The inverse of `partition`. A `None` of the original tree is `None` again."""
    is_none = lambda x: x is None
    return jax.tree.map(lambda a, b: b if a is None else a, selected, unselected, is_leaf=is_none)


def children_of(node: Any) -> list[tuple[tuple, Any]]:
    """Key (a path of length 1) and value of each direct child with `None`s; [] for a leaf."""
    keyed, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(key, child) for key, child in keyed if key]


def describe(x: Any) -> str:
    """A value in words, for messages.

    >>> [describe(x) for x in (np.ones((2, 3)), "relu", describe, dict, {"a": 1, "b": 2}, [1, 2])]
    ['float64[2,3]', "'relu' (str)", 'the function describe', 'the class dict',
     'dict with a, b', 'list of 2']
    """
    kind = type(x).__name__
    if x is None:
        return "None"
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if isinstance(x, int) and x.bit_length() > 200:  # Python refuses to print 4,300 digits
        return f"an int of {x.bit_length():,} bits"
    if isinstance(x, (bool, int, float, complex, str, bytes, np.generic)):
        return f"{str(x) if isinstance(x, np.generic) else repr(x):.60} ({kind})"
    if (dtype := dtype_of(x)) is not None:
        return f"{dtype}[{','.join(map(str, np.shape(x)))}]"
    if isinstance(x, Iterator):  # JAX warns of a tree with one, and a look inside would use it up
        return f"a {kind}"
    if type(x) in (list, tuple):
        return f"{kind} of {len(x)}" if x else f"an empty {kind}"
    if isinstance(x, Mapping):  # its keys need not sort
        return f"{kind} with {listed([str(key) for key in x], 6)}" if x else f"an empty {kind}"
    if dataclasses.is_dataclass(x) and type(x).__module__.startswith("tsunax."):
        return kind
    if child_names := listed([path_str(key) for key, _ in children_of(x)], 6):
        return f"{kind} with {child_names}"
    return f"the function {x.__name__}" if callable(x) and hasattr(x, "__name__") else kind


def describe_call(f: Callable[..., Any]) -> str:
    """A function with the names of its parameters: "loss(params, batch, *, key)"."""
    parameters = inspect.signature(f).parameters.values()
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in parameters]
    return f"{getattr(f, '__name__', type(f).__name__)}{inspect.Signature(bare)}"


def _difference(got: Any, expected: Any, path: tuple, place: Callable, leaf: str) -> str | None:
    if jax.tree.structure(got) == jax.tree.structure(expected):
        return None
    in_words = lambda x: leaf if leaf and jtu.all_leaves([x]) and x is not None else describe(x)
    if type(got) is not type(expected):
        return f"at {place(path)}: got {describe(got)}, expected {in_words(expected)}"
    children, expected_children = dict(children_of(got)), dict(children_of(expected))
    for key in expected_children | children:
        if key not in expected_children:
            return f"at {place(path + key)}: got {describe(children[key])}, expected nothing"
        child = expected_children[key]
        if key not in children:
            return f"at {place(path + key)}: got nothing, expected {in_words(child)}"
        if difference := _difference(children[key], child, path + key, place, leaf):
            return difference
    return f"at {place(path)}: got other static fields of {type(got).__name__}, expected equal ones"


def no_parameters(root: str, tree: Any) -> ParamsError:
    got = f"{type(tree).__name__} without leaves"
    return ParamsError("no parameters", root, got, "at least one array")


def first_difference(got: Any, expected: Any, root: str = "", leaf: str = "") -> str | None:
    """Where two trees first differ, "at encoder/bias: got nothing, expected float32[3]"; or None.

    Shapes and dtypes do not count. With `root` the place is "params['encoder']['bias']"; `leaf`
    names an expected leaf.
    """
    if jax.tree.structure(got) == jax.tree.structure(expected):
        return None  # without a walk: the usual case
    place = functools.partial(access_str, root) if root else shown_path
    return _difference(_unmark(got), _unmark(expected), (), place, leaf)
