"""Tuning: many runs of an objective, one for each choice of a search space.

It knows nothing of states or steps.
"""

from tsunax.tuning import spaces
from tsunax.tuning.tuner import Pruned, Result, Trial, as_trainable, halving, median, read, tune

__all__ = [
    "Pruned",
    "Result",
    "Trial",
    "as_trainable",
    "halving",
    "median",
    "read",
    "spaces",
    "tune",
]
