"""Common to all data of this package: a position, and attributes that a loop reads.

This file does not depend on how batches are made.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping, Sized
from typing import Any, ClassVar, Self

from tsunax._core import PyTree
from tsunax.errors import DataError


class Data(Sized, Iterable[PyTree]):
    """Data that can be iterated again and again, an epoch each time, and stores its position."""

    is_whole: bool = False  # whether the last batch has all rows on every process, and no shares
    resumable: bool = True  # whether `set_state` needs nothing but the position
    is_placed: bool = False  # whether `set_state` was called after the last batch
    gathers: ClassVar[bool] = False  # whether its iterators `take` k batches at once, stacked
    reads_ahead: ClassVar[bool] = False  # whether a thread reads the batches of its `data` ahead
    has_few_shapes: ClassVar[bool] = False  # whether its batches have a few shapes by design
    resident: PyTree = None  # arrays on the device, of which a program gathers rows
    is_of_arrays: bool = False  # whether reading further batches costs memory only
    tail_rows: int = 0  # rows of a shorter batch that ends an epoch

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch."""
        ...

    def afresh(self) -> Data:
        """The same data at the beginning, with a separate position."""
        ...

    def follow(self, state: Mapping[str, Any]) -> None:
        """Take over the `state`, a dict, of an `afresh` copy, as if this had read its batches."""

    def restart(self) -> None:
        """Drop batches that were read ahead: the next loop calls `iter` of the data again."""

    def close(self) -> None:
        """End the thread that reads ahead."""


def innermost(data: Any) -> Any:
    """The data below all prefetching; other data themselves."""
    while getattr(data, "reads_ahead", False):
        data = data.data
    return data


class Positioned(Data):
    """Data with two integers, epoch and batch, as their position."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._place: tuple[int, int] = (0, 0)
        self.is_placed: bool = False
        #: Everything that the order of an epoch depends on, except its number.
        self.settings: dict[str, Any] = settings

    def get_state(self) -> dict[str, int]:
        """The `{"epoch", "position"}` after the last batch; after an epoch, the next epoch's."""
        epoch, position = self._place
        if position >= len(self):
            epoch, position = epoch + 1, 0
        return {"epoch": epoch, "position": position}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Set a position of `get_state`: the next loop begins there, and ends with its epoch.

        The position in a checkpoint of `fit` has `settings`, too: other settings raise DataError.
        """
        place = dict(state)
        saved_settings = place.pop("settings", self.settings)
        if differ := [name for name, x in self.settings.items() if saved_settings.get(name) != x]:
            listed = lambda x: ", ".join(f"{name} {x.get(name)}" for name in differ)
            expected = f"{listed(saved_settings)}, as in the checkpoint"
            raise DataError(
                "data",
                "resume",
                got=listed(self.settings),
                expected=expected,
                fix="Another order of the data is another run: give it another path.",
            )
        expected = f'{{"epoch": int, "position": int}}, position at most {len(self)}'
        if place.keys() != {"epoch", "position"}:
            raise DataError("state", "set_state()", state, expected)
        epoch, position = map(operator.index, (place["epoch"], place["position"]))
        if epoch < 0 or not 0 <= position <= len(self):
            raise DataError("state", "set_state()", state, expected)
        self._place = epoch, position
        self.follow(self.get_state())  # the end of an epoch is the beginning of the next
        self.is_placed = True

    def afresh(self) -> Self:
        """The same data at the beginning, with a separate position."""
        copied = copy.copy(self)
        copied._place, copied.is_placed = (0, 0), False
        return copied

    def follow(self, state: Mapping[str, Any]) -> None:
        self._place, self.is_placed = (state["epoch"], state["position"]), False

    def _begin(self) -> tuple[int, int]:
        """The position at the first batch of a loop: a new epoch, or a position that was set."""
        epoch, position = tuple(self.get_state().values())
        if position and not self.is_placed:
            epoch, position = epoch + 1, 0
        self.is_placed = False
        return epoch, position
