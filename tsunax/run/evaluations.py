"""Evaluations of a run: when they are due, and their rows."""

import contextvars
from collections.abc import Sequence

from tsunax._core import processes, tables
from tsunax.errors import RowError, unknown
from tsunax.run.evaluation import ONE_BATCH
from tsunax.run.history import check_row
from tsunax.run.options import Options
from tsunax.run.part import Part, blamed
from tsunax.run.run import Run


class Evaluations(Part):
    """Calls `evaluate` every n steps or n epochs, and at the end of a run."""

    def __init__(
        self, options: Options, watched: dict[str, str], agreement: processes.Unanimous
    ) -> None:
        self.options: Options = options
        self.watched: dict[str, str] = watched
        self.agreement: processes.Unanimous = agreement
        self.every: float = options.evaluate_steps or float("inf")
        self.epochs: bool = bool(options.evaluate_epochs)

    def begin(self, run: Run) -> None:
        """Raise RowError before step 1 for an awaited name that `evaluate` does not return."""
        options, names = self.options, run.history.names
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
        n = self.options.evaluate_epochs
        is_epoch = bool(n) and "epoch" in events and run.epoch % n == 0
        return is_epoch or ("step" in events and run.step % self.every == 0)

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

    def row(self, run: Run) -> dict[str, float]:
        """The numbers of this state, on this process."""
        evaluate = self.options.evaluate
        assert evaluate is not None
        with self.options.clock("evaluation"), blamed("evaluate", evaluate, run):
            row = check_row(evaluate(run.state), "evaluate")
            run.check_own(row, "evaluate")
        return row
