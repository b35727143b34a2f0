"""Which parameter each leaf of an optimizer state belongs to."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from tsunax._core import Function, PyTree, TreeDef, trees
from tsunax.rules.number_table import Numbers, is_live


def _owners_by_marks(init: Function, params: Any, leaves: list) -> list[int | None] | None:
    """Owners found by marking the params; None if `init` fails on marked params, or differs."""
    try:
        marked = jtu.tree_flatten_with_path(jax.eval_shape(init, trees.mark(params)))[0]
    except Exception:  # for example a user's mask fails on the unfamiliar node
        return None
    outline = lambda flat: [
        (trees.without_marks(path), leaf.shape, leaf.dtype) for path, leaf in flat
    ]
    if outline(marked) != outline(leaves):
        return None
    return [next((k.owner for k in path if isinstance(k, trees.Mark)), None) for path, _ in marked]


def owners_by_suffix(params: PyTree, leaves: list[Any]) -> list[int | None]:
    """Owners by key path: the parameter with the leaf's shape and the longest common suffix."""
    flat = jtu.tree_flatten_with_path(params)[0]
    index = {(path, np.shape(leaf)): i for i, (path, leaf) in enumerate(flat)}
    suffixes = ([(path[i:], leaf.shape) for i in range(len(path) + 1)] for path, leaf in leaves)
    return [
        next((index[suffix] for suffix in leaf_suffixes if suffix in index), None)
        for leaf_suffixes in suffixes
    ]


def owners(init: Callable[[Any], Any], params: PyTree) -> tuple[Any, list[int | None]]:
    """`(shapes, owners)` of an optax state: the parameter from which each of its leaves is made.

    `shapes` is `jax.eval_shape(init, params)`. `owners` has, for each of its leaves, the index of a
    leaf of `params`; None for a count, and for a leaf that several parameters made together.

    Each parameter is wrapped in a `trees.Marked` node. optax's tree functions pass through it:
    masks, labels, factored and stacked moments need no special case. If `init` fails on these
    nodes, `owners_by_suffix` finds the owners.
    """
    leaves, treedef = jax.tree.flatten(params)
    is_of_jax = lambda x: isinstance(x, jax.Array | jax.ShapeDtypeStruct)
    dtype_of = lambda x: x.dtype if is_of_jax(x) else jax.dtypes.result_type(x)
    shapes_of_params = tuple(jax.ShapeDtypeStruct(np.shape(x), dtype_of(x)) for x in leaves)
    shapes, owner_of_leaf = _traced_owners(init, treedef, shapes_of_params)
    return shapes, [*owner_of_leaf]


@functools.lru_cache(maxsize=128)  # it traces `init`
def _traced_owners(
    init: Callable[[Any], Any], treedef: TreeDef, shapes: tuple
) -> tuple[Any, list[int | None]]:
    params = treedef.unflatten(shapes)
    opt_state = jax.eval_shape(init, params)
    leaves = jtu.tree_flatten_with_path(opt_state)[0]
    owner_of_leaf = _owners_by_marks(init, params, leaves)
    if owner_of_leaf is None:
        owner_of_leaf = owners_by_suffix(params, leaves)
    return opt_state, owner_of_leaf


def owners_of_live(live: Any, params: PyTree) -> list[int | None]:
    """The owners of the leaves of a live rule's optax state."""
    return owners(_init_of(live), params)[-1]


@functools.lru_cache(maxsize=128)  # the same function for equal rules
def _init_of(live: Any) -> Function:
    # No shape depends on the numbers; 0.5 is in the range of all.
    return live.build(dict.fromkeys(live.names, 0.5)).init


def owners_of(
    init: Function, opt_state: PyTree, numbers: Numbers | None, params: PyTree
) -> list[int | None]:
    """For each leaf of a plain optimizer state the index of its parameter, or None."""
    if numbers is None:
        return owners(init, params)[-1]
    owner_of_leaf = owners_in(init, numbers.layout.skeleton, params)
    return [owner_of_leaf[i] for i in numbers.layout.plain_leaves]


def owners_in(init: Function, opt_state: PyTree, params: PyTree) -> list[int | None]:
    """Owners of the leaves of an optimizer state in which live states contain their tables."""
    shapes, owner_of_leaf = owners(init, params)
    indices = [-1 if o is None else o for o in owner_of_leaf]  # None would be no leaf of a tree
    fresh = jax.tree.unflatten(jax.tree.structure(shapes), indices)

    def owners_like(fresh, actual):
        if not is_live(actual):
            return fresh
        # `actual` may have more groups than a fresh state; the leaves of tables have no owner.
        inner = jax.tree.map(owners_like, fresh.inner, actual.inner, is_leaf=is_live)
        table, extra, count = jax.tree.map(lambda _: -1, (actual.table, actual.extra, actual.count))
        return dataclasses.replace(actual, table=table, inner=inner, extra=extra, count=count)

    aligned = jax.tree.leaves(jax.tree.map(owners_like, fresh, opt_state, is_leaf=is_live))
    return [None if owner < 0 else owner for owner in aligned]
