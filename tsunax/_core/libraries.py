"""Optional libraries, imported when they are needed."""

import importlib
from typing import Any

from tsunax.errors import MissingLibraryError


def library(name: str, where: str, extra: str = "") -> Any:
    """A library, or a module of it. Raises MissingLibraryError that says how to install it."""
    root = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or root).partition(".")[0] != root:
            raise
        fix = f"pip install 'tsunax[{extra}]'" if extra else f"pip install {root}"
        raise MissingLibraryError(root, where, "no such package", root, fix) from None
