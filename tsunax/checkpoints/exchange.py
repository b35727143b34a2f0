"""Arrays for other programs, and from them: safetensors files both ways; flax's and orbax's only
in.

    save("model.safetensors", state.params)                   names are paths: "encoder/0/kernel"
    params = restore("model.safetensors", params)             every name, shape and dtype compared first

Nothing here is code, and nothing of it runs: what cannot be read as plain arrays is refused. A run
goes on from its `Checkpoints`; these are the files that one gives away.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tsunax._core import PyTree, StrPath, Where, checks, durable_files, patterns, trees
from tsunax._core.libraries import library
from tsunax.checkpoints import _host_copies, _matching, _orbax, _safetensors, leaves
from tsunax.checkpoints.leaves import Damaged, Leaf, Tree, show
from tsunax.errors import CheckpointError, SaveError, WrongTypeError, told
from tsunax.state import TrainState

__all__ = ["contents", "restore", "restore_flax", "restore_orbax", "save"]

Rename = Callable[[str], str] | None
_PARAMS = "params/"  # what the names of a whole state's params begin with
_DEPTH = 64


# ------------------------------------------------------------------------------------------- saving


def save(path: StrPath, tree: PyTree, *, rename: Rename = None) -> None:
    """Write the arrays of `tree`, params or a whole training state, as a safetensors file.

    A name is the path that patterns match, "encoder/0/kernel"; of a state
    "params/encoder/0/kernel", "opt_state/0/mu/encoder/0/kernel", "model_state/...", "key". Keys are
    their data. The file is whole or not there, and an older one stays until then.

    Args:
      path: "….safetensors"; its directory is made if it is not there.
      rename: a function of a name of the tree that returns the name in the file.

    Raises WrongTypeError for leaves and dtypes that the format does not have (int4, complex128,
    Python's numbers), CheckpointError for a path or names that cannot be, SaveError where writing
    failed.

    >>> import jax.numpy as jnp, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/a.safetensors", {"dense": {"w": jnp.ones((2, 3), jnp.bfloat16)}})
    ...     contents(f"{folder}/a.safetensors")
    {'dense/w': ShapeDtypeStruct(shape=(2, 3), dtype=bfloat16)}
    """
    path = _as_path(path)
    if not path.name.endswith(".safetensors") or path.name == ".safetensors":
        expected = "a name that ends in .safetensors"
        raise CheckpointError("path", "save()", repr(path.name), expected)
    known = leaves.tree_of(tree)
    _host_copies.check_saveable(known)
    found = _described(known, _names_in(tree, rename))
    leaves_of = zip(found, known.leaves, strict=True)
    arrays = {leaf.name: trees.on_host(x) for leaf, (_, x) in leaves_of}
    aside = durable_files.aside(path.parent, "tmp", 0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _safetensors.write(aside, arrays, {"format": "flax"})  # the hub requires it
        os.replace(aside, path)  # a link is replaced, not followed
        durable_files.sync(path.parent)
    except (OSError, ValueError) as error:
        aside.unlink(missing_ok=True)
        raise SaveError("save", str(path), told(error), "a finished file") from error


def _described(known: Tree, names: list[str]) -> list[Leaf]:
    """Every leaf under its name in the file, checked."""
    found: dict[str, Leaf] = {}
    for (path, x), name in zip(known.leaves, names, strict=True):
        leaf, where = leaves.leaf_of(path, x, name), show("tree", path)
        if leaf.dtype not in _safetensors.DTYPES:
            expected, fix = "a dtype that safetensors has", "Cast it, or save with Checkpoints."
            raise WrongTypeError("leaf", where, str(leaf), expected, fix)
        if not _host_copies.is_local(x) and not x.is_fully_replicated:
            got = "an array of which other processes have a part"
            fix = "Gather it: jax.experimental.multihost_utils.process_allgather."
            raise WrongTypeError("leaf", where, got, "a whole", fix)
        if name in found:
            got = f"two arrays, {show('tree', found[name].path)} and {where}"
            raise CheckpointError(f"name {name!r}", "save()", got, "one name for each")
        if not name or name.startswith("__metadata__") or not name.isprintable():
            fix = "rename= gives another."
            raise CheckpointError("name", where, repr(name), "printable text", fix)
        found[name] = leaf
    return list(found.values())


# ---------------------------------------------------------------------------------------- restoring


def restore(
    path: StrPath,
    like: PyTree = None,
    *,
    where: Where = None,
    rename: Rename = None,
    cast: bool = False,
) -> PyTree:
    """The arrays of a safetensors file in the place of `like`'s: its structure, dtypes and devices.

    `like` is a tree of arrays or of `jax.ShapeDtypeStruct`, with its shardings; or a training
    state, which is filled by name if the file has one, and takes params of any other file: then its
    optimizer starts anew. Without `like`: nested dicts of NumPy arrays, by name.

    Args:
      path: a file; the "….index.json" of several, as the Hugging Face hub has them; or a directory
        with "model.safetensors" in one of these forms.
      where: a pattern over the params: restore only these, everything else stays as in `like`. What
        the file has beyond them is no matter then; without a pattern it is an error.
      rename: a function of a name of `like` ("encoder/0/kernel") that returns the name in the file.
        `lambda name: "model." + name.replace("/", ".")` is how torch writes them.
      cast: let floats be restored in another float dtype.

    Raises CheckpointError: no such file, not safetensors; names, shapes or dtypes that do not fit
    (ten of them, both sides). All of that is known before an array is read.

    >>> import jax.numpy as jnp, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/a.safetensors", {"model.w": jnp.arange(3.0)})
    ...     restore(f"{folder}/a.safetensors", {"w": jnp.zeros(3)}, rename=lambda name: "model." + name)
    {'w': Array([0., 1., 2.], dtype=float32)}
    """
    with _refusing("safetensors file", path):
        return _restored(_from_safetensors(_found(path)), like, where, rename, cast, "restore()")


def restore_flax(
    path: StrPath,
    like: PyTree = None,
    *,
    where: Where = None,
    rename: Rename = None,
    cast: bool = False,
) -> PyTree:
    """As `restore`, from a msgpack file of flax.

    The writer is `flax.serialization.to_bytes` or `flax.training.checkpoints`. Names are its keys,
    joined: "params/Dense_0/kernel"; entries of lists and tuples are "0", "1". Nothing is unpickled;
    arrays of objects, which flax would not write, are refused.
    """
    with _refusing("flax file", path):
        file = _as_path(path)
        with durable_files.opened(file) as opened:
            source = _from_tree(file, _of_flax(opened.read()))
        return _restored(source, like, where, rename, cast, "restore_flax()")


def restore_orbax(
    path: StrPath,
    like: PyTree = None,
    *,
    where: Where = None,
    rename: Rename = None,
    cast: bool = False,
) -> PyTree:
    """As `restore`, from the directory of one step that orbax wrote.

    The writer is orbax's old interface or its new one: `StandardCheckpointer`,
    `PyTreeCheckpointer`, a step of a `CheckpointManager`, `v1.save`, a step of `v1.training`. Names
    are the keys of the saved tree, joined: "params/Dense_0/kernel", "opt_state/0/count". Orbax
    keeps no hash of arrays: damaged bytes can be read as numbers.
    """
    fix = "Give the directory of one step, with _CHECKPOINT_METADATA in it."
    with _refusing("orbax checkpoint", path, fix):
        if is_bucket := str(path).startswith("gs://"):
            library("gcsfs", "restore_orbax()", extra="gcs")
        folder = str(path) if is_bucket else _as_path(path)
        about = _orbax.description(folder)
        source = _from_tree(Path(folder), about)
        source.read = lambda names: _orbax.read(folder, about, names)
        return _restored(source, like, where, rename, cast, "restore_orbax()")


def contents(path: StrPath) -> dict[str, jax.ShapeDtypeStruct]:
    """The names in a safetensors file with their shapes and dtypes; no array is read.

    `path` as in `restore`.
    """
    with _refusing("safetensors file", path):
        entries, _ = _safetensors.contents(_found(path))
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, leaves.dtype_of(x.dtype))
    return {name: struct(x) for name, x in entries.items()}


@contextlib.contextmanager
def _refusing(what: str, path, fix: str = ""):
    """A context that raises errors of reading a file as CheckpointError with its path."""
    try:
        yield
    except Damaged as error:
        raise CheckpointError(what, str(path), error, "a whole one", fix) from None
    except OSError as error:
        expected = "one that can be read"
        raise CheckpointError(what, str(path), told(error), expected, fix) from error


@dataclass
class _Source:
    """What a file has: leaves by name, and how to read some of them."""

    path: Path
    leaves: dict[str, Leaf]
    read: Callable[[list[str]], list[Any]]


def _from_safetensors(path: Path) -> _Source:
    entries, _ = _safetensors.contents(path)
    found = {name: Leaf((name,), "array", x.shape, x.dtype) for name, x in entries.items()}
    return _Source(path, found, lambda names: [_safetensors.read(entries[name]) for name in names])


def _of_flax(content: bytes) -> dict[str, Any]:
    """The nested dicts of a file of flax's. Raises Damaged for anything else."""
    import flax.serialization

    own = lambda x: np.array(x) if isinstance(x, np.ndarray) else x  # flax's cannot be written to
    try:
        tree = jax.tree.map(own, flax.serialization.msgpack_restore(content))
    except Exception as error:  # of msgpack, NumPy and flax
        raise Damaged(told(error)) from None
    if not isinstance(tree, dict):
        raise Damaged("no dict of arrays")
    return tree


def _from_tree(path: Path, tree) -> _Source:
    """The source for nested dicts of arrays, or of descriptions of arrays."""
    named = {"/".join(name): x for name, _, x in trees.leaves_with_names(tree)}
    found = {}
    for name, x in named.items():
        try:
            found[name] = leaves.leaf_of((name,), _orbax.as_struct(x))
        except WrongTypeError:
            raise Damaged(f"{name!r:.80}: {trees.describe(x)}, no array") from None
    return _Source(path, found, lambda names: [named[name] for name in names])


def _restored(source: _Source, like, where, rename: Rename, cast: bool, call: str):
    checks.check_flags(call, cast=cast)
    if where is not None:
        patterns.compile_where(where)
    if like is None:
        if rename is not None or where is not None:
            expected = "the tree whose names are renamed or chosen"
            raise WrongTypeError("like", call, "none", expected)
        return _nested(source)
    has_state = "clock" in source.leaves and rename is None
    if isinstance(like, TrainState) and (where is not None or not has_state):
        params = _by_name(source, like.params, where, rename, cast, has_state)
        return _matching.restarted(like, params=params)
    is_params = has_state and not leaves.tree_of(like).states
    return _by_name(source, like, where, rename, cast, is_params)


def _by_name(source: _Source, tree, where, rename: Rename, cast: bool, is_params: bool):
    """`tree` with the leaves that `where` selects from the file, found by their names.

    `is_params`: they are the params of the state that the file has.
    """
    flat, treedef = jax.tree.flatten(tree)
    flags = patterns.select(where, tree) if where is not None else (True,) * len(flat)
    prefix = _PARAMS if is_params else ""
    names = [prefix + name for name in _names_in(tree, rename)]
    paths = [show("tree", path) for path, _ in leaves.tree_of(tree).leaves]
    wanted = [i for i, flag in enumerate(flags) if flag]
    differences, missing = [], ""
    for i in wanted:
        mine, theirs = leaves.leaf_of((paths[i],), flat[i]), source.leaves.get(names[i])
        if theirs is None:
            missing = missing or names[i]
            differences.append(f"{paths[i]}: nothing named {names[i]!r}, expected {mine}")
        elif not _fits(mine, theirs, cast):
            differences.append(f"{paths[i]}: {names[i]!r} is {theirs}, expected {mine}")
    if where is None:
        known = set(names)
        for name, leaf in source.leaves.items():
            if name.startswith(prefix) and name not in known:
                differences.append(f"{name!r} is {leaf}, expected nothing of that name")
    fix = "where= takes a part."
    if missing:  # comparing texts takes its time
        likely = [name for name in source.leaves if len(name) < 200][:2000]
        near = ", ".join(map(repr, patterns.nearest(missing, likely)))
        fix = f"Nearest to {missing!r}: {near}. rename= finds other names." if near else fix
    _matching.refuse(f"other arrays in {source.path}", differences, fix)
    values = source.read([names[i] for i in wanted])
    for i, value in zip(wanted, values, strict=True):
        flat[i] = _matching.placed(value, flat[i], leaves.leaf_of((), flat[i]).kind)
    return treedef.unflatten(flat)


def _fits(mine: Leaf, theirs: Leaf, cast: bool) -> bool:
    if mine.kind.startswith("key:"):  # files have no typed keys
        return (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    return _matching.fits(mine, theirs, cast)


def _nested(source: _Source) -> dict[str, Any]:
    """All leaves as nested dicts."""
    out: dict[str, Any] = {}
    for name in source.leaves:
        *parents, last = name.split("/")
        if len(parents) > _DEPTH:
            raise Damaged(f"{name!r:.80}: more than {_DEPTH} levels")
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise Damaged(f"{name!r:.80} and one above or below it: no tree")
        node[last] = name
    names, treedef = jax.tree.flatten(out)
    return treedef.unflatten(source.read(names))


# ------------------------------------------------------------------------------------- names, paths


def _names_in(tree, rename: Rename) -> list[str]:
    """The name in a file of every leaf, in flatten order."""
    names = ["/".join(name) for name, _, _ in trees.leaves_with_names(tree)]
    if rename is None:
        return names
    found = [rename(name) for name in names]
    if odd := [x for x in found if not isinstance(x, str)]:
        raise WrongTypeError("result of rename", "", trees.describe(odd[0]), "a name")
    return found


def _as_path(path) -> Path:
    return Path(os.path.abspath(durable_files.local(path, "path", "", "the path of a file")))


def _found(path) -> Path:
    """The file to read: a single one, or the index of several."""
    file = _as_path(path)
    if file.is_dir():
        file = file / "model.safetensors"
    index = file.with_name(file.name + _safetensors.INDEX)
    return index if not os.path.lexists(file) and os.path.lexists(index) else file
