"""Where arrays live: on one device, or over a mesh, and how host rows get there.

The rows of a batch are spread over the data axes of a mesh, everything else is whole on each device. Knows shardings
and trees, nothing of states.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from tsunax.errors import DataError, message

WHOLE = PartitionSpec()


def data_axes(mesh) -> tuple[str, ...]:
    """The axes of a mesh over which rows are spread."""
    known = tuple(axis for axis in mesh.axis_names if axis in ("data", "fsdp"))
    return known or mesh.axis_names[:1]


def parts_of(mesh) -> int:
    """Into how many parts the rows of a batch are cut."""
    return int(np.prod([mesh.shape[axis] for axis in data_axes(mesh)]))


def names_of(entry) -> tuple[str, ...]:
    """The axes of a mesh in one entry of a `PartitionSpec`."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


@functools.lru_cache(maxsize=64)
def parts_here(mesh) -> int:
    """How many of those parts are this process's own. Raises DataError where processes would share one."""
    parts = parts_of(mesh)
    if not mesh.is_multi_process:
        return parts
    spread = NamedSharding(mesh, PartitionSpec(data_axes(mesh)))
    mine = len({part[0].start for part in spread.addressable_devices_indices_map((parts,)).values() if part})
    if mine * jax.process_count() != parts:
        got = f"{parts} parts of rows for {jax.process_count()} processes"
        fix = "Give axes of the mesh that hold rows (data, fsdp) to the processes, and tensor to the devices of one."
        raise DataError(message("mesh", str(dict(mesh.shape)), got, "as many for each process", fix))
    return mine


def is_explicit(mesh) -> bool:
    """Whether shardings are part of the types of arrays on this mesh."""
    return any("Explicit" in str(kind) for kind in mesh.axis_types)


def home_of(tree) -> Any:
    """The sharding that says where the arrays of a tree live: one on a mesh, if any of them is there.

    None where they lie on the default device, free to move.
    """
    found = None
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed:
            if isinstance(x.sharding, NamedSharding):
                return x.sharding
            found = found or x.sharding
    return found


@dataclass(frozen=True, eq=False)
class Home:
    """A tree on a mesh: where each array lies, and stays when a program returns it. One object for each value."""

    sharding: NamedSharding  # of one of them
    layout: Any  # of all
    parts: int  # into which the rows that this process has are cut

    @property
    def whole(self) -> NamedSharding:
        return _on(self.sharding.mesh, None)


@functools.lru_cache(maxsize=256)
def _home(treedef, shardings: tuple) -> Home:
    sharding = next(s for s in shardings if s is not None)
    layout = [_on(sharding.mesh, None) if s is None else s for s in shardings]
    return Home(sharding, treedef.unflatten(layout), parts_here(sharding.mesh))


def home_on_mesh(tree) -> Home | None:
    """How a tree lies on a mesh; what is not there yet will be, whole. None where all of it is on one device."""
    leaves, treedef = jax.tree.flatten(tree)
    is_spread = lambda x: isinstance(x, jax.Array) and not isinstance(x, Tracer) and len(x.sharding.device_set) > 1
    if not any(map(is_spread, leaves)):
        return None
    on_mesh = lambda x: is_spread(x) and isinstance(x.sharding, NamedSharding)
    shardings = tuple(x.sharding if on_mesh(x) else None for x in leaves)
    return _home(treedef, shardings) if any(shardings) else None


def put(tree, home, axis: int = 0, *, whole: bool = False):
    """A tree of rows along `axis` where a state lives: over the data axes of its mesh, where it has one.

    Arrays that lie on that mesh stay as they are. Rows that do not divide by its devices raise DataError; with `whole`
    each device gets, and computes, all of them.
    """
    if not isinstance(home, NamedSharding):
        return jax.device_put(tree, home)
    mesh, parts, spans = home.mesh, parts_here(home.mesh), home.mesh.is_multi_process

    def where(x):
        if np.ndim(x) <= axis:
            return _on(mesh, None)
        rows = np.shape(x)[axis]
        if rows % parts and (spans or not whole):
            of = " of this process" if spans else ""
            fix = 'Choose another batch_size, tail="drop", or pad the batch and name `mask` in loss_fn.'
            got = f"{rows} rows{of}"
            raise DataError(message("batch", f"mesh {dict(mesh.shape)}", got, f"a multiple of {parts}", fix))
        return _on(mesh, None if rows % parts else axis)

    leaves, treedef = jax.tree.flatten(tree)
    moved = {i: where(x) for i, x in enumerate(leaves) if not _is_on(x, mesh)}
    sent = _sent([leaves[i] for i in moved], list(moved.values()))
    for i, x in zip(moved, sent, strict=True):
        leaves[i] = x
    return treedef.unflatten(leaves)


def padded(tree, here: int, rows: int, axis: int = 0) -> tuple[Any, np.ndarray]:
    """The tree with copies of its last row up to `rows`, and the mask that tells them apart: f32 of shape (rows,)."""

    def one(x):
        if here == rows or np.ndim(x) <= axis:
            return x
        lib, last = jnp if isinstance(x, jax.Array) else np, (*[slice(None)] * axis, slice(-1, None))
        return lib.concatenate([x, lib.repeat(x[last], rows - here, axis)], axis)

    return jax.tree.map(one, tree), (np.arange(rows) < here).astype(np.float32)


def whole(tree, home):
    """A tree where a state lives, all of it on each device."""
    if not isinstance(home, NamedSharding):
        return jax.device_put(tree, home)
    return jax.tree.map(lambda x: x if _is_on(x, home.mesh) else _sent([x], [_on(home.mesh, None)])[0], tree)


@functools.lru_cache(maxsize=64)
def _on(mesh, axis: int | None) -> NamedSharding:
    """Rows along an axis, over the data axes of a mesh; None: all of it everywhere."""
    return NamedSharding(mesh, WHOLE if axis is None else PartitionSpec(*[None] * axis, data_axes(mesh)))


def collected(params):
    """Parameters as a loss function needs them where shardings are types: whole along the axes of rows.

    On other meshes the compiler sees to it.
    """

    def one(x):
        sharding = jax.typeof(x).sharding if isinstance(x, Tracer) else None
        if sharding is None or not is_explicit(sharding.mesh):
            return x
        rows = data_axes(sharding.mesh)
        spec = [names_of(entry) for entry in sharding.spec]
        if not any(name in rows for names in spec for name in names):
            return x
        spec = [tuple(name for name in names if name not in rows) or None for names in spec]
        return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec)))

    return jax.tree.map(one, params)


def rows_over(home, rows: int) -> NamedSharding | None:
    """How rows that a program gathers are spread over the mesh of a state; None where nothing is to be said."""
    if not isinstance(home, NamedSharding) or is_explicit(home.mesh) or rows % parts_of(home.mesh):
        return None
    return _on(home.mesh, 0)


def is_on(tree, mesh) -> bool:
    """Whether all of a tree lies on a mesh."""
    return all(_is_on(x, mesh) for x in jax.tree.leaves(tree))


def _is_on(x, mesh) -> bool:
    return isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and x.sharding.mesh == mesh


def _sent(leaves: list, shardings: list) -> list:
    """Arrays at their shardings; those of several processes from what each one has."""
    if all(s.is_fully_addressable for s in shardings):
        return jax.device_put(leaves, shardings)
    return [jax.make_array_from_process_local_data(s, np.asarray(x)) for x, s in zip(leaves, shardings, strict=True)]


__all__ = [
    "Home",
    "collected",
    "data_axes",
    "home_of",
    "home_on_mesh",
    "names_of",
    "padded",
    "put",
    "rows_over",
    "whole",
]
