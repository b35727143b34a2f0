"""Optional libraries, imported when they are needed."""

import importlib
import importlib.metadata
from typing import Any

from tsunax.errors import MissingLibraryError


def library(name: str, where: str, extra: str = "") -> Any:
    """A library, or a module of it. Raises MissingLibraryError that says how to install it.

    >>> library("absent", "here", extra="plot")
    Traceback (most recent call last):
    tsunax.errors.MissingLibraryError: absent at here: got no such ... (the extra 'plot' of tsunax)
    """
    root = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or root).partition(".")[0] != root:
            raise
        extra_text = f" (the extra {extra!r} of tsunax)" if extra else ""
        fix = f"pip install {_of_extra(extra) or root}{extra_text}"
        raise MissingLibraryError(root, where, "no such package", root, fix) from None


def _of_extra(name: str) -> str:
    """The requirement behind an extra of tsunax, quoted; "" if it is not installed as a package."""
    try:
        requirements = importlib.metadata.requires("tsunax") or ()
    except importlib.metadata.PackageNotFoundError:
        return ""
    requirements_of_extra = (
        text.partition(";")[0].strip() for text in requirements if f"extra == '{name}'" in text
    )
    return " ".join(map(repr, requirements_of_extra))
