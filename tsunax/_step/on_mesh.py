"""A step whose state lies on a mesh: where its arguments have to be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tsunax._core import placement
from tsunax._step.members import members_of
from tsunax.errors import LossError
from tsunax.loss import rows_of, uneven
from tsunax.state import TrainState


def place_state_on_mesh(moving, still=()) -> tuple[placement.MeshShardings | None, Any, Any]:
    """The shardings of a state on a mesh (None: on one device), and its two parts moved to them."""
    shardings, other = (
        placement.mesh_shardings(moving, still),
        placement.mesh_shardings(still, moving),
    )
    if shardings is None or other is None:
        return None, moving, still
    return (
        shardings,
        placement.resharded(moving, shardings.of_leaves),
        placement.resharded(still, other.of_leaves),
    )


def masked(given, padding):
    """The user's mask, extended by zeros for rows of padding."""
    if given is None:
        return padding
    lib = np if isinstance(given, np.ndarray) else jnp
    return lib.pad(lib.asarray(given, np.float32), (0, len(padding) - len(given))) * padding


def spread_batch(
    rows, extra, shardings: placement.MeshShardings, *, whole: bool = False
) -> tuple[Any, dict]:
    """Spread a batch and its mask over the mesh of a state; `extra` is replicated.

    Rows that do not divide raise DataError; with `whole` they are replicated.
    """
    batch, mask = placement.put_rows(rows, shardings.replicated, whole=whole)
    extra = placement.replicate(
        {name: x for name, x in extra.items() if name != "mask"}, shardings.replicated
    )
    return batch, extra if mask is None else {**extra, "mask": mask}


def place_batch(
    step: Any, state: TrainState, shardings: placement.MeshShardings, batch, extra
) -> tuple[Any, dict]:
    """Spread a host batch over the mesh of the state; `extra` is replicated.

    Rows that do not divide are padded if loss_fn takes a mask, and raise DataError if not.
    """
    if members_of(state) is not None:  # the devices share the members, each of which has all rows
        return placement.replicate((batch, extra), shardings.replicated)
    mask, rows = extra.get("mask"), rows_of(batch)
    padding = -rows % placement.divisor(shardings.replicated, step.accumulate)
    if padding and step.masks and not placement.is_on(batch, shardings.replicated.mesh):
        if found := uneven(batch):
            raise LossError(found)
        batch, more = placement.padded(batch, rows, rows + padding)
        mask = masked(mask, more)
    return spread_batch((batch, mask), extra, shardings)


def for_evaluation(
    state: TrainState, shardings: placement.MeshShardings, batch, extra
) -> tuple[Any, dict]:
    """Spread a host batch for an evaluation; rows that do not divide are replicated."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((batch, extra))):
        return batch, extra
    if members_of(state) is not None:
        return placement.replicate((batch, extra), shardings.replicated)
    return spread_batch((batch, extra.get("mask")), extra, shardings, whole=True)


def for_statistics(shardings: placement.MeshShardings, batch, extra) -> tuple[Any, dict]:
    """Spread a host batch for batch statistics; rows that do not divide raise DataError."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((batch, extra))):
        return batch, extra
    return spread_batch((batch, extra.get("mask")), extra, shardings)
