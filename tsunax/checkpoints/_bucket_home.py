"""The home of checkpoints in a bucket, `s3://` or `gs://`: a name for each save of a step.

    tsunax.lock                               the run that writes
    4/1-0123abcd/arrays/0.safetensors         as on a disk, under a name that no other save has
    4/1-0123abcd/manifest.sha256
    4/1-0123abcd/manifest.json                put last, in one request: it makes the step

A bucket renames nothing, and an object is whole or absent. So a step counts if its manifest is
there, and a deletion begins with the manifest. If a step is saved again, the save gets the next
number, and the previous save is deleted; if both are there, the higher number counts. A writer
lists the bucket when it opens the bucket, and never in a save, because no other run writes: a run
that comes later takes the lock, and the earlier run is refused before its next manifest.
"""

import contextlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable
from typing import Any

from tsunax._core import durable_files
from tsunax.checkpoints import _bucket
from tsunax.checkpoints._blocks import Blocks, Saved
from tsunax.checkpoints._bucket import BucketPath
from tsunax.checkpoints._home import ARRAYS, EARLY_NAMES, MANIFEST, SUM, CheckpointHome
from tsunax.checkpoints.manifest import Manifest
from tsunax.errors import CheckpointError, warn

_OBJECT = re.compile(
    r"((?:0|[1-9]\d{0,14})/[1-9]\d{0,5}-[0-9a-f]{8})"
    r"/(manifest\.json|manifest\.sha256|part-\d{1,6}\.json|arrays/\d{1,6}\.safetensors)",
    re.ASCII,
)
Saves = dict[str, set[str]]  # the objects of each save, by its name


def _step_and_number(name: str) -> tuple[int, int]:
    step, number, _ = re.split("[/-]", name)
    return int(step), int(number)


def _whole(saves: Saves) -> dict[int, str]:
    """The save of each step that counts: the newest that has a manifest."""
    names = sorted((x for x, objects in saves.items() if MANIFEST in objects), key=_step_and_number)
    return {_step_and_number(name)[0]: name for name in names}


class BucketLock:
    """The object that names the run which writes: the run that comes last takes it, and warns.

    No bucket drops a lock when a process dies, and a lock that expires would keep a preempted run
    from starting at once. Of runs that start in the same moment one gets it.
    """

    def __init__(self, path: Any, is_first: bool):
        self.pid, self.text, self.run_id = os.getpid(), "", ""
        self.origin: tuple[str, str] = "", ""
        self._object, self._version = path / durable_files.LOCK, {}
        if is_first:
            self._take(path)

    def _take(self, path: BucketPath) -> None:
        facts, content, version = {}, b"", "create"
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            content, version = self._object.read(400)
            facts = dict(json.loads(content))
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.run_id = str(facts.get("run_id", f"{since[:10]}-{secrets.token_hex(4)}"))[:40]
        about = {"pid": self.pid, "host": socket.gethostname()[:80], "since": since}
        self.text = json.dumps({**about, "writer": secrets.token_hex(4), "run_id": self.run_id})
        # A repeated request meets its own object. The text that is there decides, read below.
        with contextlib.suppress(FileExistsError):
            self._object.write(self.text.encode(), version)
        current, self._version = self._object.read(400)
        if current.decode() != self.text:
            raise CheckpointError(
                "directory in use",
                str(path),
                got=f"a run that started now, {current.decode()}",
                expected="no other writer",
                fix="Wait for it to end, or give another path.",
            )
        if "pid" in facts:
            warn(
                f"{path} was in use, by {content.decode()}: that run, if it goes on, is refused at "
                "its next save."
            )

    def renew(self, path: BucketPath) -> None:
        if self.text and (current := self._object.read(400)[0].decode()) != self.text:
            raise FileExistsError(f"another run has {path} now: {current}")

    def release(self) -> None:
        if self.text and os.getpid() == self.pid:
            # After a failure another run has the lock, or the next run warns that it was in use.
            with contextlib.suppress(OSError):
                self._object.write(json.dumps({"run_id": self.run_id}).encode(), self._version)


class BucketHome(CheckpointHome):
    can_rewind = False
    write_file = staticmethod(BucketPath.write)
    stored_in = staticmethod(_bucket.stored_in)
    lock = BucketLock
    threads = _bucket.PARALLEL_REQUESTS
    proof_threads = 8

    def __init__(self, path: Any, timeout: float = 600.0):
        super().__init__(path, timeout)
        self._saves: Saves = {}  # a writer lists them when it opens the bucket

    @staticmethod
    def load(path: BucketPath, limit: int) -> bytes:
        return path.read(limit)[0]

    def names(self, path: BucketPath) -> list[str]:
        """The names in the directory, except the names of saves."""
        keys = [key for key in path.keys("") if not _OBJECT.fullmatch(key)]
        return sorted({key.partition("/")[0] for key in keys})

    def _listed(self, prefix: str = "") -> Saves:
        saves: Saves = {}
        for match in filter(None, map(_OBJECT.fullmatch, self.path.keys(prefix))):
            saves.setdefault(match[1], set()).add(match[2])
        return saves

    def directories(self, step: int | None = None) -> dict[int, list[Any]]:
        saves = self._listed("" if step is None else f"{step}/")
        return {step: [self.path / name] for step, name in _whole(saves).items()}

    def reserve_name(self, step: int) -> str:
        numbers = [_step_and_number(name)[1] for name in self._saves_of(step)]
        name = f"{step}/{max(numbers, default=0) + 1}-{secrets.token_hex(4)}"
        # If the save fails, its objects may be there all the same: the next save gets a new number.
        self._saves[name] = set()
        return name

    def write_blocks(self, name: str, process: int, saved: Saved, blocks: Blocks) -> None:
        if blocks:
            (self.path / name / ARRAYS / f"{process}.safetensors").write_arrays(blocks)

    def commit(self, name: str, whole: Manifest | None) -> None:
        if whole is None:
            return
        replaced = [x for x in self._saves_of(whole.step) if x != name]
        self.put_manifest(name, whole)
        files = {f"{ARRAYS}/{i}.safetensors" for i in range(len(whole.parts))}
        self._saves[name] = {MANIFEST, SUM, *files}
        with self.deleting(whole.step):
            self._remove(replaced)

    def _saves_of(self, step: int) -> list[str]:
        return [name for name in self._saves if _step_and_number(name)[0] == step]

    def _remove(self, names: Iterable[str]) -> None:
        """Delete saves: of each its manifest, and then the rest."""
        for name in names:
            (self.path / name).unlink(MANIFEST)
            # The objects of a failed save are unknown if its deletion failed, too.
            objects = self._saves[name] or self._listed(f"{name}/").get(name, set())
            if other_objects := objects - {MANIFEST}:
                (self.path / name).unlink(*other_objects)
            del self._saves[name]

    def discard(self, name: str) -> None:
        with contextlib.suppress(OSError):  # the error of the save is raised; `tidy` tries again
            self._saves |= self._listed(f"{name}/")
            self._remove({name} & set(self._saves))

    def delete(self, step: int) -> None:
        self._remove(self._saves_of(step))

    def tidy(self) -> None:
        self._saves = self._listed()
        with self.deleting("of an earlier run"):
            self._remove(set(self._saves) - set(_whole(self._saves).values()))
        self.metrics_by_step()  # now, not in the first save

    def _has_early_names(self, name: str) -> bool:
        files = [key.rpartition("/")[2] for key in self.path.keys(f"{name}/")]
        return bool(files) and all(map(EARLY_NAMES.match, files))

    def check_is_no_checkpoint(self) -> None:
        """Nothing: a lock within a checkpoint is one more object, and keeps no run out."""

    def prepare(self) -> str:
        return str(self.path)
