"""Optuna under a sweep: its journal keeps trials, its samplers propose them, its pruners end them.

A trial is written when it has ended, as a line of the journal. A killed trial is run again.
"""

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tsunax._core import StrPath, durable_files, libraries
from tsunax.checkpoints import script_settings
from tsunax.errors import CheckpointError, SaveError, TsunaxError, told
from tsunax.tuning import _trials, spaces

JOURNAL_NAME = "optuna.journal"
_STUDY_NAME = "tsunax"
_ATTRIBUTES_KEY = "tsunax"  # our entry in the attributes of a study and of a trial
OBJECTIVE = "objective"  # the only setting of a sweep that may change; then tune() warns


def _optuna(part: str = "") -> Any:
    return libraries.library(f"optuna{part}", "tune()", extra="tune")


class Journal:
    """The ended trials, in memory or in a directory that a single process may use at a time."""

    def __init__(self, folder: Path | None, about: dict[str, Any]):
        self.trials: dict[int, _trials.Trial] = {}
        self.study, self._lock, self.edits = None, None, list[str]()
        if folder is None:
            return
        self.path = folder / JOURNAL_NAME
        with _as_checkpoint_errors(folder):
            _optuna()
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = durable_files.Lock(folder, reader="ts.tuning.read(directory)")
            try:
                self.study = _load(self.path, about["mode"])
                if (old := self.study.user_attrs.get(_ATTRIBUTES_KEY)) is None:
                    self.study.set_user_attr(_ATTRIBUTES_KEY, about)
                    durable_files.sync(folder)
                else:
                    _check_settings(folder, old, about)
                    code = script_settings.Setting(about[OBJECTIVE], script_settings.Kind.OBJECTIVE)
                    self.edits = [*script_settings.edits(old, {OBJECTIVE: code})]
                self.trials = _ended(self.study)
            except BaseException:
                self.close()
                raise

    def end(
        self, trial: _trials.Trial, space: Mapping[str, Any], search_notes: Mapping[str, Any]
    ) -> None:
        """A trial has ended; it is on the disk when this returns. Raises SaveError."""
        if self.study is not None:
            try:
                self.study.add_trial(_as_optuna_trial(trial, space, search_notes))
            except Exception as error:  # Optuna's lock raises RuntimeError for some errors of disks
                fix = f"The same command goes on with trial {trial.index}."
                place = str(self.path)
                raise SaveError("journal", place, told(error), "a writable file", fix) from error
        self.trials[trial.index] = trial

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()


def read(directory: StrPath) -> _trials.Result:
    """The ended trials of a `directory` (a path), also while a sweep runs: `read("sweep").best`.

    Raises CheckpointError for a path without a sweep.
    """
    folder = durable_files.folder_of(directory, "directory", "read()")
    with _as_checkpoint_errors(folder):
        if not (folder / JOURNAL_NAME).is_file():
            raise FileNotFoundError(f"no {JOURNAL_NAME}")
        study = _load(folder / JOURNAL_NAME)
        about = study.user_attrs[_ATTRIBUTES_KEY]
        return _trials.Result(tuple(_ended(study).values()), tuple(about["space"]), about["mode"])


@contextlib.contextmanager
def _as_checkpoint_errors(folder: Path):
    """Raise CheckpointError for a journal that cannot be read in this block."""
    try:
        yield
    except TsunaxError:
        raise
    except Exception as error:  # a damaged journal also makes Optuna's own assertions fail
        expected = "a directory of a sweep, or a new one"
        raise CheckpointError("journal", str(folder), told(error), expected) from error


def _load(path: Path, mode: str = "") -> Any:
    """The study of a journal. With a mode it is opened for writing, and created if it is new."""
    optuna, backends = _optuna(), _optuna(".storages.journal")
    storage = optuna.storages.JournalStorage(backends.JournalFileBackend(str(path)))
    names = optuna.get_all_study_names(storage)
    if names and _STUDY_NAME not in names:
        raise ValueError(f"a study {names[0]!r} of another program")
    if mode:
        _repair(path, backends.JournalFileSymlinkLock(str(path)))
    if mode and not names:
        return _created(study_name=_STUDY_NAME, storage=storage, direction=f"{mode}imize")
    study = optuna.load_study(study_name=_STUDY_NAME, storage=storage)
    directions = [direction.name for direction in study.directions]
    # A sweep that was killed before it stored its settings has no trials.
    if _ATTRIBUTES_KEY not in study.user_attrs and (
        study.trials or directions != [f"{mode}imize".upper()]
    ):
        raise ValueError(f"a study {_STUDY_NAME!r} of another program")
    return study


def _created(**options: Any) -> Any:
    """A new study, without Optuna's line about it on stderr."""
    optuna = _optuna()
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.WARNING))
    try:
        return optuna.create_study(**options)
    finally:
        optuna.logging.set_verbosity(verbosity)


# Seconds after which Optuna's lock counts as left over by a killed process: a living one holds it
# while it appends and syncs a line. Optuna itself waits for 30 s. A smaller number may break the
# lock of a slow disk; a larger one only delays the start after a kill.
_LOCK_SECONDS = 1.0


def _repair(path: Path, lock: Any) -> None:
    """Remove half a line and Optuna's lock, as a process leaves them that is killed in a write."""
    link, deadline = path.with_name(f"{JOURNAL_NAME}.lock"), time.monotonic() + _LOCK_SECONDS
    while os.path.lexists(link) and time.monotonic() < deadline:
        time.sleep(0.01)
    link.unlink(missing_ok=True)
    lock.acquire()  # a worker of Optuna's own may write meanwhile
    try:
        with open(path, "r+b") as file:
            content = file.read()
            if not content.startswith(b"{"[: len(content)]):
                raise ValueError(f"{content[:40]!r}, no journal of Optuna's")
            complete_bytes = content.rfind(b"\n") + 1
            last_line = content[:complete_bytes].splitlines()[-1:] or [b"{}"]
            json.loads(last_line[0])  # Optuna would find its damage only when it appends
            if complete_bytes < len(content):
                file.truncate(complete_bytes)
                os.fsync(file.fileno())
    finally:
        lock.release()


def _check_settings(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise CheckpointError that names the first setting in which two sweeps differ."""
    no_code = {"space": None, OBJECTIVE: None}
    for old_part, new_part in ((old["space"], new["space"]), (old | no_code, new | no_code)):
        for name in old_part | new_part:
            if old_part.get(name) != new_part.get(name):
                got, expected = new_part.get(name), f"{old_part.get(name)}, as in {folder}"
                raise CheckpointError(name, "tune()", got, expected, "Give another directory.")


def _our_trials(study: Any) -> list[Any]:
    """The ended trials that `tune` added to a study; other programs may add trials, too."""
    trials = study.get_trials(deepcopy=False)
    return [t for t in trials if t.state.is_finished() and _ATTRIBUTES_KEY in t.user_attrs]


def _ended(study: Any) -> dict[int, _trials.Trial]:
    """The ended trials by number. A study counts in the order in which trials end."""
    return {t.index: t for t in sorted(map(_as_trial, _our_trials(study)), key=lambda t: t.index)}


def _as_trial(optuna_trial: Any) -> _trials.Trial:
    status = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "failed"}[optuna_trial.state.name]
    fields = optuna_trial.user_attrs[_ATTRIBUTES_KEY]
    as_tuples = lambda x: tuple(map(as_tuples, x)) if isinstance(x, list) else x
    values = {name: as_tuples(x) for name, x in fields["values"].items()}
    cause = None if fields["cause"] is None else _trials.Cause(*fields["cause"])
    fields = fields | {"values": values, "cause": cause}
    return _trials.Trial(**fields, status=status, reports=dict(optuna_trial.intermediate_values))


def _as_optuna_trial(
    trial: _trials.Trial, space: Mapping[str, Any], search_notes: Mapping[str, Any]
) -> Any:
    states = {"done": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
    field_names = ("index", "values", "value", "metrics", "cause", "seconds")
    fields = {name: getattr(trial, name) for name in field_names}
    drawn_entries = {name: x for name, x in space.items() if spaces.is_drawn(x)}
    parameter = lambda name, x: (
        spaces.label(x) if isinstance(drawn_entries[name], spaces.choice) else x
    )
    return _optuna(".trial").create_trial(
        state=_optuna(".trial").TrialState[states[trial.status]],
        value=trial.value if trial.status == "done" else None,
        params={name: parameter(name, trial.values[name]) for name in drawn_entries},
        distributions={name: _distribution(entry) for name, entry in drawn_entries.items()},
        user_attrs={_ATTRIBUTES_KEY: fields},
        system_attrs=dict(search_notes),
        intermediate_values=trial.reports,
    )


def _distribution(entry: Any) -> Any:
    distributions = _optuna(".distributions")
    if isinstance(entry, spaces.choice):
        return distributions.CategoricalDistribution([spaces.label(x) for x in entry.options])
    is_int = isinstance(entry, spaces.integer)
    distribution = distributions.IntDistribution if is_int else distributions.FloatDistribution
    return distribution(entry.low, entry.high, log=entry.log)


class Search:
    """Values that Optuna proposes from the results of earlier trials, in a study in memory."""

    def __init__(self, space: Mapping, about: dict, pruner: Any, sampler: Any, journal: Journal):
        optuna = _optuna()
        self.space, self.seed = space, about["seed"]
        fixed_or_new = lambda seed: sampler or optuna.samplers.TPESampler(seed=seed)
        self.make_sampler = sampler if callable(sampler) else fixed_or_new
        pruner, direction = pruner or optuna.pruners.NopPruner(), f"{about['mode']}imize"
        # `HyperbandPruner` draws the brackets of trials from the name, which is random by default.
        self.study = _created(study_name=_STUDY_NAME, pruner=pruner, direction=direction)
        if journal.study is not None:
            self.study.add_trials(_our_trials(journal.study))

    def values(self, index: int) -> dict[str, Any]:
        # A new sampler for each trial: after a kill the proposals are the same as without it.
        trial_seed = spaces.random_bits(self.seed, index, "", np.uint32)
        self.study.sampler = self.make_sampler(trial_seed)
        self.trial = self.study.ask()
        return suggested_values(self.trial, self.space)

    def prunes(self, step: int, value: float) -> bool:
        with warnings.catch_warnings():  # Optuna warns of nan and of a second report for a step
            warnings.simplefilter("ignore")
            self.trial.report(value, step)
            return self.trial.should_prune()

    def end(self, trial: _trials.Trial) -> Mapping[str, Any]:
        """Tell Optuna how a trial ended. Returns the notes of its sampler and pruner in the trial.

        A resumed search needs these notes: `SuccessiveHalvingPruner` compares the rungs in them.
        """
        state = _as_optuna_trial(trial, self.space, {}).state
        value = trial.value if trial.status == "done" else None
        return self.study.tell(self.trial, value, state).system_attrs


def suggested_values(trial: Any, space: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, entry in space.items():
        if isinstance(entry, spaces.choice):
            by_label = {spaces.label(option): option for option in entry.options}
            entry = by_label[trial.suggest_categorical(name, list(by_label))]
        elif spaces.is_drawn(entry):
            is_int = isinstance(entry, spaces.integer)
            suggest = trial.suggest_int if is_int else trial.suggest_float
            entry = suggest(name, entry.low, entry.high, log=entry.log)
        values[name] = entry
    return values


def as_optuna(
    objective: Callable[..., Any], space: Mapping[str, Any], metric: str | None = None
) -> Callable[[Any], float]:
    """An objective and its space for your own study of Optuna: as many workers as you start.

        study.optimize(ts.tuning.as_optuna(objective, space), n_trials=100, n_jobs=4)

    `objective`, `space` and `metric` are as for `tune`; an entry that cannot be drawn from raises
    WrongTypeError. Reports go to the study's pruner, other numbers of a result to the `user_attrs`
    of the trial. Optuna handles exceptions of the objective.
    """
    space = spaces.checked_space(space)

    def run(trial: Any) -> float:
        def report(step: int, value: float) -> None:
            trial.report(float(value), int(step))
            if trial.should_prune():
                raise _optuna().TrialPruned

        arguments = _trials.reserved_arguments_of(objective, trial.number, report)
        arguments |= suggested_values(trial, space)
        metrics, value = _trials.numbers(objective(**arguments), metric)
        for name, x in metrics.items():
            trial.set_user_attr(name, x)
        return value

    return run
