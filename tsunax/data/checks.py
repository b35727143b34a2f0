"""Checks of batches: rows in every leaf, and values that JAX keeps. And copies of batches."""

from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from tsunax._core import PyTree, checks, placement, trees
from tsunax.errors import DataError

_PLAIN = {dict, list, tuple, np.ndarray}  # classes that are no graphs


def is_graphs(x: Any) -> bool:
    """Whether it is a batch of graphs as jraph has them: `GraphsTuple`, or a class like it."""
    return all(hasattr(x, name) for name in ("senders", "receivers", "n_node"))


def check_batch(batch: PyTree, where: str = "", root: str = "batch") -> int:
    """The number of rows of a batch, the same in every leaf. Raises DataError otherwise.

    Graphs of jraph have rows of nodes, edges and graphs: the result is the number of graphs.

    >>> check_batch({"x": np.zeros((8, 3)), "y": np.zeros(8)})
    8
    >>> check_batch({"x": np.zeros((8, 3)), "y": np.zeros(7)}, "step 12")
    Traceback (most recent call last):
    tsunax.errors.DataError: batch at step 12: got 8 rows in batch['x'], 7 rows in batch['y'], ...
    """
    # `batches` cuts arrays into rows, so there graphs are checked leaf by leaf
    is_whole = lambda x: type(x) not in _PLAIN and root == "batch" and is_graphs(x)
    rows: dict[int, str] = {}
    for path, leaf in jtu.tree_flatten_with_path(batch, is_leaf=is_whole)[0]:
        place = trees.access_str(root, path)
        if is_whole(leaf):
            leaf, place = leaf.n_node, f"{place}.n_node"
        if not (shape := getattr(leaf, "shape", ())):
            fix = f"Leave it out of the {root}: step(state, batch, name=...)."
            place = f"{place}, {where}" if where else place
            raise DataError("leaf", place, trees.describe(leaf), "an array with rows", fix)
        if getattr(getattr(leaf, "dtype", None), "kind", "f") in "OSUM":  # late in an evaluation
            raise DataError("leaf", place, trees.describe(leaf), "numbers")
        rows.setdefault(shape[0], place)
    if len(rows) != 1 or 0 in rows:
        listed = ", ".join(f"{n} rows in {path}" for n, path in rows.items())
        got, fix = listed or trees.describe(batch), "ts.data.pack_graphs makes rows of graphs."
        raise DataError(root, where, got, "at least 1 row, the same number in every leaf", fix)
    return next(iter(rows))


def _loss_of_cast(x: Any) -> tuple[str, str, str] | None:
    """Values of a NumPy array that JAX would lose or misread, as `got, expected, fix`."""
    if not isinstance(x, np.ndarray):
        return None
    if isinstance(x, np.ma.MaskedArray):
        fix = "Give x.filled(0), and beside it ~np.ma.getmaskarray(x)."
        return "a masked array", "an array, and beside it its mask", fix
    if fault := checks.dtype_fault(x.dtype):  # jit would take a program for native bytes
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
    """Raise DataError for values that JAX would lose (large numbers, a mask) or misread."""
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
    check_casts(tree, root, where)
    return jax.tree.map(copy_leaf, tree)
