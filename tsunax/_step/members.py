"""Populations: states with a leading axis of members, and functions mapped over it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from tsunax._core import placement, trees
from tsunax.errors import DeviceError, StateError
from tsunax.state import TrainState
from tsunax.states import COUNTED, States


def members_of(state: Any) -> int | None:
    """How many members a population has; None for a single state or another object."""
    if not isinstance(state, COUNTED):
        return None
    shape: tuple[int, ...] = state.clock.shape
    return shape[0] if len(shape) > 1 else None


def refuse_population(
    state: Any, where: str, fix: str = "Give ts.populations.member(state, i)."
) -> None:
    """Raise StateError for a population."""
    if members_of(state) is not None:
        raise StateError("state", where, got="a population", expected="one state", fix=fix)


def row_axes(state: Any, mesh: Any) -> tuple[str, ...]:
    """The axes of a mesh that divide rows; none for a population: each member gets all rows."""
    return placement.data_axes(mesh) if members_of(state) is None else ()


def member_axes(state: Any, mesh: Any) -> tuple[str, ...] | None:
    """The axes of a mesh over which the members of a population are spread; None for another tree.

    Raises DeviceError for members that the devices do not divide.
    """
    n = members_of(state)
    if n is not None and n % mesh.size:
        expected = f"a multiple of {mesh.size} devices"
        raise DeviceError("population", "shard()", f"{n} members", expected)
    return None if n is None else mesh.axis_names


def chosen_members(state: TrainState, members: ArrayLike | None, caller: str) -> np.ndarray:
    """A flag for each member of a population: all, or the members at indices or of a mask.

    The flag of a single state has no axis. Raises StateError for other indices.
    """
    flags, n = np.ones(state.clock.shape[:-1], bool), members_of(state)
    if members is None:
        return flags
    indices = np.array(members, ndmin=1)
    is_mask = indices.dtype == bool
    fits = n is not None and (is_mask or np.all((-n <= indices) & (indices < n)))
    if not fits or (not is_mask and len({*indices.flat}) < indices.size):
        expected = f"a mask, or different indices of members below {n or 0}"
        raise StateError("members", caller, trees.describe(members), expected)
    flags[()] = False
    flags[indices if indices.size else ()] = indices.size > 0
    return flags


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class each:
    """A tree with one value, such as a batch, for each member of a population.

    Its arrays have a first axis of members: `step(runs, ts.populations.each(batches))`.

    >>> each(jax.numpy.zeros((3, 8))).tree.shape
    (3, 8)
    """

    tree: Any


def check_local_members(state: Any, where: str) -> None:
    """Raise StateError for a population with members on devices of several processes."""
    if members_of(state) is not None and not state.clock.is_fully_addressable:
        got, expected = "members on devices of several processes", "members of its own for each"
        fix = "Write ts.shard(population, ts.mesh(devices=jax.local_devices()))."
        raise StateError("population", where, got, expected, fix)


def over_members(f: Callable, state: TrainState | States, *trees, group_size: int | None = None):
    """Map `f(state, *trees)` over the members of a population, in groups of `group_size`.

    A tree in `each` has one value for each member; the members share all other trees.
    """
    leaves, treedef = jax.tree.flatten(trees, is_leaf=_is_each)
    if members_of(state) is None:
        return f(state, *trees)

    def call_member(args):
        state, own_values = args[0], iter(args[1])
        own_leaves = [next(own_values) if _is_each(x) else x for x in leaves]
        return f(state, *treedef.unflatten(own_leaves))

    args = state, [x.tree for x in leaves if _is_each(x)]
    if group_size is None:
        return jax.vmap(call_member)(args)
    return jax.lax.map(call_member, args, batch_size=group_size)


def of_first_member(state: TrainState, *trees: Any) -> tuple[Any, ...]:
    """`(state, *trees)` of the first member of a population; of a single state all as they are."""
    if members_of(state) is None:
        return state, *trees
    first = jax.jit(lambda tree: jax.tree.map(lambda x: x[0], tree))
    of_first = lambda x: first(x.tree) if _is_each(x) else x
    return first(state), *jax.tree.map(of_first, trees, is_leaf=_is_each)


def _is_each(x) -> bool:
    return isinstance(x, each)
