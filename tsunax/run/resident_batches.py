"""Batches that a compiled loop gathers from arrays on the device: no call copies batches."""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tsunax._core import PyTree, Scalar, placement
from tsunax.data.cursors import Source
from tsunax.data.on_devices import gather
from tsunax.run.chunks import Chunk, Demand, Feeder, count_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gathered:
    """Rows of arrays on the device: batch i has `order[first + i·rows : first + (i + 1)·rows]`."""

    arrays: PyTree
    order: jax.Array | None  # int32 (all rows,); None: in sequence
    first: Scalar  # int32
    rows: int = field(metadata={"static": True})
    size: int = field(metadata={"static": True})
    spread: Any = field(metadata={"static": True})  # the sharding of a batch's rows, on a mesh

    def batch_at(self, i: Scalar) -> PyTree:
        batch = gather(self.arrays, self.order, self.first + i * self.rows, (self.rows,))
        return batch if self.spread is None else placement.constrain_rows(batch, self.spread)


class ResidentRows(Feeder):
    """The rows of arrays on the device, which the program gathers."""

    def __init__(self, source: Source, most_steps: int, is_population: bool) -> None:
        self._source, self._is_population = source, is_population
        self.size: int = max(2, min(len(source.data), most_steps))
        self._full_rows = 0  # rows of a batch, except for a short batch at the end of an epoch

    def take(self, demand: Demand) -> Chunk | None:
        source, epoch = self._source, self._source.epoch
        if (gathered := source.advance(min(demand.steps, self.size))) is None:
            return None
        first, (steps, rows) = gathered
        self._full_rows = max(self._full_rows, rows)
        size = self.size if rows == self._full_rows else 2  # the short batch
        spread = None if self._is_population else placement.rows_over(demand.home, rows)
        data, start = source.data, np.int32(first)
        feed = Gathered(data.resident, data.device_order(epoch), start, rows, size, spread)
        return Chunk(feed, count_of(steps, demand.limit), steps, epoch, 0)
