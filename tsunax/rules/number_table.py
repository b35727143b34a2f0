"""Live numbers: a table beside the optimizer state, and the number that a rule sees inside a trace.

A number that a user may change while training (a learning rate, a beta) is a column of four rows:
its value, its complement `1 - value`, whether it is held against its schedule, and the value given
at `setup`, from which a restored run sees what was adjusted.

**Why beside the optimizer state.** The state of a live rule has its own table. A `TrainState` keeps
all tables of its rule apart from it, as one array: `hoist` takes them out at `setup`, `lower` puts
them back inside the trace, for one update, and `hoist_like` takes them out again. So the numbers
are an argument of a step and never a result: a step pays for each array that it returns (about 1 us
on a CPU), numbers that are not donated can be read and adjusted without waiting for a running step,
and the optimizer state has the plain structure of optax, which other code and tools can read.

The cost: an optimizer state has two structures, with live states (`Layout.full`) and without
(`Layout.plain`). If the update of a rule changed its own table, the change would be lost.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey
from jax.typing import ArrayLike, DTypeLike

from tsunax._core import Maybe, PyTree, Scalar, TreeDef, trees

# One live number


def weak(x: ArrayLike) -> jax.Array:
    """`x` as a weakly typed scalar, which promotes like a Python float."""
    return jax.lax.full_like(jnp.asarray(0.0), x)


@jax.tree_util.register_pytree_node_class
class Number:
    """A traced float32 that behaves like the Python float it came from.

    It carries its complement, rounded once from the user's float: `1 - f32(0.999)` is 1.3e-5 away
    from `f32(1 - 0.999)`, enough to leave optax's trajectory by 10⁵ ulps in 200 steps. A product
    has the dtype of its other factor, as with a Python float. It is a pytree because optax passes
    betas into functions that it jits.
    """

    def __init__(self, value: Scalar, complement: Scalar) -> None:
        self.value: Scalar = value
        self.complement: Scalar = complement
        # made once, in the outermost trace: inner traces may use its array, too
        self._weak: Any = weak(value) if isinstance(value, jax.Array) else None

    @property
    def weak(self) -> jax.Array:
        return weak(self.value) if self._weak is None else self._weak

    def tree_flatten(self) -> tuple[tuple[Scalar, Scalar], None]:
        return (self.value, self.complement), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Iterable[Scalar]) -> Number:
        return cls(*children)

    def __jax_array__(self) -> jax.Array:
        return self.weak

    def __bool__(self) -> bool:
        return bool(self.weak)

    def __float__(self) -> float:
        return float(self.weak)

    def __neg__(self) -> Number:
        return Number(-self.value, 1 + self.value)

    def __pos__(self) -> Number:
        return self

    def __abs__(self) -> jax.Array:
        return abs(self.weak)

    def __rsub__(self, other: Scalar) -> Any:
        if isinstance(other, (int, float)) and other == 1:
            return Number(self.complement, self.value)
        return other - self.weak

    def astype(self, dtype: DTypeLike) -> jax.Array:
        return self.weak.astype(dtype)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.value.dtype

    shape: tuple[int, ...] = ()
    ndim = 0
    size = 1


def as_scalar(x: Scalar) -> Scalar:
    """A live number as a weakly typed scalar; a Python number as it is."""
    return x.weak if isinstance(x, Number) else x


def _forward(name, reflected=False):
    op = getattr(operator, name)

    def method(self, other):
        a, b = as_scalar(self), as_scalar(other)
        return op(b, a) if reflected else op(a, b)

    return method


for _name in ("add", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _forward(_name))
    setattr(Number, f"__r{_name}__", _forward(_name, reflected=True))
for _name in ("sub", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _forward(_name))


@dataclass(frozen=True)
class ScheduleShape:
    """A schedule without its numbers: `leaves` holds `None` where a number of the table goes."""

    treedef: TreeDef
    leaves: tuple[Any, ...]

    @property
    def size(self) -> int:
        return sum(leaf is None for leaf in self.leaves)

    def at(self, step: Maybe, numbers: Iterable[Scalar]) -> Scalar:
        numbers = iter(numbers)
        leaves = [next(numbers) if leaf is None else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)(step)


def as_float(value: Scalar, complement: Scalar) -> Scalar:
    """The shortest Python float with this value and complement: 0.999, not 0.9990000129."""
    if trees.is_traced(value) or np.ndim(value):
        return value
    value = np.asarray(value)
    short = float(str(value))
    if complement is None or value.dtype.type(1 - short) == complement:
        return short
    exact = 1 - float(complement)
    return exact if value.dtype.type(exact) == value else float(value)


# All live numbers of an optimizer state


def is_live(x: object) -> bool:
    """Whether it is the state of a live rule (`live_rules.LiveState`)."""
    return getattr(type(x), "is_live", False)


@functools.lru_cache(maxsize=1024)  # entries that fall out cost time only: these compare by value
def interned(static: Any) -> Any:
    """One object for equal static parts, so that comparing two states compares identities."""
    return static


@dataclass(frozen=True)
class Layout:
    """Where in an optimizer state the live states are: the static part of `Numbers`. Interned."""

    full: TreeDef  # structure with live states and their tables
    plain: TreeDef  # structure as a TrainState carries it
    tables: tuple[int, ...]  # which leaves of `full` are tables
    clocks: tuple[int, ...]  # and which are clocks of schedules: in a TrainState its step
    names: tuple[Any, ...]  # flat names, per live state and group
    # paths and own_clock per live state, which `full` leaves out of its comparison
    scopes: tuple[Any, ...]

    @functools.cached_property
    def skeleton(self) -> PyTree:
        """The optimizer state with its live states, an int for each array."""
        return jax.tree.unflatten(self.full, range(self.full.num_leaves))

    @functools.cached_property
    def lives(self) -> list[tuple[tuple[Any, ...], Any]]:
        return live_states(self.skeleton)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Numbers:
    """All live numbers of an optimizer state."""

    # (4, n): value, complement, held against its schedule, as given at setup
    values: jax.Array | np.ndarray
    layout: Layout = field(metadata={"static": True})

    @property
    def scheduled(self) -> bool:
        return any(schedule for _, s in self.layout.lives for schedule in s.live.schedules)

    def columns(self) -> Iterator[tuple[int, Any, int, int]]:
        """(index of a live state, the state, group, first column), in the order of the columns."""
        start = 0
        for at, (_, s) in enumerate(self.layout.lives):
            for group in range(s.groups):
                yield at, s, group, start
                start += s.live.columns

    def column_names(self) -> list[tuple[str, int]]:
        """(flat name, 0) for each value, (flat name, j) for the j-th number of its schedule."""
        out = []
        for at, s, group, _ in self.columns():
            names = self.layout.names[at][group]
            out += [(name, 0) for name in names]
            for name, schedule in zip(names, s.live.schedules, strict=True):
                out += [(name, 1 + j) for j in range(schedule.size if schedule else 0)]
        return out

    def adjusted_names(self) -> set[str]:
        """The flat names of numbers that are others now than `setup` was given."""
        values = np.asarray(self.values)
        changed = np.any(values[..., 0, :] != values[..., 3, :], axis=tuple(range(values.ndim - 2)))
        names = [name for name, _ in self.column_names()]
        return {name for name, is_changed in zip(names, changed, strict=True) if is_changed}

    def named(self, step: Maybe, counts: Mapping[int, Any] | None = None) -> dict[str, Any]:
        """Every number in force at `step`, by flat name: Python floats if they are concrete.

        Schedules on a clock of their own are read at `counts`, see `own_counts`, or left out.
        """
        out = {}
        # one wait, not one each
        values = self.values if trees.is_traced(self.values) else np.asarray(self.values)
        for at, s, group, start in self.columns():
            table = values[..., start : start + s.live.columns]
            inner = len(s.live.names)
            names = self.layout.names[at][group]
            clock = (counts or {}).get(at) if s.own_clock else step
            for i, (flat, schedule) in enumerate(zip(names, s.live.schedules, strict=True)):
                value, complement = table[..., 0, i], table[..., 1, i]
                if schedule:
                    given = [table[..., 0, inner + j] for j in range(schedule.size)]
                    inner += schedule.size
                    if clock is None:
                        continue
                    now = schedule.at(clock, given)
                    value, complement = jnp.where(table[..., 2, i] > 0, value, now), None
                out[flat] = as_float(value, complement)
        return out


def hoist(opt_state: PyTree) -> tuple[Any, Numbers | None]:
    """Take the tables and clocks out of an optimizer state: (plain state, numbers)."""
    leaves, full = jax.tree.flatten(opt_state)
    lives = [s for _, s in live_states(opt_state)]
    tables = _places(leaves, [s.table for s in lives])
    if not tables:
        return opt_state, None
    clocks = _places(leaves, [s.count for s in lives if not s.own_clock])
    plain = jax.tree.structure(_plain_state(opt_state))
    scopes = tuple((s.paths, s.own_clock) for s in lives)
    layout = interned(Layout(full, plain, tables, clocks, labels(opt_state), scopes))
    rows = [leaves[i].reshape(*leaves[i].shape[:-2], -1) for i in tables]
    lib = np if all(isinstance(row, np.ndarray) for row in rows) else jnp
    return _without_tables(layout, leaves), Numbers(lib.concatenate(rows, axis=-1), layout)


def _places(leaves, among) -> tuple[int, ...]:
    ids = {id(x) for x in among}
    return tuple(i for i, x in enumerate(leaves) if id(x) in ids)


def _plain_state(opt_state):
    """The optax states inside live states, each beside its extra counters and clock, if any."""

    def one(s):
        if not is_live(s):
            return s
        inner, count = _plain_state(s.inner), s.count if s.own_clock else None
        return inner if not s.extra and count is None else (inner, s.extra, count)

    return jax.tree.map(one, opt_state, is_leaf=is_live)


def lower(opt_state: PyTree, numbers: Numbers | None, step: Scalar = 0) -> PyTree:
    """Put tables and clocks back into the plain state: the inverse of `hoist`."""
    if numbers is None:
        return opt_state
    layout, values, at, out = numbers.layout, numbers.values, 0, []
    leaves, lives = iter(jax.tree.leaves(opt_state)), iter(layout.lives)
    for place in range(layout.full.num_leaves):
        if place in layout.tables:
            _, s = next(lives)
            size = s.groups * s.live.columns
            table = values[..., at : at + size]
            out.append(table.reshape(*table.shape[:-1], s.groups, s.live.columns))
            at += size
        else:
            out.append(step if place in layout.clocks else next(leaves))
    return layout.full.unflatten(out)


def hoist_like(opt_state: PyTree, numbers: Numbers | None) -> PyTree:
    """The plain state of `hoist`, after an update that changed no number."""
    leaves, full = jax.tree.flatten(opt_state)
    if numbers is None or full != numbers.layout.full:
        return hoist(opt_state)[0]
    return _without_tables(numbers.layout, leaves)


def own_counts(opt_state: PyTree, numbers: Numbers) -> dict[int, Any]:
    """{live state: its count}, for the live states whose schedules run on their own count."""
    layout = numbers.layout
    leaves = dict(zip(plain_leaves(layout), jax.tree.leaves(opt_state), strict=True))
    own = [(at, s.count) for at, (_, s) in enumerate(layout.lives) if s.own_clock]
    return {at: leaves[count] for at, count in own if count is not None}


def plain_leaves(layout: Layout) -> list[int]:
    """The indices of the leaves of an optimizer state that are in `TrainState.opt_state`."""
    gone = {*layout.tables, *layout.clocks}
    return [i for i in range(layout.full.num_leaves) if i not in gone]


def _without_tables(layout: Layout, leaves: Sequence[Any]) -> PyTree:
    return layout.plain.unflatten([leaves[i] for i in plain_leaves(layout)])


def live_states(opt_state: PyTree) -> list[tuple[tuple[Any, ...], Any]]:
    """Every live state with its key path, outer ones first, like their tables among the leaves."""
    out = []
    for path, x in jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=is_live)[0]:
        if is_live(x):
            out += [(path, x), *((path + inner, s) for inner, s in live_states(x.inner))]
    return out


def map_live(f: Callable[[int, Any], Any], opt_state: PyTree) -> PyTree:
    """Apply `f(place, state)` to every live state, in the order of `live_states`."""
    places = itertools.count()

    def visit(x):
        if not is_live(x):
            return x
        place = next(places)
        return f(place, dataclasses.replace(x, inner=jax.tree.map(visit, x.inner, is_leaf=is_live)))

    return jax.tree.map(visit, opt_state, is_leaf=is_live)


# Flat names


def patterns(path: Sequence[Any]) -> tuple[str, ...]:
    """The patterns of the groups of rules around a live state."""
    return tuple(str(k.key) for k in path if isinstance(k, DictKey))


def chain_indices(lives: Sequence[tuple[tuple[Any, ...], Any]]) -> list[str]:
    """The index of each live state in a chain: "0", "1.0" if nested, "" for the outermost rule."""
    places = []
    for path, _ in lives:
        fields = (trees.key_name(k) for k in path if not isinstance(k, DictKey))
        index = ".".join(field for field in fields if field != "inner")
        while (index, patterns(path)) in places:  # a rule right inside of another one
            index = f"{index}.inner".lstrip(".")
        places.append((index, patterns(path)))
    return [index for index, _ in places]


def labels(opt_state: PyTree) -> tuple[Any, ...]:
    """The flat name of every number: per live state, per group, per name. No two are equal.

    A name alone if one rule has it; `name@pattern` in a group of rules; `i.name` if a chain repeats
    it. Leaves with values of their own add `@pattern`.
    """
    lives = live_states(opt_state)
    indices, outer = chain_indices(lives), [patterns(path) for path, _ in lives]
    owned = [(name, outer[at]) for at, (_, s) in enumerate(lives) for name in s.live.names]
    rules, rules_there = Counter(name for name, _ in owned), Counter(owned)
    cuts = [s.cut.labels if s.cut else ("",) for _, s in lives]
    out: dict[str, tuple[int, int]] = {}
    for g, at in sorted((g, at) for at, labels in enumerate(cuts) for g in range(len(labels))):
        for name in lives[at][1].live.names:
            index = indices[at] if rules_there[name, outer[at]] > 1 else ""
            groups = outer[at] if rules[name] > 1 else ()
            flat = "@".join(filter(None, (name, *groups, cuts[at][g])))
            flat = f"{index}.{flat}" if index else flat
            while flat in out:  # a cut like a group of rules beside it
                flat += "'"
            out[flat] = at, g
    names = lambda at, g: tuple(flat for flat, place in out.items() if place == (at, g))
    return tuple(tuple(names(at, g) for g in range(len(labels))) for at, labels in enumerate(cuts))
