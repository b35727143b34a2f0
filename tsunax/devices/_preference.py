"""Which kind of device is preferred: TSUNAX_DEVICE, then the file `.tsunax-device`, of one word.

The nearest file counts, in the current directory or above it, as with `.python-version`. It is
written and deleted as a whole. This module does not know what a device is.
"""

from __future__ import annotations

import os
from pathlib import Path

from tsunax.errors import ConfigError, message, told, unknown

KINDS = ("auto", "tpu", "gpu", "cpu", "cuda", "rocm", "metal")
NAME = ".tsunax-device"
_MOST = 100  # characters in a message; no kind is longer


def _nearest(name: str) -> Path | None:
    """The nearest file of this name, in the current directory or above it."""
    here = Path.cwd()
    paths = (folder / name for folder in (here, *here.parents))
    return next((path for path in paths if os.path.isfile(path)), None)


def _known(kind: str, where: str) -> str:
    if kind not in KINDS:
        raise ConfigError(unknown("device", where, kind, KINDS))
    return kind


def _kind_in(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return _known(file.read(_MOST).decode().strip(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("file", str(path), told(error), "one word in UTF-8") from error


def read() -> tuple[str | None, str]:
    """The kind that is preferred, and who says so. Raises ConfigError for one that is unknown."""
    if said := os.environ.get("TSUNAX_DEVICE", "").strip():
        return _known(said, "TSUNAX_DEVICE"), "TSUNAX_DEVICE"
    path = _nearest(NAME)
    return (_kind_in(path), str(path)) if path else (None, "")


def write(kind: str | None) -> tuple[Path, bool]:
    """Make the nearest file prefer a kind, or delete it: which file, and whether it had to change.

    A new file is written beside the nearest pyproject.toml, or else into the current directory.
    Raises ConfigError for a file that cannot be read or written, or that says something else.
    """
    path = _nearest(NAME) or (_nearest("pyproject.toml") or Path.cwd() / NAME).with_name(NAME)
    if (_kind_in(path) if path.exists() else None) == kind:
        return path, False
    try:
        if kind is None:
            path.unlink()
        else:
            path.write_text(f"{kind}\n", encoding="utf-8")
    except OSError as error:
        text = message("file", str(path), told(error), "one that can be written")
        raise ConfigError(text) from error
    return path, True
