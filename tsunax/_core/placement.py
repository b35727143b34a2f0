"""Where arrays live: on one device, or over a mesh, and how host rows get there.

The rows of a batch are spread over the data axes of a mesh; everything else is whole on each
device.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from tsunax.errors import DataError

WHOLE = PartitionSpec()
ALIGNED_FROM = 1 << 17  # bytes: below, a second copy costs less than the care to avoid it


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
    """How many of those parts are this process's own. Raises DataError if processes share one."""
    parts = parts_of(mesh)
    if not mesh.is_multi_process:
        return parts
    spread = NamedSharding(mesh, PartitionSpec(data_axes(mesh)))
    places = spread.addressable_devices_indices_map((parts,)).values()
    mine = len({place[0].start for place in places if place})
    if mine * jax.process_count() != parts:
        got = f"{parts} parts of rows for {jax.process_count()} processes"
        fix = "Give axes of the mesh that hold rows (data, fsdp) to the processes, and tensor to "
        fix += "the devices of one."
        raise DataError("mesh", str(dict(mesh.shape)), got, "as many for each process", fix)
    return mine


def is_explicit(mesh) -> bool:
    """Whether shardings are part of the types of arrays on this mesh."""
    return any("Explicit" in str(kind) for kind in mesh.axis_types)


def home_of(tree) -> Any:
    """The sharding where the arrays of a tree live: that of a mesh if any array is on one.

    None if they lie on the default device, free to move.
    """
    found = None
    for x in jax.tree.leaves(tree):
        if _has_place(x) and x.committed:
            if isinstance(x.sharding, NamedSharding):
                return x.sharding
            found = found or x.sharding
    return found


def _has_place(x) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


@dataclass(frozen=True, eq=False)
class Home:
    """A tree on a mesh: where each array lies, and stays. One object for each value."""

    whole: NamedSharding  # what is whole on each device
    layout: Any  # of all
    parts: int  # into which the rows that this process has are cut


@functools.lru_cache(maxsize=256)
def _home(treedef, mesh, specs: tuple) -> Home:
    layout = [NamedSharding(mesh, WHOLE if spec is None else spec) for spec in specs]
    return Home(_on(mesh, None), treedef.unflatten(layout), parts_here(mesh))


def home_on_mesh(tree, beside=()) -> Home | None:
    """The layout of a tree on the mesh of its arrays, or of those in `beside`; None without one."""
    leaves, treedef = jax.tree.flatten(tree)
    mesh = next(filter(None, map(_mesh_of, leaves)), None)
    mesh = mesh or next(filter(None, map(_mesh_of, jax.tree.leaves(beside))), None)
    if mesh is None:
        return None
    spec_of = lambda x: _entries(x.sharding.spec) if _mesh_of(x) == mesh else None
    return _home(treedef, mesh, tuple(map(spec_of, leaves)))


def _mesh_of(x):
    """The mesh of several devices on which an array, or the shape of one, is; None for others."""
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1:
        return sharding.mesh
    return None


def _entries(spec: PartitionSpec) -> PartitionSpec:
    """A spec without the Nones at its end, which programs tell apart and nobody else does."""
    n = max((i + 1 for i, entry in enumerate(spec) if entry is not None), default=0)
    return PartitionSpec(*spec[:n])


def settled(tree, layout):
    """A tree of which each array lies where its `layout` says."""

    def one(x, sharding):
        if not isinstance(x, jax.Array) or x.sharding == sharding:
            return x
        if x.committed and x.sharding.device_set != sharding.device_set:
            return x  # elsewhere: the program will say so
        if sharding.is_fully_addressable or not x.sharding.is_equivalent_to(sharding, x.ndim):
            return jax.device_put(x, sharding)
        parts = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    return jax.tree.map(one, tree, layout)


def put(tree, home, axis: int = 0, *, whole: bool = False, shared: bool = True):
    """Move rows along `axis` to a state's device, or spread them over the data axes of its mesh.

    Arrays on that mesh stay. Rows that do not divide by its devices raise DataError; with `whole`
    each device gets all of them. Arrays that are `shared` with a writer are copied.
    """
    if not isinstance(home, NamedSharding):
        return jax.device_put(_unshared(tree, home) if shared else tree, home)
    mesh, parts, spans = home.mesh, parts_here(home.mesh), home.mesh.is_multi_process

    def where(x):
        if np.ndim(x) <= axis:
            return _on(mesh, None)
        rows = np.shape(x)[axis]
        if rows % parts and (spans or not whole):
            of = " of this process" if spans else ""
            at, expected = f"mesh {dict(mesh.shape)}", f"a multiple of {parts}"
            fix = "Choose another batch_size, drop_remainder=True, or pad the batch and name "
            fix += "`mask` in loss_fn."
            raise DataError("batch", at, f"{rows} rows{of}", expected, fix)
        return _on(mesh, None if rows % parts else axis)

    leaves, treedef = jax.tree.flatten(tree)
    for i, x in enumerate(leaves):
        if isinstance(x, jax.ShapeDtypeStruct) and not _is_on(x, mesh):
            leaves[i] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(x))
    moved = {i: where(x) for i, x in enumerate(leaves) if not _is_on(x, mesh)}
    sent = _sent([leaves[i] for i in moved], list(moved.values()), shared)
    for i, x in zip(moved, sent, strict=True):
        leaves[i] = x
    return treedef.unflatten(leaves)


def padded(tree, here: int, rows: int, axis: int = 0) -> tuple[Any, np.ndarray]:
    """Repeat the last row up to `rows`; the mask of the real rows is f32 of shape (rows,)."""

    def one(x):
        if here == rows or np.ndim(x) <= axis:
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((*x.shape[:axis], rows, *x.shape[axis + 1 :]), x.dtype)
        lib = jnp if isinstance(x, jax.Array) else np
        last = x[(*[slice(None)] * axis, slice(-1, None))]
        return lib.concatenate([x, lib.repeat(last, rows - here, axis)], axis)

    return jax.tree.map(one, tree), (np.arange(rows) < here).astype(np.float32)


def whole(tree, home, shared: bool = True):
    """A tree where a state lives, all of it on each device. `shared` as in `put`."""
    if not isinstance(home, NamedSharding):
        return jax.device_put(_unshared(tree, home) if shared else tree, home)
    sent = lambda x: x if _is_on(x, home.mesh) else _sent([x], [_on(home.mesh, None)], shared)[0]
    return jax.tree.map(sent, tree)


@functools.lru_cache(maxsize=64)
def _on(mesh, axis: int | None) -> NamedSharding:
    """Rows along an axis, over the data axes of a mesh; None: all of it everywhere."""
    spec = WHOLE if axis is None else PartitionSpec(*[None] * axis, data_axes(mesh))
    return NamedSharding(mesh, spec)


def beside(params, tree):
    """Put arrays on the devices of the params, whole on each; those that are there stay."""
    first = next(filter(_has_place, jax.tree.leaves(params)), None)
    sharding, committed = (None, False) if first is None else (first.sharding, first.committed)
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, WHOLE)

    def put(x):
        x = x if isinstance(x, Tracer) else jnp.asarray(x)
        if sharding is None or isinstance(x, Tracer):
            return x
        # an uncommitted array comes back from the first step committed, and would compile the
        # second one anew
        here = sharding.device_set == x.sharding.device_set and x.committed >= committed
        return x if here else jax.device_put(x, sharding)

    return jax.tree.map(put, tree)


def collected(params):
    """Gather parameters along the data axes of a mesh with explicit axes, for the loss function.

    On other meshes the compiler does so.
    """

    def one(x):
        sharding = jax.typeof(x).sharding if isinstance(x, Tracer) else None
        if sharding is None or not is_explicit(sharding.mesh):
            return x
        rows, spec = data_axes(sharding.mesh), [names_of(entry) for entry in sharding.spec]
        rest = [tuple(name for name in names if name not in rows) for names in spec]
        if rest == spec:
            return x
        spec = PartitionSpec(*(names or None for names in rest))
        return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))

    return jax.tree.map(one, params)


def rows_over(home, rows: int) -> NamedSharding | None:
    """The sharding of gathered rows over a state's mesh; None if the rows do not divide."""
    if not isinstance(home, NamedSharding) or rows % parts_of(home.mesh):
        return None
    return _on(home.mesh, 0)


def spread(tree, sharding: NamedSharding):
    """Rows inside a program, spread over a mesh."""
    explicit = is_explicit(sharding.mesh)
    return (jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint)(tree, sharding)


def divisor(home, accumulate: int = 1) -> int:
    """What the number of rows that this process has must be a multiple of.

    Where shardings are types, no row may move when each device cuts its own into micro-batches.
    """
    if not isinstance(home, NamedSharding):
        return 1
    return parts_here(home.mesh) * (accumulate if is_explicit(home.mesh) else 1)


def cut(x, n: int):
    """Rows along a second axis of n, inside a program."""
    shape = (len(x) // n, n, *x.shape[1:])
    sharding = jax.typeof(x).sharding
    if not is_explicit(sharding.mesh) or not any(sharding.spec[:1]):
        return x.reshape(shape)
    parts = int(np.prod([sharding.mesh.shape[name] for name in names_of(sharding.spec[0])]))
    if len(x) % (parts * n):
        got, fix = f"{len(x)} rows over {parts} devices", "Name `mask` in loss_fn to pad the batch."
        expected = f"a multiple of {parts * n}, so that each device cuts its own into {n}"
        raise DataError("batch", "train_step()", got, expected, fix)
    spec = PartitionSpec(sharding.spec[0], None, *sharding.spec[1:])
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, spec))


def joined(x, rows: int):
    """The inverse of `cut` for a stack of its parts, (n, rows of each, ...): the first `rows`."""
    x = x.swapaxes(0, 1)
    shape, sharding = (x.shape[0] * x.shape[1], *x.shape[2:]), jax.typeof(x).sharding
    if not is_explicit(sharding.mesh) or not any(sharding.spec[:2]):
        return x.reshape(shape)[:rows]
    spec = PartitionSpec(sharding.spec[0], *sharding.spec[2:])
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, spec))[:rows]


def is_on(tree, mesh) -> bool:
    """Whether all of a tree lies on a mesh."""
    return all(_is_on(x, mesh) for x in jax.tree.leaves(tree))


def _is_on(x, mesh) -> bool:
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def _unshared(tree, sharding):
    """Copy NumPy arrays that a CPU backend would alias, since the user may refill them."""
    device = jax.devices()[0] if sharding is None else next(iter(sharding.device_set))
    own = lambda x: copied(x) if isinstance(x, np.ndarray) else x
    return jax.tree.map(own, tree) if device.platform == "cpu" else tree


def room(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Empty memory aligned to 64 bytes, which JAX on a CPU takes without another copy."""
    bytes = math.prod(shape) * dtype.itemsize
    if bytes < ALIGNED_FROM or dtype.hasobject:
        return np.empty(shape, dtype)
    whole = np.empty(bytes + 64, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + bytes].view(dtype).reshape(shape)


def copied(x: np.ndarray) -> np.ndarray:
    """The same numbers in memory of their own."""
    out = room(x.shape, x.dtype)
    np.copyto(out, x)
    return out


def _sent(leaves: list, shardings: list, shared: bool) -> list:
    """Arrays at their shardings; those of several processes from what each one has."""
    if all(s.is_fully_addressable for s in shardings):
        own = _unshared(leaves, shardings[0]) if shared and leaves else leaves
        return jax.device_put(own, shardings)
    local = jax.make_array_from_process_local_data
    return [local(s, np.asarray(x)) for x, s in zip(leaves, shardings, strict=True)]
