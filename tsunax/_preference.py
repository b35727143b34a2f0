"""Which kind of device is preferred: TSUNAX_DEVICE, then `[tool.tsunax] device` of the nearest pyproject.toml.

That table is the only configuration of tsunax, and `device` its only key. It is read with tomllib. To write it, each
line is tried that could be the one, until the file says what is meant and everything else that it said before. Nothing
here knows what a device is.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tsunax import _tree, _where
from tsunax.errors import ConfigError, message, told

__all__ = ["KINDS", "read", "write"]

KINDS = ("auto", "tpu", "gpu", "cpu", "cuda", "rocm", "metal")


def _bad(path: Path, got: object, expected: str) -> ConfigError:
    return ConfigError(message("file", str(path), got, expected))


_MOST = 1 << 20  # bytes of a pyproject.toml; one of 10 MB is something else
_DEVICE = re.compile(r"""\bdevice["']?[ \t]*=[ \t]*(?P<value>"[^"\n]*"|'[^'\n]*')""")
_HEADER = re.compile(r"^[ \t]*\[[^\[\]\n]*\btsunax\b[^\[\]\n]*\][^\n]*(\n|\Z)", re.MULTILINE)
_OURS = re.compile(r'(\r?\n)?^\[tool\.tsunax\]\r?\ndevice = "\w+"\r?\n\Z', re.MULTILINE)


def _project() -> Path | None:
    """The nearest pyproject.toml, in the current directory or above it."""
    here = Path.cwd()
    files = (folder / "pyproject.toml" for folder in (here, *here.parents))
    return next((file for file in files if os.path.isfile(file)), None)


def _read(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > _MOST:
            raise _bad(path, f"{size / 1e6:.1f} MB", f"{_MOST / 1e6:.1f} MB at most")
        return path.read_bytes().decode()  # not read_text: the ends of lines stay as they are
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(path, told(error), "TOML in UTF-8 that can be read") from error


def _parse(text: str, path: Path) -> dict:
    try:
        return tomllib.loads(f"{text}\n")  # errors at the very end have no line
    except RecursionError:
        raise _bad(path, "values nested too deep to read", "TOML") from None
    except ValueError as error:  # TOMLDecodeError names the line, and not what is there
        number = re.search(r"\bline (\d+)", str(error))
        line = text.splitlines()[int(number[1]) - 1 :][:1] if number else []
        raise _bad(path, ": ".join([told(error), *line]), "TOML") from error


def _settings(text: str, path: Path) -> dict:
    """`[tool.tsunax]`, checked: `{}`, or `{"device": kind}`."""

    def place(key: str) -> str:
        header = _HEADER.search(text)
        found = re.compile(rf"\b{re.escape(key)}\b").search(text, header.end() if header else 0)
        return f"[tool.tsunax] of {path}" + (f", line {text.count(chr(10), 0, found.start()) + 1}" if found else "")

    table: Any = _parse(text, path)
    for name in ("tool", "tsunax"):
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise ConfigError(message(name, place(name), _tree.describe(table), "a table"))
    for key, value in table.items():
        if key != "device":
            raise ConfigError(_where.unknown("key", place(key), key, ["device"]))
        if not isinstance(value, str):
            raise ConfigError(message(key, place(key), _tree.describe(value), f"one of {', '.join(KINDS)}"))
        if value not in KINDS:
            raise ConfigError(_where.unknown(key, place(key), value, KINDS))
    return table


def read() -> tuple[str | None, str]:
    """The kind that is preferred, and who says so. Raises ConfigError where what is said makes no sense."""
    if said := os.environ.get("TSUNAX_DEVICE", "").strip():
        if said not in KINDS:
            raise ConfigError(_where.unknown("device", "TSUNAX_DEVICE", said, KINDS))
        return said, "TSUNAX_DEVICE"
    path = _project()
    return (_settings(_read(path), path).get("device"), str(path)) if path else (None, "")


def _edits(text: str, kind: str | None) -> Iterator[str]:
    """Texts in which one line was changed, added or taken away: one of them says what is meant."""
    end = "\r\n" if "\r\n" in text else "\n"
    if kind is None:
        yield _OURS.sub("", text)
    for found in _DEVICE.finditer(text):
        if kind is not None:
            yield f'{text[: found.start("value")]}"{kind}"{text[found.end("value") :]}'
        else:
            after = text.find("\n", found.end()) + 1 or len(text)
            yield text[: text.rfind("\n", 0, found.start()) + 1] + text[after:]
    if kind is not None:
        for header in _HEADER.finditer(text):
            yield f'{text[: header.end()]}{end * (not header[1])}device = "{kind}"{end}{text[header.end() :]}'
        gap = end * (not text.endswith("\n")) + end if text else ""
        yield f'{text}{gap}[tool.tsunax]{end}device = "{kind}"{end}'


def _meaning(text: str) -> tuple[dict, dict] | None:
    """All but `[tool.tsunax]`, and that; None for what is no TOML. Numbers as they are written: NaN is not itself."""
    try:
        rest = tomllib.loads(text, parse_float=str)
    except (ValueError, RecursionError):
        return None
    tool = rest.pop("tool", {})
    table = tool.pop("tsunax", {})
    return ({**rest, "tool": tool} if tool else rest), table


def write(kind: str | None) -> tuple[Path, bool]:
    """Make the nearest pyproject.toml prefer a kind, or none; which file that is, and whether it had to change.

    Where there is none, one is made in the current directory. Raises ConfigError for a file that cannot be read,
    understood or written.
    """
    path = _project() or Path.cwd() / "pyproject.toml"
    text = _read(path) if path.exists() else ""
    if _settings(text, path).get("device") == kind:
        return path, False
    before = _meaning(text)
    wanted = before and (before[0], {"device": kind} if kind else {})
    new = next((edit for edit in _edits(text, kind) if _meaning(edit) == wanted), None)
    if new is None:
        fix = f'Write device = "{kind}" there by hand.' if kind else "Take it out by hand."
        raise ConfigError(message("[tool.tsunax]", str(path), "a form that one line cannot change", "a table", fix))
    try:
        path.write_bytes(new.encode())
    except OSError as error:
        raise _bad(path, told(error), "one that can be written") from error
    return path, True
