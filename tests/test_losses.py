"""Losses: against NumPy in float64, against the numbers of PyTorch and Flux, at their limits, and in their errors.

`test_flux_<name>` covers the row <name> of Flux.Losses. Numbers marked torch are printed by PyTorch 2.13 in float64
(`torch.nn.functional`, reduction="none"; the focal loss of torchvision 0.29); those marked Flux are the expectations
of Flux's own test/losses.jl (0.16), means over all columns.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests.helpers import medium_if
from tsunax import losses
from tsunax._step import step_errors
from tsunax.errors import LossError

# jax.experimental.enable_x64 is gone from new releases, jax.enable_x64 not yet in 0.7.2
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64

EPS = 2.0**-23
INF, NAN = np.inf, np.nan
rng = np.random.default_rng(0)


def f32(*arrays):
    return [np.asarray(x, np.float32) for x in arrays]


def run(loss, x, y, **options):
    """The values, and the gradient of their sum by `x`, both as float64, from one compiled program in float32."""
    f = functools.partial(loss, **options)

    @jax.jit
    def both(x, y):
        return f(x, y), jax.grad(lambda x: f(x, y).sum())(x)

    values, slopes = both(*f32(x, y))
    assert values.dtype == slopes.dtype == np.float32
    return np.asarray(values, np.float64), np.asarray(slopes, np.float64)


def value(loss, x, y, **options):
    return np.asarray(jax.jit(functools.partial(loss, **options))(*f32(x, y)), np.float64)


def close(got, expected, rtol=2e-6, atol=1e-7):
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=rtol, atol=atol)


# ------------------------------------------------------------------------------------- every loss of ours, in NumPy


def xlogy(x, y):
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x == 0, 0.0, x * np.log(y))


def in_numpy(name, x, y, *, eps=EPS, gamma=2.0, beta=0.7, smooth=1.0, margin=1.0):
    """The loss from its definition, in float64; classes on the last axis, examples on the first."""
    pixels = tuple(range(1, x.ndim))
    match name:
        case "absolute_error":
            return np.maximum(x - y, y - x)
        case "squared_logarithmic_error":
            return np.log((x + eps) / (y + eps)) ** 2
        case "poisson_loss":
            return x - xlogy(y, x)
        case "squared_hinge_loss":
            return np.where(x * y < 1, (1 - x * y) ** 2, 0)
        case "siamese_contrastive_loss":
            return np.where(y == 1, np.where(x < margin, margin - x, 0) ** 2, x**2)
        case "euclidean_distance":
            return np.linalg.norm(x - y, axis=-1)
        case "binary_cross_entropy":
            return -xlogy(y, x + eps) - xlogy(1 - y, 1 - x + eps)
        case "binary_focal_loss":
            p_t = np.where(y == 1, x, 1 - x)
            return -((1 - p_t) ** gamma) * np.log(p_t + eps)
        case "cross_entropy":
            return -np.einsum("...c,...c->...", y, np.log(x + eps))
        case "kl_divergence_with_probabilities":
            return (xlogy(y, y) - xlogy(y, x + eps)).sum(-1)
        case "focal_loss":
            return -(y * (1 - x) ** gamma * np.log(x + eps)).sum(-1)
        case "softmax_focal_loss":
            p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
            return -(y * (1 - p) ** gamma * np.log(p)).sum(-1)
        case "tversky_loss":
            true, false_positive, false_negative = (z.sum(pixels) for z in (x * y, x * (1 - y), (1 - x) * y))
            return 1 - (true + smooth) / (true + (1 - beta) * false_positive + beta * false_negative + smooth)
        case "squared_dice_loss":
            return 1 - (2 * (x * y).sum(pixels) + smooth) / ((x**2).sum(pixels) + (y**2).sum(pixels) + smooth)


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    x: np.ndarray
    y: np.ndarray
    options: dict = dataclasses.field(default_factory=dict)

    def __str__(self):
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])

    @property
    def loss(self) -> Callable:
        return functools.partial(getattr(losses, self.name), **self.options)

    def reference(self, x):
        return in_numpy(self.name, x, self.y, **{k[:3] if k == "epsilon" else k: v for k, v in self.options.items()})


def simplex(*shape):
    return 0.8 * rng.dirichlet(np.ones(shape[-1]), shape[:-1]) + 0.2 / shape[-1]  # away from 0, for the differences


NUMBERS, OTHERS = rng.normal(size=(4, 3)), rng.normal(size=(4, 3))
RATES, COUNTS = rng.uniform(0.2, 4, (4, 3)), rng.poisson(2.0, (4, 3)).astype(float)
HALVES, BITS = rng.uniform(0.05, 0.95, (4, 3)), rng.integers(0, 2, (4, 3)).astype(float)
CLASSES, SOFT = simplex(4, 5), simplex(4, 5)
ONE_HOT = np.eye(5)[[0, 3, 3, 1]]
IMAGES, MASKS = rng.uniform(size=(3, 4, 2)), rng.integers(0, 2, (3, 4, 2)).astype(float)
ROWS = [
    Row("absolute_error", NUMBERS, OTHERS),
    Row("squared_logarithmic_error", RATES, RATES[::-1]),
    Row("squared_logarithmic_error", RATES, COUNTS, {"epsilon": 1.0}),
    Row("poisson_loss", RATES, COUNTS),
    Row("squared_hinge_loss", NUMBERS, 2 * BITS - 1),
    Row("siamese_contrastive_loss", RATES, BITS),
    Row("siamese_contrastive_loss", RATES, BITS, {"margin": 2.5}),
    Row("euclidean_distance", NUMBERS, OTHERS),
    Row("binary_cross_entropy", HALVES, BITS),
    Row("binary_cross_entropy", HALVES, SOFT[:, :3], {"epsilon": 1e-3}),
    Row("binary_focal_loss", HALVES, BITS),
    Row("binary_focal_loss", HALVES, BITS, {"gamma": 0.5}),
    Row("cross_entropy", CLASSES, ONE_HOT),
    Row("cross_entropy", CLASSES, SOFT, {"epsilon": 0}),
    Row("kl_divergence_with_probabilities", CLASSES, SOFT),
    Row("focal_loss", CLASSES, ONE_HOT),
    Row("focal_loss", CLASSES, SOFT, {"gamma": 0.5}),
    Row("softmax_focal_loss", 3 * SOFT, ONE_HOT),
    Row("softmax_focal_loss", 3 * SOFT, CLASSES, {"gamma": 1.5}),
    Row("tversky_loss", IMAGES, MASKS),
    Row("tversky_loss", IMAGES, MASKS, {"beta": 0.2, "smooth": 0.0}),
    Row("squared_dice_loss", IMAGES, MASKS),
]


def slopes(f, x, weights, h=1e-6):
    """The gradient of Σ weights·f by central differences in float64."""
    out = np.empty_like(x)
    for i in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[i] += h
        down[i] -= h
        out[i] = (weights * (f(up) - f(down))).sum() / (2 * h)
    return out


@pytest.mark.parametrize("row", medium_if(lambda row: row.options, ROWS), ids=str)
def test_numpy(row):
    """Values and gradients in float64 and float32, low precision, vmap: one compiled program.

    The rounded input is an argument: XLA drops a rounding inside of a program on a GPU (`xla_allow_excess_precision`).
    """
    expected = row.reference(row.x)
    weights = np.linspace(1, 2, expected.size).reshape(expected.shape)
    rounded = row.x.astype(jnp.bfloat16)

    @jax.jit
    def all_of(x, rounded, y, weights):
        def value_and_slope(x, y):
            return row.loss(x, y), jax.grad(lambda x: (row.loss(x, y) * weights).sum())(x)

        wide = value_and_slope(x, y)
        single = value_and_slope(x.astype(jnp.float32), y.astype(jnp.float32))
        low = value_and_slope(rounded, y)
        return wide, single, low, jax.vmap(row.loss)(x[:, None], y[:, None])[:, 0]

    with enable_x64(True):
        # under x64 the machine epsilon is that of float64
        options = {} if "epsilon" in row.options else {"epsilon": 2.0**-52}
        wide, single, low, mapped = jax.tree.map(np.asarray, all_of(row.x, rounded, row.y, weights))
    exact = dataclasses.replace(row, options=row.options | options)
    assert wide[0].shape == expected.shape
    assert [z[0].dtype for z in (wide, single, low)] == [np.float64, np.float32, np.float32]
    assert [z[1].dtype for z in (wide, single, low)] == [np.float64, np.float32, jnp.bfloat16]
    close(wide[0], exact.reference(row.x), 1e-13, 1e-13)
    close(wide[1], slopes(exact.reference, row.x, weights), 1e-7, 1e-8)
    close(single[0], expected, 5e-6, 1e-6)
    close(single[1], slopes(row.reference, row.x, weights), 2e-5, 1e-5)
    # a low-precision input is rounded, and nothing after it but its gradient
    close(low[0], row.reference(rounded.astype(float)), 5e-6, 1e-6)
    close(low[1], slopes(row.reference, rounded.astype(float), weights), 2**-8, 1e-5)
    close(mapped, wide[0], 1e-13, 1e-13)


# ---------------------------------------------------------------------------------------------- the rows of Flux.Losses

# Flux has the classes on the first axis, the batch on the last.
Y8 = np.array([[0, 0, 1, 1], [1, 1, 0, 0]])
P8 = np.array([[0.1, 0.9, 0.9, 0.1], [0.9, 0.1, 0.1, 0.9]])
Y15 = np.array([[1, 0, 0, 0, 1], [0, 1, 0, 1, 0], [0, 0, 1, 0, 0]])
P15 = np.exp([0.0, 1.0, 2.0])[:, None] / np.exp([0.0, 1.0, 2.0]).sum() * np.ones(5)
Y6, P6 = np.array([[1, 0], [0, 0], [0, 1]]), np.array([[0.4, 0.2], [0.5, 0.5], [0.1, 0.3]])

# What torch was given, examples on the first axis.
X4, T4 = [0.5, -1.25, 3.0, 0.0], [1.0, 0.75, 3.0, -2.5]
P4, B4 = [0.1, 0.5, 0.9, 0.6], [0.0, 1.0, 1.0, 0.3]
LOGITS4 = [-2.0, 0.5, 3.0, 40.0]
P23, Y23 = np.array([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]]), np.array([[0, 0, 1], [0.3, 0.6, 0.1]])
LOGITS23 = np.log(P23) + [[1.0], [-2.0]]


def test_flux_mse():
    values, slope = run(losses.squared_error, X4, T4)
    close(values, [0.25, 4.0, 0.0, 6.25])  # torch mse_loss
    close(slope, 2 * np.subtract(X4, T4))
    close(value(losses.squared_error, [0.9, 0.1, 0.1, 0.9], [1, 1, 0, 0]).mean(), (0.1**2 + 0.9**2) / 2)  # Flux
    close(value(losses.l2_loss, X4, T4), values / 2)


def test_flux_mae():
    values, slope = run(losses.absolute_error, X4, T4)
    close(values, [0.5, 2.0, 0.0, 2.5])  # torch l1_loss
    np.testing.assert_array_equal(slope, [-1, -1, 0, 1])
    close(value(losses.absolute_error, [0.9, 0.1, 0.1, 0.9], [1, 1, 0, 0]).mean(), 0.5)  # Flux
    values, slope = run(losses.absolute_error, [INF, 1.0, NAN], [0.0, -INF, 0.0])
    np.testing.assert_array_equal(values, [INF, INF, NAN])
    np.testing.assert_array_equal(slope[:2], [1, 1])


@pytest.mark.medium
def test_flux_msle():
    close(value(losses.squared_logarithmic_error, [345, 332, 789], [123, 456, 789]).mean(), 0.38813985859136585)  # Flux
    for scale, expected in [(1.1, 0.009084041), (0.9, 0.011100831)]:  # Flux's docstring
        y = np.array([1.0, 2.0, 3.0])
        close(value(losses.squared_logarithmic_error, scale * y, y).mean(), expected, 1e-5)
    # 0 in either place, or both
    values, slope = run(losses.squared_logarithmic_error, [0.0, 0.0, 1.0], [0.0, 1.0, 0.0])
    close(values, [0, np.log(EPS) ** 2, np.log(EPS) ** 2])
    close(slope, [0, 2 * np.log(EPS) / EPS, -2 * np.log(EPS)], 1e-5)
    # epsilon=1 is log1p, as scikit-learn, Keras and torchmetrics have it
    close(value(losses.squared_logarithmic_error, [0.5, 0.0], [1.0, 0.0], epsilon=1), [np.log(0.75) ** 2, 0])


def test_flux_huber_loss():
    values, slope = run(losses.huber_loss, X4, T4, delta=0.75)
    close(values, [0.125, 1.21875, 0.0, 1.59375])  # torch huber_loss
    close(slope, [-0.5, -0.75, 0, 0.75])
    close(value(losses.huber_loss, [0.9, 0.1, 0.1, 0.9], [1, 1, 0, 0]).mean(), 0.205)  # Flux
    # the branches meet at delta: < or <= there makes no difference
    close(run(losses.huber_loss, [1.0], [0.0], delta=1.0), [[0.5], [1.0]])


def test_flux_label_smoothing():
    close(value(losses.smooth_labels, [[0.0, 1.0]], 0.2), [[0.1, 0.9]])  # Flux
    close(value(losses.smooth_binary_labels, [0.0, 1.0, 0.25], 0.2), [0.1, 0.9, 0.3])
    # the binary form is the one-hot form of two classes
    both = value(losses.smooth_labels, np.stack([1 - np.array(B4), B4], -1), 0.3)
    close(value(losses.smooth_binary_labels, B4, 0.3), both[:, 1])
    for labels in (np.array([False, True]), np.array([0, 1])):
        smoothed = losses.smooth_binary_labels(labels, 0.5)
        assert smoothed.dtype == np.float32
        close(smoothed, [0.25, 0.75])
    smoothed = value(losses.smooth_labels, np.eye(3)[[2, 0]], 0.1)
    got = value(losses.softmax_cross_entropy, LOGITS23, smoothed)
    close(got, [0.46329738119042174, 0.7393569925972749])  # torch cross_entropy, label_smoothing=0.1


@pytest.mark.medium
def test_flux_crossentropy():
    cross_entropy = functools.partial(losses.cross_entropy, axis=0)
    close(value(cross_entropy, P8, Y8).mean(), 1.203972804325936)  # Flux
    close(value(cross_entropy, P8, 0.9 * Y8 + 0.05).mean(), 1.2039728043259348)  # Flux, smoothed
    close(value(cross_entropy, P15, Y15).mean(), 1.6076053)  # Flux's docstring
    close(value(losses.cross_entropy, P23, Y23), [0.3566749439387324, 1.1783502069519072])  # torch cross_entropy of log
    close(
        value(losses.cross_entropy, P23, np.eye(3)[[2, 0]]), [0.35667494393873245, 0.6931471805599453]
    )  # torch nll_loss
    # probabilities 0 and 1: right, wrong, a class that neither has
    p, y = [[1.0, 0, 0], [1.0, 0, 0], [0.5, 0.5, 0]], [[1.0, 0, 0], [0, 1.0, 0], [0.5, 0.5, 0]]
    values, slope = run(losses.cross_entropy, p, y)
    close(values, [0, -np.log(EPS), np.log(2)], atol=2 * EPS)
    close(slope, [[-1, 0, 0], [0, -1 / EPS, 0], [-1, -1, 0]])
    values, slope = run(losses.cross_entropy, p, y, epsilon=0)
    close(values, [0, INF, np.log(2)])
    close(slope, [[-1, 0, 0], [0, -INF, 0], [-1, -1, 0]])
    # the labels have a gradient too, also where both are 0
    by_labels = jax.grad(lambda y: losses.cross_entropy(*f32(p[2]), y, epsilon=0))(*f32(y[2]))
    close(by_labels, [np.log(2), np.log(2), 0])


@pytest.mark.medium
def test_labels_that_are_no_class():
    """NaN on both sides, where optax takes -1 for the last class; the gradient of the other rows is as it was."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    ours, theirs = losses.softmax_cross_entropy_with_integer_labels, optax.softmax_cross_entropy_with_integer_labels
    good, bad, mask = np.array([0, 2, 1, 1]), np.array([0, -1, 1, 3]), np.array([1, 0, 1, 0], np.float32)
    np.testing.assert_array_equal(ours(logits, good), theirs(logits, good))
    np.testing.assert_array_equal(np.isnan(jax.jit(ours)(logits, bad)), [False, True, False, True])
    mean = lambda loss, labels: lambda x: ts.Loss.mean(loss(x, labels), where=mask).compute()
    value, slope = jax.value_and_grad(mean(ours, bad))(logits)
    expected, right = jax.value_and_grad(mean(theirs, good))(logits)
    assert value == expected
    np.testing.assert_array_equal(slope, right)
    with step_errors.repaired_labels() as found:
        ours(logits, good), jax.jit(ours)(logits, bad)
        repaired = ours(logits, bad)
    np.testing.assert_array_equal(repaired, theirs(logits, np.array([0, 0, 1, 0])))
    assert found == ["2 of 4 labels are none of the 3 classes, first label -1 at [1]"]


@pytest.mark.medium
def test_flux_logitcrossentropy():
    with np.errstate(divide="ignore"):
        logits = np.where(P8 == 0.1, np.log(0.1 / 0.9), 0)
    close(value(losses.softmax_cross_entropy, logits.T, Y8.T).mean(), 1.203972804325936)  # Flux
    close(value(losses.softmax_cross_entropy, LOGITS23, Y23), [0.3566749439387324, 1.1783502069519072])  # torch
    indices = jax.jit(losses.softmax_cross_entropy_with_integer_labels)(*f32(LOGITS23), np.array([2, 0]))
    close(indices, [0.35667494393873245, 0.6931471805599453])  # torch
    # a class that cannot be: Flux has NaN, and so has optax's plain form
    values, slope = run(losses.safe_softmax_cross_entropy, [[0.0, 0.0, -INF]], [[1.0, 0, 0]])
    close(values, [np.log(2)])
    close(slope, [[-0.5, 0.5, 0]])


@pytest.mark.medium
def test_flux_binarycrossentropy():
    values, slope = run(losses.binary_cross_entropy, P4, B4)
    # torch binary_cross_entropy, and its gradient
    close(values, [0.10536051565782631, 0.6931471805599453, 0.10536051565782628, 0.7946511994417057])
    close(slope, [1.111111111111111, -2.0, -1.1111111111111112, 1.25])
    close(value(losses.binary_cross_entropy, [0.731059, 0.5, 0.731059], [1, 0, 1]).mean(), 0.43989, 1e-5)  # Flux
    for y in (np.array([True, False]), np.array([1, 0])):
        close(losses.binary_cross_entropy(*f32([0.25, 0.25]), y), -np.log([0.25, 0.75]))
    # probabilities 0 and 1, right and wrong
    p, y = [0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]
    values, slope = run(losses.binary_cross_entropy, p, y)
    close(values, [0, 0, -np.log(EPS), -np.log(EPS)], atol=2 * EPS)
    close(slope, [1, -1, -1 / EPS, 1 / EPS])
    values, slope = run(losses.binary_cross_entropy, p, y, epsilon=0)
    close(values, [0, 0, INF, INF])  # torch cuts them off at 100
    close(slope, [1, -1, -INF, INF])


def test_flux_logitbinarycrossentropy():
    values = value(losses.sigmoid_binary_cross_entropy, LOGITS4, B4)
    # torch binary_cross_entropy_with_logits
    close(values, [0.1269280110429727, 0.4740769841801067, 0.04858735157374206, 28.0])
    close(value(losses.sigmoid_binary_cross_entropy, [2.0, -1.0, np.pi], [1, 0, 1]).mean(), 0.160832, 1e-5)  # Flux
    p = 1 / (1 + np.exp(-np.array(LOGITS4)))
    close(value(losses.binary_cross_entropy, p[:3], B4[:3]), values[:3], 2e-6)


@pytest.mark.medium
def test_flux_kldivergence():
    probability_form = losses.kl_divergence_with_probabilities
    close(value(probability_form, [[4.0], [5.0], [6.0]], [[1], [2], [3]]).mean(), -1.7661057888493457)  # Flux
    close(value(probability_form, [[0.5, 0.5]], [[1, 0]]), [np.log(2)])  # Flux's docstring
    close(
        value(probability_form, [[1.0, 0.0]], [[0.5, 0.5]]), [-np.log(EPS) / 2 - np.log(2)]
    )  # Flux: about 17.3 in f64
    close(value(probability_form, [[1.0, 0.0]], [[0.5, 0.5]], epsilon=0), [INF])  # Flux
    # torch kl_div, and with log_target
    values, slope = run(probability_form, P23, Y23, epsilon=0)
    close(values, [0.35667494393873245, 0.28040448209512714])
    close(slope, -Y23 / P23)
    close(value(losses.kl_divergence, np.log(P23), Y23), [0.35667494393873245, 0.28040448209512714])
    log_targets = value(losses.kl_divergence_with_log_targets, np.log(P23), np.log([[0.2, 0.3, 0.5], [0.3, 0.6, 0.1]]))
    close(log_targets, [0.09203285023383184, 0.28040448209512714])
    # equal distributions, with zeros
    values, slope = run(probability_form, [[0.1, 0.0, 0.9]], [[0.1, 0.0, 0.9]], epsilon=0)
    close(values, [0])
    close(slope, [[-1, 0, -1]])


def test_flux_poisson_loss():
    rates, counts = [0.5, 2.0, 7.5, 0.25], [1.0, 0.0, 9.0, 2.0]
    values, slope = run(losses.poisson_loss, rates, counts)
    # torch poisson_nll_loss, log_input=False, eps=0
    close(values, [1.1931471805599454, 2.0, -10.63412718488038, 3.022588722239781])
    close(slope, [-1, 1, -0.2, -7])
    close(value(losses.poisson_loss, [0.4, 0.5, 0.6], [0.1, 0.2, 0.3]).mean(), 0.6278353988097339)  # Flux
    close(value(losses.poisson_loss, [0.1, 0.2, 0.3], [0.1, 0.2, 0.3]).mean(), 0.5044459776946685)  # Flux
    values, slope = run(losses.poisson_loss, [0.0, INF, 0.0], [0.0, 0.0, 1.0])
    np.testing.assert_array_equal(values, [0, INF, INF])
    np.testing.assert_array_equal(slope, [1, 1, -INF])


def test_flux_hinge_loss():
    y = np.array([1.0, 2.0, 3.0, 4.0])
    assert value(losses.hinge_loss, y, 0.5 * y).mean() == 0.125  # Flux
    assert value(losses.hinge_loss, [0.1, 0.3, 1, 1.5], [1, -1, 1, 1]).mean() == pytest.approx(0.55)  # Flux's docstring


def test_flux_squared_hinge_loss():
    y = np.array([1.0, 2.0, 3.0, 4.0])
    assert value(losses.squared_hinge_loss, y, 0.5 * y).mean() == 0.0625  # Flux
    # the margin met exactly, by far, by ∞; missed
    values, slope = run(losses.squared_hinge_loss, [1.0, 3.0, INF, -1.0], [1, 1, 1, 1])
    np.testing.assert_array_equal(values, [0, 0, 0, 4])
    np.testing.assert_array_equal(slope, [0, 0, 0, -4])


def test_flux_dice_coeff_loss():
    dice = functools.partial(losses.squared_dice_loss, axis=0)
    close(value(dice, [0, 1.4, 0.5, 1.2], [1.0, 0.5, 0.3, 2.4]), 0.28)  # Flux
    close(value(dice, [1.1, 2.1, 3.1], [1, 2, 3]), 0.000992391663909964, atol=2e-7)  # Flux's docstring
    # neither predicted nor labelled; predicted only
    values, slope = run(losses.squared_dice_loss, np.zeros((1, 3)), np.zeros((1, 3)), smooth=0)
    np.testing.assert_array_equal(values, [0])
    np.testing.assert_array_equal(slope, np.zeros((1, 3)))
    assert value(losses.squared_dice_loss, np.ones((1, 3)), np.zeros((1, 3)), smooth=0) == 1
    # optax's dice is not squared: on probabilities it is the Tversky loss at a half
    logits, y = np.log(CLASSES)[None], ONE_HOT[None]
    expected = value(losses.dice_loss, logits, y, reduction="none")
    close(value(losses.tversky_loss, CLASSES[None], y, beta=0.5, axis=1), expected)
    assert abs(value(losses.squared_dice_loss, CLASSES[None], y, axis=1) - expected).max() > 0.01


def test_flux_tversky_loss():
    y, p = [1.0, 0.5, 0.3, 2.4], [0, 1.4, 0.5, 1.2]
    # Flux's code weighs the false positives by beta, its documentation the false negatives; so do we: beta is 1 - beta
    for beta, expected in [(0.7, -0.06772009029345383), (0.8, -0.09490740740740744)]:
        close(value(losses.tversky_loss, p, y, beta=1 - beta, axis=0), expected)
    close(value(losses.tversky_loss, y, y, axis=0), -0.5576923076923075)  # Flux; there FP = FN
    # one false negative costs more than one false positive when beta is over a half
    hit, miss, alarm = [1.0, 1, 0], [1.0, 0, 0], [1.0, 1, 1]
    losses_of = value(losses.tversky_loss, [hit, miss, alarm], [hit, hit, hit], beta=0.75, smooth=0)
    close(losses_of, [0, 1 - 1 / 1.75, 1 - 2 / 2.25])
    # optax's dice_loss has the two weights apart, and softmax inside
    expected = value(losses.dice_loss, np.log(CLASSES)[None], ONE_HOT[None], alpha=0.3, beta=0.7, reduction="none")
    close(value(losses.tversky_loss, CLASSES[None], ONE_HOT[None], beta=0.7, axis=1), expected)
    # an empty class
    values, slope = run(losses.tversky_loss, [[0.0, 0, 0], [0.5, 0, 0]], np.zeros((2, 3)), smooth=0)
    np.testing.assert_array_equal(values, [0, 1])
    np.testing.assert_array_equal(slope, np.zeros((2, 3)))


@pytest.mark.medium
def test_flux_binary_focal_loss():
    p, y = [[0.268941, 0.5, 0.268941], [0.731059, 0.5, 0.731059]], [[0, 1, 0], [1, 0, 1]]
    close(value(losses.binary_focal_loss, p, y).mean(), 0.0728675615927385)  # Flux
    close(
        value(losses.binary_focal_loss, [[0.6, 0.3], [0.4, 0.7]], [[1, 0], [0, 1]]).mean(), 0.05691642237852222
    )  # Flux
    soft = value(losses.binary_focal_loss, HALVES, SOFT[:, :3], gamma=0)
    close(soft, value(losses.binary_cross_entropy, HALVES, SOFT[:, :3]))
    # torchvision sigmoid_focal_loss, and optax's on logits, hard and soft labels
    hard = [0.0, 1.0, 1.0, 1.0]
    p = 1 / (1 + np.exp(-np.array(LOGITS4)))
    for gamma, expected in [
        (2.0, [0.0018035628352403787, 0.06757349051750362, 0.00010928332449699686, 0.0]),
        (1.5, [0.005223815465579088, 0.10997512964790017, 0.000501817994388368, 0.0]),
    ]:
        close(value(losses.binary_focal_loss, p, hard, gamma=gamma), expected, 1e-5)
        close(value(losses.sigmoid_focal_loss, LOGITS4, hard, gamma=gamma), expected, 1e-5)
        close(
            value(losses.binary_focal_loss, p[:3], B4[:3], gamma=gamma),
            value(losses.sigmoid_focal_loss, LOGITS4[:3], B4[:3], gamma=gamma),
            1e-5,
        )
    close(
        value(losses.sigmoid_focal_loss, LOGITS4, hard, alpha=0.25),  # torchvision
        [0.001352672126430284, 0.016893372629375906, 2.7320831124249216e-05, 0.0],
        1e-5,
    )
    # probabilities 0 and 1 under a gamma whose power has an infinite slope, and under 0
    p, y = [0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]
    values, slope = run(losses.binary_focal_loss, p, y, gamma=0.5)
    close(values, [0, 0, -np.log(EPS), -np.log(EPS)], atol=2 * EPS)
    close(slope, [0, 0, -1 / EPS, 1 / EPS], 1e-5)
    values, slope = run(losses.binary_focal_loss, p, y, gamma=0.0)
    close(slope, [1, -1, -1 / EPS, 1 / EPS])


@pytest.mark.medium
def test_flux_focal_loss():
    focal_loss = functools.partial(losses.focal_loss, axis=0)
    close(value(focal_loss, P15, Y15).mean(), 1.1277571935622628)  # Flux
    close(value(focal_loss, P6, Y6).mean(), 0.45990566879720157)  # Flux
    close(value(focal_loss, P15, Y15, gamma=0), value(losses.cross_entropy, P15, Y15, axis=0))
    # on logits, by any axis; gamma 0 is optax's cross-entropy, and a shift changes nothing
    close(value(losses.softmax_focal_loss, np.log(P15) + 3, Y15, axis=0), value(focal_loss, P15, Y15, epsilon=0))
    got, expected = (
        run(f, LOGITS23, Y23)
        for f in (functools.partial(losses.softmax_focal_loss, gamma=0), losses.softmax_cross_entropy)
    )
    close(got[0], expected[0])
    close(got[1], expected[1])
    # probabilities 0 and 1
    p, y = [[1.0, 0, 0], [1.0, 0, 0]], [[1.0, 0, 0], [0, 1.0, 0]]
    values, slope = run(losses.focal_loss, p, y, gamma=0.5)
    close(values, [0, -np.log(EPS)], atol=2 * EPS)
    close(slope, [[0, 0, 0], [0, -1 / EPS, 0]], 1e-5)
    # logits: -∞ and ∞, a certain class, an impossible one, a tiny probability whose log is not lost
    x = [[0.0, 0, -INF], [INF, 0, -INF], [200.0, 0, 0], [-200.0, 0, -INF], [0.0, -INF, 0], [INF, 0, NAN], [INF, 0, 0]]
    y = [[1.0, 0, 0]] * 4 + [[0.0, 1, 0]] + [[1.0, 0, 0]] + [[0.0, 1, 0]]
    for gamma in (2.0, 0.5):
        values, slope = run(losses.softmax_focal_loss, x, y, gamma=gamma)
        close(values, [0.5**gamma * np.log(2), 0, 0, 200, INF, NAN, INF])
        # d/dx₀ of (1 - p)^γ·(-log p) at p = ½
        half = 0.5 * (-gamma * 0.5**gamma * np.log(2) - 0.5**gamma)
        close(slope[:4], [[half, -half, 0], [0, 0, 0], [0, 0, 0], [-1, 1, 0]])


@pytest.mark.medium
def test_flux_siamese_contrastive_loss():
    contrastive = losses.siamese_contrastive_loss
    numbers = {1.0: 0.2333333333333333, 0.5: 0.10000000000000002, 1.5: 0.5333333333333333, 0: 0.09166666666666667}
    for margin, expected in numbers.items():
        close(value(contrastive, P6, Y6, margin=margin).mean(), expected)  # Flux
    y, p = [1, 0, 0, 1, 1], [0.6, 0.4, 0.1, 0.2, 0.7]
    close(value(contrastive, p, y).mean(), 0.21200000000000005)  # Flux
    close(value(contrastive, p, p).mean(), 0.18800000000000003)  # Flux
    # at the margin, beyond it, at ∞; a pair of one kind far apart
    values, slope = run(contrastive, [1.0, 2.0, INF, 0.0, INF], [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(values, [0, 0, 0, 0, INF])
    np.testing.assert_array_equal(slope, [0, 0, 0, 0, INF])
    # an identical pair, where the square root has no slope; torch pairwise_distance with eps=0
    a, b = [[3.0, 4, 0.5], [1, 1, 1], [2, 2, 2]], [[0.0, 0, 0.25], [1, 2, 3], [2, 2, 2]]
    distances, slope = run(losses.euclidean_distance, a, b)
    close(distances, [5.006246098625197, 2.23606797749979, 0])
    close(slope[1:], [[0, -1 / np.sqrt(5), -2 / np.sqrt(5)], [0, 0, 0]])
    for label in (0, 1):
        values, slope = run(lambda a, b, y=label: contrastive(losses.euclidean_distance(a, b), jnp.full(3, y)), a, b)
        assert values[2] == label
        assert np.isfinite(slope).all()


def test_flux_ctc_loss():
    # optax takes (batch, time, classes), torch (time, batch, classes) of logarithms
    logits = np.array([[[-1.2, -0.7, -2.0], [-0.3, -2.2, -1.9], [-1.0, -1.1, -1.3], [-2.0, -0.4, -1.5]]] * 2)
    labels, none, no_padding = np.array([[1, 2], [1, 1]]), np.zeros((2, 2)), np.zeros((2, 4))
    got = jax.jit(losses.ctc_loss)(*f32(logits, no_padding), labels, *f32(none))
    close(got, [2.086386386450001, 1.4883332873193111], 1e-5)  # torch ctc_loss
    # by adding up all 3⁴ paths
    p = np.exp(logits[0]) / np.exp(logits[0]).sum(-1, keepdims=True)
    for row, expected in zip(labels, got, strict=True):
        paths = [
            q for q in itertools.product(range(3), repeat=4) if [k for k, _ in itertools.groupby(q) if k] == list(row)
        ]
        close(expected, -np.log(sum(np.prod(p[range(4), q]) for q in paths)), 1e-5)


@pytest.mark.medium
def test_the_traps_of_optaxs_own():
    """What re-exported losses do at their limits. When one of these fails, optax changed, and so must the docs."""
    assert np.isnan(value(losses.softmax_cross_entropy, [[0.0, -INF]], [[1, 0]]))
    assert np.isnan(value(losses.sigmoid_binary_cross_entropy, [INF], [1]))
    assert np.isnan(value(losses.sigmoid_focal_loss, [INF], [1]))
    assert np.isnan(value(losses.kl_divergence, [[0.0, -INF]], [[1, 0]]))
    with jax.numpy_rank_promotion("allow"):
        assert losses.huber_loss(*f32(np.ones(3), np.zeros((3, 1)))).shape == (3, 3)


# ------------------------------------------------------------------------------------------------------------- masks


def test_mean_under_a_mask():
    """Per-example values, and one average at the end: padding counts for nothing."""
    padding = np.zeros((2, 3))

    def loss(p, y):
        return ts.Loss.mean(losses.cross_entropy(p, y, epsilon=0), jnp.array([1.0, 1.0, 0.0, 0.0])).compute()

    mean, slope = jax.jit(jax.value_and_grad(loss))(
        *f32(np.concatenate([P23, padding]), np.concatenate([Y23, padding]))
    )
    close(mean, (0.3566749439387324 + 1.1783502069519072) / 2)
    close(slope, np.concatenate([-Y23 / P23 / 2, padding]))


# ----------------------------------------------------------------------------------------------- shapes, axes, tracing


def test_tversky_sums_over_all_but_the_batch():
    x, y = f32(IMAGES, MASKS)
    per_image = value(losses.tversky_loss, x, y)
    assert per_image.shape == (3,)
    assert jax.eval_shape(functools.partial(losses.tversky_loss, axis=1), x, y).shape == (3, 2)
    close(per_image, value(losses.tversky_loss, x.reshape(3, -1), y.reshape(3, -1), axis=(-1,)))
    close(per_image[1], value(losses.tversky_loss, x[1], y[1], axis=(0, 1)))


def test_classes_on_two_axes():
    x, y = P23.reshape(1, 2, 3) / 2, Y23.reshape(1, 2, 3) / 2
    flat = [z.reshape(1, 6) for z in (x, y)]
    for loss in (losses.cross_entropy, losses.focal_loss, losses.softmax_focal_loss):
        close(value(loss, x, y, axis=(1, 2)), value(loss, *flat))


def test_numbers_may_be_traced():
    """One program for every gamma, epsilon, margin, beta, alpha; no check of a value that is not there yet."""
    p, y = f32(P23, Y23)

    @jax.jit
    @jax.vmap
    def sweep(z):
        return (
            losses.focal_loss(p, y, gamma=4 * z, epsilon=z / 8),
            losses.binary_focal_loss(p, y, gamma=4 * z),
            losses.siamese_contrastive_loss(p, y, margin=z),
            losses.tversky_loss(p, y, beta=z, smooth=z),
            losses.smooth_binary_labels(y, z),
        )

    swept = sweep(jnp.array([0.0, 0.5]))
    for i, z in enumerate([0.0, 0.5]):
        expected = (
            in_numpy("focal_loss", P23, Y23, gamma=4 * z, eps=z / 8),
            value(losses.binary_focal_loss, p, y, gamma=4 * z),
            value(losses.siamese_contrastive_loss, p, y, margin=z),
            in_numpy("tversky_loss", P23, Y23, beta=z, smooth=z),
            Y23 * (1 - z) + z / 2,
        )
        for got, wanted in zip(swept, expected, strict=True):
            close(got[i], wanted, 5e-6, 1e-6)
    assert np.isfinite(sweep(jnp.array([-1.0]))[2]).all()


# ------------------------------------------------------------------------------------------------------------ errors

V, P, ONES = np.ones(4, np.float32), np.full((4, 3), 0.25, np.float32), np.eye(3, dtype=np.float32)[[0, 1, 2, 0]]
PAIRS = {  # every loss with two arrays, and what it calls them
    "absolute_error": "predictions targets",
    "squared_logarithmic_error": "predictions targets",
    "poisson_loss": "predictions targets",
    "euclidean_distance": "predictions targets",
    "siamese_contrastive_loss": "distances labels",
    "squared_hinge_loss": "predictor_outputs targets",
    "binary_cross_entropy": "probabilities labels",
    "binary_focal_loss": "probabilities labels",
    "cross_entropy": "probabilities labels",
    "kl_divergence_with_probabilities": "predictions targets",
    "focal_loss": "probabilities labels",
    "softmax_focal_loss": "logits labels",
    "tversky_loss": "probabilities labels",
    "squared_dice_loss": "probabilities labels",
}
ONE_HOT_LOSSES = "cross_entropy focal_loss softmax_focal_loss tversky_loss squared_dice_loss".split()


def message_of(f, *args, **options):
    with pytest.raises(LossError) as error:
        f(*args, **options)
    text = str(error.value)
    assert "\n" not in text and "Traced" not in text
    return text


@pytest.mark.parametrize("name", PAIRS)
def test_two_shapes_are_refused(name):
    """Nothing is broadcast, in jit or out of it."""
    loss = getattr(losses, name)
    text = message_of(loss, V, V[:, None])
    assert text == message_of(jax.eval_shape, loss, V, V[:, None])
    assert text.startswith("targets: got shape (4, 1), expected (4,), as predictions. Nothing is broadcast.")
    assert "Nothing is broadcast" in message_of(loss, P, 1.0)


@pytest.mark.parametrize("name", ONE_HOT_LOSSES)
def test_class_indices_are_refused(name):
    assert "jax.nn.one_hot(labels, classes)" in message_of(getattr(losses, name), P, np.array([0, 1, 2, 0]))


# ------------------------------------------------------------------------------------------------------------- names


def test_optaxs_losses_are_its_own():
    public = {name for name in dir(optax.losses) if not name.startswith("_")}
    shared = public & set(losses.__all__)
    differ = {name for name in shared if getattr(losses, name) is not getattr(optax.losses, name)}
    assert differ == {"softmax_cross_entropy_with_integer_labels"}
    assert len(shared) == 31
    ours = set(losses.__all__) - shared
    assert ours == {*PAIRS, "smooth_binary_labels"}
    assert all(getattr(losses, name).__module__ == "tsunax.losses" for name in ours)


@pytest.mark.medium
@pytest.mark.parametrize(("loss", "at"), [(losses.squared_dice_loss, -23.0), (losses.tversky_loss, -45.0)])
def test_confident_empty_masks_have_finite_gradients(loss, at):
    slope = jax.grad(lambda x: loss(jax.nn.sigmoid(x), jnp.zeros((1, 4)), smooth=0)[0])(jnp.full((1, 4), at))
    assert np.isfinite(slope).all()
