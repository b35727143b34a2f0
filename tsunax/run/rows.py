"""A row of numbers by name: what `fit` logs, checked, and which names are of one kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tsunax._core import trees
from tsunax.errors import RowError, WrongTypeError


def check_names(row: Iterable[Any], where: str = "row") -> None:
    """Raise unless every name can be a column header and a TensorBoard tag.

    WrongTypeError for what is no string; RowError for a name that is empty or not printable, or
    "step".

    >>> check_names(["loss", "val/top-5 accuracy", "learning_rate@encoder/**"])
    """
    for name in row:
        if not isinstance(name, str):
            raise WrongTypeError("name of a number", where, trees.describe(name), "a str")
        if name == "step" or not name or not name.isprintable():
            expected = "a printable name like 'loss' or 'val/loss', not 'step'"
            raise RowError("name of a number", where, ascii(name), expected)


def check_row(row: Mapping[str, Any], where: str = "row") -> dict[str, float]:
    """The row as Python floats and ints, from Python, NumPy or JAX scalars. NaN is a number.

    Waits for values on a device. Raises as `check_names` does; WrongTypeError for no row or no real
    number; RowError for an array of more than one.

    >>> check_row({"loss": np.float32(0.5), "hits": 3, "ok": True})
    {'loss': 0.5, 'hits': 3, 'ok': 1}
    >>> check_row({"confusion": np.ones((2, 2))}, "evaluate")
    Traceback (most recent call last):
    tsunax.errors.RowError: 'confusion' at evaluate: got float64[2,2], expected one number. ...
    """
    if not isinstance(row, Mapping):
        raise WrongTypeError("row", where, trees.describe(row), "a dict of numbers by name")
    check_names(row, where)
    plain = (float, int)
    return {name: x if type(x) in plain else _number(name, x, where) for name, x in row.items()}


def _number(name: str, x: Any, where: str) -> float:
    if trees.is_traced(x):
        fix = "Return it as a metric: inside jit it has no value yet."
        raise WrongTypeError(repr(name), where, "a traced array", "a number", fix)
    is_array = isinstance(x, (int, float)) or hasattr(x, "__array__")
    value: Any = np.asarray(x) if is_array else None
    is_a = lambda *kinds: any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
    if value is None or not is_a(np.floating, np.integer, np.bool_):
        raise WrongTypeError(repr(name), where, trees.describe(x), "a number")
    if value.ndim:
        parts = trees.describe(x), "one number", "Reduce it, or log its parts."
        raise RowError(repr(name), where, *parts)
    return float(value) if is_a(np.floating) else int(value)


def flat(found: Mapping[str, Any], root: str = "") -> dict[str, float]:
    """Numbers by name: in a mapping by both names, in an array by its elements, `name/0`, ..."""
    out = {}
    for name, x in found.items():
        if isinstance(x, Mapping):
            out |= flat(x, f"{root}{name}/")
        elif np.ndim(x):
            out |= {f"{root}{name}/{i}": float(y) for i, y in enumerate(np.ravel(x))}
        else:
            out[root + name] = float(x)
    return out


def families(names: Iterable[str], least: int = 4) -> dict[str, list[str]]:
    """Names by kind: of `least` members or classes, `loss/0`, `loss/1`, ..., they are one kind.

    >>> families(["loss/0", "loss/1", "loss/2", "loss/3", "epoch", "top/1"])
    {'loss': ['loss/0', 'loss/1', 'loss/2', 'loss/3'], 'epoch': ['epoch'], 'top/1': ['top/1']}
    """
    names = list(names)
    kinds: dict[str, list[str]] = {}
    for name in names:
        head, _, number = name.rpartition("/")
        kinds.setdefault(head if number.isdecimal() else name, []).append(name)
    found: dict[str, list[str]] = {}
    for kind, members in kinds.items():
        is_one = len(members) >= least and kind not in names
        found |= {kind: members} if is_one else {name: [name] for name in members}
    return found
