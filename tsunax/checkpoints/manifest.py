"""The manifest of a checkpoint: plain JSON, read back field by field and within bounds.

The step, every leaf by path and name with its shape, dtype and hash, the types of all containers,
facts of the training states in it (`state_facts`), and data, history and callbacks, which are
values of the user. Nothing in it is code, and no file is opened here.
"""

import contextlib
import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tsunax._core import durable_files, trees
from tsunax.checkpoints import _foreign, leaves
from tsunax.checkpoints.checksums import MODULUS
from tsunax.checkpoints.leaves import Damaged, Keys, Leaf, TooNew, finite, unfinite
from tsunax.errors import WrongTypeError

FORMAT = 1
LIMIT = 28 << 20  # bytes of a manifest, because parsing a long string takes three times as much
# Links of earlier checkpoints in a manifest, 3 KB. A manifest has a link to each checkpoint on the
# disk if there are fewer. With more, later manifests have links to the newest 64 alone.
MOST_LINKS = 64
DEPTH = 64  # levels of a user's value; more could exhaust Python's stack when it is read
_SAVED_TYPES = (
    "None, numbers, strings, bytes, arrays, torch's tensors on the CPU; "
    f"lists, tuples, dicts of them, {DEPTH} deep"
)
_PLAIN_TYPES = {"bool": bool, "int": int, "float": (float, list), "str": str, "complex": list}


@dataclass(frozen=True)
class Parts:
    """Data, history and callbacks of a process, as of `encode`, and the arrays in them."""

    values: dict[str, Any]
    arrays: list[Leaf]


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint, without its arrays."""

    step: int
    leaves: list[Leaf]
    states: dict[Keys, dict[str, Any]]
    # One per process that wrote; parts after the first have only values that differ from it.
    parts: list[Parts] = dataclasses.field(default_factory=list)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    # {step: link} of the checkpoint itself and of earlier ones; none of an earlier version
    links: dict[int, str] = dataclasses.field(default_factory=dict)

    def linked(self, links: Mapping[int, str]) -> "Manifest":
        """The manifest with its link, behind the links of the earlier checkpoints that are kept."""
        earlier_steps = sorted(step for step in links if step < self.step)[-MOST_LINKS:]
        earlier = {step: links[step] for step in earlier_steps}
        own_link = dataclasses.replace(self, links=earlier).link()
        return dataclasses.replace(self, links={**earlier, self.step: own_link})

    def link(self) -> str:
        """A hash of the link before, the step, the hashes of all leaves, edits and settings.

        So the newest link attests all checkpoints that led to it. The same script with checkpoints
        at the same steps makes the same links, because times and the history are left out.
        """
        previous_step = max((step for step in self.links if step < self.step), default=None)
        previous = "" if previous_step is None else self.links[previous_step]
        script = self.parts[0].values.get("script") if self.parts else None
        is_of_fit = isinstance(script, Mapping)
        facts = [script.get("settings"), script.get("edits")] if is_of_fit else []
        leaf_rows = [[*x.path, x.kind, [*x.shape], x.dtype, x.hash, x.value] for x in self.leaves]
        content = json.dumps([previous, self.step, leaf_rows, facts], sort_keys=True)
        return durable_files.sha256(content.encode())[:32]

    def with_hashes(self, hashes: dict[str, int]) -> "Manifest":
        """The manifest with these hashes by name. A process may have a part of a hash only."""
        hashed = lambda x: dataclasses.replace(x, hash=hashes.get(x.name, 0)) if x.dtype else x
        parts = [Parts(part.values, [*map(hashed, part.arrays)]) for part in self.parts]
        return dataclasses.replace(self, leaves=[*map(hashed, self.leaves)], parts=parts)

    def arrays(self) -> list[Leaf]:
        return [x for x in self.leaves if x.dtype] + [x for part in self.parts for x in part.arrays]

    def dump(self) -> bytes:
        row = lambda x: [x.name, list(x.path), x.kind, list(x.shape), x.dtype, f"{x.hash:016x}",
                          x.value]  # fmt: skip
        body = {
            "format": FORMAT,
            "step": self.step,
            "links": [*self.links.items()],
            "metrics": {name: finite(value) for name, value in self.metrics.items()},
            "states": [[list(path), facts] for path, facts in self.states.items()],
            "leaves": [row(x) for x in self.leaves],
            "parts": [[part.values, [row(x) for x in part.arrays]] for part in self.parts],
        }
        return json.dumps(body, allow_nan=False, separators=(",", ":"), ensure_ascii=True).encode()

    @staticmethod
    def parse(content: bytes) -> "Manifest":
        """Raises Damaged for bytes that are no manifest, TooNew for a later format."""
        if len(content) > LIMIT:
            raise Damaged(f"manifest: {len(content)} bytes, expected at most {LIMIT}")
        _foreign.check_json(content, len(content))
        try:
            body = json.loads(content)
            check(body["format"], Size)
            if body["format"] > FORMAT:
                raise TooNew(f"format {body['format']}")
            return _parsed(body)
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            raise Damaged(f"manifest: {type(error).__name__} {str(error)[:80]}") from None


@dataclass(frozen=True)
class Restored:
    """The result of `Checkpoints.restore`: `checkpoints.restore(like).state`.

    Without a checkpoint, `step` is None and `state` is the given state. `data`, `history` and
    `callbacks` were given to `save`, or are None; `script` is a dict of the settings of `fit`, or
    None.
    """

    state: Any
    data: Any = None
    history: Any = None
    callbacks: Any = None
    step: int | None = None
    script: Any = None
    is_edited: bool = False  # whether numbers are the script's, and not the saved ones


def merged(parts: list[Manifest]) -> Manifest:
    """Merge the manifests of processes that wrote parts of the same tree: hashes add up."""
    total = lambda versions: sum(leaf.hash for leaf in versions) % MODULUS
    merged_leaves = [
        dataclasses.replace(versions[0], hash=total(versions))
        for versions in zip(*(part.leaves for part in parts), strict=True)
    ]
    all_parts = [part_of_process for part in parts for part_of_process in part.parts]
    return dataclasses.replace(parts[0], leaves=merged_leaves, parts=all_parts)


class Size(int):
    """In a schema: a number from 0 on of up to 48 bits."""


_LEAF = (str, [str], str, [Size], str, str, object)
_SCHEMA = {
    "step": Size,
    "leaves": [_LEAF],
    "states": [([str], {
        "rule": str, "trained": ([str], None), "precision": (str, None), "averages": (str, None),
        "columns": [(str, Size)], "schedules": {str: str}, "cuts": [(Size, [Size], [str])],
    })],
    "parts": [({str: object}, [_LEAF])],
    "metrics": {str: object},
}  # fmt: skip


def check(x: Any, schema: Any) -> None:
    """Raise ValueError unless the JSON value `x` has the form of `schema`.

    A schema is a type, [the schema of each item], (the schemas of both items), (a schema, None)
    for optional values, {key: schema}, {str: the schema of all values}, or Size.
    """
    pairs: Iterable[tuple[Any, Any]] = ()
    match schema, x:
        case (_, None), _:
            pairs = [] if x is None else [(x, schema[0])]
        case tuple(), list():  # JSON has no tuples
            pairs = zip(x, schema, strict=True)
        case list(), list():
            pairs = ((y, schema[0]) for y in x)
        case dict(), dict() if str in schema:
            pairs = ((y, schema[str]) for y in x.values())
        case dict(), dict():
            pairs = ((x[key], item_schema) for key, item_schema in schema.items())
        case type(), int() if schema is Size and type(x) is int and 0 <= x < 1 << 48:
            pass
        case type(), _ if schema is not Size and isinstance(x, schema):
            pass
        case _:
            raise ValueError(f"an unexpected {type(x).__name__}")
    for y, item_schema in pairs:
        check(y, item_schema)


def _leaf(x) -> Leaf:
    name, path, kind, shape, dtype, digest, value = x
    if not (leaves.is_shape(shape) and re.fullmatch(r"[0-9a-f]{16}", digest)):
        raise ValueError("no shape, or no hash")
    leaf = Leaf(tuple(path), kind, tuple(shape), dtype, value, name, int(digest, 16))
    if not dtype:
        if not isinstance(value, _PLAIN_TYPES[kind]) or (kind == "int" and isinstance(value, bool)):
            raise ValueError("a value of another type")
        leaves.plain_value(leaf)  # raises for parts of a complex number that are no numbers
    elif leaves.dtype_of(dtype) is None or not (kind == "array" or kind.startswith("key:")):
        raise ValueError("an unknown dtype")
    return leaf


def _parsed(body) -> Manifest:
    check(body, _SCHEMA)
    states = {tuple(path): facts for path, facts in body["states"]}
    for _, group_of_leaf, labels in (cut for facts in states.values() for cut in facts["cuts"]):
        if not labels or any(group >= len(labels) for group in group_of_leaf):
            raise ValueError("a cut with unknown groups")
    described = list(map(_leaf, body["leaves"]))
    parts = [Parts(values, list(map(_leaf, arrays))) for values, arrays in body["parts"]]
    arrays = [x for part in parts for x in part.arrays]
    if len({x.name for x in [*described, *arrays]}) != len(described) + len(arrays):
        raise ValueError("two leaves of one name")
    if not all(x.dtype for x in arrays):
        raise ValueError("an array without a dtype")
    metrics = {name: float(unfinite(x)) for name, x in body["metrics"].items()}
    links = body.get("links", [])  # earlier versions did not save links
    check(links, [(Size, str)])
    return Manifest(body["step"], described, states, parts, metrics, dict(links))


def encode(x: Any, keep: Callable[[tuple[Any, ...], np.ndarray], Any], *path: Any) -> Any:
    """A user's value as JSON; its arrays are given to `keep(path, array)`, which returns a number.

    Raises WrongTypeError for types that cannot be saved.
    """
    inner = lambda y, key: encode(y, keep, *path, key)
    is_shallow = len(path) <= DEPTH
    is_spread = not getattr(x, "is_fully_addressable", True) and not x.is_fully_replicated
    match x:
        case None | bool():
            return x
        # There is no tensor without torch, so it need not be imported here.
        case _ if isinstance(x, getattr(sys.modules.get("torch"), "Tensor", ())):
            # torch raises for tensors on other devices, sparse ones, and dtypes that NumPy lacks
            with contextlib.suppress(RuntimeError, TypeError):
                return {"$torch": keep(path, x.detach().numpy().copy())}
        case np.generic() if leaves.can_be_saved(x):
            return {"$numpy": [x.dtype.name, x.tobytes().hex()]}
        case str():
            return str.__str__(x)  # the `str` of a member of an Enum is its name
        case int() if abs(x) < 1 << 1024:
            return int(x)
        case float():
            return float(x) if math.isfinite(x) else {"$float": repr(x)}
        case Mapping() if is_shallow and all(isinstance(key, str) for key in x):
            encoded = {key: inner(value, key) for key, value in x.items()}
            return {"$dict": encoded} if any(key.startswith("$") for key in encoded) else encoded
        case Mapping() if is_shallow:  # JSON has no other keys than strings
            return {"$items": [inner([key, value], i) for i, (key, value) in enumerate(x.items())]}
        case list() if is_shallow:
            return [inner(value, i) for i, value in enumerate(x)]
        case tuple() if is_shallow:
            return {"$tuple": [inner(value, i) for i, value in enumerate(x)]}
        case _ if trees.is_key(x):
            data = inner(trees.on_host(x), "key")
            return {"$key": leaves.implementation(trees.dtype_of(x)), "data": data}
        case bytes() | bytearray():
            return {"$bytes": keep(path, np.array(bytearray(x), np.uint8))}
        case jax.Array() if not is_spread and leaves.can_be_saved(x):
            return {"$jax": keep(path, np.array(x, copy=True))}
        case np.ndarray() if leaves.can_be_saved(x):
            return {"$array": keep(path, np.array(x, copy=True))}
    raise WrongTypeError("value", place_text(path), trees.describe(x), _SAVED_TYPES)


def place_text(path: tuple[Any, ...]) -> str:
    return path[0] + "".join(f"[{key!r}]" for key in path[1:])


def decode(x: Any, arrays: dict[int, np.ndarray], depth: int = 0) -> Any:
    """The inverse of `encode`, with the types that were encoded.

    Each of `arrays`, by number, is used once and removed: copies of one cannot fill the memory.
    """
    inner = lambda y: decode(y, arrays, depth + 1)
    if depth > 2 * DEPTH:
        raise Damaged(f"manifest: values of more than {2 * DEPTH} levels")
    if isinstance(x, list):
        return [inner(y) for y in x]
    if not isinstance(x, dict):
        return x
    if not any(key.startswith("$") for key in x):
        return {key: inner(y) for key, y in x.items()}
    try:
        return _typed([*x.items()], arrays, inner)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise Damaged("manifest: a value that cannot be read") from error


def _typed(items: list[tuple[str, Any]], arrays: dict[int, np.ndarray], inner: Any) -> Any:
    """The value that a dict with a type describes; ValueError for an unknown type."""
    match items:
        case [("$dict", dict(values))]:
            return {key: inner(y) for key, y in values.items()}
        case [("$items", list(pairs))]:
            return dict(map(inner, pairs))
        case [("$tuple", list(values))]:
            return tuple(map(inner, values))
        case [("$float", "nan" | "inf" | "-inf" as text)]:
            return float(text)
        case [("$numpy", [str(name), str(digits)])] if dtype := leaves.dtype_of(name):
            (scalar,) = np.frombuffer(bytes.fromhex(digits), dtype)
            return scalar
        case [("$array", int(i))]:
            return arrays.pop(i)
        case [("$bytes", int(i))]:
            return arrays.pop(i).tobytes()
        case [("$torch", int(i))] if i in arrays:
            from tsunax._core.libraries import library

            return library("torch", "restore()").tensor(arrays.pop(i))
        case [("$jax", int(i))]:
            array, on_device = arrays[i], jax.numpy.asarray(arrays.pop(i))
            return on_device if on_device.dtype == array.dtype else array  # 64 bits need x64
        case [("$key", str(name)), ("data", {"$array": int(i)})]:
            return leaves.wrap_key(arrays.pop(i), name)
    raise ValueError("an unknown type")


def check_types(x: Any, y: Any, *path: Any) -> None:
    """Raise WrongTypeError for a value in `x` that comes back as another type, in `y`.

    Dicts, lists and strings of other classes come back as plain ones, which are equal to them.
    """
    if type(x) is not type(y) and not isinstance(y, dict | list | str | bytes | np.ndarray):
        raise WrongTypeError(
            "value",
            place_text(path),
            got=f"{type(x).__name__}, which comes back as {type(y).__name__}",
            expected=_SAVED_TYPES,
        )
    items = enumerate(x) if isinstance(y, list | tuple) else ()
    for key, value in x.items() if isinstance(x, Mapping) else items:
        check_types(value, y[key], *path, key)
