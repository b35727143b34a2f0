"""The history of a run: rows of numbers by step, and marks of events. Its clock and its pace.

The loop fills a `History`, and people read it: columns as NumPy arrays, a DataFrame, a plot. It
uses no device, no state and no file.
"""

from __future__ import annotations

import collections
import contextlib
import math
import operator
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tsunax._core import Figure, tables, trees
from tsunax.errors import RowError, unknown

CAUSES = ("compile", "data", "device", "evaluation", "checkpoint", "callbacks", "idle")
# Names of rows that `fit` fills: no metric may have such a name.
OF_ROWS = ("loss", "grad_norm", "update_norm", "loss_scale", "dropped", "weight", "step")
OF_FIT = ("epoch", "rejected", "steps_per_second", "examples_per_second")
MOST_ROWS = 50_000  # rows that a history keeps
MOST_MARKS = 10_000
RECENT_READS = 16  # the pace of a run is measured over this many reads
Pairs = collections.deque[tuple[float, int]]


def _array(kind: str, values: Any) -> array:
    return array(kind, np.asarray(values, {"q": np.int64, "d": np.float64}[kind]).tobytes())


class Clock:
    """Counts seconds. Each moment of the main thread belongs to one cause, "idle" at first."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        self.total: dict[str, float] = dict(self.seconds)  # with the seconds of earlier runs
        self.cause: str = "idle"  # the cause of the current lap, which may change until its end
        self.subject: Any = None  # the callback or other function that runs in this lap
        self.since: float = time.perf_counter()

    def lap(self, cause: str, subject: Any = None) -> float:
        """End a lap, count its seconds for its cause, begin one of `cause`. Returns the time."""
        lap_end = time.perf_counter()
        self.seconds[self.cause] += lap_end - self.since
        self.total[self.cause] += lap_end - self.since
        self.cause, self.subject, self.since = cause, subject, lap_end
        return lap_end

    @contextlib.contextmanager
    def __call__(self, cause: str, subject: Any = None) -> Iterator[None]:
        """A block with seconds of this cause."""
        previous_lap = self.cause, self.subject
        self.lap(cause, subject)
        try:
            yield
        finally:
            self.lap(*previous_lap)

    def continue_from(self, total: dict[str, float]) -> None:
        """Add the seconds of this clock to `total`, of earlier runs: now and at every lap."""
        for cause, seconds in self.seconds.items():
            total[cause] += seconds
        self.total = total


class Pace:
    """The seconds per step over the last reads. Compiling and boundaries are left out."""

    def __init__(self) -> None:
        self.step_seconds: float = math.inf  # inf: unknown
        self.read_time: float = 0.0  # when calls were read last; 0 before the first call
        self.steps_read: int = 0
        self.gathered_calls: float = 0.0  # calls that only gathered a gradient (`rules.accumulate`)
        self._excluded_seconds: float = 0.0
        self._excluded_steps: int = 0
        # for each of the last reads (clock without excluded seconds, steps done), (examples, steps)
        self._timings: Pairs = collections.deque(maxlen=RECENT_READS)
        self._examples: Pairs = collections.deque(maxlen=RECENT_READS)

    @property
    def is_known(self) -> bool:
        return self.step_seconds < math.inf

    def exclude(self, seconds: float, steps: int = 0) -> None:
        """Leave out these seconds, and the steps that were done in them."""
        self._excluded_seconds += seconds
        self._excluded_steps += steps

    def measure(self, steps: int, unread_steps: int) -> None:
        """Count a read of `steps`, when `unread_steps` more are done."""
        self.read_time = time.perf_counter()
        self.steps_read += steps
        steps_done = self.steps_read + unread_steps - self._excluded_steps
        clock = self.read_time - self._excluded_seconds
        # not at the first read, because the first call compiles
        if self._timings and steps_done > self._timings[0][1]:
            clock_before, steps_before = self._timings[0]
            self.step_seconds = max(clock - clock_before, 1e-9) / (steps_done - steps_before)
        self._timings.append((clock, steps_done))

    def rates(self, examples: float | None, steps: int) -> dict[str, float]:
        """Applied steps and examples per second, after a read of `steps`; {} if unknown.

        `examples` is their mean in a step of this read; a short batch at the end of an epoch is one
        of the last reads.
        """
        if examples is not None and math.isfinite(examples):
            self._examples.append((examples * steps, steps))
        if not self.is_known:
            return {}
        counts = {"steps": 1 - self.gathered_calls / self.steps_read}
        if self._examples:
            sums = map(sum, zip(*self._examples, strict=True))
            counts["examples"] = operator.truediv(*sums)
        return {f"{name}_per_second": n / self.step_seconds for name, n in counts.items()}


class History:
    """Rows of numbers by step, as columns, and marks of events.

    A row need not have every name. A number costs 16 bytes, a row 8 more. At 50,000 rows half of
    the rows are dropped, evenly. The newest stays, and so do rows with a rare name (evaluations).

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
        # {name: numbers of the rows that have it, its values in these rows}
        self._columns: dict[str, tuple[array, array]] = {}
        self.marks: list[tuple[int, str, str]] = []
        # seconds by cause, of all runs with this history: see `Clock`
        self.time: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        self._closing: tuple[int, tuple[str, ...]] = -1, ()  # the step and the names of `close`

    def add(self, row: Mapping[str, Any], step: int) -> None:
        """Add a row, a dict of numbers, or join it to the row of the same step; newer values win.

        Raises RowError for a step before the last one, and as `check_row` does.
        """
        row, last = check_row(row, f"step {step}"), self._steps[-1] if self._steps else None
        if last is not None and step < last:
            raise RowError("row", "history", f"step {step}", f"step {last} or later")
        if step != last:
            self._thin()
            self._steps.append(step)
        row_number = len(self._steps) - 1
        for name, value in row.items():
            rows, values = self._columns.setdefault(name, (array("q"), array("d")))
            if rows and rows[-1] == row_number:
                values[-1] = value
            else:
                rows.append(row_number)
                values.append(value)

    def extend(self, columns: Mapping[str, np.ndarray], steps: np.ndarray) -> None:
        """Add rows for several steps: a faster `add`. Each of `columns` has a number for each step.

        Raises RowError for steps that do not increase, and for a column of another shape or name.

        >>> history = History()
        >>> history.extend({"loss": np.array([0.5, 0.25])}, np.array([10, 20]))
        >>> history["step"], history["loss"]
        (array([10, 20]), array([0.5 , 0.25]))
        """
        steps = np.asarray(steps, np.int64)
        check_names(columns, "extend()")
        for name, x in columns.items():
            if np.shape(x) != steps.shape:
                raise RowError(repr(name), "extend()", trees.describe(x), f"{len(steps)} numbers")
        if np.any(np.diff(np.append(self._steps[-1:], steps)) <= 0):
            raise RowError("rows", "history", f"steps from {steps[0]}", "steps that increase")
        while len(steps):
            self._thin()
            n = max(MOST_ROWS - len(self), 1)
            new_rows = _array("q", np.arange(len(steps[:n])) + len(self))
            self._steps += _array("q", steps[:n])
            for name, values in columns.items():
                rows, column = self._columns.setdefault(name, (array("q"), array("d")))
                rows += new_rows
                column += _array("d", values[:n])
            steps, columns = steps[n:], {name: values[n:] for name, values in columns.items()}

    def _thin(self) -> None:
        """If the history is full, keep the first row of each span of steps, at most half the rows.

        Spans are powers of two, so that rows that are kept later were kept before. The newest row
        of each name stays, and so do rows with a rare name.
        """
        n, columns = len(self), self._columns.values()
        if n < MOST_ROWS:
            return
        steps, mask, span = self["step"], np.full(n, False), 1
        rare_rows = [i for rows, _ in columns if 2 * len(rows) < n for i in rows]
        if len(rare_rows) < n // 4:
            mask[rare_rows] = True
        frequent_rows = np.flatnonzero(~mask)
        while np.sum(is_first := np.diff(steps[frequent_rows] // span, prepend=-1) != 0) > n // 2:
            span *= 2
        mask[frequent_rows[is_first]] = True
        mask[[rows[-1] for rows, _ in columns]] = True
        new_rows = np.cumsum(mask) - 1
        self._steps = _array("q", steps[mask])
        for name, (rows, values) in self._columns.items():
            stays = mask[old_rows := np.array(rows)]
            values = _array("d", np.array(values)[stays])
            self._columns[name] = _array("q", new_rows[old_rows[stays]]), values

    def close(self, row: Mapping[str, Any], step: int) -> None:
        """`add` numbers, a dict, that only the end of a run has; see `reopen`. Raises as `add`."""
        earlier_names = self._closing[1] if self._closing[0] == step else ()
        new_names = [name for name in row if name not in self._numbers_at(step)]
        self.add(row, step)
        self._closing = step, (*earlier_names, *new_names)

    def reopen(self) -> tuple[int, dict[str, float]]:
        """Remove the numbers that `close` added, when their run continues.

        Returns the step of these numbers, -1 for none, and the numbers by name.
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

        The loop uses "evaluate", "rejected", "thaw", "restart", "stop" and more names. Beyond
        10,000 marks, every second mark of the most frequent `name` is dropped.
        """
        self.marks.append((int(step), str(name), str(text)))
        if len(self.marks) > MOST_MARKS:
            names = [name for _, name, _ in self.marks]
            frequent = max(dict.fromkeys(names), key=names.count)
            dropped = {*[i for i, name in enumerate(names) if name == frequent][1::2]}
            self.marks = [x for i, x in enumerate(self.marks) if i not in dropped]

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

        Raises RowError for an unknown name, with the names of the history.
        """
        if name == "step":
            return np.array(self._steps, np.int64)
        rows, values = self._column(name)
        column = np.full(len(self), math.nan)
        column[np.array(rows, np.int64)] = values
        return column

    def plot(
        self, *, names: Sequence[str] | None = None, x: str = "step", smooth: float = 0.0
    ) -> Figure:
        """A matplotlib Figure of the run: loss, metrics, learning rate and events.

        `names` are the columns to draw instead; columns with the same end share a panel. `x` is
        "step", or a column for the horizontal axis; with "epoch" the first epoch ends at 1. A
        constant has no panel: the line above gives its value. Rejected steps are red
        ticks at the lower edge; other marks but evaluations (thaw, restart, stop, yours) are dashed
        lines. Members of a population have the same color in each panel, and the legend names at
        most sixteen members. With `smooth`, in [0, 1), lines are exponential averages
        (bias-corrected, as TensorBoard's, but with the weight smooth^n of a number n rows ago, so
        that rare evaluations do not lag) above the pale rows; learning rates and numbers that are
        mostly constant stay as they are.

        `history.plot().savefig("run.pdf")` saves the figure; as the last line of a notebook's cell
        it shows itself. Raises MissingLibraryError without matplotlib, RowError for unknown names
        or no rows, HyperparameterError for a `smooth` out of range.
        """
        from tsunax.run import plots

        return plots.plot(self, names, x, smooth)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps int64, values float64) of the rows that have `name`; RowError if unknown.

        To plot them: `plt.plot(*history.series("val/loss"))`.
        """
        rows, values = self._column(name)
        return self["step"][np.array(rows, np.int64)], np.array(values, np.float64)

    def newest(self, name: str) -> tuple[int, float] | None:
        """The last (step, value) of `name`, for example `(20, 1.75)`; None if it has none."""
        if name not in self or not len(self):
            return None
        rows, values = self._column(name)
        return self._steps[rows[-1]], values[-1]

    def _numbers_at(self, step: int) -> dict[str, float]:
        """The numbers of this step, of names without a later number."""
        pairs = {name: (rows[-1], values[-1]) for name, (rows, values) in self._columns.items()}
        return {name: x for name, (i, x) in pairs.items() if self._steps[i] == step}

    def last(self, name: str) -> float:
        """The newest value of `name`, a float; RowError for an unknown name."""
        return self._column(name)[1][-1]

    def _column(self, name: str) -> tuple[array, array]:
        if name == "step":
            return _array("q", range(len(self))), _array("d", self._steps)
        if name not in self._columns:
            raise RowError(unknown("name", "history", str(name), ["step", *self.names]))
        return self._columns[name]

    def plain(self) -> dict[str, Any]:
        """The history as lists, strings and NumPy arrays; `History.of` reads it back."""
        columns = [[name, *map(np.array, column)] for name, column in self._columns.items()]
        rows, (step, names) = {"step": self["step"], "columns": columns}, self._closing
        plain = {"rows": rows, "marks": [*map(list, self.marks)], "time": dict(self.time)}
        return plain | {"closing": [step, list(names)]}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> History:
        """The history from the result of `plain`; arrays may be lists, as JSON returns them."""
        history, rows = cls(), plain["rows"]
        history._steps = _array("q", rows["step"])
        for name, row_numbers, values in rows["columns"]:
            history._columns[str(name)] = _array("q", row_numbers), _array("d", values)
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
            finite = values[np.isfinite(values)] if np.isfinite(values).any() else [math.nan]
            # a population shows the last value of its middle member
            numbers = newest[len(newest) // 2], min(finite), max(finite)
            rows.append([label, *map("{:.5g}".format, numbers), f"{max(map(len, columns)):,}"])
        table = tables.aligned(rows, right=range(1, 5))
        head = f"History({len(self):,} rows{span}{marks})"
        return "\n".join([head, *(f"  {line}" for line in table)])


def check_names(row: Iterable[Any], where: str = "row") -> None:
    """Raise RowError unless every name can be a column header and a TensorBoard tag.

    It is a printable string, and not "step" or "run_id", which every row has.
    """
    for name in row:
        if name in ("", "step", "run_id") or not (isinstance(name, str) and name.isprintable()):
            expected = "a printable name like 'loss' or 'val/loss', not 'step' or 'run_id'"
            raise RowError("name of a number", where, ascii(name), expected)


def check_row(row: Mapping[str, Any], where: str = "row") -> dict[str, float]:
    """The row as Python floats and ints, from Python, NumPy or JAX scalars. NaN is a number.

    Waits for values on a device. Raises RowError as `check_names` does, and for a value that is not
    one real number.

    >>> check_row({"loss": np.float32(0.5), "hits": 3, "ok": True})
    {'loss': 0.5, 'hits': 3, 'ok': 1}
    >>> check_row({"confusion": np.ones((2, 2))}, "evaluate")
    Traceback (most recent call last):
    tsunax.errors.RowError: 'confusion' at evaluate: got float64[2,2], expected one real number.
    """
    check_names(row, where)
    # A Python int has any size, but a column is float64.
    is_plain = lambda x: type(x) is float or (type(x) is int and abs(x) < 1 << 1023)
    return {name: x if is_plain(x) else _number(name, x, where) for name, x in row.items()}


def _number(name: str, x: Any, where: str) -> float:
    value = np.asarray(x)
    is_a = lambda *kinds: any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
    if value.ndim or not is_a(np.floating, np.integer, np.bool_):
        raise RowError(repr(name), where, trees.describe(x), "one real number")
    return float(value) if is_a(np.floating) else int(value)
