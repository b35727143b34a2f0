"""Arrays to and from other programs: safetensors files both ways, flax's and orbax's only in.

    save("model.safetensors", state.params)           names are paths: "encoder/0/kernel"
    params = restore("model.safetensors", params)     every name, shape and dtype compared first

No code from a file is run. A run resumes from its `Checkpoints`; a file has only arrays.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tsunax._core import Function, PyTree, StrPath, Where, checks, durable_files, patterns, trees
from tsunax._core.libraries import library
from tsunax._state import COUNTS
from tsunax._step.finite_state import warn_if_not_finite
from tsunax.checkpoints import _blocks, _foreign, _matching, _orbax, _safetensors, _writing, leaves
from tsunax.checkpoints._transforms import Mapped, Transform, cast, planned, rearrange
from tsunax.checkpoints.checksums import Bounds
from tsunax.checkpoints.leaves import Damaged, Leaf
from tsunax.errors import CheckpointError, SaveError, WrongTypeError, told
from tsunax.state import TrainState

__all__ = ["Transform", "cast", "contents", "rearrange", "restore", "save", "torch_kernel",
           "torch_name"]  # fmt: skip

Rename = Callable[[str], str] | None
Transforms = Mapping[str, Transform] | None
_PARAMS = "params/"  # the prefix of a whole state's params


def save(
    path: StrPath, tree: PyTree, *, rename: Rename = None, transform: Transforms = None
) -> None:
    """Write the arrays of `tree`, params or a whole training state, as a safetensors file.

    A name is the path that patterns match, "encoder/0/kernel"; of a state
    "params/encoder/0/kernel", "opt_state/0/mu/encoder/0/kernel", "model_state/...", "key". Keys are
    their data. The file is whole or not there, and an older one stays until then.

    Args:
      path: "….safetensors"; its directory is made if it is not there.
      rename, transform: the arguments of `restore`, for the way back: the same ones write the names
        and shapes of the file that was restored.

    Raises WrongTypeError for leaves and dtypes that the format does not have (int4, complex128,
    Python's numbers), CheckpointError for invalid paths or names, SaveError if writing failed.

    >>> import jax.numpy as jnp, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/a.safetensors", {"dense": {"w": jnp.ones((2, 3), jnp.bfloat16)}})
    ...     contents(f"{folder}/a.safetensors")
    {'dense/w': ShapeDtypeStruct(shape=(2, 3), dtype=bfloat16)}
    """
    path = _as_path(path)
    if not path.name.endswith(".safetensors") or path.name == ".safetensors":
        raise CheckpointError("path", "save()", repr(path.name), "a name that ends in .safetensors")
    named_leaves = leaves.tree_of(tree)
    _writing.check_saveable(named_leaves)
    plan = planned(tree, None, rename, transform, "save()")
    _check_owners(plan, "save()")
    for mapped in plan.values():
        if mapped.stored.dtype not in _safetensors.DTYPES:
            raise WrongTypeError(
                "leaf",
                mapped.where,
                got=mapped.stored,
                expected="a safetensors dtype",
                fix="Cast it, or save with Checkpoints.",
            )
        for name in mapped.names:
            if not name or name.startswith("__metadata__") or not name.isprintable():
                raise CheckpointError("name", mapped.where, repr(name), "printable text")
    arrays = {}
    for i, mapped in plan.items():
        x, inverse = trees.on_host(named_leaves.leaves[i][1]), mapped.transform.inverse
        arrays |= {name: inverse(x[(*place, ...)]) for name, place in mapped.names.items()}
    hidden_path = durable_files.hidden_path(path.parent, "tmp", 0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _safetensors.write(hidden_path, arrays, {"format": "flax"})  # the hub requires it
        os.replace(hidden_path, path)  # a link is replaced, not followed
        durable_files.sync(path.parent)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            hidden_path.unlink()
        raise SaveError("save", str(path), told(error), "a finished file") from error


def _check_owners(plan: dict[int, Mapped], call: str) -> None:
    """Raise CheckpointError for two leaves with the same name, for example "a/b" and "b" in "a"."""
    owners: dict[str, str] = {}
    for mapped in plan.values():
        for name in mapped.names:
            if (owner := owners.setdefault(name, mapped.where)) is not mapped.where:
                raise CheckpointError(
                    f"name {name!r}",
                    call,
                    got=f"two arrays, {owner} and {mapped.where}",
                    expected="another name, by rename=",
                )


def restore(
    path: StrPath,
    like: PyTree = None,
    *,
    where: Where = None,
    rename: Rename = None,
    transform: Transforms = None,
    cast: bool = False,
    format: str = "safetensors",
) -> PyTree:
    """The arrays of a file in the place of `like`'s: its structure, dtypes and devices.

    `like` is a tree of arrays or of `jax.ShapeDtypeStruct`, with its shardings; or a training
    state, which is filled by name if the file has one, and takes params of any other file: averages
    and a rule's copies of params (schedule-free) begin at them, everything else stays as in `like`,
    a new state. Without `like`: a dict of NumPy arrays, by name.

    Args:
      path: a file; the "….index.json" of several, as the Hugging Face hub has them; or a directory
        with "model.safetensors" in one of these forms. For another `format`, see there.
      where: a pattern over the params: restore only these, everything else stays as in `like`. The
        file may have other arrays then; without a pattern they are an error.
      rename: a function of a name of `like` ("encoder/0/kernel") that returns the name in the file.
        `lambda name: "model." + torch_name(name)` is how torch writes them. Each "{}" in the result
        counts along a leading axis of the leaf: "h.{}.weight" stacks "h.0.weight", "h.1.weight", ….
      transform: {pattern: transform} for arrays of another shape or dtype in the file: `rearrange`,
        `cast`, `torch_kernel`. The first pattern that matches a leaf decides.
      cast: let floats be restored in another float dtype, and integers in another integer dtype; a
        number that is too large for it raises CheckpointError.
      format: "safetensors"; or "flax", a msgpack file of `flax.serialization.to_bytes` or
        `flax.training.checkpoints`; or "orbax", the directory of one step that its old or its new
        interface wrote, also in a bucket. Names of the last two are the keys of the saved tree,
        joined: "params/Dense_0/kernel", "opt_state/0/count". In an `nnx.State` that orbax saved,
        names end in "/value"; `restore` finds them without. Nothing is unpickled.

    Raises CheckpointError: no such file, or of another format; names, shapes or dtypes that do not
    fit (ten are listed, both sides). All of this is raised before an array is read. Leaves of
    safetensors are then read one at a time; if a leaf is spread over processes, each reads only the
    part that it needs. Orbax has no hash of arrays: damaged bytes can be read as numbers. Raises
    MissingLibraryError for a bucket without `gcsfs`.

    >>> import jax.numpy as jnp, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/a.safetensors", {"model.w": jnp.arange(3.0)})
    ...     restore(f"{folder}/a.safetensors", {"w": jnp.zeros(3)}, rename=lambda x: "model." + x)
    {'w': Array([0., 1., 2.], dtype=float32)}
    """
    checks.check_choice(format, "restore()", "format", tuple(_READERS))
    title, source_of = _READERS[format]
    with _refusing(title, path):
        with _foreign.damage_only():
            source = source_of(path)
        restored = _restored(source, like, where, rename, transform, cast)
    for x in leaves.tree_of(restored).states.values():
        warn_if_not_finite(x, "restore()")
    return restored


def contents(path: StrPath) -> dict[str, jax.ShapeDtypeStruct]:
    """The names in a safetensors file with their shapes and dtypes; no array is read.

    `path` as in `restore`; CheckpointError for a file that cannot be read, or is damaged.

        contents("model.safetensors")["encoder/0/kernel"].shape
    """
    with _refusing("safetensors file", path), _foreign.damage_only():
        entries = _safetensors.contents(_file_to_read(path))
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, leaves.dtype_of(x.dtype))
    return {name: struct(x) for name, x in entries.items()}


@contextlib.contextmanager
def _refusing(title: str, path):
    """A context that raises errors of reading a file as CheckpointError with its path."""
    try:
        yield
    except (Damaged, OSError) as error:
        raise CheckpointError(
            title,
            str(path),
            got=error if isinstance(error, Damaged) else told(error),
            expected="one that can be read",
        ) from error


@dataclass(frozen=True)
class _Source:
    """The content of a file: leaves by name; `reading(names)(name, bounds)` is a part of a leaf.

    `file_bytes` are the bytes of all files, or None if they were not counted.
    """

    path: Path
    leaves: dict[str, Leaf]
    reading: Callable[[list[str]], Callable[[str, Bounds], Any]]
    file_bytes: int | None = None


def _from_safetensors(path: StrPath) -> _Source:
    file = _file_to_read(path)
    entries = _safetensors.contents(file)
    described = {name: Leaf((name,), "array", x.shape, x.dtype) for name, x in entries.items()}
    read = lambda name, bounds: _safetensors.read(entries[name], bounds)
    return _Source(file, described, lambda names: read)


def _from_flax(path: StrPath) -> _Source:
    import flax.serialization

    file = _as_path(path)
    with durable_files.opened(file) as opened:
        if kind := _foreign.kind_of(opened.peek(512), _foreign.MSGPACK):
            raise Damaged(kind)
        content = opened.read()
    _foreign.check_msgpack(content)
    tree = flax.serialization.msgpack_restore(content)
    del content  # before the arrays are copied
    if not isinstance(tree, dict):
        raise Damaged("no dict of arrays")
    return _from_pairs(file, _pairs_of(tree))


def _pairs_of(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts and lists with their joined keys; arrays can be written to."""
    if len(name) > 1000:  # otherwise many leaves could have long names
        raise Damaged(f"a name of {len(name)} characters, {name:.40}…")
    if isinstance(tree, (dict, list)):
        for key, x in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _pairs_of(x, f"{name}/{key}" if name else str(key))
    elif tree is not None:
        yield name, np.array(tree) if isinstance(tree, np.ndarray) else tree


def _from_orbax(path: StrPath) -> _Source:
    if is_bucket := str(path).startswith("gs://"):
        library("gcsfs", "restore()")
    folder = str(path) if is_bucket else _as_path(path)
    description, file_bytes = _orbax.description(folder)
    named_leaves = trees.leaves_with_names(description)
    structs = (("/".join(name), _orbax.as_struct(x)) for name, _, x in named_leaves)
    pairs = lambda names: zip(names, _orbax.read(folder, description, names), strict=True)
    return _from_pairs(Path(folder), structs, lambda names: dict(pairs(names)), file_bytes)


_READERS = {  # by format: the name in messages, and the reader
    "safetensors": ("safetensors file", _from_safetensors),
    "flax": ("flax file", _from_flax),
    "orbax": ("orbax directory of one step", _from_orbax),
}


def _from_pairs(
    path: Path,
    pairs: Iterable[tuple[str, Any]],
    read: Function | None = None,
    file_bytes: int | None = None,
) -> _Source:
    """The source for named arrays, or for descriptions of arrays that `read(names)` returns."""
    arrays, described = {}, {}
    for name, x in pairs:
        if name in arrays:
            raise Damaged(f"two arrays whose keys join to one name, {name!r:.80}")
        arrays[name] = x
        try:
            described[name] = leaves.leaf_of((name,), x)
        except WrongTypeError:
            raise Damaged(f"{name!r:.80}: {trees.describe(x)}, no array") from None
    arrays_of = read or (lambda _: arrays)
    reading = lambda names: functools.partial(_part, arrays_of(names))
    return _Source(path, described, reading, file_bytes)


def _part(arrays: Mapping[str, Any], name: str, bounds: Bounds):
    return arrays[name][tuple(slice(*bound) for bound in bounds)] if bounds else arrays[name]


def _restored(source: _Source, like, where, rename, transform, cast: bool):
    checks.check_flags("restore()", cast=cast)
    if like is None:
        if any(argument is not None for argument in (rename, where, transform)):
            raise WrongTypeError("like", "restore()", "none", "the tree to rename or choose from")
        total, file_bytes = sum(x.n_bytes for x in source.leaves.values()), source.file_bytes
        if file_bytes is not None and total > 4 * file_bytes + (64 << 20):
            raise Damaged(
                f"{total} bytes of arrays in files of {file_bytes}; give like=, a tree of their "
                "shapes, if they are zeros"
            )
        read = source.reading(list(source.leaves))
        return {name: read(name, _blocks.whole(x.shape)) for name, x in source.leaves.items()}
    has_state = rename is None and _has_state(source, like)
    takes_params = isinstance(like, TrainState) and (where is not None or not has_state)
    tree = like.params if takes_params else like
    is_params = has_state and (takes_params or not leaves.tree_of(like).states)
    prefix = _PARAMS if is_params else ""
    plan = planned(tree, where, rename, transform, "restore()", prefix)
    if rename is None:  # with `rename`, two leaves may share a name
        _check_owners(plan, "restore()")
    filled = _filled_tree(source, tree, plan, cast, (prefix,) if where is None else ())
    return _matching.restarted(like, params=filled) if takes_params else filled


def _has_state(source: _Source, like) -> bool:
    """Whether the file has a training state, and no arrays by the names of `like` alone."""
    counts = source.leaves.get("clock")
    if counts is None or counts.dtype != "int32" or counts.shape[-1:] != (len(COUNTS),):
        return False
    names = {"/".join(name) for name, _, _ in trees.leaves_with_names(like)}
    is_plain = not isinstance(like, TrainState) and names <= source.leaves.keys()
    return not is_plain and any(name.startswith(_PARAMS) for name in source.leaves)


def _filled_tree(
    source: _Source, tree, plan: dict[int, Mapped], cast: bool, prefixes: tuple[str, ...]
):
    """`tree` with the leaves of the plan; no other names in the file may begin with a prefix."""
    target_leaves, treedef = jax.tree.flatten(tree)
    differences, missing = [], []
    # Orbax keeps the wrappers of flax.nnx, with the array in their `value`.
    name_in_file = lambda name: name if name in source.leaves else f"{name}/value"
    known_names = dict.fromkeys(
        name_in_file(name) for mapped in plan.values() for name in mapped.names
    )
    for mapped in plan.values():
        expected = str(mapped.stored)
        if expected != str(mapped.leaf):
            expected += f" for {mapped.leaf}"
        for name in mapped.names:
            saved_leaf = source.leaves.get(name_in_file(name))
            if saved_leaf is None:
                missing.append(name)
                differences.append(f"{mapped.where}: nothing named {name!r}, expected {expected}")
            elif not _matching.fits(mapped.stored, saved_leaf, cast):
                differences.append(f"{mapped.where}: {name!r} is {saved_leaf}, expected {expected}")
    for name in source.leaves:
        if name.startswith(prefixes) and name not in known_names:
            differences.append(f"{name!r} is {source.leaves[name]}, expected nothing of that name")
    fix = "where= takes a part, rename= finds other names, cast=True takes other dtypes."
    if missing:  # comparing texts takes its time
        likely = [name for name in source.leaves if len(name) < 200][:2000]
        near = ", ".join(map(repr, patterns.nearest(missing[0], likely)))
        fix = f"Nearest to {missing[0]!r}: {near or 'none'}. {fix}"
    _matching.refuse(f"other arrays in {source.path}", differences, fix)
    read = source.reading(list(known_names))
    for i, mapped in plan.items():
        read_part = lambda name, bounds: read(name_in_file(name), bounds)
        value = _value(mapped, target_leaves[i], read_part)
        target_leaves[i] = _matching.placed(value, target_leaves[i], mapped.leaf.kind)
        # otherwise host copies of many leaves would pile up
        jax.block_until_ready(target_leaves[i])
    return treedef.unflatten(target_leaves)


def _value(mapped: Mapped, like, read: Callable[[str, Bounds], Any]):
    """A leaf on the host; if it is spread over processes, the parts that this process needs."""
    shape, sharding = mapped.leaf.shape, getattr(like, "sharding", None)
    if not mapped.leaf.dtype:
        return read(next(iter(mapped.names)), ())
    if sharding is None or sharding.is_fully_addressable or mapped.leaf.kind != "array":
        return mapped.part(_blocks.whole(shape), read)
    places = sharding.addressable_devices_indices_map(shape).values()
    all_bounds = {_blocks.bounds_of(index, shape) for index in places}
    parts = {bounds: mapped.part(bounds, read) for bounds in all_bounds}
    return _blocks.Pieces(shape, like.dtype, parts)


#: Kernels of flax's Linear and Conv, from torch's weights: `transform={"**/kernel": torch_kernel}`.
#: Transposed convolutions have other axes.
torch_kernel: Transform = rearrange("o i ... -> ... i o")


def torch_name(name: str) -> str:
    """The name in torch of an array in flax's Linear, Conv, Embed or norm.

    >>> torch_name("layers/0/norm/scale")
    'layers.0.norm.weight'
    """
    names = {
        "kernel": "weight", "scale": "weight", "embedding": "weight",
        "mean": "running_mean", "var": "running_var",
    }  # fmt: skip
    *path, leaf_name = name.split("/")
    return ".".join([*path, names.get(leaf_name, leaf_name)])


def _as_path(path) -> Path:
    return Path(os.path.abspath(durable_files.local(path, "path", "", "the path of a file")))


def _file_to_read(path) -> Path:
    """The file to read: a single one, or the index of several."""
    file = _as_path(path)
    is_folder = file.is_dir()
    file = file / "model.safetensors" if is_folder else file
    index = file.with_name(file.name + _safetensors.INDEX)
    file = index if not os.path.lexists(file) and os.path.lexists(index) else file
    if is_folder:  # a link that the user named may lead anywhere
        durable_files.check_inside(file, file.parent)
    return file
