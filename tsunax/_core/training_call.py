"""The call of a loss function that a training step differentiates, seen by the models in it."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tsunax._core import PyTree


@dataclass
class TrainingCall:
    """A call of a loss function, with the leaves of its model state."""

    model_state: list[Any]
    moved: bool = False  # whether a model in train mode returned other leaves

    def note(self, old_state: PyTree, new_state: PyTree) -> None:
        """Note that a model returned `new_state` for its state `old_state`."""
        old_leaves, new_leaves = jax.tree.leaves(old_state), jax.tree.leaves(new_state)
        # Compare shapes, because jax.jit and jax.checkpoint inside a loss function make tracers.
        shapes_of = lambda leaves: [(jnp.shape(x), jnp.result_type(x)) for x in leaves]
        if old_leaves and shapes_of(old_leaves) == shapes_of(self.model_state):
            self.moved |= list(map(id, old_leaves)) != list(map(id, new_leaves))


current: ContextVar[TrainingCall | None] = ContextVar("training_call", default=None)


@contextlib.contextmanager
def training_call(model_state: PyTree) -> Iterator[TrainingCall]:
    """A context in which `current.get()` is this call."""
    token = current.set(call := TrainingCall(jax.tree.leaves(model_state)))
    try:
        yield call
    finally:
        current.reset(token)
