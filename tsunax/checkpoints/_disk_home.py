"""The home of checkpoints on a local or shared disk: a directory for each step.

    tsunax.lock
    4/manifest.json, manifest.sha256      what is in it, and that all of it is there: written last
    4/arrays/0.safetensors                the blocks that process 0 wrote, under readable names
    .tsunax-tmp-6-0123abcd/               what is being written
    .tsunax-old-2-0123abcd/               what is being deleted, or replaced

Everything is written under a hidden name and synced, the manifest last; then one rename gives it
the name of its step. So a directory with a step's name is whole, in whatever instant the process or
the machine ended. What is replaced gets a hidden name before that rename and is deleted after it;
`tidy` puts it back if the rename did not come. What is deleted is hidden first, and then loses its
manifest first.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from tsunax._core import Function, durable_files
from tsunax.checkpoints import _blocks, _safetensors
from tsunax.checkpoints._blocks import Blocks, Needed, ReadResult, Saved
from tsunax.checkpoints._home import MANIFEST, SUM, CheckpointHome
from tsunax.checkpoints.leaves import Damaged, Leaf
from tsunax.checkpoints.manifest import Manifest
from tsunax.errors import told

ARRAYS = "arrays"
OUR_NAMES = (MANIFEST, SUM, ARRAYS)


class DiskHome(CheckpointHome):
    def listed_steps(self) -> list[int]:
        steps = map(durable_files.step_in_name, self.names(self.path))
        return sorted(step for step in steps if step is not None and self.directory_of(step))

    def directory_of(self, step: int) -> Path | None:
        folder = self.path / str(step)
        return folder if durable_files.is_real_directory(folder) else None

    def read(
        self, step: int, manifest: Manifest, requested: list[Leaf], needed: Needed, place: Function
    ) -> ReadResult:
        arrays = self.path / str(step) / ARRAYS
        if any(leaf.dtype for leaf in requested) and not durable_files.is_real_directory(arrays):
            raise Damaged("arrays: missing")
        try:
            stored = _blocks.stored_in(
                arrays / f"{i}.safetensors" for i in range(len(manifest.parts))
            )
            read_leaf = lambda leaf, parts: _blocks.read_leaf(
                leaf, parts, stored.get(leaf.name, [])
            )
            return _blocks.read_all(
                read_leaf, requested, needed, place, min(8, os.cpu_count() or 1)
            )
        except OSError as error:
            raise Damaged(f"arrays: {told(error)}") from None

    def begin(self, step: int) -> str:
        return durable_files.hidden_path(self.path, "tmp", step).name

    def write_blocks(self, name: str, process: int, saved: Saved, blocks: Blocks) -> None:
        folder = self.path / name
        arrays = folder / ARRAYS
        for new in (folder, arrays):  # not the run's own: if it is gone, it was moved or deleted
            new.mkdir(exist_ok=True)
        if blocks:
            _blocks.write_arrays(arrays / f"{process}.safetensors", blocks)
        durable_files.sync(arrays)

    def prove(self, name: str, process: int, saved: Saved, hashes: Mapping[str, int]) -> None:
        if hashes:
            entries = _safetensors.contents(self.path / name / ARRAYS / f"{process}.safetensors")
            read = lambda block, leaf: _blocks.read_entry(entries[block], leaf)
            _blocks.check_same(saved, hashes, read)

    def commit(self, name: str, whole: Manifest | None) -> None:
        if whole is None:
            return
        step, folder = whole.step, self.path / name
        self.put_manifest(name, whole)
        durable_files.sync(folder)
        self.metrics_by_step()
        final, old = self.path / str(step), None
        if os.path.lexists(final):
            if not self._is_deletable(final):
                raise FileExistsError(f"{final} holds what is not tsunax's")
            old = durable_files.hidden_path(self.path, "old", step)
            os.rename(final, old)
        try:
            os.rename(folder, final)
        except OSError as error:  # a mounted bucket raises it
            fix = "a directory could not be renamed: store='orbax' renames none"
            raise OSError(error.errno, f"{error.strerror}, {fix}") from error
        durable_files.sync(self.path)
        self.metrics_by_step()[step] = whole.metrics
        self.bad.pop(step, None)
        if old is not None:
            with self.deleting(step):
                durable_files.remove(old, OUR_NAMES)

    def discard(self, name: str) -> None:
        shutil.rmtree(self.path / name, ignore_errors=True)

    @staticmethod
    def _is_deletable(folder: Path) -> bool:
        return durable_files.is_real_directory(folder) and set(os.listdir(folder)) <= set(OUR_NAMES)

    def drop(self, steps: Iterable[int]) -> None:
        for step in steps:
            with self.deleting(step):
                is_deletable = self._is_deletable(folder := self.path / str(step))
                old = durable_files.hidden_path(self.path, "old", step)
                if is_deletable:
                    os.rename(folder, old)
                # the step has gone, even if its files cannot be removed
                self.metrics_by_step().pop(step, None)
                if is_deletable:
                    durable_files.remove(old, OUR_NAMES)

    def tidy(self) -> None:
        for name in sorted(os.listdir(self.path)):
            kind_and_step, folder = durable_files.ours(name), self.path / name
            if kind_and_step is None or not durable_files.is_real_directory(folder):
                continue
            kind, step = kind_and_step
            final = self.path / str(step)
            if kind == "tmp":
                self.discard(name)
            elif (folder / MANIFEST).is_file() and not os.path.lexists(final):
                os.rename(folder, final)
            else:
                with self.deleting(step):
                    durable_files.remove(folder, OUR_NAMES)
