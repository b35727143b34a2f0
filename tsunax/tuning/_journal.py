"""What happened in a sweep, line by line: JSON, appended, on the disk before anything follows from
it.

    {"sweep": {...}, "crc": ...}        what is searched: a directory goes on with this and nothing else
    {"start": [3], "crc": ...}
    {"end": [{"index": 3, ...}], "crc": ...}

A process may die at any byte. The line that it did not finish is cut off by the next one, and
everything before it stands; a line that was damaged since is an error. It knows nothing of
objectives.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tsunax._core import durable_files
from tsunax.errors import CheckpointError, SaveError, message, told

__all__ = ["NAME", "VERSION", "Journal", "cut_torn_line", "read"]

NAME = "trials.jsonl"
VERSION = 1
_FIRST = b'{"sweep": {'  # what every journal begins with


class Journal:
    """The journal of a directory, for one process at a time; `records` are those that were there
    before.
    """

    def __init__(self, folder: Path, about: dict[str, Any]):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = durable_files.Lock(folder, reader="ts.tuning.read(directory)")
        except OSError as error:
            raise CheckpointError(
                message("directory", str(folder), told(error), "one to write into")
            ) from error
        self._path, self._fd = folder / NAME, -1
        try:
            self.records = list(read(self._path)) if self._path.exists() else []
            cut_torn_line(self._path)
            flags = (
                os.O_WRONLY
                | os.O_CREAT
                | os.O_APPEND
                | getattr(os, "O_NOFOLLOW", 0)
                | getattr(os, "O_CLOEXEC", 0)
            )
            self._fd = os.open(self._path, flags, 0o666)
            if self.records:
                _check_same(self.records[0], about, folder)
            else:
                self.write({"sweep": about})
                durable_files.sync(folder)
        except BaseException:
            self.close()
            raise

    def write(self, record: dict[str, Any]) -> None:
        """One line more, on the disk when this returns.

        Raises SaveError, and the journal is as it was.
        """
        size = os.fstat(self._fd).st_size
        line = memoryview(_line(record))
        try:
            while line:
                line = line[os.write(self._fd, line) :]
            os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            raise SaveError(
                message("journal", str(self._path), told(error), "a line more")
            ) from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._lock.release()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a journal, but for a last line that is still being written.

    Raises CheckpointError.
    """
    try:
        with durable_files.opened(path) as file:
            content = file.read()
    except OSError as error:
        raise CheckpointError(
            message("journal", str(path), told(error), "a sweep's journal")
        ) from error
    *lines, last = content.split(b"\n")
    if not lines and not last.startswith(_FIRST[: len(last)]):
        raise CheckpointError(message("journal", str(path), repr(last[:40]), "a sweep's journal"))
    for i, line in enumerate(lines):
        record = _parsed(line)
        if not _is_record(record, i):
            is_whole = _content(line) is not None
            expected = "a record that tune() writes" if is_whole else "a line with its checksum"
            why = "Another program wrote it" if is_whole else "It was changed, or its disk fails"
            fix = f"{why}. The lines before it are good: keep them, and delete the others."
            where = f"{path}, line {i + 1}"
            raise CheckpointError(message("journal", where, repr(line[:40]), expected, fix))
        assert record is not None
        if i == 0 and (version := record["sweep"].get("version")) != VERSION:
            fix = "Another tsunax wrote it."
            raise CheckpointError(
                message("journal", str(path), f"version {version}", f"version {VERSION}", fix)
            )
        if i == 0 and not _is_about(record["sweep"]):
            raise CheckpointError(
                message("journal", f"{path}, line 1", repr(line[:40]), "a space and a mode")
            )
        yield record


def cut_torn_line(path: Path) -> None:
    """Cut off what a writer that died left behind the last whole line."""
    try:
        with open(path, "r+b") as file:
            content = file.read()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                file.truncate(whole)
                os.fsync(file.fileno())
                warnings.warn(
                    f"{path}: a line that was cut short is dropped: {content[whole:][:40]!r}",
                    stacklevel=4,
                )
    except FileNotFoundError:
        pass


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(_encoded(record), allow_nan=False)[:-1]
    return f'{text}, "crc": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def _content(line: bytes) -> bytes | None:
    """The JSON of a line whose checksum is right; else None."""
    text, mark, crc = line.rpartition(b', "crc": ')
    return text + b"}" if mark and crc == b'"%08x"}' % zlib.crc32(text) else None


def _parsed(line: bytes) -> dict[str, Any] | None:
    if (content := _content(line)) is None:
        return None
    try:
        return _decoded(json.loads(content))
    except (ValueError, KeyError, RecursionError):  # no line of ours
        return None


def _is_record(record: Any, i: int) -> bool:
    """Whether a line says what the lines of a journal say; its trials are looked at when they are
    made.
    """
    if not isinstance(record, dict) or len(record) != 1:
        return False
    ((kind, said),) = record.items()
    if i == 0 or kind == "sweep":
        return kind == "sweep" and i == 0 and isinstance(said, dict)
    if kind not in ("start", "interrupted", "end") or not isinstance(said, list):
        return False
    indices = [x.get("index") if kind == "end" and isinstance(x, dict) else x for x in said]
    return all(type(x) is int and 0 <= x < 1 << 31 for x in indices)


def _is_about(about: dict[str, Any]) -> bool:
    space = about.get("space")
    is_space = isinstance(space, dict) and all(isinstance(text, str) for text in space.values())
    return is_space and about.get("mode") in ("min", "max")


_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _encoded(x: Any) -> Any:
    """JSON has no nan and no inf: they are {"float": "nan"}."""
    if isinstance(x, float) and not math.isfinite(x):
        return {"float": str(x)}
    if isinstance(x, dict):
        return {key: _encoded(value) for key, value in x.items()}
    return [_encoded(value) for value in x] if isinstance(x, list | tuple) else x


def _decoded(x: Any) -> Any:
    if isinstance(x, dict):
        if list(x) == ["float"] and isinstance(x["float"], str):
            return _NUMBERS[x["float"]]
        return {key: _decoded(value) for key, value in x.items()}
    return [_decoded(value) for value in x] if isinstance(x, list) else x


def _check_same(first: dict[str, Any], about: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError if a directory is of another sweep, naming what differs; warn of
    another objective.
    """
    old, new = dict(first["sweep"]), json.loads(json.dumps(about))
    fix = "Give another directory."
    there, here = old.pop("objective", None), new.pop("objective", None)
    if there != here and there is not None and here is not None:
        was = (
            f"other code of {here[0]!r}"
            if there[0] == here[0]
            else f"another objective, {there[0]!r}"
        )
        text = (
            f"tune(): the trials in {folder} are of {was}, and are kept as they are. {fix[:-1]} "
            "to run all anew."
        )
        warnings.warn(text, stacklevel=4)
    for name in {**old.get("space", {}), **new["space"]}:
        there, here = old.get("space", {}).get(name, "nothing"), new["space"].get(name, "nothing")
        if there != here:
            raise CheckpointError(
                message(f"space[{name!r}]", "tune()", here, f"{there}, as in {folder}", fix)
            )
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            raise CheckpointError(
                message(name, "tune()", new.get(name), f"{old.get(name)}, as in {folder}", fix)
            )
