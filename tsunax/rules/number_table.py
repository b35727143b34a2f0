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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

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
        # The weak scalar is made once, in the outermost trace, so that inner traces may use it.
        # JAX also makes trees with placeholders, which are no arrays.
        self.weak: Any = weak(self.value) if trees.is_array(self.value) else self.value

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

    def method(self, *operand):
        scalars = [as_scalar(x) for x in (self, *operand)]
        return operation(*(reversed(scalars) if reflected else scalars))

    return method


for _name in ("add", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _operator_method(_name))
    setattr(Number, f"__r{_name}__", _operator_method(_name, reflected=True))
for _name in ("abs", "sub", "lt", "le", "gt", "ge", "eq", "ne"):
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


def is_live(x: Any) -> bool:
    """Whether an object is the state of a live rule (`live_rules.LiveState`)."""
    return getattr(type(x), "is_live", False)


# An evicted entry costs time only, because these objects compare by value.
@functools.lru_cache(maxsize=1024)
def interned(static: Any) -> Any:
    """The same object for equal static parts, so that comparing states compares identities."""
    return static


class LiveNumber(NamedTuple):
    """A number of a live rule, and its columns in `Numbers.values`."""

    flat_name: str
    name: str  # in its rule
    live_index: int
    state: Any  # the live state, with the indices of its leaves in place of arrays
    group: int
    column: int
    schedule: Any
    schedule_columns: range  # the numbers of its schedule


@dataclass(frozen=True)
class Layout:
    """The places of live states in an optimizer state: the static part of `Numbers`. Interned."""

    full: TreeDef  # structure with live states and their tables
    # (paths, own_clock) per live state: compared here, because `full` ignores scopes
    scopes: tuple[Any, ...]

    @functools.cached_property
    def skeleton(self) -> PyTree:
        """The optimizer state with its live states; each leaf is its index."""
        return jax.tree.unflatten(self.full, range(self.full.num_leaves))

    @functools.cached_property
    def lives(self) -> list[tuple[tuple[Any, ...], Any]]:
        return list(live_states(self.skeleton))

    @functools.cached_property
    def clocks(self) -> list[int]:
        """The indices of the clocks of schedules, which are set to the state's step."""
        return [s.count for _, s in self.lives if s.count is not None and not s.scope.own_clock]

    @functools.cached_property
    def plain_leaves(self) -> list[int]:
        """The indices of the leaves that are in `TrainState.opt_state`."""
        return jax.tree.leaves(without_numbers(self.skeleton))

    @functools.cached_property
    def numbers(self) -> list[LiveNumber]:
        """All live numbers, in the order of the columns."""
        flat_names, start, numbers = _flat_names(self.lives), 0, []
        for live_index, (_, s) in enumerate(self.lives):
            for group in range(s.groups):
                for i, (name, schedule) in enumerate(
                    zip(s.live.names, s.live.schedules, strict=True)
                ):
                    columns = s.live.schedule_columns[name]
                    numbers.append(
                        LiveNumber(
                            flat_name=flat_names[live_index, group, name],
                            name=name,
                            live_index=live_index,
                            state=s,
                            group=group,
                            column=start + i,
                            schedule=schedule,
                            schedule_columns=range(start + columns.start, start + columns.stop),
                        )
                    )
                start += s.live.columns
        return numbers


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Numbers:
    """All live numbers of an optimizer state."""

    # (4, n): value, complement, whether it overrides its schedule, value at setup
    values: jax.Array | np.ndarray
    layout: Layout = field(metadata={"static": True})

    @property
    def scheduled(self) -> bool:
        return any(number.schedule for number in self.layout.numbers)

    def column_names(self) -> list[tuple[str, int]]:
        """(flat name, 0) for each value, (flat name, j) for the j-th number of its schedule."""
        columns = {
            column: (number.flat_name, j)
            for number in self.layout.numbers
            for j, column in enumerate([number.column, *number.schedule_columns])
        }
        return [columns[column] for column in range(len(columns))]

    def adjusted_names(self) -> set[str]:
        """The flat names of numbers that differ from their values at `setup`."""
        values = np.asarray(self.values)
        is_adjusted = values[..., 0, :] != values[..., 3, :]
        is_adjusted = is_adjusted.any(axis=tuple(range(is_adjusted.ndim - 1)))  # in any member
        names = self.column_names()
        return {names[column][0] for column in np.flatnonzero(is_adjusted)}

    def named(self, step: Maybe, opt_state: PyTree = None) -> dict[str, Any]:
        """Every number in force at `step`, by flat name: Python floats if they are concrete.

        With `step=None` numbers with a schedule are left out.
        Schedules with their own clock read it in the plain `opt_state`; without it they are left
        out.
        """
        leaves = jax.tree.leaves(opt_state)
        clocks = dict(zip(self.layout.plain_leaves, leaves, strict=bool(leaves)))
        numbers: dict[str, Any] = {}
        # Copy the table to the host once, instead of waiting for each number.
        values = self.values if trees.is_traced(self.values) else np.asarray(self.values)
        for number in self.layout.numbers:
            value, complement = values[..., 0, number.column], values[..., 1, number.column]
            if number.schedule:
                clock = clocks.get(number.state.count) if number.state.scope.own_clock else step
                if clock is None:
                    continue
                schedule_numbers = [values[..., 0, column] for column in number.schedule_columns]
                scheduled = number.schedule.value_at(clock, schedule_numbers)
                overrides = values[..., 2, number.column] > 0
                value, complement = jnp.where(overrides, value, scheduled), None
            numbers[number.flat_name] = as_float(value, complement)
        return numbers


def split_numbers(opt_state: PyTree) -> tuple[Any, Numbers | None]:
    """Split an optimizer state into (plain state, numbers): tables and clocks are taken out."""
    leaves, full = jax.tree.flatten(opt_state)
    scopes = tuple((s.scope.paths, s.scope.own_clock) for _, s in live_states(opt_state))
    if not scopes:
        return opt_state, None
    layout = interned(Layout(full, scopes))
    tables = [leaves[s.table] for _, s in layout.lives]
    rows = [table.reshape(*table.shape[:-2], -1) for table in tables]
    lib = np if all(isinstance(row, np.ndarray) for row in rows) else jnp
    return without_numbers(opt_state), Numbers(lib.concatenate(rows, axis=-1), layout)


def without_numbers(opt_state: PyTree) -> PyTree:
    """The plain state: the optax states inside live states, with their counters and clocks."""

    def without_tables(s):
        if not is_live(s):
            return s
        inner, count = without_numbers(s.inner), s.count if s.scope.own_clock else None
        return inner if not s.extra and count is None else (inner, s.extra, count)

    return jax.tree.map(without_tables, opt_state, is_leaf=is_live)


def join_numbers(opt_state: PyTree, numbers: Numbers | None, step: Scalar = 0) -> PyTree:
    """Put tables and clocks back into the plain state: the inverse of `split_numbers`."""
    if numbers is None:
        return opt_state
    layout, column, tables = numbers.layout, 0, {}
    for _, s in layout.lives:
        size = s.groups * s.live.columns
        table = numbers.values[..., column : column + size]
        tables[s.table] = table.reshape(*table.shape[:-1], s.groups, s.live.columns)
        column += size
    all_leaves = {**dict.fromkeys(layout.clocks, step), **tables}
    all_leaves |= zip(layout.plain_leaves, jax.tree.leaves(opt_state), strict=True)
    return layout.full.unflatten(all_leaves[i] for i in range(layout.full.num_leaves))


def live_states(opt_state: PyTree) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every live state with its key path, outer states first, in the order of their tables."""
    for path, x in jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=is_live)[0]:
        if is_live(x):
            yield path, x
            yield from ((path + inner_path, s) for inner_path, s in live_states(x.inner))


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


def _flat_names(lives: Sequence[tuple[tuple[Any, ...], Any]]) -> dict[tuple[int, int, str], str]:
    """The flat name of every number, by index of its live state, group and name. No two are equal.

    It is the name alone if one rule has it; `name@pattern` in a group of rules; `i.name` if a chain
    repeats it. A group of values that `adjust` cut adds `@pattern`.
    """
    indices, groups_of_rules = chain_indices(lives), [patterns(path) for path, _ in lives]
    names = [(name, i) for i, (_, s) in enumerate(lives) for name in s.live.names]
    counts = Counter(name for name, _ in names)
    counts_in_group = Counter((name, groups_of_rules[i]) for name, i in names)
    places = [(group, i, name) for name, i in names for group in range(lives[i][1].groups)]
    flat_names: dict[tuple[int, int, str], str] = {}
    by_group_and_state = lambda place: place[:2]
    for group, i, name in sorted(places, key=by_group_and_state):
        rules = groups_of_rules[i] if counts[name] > 1 else ()
        flat_name = "@".join(filter(None, (name, *rules, lives[i][1].group_labels[group])))
        if indices[i] and counts_in_group[name, groups_of_rules[i]] > 1:
            flat_name = f"{indices[i]}.{flat_name}"
        while flat_name in flat_names.values():  # a cut has the same pattern as a group of rules
            flat_name += "'"
        flat_names[i, group, name] = flat_name
    return flat_names
