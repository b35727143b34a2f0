"""Schedules as formulas of the step, in plain JAX: optax's under their own names, and more."""

# Without `from __future__ import annotations`: the annotations of a formula are its checks.

import itertools

import jax.numpy as jnp

from tsunax.schedules import schedule_type as t
from tsunax.schedules.schedule_type import Length, NotNegative, Positive, Value, Wait, schedule

# ---------------------------------------------------------------------------- parts of the formulas


def _interpolated(a, b, u):
    """A straight line from `a` at u = 0 to `b` at u = 1; exact at both ends, never beyond them."""
    return jnp.where(u >= 1, b, jnp.clip(a + (b - a) * u, jnp.minimum(a, b), jnp.maximum(a, b)))


def _elapsed_fraction(step, begin, length):
    """From 0 at `begin` to 1 `length` steps later; flat before and after."""
    return jnp.clip(t.steps_since(step, begin) / jnp.maximum(length, 1), 0, 1)


def _remaining_fraction(step, begin, length):
    """From 1 at `begin` to 0 `length` steps later; 1 - ramp would keep no digit near the end."""
    length = jnp.maximum(length, 1)
    return jnp.clip((length - t.steps_since(step, begin)) / length, 0, 1)


def _cosine(u):
    """From 1 to 0 along half a cosine."""
    return 0.5 * (1 + jnp.cos(jnp.pi * u))


def _power(u, exponent):
    """u**exponent for u from 0 to 1. An infinite slope at 0 would make the gradient NaN there."""
    return jnp.where(u > 0, jnp.where(u > 0, u, 1) ** exponent, exponent == 0)


def _phase_and_cycle(step, period):
    """The elapsed fraction of the step's period, in [0, 1), and the number of past periods."""
    period = jnp.maximum(t.whole_steps(period), 1)
    return step % period / period, step // period


def _clipped_to_finite(x):
    largest_float = jnp.finfo(jnp.result_type(x)).max
    return jnp.clip(x, -largest_float, largest_float)


def _piecewise(step, points, curve="linear"):
    """Interpolate between points (step, value); flat before the first and after the last point."""
    curve_of = (lambda u: u) if curve == "linear" else (lambda u: 1 - _cosine(u))
    value = points[0][1]
    for (begin, a), (end, b) in itertools.pairwise(points):
        on_segment = _interpolated(a, b, curve_of(_elapsed_fraction(step, begin, end - begin)))
        value = jnp.where(t.steps_since(step, begin) >= 0, on_segment, value)
    return jnp.where(t.steps_since(step, points[-1][0]) >= 0, points[-1][1], value)


def _after_warmup(step, init_value, peak_value, warmup_steps, value):
    """A straight line from `init_value` to `peak_value` in `warmup_steps`, then `value`."""
    rise = _interpolated(init_value, peak_value, _elapsed_fraction(step, 0, warmup_steps))
    return jnp.where(t.steps_since(step, warmup_steps) < 0, rise, value)


def _exponential(step, init_value, transition_steps, decay_rate, staircase, end_value):
    periods = jnp.maximum(step, 0) / jnp.maximum(transition_steps, 1)
    periods = jnp.floor(periods) if staircase else periods
    value = _clipped_to_finite(init_value * _clipped_to_finite(decay_rate**periods))
    if end_value is None:
        return value
    return jnp.where(decay_rate < 1, jnp.maximum(value, end_value), jnp.minimum(value, end_value))


def _length_of_fraction(fraction, steps):
    """A fraction of a length, rounded down. The float32 just below a whole number is rounded up."""
    return jnp.floor(fraction * steps * (1 + 2.0**-23))


# ------------------------------------------------------------------------------------------ optax's


@schedule
def constant_schedule(step, value: Value):
    """`value`, a float, at every step."""
    return jnp.broadcast_to(value, jnp.broadcast_shapes(jnp.shape(step), jnp.shape(value)))


@schedule
def linear_schedule(
    step, init_value: Value, end_value: Value, transition_steps: Length, transition_begin: Wait = 0
):
    """A straight line, flat before and after: `init_value + (end_value - init_value) · u`.

    u = (step - transition_begin) / transition_steps, not below 0 and not above 1.
    """
    return _interpolated(
        end_value, init_value, _remaining_fraction(step, transition_begin, transition_steps)
    )


@schedule
def polynomial_schedule(
    step,
    init_value: Value,
    end_value: Value,
    power: NotNegative,
    transition_steps: Length,
    transition_begin: Wait = 0,
):
    """`end_value + (init_value - end_value) · u^power`, with u from 1 to 0 in `transition_steps`.

    The decay begins at step `transition_begin`; `power` is a float >= 0.
    """
    remaining = _remaining_fraction(step, transition_begin, transition_steps)
    return _interpolated(end_value, init_value, _power(remaining, power))


@schedule
def exponential_decay(
    step,
    init_value: Value,
    transition_steps: Length,
    decay_rate: Positive,
    transition_begin: Wait = 0,
    staircase: bool = False,
    end_value: t.OptionalValue = None,
):
    """`init_value · decay_rate^((step - transition_begin) / transition_steps)`, up to `end_value`.

    With `staircase` (a bool) the exponent is rounded down. `decay_rate` is above 0; one above 1
    grows, to the largest float at most.
    """
    steps = t.steps_since(step, transition_begin)
    return _exponential(steps, init_value, transition_steps, decay_rate, staircase, end_value)


@schedule
def cosine_decay_schedule(
    step, init_value: Value, decay_steps: Length, alpha: Value = 0.0, exponent: NotNegative = 1.0
):
    """Half a cosine from `init_value` to `alpha · init_value` in `decay_steps`.

    `init · ((1 - α) · c^exponent + α)` with c = (1 + cos(π step / decay_steps)) / 2. (Loshchilov
    and Hutter, SGDR, arXiv:1608.03983.)

    >>> from tsunax.schedules import cosine_decay_schedule
    >>> cosine_decay_schedule(1.0, 4).values(6).round(3)
    array([1.   , 0.854, 0.5  , 0.146, 0.   , 0.   ], dtype=float32)
    """
    decay = _power(_cosine(_elapsed_fraction(step, 0, decay_steps)), exponent)
    return _interpolated(alpha * init_value, init_value, decay)


@schedule
def linear_onecycle_schedule(
    step,
    transition_steps: Length,
    peak_value: Value,
    pct_start: t.Fraction = 0.3,
    pct_final: t.Fraction = 0.85,
    div_factor: Positive = 25.0,
    final_div_factor: Positive = 1e4,
):
    """Straight lines from `peak / div` to the peak, back, and down to `peak / div / final_div`.

    `peak_value` is a float, `div` is `div_factor` and `final_div` is `final_div_factor`, both > 0.
    The lines meet at the fractions `pct_start` and `pct_final` of `transition_steps`, rounded down.
    (Smith, arXiv:1708.07120.)
    """
    start = peak_value / div_factor
    peak_step = _length_of_fraction(pct_start, transition_steps)
    bottom_step = _length_of_fraction(pct_final, transition_steps)
    end = peak_value / (div_factor * final_div_factor)
    return _piecewise(
        step, [(0, start), (peak_step, peak_value), (bottom_step, start), (transition_steps, end)]
    )


@schedule
def cosine_onecycle_schedule(
    step,
    transition_steps: Length,
    peak_value: Value,
    pct_start: t.Fraction = 0.3,
    div_factor: Positive = 25.0,
    final_div_factor: Positive = 1e4,
):
    """Half cosines: up from `peak / div` to the peak, then down to `peak / div / final_div`.

    `peak_value` is a float, `div` is `div_factor` and `final_div` is `final_div_factor`, both > 0.
    The peak is at the fraction `pct_start` of `transition_steps`, rounded down. (Smith,
    arXiv:1708.07120.)
    """
    start = peak_value / div_factor
    peak_step = _length_of_fraction(pct_start, transition_steps)
    end = peak_value / (div_factor * final_div_factor)
    return _piecewise(
        step, [(0, start), (peak_step, peak_value), (transition_steps, end)], "cosine"
    )


@schedule
def piecewise_constant_schedule(
    step, init_value: Value, boundaries_and_scales: t.Milestones = None
):
    """`init_value`, a float, times the scale of each milestone that has been reached.

    `boundaries_and_scales` is a dict `{step: scale}`, or pairs.

    >>> from tsunax.schedules import piecewise_constant_schedule
    >>> piecewise_constant_schedule(1.0, {2: 0.5, 4: 0.1}).values(6)
    array([1.  , 1.  , 0.5 , 0.5 , 0.05, 0.05], dtype=float32)
    """
    value = init_value * jnp.ones(jnp.shape(step))
    for begin, scale in boundaries_and_scales:
        value = jnp.where(t.steps_since(step, begin) >= 0, _clipped_to_finite(value * scale), value)
    return value


@schedule
def piecewise_interpolate_schedule(
    step, interpolate_type: t.Curve, init_value: Value, boundaries_and_scales: t.Milestones = None
):
    """`piecewise_constant_schedule` with lines or half cosines from milestone to milestone.

    `interpolate_type` is "linear" or "cosine". `boundaries_and_scales` is a dict `{step: scale}`:
    at a step in it the value is the float `init_value` times all scales up to there.

    >>> from tsunax.schedules import piecewise_interpolate_schedule
    >>> piecewise_interpolate_schedule("linear", 1.0, {2: 0.5, 4: 0.1}).values(6).round(3)
    array([1.   , 0.75 , 0.5  , 0.275, 0.05 , 0.05 ], dtype=float32)
    """
    points = [(0, init_value)]
    for begin, scale in boundaries_and_scales:
        points.append((begin, _clipped_to_finite(points[-1][1] * scale)))
    return _piecewise(step, points, interpolate_type)


@schedule
def warmup_constant_schedule(step, init_value: Value, peak_value: Value, warmup_steps: Wait):
    """`init_value + (peak_value - init_value) · min(1, step / warmup_steps)`."""
    return _piecewise(step, [(0, init_value), (warmup_steps, peak_value)])


@schedule
def warmup_cosine_decay_schedule(
    step,
    init_value: Value,
    peak_value: Value,
    warmup_steps: Wait,
    decay_steps: Length,
    end_value: Value = 0.0,
    exponent: NotNegative = 1.0,
):
    """A straight line from `init_value` to `peak_value`, then half a cosine down to `end_value`.

    The line takes `warmup_steps` steps; `decay_steps` is the length of both. After the warm-up it
    is `end + (peak - end) · c^exponent`, with c from 1 to 0 along a cosine. A peak of 0 decays to
    0. Raises HyperparameterError unless `warmup_steps < decay_steps`.

    >>> from tsunax.schedules import warmup_cosine_decay_schedule
    >>> warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps=2, decay_steps=6).values(8).round(3)
    array([0.   , 0.5  , 1.   , 0.854, 0.5  , 0.146, 0.   , 0.   ], dtype=float32)
    """
    decay = _power(
        _cosine(_elapsed_fraction(step, warmup_steps, decay_steps - warmup_steps)), exponent
    )
    end_value = jnp.where(peak_value == 0, 0.0, end_value)  # optax divides by the peak: 0, too
    decayed = _interpolated(end_value, peak_value, decay)
    return _after_warmup(step, init_value, peak_value, warmup_steps, decayed)


@schedule
def warmup_exponential_decay_schedule(
    step,
    init_value: Value,
    peak_value: Value,
    warmup_steps: Wait,
    transition_steps: Length,
    decay_rate: Positive,
    transition_begin: Wait = 0,
    staircase: bool = False,
    end_value: t.OptionalValue = None,
):
    """A straight line from `init_value` to `peak_value` in `warmup_steps`, then exponential decay.

    The decay is `exponential_decay(peak_value, transition_steps, decay_rate, transition_begin,
    staircase, end_value)` of the steps after the warm-up.
    """
    steps = t.steps_since(t.steps_since(step, warmup_steps), transition_begin)
    decayed = _exponential(steps, peak_value, transition_steps, decay_rate, staircase, end_value)
    return _after_warmup(step, init_value, peak_value, warmup_steps, decayed)


# ------------------------------------------------------------------------------------- not in optax


@schedule
def inverse_time(step, init_value: Value, decay_rate: NotNegative, power: NotNegative = 1.0):
    """`init_value / (1 + decay_rate · step)^power`, of floats; Inv of ParameterSchedulers.jl."""
    return init_value / (1 + decay_rate * step) ** power


@schedule
def inverse_sqrt(step, peak_value: Value, warmup_steps: Wait, init_value: Value = 0.0):
    """A straight line from `init_value` to `peak_value`, then `peak · sqrt(warmup_steps / step)`.

    The line takes `warmup_steps` steps. Noam's schedule counts from 1: for a model of width d it is
    `shift(inverse_sqrt((d * warmup_steps) ** -0.5, warmup_steps), 1)`. (arXiv:1706.03762.)

    >>> from tsunax.schedules import inverse_sqrt
    >>> inverse_sqrt(1.0, warmup_steps=4).values(17)[[0, 2, 4, 16]]
    array([0. , 0.5, 1. , 0.5], dtype=float32)
    """
    warmup = jnp.maximum(warmup_steps, 1)
    decayed = peak_value * jnp.sqrt(warmup / jnp.maximum(step, warmup))
    return _after_warmup(step, init_value, peak_value, warmup_steps, decayed)


@schedule
def warmup_stable_decay(
    step,
    init_value: Value,
    peak_value: Value,
    warmup_steps: Wait,
    stable_steps: Wait,
    cooldown_steps: Length,
    end_value: Value = 0.0,
):
    """A straight line up to `peak_value`, a flat part, and a straight line down to `end_value`.

    It starts at `init_value`; the parts take `warmup_steps`, `stable_steps` and `cooldown_steps`.
    (MiniCPM, arXiv:2404.06395; the straight cooldown is Hägele et al., arXiv:2405.18392.)

    >>> from tsunax.schedules import warmup_stable_decay
    >>> warmup_stable_decay(0.0, 1.0, warmup_steps=2, stable_steps=3, cooldown_steps=2).values(8)
    array([0. , 0.5, 1. , 1. , 1. , 1. , 0.5, 0. ], dtype=float32)
    """
    after_warmup = t.steps_since(step, warmup_steps)
    cooled = _interpolated(
        peak_value, end_value, _elapsed_fraction(after_warmup, stable_steps, cooldown_steps)
    )
    return _after_warmup(step, init_value, peak_value, warmup_steps, cooled)


_triangle_wave = lambda u: 1 - jnp.abs(2 * u - 1)
_sine_hump = lambda u: jnp.sin(jnp.pi * u)


@schedule
def triangle(step, low: Value, high: Value, period: t.Period):
    """From `low` up to `high` and back in `period` steps, repeated. (Smith, arXiv:1506.01186.)"""
    return _interpolated(low, high, _triangle_wave(_phase_and_cycle(step, period)[0]))


@schedule
def triangle_halving(step, low: Value, high: Value, period: t.Period):
    """`triangle(low, high, period)`; the height `high - low` halves after each `period` steps."""
    u, past_cycles = _phase_and_cycle(step, period)
    return _interpolated(low, high, _triangle_wave(u) * 0.5**past_cycles)


@schedule
def triangle_exponential(step, low: Value, high: Value, period: t.Period, decay_rate: t.Decay):
    """`triangle(low, high, period)`, its height times the float `decay_rate` at each step."""
    return _interpolated(
        low, high, _triangle_wave(_phase_and_cycle(step, period)[0]) * decay_rate**step
    )


@schedule
def sine(step, low: Value, high: Value, period: t.Period):
    """`low + (high - low) · |sin(π step / period)|`: one hump in each `period` steps."""
    return _interpolated(low, high, _sine_hump(_phase_and_cycle(step, period)[0]))


@schedule
def sine_halving(step, low: Value, high: Value, period: t.Period):
    """`sine(low, high, period)`; the height `high - low` halves after each `period` steps."""
    u, past_cycles = _phase_and_cycle(step, period)
    return _interpolated(low, high, _sine_hump(u) * 0.5**past_cycles)


@schedule
def sine_exponential(step, low: Value, high: Value, period: t.Period, decay_rate: t.Decay):
    """`sine(low, high, period)`, its height times the float `decay_rate` at each step."""
    return _interpolated(
        low, high, _sine_hump(_phase_and_cycle(step, period)[0]) * decay_rate**step
    )


@schedule
def cosine_annealing(step, low: Value, high: Value, period: t.Period, restart: bool = True):
    """Half a cosine from `high` towards `low` in `period` steps, repeated if `restart`.

    With restarts `low` itself is never reached: the last step of a period is 1/period before it.
    (Loshchilov and Hutter, SGDR, arXiv:1608.03983.)
    """
    u = _phase_and_cycle(step, period)[0] if restart else _elapsed_fraction(step, 0, period)
    return _interpolated(low, high, _cosine(u))


__all__ = [
    # optax's
    "constant_schedule", "cosine_decay_schedule", "cosine_onecycle_schedule", "exponential_decay",
    "linear_onecycle_schedule", "linear_schedule", "piecewise_constant_schedule",
    "piecewise_interpolate_schedule", "polynomial_schedule", "warmup_constant_schedule",
    "warmup_cosine_decay_schedule", "warmup_exponential_decay_schedule",
    # not in optax
    "cosine_annealing", "inverse_sqrt", "inverse_time", "sine", "sine_exponential", "sine_halving",
    "triangle", "triangle_exponential", "triangle_halving", "warmup_stable_decay",
]  # fmt: skip
