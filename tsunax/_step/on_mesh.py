"""Moving the arguments of a step to the mesh of its state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import placement
from tsunax._core.placement import MeshShardings
from tsunax.errors import LossError
from tsunax.loss import check_mask, rows_of, uneven
from tsunax.state import TrainState
from tsunax.states import row_axes


def masked(user_mask, padding):
    """The user's mask, extended by zeros for rows of padding."""
    if user_mask is None:
        return padding
    lib = np if isinstance(user_mask, np.ndarray) else jnp
    mask = lib.asarray(user_mask, np.float32)
    later_axes = range(1, mask.ndim)
    mask = lib.pad(mask, [(0, len(padding) - len(mask)), *[(0, 0) for _ in later_axes]])
    return mask * lib.expand_dims(padding, tuple(later_axes))


def place_batch(step, state: TrainState, shardings: MeshShardings, batch, extra) -> tuple:
    """`place_as_it_is`, but rows that do not divide are padded if loss_fn takes a mask."""
    mask, rows = extra.get("mask"), rows_of(batch)
    padding = -rows % placement.divisor(shardings.replicated, step.accumulate)
    mesh = shardings.replicated.mesh
    are_placed = (placement.is_on_mesh(x, mesh) for x in jax.tree.leaves(batch))
    if padding and step.masks and row_axes(state, mesh) and not all(are_placed):
        if fault := uneven(batch):
            raise LossError(fault)
        check_mask(mask, rows)
        batch, padding_mask = placement.padded(batch, rows, rows + padding)
        extra = {**extra, "mask": masked(mask, padding_mask)}
    return place_as_it_is(state, shardings, batch, extra)


def place_as_it_is(
    state: TrainState, shardings: MeshShardings, batch, extra, *, whole: bool = False
) -> tuple[Any, dict]:
    """Spread a host batch over the mesh of the state; `extra` is replicated.

    Rows that do not divide are replicated if `whole`, and raise DataError if not.
    """
    sharding = shardings.replicated
    if not row_axes(state, sharding.mesh):  # each member of a population has all rows
        return placement.replicate((batch, extra), sharding)
    mask = {name: x for name, x in extra.items() if name == "mask"}
    other_arguments = {name: x for name, x in extra.items() if name != "mask"}
    batch, mask = placement.put_rows((batch, mask), sharding, whole=whole)
    return batch, {**placement.replicate(other_arguments, sharding), **mask}
