"""Cuts: several groups of values in one live rule, for disjoint sets of leaves.

`adjust(state, "head/**", learning_rate=1e-4)` gives some leaves their own numbers during a run.
The rule stays one rule: a global norm is over all leaves. The table of numbers gets one more group,
and at every update the whole rule runs once per group, on all leaves, with the numbers of the
group. Each leaf, and each leaf of the optimizer state that belongs to it, is then taken from the
run of its group; XLA drops the rest. Leaves of the optimizer state that belong to no parameter
(counts) exist once per group, because they may depend on its numbers.

This is wrong for a rule that updates a leaf by the *numbers* of another leaf. No rule of optax does
so.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import PyTree, patterns, trees
from tsunax.rules.leaf_owners import owners_of_live
from tsunax.rules.number_table import Numbers, interned, join_numbers, map_live, split_numbers


def states_by_group(live: Any, state: Any, params: PyTree) -> list[Any]:
    """The optax state of each group: moments are shared, each group has its own counters."""
    leaves, treedef = jax.tree.flatten(state.inner)
    owners = owners_of_live(live, params)
    group_states = [state.inner]
    for counters in state.extra:
        group_counters, pairs = iter(counters), zip(leaves, owners, strict=True)
        group_states.append(
            treedef.unflatten([next(group_counters) if o is None else x for x, o in pairs])
        )
    return group_states


def merge_groups(
    live: Any, state: Any, params: PyTree, runs: Sequence[tuple[PyTree, PyTree]]
) -> tuple[PyTree, PyTree, tuple[Any, ...]]:
    """Each leaf from the run of its group; counters from every run."""
    group_of_leaf, owners = state.cut.group_of_leaf, owners_of_live(live, params)
    updates = [jax.tree.leaves(updates_of_run) for updates_of_run, _ in runs]
    inner_leaves = [jax.tree.leaves(inner_of_run) for _, inner_of_run in runs]
    structures = map(jax.tree.structure, runs[0])
    # A leaf without an owner is a counter; `inner` has the counters of group 0.
    new_updates = [updates[g][k] for k, g in enumerate(group_of_leaf)]
    new_inner = [
        inner_leaves[0 if o is None else group_of_leaf[o]][j] for j, o in enumerate(owners)
    ]
    new_updates, new_inner = map(jax.tree.unflatten, structures, (new_updates, new_inner))
    return new_updates, new_inner, tuple(_counters(leaves, owners) for leaves in inner_leaves[1:])


def _counters(leaves: Sequence[Any], owners: Sequence[int | None]) -> tuple[Any, ...]:
    """The leaves that belong to no parameter."""
    return tuple(x for x, o in zip(leaves, owners, strict=True) if o is None)


def counters_by_group(s: Any, params: PyTree) -> tuple[tuple[Any, ...], ...]:
    """For each group of a live state, the leaves of its optax state that belong to no parameter."""
    visible_paths = frozenset(s.scope.paths)
    flags = [path in visible_paths for path in trees.paths(params)]
    with patterns.group_of(params, flags):
        owners = owners_of_live(s.live, trees.partition(params, flags)[0])
    return _counters(jax.tree.leaves(s.inner), owners), *s.extra


def recut(
    opt_state: PyTree,
    numbers: Numbers,
    params: PyTree,
    cuts: Mapping[int, tuple[Any, ...]],
    old_counters: Mapping[int, tuple[Any, ...]] = MappingProxyType({}),
) -> tuple[Any, Any]:
    """The state with other groups of values: `cuts` is {live state: (its new cut, parents)}.

    The new group i inherits the values and counters of the old group `parents[i]`. A new group also
    gets its counters of `old_counters`, `counters_by_group` of another state with this cut, if the
    first group has the counters of that state.
    """

    def with_new_cut(live_index: int, s):
        if live_index not in cuts:
            return s
        cut, parents = cuts[live_index]
        counters = counters_by_group(s, params)
        counters = [counters[p] for p in parents]
        old, first = old_counters.get(live_index), counters[0]
        if old and len(old[0]) == len(first) and not any(map(trees.bits_differ, old[0], first)):
            counters = old
        # Copy them, because two groups must not donate the same buffer.
        extra = tuple(tuple(jnp.array(x, copy=True) for x in xs) for xs in counters[1:])
        return dataclasses.replace(
            s, table=s.table[..., np.asarray(parents), :], extra=extra, cut=interned(cut)
        )

    # Compute on the host: each cut has new shapes, which would compile on a device.
    if not trees.is_traced(numbers.values):
        numbers = dataclasses.replace(numbers, values=np.array(numbers.values))
    return split_numbers(map_live(with_new_cut, join_numbers(opt_state, numbers)))
