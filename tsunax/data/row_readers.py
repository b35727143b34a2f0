"""Where rows come from: arrays in memory and in files, and records one by one."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import PyTree, trees
from tsunax.data import on_devices
from tsunax.data.checks import check_casts, copy_leaf
from tsunax.errors import DataError, TsunaxError, told


class Records:
    """A leaf with records as its rows, which are read one by one by their number and stacked."""

    def __init__(self, data: Any) -> None:
        self.data: Any = data
        self.shape: tuple[int] = (len(data),)

    def read(self, rows: range | np.ndarray) -> PyTree:
        """Records along a new first axis. Raises DataError if structures or shapes differ."""
        records = [self._record(int(i)) for i in rows]
        stays = lambda x: trees.is_key(x[0]) or on_devices.device_of_arrays(x) is not None
        stack = lambda *arrays: (jnp if stays(arrays) else np).stack(arrays)
        try:
            batch = jax.tree.map(stack, *records)
        except (TypeError, ValueError) as error:
            shapes = [jax.tree.map(np.shape, record) for record in records]
            pairs = zip(rows, shapes, strict=True)
            odd = next((i for i, x in pairs if x != shapes[0]), rows[0])
            raise DataError(
                "data",
                f"record {odd}",
                got=told(error),
                expected=f"a tree of arrays and numbers like record {rows[0]}",
            ) from error
        if not jax.tree.leaves(batch):
            raise DataError("record", "", trees.describe(records[0]), "a tree of arrays")
        return batch

    def _record(self, i: int) -> PyTree:
        try:
            return jax.tree.map(copy_leaf, self.data[i])
        except TsunaxError:
            raise
        except Exception as error:
            raise DataError("data", f"record {i}", told(error), "a record") from error


def read(leaf: PyTree, rows: np.ndarray | slice) -> PyTree:
    """Rows of an array, in fresh memory; a file is read in its own order."""
    if isinstance(leaf, Records):
        return leaf.read(range(*rows.indices(leaf.shape[0])) if isinstance(rows, slice) else rows)
    if trees.is_key(leaf):  # NumPy has no keys
        return leaf[rows]
    if isinstance(leaf, np.ndarray):
        if isinstance(rows, slice):
            return leaf[rows].copy()
        return leaf.take(rows, axis=0, mode="clip")
    original_order: Any = slice(None)
    if not isinstance(rows, slice):  # h5py takes increasing rows only
        order = np.argsort(rows)
        rows, original_order = rows[order], np.argsort(order)
    rows_of_leaf = leaf[rows]
    check_casts(rows_of_leaf, "rows")  # a file may have masks
    # a slice of a tensor shares its memory
    return (
        np.asarray(rows_of_leaf).copy()
        if isinstance(rows, slice)
        else np.asarray(rows_of_leaf)[original_order]
    )


def as_column(path: tuple[Any, ...], leaf: Any) -> Any:
    """The leaf as `read` can read it: records are one leaf. Raises DataError for tables."""
    if hasattr(leaf, "columns") or isinstance(leaf, Mapping):
        raise DataError(
            "leaf",
            trees.access_str("arrays", path),
            got=f"a {type(leaf).__name__}",
            expected="arrays",
            fix="Columns in a dict: {name: np.asarray(table[name]), ...}.",
        )
    if hasattr(leaf, "iloc"):  # a Series of pandas is indexed by labels
        return np.asarray(leaf)
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    has_records = hasattr(leaf, "__getitem__") and hasattr(leaf, "__len__")
    is_leaf = is_array or isinstance(leaf, str | bytes) or not has_records
    return leaf if is_leaf else Records(leaf)
