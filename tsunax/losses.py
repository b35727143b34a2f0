"""Losses: optax's under their own names, and beside them what Flux.Losses has and optax lacks.

A loss gives one number per example and averages nothing: `ts.Loss.mean(values, mask)` does that.
Regressions and binary losses are element-wise. Class losses give one number per row; the classes
are on the last axis unless `axis=` says otherwise, and `where=` is a bool mask of what takes part
in their sum.

What optax has is re-exported as it is; but of integer labels, negative ones are NaN instead of
classes from the end. Ours compute in float32 (float64 stays), whatever the input, and return it;
the gradient has the input's dtype. Predictions and targets must have one shape: nothing is
broadcast. 0·log 0 is 0, and the gradient is finite wherever the value is. The checks read shapes,
dtypes and plain numbers only, so that they also work under jit, vmap and grad.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

# All but the deprecated `convex_kl_divergence`, which is `generalized_kl_divergence`.
from optax.losses import (
    binary_dice_loss,
    cosine_distance,
    cosine_similarity,
    ctc_loss,
    ctc_loss_with_forward_probs,
    dice_loss,
    generalized_kl_divergence,
    hinge_loss,
    huber_loss,
    kl_divergence,
    kl_divergence_with_log_targets,
    l2_loss,
    log_cosh,
    make_fenchel_young_loss,
    multiclass_generalized_dice_loss,
    multiclass_hinge_loss,
    multiclass_perceptron_loss,
    multiclass_sparsemax_loss,
    ntxent,
    perceptron_loss,
    poly_loss_cross_entropy,
    ranking_softmax_loss,
    safe_softmax_cross_entropy,
    sigmoid_binary_cross_entropy,
    sigmoid_focal_loss,
    smooth_labels,
    softmax_cross_entropy,
    sparsemax_loss,
    squared_error,
    triplet_margin_loss,
)
from optax.losses import softmax_cross_entropy_with_integer_labels as _with_integer_labels

from tsunax._core import trees
from tsunax.errors import LossError, message

Axis = int | tuple[int, ...]

# -------------------------------------------------------------------------------------- regressions


def absolute_error(predictions: ArrayLike, targets: ArrayLike) -> jax.Array:
    """|predictions - targets|, element by element; the gradient is 0 where they are equal.

    Raises `LossError` where the shapes differ. Its mean is the mean absolute error, mae or L1 loss.

    >>> absolute_error([1.0, 2.0, 4.5], [1.0, 3.0, 4.0]).tolist()
    [0.0, 1.0, 0.5]
    """
    predictions, targets = _pair("absolute_error", predictions=predictions, targets=targets)
    errors = predictions - targets
    return jnp.abs(jnp.where(errors == 0, 0, errors))  # JAX's own slope of |0| is 1


def squared_logarithmic_error(
    predictions: ArrayLike, targets: ArrayLike, *, epsilon: ArrayLike | None = None
) -> jax.Array:
    """(log(predictions + epsilon) - log(targets + epsilon))², element by element, for numbers >= 0.

    `epsilon` is the machine epsilon of the dtype, as in Flux; 1 is the log1p of scikit-learn and
    Keras, to rounding. Raises `LossError` where the shapes differ and for epsilon < 0.

    >>> squared_logarithmic_error([0.0, 3.0], [0.0, 1.0], epsilon=1).tolist()  # log(2)²
    [0.0, 0.480...]
    """
    loss = "squared_logarithmic_error"
    predictions, targets = _pair(loss, predictions=predictions, targets=targets)
    epsilon = _epsilon(loss, epsilon, predictions)
    return jnp.square(jnp.log(predictions + epsilon) - jnp.log(targets + epsilon))


def poisson_loss(predictions: ArrayLike, targets: ArrayLike) -> jax.Array:
    """predictions - targets·log(predictions), element by element: a Poisson likelihood without its
    constant.

    Predictions are rates >= 0; of a log-rate x the loss is `jnp.exp(x) - targets * x`. Raises
    `LossError` where the shapes differ.

    >>> poisson_loss([1.0, 2.0, 0.0], [5, 0, 0]).tolist()
    [1.0, 2.0, 0.0]
    """
    predictions, targets = _pair("poisson_loss", predictions=predictions, targets=targets)
    return predictions - _x_log_y(targets, predictions)


def euclidean_distance(
    predictions: ArrayLike, targets: ArrayLike, *, axis: Axis = -1, where: ArrayLike | None = None
) -> jax.Array:
    """sqrt(Σ (predictions - targets)²) over `axis`; the gradient is 0, and not NaN, where they are
    equal.

    Shapes [..., dim] give [...]. `where` is a bool mask of the elements to include. Raises
    `LossError` where the shapes differ.

    >>> euclidean_distance([[3.0, 4.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]]).tolist()
    [5.0, 0.0]
    """
    loss = "euclidean_distance"
    predictions, targets = _pair(loss, predictions=predictions, targets=targets)
    axes = _axes(loss, axis, predictions.ndim)
    predictions, targets = _included(loss, where, axes, predictions, targets, fill=0)
    apart = predictions - targets
    # by a power of two, which changes no bit of what has a square: one above 1e38 is inf, one below
    # 1e-38 is 0
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(apart), axes, keepdims=True))
    kind = jnp.finfo(apart.dtype)
    power = jax.lax.reduce_precision(
        jnp.minimum(largest, 2.0 ** (kind.maxexp * 3 // 4)) / 2, kind.nexp, 0
    )
    scale = jnp.where((largest > 4 * kind.tiny) & (largest < jnp.inf), power, 1)
    squares = jnp.sum(jnp.square(apart / scale), axes)
    return jnp.where(
        squares == 0, 0, jnp.sqrt(jnp.where(squares == 0, 1, squares)) * jnp.squeeze(scale, axes)
    )


def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike, labels: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None
) -> jax.Array:
    """-log softmax(logits)[label], optax's, but NaN for a label that is no class, also for a
    negative one.

    So a step whose labels are wrong is rejected, and says so; in optax -1 is the last class. A row
    of padding may have any label where a mask leaves it out: `Loss.mean(values, where=mask)`.

    >>> softmax_cross_entropy_with_integer_labels([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [1, 2, -1]).tolist()
    [0.693..., nan, nan]
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    if _faults.get() is not None:
        _look_at(labels, logits.shape, axis)
    values = _with_integer_labels(logits, labels, axis, where)
    return jnp.where(labels < 0, jnp.nan, values)


_faults: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("faults", default=None)


@contextlib.contextmanager
def faults() -> Iterator[list[str]]:
    """What class losses that run eagerly in here find wrong with their labels."""
    found: list[str] = []
    token = _faults.set(found)
    try:
        yield found
    finally:
        _faults.reset(token)


def _look_at(labels: jax.Array, shape: tuple[int, ...], axis: Axis) -> None:
    found, classes = _faults.get(), int(np.prod([shape[i] for i in np.atleast_1d(axis)]))
    if found is None or trees.is_traced(labels):
        return
    bad = (labels < 0) | (labels >= classes)
    if count := int(jnp.sum(bad)):
        at = [int(i) for i in np.unravel_index(int(jnp.argmax(bad)), labels.shape)]
        first = f"label {int(labels[tuple(at)])} at {at}" if at else f"label {int(labels)}"
        found.append(
            f"{count} of {labels.size} labels are none of the {classes} classes, first {first}"
        )


def siamese_contrastive_loss(
    distances: ArrayLike, labels: ArrayLike, *, margin: ArrayLike = 1.0
) -> jax.Array:
    """(1 - label)·distance² + label·max(0, margin - distance)², element by element.

    A label is **0 for a pair of the same kind and 1 for a different one**, as in the paper (which
    halves the sum). Distances >= 0 are of any kind, such as `euclidean_distance` or
    `cosine_distance`. Raises `LossError` where the shapes differ and for margin < 0. Hadsell et
    al., Dimensionality Reduction by Learning an Invariant Mapping, 2006.

    >>> siamese_contrastive_loss([0.5, 0.5, 2.0], [0, 1, 1]).tolist()
    [0.25, 0.25, 0.0]
    """
    loss = "siamese_contrastive_loss"
    distances, labels = _pair(loss, distances=distances, labels=labels)
    _check_number(loss, "margin", margin)
    near = jnp.where(labels == 1, 0, distances)  # 0·∞
    far = jnp.where(labels == 0, 0, jnp.maximum(margin - distances, 0))
    return (1 - labels) * jnp.square(near) + labels * jnp.square(far)


# ------------------------------------------------------------------------------- binary, ±1 and 0/1


def squared_hinge_loss(predictor_outputs: ArrayLike, targets: ArrayLike) -> jax.Array:
    """max(0, 1 - predictor_outputs·targets)², element by element, for targets -1 and 1.

    Raises `LossError` where the shapes differ and for bool targets.

    >>> squared_hinge_loss([0.5, 0.5, 2.0], [1, -1, 1]).tolist()
    [0.25, 2.25, 0.0]
    """
    loss = "squared_hinge_loss"
    if trees.dtype_of(targets) == np.bool_:
        raise LossError(
            message("targets", f"{loss}()", "dtype bool", "-1 and 1", "2 * targets - 1 makes them.")
        )
    outputs, targets = _pair(loss, predictor_outputs=predictor_outputs, targets=targets)
    return jnp.square(jnp.maximum(1 - outputs * targets, 0))


def binary_cross_entropy(
    probabilities: ArrayLike, labels: ArrayLike, *, epsilon: ArrayLike | None = None
) -> jax.Array:
    """-y·log(p + epsilon) - (1 - y)·log(1 - p + epsilon), element by element.

    Labels are 0 and 1 (also bool), or probabilities. `epsilon`, the machine epsilon of the dtype
    unless given, keeps value and gradient finite where a probability is wrong and exactly 0 or 1;
    with 0 the loss is infinite there. On logits `sigmoid_binary_cross_entropy` is more exact.
    Raises `LossError` where the shapes differ and for epsilon < 0.

    >>> binary_cross_entropy([0.5, 0.75, 0.25], [1, 1, 0]).tolist()
    [0.693..., 0.287..., 0.287...]
    """
    loss = "binary_cross_entropy"
    p, y = _pair(loss, probabilities=probabilities, labels=labels)
    epsilon = _epsilon(loss, epsilon, probabilities)
    return -_x_log_y(y, p + epsilon) - _x_log_y(1 - y, 1 - p + epsilon)


def binary_focal_loss(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    gamma: ArrayLike = 2.0,
    epsilon: ArrayLike | None = None,
) -> jax.Array:
    """(1 - p_t)^gamma · `binary_cross_entropy`, element by element, with 1 - p_t = y·(1 - p) + (1 -
    y)·p.

    gamma = 0 is `binary_cross_entropy`. On logits it is optax's `sigmoid_focal_loss`, which can
    also weigh the classes (`alpha`). Raises `LossError` where the shapes differ and for gamma or
    epsilon < 0. Lin et al., Focal Loss for Dense Object Detection, 2017.

    >>> binary_focal_loss([0.5, 0.75], [1, 1]).tolist()  # log(2) / 4; log(4/3) / 16
    [0.173..., 0.0179...]
    """
    loss = "binary_focal_loss"
    p, y = _pair(loss, probabilities=probabilities, labels=labels)
    _check_number(loss, "gamma", gamma)
    epsilon = _epsilon(loss, epsilon, probabilities)
    entropy = -_x_log_y(y, p + epsilon) - _x_log_y(1 - y, 1 - p + epsilon)
    return _power(y * (1 - p) + (1 - y) * p, gamma) * entropy


def smooth_binary_labels(labels: ArrayLike, alpha: ArrayLike) -> jax.Array:
    """labels·(1 - alpha) + alpha/2: binary labels moved towards a half. optax's `smooth_labels` is
    for one-hot labels.

    Raises `LossError` for alpha outside 0 … 1.

    >>> smooth_binary_labels([0, 1], 0.25).tolist()
    [0.125, 0.875]
    """
    loss = "smooth_binary_labels"
    _check_number(loss, "alpha", alpha, 1)
    labels = _real(loss, "labels", labels)
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.float32))
    return labels * (1 - alpha) + alpha / 2


# ------------------------------------------------------------------------------------------ classes


def cross_entropy(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    epsilon: ArrayLike | None = None,
    axis: Axis = -1,
    where: ArrayLike | None = None,
) -> jax.Array:
    """-Σ y·log(p + epsilon) over the classes, for probabilities and one-hot labels or probabilities
    [..., classes].

    `epsilon`, the machine epsilon of the dtype unless given, keeps value and gradient finite where
    a labelled class has probability 0; with 0 the loss is infinite there. `where` is a bool mask of
    the classes, or of the rows, to include. On logits `softmax_cross_entropy` is more exact. Raises
    `LossError` where the shapes differ, so for class indices, and for epsilon < 0.

    >>> cross_entropy([[0.5, 0.5], [0.25, 0.75]], [[1, 0], [0, 1]]).tolist()
    [0.693..., 0.287...]
    """
    loss = "cross_entropy"
    p, y, axes = _rows(loss, axis, probabilities=probabilities, labels=labels)
    p, y = _included(loss, where, axes, p, y)
    return -jnp.sum(_x_log_y(y, p + _epsilon(loss, epsilon, probabilities)), axes)


def kl_divergence_with_probabilities(
    predictions: ArrayLike,
    targets: ArrayLike,
    *,
    epsilon: ArrayLike | None = None,
    axis: Axis = -1,
    where: ArrayLike | None = None,
) -> jax.Array:
    """Σ targets·(log(targets) - log(predictions + epsilon)) over the classes, both as probabilities
    [..., classes].

    optax's `kl_divergence` takes the predictions as logarithms, and
    `kl_divergence_with_log_targets` both. `epsilon` and `where` as in `cross_entropy`; `LossError`
    too.

    >>> kl_divergence_with_probabilities([[0.5, 0.5]], [[1.0, 0.0]]).tolist()  # log(2)
    [0.693...]
    """
    loss = "kl_divergence_with_probabilities"
    p, y, axes = _rows(loss, axis, predictions=predictions, targets=targets)
    p, y = _included(loss, where, axes, p, y)
    return jnp.sum(_x_log_y(y, y) - _x_log_y(y, p + _epsilon(loss, epsilon, predictions)), axes)


def focal_loss(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    gamma: ArrayLike = 2.0,
    epsilon: ArrayLike | None = None,
    axis: Axis = -1,
    where: ArrayLike | None = None,
) -> jax.Array:
    """-Σ y·(1 - p)^gamma·log(p + epsilon) over the classes, for probabilities [..., classes].

    gamma = 0 is `cross_entropy`, whose labels, `epsilon` and `where` these are. On logits:
    `softmax_focal_loss`. Raises `LossError` where the shapes differ and for gamma or epsilon < 0.
    Lin et al., Focal Loss for Dense Object Detection, 2017.

    >>> focal_loss([[0.5, 0.5], [0.25, 0.75]], [[1, 0], [0, 1]]).tolist()  # log(2) / 4; log(4/3) / 16
    [0.173..., 0.0179...]
    """
    loss = "focal_loss"
    p, y, axes = _rows(loss, axis, probabilities=probabilities, labels=labels)
    _check_number(loss, "gamma", gamma)
    p, y = _included(loss, where, axes, p, y)
    return -jnp.sum(
        _power(1 - p, gamma) * _x_log_y(y, p + _epsilon(loss, epsilon, probabilities)), axes
    )


def softmax_focal_loss(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    gamma: ArrayLike = 2.0,
    axis: Axis = -1,
    where: ArrayLike | None = None,
) -> jax.Array:
    """`focal_loss` of the softmax of `logits` [..., classes], from their logarithms: exact where a
    probability is tiny.

    gamma = 0 is optax's `softmax_cross_entropy`. A logit of -∞ is a class that cannot be, one of +∞
    the class that must be. With `where` the softmax too is over the included classes. Raises
    `LossError` where the shapes differ, so for class indices, and for gamma < 0. Lin et al., Focal
    Loss for Dense Object Detection, 2017.

    >>> softmax_focal_loss([[1.0, 1.0], [jnp.log(3), 0.0]], [[1, 0], [1, 0]]).tolist()  # log(2) / 4; log(4/3) / 16
    [0.173..., 0.0179...]
    """
    loss = "softmax_focal_loss"
    x, y, axes = _rows(loss, axis, logits=logits, labels=labels)
    _check_number(loss, "gamma", gamma)
    # finite, so that a row without any class has a gradient, 0
    x, y = _included(loss, where, axes, x, y, fill=float(jnp.finfo(x.dtype).min))
    certain = jnp.isposinf(x)
    x = jnp.where(jnp.any(certain, axes, keepdims=True), jnp.where(certain, 0, x - jnp.inf), x)
    log_p = jax.nn.log_softmax(x, axes)
    weight = _power(-jnp.expm1(log_p), gamma)
    return -jnp.sum(y * weight * jnp.where((y == 0) & jnp.isneginf(log_p), 0, log_p), axes)


# ------------------------------------------------------------------------------------- segmentation


def tversky_loss(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    beta: ArrayLike = 0.7,
    smooth: ArrayLike = 1.0,
    axis: Axis | None = None,
    where: ArrayLike | None = None,
) -> jax.Array:
    """1 - (TP + smooth) / (TP + (1 - beta)·FP + beta·FN + smooth), with TP = Σ p·y, FP = Σ p·(1 -
    y), FN = Σ (1 - p)·y.

    `beta` weighs the false **negatives**: more of it, more recall. A half is the dice loss on
    probabilities. Sums are over `axis`, all but the first unless given: one number per example;
    `axis=(1, 2)` of [batch, height, width, classes] keeps the classes apart. `where` is a bool mask
    of the elements to include. Without `smooth`, nothing predicted where nothing is labelled costs
    0. Raises `LossError` where the shapes differ, for beta outside 0 … 1 and for smooth < 0. Salehi
    et al., Tversky Loss Function for Image Segmentation, 2017.

    >>> p, y = jnp.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), jnp.array([[1, 0, 0], [1, 1, 0]])
    >>> tversky_loss(p, y, beta=0.75, smooth=0).tolist()  # one false positive, one false negative
    [0.199..., 0.428...]
    """
    loss = "tversky_loss"
    p, y = _pair(loss, classes=-1, probabilities=probabilities, labels=labels)
    _check_number(loss, "beta", beta, 1)
    _check_number(loss, "smooth", smooth)
    axes = _example_axes(loss, axis, p.ndim)
    p, y = _included(loss, where, axes, p, y, fill=0)
    hits = jnp.sum(p * y, axes)
    misses = (1 - beta) * jnp.sum(p * (1 - y), axes) + beta * jnp.sum((1 - p) * y, axes)
    return _one_minus(hits + smooth, hits + misses + smooth)


def squared_dice_loss(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    smooth: ArrayLike = 1.0,
    axis: Axis | None = None,
    where: ArrayLike | None = None,
) -> jax.Array:
    """1 - (2·Σ p·y + smooth) / (Σ p² + Σ y² + smooth): the dice loss of V-Net.

    optax's `dice_loss` has Σ p + Σ y below and takes logits; on probabilities that one is
    `tversky_loss(beta=0.5)`. `axis`, `where` and `LossError` as in `tversky_loss`. Milletari et
    al., V-Net, 2016.

    >>> squared_dice_loss([[1.0, 0.5, 0.0]], [[1, 0, 0]], smooth=0).tolist()  # 1 - 2 / 2.25
    [0.111...]
    """
    loss = "squared_dice_loss"
    p, y = _pair(loss, classes=-1, probabilities=probabilities, labels=labels)
    _check_number(loss, "smooth", smooth)
    axes = _example_axes(loss, axis, p.ndim)
    p, y = _included(loss, where, axes, p, y, fill=0)
    return _one_minus(2 * jnp.sum(p * y, axes) + smooth, jnp.sum(p * p + y * y, axes) + smooth)


# --------------------------------------------------------------- limits that autodiff does not find


def _x_log_y(x: jax.Array, y: jax.Array) -> jax.Array:
    """x·log(y), where 0·log(0) and 0·log(∞) are 0 with gradient 0; a NaN stays one."""
    limit = (x == 0) & ((y <= 0) | jnp.isposinf(y))
    return x * jnp.log(jnp.where(limit, 1, y))


def _power(x: jax.Array, gamma: ArrayLike) -> jax.Array:
    """x^gamma for gamma >= 0, with gradient 0 where x is 0 (or below it by rounding)."""
    return jnp.where(
        x > 0, jnp.power(jnp.where(x > 0, x, 1), gamma), jnp.where(jnp.equal(gamma, 0), 1, 0)
    )


def _one_minus(part: jax.Array, whole: jax.Array) -> jax.Array:
    """1 - part / whole, and 0 where there is no whole: none so small that its square, in the
    gradient, is 0.
    """
    nothing = whole < 1e-18
    return jnp.where(nothing, 0, 1 - part / jnp.where(nothing, 1, whole))


# ------------------------------------------------------------------------------------------- checks


def _real(loss: str, what: str, x: ArrayLike, *, floats: bool = False) -> jax.Array:
    expected = "real floats" if floats else "real numbers"
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError):
        raise LossError(
            message(what, f"{loss}()", trees.describe(x), f"an array of {expected}")
        ) from None
    kinds = (np.floating,) if floats else (np.floating, np.integer, np.bool_)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise LossError(message(what, f"{loss}()", f"dtype {array.dtype}", expected))
    return array


def _pair(loss: str, classes: int | None = None, **named: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Predictions and targets: of one shape, and one dtype, float32 or wider.

    `classes` is the axis of the one-hots.
    """
    (given, x), (wanted, y) = named.items()
    x, y = _real(loss, given, x, floats=True), _real(loss, wanted, y)
    if x.shape != y.shape:
        fix = "Nothing is broadcast."
        indices = jnp.issubdtype(y.dtype, np.integer) and y.ndim == x.ndim - 1
        if classes is not None and indices and y.shape == tuple(np.delete(x.shape, classes)):
            axis = "" if classes in (-1, x.ndim - 1) else f", axis={classes}"
            fix = f"For class indices: jax.nn.one_hot({wanted}, {x.shape[classes]}{axis})."
        elif x.size == y.size and x.ndim != y.ndim:
            fix = f"Nothing is broadcast: {wanted}.reshape({given}.shape) if the order is the same."
        got, expected = f"{y.dtype} of shape {y.shape}", f"shape {x.shape}, that of {given}"
        raise LossError(message(wanted, f"{loss}()", got, expected, fix))
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return x.astype(dtype), y.astype(dtype)


def _rows(
    loss: str, axis: Axis, **named: ArrayLike
) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    """A pair, and the axes that its rows of classes lie along."""
    given, x = next(iter(named.items()))
    axes = _axes(loss, axis, _real(loss, given, x, floats=True).ndim)
    return *_pair(loss, classes=axes[-1], **named), axes


def _axes(loss: str, axis: Axis, ndim: int) -> tuple[int, ...]:
    try:
        axes = np.lib.array_utils.normalize_axis_tuple(axis, ndim)
    except (TypeError, ValueError):  # no int, out of range, or twice
        axes = ()
    if not axes:
        raise LossError(
            message("axis", f"{loss}()", repr(axis), f"an int or a tuple of them, for {ndim} axes")
        )
    return axes


def _example_axes(loss: str, axis: Axis | None, ndim: int) -> tuple[int, ...]:
    """All axes but the batch's, unless given."""
    if axis is not None:
        return _axes(loss, axis, ndim)
    if ndim < 2:
        fix = "For a single example: axis=0."
        raise LossError(
            message("probabilities", f"{loss}()", f"{ndim} axes", "a batch axis and others", fix)
        )
    return tuple(range(1, ndim))


def _included(
    loss: str,
    where: ArrayLike | None,
    axes: tuple[int, ...],
    x: jax.Array,
    y: jax.Array,
    fill: float = 1,
) -> tuple[jax.Array, jax.Array]:
    """`x` and `y` with `fill` and 0, which add nothing, where the mask leaves them out; they may be
    NaN there.
    """
    if where is None:
        return x, y
    mask = _real(loss, "where", where)
    if mask.dtype != np.bool_:
        fix = "where != 0 makes a mask; weights of examples go into ts.Loss.mean(values, weights)."
        raise LossError(message("where", f"{loss}()", f"dtype {mask.dtype}", "bool", fix))
    rows = tuple(n for i, n in enumerate(x.shape) if i not in axes)
    if mask.shape == rows:
        mask = jnp.expand_dims(mask, axes)
    if mask.ndim != x.ndim or any(
        m not in (1, n) for m, n in zip(mask.shape, x.shape, strict=True)
    ):
        expected = f"{x.shape}, or {rows} for whole rows"
        raise LossError(message("where", f"{loss}()", f"shape {mask.shape}", expected))
    return jnp.where(mask, x, fill), jnp.where(mask, y, 0)


def _epsilon(loss: str, epsilon: ArrayLike | None, given: ArrayLike) -> ArrayLike:
    """Unless given, that of the dtype it is computed in, and float16's where the gradient goes back
    to float16.

    There 1 / epsilon of float32 is infinite.
    """
    if epsilon is None:
        dtype = trees.dtype_of(given)
        narrow = dtype == np.float16 or dtype == np.float64
        return float(jnp.finfo(dtype if narrow else np.float32).eps)
    _check_number(loss, "epsilon", epsilon)
    return epsilon


def _check_number(loss: str, what: str, x: Any, most: float = np.inf) -> None:
    """Raise LossError unless 0 <= x <= most; a traced number is let through."""
    if trees.is_traced(x):
        return
    number = isinstance(x, (int, float)) or (trees.is_array(x) and not x.ndim and jnp.isrealobj(x))
    if not number or not 0 <= x <= most:
        expected = "a number >= 0" if most == np.inf else f"a number from 0 to {most}"
        raise LossError(message(what, f"{loss}()", x if number else trees.describe(x), expected))


__all__ = [
    # optax's
    "binary_dice_loss",
    "cosine_distance",
    "cosine_similarity",
    "ctc_loss",
    "ctc_loss_with_forward_probs",
    "dice_loss",
    "generalized_kl_divergence",
    "hinge_loss",
    "huber_loss",
    "kl_divergence",
    "kl_divergence_with_log_targets",
    "l2_loss",
    "log_cosh",
    "make_fenchel_young_loss",
    "multiclass_generalized_dice_loss",
    "multiclass_hinge_loss",
    "multiclass_perceptron_loss",
    "multiclass_sparsemax_loss",
    "ntxent",
    "perceptron_loss",
    "poly_loss_cross_entropy",
    "ranking_softmax_loss",
    "safe_softmax_cross_entropy",
    "sigmoid_binary_cross_entropy",
    "sigmoid_focal_loss",
    "smooth_labels",
    "softmax_cross_entropy",
    "softmax_cross_entropy_with_integer_labels",
    "sparsemax_loss",
    "squared_error",
    "triplet_margin_loss",
    # ours
    "absolute_error",
    "binary_cross_entropy",
    "binary_focal_loss",
    "cross_entropy",
    "euclidean_distance",
    "focal_loss",
    "kl_divergence_with_probabilities",
    "poisson_loss",
    "siamese_contrastive_loss",
    "smooth_binary_labels",
    "softmax_focal_loss",
    "squared_dice_loss",
    "squared_hinge_loss",
    "squared_logarithmic_error",
    "tversky_loss",
]
