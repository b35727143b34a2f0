"""Paths, patterns, parts, checks, norms and owners, on every container that parameters come in."""

import dataclasses
import fnmatch
import math
import os
import re
import subprocess
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import equinox
import flax.linen as nn
import flax.struct
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
import tsunax as ts
from flax import nnx
from flax.core import meta
from flax.core.frozen_dict import freeze as frozen_dict
from hypothesis import given, settings
from tsunax import errors, guard
from tsunax._core import checks, patterns, trees
from tsunax.errors import ParamsError, PatternError, WrongTypeError, unknown
from tsunax.rules import leaf_owners

# jax.experimental.enable_x64 is gone from new releases, jax.enable_x64 not yet in 0.7.2
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


class Pair(NamedTuple):
    w: Any
    b: Any


@jtu.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scale:
    """A user's own class, with a field that is called like a flax wrapper's."""

    value: Any
    bias: Any = None
    axis: int = dataclasses.field(default=0, metadata={"static": True})


@jtu.register_dataclass
@dataclasses.dataclass(frozen=True)
class Only:
    value: Any


class Odd(meta.AxisMetadata, flax.struct.PyTreeNode):
    """Linen metadata with a second child, named like what is inside of the first."""

    value: Any
    a: Any

    def unbox(self):
        return self.value

    def replace_boxed(self, val):
        return self.replace(value=val)

    add_axis = remove_axis = lambda self, index, params: self


class Net(nnx.Module):
    def __init__(self):
        self.lin = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.value = nnx.Param(jnp.ones(2))


def leaf(n=3):
    return jnp.arange(1.0, n + 1)


def linen_params(init=nn.initializers.ones):
    return nn.Dense(3, kernel_init=init).init(jax.random.key(0), jnp.ones((1, 2)))["params"]


CONTAINERS = {
    "dict": lambda: {"a": leaf(), "b": {"c": leaf(), "d": leaf()}},
    "ordered dict": lambda: OrderedDict(z=leaf(), a=leaf()),
    "int keys": lambda: {10: leaf(), 9: {0: leaf()}},
    "list": lambda: [leaf(), [leaf()], leaf()],
    "tuple": lambda: (leaf(), (leaf(),)),
    "list of pairs": lambda: [(leaf(), leaf()), (leaf(), leaf())],
    "namedtuple": lambda: Pair(leaf(), Pair(leaf(), None)),
    "dataclass": lambda: {"s": Scale(leaf(), leaf(), axis=2), "t": Scale(leaf())},
    "with None": lambda: {"a": None, "b": (leaf(), None), "c": [None]},
    "with empty parts": lambda: {"a": {}, "b": [(), leaf()], "c": []},
    "bare array": leaf,
    "python and numpy numbers": lambda: {"a": 1.0, "b": np.ones(2), "c": np.float32(2)},
    "frozen dict": lambda: frozen_dict({"dense": {"kernel": leaf(), "bias": leaf()}}),
    "linen params": linen_params,
    "linen boxes": lambda: linen_params(nn.with_partitioning(nn.initializers.ones, ("x", "y"))),
    "linen logical boxes": lambda: linen_params(nn.with_logical_partitioning(nn.initializers.ones, ("x", "y"))),
    "nnx split": lambda: nnx.split(Net())[1],
    "nnx state": lambda: nnx.state(Net(), nnx.Param),
    "nnx module": Net,
    "nnx variables": lambda: {"a": nnx.Param(leaf()), "value": nnx.Param({"k": leaf()})},
    "equinox": lambda: equinox.filter(equinox.nn.MLP(2, 2, 3, 1, key=jax.random.key(0)), equinox.is_array),
    "equinox without bias": lambda: equinox.nn.Linear(2, 2, use_bias=False, key=jax.random.key(0)),
}


@pytest.fixture(params=CONTAINERS)
def tree(request):
    return CONTAINERS[request.param]()


def paths(tree):
    return [trees.path_str(name) for name, _, _ in trees.leaves_with_names(tree)]


def chosen(where, tree, **options):
    flags = patterns.select(where, tree, **options)
    return {path for path, flag in zip(paths(tree), flags, strict=True) if flag}


def is_same(a, b):
    """The same structure and, leaf by leaf, the same objects."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(x is y for x, y in pairs)


def every(tree):
    return (True,) * len(jax.tree.leaves(tree))


def flags_for(tree):
    n = len(jax.tree.leaves(tree))
    yield from ([True] * n, [False] * n, [i % 2 == 0 for i in range(n)], [i == n - 1 for i in range(n)])


# Leaves


@pytest.mark.parametrize(
    ("x", "array", "inexact", "dtype"),
    [
        (jnp.ones(2, jnp.bfloat16), True, True, jnp.bfloat16),
        (np.ones(2), True, True, np.float64),
        (np.float64(1), True, True, np.float64),
        (np.arange(2), True, False, np.int64),
        (np.array(["a"]), True, False, np.dtype("<U1")),
        (jax.ShapeDtypeStruct((2,), jnp.float16), False, True, np.float16),
        (jnp.zeros(2, jnp.float8_e4m3fn), True, True, jnp.float8_e4m3fn),
        (1.0, False, True, np.float32),
        (1j, False, True, np.complex64),
        (1, False, False, np.int32),
        (True, False, False, np.bool_),
        ("a", False, False, None),
        (None, False, False, None),
        (print, False, False, None),
    ],
)
def test_what_is_a_leaf(x, array, inexact, dtype):
    assert trees.is_array(x) is array
    assert trees.is_inexact(x) is inexact
    assert trees.dtype_of(x) == dtype and (trees.dtype_of(x) is None) == (dtype is None)
    assert trees.is_traced(x) is False


def test_a_random_key_is_an_array_but_not_inexact():
    assert trees.is_array(jax.random.key(0)) and not trees.is_inexact(jax.random.key(0))


@pytest.mark.parametrize("trace", [jax.jit, jax.vmap, jax.grad])
def test_is_a_traced_value_recognised(trace):
    seen = []
    trace(lambda x: seen.append((trees.is_traced(x), trees.is_array(x), trees.is_inexact(x))) or x)(
        jnp.ones(()) if trace is not jax.vmap else jnp.ones(2)
    )
    assert seen == [(True, True, True)]


# Paths


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        (jtu.DictKey("a/b"), "a/b"),
        (jtu.DictKey(3), "3"),
        (jtu.SequenceKey(0), "0"),
        (jtu.GetAttrKey("kernel"), "kernel"),
        (jtu.FlattenedIndexKey(2), "2"),
        ("already a name", "already a name"),
    ],
)
def test_what_is_a_key_called(entry, name):
    assert trees.key_name(entry) == name


def test_how_are_paths_written():
    path = (jtu.DictKey("encoder"), jtu.SequenceKey(0), jtu.GetAttrKey("kernel"))
    assert trees.names(path) == ("encoder", "0", "kernel")
    assert trees.path_str(path) == trees.path_str(("encoder", "0", "kernel")) == "encoder/0/kernel"
    assert trees.access_str("params", path) == "params['encoder'][0].kernel"
    assert (trees.path_str(()), trees.shown_path(()), trees.access_str("params", ())) == ("", "<root>", "params")


def test_are_leaves_in_flatten_order_with_the_paths_of_jax(tree):
    found = trees.leaves_with_names(tree)
    keyed = jtu.tree_flatten_with_path(tree)[0]
    assert [path for _, path, _ in found] == [path for path, _ in keyed]
    assert all(a is b for (_, _, a), (_, b) in zip(found, keyed, strict=True))
    assert len({name for name, _, _ in found}) == len(keyed)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("dict", ["a", "b/c", "b/d"]),
        ("int keys", ["9/0", "10"]),
        ("list of pairs", ["0/0", "0/1", "1/0", "1/1"]),
        ("namedtuple", ["w", "b/w"]),
        ("dataclass", ["s/value", "s/bias", "t/value"]),
        ("with None", ["b/0"]),
        ("bare array", [""]),
        ("frozen dict", ["dense/bias", "dense/kernel"]),
        ("linen boxes", ["bias", "kernel"]),
        ("linen logical boxes", ["bias", "kernel"]),
        ("nnx state", ["lin/bias", "lin/kernel", "norm/bias", "norm/scale", "value"]),
        ("nnx variables", ["a", "value/k"]),
        ("equinox without bias", ["weight"]),
    ],
)
def test_what_are_the_leaves_of_a_container_called(kind, expected):
    assert paths(CONTAINERS[kind]()) == expected


def test_does_an_nnx_module_have_the_names_of_its_state():
    assert [p for p in paths(Net()) if "rngs" not in p] == paths(nnx.split(Net())[1])


def test_what_does_a_raw_path_of_nnx_end_in():
    # Should a flax release change this, `leaves_with_names` must learn the new key.
    for tree in (nnx.split(Net())[1], nnx.state(Net(), nnx.Param), Net()):
        for path, _ in jtu.tree_flatten_with_path(tree)[0]:
            assert path[-1] == jtu.GetAttrKey("value")


@pytest.mark.parametrize("own", [Scale(1.0), Scale(1.0, 2.0), Only(1.0), {"value": 1.0}])
def test_does_a_users_own_value_stay_a_name(own):
    assert paths({"s": own})[0] == "s/value"
    assert paths(own)[0] == "value"


def test_are_boxes_seen_through_at_any_depth():
    assert paths(nnx.Param(leaf())) == [""]
    assert paths({"a": nnx.Param({"value": {"b": leaf()}})}) == ["a/value/b"]
    assert paths({"a": nnx.Param(nn.Partitioned(leaf(), ("x",)))}) == ["a"]
    assert paths({"a": nnx.Param(Only(nnx.Param(leaf())))}) == ["a/value"]


def test_is_the_wrapper_kept_where_dropping_it_would_make_two_leaves_one():
    assert paths({"x": Odd({"a": leaf()}, leaf()), "y": nnx.Param(leaf())}) == ["x/value/a", "x/a", "y"]


# Patterns

NET = {
    "encoder": [{"kernel": 1.0, "bias": 2.0}, {"kernel": 3.0, "bias": 4.0}],
    "decoder": {"kernel": 5.0, "bias": 6.0},
    "scale": 7.0,
}
KERNELS = {"encoder/0/kernel", "encoder/1/kernel", "decoder/kernel"}
BIASES = {"encoder/0/bias", "encoder/1/bias", "decoder/bias"}
ENCODER = {"encoder/0/kernel", "encoder/0/bias", "encoder/1/kernel", "encoder/1/bias"}
ALL = KERNELS | BIASES | {"scale"}


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("**", ALL),
        ("**/**", ALL),
        ("scale", {"scale"}),
        ("*", {"scale"}),
        ("*/*", {"decoder/kernel", "decoder/bias"}),
        ("scale/**", {"scale"}),
        ("**/scale", {"scale"}),
        ("encoder/**", ENCODER),
        ("**/bias", BIASES),
        ("encoder/**/bias", BIASES & ENCODER),
        ("encoder/*/bias", BIASES & ENCODER),
        ("encoder/0/*", {"encoder/0/kernel", "encoder/0/bias"}),
        ("**/0/**", {"encoder/0/kernel", "encoder/0/bias"}),
        ("**/encoder/**/0/**/kernel/**", {"encoder/0/kernel"}),
        ("encoder/[0-9]/k*", KERNELS & ENCODER),
        ("encoder/[!0]/**", {"encoder/1/kernel", "encoder/1/bias"}),
        ("?ecoder/kerne[l]", {"decoder/kernel"}),
        ("**/[kb]*", ALL - {"scale"}),
        (["**"], ALL),
        (("**", "!**/bias"), ALL - BIASES),
        (["**", "!encoder/**", "encoder/0/**"], ALL - {"encoder/1/kernel", "encoder/1/bias"}),
        (["encoder/**", "!encoder/0/**", "scale"], {"encoder/1/kernel", "encoder/1/bias", "scale"}),
        (["!**/bias", "**"], ALL),
        (lambda path, x: path.endswith("bias"), BIASES),
        (lambda path, x: np.bool_(x > 5), {"decoder/bias", "scale"}),
        (jtu.Partial(lambda name, path, x: path == name, "scale"), {"scale"}),
        (jax.tree.map(lambda x: x > 5, NET), {"decoder/bias", "scale"}),
        (jax.tree.map(lambda x: np.bool_(x < 2), NET), {"encoder/0/kernel"}),
    ],
)
def test_what_does_each_form_of_where_select(where, expected):
    assert chosen(where, NET) == expected


def test_a_selection_is_a_tuple_of_bools_and_the_same_under_compile_where():
    flags = patterns.select("**/bias", NET)
    assert isinstance(flags, tuple) and all(type(flag) is bool for flag in flags)
    assert patterns.compile_where("**/bias")(NET) == flags
    assert all(type(f) is bool for f in patterns.select(lambda p, x: np.bool_(True), NET))


def test_does_everything_select_every_leaf(tree):
    assert all(patterns.select("**", tree))
    assert all(patterns.select(lambda path, x: True, tree))
    assert all(patterns.select(jax.tree.map(lambda _: True, tree), tree))


def test_does_the_name_of_a_leaf_select_just_that_leaf(tree):
    for i, path in enumerate(paths(tree)):
        flags = patterns.select(path or "**", tree)
        assert [j for j, flag in enumerate(flags) if flag] == [i]


HAIKU = {"head/~/linear_0": {"w": 1.0, "b": 2.0}, "body": {"w": 3.0}, "a*b": 4.0, "w[0]": 5.0, "w0": 6.0}


def test_does_a_key_with_a_slash_match_as_it_is_printed():
    for pattern, expected in {
        "head/~/linear_0/w": [1.0],
        "head/~/linear_0/**": [2.0, 1.0],
        "head/**": [2.0, 1.0],
        "head/*/*/b": [2.0],
        "**/linear_*/w": [1.0],
        "**/w": [3.0, 1.0],
        "*/w": [3.0],
        "w[0]": [6.0, 5.0],
        "a*b": [4.0],
    }.items():
        assert trees.take(HAIKU, patterns.select(pattern, HAIKU)) == expected, pattern
    assert trees.take(HAIKU, patterns.select(["**", "!head/~/linear_0/w", "!w[0]"], HAIKU)) == [4.0, 3.0, 2.0]
    assert patterns.select("<root>", jnp.ones(2)) == (True,)


def test_does_every_function_take_a_printed_path_with_a_slash(tmp_path):
    shown = "head/~/linear_0/w"
    params = lambda: {"head/~/linear_0": {"w": jnp.ones(2), "b": jnp.ones(2)}, "body": {"w": jnp.ones(2)}}
    trained = lambda state: [trees.path_str(path) for path in trees.paths(ts.trainable(state))]
    state = ts.setup(ts.rules.adamw(0.1, mask=shown), params())
    assert trained(ts.setup(ts.rules.sgd(0.1), params(), trainable="head/**")) == ["head/~/linear_0/b", shown]
    assert ts.hyperparams(ts.adjust(state, shown, learning_rate=0.5))[f"learning_rate@{shown}"] == 0.5
    parts = ts.rules.partition({"head/**": ts.rules.sgd(0.1), "**": ts.rules.adam(1e-3)})
    split = ts.setup(parts, params())
    assert ts.hyperparams(split)["learning_rate@head/**"] == 0.1
    grads = jax.tree.map(jnp.ones_like, params())
    moved, _ = ts.update(ts.freeze(state, shown), grads)
    weight, bias = (moved.params["head/~/linear_0"][name] for name in "wb")
    assert float(weight[0]) == 1 and float(bias[0]) < 1
    with ts.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(moved)
        checkpoints.wait()
        like = ts.setup(ts.rules.sgd(0.1), jax.tree.map(jnp.zeros_like, params()))
        back = checkpoints.restore(like, partial="head/**", params_only=True).state.params
    assert float(back["head/~/linear_0"]["w"][0]) == 1 and float(back["body"]["w"][0]) == 0


def test_does_the_last_match_of_a_list_decide():
    tree = {"a": {"b": 1.0, "c": 2.0}, "d": 3.0}
    for where, expected in {
        ("!a/b", "**"): [1.0, 2.0, 3.0],
        ("**", "!a/b"): [2.0, 3.0],
        ("**", "!a/*", "a/c"): [2.0, 3.0],
    }.items():
        assert trees.take(tree, patterns.select(list(where), tree)) == expected, where


def test_are_components_matched_with_case_and_in_full():
    assert patterns.select("Bias", {"Bias": 1.0, "bias": 2.0, "bias2": 3.0}) == (True, False, False)
    assert patterns.select("[[]w]", {"[w]": 1.0, "w": 2.0}) == (True, False)
    assert patterns.select("a.b+", {"a.b+": 1.0, "aXbb": 2.0}) == (True, False)
    assert patterns.select("*a", {"a\n": 1.0, "x\na": 2.0}) == (False, True)


COMPONENTS = st.sampled_from(["a", "b", "ab", "0", "a/b", "A", "b\n"])
PATTERNS = st.lists(st.sampled_from(["a", "b", "*", "**", "a*", "?b", "[ab]", "[!a]*"]), min_size=1)


def naive_match(parts, name):
    """The definition, at exponential cost."""
    if not parts:
        return not name
    if parts[0] == "**":
        return any(naive_match(parts[1:], name[i:]) for i in range(len(name) + 1))
    head = bool(name) and fnmatch.fnmatchcase(name[0], parts[0])
    return head and naive_match(parts[1:], name[1:])


@pytest.mark.medium
@settings(max_examples=400)
@given(PATTERNS, st.lists(st.lists(COMPONENTS, max_size=6), min_size=1, max_size=6))
def test_does_a_pattern_match_what_its_definition_says(parts, some_names):
    glob = patterns._glob("/".join(parts))
    for name in some_names:
        assert patterns._fits(glob.tests, name) == naive_match(parts, name), (parts, name)


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        ("", ""),
        ("!", ""),
        ("/a", ""),
        ("a/", ""),
        ("a//b", ""),
        ("!a//b", ""),
        ("***", "***"),
        ("a**b", "a**b"),
        ("x/y/z**", "z**"),
        ("[", "["),
        ("ab/c[de", "c[de"),
        ("[a]/x[]", "x[]"),
        ("[!]", "[!]"),
        ("a[/]b", "a["),
    ],
)
def test_where_is_a_pattern_malformed(pattern, part):
    expected = (
        f"pattern {pattern!r}: got the component {part!r}, "
        "expected names, '*', '?', '[..]' or a whole '**' between single '/'."
    )
    for where in (pattern, ["**", pattern]):
        with pytest.raises(PatternError, match=re.escape(expected)):
            patterns.compile_where(where)


@pytest.mark.parametrize("where", ["!**/bias", ["!a"], ("!a", "!**")])
def test_are_exclusions_alone_refused(where):
    with pytest.raises(PatternError, match=r"where: got only exclusions .*Start with '\*\*'\."):
        patterns.select(where, NET)


def test_patterns_of_odd_keys():
    tree = {"": 1.0, "!a": {"b": 2.0}, "a": {"": 3.0}}
    assert patterns.select("*", tree) == (True, False, False)  # the empty key is a component
    assert patterns.select("a/*", tree) == (False, False, True)
    assert patterns.select("?a/b", tree) == (False, True, False)
    assert patterns.select(["**", "!!a/b"], tree) == (True, False, True)
    assert patterns.select("**", 1.0) == (True,)


@pytest.mark.parametrize(
    ("where", "quoted", "near"),
    [
        ("encodr/**", "'encodr/**'", "'encoder/0/bias'"),
        ("**/kernal", "'**/kernal'", "'decoder/kernel'"),
        (["**", "!**/bais"], "'!**/bais'", "'decoder/bias'"),
        (["scal", "**"], "'scal'", "'scale'"),
        ("bias", "'bias'", "'decoder/bias'"),
    ],
)
def test_does_a_pattern_without_a_match_name_the_nearest_paths(where, quoted, near):
    text = rf"pattern {re.escape(quoted)}: got no match among 7 leaves, expected at least one\."
    with pytest.raises(PatternError, match=text) as error:
        patterns.select(where, NET)
    listed = str(error.value).partition("Nearest: ")[2]
    assert near in listed and len(listed.split(", ")) == 3


@pytest.mark.parametrize("where", [["**", "!**"], lambda path, x: False, jax.tree.map(lambda x: False, NET), []])
def test_is_an_empty_selection_an_error(where):
    with pytest.raises(PatternError, match=r"where: got .*, which selects nothing, expected at least one leaf\."):
        patterns.select(where, NET)


@pytest.mark.parametrize("empty", [{}, [], None, {"a": [None, {}]}])
@pytest.mark.parametrize("where", ["**", "a/*", lambda path, x: True])
def test_are_no_parameters_an_error(empty, where):
    with pytest.raises(ParamsError, match=r"no parameters at params: got \w+ without leaves"):
        patterns.select(where, empty)


@pytest.mark.parametrize(
    ("result", "kind"), [(1, "1 (int)"), (None, "None"), (np.ones(1, bool), "bool[1]"), ("yes", "'yes' (str)")]
)
def test_must_a_predicate_return_a_bool(result, kind):
    text = f"result of the predicate at params['decoder']['bias']: got {kind}, expected True or False."
    with pytest.raises(PatternError, match=re.escape(text)):
        patterns.select(lambda path, x: result, NET)


def test_is_the_path_of_a_bare_array_empty_for_a_predicate():
    assert patterns.select(lambda path, x: path == "" and x is not None, leaf()) == (True,)
    with pytest.raises(PatternError, match=r"at params: got 1 \(int\)"):
        patterns.select(lambda path, x: 1, leaf())


def test_does_an_exception_of_the_predicate_come_through():
    with pytest.raises(ZeroDivisionError):
        patterns.select(lambda path, x: 1 / 0, NET)


def test_may_a_mask_be_a_list_a_bare_bool_or_a_callable_module():
    assert patterns.select([True, False], [1.0, 2.0]) == (True, False)
    assert patterns.select(Pair(False, True), Pair(1.0, 2.0)) == (False, True)
    with pytest.raises(PatternError, match=r"leaf of the bool tree at params\.w: got 'w' \(str\)"):
        patterns.select(Pair("w", "b"), Pair(1.0, 2.0))  # a tree, not a list of patterns
    assert patterns.select(True, leaf()) == patterns.select(np.bool_(True), leaf()) == (True,)
    linear = equinox.nn.Linear(2, 2, key=jax.random.key(0))
    mask = jax.tree.map(lambda x: x.ndim > 1, linear)
    assert callable(mask) and patterns.select(mask, linear) == (True, False)


def test_is_a_none_of_the_mask_aligned_with_a_none_of_the_tree():
    assert patterns.select({"a": True, "b": None}, {"a": 1.0, "b": None}) == (True,)
    with pytest.raises(PatternError, match=r"bool tree at params\['b'\]: got None, expected True or False\. Make it"):
        patterns.select({"a": True, "b": None}, {"a": 1.0, "b": 2.0})
    with pytest.raises(PatternError, match=r"bool tree at params\['b'\]: got True \(bool\), expected None"):
        patterns.select({"a": True, "b": True}, {"a": 1.0, "b": None})


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        ({"a": True}, "at params['b']: got nothing, expected dict with c, d"),
        ({"a": True, "b": {"c": True, "d": True, "e": True}}, "at params['b']['e']: got True (bool), expected nothing"),
        ({"a": True, "b": True}, "at params['b']: got True (bool), expected dict with c, d"),
        ({"a": True, "b": [True, True]}, "at params['b']: got list of 2, expected dict with c, d"),
        ({"b": {"c": True, "d": True}}, "at params['a']: got nothing, expected True or False"),
        (True, "at params: got True (bool), expected dict with a, b"),
        ([True, True], "at params: got list of 2, expected dict with a, b"),
    ],
)
def test_where_does_a_mask_differ_from_its_tree(mask, text):
    with pytest.raises(PatternError, match=re.escape(f"bool tree {text}")):
        patterns.select(mask, CONTAINERS["dict"]())


@pytest.mark.parametrize(("bad", "kind"), [(1, "1 (int)"), ("yes", "'yes' (str)"), (np.ones(()), "float64[]")])
def test_are_leaves_of_a_mask_bools(bad, kind):
    text = f"leaf of the bool tree at params['b']['d']: got {kind}, expected True or False."
    with pytest.raises(PatternError, match=re.escape(text)):
        patterns.select({"a": True, "b": {"c": True, "d": bad}}, CONTAINERS["dict"]())


@pytest.mark.parametrize(
    ("where", "kind"),
    [(3, "int"), (None, "NoneType"), (2.5, "float"), ({"a"}, "set"), (["**", 3], "list"), (("a", True), "tuple")]
    + [(re.compile("a"), "Pattern"), (np.ones(2, bool), "ndarray"), (b"**", "bytes")],
    ids=str,
)
def test_is_anything_else_refused_with_the_four_forms(where, kind):
    forms = "('encoder/**'), a list of patterns, a predicate f(path, leaf) or a bool tree."
    text = rf"where: got .*\({kind}\), expected a pattern {re.escape(forms)}"
    with pytest.raises(WrongTypeError, match=text):
        patterns.compile_where(where)


def test_can_flags_be_selected_under_tracing():
    assert jax.jit(lambda t: trees.partition(t, patterns.select("**/bias", t))[0])(NET)["scale"] is None
    shapes = jax.eval_shape(lambda: NET)
    assert patterns.select(["**", "!scale"], shapes) == patterns.select(["**", "!scale"], NET)


# Near names


def test_which_names_are_nearest():
    known = ["encoder/0/kernel", "encoder/0/bias", "decoder/kernel", "scale"]
    assert patterns.nearest("**/kernal", known)[:2] == ["decoder/kernel", "encoder/0/kernel"]
    assert patterns.nearest("scal", known, 1) == ["scale"]
    assert patterns.nearest("anything", known, 9) and patterns.nearest("anything", []) == []


def test_what_is_said_of_an_unknown_name():
    known = ["learning_rate", "b1", "b2"]
    said = lambda *args: unknown("number", "adam()", *args)
    text = "number at adam(): got {!r}, expected one of learning_rate, b1, b2."
    for near in ("learning_rat", "lr"):
        assert said(near, known) == text.format(near) + " Did you mean 'learning_rate'?"
    assert said("temperature", known, "Sorry.") == text.format("temperature") + " Sorry."
    assert said("eta", known, "Sorry.") == text.format("eta") + " Did you mean 'learning_rate'? Sorry."
    assert said("x", []).endswith("got 'x', expected none.")
    assert said("zz", [f"n{i}" for i in range(30)]).endswith("n19, and 10 more.")


# Parts


def test_does_merge_undo_partition(tree):
    for flags in flags_for(tree):
        selected, rest = trees.partition(tree, flags)
        assert is_same(trees.merge(selected, rest), tree)
        assert is_same(trees.merge(rest, selected), tree)
        assert len(jax.tree.leaves(selected)) == sum(flags)
        assert len(jax.tree.leaves(rest)) == len(flags) - sum(flags)


def test_does_take_give_the_selected_leaves(tree):
    for flags in flags_for(tree):
        taken = trees.take(tree, flags)
        selected, _ = trees.partition(tree, flags)
        assert all(a is b for a, b in zip(taken, jax.tree.leaves(selected), strict=True))


def test_can_a_jitted_step_change_the_selected_part_only():
    params = {"a": jnp.ones(2), "b": None, "c": [jnp.ones(3), "a string"]}
    selected, rest = trees.partition(params, patterns.select("a", params))
    stepped = jax.jit(lambda part: jax.tree.map(lambda x: x + 1, part))(selected)
    whole = trees.merge(stepped, rest)
    np.testing.assert_array_equal(whole["a"], [2, 2])
    assert whole["b"] is None and whole["c"][0] is params["c"][0] and whole["c"][1] == "a string"


def test_can_the_parts_be_merged_inside_jit_and_grad(tree):
    flags = [trees.is_inexact(x) and i % 2 == 0 for i, x in enumerate(jax.tree.leaves(tree))]
    selected, rest = trees.partition(tree, flags)

    def total(part):
        leaves = jax.tree.leaves(trees.merge(part, rest))
        return sum(jnp.sum(x.astype(jnp.float32)) for x in map(jnp.asarray, filter(trees.is_inexact, leaves)))

    grads = jax.jit(jax.grad(total))(selected)
    assert trees.first_difference(grads, selected) is None
    assert all(np.all(np.asarray(g) == 1) for g in jax.tree.leaves(grads))


NODES = st.recursive(
    st.none() | st.integers() | st.just(()) | st.just({}),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Scale, inner, inner)
        | st.dictionaries(st.sampled_from("xy"), inner).map(frozen_dict)
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(NODES, st.data())
def test_are_partition_and_merge_inverse_on_any_tree(tree, data):
    n = len(jax.tree.leaves(tree))
    flags = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    selected, rest = trees.partition(tree, flags)
    assert is_same(trees.merge(selected, rest), tree)


def test_are_parts_that_do_not_belong_together_refused():
    with pytest.raises(ValueError, match="b"):
        trees.merge({"a": 1.0}, {"a": None, "b": 1.0})
    for wrong in (trees.take, trees.partition):
        with pytest.raises(ValueError, match="zip"):
            wrong([1.0, 2.0], (True,))


# Differences


def test_is_a_tree_different_from_itself(tree):
    assert trees.first_difference(tree, tree) is None
    assert trees.first_difference(jax.tree.map(lambda _: 0, tree), tree) is None


@pytest.mark.parametrize(
    ("got", "expected", "text"),
    [
        ({"a": 1.0}, {"a": leaf(2), "b": leaf()}, "at b: got nothing, expected float32[3]"),
        ({"a": 1.0, "c": "x"}, {"a": 1.0}, "at c: got 'x' (str), expected nothing"),
        ({"a": [1.0]}, {"a": (1.0,)}, "at a: got list of 1, expected tuple of 1"),
        ({"a": {"b": [1.0, 2.0]}}, {"a": {"b": [1.0]}}, "a/b/1: got 2.0 (float), expected nothing"),
        ({"a": {}}, {"a": {"b": None}}, "at a/b: got nothing, expected None"),
        ({"a": 1.0}, {"a": None}, "at a: got 1.0 (float), expected None"),
        ([1.0], None, "at <root>: got list of 1, expected None"),
        (Pair(1, 2), (1, 2), "at <root>: got Pair with w, b, expected tuple of 2"),
        ({"a": 1}, frozen_dict({"a": 1}), "at <root>: got dict with a, expected FrozenDict with a"),
        ([Scale(1, axis=1)], [Scale(1, axis=2)], "at 0: got other static fields of Scale"),
        ({"b": 1, "z": [1]}, {"b": (1,), "z": (1,)}, "at b: got 1 (int), expected tuple of 1"),
        ({str(i): 1 for i in range(9)}, 1, "with 0, 1, 2, 3, 4, 5, and 3 more, expected 1 (int)"),
    ],
)  # fmt: skip
def test_where_do_two_trees_differ_first(got, expected, text):
    found = trees.first_difference(got, expected)
    assert found is not None and text in found
    assert trees.first_difference(expected, got) is not None


@settings(max_examples=200)
@given(NODES, NODES)
def test_is_a_difference_found_if_and_only_if_there_is_one(a, b):
    same = jax.tree.structure(a) == jax.tree.structure(b)
    assert (trees.first_difference(a, b) is None) == same


# Checks


def good(tree):
    """Whatever of a container can be trained."""
    return tuple(trees.is_inexact(x) for x in jax.tree.leaves(tree))


def test_are_good_parameters_let_through(tree):
    tree = jax.tree.map(lambda x: np.float32(x) if isinstance(x, np.ndarray) else x, tree)
    names = ["/".join(name) for name, _, _ in trees.leaves_with_names(tree)]
    if "norm/mean" in names:  # all of it but its batch statistics
        with pytest.raises(ParamsError, match="batch statistics are not trained"):
            checks.check_params(tree, good(tree))
        checks.check_params(tree, patterns.select(["**", "!norm/mean", "!norm/var"], tree))
    else:
        checks.check_params(tree, good(tree))
    checks.check_aliases(tree, good(tree))


FAULTS = {
    "str": ("leaf that is no number at {}: got 'relu' (str), expected a float", "relu"),
    "object": ("leaf that is no number at {}: got object, expected a float", object()),
    "function": ("leaf that is no number at {}: got the function print, expected", print),
    "int": ("leaf that cannot be trained at {}: got dtype int32, expected", jnp.arange(2)),
    "python int": ("leaf that cannot be trained at {}: got dtype int32", 3),
    "bool": ("leaf that cannot be trained at {}: got dtype bool", jnp.ones(2, bool)),
    "python bool": ("leaf that cannot be trained at {}: got dtype bool", True),
    "uint8": ("leaf that cannot be trained at {}: got dtype uint8", np.ones(2, np.uint8)),
    "text array": ("leaf that cannot be trained at {}: got dtype <U1", np.array(["a"])),
    "object array": ("leaf that cannot be trained at {}: got dtype object", np.array([None])),
    "random key": ("leaf that cannot be trained at {}: got dtype key<fry>", jax.random.key(0)),
    "float64": ("leaf too wide for JAX at {}: got dtype float64, expected float32. It", np.ones(2)),
    "float64 scalar": ("leaf too wide for JAX at {}: got dtype float64", np.float64(1)),
    "complex128": ("leaf too wide for JAX at {}: got dtype complex128", np.ones(2, complex)),
    "zero size": ("leaf without elements at {}: got shape (2, 0), expected no 0", jnp.ones((2, 0))),
    "NaN": ("leaf with NaN or inf at {}: got 1 of 3 not", jnp.array([1.0, jnp.nan, 2.0])),
    "inf": ("leaf with NaN or inf at {}: got 2 of 2 not finite", np.float32([np.inf, -np.inf])),
    "bfloat16 NaN": ("leaf with NaN or inf at {}: got 2 of 2", jnp.full(2, jnp.nan, jnp.bfloat16)),
    "float8 NaN": ("leaf with NaN or inf at {}: got 2", jnp.full(2, jnp.nan, jnp.float8_e4m3fn)),
    "complex NaN": ("leaf with NaN or inf at {}: got 1 of 2", np.complex64([1, 1j * np.nan])),
    "python inf": ("leaf with NaN or inf at {}: got 1 of 1", float("inf")),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_is_a_leaf_that_cannot_be_trained_named(fault):
    text, bad = FAULTS[fault]
    params = {"a": [leaf(), {"w": bad}]}
    with pytest.raises(ParamsError, match=re.escape(text.format("params['a'][1]['w']"))) as error:
        checks.check_params(params, every(params))
    assert isinstance(error.value, ValueError) and isinstance(error.value, errors.TsunaxError)
    if isinstance(bad, (jax.Array, int, float)) or np.asarray(bad).dtype.kind in "fcub":
        checks.check_params(params, (True, False))  # unselected leaves may be any numbers
    else:  # but no program takes these as arguments
        with pytest.raises(ParamsError, match=re.escape(text.format("params['a'][1]['w']"))):
            checks.check_params(params, (True, False))


@pytest.mark.parametrize("fault", ["int", "bool", "str", "object"])
def test_is_it_said_where_else_such_a_leaf_can_live(fault):
    bad, text = FAULTS[fault][1], "Leave it out, trainable=['**', '!a/0'], or keep it in model_state."
    if fault in ("str", "object"):
        text = "eqx.partition(model, eqx.is_array) for equinox."
    with pytest.raises(ParamsError, match=re.escape(text)):
        checks.check_params({"a": [bad]}, (True,))
    assert patterns.select(["**", "!a/0"], {"a": [bad, 1.0]}) == (False, True)


def test_is_float64_fine_with_x64():
    with enable_x64(True):
        checks.check_params([np.ones(2), np.ones(2, complex), 1.0], (True,) * 3)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"a.b": 1.0, "a": {"b": 2.0}}, "params['a']['b'] and params['a.b']: got 'a.b' for both"),
        ({"a/b": 1.0, "a": {"b": 2.0}}, "params['a']['b'] and params['a/b']: got 'a/b' for both"),
        ({"a.b": {"c": 1.0}, "a": {"b.c": 2.0}}, "params['a']['b.c'] and params['a.b']['c']: got 'a.b.c' for both"),
    ],
)
def test_are_names_that_collide_shown_both(params, text):
    for flags in ((True, True), (True, False), (False, True)):
        with pytest.raises(ParamsError, match="names that collide at " + re.escape(text)):
            checks.check_params(params, flags)
    checks.check_params({**params, "z": 1.0}, (False, False, True))


def test_are_values_looked_at_only_where_there_are_some():
    bad = {"w": jnp.full(2, jnp.nan)}
    jax.jit(lambda p: checks.check_params(p, (True,)) or p)(bad)
    jax.vmap(lambda p: checks.check_params(p, (True,)) or p)(bad)
    with pytest.raises(ParamsError, match="a ShapeDtypeStruct"):
        checks.check_params(jax.eval_shape(lambda: bad), (True,))
    with pytest.raises(ParamsError, match="dtype int32"):
        jax.eval_shape(lambda p: checks.check_params(p, (True,)), jnp.arange(2))


@pytest.mark.parametrize("traced", [False, True])
def test_is_a_nan_found_in_arrays_that_are_spread_over_devices(traced):
    mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    two = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices()[:2], ("x",)), spread.spec)
    params = {
        "a": jax.device_put(jnp.ones(16), spread),
        "b": jax.device_put(jnp.ones(4).at[1].set(jnp.inf), two),
        "c": jax.device_put(jnp.ones(16), spread),
    }
    check = lambda _: checks.check_params(params, (True,) * 3)
    with pytest.raises(ParamsError, match=r"NaN or inf at params\['b'\]: got 1 of 4 not finite"):
        jax.eval_shape(check, 0) if traced else check(0)
    checks.check_params(params, (True, False, True))


def test_can_a_checked_leaf_still_be_donated():
    x = jnp.ones(1000)
    where = x.unsafe_buffer_pointer()
    checks.check_params([x], (True,))
    y = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert y.unsafe_buffer_pointer() == where and x.is_deleted()
    with pytest.raises(ParamsError, match=r"leaf without a buffer at params\[0\]: got a deleted array"):
        checks.check_params([x], (True,))


def test_are_shared_arrays_shown_with_both_paths():
    w = leaf()
    params = {"embed": w, "head": [leaf(), w], "x": 1.0, "y": 1.0, "n": None}
    for flags in ((True,) * 5, (True, False, False, False, False), (False, False, True, False, False)):
        text = "leaves at params['embed'] and params['head'][1]: got one array for both, expected an"
        with pytest.raises(ParamsError, match=re.escape(text)):
            checks.check_aliases(params, flags)
    checks.check_aliases(params, (False, True, False, True, True))


# Norms

SHAPES = [(), (7,), (33, 5), (64, 64), *[(3,)] * 12]


def random_tree(seed=0):
    """Leaves of about one weight each, so that the order of their sum shows in the last bits."""
    rng = np.random.default_rng(seed)
    return [np.float32(rng.normal(size=s) / max(np.prod(s), 1) ** 0.5) for s in SHAPES]


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("factor", [np.float32(1), np.complex64(1 + 2j)], ids=["real", "complex"])
def test_does_the_norm_have_the_bits_of_optax(run, factor):
    """Leaf by leaf its bits; with small leaves as one vector another order of the same sum."""
    ours, theirs = run(guard.global_norm), run(optax.tree.norm)
    apart = run(lambda tree: guard.global_norm(tree))  # a program of its own
    for seed in range(8):
        tree = [jnp.asarray(x * factor) for x in random_tree(seed)]
        with guard.tracing(True):
            norm = apart(tree)
        assert norm.dtype == jnp.float32 and norm.shape == ()
        assert np.asarray(norm).tobytes() == np.asarray(theirs(tree)).tobytes()
        np.testing.assert_allclose(ours(tree), norm, rtol=3e-7)


def test_the_norm_of_small_leaves_is_one_reduction():
    tree = [jnp.ones(n) for n in (3, 5, guard.SMALL, guard.SMALL + 1, 2)]
    count = lambda: str(jax.make_jaxpr(lambda tree: guard.global_norm(tree))(tree)).count("reduce_sum")
    assert count() == 2
    with guard.tracing(True):
        assert count() == 5


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.int32])
def test_is_the_norm_of_a_narrow_tree_computed_in_float32(dtype):
    tree = [jnp.asarray(x).astype(dtype) for x in [*random_tree(), np.full(10, 1000.0)]]
    expected = np.sqrt(sum(np.sum(np.float64(np.asarray(x, np.float32)) ** 2) for x in tree))
    ours = guard.global_norm(tree)  # squares of 1000 are beyond float16
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_what_is_the_norm_of_mixed_and_of_empty_trees():
    with jax.numpy_dtype_promotion("strict"):
        mixed = [jnp.full(4, 1, jnp.bfloat16), jnp.ones(4), jnp.ones(4, jnp.complex64), 2.0, np.float16(0)]
        np.testing.assert_allclose(guard.global_norm(mixed), 4.0)
        assert guard.global_norm({"a": None}) == 0 and guard.global_norm({}).dtype == jnp.float32
        assert [float(x) for x in guard.square_sums(mixed)] == [4, 4, 4, 4, 0]
        with enable_x64(True):
            assert guard.global_norm([jnp.ones(2), jnp.ones(2, jnp.float64)]).dtype == jnp.float64
            assert guard.global_norm([jnp.ones(2, jnp.float32)]).dtype == jnp.float32
            assert [x.dtype for x in guard.square_sums([np.ones(1), np.float32(1)])] == ["float64", "float32"]


# Owners

SAME = {"a": jnp.ones((3, 4)), "b": {"w": jnp.ones((3, 4))}}  # by shape nobody can tell them apart
BIAS = jax.tree.map(lambda x: x, {"w": jnp.ones((3, 4)), "bias": jnp.ones(3)})  # in order: bias, w
LABELS = {"a": "x", "b": {"w": "y"}}
N = None


def rules(labels):
    return optax.partition({"x": optax.adam(1e-3), "y": optax.sgd(1e-3, 0.9)}, labels)


# Its leaves have other shapes than the parameter: only marks tell whose they are.
FACTORED = optax.scale_by_factored_rms(min_dim_size_to_factor=2)

OWNERS = {
    "adam": (optax.adam(1e-3), SAME, [N, 0, 1, 0, 1]),
    "sgd": (optax.sgd(1e-3), SAME, []),
    "momentum": (optax.sgd(1e-3, 0.9), SAME, [0, 1]),
    "adafactor": (optax.adafactor(1e-3, min_dim_size_to_factor=2), SAME, [N, 0, 1, 0, 1, 0, 1]),
    "sm3, a list for each parameter": (optax.sm3(1e-3), SAME, [0, 0, 1, 1, 0, 1]),
    "lbfgs, with a leading axis": (
        optax.lbfgs(memory_size=2), SAME, [N, 0, 1, 0, 1, 0, 1, 0, 1, N, N, N, 0, 1, N, N, N]),
    "chain": (optax.chain(optax.trace(0.9), optax.scale_by_adam()), SAME, [0, 1, N, 0, 1, 0, 1]),
    "MultiSteps": (optax.MultiSteps(optax.adam(1e-3), 2), SAME, [N, N, N, 0, 1, 0, 1, 0, 1]),
    "injected": (optax.inject_hyperparams(optax.sgd)(1e-3, momentum=0.9), SAME, [N, N, N, 0, 1]),
    "one vector for all": (optax.flatten(optax.trace(0.9)), SAME, [N]),
    "mask from shapes": (
        optax.masked(FACTORED, lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        BIAS, [N, 1, 1, 1]),
    "mask from keys": (
        optax.masked(FACTORED, lambda p: {k: k == "w" for k in p}), BIAS, [N, 1, 1, 1]),
    "mask from the last key": (
        optax.masked(FACTORED, lambda p: jtu.tree_map_with_path(
            lambda path, _: path[-1].key != "bias", p)), BIAS, [N, 1, 1, 1]),
    "mask as a tree": (
        optax.masked(FACTORED, {"a": False, "b": {"w": True}}),
        SAME, [N, 1, 1, 1]),
    "adamw, callable mask": (
        optax.adamw(1e-3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        SAME, [N, 0, 1, 0, 1]),
    "adamw, mask as a tree": (
        optax.adamw(1e-3, mask={"a": False, "b": {"w": True}}), SAME, [N, 0, 1, 0, 1]),
    "labels as a tree": (rules(LABELS), SAME, [N, 0, 0, 1]),
    "labels from a function": (rules(lambda p: LABELS), SAME, [N, 0, 0, 1]),
    "labels from shapes": (
        rules(lambda p: jax.tree.map(lambda x: "x" if x.ndim > 1 else "y", p)), BIAS, [N, 1, 1, 0]),
    "list of pairs": (
        optax.adam(1e-3), [(leaf(), leaf()), (leaf(), leaf())], [N, *range(4), *range(4)]),
    "keys called count and mu": (
        optax.adam(1e-3), {"count": jnp.ones(()), "mu": jnp.ones(())}, [N, 0, 1, 0, 1]),
    "bare array": (optax.adam(1e-3), jnp.ones(()), [N, 0, 0]),
    "None in the tree": (optax.adam(1e-3), {"a": None, "b": leaf(), "c": leaf()}, [N, 0, 1, 0, 1]),
    "shapes only": (optax.adam(1e-3), jax.eval_shape(lambda: SAME), [N, 0, 1, 0, 1]),
}  # fmt: skip


@pytest.mark.parametrize("case", OWNERS)
def test_whose_parameter_is_each_leaf_of_the_state(case):
    rule, params, expected = OWNERS[case]
    shapes, found = leaf_owners.owners(rule.init, params)
    assert found == expected
    plain = jax.eval_shape(rule.init, params)
    assert jax.tree.structure(shapes) == jax.tree.structure(plain)


def test_do_owners_know_the_parameters_of_every_container(tree):
    tree, _ = trees.partition(tree, good(tree))
    n = len(jax.tree.leaves(tree))
    assert leaf_owners.owners(optax.adam(1e-3).init, tree)[1] == [None, *range(n), *range(n)]


def test_do_owners_work_under_jit_and_inside_each_other():
    seen = []

    def init(params):
        seen.append(leaf_owners.owners(FACTORED.init, params)[1])
        return optax.sgd(1e-3, 0.9).init(params)

    jax.jit(lambda p: leaf_owners.owners(init, p) and p)(SAME)
    assert len(seen) == 2 and seen[0] == seen[1] == [None, 0, 1, 0, 1, 0, 1]
    assert leaf_owners.owners(init, SAME)[1] == [0, 1]


def test_do_our_own_patterns_work_in_an_init_under_marks():
    mask = {"w": True, "bias": False}
    for where in ("w", ["**", "!bias"], lambda path, x: path == "w", mask):
        assert patterns.select(where, trees.mark(BIAS)) == patterns.select(where, BIAS) == (False, True)
    assert paths(trees.mark(BIAS)) == paths(BIAS)
    assert trees.first_difference(mask, trees.mark(BIAS)) is None
    assert trees.first_difference(trees.mark(BIAS), {"w": 1.0}) == "at bias: got float32[3], expected nothing"
    marked_path = trees.leaves_with_names(trees.mark(BIAS))[0][1]
    assert trees.access_str("params", marked_path) == "params['bias']"


def by_hand(params):
    return {"n": jnp.zeros(()), "m": {"w": jnp.zeros_like(params["w"]), "bias": params["bias"] * 0}}


def deeper(params):
    """Another state where keys are deeper than they were: marks must not be believed here."""
    mask = jtu.tree_map_with_path(lambda path, x: len(path) == 1, params)
    return jax.tree.map(lambda keep, x: x * 0 if keep else (), mask, params)


def failing(params):
    return {"v": jax.tree.map(lambda x: jnp.zeros((2, *x.shape)), {k: params[k] + 0 for k in params})}


@pytest.mark.parametrize(("init", "expected"), [(by_hand, [0, 1, N]), (deeper, [0, 1]), (failing, [N, N])])
def test_is_the_end_of_the_path_asked_where_marks_do_not_work(init, expected):
    # BIAS in order: bias, w; `by_hand` in order: m/bias, m/w, n; the last one has other shapes
    assert leaf_owners.owners(init, BIAS)[1] == expected


def test_is_the_longest_end_of_the_path_taken():
    params = {"w": leaf(), "a": {"w": leaf()}}
    init = lambda p: {"m": {"a": {"w": p["a"]["w"] * 0}, "w": p["w"] * 0}}
    assert leaf_owners.owners(init, params)[1] == [0, 1]


def test_does_a_failing_init_fail_with_its_own_error():
    with pytest.raises(KeyError, match="missing"):
        leaf_owners.owners(lambda p: p["missing"], SAME)


# Errors


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ParamsError, ValueError),
        (errors.RuleError, ValueError),
        (errors.LossError, TypeError),
        (errors.PatternError, ValueError),
        (errors.StateError, ValueError),
        (errors.HyperparameterError, ValueError),
        (errors.WrongTypeError, TypeError),
        (errors.NonFiniteError, ArithmeticError),
    ],
)
def test_is_every_error_ours_and_the_built_in_one(kind, builtin):
    assert issubclass(kind, errors.TsunaxError) and issubclass(kind, builtin)
    assert kind.__name__ in errors.__all__ and "\n" not in kind.__doc__


def test_what_do_messages_look_like():
    assert errors.message("leaf", "x", 1, 2, "Fix it.") == "leaf at x: got 1, expected 2. Fix it."
    assert errors.message("leaf", "", 1, 2) == "leaf: got 1, expected 2."


def test_does_a_non_finite_error_carry_state_and_info():
    error = errors.NonFiniteError("loss", state="s", info="i")
    assert (str(error), error.state, error.info) == ("loss", "s", "i")
    assert errors.NonFiniteError("loss").state is None


# Import


@pytest.mark.medium
def test_does_the_import_touch_no_device_and_no_flax():
    code = (
        "import sys, tsunax._core.trees\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "assert 'flax' not in sys.modules, 'flax was imported'\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("x", "y", "differ"),
    [
        (0.0, -0.0, True),
        (math.nan, math.nan, False),
        (1.0, 1, True),
        (1.0, 1.0, False),
        (complex(0, -0.0), 0j, True),
        (complex(math.nan, 1), complex(math.nan, 1), False),
        ("a", "a", False),
        (np.float32(0.0), np.float32(-0.0), True),
        (jnp.array(math.nan), np.array(math.nan, np.float32), False),
    ],
)
def test_leaves_differ_by_their_bits(x, y, differ):
    assert trees.bits_differ(x, y) == differ
