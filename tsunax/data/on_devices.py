"""Batches on devices: how their rows are spread, and rows gathered from resident arrays."""

import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tsunax._core import Device, Function, PyTree, Scalar, device_kinds, trees
from tsunax._core.placement import data_axes
from tsunax.errors import warn


def placement(device: Device, where: str) -> Device:
    """The sharding of batches, rows over the devices; None for JAX's default device."""
    if device is True:
        return None
    if isinstance(device, Mesh):
        return NamedSharding(device, PartitionSpec(data_axes(device)))
    return device_kinds.as_sharding(device, where)


def device_of_arrays(leaves: Sequence[PyTree]) -> Device:
    """The device of the JAX arrays of data, which stay there; None if the data stay on the host.

    Arrays on the CPU are on the host, unless they were put on one of several CPU devices and JAX
    has CPU devices only. Warns of arrays on several devices, which are read back.
    """
    arrays = list(filter(trees.is_placed, leaves))
    is_in_memory = lambda x: trees.is_array(x) and not isinstance(x, np.memmap)
    if not arrays or not all(map(is_in_memory, leaves)):
        return None  # without starting JAX
    backend = jax.default_backend()
    on_backend = lambda x: next(iter(x.devices())).platform == backend
    if not (arrays := [x for x in arrays if on_backend(x) and (x.committed or backend != "cpu")]):
        return None
    devices = set[Device]().union(*(x.devices() for x in arrays))
    if len(devices) > 1:
        text = f"arrays at batches(): those on {len(devices)} devices are read back to the host"
        warn(f"{text}. To have all of them on each device, give batches(..., device=mesh).")
        return None
    return SingleDeviceSharding(devices.pop()) if any(x.committed for x in arrays) else True


def spans_processes(device: Device) -> bool:
    """Whether `device` is a mesh or a sharding with devices of other processes."""
    if isinstance(device, Mesh):
        return device.is_multi_process
    return isinstance(device, NamedSharding) and not device.is_fully_addressable


def sharding_of(shape: tuple[int, ...], sharding: Device, axis: int = 0) -> Device:
    """The sharding of an array with rows along an axis. ValueError if they do not divide."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    rows = sharding.spec[0] if len(sharding.spec) and shape else None
    spec = PartitionSpec(*[None] * axis, rows) if rows else PartitionSpec()
    sharding = NamedSharding(sharding.mesh, spec)
    sharding.shard_shape(shape)
    return sharding


def put_tree(tree: PyTree, sharding: Device) -> PyTree:
    """Arrays that every process has, with a sharding that may span all processes."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    local = lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x))
    return jax.tree.map(local, tree)


def gather(
    resident: PyTree, order: jax.Array | None, first: Scalar, shape: tuple[int, ...]
) -> PyTree:
    """Rows `order[first : first + prod(shape)]` of resident arrays as `(*shape, ...)`, inside jit.

    In a fused loop, batch i of an epoch: `gather(resident, order, i * rows, (rows,))`, with
    `data.resident` and `data.device_order(epoch)` passed to the program as arguments. Without an
    order (None) rows are taken in sequence.
    """
    n = math.prod(shape)
    if order is None:
        rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, n), resident)
    else:
        chosen = jax.lax.dynamic_slice_in_dim(order, first, n)
        options = {"mode": "promise_in_bounds", "unique_indices": True}
        rows = jax.tree.map(lambda x: x.at[chosen].get(**options), resident)
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), rows)


@functools.lru_cache(maxsize=64)
def gather_to(sharding: Device, shape: tuple[int, ...], ordered: bool) -> Function:
    """`gather` compiled: for rows that the host chose, or for a sequence from its first row on."""
    placed = sharding_of(shape, sharding, len(shape) - 1)
    take = lambda resident, rows: gather(resident, *((rows, 0) if ordered else (None, rows)), shape)
    return jax.jit(take, out_shardings=placed if isinstance(placed, NamedSharding) else None)
