"""What every home of checkpoints does alike: manifests, what is known, who may write.

A home is a place where checkpoints are: `_disk_home` on a disk, `_orbax_home` by orbax, on a disk or in
a bucket. Beside the methods here it has

    steps, directory_of                        what is there
    read                                       slices of named arrays
    begin, start, write, commit, discard       one save; `start` alone is for the thread that saves
    drop, tidy                                 deletes; finishes what a killed run left half done

Leaves are compared and verified by those who call it, with the hashes of the manifest. One run
writes, others read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tsunax._core import durable_files, trees
from tsunax.checkpoints import manifest as _manifest
from tsunax.checkpoints._blocks import Blocks
from tsunax.checkpoints.checksums import Bounds
from tsunax.checkpoints.leaves import Damaged, Leaf, TooNew, Tree
from tsunax.checkpoints.manifest import LIMIT, Manifest
from tsunax.distributed import collectives
from tsunax.errors import CheckpointError, told

__all__ = []

MANIFEST, SUM = "manifest.json", "manifest.sha256"
_FOREIGN = tuple(
    "metadata .msgpack .pkl .pickle .pt .pth .ckpt .safetensors .npz .h5 .keras".split()
)


def sum_of(body: bytes) -> bytes:
    return f"{durable_files.sha256(body)}  {MANIFEST}\n".encode()


class CheckpointHome:
    """A run's directory, and what this process knows of it."""

    inside: str = ""  # where a checkpoint's directory has its manifest
    load: Any = staticmethod(durable_files.read)
    write_file: Any = staticmethod(durable_files.write)

    def __init__(self, path: Path, timeout: float = 600.0):
        self.path: Any = path
        self.timeout: float = timeout
        self.bad: dict[int, str] = {}  # steps that did not stand their verification, and why
        self.notes: list[str] = []  # to be told as warnings
        self._known: dict[int, dict[str, float]] | None = None

    # ------------------------------------------------------------------------- in the home's words

    def steps(self) -> list[int]:
        """Steps that a directory is named after, in order."""
        raise NotImplementedError

    def directory_of(self, step: int) -> Path | None:
        raise NotImplementedError

    def read(
        self, step: int, found: Manifest, wanted: list[Leaf],
        needed: list[tuple[Bounds, ...] | None],
    ) -> tuple[list[Any], dict[str, int]]:  # fmt: skip
        """Read the saved leaves, or what is needed of each, as host arrays.

        Also returned, by name: what the parts of a leaf add to its hash, if only parts of it were
        read. All other leaves are verified. Raises Damaged.
        """
        raise NotImplementedError

    def begin(self, step: int) -> str:
        """The name under which a checkpoint of this step is written by all processes."""
        raise NotImplementedError

    def start(self, name: str, tree: Tree, found: list[Leaf], blocks: Blocks) -> None:
        """The part of a save that must run in the thread that calls `save`."""

    def write(
        self, name: str, process: int, part: Manifest, blocks: Blocks, prove: bool
    ) -> Manifest:
        """This process's part of a checkpoint: its manifest, with the hashes.

        With `prove` it is read back, here or in `commit`: older ones are to be deleted for it.
        """
        raise NotImplementedError

    def commit(self, name: str, whole: Manifest | None) -> None:
        """Add the manifest, which the first process knows, and make it the checkpoint."""
        raise NotImplementedError

    def discard(self, name: str) -> None:
        raise NotImplementedError

    def drop(self, steps: Iterable[int]) -> None:
        """Delete checkpoints, except those in which a user keeps files of his own."""
        raise NotImplementedError

    def tidy(self) -> None:
        raise NotImplementedError

    # ---------------------------------------------------------------------------- what is there

    def manifest(self, step: int) -> Manifest:
        """What a checkpoint says of itself. Raises Damaged, or TooNew."""
        folder = self.directory_of(step)
        if folder is None:
            raise Damaged("not a directory")
        try:
            expected = self.load(folder / self.inside / SUM, 200)
            body = self.load(folder / self.inside / MANIFEST, LIMIT)
        except FileNotFoundError:
            raise Damaged("no manifest") from None
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
        for step in self.steps():
            with contextlib.suppress(Damaged, TooNew):
                yield step, self.manifest(step)

    def known(self) -> dict[int, dict[str, float]]:
        """The complete steps, with their metrics.

        They are read once, because nobody else writes here.
        """
        if self._known is None:
            self._known = {step: found.metrics for step, found in self.manifests()}
        for step in [step for step in self._known if step in self.bad]:
            del self._known[step]
        return self._known

    def note(self, step: int, found: Manifest) -> None:
        self.known()[step] = found.metrics

    def check_not_foreign(self) -> None:
        names = names_in(self.path)
        if odd := [name for name in names if name.lower().endswith(_FOREIGN)]:
            got, expected = trees.listed(odd, 4), "checkpoints of tsunax, or none"
            fix = "tsunax.exchange reads safetensors, flax's msgpack and orbax's directories."
            raise CheckpointError("checkpoints", str(self.path), got, expected, fix)

    # ------------------------------------------------------------------------- what is written

    def put_part(self, name: str, process: int, part: Manifest) -> None:
        """Store the manifest of this process's part for the first process."""
        if process:
            self.write_file(self.path / name / self.inside / _part(process), part.dump())

    def together(self, name: str, first: Manifest, count: int) -> Manifest:
        """The manifest of a checkpoint whose parts all processes have written."""
        found = [first]
        for i in range(1, count):
            path = self.path / name / self.inside / _part(i)
            try:
                found.append(Manifest.parse(self.load(path, LIMIT)))
            except (OSError, ValueError) as error:
                raise Damaged(f"part of {collectives.name_of(i)}: {told(error)}") from None
            path.unlink()
        return _manifest.merged(found)

    def put_manifest(self, name: str, whole: Manifest) -> None:
        body, folder = whole.dump(), self.path / name / self.inside
        if len(body) > LIMIT:
            raise ValueError(f"a manifest of {len(body)} bytes, more than {LIMIT}")
        Manifest.parse(body)
        self.write_file(folder / MANIFEST, body)
        self.write_file(folder / SUM, sum_of(body))

    # --------------------------------------------------------------------------- who may write

    def prepare(self) -> Any:
        """Make the run's directory; returns its identity. Raises OSError, CheckpointError."""
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError("path", str(self.path), "a file", "a directory of checkpoints")
        self.path.mkdir(parents=True, exist_ok=True)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError("not writable")
        about = os.stat(self.path)
        return about.st_dev, about.st_ino

    def lock(self, is_first: bool) -> durable_files.Lock:
        return durable_files.Lock(self.path, is_mine=is_first)

    def lock_text(self) -> str:
        """What the first process wrote into its lock; "" if it cannot be seen here."""
        with contextlib.suppress(OSError, ValueError):
            return self.load(self.path / durable_files.LOCK, 400).decode()
        return ""


def names_in(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _part(process: int) -> str:
    return f"part-{process}.json"
