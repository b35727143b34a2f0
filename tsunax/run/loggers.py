"""Loggers: where the rows of a run go.

A logger is any `f(row, step=step)` with a row of Python numbers by name; `wandb.log` is one. Those
here also have `start(settings)`, called once before the first row, and `close()`, called at the end
of every run. Making one opens nothing, so that every process may make it and the main one use it.
A path that cannot be written to is a SaveError at `start`, before a run has compiled anything.

A file goes on where it was. Rows from the first row's step on, or from an earlier "rows_from" in
the settings of a run that `fit` resumes, are what the interrupted run wrote beyond it: they are
dropped. Only rows of the same run are dropped: `fit` names each run in its settings ("run"), and a
checkpoint stores the name. If rows of another run are in the way, the file is kept as "log.1.csv",
and so on, and a new one begins. Of runs without a name, and of those of one logger, one that starts
before all rows is another.
"""

from __future__ import annotations

import contextlib
import csv as _csv
import io
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tsunax import errors
from tsunax._core import StrPath, durable_files, trees
from tsunax.errors import HyperparameterError, RowError, SaveError, WrongTypeError, warn

__all__ = ["console", "csv", "jsonl", "tensorboard"]

Row = Mapping[str, float]


def _path(where: str, path) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path) or "\0" in str(path):
        raise WrongTypeError("path", where, trees.describe(path), "a str or Path")
    return Path(durable_files.local(path, "path", where))


@contextlib.contextmanager
def _opening(where: str, path) -> Iterator[None]:
    """What the system has against a log, as a SaveError that names its path."""
    try:
        yield
    except OSError as error:
        got = f"{type(error).__name__} {error.strerror or error}"
        parts = f"{where}, {path}", got, "a file that can be opened"
        raise SaveError("log", *parts, "Give a path that can be written to.") from error


def _check_opens(where: str, path: Path) -> None:
    """Raise SaveError where a log could not be written. Leaves no trace."""
    with _opening(where, path):
        path = path.resolve()  # of a link to what is not there yet its target
        if path.exists():
            open(path, "a").close()
        else:
            folder = next(folder for folder in path.parents if folder.exists())
            tempfile.TemporaryFile(dir=folder).close()


def _write(path: Path, lines: Iterable[str]) -> None:
    """Put a whole file in place at once: a reader, or a crash, sees the old one or the new one."""
    new = path.with_name(f"{path.name}.new")
    with open(new, "w", encoding="utf-8", newline="") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _resume(
    path: Path, first: int, step_of: Callable[[str], int | None], runs: tuple[Any, Any]
) -> list[str]:
    """Cut a log back to rows before step `first`, and return its lines.

    `runs` are the run that wrote it, and this one. If rows of another one would be lost, the file
    is kept under another name, and nothing of it is taken over. A last line without its end was
    being written when the process died. Raises RowError for a line of another kind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return []
    fix = "Give the log a path of its own."
    try:
        *lines, torn = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        got, expected = "bytes that are no text", "rows of this logger"
        raise RowError("log", str(path), got, expected, fix) from None
    kept, older = [], False
    for number, line in enumerate(lines, start=1):
        try:
            step = step_of(line)
            is_kept = step is None or step < first
        except (ValueError, AttributeError, TypeError):
            at, got = f"{path}:{number}", f"{line[:40]!r}"
            raise RowError("line", at, got, "a row of this logger", fix) from None
        older = older or (is_kept and step is not None)
        if is_kept:
            kept.append(f"{line}\n")
    is_other = runs[0] != runs[1] or (runs == (None, None) and not older)
    is_cut = len(kept) < len(lines)
    if is_cut and is_other:
        numbered = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in itertools.count(1))
        other = next(name for name in numbered if not os.path.lexists(name))
        shutil.copyfile(path, other)
        kept = []
        warn(f"{path} has steps of another run: they are kept in {other.name}.")
    if is_cut or torn:
        _write(path, kept)
    return kept


def _first(step: int, settings: Mapping[str, Any]) -> int:
    """The step from which on rows are not to stay when the first row is of `step`."""
    return min(step, settings.get("rows_from", step))


def _run_of(texts: Iterable[str]) -> Any:
    """The name of the run in the first of these texts that are settings."""
    for text in texts:
        with contextlib.suppress(ValueError, AttributeError, TypeError):
            found = json.loads(text) if "run" in text else {}
            if (run := found.get("settings", found).get("run")) is not None:
                return run
    return None


def _closed(log: Any) -> None:
    if log._file is not None:
        log._file.close()
    log._file = None


def _appended(path: Any) -> TextIO:
    return open(path, "a", encoding="utf-8", newline="", buffering=1)


@dataclass(eq=False)
class console:
    """One line a row on stdout, or in an open file: `step 100  loss 0.6931  val/loss 0.7014`.

    Of many rows every `every`-th one, and each that brings a name for the first time.

    >>> log = console()
    >>> log({"loss": 0.69314, "tokens_per_second": 125000.0}, step=100)
    step      100  loss 0.6931  tokens_per_second 125,000
    """

    every: int = 1
    file: TextIO | None = None

    def __post_init__(self) -> None:
        self._names: set[str] = set()
        self._rows = 0
        if isinstance(self.every, bool) or not isinstance(self.every, int):
            raise WrongTypeError("every", "console()", trees.describe(self.every), "a whole number")
        if self.every < 1:
            raise HyperparameterError("every", "console()", self.every, "≥ 1")
        is_binary = isinstance(self.file, (io.RawIOBase, io.BufferedIOBase))
        if self.file is not None and (is_binary or not callable(getattr(self.file, "write", None))):
            got, fix = trees.describe(self.file), "Open it: console(file=open(path, 'a'))."
            raise WrongTypeError("file", "console()", got, "an open file", fix)

    def start(self, settings: Mapping[str, Any]) -> None:
        told = (f"{name}={value}" for name, value in settings.items())
        print(*told, sep="  ", file=self.file or sys.stdout)

    def __call__(self, row: Row, step: int) -> None:
        self._rows += 1
        if self._rows % self.every == 0 or not self._names.issuperset(row):
            numbers = (f"{name} {short(value)}" for name, value in row.items())
            print(f"step {step:>8,}", *numbers, sep="  ", file=self.file or sys.stdout, flush=True)
        self._names.update(row)

    def close(self) -> None:
        self._rows = 0


def short(value: float) -> str:
    """A number for people, in at most nine characters: 4 digits, and thousands apart.

    >>> [short(x) for x in (0.693147, 3, 12345678, 1234.56, 1.5e-7, float("nan"))]
    ['0.6931', '3', '12,345,678', '1,235', '1.5e-07', 'nan']
    """
    is_large = math.isfinite(value) and (isinstance(value, int) or 1000 <= abs(value) < 1e9)
    return f"{value:,.0f}" if is_large else f"{value:.4g}"


@dataclass(eq=False)
class csv:
    """Rows in a CSV file, one column a name, "step" first; empty where a row has no such number.

    Numbers are written in full, NaN as `nan`. A name that is new rewrites the file with a column
    more, at once and whole. The run's settings go to `<path>.settings.json`. Raises RowError for a
    file that is none of this logger's.
    """

    path: StrPath

    def __post_init__(self) -> None:
        self.path = _path("csv()", self.path)
        self._file: TextIO | None = None
        self._names: list[str] = []
        self._runs: tuple[Any, Any] = None, None
        self._settings, self._used = {}, False

    def start(self, settings: Mapping[str, Any]) -> None:
        path = Path(self.path)
        _check_opens("csv()", path)
        with _opening("csv()", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            about = path.with_name(f"{path.name}.settings.json")
            before = [about.read_text("utf-8", "replace")] if about.exists() else []
            self._settings = dict(settings)
            self._runs = (None, None) if self._used else (_run_of(before), settings.get("run"))
            _write(about, [json.dumps(dict(settings), indent=1, default=str)])

    def __call__(self, row: Row, step: int) -> None:
        path = Path(self.path)
        if self._file is None:
            self._used = True
            with _opening("csv()", path):
                first = _first(step, self._settings)
                header = _resume(path, first, _step_of_csv, self._runs)[:1]
            self._names = next(_csv.reader(header), ["step"])[1:]
        with _opening("csv()", path):
            if new := [name for name in row if name not in self._names]:
                self.close()
                lines = path.read_text(encoding="utf-8").splitlines()[1:] if path.exists() else []
                self._names += new
                header = _csv_line(["step", *self._names])
                _write(path, [header, *(line + "," * len(new) + "\n" for line in lines)])
            if self._file is None:
                self._file = _appended(path)
        self._file.write(_csv_line([step, *(row.get(name, "") for name in self._names)]))

    close = _closed


def _step_of_csv(line: str) -> int | None:
    first = line.partition(",")[0].strip()
    return None if first == "step" else int(first)


def _csv_line(fields: Iterable[Any]) -> str:
    _csv.writer(text := io.StringIO(), lineterminator="\n").writerow(fields)
    return text.getvalue()


@dataclass(eq=False)
class jsonl:
    """A line of JSON for each row, `{"step": 100, "loss": 0.69}`, after one with the settings.

    Valid JSON for every reader: NaN and ±inf are null. A number that a row has not is not there at
    all. Raises RowError for a file that is none of this logger's.
    """

    path: StrPath

    def __post_init__(self) -> None:
        self.path = _path("jsonl()", self.path)
        self._file: TextIO | None = None
        self._settings, self._used = {}, False

    def start(self, settings: Mapping[str, Any]) -> None:
        _check_opens("jsonl()", Path(self.path))
        self._settings = dict(settings)

    def __call__(self, row: Row, step: int) -> None:
        if self._file is None:
            with _opening("jsonl()", self.path):
                path, settings = Path(self.path), self._settings
                lines = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
                runs = _run_of(reversed(lines)), settings.get("run")
                runs, self._used = (None, None) if self._used else runs, True
                step_of = lambda line: json.loads(line).get("step")
                _resume(path, _first(step, settings), step_of, runs)
                self._file = _appended(path)
            if settings:
                self._file.write(json.dumps({"settings": settings}, default=str) + "\n")
        numbers = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self._file.write(json.dumps({"step": step, **numbers}) + "\n")

    close = _closed


@dataclass(eq=False)
class tensorboard:
    """Scalars for TensorBoard in a directory, by tensorboardX; the settings as the text "settings".

    Look at them with `tensorboard --logdir directory`. Characters that a tag may not have become
    "_". Raises MissingLibraryError, when it is made, without tensorboardX.
    """

    directory: StrPath

    def __post_init__(self) -> None:
        self.directory = _path("tensorboard()", self.directory)
        self._writer: Any = None
        self._settings = {}
        try:
            import tensorboardX  # noqa: F401
        except ImportError:
            parts = "no tensorboardX", "tensorboardX", "pip install 'tsunax[loggers]'"
            raise errors.MissingLibraryError("library", "tensorboard()", *parts) from None

    def start(self, settings: Mapping[str, Any]) -> None:
        _check_opens("tensorboard()", Path(self.directory) / "events")
        self._settings = dict(settings)

    def __call__(self, row: Row, step: int) -> None:
        if self._writer is None:
            from tensorboardX import SummaryWriter

            directory, first = os.fspath(self.directory), _first(step, self._settings)
            # its own name has seconds: a run of less would be overwritten by the next
            options = dict(flush_secs=10, filename_suffix=f".{time.time_ns()}")
            with _opening("tensorboard()", directory):
                self._writer = SummaryWriter(directory, purge_step=first, **options)
            table = "".join(f"| {name} | {value} |\n" for name, value in self._settings.items())
            if table:
                self._writer.add_text("settings", f"| name | value |\n| --- | --- |\n{table}", step)
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None
