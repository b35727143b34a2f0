"""tsunax: training for JAX as pure functions over one value, the training state.

    import tsunax as ts

    state = ts.setup(ts.rules.adam(1e-3), params)
    step = ts.train_step(loss_fn)
    for batch in data:
        state, info = step(state, batch)

Read `state.py` (what is carried), `step.py` (how it changes), `loop.py` (who calls it), in this order.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from tsunax import averages, errors, precision, rules, schedules
from tsunax._members import each
from tsunax.hyper import adjust, freeze, hyperparams, thaw
from tsunax.loss import Loss
from tsunax.program import EvalStep, TrainStep, eval_step, refresh, train_step
from tsunax.state import TrainState, averaged, setup, trainable
from tsunax.step import StepInfo, flush, update, value_and_grad

if _TYPE_CHECKING:  # loaded when they are first asked for
    from tsunax import (
        callbacks,
        checkpoint,
        distributed,
        exchange,
        loggers,
        losses,
        metrics,
        models,
        regularize,
        spaces,
        sweep,
        testing,
        tuning,
    )
    from tsunax._ahead import prefetch
    from tsunax.checkpoint import Checkpoints
    from tsunax.data import batches
    from tsunax.evaluation import evaluate
    from tsunax.faults import replay
    from tsunax.figures import plot, plot_text
    from tsunax.hardware import (
        device,
        device_info,
        device_of,
        devices,
        functional,
        prefer,
        preferred,
        simulate,
        supported_devices,
        to_device,
        to_host,
    )
    from tsunax.history import History
    from tsunax.insight import Description, describe, measured_peak
    from tsunax.loop import fit, iterate, train_epoch, train_steps
    from tsunax.migration import migrate
    from tsunax.range_test import find_learning_rate
    from tsunax.reproduce import check_reproducible, fingerprint, isolated_rng, reproducible, worker_seed
    from tsunax.search import find_accumulation, find_batch_size
    from tsunax.sharding import explain, mesh, shard
    from tsunax.sweep import member, population, select
    from tsunax.tuning import tune

_LATER = {
    "checkpoint": ("Checkpoints",),
    "data": ("batches",),
    "_ahead": ("prefetch",),
    "evaluation": ("evaluate",),
    "figures": ("plot", "plot_text"),
    "hardware": (
        *("device", "device_info", "device_of", "devices", "functional", "prefer", "preferred", "simulate"),
        *("supported_devices", "to_device", "to_host"),
    ),
    "history": ("History",),
    "faults": ("replay",),
    "insight": ("Description", "describe", "measured_peak"),
    "loop": ("fit", "iterate", "train_epoch", "train_steps"),
    "migration": ("migrate",),
    "reproduce": ("check_reproducible", "fingerprint", "isolated_rng", "reproducible", "worker_seed"),
    "range_test": ("find_learning_rate",),
    "search": ("find_accumulation", "find_batch_size"),
    "sharding": ("explain", "mesh", "shard"),
    "sweep": ("member", "population", "select"),
    "tuning": ("tune",),
}
_HOME = {name: module for module, names in _LATER.items() for name in names}

__version__ = "0.1.0.dev0"

__all__ = [
    "Checkpoints",
    "Description",
    "EvalStep",
    "History",
    "Loss",
    "StepInfo",
    "TrainState",
    "TrainStep",
    "adjust",
    "averaged",
    "averages",
    "batches",
    "callbacks",
    "check_reproducible",
    "checkpoint",
    "describe",
    "device",
    "device_info",
    "device_of",
    "devices",
    "distributed",
    "each",
    "errors",
    "eval_step",
    "evaluate",
    "exchange",
    "explain",
    "find_accumulation",
    "find_batch_size",
    "find_learning_rate",
    "fingerprint",
    "fit",
    "flush",
    "freeze",
    "functional",
    "hyperparams",
    "isolated_rng",
    "iterate",
    "loggers",
    "losses",
    "measured_peak",
    "member",
    "mesh",
    "metrics",
    "migrate",
    "models",
    "plot",
    "plot_text",
    "population",
    "precision",
    "prefer",
    "preferred",
    "prefetch",
    "refresh",
    "regularize",
    "replay",
    "reproducible",
    "rules",
    "schedules",
    "select",
    "setup",
    "shard",
    "simulate",
    "spaces",
    "supported_devices",
    "sweep",
    "testing",
    "thaw",
    "to_device",
    "to_host",
    "train_epoch",
    "train_step",
    "train_steps",
    "trainable",
    "tune",
    "tuning",
    "update",
    "value_and_grad",
    "worker_seed",
]


def __getattr__(name: str) -> _Any:
    if name not in __all__:
        raise AttributeError(f"module 'tsunax' has no attribute {name!r}")
    if name not in _HOME:
        return _importlib.import_module(f"tsunax.{name}")
    value = globals()[name] = getattr(_importlib.import_module(f"tsunax.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
