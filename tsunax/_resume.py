"""What a run that goes on takes from its checkpoint, from the state in hand, and from the script.

`script_of` describes what a script gave to `fit`: it is saved with each checkpoint, and compared
when the script is started again. It knows states, rules and data, and no file.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from tsunax import _manifest, _tree
from tsunax._ahead import Prefetched
from tsunax.data import Batches
from tsunax.state import TrainState

__all__ = []

_MOST = 5000  # pieces of a function that are looked at
_LONG = 100  # entries of a list or dict
_DEEP = 40


def calls_of(tree) -> int:
    """The calls of all training states in a tree; 0 if nothing has called them yet, or nobody here knows."""
    clocks = [s.clock for s in _manifest.tree_of(tree).states.values()]
    known = all(getattr(x, "is_fully_replicated", True) or x.is_fully_addressable for x in clocks)
    return int(sum(np.sum(np.asarray(x)[..., 1]) for x in clocks)) if known else 0


def script_of(step, state, data) -> dict[str, Any]:
    """What a script gives to `fit`, in plain values: calls and numbers of its states, and the rest as texts."""
    states = list(_manifest.tree_of(state).states.values())
    found: dict[str, str] = {"loss_fn": code_text(getattr(step, "loss_fn", step))}
    if hasattr(step, "accumulate"):
        found["accumulate"] = str(step.accumulate)
    for i, s in enumerate(states):
        of = f" of state {i}" if len(states) > 1 else ""
        found |= {name + of: text for name, text in _settings_of(s)}
    if (rows := _some_rows(data)) is not None:
        found["data"] = rows
    given = [_manifest.given_of(s) for s in states]
    return {"calls": calls_of(state), "states": given, "settings": found}


def _settings_of(state: TrainState) -> Iterator[tuple[str, str]]:
    """What a checkpoint of the state has not: the static numbers of its rule, average and loss scale; and its key."""
    yield "rule", _manifest.rule_text(state.plan.update, numbers=True)
    for name, x, fields in (
        ("average", state.average, ("start", "every", "warmup")),
        ("loss_scale", state.loss_scale, ("dynamic", "interval", "factor", "floor", "ceiling")),
    ):
        if x is not None:
            yield name, ", ".join(f"{field}={getattr(x, field)}" for field in fields)
    if state.key is not None:
        key = jax.random.key_data(state.key) if _tree.is_key(state.key) else state.key
        yield "key", hashlib.sha256(np.asarray(key).tobytes()).hexdigest()[:16]


def _some_rows(data) -> str | None:
    """A hash of a few rows of `batches(arrays)`; None of other data."""
    while isinstance(data, Prefetched):
        data = data.data
    if not isinstance(data, Batches) or not data.is_of_arrays:
        return None
    found = hashlib.sha256()
    for x in data.sample():
        x = np.asarray(jax.random.key_data(x) if _tree.is_key(x) else x)
        found.update(f"{x.dtype} {x.shape}".encode() + x.tobytes())
    return found.hexdigest()[:16]


def edits(then: Any, now: Mapping[str, str]) -> Iterator[str]:
    """A note for each setting that is another one than in the script that saved the checkpoint."""
    then = then if isinstance(then, Mapping) else {}
    for name, mine in now.items():
        theirs = then.get(name)
        if not isinstance(theirs, str) or theirs == mine:
            continue
        what = name.partition(" ")[0]
        if what == "loss_fn":
            if theirs.partition(" ")[0] == mine.partition(" ")[0]:  # other Pythons compile to other codes
                yield f"{name}: another function, or other values in it; the script's is used"
        elif what == "data":
            yield f"{name}: other values; the script's are used"
        elif what == "key":
            yield f"{name}: another one; the checkpoint's goes on"
        else:
            a, b = _where_they_part(theirs, mine)
            yield f"{name}: {a} then, {b} now; the script's is used"


def _where_they_part(a: str, b: str) -> tuple[str, str]:
    """Two texts, or what of long ones surrounds the first difference."""
    if max(len(a), len(b)) <= 120:
        return a, b
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return tuple(f"…{x[max(0, at - 40) : at + 40]}…" for x in (a, b))  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------- functions


def code_text(f) -> str:
    """The Python that compiled a function, and a hash of its code and of what it refers to.

    What it refers to: defaults, closures, and plain numbers and functions of its own package among the globals. Arrays
    count by shape and dtype. No text depends on an address, or on the order of a set. What cannot be
    looked at makes no text, and no error: it would be no reason to end a run.
    """
    parts: list[str] = []
    try:
        _walk(f, _package(f), {}, parts)
    except Exception:  # objects of any library, and their properties
        return "unknown"
    digest = hashlib.sha256("\n".join(parts[:_MOST]).encode()).hexdigest()[:16]
    return f"{sys.version_info[0]}.{sys.version_info[1]} {digest}"


def _package(f) -> str:
    while isinstance(f, functools.partial):
        f = f.func
    return (getattr(inspect.unwrap(f) if callable(f) else f, "__module__", None) or "").partition(".")[0]


def _walk(x: Any, package: str, seen: dict[int, Any], parts: list[str], depth: int = 0) -> None:
    inner = lambda *things: [_walk(y, package, seen, parts, depth + 1) for y in things]
    if len(parts) >= _MOST or depth > _DEEP:
        return
    if x is None or isinstance(x, (bool, int, float, complex, str, bytes, np.generic)):
        parts.append(repr(x))
        return
    if isinstance(x, (set, frozenset)):
        parts.append(str(sorted(repr(y) for y in x if isinstance(y, (bool, int, float, str, bytes)))))
        return
    if _tree.dtype_of(x) is not None:
        parts.append(_tree.describe(x))
        return
    parts.append(f"{type(x).__module__}.{type(x).__qualname__}")
    if id(x) in seen:
        return
    seen[id(x)] = x  # kept, or another one would come to have its id
    if isinstance(x, types.CodeType):
        parts.append(x.co_code.hex())
        inner(x.co_names, x.co_consts)
    elif isinstance(x, types.FunctionType):
        parts.append(x.__qualname__)
        if _package(x) == package and package != "tsunax":
            parts.append(x.__code__.co_code.hex())
            inner([y for y in x.__code__.co_consts if y != x.__doc__])
            inner(x.__defaults__, x.__kwdefaults__, *_cells(x), *_globals(x, package))
    elif isinstance(x, types.MethodType):
        inner(x.__func__, x.__self__)
    elif isinstance(x, functools.partial):
        inner(x.func, x.args, x.keywords)
    elif hasattr(x, "__wrapped__"):
        inner(x.__wrapped__)
    elif isinstance(x, (type, types.ModuleType, types.BuiltinFunctionType)):
        parts.append(x.__name__)
    elif isinstance(x, (Mapping, list, tuple)):
        parts.append(str(len(x)))
        if len(x) <= _LONG:
            inner(*(x.items() if isinstance(x, Mapping) else x))
    elif dataclasses.is_dataclass(x):
        inner(
            vars(type(x)).get("__call__"),
            *(getattr(x, f.name, None) for f in dataclasses.fields(x)),
        )


def _cells(f: types.FunctionType) -> list[Any]:
    found = []
    for cell in f.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            found.append(None)
    return found


def _globals(f: types.FunctionType, package: str) -> list[Any]:
    """The plain numbers and texts, and the functions of the same package, that a function names."""
    names, codes = [], [f.__code__]
    for code in codes:
        names += code.co_names
        codes += [x for x in code.co_consts if isinstance(x, types.CodeType)]
    found = [f.__globals__.get(name) for name in dict.fromkeys(names)]
    plain = (bool, int, float, complex, str)
    return [x for x in found if isinstance(x, plain) or (callable(x) and _package(x) == package)]
