"""`averages.update_batch_stats`: the forward pass in training mode, for its model state alone."""

from collections.abc import Callable

import jax

from tsunax._step.loss_fn import LossFn, seen_by
from tsunax.errors import LossError
from tsunax.loss import check_model_state
from tsunax.program import call_on_mesh
from tsunax.state import TrainState


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
        of_state = lambda *args: run(state, *args)
        return call_on_mesh(of_state, state, batch, extra, "update_batch_stats()", whole=False)

    return call
