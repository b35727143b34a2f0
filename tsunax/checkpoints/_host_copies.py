"""The saved part of a state, on the host: checked, copied, and searched for numbers not finite."""

import collections
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tsunax._core import checks, trees
from tsunax._state.state_fields import averages_of
from tsunax.checkpoints import _user_values, leaves
from tsunax.checkpoints._blocks import Blocks, block_name, bounds_of, parse_name, whole
from tsunax.checkpoints.checksums import Bounds
from tsunax.checkpoints.leaves import Leaf, Tree
from tsunax.checkpoints.manifest import Parts
from tsunax.errors import StateError, WrongTypeError
from tsunax.state import donated, overwritten_part, trained_part


def check_saveable(tree: Tree) -> None:
    if not tree.leaves:
        raise WrongTypeError("state", "save()", "a tree without leaves", "at least one array")
    for path, x in tree.leaves:
        where = leaves.show("state", path)
        if trees.is_traced(x):
            fix = "Save outside of jit, vmap and scan."
            raise WrongTypeError("leaf", where, "a traced array", "a concrete one", fix)
        if trees.is_gone(x):
            raise StateError(donated("save()"))
        if isinstance(x, jax.ShapeDtypeStruct):
            raise WrongTypeError("leaf", where, "a ShapeDtypeStruct", "an array")


def check_members(tree: Tree, where: str) -> None:
    for state in tree.states.values():
        if not (is_local(state.clock) or state.clock.is_fully_replicated):
            got = "members on devices of several processes"
            fix = "Let each process have members of its own, and save them with tsunax.exchange."
            raise StateError("population", where, got, "of one", fix)


def step_to_save(tree: Tree, step) -> int:
    if step is None:
        if not tree.states:
            got, fix = "a tree without a TrainState", "save(state, step=...)."
            raise WrongTypeError("state", "save()", got, "one, or step=", fix)
        step = int(np.max(np.asarray(tree.clocks[0])[..., 0]))
    checks.check_count(step, "save()", "step", 0)
    return int(step)


def is_local(x) -> bool:
    """Whether each process has the whole leaf: it is no array over several processes."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def holders_of(sharding, shape) -> dict[Bounds, list[int]]:
    processes_of: dict[Bounds, set[int]] = {}
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        processes_of.setdefault(bounds_of(index, shape), set()).add(device.process_index)
    return {bounds: sorted(processes) for bounds, processes in processes_of.items()}


def copied(tree: Tree, process: int) -> tuple[list[Leaf], Blocks]:
    """Every leaf, and the blocks that this process saves, copied to the host.

    A block that several processes hold is written by the process with the fewest bytes to write.
    All processes choose the same writer, because each has all shardings.
    """
    described = [leaves.leaf_of(path, x, name)
             for (path, x), name in zip(tree.leaves, tree.names, strict=True)]  # fmt: skip
    source_of_block, bytes_to_write = {}, collections.Counter()
    for leaf, (_, x) in zip(described, tree.leaves, strict=True):
        if not leaf.dtype:
            continue
        data = jax.random.key_data(x) if trees.is_key(x) else x
        holders = {whole(leaf.shape): [0]} if is_local(x) else holders_of(data.sharding, leaf.shape)
        size = np.dtype(leaf.dtype).itemsize
        for bounds, processes in holders.items():
            writer = min(processes, key=lambda i: (bytes_to_write[i], i))
            bytes_to_write[writer] += math.prod(stop - start for start, stop in bounds) * size
            if writer == process and math.prod(leaf.shape):
                name = block_name(leaf.name, bounds, leaf.shape)
                source_of_block[name] = data, _shards_of(data, bounds, is_local(x))
    for s in (s for _, shards in source_of_block.values() for s in shards):
        if not _is_host_memory(s):
            s.data.copy_to_host_async()  # all transfers run at once
    return described, {name: _on_host(*source) for name, source in source_of_block.items()}


def _shards_of(data, bounds: Bounds, is_whole: bool) -> list:
    if not isinstance(data, jax.Array):
        return []
    shards = data.addressable_shards
    if is_whole:
        return [s for s in shards if s.replica_id == 0]
    return [s for s in shards if bounds_of(s.index, data.shape) == bounds][:1]


def _is_host_memory(shard) -> bool:
    """Whether NumPy reads a shard without a copy: such a view prevents donation of the state.

    On a GPU the next step would fail: "Donation requested for buffer with external reference".
    """
    return shard.device.platform == "cpu" or trees.is_offloaded(shard.data)


def _on_host(data, shards: list) -> np.ndarray:
    if not shards:
        return np.array(data)
    if len(shards) == 1:  # a transfer from a device makes a copy by itself
        return np.array(shards[0].data, copy=_is_host_memory(shards[0]) or None)
    out = np.empty(data.shape, data.dtype)
    for s in shards:
        out[s.index] = np.asarray(s.data)
    return out


def encoded(values: Mapping[str, Any], blocks: Blocks, process: int) -> Parts:
    """Encode data, history and callbacks; their arrays are added to the blocks."""
    arrays: list[Leaf] = []

    def keep(path: tuple, x: np.ndarray) -> int:
        name = f"@{process}/{leaves.joined(tuple(map(str, path)))}"
        arrays.append(Leaf(tuple(map(str, path)), "array", x.shape, x.dtype.name, name=name))
        if x.size:
            blocks[name] = x
        return len(arrays) - 1

    return Parts({name: _user_values.encode(x, keep, name) for name, x in values.items()}, arrays)


def watched(tree: Tree, described: list[Leaf]) -> dict[str, str]:
    """The leaves that have to be finite: {name: name in messages}.

    A mask of -inf among params that are not trained, and NaN in the model state, may belong there.
    Members of a population may diverge alone.
    """
    paths = set()
    for path, s in tree.states.items():
        if np.ndim(s.clock) > 1:
            continue
        parts: list = [([".params"], trained_part(s)), ([".params"], overwritten_part(s))]
        parts += [([f".{name}", ".params"], x.params) for name, x in averages_of(s).items()]
        for name, part in [*parts, ([".masters"], s.masters)]:
            paths |= {
                (*path, *name, *path_in_part) for path_in_part, _ in leaves.tree_of(part).leaves
            }
    return {x.name: leaves.show("state", x.path) for x in described if x.path in paths and x.dtype}


def not_finite(blocks: Blocks, names: Mapping[str, str]) -> str:
    """The first leaf in `names` that is not finite; "" if all are finite."""
    chunk = 1 << 18  # elements: 7 ms for 100 MB; hashing takes 150 ms
    for name, block in blocks.items():
        if (title := names.get(parse_name(name)[0])) is not None:
            flat = block.reshape(-1)
            if not all(np.isfinite(flat[i : i + chunk]).all() for i in range(0, flat.size, chunk)):
                return title
    return ""
