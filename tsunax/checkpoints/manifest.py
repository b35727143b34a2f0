"""What a checkpoint says of itself: plain JSON, read back field by field and within bounds.

The step, every leaf by path and name with its shape, dtype and hash, the types of all containers,
facts of the training states in it (`live_numbers`), and the plain values of data, history and
callbacks. Nothing in it is code, and no file is opened here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any

from tsunax.checkpoints import _values, leaves
from tsunax.checkpoints.checksums import MODULUS
from tsunax.checkpoints.leaves import Damaged, Keys, Leaf, TooNew, finite, unfinite

__all__ = []

FORMAT = 1
LIMIT = 28 << 20  # bytes of a manifest: to parse one long string takes three times as much
_PIECES = 1_000_000  # brackets and commas in it: they bound the memory of parsing, to 100 MB
_KINDS = {"bool": bool, "int": int, "float": (float, list), "str": str, "complex": list}


@dataclass(frozen=True)
class Parts:
    """Data, history and callbacks of one process, see `_values`, and the arrays in them."""

    values: dict[str, Any]
    arrays: list[Leaf]


@dataclass(frozen=True)
class Manifest:
    """What is known of a checkpoint without reading its arrays."""

    step: int
    leaves: list[Leaf]
    nodes: dict[Keys, str]
    states: dict[Keys, dict[str, Any]]
    parts: list[Parts] = dataclasses.field(default_factory=list)  # of each process that wrote;
    # after the first one, what differs from the first one's
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    fingerprint: dict[str, Any] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    not_finite: str = ""  # the first trained leaf with a NaN or an infinity in it

    def with_hashes(self, hashes: dict[str, int]) -> Manifest:
        """With these hashes of arrays by name; they are parts of the whole over several processes."""
        hashed = lambda found: [
            dataclasses.replace(x, hash=hashes.get(x.name, 0)) if x.dtype else x for x in found
        ]
        parts = [Parts(part.values, hashed(part.arrays)) for part in self.parts]
        return dataclasses.replace(self, leaves=hashed(self.leaves), parts=parts)

    def arrays(self) -> list[Leaf]:
        """All leaves that are arrays, those of the parts too."""
        return [
            x for x in [*self.leaves, *(y for part in self.parts for y in part.arrays)] if x.dtype
        ]

    def dump(self) -> bytes:
        leaf = lambda x: [x.name, list(x.path), x.kind, list(x.shape), x.dtype, f"{x.hash:016x}",
                          x.value]  # fmt: skip
        body = {
            "format": FORMAT,
            "step": self.step,
            "versions": self.versions,
            "fingerprint": self.fingerprint,
            "metrics": {name: finite(value) for name, value in self.metrics.items()},
            "states": [[list(path), facts] for path, facts in self.states.items()],
            "nodes": [[list(path), kind] for path, kind in self.nodes.items()],
            "leaves": [leaf(x) for x in self.leaves],
            "parts": [[part.values, [leaf(x) for x in part.arrays]] for part in self.parts],
            "not_finite": self.not_finite,
        }
        return json.dumps(body, allow_nan=False, separators=(",", ":"), ensure_ascii=True).encode()

    @staticmethod
    def parse(content: bytes) -> Manifest:
        """Raises Damaged for anything that is no manifest, TooNew for one of a later format."""
        check_pieces(content)
        if len(content) > LIMIT or not content.isascii():  # others take four bytes a character
            raise Damaged(f"manifest: {len(content)} bytes, expected at most {LIMIT}, all ASCII")
        try:
            body = json.loads(content)
            if isinstance(body, dict) and type(body.get("format")) is int:
                if body["format"] > FORMAT:
                    raise TooNew(f"format {body['format']}")
                return _parsed(body)
            raise ValueError("no format")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Damaged(f"manifest: {type(error).__name__} {str(error)[:80]}") from None
        except OverflowError as error:
            raise Damaged(f"manifest: {str(error)[:80]}") from None


def merged(parts: list[Manifest]) -> Manifest:
    """One manifest of what several processes have written of one tree: hashes add up."""
    found = []
    for same in zip(*(part.leaves for part in parts), strict=True):
        whole = sum(leaf.hash for leaf in same) % MODULUS
        found.append(dataclasses.replace(same[0], hash=whole))
    own = [one for part in parts for one in part.parts]
    odd = next((part.not_finite for part in parts if part.not_finite), "")
    return dataclasses.replace(parts[0], leaves=found, parts=own, not_finite=odd)


def check_pieces(content: bytes) -> None:
    """Raise Damaged for JSON whose parsing would take far more memory than its own bytes."""
    pieces = (b"[", b"{", b"{", b",")  # a dict takes as much as three lists
    if sum(map(content.count, pieces)) > _PIECES:
        raise Damaged(f"manifest: more than {_PIECES} entries")


# ------------------------------------------------------------------------------------------- parsing


def _is(x, kind: type | tuple):
    if not isinstance(x, kind) or (isinstance(x, bool) and kind is int):
        raise ValueError(f"{type(x).__name__} where {getattr(kind, '__name__', kind)} belongs")
    return x


def is_size(x) -> int:
    if not 0 <= _is(x, int) < 1 << 48:
        raise ValueError("a size out of range")
    return x


def list_of(x, kind) -> list:
    return [_is(y, kind) for y in _is(x, list)]


def _path(x) -> Keys:
    return tuple(list_of(x, str))


def _leaf(x) -> Leaf:
    name, path, kind, shape, dtype, digest, value = _is(x, list)
    shape = tuple(_is(shape, list))
    if not leaves.is_shape(shape):
        raise ValueError("no shape")
    if not re.fullmatch(r"[0-9a-f]{16}", _is(digest, str)):
        raise ValueError("a leaf without a hash")
    leaf = Leaf(_path(path), _is(kind, str), shape, _is(dtype, str), value, _is(name, str),
                int(digest, 16))  # fmt: skip
    if not dtype:
        _is(value, _KINDS[kind])
        leaves.plain_value(leaf)
    elif leaves.dtype_of(dtype) is None or not (kind == "array" or kind.startswith("key:")):
        raise ValueError("an unknown dtype")
    return leaf


def _facts(x) -> dict[str, Any]:
    text = lambda y: None if y is None else _is(y, str)
    return {
        "rule": _is(x["rule"], str),
        "trained": None if x["trained"] is None else list_of(x["trained"], str),
        "precision": text(x["precision"]),
        "average": text(x["average"]),
        "columns": [[_is(name, str), is_size(j)] for name, j in _is(x["columns"], list)],
        "schedules": {_is(k, str): _is(v, str) for k, v in _is(x["schedules"], dict).items()},
        "cuts": [_cut(cut) for cut in _is(x["cuts"], list)],
    }


def _cut(x) -> list:
    at, of, labels = _is(x, list)
    of, labels = [is_size(g) for g in _is(of, list)], list_of(labels, str)
    if not labels or any(g >= len(labels) for g in of):
        raise ValueError("a cut with unknown groups")
    return [is_size(at), of, labels]


def _parts(x) -> Parts:
    values, arrays = _is(x, list)
    _values.check_depth(_is(values, dict))
    arrays = [_leaf(x) for x in _is(arrays, list)]
    if not all(leaf.dtype for leaf in arrays):
        raise ValueError("an array without a dtype")
    return Parts(values, arrays)


def _parsed(body) -> Manifest:
    found = [_leaf(x) for x in _is(body["leaves"], list)]
    parts = [_parts(x) for x in _is(body["parts"], list)]
    names = [x.name for x in [*found, *(y for part in parts for y in part.arrays)]]
    if len(set(names)) != len(names):
        raise ValueError("two leaves of one name")
    return Manifest(
        step=is_size(body["step"]),
        leaves=found,
        nodes={_path(path): _is(kind, str) for path, kind in _is(body["nodes"], list)},
        states={_path(path): _facts(facts) for path, facts in _is(body["states"], list)},
        parts=parts,
        metrics={_is(k, str): float(unfinite(v)) for k, v in _is(body["metrics"], dict).items()},
        fingerprint=_is(body["fingerprint"], dict),
        versions={_is(k, str): _is(v, str) for k, v in _is(body["versions"], dict).items()},
        not_finite=_is(body["not_finite"], str),
    )
