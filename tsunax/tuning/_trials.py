"""One trial: what an objective takes, what became of it, and how that is written down."""

from __future__ import annotations

import dataclasses
import inspect
import linecache
import math
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tsunax._core import checks, trees
from tsunax._core.source_lines import LIBRARIES
from tsunax.errors import HyperparameterError, TsunaxError, WrongTypeError, message, unknown

__all__ = []

RESERVED = ("report", "trial")  # what an objective may name beside the space
COLUMNS = (
    "trial",
    "value",
    "status",
    "seconds",
    "cause",
)  # of the table, beside the space and the metrics


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
    value: float | None = (
        None  # what the best is sought of; of a pruned trial the last that it reported
    )
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
    named = {
        name: p for name, p in found.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    return named, any(p.kind is p.VAR_KEYWORD for p in found.values())


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
        return dataclasses.replace(
            trial, status="pruned", value=next(reversed(reports.values()), None)
        )
    if isinstance(outcome, Cause):
        return dataclasses.replace(trial, status="failed", cause=outcome)
    try:
        metrics, value = numbers(outcome, metric)
    except TsunaxError as error:
        return dataclasses.replace(trial, status="failed", cause=cause_of(error))
    if math.isfinite(value):
        return dataclasses.replace(trial, value=value, metrics=metrics)
    cause = Cause("NonFiniteError", message("result", "objective", value, "a finite number"))
    return dataclasses.replace(trial, status="failed", value=value, metrics=metrics, cause=cause)


def numbers(result: Any, metric: str | None) -> tuple[dict[str, float], float]:
    """All numbers of a result, and the one that counts. Raises for what is none."""
    if not isinstance(result, Mapping):
        if metric is not None:
            expected = f"a dict with {metric!r}, as metric= says"
            raise WrongTypeError(message("result", "objective", trees.describe(result), expected))
        return {}, _number(result, "objective")
    metrics = {str(name): _number(x, f"objective, {name!r}") for name, x in result.items()}
    name = next(iter(metrics)) if metric is None and len(metrics) == 1 else metric
    if name is None:
        got = f"{len(metrics)} numbers ({trees.listed(list(metrics), 8)})"
        raise HyperparameterError(
            message("result", "objective", got, "one", "Say which: tune(..., metric=...).")
        )
    if name not in metrics:
        raise HyperparameterError(unknown("metric", "objective", name, metrics))
    return metrics, metrics[name]


def _number(x: Any, where: str) -> float:
    if not _is_number(x):
        raise WrongTypeError(
            message("result", where, trees.describe(x), "a number, or a dict of numbers")
        )
    return _float(x)


def _float(x: Any) -> float:
    try:
        return float(np.asarray(x).reshape(()))
    except OverflowError:  # an int beyond all floats
        return math.inf if x > 0 else -math.inf


def _is_number(x: Any) -> bool:
    return (checks.is_real(x) and np.size(x) == 1) or (
        isinstance(x, int | float) and not isinstance(x, bool)
    )


def apart(outcome: Any, n: int) -> list[Any]:
    """What each of n trials got of what they returned together."""
    if isinstance(outcome, Cause) or outcome is Pruned:
        return [outcome] * n
    columns = dict(outcome) if isinstance(outcome, Mapping) else {"": outcome}
    for name, column in columns.items():
        if isinstance(column, list | tuple) and all(map(_is_number, column)):
            columns[name] = column = np.array([_float(x) for x in column])
        if not checks.is_real(column) or np.shape(column) != (n,):
            at = f"objective, {name!r}" if name else "objective"
            text = message(
                "result", at, trees.describe(column), f"an array of {n} numbers, one for each trial"
            )
            return [Cause("WrongTypeError", text)] * n
    rows = [{name: float(column[i]) for name, column in columns.items()} for i in range(n)]
    return rows if isinstance(outcome, Mapping) else [row[""] for row in rows]


def note(reports: dict[int, float], step: Any, value: Any) -> None:
    """A report of one trial."""
    checks.check_count(np.asarray(step)[()], "report()", "step", least=0)
    reports.pop(int(step), None)
    reports[int(step)] = _number(value, "report()")


def note_all(reports: dict[int, Any], n: int, step: Any, values: Any) -> None:
    """A report of n trials at once."""
    if np.shape(values) != (n,):
        raise WrongTypeError(
            message("values", "report()", trees.describe(values), f"one for each of {n} trials")
        )
    note({}, step, 0.0)
    reports[int(step)] = np.asarray(values, np.float64)


def cause_of(error: BaseException) -> Cause:
    """An exception as text: it would hold frames, and they arrays."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename
    ]
    own = [f for f in frames if not f.filename.startswith(LIBRARIES)]
    where = ""
    if own:
        line = (own[-1].line or linecache.getline(own[-1].filename, own[-1].lineno or 0)).strip()
        where = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" + (
            f": {line}" if line else ""
        )
    try:
        text = str(error).strip().splitlines() or [""]
    except Exception:  # of the exception's own
        text = [""]
    return Cause(type(error).__name__, text[0][:300], where[:300])


# As a record


def as_record(trial: Trial) -> dict[str, Any]:
    return dataclasses.asdict(trial) | {"reports": list(trial.reports.items())}


def from_record(record: Mapping[str, Any]) -> Trial:
    found = dict(record)
    found["cause"] = None if found["cause"] is None else Cause(*found["cause"])
    found["reports"] = {int(step): float(x) for step, x in found["reports"]}
    found["values"] = {name: _tuples(x) for name, x in found["values"].items()}
    trial = Trial(**found)
    numbers = [
        *trial.metrics.values(),
        trial.seconds,
        *([] if trial.value is None else [trial.value]),
    ]
    texts = [trial.status, *trial.values, *trial.metrics, *(trial.cause or ())]
    is_one = type(trial.index) is int and all(type(x) in (int, float) for x in numbers)
    if not is_one or not all(isinstance(x, str) for x in texts):
        raise TypeError("no trial")
    return trial


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x
