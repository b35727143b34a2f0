"""Metrics that callbacks and `keep_best` wait for, and that nobody gives."""

from typing import Any

from tsunax._core import trees
from tsunax.errors import RowError, message, unknown, warn
from tsunax.run.options import Options
from tsunax.run.part import Part
from tsunax.run.run import OF_FIT, Run


class Awaited(Part):
    """Raises RowError for a metric that nobody can give any more; warns of it at the end."""

    def __init__(self, options: Options, watched: dict[str, str]) -> None:
        self.options: Options = options
        self.watched: dict[str, str] = watched

    def due(self, run: Run, events: Any) -> bool:
        return True

    def at(self, run: Run, events: list[str]) -> None:
        self._look(run, "end" in events)

    def read(self, run: Run, has_row: bool) -> None:
        if has_row:
            self._look(run, False)

    def _look(self, run: Run, is_end: bool) -> None:
        options, found = self.options, run.history.names
        names = [*dict.fromkeys([*found, *OF_FIT])]  # rates come with the first rows or later
        is_early = not found or (options.evaluate is not None and run.evaluated < 0)
        for metric, who in self.watched.items():
            is_evaluated = options.evaluate is not None and "/" in metric
            if metric in names or (is_early and not is_end):
                continue
            text = unknown("metric", who, metric, names)
            if options.evaluate is None and "/" in metric:
                fix = "fit(evaluate=lambda state: ts.evaluate(eval_step, state, {'val': data}))."
                expected = f"one of {trees.listed(names, 20)}"
                text = message("metric", who, repr(metric), expected, f"Give {fix}")
            if is_end and not options.dry_run:
                warn(text)
            elif is_evaluated or not options.may_log:
                raise RowError(text)
