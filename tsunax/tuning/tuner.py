"""Trials of one objective over a space of hyperparameters: run, recorded, resumed, compared.

    def objective(learning_rate, width):
        ...
        return ts.evaluate(score, state, held_out)["loss"]

    space = {"learning_rate": ts.tuning.spaces.log_uniform(1e-5, 1e-1), "width":
    ts.tuning.spaces.choice([64, 128])} result = ts.tune(objective, space, trials=50,
    directory="sweep") result.best.values, result.best.value

What a trial is given is a function of (seed, trial) alone, and what it gave is on the disk before
the next one starts: a sweep that is killed goes on, and ends as if it had not been. It knows
nothing of states or steps.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tsunax._core import checks, durable_files, stable_text, trees
from tsunax._core.interrupts import in_notebook
from tsunax.distributed import processes
from tsunax.errors import (
    CheckpointError,
    HyperparameterError,
    ProcessError,
    TrialError,
    WrongTypeError,
    message,
    unknown,
)
from tsunax.run import plots
from tsunax.run import progress as _progress
from tsunax.tuning import _journal, _optuna, _ray_tune, _sweep, _trials, spaces
from tsunax.tuning._trials import Cause, Pruned, Trial

__all__ = [
    "Cause",
    "Pruned",
    "Result",
    "Trial",
    "as_trainable",
    "halving",
    "median",
    "read",
    "tune",
]


# --------------------------------------------------------------------------------------- the result


@dataclass(frozen=True, repr=False)
class Result:
    """The trials of a sweep in their order; prints as a table, the best first."""

    trials: tuple[Trial, ...]
    space: dict[str, str]
    mode: str = "min"

    @property
    def best(self) -> Trial:
        """The trial with the best finite value. Raises TrialError where none has one."""
        done = [trial for trial in self.trials if trial.status == "done"]
        if not done:
            failed = [trial for trial in self.trials if trial.cause]
            first = f"; the first failed with {failed[0].cause}" if failed else ""
            got = f"{len(self.trials)} trials, none of them done{first}"
            raise TrialError(message("best", "Result", got, "one that is done"))
        return min(done, key=lambda trial: _trials.ranked(trial.value, self.mode))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A dict for each trial, all with the same keys: `pandas.DataFrame(result.rows)`.

        A metric whose name another column has is `metrics/<name>`.
        """
        metrics = dict.fromkeys(name for trial in self.trials for name in trial.metrics)
        taken = {*self.space, *_trials.COLUMNS}
        return [
            {"trial": trial.index}
            | {name: trial.values.get(name) for name in self.space}
            | {"value": trial.value}
            | {
                f"metrics/{name}" if name in taken else name: trial.metrics.get(name)
                for name in metrics
            }
            | {"status": trial.status, "seconds": trial.seconds, "cause": str(trial.cause or "")}
            for trial in self.trials
        ]

    def __getitem__(self, name: str) -> np.ndarray:
        """A column: `result["learning_rate"]`."""
        rows = self.rows
        if not isinstance(name, str):
            fix = "result.trials[0] is a trial, result.best the best one."
            raise WrongTypeError(
                message("name", "Result", trees.describe(name), "a column's name", fix)
            )
        if not rows or name not in rows[0]:
            known = rows[0] if rows else ()
            raise TrialError(unknown("column", "Result", name, known))
        return np.array([row[name] for row in rows])

    def __len__(self) -> int:
        return len(self.trials)

    def __repr__(self) -> str:
        order = {"done": 0, "pruned": 1}
        rank = lambda trial: (
            order.get(trial.status, 2),
            _trials.ranked(trial.value, self.mode),
            trial.index,
        )
        shown = {trial.index: row for trial, row in zip(self.trials, self.rows, strict=True)}
        rows = [shown[trial.index] for trial in sorted(self.trials, key=rank)][:_SHOWN]
        names = [
            name
            for name in (rows[0] if rows else ())
            if any(row[name] not in (None, "") for row in rows)
        ]
        lines = [names, *([_cell(row[name]) for name in names] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        right = [all(isinstance(row[name], int | float | None) for row in rows) for name in names]
        pad = lambda x, n, is_right: f"{x:>{n}}" if is_right else f"{x:<{n}}"
        text = ["  ".join(map(pad, line, widths, right)).rstrip() for line in lines]
        counts = {name: sum(trial.status == name for trial in self.trials) for name in _STATUSES}
        head = f"{len(self.trials)} trials: " + ", ".join(
            f"{n} {name}" for name, n in counts.items() if n
        )
        rest = [f"... {len(self.trials) - len(rows)} more"] if len(rows) < len(self.trials) else []
        return "\n".join([head.removesuffix(": "), *text, *rest])

    def plot(self):
        """A matplotlib Figure: a panel for each name, the value of the trials over it; the best is
        marked.
        """
        return plots.scatter(
            {name: [trial.values.get(name) for trial in self.trials] for name in self._varied()},
            [trial.value for trial in self.trials],
            [trial.status for trial in self.trials],
            best=self.trials.index(self.best),
        )

    def _varied(self) -> list[str]:
        seen = lambda name: {spaces.label(t.values[name]) for t in self.trials if name in t.values}
        return [name for name in self.space if len(seen(name)) > 1] or list(self.space)


_SHOWN = 20
_STATUSES = ("done", "pruned", "failed", "interrupted")


def _cell(x: Any) -> str:
    if isinstance(x, float):
        return f"{x:.4g}"
    text = "" if x is None else str(x)
    return text if len(text) <= 60 else text[:59] + "…"


# ------------------------------------------------------------------------------ when to end a trial


@dataclass(frozen=True)
class median:
    """Prune a trial whose best report so far is worse than the median of what others had at that
    step.

    `startup` others must have come that far, and nothing is pruned before the step `warmup`. As
    Vizier's median rule (Golovin et al. 2017).
    """

    startup: int = 5
    warmup: int = 0

    def __post_init__(self):
        checks.check_count(self.startup, "median()", "startup", least=0)
        checks.check_count(self.warmup, "median()", "warmup", least=0)

    def __call__(self, reports: Mapping[int, float], others: Sequence[Mapping[int, float]]) -> bool:
        step = max(reports)
        there = [_best_until(step, other) for other in others if max(other, default=-1) >= step]
        if step < self.warmup or len(there) < max(self.startup, 1):
            return False
        return not _best_until(step, reports) <= float(np.median(there))


@dataclass(frozen=True)
class halving:
    """Prune a trial that is not among the best 1/`factor` at a rung: the steps `first`, `first *
    factor`, ...

    Asynchronous successive halving (ASHA, Li et al. 2018) in its stopping form.
    """

    first: int = 1
    factor: int = 3

    def __post_init__(self):
        checks.check_count(self.first, "halving()", "first")
        checks.check_count(self.factor, "halving()", "factor", least=2)

    def __call__(self, reports: Mapping[int, float], others: Sequence[Mapping[int, float]]) -> bool:
        step, rung = max(reports), self.first
        before = max((s for s in reports if s < step), default=-1)
        while rung * self.factor <= step:
            rung *= self.factor
        if not before < rung <= step:
            return False
        there = [_best_until(rung, other) for other in others if max(other, default=-1) >= rung]
        if len(there) < self.factor - 1:
            return False
        return not reports[step] <= float(np.quantile([*there, reports[step]], 1 / self.factor))


def _best_until(step: int, reports: Mapping[int, float]) -> float:
    return min((x for s, x in reports.items() if s <= step and not math.isnan(x)), default=math.inf)


# ---------------------------------------------------------------------------------------- the sweep


def tune(
    objective: Callable[..., Any],
    space: Mapping[str, Any],
    *,
    trials: int | None = None,
    backend: str = "random",
    seed: int = 0,
    mode: str = "min",
    metric: str | None = None,
    pruner: Any = None,
    vectorized: Sequence[str] = (),
    members: int = 32,
    directory: str | os.PathLike | None = None,
    attempts: int = 3,
    progress: Any = True,
    **options: Any,
) -> Result:
    """The objective at many points of a space: their table, and the best of them.

        for trial in range(trials):
            values = draw(space, seed, trial)
            record(trial, values, objective(**values))

    Args:
      objective: takes the names of the space as keywords, and returns a number or a dict of numbers
        (what `evaluate` gives). It may also name `trial`, the number of the trial (for a folder, or
        a key), and `report`: with `report(step, value)` on the way it is told by an exception that
        it is not worth going on.
      space: names, and what `tsunax.spaces` has; or plain values, which are constants. A list is
        refused: say `spaces.choice([...])`, or give a tuple.
      trials: how many; of a grid all of them by default. More of them go on with a directory that
        has some.
      backend: "random"; "grid", every combination of the entries that are `grid`; "optuna", where
        the next values follow from what was found (extra `tune`); "ray", many at once on a Ray
        cluster (extra `ray`).
      seed: the values of a trial are a function of it and of the trial's number.
      mode, metric: "min" or "max", and of which number in a dict.
      pruner: `median()`, `halving()`, or any `f(reports, others) -> bool` of {step: value} of this
        trial and of the others, smaller being better; with backend="optuna" one of Optuna's.
      vectorized: names that the objective takes as arrays, up to `members` trials at once, which
        agree in all other values; `trial` is an array then, too, and it returns an array, or a dict
        of arrays. For populations: numbers that are live in a rule. Where it raises, its trials are
        run again one by one.
      directory: where the journal is kept (`trials.jsonl`). The same command goes on after whatever
        ended it: trials that are there are not run again, and an objective with other code gives a
          warning. With "optuna", its own
        journal is there too (`optuna.journal`).
      attempts: a trial in which the process died so many times has failed.
      options: "optuna": `sampler`, an Optuna sampler, or a function of a seed that makes one.
        "ray": `scheduler`, `resources` of a trial as {"cpu": 1, "gpu": 1}, `concurrent`, how many
        at once.

    A trial that raises, or gives no finite number, has failed, and the others go on; its `cause`
    says why. Ctrl-C and SIGTERM end the sweep, and the trial under way is run again when it goes
    on: KeyboardInterrupt or SystemExit(143), with the `result` so far; in a notebook Ctrl-C returns
    it.

    Raises HyperparameterError and WrongTypeError for a space, an objective or options that cannot
    be, before anything runs; CheckpointError for a directory of another sweep; MissingLibraryError
    without Optuna or Ray.

    >>> space = {"x": spaces.uniform(-1.0, 1.0), "y": spaces.grid([1, 2])}
    >>> result = tune(lambda x, y: (x - 0.5) ** 2 + y, space, trials=20, progress=False)
    >>> result.best.values["y"], round(result.best.values["x"], 1)
    (1, 0.5)
    """
    where = "tune()"
    _check(objective, trials, backend, seed, mode, metric, members, attempts, where)
    space = spaces.checked(space, where, backend)
    _check_objective(objective, space, where)
    names = _check_vectorised(vectorized, space, backend, pruner, where)
    source = _source(backend, space, seed, mode, pruner, options, where)
    _check_pruner(pruner, source.is_theirs, where)
    trials = source.count(trials, where)
    about = {
        "version": _journal.VERSION,
        "space": {name: repr(entry) for name, entry in space.items()},
        "backend": backend,
    }
    about["objective"] = list(stable_text.name_and_code(objective))
    about |= {"seed": seed, "mode": mode, "metric": metric, "vectorized": list(names)}
    folder = None if directory is None else durable_files.folder_of(directory, "directory", where)
    with contextlib.ExitStack() as stack:
        journal = (
            None
            if folder is None
            else stack.enter_context(contextlib.closing(_journal.Journal(folder, about)))
        )
        source.begin(folder)
        stack.enter_context(ending := _sweep.Ending())
        bar = _progress.progress(progress, total=trials, unit="trial")
        sweep = _sweep.Sweep(objective, metric, source, journal, attempts, bar, ending)
        stack.callback(lambda: bar.close("interrupted" if ending.asked else ""))
        for index in sorted(sweep.trials):
            source.tell(sweep.trials[index])
        left = (i for i in range(trials) if i not in sweep.trials)
        sweep.go_together(left, names, members) if names else source.go(sweep, left)
    found = sorted([*sweep.trials.values(), *sweep.interrupted], key=lambda trial: trial.index)
    return _ended(Result(tuple(found), about["space"], mode), ending.asked)


def _ended(result: Result, asked: int) -> Result:
    """What a sweep returns, or raises where a signal ended it."""
    if asked == signal.SIGTERM:
        error: BaseException = SystemExit(128 + signal.SIGTERM)
    elif asked and not in_notebook():
        error = KeyboardInterrupt(f"after {len(result)} trials; `error.result` has them")
    else:
        if result.trials and all(trial.status == "failed" for trial in result.trials):
            text = (
                f"tune(): all {len(result)} trials failed, the first with {result.trials[0].cause}"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        return result
    error.result = result  # type: ignore[attr-defined]
    raise error


def _source(
    backend, space, seed, mode, pruner, options: dict[str, Any], where: str
) -> _sweep.Drawn:
    """Where the values come from."""
    known = {"optuna": ["sampler"], "ray": ["scheduler", "resources", "concurrent"]}.get(
        backend, []
    )
    for name in options:
        if name not in known:
            own = [name for name in inspect.signature(tune).parameters if name != "options"]
            raise WrongTypeError(
                unknown("option", f"tune(backend={backend!r})", name, [*own, *known])
            )
    if backend == "optuna":
        return _optuna.Proposed(space, seed, mode, pruner, **options)
    if backend == "ray":
        return _ray_tune.Spread(space, seed, mode, pruner, **options)
    points = spaces.points(space) if backend == "grid" else None
    return _sweep.Drawn(space, seed, mode, pruner, points)


def _check_pruner(pruner: Any, is_theirs: bool, where: str) -> None:
    if pruner is None or is_theirs:
        return
    if isinstance(pruner, type) or not callable(pruner):
        fix = "ts.tuning.median(), say; Optuna's own with backend='optuna'."
        got = pruner.__name__ + " itself" if isinstance(pruner, type) else trees.describe(pruner)
        raise WrongTypeError(
            message("pruner", where, got, "a function (reports, others) -> bool", fix)
        )


def read(directory: str | os.PathLike) -> Result:
    """The trials of a directory so far, also while a sweep writes there. Raises CheckpointError."""
    records = list(
        _journal.read(durable_files.folder_of(directory, "directory", "read()") / _journal.NAME)
    )
    if not records:
        raise CheckpointError(message("journal", str(directory), "an empty one", "a sweep's"))
    (trials, *_), about = _sweep.replayed(records), records[0]["sweep"]
    return Result(tuple(trials[i] for i in sorted(trials)), about["space"], about["mode"])


def as_trainable(
    objective: Callable[..., Any], metric: str = "value"
) -> Callable[[Mapping[str, Any]], None]:
    """An objective as a function trainable of Ray Tune, for a `ray.tune.Tuner` of your own.

        tuner = ray.tune.Tuner(ts.tuning.as_trainable(objective), param_space={"learning_rate":
        ray.tune.uniform(0, 1)})

    What it returns and reports comes to Ray under `metric`, with the `step` of a report beside it:
    a scheduler takes `time_attr="step"`. An exception of the objective is Ray's to handle.
    """
    return _ray_tune.trainable(objective, metric)


# ----------------------------------------------------------------------------------- what was given


def _check_objective(objective: Callable, space: Mapping[str, Any], where: str) -> None:
    takes, is_open = _trials.parameters(objective)
    for name in space:
        if name in _trials.RESERVED or name in _trials.COLUMNS:
            fix = f"tune gives {name!r} itself."
            raise HyperparameterError(
                message("name", f"space of {where}", repr(name), "another name", fix)
            )
        if not is_open and name not in takes:
            known = [p for p in takes if p not in _trials.RESERVED]
            fix = "The objective does not take it."
            raise HyperparameterError(unknown("name", f"space of {where}", name, known, fix))
    for name, p in takes.items():
        if p.default is not p.empty or name in _trials.RESERVED:
            continue
        if name not in space:
            fix = "Put it into the space, or bind it: functools.partial(objective, x=...)."
            raise HyperparameterError(
                message("objective", where, f"a parameter {name!r}", "names of the space", fix)
            )
        if isinstance(space[name], spaces.when):
            fix = f"It is not always there: give {name!r} a default."
            raise HyperparameterError(
                message("objective", where, f"{name!r} without a default", "one with", fix)
            )


def _check_vectorised(
    vectorized: Any, space, backend: str, pruner: Any, where: str
) -> tuple[str, ...]:
    if not isinstance(vectorized, str | Sequence):
        raise WrongTypeError(
            message("vectorized", where, trees.describe(vectorized), "names of the space")
        )
    names = (vectorized,) if isinstance(vectorized, str) else tuple(vectorized)
    for name in names:
        if name not in space:
            raise HyperparameterError(unknown("vectorized", where, str(name), space))
        entry = spaces.innermost(space[name])
        options = getattr(entry, "options", () if hasattr(entry, "at") else (entry,))
        if any(isinstance(x, bool) or not isinstance(x, int | float) for x in options):
            fix = "Only numbers can be an array's."
            raise HyperparameterError(
                message(f"vectorized {name!r}", where, repr(entry), "numbers", fix)
            )
    if names and backend not in ("random", "grid"):
        raise HyperparameterError(
            message("vectorized", where, f"backend {backend!r}", "'random' or 'grid'")
        )
    if names and pruner is not None:
        fix = (
            "A population trains all of its members to the end; ts.populations.select keeps the "
            "better half."
        )
        raise HyperparameterError(
            message("pruner", where, "one beside vectorized", "one of them", fix)
        )
    return names


def _check(objective, trials, backend, seed, mode, metric, members, attempts, where: str) -> None:
    if not callable(objective):
        fix = "tune(objective, space, ...)."
        got = trees.describe(objective)
        raise WrongTypeError(
            message("objective", where, got, "a function that returns a number", fix)
        )
    for name, value, known in (
        ("backend", backend, ("random", "grid", "optuna", "ray")),
        ("mode", mode, ("min", "max")),
    ):
        if not checks.is_one_of(value, known):
            got = repr(value) if isinstance(value, str) else trees.describe(value)
            raise HyperparameterError(message(name, where, got, " or ".join(map(repr, known))))
    counts = {"members": (members, 1), "attempts": (attempts, 1), "seed": (seed, 0)}
    for name, (n, least) in (counts | ({} if trials is None else {"trials": (trials, 1)})).items():
        checks.check_count(n, where, name, least)
    if metric is not None and not isinstance(metric, str):
        raise WrongTypeError(
            message("metric", where, trees.describe(metric), "a name in what the objective returns")
        )
    if (count := processes.process_count()) > 1:
        fix = "One process searches; backend='ray' gives trials to others."
        raise ProcessError(message("tune", "", f"{count} processes", "one", fix))
