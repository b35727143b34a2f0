"""Schedules: optax's numbers, closed forms, ranges, and what makes a schedule a value."""

import copy
import dataclasses
import functools
import inspect
import itertools
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.helpers import medium_if
from tsunax import schedules as S
from tsunax.errors import HyperparameterError as Bad
from tsunax.errors import WrongTypeError as Wrong

from helpers import assert_trees_close, assert_trees_equal, count_compiles

LAST = 2**30 - 1  # no step counts beyond
F32 = np.float32

# ------------------------------------------------------------------------------------------------------- optax's

OPTAX = {n for n in dir(optax.schedules) if re.match(r"[a-z].*(_schedules?|_decay)$", n)}
SGDR = [
    dict(init_value=0.0, peak_value=1.0, warmup_steps=5, decay_steps=20),
    dict(init_value=0.1, peak_value=0.5, warmup_steps=0, decay_steps=30, end_value=0.05, exponent=2.0),
]
PARITY = [
    ("constant_schedule", dict(value=0.3)),
    ("linear_schedule", dict(init_value=1.0, end_value=0.1, transition_steps=10)),
    ("linear_schedule", dict(init_value=1e-6, end_value=1e-3, transition_steps=17, transition_begin=3)),
    ("polynomial_schedule", dict(init_value=1.0, end_value=0.01, power=2, transition_steps=50, transition_begin=5)),
    ("polynomial_schedule", dict(init_value=1.0, end_value=2.0, power=3.3, transition_steps=50)),
    ("exponential_decay", dict(init_value=1.0, transition_steps=10, decay_rate=0.5)),
    ("exponential_decay", dict(init_value=1.0, transition_steps=10, decay_rate=0.5, transition_begin=3, staircase=True)),
    ("exponential_decay", dict(init_value=0.1, transition_steps=7, decay_rate=1.3, end_value=0.5)),
    ("exponential_decay", dict(init_value=0.1, transition_steps=7, decay_rate=0.7, end_value=0.05)),
    ("cosine_decay_schedule", dict(init_value=1.0, decay_steps=40)),
    ("cosine_decay_schedule", dict(init_value=0.1, decay_steps=40, alpha=0.1, exponent=2.5)),
    ("linear_onecycle_schedule", dict(transition_steps=50, peak_value=1.0)),
    ("linear_onecycle_schedule", dict(transition_steps=57, peak_value=0.3, pct_start=0.2, pct_final=0.6, div_factor=9.0)),
    ("cosine_onecycle_schedule", dict(transition_steps=50, peak_value=1.0)),
    ("cosine_onecycle_schedule", dict(transition_steps=57, peak_value=0.3, pct_start=0.25, final_div_factor=50.0)),
    ("piecewise_constant_schedule", dict(init_value=1.0, boundaries_and_scales={20: 0.1, 10: 0.5, 0: 2.0})),
    ("piecewise_constant_schedule", dict(init_value=0.7)),
    ("piecewise_interpolate_schedule",
     dict(interpolate_type="linear", init_value=1.0, boundaries_and_scales={20: 0.1, 10: 0.5})),
    ("piecewise_interpolate_schedule",
     dict(interpolate_type="cosine", init_value=1.0, boundaries_and_scales={10: 2.5, 30: 0.1})),
    ("sgdr_schedule", dict(cosine_kwargs=SGDR)),
    ("warmup_constant_schedule", dict(init_value=0.1, peak_value=1.0, warmup_steps=10)),
    ("warmup_cosine_decay_schedule", dict(init_value=0.0, peak_value=1.0, warmup_steps=10, decay_steps=50)),
    ("warmup_cosine_decay_schedule",
     dict(init_value=0.1, peak_value=1.0, warmup_steps=0, decay_steps=50, end_value=0.01, exponent=2.0)),
    ("warmup_exponential_decay_schedule",
     dict(init_value=0.0, peak_value=1.0, warmup_steps=10, transition_steps=7, decay_rate=0.5)),
    ("warmup_exponential_decay_schedule",
     dict(init_value=0.2, peak_value=1.0, warmup_steps=10, transition_steps=7, decay_rate=0.8, transition_begin=4,
          staircase=True, end_value=0.5)),
    ("warmup_cosine_decay_schedule",
     dict(init_value=0.1, peak_value=0.0, warmup_steps=10, decay_steps=50, end_value=0.01)),
    ("cosine_decay_schedule", dict(init_value=1.0, decay_steps=10**10)),
]  # fmt: skip


def test_every_schedule_of_optax_is_here_with_its_arguments():
    assert {name for name, _ in PARITY} | {"join_schedules"} == OPTAX <= set(S.__all__)
    for name in OPTAX:
        ours, theirs = (inspect.signature(getattr(m, name)).parameters.values() for m in (S, optax))
        assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs], name


@pytest.mark.parametrize(("name", "arguments"), PARITY, ids=lambda x: x if isinstance(x, str) else "")
def test_the_numbers_are_optax_s(name, arguments):
    """To an ulp of the largest value: optax takes some differences in float64, on the host."""
    steps = np.array([*range(70), 1000, 10**6], np.int32)
    plain = getattr(optax, name)(**arguments)
    theirs = np.asarray(jax.jit(jax.vmap(lambda step: jnp.asarray(plain(step), jnp.float32)))(steps))
    ours = np.asarray(jax.jit(jax.vmap(getattr(S, name)(**arguments)))(steps))
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2 * np.spacing(np.abs(theirs).max()))


def test_join_schedules_has_optax_s_numbers():
    pieces, boundaries = (
        [optax.linear_schedule(0.0, 1.0, 7), lambda step: 0.5, optax.exponential_decay(1.0, 5, 0.5)],
        [7, 20],
    )
    steps = np.arange(60)
    theirs = jax.vmap(optax.join_schedules(pieces, boundaries))(steps)
    ours = [S.linear_schedule(0.0, 1.0, 7), 0.5, S.exponential_decay(1.0, 5, 0.5)]
    for mine in (ours, pieces):
        assert_trees_close(S.join_schedules(mine, boundaries).values(60), theirs, rtol=1e-6, atol=0)
    assert S.join_schedules(ours, boundaries) == S.sequence([(ours[0], 7), (0.5, 13), ours[2]])


def test_the_last_steps_of_a_long_schedule_keep_their_digits():
    """1 - t/n has none of them: 1 - 999999/10⁶ is 1.0133e-6 in float32."""
    n = 10**6
    assert S.linear_schedule(1.0, 0.0, n)(n - 1) == F32(1e-6)
    np.testing.assert_allclose(S.polynomial_schedule(1.0, 0.0, 0.05, n)(n - 1), 1e-6**0.05, rtol=1e-6)
    np.testing.assert_allclose(S.polynomial_schedule(3.0, 2.0, 2, n, 7)(n + 4), 2 + 9e-12, rtol=1e-7)


BEGIN_LATE = {
    "linear_schedule": lambda n: S.linear_schedule(1.0, 0.0, 10, n),
    "polynomial_schedule": lambda n: S.polynomial_schedule(1.0, 0.0, 2, 10, n),
    "exponential_decay": lambda n: S.exponential_decay(1.0, 5, 0.5, n),
    "piecewise_constant_schedule": lambda n: S.piecewise_constant_schedule(1.0, {n: 0.5, n + 7: 0.1}),
    "piecewise_interpolate_schedule": lambda n: S.piecewise_interpolate_schedule("cosine", 1.0, {n: 1, n + 7: 0.1}),
    "warmup_cosine_decay_schedule": lambda n: S.warmup_cosine_decay_schedule(1.0, 1.0, n, n + 10),
    "warmup_exponential_decay_schedule": lambda n: S.warmup_exponential_decay_schedule(1.0, 1.0, n, 5, 0.5),
    "warm-up and wait": lambda n: S.warmup_exponential_decay_schedule(1.0, 1.0, n // 2, 5, 0.5, n - n // 2),
    "warmup_stable_decay": lambda n: S.warmup_stable_decay(1.0, 1.0, n - 4, 4, 10),
    "stable for long": lambda n: S.warmup_stable_decay(1.0, 1.0, n // 2, n - n // 2, 10),
    "join_schedules": lambda n: S.join_schedules([1.0, S.linear_schedule(0.0, 1.0, 9), 3.0], [n, n + 3]),
    "nested": lambda n: S.sequence([(S.join_schedules([1.0, 2.0], [n]), n + 5), 3.0]),
    "loop": lambda n: S.loop(S.piecewise_constant_schedule(1.0, {3: 0.5, n - 2: 2.0}), n),
    "shift": lambda n: S.shift(S.linear_schedule(1.0, 0.0, 10), -n),
    "interpolate": lambda n: S.interpolate(S.linear_schedule(1.0, 0.0, 10), n),
    "reverse": lambda n: S.reverse(S.linear_schedule(1.0, 0.0, 10), n),
    "composed": lambda n: S.compose(S.linear_schedule(1.0, 0.0, 10, n), end_value=0.5),
}


@pytest.mark.parametrize("begin", [2**24 + 1, 25_000_001, 100_000_005])
def test_a_part_that_begins_late_begins_at_its_step(begin):
    """Float32 knows no step 100,000,005: it would be 100,000,008."""
    offsets = np.arange(-12, 13, dtype=np.int32)
    for name, make in BEGIN_LATE.items():
        early, late = make(40), make(begin)
        np.testing.assert_array_equal(late(begin + offsets), early(40 + offsets), name)
        assert eval(repr(late), vars(S)) == late and late != make(begin + 1), name


def test_a_late_boundary_in_a_rule_and_as_a_traced_number():
    begin = 100_000_005
    state = ts.setup(ts.rules.sgd(S.join_schedules([0.5, 0.25], [begin])), {"w": jnp.ones(1)})
    rates = [ts.hyperparams(state.replace(step=begin + k))["learning_rate"] for k in (-1, 0)]
    assert rates == [0.5, 0.25]
    moved = [ts.update(state.replace(step=begin + k), {"w": jnp.ones(1)})[0].params["w"] for k in (-1, 0)]
    assert [float(w[0]) for w in moved] == [0.5, 0.75]
    slope = jax.grad(lambda begin: S.linear_schedule(1.0, 0.0, 10, begin)(45))(jnp.float32(40.0))
    assert slope == F32(0.1)


@pytest.mark.medium
def test_where_optax_s_own_arithmetic_is_off():
    # 0.13 * 900 is 116.99999 in float32, int(0.29 * 100) is 28, and a rise that begins at 1e-7 of its height begins at
    # 1.19e-7 in float32
    assert np.argmax(S.linear_onecycle_schedule(900, 1.0, pct_start=0.13).values(200)) == 117
    assert np.argmax(S.linear_onecycle_schedule(100, 1.0, pct_start=0.29).values(200)) == 29
    assert S.linear_schedule(1e-7, 1.0, 10).values(1)[0] == F32(1e-7)
    # zero steps of warm-up is none, not one for ever
    assert (
        S.warmup_constant_schedule(0.1, 1.0, 0).values(1)[0] == 1
        and optax.warmup_constant_schedule(0.1, 1.0, 0)(5) == 0.1
    )
    # the last phase has a length of 0: optax's dict of boundaries loses the one before it
    assert S.linear_onecycle_schedule(10, 1.0, pct_final=1.0).values(11)[10] == F32(1 / 25e4)


# ------------------------------------------------- closed forms in float64, random arguments, ranges: one row for each


@dataclasses.dataclass
class Row:
    """`form(t, **arguments)` in float64 and `ends(**arguments)`, between which all values lie, in float32."""

    name: str
    form: Callable
    ends: Callable
    arguments: dict[str, Any]  # strategies
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __repr__(self):
        return "-".join([self.name, *map(str, self.fixed.values())])


def parts(low, high, of):
    """Float32 numbers on a grid: what is smaller than a normal number is 0 to XLA and not to NumPy."""
    return st.integers(low * of, high * of).map(lambda n: float(F32(n / of)))


numbers = parts(-1000, 1000, 1000) | st.sampled_from([0.0, 1.0, 1e-4, -1e6])
rates = parts(0, 10, 100)
decays = st.integers(1, 100).map(lambda n: float(F32(n / 100)))
lengths = st.integers(1, 200) | st.sampled_from([1, 2, 10**6])
waits = st.integers(0, 200)
factors = st.integers(1, 1000).map(lambda n: float(F32(n / 10)))
exponents = parts(1, 10, 100)  # below 1, the end of a cosine magnifies its rounding
line = lambda a, b, u: a + (b - a) * np.clip(u, 0, 1)
cosine = lambda u: (1 + np.cos(np.pi * np.clip(u, 0, 1))) / 2
wave = lambda u: 1 - np.abs(2 * u - 1)
hump = lambda u: np.sin(np.pi * u)
low_high = dict(low_high=st.tuples(numbers, numbers).map(sorted))
between = lambda *values: (min(values), max(values))
cycle = lambda t, n: (t % n / n, t // n)
peak = dict(init_value=numbers, peak_value=numbers)


def exponential(t, init_value, transition_steps, decay_rate, end_value=None, staircase=False, transition_begin=0, **_):
    p = np.maximum(t - transition_begin, 0) / transition_steps
    with np.errstate(over="ignore"):
        value = np.clip(
            init_value * np.minimum(decay_rate ** (np.floor(p) if staircase else p), 3.4e38), -3.4e38, 3.4e38
        )
    return value if end_value is None else (np.maximum if decay_rate < 1 else np.minimum)(value, end_value)


def warm(t, init_value, peak_value, warmup_steps, then):
    return np.where(t < warmup_steps, line(init_value, peak_value, t / max(warmup_steps, 1)), then)


def through(t, points, bend=lambda u: u):
    value = np.full(np.shape(t), points[-1][1], float)
    for (a, x), (b, y) in reversed(list(itertools.pairwise(points))):
        value = np.where(t < b, line(x, y, bend((t - a) / max(b - a, 1))), value)
    return value


def onecycle(final):
    def form(t, transition_steps, peak_value, pct_start, div_factor, final_div_factor, pct_final=None):
        start = peak_value / div_factor
        tops = [(math.floor(pct_start * transition_steps + 1e-4), peak_value)]
        tops += [(math.floor(pct_final * transition_steps + 1e-4), start)] if final else []
        points = [(0, start), *tops, (transition_steps, start / final_div_factor)]
        return through(t, points, (lambda u: u) if final else (lambda u: 1 - cosine(u)))

    return form


def onecycle_ends(peak_value, div_factor, final_div_factor, **_):
    start = F32(peak_value) / F32(div_factor)
    return between(F32(peak_value), start, F32(peak_value) / (F32(div_factor) * F32(final_div_factor)))


def cumulative(init_value, milestones):
    return [(0, init_value), *((b, init_value := type(init_value)(init_value * s)) for b, s in milestones)]


def staircase_of(t, init_value, boundaries_and_scales):
    value = np.full(np.shape(t), init_value, float)
    for begin, scale in boundaries_and_scales:
        value = value * np.where(t >= begin, scale, 1)
    return value


def milestone_ends(init_value, boundaries_and_scales, **_):
    return between(*(v for _, v in cumulative(F32(init_value), [(b, F32(s)) for b, s in boundaries_and_scales])))


milestones = st.tuples(*[st.tuples(st.integers(1, 60), parts(0, 4, 100))] * 3).map(
    lambda pairs: tuple(
        (begin, scale) for begin, (_, scale) in zip(itertools.accumulate(n for n, _ in pairs), pairs, strict=True)
    )
)
exponentials = dict(
    init_value=numbers,
    transition_steps=lengths,
    decay_rate=st.integers(1, 15).map(lambda n: n / 10),
    transition_begin=waits,
)
anywhere = lambda **_: (-np.inf, np.inf)
decaying = lambda init_value, decay_rate, **_: between(0, init_value) if decay_rate <= 1 else (-np.inf, np.inf)
lows = lambda low, high, **_: (low, high)
INNER = S.sine(-1.0, 2.0, 7)
inner = lambda t: -1 + 3 * hump(t % 7 / 7)
inner_ends = lambda **_: (-1, 2)

ROWS = [
    Row("constant_schedule", lambda t, value: value + 0 * t, lambda value: (value, value), dict(value=numbers)),
    Row("linear_schedule",
        lambda t, init_value, end_value, transition_steps, transition_begin:
            line(init_value, end_value, (t - transition_begin) / transition_steps),
        lambda init_value, end_value, **_: between(init_value, end_value),
        dict(init_value=numbers, end_value=numbers, transition_steps=lengths, transition_begin=waits)),
    Row("polynomial_schedule",
        lambda t, init_value, end_value, power, transition_steps:
            line(end_value, init_value, (1 - np.clip(t / transition_steps, 0, 1)) ** power),
        lambda init_value, end_value, **_: between(init_value, end_value),
        dict(init_value=numbers, end_value=numbers, power=rates, transition_steps=lengths)),
    Row("exponential_decay", exponential, decaying, exponentials),
    Row("exponential_decay",
        lambda t, init_value, transition_steps, decay_rate, end_value, staircase:
            exponential(t, init_value, transition_steps, decay_rate, end_value, staircase),
        anywhere,
        # lengths at which a step divides exactly in float32 too, so that rounding down sees what float64 sees
        dict(init_value=numbers, transition_steps=st.sampled_from([1, 2, 8, 64]), decay_rate=decays, end_value=numbers),
        dict(staircase=True)),
    Row("cosine_decay_schedule",
        lambda t, init_value, decay_steps, alpha, exponent:
            init_value * ((1 - alpha) * cosine(t / decay_steps) ** exponent + alpha),
        lambda init_value, alpha, **_: between(F32(init_value), F32(alpha) * F32(init_value)),
        dict(init_value=numbers, decay_steps=lengths, alpha=parts(-1, 2, 100), exponent=exponents)),
    Row("linear_onecycle_schedule", onecycle(True), onecycle_ends,
        dict(transition_steps=lengths, peak_value=numbers, pct=st.tuples(*[st.integers(0, 64)] * 2), div_factor=factors,
             final_div_factor=factors)),
    Row("cosine_onecycle_schedule", onecycle(False), onecycle_ends,
        dict(transition_steps=lengths, peak_value=numbers, pct_start=st.integers(0, 64).map(lambda n: n / 64),
             div_factor=factors, final_div_factor=factors)),
    Row("piecewise_constant_schedule", staircase_of, milestone_ends,
        dict(init_value=numbers, boundaries_and_scales=milestones)),
    *(Row("piecewise_interpolate_schedule",
          lambda t, interpolate_type, init_value, boundaries_and_scales:
              through(t, cumulative(init_value, boundaries_and_scales),
                      (lambda u: u) if interpolate_type == "linear" else (lambda u: 1 - cosine(u))),
          milestone_ends, dict(init_value=numbers, boundaries_and_scales=milestones), dict(interpolate_type=kind))
      for kind in ("linear", "cosine")),
    Row("warmup_constant_schedule",
        lambda t, init_value, peak_value, warmup_steps: warm(t, init_value, peak_value, warmup_steps, peak_value),
        lambda init_value, peak_value, **_: between(init_value, peak_value), peak | dict(warmup_steps=waits)),
    Row("warmup_cosine_decay_schedule",
        lambda t, init_value, peak_value, warmup_steps, decay_steps, end_value, exponent:
            warm(t, init_value, peak_value, warmup_steps,
                 # optax decays from a peak of 0 to 0, whatever end_value says
                 line(end_value * (peak_value != 0), peak_value,
                      cosine((t - warmup_steps) / (decay_steps - warmup_steps)) ** exponent)),
        lambda init_value, peak_value, end_value, **_: between(init_value, peak_value, end_value, 0),
        peak | dict(warmup_decay=st.tuples(waits, lengths), end_value=numbers, exponent=exponents)),
    Row("warmup_exponential_decay_schedule",
        lambda t, init_value, peak_value, warmup_steps, **others:
            warm(t, init_value, peak_value, warmup_steps, exponential(t - warmup_steps, peak_value, **others)),
        anywhere, peak | dict(warmup_steps=waits, transition_steps=lengths, decay_rate=decays, transition_begin=waits)),
    Row("inverse_time",
        lambda t, init_value, decay_rate, power: init_value / (1 + decay_rate * t) ** power,
        lambda init_value, **_: between(0, init_value), dict(init_value=numbers, decay_rate=rates, power=rates)),
    Row("inverse_sqrt",
        lambda t, peak_value, warmup_steps, init_value:
            warm(t, init_value, peak_value, warmup_steps,
                 peak_value * np.sqrt(max(warmup_steps, 1) / np.maximum(t, max(warmup_steps, 1)))),
        lambda init_value, peak_value, **_: between(0, init_value, peak_value), peak | dict(warmup_steps=waits)),
    Row("warmup_stable_decay",
        lambda t, init_value, peak_value, warmup_steps, stable_steps, cooldown_steps, end_value:
            warm(t, init_value, peak_value, warmup_steps,
                 line(peak_value, end_value, (t - warmup_steps - stable_steps) / cooldown_steps)),
        lambda init_value, peak_value, end_value, **_: between(init_value, peak_value, end_value),
        peak | dict(warmup_steps=waits, stable_steps=waits, cooldown_steps=lengths, end_value=numbers)),
    *(Row(name, lambda t, low, high, period, bend=bend: line(low, high, bend(cycle(t, period)[0])), lows,
          low_high | dict(period=lengths)) for name, bend in (("triangle", wave), ("sine", hump))),
    *(Row(f"{name}_halving",
          lambda t, low, high, period, bend=bend: line(low, high, bend(cycle(t, period)[0]) * 0.5 ** cycle(t, period)[1]),
          lows, low_high | dict(period=lengths)) for name, bend in (("triangle", wave), ("sine", hump))),
    *(Row(f"{name}_exponential",
          lambda t, low, high, period, decay_rate, bend=bend: line(low, high, bend(cycle(t, period)[0]) * decay_rate**t),
          lows, low_high | dict(period=lengths, decay_rate=decays)) for name, bend in (("triangle", wave), ("sine", hump))),
    Row("cosine_annealing", lambda t, low, high, period: line(low, high, cosine(t % period / period)), lows,
        low_high | dict(period=lengths)),
    Row("cosine_annealing", lambda t, low, high, period, restart: line(low, high, cosine(t / period)), lows,
        low_high | dict(period=lengths), dict(restart=False)),
    # combinators, around a sine
    Row("sequence",
        lambda t, pieces: np.where(t < pieces[0][1], pieces[0][0], np.where(t < pieces[0][1] + pieces[1][1],
                                   inner(t - pieces[0][1]), inner(t - pieces[0][1] - pieces[1][1]))),
        lambda pieces: between(-1, 2, pieces[0][0]),
        dict(pieces=st.tuples(numbers, waits, waits).map(lambda x: ((x[0], x[1]), (INNER, x[2]), (INNER, None))))),
    Row("loop", lambda t, schedule, period: inner(t % period), inner_ends, dict(period=lengths), dict(schedule=INNER)),
    Row("interpolate", lambda t, schedule, rate: inner(t // rate), inner_ends, dict(rate=lengths), dict(schedule=INNER)),
    Row("shift", lambda t, schedule, offset: inner(np.clip(t + offset, 0, LAST)), inner_ends,
        dict(offset=st.integers(-200, 200)), dict(schedule=INNER)),
    Row("reverse", lambda t, schedule, period: inner(np.maximum(period - t, 0)), inner_ends, dict(period=lengths),
        dict(schedule=INNER)),
    Row("symmetric",
        lambda t, schedule, period: np.where(t < period / 2, inner(t), inner(np.maximum(period - t, 0))), inner_ends,
        dict(period=lengths), dict(schedule=INNER)),
]  # fmt: skip
NOT_HERE = {
    "join_schedules",
    "sgdr_schedule",
    "compose",
    "schedule",
    "Schedule",
}  # sequences, and no schedule of its own


def test_every_schedule_has_a_closed_form():
    assert {row.name for row in ROWS} | NOT_HERE == set(S.__all__)


def spread(row: Row, drawn: dict) -> dict:
    """The arguments behind what was drawn: pairs that must be in order are drawn together."""
    drawn = dict(drawn)
    if "low_high" in drawn:
        drawn["low"], drawn["high"] = drawn.pop("low_high")
    if "pct" in drawn:
        drawn["pct_start"], drawn["pct_final"] = (n / 64 for n in sorted(drawn.pop("pct")))
    if "warmup_decay" in drawn:
        warmup, rest = drawn.pop("warmup_decay")
        drawn["warmup_steps"], drawn["decay_steps"] = warmup, warmup + rest
    return drawn | row.fixed


def rounded(x):
    """The float32 that the formula sees, as a float64."""
    return float(F32(x)) if isinstance(x, float) else x


@jax.jit
def evaluate(schedules, steps):
    """Many schedules of one formula, all their numbers traced, at many steps."""
    return jax.vmap(lambda schedule: jax.lax.map(schedule, steps))(schedules)


SETS = 8  # of arguments in one call


TWO_SECONDS = (
    "cosine_onecycle_schedule loop sequence sine_exponential sine_halving triangle_exponential triangle_halving"
)


@pytest.mark.parametrize("row", medium_if(lambda row: row.name in TWO_SECONDS.split(), ROWS), ids=repr)
def test_random_arguments(row):
    """The closed form, never NaN, never out of range, and the same bits traced or not, alone or in a batch."""

    # no shrinking: it takes minutes
    @settings(max_examples=5, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.lists(st.fixed_dictionaries(row.arguments), min_size=SETS, max_size=SETS),
        st.lists(st.integers(0, 1000) | st.integers(0, 2**31 - 1), min_size=20, max_size=20),
    )
    def check(drawn, steps):
        steps = np.array([0, 1, 10**6, 2**31 - 1, *steps], np.int32)
        sets = [spread(row, d) for d in drawn]
        made = [getattr(S, row.name)(**arguments) for arguments in sets]
        stacked = jax.tree.map(lambda *x: np.array(x, np.float32), *made)
        values = np.asarray(evaluate(stacked, steps))
        assert values.dtype == np.float32 and np.isfinite(values).all()
        t = np.minimum(steps.astype(np.int64), LAST)
        for i, (schedule, arguments, got) in enumerate(zip(made, sets, values, strict=True)):
            exact = jax.tree.map(rounded, arguments)
            low, high = row.ends(**arguments)
            assert got.min() >= F32(low) and got.max() <= F32(high)
            expected = row.form(t, **exact)
            bounded = np.abs(expected) < 1e30
            scale = max(
                1e-30,
                *(abs(x) for x in jax.tree.leaves(arguments) if isinstance(x, float)),
                np.abs(expected[t == 0])[0],
            )
            np.testing.assert_allclose(got[bounded], expected[bounded], rtol=2e-4, atol=3e-6 * scale)
            assert schedule(steps[3 * i]) == got[3 * i]

    check()


EXAMPLES = [
    "constant_schedule(value=0.3)",
    "linear_schedule(init_value=0.1, end_value=0.7, transition_steps=21)",
    "linear_schedule(init_value=1, end_value=0, transition_steps=21, transition_begin=5)",
    "polynomial_schedule(init_value=0.1, end_value=0.7, power=2.5, transition_steps=21)",
    "exponential_decay(init_value=0.3, transition_steps=7, decay_rate=0.7, transition_begin=3)",
    "exponential_decay(init_value=0.3, transition_steps=7, decay_rate=0.7, staircase=True, end_value=0.02)",
    "cosine_decay_schedule(init_value=0.1, decay_steps=30)",
    "cosine_decay_schedule(init_value=0.1, decay_steps=30, alpha=0.1, exponent=1.7)",
    "linear_onecycle_schedule(transition_steps=41, peak_value=0.3)",
    "cosine_onecycle_schedule(transition_steps=41, peak_value=0.3, pct_start=0.4)",
    "piecewise_constant_schedule(init_value=0.3, boundaries_and_scales=((10, 0.1), (20, 0.7)))",
    "piecewise_interpolate_schedule(interpolate_type='linear', init_value=0.3, boundaries_and_scales=((10, 0.1),))",
    "piecewise_interpolate_schedule(interpolate_type='cosine', init_value=0.3, boundaries_and_scales=((10, 0.1),))",
    "warmup_constant_schedule(init_value=0.1, peak_value=0.3, warmup_steps=7)",
    "warmup_cosine_decay_schedule(init_value=0.1, peak_value=0.3, warmup_steps=7, decay_steps=31, end_value=0.01)",
    "warmup_exponential_decay_schedule(init_value=0.1, peak_value=0.3, warmup_steps=7, transition_steps=9,"
    " decay_rate=0.7)",
    "inverse_time(init_value=0.3, decay_rate=0.1, power=1.5)",
    "inverse_sqrt(peak_value=0.3, warmup_steps=7)",
    "warmup_stable_decay(init_value=0.1, peak_value=0.3, warmup_steps=7, stable_steps=9, cooldown_steps=11)",
    "triangle(low=0.1, high=1.0, period=7)",
    "triangle_halving(low=0.1, high=1.0, period=7)",
    "triangle_exponential(low=0.1, high=1.0, period=7, decay_rate=0.93)",
    "sine(low=0.1, high=1.0, period=7)",
    "sine_halving(low=0.1, high=1.0, period=7)",
    "sine_exponential(low=0.1, high=1.0, period=7, decay_rate=0.93)",
    "cosine_annealing(low=0.1, high=1.0, period=7)",
    "cosine_annealing(low=0.1, high=1.0, period=7, restart=False)",
    "sequence(pieces=((0.3, 5), (sine(low=0.1, high=1.0, period=7), 9), (inverse_time(init_value=0.3, decay_rate=0.1),"
    " None)))",
    "loop(schedule=linear_schedule(init_value=0.1, end_value=0.7, transition_steps=21), period=5)",
    "interpolate(schedule=sine(low=0.1, high=1.0, period=7), rate=3)",
    "shift(schedule=sine(low=0.1, high=1.0, period=7), offset=-3)",
    "reverse(schedule=sine(low=0.1, high=1.0, period=7), period=9)",
    "symmetric(schedule=sine(low=0.1, high=1.0, period=7), period=9)",
    "triangle(low=0.1, high=exponential_decay(init_value=1.0, transition_steps=7, decay_rate=0.7), period=7)",
]
SCHEDULES = [eval(text, vars(S)) for text in EXAMPLES]


def test_every_formula_has_an_example():
    assert {text.partition("(")[0] for text in EXAMPLES} == {row.name for row in ROWS}


@pytest.mark.slow
def test_jit_equals_eager():
    """To the bit: numbers that are constants of a program, arguments of it, or of none."""
    steps = np.arange(0, 60, 3)
    eager = [np.array([schedule(int(step)) for step in steps]) for schedule in SCHEDULES]
    constants = jax.jit(lambda steps: [jax.lax.map(schedule, steps) for schedule in SCHEDULES])(steps)
    assert_trees_equal(eager, constants)
    arguments = jax.jit(lambda schedules, steps: [jax.lax.map(schedule, steps) for schedule in schedules])
    assert_trees_equal(eager, arguments(SCHEDULES, steps))
    assert_trees_equal(eager, [schedule.values(60)[::3] for schedule in SCHEDULES])


# ----------------------------------------------------------------------------------------------------- combinators


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Own:
    """A schedule of somebody else's, with a number of its own."""

    rate: Any

    def __call__(self, step):
        return self.rate * step


@pytest.mark.medium
def test_any_function_may_be_a_piece():
    def late(step):
        return jnp.where(step > 1, 5, 4)  # an int: taken as a float

    schedule = S.sequence([(late, 3), (Own(0.5), 2), 7])
    assert schedule.values(7).tolist() == [4, 4, 5, 0, 0.5, 7, 7]
    assert repr(
        schedule
    ) == "sequence(pieces=((late, 3), (test_any_function_may_be_a_piece.<locals>.Own, 2), (7, None)))" or (
        "late" in repr(schedule)
    )
    assert jax.tree.leaves(schedule) == [3, 0.5, 2, 7]
    assert schedule == S.sequence([(late, 3), (Own(0.5), 2), 7]) != S.sequence([(late, 3), (Own(0.6), 2), 7])
    assert S.shift(late, 2).values(2).tolist() == S.compose(S.constant_schedule(0), value=late).values(4)[2:].tolist()


def test_a_piece_never_sees_a_negative_step():
    seen = lambda step: jnp.sqrt(step.astype(jnp.float32))  # NaN below 0
    for schedule in (S.shift(seen, -5), S.reverse(seen, 5), S.symmetric(seen, 6), S.sequence([(1, 5), seen])):
        assert np.isfinite(schedule.values(12)).all()
        gradient = jax.grad(lambda offset, s=schedule: S.shift(s, 0)(3) * offset)(1.0)
        assert np.isfinite(gradient)


def test_pieces_of_length_0_are_skipped():
    assert S.sequence([(1.0, 0), (2.0, 2), (3.0, 0), 4.0]).values(4).tolist() == [2, 2, 4, 4]


def test_compose_is_a_schedule_of_parameters():
    halving = S.compose(S.triangle(0.0, 1.0, 6), high=lambda step: 0.5 ** (step // 6))
    np.testing.assert_allclose(halving.values(20), S.triangle_halving(0.0, 1.0, 6).values(20), rtol=1e-6)
    assert S.compose(halving, high=1.0) == S.triangle(0.0, 1.0, 6)
    longer = S.compose(S.cosine_annealing(0.0, 1.0, 4), period=S.piecewise_constant_schedule(4, {4: 2}))
    assert longer.values(8).tolist() == [
        *S.cosine_annealing(0, 1, 4).values(4),
        *S.cosine_annealing(0, 1, 8).values(8)[4:],
    ]


def test_an_epoch_schedule_driven_by_steps():
    epochs = S.piecewise_constant_schedule(1.0, {2: 0.5})
    assert S.interpolate(epochs, 3).values(8).tolist() == [1, 1, 1, 1, 1, 1, 0.5, 0.5]


# --------------------------------------------------------------------------------------- from ParameterSchedulers.jl

# its formulas of t = 1, 2, ..., and what docs/schedules.md says to write
triangular = lambda t, n: 1 - np.abs(2 * ((t - 1) % n / n) - 1)
sinusoid = lambda t, n: np.abs(np.sin(np.pi * (t - 1) / n))
FROM_JULIA = {
    "Constant": (lambda t: 0.3 + 0 * t, S.constant_schedule(0.3)),
    "Step": (lambda t: 0.3 * 0.5 ** ((t - 1) // 4), S.exponential_decay(0.3, 4, 0.5, staircase=True)),
    "Step, lengths": (lambda t: 0.3 * 0.5 ** ((t > 3) + 1.0 * (t > 7)), S.piecewise_constant_schedule(0.3, {3: 0.5, 7: 0.5})),
    "Exp": (lambda t: 0.3 * 0.9 ** (t - 1), S.exponential_decay(0.3, 1, 0.9)),
    "Poly": (lambda t: 0.3 * (1 - (t - 1) / 20) ** 2, S.polynomial_schedule(0.3, 0.0, 2, 20)),
    "Inv": (lambda t: 0.3 / (1 + (t - 1) * 0.2) ** 2, S.inverse_time(0.3, 0.2, 2)),
    "Triangle": (lambda t: 0.1 + 0.9 * triangular(t, 6), S.triangle(0.1, 1.0, 6)),
    "TriangleDecay2": (lambda t: 0.1 + 0.9 * triangular(t, 6) / 2 ** ((t - 1) // 6), S.triangle_halving(0.1, 1.0, 6)),
    "TriangleExp": (lambda t: 0.1 + 0.9 * triangular(t, 6) * 0.9 ** (t - 1), S.triangle_exponential(0.1, 1.0, 6, 0.9)),
    "Sin": (lambda t: 0.1 + 0.9 * sinusoid(t, 6), S.sine(0.1, 1.0, 6)),
    "SinDecay2": (lambda t: 0.1 + 0.9 * sinusoid(t, 6) / 2 ** ((t - 1) // 6), S.sine_halving(0.1, 1.0, 6)),
    "SinExp": (lambda t: 0.1 + 0.9 * sinusoid(t, 6) * 0.9 ** (t - 1), S.sine_exponential(0.1, 1.0, 6, 0.9)),
    "CosAnneal": (lambda t: 0.1 + 0.9 * (1 + np.cos(np.pi * ((t - 1) % 6) / 6)) / 2, S.cosine_annealing(0.1, 1.0, 6)),
    "CosAnneal, once": (lambda t: 0.1 + 0.9 * (1 + np.cos(np.pi * (t - 1) / 20)) / 2, S.cosine_annealing(0.1, 1.0, 20, restart=False)),
    "OneCycle": (
        lambda t: np.where(t <= 5, line(0.3 / 25, 0.3, 1 - cosine((t - 1) / 5)), line(0.3 / 1e5, 0.3, cosine((t - 6) / 15))),
        S.cosine_onecycle_schedule(20, 0.3, 0.25, 25.0, 4000.0)),
    "Sequence": (lambda t: np.where(t <= 4, 0.9 ** (t - 1), 0.5 ** (t - 5.0)),
                 S.sequence([(S.exponential_decay(1.0, 1, 0.9), 4), (S.exponential_decay(1.0, 1, 0.5), 9)])),
    "Loop": (lambda t: 0.9 ** ((t - 1) % 5), S.loop(S.exponential_decay(1.0, 1, 0.9), 5)),
    "Interpolator": (lambda t: 0.9 ** (np.ceil(t / 3) - 1), S.interpolate(S.exponential_decay(1.0, 1, 0.9), 3)),
    "Shifted": (lambda t: 0.9 ** (t - 1 + 4 - 1), S.shift(S.exponential_decay(1.0, 1, 0.9), 4 - 1)),
    "ComposedSchedule": (lambda t: 0.9 ** (t - 1) * triangular(t, 6), S.compose(S.triangle(0, 1, 6), high=S.exponential_decay(1, 1, 0.9))),
    "reverse": (lambda t: 0.9 ** (22 - t - 1), S.reverse(S.exponential_decay(1.0, 1, 0.9), 22 - 2)),
    "symmetric": (lambda t: 0.9 ** (np.where(t < 11, t, 22 - t) - 1.0), S.symmetric(S.exponential_decay(1.0, 1, 0.9), 22 - 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", FROM_JULIA)
def test_the_schedules_of_parameter_schedulers(name):
    theirs, ours = FROM_JULIA[name]
    np.testing.assert_allclose(ours.values(20), theirs(np.arange(1, 21)), rtol=1e-5, atol=1e-7)


@pytest.mark.medium
def test_past_their_end():
    assert S.polynomial_schedule(0.3, 0.0, 2, 20).values(23)[19:].round(6).tolist() == [F32(0.00075).round(6), 0, 0, 0]
    assert S.cosine_annealing(0.1, 1.0, 20, restart=False).values(23)[20:].tolist() == [F32(0.1)] * 3
    assert S.cosine_annealing(0.1, 1.0, 20).values(41)[[0, 20, 40]].tolist() == [1, 1, 1]  # starts at the maximum
    assert S.cosine_annealing(0.1, 1.0, 20).values(200).min() > 0.105  # and never reaches the minimum


# ------------------------------------------------------------------------------------------------ a schedule is a value


@pytest.mark.parametrize(("text", "schedule"), list(zip(EXAMPLES, SCHEDULES, strict=True)), ids=EXAMPLES)
def test_repr_rebuilds(text, schedule):
    assert repr(schedule) == text
    again = eval(repr(schedule), vars(S))
    assert again == schedule and hash(again) == hash(schedule)
    for other in (pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule), jax.tree.map(lambda x: x, schedule)):
        assert other == schedule


def test_equality_is_by_value():
    assert len({hash(s) for s in SCHEDULES}) == len(SCHEDULES)
    assert not any(a == b for a, b in itertools.combinations(SCHEDULES, 2))
    schedule = S.triangle(0.1, 1.0, 10)
    assert schedule == S.triangle(np.float64(0.1), np.int32(1), 10.0) and repr(S.triangle(0, np.float32(1), 10)) == (
        "triangle(low=0, high=1.0, period=10)"
    )
    assert schedule != S.triangle(0.2, 1.0, 10) and schedule != S.sine(0.1, 1.0, 10) and schedule != 0.1
    assert S.cosine_annealing(0, 1, 4) != S.cosine_annealing(0, 1, 4, restart=False)
    arrays = jax.tree.map(jnp.asarray, S.triangle(0.5, 1.0, 10))
    assert arrays == S.triangle(0.5, 1.0, 10) and hash(arrays) == hash(S.triangle(0.5, 1.0, 10))
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.factory = S.sine


def test_traced_numbers_compare_by_identity():
    def trace(schedule):
        other = jax.tree.map(lambda x: x + 0, schedule)
        assert schedule == schedule and schedule != other and isinstance(hash(schedule), int)
        assert "triangle(low=" in repr(schedule)
        return schedule(3), S.triangle(*(schedule.arguments[k] for k in ("low", "high", "period")))(3)

    a, b = jax.jit(trace)(S.triangle(0.1, 1.0, 10))
    assert a == b == S.triangle(0.1, 1.0, 10)(3)


def test_all_numbers_may_be_traced():
    @jax.jit
    def traced(n, x):
        milestones = S.piecewise_constant_schedule(x, [(n, x), (2 * n, x)])
        return milestones(9), S.join_schedules([x, x / 2], [n])(9), S.warmup_constant_schedule(0.0, x, n)(1)

    assert [float(value) for value in traced(5, 0.5)] == [0.25, 0.25, F32(0.1)]
    assert [float(value) for value in traced(4, 0.5)] == [0.125, 0.25, 0.125]


@pytest.mark.medium
def test_steps_of_every_kind():
    schedule = S.linear_schedule(0.0, 1.0, 10)
    for step in (3, np.int64(3), np.uint8(3), np.array(3), jnp.int32(3), jnp.uint8(3)):
        value = schedule(step)
        assert value == F32(0.3) and value.dtype == jnp.float32 and value.shape == () and value.weak_type
    assert schedule(-5) == 0 and schedule(np.int32(-1)) == 0 and jax.jit(schedule)(-1) == 0
    assert [float(schedule(n)) for n in (2**31 - 1, 2**40, 10**30, np.int64(2**40))] == [1, 1, 1, 1]
    for steps in (np.arange(12), np.arange(12, dtype=np.uint8), jnp.arange(12)):
        np.testing.assert_allclose(schedule(steps), schedule.values(12), rtol=1e-6)
    assert schedule.values(0).shape == (0,)


def test_iterates_from_step_0_without_end():
    schedule = S.linear_schedule(0.1, 0.5, 2)
    pairs = list(zip(schedule, range(5), strict=False))
    assert pairs == [(0.1, 0), (0.3, 1), (0.5, 2), (0.5, 3), (0.5, 4)]  # and not 0.10000000149
    assert all(type(value) is float for value, _ in pairs)
    assert next(iter(schedule)) == 0.1  # each from its beginning


def test_in_float64():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        value = S.cosine_decay_schedule(0.1, 30)(7)
        assert value.dtype == jnp.float64
        assert abs(float(value) - 0.05 * (1 + math.cos(math.pi * 7 / 30))) < 1e-17


@pytest.mark.medium
def test_gradients_of_the_numbers():
    schedules = (
        S.linear_schedule(0.2, 0.7, 10), S.polynomial_schedule(0.2, 0.7, 2.0, 10), S.cosine_decay_schedule(0.3, 10),
        S.exponential_decay(0.3, 10, 0.5, end_value=0.1), S.inverse_time(0.3, 0.1), S.inverse_sqrt(0.3, 5),
        S.sine_exponential(0.1, 1.0, 7, 0.9), S.sequence([(S.linear_schedule(0.0, 1.0, 5), 5), 0.5]),
    )  # fmt: skip
    gradients = jax.jit(jax.jacrev(lambda schedules: [jax.vmap(s)(jnp.arange(20)) for s in schedules]))
    for row in gradients(jax.tree.map(F32, schedules)):
        assert all(np.isfinite(g).all() for g in jax.tree.leaves(row))
    slope = jax.jit(jax.grad(lambda end, step: S.linear_schedule(0.2, end, 10)(step)))
    np.testing.assert_allclose([slope(0.7, step) for step in (0, 5, 10, 20)], [0, 0.5, 1, 1], rtol=1e-6)


@S.schedule
def bump(step, height, at=3, flip=False):
    """A schedule of somebody's own."""
    return jnp.where(flip, -1, 1) * jnp.where(step == at, height, 0)


def test_a_formula_of_ones_own():
    assert repr(bump(2.0)) == "bump(height=2.0)" and bump(2.0, flip=True).values(5).tolist() == [0, 0, 0, -2, 0]
    assert all("<" not in str(inspect.signature(getattr(S, name))) for name in S.__all__)  # addresses, in `help`
    assert bump.__doc__ == "A schedule of somebody's own." and str(inspect.signature(bump)).startswith("(height, at=3")
    assert bump(2.0) == bump(2) != bump(2.0, at=4)
    assert pickle.loads(pickle.dumps(bump(2.0))) == bump(2.0)


# -------------------------------------------------------------------------------------------------- in plain optax

PARAMS = {"w": jnp.array([1.0, -2.0, 3.0])}
GRADS = {"w": jnp.array([0.1, 0.2, -0.3])}


def run(tx, n=6, params=PARAMS):
    """The updates of `n` steps with one gradient."""
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), GRADS, params)

    def one(state, _):
        updates, state = tx.update(grads, state, params)
        return state, updates

    return jax.jit(lambda: jax.lax.scan(one, tx.init(params), length=n)[1])()


OURS, OPTAX_S = S.cosine_decay_schedule(0.1, 5), optax.cosine_decay_schedule(0.1, 5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        optax.adam,
        optax.inject_hyperparams(optax.sgd),
        optax.scale_by_schedule,
        lambda schedule: optax.sgd(optax.join_schedules([schedule, schedule], [3])),
        lambda schedule: (
            optax.adamw(0.1, weight_decay=schedule) if False else optax.inject_hyperparams(optax.sgd)(0.1, schedule)
        ),
    ],
    ids=["adam", "inject", "scale_by_schedule", "join_schedules", "momentum"],
)
def test_optax_takes_a_schedule(make, dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    ours, theirs = run(make(OURS), params=params), run(make(OPTAX_S), params=params)
    assert ours["w"].dtype == theirs["w"].dtype
    assert_trees_close(ours, theirs, rtol=1e-6 if dtype == jnp.float32 else 1e-2, atol=1e-8)


# ------------------------------------------------------------------------------------------------ in a rule of tsunax


def loss_fn(params, batch):
    return jnp.sum((params["w"] - batch) ** 2)


STEP = ts.train_step(loss_fn, donate=False)
BATCH = jnp.zeros(3)


@pytest.mark.medium
def test_schedules_that_differ_in_numbers_share_one_program():
    families = [
        lambda a, n: S.cosine_decay_schedule(a, n),
        lambda a, n: S.sequence([(S.linear_schedule(0.0, a, n), n), S.inverse_sqrt(a, n)]),
        lambda a, n: S.compose(S.triangle(0.0, a, n), high=S.exponential_decay(a, n, 0.5)),
    ]
    for make in families:
        first, other = (ts.setup(ts.rules.sgd(make(*x)), PARAMS) for x in ((0.1, 10), (0.25, 7)))
        STEP(first, BATCH)
        with count_compiles() as c:
            for _ in range(4):
                expected = make(0.25, 7)(int(other.step))
                other, info = STEP(other, BATCH)
                assert info.hyperparams["learning_rate"] == pytest.approx(float(expected), rel=1e-6)
        assert "train_step" not in c.compiled and "train_step" not in c.traced
    assert ts.rules.sgd(families[0](0.1, 3)).update == ts.rules.sgd(families[0](0.2, 4)).update
    assert ts.rules.sgd(S.sine(0.0, 1.0, 3)).update != ts.rules.sgd(S.triangle(0.0, 1.0, 3)).update


def test_a_live_schedule_trains_as_optax_does():
    state, params = ts.setup(ts.rules.adam(S.warmup_cosine_decay_schedule(0.0, 0.1, 3, 9)), PARAMS), PARAMS
    tx = optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 9))
    opt_state, grad, update = tx.init(params), jax.jit(jax.grad(loss_fn)), jax.jit(tx.update)
    for _ in range(12):
        state, _ = STEP(state, BATCH)
        updates, opt_state = update(grad(params, BATCH), opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_trees_close(state.params, params, rtol=1e-6, atol=1e-7)


def test_read_held_and_given_back():
    state = ts.setup(ts.rules.adam(S.linear_schedule(1.0, 0.0, 10), b1=S.triangle(0.5, 0.9, 4)), PARAMS).replace(step=2)
    rate = lambda state: ts.hyperparams(state)["learning_rate"]
    assert rate(state) == F32(0.8) and ts.hyperparams(state)["b1"] == F32(0.9)
    held = ts.adjust(state, learning_rate=0.3).replace(step=5)
    assert rate(held) == 0.3 and rate(STEP(held, BATCH)[0]) == 0.3
    assert rate(ts.adjust(held, learning_rate=None)) == 0.5


def test_setup_over_traced_numbers_of_a_schedule():
    def make(rate, n):
        return ts.setup(ts.rules.sgd(S.sequence([(S.linear_schedule(0.0, rate, n), n), rate])), PARAMS)

    rates, n = jnp.array([0.1, 0.2]), jnp.array([2.0, 4.0])
    population = jax.vmap(make)(rates, n)
    steps = jax.jit(
        lambda s: jax.lax.scan(lambda s, _: (jax.vmap(lambda s: STEP(s, BATCH)[0])(s), None), s, length=3)[0]
    )
    population = steps(population)
    np.testing.assert_allclose(ts.hyperparams(population)["learning_rate"], [0.1, 0.15], rtol=1e-6)
    for i in range(2):
        single = functools.reduce(lambda s, _: STEP(s, BATCH)[0], range(3), make(float(rates[i]), int(n[i])))
        assert_trees_close(single.params, {"w": population.params["w"][i]}, rtol=1e-6, atol=0)


def test_hypergradient_of_a_schedule():
    def final_loss(rate):
        state = ts.setup(ts.rules.sgd(S.linear_schedule(rate, 0.0, 4)), PARAMS)
        return loss_fn(jax.lax.scan(lambda s, _: (STEP(s, BATCH)[0], None), state, length=3)[0].params, BATCH)

    got = jax.jit(jax.grad(final_loss))(0.1)
    f = lambda r: 14 * ((1 - 2 * r) * (1 - 1.5 * r) * (1 - r)) ** 2  # w shrinks by 1 - 2 rate(t)
    assert float(got) == pytest.approx((f(0.1 + 1e-6) - f(0.1 - 1e-6)) / 2e-6, rel=1e-4)


# ---------------------------------------------------------------------------------------------------------- errors

NAN, INF = float("nan"), float("inf")
UP = S.linear_schedule(0.0, 1.0, 5)


def bad(case, make, kind, *parts):
    return pytest.param(make, kind, parts, id=case)


WRONG = [
    # total steps 0 or negative
    bad("0 steps", lambda: S.linear_schedule(1.0, 0.0, 0), Bad, "transition_steps at linear_schedule()", "got 0", "> 0"),
    bad("-5 steps", lambda: S.cosine_decay_schedule(1.0, -5), Bad, "decay_steps", "got -5", "> 0"),
    bad("0 period", lambda: S.triangle(0.0, 1.0, 0), Bad, "period at triangle()", "got 0", "> 0"),
    bad("onecycle of 0", lambda: S.linear_onecycle_schedule(0, 1.0), Bad, "transition_steps", "> 0"),
    bad("begins at -1", lambda: S.linear_schedule(1, 0, 5, -1), Bad, "transition_begin", "got -1", "≥ 0"),
    bad("half a step", lambda: S.sine(0.0, 1.0, 2.5), Bad, "period", "got 2.5", "whole"),
    bad("too long", lambda: S.sine(0.0, 1.0, 2**31), Bad, "period", "2147483648", "≤ 1073741823"),
    # warm-up longer than all
    bad("warm-up", lambda: S.warmup_cosine_decay_schedule(0, 1, 100, 50), Bad,
        "warmup_steps=100, decay_steps=50", "warmup_steps < decay_steps", "the whole length"),
    bad("all warm-up", lambda: S.warmup_cosine_decay_schedule(0, 1, 50, 50), Bad, "warmup_steps=50"),
    bad("in a list", lambda: S.sgdr_schedule([SGDR[0], SGDR[0] | dict(warmup_steps=30)]), Bad, "warmup_steps=30"),
    # boundaries
    bad("unsorted", lambda: S.join_schedules([UP, UP, UP], [20, 10]), Bad,
        "length in pieces at sequence()", "got -10", "≥ 0"),
    bad("negative", lambda: S.join_schedules([UP, UP], [-3]), Bad, "got -3", "≥ 0"),
    bad("NaN boundary", lambda: S.join_schedules([UP, UP], [NAN]), Bad, "nan", "finite"),
    bad("negative step", lambda: S.piecewise_constant_schedule(1.0, {-5: 0.1}), Bad,
        "boundaries_and_scales", "got -5", "≥ 0"),
    bad("negative scale", lambda: S.piecewise_interpolate_schedule("linear", 1.0, {5: -0.1}), Bad, "got -0.1", "≥ 0"),
    bad("negative length", lambda: S.sequence([(UP, -3), UP]), Bad, "length in pieces at sequence()", "got -3", "≥ 0"),
    bad("no length", lambda: S.sequence([UP, UP]), Wrong, "pieces", "without a length", "(schedule, length)"),
    bad("no pieces", lambda: S.sequence([]), Wrong, "pieces", "an empty list"),
    bad("not a list", lambda: S.sequence(UP), Wrong, "pieces", "a list of (schedule, length)"),
    bad("a length that moves", lambda: S.sequence([(UP, UP), UP]), Wrong, "length in pieces", "Schedule", "a number"),
    # numbers
    bad("NaN", lambda: S.linear_schedule(NAN, 0.0, 5), Bad, "init_value", "got nan", "finite"),
    bad("inf", lambda: S.cosine_decay_schedule(1.0, 5, alpha=INF), Bad, "alpha", "got inf", "finite"),
    bad("NaN steps", lambda: S.linear_schedule(1.0, 0.0, NAN), Bad, "transition_steps", "got nan"),
    bad("beyond float32", lambda: S.constant_schedule(1e39), Bad, "value", "1e+39", "a finite float32"),
    bad("text", lambda: S.constant_schedule("0.1"), Wrong, "value at constant_schedule()", "'0.1' (str)"),
    bad("None", lambda: S.linear_schedule(None, 0, 5), Wrong, "init_value", "got None"),
    bad("a flag", lambda: S.constant_schedule(True), Wrong, "value", "True (bool)"),
    bad("an array", lambda: S.constant_schedule(jnp.ones(2)), Wrong, "float32[2]", "a number"),
    bad("a rate of 0", lambda: S.exponential_decay(1.0, 5, 0.0), Bad, "decay_rate", "got 0.0", "> 0"),
    bad("growth", lambda: S.sine_exponential(0, 1, 5, 1.5), Bad, "decay_rate", "got 1.5", "> 0 and ≤ 1"),
    bad("a power", lambda: S.polynomial_schedule(1, 0, -1, 5), Bad, "power", "got -1", "≥ 0"),
    bad("a part", lambda: S.linear_onecycle_schedule(9, 1.0, 1.5), Bad, "pct_start", "got 1.5", "≤ 1"),
    bad("a division", lambda: S.linear_onecycle_schedule(9, 1.0, div_factor=0), Bad, "div_factor", "> 0"),
    bad("a kind", lambda: S.piecewise_interpolate_schedule("cubic", 1.0), Bad, "'cubic' (str)", "'linear' or"),
    bad("no flag", lambda: S.exponential_decay(1.0, 5, 0.5, staircase="yes"), Wrong, "staircase", "True or False"),
    # calls
    # pieces
    bad("an array from a piece", lambda: S.loop(lambda step: jnp.ones(2) * step, 5), Bad, "schedule at loop()", "float32[2]"),
    bad("not called", lambda: S.loop(S.triangle, 5), Wrong, "triangle()", "missing a required argument"),
    bad("a str as a piece", lambda: S.shift("up", 5), Wrong, "schedule at shift()", "'up' (str)"),
    # steps
    bad("half of a step", lambda: UP(0.5), Wrong, "step at linear_schedule()", "0.5 (float)", "whole"),
    bad("a flag as a step", lambda: UP(True), Wrong, "step", "True"),
    bad("text as a step", lambda: UP("1"), Wrong, "step", "'1' (str)"),
    bad("values of -1", lambda: UP.values(-1), Bad, "n at values()", "got -1", "≥ 0"),
    bad("values of what", lambda: UP.values(2.5), Bad, "n at values()", "got 2.5", "whole"),
    # a rule that takes it
    bad("a negative rate", lambda: ts.rules.adam(S.linear_schedule(-0.1, 0.1, 5)), Bad,
        "learning_rate at adam()", "step 0", "got -0.1", "≥ 0"),
    bad("b1 of 1", lambda: ts.rules.adam(0.1, b1=S.linear_schedule(1.0, 0.9, 5)), Bad, "b1 at adam()", "< 1"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "parts"), WRONG)
def test_what_is_wrong_is_told(make, kind, parts):
    with pytest.raises(kind) as caught:
        make()
    text = str(caught.value)
    assert [part for part in parts if part not in text] == [], text
    assert re.match(r"^.+ at .+: got .+, expected .+\.", text), text


def test_what_is_right_is_taken():
    S.linear_schedule(np.float32(1), jnp.float32(0), np.int64(5)), S.linear_schedule(1, 0, 1e4), S.sine(1.0, 1.0, 1)
    S.join_schedules([UP, UP], np.array([3])), S.join_schedules([UP, UP, 0.5], [0, 0]), S.join_schedules([UP], [])
    S.piecewise_constant_schedule(1.0, {}), S.triangle(-1.0, 1.0, UP), S.warmup_cosine_decay_schedule(0, 0, 0, 1)


# ------------------------------------------------------------------------------------------------------------- docs

PAGE = Path(__file__).resolve().parents[1] / "docs" / "schedules.md"


def test_the_page_names_every_schedule():
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in S.__all__ if f"`{name}" not in text and f".{name}(" not in text] == []


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_gradients_past_the_end_are_finite_whatever_the_exponent(power):
    """x**p has an infinite slope at 0 for p below 1: times the 0 of the clipped ramp, NaN for the lengths."""
    schedules = [
        S.polynomial_schedule(0.5, 0.125, power, 10),
        S.cosine_decay_schedule(0.5, 10, 0.125, power),
        S.warmup_cosine_decay_schedule(0.0, 0.5, 2, 10, 0.125, power),
    ]
    slopes = jax.jit(jax.jacrev(lambda schedules: [jax.vmap(s)(jnp.array([4, 10, 12])) for s in schedules]))
    for row in slopes(jax.tree.map(F32, schedules)):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(row))
