"""Any optax rule as one that a step can call: it gets the extra arguments of its signature only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import optax

from tsunax._core import Function, PyTree
from tsunax._core.checks import keyword_names
from tsunax.rules.live_rules import Scope, is_live


@dataclass(frozen=True)
class _PlainInit:
    """The init of a rule that does not take `step=`: its schedules have their own clock."""

    init: Function

    def __call__(self, params: PyTree) -> PyTree:
        return _on_own_clocks(self.init(params))

    def blank(self) -> Function:
        return _PlainInit(blank(self.init))


def _on_own_clocks(state: PyTree) -> PyTree:
    def mark(x: Any):
        if not is_live(x):
            return x
        inner, scope = _on_own_clocks(x.inner), Scope(x.paths, own_clock=True)
        return dataclasses.replace(x, inner=inner, scope=scope)

    return jax.tree.map(mark, state, is_leaf=is_live)


@dataclass(frozen=True)
class PlainUpdate:
    """The update of a rule that takes some extra arguments only, or none."""

    update: Function
    takes: tuple[str, ...]

    def __call__(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        given = {name: extra[name] for name in self.takes if name in extra}
        return self.update(updates, state, params, **given)


def as_rule(init: Function, update: Function) -> optax.GradientTransformationExtraArgs:
    """The optax rule with this init and this update, of functions that are typed otherwise."""
    return optax.GradientTransformationExtraArgs(init, update)


def with_extra(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The rule as one that accepts any extra argument; equal rules give equal ones."""
    takes = _extra_arguments(rule)
    if takes is None:
        return as_rule(rule.init, rule.update)
    init = rule.init if "step" in takes else _PlainInit(rule.init)
    return as_rule(init, PlainUpdate(rule.update, takes))


def _extra_arguments(rule: optax.GradientTransformation) -> tuple[str, ...] | None:
    """The names of the extra arguments that an update takes; None: any."""
    if not isinstance(rule, optax.GradientTransformationExtraArgs):
        return ()
    return keyword_names(rule.update, 3)  # behind updates, state, params


def blank(init: Any) -> Function:
    """The init of a rule without the numbers of its live parts, so that it compares by value."""
    return init.blank() if hasattr(init, "blank") else init
