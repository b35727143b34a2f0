"""Replays of calls of a run: the exact state after a call, from an earlier state.

    Moment (state, place of the data) -> calls of the run's own compiled loop -> Moment

A replay makes the same calls as `fit`: the same program, the same batches, the same keys, which
follow from the state's count of calls. So it has the same bits.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tsunax._core import PyTree, checks, processes, trees
from tsunax.checkpoints.edits import SKIP, Edit
from tsunax.data.batching import Batches
from tsunax.data.positions import innermost
from tsunax.errors import StateError, WrongTypeError
from tsunax.run.chunks import Limits
from tsunax.run.feed import Caller, Feed
from tsunax.run.info_columns import Infos, logged_step, most_calls
from tsunax.state import own

WHOLE_SCRIPT = "timeline(run, step, state, data), as fit got them"


@dataclass(frozen=True)
class Moment:
    """A state of a run, and the place of its data after it: all that the next call needs."""

    state: PyTree
    place: Mapping[str, Any] | None  # see `Feed.place`; None for data as the script makes them
    edit_count: int = 0  # edits of the line that the state has

    @property
    def step(self) -> int:
        """The steps that were applied; of a population the calls, because its members differ."""
        return logged_step(self.state, 0)

    @property
    def calls(self) -> int:
        return most_calls(self.state)


@dataclass(frozen=True)
class ReplayedCall:
    """Calls that were made again: the moments around them, batch and info of the last."""

    start: Moment
    end: Moment
    batch: PyTree
    info: Any


@dataclass(frozen=True)
class Script:
    """The parts of a run that no checkpoint has: its step, its data, the step's arguments."""

    step: Any  # the step of `fit`; None if only files are read
    data: Any
    extra: Mapping[str, Any]
    edits: Sequence[Edit]
    is_looped: bool  # whether `fit` called the step in its compiled loop, which may have other bits
    like: PyTree  # the first state, or its shapes

    def advanced(self, start: Moment, calls: int) -> ReplayedCall:
        """The last of `calls` further calls, made as `fit` makes them, with the run's edits."""
        start = self.edited(start)
        end = start.calls + calls
        while True:
            next_edits = self.edits[start.edit_count : start.edit_count + 1]  # one or none
            stop = min([end, *(edit.calls for edit in next_edits)])
            call = self._repeat(start, stop - start.calls)
            call = dataclasses.replace(call, end=self.edited(call.end))
            if call.end.calls >= end:  # a rewind also adds the calls that it left
                return call
            start = call.end

    def edited(self, moment: Moment) -> Moment:
        """The moment after the edits at its boundary. StateError for one that was not recorded."""
        while moment.edit_count < len(self.edits):
            edit = self.edits[moment.edit_count]
            if edit.calls > moment.calls:
                break
            if edit.values is None or edit.calls < moment.calls:
                got = f"a change that has no record at step {edit.step}, by {edit.source}"
                fix = "Its state is in a checkpoint, if that is kept: keep_last=None."
                raise StateError("replay", "timeline", got, "edits that are recorded", fix)
            state = edit.applied(moment.state, self.like)
            place = moment.place if edit.departure is None else edit.departure.place
            if isinstance(place, Mapping) and SKIP in place:
                place = self.place_after(moment, place[SKIP])
            moment = Moment(state, place, moment.edit_count + 1)
        return moment

    def place_after(self, moment: Moment, batches: int) -> Mapping[str, Any]:
        """The place of the data behind a number of further batches. No call is made."""
        with self._feed_at(moment, batches) as feed:
            while batches:
                chunk = feed.take(batches, moment.state, moment.step)
                if chunk is not None:  # None at the end of an epoch
                    batches -= chunk.steps
            feed.sync()
            return feed.place()

    @contextlib.contextmanager
    def _feed_at(self, start: Moment, calls: int) -> Iterator[Feed]:
        """The batches of `calls` calls from a moment on. The data keep their own position."""
        limits = Limits("auto" if self.is_looped else None, steps=calls)
        feed = Feed(self.step, self.data, start.state, limits, continues_data=True)
        try:
            if start.place is not None:
                feed.restore(start.place, fast_forward=False)
            if calls and not feed.try_place()[1]:
                span = f"of calls {start.calls + 1} to {start.calls + calls}"
                raise StateError(
                    "data",
                    "timeline",
                    got=f"{trees.describe(self.data)} without a position, for a replay {span}",
                    expected="data that can go to a position",
                    fix="A saved step needs no replay.",
                )
            yield feed
        finally:
            feed.return_data()

    def _repeat(self, start: Moment, calls: int) -> ReplayedCall:
        """The last of `calls` further calls. The start stays as it is."""
        step, state = self.step, jax.tree.map(own, start.state)  # the loop donates its state
        agreement = processes.current().agreement("timeline()", state, innermost(self.data))
        calls_done, batch, info = 0, None, None
        with self._feed_at(start, calls) as feed:
            caller = Caller(step, feed, agreement, state, self.extra, donates=True)
            while calls_done < calls:
                step_before = start.step + calls_done
                chunk = caller.take(calls - calls_done, state, step_before)
                if chunk is not None:  # None at the end of an epoch
                    state, infos = caller.call(state, chunk, step_before)
                    calls_done += chunk.steps
                    batch = chunk.feed.batch_at(chunk.steps - 1)
                    is_stacked = isinstance(infos, Infos)
                    info = infos.stacked(state, chunk.steps - 1) if is_stacked else infos
            feed.sync()
            return ReplayedCall(start, Moment(state, feed.place(), start.edit_count), batch, info)

    def calls(self, start: Moment) -> Iterator[ReplayedCall]:
        """The calls after a moment one by one, without end."""
        while True:
            yield (call := self.advanced(start, 1))
            start = call.end


def moment_of_start(state: Any, place: Mapping[str, Any] | None) -> Moment:
    """The first moment of a run, from its first state or a function that makes it."""
    first = state() if callable(state) else state
    check_is_whole(first)
    return Moment(jax.tree.map(own, first), place)


def check_is_whole(first_state: Any) -> None:
    """Raise StateError if a step has consumed the first state."""
    if any(map(trees.is_gone, jax.tree.leaves(first_state))):
        fix = "Give a function that makes it."
        got = "a state that a step has consumed"
        raise StateError("state", "timeline()", got, "the first state, as fit got it", fix)


def check_data(data: Any, saved_place: Mapping[str, Any] | None) -> None:
    """Raise for other data than the run had, as far as its saved place shows."""
    data, place = innermost(data), saved_place or {}
    if data is None and ("settings" in place or place.get("data") is not None):
        raise WrongTypeError("data", "timeline()", "None", WHOLE_SCRIPT)
    if isinstance(data, Batches) and "data" not in place:
        if not {"epoch", "position"} <= place.keys():
            got, fix = f"checkpoints with {place}", "checkpoints.save(state, data=data.get_state())"
            raise StateError("data", "timeline()", got, "a position in each checkpoint", fix)
        data.afresh().set_state(place)  # DataError for another order


def check_moment(step: int | None, calls: int | None, lowest: int) -> None:
    """Raise unless a step or a number of calls is given, and at least `lowest`."""
    if (step is None) == (calls is None):
        raise WrongTypeError(
            "moment", "timeline", got=f"step={step}, calls={calls}", expected="a step, or calls="
        )
    name = "calls" if step is None else "step"
    checks.check_count(calls if step is None else step, "timeline", name, lowest)


def rows_of(data: Any, place: Mapping[str, Any] | None, batch: PyTree) -> np.ndarray | None:
    """The numbers of the rows of the batch at a place of `batches`; None for other data."""
    data = innermost(data)
    if not isinstance(data, Batches):
        return None
    epoch, position = (0, 0) if place is None else (place["epoch"], place["position"])
    if position >= len(data):
        epoch, position = epoch + 1, 0
    first = position * data.share
    return data.order(epoch)[first : first + len(jax.tree.leaves(batch)[0])]
