"""Batches that a compiled loop gathers of arrays on the device: nothing is copied for a call."""

from dataclasses import dataclass, field
from typing import Any

import jax

from tsunax._core import PyTree, Scalar, placement
from tsunax.data.on_devices import gather


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gathered:
    """Rows of arrays on the device: batch i has `order[first + i·rows : first + (i + 1)·rows]`."""

    arrays: PyTree
    order: jax.Array | None  # int32 (all rows,); None: as they lie
    first: Scalar  # int32
    rows: int = field(metadata={"static": True})
    size: int = field(metadata={"static": True})
    spread: Any = field(metadata={"static": True})  # the sharding of a batch's rows, on a mesh

    def at(self, i: Scalar) -> PyTree:
        batch = gather(self.arrays, self.order, self.first + i * self.rows, (self.rows,))
        return batch if self.spread is None else placement.constrain_rows(batch, self.spread)
