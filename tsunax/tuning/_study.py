"""Optuna under a sweep: its journal keeps trials, its samplers propose them, its pruners end them.

A trial is written when it has ended, in one line of the journal; what a kill left is run again.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tsunax._core import durable_files
from tsunax._core.libraries import library
from tsunax.errors import CheckpointError, told
from tsunax.tuning import _trials, spaces
from tsunax.tuning._trials import Cause, Trial

NAME = "optuna.journal"
_STUDY = "tsunax"
_KEY = "tsunax"  # of what is ours in the attributes of a study and of a trial


def _optuna(part: str = "") -> Any:
    return library(f"optuna{part}", "tune()", extra="tune")


class Journal:
    """The trials that have ended, in a directory of one process at a time, or else in memory."""

    def __init__(self, folder: Path | None, about: dict[str, Any]):
        self.trials: dict[int, Trial] = {}
        self.study, self._lock = None, None
        if folder is None:
            return
        path = folder / NAME
        with _refusing(folder):
            _optuna()
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = durable_files.Lock(folder, reader="ts.tuning.read(directory)")
            try:
                _repair(path)
                self.study = _load(path, about["mode"])
                if (old := self.study.user_attrs.get(_KEY)) is None:
                    self.study.set_user_attr(_KEY, about)
                    durable_files.sync(folder)
                elif old != about:
                    _raise_other(folder, old, about)
                self.trials = _ended(self.study)
            except BaseException:
                self.close()
                raise

    def end(self, trial: Trial, space: Mapping[str, Any]) -> None:
        """A trial has ended; it is on the disk when this returns."""
        if self.study is not None:
            self.study.add_trial(_frozen(trial, space))
        self.trials[trial.index] = trial

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()


def read(folder: Path) -> tuple[dict[str, Any], list[Trial]]:
    """What was searched in a directory, and the trials that ended."""
    with _refusing(folder):
        if not (folder / NAME).is_file():
            raise FileNotFoundError(f"no {NAME}")
        study = _load(folder / NAME)
        return study.user_attrs[_KEY], list(_ended(study).values())


@contextlib.contextmanager
def _refusing(folder: Path):
    """A block that raises CheckpointError for a journal that Optuna or we cannot read."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        expected = "a directory of a sweep, or a new one"
        raise CheckpointError("journal", str(folder), told(error), expected) from error


def _load(path: Path, mode: str = "") -> Any:
    optuna = _optuna()
    backend = _optuna(".storages.journal").JournalFileBackend(str(path))
    given = {"study_name": _STUDY, "storage": optuna.storages.JournalStorage(backend)}
    if not mode:
        return optuna.load_study(**given)
    return optuna.create_study(**given, direction=f"{mode}imize", load_if_exists=True)


def _repair(path: Path) -> None:
    """Remove what a process left that was killed while it wrote: half a line, and Optuna's lock."""
    path.with_name(f"{NAME}.lock").unlink(missing_ok=True)
    if path.exists():
        with open(path, "r+b") as file:
            content = file.read()
            if not content.startswith(b"{"[: len(content)]):
                raise ValueError(f"{content[:40]!r}, no journal of Optuna's")
            if (whole := content.rfind(b"\n") + 1) < len(content):
                file.truncate(whole)
                os.fsync(file.fileno())


def _raise_other(folder: Path, *abouts: dict[str, Any]) -> None:
    """Raise the first difference of another sweep: what it searched, and what this one does."""
    old, new = ({**about["space"], **about, "space": None} for about in abouts)
    name = next(name for name in old | new if new.get(name) != old.get(name))
    expected = f"{old.get(name, 'nothing')}, as in {folder}"
    got, fix = new.get(name, "nothing"), "Give another directory."
    raise CheckpointError(name, "tune()", got, expected, fix)


def _ended(study: Any) -> dict[int, Trial]:
    found = (_trial(one) for one in study.get_trials(deepcopy=False) if one.state.is_finished())
    return {trial.index: trial for trial in sorted(found, key=lambda trial: trial.index)}


def _trial(one: Any) -> Trial:
    status = {"COMPLETE": "done", "PRUNED": "pruned"}.get(one.state.name, "failed")
    reports, said = dict(one.intermediate_values), one.user_attrs.get(_KEY)
    if said is None:  # of a worker of Optuna's own
        return Trial(one.number, one.params, status, one.value, reports=reports)
    tuples = lambda x: tuple(map(tuples, x)) if isinstance(x, list) else x
    values = {name: tuples(x) for name, x in said["values"].items()}
    cause = None if said["cause"] is None else Cause(*said["cause"])
    return Trial(**{**said, "values": values, "cause": cause}, status=status, reports=reports)


def _frozen(trial: Trial, space: Mapping[str, Any]) -> Any:
    states = {"done": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
    said = {name: getattr(trial, name) for name in ("index", "values", "value", "metrics", "cause")}
    known = {name: x for name, x in space.items() if spaces.is_drawn(x)}
    text = lambda name, x: spaces.label(x) if isinstance(known[name], spaces.choice) else x
    return _optuna(".trial").create_trial(
        state=_optuna(".trial").TrialState[states[trial.status]],
        value=trial.value if trial.status == "done" else None,
        params={name: text(name, trial.values[name]) for name in known},
        distributions={name: _distribution(entry) for name, entry in known.items()},
        user_attrs={_KEY: {**said, "seconds": trial.seconds}},
        intermediate_values=trial.reports,
    )


def _distribution(entry: Any) -> Any:
    kinds = _optuna(".distributions")
    if isinstance(entry, spaces.choice):
        return kinds.CategoricalDistribution([spaces.label(x) for x in entry.options])
    is_int = isinstance(entry, spaces.integer)
    kind = kinds.IntDistribution if is_int else kinds.FloatDistribution
    return kind(entry.low, entry.high, log=entry.log)


class Search:
    """Values that Optuna proposes from what was found, in a study in memory."""

    def __init__(self, space: Mapping, about: dict, pruner: Any, sampler: Any, journal: Journal):
        optuna = _optuna()
        self.space, self.seed = space, about["seed"]
        sampler = sampler or (lambda seed: optuna.samplers.TPESampler(seed=seed))
        self.make = sampler if callable(sampler) else None
        how = {"sampler": None if self.make else sampler, "direction": f"{about['mode']}imize"}
        self.study = optuna.create_study(pruner=pruner or optuna.pruners.NopPruner(), **how)
        self.study.add_trials([_frozen(trial, space) for trial in journal.trials.values()])

    def values(self, index: int) -> dict[str, Any]:
        if self.make is not None:  # anew, so that after a kill it proposes what it would have
            self.study.sampler = self.make(spaces.random_bits(self.seed, index, "", np.uint32))
        self.trial = self.study.ask()
        return suggested(self.trial, self.space)

    def prunes(self, step: int, value: float) -> bool:
        with warnings.catch_warnings():  # of nan, and of a second report for a step
            warnings.simplefilter("ignore")
            self.trial.report(value, step)
            return self.trial.should_prune()

    def end(self, trial: Trial) -> None:
        state = _frozen(trial, self.space).state
        self.study.tell(self.trial, trial.value if trial.status == "done" else None, state)


def suggested(trial: Any, space: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, entry in space.items():
        if isinstance(entry, spaces.choice):
            by_label = {spaces.label(option): option for option in entry.options}
            entry = by_label[trial.suggest_categorical(name, list(by_label))]
        elif spaces.is_drawn(entry):
            is_int = isinstance(entry, spaces.integer)
            suggest = trial.suggest_int if is_int else trial.suggest_float
            entry = suggest(name, entry.low, entry.high, log=entry.log)
        found[name] = entry
    return found


def as_optuna(
    objective: Callable[..., Any], space: Mapping[str, Any], metric: str | None = None
) -> Callable[[Any], float]:
    """An objective and its space for a study of Optuna of your own: as many workers as you start.

        study.optimize(ts.tuning.as_optuna(objective, space), n_trials=100, n_jobs=4)

    `objective`, `space` and `metric` are those of `tune`; an entry that is none of a space raises
    WrongTypeError. Reports go to the study's pruner, other numbers of a result to the `user_attrs`
    of the trial. Optuna handles exceptions of the objective.
    """
    space = spaces.checked(space, "as_optuna()")

    def run(trial: Any) -> float:
        def report(step: int, value: float) -> None:
            trial.report(float(value), int(step))
            if trial.should_prune():
                raise _optuna().TrialPruned

        own = _trials.own(objective, trial.number, report)
        metrics, value = _trials.numbers(objective(**suggested(trial, space), **own), metric)
        for name, x in metrics.items():
            trial.set_user_attr(name, x)
        return value

    return run
