"""What a run was like: rows of numbers by step, and marks where something happened.

A `History` is filled by the loop and read by people: columns as NumPy arrays, a DataFrame, a plot.
It knows of no device, no state and no file.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tsunax._core import Figure, trees
from tsunax.errors import MissingLibraryError, RowError, WrongTypeError, unknown
from tsunax.run.rows import check_names, check_row, families

MOST = 50_000  # rows of a history that are kept; of more every second, every fourth, ...
MOST_MARKS = 10_000

_FORWARD = "A history goes forward: start a new one, or restore the one of that step."


def _array(kind: str, values: Any) -> array:
    return array(kind, np.asarray(values, {"q": np.int64, "d": np.float64}[kind]).tobytes())


class History:
    """Rows of numbers by step, as columns, and the marks beside them.

    A row need not have every name. A number costs 16 bytes, a row 8 more. Beyond 50,000 rows every
    second one goes, then three of four, and so on; the newest stays, and rows with a name that few
    have (an evaluation's). What is kept depends on the rows alone, not on when they came.

    >>> history = History()
    >>> history.add({"loss": 2.5, "learning_rate": 0.1}, step=10)
    >>> history.add({"loss": 1.5}, step=20)
    >>> history.add({"val/loss": 1.75}, step=20)
    >>> history
    History(2 rows, steps 10 to 20)
                        last         min         max     rows
      loss               1.5         1.5         2.5        2
      learning_rate      0.1         0.1         0.1        1
      val/loss          1.75        1.75        1.75        1
    >>> history["step"], history["val/loss"], history.last("learning_rate")
    (array([10, 20]), array([ nan, 1.75]), 0.1)
    """

    def __init__(self) -> None:
        self._steps = array("q")
        # by name the rows that have it, and its values there
        self._columns: dict[str, tuple[array, array]] = {}
        self.marks: list[tuple[int, str, str]] = []
        self._closing: tuple[int, tuple[str, ...]] = -1, ()  # the step and the names of `close`
        # of the rows of the `_dense` names those at multiples of this step stay; 0: all of them
        self._every = 0
        self._dense: set[str] = set()
        # rows up to this step stay, or go with all others when there are too many
        self._settled = -1

    def add(self, row: Mapping[str, Any], step: int) -> None:
        """Add a row. Numbers of a step that already has a row join it; newer values win.

        Raises RowError for a step before the last one, and as `check_row` does.
        """
        row, last = check_row(row, f"step {step}"), self._steps[-1] if self._steps else None
        if last is not None and step < last:
            expected = f"step {last} or later"
            raise RowError("row", "History.add()", f"step {step}", expected, _FORWARD)
        if step != last:
            self._settle()
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
        """Add rows for several steps, in order and beyond the last one: a faster `add`.

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
        self._settle()
        while len(steps):
            stays = self._stays(steps, columns, self._steps[-1] if self._steps else None)
            room = MOST - len(self._steps)
            cut = len(steps) if np.sum(stays) <= room else int(np.flatnonzero(stays)[room]) + 1
            stays[cut - 1] = True  # the newest, until there is a newer one
            taken = np.flatnonzero(stays[:cut])
            rows = _array("q", np.arange(len(taken)) + len(self._steps))
            self._steps += _array("q", steps[taken])
            for name, values in columns.items():
                at, column = self._columns.setdefault(name, (array("q"), array("d")))
                at += rows
                column += _array("d", values[taken])
            steps, columns = steps[cut:], {name: values[cut:] for name, values in columns.items()}
            if len(steps):
                self._settle()

    def _stays(self, steps: np.ndarray, names: Iterable[str], before: int | None) -> np.ndarray:
        """Which rows survive thinning: the first of every `_every` steps, and those of rare names."""
        if not self._every or not self._dense.issuperset(names):
            return np.full(len(steps), True)
        spans = steps // self._every
        first = -1 if before is None else before // self._every
        return spans != np.concatenate([[first], spans[:-1]])

    def _settle(self) -> None:
        """Drop the newest row unless it stays, and thin the history if it is too long."""
        n = len(self._steps)
        if n > 1 and self._every and self._steps[-1] > self._settled:
            there = [name for name, (rows, _) in self._columns.items() if rows[-1] == n - 1]
            if not self._stays(np.array(self._steps[-1:]), there, self._steps[-2])[0]:
                self._pop(there)
        while len(self._steps) > MOST:
            self._thin()
        self._settled = self._steps[-1] if self._steps else -1

    def _thin(self) -> None:
        n, steps = len(self._steps), self["step"]
        self._every = 2 * (self._every or max(1, int(np.median(np.diff(steps)))))
        few = {name for name, (rows, _) in self._columns.items() if 8 * len(rows) < n}
        self._dense = self._columns.keys() - few
        kept = self._stays(steps, (), None)
        for name in few:
            kept[np.array(self._columns[name][0], np.int64)] = True
        if np.sum(kept) > 3 * n // 4:  # there are too many of the few
            self._dense, kept = set(self._columns), self._stays(steps, (), None)
        kept[[rows[-1] for rows, _ in self._columns.values()]] = True  # the newest of each name
        self._keep(kept)

    def _keep(self, kept: np.ndarray) -> None:
        """Drop the rows without a flag."""
        new = np.cumsum(kept) - 1
        self._steps = _array("q", self["step"][kept])
        for name, (rows, values) in self._columns.items():
            at = np.array(rows)
            stays = kept[at]
            column = _array("q", new[at[stays]]), _array("d", np.array(values)[stays])
            self._columns[name] = column

    def _pop(self, names: Iterable[str]) -> bool:
        """Drop the numbers that the newest row has of these names. Whether nothing of it stays."""
        at = len(self._steps) - 1
        for name in names:
            rows, values = self._columns[name]
            if rows[-1] == at:
                del rows[-1], values[-1]
            if not rows:
                del self._columns[name]
        if is_empty := all(rows[-1] != at for rows, _ in self._columns.values()):
            self._steps.pop()
        return is_empty

    def close(self, row: Mapping[str, Any], step: int) -> None:
        """`add` the row of the step at which a run ended, which no other run would have."""
        self.add(row, step)
        self._closing = step, tuple(row)

    def reopen(self) -> int | None:
        """Remove that row when the run goes on; its step if nothing of the row stays."""
        (step, names), self._closing = self._closing, (-1, ())
        is_newest = bool(self._steps) and self._steps[-1] == step
        return step if is_newest and self._pop(names) else None

    def mark(self, name: str, step: int, text: str = "") -> None:
        """Note an event: "evaluate", "rejected", "thaw", "restart", "stop", or a name of yours."""
        self.marks.append((int(step), str(name), str(text)))
        if len(self.marks) > MOST_MARKS:  # of what comes most often, every second one goes
            names = [name for _, name, _ in self.marks]
            often, seen = max(dict.fromkeys(names), key=names.count), itertools.count()
            self.marks = [mark for mark in self.marks if mark[1] != often or next(seen) % 2 == 0]

    @property
    def names(self) -> list[str]:
        """All names but "step", in the order in which they came."""
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
        or a column to lay them out along ("epoch"). Rejected steps are red ticks at the lower edge;
        other marks but evaluations (thaw, restart, stop, yours) are vertical lines.

        `history.plot().savefig("run.pdf")` keeps it; as the last line of a notebook's cell it shows
        itself. Raises MissingLibraryError without matplotlib, and RowError for unknown names and a
        history without rows.
        """
        from tsunax.run import plots

        return plots.plot(self, names, x)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps int64, values float64) of the rows that have `name`; RowError if unknown."""
        rows, values = self._column(name)
        return self["step"][np.array(rows, np.int64)], np.array(values, np.float64)

    def newest(self, name: str) -> tuple[int, float] | None:
        """The last (step, value) of `name`; None where there has been none."""
        if name not in self._columns:
            return None
        rows, values = self._columns[name]
        return self._steps[rows[-1]], values[-1]

    def last(self, name: str) -> float:
        """The newest value of `name`; RowError for an unknown one."""
        return self._column(name)[1][-1]

    if not TYPE_CHECKING:  # for which every name would be one

        def __getattr__(self, name: str):
            names, fix = list(vars(self).get("_columns", ())), ""
            if name in names:
                fix = f". The column is history[{name!r}]."
            elif names:
                known = trees.listed(names, 6)
                fix = f". history.names are {known}; a column is history[{names[0]!r}]."
            raise AttributeError(f"'History' object has no attribute {name!r}{fix}")

    def _column(self, name: str) -> tuple[array, array]:
        if not isinstance(name, str):
            one, got = next(iter(self._columns), "loss"), f"{name!r} ({type(name).__name__})"
            fix = f"history[{one!r}][0] is its first value, history.last({one!r}) the newest."
            raise WrongTypeError("name", "history", got, "a column's name", fix)
        if name not in self._columns:
            raise RowError(unknown("name", "history", name, ["step", *self.names]))
        return self._columns[name]

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with the steps as index. Raises MissingLibraryError without pandas."""
        try:
            import pandas
        except ImportError:
            parts = "library", "to_dataframe()", "no pandas", "pandas", "pip install pandas"
            raise MissingLibraryError(*parts) from None
        index = pandas.Index(self["step"], name="step")
        return pandas.DataFrame({name: self[name] for name in self.names}, index=index)

    def plain(self) -> dict[str, Any]:
        """The history as lists, strings and NumPy arrays; `History.of` reads it back."""
        columns = [
            [name, np.array(rows, np.int64), np.array(values, np.float64)]
            for name, (rows, values) in self._columns.items()
        ]
        rows = {"step": self["step"], "columns": columns, "every": self._every}
        rows |= {"dense": sorted(self._dense), "settled": self._settled}
        closing = [self._closing[0], list(self._closing[1])]
        return {"rows": rows, "marks": [list(mark) for mark in self.marks], "closing": closing}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> History:
        """The history from `plain`'s result; arrays may be lists after a trip through JSON."""
        history, rows = cls(), plain["rows"]
        history._steps = _array("q", rows["step"])
        for name, at, values in rows["columns"]:
            history._columns[str(name)] = _array("q", at), _array("d", values)
        history._every, history._dense = int(rows["every"]), set(rows["dense"])
        history._settled = int(rows["settled"])
        history.marks = [(int(step), str(name), str(text)) for step, name, text in plain["marks"]]
        step, names = plain["closing"]
        history._closing = int(step), tuple(map(str, names))
        return history

    def __repr__(self) -> str:
        span = f", steps {self._steps[0]:,} to {self._steps[-1]:,}" if self._steps else ""
        marks = f", {len(self.marks)} marks" if self.marks else ""
        kinds = {
            f"{kind}/0…{len(members) - 1}" if len(members) > 1 else kind: members
            for kind, members in families(self.names).items()
        }
        width = max(map(len, kinds), default=0)
        lines = [f"History({len(self):,} rows{span}{marks})"]
        if kinds:
            lines.append(f"  {'':{width}} {'last':>11} {'min':>11} {'max':>11} {'rows':>8}")
        for label, members in kinds.items():
            columns = [self._columns[name][1] for name in members]
            last = columns[0][-1]
            if len(columns) > 1:  # of many members, the middle one
                newest = sorted(x[-1] for x in columns if math.isfinite(x[-1])) or [math.nan]
                last = newest[len(newest) // 2]
            finite = [v for values in columns for v in values if math.isfinite(v)] or [math.nan]
            numbers = "".join(f" {v:>11.5g}" for v in (last, min(finite), max(finite)))
            lines.append(f"  {label:{width}}{numbers} {max(map(len, columns)):>8,}")
        return "\n".join(lines)
