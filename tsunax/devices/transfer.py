"""Moving trees of arrays to a device and to the host.

params = ts.to_device(params)  # the preference, then TPU, GPU, CPU
"""

from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Sharding

from tsunax._core import Device, PyTree, checks, device_kinds, placement, trees
from tsunax.errors import DeviceError, WrongTypeError


def _has_to_move(x: Any, place: Sharding) -> bool:
    if not trees.is_array(x) or not checks.is_numeric(x):
        return False
    # an uncommitted array would follow the next committed one to another device
    is_committed = trees.is_placed(x) and x.committed
    return not is_committed or not x.sharding.is_equivalent_to(place, x.ndim)


def to_device(tree: PyTree, device: str | Device | Sharding = "auto") -> PyTree:
    """A tree with its arrays on a device: a `jax.Device`, a kind, `(kind, number)` or a sharding.

        jax.tree.map(lambda x: jax.device_put(x, device), tree)  # other leaves stay as they are

    An array that is there already stays the same object; an array that occurs twice stays one.
    NumPy arrays are copied (`device_put` alone may read their memory later), in JAX's widths:
    float64 becomes float32 unless x64 is on. Raises WrongTypeError for a loader: use
    `prefetch(data, device)`. JAX raises for a deleted array, and for a dtype that it does not have.

    >>> x = to_device({"w": np.ones(2), "name": "relu"}, "cpu")
    >>> x["w"].device == jax.devices("cpu")[0], x["name"], to_device(x, "cpu")["w"] is x["w"]
    (True, 'relu', True)
    """
    place = device_kinds.as_sharding(device, "to_device()")
    is_plain = isinstance(tree, str | bytes) or hasattr(tree, "shape")
    if hasattr(tree, "__iter__") and jtu.all_leaves([tree]) and not is_plain:
        raise WrongTypeError(
            "tree",
            "to_device()",
            got=trees.describe(tree),
            expected="a tree of arrays",
            fix="For a loader: ts.prefetch(data, device).",
        )
    leaves, treedef = jax.tree.flatten(tree)
    moving = {id(x): x for x in leaves if _has_to_move(x, place)}
    moved = dict(zip(moving, placement.put([*moving.values()], place), strict=True))
    return treedef.unflatten([moved.get(id(x), x) for x in leaves])


def to_host(tree: PyTree) -> PyTree:
    """A tree with its JAX arrays as copies in NumPy arrays.

    An array that occurs twice stays one. Keys stay JAX arrays, on the CPU if JAX has one; other
    leaves stay as they are. `np.asarray` would keep the arrays from being donated; a copy does not.

    >>> to_host({"name": "relu", "w": jax.numpy.ones(2)})
    {'name': 'relu', 'w': array([1., 1.], dtype=float32)}
    """
    leaves, treedef = jax.tree.flatten(tree)
    keys = {id(x): x for x in leaves if trees.is_key(x)}
    arrays = {id(x): x for x in leaves if isinstance(x, jax.Array) and id(x) not in keys}
    for x in arrays.values():
        # All transfers run at once. Arrays in the host's memory need none, and in jax 0.11 an
        # array on a CPU cannot be donated after `copy_to_host_async`.
        if next(iter(x.sharding.device_set)).platform != "cpu" and not trees.is_offloaded(x):
            x.copy_to_host_async()
    moved: dict[int, Any] = {i: np.array(x) for i, x in arrays.items()}
    if keys and (cpu := device_kinds.devices_of_kind("cpu")[0]):
        moved |= jax.device_put(keys, cpu[0])
    return treedef.unflatten([moved.get(id(x), x) for x in leaves])


def device_of(tree: PyTree) -> Device | None:
    """The device of the JAX arrays of a tree; None if there are none.

    Raises DeviceError, with two paths, for arrays on several devices.

    >>> device_of({"w": jax.numpy.ones(2), "b": "x"}) == jax.devices()[0], device_of(np.ones(2))
    (True, None)
    """
    path_of_device: dict[Device, str] = {}
    for path, leaf in trees.leaves_at("tree", tree):
        if trees.is_placed(leaf):
            path_of_device |= dict.fromkeys(leaf.sharding.device_set, path)
    if len(path_of_device) > 1:
        places = [f"{path} on {device}" for device, path in path_of_device.items()]
        raise DeviceError(
            "tree",
            "device_of()",
            got=trees.listed(places, 2),
            expected="one device",
            fix="to_device(tree, device) brings them together.",
        )
    return next(iter(path_of_device), None)
