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

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tsunax._core import Maybe, Scalar, checks, trees
from tsunax._core.checks import as_array
from tsunax.errors import LossError

_Metric = TypeVar("_Metric")


def _add(self: _Metric, other: _Metric) -> _Metric:
    """The metric of the rows of `self` and `other`; LossError unless class and shapes are equal."""
    shapes, other_shapes = ([np.shape(x) for x in jax.tree.leaves(m)] for m in (self, other))
    if jax.tree.structure(self) != jax.tree.structure(other) or shapes != other_shapes:
        place, expected = f"{type(self).__name__}.merge()", f"{trees.describe(self)}, made alike"
        raise LossError("other", place, trees.describe(other), expected)
    return jax.tree.map(operator.add, self, other)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """A weighted mean: `compute() = total / weight`, NaN for a weight of 0.

    `total` and `weight` are float32 scalars, as `Mean.of(values, where)` sums them.

    >>> Mean.of([1.0, 2.0, 6.0], where=[1, 1, 0]).merge(Mean.of([6.0])).compute()
    Array(3., dtype=float32)
    """

    total: Scalar  # f32 scalar: Σ weight · value
    weight: Scalar  # f32 scalar: Σ weight

    @classmethod
    def empty(cls) -> Mean:
        # Under x64 it is float64, so that a metric that merges with it keeps its dtype.
        return cls(jnp.zeros(()), jnp.zeros(()))

    @classmethod
    def of(cls, values: ArrayLike, where: Maybe = None) -> Mean:
        """From `values` of any shape; LossError unless `where` has their leading axes (or 1)."""
        return cls(*weighted_sum(jnp.asarray(values), where, "Mean.of()"))

    merge = _add

    def compute(self) -> jax.Array:
        """The mean, a float32 scalar; NaN for a weight of 0."""
        return self.total / self.weight


def weighted_sum(
    values: jax.Array, where: Maybe = None, place: str = "Loss.mean()"
) -> tuple[jax.Array, jax.Array | np.float32]:
    """(Σ where·values, Σ where) in float32; elements of weight 0 may be NaN, also in gradients."""
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    if where is None:
        as_weight = np.float32 if isinstance(values.size, int) else jnp.float32  # jax.export
        return jnp.sum(values), as_weight(values.size)
    # Weights are data. Without this, they would get a gradient through the total.
    where = jax.lax.stop_gradient(_weights(where, values, place))
    return jnp.sum(jnp.where(where != 0, values, 0) * where), jnp.sum(where)


def _weights(where: Maybe, values: jax.Array, place: str) -> jax.Array:
    """`where` as an array like `values`. Raises LossError unless it has their leading axes."""
    where = as_array("where", where, place) if where is not None else jnp.ones((), values.dtype)
    if not (checks.is_real(where) or where.dtype == np.bool_):
        raise LossError("where", place, trees.describe(where), "a mask, or real weights")
    fits = (w in (1, v) for w, v in zip(where.shape, values.shape, strict=False))
    if where.ndim > values.ndim or not all(fits):
        expected = f"the leading axes of values, {values.shape}"
        raise LossError("where", place, f"shape {where.shape}", expected)
    where = where.astype(values.dtype).reshape(*where.shape, *(1,) * (values.ndim - where.ndim))
    return jnp.broadcast_to(where, values.shape)


# -------------------------------------------------------------------------------- class predictions


def _class_ids(
    predictions: ArrayLike, targets: ArrayLike, place: str, classes: int | None = None
) -> tuple[jax.Array, jax.Array, int | None]:
    """Predictions and targets as arrays, and the number of classes if known. Raises LossError."""
    predictions = as_array("predictions", predictions, place)
    targets = as_array("targets", targets, place)
    has_scores = predictions.ndim > targets.ndim
    for name, x in (("targets", targets), ("predictions", predictions)):
        is_ids = jnp.issubdtype(x.dtype, np.integer) or x.dtype == np.bool_
        if not is_ids and not (has_scores and name == "predictions"):
            fix = "One-hot targets: .argmax(-1). Binary scores: logits > 0."
            raise LossError(name, place, trees.describe(x), "class ids, int or bool", fix)
    shape, n = targets.shape, predictions.shape[-1] if has_scores else classes
    if predictions.shape[: targets.ndim] != shape or predictions.ndim > targets.ndim + 1:
        expected = f"{shape}, class ids as in targets, or {(*shape, 'classes')}, scores"
        raise LossError("predictions", place, f"shape {predictions.shape}", expected)
    if classes not in (None, n):
        raise LossError("classes", place, classes, f"{n}, the last axis of predictions")
    return predictions, targets.astype(jnp.int32), n


def _target_scores(scores: jax.Array, targets: jax.Array) -> jax.Array:
    """The score of each target; NaN for a target that is no class."""
    targets = jnp.where(targets < 0, scores.shape[-1], targets)  # -1 would be the last class
    return jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]


def _hits(predictions: ArrayLike, targets: ArrayLike, k: int, place: str) -> jax.Array:
    """1 for targets among the k highest scores, the first of equal ones; NaN if unknown."""
    predictions, targets, classes = _class_ids(predictions, targets, place)
    if classes is None:
        return (predictions == targets).astype(jnp.float32)
    ids = jnp.arange(classes).reshape(*(1,) * targets.ndim, classes)
    target_score = _target_scores(predictions, targets)[..., None]
    is_ahead = (predictions > target_score) | (
        (predictions == target_score) & (ids < targets[..., None])
    )
    is_valid = (targets >= 0) & (targets < classes) & ~jnp.any(jnp.isnan(predictions), axis=-1)
    return jnp.where(is_valid, (jnp.sum(is_ahead, axis=-1) < k).astype(jnp.float32), jnp.nan)


@dataclass(frozen=True)
class _OfMean:
    """A metric that is a mean over rows."""

    mean: Mean

    @classmethod
    def empty(cls) -> Self:
        """The metric of no rows, from which merging starts."""
        return cls(Mean.empty())

    merge = _add

    def compute(self) -> jax.Array:
        """The mean over the rows, a float32 scalar; NaN if there are none."""
        return self.mean.compute()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accuracy(_OfMean):
    """The share of right predictions: `Σ where · (prediction == target) / Σ where`.

    `of` takes scores [..., classes] or class ids [...], and target ids [...]. The prediction is the
    class with the highest score, the first of equal ones. The field `mean` is a `Mean` of 0 and 1.
    `of` raises LossError for shapes that do not fit and targets that are no int or bool.

    >>> logits = jnp.array([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0], [9.0, 0.0]])
    >>> Accuracy.of(logits, jnp.array([0, 1, 1, 0]), where=jnp.array([1, 1, 1, 0])).compute()
    Array(0.6666667, dtype=float32)
    """

    @classmethod
    def of(cls, predictions: ArrayLike, targets: ArrayLike, where: Maybe = None) -> Accuracy:
        """From scores (..., classes) or class ids (...), and the true class ids (...)."""
        hits = _hits(predictions, targets, 1, "Accuracy.of()")
        return cls(Mean(*weighted_sum(hits, where, "Accuracy.of()")))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TopK(_OfMean):
    """The share of targets among the `k` highest scores [..., classes], the first of equal ones.

    The field `mean` is a `Mean` of 0 and 1. `of` raises LossError unless `k` is an int from 1 to
    the number of classes, and for class ids in place of scores.

    >>> scores = jnp.array([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]])
    >>> TopK.of(scores, jnp.array([1, 2]), k=2).compute()
    Array(0.5, dtype=float32)
    """

    k: int = field(metadata={"static": True})

    @classmethod
    def empty(cls, *, k: int = 5) -> TopK:
        return cls(Mean.empty(), k)

    @classmethod
    def of(
        cls, predictions: ArrayLike, targets: ArrayLike, where: Maybe = None, *, k: int = 5
    ) -> TopK:
        """From scores (..., classes) and the true class ids (...).

        Raises LossError for k > classes.
        """
        classes = np.shape(predictions)[-1] if np.ndim(predictions) > np.ndim(targets) else 0
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 0 < k <= classes:
            got = f"{k} with predictions of shape {np.shape(predictions)}"
            expected = "1 to the number of classes, the last axis of scores"
            raise LossError("k", "TopK.of()", got, expected)
        hits = _hits(predictions, targets, k, "TopK.of()")
        return cls(Mean(*weighted_sum(hits, where, "TopK.of()")), k)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Perplexity(_OfMean):
    """`exp(mean of -log softmax(logits)[target])`, from logits [..., classes] and class ids [...].

    If the losses of the tokens are at hand: `Perplexity(Mean.of(losses, where))`.

    >>> Perplexity.of(jnp.zeros((2, 8)), jnp.array([3, 5])).compute()
    Array(8., dtype=float32)
    """

    @classmethod
    def of(cls, predictions: ArrayLike, targets: ArrayLike, where: Maybe = None) -> Perplexity:
        """From logits (..., classes) and the true class ids (...)."""
        place = "Perplexity.of()"
        logits, targets, classes = _class_ids(predictions, targets, place)
        if classes is None:
            expected = f"logits of shape {(*targets.shape, 'classes')}"
            raise LossError("predictions", place, trees.describe(logits), expected)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return cls(
            Mean(*weighted_sum(-_target_scores(jax.nn.log_softmax(logits), targets), where, place))
        )

    def compute(self) -> jax.Array:
        """The perplexity, a float32 scalar; NaN if there are no rows."""
        return jnp.exp(self.mean.compute())


def _confusion(
    predictions: ArrayLike, targets: ArrayLike, where: Maybe, classes: int | None, place: str
) -> jax.Array:
    """f32[targets, predictions]: the weight of each pair of classes; NaN for unknown ids."""
    predictions, targets, n = _class_ids(predictions, targets, place, classes)
    if n is None:
        fix = "Class ids do not tell how many there are."
        raise LossError("classes", place, "None", "the number of classes", fix)
    is_valid = (targets >= 0) & (targets < n)
    if predictions.ndim > targets.ndim:
        is_valid &= ~jnp.any(jnp.isnan(predictions), axis=-1)
        predictions = jnp.argmax(predictions, axis=-1)
    predictions = predictions.astype(jnp.int32)
    is_valid &= (predictions >= 0) & (predictions < n)
    weights = _weights(where, jnp.zeros(targets.shape), place)
    weights = jnp.where(is_valid | (weights == 0), weights, jnp.nan)
    counts = _sums_by_cell(targets.ravel(), predictions.ravel(), weights.ravel(), n)
    return counts + 0 * jnp.sum(weights)  # a NaN spoils all, also if its cell was dropped


def _sums_by_cell(rows: jax.Array, columns: jax.Array, weights: jax.Array, n: int) -> jax.Array:
    """f32[n, n]: the sum of the weights of each cell.

    A scatter adds one weight after the other, and a float32 sum stops growing at 2²⁴ times its
    addend. So each block of elements is summed alone, and the sums are then added in pairs. Within
    a block, weights are rounded to multiples of a unit. Sums of up to 2²³ units have no rounding.
    The small remainders of the weights are summed separately.
    """
    block = max(1 << 14, n * n)  # the sums of all blocks need no more memory than the elements
    largest = jnp.max(jnp.abs(weights), initial=0)
    unit = jax.lax.reduce_precision(largest, 8, 0) * (2 * block / 2**24)
    whole = jnp.round(weights / jnp.where(unit > 0, unit, 1))
    blocks = -(-len(weights) // block) or 1
    cells = (jnp.arange(len(weights), dtype=np.int32) // block * n + rows) * n + columns

    def summed(addends: jax.Array) -> jax.Array:
        sums = jnp.zeros(blocks * n * n, addends.dtype).at[cells].add(addends, mode="drop")
        sums = sums.reshape(blocks, n, n)
        while len(sums) > 1:
            sums = jnp.pad(sums, ((0, len(sums) % 2), (0, 0), (0, 0)))
            sums = sums[::2] + sums[1::2]
        return sums[0]

    sums = summed(whole) * unit + summed(weights - whole * unit)
    return sums.astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ConfusionMatrix:
    """The weight of each pair of classes: rows are targets, columns predictions.

    The field `counts` is a float32 array [classes, classes]. `of` takes scores [..., classes], or
    class ids [...] with `classes`, and raises LossError for ids without it and for other shapes.

    >>> ConfusionMatrix.of(jnp.array([0, 1, 1]), jnp.array([0, 1, 0]), classes=2).compute()
    Array([[1., 1.],
           [0., 1.]], dtype=float32)
    """

    counts: jax.Array  # f32[classes, classes]: Σ weight

    @classmethod
    def empty(cls, classes: int) -> ConfusionMatrix:
        return cls(jnp.zeros((classes, classes), jnp.float32))

    @classmethod
    def of(
        cls,
        predictions: ArrayLike,
        targets: ArrayLike,
        where: Maybe = None,
        *,
        classes: int | None = None,
    ) -> ConfusionMatrix:
        """From scores (..., classes), or class ids (...) and `classes`, and the true ids (...)."""
        return cls(_confusion(predictions, targets, where, classes, "ConfusionMatrix.of()"))

    def compute(self) -> jax.Array:
        """`counts`, float32 [classes, classes]; all NaN if an id that counts is no class."""
        return self.counts

    merge = _add


def _ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))


def _check_average(average: object, classes: int, place: str) -> None:
    choices = ("macro", "micro", "weighted", *(["binary"] if classes == 2 else []))
    if average is not None and not checks.is_one_of(average, choices):
        got = f"{trees.describe(average)} with {classes} classes"
        expected = "'binary' for 2 classes; or 'macro', 'micro', 'weighted' or None"
        raise LossError("average", place, got, expected)


@dataclass(frozen=True)
class _ByClass:
    """A ratio for each class, from the weight of each pair of classes."""

    counts: jax.Array  # f32[targets, predictions]: Σ weight
    average: str | None = field(metadata={"static": True})
    # The metric is a · hits / (b · predicted + c · actual), with these a, b and c.
    _factors: ClassVar[tuple[int, int, int]]

    @classmethod
    def empty(cls, classes: int = 2, *, average: str | None = "binary") -> Self:
        """The metric of no rows, from which merging starts."""
        _check_average(average, classes, f"{cls.__name__}.empty()")
        return cls(jnp.zeros((classes, classes), jnp.float32), average)

    @classmethod
    def of(
        cls,
        predictions: ArrayLike,
        targets: ArrayLike,
        where: Maybe = None,
        *,
        classes: int = 2,
        average: str | None = "binary",
    ) -> Self:
        """From scores (..., classes), or class ids (...) and `classes`, and the true ids (...)."""
        place = f"{cls.__name__}.of()"
        classes = np.shape(predictions)[-1] if np.ndim(predictions) > np.ndim(targets) else classes
        _check_average(average, classes, place)
        return cls(_confusion(predictions, targets, where, classes, place), average)

    merge = _add

    def compute(self) -> jax.Array:
        """An f32 scalar, or f32[classes] if `average` is None."""
        of_hits, of_predicted, of_actual = self._factors
        predicted, actual = jnp.sum(self.counts, axis=0), jnp.sum(self.counts, axis=1)
        above = of_hits * jnp.diagonal(self.counts)
        below = of_predicted * predicted + of_actual * actual
        if self.average == "micro":
            return _ratio(jnp.sum(above), jnp.sum(below))
        each = _ratio(above, below)
        if self.average is None:
            return each
        if self.average == "binary":
            return each[1]
        occurs = jnp.where(predicted + actual == 0, 0.0, 1.0)
        weights = actual if self.average == "weighted" else occurs
        return _ratio(jnp.sum(each * weights), jnp.sum(weights))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Precision(_ByClass):
    """The share of right predictions of each class: `hits / predicted`.

    `counts` are as in `ConfusionMatrix`. `average` is "binary" (class 1 of two), "macro" (the
    plain mean over the classes that occur in targets or predictions), "weighted" (by how often each
    occurs in targets), "micro" (sums over classes first), or None (an array with each class). A
    ratio over nothing is 0. All as in scikit-learn. `of` raises LossError for another `average`,
    and as `ConfusionMatrix.of` does.

    >>> Precision.of(jnp.array([1, 1, 1, 0]), jnp.array([1, 1, 0, 1])).compute()
    Array(0.6666667, dtype=float32)
    """

    _factors = (1, 1, 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Recall(_ByClass):
    """The share of the targets of each class that are predicted: `hits / actual`.

    The fields `counts` and `average`, and the errors, are as in `Precision`.

    >>> Recall.of(jnp.array([1, 1, 1, 0]), jnp.array([1, 1, 0, 0]), average=None).compute()
    Array([0.5, 1. ], dtype=float32)
    """

    _factors = (1, 0, 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class F1(_ByClass):
    """The harmonic mean of precision and recall of each class: `2 · hits / (predicted + actual)`.

    The fields `counts` and `average`, and the errors, are as in `Precision`.

    >>> F1.of(jnp.array([1, 1, 1, 0]), jnp.array([1, 1, 0, 0])).compute()
    Array(0.8, dtype=float32)
    """

    _factors = (2, 1, 1)


# --------------------------------------------------------------------------------- real predictions


def _numbers(predictions: ArrayLike, targets: ArrayLike, place: str) -> tuple[jax.Array, jax.Array]:
    """Predictions and targets in f32 (f64 stays), of one shape. Raises LossError."""
    predictions = as_array("predictions", predictions, place)
    targets = as_array("targets", targets, place)
    if predictions.shape != targets.shape:
        fix = "Broadcasting would compare each with each."
        got, expected = f"shape {predictions.shape}", f"{targets.shape}, as targets"
        raise LossError("predictions", place, got, expected, fix)
    dtype = jnp.promote_types(jnp.result_type(predictions, targets), jnp.float32)
    if not jnp.issubdtype(dtype, np.floating):
        raise LossError("predictions", place, f"dtype {dtype}", "real numbers")
    return predictions.astype(dtype), targets.astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeanSquaredError(_OfMean):
    """The mean squared error: `Σ where · (prediction - target)² / Σ where`.

    The field `mean` is the `Mean` of the squares. `of` raises LossError for arrays of two shapes
    (nothing is broadcast) and for complex numbers.

    >>> MeanSquaredError.of(jnp.array([1.0, 2.0]), jnp.array([1.0, 4.0])).compute()
    Array(2., dtype=float32)
    """

    @classmethod
    def of(cls, predictions: ArrayLike, targets: ArrayLike, where: Maybe = None) -> Self:
        """From predictions and targets of one shape."""
        place = "MeanSquaredError.of()"
        predictions, targets = _numbers(predictions, targets, place)
        return cls(Mean(*weighted_sum(jnp.square(predictions - targets), where, place)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class R2:
    """The coefficient of determination: `1 - Σ (prediction - target)² / Σ (target - mean target)²`.

    Rows are axis 0; if a row has several elements, the result is the mean of their R², as in
    scikit-learn. Targets that are all equal give -inf, or NaN if they are predicted exactly. `of`
    raises LossError for arrays of two shapes and for complex numbers.

    The fields have the shape of a row: `residual` is the sum of squared errors, `weight` the sum of
    the weights, `mean` the mean target, and `scatter` the sum of squares around it. They are merged
    as by Chan, Golub and LeVeque (1979): a plain sum of squares loses all digits of float32 if the
    mean is much larger than the spread.

    >>> exact = R2.of(jnp.array([1.0, 2.0]), jnp.array([1.0, 2.0]))
    >>> exact.merge(R2.of(jnp.array([3.0]), jnp.array([4.0]))).compute()
    Array(0.78571427, dtype=float32)
    """

    residual: jax.Array  # f32 of the shape of a row: Σ weight · (prediction - target)²
    weight: Scalar  # Σ weight
    mean: jax.Array  # Σ weight · target / Σ weight
    scatter: jax.Array  # Σ weight · (target - mean)²

    @classmethod
    def empty(cls, shape: tuple[int, ...] = ()) -> R2:
        """The metric of no rows, for rows of this shape."""
        return cls(*jnp.zeros((4, *shape)))

    @classmethod
    def of(cls, predictions: ArrayLike, targets: ArrayLike, where: Maybe = None) -> R2:
        """From predictions and targets of one shape, rows first."""
        predictions, targets = map(jnp.atleast_1d, _numbers(predictions, targets, "R2.of()"))
        weights = _weights(where, targets, "R2.of()")
        predictions, targets = (jnp.where(weights != 0, x, 0) for x in (predictions, targets))
        weight = jnp.sum(weights, axis=0)
        mean = _ratio(jnp.sum(weights * targets, axis=0), weight)
        mean += _ratio(jnp.sum(weights * (targets - mean[None]), axis=0), weight)  # its rounding
        scatter = jnp.sum(weights * jnp.square(targets - mean[None]), axis=0)
        residual = jnp.sum(weights * jnp.square(predictions - targets), axis=0)
        return cls(residual, weight, mean, scatter)

    def merge(self, other: R2) -> R2:
        """The metric of the rows of `self` and `other`; LossError unless their shapes are equal.

        `scatter = scatter₁ + scatter₂ + (mean₂ - mean₁)² · weight₁ · weight₂ / weight`.
        """
        total = _add(self, other)
        share, difference = _ratio(other.weight, total.weight), other.mean - self.mean
        scatter = total.scatter + jnp.square(difference) * self.weight * share
        return R2(total.residual, total.weight, self.mean + difference * share, scatter)

    def compute(self) -> jax.Array:
        """R², a float32 scalar: the mean over the elements of a row."""
        return jnp.mean(1 - self.residual / self.scatter)


__all__ = [
    "Mean", "Accuracy", "TopK", "Perplexity", "ConfusionMatrix", "Precision", "Recall", "F1",
    "MeanSquaredError", "R2",
]  # fmt: skip
