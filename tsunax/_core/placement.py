"""The devices of arrays: one device, or a mesh that spreads rows over its data axes."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tsunax._core import checks, trees
from tsunax.errors import DataError, DeviceError

WHOLE = PartitionSpec()
# Elements. Smaller arrays are whole on each device: a copy on each costs less than to gather parts.
SMALL = 1024
# Bytes. Smaller arrays are not aligned: a second copy by JAX costs less than the alignment.
ALIGNED_FROM = 1 << 17


def data_axes(mesh) -> tuple[str, ...]:
    """The axes of a mesh over which rows are spread."""
    standard_axes = tuple(axis for axis in mesh.axis_names if axis in ("data", "fsdp"))
    return standard_axes or mesh.axis_names[:1]


def row_parts(mesh) -> int:
    """The number of parts of a batch: one on each device along the data axes."""
    return _devices_along(mesh, data_axes(mesh))


def _devices_along(mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def axes_in(entry) -> tuple[str, ...]:
    """The axes of a mesh in one entry of a `PartitionSpec`."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def is_absent(mesh) -> bool:
    """Whether the devices of a mesh belong to a topology, for which programs only compile."""
    return "CompileOnly" in type(mesh.devices.flat[0].client).__name__


@functools.lru_cache(maxsize=64)
def row_parts_here(mesh) -> int:
    """How many parts of the rows are on this process. Raises DataError if processes share one."""
    parts = row_parts(mesh)
    if not mesh.is_multi_process or is_absent(mesh):
        return parts
    places = _rows_sharding(mesh, 0).addressable_devices_indices_map((parts,)).values()
    parts_here = len({place[0].start for place in places if place})
    count = len({device.process_index for device in mesh.devices.flat})
    if parts_here * count != parts:
        got = f"{parts} parts of rows for {count} processes"
        fix = "Give axes that hold rows (data, fsdp) to processes, tensor to the devices of one."
        raise DataError("mesh", str(dict(mesh.shape)), got, "as many for each process", fix)
    return parts_here


def is_explicit(mesh) -> bool:
    """Whether shardings are part of the types of arrays on this mesh."""
    return any("Explicit" in str(kind) for kind in mesh.axis_types)


def state_sharding(tree) -> Any:
    """The sharding of a committed array of a tree, on a mesh if there is such an array; or None."""
    placed = filter(trees.is_placed, jax.tree.leaves(tree))
    shardings = [x.sharding for x in placed if x.committed]
    return next(
        (x for x in shardings if isinstance(x, NamedSharding)), shardings[0] if shardings else None
    )


@dataclass(frozen=True, eq=False)
class MeshShardings:
    """The shardings of a tree on a mesh. One object for each value."""

    replicated: NamedSharding  # for arrays that are whole on each device
    of_leaves: Any  # the tree, with the sharding of each array
    parts: int  # the number of parts of the rows of this process


@functools.lru_cache(maxsize=256)
def _shardings_on(treedef, mesh, specs: tuple) -> MeshShardings:
    kind = lambda is_offloaded: "pinned_host" if is_offloaded else None
    shardings = [
        NamedSharding(mesh, spec, memory_kind=kind(is_offloaded)) for spec, is_offloaded in specs
    ]
    return MeshShardings(
        _rows_sharding(mesh, None), treedef.unflatten(shardings), row_parts_here(mesh)
    )


def mesh_shardings(tree, second_tree=()) -> MeshShardings | None:
    """The shardings of a tree on its mesh, or the mesh of `second_tree`; None without a mesh."""
    leaves, treedef = jax.tree.flatten(tree)
    mesh = next(filter(None, map(_mesh_of, [*leaves, *jax.tree.leaves(second_tree)])), None)
    if mesh is None:
        return None
    spec_of = lambda x: _entries(x.sharding.spec) if _mesh_of(x) == mesh else WHOLE
    return _shardings_on(treedef, mesh, tuple((spec_of(x), trees.is_offloaded(x)) for x in leaves))


def _mesh_of(x):
    """The mesh of several devices on which an array is, or is to be; else None."""
    sharding = None if trees.is_traced(x) else getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1:
        return sharding.mesh
    return None


def _entries(spec: PartitionSpec) -> PartitionSpec:
    """A spec without the Nones at its end: they change nothing, but jit would compile again."""
    n = max((i + 1 for i, entry in enumerate(spec) if entry is not None), default=0)
    return PartitionSpec(*spec[:n])


def resharded(tree, shardings):
    """The tree with each array at its sharding in the tree `shardings`."""

    def reshard_leaf(x, sharding):
        if not isinstance(x, jax.Array) or x.sharding == sharding:
            return x
        if x.committed and x.sharding.device_set != sharding.device_set:
            return x  # on other devices: the program raises
        if sharding.is_fully_addressable or not x.sharding.is_equivalent_to(sharding, x.ndim):
            return jax.device_put(x, sharding)
        parts = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    return jax.tree.map(reshard_leaf, tree, shardings)


def check_devices(tree, home, root: str = "batch") -> None:
    """Raise DeviceError for an array on another device than `home`, the device of a state.

    A state on several devices takes batches from anywhere: their rows are spread.
    """
    if home is None or len(home.device_set) > 1:
        return
    is_stray = lambda x: trees.is_placed(x) and x.committed and x.devices() != home.device_set
    if any(map(is_stray, jax.tree.leaves(tree))):
        where, x = next(pair for pair in trees.leaves_at(root, tree) if is_stray(pair[1]))
        (device,), n = home.device_set, len(x.devices())
        got = f"an array on {next(iter(x.devices())) if n == 1 else f'{n} devices'}"
        prefetching = ", or ts.prefetch(data, device)" if root == "batch" else ""
        fix = f"Move it: ts.to_device({root}, device){prefetching}."
        owner = "the rest of the state" if root == "state" else "the state"
        raise DeviceError("leaf", where, got, f"{device}, as {owner}", fix)


def put_rows(tree, sharding, axis: int | None = 0, *, whole: bool = False, shared: bool = True):
    """Move rows along `axis` to a device, or spread them over the data axes of a mesh.

    Arrays on that mesh stay. Rows that its devices do not divide raise DataError; with `whole` each
    device gets all rows. With `shared`, NumPy arrays are copied, because a user may refill them.
    Without an axis the arrays have no rows, see `replicate`.
    """
    if not isinstance(sharding, NamedSharding):
        return put(tree, sharding) if shared else jax.device_put(tree, sharding)
    mesh = sharding.mesh

    def where(x):
        if axis is None or np.ndim(x) <= axis:
            return _rows_sharding(mesh, None)
        rows, parts = np.shape(x)[axis], row_parts_here(mesh)
        if rows % parts and (mesh.is_multi_process or not whole):
            process_text = " of this process" if mesh.is_multi_process else ""
            place, expected = f"mesh {dict(mesh.shape)}", f"a multiple of {parts}"
            fix = (
                "Choose another batch_size or drop_remainder=True. Or name `mask` in loss_fn and "
                "return ts.Loss.mean(values, mask): the batch is then padded."
            )
            raise DataError("batch", place, f"{rows} rows{process_text}", expected, fix)
        return _rows_sharding(mesh, None if rows % parts else axis)

    leaves, treedef = jax.tree.flatten(tree)
    for i, x in enumerate(leaves):
        if isinstance(x, jax.ShapeDtypeStruct) and not is_on_mesh(x, mesh):
            leaves[i] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(x))
    moved = {i: where(x) for i, x in enumerate(leaves) if not is_on_mesh(x, mesh)}
    moved_arrays = _put_leaves([leaves[i] for i in moved], list(moved.values()), shared)
    for i, x in zip(moved, moved_arrays, strict=True):
        leaves[i] = x
    return treedef.unflatten(leaves)


def padded(tree, real_rows: int, rows: int, axis: int = 0) -> tuple[Any, np.ndarray]:
    """A batch, padded to `rows` by copies of its last row, and its mask: f32 (rows,), 1 if real."""

    def pad_leaf(x):
        if real_rows == rows or np.ndim(x) <= axis:
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((*x.shape[:axis], rows, *x.shape[axis + 1 :]), x.dtype)
        lib = jnp if isinstance(x, jax.Array) else np
        last = x[(*[slice(None)] * axis, slice(-1, None))]
        repeated_rows = lib.broadcast_to(
            last, (*x.shape[:axis], rows - real_rows, *x.shape[axis + 1 :])
        )
        return lib.concatenate([x, repeated_rows], axis)

    return jax.tree.map(pad_leaf, tree), (np.arange(rows) < real_rows).astype(np.float32)


def replicate(tree, sharding, shared: bool = True):
    """Move a tree to a device, or all of it to each device of a mesh. `shared` as in `put_rows`."""
    return put_rows(tree, sharding, None, shared=shared)


def place_extra(extra, state) -> dict[str, Any]:
    """Copies of a step's arguments on the devices of the state. Raises if JAX cannot take one."""
    checks.check_arrays(extra, "extra", "Bind it to the step instead, with functools.partial.")
    return replicate(dict(extra), state_sharding(state))


@functools.lru_cache(maxsize=64)
def _rows_sharding(mesh, axis: int | None) -> NamedSharding:
    """Rows along `axis`, spread over the data axes of a mesh; without an axis a copy per device."""
    spec = WHOLE if axis is None else PartitionSpec(*[None] * axis, data_axes(mesh))
    return NamedSharding(mesh, spec)


def put_on_devices_of(params, tree):
    """Put arrays on the devices of the params, whole on each."""
    first = next(filter(trees.is_placed, jax.tree.leaves(params)), None)
    sharding, committed = (None, False) if first is None else (first.sharding, first.committed)
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, WHOLE)

    def put_leaf(x):
        x = x if trees.is_traced(x) else jnp.asarray(x)
        if sharding is None or trees.is_traced(x):
            return x
        # A step returns committed arrays. If the first step got an uncommitted one, the second step
        # would compile again.
        is_in_place = sharding.device_set == x.sharding.device_set and x.committed >= committed
        return x if is_in_place else jax.device_put(x, sharding)

    return jax.tree.map(put_leaf, tree)


def moved_to(x, like):
    """An array with the sharding and in the memory of a committed array; outside of a program."""
    is_elsewhere = trees.is_placed(x) and trees.is_placed(like) and like.committed
    return jax.device_put(x, like.sharding) if is_elsewhere else x


def offloaded(x):
    """An array of a mesh in host memory; small arrays stay."""
    if not isinstance(getattr(x, "sharding", None), NamedSharding) or x.size < SMALL:
        return x
    return jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))


def gather_params(params):
    """Gather params along the data axes of an explicit mesh; else the compiler gathers them."""

    def gather_leaf(x):
        sharding = jax.typeof(x).sharding if trees.is_traced(x) else None
        if sharding is None or not is_explicit(sharding.mesh):
            return x
        rows, spec = data_axes(sharding.mesh), [axes_in(entry) for entry in sharding.spec]
        other_axes = [tuple(name for name in names if name not in rows) for names in spec]
        if other_axes == spec:
            return x
        spec = PartitionSpec(*(names or None for names in other_axes))
        return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))

    return jax.tree.map(gather_leaf, params)


def rows_over(sharding, rows: int) -> NamedSharding | None:
    """The sharding of gathered rows over a state's mesh; None if the rows do not divide."""
    if not isinstance(sharding, NamedSharding) or rows % row_parts(sharding.mesh):
        return None
    return _rows_sharding(sharding.mesh, 0)


def constrain_rows(tree, sharding: NamedSharding):
    """Spread rows over a mesh, inside a program."""
    explicit = is_explicit(sharding.mesh)
    return (jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint)(tree, sharding)


def divisor(sharding, accumulate: int = 1) -> int:
    """The number of rows of this process must be a multiple of this."""
    if not isinstance(sharding, NamedSharding):
        return 1
    # With explicit axes, each device cuts its rows into micro-batches.
    return row_parts_here(sharding.mesh) * (accumulate if is_explicit(sharding.mesh) else 1)


def strided_rows(x, n: int):
    """Rows as (rows / n, n, ...), inside a program."""
    shape = (len(x) // n, n, *x.shape[1:])
    sharding = jax.typeof(x).sharding
    if not is_explicit(sharding.mesh) or not any(sharding.spec[:1]):
        return x.reshape(shape)
    parts = _devices_along(sharding.mesh, axes_in(sharding.spec[0]))
    if len(x) % (parts * n):
        got, fix = f"{len(x)} rows over {parts} devices", "Name `mask` in loss_fn to pad the batch."
        expected = f"a multiple of {parts * n}, so that each device cuts its own into {n}"
        raise DataError("batch", "train_step()", got, expected, fix)
    spec = PartitionSpec(sharding.spec[0], None, *sharding.spec[1:])
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, spec))


def rows_in_order(x, rows: int):
    """The first `rows` of a stack of the n parts that `strided_rows` made: (n, rows / n, ...)."""
    x = x.swapaxes(0, 1)
    shape, sharding = (x.shape[0] * x.shape[1], *x.shape[2:]), jax.typeof(x).sharding
    if not is_explicit(sharding.mesh) or not any(sharding.spec[:2]):
        return x.reshape(shape)[:rows]
    spec = PartitionSpec(sharding.spec[0], *sharding.spec[2:])
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, spec))[:rows]


def stack_of_zeros(n: int, x):
    """Zeros for n arrays with the shape, dtype and explicit sharding of x, inside a program."""
    sharding, zeros = jax.typeof(x).sharding, jnp.zeros((n, *x.shape), x.dtype)
    if not is_explicit(sharding.mesh):
        return zeros
    spec = PartitionSpec(None, *sharding.spec)
    return jax.sharding.reshard(zeros, NamedSharding(sharding.mesh, spec))


def spread_like(x, like):
    """The array with the explicit sharding of another (or of its shape), inside a program."""
    sharding = jax.typeof(like).sharding
    return jax.sharding.reshard(x, sharding) if is_explicit(sharding.mesh) else x


def constants_like(x, tree):
    """The tree, with constants on the explicit mesh of x, spread along axis 0 as x is."""
    sharding = jax.typeof(x).sharding
    if not is_explicit(sharding.mesh):
        return tree
    sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    is_constant = lambda leaf: jax.typeof(leaf).sharding.mesh.empty
    place = lambda leaf: jax.sharding.reshard(leaf, sharding) if is_constant(leaf) else leaf
    return jax.tree.map(place, tree)


def rows_at(indices, x):
    """Some rows of an array, outside of a program; on an explicit mesh whole on each device."""
    mesh = _mesh_of(x)
    if mesh is None or not is_explicit(mesh):
        return x[indices]
    return x.at[indices].get(out_sharding=_rows_sharding(mesh, None))


def is_on_mesh(x, mesh) -> bool:
    """Whether an array is on a mesh."""
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def put(tree, where):
    """`jax.device_put` of a user's arrays, with copies of NumPy arrays.

    JAX on a CPU uses the memory of the user, and a transfer to another device may read it after
    `device_put` has returned: a buffer that is refilled meanwhile would arrive with its new values.
    """
    return jax.device_put(with_numpy_copied(tree), where)


def with_numpy_copied(tree):
    """The tree with copies of NumPy arrays, in memory that JAX on a CPU uses without a copy."""
    return jax.tree.map(lambda x: aligned_copy(x) if isinstance(x, np.ndarray) else x, tree)


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Empty memory aligned to 64 bytes, which JAX on a CPU uses without a copy."""
    bytes = math.prod(shape) * dtype.itemsize
    if bytes < ALIGNED_FROM or dtype.hasobject:
        return np.empty(shape, dtype)
    whole = np.empty(bytes + 64, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + bytes].view(dtype).reshape(shape)


def aligned_copy(x: np.ndarray) -> np.ndarray:
    """A copy in aligned memory."""
    out = aligned_empty(x.shape, x.dtype)
    np.copyto(out, x)
    return out


def _put_leaves(leaves: list, shardings: list, shared: bool) -> list:
    """Arrays at their shardings; each of several processes gives its part."""
    leaves = with_numpy_copied(leaves) if shared else leaves
    if all(s.is_fully_addressable for s in shardings):
        return jax.device_put(leaves, shardings)
    local = jax.make_array_from_process_local_data
    return [local(s, np.asarray(x)) for x, s in zip(leaves, shardings, strict=True)]
