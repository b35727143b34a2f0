"""Changes of a state between two steps: `flush` for windows, `update_batch_stats`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from tsunax import guard
from tsunax._core import Function, placement
from tsunax._step.evaluation import call_on_mesh
from tsunax._step.loss_fn import LossFn, inputs_of_loss_fn
from tsunax.errors import StateError
from tsunax.loss import check_model_state
from tsunax.rules import accumulation
from tsunax.state import TrainState, check_state, trained_part
from tsunax.states import over_members
from tsunax.step import update_unchecked


def update_batch_stats(loss_fn: Function) -> Function:
    """Make a compiled `f(state, batch, **extra) -> state` that updates `model_state`, not params.

    It runs the forward pass in training mode. For batch statistics that belong to averaged
    parameters, over some batches: `state = update_batch_stats(loss_fn)(averaged(state), batch)`.
    Raises StateError unless `loss_fn` returns a model state with the structure of the old one.
    """
    fn = LossFn.of(loss_fn)

    def update_member(state: TrainState, batch, extra) -> TrainState:
        keywords = fn.keywords(state, extra, train=True)
        loss = fn(*inputs_of_loss_fn(fn, state, state.params, batch, keywords), keywords)
        if loss.model_state is None:
            raise StateError("model_state", "loss_fn", "none", "Loss.mean(..., model_state=...)")
        check_model_state(loss.model_state, state.model_state)
        return state.replace(model_state=loss.model_state, calls=state.calls + 1)

    run = jax.jit(functools.partial(over_members, update_member))

    def call(state: TrainState, batch=None, **extra) -> TrainState:
        return call_on_mesh(run, state, batch, extra, "update_batch_stats()", whole=False)

    return call


def flush(state: TrainState) -> TrainState:
    """Apply the gradient of an unfinished window of `accumulate`, after an epoch or a run.

    The sum in the window is divided by its own weight, not by the weight of a full window. A state
    with empty windows stays as it is, but for `calls`.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.accumulate(ts.rules.sgd(0.1), every=4), {"w": jnp.zeros(2)})
    >>> state, _ = ts.update(state, {"w": jnp.ones(2)})
    >>> ts.flush(state).params["w"]
    Array([-0.1, -0.1], dtype=float32)
    """
    check_state(state, "flush()")
    if accumulation.any_emitted(state.opt_state) is None:
        return state
    shardings_of_leaves, shardings = None, placement.mesh_shardings(state)
    if shardings is not None:
        shardings_of_leaves = shardings.of_leaves  # the result stays on its devices
        state = placement.resharded(state, shardings_of_leaves)
    return jax.jit(_each_flushed, out_shardings=shardings_of_leaves)(state)


def _each_flushed(state: TrainState) -> TrainState:
    return over_members(_flushed, state)


def _flushed(state: TrainState) -> TrainState:
    zeros, extra = jax.tree.map(jnp.zeros_like, trained_part(state)), {"weight": 0.0, "flush": True}
    new, _ = update_unchecked(state, zeros, None, None, "skip", True, extra)
    old = dataclasses.replace(state, clock=state.clock.at[1].add(1))
    is_applied: Any = accumulation.any_emitted(new.opt_state)
    judged = is_applied | (new.rejected != state.rejected)
    new = guard.choose(judged, new, old)
    return dataclasses.replace(new, loss_scale=state.loss_scale)
