"""A run as a line of exact states: `timeline(run, step, state, data)`.

    line = ts.timeline("runs/a", step, make_state, data)
    first_bad = line.bisect(lambda state: jnp.max(jnp.abs(state.params["w"])) > 100)
    print(line.explain(first_bad))
    line.branch(first_bad - 1, into="runs/b", learning_rate=1e-4)

A state of the line is read from the newest checkpoint before it, or made from the first state, and
then the calls of the run are made again, with the same bits.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from tsunax._core import Extra, Function, PyTree, StrPath, Where, checks, trees
from tsunax.checkpoints import reading, script_settings
from tsunax.checkpoints.edits import Edit, edits_of_line, edits_through, starts_with
from tsunax.checkpoints.leaves import Damaged
from tsunax.checkpoints.rewinds import left_run
from tsunax.checkpoints.saving import Checkpoints
from tsunax.errors import CheckpointError, StateError, WrongTypeError, warn
from tsunax.run.history import History
from tsunax.state import Clocked
from tsunax.timelines.branching import branched
from tsunax.timelines.comparing import Comparison, SavedRun, different_leaves, first_difference
from tsunax.timelines.explaining import Explanation, explained
from tsunax.timelines.replaying import (
    WHOLE_SCRIPT,
    Moment,
    ReplayedCall,
    Script,
    check_data,
    check_is_whole,
    check_moment,
    moment_of_start,
    rows_of,
)

MOST_REPLAYED = 10_000  # calls of one replay: they may take hours, and a user raises this knowingly


class StepBatch(NamedTuple):
    """The batch of a step, and the numbers of its rows in the data; None if these are unknown."""

    batch: PyTree
    rows: np.ndarray | None  # int (rows,)


@checks.naming_arguments
def timeline(
    run: StrPath | Checkpoints,
    step: Function | None = None,
    state: Any = None,
    data: Any = None,
    *,
    extra: Extra | None = None,
    max_replay: int = MOST_REPLAYED,
) -> "Timeline":
    """The line of states of a run of `fit`, from its checkpoints and its script.

    Args:
      run: the directory of its checkpoints, or a `Checkpoints`. Nothing in it is changed.
      step, data, extra: as `fit` got them. Data keep their position.
      state: the first state, as `fit` got it, which stays as it is; or a function that makes it.
      max_replay: the most calls of one replay. StateError for a state that needs more.

    With `run` alone it reads files: `steps`, `edits`, `compare`. The other methods need the rest.
    """
    checks.check_count(max_replay, "timeline()", "max_replay")
    if step is not None and not callable(step):
        raise WrongTypeError("step", "timeline()", trees.describe(step), "the step of the run")
    saved = SavedRun(run if isinstance(run, Checkpoints) else Checkpoints(run, read_only=True))
    first_state = state() if callable(state) else state
    # The state of a function is made again when it is needed: keep shapes, not its arrays.
    first = jax.eval_shape(lambda: first_state) if callable(state) else state
    if first is not None and not isinstance(first, Clocked):
        expected = "a TrainState or States, whose calls are counted"
        raise WrongTypeError("state", "timeline()", trees.describe(first), expected)
    if isinstance(data, Iterator):
        expected, fix = "data that can be set to a position", "Saved steps need no data."
        raise WrongTypeError("data", "timeline()", trees.describe(data), expected, fix)
    script = Script(step, data, extra or {}, saved.edits(), saved.is_looped(), first)
    return Timeline(saved, script, state, max_replay)


class Timeline:
    """A run as a line of exact states, from `timeline`."""

    def __init__(self, saved: SavedRun, script: Script, first_state: Any, max_replay: int) -> None:
        self.saved: SavedRun = saved
        self._script = script
        self._first_state = first_state
        self._max_replay = max_replay
        self._has_compared = False

    def __repr__(self) -> str:
        newest = self.saved.newest
        link = None if newest is None else self.saved.manifest(newest).links.get(newest)
        text = f", link {link} at step {newest}" if link else ""
        return f"Timeline({self.saved.checkpoints.path}, {len(self.steps)} checkpoints{text})"

    @property
    def steps(self) -> list[int]:
        """The steps of its checkpoints, a list of ints, the newest last."""
        return self.saved.steps

    @property
    def edits(self) -> list[Edit]:
        """Changes of the state between two calls, by callbacks and commands: a list of `Edit`s."""
        self._look()
        return list(self._script.edits)

    @property
    def history(self) -> History:
        """The history of the run up to its newest checkpoint."""
        self._look()
        return self.saved.history()

    def at(self, step: int | None = None, *, calls: int | None = None) -> PyTree:
        """The state after the call that first made a step, or after a number of calls.

        Steps are applied updates; `calls` also counts rejected calls and calls that only gathered a
        gradient. Steps of a population are calls. Raises StateError for a moment that the run has
        not reached by its newest checkpoint, and if more than `max_replay` calls would be needed.
        """
        return self._moment(step, calls=calls).state

    def batch(self, step: int | None = None, *, calls: int | None = None) -> StepBatch:
        """The batch of the call that first made a step, with the numbers of its rows.

        Rows are known for `ts.batches`, also behind `ts.prefetch`. Raises as `at`.
        """
        self._look()
        call = self._call(step, calls)
        return StepBatch(call.batch, rows_of(self._script.data, call.start.place, call.batch))

    def bisect(self, test: Callable[[PyTree], Any], low: int = 0, high: int | None = None) -> int:
        """The first step in (low, high] after which `test(state)` is true.

        For a test that stays true once it is: it has to be false at `low` and true at `high` (by
        default the newest checkpoint), else StateError. Each replay begins at the newest state
        before; the line that it prints says how many there were.
        """
        high = self._newest_step("bisect()") if high is None else high
        if low >= high:
            raise StateError("low", "bisect()", f"{low} and high={high}", "a step below high")
        start, replays = self._moment(low), 1
        for step, moment, expected in ((low, start, False), (high, self._moment(high), True)):
            if bool(test(moment.state)) is not expected:
                text = f"{not expected} at step {step}"
                raise StateError("test", "bisect()", text, f"{expected} there")
        while high - low > 1:
            middle = (low + high) // 2
            moment, replays = self._moment(middle, start), replays + 1
            if bool(test(moment.state)):
                high = middle
            else:
                low, start = middle, moment
        print(f"bisect: step {high}, after {replays + 1} replays")
        return high

    def explain(self, step: int | None = None, *, calls: int | None = None) -> Explanation:
        """Why a step went as it did: a value that prints, and has `plot()`. See `Explanation`."""
        self._look()
        call = self._call(step, calls)
        rows, start = rows_of(self._script.data, call.start.place, call.batch), call.start
        line = self._line_of(calls)
        if calls is None:
            earlier = self._reached(line, max(0, start.step - 10), None)
        else:
            earlier = self._reached(line, None, max(0, start.calls - 10), line_calls=calls)
        return explained(line, earlier, call, rows)

    def audit(self, first: int | None = None, last: int | None = None) -> list[str]:
        """The leaves that differ at the checkpoint `last` after a replay from `first`; [] for none.

        [] attests that the script makes the saved bits of `last` from the bits of `first`. Without
        steps, no step is repeated: the result lists checkpoints with an edited or an exchanged
        manifest, because later checkpoints have links to other contents.
        """
        if first is None and last is None:
            return self.saved.broken_links()
        if first is None or last is None:
            raise WrongTypeError("steps", "audit()", f"{first} and {last}", "two steps, or none")
        self._look()
        first = checks.check_count(first, "audit()", "first", 0)
        last = checks.check_count(last, "audit()", "last", 0)
        for step in (first, last):
            if step not in self.steps:
                raise CheckpointError("step", "audit()", step, f"one of {self.steps}")
        start, calls = self._restored(self.saved, first), self.saved.calls(last)
        if calls < start.calls:
            raise StateError("steps", "audit()", f"{first} and {last}", "the earlier one first")
        edits = self.saved.edits(last)
        if not starts_with(edits, self.saved.edits(first)):
            got = f"{first} and {last}, which have other edits"
            raise StateError("steps", "audit()", got, "checkpoints of one record of edits")
        self._check_untold_changes(start, last, calls)
        line = dataclasses.replace(self._script, edits=edits)
        end = self._advanced(line, start, None, calls)
        return reading.changed_leaves(self.saved.checkpoints, last, end.state)

    def branch(
        self, step: int, into: StrPath, where: Where = "**", *, skip: int = 0, **numbers: Any
    ) -> None:
        """A new run in the directory `into` that begins with the state of a step.

        `fit(..., checkpoint=into)` continues there: with nothing changed, to the same bits.
        `numbers` are hyperparameters of the new run, as `adjust(state, where, **numbers)` sets
        them. `skip` leaves out the next batches: with 1, a bad batch of step k is not seen by
        `branch(k - 1, into, skip=1)`. Its checkpoints name this run, the step and the changes.

        Raises CheckpointError if `into` has steps, StateError for a step that is not saved if
        callbacks have memory, which no replay makes.
        """
        moment = self._moment(step)
        place = moment.place
        if skip := checks.check_count(skip, "branch()", "skip", 0):
            if self._script.data is None:
                raise StateError("skip", "branch()", f"{skip}, of a run without data", "0")
            self._check_length(moment.calls, moment.calls + skip)
            place = self._script.place_after(moment, skip)
        branched(self.saved, moment, skip, place, into, where, numbers)

    def compare(self, run: "StrPath | Checkpoints | Timeline") -> Comparison:
        """Two runs side by side: settings, history, and the first step that differs.

        Of files alone, the first common checkpoint with other bits. Two timelines with their
        scripts are replayed for the exact step, up to the newest step that both have.
        """
        second = run if isinstance(run, Timeline) else timeline(run)
        lines = self, second
        for line in lines:
            line._look()
        newest = min(line._newest_step("compare()") for line in lines)
        comparison = self.saved.compared(second.saved)
        if self._script.step is None or second._script.step is None:
            return comparison
        high = newest if comparison.differs_at is None else comparison.differs_at
        if not (names := different_leaves(*(line._moment(high).state for line in lines))):
            return comparison
        low = max((step for step in comparison.common_steps if step < high), default=0)
        first, names = first_difference([line._moment for line in lines], low, high, names)
        return dataclasses.replace(comparison, differs_at=first, leaves=names, is_exact=True)

    def _newest_step(self, where: str) -> int:
        if (newest := self.saved.newest) is None:
            path = str(self.saved.checkpoints.path)
            raise CheckpointError("steps", where, f"none in {path}", "a checkpoint of the run")
        return newest

    def _look(self) -> None:
        """Read the newest checkpoint again, because a run may save meanwhile."""
        self.saved.forget()
        edits, is_looped = self.saved.edits(), self.saved.is_looped()
        self._script = dataclasses.replace(self._script, edits=edits, is_looped=is_looped)

    def _moment(
        self, step: int | None = None, near: Moment | None = None, *, calls: int | None = None
    ) -> Moment:
        """The moment of a step, or of a number of calls; `near` is an earlier moment, if known."""
        check_moment(step, calls, 0)
        if near is None:
            self._look()
        return self._reached(self._line_of(calls), step, calls, near)

    def _line_of(self, calls: int | None) -> Script:
        """The script on the line on which the call of this number was made; None: the current."""
        edits = self.saved.all_edits(self.saved.newest)
        line_edits = edits_through(edits, calls) if calls else edits_of_line(edits)
        return dataclasses.replace(self._script, edits=line_edits)

    def _reached(
        self,
        line: Script,
        step: int | None,
        calls: int | None,
        near: Moment | None = None,
        line_calls: int | None = None,
    ) -> Moment:
        """A moment of a line, which is the line of the call `line_calls`."""
        count = self._checked_count(step, calls)
        line_calls = calls if line_calls is None else line_calls
        start = self._start(line, count, line_calls, near)
        moment = line.edited(self._advanced(line, start, step, calls))
        self._check_untold_changes(start, moment.step, moment.calls)
        return moment

    def _checked_count(self, step: int | None, calls: int | None) -> int:
        """The step or the calls. Raises StateError beyond the newest checkpoint."""
        name = "calls" if step is None else "step"
        count: int = (calls if step is None else step) or 0  # one of the two is an int
        newest = self._newest_step("timeline")
        limit = self.saved.calls(newest) if step is None else newest
        if count > limit:
            raise StateError(name, "timeline", count, f"at most {limit}, of the newest checkpoint")
        return count

    def _check_untold_changes(self, start: Moment, end_step: int, end_calls: int) -> None:
        """Raise StateError if `extra` or data had changed before a call of the replay."""
        changes = self.saved.script(self._newest_step("timeline")).get("untold_changes", {})
        for name, (first, calls, last) in changes.items():
            if end_calls > max(start.calls, calls):
                change = f"arrays of the data changed in place between steps {first} and {last}"
                change = f"a callback replaced extra at step {last}" if name == "extra" else change
                got = f"a replay of steps {start.step + 1} to {end_step}, but {change}"
                raise StateError(name, "timeline", got, f"a checkpoint, or a step up to {first}")

    def _call(self, step: int | None, calls: int | None) -> ReplayedCall:
        """The call that first made a step, or the call of that number."""
        check_moment(step, calls, 1)
        self._checked_count(step, calls)
        if step is not None:
            for call in self._script.calls(self._moment(step - 1)):
                self._check_length(call.start.calls, call.end.calls)
                if call.end.step >= step:
                    return call
        count = calls or 0
        line = self._line_of(count)
        return next(line.calls(self._reached(line, None, count - 1, line_calls=count)))

    def _start(
        self, line: Script, count: int, line_calls: int | None, near: Moment | None
    ) -> Moment:
        """The newest checkpoint that is not beyond the moment, `near`, or the first state.

        The moment is a number of calls on the line of the call `line_calls`, or without it a step.
        """
        is_of_calls = line_calls is not None
        left_runs = [] if line_calls is None else self._left_runs(line_calls)
        runs = [(run, step) for run in (self.saved, *left_runs) for step in run.steps]
        for run, saved_step in sorted(runs, key=lambda x: x[1], reverse=True):
            if near is not None and saved_step <= near.step:
                break
            if saved_step > count or not _is_on_line(line, run, saved_step):
                continue
            moment = self._restored(run, saved_step)
            # At the step itself later calls may have been rejected before it was saved.
            is_fresh = saved_step < count or run.script(saved_step).get("is_fresh", False)
            is_not_beyond = moment.calls <= count if is_of_calls else is_fresh
            if is_not_beyond:
                return moment
        if near is not None:
            return near
        self._check_script("state")
        saved_script = self.saved.script(self._newest_step("timeline"))
        first = moment_of_start(self._first_state, saved_script.get("first_place"))
        earliest_step = self.saved.first_readable(self.saved.steps)
        earliest_script = None if earliest_step is None else self.saved.script(earliest_step)
        self._compare_settings(first.state, earliest_script)
        is_edited = saved_script.get("is_script_edited")
        first_count = first.calls if is_of_calls else first.step
        if (first.calls and count != first_count) or is_edited:
            edits = ", and numbers that the script has edited" if is_edited else ""
            got = f"a state after {first.calls} calls{edits}"
            raise StateError("state", "timeline", got, "the first state, or a checkpoint before")
        return line.edited(first)

    def _left_runs(self, calls: int) -> list[SavedRun]:
        """The checkpoints that the first rewind after these calls left, if they are kept."""
        departures = (edit.departure for edit in self.saved.all_edits(self.saved.newest))
        later_calls = (x.calls for x in departures if x is not None and calls <= x.calls)
        first = next(later_calls, None)
        checkpoints = None if first is None else left_run(self.saved.checkpoints, first)
        return [SavedRun(checkpoints)] if checkpoints else []

    def _restored(self, run: SavedRun, saved_step: int) -> Moment:
        self._check_script("state")
        first = self._first_state
        like = first() if callable(first) else first
        check_is_whole(like)
        restored = reading.as_saved(run.checkpoints, saved_step, like)
        self._compare_settings(like, restored.script)
        return Moment(restored.state, restored.data, len(run.edits(saved_step)))

    def _compare_settings(self, state: PyTree, saved_script: Any) -> None:
        """Warn once of settings of the script that differ from the saved ones."""
        if self._has_compared or self._script.step is None:
            return
        self._has_compared, script = True, self._script
        facts = script_settings.script_of(script.step, state, script.data, script.extra)
        saved_settings = (saved_script or {}).get("settings")
        for note in script_settings.edits(saved_settings, facts["settings"]):
            warn(f"timeline(): {note} A replay need not have the bits of the run.")

    def _advanced(self, line: Script, start: Moment, step: int | None, calls: int | None) -> Moment:
        moment = line.edited(start)
        calls_left = lambda: (step or 0) - moment.step if calls is None else calls - moment.calls
        while (count := calls_left()) > 0:
            self._check_script("step")
            check_data(line.data, self.saved.values(self._newest_step("timeline")).data)
            self._check_length(start.calls, moment.calls + count)
            moment = line.advanced(moment, count).end
        return moment

    def _check_length(self, first_call: int, last_call: int) -> None:
        if last_call - first_call > self._max_replay:
            got = f"{last_call - first_call} calls from call {first_call} on"
            fix = "Save more often, or timeline(..., max_replay=)."
            raise StateError("replay", "timeline", got, f"at most {self._max_replay}", fix)

    def _check_script(self, name: str) -> None:
        value = self._script.step if name == "step" else self._first_state
        if value is None:
            raise WrongTypeError(name, "timeline()", "None", WHOLE_SCRIPT)


def _is_on_line(line: Script, run: SavedRun, saved_step: int) -> bool:
    """Whether a checkpoint can be read, and its edits are the first edits of the line."""
    try:
        return starts_with(line.edits, run.edits(saved_step))
    except Damaged:
        return False
