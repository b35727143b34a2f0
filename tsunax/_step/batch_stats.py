"""`averages.update_batch_stats`: the forward pass in training mode, for its model state alone."""

from __future__ import annotations

from collections.abc import Callable

import jax

from tsunax._core import trees
from tsunax._step.loss_fn import LossFn, seen_by
from tsunax.errors import LossError
from tsunax.loss import check_model_state
from tsunax.program import place_state, raise_fault
from tsunax.state import TrainState, check_state


def batch_stats_updated(loss_fn: Callable) -> Callable:
    """`averages.update_batch_stats`."""
    fn = LossFn.of(loss_fn, "update_batch_stats()")

    @jax.jit
    def run(state: TrainState, batch, extra) -> TrainState:
        keywords = fn.keywords(state, batch, extra, train=True)
        loss = fn(*seen_by(fn, state, state.params, batch, keywords), keywords)
        if loss.model_state is None:
            expected = "ts.Loss.mean(values, model_state=...)"
            raise LossError("model_state", "update_batch_stats()", "None", expected)
        check_model_state(loss.model_state, state.model_state)
        return state.replace(model_state=loss.model_state, calls=state.calls + 1)

    def call(state: TrainState, batch, **extra) -> TrainState:
        check_state(state, "update_batch_stats()", batch)
        try:
            shardings = place_state(state.params)[0]
            if shardings is not None and not trees.is_tracing():
                from tsunax._step import on_mesh

                batch, extra = on_mesh.place_as_it_is(state, shardings, batch, extra)
            return run(state, batch, extra)
        except Exception as error:
            raise_fault(error, state, batch, extra)
            raise

    return call
