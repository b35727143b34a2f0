"""A rule as text: the call that makes it."""

from __future__ import annotations

import inspect
from typing import Any

import optax

from tsunax._core import trees
from tsunax.rules.live_rules import LiveUpdate


def text_of(init: Any, update: Any) -> str:
    """The call that makes a rule, or the name of a rule that tsunax does not know.

    The call has the first argument, and those that are not at their defaults.
    """
    if isinstance(update, LiveUpdate):
        return _text_of_live(init, update.live)
    return update.text(init) if hasattr(update, "text") else f"{name_of_update(update)}(...)"


def _text_of_live(init: Any, live: Any) -> str:
    numbers = dict(zip(live.names, getattr(init, "values", ()), strict=False))
    given, shown = {**live.statics, **numbers}, []
    for i, p in enumerate(inspect.signature(live.factory).parameters.values()):
        value = given.get(p.name, p.default)
        plain = isinstance(value, (bool, int, float, str, tuple))
        is_default = value is p.default or (plain and value == p.default)
        if p.name in given and (i == 0 or not is_default):
            shown.append(f"{p.name}={_show(value)}")
    return f"{live.title}({', '.join(shown)})"


def _show(value: Any) -> str:
    if isinstance(value, optax.GradientTransformation):
        return text_of(*value)
    return getattr(value, "__name__", None) or ("traced" if trees.is_traced(value) else repr(value))


def name_of_update(update: Any) -> str:
    while type(update).__module__.startswith("tsunax.") and hasattr(update, "update"):
        update = getattr(update, "around", update.update)
    if isinstance(update, LiveUpdate):
        return update.live.title
    name = getattr(
        update, "__qualname__", type(update).__name__.strip("_").removesuffix("Update").lower()
    )
    return name.partition(".<locals>")[0].removesuffix(".update")
