"""The outcomes of an objective: a trial with its numbers or its failure, and all trials."""

import dataclasses
import inspect
import math
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tsunax._core import checks, tables, trees
from tsunax.errors import (
    LIBRARIES,
    HyperparameterError,
    TrialError,
    TsunaxError,
    WrongTypeError,
    unknown,
)


class Pruned(TsunaxError):
    """Ends a trial that is not worth going on: raised by `report`, and caught by `tune`."""


class Cause(NamedTuple):
    """Why a trial failed."""

    type: str
    message: str
    where: str = ""  # the last line in the user's code

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" + (f" ({self.where})" if self.where else "")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One dict of `values`, and the result of the objective for it, after `seconds`.

    `index` is the number of the trial, and `status` is "done", "failed" (with a `cause`) or
    "pruned". `value` is the float that is compared (for a pruned trial the last reported value),
    `metrics` are all returned numbers by name, and `reports` the reported numbers by step.
    """

    index: int
    values: dict[str, Any]
    status: str
    value: float | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    cause: Cause | None = None
    seconds: float = 0.0
    reports: dict[int, float] = dataclasses.field(default_factory=dict)


def rank_of(value: float | None, mode: str) -> float:
    """A number that is smaller for a better value, and infinite without a value."""
    if value is None or math.isnan(value):
        return math.inf
    return value if mode == "min" else -value


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
    """The `trials` of a sweep, a tuple in their order; prints as a table, the best first.

    `space` has the names of the hyperparameters, `mode` is "min" or "max": `result.best.value`.
    """

    trials: tuple[Trial, ...]
    space: tuple[str, ...]
    mode: str = "min"
    _repr_html_ = tables.folded

    @property
    def best(self) -> Trial:
        """The trial with the best finite value, a number; TrialError if none has one."""
        done_trials = [trial for trial in self.trials if trial.status == "done"]
        if not done_trials:
            cause = next((trial.cause for trial in self.trials if trial.cause), None)
            got = f"{len(self.trials)} trials, none of them done; the first failure: {cause}"
            raise TrialError("best", "Result", got, "one that is done")
        return min(done_trials, key=lambda trial: rank_of(trial.value, self.mode))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A dict for each trial, all with the same keys: `pandas.DataFrame(result.rows)`."""
        metrics = dict.fromkeys(name for t in self.trials for name in t.metrics)
        return [
            {f"metrics/{name}": t.metrics.get(name) for name in metrics}
            | {"trial": t.index, "value": t.value, "status": t.status, "seconds": t.seconds}
            | {"cause": str(t.cause or "")}
            | {name: t.values.get(name) for name in self.space}
            for t in self.trials
        ]

    def __getitem__(self, name: str) -> np.ndarray:
        """A column: `result["learning_rate"]`."""
        if self.trials and name not in self.rows[0]:
            raise TrialError(unknown("column", "Result", name, self.rows[0]))
        values = [row[name] for row in self.rows]
        types = {*map(type, values)}
        is_of_objects = tuple in types or (str in types and len(types) > 1)  # each stays as it is
        return np.fromiter(values, object) if is_of_objects else np.array(values)

    def __len__(self) -> int:
        return len(self.trials)

    def __repr__(self) -> str:
        best_first = lambda t: (t.status != "done", rank_of(t.value, self.mode), t.index)
        rows = [["trial", *self.space, "value", "status"]]
        for t in sorted(self.trials, key=best_first)[:20]:
            cells = t.index, *map(t.values.get, self.space), t.value, t.cause or t.status
            rows.append([_cell(x) for x in cells])
        last_line = [f"... {len(self) - 20} more"] if len(self) > 20 else []
        lines = tables.aligned(rows, [0, len(self.space) + 1])
        return "\n".join([f"{len(self)} trials", *lines, *last_line])


def _cell(x: Any) -> str:
    text = f"{x:.4g}" if isinstance(x, float) else "" if x is None else str(x)
    return text if len(text) <= 60 else text[:59] + "…"


def reserved_arguments_of(objective: Callable, trial: Any, report: Callable) -> dict[str, Any]:
    """The arguments with reserved names that an objective takes in addition to the space."""
    parameters = inspect.signature(objective).parameters
    arguments = {"report": report, "trial": trial}
    return {name: x for name, x in arguments.items() if name in parameters}


def as_trial(index: int, values: dict, outcome, metric, reports: dict, seconds: float) -> Trial:
    """The trial with this `outcome`: a result of the objective, `Pruned`, or a Cause."""
    trial = Trial(index, values, "done", seconds=round(seconds, 6), reports=dict(reports))
    if outcome is Pruned:
        return dataclasses.replace(
            trial, status="pruned", value=next(reversed(reports.values()), None)
        )
    if not isinstance(outcome, Cause):
        try:
            metrics, value = numbers(outcome, metric)
        except (TsunaxError, OverflowError) as error:
            outcome = cause_of(error)
        else:
            trial = dataclasses.replace(trial, value=value, metrics=metrics)
            if math.isfinite(value):
                return trial
            text = f"result at objective: got {value}, expected a finite number."
            outcome = Cause("NonFiniteError", text)
    return dataclasses.replace(trial, status="failed", cause=outcome)


def numbers(result: Any, metric: str | None) -> tuple[dict[str, float], float]:
    """All numbers of a result, and the number that is compared. Raises for other types."""
    if not isinstance(result, Mapping) and metric is None:
        return {}, number(result, "objective")
    results = result if isinstance(result, Mapping) else {}
    metrics = {str(name): number(x, f"objective, {name!r}") for name, x in results.items()}
    name = next(iter(metrics)) if metric is None and len(metrics) == 1 else metric
    if name not in metrics:
        fix = "Say which number counts: tune(..., metric=...)."
        raise HyperparameterError(unknown("metric", "objective", str(metric), metrics, fix))
    return metrics, metrics[name]


def number(x: Any, where: str) -> float:
    is_python = isinstance(x, int | float) and not isinstance(x, bool)
    if not is_python and not (checks.is_real(x) and np.size(x) == 1):
        raise WrongTypeError("result", where, trees.describe(x), "a number, or a dict of numbers")
    return float(np.asarray(x, float).reshape(()))


def outcomes_of_members(outcome: Any, n: int) -> list[Any]:
    """The outcome of each of `n` trials that ran as a single vectorized call."""
    if isinstance(outcome, Cause) or outcome is Pruned:
        return [outcome] * n
    columns = dict(outcome) if isinstance(outcome, Mapping) else {"value": outcome}
    for name, column in columns.items():
        if np.shape(column) != (n,):
            expected = f"an array of {n} numbers, one for each trial"
            error = WrongTypeError(f"result {name}", "objective", trees.describe(column), expected)
            return [cause_of(error)] * n
    rows = [{name: np.asarray(column)[i] for name, column in columns.items()} for i in range(n)]
    return rows if isinstance(outcome, Mapping) else [row["value"] for row in rows]


def cause_of(error: BaseException) -> Cause:
    """An exception as text, because the exception itself would keep frames and their arrays."""
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        file, line = frame.filename, (frame.line or "").strip()
        if "site-packages" not in file and not file.startswith(LIBRARIES):
            where = f"{os.path.basename(file)}:{frame.lineno}" + (f": {line}" if line else "")
    text = next(iter(str(error).strip().splitlines()), "")
    return Cause(type(error).__name__, text[:300], where[:300])
