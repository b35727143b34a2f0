"""The batches of a run: the beginning and the place of its data, and the batches of each call.

    data -> `Reading` (their beginning) -> `Source` (epoch and position) -> feeder -> `Chunk`

A chunk has the batches of one call. `_feeder_of` chooses the feeder that reads the source, at the
start of a run, and again if a callback moved the state to other devices:

    NoBatches       no data: the step makes its own
    SingleBatches   `steps_per_call=None`: one batch, for a step that is called without a loop
    ResidentRows    arrays on the device: the program gathers rows
    OneBatch        a list of one batch: it is sent once for all epochs up to a boundary
    Stacks          all other data: batches that were stacked on the host
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from tsunax._core import Function, PyTree, Step, TreeDef, placement
from tsunax._step.members import members_of
from tsunax.data.cursors import Source, as_source
from tsunax.data.positions import Data, Positioned, innermost
from tsunax.errors import DataError, warn
from tsunax.run import chunks, fused_loop, info_columns
from tsunax.run.chunks import (
    RESIDENT,
    Chunk,
    Demand,
    Feeder,
    Form,
    Forms,
    Limits,
    NoBatches,
    Placer,
)
from tsunax.states import COUNTED

# A call has room for `steps_per_call` batches up to this; above it only for the steps of the run.
MOST_ROOM = 1024
AHEAD = 64  # batches of arrays in memory that are gathered at once, also if a call takes fewer


class NoData:
    """The data of `fit(step, state, steps=n)`: no batches, and no epochs."""

    def __iter__(self) -> Iterator[PyTree]:
        return itertools.repeat(None)


class Reading:
    """Data that a loop reads, from the right position on; the user's data follow call by call.

    With `continues` a new state begins with the first batch, and a trained state at the position
    that the data have. Without it, data begin as in a `for`: a new epoch. A position that the user
    set is the beginning in any case. We read a copy of `batches` with a separate position, because
    users may loop over them meanwhile; after each call the user's data move to the same position.
    """

    def __init__(self, data: Any, continues: bool, is_new: bool) -> None:
        starts_over = is_new and isinstance(data, Data) and not data.is_placed
        self._user_data: Any = None
        self._was_read = False
        if isinstance(data, Data) and isinstance(innermost(data), Positioned):
            self._user_data, self._user_place = data, (data.get_state(), data.is_placed)
            data = data.afresh()
        elif starts_over and isinstance(data, Data) and not isinstance(innermost(data), Iterator):
            data.restart()
        self.source: Source = as_source(data)
        if isinstance(data, Data) and self.source.resumable and not starts_over:
            is_copy = self._user_data is not None
            place, is_placed = self._user_place if is_copy else (data.get_state(), data.is_placed)
            if continues or is_placed:  # perhaps in the middle of an epoch
                self.source.restore(place)
            elif is_copy:
                epoch = place["epoch"] + (place["position"] > 0)
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
            (self._user_data.set_state if is_placed else self._user_data.follow)(place)
            self._user_data = None

    def close(self) -> None:
        """End the thread that reads ahead."""
        if isinstance(self.source.data, Data):
            self.source.data.close()


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
        self._place: dict[str, Any] | None = None  # kept with a batch: a loader's may change later
        is_population = members_of(state) is not None
        self._choose: Function = lambda home: _feeder_of(
            self.source, step, is_population, home, limits
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
        `looks_ahead` that is read, unless an iterator without a position could lose it.
        """
        if not self._has_ended and self._feeder.place is None and self._is_at_end(looks_ahead):
            # This takes the end: the source, and a save here, are at the next epoch.
            self._has_ended, self._place = self.source.take(1) is None, None
        has_ended, self._has_ended = self._has_ended, False
        return has_ended

    def _is_at_end(self, looks_ahead: bool) -> bool:
        source, data = self.source, innermost(self.source.data)
        # streams have no length, and the length of another loader may be wrong
        if isinstance(data, Positioned | list | tuple):
            return source.position >= len(source.data)
        can_look_ahead = not isinstance(data, NoData) and (source.restartable or source.resumable)
        return looks_ahead and can_look_ahead and source.next_is_end()

    def take(
        self,
        steps: int,
        state: PyTree,
        step: int,
        limit: int = chunks.NO_LIMIT,
        boundary_steps: float = 1,
    ) -> Chunk | None:
        """The next batches, all of one shape; None at the end of an epoch. See `Demand`."""
        if self._may_have_moved:
            home, self._may_have_moved = placement.state_sharding(state), False
            if home != self._home:
                data, old_home, self._home = self.source.data, self._home, home
                if _is_resident(data, home) != _is_resident(data, old_home):
                    self._feeder = self._choose(home)
        chunk = self._feeder.take(Demand(steps, self._home, step, limit, boundary_steps))
        self._has_ended = chunk is None
        self._place = None if isinstance(self.source.data, Data) else self.source.state()
        self._reading.follow(was_read=True)
        return chunk

    def read_ahead(self, steps: int, total: int, limit: int) -> list[Chunk]:
        """Further chunks of batches that were read already, for at most `total` steps."""
        return self._feeder.read_ahead(Demand(steps, self._home, 0, limit), total)

    def sync(self) -> None:
        """Move the data back to the batch after the last call. The state may move at a boundary."""
        self._may_have_moved = True
        if (place := self._feeder.forget()) is not None:
            self.source.restore(place)
        self._reading.follow()

    def place(self) -> dict[str, Any]:
        """The place of the data after the last call, before a block that was read ahead."""
        place = self._feeder.place or self._place or self.source.state()
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
        return place, self.source.resumable and place["data"] is not None

    def restore(self, place: Mapping[str, Any], fast_forward: bool) -> None:
        """Continue at a place that a checkpoint has. Raises DataError for data that cannot."""
        data = self.source.data
        is_of_batches, is_for_batches = isinstance(innermost(data), Positioned), "data" not in place
        if is_of_batches != is_for_batches:
            got = "ts.batches(...)" if is_of_batches else f"a {type(data).__name__}"
            got = "no data" if isinstance(data, NoData) else got
            saved = "ts.batches(...)" if is_for_batches else "data of another kind"
            expected = f"{saved}, with which the checkpoint was saved"
            fix = "Give the data of that run; or start another one, with another path."
            raise DataError("data", "fit()", got, expected, fix)
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

    def close(self) -> None:
        self.sync()
        self.source.give_back()
        self._reading.close()


def _feeder_of(
    source: Source, step: Step, is_population: bool, home: Any, limits: Limits
) -> Feeder:
    """The feeder for this source, for a state with the sharding `home`."""
    data = source.data
    if isinstance(limits.steps_per_call, int):  # more room is never filled
        room = int(min(limits.steps_per_call, max(MOST_ROOM, limits.steps)))
        limits = limits._replace(steps_per_call=room)
    if isinstance(data, NoData):
        return NoBatches(limits)
    if limits.steps_per_call is not None and _is_resident(data, home):
        from tsunax.run.resident_batches import ResidentRows

        return ResidentRows(source, RESIDENT, is_population)
    placer, is_list = Placer(source, step, is_population), isinstance(data, list | tuple)
    repeats = is_list and len(data) == 1 and limits.last_epoch > 0
    if repeats or limits.steps_per_call is None:
        from tsunax.run.single_batches import REPEATED_BYTES, OneBatch, SingleBatches

        if limits.steps_per_call is None:
            return SingleBatches(source, Forms(data, limits), placer)
        return OneBatch(source, Forms(data, limits, REPEATED_BYTES), placer, limits.last_epoch)
    return Stacks(source, Forms(data, limits), placer, limits.last_epoch)


def _is_resident(data: Any, home: Any) -> bool:
    """Whether all of the data are on the devices of the state, or move there with its program."""
    if not isinstance(data, Data) or data.resident is None:
        return False
    is_reachable = lambda x: home is None or not x.committed or x.devices() == home.device_set
    return all(map(is_reachable, jax.tree.leaves(data.resident)))


class Stacks(Feeder):
    """Batches that are stacked on the host. Arrays in memory are read ahead of the calls."""

    def __init__(self, source: Source, forms: Forms, placer: Placer, last_epoch: float) -> None:
        self._source, self._forms, self._placer = source, forms, placer
        self._block: _Block | None = None
        data = source.data
        self._reads_ahead: bool = isinstance(data, Data) and data.is_of_arrays
        self._last_epoch = last_epoch if self._reads_ahead and data.tail_rows == 0 else 0
        self._ahead = 1  # batches that are read at once

    @property
    def place(self) -> dict[str, Any] | None:  # type: ignore[override]
        return None if self._block is None else self._block.place

    def take(self, demand: Demand) -> Chunk | None:
        if self._block is None:
            self._block = self._read(demand)
        return None if self._block is None else self._chunk_of(self._block, demand)

    def _read(self, demand: Demand) -> "_Block | None":
        source, steps, place = self._source, min(demand.steps, self.size), None
        epochs: Any = source.epoch

        if epochs < self._last_epoch and len(source.data) < steps:
            steps_left = (self._last_epoch - epochs) * len(source.data) - source.position
            batches, epochs = self._read_epochs(int(min(steps, steps_left)))
        else:
            ahead = int(min(self._ahead, demand.boundary_steps)) if self._reads_ahead else 1
            place = source.state() if ahead > 1 else None
            # A shape has one program, with one room, also if the shape before had more room.
            room_of = lambda batch: max(ahead, self._forms.room_of(batch))
            batches = source.take(max(ahead, steps), room_of)
        if batches is None:
            return None
        leaves, treedef = jax.tree.flatten(batches)
        form = self._forms.form_of(leaves, treedef, demand.step, axes=1)
        if not form.is_tail:
            self.size: int = form.room
        self._ahead = max(1, min(AHEAD, chunks.BUFFER_BYTES // max(form.bytes, 1)))
        return _Block(leaves, treedef, form, epochs, place, demand.steps)

    def _read_epochs(self, steps: int) -> tuple[Any, np.ndarray]:
        """The next `steps` batches, over the ends of short epochs, and the epoch of each batch."""
        stacks, epochs = [], []
        while len(epochs) < steps:
            epoch = self._source.epoch
            if (stack := self._source.take(steps - len(epochs))) is not None:
                stacks.append(stack)
                epochs += [epoch] * len(jax.tree.leaves(stack)[0])
        return jax.tree.map(lambda *x: np.concatenate(x), *stacks), np.array(epochs)

    def _chunk_of(self, block: "_Block", demand: Demand) -> Chunk:
        batches, steps = block.next(demand.steps)
        if block.position == block.count:
            self._block = None
        stack, count = self._placer.stacked(fused_loop.Stacked(batches), steps, demand)
        return Chunk(stack, count, steps, block.epochs, block.bytes)

    def read_ahead(self, demand: Demand, total: int) -> list[Chunk]:
        chunks = []
        while self._block is not None and total >= demand.steps:
            chunks.append(self._chunk_of(self._block, demand))
            total -= demand.steps
        return chunks

    def forget(self) -> dict[str, Any] | None:
        place, self._block = self.place, None
        return place


class _Block:
    """Batches that were read together. Calls get views of `size` batches, no copies."""

    def __init__(
        self,
        leaves: list[Any],
        treedef: TreeDef,
        form: Form,
        epochs: Any,
        place: dict[str, Any] | None,
        steps: int,
    ) -> None:
        """A block of stacked leaves. The first call takes `steps` batches at most.

        `place` is the place of the data before the block; None if one call takes all of it.
        """
        self.count, self.position, self.epochs = len(leaves[0]), 0, epochs
        self.size: int = form.room
        is_of_one_call = self.count <= min(steps, self.size)
        # the last call may read rows beyond the end
        room = self.size if is_of_one_call else self.count + self.size - 1
        self.leaves, self.treedef = [chunks.with_room(x, room) for x in leaves], treedef
        self.bytes, self._start = self.size * form.bytes, place

    @property
    def place(self) -> dict[str, Any] | None:
        """The place of the data without the batches that no call has taken."""
        start = self._start
        return start and start | {"position": start["position"] + self.position}

    def next(self, steps: int) -> tuple[Any, int]:
        """The next batches in a tree with room for `size`, and their number."""
        i, steps = self.position, min(steps, self.size, self.count - self.position)
        self.position += steps
        is_whole = steps == self.count
        leaves = self.leaves if is_whole else [x[i : i + self.size] for x in self.leaves]
        return self.treedef.unflatten(leaves), steps


def _is_new(state: PyTree) -> bool:
    """Whether no step was called with the `TrainState`, or with any state in the tree."""
    parts = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, COUNTED))
    parts = [x for x in parts if isinstance(x, COUNTED)]
    return bool(parts) and not any(map(info_columns.most_calls, parts))


def _settings_of(data: Any) -> dict[str, Any] | None:
    """Settings that decide the order of `batches`, or the length of a list; None for other data."""
    data = innermost(data)
    if isinstance(data, Positioned):
        return data.settings
    return {"batches": len(data)} if type(data) in (list, tuple) else None


def check_is_lasting(place: Mapping[str, Any]) -> None:
    """Raise DataError for a place with the address of an object, such as grain's of a source.

    A loader that compares it refuses the place in the next process.
    """
    if address := re.search(r"<[^<>]{1,80} at 0x[0-9a-fA-F]+>", repr(place)):
        expected = "a text that is the same in the next process, which resumes there"
        fix = "Give its class a __repr__."
        raise DataError("position of the data", "fit()", address[0], expected, fix)
