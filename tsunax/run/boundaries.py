"""What happens at a boundary: evaluation, callbacks, loggers, progress, checkpoint, in this order.

A boundary is a step at which one of them needs the state.
"""

import contextvars
import itertools
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tsunax._core import Function, checks, trees
from tsunax.errors import RowError, StateError, WrongTypeError, message, unknown, warn
from tsunax.run import callbacks, evaluation, progress
from tsunax.run.agreement import Alike
from tsunax.run.feed import Feed
from tsunax.run.history import check_row
from tsunax.run.info_columns import logged_step, most_calls
from tsunax.run.options import Options, is_bare, wants
from tsunax.run.rejections import Rejections
from tsunax.run.run import OF_FIT, RowLog, Run, blamed
from tsunax.state import TrainState, donated
from tsunax.states import States, training_states

INTERRUPTED = "interrupted"  # why a run stops that a signal ends


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
    # what the script gave, see `checkpoints.script_settings.script_of`
    script: dict[str, Any] = field(default_factory=dict)
    evaluated: int = -1  # the step at which it was, last
    agreed: frozenset[str] = frozenset()  # names of its numbers, the same on all processes
    has_changed: bool = False  # whether a callback of this boundary returned a state

    @property
    def watched(self) -> dict[str, str]:
        """The metrics that somebody waits for, and who."""
        found = (f for f in self.options.callbacks if isinstance(f, callbacks.Watching))
        names = {f.metric: f"{type(f).__name__}()" for f in found}
        best = self.options.saver and self.options.saver.keep_best
        return {**names, best.metric: "keep_best"} if best else names

    @property
    def may_log(self) -> bool:
        """Whether a callback of the user's may log such a name."""
        known = callbacks.Watching, callbacks.time_limit, callbacks.At
        return not all(isinstance(f, known) for f in self.options.callbacks)

    def look_for_names(self) -> None:
        """Raise RowError before step 1 for an awaited name that `evaluate` does not return."""
        options, known = self.options, self.run.history.names
        waits = {k: who for k, who in self.watched.items() if "/" in k and k not in known}
        if not waits or options.evaluate is None or options.dry_run or self.may_log:
            return
        context = contextvars.copy_context()
        context.run(evaluation.ONE_BATCH.set, True)
        found = context.run(self.evaluated_row)
        for name, where in waits.items():
            if name not in found:
                raise RowError(unknown("metric", where, name, found))

    def evaluated_row(self) -> dict[str, float]:
        run, evaluate = self.run, self.options.evaluate
        assert evaluate is not None
        with self.options.clock("evaluation"), blamed("evaluate", evaluate, run):
            found = check_row(evaluate(run.state), "evaluate")
            run.check_own(found, "evaluate")
        return found

    def hold(self, events: list[str], *, evaluates: bool = False) -> None:
        """One boundary, with what happens at it by name; at the last one "end".

        `evaluates` is for an evaluation that only the end of the run has: it is no event, because
        callbacks that count evaluations must count the same ones when the run continues.
        """
        run, log, options = self.run, self.log, self.options
        is_end = "end" in events
        self.feed.sync()
        run.epoch = self.feed.epoch
        if is_end:
            log.close()
        if evaluates or "evaluate" in events:
            self.evaluate()
        for event in events:
            run.event = event
            is_tried = options.dry_run and event == "step"
            for name, callback in zip(options.names, options.callbacks, strict=True):
                if wants(callback, event, run.step) or (is_tried and not is_bare(callback)):
                    self.call_back(name, callback)
        self.look_for_watched(is_end)
        said = run.stopped, run.state, self.has_changed
        run.stopped, self.has_changed = self.alike.boundary(f"step {run.step}", *said), False
        if is_end and run.stopped:
            run.history.mark("stop", run.step, run.stopped)
        # the end comes next, at the same step: what it adds belongs to the same row
        is_over = bool(run.stopped) or options.goal.reached(run.step, run.epoch)
        has_open_row = is_over and not is_end
        if not has_open_row:
            log.flush()
        self.bar.show(run.step, run.metrics)
        saver = options.saver
        if saver is None:
            return
        saver.poll()
        due = saver.due(run.step) or ("epoch" in events and options.saves_epochs)
        # the end adds its evaluation, and what callbacks do there, to what this step has
        is_new = self.saved != (run.step, self.feed.place())
        if is_end or (is_new and (due or self.is_best())):
            with options.clock("checkpoint"):
                self.saved = run.step, self.feed.place()
                log.sync()
                known = run.history.plain(), self.memory, log.numbers_at(run.step)
                end = self.ending(is_end) | {"has_open_row": has_open_row}
                saver._save(run.state, *self.saved, *known, self.script | end)

    def ending(self, is_end: bool) -> dict[str, Any]:
        """What a checkpoint says of the end of its run, for the same call of `fit` after it."""
        run, options = self.run, self.options
        if run.stopped == INTERRUPTED:
            return {}
        stop = [str(options.goal), options.names, run.stopped]
        return {"has_ended": is_end} | ({"stop": stop} if run.stopped else {})

    def is_best(self) -> bool:
        """Whether `keep_best` got one of its best values at this step, which no later save has."""
        best, run = self.options.saver.keep_best, self.run
        if best is None or best.metric in run.taken:
            return False
        # what callbacks log may differ between processes, and all of them save together
        is_alike = self.alike.everyone.sees_everything or best.metric in self.agreed
        if not is_alike or (run.history.newest(best.metric) or (-1, 0.0))[0] != run.step:
            return False
        known = zip(*run.history.series(best.metric), strict=True)
        return run.step in best.of({int(at): {best.metric: x} for at, x in known if np.isfinite(x)})

    def look_for_watched(self, is_end: bool) -> None:
        """Raise RowError for an awaited metric that nobody can give any more; at the end warn."""
        options, found = self.options, self.run.history.names
        names = [*dict.fromkeys([*found, *OF_FIT])]  # rates come with the first rows or later
        is_early = not found or (options.evaluate is not None and self.evaluated < 0)
        for metric, who in self.watched.items():
            is_evaluated = options.evaluate is not None and "/" in metric
            if metric in names or (is_early and not is_end):
                continue
            text = unknown("metric", who, metric, names)
            if options.evaluate is None and "/" in metric:
                fix = (
                    "Give fit(evaluate=lambda state: ts.evaluate(eval_step, state, {'val': data}))."
                )
                text = message(
                    "metric", who, repr(metric), f"one of {trees.listed(names, 20)}", fix
                )
            if is_end and not options.dry_run:
                warn(text)
            elif is_evaluated or not self.may_log:
                raise RowError(text)

    def evaluate(self) -> None:
        run = self.run
        found = self.alike.numbers(f"evaluate at step {run.step}", self.evaluated_row())
        self.evaluated, self.agreed = run.step, frozenset(found)
        self.log.add(found, run.step)
        if not self.log.is_closed:  # a run that continues does not have the one of its end
            run.history.mark("evaluate", run.step)
        self.bar.note(f"step {run.step}: " + ", ".join(progress.summary(found, "{:.6g}".format)))

    def call_back(self, name: str, callback: Function) -> None:
        run = self.run
        run.memory = self.memory.setdefault(name, {})
        self.log.begin(run.step)
        before = dict(run.row)
        with self.options.clock("callbacks"), blamed("callback", callback, run):
            state = callback(run)
            if state is not None:
                _check_returned(state, run)
                run.state, self.has_changed = state, True
                self.rejections.calls = most_calls(state)
        if logged := {k: x for k, x in run.row.items() if x != before.get(k)}:
            self.log.record(logged, run.step)


def _check_returned(new, run: Run) -> None:
    """Raise unless it is a state like the one given; rules, numbers and freezes may differ."""
    old, fix = run.state, "A callback keeps the structure of the state."
    if any(map(trees.is_gone, jax.tree.leaves(new))):
        raise StateError(donated("the callback's result"))
    both = training_states(old), training_states(new)
    if both[0] and both[0].keys() == both[1].keys():
        for at, name in itertools.product(both[0], ("params", "model_state")):
            mine, theirs = (getattr(states[at], name) for states in both)
            checks.check_like(f"{at}{name}", theirs, mine, fix)
        if isinstance(old, States):
            checks.check_like("carry", new.carry, old.carry, fix)
        if logged_step(new, run.step) != run.step:
            fix = "The history goes forward: state.replace(step=run.step)."
            raise StateError("step", "the callback's state", int(new.step), run.step, fix)
        return
    if type(new) is not type(old):
        fix = "Is it a factory? Call it." if callable(new) else "Return a state, or nothing."
        expected = "a TrainState" if isinstance(old, TrainState) else trees.describe(old)
        raise WrongTypeError("result", "callback", trees.describe(new), expected, fix)
    checks.check_like("state", new, old, fix)
