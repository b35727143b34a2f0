"""Rules made of rules: in a chain, per part of the params, or around a rule."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tsunax._core import Function, PyTree, trees
from tsunax._core import patterns as _patterns
from tsunax._core.checks import SEARCHES, accepting, keyword_names
from tsunax.errors import PatternError, RuleError
from tsunax.guard import choose, square_sums
from tsunax.rules import accumulation
from tsunax.rules.clipping import RULES_OF_THE_NORM
from tsunax.rules.extra_arguments import Init, as_rule, blank, with_extra
from tsunax.rules.inspecting import check_rule
from tsunax.rules.leaf_owners import owners_in
from tsunax.rules.live_rules import LiveUpdate
from tsunax.rules.update_bounds import MadeOfRules


def _chain_init(inits, params):
    return tuple(init(params) for init in inits)


@dataclass(frozen=True)
class _ChainUpdate(MadeOfRules):
    updates: tuple[Callable, ...]

    @property
    def begins_with_norm(self) -> bool:
        """Whether the first rule uses the norm of the gradient."""
        first_rules = [f.live for f in self.updates[:1] if isinstance(f, LiveUpdate)]
        return any(live.factory in RULES_OF_THE_NORM for live in first_rules)

    def __call__(self, grads, states, params=None, **extra):
        if extra.get("flush"):  # only for the window at the end of the chain
            grads, last_state = self.updates[-1](grads, states[-1], params, **extra)
            return grads, (*states[:-1], last_state)
        new_states = []
        for update, state in zip(self.updates, states, strict=True):
            grads, state = update(grads, state, params, **extra)
            new_states.append(state)
            # Only the first rule gets gradients. The norms do not describe later updates.
            extra.pop("outside", None)
            extra.pop("grad_norm", None)
        return grads, tuple(new_states)

    def bounded(self, survey, state, bounds):
        for update, own_state in zip(self.updates, state, strict=True):
            bounds = survey.walk(update, own_state, bounds)
        return bounds


def chain(*rules: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Apply rules in order, each to the updates that the previous rule returned.

    It is `optax.chain`, but compares by value. Raises WrongTypeError for an argument that is no
    rule, RuleError for rules after `accumulate`. The order matters:
    `chain(add_decayed_weights(1e-4), adam(1e-3))` is an L2 penalty. After `adam`, which returns
    updates that point downhill, decay would make weights grow. Decoupled decay is `adamw`, or
    `chain(live(optax.scale_by_adam)(), add_decayed_weights(1e-4),
    live(optax.scale_by_learning_rate)(1e-3))`.

    >>> import tsunax as ts
    >>> rule = ts.rules.chain(ts.rules.clip_by_global_norm(1.0), ts.rules.sgd(0.1))
    >>> rule.update == ts.rules.chain(ts.rules.clip_by_global_norm(5.0), ts.rules.sgd(0.2)).update
    True
    """
    for rule in rules:
        check_rule(rule, "chain()")
    rules = tuple(map(with_extra, rules))
    if any(isinstance(rule.update, accumulation.Gather) for rule in rules[:-1]):
        raise RuleError(
            "accumulate",
            "chain()",
            got="a rule behind it",
            expected="it at the end",
            fix="The next rule would run on every call: write accumulate(chain(...), every).",
        )
    inits, updates = zip(*rules, strict=True) if rules else ((), ())
    return as_rule(Init(_chain_init, (inits,)), _ChainUpdate(updates))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PartitionState:
    """State of `partition`."""

    inner: dict[str, Any]  # the state of each rule, by its pattern; it sees its own leaves only


def _flags_by_pattern(patterns: tuple[str, ...], params: PyTree) -> dict[str, tuple[bool, ...]]:
    """For each pattern, which leaves belong to its group."""
    leaves = trees.leaves_with_names(params)
    owners: list = [None] * len(leaves)
    for pattern in patterns:
        flags = _patterns.select(pattern, params, "partition()")
        pairs = zip(owners, flags, strict=True)
        owners = [pattern if owner is None and flag else owner for owner, flag in pairs]
        if pattern not in owners:
            raise PatternError(
                f"group {pattern!r}",
                "partition()",
                got="no leaf that an earlier pattern leaves",
                expected="at least one",
            )
    if None in owners:
        where = trees.access_str("params", leaves[owners.index(None)][1])
        raise PatternError(
            "leaf",
            where,
            got="no pattern that matches it",
            expected="a group",
            fix="Add a last pattern '**'.",
        )
    return {pattern: tuple(owner == pattern for owner in owners) for pattern in patterns}


def _partition_init(patterns, inits, params):
    inner: dict[str, Any] = {}
    for (pattern, flags), init in zip(
        _flags_by_pattern(patterns, params).items(), inits, strict=True
    ):
        with _patterns.group_of(params, flags):
            inner[pattern] = init(trees.partition(params, flags)[0])
    return PartitionState(inner)


@dataclass(frozen=True)
class _PartitionUpdate(MadeOfRules):
    patterns: tuple[str, ...]
    updates: tuple[Callable, ...]

    def in_words(self, inner: Callable[[Any], str]) -> str:
        """The outline of this update in checkpoints of format 1."""
        assign = f"_Assign(patterns={inner(self.patterns)}, labels=None)"
        return f"_PartitionUpdate(assign={assign}, updates={inner(self.updates)})"

    def __call__(self, grads, state, params=None, *, grad=None, outside=0.0, **extra):
        # `grads` are updates of earlier rules, `grad` is the gradient, for line searches
        flags = _flags_by_pattern(self.patterns, grads if params is None else params)
        squares = square_sums(grads)
        searches = {name: extra.pop(name) for name in SEARCHES if extra.get(name) is not None}
        all_updates, inner = list(jax.tree.leaves(grads)), {}
        for pattern, update in zip(self.patterns, self.updates, strict=True):
            group_flags = flags[pattern]
            of_group = lambda tree, group_flags=group_flags: (
                None if tree is None else trees.partition(tree, group_flags)[0]
            )
            pairs = zip(squares, group_flags, strict=True)
            arguments = {
                "outside": sum((s for s, is_in_group in pairs if not is_in_group), outside),
                **extra,
                **({} if grad is None else {"grad": of_group(grad)}),
            }
            arguments |= {
                name: _function_of_group(f, params, group_flags, name == "grad_fn")
                for name, f in searches.items()
            }
            old_inner = inner[pattern] = state.inner[pattern]
            # A flush is only for rules with a window.
            if extra.get("flush") and accumulation.any_emitted(old_inner) is None:
                continue
            with _patterns.group_of(grads if params is None else params, group_flags):
                updates, inner[pattern] = update(
                    of_group(grads), old_inner, of_group(params), **arguments
                )
            group_updates = iter(jax.tree.leaves(updates))
            all_updates = [
                next(group_updates) if is_in_group else u
                for is_in_group, u in zip(group_flags, all_updates, strict=True)
            ]
        return jax.tree.unflatten(jax.tree.structure(grads), all_updates), PartitionState(inner)

    def bounded(self, survey, state, bounds):
        survey.by_element = False
        named_updates = zip(self.patterns, self.updates, strict=True)
        return [x for name, f in named_updates for x in survey.walk(f, state.inner[name], bounds)]


def _function_of_group(f, params, group_flags, is_gradient: bool):
    """A function of all leaves as a function of a group's leaves; all other leaves are fixed."""
    fixed_leaves = trees.partition(params, group_flags)[1]

    @functools.wraps(f)
    def f_of_group(part, *args, **extra):
        out = f(trees.merge(part, fixed_leaves), *args, **extra)
        return trees.partition(out, group_flags)[0] if is_gradient else out

    return accepting(f_of_group, ["outside"])


def partition(
    rules: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Give each part of the params its own rule: `{pattern: rule}`.

    A leaf belongs to the first pattern that matches it. Each rule sees its own leaves only, but
    `clip_by_global_norm` as the first rule of a group takes the norm of all groups.

    Raises PatternError, at setup, for a leaf without a group and a group without a leaf.

    >>> import tsunax as ts
    >>> rule = partition({"head/**": ts.rules.sgd(0.1), "**": ts.rules.adam(1e-3)})
    >>> state = ts.setup(rule, {"body": jnp.ones(2), "head": jnp.ones(2)})
    >>> {k: v for k, v in ts.hyperparams(state).items() if "rate" in k}
    {'learning_rate@**': 0.001, 'learning_rate@head/**': 0.1}
    """
    for pattern, rule in rules.items():
        _patterns.compile_where(pattern, "partition()")
        check_rule(rule, f"partition({{{pattern!r}: ...}})")
    patterns = tuple(rules)
    inits, updates = zip(*map(with_extra, rules.values()), strict=True)
    return as_rule(Init(_partition_init, (patterns, inits)), _PartitionUpdate(patterns, updates))


@dataclass(frozen=True)
class _SkipZeroUpdate(MadeOfRules):
    init: Callable  # without its numbers; `owners_in` matches leaves of the state to params with it
    update: Callable

    def __call__(self, grads, state, params=None, **extra):
        is_nonzero = [jnp.any(g != 0) for g in jax.tree.leaves(grads)]  # NaN is not 0
        updates, new = self.update(grads, state, params, **extra)
        updates = choose(is_nonzero, updates, jax.tree.map(jnp.zeros_like, updates))
        owners = owners_in(self.init, state, grads)
        return updates, choose([o is None or is_nonzero[o] for o in owners], new, state)


def _without_window(init: Function, params: PyTree) -> PyTree:
    state = init(params)
    if accumulation.any_emitted(state) is not None:
        raise RuleError(
            "rule",
            "skip_zero()",
            got="accumulate inside",
            expected="accumulate(skip_zero(rule)), which skips by the gradient of a whole window",
        )
    return state


def skip_zero(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Skip every leaf with a gradient of exactly zero: it keeps its value and its moments.

    JAX gives zeros to leaves that took no part in the loss (another task's head, the other player
    of a GAN), and most rules still move them. A leaf of dead units has a zero gradient, too, and
    is skipped. Counts that leaves share still advance, as for frozen leaves. Put it outermost:
    after `add_decayed_weights` no gradient is zero. WrongTypeError for no optax rule.

    >>> import tsunax as ts
    >>> rule = skip_zero(chain(ts.rules.add_decayed_weights(0.5), ts.rules.sgd(0.5)))
    >>> state = ts.setup(rule, {"a": jnp.ones(1), "b": jnp.ones(1)})
    >>> state, _ = ts.update(state, {"a": jnp.ones(1), "b": jnp.zeros(1)})
    >>> state.params
    {'a': Array([0.25], dtype=float32), 'b': Array([1.], dtype=float32)}
    """
    check_rule(rule, "skip_zero()")
    rule = with_extra(rule)
    return as_rule(
        Init(_without_window, (rule.init,)), _SkipZeroUpdate(blank(rule.init), rule.update)
    )


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
