"""The ways to place a state that `plan` tries: data parallel, ZeRO-1, fully sharded, on the host.

`ts.shard` chooses the sharding of each array. This file only chooses its arguments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tsunax._core import Device, PyTree, device_kinds, placement, trees
from tsunax.devices import meshes, selection
from tsunax.errors import DeviceError, StateError, WrongTypeError, told

_PARTS = ("moments", "average", "masters")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A way to place a state, with the shapes of the state there."""

    name: str
    state: PyTree
    make_mesh: Callable[[Sequence[Device] | None], Mesh] | None = (
        None  # None: leave it in its place
    )
    zero1: bool = False
    host: tuple[str, ...] = ()

    def shard(self, make: PyTree, devices: Sequence[Device] | None = None) -> PyTree:
        """A state, or the result of a function `make`, in this layout; perhaps on new `devices`."""
        is_function = callable(make) and jax.tree_util.all_leaves([make])
        if self.make_mesh is not None:
            return meshes.shard(make, self.make_mesh(devices), zero1=self.zero1, host=self.host)
        if not is_function:
            return make
        shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(self.state)]
        is_spread = any(s is not None and len(s.device_set) > 1 for s in shardings)
        tree = jax.tree.unflatten(jax.tree.structure(self.state), shardings)
        return jax.jit(make, out_shardings=tree)() if is_spread else make()


def layouts_of(
    state: PyTree, devices: Any, vary: Container[str]
) -> tuple[list[Layout], dict[str, str]]:
    """The layouts of a state on devices, faster layouts first; and a text on each variable."""
    is_function = callable(state) and jax.tree_util.all_leaves([state])
    shapes = jax.eval_shape(state) if is_function else state
    if devices is None:
        text = "not varied, because there are no devices="
        return [Layout("as given", shapes)], {"layout": text, "host": text}
    without_sharding = lambda x: jax.ShapeDtypeStruct(np.shape(x), trees.dtype_of(x))
    shapes = jax.tree.map(without_sharding, shapes)
    layouts: list[Layout] = []
    for name, make_mesh, zero1 in _meshes(devices, "layout" in vary):
        layout = Layout(name, meshes.shard(shapes, make_mesh(None), zero1=zero1), make_mesh, zero1)
        if not any(_shardings(layout) == _shardings(earlier) for earlier in layouts):
            layouts.append(layout)
    varied = {"layout": "; ".join(layout.name for layout in layouts)}
    host_layouts, varied["host"] = _with_host(shapes, layouts, "host" in vary)
    return [*layouts, *host_layouts], varied


def _meshes(devices: Any, is_varied: bool) -> list[tuple[str, Callable[[Any], Mesh], bool]]:
    """The name, the mesh and `zero1` of each layout on devices."""
    if isinstance(devices, Mesh):
        axes_text = " x ".join(f"{name} {n}" for name, n in devices.shape.items())
        options: list[tuple[str, Callable[[Any], Mesh]]] = [(axes_text, lambda _: devices)]
    else:
        if isinstance(devices, str):
            is_kind = device_kinds.kind_and_index(devices)[0] in device_kinds.KINDS
            devices = (selection.devices if is_kind else selection.topology)(devices)
        else:
            if not isinstance(devices, Sequence):
                got, expected = trees.describe(devices), "a list of devices, a mesh or a topology"
                raise WrongTypeError("devices", "plan()", got, expected)
            devices = selection.devices(devices)
        count = len(devices)
        per_host = sum(device.process_index == devices[0].process_index for device in devices)
        axes: list[dict[str, int]] = [{"data": count}]
        if is_varied and count > 1:
            several_hosts = [{"data": count // per_host, "fsdp": per_host}]
            axes += several_hosts * (1 < per_host < count) + [{"data": 1, "fsdp": count}]
        named = lambda sizes: " x ".join(f"{name} {n}" for name, n in sizes.items() if n > 1)
        mesh_on = lambda new_devices, sizes: meshes.mesh(**sizes, devices=new_devices or devices)
        options = [(named(x) or "one device", functools.partial(mesh_on, sizes=x)) for x in axes]
    plain = [(name, make_mesh, False) for name, make_mesh in options]
    name, make_mesh, _ = plain[0]
    return [plain[0], *[(f"{name}, zero1", make_mesh, True)] * is_varied, *plain[1:]]


def _shardings(layout: Layout) -> list[Any]:
    """For each array its sharding, the same for equal placements on differently named axes."""
    maps = (x.sharding.devices_indices_map(x.shape) for x in jax.tree.leaves(layout.state))
    return [{device: str(index) for device, index in places.items()} for places in maps]


def _with_host(
    shapes: PyTree, layouts: Sequence[Layout], is_varied: bool
) -> tuple[list[Layout], str]:
    """The layouts with parts of the state in the host's memory; and a text on them."""
    if not is_varied:
        return [], "not varied"
    assert layouts[0].make_mesh is not None
    mesh = layouts[0].make_mesh(None)
    platform = mesh.devices.flat[0].platform
    if platform == "cpu":
        return [], "not varied, because the memory of a CPU is that of the host"
    if platform == "gpu" and placement.is_absent(mesh):
        return [], "not varied, because without the GPU it is counted on the device"
    parts: list[str] = []
    reason = ""
    for part in _PARTS:
        try:
            meshes.shard(shapes, mesh, host=part)
            parts.append(part)
        except (DeviceError, StateError) as error:
            reason = reason or told(error)
    if not parts:
        return [], f"not varied: {reason}"
    hosts = dict.fromkeys([(parts[0],), tuple(parts)])
    host_layouts: list[Layout] = []
    for layout in layouts:
        assert layout.make_mesh is not None
        for host in hosts:
            state = meshes.shard(shapes, layout.make_mesh(None), zero1=layout.zero1, host=host)
            host_layouts.append(dataclasses.replace(layout, state=state, host=host))
    return host_layouts, "; ".join("+".join(host) for host in hosts)
