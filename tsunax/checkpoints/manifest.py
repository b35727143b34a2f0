"""What a checkpoint says of itself, and whether that fits what a script expects.

A manifest is plain JSON: the step, every leaf by its key path with shape, dtype and a sha256 for
each shard, the types of all containers, the rule, the names of the live numbers, the groups that
`adjust` cut, and the plain values of data, history and callbacks. What is read is checked field by
field and bounded; nothing in it is code. No file is opened here.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np

from tsunax._core import placement, trees
from tsunax.errors import WrongTypeError, message
from tsunax.rules import cuts as _cuts
from tsunax.rules import live_rules
from tsunax.state import TrainState

__all__ = []

FORMAT = 2  # 1 had all arrays in one directory of orbax's, and the values of one process
LIMIT = 28 << 20  # bytes of a manifest: to parse one long string takes three times as much
_PIECES = (
    1_000_000  # brackets and commas in it: what bounds the memory that parsing takes, to 100 MB
)
DEPTH = 64
_PLAIN = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
    "complex128"
)

Path = tuple[str, ...]


class Damaged(Exception):
    """A checkpoint that must not be used; the text says why."""


class NotFinite(Damaged):
    """A checkpoint of a state that cannot be trained on, every byte as it was saved."""


class TooNew(Exception):
    """A manifest of a format that this version does not know."""


# ------------------------------------------------------------------------------------------- leaves


@dataclass(frozen=True)
class Shard:
    """A stored array: (start, stop) of each axis, the sha256 of its bytes, "file/number" where it
    is stored.
    """

    bounds: tuple[tuple[int, int], ...]
    sha256: str
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.bounds)


@dataclass(frozen=True)
class Leaf:
    """One leaf of a saved tree: an array in shards, or a plain Python value."""

    path: Path
    kind: str  # "array", "key:<implementation>", or the type of a plain value
    shape: tuple[int, ...] = ()
    dtype: str = ""
    shards: tuple[Shard, ...] = ()
    value: Any = None

    def __str__(self) -> str:
        if self.dtype:
            return f"{self.kind if self.kind.startswith('key') else self.dtype}[{','.join(map(str, self.shape))}]"
        return f"{self.kind} {self.value!r:.40}" if self.value is not None else self.kind


def dtype_name(x) -> str | None:
    """The name of an array's dtype, if it can be saved; None for object, str, dates, records, and
    under a mask.
    """
    name = np.dtype(x.dtype).name
    return name if dtype_of(name) == x.dtype and not isinstance(x, np.ma.MaskedArray) else None


def dtype_of(name: str) -> np.dtype | None:
    if name in _PLAIN.split():
        return np.dtype(name)
    if re.fullmatch(r"bfloat16|float[4-8]_\w{1,16}|u?int[124]", name, re.ASCII) and hasattr(
        ml_dtypes, name
    ):
        return np.dtype(getattr(ml_dtypes, name))
    return None


def implementation(dtype) -> str:
    """The name of the generator of a key dtype: "fry"."""
    return re.sub(r"[^\w]", "", str(dtype).removeprefix("key"))[:40]


@functools.cache  # `eval_shape` keeps a kilobyte of each call for ever
def key_shape(shape: tuple[int, ...], dtype) -> tuple[int, ...]:
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype)).shape


def leaf_of(path: Path, x, root: str = "state") -> Leaf:
    """What is expected of a leaf, or said of one that is saved: without its shards.

    WrongTypeError for other things.
    """
    if trees.is_key(x):
        return Leaf(path, f"key:{implementation(x.dtype)}", key_shape(x.shape, x.dtype), "uint32")
    if isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        name = dtype_name(x)
        if name is not None:
            return Leaf(path, "array", tuple(x.shape), name)
    elif isinstance(x, (bool, int, float, complex, str)) and type(x).__module__ == "builtins":
        value = [x.real, x.imag] if isinstance(x, complex) else x
        return Leaf(path, type(x).__name__, value=_finite(value))
    where, fix = show(root, path), "Leave it out of what is saved."
    raise WrongTypeError(
        message("leaf", where, trees.describe(x), "an array, a number or a string", fix)
    )


def plain_value(leaf: Leaf):
    """The Python value of a leaf that is no array."""
    return complex(*map(_unfinite, leaf.value)) if leaf.kind == "complex" else _unfinite(leaf.value)


def _finite(x) -> Any:
    """JSON has no NaN: floats that are not finite become strings in a list."""
    if isinstance(x, list):
        return [_finite(v) for v in x]
    return [repr(x)] if isinstance(x, float) and not math.isfinite(x) else x


def _unfinite(x) -> Any:
    return (
        float(x[0]) if isinstance(x, list) and len(x) == 1 and x[0] in ("nan", "inf", "-inf") else x
    )


# -------------------------------------------------------------------------------------------- trees


def entry_name(entry) -> str:
    """A key entry in one string that tells a list's 0 from a dict's."""
    if isinstance(entry, jtu.DictKey) and not isinstance(entry.key, str):
        return f"{{{entry.key!r}}}"
    return str(entry)


def show(root: str, path: Path) -> str:
    return root + "".join(path)


@dataclass(frozen=True)
class Tree:
    """A tree as paths: leaves in flatten order, the type of each container, and the training states
    in it.
    """

    leaves: list[tuple[Path, Any]]
    nodes: dict[Path, str]
    states: dict[Path, TrainState]


def tree_of(tree) -> Tree:
    out = Tree([], {}, {})
    _walk(tree, (), False, out)
    return out


def _walk(x, path: Path, in_box: bool, out: Tree) -> None:
    children = trees._children(x)
    if not children and x is not None and jtu.all_leaves([x]):
        out.leaves.append((path, x))
        return
    box = trees._is_box(x)  # the wrappers of flax come and go between its versions
    if not box and not in_box:
        out.nodes[path] = type(x).__name__
    if isinstance(x, TrainState):
        out.states[path] = x
    for key, child in children:
        inner = (
            path
            if box and trees.key_name(key[0]) == "value"
            else path + tuple(map(entry_name, key))
        )
        _walk(child, inner, box, out)


# -------------------------------------------------------------------------------------------- rules


def rule_text(x, depth: int = 0, seen: frozenset = frozenset(), numbers: bool = False) -> str:
    """What a rule is made of, without its numbers: names of functions, flags, strings. No two
    processes differ.

    With `numbers`, those that are not live are in it too.

    >>> import tsunax as ts
    >>> rule_text(ts.rules.sgd(0.1).update)
    'sgd(learning_rate, accumulator_dtype=None, momentum=None, nesterov=False)'
    """
    inner = lambda y: rule_text(y, depth + 1, seen | {id(x)}, numbers)
    if depth > 14 or id(x) in seen:
        return "…"
    if isinstance(x, (bool, str, type(None))):
        return repr(x)
    if isinstance(x, (int, float, complex)) or trees.dtype_of(x) is not None:
        return repr(x) if numbers and isinstance(x, (int, float, complex)) else "#"
    if isinstance(x, live_rules.Live):
        flags = (f"{k}={inner(v)}" for k, v in sorted(x.statics.items()))
        return f"{x.title}({', '.join([*x.names, *flags])})"
    if isinstance(x, live_rules.LiveUpdate):
        return inner(x.live)
    if isinstance(x, (np.dtype, type)):
        return getattr(x, "__name__", str(x))
    if dataclasses.is_dataclass(x):
        return f"{type(x).__name__}({', '.join(inner(getattr(x, f.name)) for f in dataclasses.fields(x))})"
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{k}: {inner(v)}' for k, v in x.items())}}}"
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(inner, x))})"
    name = getattr(x, "__qualname__", type(x).__name__).split(".<locals>")[0]
    cells = (
        [inner(vars(x.__self__))] if inspect.ismethod(x) and hasattr(x.__self__, "__dict__") else []
    )
    for cell in getattr(x, "__closure__", None) or ():
        try:
            cells.append(inner(cell.cell_contents))
        except ValueError:  # not filled yet
            continue
    cells = [cell for cell in cells if cell not in ("#", "None")]
    return f"{name}({', '.join(cells)})" if cells else name


def _short(text: str) -> str:
    return (
        text
        if len(text) <= 600
        else f"{text[:560]}… {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    )


def _schedule_text(schedule) -> str:
    if schedule is None:
        return ""
    kinds = [
        getattr(leaf, "__qualname__", type(leaf).__name__)
        for leaf in schedule.leaves
        if leaf is not None
    ]
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", f"{schedule.treedef} {kinds}")
    return _short(text)


def state_facts(state: TrainState) -> dict[str, Any]:
    """What a checkpoint says of a training state beside its leaves."""
    plan, numbers, average = state.plan, state.numbers, state.average
    named = ["/".join(name) for name, _, _ in trees.leaves_with_names(state.params)]
    facts: dict[str, Any] = {
        "rule": _short(rule_text(plan.update)),
        "trained": None
        if plan.selected is None
        else [n for n, on in zip(named, plan.selected, strict=True) if on],
        "precision": None if plan.precision is None else rule_text(plan.precision),
        "average": None if average is None else "uniform" if average.uniform else "exponential",
        "columns": [],
        "schedules": {},
        "cuts": [],
    }
    if numbers is not None:
        facts["columns"] = [list(column) for column in numbers.column_names()]
        for at, s, group, _ in numbers.columns():
            pairs = zip(numbers.layout.names[at][group], s.live.schedules, strict=True)
            facts["schedules"] |= {
                name: _schedule_text(schedule) for name, schedule in pairs if schedule
            }
        lives = [s for _, s in numbers.layout.lives]
        facts["cuts"] = [
            [at, list(s.cut.of), list(s.cut.labels)] for at, s in enumerate(lives) if s.cut
        ]
    return facts


def laid_out(state: TrainState, facts: Mapping[str, Any], frozen: bool) -> TrainState:
    """`state`, from `setup`, with the structure of the saved one: its cuts, room for frozen
    flags.
    """
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state)):
        return jax.eval_shape(lambda s: _laid_out(s, facts, frozen), state)
    return _laid_out(state, facts, frozen)


def _laid_out(state: TrainState, facts: Mapping[str, Any], frozen: bool) -> TrainState:
    trained = state.params
    if state.plan.selected is not None:
        trained = trees.partition(state.params, state.plan.selected)[0]
    opt_state, numbers = state.opt_state, state.numbers
    if numbers is not None:
        lives, cuts = numbers.layout.lives, {}
        for at, of, labels in facts["cuts"]:
            s = lives[at][1] if at < len(lives) else None
            if s is None or s.cut is not None or len(of) != len(s.paths):
                # another rule, or a script that cuts before it restores: the comparison tells
                continue
            cuts[at] = _cuts.Cut(tuple(of), tuple(labels)), (0,) * len(labels)
        if cuts:
            opt_state, numbers = _cuts.recut(opt_state, numbers, trained, cuts)
            assert numbers is not None and state.numbers is not None
            old = state.numbers.values
            if isinstance(old, jax.Array) and not trees.is_traced(old):  # a cut is made on the host
                home = old.sharding if old.committed else None
                numbers = dataclasses.replace(
                    numbers, values=placement.whole(np.asarray(numbers.values), home)
                )  # type: ignore[union-attr, type-var]
    words = state.frozen
    if frozen and words is None:
        members, n = jnp.shape(state.clock)[:-1], len(jax.tree.leaves(trained))
        words = jnp.zeros((*members, -(-n // 32)), jnp.uint32)
        if not trees.is_traced(state.clock) and state.clock.committed:
            words = placement.whole(words, state.clock.sharding)
    return dataclasses.replace(state, opt_state=opt_state, numbers=numbers, frozen=words)


def given_of(state: TrainState) -> dict[str, Any]:
    """The numbers that a script gives with a state: its rule's, its average's rate, its loss
    scale.
    """
    numbers, plain = state.numbers, lambda x: np.asarray(x).tolist()
    if numbers is not None and np.size(numbers.values) > 20_000:  # a manifest is bounded
        numbers = None
    return {
        "columns": [] if numbers is None else [list(column) for column in numbers.column_names()],
        "values": [] if numbers is None else plain(numbers.values),
        "rate": None if state.average is None else plain(state.average.rate),
        "scale": None if state.loss_scale is None else plain(state.loss_scale.scale),
    }


def given_in(manifest: Manifest) -> dict[Path, dict[str, Any]]:
    """What `given_of` told of each state at the start of the run; empty if nobody saved it."""
    try:
        found: Any = decode(manifest.parts[0].values["script"], [])
        out = {}
        for path, x in zip(manifest.states, found["states"], strict=True):
            columns = [(_is(name, str), _size(j)) for name, j in _is(x["columns"], list)]
            values = np.asarray(x["values"], np.float32)
            if columns and values.shape[-1] != len(columns):
                raise ValueError("numbers that are no table of their names")
            number = lambda y: None if y is None else np.asarray(y, np.float32)
            rate, scale = number(x["rate"]), number(x["scale"])
            out[path] = {"columns": columns, "values": values, "rate": rate, "scale": scale}
        return out
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return {}


def merged_numbers(
    saved: np.ndarray,
    saved_facts,
    mine: np.ndarray,
    my_facts,
    given: Mapping[str, Any] | None = None,
) -> tuple[np.ndarray, list[str]]:
    """The live numbers of a restored state, (..., 4, n), and what was edited in the script since.

    A number goes on with its live value if the script gives it as it did: the same at `setup`, and
    the same when it was given to `fit`, if `given` is known. One that was edited is the script's.
    """
    if saved.shape != (*mine.shape[:-1], len(saved_facts["columns"])) or saved.dtype != mine.dtype:
        raise Damaged("manifest: live numbers that are no table of its names")
    places: dict[str, list[int]] = {}
    for i, (name, _) in enumerate(saved_facts["columns"]):
        places.setdefault(name, []).append(i)
    own: dict[str, list[int]] = {}
    for i, (name, _) in enumerate(my_facts["columns"]):
        own.setdefault(name, []).append(i)
    out, edited = np.array(mine), []
    for name, here in own.items():
        there = places.get(name, [])
        schedules = saved_facts["schedules"].get(name, ""), my_facts["schedules"].get(name, "")
        if schedules[0] != schedules[1] or len(there) != len(here):
            say = lambda text: f"the schedule {_factory_of(text)}" if text else "a number"
            edited.append(f"{name}: {say(schedules[0])} then, {say(schedules[1])} now")
            continue
        pairs = [(saved[..., 3, there], mine[..., 3, here])]
        if given is not None and given["values"].shape[:-1] == mine.shape[:-1]:
            at = [i for i, (known, _) in enumerate(given["columns"]) if known == name]
            table = given["values"][..., at]
            pairs += [(table[..., i, :], mine[..., i, here]) for i in range(3) if at]
        if (edit := next((pair for pair in pairs if not np.array_equal(*pair)), None)) is None:
            out[..., here] = saved[..., there]
        else:
            edited.append(f"{_edited_name(name, schedules[1], *edit)}: {then_and_now(*edit)}")
    return out, edited


def _factory_of(text: str) -> str:
    """The function that made a schedule, from `_schedule_text`."""
    found = re.search(r"<function ([\w.]+)|\['([\w.<>]+)'\]$", text)
    return (found[1] or found[2]).removesuffix(".<locals>.schedule") if found else "of another kind"


def _edited_name(name: str, schedule: str, then: np.ndarray, now: np.ndarray) -> str:
    """The name of an edited number, or the first argument of its schedule that was edited."""
    labels = re.findall(r"'(\w+)': \*", schedule)
    if then.shape != now.shape or now.shape[-1] != 1 + len(labels) or not labels:
        return name
    differ = np.flatnonzero(np.any(np.reshape(then != now, (-1, now.shape[-1])), 0))
    return name if differ[0] == 0 else f"{labels[differ[0] - 1]} of {name}"


def then_and_now(then, now) -> str:
    """The first three numbers that differ, on both sides."""
    then, now = np.ravel(then), np.ravel(now)
    differ = then != now if then.shape == now.shape else slice(None)
    a, b = (", ".join(f"{v:.6g}" for v in x[differ][:3]) for x in (then, now))
    return f"{a} then, {b} now"


# ----------------------------------------------------------------------------- plain values, arrays


def encode(x: Any, keep: Callable[[np.ndarray], Any], where: str, depth: int = 0) -> Any:
    """A value as JSON; arrays are given to `keep`, which returns their number."""
    inner = lambda y, at: encode(y, keep, f"{where}[{at!r}]", depth + 1)
    if depth > DEPTH:
        raise WrongTypeError(message("value", where, f"more than {DEPTH} levels", "fewer"))
    if x is None or isinstance(x, bool):
        return x
    if isinstance(x, str):
        return str(x)
    if isinstance(x, int) and abs(x) < 1 << 1024:
        return int(x)
    if isinstance(x, float):
        return {"$float": repr(x)} if not math.isfinite(x) else float(x)
    if isinstance(x, Mapping):
        if not all(isinstance(key, str) for key in x):
            raise WrongTypeError(message("dict", where, trees.describe(x), "keys that are strings"))
        found = {key: inner(value, key) for key, value in x.items()}
        return {"$dict": found} if any(key.startswith("$") for key in found) else found
    if isinstance(x, (list, tuple)):
        found = [inner(value, i) for i, value in enumerate(x)]
        return found if isinstance(x, list) else {"$tuple": found}
    if trees.is_key(x):
        return {
            "$key": implementation(trees.dtype_of(x)),
            "data": inner(np.asarray(jax.random.key_data(x)), "key"),
        }
    is_here = getattr(x, "is_fully_addressable", True) or getattr(x, "is_fully_replicated", True)
    if trees.is_array(x) and dtype_name(x) is not None and is_here:
        return {"$array": keep(np.array(x, copy=True))}
    expected = "None, numbers, strings, arrays, and lists, tuples and dicts of them"
    raise WrongTypeError(message("value", where, trees.describe(x), expected))


def decode(x, arrays: list[np.ndarray], depth: int = 0):
    """The inverse of `encode`; arrays come back as NumPy's."""
    inner = lambda y: decode(y, arrays, depth + 1)
    if depth > 2 * DEPTH:
        raise Damaged(f"manifest: values of more than {2 * DEPTH} levels")
    if isinstance(x, list):
        return [inner(y) for y in x]
    if not isinstance(x, dict):
        return x
    match x:
        case {"$dict": dict(found)} if len(x) == 1:
            return {key: inner(y) for key, y in found.items()}
        case {"$tuple": list(found)} if len(x) == 1:
            return tuple(inner(y) for y in found)
        case {"$float": "nan" | "inf" | "-inf"} if len(x) == 1:
            return float(x["$float"])
        case {"$array": int(i)} if len(x) == 1 and 0 <= i < len(arrays):
            return arrays[i]
        case {"$key": str(name), "data": {"$array": int(i)}} if 0 <= i < len(arrays):
            return wrap_key(arrays[i], name)
    if any(key.startswith("$") for key in x):
        raise Damaged("manifest: a value that cannot be read")
    return {key: inner(y) for key, y in x.items()}


def wrap_key(data, name: str):
    """Key data as typed keys of the generator with this name."""
    if name not in _generators():
        raise Damaged(f"a key of the generator {name!r}, which is not known here")
    return jax.random.wrap_key_data(data, impl=_generators()[name])


@functools.cache
def _generators() -> dict[str, str]:
    key = lambda known: jax.eval_shape(lambda: jax.random.key(0, impl=known))
    return {
        implementation(key(known).dtype): known for known in ("threefry2x32", "rbg", "unsafe_rbg")
    }


# ------------------------------------------------------------------------------------- the manifest


@dataclass(frozen=True)
class Parts:
    """Data, history and callbacks of one process: see `encode`; `arrays` are those of them."""

    values: dict[str, Any]
    arrays: list[Leaf]


@dataclass(frozen=True)
class Manifest:
    """What is known of a checkpoint without reading its arrays."""

    step: int
    leaves: list[Leaf]
    nodes: dict[Path, str]
    states: dict[Path, dict[str, Any]]
    parts: list[Parts]  # of each process; after the first, what differs from the first one's
    metrics: dict[str, float]
    fingerprint: dict[str, Any]
    versions: dict[str, str]
    files: dict[
        str, tuple[int, str]
    ]  # those that hold the arrays: size, and sha256 of the small ones
    not_finite: str = ""  # the first trained leaf with a NaN or an infinity in it

    def of_arrays(self) -> list[Leaf]:
        """All leaves that have arrays, those of the parts too."""
        leaves = [*self.leaves, *(x for part in self.parts for x in part.arrays)]
        return [leaf for leaf in leaves if leaf.shards]

    def dump(self) -> bytes:
        leaf = lambda x: [
            list(x.path),
            x.kind,
            list(x.shape),
            x.dtype,
            [shard(s) for s in x.shards],
            x.value,
        ]
        shard = lambda s: [[list(b) for b in s.bounds], s.sha256, s.name]
        body = {
            "format": FORMAT,
            "step": self.step,
            "versions": self.versions,
            "fingerprint": self.fingerprint,
            "metrics": {name: _finite(value) for name, value in self.metrics.items()},
            "states": [[list(path), facts] for path, facts in self.states.items()],
            "nodes": [[list(path), kind] for path, kind in self.nodes.items()],
            "leaves": [leaf(x) for x in self.leaves],
            "parts": [[part.values, [leaf(x) for x in part.arrays]] for part in self.parts],
            "files": self.files,
            "not_finite": self.not_finite,
        }
        return json.dumps(body, allow_nan=False, separators=(",", ":"), ensure_ascii=True).encode()

    @staticmethod
    def parse(content: bytes, whole: bool = True) -> Manifest:
        """Raises Damaged for anything that is no manifest, TooNew for one of a later format.

        Unless it is of the `whole`, leaves may lack shards: those that other processes have.
        """
        check_pieces(content)
        if (
            len(content) > LIMIT or not content.isascii()
        ):  # others take four bytes for each character
            raise Damaged(f"manifest: {len(content)} bytes, expected at most {LIMIT}, all ASCII")
        try:
            body = json.loads(content)
            if (
                isinstance(body, dict)
                and type(body.get("format")) is int
                and body["format"] > FORMAT
            ):
                raise TooNew(f"format {body['format']}")
            return _parsed(body, whole)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
            OverflowError,
        ) as error:
            raise Damaged(f"manifest: {type(error).__name__} {str(error)[:80]}") from None


def merged(parts: list[Manifest]) -> Manifest:
    """One manifest of what several processes have of the shards of one tree."""
    leaves = []
    for same in zip(*(part.leaves for part in parts), strict=True):
        leaves.append(
            dataclasses.replace(same[0], shards=tuple(s for leaf in same for s in leaf.shards))
        )
    files = {name: facts for part in parts for name, facts in part.files.items()}
    own = [one for part in parts for one in part.parts]
    odd = next((part.not_finite for part in parts if part.not_finite), "")
    return dataclasses.replace(parts[0], leaves=leaves, parts=own, files=files, not_finite=odd)


def check_pieces(content: bytes) -> None:
    """Raise Damaged for JSON whose parsing would take far more memory than its own bytes."""
    if (
        sum(map(content.count, (b"[", b"{", b"{", b","))) > _PIECES
    ):  # a dict takes as much as three lists
        raise Damaged(f"manifest: more than {_PIECES} entries")


def _is(x, kind: type | tuple):
    if not isinstance(x, kind) or (isinstance(x, bool) and kind is int):
        raise ValueError(f"{type(x).__name__} where {getattr(kind, '__name__', kind)} belongs")
    return x


def _path(x) -> Path:
    return tuple(_is(part, str) for part in _is(x, list))


def _size(x) -> int:
    if not 0 <= _is(x, int) < 1 << 48:
        raise ValueError("a size out of range")
    return x


def is_shape(shape) -> bool:
    """Whether NumPy can have an array of this shape: also one without elements has a size without
    them.
    """
    sizes = all(type(n) is int and 0 <= n < 1 << 48 for n in shape)
    return sizes and len(shape) <= 64 and math.prod(n for n in shape if n) < 1 << 48


def _leaf(x, whole: bool = True) -> Leaf:
    path, kind, shape, dtype, shards, value = _is(x, list)
    shape = tuple(_is(shape, list))
    if not is_shape(shape):
        raise ValueError("no shape")
    leaf = Leaf(
        _path(path),
        _is(kind, str),
        shape,
        _is(dtype, str),
        tuple(map(_shard, _is(shards, list))),
        value,
    )
    if not dtype:
        kinds = {"bool": bool, "int": int, "float": (float, list), "str": str, "complex": list}
        _is(value, kinds[kind])
        plain_value(leaf)
        return leaf
    if dtype_of(dtype) is None or not (kind == "array" or kind.startswith("key:")):
        raise ValueError("an unknown dtype")
    total = 0
    for s in leaf.shards:
        if len(s.bounds) != len(shape) or any(
            not a <= b <= n for (a, b), n in zip(s.bounds, shape, strict=True)
        ):
            raise ValueError("a shard outside of its array")
        total += math.prod(s.shape)
    if whole and total != math.prod(shape):
        raise ValueError("shards that do not make up their array")
    return leaf


def _shard(x) -> Shard:
    bounds, digest, name = _is(x, list)
    bounds = tuple((_size(a), _size(b)) for a, b in _is(bounds, list))
    is_name = re.fullmatch(r"([0-9]{1,9}/)?[0-9]{1,9}", _is(name, str))
    if not re.fullmatch(r"[0-9a-f]{64}", _is(digest, str)) or not is_name:
        raise ValueError("a shard without a hash or a name")
    return Shard(bounds, digest, name)


def _facts(x) -> dict[str, Any]:
    text = lambda y: None if y is None else _is(y, str)
    trained = (
        x["trained"]
        if x["trained"] is None
        else [_is(name, str) for name in _is(x["trained"], list)]
    )
    return {
        "rule": _is(x["rule"], str),
        "trained": trained,
        "precision": text(x["precision"]),
        "average": text(x["average"]),
        "columns": [[_is(name, str), _size(j)] for name, j in _is(x["columns"], list)],
        "schedules": {_is(k, str): _is(v, str) for k, v in _is(x["schedules"], dict).items()},
        "cuts": [_cut(cut) for cut in _is(x["cuts"], list)],
    }


def _cut(x) -> list:
    at, of, labels = _is(x, list)
    of, labels = [_size(g) for g in _is(of, list)], [_is(label, str) for label in _is(labels, list)]
    if not labels or any(g >= len(labels) for g in of):
        raise ValueError("a cut with unknown groups")
    return [_size(at), of, labels]


def _parsed(body, whole: bool) -> Manifest:
    if type(body.get("format")) is not int or body["format"] not in (1, FORMAT):
        raise ValueError("no format")
    leaves = [_leaf(x, whole) for x in _is(body["leaves"], list)]
    parts = [[body["parts"], body["arrays"]]] if body["format"] == 1 else _is(body["parts"], list)
    parts = [_parts(*_is(x, list)) for x in parts]
    names = [
        s.name
        for leaf in [*leaves, *(x for part in parts for x in part.arrays)]
        for s in leaf.shards
    ]
    if len(set(names)) != len(names):
        raise ValueError("two shards of one name")
    return Manifest(
        step=_size(body["step"]),
        leaves=leaves,
        nodes={_path(path): _is(kind, str) for path, kind in _is(body["nodes"], list)},
        states={_path(path): _facts(facts) for path, facts in _is(body["states"], list)},
        parts=parts,
        metrics={_is(k, str): float(_unfinite(v)) for k, v in _is(body["metrics"], dict).items()},
        fingerprint=_is(body["fingerprint"], dict),
        versions={_is(k, str): _is(v, str) for k, v in _is(body["versions"], dict).items()},
        files={
            k: (_size(n), _is(digest, str)) for k, (n, digest) in _is(body["files"], dict).items()
        },
        not_finite=_is(body.get("not_finite", ""), str),
    )


def _parts(values, arrays) -> Parts:
    values, arrays = (
        {_is(k, str): v for k, v in _is(values, dict).items()},
        [_leaf(x) for x in _is(arrays, list)],
    )
    _check_depth(values)
    if not all(leaf.dtype for leaf in arrays):
        raise ValueError("an array without a dtype")
    return Parts(values, arrays)


def _check_depth(x) -> None:
    level = [x]
    for _ in range(2 * DEPTH):
        level = [
            z
            for y in level
            if isinstance(y, (dict, list))
            for z in (y.values() if isinstance(y, dict) else y)
        ]
        if not level:
            return
    raise ValueError("too many levels")


# --------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Wanted:
    """A leaf of the target, and the saved one that goes there."""

    path: Path
    leaf: Any
    saved: Leaf


def differences(
    wanted: list[tuple[Path, Path, Any]],
    saved: Mapping[Path, Leaf],
    cast: bool,
    skip: Callable[[Path], bool] = lambda _: False,
) -> tuple[list[str], list[Wanted]]:
    """Compare what is wanted, (path here, path there, leaf), with what is there: (both sides of
    each, pairs).
    """
    found, pairs = [], []
    for here, there, x in wanted:
        mine, theirs = leaf_of(here, x), saved.get(there)
        if theirs is None:
            found.append(f"{show('state', here)}: nothing saved, expected {mine}")
            continue
        if not skip(here) and not fits(mine, theirs, cast):
            found.append(f"{show('state', here)}: saved {theirs}, expected {mine}")
            continue
        pairs.append(Wanted(here, x, theirs))
    return found, pairs


def fits(mine: Leaf, theirs: Leaf, cast: bool) -> bool:
    if (mine.kind, mine.shape) != (theirs.kind, theirs.shape):
        return False
    if mine.dtype == theirs.dtype:
        return True
    floats = lambda name: bool(name) and jnp.issubdtype(jnp.dtype(dtype_of(name)), np.floating)
    return cast and floats(mine.dtype) and floats(theirs.dtype)


def extra_leaves(
    wanted: list[tuple[Path, Path, Any]], saved: Mapping[Path, Leaf], under=lambda _: True
) -> list[str]:
    """What is saved and has no place."""
    known = {there for _, there, _ in wanted}
    return [f"{show('state', path)}: saved {leaf}, expected nothing" for path, leaf in saved.items()
            if path not in known and under(path)]  # fmt: skip


def node_differences(saved: Mapping[Path, str], mine: Mapping[Path, str]) -> list[str]:
    """Containers of another type.

    Those that are on one side only show by their leaves, but for empty ones.
    """
    out = []
    for path in [*mine, *(p for p in saved if p not in mine)]:
        a, b = saved.get(path, "nothing"), mine.get(path, "nothing")
        if a != b:
            out.append(f"{show('state', path)}: saved {a}, expected {b}")
    return out


def fact_differences(
    saved: Mapping[str, Any], mine: Mapping[str, Any], path: Path
) -> Iterator[str]:
    for name in ("rule", "trained", "precision", "average"):
        if saved[name] != mine[name]:
            a, b = (
                _brief(x[name], "everything" if name == "trained" else "none")
                for x in (saved, mine)
            )
            yield f"{name} of {show('state', path)}: saved {a}, expected {b}"


def _brief(x, absent: str) -> str:
    if isinstance(x, list):
        return trees.listed([str(name) for name in x], 6)
    return absent if x is None else str(x) if len(str(x)) <= 200 else f"{str(x)[:180]}…"
