"""The learning rate at which the loss falls fastest: a hundred steps on a copy, before a run.

Afterwards the state, its key and the position of the data are unchanged, bit by bit.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from tsunax import guard
from tsunax._core import Figure, PyTree, checks, trees
from tsunax.errors import HyperparameterError, WrongTypeError
from tsunax.hyper import adjust
from tsunax.precision import LossScale
from tsunax.program import TrainStep, check_is_train_step
from tsunax.run import chunks, fused_loop, plots
from tsunax.run.feed import Feed
from tsunax.state import TrainState, check_state, own
from tsunax.states import refuse_population

__all__ = ["RangeTest", "find_learning_rate"]


@dataclass(frozen=True)
class RangeTest:
    """The losses at rising learning rates; `plot()` draws them, and printing shows the answer.

    `rates`, `losses` (NaN for a rejected step) and `smoothed` are float arrays [points], of which
    the first `used` come before the loss diverged. `steepest` is the rate of the fastest fall,
    `tenth` is a tenth of the rate with the lowest loss; `name` is the hyperparameter's name.
    """

    name: str
    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    used: int
    steepest: float
    tenth: float

    def __repr__(self) -> str:
        n_points = len(self.rates)
        text = f"{self.name} from {self.rates[0]:.2g} to {self.rates[-1]:.2g} in {n_points} steps"
        text += f", diverged at {self.rates[self.used]:.2g}" if self.used < n_points else ""
        tenth = f"a tenth of the minimum's {self.tenth:.2g}"
        return f"{text}: steepest at {self.steepest:.2g}, {tenth}"

    def plot(self) -> Figure:
        """A matplotlib Figure: loss over rate, both suggestions. MissingLibraryError without it."""
        figure = plots.new_figure(6.4, 2.8)
        axes = figure.subplots()
        curve = self.rates[: self.used], self.smoothed[: self.used]
        plots.draw(axes, "averaged loss", {"averaged loss": curve})
        axes.set_xscale("log")
        plots.log_ticks(axes.xaxis, curve[0])
        suggestions = {"steepest (returned)": self.steepest, "minimum / 10": self.tenth}
        for i, (name, rate) in enumerate(suggestions.items(), 1):
            axes.axvline(rate, color=f"C{i}", linewidth=1, label=f"{name}: {rate:.2g}")
        axes.set_xlabel(self.name.replace("_", " "), fontsize=9)
        style: Any = {"loc": "outside upper center", "ncols": 2, "fontsize": 8, "edgecolor": "none"}
        figure.legend(handles=axes.lines[1:], **style)
        return figure


@dataclass(frozen=True)
class _Ramp:
    """A step that raises its hyperparameter with each call. `ramp`: (low, slope, first place).

    The place on the ramp counts calls that were not rejected: if the gradient overflowed under a
    loss scale, the same rate is tried again with the lower scale.
    """

    step: TrainStep
    name: str

    @property
    def masks(self) -> bool:
        return self.step.masks

    def __call__(self, state: TrainState, batch, *, ramp, **extra):
        scale, place = state.loss_scale, state.calls - state.rejected
        state = adjust(state, **{self.name: self.rate(ramp, place)})
        state, info = self.step.pure(state, batch, extra)
        rejected = jnp.zeros((), bool) if info.verdict is None else info.verdict > 0
        repeated = jnp.zeros((), bool)
        if scale is not None:
            came_down = cast(LossScale, state.loss_scale).scale < scale.scale
            repeated = rejected & came_down & ~guard.is_of_loss(info.verdict)
        return state, {"loss": info.loss, "rejected": rejected, "repeated": repeated}

    def rate(self, ramp, place):
        low, slope, first = ramp
        return low * jnp.exp(slope * (place - first).astype(jnp.float32))


@checks.naming_arguments
def find_learning_rate(
    step: TrainStep,
    state: TrainState,
    data: Iterable[PyTree] | None = None,
    *,
    low: float = 1e-8,
    high: float = 1.0,
    points: int = 100,
    smooth: float = 0.9,
    stop: float = 4.0,
    name: str = "learning_rate",
    **extra: Any,
) -> tuple[float, RangeTest]:
    """The learning rate at which the loss falls fastest, by a range test: `(rate, report)`.

        for i in range(points):
            state = ts.adjust(state, learning_rate=low * (high / low) ** (i / (points - 1)))
            state, info = step(state, next(batches))

    on a copy of the state, in the compiled loop of `run_steps`. The losses end where their
    exponential average (bias-corrected, `smooth`) is above `stop` times its minimum, or a step is
    rejected, unless its gradient overflowed and a loss scale came down: then the rate is tried
    again. `rate` is where the losses fall most steeply, by a line through the points around each
    rate, a sixth of the range wide: never in the first or last twelfth of the range.
    `report.tenth` is another choice.

    Args:
      data: as for `fit`, None too; read anew after its end, and put back to its place. No iterator.
      points: of the range, 10 or more.
      name: of the hyperparameter, where there are several: "learning_rate@head", "1.learning_rate".
      extra: arguments for the step.

    Raises HyperparameterError for numbers that make no sense, a rule without that live name, and a
    loss that never falls. Source: Smith, "Cyclical Learning Rates for Training Neural Networks"
    (2017); defaults of fastai's and Lightning's finders, with less smoothing.

    >>> import tsunax as ts
    >>> x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"] - x.sum(1)) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(8)})
    >>> rate, report = find_learning_rate(step, state, ts.batches(x, 32), low=1e-5, high=10.0)
    >>> 0.01 < rate < 1, report.used < 100, ts.hyperparams(state)
    (True, True, {'learning_rate': 0.1})
    """
    where = "find_learning_rate()"
    check_is_train_step(step, where)
    checks.check_count(points, where, "points", least=10)
    if not 0 < low < high < math.inf:
        raise HyperparameterError("low and high", where, f"{low!r} and {high!r}", "0 < low < high")
    if not 0 <= smooth < 1 < stop:
        got = f"smooth={smooth}, stop={stop}"
        raise HyperparameterError("average", where, got, "0 <= smooth < 1 < stop")
    if isinstance(data, Iterator):
        expected = "data that can be read again, as a list or ts.batches"
        raise WrongTypeError("data", where, trees.describe(data), expected)
    check_state(state, where)
    refuse_population(state, where)
    state = jax.tree.map(own, state)
    ramped_step, first_call = _Ramp(step, name), np.asarray(state.calls - state.rejected)
    ramp = np.float32(low), np.float32(math.log(high / low) / (points - 1)), first_call
    rates = np.asarray(ramped_step.rate(ramp, first_call + jnp.arange(points)), np.float64)
    until_divergence = lambda losses: _smoothed_until_divergence(losses, smooth, stop)
    losses = _losses(ramped_step, state, data, points, {**extra, "ramp": ramp}, until_divergence)
    return _with_suggestions(name, rates, losses, *until_divergence(losses))


def _losses(ramp: _Ramp, state, data, points: int, extra, until_divergence) -> np.ndarray:
    """Losses in float64 until they diverge: NaN for rejected steps, left out for repeated steps."""
    loop, feed = fused_loop.fused(ramp, True), Feed(ramp, data, state, chunks.Limits())
    losses, calls = np.zeros(0), 0
    try:
        while len(losses) < points and until_divergence(losses)[1] == len(losses):
            if (chunk := feed.take(points - len(losses), state, calls)) is None:
                continue
            state, infos = loop(state, chunk.feed, chunks.count_of(chunk.steps), extra)
            calls += chunk.steps
            columns = jax.tree.map(np.asarray, infos.stacked(None, slice(chunk.steps)))
            chunk_losses = np.where(columns["rejected"], np.nan, columns["loss"].astype(np.float64))
            losses = np.concatenate([losses, chunk_losses[~columns["repeated"]]])
    finally:
        feed.return_data()
        feed.close()
    return np.pad(losses, (0, points - len(losses)), constant_values=np.nan)


def _smoothed_until_divergence(
    losses: np.ndarray, smooth: float, stop: float
) -> tuple[np.ndarray, int]:
    """The bias-corrected average of the losses, and how many come before they diverge."""
    smoothed = plots.exponential_average(np.arange(len(losses)), losses, smooth)
    diverges = smoothed > stop * np.abs(np.minimum.accumulate(smoothed))
    used = int(np.argmax([*(diverges | ~np.isfinite(losses)), True]))
    return np.where(np.arange(len(losses)) <= used, smoothed, np.nan), used


def _with_suggestions(name: str, rates, losses, smoothed, used: int) -> tuple[float, RangeTest]:
    half_width = min(len(rates) // 12 + 1, (used - 1) // 2)
    weights = np.arange(-half_width, half_width + 1.0)  # a symmetric window has no lag
    slopes = np.correlate(losses[:used], weights, "valid") if half_width > 0 else np.zeros(1)
    if not slopes.min() < 0:
        got = f"a loss that does not fall up to {rates[min(used, len(rates) - 1)]:.2g}"
        expected = "one that falls somewhere between low and high, and then diverges"
        raise HyperparameterError(name, "find_learning_rate()", got, expected)
    steepest = float(rates[half_width + int(slopes.argmin())])
    tenth = float(rates[int(np.argmin(smoothed[:used]))] / 10)
    return steepest, RangeTest(name, rates, losses, smoothed, used, steepest, tenth)
