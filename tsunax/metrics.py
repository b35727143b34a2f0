"""Sums and weights: how numbers from many batches become one.

Everything here is a sum and the weight it was taken over, merged by adding and divided once at the
end, so that a mean over micro-batches, devices or batches is never a mean of means.

A metric is a value with three verbs: `empty()`, `merge(other)`, `compute()`. Those below are made
by `of(predictions, targets, where=None)`; any object with `merge` and `compute` may stand in their
place (clu.metrics, metrax, a class of yours). `where` is a mask or weights over the leading axes,
as in `Loss.mean`; what it leaves out may be NaN. Anything else that is NaN makes the result NaN,
and so does a target that is not one of the classes.

Sums and counts are float32 whatever comes in (float64 under x64). A count is exact up to 2²⁴ = 16.8
million; beyond, each merge rounds it by at most 6e-8 of itself, and a batch adds nothing once the
count is 2²⁴ times its own.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import checks, trees
from tsunax._core.checks import as_array
from tsunax.errors import LossError, message

_Metric = TypeVar("_Metric")


def _add(self: _Metric, other: _Metric) -> _Metric:
    """The metric of both batches together. Raises LossError for one of another kind or shape."""
    ours, theirs = ([np.shape(x) for x in jax.tree.leaves(m)] for m in (self, other))
    if jax.tree.structure(self) != jax.tree.structure(other) or ours != theirs:
        place = f"{type(self).__name__}.merge()"
        raise LossError(
            message("other", place, trees.describe(other), f"{trees.describe(self)}, made alike")
        )
    return jax.tree.map(operator.add, self, other)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """A weighted mean under way: `compute() = total / weight`, NaN over nothing.

    >>> Mean.of([1.0, 2.0, 6.0], where=[1, 1, 0]).merge(Mean.of([6.0])).compute()
    Array(3., dtype=float32)
    """

    total: Any  # f32 scalar: Σ weight · value
    weight: Any  # f32 scalar: Σ weight

    @classmethod
    def empty(cls) -> Mean:
        return cls(
            jnp.zeros(()), jnp.zeros(())
        )  # under x64 float64: what merges with it stays what it is

    @classmethod
    def of(cls, values, where=None) -> Mean:
        """From values of any shape and a mask or weights that broadcast from the left."""
        return cls(*weighted_sum(jnp.asarray(values), where, "Mean.of()"))

    merge = _add

    def compute(self):
        return self.total / self.weight


def weighted_sum(values, where=None, place: str = "Loss.mean()"):
    """(Σ where · values, Σ where) in float32; what `where` leaves out may be NaN, in value and
    gradient.
    """
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    if where is None:
        return jnp.sum(values), np.float32(values.size)
    where = jax.lax.stop_gradient(
        _weights(where, values, place)
    )  # data: in a total alone it would be half a gradient
    return jnp.sum(jnp.where(where != 0, values, 0) * where), jnp.sum(where)


def _weights(where, values, place: str):
    """`where` as an array like `values`.

    Raises LossError if it has not the leading axes of them.
    """
    where = as_array("where", where, place) if where is not None else jnp.ones((), values.dtype)
    if not (checks.is_real(where) or where.dtype == np.bool_):
        raise LossError(message("where", place, trees.describe(where), "a mask, or real weights"))
    if where.ndim > values.ndim or any(
        w not in (1, v) for w, v in zip(where.shape, values.shape, strict=False)
    ):
        raise LossError(
            message(
                "where",
                place,
                f"shape {where.shape}",
                f"the leading axes of values, {values.shape}",
            )
        )
    where = where.astype(values.dtype).reshape(*where.shape, *(1,) * (values.ndim - where.ndim))
    return jnp.broadcast_to(where, values.shape)


# ------------------------------------------------------------------------------------------ metrics


def _class_ids(predictions, targets, place: str, classes: int | None = None):
    """Predictions and targets as arrays, and the number of classes where it is known.

    Raises LossError.
    """
    predictions = as_array("predictions", predictions, place)
    targets = as_array("targets", targets, place)
    has_scores = predictions.ndim > targets.ndim
    for what, x, fix in (
        ("targets", targets, "Of one-hot targets: targets.argmax(-1)."),
        ("predictions", predictions, "Of binary scores: logits > 0, or probabilities > 0.5."),
    ):
        is_ids = jnp.issubdtype(x.dtype, np.integer) or x.dtype == np.bool_
        if not is_ids and not (has_scores and what == "predictions"):
            raise LossError(message(what, place, trees.describe(x), "class ids, int or bool", fix))
    if predictions.shape[: targets.ndim] != targets.shape or predictions.ndim > targets.ndim + 1:
        expected = (
            f"{targets.shape}, class ids as in targets, or {(*targets.shape, 'classes')}, scores"
        )
        raise LossError(message("predictions", place, f"shape {predictions.shape}", expected))
    if has_scores and classes not in (None, predictions.shape[-1]):
        raise LossError(
            message(
                "classes", place, classes, f"{predictions.shape[-1]}, the last axis of predictions"
            )
        )
    return predictions, targets.astype(jnp.int32), predictions.shape[-1] if has_scores else classes


def _at(scores, targets):
    """The score of each target; NaN for one that is no class."""
    targets = jnp.where(targets < 0, scores.shape[-1], targets)  # -1 would be the last class
    return jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]


def _hits(predictions, targets, k: int, place: str):
    """1 where the target is among the k best, of equal scores the first; NaN for NaN scores and
    unknown targets.
    """
    predictions, targets, classes = _class_ids(predictions, targets, place)
    if classes is None:
        return (predictions == targets).astype(jnp.float32)
    ids, own = (
        jnp.arange(classes).reshape(*(1,) * targets.ndim, classes),
        _at(predictions, targets)[..., None],
    )
    before = (predictions > own) | ((predictions == own) & (ids < targets[..., None]))
    known = (targets >= 0) & (targets < classes) & ~jnp.any(jnp.isnan(predictions), axis=-1)
    return jnp.where(known, (jnp.sum(before, axis=-1) < k).astype(jnp.float32), jnp.nan)


def _no_mean(cls):
    """Of no rows: what merging starts from."""
    return cls(Mean.empty())


def _compute_mean(self):
    """An f32 scalar; NaN over nothing."""
    return self.mean.compute()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accuracy:
    """The share of predictions that are right: `Σ where · (prediction == target) / Σ where`.

    Of scores, the class with the highest one is predicted, of equal ones the first.

    >>> logits = jnp.array([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0], [9.0, 0.0]])
    >>> Accuracy.of(logits, jnp.array([0, 1, 1, 0]), where=jnp.array([1, 1, 1, 0])).compute()
    Array(0.6666667, dtype=float32)
    """

    mean: Mean

    @classmethod
    def of(cls, predictions, targets, where=None) -> Accuracy:
        """From scores (..., classes), or class ids (...), and the class ids (...) that are
        right.
        """
        hits = _hits(predictions, targets, 1, "Accuracy.of()")
        return cls(Mean(*weighted_sum(hits, where, "Accuracy.of()")))

    empty = classmethod(_no_mean)
    merge = _add
    compute = _compute_mean


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TopK:
    """The share of targets that are among the `k` classes with the highest scores, of equal ones
    the first.

    >>> scores = jnp.array([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]])
    >>> TopK.of(scores, jnp.array([1, 2]), k=2).compute()
    Array(0.5, dtype=float32)
    """

    mean: Mean
    k: int = field(metadata={"static": True})

    @classmethod
    def empty(cls, *, k: int = 5) -> TopK:
        return cls(Mean.empty(), k)

    @classmethod
    def of(cls, predictions, targets, where=None, *, k: int = 5) -> TopK:
        """From scores (..., classes) and the class ids (...) that are right.

        Raises LossError for k > classes.
        """
        classes = np.shape(predictions)[-1] if np.ndim(predictions) > np.ndim(targets) else 0
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 0 < k <= classes:
            got = f"{k} with predictions of shape {np.shape(predictions)}"
            raise LossError(
                message(
                    "k", "TopK.of()", got, "1 to the number of classes, the last axis of scores"
                )
            )
        hits = _hits(predictions, targets, k, "TopK.of()")
        return cls(Mean(*weighted_sum(hits, where, "TopK.of()")), k)

    merge = _add
    compute = _compute_mean


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Perplexity:
    """`exp(mean of -log softmax(logits)[target])`: as uncertain as a choice among so many equal
    ones.

    Where the losses of the tokens are there already: `Perplexity(Mean.of(losses, where))`.

    >>> Perplexity.of(jnp.zeros((2, 8)), jnp.array([3, 5])).compute()
    Array(8., dtype=float32)
    """

    mean: Mean  # of the negative log-likelihood, in nats

    @classmethod
    def of(cls, predictions, targets, where=None) -> Perplexity:
        """From logits (..., classes) and the class ids (...) that are right."""
        logits, targets, classes = _class_ids(predictions, targets, "Perplexity.of()")
        if classes is None:
            expected = f"logits of shape {(*targets.shape, 'classes')}"
            raise LossError(
                message("predictions", "Perplexity.of()", trees.describe(logits), expected)
            )
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        losses = -_at(jax.nn.log_softmax(logits), targets)
        return cls(Mean(*weighted_sum(losses, where, "Perplexity.of()")))

    def compute(self):
        return jnp.exp(self.mean.compute())

    empty = classmethod(_no_mean)
    merge = _add


def _pairs(predictions, targets, where, classes: int | None, place: str):
    """Flat class ids predicted and right, their weights (NaN for what is no class), and the number
    of classes.
    """
    predictions, targets, classes = _class_ids(predictions, targets, place, classes)
    if classes is None:
        fix = "Class ids do not tell how many there are."
        raise LossError(message("classes", place, "None", "the number of classes", fix))
    known = (targets >= 0) & (targets < classes)
    if predictions.ndim > targets.ndim:
        known &= ~jnp.any(jnp.isnan(predictions), axis=-1)
        predictions = jnp.argmax(predictions, axis=-1)
    predictions = predictions.astype(jnp.int32)
    known &= (predictions >= 0) & (predictions < classes)
    weights = _weights(where, jnp.zeros(targets.shape), place)
    weights = jnp.where(known | (weights == 0), weights, jnp.nan)
    return jnp.ravel(predictions), jnp.ravel(targets), jnp.ravel(weights), classes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ConfusionMatrix:
    """How often each class was taken for each: rows are targets, columns predictions.

    >>> ConfusionMatrix.of(jnp.array([0, 1, 1]), jnp.array([0, 1, 0]), classes=2).compute()
    Array([[1., 1.],
           [0., 1.]], dtype=float32)
    """

    counts: Any  # f32[classes, classes]: Σ weight

    @classmethod
    def empty(cls, classes: int) -> ConfusionMatrix:
        return cls(jnp.zeros((classes, classes), jnp.float32))

    @classmethod
    def of(cls, predictions, targets, where=None, *, classes: int | None = None) -> ConfusionMatrix:
        """From scores (..., classes), or class ids (...) and `classes`, and the class ids (...)
        that are right.
        """
        predicted, actual, weights, n = _pairs(
            predictions, targets, where, classes, "ConfusionMatrix.of()"
        )
        counts = jnp.zeros((n, n), jnp.float32).at[actual, predicted].add(weights, mode="drop")
        return cls(
            counts + 0 * jnp.sum(weights)
        )  # a NaN is everybody's, also where its cell was dropped

    def compute(self):
        return self.counts

    merge = _add


def _check_average(average, classes: int | None, place: str) -> None:
    if average is not None and not checks.is_one_of(
        average, ("binary", "macro", "micro", "weighted")
    ):
        expected = "one of 'binary', 'macro', 'micro', 'weighted', None"
        raise LossError(message("average", place, trees.describe(average), expected))
    if average == "binary" and classes != 2:
        fix = "Choose 'macro', 'micro' or 'weighted', or None for each class."
        raise LossError(message("average", place, f"'binary' with {classes} classes", "2", fix))


def _no_class_sums(cls, classes: int = 2, *, average: str | None = "binary"):
    """Of no rows: what merging starts from."""
    _check_average(average, classes, f"{cls.__name__}.empty()")
    return cls(*jnp.zeros((3, classes), jnp.float32), average)


def _class_sums(
    cls, predictions, targets, where=None, *, classes: int = 2, average: str | None = "binary"
):
    """From scores (..., classes), or class ids (...) and `classes`, and the class ids (...) that
    are right.
    """
    place = f"{cls.__name__}.of()"
    classes = np.shape(predictions)[-1] if np.ndim(predictions) > np.ndim(targets) else classes
    _check_average(average, classes, place)
    predicted, actual, weights, n = _pairs(predictions, targets, where, classes, place)
    zeros = jnp.zeros(n, jnp.float32) + 0 * jnp.sum(weights)  # a NaN is everybody's
    sums = (
        zeros.at[ids].add(w, mode="drop")
        for ids, w in (
            (actual, jnp.where(predicted == actual, weights, 0)),
            (predicted, weights),
            (actual, weights),
        )
    )
    return cls(*sums, average)


def _ratio(a, b):
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))


def _averaged(metric: Precision | Recall | F1, above, below):
    """`above / below` of each class, averaged as the metric asks."""
    if metric.average == "micro":
        return _ratio(jnp.sum(above), jnp.sum(below))
    each = _ratio(above, below)
    if metric.average is None:
        return each
    if metric.average == "binary":
        return each[1]
    occurs = jnp.where(metric.predicted + metric.actual == 0, 0.0, 1.0)
    weights = metric.actual if metric.average == "weighted" else occurs
    return _ratio(jnp.sum(each * weights), jnp.sum(weights))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Precision:
    """How much of what was predicted is right: `hits / predicted` of each class.

    `average` is "binary" (class 1 of two), "macro" (the plain mean over the classes that occur in
    targets or predictions), "weighted" (by how often each occurs in targets), "micro" (sums over
    classes first), or None (an array with each class). A ratio over nothing is 0. All as in
    scikit-learn.

    >>> Precision.of(jnp.array([1, 1, 1, 0]), jnp.array([1, 1, 0, 1])).compute()
    Array(0.6666667, dtype=float32)
    """

    hits: Any  # f32[classes]: Σ weight where the class was predicted and right
    predicted: Any  # f32[classes]: Σ weight where it was predicted
    actual: Any  # f32[classes]: Σ weight where it was right
    average: str | None = field(metadata={"static": True})

    def compute(self):
        return _averaged(self, self.hits, self.predicted)

    empty = classmethod(_no_class_sums)
    of = classmethod(_class_sums)
    merge = _add


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Recall:
    """How much of what is there was found: `hits / actual` of each class, averaged as in
    `Precision`.

    >>> Recall.of(jnp.array([1, 1, 1, 0]), jnp.array([1, 1, 0, 0]), average=None).compute()
    Array([0.5, 1. ], dtype=float32)
    """

    hits: Any  # as in Precision
    predicted: Any
    actual: Any
    average: str | None = field(metadata={"static": True})

    def compute(self):
        return _averaged(self, self.hits, self.actual)

    empty = classmethod(_no_class_sums)
    of = classmethod(_class_sums)
    merge = _add


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class F1:
    """`2 · hits / (predicted + actual)` of each class, the harmonic mean of both, averaged as in
    `Precision`.

    >>> F1.of(jnp.array([1, 1, 1, 0]), jnp.array([1, 1, 0, 0])).compute()
    Array(0.8, dtype=float32)
    """

    hits: Any  # as in Precision
    predicted: Any
    actual: Any
    average: str | None = field(metadata={"static": True})

    def compute(self):
        return _averaged(self, 2 * self.hits, self.predicted + self.actual)

    empty = classmethod(_no_class_sums)
    of = classmethod(_class_sums)
    merge = _add


def _numbers(predictions, targets, place: str):
    """Both in f32 (f64 stays), of one shape. Raises LossError."""
    predictions, targets = (
        as_array(*x, place) for x in (("predictions", predictions), ("targets", targets))
    )
    if predictions.shape != targets.shape:
        fix = "Broadcasting would compare each with each."
        got, expected = f"shape {predictions.shape}", f"{targets.shape}, as targets"
        raise LossError(message("predictions", place, got, expected, fix))
    dtype = jnp.promote_types(jnp.result_type(predictions, targets), jnp.float32)
    if not jnp.issubdtype(dtype, np.floating):
        raise LossError(message("predictions", place, f"dtype {dtype}", "real numbers"))
    return predictions.astype(dtype), targets.astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeanSquaredError:
    """`Σ where · (prediction - target)² / Σ where`.

    >>> MeanSquaredError.of(jnp.array([1.0, 2.0]), jnp.array([1.0, 4.0])).compute()
    Array(2., dtype=float32)
    """

    mean: Mean

    @classmethod
    def of(cls, predictions, targets, where=None) -> MeanSquaredError:
        """From predictions and targets of one shape."""
        predictions, targets = _numbers(predictions, targets, "MeanSquaredError.of()")
        return cls(
            Mean(*weighted_sum(jnp.square(predictions - targets), where, "MeanSquaredError.of()"))
        )

    empty = classmethod(_no_mean)
    merge = _add
    compute = _compute_mean


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class R2:
    """The coefficient of determination: `1 - Σ (prediction - target)² / Σ (target - mean target)²`.

    Rows are axis 0; where a row has several elements, each has its R² and the result is their mean,
    as in scikit-learn. Targets that are all equal give -inf, or NaN where they are predicted
    exactly.

    The scatter is carried with the mean that it is around, and merged as by Chan, Golub and LeVeque
    (1979): from a plain sum of squares f32 loses all digits where the mean is large beside the
    spread.

    >>> R2.of(jnp.array([1.0, 2.0]), jnp.array([1.0, 2.0])).merge(R2.of(jnp.array([3.0]), jnp.array([4.0]))).compute()
    Array(0.78571427, dtype=float32)
    """

    residual: Any  # f32 of the shape of a row: Σ weight · (prediction - target)²
    weight: Any  # Σ weight
    mean: Any  # of targets
    scatter: Any  # Σ weight · (target - mean)²

    @classmethod
    def empty(cls, shape: tuple[int, ...] = ()) -> R2:
        """For rows of this shape."""
        return cls(*jnp.zeros((4, *shape)))

    @classmethod
    def of(cls, predictions, targets, where=None) -> R2:
        """From predictions and targets of one shape, rows first."""
        predictions, targets = map(jnp.atleast_1d, _numbers(predictions, targets, "R2.of()"))
        weights = _weights(where, targets, "R2.of()")
        predictions, targets = (jnp.where(weights != 0, x, 0) for x in (predictions, targets))
        weight = jnp.sum(weights, axis=0)
        mean = _ratio(jnp.sum(weights * targets, axis=0), weight)
        mean += _ratio(
            jnp.sum(weights * (targets - mean[None]), axis=0), weight
        )  # what rounding took from it
        scatter = jnp.sum(weights * jnp.square(targets - mean[None]), axis=0)
        return cls(
            jnp.sum(weights * jnp.square(predictions - targets), axis=0), weight, mean, scatter
        )

    def merge(self, other: R2) -> R2:
        """The metric of both batches together.

        Raises LossError for one of another kind or shape.
        """
        total = _add(self, other)
        share, apart = _ratio(other.weight, total.weight), other.mean - self.mean
        scatter = total.scatter + jnp.square(apart) * self.weight * share
        return R2(total.residual, total.weight, self.mean + apart * share, scatter)

    def compute(self):
        return jnp.mean(1 - self.residual / self.scatter)


__all__ = [
    "Mean",
    "Accuracy", "TopK", "Perplexity", "ConfusionMatrix", "Precision", "Recall", "F1", "MeanSquaredError", "R2",
]  # fmt: skip
