"""`rules.flush`: what an unfinished window of `rules.accumulate` holds, applied."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tsunax import guard
from tsunax._core import placement
from tsunax.rules import accumulation
from tsunax.state import TrainState, check_state, trained_part
from tsunax.step import update_unchecked


def windows_flushed(state: TrainState) -> TrainState:
    """`rules.flush`."""
    check_state(state, "flush()")
    if accumulation.any_emitted(state.opt_state) is None:
        return state
    shardings = placement.mesh_shardings(state)
    if shardings is not None:
        there = shardings.of_leaves  # what it computes stays where it was
        return jax.jit(_flushed, out_shardings=there)(placement.resharded(state, there))
    return _flushed(state)


def _flushed(state: TrainState) -> TrainState:
    nothing = jax.tree.map(jnp.zeros_like, trained_part(state))
    new, _ = update_unchecked(
        state, nothing, None, None, "skip", True, {"weight": 0.0, "flush": True}
    )
    old = dataclasses.replace(state, clock=state.clock.at[..., 1].add(1))
    emitted: Any = accumulation.any_emitted(new.opt_state)
    judged = emitted | (new.rejected != state.rejected)
    new = guard.choose(judged, new, old)
    return dataclasses.replace(new, loss_scale=state.loss_scale)
