"""What a script gives to `fit`, in plain values: saved with each checkpoint, and compared when the
script is started again. It knows states, rules and data, and no file.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import itertools
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from tsunax._core import PyTree, stable_text, trees
from tsunax._step.roles import averages_of
from tsunax.checkpoints import leaves, live_numbers
from tsunax.checkpoints._state_in_hand import calls_of
from tsunax.data.batching import Batches
from tsunax.data.prefetching import Prefetched
from tsunax.rules import live_rules
from tsunax.state import TrainState

__all__ = []

_MOST = 5000  # pieces of a function that are looked at
_LONG = 100  # entries of a list or dict
_DEEP = 40


def script_of(
    step: Any, state: PyTree, data: Iterable[PyTree], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Calls and numbers of a script's states, and the rest of what it gives as texts."""
    states = list(leaves.tree_of(state).states.values())
    found: dict[str, str] = {"loss_fn": code_text(getattr(step, "loss_fn", step))}
    if hasattr(step, "accumulate"):
        found["accumulate"] = str(step.accumulate)
    for i, s in enumerate(states):
        of = f" of state {i}" if len(states) > 1 else ""
        found |= {name + of: text for name, text in _settings_of(s)}
    for at, x in jax.tree_util.tree_leaves_with_path(dict(extra)):
        found[f"extra{jax.tree_util.keystr(at)}"] = _value_text(x)
    if (rows := _some_rows(data)) is not None:
        found["data"] = rows
    given = [live_numbers.given_of(s) for s in states]
    return {"calls": calls_of(state), "states": given, "settings": found}


def _settings_of(state: TrainState) -> Iterator[tuple[str, str]]:
    """(name, text) of what a checkpoint does not store of a state.

    That is its key, and the static numbers and functions of its rule, averages and loss scale.
    """
    yield "rule", stable_text.words_of(state.plan.update, code=False)
    static: dict[str, Any] = {
        name: (x, ("start", "every", "warmup")) for name, x in averages_of(state).items()
    }
    if state.loss_scale is not None:
        fields = "dynamic", "interval", "factor", "floor", "ceiling"
        static["loss_scale"] = state.loss_scale, fields
    for name, (x, fields) in static.items():
        for field in fields:
            yield f"{field} of the {name}", str(getattr(x, field))
    functions = {f"the schedule of {name}": found for name, found in _schedules_of(state)}
    if inside := list(_functions_in(state.plan.update, set())):
        functions["a function in the rule"] = inside
    for name, found in functions.items():
        kinds = ",".join(getattr(f, "__qualname__", type(f).__name__) for f in found)
        yield name, f"{kinds}: " + ", ".join(map(code_text, found))
    if state.key is not None:
        key = jax.random.key_data(state.key) if trees.is_key(state.key) else state.key
        yield "key", hashlib.sha256(np.asarray(key).tobytes()).hexdigest()[:16]


def _schedules_of(state: TrainState) -> Iterator[tuple[str, list[Any]]]:
    """The schedules that are plain functions, optax's for example, whose numbers no table holds."""
    if (numbers := state.numbers) is not None:
        for at, s, group, _ in numbers.columns():
            for name, x in zip(numbers.layout.names[at][group], s.live.schedules, strict=True):
                if x and (functions := [f for f in x.leaves if f is not None]):
                    yield name, functions


def _functions_in(x: Any, seen: set[int], depth: int = 0) -> Iterator[Any]:
    """The functions of yours that a rule of optax closes over, such as a schedule or a mask."""
    if id(x) in seen or depth > _DEEP or isinstance(x, live_rules.LiveUpdate):
        return
    seen.add(id(x))
    if isinstance(x, types.FunctionType) and _package(x) not in ("tsunax", "optax", "jax"):
        yield x
        return
    parts = list(x) if isinstance(x, tuple | list) else stable_text.cells_of(x)
    if isinstance(x, functools.partial):
        parts = [x.func, *x.args, *x.keywords.values()]
    elif isinstance(x, types.MethodType):
        parts = list(getattr(x.__self__, "__dict__", {}).values())
    elif dataclasses.is_dataclass(x):
        parts = [getattr(x, f.name, None) for f in dataclasses.fields(x)]
    for part in parts:
        yield from _functions_in(part, seen, depth + 1)


def _value_text(x: Any) -> str:
    """The values of a small array; the shape and dtype of a large one."""
    is_here = getattr(x, "is_fully_addressable", True) and not trees.is_key(x)
    return str(np.asarray(x).tolist()) if is_here and np.size(x) <= _LONG else trees.describe(x)


def _some_rows(data) -> str | None:
    """A hash of a few rows of `batches(arrays)`; None of other data."""
    while isinstance(data, Prefetched):
        data = data.data
    if not isinstance(data, Batches) or not data.is_of_arrays:
        return None
    found = hashlib.sha256()
    for x in data.sample():
        x = np.asarray(jax.random.key_data(x) if trees.is_key(x) else x)
        found.update(f"{x.dtype} {x.shape}".encode() + x.tobytes())
    return found.hexdigest()[:16]


def edits(then: Any, now: Mapping[str, str]) -> Iterator[str]:
    """A note for each setting that is another one than in the script that saved the checkpoint."""
    then = then if isinstance(then, Mapping) else {}
    for name, mine in now.items():
        theirs = then.get(name)
        if not isinstance(theirs, str) or theirs == mine:
            continue
        what, _, of = name.partition(" of state ")
        of = of and f" of state {of}"
        if what in ("loss_fn", "a function in the rule") or what.startswith("the schedule of "):
            if theirs.split()[0] == mine.split()[0]:  # other Pythons compile to other codes
                why = "its code, or a value that it refers to"
                yield f"{name} has changed ({why}). The script's is used."
        elif what == "data":
            yield "the data has changed (its rows have other values). The script's data is used."
        elif what == "key":
            yield f"the key of setup(){of} has changed. The checkpoint's key is used."
        elif what == "rule":
            difference = _first_difference(theirs, mine)
            yield f"the rule{of} has changed: {difference}. The script's is used."
        elif max(len(theirs), len(mine)) > 80:
            yield f"{name} has changed. The script's is used."
        else:
            yield f"{name} has changed from {theirs} to {mine}. The script's is used."


def _first_difference(a: str, b: str) -> str:
    """The first value that differs in two texts of a rule, with the function that it is given to.

    >>> _first_difference("chain((adam(0.9, 0.99, None)))", "chain((adam(0.9, 0.95, None)))")
    'an argument of adam from 0.99 to 0.95'
    """
    one, two = ([*re.findall(r"[^\s(),]+|[(),]", text), "nothing"] for text in (a, b))
    pairs = enumerate(zip(one, two, strict=False))
    at = next((i for i, (x, y) in pairs if x != y), min(len(one), len(two)) - 1)
    depth, owner = 0, "the rule"
    for word, inside in itertools.pairwise(reversed(one[:at])):
        depth += {")": 1, "(": -1}.get(word, 0)
        if depth < 0 and inside not in "(),":
            owner = inside
            break
        depth = max(depth, 0)
    x, y = (word.rpartition("=") for word in (one[at], two[at]))
    return f"{x[0] or 'an argument'} of {owner} from {x[2]} to {y[2]}"


# ---------------------------------------------------------------------------------------- functions


def code_text(f: object) -> str:
    """The Python that compiled a function, and a hash of its code and of what it refers to.

    What it refers to: defaults, closures, its object, and among the globals plain numbers, dicts
    and lists, and functions, classes and objects of its own package; of classes and objects the
    attributes that the code names. Arrays count by shape and dtype.

    No text depends on an address, or on the order of a set. What cannot be
    looked at makes no text, and no error: it would be no reason to end a run.
    """
    try:
        parts = itertools.islice(_parts(f, _package(f), {}, set(), 0), _MOST)
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    except Exception:  # objects of any library, and their properties
        return "unknown"
    return f"{sys.version_info[0]}.{sys.version_info[1]} {digest}"


def _package(f) -> str:
    while isinstance(f, functools.partial):
        f = f.func
    f = inspect.unwrap(f) if callable(f) else f
    return (getattr(f, "__module__", None) or "").partition(".")[0]


def _parts(x, package: str, seen: dict[int, Any], named: set[str], depth: int) -> Iterator[str]:
    """What tells x from others; `named` are the attributes that the code so far reads."""
    is_own = lambda y: _package(y) == package != "tsunax"
    read = lambda found: {k: y for k, y in found.items() if k in named or k == "__call__"}
    inside: Any = ()
    if depth > _DEEP:
        return
    if x is None or isinstance(x, (bool, int, float, complex, str, bytes, np.generic)):
        yield repr(x)
        return
    if isinstance(x, (set, frozenset)):
        yield str(sorted(repr(y) for y in x if isinstance(y, (bool, int, float, str, bytes))))
        return
    if trees.dtype_of(x) is not None:
        yield trees.describe(x)
        return
    yield f"{type(x).__module__}.{type(x).__qualname__}"
    if id(x) in seen:
        return
    seen[id(x)] = x  # kept, or another one would come to have its id
    if isinstance(x, types.CodeType):
        yield f"{x.co_code.hex()} {x.co_names}"  # the names of attributes are there alone
        named.update(x.co_names)
        inside = x.co_consts
    elif isinstance(x, types.FunctionType):
        yield x.__qualname__
        if is_own(x):
            yield f"{x.__code__.co_code.hex()} {x.__code__.co_names}"
            named.update(x.__code__.co_names)
            inside = [y for y in x.__code__.co_consts if y != x.__doc__]
            inside += [x.__defaults__, x.__kwdefaults__, *stable_text.cells_of(x)]
            inside += _globals(x, package)
    elif isinstance(x, types.MethodType):
        inside = x.__func__, x.__self__
    elif isinstance(x, functools.partial):
        inside = x.func, x.args, x.keywords
    elif hasattr(x, "__wrapped__"):
        inside = (x.__wrapped__,)
    elif isinstance(x, (type, types.ModuleType, types.BuiltinFunctionType)):
        yield x.__name__
        inside = [read(vars(x))] if isinstance(x, type) and is_own(x) else ()
    elif isinstance(x, (Mapping, list, tuple)):
        yield str(len(x))
        if len(x) <= _LONG:
            inside = x.items() if isinstance(x, Mapping) else x
    elif dataclasses.is_dataclass(x):
        fields = (getattr(x, f.name, None) for f in dataclasses.fields(x))
        inside = [vars(type(x)).get("__call__"), *fields]
    elif is_own(type(x)):
        yield from _parts(type(x), package, seen, named, depth + 1)  # whose code names attributes
        inside = [read(getattr(x, "__dict__", {}))]
    for y in inside:
        yield from _parts(y, package, seen, named, depth + 1)


def _globals(f: types.FunctionType, package: str) -> list[Any]:
    """The plain values that a function names, and functions, classes and objects of its package."""
    names, codes = [], [f.__code__]
    for code in codes:
        names += code.co_names
        codes += [x for x in code.co_consts if isinstance(x, types.CodeType)]
    found = [f.__globals__.get(name) for name in dict.fromkeys(names)]
    plain = (bool, int, float, complex, str, dict, list, tuple)
    is_own = lambda x: _package(x if callable(x) else type(x)) == package
    return [x for x in found if isinstance(x, plain) or is_own(x)]
