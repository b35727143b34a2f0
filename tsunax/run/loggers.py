"""Loggers: where the rows of a run go.

A logger is any `f(row, step=step)` with a row of Python numbers by name; `wandb.log` is one. Those
here also have `start(settings)`, called once before the first row, and `close()`, called at the end
of every run. Making one opens nothing, so that every process may make it and the main one use it.

A file is appended to. If `fit` resumes a run, its settings have "rows_from": rows from that step on,
which the interrupted run wrote beyond its checkpoint, are dropped.
"""

from __future__ import annotations

import csv as _csv
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tsunax import errors
from tsunax._core import StrPath, durable_files, trees
from tsunax.errors import WrongTypeError

__all__ = ["console", "csv", "jsonl", "tensorboard"]

Row = Mapping[str, float]


def _path(where: str, path) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise WrongTypeError("path", where, trees.describe(path), "a str or Path")
    return Path(durable_files.local(path, "path", where))


def _write(path: Path, lines: Iterable[str]) -> None:
    """Put a whole file in place at once: a reader, or a crash, sees the old one or the new one."""
    new = path.with_name(f"{path.name}.new")
    with open(new, "w", encoding="utf-8", newline="") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _opened(path: Path, first: int | None, step_of: Callable[[str], int | None]) -> TextIO:
    """The file to append to, cut back to rows before step `first` if a run is resumed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if first is not None and path.exists():
        # a last line without its end was being written when the process died
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        steps = ((line, step_of(line)) for line in lines)
        _write(path, (f"{line}\n" for line, step in steps if step is None or step < first))
    return open(path, "a", encoding="utf-8", newline="", buffering=1)


@dataclass(eq=False)
class console:
    """One line a row on stdout: `step 100  loss 0.6931  val/loss 0.7014`.

    >>> log = console()
    >>> log({"loss": 0.69314, "tokens_per_second": 125000.0}, step=100)
    step      100  loss 0.6931  tokens_per_second 125,000
    """

    def start(self, settings: Mapping[str, Any]) -> None:
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


@dataclass(eq=False)
class csv:
    """Rows in a CSV file, one column a name, "step" first; empty where a row has no such number.

    Numbers are written in full, NaN as `nan`. A name that is new rewrites the file with a column
    more, at once and whole.
    """

    path: StrPath

    def __post_init__(self) -> None:
        self.path = _path("csv()", self.path)
        self._file: TextIO | None = None
        self._names: list[str] = []

    def start(self, settings: Mapping[str, Any]) -> None:
        path = Path(self.path)
        self.close()
        self._file = _opened(path, settings.get("rows_from"), _step_of_csv)
        with open(path, encoding="utf-8", newline="") as file:
            self._names = next(_csv.reader(file), ["step"])[1:]

    def __call__(self, row: Row, step: int) -> None:
        path = Path(self.path)
        if self._file is None:
            self.start({})
        if new := [name for name in row if name not in self._names]:
            self.close()
            lines = path.read_text(encoding="utf-8").splitlines()[1:]
            self._names += new
            header = _csv_line(["step", *self._names])
            _write(path, [header, *(line + "," * len(new) + "\n" for line in lines)])
            self._file = _opened(path, None, _step_of_csv)
        assert self._file is not None
        self._file.write(_csv_line([step, *(row.get(name, "") for name in self._names)]))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def _step_of_csv(line: str) -> int | None:
    first = line.partition(",")[0]
    return None if first == "step" else int(first)


def _csv_line(fields: Iterable[Any]) -> str:
    _csv.writer(text := io.StringIO(), lineterminator="\n").writerow(fields)
    return text.getvalue()


@dataclass(eq=False)
class jsonl:
    """A line of JSON for each row, `{"step": 100, "loss": 0.69}`, after one with the settings.

    Valid JSON for every reader: NaN and ±inf are null. A number that a row has not is not there at
    all.
    """

    path: StrPath

    def __post_init__(self) -> None:
        self.path = _path("jsonl()", self.path)
        self._file: TextIO | None = None

    def start(self, settings: Mapping[str, Any]) -> None:
        self.close()
        step_of = lambda line: json.loads(line).get("step")
        self._file = _opened(Path(self.path), settings.get("rows_from"), step_of)
        if settings:
            self._file.write(json.dumps({"settings": dict(settings)}, default=str) + "\n")

    def __call__(self, row: Row, step: int) -> None:
        if self._file is None:
            self.start({})
        assert self._file is not None
        numbers = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self._file.write(json.dumps({"step": step, **numbers}) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


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
        try:
            import tensorboardX  # noqa: F401
        except ImportError:
            parts = "no tensorboardX", "tensorboardX", "pip install 'tsunax[loggers]'"
            raise errors.MissingLibraryError("library", "tensorboard()", *parts) from None

    def start(self, settings: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        self.close()
        first = settings.get("rows_from")
        # its own name has seconds: a run of less would be overwritten by the next
        options = dict(flush_secs=10, filename_suffix=f".{time.time_ns()}")
        self._writer = SummaryWriter(os.fspath(self.directory), purge_step=first, **options)
        if table := "".join(f"| {name} | {value} |\n" for name, value in settings.items()):
            self._writer.add_text(
                "settings", f"| name | value |\n| --- | --- |\n{table}", first or 0
            )

    def __call__(self, row: Row, step: int) -> None:
        if self._writer is None:
            self.start({})
        assert self._writer is not None
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None
