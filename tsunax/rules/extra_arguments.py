"""Makes rules of optax callable by a step: a rule gets only the arguments of its signature."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import optax

from tsunax._core import Function, PyTree
from tsunax._core.checks import keyword_names
from tsunax.rules.live_rules import Scope
from tsunax.rules.number_table import map_live
from tsunax.rules.update_bounds import MadeOfRules


@dataclass(frozen=True)
class Init:
    """`f(*args, params)` as the init of a rule. It compares by value, unlike a partial."""

    f: Function
    args: tuple[Any, ...]

    def __call__(self, params: PyTree) -> PyTree:
        return self.f(*self.args, params)


def _plain_init(init: Function, params: PyTree) -> PyTree:
    """The init of a rule that does not take `step=`: its schedules have their own clock."""
    with_own_clock = lambda _, s: dataclasses.replace(s, scope=Scope(s.scope.paths, own_clock=True))
    return map_live(with_own_clock, init(params))


@dataclass(frozen=True)
class PlainUpdate(MadeOfRules):
    """The update of a rule that accepts only the extra arguments in `takes`."""

    update: Function
    takes: tuple[str, ...]

    def __call__(self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Any:
        accepted = {name: extra[name] for name in self.takes if name in extra}
        return self.update(updates, state, params, **accepted)


def as_rule(init: Function, update: Function) -> optax.GradientTransformationExtraArgs:
    """An optax rule from an init and an update with other type annotations."""
    return optax.GradientTransformationExtraArgs(init, update)


def with_extra(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The rule with an update that accepts any extra argument. Equal rules give equal results."""
    is_extended = isinstance(rule, optax.GradientTransformationExtraArgs)
    takes = keyword_names(rule.update, 3) if is_extended else ()  # after updates, state, params
    if takes is None:  # the update accepts any argument
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
