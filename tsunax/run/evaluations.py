"""Evaluations of a run, and the metrics that callbacks and `keep_best` wait for."""

import contextvars
from collections.abc import Sequence
from typing import Any

from tsunax._core import processes, tables
from tsunax._core.cadence import When
from tsunax.errors import RowError, unknown, warn
from tsunax.run.evaluation import ONE_BATCH
from tsunax.run.history import check_row
from tsunax.run.options import Options
from tsunax.run.part import EVALUATE, Part, blamed
from tsunax.run.run import OF_FIT, Run

_GIVE_EVALUATE = "Give fit(evaluate=lambda state: ts.evaluate(eval_step, state, {'val': data}))."


class Evaluations(Part):
    """Calls `evaluate` as `evaluate_every` says, and at the end of a run."""

    def __init__(
        self, options: Options, watched: dict[str, str], agreement: processes.Unanimous
    ) -> None:
        self.options: Options = options
        self.watched: dict[str, str] = watched
        self.agreement: processes.Unanimous = agreement
        self.every: When = options.evaluate_every

    def begin(self, run: Run) -> None:
        """Raise RowError before step 1 for an awaited name that `evaluate` does not return."""
        options, names = self.options, run.history.names
        watchers = [f"{where} acts on {k!r}" for k, where in self.watched.items() if "/" in k]
        if watchers and self.timers:
            warn(
                f"fit(): evaluate_every={self.every!r} follows the clock, and "
                f"{', '.join(watchers)}, so the run will not repeat. Give it a number of steps, or "
                "epochs."
            )
        awaited = {k: name for k, name in self.watched.items() if "/" in k and k not in names}
        if not awaited or options.dry_run or options.may_log:
            return
        context = contextvars.copy_context()
        context.run(ONE_BATCH.set, True)
        row = context.run(self.row, run)
        for name, where in awaited.items():
            if name not in row:
                raise RowError(unknown("metric", where, name, row))

    def due(self, run: Run, events: Sequence[str]) -> bool:
        if "end" in events:
            return run.evaluated != run.step and not run.interrupted
        return EVALUATE in events or super().due(run, events)

    def at(self, run: Run, events: list[str]) -> None:
        row = self.agreement.numbers(f"evaluate at step {run.step}", self.row(run))
        run.evaluated, run.evaluated_names = run.step, frozenset(row)
        run.rows.add(row, run.step)
        is_end = "end" in events
        if not is_end:  # a run that continues does not have the evaluation of its end
            run.history.mark("evaluate", run.step)
        # Callbacks that count evaluations count the same evaluations when the run continues.
        if not is_end or self.options.dry_run:
            events.insert(int("step" in events), "evaluate")
        run.note(f"step {run.step}: " + ", ".join(tables.summary(row, "{:.6g}".format)))
        for timer in self.timers:
            timer.restart()

    def row(self, run: Run) -> dict[str, float]:
        """The numbers of this state, on this process."""
        evaluate: Any = self.options.evaluate
        with self.options.clock("evaluation", evaluate), blamed("evaluate", evaluate, run):
            row = check_row(evaluate(run.state), "evaluate")
            run.check_own(row, "evaluate")
        return row


class Awaited(Part):
    """Raises RowError for a metric that no later row can have; warns of it at the end."""

    def __init__(self, options: Options, watched: dict[str, str]) -> None:
        self.options: Options = options
        self.watched: dict[str, str] = watched

    def due(self, run: Run, events: Any) -> bool:
        return True

    def at(self, run: Run, events: list[str]) -> None:
        self._check(run, "end" in events)

    def read(self, run: Run, has_row: bool) -> None:
        if has_row:
            self._check(run, False)

    def _check(self, run: Run, is_end: bool) -> None:
        options, row_names = self.options, run.history.names
        names = [*dict.fromkeys([*row_names, *OF_FIT])]  # rates come with the first rows or later
        is_early = not row_names or (options.evaluate is not None and run.evaluated < 0)
        for metric, watcher in self.watched.items():
            if metric in names or (is_early and not is_end):
                continue
            has_evaluate = options.evaluate is not None
            fix = _GIVE_EVALUATE if "/" in metric and not has_evaluate else ""
            text = unknown("metric", watcher, metric, names, fix)
            if is_end and not options.dry_run:
                warn(text)
            elif ("/" in metric and has_evaluate) or not options.may_log:
                raise RowError(text)
