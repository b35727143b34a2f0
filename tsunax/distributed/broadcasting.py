"""A tree of one process on all of them: to the bit, arrays in one transfer."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from tsunax._core import PyTree, stable_text, trees
from tsunax.distributed import collectives, joining
from tsunax.errors import ProcessError, WrongTypeError

__all__ = ["broadcast"]


def broadcast(tree: PyTree, root: int = 0) -> PyTree:
    """The tree of one process, on all of them: to the bit, arrays in one transfer.

    The trees have the same structure, shapes and dtypes everywhere. JAX arrays keep their place,
    NumPy arrays stay NumPy's. Numbers and strings may differ, and need no device. Raises
    ProcessError for trees that do not fit, or a root that is not there, WrongTypeError for other
    leaves.

    >>> broadcast({"run": "2026-11-21", "seed": 3})
    {'run': '2026-11-21', 'seed': 3}
    """
    index, count = joining.here()
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < count:
        expected = f"a process from 0 to {count - 1}"
        raise ProcessError("root", "broadcast()", repr(root), expected)
    keyed, treedef = jtu.tree_flatten_with_path(tree)
    known = {}
    leaf: Any
    for path, leaf in keyed:
        place, is_array = trees.access_str("tree", path), trees.is_array(leaf)
        is_plain = isinstance(leaf, (bool, int, float, str))
        has_objects = isinstance(leaf, np.ndarray) and leaf.dtype.hasobject
        is_spread = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        if has_objects or is_spread or not (is_array or is_plain):
            expected = "an array of this process, a number or a string"
            raise WrongTypeError("leaf", place, trees.describe(leaf), expected)
        known[place] = f"{leaf.dtype}{list(leaf.shape)}" if is_array else "a number or a string"
    if count == 1:
        return tree
    collectives.compare("broadcast()", known)
    leaves = [leaf for _, leaf in keyed]
    plain = json.dumps([None if trees.is_array(x) else x for x in leaves])
    values = json.loads(collectives.gather("broadcast()", plain)[root])
    bits = [_bits(x) for x in leaves if trees.is_array(x)]
    if bits:
        from jax.experimental import multihost_utils

        packed = np.concatenate([x.reshape(-1).view(np.uint8) for x in bits])
        packed = np.asarray(multihost_utils.broadcast_one_to_all(packed, is_source=index == root))
        parts = iter(np.split(packed, np.cumsum([x.nbytes for x in bits])[:-1]))
        pairs = zip(leaves, values, strict=True)
        values = [_like(x, next(parts)) if trees.is_array(x) else value for x, value in pairs]
    return treedef.unflatten(values)


def _bits(leaf: Any) -> np.ndarray:
    bits = stable_text.bits_of(leaf)
    assert bits is not None
    return bits.reshape(-1).reshape(bits.shape)  # contiguous, and a scalar stays one


def _like(leaf: Any, part: np.ndarray) -> Any:
    """Bytes as an array of the kind that another one is."""
    bits = _bits(leaf)
    new = part.view(bits.dtype).reshape(bits.shape)
    if trees.is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(new), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        return jax.device_put(new, leaf.sharding if leaf.committed else None)
    return new if isinstance(leaf, np.ndarray) else new[()]
