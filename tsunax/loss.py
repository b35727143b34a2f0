"""The result of a loss function: a scalar, or a sum and its weight, metrics and model state."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tsunax._core import Maybe, PyTree, Scalar, checks, trees
from tsunax.errors import LossError, message


@jax.tree_util.register_static
@dataclass(frozen=True)
class StaticWeight:
    """A weight that follows from shapes, as part of a tree's structure.

    A program or a scan returns it without an array, which would cost XLA:CPU 15 us a step.
    """

    value: np.float32

    @classmethod
    def unless_array(cls, weight: Scalar) -> StaticWeight | None:
        """The weight if it is a number. None if it is an array, which may have no value yet."""
        return None if isinstance(weight, jax.Array) else cls(np.float32(weight))


class Term(NamedTuple):
    """One mean of a Loss that is a sum of means with different weights."""

    total: Scalar
    weight: Scalar


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class Loss:
    """The result of a loss function if a plain scalar is not enough: a **sum** and its weight.

    `Loss.mean(values, where)` is the usual way to make one. `Loss(total, weight)` is for sums that
    you compute: the loss is `total / weight`, over all micro-batches, devices and batches.
    Weights and masks are data: no gradient flows through them. If weights are learned, return a
    scalar, `jnp.sum(w * values) / jnp.sum(w)`.

    `loss + penalty` and `0.5 * loss` change the mean and keep the weight. `float(loss)` and
    `f"{loss:.3f}"` show the mean. Two losses with different weights can be added: each mean, and
    each metric, keeps its own mask over micro-batches, devices and batches; a mean without any
    weight adds nothing. Then `weight` is the larger of the two. `rules.accumulate` uses that weight
    for the mean of the gradients of several calls, although each call has divided both means
    already: under masks, cut one batch instead, `train_step(accumulate=n)`.

    `metrics` are scalars (weighed like the loss) or objects with `merge` and `compute`, by name.
    `model_state` is the new one. A step sets the other fields: `mean_value`, `dropped`,
    `overwritten`, `noise_scale`.
    """

    total: Scalar  # scalar: Σ weight · loss
    weight: Scalar = None  # scalar: Σ weight (tokens, rows). None with a `mean_value`: the rows
    metrics: Mapping[str, Any] = field(default_factory=dict)
    model_state: PyTree = None
    mean_value: Scalar = None  # the mean itself, if the loss function returned a scalar
    # f32[micro-batches]: the weight of each micro-batch that "drop" left out, 0 for the rest
    dropped: jax.Array | None = None
    # the new values of leaves that their gradient replaces (flax's fp8), in the tree of params
    overwritten: PyTree = None
    noise_scale: Any = None  # a `microbatches.NoiseScale`, under `noise_scale=True`

    terms: tuple[Term, ...] = ()  # all its means, if their weights differ

    # The mask given to `mean`, and its number of values. No program returns it.
    _where: ClassVar[tuple[Any, int] | None] = None

    @classmethod
    @checks.naming_arguments
    def mean(
        cls,
        values: ArrayLike,
        where: Maybe = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        model_state: PyTree = None,
    ) -> Loss:
        """The mean of `values` (any shape) under a mask or weights `where` (their leading axes).

        Metrics may be arrays of the shape of `values`: they are averaged under the same `where`.

        >>> loss = Loss.mean(jnp.array([1, 3, 8.0]), jnp.array([1, 1, 0]), metrics={"worst": 3.0})
        >>> float(loss.compute()), float(loss.weight)
        (2.0, 2.0)
        """
        values = jnp.asarray(values)
        metrics = dict(metrics or {})
        if not jnp.issubdtype(values.dtype, jnp.floating):
            raise LossError("values", "Loss.mean()", f"dtype {values.dtype}", "real floats")
        if values.size == 0:
            raise LossError("values", "Loss.mean()", f"shape {values.shape}", "an element at least")
        if values.ndim == 0 and where is None:
            return cls(values, None, metrics, model_state, mean_value=values)
        from tsunax.metrics.means import Mean

        mean = Mean.of(values, where)
        is_like = lambda m: trees.is_array(m) and jnp.shape(m) == values.shape != ()
        metrics = {name: Mean.of(m, where) if is_like(m) else m for name, m in metrics.items()}
        loss = cls(mean.total, mean.weight, metrics, model_state)
        return loss if where is None else loss._with_fields(_where=(where, values.size))

    def _with_fields(self, **fields: Any) -> Loss:
        """A copy with other fields, which remembers its mask."""
        mask = fields.pop("_where", self._where)
        loss = dataclasses.replace(self, **fields)
        object.__setattr__(loss, "_where", mask)
        return loss

    def merge(self, other: Loss) -> Loss:
        """The loss of this batch and of `other` together, with the model state of `other`.

        `a.merge(b).compute()` is the mean over the rows of both. Both need a weight. Raises
        LossError for metrics of different names, and for sums of different numbers of means.
        """
        if self.weight is None or other.weight is None:
            raise LossError("weight", "Loss.merge()", "none", "a number, as Loss.mean(values) has")
        parts_of = lambda loss: f"{len(loss.terms) or 1} weights, metrics {sorted(loss.metrics)}"
        if parts_of(self) != parts_of(other):
            raise LossError("other", "Loss.merge()", parts_of(other), parts_of(self))
        metrics = {name: m.merge(other.metrics[name]) for name, m in self.metrics.items()}
        total, weight = self.total + other.total, self.weight + other.weight
        pairs = zip(self.terms, other.terms, strict=True)
        terms = tuple(Term(a.total + b.total, a.weight + b.weight) for a, b in pairs)
        return Loss(total, weight, metrics, other.model_state, terms=terms)

    def compute(self) -> jax.Array:
        """The mean loss `total / weight`, an f32 scalar. Raises LossError without a weight."""
        if self.mean_value is not None:
            return self.mean_value
        _check_weight(self)
        return self.mean_in(self) if self.terms else self.total / self.weight

    def mean_in(self, whole: Loss) -> jax.Array:
        """The mean of this part of a `whole` with several terms.

        Each term is divided by its weight in the whole, so that the weighted mean of all parts is
        the mean of the whole.
        """
        mean: Any = 0
        for (total, _), (_, weight) in zip(self.terms, whole.terms, strict=True):
            mean += jnp.where(weight == 0, 0, total / jnp.where(weight == 0, 1, weight))
        return mean * (whole.weight / self.weight)  # NaN if no term has a weight

    # Arithmetic

    __array_ufunc__ = None  # a NumPy number on the left leaves the operation to us

    def __float__(self) -> float:
        return float(self.compute())

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else repr(self)

    def __repr__(self) -> str:
        is_abstract = isinstance(self.total, jax.ShapeDtypeStruct)
        has_mean = not is_abstract and (self.mean_value is not None or self.weight is not None)
        parts = {"": self.compute()} if has_mean else {"total": self.total}
        parts |= {} if self.weight is None else {"weight": self.weight}
        metrics = {} if is_abstract else self.metrics
        parts |= {name: m.compute() if _is_metric(m) else m for name, m in metrics.items()}
        texts = [f"{name}={number_text(x)}".lstrip("=") for name, x in parts.items()]
        return f"Loss({', '.join(texts)})"

    def __add__(self, addend: Loss | ArrayLike) -> Loss:
        """The sum of two means; a scalar is a penalty, and weighs as much as the loss."""
        if not isinstance(addend, Loss):
            return self._plus(addend)
        metrics = {**self.metrics, **addend.metrics}
        if addend.weight is None:
            new = self._plus(addend.compute())
        elif self.weight is None:
            new = addend._plus(self.compute())
        elif not (self.terms or addend.terms) and (
            self.weight is addend.weight
            or StaticWeight.unless_array(self.weight)
            == StaticWeight.unless_array(addend.weight)
            is not None
        ):
            means = self.mean_value, addend.mean_value
            mean = None if None in means else self.mean_value + addend.mean_value
            new = self._with_fields(total=self.total + addend.total, mean_value=mean)
        elif self._where and addend._where and self._where[0] is addend._where[0]:
            new = self._with_fields(
                total=self.total + addend.total * (self._where[1] / addend._where[1])
            )
        else:
            losses = self, addend
            metrics = {
                name: _as_metric(name, m, loss.weight)
                for loss in losses
                for name, m in loss.metrics.items()
            }
            first, second = (loss.terms or (Term(loss.total, loss.weight),) for loss in losses)
            new = dataclasses.replace(
                self,
                total=self.total + addend.total,
                weight=jnp.maximum(*(jnp.float32(loss.weight) for loss in losses)),
                mean_value=None,
                terms=(*first, *second),
            )
        for name in self.metrics.keys() & addend.metrics.keys():
            raise LossError(f"metric {name!r}", "Loss + Loss", "two of this name", "one")
        if self.model_state is not None and addend.model_state is not None:
            raise LossError("model_state", "Loss + Loss", "two", "one: that of the last call")
        state = addend.model_state if self.model_state is None else self.model_state
        return new._with_fields(metrics=metrics, model_state=state)

    __radd__ = __add__

    def _plus(self, x: Scalar) -> Loss:
        mean = None if self.mean_value is None else self.mean_value + x
        if self.weight is None:
            _check_weight(self)
            return self._with_fields(total=mean, mean_value=mean)
        total, n = x * self.weight, len(self.terms)
        # A batch weighs as much as its largest term, never as a penalty. Each part of a cut batch
        # has a largest term; the sum of their weights is at most n times the weight of the batch.
        terms = (*self.terms, Term(total / n, self.weight / n)) if n else ()
        return self._with_fields(total=self.total + total, mean_value=mean, terms=terms)

    def __mul__(self, x: Scalar) -> Loss:
        """The loss times a number; its metrics stay as they are."""
        mean = None if self.mean_value is None else self.mean_value * x
        terms = tuple(Term(term.total * x, term.weight) for term in self.terms)
        return self._with_fields(total=self.total * x, mean_value=mean, terms=terms)

    __rmul__ = __mul__

    def __truediv__(self, x: Scalar) -> Loss:
        return self * (1 / x)

    def __neg__(self) -> Loss:
        return self * -1

    def __sub__(self, subtrahend: Loss | Scalar) -> Loss:
        return self + -subtrahend

    def __rsub__(self, minuend: Loss | ArrayLike) -> Loss:
        return -self + minuend


def number_text(x: Any) -> str:
    """A concrete number in six digits, a bool as it is; other values in words."""
    is_number = trees.dtype_of(x) is not None and np.shape(x) == () and not trees.is_traced(x)
    if not is_number or isinstance(x, jax.ShapeDtypeStruct):
        return trees.describe(x)
    return str(bool(x)) if trees.is_a(x, np.bool_) else f"{float(x):.6g}"


def as_loss(out: Loss | ArrayLike, rows: int) -> Loss:
    """The `Loss` behind the result of a loss function, with weight and metrics, or LossError."""
    out = loss_of(out)
    _check_scalar("total", "loss_fn", out.total)
    _check_weight(out)
    if out.weight is None and not rows:
        raise LossError("batch", "loss_fn", "0 rows", "at least one", "A mean over no rows is NaN.")
    metrics: Mapping[Any, Any] = out.metrics
    if not all(isinstance(name, str) for name in metrics):  # a run would write them as columns
        raise LossError("metrics", "loss_fn", trees.describe(out.metrics), "a dict with str names")
    # A weight that follows from shapes is a NumPy scalar, which no program has to return. In
    # `jax.export` shapes may be symbols.
    as_weight = np.float32 if type(rows) is int else jnp.float32
    weight = _float_weight(as_weight(rows) if out.weight is None else out.weight)
    mean = None if out.mean_value is None else jnp.asarray(out.mean_value)
    mean = None if mean is None else mean.astype(trees.wide_dtype(mean))
    total = out.total if mean is None else _share(mean, weight)
    metrics = {name: _as_metric(name, m, weight) for name, m in out.metrics.items()}
    terms = tuple(Term(term.total, _float_weight(term.weight)) for term in out.terms)
    return Loss(total, weight, metrics, out.model_state, mean, terms=terms)


def _check_weight(loss: Loss) -> None:
    if loss.weight is None and loss.mean_value is None:
        fix = "Return ts.Loss.mean(values), or ts.Loss(total, weight)."
        raise LossError("weight", "loss_fn", "a total alone", "the number of its values", fix)


def _float_weight(weight: Scalar) -> Scalar:
    """The weight of a loss as a constant of its gradient in float32, or LossError."""
    is_array = isinstance(weight, jax.Array)
    is_number = checks.is_real(weight) and np.shape(weight) == ()
    if not is_number or not (is_array or 0 < weight < np.inf):
        raise LossError("weight", "loss_fn", trees.describe(weight), "one finite number > 0")
    if not is_array:
        return np.float32(weight)
    weight = weight.astype(np.float32)
    return jax.lax.stop_gradient(weight) if trees.is_traced(weight) else weight


def loss_of(out: Loss | ArrayLike, title: str = "result", where: str = "loss_fn") -> Loss:
    """A scalar as the `Loss` of which it is the mean, or LossError; a Loss as it is."""
    if isinstance(out, Loss):
        return out
    _check_scalar(title, where, out)
    return Loss(out, mean_value=out)


def _check_scalar(title: str, where: str, x: Any) -> None:
    """Raise LossError unless `x` is one real float. `jax.grad` checks this only in training."""
    dtype = trees.dtype_of(x)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or np.shape(x) != ():
        fix = "Return values.mean(), or ts.Loss.mean(values, metrics={...}): there is no has_aux."
        raise LossError(title, where, trees.describe(x), "a real float, or a ts.Loss", fix)


def _is_metric(m: object) -> bool:
    return hasattr(m, "merge") and hasattr(m, "compute")


def _as_metric(name: str, m: Any, weight: Scalar) -> PyTree:
    if _is_metric(m):
        return jax.lax.stop_gradient(m)
    if not trees.is_a(m, np.number, np.bool_) or np.shape(m) != ():
        expected = "a scalar, an object with merge and compute, or values like those of Loss.mean"
        raise LossError(f"metric {name!r}", "loss_fn", trees.describe(m), expected)
    m = jnp.asarray(m, jnp.float32)
    from tsunax.metrics.means import Mean

    return jax.lax.stop_gradient(Mean(_share(m, weight), weight))


def _share(mean: Scalar, weight: Scalar) -> Scalar:
    """Mean times weight, the part of a mean in a total; 0 for a weight of 0, even if it is 0/0."""
    is_static = not isinstance(weight, jax.Array)
    return mean * weight if is_static else jnp.where(weight != 0, mean * weight, 0)


def check_mask(mask: Maybe, rows: int) -> None:
    """Raise LossError for a mask of another number of rows."""
    if mask is not None and np.shape(mask)[:1] != (rows,):
        raise LossError("mask", "the step", trees.describe(mask), f"a first axis of {rows} rows")


def uneven(batch: PyTree) -> str:
    """The message for leaves of a batch that differ in their rows, or have none; else ""."""
    leaves = trees.leaves_at("batch", batch)
    arrays = [(path, np.shape(x)) for path, x in leaves if np.shape(x)]
    if len({shape[0] for _, shape in arrays}) == 1:
        return ""
    got = ", ".join(f"{path} {shape}" for path, shape in arrays[:4]) or "no arrays"
    return message("rows", "batch", got, "the same number in every leaf, to cut the batch by row")


def rows_of(batch: PyTree) -> int:
    """The length of the first axis of the first array that has one; 1 if none has."""
    return next((shape[0] for shape in map(jnp.shape, jax.tree.leaves(batch)) if shape), 1)


def as_update_loss(loss: Loss | Maybe) -> Loss:
    """The loss given to `update`, in the form in which `value_and_grad` returns it."""
    if not isinstance(loss, Loss):
        return Loss(None) if loss is None else loss_of(loss, "loss", "update()")
    is_traceable = trees.is_array(loss.mean_value if loss.weight is None else loss.weight)
    if is_traceable and all(hasattr(m, "compute") for m in loss.metrics.values()):
        return loss
    no_weight = {"weight": None} if loss.weight is None else {}
    return dataclasses.replace(as_loss(loss, 1), **no_weight)


def check_model_state(new: PyTree, old: PyTree) -> None:
    """Raise StateError unless the state can carry the model state of the loss function."""
    fix = "Give setup(..., model_state=...)." if old is None else "A step keeps its structure."
    checks.check_like("model_state", new, old, fix)
