"""Trials of one objective over a space of hyperparameters: run, recorded, resumed, compared.

The values of a trial are a function of (seed, trial), and its result is on the disk before the next
one starts: a sweep that was killed goes on, and ends as if it had not been.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tsunax._core import StrPath, checks, durable_files, processes, trees
from tsunax._core.interrupts import Interrupt, in_notebook
from tsunax._core.libraries import library
from tsunax.checkpoints import script_settings
from tsunax.errors import HyperparameterError, WrongTypeError, unknown, warn
from tsunax.run import progress as _progress
from tsunax.tuning import _study, _trials, spaces
from tsunax.tuning._trials import Cause, Pruned, Result, Trial

__all__ = ["Cause", "Pruned", "Result", "Trial", "as_trainable", "read", "tune"]


class _Ending(Interrupt):
    """Ctrl-C ends the trial under way, also if a `fit` in it returns."""

    def _note(self, number, frame) -> None:
        raise KeyboardInterrupt


@checks.naming_arguments
def tune(
    objective: Callable[..., Any],
    space: Mapping[str, Any] | None = None,
    *,
    trials: int | None = None,
    backend: str = "random",
    seed: int = 0,
    mode: str = "min",
    metric: str | None = None,
    sampler: Any = None,
    pruner: Any = None,
    vectorized: Sequence[str] = (),
    members: int = 32,
    directory: StrPath | None = None,
    progress: Any = True,
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
      backend: "random"; "grid", every combination of `grid` entries; "optuna" (extra `tune`).
      seed: the values of a trial are a function of it and of the trial's number.
      mode, metric: "min" or "max", and of which number in a dict.
      sampler, pruner: Optuna's, with backend="optuna": a sampler, or a function of a seed that
        makes one; with a pruner `report` raises an exception if the trial is not worth going on.
      vectorized: names that the objective takes as arrays, up to `members` trials at once, which
        agree in all other values. `trial` is then an array, too, and it returns an array or a dict
        of arrays. For populations. If it raises, its trials are run again one by one.
      directory: where Optuna's journal of the trials is kept, `optuna.journal` (extra `tune`). The
        same command goes on after whatever ended it, also with more trials; a warning says if
        the code of the objective, or a value that it reads, has changed since.

    A trial that raises, or returns no finite number, has failed, with a `cause`, and the others go
    on. Ctrl-C ends the sweep with KeyboardInterrupt, which has the `result` so far (in a notebook
    it is returned); the trial under way is run again later.

    Before anything runs it raises HyperparameterError and WrongTypeError for a space, objective or
    options that cannot be, CheckpointError for another sweep's directory, MissingLibraryError.

    >>> space = {"x": spaces.uniform(-1.0, 1.0), "y": spaces.grid([1, 2])}
    >>> result = tune(lambda x, y: (x - 0.5) ** 2 + y, space, trials=20, progress=False)
    >>> result.best.values["y"], round(result.best.values["x"], 1)
    (1, 0.5)
    """
    where = "tune()"
    checks.check_choice(backend, where, "backend", ("random", "grid", "optuna"))
    checks.check_choice(mode, where, "mode", ("min", "max"))
    checks.check_count(seed, where, "seed", least=0)
    checks.check_count(members, where, "members")
    processes.current().check_alone("tune")
    space = spaces.checked(space, where)
    _check_objective(objective, space)
    names = (vectorized,) if isinstance(vectorized, str) else tuple(vectorized)
    if others := [name for name in names if name not in space]:
        raise HyperparameterError(unknown("vectorized", where, str(others[0]), space))
    if (backend == "optuna" and names) or (backend != "optuna" and (sampler or pruner)):
        got, expected = f"backend={backend!r}", "'optuna' for a sampler or pruner, and not for"
        raise HyperparameterError("backend", where, got, f"{expected} vectorized names")
    points = [{}]
    if backend == "grid":
        points = spaces.points(space)
        trials = len(points) if trials is None else trials
        if points == [{}]:
            raise HyperparameterError("space", where, "no grid", "at least one: spaces.grid([...])")
    checks.check_count(trials, where, "trials")
    assert trials is not None
    if trials > 1 and not any(map(spaces.is_drawn, space.values())):
        fix = "For a range, write ts.tuning.spaces.log_uniform(low, high)."
        raise HyperparameterError("space", where, "constants alone", "an entry that varies", fix)
    about = {"backend": backend, "seed": seed, "mode": mode, "metric": metric}
    about |= {"space": {name: repr(entry) for name, entry in space.items()}}
    about |= {"points": len(points)} if backend == "grid" else {}
    about[_study.OBJECTIVE] = script_settings.code_text(objective)
    folder = None if directory is None else durable_files.folder_of(directory, "directory", where)
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(contextlib.closing(_study.Journal(folder, about)))
        for note in journal.edits:
            warn(f"tune(): {note} Earlier trials in {directory} are of the other one.")
        proposed = lambda: _study.Search(space, about, pruner, sampler, journal)
        search = proposed() if backend == "optuna" else None
        bar = _progress.progress(progress, trials, unit="trial")
        sweep = _Sweep(objective, metric, mode, names, space, search, journal, bar)
        drawn = lambda i: spaces.sample(space, seed, i) | points[i % len(points)]
        left = ((i, None if search else drawn(i)) for i in range(trials) if i not in journal.trials)
        in_order = lambda: tuple(journal.trials[i] for i in sorted(journal.trials))
        ended = lambda: Result(in_order(), (*space,), mode)
        said = "interrupted"
        try:
            with _Ending(signal.SIGINT) as ending:
                for group in _groups(left, names, members if names else 1):
                    sweep.run(group, ending)
            said = ""
        except (KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, SystemExit) or not in_notebook():
                error.result = ended()  # type: ignore[attr-defined]
                raise
        finally:
            bar.close(said)
    if (found := ended()).trials and all(trial.cause for trial in found.trials):
        warn(f"tune(): no trial ended with a number. The first: {found.trials[0].cause}")
    return found


def _check_objective(objective: Any, space: Mapping[str, Any]) -> None:
    """Raise unless the objective can be called with the names of the space."""
    given = dict.fromkeys(space)
    if not callable(objective):
        expected = "a function that returns a number"
        raise WrongTypeError("objective", "tune()", trees.describe(objective), expected)
    if taken := [name for name in _trials.RESERVED if name in space]:
        expected = "another name: tune gives it itself"
        raise HyperparameterError("name", "space of tune()", repr(taken[0]), expected)
    try:
        given |= _trials.own(objective, None, len)
        inspect.signature(objective).bind(**given)
    except TypeError:
        expected = f"one of {', '.join(space)} (the names of the space)"
        got = trees.describe_call(objective)
        raise HyperparameterError("objective", "tune()", got, expected) from None


def _groups(left: Iterable[tuple[int, Any]], names: Sequence[str], most: int) -> Iterator[list]:
    """Trials (number, values or None) that agree in all values but the vectorized ones."""
    alike: dict[str, list] = {}
    for i, values in left:
        shared = json.dumps([x for name, x in (values or {}).items() if name not in names])
        group = alike.setdefault(shared, [])
        group.append((i, values))
        if len(group) == most:
            yield alike.pop(shared)
    yield from alike.values()


@dataclass
class _Sweep:
    """How trials are run."""

    objective: Any
    metric: str | None
    mode: str
    names: tuple[str, ...]
    space: Mapping[str, Any]
    search: _study.Search | None
    journal: _study.Journal
    bar: Any

    def run(self, group: list[tuple[int, Any]], ending: Interrupt) -> None:
        """The trials of a group in one call. If that raises, one by one."""
        if self.search is not None:
            group = [(i, self.search.values(i)) for i, _ in group]
        index, given = group[0]
        trial: Any = index
        if self.names:
            trial = np.array([i for i, _ in group])
            column = lambda name: np.array([values[name] for _, values in group])
            given = given | {name: column(name) for name in self.names}
        reports: list[dict[int, float]] = [{} for _ in group]

        def report(step: int, value: Any) -> None:
            checks.check_count(np.asarray(step)[()], "report()", "step", least=0)
            step = int(step)
            for mine, x in zip(reports, value if self.names else [value], strict=True):
                mine.pop(step, None)
                mine[step] = _trials.number(x, "report()")
            if self.search is not None and self.search.prunes(step, reports[0][step]):
                raise Pruned(f"trial {index} at step {step}")

        began = time.perf_counter()
        try:
            own = _trials.own(self.objective, trial, report)
            outcome = jax.block_until_ready(self.objective(**given, **own))
        except Pruned:
            outcome = Pruned
        except Exception as error:
            outcome = _trials.cause_of(error)
        if ending.asked:  # a `fit` in a notebook returned early
            raise KeyboardInterrupt
        if isinstance(outcome, Cause) and len(group) > 1:
            for one in group:
                self.run([one], ending)
            return
        seconds = (time.perf_counter() - began) / len(group)
        parts = _trials.apart(outcome, len(group)) if self.names else [outcome]
        for (i, values), x, mine in zip(group, parts, reports, strict=True):
            ended = _trials.judged(i, values, x, self.metric, mine, seconds)
            self.journal.end(ended, self.space)
            if self.search is not None:
                self.search.end(ended)
            if ended.cause is not None:
                self.bar.note(f"trial {i}: {ended.cause}")
        done = [t.value for t in self.journal.trials.values() if t.status == "done"]
        best = min(done, key=lambda x: _trials.ranked(x, self.mode), default=math.nan)
        self.bar.show(len(self.journal.trials), {"best": best} if done else {})


def read(directory: StrPath) -> Result:
    """The trials of a `directory` (a path) so far: `read("sweep").best`; also while a sweep writes.

    Raises CheckpointError for a path without a sweep.
    """
    return _study.read(durable_files.folder_of(directory, "directory", "read()"))


def as_trainable(
    objective: Callable[..., Any], metric: str = "value"
) -> Callable[[Mapping[str, Any]], None]:
    """An objective as a function trainable of Ray Tune, for a `ray.tune.Tuner` of your own.

        space = {"learning_rate": ray.tune.uniform(0, 1)}
        tuner = ray.tune.Tuner(ts.tuning.as_trainable(objective), param_space=space)

    Ray gets what it returns and reports under `metric`, and the `step` of a report: a scheduler
    takes `time_attr="step"`. Ray handles exceptions of the objective.
    """

    def train(config: Mapping[str, Any]) -> None:
        tune = library("ray.tune", "as_trainable()", extra="ray")

        def report(step: int, value: float) -> None:
            tune.report({metric: float(value), "step": int(step)})

        own = _trials.own(objective, tune.get_context().get_trial_id(), report)
        found = objective(**config, **own)
        metrics, value = _trials.numbers(found, metric if metric != "value" else None)
        tune.report({**metrics, metric: value})

    return train
