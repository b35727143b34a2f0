"""Losses: optax's under their own names, and losses of Flux.Losses that optax lacks.

A loss returns one number per example, without averaging: `ts.Loss.mean(values, mask)` does that.
Regressions and binary losses are element-wise. Class losses return one number per row; the classes
are on the last axis unless `axis=` says otherwise.

optax's losses are re-exported as they are, except that in
`softmax_cross_entropy_with_integer_labels` negative labels give NaN instead of classes from the
end. The losses defined here compute in float32 for inputs of any dtype (float64 stays), and return
it; the gradient has the input's dtype. Predictions and targets must have one shape: nothing is
broadcast, and another shape raises LossError. 0·log 0 is 0, and the gradient is finite wherever the
value is.
"""

import contextvars
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

# All but the deprecated `convex_kl_divergence`, which is `generalized_kl_divergence`.
# fmt: off
from optax.losses import (  # isort: skip
    binary_dice_loss, cosine_distance, cosine_similarity, ctc_loss, ctc_loss_with_forward_probs,
    dice_loss, generalized_kl_divergence, hinge_loss, huber_loss, kl_divergence,
    kl_divergence_with_log_targets, l2_loss, log_cosh, make_fenchel_young_loss,
    multiclass_generalized_dice_loss, multiclass_hinge_loss, multiclass_perceptron_loss,
    multiclass_sparsemax_loss, ntxent, perceptron_loss, poly_loss_cross_entropy,
    ranking_softmax_loss, safe_softmax_cross_entropy, sigmoid_binary_cross_entropy,
    sigmoid_focal_loss, smooth_labels, softmax_cross_entropy, sparsemax_loss, squared_error,
    triplet_margin_loss,
)
# fmt: on
from optax.losses import softmax_cross_entropy_with_integer_labels as _with_integer_labels

from tsunax._core import Maybe, Scalar, trees
from tsunax.errors import LossError

Axis = int | tuple[int, ...]


# -------------------------------------------------------------------------------------- regressions


def absolute_error(predictions: ArrayLike, targets: ArrayLike) -> jax.Array:
    """|predictions - targets|, element by element; the gradient is 0 where they are equal.

    The mean of these floats is the mean absolute error, mae or L1 loss. Raises LossError if the
    shapes differ.

    >>> absolute_error([1.0, 2.0, 4.5], [1.0, 3.0, 4.0]).tolist()
    [0.0, 1.0, 0.5]
    """
    predictions, targets = _pair(predictions, targets)
    errors = predictions - targets
    return jnp.abs(jnp.where(errors == 0, 0, errors))  # JAX's own slope of |0| is 1


def squared_logarithmic_error(
    predictions: ArrayLike, targets: ArrayLike, *, epsilon: Maybe = None
) -> jax.Array:
    """(log(predictions + epsilon) - log(targets + epsilon))², element by element, for numbers >= 0.

    `epsilon` is the machine epsilon of the dtype, as in Flux; 1 is the log1p of scikit-learn and
    Keras, to rounding. Raises LossError if the shapes differ.

    >>> squared_logarithmic_error([0.0, 3.0], [0.0, 1.0], epsilon=1).tolist()  # log(2)²
    [0.0, 0.480...]
    """
    epsilon = _epsilon(epsilon, predictions)
    predictions, targets = _pair(predictions, targets)
    return jnp.square(jnp.log(predictions + epsilon) - jnp.log(targets + epsilon))


def poisson_loss(predictions: ArrayLike, targets: ArrayLike) -> jax.Array:
    """predictions - targets·log(predictions), element by element: a Poisson log-likelihood.

    Predictions are rates >= 0; for a log-rate x the loss is `jnp.exp(x) - targets * x`. The
    constant of the likelihood is left out. Floats; LossError if the shapes differ.

    >>> poisson_loss([1.0, 2.0, 0.0], [5, 0, 0]).tolist()
    [1.0, 2.0, 0.0]
    """
    predictions, targets = _pair(predictions, targets)
    return predictions - _x_log_y(targets, predictions)


def euclidean_distance(predictions: ArrayLike, targets: ArrayLike, *, axis: Axis = -1) -> jax.Array:
    """sqrt(Σ (predictions - targets)²) over `axis`; the gradient is 0 where they are equal.

    Raises LossError if the shapes differ.

    >>> euclidean_distance([[3.0, 4.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]]).tolist()
    [5.0, 0.0]
    """
    predictions, targets = _pair(predictions, targets)
    squares = jnp.sum(jnp.square(predictions - targets), axis)
    return jnp.where(squares == 0, 0, jnp.sqrt(jnp.where(squares == 0, 1, squares)))


# A function from labels and the number of classes to labels, set while `_step/step_errors.py`
# explains a rejected step.
label_watcher: contextvars.ContextVar[Callable[[jax.Array, int], jax.Array] | None] = (
    contextvars.ContextVar("label_watcher", default=None)
)


def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike, labels: ArrayLike, axis: Axis = -1, where: Maybe = None
) -> jax.Array:
    """-log softmax(logits)[label] of optax, but NaN for negative labels and those past the classes.

    `logits` are floats with the classes on `axis`, `labels` ints without it; `where` is a mask over
    the classes. A step with wrong labels is rejected, and the error names a label; in optax -1 is
    the last class. Padding may have any label under a mask: `Loss.mean(values, mask)`.

    >>> softmax_cross_entropy_with_integer_labels(jnp.zeros((3, 2)), [1, 2, -1]).tolist()
    [0.693..., nan, nan]
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    if (watch := label_watcher.get()) is not None:
        labels = watch(labels, int(np.prod([logits.shape[i] for i in np.atleast_1d(axis)])))
    return jnp.where(labels < 0, jnp.nan, _with_integer_labels(logits, labels, axis, where))


def siamese_contrastive_loss(
    distances: ArrayLike, labels: ArrayLike, *, margin: ArrayLike = 1.0
) -> jax.Array:
    """(1 - label)·distance² + label·max(0, margin - distance)², element by element.

    The `labels` are **0 for a pair of the same kind and 1 for a different one**, as in the paper
    (which halves the sum). `distances` >= 0 are floats of any kind, such as `euclidean_distance` or
    `cosine_distance`. Raises LossError if the shapes differ. Hadsell et al., Dimensionality
    Reduction by Learning an Invariant Mapping, 2006.

    >>> siamese_contrastive_loss([0.5, 0.5, 2.0], [0, 1, 1]).tolist()
    [0.25, 0.25, 0.0]
    """
    distances, labels = _pair(distances, labels)
    near = jnp.where(labels == 1, 0, distances)  # 0·∞
    far = jnp.where(labels == 0, 0, jnp.maximum(margin - distances, 0))
    return (1 - labels) * jnp.square(near) + labels * jnp.square(far)


# ------------------------------------------------------------------------------- binary, ±1 and 0/1


def squared_hinge_loss(predictor_outputs: ArrayLike, targets: ArrayLike) -> jax.Array:
    """max(0, 1 - predictor_outputs·targets)², element by element, for targets -1 and 1.

    Floats; raises LossError if the shapes differ.

    >>> squared_hinge_loss([0.5, 0.5, 2.0], [1, -1, 1]).tolist()
    [0.25, 2.25, 0.0]
    """
    outputs, targets = _pair(predictor_outputs, targets)
    return jnp.square(jnp.maximum(1 - outputs * targets, 0))


def binary_cross_entropy(
    probabilities: ArrayLike, labels: ArrayLike, *, epsilon: Maybe = None
) -> jax.Array:
    """-y·log(p + epsilon) - (1 - y)·log(1 - p + epsilon), element by element.

    The `labels` y are 0 and 1 (also bool), or probabilities, as the `probabilities` p are.
    `epsilon`, the machine epsilon of the dtype unless given, keeps value and gradient finite if p
    is wrong and exactly 0 or 1; with 0 the loss is infinite there. Raises LossError if the shapes
    differ. On logits `sigmoid_binary_cross_entropy` is more exact.

    >>> binary_cross_entropy([0.5, 0.75, 0.25], [1, 1, 0]).tolist()
    [0.693..., 0.287..., 0.287...]
    """
    p, y = _pair(probabilities, labels)
    epsilon = _epsilon(epsilon, probabilities)
    return -_x_log_y(y, p + epsilon) - _x_log_y(1 - y, 1 - p + epsilon)


def binary_focal_loss(
    probabilities: ArrayLike, labels: ArrayLike, *, gamma: ArrayLike = 2.0, epsilon: Maybe = None
) -> jax.Array:
    """(y·(1 - p) + (1 - y)·p)^gamma · `binary_cross_entropy`, element by element.

    `probabilities` p, `labels` y, `epsilon` and LossError are as in `binary_cross_entropy`, the
    loss for gamma = 0. On logits: optax's `sigmoid_focal_loss`, which can also
    weigh the classes (`alpha`). Lin et al., Focal Loss for Dense Object Detection, 2017.

    >>> binary_focal_loss([0.5, 0.75], [1, 1]).tolist()  # log(2) / 4; log(4/3) / 16
    [0.173..., 0.0179...]
    """
    p, y = _pair(probabilities, labels)
    entropy = binary_cross_entropy(p, y, epsilon=_epsilon(epsilon, probabilities))
    return _power(y * (1 - p) + (1 - y) * p, gamma) * entropy


def smooth_binary_labels(labels: ArrayLike, alpha: ArrayLike) -> jax.Array:
    """labels·(1 - alpha) + alpha/2: binary labels moved towards a half, floats.

    `alpha` is a number from 0 to 1. For one-hot labels: optax's `smooth_labels`.

    >>> smooth_binary_labels([0, 1], 0.25).tolist()
    [0.125, 0.875]
    """
    labels = jnp.asarray(labels)
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.float32))
    return labels * (1 - alpha) + alpha / 2


# ------------------------------------------------------------------------------------------ classes


def cross_entropy(
    probabilities: ArrayLike, labels: ArrayLike, *, epsilon: Maybe = None, axis: Axis = -1
) -> jax.Array:
    """-Σ y·log(p + epsilon) over the classes, for probabilities p [..., classes].

    The `labels` y, of the shape of `probabilities` (else LossError), are one-hot or probabilities;
    the classes are on `axis`. `epsilon`, the machine epsilon of the dtype unless given, keeps value
    and gradient finite if a labeled class has probability 0; with 0 the loss is infinite there. On
    logits `softmax_cross_entropy` is more exact.

    >>> cross_entropy([[0.5, 0.5], [0.25, 0.75]], [[1, 0], [0, 1]]).tolist()
    [0.693..., 0.287...]
    """
    p, y = _pair(probabilities, labels)
    return -jnp.sum(_x_log_y(y, p + _epsilon(epsilon, probabilities)), axis)


def kl_divergence_with_probabilities(
    predictions: ArrayLike, targets: ArrayLike, *, epsilon: Maybe = None, axis: Axis = -1
) -> jax.Array:
    """Σ targets·(log(targets) - log(predictions + epsilon)) over the classes.

    Both are probabilities [..., classes] of one shape (else LossError), the classes on `axis`.
    optax's `kl_divergence` takes the logarithms of the predictions, and
    `kl_divergence_with_log_targets` the logarithms of both. `epsilon` as in `cross_entropy`.

    >>> kl_divergence_with_probabilities([[0.5, 0.5]], [[1.0, 0.0]]).tolist()  # log(2)
    [0.693...]
    """
    p, y = _pair(predictions, targets)
    return jnp.sum(_x_log_y(y, y) - _x_log_y(y, p + _epsilon(epsilon, predictions)), axis)


def focal_loss(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    gamma: ArrayLike = 2.0,
    epsilon: Maybe = None,
    axis: Axis = -1,
) -> jax.Array:
    """-Σ y·(1 - p)^gamma·log(p + epsilon) over the classes, for probabilities [..., classes].

    gamma = 0 is `cross_entropy`, with the same `probabilities` p, `labels` y, `epsilon`, `axis` and
    LossError. On logits: `softmax_focal_loss`. Lin et al., Focal Loss for Dense Object Detection,
    2017.

    >>> focal_loss([[0.5, 0.5], [0.25, 0.75]], [[1, 0], [0, 1]]).tolist()  # log(2)/4, log(4/3)/16
    [0.173..., 0.0179...]
    """
    p, y = _pair(probabilities, labels)
    entropy = _x_log_y(y, p + _epsilon(epsilon, probabilities))
    return -jnp.sum(_power(1 - p, gamma) * entropy, axis)


def softmax_focal_loss(
    logits: ArrayLike, labels: ArrayLike, *, gamma: ArrayLike = 2.0, axis: Axis = -1
) -> jax.Array:
    """`focal_loss` of the softmax of `logits` [..., classes]; exact for tiny probabilities.

    gamma = 0 is optax's `softmax_cross_entropy`. A logit of -∞ excludes a class. `labels` have the
    shape of `logits` (else LossError); classes are on `axis`. Lin et al., Focal Loss for Dense
    Object Detection, 2017.

    >>> softmax_focal_loss([[1.0, 1.0], [jnp.log(3), 0.0]], [[1, 0], [1, 0]]).tolist()
    [0.173..., 0.0179...]
    """
    x, y = _pair(logits, labels)
    certain = jnp.isposinf(x)
    x = jnp.where(jnp.any(certain, axis, keepdims=True), jnp.where(certain, 0, x - jnp.inf), x)
    log_p = jax.nn.log_softmax(x, axis)
    weight = _power(-jnp.expm1(log_p), gamma)
    return -jnp.sum(y * weight * jnp.where((y == 0) & jnp.isneginf(log_p), 0, log_p), axis)


# ------------------------------------------------------------------------------------- segmentation


def tversky_loss(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    beta: ArrayLike = 0.7,
    smooth: ArrayLike = 1.0,
    axis: Axis | None = None,
) -> jax.Array:
    """1 - (TP + smooth) / (TP + (1 - beta)·FP + beta·FN + smooth), for image segmentation.

    TP = Σ p·y, FP = Σ p·(1 - y), FN = Σ (1 - p)·y. `beta`, from 0 to 1, weighs the false
    **negatives**: a larger `beta` gives more recall. A half is the dice loss on probabilities. Sums
    are over `axis`, all but the first unless given: one number per example; `axis=(1, 2)` of
    [batch, height, width, classes] keeps the classes apart. With `smooth=0`, an empty prediction of
    empty labels costs 0. Raises LossError if the shapes of `probabilities` p and `labels` y differ.
    Salehi et al., Tversky Loss Function for Image Segmentation, 2017.

    >>> p, y = jnp.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), jnp.array([[1, 0, 0], [1, 1, 0]])
    >>> tversky_loss(p, y, beta=0.75, smooth=0).tolist()  # one false positive, one false negative
    [0.199..., 0.428...]
    """
    p, y = _pair(probabilities, labels)
    axis = tuple(range(1, p.ndim)) if axis is None else axis
    hits = jnp.sum(p * y, axis)
    misses = (1 - beta) * jnp.sum(p * (1 - y), axis) + beta * jnp.sum((1 - p) * y, axis)
    return _one_minus(hits + smooth, hits + misses + smooth)


def squared_dice_loss(
    probabilities: ArrayLike, labels: ArrayLike, *, smooth: Scalar = 1.0, axis: Axis | None = None
) -> jax.Array:
    """1 - (2·Σ p·y + smooth) / (Σ p² + Σ y² + smooth): the dice loss of V-Net.

    optax's `dice_loss` has Σ p + Σ y below and takes logits; the same loss on probabilities is
    `tversky_loss(beta=0.5)`. `probabilities` p, `labels` y, `smooth`, `axis` and LossError as in
    `tversky_loss`. Milletari et al., V-Net, 2016.

    >>> squared_dice_loss([[1.0, 0.5, 0.0]], [[1, 0, 0]], smooth=0).tolist()  # 1 - 2 / 2.25
    [0.111...]
    """
    p, y = _pair(probabilities, labels)
    axis = tuple(range(1, p.ndim)) if axis is None else axis
    return _one_minus(2 * jnp.sum(p * y, axis) + smooth, jnp.sum(p * p + y * y, axis) + smooth)


# --------------------------------------------------------------- limits that autodiff does not find


def _x_log_y(x: jax.Array, y: jax.Array) -> jax.Array:
    """x·log(y), where 0·log(0) and 0·log(∞) are 0 with gradient 0; NaN stays NaN."""
    limit = (x == 0) & ((y <= 0) | jnp.isposinf(y))
    return x * jnp.log(jnp.where(limit, 1, y))


def _power(x: jax.Array, gamma: ArrayLike) -> jax.Array:
    """x^gamma for gamma >= 0, with gradient 0 where x is 0 (or below it by rounding)."""
    power = jnp.power(jnp.where(x > 0, x, 1), gamma)
    return jnp.where(x > 0, power, jnp.where(jnp.equal(gamma, 0), 1, 0))


def _one_minus(part: jax.Array, whole: jax.Array) -> jax.Array:
    """1 - part / whole, and 0 if there is no whole."""
    nothing = whole < 1e-18  # the gradient divides by the square, which would underflow to 0
    return jnp.where(nothing, 0, 1 - part / jnp.where(nothing, 1, whole))


# -------------------------------------------------------------------------------------- arguments


def _pair(predictions: ArrayLike, targets: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Predictions and targets in one shape and one dtype, float32 or wider. Raises LossError."""
    x, y = jnp.asarray(predictions), jnp.asarray(targets)
    if x.shape != y.shape:
        raise LossError(
            "targets",
            "",
            got=f"shape {y.shape}",
            expected=f"{x.shape}, as predictions",
            fix="Nothing is broadcast. For class indices: jax.nn.one_hot(labels, classes).",
        )
    if jnp.iscomplexobj(x) or jnp.iscomplexobj(y):  # a cast would drop the imaginary part
        raise LossError("predictions or targets", "", "complex numbers", "real numbers")
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return x.astype(dtype), y.astype(dtype)


def _epsilon(epsilon: Maybe, array: ArrayLike) -> ArrayLike:
    """`epsilon`, or by default the machine epsilon of the dtype in which a loss computes."""
    if epsilon is not None:
        return epsilon
    # The gradient becomes float16, in which 1 / (the epsilon of float32) is infinite.
    dtype = trees.dtype_of(array)
    return float(jnp.finfo(dtype if dtype in (np.float16, np.float64) else np.float32).eps)


# fmt: off
__all__ = [
    # optax's
    "binary_dice_loss", "cosine_distance", "cosine_similarity", "ctc_loss",
    "ctc_loss_with_forward_probs", "dice_loss", "generalized_kl_divergence", "hinge_loss",
    "huber_loss", "kl_divergence", "kl_divergence_with_log_targets", "l2_loss", "log_cosh",
    "make_fenchel_young_loss", "multiclass_generalized_dice_loss", "multiclass_hinge_loss",
    "multiclass_perceptron_loss", "multiclass_sparsemax_loss", "ntxent", "perceptron_loss",
    "poly_loss_cross_entropy", "ranking_softmax_loss", "safe_softmax_cross_entropy",
    "sigmoid_binary_cross_entropy", "sigmoid_focal_loss", "smooth_labels", "softmax_cross_entropy",
    "softmax_cross_entropy_with_integer_labels", "sparsemax_loss", "squared_error",
    "triplet_margin_loss",
    # not in optax
    "absolute_error", "binary_cross_entropy", "binary_focal_loss", "cross_entropy",
    "euclidean_distance", "focal_loss", "kl_divergence_with_probabilities", "poisson_loss",
    "siamese_contrastive_loss", "smooth_binary_labels", "softmax_focal_loss", "squared_dice_loss",
    "squared_hinge_loss", "squared_logarithmic_error", "tversky_loss",
]
