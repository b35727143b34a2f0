"""Values in words: what is equal says the same, what differs does not."""

import argparse
import dataclasses
import functools
import pathlib
import signal
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tsunax._core.stable_text import bits_of, parts_of, words_of


@dataclasses.dataclass
class Config:
    rate: Any
    names: Any = None


class Plain:
    def __init__(self, a):
        self.a = a


def raised_to(n):
    return lambda x: x**n


DIFFERENT = {
    "dataclass": (Config(1), Config(2)),
    "within": (Config(1, {"a": [Plain(1)]}), Config(1, {"a": [Plain(2)]})),
    "namespace": (argparse.Namespace(rate=1), argparse.Namespace(rate=2)),
    "fields": (Plain(np.ones(2000)), Plain(np.arange(2000.0))),
    "set": ({"a", "b"}, {"a", "c"}),
    "frozen set": (frozenset({1}), {1}),
    "path": (pathlib.Path("a"), pathlib.Path("b")),
    "range": (range(3), range(4)),
    "enum": (signal.SIGINT, signal.SIGTERM),
    "closure": (raised_to(2), raised_to(3)),
    "code": (lambda x: x + 1, lambda x: x - 1),
    "constant": (lambda x: x + 1, lambda x: x + 2),
    "default": (lambda x, n=1: x, lambda x, n=2: x),
    "partial": (functools.partial(max, 1), functools.partial(max, 2)),
    "method": (Plain(1).__init__, Plain(2).__init__),
    "class": (np.float32, np.float64),
    "dtype": (np.dtype("f4"), np.dtype("f8")),
    "number": (1, 1.0),
    "truth": (1, True),
    "text": (1, "1"),
    "zero": (0.0, -0.0),
    "list": ([1], (1,)),
    "empty": ({}, []),
    "none": ({}, None),
    "kind": (np.int64(1), 1),
    "weak": (jnp.asarray(1.0), jnp.float32(1)),
    "shape": (np.ones((2, 1)), np.ones((1, 2))),
    "key": (jax.random.key(0, impl="rbg"), jax.random.key(0, impl="unsafe_rbg")),
    "bits": (np.array([0.0]), np.array([-0.0])),
    "objects": (np.array([1, None], object), np.array([2, None], object)),
    "rule": (ts.rules.sgd(0.1), ts.rules.sgd(0.1, nesterov=True)),
    "precision": tuple(ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)}, precision=p) for p in (None, "bfloat16")),
}
EQUAL = {
    "set": ({0, 8}, {8, 0}),
    "lock": (Plain(threading.Lock()), Plain(threading.Lock())),
    "closure": (raised_to(2), raised_to(2)),
    "nan": (float("nan"), float("nan")),
    "order": (np.asfortranarray(np.eye(3)[:2]), np.eye(3)[:2]),
    "state": tuple(ts.setup(ts.rules.adam(0.1), {"w": jnp.ones(2)}, key=0) for _ in range(2)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_says_so(name):
    one, other = DIFFERENT[name]
    assert parts_of("x", one) != parts_of("x", other)
    assert parts_of("x", {"inside": Config(one)}) != parts_of("x", {"inside": Config(other)})


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_equal_says_the_same(name):
    one, other = EQUAL[name]
    assert parts_of("x", one) == parts_of("x", other) and "0x" not in str(parts_of("x", one))


def test_what_holds_itself():
    knot: list = [1]
    knot.append(knot)
    assert words_of(knot) == "[1, …]"


def test_bits_keep_their_shape():
    for x in (np.float32(3), jnp.float32(3), np.ones((2, 3)).T, jax.random.key(1)):
        expected = np.asarray(jax.random.key_data(x) if isinstance(x, jax.Array) and x.dtype.name[:3] == "key" else x)
        assert bits_of(x).shape == expected.shape
        np.testing.assert_array_equal(bits_of(x), expected)


def test_checkpoints_compare_the_pattern_of_a_mask_and_no_words_of_errors():
    outline = words_of(ts.rules.adamw(1e-3, mask="**/kernel").update, code=False, numbers=False)
    assert "mask=PatternMask(where='**/kernel')," in outline
