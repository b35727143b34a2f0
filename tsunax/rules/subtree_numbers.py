"""Cuts: several groups of values in one live rule, for disjoint sets of leaves.

`adjust(state, "head/**", learning_rate=1e-4)` gives some leaves numbers of their own during a run.
The rule stays one rule: a global norm is over all leaves. The table of numbers gets one more group,
and at every update the whole rule runs once per group, on all leaves, with the numbers of the
group. Each leaf, and each leaf of the optimizer state that belongs to it, is then taken from the
run of its own group; XLA drops the rest. Leaves of the optimizer state that belong to no parameter
(counts) exist once per group, because they may depend on its numbers.

A rule would break this if its update of one leaf depended on the *numbers* for another one. No rule
of optax does.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import PyTree, patterns, trees
from tsunax.rules.leaf_owners import owners_of_live
from tsunax.rules.number_table import Numbers, hoist, interned, lower, map_live


@dataclass(frozen=True)
class Cut:
    """Which group of values each leaf takes, and what each group is called."""

    of: tuple[int, ...]
    labels: tuple[str, ...]


def inners(live: Any, state: Any, params: PyTree) -> list[Any]:
    """The optax state as each group sees it: shared moments, own counters."""
    leaves, treedef = jax.tree.flatten(state.inner)
    owners = owners_of_live(live, params)
    out = [state.inner]
    for counters in state.extra:
        own, pairs = iter(counters), zip(leaves, owners, strict=True)
        out.append(treedef.unflatten([next(own) if o is None else x for x, o in pairs]))
    return out


def merge_groups(
    live: Any, state: Any, params: PyTree, runs: Sequence[tuple[PyTree, PyTree]]
) -> tuple[PyTree, PyTree, tuple[Any, ...]]:
    """Each leaf from the run of its group; counters from every run."""
    of, owners = state.cut.of, owners_of_live(live, params)
    updates, inners = ([jax.tree.leaves(x) for x in halves] for halves in zip(*runs, strict=True))
    shapes = map(jax.tree.structure, runs[0])
    chosen = [updates[g][k] for k, g in enumerate(of)]
    inner = [inners[0 if o is None else of[o]][j] for j, o in enumerate(owners)]
    chosen, inner = map(jax.tree.unflatten, shapes, (chosen, inner))
    return chosen, inner, tuple(_counters(leaves, owners) for leaves in inners[1:])


def _counters(leaves: Sequence[Any], owners: Sequence[int | None]) -> tuple[Any, ...]:
    """The leaves that belong to no parameter."""
    return tuple(x for x, o in zip(leaves, owners, strict=True) if o is None)


def recut(
    opt_state: PyTree, numbers: Numbers, params: PyTree, cuts: Mapping[int, tuple[Any, ...]]
) -> tuple[Any, Numbers | None]:
    """The state with other groups of values: `cuts` is {live state: (its new cut, parents)}.

    The new group i inherits the values and counters of the old group `parents[i]`.
    """

    def one(place: int, s):
        if place not in cuts:
            return s
        seen = frozenset(s.paths)
        flags = [path in seen for path in trees.paths(params)]
        cut, parents = cuts[place]
        with patterns.group_of(params, flags):
            owners = owners_of_live(s.live, trees.partition(params, flags)[0])
        counters = (_counters(jax.tree.leaves(s.inner), owners), *s.extra)
        # copies: two groups must not donate one buffer
        extra = tuple(tuple(jnp.array(x, copy=True) for x in counters[p]) for p in parents[1:])
        table = s.table[..., np.asarray(parents), :]
        return dataclasses.replace(s, table=table, extra=extra, cut=interned(cut))

    # on the host: each cut has shapes of its own, and they would all compile
    if not trees.is_traced(numbers.values):
        numbers = dataclasses.replace(numbers, values=np.array(numbers.values))
    return hoist(map_live(one, lower(opt_state, numbers)))
