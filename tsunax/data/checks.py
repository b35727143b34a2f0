"""Checks of batches: rows in every leaf, and values that JAX keeps. And copies of batches."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from tsunax._core import Function, PyTree, checks, placement, trees
from tsunax.errors import DataError, WrongTypeError

_PLAIN = {dict, list, tuple, np.ndarray}  # classes that are no graphs
_NUMBERS = (np.number, np.bool_, jax.dtypes.prng_key)


def is_graphs(x: Any) -> bool:
    """Whether it is a batch of graphs as jraph has them: `GraphsTuple`, or a class like it."""
    return all(hasattr(x, name) for name in ("senders", "receivers", "n_node"))


def check_batch(batch: PyTree, where: str = "", root: str = "batch") -> int:
    """The number of rows of a batch, the same in every leaf; DataError, WrongTypeError, StateError.

    Graphs of jraph have rows of nodes, edges and graphs: the result is the number of graphs.

    >>> check_batch({"x": np.zeros((8, 3)), "y": np.zeros(8)})
    8
    >>> check_batch({"x": np.zeros((8, 3)), "y": np.zeros(7)}, "step 12")
    Traceback (most recent call last):
    tsunax.errors.DataError: batch at step 12: got 8 rows in batch['x'], 7 in batch['y'], ...
    """
    # `batches` cuts arrays into rows, so there graphs are checked leaf by leaf
    is_whole = lambda x: type(x) not in _PLAIN and root == "batch" and is_graphs(x)
    nodes = [] if isinstance(batch, Iterator) else _nodes_at(root, batch, is_whole)
    rows: dict[int, str] = {}
    for node, path, leaf in nodes:
        place = f"{path}, {where}" if where else path
        checks.check_alive(leaf, place)
        shape, dtype = getattr(leaf, "shape", ()), getattr(leaf, "dtype", None)
        checks.check_dtype(dtype, place)
        is_odd = isinstance(dtype, np.dtype) and not any(jnp.issubdtype(dtype, k) for k in _NUMBERS)
        if is_odd or (dtype is None and not shape and trees.dtype_of(leaf) is None):
            fix = "Leave it out, or turn it into numbers."
            raise WrongTypeError("leaf", place, trees.describe(leaf), "an array of numbers", fix)
        if not shape:
            got = f"a scalar, {trees.describe(leaf)}"
            fix = f"Give it a row axis, or leave it out of the {root}: step(state, batch, name=...)"
            raise DataError("leaf", place, got, "rows along axis 0", f"{fix}.")
        if not is_whole(node) or leaf is node.n_node:
            rows.setdefault(shape[0], path)
    if not rows:
        raise DataError(root, where, trees.describe(batch), "a tree of arrays")
    if len(rows) > 1:
        rows_by_path = ", ".join(f"{n} in {path}" for n, path in rows.items())
        fix = "Graphs become rows by ts.data.pack_graphs; or call step(state, batch) yourself."
        got, fix = rows_by_path.replace(" in ", " rows in ", 1), fix if root == "batch" else ""
        raise DataError(root, where, got, "the same in every leaf", fix)
    if 0 in rows:
        raise DataError(root, where, "0 rows", "at least 1: the mean over none is NaN")
    return next(iter(rows))


def _nodes_at(root: str, batch: PyTree, is_whole: Function) -> list[tuple[Any, str, Any]]:
    """(node, path, leaf) for each leaf; the node is a container that is whole, or the leaf."""
    access = lambda *paths: trees.access_str(root, sum(paths, ()))
    flat = lambda node, **options: jtu.tree_flatten_with_path(node, **options)[0]
    nodes = flat(batch, is_leaf=is_whole)
    leaves = lambda node: flat(node) if is_whole(node) else [((), node)]
    return [(node, access(path, inner), x) for path, node in nodes for inner, x in leaves(node)]


def _loss_of_cast(x: Any) -> tuple[str, str, str] | None:
    """Values of a NumPy array that JAX would lose or refuse, as `got, expected, fix`."""
    if not isinstance(x, np.ndarray):
        return None
    if isinstance(x, np.ma.MaskedArray):
        expected = "an array, and beside it its mask (f32, 1 for real rows)"
        fix = "x.filled(0) and ~np.ma.getmaskarray(x) are the two."
        return "a masked array", expected, fix
    if fault := checks.dtype_fault(x.dtype):
        return fault
    # only 64-bit arrays, and only if JAX cuts them to 32
    if x.dtype.char not in "lLqQd" or not x.size or jax.config.read("jax_enable_x64"):
        return None
    range_of_32_bits = np.finfo(np.float32) if x.dtype.kind == "f" else np.iinfo(f"{x.dtype.kind}4")
    low, high = np.minimum.reduce(x, None), np.maximum.reduce(x, None)
    if not (range_of_32_bits.min <= low and high <= range_of_32_bits.max) and x.dtype.kind == "f":
        real = np.isfinite(x)  # NaN and inf stay
        low, high = np.min(x, initial=0, where=real), np.max(x, initial=0, where=real)
    if range_of_32_bits.min <= low and high <= range_of_32_bits.max:
        return None
    expected = f"what {range_of_32_bits.dtype}, to which JAX casts them, can hold"
    fix = "Leave it out, make it smaller, or set jax_enable_x64."
    return f"{x.dtype} values from {low} to {high}", expected, fix


def check_casts(tree: PyTree, root: str, where: str = "") -> None:
    """Raise DataError for values that JAX would lose (integers, infinities, a mask) or refuse."""
    if any(map(_loss_of_cast, jax.tree.leaves(tree))):
        for place, leaf in trees.leaves_at(root, tree):
            if loss := _loss_of_cast(leaf):
                raise DataError("leaf", place + (where and f", {where}"), *loss)


def copy_leaf(leaf: PyTree) -> PyTree:
    """A copy of a NumPy array, or of an object that may share memory with one."""
    if type(leaf) is np.ndarray:
        return placement.aligned_copy(leaf)
    if isinstance(leaf, jax.Array | np.generic) or not hasattr(leaf, "__array__"):
        return leaf
    if isinstance(leaf, np.ma.MaskedArray):
        check_casts(leaf, "record")
    return placement.aligned_copy(np.asarray(leaf))


def owned(tree: PyTree, root: str, where: str = "") -> PyTree:
    """The tree with copies of NumPy arrays and of objects that share their memory; checks casts."""
    leaves, treedef = jax.tree.flatten(tree)
    if any(map(_loss_of_cast, leaves)):
        check_casts(tree, root, where)
    return treedef.unflatten(map(copy_leaf, leaves))
