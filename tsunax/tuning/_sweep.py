"""A sweep under way: which trials are left, one after the other, each on the disk before the next.

for i in left:
    journal.start([i])
    journal.end([judged(objective(**source.values(i)))])
"""

from __future__ import annotations

import functools
import json
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from tsunax._core import trees
from tsunax._core.interrupts import Interrupt
from tsunax.errors import WrongTypeError
from tsunax.tuning import _trials, spaces
from tsunax.tuning._trials import Cause, Pruned, Trial


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

    def __init__(self, space: dict[str, Any], seed: int, points: list[dict] | None = None):
        self.space, self.seed, self.points = space, seed, points

    def values(self, index: int) -> dict[str, Any]:
        """What a trial is given."""
        fixed = None if self.points is None else self.points[index % len(self.points)]
        return spaces.sample(self.space, self.seed, index, fixed)

    def prunes(self, index: int, reports: dict[int, float]) -> bool:
        """Whether a trial is not worth going on after its latest report."""
        return False

    def go(self, sweep: Sweep, left: Iterable[int]) -> None:
        """Run trials until none is left, or a signal came."""
        for indices in sweep.groups(left):
            if sweep.ending.asked:
                return
            sweep.run(indices)


class Sweep:
    """How trials are run: values come from a `source`, and what became of them goes to a `journal`.

    `names` are those that the objective takes as arrays, of up to `members` trials at once.
    """

    def __init__(
        self, objective, metric, mode, names, members, attempts, source, journal, bar, ending
    ):
        self.objective, self.metric, self.mode, self.attempts = objective, metric, mode, attempts
        self.names, self.members, self.source, self.journal = names, members, source, journal
        self.bar, self.ending = bar, ending
        self.interrupted: list[Trial] = []
        self.best = min(map(self._rank, journal.trials.values()), default=math.inf)

    def _rank(self, trial: Trial) -> float:
        return _trials.ranked(trial.value if trial.status == "done" else None, self.mode)

    def groups(self, left: Iterable[int]) -> Iterator[list[int]]:
        """Trials that agree in all values but the vectorized ones; without these, one by one.

        If a group ended the process too often, one of them did it: each of its trials goes alone.
        """
        alike: dict[str, list[int]] = {}
        for i in left:
            if not self.names or self.journal.deaths_together[i] >= self.attempts:
                yield [i]
                continue
            values = self.source.values(i)
            shared = {name: None if name in self.names else x for name, x in values.items()}
            group = alike.setdefault(key := json.dumps(shared, sort_keys=True), [])
            group.append(i)
            if len(group) == self.members:
                yield alike.pop(key)
        yield from alike.values()

    def run(self, indices: list[int]) -> None:
        """Trials of one group in one call. If that raises, one by one."""
        values = {i: self.source.values(i) for i in indices}
        if not (indices := [i for i in indices if not self.died(i, values[i])]):
            return
        self.journal.start(indices)
        index, given = indices[0], dict(values[indices[0]])
        if self.names:
            index = np.array(indices)
            column = lambda name: np.array([values[i][name] for i in indices])
            given |= {name: column(name) for name in self.names if name in given}
        reports: dict[int, dict[int, float]] = {i: {} for i in indices}
        began = time.perf_counter()
        outcome = self._called(given, index, functools.partial(self._report, reports))
        seconds = (time.perf_counter() - began) / len(indices)
        if self.ending.asked:
            self.interrupted = [Trial(i, values[i], "interrupted") for i in indices]
            self.journal.interrupt(indices)
        elif isinstance(outcome, Cause) and len(indices) > 1:
            for i in indices:
                if not self.ending.asked:
                    self.run([i])
        else:
            parts = _trials.apart(outcome, len(indices)) if self.names else [outcome]
            ended = []
            for i, x in zip(indices, parts, strict=True):
                ended.append(_trials.judged(i, values[i], x, self.metric, reports[i], seconds))
            self.end(ended)

    def _report(self, reports: dict[int, dict[int, float]], step: Any, value: Any) -> None:
        values = value if self.names else [value]
        if self.names and np.shape(value) != (len(reports),):
            expected = f"one for each of {len(reports)} trials"
            raise WrongTypeError("values", "report()", trees.describe(value), expected)
        for (i, mine), x in zip(reports.items(), values, strict=True):
            _trials.note(mine, step, x)
            if self.source.prunes(i, mine):
                raise Pruned(f"trial {i} at step {step}")

    def _called(self, values: dict[str, Any], index: Any, report: Callable) -> Any:
        """What the objective returns, `Pruned`, or a Cause; of no use once a signal came."""
        own = _trials.own(self.objective, index, report)
        try:
            self.ending.is_inside = True
            if not self.ending.asked:
                return jax.block_until_ready(self.objective(**values, **own))
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
        died = self.journal.deaths[index]
        if died >= self.attempts:
            cause = Cause("Killed", f"the process ended {died} times during this trial")
            self.end([Trial(index, values, "failed", cause=cause)])
        return died >= self.attempts

    def end(self, trials: list[Trial]) -> None:
        """Write down what became of trials, and show it."""
        self.journal.end(trials)
        for trial in trials:
            if trial.cause is not None:
                self.bar.note(f"trial {trial.index}: {trial.cause}")
        self.best = min(self.best, *map(self._rank, trials))
        best = {"best": self.best if self.mode == "min" else -self.best}
        self.bar.show(len(self.journal.trials), best if self.best < math.inf else {})
