"""Directories of orbax's own, which are read and never written: those that others made, and
checkpoints of format 1.

The only module that knows orbax. Whatever that raises for bytes that are not its own is Damaged
here, in one line; no wait is without a limit, and nothing is read that the files are far too small
for.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tsunax._core import durable_files, trees
from tsunax.checkpoints import manifest
from tsunax.checkpoints.manifest import Damaged, Leaf
from tsunax.errors import CheckpointError, message, told

__all__ = []


@contextlib.contextmanager
def _quiet():
    """Damaged bytes make asyncio and absl log pages, some when tasks are collected; the error says
    it in a line.
    """
    drop = lambda record: False
    loggers = [logging.getLogger(name) for name in ("asyncio", "absl")]
    for logger in loggers:
        logger.addFilter(drop)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(drop)


def of_format_1(
    path: Path, shards: Mapping[str, tuple[manifest.Shard, Leaf]]
) -> dict[str, np.ndarray]:
    """Stored arrays of the first format: by number in one directory of orbax's."""
    about = foreign(path)
    for name, (s, leaf) in shards.items():
        known = about.get(name) if isinstance(about, Mapping) else None
        if known is None or tuple(known.shape) != s.shape or str(known.dtype) != leaf.dtype:
            raise Damaged(f"arrays: {name} is not as the manifest says")
    found = dict(zip(shards, read_foreign(path, about, list(shards)), strict=True))
    return {name: np.asarray(x) for name, x in found.items()}


def foreign(path: Path) -> Any:
    """The tree that a directory of orbax's own says it has, by its old interface or the new one.
    Raises Damaged.
    """
    durable_files.check_regular(path)
    found = _of_orbax(lambda ocp: ocp.metadata(path).metadata, "the description")
    if not isinstance(found, Mapping | list | tuple):
        raise Damaged("no tree of arrays")
    return found


def as_struct(x):
    """A leaf of such a description as what `leaf_of` knows: arrays as their shape and dtype."""
    is_array = getattr(x, "shape", None) is not None and getattr(x, "dtype", None) is not None
    return (
        jax.ShapeDtypeStruct(tuple(x.shape), x.dtype) if is_array and not trees.is_array(x) else x
    )


def read_foreign(path: Path, tree, names: list[str]) -> list[Any]:
    """Leaves of such a directory by name, arrays as NumPy's.

    Nothing is read that its files are far too small for.
    """
    wanted, target, declared = set(names), [], 0
    leaves, treedef = jax.tree.flatten(tree)
    found_names = ["/".join(name) for name, _, _ in trees.leaves_with_names(tree)]
    for name, x in zip(found_names, leaves, strict=True):
        if name not in wanted:
            target.append(...)
        elif isinstance(about := as_struct(x), jax.ShapeDtypeStruct):
            chunk = (
                getattr(getattr(x, "storage_metadata", None), "chunk_shape", None) or about.shape
            )
            declared += max(math.prod(chunk), about.size) * about.dtype.itemsize
            target.append(np.broadcast_to(np.zeros((), about.dtype), about.shape))
        else:
            target.append(x)
    if declared > (64 << 20) + 256 * durable_files.sizes(path):
        raise Damaged(f"{declared} bytes declared, far more than its files have")
    found = _of_orbax(lambda ocp: ocp.load(path, treedef.unflatten(target)), "the arrays")
    by_name = dict(zip(found_names, jax.tree.leaves(found), strict=True))
    return [by_name[name] for name in names]


# orbax names its operations by one count of the process, and one load would take another one's from
# under it
_ONE_AT_A_TIME = threading.Lock()


def _of_orbax(f, what: str):
    """`f(orbax)`, its logs kept quiet and whatever it raises as Damaged, given up after ten
    minutes.
    """

    def run():
        ocp = importlib.import_module("orbax.checkpoint").v1
        with _ONE_AT_A_TIME:
            return f(ocp)

    fault = None
    with _quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it was saved with shardings: given ones win
        try:
            return bounded(run, 600.0, what)
        except CheckpointError:
            raise
        except (
            Exception
        ) as error:  # whatever orbax, TensorStore and asyncio raise for bytes that are not theirs
            fault = Damaged(told(error))
    raise fault


def bounded(f: Callable[[], Any], limit: float, what: str):
    """`f()` in a thread that is given up after `limit` seconds."""
    answer: list[Any] = []
    done = threading.Event()

    def run():
        try:
            answer.append((f(), None))
        except BaseException as error:
            answer.append((None, error))
        done.set()

    threading.Thread(target=run, name="tsunax-restore", daemon=True).start()
    if not done.wait(limit):
        raise CheckpointError(message(what, "restore()", f"nothing after {limit:g} s", "an answer"))
    value, error = answer[0]
    if error is not None:
        raise error
    return value
