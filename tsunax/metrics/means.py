"""Weighted means and sums of squares: `Mean`, the mean squared error and R².

Every metric is a sum and the weight it was taken over; metrics are merged by adding. No metric of
class predictions is here.
"""

import operator
from dataclasses import dataclass
from typing import Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tsunax._core import Maybe, Scalar, checks, trees
from tsunax.errors import LossError

_Metric = TypeVar("_Metric")


def add(self: _Metric, other: _Metric) -> _Metric:
    """The metric of the rows of `self` and `other`; LossError if their shapes differ."""
    shapes, other_shapes = ([np.shape(x) for x in jax.tree.leaves(m)] for m in (self, other))
    if shapes != other_shapes:  # they would broadcast
        where = f"{type(self).__name__}.merge()"
        raise LossError("other", where, f"shapes {other_shapes}", f"{shapes}")
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
    def empty(cls) -> Self:
        # Under x64 it is float64, so that a metric that merges with it keeps its dtype.
        return cls(jnp.zeros(()), jnp.zeros(()))

    @classmethod
    def of(cls, values: ArrayLike, where: Maybe = None) -> Self:
        """From `values` of any shape; LossError unless `where` has their leading axes (or 1).

        Elements of weight 0 may be NaN, also in gradients.
        """
        values = jnp.asarray(values)
        values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
        if where is None:
            as_weight = np.float32 if isinstance(values.size, int) else jnp.float32  # jax.export
            return cls(jnp.sum(values), as_weight(values.size))
        # Weights are data. Without this, they would get a gradient through the total.
        where = jax.lax.stop_gradient(weights_like(where, values))
        return cls(jnp.sum(jnp.where(where != 0, values, 0) * where), jnp.sum(where))

    merge = add

    def compute(self) -> jax.Array:
        """The mean, a float32 scalar; NaN for a weight of 0."""
        return self.total / self.weight


def weights_like(where: Maybe, values: jax.Array) -> jax.Array:
    """`where` as an array like `values`. Raises LossError unless it has their leading axes."""
    where = jnp.ones((), values.dtype) if where is None else jnp.asarray(where)
    fits = (w in (1, v) for w, v in zip(where.shape, values.shape, strict=False))
    is_real = checks.is_real(where) or where.dtype == np.bool_
    if not is_real or where.ndim > values.ndim or not all(fits):
        raise LossError(
            "where",
            "",
            got=trees.describe(where),
            expected=f"a mask or real weights with the leading axes of values, {values.shape}",
        )
    where = where.astype(values.dtype).reshape(*where.shape, *(1,) * (values.ndim - where.ndim))
    return jnp.broadcast_to(where, values.shape)


@dataclass(frozen=True)
class OfMean:
    """A metric that is a mean over rows."""

    mean: Mean

    @classmethod
    def empty(cls) -> Self:
        """The metric of no rows, from which merging starts."""
        return cls(Mean.empty())

    merge = add

    @property
    def weight(self) -> Scalar:
        """Σ weight over the rows."""
        return self.mean.weight

    def compute(self) -> jax.Array:
        """The mean over the rows, a float32 scalar; NaN if there are none."""
        return self.mean.compute()


def ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    """a / b, element by element, and 0 where b is 0."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))


def _numbers(predictions: ArrayLike, targets: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Predictions and targets in f32 (f64 stays), of one shape. Raises LossError."""
    predictions, targets = jnp.asarray(predictions), jnp.asarray(targets)
    dtype = jnp.promote_types(jnp.result_type(predictions, targets), jnp.float32)
    if predictions.shape != targets.shape or not jnp.issubdtype(dtype, np.floating):
        raise LossError(
            "predictions",
            "",
            got=trees.describe(predictions),
            expected=f"real numbers of the shape of targets, {targets.shape}",
        )
    return predictions.astype(dtype), targets.astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeanSquaredError(OfMean):
    """The mean squared error: `Σ where · (prediction - target)² / Σ where`.

    The field `mean` is the `Mean` of the squares. `of` raises LossError for arrays of two shapes
    (nothing is broadcast) and for complex numbers.

    >>> MeanSquaredError.of(jnp.array([1.0, 2.0]), jnp.array([1.0, 4.0])).compute()
    Array(2., dtype=float32)
    """

    @classmethod
    def of(cls, predictions: ArrayLike, targets: ArrayLike, where: Maybe = None) -> Self:
        """From predictions and targets of one shape."""
        predictions, targets = _numbers(predictions, targets)
        return cls(Mean.of(jnp.square(predictions - targets), where))


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
    def empty(cls, shape: tuple[int, ...] = ()) -> Self:
        """The metric of no rows, for rows of this shape."""
        return cls(*jnp.zeros((4, *shape)))

    @classmethod
    def of(cls, predictions: ArrayLike, targets: ArrayLike, where: Maybe = None) -> Self:
        """From predictions and targets of one shape, rows first."""
        predictions, targets = map(jnp.atleast_1d, _numbers(predictions, targets))
        weights = weights_like(where, targets)
        predictions, targets = (jnp.where(weights != 0, x, 0) for x in (predictions, targets))
        weight = jnp.sum(weights, axis=0)
        mean = ratio(jnp.sum(weights * targets, axis=0), weight)
        mean += ratio(jnp.sum(weights * (targets - mean[None]), axis=0), weight)  # its rounding
        scatter = jnp.sum(weights * jnp.square(targets - mean[None]), axis=0)
        residual = jnp.sum(weights * jnp.square(predictions - targets), axis=0)
        return cls(residual, weight, mean, scatter)

    def merge(self, other: "R2") -> "R2":
        """The metric of the rows of `self` and `other`; all rows have one shape.

        `scatter = scatter₁ + scatter₂ + (mean₂ - mean₁)² · weight₁ · weight₂ / weight`.
        """
        total = add(self, other)
        share, difference = ratio(other.weight, total.weight), other.mean - self.mean
        scatter = total.scatter + jnp.square(difference) * self.weight * share
        return R2(total.residual, total.weight, self.mean + difference * share, scatter)

    def compute(self) -> jax.Array:
        """R², a float32 scalar: the mean over the elements of a row."""
        return jnp.mean(1 - self.residual / self.scatter)
