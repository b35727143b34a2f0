"""The directory of a run: which steps are in it, how a new one gets its name, what is deleted.

    tsunax.lock
    4/manifest.json, manifest.sha256      what is in it, and that all of it is there: written last
    4/arrays/0.safetensors                the arrays of each process
    .tsunax-tmp-6-0123abcd/               what is being written
    .tsunax-old-2-0123abcd/               what is being deleted, or replaced

One process works on it, others read. It knows files and manifests; no state, no thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tsunax import errors
from tsunax._core import durable_files, trees
from tsunax.checkpoints.manifest import LIMIT, Damaged, Manifest, TooNew
from tsunax.errors import CheckpointError, message, told

__all__ = []

MANIFEST, SUM, ARRAYS = "manifest.json", "manifest.sha256", "arrays"
KNOWN = (MANIFEST, SUM, ARRAYS)
_FOREIGN = ("_CHECKPOINT_METADATA", "_METADATA", "checkpoint", "commit_success.txt")
_FOREIGN_ENDS = (
    ".msgpack",
    ".pkl",
    ".pickle",
    ".pt",
    ".pth",
    ".ckpt",
    ".safetensors",
    ".npz",
    ".h5",
    ".keras",
)
NO_CODE = "Nothing in it was opened."


def sum_of(body: bytes) -> bytes:
    return f"{durable_files.sha256(body)}  {MANIFEST}\n".encode()


def manifest_in(folder: Path, step: int) -> Manifest:
    """The manifest of a checkpoint's directory. Raises Damaged, or TooNew."""
    if not durable_files.is_real_directory(folder):
        raise Damaged("not a directory")
    try:
        expected = durable_files.read(folder / SUM, 200)
        body = durable_files.read(folder / MANIFEST, LIMIT)
    except FileNotFoundError:
        plain = any(os.path.lexists(folder / name) for name in _FOREIGN)
        raise Damaged("no manifest" + (": orbax's own, not tsunax's" if plain else "")) from None
    except (OSError, ValueError) as error:
        raise Damaged(f"manifest: {told(error)}") from None
    if expected != sum_of(body):
        raise Damaged("manifest: other bytes than were saved (sha256)")
    manifest = Manifest.parse(body)
    if manifest.step != step:
        raise Damaged(f"manifest: of step {manifest.step}")
    return manifest


class Folder:
    """A run's directory, and what this process knows of it."""

    def __init__(self, path: Path):
        self.path = path
        self.bad: dict[int, str] = {}  # steps that did not stand their verification, and why
        self.notes: list[str] = []  # to be told as warnings
        self.not_finite: set[int] = set()  # steps that are there, and that no run goes on from
        self._known: dict[int, dict[str, float]] | None = None

    def steps(self, warn: bool = True) -> list[int]:
        """Steps that a directory is named after, in order; says which odd names are ignored."""
        found = []
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            names = []
        for name in names:
            step = durable_files.step_of(name)
            real = durable_files.is_real_directory(self.path / name)
            if step is not None and real:
                found.append(step)
            elif (
                warn
                and (step is not None or name.lstrip("-+").isdigit())
                and os.path.lexists(self.path / name)
            ):
                why = (
                    "a link"
                    if os.path.islink(self.path / name)
                    else "no step's name"
                    if step is None
                    else "a file"
                )
                errors.warn(f"{self.path / name} is ignored: {why}.")
        return sorted(found)

    def known(self) -> dict[int, dict[str, float]]:
        """The complete steps that are finite, and their metrics; read once, because nobody else
        writes here.
        """
        if self._known is None:
            self._known = {}
            for step, manifest in self.manifests():
                self._note(step, manifest)
        for step in [step for step in self._known if step in self.bad]:
            del self._known[step]
        return self._known

    def manifests(self) -> Iterator[tuple[int, Manifest]]:
        """The manifests of the complete steps."""
        for step in self.steps(warn=False):
            with contextlib.suppress(Damaged, TooNew):
                yield step, manifest_in(self.path / str(step), step)

    def _note(self, step: int, manifest: Manifest) -> None:
        assert self._known is not None
        if manifest.not_finite:
            self.not_finite.add(step)
            self._known.pop(step, None)
        else:
            self.not_finite.discard(step)
            self._known[step] = manifest.metrics

    def check_not_foreign(self) -> None:
        names = sorted(os.listdir(self.path)) if os.path.isdir(self.path) else []
        odd = [name for name in names if name in _FOREIGN or name.lower().endswith(_FOREIGN_ENDS)]
        if odd:
            got, expected = trees.listed(odd, 4), "checkpoints of tsunax, or none"
            fix = (
                f"{NO_CODE} tsunax.exchange reads safetensors, flax's msgpack and orbax's "
                "directories."
            )
            raise CheckpointError(message("checkpoints", str(self.path), got, expected, fix))

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
                shutil.rmtree(folder, ignore_errors=True)
            elif (folder / MANIFEST).is_file() and not os.path.lexists(final):
                os.rename(folder, final)
            else:
                durable_files.remove(folder, KNOWN)

    def complete(self, folder: Path, manifest: Manifest) -> Path | None:
        """Give what was written into `folder` its manifest and its name.

        What had that name before, to be deleted.
        """
        body, step = manifest.dump(), manifest.step
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
        self._note(step, manifest)
        self.bad.pop(step, None)
        return old

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
            manifest_in(final, step)
            if set(os.listdir(final)) <= set(KNOWN):
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

    def drop(self, steps: list[int]) -> None:
        """Delete checkpoints; not those in which somebody keeps a file of his own."""
        for step in steps:
            folder = self.path / str(step)
            self.known().pop(step, None)
            self.not_finite.discard(step)
            if durable_files.is_real_directory(folder) and set(os.listdir(folder)) <= set(KNOWN):
                old = durable_files.aside(self.path, "old", step)
                os.rename(folder, old)
                durable_files.remove(old, KNOWN)
