"""Trials that Optuna proposes, prunes and keeps: its samplers, its pruners, its journal.

The number of a trial is Optuna's too. A trial that was asked for and has no end, because the
process died, is taken up again.
"""

from __future__ import annotations

import collections
import contextlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tsunax._core import trees
from tsunax._core.libraries import library
from tsunax.errors import CheckpointError, WrongTypeError, told
from tsunax.tuning import _journal, _sweep, _trials, spaces
from tsunax.tuning._trials import Trial

NAME = "optuna.journal"
_STUDY = "tsunax"
_KEY = "tsunax"  # of what is ours in the attributes of a study and of a trial


def _optuna(part: str = "") -> Any:
    return library(f"optuna{part}", "tune()", extra="tune")


def _storage(path: Path) -> Any:
    file = _optuna(".storages.journal").JournalFileBackend(str(path))
    return _optuna().storages.JournalStorage(file)


@contextlib.contextmanager
def _read_by_optuna(path: Path):
    """A block that reads a journal. Raises CheckpointError for one that Optuna or we cannot read."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        expected = "a journal of tune() and Optuna's"
        raise CheckpointError("journal", str(path), told(error), expected) from error


def read(folder: Path) -> tuple[dict[str, Any], dict[int, Trial]]:
    """What was searched in a directory, and the trials that ended."""
    with _read_by_optuna(folder / NAME):
        study = _optuna().load_study(study_name=_STUDY, storage=_storage(folder / NAME))
        return study.user_attrs[_KEY], _ended(study)


def _ended(study: Any) -> dict[int, Trial]:
    found = {}
    for one in study.get_trials(deepcopy=False):
        if one.state.is_finished() and _KEY in one.user_attrs:
            found[one.number] = _trials.from_record(one.user_attrs[_KEY])
        elif one.state.is_finished():  # of a worker of Optuna's own
            status = {"COMPLETE": "done", "PRUNED": "pruned"}.get(one.state.name, "failed")
            reports = dict(one.intermediate_values)
            found[one.number] = Trial(one.number, one.params, status, one.value, reports=reports)
    return found


class Study(_sweep.Drawn):
    """A study, with the methods of `Drawn` and of a `Journal`."""

    def __init__(self, space: dict, about: dict, pruner: Any, folder: Path | None, sampler=None):
        super().__init__(space, about["seed"])
        optuna = _optuna()
        is_made = isinstance(sampler, optuna.samplers.BaseSampler)
        make = (lambda seed: optuna.samplers.TPESampler(seed=seed)) if sampler is None else sampler
        if not callable(make) and not is_made:
            expected = "an Optuna sampler, or a function of a seed that makes one"
            raise WrongTypeError("sampler", "tune()", repr(sampler), expected)
        if pruner is not None and not isinstance(pruner, optuna.pruners.BasePruner):
            expected, fix = "one of Optuna's", "optuna.pruners.MedianPruner(), for example."
            raise WrongTypeError("pruner", "tune()", trees.describe(pruner), expected, fix)
        self._make = None if is_made else make
        self._running: dict[int, Any] = {}
        given = {"pruner": pruner or optuna.pruners.NopPruner(), "study_name": _STUDY}
        given |= {"direction": "minimize" if about["mode"] == "min" else "maximize"}
        given |= {"sampler": sampler if is_made else None, "load_if_exists": True}
        self._lock = None if folder is None else _journal.lock(folder)
        try:
            self._open(folder, about, given)
        except BaseException:
            self.close()
            raise

    def _open(self, folder: Path | None, about: dict, given: dict[str, Any]) -> None:
        path, optuna = (folder or Path()) / NAME, _optuna()
        if folder is not None and path.exists():
            _journal.cut_torn_line(path)
            # left by a process that was killed while it wrote: the directory's own lock is ours
            (folder / f"{NAME}.lock").unlink(missing_ok=True)
        with _read_by_optuna(path):
            storage = None if folder is None else _storage(path)
            self.study = optuna.create_study(storage=storage, **given)
            if (old := self.study.user_attrs.get(_KEY)) is None:
                self.study.set_user_attr(_KEY, about)
            elif folder is not None:
                _journal.check_same(old, about, folder)
            self.trials = _ended(self.study)
            there = self.study.get_trials(deepcopy=False)
            starts = {one.number: int(one.user_attrs.get("starts", 0)) for one in there}
        self.deaths = collections.Counter(starts)

    def values(self, index: int) -> dict[str, Any]:
        self._seed(index, "")
        there = self.study.get_trials(deepcopy=False)[index : index + 1]
        if there and there[0].state.name == "RUNNING":  # its process died
            trial = _optuna(".trial").Trial(self.study, there[0]._trial_id)
        else:  # a new one, or one that a person has put into the study's queue
            trial = self.study.ask()
        if trial.number != index:
            expected, fix = f"trial {index}", "Another program adds trials to its study."
            raise CheckpointError(NAME, "tune()", f"trial {trial.number}", expected, fix)
        _ = trial.relative_params  # what is drawn together, lazily: now, by this seed
        self._running[index] = trial
        return _suggested(trial, self.space, lambda name: self._seed(index, name))

    def _seed(self, index: int, name: str) -> None:
        """A new sampler for each trial and name: after a kill it proposes what it would have."""
        if self._make is not None:
            bits = spaces.random_bits(self.seed, index, name, np.uint32)
            self.study.sampler = self._make(bits)

    def prunes(self, index: int, reports: dict[int, float]) -> bool:
        step = next(reversed(reports))
        with warnings.catch_warnings():  # of nan, and of a report from before the process died
            warnings.simplefilter("ignore")
            self._running[index].report(reports[step], step)
            return self._running[index].should_prune()

    def start(self, indices: list[int]) -> None:
        for i in indices:
            self._running[i].set_user_attr("starts", self.deaths[i] + 1)

    def interrupt(self, indices: list[int]) -> None:
        for i in indices:
            self._running[i].set_user_attr("starts", self.deaths[i])

    def end(self, trials: list[Trial]) -> None:
        states = _optuna(".trial").TrialState
        for trial in trials:
            running = self._running.pop(trial.index)
            running.set_user_attr(_KEY, _trials.as_record(trial))
            state = {"done": states.COMPLETE, "pruned": states.PRUNED}.get(trial.status)
            value = trial.value if trial.status == "done" else None
            self.study.tell(running, value, state or states.FAIL)
            self.trials[trial.index] = trial

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()


def _suggested(trial: Any, space: Mapping[str, Any], seed: Callable[[str], None]) -> dict[str, Any]:
    """The values that Optuna proposes for a trial."""
    found: dict[str, Any] = {}
    for name, entry in space.items():
        if (entry := spaces.entry_of(entry, found)) is spaces.ABSENT:
            continue
        seed(name)
        if isinstance(entry, spaces.uniform | spaces.log_uniform):
            is_log = isinstance(entry, spaces.log_uniform)
            entry = trial.suggest_float(name, entry.low, entry.high, log=is_log)
        elif isinstance(entry, spaces.integer):
            entry = trial.suggest_int(name, entry.low, entry.high, log=entry.log)
        elif isinstance(entry, spaces.choice):
            by_label = {spaces.label(option): option for option in entry.options}
            entry = by_label[trial.suggest_categorical(name, list(by_label))]
        found[name] = entry
    return found


def objective_of(objective: Callable, space: Mapping[str, Any], metric: str | None) -> Callable:
    """See `tuning.as_optuna`."""
    space = spaces.checked(space, "as_optuna()", "optuna")

    def run(trial: Any) -> float:
        def report(step: int, value: float) -> None:
            trial.report(float(value), int(step))
            if trial.should_prune():
                raise _optuna().TrialPruned

        own = _trials.own(objective, trial.number, report)
        found = objective(**_suggested(trial, space, lambda name: None), **own)
        metrics, value = _trials.numbers(found, metric)
        for name, x in metrics.items():
            trial.set_user_attr(name, x)
        return value

    return run
