"""The home of checkpoints that orbax keeps on a disk: a directory for each step.

    tsunax.lock
    4/_CHECKPOINT_METADATA, ...               orbax's own layout, so that its tools load it
    4/state/                                  the arrays, under nested readable names
    4/tsunax/manifest.json, manifest.sha256   what is in it, and that all of it is there
    4/tsunax/0.safetensors                    arrays of data, history and callbacks of process 0
    6.unfinished                              directory 6 is being written, or deleted

orbax commits the arrays together with the manifest, an item of its tree that waits in its
background for the hashes. The file "6.unfinished" is made before the directory. It is deleted when
the whole directory is synced, and, if older steps are deleted in return, was read back: in one
instant on any file system, and no directory is renamed, which a mounted bucket cannot do. A step
that is there already is written to "4.1". Slices are read by TensorStore.
"""

import asyncio
import concurrent.futures
import contextlib
import importlib
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tsunax._core import durable_files, processes, trees
from tsunax.checkpoints import _blocks, _orbax
from tsunax.checkpoints._blocks import Blocks, OpenLeaf, Saved
from tsunax.checkpoints._home import MANIFEST_FOLDER, STEP_NAME, UNFINISHED, CheckpointHome
from tsunax.checkpoints.checksums import Bounds
from tsunax.checkpoints.leaves import Damaged, Leaf, Tree
from tsunax.checkpoints.manifest import Manifest
from tsunax.errors import SaveError, told

STATE = "state"
OUR_NAMES = {
    STATE,
    MANIFEST_FOLDER,
    "_CHECKPOINT_METADATA",
    "commit_success.txt",
    "orbax.checkpoint",
}
_BYTES = {"uint4", "float6_e2m3fn", "float6_e3m2fn"}  # dtypes that TensorStore lacks


class _Save:
    """A save under way. To orbax it is one more item of the checkpoint, done with the manifest."""

    def __init__(self):
        self.manifest_written: concurrent.futures.Future = concurrent.futures.Future()
        self.response: Any = None  # orbax's
        self.saved: Saved = {}  # leaves that `commit` reads back and compares
        self.hashes: Mapping[str, int] = {}
        self.quiet = contextlib.ExitStack()  # until orbax has ended

    async def save(self, directory):
        return self._wait()

    async def _wait(self) -> None:
        await asyncio.wrap_future(self.manifest_written)

    async def load(self, directory):
        raise NotImplementedError


class OrbaxHome(CheckpointHome):
    can_rewind = False
    manifest_folder = arrays_folder = MANIFEST_FOLDER
    threads = 32  # a mounted bucket answers late

    def __init__(self, path: Path, timeout: float = 600.0):
        super().__init__(path, timeout)
        self._saves: dict[str, _Save] = {}

    def directories(self, step: int | None = None) -> dict[int, list[Path]]:
        """No links, and no directory that is unfinished."""
        names, folders = {*self.names(self.path)}, dict[int, list[Path]]()
        matches = filter(None, map(STEP_NAME.fullmatch, names))
        for match in sorted(matches, key=lambda match: int(match[2] or 0)):
            folder = self.path / match[0]
            if folder.name + UNFINISHED not in names and durable_files.is_real_directory(folder):
                folders.setdefault(int(match[1]), []).append(folder)
        return folders

    def opened(self, folder: Path, saved: Collection[Leaf], processes: Iterable[int]) -> OpenLeaf:
        declared = sum(leaf.n_bytes for leaf in saved)
        # Check first: a pipe would block, and declared bytes without files would take memory.
        if declared > (1 << 20) + 2 * durable_files.check_regular(folder):
            raise Damaged(f"{declared} bytes declared, far more than its files have")
        open_array = _opener(folder / STATE, saved)
        open_block = super().opened(folder, saved, processes)
        return lambda leaf: open_array(leaf) if _is_of_orbax(leaf) else open_block(leaf)

    def reserve_name(self, step: int) -> str:
        # `match`, because the suffix of "4.1.unfinished" is in use, too
        matches = [match for name in self.names(self.path) if (match := STEP_NAME.match(name))]
        suffixes = [int(match[2] or 0) for match in matches if int(match[1]) == step]
        name = f"{step}.{max(suffixes) + 1}" if suffixes else str(step)
        self._mark(name)
        return name

    def start_arrays(self, name: str, tree: Tree, described: list[Leaf], blocks: Blocks) -> None:
        """Let orbax make the directories and write `blocks` and spread arrays in the background."""
        from flax import traverse_util

        arrays: dict[str, Any] = {}
        for leaf, (_, x) in zip(described, tree.leaves, strict=True):
            if not _is_of_orbax(leaf):
                continue
            if not _blocks.is_local(x):
                arrays[leaf.name] = jax.random.key_data(x) if trees.is_key(x) else x
            else:  # if it has no block here, the first process writes it
                zeros = np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
                arrays[leaf.name] = blocks.get(leaf.name, zeros)
        save = _Save()
        if not processes.current().is_first:
            save.manifest_written.set_result(None)
        by_keys = {keys: arrays[name] for name, keys in _keys_of(arrays).items()}
        items: dict[str, Any] = {MANIFEST_FOLDER: save}
        if arrays:
            items[STATE] = traverse_util.unflatten_dict(by_keys)
        ocp = _orbax.library()
        context = ocp.Context()
        context.array.saving.use_compression = False  # it would take the cores of the next step
        context.array.saving.use_zarr3 = True
        context.memory.deepcopy_host_arrays = False  # they are copies
        context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
        context.asynchronous.create_directories_asynchronously = False
        context.asynchronous.timeout_secs = max(1, int(self.timeout))
        save.quiet.enter_context(_orbax.quiet())
        with _orbax.ONE_AT_A_TIME, context:
            try:
                save.response = ocp.save_checkpointables_async(str(self.path / name), items)
            except Exception as error:  # orbax, TensorStore and file systems raise many types
                save.quiet.close()
                raise SaveError(
                    f"save of step {name}",
                    str(self.path),
                    got=told(error),
                    expected="a save that starts",
                ) from error
        self._saves[name] = save

    def write_blocks(self, name: str, process: int, saved: Saved, blocks: Blocks) -> None:
        """Write the blocks that orbax does not: it has the other arrays since `start_arrays`."""
        other_blocks = {x: y for x, y in blocks.items() if not _is_block_of_orbax(x, saved)}
        super().write_blocks(name, process, saved, other_blocks)

    def prove(self, name: str, process: int, saved: Saved, hashes: Mapping[str, int]) -> None:
        save = self._saves[name]  # `commit` reads the blocks back, when orbax has written them
        save.saved = saved
        save.hashes = {x: y for x, y in hashes.items() if _is_block_of_orbax(x, saved)}

    def commit(self, name: str, whole: Manifest | None) -> None:
        save, folder = self._saves[name], self.path / name
        if whole is not None:
            self.put_manifest(name, whole)
            save.manifest_written.set_result(None)
        with save.quiet:
            try:
                save.response.result(timeout=self.timeout)
            except Exception as error:  # orbax, TensorStore and asyncio raise many types
                raise OSError(f"orbax: {told(error)}") from None
        if save.hashes:
            self._prove(folder, save)
        durable_files.sync_tree(folder)
        del self._saves[name]

    def finish(self, name: str, step: int) -> None:
        old = self.directories().get(step, [])
        (self.path / (name + UNFINISHED)).unlink()
        durable_files.sync(self.path)
        with self.deleting(step):
            self._delete([] if step in self.bad else old)

    def _prove(self, folder: Path, save: _Save) -> None:
        open_array = _opener(folder / STATE, save.saved.values())
        _blocks.check_same(save.saved, save.hashes, open_array, self.threads)

    def discard(self, name: str) -> None:
        if (save := self._saves.pop(name, None)) is not None:
            if not save.manifest_written.done():
                save.manifest_written.set_exception(Damaged("another part of the save failed"))
            try:
                with save.quiet:
                    save.response.result(timeout=self.timeout)
            except TimeoutError:
                return  # orbax may still write; the next run removes the unfinished directory
            except Exception:  # the first failure is reported
                pass
        self._remove(name)

    def delete(self, step: int) -> None:
        self._delete(self.directories().get(step, []))

    def _delete(self, folders: list[Path]) -> None:
        for folder in folders:
            has_no_user_file = {MANIFEST_FOLDER} <= set(self.names(folder)) <= OUR_NAMES
            if has_no_user_file:
                self._remove(folder.name)

    def tidy(self) -> None:
        for name in self.names(self.path):
            if STEP_NAME.fullmatch(name.removesuffix(UNFINISHED)) and name.endswith(UNFINISHED):
                with self.deleting(name):
                    self._remove(name.removesuffix(UNFINISHED))

    def _mark(self, name: str) -> None:
        self.write_file(self.path / (name + UNFINISHED), b"This directory is not whole.\n")

    def _remove(self, name: str) -> None:
        mark, folder = self.path / (name + UNFINISHED), self.path / name
        if not mark.exists():
            self._mark(name)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            mark.unlink()


def _is_of_orbax(leaf: Leaf) -> bool:
    """Whether orbax stores a leaf.

    Our own file has values of users, and dtypes that TensorStore lacks. No file has arrays without
    elements.
    """
    is_in_our_file = leaf.is_user_value or leaf.dtype in _BYTES
    return bool(leaf.dtype and math.prod(leaf.shape)) and not is_in_our_file


def _is_block_of_orbax(block: str, saved: Saved) -> bool:
    return _is_of_orbax(saved[_blocks.parse_name(block)[0]])


def _keys_of(leaf_names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The keys of each name in nested dicts, without dots, by which orbax joins keys."""
    names = list(leaf_names)
    # A leaf with a name that is also the folder of other leaves gets the key "%" in that folder.
    folders = {name[:i] for name in names for i, c in enumerate(name) if c == "/"}
    keys = {name: name.replace(".", "%2e") or "%" for name in names}
    return {x: (*y.split("/"), *(["%"] if x in folders else [])) for x, y in keys.items()}


def _opener(
    folder: Path, saved_leaves: Iterable[Leaf]
) -> Callable[[Leaf], Callable[[Bounds], np.ndarray]]:
    """A function that opens an array of orbax; its result reads slices of the array."""
    ts = importlib.import_module("tensorstore")
    base = {"driver": "file", "path": f"{folder}/"}
    context = ts.Context({"cache_pool": {"total_bytes_limit": 64 << 20}})
    keys = _keys_of(leaf.name for leaf in saved_leaves if _is_of_orbax(leaf))

    def answer(future, leaf: Leaf):
        try:
            return future.result()
        except Exception as error:  # OSError, ValueError, NotImplementedError, ...
            raise Damaged(f"arrays: {leaf.name!r:.80}: {told(error)}") from None

    def open_array(leaf: Leaf):
        store = {"driver": "ocdbt", "base": base, "path": ".".join(keys[leaf.name]) + "/"}
        spec: dict[str, Any] = {"driver": "zarr3", "kvstore": store}
        # the files do not change
        spec |= {"recheck_cached_metadata": False, "recheck_cached_data": False}
        array = answer(ts.open(spec, read=True, context=context), leaf)
        is_as_saved = (array.dtype.name, array.shape) == (leaf.dtype, leaf.shape)
        chunk = math.prod(array.chunk_layout.read_chunk.shape or ())
        if not is_as_saved or chunk > math.prod(leaf.shape):
            raise Damaged(f"arrays: {leaf.name!r:.80} is not as the manifest says")
        return lambda bounds: answer(array[tuple(slice(*x) for x in bounds)].read(), leaf)

    return open_array
