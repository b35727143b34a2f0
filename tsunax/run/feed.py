"""The batches of a run: the beginning and the place of its data, and the calls with them.

    data -> `Reading` (their beginning) -> `Source` (epoch and position) -> feeder -> `Chunk`
    -> `Caller`: the compiled loop of the step, with the batches of a chunk

`fit`, `iterate`, `run_epoch` and replays are loops around `take` and `call` of a `Caller`.

A chunk has the batches of one call. `_feeder_of` chooses the feeder that reads the source, at the
start of a run, and again if a callback moved the state to other devices:

    NoBatches       no data: the step makes its own
    SingleBatches   `steps_per_call=None`: one batch, for a step that is called without a loop
    ResidentRows    arrays on the device: the program gathers rows
    OneBatch        a list of one batch: it is sent once for all epochs up to a boundary
    Stacks          all other data: batches that were stacked on the host
"""

import contextlib
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from tsunax._core import Function, PyTree, Step, placement, processes
from tsunax.data.cursors import Source, as_source
from tsunax.data.positions import Data, Positioned, innermost
from tsunax.errors import DataError, warn
from tsunax.program import TrainStep
from tsunax.run import chunks, fused_loop, info_columns
from tsunax.run.chunks import NO_LIMIT, Chunk, Feeder, Limits
from tsunax.state import Clocked
from tsunax.states import divides_rows

# A call has room for `steps_per_call` batches up to this; above it only for the steps of the run.
MOST_ROOM = 1024


class NoData:
    """The data of `fit(step, state, steps=n)`: no batches, and no epochs."""

    def __iter__(self) -> Iterator[PyTree]:
        return itertools.repeat(None)


class Call(NamedTuple):
    """A call that was dispatched: its batches, and its infos, which may not be computed yet."""

    chunk: Chunk
    infos: Any


class Reading:
    """Data that a loop reads, from the right position on; the user's data follow call by call.

    With `continues` a new state begins with the first batch, and a trained state at the position
    that the data have. Without it, data begin as in a `for`: a new epoch. A position that the user
    set is the beginning in any case. We read a copy of `batches` with a separate position, because
    users may loop over them meanwhile; after each call the user's data move to the same position.
    """

    def __init__(self, data: Any, continues: bool, is_new: bool) -> None:
        # A new state begins with the first batch, unless the user has set a position.
        starts_over = is_new and isinstance(data, Data) and not data.is_placed
        self._user_data: Any = None
        self._was_read = False
        if isinstance(data, Data) and isinstance(innermost(data), Positioned):
            self._user_data, self._user_place = data, (data.get_state(), data.is_placed)
            data = data.afresh()
        elif starts_over and isinstance(data, Data) and not isinstance(innermost(data), Iterator):
            data.restart()  # an iterator cannot
        self.source: Source = as_source(data)
        if isinstance(data, Data) and self.source.resumable and not starts_over:
            is_copy = self._user_data is not None
            place, is_placed = self._user_place if is_copy else (data.get_state(), data.is_placed)
            if continues or is_placed:  # perhaps in the middle of an epoch
                self.source.restore(place)
            elif is_copy:
                is_in_epoch = place["position"] > 0
                epoch = place["epoch"] + 1 if is_in_epoch else place["epoch"]
                self.source.restore({"epoch": epoch, "position": 0})
        self._start = self.source.state() if self.source.resumable else None

    def follow(self, was_read: bool = False) -> None:
        """Move the user's data to the position of the source, once a batch was read."""
        self._was_read = self._was_read or was_read
        if self._user_data is not None and self._was_read:
            self._user_data.follow(self.source.state())

    def restore(self, place: Mapping[str, Any], fast_forward: bool) -> None:
        """Continue at a position of a checkpoint. Raises DataError for data that cannot."""
        self.source.restore(place, fast_forward)
        if self._user_data is not None:
            self._user_data.set_state(place)

    def return_data(self) -> None:
        """Move the data back to their position before the loop, if they can."""
        if self._start is not None:
            self.source.restore(self._start)
        if self._user_data is not None:
            place, is_placed = self._user_place
            # `set_state` also notes that the user has set the position.
            move = self._user_data.set_state if is_placed else self._user_data.follow
            move(place)
            self._user_data = None


class Feed:
    """The data of a run in chunks, each with the batches of one call.

    With `continues_data` a new state begins with the first batch, and a trained state with the next
    batch; without it data begin as in a `for`.
    """

    def __init__(
        self,
        step: Step,
        data: Iterable[PyTree] | None,
        state: PyTree,
        limits: Limits,
        *,
        continues_data: bool = False,
    ) -> None:
        data = NoData() if data is None else data
        is_new = continues_data and isinstance(data, Data) and _is_new(state)
        self._reading: Reading = Reading(data, continues_data, is_new)
        self.source: Source = self._reading.source
        self._home: Any = placement.state_sharding(state)
        self._may_have_moved, self._has_ended = False, False
        # The place after the last batch, because a loader may change its own place later.
        self._place: dict[str, Any] | None = None
        is_divided = divides_rows(state)
        self._choose: Function = lambda home: _feeder_of(
            self.source, step, is_divided, home, limits
        )
        self._feeder: Feeder = self._choose(self._home)

    @property
    def size(self) -> int:
        """The most steps of a call."""
        return self._feeder.size

    @property
    def epoch(self) -> int:
        return self.source.epoch

    def steps_to(self, epochs: int, start: int) -> int | None:
        """The step after `epochs` epochs of the data, if no step is rejected; None if unknown."""
        try:
            return start + (epochs - self.epoch) * len(self.source.data) - self.source.position
        except Exception:  # the `len` of a loader may raise anything
            return None

    def take_epoch_end(self, looks_ahead: bool = False) -> bool:
        """Whether an epoch has ended since the last call of this method.

        A loader of another library shows its end only in place of the next batch. With
        `looks_ahead` the next batch is read, unless an iterator without a position could lose it.
        """
        if not self._has_ended and self._is_at_end(looks_ahead):
            # This moves the source to the next epoch, so that a save at this boundary begins there.
            self._has_ended = self.source.take(1) is None
            self._place = None
        has_ended, self._has_ended = self._has_ended, False
        return has_ended

    def _is_at_end(self, looks_ahead: bool) -> bool:
        source, data = self.source, innermost(self.source.data)
        # streams have no length, and the length of another loader may be wrong
        if isinstance(data, Positioned | list | tuple):
            return source.position >= len(source.data)
        can_look_ahead = not isinstance(data, NoData) and (source.restartable or source.resumable)
        return looks_ahead and can_look_ahead and source.next_is_end()

    def take(self, steps: int, state: PyTree, step: int) -> Chunk | None:
        """The next batches, all of one shape; None at the end of an epoch."""
        if self._may_have_moved:
            home, self._may_have_moved = placement.state_sharding(state), False
            if home != self._home:
                data, old_home, self._home = self.source.data, self._home, home
                if _is_resident(data, home) != _is_resident(data, old_home):
                    self._feeder = self._choose(home)
        chunk = self._feeder.take(steps, self._home, step)
        self._has_ended = chunk is None
        self._place = None if isinstance(self.source.data, Data) else self.source.state()
        self._reading.follow(was_read=True)
        return chunk

    def sync(self) -> None:
        """Prepare for a boundary, at which the state may move, and a list may get another batch."""
        self._may_have_moved = True
        self._feeder.forget()
        self._reading.follow()

    def place(self) -> dict[str, Any]:
        """The place of the data after the last call."""
        place = self._place or self.source.state()
        settings = _settings_of(self.source.data)
        return place if settings is None else {**place, "settings": settings}

    def try_place(self) -> tuple[dict[str, Any], bool]:
        """A place as a save will have it, and whether the data can be set to it.

        The place of a foreign loader is read after its next batch, which the next call takes.
        Before that its iterator may not exist, and its state may lack values that it has later.
        """
        data = innermost(self.source.data)
        if isinstance(data, Data | NoData) or type(data) in (list, tuple):
            return self.place(), True
        place = self.source.peek()
        has_position = place["data"] is not None or self.source.next_is_end()
        return place, self.source.resumable and has_position

    def restore(self, place: Mapping[str, Any], fast_forward: bool) -> None:
        """Continue at a place that a checkpoint has. Raises DataError for data that cannot."""
        data = self.source.data
        is_of_batches = isinstance(innermost(data), Positioned)
        is_for_batches = "data" not in place
        if is_of_batches != is_for_batches:
            got = "ts.batches(...)" if is_of_batches else f"a {type(data).__name__}"
            got = "no data" if isinstance(data, NoData) else got
            saved = "ts.batches(...)" if is_for_batches else "data of another kind"
            raise DataError(
                "data",
                "fit()",
                got=got,
                expected=f"{saved}, with which the checkpoint was saved",
                fix="Give the data of that run; or start another one, with another path.",
            )
        self._reading.restore(place, fast_forward)
        self._place, self._has_ended = None, False
        settings, saved_settings = _settings_of(data), place.get("settings")
        if not is_of_batches and settings and saved_settings and settings != saved_settings:
            count, saved_count = settings["batches"], saved_settings["batches"]
            text = f"the list has {count:,} batches, and had {saved_count:,} in the checkpoint"
            warn(f"fit(): {text}: the epochs of this run are others from here on.")

    def return_data(self) -> None:
        """Move the data back to their place before the run, if they can."""
        self._reading.return_data()

    @contextlib.contextmanager
    def given_back_at_errors(self) -> Iterator[None]:
        """A block. If it fails, the data go back to before a batch that was read too many."""
        try:
            yield
        except Exception:  # not a GeneratorExit: an old `iterate` moves no data when it is deleted
            self.source.give_back()
            raise

    def close(self) -> None:
        self.sync()
        self.source.give_back()
        if isinstance(self.source.data, Data):
            self.source.data.close()  # ends the thread that reads ahead


def _feeder_of(source: Source, step: Step, is_divided: bool, home: Any, limits: Limits) -> Feeder:
    """The feeder for this source, for a state with the sharding `home`."""
    data = source.data
    if isinstance(limits.steps_per_call, int):  # more room is never filled
        room = int(min(limits.steps_per_call, max(MOST_ROOM, limits.steps)))
        limits = limits._replace(steps_per_call=room)
    if isinstance(data, NoData):
        return chunks.NoBatches(limits)
    if limits.steps_per_call is not None and _is_resident(data, home):
        return chunks.ResidentRows(source, is_divided)
    forms = chunks.Forms(data, limits)
    if limits.steps_per_call is None:
        return chunks.SingleBatches(source, forms, step, is_divided)
    if isinstance(data, list | tuple) and len(data) == 1 and limits.last_epoch > 0:
        forms = chunks.Forms(data, limits, chunks.REPEATED_BYTES)
        return chunks.OneBatch(source, forms, step, is_divided, limits.last_epoch)
    # Batches of a call have one shape, so a call crosses no short batch at the end of an epoch.
    crosses_epochs = isinstance(data, Data) and data.is_of_arrays and data.tail_rows == 0
    last_epoch = limits.last_epoch if crosses_epochs else 0
    return chunks.Stacks(source, forms, step, is_divided, last_epoch)


def _is_resident(data: Any, home: Any) -> bool:
    """Whether all of the data are on the devices of the state, or move there with its program."""
    if not isinstance(data, Data) or data.resident is None:
        return False
    is_reachable = lambda x: home is None or not x.committed or x.devices() == home.device_set
    return all(map(is_reachable, jax.tree.leaves(data.resident)))


def _is_new(state: PyTree) -> bool:
    """Whether no step was called with the `TrainState`, or with any state in the tree."""
    parts = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Clocked))
    parts = [x for x in parts if isinstance(x, Clocked)]
    return bool(parts) and not any(map(info_columns.most_calls, parts))


def _settings_of(data: Any) -> dict[str, Any] | None:
    """Settings that decide the order of `batches`, or the length of a list; None for other data."""
    data = innermost(data)
    if isinstance(data, Positioned):
        return data.settings
    return {"batches": len(data)} if type(data) in (list, tuple) else None


def check_is_lasting(place: Mapping[str, Any]) -> None:
    """Raise DataError for a place with the address of an object, such as a data source of grain.

    A loader that compares addresses refuses the place in the next process.
    """
    if address := re.search(r"<[^<>]{1,80} at 0x[0-9a-fA-F]+>", repr(place)):
        raise DataError(
            "position of the data",
            "fit()",
            got=address[0],
            expected="a text that is the same in the next process, which resumes there",
            fix="Give its class a __repr__.",
        )


class Caller:
    """Calls a step with the batches of a feed. A call returns at once."""

    def __init__(
        self,
        step: Step,
        feed: Feed,
        agreement: processes.Unanimous,
        state: PyTree,
        extra: Mapping[str, Any],
        *,
        donates: bool = False,
    ) -> None:
        """`donates`: whether calls consume the state also of a step that is no `TrainStep`."""
        is_donated = step.donate if isinstance(step, TrainStep) else donates
        self.loop: fused_loop.Fused = fused_loop.fused(step, is_donated)
        self.feed: Feed = feed
        self.agreement: processes.Unanimous = agreement
        # `extra` before it was placed, and the sharding of the state for which it was placed
        self._placed_extra: tuple[dict[str, Any], Any] | None = None
        self.extra: dict[str, Any] = {}
        self.place_extra(extra, state)

    def place_extra(self, extra: Mapping[str, Any], state: PyTree) -> None:
        """Put the step's arguments on the devices of the state; again if either has changed."""
        if not (extra or self.extra):
            return
        new, home = dict(extra), placement.state_sharding(state)
        if self._placed_extra is not None:
            old, old_home = self._placed_extra
            are_unchanged = new.keys() == old.keys() and all(new[k] is old[k] for k in new)
            if are_unchanged and home == old_home:
                return
        self.extra = placement.place_extra(new, state)
        self._placed_extra = new, home

    def take(self, n: int, state: PyTree, step: int) -> Chunk | None:
        """The batches of a call after `step`, n at most; None at the end of an epoch."""
        chunk = self.feed.take(n, state, step)
        self.agreement.chunk(step + 1, chunk, self.feed.source)
        return chunk

    def call(
        self, state: PyTree, chunk: Chunk, step: int, limit: int = NO_LIMIT
    ) -> tuple[PyTree, Any]:
        """The state after these batches, and their infos, which may not be computed yet.

        The call ends early after `limit` rejected steps in a row.
        """
        # A profile numbers each call by its first step.
        annotation = jax.profiler.StepTraceAnnotation("train", step_num=step + 1)
        if not isinstance(chunk.feed, fused_loop.Single):
            arguments = state, chunk.feed, chunks.count_of(chunk.steps, limit), self.extra
            self.agreement.program(self.loop.trace, *arguments)
            with annotation:
                return self.loop(*arguments)
        # the step is called as it is
        if isinstance(train_step := self.loop.step, TrainStep):
            trace = functools.partial(train_step.trace, **self.extra)
            self.agreement.program(trace, state, chunk.feed.batch)
        with annotation:
            return self.loop.call_step(state, chunk.feed.batch, self.extra)
