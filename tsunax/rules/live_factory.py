"""`live(factory)`: an optax factory with its numbers as arrays in the state."""

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tsunax._core import Function, PyTree, Where, checks, patterns, trees
from tsunax.errors import HyperparameterError, WrongTypeError, unknown
from tsunax.rules import number_checks
from tsunax.rules.extra_arguments import as_rule, with_extra
from tsunax.rules.live_rules import (
    Live,
    LiveState,
    LiveUpdate,
    ScheduleShape,
    Scope,
    building,
    factory_name,
)
from tsunax.rules.number_table import Number, interned

_NEVER_NUMBERS = {"key", "seed", "mask", "mu_dtype"}
_NUMBER_WORDS = ("float", "Scalar", "ArrayLike", "Schedule")
# Words in annotations of trees, or of functions of the params.
_OTHER_WORDS = ("Mask", "ArrayTree", "Mapping", "Iterable")


def _takes_number(parameter: inspect.Parameter, value: Any) -> bool:
    """Whether this parameter of a factory takes a live number, or a schedule, given this value.

    Counts, flags, names, masks, dtypes, keys, tuples and functions are part of the program.
    """
    default, annotation = parameter.default, str(parameter.annotation)
    is_function = re.match(r"(typing\.|collections\.abc\.)?Callable\b", annotation)
    is_other = parameter.name in _NEVER_NUMBERS or any(word in annotation for word in _OTHER_WORDS)
    if is_function or is_other:
        return False
    is_empty = default is parameter.empty
    if isinstance(default, (bool, int, str, tuple)) or (callable(default) and not is_empty):
        return False
    is_expected = (
        isinstance(default, float)
        or parameter.name in ("learning_rate", "lr")
        or any(word in annotation for word in _NUMBER_WORDS)
    )
    if value is None:  # a mistake in place of a number, unless None is the default
        return is_expected and default is not None
    return is_expected or isinstance(value, (float, np.floating)) or trees.is_traced(value)


def _split_schedule(schedule: PyTree) -> tuple[ScheduleShape, list[Any]]:
    leaves, treedef = jax.tree.flatten(schedule)
    functions = tuple(leaf if callable(leaf) else None for leaf in leaves)
    return ScheduleShape(treedef, functions), [leaf for leaf in leaves if not callable(leaf)]


def _table_of(live: Live, values: tuple[Any, ...]) -> jax.Array:
    """The table of a single group: the values, their complements, zeros, and the values again.

    A schedule contributes several columns. The complements of concrete values are rounded once,
    from float64.
    """
    pairs = list(zip(values, live.schedules, strict=True))
    numbers = [0.0 if schedule else value for value, schedule in pairs]
    numbers += [x for value, schedule in pairs if schedule for x in _split_schedule(value)[1]]
    dtype = jax.dtypes.canonicalize_dtype(float)
    wide = np.asarray([0.0 if trees.is_traced(x) else float(x) for x in numbers], np.float64)
    rows = jnp.asarray(np.stack([wide, 1 - wide, np.zeros_like(wide), wide]).astype(dtype))
    for i, value in enumerate(numbers):
        if trees.is_traced(value):
            value = jnp.asarray(value, dtype)
            rows = rows.at[:, i].set(jnp.stack([value, 1 - value, jnp.zeros_like(value), value]))
    return rows[:, None, :]


@dataclass(frozen=True)
class LiveInit:
    """The init half of a live rule; without numbers it is for shapes and key paths only."""

    live: Live
    values: tuple[Any, ...] | None = field(hash=False)

    def plain(self) -> optax.GradientTransformationExtraArgs:
        """The optax rule with the numbers of step 0."""
        # Without values, 0.5 is in the range of all numbers.
        numbers: dict[str, Any] = dict.fromkeys(self.live.names, 0.5)
        for name, value in zip(numbers, self.values or (), strict=self.values is not None):
            value: Any = value(0) if callable(value) else value
            numbers[name] = Number(value, 1 - value) if trees.is_traced(value) else float(value)
        return self.live.build(numbers)

    def __call__(self, params: PyTree) -> LiveState:
        live, values = self.live, self.values
        return LiveState(
            table=jnp.zeros((4, 1, live.columns)) if values is None else _table_of(live, values),
            inner=self.plain().init(params),
            count=jnp.zeros([], jnp.int32) if any(live.schedules) else None,
            live=interned(live),
            scope=Scope(interned(tuple(trees.paths(params)))),
        )

    def blank(self) -> Function:
        return LiveInit(self.live, None)


@dataclass(frozen=True, repr=False)
class PatternMask:
    """A function for optax's `mask=` from a pattern. optax itself would read a str as True."""

    where: Where
    place: str = field(compare=False, repr=False)  # the argument, in errors

    def __post_init__(self) -> None:
        patterns.compile_where(self.where, self.place)

    def __repr__(self) -> str:
        return repr(self.where)

    def __call__(self, params: PyTree) -> PyTree:
        flags = patterns.select_in_group(self.where, params, self.place)
        return jax.tree.unflatten(jax.tree.structure(params), flags)


P = ParamSpec("P")


class LiveFactory(Generic[P]):
    """The result of `live(factory)`: call it like the factory."""

    def __init__(
        self, factory: Callable[P, optax.GradientTransformation], static: tuple[str, ...] = ()
    ) -> None:
        self.__signature__: inspect.Signature = _signature(factory)
        if isinstance(factory, functools.partial) and not factory.args:
            # The signature has its keywords as defaults, and a LiveFactory compares by value.
            factory = factory.func
        self.factory: Function = factory
        self.static: frozenset[str] = frozenset(static)
        self.__name__: str = factory_name(factory)
        self.__qualname__ = self.__name__
        self.__module__ = "tsunax.rules"
        self.__doc__ = factory.__doc__

    def __repr__(self) -> str:
        names = getattr(self.factory, "__module__", None), factory_name(self.factory)
        return f"live({'.'.join(filter(None, names))})"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
        where, statics, numbers = f"{self.__name__}()", {}, {}
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise checks.wrong_call(where, self.__signature__, args, kwargs, error) from None
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            parameter = self.__signature__.parameters[name]
            if isinstance(parameter.default, bool) and "mask" not in name:
                checks.check_flags(where, **{name: value})
            if building.get() or name in self.static or not _takes_number(parameter, value):
                parts = value if type(value) in (list, tuple) and value else [value]
                if "mask" in name and all(isinstance(part, str) for part in parts):
                    value = PatternMask(value, f"{self.__name__}({name}=)")
                # Copy it, because rules are compared by their statics, which must not change.
                is_mutable = isinstance(value, (dict, list))
                statics[name] = jax.tree.map(lambda x: x, value) if is_mutable else value
            else:
                is_schedule = callable(value)
                check = number_checks.check_schedule if is_schedule else number_checks.check_number
                check(where, name, value)
                numbers[name] = value
        if building.get():
            return with_extra(self.factory(**statics))
        shape = lambda value: _split_schedule(value)[0] if callable(value) else None
        live = Live(self.factory, statics, tuple(numbers), tuple(map(shape, numbers.values())))
        init = LiveInit(live, tuple(numbers.values()))
        init.plain()  # bad arguments raise here instead of in the first step
        return as_rule(init, LiveUpdate(live))


def _signature(factory: Callable) -> inspect.Signature:
    """Raise WrongTypeError for *args and **kwargs: each number needs its own parameter."""
    signature = inspect.signature(factory)
    for p in signature.parameters.values():
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise WrongTypeError(
                "factory",
                "live()",
                got=f"{factory_name(factory)}(..., {p.replace(annotation=p.empty)}, ...)",
                expected="a function with named parameters",
            )
    return signature


def live(
    factory: Callable[P, optax.GradientTransformation], *, static: tuple[str, ...] = ()
) -> LiveFactory[P]:
    """Make the numbers of an optax factory live, to read, change and schedule them.

    `live(optax.adam)(1e-3)` trains as `optax.adam(1e-3)` does, to the last bit of float32 for most
    rules, but `ts.adjust(state, learning_rate=1e-4)` changes the rate without a new compilation.
    Floats and schedules of floats become arrays in the state; counts, flags, masks and dtypes stay
    part of the program.

    Args:
      factory: any function of numbers that returns an `optax.GradientTransformation`, your own
        chain included.
      static: numeric parameters that stay constants because the factory branches on them in Python.

    Raises:
      HyperparameterError: a number that is not finite or out of range, at the first steps of a
        schedule, too.
      WrongTypeError: unknown parameters; a string, `None` or a flag where a number belongs.

    >>> import jax.numpy as jnp, optax, tsunax as ts
    >>> def nesterov(learning_rate, momentum=0.9):
    ...     return optax.chain(optax.trace(momentum, nesterov=True), optax.scale(-learning_rate))
    >>> state = ts.setup(ts.rules.live(nesterov)(0.1), {"w": jnp.ones(3)})
    >>> ts.hyperparams(state)
    {'learning_rate': 0.1, 'momentum': 0.9}
    """
    live_factory = LiveFactory(factory, static)
    for name in static:
        if name not in (parameters := live_factory.__signature__.parameters):
            raise HyperparameterError(unknown("static", "live()", name, parameters))
    return live_factory
