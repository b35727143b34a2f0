"""Live rules: any optax factory whose numbers are arrays in the state instead of constants in the
program.

A live rule keeps the *untouched* optax state beside a small table of its numbers. At every update
the factory is called again, inside the trace, with `Number` objects read from that table, so a new
value is a new array and never a new program. A table may hold several *groups* of values for
disjoint sets of leaves (a subtree that `adjust` cut off): the factory then runs once per group on
the whole tree, and each leaf takes the result of its own group. Moments never move, a global norm
stays global, and XLA drops what nobody takes.

This module knows optax and trees. It must not know `TrainState`.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tsunax._core import patterns, trees
from tsunax.errors import HyperparameterError, RuleError, TsunaxError, WrongTypeError, message, told
from tsunax.rules import numbers as _numbers

# ----------------------------------------------------------------------------------------- the rule


@dataclass(frozen=True, eq=False)
class Live:
    """A factory with its static arguments, its names and its schedules: everything but the numbers.

    Compared by value, so that two rules that differ in numbers only share one compiled program.
    """

    factory: Callable
    statics: Mapping[str, Any]
    names: tuple[str, ...]
    schedules: tuple[_numbers.ScheduleShape | None, ...]

    @property
    def title(self) -> str:
        return name_of(self.factory)

    def in_words(self, inner: Callable[[Any], str]) -> str:
        """The rule without its numbers, for checkpoints."""
        flags = (f"{name}={inner(x)}" for name, x in sorted(self.statics.items()))
        return f"{self.title}({', '.join([*self.names, *flags])})"

    @functools.cached_property
    def columns(self) -> int:
        return len(self.names) + sum(s.size for s in self.schedules if s)

    def __eq__(self, other):
        return (
            self is other
            or (  # without a global name: the interpreter's last comparisons find none
                type(other) is type(self)
                and self.factory == other.factory
                and self.names == other.names
                and self.schedules == other.schedules
                and self.statics.keys() == other.statics.keys()
                and all(self._same(v, other.statics[k]) for k, v in self.statics.items())
            )
        )

    def __hash__(self):
        return hash((self.factory, self.names))

    @staticmethod
    def _same(a, b) -> bool:
        try:
            return bool(a is b or (type(a) is type(b) and a == b))
        except (ValueError, TypeError):  # arrays in a mask: equal only if they are the same object
            return False

    def read(self, table, step) -> dict[str, _numbers.Number]:
        """The numbers in force at `step`, from one group's `table` of shape (4, columns)."""
        out, at = {}, len(self.names)
        for i, (name, schedule) in enumerate(zip(self.names, self.schedules, strict=True)):
            value, complement, held = table[0, i], table[1, i], table[2, i]
            if schedule:
                now = jnp.asarray(schedule.at(step, table[0, at : at + schedule.size]), table.dtype)
                value = jnp.where(held > 0, value, now)
                complement = jnp.where(held > 0, complement, 1 - now)
                at += schedule.size
            out[name] = _numbers.Number(value, complement)
        return out

    def build(self, numbers: Mapping[str, Any]):
        """The optax rule for these numbers."""
        outer = _building.set(True)
        try:
            tx = self.factory(**self.statics, **numbers)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            raise RuleError(_BRANCHES.format(self.title)) from error
        finally:
            _building.reset(outer)
        if not isinstance(tx, optax.GradientTransformation):
            expected = "an optax.GradientTransformation"
            raise WrongTypeError(message("result", f"{self.title}()", trees.describe(tx), expected))
        return optax.with_extra_args_support(tx)


# Inside a live factory every rule is the plain one: the factory's own numbers are the live ones
_building: contextvars.ContextVar[bool] = contextvars.ContextVar("_building", default=False)

_BRANCHES = (
    "number at {0}(): got a Python decision on its value, expected none on a live number. "
    "Keep that parameter fixed: live({0}, static=('name',))."
)


def name_of(factory) -> str:
    return (getattr(factory, "__name__", None) or type(factory).__name__).strip("_")


def module_of(factory) -> str:
    """The module of a factory; "" for one that has none, as what `exec` made."""
    return getattr(factory, "__module__", None) or ""


@dataclass(frozen=True)
class Home:
    """Where a live state is used. It decides nothing in an update, so that all of them are equal.

    optax makes states of one rule from other trees and maps over both: from placeholders
    (`tree_map_params`), and from the params of the moment (`lookahead`, `sam`).
    """

    paths: tuple = field(compare=False)  # key path of each leaf that the rule sees
    own_clock: bool = field(default=False, compare=False)  # in a rule that no `step=` is given to


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("table", "inner", "extra", "count"),
    meta_fields=("live", "cut", "home"),
)
@dataclass(frozen=True, eq=False, init=False)
class LiveState:
    """State of a live rule."""

    # (4, groups, columns): value, complement, held, given. None where a TrainState keeps it
    table: Any
    inner: Any  # the optax state, with group 0's counters
    extra: (
        tuple  # the counters of the groups 1, 2, ...: the inner leaves that belong to no parameter
    )
    # int32: updates of this rule, the clock of its schedules if no `step=` is given; else None
    count: Any
    live: Live
    cut: Cut | None
    home: Home

    def __init__(self, table, inner, extra=(), count=None, *, live, cut=None, home=Home(())):
        fields = self.__dict__
        fields["table"], fields["inner"], fields["extra"], fields["count"] = (
            table,
            inner,
            extra,
            count,
        )
        fields["live"], fields["cut"], fields["home"] = live, cut, home

    def __getattr__(self, name: str):
        """The fields of the optax state: `state.plateau_count`, as code that was written for that
        reads them.
        """
        if name.startswith("_") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getitem__(self, i):
        return self.inner[i]

    @property
    def paths(self) -> tuple:
        return self.home.paths

    @property
    def own_clock(self) -> bool:
        return self.home.own_clock

    @property
    def groups(self) -> int:
        return len(self.cut.labels) if self.cut else 1


@dataclass(frozen=True)
class Cut:
    """Which group of values each leaf takes, and what each group is called."""

    of: tuple[int, ...]
    labels: tuple[str, ...]


@functools.lru_cache(maxsize=1024)  # what falls out costs time, not truth: these compare by value
def interned(static):
    """One object for equal static parts, so that comparing two states compares identities."""
    return static


def is_live(x) -> bool:
    return isinstance(x, LiveState)


def table_of(live: Live, values: tuple) -> Any:
    """The table of one group, from the numbers that the user gave (schedules: their own
    numbers).
    """
    numbers, inner = [], []
    for value, schedule in zip(values, live.schedules, strict=True):
        numbers.append(0.0 if schedule else value)
        if schedule:
            inner += _numbers.split_schedule(value)[1]
    return _numbers.as_rows(numbers + inner)[:, None, :]


@dataclass(frozen=True)
class LiveInit:
    """The init half; it knows the numbers."""

    live: Live
    values: tuple = field(hash=False)

    def plain(self):
        """The optax rule of the first step."""
        numbers = {}
        for name, value, schedule in zip(
            self.live.names, self.values, self.live.schedules, strict=True
        ):
            value = value(0) if schedule else value
            numbers[name] = (
                _numbers.Number(value, 1 - value) if trees.is_traced(value) else float(value)
            )
        return self.live.build(numbers)

    def __call__(self, params) -> LiveState:
        live = self.live
        paths = tuple(path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0])
        return LiveState(
            table=table_of(live, self.values),
            inner=self.plain().init(params),
            count=jnp.zeros([], jnp.int32) if any(live.schedules) else None,
            live=interned(live),
            home=Home(interned(paths)),
        )

    def blank(self) -> Callable:
        return BlankInit(self.live)


@dataclass(frozen=True)
class BlankInit:
    """The init half without its numbers: for shapes and key paths only."""

    live: Live

    def __call__(self, params) -> LiveState:
        live = self.live
        inner = live.build(dict.fromkeys(live.names, 0.5)).init(params)
        count = jnp.zeros([], jnp.int32) if any(live.schedules) else None
        return LiveState(jnp.zeros((4, 1, live.columns)), inner, count=count, live=live)


@dataclass(frozen=True)
class _PlainInit:
    """The init half of a rule that `step=` is not given to: schedules in it have their own
    clock.
    """

    init: Callable

    def __call__(self, params):
        return _on_own_clocks(self.init(params))

    def blank(self) -> Callable:
        return _PlainInit(blank(self.init))


def _on_own_clocks(state):
    def mark(x):
        if not is_live(x):
            return x
        return dataclasses.replace(
            x, inner=_on_own_clocks(x.inner), home=Home(x.paths, own_clock=True)
        )

    return jax.tree.map(mark, state, is_leaf=is_live)


@dataclass(frozen=True)
class PlainUpdate:
    """The update half of a rule that takes some extra arguments only, or none.

    Compares as that half does.
    """

    update: Callable
    takes: tuple[str, ...]

    def __call__(self, updates, state, params=None, **extra):
        return self.update(
            updates, state, params, **{name: extra[name] for name in self.takes if name in extra}
        )


class Rule(optax.GradientTransformationExtraArgs):
    """An optax rule that prints as the call that makes it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return text_of(self.init, self.update)


def as_rule(init: Any, update: Any) -> optax.GradientTransformationExtraArgs:
    """The optax rule of these two halves."""
    return Rule(init, update)


def text_of(init: Any, update: Any) -> str:
    """The call that makes a rule: its first argument, and those not at their defaults; of a rule of
    others its name.
    """
    return update.text(init) if hasattr(update, "text") else f"{_name_of_update(update)}(...)"


def _show(value: Any) -> str:
    if isinstance(value, PatternMask):
        return repr(value.where)
    if isinstance(value, optax.GradientTransformation):
        return text_of(*value)
    return getattr(value, "__name__", None) or ("traced" if trees.is_traced(value) else repr(value))


def with_extra(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The rule as one that takes any extra argument, and gets those in its signature; equal rules
    stay equal.
    """
    takes = _extra_arguments(rule)
    if takes is None:
        return as_rule(rule.init, rule.update)
    init = rule.init if "step" in takes else _PlainInit(rule.init)
    return as_rule(init, PlainUpdate(rule.update, takes))


def _extra_arguments(rule: optax.GradientTransformation) -> tuple[str, ...] | None:
    """The names of the extra arguments that an update takes; None: any."""
    if not isinstance(rule, optax.GradientTransformationExtraArgs):
        return ()
    return names_of(rule.update, 3)  # behind updates, state, params


def names_of(f: Callable, first: int = 1) -> tuple[str, ...] | None:
    """The keywords that a function takes behind its first arguments; None: any."""
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (ValueError, TypeError):
        return None
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return None
    known = parameters[first:]
    return tuple(p.name for p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


@functools.lru_cache(maxsize=128)
def keywords_of(update: Callable) -> frozenset[str] | None:
    """The extra arguments that an update, and all that it is made of, may read; None if unknown.

    optax's wrappers take any, so names are looked for in the signatures of the functions inside,
    and in what a function that takes any mentions by name (`extra.get("beta")`).
    """
    parts = parts_of(update)
    if parts is None:
        return None
    found = {"step"} if any(isinstance(x, LiveUpdate) for x in parts) else set()
    for x in parts:
        if isinstance(x, (PlainUpdate, types.CodeType)):
            found.update(x.takes if isinstance(x, PlainUpdate) else _extra_of(x))
    return frozenset(found)


def parts_of(update: Callable) -> list[Any] | None:
    """The functions, code and other objects that an update is made of; None if nothing can be
    seen.
    """
    seen, left = {}, [update]
    while left:
        x = left.pop()
        if id(x) in seen or isinstance(x, (str, bytes, type, types.ModuleType)):
            continue
        seen[id(x)] = x  # kept, so that no other object gets its id
        if isinstance(x, LiveUpdate):
            halves = dict.fromkeys(x.live.names, 0.5)
            left += [x.live.build(halves).update, *x.live.statics.values()]
        elif isinstance(x, (tuple, list, Mapping)):
            left += x.values() if isinstance(x, Mapping) else x
        elif isinstance(x, types.CodeType):
            left += [part for part in x.co_consts if isinstance(part, types.CodeType)]
        elif isinstance(x, types.MethodType):
            left += [x.__func__, x.__self__]
        elif isinstance(x, types.FunctionType):
            left += [x.__code__, getattr(x, "__wrapped__", None), *(x.__defaults__ or ())]
            left += [cell.cell_contents for cell in x.__closure__ or () if cell != _EMPTY]
            names = x.__code__.co_names
            named = [x.__globals__.get(name) for name in names]
            in_optax = [m for m in named if getattr(m, "__name__", "").partition(".")[0] == "optax"]
            named += [getattr(m, name, None) for m in in_optax for name in names]
            left += [f for f in named if isinstance(f, types.FunctionType)]
        elif dataclasses.is_dataclass(x) or callable(x):
            call = inspect.getattr_static(type(x), "__call__", None)
            if isinstance(call, types.FunctionType):
                left.append(call)
            elif x is update and not hasattr(x, "__wrapped__"):
                return None
            left += [getattr(x, "__wrapped__", None), getattr(x, "func", None)]
            left += getattr(x, "__dict__", {}).values()
    return list(seen.values())


_EMPTY = types.CellType()
_OPTAX = os.path.dirname(optax.__file__)


def _extra_of(code: types.CodeType) -> set[str]:
    """The extra arguments in the signature of an update; those of a function that takes any too."""
    takes_any = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    if not takes_any and not code.co_name.startswith("update"):
        return set()
    n = code.co_argcount
    first = 4 if code.co_varnames[:1] == ("self",) else 3  # behind updates, state, params
    found = set(code.co_varnames[first : n + code.co_kwonlyargcount])
    if takes_any and not code.co_filename.startswith(_OPTAX):  # which names all in signatures
        inside = [code]
        for part in inside:
            inside += [x for x in part.co_consts if isinstance(x, types.CodeType)]
            found.update(x for x in part.co_consts if isinstance(x, str) and x.isidentifier())
    return found - {"updates", "grads", "state", "params"}


def accepting(f: Callable, names) -> Callable:
    """The same function, which takes these keywords too and ignores them.

    optax's line searches give every extra argument that is not their own to the loss function, by
    the names of its signature, and raise for the others.
    """
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (ValueError, TypeError):
        return f
    new = [name for name in names if name not in {p.name for p in parameters}]
    if not new:
        return f

    @functools.wraps(f)
    def of(*args, **kwargs):
        return f(*args, **{name: x for name, x in kwargs.items() if name not in new})

    last = (
        [parameters.pop()]
        if parameters and parameters[-1].kind == inspect.Parameter.VAR_KEYWORD
        else []
    )
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in new]
    of.__signature__ = inspect.Signature([*parameters, *more, *last])  # pyright: ignore[reportAttributeAccessIssue]
    return of


def check_rule(rule, where: str, fix: str = "") -> None:
    """Raise WrongTypeError unless this is an optax rule, guessing what was meant."""
    expected, got = "an optax.GradientTransformation", trees.describe(rule)
    if isinstance(rule, optax.GradientTransformation):
        if not (callable(rule.init) and callable(rule.update)):
            got = f"one with init {trees.describe(rule.init)}, update {trees.describe(rule.update)}"
            raise WrongTypeError(message("rule", where, got, "two functions"))
        try:
            hash(rule)
        except TypeError as error:
            expected = "one that can be hashed, as functions can: jit looks it up"
            raise RuleError(message("rule", where, told(error), expected)) from None
        return
    raise WrongTypeError(message("rule", where, got, expected, fix or _meant(rule)))


# What cannot be a rule, and the way that works
_WAYS = {
    "lookahead": "Its params are optax.LookaheadParams: use it in a loop of your own, around any of ts.rules. "
    "An average of the params is setup(..., ema=0.99).",
    "differentially_private_aggregate": "It takes a gradient for each row: call its update with those of "
    "jax.vmap(jax.grad(...)) yourself, and give ts.update what it returns.",
}
SEARCHES = ("value_fn", "obj_fn", "grad_fn")  # extra arguments that are functions of params


def check_update(rule: optax.GradientTransformationExtraArgs, params) -> None:
    """Raise RuleError for a rule of others whose update fails on these params, or returns other
    shapes or dtypes.

    Traced for shapes. An extra argument that is missing is no fault yet: `ts.update` may be given
    it.
    """
    named = jax.tree_util.tree_flatten_with_path(params)[0]
    complex_ = [
        pair for pair in named if jnp.issubdtype(trees.dtype_of(pair[1]), jnp.complexfloating)
    ]
    if not complex_ and _is_ours(rule.update):
        return
    wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
    loss = lambda p, *_, **__: sum(jnp.sum(wide(jnp.abs(x))) for x in jax.tree.leaves(p))
    extra = {"value_fn": loss, "obj_fn": loss, "grad_fn": lambda p, *_: jax.grad(loss)(p)}
    extra = {name: accepting(f, ("step", "weight", *SEARCHES)) for name, f in extra.items()}
    run = lambda g, s, step, x: rule.update(g, s, g, step=step, weight=x, value=x, grad=g, **extra)
    numbers = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    cause = None
    try:
        before = jax.eval_shape(rule.init, params)
        updates, after = jax.eval_shape(run, params, before, *numbers)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        return  # not under jit, but by hand perhaps
    except Exception as error:
        outside = isinstance(error, NameError) and "unbound axis name" in str(error)  # of shard_map
        if outside or (not complex_ and missing(error)):
            return
        cause, name, got = error, _raised_by(error, rule), f"{told(error)} from its update"
    else:
        parts = map(_name_of_update, filter(callable, parts_of(rule.update) or ()))
        name = next(filter(_WAYS.__contains__, parts), _name_of_update(rule.update))
        got = _unlike(updates, params)
        if not got and (difference := trees.first_difference(after, before, "opt_state")):
            raise RuleError(
                f"optimizer state {difference}. The rule {name} changes it from call to call."
            )
        pairs = zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=not got)
        if not got and all(u.dtype == p.dtype for u, p in pairs if complex_):
            return
    if complex_ and not isinstance(cause, TsunaxError):
        path, leaf = complex_[0]
        fix = "Wrap the rule: optax.contrib.split_real_and_imaginary(rule)."
        where, got = trees.access_str("params", path), f"dtype {leaf.dtype}"
        raise RuleError(message("leaf", where, got, "real numbers for this rule", fix)) from cause
    way = _IN_OPTAX if "unexpected keyword argument" in got else _WAYS.get(name, "")
    what = "rule" if "<" in name else f"rule {name}"
    raise RuleError(message(what, "setup()", got, "updates like the params", way)) from cause


_IN_OPTAX = (
    "optax's wrappers give extra arguments to all rules inside, also to those that take others: join them with "
    "ts.rules.chain or ts.rules.partition."
)


def _unlike(updates, params) -> str:
    """How updates differ from the params in structure or shape; "" if they do not."""
    if difference := trees.first_difference(updates, params, "updates"):
        return f"another tree ({difference})"
    for (path, p), u in zip(
        jax.tree_util.tree_flatten_with_path(params)[0], jax.tree.leaves(updates), strict=True
    ):
        if u.shape != jnp.shape(p):
            return (
                f"an update of shape {u.shape} of {trees.access_str('params', path)}, "
                f"{trees.describe(p)}"
            )
    return ""


def _is_ours(update: Any) -> bool:
    """Whether an update is made of rules that are known to work."""
    if isinstance(update, LiveUpdate):
        return module_of(update.live.factory).partition(".")[0] in ("optax", "tsunax")
    if not type(update).__module__.startswith("tsunax."):
        return False
    return all(map(_is_ours, getattr(update, "updates", None) or [getattr(update, "update", None)]))


def missing(error: Exception) -> list[str]:
    """The names of the arguments for want of which a function was not called."""
    if isinstance(error, ValueError):  # of optax's own, for those with a default
        return re.findall(r"^`?(\w+)`? must be provided", str(error))
    found = re.search(r"missing \d+ required \S+ arguments?: (.*)", str(error))
    return re.findall(r"'(\w+)'", found[1]) if isinstance(error, TypeError) and found else []


def _raised_by(error: BaseException, rule) -> str:
    """The factory of the innermost update that an exception came through."""
    names, trace = [_name_of_update(rule.update)], error.__traceback__
    while trace is not None:
        outer, _, inner = trace.tb_frame.f_code.co_qualname.partition(".<locals>.")
        names += [outer] if inner in ("update", "update_fn") else []
        trace = trace.tb_next
    return names[-1]


def _name_of_update(update: Any) -> str:
    while type(update).__module__.startswith("tsunax.") and hasattr(update, "update"):
        update = update.update
    if isinstance(update, LiveUpdate):
        return update.live.title
    name = getattr(
        update, "__qualname__", type(update).__name__.strip("_").removesuffix("Update").lower()
    )
    return name.partition(".<locals>")[0].removesuffix(".update")


def _meant(rule) -> str:
    if all(
        callable(getattr(rule, name, None))
        for name in ("init", "update", "gradient_transformation")
    ):
        return "Call rule.gradient_transformation(), or use ts.rules.accumulate(rule, every=n)."
    is_rule = lambda x: isinstance(x, optax.GradientTransformation)
    if isinstance(rule, LiveFactory) or (callable(rule) and not isinstance(rule, type)):
        first = next(iter(inspect.signature(rule).parameters), "")
        return f"Call it: {getattr(rule, '__name__', 'rule')}({first and first + '=...'})."
    if isinstance(rule, (list, tuple)) and rule and all(map(is_rule, rule)):
        return "Join them: ts.rules.chain(*rules)."
    if type(rule) is tuple and len(rule) == 2 and all(map(callable, rule)):
        return "Name the two: optax.GradientTransformation(init, update)."
    if isinstance(rule, Mapping) and rule and all(map(is_rule, rule.values())):
        return "Give each its part: ts.rules.partition({pattern: rule})."
    return "For example ts.rules.adam(1e-3)."


def blank(init: Any) -> Callable:
    """The init half of any rule with the numbers of its live parts left out, so that it compares by
    value.
    """
    return init.blank() if hasattr(init, "blank") else init


@dataclass(frozen=True)
class LiveUpdate:
    """The update half; numbers come from the state."""

    live: Live

    def in_words(self, inner: Callable[[Any], str]) -> str:
        return self.live.in_words(inner)

    def text(self, init: Any) -> str:
        numbers = dict(zip(self.live.names, getattr(init, "values", ()), strict=False))
        given, shown = {**self.live.statics, **numbers}, []
        for i, p in enumerate(inspect.signature(self.live.factory).parameters.values()):
            value = given.get(p.name, p.default)
            plain = isinstance(value, (bool, int, float, str, tuple))
            if p.name in given and (
                i == 0 or not (value is p.default or (plain and value == p.default))
            ):
                shown.append(f"{p.name}={_show(value)}")
        return f"{self.live.title}({', '.join(shown)})"

    def __call__(self, updates, state: LiveState, params=None, *, step=None, **extra):
        if not is_live(state) or state.table is None:
            fix = "The state of a TrainState is another one: use ts.update."
            raise RuleError(
                message(
                    "state",
                    f"{self.live.title}()",
                    trees.describe(state),
                    "what its init made",
                    fix,
                )
            )
        clock = state.count if step is None else step
        runs = [
            _run(
                self.live, state.table[:, i], clock, updates, inner, params, {**extra, "step": step}
            )
            for i, inner in enumerate(_inners(self.live, state, updates))
        ]
        updates, inner, counters = _collect(self.live, state, updates, runs)
        count = None if state.count is None else optax.safe_increment(state.count)
        return updates, LiveState(
            state.table,
            inner,
            counters,
            count,
            live=state.live,
            cut=state.cut,
            home=state.home,
        )


def _run(live: Live, table, clock, updates, inner, params, extra):
    """One run of the plain rule: with exact complements, or, where a factory cannot take those,
    without.
    """
    extra = {k: v for k, v in extra.items() if v is not None}

    def run(convert, updates, inner, params):
        numbers = {name: convert(x) for name, x in live.read(table, clock).items()}
        return live.build(numbers).update(updates, inner, params, **extra)

    def avals(convert):
        out = jax.eval_shape(lambda *args: run(convert, *args), updates, inner, params)
        return jax.tree.map(lambda x: (x.shape, x.dtype), out)

    exact = lambda x: x
    full = all(trees.dtype_of(x) == table.dtype for x in jax.tree.leaves(updates))
    if full and module_of(live.factory).partition(".")[0] in ("optax", "tsunax"):
        return run(exact, updates, inner, params)
    # some rules turn an exact complement into a strong float32 and would promote bfloat16 state
    try:
        exact_is_fine = full or avals(exact) == avals(_numbers.as_scalar)
        if exact_is_fine:
            return run(exact, updates, inner, params)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise RuleError(_BRANCHES.format(live.title)) from error
    except (TypeError, AttributeError):  # a function that wants an array, not an object like one
        pass
    return run(_numbers.as_scalar, updates, inner, params)


def _owners(live: Live, params) -> list[int | None]:
    leaves, treedef = jax.tree.flatten(params)
    return _owners_like(
        live, treedef, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    )


@functools.lru_cache(
    maxsize=128
)  # a trace of `init` each: every cut asks, and every trace of a cut rule
def _owners_like(live: Live, treedef, shapes: tuple) -> list[int | None]:
    halves = dict.fromkeys(live.names, 0.5)
    return trees.owners(live.build(halves).init, treedef.unflatten(shapes))[-1]


def _inners(live: Live, state: LiveState, params) -> list:
    """The optax state as each group sees it: shared moments, own counters."""
    if state.groups == 1:
        return [state.inner]
    leaves, treedef = jax.tree.flatten(state.inner)
    owners = _owners(live, params)
    out = [state.inner]
    for counters in state.extra:
        own = iter(counters)
        out.append(
            treedef.unflatten(
                [next(own) if o is None else x for x, o in zip(leaves, owners, strict=True)]
            )
        )
    return out


def _collect(live: Live, state: LiveState, params, runs):
    """Each leaf from the run of its group; counters from every run."""
    if state.groups == 1:
        return *runs[0], ()
    assert state.cut is not None
    of, owners = state.cut.of, _owners(live, params)
    per_run = [jax.tree.leaves(u) for u, _ in runs]
    updates = jax.tree.unflatten(
        jax.tree.structure(runs[0][0]), [per_run[g][k] for k, g in enumerate(of)]
    )
    inners = [jax.tree.leaves(inner) for _, inner in runs]
    inner = jax.tree.unflatten(
        jax.tree.structure(runs[0][1]),
        [inners[0 if o is None else of[o]][j] for j, o in enumerate(owners)],
    )
    counters = tuple(
        tuple(x for x, o in zip(leaves, owners, strict=True) if o is None) for leaves in inners[1:]
    )
    return updates, inner, counters


def recut(state: LiveState, cut: Cut, parents: tuple[int, ...], params) -> LiveState:
    """The same state with finer groups; group i inherits values and counters of the old group
    `parents[i]`.
    """
    leaves = jax.tree.leaves(state.inner)
    owners = _owners(state.live, params)
    first = tuple(x for x, o in zip(leaves, owners, strict=True) if o is None)
    counters = (first, *state.extra)
    table = state.table[..., np.asarray(parents), :]
    # copies: two groups must not donate one buffer
    extra = tuple(tuple(jnp.array(x, copy=True) for x in counters[p]) for p in parents[1:])
    return dataclasses.replace(state, table=table, extra=extra, cut=interned(cut))


# ------------------------------------------------------------------------------------------- live()


@dataclass(frozen=True)
class PatternMask:
    """optax's `mask=` from a pattern: the function that it takes.

    (To optax a str is a tree that is true.)
    """

    where: Any

    def __post_init__(self):
        patterns.compile_where(self.where)

    def __call__(self, params):
        return jax.tree.unflatten(jax.tree.structure(params), patterns.select(self.where, params))


def _is_pattern(x) -> bool:
    return isinstance(x, str) or (
        type(x) in (list, tuple) and bool(x) and all(isinstance(p, str) for p in x)
    )


P = ParamSpec("P")


class LiveFactory(Generic[P]):
    """What `live(factory)` returns: call it like the factory."""

    advice = ""  # what an error about its arguments ends with

    def __init__(
        self, factory: Callable[P, optax.GradientTransformation], static: tuple[str, ...] = ()
    ):
        self.__signature__ = _signature(factory)
        if isinstance(factory, functools.partial) and not factory.args:
            factory = (
                factory.func
            )  # its keywords are defaults of the signature, and this one compares by value
        self.factory, self.static = factory, frozenset(static)
        self.__name__ = self.__qualname__ = name_of(factory)
        self.__module__ = "tsunax.rules"
        self.__doc__ = factory.__doc__

    def __repr__(self):
        return f"live({'.'.join(filter(None, (module_of(self.factory), name_of(self.factory))))})"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
        arguments = self._bind(args, kwargs)
        statics, names, values, schedules = {}, [], [], []
        for name, value in arguments.items():
            parameter = self.__signature__.parameters[name]
            if (
                isinstance(parameter.default, bool)
                and not isinstance(value, (bool, np.bool_))
                and "mask" not in name
            ):
                raise WrongTypeError(
                    message(name, f"{self.__name__}()", trees.describe(value), "True or False")
                )
            if (
                _building.get()
                or name in self.static
                or not _numbers.takes_number(parameter, value)
            ):
                value = PatternMask(value) if "mask" in name and _is_pattern(value) else value
                # a copy: statics are part of what rules are compared by, and must not change under
                # them
                statics[name] = (
                    jax.tree.map(lambda x: x, value) if isinstance(value, (dict, list)) else value
                )
                continue
            if callable(value):
                _numbers.check_schedule(f"{self.__name__}()", name, value)
                schedule = _numbers.split_schedule(value)[0]
            else:
                _numbers.check_number(f"{self.__name__}()", name, value)
                schedule = None
            names.append(name), values.append(value), schedules.append(schedule)
        if _building.get():
            return with_extra(cast(Callable, self.factory)(**statics))
        live = Live(self.factory, statics, tuple(names), tuple(schedules))
        init = LiveInit(live, tuple(values))
        self._try(init)
        return as_rule(init, LiveUpdate(live))

    def _try(self, init: LiveInit) -> None:
        """Build the plain rule once: what its factory does not take is told where it was
        written.
        """
        where = f"{self.__name__}()"
        try:
            init.plain()
        except TsunaxError:
            raise
        except Exception as error:
            raise RuleError(
                message("rule", where, told(error), "arguments that make a rule")
            ) from error

    def _bind(self, args, kwargs) -> dict[str, Any]:
        known = list(self.__signature__.parameters)
        for name in kwargs:
            if name not in known:
                raise HyperparameterError(
                    patterns.unknown("parameter", f"{self.__name__}()", name, known, self.advice)
                )
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            names = f"{self.__name__}({trees.listed(known, 12)})"
            got = str(error).replace("missing a required argument:", "none for")
            raise WrongTypeError(
                message("arguments", f"{self.__name__}()", got, names, self.advice)
            ) from None
        bound.apply_defaults()
        return dict(bound.arguments)


def _signature(factory: Callable) -> inspect.Signature:
    """Raise WrongTypeError for parameters that have no name of their own: each number needs one."""
    expected = "a function with named parameters"
    try:
        signature = inspect.signature(factory)
    except (ValueError, TypeError):
        raise WrongTypeError(
            message("factory", "live()", trees.describe(factory), expected)
        ) from None
    for p in signature.parameters.values():
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            got = f"{name_of(factory)}(..., {p.replace(annotation=p.empty)}, ...)"
            raise WrongTypeError(message("factory", "live()", got, expected))
    return signature


def _no_factory(got: str, fix: str = "") -> WrongTypeError:
    return WrongTypeError(
        message("factory", "live()", got, "a function that makes an optax rule", fix)
    )


def _check_static(static: Any, factory: Callable) -> None:
    known = list(_signature(factory).parameters)
    if isinstance(static, str) or not all(isinstance(name, str) for name in static):
        raise WrongTypeError(
            message("static", "live()", trees.describe(static), "a tuple of names")
        )
    for name in static:
        if name not in known:
            raise HyperparameterError(patterns.unknown("static", "live()", name, known))


def live(
    factory: Callable[P, optax.GradientTransformation], *, static: tuple[str, ...] = ()
) -> LiveFactory[P]:
    """Make the numbers of an optax factory live: arrays in the state that can be read, changed and
    scheduled.

    `live(optax.adam)(1e-3)` trains as `optax.adam(1e-3)` does, to the last bit of float32 for most
    rules, but `ts.adjust(state, learning_rate=1e-4)` changes it without a new compilation. Floats,
    and schedules of floats, become live; counts, flags, masks and dtypes stay part of the program.

    Args:
      factory: any function of numbers that returns an `optax.GradientTransformation`, your own
        chain included.
      static: names of numeric parameters that the factory branches on in Python; they stay
        constants.

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
    if isinstance(factory, optax.GradientTransformation):
        raise _no_factory("a rule", "Call live(...) first: live(optax.adam)(1e-3).")
    if isinstance(factory, LiveFactory):
        raise _no_factory(f"{factory.__name__}, live already", "Use it as it is.")
    if not callable(factory):
        raise _no_factory(trees.describe(factory))
    _check_static(static, factory)
    return LiveFactory(factory, static)
