"""Numbers beside the optimizer state: what `TrainState` carries instead of live states.

`hoist` takes the tables of all live states of an optimizer state out, into one array, and leaves
plain optax states behind; `lower` puts them back for an update, with the state's step as the clock
of their schedules. Outside, the numbers are an argument that a step never returns: they cost one
leaf, are never donated, and reading or changing them waits for no step that is still running.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey

from tsunax._core import trees
from tsunax.rules import numbers as _numbers
from tsunax.rules.live_rules import LiveState, interned, is_live
from tsunax.rules.live_rules import recut as _recut


@dataclass(frozen=True)
class Layout:
    """Where in an optimizer state the live states are: the static part of `Numbers`. Interned."""

    full: Any  # structure with live states and their tables
    plain: Any  # structure as a TrainState carries it
    tables: tuple[int, ...]  # which leaves of `full` are tables
    clocks: tuple[int, ...]  # and which are clocks of schedules: in a TrainState its step
    names: tuple  # flat names, per live state and group
    homes: (
        tuple  # paths and own_clock per live state: two structures that differ there only are equal
    )

    @functools.cached_property
    def skeleton(self):
        """The optimizer state with its live states, an int for each array."""
        return jax.tree.unflatten(self.full, range(self.full.num_leaves))

    @functools.cached_property
    def lives(self) -> list[tuple[tuple, LiveState]]:
        return live_states(self.skeleton)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("values",), meta_fields=("layout",)
)
@dataclass(frozen=True, eq=False)
class Numbers:
    """All live numbers of an optimizer state."""

    values: Any  # (4, n): value, complement, held against its schedule, as given at setup
    layout: Layout

    @property
    def scheduled(self) -> bool:
        return any(schedule for _, s in self.layout.lives for schedule in s.live.schedules)

    def columns(self):
        """(live state, group, first column) in the order of the columns."""
        start = 0
        for at, (_, s) in enumerate(self.layout.lives):
            for group in range(s.groups):
                yield at, s, group, start
                start += s.live.columns

    def column_names(self) -> list[tuple[str, int]]:
        """What each column holds: (flat name, 0), or (flat name, j) for the j-th number of its
        schedule.
        """
        out = []
        for at, s, group, _ in self.columns():
            names = self.layout.names[at][group]
            inner = zip(names, s.live.schedules, strict=True)
            out += [(name, 0) for name in names]
            out += [
                (name, 1 + j) for name, schedule in inner if schedule for j in range(schedule.size)
            ]
        return out

    def named(self, step, counts: Mapping[int, Any] | None = None) -> dict[str, Any]:
        """Every number in force at `step`, by flat name: Python floats where they are concrete.

        Schedules on a clock of their own are read at `counts`, see `own_counts`, or left out.
        """
        out = {}
        values = (
            self.values if trees.is_traced(self.values) else np.asarray(self.values)
        )  # one wait, not one each
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
                out[flat] = _numbers.as_float(value, complement)
        return out


def hoist(opt_state) -> tuple[Any, Numbers | None]:
    """Take tables and clocks out: (plain state, numbers)."""
    leaves, full = jax.tree.flatten(opt_state)
    lives = [s for _, s in live_states(opt_state)]
    tables = _places(leaves, [s.table for s in lives])
    if not tables:
        return opt_state, None
    clocks = _places(leaves, [s.count for s in lives if not s.own_clock])
    plain = jax.tree.structure(_plain(opt_state))
    homes = tuple((s.paths, s.own_clock) for s in lives)
    layout = interned(Layout(full, plain, tables, clocks, labels(opt_state), homes))
    rows = [leaves[i].reshape(*leaves[i].shape[:-2], -1) for i in tables]
    on_host = all(isinstance(row, np.ndarray) for row in rows)
    return _without(layout, leaves), Numbers(
        (np if on_host else jnp).concatenate(rows, axis=-1), layout
    )


def lower(opt_state, numbers: Numbers | None, step: Any = 0):
    """Put them back: the inverse of `hoist`."""
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


def hoist_like(opt_state, numbers: Numbers | None):
    """The plain state again, after an update that changed no number."""
    leaves, full = jax.tree.flatten(opt_state)
    if numbers is None or full != numbers.layout.full:
        return hoist(opt_state)[0]
    return _without(numbers.layout, leaves)


def recut(
    opt_state, numbers: Numbers, params, cuts: Mapping[int, tuple]
) -> tuple[Any, Numbers | None]:
    """The state with other groups of values: `cuts` is {live state: (its new cut, parents)}, see
    `_live.recut`.
    """

    def one(place: int, s):
        if place not in cuts:
            return s
        seen = frozenset(s.paths)
        flags = [path in seen for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
        cut, parents = cuts[place]
        return _recut(s, cut, parents, trees.partition(params, flags)[0])

    if not trees.is_traced(
        numbers.values
    ):  # on the host: each cut has shapes of its own, and they would all compile
        numbers = dataclasses.replace(numbers, values=np.array(numbers.values))
    return hoist(map_live(one, lower(opt_state, numbers)))


def own_counts(opt_state, numbers: Numbers) -> dict[int, Any]:
    """{live state: its count} of a plain optimizer state, where schedules run on that and not on
    the clock.
    """
    layout = numbers.layout
    leaves = dict(zip(_kept(layout), jax.tree.leaves(opt_state), strict=True))
    own = [(at, s.count) for at, (_, s) in enumerate(layout.lives) if s.own_clock]
    return {at: leaves[count] for at, count in own if count is not None}


def _places(leaves, among) -> tuple[int, ...]:
    ids = {id(x) for x in among}
    return tuple(i for i, x in enumerate(leaves) if id(x) in ids)


def _kept(layout: Layout) -> list[int]:
    """Which leaves of the whole optimizer state a TrainState carries in its `opt_state`."""
    return [
        i
        for i in range(layout.full.num_leaves)
        if i not in layout.tables and i not in layout.clocks
    ]


def _without(layout: Layout, leaves):
    return layout.plain.unflatten([leaves[i] for i in _kept(layout)])


def _plain(opt_state):
    """A live state as the optax state that it keeps; with its own clock and the counters of further
    groups, if any.
    """

    def one(s):
        if not is_live(s):
            return s
        inner, count = _plain(s.inner), s.count if s.own_clock else None
        return inner if not s.extra and count is None else (inner, s.extra, count)

    return jax.tree.map(one, opt_state, is_leaf=is_live)


def live_states(opt_state) -> list[tuple[tuple, LiveState]]:
    """Every live state with its key path, outer ones first: the order of their tables among the
    leaves.
    """
    out = []
    for path, x in jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=is_live)[0]:
        if is_live(x):
            out += [(path, x), *((path + inner, s) for inner, s in live_states(x.inner))]
    return out


def map_live(f: Callable[[int, LiveState], LiveState], opt_state):
    """Apply `f(place, state)` to every live state, in the order of `live_states`."""
    places = iter(range(len(live_states(opt_state))))

    def visit(x):
        if not is_live(x):
            return x
        place = next(places)
        return f(place, dataclasses.replace(x, inner=jax.tree.map(visit, x.inner, is_leaf=is_live)))

    return jax.tree.map(visit, opt_state, is_leaf=is_live)


def owners_of(init: Callable, opt_state, numbers: Numbers | None, params) -> list[int | None]:
    """For each leaf of a plain optimizer state the index of the parameter that it belongs to, or
    None.
    """
    shapes, _, owners = trees.owners(init, params)
    if numbers is None:
        return owners
    fresh = jax.tree.unflatten(jax.tree.structure(shapes), [-1 if o is None else o for o in owners])

    def align(fresh, actual):
        if not is_live(actual):
            return fresh
        inner = jax.tree.map(align, fresh.inner, actual.inner, is_leaf=is_live)
        table, extra, count = jax.tree.map(lambda _: -1, (actual.table, actual.extra, actual.count))
        return dataclasses.replace(actual, table=table, inner=inner, extra=extra, count=count)

    aligned = jax.tree.leaves(jax.tree.map(align, fresh, numbers.layout.skeleton, is_leaf=is_live))
    return [None if aligned[i] < 0 else aligned[i] for i in _kept(numbers.layout)]


# -------------------------------------------------------------------------------------------- names


def patterns(path) -> tuple[str, ...]:
    """The groups of rules in which a live state stands, by their patterns."""
    return tuple(str(k.key) for k in path if isinstance(k, DictKey))


def chain_indices(lives) -> list[str]:
    """Where each live state stands: "0", "1.0" in a chain within a chain, "" for the outermost
    rule.
    """
    places = []
    for path, _ in lives:
        fields = (
            getattr(k, "idx", getattr(k, "name", getattr(k, "key", "")))
            for k in path
            if not isinstance(k, DictKey)
        )
        index = ".".join(str(field) for field in fields if field != "inner")
        while (index, patterns(path)) in places:  # a rule right inside of another one
            index = f"{index}.inner".lstrip(".")
        places.append((index, patterns(path)))
    return [index for index, _ in places]


def labels(opt_state) -> tuple:
    """The flat name of every number: per live state, per group, per name. No two are equal.

    A name alone where one rule has it; `name@pattern` in a group of rules; `i.name` where a chain
    repeats it. In a cut subtree that, and `@pattern`.
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
            flat = ".".join(
                filter(None, (index, "@".join(filter(None, (name, *groups, cuts[at][g])))))
            )
            while flat in out:  # a cut like a group of rules beside it
                flat += "'"
            out[flat] = at, g
    names = lambda at, g: tuple(flat for flat, place in out.items() if place == (at, g))
    return tuple(tuple(names(at, g) for g in range(len(labels))) for at, labels in enumerate(cuts))
