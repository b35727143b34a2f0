"""Metrics of class predictions: shares of right predictions, perplexity, and counts by class."""

from dataclasses import dataclass, field
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tsunax._core import Maybe, trees
from tsunax.errors import LossError
from tsunax.metrics.means import Mean, OfMean, add, ratio, weights_like


def _class_ids(
    predictions: ArrayLike, targets: ArrayLike, classes: int | None = None
) -> tuple[jax.Array, jax.Array, int | None]:
    """Predictions and targets as arrays, and the number of classes if known. Raises LossError."""
    predictions, targets = jnp.asarray(predictions), jnp.asarray(targets)
    has_scores = predictions.ndim > targets.ndim
    for ids in (targets,) if has_scores else (targets, predictions):
        if not (jnp.issubdtype(ids.dtype, np.integer) or ids.dtype == np.bool_):
            raise LossError(
                "class ids",
                "",
                got=trees.describe(ids),
                expected="int or bool",
                fix="One-hot targets: .argmax(-1). Binary scores: logits > 0.",
            )
    n = predictions.shape[-1] if has_scores else classes
    shape_of_scores = (*targets.shape, n if classes is None else classes)
    if predictions.shape != (shape_of_scores if has_scores else targets.shape):
        raise LossError(
            "predictions",
            "",
            got=f"shape {predictions.shape}",
            expected=f"class ids of shape {targets.shape}, or scores with an axis of classes more",
        )
    return predictions, targets.astype(jnp.int32), n


def _target_scores(scores: jax.Array, targets: jax.Array) -> jax.Array:
    """The score of each target; NaN for a target that is no class."""
    targets = jnp.where(targets < 0, scores.shape[-1], targets)  # -1 would be the last class
    return jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]


def _hits(predictions: ArrayLike, targets: ArrayLike, k: int) -> jax.Array:
    """1 for targets among the k highest scores, the first of equal ones; NaN if unknown."""
    predictions, targets, classes = _class_ids(predictions, targets)
    if classes is None:
        return (predictions == targets).astype(jnp.float32)
    ids = jnp.arange(classes).reshape(*(1,) * targets.ndim, classes)
    target_score = _target_scores(predictions, targets)[..., None]
    is_ahead = (predictions > target_score) | (
        (predictions == target_score) & (ids < targets[..., None])
    )
    is_valid = (targets >= 0) & (targets < classes) & ~jnp.any(jnp.isnan(predictions), axis=-1)
    return jnp.where(is_valid, (jnp.sum(is_ahead, axis=-1) < k).astype(jnp.float32), jnp.nan)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accuracy(OfMean):
    """The share of right predictions: `Σ where · (prediction == target) / Σ where`.

    `of` takes scores [..., classes] or class ids [...], and target ids [...]. The prediction is the
    class with the highest score, the first of equal ones. The field `mean` is a `Mean` of 0 and 1.
    `of` raises LossError for shapes that do not fit and targets that are no int or bool.

    >>> logits = jnp.array([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0], [9.0, 0.0]])
    >>> Accuracy.of(logits, jnp.array([0, 1, 1, 0]), where=jnp.array([1, 1, 1, 0])).compute()
    Array(0.6666667, dtype=float32)
    """

    @classmethod
    def of(cls, predictions: ArrayLike, targets: ArrayLike, where: Maybe = None) -> Self:
        """From scores (..., classes) or class ids (...), and the true class ids (...)."""
        return cls(Mean.of(_hits(predictions, targets, 1), where))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TopK(OfMean):
    """The share of targets among the `k` highest scores [..., classes], the first of equal ones.

    The field `mean` is a `Mean` of 0 and 1. `of` raises LossError unless `k` is from 1 to the
    number of classes, and for class ids in place of scores.

    >>> scores = jnp.array([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]])
    >>> TopK.of(scores, jnp.array([1, 2]), k=2).compute()
    Array(0.5, dtype=float32)
    """

    k: int = field(metadata={"static": True})

    @classmethod
    def empty(cls, *, k: int = 5) -> Self:
        return cls(Mean.empty(), k)

    @classmethod
    def of(
        cls, predictions: ArrayLike, targets: ArrayLike, where: Maybe = None, *, k: int = 5
    ) -> Self:
        """From scores (..., classes) and the true class ids (...)."""
        classes = np.shape(predictions)[-1] if np.ndim(predictions) > np.ndim(targets) else 0
        if not 0 < k <= classes or k != int(k):
            raise LossError("k", "TopK.of()", k, f"1 to {classes}, the last axis of scores")
        return cls(Mean.of(_hits(predictions, targets, k), where), k)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Perplexity(OfMean):
    """`exp(mean of -log softmax(logits)[target])`, from logits [..., classes] and class ids [...].

    If the losses of the tokens are at hand: `Perplexity(Mean.of(losses, where))`.

    >>> Perplexity.of(jnp.zeros((2, 8)), jnp.array([3, 5])).compute()
    Array(8., dtype=float32)
    """

    @classmethod
    def of(cls, predictions: ArrayLike, targets: ArrayLike, where: Maybe = None) -> Self:
        """From logits (..., classes) and the true class ids (...)."""
        logits, targets, _ = _class_ids(predictions, targets)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return cls(Mean.of(-_target_scores(jax.nn.log_softmax(logits), targets), where))

    def compute(self) -> jax.Array:
        """The perplexity, a float32 scalar; NaN if there are no rows."""
        return jnp.exp(self.mean.compute())


def _confusion(
    predictions: ArrayLike, targets: ArrayLike, where: Maybe, classes: int | None
) -> jax.Array:
    """f32[targets, predictions]: the weight of each pair of classes; NaN for unknown ids."""
    predictions, targets, n = _class_ids(predictions, targets, classes)
    if n is None:
        raise LossError("classes", "", "None", "the number of classes, which ids do not give")
    is_valid = (targets >= 0) & (targets < n)
    if predictions.ndim > targets.ndim:
        is_valid &= ~jnp.any(jnp.isnan(predictions), axis=-1)
        predictions = jnp.argmax(predictions, axis=-1)
    predictions = predictions.astype(jnp.int32)
    is_valid &= (predictions >= 0) & (predictions < n)
    weights = weights_like(where, jnp.zeros(targets.shape))
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
    def empty(cls, classes: int) -> Self:
        return cls(jnp.zeros((classes, classes), jnp.float32))

    @classmethod
    def of(
        cls,
        predictions: ArrayLike,
        targets: ArrayLike,
        where: Maybe = None,
        *,
        classes: int | None = None,
    ) -> Self:
        """From scores (..., classes), or class ids (...) and `classes`, and the true ids (...)."""
        return cls(_confusion(predictions, targets, where, classes))

    def compute(self) -> jax.Array:
        """`counts`, float32 [classes, classes]; all NaN if an id that counts is no class."""
        return self.counts

    merge = add

    @property
    def weight(self) -> jax.Array:
        """Σ weight over the rows."""
        return jnp.sum(self.counts)


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
        classes = np.shape(predictions)[-1] if np.ndim(predictions) > np.ndim(targets) else classes
        choices = (None, "macro", "micro", "weighted", *["binary"] * (classes == 2))
        if average not in choices:
            raise LossError(
                "average",
                f"{cls.__name__}.of()",
                got=f"{trees.describe(average)} with {classes} classes",
                expected=f"one of {choices}",
            )
        return cls(_confusion(predictions, targets, where, classes), average)

    merge = add

    @property
    def weight(self) -> jax.Array:
        """Σ weight over the rows."""
        return jnp.sum(self.counts)

    def compute(self) -> jax.Array:
        """An f32 scalar, or f32[classes] if `average` is None."""
        of_hits, of_predicted, of_actual = self._factors
        predicted, actual = jnp.sum(self.counts, axis=0), jnp.sum(self.counts, axis=1)
        above = of_hits * jnp.diagonal(self.counts)
        below = of_predicted * predicted + of_actual * actual
        if self.average == "micro":
            return ratio(jnp.sum(above), jnp.sum(below))
        each = ratio(above, below)
        if self.average is None:
            return each
        if self.average == "binary":
            return each[1]
        occurs = jnp.where(predicted + actual == 0, 0.0, 1.0)
        weights = actual if self.average == "weighted" else occurs
        return ratio(jnp.sum(each * weights), jnp.sum(weights))


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
