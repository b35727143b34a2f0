"""Sums and weights: how numbers from many batches become one.

Everything here is a sum and the weight it was taken over, merged by adding and divided once at the
end, so that a mean over micro-batches, devices or batches is never a mean of means.

A metric is a value with three methods: `empty()`, `merge(other)`, `compute()`. The metrics below
are made by `of(predictions, targets, where=None)`; any object with `merge` and `compute` can be
used instead (clu.metrics, metrax, your class). `where` is a mask or weights over the leading
axes, as in `Loss.mean`; elements of weight 0 may be NaN. Any other NaN makes the result NaN, and so
does a target that is not one of the classes.

Sums and counts are float32 for inputs of any dtype (float64 under x64). A count is exact up to 2²⁴
= 16.8 million; beyond, each merge rounds it by at most 6e-8 of itself, and a batch adds nothing
once the count is 2²⁴ times the count of the batch.
"""

from tsunax.metrics.classes import (
    F1,
    Accuracy,
    ConfusionMatrix,
    Perplexity,
    Precision,
    Recall,
    TopK,
)
from tsunax.metrics.means import R2, Mean, MeanSquaredError

__all__ = [
    "Mean", "Accuracy", "TopK", "Perplexity", "ConfusionMatrix", "Precision", "Recall", "F1",
    "MeanSquaredError", "R2",
]  # fmt: skip
