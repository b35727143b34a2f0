"""The home of checkpoints on a local or shared disk: a directory for each step.

    tsunax.lock
    4/manifest.json, manifest.sha256      what is in it, and that all of it is there: written last
    4/arrays/0.safetensors                the blocks that process 0 wrote, under readable names
    .tsunax-tmp-6-0123abcd/               what is being written
    .tsunax-old-2-0123abcd/               what is being deleted, or replaced

The commit protocol: everything is written under a hidden name, and every file and directory
synced; then the manifest with its checksum, and the directory again; then one rename gives it the
name of its step, and the run's directory is synced. So a directory with a step's name is whole, in
whatever instant the process or the machine ended. What is replaced gets a hidden name before that
rename and is deleted after it; `tidy` puts it back if the rename did not come. What is only
deleted gets a hidden name first, too, and loses its manifest first.

Another home has the same methods: `begin`, `write`, `commit` for what is saved, `steps`,
`manifest`, `read` for what is there, `drop` and `tidy`. Leaves are compared and verified by those
who call them. One process works on a directory, others read.
"""

from __future__ import annotations

import concurrent.futures.thread  # now: at the end of the interpreter it could not be loaded
import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tsunax import errors
from tsunax._core import durable_files, trees
from tsunax.checkpoints import _blocks, _safetensors, checksums
from tsunax.checkpoints import manifest as _manifest
from tsunax.checkpoints._blocks import Blocks
from tsunax.checkpoints.checksums import Bounds
from tsunax.checkpoints.leaves import Damaged, Leaf, TooNew
from tsunax.checkpoints.manifest import LIMIT, Manifest
from tsunax.distributed import processes
from tsunax.errors import CheckpointError, told

__all__ = []

MANIFEST, SUM, ARRAYS = "manifest.json", "manifest.sha256", "arrays"
KNOWN = (MANIFEST, SUM, ARRAYS)
_FOREIGN = ("_CHECKPOINT_METADATA", "_METADATA", "checkpoint", "commit_success.txt")
_FOREIGN_ENDS = ".msgpack .pkl .pickle .pt .pth .ckpt .safetensors .npz .h5 .keras".split()
NO_CODE = "Nothing in it was opened."


def sum_of(body: bytes) -> bytes:
    return f"{durable_files.sha256(body)}  {MANIFEST}\n".encode()


class Files:
    """A run's directory, and what this process knows of it."""

    def __init__(self, path: Path):
        self.path = path
        self.bad: dict[int, str] = {}  # steps that did not stand their verification, and why
        self.notes: list[str] = []  # to be told as warnings
        self.not_finite: set[int] = set()  # steps that are there, and that no run goes on from
        self._known: dict[int, dict[str, float]] | None = None

    # ---------------------------------------------------------------------------- what is there

    def steps(self, warn: bool = True) -> list[int]:
        """Steps that a directory is named after, in order; says which odd names are ignored."""
        found = []
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            names = []
        for name in names:
            step, path = durable_files.step_of(name), self.path / name
            if step is not None and durable_files.is_real_directory(path):
                found.append(step)
            elif (
                warn and (step is not None or name.lstrip("-+").isdigit()) and os.path.lexists(path)
            ):
                why = "no step's name" if step is None else "a file"
                errors.warn(f"{path} is ignored: {'a link' if path.is_symlink() else why}.")
        return sorted(found)

    def is_there(self, step: int) -> bool:
        return durable_files.is_real_directory(self.path / str(step))

    def manifest(self, step: int) -> Manifest:
        """What a checkpoint says of itself. Raises Damaged, or TooNew."""
        folder = self.path / str(step)
        if not self.is_there(step):
            raise Damaged("not a directory")
        try:
            expected = durable_files.read(folder / SUM, 200)
            body = durable_files.read(folder / MANIFEST, LIMIT)
        except FileNotFoundError:
            plain = any(os.path.lexists(folder / name) for name in _FOREIGN)
            what = "no manifest" + (": orbax's own, not tsunax's" if plain else "")
            raise Damaged(what) from None
        except (OSError, ValueError) as error:
            raise Damaged(f"manifest: {told(error)}") from None
        if expected != sum_of(body):
            raise Damaged("manifest: other bytes than were saved (sha256)")
        found = Manifest.parse(body)
        if found.step != step:
            raise Damaged(f"manifest: of step {found.step}")
        return found

    def manifests(self) -> Iterator[tuple[int, Manifest]]:
        """The manifests of the complete steps."""
        for step in self.steps(warn=False):
            with contextlib.suppress(Damaged, TooNew):
                yield step, self.manifest(step)

    def known(self) -> dict[int, dict[str, float]]:
        """The complete steps that are finite, and their metrics; read once, because nobody else
        writes here.
        """
        if self._known is None:
            self._known = {}
            for step, found in self.manifests():
                self._note(step, found)
        for step in [step for step in self._known if step in self.bad]:
            del self._known[step]
        return self._known

    def _note(self, step: int, found: Manifest) -> None:
        assert self._known is not None
        if found.not_finite:
            self.not_finite.add(step)
            self._known.pop(step, None)
        else:
            self.not_finite.discard(step)
            self._known[step] = found.metrics

    def check_not_foreign(self) -> None:
        names = sorted(os.listdir(self.path)) if os.path.isdir(self.path) else []
        ends = tuple(_FOREIGN_ENDS)
        if odd := [name for name in names if name in _FOREIGN or name.lower().endswith(ends)]:
            got, expected = trees.listed(odd, 4), "checkpoints of tsunax, or none"
            reads = "tsunax.exchange reads safetensors, flax's msgpack and orbax's directories."
            fix = f"{NO_CODE} {reads}"
            raise CheckpointError("checkpoints", str(self.path), got, expected, fix)

    def read(
        self, step: int, found: Manifest, wanted: list[Leaf],
        needed: list[tuple[Bounds, ...] | None],
    ) -> tuple[list[Any], dict[str, int]]:  # fmt: skip
        """The saved leaves, or what is needed of each, as host arrays; and for leaves of which only
        parts were read, by name, what these have in the hash. All others are verified.

        Raises Damaged.
        """
        arrays = self.path / str(step) / ARRAYS
        if any(leaf.dtype for leaf in wanted) and not durable_files.is_real_directory(arrays):
            raise Damaged("arrays: missing")
        try:
            stored = _blocks.stored_in(arrays / f"{i}.safetensors" for i in range(len(found.parts)))
            one = lambda leaf, parts: _blocks.read_leaf(leaf, parts, stored.get(leaf.name, []))
            with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                answers = list(pool.map(one, wanted, needed))
        except OSError as error:
            raise Damaged(f"arrays: {told(error)}") from None
        sums = zip(wanted, answers, strict=True)
        return [x for x, _ in answers], {leaf.name: x for leaf, (_, x) in sums if x is not None}

    # -------------------------------------------------------------------------- what is written

    def begin(self, step: int) -> str:
        """Where a checkpoint of this step is to be written by all processes."""
        return durable_files.aside(self.path, "tmp", step).name

    def write(
        self, name: str, process: int, part: Manifest, blocks: Blocks, prove: bool
    ) -> Manifest:
        """This process's part of a checkpoint, on the disk: its manifest, with the hashes.

        With `prove` it is read back, because older ones are to be deleted for it.
        """
        folder = self.path / name
        arrays = folder / ARRAYS
        for new in (folder, arrays):  # not the run's own: if it is gone, it was moved or deleted
            new.mkdir(exist_ok=True)
        file = arrays / f"{process}.safetensors"
        saved = {leaf.name: leaf for leaf in part.arrays()}
        hashes = _blocks.hashes_of(saved, blocks, lambda block, _: blocks[block])
        if blocks:
            _blocks.write_arrays(file, blocks)
        found = hashes()
        if prove and blocks:
            entries = _safetensors.contents(file)[0]
            again = _blocks.hashes_of(
                saved, entries, lambda block, leaf: _blocks.read_entry(entries[block], leaf)
            )()
            for block, value in found.items():
                if again.get(block) != value:
                    raise Damaged(_blocks.other_bytes(saved[_blocks.parse_name(block)[0]]))
        sums: dict[str, int] = {}
        for block, value in found.items():
            leaf = _blocks.parse_name(block)[0]
            sums[leaf] = (sums.get(leaf, 0) + value) % checksums.MODULUS
        part = part.with_hashes(sums)
        durable_files.sync(arrays)
        if process:
            durable_files.write(folder / _part(process), part.dump())
        return part

    def together(self, name: str, first: Manifest, count: int) -> Manifest:
        """The manifest of a checkpoint whose parts all processes have written."""
        found = [first]
        for i in range(1, count):
            path = self.path / name / _part(i)
            try:
                found.append(Manifest.parse(durable_files.read(path, LIMIT)))
            except (OSError, ValueError) as error:
                raise Damaged(f"part of {processes.name_of(i)}: {told(error)}") from None
            os.unlink(path)
        return _manifest.merged(found)

    def commit(self, name: str, whole: Manifest) -> None:
        """Give what was written under `name` its manifest and the name of its step."""
        body, step, folder = whole.dump(), whole.step, self.path / name
        if len(body) > LIMIT:
            raise ValueError(f"a manifest of {len(body)} bytes, more than {LIMIT}")
        Manifest.parse(body)
        durable_files.write(folder / MANIFEST, body)
        durable_files.write(folder / SUM, sum_of(body))
        durable_files.sync(folder)
        self.known()
        old = self._make_room(step)
        os.rename(folder, self.path / str(step))
        durable_files.sync(self.path)
        self._note(step, whole)
        self.bad.pop(step, None)
        if old is not None:
            durable_files.remove(old, KNOWN)

    def discard(self, name: str) -> None:
        """Delete what was being written."""
        shutil.rmtree(self.path / name, ignore_errors=True)

    def _make_room(self, step: int) -> Path | None:
        """Move what has this step's name out of the way: to be deleted if it is a checkpoint, to
        stay if it is not.
        """
        final = self.path / str(step)
        if not os.path.lexists(final):
            return None
        if not durable_files.is_real_directory(final):
            raise FileExistsError(f"{final} is no directory of ours")
        try:
            if step in self.bad:
                raise Damaged(self.bad[step])
            self.manifest(step)
            if self._is_ours(final):
                old = durable_files.aside(self.path, "old", step)
                os.rename(final, old)
                return old
            why = "it holds files that are not tsunax's"
        except (Damaged, TooNew) as error:
            why = str(error)
        for n in range(1, 1000):
            other = self.path / f"{step}.damaged-{n}"
            if not os.path.lexists(other):
                os.rename(final, other)
                self.notes.append(f"{final} was moved to {other.name}: {why}.")
                return None
        raise FileExistsError(f"{final} cannot be moved aside")

    @staticmethod
    def _is_ours(folder: Path) -> bool:
        return durable_files.is_real_directory(folder) and set(os.listdir(folder)) <= set(KNOWN)

    def drop(self, steps: Iterable[int]) -> None:
        """Delete checkpoints; not those in which somebody keeps a file of his own."""
        for step in steps:
            self.known().pop(step, None)
            self.not_finite.discard(step)
            if self._is_ours(folder := self.path / str(step)):
                old = durable_files.aside(self.path, "old", step)
                os.rename(folder, old)
                durable_files.remove(old, KNOWN)

    def tidy(self) -> None:
        """Finish what a killed run left half done: drop what it was writing, put back what it was
        replacing.
        """
        for name in sorted(os.listdir(self.path)):
            mine, folder = durable_files.ours(name), self.path / name
            if mine is None or not durable_files.is_real_directory(folder):
                continue
            kind, step = mine
            final = self.path / str(step)
            if kind == "tmp":
                self.discard(name)
            elif (folder / MANIFEST).is_file() and not os.path.lexists(final):
                os.rename(folder, final)
            else:
                durable_files.remove(folder, KNOWN)


def _part(process: int) -> str:
    return f"part-{process}.json"
