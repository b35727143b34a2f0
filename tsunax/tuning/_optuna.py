"""Values that Optuna proposes: its samplers, its pruners, its journal, by ask and tell.

The number of a trial is Optuna's too. One that was asked for and has no end, since the process
died, is taken up again.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

from tsunax.errors import CheckpointError, MissingLibraryError, WrongTypeError, message
from tsunax.tuning import _journal, _sweep, spaces
from tsunax.tuning._trials import Trial

__all__ = []

_NAME = "optuna.journal"


def _optuna(part: str = "") -> Any:
    try:
        return importlib.import_module(f"optuna{part}")
    except ModuleNotFoundError as error:
        fix = "pip install 'tsunax[tune]'"
        raise MissingLibraryError(
            message("optuna", "tune()", "no such library", "Optuna", fix)
        ) from error


class _NoLock:
    """The directory has a lock of ours, which the kernel drops with the process; Optuna's would
    outlive it.
    """

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


class Proposed(_sweep.Drawn):
    """A study, with the methods of `Drawn`."""

    def __init__(
        self, space: dict[str, Any], seed: int, mode: str, pruner: Any, sampler: Any = None
    ):
        super().__init__(space, seed, mode, pruner, None)
        optuna = _optuna()
        make = (lambda seed: optuna.samplers.TPESampler(seed=seed)) if sampler is None else sampler
        self.make, self.sampler = (
            (None, make) if isinstance(make, optuna.samplers.BaseSampler) else (make, None)
        )
        if self.sampler is None and not callable(make):
            expected = "an Optuna sampler, or a function of a seed that makes one"
            raise WrongTypeError(message("sampler", "tune()", repr(make), expected))
        self.is_theirs = isinstance(pruner, optuna.pruners.BasePruner)
        self.asked: dict[int, Any] = {}

    def begin(self, folder: Path | None) -> None:
        optuna, storage = _optuna(), None
        if folder is not None:
            path = folder / _NAME
            _journal.cut_torn_line(path)
            file = _optuna(".storages.journal").JournalFileBackend(str(path), lock_obj=_NoLock())
            storage = optuna.storages.JournalStorage(file)
        self.study = optuna.create_study(
            storage=storage,
            study_name="tsunax",
            direction="minimize" if self.mode == "min" else "maximize",
            sampler=self.sampler,
            pruner=self.pruner if self.is_theirs else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )

    def values(self, index: int) -> dict[str, Any]:
        trial, found = self._trial(index), {}
        for name, entry in self.space.items():
            entry = spaces.entry_of(entry, found)
            if not spaces.is_absent(entry):
                self._seed(index, name)
                found[name] = _suggested(trial, name, entry)
        return found

    def _seed(self, index: int, name: str) -> None:
        """A new sampler for each trial and name: where the process dies between two, it goes on as
        it would have.
        """
        if self.make is not None:
            self.study.sampler = self.make(spaces.seed_of(self.seed, index, name))

    def _trial(self, index: int) -> Any:
        if index not in self.asked:
            self._seed(index, "")
            there = self.study.get_trials(deepcopy=False)
            if index < len(there):
                self.asked[index] = _optuna(".trial").Trial(self.study, there[index]._trial_id)
            else:
                self.asked[index] = self.study.ask()
            _check_there(self.asked[index].number, index)
            _ = self.asked[
                index
            ].relative_params  # what is drawn together, lazily: now, by this seed
        return self.asked[index]

    def prunes(self, index: int, reports: dict[int, float], others) -> bool:
        trial, step = self.asked[index], next(reversed(reports))
        with warnings.catch_warnings():  # a report that it has from before the process died
            warnings.filterwarnings("ignore", "The reported value is ignored", UserWarning)
            trial.report(reports[step], step)
        return trial.should_prune() if self.is_theirs else super().prunes(index, reports, others)

    def tell(self, trial: Trial) -> None:
        there = self.study.get_trials(deepcopy=False)
        if trial.index not in self.asked:  # from the journal
            _check_there(len(there), trial.index + 1)
            if there[trial.index].state.is_finished():
                return
        states = _optuna(".trial").TrialState
        state = {"done": states.COMPLETE, "pruned": states.PRUNED}.get(trial.status, states.FAIL)
        self.study.tell(
            self._trial(trial.index), trial.value if trial.status == "done" else None, state
        )
        del self.asked[trial.index]


def _check_there(found: int, wanted: int) -> None:
    if found < wanted:
        expected = f"{wanted}, as in {_journal.NAME}"
        raise CheckpointError(
            message(_NAME, "tune()", f"{found} trials", expected, "Give another directory.")
        )


def _suggested(trial: Any, name: str, entry: Any) -> Any:
    if isinstance(entry, spaces.uniform | spaces.log_uniform):
        return trial.suggest_float(
            name, entry.low, entry.high, log=isinstance(entry, spaces.log_uniform)
        )
    if isinstance(entry, spaces.integer):
        return trial.suggest_int(name, entry.low, entry.high, log=entry.log)
    if isinstance(entry, spaces.choice):
        by_label = {spaces.label(option): option for option in entry.options}
        return by_label[trial.suggest_categorical(name, list(by_label))]
    return entry
