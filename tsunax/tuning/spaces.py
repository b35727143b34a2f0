"""Spaces of hyperparameters: the values that each name may have. `tune` draws from them.

    space = {
        "learning_rate": ts.tuning.spaces.log_uniform(1e-5, 1e-1),
        "rule": ts.tuning.spaces.choice(["adam", "sgd"]),
        "width": 64,
    }

A drawn value depends on (seed, trial, name) only, not on the order of the names or on other names.
"""

import itertools
import json
import math
import operator
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
        """Check the bounds, and convert them to Python's own numbers."""
        to_python = operator.index if isinstance(self, integer) else lambda x: np.asarray(x).item()
        for name in ("low", "high"):
            object.__setattr__(self, name, to_python(getattr(self, name)))
        if not (0 if self.log else -math.inf) < self.low < self.high < math.inf:
            got = f"low={self.low}, high={self.high}"
            expected = f"{'0 < ' * self.log}low < high, both finite"
            raise HyperparameterError("bounds", f"{type(self).__name__}()", got, expected)

    def at(self, u: float) -> float:
        """The value at the fraction `u` of the space."""
        return _value_at(self, self.high, u)


@dataclass(frozen=True)
class log_uniform(uniform):
    """A positive float between `low` and `high` with a uniform logarithm.

    >>> log_uniform(1e-4, 1.0).at(0.5)
    0.01...
    """

    log = True


@dataclass(frozen=True)
class integer(uniform):
    """An int from `low` to `high`, both included; with `log`, as `log_uniform`.

    >>> [integer(1, 4).at(u) for u in (0.0, 0.3, 0.99)]
    [1, 2, 4]
    """

    low: int
    high: int
    log: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]

    def at(self, u: float) -> int:
        """The value at the fraction `u` of the space."""
        return min(math.floor(_value_at(self, self.high + 1, u)), self.high)


def _value_at(entry: uniform, high: float, u: float) -> float:
    """The value at the fraction `u` of the range from `entry.low` to `high`."""
    if not entry.log:
        return entry.low + u * (high - entry.low)
    value = math.exp(math.log(entry.low) + u * math.log(high / entry.low))
    return min(max(value, entry.low), high)


@dataclass(frozen=True)
class choice:
    """One of several values: None, bools, numbers, strings, or tuples of such values.

    >>> choice(["adam", "sgd"]).at(0.7)
    'sgd'
    """

    options: Sequence[Any]

    def __post_init__(self) -> None:
        where = f"{type(self).__name__}()"
        options = tuple(_plain_value(x, where) for x in self.options)
        is_text = isinstance(self.options, str)
        is_list = isinstance(self.options, Sequence | np.ndarray) and not is_text
        if not is_list or not options or len(set(map(label, options))) < len(options):
            expected = "a list of one value or more, each once"
            raise HyperparameterError("options", where, self.options, expected)
        object.__setattr__(self, "options", options)

    def at(self, u: float) -> Any:
        """The option at the fraction `u` of the list."""
        return self.options[int(u * len(self.options))]


class grid(choice):
    """All of some values, in every combination, with `backend="grid"`; else a `choice`.

    >>> grid(np.logspace(-3, -1, 3)).options
    (0.001, 0.01, 0.1)
    """


def sample(space: Mapping[str, Any], seed: int, trial: int) -> dict[str, Any]:
    """The values of a trial."""
    draw = lambda name: (random_bits(seed, trial, name, np.uint64) >> 11) * 2.0**-53
    return {name: x.at(draw(name)) if is_drawn(x) else x for name, x in space.items()}


def is_drawn(entry: object) -> bool:
    return isinstance(entry, uniform | choice)


def random_bits(seed: int, trial: int, name: str, dtype: Any) -> int:
    """A random integer, a function of its arguments: NumPy promises not to change SeedSequence."""
    return int(np.random.SeedSequence([seed, trial, *name.encode()]).generate_state(1, dtype)[0])


def points(space: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the `grid` entries, the last name first to change."""
    options_by_name = {
        name: entry.options for name, entry in space.items() if isinstance(entry, grid)
    }
    return [
        dict(zip(options_by_name, values, strict=True))
        for values in itertools.product(*options_by_name.values())
    ]


def checked_space(space: Mapping[str, Any]) -> dict[str, Any]:
    """A space with plain values as Python's own types. Raises for entries of other types."""
    checked_entry = lambda name, x: x if is_drawn(x) else _plain_value(x, f"space[{name!r}]")
    return {name: checked_entry(name, entry) for name, entry in space.items()}


def label(value: object) -> str:
    """A plain value as text, for a library that only stores strings."""
    return value if isinstance(value, str) else json.dumps(value)


def _plain_value(value: Any, where: str) -> Any:
    """A value as Python's own type, which a file can store and return unchanged."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if isinstance(value, tuple):
        return tuple(_plain_value(x, where) for x in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise HyperparameterError("value", where, value, "a finite number")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    expected = "None, a bool, number, string, tuple or, of a space, ts.tuning.spaces.choice([...])"
    fix = "Bind an object to the objective: functools.partial(f, x=...)."
    raise WrongTypeError("value", where, trees.describe(value), expected, fix)
