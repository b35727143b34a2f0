"""What happened in a sweep, line by line: JSON, appended, on the disk before anything follows.

    {"sweep": {...}, "crc": ...}        what is searched: a directory goes on with this alone
    {"start": [3], "crc": ...}
    {"end": [{"index": 3, ...}], "crc": ...}

A process may die at any byte. The line that it did not finish is cut off by the next process; a
line that was damaged since is an error.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import warnings
import zlib
from pathlib import Path
from typing import Any

from tsunax._core import durable_files
from tsunax.errors import CheckpointError, SaveError, told
from tsunax.tuning._trials import Trial, as_record, from_record, index_of

NAME = "trials.jsonl"
VERSION = 1
_FIRST = b'{"sweep": {'  # what every journal begins with
# what can be wrong with a line whose checksum is right
_ODD = (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError)


class Journal:
    """What happened so far; `opened` makes one that writes.

    `trials` are those that ended. `deaths` counts how often the process died in a trial that has no
    end, `deaths_together` in its whole group.
    """

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}
        self.trials: dict[int, Trial] = {}
        self.deaths: collections.Counter[int] = collections.Counter()
        self.deaths_together: collections.Counter[int] = collections.Counter()
        self._path, self._fd = Path(), -1
        self._lock: durable_files.Lock | None = None

    def start(self, indices: list[int]) -> None:
        """Trials begin."""
        self._write({"start": indices})

    def interrupt(self, indices: list[int]) -> None:
        """A signal ended these trials; they have not died."""
        self._write({"interrupted": indices})

    def end(self, trials: list[Trial]) -> None:
        """Trials ended."""
        self._write({"end": [as_record(trial) for trial in trials]})
        self.trials |= {trial.index: trial for trial in trials}

    def close(self) -> None:
        """Let another process write."""
        if self._fd >= 0:
            os.close(self._fd)
        if self._lock is not None:
            self._lock.release()

    def _write(self, record: dict[str, Any]) -> None:
        """One line more, on the disk when this returns; or SaveError, and no line more."""
        if self._fd < 0:
            return
        size = os.fstat(self._fd).st_size
        text = json.dumps(record, allow_nan=False)[:-1].encode()
        line = memoryview(text + b', "crc": ' + _crc(text) + b"}\n")
        try:
            while line:
                line = line[os.write(self._fd, line) :]
            os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            raise SaveError("journal", str(self._path), told(error), "a line more") from error

    def _read(self, record: dict[str, Any]) -> None:
        """Count a record. Raises one of `_ODD` for one that `_write` did not write."""
        ((kind, said),) = record.items()
        if kind == "sweep" and not self.about:
            self.about |= said
            are_texts = all(isinstance(text, str) for text in said["space"].values())
            if said["mode"] not in ("min", "max") or not are_texts:
                raise ValueError("no sweep")
        elif kind == "end":
            for trial in map(from_record, said):
                if self.trials.setdefault(trial.index, trial) is not trial:
                    raise ValueError(f"two ends of trial {trial.index}")
        else:
            more = {"start": 1, "interrupted": -1}[kind]
            counts = self.deaths if len(said) == 1 else self.deaths_together
            counts.update({index_of(i): more for i in said})


def opened(folder: Path | None, about: dict[str, Any]) -> Journal:
    """The journal of a directory, for one process at a time; None: one that is written nowhere.

    Raises CheckpointError for a directory of another sweep.
    """
    if folder is None:
        return Journal()
    held = lock(folder)
    journal, path = Journal(), folder / NAME
    try:
        if path.exists():
            journal = load(path)
            cut_torn_line(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        journal._path, journal._fd = path, os.open(path, flags, 0o666)
        if journal.about:
            check_same(journal.about, about, folder)
        else:
            journal._write({"sweep": about})
            durable_files.sync(folder)
        journal._lock = held
        return journal
    except BaseException:
        journal.close()
        held.release()
        raise


def lock(folder: Path) -> durable_files.Lock:
    """Make this process the only one that writes into a directory. Raises CheckpointError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return durable_files.Lock(folder, reader="ts.tuning.read(directory)")
    except OSError as error:
        where, expected = str(folder), "one to write into"
        raise CheckpointError("directory", where, told(error), expected) from error


def load(path: Path) -> Journal:
    """What a journal says, but for a last line that is still being written."""
    journal, refuse = Journal(), lambda *words: CheckpointError("journal", *words)
    try:
        with durable_files.opened(path) as file:
            *lines, torn = file.read().split(b"\n")
    except OSError as error:
        raise refuse(str(path), told(error), "a sweep's journal") from error
    if not lines and not torn.startswith(_FIRST[: len(torn)]):
        raise refuse(str(path), repr(torn[:40]), "a sweep's journal")
    for number, line in enumerate(lines, 1):
        content, _, crc = line.rpartition(b', "crc": ')
        expected, why = "a line with its checksum", "It was changed, or its disk fails"
        try:
            if crc != _crc(content) + b"}":
                raise ValueError("checksum")
            expected, why = "a record that tune() writes", "Another program wrote it"
            record = json.loads(content + b"}")
            if number == 1 and (version := record["sweep"]["version"]) != VERSION:
                expected, why = f"version {VERSION}", "Another tsunax wrote it"
                raise ValueError(f"version {version}")
            journal._read(record)
        except _ODD as error:
            got = str(error) if "version" in expected else repr(line[:40])
            fix = f"{why}. The lines before it are good: keep them, and delete the others."
            raise refuse(f"{path}, line {number}", got, expected, fix) from error
    return journal


def _crc(text: bytes) -> bytes:
    return b'"%08x"' % zlib.crc32(text)


def cut_torn_line(path: Path) -> None:
    """Cut off what a writer that died left behind the last whole line."""
    with open(path, "r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            os.fsync(file.fileno())
            text = f"{path}: a line that was cut short is dropped: {content[whole:][:40]!r}"
            warnings.warn(text, stacklevel=4)


def check_same(old: dict[str, Any], new: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError if a directory is of another sweep; warn of another objective."""
    flat = lambda about: {
        **{f"space[{name!r}]": said for name, said in about["space"].items()},
        **{name: said for name, said in about.items() if name not in ("space", "objective")},
    }
    there, here = old.get("objective"), list(new["objective"])
    if there is not None and there != here:
        is_same = there[0] == here[0]
        was = f"other code of {here[0]!r}" if is_same else f"another objective, {there[0]!r}"
        text = f"tune(): the trials in {folder} are of {was}, and are kept as they are. "
        warnings.warn(f"{text}Give another directory to run all anew.", stacklevel=4)
    before, now = flat(old), flat(new)
    for name in {**before, **now}:
        got, expected = now.get(name, "nothing"), before.get(name, "nothing")
        if got != expected:
            expected = f"{expected}, as in {folder}"
            raise CheckpointError(name, "tune()", got, expected, "Give another directory.")
