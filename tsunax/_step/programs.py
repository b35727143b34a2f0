"""The compiled programs of a step, one for each placement of its state, and where its arrays go."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import numpy as np

from tsunax._core import Extra, Function, PyTree, checks, trees
from tsunax.errors import StateError
from tsunax.state import TrainState, check_state, donated


def place_state(moving: PyTree, fixed: PyTree = ()) -> tuple[Any, PyTree, PyTree]:
    """The `MeshShardings` of a state (None: on one device), and its two parts moved to them."""
    arrays = (x for x in jax.tree.leaves((moving, fixed)) if not trees.is_traced(x))
    shardings = filter(None, (getattr(x, "sharding", None) for x in arrays))
    if not any(len(sharding.device_set) > 1 for sharding in shardings):
        return None, moving, fixed
    from tsunax._core.placement import mesh_shardings, resharded

    first, second = mesh_shardings(moving, fixed), mesh_shardings(fixed, moving)
    if first is None or second is None:
        return None, moving, fixed
    return first, resharded(moving, first.of_leaves), resharded(fixed, second.of_leaves)


def check_byte_order(batch: PyTree, extra: Extra) -> None:
    """Raise DataError for a NumPy array with another byte order than the machine's.

    jit raises for such an array when it compiles, but a program that is compiled already reads its
    bytes in the wrong order.
    """
    for x in jax.tree.leaves((batch, extra)):  # at each step: a loop takes half of `any`'s time
        if isinstance(x, np.ndarray) and not x.dtype.isnative:
            leaves = (*trees.leaves_at("batch", batch), *trees.leaves_at("extra", extra))
            checks.check_dtype(x.dtype, next(path for path, leaf in leaves if leaf is x))


def call_on_mesh(
    run: Function, state: TrainState, batch: PyTree, extra: Extra, where: str, *, whole: bool
) -> PyTree:
    """`run(state, batch, extra)` on the mesh of the state."""
    check_state(state, where, batch)
    shardings = place_state(state.params)[0]
    try:
        check_byte_order(batch, extra)
        if shardings is not None and not trees.is_tracing():
            from tsunax._step import on_mesh

            batch, extra = on_mesh.place_as_it_is(state, shardings, batch, extra, whole=whole)
        return run(state, batch, extra)
    except Exception as error:
        from tsunax._core.source_lines import hide_own_frames

        hide_own_frames(error)
        raise


class Traced(NamedTuple):
    """The arguments of one trace of a step: shapes and types, no values."""

    kind: str  # "step", or "loop" for a trace in a fused loop
    shardings: PyTree  # on a mesh the sharding of each array that the step changes
    state: PyTree  # with a `jax.typeof` for each array
    arguments: dict[str, Any]  # {name: tree}, with a `jax.typeof` for each array

    @classmethod
    def from_arguments(
        cls, kind: str, shardings: Any, state: TrainState, arguments: Extra
    ) -> Traced:
        of_leaves = None if shardings is None else shardings.of_leaves
        return cls(kind, of_leaves, *jax.tree.map(jax.typeof, (state, arguments)))


class Programs(dict[Any, Any]):
    """The compiled functions of a step by the placement of its arguments, built at first use."""

    def __init__(self, build: Function) -> None:
        super().__init__()
        self._build = build
        self.traced: int = 0  # how often a loop was traced
        self._sharding: Any = None  # the sharding of the last clock, if it was on one device

    def __missing__(self, shardings: Hashable) -> Function:
        self[shardings] = self._build(shardings)
        return self[shardings]

    def place_state(self, state: TrainState, moving: PyTree, fixed: PyTree) -> tuple[Any, Any, Any]:
        """`place_state`, without a look at every leaf if the state is placed like the last one.

        Then its clock has the same sharding object: all arrays that a program returns share one.
        Raises StateError for a state that was donated.
        """
        clock = state.clock
        if self._sharding is not None and getattr(clock, "sharding", None) is self._sharding:
            if clock.is_deleted():
                raise StateError(donated("step()"))
            return None, moving, fixed
        if any(map(trees.is_gone, jax.tree.leaves((moving, fixed)))):
            raise StateError(donated("step()"))
        if not all(map(trees.is_placed, jax.tree.leaves((moving, fixed)))):
            checks.check_arrays(state, "state")
        shardings, moving, fixed = place_state(moving, fixed)
        is_on_one_device = (
            shardings is None and trees.is_placed(clock) and len(clock.devices()) == 1
        )
        self._sharding = clock.sharding if is_on_one_device else None
        return shardings, moving, fixed
