"""Optuna under a sweep: its journal keeps trials, its samplers propose them, its pruners end them.

A trial is written when it has ended, in one line of the journal; what a kill left is run again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tsunax._core import durable_files
from tsunax._core.libraries import library
from tsunax.checkpoints import script_settings
from tsunax.errors import CheckpointError, SaveError, TsunaxError, told
from tsunax.tuning import _trials, spaces
from tsunax.tuning._trials import Cause, Result, Trial

NAME = "optuna.journal"
_STUDY = "tsunax"
_KEY = "tsunax"  # of what is ours in the attributes of a study and of a trial
OBJECTIVE = "objective"  # the only fact of a sweep that may change: a warning tells


def _optuna(part: str = "") -> Any:
    return library(f"optuna{part}", "tune()", extra="tune")


class Journal:
    """The trials that have ended, in a directory of one process at a time, or else in memory."""

    def __init__(self, folder: Path | None, about: dict[str, Any]):
        self.trials: dict[int, Trial] = {}
        self.study, self._lock, self.edits = None, None, list[str]()
        if folder is None:
            return
        self.path = folder / NAME
        with _refusing(folder):
            _optuna()
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = durable_files.Lock(folder, reader="ts.tuning.read(directory)")
            try:
                self.study = _load(self.path, about["mode"])
                if (old := self.study.user_attrs.get(_KEY)) is None:
                    self.study.set_user_attr(_KEY, about)
                    durable_files.sync(folder)
                elif {**old, OBJECTIVE: ""} != {**about, OBJECTIVE: ""}:
                    _raise_other(folder, old, about)
                else:
                    self.edits = [*script_settings.edits(old, {OBJECTIVE: about[OBJECTIVE]})]
                self.trials = _ended(self.study)
            except BaseException:
                self.close()
                raise

    def end(self, trial: Trial, space: Mapping[str, Any]) -> None:
        """A trial has ended; it is on the disk when this returns. Raises SaveError."""
        if self.study is not None:
            try:
                self.study.add_trial(_frozen(trial, space))
            except Exception as error:  # Optuna's lock raises RuntimeError for some errors of disks
                fix = f"The same command goes on with trial {trial.index}."
                parts = str(self.path), told(error), "a journal that can be written", fix
                raise SaveError("journal", *parts) from error
        self.trials[trial.index] = trial

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()


def read(folder: Path) -> Result:
    """What was searched in a directory, and the trials that ended."""
    with _refusing(folder):
        if not (folder / NAME).is_file():
            raise FileNotFoundError(f"no {NAME}")
        study = _load(folder / NAME)
        about = study.user_attrs[_KEY]
        return Result(tuple(_ended(study).values()), tuple(about["space"]), about["mode"])


@contextlib.contextmanager
def _refusing(folder: Path):
    """A block that raises CheckpointError for a journal that Optuna or we cannot read."""
    try:
        yield
    except TsunaxError:
        raise
    except Exception as error:  # a damaged journal also makes Optuna's own assertions fail
        expected = "a directory of a sweep, or a new one"
        raise CheckpointError("journal", str(folder), told(error), expected) from error


def _load(path: Path, mode: str = "") -> Any:
    """The study of a journal; with a mode to write to it, made if there is none yet."""
    optuna, backends = _optuna(), _optuna(".storages.journal")
    storage = optuna.storages.JournalStorage(backends.JournalFileBackend(str(path)))
    names = optuna.get_all_study_names(storage)
    if names and _STUDY not in names:
        raise ValueError(f"a study {names[0]!r} of another program")
    if mode:
        _repair(path, backends.JournalFileSymlinkLock(str(path)))
    if mode and not names:
        return _created(study_name=_STUDY, storage=storage, direction=f"{mode}imize")
    study = optuna.load_study(study_name=_STUDY, storage=storage)
    directions = [direction.name for direction in study.directions]
    # a sweep that was killed before it said what it searches has no trials
    if _KEY not in study.user_attrs and (study.trials or directions != [f"{mode}imize".upper()]):
        raise ValueError(f"a study {_STUDY!r} of another program")
    return study


def _created(**how: Any) -> Any:
    """A new study, without Optuna's line about it on stderr."""
    optuna = _optuna()
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.WARNING))
    try:
        return optuna.create_study(**how)
    finally:
        optuna.logging.set_verbosity(verbosity)


# Seconds for which a process holds Optuna's lock at most: it appends a line, and syncs it. The lock
# of one that was killed stays; Optuna itself waits for 30 s before it takes that away.
_PATIENCE = 1.0


def _repair(path: Path, lock: Any) -> None:
    """Remove what a process left that was killed while it wrote: half a line, and Optuna's lock."""
    link, until = path.with_name(f"{NAME}.lock"), time.monotonic() + _PATIENCE
    while os.path.lexists(link) and time.monotonic() < until:
        time.sleep(0.01)
    link.unlink(missing_ok=True)
    lock.acquire()  # a worker of Optuna's own may write meanwhile
    try:
        with open(path, "r+b") as file:
            content = file.read()
            if not content.startswith(b"{"[: len(content)]):
                raise ValueError(f"{content[:40]!r}, no journal of Optuna's")
            whole = content.rfind(b"\n") + 1
            last = content[:whole].splitlines()[-1:] or [b"{}"]
            json.loads(last[0])  # Optuna would find its damage only when it appends
            if whole < len(content):
                file.truncate(whole)
                os.fsync(file.fileno())
    finally:
        lock.release()


def _raise_other(folder: Path, *abouts: dict[str, Any]) -> None:
    """Raise the first difference of another sweep: what it searched, and what this one does."""
    old, new = ({**about["space"], **about, "space": None} for about in abouts)
    name = next(name for name in old | new if new.get(name) != old.get(name))
    expected = f"{old.get(name, 'nothing')}, as in {folder}"
    got, fix = new.get(name, "nothing"), "Give another directory."
    raise CheckpointError(name, "tune()", got, expected, fix)


def _ended(study: Any) -> dict[int, Trial]:
    """The trials that ended, by number: ours have their own, those of workers the free ones."""
    trials = study.get_trials(deepcopy=False)
    numbers = _numbers(study, trials)
    ended = {numbers[one.number]: one for one in trials if one.state.is_finished()}
    return {index: _trial(ended[index], index) for index in sorted(ended)}


def _numbers(study: Any, trials: Sequence[Any]) -> dict[int, int]:
    """The number of each trial by its number in the study, which counts them as they end.

    Trials of ours have the number with which they were drawn: those of a vectorized search end in
    another order. Trials of workers fill the gaps, but are no points of a grid.
    """
    said = ((one.number, one.user_attrs.get(_KEY, {})) for one in trials)
    ours = {number: about["index"] for number, about in said if "index" in about}
    drawn, first = {*ours.values()}, study.user_attrs.get(_KEY, {}).get("points", 0)
    free = (i for i in itertools.count(first) if i not in drawn)
    return {one.number: ours[one.number] if one.number in ours else next(free) for one in trials}


def _trial(one: Any, index: int) -> Trial:
    status = {"COMPLETE": "done", "PRUNED": "pruned"}.get(one.state.name, "failed")
    is_number = lambda x: isinstance(x, int | float) and not isinstance(x, bool)
    said: dict[str, Any] = {"index": index, "values": one.params, "value": one.value, "cause": None}
    said["metrics"] = {name: x for name, x in one.user_attrs.items() if is_number(x)}
    said |= {"seconds": one.duration.total_seconds(), **one.user_attrs.get(_KEY, {})}
    tuples = lambda x: tuple(map(tuples, x)) if isinstance(x, list) else x
    said["values"] = {name: tuples(x) for name, x in said["values"].items()}
    said["cause"] = None if said["cause"] is None else Cause(*said["cause"])
    return Trial(**said, status=status, reports=dict(one.intermediate_values))


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
        self.study = _created(pruner=pruner or optuna.pruners.NopPruner(), **how)
        if journal.study is not None:
            earlier = journal.study.get_trials(deepcopy=False)
            self.study.add_trials([one for one in earlier if one.state.is_finished()])

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

        values, number = suggested(trial, space), trial.number
        study = getattr(trial, "study", None)  # a trial that is run again by hand has none
        if study is not None and _KEY in study.user_attrs:
            number = _numbers(study, study.get_trials(deepcopy=False))[number]
            trial.set_user_attr(_KEY, {"values": values})
        own = _trials.own(objective, number, report)
        metrics, value = _trials.numbers(objective(**values, **own), metric)
        for name, x in metrics.items():
            trial.set_user_attr(name, x)
        return value

    return run
