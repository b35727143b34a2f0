"""The manifest of a checkpoint: plain JSON, read back field by field and within bounds.

The step, every leaf by path and name with its shape, dtype and hash, the types of all containers,
facts of the training states in it (`state_facts`), and the plain values of data, history and
callbacks. Nothing in it is code, and no file is opened here.
"""

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any

from tsunax.checkpoints import _foreign, leaves
from tsunax.checkpoints.checksums import MODULUS
from tsunax.checkpoints.leaves import Damaged, Keys, Leaf, TooNew, finite, unfinite

__all__ = []

FORMAT = 1
LIMIT = 28 << 20  # bytes of a manifest, because parsing a long string takes three times as much
_PLAIN_TYPES = {"bool": bool, "int": int, "float": (float, list), "str": str, "complex": list}


@dataclass(frozen=True)
class Parts:
    """Data, history and callbacks of a process, see `_user_values`, and the arrays in them."""

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
            if type(body["format"]) is not int:
                raise ValueError("no format")
            if body["format"] > FORMAT:
                raise TooNew(f"format {body['format']}")
            return _parsed(body)
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            raise Damaged(f"manifest: {type(error).__name__} {str(error)[:80]}") from None


def merged(parts: list[Manifest]) -> Manifest:
    """Merge the manifests of processes that wrote parts of the same tree: hashes add up."""
    merged_leaves = []
    for versions in zip(*(part.leaves for part in parts), strict=True):
        merged_leaves.append(
            dataclasses.replace(versions[0], hash=sum(leaf.hash for leaf in versions) % MODULUS)
        )
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
    if isinstance(schema, tuple) and schema[1] is None:
        return None if x is None else check(x, schema[0])
    if schema is Size:
        if type(x) is not int or not 0 <= x < 1 << 48:
            raise ValueError("a size out of range")
        return
    # JSON has no tuples
    expected_type = {tuple: list, list: list, dict: dict}.get(type(schema), schema)
    if not isinstance(x, expected_type):
        raise ValueError(f"{type(x).__name__} where {expected_type.__name__} belongs")
    pairs: Any = ()
    if isinstance(schema, list):
        pairs = ((y, schema[0]) for y in x)
    elif isinstance(schema, tuple):
        pairs = zip(x, schema, strict=True)
    elif isinstance(schema, dict) and str in schema:
        pairs = ((y, schema[str]) for y in x.values())
    elif isinstance(schema, dict):
        pairs = ((x[key], item_schema) for key, item_schema in schema.items())
    for y, item_schema in pairs:
        check(y, item_schema)


def _leaf(x) -> Leaf:
    name, path, kind, shape, dtype, digest, value = x
    if not leaves.is_shape(shape):
        raise ValueError("no shape")
    if not re.fullmatch(r"[0-9a-f]{16}", digest):
        raise ValueError("a leaf without a hash")
    leaf = Leaf(tuple(path), kind, tuple(shape), dtype, value, name, int(digest, 16))
    if not dtype:
        if not isinstance(value, _PLAIN_TYPES[kind]) or (kind == "int" and isinstance(value, bool)):
            raise ValueError("a value of another type")
        leaves.plain_value(leaf)
    elif leaves.dtype_of(dtype) is None or not (kind == "array" or kind.startswith("key:")):
        raise ValueError("an unknown dtype")
    return leaf


def _parts(values, arrays) -> Parts:
    described = list(map(_leaf, arrays))
    if not all(leaf.dtype for leaf in described):
        raise ValueError("an array without a dtype")
    return Parts(values, described)


def _parsed(body) -> Manifest:
    check(body, _SCHEMA)
    states = {tuple(path): facts for path, facts in body["states"]}
    for _, group_of_leaf, labels in (cut for facts in states.values() for cut in facts["cuts"]):
        if not labels or any(group >= len(labels) for group in group_of_leaf):
            raise ValueError("a cut with unknown groups")
    described, parts = list(map(_leaf, body["leaves"])), [_parts(*part) for part in body["parts"]]
    names = [x.name for x in [*described, *(y for part in parts for y in part.arrays)]]
    if len(set(names)) != len(names):
        raise ValueError("two leaves of one name")
    metrics = {name: float(unfinite(x)) for name, x in body["metrics"].items()}
    return Manifest(body["step"], described, states, parts, metrics)
