"""What many tests ask: how often did jax compile, and are these two trees the same?"""

import contextlib
import dataclasses
import importlib
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from tsunax.errors import CheckpointError


@dataclasses.dataclass(eq=False)
class Compiles:
    """The names of the functions that XLA compiled and that jax traced, in order."""

    compiled: list[str] = dataclasses.field(default_factory=list)
    traced: list[str] = dataclasses.field(default_factory=list)

    @property
    def compiles(self) -> int:
        return len(self.compiled)

    @property
    def traces(self) -> int:
        return len(self.traced)


_counting: list[Compiles] = []


def _listen(event: str, duration: float, **about) -> None:
    name = re.sub(r"^\w+\((.*)\)$", r"\1", str(about.get("fun_name", "?")))  # jit(f) -> f
    for counts in tuple(_counting):
        if "backend_compile" in event:
            counts.compiled.append(name)
        elif event == "/jax/core/compile/jaxpr_trace_duration":
            counts.traced.append(name)


# Once, for good: jax 0.7.2 has no public way to take a listener back.
jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def count_compiles():
    """Counts every compilation and trace in its block, on any thread; warm up before it.

    Nothing is left out: outside jit, `jnp.ones(3)` and `x + 1` compile too, once per shape.
    jax 0.7.2 also reports the traces of nested functions, newer ones only the outermost: compare
    `traces` with 0, or count a name, `c.traced.count("step")`. The examples guard against a jax
    that renames its events: every "no compilation" would still hold then, but not they.

    >>> step = jax.jit(lambda x: x * 2)
    >>> x, longer = jnp.ones(3), jnp.ones(4)
    >>> with count_compiles() as c:
    ...     _ = step(x), step(x), step(longer)
    >>> c.compiles, c.compiled, c.traced.count("<lambda>")
    (2, ['<lambda>', '<lambda>'], 2)
    >>> with count_compiles() as c:
    ...     _ = step(x), step(longer)
    >>> c.compiles, c.traces
    (0, 0)

    What the compilation cache of the session has is counted as well:

    >>> again = jax.jit(lambda x: x * 2)
    >>> with count_compiles() as c:
    ...     _ = again(x)
    >>> c.compiles
    1
    """
    counts = Compiles()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.remove(counts)


def _paired(a, b):
    """(path, leaf of a, leaf of b) for trees with the same paths; `None` counts as a leaf."""

    def flat(tree):
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)
        return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}

    flat_a, flat_b = flat(a), flat(b)
    for path in [*flat_a, *flat_b]:
        if path not in flat_a or path not in flat_b:
            raise AssertionError(f"tree{path}: only in {'a' if path in flat_a else 'b'}")
    return [(f"tree{path}", leaf, flat_b[path]) for path, leaf in flat_a.items()]


def _numbers(leaf) -> np.ndarray | None:
    """The leaf as an array, a key as its bits; `None` for what holds no numbers."""
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        return None
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _compare(a, b, same) -> None:
    for path, left, right in _paired(a, b):
        x, y = _numbers(left), _numbers(right)
        if x is None or y is None:
            if x is not None or y is not None or left != right:
                raise AssertionError(f"{path}: {left!r} != {right!r}")
            continue
        if x.shape != y.shape:
            raise AssertionError(f"{path}: shape {x.shape} != {y.shape}")
        bad = np.argwhere(~same(path, x, y))
        if len(bad):
            at = tuple(bad[0].tolist())
            raise AssertionError(
                f"{path}: {len(bad)} of {x.size} elements differ, first {list(at)}: {x[at]!r} != {y[at]!r}"
            )


def _same_bits(path, x, y):
    if x.dtype != y.dtype:
        raise AssertionError(f"{path}: dtype {x.dtype} != {y.dtype}")
    left, right = (np.ascontiguousarray(z[..., None]).view(np.uint8) for z in (x, y))
    return (left == right).all(-1)


def assert_trees_equal(a, b) -> None:
    """Same paths, shapes, dtypes and bits: 0.0 is not -0.0, NaN is NaN. Static parts may differ.

    >>> assert_trees_equal({"w": jnp.ones(2), "b": None}, {"w": np.ones(2, np.float32), "b": None})
    >>> assert_trees_equal({"w": np.array([1.0, 0.0])}, {"w": np.array([1.0, -0.0])})
    Traceback (most recent call last):
    AssertionError: tree['w']: 1 of 2 elements differ, first [1]: ...0.0... != ...-0.0...
    """
    _compare(a, b, _same_bits)


def assert_trees_close(a, b, rtol, atol) -> None:
    """Same paths and shapes; |a - b| <= atol + rtol |b| in float64. Integers and keys exactly.

    Dtypes may differ: a reference may be float64. NaN is close to nothing.

    >>> assert_trees_close({"w": jnp.ones(2)}, {"w": np.array([1.0, 1.001])}, rtol=1e-2, atol=0)
    >>> assert_trees_close([jnp.ones(2)], [np.array([1.0, 1.1])], rtol=1e-2, atol=0)
    Traceback (most recent call last):
    AssertionError: tree[0]: 1 of 2 elements differ, first [1]: ...1.0... != ...1.1...
    """

    def close(path, x, y):
        if not all(jnp.issubdtype(z.dtype, jnp.inexact) for z in (x, y)):
            return x == y
        wide = np.complex128 if np.iscomplexobj(x) or np.iscomplexobj(y) else np.float64
        return np.isclose(x.astype(wide), y.astype(wide), rtol=rtol, atol=atol)

    _compare(a, b, close)


def relative(a, b):
    """The distance of two trees, as a share of the second one, in float64."""
    wide = lambda tree: np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])
    return np.linalg.norm(wide(a) - wide(b)) / np.linalg.norm(wide(b))


def error_of(f, kind=CheckpointError) -> str:
    """The text of the error that `f` raises."""
    with pytest.raises(kind) as caught:
        f()
    return str(caught.value)


def medium_if(is_medium, cases):
    """The cases of a parametrization, some of them marked `medium`.

    >>> medium_if(str.isupper, ["a", "B"])
    ['a', ParameterSet(values=('B',), marks=...medium...)]
    """
    return [pytest.param(case, marks=pytest.mark.medium) if is_medium(case) else case for case in cases]


def covering_array(*factors, is_possible=lambda *row: True):
    """Rows of values such that every possible pair of values of two factors is in one of them.

    >>> len(covering_array("ab", "cd", "ef"))
    4
    """
    rows = [row for row in itertools.product(*factors) if is_possible(*row)]
    pairs_of = lambda row: set(itertools.combinations(enumerate(row), 2))
    missing, chosen = set().union(*map(pairs_of, rows)), []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs_of(row) & missing)))
        missing -= pairs_of(chosen[-1])
    return chosen


def run_python(*arguments, folder=None, timeout=300, **variables) -> subprocess.CompletedProcess:
    """Run Python with one device, as a user has, and without the settings of the tests."""
    kept = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    root = str(Path(__file__).resolve().parents[1])
    environment = {**kept, "PYTHONPATH": root, **variables}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout)


def need(name: str):
    """A library that only some environments have. TSUNAX_REQUIRE=metrax,... makes its absence a failure."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: a library that it needs
        absent(name.partition(".")[0], f"{name} cannot be imported ({error}); it is not among the test dependencies")


def absent(name: str, reason: str):
    """Skip a test for what is not here, or fail it if TSUNAX_REQUIRE names that."""
    wanted = os.environ.get("TSUNAX_REQUIRE", "").replace(",", " ").split()
    (pytest.fail if name in wanted else pytest.skip)(reason)
