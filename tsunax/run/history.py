"""What a run was like: rows of numbers by step, and marks where something happened.

A `History` is filled by the loop and read by people: columns as NumPy arrays, a DataFrame, a plot.
It knows of no device, no state and no file.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tsunax._core import Figure, tables, trees
from tsunax.errors import RowError, WrongTypeError, unknown

CAUSES = ("compile", "data", "device", "evaluation", "checkpoint", "callbacks", "idle")
MOST = 50_000  # rows that a history keeps
MOST_MARKS = 10_000

_FORWARD = "A history goes forward: start a new one, or restore the one of that step."


def _array(kind: str, values: Any) -> array:
    return array(kind, np.asarray(values, {"q": np.int64, "d": np.float64}[kind]).tobytes())


class Clock:
    """Counts seconds. Each moment of the main thread belongs to one cause, "idle" at first."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        self.total: dict[str, float] = dict(self.seconds)  # with those of earlier runs
        self.cause: str = "idle"  # of the seconds since the last lap: until the next it may change
        self.since: float = time.perf_counter()

    def lap(self, cause: str) -> float:
        """End a lap, count its seconds for its cause, begin one of `cause`. Returns the time."""
        now = time.perf_counter()
        self.seconds[self.cause] += now - self.since
        self.total[self.cause] += now - self.since
        self.cause, self.since = cause, now
        return now

    @contextlib.contextmanager
    def __call__(self, cause: str) -> Iterator[None]:
        """A block whose seconds have this cause."""
        before = self.cause
        self.lap(cause)
        try:
            yield
        finally:
            self.lap(before)

    def go_on(self, total: dict[str, float]) -> None:
        """Add to these seconds from here on, and what was counted so far."""
        for cause, counted in self.seconds.items():
            total[cause] += counted
        self.total = total


class History:
    """Rows of numbers by step, as columns, and the marks beside them.

    A row need not have every name. A number costs 16 bytes, a row 8 more. Of 50,000 rows half
    go, evenly; the newest stays, and rows with a name that few have (an evaluation's).

    >>> history = History()
    >>> history.add({"loss": 2.5, "learning_rate": 0.1}, step=10)
    >>> history.add({"loss": 1.5}, step=20)
    >>> history.add({"val/loss": 1.75}, step=20)
    >>> history
    History(2 rows, steps 10 to 20)
                     last   min   max  rows
      loss            1.5   1.5   2.5     2
      learning_rate   0.1   0.1   0.1     1
      val/loss       1.75  1.75  1.75     1
    >>> history["step"], history["val/loss"], history.last("learning_rate")
    (array([10, 20]), array([ nan, 1.75]), 0.1)
    """

    def __init__(self) -> None:
        self._steps = array("q")
        # by name the rows that have it, and its values there
        self._columns: dict[str, tuple[array, array]] = {}
        self.marks: list[tuple[int, str, str]] = []
        # seconds by cause, of all runs that filled it: `Clock`
        self.time: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        self._closing: tuple[int, tuple[str, ...]] = -1, ()  # the step and the names of `close`

    def add(self, row: Mapping[str, Any], step: int) -> None:
        """Add a row, a dict of numbers, or join it to the row of the same step; newer values win.

        Raises RowError for a step before the last one, and as `check_row` does.
        """
        row, last = check_row(row, f"step {step}"), self._steps[-1] if self._steps else None
        if last is not None and step < last:
            expected = f"step {last} or later"
            raise RowError("row", "History.add()", f"step {step}", expected, _FORWARD)
        if step != last:
            self._thin()
            self._steps.append(step)
        at = len(self._steps) - 1
        for name, value in row.items():
            rows, values = self._columns.setdefault(name, (array("q"), array("d")))
            if rows and rows[-1] == at:
                values[-1] = value
            else:
                rows.append(at)
                values.append(value)

    def extend(self, columns: Mapping[str, np.ndarray], steps: np.ndarray) -> None:
        """Add rows for several steps: a faster `add`. Each of `columns` has as many numbers.

        Raises RowError unless `steps` increase from beyond the last one, and as `check_names` does.

        >>> history = History()
        >>> history.extend({"loss": np.array([0.5, 0.25])}, np.array([10, 20]))
        >>> history["step"], history["loss"]
        (array([10, 20]), array([0.5 , 0.25]))
        """
        steps = np.asarray(steps, np.int64)
        if not len(steps):
            return
        check_names(columns, f"step {steps[0]}")
        last = self._steps[-1] if self._steps else None
        if (last is not None and steps[0] <= last) or np.any(np.diff(steps) <= 0):
            got, expected = f"steps from {steps[0]}", f"increasing, beyond {last}"
            raise RowError("rows", "History.extend()", got, expected, _FORWARD)
        while len(steps):
            self._thin()
            n = max(MOST - len(self), 1)
            rows = _array("q", np.arange(len(steps[:n])) + len(self))
            self._steps += _array("q", steps[:n])
            for name, values in columns.items():
                at, column = self._columns.setdefault(name, (array("q"), array("d")))
                at += rows
                column += _array("d", values[:n])
            steps, columns = steps[n:], {name: values[n:] for name, values in columns.items()}

    def _thin(self) -> None:
        """Keep the first row of each span of steps, half of them at most, before one is too many.

        Spans are powers of two, so that what is kept later is a part of what was kept before. Rows
        with a name that few have stay, and the newest of each name.
        """
        n, columns = len(self), self._columns.values()
        if n < MOST:
            return
        steps, kept, span = self["step"], np.full(n, False), 1
        few = [i for rows, _ in columns if 2 * len(rows) < n for i in rows]
        kept[few if len(few) < n // 4 else []] = True
        others = np.flatnonzero(~kept)
        while np.sum(first := np.diff(steps[others] // span, prepend=-1) != 0) > n // 2:
            span *= 2
        kept[others[first]] = True
        kept[[rows[-1] for rows, _ in columns]] = True
        new = np.cumsum(kept) - 1
        self._steps = _array("q", steps[kept])
        for name, (rows, values) in self._columns.items():
            at = np.array(rows)
            stays = kept[at]
            values = _array("d", np.array(values)[stays])
            self._columns[name] = _array("q", new[at[stays]]), values

    def close(self, row: Mapping[str, Any], step: int) -> None:
        """`add` numbers, a dict, that only the end of a run has; see `reopen`. Raises as `add`."""
        before = self._closing[1] if self._closing[0] == step else ()
        new = [name for name in row if (self.newest(name) or (-1, 0.0))[0] != step]
        self.add(row, step)
        self._closing = step, (*before, *new)

    def reopen(self) -> tuple[int, dict[str, float]]:
        """Remove the numbers that `close` added, when their run continues.

        Returns their step, -1 for none, and them by name.
        """
        (step, names), self._closing = self._closing, (-1, ())
        if not self._steps or self._steps[-1] != step:
            return -1, {}
        newest, removed = len(self._steps) - 1, {}
        for name in names:
            rows, values = self._columns[name]
            if rows[-1] == newest:
                del rows[-1]
                removed[name] = values.pop()
        self._columns = {name: column for name, column in self._columns.items() if column[0]}
        if not any(rows[-1] == newest for rows, _ in self._columns.values()):
            self._steps.pop()
        return step, removed

    def mark(self, name: str, step: int, text: str = "") -> None:
        """Note an event at a step, an int: `history.mark("data", 1200, "new shards")`.

        The loop uses "evaluate", "rejected", "thaw", "restart", "stop" and others. Beyond 10,000
        marks, every second one of the most frequent `name` is dropped.
        """
        self.marks.append((int(step), str(name), str(text)))
        if len(self.marks) > MOST_MARKS:  # of what comes most often, every second one goes
            names = [name for _, name, _ in self.marks]
            often, seen = max(dict.fromkeys(names), key=names.count), itertools.count()
            self.marks = [mark for mark in self.marks if mark[1] != often or next(seen) % 2 == 0]

    @property
    def names(self) -> list[str]:
        """All names but "step", a list in the order in which they came."""
        return list(self._columns)

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, name: object) -> bool:
        return name == "step" or name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: str) -> np.ndarray:
        """A copy of a column: float64, NaN where a row has no value; of "step" int64.

        Raises RowError for an unknown name, with the known ones.
        """
        if name == "step":
            return np.array(self._steps, np.int64)
        rows, values = self._column(name)
        column = np.full(len(self), math.nan)
        column[np.array(rows, np.int64)] = values
        return column

    def plot(self, *, names: Sequence[str] | None = None, x: str = "step") -> Figure:
        """A matplotlib Figure of the run: loss, metrics, learning rate and events.

        `names` are the columns to draw instead; those that end alike share a panel. `x` is "step",
        or a column to lay them out along; with "epoch" the first one ends at 1. A constant has no
        panel: the line above gives its value. Rejected steps are red ticks at the lower edge; other
        marks but evaluations (thaw, restart, stop, yours) are dashed lines. Members of a population
        have the same color in each panel, and the legend names at most sixteen of them.

        `history.plot().savefig("run.pdf")` keeps it; as the last line of a notebook's cell it shows
        itself. MissingLibraryError without matplotlib, RowError for unknown names or no rows.
        """
        from tsunax.run import plots

        return plots.plot(self, names, x)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps int64, values float64) of the rows that have `name`; RowError if unknown.

        To plot them: `plt.plot(*history.series("val/loss"))`.
        """
        rows, values = self._column(name)
        return self["step"][np.array(rows, np.int64)], np.array(values, np.float64)

    def newest(self, name: str) -> tuple[int, float] | None:
        """The last (step, value) of `name`, for example `(20, 1.75)`; None if it has none."""
        if name not in self._columns:
            return None
        rows, values = self._columns[name]
        return self._steps[rows[-1]], values[-1]

    def last(self, name: str) -> float:
        """The newest value of `name`, a float; RowError for an unknown name."""
        return self._column(name)[1][-1]

    def _column(self, name: str) -> tuple[array, array]:
        if name not in self._columns:
            fix = "" if self.names else "It has no row: no step was applied and logged."
            raise RowError(unknown("name", "history", str(name), ["step", *self.names], fix))
        return self._columns[name]

    def plain(self) -> dict[str, Any]:
        """The history as lists, strings and NumPy arrays; `History.of` reads it back."""
        columns = [[name, *map(np.array, column)] for name, column in self._columns.items()]
        rows, (step, names) = {"step": self["step"], "columns": columns}, self._closing
        plain = {"rows": rows, "marks": [*map(list, self.marks)], "time": dict(self.time)}
        return plain | {"closing": [step, list(names)]}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> History:
        """The history from `plain`'s result; arrays may be lists after a trip through JSON."""
        history, rows = cls(), plain["rows"]
        history._steps = _array("q", rows["step"])
        for name, at, values in rows["columns"]:
            history._columns[str(name)] = _array("q", at), _array("d", values)
        history.marks = [(int(step), str(name), str(text)) for step, name, text in plain["marks"]]
        history.time |= plain.get("time", {})
        step, names = plain["closing"]
        history._closing = int(step), tuple(map(str, names))
        return history

    _repr_html_ = tables.folded

    def __repr__(self) -> str:
        span = f", steps {self._steps[0]:,} to {self._steps[-1]:,}" if self._steps else ""
        marks = f", {len(self.marks)} marks" if self.marks else ""
        rows = [["", "last", "min", "max", "rows"]] if self.names else []
        for kind, members in tables.families(self.names).items():
            columns = [self._columns[name][1] for name in members]
            label = f"{kind}/0…{len(members) - 1}" if len(members) > 1 else kind
            newest = sorted(values[-1] for values in columns)
            values = np.concatenate([*columns])
            known = values[np.isfinite(values)] if np.isfinite(values).any() else [math.nan]
            shown = newest[len(newest) // 2], min(known), max(known)  # of members, the middle one
            rows.append([label, *map("{:.5g}".format, shown), f"{max(map(len, columns)):,}"])
        table = tables.aligned(rows, right=range(1, 5))
        head = f"History({len(self):,} rows{span}{marks})"
        return "\n".join([head, *(f"  {line}" for line in table)])


def check_names(row: Iterable[Any], where: str = "row") -> None:
    """Raise unless every name can be a column header and a TensorBoard tag.

    WrongTypeError for what is no string; RowError for one that is empty, not printable, or a name
    that rows have of themselves, "step" or "run_id".
    """
    for name in row:
        if not isinstance(name, str):
            raise WrongTypeError("name of a number", where, trees.describe(name), "a str")
        if name in ("step", "run_id") or not name or not name.isprintable():
            expected = "a printable name like 'loss' or 'val/loss', not 'step' or 'run_id'"
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
    # an int of Python has any size, and a column is float64
    is_plain = lambda x: type(x) is float or (type(x) is int and abs(x) < 1 << 1023)
    return {name: x if is_plain(x) else _number(name, x, where) for name, x in row.items()}


def _number(name: str, x: Any, where: str) -> float:
    if trees.is_traced(x):
        fix = "Return it as a metric: inside jit it has no value yet."
        raise WrongTypeError(repr(name), where, "a traced array", "a number", fix)
    is_array = isinstance(x, (int, float)) or hasattr(x, "__array__")
    value: Any = np.asarray(x) if is_array else None
    is_a = lambda *kinds: any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
    if value is None or not is_a(np.floating, np.integer, np.bool_):
        expected = "a number" + " that float64 can hold" * isinstance(x, int)
        raise WrongTypeError(repr(name), where, trees.describe(x), expected)
    if value.ndim:
        fix = "Reduce it, or log its parts."
        raise RowError(repr(name), where, trees.describe(x), "one number", fix)
    return float(value) if is_a(np.floating) else int(value)
