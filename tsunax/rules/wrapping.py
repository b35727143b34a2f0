"""A rule around another rule, made from a function."""

from dataclasses import dataclass
from typing import Any

import jax
import optax

from tsunax._core import Function, PyTree
from tsunax._core.checks import keyword_names
from tsunax.rules.extra_arguments import Init, as_rule, with_extra
from tsunax.rules.inspecting import check_rule


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Wrapped:
    """State of a rule around another rule: the state of the inner rule, and of the wrapper."""

    inner: Any
    own: Any


def _wrap_init(init, init_own, params):
    return Wrapped(init(params), None if init_own is None else init_own(params))


@dataclass(frozen=True)
class _WrapUpdate:
    update: Function
    around: Function
    takes: tuple[str, ...] | None  # extra arguments; None: any

    def __call__(self, updates, state, params=None, **extra):
        def inner(updates: PyTree, at: PyTree = None) -> tuple[PyTree, PyTree]:
            return self.update(updates, state.inner if at is None else at, params, **extra)

        accepted = {
            name: x for name, x in extra.items() if self.takes is None or name in self.takes
        }
        return self.around(inner, updates, state, params, **accepted)


def wrap(
    rule: optax.GradientTransformation, update: Function, init: Function | None = None
) -> optax.GradientTransformationExtraArgs:
    """A rule around another rule: `update` decides when to call the inner one, and how.

    Args:
      rule: the rule inside; its numbers stay live.
      update: `update(inner, updates, state, params, **extra)` returns updates and a state. There
        `inner(updates)` calls the rule inside and returns its updates and its new state;
        `state.inner` is the old one, `state.own` the arrays of the wrapper. Setups share one
        program if `update` is a function of a module.
      init: a function of params that makes the first arrays of the wrapper; None if it has none.

    Raises WrongTypeError for a `rule` that is no rule; RuleError, at setup, for an update that does
    not return updates like params and a state like the old one.

    >>> import dataclasses, tsunax as ts
    >>> def mean_zero(inner, updates, state, params, **extra):
    ...     updates, rest = inner(jax.tree.map(lambda g: g - g.mean(), updates))
    ...     return updates, dataclasses.replace(state, inner=rest)
    >>> rule = wrap(ts.rules.sgd(0.1), mean_zero)
    >>> rule.update(jax.numpy.array([1.0, 3.0]), rule.init(jax.numpy.ones(2)))[0]
    Array([ 0.1, -0.1], dtype=float32)
    """
    check_rule(rule, "wrap()")
    rule = with_extra(rule)
    wrapped_update = _WrapUpdate(rule.update, update, keyword_names(update, 4))
    return as_rule(Init(_wrap_init, (rule.init, init)), wrapped_update)
