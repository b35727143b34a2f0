"""data.pack_graphs: graphs of different sizes as rows of one shape."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests.helpers import assert_trees_close, assert_trees_equal
from tsunax.errors import DataError, LossError, WrongTypeError

SIZES = {"nodes": 16, "edges": 40, "graphs": 3}


def graph_of(rng):
    """Nodes and edges drawn at random; some graphs have no edge."""
    n = int(rng.integers(1, 9))
    m = int(rng.integers(0, 2 * n))
    return {
        "nodes": {"x": rng.normal(size=(n, 3)).astype(np.float32)},
        "edges": rng.normal(size=(m, 2)).astype(np.float32),
        "senders": rng.integers(0, n, m),
        "receivers": rng.integers(0, n, m),
        "globals": np.float32(rng.normal()),
    }


GRAPHS = [graph_of(np.random.default_rng(i)) for i in range(50)]
PARAMS = {
    "message": jnp.asarray(np.random.default_rng(1).normal(size=(8, 5)), jnp.float32),
    "value": jnp.asarray(np.random.default_rng(2).normal(size=8), jnp.float32),
}


def values(params, graphs):
    """One value for each graph of a row."""
    x, n = graphs.nodes["x"], len(graphs.graph_of_node)
    between = jnp.concatenate([x[graphs.senders], x[graphs.receivers], graphs.edges], 1)
    messages = jax.ops.segment_sum(jnp.tanh(between @ params["message"]), graphs.receivers, n)
    per_node = jnp.tanh(jnp.concatenate([x, messages], 1) @ params["value"])
    return jax.ops.segment_sum(per_node, graphs.graph_of_node, len(graphs.mask))


def loss_fn(params, batch):
    errors = jax.vmap(values, (None, 0))(params, batch) - batch.globals
    return ts.Loss.mean(errors**2, batch.mask, metrics={"size": abs(errors)})


def alone(params, graph):
    """The same without packing: plain sums over one graph."""
    x, total = graph["nodes"]["x"], 0.0
    messages = [jnp.zeros(5) for _ in x]
    for edge, i, j in zip(graph["edges"], graph["senders"], graph["receivers"], strict=True):
        messages[j] += jnp.tanh(jnp.concatenate([x[i], x[j], edge]) @ params["message"])
    for node, message in zip(x, messages, strict=True):
        total += jnp.tanh(jnp.concatenate([node, message]) @ params["value"])
    return (total - graph["globals"]) ** 2


def test_every_graph_is_in_one_row_with_its_own_edges():
    packed, left = ts.data.pack_graphs(GRAPHS, **SIZES), list(GRAPHS)
    for r, present in enumerate(packed.mask):
        for g in np.flatnonzero(present):
            nodes = np.flatnonzero(packed.graph_of_node[r] == g)
            mine = np.flatnonzero(np.isin(packed.receivers[r], nodes))
            found = next(i for i, x in enumerate(left) if x["globals"] == packed.globals[r, g])
            graph = left.pop(found)
            np.testing.assert_array_equal(packed.nodes["x"][r, nodes], graph["nodes"]["x"])
            np.testing.assert_array_equal(packed.edges[r, mine], graph["edges"])
            np.testing.assert_array_equal(packed.senders[r, mine] - nodes[0], graph["senders"])
            np.testing.assert_array_equal(packed.receivers[r, mine] - nodes[0], graph["receivers"])
    assert not left
    assert (packed.receivers < SIZES["nodes"]).sum() == sum(len(x["edges"]) for x in GRAPHS)
    assert np.mean(packed.graph_of_node < SIZES["graphs"]) > 0.7  # first fit leaves little room


@pytest.mark.medium
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_gradient_of_packed_graphs_is_that_of_each_alone(accumulate):
    packed = ts.data.pack_graphs(GRAPHS[:12], **SIZES)
    rows = -len(packed.mask) % 4  # whole micro-batches: rows without a graph weigh nothing
    packed = jax.tree.map(lambda x: np.concatenate([x, np.zeros((rows, *x.shape[1:]), x.dtype)]), packed)
    state = ts.setup(ts.rules.sgd(0.1), PARAMS)
    value, grads = ts.value_and_grad(loss_fn, accumulate=accumulate)(state, packed)
    mean = lambda params: sum(alone(params, x) for x in GRAPHS[:12]) / 12
    loss, expected = jax.value_and_grad(mean)(PARAMS)
    np.testing.assert_allclose(value.compute(), loss, rtol=1e-5)
    assert_trees_close(grads, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.medium
def test_a_run_compiles_once_is_evaluated_per_graph_and_spread_over_devices():
    packed = ts.data.pack_graphs(GRAPHS, **SIZES)
    step, make = ts.train_step(loss_fn), lambda: ts.setup(ts.rules.adam(1e-2), PARAMS)
    data = lambda: ts.batches(packed, 8, shuffle=True, drop_remainder=True)
    one, history = ts.fit(step, make(), data(), epochs=3, progress=False)
    assert history["loss"][-1] < history["loss"][0]
    mesh = ts.mesh(devices=jax.devices()[:4])
    many, _ = ts.fit(step, ts.shard(make(), mesh), data(), epochs=3, progress=False)
    assert_trees_close(one.params, many.params, rtol=2e-4, atol=1e-5)
    found = ts.evaluate(ts.eval_step(loss_fn), one, ts.batches(packed, 8))
    each = [float(alone(one.params, x)) for x in GRAPHS]
    np.testing.assert_allclose(found["loss"], np.mean(each), rtol=1e-4)
    np.testing.assert_allclose(found["size"], np.mean(np.sqrt(each)), rtol=1e-4)


def test_graphs_without_edge_values_and_targets():
    bare = [{k: v for k, v in x.items() if k not in ("edges", "globals")} for x in GRAPHS]
    packed, full = (ts.data.pack_graphs(x, **SIZES) for x in (bare, GRAPHS))
    assert packed.edges is None and packed.globals is None
    assert_trees_equal(packed, full._replace(edges=None, globals=None))


def test_nodes_may_be_of_a_class_that_compares_by_identity():
    class Nodes:
        def __init__(self, x):
            self.x = x

    jax.tree_util.register_pytree_node(Nodes, lambda n: ((n.x,), None), lambda _, children: Nodes(*children))
    items = [{**x, "nodes": Nodes(x["nodes"])} for x in GRAPHS]
    packed, plain = (ts.data.pack_graphs(x, **SIZES) for x in (items, GRAPHS))
    assert_trees_equal(packed.nodes.x, plain.nodes)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"senders": [0, 5], "receivers": [1, 0]},
            r"items\[1\] at pack_graphs\(\): got senders int64\[2\], .* expected integers from 0 to 1",
        ),
        ({"senders": [0, -1], "receivers": [1, 0]}, r"expected integers from 0 to 1"),
        ({"senders": [0.5, 1.0]}, r"items\[1\] .*got senders float64\[2\].*, expected integers from 0 to 1"),
        ({"senders": [0], "receivers": [0, 1]}, r"items\[1\] .*receivers int64\[2\], expected .* for each of 1"),
        ({"nodes": np.zeros((0, 3))}, r"items\[1\]\['nodes'\] at pack_graphs\(\): got 0 rows"),
        ({"nodes": np.zeros((9, 3))}, r"got 9 nodes, 2 edges, expected at most 4 nodes, 5 edges, 2 graphs"),
        (
            {"nodes": np.zeros((2, 4))},
            r"items\[1\] at pack_graphs\(\): got .*float64\[4\] each.*expected .*float64\[3\]",
        ),
        ({"receivers": [[1], [0]]}, r"items\[1\] .*receivers int64\[2,1\], expected .* for each of 2"),
        ({"nodes": {}}, r"items\[1\]\['nodes'\] at pack_graphs\(\): got an empty dict"),
        ({"nodes": np.float32(1)}, r"items\[1\]\['nodes'\].*got float32\[\], expected an array with rows"),
    ],
)
def test_bad_graphs_are_named(change, message):
    good = {"nodes": np.zeros((2, 3)), "senders": [0, 1], "receivers": [1, 0]}
    with pytest.raises(DataError, match=message):
        ts.data.pack_graphs([good, good | change], nodes=4, edges=5, graphs=2)


def test_items_of_another_kind_are_named():
    with pytest.raises(DataError, match=r"^items at pack_graphs\(\): got none, expected one at least"):
        ts.data.pack_graphs([], nodes=4, edges=5, graphs=2)
    for item in (np.zeros(3), {"nodes": np.zeros(3)}, {"x": 1}):
        with pytest.raises(WrongTypeError, match=r"^items\[0\] at pack_graphs\(\): .*expected \{'nodes', 'senders'"):
            ts.data.pack_graphs([item], nodes=4, edges=5, graphs=2)


# --- the tuples of jraph -------------------------------------------------------------------------


class GraphsTuple(NamedTuple):
    """As jraph's: graphs beside each other, the last of them padding."""

    nodes: Any
    edges: Any
    receivers: Any
    senders: Any
    globals: Any
    n_node: Any
    n_edge: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class GraphsClass:
    """The same as a dataclass."""

    nodes: Any
    receivers: Any
    senders: Any
    globals: Any
    n_node: Any


def graphs_tuple(seed, kind=GraphsTuple):
    rng = np.random.default_rng(seed)
    fields = {
        "nodes": rng.normal(size=(16, 3)).astype(np.float32),
        "receivers": rng.integers(0, 15, 40).astype(np.int32),
        "senders": rng.integers(0, 15, 40).astype(np.int32),
        "globals": rng.normal(size=4).astype(np.float32),
        "n_node": np.array([5, 4 + seed % 2, 5 - seed % 2, 2], np.int32),
    }
    more = {"edges": None, "n_edge": np.array([10, 10, 10, 10], np.int32)} if kind is GraphsTuple else {}
    return kind(**fields, **more)


def loss_of_tuple(params, batch):
    graphs = batch["graphs"] if isinstance(batch, dict) else batch
    targets = batch["y"] if isinstance(batch, dict) else graphs.globals
    x = graphs.nodes @ params["w"]
    x = x + jax.ops.segment_sum(x[graphs.senders], graphs.receivers, 16)
    owner = jnp.repeat(jnp.arange(4), graphs.n_node, total_repeat_length=16)
    return ts.Loss.mean((jax.ops.segment_sum(x, owner, 4) - targets) ** 2, jnp.arange(4) < 3)


@pytest.mark.medium
@pytest.mark.parametrize(
    "make",
    [
        graphs_tuple,
        pytest.param(lambda i: graphs_tuple(i, GraphsClass), marks=pytest.mark.medium),
        pytest.param(lambda i: {"graphs": graphs_tuple(i), "y": np.ones(4, np.float32)}, marks=pytest.mark.medium),
    ],
    ids=["NamedTuple", "dataclass", "beside labels"],
)
def test_tuples_of_graphs_are_batches(make):
    """Their leaves have rows of nodes, edges and graphs: loops give the numbers of steps one by one."""
    start = lambda: ts.setup(ts.rules.sgd(0.01), {"w": jnp.ones(3)})
    data, step, state, losses = [make(i) for i in range(3)], ts.train_step(loss_of_tuple), start(), []
    for batch in data:
        state, info = step(state, batch)
        losses.append(float(info.loss))
    for given in (data, ts.prefetch(data, jax.devices()[0])):
        trained, history = ts.fit(step, start(), given, epochs=1, log_every=1, progress=False)
        assert_trees_close(trained.params, state.params, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(history["loss"], losses, rtol=1e-6)
    score = ts.eval_step(loss_of_tuple)
    expected = np.mean([float(score(state, batch).compute()) for batch in data])  # of three graphs each
    np.testing.assert_allclose(ts.evaluate(score, state, data)["loss"], expected, rtol=1e-6)


def test_tuples_of_graphs_have_their_rows_where_rows_are_needed():
    state, data = ts.setup(ts.rules.sgd(0.01), {"w": jnp.ones(3)}), [graphs_tuple(0)]
    step = ts.train_step(loss_of_tuple)
    mixed = {"graphs": graphs_tuple(0), "y": np.ones(3, np.float32)}
    calls = {
        r"got 4 rows in batch\['graphs'\].n_node, 3 rows in batch\['y'\]": lambda: ts.fit(
            step, state, [mixed], steps=1, progress=False
        ),
        r"got 16 rows in arrays.nodes, 40 rows in arrays.receivers": lambda: ts.batches(graphs_tuple(0), 2),
        r"rows at batch: got batch.nodes \(16, 3\)": lambda: ts.fit(
            ts.train_step(loss_of_tuple, accumulate=2), state, data, steps=1, progress=False
        ),
        r"data: got GraphsTuple .* One batch: \[batch\]": lambda: ts.fit(step, state, data[0], steps=1, progress=False),
        r"items\[0\] at pack_graphs\(\): got 4 graphs, expected one. jraph.unbatch": lambda: ts.data.pack_graphs(
            data, **SIZES
        ),
    }
    for text, call in calls.items():
        with pytest.raises((DataError, WrongTypeError, LossError), match=text):
            call()


def test_graphs_of_jraph_are_packed_as_dicts_are():
    def tuple_of(graph):
        n, m = len(graph["nodes"]["x"]), len(graph["edges"])
        rest = {"globals": graph["globals"][None], "n_node": np.array([n]), "n_edge": np.array([m])}
        return GraphsTuple(**(graph | rest))

    packed = ts.data.pack_graphs([tuple_of(graph) for graph in GRAPHS], **SIZES)
    assert_trees_equal(packed, ts.data.pack_graphs(GRAPHS, **SIZES))
