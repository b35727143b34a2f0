"""Rules: optax transformations whose numbers are live, and the few that optax lacks.

It knows optax and trees. It must not know `TrainState`.
"""

from tsunax.rules import optimizers as _optimizers

for _name in _optimizers.__all__:
    globals()[_name] = getattr(_optimizers, _name)

__all__ = _optimizers.__all__
