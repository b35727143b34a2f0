"""Metrics that callbacks and `keep_best` wait for, although no row will have them."""

from typing import Any

from tsunax._core import trees
from tsunax.errors import RowError, message, unknown, warn
from tsunax.run.options import Options
from tsunax.run.part import Part
from tsunax.run.run import OF_FIT, Run


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
            is_evaluated = options.evaluate is not None and "/" in metric
            if metric in names or (is_early and not is_end):
                continue
            text = unknown("metric", watcher, metric, names)
            if options.evaluate is None and "/" in metric:
                fix = "fit(evaluate=lambda state: ts.evaluate(eval_step, state, {'val': data}))."
                expected = f"one of {trees.listed(names, 20)}"
                text = message("metric", watcher, repr(metric), expected, f"Give {fix}")
            if is_end and not options.dry_run:
                warn(text)
            elif is_evaluated or not options.may_log:
                raise RowError(text)
