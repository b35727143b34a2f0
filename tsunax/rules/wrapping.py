"""A rule around another rule, made of one function."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import optax

from tsunax._core import Function, PyTree, TreeDef, trees
from tsunax._core.checks import keyword_names
from tsunax.errors import RuleError, WrongTypeError
from tsunax.rules.extra_arguments import as_rule, blank, with_extra
from tsunax.rules.inspecting import check_rule
from tsunax.rules.live_rules import factory_name


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Wrapped:
    """State of a rule around another rule: the state of the inner rule, and the wrapper's own."""

    inner: Any
    own: Any


@dataclass(frozen=True)
class _WrapInit:
    init: Function
    own: Function | None

    def __call__(self, params):
        return Wrapped(self.init(params), None if self.own is None else self.own(params))

    def blank(self) -> _WrapInit:
        return _WrapInit(blank(self.init), blank(self.own))


@dataclass(frozen=True)
class _Given:
    """An init that returns copies of given arrays; the blank one returns arrays like them."""

    treedef: TreeDef
    likes: tuple[Any, ...]  # (shape, dtype) of each
    leaves: tuple[Any, ...] | None = field(compare=False)

    @classmethod
    def of(cls, tree: PyTree) -> _Given:
        leaves, treedef = jax.tree.flatten(tree)
        for leaf in leaves:
            if trees.dtype_of(leaf) is None:
                expected = "arrays, a function of params, or None"
                raise WrongTypeError("init", "wrap()", trees.describe(leaf), expected)
        leaves = tuple(map(trees.own, leaves))
        return cls(treedef, tuple((x.shape, x.dtype) for x in leaves), leaves)

    def __call__(self, params: PyTree) -> PyTree:
        if self.leaves is not None:
            return self.treedef.unflatten(map(trees.own, self.leaves))
        return self.treedef.unflatten([jax.lax.full(s, 0, dtype) for s, dtype in self.likes])

    def blank(self) -> _Given:
        return _Given(self.treedef, self.likes, None)


@dataclass(frozen=True)
class _WrapUpdate:
    update: Function
    around: Function
    takes: tuple[str, ...] | None  # extra arguments; None: any

    def __call__(self, updates, state, params=None, **extra):
        def inner(updates: PyTree, at: PyTree = None) -> tuple[PyTree, PyTree]:
            return self.update(updates, state.inner if at is None else at, params, **extra)

        given = {name: x for name, x in extra.items() if self.takes is None or name in self.takes}
        out = self.around(inner, updates, state, params, **given)
        if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Wrapped)):
            got = trees.describe(out)
            if isinstance(out, tuple):
                got = f"({', '.join(map(trees.describe, out))})"
            fix = "Return updates, dataclasses.replace(state, inner=...)."
            expected = "updates and a state like the one given"
            raise RuleError("result", f"{factory_name(self.around)}()", got, expected, fix)
        return out


def wrap(
    rule: optax.GradientTransformation, update: Function, init: Function | PyTree = None
) -> optax.GradientTransformationExtraArgs:
    """A rule around another rule: `update` decides when to call the inner one, and with what.

    Args:
      rule: the rule inside; its numbers stay live.
      update: `update(inner, updates, state, params, **extra)` returns updates and a state. There
        `inner(updates)` calls the rule inside and returns its updates and its new state;
        `state.inner` is the old one, `state.own` the arrays of the wrapper. Setups share one program
        if it is a function of a module.
      init: the first arrays of the wrapper (setups with other values share one program), or a
        function of params that makes them; None if it has none.

    Raises WrongTypeError for what is no rule, function or array; RuleError, at setup, for a
    function that does not return two things.

    >>> import dataclasses, tsunax as ts
    >>> def mean_zero(inner, updates, state, params, **extra):
    ...     updates, rest = inner(jax.tree.map(lambda g: g - g.mean(), updates))
    ...     return updates, dataclasses.replace(state, inner=rest)
    >>> rule = wrap(ts.rules.sgd(0.1), mean_zero)
    >>> rule.update(jax.numpy.array([1.0, 3.0]), rule.init(jax.numpy.ones(2)))[0]
    Array([ 0.1, -0.1], dtype=float32)
    """
    swapped = isinstance(update, optax.GradientTransformation)
    check_rule(rule, "wrap()", "The order is wrap(rule, update)." if swapped else "")
    if not callable(update):
        raise WrongTypeError("update", "wrap()", trees.describe(update), "a function")
    own = init if init is None or callable(init) else _Given.of(init)
    rule = with_extra(rule)
    around = _WrapUpdate(rule.update, update, keyword_names(update, 4))
    return as_rule(_WrapInit(rule.init, own), around)
