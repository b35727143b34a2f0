"""Spaces of hyperparameters: what may be tried, name by name. `tune` draws from them.

    space = {
        "learning_rate": ts.tuning.spaces.log_uniform(1e-5, 1e-1),
        "rule": ts.tuning.spaces.choice(["adam", "sgd"]),
        "momentum": ts.tuning.spaces.when("rule", "sgd", ts.tuning.spaces.uniform(0.5, 0.99)),
        "width": 64,
    }

What is drawn is a function of (seed, trial, name) alone: neither the order of the trials nor
another name changes it.
"""

from __future__ import annotations

import json
import math
import reprlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tsunax._core import trees
from tsunax.errors import HyperparameterError, WrongTypeError, unknown

__all__ = ["choice", "grid", "integer", "log_uniform", "uniform", "when"]


@dataclass(frozen=True)
class uniform:
    """A float between `low` and `high`.

    >>> uniform(0.5, 0.9).at(0.25)
    0.6
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _keep_bounds(self, "uniform()")

    def at(self, u: float) -> float:
        """The value below which the part u of the space lies."""
        return self.low + u * (self.high - self.low)


@dataclass(frozen=True)
class log_uniform:
    """A positive float between `low` and `high`, whose logarithm is uniform.

    >>> log_uniform(1e-4, 1.0).at(0.5)
    0.01...
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _keep_bounds(self, "log_uniform()", positive=True)

    def at(self, u: float) -> float:
        """The value below which the part u of the space lies."""
        found = math.exp(math.log(self.low) + u * math.log(self.high / self.low))
        return min(max(found, self.low), self.high)


@dataclass(frozen=True)
class integer:
    """An int from `low` to `high`, both included; with `log`, as `log_uniform`.

    >>> [integer(1, 4).at(u) for u in (0.0, 0.3, 0.99)]
    [1, 2, 4]
    """

    low: int
    high: int
    log: bool = False

    def __post_init__(self) -> None:
        for name, x in (("low", self.low), ("high", self.high)):
            if isinstance(x, bool) or not isinstance(x, int | np.integer):
                raise WrongTypeError(name, "integer()", trees.describe(x), "an int")
        _keep_bounds(self, "integer()", positive=self.log)

    def at(self, u: float) -> int:
        """The value below which the part u of the space lies."""
        if self.log:
            found = math.exp(math.log(self.low) + u * math.log((self.high + 1) / self.low))
        else:
            found = self.low + u * (self.high - self.low + 1)
        return min(max(math.floor(found), self.low), self.high)


@dataclass(frozen=True)
class choice:
    """One of some values: None, bools, numbers, strings, or tuples of them.

    >>> choice(["adam", "sgd"]).at(0.7)
    'sgd'
    """

    options: Sequence[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", _options(f"{type(self).__name__}()", self.options))

    def at(self, u: float) -> Any:
        """The option in whose part of the space u lies."""
        return self.options[int(u * len(self.options))]


class grid(choice):
    """All of some values, in every combination, with `backend="grid"`; else a `choice`.

    >>> grid(np.logspace(-3, -1, 3)).options
    (0.001, 0.01, 0.1)
    """


@dataclass(frozen=True)
class when:
    """An entry that is there only if one before it has a value, or one of a list of them.

    >>> space = {"rule": choice(["adam", "sgd"]), "momentum": when("rule", "sgd", uniform(0.5, 0.99))}
    >>> [sorted(sample(space, 0, trial)) for trial in range(3)]
    [['rule'], ['momentum', 'rule'], ['momentum', 'rule']]
    """

    name: str
    value: Any
    entry: Any

    @property
    def values(self) -> list[Any]:
        return list(self.value) if isinstance(self.value, list) else [self.value]

    def holds(self, values: Mapping[str, Any]) -> bool:
        return self.name in values and any(_same(values[self.name], value) for value in self.values)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def sample(
    space: Mapping[str, Any], seed: int, trial: int, fixed: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The values of a trial: those that are `fixed`, and the others drawn."""
    found: dict[str, Any] = {}
    for name, entry in space.items():
        if (entry := entry_of(entry, found)) is ABSENT:
            continue
        if fixed is not None and name in fixed:
            entry = fixed[name]
        elif hasattr(entry, "at"):
            entry = entry.at((random_bits(seed, trial, name, np.uint64) >> 11) * 2.0**-53)
        found[name] = entry
    return found


ABSENT = object()


def entry_of(entry: Any, values: Mapping[str, Any]) -> Any:
    """The entry itself, or what is in a `when` that holds; else ABSENT."""
    while isinstance(entry, when):
        if not entry.holds(values):
            return ABSENT
        entry = entry.entry
    return entry


def random_bits(seed: int, trial: int, name: str, dtype: Any) -> int:
    """A random integer, a function of its arguments: NumPy promises not to change SeedSequence."""
    return int(np.random.SeedSequence([seed, trial, *name.encode()]).generate_state(1, dtype)[0])


_MOST = 100_000


def points(space: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the `grid` entries and plain values, the last name first to change."""
    found: list[dict[str, Any]] = [{}]
    for name, entry in space.items():
        grown = []
        for point in found:
            inner = entry_of(entry, point)
            options = inner.options if isinstance(inner, grid) else ()
            options = options if inner is ABSENT or hasattr(inner, "at") else [inner]
            if len(grown) + len(options) > _MOST:
                got, fix = f"over {_MOST:,} combinations", "Or backend='random'."
                raise HyperparameterError("grid", "tune()", got, "fewer", fix)
            grown += [{**point, name: option} for option in options] or [point]
        found = grown
    return found


def checked(space: Mapping[str, Any], where: str, backend: str) -> dict[str, Any]:
    """A space with plain values as Python's own. Raises for one that cannot be drawn from."""
    if not isinstance(space, Mapping):
        got, expected = trees.describe(space), "names and what they may be"
        fix = 'A dict: {"learning_rate": ts.tuning.spaces.log_uniform(1e-5, 1e-1)}.'
        raise WrongTypeError("space", where, got, expected, fix)
    if not space:
        raise HyperparameterError("space", where, "an empty one", "at least one name")
    found: dict[str, Any] = {}
    for name, entry in space.items():
        if not isinstance(name, str) or not name.isidentifier():
            expected = "a name as of an argument"
            raise WrongTypeError("name", f"space of {where}", repr(name), expected)
        found[name] = _checked_entry(entry, f"space[{name!r}]", space, found, backend)
    if backend == "grid" and not any(isinstance(innermost(x), grid) for x in found.values()):
        at = f"{where}, backend 'grid'"
        fix = "Give ts.tuning.spaces.grid([...]) for what is to be laid out, or backend='random'."
        raise HyperparameterError("space", at, "no grid", "at least one", fix)
    return found


def _checked_entry(entry: Any, at: str, space: Mapping, before: Mapping, backend: str) -> Any:
    if isinstance(entry, type) and hasattr(entry, "at"):
        raise WrongTypeError("entry", at, f"{entry.__name__} itself", f"{entry.__name__}(...)")
    if hasattr(entry, "at"):
        return entry
    if isinstance(entry, list):
        shown = reprlib.repr(entry)
        fix = f"For one of them in each trial: ts.tuning.spaces.choice({shown}), or grid({shown}). "
        fix = f"{fix if entry else ''}A constant that is a sequence is a tuple."
        raise WrongTypeError("entry", at, f"a list, {shown}", "an entry of ts.tuning.spaces", fix)
    if not isinstance(entry, when):
        return _plain(entry, at)
    name, wanted = entry.name, [_plain(value, at) for value in entry.values]
    if name not in before and name in space:
        raise HyperparameterError("when", at, f"{name!r}, which comes after it", "a name before it")
    if name not in before:
        raise HyperparameterError(unknown("when", at, str(name), before))
    if not wanted:
        raise HyperparameterError("when", at, f"no value of {name!r}", "at least one")
    for value in wanted:
        _check_value(name, value, innermost(before[name]), at)
    inner = _checked_entry(entry.entry, at, space, before, backend)
    if backend == "grid" and isinstance(innermost(inner), grid) and not _is_laid_out(before, name):
        got, fix = f"one under {name!r}, which is drawn", f"Make {name!r} a grid too."
        raise HyperparameterError("grid", at, got, "one under a grid", fix)
    return when(name, wanted, inner)


def _check_value(name: str, value: Any, other: Any, at: str) -> None:
    """Raise for a value that the entry `other`, on which another one depends, never has."""
    if isinstance(other, uniform | log_uniform):
        expected = "a choice, a grid, an integer or a plain value"
        fix = "A single number of these is never drawn."
        raise HyperparameterError(f"when {name!r}", at, repr(other), expected, fix)
    if isinstance(other, integer):
        is_known, expected = type(value) is int and other.low <= value <= other.high, repr(other)
    else:
        known = getattr(other, "options", [other])
        is_known = any(_same(value, option) for option in known)
        expected = f"one of {trees.listed([repr(x) for x in known], 12)}"
    if not is_known:
        raise HyperparameterError(f"value of {name!r}", at, repr(value), expected)


def _is_laid_out(space: Mapping[str, Any], name: str) -> bool:
    """Whether a name is in the grid itself, or plain, and so are the names that it depends on."""
    entry = space[name]
    while isinstance(entry, when):
        if not _is_laid_out(space, entry.name):
            return False
        entry = entry.entry
    return isinstance(entry, grid) or not hasattr(entry, "at")


def innermost(entry: Any) -> Any:
    """What is in a `when`, however deep; else the entry."""
    while isinstance(entry, when):
        entry = entry.entry
    return entry


def _options(where: str, options: Any) -> tuple:
    if isinstance(options, str | bytes | Mapping) or not isinstance(options, Iterable):
        raise WrongTypeError("options", where, trees.describe(options), "a list of values")
    found = tuple(_plain(x, f"{where}, option {i}") for i, x in enumerate(options))
    if not found:
        raise HyperparameterError("options", where, "an empty list", "at least one value")
    labels = list(map(label, found))
    for i, x in enumerate(found):
        if labels[i] in labels[:i]:
            raise HyperparameterError("options", where, f"{x!r} twice", "each value once")
    return found


def label(value: object) -> str:
    """A plain value as text, for a library that only stores strings."""
    return value if isinstance(value, str) else json.dumps(value)


def _plain(value: Any, at: str) -> Any:
    """A value that a file can hold and give back, as one of Python's own."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if isinstance(value, list | tuple):
        return tuple(_plain(x, at) for x in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise HyperparameterError("value", at, value, "a finite number")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    fix = "Give its name, and look it up in the objective; or bind it: functools.partial(f, x=...)."
    expected = "None, a bool, number, string, or a tuple"
    raise WrongTypeError("value", at, trees.describe(value), expected, fix)


def _keep_bounds(entry: Any, where: str, positive: bool = False) -> None:
    """Check the bounds of an entry, and keep them as Python's own numbers."""
    for name in ("low", "high"):
        x = getattr(entry, name)
        if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating):
            raise WrongTypeError(name, where, trees.describe(x), "a number")
        x = int(x) if isinstance(x, int | np.integer) else float(x)
        if not abs(x) <= sys.float_info.max:
            raise HyperparameterError(name, where, reprlib.repr(x), "a finite number")
        if positive and x <= 0:
            raise HyperparameterError(name, where, x, "a number > 0, which has a logarithm")
        object.__setattr__(entry, name, x)
    low, high = entry.low, entry.high
    span = float(high) / float(low) if positive else float(high) - float(low)
    if low >= high or not math.isfinite(span):
        fix = "A value that does not change is given as it is." if low == high else ""
        raise HyperparameterError("bounds", where, f"low={low}, high={high}", "low < high", fix)
