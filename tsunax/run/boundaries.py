"""What happens at a boundary, a step at which somebody needs the state: evaluation, callbacks,
loggers, progress, checkpoint, in this order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tsunax._core import Function, checks, trees
from tsunax.errors import RowError, StateError, WrongTypeError, unknown, warn
from tsunax.run import callbacks, evaluation, progress
from tsunax.run.agreement import Alike
from tsunax.run.feed import Feed
from tsunax.run.infos import calls_of, step_of
from tsunax.run.options import Options, is_bare, wants
from tsunax.run.rejections import Rejections
from tsunax.run.row_log import RowLog
from tsunax.run.rows import check_row, join
from tsunax.run.run import Run, blamed
from tsunax.state import TrainState, donated


@dataclass(eq=False)
class Boundaries:
    """The boundaries of a run, and what is remembered from one to the next."""

    run: Run
    options: Options
    feed: Feed
    alike: Alike
    log: RowLog
    rejections: Rejections
    memory: dict[str, Any]
    bar: Any = None
    saved: Any = None  # at which place it was, last
    script: Any = None  # what the script gave, see `checkpoints.resume.script_of`
    evaluated: int = -1  # the step at which it was, last
    agreed: frozenset[str] = frozenset()  # names of its numbers, the same on all processes
    has_changed: bool = False  # whether a callback of this boundary returned a state

    def look_for_names(self) -> None:
        """Raise RowError before step 1 for a name that somebody waits for and `evaluate` does not
        return.

        That takes a call of it, of one batch if it calls `ts.evaluate`, and none if a callback of
        the user's might log the name.
        """
        options, known = self.options, self.run.history.names
        best = options.saver and options.saver.keep_best
        waits = {
            f.metric: f"{type(f).__name__}()" for f in options.callbacks if callbacks.is_watching(f)
        }
        waits |= {best.metric: "keep_best"} if best else {}
        waits = {name: where for name, where in waits.items() if "/" in name and name not in known}
        if (
            not waits
            or options.evaluate is None
            or options.dry_run
            or any(map(callbacks.may_log, options.callbacks))
        ):
            return
        with evaluation.one_batch(), blamed("evaluate", options.evaluate, self.run):
            found = check_row(options.evaluate(self.run.state), "evaluate")
            self.run.check_own(found, "evaluate")
        for name, where in waits.items():
            if name not in found:
                raise RowError(unknown("metric", where, name, found))

    def hold(self, events: list[str]) -> None:
        """One boundary, with what happens at it by name; at the last one "end"."""
        run, log = self.run, self.log
        is_end = "end" in events
        self.feed.sync()
        run.epoch = self.feed.epoch
        if is_end or self.options.goal.reached(run.step, run.epoch):
            log.close()
        if "evaluate" in events:
            self.evaluate()
        for event in events:
            run.event = event
            for name, callback in zip(self.options.names, self.options.callbacks, strict=True):
                if wants(callback, event, run.step) or (
                    event == "step" and self.options.dry_run and not is_bare(callback)
                ):
                    self.call_back(name, callback)
        if not is_end:
            self.look_for_watched()
        run.stopped = self.alike.boundary(
            f"step {run.step}", run.stopped, run.state, self.has_changed
        )
        self.has_changed = False
        if is_end and run.stopped:
            run.history.mark("stop", run.step, run.stopped)
        if run.stopped:
            log.close()
        # the end comes next, at the same step: what it adds belongs to the same row
        if is_end or not (run.stopped or self.options.goal.reached(run.step, run.epoch)):
            log.flush()
        self.bar.show(run.step, run.metrics)
        saver = self.options.saver
        if saver is None:
            return
        saver.poll()
        self.look_for_best(is_end)
        due = is_end or saver.due(run.step) or ("epoch" in events and self.options.saves_epochs)
        if (due or self.is_best()) and self.saved != (run.step, self.feed.place()):
            self.save()

    def save(self) -> None:
        """All that it takes to go on: state, place of the data, history, what callbacks
        remember.
        """
        run = self.run
        self.saved = run.step, self.feed.place()
        known = run.history.plain(), self.memory, self.log.numbers_at(run.step), self.script
        self.options.saver._save(run.state, run.step, self.feed.place(), *known)

    def is_best(self) -> bool:
        """Whether an evaluation or a callback gave `keep_best` one of its best values at this step.

        Every save has the metrics of training; those of an evaluation would be lost between two
        saves.
        """
        best, run = self.options.saver.keep_best, self.run
        if best is None or best.metric in run.taken:
            return False
        if (run.history.newest(best.metric) or (-1, 0.0))[0] != run.step:
            return False
        if jax.process_count() > 1 and best.metric not in self.agreed:
            # what callbacks log may differ between processes, and all of them save together
            return False
        known = zip(*run.history.series(best.metric), strict=True)
        return run.step in best.of({int(at): {best.metric: x} for at, x in known if np.isfinite(x)})

    def look_for_watched(self) -> None:
        """Raise RowError for a metric that a callback waits for, when there are rows and none has
        it.
        """
        options, names = self.options, self.run.history.names
        is_early = not names or (options.evaluate is not None and self.evaluated < 0)
        if is_early or any(map(callbacks.may_log, options.callbacks)):
            return
        for f in filter(callbacks.is_watching, options.callbacks):
            if f.metric not in names:
                raise RowError(unknown("metric", f"{type(f).__name__}()", f.metric, names))

    def look_for_best(self, is_last: bool) -> None:
        """Raise RowError for a metric of `keep_best` that nobody gives; a warning is enough at the
        end.
        """
        saver, options = self.options.saver, self.options
        text = saver.lacks(self.run.history.names, "fit()")
        if (
            not text
            or (options.evaluate is not None and self.evaluated < 0)
            or not self.run.history.names
        ):
            return
        may_come = options.callbacks and (
            options.evaluate is None or "/" not in saver.keep_best.metric
        )
        if is_last:
            warn(text)
        elif not may_come:
            raise RowError(text)

    def evaluate(self) -> None:
        run = self.run
        assert self.options.evaluate is not None
        with blamed("evaluate", self.options.evaluate, run):
            found = check_row(self.options.evaluate(run.state), "evaluate")
            run.check_own(found, "evaluate")
            found = self.alike.numbers(f"evaluate at step {run.step}", found)
        self.evaluated, self.agreed = run.step, frozenset(found)
        row = join(run.row if self.log.step == run.step else {}, found, "evaluate")
        self.log.add({name: row[name] for name in found}, run.step)
        run.history.mark("evaluate", run.step)
        self.bar.note(f"step {run.step}: " + ", ".join(progress.summary(found, "{:.6g}".format)))

    def call_back(self, name: str, callback: Function) -> None:
        run = self.run
        run.memory = self.memory.setdefault(name, {})
        self.log.begin(run.step)
        before = dict(run.row)
        with blamed("callback", callback, run):
            run.is_lent = True
            try:
                state = callback(run)
            finally:
                run.is_lent = False
            if state is not None:
                _check_returned(state, run)
                run.state, self.has_changed = state, True
                self.rejections.calls = calls_of(state)
        if logged := {k: x for k, x in run.row.items() if k not in before}:
            run.history.add(logged, run.step)


def _check_returned(new, run: Run) -> None:
    """Raise unless a callback returned a state like the one that it got; rules, numbers and freezes
    may differ.
    """
    old = run.state
    if any(map(trees.is_gone, jax.tree.leaves(new))):
        raise StateError(donated("the callback's result"))
    if isinstance(old, TrainState) and isinstance(new, TrainState):
        parts = (new.params, new.model_state), (old.params, old.model_state)
        for name, (mine, yours) in zip(
            ("params", "model_state"), zip(*parts, strict=True), strict=True
        ):
            checks.check_like(name, mine, yours, "A callback keeps the structure of the state.")
        if step_of(new, run.step) != run.step:
            fix = "The history goes forward: state.replace(step=run.step)."
            raise StateError("step", "the callback's state", int(new.step), run.step, fix)
        return
    if type(new) is not type(old):
        fix = "Is it a factory? Call it." if callable(new) else "Return a state, or nothing."
        expected = "a TrainState" if isinstance(old, TrainState) else trees.describe(old)
        raise WrongTypeError("result", "callback", trees.describe(new), expected, fix)
    checks.check_like("state", new, old, "A callback keeps the structure of the state.")
