"""Batches that are not stacked: one for each call, or a single batch for many calls."""

import jax
import numpy as np
from jax.sharding import NamedSharding

from tsunax._core import placement
from tsunax.data.cursors import Source
from tsunax.program import TrainStep
from tsunax.run import fused_loop
from tsunax.run.chunks import Chunk, Demand, Feeder, Forms, Placer, with_room

# Bytes of the copies of a single batch, which are made once for many calls.
REPEATED_BYTES = 4 << 20


class SingleBatches(Feeder):
    """Single batches, for a step that is called without a loop."""

    def __init__(self, source: Source, forms: Forms, placer: Placer) -> None:
        self._source, self._forms, self._placer = source, forms, placer

    def take(self, demand: Demand) -> Chunk | None:
        epoch = self._source.epoch
        if (batch := self._source.next()) is None:
            return None
        form = self._forms.form_of(*jax.tree.flatten(batch), demand.step)
        home, placer = demand.home, self._placer
        if placer.is_whole:
            batch = placement.replicate(batch, home, shared=False)
        elif not isinstance(placer.step, TrainStep) and isinstance(home, NamedSharding):
            batch = placement.put_rows(batch, home, shared=False)  # a TrainStep does it itself
        return Chunk(fused_loop.Single(batch), None, 1, epoch, form.bytes)


class OneBatch(Feeder):
    """Many epochs of data with a single batch, which is read again after every boundary."""

    def __init__(self, source: Source, forms: Forms, placer: Placer, last_epoch: float) -> None:
        self._source, self._forms, self._placer = source, forms, placer
        self._last_epoch = last_epoch
        self._copies: fused_loop.Stacked | None = None

    def take(self, demand: Demand) -> Chunk:
        source, home = self._source, demand.home
        if source.position:
            source.next()
        epoch = source.epoch
        if self._copies is None:
            leaves, treedef = jax.tree.flatten(source.next())
            self.size: int = self._forms.form_of(leaves, treedef, demand.step).room
            copies = [with_room(x[None], self.size) for x in leaves]
            stack = fused_loop.Stacked(treedef.unflatten(copies))
            placement.check_devices(stack.batches, home)
            stack = stack if isinstance(home, NamedSharding) else jax.device_put(stack, home)
        else:
            stack = self._copies
        steps = int(min(demand.steps, self.size, self._last_epoch - epoch))
        source.again(steps)
        self._copies, count = self._placer.stacked(stack, steps, demand)
        return Chunk(self._copies, count, steps, np.arange(epoch, epoch + steps), 0)

    def forget(self) -> None:
        self._copies = None
