"""Graphs of different sizes as arrays of one shape: several in a row, told apart by an index.

A row is what `batches` shuffles, what devices share and what micro-batches divide, as for any
arrays: nodes, edges and graphs are axes behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tsunax._core import PyTree, trees
from tsunax.errors import DataError, WrongTypeError

NODE, EDGE, GRAPH = range(3)  # what a field has one of for each
_ONE_FOR_EACH = {
    "nodes": NODE, "edges": EDGE, "globals": GRAPH, "senders": EDGE, "receivers": EDGE,
    "graph_of_node": NODE, "mask": GRAPH,
}  # fmt: skip


class Graphs(NamedTuple):
    """Graphs in rows of one size, see `pack_graphs`; 0 where there is none, if nothing else is said."""

    nodes: PyTree  # leaves (rows, nodes, ...)
    edges: PyTree  # leaves (rows, edges, ...)
    globals: PyTree  # leaves (rows, graphs, ...)
    senders: np.ndarray  # int32 (rows, edges): a node of the row
    receivers: np.ndarray  # int32 (rows, edges): a node of the row; `nodes` where there is no edge
    graph_of_node: np.ndarray  # int32 (rows, nodes): a graph of the row; `graphs` where no node is
    mask: np.ndarray  # bool (rows, graphs): where there is a graph


def pack_graphs(
    items: Sequence[Mapping[str, PyTree]], *, nodes: int, edges: int, graphs: int
) -> Graphs:
    """Graphs packed into rows of at most so many `nodes`, `edges` and `graphs`.

    Each item is `{"nodes", "edges", "globals", "senders", "receivers"}`: trees of arrays with one
    row for each node and for each edge, a tree for the graph (its target, say), and two integers an
    edge; `edges` and `globals` may be missing. Each goes into the first row that has room for it.

    Receivers and graphs of what is not there are out of range, so `jax.ops.segment_sum(messages,
    receivers, nodes)` and `segment_sum(values, graph_of_node, graphs)` drop it. A loss has one value
    a graph, `Loss.mean(losses, batch.mask)`, and all graphs count alike, however they were packed.

    Raises DataError for a graph without nodes, one that no row holds, one of another kind than the
    first, and an edge of a node that is not there; WrongTypeError for other items.

    >>> line = {"nodes": np.array([1.0, 2.0, 3.0]), "senders": [0, 1], "receivers": [1, 2]}
    >>> batch = pack_graphs([line, line, line], nodes=6, edges=5, graphs=2)
    >>> batch.senders.tolist(), batch.receivers.tolist()
    ([[0, 1, 3, 4, 0], [0, 1, 0, 0, 0]], [[1, 2, 4, 5, 6], [1, 2, 6, 6, 6]])
    >>> batch.graph_of_node.tolist(), batch.mask.tolist()
    ([[0, 0, 0, 1, 1, 1], [0, 0, 0, 2, 2, 2]], [[True, True], [True, False]])
    """
    if not len(items):
        raise DataError("items", "pack_graphs()", "none", "one at least")
    limits = np.array([nodes, edges, graphs])
    parts = [_checked(item, f"items[{i}]", limits) for i, item in enumerate(items)]
    kinds = [_kind(part) for part in parts]
    for i, kind in enumerate(kinds):
        if kind != kinds[0]:
            got, expected = (
                f"{kind[0]}: {kind[1]}",
                f"{kinds[0][0]}: {kinds[0][1]}, as the first one",
            )
            raise DataError(f"items[{i}]", "pack_graphs()", got, expected)
    room, rows, places = np.tile(limits, (len(parts), 1)), 0, []
    for part in parts:
        size = _size(part)
        fits = np.all(room[:rows] >= size, axis=1)
        row = int(fits.argmax()) if fits.any() else rows
        rows = max(rows, row + 1)
        places.append((row, limits - room[row]))
        room[row] -= size
        _, begin = places[-1]
        part["senders"] += begin[NODE]
        part["receivers"] += begin[NODE]
        part["graph_of_node"] += begin[GRAPH]
    shapes = [(rows, most) for most in limits]
    found = {}
    for name in Graphs._fields:
        kind = _ONE_FOR_EACH[name]
        spans = [(row, begin[kind]) for row, begin in places]
        nothing = {"receivers": nodes, "graph_of_node": graphs}.get(name, 0)
        fill = functools.partial(_filled, spans, shapes[kind], nothing)
        found[name] = jax.tree.map(fill, *[part[name] for part in parts])
    return Graphs(**found)


def _filled(spans: Sequence[Any], shape: Any, nothing: int, *leaves: np.ndarray) -> np.ndarray:
    out = np.full((*shape, *leaves[0].shape[1:]), nothing, leaves[0].dtype)
    for x, (row, begin) in zip(leaves, spans, strict=True):
        out[row, begin : begin + len(x)] = x
    return out


def _size(part: Mapping[str, Any]) -> np.ndarray:
    return np.array([len(part["graph_of_node"]), len(part["senders"]), 1])


def _kind(part: Mapping[str, PyTree]) -> tuple[Any, ...]:
    """What all graphs have in common: the structure, and the leaves but for their lengths."""
    leaves, treedef = jax.tree.flatten({name: part[name] for name in ("nodes", "edges", "globals")})
    return treedef, [f"{x.dtype}[{', '.join(map(str, x.shape[1:]))}] each" for x in leaves]


def _checked(item: Any, where: str, limits: np.ndarray) -> dict[str, Any]:
    """A graph as arrays with one row for each node, edge and graph."""
    needed, most = {"nodes", "senders", "receivers"}, {"edges", "globals"}
    if not isinstance(item, Mapping) or not needed <= item.keys() <= needed | most:
        expected = "{'nodes', 'senders', 'receivers'}, and perhaps 'edges' and 'globals'"
        raise WrongTypeError(where, "pack_graphs()", trees.describe(item), expected)
    one = jax.tree.map(lambda x: np.asarray(x)[None], item.get("globals"))
    part = {"nodes": item["nodes"], "edges": item.get("edges")}
    part = jax.tree.map(np.asarray, part) | {"globals": one, "mask": np.ones(1, bool)}
    for name in ("senders", "receivers"):
        ends = np.asarray(item[name])
        if ends.size and ends.dtype.kind not in "iu":
            at, got = f"{where}['{name}']", trees.describe(ends)
            raise DataError(at, "pack_graphs()", got, "integers, one for each edge")
        part[name] = ends.astype(np.int32)
    if not jax.tree.leaves(part["nodes"]):
        raise DataError(f"{where}['nodes']", "pack_graphs()", "no array", "one at least")
    lengths = {NODE: np.shape(jax.tree.leaves(part["nodes"])[0])[:1], EDGE: part["senders"].shape}
    for name in ("nodes", "edges", "senders", "receivers"):
        for path, x in jax.tree_util.tree_leaves_with_path(part[name]):
            if not x.ndim or x.shape[:1] != lengths[_ONE_FOR_EACH[name]]:
                at = trees.access_str(f"{where}['{name}']", path)
                what = "node" if _ONE_FOR_EACH[name] == NODE else "edge"
                expected = f"one row for each {what}, as the others"
                raise DataError(at, "pack_graphs()", trees.describe(x), expected)
    part["graph_of_node"] = np.zeros(lengths[NODE], np.int32)
    size = _size(part)
    if not size[NODE] or np.any(size > limits):
        got = "{} nodes, {} edges, {} graph".format(*size)
        raise DataError(
            where, "pack_graphs()", got, "1 to {} nodes, {} edges, {} graphs".format(*limits)
        )
    for name in ("senders", "receivers"):
        x = part[name]
        if x.size and not 0 <= x.min() <= x.max() < size[NODE]:
            at, got = f"{where}['{name}']", f"nodes {x.min()} to {x.max()}"
            raise DataError(at, "pack_graphs()", got, f"0 to {size[NODE] - 1}")
    return part
