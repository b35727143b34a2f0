"""The value type of schedules, and `schedule`, which makes schedules from a formula.

optax's schedules are closures: their numbers are constants of the program, and its factories
branch on them in Python, so they cannot be traced. Here the numbers are the leaves of a pytree. Two
schedules that differ in numbers share one compiled program, and a sweep over them is a `vmap`.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Concatenate, ParamSpec, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tsunax._core import Scalar, checks, trees
from tsunax.errors import HyperparameterError, WrongTypeError
from tsunax.rules import number_checks, number_table

P = ParamSpec("P")
LAST_STEP = 2**30 - 1  # Last step and greatest length. The sum of two such numbers still fits int32


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("arguments",), meta_fields=("factory", "static")
)
@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """One number for each step; returned by the functions of `tsunax.schedules`.

    `schedule(step)` takes an int (Python's, NumPy's or traced) or an array of ints, and returns a
    float32 (weakly typed, as optax's). Steps count from 0; negative steps count as 0. A schedule
    that ends stays at its last value. Iterating yields Python floats from step 0 on, without end.
    `==` and `hash` go by formula and numbers; `repr` is the call that makes the schedule. The
    leaves of this pytree are the numbers, which may be traced. The fields are `factory`, the
    function that makes such schedules, its `arguments` by name, and its `static` flags and names. A
    step that is no int raises WrongTypeError.

    >>> from tsunax.schedules import *
    >>> schedule = triangle(low=0.0, high=1.0, period=4)
    >>> schedule, schedule == triangle(0, 1, 4), float(schedule(5))
    (triangle(low=0.0, high=1.0, period=4), True, 0.5)
    >>> [value for value, _ in zip(schedule, range(5))]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    factory: Any  # the function that makes such schedules; it wraps the formula
    arguments: dict[str, Any]  # numbers, schedules, and tuples of both
    static: tuple[tuple[str, Any], ...]  # flags and names

    def __call__(self, step: ArrayLike) -> jax.Array:
        return _evaluate(jax.tree.map(_as_float, self), _as_step(step, self.factory.__name__))

    def __iter__(self) -> Iterator[float]:
        return (float(number_table.as_float(self(step), None)) for step in itertools.count())

    def values(self, n: int) -> np.ndarray:
        """The values of the first `n` steps: float32 of shape (n,), from one call.

        Raises HyperparameterError for an `n` that is no int >= 0.

        >>> from tsunax.schedules import *
        >>> linear_schedule(1.0, 0.0, transition_steps=4).values(6)
        array([1.  , 0.75, 0.5 , 0.25, 0.  , 0.  ], dtype=float32)
        """
        steps = np.arange(check_steps("values()", "n", n), dtype=np.int32)
        return np.asarray(_evaluate_all(jax.tree.map(_as_float, self), steps))

    def __eq__(self, schedule: object) -> bool:
        if not isinstance(schedule, Schedule):
            return NotImplemented
        numbers, treedef = jax.tree.flatten(self)
        other_numbers, other_treedef = jax.tree.flatten(schedule)
        return treedef == other_treedef and all(map(_are_equal, numbers, other_numbers))

    def __hash__(self) -> int:
        concrete_numbers = (
            x for x in jax.tree.leaves(self) if not trees.is_traced(x) and not np.ndim(x)
        )
        return hash((self.factory, self.static, *map(float, concrete_numbers)))

    def __repr__(self) -> str:
        values = {**self.arguments, **dict(self.static)}
        defaults = inspect.signature(self.factory).parameters
        is_plain = lambda x: x is None or isinstance(x, (bool, int, float))
        printed_arguments = (
            f"{name}={values[name]!r}"
            for name, p in defaults.items()
            if not (is_plain(values[name]) and values[name] == p.default)
        )
        return f"{self.factory.__name__}({', '.join(printed_arguments)})"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class LargeCount:
    """A whole number that float32 would round, as the sum of two exact float32 numbers."""

    high: Any
    low: Any

    def __repr__(self) -> str:
        return repr(_rejoined(self))


def _split(x: Any) -> Any:
    """A large Python int as a `LargeCount`; anything else as it is."""
    if type(x) is not int or not 2**24 < abs(x) <= LAST_STEP:
        return x
    return LargeCount(x - x % 2**16, x % 2**16)


def _rejoined(x: Any) -> Any:
    """A `LargeCount` as an int, or as an int32 array; anything else as it is."""
    if not isinstance(x, LargeCount):
        return x
    parts = x.high, x.low
    return sum(parts) if isinstance(x.high, int) else sum(part.astype(np.int32) for part in parts)


_is_schedule_or_count = lambda x: isinstance(x, (Schedule, LargeCount))


def _are_equal(a: Any, b: Any) -> bool:
    is_traced = trees.is_traced(a) or trees.is_traced(b)
    return a is b or (not is_traced and np.array_equal(np.asarray(a), np.asarray(b)))


def _as_float(x):
    dtype = jax.dtypes.canonicalize_dtype(float)
    return x.astype(dtype) if isinstance(x, jax.Array) else np.asarray(x, dtype)


def _as_step(step, title: str):
    """A step, or an array of steps, as int32 from 0 to `LAST_STEP`."""
    if isinstance(step, bool) or not trees.is_a(step, np.integer):
        raise WrongTypeError("step", f"{title}()", trees.describe(step), "whole numbers")
    if isinstance(step, int):  # may exceed int64, so it is clipped in Python
        return np.int32(min(max(step, 0), LAST_STEP))
    if isinstance(step, jax.Array):
        step = step.astype(jnp.promote_types(step.dtype, jnp.int32))
        return jnp.clip(step, 0, LAST_STEP).astype(jnp.int32)
    return np.clip(step.astype(np.int64), 0, LAST_STEP).astype(np.int32)


@jax.jit
def _evaluate(schedule: Schedule, step):
    """The formula, compiled once for all numbers: a call has the bits that it has inside a step."""
    # XLA would fold constant numbers: a / 3 becomes a * (1 / 3), which differs in the last bit.
    schedule, step = jax.lax.optimization_barrier((schedule, step))
    arguments = jax.tree.map(_rejoined, schedule.arguments, is_leaf=_is_schedule_or_count)
    arguments = {k: x if k == "schedule" else value_at(x, step) for k, x in arguments.items()}
    value = schedule.factory.__wrapped__(step, **arguments, **dict(schedule.static))
    value = jnp.asarray(value, jax.dtypes.canonicalize_dtype(float))
    return value if value.ndim else number_table.weak(value)


@jax.jit
def _evaluate_all(schedule: Schedule, steps):
    """One step after the other: a vectorized division would differ from single calls by a bit."""
    return jax.lax.map(schedule, steps)


def value_at(piece: Any, step: ArrayLike) -> Scalar:
    """The value of a schedule or of another function of the step; anything else as it is."""
    if not callable(piece):
        return piece
    return jnp.asarray(piece(jnp.clip(step, 0, LAST_STEP)), jax.dtypes.canonicalize_dtype(float))


def whole_steps(x: jax.Array) -> jax.Array:
    """A number of steps as int32. A formula gets it as a float, or as an int above 2**24."""
    return jnp.round(x).astype(jnp.int32)


def steps_since(step: jax.Array, begin: Scalar) -> jax.Array:
    """`step - begin`, subtracted as ints: beyond 2²⁴ floats would round both."""
    begin_step = whole_steps(jnp.clip(begin, -LAST_STEP, LAST_STEP))
    # The second term is the fraction of `begin`, and keeps the gradient.
    return (step - begin_step) + (begin_step - begin)


# -------------------------------------------------------------------------- checks of arguments

# A check is a function (where, name, value) -> value in the form that the schedule stores.
Check: TypeAlias = Callable[[str, str, Any], Any]


def in_range(
    low: float = -math.inf, high: float = math.inf, *, above: float = -math.inf, whole: bool = False
) -> Check:
    """The check of a finite number in a range."""
    signs = {"≥": low, ">": above, "≤": high}
    bounds = [f"{sign} {bound}" for sign, bound in signs.items() if math.isfinite(bound)]
    expected = f"a {'whole ' if whole else ''}number {' and '.join(bounds)}".rstrip()

    def check(where, name, value):
        number_checks.check_number(where, name, value)
        if trees.is_traced(value):
            return value
        value = value.item() if trees.is_array(value) else value
        if not (low <= value <= high and value > above) or (whole and value != int(value)):
            raise HyperparameterError(name, where, value, expected)
        return int(value) if whole and abs(value) > 2**24 else value

    return check


check_finite: Check = in_range()
check_scale: Check = in_range(0)
check_wait: Check = in_range(0, whole=True)
# Formulas count with these numbers, in int32.
check_steps: Check = in_range(0, LAST_STEP, whole=True)


def check_piece(where: str, name: str, value: Any) -> Any:
    """A schedule, another function of the step, or a number: a constant schedule."""
    if not callable(value):
        return check_finite(where, name, value)
    if isinstance(value, Schedule):
        return value
    out = jax.eval_shape(value, jax.ShapeDtypeStruct((), np.int32))
    if not checks.is_real(out) or out.shape:
        raise HyperparameterError(
            name,
            where,
            got=f"{trees.describe(out)} from the function",
            expected="one number for a step",
        )
    return jax.tree_util.Partial(value) if jax.tree_util.all_leaves([value]) else value


def _check_flag(where: str, name: str, value: Any) -> bool:
    checks.check_flags(where, **{name: value})
    return bool(value)


def _check_milestones(where, name, value):
    """((step, scale), ...) in the order of the steps, from a mapping or from pairs."""
    steps_and_scales = value.items() if isinstance(value, Mapping) else value or ()
    pairs = [
        (check_wait(where, f"a step of {name}", n), check_scale(where, f"{name}[{n}]", scale))
        for n, scale in steps_and_scales
    ]
    is_traced = any(trees.is_traced(n) for n, _ in pairs)
    return tuple(pairs if is_traced else sorted(pairs, key=lambda pair: pair[0]))


def _check_curve(where, name, value):
    checks.check_choice(value, where, name, ("linear", "cosine"))
    return value


def _or_schedule(check: Callable) -> Callable:
    return lambda where, name, x: (check_piece if callable(x) else check)(where, name, x)


_check_value = _or_schedule(check_finite)
_check_optional = lambda where, name, x: None if x is None else _check_value(where, name, x)

# The annotations of a formula name the checks of its arguments. A schedule may replace any number.
Value = Annotated[Any, _check_value]
OptionalValue = Annotated[Any, _check_optional]
Positive = Annotated[Any, _or_schedule(in_range(above=0))]
NotNegative = Annotated[Any, _or_schedule(check_scale)]
Fraction = Annotated[Any, _or_schedule(in_range(0, 1))]
Decay = Annotated[Any, _or_schedule(in_range(high=1, above=0))]
Length = Annotated[Any, _or_schedule(in_range(above=0, whole=True))]
Wait = Annotated[Any, _or_schedule(check_wait)]  # a length that may be 0
Period = Annotated[Any, _or_schedule(in_range(high=LAST_STEP, above=0, whole=True))]
Offset = Annotated[Any, _or_schedule(in_range(-LAST_STEP, LAST_STEP, whole=True))]
Piece = Annotated[Any, check_piece]
Curve = Annotated[Any, _check_curve]
Milestones = Annotated[Any, _check_milestones]


def _check_order(where: str, arguments: Mapping[str, Any]) -> None:
    warmup_steps: Any = arguments.get("warmup_steps")
    decay_steps: Any = arguments.get("decay_steps")
    are_numbers = all(isinstance(x, int | float) for x in (warmup_steps, decay_steps))
    if are_numbers and warmup_steps >= decay_steps:
        raise HyperparameterError(
            "arguments",
            where,
            got=f"warmup_steps={warmup_steps}, decay_steps={decay_steps}",
            expected="warmup_steps < decay_steps, the whole length",
        )


def _check_of(parameter: inspect.Parameter) -> Callable:
    default_check = _check_flag if isinstance(parameter.default, bool) else _check_value
    annotated_checks = filter(callable, getattr(parameter.annotation, "__metadata__", ()))
    return next(annotated_checks, default_check)


def schedule(formula: Callable[Concatenate[Any, P], Any]) -> Callable[P, Schedule]:
    """A function that returns schedules, from `formula(step, ...) -> value`.

    The formula is plain JAX that works elementwise: `step` is an int32, never negative, and every
    number is a float32 that may be traced. Arguments are finite numbers, or schedules of numbers;
    an argument named `schedule` is passed on as a function of the step, and arguments with a bool
    as default are flags. The formula is part of the program: write it once, in a module.

    >>> from tsunax.schedules import schedule
    >>> @schedule
    ... def square_wave(step, low, high, period):
    ...     return jnp.where(step % period < period / 2, high, low)
    >>> wave = square_wave(0.1, 1, period=4)
    >>> wave, wave.values(5)
    (square_wave(low=0.1, high=1, period=4), array([1. , 1. , 0.1, 0.1, 1. ], dtype=float32))
    """
    signature = inspect.signature(formula)
    parameters = list(signature.parameters.values())[1:]
    # Annotations with checks are removed: `help` would print addresses of functions.
    has_check = lambda p: hasattr(p.annotation, "__metadata__")
    signature = signature.replace(
        parameters=[p.replace(annotation=p.empty) if has_check(p) else p for p in parameters],
        return_annotation=Schedule,
    )
    # The names of closure variables are part of the text that a resumed run compares: keep them.
    kept_as = {p.name: check_piece if p.name == "schedule" else _check_of(p) for p in parameters}
    where = f"{formula.__name__}()"

    @functools.wraps(formula)
    def factory(*args: P.args, **kwargs: P.kwargs) -> Schedule:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise checks.wrong_call(where, signature, args, kwargs, error) from None
        bound.apply_defaults()
        values = jax.tree.map(_rejoined, dict(bound.arguments), is_leaf=_is_schedule_or_count)
        values = {name: kept_as[name](where, name, value) for name, value in values.items()}
        _check_order(where, values)
        static = {name: value for name, value in values.items() if isinstance(value, (bool, str))}
        numbers = {name: value for name, value in values.items() if name not in static}
        numbers = jax.tree.map(_split, numbers, is_leaf=_is_schedule_or_count)
        return Schedule(factory, numbers, tuple(static.items()))

    factory.__signature__ = signature  # type: ignore[attr-defined]
    return factory
