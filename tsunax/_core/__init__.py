"""Tools for every part of the package: trees, patterns, checks, files.

It uses no training states, rules or loops.
"""

import importlib
import importlib.util
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # the package is imported without JAX
    from jax.typing import ArrayLike

# Types of signatures. The comments say more than the type system can.
PyTree: TypeAlias = Any  # containers registered with JAX, with arrays as leaves
Scalar: TypeAlias = Any  # one number: a Python one, or an array without axes, which may be traced
# which leaves: a glob over paths, a list of globs, a predicate, a tree of bools
Where: TypeAlias = Any
# a jax.Device, for which JAX has no type hints; a kind such as "gpu"; "gpu:1"; a Sharding
Device: TypeAlias = Any
TreeDef: TypeAlias = Any  # a jax.tree_util.PyTreeDef, also without type hints
Figure: TypeAlias = Any  # a figure of matplotlib, which need not be installed
Maybe: TypeAlias = "ArrayLike | None"  # a mask or weights, or an optional number
AxisName: TypeAlias = str | tuple[str, ...] | None  # names of device axes inside shard_map
StrPath: TypeAlias = str | os.PathLike[str]
Extra: TypeAlias = dict[str, Any]  # arguments by name
Function: TypeAlias = Callable[..., Any]
Step: TypeAlias = Callable[..., tuple[Any, Any]]  # step(state, batch, **extra) -> (state, info)


def lazy(
    package: dict[str, Any],
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package that loads its names when they are used.

    The names are listed once, in the stub next to its `__init__.py`, which type checkers read:
    `from tsunax.hyper import adjust as adjust`. An old name stays for a minor version, warns, and
    is not listed: `from tsunax.hyper import adjust as change  # deprecated: adjust`.
    """
    title = package["__name__"]
    stub = Path(package["__file__"]).with_suffix(".pyi").read_text(encoding="utf-8")
    imports = re.findall(r"^from (\S+) import (\w+) as (\w+)(?:  # deprecated: (.+))?", stub, re.M)
    module_of = {name: module for module, name, _, new in imports if not new}
    deprecated = {old: new for _, _, old, new in imports if new}

    def load(name: str) -> Any:
        if name in deprecated:
            new = deprecated[name]
            text = f"{title}.{name} is deprecated: use {new}."
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return load(new)
        if name not in module_of:
            importlib.import_module("tsunax.errors").missing_name(title, names)(name)
        module = module_of[name]
        value = None if module == title else getattr(importlib.import_module(module), name, None)
        if value is None:  # a module of a folder
            value = importlib.import_module(f"{module}.{name}")
        package[name] = value
        return value

    names = sorted(module_of)
    return names, load, lambda: names
