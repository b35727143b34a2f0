"""One trial: what an objective takes, what became of it, and how that is written down."""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tsunax._core import checks, trees
from tsunax._core.source_lines import LIBRARIES
from tsunax.errors import HyperparameterError, TsunaxError, WrongTypeError, message, unknown

RESERVED = ("report", "trial")  # what an objective may name beside the space
COLUMNS = ("trial", "value", "status", "seconds", "cause")  # of the table, beside the space
STATUSES = ("done", "pruned", "failed", "interrupted")


class Pruned(TsunaxError):
    """Ends a trial that is not worth going on: raised by `report`, and caught by `tune`."""


class Cause(NamedTuple):
    """Why a trial failed."""

    type: str
    message: str
    where: str = ""  # the last line of the user's own code

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" + (f" ({self.where})" if self.where else "")


@dataclass(frozen=True)
class Trial:
    """One set of values, and what became of it."""

    index: int
    values: dict[str, Any]
    status: str  # "done", "failed", "pruned"; "interrupted": it will be run again
    # what the best is sought of; of a pruned trial the last that it reported
    value: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    cause: Cause | None = None
    seconds: float = 0.0
    reports: dict[int, float] = field(default_factory=dict)  # by step


def ranked(value: float | None, mode: str) -> float:
    """A number that is smaller for what is better, and largest for what is none."""
    if value is None or math.isnan(value):
        return math.inf
    return value if mode == "min" else -value


def parameters(objective: Callable) -> tuple[dict[str, inspect.Parameter], bool]:
    """What an objective takes by name, and whether it takes any other name too."""
    try:
        found = inspect.signature(objective).parameters
    except (TypeError, ValueError):
        return {}, True
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    is_open = any(p.kind is p.VAR_KEYWORD for p in found.values())
    return {name: p for name, p in found.items() if p.kind in named}, is_open


def own(objective: Callable, trial: Any, report: Callable) -> dict[str, Any]:
    """Those of the reserved names that an objective names."""
    given = {"trial": trial, "report": report}
    return {name: given[name] for name in RESERVED if name in parameters(objective)[0]}


# What came back


def judged(
    index: int, values: dict, outcome: Any, metric: str | None, reports: dict, seconds: float
) -> Trial:
    """The trial whose objective returned `outcome`, was `Pruned`, or raised what is in a Cause."""
    trial = Trial(index, values, "done", seconds=round(seconds, 6), reports=dict(reports))
    if outcome is Pruned:
        last = next(reversed(reports.values()), None)
        return dataclasses.replace(trial, status="pruned", value=last)
    if not isinstance(outcome, Cause):
        try:
            metrics, value = numbers(outcome, metric)
        except TsunaxError as error:
            outcome = cause_of(error)
        else:
            trial = dataclasses.replace(trial, value=value, metrics=metrics)
            if math.isfinite(value):
                return trial
            text = message("result", "objective", value, "a finite number")
            outcome = Cause("NonFiniteError", text)
    return dataclasses.replace(trial, status="failed", cause=outcome)


def numbers(result: Any, metric: str | None) -> tuple[dict[str, float], float]:
    """All numbers of a result, and the one that counts. Raises for what is none."""
    if not isinstance(result, Mapping):
        if metric is not None:
            expected = f"a dict with {metric!r}, as metric= says"
            raise WrongTypeError("result", "objective", trees.describe(result), expected)
        return {}, _number(result, "objective")
    metrics = {str(name): _number(x, f"objective, {name!r}") for name, x in result.items()}
    name = next(iter(metrics)) if metric is None and len(metrics) == 1 else metric
    if name is None:
        got = f"{len(metrics)} numbers ({trees.listed(list(metrics), 8)})"
        fix = "Say which: tune(..., metric=...)."
        raise HyperparameterError("result", "objective", got, "one", fix)
    if name not in metrics:
        raise HyperparameterError(unknown("metric", "objective", name, metrics))
    return metrics, metrics[name]


def _number(x: Any, where: str) -> float:
    is_python = isinstance(x, int | float) and not isinstance(x, bool)
    if not is_python and not (checks.is_real(x) and np.size(x) == 1):
        raise WrongTypeError("result", where, trees.describe(x), "a number, or a dict of numbers")
    try:
        return float(np.asarray(x).reshape(()))
    except OverflowError:  # an int beyond all floats
        return math.inf if x > 0 else -math.inf


def apart(outcome: Any, n: int) -> list[Any]:
    """What each of n trials got of what they returned together."""
    if isinstance(outcome, Cause) or outcome is Pruned:
        return [outcome] * n
    columns = dict(outcome) if isinstance(outcome, Mapping) else {"": outcome}
    try:
        columns = {name: np.asarray(column) for name, column in columns.items()}
    except ValueError as error:  # lists of several lengths
        return [cause_of(error)] * n
    for name, column in columns.items():
        if column.shape != (n,):
            at = f"objective, {name!r}" if name else "objective"
            expected = f"an array of {n} numbers, one for each trial"
            text = message("result", at, trees.describe(column), expected)
            return [Cause("WrongTypeError", text)] * n
    rows = [{name: column[i] for name, column in columns.items()} for i in range(n)]
    return rows if isinstance(outcome, Mapping) else [row[""] for row in rows]


def note(reports: dict[int, float], step: Any, value: Any) -> None:
    """A report of one trial."""
    checks.check_count(np.asarray(step)[()], "report()", "step", least=0)
    reports.pop(int(step), None)
    reports[int(step)] = _number(value, "report()")


def cause_of(error: BaseException) -> Cause:
    """An exception as text: it would hold frames, and they arrays."""
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        name, line = frame.filename, (frame.line or "").strip()
        if "site-packages" not in name and not name.startswith(LIBRARIES):
            where = f"{os.path.basename(name)}:{frame.lineno}" + (f": {line}" if line else "")
    try:
        text = (str(error).strip().splitlines() or [""])[0]
    except Exception:  # of the exception's own
        text = ""
    return Cause(type(error).__name__, text[:300], where[:300])


# As a record of a journal: JSON, which has no nan and no inf


def as_record(trial: Trial) -> dict[str, Any]:
    """A trial as JSON can hold it; `from_record` is the inverse."""
    said = lambda x: x if x is None or math.isfinite(x) else str(x)
    return dataclasses.asdict(trial) | {
        "value": said(trial.value),
        "metrics": {name: said(x) for name, x in trial.metrics.items()},
        "reports": [[step, said(x)] for step, x in trial.reports.items()],
    }


def from_record(record: Mapping[str, Any]) -> Trial:
    """The trial of a record. Any exception means that `as_record` did not write it."""
    value, cause = record["value"], record["cause"]
    found = {
        "index": index_of(record["index"]),
        "values": {name: _tuples(x) for name, x in record["values"].items()},
        "value": None if value is None else float(value),
        "metrics": {name: float(x) for name, x in record["metrics"].items()},
        "cause": None if cause is None else Cause(*map(str, cause)),
        "seconds": float(record["seconds"]),
        "reports": {int(step): float(x) for step, x in record["reports"]},
    }
    trial = Trial(**{**record, **found})
    if trial.status not in STATUSES:
        raise ValueError(f"status {trial.status!r}")
    return trial


def index_of(x: Any) -> int:
    """The number of a trial. Raises for what is none."""
    if not 0 <= operator.index(x) < 1 << 62:
        raise ValueError(f"index {x}")
    return int(x)


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x
