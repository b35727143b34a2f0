"""Loggers: where the rows of a run go.

A logger is any `f(row, step=step)` with a row of Python numbers by name; `wandb.log` is one. Those
here also have `start(settings)`, called once before the first row, and `close()`, called at the end
of every run. Making one opens nothing, so that every process may make it and the main one use it.

A file is appended to. If `fit` resumes a run, its settings have "rows_from": rows from that step,
which the interrupted run wrote beyond its checkpoint, are dropped.
"""

from __future__ import annotations

import csv as _csv
import io
import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tsunax._core import StrPath, durable_files, trees
from tsunax._core.libraries import library
from tsunax.errors import SaveError, WrongTypeError, told

__all__ = ["console", "csv", "jsonl", "tensorboard"]

Row = Mapping[str, float]
_STEP = re.compile(r'(?:\{"step": )?(\d+)')  # a row begins with it, in both kinds of files


def _path(where: str, path) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise WrongTypeError("path", where, trees.describe(path), "a str or Path")
    return Path(durable_files.local(path, "path", where))


def _write(path: Path, lines: Iterable[str]) -> None:
    """Put a whole file in place at once: a reader, or a crash, sees the old one or the new one."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)  # of a process that was killed
    durable_files.write(new, "".join(lines).encode())
    os.replace(new, path)


@dataclass(eq=False)
class _TextFile:
    """A file with a line for each row, appended to."""

    path: StrPath

    def __post_init__(self) -> None:
        self.path = _path(f"{type(self).__name__}()", self.path)
        self._file: TextIO | None = None

    def start(self, settings: Mapping[str, Any]) -> None:
        """Open the file, and delete its rows from step `settings["rows_from"]` on, if given.

        `fit` calls it when a run begins, `start({"rows_from": 500, ...})` if it was resumed. Raises
        SaveError for a path that cannot be written.
        """
        self.close()
        path, first = Path(self.path), settings.get("rows_from")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if first is not None and path.exists():
                # a last line without its end was being written when the process died
                lines = path.read_text(encoding="utf-8").split("\n")[:-1]
                found = ((line, _STEP.match(line)) for line in lines)
                _write(path, (f"{line}\n" for line, row in found if not row or int(row[1]) < first))
            self._file = open(path, "a", encoding="utf-8", newline="", buffering=1)  # noqa: SIM115
        except OSError as error:
            where, expected = f"{type(self).__name__}()", "a path that can be written"
            raise SaveError("path", where, told(error), expected) from error

    def close(self) -> None:
        """Close the file, if it is open; the next row opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None


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


def short(value: float) -> str:
    """A number for people, in at most nine characters: 4 digits, and thousands apart.

    >>> [short(x) for x in (0.693147, 3, 12345678, 1234.56, 1.5e-7, float("nan"))]
    ['0.6931', '3', '12,345,678', '1,235', '1.5e-07', 'nan']
    """
    is_large = math.isfinite(value) and (isinstance(value, int) or 1000 <= abs(value) < 1e9)
    return f"{value:,.0f}" if is_large else f"{value:.4g}"


class csv(_TextFile):
    """Append rows to the CSV file at `path`, with the column "step" and a column for each name.

    Numbers are written in full, NaN as `nan`; a cell is empty if its row has no such number. A new
    name rewrites the file with one more column. WrongTypeError for a path that is no str or Path.

        ts.fit(step, state, data, steps=1000, logger=ts.loggers.csv("run/rows.csv"))
    """

    def start(self, settings: Mapping[str, Any]) -> None:
        super().start(settings)
        with open(self.path, encoding="utf-8", newline="") as file:
            self._names = next(_csv.reader(file), ["step"])[1:]

    def __call__(self, row: Row, step: int) -> None:
        if self._file is None:
            self.start({})
        if new := [name for name in row if name not in self._names]:
            self.close()
            path, header = Path(self.path), _csv_line(["step", *self._names, *new])
            lines = path.read_text(encoding="utf-8").splitlines()[1:]
            _write(path, [header, *(line + "," * len(new) + "\n" for line in lines)])
            self.start({})
        assert self._file is not None
        self._file.write(_csv_line([step, *(row.get(name, "") for name in self._names)]))


def _csv_line(fields: Iterable[Any]) -> str:
    _csv.writer(text := io.StringIO(), lineterminator="\n").writerow(fields)
    return text.getvalue()


class jsonl(_TextFile):
    """Append rows to the file at `path`, one JSON object a line: `{"step": 100, "loss": 0.69}`.

    The line `{"settings": {...}}` comes before the rows of a run. NaN and ±inf are written as null.
    Raises WrongTypeError for a path that is no str or Path.

        ts.fit(step, state, data, steps=1000, logger=ts.loggers.jsonl("run/rows.jsonl"))
    """

    def start(self, settings: Mapping[str, Any]) -> None:
        super().start(settings)
        if settings and self._file is not None:
            self._file.write(json.dumps({"settings": dict(settings)}, default=str) + "\n")

    def __call__(self, row: Row, step: int) -> None:
        if self._file is None:
            self.start({})
        assert self._file is not None
        numbers = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self._file.write(json.dumps({"step": step, **numbers}) + "\n")


@dataclass(eq=False)
class tensorboard:
    """Write rows as TensorBoard scalars to `directory`, a path.

    Show them with `tensorboard --logdir=directory`. The settings of the run are the text
    "settings". Characters that a tag must not contain become "_". Raises WrongTypeError for a
    directory that is no path, and MissingLibraryError without tensorboardX, both when it is made.
    """

    directory: StrPath

    def __post_init__(self) -> None:
        self.directory = _path("tensorboard()", self.directory)
        self._writer: Any = None
        self._library: Any = library("tensorboardX", "tensorboard()", "loggers")

    def start(self, settings: Mapping[str, Any]) -> None:
        """Open an event file that hides steps from `settings["rows_from"]` on; write the dict."""
        self.close()
        first = settings.get("rows_from")
        # its own name has seconds: a run of less would be overwritten by the next
        options = dict(flush_secs=10, filename_suffix=f".{time.time_ns()}", purge_step=first)
        self._writer = self._library.SummaryWriter(os.fspath(self.directory), **options)
        if settings:
            table = [("name", "value"), ("---", "---"), *settings.items()]
            text = "".join(f"| {name} | {value} |\n" for name, value in table)
            self._writer.add_text("settings", text, first or 0)

    def __call__(self, row: Row, step: int) -> None:
        if self._writer is None:
            self.start({})
        assert self._writer is not None
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the event file, if it is open; the next row opens a new one."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
