"""Arrays on their way to the disk and back: host copies, their hashes, and the directory that orbax keeps them in.

The only module that knows orbax. What comes back has been hashed and is what was saved, or Damaged is raised.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import importlib
import logging
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tsunax import _checks, _files, _manifest, _tree
from tsunax._manifest import Damaged, Leaf, Manifest
from tsunax.errors import CheckpointError, HyperparameterError, StateError, WrongTypeError, message, told
from tsunax.state import donated, is_gone

__all__ = []


# ------------------------------------------------------------------------------------------------- to the host


def check_saveable(tree: _manifest.Tree) -> None:
    if not tree.leaves:
        raise WrongTypeError(message("state", "save()", "a tree without leaves", "at least one array"))
    for path, x in tree.leaves:
        if _tree.is_traced(x):
            fix = "Save outside of jit, vmap and scan."
            raise WrongTypeError(
                message("leaf", _manifest.show("state", path), "a traced array", "a concrete one", fix)
            )
        if is_gone(x):
            raise StateError(donated("save()"))
        if isinstance(x, jax.ShapeDtypeStruct):
            raise WrongTypeError(message("leaf", _manifest.show("state", path), "a ShapeDtypeStruct", "an array"))


def step_of(tree: _manifest.Tree, step) -> int:
    if step is None:
        if not tree.states:
            fix = "save(state, step=...)."
            raise WrongTypeError(message("state", "save()", "a tree without a TrainState", "one, or step=", fix))
        step = int(np.max(np.asarray(next(iter(tree.states.values())).step)))
    _checks.check_count(step, "save()", "step", 0)
    if step >= 1 << 48:
        raise HyperparameterError(message("step", "save()", step, "< 2**48"))
    return int(step)


def stored(path, kind: str, shape, dtype, blocks, copies: list[np.ndarray]) -> Leaf:
    """A leaf whose blocks, [(bounds, host array)], go to the end of `copies`; those without elements are not stored."""
    shards = []
    for bounds, block in blocks:
        if bounds is None:
            bounds = tuple((0, n) for n in shape)
        if block.size:
            shards.append(_manifest.Shard(bounds, "", str(len(copies))))
            copies.append(block)
    name = _manifest.dtype_name(dtype)
    assert name is not None
    return Leaf(path, kind, tuple(shape), name, tuple(shards))


def copied(tree: _manifest.Tree, copies: list[np.ndarray]) -> list[Leaf]:
    """Every leaf, its array copied to the host: one block for each distinct shard."""
    facts = [_manifest.leaf_of(path, x) for path, x in tree.leaves]
    shards = [
        [s for s in (jax.random.key_data(x) if _tree.is_key(x) else x).addressable_shards if s.replica_id == 0]
        if isinstance(x, jax.Array)
        else []
        for _, x in tree.leaves
    ]
    on_host = lambda s: s.device.platform == "cpu"
    for s in (s for found in shards for s in found if not on_host(s)):
        s.data.copy_to_host_async()  # all transfers run at once
    leaves = []
    for fact, found, (path, x) in zip(facts, shards, tree.leaves, strict=True):
        if not fact.dtype:
            leaves.append(fact)
            continue
        blocks: list[tuple[Any, np.ndarray]] = []
        for s in found:
            bounds = tuple(sl.indices(n)[:2] for sl, n in zip(s.index, fact.shape, strict=True))
            # on the CPU a view: it must be copied, and it must not outlive this line, or the leaf cannot be donated
            blocks.append((bounds, np.array(s.data, copy=True) if on_host(s) else np.asarray(s.data)))
        if not found and not isinstance(x, jax.Array):
            blocks.append((None, np.array(x, copy=True)))
        leaves.append(stored(path, fact.kind, fact.shape, _manifest.dtype_of(fact.dtype), blocks, copies))
    return leaves


def digest(array: np.ndarray) -> str:
    flat = np.ascontiguousarray(array).reshape(-1)
    return _files.sha256(flat.view(np.uint8) if flat.size else b"")


def with_hashes(manifest: Manifest, hashes: list[str]) -> Manifest:
    shard = lambda s: dataclasses.replace(s, sha256=hashes[int(s.name)])
    leaf = lambda x: dataclasses.replace(x, shards=tuple(map(shard, x.shards)))
    return dataclasses.replace(
        manifest, leaves=[leaf(x) for x in manifest.leaves], arrays=[leaf(x) for x in manifest.arrays]
    )


# ----------------------------------------------------------------------------------------------------- orbax


def _orbax() -> Any:
    return importlib.import_module("orbax.checkpoint").v1


# orbax names its operations by one count of the process: a load beside a save takes the save's directory from under it
_ONE_AT_A_TIME = threading.Lock()


def _context(ocp):
    """Plain chunks: compressing costs twice the time of the write for a tenth of its bytes. No copy of our copy.

    Directories are made before their files: made beside them, a failure leaves threads that wait for ever.
    """
    options = ocp.options
    if not hasattr(ocp.Context(), "array"):  # before 0.12.8
        return ocp.Context(
            array_options=options.ArrayOptions(saving=options.ArrayOptions.Saving(use_compression=False)),
            async_options=options.AsyncOptions(create_directories_asynchronously=False),
        )
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.asynchronous.create_directories_asynchronously = False
    context.memory.deepcopy_host_arrays = False
    return context


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    ocp = _orbax()
    with _ONE_AT_A_TIME, _context(ocp):
        ocp.save(path, arrays)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(
            path / "commit_success.txt"
        )  # it holds the absolute path; what completes a checkpoint is the manifest


@contextlib.contextmanager
def _quiet():
    """Damaged bytes make asyncio and absl log pages, some when tasks are collected; the error says it in a line."""
    drop = lambda record: False
    loggers = [logging.getLogger(name) for name in ("asyncio", "absl")]
    for logger in loggers:
        logger.addFilter(drop)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(drop)


def check_files(path: Path, files: Mapping[str, tuple[int, str]]) -> None:
    """Raise Damaged unless the directory holds the files that were saved. Before orbax opens one: it fails in pages."""
    if files and not _files.is_real_directory(path):
        raise Damaged("arrays: missing")
    try:
        found = _files.listing(path)
    except (OSError, ValueError) as error:
        raise Damaged(f"arrays: {told(error)}") from None
    for name in sorted({*files, *found}):
        if name not in found or name not in files:
            raise Damaged(f"arrays: {name} {'is missing' if name in files else 'was not saved'}")
        if found[name] != files[name]:
            sizes = found[name][0], files[name][0]
            why = (
                f"{sizes[0]} bytes, not {sizes[1]}" if sizes[0] != sizes[1] else "other bytes than were saved (sha256)"
            )
            raise Damaged(f"arrays: {name}: {why}")


def read(path: Path, files: Mapping, leaves: list[Leaf], place: bool = True) -> list[Any]:
    """The saved leaves as host arrays, every shard verified; with `place=False` only that. Raises Damaged."""
    check_files(path, files)
    shards = {s.name: (s, leaf) for leaf in leaves for s in leaf.shards}
    blocks, fault = {}, None
    with _quiet():
        try:
            blocks = _raw(path, shards) if shards else {}
        except (Damaged, MemoryError):
            raise
        except Exception as error:  # whatever orbax, TensorStore and asyncio raise for bytes that are not theirs
            fault = Damaged(f"arrays: {told(error)}")
        if fault is not None:
            gc.collect()  # the tasks that failed, while nobody listens
            raise fault
    with concurrent.futures.ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as pool:
        for (s, leaf), found in zip(shards.values(), pool.map(digest, blocks.values()), strict=True):
            if found != s.sha256:
                where = _manifest.show("state", leaf.path) if leaf.path[:1] != ("0",) else "history, data or callbacks"
                raise Damaged(f"{where}: other bytes than were saved (sha256)")
    return [_joined(leaf, blocks) for leaf in leaves] if place else []


def _joined(leaf: Leaf, blocks: dict[str, np.ndarray]):
    if not leaf.dtype:
        return _manifest.plain_value(leaf)
    if len(leaf.shards) == 1:
        return blocks.pop(leaf.shards[0].name)
    out = np.zeros(leaf.shape, _manifest.dtype_of(leaf.dtype))
    for s in leaf.shards:
        out[tuple(slice(a, b) for a, b in s.bounds)] = blocks.pop(s.name)
    return out


def _raw(path: Path, shards: dict[str, tuple[_manifest.Shard, Leaf]]) -> dict[str, np.ndarray]:
    ocp = _orbax()
    with _ONE_AT_A_TIME, _context(ocp):
        known = ocp.metadata(path).metadata
        if not isinstance(known, Mapping):
            raise Damaged("arrays: other ones than were saved")
        target = dict.fromkeys(known, ocp.PLACEHOLDER)
        for name, (s, leaf) in shards.items():  # before anything of that size is allocated
            about = known.get(name)
            chunk = getattr(getattr(about, "storage_metadata", None), "chunk_shape", None) or s.shape
            same = about is not None and tuple(about.shape) == s.shape and str(about.dtype) == leaf.dtype
            if not same or math.prod(chunk) > math.prod(s.shape):
                raise Damaged(f"arrays: {name} is not as the manifest says")
            target[name] = about
        found = ocp.load(path, target)
    for name, (s, leaf) in shards.items():
        got = found[name] = np.asarray(found[name])
        if got.shape != s.shape or got.dtype != _manifest.dtype_of(leaf.dtype):
            raise Damaged(f"arrays: {name} is not as the manifest says")
    return {name: found[name] for name in shards}


# ---------------------------------------------------------------------------------------------- orbax's own directories


def foreign(path: Path) -> Any:
    """The tree that a directory of orbax's own says it has, by its old interface or the new one. Raises Damaged."""
    os.listdir(path)
    found = _of_orbax(lambda ocp: ocp.metadata(path).metadata, "the description")
    if not isinstance(found, Mapping | list | tuple):
        raise Damaged("no tree of arrays")
    return found


def as_struct(x):
    """A leaf of such a description as what `leaf_of` knows: arrays as their shape and dtype."""
    is_array = getattr(x, "shape", None) is not None and getattr(x, "dtype", None) is not None
    return jax.ShapeDtypeStruct(tuple(x.shape), x.dtype) if is_array and not _tree.is_array(x) else x


def read_foreign(path: Path, tree, names: list[str]) -> list[Any]:
    """Leaves of such a directory by name, arrays as NumPy's. Nothing is read that its files are far too small for."""
    wanted, target, declared = set(names), [], 0
    leaves, treedef = jax.tree.flatten(tree)
    found_names = ["/".join(name) for name, _, _ in _tree.leaves_with_names(tree)]
    for name, x in zip(found_names, leaves, strict=True):
        if name not in wanted:
            target.append(...)
        elif isinstance(about := as_struct(x), jax.ShapeDtypeStruct):
            chunk = getattr(getattr(x, "storage_metadata", None), "chunk_shape", None) or about.shape
            declared += max(math.prod(chunk), about.size) * about.dtype.itemsize
            target.append(np.broadcast_to(np.zeros((), about.dtype), about.shape))
        else:
            target.append(x)
    if declared > (64 << 20) + 256 * _files.sizes(path):
        raise Damaged(f"{declared} bytes declared, far more than its files have")
    found = _of_orbax(lambda ocp: ocp.load(path, treedef.unflatten(target)), "the arrays")
    by_name = dict(zip(found_names, jax.tree.leaves(found), strict=True))
    return [by_name[name] for name in names]


def _of_orbax(f, what: str):
    """`f(orbax)`, its logs kept quiet and whatever it raises as Damaged, given up after ten minutes."""

    def run():
        ocp = _orbax()
        with _ONE_AT_A_TIME, _context(ocp):
            return f(ocp)

    fault = None
    with _quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it was saved with shardings: given ones win
        try:
            return bounded(run, 600.0, what)
        except CheckpointError:
            raise
        except Exception as error:  # whatever orbax, TensorStore and asyncio raise for bytes that are not theirs
            fault = Damaged(told(error))
    raise fault


def bounded(f: Callable[[], Any], limit: float, what: str):
    """`f()` in a thread that is given up after `limit` seconds."""
    answer: list[Any] = []
    done = threading.Event()

    def run():
        try:
            answer.append((f(), None))
        except BaseException as error:
            answer.append((None, error))
        done.set()

    threading.Thread(target=run, name="tsunax-restore", daemon=True).start()
    if not done.wait(limit):
        raise CheckpointError(message(what, "restore()", f"nothing after {limit:g} s", "an answer"))
    value, error = answer[0]
    if error is not None:
        raise error
    return value


def versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "numpy", "optax", "flax", "orbax.checkpoint", "tsunax")
    found = {name: getattr(sys.modules.get(name), "__version__", "") for name in names}
    return {name: str(version) for name, version in found.items() if version}
