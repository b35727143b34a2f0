"""A training state over many devices: data parallel, fully sharded, tensor parallel.

    mesh = ts.mesh()                  # all devices, data parallel
    state = ts.shard(state, mesh)     # or ts.shard(lambda: ts.setup(...), mesh): never whole
    state, info = step(state, batch)  # splits the rows of batches; numbers as on one device

JAX computes the same numbers over sharded arrays, and inserts the communication. This file only
chooses a `PartitionSpec` for each parameter, and for its moments, averages and master copies. The
step keeps these shardings, and spreads the rows of batches (`_core/placement.py`).
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tsunax._core import (
    Device,
    PyTree,
    checks,
    device_kinds,
    patterns,
    placement,
    processes,
    tables,
    trees,
)
from tsunax.devices import selection
from tsunax.errors import DeviceError, PatternError, StateError, WrongTypeError, told, unknown
from tsunax.rules.leaf_owners import owners_of
from tsunax.state import TrainState, master_params, trained_part
from tsunax.states import States, member_axes

T = TypeVar("T")
_AXES = ("data", "fsdp", "tensor")


@checks.naming_arguments
def mesh(
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    *,
    devices: Sequence[Device] | str | None = None,
    explicit: bool = False,
) -> Mesh:
    """A mesh of devices with the axes `data`, `fsdp` and `tensor`; -1 takes the remaining devices.

    Rows of a batch are spread over `data` and `fsdp`; parameters and their moments over `fsdp` and
    `tensor`.

    Args:
      devices: a list, or an argument of `devices`; by default all devices of all processes.
      explicit: whether shardings are part of the types of arrays (`AxisType.Explicit`), or the
        compiler chooses them.

    Raises DeviceError if the sizes do not multiply to the number of devices.

    >>> mesh().axis_names
    ('data', 'fsdp', 'tensor')
    """
    devices = jax.devices() if devices is None else selection.devices(devices)
    sizes = dict(zip(_AXES, (data, fsdp, tensor), strict=True))
    fixed = math.prod(size for size in sizes.values() if size != -1)
    shape = [len(devices) // max(fixed, 1) if size == -1 else size for size in sizes.values()]
    if min(shape) < 1 or math.prod(shape) != len(devices):
        raise DeviceError(
            "mesh",
            "",
            got=" x ".join(f"{name}={size}" for name, size in sizes.items()),
            expected=f"sizes that multiply to {len(devices)} devices, -1 for one at most",
            fix="Fewer devices: devices=jax.devices()[:n].",
        )
    kinds = (AxisType.Explicit if explicit else AxisType.Auto,) * len(_AXES)
    return jax.make_mesh(tuple(shape), _AXES, axis_types=kinds, devices=devices)


@checks.naming_arguments
def shard(
    state: T,
    mesh: Mesh | Device,
    rules: Any = None,
    *,
    logical: Mapping[str, Any] | None = None,
    zero1: bool = False,
    host: str | Sequence[str] = (),
) -> T:
    """The same state over the devices of a mesh.

    The axes of a parameter are spread over axes of the mesh by the first of these that applies:

    1. `rules`, by pattern: `{"**/mlp/up/kernel": P(None, "tensor"), "norm/**": None}`. None keeps
       an array whole on each device. Patterns for `States` begin with the member, or "carry":
       `{"carry/**": P("data")}`.
    2. The names of its axes in flax's metadata (`nn.with_partitioning`, `nnx.Param(sharding=...)`):
       axes of the mesh, or names that `logical` maps to them, `{"embed": "fsdp", "mlp": "tensor"}`.
    3. Whole on each device.

    Then its largest free axis that divides is spread over `fsdp`, unless a rule said None or the
    array has fewer than 1,024 elements. Moments, averages and master copies follow their parameter;
    other arrays of the optimizer and the model state are spread over `fsdp` by their own shape.
    Other fields (clock, key, live numbers) are whole.

    Args:
      state: a `TrainState`, `States`, any tree of arrays, or a function that makes one, of which no
        array is ever whole on one device. Shapes (`jax.eval_shape`) come back with shardings; on a
        mesh of `devices.topology` all do.
      mesh: from `mesh`, or any `jax.sharding.Mesh`. Or devices: a kind for all of it ("gpu"),
        "gpu:1", `("gpu", 1)` or a `jax.Device` for one.
      zero1: spread moments, averages and master copies over all data axes, and leave the parameters
        as they are.
      host: parts of the state to keep in the host's memory, of "moments" (the state of the rule),
        "average", "masters": the step moves them to the devices for the update, and back. Their
        arrays of fewer than 1,024 elements stay on the devices.

    Raises PatternError for a rule that matches nothing, DeviceError for one that the mesh or the
    shape cannot follow and for devices without `pinned_host` memory, StateError for an unknown part
    in `host`. Source of the scheme: ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054),
    GSPMD (Xu et al. 2021, arXiv:2105.04663).

    >>> import jax.numpy as jnp
    >>> import tsunax as ts
    >>> state = shard(ts.setup(ts.rules.adam(1e-3), {"w": jnp.zeros((8, 4))}), mesh())
    >>> len(state.params["w"].sharding.device_set) == len(jax.devices())
    True
    """
    mesh = _as_mesh(mesh)
    if not isinstance(mesh, Mesh):
        raise WrongTypeError(
            "mesh",
            "shard()",
            got=trees.describe(mesh),
            expected="a Mesh",
            fix="The order is shard(state, ts.mesh()); specs of leaves are rules.",
        )
    checks.check_flags("shard()", zero1=zero1)
    choice = _Choice(mesh, dict(rules or {}), dict(logical or {}), zero1)
    make = state if callable(state) and jax.tree_util.all_leaves([state]) else None
    like = state if make is None else jax.eval_shape(make)
    kinds = _memory_kinds(like, [host] if isinstance(host, str) else host, mesh)
    shardings = [
        NamedSharding(mesh, spec, memory_kind=kind)
        for spec, kind in zip(choice.of_any(like), kinds, strict=True)
    ]
    sharding_of_leaf = jax.tree.unflatten(jax.tree.structure(like), shardings)
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    if placement.is_absent(mesh) or any(map(is_shape, jax.tree.leaves(state))):
        shape = lambda x, s: jax.ShapeDtypeStruct(np.shape(x), trees.dtype_of(x), sharding=s)
        return jax.tree.map(shape, like, sharding_of_leaf)
    if make is not None:
        with jax.set_mesh(mesh):
            return _same_on_all_processes(jax.jit(make, out_shardings=sharding_of_leaf)(), mesh)
    return _put_tree(_same_on_all_processes(state, mesh), sharding_of_leaf)


def _as_mesh(place: Any) -> Any:
    """The mesh of a device, or of the devices of a kind; other values are returned unchanged."""
    if device_kinds.is_one_device(place):
        return mesh(devices=[device_kinds.as_device(place, "shard()")])
    is_kind = isinstance(place, str) and place.lower() in device_kinds.KINDS
    return mesh(devices=place) if is_kind else place


def _memory_kinds(state: PyTree, host: Collection[str], mesh: Mesh) -> list[str | None]:
    """For each leaf of a state "pinned_host", or None for the memory of the devices."""
    parts_of_states: set[str] = set()
    flags: list[bool] = []
    for part in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, TrainState)):
        if not isinstance(part, TrainState):
            flags.append(False)
            continue
        for field in part._fields:
            leaves, like = jax.tree.leaves(getattr(part, field.name)), field.metadata["like"]
            name = "moments" if like == "rule" else field.name
            if leaves and like in ("rule", "trained", "average"):
                parts_of_states.add(name)
            flags += [name in host and math.prod(np.shape(x)) >= placement.SMALL for x in leaves]
    if absent := [name for name in host if name not in parts_of_states]:
        raise StateError(
            unknown("part", "shard(host=...)", str(absent[0]), sorted(parts_of_states))
        )
    try:  # a CPU has such memory in jax 0.7.2, but its programs can only read it
        host_sharding = NamedSharding(mesh, P(), memory_kind="pinned_host" if host else None)
        _ = host and jax.jit(lambda: np.float32(0), out_shardings=host_sharding).lower().compile()
    except Exception as error:  # the backend may raise any class
        raise DeviceError(
            "host memory",
            "shard(host=...)",
            got=told(error),
            expected="devices whose programs can use 'pinned_host'",
        ) from error
    return ["pinned_host" if flag else None for flag in flags]


def _same_on_all_processes(state, mesh):
    """The state. Raises if its values differ between processes, which hold it as one array."""
    everyone = processes.current()
    if everyone.spans_all(mesh.devices.flat):
        everyone.compare("shard()", lambda: {"state": state}, processes.LAST)
    return state


def _put_tree(tree, sharding_of_leaf):
    shardings = jax.tree.leaves(sharding_of_leaf)
    if all(s.is_fully_addressable for s in shardings):
        return placement.put(tree, sharding_of_leaf)

    def from_each_process(x, sharding):  # each process has all rows, and gives its part
        array = placement.with_numpy_copied(trees.on_host(x))
        spread = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
        is_key = trees.is_key(x)
        return jax.random.wrap_key_data(spread, impl=jax.random.key_impl(x)) if is_key else spread

    return jax.tree.map(from_each_process, tree, sharding_of_leaf)


@dataclasses.dataclass(frozen=True)
class _Choice:
    mesh: Mesh
    rules: Mapping[Any, Any]
    logical: Mapping[str, Any]
    zero1: bool

    def of_params(self, params) -> list[P]:
        """A spec for each leaf, in flatten order."""
        ruled, named, specs = self._ruled(params), self._named(params), []
        for i, (name, _, leaf) in enumerate(trees.leaves_with_names(params)):
            path, spec = trees.shown_path(name), ruled.get(i, named.get(i, P()))
            is_final = i in ruled and spec == P()
            spec = self._checked(spec, np.shape(leaf), path)
            specs.append(spec if is_final else self._spread(spec, np.shape(leaf), "fsdp"))
        return specs

    def of_any(self, state: PyTree) -> list[P]:
        """The specs of all leaves of a state, of `States`, or of another tree."""
        if (axes := member_axes(state, self.mesh)) is not None:
            return [P(axes)] * len(jax.tree.leaves(state))
        if isinstance(state, TrainState):
            return self.of_state(state, self.of_params(state.params))
        if not isinstance(state, States):
            return self.of_params(state)
        carry = {"carry": state.carry} if jax.tree.leaves(state.carry) else {}
        parts = carry | {name: s.params for name, s in state.members.items()}
        # one tree, so that a pattern may match leaves of several members
        specs = jax.tree.unflatten(jax.tree.structure(parts), self.of_params(parts))
        specs_of_part = {name: jax.tree.leaves(part) for name, part in specs.items()}
        members = (self.of_state(s, specs_of_part[name]) for name, s in state.members.items())
        return sum(members, [P(), P(), *specs_of_part.get("carry", [])])  # clock and tally first

    def of_state(self, state: TrainState, params: list[P]) -> list[P]:
        """The specs of all leaves: moments, averages and masters follow their parameter."""
        trained = itertools.compress(params, state.plan.selected or [True] * len(params))
        shapes = [np.shape(x) for x in jax.tree.leaves(trained_part(state))]
        follow = [self._moment_spec(spec, x) for spec, x in zip(trained, shapes, strict=True)]

        owners = owners_of(state.plan.init, state.opt_state, state.numbers, master_params(state))
        shapes_of_rule = map(np.shape, jax.tree.leaves(state.opt_state))
        by_own_shape = lambda x: self._moment_spec(self._spread(P(), x, "fsdp"), x)
        opt_state = [
            follow[i] if i is not None and x == shapes[i] else by_own_shape(x)
            for i, x in zip(owners, shapes_of_rule, strict=True)
        ]
        roles = {"params": params, "rule": opt_state, "trained": follow, "average": follow}
        specs: list[P] = []
        for field in state._fields:
            leaves, like = jax.tree.leaves(getattr(state, field.name)), field.metadata["like"]
            specs_of_field = roles.get(like, [])
            if like == "free":
                specs_of_field = [self._spread(P(), np.shape(x), "fsdp") for x in leaves]
            specs += [*specs_of_field[: len(leaves)], *[P()] * (len(leaves) - len(specs_of_field))]
        return specs

    def _ruled(self, params) -> dict[int, P]:
        spec_of_leaf: dict[int, P] = {}  # the first rule that matches decides
        for pattern, spec in self.rules.items():
            spec = P(*((spec,) if isinstance(spec, str) else spec or ()))
            flags = patterns.select(pattern, params, "shard()")
            matches = itertools.compress(itertools.count(), flags)
            spec_of_leaf = dict.fromkeys(matches, spec) | spec_of_leaf
        return spec_of_leaf

    def _named(self, params) -> dict[int, P]:
        """The specs in flax's metadata, by number of the leaf."""
        named = {i: names for i, names in enumerate(trees.axis_names(params)) if names}
        used = {name for names in named.values() for name in names if name}
        if unused := [name for name in self.logical if name not in used]:
            raise PatternError(unknown("logical axis", "shard()", unused[0], sorted(used)))
        axes_by_name = {name: name for name in self.mesh.shape} | dict(self.logical)
        axis_of = lambda name: name if isinstance(name, tuple) else axes_by_name.get(name)
        return {i: P(*map(axis_of, names)) for i, names in named.items()}

    def _checked(self, spec: P, shape, path: str) -> P:
        try:
            sharding = NamedSharding(self.mesh, spec)
            sharding.check_compatible_aval(tuple(shape))
            sharding.shard_shape(tuple(shape))
        except Exception as error:
            raise DeviceError(
                f"sharding {spec}",
                path,
                got=told(error),
                expected="axes of the mesh, each of them once, "
                f"that divide the shape {tuple(shape)}",
            ) from error
        return spec

    def _spread(self, spec: P, shape: tuple[int, ...], *names: str) -> P:
        """The spec, its largest free axis that divides spread over the unused of `names`."""
        used = {name for entry in spec for name in placement.axes_in(entry)}
        is_free = lambda name: self.mesh.shape.get(name, 1) > 1 and name not in used
        names = tuple(filter(is_free, names))
        parts = math.prod(self.mesh.shape[name] for name in names)
        if parts == 1 or math.prod(shape) < placement.SMALL:
            return spec
        entries: list[Any] = [*spec, *[None] * (len(shape) - len(spec))]
        free = [i for i, n in enumerate(shape) if entries[i] is None and n % parts == 0]
        if not free:
            return spec
        entries[max(free, key=lambda axis: shape[axis])] = names[0] if len(names) == 1 else names
        return P(*entries)

    def _moment_spec(self, spec: P, shape: tuple[int, ...]) -> P:
        """The spec of a moment, made from the spec of its parameter."""
        return self._spread(spec, shape, *placement.data_axes(self.mesh)) if self.zero1 else spec


@dataclasses.dataclass(frozen=True)
class Placement:
    """The result of `describe_sharding(tree)`: prints as a table.

    `rows` are (path, dtype and shape, sharding, bytes on one device). `bytes` is a dict by device,
    `total` the bytes of the tree, counted once, `host` the bytes in the host's memory.
    """

    rows: tuple[tuple[str, str, str, int], ...]
    bytes: Mapping[str, int]  # on each device of this process
    total: int
    host: int = 0  # for the devices of this process
    _repr_html_ = tables.folded

    def __repr__(self) -> str:
        size = trees.bytes_str
        lines = tables.aligned([(*texts, size(n) if n else "") for *texts, n in self.rows])
        max_bytes = size(max(self.bytes.values(), default=0))
        host_text = f", {size(self.host)} in host memory" if self.host else ""
        device_text = f"{max_bytes} at most on each of {len(self.bytes)}"
        lines.append(f"{size(self.total)} in all, {device_text}{host_text}")
        return "\n".join(lines)


def describe_sharding(tree: PyTree) -> Placement:
    """How each array of a tree is spread, and the bytes that each device holds.

    >>> import jax.numpy as jnp
    >>> import tsunax as ts
    >>> describe_sharding(ts.shard({"w": jnp.zeros((64, 64))}, mesh(fsdp=-1, data=1)))
    ['w']  float32[64, 64]  ...
    """
    rows, device_bytes, total, on_host = [], {}, 0, 0
    for path, x in trees.leaves_at("", tree):
        kind = f"{trees.dtype_of(x)}{list(np.shape(x))}"
        word = "traced" if trees.is_traced(x) else "donated" if trees.is_gone(x) else "host"
        sharding: Any = getattr(x, "sharding", None)
        if sharding is None or word != "host":
            rows.append((path, kind, word, 0))
            continue
        if isinstance(x, jax.Array):
            x = jax.random.key_data(x) if trees.is_key(x) else x
            parts = [(str(shard.device), shard.data.nbytes) for shard in x.addressable_shards]
        else:  # a shape, perhaps on devices that are not here
            n = math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
            parts = [(str(device), n) for device in sharding.device_set]
        for device, n in parts:
            device_bytes[device] = device_bytes.get(device, 0) + (0 if trees.is_offloaded(x) else n)
        on_host += sum(n for _, n in parts) if trees.is_offloaded(x) else 0
        total += math.prod(x.shape) * x.dtype.itemsize
        rows.append((path, kind, _sharding_text(x), max((n for _, n in parts), default=0)))
    return Placement(tuple(rows), device_bytes, total, on_host)


def _sharding_text(x: Any) -> str:
    if not isinstance(x.sharding, NamedSharding):
        devices = x.sharding.device_set
        return str(next(iter(devices))) if len(devices) == 1 else f"{len(devices)} devices"
    mesh, spec = x.sharding.mesh, x.sharding.spec
    parts = []
    for axis, names in enumerate(spec):
        names = placement.axes_in(names)
        if any(mesh.shape[name] > 1 for name in names):
            sizes = " x ".join(f"{name}={mesh.shape[name]}" for name in names)
            parts.append(f"axis {axis} over {sizes}")
    words = "; ".join(parts) or f"whole on {mesh.size}"
    return f"{words}, in host memory" if trees.is_offloaded(x) else words
