"""Any optax rule as one that a step can call: it gets the extra arguments of its signature only."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import optax

from tsunax._core import Function, PyTree
from tsunax._core.checks import keyword_names
from tsunax.rules.live_rules import Scope
from tsunax.rules.number_table import map_live


@dataclass(frozen=True)
class Init:
    """`f(*args, params)` as the init of a rule, which compares by value, as no partial does."""

    f: Function
    args: tuple[Any, ...]

    def __call__(self, params: PyTree) -> PyTree:
        return self.f(*self.args, params)


def _plain_init(init: Function, params: PyTree) -> PyTree:
    """The init of a rule that does not take `step=`: its schedules have their own clock."""
    own = lambda _, s: dataclasses.replace(s, scope=Scope(s.paths, own_clock=True))
    return map_live(own, init(params))


@dataclass(frozen=True)
class PlainUpdate:
    """The update of a rule that takes some extra arguments only, or none."""

    update: Function
    takes: tuple[str, ...]

    def __call__(self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Any:
        given = {name: extra[name] for name in self.takes if name in extra}
        return self.update(updates, state, params, **given)

    def bounded(self, seen: Any, state: PyTree, bounds: list[Any]) -> list[Any]:
        return seen.walk(self.update, state, bounds)


def as_rule(init: Function, update: Function) -> optax.GradientTransformationExtraArgs:
    """The optax rule with this init and this update, of functions that are typed otherwise."""
    return optax.GradientTransformationExtraArgs(init, update)


def with_extra(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The rule as one that accepts any extra argument; equal rules give equal ones."""
    takes: tuple[str, ...] | None = ()
    if isinstance(rule, optax.GradientTransformationExtraArgs):
        takes = keyword_names(rule.update, 3)  # behind updates, state, params
    if takes is None:
        return as_rule(rule.init, rule.update)
    init = rule.init if "step" in takes else Init(_plain_init, (rule.init,))
    return as_rule(init, PlainUpdate(rule.update, takes))


def blank(init: Any) -> Any:
    """The init of a rule without the numbers of its live parts, so that it compares by value."""
    if hasattr(init, "blank"):
        return init.blank()
    if type(init) is tuple:
        return tuple(map(blank, init))
    if not dataclasses.is_dataclass(init) or not type(init).__module__.startswith("tsunax."):
        return init
    parts = {f.name: blank(getattr(init, f.name)) for f in dataclasses.fields(init)}
    return dataclasses.replace(init, **parts)  # pyright: ignore[reportArgumentType]
