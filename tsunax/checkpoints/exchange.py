"""Arrays for other programs, and from them: safetensors files both ways; flax's and orbax's only
in.

    save("model.safetensors", state.params)                   names are paths: "encoder/0/kernel"
    params = restore("model.safetensors", params)             every name, shape and dtype compared first

Nothing here is code, and nothing of it runs: what cannot be read as plain arrays is refused. A run
goes on from its `Checkpoints`; these are the files that one gives away.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tsunax._core import checks, durable_files, patterns, trees
from tsunax.checkpoints import _arrays, _msgpack, _orbax, _restoring, _safetensors
from tsunax.checkpoints import manifest as _manifest
from tsunax.checkpoints.manifest import Damaged, Leaf, Manifest, TooNew
from tsunax.errors import CheckpointError, SaveError, WrongTypeError, message, told, unknown
from tsunax.state import TrainState

__all__ = ["contents", "restore", "restore_flax", "restore_orbax", "save"]

Rename = Callable[[str], str] | Mapping[str, str] | None
_MANIFEST, _NAMES, _SUM = "tsunax", "tsunax.names", "tsunax.sha256"  # of both texts
_PARAMS = "params/"  # what the names of a whole state's params begin with
_DEPTH = 64


# ------------------------------------------------------------------------------------------- saving


def save(
    path: str | os.PathLike,
    tree,
    *,
    rename: Rename = None,
    metadata: Mapping[str, str] | None = None,
    max_bytes: int | None = None,
) -> None:
    """Write the arrays of `tree`, params or a whole training state, as a safetensors file.

    A name is the path that patterns match, "encoder/0/kernel"; of a state
    "params/encoder/0/kernel", "opt_state/0/mu/encoder/0/kernel", "model_state/...", "key". Beside
    the arrays the file has, as text, the types of containers and keys, Python numbers and a sha256
    of each array: `restore` builds the state from that and verifies it; others need not look. The
    file is whole or not there, and an older one stays until then.

    Args:
      path: "….safetensors"; its directory is made if it is not there.
      rename: the name in the file for a name of the tree: a function, or a dict with those that
        differ.
      metadata: more text for the header. Its "format", which the hub asks for, is "flax" if none is
        given.
      max_bytes: of the arrays in one file. What is larger becomes "…-00001-of-00003.safetensors"
        and so on, and "….safetensors.index.json" that says which name is where. An array is never
        cut.

    Raises WrongTypeError for leaves and dtypes that the format does not have (int4, complex128,
    strings of arrays), CheckpointError for a path or names that cannot be, SaveError where writing
    failed.

    >>> import jax.numpy as jnp, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/a.safetensors", {"dense": {"w": jnp.ones((2, 3), jnp.bfloat16)}})
    ...     contents(f"{folder}/a.safetensors")
    {'dense/w': ShapeDtypeStruct(shape=(2, 3), dtype=bfloat16)}
    """
    path = _as_path(path)
    if not path.name.endswith(".safetensors") or path.name == ".safetensors":
        raise CheckpointError(
            message("path", "save()", repr(path.name), "a name that ends in .safetensors")
        )
    if max_bytes is not None:
        checks.check_count(max_bytes, "save()", "max_bytes")
    about = _texts(metadata)
    known = _manifest.tree_of(tree)
    _arrays.check_saveable(known)
    names = _names_in(tree, rename)
    leaves, arrays = _described(known, names)
    if not arrays:
        raise WrongTypeError(message("tree", "save()", "no array", "at least one"))
    step = _arrays.step_of(known, None) if known.states else 0
    states = {at: _manifest.state_facts(s) for at, s in known.states.items()}
    manifest = Manifest(step, leaves, known.nodes, states, [], {}, {}, _arrays.versions(), {})
    texts = manifest.dump().decode(), json.dumps(names)
    about |= {
        _MANIFEST: texts[0],
        _NAMES: texts[1],
        _SUM: durable_files.sha256("".join(texts).encode()),
    }
    specs = {name: (leaf.dtype, leaf.shape) for name, (leaf, _) in arrays.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _safetensors.save(
            path, specs, lambda name: trees.on_host(arrays[name][1]), about, max_bytes
        )
    except (OSError, ValueError) as error:
        raise SaveError(message("save", str(path), told(error), "a finished file")) from error


def _described(
    known: _manifest.Tree, names: list[str]
) -> tuple[list[Leaf], dict[str, tuple[Leaf, Any]]]:
    """Every leaf for the manifest, and those that are arrays by their name in the file."""
    leaves, arrays = [], {}
    for (path, x), name in zip(known.leaves, names, strict=True):
        leaf = _manifest.leaf_of(path, x)
        if leaf.dtype:
            _check_array(path, x, leaf)
            digest = _arrays.digest(trees.on_host(x))
            shard = _manifest.Shard(tuple((0, n) for n in leaf.shape), digest, str(len(arrays)))
            leaf = Leaf(path, leaf.kind, leaf.shape, leaf.dtype, (shard,))
            if name in arrays:
                both = " and ".join(_manifest.show("tree", p) for p in (arrays[name][0].path, path))
                raise CheckpointError(
                    message(f"name {name!r}", "save()", f"two arrays, {both}", "one name for each")
                )
            if not name or name.startswith("__metadata__") or not name.isprintable():
                where = _manifest.show("tree", path)
                raise CheckpointError(
                    message("name", where, repr(name), "printable text", "rename= gives another.")
                )
            arrays[name] = leaf, x
        leaves.append(leaf)
    return leaves, arrays


def _check_array(path, x, leaf: Leaf) -> None:
    where = _manifest.show("tree", path)
    if leaf.dtype not in _safetensors.CODE_OF:
        fix = "Cast it, or save with Checkpoints."
        raise WrongTypeError(message("leaf", where, str(leaf), "a dtype that safetensors has", fix))
    if not _arrays.is_local(x) and not x.is_fully_replicated:
        fix = "Gather it: jax.experimental.multihost_utils.process_allgather."
        raise WrongTypeError(
            message("leaf", where, "an array of which other processes have a part", "a whole", fix)
        )


def _texts(metadata) -> dict[str, str]:
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, Mapping) or not all(
        isinstance(x, str) for pair in metadata.items() for x in pair
    ):
        raise WrongTypeError(
            message("metadata", "save()", trees.describe(metadata), "a dict of strings")
        )
    found = {"format": "flax", **metadata}
    if taken := [name for name in found if name.startswith("tsunax")]:
        raise WrongTypeError(
            message("metadata", "save()", repr(taken[0]), "a name that is not tsunax's own")
        )
    return found


# ---------------------------------------------------------------------------------------- restoring


def restore(
    path: str | os.PathLike,
    like=None,
    *,
    where: Any = None,
    rename: Rename = None,
    cast: bool = False,
):
    """The arrays of a safetensors file in the place of `like`'s: its structure, dtypes and devices.

    `like` is a tree of arrays or of `jax.ShapeDtypeStruct`, with its shardings; or a training
    state: that of `save` comes back whole, cuts, frozen flags and live numbers too, as from
    `Checkpoints`; of any other file a state takes its params, and the optimizer starts anew.
    Without `like`: nested dicts of NumPy arrays, by name.

    Args:
      path: a file; the name that `save` was given, also if it became several files; their
        "….index.json"; or a directory with "model.safetensors" in one of these forms.
      where: a pattern over the params: restore only these, everything else stays as in `like`. What
        the file has beyond them is no matter then; without a pattern it is an error.
      rename: the name in the file for a name of `like` ("encoder/0/kernel"): a function, or a dict
        with those that differ. `lambda name: "model." + name.replace("/", ".")` is how torch writes
        them.
      cast: let floats be restored in another float dtype.

    Raises CheckpointError: no such file, not safetensors, damaged; names, shapes, dtypes or rules
    that do not fit (ten of them, both sides). All of that is known before an array is read.

    >>> import jax.numpy as jnp, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/a.safetensors", {"w": jnp.arange(3.0)}, rename=lambda name: "model." + name)
    ...     restore(f"{folder}/a.safetensors", {"w": jnp.zeros(3)}, rename={"w": "model.w"})
    {'w': Array([0., 1., 2.], dtype=float32)}
    """
    with _refusing("safetensors file", path):
        return _restored(_from_safetensors(_found(path)), like, where, rename, cast, "restore()")


def restore_flax(
    path: str | os.PathLike,
    like=None,
    *,
    where: Any = None,
    rename: Rename = None,
    cast: bool = False,
):
    """As `restore`, from a file of `flax.serialization.to_bytes` or `flax.training.checkpoints`
    (msgpack).

    Names are its keys, joined: "params/Dense_0/kernel"; entries of lists and tuples are "0", "1".
    Nothing is unpickled; arrays of objects, which flax would not write, are refused.
    """
    with _refusing("flax file", path):
        file = _as_path(path)
        with durable_files.opened(file) as opened:
            source = _from_tree(file, _msgpack.read(opened.read()))
        return _restored(source, like, where, rename, cast, "restore_flax()")


def restore_orbax(
    path: str | os.PathLike,
    like=None,
    *,
    where: Any = None,
    rename: Rename = None,
    cast: bool = False,
):
    """As `restore`, from a directory that orbax wrote: of one step, by its old interface or the new
    one.

    `StandardCheckpointer`, `PyTreeCheckpointer`, a step of a `CheckpointManager`, `v1.save`, a step
    of `v1.training`. Names are the keys of the saved tree, joined: "params/Dense_0/kernel",
    "opt_state/0/count". Orbax keeps no hash of arrays: damaged bytes can be read as numbers.
    """
    fix = "Give the directory of one step, with _CHECKPOINT_METADATA in it."
    with _refusing("orbax checkpoint", path, fix):
        folder = _as_path(path)
        about = _orbax.foreign(folder)
        source = _from_tree(folder, about)
        source.read = lambda names: _orbax.read_foreign(folder, about, names)
        return _restored(source, like, where, rename, cast, "restore_orbax()")


def contents(path: str | os.PathLike) -> dict[str, jax.ShapeDtypeStruct]:
    """The names in a safetensors file with their shapes and dtypes; no array is read.

    `path` as in `restore`.
    """
    with _refusing("safetensors file", path):
        entries, _ = _safetensors.contents(_found(path))
    return {
        name: jax.ShapeDtypeStruct(x.shape, _manifest.dtype_of(x.dtype))
        for name, x in entries.items()
    }


@contextlib.contextmanager
def _refusing(what: str, path, fix: str = ""):
    """What is wrong with a file, as a CheckpointError that names it."""
    try:
        yield
    except TooNew as error:
        expected = f"format {_manifest.FORMAT} or earlier"
        raise CheckpointError(message(what, str(path), error, expected, "Update tsunax.")) from None
    except Damaged as error:
        raise CheckpointError(message(what, str(path), error, "a whole one", fix)) from None
    except OSError as error:
        raise CheckpointError(
            message(what, str(path), told(error), "one that can be read", fix)
        ) from error


@dataclass
class _Source:
    """What a file has: leaves by name, and how to read some of them."""

    path: Path
    leaves: dict[str, Leaf]
    read: Callable[[list[str]], list[Any]]
    manifest: Manifest | None = None
    names: list[str] | None = None  # of the manifest's leaves


def _from_safetensors(path: Path) -> _Source:
    entries, about = _safetensors.contents(path)
    leaves = {name: Leaf((name,), "array", x.shape, x.dtype) for name, x in entries.items()}
    source = _Source(
        path, leaves, lambda names: [_safetensors.read(entries[name]) for name in names]
    )
    if _MANIFEST not in about:
        return source
    texts = about[_MANIFEST], about.get(_NAMES, "")
    manifest = Manifest.parse(texts[0].encode())
    if durable_files.sha256("".join(texts).encode()) != about.get(_SUM):
        raise Damaged("description: other text than was saved (sha256)")
    names = _names_of(texts[1], len(manifest.leaves))
    for name, leaf in zip(names, manifest.leaves, strict=True):
        mine = leaves.get(name)
        same = (
            mine is not None
            and (mine.shape, mine.dtype) == (leaf.shape, leaf.dtype)
            and len(leaf.shards) == 1
        )
        if leaf.dtype and not same:
            raise Damaged(f"{name!r:.80} is not as its own description says")
        leaves[name] = leaf
    return _Source(
        path,
        leaves,
        lambda wanted: [_verified(name, leaves[name], entries) for name in wanted],
        manifest,
        names,
    )


def _names_of(text: str, n: int) -> list[str]:
    try:
        _manifest.check_pieces(text.encode())
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = []
    if not isinstance(names, list) or not all(isinstance(x, str) for x in names):
        names = []
    if not len(set(names)) == len(names) == n:
        raise Damaged(f"{_NAMES}: no list of {n} names")
    return names


def _verified(name: str, leaf: Leaf, entries: Mapping[str, _safetensors.Entry]):
    if not leaf.dtype:
        return _manifest.plain_value(leaf)
    array = _safetensors.read(entries[name])
    if leaf.shards and _arrays.digest(array) != leaf.shards[0].sha256:
        raise Damaged(f"{name!r:.80}: other bytes than were saved (sha256)")
    return array


def _from_tree(path: Path, tree) -> _Source:
    """Of nested dicts of arrays, or of what describes them."""
    named = {"/".join(name): x for name, _, x in trees.leaves_with_names(tree)}
    leaves = {}
    for name, x in named.items():
        try:
            leaves[name] = _manifest.leaf_of((name,), _orbax.as_struct(x))
        except WrongTypeError:
            raise Damaged(f"{name!r:.80}: {trees.describe(x)}, no array") from None
    return _Source(path, leaves, lambda names: [named[name] for name in names])


def _restored(source: _Source, like, where, rename: Rename, cast: bool, call: str):
    checks.check_flags(call, cast=cast)
    if where is not None:
        patterns.compile_where(where)
    if like is None:
        if rename is not None:
            raise WrongTypeError(
                message("rename", call, "no like=", "the tree whose names are renamed")
            )
        return _nested(source, where)
    has_states = isinstance(like, TrainState) or bool(_manifest.tree_of(like).states)
    if (
        has_states
        and where is None
        and rename is None
        and source.manifest is not None
        and source.manifest.states
    ):
        return _whole(source, source.manifest, like, cast)
    if isinstance(like, TrainState):
        return _restoring.restarted(like, params=_by_name(source, like.params, where, rename, cast))
    return _by_name(source, like, where, rename, cast)


def _whole(source: _Source, manifest: Manifest, like, cast: bool):
    """Training states as they were saved."""
    plan = _restoring.How(like, None, cast, False).compared(manifest)
    fix = "Restore with the setup that saved it; params alone: restore(path, state, where='**')."
    _restoring.refuse(f"another state in {source.path}", plan.differences, fix)
    names = {
        leaf.path: name for leaf, name in zip(manifest.leaves, source.names or (), strict=True)
    }
    out = plan.filled(source.read([names[pair.saved.path] for pair in plan.pairs]))
    _restoring.warn_of_edits(plan.edited)
    return out


def _by_name(source: _Source, tree, where, rename: Rename, cast: bool):
    """`tree` with the leaves that `where` selects from the file, found by their names."""
    leaves, treedef = jax.tree.flatten(tree)
    flags = patterns.select(where, tree) if where is not None else (True,) * len(leaves)
    of_state = rename is None and source.manifest is not None and () in source.manifest.states
    prefix = _PARAMS if of_state else ""
    names = [prefix + name for name in _names_in(tree, rename)]
    paths = [_manifest.show("tree", path) for path, _ in _manifest.tree_of(tree).leaves]
    wanted = [i for i, flag in enumerate(flags) if flag]
    differences, missing = [], ""
    for i in wanted:
        mine, theirs = _manifest.leaf_of((paths[i],), leaves[i]), source.leaves.get(names[i])
        if theirs is None:
            missing = missing or names[i]
            differences.append(f"{paths[i]}: nothing named {names[i]!r}, expected {mine}")
        elif not _fits(mine, theirs, cast):
            differences.append(f"{paths[i]}: {names[i]!r} is {theirs}, expected {mine}")
    if where is None:
        known = set(names)
        more = [name for name in source.leaves if name.startswith(prefix) and name not in known]
        differences += [
            f"{name!r} is {source.leaves[name]}, expected nothing of that name" for name in more
        ]
    likely = [name for name in source.leaves if len(name) < 200][
        :2000
    ]  # comparing texts takes its time
    near = ", ".join(map(repr, patterns.nearest(missing, likely))) if missing else ""
    fix = (
        f"Nearest to {missing!r}: {near}. rename= finds other names."
        if near
        else "where= takes a part."
    )
    _restoring.refuse(f"other arrays in {source.path}", differences, fix)
    values = source.read([names[i] for i in wanted])
    for i, value in zip(wanted, values, strict=True):
        kind = _manifest.leaf_of((), leaves[i]).kind
        leaves[i] = _restoring.placed(value, leaves[i], kind)
    return treedef.unflatten(leaves)


def _fits(mine: Leaf, theirs: Leaf, cast: bool) -> bool:
    if (
        mine.kind.startswith("key:") and theirs.kind == "array"
    ):  # other programs have the numbers of a key only
        return (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    return _manifest.fits(mine, theirs, cast)


def _nested(source: _Source, where):
    """All that is there as nested dicts, typed keys as such."""
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
    flags = patterns.select(where, out) if where is not None else (True,) * len(names)
    read = iter(source.read([name for name, flag in zip(names, flags, strict=True) if flag]))
    values = [
        _typed(next(read), source.leaves[name].kind) if flag else None
        for name, flag in zip(names, flags, strict=True)
    ]
    return treedef.unflatten(values)


def _typed(value, kind: str):
    return (
        _manifest.wrap_key(value, kind.removeprefix("key:")) if kind.startswith("key:") else value
    )


# ------------------------------------------------------------------------------------- names, paths


def _names_in(tree, rename: Rename) -> list[str]:
    """The name in a file of every leaf, in flatten order."""
    names = ["/".join(name) for name, _, _ in trees.leaves_with_names(tree)]
    if rename is None:
        return names
    if isinstance(rename, Mapping):
        if others := [name for name in rename if name not in names]:
            raise CheckpointError(unknown("name", "rename", str(others[0]), names))
        return [rename.get(name, name) for name in names]
    if not callable(rename):
        raise WrongTypeError(message("rename", "", trees.describe(rename), "a function or a dict"))
    found = [rename(name) for name in names]
    if odd := [x for x in found if not isinstance(x, str)]:
        raise WrongTypeError(message("result of rename", "", trees.describe(odd[0]), "a name"))
    return found


def _as_path(path) -> Path:
    return Path(os.path.abspath(durable_files.local(path, "path", "", "the path of a file")))


def _found(path) -> Path:
    """The file to begin with: one alone, or an index."""
    file = _as_path(path)
    if file.is_dir():
        file = file / "model.safetensors"
    index = file.with_name(file.name + _safetensors.INDEX)
    return index if not os.path.lexists(file) and os.path.lexists(index) else file
