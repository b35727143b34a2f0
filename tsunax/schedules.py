"""Schedules: one number for each step.

Each function here makes a `Schedule`, a frozen value that is a function of the step. All its
numbers are leaves of a pytree, so that in a rule of tsunax two schedules that differ in numbers
only share one compiled program. `@schedule` makes such a function from a formula.

A schedule holds no clock: `TrainState.step` is the clock. This module knows of neither states nor
rules.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Concatenate, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import checks as _checks
from tsunax._core import trees
from tsunax.errors import HyperparameterError, WrongTypeError, message, remedy, told, unknown
from tsunax.rules import number_table as _number_table
from tsunax.rules import numbers as _numbers

P = ParamSpec("P")
_LAST = 2**30 - 1  # of steps and lengths: sums of two stay int32

# ----------------------------------------------------------------------------------- the value type


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("arguments",), meta_fields=("factory", "static")
)
@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """A number for each step, as one value: what the functions of `tsunax.schedules` return.

    `schedule(step)` takes an int, a NumPy int or a traced one, or an array of them, and gives a
    float32 (weakly typed, as optax's). Steps count from 0; earlier ones are 0, and a schedule that
    ends stays at its last value. Iterating gives the values from step 0 on as Python floats,
    without end. Two schedules are equal if their formulas and all their numbers are. `repr` is the
    call that makes it. A pytree whose leaves are its numbers: they may be traced.

    >>> from tsunax.schedules import *
    >>> schedule = triangle(low=0.0, high=1.0, period=4)
    >>> schedule, schedule == triangle(0, 1, 4), float(schedule(5))
    (triangle(low=0.0, high=1.0, period=4), True, 0.5)
    >>> [value for value, _ in zip(schedule, range(5))]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    factory: Any  # the function that makes such schedules; the formula is what it wraps
    arguments: dict[str, Any]  # numbers, schedules, tuples of them
    static: tuple[tuple[str, Any], ...]  # flags and names

    def __call__(self, step) -> jax.Array:
        return _evaluate(jax.tree.map(_as_float, self), _as_step(step, self.factory.__name__))

    def __iter__(self) -> Iterator[float]:
        return (float(_number_table.as_float(self(step), None)) for step in itertools.count())

    def values(self, n: int) -> np.ndarray:
        """The values of the first `n` steps, float32 of shape (n,), in one call: to look at, to
        plot.

        >>> from tsunax.schedules import *
        >>> linear_schedule(1.0, 0.0, transition_steps=4).values(6)
        array([1.  , 0.75, 0.5 , 0.25, 0.  , 0.  ], dtype=float32)
        """
        steps = np.arange(_steps("values()", "n", n), dtype=np.int32)
        return np.asarray(_evaluate_all(jax.tree.map(_as_float, self), steps))

    def __eq__(self, other):
        if not isinstance(other, Schedule):
            return NotImplemented
        (mine, shape), (others, other_shape) = jax.tree.flatten(self), jax.tree.flatten(other)
        return shape == other_shape and all(map(_same, mine, others))

    def __hash__(self):
        numbers = (
            float(x) for x in jax.tree.leaves(self) if not trees.is_traced(x) and not np.ndim(x)
        )
        return hash((self.factory, self.static, *numbers))

    def __repr__(self):
        given = {**self.arguments, **dict(self.static)}
        parameters = inspect.signature(self.factory).parameters.values()
        shown = (
            f"{p.name}={given[p.name]!r}" for p in parameters if not _is_default(p, given[p.name])
        )
        return f"{self.factory.__name__}({', '.join(shown)})"


def _same(a, b) -> bool:
    return a is b or (
        not (trees.is_traced(a) or trees.is_traced(b))
        and np.array_equal(np.asarray(a), np.asarray(b))
    )


def _is_default(parameter: inspect.Parameter, value) -> bool:
    return (value is None or isinstance(value, (bool, int, float))) and value == parameter.default


def _as_float(x):
    dtype = jax.dtypes.canonicalize_dtype(float)
    return x.astype(dtype) if isinstance(x, jax.Array) else np.asarray(x, dtype)


def _as_step(step, title: str):
    dtype = trees.dtype_of(step)
    if isinstance(step, bool) or dtype is None or not jnp.issubdtype(dtype, np.integer):
        raise WrongTypeError(
            message(
                "step", f"{title}()", trees.describe(step), "a whole number, or an array of them"
            )
        )
    if isinstance(step, jax.Array):
        return jnp.clip(step.astype(jnp.promote_types(dtype, jnp.int32)), 0, _LAST).astype(
            jnp.int32
        )
    if isinstance(step, int):  # of any size
        return np.int32(min(max(step, 0), _LAST))
    return np.clip(step.astype(np.int64), 0, _LAST).astype(np.int32)


@jax.jit
def _evaluate(schedule: Schedule, step):
    """The formula; compiled once for all numbers, so that a call has the bits that it has inside a
    step.
    """
    # XLA folds constants that it can see into the formula (a / 3 becomes a * (1 / 3)), which costs
    # the last bit
    schedule, step = jax.lax.optimization_barrier((schedule, step))
    kinds = _kinds(schedule.factory)
    follow = lambda name, x: _at(x, step) if callable(x) and kinds[name] is not _piece else x
    arguments = {name: follow(name, x) for name, x in schedule.arguments.items()}
    value = schedule.factory.__wrapped__(step, **arguments, **dict(schedule.static))
    value = jnp.asarray(value, jax.dtypes.canonicalize_dtype(float))
    return value if value.ndim else _number_table.weak(value)


@jax.jit
def _evaluate_all(schedule: Schedule, steps):
    """One step after the other: the bits of single calls, which a vectorized division has not."""
    return jax.lax.map(schedule, steps)


def _at(piece, step):
    """The value of a schedule, of any other function of the step, or of a number."""
    if not callable(piece):
        return piece
    return jnp.asarray(piece(jnp.clip(step, 0, _LAST)), jax.dtypes.canonicalize_dtype(float))


# -------------------------------------------------------------------------- what an argument may be


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("call",))
@dataclass(frozen=True, repr=False)
class _Function:
    """A plain function of the step: part of the program, as it has no numbers to change."""

    call: Callable

    def __call__(self, step):
        return self.call(step)

    def __repr__(self):
        return getattr(self.call, "__name__", repr(self.call))


def _in_range(
    low=None, high=None, *, above=None, whole: bool = False, is_int32: bool = False
) -> Callable:
    """The check of a number: at least `low`, at most `high`, more than `above`; int32 if formulas
    count with it.
    """
    bounds = [f"{sign} {x}" for sign, x in (("≥", low), (">", above), ("≤", high)) if x is not None]
    expected = f"a {'whole ' if whole else ''}number {' and '.join(bounds)}".rstrip()

    def check(where, name, value):
        _numbers.check_number(where, name, value)
        if trees.is_traced(value):
            return value
        value = value.item() if trees.is_array(value) else value
        beyond = (low is not None and value < low) or (high is not None and value > high)
        if beyond or (above is not None and value <= above) or (whole and value != int(value)):
            raise HyperparameterError(message(name, where, value, expected))
        if is_int32 and abs(value) > _LAST:
            raise HyperparameterError(message(name, where, value, f"at most {_LAST} steps"))
        return value

    return check


_finite_number = _in_range()
_not_negative = _in_range(0)
_wait = _in_range(0, whole=True)
_steps = _in_range(0, whole=True, is_int32=True)


def _piece(where, name, value):
    """A schedule, any other function of the step, or a number, which stands for a constant."""
    if not callable(value):
        return _finite_number(where, name, value)
    if isinstance(value, Schedule):
        return value
    try:
        out = jax.eval_shape(value, jax.ShapeDtypeStruct((), np.int32))
    except Exception as error:
        raise HyperparameterError(
            message(name, where, told(error), "a number", remedy(error))
        ) from error
    dtype = trees.dtype_of(out)
    real = dtype is not None and (
        jnp.issubdtype(dtype, np.floating) or jnp.issubdtype(dtype, np.integer)
    )
    if not real or out.shape:
        got = f"{trees.describe(out)} from the function"
        raise HyperparameterError(message(name, where, got, "one number for a step"))
    return _Function(value) if jax.tree_util.all_leaves([value]) else value


def _pieces(where, name, value):
    """((piece, its length), ...); the last one has no end, and needs no length."""
    if not isinstance(value, (list, tuple)) or not value:
        expected = "a list of (schedule, length); the last one may be a schedule alone"
        raise WrongTypeError(message(name, where, trees.describe(value), expected))
    out = []
    for i, item in enumerate(value):
        piece, length = item if isinstance(item, (list, tuple)) and len(item) == 2 else (item, None)
        if length is not None:
            length = _steps(where, f"{name}[{i}][1]", length)
        elif i < len(value) - 1:
            got, fix = "a piece without a length", "Only the last piece goes on without end."
            raise HyperparameterError(
                message(f"{name}[{i}]", where, got, "(schedule, length)", fix)
            )
        out.append((_piece(where, f"{name}[{i}][0]", piece), length))
    return tuple(out)


def _milestones(where, name, value):
    """((step, scale), ...) in the order of the steps, from a mapping or from pairs."""
    if value is None:
        return ()
    try:
        pairs = [
            (step, scale)
            for step, scale in (value.items() if isinstance(value, Mapping) else value)
        ]
    except (TypeError, ValueError):
        raise WrongTypeError(message(name, where, trees.describe(value), "{step: scale}")) from None
    pairs = [
        (_wait(where, f"a step of {name}", step), _not_negative(where, f"{name}[{step}]", scale))
        for step, scale in pairs
    ]
    steps = [step for step, _ in pairs]
    if any(map(trees.is_traced, steps)):
        return tuple(pairs)
    if len(set(steps)) < len(steps):
        raise HyperparameterError(message(name, where, f"the steps {steps}", "each step once"))
    return tuple(sorted(pairs, key=lambda pair: pair[0]))


def _flag(where, name, value):
    if not isinstance(value, (bool, np.bool_)):
        raise WrongTypeError(message(name, where, trees.describe(value), "True or False"))
    return bool(value)


def _curve(where, name, value):
    _checks.check_choice(value, where, name, ("linear", "cosine"))
    return value


def _or_schedule(check):
    return lambda where, name, value: (_piece if callable(value) else check)(where, name, value)


_any_number = _or_schedule(_finite_number)

# The annotations of a formula say what its arguments may be. A schedule may stand for any number.
Value = Annotated[Any, _any_number]
OptionalValue = Annotated[
    Any, lambda where, name, value: None if value is None else _any_number(where, name, value)
]
Positive = Annotated[Any, _or_schedule(_in_range(above=0))]
NotNegative = Annotated[Any, _or_schedule(_not_negative)]
Fraction = Annotated[Any, _or_schedule(_in_range(0, 1))]
Decay = Annotated[Any, _or_schedule(_in_range(high=1, above=0))]
Length = Annotated[Any, _or_schedule(_in_range(above=0, whole=True))]
Wait = Annotated[Any, _or_schedule(_wait)]  # a length that may be 0
Period = Annotated[
    Any, _or_schedule(_in_range(above=0, whole=True, is_int32=True))
]  # counted in int32
Offset = Annotated[Any, _or_schedule(_in_range(whole=True, is_int32=True))]
Flag = Annotated[Any, _flag]
Curve = Annotated[Any, _curve]
Milestones = Annotated[Any, _milestones]
Piece = Annotated[Any, _piece]
Pieces = Annotated[Any, _pieces]


@functools.cache
def _kinds(factory: Any) -> dict[str, Callable]:
    """The check of each argument."""
    hints = typing.get_type_hints(factory.__wrapped__, include_extras=True)
    kinds = {}
    for p in inspect.signature(factory).parameters.values():
        checks = [
            check for check in getattr(hints.get(p.name), "__metadata__", ()) if callable(check)
        ]
        kinds[p.name] = [*checks, _flag if isinstance(p.default, bool) else _any_number][0]
    return kinds


_IN_ORDER = (
    ("low", "high", "≤", ""),
    ("pct_start", "pct_final", "≤", ""),
    ("warmup_steps", "decay_steps", "<", "decay_steps is the whole length, with the warm-up."),
)


def _check_order(where: str, arguments: Mapping[str, Any]) -> None:
    for first, second, sign, fix in _IN_ORDER:
        a, b = arguments.get(first), arguments.get(second)
        if (
            isinstance(a, (int, float))
            and isinstance(b, (int, float))
            and not (a < b or (a == b and sign == "≤"))
        ):
            got, expected = f"{first}={a}, {second}={b}", f"{first} {sign} {second}"
            raise HyperparameterError(message("arguments", where, got, expected, fix))


def schedule(formula: Callable[Concatenate[Any, P], Any]) -> Callable[P, Schedule]:
    """Make a function that returns schedules from `formula(step, ...) -> value`.

    The formula is plain JAX that works elementwise: `step` is an int32, never negative, and every
    number a float32 that may be traced. Arguments are numbers, or schedules of numbers, that are
    finite; those with a bool as default are flags. The formula is part of the program: write it
    once, in a module.

    >>> from tsunax.schedules import schedule
    >>> @schedule
    ... def square_wave(step, low, high, period):
    ...     return jnp.where(step % period < period / 2, high, low)
    >>> wave = square_wave(0.1, 1, period=4)
    >>> wave, wave.values(5)
    (square_wave(low=0.1, high=1, period=4), array([1. , 1. , 0.1, 0.1, 1. ], dtype=float32))
    """
    signature = inspect.signature(formula)
    signature = signature.replace(
        parameters=list(signature.parameters.values())[1:], return_annotation=Schedule
    )
    known = list(signature.parameters)

    @functools.wraps(formula)
    def factory(*args: P.args, **kwargs: P.kwargs) -> Schedule:
        where = f"{formula.__name__}()"
        for name in kwargs:
            if name not in known:
                raise HyperparameterError(unknown("parameter", where, name, known))
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            got = str(error).replace("missing a required argument:", "none for")
            expected = f"{formula.__name__}({', '.join(known)})"
            raise WrongTypeError(message("arguments", where, got, expected)) from None
        bound.apply_defaults()
        checks = _kinds(factory)
        given = {name: checks[name](where, name, value) for name, value in bound.arguments.items()}
        _check_order(where, given)
        static = {name: value for name, value in given.items() if isinstance(value, (bool, str))}
        return Schedule(
            factory, {k: v for k, v in given.items() if k not in static}, tuple(static.items())
        )

    factory.__signature__ = signature  # type: ignore[attr-defined]
    return factory


# ------------------------------------------------------------------------ what formulas are made of


def _between(a, b, u):
    """`a` where u is 0, `b` where u is 1, a straight line between: exact at both ends and never
    beyond them.
    """
    return jnp.where(u >= 1, b, jnp.clip(a + (b - a) * u, jnp.minimum(a, b), jnp.maximum(a, b)))


def _ramp(step, begin, length):
    """From 0 at `begin` to 1 `length` steps later; flat before and after."""
    return jnp.clip((step - begin) / jnp.maximum(length, 1), 0, 1)


def _cosine(u):
    """From 1 to 0 along half a cosine."""
    return 0.5 * (1 + jnp.cos(jnp.pi * u))


def _power(u, exponent):
    """u**exponent for u from 0 to 1, without the infinite slopes at 0: NaN past the end of a
    schedule.
    """
    return jnp.where(u > 0, jnp.where(u > 0, u, 1) ** exponent, exponent == 0)


def _whole(x):
    return jnp.round(x).astype(jnp.int32)


def _cycle(step, period):
    """How far a step is into its period, in [0, 1), and how many periods came before."""
    period = jnp.maximum(_whole(period), 1)
    return step % period / period, step // period


def _finite(x):
    most = jnp.finfo(jnp.result_type(x)).max
    return jnp.clip(x, -most, most)


def _through(step, points, curve="linear"):
    """From point to point, each (step, value), flat before the first and after the last."""
    bend = (lambda u: u) if curve == "linear" else (lambda u: 1 - _cosine(u))
    value = points[0][1]
    for (begin, a), (end, b) in itertools.pairwise(points):
        value = jnp.where(
            step >= begin, _between(a, b, bend(_ramp(step, begin, end - begin))), value
        )
    return jnp.where(step >= points[-1][0], points[-1][1], value)


def _exponential(step, init_value, transition_steps, decay_rate, staircase, end_value):
    periods = jnp.maximum(step, 0) / jnp.maximum(transition_steps, 1)
    periods = jnp.floor(periods) if staircase else periods
    value = _finite(init_value * _finite(decay_rate**periods))
    if end_value is None:
        return value
    return jnp.where(decay_rate < 1, jnp.maximum(value, end_value), jnp.minimum(value, end_value))


# ------------------------------------------------------------------------------------------ optax's


@schedule
def constant_schedule(step, value: Value):
    """`value`, at every step."""
    return jnp.broadcast_to(value, jnp.broadcast_shapes(jnp.shape(step), jnp.shape(value)))


@schedule
def linear_schedule(
    step, init_value: Value, end_value: Value, transition_steps: Length, transition_begin: Wait = 0
):
    """A straight line from `init_value` to `end_value` in `transition_steps`, after
    `transition_begin`.
    """
    return _between(end_value, init_value, 1 - _ramp(step, transition_begin, transition_steps))


@schedule
def polynomial_schedule(
    step,
    init_value: Value,
    end_value: Value,
    power: NotNegative,
    transition_steps: Length,
    transition_begin: Wait = 0,
):
    """`end + (init - end) · (1 - u)^power`, u from 0 to 1 in `transition_steps`, after
    `transition_begin`.
    """
    return _between(
        end_value, init_value, _power(1 - _ramp(step, transition_begin, transition_steps), power)
    )


@schedule
def exponential_decay(
    step,
    init_value: Value,
    transition_steps: Length,
    decay_rate: Positive,
    transition_begin: Wait = 0,
    staircase: Flag = False,
    end_value: OptionalValue = None,
):
    """`init_value · decay_rate^((step - transition_begin) / transition_steps)`, not beyond
    `end_value`.

    With `staircase` the exponent is rounded down. A rate above 1 grows, to the largest float at
    most.
    """
    return _exponential(
        step - transition_begin, init_value, transition_steps, decay_rate, staircase, end_value
    )


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
    return _between(
        alpha * init_value, init_value, _power(_cosine(_ramp(step, 0, decay_steps)), exponent)
    )


@schedule
def linear_onecycle_schedule(
    step,
    transition_steps: Length,
    peak_value: Value,
    pct_start: Fraction = 0.3,
    pct_final: Fraction = 0.85,
    div_factor: Positive = 25.0,
    final_div_factor: Positive = 1e4,
):
    """Straight lines: up from `peak / div` to the peak, down to `peak / div`, on to `peak / div /
    final_div`.

    They meet at `pct_start` and `pct_final` of `transition_steps`, rounded down. (Smith,
    arXiv:1708.07120.)
    """
    start = peak_value / div_factor
    top, bottom = _part(pct_start, transition_steps), _part(pct_final, transition_steps)
    end = peak_value / (div_factor * final_div_factor)
    return _through(step, [(0, start), (top, peak_value), (bottom, start), (transition_steps, end)])


@schedule
def cosine_onecycle_schedule(
    step,
    transition_steps: Length,
    peak_value: Value,
    pct_start: Fraction = 0.3,
    div_factor: Positive = 25.0,
    final_div_factor: Positive = 1e4,
):
    """Half cosines: up from `peak / div` to the peak, then down to `peak / div / final_div`.

    The peak is at `pct_start` of `transition_steps`, rounded down. (Smith, arXiv:1708.07120.)
    """
    start, top = peak_value / div_factor, _part(pct_start, transition_steps)
    end = peak_value / (div_factor * final_div_factor)
    return _through(step, [(0, start), (top, peak_value), (transition_steps, end)], "cosine")


def _part(fraction, steps):
    """So much of a length, rounded down; what misses a whole number by one float32 counts as
    that.
    """
    return jnp.floor(fraction * steps * (1 + 2.0**-23))


@schedule
def piecewise_constant_schedule(step, init_value: Value, boundaries_and_scales: Milestones = None):
    """`init_value` times the scale of each milestone `{step: scale}` that has been reached."""
    value = init_value * jnp.ones(jnp.shape(step))
    for begin, scale in boundaries_and_scales:
        value = jnp.where(step >= begin, _finite(value * scale), value)
    return value


@schedule
def piecewise_interpolate_schedule(
    step, interpolate_type: Curve, init_value: Value, boundaries_and_scales: Milestones = None
):
    """As `piecewise_constant_schedule`, but on a line or half a cosine from one milestone to the
    next.

    `interpolate_type` is "linear" or "cosine".
    """
    points = [(0, init_value)]
    for begin, scale in boundaries_and_scales:
        points.append((begin, _finite(points[-1][1] * scale)))
    return _through(step, points, interpolate_type)


@schedule
def warmup_constant_schedule(step, init_value: Value, peak_value: Value, warmup_steps: Wait):
    """A straight line from `init_value` to `peak_value` in `warmup_steps`; then `peak_value`."""
    return _through(step, [(0, init_value), (warmup_steps, peak_value)])


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
    """A straight line from `init_value` to `peak_value` in `warmup_steps`, then half a cosine to
    `end_value`.

    `decay_steps` is the whole length, with the warm-up. From a peak of 0 it stays there.
    """
    part = _cosine(_ramp(step, warmup_steps, decay_steps - warmup_steps))
    end_value = jnp.where(
        peak_value == 0, 0.0, end_value
    )  # as optax's, which has a ratio of the two
    decayed = _between(end_value, peak_value, _power(part, exponent))
    return jnp.where(
        step < warmup_steps, _between(init_value, peak_value, _ramp(step, 0, warmup_steps)), decayed
    )


@schedule
def warmup_exponential_decay_schedule(
    step,
    init_value: Value,
    peak_value: Value,
    warmup_steps: Wait,
    transition_steps: Length,
    decay_rate: Positive,
    transition_begin: Wait = 0,
    staircase: Flag = False,
    end_value: OptionalValue = None,
):
    """A straight line from `init_value` to `peak_value` in `warmup_steps`, then `exponential_decay`
    from there.
    """
    begin = warmup_steps + transition_begin
    decayed = _exponential(
        step - begin, peak_value, transition_steps, decay_rate, staircase, end_value
    )
    return jnp.where(
        step < warmup_steps, _between(init_value, peak_value, _ramp(step, 0, warmup_steps)), decayed
    )


def join_schedules(schedules: Any, boundaries: Any) -> Schedule:
    """`sequence`, with the steps at which pieces begin in place of their lengths.

    Raises HyperparameterError for boundaries that are negative, not sorted, or not one less than
    the pieces.
    """
    where = "join_schedules()"
    for name, given in (("schedules", schedules), ("boundaries", boundaries)):
        if not isinstance(given, (list, tuple, np.ndarray)):
            raise WrongTypeError(message(name, where, trees.describe(given), "a list"))
    bounds = [0, *boundaries]
    if len(schedules) != len(bounds):
        got = f"{len(boundaries)} for {len(schedules)} schedules"
        raise HyperparameterError(message("boundaries", where, got, "one less than the schedules"))
    for n in bounds:
        _finite_number(where, "boundaries", n)
    known = [n for n in bounds if not trees.is_traced(n)]
    if known != sorted(known):
        raise HyperparameterError(
            message("boundaries", where, list(boundaries), "steps ≥ 0 in ascending order")
        )
    lengths = [*(end - begin for begin, end in itertools.pairwise(bounds)), None]
    return sequence(list(zip(schedules, lengths, strict=True)))


def sgdr_schedule(cosine_kwargs: Any) -> Schedule:
    """`sequence` of one `warmup_cosine_decay_schedule(**kwargs)` for each, `decay_steps` long.

    (Loshchilov and Hutter, SGDR, arXiv:1608.03983.)
    """
    cycles = list(cosine_kwargs) if hasattr(cosine_kwargs, "__iter__") else [cosine_kwargs]
    for kwargs in cycles:
        if not isinstance(kwargs, Mapping):
            expected = "arguments of warmup_cosine_decay_schedule, by name"
            raise WrongTypeError(
                message("cosine_kwargs", "sgdr_schedule()", trees.describe(kwargs), expected)
            )
    return sequence(
        [(warmup_cosine_decay_schedule(**kwargs), kwargs["decay_steps"]) for kwargs in cycles]
    )


# ------------------------------------------------------------------------------- what optax has not


@schedule
def inverse_time(step, init_value: Value, decay_rate: NotNegative, power: NotNegative = 1.0):
    """`init_value / (1 + decay_rate · step)^power`. (ParameterSchedulers' Inv.)"""
    return init_value / (1 + decay_rate * step) ** power


@schedule
def inverse_sqrt(step, peak_value: Value, warmup_steps: Wait, init_value: Value = 0.0):
    """A straight line from `init_value` to `peak_value` in `warmup_steps`, then `peak ·
    sqrt(warmup_steps / step)`.

    Noam's schedule counts from 1: with a model of width d it is
    `shift(inverse_sqrt((d * warmup_steps) ** -0.5, warmup_steps), 1)`. (Vaswani et al.,
    arXiv:1706.03762.)

    >>> from tsunax.schedules import inverse_sqrt
    >>> inverse_sqrt(1.0, warmup_steps=4).values(17)[[0, 2, 4, 16]]
    array([0. , 0.5, 1. , 0.5], dtype=float32)
    """
    decayed = peak_value * jnp.sqrt(
        jnp.maximum(warmup_steps, 1) / jnp.maximum(step, jnp.maximum(warmup_steps, 1))
    )
    return jnp.where(
        step < warmup_steps, _between(init_value, peak_value, _ramp(step, 0, warmup_steps)), decayed
    )


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
    """A straight line to `peak_value`, `stable_steps` at the peak, a straight line to `end_value`:
    three lengths.

    (Hu et al., MiniCPM, arXiv:2404.06395; the straight cooldown is Hägele et al.,
    arXiv:2405.18392.)

    >>> from tsunax.schedules import warmup_stable_decay
    >>> warmup_stable_decay(0.0, 1.0, warmup_steps=2, stable_steps=3, cooldown_steps=2).values(8)
    array([0. , 0.5, 1. , 1. , 1. , 1. , 0.5, 0. ], dtype=float32)
    """
    stable = warmup_steps + stable_steps
    points = [
        (0, init_value),
        (warmup_steps, peak_value),
        (stable, peak_value),
        (stable + cooldown_steps, end_value),
    ]
    return _through(step, points)


def _wave(u):
    return 1 - jnp.abs(2 * u - 1)


def _hump(u):
    return jnp.sin(jnp.pi * u)


@schedule
def triangle(step, low: Value, high: Value, period: Period):
    """From `low` up to `high` and back in `period` steps, again and again.

    (Smith, arXiv:1506.01186.)
    """
    return _between(low, high, _wave(_cycle(step, period)[0]))


@schedule
def triangle_halving(step, low: Value, high: Value, period: Period):
    """`triangle` whose height `high - low` halves after each period."""
    u, past = _cycle(step, period)
    return _between(low, high, _wave(u) * 0.5**past)


@schedule
def triangle_exponential(step, low: Value, high: Value, period: Period, decay_rate: Decay):
    """`triangle` whose height `high - low` is multiplied by `decay_rate` at each step."""
    return _between(low, high, _wave(_cycle(step, period)[0]) * decay_rate**step)


@schedule
def sine(step, low: Value, high: Value, period: Period):
    """`low + (high - low) · |sin(π step / period)|`: one hump in each period."""
    return _between(low, high, _hump(_cycle(step, period)[0]))


@schedule
def sine_halving(step, low: Value, high: Value, period: Period):
    """`sine` whose height `high - low` halves after each period."""
    u, past = _cycle(step, period)
    return _between(low, high, _hump(u) * 0.5**past)


@schedule
def sine_exponential(step, low: Value, high: Value, period: Period, decay_rate: Decay):
    """`sine` whose height `high - low` is multiplied by `decay_rate` at each step."""
    return _between(low, high, _hump(_cycle(step, period)[0]) * decay_rate**step)


@schedule
def cosine_annealing(step, low: Value, high: Value, period: Period, restart: Flag = True):
    """Half a cosine from `high` towards `low` in `period` steps, again and again, or once without
    `restart`.

    With restarts `low` itself is never reached: the last step of a period is 1/period before it.
    (Loshchilov and Hutter, SGDR, arXiv:1608.03983.)
    """
    return _between(
        low, high, _cosine(_cycle(step, period)[0] if restart else _ramp(step, 0, period))
    )


# -------------------------------------------------------------------------------------- combinators


@schedule
def sequence(step, pieces: Pieces):
    """Pieces one after the other, `[(schedule, length), ...]`, each on its own clock; the last one
    goes on.

    A piece is a schedule, any other function of the step, or a number.

    >>> from tsunax.schedules import *
    >>> sequence([(linear_schedule(0.0, 1.0, 2), 2), (1.0, 2), lambda step: 0.5**step]).values(7)
    array([0.  , 0.5 , 1.  , 1.  , 1.  , 0.5 , 0.25], dtype=float32)
    """
    value, begin = _at(pieces[0][0], step), 0
    for (_, length), (piece, _) in itertools.pairwise(pieces):
        begin = begin + _whole(length)
        value = jnp.where(step >= begin, _at(piece, step - begin), value)
    return value


@schedule
def loop(step, schedule: Piece, period: Period):
    """The first `period` steps of a schedule, again and again: `schedule(step % period)`."""
    return _at(schedule, step % jnp.maximum(_whole(period), 1))


@schedule
def interpolate(step, schedule: Piece, rate: Period):
    """`schedule(step // rate)`: a schedule of epochs, driven by steps, with `rate` steps in an
    epoch.
    """
    return _at(schedule, step // jnp.maximum(_whole(rate), 1))


@schedule
def shift(step, schedule: Piece, offset: Offset):
    """`schedule(step + offset)`: begins later in its course; a negative offset waits at its first
    value.
    """
    return _at(schedule, step + _whole(offset))


@schedule
def reverse(step, schedule: Piece, period: Period):
    """`schedule(period - step)`: from its value at `period` back to its first, which it keeps."""
    return _at(schedule, _whole(period) - step)


@schedule
def symmetric(step, schedule: Piece, period: Period):
    """A schedule up to the middle of `period` and back the same way to its first value, which it
    keeps.

    >>> from tsunax.schedules import *
    >>> up = linear_schedule(0.0, 1.0, 2)
    >>> (loop(symmetric(up, 4), 4).values(9) == triangle(0.0, 1.0, 4).values(9)).all()
    np.True_
    """
    return _at(schedule, jnp.minimum(step, _whole(period) - step))


def compose(schedule: Schedule, /, **parameters: Any) -> Schedule:
    """The same schedule with some of its parameters replaced: by schedules of the same clock, or by
    numbers.

    >>> from tsunax.schedules import *
    >>> compose(triangle(0.0, 1.0, 4), high=exponential_decay(1.0, 4, 0.5, staircase=True)).values(7)
    array([0.  , 0.5 , 1.  , 0.5 , 0.  , 0.25, 0.5 ], dtype=float32)
    """
    if not isinstance(schedule, Schedule):
        raise WrongTypeError(
            message("schedule", "compose()", trees.describe(schedule), "a schedule of tsunax")
        )
    return schedule.factory(**{**schedule.arguments, **dict(schedule.static), **parameters})


__all__ = [
    "Schedule",
    "schedule",
    # optax's
    "constant_schedule",
    "cosine_decay_schedule",
    "cosine_onecycle_schedule",
    "exponential_decay",
    "join_schedules",
    "linear_onecycle_schedule",
    "linear_schedule",
    "piecewise_constant_schedule",
    "piecewise_interpolate_schedule",
    "polynomial_schedule",
    "sgdr_schedule",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
    "warmup_exponential_decay_schedule",
    # what optax has not
    "cosine_annealing",
    "inverse_sqrt",
    "inverse_time",
    "sine",
    "sine_exponential",
    "sine_halving",
    "triangle",
    "triangle_exponential",
    "triangle_halving",
    "warmup_stable_decay",
    # combinators
    "compose",
    "interpolate",
    "loop",
    "reverse",
    "sequence",
    "shift",
    "symmetric",
]


def __dir__() -> list[str]:
    return __all__
