"""The home of checkpoints on a local or shared disk: a directory for each step.

    tsunax.lock
    4/manifest.json, manifest.sha256      its contents, a proof that it is whole: written last
    4/arrays/0.safetensors                the blocks that process 0 wrote, under readable names
    .tsunax-tmp-6-0123abcd/               a step that is being written
    .tsunax-old-2-0123abcd/               a step that is being deleted, or replaced
    .tsunax-rewind-4-00000009/            a rewind to step 4 after 9 calls that is not finished
    left/9/6/manifest.json, arrays/       a step that this rewind left

Everything is written under a hidden name and synced, the manifest last; then one rename gives it
the name of its step. So a directory with a step's name is whole, in whatever instant the process or
the machine ended. A step that is replaced gets a hidden name before that rename, and is deleted
after it; `tidy` puts the step back if the rename did not come. A step that is deleted gets a hidden
name, and then loses its manifest first.

A rewind saves its state under a special hidden name. From then on the rewind has happened: the
steps from its step on move to `left/`, the newest first, and the state gets the name of its step.
If the process ends meanwhile, `tidy` does the rest.

`_orbax_home` is the home of checkpoints that orbax keeps on a disk, `_bucket_home` the home of
our files in a bucket, with the same interface. Leaves are compared and verified by the callers,
with the hashes of the manifest. One run writes, and any number of processes read.
"""

import concurrent.futures.thread  # now: at the end of the interpreter it could not be loaded
import contextlib
import functools
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tsunax._core import Function, durable_files, processes
from tsunax.checkpoints import _blocks
from tsunax.checkpoints import manifest as _manifest
from tsunax.checkpoints._blocks import Blocks, Needed, OpenLeaf, ReadResult, Saved
from tsunax.checkpoints.leaves import Damaged, Leaf, TooNew, Tree
from tsunax.checkpoints.manifest import LIMIT, Manifest
from tsunax.errors import CheckpointError, told

MANIFEST, SUM, UNFINISHED = "manifest.json", "manifest.sha256", ".unfinished"
ARRAYS = "arrays"
OUR_NAMES = (MANIFEST, SUM, ARRAYS)  # in the directory of a step, if orbax did not write it
LEFT_FOLDER = "left"  # the folder of steps that rewinds left: a folder by calls for each rewind
BUCKETS = ("s3://", "gs://")  # addresses of `_bucket_home`
MANIFEST_FOLDER = "tsunax"  # in the directory of a step, if orbax wrote it
# Directories of a step: orbax's home writes a step that is there already to "4.1".
STEP_NAME = re.compile(r"(0|[1-9][0-9]{0,14})(?:\.([1-9][0-9]{0,5}))?", re.ASCII)
# A run may find or leave these before its first checkpoint: hidden names, its lock, rows of loggers
# and small files of scripts, such as their settings. No such name can be a lost checkpoint.
EARLY_NAMES = re.compile(
    rf"\.|tsunax\.lock$|{durable_files.CONTROL}$|lost\+found$|wandb$|mlruns$|events\.out\.|.+\.(csv|jsonl|new|log"
    r"|unfinished|json|ya?ml|toml|ini|cfg|txt|md|py|ipynb|sh|diff|patch|png|svg|pdf|html)$"
)


def sum_of(body: bytes) -> bytes:
    return f"{durable_files.sha256(body)}  {MANIFEST}\n".encode()


def names_in(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def store_of(folder: Path) -> str | None:
    """How the checkpoints of a directory are stored: "orbax", "files", or None for an empty one."""
    with contextlib.suppress(OSError):  # `prepare` and readers report it
        for name in filter(STEP_NAME.fullmatch, names_in(folder)):
            if (folder / name / MANIFEST_FOLDER).is_dir():
                return "orbax"
            if (folder / name / MANIFEST).exists():
                return "files"
    return None


class CheckpointHome:
    """The directory of a run.

    It keeps the steps that failed their verification, `bad`, and the complete steps with their
    metrics, `metrics_by_step()`.

    A save calls `reserve_name` in the first process; then in all, `start_arrays` and, in the
    background, `write` with `write_blocks` and `prove`; then `merged_manifest` in the first, and
    `commit` or `commit_rewind`; at last `drop`. After an error the first process calls `discard`.
    """

    can_rewind: bool = True  # whether checkpoints can be set aside
    manifest_folder: str = ""  # the folder of the manifest, in the directory of a checkpoint
    arrays_folder: str = ARRAYS  # the folder of our files of arrays
    names: Any = staticmethod(names_in)
    load: Any = staticmethod(durable_files.read)
    write_file: Any = staticmethod(durable_files.write)
    stored_in: Any = staticmethod(_blocks.stored_in)
    lock: Any = durable_files.Lock
    threads: int = min(8, os.cpu_count() or 1)  # threads that restore, each with a leaf in memory
    proof_threads: int = 0  # threads that read a save back; 0: as many as hash it

    def __init__(self, path: Path, timeout: float = 600.0):
        self.path: Any = path
        self.timeout: float = timeout
        self.bad: dict[int, str] = {}  # why a step failed its verification
        self.deletion_warnings: list[str] = []  # warnings of steps that could not be deleted
        self._metrics: dict[int, dict[str, float]] | None = None
        # the link of each step, once `metrics_by_step` has read the manifests
        self.links: dict[int, str] = {}

    # --------------------------------------------------------- orbax's home has its own of these

    def directories(self, step: int | None = None) -> dict[int, list[Any]]:
        """By step, or of one step alone, the directories that are named after it, newest last."""
        names = self.names(self.path) if step is None else [str(step)]
        steps = {name: durable_files.step_in_name(name) for name in names}
        folders = {x: self.path / name for name, x in steps.items() if x is not None}
        return {x: [y] for x, y in folders.items() if durable_files.is_real_directory(y)}

    def read(
        self, step: int, manifest: Manifest, requested: list[Leaf], needed: Needed, place: Function
    ) -> ReadResult:
        """The saved leaves, or the needed parts of each; whole ones are verified, or Damaged.

        `place(i, value)` is called once a value is verified, and returns its replacement.
        """
        if (folder := self.directory_of(step)) is None:
            raise Damaged("not a directory")
        with _blocks.damage_of_arrays():
            open_leaf = self.opened(folder, manifest.arrays(), range(len(manifest.parts)))
        return _blocks.read_all(open_leaf, requested, needed, place, self.threads)

    def opened(self, folder: Path, saved: Collection[Leaf], processes: Iterable[int]) -> OpenLeaf:
        """A function that opens each of the saved leaves, in the files of some processes."""
        files = [folder / self.arrays_folder / f"{i}.safetensors" for i in processes]
        stored = self.stored_in(files)
        return lambda leaf: functools.partial(_blocks.part_of, leaf, stored.get(leaf.name, []))

    def reserve_name(self, step: int) -> str:
        """The name under which a checkpoint of this step is written by all processes."""
        return durable_files.hidden_path(self.path, "tmp", step).name

    def start_arrays(self, name: str, tree: Tree, described: list[Leaf], blocks: Blocks) -> None:
        """The part of a save that must run in the thread that calls `save`: none on a disk."""

    def write_blocks(self, name: str, process: int, saved: Saved, blocks: Blocks) -> None:
        folder = self.path / name
        arrays = folder / self.arrays_folder
        # The directory of the run is not made again: if it is gone, a user moved or deleted it.
        for new in (folder, arrays):
            new.mkdir(exist_ok=True)
        if blocks:
            _blocks.write_arrays(arrays / f"{process}.safetensors", blocks)
        durable_files.sync(arrays)

    def prove(self, name: str, process: int, saved: Saved, hashes: Mapping[str, int]) -> None:
        """Read back the files of this process, here or in `commit`. Raises Damaged."""
        if hashes:
            open_leaf = self.opened(self.path / name, saved.values(), [process])
            _blocks.check_same(saved, hashes, open_leaf, self.proof_threads)

    def commit(self, name: str, whole: Manifest | None) -> None:
        """Add the manifest, which the first process has, and give the checkpoint its name."""
        if whole is None:
            return
        step, folder = whole.step, self.path / name
        self.put_manifest(name, whole)
        durable_files.sync(folder)
        final, old = self.path / str(step), None
        if os.path.lexists(final):
            if not self._is_deletable(final):
                raise FileExistsError(f"{final} holds what is not tsunax's")
            old = durable_files.hidden_path(self.path, "old", step)
            os.rename(final, old)
        try:
            os.rename(folder, final)
        except OSError as error:  # a mounted bucket raises it
            raise OSError(
                error.errno,
                f"{error.strerror}, a directory could not be renamed: store='orbax' renames none",
            ) from error
        durable_files.sync(self.path)
        if old is not None:
            with self.deleting(step):
                durable_files.remove(old, OUR_NAMES)

    def finish(self, name: str, step: int) -> None:
        """A step of the first process when all have committed: here nothing is left to do."""

    def commit_rewind(self, name: str, whole: Manifest, calls: int) -> None:
        """Add the manifest, and set aside the checkpoints from its step on. See the module."""
        self.put_manifest(name, whole)
        durable_files.sync(self.path / name)
        rewind = durable_files.rewind_path(self.path, whole.step, calls)
        os.rename(self.path / name, rewind)
        durable_files.sync(self.path)
        self.finish_rewind(rewind, whole.step)
        self._metrics = None
        self.bad = {step: reason for step, reason in self.bad.items() if step < whole.step}

    def finish_rewind(self, rewind: Path, step: int) -> None:
        """Set aside the checkpoints from this step on that are still there, and name the state."""
        left_folder = self.path / LEFT_FOLDER / str(durable_files.rewind_calls(rewind.name))
        left_folder.mkdir(parents=True, exist_ok=True)
        for later_step in sorted((x for x in self.directories() if x >= step), reverse=True):
            target = left_folder / str(later_step)
            if os.path.lexists(target):  # an earlier rewind after as many calls left it
                os.rename(target, durable_files.hidden_path(left_folder, "old", later_step))
            os.rename(self.path / str(later_step), target)
        for folder in (left_folder, left_folder.parent):
            durable_files.sync(folder)
        os.rename(rewind, self.path / str(step))
        durable_files.sync(self.path)

    def discard(self, name: str) -> None:
        shutil.rmtree(self.path / name, ignore_errors=True)

    @staticmethod
    def _is_deletable(folder: Path) -> bool:
        return durable_files.is_real_directory(folder) and set(os.listdir(folder)) <= set(OUR_NAMES)

    def delete(self, step: int) -> None:
        """Delete a checkpoint, unless a user keeps files of his own in it."""
        if self._is_deletable(folder := self.path / str(step)):
            old = durable_files.hidden_path(self.path, "old", step)
            os.rename(folder, old)
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
            elif kind == "rewind":
                self.finish_rewind(folder, step)
            elif (folder / MANIFEST).is_file() and not os.path.lexists(final):
                os.rename(folder, final)  # its replacement did not come
            else:
                with self.deleting(step):
                    durable_files.remove(folder, OUR_NAMES)

    # ----------------------------------------------------------------------- the same in every home

    @contextlib.contextmanager
    def deleting(self, step: int | str) -> Iterator[None]:
        """A context for a deletion, in which a failure is a warning: the save has not failed."""
        try:
            yield
        except Exception as error:  # OSError, or an exception of a library for buckets
            self.deletion_warnings.append(
                f"step {step} in {self.path} could not be deleted: {told(error)}"
            )

    def drop(self, steps: Iterable[int]) -> None:
        """Delete checkpoints."""
        for step in steps:
            with self.deleting(step):
                self.delete(step)
                self.metrics_by_step().pop(step, None)

    def strangers(self) -> list[str]:
        """The names in the directory that no run leaves there before its first checkpoint."""
        names = self.names(self.path)
        is_expected = lambda x: (
            EARLY_NAMES.match(x) or x + UNFINISHED in names or self._has_early_names(x)
        )
        return [x for x in names if not is_expected(x)]

    def _has_early_names(self, name: str) -> bool:
        """Whether a directory has files, and all of their names match `EARLY_NAMES`."""
        files = [x for _, _, names in os.walk(self.path / name) for x in names]
        return bool(files) and all(map(EARLY_NAMES.match, files))

    def check_is_no_checkpoint(self) -> None:
        """Raise CheckpointError within a checkpoint of either home, before a lock is written."""
        folders = (
            x / name for x in (self.path, self.path.parent) for name in ("", MANIFEST_FOLDER)
        )
        if any((folder / SUM).exists() for folder in folders):
            raise CheckpointError(
                "path",
                str(self.path),
                got="a part of one checkpoint",
                expected="the directory that has the steps",
            )

    def directory_of(self, step: int) -> Any:
        """The directory of a checkpoint; None if it has gone."""
        return next(reversed(self.directories(step).get(step, [])), None)

    def manifest(self, step: int) -> Manifest:
        """The manifest of a checkpoint. Raises Damaged, or TooNew."""
        folder = self.directory_of(step)
        if folder is None:
            raise Damaged("not a directory")
        try:
            expected = self.load(folder / self.manifest_folder / SUM, 200)
            body = self.load(folder / self.manifest_folder / MANIFEST, LIMIT)
        except FileNotFoundError:
            raise Damaged("no manifest") from None
        except ConnectionError:  # a bucket does not answer: the bytes may be good
            raise
        except (OSError, ValueError) as error:
            raise Damaged(f"manifest: {told(error)}") from None
        if expected != sum_of(body):
            raise Damaged("manifest: other bytes than were saved (sha256)")
        manifest = Manifest.parse(body)
        if manifest.step != step:
            raise Damaged(f"manifest: of step {manifest.step}")
        return manifest

    def steps(self) -> list[int]:
        """Steps that a directory is named after, in order.

        A writer that keeps one step may delete it after a listing of names, and the next step may
        be missing in the listing. So there is no step only if two listings agree.
        """
        names = self.names(self.path)
        while not (steps := sorted(self.directories())):
            old_names, names = names, self.names(self.path)
            if names == old_names:
                break
        return steps

    def manifests(self) -> dict[int, Manifest]:
        """The manifests of complete steps; read again if a writer deletes the newest meanwhile."""

        def good_manifest(step: int) -> Manifest | None:
            with contextlib.suppress(Damaged, TooNew):
                return self.manifest(step)
            return None

        while True:
            steps = self.steps()
            with concurrent.futures.ThreadPoolExecutor(self.threads) as pool:
                answers = zip(steps, pool.map(good_manifest, steps), strict=True)
            manifests = {step: manifest for step, manifest in answers if manifest is not None}
            # If the newest was deleted meanwhile, there is a newer one.
            if all(step in manifests or self.directory_of(step) for step in steps[-1:]):
                return manifests

    def metrics_by_step(self) -> dict[int, dict[str, float]]:
        """The complete steps, with their metrics: read once, for no other process writes here."""
        if self._metrics is None:
            manifests = self.manifests()
            self._metrics = {step: manifest.metrics for step, manifest in manifests.items()}
            for manifest in manifests.values():
                self.links |= manifest.links
        for step in self.bad:
            self._metrics.pop(step, None)
        return self._metrics

    def write(
        self, name: str, process: int, part: Manifest, blocks: Blocks, prove: bool
    ) -> Manifest:
        """This process's part, read back to `prove` it; returns its manifest with the hashes."""
        saved = {leaf.name: leaf for leaf in part.arrays()}
        hashes = _blocks.hashes_of(saved, blocks, blocks.__getitem__)
        self.write_blocks(name, process, saved, blocks)
        hashes_of_blocks = hashes()
        if prove:
            self.prove(name, process, saved, hashes_of_blocks)
        part = part.with_hashes(_blocks.leaf_sums(hashes_of_blocks))
        if process:  # the first process merges the manifests of the other ones
            self.write_file(self._part(name, process), part.dump())
        return part

    def _part(self, name: str, process: int) -> Path:
        return self.path / name / self.manifest_folder / f"part-{process}.json"

    def merged_manifest(self, name: str, first: Manifest, count: int) -> Manifest:
        """The manifest of a checkpoint, merged from the parts of all processes."""
        manifests = [first]
        for i in range(1, count):
            path = self._part(name, i)
            try:
                manifests.append(Manifest.parse(self.load(path, LIMIT)))
            except (OSError, ValueError) as error:
                raise Damaged(f"part of {processes.current().name_of(i)}: {told(error)}") from None
            path.unlink()
        return _manifest.merged(manifests)

    def put_manifest(self, name: str, whole: Manifest) -> None:
        body, folder = whole.dump(), self.path / name / self.manifest_folder
        Manifest.parse(body)  # raises, for example for a manifest that is too long
        self.write_file(folder / SUM, sum_of(body))
        self.write_file(folder / MANIFEST, body)  # last: in a bucket it makes the step

    def prepare(self) -> Any:
        """Make the run's directory; returns its identity. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError("not writable")
        about = os.stat(self.path)
        return about.st_dev, about.st_ino

    def probe(self, process: int) -> None:
        """Write, read and delete a small file. Raises if the directory allows no such thing."""
        file, content = self.path / f".tsunax-probe-{process}", b"A save can write here.\n"
        with contextlib.suppress(FileNotFoundError):
            file.unlink()  # a run was killed at this point
        self.write_file(file, content)
        if self.load(file, len(content)) != content:
            raise OSError("a small file came back with other bytes")
        file.unlink()

    def lock_text(self) -> str:
        """The text of the first process's lock; "" if this process cannot see the file."""
        with contextlib.suppress(OSError, ValueError):
            return self.load(self.path / durable_files.LOCK, 400).decode()
        return ""
