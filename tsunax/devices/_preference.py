"""Which kind of device is preferred: TSUNAX_DEVICE, then the file `.tsunax-device`, which holds one
word.

The nearest file counts, in the current directory or above it, as with `.python-version`. It is
written and deleted as a whole. This module does not know what a device is.
"""

from __future__ import annotations

import os
from pathlib import Path

from tsunax.errors import ConfigError, message, told, unknown

__all__ = ["KINDS", "NAME", "read", "write"]

KINDS = ("auto", "tpu", "gpu", "cpu", "cuda", "rocm", "metal")
NAME = ".tsunax-device"
_MOST = 100  # characters in a message; no kind is longer


def _nearest(name: str) -> Path | None:
    """The nearest file of this name, in the current directory or above it."""
    here = Path.cwd()
    return next(
        (folder / name for folder in (here, *here.parents) if os.path.isfile(folder / name)), None
    )


def _kind_in(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            said = file.read(_MOST).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(message("file", str(path), told(error), "one word in UTF-8")) from error
    if said not in KINDS:
        raise ConfigError(unknown("device", str(path), said, KINDS))
    return said


def read() -> tuple[str | None, str]:
    """The kind that is preferred, and who says so.

    Raises ConfigError for a kind that is unknown.
    """
    if said := os.environ.get("TSUNAX_DEVICE", "").strip():
        if said not in KINDS:
            raise ConfigError(unknown("device", "TSUNAX_DEVICE", said, KINDS))
        return said, "TSUNAX_DEVICE"
    path = _nearest(NAME)
    return (_kind_in(path), str(path)) if path else (None, "")


def write(kind: str | None) -> tuple[Path, bool]:
    """Make the nearest file prefer a kind, or delete it; which file that is, and whether it had to
    change.

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
        raise ConfigError(
            message("file", str(path), told(error), "one that can be written")
        ) from error
    return path, True
