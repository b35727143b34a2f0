"""Spaces of hyperparameters: what may be tried, name by name. `tune` draws from them.

    space = {
        "learning_rate": ts.tuning.spaces.log_uniform(1e-5, 1e-1),
        "rule": ts.tuning.spaces.choice(["adam", "sgd"]),
        "width": 64,
    }

What is drawn is a function of (seed, trial, name) alone, whatever the order and other names.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tsunax._core import trees
from tsunax.errors import HyperparameterError, WrongTypeError

__all__ = ["choice", "grid", "integer", "log_uniform", "uniform"]


@dataclass(frozen=True)
class uniform:
    """A float between `low` and `high`.

    >>> uniform(0.5, 0.9).at(0.25)
    0.6
    """

    low: float
    high: float
    log: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _keep_bounds(self, float)

    def at(self, u: float) -> float:
        """The value below which the part u of the space lies."""
        return _between(self, self.high, u)


@dataclass(frozen=True)
class log_uniform(uniform):
    """A positive float between `low` and `high`, whose logarithm is uniform.

    >>> log_uniform(1e-4, 1.0).at(0.5)
    0.01...
    """

    log = True


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
        _keep_bounds(self, int)

    def at(self, u: float) -> int:
        """The value below which the part u of the space lies."""
        return min(math.floor(_between(self, self.high + 1, u)), self.high)


def _between(entry: uniform | integer, high: float, u: float) -> float:
    """The number below which the part u of the range from `entry.low` to `high` lies."""
    if not entry.log:
        return entry.low + u * (high - entry.low)
    found = math.exp(math.log(entry.low) + u * math.log(high / entry.low))
    return min(max(found, entry.low), high)


@dataclass(frozen=True)
class choice:
    """One of some values: None, bools, numbers, strings, or tuples of them.

    >>> choice(["adam", "sgd"]).at(0.7)
    'sgd'
    """

    options: Sequence[Any]

    def __post_init__(self) -> None:
        where = f"{type(self).__name__}()"
        if isinstance(self.options, str) or not isinstance(self.options, Sequence | np.ndarray):
            raise WrongTypeError("options", where, trees.describe(self.options), "a list of values")
        found = tuple(_plain(x, f"{where}, option {i}") for i, x in enumerate(self.options))
        if not found or len(set(map(label, found))) < len(found):
            raise HyperparameterError("options", where, found, "one value or more, each once")
        object.__setattr__(self, "options", found)

    def at(self, u: float) -> Any:
        """The option in whose part of the space u lies."""
        return self.options[int(u * len(self.options))]


class grid(choice):
    """All of some values, in every combination, with `backend="grid"`; else a `choice`.

    >>> grid(np.logspace(-3, -1, 3)).options
    (0.001, 0.01, 0.1)
    """


def sample(space: Mapping[str, Any], seed: int, trial: int) -> dict[str, Any]:
    """The values of a trial."""
    place = lambda name: (random_bits(seed, trial, name, np.uint64) >> 11) * 2.0**-53
    return {name: x.at(place(name)) if is_drawn(x) else x for name, x in space.items()}


def is_drawn(entry: object) -> bool:
    return isinstance(entry, uniform | integer | choice)


def random_bits(seed: int, trial: int, name: str, dtype: Any) -> int:
    """A random integer, a function of its arguments: NumPy promises not to change SeedSequence."""
    return int(np.random.SeedSequence([seed, trial, *name.encode()]).generate_state(1, dtype)[0])


def points(space: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the `grid` entries, the last name first to change."""
    laid = {name: entry.options for name, entry in space.items() if isinstance(entry, grid)}
    return [dict(zip(laid, values, strict=True)) for values in itertools.product(*laid.values())]


def checked(space: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """A space with plain values as Python's own. Raises for one that cannot be drawn from."""
    if not isinstance(space, Mapping) or not space:
        fix = 'A dict: {"learning_rate": ts.tuning.spaces.log_uniform(1e-5, 1e-1)}.'
        raise WrongTypeError("space", where, trees.describe(space), "names and entries", fix)
    plain = lambda name, x: x if is_drawn(x) else _plain(x, f"space[{name!r}]")
    return {name: plain(name, entry) for name, entry in space.items()}


def label(value: object) -> str:
    """A plain value as text, for a library that only stores strings."""
    return value if isinstance(value, str) else json.dumps(value)


def _plain(value: Any, at: str) -> Any:
    """A value that a file can hold and give back, as one of Python's own."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if isinstance(value, tuple):
        return tuple(_plain(x, at) for x in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise HyperparameterError("value", at, value, "a finite number")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    fix = "For one of a list in each trial: ts.tuning.spaces.choice([...]). Bind an object to the "
    fix += "objective: functools.partial(f, x=...)."
    expected = "an entry of ts.tuning.spaces, None, a bool, number, string or tuple"
    raise WrongTypeError("value", at, trees.describe(value), expected, fix)


def _keep_bounds(entry: Any, kind: type) -> None:
    """Check the bounds of an entry, and keep them as Python's own numbers."""
    where = f"{type(entry).__name__}()"
    for name in ("low", "high"):
        x = getattr(entry, name)
        x = x.item() if isinstance(x, np.generic) else x
        if isinstance(x, bool) or not isinstance(x, kind | int):
            expected = "an int" if kind is int else "a number"
            raise WrongTypeError(name, where, trees.describe(x), expected)
        object.__setattr__(entry, name, x)
    low, high = entry.low, entry.high
    if not (0 if entry.log else -math.inf) < low < high < math.inf:
        expected = f"{'0 < ' * entry.log}low < high, both finite"
        raise HyperparameterError("bounds", where, f"low={low}, high={high}", expected)
