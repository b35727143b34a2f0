"""Trials of one objective over a space of hyperparameters: run, recorded, resumed, compared.

The values of a trial are a function of (seed, trial), and its result is on the disk before the next
trial starts: a killed sweep can be continued, and ends as if it had not been killed.
"""

import contextlib
import inspect
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tsunax._core import StrPath, checks, durable_files, libraries, processes
from tsunax._core.interrupts import Interrupt, in_notebook
from tsunax.checkpoints import script_settings
from tsunax.errors import HyperparameterError, unknown, warn
from tsunax.run import progress as _progress
from tsunax.tuning import _study, _trials, spaces

__all__ = ["as_trainable", "tune"]


class _Ending(Interrupt):
    """Ctrl-C ends the trial under way, also if a `fit` in it returns."""

    ends_runs_within = True

    def _handle(self, number, frame) -> None:
        raise KeyboardInterrupt


@checks.naming_arguments
def tune(
    objective: Callable[..., Any],
    space: Mapping[str, Any],
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
) -> _trials.Result:
    """Evaluate the objective at many points of a space; returns their table with the best trial.

        for trial in range(trials):
            values = draw(space, seed, trial)
            record(trial, values, objective(**values))

    Args:
      objective: takes the names of the space as keywords, and returns a number or a dict of numbers
        (as `evaluate` does). It may also name `trial`, the number of the trial (for a folder, or a
        key), and `report`: `report(step, value)` records a number on the way.
      space: names, and entries of `ts.tuning.spaces`; plain values are constants, tuples too.
      trials: their number; by default all points of a grid.
      backend: "random"; "grid", every combination of `grid` entries; "optuna" (extra `tune`).
      seed: the values of a trial are a function of it and of the trial's number.
      mode, metric: "min" or "max", and of which number in a dict.
      sampler, pruner: Optuna's, with backend="optuna": a sampler, or a function of a seed that
        makes one; with a pruner `report` raises an exception if the trial is not worth going on.
      vectorized: names that the objective takes as arrays, up to `members` trials at once, which
        agree in all other values. `trial` is then an array, too, and it returns an array or a dict
        of arrays. For populations. If it raises, its trials are run again one by one.
      directory: where Optuna's journal of the trials is kept, `optuna.journal` (extra `tune`). The
        same command continues an interrupted sweep, also with more trials; a warning says if the
        code of the objective, or a value that it reads, has changed since.

    A trial that raises, or returns no finite number, has failed, with a `cause`, and the sweep
    continues. Ctrl-C ends the sweep with KeyboardInterrupt, which has the `result` of the trials
    that ended (in a notebook it is returned); the interrupted trial is run again later.

    Before anything runs it raises HyperparameterError and WrongTypeError for a space or options
    that cannot be, TypeError for an objective that does not take the names of the space,
    CheckpointError for another sweep's directory, MissingLibraryError.

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
    space = spaces.checked_space(space)
    reserved_arguments = _trials.reserved_arguments_of(objective, None, len)
    inspect.signature(objective).bind(**dict.fromkeys(space), **reserved_arguments)
    names = (vectorized,) if isinstance(vectorized, str) else tuple(vectorized)
    for name in names:
        if name not in space:
            raise HyperparameterError(unknown("vectorized", where, name, space))
    is_optuna = backend == "optuna"
    if (is_optuna and names) or (not is_optuna and (sampler or pruner)):
        expected = "'optuna' for a sampler or pruner, and not for vectorized names"
        raise HyperparameterError("backend", where, backend, expected)
    points = spaces.points(space) if backend == "grid" else [{}]
    if backend == "grid" and points == [{}]:
        raise HyperparameterError("space", where, "no grid", "at least one: spaces.grid([...])")
    trials = len(points) if trials is None and backend == "grid" else trials
    trials = checks.check_count(trials, where, "trials")
    if trials > 1 and not any(map(spaces.is_drawn, space.values())):
        expected = "an entry that varies, as ts.tuning.spaces.log_uniform(low, high)"
        raise HyperparameterError("space", where, "constants alone", expected)
    about = {
        "backend": backend, "seed": seed, "mode": mode, "metric": metric,
        "space": {name: repr(entry) for name, entry in space.items()},
        _study.OBJECTIVE: script_settings.code_text(objective),
    }  # fmt: skip
    folder = None if directory is None else durable_files.folder_of(directory, "directory", where)
    with contextlib.closing(_study.Journal(folder, about)) as journal:
        for note in journal.edits:
            warn(f"tune(): {note} Earlier trials in {directory} are of the other one.")
        search = _study.Search(space, about, pruner, sampler, journal) if is_optuna else None
        bar = _progress.progress(progress, trials, unit="trial")
        sweep = _Sweep(objective, metric, mode, names, space, search, journal, bar)
        sampled_values = lambda i: spaces.sample(space, seed, i) | points[i % len(points)]
        values_of = search.values if search else sampled_values
        open_trials = ((i, values_of(i)) for i in range(trials) if i not in journal.trials)
        current_result = lambda: _trials.Result(
            tuple(journal.trials[i] for i in sorted(journal.trials)), (*space,), mode
        )
        closing_text = "interrupted"
        try:
            with _Ending("INT") as ending:
                for group in _groups(open_trials, names, members if names else 1):
                    sweep.run(group, ending)
            closing_text = ""
        except (KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, SystemExit) or not in_notebook():
                error.result = current_result()  # type: ignore[attr-defined]
                raise
        finally:
            bar.close(closing_text)
    if (result := current_result()).trials and all(trial.cause for trial in result.trials):
        warn(f"tune(): no trial ended with a number. The first: {result.trials[0].cause}")
    return result


def _groups(
    open_trials: Iterable[tuple[int, dict[str, Any]]], names: Sequence[str], group_size: int
) -> Iterator[list]:
    """Trials (number, values) that agree in all values but the vectorized ones.

    Values are read one by one: Optuna proposes them from the trials that have ended.
    """
    groups: dict[str, list] = {}
    for i, values in open_trials:
        shared = json.dumps([x for name, x in values.items() if name not in names])
        group = groups.setdefault(shared, [])
        group.append((i, values))
        if len(group) == group_size:
            yield groups.pop(shared)
    yield from groups.values()


@dataclass
class _Sweep:
    """The objective and the settings with which trials are run."""

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
        index, arguments = group[0]
        trial: Any = index
        if self.names:
            trial = np.array([i for i, _ in group])
            arguments = arguments | {
                name: np.array([values[name] for _, values in group]) for name in self.names
            }
        reports: list[dict[int, float]] = [{} for _ in group]

        def report(step: int, value: Any) -> None:
            step = checks.check_count(np.asarray(step)[()], "report()", "step", least=0)
            for trial_reports, member_outcome in zip(
                reports, value if self.names else [value], strict=True
            ):
                trial_reports.pop(step, None)
                trial_reports[step] = _trials.number(member_outcome, "report()")
            if self.search is not None and self.search.prunes(step, reports[0][step]):
                raise _trials.Pruned(f"trial {index} at step {step}")

        start = time.perf_counter()
        try:
            reserved_arguments = _trials.reserved_arguments_of(self.objective, trial, report)
            outcome = jax.block_until_ready(self.objective(**arguments, **reserved_arguments))
        except _trials.Pruned:
            outcome = _trials.Pruned
        except Exception as error:
            outcome = _trials.cause_of(error)
        if ending.asked:  # a `fit` in a notebook returned early
            raise KeyboardInterrupt
        if isinstance(outcome, _trials.Cause) and len(group) > 1:
            for member in group:
                self.run([member], ending)
            return
        seconds = (time.perf_counter() - start) / len(group)
        outcomes = _trials.outcomes_of_members(outcome, len(group)) if self.names else [outcome]
        members = zip(group, outcomes, reports, strict=True)
        for (i, values), member_outcome, trial_reports in members:
            trial = _trials.as_trial(i, values, member_outcome, self.metric, trial_reports, seconds)
            search_notes = self.search.end(trial) if self.search is not None else {}
            self.journal.end(trial, self.space, search_notes)
            if trial.cause is not None:
                self.bar.note(f"trial {i}: {trial.cause}")
        done_values = [t.value for t in self.journal.trials.values() if t.status == "done"]
        rank = lambda value: _trials.rank_of(value, self.mode)
        best = min(done_values, key=rank, default=math.nan)
        self.bar.show(len(self.journal.trials), {"best": best} if done_values else {})


def as_trainable(
    objective: Callable[..., Any], metric: str = "value"
) -> Callable[[Mapping[str, Any]], None]:
    """An objective as a function trainable of Ray Tune, for your own `ray.tune.Tuner`.

        space = {"learning_rate": ray.tune.uniform(0, 1)}
        tuner = ray.tune.Tuner(ts.tuning.as_trainable(objective), param_space=space)

    Ray gets its results and reports under `metric`, and the `step` of a report: a scheduler
    takes `time_attr="step"`. Ray handles exceptions of the objective.
    """

    def train(config: Mapping[str, Any]) -> None:
        tune = libraries.library("ray.tune", "as_trainable()", extra="ray")

        def report(step: int, value: float) -> None:
            tune.report({metric: float(value), "step": int(step)})

        reserved_arguments = _trials.reserved_arguments_of(
            objective, tune.get_context().get_trial_id(), report
        )
        outcome = objective(**config, **reserved_arguments)
        metrics, value = _trials.numbers(outcome, metric if metric != "value" else None)
        tune.report({**metrics, metric: value})

    return train
