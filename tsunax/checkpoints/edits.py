"""Edits of a state between two calls, by value: the changes of callbacks and commands.

Numbers, flags and the cuts of `adjust` are small: an edit keeps the changed leaves and the layout,
so that a replay makes the same state without the code that made the edit. A change of large leaves
has no such record: the state after it has to be saved.
"""

import base64
import dataclasses
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tsunax._core import PyTree, placement, processes, trees
from tsunax.checkpoints import _matching, leaves, merging, state_facts
from tsunax.checkpoints.leaves import Damaged, Keys, Tree
from tsunax.errors import TsunaxError, warn

# Bytes of all changed leaves of an edit. Larger ones make checkpoints larger, which keep all edits.
MOST_BYTES = 1 << 16
# Edits of a record, which every later checkpoint repeats: 10,000 take 0.9 MB and 0.2 s of a save.
MOST_EDITS = 10_000
SKIP = "skipped batches"
MOST_TEXT = 1 << 26  # bytes of all edits, against hostile files: 10,000 edits take 2 MB


@dataclass(frozen=True)
class Departure:
    """The moment at which a rewind left the line of a run: its step, and its calls."""

    step: int
    calls: int
    edit_count: int  # edits up to the checkpoint to which the run went back: the line has these
    # the position of the data after the rewind, if an edit can record it, else None; or, of a
    # branch that leaves out batches, their number {SKIP: n}
    place: Any


@dataclass(frozen=True)
class Edit:
    """A change of a run's state at a boundary: after `calls` calls, at `step`."""

    step: int
    calls: int
    source: str  # the callback or the command: "plateau(run)", "command adjust"
    # {key: new value}, see `_keyed`; None for a change of large leaves: its state was saved
    values: Mapping[Keys, np.ndarray] | None
    # for each training state by path: the cuts of `adjust`, and whether it has flags for freezing
    layout: Mapping[Keys, tuple[Any, bool]]
    departure: Departure | None = None  # for a rewind; its `calls` count up to the checkpoint

    def __repr__(self) -> str:
        keys = [] if self.values is None else self.values
        # the field of each key, without its dot and the number within the field
        fields = dict.fromkeys(leaves.show("", key[:-1])[1:] for key in keys)
        names = trees.listed([*fields], 4)
        change = f": {names}" if names else ""
        if self.values is None:
            change = ": saved with its step"
        return f"Edit(step={self.step}, calls={self.calls}, {self.source}{change})"

    def applied(self, state: PyTree, like: PyTree) -> PyTree:
        """The state after the edit. `like` is the state of the script, as `setup` made it."""
        shape_of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if trees.is_array(x) else x
        like = jax.tree.map(shape_of, like)  # a step may have consumed the arrays
        lay_out = lambda path, s: merging.laid_out(
            merging.without_flags(s), {"cuts": self.layout[path][0]}, frozen=self.layout[path][1]
        )
        laid_out = _matching.map_states(like, leaves.tree_of(like), lay_out)
        tree, values = leaves.tree_of(state), self.values or {}
        old_leaves, clock = dict(_keyed(tree)), tree.clocks[0]
        new_leaves = [
            placed(values[key], old_leaves.get(key, clock)) if key in values else old_leaves[key]
            for key, _ in _keyed(leaves.tree_of(laid_out))
        ]
        return jax.tree.structure(laid_out).unflatten(new_leaves)

    def is_exact(self, old: PyTree, new: PyTree, like: PyTree) -> bool:
        """Whether the edit makes `new` of `old`. It does not if the script has cut `like`."""
        try:
            applied = self.applied(old, like)
        except (LookupError, TypeError, ValueError, TsunaxError):
            return False
        is_same_tree = jax.tree.structure(applied) == jax.tree.structure(new)
        return is_same_tree and edit_of(applied, new, 0, 0, "") is None

    def dump(self) -> str:
        """The edit as one line of JSON."""
        rows = None
        if self.values is not None:
            rows = [[list(key), x.dtype.name, list(x.shape), base64.b64encode(x.tobytes()).decode()]
                    for key, x in self.values.items()]  # fmt: skip
        layout = [[list(path), cuts, frozen] for path, (cuts, frozen) in self.layout.items()]
        departure = [] if self.departure is None else [dataclasses.astuple(self.departure)]
        return json.dumps([self.step, self.calls, self.source, rows, layout, *departure])

    @classmethod
    def parse(cls, line: str) -> "Edit":
        """The inverse of `dump`. Raises Damaged."""
        try:
            step, calls, source, rows, layout, *departures = json.loads(line)
            values = None if rows is None else {
                tuple(key): np.frombuffer(base64.b64decode(text), leaves.dtype_of(dtype))
                .reshape(shape) for key, dtype, shape, text in rows
            }  # fmt: skip
            layouts = {tuple(path): (cuts, bool(frozen)) for path, cuts, frozen in layout}
            departure = Departure(*departures[0]) if departures else None
            return cls(int(step), int(calls), str(source), values, layouts, departure)
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise Damaged(f"edit: {type(error).__name__} {str(error)[:80]}") from None


def edit_of(old: PyTree, new: PyTree, step: int, calls: int, source: str) -> Edit | None:
    """The edit that made `new` of `old`; None if they are the same to the bit."""
    old_tree, new_tree = leaves.tree_of(old), leaves.tree_of(new)
    old_leaves, values, size = dict(_keyed(old_tree)), {}, 0
    for key, x in _keyed(new_tree):
        y = old_leaves.get(key)
        # whether no process has all of the leaf
        is_spread = not getattr(x, "is_fully_addressable", True) and not x.is_fully_replicated
        if x is y or not (is_spread or trees.bits_differ(x, y)):
            continue
        size += np.size(x) * np.dtype(trees.dtype_of(x) or np.float64).itemsize
        if size > MOST_BYTES or trees.is_key(x) or is_spread:
            return Edit(step, calls, source, None, layout_of(new_tree))
        values[key] = np.asarray(x)
    layout = layout_of(new_tree)
    if not values and layout == layout_of(old_tree):
        return None
    return Edit(step, calls, source, values, layout)


def edits_of_line(edits: Iterable[Edit]) -> list[Edit]:
    """The edits of the current line, without edits of calls that a later rewind left."""
    line: list[Edit] = []
    for edit in edits:
        if edit.departure is not None:
            del line[edit.departure.edit_count :]
        line.append(edit)
    return line


def edits_through(edits: Sequence[Edit], calls: int) -> list[Edit]:
    """The edits of the line on which the run made its call of this number."""
    left_line = lambda edit: edit.departure is not None and calls <= edit.departure.calls
    return edits_of_line(itertools.takewhile(lambda edit: not left_line(edit), edits))


def bounded(edits: list[Edit]) -> list[Edit]:
    """The edits; in place of `MOST_EDITS` one without values, which no replay crosses."""
    if len(edits) < MOST_EDITS:
        return edits
    first, last = edits[0].step, edits[-1].step
    warn(
        f"fit(): callbacks have edited the state {len(edits):,} times, and the record of edits "
        f"begins anew: timeline() cannot replay steps {first} to {last}. For a number that changes "
        "all the time, give the rule a schedule."
    )
    # An edit that no earlier checkpoint has, so that these are not on the line of later ones.
    source = f"{len(edits):,} edits up to step {last}"
    return [dataclasses.replace(edits[0], source=source, values=None, departure=None)]


def dump_edits(edits: Sequence[Edit]) -> str:
    """Edits as one text, for a manifest."""
    lines = "\n".join(edit.dump() for edit in edits)
    return base64.b64encode(zlib.compress(lines.encode())).decode()


def parse_edits(text: Any) -> list[Edit]:
    """The inverse of `dump_edits`; none for a checkpoint without edits. Raises Damaged."""
    if not isinstance(text, str):
        return []
    try:
        unpacker = zlib.decompressobj()
        lines = unpacker.decompress(base64.b64decode(text), MOST_TEXT).decode()
    except (ValueError, zlib.error) as error:
        raise Damaged(f"edits: {error}") from None
    if unpacker.unconsumed_tail:
        raise Damaged(f"edits: more than {MOST_TEXT} bytes")
    return [*map(Edit.parse, filter(None, lines.split("\n")))]


def plain_place(place: Any) -> Any:
    """A position of data that a manifest can record, as JSON; None for any other."""
    try:
        plain = json.loads(json.dumps(place))
    except (TypeError, ValueError):
        return None
    return plain if plain == place and processes.current().sees_everything else None


def placed(value: np.ndarray, old: Any) -> Any:
    """A new value where the old one is, or the clock."""
    if not isinstance(old, jax.Array):
        return value.copy()
    if old.shape == value.shape and old.committed:
        return jax.device_put(value, old.sharding)
    return placement.replicate(value, old.sharding if old.committed else None)


def _keyed(tree: Tree) -> Iterator[tuple[Keys, Any]]:
    """The leaves of a tree; of a training state by field and by number within the field.

    The cuts of `adjust` change the paths within an optimizer's state, and not the order.
    """
    counts = Counter[Keys]()
    for path, x in tree.leaves:
        tops = (top for top in tree.states if path[: len(top)] == top)
        if (top := next(tops, None)) is None:
            yield path, x
            continue
        field = path[: len(top) + 1]
        yield (*field, f"#{counts[field]}"), x
        counts[field] += 1


def layout_of(tree: Tree) -> dict[Keys, tuple[Any, bool]]:
    cuts_of = lambda s: state_facts.facts_of(s)["cuts"]
    return {path: (cuts_of(s), s.frozen is not None) for path, s in tree.states.items()}


def starts_with(edits: Sequence[Edit], first_edits: Sequence[Edit]) -> bool:
    """Whether a record of edits begins with these edits."""
    dumped = [edit.dump() for edit in first_edits]
    return dumped == [edit.dump() for edit in edits[: len(dumped)]]
