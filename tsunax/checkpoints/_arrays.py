"""Arrays on their way to the disk and back: host copies, their hashes, and the files that hold
them.

Each process writes one file of the safetensors format, with the shards that are its own, by number.
What comes back has been hashed and is what was saved, or Damaged is raised.
"""

from __future__ import annotations

import concurrent.futures.thread  # now: at the end of the interpreter it could not be loaded
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tsunax._core import checks, durable_files, trees
from tsunax.checkpoints import _orbax, _safetensors
from tsunax.checkpoints import manifest as _manifest
from tsunax.checkpoints.manifest import Damaged, Leaf, Manifest, Parts
from tsunax.errors import HyperparameterError, StateError, WrongTypeError, message, told
from tsunax.state import donated, overwritten_part, trained_part

__all__ = []

Bounds = tuple[tuple[int, int], ...]


# -------------------------------------------------------------------------------------- to the host


def check_saveable(tree: _manifest.Tree) -> None:
    if not tree.leaves:
        raise WrongTypeError(
            message("state", "save()", "a tree without leaves", "at least one array")
        )
    for path, x in tree.leaves:
        if trees.is_traced(x):
            fix = "Save outside of jit, vmap and scan."
            raise WrongTypeError(
                message(
                    "leaf", _manifest.show("state", path), "a traced array", "a concrete one", fix
                )
            )
        if trees.is_gone(x):
            raise StateError(donated("save()"))
        if isinstance(x, jax.ShapeDtypeStruct):
            raise WrongTypeError(
                message("leaf", _manifest.show("state", path), "a ShapeDtypeStruct", "an array")
            )


def check_members(tree: _manifest.Tree, where: str) -> None:
    for state in tree.states.values():
        if not (is_local(state.clock) or state.clock.is_fully_replicated):
            got = "members on devices of several processes"
            fix = "Let each process have members of its own, and save them with tsunax.exchange."
            raise StateError(message("population", where, got, "of one", fix))


def step_of(tree: _manifest.Tree, step) -> int:
    if step is None:
        if not tree.states:
            fix = "save(state, step=...)."
            raise WrongTypeError(
                message("state", "save()", "a tree without a TrainState", "one, or step=", fix)
            )
        step = int(np.max(np.asarray(next(iter(tree.states.values())).clock)[..., 0]))
    checks.check_count(step, "save()", "step", 0)
    if step >= 1 << 48:
        raise HyperparameterError(message("step", "save()", step, "< 2**48"))
    return int(step)


def stored(
    path, kind: str, shape, dtype: str, blocks, copies: list[np.ndarray], process: int
) -> Leaf:
    """A leaf whose blocks, [(bounds, host array)], go to the end of `copies`; those without
    elements are not stored.
    """
    shards = []
    for bounds, block in blocks:
        if bounds is None:
            bounds = tuple((0, n) for n in shape)
        if block.size:
            shards.append(_manifest.Shard(bounds, "", f"{process}/{len(copies)}"))
            copies.append(block)
    return Leaf(path, kind, tuple(shape), dtype, tuple(shards))


def is_local(x) -> bool:
    """Whether a leaf is no array over several processes: then each of them has all of it."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def copied(tree: _manifest.Tree, copies: list[np.ndarray], process: int) -> list[Leaf]:
    """Every leaf, its array copied to the host: one block for each distinct shard that is for this
    process to save.
    """
    facts = [_manifest.leaf_of(path, x) for path, x in tree.leaves]
    mine = [process == 0 or not is_local(x) for _, x in tree.leaves]
    shards = [
        [
            s
            for s in (jax.random.key_data(x) if trees.is_key(x) else x).addressable_shards
            if s.replica_id == 0
        ]
        if isinstance(x, jax.Array) and is_mine
        else []
        for is_mine, (_, x) in zip(mine, tree.leaves, strict=True)
    ]
    on_host = lambda s: s.device.platform == "cpu"
    for s in (s for found in shards for s in found if not on_host(s)):
        s.data.copy_to_host_async()  # all transfers run at once
    leaves = []
    for fact, found, is_mine, (path, x) in zip(facts, shards, mine, tree.leaves, strict=True):
        if not fact.dtype:
            leaves.append(fact)
            continue
        blocks: list[tuple[Any, np.ndarray]] = []
        for s in found:
            bounds = bounds_of(s.index, fact.shape)
            # on the CPU a view: it must be copied, and it must not outlive this line, or the leaf
            # cannot be donated
            blocks.append(
                (bounds, np.array(s.data, copy=True) if on_host(s) else np.asarray(s.data))
            )
        if is_mine and not isinstance(x, jax.Array):
            blocks.append((None, np.array(x, copy=True)))
        leaves.append(stored(path, fact.kind, fact.shape, fact.dtype, blocks, copies, process))
    return leaves


def watched(tree: _manifest.Tree, leaves: list[Leaf]) -> dict[int, str]:
    """Which copies are finite in a state that can be trained on, and their leaves: params, masters,
    averages.

    What is trained, and params that their gradient replaces (fp8 scales): a mask of -inf among the
    other params, and NaN in the model state, may belong there. Members of a population may diverge
    alone.
    """
    paths = set()
    for path, s in tree.states.items():
        average = None if s.average is None else s.average.params
        trained = ((".params",), trained_part(s)), ((".params",), overwritten_part(s))
        trained += ((".masters",), s.masters), ((".average", ".params"), average)
        for name, part in trained if np.ndim(s.clock) == 1 else ():
            paths |= {(*path, *name, *at) for at, _ in _manifest.tree_of(part).leaves}
    shards = ((s, leaf) for leaf in leaves if leaf.path in paths for s in leaf.shards)
    return {
        int(s.name.rpartition("/")[2]): _manifest.show("state", leaf.path) for s, leaf in shards
    }


def not_finite(copies: list[np.ndarray], watched: Mapping[int, str]) -> str:
    """The first of these leaves that is not finite; "" if all are.

    7 ms for 100 MB, beside 150 ms of hashing.
    """
    n = 1 << 18
    for i, name in watched.items():
        flat = copies[i].reshape(-1)
        if not all(np.isfinite(flat[at : at + n]).all() for at in range(0, flat.size, n)):
            return name
    return ""


def encoded(given: Mapping[str, Any], copies: list[np.ndarray], process: int) -> Parts:
    """Data, history and callbacks, their arrays at the end of `copies`."""
    arrays: list[Leaf] = []

    def keep(x: np.ndarray) -> int:
        path = (str(len(arrays)),)
        arrays.append(stored(path, "array", x.shape, x.dtype.name, [(None, x)], copies, process))
        return len(arrays) - 1

    return Parts({name: _manifest.encode(x, keep, name) for name, x in given.items()}, arrays)


def bounds_of(index, shape) -> Bounds:
    """(start, stop) of each axis of what an index selects."""
    return tuple(cut.indices(n)[:2] for cut, n in zip(index, shape, strict=True))


def digest(array: np.ndarray) -> str:
    flat = np.ascontiguousarray(array).reshape(-1)
    return durable_files.sha256(flat.view(np.uint8) if flat.size else b"")


def with_hashes(manifest: Manifest, hashes: list[str]) -> Manifest:
    shard = lambda s: dataclasses.replace(s, sha256=hashes[int(s.name.rpartition("/")[2])])
    leaf = lambda x: dataclasses.replace(x, shards=tuple(map(shard, x.shards)))
    parts = [
        dataclasses.replace(part, arrays=[leaf(x) for x in part.arrays]) for part in manifest.parts
    ]
    return dataclasses.replace(manifest, leaves=[leaf(x) for x in manifest.leaves], parts=parts)


# -------------------------------------------------------------------------------------------- files


def file_of(arrays: Path, process) -> Path:
    return arrays / f"{process}.safetensors"


def _spec(dtype, shape) -> tuple[str, tuple[int, ...]]:
    """As what an array is stored: bytes, where the format has no name for its dtype."""
    name, n = str(dtype), math.prod(shape)
    return (
        (name, tuple(shape))
        if name in _safetensors.CODE_OF
        else ("uint8", (n * np.dtype(dtype).itemsize,))
    )


def write(file: Path, arrays: list[np.ndarray]) -> None:
    """One file of arrays by number, on the disk when this returns."""
    specs = {str(i): _spec(x.dtype, x.shape) for i, x in enumerate(arrays)}
    _safetensors.write(file, specs, lambda name: arrays[int(name)], {})


def digests(arrays: list[np.ndarray]) -> Callable[[], list[str]]:
    """The sha256 of each, when the function that this returns is called; until then threads are at
    work on it.
    """
    pool = concurrent.futures.ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1)))
    try:
        jobs = [pool.submit(digest, x) for x in arrays]
    except RuntimeError:  # Python 3.12 allows no new thread at its end
        return lambda: [digest(x) for x in arrays]
    finally:
        pool.shutdown(wait=False)
    return lambda: [job.result() for job in jobs]


def check_files(path: Path, files: Mapping[str, tuple[int, str]]) -> None:
    """Raise Damaged unless the directory holds the files that were saved.

    Before orbax opens one: it fails in pages.
    """
    if files and not durable_files.is_real_directory(path):
        raise Damaged("arrays: missing")
    try:
        found = durable_files.listing(path)
    except (OSError, ValueError) as error:
        raise Damaged(f"arrays: {told(error)}") from None
    for name in sorted({*files, *found}):
        if name not in found or name not in files:
            raise Damaged(f"arrays: {name} {'is missing' if name in files else 'was not saved'}")
        if found[name] != files[name]:
            sizes = found[name][0], files[name][0]
            why = (
                f"{sizes[0]} bytes, not {sizes[1]}"
                if sizes[0] != sizes[1]
                else "other bytes than were saved (sha256)"
            )
            raise Damaged(f"arrays: {name}: {why}")


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Those parts of an array that one process needs, where that is not all of it: `pieces[index]`
    is one of them.
    """

    shape: tuple[int, ...]
    dtype: Any
    parts: Mapping[Bounds, np.ndarray]

    def __getitem__(self, index) -> np.ndarray:
        return self.parts[bounds_of(index, self.shape)]

    def astype(self, dtype, copy: bool = True) -> Pieces:
        return Pieces(
            self.shape, dtype, {at: x.astype(dtype, copy=copy) for at, x in self.parts.items()}
        )


def read(
    arrays: Path, files: Mapping, leaves: list[Leaf], needed: list[tuple[Bounds, ...] | None]
) -> list[Any]:
    """The saved leaves, or what is needed of them, as host arrays; every shard that is read is
    verified. Or Damaged.
    """
    check_files(arrays, files)
    shards = {s.name: (s, leaf) for leaf, parts in zip(leaves, needed, strict=True) for s in leaf.shards
              if parts is None or any(_overlap(s.bounds, part) is not None for part in parts)}  # fmt: skip
    blocks = verified(arrays, shards)
    out = []
    for leaf, parts in zip(leaves, needed, strict=True):
        if not leaf.dtype:
            out.append(_manifest.plain_value(leaf))
        elif parts is None:
            out.append(_part(leaf, tuple((0, n) for n in leaf.shape), blocks))
        else:
            dtype = _manifest.dtype_of(leaf.dtype)
            out.append(
                Pieces(leaf.shape, dtype, {part: _part(leaf, part, blocks) for part in parts})
            )
        for s in leaf.shards:
            blocks.pop(s.name, None)
    return out


def verified(
    arrays: Path, shards: Mapping[str, tuple[_manifest.Shard, Leaf]]
) -> dict[str, np.ndarray]:
    """Stored arrays by name, each of them hashed. Raises Damaged."""
    of_orbax = [name for name in shards if "/" not in name]
    found = (
        _orbax.of_format_1(arrays, {name: shards[name] for name in of_orbax}) if of_orbax else {}
    )
    try:
        files = {name.partition("/")[0] for name in shards.keys() - found.keys()}
        known = {file: _safetensors.contents(file_of(arrays, file))[0] for file in files}
        with concurrent.futures.ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as pool:
            one = lambda name: _verified(name, *shards[name], found.get(name), known)
            return dict(zip(shards, pool.map(one, shards), strict=True))
    except OSError as error:
        raise Damaged(f"arrays: {told(error)}") from None


def _verified(name: str, s: _manifest.Shard, leaf: Leaf, array, known: Mapping) -> np.ndarray:
    dtype = np.dtype(_manifest.dtype_of(leaf.dtype))
    if array is None:
        file, _, number = name.partition("/")
        entry = known[file].get(number)
        if entry is None or (entry.dtype, entry.shape) != _spec(dtype, s.shape):
            raise Damaged(f"arrays: {name} is not as the manifest says")
        array = _safetensors.read(entry)
        array = array if entry.dtype == leaf.dtype else array.view(dtype).reshape(s.shape)
    if digest(array) != s.sha256:
        where = (
            _manifest.show("state", leaf.path)
            if leaf.path[:1] != ("0",)
            else "history, data or callbacks"
        )
        raise Damaged(f"{where}: other bytes than were saved (sha256)")
    return array


def _overlap(a: Bounds, b: Bounds) -> Bounds | None:
    both = tuple((max(i, k), min(j, n)) for (i, j), (k, n) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _part(leaf: Leaf, bounds: Bounds, blocks: Mapping[str, np.ndarray]) -> np.ndarray:
    """Part of a leaf, from the shards that hold it."""
    for s in leaf.shards:
        if s.bounds == bounds:
            return blocks[s.name]
    out = np.zeros([stop - start for start, stop in bounds], _manifest.dtype_of(leaf.dtype))
    for s in leaf.shards:
        if (both := _overlap(s.bounds, bounds)) is not None:
            inside = lambda of, both=both: tuple(
                slice(i - k, j - k) for (i, j), (k, _) in zip(both, of, strict=True)
            )
            out[inside(bounds)] = blocks[s.name][inside(s.bounds)]
    return out


def home_of(tree: _manifest.Tree) -> str:
    """The devices that a tree is on, in words: "4 cpu", "16 NVIDIA H100 of 2 processes"; "" of one
    without.
    """
    shardings = {getattr(x, "sharding", None) for _, x in tree.leaves}
    devices = {one for sharding in shardings if sharding is not None for one in sharding.device_set}
    kinds, n = (
        " ".join(sorted({one.device_kind for one in devices})),
        len({one.process_index for one in devices}),
    )
    return f"{len(devices)} {kinds}" + (f" of {n} processes" if n > 1 else "") if devices else ""


def versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "numpy", "optax", "flax", "orbax.checkpoint", "tsunax")
    found = {name: getattr(sys.modules.get(name), "__version__", "") for name in names}
    return {name: str(version) for name, version in found.items() if version}
