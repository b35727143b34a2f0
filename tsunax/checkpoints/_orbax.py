"""orbax without its logs, and reading directories that other programs wrote with it.

Every exception of orbax for foreign bytes becomes Damaged here, in a single line. Arrays that are
far larger than their files are not read.
"""

import contextlib
import importlib
import json
import logging
import math
import os
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tsunax._core import durable_files, trees
from tsunax.checkpoints import _foreign
from tsunax.checkpoints._background import bounded
from tsunax.checkpoints.leaves import Damaged
from tsunax.errors import CheckpointError, told

_TEXTS = {"_METADATA", "_CHECKPOINT_METADATA", "_sharding", "_strings.json", ".zarray", "zarr.json"}
_LEAF_COST = 10_000  # bytes that orbax and TensorStore take to describe an array

# orbax names its operations by a counter of the process: operations at the same time would mix.
ONE_AT_A_TIME = threading.Lock()


def description(path: Path | str) -> tuple[Any, int | None]:
    """The tree that orbax's files in a directory describe, of its old interface or its new one.

    Returned with the size of all files; None for a bucket, because its texts are not scanned.
    """
    size = None
    if isinstance(path, Path):
        size = durable_files.check_regular(path)
        _check_texts(path, size)
    tree = _call_orbax(lambda ocp: ocp.metadata(path).metadata, "the description")
    if not isinstance(tree, Mapping | list | tuple):
        raise Damaged("no tree of arrays")
    return tree, size


def _check_texts(folder: Path, size: int) -> None:
    """Raise Damaged for texts that would take too much memory, or that have keys of other files."""
    spent = 0
    for file in folder.rglob("*"):
        if (file.name in _TEXTS or file.parent.name == "array_metadatas") and file.is_file():
            text = file.read_bytes()
            spent += 2 * _foreign.check_json(text, size)  # orbax copies the parsed text
            _foreign.check_cost(spent, size)
            if file.name == "_METADATA":
                arrays = json.loads(text).get("tree_metadata", {}).values()
                spent += _LEAF_COST * len(arrays)
                _foreign.check_cost(spent, size)
                for entry in arrays:  # without OCDBT, joined keys are the path of the array's files
                    name = ".".join(str(key["key"]) for key in entry["key_metadata"])
                    if os.path.isabs(name):
                        raise Damaged(f"a key that leads elsewhere, {name!r:.80}")


def as_struct(x):
    """A leaf of orbax's description for `leaf_of`: arrays as `ShapeDtypeStruct`."""
    is_array = getattr(x, "shape", None) is not None and getattr(x, "dtype", None) is not None
    if not is_array or trees.is_array(x):
        return x
    return jax.ShapeDtypeStruct(tuple(x.shape), x.dtype)


def read(path: Path | str, tree, names: list[str]) -> list[Any]:
    """Leaves of such a directory by name, arrays as NumPy's."""
    wanted_names, target = set(names), []
    leaves, treedef = jax.tree.flatten(tree)
    all_names = ["/".join(name) for name, _, _ in trees.leaves_with_names(tree)]
    for name, x in zip(all_names, leaves, strict=True):
        struct = as_struct(x)
        if name not in wanted_names:
            target.append(...)  # orbax does not read it
        elif isinstance(struct, jax.ShapeDtypeStruct):
            chunk = getattr(getattr(x, "storage_metadata", None), "chunk_shape", None)
            if math.prod(chunk or ()) > max(1, struct.size):  # a chunk is read whole
                raise Damaged(f"{name!r:.80}: a chunk that is larger than the array, {chunk}")
            # an array of this shape without its memory
            target.append(np.broadcast_to(np.zeros((), struct.dtype), struct.shape))
        else:
            target.append(x)
    loaded = _call_orbax(lambda ocp: ocp.load(path, treedef.unflatten(target)), "the arrays")
    by_name = dict(zip(all_names, jax.tree.leaves(loaded), strict=True))
    return [by_name[name] for name in names]


def _call_orbax(f, title: str):
    """`f(orbax)`, with quiet logs and a limit of ten minutes; raises Damaged for any failure."""

    def call_locked():
        with ONE_AT_A_TIME:
            return f(library())

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # orbax warns of saved shardings; ours are used instead
        try:
            return bounded(call_locked, 600.0, title)
        except CheckpointError:
            raise
        except Exception as error:  # orbax, TensorStore and asyncio raise many types
            raise Damaged(told(error)) from None


def library() -> Any:
    return importlib.import_module("orbax.checkpoint").v1


@contextlib.contextmanager
def quiet():
    """A context without the logs of orbax and asyncio on damaged bytes and full disks."""
    # Other libraries log through absl, too, and these logs stay.
    is_of_other_library = lambda record: record.name == "absl" and "orbax" not in record.pathname
    loggers = [logging.getLogger(name) for name in ("asyncio", "absl")]
    for logger in loggers:
        logger.addFilter(is_of_other_library)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_of_other_library)
