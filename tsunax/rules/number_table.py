"""Live numbers: a table outside of the optimizer state, and the number that a rule gets.

A number that a user may change while training (a learning rate, a beta) is a column of four rows:
its value, its complement `1 - value`, whether it overrides its schedule, and the value given at
`setup`. A restored run finds adjusted numbers by that value.

**Why outside of the optimizer state.** A `TrainState` keeps the tables of all live rules in a
separate array: `split_numbers` takes them out at `setup`, `join_numbers` puts them back inside the
trace, for one update, and `without_numbers` takes them out again. So the numbers are an argument of
a step and never a result. Each array that a step returns costs about 1 us on a CPU; numbers that
are not donated can be read and adjusted without waiting for a running step; and the optimizer state
has the plain structure of optax, which other code and tools can read.

The cost: an optimizer state has two structures, with live states (`Layout.full`) and without
(`Layout.plain`). If the update of a rule changed its own table, the change would be lost.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey
from jax.typing import ArrayLike, DTypeLike

from tsunax._core import Maybe, PyTree, Scalar, TreeDef, trees


def weak(x: ArrayLike) -> jax.Array:
    """`x` as a weakly typed scalar, which promotes like a Python float."""
    return jax.lax.full_like(jnp.asarray(0.0), x)


@jax.tree_util.register_dataclass
@dataclass(eq=False, repr=False)
class Number:
    """A traced float32 that behaves like the Python float it came from.

    It carries its complement, rounded once from the user's float: `1 - f32(0.999)` is 1.3e-5 away
    from `f32(1 - 0.999)`, enough to leave optax's trajectory by 10⁵ ulps in 200 steps. A product
    has the dtype of its other factor, as with a Python float. It is a pytree because optax passes
    betas into functions that it jits.
    """

    value: Scalar
    complement: Scalar

    def __post_init__(self) -> None:
        # It is made once, in the outermost trace, so that inner traces may use the array, too.
        self._weak: Any = weak(self.value) if isinstance(self.value, jax.Array) else None

    @property
    def weak(self) -> jax.Array:
        return weak(self.value) if self._weak is None else self._weak

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

    def __rsub__(self, number: Scalar) -> Any:
        if isinstance(number, (int, float)) and number == 1:
            return Number(self.complement, self.value)
        return number - self.weak

    def astype(self, dtype: DTypeLike) -> jax.Array:
        return self.weak.astype(dtype)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.value.dtype

    shape: ClassVar[tuple[int, ...]] = ()
    ndim = 0
    size = 1


def as_scalar(x: Scalar) -> Scalar:
    """A live number as a weakly typed scalar; a Python number as it is."""
    return x.weak if isinstance(x, Number) else x


def _operator_method(name, reflected=False):
    operation = getattr(operator, name)

    def method(self, operand):
        first, second = as_scalar(self), as_scalar(operand)
        return operation(second, first) if reflected else operation(first, second)

    return method


for _name in ("add", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _operator_method(_name))
    setattr(Number, f"__r{_name}__", _operator_method(_name, reflected=True))
for _name in ("sub", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _operator_method(_name))


def as_float(value: Scalar, complement: Scalar) -> Scalar:
    """The shortest Python float with this value and complement: 0.999, not 0.9990000129."""
    if trees.is_traced(value) or np.ndim(value):
        return value
    value = np.asarray(value)
    shortest = float(str(value))
    if complement is None or value.dtype.type(1 - shortest) == complement:
        return shortest
    from_complement = 1 - float(complement)
    return from_complement if value.dtype.type(from_complement) == value else float(value)


def is_live(x: object) -> bool:
    """Whether `x` is the state of a live rule (`live_rules.LiveState`)."""
    return getattr(type(x), "is_live", False)


# An evicted entry costs time only, because these objects compare by value.
@functools.lru_cache(maxsize=1024)
def interned(static: Any) -> Any:
    """The same object for equal static parts, so that comparing states compares identities."""
    return static


@dataclass(frozen=True)
class Layout:
    """The places of live states in an optimizer state: the static part of `Numbers`. Interned."""

    full: TreeDef  # structure with live states and their tables
    plain: TreeDef  # structure of `TrainState.opt_state`
    tables: tuple[int, ...]  # indices of the leaves of `full` that are tables
    clocks: tuple[int, ...]  # indices of the clocks of schedules, set to the state's step
    names: tuple[Any, ...]  # flat names, per live state and group
    # (paths, own_clock) per live state: compared here, because `full` ignores scopes
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

    # (4, n): value, complement, whether it overrides its schedule, value at setup
    values: jax.Array | np.ndarray
    layout: Layout = field(metadata={"static": True})

    @property
    def scheduled(self) -> bool:
        return any(schedule for _, s in self.layout.lives for schedule in s.live.schedules)

    def columns(self) -> Iterator[tuple[int, Any, int, int]]:
        """(index of a live state, the state, group, first column), in the order of the columns."""
        start = 0
        for live_index, (_, s) in enumerate(self.layout.lives):
            for group in range(s.groups):
                yield live_index, s, group, start
                start += s.live.columns

    def column_names(self) -> list[tuple[str, int]]:
        """(flat name, 0) for each value, (flat name, j) for the j-th number of its schedule."""
        column_names = []
        for live_index, s, group, _ in self.columns():
            names = self.layout.names[live_index][group]
            column_names += [(name, 0) for name in names]
            for name, schedule in zip(names, s.live.schedules, strict=True):
                column_names += [(name, 1 + j) for j in range(schedule.size if schedule else 0)]
        return column_names

    def adjusted_names(self) -> set[str]:
        """The flat names of numbers that differ from their values at `setup`."""
        values = np.asarray(self.values)
        is_adjusted = values[..., 0, :] != values[..., 3, :]
        is_adjusted = is_adjusted.any(axis=tuple(range(is_adjusted.ndim - 1)))  # in any member
        names = self.column_names()
        return {names[column][0] for column in np.flatnonzero(is_adjusted)}

    def named(self, step: Maybe, counts: Mapping[int, Any] | None = None) -> dict[str, Any]:
        """Every number in force at `step`, by flat name: Python floats if they are concrete.

        Schedules with their own clock are read at `counts`, see `own_counts`, or left out.
        """
        numbers = {}
        # Copy the table to the host once, instead of waiting for each number.
        values = self.values if trees.is_traced(self.values) else np.asarray(self.values)
        for live_index, s, group, start in self.columns():
            table = values[..., start : start + s.live.columns]
            column = len(s.live.names)
            names = self.layout.names[live_index][group]
            clock = (counts or {}).get(live_index) if s.own_clock else step
            for i, (flat_name, schedule) in enumerate(zip(names, s.live.schedules, strict=True)):
                value, complement = table[..., 0, i], table[..., 1, i]
                if schedule:
                    schedule_numbers = [table[..., 0, column + j] for j in range(schedule.size)]
                    column += schedule.size
                    if clock is None:
                        continue
                    scheduled = schedule.value_at(clock, schedule_numbers)
                    value, complement = jnp.where(table[..., 2, i] > 0, value, scheduled), None
                numbers[flat_name] = as_float(value, complement)
        return numbers


def split_numbers(opt_state: PyTree) -> tuple[Any, Numbers | None]:
    """Split an optimizer state into (plain state, numbers): tables and clocks are taken out."""
    leaves, full = jax.tree.flatten(opt_state)
    lives = [s for _, s in live_states(opt_state)]
    tables = _indices_of(leaves, [s.table for s in lives])
    if not tables:
        return opt_state, None
    clocks = _indices_of(leaves, [s.count for s in lives if not s.own_clock])
    plain, scopes = _plain_state(opt_state), tuple((s.paths, s.own_clock) for s in lives)
    names = labels(opt_state)
    layout = interned(Layout(full, jax.tree.structure(plain), tables, clocks, names, scopes))
    rows = [leaves[i].reshape(*leaves[i].shape[:-2], -1) for i in tables]
    lib = np if all(isinstance(row, np.ndarray) for row in rows) else jnp
    return plain, Numbers(lib.concatenate(rows, axis=-1), layout)


def _indices_of(leaves, among) -> tuple[int, ...]:
    ids = {id(x) for x in among}
    return tuple(i for i, x in enumerate(leaves) if id(x) in ids)


def _plain_state(opt_state):
    """The optax states inside live states, with their extra counters and clocks, if any."""

    def without_tables(s):
        if not is_live(s):
            return s
        inner, count = _plain_state(s.inner), s.count if s.own_clock else None
        return inner if not s.extra and count is None else (inner, s.extra, count)

    return jax.tree.map(without_tables, opt_state, is_leaf=is_live)


def join_numbers(opt_state: PyTree, numbers: Numbers | None, step: Scalar = 0) -> PyTree:
    """Put tables and clocks back into the plain state: the inverse of `split_numbers`."""
    if numbers is None:
        return opt_state
    layout, values, column, all_leaves = numbers.layout, numbers.values, 0, []
    leaves, lives = iter(jax.tree.leaves(opt_state)), iter(layout.lives)
    for leaf_index in range(layout.full.num_leaves):
        if leaf_index in layout.tables:
            _, s = next(lives)
            size = s.groups * s.live.columns
            table = values[..., column : column + size]
            all_leaves.append(table.reshape(*table.shape[:-1], s.groups, s.live.columns))
            column += size
        else:
            all_leaves.append(step if leaf_index in layout.clocks else next(leaves))
    return layout.full.unflatten(all_leaves)


def without_numbers(opt_state: PyTree, numbers: Numbers | None) -> PyTree:
    """The plain state of `split_numbers`, after an update that changed no number."""
    return opt_state if numbers is None else _plain_state(opt_state)


def own_counts(opt_state: PyTree, numbers: Numbers) -> dict[int, Any]:
    """{index of a live state: its count}, for live states with schedules on their own count."""
    leaves = dict(zip(plain_leaves(numbers.layout), jax.tree.leaves(opt_state), strict=True))
    return {
        live_index: leaves[s.count]
        for live_index, (_, s) in enumerate(numbers.layout.lives)
        if s.own_clock and s.count is not None
    }


def plain_leaves(layout: Layout) -> list[int]:
    """The indices of the leaves of an optimizer state that are in `TrainState.opt_state`."""
    removed = {*layout.tables, *layout.clocks}
    return [i for i in range(layout.full.num_leaves) if i not in removed]


def live_states(opt_state: PyTree) -> list[tuple[tuple[Any, ...], Any]]:
    """Every live state with its key path, outer states first, in the order of their tables."""
    states = []
    for path, x in jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=is_live)[0]:
        if is_live(x):
            inner_states = live_states(x.inner)
            states += [(path, x), *((path + inner_path, s) for inner_path, s in inner_states)]
    return states


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
    indices_and_patterns = []
    for path, _ in lives:
        fields = (trees.key_name(k) for k in path if not isinstance(k, DictKey))
        index = ".".join(field for field in fields if field != "inner")
        # a rule directly inside another rule
        while (index, patterns(path)) in indices_and_patterns:
            index = f"{index}.inner".lstrip(".")
        indices_and_patterns.append((index, patterns(path)))
    return [index for index, _ in indices_and_patterns]


def labels(opt_state: PyTree) -> tuple[Any, ...]:
    """The flat name of every number: per live state, per group, per name. No two are equal.

    It is the name alone if one rule has it; `name@pattern` in a group of rules; `i.name` if a chain
    repeats it. A group of values that `adjust` cut adds `@pattern`.
    """
    lives = live_states(opt_state)
    indices, groups_of_rules = chain_indices(lives), [patterns(path) for path, _ in lives]
    pairs = [
        (name, rules)
        for (_, s), rules in zip(lives, groups_of_rules, strict=True)
        for name in s.live.names
    ]
    counts, counts_in_group = Counter(name for name, _ in pairs), Counter(pairs)
    labels_by_live = [s.cut.labels if s.cut else ("",) for _, s in lives]
    places = [(group, i) for i, cuts in enumerate(labels_by_live) for group in range(len(cuts))]
    used_names: set[str] = set()
    flat_names: dict[tuple[int, int], list[str]] = {place: [] for place in places}
    for group, i in sorted(places):
        for name in lives[i][1].live.names:
            rules = groups_of_rules[i] if counts[name] > 1 else ()
            flat_name = "@".join(filter(None, (name, *rules, labels_by_live[i][group])))
            if indices[i] and counts_in_group[name, groups_of_rules[i]] > 1:
                flat_name = f"{indices[i]}.{flat_name}"
            while flat_name in used_names:  # a cut has the same pattern as a group of rules
                flat_name += "'"
            used_names.add(flat_name)
            flat_names[group, i].append(flat_name)
    names_of_live = lambda i, n: tuple(tuple(flat_names[group, i]) for group in range(n))
    return tuple(names_of_live(i, len(cuts)) for i, cuts in enumerate(labels_by_live))
