"""The preferred kind of device: TSUNAX_DEVICE, or else the word in the file `.tsunax-device`.

The nearest file counts, in the current directory or above it, as with `.python-version`.
"""

from __future__ import annotations

import os
from pathlib import Path

from tsunax.errors import ConfigError, unknown

KINDS = ("auto", "tpu", "gpu", "cpu", "cuda", "rocm", "metal")
NAME = ".tsunax-device"


def _nearest() -> Path | None:
    here = Path.cwd()
    paths = (folder / NAME for folder in (here, *here.parents))
    return next((path for path in paths if path.is_file()), None)


def read_preference() -> tuple[str | None, str]:
    """The preferred kind and its source. Raises ConfigError for an unknown kind."""
    kind, where = os.environ.get("TSUNAX_DEVICE", "").strip(), "TSUNAX_DEVICE"
    if not kind:
        if (path := _nearest()) is None:
            return None, ""
        kind, where = path.read_text("utf-8", "replace").strip(), str(path)
    if kind not in KINDS:
        raise ConfigError(unknown("device", where, kind, KINDS))
    return kind, where


def write_preference(kind: str | None) -> Path:
    """Make the nearest file prefer a kind, or a new one here; None deletes it."""
    path = _nearest() or Path.cwd() / NAME
    if kind is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(f"{kind}\n", encoding="utf-8")
    return path
