"""Graphs of different sizes as arrays of one shape: several in a row, told apart by an index.

`batches` shuffles rows, and devices and micro-batches divide them, as for any arrays: nodes, edges
and graphs are axes behind the rows.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tsunax._core import PyTree, trees
from tsunax.data.checks import check_batch, is_graphs
from tsunax.errors import DataError, WrongTypeError

NODE, EDGE, GRAPH = range(3)  # a field has one value for each
_KIND_OF_FIELD = {
    "nodes": NODE, "edges": EDGE, "globals": GRAPH, "senders": EDGE, "receivers": EDGE,
    "graph_of_node": NODE, "mask": GRAPH,
}  # fmt: skip


class Graphs(NamedTuple):
    """Graphs in rows of one size, see `pack_graphs`. Padding is 0, if nothing else is stated."""

    nodes: PyTree  # leaves (rows, nodes, ...)
    edges: PyTree  # leaves (rows, edges, ...)
    globals: PyTree  # leaves (rows, graphs, ...)
    senders: np.ndarray  # int32 (rows, edges): a node of the row
    receivers: np.ndarray  # int32 (rows, edges): a node of the row; `nodes` for padding
    graph_of_node: np.ndarray  # int32 (rows, nodes): a graph of the row; `graphs` for padding
    mask: np.ndarray  # bool (rows, graphs): False for padding


def pack_graphs(items: Sequence[PyTree], *, nodes: int, edges: int, graphs: int) -> Graphs:
    """Graphs packed into rows of up to `nodes` nodes, `edges` edges and `graphs` graphs.

    Each item is `{"nodes", "edges", "globals", "senders", "receivers"}`: trees of arrays with one
    row for each node and for each edge, a tree for the graph (its target, say), and two integers an
    edge; `edges` and `globals` may be missing. Or it is a `GraphsTuple` of jraph with one graph.
    Each goes into the first row that has room for it.

    Receivers and graphs of padding are out of range, so `jax.ops.segment_sum(messages, receivers,
    nodes)` and `segment_sum(values, graph_of_node, graphs)` drop it. A loss has one value a graph,
    `Loss.mean(losses, batch.mask)`, and all graphs count alike, however they were packed.

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
        if jax.tree.flatten(kind) != jax.tree.flatten(kinds[0]):  # nodes may be of any class
            raise DataError(f"items[{i}]", "pack_graphs()", kind, f"{kinds[0]}, as the first one")
    room, rows, places = np.tile(limits, (len(parts), 1)), 0, []
    for part in parts:
        size = _size(part)
        fits = np.all(room[:rows] >= size, axis=1)
        row = int(fits.argmax()) if fits.any() else rows
        rows = max(rows, row + 1)
        begin = limits - room[row]
        places.append((row, begin))
        room[row] -= size
        part["senders"] += begin[NODE]
        part["receivers"] += begin[NODE]
        part["graph_of_node"] += begin[GRAPH]
    packed_parts = {}
    for name, kind in _KIND_OF_FIELD.items():
        spans = [(row, begin[kind]) for row, begin in places]
        nothing = {"receivers": nodes, "graph_of_node": graphs}.get(name, 0)
        fill = functools.partial(_filled, spans, (rows, limits[kind]), nothing)
        packed_parts[name] = jax.tree.map(fill, *[part[name] for part in parts])
    return Graphs(**packed_parts)


def _filled(spans: Sequence[Any], shape: Any, nothing: int, *leaves: np.ndarray) -> np.ndarray:
    out = np.full((*shape, *leaves[0].shape[1:]), nothing, leaves[0].dtype)
    for x, (row, begin) in zip(leaves, spans, strict=True):
        out[row, begin : begin + len(x)] = x
    return out


def _size(part: Mapping[str, Any]) -> np.ndarray:
    return np.array([len(part["graph_of_node"]), len(part["senders"]), 1])


def _kind(part: Mapping[str, PyTree]) -> PyTree:
    """The kind of a graph, the same for all: its trees of arrays without their lengths."""
    common_fields = {name: part[name] for name in ("nodes", "edges", "globals")}
    return jax.tree.map(lambda x: f"{x.dtype}{[*x.shape[1:]]} each", common_fields)


def _fields_of_jraph(graphs: Any, where: str) -> dict[str, PyTree]:
    """The fields of a `GraphsTuple` with one graph; its `globals` lose their axis of graphs."""
    if np.size(graphs.n_node) != 1:
        raise DataError(
            where,
            "pack_graphs()",
            got=f"{np.size(graphs.n_node)} graphs",
            expected="one",
            fix="jraph.unbatch(graphs) is a list of them, each alone.",
        )
    names = ("nodes", "edges", "senders", "receivers")
    fields = {name: getattr(graphs, name, None) for name in names}
    fields["globals"] = jax.tree.map(lambda x: x[0], getattr(graphs, "globals", None))
    return {name: field for name, field in fields.items() if field is not None}


def _checked(item: Any, where: str, limits: np.ndarray) -> dict[str, Any]:
    """A graph as arrays with one row for each node, edge and graph."""
    if is_graphs(item):
        item = _fields_of_jraph(item, where)
    needed, optional = {"nodes", "senders", "receivers"}, {"edges", "globals"}
    where_packed = "pack_graphs()"
    if not isinstance(item, Mapping) or not needed <= item.keys() <= needed | optional:
        expected = "{'nodes', 'senders', 'receivers'}, and perhaps 'edges' and 'globals'"
        raise WrongTypeError(where, where_packed, trees.describe(item), expected)
    part = {name: jax.tree.map(np.asarray, item.get(name)) for name in ("nodes", *optional)}
    part |= {name: np.asarray(item[name]) for name in ("senders", "receivers")}
    n, m = check_batch(part["nodes"], where_packed, f"{where}['nodes']"), part["senders"].size
    end_nodes = part["senders"], part["receivers"]
    is_node = lambda x: x.dtype.kind in "iu" and 0 <= x.min() <= x.max() < n
    are_nodes = all(x.shape == (m,) and (m == 0 or is_node(x)) for x in end_nodes)
    rows_of_edges = {x.shape[:1] for x in jax.tree.leaves(part["edges"])}
    if not are_nodes or rows_of_edges - {(m,)}:
        got = f"senders {trees.describe(end_nodes[0])}, receivers {trees.describe(end_nodes[1])}"
        expected = f"integers from 0 to {n - 1} in both, and in 'edges' one row for each of {m}"
        raise DataError(where, where_packed, got, expected)
    part |= {
        "senders": end_nodes[0].astype(np.int32),
        "receivers": end_nodes[1].astype(np.int32),
        "globals": jax.tree.map(lambda x: x[None], part["globals"]),
        "graph_of_node": np.zeros(n, np.int32),
        "mask": np.ones(1, bool),
    }
    if np.any(_size(part) > limits):
        got, expected = f"{n} nodes, {m} edges", "at most {} nodes, {} edges, {} graphs"
        raise DataError(where, where_packed, got, expected.format(*limits))
    return part
