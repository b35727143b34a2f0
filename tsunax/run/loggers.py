"""Loggers: functions that get the rows of a run.

A logger is any `f(row, step=step)` with a row of Python numbers by name, such as `wandb.log`. The
loggers here also have `start(settings)`, called once before the first row, `sync()`, called before
each checkpoint, and `close()`, called at the end of every run. Making a logger opens nothing, so
that every process may make it and the main process use it.

`csv`, `jsonl` and `tensorboard` write files, and have one contract:

- Each row of a run is in the files once. The settings of a run with a checkpoint have its "run_id",
  which its rows or files carry, and "rows_from", the step at which it continues. Rows from that
  step on were written by a process that ended before it saved them: they are deleted.
- Rows of other runs stay as they are. A file that another tool wrote is refused.
- A row is a single write. If a killed process left a part of its last row, it is deleted.
- `sync()` puts all rows on the disk, because a run that resumes from the checkpoint does not write
  the earlier rows again.
"""

from __future__ import annotations

import contextlib
import csv as _csv
import html
import io
import itertools
import json
import math
import os
import re
import shutil
import socket
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tsunax._core import StrPath, durable_files
from tsunax._core.libraries import library
from tsunax._core.tables import short
from tsunax.errors import SaveError
from tsunax.run.media import Histogram, Image, Text

__all__ = ["Histogram", "Image", "Text", "console", "csv", "jsonl", "tensorboard", "tracker"]

Row = Mapping[str, Any]  # numbers; with `media = True` also images, histograms and texts
RUN_ID = "run_id"  # a setting, and a column with the run of each row


class _Log:
    """Rows of runs at a path, in a file that is open for appending."""

    def __init__(self, path: StrPath) -> None:
        self._where = f"{type(self).__name__}()"
        local_path = durable_files.local(path, "path", self._where, "a path")
        self.path: Path = Path(os.path.realpath(local_path))
        self._name_run({})
        self._file: Any = None

    def _name_run(self, settings: Mapping[str, Any]) -> None:
        self._run_id: str = str(settings.get(RUN_ID, ""))
        # Rows of these runs belong to this run. It may be a copy of another run, with its log.
        self._runs: set[str] = {self._run_id, str(settings.get("copied_run", self._run_id))}

    def _append(self, content: bytes) -> None:
        while content:  # a disk that is nearly full takes a part, and raises at the rest
            content = content[self._file.write(content) :]

    def sync(self) -> None:
        """Wait until all rows are on the disk; OSError if they cannot be written."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            durable_files.sync(Path(self._file.name).parent)

    def close(self) -> None:
        """Close the file, if it is open; the next row opens it again, or a new one."""
        if self._file is not None:
            self._file.close()
        self._file = None


class _TextFile(_Log):
    """A file with a line for each row. Several runs may write into one, also at the same time."""

    _BEGINNINGS: tuple[str, ...]  # the beginnings that a file of this kind may have

    def start(self, settings: Mapping[str, Any]) -> None:
        """Open the file; delete rows of `settings["run_id"]` from step `settings["rows_from"]` on.

        `fit` calls it when a run begins, with both settings if the run has a checkpoint. Rows of a
        run without a "run_id" are never deleted. Raises SaveError for a file of another tool, and
        OSError for a path that cannot be written.
        """
        self.close()
        self._name_run(settings)
        with self._ready(settings.get("rows_from")):
            self._note(settings)

    def _note(self, settings: Mapping[str, Any]) -> None:
        """Write the settings, if the file has a place for them."""

    def _full_row(self, row: Row, step: int) -> dict[str, Any]:
        return {"step": step, **row} | ({RUN_ID: self._run_id} if self._run_id else {})

    @contextlib.contextmanager
    def _ready(self, first: int | None = None) -> Iterator[None]:
        """A block in which the file is open and whole, and no other logger changes it."""
        folder = os.path.dirname(self.path)
        if not os.path.isdir(folder):  # `makedirs` takes ten times as long
            os.makedirs(folder, exist_ok=True)
        lock = -1
        try:
            with contextlib.suppress(ImportError, OSError):  # not every system has such locks
                import fcntl

                lock = os.open(folder, os.O_RDONLY)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._is_whole():
                self._open(first)
            yield
        finally:
            if lock >= 0:
                os.close(lock)

    def _is_whole(self) -> bool:
        """Whether the open file still has this path, and its last line ends with a line break."""
        stat = self._file and os.fstat(self._file.fileno())
        with contextlib.suppress(FileNotFoundError):
            if stat and os.path.samestat(stat, os.stat(self.path)):
                self._file.seek(max(stat.st_size - 1, 0))
                return self._file.read(1) in (b"\n", b"")  # b"": an empty file
        return False

    def _open(self, first: int | None = None, names: Sequence[str] = ()) -> None:
        """Open the file after its repair: without a cut line, without rows of this run from step
        `first` on, with columns for `names`. A crash leaves the file before or after the repair.
        """
        self.close()
        content = self.path.read_bytes() if self.path.exists() else b""
        *lines, last_line = content.decode(errors="replace").split("\n")
        # A crash may have cut the first line, or left zeros in it. The comma is for a CSV file with
        # the column "step" alone.
        first_line = f"{lines[0]}," if lines else last_line.strip("\0")
        is_cut = lambda beginning: not lines and beginning.startswith(first_line)
        is_match = lambda beginning: first_line.startswith(beginning) or is_cut(beginning)
        if "\ufffd" in "".join(lines) or not any(map(is_match, self._BEGINNINGS)):
            expected = f"{self._BEGINNINGS[0]!r} at the beginning of this logger's own file"
            raise SaveError(str(self.path), self._where, repr(content[:40]), expected)
        lines.append(last_line)
        repaired = "".join(f"{x}\n" for x in self._repaired(lines, first, names)).encode()
        if repaired != content:
            new_path = self.path.with_name(f"{self.path.name}.new")
            new_path.unlink(missing_ok=True)  # a killed process may have left one
            durable_files.write(new_path, repaired)
            if self.path.exists():
                shutil.copymode(self.path, new_path)
            os.replace(new_path, self.path)
        self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115

    def _repaired(self, lines: list[str], first: int | None, names: Sequence[str]) -> list[str]:
        """The whole lines of the file without rows of this run from step `first` on.

        The last line has no line break: it was cut, unless it is a row before `first`. Such a row
        was on the disk before the checkpoint, and an editor may have removed the break.
        """
        unended = lines.pop()
        row = self._row(unended)
        if row and self._run_id and row[0] in self._runs and row[1] < (first or 0):
            lines.append(unended)
        if first is None or not self._run_id:
            return lines
        rows = [self._row(line) for line in lines]
        is_deleted = lambda row: row is not None and row[0] in self._runs and row[1] >= first
        return [line for line, row in zip(lines, rows, strict=True) if not is_deleted(row)]

    def _row(self, line: str) -> tuple[str, int] | None:
        """The run and the step of a row; None for a line that is no row."""
        ...


@dataclass(eq=False)
class console:
    """Print each row, a dict of numbers, as a line on stdout: its step and each name and number.

    >>> log = console()
    >>> log({"loss": 0.69314, "tokens_per_second": 125000.0}, step=100)
    step      100  loss 0.6931  tokens_per_second 125,000
    """

    def start(self, settings: Mapping[str, Any]) -> None:
        """Print `settings`, a dict, on one line: `name=value  name=value`."""
        print(*(f"{name}={value}" for name, value in settings.items()), sep="  ")

    def __call__(self, row: Row, step: int) -> None:
        numbers = (f"{name} {short(value)}" for name, value in row.items())
        print(f"step {step:>8,}", *numbers, sep="  ", flush=True)


class csv(_TextFile):
    """Append rows to the CSV file at `path`, with the column "step" and a column for each name.

    Numbers are written in full, NaN as `nan`; a cell is empty if its row has no such number. A new
    name rewrites the file with one more column. The rows of a run with a checkpoint have the column
    "run_id". CheckpointError for a path that is no str or Path.

        ts.fit(step, state, data, steps=1000, logger=ts.loggers.csv("run/rows.csv"))
    """

    _BEGINNINGS = ("step,",)

    def __call__(self, row: Row, step: int) -> None:
        cells = self._full_row(row, step)
        with self._ready():
            if not cells.keys() <= set(self._names):
                self._open(names=list(cells))
            line = _csv_line(cells.get(name, "") for name in self._names)
            self._append(f"{line}\n".encode())

    def _row(self, line: str) -> tuple[str, int] | None:
        with contextlib.suppress(ValueError, KeyError, _csv.Error):
            cells = dict(zip(self._names, next(_csv.reader([line]), []), strict=False))
            return cells.get(RUN_ID, ""), int(cells["step"])

    def _repaired(self, lines: list[str], first: int | None, names: Sequence[str]) -> list[str]:
        whole_lines = lines[:-1]
        header = next(_csv.reader(whole_lines[:1]), [])
        self._names: list[str] = header + [name for name in names if name not in header]
        lines = super()._repaired(lines, first, names)
        if self._names == header:
            return lines
        commas = "," * (len(self._names) - len(header))
        widened = lambda line: line.rstrip("\r") + commas if line else line
        return [_csv_line(self._names), *map(widened, lines[1:])]


def _csv_line(cells: Iterable[Any]) -> str:
    text = io.StringIO()
    _csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


class jsonl(_TextFile):
    """Append rows to the file at `path`, one JSON object a line: `{"step": 100, "loss": 0.69}`.

    The line `{"settings": {...}}` comes before the rows of a run; the rows of a run with a
    checkpoint have its "run_id". NaN and ±inf are written as null. A histogram is an object with
    "counts" and "edges", an image the path of a PNG file in the folder `path` + ".media".
    CheckpointError for a path that is no str or Path.

        ts.fit(step, state, data, steps=1000, logger=ts.loggers.jsonl("run/rows.jsonl"))
    """

    _BEGINNINGS = '{"step": ', '{"settings": '
    #: It takes images, histograms and texts.
    media = True

    def __call__(self, row: Row, step: int) -> None:
        row = self._full_row(row, step)
        line = json.dumps({name: self._as_json(name, x, step) for name, x in row.items()})
        with self._ready():
            self._append(f"{line}\n".encode())

    def _as_json(self, name: str, value: Any, step: int) -> Any:
        """A number or a text; a histogram as a dict; the path of a new PNG file for an image."""
        if isinstance(value, float):
            return value if math.isfinite(value) else None  # JSON has no NaN
        if isinstance(value, Histogram):
            return {"counts": value.counts.tolist(), "edges": value.edges.tolist()}
        if not isinstance(value, Image):
            return value.text if isinstance(value, Text) else value
        folder = self.path.with_name(f"{self.path.name}.media") / self._run_id
        folder.mkdir(parents=True, exist_ok=True)
        image, plain_name = value.png(), re.sub(r"[^A-Za-z0-9_-]", "_", name)
        # The checksum keeps images of other names and of other runs without a `run_id` apart.
        path = folder / f"{step}-{plain_name}-{zlib.crc32(image):08x}.png"
        durable_files.write_whole(path, image)  # an ended process may have written it
        return str(path.relative_to(self.path.parent))

    def _note(self, settings: Mapping[str, Any]) -> None:
        if settings:
            settings = {name: self._as_json(name, x, 0) for name, x in settings.items()}
            line = json.dumps({"settings": settings}, default=str)
            self._append(f"{line}\n".encode())

    def _row(self, line: str) -> tuple[str, int] | None:
        if line.startswith(self._BEGINNINGS[0]):
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                row = json.loads(line)
                return row.get(RUN_ID, ""), int(row["step"])
        return None


class tensorboard(_Log):
    """Write rows as TensorBoard scalars to `directory`, a path.

    Show them with `tensorboard --logdir=directory`. The settings of the run are the text
    "settings". Characters that a tag must not contain become "_". Raises CheckpointError for a
    directory that is no path, and MissingLibraryError without tensorboardX, both when it is made.
    """

    #: It takes images, histograms and texts.
    media = True

    def __init__(self, directory: StrPath) -> None:
        super().__init__(directory)
        library("tensorboardX", self._where, "loggers")
        self._events, self._summaries, self._summary, self._records = (
            library(f"tensorboardX.{name}", self._where, "loggers")
            for name in ("proto.event_pb2", "proto.summary_pb2", "summary", "record_writer")
        )

    def start(self, settings: Mapping[str, Any]) -> None:
        """Open an event file; delete the run's scalars from step `settings["rows_from"]` on.

        These scalars are in the event files of `settings["run_id"]`; without it none are deleted.
        Raises OSError for a path that cannot be written.
        """
        self.close()
        self._name_run(settings)
        first = settings.get("rows_from")
        if self._run_id and first is not None:
            for path in itertools.chain(*(self.path.glob(f"*{x}") for x in self._suffixes)):
                self._cut(path, first)
        self._open()
        if settings:
            table = [("name", "value"), ("---", "---"), *settings.items()]
            text = "".join(f"| {name} | {value} |\n" for name, value in table)
            self._append_event(step=first or 0, summary=self._summary.text("settings", text))

    def __call__(self, row: Row, step: int) -> None:
        if self._file is None:
            self._open()
        values = [self._value_of(name, x) for name, x in row.items()]
        self._append_event(step=step, summary=self._summaries.Summary(value=values))

    def _value_of(self, name: str, x: Any) -> Any:
        """A value of a summary."""
        if isinstance(x, Text):
            return self._summary.text(name, x.text).value[0]
        if isinstance(x, Image):
            height, width, channels = x.pixels.shape
            fields = {"height": height, "width": width, "colorspace": channels}
            image = self._summaries.Summary.Image(**fields, encoded_image_string=x.png())
            return self._summaries.Summary.Value(tag=name, image=image)
        if isinstance(x, Histogram):
            centers = (x.edges[1:] + x.edges[:-1]) / 2
            sums = (float(np.sum(x.counts * centers**power)) for power in (0, 1, 2))
            limits = float(x.edges[0]), float(x.edges[-1])
            arrays = x.edges[1:].tolist(), x.counts.tolist()
            return self._summary.histogram_raw(name, *limits, *sums, *arrays).value[0]
        return self._summary.scalar(name, x).value[0]

    @property
    def _suffixes(self) -> list[str]:
        """The ends of names of the run's event files: for this run, then for the copied run."""
        runs = sorted(self._runs, key=lambda run: run != self._run_id)
        return [f".{re.sub(r'[^A-Za-z0-9_-]', '_', run)}.tsunax" for run in runs]

    def _open(self) -> None:
        """Open a new event file: another process of this run may still write to an older file."""
        self.path.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{time.time_ns()}"
        self._file = open(self.path / f"{name}{self._suffixes[0]}", "xb", buffering=0)  # noqa: SIM115
        self._append_event(file_version="brain.Event:2")

    def _append_event(self, **fields: Any) -> None:
        """Append an event as a TFRecord: its length and its bytes, each with a checksum."""
        content = self._events.Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(content))
        checksum = lambda part: struct.pack("<I", self._records.masked_crc32c(part))
        self._append(length + checksum(length) + content + checksum(content))

    def _cut(self, path: Path, first: int) -> None:
        """Cut an event file before its first scalar of step `first` or later, or a cut record."""
        # A record is 8 bytes of length, 4 of checksum, the event, and 4 of checksum.
        content, end = path.read_bytes(), 0
        while (start := end) < len(content):
            end = start + 16 + int.from_bytes(content[start : start + 8], "little")
            is_whole = end <= len(content)
            event_bytes = content[start + 12 : end - 4] if is_whole else b""
            event = self._events.Event.FromString(event_bytes)
            is_row = any(not x.tag.startswith("settings/") for x in event.summary.value)
            if not is_whole or (event.step >= first and is_row):
                os.truncate(path, start)
                return durable_files.sync(path)


@dataclass(eq=False)
class tracker:
    """Log rows to a library that tracks experiments, `wandb` or `trackio`, with its open run.

    `library` has `log(row, step=)`, `Image`, `Histogram`, and `Markdown` or `Html` for texts. For
    numbers alone, `logger=wandb.log` does the same.

        wandb.init()
        ts.fit(step, state, data, steps=1000, logger=ts.loggers.tracker(wandb))
    """

    library: Any
    #: It takes images, histograms and texts.
    media = True

    def __call__(self, row: Row, step: int) -> None:
        self.library.log({name: self._converted(x) for name, x in row.items()}, step=step)

    def _converted(self, x: Any) -> Any:
        library = self.library
        if isinstance(x, Image):
            return library.Image(x.pixels)
        if isinstance(x, Histogram):
            return library.Histogram(np_histogram=(x.counts, x.edges))
        if isinstance(x, Text):
            is_plain = hasattr(library, "Markdown")
            return library.Markdown(x.text) if is_plain else library.Html(html.escape(x.text))
        return x
