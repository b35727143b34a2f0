"""tsunax: training for JAX as pure functions over one value, the training state.

    import tsunax as ts

    state = ts.setup(ts.rules.adam(1e-3), params)
    step = ts.train_step(loss_fn)
    for batch in data:
        state, info = step(state, batch)

Read `state.py` (what is carried), `step.py` (how it changes), and you have understood it.
"""

from tsunax import averages, errors, losses, metrics, models, precision, regularize, rules, schedules
from tsunax._loss import Loss
from tsunax.hyper import adjust, freeze, hyperparams, thaw
from tsunax.program import EvalStep, TrainStep, eval_step, refresh, train_step
from tsunax.state import TrainState, averaged, setup, trainable
from tsunax.step import StepInfo, flush, update, value_and_grad

__version__ = "0.1.0.dev0"

__all__ = [
    "EvalStep",
    "Loss",
    "StepInfo",
    "TrainState",
    "TrainStep",
    "adjust",
    "averaged",
    "averages",
    "errors",
    "eval_step",
    "flush",
    "freeze",
    "hyperparams",
    "losses",
    "metrics",
    "models",
    "precision",
    "refresh",
    "regularize",
    "rules",
    "schedules",
    "setup",
    "thaw",
    "train_step",
    "trainable",
    "update",
    "value_and_grad",
]
