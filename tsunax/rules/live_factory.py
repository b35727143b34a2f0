"""`live(factory)`: an optax factory with its numbers as arrays in the state."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec

import jax
import jax.numpy as jnp
import optax

from tsunax._core import Function, PyTree, Where, checks, patterns, trees
from tsunax.errors import HyperparameterError, WrongTypeError, unknown
from tsunax.rules import number_checks
from tsunax.rules.extra_arguments import as_rule, with_extra
from tsunax.rules.live_rules import Live, LiveState, LiveUpdate, Scope, building, factory_name
from tsunax.rules.number_table import Number, interned


def table_of(live: Live, values: tuple[Any, ...]) -> jax.Array:
    """The table of a single group, from its numbers; a schedule contributes several columns."""
    numbers, schedule_numbers = [], []
    for value, schedule in zip(values, live.schedules, strict=True):
        numbers.append(0.0 if schedule else value)
        if schedule:
            schedule_numbers += number_checks.split_schedule(value)[1]
    return number_checks.as_rows(numbers + schedule_numbers)[:, None, :]


@dataclass(frozen=True)
class LiveInit:
    """The init half of a live rule; without numbers it is for shapes and key paths only."""

    live: Live
    values: tuple[Any, ...] | None = field(hash=False)

    def plain(self) -> optax.GradientTransformationExtraArgs:
        """The optax rule with the numbers of step 0."""
        numbers: dict[str, Any] = dict.fromkeys(self.live.names, 0.5)
        for name, value in zip(numbers, self.values or (), strict=self.values is not None):
            value: Any = value(0) if callable(value) else value
            numbers[name] = Number(value, 1 - value) if trees.is_traced(value) else float(value)
        return self.live.build(numbers)

    def __call__(self, params: PyTree) -> LiveState:
        live, values = self.live, self.values
        return LiveState(
            table=jnp.zeros((4, 1, live.columns)) if values is None else table_of(live, values),
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
    place: str = field(compare=False)  # the argument, in errors

    def __post_init__(self) -> None:
        patterns.compile_where(self.where, self.place)

    def __repr__(self) -> str:
        return repr(self.where)

    def in_words(self, inner: Function) -> str:
        return f"PatternMask(where={inner(self.where)})"

    def __call__(self, params: PyTree) -> PyTree:
        flags = patterns.select_in_group(self.where, params, self.place)
        return jax.tree.unflatten(jax.tree.structure(params), flags)


def _is_pattern(x) -> bool:
    is_list = type(x) in (list, tuple) and x
    return isinstance(x, str) or bool(is_list and all(isinstance(p, str) for p in x))


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
        where, statics, numbers, schedules = f"{self.__name__}()", {}, {}, []
        for name, value in self._bind(args, kwargs).items():
            parameter = self.__signature__.parameters[name]
            if isinstance(parameter.default, bool) and "mask" not in name:
                checks.check_flags(where, **{name: value})
            is_static = building.get() or name in self.static
            if is_static or not number_checks.takes_number(parameter, value):
                if "mask" in name and _is_pattern(value):
                    value = PatternMask(value, f"{self.__name__}({name}=)")
                # Copy it, because rules are compared by their statics, which must not change.
                is_mutable = isinstance(value, (dict, list))
                statics[name] = jax.tree.map(lambda x: x, value) if is_mutable else value
            else:
                schedules.append(number_checks.checked_schedule(where, name, value))
                numbers[name] = value
        if building.get():
            return with_extra(self.factory(**statics))
        live = Live(self.factory, statics, tuple(numbers), tuple(schedules))
        init = LiveInit(live, tuple(numbers.values()))
        init.plain()  # bad arguments raise here instead of in the first step
        return as_rule(init, LiveUpdate(live))

    def _bind(self, args, kwargs) -> dict[str, Any]:
        parameter_names = list(self.__signature__.parameters)
        for name in kwargs:
            if name not in parameter_names:
                where = f"{self.__name__}()"
                raise HyperparameterError(unknown("parameter", where, name, parameter_names))
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise WrongTypeError(
                "arguments",
                f"{self.__name__}()",
                got=str(error).replace("missing a required argument:", "none for"),
                expected=f"{self.__name__}({trees.listed(parameter_names, 12)})",
            ) from None
        bound.apply_defaults()
        return dict(bound.arguments)


def _signature(factory: Callable) -> inspect.Signature:
    """Raise WrongTypeError for *args and **kwargs: each number needs its own parameter."""
    expected = "a function with named parameters"
    try:
        signature = inspect.signature(factory)
    except (ValueError, TypeError):
        raise WrongTypeError("factory", "live()", trees.describe(factory), expected) from None
    for p in signature.parameters.values():
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise WrongTypeError(
                "factory",
                "live()",
                got=f"{factory_name(factory)}(..., {p.replace(annotation=p.empty)}, ...)",
                expected=expected,
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
      HyperparameterError: unknown parameter, a number that is not finite or out of range, a bad
        schedule.
      WrongTypeError: not a factory; a string, `None` or a flag where a number belongs.

    >>> import jax.numpy as jnp, optax, tsunax as ts
    >>> def nesterov(learning_rate, momentum=0.9):
    ...     return optax.chain(optax.trace(momentum, nesterov=True), optax.scale(-learning_rate))
    >>> state = ts.setup(ts.rules.live(nesterov)(0.1), {"w": jnp.ones(3)})
    >>> ts.hyperparams(state)
    {'learning_rate': 0.1, 'momentum': 0.9}
    """
    if not callable(factory) or isinstance(factory, LiveFactory):
        raise WrongTypeError(
            "factory",
            "live()",
            got=trees.describe(factory),
            expected="a function that makes an optax rule",
            fix="Use it as it is." if callable(factory) else "For example live(optax.adam)(1e-3).",
        )
    live_factory = LiveFactory(factory, static)
    for name in static:
        if name not in (parameters := live_factory.__signature__.parameters):
            raise HyperparameterError(unknown("static", "live()", name, parameters))
    return live_factory
