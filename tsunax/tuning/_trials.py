"""What became of an objective: one trial, as numbers or the cause of a failure, and all of them."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tsunax._core import checks, tables, trees
from tsunax._core.source_lines import LIBRARIES
from tsunax.errors import HyperparameterError, TrialError, TsunaxError, WrongTypeError, unknown

RESERVED = ("report", "trial")  # what an objective may name beside the space


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
    """One dict of `values`, and the result of the objective for it, after `seconds`.

    `index` is the number of the trial, and `status` is "done", "failed" (with a `cause`) or
    "pruned". `value` is the float that is compared (of a pruned trial the last one reported),
    `metrics` are all numbers returned by name, and `reports` those on the way, by step.
    """

    index: int
    values: dict[str, Any]
    status: str
    value: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    cause: Cause | None = None
    seconds: float = 0.0
    reports: dict[int, float] = field(default_factory=dict)


def ranked(value: float | None, mode: str) -> float:
    """A number that is smaller for what is better, and largest for what is none."""
    if value is None or math.isnan(value):
        return math.inf
    return value if mode == "min" else -value


@dataclass(frozen=True, repr=False)
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
        done = [trial for trial in self.trials if trial.status == "done"]
        if not done:
            failed = [trial for trial in self.trials if trial.cause]
            first = f"; the first failed with {failed[0].cause}" if failed else ""
            got = f"{len(self.trials)} trials, none of them done{first}"
            raise TrialError("best", "Result", got, "one that is done")
        return min(done, key=lambda trial: ranked(trial.value, self.mode))

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
        known = self.rows[0] if self.trials else {}
        if name not in known:
            raise TrialError(unknown("column", "Result", str(name), known))
        return np.array([row[name] for row in self.rows])

    def __len__(self) -> int:
        return len(self.trials)

    def __repr__(self) -> str:
        best_first = lambda t: (t.status != "done", ranked(t.value, self.mode), t.index)
        rows = [["trial", *self.space, "value", "status"]]
        for t in sorted(self.trials, key=best_first)[:20]:
            cells = t.index, *map(t.values.get, self.space), t.value, t.cause or t.status
            rows.append([_cell(x) for x in cells])
        more = [f"... {len(self) - 20} more"] if len(self) > 20 else []
        lines = tables.aligned(rows, [0, len(self.space) + 1])
        return "\n".join([f"{len(self)} trials", *lines, *more])


def _cell(x: Any) -> str:
    text = f"{x:.4g}" if isinstance(x, float) else "" if x is None else str(x)
    return text if len(text) <= 60 else text[:59] + "…"


def own(objective: Callable, trial: Any, report: Callable) -> dict[str, Any]:
    """Those of the reserved names that an objective takes."""
    given = {"trial": trial, "report": report}
    takes = inspect.signature(objective).parameters
    return {name: given[name] for name in RESERVED if name in takes}


def judged(index: int, values: dict, outcome, metric, reports: dict, seconds: float) -> Trial:
    """The trial whose objective returned `outcome`, was `Pruned`, or raised what is in a Cause."""
    trial = Trial(index, values, "done", seconds=round(seconds, 6), reports=dict(reports))
    if outcome is Pruned:
        last = next(reversed(reports.values()), None)
        return dataclasses.replace(trial, status="pruned", value=last)
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
    """All numbers of a result, and the one that counts. Raises for what is none."""
    if not isinstance(result, Mapping):
        if metric is not None:
            expected = f"a dict with {metric!r}, as metric= says"
            raise WrongTypeError("result", "objective", trees.describe(result), expected)
        return {}, number(result, "objective")
    metrics = {str(name): number(x, f"objective, {name!r}") for name, x in result.items()}
    name = next(iter(metrics)) if metric is None and len(metrics) == 1 else metric
    if name is None:
        got = f"{len(metrics)} numbers ({trees.listed(list(metrics), 8)})"
        fix = "Say which: tune(..., metric=...)."
        raise HyperparameterError("result", "objective", got, "one", fix)
    if name not in metrics:
        raise HyperparameterError(unknown("metric", "objective", name, metrics))
    return metrics, metrics[name]


def number(x: Any, where: str) -> float:
    is_python = isinstance(x, int | float) and not isinstance(x, bool)
    if not is_python and not (checks.is_real(x) and np.size(x) == 1):
        raise WrongTypeError("result", where, trees.describe(x), "a number, or a dict of numbers")
    return float(np.asarray(x, float).reshape(()))


def apart(outcome: Any, n: int) -> list[Any]:
    """What each of n trials got of what they returned together."""
    if isinstance(outcome, Cause) or outcome is Pruned:
        return [outcome] * n
    columns = dict(outcome) if isinstance(outcome, Mapping) else {"": outcome}
    for name, column in columns.items():
        if np.shape(column) != (n,):
            at = f"objective, {name!r}" if name else "objective"
            expected = f"an array of {n} numbers, one for each trial"
            return [cause_of(WrongTypeError("result", at, trees.describe(column), expected))] * n
    rows = [{name: np.asarray(column)[i] for name, column in columns.items()} for i in range(n)]
    return rows if isinstance(outcome, Mapping) else [row[""] for row in rows]


def cause_of(error: BaseException) -> Cause:
    """An exception as text: it would hold frames, and they arrays."""
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        name, line = frame.filename, (frame.line or "").strip()
        if "site-packages" not in name and not name.startswith(LIBRARIES):
            where = f"{os.path.basename(name)}:{frame.lineno}" + (f": {line}" if line else "")
    text = next(iter(str(error).strip().splitlines()), "")
    return Cause(type(error).__name__, text[:300], where[:300])
