"""Trials of one objective over a space of hyperparameters: run, recorded, resumed, compared.

    def objective(learning_rate, width):
        ...
        return ts.evaluate(score, state, held_out)["loss"]

    space = {"learning_rate": ts.tuning.spaces.log_uniform(1e-5, 1e-1), "width": 64}
    result = ts.tune(objective, space, trials=50, directory="sweep")
    result.best.values, result.best.value

The values of a trial are a function of (seed, trial), and its result is on the disk before the next
one starts: a sweep that was killed goes on, and ends as if it had not been.
"""

from __future__ import annotations

import contextlib
import inspect
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tsunax._core import Figure, StrPath, checks, durable_files, stable_text, tables, trees
from tsunax._core.interrupts import in_notebook
from tsunax.distributed import processes
from tsunax.errors import (
    CheckpointError,
    HyperparameterError,
    ProcessError,
    TrialError,
    WrongTypeError,
    unknown,
)
from tsunax.run import plots
from tsunax.run import progress as _progress
from tsunax.tuning import _journal, _optuna, _ray_tune, _sweep, _trials, spaces
from tsunax.tuning._trials import Cause, Pruned, Trial

__all__ = ["Cause", "Pruned", "Result", "Trial", "as_optuna", "as_trainable", "read", "tune"]

_SHOWN = 20  # trials in a table
_OPTIONS = {"optuna": ["sampler"], "ray": ["resources", "concurrent"]}


@dataclass(frozen=True, repr=False)
class Result:
    """The trials of a sweep in their order; prints as a table, the best first."""

    trials: tuple[Trial, ...]
    space: dict[str, str]
    mode: str = "min"

    @property
    def best(self) -> Trial:
        """The trial with the best finite value. Raises TrialError if none has one."""
        done = [trial for trial in self.trials if trial.status == "done"]
        if not done:
            failed = [trial for trial in self.trials if trial.cause]
            first = f"; the first failed with {failed[0].cause}" if failed else ""
            got = f"{len(self.trials)} trials, none of them done{first}"
            raise TrialError("best", "Result", got, "one that is done")
        return min(done, key=lambda trial: _trials.ranked(trial.value, self.mode))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A dict for each trial, all with the same keys: `pandas.DataFrame(result.rows)`.

        A metric with the name of another column is `metrics/<name>`.
        """
        metrics = dict.fromkeys(name for t in self.trials for name in t.metrics)
        taken = {*self.space, *_trials.COLUMNS}
        columns = {f"metrics/{name}" if name in taken else name: name for name in metrics}
        return [
            {"trial": t.index}
            | {name: t.values.get(name) for name in self.space}
            | {"value": t.value}
            | {column: t.metrics.get(name) for column, name in columns.items()}
            | {"status": t.status, "seconds": t.seconds, "cause": str(t.cause or "")}
            for t in self.trials
        ]

    def __getitem__(self, name: str) -> np.ndarray:
        """A column: `result["learning_rate"]`."""
        if not isinstance(name, str):
            fix = "result.trials[0] is a trial, result.best the best one."
            raise WrongTypeError("name", "Result", trees.describe(name), "a column's name", fix)
        known = self.rows[0] if self.trials else {}
        if name not in known:
            raise TrialError(unknown("column", "Result", name, known))
        return np.array([row[name] for row in self.rows])

    def __len__(self) -> int:
        return len(self.trials)

    def __repr__(self) -> str:
        def rank(row: dict[str, Any]) -> tuple:
            order = {"done": 0, "pruned": 1}.get(row["status"], 2)
            return order, _trials.ranked(row["value"], self.mode), row["trial"]

        rows = sorted(self.rows, key=rank)[:_SHOWN]
        columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
        is_filled = lambda cells: any(x not in (None, "") for x in cells)
        filled = {name: cells for name, cells in columns.items() if is_filled(cells)}
        texts = [[name, *map(_cell, cells)] for name, cells in filled.items()]
        is_number = lambda x: isinstance(x, int | float | None)
        right = [i for i, cells in enumerate(filled.values()) if all(map(is_number, cells))]
        counts = {name: sum(t.status == name for t in self.trials) for name in _trials.STATUSES}
        said = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
        more = len(self.trials) - len(rows)
        lines = tables.aligned(list(zip(*texts, strict=True)), right)
        head = f"{len(self.trials)} trials: {said}".removesuffix(": ")
        return "\n".join([head, *lines, *([f"... {more} more"] if more else [])])

    def plot(self) -> Figure:
        """A matplotlib Figure: the value over each name that varies; the best trial is marked."""
        seen = lambda name: {spaces.label(t.values[name]) for t in self.trials if name in t.values}
        varied = [name for name in self.space if len(seen(name)) > 1] or list(self.space)
        columns = {name: [t.values.get(name) for t in self.trials] for name in varied}
        values, states = [t.value for t in self.trials], [t.status for t in self.trials]
        return plots.scatter(columns, values, states, best=self.trials.index(self.best))


def _cell(x: Any) -> str:
    text = "" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x)
    return text if len(text) <= 60 else text[:59] + "…"


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
    directory: StrPath | None = None,
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
        (as `evaluate` does). It may also name `trial`, the number of the trial (for a folder, or a
        key), and `report`: `report(step, value)` records a number on the way.
      space: names, and entries of `ts.tuning.spaces`; plain values are constants, tuples too.
      trials: how many; of a grid all of them by default.
      backend: "random"; "grid", every combination of the entries that are `grid`; "optuna", which
        proposes, prunes and keeps the trials (extra `tune`); "ray", random values, many trials at
        once on a Ray cluster (extra `ray`).
      seed: the values of a trial are a function of it and of the trial's number.
      mode, metric: "min" or "max", and of which number in a dict.
      pruner: one of Optuna's, with backend="optuna": then `report` raises an exception if the trial
        is not worth going on.
      vectorized: names that the objective takes as arrays, up to `members` trials at once, which
        agree in all other values. `trial` is then an array, too, and it returns an array or a dict
        of arrays. For populations. If it raises, its trials are run again one by one.
      directory: where the journal is kept: `trials.jsonl`, or `optuna.journal` with
        backend="optuna". The same command goes on after whatever ended it, also with more trials;
        trials that ended are not run again. An objective with other code gives a warning.
      attempts: a trial in which the process died so many times has failed.
      options: "optuna": `sampler`, an Optuna sampler, or a function of a seed that makes one.
        "ray": `resources` of a trial as {"cpu": 1, "gpu": 1}, `concurrent`, how many at once.

    A trial that raises, or returns no finite number, has failed, with a `cause`, and the others go
    on. Ctrl-C and SIGTERM end the sweep with KeyboardInterrupt or SystemExit(143), which have the
    `result` so far (in a notebook Ctrl-C returns it); the trial under way is run again later.

    Before anything runs it raises HyperparameterError and WrongTypeError for a space, objective or
    options that cannot be, CheckpointError for a directory of another sweep, MissingLibraryError
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
    names = _check_vectorized(vectorized, space, backend, where)
    for name in options:
        if name not in _OPTIONS.get(backend, ()):
            known = [*inspect.signature(tune).parameters, *_OPTIONS.get(backend, ())]
            at = f"tune(backend={backend!r})"
            raise WrongTypeError(unknown("option", at, name, known))
    if pruner is not None and backend != "optuna":
        got, fix = f"one beside backend={backend!r}", "Give backend='optuna' too."
        raise HyperparameterError("pruner", where, got, "None", fix)
    points = spaces.points(space) if backend == "grid" else None
    trials = _count(trials, points, space, where)
    texts = {name: repr(entry) for name, entry in space.items()}
    about = {"version": _journal.VERSION, "space": texts, "backend": backend, "seed": seed}
    about |= {"objective": list(stable_text.name_and_code(objective))}
    about |= {"mode": mode, "metric": metric, "vectorized": list(names)}
    folder = None if directory is None else durable_files.folder_of(directory, "directory", where)
    with contextlib.ExitStack() as stack:
        if backend == "optuna":
            source = journal = _optuna.Study(space, about, pruner, folder, **options)
        elif backend == "ray":
            source = _ray_tune.Spread(space, seed, **options)
            journal = _journal.opened(folder, about)
        else:
            source, journal = _sweep.Drawn(space, seed, points), _journal.opened(folder, about)
        stack.enter_context(contextlib.closing(journal))
        stack.enter_context(ending := _sweep.Ending())
        bar = _progress.progress(progress, total=trials, unit="trial")
        stack.callback(lambda: bar.close("interrupted" if ending.asked else ""))
        what = objective, metric, mode, names, members, attempts
        sweep = _sweep.Sweep(*what, source, journal, bar, ending)
        source.go(sweep, (i for i in range(trials) if i not in journal.trials))
    found = sorted([*journal.trials.values(), *sweep.interrupted], key=lambda trial: trial.index)
    return _ended(Result(tuple(found), texts, mode), ending.asked)


def _count(trials: int | None, points: list | None, space: Mapping[str, Any], where: str) -> int:
    """How many trials: those asked for, or all of a grid."""
    if points is None and trials is None:
        raise HyperparameterError("trials", where, "None", "an int ≥ 1")
    if points is None or trials is None:
        return trials or len(points or ())
    entries = map(spaces.innermost, space.values())
    is_drawn = any(hasattr(entry, "at") and not isinstance(entry, spaces.grid) for entry in entries)
    if trials > len(points) and not is_drawn:
        raise HyperparameterError("trials", where, trials, f"at most {len(points)}, the whole grid")
    return trials


def _ended(result: Result, asked: int) -> Result:
    """What a sweep returns, or raises if a signal ended it."""
    error: BaseException = KeyboardInterrupt(f"after {len(result)} trials: see `error.result`")
    if asked == signal.SIGTERM:
        error = SystemExit(128 + asked)
    elif not asked or in_notebook():
        if result.trials and all(trial.status == "failed" for trial in result.trials):
            first = result.trials[0].cause
            text = f"tune(): all {len(result)} trials failed, the first with {first}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        return result
    error.result = result  # type: ignore[attr-defined]
    raise error


def read(directory: StrPath) -> Result:
    """The trials of a directory so far, also while a sweep writes there. Raises CheckpointError."""
    folder = durable_files.folder_of(directory, "directory", "read()")
    if (folder / _optuna.NAME).exists():
        about, trials = _optuna.read(folder)
    else:
        journal = _journal.load(folder / _journal.NAME)
        about, trials = journal.about, journal.trials
    if not about:
        raise CheckpointError("journal", str(directory), "an empty one", "a sweep's")
    return Result(tuple(trials[i] for i in sorted(trials)), about["space"], about["mode"])


def as_trainable(
    objective: Callable[..., Any], metric: str = "value"
) -> Callable[[Mapping[str, Any]], None]:
    """An objective as a function trainable of Ray Tune, for a `ray.tune.Tuner` of your own.

        space = {"learning_rate": ray.tune.uniform(0, 1)}
        tuner = ray.tune.Tuner(ts.tuning.as_trainable(objective), param_space=space)

    Ray gets what it returns and reports under `metric`, and the `step` of a report: a scheduler
    takes `time_attr="step"`. Ray handles exceptions of the objective.
    """
    return _ray_tune.trainable(objective, metric)


def as_optuna(
    objective: Callable[..., Any], space: Mapping[str, Any], metric: str | None = None
) -> Callable[[Any], float]:
    """An objective and its space for a study of Optuna of your own: as many workers as you start.

        study.optimize(ts.tuning.as_optuna(objective, space), n_trials=100, n_jobs=4)

    Reports go to the study's pruner, other numbers of a result to the trial's `user_attrs`. Optuna
    handles exceptions of the objective.
    """
    return _optuna.objective_of(objective, space, metric)


# ----------------------------------------------------------------------------------- what was given


def _check_objective(objective: Callable, space: Mapping[str, Any], where: str) -> None:
    takes, is_open = _trials.parameters(objective)
    known = [name for name in takes if name not in _trials.RESERVED]
    for name in space:
        at = f"space of {where}"
        if name in _trials.RESERVED or name in _trials.COLUMNS:
            fix = f"tune gives {name!r} itself."
            raise HyperparameterError("name", at, repr(name), "another name", fix)
        if not is_open and name not in takes:
            fix = "The objective does not take it."
            raise HyperparameterError(unknown("name", at, name, known, fix))
    for name in known:
        if takes[name].default is not inspect.Parameter.empty:
            continue
        got, expected, fix = f"a parameter {name!r}", "names of the space", ""
        if name not in space:
            fix = "Put it into the space, or bind it: functools.partial(objective, x=...)."
        elif isinstance(space[name], spaces.when):
            got, expected = f"{name!r} without a default", "one with"
            fix = f"It is not always there: give {name!r} a default."
        if fix:
            raise HyperparameterError("objective", where, got, expected, fix)


def _check_vectorized(vectorized: Any, space, backend: str, where: str) -> tuple[str, ...]:
    if not isinstance(vectorized, str | Sequence):
        raise WrongTypeError("vectorized", where, trees.describe(vectorized), "names of the space")
    names = (vectorized,) if isinstance(vectorized, str) else tuple(vectorized)
    for name in names:
        if name not in space:
            raise HyperparameterError(unknown("vectorized", where, str(name), space))
        entry = spaces.innermost(space[name])
        options = getattr(entry, "options", () if hasattr(entry, "at") else (entry,))
        if any(isinstance(x, bool) or not isinstance(x, int | float) for x in options):
            fix = "Only numbers can be an array's."
            raise HyperparameterError(f"vectorized {name!r}", where, repr(entry), "numbers", fix)
    if names and backend not in ("random", "grid"):
        raise HyperparameterError("vectorized", where, f"backend {backend!r}", "'random' or 'grid'")
    return names


def _check(objective, trials, backend, seed, mode, metric, members, attempts, where: str) -> None:
    if not callable(objective):
        fix, expected = "tune(objective, space, ...).", "a function that returns a number"
        raise WrongTypeError("objective", where, trees.describe(objective), expected, fix)
    checks.check_choice(backend, where, "backend", ("random", "grid", "optuna", "ray"))
    checks.check_choice(mode, where, "mode", ("min", "max"))
    checks.check_count(seed, where, "seed", least=0)
    checks.check_count(members, where, "members")
    checks.check_count(attempts, where, "attempts")
    checks.check_count(1 if trials is None else trials, where, "trials")
    if metric is not None and not isinstance(metric, str):
        expected = "a name in what the objective returns"
        raise WrongTypeError("metric", where, trees.describe(metric), expected)
    if (count := processes.process_count()) > 1:
        fix = "One process searches; backend='ray' gives trials to others."
        raise ProcessError("tune", "", f"{count} processes", "one", fix)
