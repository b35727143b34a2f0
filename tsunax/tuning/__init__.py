"""Tuning: many runs of an objective, one for each choice of a search space.

It does not depend on states or steps.
"""

from tsunax.tuning import spaces
from tsunax.tuning._study import as_optuna, read
from tsunax.tuning._trials import Pruned, Result, Trial
from tsunax.tuning.tuner import as_trainable, tune

__all__ = ["Pruned", "Result", "Trial", "as_optuna", "as_trainable", "read", "spaces", "tune"]
