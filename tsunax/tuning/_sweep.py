"""A sweep under way: which trials are left, one after the other, each on the disk before the
next.
"""

from __future__ import annotations

import functools
import json
import math
import reprlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tsunax._core.interrupts import Interrupt
from tsunax.errors import CheckpointError, HyperparameterError, message, told
from tsunax.tuning import _journal, _trials, spaces
from tsunax.tuning._trials import Cause, Pruned, Trial

__all__ = []


class Ending(Interrupt):
    """The first signal ends the sweep, and at once the trial under way."""

    def __init__(self):
        super().__init__(signal.SIGINT, signal.SIGTERM)
        self.is_inside = False  # the objective; outside of it the journal is being written

    def _note(self, number, frame) -> None:
        is_second = number == signal.SIGINT and self.is_second()
        self.asked = self.asked or number
        if self.is_inside or is_second:
            self.is_inside = False
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


class Drawn:
    """Values that are a function of the seed: random ones, and with `points` those of a grid."""

    is_theirs = False  # a pruner of another library

    def __init__(
        self, space: dict[str, Any], seed: int, mode: str, pruner: Any, points: list[dict] | None
    ):
        self.space, self.seed, self.mode, self.pruner, self.points = (
            space,
            seed,
            mode,
            pruner,
            points,
        )

    def begin(self, folder: Any) -> None:
        pass

    def count(self, trials: int | None, where: str) -> int:
        """How many trials: those asked for, or all of a grid."""
        if self.points is None:
            if trials is None:
                raise HyperparameterError(message("trials", where, "None", "an int ≥ 1"))
            return trials
        entries = map(spaces.innermost, self.space.values())
        is_drawn = any(
            hasattr(entry, "at") and not isinstance(entry, spaces.grid) for entry in entries
        )
        if trials is not None and trials > len(self.points) and not is_drawn:
            raise HyperparameterError(
                message("trials", where, trials, f"at most {len(self.points)}, the whole grid")
            )
        return len(self.points) if trials is None else trials

    def values(self, index: int) -> dict[str, Any]:
        fixed = None if self.points is None else self.points[index % len(self.points)]
        return spaces.sample(self.space, self.seed, index, fixed)

    def prunes(self, index: int, reports: dict[int, float], others: Sequence[Trial]) -> bool:
        """Whether a trial is not worth going on after its latest report."""
        if self.pruner is None:
            return False
        signed = lambda found: {step: _trials.ranked(x, self.mode) for step, x in found.items()}
        is_lost = not math.isfinite(next(reversed(reports.values())))
        return is_lost or bool(
            self.pruner(signed(reports), [signed(t.reports) for t in others if t.reports])
        )

    def tell(self, trial: Trial) -> None:
        pass

    def go(self, sweep: Sweep, left: Iterable[int]) -> None:
        for index in left:
            if sweep.ending.asked:
                return
            sweep.run(index)


class Sweep:
    """The trials so far, and how one more is run. Values come from a `source`: a `Drawn`, or what
    has its methods.
    """

    def __init__(
        self,
        objective,
        metric,
        source,
        journal: _journal.Journal | None,
        attempts: int,
        bar,
        ending: Ending,
    ):
        self.objective, self.metric, self.source = objective, metric, source
        self.journal, self.attempts, self.bar, self.ending = journal, attempts, bar, ending
        self.trials, self.deaths, self.deaths_together = replayed(
            [] if journal is None else journal.records
        )
        self.interrupted: list[Trial] = []
        self.best = min(map(self._rank, self.trials.values()), default=math.inf)

    def _rank(self, trial: Trial) -> float:
        return _trials.ranked(trial.value if trial.status == "done" else None, self.source.mode)

    def go_together(self, left: Iterable[int], names: tuple[str, ...], members: int) -> None:
        """Groups, but for trials whose group ended the process too often: one of them did it, so
        each goes alone.
        """
        is_alone = lambda i: self.deaths_together.get(i, 0) >= self.attempts
        for group in _groups(left, self.source, names, members, is_alone):
            if self.ending.asked:
                return
            self.run_together(group, names)

    def run(self, index: int) -> None:
        values = self.source.values(index)
        if self.died(index, values):
            return
        self.start([index])
        reports: dict[int, float] = {}

        def report(step: int, value: float) -> None:
            _trials.note(reports, step, value)
            if self.source.prunes(index, reports, [*self.trials.values()]):
                raise Pruned(f"trial {index} at step {step}")

        began = time.perf_counter()
        outcome = self._called(values, index, report)
        if self.ending.asked:
            self.interrupt([Trial(index, values, "interrupted")])
        else:
            seconds = time.perf_counter() - began
            self.end([_trials.judged(index, values, outcome, self.metric, reports, seconds)])

    def run_together(self, indices: list[int], names: tuple[str, ...]) -> None:
        """Trials that agree in all but the values of these names, in one call.

        Where it raises, one by one.
        """
        values = {i: self.source.values(i) for i in indices}
        indices = [i for i in indices if not self.died(i, values[i])]
        if not indices:
            return
        self.start(indices)
        shared = values[indices[0]]
        given = {
            name: np.array([values[i][name] for i in indices]) if name in names else shared[name]
            for name in shared
        }
        reports: dict[int, np.ndarray] = {}
        began = time.perf_counter()
        outcome = self._called(
            given, np.array(indices), functools.partial(_trials.note_all, reports, len(indices))
        )
        seconds = (time.perf_counter() - began) / len(indices)
        if self.ending.asked:
            self.interrupt([Trial(i, values[i], "interrupted") for i in indices])
        elif isinstance(outcome, Cause) and len(indices) > 1:
            for i in indices:
                if not self.ending.asked:
                    self.run_together([i], names)
        else:
            ended = []
            for at, (i, part) in enumerate(
                zip(indices, _trials.apart(outcome, len(indices)), strict=True)
            ):
                mine = {step: float(found[at]) for step, found in reports.items()}
                ended.append(_trials.judged(i, values[i], part, self.metric, mine, seconds))
            self.end(ended)

    def _called(self, values: dict[str, Any], index: Any, report: Callable) -> Any:
        """What the objective returns, `Pruned`, or a Cause; where a signal asks for the end nobody
        looks at it.
        """
        own = _trials.own(self.objective, index, report)
        try:
            self.ending.is_inside = True
            return (
                None
                if self.ending.asked
                else jax.block_until_ready(self.objective(**values, **own))
            )
        except Pruned:
            return Pruned
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):  # also one that the objective raised itself
                self.ending.asked = self.ending.asked or signal.SIGINT
            return _trials.cause_of(error)
        finally:
            self.ending.is_inside = False

    def died(self, index: int, values: dict[str, Any]) -> bool:
        """Record a trial in which the process died too often."""
        died = self.deaths.get(index, 0)
        if died < self.attempts:
            return False
        text = f"the process ended {died} times during this trial"
        self.end([Trial(index, values, "failed", cause=Cause("Killed", text))])
        return True

    def start(self, indices: list[int]) -> None:
        self._write({"start": indices})

    def end(self, trials: list[Trial]) -> None:
        self._write({"end": [_trials.as_record(trial) for trial in trials]})
        for trial in trials:
            self.trials[trial.index] = trial
            self.source.tell(trial)
            if trial.cause is not None:
                self.bar.note(f"trial {trial.index}: {trial.cause}")
        self.best = min(self.best, *map(self._rank, trials))
        sign = 1 if self.source.mode == "min" else -1
        self.bar.show(len(self.trials), {"best": sign * self.best} if self.best < math.inf else {})

    def interrupt(self, trials: list[Trial]) -> None:
        self.interrupted = trials
        self._write({"interrupted": [trial.index for trial in trials]})

    def _write(self, record: dict[str, Any]) -> None:
        if self.journal is not None:
            self.journal.write(record)


def _groups(
    left: Iterable[int], source: Any, names: tuple[str, ...], members: int, is_alone
) -> Iterator[list[int]]:
    """Trials that agree in all but the values of these names, at most so many at once."""
    alike: dict[str, list[int]] = {}
    for i in left:
        if is_alone(i):
            yield [i]
            continue
        shared = json.dumps(
            {name: None if name in names else x for name, x in source.values(i).items()},
            sort_keys=True,
        )
        alike.setdefault(shared, []).append(i)
        if len(alike[shared]) == members:
            yield alike.pop(shared)
    yield from alike.values()


def replayed(
    records: Sequence[dict[str, Any]],
) -> tuple[dict[int, Trial], dict[int, int], dict[int, int]]:
    """The trials that ended; how often the process died in one that did not; and how often in its
    whole group.
    """
    trials: dict[int, Trial] = {}
    deaths: dict[int, int] = {}
    together: dict[int, int] = {}
    for record in records:
        for kind, more in (("start", 1), ("interrupted", -1)):
            indices = record.get(kind, ())
            counts = deaths if len(indices) == 1 else together
            for i in indices:
                counts[i] = counts.get(i, 0) + more
        for found in record.get("end", ()):
            try:
                trial = _trials.from_record(found)
            except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
                got = f"{reprlib.repr(found)} ({told(error)})"
                raise CheckpointError(
                    message("journal", "a trial", got, "what tune writes of a trial")
                ) from error
            if trial.index in trials:
                raise CheckpointError(message("journal", f"trial {trial.index}", "two ends", "one"))
            trials[trial.index] = trial
    return trials, deaths, together
